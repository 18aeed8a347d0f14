"""Programs that serve calls with any values of their number arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from tvmify.artifact import Artifact
from tvmify.capture import STATIC, Varying
from tvmify.dispatch.agreement import computes_the_same, undone
from tvmify.dispatch.outcome import Outcome, Run
from tvmify.dispatch.request import Request
from tvmify.errors import NotCompiled, NumberNeeded
from tvmify.runtime import flatten
from tvmify.signature import (
    FLOAT,
    INT,
    LARGEST_FLOAT,
    LARGEST_INT,
    Args,
    Kwargs,
    NumberArgument,
    SizeArgument,
)

#: A program with symbolic sizes has such a signature for each shape that it serves.
_MOST_SIGNATURES = 1024

Kinds = tuple[type, ...]


class NumbersOpen(NamedTuple):
    """A signature without the values of some of its numbers."""

    places: tuple[int, ...]  # indices of these numbers among the leaves
    kinds: Kinds  # the types of these numbers
    rest: bytes


@dataclass(frozen=True)
class AnyNumbers:
    """The arguments of a call, without the values of some of its numbers.

    Attributes
    ----------
    signature
        The signature that all such calls share.
    args, kwargs
        With a `NumberArgument` for each of these numbers.
    sizes
        Indices of ints that are recorded as sizes. The signature has their values.
    """

    signature: NumbersOpen
    args: Args
    kwargs: Kwargs
    sizes: tuple[int, ...] = ()
    varying: Varying = STATIC

    def opened(self, request: Request) -> Request:
        """Return the request for a call with tensors in place of the open numbers."""
        call = _replaced(*request.call, _tensors(self.signature.places, self.sizes))
        assert call is not None  # the signature has placeholders for them
        return replace(request.generalized(self), call=call)

    def adapted(
        self,
        run: Run,
        artifact: Artifact,
        request: Request,
        eager: Callable[[], Any],
        written: Sequence[torch.Tensor],
    ) -> NumberCall:
        """Return what runs the program, after comparing its result with eager's.

        They may differ: while a module is recorded, ``type(scale) is float`` is false, which may
        select another branch.

        Raises
        ------
        NotCompiled
            The results differ, or the program cannot run: the values are part of the key.
        """
        call, leaves = NumberCall(run, self.signature.places, self.sizes), request.leaves
        compiled = undone(lambda: call(leaves), written)
        if call.obstacle(leaves) or not computes_the_same(compiled, undone(eager, written)):
            why = "forward may depend on the values of its number arguments"
            raise NotCompiled(why, "Nothing to do: each value gets its own program.")
        return call


class Numbers:
    """Which signatures have numbers that are arguments of the program, as far as is known.

    Attributes
    ----------
    arguments
        The signatures whose numbers are arguments: one program serves all values.
    """

    def __init__(self) -> None:
        self.arguments: dict[NumbersOpen, None] = {}
        # The indices of numbers whose values matter, by the types of all leaves.
        self._needed: dict[Kinds, frozenset[int]] = {}
        # Those of them that cannot be sizes, either.
        self._constant: dict[Kinds, frozenset[int]] = {}

    def find(
        self, signature: Hashable, leaves: tuple[Any, ...], args: Any, kwargs: Any
    ) -> Hashable:
        """Return the signature of a call without its numbers, if these are arguments.

        Every call runs this.
        """
        open_ = self._open(leaves, args, kwargs)
        return open_ if open_ in self.arguments else signature

    def alias(self, request: Request) -> None:
        """Return None: there are too many values for aliases."""

    def serves_any(self) -> bool:
        """Whether numbers of some signatures are arguments."""
        return bool(self.arguments)

    def served(self, request: Request) -> NumbersOpen | None:
        """Return the signature of a call without its numbers, if these are arguments."""
        args, kwargs = request.call
        open_ = self._open(flatten(args, kwargs)[0], args, kwargs)
        return open_ if open_ in self.arguments else None

    def general(self, request: Request) -> AnyNumbers | None:
        """Leave open all numbers whose values are not known to matter."""
        args, kwargs = request.call
        leaves, _ = flatten(args, kwargs)
        signature = None if _is_on_gpu(leaves) else self._open(leaves, args, kwargs)
        return None if signature is None else _general(request, signature, ())

    def general_with_sizes(self, request: Request) -> AnyNumbers | None:
        """Leave open such numbers, and as sizes the ints whose values matter."""
        args, kwargs = request.call
        leaves, exact = flatten(args, kwargs)
        if _is_on_gpu(leaves):
            return None
        kinds = _kinds(leaves)
        maybe = self._needed.get(kinds, frozenset()) - self._constant.get(kinds, frozenset())
        sizes = tuple(i for i in sorted(maybe) if _may_be_size(leaves[i]))
        signature = self._open(leaves, args, kwargs)
        if signature is None and sizes and exact is not None:
            signature = NumbersOpen((), (), exact)
        return None if signature is None else _general(request, signature, sizes)

    def need(self, request: Request, places: Iterable[int]) -> None:
        """Learn that the values of some numbers matter."""
        kinds = _kinds(flatten(*request.call)[0])
        self._needed[kinds] = self._needed.get(kinds, frozenset()).union(places)

    def fix(self, request: Request, places: Iterable[int]) -> None:
        """Learn that some ints whose values matter cannot be sizes, either."""
        kinds = _kinds(flatten(*request.call)[0])
        self._constant[kinds] = self._constant.get(kinds, frozenset()).union(places)

    def narrower(
        self, request: Request, general: AnyNumbers, reason: NotCompiled
    ) -> AnyNumbers | None:
        """Leave open fewer numbers: not those whose values forward needs."""
        if not isinstance(reason, NumberNeeded):
            return None
        self.need(request, reason.places or general.signature.places)
        return self.general(request)

    def accept(self, general: AnyNumbers, outcome: Outcome) -> None:
        """Learn that one program serves all values."""
        self.learn(general.signature)

    def refuse(self, request: Request, general: AnyNumbers, reason: NotCompiled) -> None:
        """Learn that the values of these numbers matter."""
        self.arguments.pop(general.signature, None)
        self.need(request, general.signature.places)

    def note(self, request: Request, outcome: Outcome) -> None:
        """Learn nothing: calls with other numbers may behave differently."""

    def forget(self) -> None:
        """Forget everything that was learnt."""
        self.arguments.clear()
        self._needed.clear()
        self._constant.clear()

    def learn(self, signature: NumbersOpen) -> None:
        """Look up such calls without their numbers from now on.

        If there are too many signatures, the oldest is forgotten; its next call learns it again.
        """
        self.arguments[signature] = None
        if len(self.arguments) > _MOST_SIGNATURES:
            del self.arguments[next(iter(self.arguments))]

    def _open(self, leaves: tuple[Any, ...], args: Any, kwargs: Any) -> NumbersOpen | None:
        needed = self._needed.get(_kinds(leaves), frozenset())
        places = tuple(
            place for place, leaf in enumerate(leaves) if _is_number(leaf) and place not in needed
        )
        if not places:
            return None
        # None replaces each number; the indices tell it from a None of the call.
        call = _replaced(args, kwargs, dict.fromkeys(places, lambda _: None))
        rest = None if call is None else flatten(*call)[1]
        kinds = tuple(type(leaves[place]) for place in places)
        return None if rest is None else NumbersOpen(places, kinds, rest)


class NumberCall:
    """Calls of a program that takes tensors in place of the caller's numbers.

    Parameters
    ----------
    run
        Runs the program.
    places
        The indices among the leaves of the numbers that it takes as 0-d tensors.
    sizes
        Those of the ints that it takes as sizes; see `SizeArgument`.
    """

    def __init__(self, run: Run, places: Collection[int], sizes: Collection[int] = ()) -> None:
        self._run = run
        self._tensors = _tensors(places, sizes)

    @classmethod
    def of(cls, run: Run, request: Request) -> NumberCall:
        """Return the calls of a program that was made for a request."""
        leaves = pytree.tree_leaves((request.args, request.kwargs))
        numbers = {i for i, leaf in enumerate(leaves) if isinstance(leaf, NumberArgument)}
        sizes = {i for i in numbers if isinstance(leaves[i], SizeArgument)}
        return cls(run, numbers - sizes, sizes)

    def __call__(self, leaves: tuple[Any, ...]) -> Any:
        """Run the program."""
        return self._run(self._with_tensors(leaves))

    def obstacle(self, leaves: tuple[Any, ...]) -> str | None:
        """Return why these leaves cannot be its arguments; None if they can."""
        return self._run.obstacle(self._with_tensors(leaves))

    def _with_tensors(self, leaves: tuple[Any, ...]) -> tuple[Any, ...]:
        replaced = list(leaves)
        for place, tensor in self._tensors.items():
            replaced[place] = tensor(leaves[place])
        return tuple(replaced)


def _kinds(leaves: tuple[Any, ...]) -> Kinds:
    return tuple(map(type, leaves))


def _is_number(leaf: Any) -> bool:
    if type(leaf) is float:
        return abs(leaf) <= LARGEST_FLOAT or not math.isfinite(leaf)
    return type(leaf) is int and abs(leaf) <= LARGEST_INT


def _may_be_size(number: Any) -> bool:
    return type(number) is int and 0 <= number <= LARGEST_INT


def _as_tensor(number: float) -> torch.Tensor:
    dtype = torch.float64 if type(number) is float else torch.int64
    return torch.scalar_tensor(number, dtype=dtype, device="cpu")


def _placeholder(number: Any) -> Any:
    return FLOAT if type(number) is float else INT


def _size(number: int) -> SizeArgument:
    return SizeArgument(value=number)


def _tensors(places: Iterable[int], sizes: Iterable[int]) -> dict[int, Callable[[Any], Any]]:
    return {**dict.fromkeys(places, _as_tensor), **dict.fromkeys(sizes, SizeArgument.carrier)}


def _is_on_gpu(leaves: Iterable[Any]) -> bool:
    # Each number would be a copy per call, which waits for the previous call.
    return any(isinstance(leaf, torch.Tensor) and leaf.is_cuda for leaf in leaves)


def _general(request: Request, signature: NumbersOpen, sizes: tuple[int, ...]) -> AnyNumbers | None:
    placeholders = dict.fromkeys(signature.places, _placeholder) | dict.fromkeys(sizes, _size)
    call = _replaced(*request.call, placeholders)
    return None if call is None else AnyNumbers(signature, *call, sizes)


def _replaced(
    args: Any, kwargs: Any, by: Mapping[int, Callable[[Any], Any]]
) -> tuple[Any, Any] | None:
    """Replace numbers in arguments; None if one is in a ``torch.Size``, which holds only ints."""
    leaves, structure = pytree.tree_flatten(
        (args, kwargs), is_leaf=lambda item: isinstance(item, torch.Size)
    )
    if any(isinstance(leaf, torch.Size) for leaf in leaves):
        return None
    for place, replacement in by.items():
        leaves[place] = replacement(leaves[place])
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    return args, kwargs
