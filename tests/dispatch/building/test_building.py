"""The process that compiles in the background."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tvmify import TvmifyWarning, UnsupportedOperator, compiler
from tvmify.artifact.settings import BuildSettings
from tvmify.compiler.frontend.sharing import sharing
from tvmify.dispatch import building
from tvmify.dispatch.building import Builder, crossing
from tvmify.target import Target


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.large = nn.Embedding(10000, 4)

    def forward(self, x: torch.Tensor) -> Pair:
        return Pair(self.second(torch.relu(self.first(x))), x + self.large.weight[0])


@pytest.fixture
def program(inference: None) -> Any:
    return torch.export.export(Net().eval(), (torch.ones(3, 4),))


def test_packed_program_omits_weights_and_user_classes(
    program: Any,
) -> None:
    content = crossing.pack(program)
    assert len(content) < 100_000  # the embedding alone has more
    read = crossing.unpack(content)
    assert read.call_spec.out_spec is not None
    assert read.call_spec.out_spec.type is tuple
    assert read.graph_module.code == program.graph_module.code
    weights = read.state_dict
    assert weights["first.weight"] is weights["second.weight"]
    assert weights["large.weight"].stride() == (4, 1)
    here = compiler.compile(program, Target.parse('{"kind": "llvm"}'), threads=1)
    there = compiler.compile(read, Target.parse('{"kind": "llvm"}'), threads=1)
    fields = here.description() | {"report": None}
    assert fields == there.description() | {"report": None} | crossing.output_structure(program)


class Views(nn.Module):
    """Views of an argument, a buffer and a result, and writes to such views."""

    rows: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(5, 4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        self.rows[1].add_(1)
        y[0].mul_(2)
        z = x * 2
        return x, z, z[:, 0], z.transpose(0, 1)[1:], self.rows[1:], x[:, 1:]


@pytest.mark.parametrize("sizes", [None, {"x": {0: torch.export.Dim("n", max=64)}, "y": None}])
def test_packed_program_shows_shared_memory(inference: None, sizes: Any) -> None:
    arguments = torch.ones(3, 5, 4), torch.ones(3, 4)
    program = torch.export.export(Views().eval(), arguments, dynamic_shapes=sizes)
    known = sharing(program)
    assert len(known.written) == 2
    assert sharing(crossing.unpack(crossing.pack(program))) == known


def test_truncated_messages(tmp_path: Any) -> None:
    path = tmp_path / "pipe"
    with path.open("wb") as pipe:
        crossing.send(pipe, crossing.Message({"a": 1}, b"content"))
    content = path.read_bytes()
    with path.open("rb") as pipe:
        assert crossing.receive(pipe) == ({"a": 1}, b"content")
    path.write_bytes(content[:-1])
    with path.open("rb") as pipe, pytest.raises(EOFError):
        crossing.receive(pipe)


@pytest.mark.parametrize("executable", ["/bin/false", "/nowhere/python", ""])
def test_missing_builder_process_warns_once(
    executable: str, program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    builder = Builder()
    target = Target.parse('{"kind": "llvm"}')
    with pytest.warns(TvmifyWarning, match="compiled in a thread of this process"):
        assert builder.build(program, target, BuildSettings()) is None
    assert builder.build(program, target, BuildSettings()) is None  # without a warning
    assert not builder.is_running


def test_refusals_round_trip(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = {"refused": ["UnsupportedOperator", [["aten.foo.default"], "a detail"]]}
    monkeypatch.setattr(Builder, "_ask", lambda *_: crossing.Message(refused))
    with pytest.raises(UnsupportedOperator, match=r"aten\.foo\.default: a detail"):
        Builder().build(program, Target.parse('{"kind": "llvm"}'), BuildSettings())


def test_builder_process_lifecycle() -> None:
    script = """
    import os, signal, sys, tempfile, time, torch
    from torch import nn
    from tvmify.dispatch.building import background
    from tvmify import tvmify
    signal.alarm(250)
    os.chdir(tempfile.mkdtemp())
    if sys.version_info[:3] != (3, 13, 0):  # it fails at any unknown attribute of a module then
        os.rmdir(os.getcwd())
    sys.path.insert(0, "relative")
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    net = tvmify(net, on_miss="background", cache=False, dynamic=False)
    builder = background.worker.builder

    def compiled(rows):
        before = net.cache_info().entries
        while net.cache_info().entries == before:
            net(torch.ones(rows, 4))
            background.worker.wait(60)
        assert "tvm" not in sys.modules
        return builder.pid

    first = compiled(1)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, first) >= min(own + 10, 19)
    assert os.getpgid(first) == first
    child = os.fork()
    if not child:
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.killpg(os.getpgid(0), signal.SIGINT)
    assert compiled(2) == first
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.kill(first, signal.SIGKILL)
    background._IDLE = 0.05
    second = compiled(3)
    assert second != first
    while builder.pid or os.path.exists(f"/proc/{second}"):
        time.sleep(0.05)  # at most until the alarm
    background._IDLE = 60
    print(compiled(4), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    result = subprocess.run(
        # Python 3.12 warns of forks in processes with threads.
        [sys.executable, "-W", "ignore:This process", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        start_new_session=True,
        env=os.environ | {"TVMIFY_COMPARE": "0"},
    )
    assert (result.returncode, result.stderr[-2000:]) == (-9, "")
    last = int(result.stdout)
    while os.path.exists(f"/proc/{last}"):  # noqa: PTH110, ends by the time limit of the tests
        with open(f"/proc/{last}/stat") as stat:  # noqa: PTH123
            if stat.read().rpartition(")")[2].split()[0] == "Z":
                break


def test_targets_built_in_process() -> None:
    target = Target.parse('{"kind": "llvm"}')
    assert building.can_cross(target)
    assert not building.can_cross(dataclasses.replace(target, kind="cuda"))
