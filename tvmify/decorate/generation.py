"""Compiles what ``generate`` of transformers calls besides the module: encoders of text, sound and
images, and an inner model that generates, as in the wrappers of PEFT.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.compiler import is_compiling

from tvmify.decorate.caches import GrowingCache
from tvmify.dispatch.dispatcher import Dispatcher
from tvmify.dispatch.parts import MakePart
from tvmify.dispatch.subject import Subject
from tvmify.dispatch.submodules import is_view
from tvmify.runtime import is_traced_here

#: The module of transformers that defines `generate`. It is not imported before the user's is.
_GENERATION = "transformers.generation.utils"


def compile_around_generate(
    cls: Any,
    dispatcher_of: Callable[[nn.Module], Dispatcher],
    with_cache: Callable[[Subject], Subject],
) -> None:
    """Replace ``generate`` of a class, so that what it calls runs compiled.

    That is the case for ``generate`` of transformers, and for a method that calls that of an inner
    model.

    Parameters
    ----------
    cls
        The class, whose forward is decorated.
    dispatcher_of
        Returns the dispatcher of an instance.
    with_cache
        Returns the subject for calls of an inner model with a cache.
    """
    generate = inspect.getattr_static(cls, "generate", None)
    if not inspect.isfunction(generate):
        return

    @functools.wraps(generate)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_traced = is_compiling() and is_traced_here()
        if is_view(self) or is_traced or not any(map(_generates, self.modules())):
            return generate(self, *args, **kwargs)
        dispatcher: Any = dispatcher_of(self)

        def call(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return dispatcher.module().forward(*args, **kwargs)  # which a subclass may override

        def make_call(
            child: nn.Module, subject: Subject, make_part: MakePart
        ) -> Callable[..., Any] | None:
            if not _generates(child):
                return None
            return _steps(make_part(subject), make_part(with_cache(subject)), subject)

        return generate(dispatcher.view(call, make_call), *args, **kwargs)

    method.__tvmify_eager__ = generate  # type: ignore[attr-defined]
    cls.generate = method


def _generates(module: nn.Module) -> bool:
    generation = sys.modules.get(_GENERATION)
    return generation is not None and isinstance(module, generation.GenerationMixin)


def _steps(plain: Any, with_cache: Any, subject: Subject) -> Callable[..., Any]:
    """Return what runs the calls of an inner model, with a cache or without."""

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module: Any = subject.module()
        if kwargs and (growing := GrowingCache.among(module, args, kwargs)) is not None:
            return growing.call(with_cache, args, kwargs)
        return plain(args, kwargs)

    return run
