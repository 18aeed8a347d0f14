"""Programs that are built ahead of time, and a service that then builds nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import tvmify
from tvmify import WarmUpError
from tvmify.recording import Recorded

MODELS = """
import os, time, torch
from torch import nn
import tvmify

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, times: float = 1.0):
        return torch.relu(self.linear(x)) * times

class Sized(nn.Module):
    def forward(self, x):
        return x[x > 0]

class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = torch.relu(self.a(x)) * 2 + 1
        if bool(x.sum() > 0):
            x = torch.tanh(self.b(x)) * 3 + 2
        return x

class Pipeline(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = tvmify.tvmify(Net()), tvmify.tvmify(Flow())

def make():
    print("made")  # which is no answer
    return tvmify.tvmify(Net(), on_miss="error", compare=False)

def tuned():
    return tvmify.tvmify(Net(), tune="quick", on_miss="error")

def in_memory():
    return tvmify.tvmify(Net(), cache=False)

def broken():
    raise KeyError("weights")

class Dying(nn.Module):
    def forward(self, x):
        if x.shape[0] == 2:
            os.kill(os.getpid(), 9)
        return x + x.shape[0]

double = tvmify.tvmify(lambda x: torch.relu(x) * 2)
number = 5
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sources(warmed: tvmify.Warmed) -> list[str]:
    return sorted(outcome.source for outcome in warmed.outcomes)


def serve(text: str) -> Any:
    """Run a service in a process of its own; return what it prints as JSON."""
    script = "import json, sys, torch\nimport my_models\n" + textwrap.dedent(text)
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_a_service_builds_nothing_after_its_calls_were_recorded(models: Path) -> None:
    recorded = models / "signatures.jsonl"
    calls = """
    net, flow = my_models.make().eval(), my_models.Pipeline().eval().second
    x = torch.ones(3, 4)
    with torch.inference_mode():
        net(x)
        net(x[:1], times=2.0)
        flow(x)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        net(x)
    torch.set_default_dtype(torch.float64)
    net(x)
    infos = [net.cache_info(), flow.cache_info()]
    print(json.dumps([[i.builds, i.disk_hits] for i in infos] + ["tvm" in sys.modules]))
    """
    environment = {"TVMIFY_RECORD": str(recorded)}
    os.environ |= environment
    try:
        # Eager, to write down all of them: `on_miss="error"` would stop at the first.
        serve(
            calls.replace("net, flow", "import tvmify\nnet, flow", 1).replace(
                "my_models.make()", 'tvmify.tvmify(my_models.Net(), on_miss="eager")'
            )
        )
    finally:
        del os.environ["TVMIFY_RECORD"]
    assert len(recorded.read_text().split("\n\n")) == 5
    warmed = tvmify.warm_cache("my_models:make", file=recorded, jobs=2)
    assert sources(warmed) == ["built"] * 4
    assert warmed.notes[-1] == "1 signatures are of other modules than Net"
    warmed = tvmify.warm_cache("my_models:Pipeline", file=recorded, jobs=1)
    assert sources(warmed) == ["built"] + ["loaded from disk"] * 4
    assert serve(calls) == [[0, 4], [0, 2], False]


def test_what_is_on_disk_is_not_built_again(models: Path) -> None:
    done: list[str] = []
    for _ in range(2):
        warmed = tvmify.warm_cache(
            "my_models:Net", [(3, 4)], on_outcome=lambda outcome: done.append(outcome.source)
        )
        assert warmed.is_complete
    assert done == ["built", "loaded from disk"]
    assert warmed.notes == [
        "my_models:Net was in training mode; it was put into evaluation mode",
        "my_models:Net is not decorated; it was, with the default options",
    ]
    assert warmed.outcomes[0].signature == "(float32[3, 4])"
    assert warmed.outcomes[0].bytes > 1000


def test_tuned_programs_are_those_of_the_threads_of_the_service(models: Path) -> None:
    with torch.no_grad():
        modes = Recorded.of("Net", "forward", (torch.ones(3, 4),), {}, training=False).modes
    threads = modes["threads"] + 1
    line = Recorded(
        "Net",
        "forward",
        [{"tensor": [3, 4], "dtype": "float32", "device": "cpu"}],
        {},
        modes | {"threads": threads},
    )
    (models / "signatures.jsonl").write_text(line.to_json())
    tvmify.warm_cache("my_models:tuned", file="signatures.jsonl")
    assert (
        serve(f"""
    torch.set_num_threads({threads})
    net = my_models.tuned().eval()
    with torch.no_grad():
        net(torch.ones(3, 4))
    print(json.dumps(net.cache_info().builds))
    """)
        == 0
    )


def test_what_stays_in_eager_says_why(models: Path) -> None:
    warmed = tvmify.warm_cache("my_models:Sized", [(3, 4)], [(2, 4)], jobs=1)
    assert not warmed.is_complete
    assert sources(warmed) == ["eager", "eager"]
    assert "depends on the values of tensors" in warmed.outcomes[0].reason


def test_a_process_that_dies_takes_one_signature_with_it(models: Path) -> None:
    warmed = tvmify.warm_cache("my_models:Dying", [(1, 4)], [(2, 4)], [(3, 4)], jobs=1)
    assert [outcome.source for outcome in warmed.outcomes] == ["built", "eager", "built"]
    assert "SIGKILL" in warmed.outcomes[1].reason


def test_signatures_in_training_mode_are_not_built(models: Path) -> None:
    recorded = Recorded.of("Net", "forward", (torch.ones(3, 4),), {}, training=True)
    (models / "signatures.jsonl").write_text(recorded.to_json())
    warmed = tvmify.warm_cache("my_models:Net", file="signatures.jsonl")
    assert "training mode" in warmed.outcomes[0].reason


def test_a_function_can_be_the_subject(models: Path) -> None:
    warmed = tvmify.warm_cache("my_models:double", [(3, 4)])
    assert sources(warmed) == ["built"]


@pytest.mark.parametrize(
    ("subject", "message"),
    [
        ("my_models", "expected package.module:attribute"),
        ("no_such_module:Net", "No module named 'no_such_module'"),
        ("my_models:nothing", "has no attribute 'nothing'"),
        ("my_models:number", "is a int: expected"),
        ("my_models:broken", "KeyError: 'weights'"),
        ("my_models:in_memory", "keeps no programs on disk"),
    ],
)
def test_a_subject_that_is_none(models: Path, subject: str, message: str) -> None:
    with pytest.raises(WarmUpError, match=message):
        tvmify.warm_cache(subject, [(3, 4)])


def test_there_must_be_signatures(models: Path) -> None:
    with pytest.raises(WarmUpError, match="there are no signatures"):
        tvmify.warm_cache("my_models:Net")
    recorded = Recorded.of("Other", "forward", (), {}, training=False)
    (models / "signatures.jsonl").write_text(recorded.to_json())
    with pytest.raises(WarmUpError, match="is Net, and the signatures are of Other"):
        tvmify.warm_cache("my_models:Net", file="signatures.jsonl")


def test_an_interrupt_leaves_what_is_done(models: Path, cache_directory: Path) -> None:
    shapes = [argument for rows in range(1, 9) for argument in ("--shape", f"{rows},4")]
    command = [sys.executable, "-c", "from tvmify.cli import app; app()", "warmup", "my_models:Net"]
    process = subprocess.Popen(
        [*command, *shapes, "--jobs", "1", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "built" in line:
            break
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    done = json.loads(output)["outcomes"]
    assert 1 <= len(done) < 8
    entries = [path for path in cache_directory.iterdir() if len(path.name) == 64]
    assert len(entries) >= len(done)
    assert not list(cache_directory.glob(".new-*"))
