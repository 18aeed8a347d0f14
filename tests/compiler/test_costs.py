"""One table has the measured numbers, with their sources; rules hold none of their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tvmify.compiler import costs

TABLES = [value for name, value in vars(costs).items() if name.isupper() and name[0] != "_"]
COMPILER = Path(costs.__file__).parent


@pytest.mark.parametrize("table", TABLES, ids=lambda table: type(table).__name__)
def test_each_number_has_a_unit_and_a_source(table):
    for name, (value, unit, source) in costs.numbers(table).items():
        several = value if isinstance(value, tuple) else (value,)
        assert all(number > 0 for number in several), name
        assert unit, name
        assert source.machine, name
        assert source.command, name
        assert re.fullmatch("[0-9a-f]{7,}", source.commit), name


def test_no_field_is_unused():
    text = "\n".join(path.read_text() for path in COMPILER.rglob("*.py") if path.name != "costs.py")
    tables = {name: value for name, value in vars(costs).items() if value in TABLES}
    names = {f"{table}.{field}" for table, value in tables.items() for field in vars(value)}
    assert not [name for name in sorted(names) if not re.search(rf"\b{re.escape(name)}\b", text)]
