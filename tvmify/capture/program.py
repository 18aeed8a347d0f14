"""The result of capturing: a program that has a fingerprint and can be exported."""

from __future__ import annotations

import abc
import copy
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import Self

from tvmify.capture.varying import STATIC, Varying

if TYPE_CHECKING:
    from torch.export import ExportedProgram


class Program(abc.ABC):
    """A module or function as one ATen program.

    Attributes
    ----------
    method
        ``"torchscript"`` or ``"export"``.
    reason
        Why it could not be scripted; None when it could.
    fingerprint
        Canonical text with one line per operation. Equal if and only if the operations, their
        wiring, the constants, the plain attributes and the names of the weights are equal.
    weights
        Dotted names, from the root, of the tensors that the program reads.
    constants
        Tensors of closures and globals, whose elements are part of the fingerprint. Once one is
        written to, the program is stale.
    read
        Dotted names of small buffers whose values decided what was recorded.
    may_draw
        Whether it may draw random numbers; true if in doubt.
    asks_for_layout
        Whether it asks for strides, so that it is valid for contiguous arguments only.
    is_general
        Whether it was recorded with symbols for sizes, and some remain.
    serves_every_signature
        Whether it can be exported for all arguments that it accepts, not only for those that it was
        captured with.
    asks_for_identity
        Whether it may ask if two arguments are the same tensor, so that it matters which are.
    """

    method: str
    reason: str | None
    fingerprint: str
    weights: tuple[str, ...]
    constants: tuple[torch.Tensor, ...] = ()
    read: tuple[str, ...] = ()
    may_draw: bool = False
    asks_for_layout: bool = False
    asks_for_identity: bool = False
    is_general: bool = False
    serves_every_signature: bool = False
    _owner: Any

    def of(self, owner: Any) -> Self:
        """Return the program with the weights of another owner.

        Parameters
        ----------
        owner
            A module or function of the same state as what was captured; None for a program that is
            kept: it holds no weights, and neither exports nor returns any.
        """
        program = copy.copy(self)
        program._owner = owner
        return program

    @abc.abstractmethod
    def accepts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether `export` may be called with these arguments. A scripted program refuses what its
        annotations exclude (a list for a tensor); ``capture`` with these arguments then gives
        another program.
        """

    @abc.abstractmethod
    def export(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], varying: Varying = STATIC
    ) -> ExportedProgram:
        """Return the ATen program for arguments of these shapes, dtypes and Python values.

        The program is not decomposed. Its signature uses the names in ``weights`` for the tensors
        of the module, each a parameter or a persistent buffer in ``state_dict``; its ``constants``
        holds tensor literals only.

        Parameters
        ----------
        args, kwargs
            Real tensors; their elements are not read.
        varying
            Sizes that are symbols in the program; all others are static.

        Raises
        ------
        CaptureError
            Control flow depends on the values of tensors, or ``torch.export`` failed.
        UnsupportedOperator
            The program changes the module's attributes, or an operator is unknown.
        """

    @abc.abstractmethod
    def tensors(self) -> list[torch.Tensor]:
        """Return the current tensors of the module, in the order of ``weights``."""
