"""Modules that cannot be captured: forward runs in Python, and its submodules run compiled.

The forward runs on a view of its module: an object of a derived class that shares the dictionary of
the module, so that forward sets attributes of the module. Its children are views, too, and each is
called through its own dispatcher.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from tvmify.dispatch.parts import MakePart, PartCalls
from tvmify.dispatch.subject import Subject
from tvmify.errors import CaptureError, ChangesItself, NotCompiled
from tvmify.signature import Args, Kwargs

#: Modules that are iterated over or indexed, rather than called.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
#: Returns what runs the calls of a child, given their arguments and keyword arguments; None if its
#: dispatcher does. Takes the child, its subject, and what makes dispatchers.
MakeCall: TypeAlias = Callable[[nn.Module, Subject, MakePart], "Callable[..., Any] | None"]
#: What the class of a view has.
_IS_VIEW = "__tvmify_view__"


class Submodules:
    """The submodules of a module, each called through a dispatcher.

    Parameters
    ----------
    subject
        The module.
    call
        What calls of the view run; takes the view first.
    make_part
        Makes the dispatcher of a child.
    is_settled
        Whether the first calls of the module are over, in which it may set attributes.
    make_call
        Tells how calls of a child run, if not by one dispatcher.

    Attributes
    ----------
    parts
        The dispatchers of submodules.
    view
        The module, with its submodules in the place of its children.

    Raises
    ------
    CaptureError
        It has no child that can be compiled.
    """

    def __init__(
        self,
        subject: Subject,
        call: Callable[..., Any],
        make_part: MakePart,
        *,
        is_settled: bool = False,
        make_call: MakeCall = lambda *_: None,
    ) -> None:
        self._parent = subject
        self._make_part = make_part
        self._is_settled = is_settled
        self._make_call = make_call
        self.parts: list[PartCalls] = []
        module = subject.module()
        if isinstance(module, nn.Module) and not isinstance(module, torch.jit.ScriptModule):
            children = self._children(module, "")
            self.view = _view(module, lambda: children, call)
        if not self.parts:
            raise CaptureError(
                "it has no submodules that can be compiled", "Decorate what it calls."
            )

    def _children(self, module: nn.Module, path: str) -> dict[str, nn.Module | None]:
        return {
            name: None if child is None else self._child(child, f"{path}{name}")
            for name, child in module._modules.items()
        }

    def _child(self, child: nn.Module, path: str) -> nn.Module:
        decorated = getattr(type(child), "__tvmify__", None) is not None
        if decorated or isinstance(child, torch.jit.ScriptModule):
            return child
        # forward may call other methods of the child, which call these
        within = functools.cache(lambda: self._children(child, f"{path}."))
        has_forward = type(child).forward is not nn.Module.forward
        if not has_forward or next(child.parameters(), None) is None:
            is_container = isinstance(child, _CONTAINERS) and within()
            return _view(child, within, type(child).forward) if is_container else child
        parent = self._parent
        subject = Subject(
            parent.named.submodule(path),
            eager=type(child).forward,
            capturable=lambda _: _without_hooks(parent.captured().get_submodule(path)),
            options=parent.options,
            module=child,
            is_part=True,
            is_settled=self._is_settled,
        )
        run = self._make_call(child, subject, self._part) or self._part(subject)
        return _view(child, within, lambda _, *args, **kwargs: run(args, kwargs))

    def _part(self, subject: Subject) -> PartCalls:
        part = self._make_part(subject)
        self.parts.append(part)
        return part


class Children(Submodules):
    """Runs a module in Python, and its submodules through dispatchers.

    Parameters
    ----------
    subject
        The module.
    reason
        Why the module could not be captured.
    make_part
        Makes the dispatcher of a child.

    Attributes
    ----------
    reason
        As given.

    Raises
    ------
    CaptureError
        It has no child that can be compiled.
    """

    how = "its forward runs in Python, and the modules that it calls are compiled separately"
    has_effects = is_random = True  # as far as is known
    runs_in_python = True

    def __init__(self, subject: Subject, reason: NotCompiled, make_part: MakePart) -> None:
        self.reason = reason
        is_settled = isinstance(reason, ChangesItself)
        super().__init__(subject, subject.eager, make_part, is_settled=is_settled)

    def __call__(self, args: Args, kwargs: Kwargs, eager: Callable[[], Any]) -> Any:
        """Run one call."""
        return self._parent.eager(self.view, *args, **kwargs)

    def check(self, *_: Any) -> None:
        """Accept every call: forward runs as in eager."""

    def bind(self, module: Any) -> Mapping[str, torch.Tensor]:
        """Return no tensors: the dispatchers of the children bind their weights themselves."""
        return {}


def is_view(module: nn.Module) -> bool:
    """Whether a module is a view of another, whose children are called through dispatchers."""
    return getattr(type(module), _IS_VIEW, False)


def _view(
    module: nn.Module,
    children: Callable[[], dict[str, nn.Module | None]],
    call: Callable[..., Any],
) -> nn.Module:
    """Return a view of a module.

    Parameters
    ----------
    children
        Returns replacements for children of the module, by name.
    call
        Its forward.
    """
    base: Any = type(module)
    own = module.__dict__

    # A method may make further instances of the class, such as a slice; those are not views.
    def modules(self: Any) -> Any:
        found = self.__dict__["_modules"]
        return found | children() if self.__dict__ is own else found

    def set_modules(self: Any, value: Any) -> None:
        self.__dict__["_modules"] = value

    def attribute(self: Any, name: str) -> Any:
        if self.__dict__ is own and name in own["_modules"] and name in (views := children()):
            return views[name]
        return base.__getattr__(self, name)

    @functools.wraps(base.forward, updated=())  # callers may look for the names of its arguments
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (call if self.__dict__ is own else base.forward)(self, *args, **kwargs)

    members = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__getattr__": attribute,
        "_modules": property(modules, set_modules),
        "forward": forward,
        _IS_VIEW: True,
    }
    view = object.__new__(type(base)(base.__name__, (base,), members))
    object.__setattr__(view, "__dict__", own)
    return view


def _without_hooks(module: nn.Module) -> nn.Module:
    module._forward_hooks.clear()  # hooks run around the call
    module._forward_pre_hooks.clear()
    return module
