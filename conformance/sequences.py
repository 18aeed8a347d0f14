"""Random sequences of calls and changes of small modules, through the decorator.

    python -m conformance.sequences [--sequences 300] [--seed 0]

A decorated module and an equal one in eager go through the same events: calls in all modes
(`conformance.events`), and changes of weights, dtypes, hooks and so on (`conformance.changes`).
After each event, results, weights, gradients, kept tensors, shared memory and the state of the
random generator have to be equal. The counts go into docs/coverage.md.
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
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from conformance import changes  # noqa: F401 - registers events
from conformance.events import EVENTS, Side
from conformance.operators import COMPILED, EAGER, Result
from conformance.programs import explore, publish
from conformance.stateful import MODULES
from tvmify import tvmify
from tvmify.dispatch.building import background

#: Events in one sequence.
FEWEST, MOST = 4, 24
#: Half of all events are one of these.
CALLS = ("call", "call", "call_and_go_backward")
SOME = "some calls in eager"
#: Relative to each element and to the largest; events change weights by more. The second is for
#: sequences that compute in half types.
TOLERANCE, ROUNDED = 1e-4, 4e-2
#: Seconds for builds in the background.
PATIENCE = 120.0


@dataclass(frozen=True)
class SeededEvent:
    """An event, and the seed of its random choices."""

    name: str
    seed: int


@dataclass(frozen=True)
class Setup:
    """A module, and how it is decorated.

    Attributes
    ----------
    module
        A name in `MODULES`.
    options
        Options of the decorator, as pairs of name and value.
    of_class
        Whether the class is decorated instead of the instance.
    """

    module: str
    training: bool
    options: tuple[tuple[str, Any], ...]
    of_class: bool = False

    def sides(self) -> tuple[Side, Side]:
        """Return a decorated module, and an equal one in eager."""
        cls = MODULES[self.module]
        torch.manual_seed(0)
        module = cls().train(self.training)
        options: dict[str, Any] = {"compare": False, "progress": False, **dict(self.options)}
        if self.of_class:
            torch.manual_seed(0)
            decorated: Any = tvmify(_subclass(cls), **options)().train(self.training)
        else:
            decorated = tvmify(copy.deepcopy(module), **options)
        return Side(decorated, is_decorated=True), Side(module, is_decorated=False)


def _subclass(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a new subclass, which pickle finds by its name in this file."""
    name = f"Decorated{cls.__name__}"
    globals()[name] = type(name, (cls,), {"__module__": __name__})
    return globals()[name]


SETUPS = st.builds(
    Setup,
    module=st.sampled_from(sorted(MODULES)),
    training=st.sampled_from([False, False, False, True]),
    options=st.sampled_from(
        [
            (),
            (),
            (("dynamic", False),),
            (("dynamic", True),),
            (("cache_size", 2),),
            (("on_miss", "background"),),
        ]
    ),
    of_class=st.sampled_from([False, False, True]),
)


def _draw_event(seed: int) -> SeededEvent:
    """Return an event: half of them are calls, the others are uniform over all kinds.

    Hypothesis's own choices are not uniform.
    """
    chance = Random(seed)
    names = CALLS if chance.random() < 0.5 else sorted(EVENTS)
    return SeededEvent(chance.choice(names), seed)


SEEDED_EVENTS = st.integers(0, 2**32).map(_draw_event)
SEQUENCES = st.tuples(st.lists(SEEDED_EVENTS, min_size=FEWEST, max_size=MOST), SETUPS)


def check(events: Sequence[SeededEvent], setup: Setup) -> Result:
    """Run a sequence on both modules and compare after each event; return where the calls ran.

    Raises
    ------
    AssertionError
        Something differs after an event.
    """
    fast, _ = sides = setup.sides()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, event in enumerate(events):
            observed = [_observe(side, event) for side in sides]
            tolerance = ROUNDED if fast.is_rounded else TOLERANCE
            for what, got in observed[0].items():
                try:
                    _compare(got, observed[1][what], tolerance)
                except AssertionError as error:
                    where = f"{what} after event {number}, {event}"
                    raise AssertionError(f"{where}: {error}") from error
    counts = [module.cache_info() for module in (fast.module, *fast.others)]
    ran, in_eager = sum(c.hits + c.misses for c in counts), sum(c.eager for c in counts)
    return Result(EAGER if in_eager >= ran else SOME if in_eager else COMPILED)


def _observe(side: Side, event: SeededEvent) -> dict[str, Any]:
    """Run an event on one side, and return everything that can be observed afterwards."""
    torch.manual_seed(event.seed)
    try:
        result = EVENTS[event.name](side, Random(event.seed))
    except Exception as error:
        result = type(error)
    if side.is_decorated:  # so that the next call always runs what was built
        assert background.worker.wait(PATIENCE)
    modules = [side.module, *side.others]
    tensors = side.tensors()
    memory = [_memory(tensor) for tensor in [*pytree.tree_leaves(result), *tensors]]
    return {
        "the result": result,
        "the random generator": torch.get_rng_state(),
        "the weights": [dict(module.state_dict()) for module in modules],
        "modes": [[part.training for part in module.modules()] for module in modules],
        # Sorted: a backward pass that runs forward again calls hooks in another order.
        "what hooks saw": sorted(side.seen),
        "a kept tensor, a weight or a gradient": tensors,
        "what shares memory": [None if one is None else memory.index(one) for one in memory],
    }


def _memory(value: Any) -> int | None:
    """Return the address of a tensor's storage; None for empty tensors and other values."""
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
            assert one.is_inference() == other.is_inference()
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
    """Check sequences, and count where calls ran."""
    parser = argparse.ArgumentParser(description="Random sequences of calls and changes.")
    parser.add_argument("--sequences", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    counts = explore(SEQUENCES, check, given.sequences, given.seed)
    publish("sequences", f"events in sequences of {FEWEST} to {MOST}", counts)


if __name__ == "__main__":
    main()
