"""Room for the next tokens in a `DynamicCache`, so that a step copies no other rows.

Eager PyTorch joins the keys and values of all tokens with those of one, at each step. Here a step
runs as one with a `StaticCache`, which programs write in place, and whose tensors have room for
more tokens than there are. What the caller's cache holds are views of the rows that are filled.

Nobody may notice that rows are shared by the tensors before and after a step. So these are written
in place only if the caller's cache alone holds what the step before left in it. Whatever else was
done to it (another order of beams, fewer tokens, a copy), and any other reference to its tensors,
gives new memory to the next step.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

#: Where transformers has its caches. It is not imported before the caller has one.
CACHES = "transformers.cache_utils"
#: Caches are copied to larger rooms when they are full: for so many tokens more, or by this part.
_LEAST_SPARE, _SPARE_PART = 64, 8
#: References to a tensor of the caller's that nobody else has: of its layer, of `_Left`, and of
#: the argument of `sys.getrefcount`.
_REFERENCES = 3
#: References to its memory: of the tensor, of the room, and of the argument.
_MEMORY_REFERENCES = 3


class _Left(NamedTuple):
    """What a call has left in a `DynamicCache`.

    Attributes
    ----------
    states
        Keys and values of each layer, the caller's objects.
    rooms
        A cache of static layers, of which these are views; None if they have memory of their own.
    """

    states: list[tuple[torch.Tensor, torch.Tensor]]
    rooms: Any


_LEFT: weakref.WeakKeyDictionary[Any, _Left] = weakref.WeakKeyDictionary()
#: Modules whose steps fail with static layers, though their classes say that they support these.
_UNFIT: weakref.WeakSet[Any] = weakref.WeakSet()


@dataclass(frozen=True)
class Step:
    """A call for one more token, run with a cache that has room for it.

    Attributes
    ----------
    cache
        What the program gets in place of the caller's cache.
    """

    cache: Any
    _module: Any
    _grown: Any
    _rooms: Any

    @classmethod
    def of(
        cls, module: Any, cache: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Step | None:
        """Return how to run a call with room; None if it is no step, or must run as it is.

        Parameters
        ----------
        module, args, kwargs
            Of the call.
        cache
            The one among its arguments.
        """
        grown = _dynamic(cache)
        left = None if grown is None else _LEFT.get(grown)
        if left is None or not _is_as_left(grown, left):
            return None
        tokens = _tokens(args, kwargs, has_encoder=grown is not cache)
        if not _is_plain_step(module, tokens, kwargs):
            return None
        rooms = left.rooms if _may_write(grown, left) else _rooms_for(grown)
        for layer, (keys, _) in zip(rooms.layers, left.states, strict=True):
            layer.cumulative_length = torch.tensor(keys.shape[2])
        if cache is grown:
            return cls(rooms, module, grown, rooms)
        stand_in = copy.copy(cache)
        stand_in.self_attention_cache = rooms
        return cls(stand_in, module, grown, rooms)

    def give_up(self) -> None:
        """Run later steps of the module without room."""
        _UNFIT.add(self._module)

    def finish(self) -> None:
        """Let the caller's cache hold what the program has written."""
        for layer, room in zip(self._grown.layers, self._rooms.layers, strict=True):
            length = int(room.cumulative_length)
            layer.keys, layer.values = room.keys[:, :, :length], room.values[:, :, :length]
        _remember(self._grown, self._rooms)


def remember(cache: Any) -> None:
    """Remember what a call without room has left in a cache: its next step may have some."""
    if (grown := _dynamic(cache)) is not None:
        _remember(grown, None)


def _remember(grown: Any, rooms: Any) -> None:
    _LEFT[grown] = _Left([(layer.keys, layer.values) for layer in grown.layers], rooms)


def _dynamic(cache: Any) -> Any:
    """Return the cache that grows, if all its layers hold tokens on the CPU and have no window."""
    classes = sys.modules[CACHES]
    grown = cache.self_attention_cache if type(cache) is classes.EncoderDecoderCache else cache
    plain = type(grown) is classes.DynamicCache and not grown.offloading and grown.layers
    if not plain or any(type(layer) is not classes.DynamicLayer for layer in grown.layers):
        return None
    full = all(layer.is_initialized and layer.keys.numel() for layer in grown.layers)
    return (
        grown if full and all(layer.keys.device.type == "cpu" for layer in grown.layers) else None
    )


def _tokens(args: Sequence[Any], kwargs: Mapping[str, Any], *, has_encoder: bool) -> Any:
    """Return the tokens that the call adds to the cache; None if one cannot tell."""
    prefix = "decoder_" if has_encoder else ""
    for name in (f"{prefix}input_ids", f"{prefix}inputs_embeds"):
        if kwargs.get(name) is not None:
            return kwargs[name]
    return args[0] if args and not has_encoder else None


def _is_plain_step(module: Any, tokens: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether static layers give the same result: for one token, of a model that supports them."""
    # Autograd may need what a later step would write over.
    if torch.is_grad_enabled() or module in _UNFIT:
        return False
    if not getattr(module, "_can_compile_fullgraph", False):
        return False
    if not isinstance(tokens, torch.Tensor) or tokens.dim() < 2 or tokens.shape[1] != 1:
        return False
    # Both would have as many columns as there is room for.
    masks = [kwargs.get(name) for name in ("attention_mask", "decoder_attention_mask")]
    if not all(mask is None or (torch.is_tensor(mask) and mask.dim() == 2) for mask in masks):
        return False
    configured = getattr(getattr(module, "config", None), "output_attentions", False)
    return not kwargs.get("output_attentions", configured)


def _is_as_left(grown: Any, left: _Left) -> bool:
    return len(grown.layers) == len(left.states) and all(
        layer.keys is keys and layer.values is values
        for layer, (keys, values) in zip(grown.layers, left.states, strict=True)
    )


def _may_write(grown: Any, left: _Left) -> bool:
    """Whether there is room for one more token, which nobody but the caller's cache can see."""
    if left.rooms is None:
        return False
    for layer, room in zip(grown.layers, left.rooms.layers, strict=True):
        # A mask with as many columns as the room would look like one that is as long by chance.
        if room.keys.shape[2] <= layer.keys.shape[2] + 1:
            return False
        if room.keys.is_inference() and not torch.is_inference_mode_enabled():
            return False
        if max(sys.getrefcount(layer.keys), sys.getrefcount(layer.values)) > _REFERENCES:
            return False
        if max(map(_memory_references, (layer.keys, layer.values))) > _MEMORY_REFERENCES:
            return False
    return True


def _memory_references(tensor: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]


def _rooms_for(grown: Any) -> Any:
    """Return a cache with the same rows, and room for more."""
    classes = sys.modules[CACHES]
    layers = []
    for layer in grown.layers:
        length = layer.keys.shape[2]
        room = classes.StaticLayer(length + max(_LEAST_SPARE, length // _SPARE_PART))
        room.lazy_initialization(layer.keys, layer.values)
        room.keys[:, :, :length] = layer.keys
        room.values[:, :, :length] = layer.values
        layers.append(room)
    return classes.Cache(layers=layers)
