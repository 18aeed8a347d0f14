"""The sizes that products with symbolic sizes are planned for."""

from __future__ import annotations

from tvm import relax, tirx

from tests.compiler import symbolic
from tests.compiler.kernels.kernels import loops, random
from tvmify.compiler import sizes
from tvmify.compiler.kernels.matmul.planning import workload

op = relax.op


def test_activations_of_symbolic_sizes_are_planned_for_many():
    m, n = (tirx.Var(name, "int64") for name in "mn")
    with sizes.symbols({"m": sizes.Range(4, 2, 512), "n": sizes.Range(200, 2, 512)}):
        both = workload((1, m, n, 64), "float32", packed=False)
        weights = workload((1, m, 300, 64), "float32")
        reduced = workload((1, 8, 64, m), "float32", packed=False)
    assert (both.rows, both.columns, both.depth) == (128, 200, 64)
    assert weights.rows == 4
    assert (reduced.rows, reduced.columns, reduced.depth) == (8, 64, 512)


def test_a_panel_is_packed_once_for_any_number_of_rows():
    inputs = [(("m", 96), "float32"), ((96, "n"), "float32")]
    program = symbolic.build(lambda _, x, y: op.matmul(x, y), inputs, hint=12)
    kernel = next(f for v, f in program.ir_mod.functions_items() if "matmul" in v.name_hint)
    panels, *inside = loops(kernel)
    symbols = {variable.name for variable in sizes.variables_of(panels.extent)}
    assert symbols == {"n"}
    assert any("m" in str(loop.extent) for loop in inside)
    for rows in (2, 9, 97, 300):
        symbolic.check(program, lambda x, y: x @ y, [random(rows, 96), random(96, 33, seed=1)])
