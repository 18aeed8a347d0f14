"""One package has all measured numbers with their sources; rules contain none."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tvmify.compiler import costs
from tvmify.compiler.costs import Kind, Number

TABLES = {name: value for name, value in vars(costs).items() if name.isupper() and name[0] != "_"}
NUMBERS = {
    f"{table}.{field}": number
    for table, value in TABLES.items()
    for field, number in costs.numbers(value).items()
}
FOLDER = Path(costs.__file__).parent
ROOT = FOLDER.parents[2]


def _git(*arguments: str) -> str | None:
    """Return the output of git in this checkout; None if it fails."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


@pytest.mark.parametrize("number", NUMBERS.values(), ids=list(NUMBERS))
def test_a_number_has_a_unit_and_says_how_it_was_found(number: Number) -> None:
    value, unit, source = number
    assert all(each > 0 for each in (value if isinstance(value, tuple) else (value,)))
    assert unit
    assert re.fullmatch("[0-9a-f]{7,}", source.commit)
    was_run = source.kind in (Kind.MEASURED, Kind.FITTED)
    assert bool(source.command) == was_run
    assert bool(source.machine) == was_run
    assert bool(source.reason) != was_run


def test_each_commit_exists() -> None:
    if _git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("needs a git checkout with its history")
    commits = sorted({number.source.commit for number in NUMBERS.values()})
    assert not [commit for commit in commits if _git("cat-file", "-t", commit) != "commit"]


def test_each_command_is_a_module_of_this_repository() -> None:
    commands = {number.source.command for number in NUMBERS.values()} - {""}
    modules = {re.match(r"python -m (benchmarks\.\w+)", command) for command in commands}
    names = {module[1] if module else None for module in modules}
    assert None not in names
    assert all(importlib.util.find_spec(name) for name in names if name)


def test_no_number_is_unused() -> None:
    files = [path for path in FOLDER.parent.rglob("*.py") if FOLDER not in path.parents]
    text = "\n".join(path.read_text() for path in files)
    assert not [name for name in NUMBERS if not re.search(rf"\b{re.escape(name)}\b", text)]


def test_findings_are_on_the_page_of_constants() -> None:
    page = (ROOT / "docs/measurements/constants.md").read_text()
    run = [name for name, number in NUMBERS.items() if number.source.command]
    assert not [name for name in run if f"`{name}`" not in page]


#: Numbers in modules of kernels that are not costs, by what they are.
NO_COSTS = {
    "limits that keep results accurate": """
        attention/rows.py:_LONGEST common/sums.py:LONGEST_SUM
        common/sums.py:_SHORTEST_STRICT_SUM conv/winograd/plan.py:_BLOCK
        reduction/template.py:LONGEST""",
    "limits that keep compile times and stacks small": """
        common/inlining.py:_LONGEST common/inlining.py:_PER_CONDITION
        common/transposes.py:_LEAST_ROWS common/transposes.py:_MOST_ROWS conv/pooling.py:_MAXIMA
        elementwise/limit_copies.py:_MOST_READS elementwise/pieces.py:_MOST_PIECES
        elementwise/rule.py:_UNROLLED""",
    "what a kernel or an instruction consists of": """
        common/prefetch.py:_FEWEST common/prefetch.py:_LINE common/short_tiles.py:_PARTS
        cuda/products.py:_SHORTEST
        elementwise/rule.py:_WORD matmul/compact.py:VECTORS matmul/compact.py:_WORDS
        matmul/dots.py:_SUMS_TRANSPOSED matmul/pairs.py:_WIDTHS reduction/rule.py:_STEP""",
    "mathematics, and the encoding of numbers": """
        attention/powers.py:_COEFFICIENTS attention/powers.py:_LEAST matmul/compact.py:_EXPONENT
        matmul/compact.py:_FRACTION matmul/compact.py:_LARGEST matmul/compact.py:_LEAST
        matmul/compact.py:_MIDDLE matmul/compact.py:_MOST matmul/compact.py:_NAN
        matmul/compact.py:_THREE matmul/pairs.py:_HIGH matmul/pairs.py:_LOW""",
    "names that TVM and LLVM have": """
        common/prefetch.py:_DATA common/prefetch.py:_L1 common/prefetch.py:_L2
        common/prefetch.py:_TO_READ conv/windows.py:NCHW conv/windows.py:PLANAR
        cuda/intrinsics.py:_LEVEL matmul/pairs.py:_PURE""",
}


def _is_number(node: ast.expr) -> bool:
    """Whether an expression consists of numbers only."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (int, float)) and not isinstance(node.value, bool)
    if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Tuple)):
        parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        return bool(parts) and all(map(_is_number, parts))
    return False


def _numbers_of(path: Path) -> Iterator[str]:
    """The names of a module that are numbers."""
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Assign):
            (target,), value = statement.targets, statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            target, value = statement.target, statement.value
        else:
            continue
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = list(zip(target.elts, value.elts, strict=True))
        yield from (ast.unparse(name) for name, number in pairs if _is_number(number))


def test_kernels_have_no_costs_of_their_own() -> None:
    kernels, cuda = FOLDER.parent / "kernels", FOLDER.parent / "cuda"
    found = {
        f"{path.relative_to(base)}:{name}"
        for folder, base in ((kernels, kernels), (cuda, cuda.parent))
        for path in folder.rglob("*.py")
        for name in _numbers_of(path)
    }
    assert found == {name for names in NO_COSTS.values() for name in names.split()}
