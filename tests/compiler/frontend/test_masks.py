"""Masks that programs compute: which are recognized, their sizes, and their cost."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram

from tests.compiler.programs import Program, check, check_each, compiled, executed, is_fused
from tests.pairs import pairs
from tests.tolerances import assert_close_to_reference
from tvmify import tvmify
from tvmify.compiler.frontend import masks
from tvmify.compiler.frontend.decompositions import decompose
from tvmify.torch_compat.silence import silenced

attention = nn.functional.scaled_dot_product_attention
lowest = torch.finfo(torch.float32).min
ones = partial(torch.ones, dtype=torch.bool)


def operands(queries: int, keys: int | None = None) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(2, 2, length, 8) for length in (queries, *[keys or queries] * 2))


def places(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(q.shape[-2]).unsqueeze(-1), torch.arange(k.shape[-2])


def compared(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    query, key = places(q, k)
    return key <= query


def windowed(q: torch.Tensor, k: torch.Tensor, width: int = 50) -> torch.Tensor:
    query, key = places(q, k)
    return (key <= query) & (key > query - width)


CAUSAL: dict[str, Callable[..., torch.Tensor]] = {
    "compared": compared,
    "lower bools": lambda q, k: ones(q.shape[-2], k.shape[-2]).tril(),
    "lower floats": lambda q, k: torch.ones(q.shape[-2], k.shape[-2]).tril() == 1,
    "not upper": lambda q, k: ~ones(q.shape[-2], k.shape[-2]).triu(1),
    "with axes": lambda q, k: compared(q, k)[None, None].expand(q.shape[0], 1, -1, -1),
    "all of several": lambda q, k: ones(1, 1) & compared(q, k) & ones(q.shape[-2], 1),
    "infinite": lambda q, k: q.new_full((q.shape[-2], k.shape[-2]), float("-inf")).triu(1),
    "least": lambda q, k: q.new_zeros(()).where(compared(q, k), lowest).to(q.dtype),
}

SPELT: dict[str, Callable[..., torch.Tensor]] = {
    "filled": lambda x: x.masked_fill(ones(x.shape[-2:]).triu(1), float("-inf")),
    "filled where zero": lambda x: x.masked_fill(torch.ones(x.shape[-2:]).tril() == 0, lowest),
    "chosen": lambda x: x.where(ones(x.shape[-2:]).tril(), float("-inf")),
    "added": lambda x: x + x.new_full(x.shape[-2:], float("-inf")).triu(1),
}


def masked(mask: Callable[..., torch.Tensor], q: Any, k: Any, v: Any) -> torch.Tensor:
    return attention(q, k, v, mask(q, k))


def spelt(mask: Callable[..., torch.Tensor], q: Any, k: Any, v: Any) -> torch.Tensor:
    return mask(q @ k.transpose(-1, -2) / 4).softmax(-1) @ v


@cache
def kernels_without_mask(*sizes: int) -> dict[str, str]:
    """Return the kernels of causal attention, which has no element for each query and key."""
    return compiled(partial(attention, is_causal=True), *operands(*sizes)).report["kernels"]


def test_causal_masks_are_not_materialized():
    functions = {name: partial(masked, mask) for name, mask in CAUSAL.items()}
    artifact = check_each(functions, *operands(1200))
    assert artifact.report["kernels"] == kernels_without_mask(1200)


@pytest.mark.parametrize("sizes", [(2048,), (1100, 1300), (1300, 1100)], ids=str)
def test_causal_masks_of_other_sizes(sizes: tuple[int, ...]):
    artifact = check(partial(masked, compared), *operands(*sizes))
    assert artifact.report["kernels"] == kernels_without_mask(*sizes)


@pytest.mark.parametrize(("spellings", "length"), [([*SPELT], 1200), (["filled"], 60)])
def test_decomposed_attention_with_causal_masks_has_no_scores(spellings: list[str], length: int):
    functions = {name: partial(spelt, SPELT[name]) for name in spellings}
    artifact = check_each(functions, *operands(length))
    assert artifact.report["kernels"] == kernels_without_mask(length)


@pytest.mark.parametrize("mask", [ones, torch.zeros], ids=["true", "zero"])
def test_all_true_masks_are_removed(mask: Callable[..., torch.Tensor]):
    qkv = operands(1100, 1300)
    artifact = compiled(lambda q, k, v: attention(q, k, v, mask(1100, 1300)), *qkv)
    assert artifact.report["kernels"] == kernels_without_mask(1100, 1300)


GENERAL: dict[str, Callable[..., torch.Tensor]] = {
    "window": windowed,
    "upper": lambda q, k: ones(q.shape[-2], k.shape[-2]).triu(),
    "ends together": lambda q, k: ones(q.shape[-2], k.shape[-2]).tril(k.shape[-2] - q.shape[-2]),
    "one more": lambda q, k: compared(q, k) | (places(q, k)[0] == places(q, k)[1] - 1000),
    "a bias": lambda q, k: compared(q, k).to(q.dtype),
}


@pytest.mark.parametrize("mask", GENERAL)
def test_other_masks_stay(mask: str):
    artifact = check(partial(masked, GENERAL[mask]), *operands(1100, 1300))
    assert artifact.report["kernels"] != kernels_without_mask(1100, 1300)
    assert len(artifact.library) < 1 << 20


@pytest.mark.parametrize("sizes", [(8, 10), (2, 1100), (1200,)], ids=str)
def test_padding_beside_a_causal_mask(sizes: tuple[int, ...]):
    def padded(q: Any, k: Any, v: Any, padding: Any) -> torch.Tensor:
        return attention(q, k, v, padding[:, None, None, :])

    def program(q: Any, k: Any, v: Any, padding: Any) -> torch.Tensor:
        return attention(q, k, v, compared(q, k) & padding[:, None, None, :])

    qkv = operands(*sizes)
    padding = torch.rand(2, qkv[1].shape[-2]) > 0.3
    padding[0, :3] = False  # hides all keys from the first queries of the first batch
    artifact = check(program, *qkv, padding)
    assert artifact.report["kernels"] == compiled(padded, *qkv, padding).report["kernels"]


FILLS = [float("-inf"), lowest, -1e9, -1e4]
SPELLINGS: dict[str, Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]] = {
    "filled": lambda x, hidden, fill: x.masked_fill(hidden, fill),
    "chosen by torch": lambda x, hidden, fill: torch.where(hidden, fill, x),
    "chosen": lambda x, hidden, fill: x.where(~hidden, fill),
}


@pytest.mark.parametrize(
    ("fill", "spelling", "shape", "queries"),
    pairs(FILLS, list(SPELLINGS), [(2, 1, 1, 12), (2, 1, 0, 12), (0, 12)], [12, 2]),
    ids=str,
)
def test_masked_fill_of_scores_needs_no_tensor(
    fill: float, spelling: str, shape: tuple[int, ...], queries: int
):
    """A hidden NaN would stay NaN if minus infinity were added."""
    hidden = torch.rand([extent or queries for extent in shape]) > 0.7
    hidden[..., 3] = True
    hidden[0] = True  # a query with all keys hidden gives NaN, or attends to all
    q, k, v = operands(queries, 12)
    k[1, ..., 3, :] = float("nan")

    def program(q: Any, k: Any, v: Any, hidden: Any) -> torch.Tensor:
        return spelt(lambda x: SPELLINGS[spelling](x, hidden, fill), q, k, v)

    assert is_fused(check(program, q, k, v, hidden))


@pytest.mark.parametrize("causal_first", [True, False])
@pytest.mark.parametrize("fill", [float("-inf"), lowest])
def test_scores_filled_twice(fill: float, causal_first: bool):
    def program(q: Any, k: Any, v: Any, padding: Any) -> torch.Tensor:
        hidden = [~compared(q, k), padding]

        def fills(x: torch.Tensor) -> torch.Tensor:
            for mask in hidden if causal_first else reversed(hidden):
                x = x.masked_fill(mask, fill)
            return x

        return spelt(fills, q, k, v)

    padding = torch.rand(2, 1, 1, 12) > 0.7
    padding[0, ..., :2] = True  # with the least number, the first queries attend to all keys
    artifact = check(program, *operands(12), padding)
    assert is_fused(artifact) == (fill == float("-inf"))


def test_fill_per_head_is_not_a_mask():
    def program(q: Any, k: Any, v: Any, hidden: Any) -> torch.Tensor:
        fill = torch.tensor([-1.0, -2.0]).reshape(2, 1, 1)
        return spelt(lambda x: torch.where(hidden, fill, x), q, k, v)

    assert not is_fused(check(program, *operands(12), torch.rand(12, 12) > 0.7))


@pytest.mark.parametrize("value", [-1e4, float("-inf")])
def test_finite_fills_and_scales_after_fills(value: float):
    def program(q: Any, k: Any, v: Any) -> torch.Tensor:
        return spelt(lambda x: x.masked_fill(~compared(q, k), value) * 1e-4, q, k, v)

    check(program, *operands(12))


class Buffered(nn.Module):
    """The mask in a buffer, as in nanoGPT."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(1, 1, length, length).tril())

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        shown = self.mask[:, :, : q.shape[-2], : k.shape[-2]]  # type: ignore[index]
        return spelt(lambda x: x.masked_fill(shown == 0, float("-inf")), q, k, v)


def test_a_mask_in_a_buffer_may_change():
    module, qkv = Buffered(40).eval(), operands(30)
    artifact = check(module, *qkv)
    assert is_fused(artifact)
    module.mask.copy_(torch.ones(40, 40).tril(3))  # type: ignore[operator]
    assert_close_to_reference(executed(artifact, module, *qkv), module, qkv)


def computed(function: Callable[..., torch.Tensor], *args: Any) -> tuple[ExportedProgram, fx.Node]:
    """Decompose a program that computes a mask; return it and the mask's node."""
    with silenced():  # torch's own deprecations
        program = decompose(torch.export.export(Program(function), args, strict=False)).program
    (output,) = program.graph.find_nodes(op="output")
    return program, output.args[0][0]


@pytest.mark.parametrize("mask", CAUSAL)
def test_long_masks_are_not_materialized(mask: str):
    q = torch.empty(1, 1, 2048, 1)
    program, node = computed(CAUSAL[mask], q, q)
    with Largest() as largest:
        assert masks.is_causal(program, node, 2048, 2048)
    assert 0 < largest.elements <= 1 << 17
    with Largest() as again:  # the next layer needs the same mask
        assert masks.is_causal(program, node, 2048, 2048)
    assert again.elements == 0


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the size of the largest result that is not a view."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.elements = max(self.elements, result.numel())
        return result


def test_masks_of_arguments_are_not_constant():
    x = torch.ones(6, 6)
    for function in (
        lambda x: x.tril() == 1,
        lambda x: torch.rand(6, 6) >= 0,
        lambda x: x.topk(6).values.bool(),
    ):
        program, node = computed(function, x)
        assert not masks.is_causal(program, node, 6, 6)
        assert not masks.is_neutral(program, node)


def test_bool_mask_may_select_hidden_positions():
    program, node = computed(lambda x: ~compared(x, x), torch.ones(6, 6))
    assert masks.is_causal(program, node, 6, 6, hides=True)
    assert not masks.is_causal(program, node, 6, 6)


def test_a_mask_may_depend_on_the_size_of_another_tensor():
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: torch.Tensor) -> Any:
        query, key = places(q, k)
        return attention(q, k, v, key <= query + torch.sym_max(0, past.shape[0] - 2))

    sizes = {"q": None, "k": None, "v": None, "past": {0: Dim("n", max=9)}}
    fast = tvmify(attend, dynamic_shapes=sizes, cache=False, compare=False, strict=True)
    q, k, v = operands(6)
    for length in (2, 4, 9):
        past = torch.zeros(length)
        torch.testing.assert_close(fast(q, k, v, past), attend(q, k, v, past))
    assert fast.cache_info().builds == 1
