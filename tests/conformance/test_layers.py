"""Random layers with random candidates agree with eager; `make programs` draws more of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from conformance import layers
from conformance.layer_kinds import KINDS, Call
from conformance.layers import MODULES, TOGETHER, Build, Chance, Layer, check
from conformance.operators import COMPILED
from conformance.programs import Input, Program, explore, settings
from tvmify.dispatch.outcome import Compiled

LAYERS = 8
PLAIN = Build(torch.float32, "default", narrow=False, seed=0)


def layer(module: nn.Module, *shapes: Sequence[int]) -> Layer:
    inputs = [Input(tuple(s), torch.float32, "contiguous", 1, special=False) for s in (*shapes, ())]
    return Layer(module.eval(), tuple(inputs), Program((), (), scale=4.0))


def test_random_layers_match_eager() -> None:
    counts = explore(MODULES, check, LAYERS // TOGETHER, seed=None)
    assert counts == {(COMPILED, ""): LAYERS}


def test_candidate_depends_only_on_seed_and_workload() -> None:
    names = ["1", "2", "3", "4"]
    picked = {
        (seed, work): Chance(seed).best(work, names) for seed in range(20) for work in ("a", "b")
    }
    assert set(picked.values()) == set(names)
    assert any(picked[seed, "a"] != picked[seed, "b"] for seed in range(20))
    assert all(Chance(seed).best(work, names) == name for (seed, work), name in picked.items())


def test_candidates_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, str] = {}

    def best(chance: Chance, workload: str, candidates: Sequence[str]) -> str:
        asked[workload] = candidates[-1]
        return candidates[-1]

    libraries = set()

    def noting(compiled: object) -> object:
        (outcome,) = layers.dispatcher_of(compiled).state.memory.values()
        assert isinstance(outcome, Compiled)
        artifact = outcome.executor.artifact
        assert artifact.report["tuning"]["changed"].items() <= asked.items()
        libraries.add(artifact.library)
        return None

    monkeypatch.setattr(layers, "where_it_ran", noting)
    linear = layer(nn.Linear(64, 96), (16, 64))
    check([linear], PLAIN)
    monkeypatch.setattr(Chance, "best", best)
    check([linear], PLAIN)
    assert asked
    assert len(libraries) == 2


def test_wrong_result_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrongly(module: nn.Module, **_: object) -> Callable[..., object]:
        return lambda *tensors: [[result + 1e-3 for result in each] for each in module(*tensors)]

    monkeypatch.setattr(layers, "tvmify", wrongly)
    with pytest.raises(AssertionError, match="allowed"):
        check([layer(nn.Linear(5, 3), (2, 5))], PLAIN)


def test_every_layer_kind_accepts_its_draws() -> None:
    drawn = set()

    @settings(20, seed=None)
    @given(st.data())
    def draw_each(data: st.DataObject) -> None:
        for kind in dict.fromkeys(KINDS):
            module, shapes = kind(data.draw)
            tensors = [
                Input(tuple(sizes), layers.DTYPES.get(name, torch.float32), "contiguous", 0, False)
                for name, *sizes in shapes
            ]
            module.eval()(*(given.tensor() for given in tensors))
            drawn.add(module.function if isinstance(module, Call) else type(module))

    draw_each()
    assert {nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LSTM, nn.GRU, torch.matmul} <= drawn
