"""What is not compiled, said before anything is translated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx
from torch.export import ExportedProgram

from tvmify.compiler import operators
from tvmify.errors import UnsupportedOperator


def refuse_effects(program: ExportedProgram, mutating: Sequence[str]) -> None:
    """Refuse programs that do more than compute a result.

    Parameters
    ----------
    program
        Functional: its signature says which buffers and inputs it changes.
    mutating
        Names of the operators that wrote in place before it was made functional.

    Raises
    ------
    UnsupportedOperator
        It changes a buffer or an input.
    """
    signature = program.graph_signature
    changed = [
        *(f"buffer {name!r}" for name in signature.buffers_to_mutate.values()),
        *(f"input {name!r}" for name in signature.user_inputs_to_mutate.values()),
    ]
    if changed:
        raise UnsupportedOperator(
            mutating or ["aten.copy_.default"], f"the program changes {', '.join(changed)} in place"
        )


def refuse(nodes: Iterable[fx.Node]) -> None:
    """Refuse calls of operators, if there are any.

    Raises
    ------
    UnsupportedOperator
        Names all of them, so that a person needs not find them one by one.
    """
    names = [operators.name(node) for node in nodes]
    if names:
        raise UnsupportedOperator(names)
