"""Calls that differ in the values of floats alone, and what serves all of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from tvmify.agreement import computes_the_same
from tvmify.artifact import Artifact
from tvmify.entry import Entry
from tvmify.errors import NotCompiled
from tvmify.misses import is_awaited
from tvmify.runtime import Call, GraphedCall, flatten
from tvmify.signature import FLOAT


class GeneralSignature(NamedTuple):
    """A signature without the values of its floats."""

    places: tuple[int, ...]  # of the floats, among the leaves
    rest: bytes


class Floats:
    """Which signatures have floats that are arguments of the program, as far as that was tried.

    Attributes
    ----------
    arguments
        The signatures of which one program serves all values.
    """

    def __init__(self) -> None:
        self.arguments: set[GeneralSignature] = set()
        self._values: set[GeneralSignature] = set()

    def find(
        self, signature: Hashable, leaves: tuple[Any, ...], args: Any, kwargs: Any
    ) -> Hashable:
        """Return the signature of a call without its floats, if these are arguments."""
        general = _general(leaves, args, kwargs)
        return general if general in self.arguments else signature

    def make(
        self, signature: Hashable, args: Any, kwargs: Any, make: Callable[..., Entry]
    ) -> tuple[Hashable, Entry]:
        """Return an entry for all values of the floats in a call, or, if there is none, for these.

        Parameters
        ----------
        signature, args, kwargs
            Of the call.
        make
            Makes an entry, given the arguments without the values of floats, or nothing.

        Returns
        -------
        signature, entry
            What it is to be found by.
        """
        leaves, exact = flatten(args, kwargs)
        # On a GPU an argument would be one more copy in each call, which waits for the one before.
        on_gpu = any(isinstance(leaf, torch.Tensor) and leaf.is_cuda for leaf in leaves)
        general = None if on_gpu else _general(leaves, args, kwargs)
        if general is None or general in self._values:
            return signature, make()
        entry = make(_without_floats(args, kwargs, FLOAT))
        if entry.reason is None:
            self.arguments.add(general)
            return general, entry
        if is_awaited(entry.reason):
            return exact, entry  # whether it serves all values is known when it is built
        entry = make()
        if entry.reason is None:  # else it was for another reason
            self.arguments.discard(general)
            self._values.add(general)
        return exact, entry


class FloatCall:
    """A call of a program that takes tensors without dimensions where the caller has floats.

    Parameters
    ----------
    run
        The call of the program.
    """

    def __init__(self, run: Call | GraphedCall) -> None:
        self._run = run

    def __call__(self, leaves: tuple[Any, ...]) -> Any:
        """Run the program."""
        return self._run(_with_tensors(leaves))

    def obstacle(self, leaves: tuple[Any, ...]) -> str | None:
        """Return why these leaves cannot be its arguments; None if they can."""
        return self._run.obstacle(_with_tensors(leaves))


def checked(
    run: FloatCall, artifact: Artifact, eager: Callable[[], Any], args: Any, kwargs: Any
) -> FloatCall:
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
        raise NotCompiled("the values of floats may matter", "Nothing: they are part of the key.")
    return run


def _with_tensors(leaves: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        torch.scalar_tensor(leaf, dtype=torch.float64, device="cpu")
        if type(leaf) is float
        else leaf
        for leaf in leaves
    )


def _general(leaves: tuple[Any, ...], args: Any, kwargs: Any) -> GeneralSignature | None:
    places = tuple(place for place, leaf in enumerate(leaves) if type(leaf) is float)
    if not places:
        return None
    # None stands for each float; the places tell it from a None of the call.
    rest = flatten(*_without_floats(args, kwargs, None))[1]
    return None if rest is None else GeneralSignature(places, rest)


def _without_floats(args: Any, kwargs: Any, stand_in: Any) -> tuple[Any, Any]:
    def replaced(leaf: Any) -> Any:
        return stand_in if type(leaf) is float else leaf

    return pytree.tree_map(replaced, (args, kwargs))
