"""The form of all reasons: they continue a sentence, and the next step is a separate sentence."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

from tvmify import errors

PACKAGE = Path(errors.__file__).parent
#: Names with which a reason may begin.
NAMES = ("TorchScript", "TVM", "PyTorch")


def reasons() -> Iterator[tuple[str, str, str]]:
    """Yield the place, the literal start of the reason and the literal end of the next step."""
    classes = {
        name
        for name, member in vars(errors).items()
        if inspect.isclass(member)
        and issubclass(member, errors.NotCompiled)
        and not issubclass(member, errors.UnsupportedOperator)  # takes a detail
    }
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id in classes and len(node.args) > 1:
                start, end = literal(node.args[0], 0), literal(node.args[1], -1)
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", start, end


def literal(node: ast.expr, at: int) -> str:
    """Return the first or last part of a text; empty if it is computed."""
    if isinstance(node, ast.JoinedStr):
        node = node.values[at]
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def test_reasons_begin_in_lower_case_and_next_steps_are_sentences() -> None:
    found = list(reasons())
    assert len(found) > 80
    wrong = [
        place
        for place, start, end in found
        if (start[:1].isupper() and not start.startswith(NAMES))
        or (end.strip() and not end.endswith("."))
    ]
    assert not wrong
