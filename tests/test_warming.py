"""Programs built ahead of time, and a service that then builds nothing."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim

import tvmify
from tvmify import WarmUpError
from tvmify.artifact import Seconds
from tvmify.dispatch.progress import Stages
from tvmify.dispatch.recording import Recorded
from tvmify.dispatch.recording.modes import modes_now
from tvmify.warming.worker import Subjects, warm

MODELS = """
import os, torch
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

class Steps(nn.Module):
    def forward(self, x):
        return sum(x[..., step] for step in range(x.size(-1)))

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
    on_miss = "error"

    def __init__(self):
        super().__init__()
        options = {"on_miss": self.on_miss, "compare": False}
        self.first = tvmify.tvmify(Net(), **options)
        self.second = tvmify.tvmify(Flow(), **options)

class Dying(nn.Module):
    def forward(self, x):
        if x.shape[0] == 2:
            os.kill(os.getpid(), 9)
        return x + x.shape[0]

def make():
    print("made")  # which is no answer
    return Dying()

def tuned():
    return tvmify.tvmify(Net(), tune="quick", on_miss="error")

def in_memory():
    return tvmify.tvmify(Net(), cache=False)

def broken():
    raise KeyError("weights")

double = tvmify.tvmify(lambda x: torch.relu(x) * 2)
number = 5
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "my_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Stages, "threads", None)
    yield tmp_path
    sys.modules.pop("my_models", None)


def line_of(module: str, rows: int = 3, **changed: Any) -> Recorded:
    tree = {"tensor": [rows, 4], "dtype": "float32", "device": "cpu"}
    with torch.no_grad():
        return Recorded(module, "forward", [tree], {}, modes_now() | changed)


def warm_here(subject: str, recorded: Recorded) -> dict[str, Any]:
    """Run `tvmify.warming.worker` in this process instead of a separate one."""
    return warm(Subjects(subject), recorded, None, threads=1)


# ------------------------------------------------------------------------------- all processes


def serve(text: str, **environment: str) -> Any:
    """Run a service in a separate process; return its JSON output."""
    script = "import json, sys, torch\nimport my_models\n" + textwrap.dedent(text)
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | environment,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.thorough
def test_warmed_service_builds_nothing(models: Path) -> None:
    calls = """
    import tvmify
    pipeline = my_models.Pipeline().eval()
    net, flow = pipeline.first, pipeline.second
    x = torch.ones(3, 4)
    tvmify.tvmify(my_models.double, on_miss="eager")(x)
    with torch.inference_mode():
        net(x)
        net(x[:1], times=2.0)
        flow(x)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        net(x)
    infos = [net.cache_info(), flow.cache_info()]
    print(json.dumps([[i.builds, i.disk_hits] for i in infos] + ["tvm" in sys.modules]))
    """
    # `on_miss="error"` would stop at the first call.
    eager = "my_models.Pipeline.on_miss = 'eager'" + textwrap.dedent(calls)
    serve(eager, TVMIFY_RECORD="signatures.jsonl", PYTHONWARNINGS="ignore")
    warmed = tvmify.warm_cache("my_models:Pipeline", file="signatures.jsonl", jobs=2)
    assert [outcome.source for outcome in warmed.outcomes] == ["built"] * 4
    assert warmed.notes[-1] == "1 signatures are for other modules than Flow, Net"
    assert serve(calls, PYTHONWARNINGS="ignore") == [[0, 3], [0, 2], False]


WITH_CACHE = """
import tvmify
from transformers import GPT2Config, GPT2LMHeadModel

def make(on_miss="error"):
    sizes = {"vocab_size": 96, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
    network = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)).eval()
    return tvmify.tvmify(network, on_miss=on_miss, compare=False)
"""


@pytest.mark.filterwarnings("ignore")  # raised by transformers
def test_calls_with_a_cache_are_warmed(models: Path) -> None:
    pytest.importorskip("transformers")
    (models / "my_models.py").write_text(WITH_CACHE)
    calls = """
    from transformers import DynamicCache
    net = my_models.make()
    cache, tokens = DynamicCache(config=net.config), torch.full((1, 5), 3)
    with torch.no_grad():
        net(tokens, past_key_values=cache)
        net(tokens[:, :1], past_key_values=cache)
    info = net.cache_info()
    print(json.dumps([info.builds, info.disk_hits, info.eager]))
    """
    eager = calls.replace("make()", "make('eager')")
    recording = {"TVMIFY_RECORD": "signatures.jsonl", "PYTHONWARNINGS": "ignore"}
    assert serve(eager, **recording) == [0, 0, 2]
    warmed = tvmify.warm_cache("my_models:make", file="signatures.jsonl", jobs=1)
    assert warmed.notes == []
    assert [outcome.source for outcome in warmed.outcomes] == ["built"] * 2
    assert all("GPT2LMHeadModel with a cache(" in o.signature for o in warmed.outcomes)
    assert serve(calls, PYTHONWARNINGS="ignore") == [0, 2, 0]


def test_warmed_dim_serves_all_sizes_within_its_limits(models: Path) -> None:
    warmed = tvmify.warm_cache("my_models:Net", [(Dim("rows", max=80), 4)], jobs=1)
    assert [outcome.source for outcome in warmed.outcomes] == ["built"] * 2  # up to 64, and more
    assert [outcome.reason for outcome in warmed.outcomes] == [""] * 2
    make = importlib.import_module("my_models").Net
    shapes = {"x": {0: Dim("rows", max=80)}}
    net = tvmify.tvmify(make().eval(), on_miss="error", dynamic_shapes=shapes)
    with torch.inference_mode():
        for rows in 2, 64, 65, 80:
            net(torch.ones(rows, 4))
        with pytest.raises(tvmify.CacheMiss):
            net(torch.ones(81, 4))
    assert (net.cache_info().builds, net.cache_info().disk_hits) == (0, 2)


def test_invariable_dim_is_built_for_one_shape(models: Path) -> None:
    warmed = tvmify.warm_cache("my_models:Steps", [(1, 1, Dim("width", max=16))], jobs=1)
    assert warmed.is_complete
    assert warmed.outcomes[0].reason.startswith("for this shape alone: ")


def test_dying_worker_loses_one_signature(models: Path) -> None:
    shapes = [[(rows, 4)] for rows in (1, 2, 3)]
    done: list[str] = []
    warmed = tvmify.warm_cache(
        "my_models:make", *shapes, jobs=1, on_outcome=lambda outcome: done.append(outcome.source)
    )
    assert done == ["built", "eager", "built"]
    assert "SIGKILL" in warmed.outcomes[1].reason
    assert not warmed.is_complete
    assert warmed.notes == [
        "my_models:make was in training mode: switched to evaluation mode",
        "my_models:make is not decorated, so the default options were used",
    ]
    for rows in (1, 3):
        assert warm_here("my_models:make", line_of("Dying", rows))["source"] == "loaded from disk"


def test_interrupt_keeps_finished_programs(models: Path, cache_directory: Path) -> None:
    shapes = [argument for rows in range(1, 65) for argument in ("--shape", f"{rows},4")]
    command = [sys.executable, "-m", "tvmify", "warmup", "my_models:Net"]
    process = subprocess.Popen(
        [*command, *shapes, "--jobs", "1", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert any("built" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    done = json.loads(output)["outcomes"]
    assert 1 <= len(done) < 64
    entries = [path for path in cache_directory.iterdir() if len(path.name) == 64]
    assert len(entries) >= len(done)
    assert not list(cache_directory.glob(".new-*"))


def test_signatures_must_match_the_subject(models: Path) -> None:
    (models / "signatures.jsonl").write_text(line_of("Other").to_json())
    with pytest.raises(WarmUpError, match="is Net, but the signatures are for Other"):
        tvmify.warm_cache("my_models:Net", file="signatures.jsonl")
    with pytest.raises(WarmUpError, match="there are no signatures"):
        tvmify.warm_cache("my_models:Net")
    with pytest.raises(FileNotFoundError):
        tvmify.warm_cache("my_models:Net", file="nowhere.jsonl")


# --------------------------------------------------------------------------------- one process


def test_tuning_uses_the_thread_count_of_the_recording(models: Path) -> None:
    before = torch.get_num_threads()
    threads = before + 1
    assert Subjects("my_models:tuned").threads_count
    outcome = warm_here("my_models:tuned", line_of("Net", threads=threads))
    assert outcome["source"] == "built"
    assert torch.get_num_threads() == before
    subjects = Subjects("my_models:tuned")
    net = subjects.dispatchers(line_of("Net"))[0]
    try:
        torch.set_num_threads(threads)
        with torch.no_grad():
            net((torch.ones(3, 4),), {})
    finally:
        torch.set_num_threads(before)
    assert net.cache_info().disk_hits == 1


def test_eager_outcomes_have_a_reason(models: Path) -> None:
    with pytest.warns(tvmify.TvmifyWarning):
        outcome = warm_here("my_models:Sized", line_of("Sized"))
    assert outcome["source"] == "eager"
    assert "depends on the values of tensors" in outcome["reason"]
    assert outcome["signature"] == "Sized(float32[3, 4])"
    outcome = warm_here("my_models:Net", line_of("Net", training=True))
    assert "training mode" in outcome["reason"]
    wrong = line_of("Net")
    wrong.args[0]["dtype"] = "load"
    assert "'load' is not a dtype" in warm_here("my_models:Net", wrong)["reason"]


def test_faster_eager_is_reported(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVMIFY_COMPARE", "1")
    monkeypatch.setattr("tvmify.dispatch.verdict.compare", lambda *_: Seconds(2.0, 1.0))
    outcome = warm_here("my_models:double", line_of(""))
    assert (outcome["source"], outcome["reason"]) == ("eager", "eager PyTorch is faster here")


def test_a_function_can_be_the_subject(models: Path) -> None:
    outcome = warm_here("my_models:double", line_of(""))
    assert outcome["source"] == "built"
    assert outcome["bytes"] > 1000
    assert warm_here("my_models:double", line_of(""))["source"] == "loaded from disk"


def test_code_for_another_target(models: Path) -> None:
    target = {"kind": "llvm", "mattr": ["+avx2"]}
    outcome = warm(Subjects("my_models:Net"), line_of("Net"), target, threads=1)
    assert outcome["source"] == "built"


@pytest.mark.parametrize(
    ("subject", "message"),
    [
        ("my_models", "expected package.module:attribute"),
        ("no_such_module:Net", "No module named 'no_such_module'"),
        ("my_models:nothing", "has no attribute 'nothing'"),
        ("my_models:number", "is a int: expected"),
        ("my_models:broken", "KeyError: 'weights'"),
        ("my_models:in_memory", "stores no programs on disk"),
    ],
)
def test_invalid_subject(models: Path, subject: str, message: str) -> None:
    with pytest.raises(WarmUpError, match=message):
        Subjects(subject)


def test_a_module_that_cannot_be_imported_is_named(models: Path) -> None:
    (models / "fails.py").write_text("1 / 0")
    with pytest.raises(WarmUpError, match=r"'fails:Net' cannot be imported: ZeroDivisionError"):
        Subjects("fails:Net")


def test_subject_must_be_a_name() -> None:
    with pytest.raises(tvmify.OptionError, match="subject is a ReLU: name something"):
        tvmify.warm_cache(torch.nn.ReLU(), [(3,)])  # type: ignore[arg-type]
    with pytest.raises(tvmify.OptionError, match="unknown target 'gpu'"):
        tvmify.warm_cache("a:b", [(3,)], target="gpu")
