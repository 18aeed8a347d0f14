"""A call without an outcome: what a miss starts from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from tvmify.artifact import Artifact
from tvmify.artifact.shapes import Shapes
from tvmify.capture import STATIC, Varying
from tvmify.dispatch import keys
from tvmify.dispatch.outcome import Run
from tvmify.options import CompileOptions
from tvmify.runtime import autocast_text, flatten, gradients_text
from tvmify.signature import (
    Args,
    Kwargs,
    NumberArgument,
    Signature,
    TensorSpec,
    map_only,
    repeat,
    repetitions,
)
from tvmify.target import CheckedTarget, TargetOption
from tvmify.target import check as check_target
from tvmify.torch_compat.declared_sizes import DeclaredShape


class General(Protocol):
    """The arguments of a call, with placeholders for those that may have any value."""

    @property
    def signature(self) -> Hashable:
        """Equal for exactly the calls that such a program serves."""

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments, with placeholders for what is left open."""
        ...

    @property
    def kwargs(self) -> dict[str, Any]:
        """As ``args``."""
        ...

    @property
    def varying(self) -> Varying:
        """The sizes that are symbols."""
        ...

    def adapted(
        self,
        run: Run,
        artifact: Artifact,
        request: Request,
        eager: Callable[[], Any],
        written: Sequence[torch.Tensor],
    ) -> Run:
        """Return what runs the program on the leaves of a call.

        Parameters
        ----------
        run, artifact
            What runs the program, and its artifact.
        request, eager
            The call that it was made for, to test it on, and a function that computes it in eager.
        written
            What both write to.

        Raises
        ------
        NotCompiled
            The program does not serve the call.
        """
        ...


@dataclass(frozen=True)
class Request:
    """The arguments of a call, and everything around it that affects its program.

    Attributes
    ----------
    args, kwargs
        The arguments to capture the program with: those of the call, with placeholders for what is
        left open.
    call
        The arguments of the call.
    exact
        The signature of this call, as `flatten` returns it.
    signature
        Describes ``args`` and ``kwargs``.
    modes
        Torch's modes that are part of a key.
    gradients
        Torch's modes that concern gradients.
    autocast
        The dtypes that autocast casts to, as text; empty if it is off.
    repeated
        Which of the arguments are the same tensor; see `repetitions`.
    options
        The options of the decorator.
    target
        The option of that name.
    general
        What is left open, if anything.
    declared
        What is declared about the sizes of tensors, by leaf.
    """

    args: Args
    kwargs: Kwargs
    call: tuple[Args, Kwargs]
    exact: Hashable
    signature: Signature
    modes: str
    gradients: str
    autocast: str
    repeated: Mapping[int, int]
    options: CompileOptions
    target: CheckedTarget
    general: General | None = None
    declared: Mapping[int, DeclaredShape] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        args: Args,
        kwargs: Kwargs,
        options: CompileOptions,
        target: TargetOption = None,
        unusual: Hashable = None,
    ) -> Request:
        """Describe a call.

        Parameters
        ----------
        target
            None for the option of the decorator.
        unusual
            The signature of a call that `flatten` cannot describe.

        Raises
        ------
        UnsupportedInput
            Compiled code does not support an argument.
        """
        signature = Signature.of(args, kwargs)
        return cls(
            args,
            kwargs,
            call=(args, kwargs),
            exact=flatten(args, kwargs)[1] or unusual,
            signature=signature,
            modes=keys.modes_text(),
            gradients=gradients_text(args, kwargs),
            autocast=autocast_text(),
            repeated=repetitions((args, kwargs)),
            options=options,
            target=check_target(options.target if target is None else target),
        )

    def title(self, shapes: Shapes | None = None) -> str:
        """Return its name in `explain`, with the sizes of its program if these are given."""
        signature = self.signature if shapes is None else self.signature.with_sizes(shapes.leaves)
        return f"{signature} {self.autocast}".rstrip()

    @property
    def leaves(self) -> tuple[Any, ...]:
        """The leaves of the call's arguments."""
        return tuple(pytree.tree_leaves(self.call))

    @property
    def varying(self) -> Varying:
        """The sizes that are symbols in the program."""
        return STATIC if self.general is None else self.general.varying

    def generalized(self, general: General) -> Request:
        """Return the request for a program that serves more than this call."""
        args, kwargs = general.args, general.kwargs
        signature = Signature.of(args, kwargs).with_symbols(general.varying.axes)
        return dataclasses.replace(
            self, args=args, kwargs=kwargs, signature=signature, general=general
        )

    def without_tensors(self) -> Request:
        """Return a request of the same signature that holds none of the caller's tensors."""
        call = self.args, self.kwargs
        zeros = map_only(torch.Tensor, lambda tensor: TensorSpec.of(tensor).example(), call)
        args, kwargs = repeat(zeros, repetitions(call))
        call = map_only(NumberArgument, lambda number: number.example(), (args, kwargs))
        return dataclasses.replace(self, args=args, kwargs=kwargs, call=call)

    def specs(self) -> tuple[Args, Kwargs]:
        """Return the arguments of the call, with a `TensorSpec` for each tensor."""
        return map_only(torch.Tensor, TensorSpec.of, self.call)
