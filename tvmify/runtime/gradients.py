"""Results of compiled code that still know where their gradients come from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree


def attach(
    result: Any,
    eager: Callable[[], Any],
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
) -> Any:
    """Make a compiled result differentiable by the weights.

    Grad mode is on by default, so a module in ``eval()`` is often called with it although nobody
    wants a gradient. The compiled result is therefore given to autograd with a backward that runs
    the module again in eager, only when someone does call ``backward()``.

    Parameters
    ----------
    result
        What compiled code returned; a pytree.
    eager
        Computes the same result in eager PyTorch.
    inputs
        The tensors of the call, none of which requires a gradient: autograd's check that nobody
        changed them before the backward covers them.
    weights
        The tensors that a gradient may flow to.

    Returns
    -------
    Any
        The same pytree, its floating-point tensors requiring a gradient and sharing the memory of
        ``result``.
    """
    leaves, structure = pytree.tree_flatten(result)
    places = [i for i, leaf in enumerate(leaves) if _is_differentiable(leaf)]
    if not places:
        return result
    wanted = [weight for weight in weights if weight.requires_grad]
    outputs = _Recompute.apply(
        _Recipe(eager, places, [leaves[i] for i in places], len(wanted)), *wanted, *inputs
    )
    for place, output in zip(places, outputs, strict=True):
        leaves[place] = output
    return pytree.tree_unflatten(leaves, structure)


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
        ctx.set_materialize_grads(False)  # else weights of outputs that nobody uses get zeros
        ctx.save_for_backward(*tensors)
        outputs, recipe.outputs = recipe.outputs, []  # else each output would keep itself alive
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # Unpacking also checks that no saved tensor was written to since the forward.
        weights = ctx.saved_tensors[: ctx.recipe.weight_count]
        inputs = ctx.saved_tensors[ctx.recipe.weight_count :]
        create_graph = torch.is_grad_enabled()
        with contextlib.ExitStack() as surroundings:
            surroundings.enter_context(torch.enable_grad())
            for device, setting in ctx.recipe.autocast.items():
                surroundings.enter_context(torch.autocast(device, *setting))
            leaves = pytree.tree_leaves(ctx.recipe.eager())
        outputs = [leaves[place] for place in ctx.recipe.places]
        pairs = zip(outputs, gradients, strict=True)
        reached = [(o, g) for o, g in pairs if o.requires_grad and g is not None]
        if not reached:
            return None, *(None for _ in ctx.saved_tensors)
        found = torch.autograd.grad(
            [output for output, _ in reached],
            weights,
            [gradient for _, gradient in reached],
            allow_unused=True,
            create_graph=create_graph,
        )
        return None, *found, *(None for _ in inputs)


def _is_differentiable(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())
