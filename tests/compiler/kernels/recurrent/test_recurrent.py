"""The kernels of recurrent layers: all of their plans."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.ir import Call, Expr

from tests.compiler.kernels.kernels import AVX2, AVX512, NEON, TARGETS, Array, executable, random
from tvmify.compiler.kernels.common.choice import Choices, choosing
from tvmify.compiler.kernels.common.rewriting import rewrite_body, substitute
from tvmify.compiler.kernels.recurrent import template as recurrent
from tvmify.compiler.kernels.recurrent.plan import Plan, candidates
from tvmify.compiler.microarchitecture import Microarchitecture

MACHINES = [AVX512, AVX2, NEON]
GATES = {"lstm": 4, "gru": 3}


def plan(
    kind: str, batch: int, hidden: int, target: tvm.target.Target, dtype: str = "float32"
) -> Plan:
    return Plan.of(3, batch, hidden, GATES[kind], dtype, Microarchitecture.of(target))


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def expected(inputs: Array, weights: Array, states: list[Array], reverse: bool) -> Iterator[Array]:
    """The states in the order of computation; gates are rows of the weights."""
    state, cell = states[0], states[-1]
    for x in inputs[::-1] if reverse else inputs:
        products = np.einsum("bk,gik->bgi", state, weights)
        if len(weights) == 4:
            ingoing, forget, added, shown = np.moveaxis(x + products, 1, 0)
            cell = sigmoid(forget) * cell + sigmoid(ingoing) * np.tanh(added)
            state = sigmoid(shown) * np.tanh(cell)
        else:
            reset, update = (sigmoid(x[:, g] + products[:, g]) for g in (0, 1))
            new = np.tanh(x[:, 2] + reset * products[:, 2])
            state = new + update * (state - new)
        yield state


def run(plan: Plan, arrays: list[Array], target: tvm.target.Target, reverse: bool) -> Array:
    """Call the kernel on arrays without padding; return the states without padding."""
    inputs, weights, *states = arrays
    missing = plan.padded - plan.hidden
    tiles = plan.padded // plan.tile
    padded = np.pad(weights, [(0, 0), (0, missing), (0, 0)])
    packed = padded.reshape(plan.gates, tiles, plan.tile, plan.hidden).transpose(1, 3, 0, 2)
    given = [np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) for x in (inputs, *states)]
    given.insert(1, packed)
    if plan.kind == "gru":
        given.append(np.zeros(plan.padded, plan.dtype))
    shapes = [(plan.steps, plan.batch, plan.padded), (plan.batch, plan.padded)]
    results = [tvm.runtime.tensor(np.full(s, 7, plan.dtype)) for s in shapes[: len(states)]]
    built = executable(recurrent.kernel(plan, reverse), target)
    built(*(tvm.runtime.tensor(np.ascontiguousarray(a)) for a in given), *results)
    return results[0].numpy()[..., : plan.hidden]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize(("batch", "hidden"), [(1, 20), (5, 37)])
def test_alternatives(kind: str, batch: int, hidden: int, target: tvm.target.Target):
    own = plan(kind, batch, hidden, target)
    gates = own.gates
    arrays = [
        random(own.steps, batch, gates, hidden, seed=1),
        random(gates, hidden, hidden, seed=2) / 4,
        *(random(batch, hidden, seed=seed) for seed in (3, 4)[: gates - 2]),
    ]
    plans = candidates(own, Microarchitecture.of(target))[: Choices().most]
    for number, candidate in enumerate(plans):
        reverse = bool(number % 2)
        want = np.stack(list(expected(arrays[0], arrays[1], arrays[2:], reverse)))
        got = run(candidate, arrays, target, reverse)
        np.testing.assert_allclose(got[::-1] if reverse else got, want, atol=2e-6)


@pytest.mark.parametrize("target", MACHINES)
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("batch", [1, 2, 5, 16, 64])
@pytest.mark.parametrize("hidden", [3, 20, 37, 256])
def test_sums_fit_into_registers(
    kind: str, batch: int, hidden: int, dtype: str, target: tvm.target.Target
):
    machine = Microarchitecture.of(target)
    own = plan(kind, batch, hidden, target, dtype)
    plans = candidates(own, machine)
    assert plans[0] == own
    assert len({str(candidate) for candidate in plans}) == len(plans)
    for candidate in plans:
        assert candidate.rows * candidate.gates * candidate.vectors <= machine.accumulators
        assert candidate.rows <= batch
        assert candidate.padded - hidden < candidate.tile
        assert candidate.packed_shape[0] * candidate.tile == candidate.padded


@pytest.mark.parametrize("target", MACHINES)
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_candidate_set(kind: str, batch: int, target: tvm.target.Target):
    own, *others = candidates(plan(kind, batch, 256, target), Microarchitecture.of(target))[
        : Choices().most
    ]
    for feature in ("vectors", "fork", *["rows"] * (batch > 1)):
        assert any(getattr(other, feature) != getattr(own, feature) for other in others)


def test_one_tile_is_not_shared_out():
    machine = Microarchitecture.of(AVX2)
    assert not any(candidate.fork for candidate in candidates(plan("gru", 1, 8, AVX2), machine))


@pytest.mark.parametrize(
    ("kind", "batch", "hidden", "target", "rows", "vectors"),
    [
        ("lstm", 1, 256, AVX512, 1, 2),
        ("lstm", 1, 256, AVX2, 1, 2),
        ("lstm", 1, 256, NEON, 1, 2),
        ("lstm", 1, 37, AVX512, 1, 1),  # 48 units instead of 64
        ("lstm", 4, 256, AVX512, 4, 1),
        ("lstm", 16, 256, AVX512, 4, 1),  # no row is computed twice
        ("lstm", 16, 256, AVX2, 2, 1),
        ("gru", 4, 256, AVX512, 4, 2),
        ("gru", 16, 256, AVX2, 3, 1),
    ],
)
def test_tiles(
    kind: str, batch: int, hidden: int, target: tvm.target.Target, rows: int, vectors: int
):
    own = plan(kind, batch, hidden, target)
    assert (own.rows, own.vectors) == (rows, vectors)


def test_workloads_and_plans_have_names():
    own = plan("lstm", 16, 256, AVX512)
    assert own.workload == "lstm 3x16x256 float32"
    assert str(own) == "4 rows 1 vectors shared"
    with choosing(Choices("strict")):
        assert str(plan("lstm", 16, 256, AVX512)) == "4 rows 1 vectors sums of 32 shared"


@pytest.mark.parametrize("kind", GATES)
def test_activations_are_not_fused_into_activations(kind: str):
    # TVM's code generator repeats arguments: LLVM would take ten times as long.
    stores: list[tirx.BufferStore] = []
    calls: list[Call] = []

    def note_store(statement: tirx.Stmt) -> None:
        if isinstance(statement, tirx.BufferStore):
            stores.append(statement)

    def note_call(value: Expr) -> None:
        if isinstance(value, Call) and value.op.name in {"tirx.sigmoid", "tirx.tanh"}:
            calls.append(value)

    rewrite_body(recurrent.kernel(plan(kind, 5, 37, AVX512), reverse=False), note_store)
    for store in stores:
        substitute(store.value, note_call)
    taken, calls = calls, []
    assert len(taken) >= GATES[kind]
    for call in taken:
        for argument in call.args:
            substitute(argument, note_call)
    assert not calls
