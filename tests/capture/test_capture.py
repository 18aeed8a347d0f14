"""Captured programs compute the same as eager PyTorch, or capture gives a reason."""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.capture import nets
from tests.threads import running
from tvmify import tvmify
from tvmify.capture import Program, capture, resolve
from tvmify.errors import UnsupportedInput

X = (2, 4)


def _check(
    callable_: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], method: str
) -> Program:
    """Capture, export and run a program, and compare it with eager."""
    program = capture(callable_, args, kwargs)
    assert program.method == method, program.reason
    assert (program.reason is None) == (method == "torchscript")
    exported = program.export(args, kwargs)
    with torch.no_grad():
        expected, structure = pytree.tree_flatten(callable_(*args, **kwargs))
        actual, actual_structure = pytree.tree_flatten(exported.module()(*args, **kwargs))
    assert actual_structure == structure
    for ours, eager in zip(actual, expected, strict=True):
        if isinstance(eager, Tensor):
            torch.testing.assert_close(ours, eager, rtol=1e-6, atol=1e-6, equal_nan=True)
        else:
            assert ours == eager
    named = {spec.target for spec in exported.graph_signature.input_specs} - {None}
    assert set(program.weights) <= named <= {*exported.state_dict, *exported.constants}
    assert not set(program.weights) & set(exported.constants)
    for name, tensor in zip(program.weights, program.tensors(), strict=True):
        assert exported.state_dict[name].data_ptr() == tensor.data_ptr()
    return program


def _arguments() -> list[Any]:
    tensors = [torch.rand(*X), torch.rand(*X)]
    options = {"a": torch.rand(3), "b": torch.rand(2)}
    pair = nets.Pair(torch.rand(2), torch.rand(3))
    return [
        pytest.param(nets.Convolutions(), (torch.rand(2, 3, 10, 10),), {}, id="convolutions"),
        pytest.param(nets.Attention(), (torch.rand(2, 5, 16),), {}, id="attention"),
        pytest.param(
            nets.Attention(),
            (torch.rand(2, 5, 16),),
            {"mask": torch.rand(5, 5) > 0.2},
            id="attention-mask",
        ),
        pytest.param(nets.ShapeLoop(), (torch.rand(5, 3),), {"steps": 3}, id="loop"),
        pytest.param(nets.ShapeLoop(), (torch.rand(1, 3).double(), 1), {}, id="loop-float64"),
        pytest.param(nets.Structures(), (tensors, options, pair), {}, id="structures"),
        pytest.param(
            nets.Structures(), (), {"pair": pair, "tensors": tensors, "options": options},
            id="structures-by-keyword",
        ),
        pytest.param(nets.TensorAttributes(), (torch.rand(*X),), {}, id="tensor-attributes"),
        pytest.param(nets.Indexing(), (torch.rand(3, 4),), {}, id="indexing"),
        pytest.param(nets.Arithmetic(), (torch.rand(3, 7), 4.0, "yes"), {}, id="arithmetic"),
        pytest.param(nets.StringMethods(), (torch.rand(3), "banana"), {}, id="strings"),
        pytest.param(nets.Optionals(), (torch.rand(3),), {"flag": True}, id="optional-none"),
        pytest.param(
            nets.Optionals(), (torch.rand(3),), {"shift": torch.rand(3), "flag": True},
            id="optional-some",
        ),
        pytest.param(nets.Tied(), (torch.rand(*X),), {}, id="tied"),
        pytest.param(nets.plain_function, (torch.rand(2, 3), torch.rand(3, 2)), {}, id="function"),
        pytest.param(nn.Sequential(), (torch.rand(3),), {}, id="identity"),
        pytest.param(nn.Linear(3, 2).half(), (torch.rand(0, 3).half(),), {}, id="empty-half"),
    ]  # fmt: skip


@pytest.mark.parametrize(("callable_", "args", "kwargs"), _arguments())
def test_scripted_program_matches_eager(callable_: Any, args: Any, kwargs: Any) -> None:
    if isinstance(callable_, nn.Module):
        callable_.eval()
    _check(callable_, args, kwargs, "torchscript")


@pytest.mark.parametrize("x", [3, torch.rand(3)])
def test_an_argument_of_two_types(x: Any) -> None:
    _check(nets.Unions(), (x, torch.rand(3)), {}, "export")


@pytest.mark.parametrize("table", [0, 1])
def test_exported_program_matches_eager(table: int) -> None:
    module = nets.Unscriptable().eval()
    program = _check(module, (torch.rand(*X),), {"table": table}, "export")
    assert program.reason is not None and "nets.py" in program.reason
    assert set(program.weights) == {
        "linear.weight", "linear.bias", "plain", f"tables.{table}", "unsaved"
    }  # fmt: skip
    assert resolve(module, f"tables.{table}") is module.tables[table]
    assert not program.constants


def test_high_level_operators_stay_whole() -> None:
    program = capture(nets.Attention().eval(), (torch.rand(1, 3, 16),), {})
    exported = program.export((torch.rand(1, 3, 16),), {})
    targets = {str(node.target) for node in exported.graph.nodes}
    whole = ("linear", "layer_norm", "scaled_dot_product_attention")
    assert {f"aten.{name}.default" for name in whole} <= targets


def test_one_scripted_program_serves_every_signature() -> None:
    module = nets.ShapeLoop().eval()
    program = capture(module, (torch.rand(2, 3),), {})
    for size in (1, 4):
        x = torch.rand(size, 3)
        assert torch.equal(program.export((x,), {}).module()(x), module(x))
    assert capture(module, (torch.rand(7, 3),), {}).fingerprint == program.fingerprint


def test_an_exported_program_serves_one_signature() -> None:
    program = capture(nets.Unscriptable().eval(), (torch.rand(*X),), {})
    assert program.accepts((torch.rand(*X),), {})
    assert not program.accepts((torch.rand(3, 4),), {})
    with pytest.raises(UnsupportedInput):
        program.export((torch.rand(3, 4),), {})


def test_a_tensor_given_twice_is_two_inputs() -> None:
    x, y = torch.rand(2, 2), torch.rand(2, 2)
    exported = capture(nets.plain_function, (x, x), {}).export((x, x), {})
    assert torch.equal(exported.module()(x, y), nets.plain_function(x, y))


def test_inference_tensors_and_gradients_do_not_matter() -> None:
    module = nn.Linear(4, 4)
    with torch.inference_mode():
        x = torch.rand(*X)
        exported = capture(module, (x,), {}).export((x,), {})
    x = torch.rand(*X, requires_grad=True)
    again = capture(module, (x,), {}).export((x,), {})
    for program in (exported, again):
        assert [str(node.target) for node in program.graph.nodes].count("aten.linear.default") == 1
    assert len(exported.graph.nodes) == len(again.graph.nodes)


@pytest.mark.parametrize("wrap", [lambda module: module, nets.Starred])
def test_strides_of_the_example_do_not_matter(wrap: Callable[[nn.Module], nn.Module]) -> None:
    module = wrap(nets.Indexing())
    contiguous, strided = torch.rand(3, 4), torch.rand(4, 3).T
    program = capture(module, (strided,), {})
    assert program.fingerprint == capture(module, (contiguous,), {}).fingerprint
    exported = program.export((strided,), {})
    assert torch.equal(exported.module()(contiguous), module(contiguous))


def test_only_read_tensors_are_weights() -> None:
    program = capture(nets.TensorAttributes().eval(), (torch.rand(*X),), {})
    assert set(program.weights) == {
        "linear.weight", "linear.bias", "plain", "unsaved", "tables.0", "tables.1"
    }  # fmt: skip


def test_replaced_weights_are_used() -> None:
    module = nets.TensorAttributes().eval()
    x = torch.rand(*X)
    program = capture(module, (x,), {})
    module.linear.weight = nn.Parameter(torch.rand(4, 4))
    module.unsaved = torch.rand(4)
    assert program.tensors()[0] is module.linear.weight
    assert torch.equal(program.export((x,), {}).module()(x), module(x))


# ------------------------------------------------------------------------- TorchScript as it comes


def _saved_and_loaded(scripted: Any) -> Any:
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    return torch.jit.load(file)


class _Traced(nn.Module):
    """Sizes become tensors and back, constants become files, convolutions ``_convolution``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.up = nn.ConvTranspose1d(4, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).flatten(2)
        y = self.up(y.view(y.size(0), y.size(1), -1)) * (x.size(1) // 2)
        y = y + torch.arange(x.shape[0] * 2).view(-1, 2, 1)
        return y.reshape(y.shape[0] * y.shape[1] // 2, -1) + torch.linspace(0, 1, y.shape[2]).sum()


@pytest.mark.parametrize("loaded", [False, True])
def test_traced_modules(loaded: bool) -> None:
    module, x = _Traced().eval(), torch.rand(2, 3, 8, 8)
    traced = torch.jit.trace(module, x)
    program = _check(_saved_and_loaded(traced) if loaded else traced, (x,), {}, "torchscript")
    targets = {str(node.target) for node in program.export((x,), {}).graph.nodes}
    assert {"aten.conv2d.default", "aten.conv_transpose1d.default"} <= targets
    assert not any("item" in target or "_convolution" in target for target in targets)


def _by_traced_sizes(x: Tensor) -> tuple[Tensor, ...]:
    half = x.shape[1] // 2  # a tensor while tracing
    first = x.tensor_split(half, 1)[0]
    return x.narrow(1, half, half) + 1, first + x[:, :1], x.repeat_interleave(half, 1) + 1


def test_sizes_in_traced_code_are_numbers() -> None:
    x = torch.rand(3, 4)
    _check(torch.jit.trace(_by_traced_sizes, x), (x,), {}, "torchscript")


class _Anonymous(nn.Module):
    def forward(self, *tensors: Tensor) -> Tensor:
        first, second = tensors
        return nn.functional.pad(first, [1, 1]) - nn.functional.silu(second).sum()


def test_parameters_of_one_name_are_distinguished() -> None:
    """A trace names both after a parameter in ``torch.nn.functional``."""
    args = torch.rand(3), torch.rand(3)
    traced = torch.jit.trace(_Anonymous().eval(), args)
    assert [parameter.name for parameter in traced.forward.schema.arguments[1:]] == ["input"] * 2  # type: ignore[attr-defined]
    _check(traced, args, {}, "torchscript")


def test_a_tensor_constant_of_a_traced_file_is_a_literal() -> None:
    table = torch.rand(4)
    traced = _saved_and_loaded(torch.jit.trace(lambda x: x * table, torch.rand(*X)))
    program = _check(traced, (torch.rand(*X),), {}, "torchscript")
    assert program.weights == ()
    (literal,) = program.export((torch.rand(*X),), {}).constants.values()
    assert torch.equal(literal, table)


def test_scripted_frozen_and_loaded_modules() -> None:
    x = torch.rand(1, 3, 10, 10)
    scripted = torch.jit.script(nets.Convolutions().eval())
    program = _check(scripted, (x,), {}, "torchscript")
    assert "conv.weight" in program.weights
    loaded = _check(_saved_and_loaded(scripted), (x,), {}, "torchscript")
    assert loaded.fingerprint == program.fingerprint
    frozen = _check(torch.jit.freeze(scripted), (x,), {}, "torchscript")
    assert frozen.weights == ()


def test_a_script_function_and_a_number_for_a_float() -> None:
    function = torch.jit.script(_scaled)
    x = torch.arange(3)
    exported = _check(function, (x, 2), {}, "torchscript").export((x, 2), {})
    assert exported.module()(x, 2).dtype == torch.float32


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x * scale


def test_an_int_stays_an_int_where_eager_keeps_it() -> None:
    # scripted it would become a float, and the result with it
    _check(_scaled, (torch.arange(3), 2), {}, "export")


def test_local_tensor_may_be_written() -> None:
    _check(nets.WritesCopy(), (torch.rand(3),), {}, "torchscript")


def test_arguments_contradicting_annotations_use_export() -> None:
    def first(items, shift: float = 1.0):  # type: ignore[no-untyped-def]
        return items[0] + shift

    args = ([torch.rand(2), torch.rand(3)],)
    program = _check(first, args, {"shift": 2.0}, "export")
    assert program.reason == "argument 'items' is of type list where TorchScript expects Tensor"
    with pytest.raises(UnsupportedInput, match="takes"):
        capture(torch.jit.script(nets.plain_function), (), {"z": 1}).export((), {"z": 1})


def test_a_tensor_of_a_closure_is_reported() -> None:
    outside = torch.rand(3)
    program = _check(lambda x: x * outside, (torch.rand(3),), {}, "export")
    (constant,) = program.constants
    assert constant.data_ptr() == outside.data_ptr()


# ------------------------------------------------------------------------------ what is left alone


@pytest.mark.parametrize("module", [nets.Convolutions(), nets.Unscriptable()])
def test_capture_does_not_change_the_module(module: nn.Module) -> None:
    module.eval()
    args = (
        torch.rand(1, 3, 10, 10) if isinstance(module, nets.Convolutions) else torch.rand(2, 4),
    )
    before = [(name, id(child), {**vars(child)}) for name, child in module.named_modules()]
    state = {name: (id(tensor), tensor._version) for name, tensor in module.named_parameters()}
    capture(module, args, {}).export(args, {})
    after = [(name, id(child), {**vars(child)}) for name, child in module.named_modules()]
    assert before == after
    assert state == {name: (id(t), t._version) for name, t in module.named_parameters()}


def test_capture_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for module in (nets.Tied(), nets.Unscriptable()):
            capture(module, (torch.rand(*X),), {}).export((torch.rand(*X),), {})


def test_module_is_callable_from_other_threads_during_capture() -> None:
    module, x = nets.Unscriptable().eval(), torch.rand(*X)
    expected = module(x)["x"]
    stop = threading.Event()

    def call() -> None:
        while not stop.is_set():
            with torch.no_grad():
                result = module(x)["x"]
            assert type(result) is Tensor
            assert torch.equal(result, expected)

    with running([call] * 2):
        try:
            for _ in range(3):
                capture(module, (x,), {})
                capture(nets.Tied(), (x,), {}).export((x,), {})
        finally:
            stop.set()


def test_a_tiny_transformer_is_exported_with_a_reason() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        vocab_size=50,
    )  # fmt: skip
    module = transformers.BertModel(config).eval()
    tokens = torch.randint(0, 50, (2, 7))
    program = _check(module, (tokens,), {"attention_mask": torch.ones_like(tokens)}, "export")
    assert program.reason


@pytest.mark.parametrize(
    ("net", "method"), [(nets.Cached, "torchscript"), (nets.CachedByDevice, "export")]
)
def test_keys_of_tensors_may_be_names_of_methods(net: type[nets.Cached], method: str) -> None:
    module = net().eval()
    program = _check(module, (torch.rand(3, 4),), {}, method)
    for name in program.weights:
        assert any(resolve(module, name) is tensor for tensor in module.cache.values())
    assert len(program.weights) == (4 if net is nets.Cached else 3)
    run = tvmify(module, cache=False, strict=True)
    x = torch.rand(3, 4)
    torch.testing.assert_close(run(x), net.forward(module, x))


def test_keys_of_tensors_may_be_alike_as_text() -> None:
    module = nets.CachedByNumber().eval()
    program = _check(module, (torch.rand(3, 4), 1), {}, "export")
    names = {name: resolve(module, name) for name in program.weights}
    assert [names[name] is module.cache[1] for name in sorted(names)] == [True, False]


def test_forward_finds_registered_modules_in_a_list_or_a_closure(inference: None) -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.layers = [self.layer, self.layer]
            layer = self.layer
            self.last = lambda x: layer(x) - 1

        def forward(self, x: torch.Tensor, *rest: object) -> torch.Tensor:  # not scriptable
            for layer in self.layers:
                x = layer(x).relu()
            return self.last(x)

    net = Listed().eval()
    fast = tvmify(net, cache=False, strict=True)
    x = torch.randn(2, 4)
    torch.testing.assert_close(fast(x), net(x))
    net.layer.weight.mul_(2)
    torch.testing.assert_close(fast(x), net(x))
    assert capture(net, (x,), {}).weights == ("layer.weight", "layer.bias")
