"""The option ``dynamic_shapes``, and marks on tensors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.dispatch.generality.nets import Linear, check, drawn
from tvmify import OptionError
from tvmify import tvmify as decorate
from tvmify.dispatch.dispatcher import Dispatcher
from tvmify.dispatch.subject import Name, Subject
from tvmify.options import CompileOptions
from tvmify.torch_compat.declared_sizes import DeclaredSize


class Pair(Linear):
    def forward(self, x: torch.Tensor, y: torch.Tensor, scale: float = 2.0) -> Any:  # type: ignore[override]
        return self.linear(x) * scale, y + 1


class Nested(Linear):
    def forward(self, parts: dict[str, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        return self.linear(parts["x"]) + parts["y"]


class Starred(Linear):
    def forward(self, *tensors: Any) -> torch.Tensor:
        return self.linear(tensors[0])


def compiled(module: nn.Module, dynamic_shapes: Any = None, **options: Any) -> Any:
    options = {"cache": False, "strict": True, "dynamic": False} | options
    return decorate(copy.deepcopy(module).eval(), dynamic_shapes=dynamic_shapes, **options)


def builds(fast: Any) -> int:
    assert fast.cache_info().eager == 0
    return fast.cache_info().builds


@pytest.mark.parametrize(
    "shapes",
    [
        {"x": {0: Dim("n", max=12)}},
        {"x": {-2: Dim("n", max=12)}},
        {"x": (Dim.AUTO, None)},
        {"x": [Dim.DYNAMIC, 8]},
        ({0: Dim.AUTO},),
    ],
    ids=str,
)
def test_sizes_are_symbols_from_the_first_call_on(shapes: Any) -> None:
    module = Linear()
    fast = compiled(module, shapes)
    for rows in (3, 5, 12, 2):
        check(fast, module, drawn(rows, 8))
    assert builds(fast) == 1


def test_calls_beyond_limits_have_separate_programs() -> None:
    module = Linear()
    fast = compiled(module, {"x": {0: Dim("n", min=4, max=6)}})
    for rows in (4, 6, 5):
        check(fast, module, drawn(rows, 8))
    assert builds(fast) == 1
    assert "4 <= s0 <= 6" in str(fast.explain())
    for rows in (3, 7):
        check(fast, module, drawn(rows, 8))
    assert builds(fast) == 3


def test_sizes_of_one_name_are_equal() -> None:
    module = Pair()
    n = Dim("n", max=16)
    fast = compiled(module, {"x": {0: n}, "y": {0: n}})
    for rows in (3, 5):
        check(fast, module, drawn(rows, 8), drawn(rows))
    assert builds(fast) == 1
    check(fast, module, drawn(4, 8), drawn(7))
    assert builds(fast) == 2
    assert "float32[s0]" in str(fast.explain())


def test_sizes_of_two_names_may_differ() -> None:
    module = Pair()
    fast = compiled(module, ({0: Dim("a")}, {0: Dim("b")}))
    for rows, others in ((3, 3), (3, 4), (2, 3)):
        check(fast, module, drawn(rows, 8), drawn(others))
    assert builds(fast) == 1


def test_undeclared_sizes_follow_the_dynamic_option() -> None:
    module = Pair()
    fast = compiled(module, {"x": {0: Dim.STATIC}}, dynamic=None)
    for rows in (3, 4, 5):
        check(fast, module, drawn(rows, 8), drawn(6))
    assert builds(fast) == 3
    for others in (7, 8, 9):  # nothing is declared for y
        check(fast, module, drawn(5, 8), drawn(others))
    assert builds(fast) == 4


def test_tensors_in_containers() -> None:
    module = Nested()
    n = Dim("n")
    fast = compiled(module, {"parts": {"x": {0: n}, "y": {0: n}}})
    for rows in (3, 6):
        check(fast, module, {"x": drawn(rows, 8), "y": drawn(rows, 1)})
    assert builds(fast) == 1


def test_star_arguments() -> None:
    module = Starred()
    fast = compiled(module, {"tensors": ({0: Dim("n")},)})
    for rows in (3, 6):
        check(fast, module, drawn(rows, 8))
    assert builds(fast) == 1


def test_functions_and_torchscript() -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    for subject in doubled, torch.jit.script(doubled), torch.jit.script(Linear().eval()):
        options = {"cache": False, "strict": True, "dynamic": False}
        fast = decorate(subject, dynamic_shapes={"x": {0: Dim("n")}}, **options)
        with torch.no_grad():
            for rows in (3, 6):
                torch.testing.assert_close(fast(drawn(rows, 8)), subject(drawn(rows, 8)))
        assert builds(fast) == 1
        with pytest.raises(OptionError, match="'y', but the arguments are 'x'"):
            decorate(subject, dynamic_shapes={"y": None})


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (7, "a dict by argument name"),
        ({"x": {0: "n"}}, "'n' is not a size"),
        ({"x": {0: 2 * Dim("n")}}, r"2\*n is computed from another Dim"),
        ({"z": {0: Dim("n")}}, "'z', but the arguments are 'x', 'y', 'scale'"),
    ],
)
def test_wrong_values_are_found_at_decoration(shapes: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        compiled(Pair(), shapes)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"x": {2: Dim("n")}}, "for x, which is a tensor of 2 axes: there is no axis 2"),
        ({"x": (Dim("n"),)}, "for x, which is a tensor of 2 axes: give a dict by axis, or 2"),
        ({"x": Dim("n")}, "for x, which is a tensor of 2 axes"),
        ({"scale": Dim("n")}, "for scale, which is 3.0, not a tensor: give None"),
        ((None, None, None, None), "has 4 entries, but the call has 3: x, y, scale"),
        ({"x": {0: Dim("n", max=4)}, "y": {0: Dim("n", min=5)}}, "the same limits"),
    ],
)
def test_mismatched_dynamic_shapes_raise(shapes: Any, message: str) -> None:
    fast = compiled(Pair(), shapes)
    with pytest.raises(OptionError, match=message):
        fast(drawn(4, 8), drawn(4), 3.0)


def test_missing_keys_are_named() -> None:
    fast = compiled(Nested(), {"parts": {"z": {0: Dim("n")}}})
    with pytest.raises(OptionError, match="for parts, which is a dict of 'x', 'y'"):
        fast({"x": drawn(4, 8), "y": drawn(4, 1)})


def test_marked_sizes_are_symbols_from_the_first_call_on() -> None:
    module = Linear()
    fast = compiled(module)
    x = drawn(5, 8)
    torch._dynamo.mark_dynamic(x, 0, min=3, max=9)
    check(fast, module, x)
    for rows in (3, 9):
        check(fast, module, drawn(rows, 8))
    assert builds(fast) == 1
    check(fast, module, drawn(10, 8))
    assert builds(fast) == 2


def test_maybe_mark_dynamic_makes_symbols() -> None:
    module = Linear()
    fast = compiled(module)
    x = drawn(5, 8)
    torch._dynamo.maybe_mark_dynamic(x, 0)
    check(fast, module, x)
    check(fast, module, drawn(6, 8))
    assert builds(fast) == 1


def test_static_sizes_have_separate_programs() -> None:
    module = Linear()
    fast = compiled(module, dynamic=True)
    check(fast, module, drawn(5, 8))
    for rows in (6, 7):
        x = drawn(rows, 8)
        torch._dynamo.mark_static(x, 0)
        check(fast, module, x)
    assert builds(fast) == 3


def test_sizes_with_a_typical_value_have_one_program_for_all_classes() -> None:
    module = Linear().eval()
    typical = DeclaredSize(varies=None, typical=48)
    subject = Subject(
        Name("Linear", "forward"),
        eager=Linear.forward,
        capturable=lambda module: module,
        options=CompileOptions(cache=False, strict=True),
        module=module,
        declare=lambda args, kwargs: {0: (typical, None)},
    )
    dispatcher = Dispatcher(subject)
    with torch.no_grad():
        for rows in (5, 9, 33, 300):
            torch.testing.assert_close(dispatcher((drawn(rows, 8),), {}), module(drawn(rows, 8)))
    # A program for the first shape, as without a declaration, and then one for any length.
    assert dispatcher.cache_info().builds == 2


def test_invariable_size_falls_back_to_static_with_a_reason() -> None:
    module = nn.Upsample(scale_factor=1.3, mode="bicubic")
    fast = compiled(module, ({2: Dim("height")},))
    for height in (6, 7):
        check(fast, module, drawn(1, 3, height, 6))
    assert builds(fast) == 2
    assert "for this shape alone" in str(fast.explain())


def test_options_with_dims_can_be_copied_and_pickled() -> None:
    module = Linear()
    fast = copy.deepcopy(compiled(module, {"x": {0: Dim("n")}}))
    fast.load_state_dict(module.state_dict())
    for rows in (3, 6):
        check(fast, module, drawn(rows, 8))
    assert builds(fast) == 1
