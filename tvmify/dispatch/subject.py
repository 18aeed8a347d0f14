"""What a dispatcher runs the calls of: a method of one module, or a function."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
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
    keywords
        The arguments that may be given by name, in the order of their definition.
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
    keywords: tuple[str, ...] = ()

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
        defined: Any = None,
    ) -> Subject:
        """Return the subject that these describe; see the attributes.

        Parameters
        ----------
        defined
            What defines the arguments, if ``eager`` only passes them on.
        """
        alive = _nobody if module is None else weakref.ref(module)
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        parameters = parameters_of(eager if defined is None else defined).parameters.values()
        return cls(
            name,
            eager,
            capturable,
            options,
            alive,
            calls_itself,
            is_part,
            symbols,
            declare,
            tuple(parameter.name for parameter in parameters if parameter.kind in named),
        )

    def defined(self, kwargs: Mapping[str, Any]) -> int:
        """Return how many of these forward defines; a call may have them in any order."""
        return sum(name in kwargs for name in self.keywords)

    def in_order(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return keyword arguments in the order of their definition, which a caller may change.

        Those that a ``**kwargs`` takes follow as they are: forward sees their order.
        """
        return {name: kwargs[name] for name in self.keywords if name in kwargs} | dict(kwargs)

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


def parameters_of(function: Any) -> inspect.Signature:
    """Return the parameters of a function, or of a TorchScript one."""
    is_module = isinstance(function, torch.jit.ScriptModule)
    if not is_module and not isinstance(function, torch.jit.ScriptFunction):
        try:
            return inspect.signature(function)
        except ValueError:  # of what is written in C++
            return inspect.signature(lambda *args, **kwargs: None)
    scripted: Any = function.forward if is_module else function
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [argument.name for argument in scripted.schema.arguments][is_module:]
    return inspect.Signature([inspect.Parameter(name, kind, default=None) for name in names])
