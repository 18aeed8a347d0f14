"""Replaces methods of a class by compiled ones, and restores them for capture."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.compiler import is_compiling

from tvmify.capture.twin import twin
from tvmify.decorate.caches import GrowingCache, declare_lengths, with_tensors
from tvmify.decorate.generation import compile_around_generate
from tvmify.dispatch.dispatcher import Dispatcher
from tvmify.dispatch.generality.declared import check_names
from tvmify.dispatch.subject import Name, Subject
from tvmify.errors import OptionError
from tvmify.options import CompileOptions
from tvmify.runtime import DISPATCHER, Shortcut, is_traced_here
from tvmify.system import forks

#: Suffix of the attribute that keeps the dispatcher for calls with a cache of transformers.
WITH_CACHE = " with a cache"
# Held while a dispatcher is made, so that simultaneous first calls in several threads share one.
_MAKING = forks.Lock()
# Classes without decorators, of which TorchScript keeps one type each.
_PLAIN: weakref.WeakValueDictionary[tuple[Any, ...], type[nn.Module]] = (
    weakref.WeakValueDictionary()
)


class Decoration(NamedTuple):
    """What the decorator stores on a class, as its ``__tvmify__``."""

    methods: dict[str, Callable[..., Any]]  # the original methods
    options: CompileOptions
    attribute: str  # prefix of the attributes in which an instance keeps its dispatchers


def check_methods(methods: object) -> tuple[str, ...]:
    """Return the names in the option ``methods``.

    Raises
    ------
    OptionError
        It is not a list of distinct names.
    """
    if isinstance(methods, str) or not isinstance(methods, Iterable):
        raise OptionError(f"option 'methods' is {methods!r}: expected a list of names")
    names = tuple(methods)
    if not names or len(set(names)) < len(names) or not all(isinstance(n, str) for n in names):
        raise OptionError(f"option 'methods' is {methods!r}: expected distinct names of methods")
    return names


def decorate_methods(
    cls: type[nn.Module], methods: Sequence[str], compile_options: CompileOptions
) -> None:
    """Replace each method by one that calls a dispatcher.

    Raises
    ------
    OptionError
        The class has no such method, or it is not a plain method of instances; or the option
        ``dynamic_shapes`` names an argument that none of them has.
    """
    eager = {name: _eager_method(cls, name) for name in methods}
    without_self = [functools.partial(method, None) for method in eager.values()]
    check_names(compile_options.dynamic_shapes, without_self)
    # Per class, since several classes of a hierarchy may be decorated, each for its own methods.
    attribute = f"{DISPATCHER}{cls.__module__}.{cls.__qualname__}."
    decoration = Decoration(eager, compile_options, attribute)
    for name, function in eager.items():
        setattr(cls, name, _decorated(function, name, decoration))
    if "forward" in eager:
        cls._compiled_call_impl = shortcut(f"{attribute}forward", cls.forward)
        if "generate" not in eager:
            compile_around_generate(
                cls,
                lambda module: dispatcher_of_method(module, "forward", decoration),
                _inner_with_cache,
            )
    cls.__tvmify__ = decoration  # type: ignore[attr-defined]
    cls.__prepare_scriptable__ = _prepared  # type: ignore[attr-defined]


def shortcut(place: str, forward: Callable[..., Any]) -> Any:
    """Return a ``_compiled_call_impl`` for a class, which runs the latest compiled call directly.

    Parameters
    ----------
    place
        The attribute under which an instance keeps the dispatcher of ``forward``.
    forward
        The current forward of the class; calls of any other forward do not use the shortcut.
    """
    return Shortcut(_uncompiled, place, forward)


@torch.jit.unused  # or a traced module with exported methods would have it as a property
def _uncompiled(_: nn.Module) -> None:
    """Replaces native code, which torch.compile cannot trace."""


def _eager_method(cls: type[nn.Module], name: str) -> Callable[..., Any]:
    method = inspect.getattr_static(cls, name, None)
    if not callable(method):  # a staticmethod is callable, a property is not
        raise OptionError(f"{cls.__qualname__} has no method {name!r} to compile")
    kinds = {
        "a static or class method": isinstance(method, (staticmethod, classmethod)),
        "a generator function": inspect.isgeneratorfunction(method),
        "a coroutine function": inspect.iscoroutinefunction(method),
        "a special method": name.startswith("__") and name.endswith("__"),
    }
    for kind, is_one in kinds.items():
        if is_one:
            raise OptionError(
                f"{cls.__qualname__}.{name} cannot be compiled, since it is {kind}: name plain "
                "methods of instances, and 'forward' for calls of the module"
            )
    return getattr(method, "__tvmify_eager__", None) or method  # type: ignore[return-value]


def _decorated(eager: Callable[..., Any], name: str, decoration: Decoration) -> Any:
    attribute = decoration.attribute + name

    @functools.wraps(eager)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # torch.compile traces the original method, to see the operators.
        if is_compiling() and is_traced_here():
            return eager(self, *args, **kwargs)
        if kwargs and (growing := GrowingCache.among(self, args, kwargs)) is not None:
            return growing.call(dispatcher_with_cache(self, name, decoration), args, kwargs)
        dispatcher = self.__dict__.get(attribute)
        # A shallow copy of a module has the dispatcher of the original.
        if dispatcher is None or dispatcher.module() is not self:
            dispatcher = dispatcher_of_method(self, name, decoration)
        return dispatcher(args, kwargs)

    method.__tvmify_eager__ = eager  # type: ignore[attr-defined]
    return method


def dispatcher_of_method(module: nn.Module, name: str, decoration: Decoration) -> Dispatcher:
    """Return the dispatcher of a method of a module, created on first use."""
    return _dispatcher(module, name, decoration.attribute + name, decoration)


def dispatcher_with_cache(module: nn.Module, name: str, decoration: Decoration) -> Dispatcher:
    """Return the dispatcher of a method for calls with a cache of transformers."""
    attribute = decoration.attribute + name + WITH_CACHE
    if decoration.attribute + name not in vars(module):
        # Make both together: the guard of one would report the other, made later, as a change.
        dispatcher_of_method(module, name, decoration)
    return _dispatcher(module, name, attribute, decoration, with_cache=True)


def _dispatcher(
    module: nn.Module,
    name: str,
    attribute: str,
    decoration: Decoration,
    *,
    with_cache: bool = False,
) -> Dispatcher:
    eager = decoration.methods[name]
    is_forward = name == "forward" and not with_cache
    if with_cache:
        eager = with_tensors(eager)
    with _MAKING:
        dispatcher = module.__dict__.get(attribute)
        if dispatcher is None or dispatcher.module() is not module:
            dispatcher = module.__dict__[attribute] = Dispatcher(
                Subject(
                    Name(type(module).__name__, name, with_cache),
                    eager=eager,
                    capturable=lambda module: undecorated(module, eager, is_forward=is_forward),
                    options=decoration.options,
                    module=module,
                    calls_itself=name != "forward",
                    declare=declare_lengths if with_cache else None,
                    defined=decoration.methods[name],
                )
            )
        return dispatcher


def _inner_with_cache(subject: Subject) -> Subject:
    """Return the subject for calls of a submodule with a cache of transformers."""
    eager = with_tensors(subject.eager)
    return Subject(
        replace(subject.named, with_cache=True),
        eager=eager,
        capturable=lambda module: undecorated(subject.capturable(module), eager, is_forward=False),
        options=subject.options,
        module=subject.module(),
        is_part=True,
        declare=declare_lengths,
        defined=subject.eager,
    )


def _prepared(module: nn.Module) -> nn.Module:
    """Return what ``torch.jit.script`` scripts in place of a decorated part of a module.

    It puts that in the place of the part, and then knows the part by its address only, so that must
    stay taken.
    """
    found = undecorated(module)
    vars(found)["_tvmify_original"] = (module,)  # torch.jit would script a module
    return found


def undecorated(
    module: nn.Module, eager: Callable[..., Any] | None = None, *, is_forward: bool = True
) -> nn.Module:
    """Return a twin of a module, without decorators.

    Parameters
    ----------
    module
        It is not changed. The twin shares its tensors, and has its own attributes and submodules.
    eager
        The forward of the twin; None for the original forward of its class.
    is_forward
        Whether ``eager`` is a forward of the class or a base, rather than another method.
    """
    copied = twin(module)
    # Hooks run around the compiled call, with the tensors of the call.
    copied._forward_hooks.clear()
    copied._forward_pre_hooks.clear()
    for part in copied.modules():
        is_root = part is copied and eager is not None
        if getattr(type(part), "__tvmify__", None) is not None or is_root:
            for name in [name for name in vars(part) if name.startswith(DISPATCHER)]:
                del vars(part)[name]
            part.__class__ = _plain_class(type(part), eager if is_root else None, is_forward)
    return copied


def _plain_class(
    cls: type[nn.Module], called: Callable[..., Any] | None, is_forward: bool
) -> type[nn.Module]:
    """Return the same class without decorators, for TorchScript the same one each time."""
    key = cls, called, is_forward
    return _PLAIN.get(key) or _PLAIN.setdefault(key, _new_plain_class(*key))


def _new_plain_class(
    cls: type[nn.Module], called: Callable[..., Any] | None, is_forward: bool
) -> type[nn.Module]:
    members: dict[str, Any] = dict.fromkeys(("__tvmify__", "_compiled_call_impl"))
    members["__prepare_scriptable__"] = lambda self: self  # it is prepared
    members["__module__"] = cls.__module__
    members["__qualname__"] = cls.__qualname__
    for base in cls.__mro__:
        decoration = vars(base).get("__tvmify__")
        for name in decoration.methods if decoration is not None else ():
            # A subclass without a decorator may have overridden it.
            eager = getattr(getattr(cls, name), "__tvmify_eager__", None)
            if eager is not None:
                members[name] = eager
    if eager := getattr(getattr(cls, "generate", None), "__tvmify_eager__", None):
        members["generate"] = eager
    plain = type(cls.__name__, (cls,), members)
    if called is None:
        return plain
    if is_forward:
        plain.forward = called
        return plain
    # A method that calls the module expects its forward.
    return type(
        cls.__name__, (plain,), members | {"forward": called, "__tvmify_forward__": plain.forward}
    )
