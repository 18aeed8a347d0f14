"""What ``main`` returns: a tensor for each result that is computed, and for each value written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.export.graph_signature import ConstantArgument
from tvm import relax

from tvmify.artifact.results import (
    Argument,
    Computed,
    ComputedSize,
    Constant,
    Repeated,
    Result,
    StateTensor,
    View,
)
from tvmify.artifact.writes import Write
from tvmify.compiler.frontend.dtypes import checked_dtype
from tvmify.compiler.frontend.sharing import ModuleTensor, Writable
from tvmify.errors import NothingToCompute, UnsupportedOperator
from tvmify.torch_compat.symbols import SYMBOLS

if TYPE_CHECKING:
    from tvmify.compiler.frontend.importer import Importer


class Outputs:
    """Collects the tensors that ``main`` returns.

    Parameters
    ----------
    importer
        Has translated all nodes of the program.

    Attributes
    ----------
    results
        How each result of the program is made: of a tensor of ``main``, an argument, a constant …
    writes
        Which tensor of ``main`` is written to which argument or state.
    contiguous
        Which arguments and state must be contiguous.
    tensors
        Those of ``main``, in order.
    complex
        Which of them are pairs of the parts of complex numbers.

    Raises
    ------
    NothingToCompute
        There are none.
    """

    def __init__(self, importer: Importer) -> None:
        self._importer = importer
        self._returned = importer.returned()
        self._of_results: dict[int, Computed] = {}
        self._of_nodes: dict[fx.Node, Computed] = {}
        self._complex: list[int] = []
        self.tensors: list[relax.Expr] = []
        self.results = tuple(map(self._result, range(len(self._returned))))
        self.writes = tuple(
            Write(self._base(base), self._written(node)) for base, node in importer.written.items()
        )
        self.complex = tuple(self._complex)
        contiguous = sorted(importer.shared.contiguous, key=str)
        self.contiguous = tuple(map(self._base, contiguous))
        if not self.tensors:
            raise NothingToCompute(
                "the program computes no tensors: it only returns arguments or constants",
                "Run it in eager PyTorch: compiling it would gain nothing.",
            )

    def _result(self, index: int) -> Result:
        spec, value = self._returned[index]
        if isinstance(spec, ConstantArgument):
            return Constant(spec.value)
        if isinstance(value, torch.SymInt):
            return ComputedSize(self._importer.symbols.stored(value))
        if isinstance(value, SYMBOLS):
            raise UnsupportedOperator(
                ["aten.sym_size.int"], f"the result {value} cannot be expressed"
            )
        place = self._importer.shared.places[index]
        if place is None:
            return self._computed(index)
        if not isinstance(place.base, Repeated):
            base = self._base(place.base)
            return base if place.geometry is None else View(base, place.geometry)
        if place.geometry is None:
            return place.base
        return View(self._computed(place.base.result), place.geometry)

    def _computed(self, index: int) -> Computed:
        """Return the tensor of a result with memory of its own, with its axes as in memory."""
        if index in self._of_results:
            return self._of_results[index]
        node: Any = self._returned[index][1]
        checked_dtype(node.meta["val"], node.name)
        value, order = self._importer.env[node], self._importer.shared.orders.get(index)
        if order is not None and order != tuple(range(len(order))):
            parts = range(len(order), len(value.ty.shape))  # of complex numbers
            value = self._importer.emit(relax.op.permute_dims(value, [*order, *parts]))
        tensor = self._of_results[index] = self._add(node, value)
        if order is None:
            self._of_nodes.setdefault(node, tensor)
        return tensor

    def _written(self, node: fx.Node) -> Computed:
        if node not in self._of_nodes:
            self._of_nodes[node] = self._add(node, self._importer.env[node])
        return self._of_nodes[node]

    def _add(self, node: fx.Node, value: relax.Expr) -> Computed:
        if node.meta["val"].is_complex():
            self._complex.append(len(self.tensors))
        self.tensors.append(value)
        return Computed(len(self.tensors) - 1)

    def _base(self, base: Writable) -> Argument | StateTensor:
        if isinstance(base, ModuleTensor):
            return StateTensor(self._importer.state.index(base.name))
        return base
