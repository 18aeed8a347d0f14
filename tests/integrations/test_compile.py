"""`tvmify.compile`: its options, its result, and pipelines that contain it."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tvmify
from tests.tolerances import assert_close_to_reference
from tvmify import OptionError

INFOS = [("x", (2, 8))]
LOADS = """
import sys, torch, tvmify.runtime
x, expected = torch.load(sys.argv[2])
pipeline = torch.jit.load(sys.argv[1])
pipeline.net._tvmify.set_strict(True)
assert pipeline(x).equal(expected)
print("tvm" in sys.modules, "torch._dynamo" in sys.modules)
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        y = self.layers(x)
        return y if scale is None else y * scale


class Pipeline(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 1:
            x = x.unsqueeze(0)
        return torch.softmax(self.net(x * 2 - 1), dim=-1)


@pytest.fixture
def net() -> nn.Module:
    return Net().eval()


def strict(module: Any) -> Any:
    """Make a call that does not run compiled an error."""
    module._tvmify.set_strict(True)
    return module


def check(compiled: Any, model: Any, *args: Any) -> None:
    assert_close_to_reference(compiled(*args), model, args)


# --------------------------------------------------------------------------------- what is compiled


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(lambda net, x: net, id="module"),
        pytest.param(lambda net, x: torch.jit.script(net), id="script"),
        pytest.param(torch.jit.trace, id="trace"),
        pytest.param(lambda net, x: torch.export.export(net, (x,)), id="export"),
        pytest.param(lambda net, x: tvmify.tvmify(net, cache=False), id="decorated"),
    ],
)
@torch.inference_mode()
def test_every_form_of_a_model(form: Any, net: nn.Module) -> None:
    x = torch.randn(2, 8)
    compiled = strict(tvmify.compile(form(net, x), {"input_infos": INFOS}))
    assert isinstance(compiled, torch.jit.ScriptModule)
    check(compiled, net, x)
    assert sorted(compiled.state_dict()) == sorted(net.state_dict())


@torch.inference_mode()
def test_a_function() -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.relu(a) + b

    infos = [("a", (3, 4)), ("b", (4,))]
    compiled = strict(tvmify.compile(function, {"input_infos": infos}))
    a, b = torch.randn(3, 4), torch.randn(4)
    check(compiled, function, a, b)


@torch.inference_mode()
def test_several_shapes_and_several_inputs(net: nn.Module) -> None:
    infos = [[("x", (2, 8))], [("x", (5, 8))], [("scale", (4,)), ("x", (1, 8))]]
    compiled = strict(tvmify.compile(net, {"input_infos": infos}))
    for rows in (2, 5):
        x = torch.randn(rows, 8)
        check(compiled, net, x)
    x, scale = torch.randn(1, 8), torch.randn(4)
    check(compiled, net, x, scale)
    with pytest.raises(RuntimeError, match="holds no code for these arguments"):
        compiled(torch.randn(3, 8))


@torch.inference_mode()
def test_other_shapes_run_in_eager(net: nn.Module) -> None:
    compiled = tvmify.compile(net, {"input_infos": INFOS})
    x = torch.randn(3, 8)
    with pytest.warns(UserWarning, match="holds no code"):
        assert compiled(x).equal(net(x))


@torch.inference_mode()
def test_unknown_input_names_are_positional(net: nn.Module) -> None:
    compiled = strict(tvmify.compile(net, {"input_infos": [("input0", (1, 8)), ("input1", (4,))]}))
    x, scale = torch.randn(1, 8), torch.randn(4)
    check(compiled, net, x, scale)


@pytest.mark.parametrize("info", [("ids", (2, 3), "int64"), ("ids", ((2, 3), torch.int64))])
@torch.inference_mode()
def test_inputs_may_have_their_own_dtype(info: Any) -> None:
    net = nn.Embedding(10, 4).eval()
    compiled = strict(tvmify.compile(net, {"input_infos": [info]}))
    ids = torch.randint(0, 10, (2, 3))
    assert compiled(ids).equal(net(ids))


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("scripted", [False, True])
@torch.inference_mode()
def test_default_dtype_converts_a_copy(name: str, scripted: bool, net: nn.Module) -> None:
    dtype = getattr(torch, name)
    half, x = copy.deepcopy(net).to(dtype), torch.randn(2, 8, dtype=dtype)
    model = torch.jit.script(net) if scripted else net
    compiled = strict(tvmify.compile(model, {"input_infos": INFOS, "default_dtype": name}))
    check(compiled, half, x)
    assert {tensor.dtype for tensor in model.parameters()} == {torch.float32}


@torch.inference_mode()
def test_a_model_in_half_precision_keeps_it(net: nn.Module) -> None:
    compiled = strict(tvmify.compile(net.half(), {"input_infos": INFOS}))
    assert compiled(torch.randn(2, 8, dtype=torch.float16)).dtype == torch.float16


# --------------------------------------------------------------------------------------- exported


@torch.inference_mode()
# torch.export.load of PyTorch 2.11 warns
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_an_exported_program_needs_no_options(net: nn.Module, tmp_path: Path) -> None:
    x, scale = torch.randn(2, 8), torch.randn(4)
    exported = torch.export.export(net, (x,), {"scale": scale})
    torch.export.save(exported, tmp_path / "net.pt2")
    for program in (exported, torch.export.load(tmp_path / "net.pt2")):
        compiled = strict(tvmify.compile(program))
        assert_close_to_reference(compiled(x, scale=scale), net, (x, scale))


@torch.inference_mode()
def test_an_exported_program_of_any_batch_stays_one(net: nn.Module, tmp_path: Path) -> None:
    sizes = ({0: torch.export.Dim("batch", min=2, max=64)},)
    exported = torch.export.export(net, (torch.randn(4, 8),), dynamic_shapes=sizes)
    tvmify.save(exported, tmp_path / "net.pt")
    for compiled in (tvmify.compile(exported), tvmify.load(tmp_path / "net.pt")):
        for batch in (2, 7, 64):
            check(strict(compiled), net, torch.randn(batch, 8))


def test_options_fixed_by_an_exported_program_cannot_change(net: nn.Module) -> None:
    exported = torch.export.export(net, (torch.randn(2, 8),))
    with pytest.raises(OptionError, match=r"'default_dtype' is torch.float16: .* torch.float32"):
        tvmify.compile(exported, {"default_dtype": "float16"})


@torch.inference_mode()
def test_exported_file_is_loaded_and_recompiled(net: nn.Module, tmp_path: Path) -> None:
    x = torch.randn(2, 8)
    tvmify.export(torch.export.export(net, (x,)), tmp_path / "net.pt2")
    loaded = torch.export.load(tmp_path / "net.pt2")
    check(loaded.module(), net, x)


# --------------------------------------------------------------------------------------- pipelines


@torch.inference_mode()
def test_a_pipeline_is_scripted_saved_and_served_without_the_compiler(
    net: nn.Module, tmp_path: Path
) -> None:
    compiled = strict(tvmify.compile(torch.jit.script(net), {"input_infos": INFOS}))
    pipeline = torch.jit.script(Pipeline(compiled))
    x = torch.randn(2, 8)
    eager = Pipeline(net)
    check(pipeline, eager, x)
    check(torch.jit.trace(Pipeline(compiled), (x,)), eager, x)

    torch.jit.save(pipeline, tmp_path / "pipeline.pt")
    torch.save((x, pipeline(x)), tmp_path / "x.pt")
    command = [sys.executable, "-W", "ignore", "-c", LOADS, tmp_path / "pipeline.pt"]
    printed = subprocess.run(
        [*command, tmp_path / "x.pt"], check=True, capture_output=True, text=True, timeout=120
    ).stdout
    assert printed.split() == ["False", "False"]


# ---------------------------------------------------------------------------------------- options


def test_export_dir_holds_the_returned_module(net: nn.Module, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    compiled = tvmify.compile(net, {"input_infos": INFOS, "export_dir": folder})
    assert [path.name for path in folder.iterdir()] == ["model.pt"]
    (signature,) = tvmify.inspect(folder / "model.pt")["signatures"]
    assert signature["arguments"] == "(float32[2, 8], None)"
    x = torch.randn(2, 8)
    with torch.inference_mode():
        assert tvmify.load(folder / "model.pt")(x).equal(compiled(x))


def test_tuning_is_logged(net: nn.Module, tmp_path: Path) -> None:
    log = tmp_path / "tuning.log"
    option = {"input_infos": INFOS, "tuning_n_trials": 0, "tuning_log_file": log}
    tvmify.compile(net, option)
    assert not log.read_text()
    tvmify.compile(net, option | {"tuning_n_trials": 20000})
    (line,) = map(json.loads, log.read_text().splitlines())
    assert line["workloads"] >= 1
    assert line["target"]["kind"] == "llvm"


def test_options_of_a_decorated_model_hold(net: nn.Module, tmp_path: Path) -> None:
    cache = tmp_path / "elsewhere"
    tvmify.compile(tvmify.tvmify(net, cache=cache), {"input_infos": INFOS})
    assert any(cache.rglob("manifest.json"))


@torch.inference_mode()
def test_decorated_model_defaults_to_its_signatures(net: nn.Module) -> None:
    decorated, x = tvmify.tvmify(net), torch.randn(3, 8)
    decorated(x)
    check(strict(tvmify.compile(decorated)), net, x)


def test_num_outputs_is_checked() -> None:
    def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, x * 2

    option = {"input_infos": [("x", (4,))], "num_outputs": 2}
    assert len(tvmify.compile(two, option)(torch.randn(4))) == 2
    with pytest.raises(OptionError, match="'num_outputs' is 1: expected 2"):
        tvmify.compile(two, option | {"num_outputs": 1})


def test_only_tensors_are_outputs() -> None:
    class Sized(nn.Module):
        def forward(self, x: torch.Tensor, times: int = 2) -> Any:
            return x * times, times, x.shape[0], "twice", None, x

    with pytest.raises(OptionError, match="'num_outputs' is 6: expected 2, as many tensors"):
        tvmify.compile(Sized().eval(), {"input_infos": [("x", (4,))], "num_outputs": 6})


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"input_info": INFOS}, r"unknown option 'input_info': .*; did you mean 'input_infos'\?"),
        ({"n_trials": 1}, "choose from input_infos, default_dtype, num_outputs, tuning_n_trials"),
        ([("x", (1, 2))], "expected a dict with input_infos"),
        ({}, "'input_infos' is needed: give a list with a name and a shape for each input"),
        ({"input_infos": []}, "'input_infos' is .*: expected a list with a name and a shape"),
        ({"input_infos": "x"}, "'input_infos' is 'x': expected"),
        ({"input_infos": (1, 8)}, r"'input_infos' is \(1, 8\): expected"),
        ({"input_infos": [("x", 8)]}, r"'input_infos' is \('x', 8\): expected"),
        ({"input_infos": [("x", (2, -8))]}, "a shape of ints from 0 on"),
        ({"input_infos": [("x", (2, 8), "floot")]}, "a dtype of PyTorch, such as 'float32'"),
        ({"input_infos": [("x", (2, 8)), ("x", (4,))]}, "a different name for each input"),
        ({"input_infos": [("x", (2, 8)), ("y", (4,))]}, "names 'y': the parameters are x, scale"),
        ({"input_infos": [("a", (2,)), ("b", (2,)), ("c", (2,))]}, "the parameters are x, scale"),
        ({"default_dtype": "int8"}, "'int8': expected one of 'float32', 'float16', 'bfloat16'"),
        ({"num_outputs": 0}, "'num_outputs' is 0: expected an int above 0"),
        ({"tuning_n_trials": -1}, "'tuning_n_trials' is -1: expected 0 for no tuning"),
        ({"tuning_n_trials": True}, "'tuning_n_trials' is True"),
        ({"tuning_log_file": 3}, "'tuning_log_file' is 3: expected a path"),
        ({"tuning_log_file": "/nowhere/at/all.log"}, "in a folder that exists"),
        ({"export_dir": "/proc/version/folder"}, "'export_dir' is '/proc/version/folder'"),
        ({"target": "arm"}, "unknown target 'arm': choose one of 'llvm'"),
        ({"device": "moon"}, "'device' is 'moon': expected 'cpu'"),
        ({"device": "meta"}, "'device' is 'meta': expected 'cpu'"),
    ],
)
def test_wrong_options_are_named(option: Any, message: str, net: nn.Module) -> None:
    with pytest.raises(OptionError, match=message):
        tvmify.compile(net, option)


@pytest.mark.parametrize("model", [Net, "net.pt", Path("net.pt"), None])
def test_invalid_model_is_named(model: Any) -> None:
    with pytest.raises(TypeError, match="give an instance of a class, or what"):
        tvmify.compile(model, {"input_infos": INFOS})
