from __future__ import annotations

import copy
import functools
import gc
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram

import tvmify
from tests.processes import run_python
from tests.threads import together
from tests.tolerances import assert_close_to_reference
from tvmify import SaveError, TvmifyWarning
from tvmify.runtime import embedded

#: Warnings of torch about its own code, when it copies an exported program.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),
    # By torch.export.load itself, in PyTorch 2.11.
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
]

#: An instruction set that no CPU reports: the native library does not check for it.
FOREIGN = {"kind": "llvm", "mattr": ["+sse2", "+sse4a"]}


class Net(nn.Module):
    """Has one of each kind of state that an exported program must keep."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 16)
        self.second.weight = nn.Parameter(torch.randn(16, 16))
        self.tied = nn.Linear(16, 16, bias=False)
        self.tied.weight = self.second.weight
        self.auxiliary = nn.Linear(16, 2)  # not used in inference
        self.register_buffer("shift", torch.randn(16), persistent=False)
        self.scales = [torch.randn(16)]

    def forward(self, image: torch.Tensor, gain: float = 2.0) -> dict[str, torch.Tensor]:
        hidden = torch.relu(self.norm(self.first(image))) * gain
        hidden = self.tied(self.second(hidden)) * self.scales[0] + self.shift
        return {"result": hidden, "transposed": hidden.t()}


X = torch.linspace(-1, 1, 32).reshape(4, 8)


def double(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    return x * 2, x, 3


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Net]:
    """A file, and the module that was exported to it."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("exported") / "net.pt2"
    net = Net().eval()
    tvmify.export(tvmify.tvmify(net, cache=False), path, signature=[(4, 8)])
    return path, net


@pytest.fixture
def net(exported: tuple[Path, Net]) -> Net:
    """The module in eager PyTorch."""
    return copy.deepcopy(exported[1])


@pytest.fixture
def program(exported: tuple[Path, Net]) -> ExportedProgram:
    return torch.export.load(exported[0])


@pytest.fixture
def module(program: ExportedProgram) -> Any:
    return program.module()


def reloaded(program: Any, path: Path) -> Any:
    torch.export.save(program, path)
    return torch.export.load(path).module()


def call_of(program: Any) -> torch.fx.Node:
    (call,) = program.graph.find_nodes(op="call_function", target=torch.ops.tvmify.execute.default)
    return call


# ---------------------------------------------------------------------------- files and programs


def test_a_file_gives_the_results_of_the_module(module: Any, net: Net):
    with torch.no_grad():
        assert_close_to_reference(module(X), net, (X,))


def test_the_file_is_read_without_the_compiler(
    exported: tuple[Path, Net], net: Net, tmp_path: Path
):
    torch.save((X, net(X)["result"].detach()), tmp_path / "expected.pt")
    script = """
        import sys
        import torch, tvmify

        x, expected = torch.load("expected.pt")
        with torch.no_grad():
            result = torch.export.load(sys.argv[1]).module()(x)["result"]
        torch.testing.assert_close(result, expected)
        assert "tvm" not in sys.modules
        assert not any(name.startswith("tvmify.compiler") for name in sys.modules)
    """
    run_python(script, exported[0], cwd=tmp_path)


def test_weights_are_stored_once_under_their_names(tmp_path: Path, monkeypatch: Any):
    wide = tvmify.tvmify(nn.Sequential(nn.Linear(512, 512)).eval(), cache=False)
    path = tmp_path / "wide.pt2"
    program = tvmify.export(wide, path, signature=[(4, 512)])

    def fail(_: Any, file: BinaryIO) -> None:
        file.write(b"a part")
        raise OSError("the disk is full")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr(torch.export, "save", fail)
        tvmify.export(wide, path, signature=[(4, 512)])
    assert [*tmp_path.iterdir()] == [path]
    assert list(program.state_dict) == ["0.weight", "0.bias"]
    size = 4 * (512 * 512 + 512)
    assert size < path.stat().st_size < 1.1 * size
    with zipfile.ZipFile(path) as archive:
        assert sum(entry.file_size > size / 2 for entry in archive.infolist()) == 1


def test_state_dicts_of_the_module_can_be_loaded(module: Any, net: Net):
    assert module.state_dict().keys() == net.state_dict().keys()
    other = Net().eval()
    other.shift, other.scales = net.shift, net.scales  # not in a state dict
    module.load_state_dict(other.state_dict())
    with torch.no_grad():
        assert_close_to_reference(module(X), other, (X,))


def test_arguments_keep_their_names_and_values(net: Net):
    program = tvmify.export(net, signature={"image": (4, 8), "gain": 3.0})
    assert program.graph_signature.user_inputs == ("image", 3.0)
    module = program.module()
    with torch.no_grad():
        assert_close_to_reference(module(image=X, gain=3.0), net, (X, 3.0))


def test_other_shapes_are_refused(module: Any):
    with pytest.raises(AssertionError, match=r"image\.size\(\)\[0\] == 4"):
        module(X[:2])


def test_the_signature_may_be_that_of_a_call():
    fast = tvmify.tvmify(double, strict=True)
    with pytest.raises(SaveError, match="0 signatures"):
        tvmify.export(fast)
    fast(X)
    assert torch.equal(tvmify.export(fast).module()(X)[0], X * 2)
    fast(X[:2])
    with pytest.raises(SaveError, match="2 signatures"):
        tvmify.export(fast)


@pytest.mark.usefixtures("inference")
def test_examples_do_not_get_into_the_program():
    secret = torch.full((4, 8), 7.0)
    program = tvmify.export(double, example_inputs=(secret,))
    assert program.example_inputs is not None
    assert not program.example_inputs[0][0].any()
    assert torch.equal(program.module()(secret)[0], secret * 2)


def test_a_class_is_not_exported():
    with pytest.raises(TypeError, match="instance of Net"):
        tvmify.export(Net, signature=[(4, 8)])
    assert not hasattr(Net, "__tvmify__")


def test_uncompiled_module_is_not_exported(net: Net):
    with pytest.raises(tvmify.TrainingMode):
        tvmify.export(net.train(), signature=[(4, 8)])


def test_results_that_share_memory_can_be_cloned():
    class Shared(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.out((x + 1).t())

        def out(self, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return y, y[:, 0]

    class Cloned(Shared):
        def out(self, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return y.clone(), y[:, 0].clone()

    with pytest.raises(SaveError, match=r"share no memory. Call \.clone\(\) on them"):
        tvmify.export(Shared().eval(), signature=[(4, 8)])
    results = tvmify.export(Cloned().eval(), signature=[(4, 8)]).module()(X)
    torch.testing.assert_close(results, Shared()(X))


@pytest.mark.parametrize(
    "forward", [lambda x: x + torch.rand_like(x), lambda x: x.as_strided((2, 3), (1, 2)) + 1]
)
def test_the_original_runs_if_the_result_depends_on_strides(forward: Any):
    module = tvmify.export(forward, signature=[(4, 6)]).module()
    x = torch.randn(6, 4)
    with pytest.warns(TvmifyWarning, match="an input is not contiguous"):
        for argument in (x.view(4, 6), x.t()):
            torch.manual_seed(5)
            expected = forward(argument)
            torch.manual_seed(5)
            torch.testing.assert_close(module(argument), expected)


def test_complex_numbers(tmp_path: Path):
    def forward(z: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return z * x, z.real + x

    z, x = torch.randn(3, 4, dtype=torch.complex64), torch.randn(3, 4)
    tvmify.export(forward, tmp_path / "program.pt2", example_inputs=(z, x))
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    for argument in (z, z.mT.contiguous().mT, z.conj()):
        assert_close_to_reference(loaded(argument, x), forward, (argument, x))


@pytest.mark.parametrize("subject", [double, torch.jit.script(double)], ids=["plain", "scripted"])
def test_functions(subject: Any, tmp_path: Path):
    module = reloaded(tvmify.export(subject, signature=[(4, 8)]), tmp_path / "double.pt2")
    twice, same, three = module(X)
    assert torch.equal(twice, X * 2)
    assert same is X
    assert three == 3


def test_scripted_modules(tmp_path: Path):
    scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 4), nn.Tanh()).eval())
    module = reloaded(tvmify.export(scripted, signature=[(4, 8)]), tmp_path / "scripted.pt2")
    assert module.state_dict().keys() == scripted.state_dict().keys()
    with torch.no_grad():
        torch.testing.assert_close(module(X), scripted(X))


def test_literals_of_submodules_are_kept(tmp_path: Path):
    class Literal(nn.Module):
        def forward(self, *xs: torch.Tensor) -> torch.Tensor:  # which cannot be scripted
            return xs[0] * torch.tensor([1.0, 2.0] * 4) + xs[1]

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = Literal()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inside(x, x) + torch.tensor(3.0)

    program = tvmify.export(Around().eval(), signature=[(4, 8)], target=FOREIGN)
    module = reloaded(program, tmp_path / "literal.pt2")
    with pytest.warns(TvmifyWarning, match="does not have"):
        assert torch.equal(module(X), Around()(X))


# ------------------------------------------------------------------------- where a program goes


def test_torch_compile_around_it(module: Any, net: Net):
    # Products, since Inductor would have the system's compiler build other operators, for 10 s.
    before, after = torch.randn(8, 8), torch.randn(16, 3)
    compiled = torch.compile(lambda x: module(x @ before)["result"] @ after, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(X), net(X @ before)["result"] @ after)
        module.load_state_dict({k: v * 2 for k, v in net.state_dict().items()})
        torch.testing.assert_close(compiled(X), module(X @ before)["result"] @ after)


class Pipeline(nn.Module):
    """A compiled network between operators of PyTorch."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x.clamp(-0.5, 0.5))["result"].softmax(-1)


def test_it_can_be_part_of_another_exported_module(module: Any, net: Net, tmp_path: Path):
    program = torch.export.export(Pipeline(module), (X,)).run_decompositions()
    assert call_of(program) is not None
    pipeline = reloaded(program, tmp_path / "pipeline.pt2")
    with torch.no_grad():
        torch.testing.assert_close(pipeline(X), Pipeline(net)(X))
    assert "network.first.weight" in pipeline.state_dict()


# -------------------------------------------------------------------------------------- weights


def test_new_weights_take_effect(module: Any, net: Net):
    other = copy.deepcopy(net)
    with torch.no_grad():
        module(X)
        for assign in (False, True):
            other.load_state_dict({k: v * 1.5 for k, v in other.state_dict().items()})
            module.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
            assert_close_to_reference(module(X), other, (X,))
        for written in (module.first.weight, other.first.weight):
            written[3] = 0.0
        assert_close_to_reference(module(X), other, (X,))


def test_modules_with_their_own_weights_share_a_program(program: ExportedProgram, net: Net):
    first, second = program.module(), program.module()
    changed = copy.deepcopy(net)
    changed.load_state_dict({k: v + 1 for k, v in net.state_dict().items()})
    second.load_state_dict(changed.state_dict(), assign=True)

    def call(module: Any, expected: torch.Tensor) -> None:
        with torch.no_grad():
            for _ in range(50):
                assert torch.allclose(module(X)["result"], expected, rtol=1e-4, atol=1e-4)

    with torch.no_grad():
        pairs = [(first, net(X)["result"]), (second, changed(X)["result"])] * 4
    together(functools.partial(call, *pair) for pair in pairs)


def test_results_belong_to_the_caller():
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 8))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = x + self.weight
            return y, y.view(8, 4), x.view(-1)

    module = tvmify.export(Views().eval(), signature=[(4, 8)]).module()
    x = X.clone()
    for result in module(x):
        with torch.no_grad():
            result.zero_()
    assert torch.equal(x, X)
    torch.testing.assert_close(module(x)[0], X + 1)
    torch.testing.assert_close(module(x)[1], (X + 1).view(8, 4))


# ------------------------------------------------------------------------------------ gradients


def test_gradients_match_the_module(module: Any, net: Net):
    module.first.bias.requires_grad_(False)
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    # Weighted by fixed numbers, not by the results, which are rounded differently.
    weights = torch.linspace(-2, 2, 64).reshape(4, 16)
    (module(x)["result"] * weights).sum().backward()
    (net(y)["result"] * weights).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    assert module.first.bias.grad is None
    for name in ("first.weight", "norm.bias", "tied.weight"):
        torch.testing.assert_close(
            module.get_parameter(name).grad, net.get_parameter(name).grad, rtol=1e-4, atol=1e-4
        )


def test_gradients_of_gradients_are_refused(module: Any):
    result = module(X)["result"].sum()
    with pytest.raises(NotImplementedError, match="once, not twice"):
        torch.autograd.grad(result, [module.first.weight], create_graph=True)


# ------------------------------------------------------------------- where the code cannot run


def test_another_cpu_runs_the_original(net: Net, tmp_path: Path):
    program = tvmify.export(net, signature=[(4, 8)], target=FOREIGN)
    module = reloaded(program, tmp_path / "foreign.pt2")
    with torch.no_grad():
        with pytest.warns(TvmifyWarning, match="this CPU does not have sse2 sse4a"):
            result = module(X)
        for name, expected in net(X).items():
            assert torch.equal(result[name], expected)  # it is the original
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            module(X)  # warns once


def test_strict_programs_refuse_another_cpu():
    module = tvmify.export(double, signature=[(4, 8)], target=FOREIGN, strict=True).module()
    with pytest.raises(RuntimeError, match="this CPU does not have sse2 sse4a"):
        module(X)


def test_another_dtype_runs_the_original(module: Any, net: Net):
    with torch.no_grad(), pytest.warns(TvmifyWarning, match="float64"):
        result = module.double()(X.double())["result"]
        net.double()
        net.scales[0] = net.scales[0].double()
        torch.testing.assert_close(result, net(X.double())["result"])


@pytest.mark.parametrize("damaged", ["tvmify_library", "tvmify_original"])
def test_damage_is_an_error(damaged: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(embedded, "_originals", OrderedDict())
    target = FOREIGN if damaged == "tvmify_original" else None
    program = tvmify.export(double, signature=[(4, 8)], target=target)
    data = program.constants[damaged]
    assert isinstance(data, torch.Tensor)
    data[1000] ^= 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match="is damaged"):
            program.module()(X)


def test_code_is_dropped_with_its_program():
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:tvmify")

    def run(width: int) -> None:
        module = tvmify.export(nn.Linear(8, width).eval(), signature=[(4, 8)]).module()
        with torch.no_grad():
            module(X)
        del module
        gc.collect()

    run(1)
    run(2)  # torch keeps the last exported program
    before = mapped()
    run(3)
    assert mapped() == before
