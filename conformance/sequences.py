"""Random sequences of calls and changes of small modules, through the decorator.

    python -m conformance.sequences [--sequences 300] [--seed 0]

The same happens to a decorated module and to one that is not: calls in all modes
(`conformance.events`), writes to weights, hooks, copies (`conformance.changes`). After each event,
results, weights, gradients, kept tensors, what shares memory, and the random generator have to be
those of eager. The counts go into docs/coverage.md.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from conformance import changes  # noqa: F401 - which adds events
from conformance.events import EVENTS, Side
from conformance.operators import COMPILED, EAGER, Result
from conformance.programs import explore, publish
from conformance.stateful import MODULES
from tvmify import tvmify

#: Events in one sequence.
FEWEST, MOST = 4, 24
#: Half of all events are these.
CALLS = ("call", "call", "call_and_go_backward")
SOME = "some calls in eager"
#: Relative, and of the largest element: weights change by larger steps.
TOLERANCE, ROUNDED = 1e-4, 4e-2


@dataclass(frozen=True)
class Happening:
    """An event, and the seed of what it leaves to chance."""

    event: str
    seed: int


@dataclass(frozen=True)
class Setup:
    """A module, and how it is decorated.

    Attributes
    ----------
    options
        Of the decorator, as pairs.
    """

    module: str
    training: bool
    options: tuple[tuple[str, Any], ...]

    def sides(self) -> tuple[Side, Side]:
        """Return a decorated module and an equal one."""
        torch.manual_seed(0)
        module = MODULES[self.module]().train(self.training)
        options: dict[str, Any] = {"compare": False, "progress": False, **dict(self.options)}
        decorated: Any = tvmify(copy.deepcopy(module), **options)
        return Side(decorated, is_decorated=True), Side(module, is_decorated=False)


SETUPS = st.builds(
    Setup,
    module=st.sampled_from(sorted(MODULES)),
    training=st.sampled_from([False, False, False, True]),
    options=st.sampled_from(
        [(), (), (("dynamic", False),), (("dynamic", True),), (("cache_size", 2),)]
    ),
)


def _happening(seed: int) -> Happening:
    """Return one of those that are equally likely, which Hypothesis's own choices are not."""
    chance = Random(seed)
    events = CALLS if chance.random() < 0.5 else sorted(EVENTS)
    return Happening(chance.choice(events), seed)


HAPPENINGS = st.integers(0, 2**32).map(_happening)
SEQUENCES = st.tuples(st.lists(HAPPENINGS, min_size=FEWEST, max_size=MOST), SETUPS)


def check(happenings: Sequence[Happening], setup: Setup) -> Result:
    """Let a sequence happen to both modules, and compare; return where the calls ran.

    Raises
    ------
    AssertionError
        After an event, something differs.
    """
    fast, _ = sides = setup.sides()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, happening in enumerate(happenings):
            observed = [_observe(side, happening) for side in sides]
            tolerance = ROUNDED if fast.is_rounded else TOLERANCE
            for what, got in observed[0].items():
                try:
                    _compare(got, observed[1][what], tolerance)
                except AssertionError as error:
                    where = f"{what} after event {number}, {happening}"
                    raise AssertionError(f"{where}: {error}") from error
    counts = [module.cache_info() for module in (fast.module, *fast.others)]
    ran, in_eager = sum(c.hits + c.misses for c in counts), sum(c.eager for c in counts)
    return Result(EAGER if in_eager >= ran else SOME if in_eager else COMPILED)


def _observe(side: Side, happening: Happening) -> dict[str, Any]:
    """Let an event happen to one side, and return all that can be seen of it afterwards."""
    torch.manual_seed(happening.seed)
    chance = Random(happening.seed)
    try:
        result = EVENTS[happening.event](side, chance)
    except Exception as error:
        result = type(error)
    modules = [side.module, *side.others]
    tensors = side.tensors()
    memory = [_memory(tensor) for tensor in [*pytree.tree_leaves(result), *tensors]]
    return {
        "the result": result,
        "the random generator": torch.get_rng_state(),
        "the weights": [dict(module.state_dict()) for module in modules],
        "modes": [[part.training for part in module.modules()] for module in modules],
        "what hooks saw": sorted(
            side.seen
        ),  # in the backward, which runs forward again, not in order
        "a kept tensor, a weight or a gradient": tensors,
        "what shares memory": [None if one is None else memory.index(one) for one in memory],
    }


def _memory(value: Any) -> int | None:
    """Return where the storage of a tensor starts; None if nothing is there, or no tensor."""
    if not isinstance(value, Tensor) or not value.numel():
        return None
    return value.untyped_storage().data_ptr()


def _compare(got: Any, want: Any, tolerance: float) -> None:
    ours, theirs = pytree.tree_flatten(got), pytree.tree_flatten(want)
    assert ours[1] == theirs[1], f"{got!r} instead of {want!r}"
    for one, other in zip(ours[0], theirs[0], strict=True):
        assert type(one) is type(other), f"{one!r} instead of {other!r}"
        if isinstance(other, Tensor):
            for name in ("shape", "dtype", "requires_grad", "is_leaf"):
                mine, its = getattr(one, name), getattr(other, name)
                assert mine == its, f"{name} {mine} instead of {its}: {other!r}"
            _compare_values(one.detach(), other.detach(), tolerance)
        else:
            assert one == other, f"{one!r} instead of {other!r}"


def _compare_values(got: Tensor, want: Tensor, tolerance: float) -> None:
    if not want.is_floating_point():
        assert torch.equal(got, want), f"{got} instead of {want}"
        return
    finite = want[want.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 1.0
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * largest, equal_nan=True)


def main(arguments: list[str] | None = None) -> None:
    """Check sequences, and write how many ran where."""
    parser = argparse.ArgumentParser(description="Random sequences of calls and changes.")
    parser.add_argument("--sequences", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    counts = explore(SEQUENCES, check, given.sequences, given.seed)
    publish("sequences", f"events in sequences of {FEWEST} to {MOST}", counts)


if __name__ == "__main__":
    main()
