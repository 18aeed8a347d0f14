"""Gradients for results of compiled code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tvmify.artifact.geometry import Geometry
from tvmify.artifact.objects import describe_objects, restore_objects
from tvmify.artifact.results import Argument, Computed, Repeated, Result


def attach(
    result: Any,
    eager: Callable[[], Any],
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    outputs: Sequence[Result] | None,
    followed: Sequence[bool] | None = None,
) -> Any:
    """Make a compiled result differentiable with respect to the weights.

    Grad mode is on by default, so a module in ``eval()`` is often called with it although no
    gradient is needed. The compiled result therefore gets a backward that reruns the module in
    eager, only if ``backward()`` is called.

    Parameters
    ----------
    result
        The result of compiled code, a pytree.
    eager
        Computes the same result in eager PyTorch.
    inputs
        The tensors of the call, none of which requires a gradient. Saving them lets autograd check
        in the backward that they are unchanged.
    weights
        The tensors that may receive gradients; tied ones may occur several times.
    outputs
        ``Artifact.outputs``. Arguments, tensors of the module and views of these already have their
        gradients. None if every tensor not given here was computed.
    followed
        The result of `followed_leaves`; None if not known.

    Returns
    -------
    Any
        The same pytree, sharing the memory of ``result``. Its floating-point tensors require a
        gradient; with ``followed``, only those that it marks.
    """
    leaves, structure = _flatten(result)
    if outputs is None:
        given = {id(tensor) for tensor in (*inputs, *weights)}
        outputs = [
            Computed(i) if isinstance(leaf, torch.Tensor) and id(leaf) not in given else Argument(i)
            for i, leaf in enumerate(leaves)
        ]
    whole = _whole(outputs, leaves)
    if followed is not None:
        # Detached, so that autograd does not see the others as views of those with gradients.
        leaves = [x.detach() if i in whole and not followed[i] else x for i, x in enumerate(leaves)]
        whole = {i: j if followed[j] else i for i, j in whole.items() if followed[i]}
    places = [i for i in dict.fromkeys(whole.values()) if _is_differentiable(leaves[i])]
    if not places:
        return result
    # Each once, even if several names lead to it: it gets all of its gradient in one place.
    wanted = list(dict.fromkeys(weight for weight in weights if weight.requires_grad))
    # Detached, so that autograd does not see one result as a view of another.
    kept = [leaves[i].detach() if leaves[i]._is_view() else leaves[i] for i in places]
    attached = _Recompute.apply(_Recipe(eager, places, kept, len(wanted)), *wanted, *inputs)
    found = dict(zip(places, attached, strict=True))
    views = {i: _within(leaves[i], leaves[base]) for i, base in whole.items() if base in found}
    for i, output in enumerate(outputs):
        if isinstance(output, Repeated):
            leaves[i] = leaves[output.result]
        elif i in found:
            leaves[i] = found[i]
        elif whole.get(i) in found:
            leaves[i] = views[i].of(found[whole[i]])
    return restore_objects(pytree.tree_unflatten(leaves, structure))


def followed_leaves(eager: Callable[[], Any], gpu: int | None = None) -> list[bool]:
    """Return which leaves of a result have gradients, by running eager PyTorch.

    Forward may detach some, or compute them under ``torch.no_grad()`` or without any weight.

    Parameters
    ----------
    eager
        Computes the result.
    gpu
        Index of the GPU that it uses; None for the CPU.
    """
    with torch.random.fork_rng(devices=[] if gpu is None else [gpu]):
        leaves, _ = _flatten(eager())
    return [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]


def _flatten(result: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves, including tensors inside objects, and the structure."""
    return pytree.tree_flatten(describe_objects(result, set))


def _within(part: torch.Tensor, whole: torch.Tensor) -> Geometry:
    offset = int(part.storage_offset()) - int(whole.storage_offset())
    return Geometry(tuple(part.shape), part.stride(), offset)


def _whole(outputs: Sequence[Result], leaves: Sequence[Any]) -> dict[int, int]:
    """Return, for each computed leaf, the leaf that covers all of its memory."""
    computed: dict[int, list[int]] = {}
    for i, output in enumerate(outputs):
        if output.computed is not None:
            computed.setdefault(output.computed, []).append(i)
    whole: dict[int, int] = {}
    for group in computed.values():
        # A view comes second, unless it is the whole tensor with its axes permuted.
        first = max(group, key=lambda i: (isinstance(outputs[i], Computed), leaves[i].numel(), -i))
        whole |= dict.fromkeys(group, first)
    return whole


class _Recipe:
    """What the backward needs besides tensors; an object, so that autograd passes it through."""

    def __init__(
        self,
        eager: Callable[[], Any],
        places: list[int],
        outputs: list[torch.Tensor],
        weight_count: int,
    ) -> None:
        self.eager = eager
        self.places = places
        self.outputs: list[torch.Tensor] = outputs
        self.autocast = {
            device: (torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
            for device in ("cpu", "cuda")
        }
        self.weight_count = weight_count


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recipe: _Recipe, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.recipe = recipe
        ctx.set_materialize_grads(False)  # otherwise weights behind unused outputs get zeros
        ctx.save_for_backward(*tensors)
        outputs, recipe.outputs = recipe.outputs, []  # else each output would keep itself alive
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # Unpacking also checks that no saved tensor was modified since the forward. Once only, as
        # checkpoints demand.
        saved = ctx.saved_tensors
        weights, inputs = saved[: ctx.recipe.weight_count], saved[ctx.recipe.weight_count :]
        create_graph = torch.is_grad_enabled()
        with contextlib.ExitStack() as surroundings:
            surroundings.enter_context(torch.enable_grad())
            for device, setting in ctx.recipe.autocast.items():
                surroundings.enter_context(torch.autocast(device, *setting))
            leaves, _ = _flatten(ctx.recipe.eager())
        outputs = [leaves[place] for place in ctx.recipe.places]
        pairs = zip(outputs, gradients, strict=True)
        reached = [(o, g) for o, g in pairs if o.requires_grad and g is not None]
        if not reached:
            return None, *(None for _ in saved)
        with _without_hooks(weights):
            found = torch.autograd.grad(
                [output for output, _ in reached],
                weights,
                [gradient for _, gradient in reached],
                allow_unused=True,
                create_graph=create_graph,
            )
        return None, *found, *(None for _ in inputs)


@contextlib.contextmanager
def _without_hooks(weights: Sequence[torch.Tensor]) -> Iterator[None]:
    """Take the hooks of weights away; autograd runs them on the gradients that a backward returns.

    A thread that needs other gradients of these weights at that moment misses their hooks.
    """
    hooks = [(weight, weight._backward_hooks) for weight in weights if weight._backward_hooks]
    for weight, _ in hooks:
        weight._backward_hooks = None
    try:
        yield
    finally:
        for weight, own in hooks:
            weight._backward_hooks = own


def _is_differentiable(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())
