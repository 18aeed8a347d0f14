"""The subject of a dispatcher: a method of one module, or a function."""

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
from tvmify.signature import Args, Kwargs
from tvmify.torch_compat.declared_sizes import DeclaredShape

#: The declared sizes of tensors, by index among the flattened arguments.
Declared: TypeAlias = Mapping[int, DeclaredShape]


@dataclass(frozen=True)
class Name:
    """The name of a subject; as text, for messages.

    Attributes
    ----------
    owner
        The class of the module, or the function; for a submodule of ``whole``, its path there.
    method
        The method; empty for a function.
    with_cache
        Whether it is for calls with a cache of transformers.
    whole
        What this is a part of.
    region
        The number of this region of ``whole``; 0 for a submodule.
    """

    owner: str
    method: str = ""
    with_cache: bool = False
    whole: Name | None = None
    region: int = 0

    def __str__(self) -> str:
        text = self.owner if self.method in ("", "forward") else f"{self.owner}.{self.method}"
        if self.whole is not None:
            inside = f", region {self.region}" if self.region else f".{text}"
            text = f"{self.whole}{inside}"
        return f"{text} with a cache" if self.with_cache else text

    def submodule(self, path: str) -> Name:
        """Return the name of a submodule."""
        return Name(path, "forward", whole=self)

    def numbered(self, region: int) -> Name:
        """Return the name of a region."""
        return Name("", whole=self, region=region)


class Subject:
    """A method of one module, or a function.

    Parameters
    ----------
    named
        Its name.
    eager
        Runs a call in eager PyTorch; takes the module first, if there is one.
    capturable
        Takes the module, or None. Returns the argument of `capture`: an undecorated module, a
        TorchScript module, or a function.
    options
        The options of the decorator.
    module
        The module that the calls depend on, which is held weakly; None for a function.
    calls_itself
        Whether ``eager`` may call the module, and thereby run its hooks. For ``forward`` it does
        not: hooks run around it.
    is_part
        Whether it is a region or a submodule of another subject. The signatures of a part are not
        recorded, and not evicted.
    is_settled
        Whether the first calls of the module are over, in which it may set attributes.
    symbols
        The sizes that vary, if they are known before the first call: for each leaf that has any,
        the name of a symbol or None for each axis.
    declare
        Returns what is known about the sizes of a call, in addition to what the user declares; not
        used with ``dynamic=False``.
    defined
        The function that defines the arguments, if ``eager`` only passes them on.

    Attributes
    ----------
    named, eager, capturable, options, calls_itself, is_part, is_settled, symbols, declare
        As given.
    module
        Returns the module; None for a function, or if the module no longer exists.
    keywords
        The arguments that may be given by name, in the order of their definition.
    """

    def __init__(
        self,
        named: Name,
        eager: Callable[..., Any],
        capturable: Callable[[Any], Any],
        options: CompileOptions,
        module: nn.Module | None = None,
        *,
        calls_itself: bool = False,
        is_part: bool = False,
        is_settled: bool = False,
        symbols: Mapping[int, tuple[str | None, ...]] | None = None,
        declare: Callable[[Args, Kwargs], Declared] | None = None,
        defined: Any = None,
    ) -> None:
        self.named, self.eager, self.capturable, self.options = named, eager, capturable, options
        self.module: Callable[[], nn.Module | None] = (
            _no_module if module is None else weakref.ref(module)
        )
        self.calls_itself, self.is_part = calls_itself, is_part
        self.is_settled = is_settled
        self.symbols, self.declare = symbols, declare
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self._signature = parameters_of(eager if defined is None else defined)
        is_method = module is not None and not isinstance(defined, torch.jit.ScriptModule)
        self._first = (None,) if is_method else ()
        parameters = self._signature.parameters.values()
        self.keywords = tuple(p.name for p in parameters if p.kind in by_name)

    @property
    def name(self) -> str:
        """Its name, for messages."""
        return str(self.named)

    def defined(self, kwargs: Mapping[str, Any]) -> int:
        """Return how many keyword arguments forward defines; a call may have them in any order."""
        return sum(name in kwargs for name in self.keywords)

    def in_order(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return keyword arguments in the order of their definition, which a caller may change.

        Those for a ``**kwargs`` follow unchanged, since forward sees their order.
        """
        return {name: kwargs[name] for name in self.keywords if name in kwargs} | dict(kwargs)

    def check_arguments(self, args: Args, kwargs: Kwargs) -> None:
        """Raise a TypeError if a call cannot have these arguments."""
        self._signature.bind(*self._first, *args, **kwargs)

    def captured(self) -> Any:
        """Return what to capture: the plain module, or the function."""
        return self.capturable(self.module())

    def call(self, args: Args, kwargs: Kwargs) -> Callable[[], Any]:
        """Return a function that runs a call in eager PyTorch."""
        # It keeps the module alive: a backward may run after everyone else has dropped it.
        module = self.module()
        bound = () if module is None else (module,)
        return functools.partial(self.eager, *bound, *args, **kwargs)


def _no_module() -> None:
    return None


#: The parameters of a function that does not say which it has.
_ANY_ARGUMENTS = inspect.signature(lambda *args, **kwargs: None)


def parameters_of(function: Any) -> inspect.Signature:
    """Return the parameters of a function, or of a TorchScript one."""
    is_module = isinstance(function, torch.jit.ScriptModule)
    if not is_module and not isinstance(function, torch.jit.ScriptFunction):
        try:
            return inspect.signature(function)
        except ValueError:  # a function that is written in C++
            return _ANY_ARGUMENTS
    scripted: Any = function.forward if is_module else function
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [argument.name for argument in scripted.schema.arguments][is_module:]
    if len(set(names)) < len(names):  # as torch.jit.trace may name them
        return _ANY_ARGUMENTS
    return inspect.Signature([inspect.Parameter(name, kind, default=None) for name in names])
