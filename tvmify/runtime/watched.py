"""The state of a module, and why it cannot run compiled."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from tvmify.errors import NotCompiled, Uninitialized
from tvmify.runtime.native import Guard

#: Stands for the name of a module whose hook is a global one.
EVERY_MODULE = "*"


@dataclass(frozen=True)
class Watched:
    """The state of a module when its guard was created.

    Attributes
    ----------
    guard
        Native; its ``changed()`` is 0 while nothing in the module has changed.
    state
        Everything watched except the values of tensors; equal states mean that compiled programs
        are still valid.
    names
        For each item of ``state`` the dotted name of the attribute, for messages.
    training
        Dotted name of the first module in training mode ("" is the module itself), or None.
    hooked
        Dotted name of the first submodule with a forward hook ("" is the module itself, "*" stands
        for all modules), or None.
    requires_grad
        Whether any parameter requires a gradient.
    identities
        The identity of each value, which the guard keeps alive, by the dotted name of the
        attribute.
    lazy
        Dotted name of the first parameter or buffer that has no shape yet, or None.
    slotted
        Dotted name of the first attribute in ``__slots__``, where no change is noticed, or None.
    """

    guard: Guard
    state: tuple[Hashable, ...]
    names: tuple[str, ...]
    training: str | None
    hooked: str | None
    requires_grad: bool
    identities: Mapping[str, int]
    lazy: str | None = None
    slotted: str | None = None

    def changes_since(self, earlier: Watched) -> list[str]:
        """Return the names of the attributes that were set since, perhaps to equal values."""
        before = dict(zip(earlier.names, earlier.state, strict=True))
        now = dict(zip(self.names, self.state, strict=True))
        absent, were, are = object(), earlier.identities, self.identities
        return [
            name
            for name in before | now
            if before.get(name, absent) != now.get(name, absent) or were.get(name) != are.get(name)
        ]

    def modes(self) -> dict[str, bool]:
        """Return, for every module of the tree by its path, whether it was in training mode."""
        found = {}
        for name, value in zip(self.names, self.state, strict=True):
            path, _, last = name.rpartition(".")
            if last == "training" and isinstance(value, tuple) and value[0] is bool:
                found[path] = value[1]
        return found

    def check_shapes(self) -> None:
        """Refuse a module with lazy parameters, which only a first call in eager initializes.

        Raises
        ------
        Uninitialized
            A lazy parameter or buffer has no shape yet.
        """
        if self.lazy is not None:
            raise Uninitialized(
                f"{self.lazy!r} is lazy: it gets its shape from the first call",
                "Call warmup() first, or run the module once in eager PyTorch.",
            )

    def check_slots(self) -> None:
        """Refuse modules with attributes whose changes are not noticed.

        Raises
        ------
        NotCompiled
            A module has attributes in ``__slots__``.
        """
        if self.slotted is not None:
            raise NotCompiled(
                f"{self.slotted!r} is in __slots__, where changes are not noticed",
                "Remove __slots__ from the class.",
            )

    def check_hooks(self) -> None:
        """Refuse hooks that compiled code would not run.

        Raises
        ------
        NotCompiled
            A submodule has a forward hook, or the module itself if that is watched, or there is a
            global hook.
        """
        if self.hooked is not None:
            where = f"submodule {self.hooked!r}" if self.hooked else "the module"
            if self.hooked == EVERY_MODULE:
                where = "every module"
            raise NotCompiled(
                f"{where} has a forward hook",
                "Remove the hook, or register it on a module whose forward is decorated.",
            )
