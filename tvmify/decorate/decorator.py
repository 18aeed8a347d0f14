"""``@tvmify`` on a class, an instance, a function, or a TorchScript module."""

from __future__ import annotations

import copy
import functools
import inspect
import reprlib
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeGuard, TypeVar, overload

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules.lazy import LazyModuleMixin
from typing_extensions import Unpack

from tvmify.decorate.decorated import METHODS, Decorated, Single, refuse_path
from tvmify.decorate.methods import Decoration, check_methods, decorate_methods, shortcut
from tvmify.dispatch.dispatcher import Dispatcher
from tvmify.dispatch.generality.declared import check_names
from tvmify.dispatch.subject import Name, Subject
from tvmify.errors import OptionError
from tvmify.options import CompileOptions, Options
from tvmify.runtime import DISPATCHER, is_traced_here, original
from tvmify.torch_compat.parts import slots, trains

if TYPE_CHECKING:
    from torch.export import ExportedProgram

P = ParamSpec("P")
R = TypeVar("R")
D = TypeVar("D", bound=Decorated)

# The classes of decorated instances, by what they were derived from.
_DERIVED: weakref.WeakValueDictionary[Hashable, type[nn.Module]] = weakref.WeakValueDictionary()

if TYPE_CHECKING:

    class DecoratedModule(nn.Module, Decorated, Any):
        """The type of a decorated module for type checkers.

        It has the methods of the decorator and any others, and can be passed as an instance of the
        decorated class: Python has no type for "a `Net` with these methods".
        """

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...


class Decorator(Protocol):
    """The type of `tvmify` with options only: a decorator."""

    @overload
    def __call__(self, subject: type[D], /) -> type[D]: ...
    @overload
    def __call__(self, subject: type[nn.Module], /) -> type[DecoratedModule]: ...
    @overload
    def __call__(self, subject: nn.Module | ExportedProgram, /) -> DecoratedModule: ...
    @overload
    def __call__(self, subject: Callable[P, R], /) -> TvmifiedFunction[P, R]: ...
    def __call__(self, subject: Any, /) -> Any:
        """Decorate a class, a module or a function."""


@overload
def tvmify(
    subject: type[D], /, *, methods: Iterable[str] = ..., **options: Unpack[Options]
) -> type[D]: ...
@overload
def tvmify(
    subject: type[nn.Module], /, *, methods: Iterable[str] = ..., **options: Unpack[Options]
) -> type[DecoratedModule]: ...
@overload
def tvmify(
    subject: nn.Module | ExportedProgram,
    /,
    *,
    methods: Iterable[str] = ...,
    **options: Unpack[Options],
) -> DecoratedModule: ...
@overload
def tvmify(subject: Callable[P, R], /, **options: Unpack[Options]) -> TvmifiedFunction[P, R]: ...
@overload
def tvmify(*, methods: Iterable[str] = ..., **options: Unpack[Options]) -> Decorator: ...
def tvmify(subject: Any = None, /, *, methods: Iterable[str] = ("forward",), **options: Any) -> Any:
    """Compile a module or function with TVM, one program per signature.

    The first call with a signature (shapes, dtypes and devices of the tensors, other arguments by
    value, torch's modes) compiles a program or loads it from the disk cache. Later calls run it.
    What cannot be compiled runs in eager PyTorch, with one `TvmifyWarning` per reason.

    Parameters
    ----------
    subject
        What to compile; without it, `tvmify` returns a decorator. One of

        - a subclass of `torch.nn.Module`, which is decorated in place;
        - an instance: a shallow copy is returned, which shares parameters, buffers and submodules
          with the original; the original stays eager;
        - a ``torch.export.ExportedProgram``, for the arguments it was exported for;
        - a TorchScript module;
        - a function of tensors.
    methods
        The methods of a module to compile; by default only ``forward``. Each has its own
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
    Tensors are passed to compiled code without a copy if they are contiguous and aligned to 64
    bytes. Results own their memory, so later calls do not overwrite them; but where eager returns
    an argument, a buffer, or a view of one, the result shares its memory as in eager.

    Several threads may call at the same time.

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
    if is_exported(subject):
        subject = subject.module()  # type: ignore[attr-defined]
    if isinstance(subject, nn.Module) and not isinstance(subject, torch.jit.ScriptModule):
        return _decorate_instance(subject, methods, compile_options)
    if methods != ("forward",):
        raise OptionError("option 'methods' is for classes and instances of torch.nn.Module")
    if isinstance(subject, torch.jit.ScriptModule):
        return _ScriptedModule(subject, compile_options)
    if callable(subject) and not inspect.isclass(subject):
        return TvmifiedFunction(subject, compile_options)
    refuse_path(subject)
    raise TypeError(
        f"cannot decorate {reprlib.repr(subject)}: expected a torch.nn.Module class or instance, "
        "a TorchScript module, or a function"
    )


def is_exported(subject: Any) -> TypeGuard[ExportedProgram]:
    """Whether it is a ``torch.export.ExportedProgram``; does not import ``torch.export``."""
    export = sys.modules.get("torch.export")
    return export is not None and isinstance(subject, export.ExportedProgram)


# -------------------------------------------------------------------------- classes and instances


def _decorate_class(
    cls: type[nn.Module], methods: tuple[str, ...], compile_options: CompileOptions
) -> type[nn.Module]:
    decorate_methods(cls, methods, compile_options)
    if issubclass(cls, LazyModuleMixin) and (complete := cls.cls_to_become) is not None:
        cls.cls_to_become = _derived(complete, methods, compile_options)
    for method in METHODS:
        if not hasattr(cls, method.__name__):  # do not replace the user's method
            setattr(cls, method.__name__, method)
    return cls


def _decorate_instance(
    module: nn.Module, methods: tuple[str, ...], compile_options: CompileOptions
) -> nn.Module:
    base = type(module)
    if base.__dict__.get("__reduce_ex__") is _reduce_instance:  # decorated already
        base = base.__mro__[1]
    # Not the __new__ of the class: torch.fx.GraphModule's makes a new class without a forward.
    derived: Any = _derived(base, methods, compile_options)
    shared: Any = object.__new__(derived)
    # Share the dicts of parameters, buffers and submodules, so that a change affects both.
    shared.__dict__.update(_own_attributes(module))
    for name in slots(base):
        if hasattr(module, name):
            setattr(shared, name, getattr(module, name))
    return shared


def _derived(
    base: type[nn.Module], methods: tuple[str, ...], compile_options: CompileOptions
) -> type[nn.Module]:
    """Return a decorated subclass of the same name, which alike instances share."""
    try:
        hash(compile_options)
        key: Hashable = base, methods, compile_options
    except TypeError:  # a dict in them; those of a copy are the same object
        key = base, methods, id(compile_options)
    if (known := _DERIVED.get(key)) is not None:
        return known
    members: dict[str, Any] = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    if issubclass(base, torch.fx.GraphModule):
        # Otherwise recompile() would give the class a __call__ that calls itself.
        members["recompile"] = _recompile
        members["_wrapped_call"] = base._wrapped_call  # type: ignore[attr-defined]
    derived: Any = type(base.__name__, (base,), members)
    decorated = _decorate_class(derived, methods, compile_options)
    decorated.__reduce_ex__ = _reduce_instance  # type: ignore[assignment]
    # A thread that was faster may have made it.
    return _DERIVED.setdefault(key, decorated)


def _recompile(self: torch.fx.GraphModule) -> Any:
    """Generate the forward of an edited graph again, and decorate it."""
    decoration: Decoration = type(self).__tvmify__  # type: ignore[attr-defined]
    code = torch.fx.GraphModule.recompile(self)
    for name in [name for name in vars(self) if name.startswith(DISPATCHER)]:
        del vars(self)[name]
    _decorate_class(type(self), tuple(decoration.methods), decoration.options)
    return code


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    # The attribute that Module.compile() sets refers to this module; nn.Module drops it, too.
    ours = (DISPATCHER, "_compiled_call_impl")
    return {k: v for k, v in module.__dict__.items() if not k.startswith(ours)}


def _reduce_instance(self: nn.Module, protocol: object) -> tuple[Any, ...]:
    # Pickle cannot find the class of a decorated instance by name, only the class it was derived
    # from. copy.copy and copy.deepcopy use this, too.
    decoration: Decoration = type(self).__tvmify__  # type: ignore[attr-defined]
    made_of = type(self).__mro__[1], decoration.options, tuple(decoration.methods)
    return _rebuild_instance, made_of, _own_attributes(self)


def _rebuild_instance(
    cls: type[nn.Module], compile_options: CompileOptions, methods: tuple[str, ...] = ("forward",)
) -> nn.Module:
    return _decorate_instance(cls.__new__(cls), methods, compile_options)


# ------------------------------------------------------------- functions and TorchScript modules


class TvmifiedFunction(Single, Generic[P, R]):
    """A decorated function: callable like the original, with the methods that tvmify adds."""

    __wrapped__: Callable[P, R]

    def __init__(self, function: Callable[P, R], compile_options: CompileOptions) -> None:
        name = getattr(function, "__qualname__", None) or getattr(function, "name", "function")
        functools.update_wrapper(self, function)
        check_names(compile_options.dynamic_shapes, [function])
        subject = Subject(Name(name), function, lambda _: function, compile_options)
        self._tvmify_dispatcher = Dispatcher(subject)
        self._function = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run one call."""
        if is_compiling() and is_traced_here():
            return self._function(*args, **kwargs)
        return self._tvmify_dispatcher(args, kwargs)

    def __set_name__(self, owner: type, name: str) -> None:
        # A function that was defined elsewhere may be an attribute of a class, but gets no self.
        if getattr(self._function, "__qualname__", "") == f"{owner.__qualname__}.{name}":
            raise TypeError(
                f"a method cannot be decorated separately: decorate the class {owner.__qualname__} "
                f"with @tvmify(methods=[{name!r}])"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return TvmifiedFunction, (self._function, self._tvmify_dispatcher.subject.options)


class _ScriptedModule(Single, nn.Module):
    """A TorchScript module that runs compiled; parameters keep their names."""

    def __init__(self, script: torch.jit.ScriptModule, compile_options: CompileOptions) -> None:
        super().__init__()
        script = original(script)
        check_names(compile_options.dynamic_shapes, [script])
        # Its children are the submodules, not the module itself, so that names stay the same.
        self.__dict__[f"{DISPATCHER}script"] = script
        self._register_again()
        self.training = trains(script)
        self._tvmify_dispatcher = Dispatcher(
            Subject(
                Name(script.original_name, "forward"),
                eager=lambda module, *args, **kwargs: module._tvmify_script(*args, **kwargs),
                capturable=lambda module: module._tvmify_script,
                options=compile_options,
                module=self,
                defined=script,
            )
        )

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
            copy.deepcopy(self._tvmify_script, memo), self._tvmify_dispatcher.subject.options
        )
