"""silero-vad: a TorchScript file with state in attributes, branches on it, and an LSTM."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tvmify import SaveError, save, tvmify

pytestmark = pytest.mark.usefixtures("inference")
#: Samples of a chunk, by the sampling rate.
CHUNK = {16000: 512, 8000: 256}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread: a chunk is too small for two, which wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def silero() -> Any:
    """Load the voice detector; skip the test without its package."""
    spec = importlib.util.find_spec("silero_vad")
    if spec is None or spec.origin is None:
        pytest.skip("the package silero-vad is not installed")
    return torch.jit.load(str(Path(spec.origin).parent / "data" / "silero_vad.jit")).eval()


def speech(seconds: float, rate: int) -> Tensor:
    """Return a sound that resembles speech: bursts of harmonics, pauses, and background noise."""
    sound = torch.randn(int(seconds * rate)) * 0.003
    start = 0.3
    while start < seconds - 1:
        length = float(torch.rand(()) * 0.5 + 0.15)
        time = torch.arange(int(length * rate)) / rate
        pitch = float(torch.rand(()) * 120 + 90) * (1 + 0.1 * torch.sin(2 * math.pi * 3 * time))
        phase = 2 * math.pi * torch.cumsum(pitch / rate, 0)
        tones = [torch.sin(k * phase) / k for k in range(1, 20)]
        burst = torch.stack(tones).sum(0) * torch.hann_window(len(time)) * 0.2
        first = int(start * rate)
        sound[first : first + len(burst)] += burst
        start += length + float(torch.rand(()) * 0.4 + 0.02) + (1.5 if torch.rand(()) < 0.1 else 0)
    return sound


def assert_same(ours: Any, theirs: Any, chunks: Tensor, rate: int) -> list[float]:
    """Compare probabilities and state chunk by chunk; return the probabilities."""
    found = []
    for i, chunk in enumerate(chunks):
        result, expected = ours(chunk, rate), theirs(chunk, rate)
        assert torch.allclose(result, expected, rtol=1e-3, atol=1e-5), i
        assert torch.allclose(ours._state, theirs._state, rtol=1e-3, atol=1e-4), i
        assert torch.equal(ours._context, theirs._context), i
        found.append(float(expected))
    return found


@pytest.mark.thorough
def test_audio_gives_the_probabilities_of_eager() -> None:
    ours, theirs = tvmify(silero(), strict=True), silero()
    found = assert_same(ours, theirs, speech(20, 16000).split(CHUNK[16000])[:-1], 16000)
    assert min(found) < 0.1
    assert max(found) > 0.5
    info = ours.cache_info()
    assert (info.builds, info.entries) == (2, 2)  # the first call has no state yet
    assert "runs by regions" in str(ours.explain())
    # other methods work on the same state, and so does another rate, which begins a new one
    for model in (ours, theirs):
        model.reset_states()
    assert len(ours._state) == 0
    assert_same(ours, theirs, speech(2, 16000).split(CHUNK[16000])[:9], 16000)
    assert_same(ours, theirs, speech(2, 8000).split(CHUNK[8000])[:9], 8000)
    audio = speech(2, 16000)
    assert torch.equal(ours.audio_forward(audio, 16000), theirs.audio_forward(audio, 16000))
    assert torch.equal(ours._state, theirs._state)


def test_errors_match_eager() -> None:
    ours, theirs = tvmify(silero()), silero()
    for wrong in (torch.zeros(100), torch.zeros(1, 1, 512), torch.zeros(700)):
        with pytest.raises(torch.jit.Error) as expected:
            theirs(wrong, 16000)
        with pytest.raises(torch.jit.Error) as found:
            ours(wrong, 16000)
        assert str(expected.value).splitlines()[-1] == str(found.value).splitlines()[-1]


def test_it_cannot_be_saved_yet(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="regions"):
        save(tvmify(silero()), tmp_path / "vad.pt", example_inputs=(torch.zeros(512), 16000))
