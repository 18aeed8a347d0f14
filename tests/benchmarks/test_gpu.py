"""The table of the GPU benchmark; the benchmark itself needs a GPU."""

from __future__ import annotations

import contextlib
import io
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks import gpu
from benchmarks.gpu_worker import CASES, REFERENCE, Case, _batched, loaded
from benchmarks.process import WorkerError
from benchmarks.results import Result


def measured(contender: str, median: float, error: float) -> Result:
    bursts = [{"median_ms": median, "minimum_ms": median, "calls": 20}]
    return Result("resnet50_1", 0, contender, bursts, first_call_s=1.0, error=error)


def printed(*results: Result) -> str:
    text = io.StringIO()
    by_name = {result.contender: result for result in results}
    Console(file=text, width=160).print(gpu.table({results[0].model: by_name}, "a GPU"))
    return text.getvalue()


def test_table_shows_met_goals() -> None:
    text = printed(
        measured("eager", 4.0, 1e-3), measured("max-autotune", 2.0, 1e-3), measured("tvmify", 3, 1)
    )
    assert "1.50 > 1.0" in text  # of the time of max-autotune
    assert "0.75 > 0.6" in text  # of eager's
    assert "1000.00 > 2.0" in text  # of eager's error
    assert "0.50 met" in printed(
        measured("eager", 4.0, 1e-3),
        measured("max-autotune", 2.0, 1e-3),
        measured("tvmify", 1.0, 1e-3),
    )


def test_failed_case_is_not_measured() -> None:
    missing = Result("resnet50_1", 0, "tvmify", reason="UnsupportedTarget")
    text = printed(measured("eager", 4, 1), measured("max-autotune", 2, 1), missing)
    assert text.count("not measured") == 3


def test_batches_repeat_the_example() -> None:
    image = torch.randn(1, 3, 4, 4)
    batch = _batched(image, CASES["resnet50_32"])
    assert batch.shape == (32, 3, 4, 4)
    torch.testing.assert_close(batch[7], image[0].half())
    tokens = torch.arange(6).reshape(1, 6)
    assert _batched(tokens, Case("", batch=2, tokens=8)).tolist() == [[0, 1, 2, 3, 4, 5, 0, 1]] * 2


class _Worker(contextlib.AbstractContextManager):
    """A fake worker, which fails if `failing` names its contender."""

    failing = ""

    def __init__(self, command: list[str], folder: Path, contender: str) -> None:
        self.contender = contender

    def __exit__(self, *error: object) -> None:
        pass

    def answer(self, patience: float) -> dict[str, float]:
        if self.contender == self.failing:
            raise WorkerError("out of memory")
        return {"first_call_s": 1.0, "error": 0.0}


@pytest.mark.parametrize(
    ("failing", "reasons"),
    [
        ("", ["", ""]),
        ("tvmify", ["", "out of memory"]),
        (REFERENCE, ["out of memory", "out of memory"]),
    ],
)
def test_without_a_reference_no_contender_is_measured(
    monkeypatch: pytest.MonkeyPatch, failing: str, reasons: list[str]
) -> None:
    monkeypatch.setattr(gpu, "Worker", _Worker)
    monkeypatch.setattr(_Worker, "failing", failing)
    with contextlib.ExitStack() as stack:
        one = gpu.Comparison("mlp_1", ["eager", "tvmify"], 5, stack)
        gpu.get_ready([one], [REFERENCE], time.monotonic())
        gpu.get_ready([one], ["eager", "tvmify"], time.monotonic())
        assert [result.reason or "" for result in one.results.values()] == reasons
        assert sorted(one._ready) == [
            name for name, reason in zip(one.results, reasons, strict=True) if not reason
        ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_reported() -> None:
    with pytest.raises(SystemExit, match="no NVIDIA GPU"):
        gpu.main(["--cases", "mlp*"])


def test_images_have_their_channels_last_and_caches_do_not() -> None:
    _, (image,) = loaded(CASES["resnet50_1"], "cpu")
    assert image.is_contiguous(memory_format=torch.channels_last)
    _, (_, *cache) = loaded(CASES["gpt2_decode_1"], "cpu")
    assert len(cache) == 24 and all(tensor.is_contiguous() for tensor in cache)
