"""Gives TorchScript's results the types of eager PyTorch, and checks them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from tvmify.artifact.objects import describe_size, is_size
from tvmify.capture.autocast import separate_autocast
from tvmify.capture.exporting import NoRealWrites, examples, quiet
from tvmify.capture.side_effects import undoing_changes
from tvmify.capture.twin import twin
from tvmify.errors import CaptureError
from tvmify.signature import map_only, repeat, repetitions
from tvmify.torch_compat.symbols import SYMBOLS, hint_of
from tvmify.torch_compat.tracing import forget_tensors, tracing


class EagerResult:
    """The result of eager PyTorch for the example arguments, without elements.

    TorchScript has fewer types than Python: it returns a list for a ``torch.Size`` and another
    class for a NamedTuple.

    Parameters
    ----------
    result
        Holds fake tensors and Python values.
    """

    def __init__(self, result: Any) -> None:
        self._leaves = pytree.tree_leaves(result)
        self._items, self._structure = pytree.tree_flatten(result, is_leaf=is_size)

    def restore(self, result: Any) -> Any:
        """Return TorchScript's result with the types of eager's, after comparing shapes and dtypes.
        Each ``torch.Size`` is replaced by a `Described`.

        Raises
        ------
        CaptureError
            TorchScript's result differs from eager's.
        """
        leaves = pytree.tree_leaves(result)
        if len(leaves) != len(self._leaves):
            raise _different(f"{len(leaves)} values", f"{len(self._leaves)}")
        restored = iter([_restored(*pair) for pair in zip(leaves, self._leaves, strict=True)])
        items = []
        for item in self._items:
            if isinstance(item, torch.Size):
                items.append(describe_size(itertools.islice(restored, len(item))))
            else:
                items.append(next(restored))
        return pytree.tree_unflatten(items, self._structure)


def _restored(ours: Any, eager: Any) -> Any:
    if isinstance(ours, torch.Tensor) and isinstance(eager, torch.Tensor):
        shape = [hint_of(size) for size in ours.shape]
        if ours.dtype != eager.dtype or shape != list(eager.shape):
            raise _different(f"{ours.dtype} {shape}", f"{eager.dtype} {list(eager.shape)}")
        return ours
    if isinstance(ours, SYMBOLS):
        return ours  # eager's result is for one shape only
    if isinstance(ours, torch.Tensor) or isinstance(eager, torch.Tensor):
        raise _different(type(ours).__name__, type(eager).__name__)
    return eager


def _different(ours: str, eager: str) -> CaptureError:
    return CaptureError(
        f"TorchScript returns {ours} where eager PyTorch returns {eager}",
        "Look for torch.jit.is_scripting() and for annotations that do not match the arguments.",
    )


def eager_result(
    callable_: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> EagerResult | None:
    """Run the module on fake tensors; return None if that fails."""
    inputs, repeated = examples((args, kwargs)), repetitions((args, kwargs))
    with (
        tracing(),
        quiet(),
        separate_autocast(),
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
    ):
        try:
            called = callable_
            if isinstance(callable_, torch.nn.Module):
                called = twin(callable_)  # a forward may set attributes
                _make_fake(called, mode)
            fake = repeat(map_only(torch.Tensor, mode.from_tensor, inputs), repeated)
            with undoing_changes(callable_, called), NoRealWrites():
                result = called(*fake[0], **fake[1])
        except Exception:
            # such as reading a number from a constant, or a nested tensor, which has no fake form:
            # not a reason to refuse the recorded program
            return None
        finally:
            forget_tensors(mode)
    return EagerResult(result)


def _make_fake(module: torch.nn.Module, mode: FakeTensorMode) -> None:
    """Replace the tensors of a twin by fake ones, since its forward may write to them."""
    for part in module.modules():
        if not isinstance(part, torch.jit.ScriptModule):
            held: list[dict[str, Any]] = [part._parameters, part._buffers, vars(part)]  # type: ignore
            for tensors in held:
                for name, tensor in list(tensors.items()):
                    if isinstance(tensor, torch.Tensor):
                        tensors[name] = mode.from_tensor(tensor)
