"""Modules that nothing can capture: forward runs in Python, and the modules that it calls compile.

The forward runs on a view of its module: an object of a class derived from the module's, with the
very dictionary of the module, so that whatever forward sets is set on the module. Only the children
that it finds there are views as well, and each of these is called through a dispatcher of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tvmify.cache import Neighbours
from tvmify.dispatch.counts import CacheInfo
from tvmify.dispatch.explained import ExplainedSubject
from tvmify.dispatch.parts import MakePart, PartCalls
from tvmify.dispatch.subject import Subject
from tvmify.errors import CaptureError, NotCompiled

#: They are iterated over, or indexed, rather than called.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class Children:
    """Runs a module in Python, and what it calls through dispatchers.

    Parameters
    ----------
    subject
        The module.
    reason
        Why the module could not be captured.
    make_part
        Makes what runs the calls of a child.

    Attributes
    ----------
    reason
        As given.

    Raises
    ------
    CaptureError
        There is no child that could be compiled.
    """

    how = "its forward runs in Python, the modules that it calls are compiled each for itself"
    has_effects = is_random = True  # for all that is known

    def __init__(self, subject: Subject, reason: NotCompiled, make_part: MakePart) -> None:
        self.reason = reason
        self._parent = subject
        self._make_part = make_part
        self._parts: list[PartCalls] = []
        module = subject.module()
        if isinstance(module, nn.Module) and not isinstance(module, torch.jit.ScriptModule):
            self._view = _view(module, self._children(module, ""), subject.eager)
        if not self._parts:
            raise CaptureError(
                "it has no submodules that could be compiled", "Decorate what it calls."
            )

    def __call__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], eager: Callable[[], Any]
    ) -> Any:
        """Run one call."""
        return self._parent.eager(self._view, *args, **kwargs)

    def check(self, *_: Any) -> None:
        """Accept every call: forward itself runs as in eager."""

    def bind(self, module: Any) -> Mapping[str, torch.Tensor]:
        """Return no tensors: the dispatchers of the children bind their weights themselves."""
        return {}

    def cache_infos(self) -> list[CacheInfo]:
        """Return what the caches of each child have done."""
        return [part.cache_info() for part in self._parts]

    def explain(self, neighbours: Neighbours) -> list[ExplainedSubject]:
        """Return where each child runs, of those that were called."""
        explained = [part.explain(neighbours) for part in self._parts]
        return [child for child in explained if child.info.hits or child.info.misses]

    def _children(self, module: nn.Module, path: str) -> dict[str, nn.Module | None]:
        return {
            name: None if child is None else self._child(child, f"{path}{name}")
            for name, child in module._modules.items()
        }

    def _child(self, child: nn.Module, path: str) -> nn.Module:
        decorated = getattr(type(child), "__tvmify__", None) is not None
        if decorated or isinstance(child, torch.jit.ScriptModule):
            return child
        within = {}
        if isinstance(child, _CONTAINERS):
            within = self._children(child, f"{path}.")
        has_forward = type(child).forward is not nn.Module.forward
        if not has_forward or next(child.parameters(), None) is None:
            return _view(child, within, type(child).forward) if within else child
        parent = self._parent
        part = self._make_part(
            Subject.of(
                f"{parent.name}.{path}",
                eager=type(child).forward,
                capturable=lambda _: _without_hooks(parent.captured().get_submodule(path)),
                options=parent.options,
                module=child,
                is_part=True,
            )
        )
        self._parts.append(part)
        return _view(child, within, lambda _, *args, **kwargs: part(args, kwargs))


def _view(
    module: nn.Module, children: dict[str, nn.Module | None], call: Callable[..., Any]
) -> nn.Module:
    """Return a view of a module.

    Parameters
    ----------
    children
        What it finds in place of its own; those without an entry are the module's.
    call
        Its forward.
    """
    base: Any = type(module)
    own = module.__dict__

    # A class may make more of its instances, such as a slice of a list: those are no views.
    def modules(self: Any) -> Any:
        found = self.__dict__["_modules"]
        return found | children if self.__dict__ is own else found

    def set_modules(self: Any, value: Any) -> None:
        self.__dict__["_modules"] = value

    def attribute(self: Any, name: str) -> Any:
        if self.__dict__ is own and name in children:
            return children[name]
        return base.__getattr__(self, name)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (call if self.__dict__ is own else base.forward)(self, *args, **kwargs)

    members = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__getattr__": attribute,
        "_modules": property(modules, set_modules),
        "forward": forward,
    }
    view = object.__new__(type(base)(base.__name__, (base,), members))
    object.__setattr__(view, "__dict__", own)
    return view


def _without_hooks(module: nn.Module) -> nn.Module:
    module._forward_hooks.clear()  # they run around the call
    module._forward_pre_hooks.clear()
    return module
