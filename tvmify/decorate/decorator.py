"""``@tvmify`` on a class, an instance, a function, or a TorchScript module."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules.lazy import LazyModuleMixin

from tvmify.cache import Neighbours
from tvmify.decorate.methods import (
    Decoration,
    check_methods,
    decorate_methods,
    dispatcher_of_method,
    shortcut,
)
from tvmify.dispatch.counts import CacheInfo
from tvmify.dispatch.dispatcher import Dispatcher
from tvmify.dispatch.subject import Subject
from tvmify.errors import OptionError, SaveError, WarmUpError
from tvmify.options import CompileOptions
from tvmify.runtime import DISPATCHER, autocast_text, is_traced_here, original
from tvmify.signature import example_arguments

Decorated = TypeVar("Decorated")


@overload
def tvmify(subject: Decorated, /, *, methods: Iterable[str] = ..., **options: Any) -> Decorated: ...
@overload
def tvmify(*, methods: Iterable[str] = ..., **options: Any) -> Callable[[Decorated], Decorated]: ...
def tvmify(subject: Any = None, /, *, methods: Iterable[str] = ("forward",), **options: Any) -> Any:
    """Compile a module or function with TVM, one program per signature.

    The first call with a signature (shapes, dtypes and devices of the tensors, other arguments by
    value, torch's modes) compiles a program or loads it from the disk cache. Later calls run it.
    What cannot be compiled runs in eager PyTorch, with one `TvmifyWarning` per reason.

    Parameters
    ----------
    subject
        What to compile; without it, a decorator is returned. One of

        - a subclass of `torch.nn.Module`, which is decorated in place;
        - an instance: a shallow copy is returned, which shares parameters, buffers and submodules
          with the original; the original stays eager;
        - a ``torch.export.ExportedProgram``: its module takes the arguments it was exported for;
        - a TorchScript module;
        - a function of tensors.
    methods
        The methods of a module to compile; by default ``forward`` alone. Each has its own
        signatures; they share the weights.
    **options
        Fields of `CompileOptions`, such as ``target``, ``strict`` and ``cache``.

    Returns
    -------
    Any
        The decorated subject, with the methods ``cache_info()``, ``explain()``, ``refresh()`` and
        ``warmup(*signatures)``. A method that the subject already has is not replaced.

    Raises
    ------
    OptionError
        An option or method does not exist, or its value is wrong. The message lists valid ones.
    TypeError
        The subject cannot be decorated. For a TorchScript class, decorate an instance; for a
        method, decorate its class.
    NotCompiled
        From calls, with ``strict=True``: the call cannot be compiled.

    Warns
    -----
    TvmifyWarning
        From calls: a call runs in eager PyTorch, or without the disk cache, and why.

    Notes
    -----
    Tensors cross to compiled code without a copy if they are contiguous and aligned to 64 bytes.
    Results own their memory, so that no later call overwrites them; but where eager returns an
    argument, a buffer, or a view of one, the result shares its memory as in eager.

    Calls may come from several threads at once.

    Examples
    --------
    >>> @tvmify
    ... class Net(nn.Module):
    ...     def forward(self, x):
    ...         return torch.relu(x) + 1
    >>> net = Net().eval()
    >>> with torch.inference_mode():
    ...     y = net(torch.randn(8, 64))  # float32[8, 64], compiled now
    >>> fast = tvmify(model, strict=True)  # an instance, never in eager
    """
    compile_options = CompileOptions.of(options)
    names = check_methods(methods)
    if subject is None:
        return functools.partial(_decorate, methods=names, compile_options=compile_options)
    return _decorate(subject, names, compile_options)


def _decorate(subject: Any, methods: tuple[str, ...], compile_options: CompileOptions) -> Any:
    if inspect.isclass(subject) and issubclass(subject, nn.Module):
        if issubclass(subject, torch.jit.ScriptModule):
            raise TypeError("decorate an instance of a TorchScript class, not the class")
        return _decorate_class(subject, methods, compile_options)
    if _is_exported(subject):
        subject = subject.module()  # type: ignore[attr-defined]
    if isinstance(subject, nn.Module) and not isinstance(subject, torch.jit.ScriptModule):
        return _decorate_instance(subject, methods, compile_options)
    if methods != ("forward",):
        raise OptionError("option 'methods' is for classes and instances of torch.nn.Module")
    if isinstance(subject, torch.jit.ScriptModule):
        return _ScriptedModule(subject, compile_options)
    if callable(subject) and not inspect.isclass(subject):
        return TvmifiedFunction(subject, compile_options)
    if isinstance(subject, str):
        raise OptionError(f"options are keywords: write tvmify(target={subject!r})")
    raise TypeError(
        f"cannot decorate {subject!r}: expected a torch.nn.Module class or instance, a TorchScript "
        "module, or a function"
    )


def _is_exported(subject: Any) -> bool:
    """Whether it is a ``torch.export.ExportedProgram``; does not import ``torch.export``."""
    export = sys.modules.get("torch.export")
    return export is not None and isinstance(subject, export.ExportedProgram)


# ------------------------------------------------------------------------------ what is added


def cache_info(subject: Any) -> CacheInfo:
    """Return the counts of a decorated object; for several methods, their sums.

    Parameters
    ----------
    subject
        A decorated object.

    Returns
    -------
    CacheInfo
        Hits, misses, builds, disk hits, entries, seconds per stage, calls in eager, evictions.

    Raises
    ------
    TypeError
        The object is not decorated.

    Examples
    --------
    >>> assert net.cache_info().eager == 0  # every call so far ran compiled code
    """
    return CacheInfo.total([d.cache_info() for d in dispatchers_of(subject)])


def explain(subject: Any) -> str:
    """Print and return, per signature, what ran compiled, what ran in eager, and why.

    For a program that was compiled in this process, it also names the nearest entry of the disk
    cache and what differs.

    Parameters
    ----------
    subject
        A decorated object.

    Returns
    -------
    str
        The text that was printed to standard output. It is for people: its form may change.

    Raises
    ------
    TypeError
        The object is not decorated.
    """
    dispatchers = dispatchers_of(subject)
    neighbours = Neighbours(dispatchers[0].options.cache_directory())  # read once for all methods
    text = "\n\n".join(dispatcher.explain(neighbours) for dispatcher in dispatchers)
    print(text)
    return text


def refresh(subject: Any) -> None:
    """Make the next call inspect the whole module again.

    Changes to parameters, buffers, attributes, submodules, hooks and modes are noticed without it.
    Call it after changes that would be too expensive to check for in every call: a list, dict or
    other object in an attribute was edited in place; single elements of a weight were written
    through ``tensor.data``; a global variable or class attribute changed; or a module that a
    decorated function calls changed. It also retries compilations that failed.

    Programs that did not change are not compiled again.

    Parameters
    ----------
    subject
        A decorated object.

    Raises
    ------
    TypeError
        The object is not decorated.

    Examples
    --------
    >>> net.config.scale = 2.0
    >>> net.refresh()
    """
    for dispatcher in dispatchers_of(subject):
        dispatcher.refresh()


def warmup(
    subject: Any,
    *signatures: Any,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    method: str | None = None,
) -> CacheInfo:
    """Compile programs, or load them from the cache, before the first call needs them.

    If the option ``compare`` allows it, programs are timed against eager on zeros.

    Parameters
    ----------
    subject
        A decorated object.
    *signatures
        One per kind of call: a list with a shape, a `TensorSpec` or an example tensor for each
        argument, such as ``[(1, 3, 224, 224)]``, or a dict of keyword arguments.
    dtype
        Dtype of arguments that are given as bare shapes.
    device
        Device of arguments that are given as bare shapes; by default that of the weights.
    method
        The method to compile for; needed if several are decorated.

    Returns
    -------
    CacheInfo
        The counts afterwards.

    Raises
    ------
    WarmUpError
        A signature has none of these forms, or ``method`` is missing or not decorated. The message
        shows the forms, or lists the methods.
    NotCompiled
        With ``strict=True``: a signature cannot be compiled.

    Examples
    --------
    >>> net.warmup([(1, 3, 224, 224)], [(8, 3, 224, 224)])
    >>> bert.warmup({"input_ids": TensorSpec((1, 128), torch.int64)})
    """
    dispatcher = dispatcher_of(subject, method)
    for signature in signatures:
        dispatcher.warm_up(*example_call(subject, signature, dtype, device))
    return cache_info(subject)


def example_call(
    subject: Any,
    signature: Any,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments for a decorated object from a signature of `warmup`."""
    if device is None:
        weights = subject.parameters() if isinstance(subject, nn.Module) else iter(())
        first = next(weights, None)
        device = first.device if first is not None else torch.get_default_device()
    return example_arguments(signature, dtype, torch.device(device))


_METHODS = (cache_info, explain, refresh, warmup)


def is_decorated(subject: Any) -> bool:
    """Tell whether an object is what `tvmify` returned, or an instance of a decorated class."""
    if isinstance(subject, (TvmifiedFunction, _ScriptedModule)):
        return True
    return getattr(type(subject), "__tvmify__", None) is not None


def dispatcher_of(subject: Any, method: str | None = None) -> Dispatcher:
    """Return the dispatcher of a decorated object, or of one of its methods.

    Raises
    ------
    TypeError
        The object is not decorated.
    WarmUpError
        There is no such method; several are decorated and none is named.
    """
    if isinstance(subject, (TvmifiedFunction, _ScriptedModule)):
        return subject._tvmify_dispatcher
    decoration = _decoration_of(subject)
    names = list(decoration.methods)
    name = method or (names[0] if len(names) == 1 else None)
    if name not in names:
        raise WarmUpError(f"give one of the decorated methods as method=: {', '.join(names)}")
    return dispatcher_of_method(subject, name, decoration)


def dispatchers_of(subject: Any) -> list[Dispatcher]:
    """Return the dispatchers of a decorated object, one for each of its methods."""
    if isinstance(subject, (TvmifiedFunction, _ScriptedModule)):
        return [subject._tvmify_dispatcher]
    decoration = _decoration_of(subject)
    return [dispatcher_of_method(subject, name, decoration) for name in decoration.methods]


def _decoration_of(subject: Any) -> Decoration:
    decoration = getattr(type(subject), "__tvmify__", None)
    if decoration is None:
        raise TypeError(f"{type(subject).__qualname__} is not decorated with tvmify")
    return decoration


def saved_method(subject: Any) -> Dispatcher:
    """Return the dispatcher of ``forward``, the only method that files contain.

    Raises
    ------
    SaveError
        It is not among the decorated methods; or autocast is on, which files do not support.
    """
    if autocast_text():
        raise SaveError("files hold no casts of autocast: leave torch.autocast to write one")
    try:
        return dispatcher_of(subject, "forward")
    except WarmUpError:
        raise SaveError(
            f"{type(subject).__qualname__}.forward is not decorated, and files hold no other "
            "method: name 'forward' among methods="
        ) from None


# -------------------------------------------------------------------------- classes and instances


def _decorate_class(
    cls: type[nn.Module], methods: tuple[str, ...], compile_options: CompileOptions
) -> type[nn.Module]:
    decorate_methods(cls, methods, compile_options)
    if issubclass(cls, LazyModuleMixin) and (complete := cls.cls_to_become) is not None:
        cls.cls_to_become = _derived(complete, methods, compile_options)
    for method in _METHODS:
        if not hasattr(cls, method.__name__):  # do not replace a method of the user's
            setattr(cls, method.__name__, method)
    return cls


def _decorate_instance(
    module: nn.Module, methods: tuple[str, ...], compile_options: CompileOptions
) -> nn.Module:
    base = type(module)
    if base.__dict__.get("__reduce_ex__") is _reduce_instance:  # decorated before, as an instance
        base = base.__mro__[1]
    # Not the class's own __new__: that of torch.fx.GraphModule makes a new class without a forward.
    derived: Any = _derived(base, methods, compile_options)
    shared: Any = object.__new__(derived)
    # Share the dicts of parameters, buffers and submodules, so that a swap on one shows on both.
    shared.__dict__.update(_own_attributes(module))
    return shared


def _derived(
    base: type[nn.Module], methods: tuple[str, ...], compile_options: CompileOptions
) -> type[nn.Module]:
    """Return a decorated class of the same name that is for instances."""
    members: dict[str, Any] = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    if issubclass(base, torch.fx.GraphModule):
        # Otherwise recompile() would give the class a __call__ that calls itself.
        members["recompile"] = _recompile
        members["_wrapped_call"] = base._wrapped_call  # type: ignore[attr-defined]
    derived: Any = type(base.__name__, (base,), members)
    decorated = _decorate_class(derived, methods, compile_options)
    decorated.__reduce_ex__ = _reduce_instance  # type: ignore[assignment]
    return decorated


def _recompile(self: torch.fx.GraphModule) -> Any:
    """Make another forward of a graph that was edited, and decorate it."""
    decoration: Decoration = type(self).__tvmify__  # type: ignore[attr-defined]
    code = torch.fx.GraphModule.recompile(self)
    for name in [name for name in vars(self) if name.startswith(DISPATCHER)]:
        del vars(self)[name]
    _decorate_class(type(self), tuple(decoration.methods), decoration.options)
    return code


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    # The attribute that Module.compile() sets calls this very module; nn.Module drops it, too.
    ours = (DISPATCHER, "_compiled_call_impl")
    return {k: v for k, v in module.__dict__.items() if not k.startswith(ours)}


def _reduce_instance(self: nn.Module, protocol: object) -> tuple[Any, ...]:
    # Pickle cannot look up the class of a decorated instance by name, only the class it was derived
    # from. copy.copy and copy.deepcopy use this, too.
    decoration: Decoration = type(self).__tvmify__  # type: ignore[attr-defined]
    made_of = type(self).__mro__[1], decoration.options, tuple(decoration.methods)
    return _rebuild_instance, made_of, _own_attributes(self)


def _rebuild_instance(
    cls: type[nn.Module], compile_options: CompileOptions, methods: tuple[str, ...] = ("forward",)
) -> nn.Module:
    return _decorate_instance(cls.__new__(cls), methods, compile_options)


# ------------------------------------------------------------- functions and TorchScript modules


class TvmifiedFunction:
    """A decorated function: callable like the original, with the methods that tvmify adds."""

    def __init__(self, function: Callable[..., Any], compile_options: CompileOptions) -> None:
        name = getattr(function, "__qualname__", None) or getattr(function, "name", "function")
        functools.update_wrapper(self, function)
        subject = Subject.of(name, function, lambda _: function, compile_options)
        self._tvmify_dispatcher = Dispatcher(subject)
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call."""
        if is_compiling() and is_traced_here():
            return self._function(*args, **kwargs)
        return self._tvmify_dispatcher(args, kwargs)

    def __set_name__(self, owner: type, name: str) -> None:
        # A function defined elsewhere may be an attribute of a class, but it gets no self.
        if getattr(self._function, "__qualname__", "") == f"{owner.__qualname__}.{name}":
            raise TypeError(
                f"a method cannot be decorated by itself: decorate the class {owner.__qualname__} "
                f"with @tvmify(methods=[{name!r}])"
            )

    cache_info = cache_info
    explain = explain
    refresh = refresh
    warmup = warmup

    def __reduce__(self) -> tuple[Any, ...]:
        return TvmifiedFunction, (self._function, self._tvmify_dispatcher.options)


class _ScriptedModule(nn.Module):
    """A TorchScript module that runs compiled; parameters keep their names."""

    def __init__(self, script: torch.jit.ScriptModule, compile_options: CompileOptions) -> None:
        super().__init__()
        script = original(script)
        # Its children are the submodules, not the module itself, so that names stay the same.
        self.__dict__[f"{DISPATCHER}script"] = script
        self._register_again()
        self.training = script.training
        self._tvmify_dispatcher = Dispatcher(
            Subject.of(
                name=script.original_name,
                eager=lambda module, *args, **kwargs: module._tvmify_script(*args, **kwargs),
                capturable=lambda module: module._tvmify_script,
                options=compile_options,
                module=self,
            )
        )

    cache_info = cache_info
    explain = explain
    refresh = refresh
    warmup = warmup

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._tvmify_dispatcher(args, kwargs)

    _compiled_call_impl = shortcut(f"{DISPATCHER}dispatcher", forward)

    def train(self, mode: bool = True) -> _ScriptedModule:
        super().train(mode)
        self._tvmify_script.train(mode)
        return self

    def _register_again(self) -> None:
        script = self._tvmify_script
        self._parameters.update(script.named_parameters(recurse=False))
        self._buffers.update(script.named_buffers(recurse=False))
        self._modules.update(script.named_children())

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        self._tvmify_script._apply(fn, recurse)
        self._register_again()
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith(DISPATCHER):
                raise
            return getattr(self._tvmify_script, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> _ScriptedModule:
        return _ScriptedModule(
            copy.deepcopy(self._tvmify_script, memo), self._tvmify_dispatcher.options
        )
