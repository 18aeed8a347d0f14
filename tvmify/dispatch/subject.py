"""What a dispatcher runs the calls of: a method of one module, or a function."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from tvmify.options import CompileOptions
from tvmify.torch_compat.declared_sizes import DeclaredShape

#: What is said of the tensors of a call, by their numbers among the flattened arguments.
Declared: TypeAlias = Mapping[int, DeclaredShape]


@dataclass(frozen=True)
class Subject:
    """A method of one module, or a function.

    Attributes
    ----------
    name
        For messages.
    eager
        Computes a call in eager PyTorch; takes the module first, if there is one.
    capturable
        Given the module, or None, returns what `capture` takes: an undecorated module, a
        TorchScript module, a function.
    options
        Of the decorator.
    module
        Returns the module whose weights and state the calls depend on. It is held weakly; None for
        a function, and once it is gone.
    calls_itself
        Whether ``eager`` may call the module, and so run the hooks of the module itself. A forward
        does not: they run around it.
    is_part
        Whether it is a region or a submodule of another subject. Such a subject is not recorded,
        and evicts no signature for another one.
    symbols
        Which sizes vary from call to call, if that is known before any call: for each leaf of the
        arguments with such sizes, for each axis the name of a symbol, or None.
    declare
        Given the arguments of a call, returns what is known of its sizes, whatever the user says of
        them; not asked with ``dynamic=False``.
    """

    name: str
    eager: Callable[..., Any]
    capturable: Callable[[Any], Any]
    options: CompileOptions
    module: Callable[[], nn.Module | None]
    calls_itself: bool = False
    is_part: bool = False
    symbols: Mapping[int, tuple[str | None, ...]] | None = None
    declare: Callable[[tuple[Any, ...], dict[str, Any]], Declared] | None = None

    @classmethod
    def of(
        cls,
        name: str,
        eager: Callable[..., Any],
        capturable: Callable[[Any], Any],
        options: CompileOptions,
        module: nn.Module | None = None,
        *,
        calls_itself: bool = False,
        is_part: bool = False,
        symbols: Mapping[int, tuple[str | None, ...]] | None = None,
        declare: Callable[[tuple[Any, ...], dict[str, Any]], Declared] | None = None,
    ) -> Subject:
        """Return the subject that these describe; see the attributes."""
        alive = _nobody if module is None else weakref.ref(module)
        return cls(name, eager, capturable, options, alive, calls_itself, is_part, symbols, declare)

    def captured(self) -> Any:
        """Return what is captured: the plain module, or the function."""
        return self.capturable(self.module())

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
        """Return what computes a call in eager PyTorch."""
        # Holds the module, which the subject does not: a backward may come after its last user.
        module = self.module()
        bound = () if module is None else (module,)
        return functools.partial(self.eager, *bound, *args, **kwargs)


def _nobody() -> None:
    return None
