"""Calls that differ in the values of numbers alone, and what serves all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from tvmify.artifact import Artifact
from tvmify.dispatch.agreement import computes_the_same
from tvmify.dispatch.entry import Entry
from tvmify.dispatch.on_miss import is_awaited
from tvmify.errors import NotCompiled, NumberNeeded, TracedElsewhere
from tvmify.runtime import Call, GraphedCall, flatten
from tvmify.signature import FLOAT, INT, LARGEST_INT

Kinds = tuple[type, ...]


class GeneralSignature(NamedTuple):
    """A signature without the values of some of its numbers."""

    places: tuple[int, ...]  # of these numbers, among the leaves
    kinds: Kinds  # theirs
    rest: bytes


class General(NamedTuple):
    """The arguments of a call, without the values of some of its numbers.

    Attributes
    ----------
    args, kwargs
        With a `NumberArgument` for each of these numbers.
    places
        Of them, among the leaves.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    places: tuple[int, ...]


class Numbers:
    """Which signatures have numbers that are arguments of the program, as far as that was tried.

    Attributes
    ----------
    arguments
        The signatures of which one program serves all values.
    """

    def __init__(self) -> None:
        self.arguments: set[GeneralSignature] = set()
        # By the types of all leaves: where numbers stand whose values matter.
        self._needed: dict[Kinds, frozenset[int]] = {}

    def find(
        self, signature: Hashable, leaves: tuple[Any, ...], args: Any, kwargs: Any
    ) -> Hashable:
        """Return the signature of a call without its numbers, if these are arguments."""
        general = self._general(leaves, args, kwargs)
        return general if general in self.arguments else signature

    def make(
        self, signature: Hashable, args: Any, kwargs: Any, make: Callable[..., Entry]
    ) -> tuple[Hashable, Entry]:
        """Return an entry for all values of the numbers in a call, or of as many as can be.

        Parameters
        ----------
        signature, args, kwargs
            Of the call.
        make
            Makes an entry, given the arguments without the values of numbers, or nothing.

        Returns
        -------
        signature, entry
            What it is to be found by.
        """
        leaves, exact = flatten(args, kwargs)
        # On a GPU an argument would be one more copy in each call, which waits for the one before.
        on_gpu = any(isinstance(leaf, torch.Tensor) and leaf.is_cuda for leaf in leaves)
        found = None if on_gpu else self._general(leaves, args, kwargs)
        if found is None:
            return signature, make()
        while found is not None:
            entry = make(_without(args, kwargs, found.places, _stand_in))
            if entry.reason is None:
                self.arguments.add(found)
                return found, entry
            if is_awaited(entry.reason) or isinstance(entry.reason, TracedElsewhere):
                return exact, entry  # whether it serves all values is known when it is built
            if not isinstance(entry.reason, NumberNeeded):
                break
            self._note(leaves, entry.reason.places or found.places)
            found = self._general(leaves, args, kwargs)
        entry = make()
        if found is not None and entry.reason is None:  # else it was for another reason
            self.arguments.discard(found)
            self._note(leaves, found.places)
        return exact, entry

    def _note(self, leaves: tuple[Any, ...], places: Iterable[int]) -> None:
        kinds = _kinds(leaves)
        self._needed[kinds] = self._needed.get(kinds, frozenset()).union(places)

    def _general(self, leaves: tuple[Any, ...], args: Any, kwargs: Any) -> GeneralSignature | None:
        needed = self._needed.get(_kinds(leaves), frozenset())
        places = tuple(
            place for place, leaf in enumerate(leaves) if _is_number(leaf) and place not in needed
        )
        if not places:
            return None
        # None stands for each number; the places tell it from a None of the call.
        general = _without(args, kwargs, places, lambda _: None)
        rest = None if general is None else flatten(general.args, general.kwargs)[1]
        kinds = tuple(type(leaves[place]) for place in places)
        return None if rest is None else GeneralSignature(places, kinds, rest)


class NumberCall:
    """Calls of a program that takes tensors without dimensions where the caller has numbers.

    Parameters
    ----------
    run
        The call of the program.
    places
        Of these numbers, among the leaves.
    """

    def __init__(self, run: Call | GraphedCall, places: Collection[int]) -> None:
        self._run = run
        self._places = places

    def __call__(self, leaves: tuple[Any, ...]) -> Any:
        """Run the program."""
        return self._run(self._with_tensors(leaves))

    def obstacle(self, leaves: tuple[Any, ...]) -> str | None:
        """Return why these leaves cannot be its arguments; None if they can."""
        return self._run.obstacle(self._with_tensors(leaves))

    def _with_tensors(self, leaves: tuple[Any, ...]) -> tuple[Any, ...]:
        replaced = list(leaves)
        for place in self._places:
            dtype = torch.float64 if type(leaves[place]) is float else torch.int64
            replaced[place] = torch.scalar_tensor(leaves[place], dtype=dtype, device="cpu")
        return tuple(replaced)


def checked(
    run: NumberCall, artifact: Artifact, eager: Callable[[], Any], args: Any, kwargs: Any
) -> NumberCall:
    """Return ``run`` if it computes a call as eager does, as far as that shows.

    While a module is recorded, ``type(scale) is float`` is false, and may lead to another branch.

    Parameters
    ----------
    run, artifact
        Of the program.
    eager, args, kwargs
        Of the call.

    Raises
    ------
    NotCompiled
        It does not, or must not be run twice: the values have to be part of the key.
    """
    leaves = tuple(pytree.tree_leaves((args, kwargs)))
    is_run = not (artifact.writes or run.obstacle(leaves))
    if not (is_run and computes_the_same(lambda: run(leaves), eager)):
        raise NotCompiled("the values of numbers may matter", "Nothing: they are part of the key.")
    return run


def _kinds(leaves: tuple[Any, ...]) -> Kinds:
    return tuple(map(type, leaves))


def _is_number(leaf: Any) -> bool:
    return type(leaf) is float or (type(leaf) is int and abs(leaf) <= LARGEST_INT)


def _stand_in(number: Any) -> Any:
    return FLOAT if type(number) is float else INT


def _without(
    args: Any, kwargs: Any, places: Collection[int], stand_in: Callable[[Any], Any]
) -> General | None:
    """Replace numbers in arguments; None if a ``torch.Size`` is there, which holds nothing else."""
    leaves, structure = pytree.tree_flatten(
        (args, kwargs), is_leaf=lambda item: isinstance(item, torch.Size)
    )
    if any(isinstance(leaf, torch.Size) for leaf in leaves):
        return None
    for place in places:
        leaves[place] = stand_in(leaves[place])
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    return General(args, kwargs, tuple(places))
