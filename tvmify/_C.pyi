"""The path of every call, in C++ (tvmify/native/python)."""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from tvmify.artifact.results import Result
from tvmify.artifact.writes import Writable, Write

def flatten(
    args: tuple[Any, ...], kwargs: dict[str, Any], /
) -> tuple[tuple[Any, ...], bytes | None]:
    """Return the leaves of a call, and bytes that differ for calls which need different programs.

    The leaves are in the order of ``torch.utils._pytree.tree_flatten((args, kwargs))``. The key is
    None where an argument, or a mode of this thread, is not of a kind that it can describe; then
    the leaves hold containers other than tuple, list and dict whole.
    """

def with_method_renamed(
    module: torch.jit.ScriptModule, old_name: str, new_name: str, /
) -> torch._C.ScriptModule:
    """Return a copy of a module, of a type of its own in which a method has another name.

    A method that had the new name is dropped. The tensors of the copy share the memory of the
    module's, and require no gradients.
    """

def jit_graphs(make_calls: Callable[[torch._C.Graph], Callable[..., Any]] | None, /) -> None:
    """Let graphs of TorchScript's executor run by what ``make_calls(graph)`` returns.

    It is called with the module of a method or None, the module's address, bytes that differ if the
    module does, and the other arguments. None: the JIT runs all graphs again.
    """

def take_failure() -> str:
    """Return the message of the error that compiled code raised in this thread's latest call.

    It is empty if it raised none, or if the message was taken already.
    """

def module_of_graph(
    module: torch._C.ScriptModule, graph: torch._C.Graph, /
) -> torch._C.ScriptModule:
    """Return a copy of a module, of a type of its own, whose forward is the graph.

    The tensors of the copy share the memory of the module's, and require no gradients.
    """

@final
class Guard:
    """Notices changes of a module since the guard was made."""

    def __new__(
        cls,
        slots: list[tuple[dict[Any, Any], Any, Any]],
        sizes: list[tuple[dict[Any, Any], int]],
        tensors: list[torch.Tensor],
        written: list[torch.Tensor] = ...,
        types: list[tuple[Any, type]] = ...,
        classes: list[type] = ...,
        collections: list[tuple[Any, tuple[Any, ...]]] = ...,
    ) -> Guard:
        """Watch these.

        Parameters
        ----------
        slots
            Dicts, each with a key and the value that it has.
        sizes
            Dicts whose keys stay the same, and their order if all of them are in ``slots``.
        tensors
            Tensors whose elements stay the same, too.
        written
            Tensors whose elements may change.
        types
            Objects or weak references, each with the class of the object.
        classes
            Classes whose methods stay the same.
        collections
            Lists and sets, each with its items.
        """
    def changed(self) -> int:
        """Return 0 if nothing changed, 1 if a tensor was written to, 2 if anything else changed.

        1 covers a tensor's version, memory, strides and ``requires_grad``; 2 its shape, dtype or
        device, the size of a dict, and a slot whose value was replaced or deleted.
        """

@final
class Call:
    """Runs a compiled program on the leaves of a call."""

    def __new__(
        cls,
        compiled: Any,
        inputs: tuple[int, ...],
        results: Sequence[Result],
        rebuild: Callable[[list[Any]], Any] | None,
        writes: Sequence[Write] = ...,
        needs_contiguous: bool | Sequence[Writable] = ...,
        shapes: str | None = ...,
    ) -> Call:
        """Take what `tvmify.artifact.Artifact` has; ``shapes`` as text, for views that vary.

        If ``needs_contiguous`` is true, all arguments have to be contiguous.
        """
    def __call__(self, leaves: tuple[Any, ...], /) -> Any:
        """Return the result, or ``NotImplemented`` if the call is for eager: nothing was done."""
    def bind(self, state: list[torch.Tensor], weights: list[torch.Tensor], /) -> None:
        """Take the tensors of ``Artifact.state``, and the weights that calls read packed."""
    def obstacle(self, leaves: tuple[Any, ...], /) -> str | None:
        """Return why a call with these leaves is for eager PyTorch, or None."""

@final
class LatestCall:
    """Runs calls that have the signature of the latest one."""

    hits: int
    """How many calls it has run."""
    generation: int
    """How many times it has forgotten."""

    def __new__(cls) -> LatestCall: ...
    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> Any:
        """Return the result; ``NotImplemented`` for another signature, or a call for eager.

        The signature is the same if `flatten` returns the same key and the guard sees no change.
        """
    def keep(
        self,
        generation: int,
        guard: Guard,
        key: object,
        run: Callable[..., Any],
        names: tuple[str, ...],
        free: int,
        /,
    ) -> None:
        """Remember a call, unless `forget` was called after that generation.

        ``run`` takes the leaves, as a `Call` does. A key that is not bytes matches no call.
        ``names`` are those of the keyword arguments, in the order of the leaves; a call may pass
        the first ``free`` of them in any order.
        """
    def forget(self) -> None:
        """Forget the call."""

@final
class Lent:
    """Tensors whose memory callers borrow, and which is reused once no borrowed tensor is left."""

    def __new__(cls, tensors: list[torch.Tensor], /) -> Lent:
        """Lend these tensors, to which only the caller has references, as many as it keeps."""
    def is_free(self) -> bool:
        """Whether all borrowed tensors and their views are gone, and none was resized."""
    def lend(self) -> list[torch.Tensor]:
        """Return other tensors in the same memory."""

@final
class ShapeGuard:
    """Decides which shapes a program serves.

    Parameters
    ----------
    text
        The JSON of `tvmify.artifact.shapes.Shapes`; a ValueError if it is something else.
    """

    def __new__(cls, text: str) -> ShapeGuard: ...
    def serves(self, leaves: tuple[Any, ...], /) -> bool:
        """Whether the program serves a call with these leaves."""
    def solve(self, leaves: tuple[Any, ...], /) -> tuple[int, ...] | None:
        """Return the values of the symbols in order, or None if the program does not serve it."""

@final
class Shortcut(property):
    """The ``_compiled_call_impl`` of a class of modules: passes a call to its `LatestCall`.

    It does so only if nothing comes before: no hook, no overridden forward, no tracer. All other
    calls go through `torch.nn.Module` as usual. What ``Module.compile()`` sets has precedence.

    Parameters
    ----------
    fget
        What torch.compile reads instead of native code; it returns None.
    place
        The attribute in which modules keep their dispatcher.
    forward
        The class's ``forward``; a subclass may have another.
    """

    def __init__(
        self, fget: Callable[[Any], None], place: str, forward: Callable[..., Any]
    ) -> None: ...
