"""Programs that serve calls with different sizes of tensors and any values of numbers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tvmify.artifact import Artifact
from tvmify.capture import Varying
from tvmify.dispatch.generality.numbers import AnyNumbers, NumberCall, Numbers
from tvmify.dispatch.generality.sizes import AnySizes, Sizes, SizesOpen
from tvmify.dispatch.outcome import Outcome, Run
from tvmify.dispatch.request import Request
from tvmify.errors import NotCompiled, NumberNeeded


@dataclass(frozen=True)
class AnySizesAndNumbers:
    """The arguments of a call, with symbols for some sizes, and some numbers left open.

    Attributes
    ----------
    numbers, sizes
        What is left open.
    """

    numbers: AnyNumbers
    sizes: AnySizes

    @property
    def signature(self) -> SizesOpen:
        """The signature that all such calls share."""
        return self.sizes.signature

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments of the call, with placeholders for numbers."""
        return self.numbers.args

    @property
    def kwargs(self) -> dict[str, Any]:
        """As ``args``."""
        return self.numbers.kwargs

    @property
    def varying(self) -> Varying:
        """The sizes that are symbols."""
        return self.sizes.varying

    def adapted(
        self,
        run: Run,
        artifact: Artifact,
        request: Request,
        eager: Callable[[], Any],
        written: Sequence[torch.Tensor],
    ) -> NumberCall:
        """Return what runs the program, after comparing its result with eager's.

        Raises
        ------
        NotCompiled
            It does not serve the call, or its result differs from eager's.
        """
        self.sizes.check(artifact, self.numbers.opened(request))
        if constants := self._constants(artifact):
            raise NumberNeeded(constants)
        return self.numbers.adapted(run, artifact, request, eager, written)

    def _constants(self, artifact: Artifact) -> list[int]:
        """Return the ints that were symbols when the program was recorded, but became constants."""
        shapes = artifact.shapes
        return [
            place
            for place in self.numbers.sizes
            if shapes is not None
            and self.varying.axes.get(place, (None,))[0] is not None
            and isinstance(shapes.leaves[place][0], int)
        ]


class SizesAndNumbers:
    """Leaves open both sizes and numbers.

    Parameters
    ----------
    sizes, numbers
        The two kinds, which also apply separately.
    """

    def __init__(self, sizes: Sizes, numbers: Numbers) -> None:
        self._sizes = sizes
        self._numbers = numbers

    def serves_any(self) -> bool:
        """Whether one of the two has a program."""
        return self._sizes.serves_any()

    def alias(self, request: Request) -> Hashable | None:
        """Return the signature without its numbers, which the dispatcher looks up."""
        numbers = self._open(request)
        if numbers is None:
            return None
        if not numbers.signature.places:
            return request.exact
        self._numbers.learn(numbers.signature)
        return numbers.signature

    def served(self, request: Request) -> SizesOpen | None:
        """Return the signature of an existing program that serves a call, or None."""
        numbers = self._open(request)
        return None if numbers is None else self._sizes.served(numbers.opened(request))

    def general(self, request: Request) -> AnySizesAndNumbers | None:
        """Leave open all possible numbers, and the sizes that vary."""
        numbers = self._open(request)
        return None if numbers is None else self._both(request, numbers)

    def _open(self, request: Request) -> AnyNumbers | None:
        # Declared sizes, such as those of calls with caches, get programs of their own.
        return None if request.declared else self._numbers.general_with_sizes(request)

    def _both(self, request: Request, numbers: AnyNumbers) -> AnySizesAndNumbers | None:
        sizes = self._sizes.general(numbers.opened(request))
        return None if sizes is None else AnySizesAndNumbers(numbers, sizes)

    def narrower(
        self, request: Request, general: AnySizesAndNumbers, reason: NotCompiled
    ) -> AnySizesAndNumbers | None:
        """Leave open fewer numbers, or request another program with the same symbols."""
        numbers, opened = general.numbers, general.numbers.opened(request)
        if isinstance(reason, NumberNeeded):
            needed = reason.places or numbers.signature.places
        else:
            sizes = self._sizes.narrower(opened, general.sizes, reason)
            if sizes is not None:
                return replace(general, sizes=sizes)
            needed = numbers.sizes
        if not needed:
            return None
        self._numbers.fix(request, set(needed) & set(numbers.sizes))
        self._numbers.need(request, needed)
        fewer = self._open(request)
        return None if fewer is None else self._both(request, fewer)

    def accept(self, general: AnySizesAndNumbers, outcome: Outcome) -> None:
        """Learn that a program serves all values, and which sizes it serves."""
        self._sizes.accept(general.sizes, outcome)

    def refuse(self, request: Request, general: AnySizesAndNumbers, reason: NotCompiled) -> None:
        """Learn that such calls are compiled for one shape each."""
        self._sizes.refuse(general.numbers.opened(request), general.sizes, reason)

    def note(self, request: Request, outcome: Outcome) -> None:
        """Learn whether such calls compile at all."""
        numbers = self._open(request)
        if numbers is not None:
            self._sizes.note(numbers.opened(request), outcome)

    def forget(self) -> None:
        """Do nothing: both kinds forget by themselves."""
