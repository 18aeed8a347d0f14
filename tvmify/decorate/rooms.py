"""Room for further tokens in a `DynamicCache`, so that a step does not copy it.

In eager PyTorch, each step concatenates the keys and values of all tokens with those of the new
one. Here a step runs with a `StaticCache`, whose tensors have room for further tokens, and which
programs write in place. The caller's cache gets views of the rows that are filled.

The tensors before and after a step share memory, which must not be visible. So a step writes in
place only if the caller's cache is unchanged since the last step, and has the only references to
its tensors. Otherwise (reordered beams, fewer tokens, a copy) the step gets new memory.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tvmify.dispatch.outcome import Compiled, Outcome, Partitioned

#: The module of transformers that defines caches. It is not imported before the caller has a cache.
CACHES = "transformers.cache_utils"
#: A full cache is copied to a larger one: by this many tokens, or by this fraction.
_LEAST_SPARE, _SPARE_PART = 64, 8
#: References to a tensor of the caller's cache that nothing else refers to: those of its layer, of
#: `_Left`, and of the argument of `sys.getrefcount`.
_REFERENCES = 3
#: References to its memory: those of the tensor, of the larger tensor, and of the argument.
_MEMORY_REFERENCES = 3


class _Left(NamedTuple):
    """The contents of a `DynamicCache` after a call.

    Attributes
    ----------
    states
        The keys and values of each layer: the caller's tensors.
    rooms
        The cache of static layers that they are views of; None if they own their memory.
    """

    states: list[tuple[torch.Tensor, torch.Tensor]]
    rooms: Any


_LEFT: weakref.WeakKeyDictionary[Any, _Left] = weakref.WeakKeyDictionary()
#: Modules whose steps fail with static layers, although their classes claim to support them, or are
#: compiled in parts only: where the number of tokens, a tensor in such layers, is a size.
_UNFIT: weakref.WeakSet[Any] = weakref.WeakSet()
#: Modules whose steps with static layers are compiled as a whole.
_FIT: weakref.WeakSet[Any] = weakref.WeakSet()


@dataclass(frozen=True)
class Step:
    """A call that adds one token, with a cache that has room for it.

    Attributes
    ----------
    cache
        The cache that the program gets instead of the caller's.
    """

    cache: Any
    _module: Any
    _grown: Any
    _rooms: Any

    @classmethod
    def of(
        cls, module: Any, cache: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Step | None:
        """Return the step of a call; None if it does not add one token, or must run unchanged.

        Parameters
        ----------
        module, args, kwargs
            The module and the arguments of the call.
        cache
            The cache among its arguments.
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
        with_room = copy.copy(cache)
        with_room.self_attention_cache = rooms
        return cls(with_room, module, grown, rooms)

    def give_up(self) -> None:
        """Run later steps of the module with the caller's cache."""
        _UNFIT.add(self._module)

    def turns_out_unfit(self, outcome: Callable[[], Outcome | None]) -> bool:
        """Judge from the first outcomes whether later steps run with room; whether they do not."""
        if self._module not in _FIT:
            match outcome():
                case Compiled():
                    _FIT.add(self._module)
                case Partitioned():
                    self.give_up()
                    return True
        return False

    def finish(self) -> None:
        """Update the caller's cache with the rows that the program has written."""
        for layer, room in zip(self._grown.layers, self._rooms.layers, strict=True):
            length = int(room.cumulative_length)
            layer.keys, layer.values = room.keys[:, :, :length], room.values[:, :, :length]
        _remember(self._grown, self._rooms)


def remember(cache: Any) -> None:
    """Remember the contents of a cache after a call without room, for the next step."""
    if (grown := _dynamic(cache)) is not None:
        _remember(grown, None)


def _remember(grown: Any, rooms: Any) -> None:
    _LEFT[grown] = _Left([(layer.keys, layer.values) for layer in grown.layers], rooms)


def _dynamic(cache: Any) -> Any:
    """Return a dynamic cache, if all its layers have tokens on the CPU and no sliding window."""
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
    """Return the tokens that the call adds to the cache; None if that is unknown."""
    prefix = "decoder_" if has_encoder else ""
    for name in (f"{prefix}input_ids", f"{prefix}inputs_embeds"):
        if kwargs.get(name) is not None:
            return kwargs[name]
    return args[0] if args and not has_encoder else None


def _is_plain_step(module: Any, tokens: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether static layers give the same result: they do for one token, in a model that supports
    them.
    """
    # Autograd may need rows that a later step would overwrite.
    if torch.is_grad_enabled() or module in _UNFIT:
        return False
    if not getattr(module, "_can_compile_fullgraph", False):
        return False
    if not isinstance(tokens, torch.Tensor) or tokens.dim() < 2 or tokens.shape[1] != 1:
        return False
    # Both would have as many columns as the cache has room for.
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
    """Whether there is room for one token in memory that only the caller's cache refers to."""
    if left.rooms is None:
        return False
    for layer, room in zip(grown.layers, left.rooms.layers, strict=True):
        # A mask with as many columns as the static cache could have that length by chance.
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
    """Return a static cache with the same rows, and room for more."""
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
