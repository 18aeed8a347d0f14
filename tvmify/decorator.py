"""``@tvmify`` on a class, an instance, a function, or a TorchScript module."""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, overload

import torch
from torch import nn
from torch.compiler import is_compiling

from tvmify.capture.twin import twin
from tvmify.dispatcher import Dispatcher
from tvmify.errors import OptionError
from tvmify.explanation import CacheInfo
from tvmify.options import CompileOptions
from tvmify.runtime import DISPATCHER, original
from tvmify.signature import example_arguments

Subject = TypeVar("Subject")

# Held while a dispatcher is made, so that threads that call first together share one.
_MAKING = threading.Lock()


@overload
def tvmify(subject: Subject, /, **options: Any) -> Subject: ...
@overload
def tvmify(**options: Any) -> Callable[[Subject], Subject]: ...
def tvmify(subject: Any = None, /, **options: Any) -> Any:
    """Make a module or function run through TVM.

    Parameters
    ----------
    subject
        A subclass of `torch.nn.Module` (decorated in place), an instance (returned as a shallow
        copy that shares parameters, buffers and submodules with the original, which stays eager),
        a TorchScript module, or a function of tensors. Without one, a decorator is returned.
    **options
        The fields of `CompileOptions`: ``target``, ``strict``, ``cache``, ``cache_size``,
        ``progress``.

    Returns
    -------
    Any
        What was given, with these methods added: ``cache_info()``, ``explain()``, ``refresh()``
        and ``warmup(*signatures)``.

    Raises
    ------
    OptionError
        An option does not exist or has a wrong value; it is a `ValueError` too.
    TypeError
        The subject cannot be decorated.

    Examples
    --------
    >>> @tvmify
    ... class Net(nn.Module):
    ...     def forward(self, x):
    ...         return torch.relu(x) + 1
    """
    compile_options = CompileOptions.of(options)
    if subject is None:
        return functools.partial(_decorate, compile_options=compile_options)
    return _decorate(subject, compile_options)


def _decorate(subject: Any, compile_options: CompileOptions) -> Any:
    if inspect.isclass(subject) and issubclass(subject, nn.Module):
        if issubclass(subject, torch.jit.ScriptModule):
            raise TypeError("decorate an instance of a TorchScript class, not the class")
        return _decorate_class(subject, compile_options)
    if isinstance(subject, torch.jit.ScriptModule):
        return _ScriptedModule(subject, compile_options)
    if isinstance(subject, nn.Module):
        return _decorate_instance(subject, compile_options)
    if callable(subject) and not inspect.isclass(subject):
        return TvmifiedFunction(subject, compile_options)
    if isinstance(subject, str):
        raise OptionError(f"options are keywords: write tvmify(target={subject!r})")
    raise TypeError(
        f"cannot decorate {subject!r}: expected a torch.nn.Module class or instance, a TorchScript "
        "module, or a function"
    )


# ------------------------------------------------------------------------------ what is added


def cache_info(subject: Any) -> CacheInfo:
    """Return hits, misses, builds, disk hits, entries and seconds of a decorated object."""
    return dispatcher_of(subject).cache_info()


def explain(subject: Any) -> str:
    """Print, and return, what of a decorated object ran where and why."""
    text = dispatcher_of(subject).explain()
    print(text)
    return text


def refresh(subject: Any) -> None:
    """Make the next call look at everything again.

    Parameters and buffers (assigned, or written to in place), attributes, submodules, hooks and
    modes are noticed without this. It is for what no call can see cheaply: a list or dict
    attribute edited in place, a write through ``tensor.data``, a changed global variable.
    """
    dispatcher_of(subject).refresh()


def warmup(
    subject: Any,
    *signatures: Any,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> CacheInfo:
    """Compile, or load from the cache, ahead of the first call; nothing is run.

    Parameters
    ----------
    subject
        A decorated object.
    *signatures
        One for each kind of call: a list with a shape, a `TensorSpec` or an example tensor per
        argument, such as ``[(1, 3, 224, 224)]``, or a dict of keyword arguments.
    dtype, device
        Of arguments given as bare shapes; the device follows the module's weights by default.

    Returns
    -------
    CacheInfo
        The counts after it.

    Raises
    ------
    WarmUpError
        A signature is of none of these forms.
    NotCompiled
        With ``strict=True``, when a signature cannot be compiled.
    """
    dispatcher = dispatcher_of(subject)
    for signature in signatures:
        dispatcher.warm_up(*example_call(subject, signature, dtype, device))
    return dispatcher.cache_info()


def example_call(
    subject: Any,
    signature: Any,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments for a decorated object from what `warmup` takes; the weights' device."""
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


def dispatcher_of(subject: Any) -> Dispatcher:
    """Return what runs the calls of a decorated object."""
    if isinstance(subject, (TvmifiedFunction, _ScriptedModule)):
        return subject._tvmify_dispatcher
    decoration = getattr(type(subject), "__tvmify__", None)
    if decoration is None:
        raise TypeError(f"{type(subject).__qualname__} is not decorated with tvmify")
    return _dispatcher_of_module(subject, decoration)


# -------------------------------------------------------------------------- classes and instances


class _Decoration(NamedTuple):
    """What the decorator left on a class."""

    eager: Callable[..., Any]  # the forward that the class came with
    options: CompileOptions
    attribute: str  # under which an instance keeps its dispatcher


def _decorate_class(cls: type[nn.Module], compile_options: CompileOptions) -> type[nn.Module]:
    eager = getattr(cls.forward, "__tvmify_eager__", cls.forward)
    # By class, since several classes of one hierarchy may be decorated, each for its own forward.
    attribute = f"{DISPATCHER}{cls.__module__}.{cls.__qualname__}"
    decoration = _Decoration(eager, compile_options, attribute)

    @functools.wraps(eager)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():  # torch.compile looks through us, at the operators
            return eager(self, *args, **kwargs)
        dispatcher = self.__dict__.get(attribute)
        # A shallow copy of a module comes with the dispatcher of the one it was copied from.
        if dispatcher is None or dispatcher.module() is not self:
            dispatcher = _dispatcher_of_module(self, decoration)
        return dispatcher(args, kwargs)

    forward.__tvmify_eager__ = eager  # type: ignore[attr-defined]
    cls.forward = forward
    cls.__tvmify__ = decoration  # type: ignore[attr-defined]
    cls.__prepare_scriptable__ = undecorated  # type: ignore[attr-defined]
    for method in _METHODS:
        if not hasattr(cls, method.__name__):  # a name of the user's own stays the user's
            setattr(cls, method.__name__, method)
    return cls


def _dispatcher_of_module(module: nn.Module, decoration: _Decoration) -> Dispatcher:
    with _MAKING:
        dispatcher = module.__dict__.get(decoration.attribute)
        if dispatcher is None or dispatcher.module() is not module:
            dispatcher = module.__dict__[decoration.attribute] = Dispatcher(
                name=type(module).__name__,
                eager=decoration.eager,
                captured=lambda module: undecorated(module, decoration.eager),
                compile_options=decoration.options,
                module=module,
            )
        return dispatcher


def _decorate_instance(module: nn.Module, compile_options: CompileOptions) -> nn.Module:
    base = type(module)
    if base.__dict__.get("__reduce_ex__") is _reduce_instance:  # decorated before, as an instance
        base = base.__mro__[1]
    members = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    derived: Any = type(base.__name__, (base,), members)
    decorated = _decorate_class(derived, compile_options)
    decorated.__reduce_ex__ = _reduce_instance  # type: ignore[assignment]
    shared = decorated.__new__(decorated)
    # The very dicts of parameters, buffers and submodules: what is swapped on one is on the other.
    shared.__dict__.update(_own_attributes(module))
    return shared


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    return {k: v for k, v in module.__dict__.items() if not k.startswith(DISPATCHER)}


def _reduce_instance(self: nn.Module, protocol: object) -> tuple[Any, ...]:
    # The class of a decorated instance has no name that pickle could look up; the class it was
    # derived from has. copy.copy and copy.deepcopy come this way too.
    compile_options = type(self).__tvmify__.options  # type: ignore[attr-defined]
    return _rebuild_instance, (type(self).__mro__[1], compile_options), _own_attributes(self)


def _rebuild_instance(cls: type[nn.Module], compile_options: CompileOptions) -> nn.Module:
    return _decorate_instance(cls.__new__(cls), compile_options)


def undecorated(module: nn.Module, eager: Callable[..., Any] | None = None) -> nn.Module:
    """Return a twin of a module, without decorators.

    Parameters
    ----------
    module
        Not changed; the twin shares its tensors, and has attributes and submodules of its own.
    eager
        The forward that the twin gets; None for the one that its class came with.
    """
    copied = twin(module)
    # They run around the compiled call, with the tensors of the call.
    copied._forward_hooks.clear()
    copied._forward_pre_hooks.clear()
    for part in copied.modules():
        decoration: _Decoration | None = getattr(type(part), "__tvmify__", None)
        if decoration is not None:
            forward = eager if part is copied and eager is not None else decoration.eager
            part.__dict__.pop(decoration.attribute, None)
            part.__class__ = _plain_class(type(part), forward)
    return copied


@functools.cache
def _plain_class(cls: type[nn.Module], eager: Callable[..., Any]) -> type[nn.Module]:
    members = {
        "forward": eager,
        "__tvmify__": None,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
    }
    return type(cls.__name__, (cls,), members)


# ------------------------------------------------------------- functions and TorchScript modules


class TvmifiedFunction:
    """A decorated function; called like it, with the methods that the decorator adds."""

    def __init__(self, function: Callable[..., Any], compile_options: CompileOptions) -> None:
        name = getattr(function, "__qualname__", None) or getattr(function, "name", "function")
        functools.update_wrapper(self, function)
        self._tvmify_dispatcher = Dispatcher(name, function, lambda _: function, compile_options)
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call."""
        if is_compiling():
            return self._function(*args, **kwargs)
        return self._tvmify_dispatcher(args, kwargs)

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
        # Under this prefix it is not a submodule: its children are, so that names stay the same.
        self.__dict__[f"{DISPATCHER}script"] = script
        self._register_again()
        self.training = script.training
        self._tvmify_dispatcher = Dispatcher(
            name=script.original_name,
            eager=lambda module, *args, **kwargs: module._tvmify_script(*args, **kwargs),
            captured=lambda module: module._tvmify_script,
            compile_options=compile_options,
            module=self,
        )

    cache_info = cache_info
    explain = explain
    refresh = refresh
    warmup = warmup

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._tvmify_dispatcher(args, kwargs)

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
