"""The tensors that an imported program takes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument


@dataclass(frozen=True)
class Parameter:
    """A tensor that a program takes.

    Attributes
    ----------
    node
        Its placeholder.
    leaf
        Its index among the flattened arguments of the call; None for a tensor of the module.
    name
        Its dotted name in the module; empty for an argument.
    """

    node: fx.Node
    leaf: int | None
    name: str


def parameters(
    program: ExportedProgram,
    state: Collection[str],
    copied: Collection[fx.Node],
    symbols_of: Callable[[fx.Node], set[str]],
) -> Iterator[Parameter]:
    """Yield the tensors that a program needs, in the order of its placeholders.

    An argument that is only returned is not needed, unless it is the only one with a certain
    symbol. Constants are bound, not taken.

    Parameters
    ----------
    state
        Names of the module's tensors that are taken in any case.
    copied
        Values whose elements are copied to another tensor.
    symbols_of
        Returns the symbols among the sizes of a placeholder.
    """
    tensors = list(_tensors(program))
    needed = {
        node: spec.target in state or node in copied or _is_read(node, leaf)
        for spec, node, leaf in tensors
    }
    shown: set[str] = set()
    for node, is_needed in needed.items():
        shown.update(symbols_of(node) if is_needed else ())
    for spec, node, leaf in tensors:
        symbols = symbols_of(node)
        if not needed[node] and symbols <= shown:
            continue
        shown.update(symbols)
        if spec.kind is not InputKind.CONSTANT_TENSOR:
            yield Parameter(node, leaf, "" if leaf is not None else str(spec.target))


def _tensors(program: ExportedProgram) -> Iterator[tuple[InputSpec, fx.Node, int | None]]:
    placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    leaves = 0
    for spec in program.graph_signature.input_specs:
        leaf = leaves if spec.kind is InputKind.USER_INPUT else None
        leaves += leaf is not None
        if isinstance(spec.arg, TensorArgument):
            yield spec, placeholders[spec.arg.name], leaf


def _is_read(node: fx.Node, leaf: int | None) -> bool:
    """Whether a program computes with a tensor; a tensor of the module is read to be returned."""
    return any(user.op != "output" or leaf is None for user in node.users)
