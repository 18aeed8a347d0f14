"""No SymInt reaches a converter, and values that depend on sizes only are known at import."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from tvm import relax, tirx

from tests.compiler.programs import target
from tests.pytorch import IS_2_11
from tvmify.capture import Varying, capture
from tvmify.compiler import pipeline, sizes
from tvmify.compiler.environment import prepare_tvm
from tvmify.compiler.frontend import importer as importing
from tvmify.compiler.frontend.converters import CONVERTERS
from tvmify.compiler.frontend.decompositions import decompose
from tvmify.compiler.frontend.imported import Imported
from tvmify.compiler.frontend.importer import import_program
from tvmify.compiler.sizes import Range
from tvmify.errors import UnsupportedOperator
from tvmify.torch_compat.silence import silenced
from tvmify.torch_compat.tracing import tracing

KNOWN = {f"s{i}": Range(7, 2, 2**31 - 1) for i in range(4)}


def imported(module: nn.Module, *args: torch.Tensor, axes: dict[int, Any]) -> Imported:
    """Import a module with symbolic sizes."""
    varying = Varying(axes)
    with torch.no_grad(), sizes.symbols(KNOWN):
        exported = capture(module.eval(), args, {}, varying).export(args, {}, varying)
        prepare_tvm()
        with tracing(), silenced():
            decomposed = decompose(exported)
        with pipeline.tvm_target(target()):
            return import_program(decomposed)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table(torch.arange(x.size(1)))


class Causal(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        at = torch.arange(q.size(2))
        mask = (at[None, :] <= at[:, None])[None, None]
        return nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=mask)


class Window(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        at = torch.arange(q.size(2))
        mask = (at[None, :] <= at[:, None]) & (at[None, :] > at[:, None] - 3)
        return nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=mask)


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(1) / x.size(1) + x.var(1)


class Slices(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:, :1], x[:, 1:], x[:, -2:]], 1).reshape(x.size(0), -1)


X = torch.zeros(2, 7, 8)
ROWS = {0: ("b", "s", None)}
HEADS = {0: (None, None, "s", None), 1: (None, None, "s", None)}
QK = torch.zeros(1, 2, 7, 4), torch.zeros(1, 2, 7, 4)


@pytest.mark.parametrize(
    ("module", "args", "axes"),
    [
        (Positions(), (X,), ROWS),
        (Mean(), (X,), ROWS),
        (Slices(), (X,), ROWS),
        (Window(), QK, HEADS),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (X,), ROWS),
    ],
    ids=["positions", "mean", "slices", "window", "encoder"],
)
def test_no_symint_reaches_a_converter(
    module: nn.Module, args: Any, axes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def spied(convert: Any) -> Any:
        def look(importer: Any, node: fx.Node) -> Any:
            fx.node.map_aggregate((node.args, node.kwargs), seen.append)
            values = [n for n in node.all_input_nodes if isinstance(n.meta["val"], torch.Tensor)]
            seen.extend(importer.shape(n) for n in values)
            return convert(importer, node)

        return look

    table = {name: spied(convert) for name, convert in CONVERTERS.items()}
    monkeypatch.setattr(importing, "CONVERTERS", table)
    result = imported(module, *args, axes=axes)
    sizes_seen = [s for shape in seen if isinstance(shape, tuple) for s in shape] + seen
    assert not any(isinstance(s, (torch.SymInt, torch.SymFloat, torch.SymBool)) for s in sizes_seen)
    nodes = [s for s in seen if isinstance(s, fx.Node)]
    assert not any(isinstance(n.meta.get("val"), torch.SymInt) for n in nodes)
    (first, *_) = result.ir_mod["main"].params
    assert any(isinstance(size, tirx.Var) for size in first.ty.shape)
    assert not result.bridged


def masks_of(result: Imported) -> list[tuple[bool, int]]:
    """Return for each attention whether it is causal, and how many masks it reads."""
    found: list[tuple[bool, int]] = []

    def visit(x: Any) -> None:
        if isinstance(x, relax.Call) and getattr(x.op, "name", "") == "relax.call_pure_packed":
            _, _, causal, _, _, *operands = x.args
            found.append((bool(causal.value.numpy()), len(operands) - 3))

    relax.analysis.post_order_visit(result.ir_mod["main"].body, visit)
    return found


def test_a_causal_mask_is_known_by_its_formula() -> None:
    assert masks_of(imported(Causal(), *QK, axes=HEADS)) == [(True, 0)]


def test_sliding_window_keeps_one_bound_as_a_mask() -> None:
    assert masks_of(imported(Window(), *QK, axes=HEADS)) == [(True, 1)]


def test_untranslatable_expression_is_refused() -> None:
    class Rounded(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * round(x.size(1) / 3)

    with pytest.raises(UnsupportedOperator, match="the size RoundToInt"):
        imported(Rounded(), X, axes={0: (None, "s", None)})


@pytest.mark.skipif(IS_2_11, reason="PyTorch 2.11 does not record such checks")
def test_numbers_that_only_checks_read_need_no_translation() -> None:
    class Checked(nn.Module):
        def forward(self, x: torch.Tensor, **kwargs: object) -> torch.Tensor:
            torch._check_tensor_all(torch.arange(x.size(1)).sum() >= 0)
            y = x * 2
            y[:, 0] = 0  # such programs are recorded again, which adds checks
            return y

    (first, *_) = imported(Checked(), X, axes=ROWS).ir_mod["main"].params
    assert any(isinstance(size, tirx.Var) for size in first.ty.shape)
