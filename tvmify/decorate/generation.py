"""Compiles what ``generate`` of transformers calls besides the module: encoders of text, sound and
images.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.compiler import is_compiling

from tvmify.dispatch.dispatcher import Dispatcher
from tvmify.dispatch.submodules import is_view
from tvmify.runtime import is_traced_here

#: The module of transformers that defines `generate`. It is not imported before the user's is.
_GENERATION = "transformers.generation.utils"


def compile_around_generate(cls: Any, dispatcher_of: Callable[[nn.Module], Dispatcher]) -> None:
    """Replace ``generate``, if a class has that of transformers, so that encoders run compiled.

    Parameters
    ----------
    cls
        The class, whose forward is decorated.
    dispatcher_of
        Returns the dispatcher of an instance.
    """
    generation = sys.modules.get(_GENERATION)
    if generation is None or not issubclass(cls, generation.GenerationMixin):
        return
    generate = cls.generate

    def generates(part: nn.Module) -> bool:  # its steps have a cache, which parts cannot take
        return isinstance(part, generation.GenerationMixin)

    @functools.wraps(generate)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_view(self) or (is_compiling() and is_traced_here()):
            return generate(self, *args, **kwargs)
        dispatcher: Any = dispatcher_of(self)

        def call(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return dispatcher.module().forward(*args, **kwargs)  # which a subclass may override

        return generate(dispatcher.view(call, generates), *args, **kwargs)

    cls.generate = method
