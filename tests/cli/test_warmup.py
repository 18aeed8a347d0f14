from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from tvmify import warming as warming_of_tvmify
from tvmify.cli import app, warmup
from tvmify.errors import WarmUpError
from tvmify.signature import TensorSpec
from tvmify.torch_compat.declared_sizes import declared_size
from tvmify.warming import Outcome, Warmed

BUILT = Outcome("Net(float32[1, 3])", "built", "", 1.25, 18_184)
EAGER = Outcome("Net(bool[1])", "eager", "it \x1b[31mdepends on values", 0.5, 0)


class Warming:
    """Stands for `warm_cache`, which `tests/test_warming.py` tests."""

    def __init__(self, *outcomes: Outcome, error: BaseException | None = None) -> None:
        self.outcomes = list(outcomes)
        self.error = error

    def __call__(self, subject: str, *signatures: Any, **options: Any) -> Warmed:
        self.subject, self.signatures, self.options = subject, signatures, options
        options["on_begin"](len(self.outcomes), ["a note"])
        for outcome in self.outcomes:
            options["on_outcome"](outcome)
        if self.error is not None:
            raise self.error
        return Warmed(self.outcomes, ["a note"])


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(warming: Warming, *arguments: object) -> Result:
        monkeypatch.setattr(warming_of_tvmify, "warm_cache", warming)
        return CliRunner().invoke(app, ["warmup", "my_pkg:make", *map(str, arguments)])

    return run


def test_outcome_of_each_signature_is_printed(run: Any) -> None:
    result = run(Warming(BUILT, EAGER))
    assert result.exit_code == 1
    rows = result.stdout.splitlines()
    assert rows[1].split() == ["Net(float32[1,", "3])", "built", "1.2", "18.2", "kB"]
    assert "eager (it \\x1b[31mdepends on values)" in rows[2]
    assert rows[-1] == "1 built, 1 eager"
    assert "tvmify: a note" in result.stderr
    assert "Net(float32[1, 3]): built, 1.2 s" in result.stderr
    assert "\x1b" not in result.output


def test_all_compiled_is_success(run: Any) -> None:
    result = run(Warming(BUILT), "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"outcomes": [BUILT._asdict()], "notes": ["a note"]}


def test_shapes_and_dtypes_become_signatures(run: Any) -> None:
    warming = Warming(BUILT)
    arguments = "--shape", "1,3,8,8", "--shape", "1,7 1,7", "--dtype", "float16", "--dtype"
    result = run(warming, *arguments, "int64 bool", "--jobs", 2, "--method", "encode")
    assert result.exit_code == 0, result.output
    assert warming.signatures == (
        [TensorSpec((1, 3, 8, 8), torch.float16)],
        [TensorSpec((1, 7), torch.int64), TensorSpec((1, 7), torch.bool)],
    )
    assert (warming.options["jobs"], warming.options["method"]) == (2, "encode")


def test_a_size_may_have_limits(run: Any) -> None:
    warming = Warming(BUILT)
    run(warming, "--shape", "rows=2..64,..,8 rows=2..64,..9", "--dtype", "int64 bool")
    ((ids, mask),) = warming.signatures
    assert (ids.dtype, ids.shape[2], mask.dtype) == (torch.int64, 8, torch.bool)
    found = [declared_size(size) for size in (*ids.shape[:2], *mask.shape)]
    assert [(size.name, size.least) for size in found] == [("rows", 2), (None, 2)] * 2
    assert [size.most for size in found] == [64, 2**31 - 1, 64, 9]


def test_a_target_may_be_json(run: Any) -> None:
    warming = Warming(BUILT)
    run(warming, "--from", "signatures.jsonl", "--target", '{"kind": "llvm", "mcpu": "znver4"}')
    assert warming.options["target"] == {"kind": "llvm", "mcpu": "znver4"}
    assert warming.options["file"] == Path("signatures.jsonl")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "1,x"], "--shape '1,x': 'x' is not a size"),
        (["--shape", "a=9..3"], "'a=9..3' allows no size of 2 or more"),
        (["--shape", "..1"], "'..1' allows no size of 2 or more"),
        (["--shape", "-2..4"], "--shape '-2..4'"),
        (["--shape", "1", "--dtype", "float3"], "'float3' is not a dtype"),
        (["--shape", "1", "--dtype", "load"], "'load' is not a dtype"),
        (["--shape", "1", "--dtype", "bool", "--dtype", "bool"], "1 --shape and 2 --dtype"),
        (["--shape", "1 2 3", "--dtype", "bool bool"], "3 tensors"),
        (["--shape", "1", "--device", "nowhere"], "nowhere"),
        (["--target", "gpu"], "unknown target 'gpu'"),
        (["--target", "{"], "--target is not valid JSON"),
        (["--jobs", "0"], "--jobs"),
    ],
)
def test_wrong_use(run: Any, arguments: list[str], message: str) -> None:
    result = run(Warming(BUILT), *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("error", [WarmUpError("no such module"), FileNotFoundError("no file")])
def test_errors_of_use(run: Any, error: Exception) -> None:
    result = run(Warming(error=error))
    assert result.exit_code == 2
    assert str(error) in result.stderr
    assert not result.stdout


def test_interrupt_prints_finished_signatures(run: Any) -> None:
    result = run(Warming(BUILT, error=KeyboardInterrupt()), "--json")
    assert result.exit_code == 130
    assert json.loads(result.stdout)["outcomes"] == [BUILT._asdict()]


def test_it_is_a_command() -> None:
    assert warmup in [command.callback for command in app.registered_commands]
