"""Calls with a key-value cache of transformers, as `generate` makes them.

A compiled program takes and returns tensors. So such a call passes the tensors of the cache, and a
text that describes their places. The program rebuilds the cache from both, and returns its new
contents in the same form, which are then written to the caller's cache.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tvmify.decorate.rooms import CACHES, Step, remember
from tvmify.dispatch.dispatcher import Dispatcher
from tvmify.dispatch.generality.hints import TYPICAL_CACHE, TYPICAL_PROMPT
from tvmify.dispatch.subject import Declared
from tvmify.torch_compat.declared_sizes import STATIC, DeclaredShape, DeclaredSize

#: Stands for the cache in the result of a program.
_THE_CACHE = "the cache of the call"
#: Arguments whose last axis is as long as the cache after the call.
_MASKS = ("attention_mask", "decoder_attention_mask")
#: Counts of tokens that layers with a sliding window keep as Python ints. Each value would need its
#: own program, so the size of a tensor represents it.
_COUNTED = ("cumulative_length", "cumulative_length_int")
#: How many tokens a static layer has room for: the size of its tensors, once it has any.
_ROOM = "max_cache_len"


class Opened(NamedTuple):
    """A cache taken apart.

    Attributes
    ----------
    description
        Its classes and attributes; equal for caches that differ only in their tensors.
    tensors
        Its tensors, in the order of the description.
    """

    description: str
    tensors: tuple[torch.Tensor, ...]


class GrowingCache(NamedTuple):
    """A cache among the keyword arguments of a call.

    Attributes
    ----------
    keyword
        The name of the argument.
    cache
        The caller's object.
    opened
        The contents, before the call, of the cache that the program gets.
    step
        How the call runs with room for its token, if it adds a single token.
    """

    keyword: str
    cache: Any
    opened: Opened
    step: Step | None

    @classmethod
    def among(
        cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> GrowingCache | None:
        """Return the cache of a call; None if there is not exactly one, or it cannot be opened."""
        classes = sys.modules.get(CACHES)
        if classes is None:
            return None
        found = [
            (name, value) for name, value in kwargs.items() if isinstance(value, classes.Cache)
        ]
        if len(found) != 1:
            return None
        ((keyword, cache),) = found
        # First, since this function is about to add references to its tensors.
        step = Step.of(module, cache, args, kwargs)
        opened = take_apart(cache if step is None else step.cache)
        return None if opened is None else cls(keyword, cache, opened, step)

    def call(self, dispatcher: Dispatcher, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call, and update the caller's cache as eager would."""
        rest = {name: value for name, value in kwargs.items() if name != self.keyword}
        given = (self.keyword, *self.opened, *args)
        try:
            result, *after = dispatcher(given, rest)
        except Exception:
            whole = take_apart(self.cache)
            if self.step is None or whole is None:
                raise
            plain = self._replace(opened=whole, step=None).call(dispatcher, args, kwargs)
            self.step.give_up()
            return plain
        _made(Opened(*after), self.cache if self.step is None else self.step.cache)
        if self.step is None:
            remember(self.cache)
        else:
            self.step.finish()
            if self.step.turns_out_unfit(lambda: dispatcher.known(given, rest)):
                dispatcher.forget_module()  # all its calls would run by parts
        return pytree.tree_map_only(str, lambda s: self.cache if s == _THE_CACHE else s, result)


@functools.cache
def with_tensors(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that takes and returns a cache as a text and tensors."""

    def opened(
        self: Any,
        keyword: str,
        description: str,
        tensors: Sequence[torch.Tensor],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, str, tuple[torch.Tensor, ...]]:
        cache = _made(Opened(description, tuple(tensors)), None)
        result = forward(self, *args, **{keyword: cache}, **kwargs)
        after = take_apart(cache)
        assert after is not None
        marked = pytree.tree_map(lambda leaf: _THE_CACHE if leaf is cache else leaf, result)
        return marked, after.description, after.tensors

    return opened


def declare_lengths(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Declared:
    """Declare which sizes of a call of `with_tensors` are lengths, and what to tune for."""
    _, description, tensors, *_ = args
    leaves = pytree.tree_leaves((args, kwargs))
    parts = list(zip(tensors, _roles(description), strict=True))
    counts = {tensor.numel() for tensor, role in parts if role is _Role.COUNT}
    growing = {id(tensor): 2 for tensor, role in parts if role is _Role.GROWS}
    # Only until the window is full.
    windows = [tensor for tensor, role in parts if role is _Role.WINDOW]
    growing |= {id(tensor): 2 for tensor in windows if tensor.shape[2] in counts}
    masks = pytree.tree_leaves([kwargs.get(name) for name in _MASKS])
    if not growing and not windows:
        return _lengths_of_prompt(leaves, {t.numel() for t, role in parts if role is _Role.ROOM})
    growing |= {id(mask): mask.dim() - 1 for mask in masks if isinstance(mask, torch.Tensor)}
    growing |= {id(tensor): 0 for tensor, role in parts if role is _Role.COUNT}
    full = {id(tensor) for tensor in windows if id(tensor) not in growing}
    # Layers with equal lengths in a call share a symbol.
    names: dict[int, str] = {}
    declared: dict[int, DeclaredShape] = {}
    for number, leaf in enumerate(leaves):
        if (axis := growing.get(id(leaf))) is not None:
            name = names.setdefault(leaf.shape[axis], f"length {len(names)}")
            size = DeclaredSize(varies=True, name=name, typical=TYPICAL_CACHE)
            declared[number] = tuple(size if i == axis else None for i in range(leaf.dim()))
        elif id(leaf) in full:
            declared[number] = (None, None, STATIC, None)
    return declared


def _lengths_of_prompt(leaves: Sequence[Any], rooms: set[int]) -> Declared:
    """Declare what to tune the first call for, by the sizes of the caches that it makes."""
    prompt = DeclaredSize(varies=None, typical=TYPICAL_PROMPT)
    cache = DeclaredSize(varies=None, typical=TYPICAL_CACHE)
    declared: dict[int, DeclaredShape] = {}
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            batch = (None,) if leaf.dim() > 1 else ()
            sizes = leaf.shape[len(batch) :]
            declared[number] = (*batch, *(cache if size in rooms else prompt for size in sizes))
    return declared


class _Role(Enum):
    """The role of a tensor in a description."""

    GROWS = auto()  # its axis 2 varies from call to call
    WINDOW = auto()  # its axis 2 varies until the window is full
    COUNT = auto()  # its size is the number of tokens so far
    ROOM = auto()  # its size is the number of tokens that an empty layer has room for
    OTHER = auto()


@functools.cache
def _roles(description: str) -> tuple[_Role, ...]:
    found: list[_Role] = []
    classes = sys.modules[CACHES]

    def visit(node: ast.AST, role: _Role) -> None:
        match node:
            case ast.Name("tensor"):
                found.append(role)
            case ast.Name("count"):
                found.append(_Role.COUNT)
            case ast.Name("room"):
                found.append(_Role.ROOM)
            case ast.Call(ast.Name(name), [], attributes):
                cls, role = getattr(classes, name), _Role.OTHER
                if issubclass(cls, (classes.DynamicLayer, classes.StaticLayer)):
                    role = _Role.WINDOW if cls.is_sliding else _Role.GROWS
                for attribute in attributes:
                    is_state = attribute.arg in ("keys", "values")
                    visit(attribute.value, role if is_state else _Role.OTHER)
            case _:
                for child in ast.iter_child_nodes(node):
                    visit(child, role)

    visit(_parsed(description), _Role.OTHER)
    return tuple(found)


def take_apart(cache: Any) -> Opened | None:
    """Return the contents of a cache; None if a program cannot take some of it."""
    tensors: list[torch.Tensor] = []
    try:
        described = _described(cache, tensors)
    except TypeError:
        return None
    return Opened(described, tuple(tensors))


def _described(value: Any, tensors: list[torch.Tensor]) -> str:
    """Return a Python expression without quotes, since torch embeds it in generated code."""
    match value:
        case torch.Tensor():
            tensors.append(value)
            return "tensor"
        case None | bool() | int() | float() | torch.dtype():
            return repr(value)
        case torch.device():
            return f"device({value.type}, {value.index})"
        case type() if value.__module__ == CACHES:
            return value.__name__
        case list():
            return f"[{', '.join(_described(item, tensors) for item in value)}]"
        case dict() if all(isinstance(key, int) for key in value):
            pairs = (f"{key}: {_described(item, tensors)}" for key, item in value.items())
            return f"{{{', '.join(pairs)}}}"
    cls = type(value)
    if cls.__module__ != CACHES:
        raise TypeError(f"{cls.__qualname__} has more than tensors and settings")
    attributes: list[str] = []
    for name, part in vars(value).items():
        if name == _ROOM and getattr(value, "is_sliding", True) is False:
            attributes.append(f"{name}={_described_room(value, part, tensors)}")
        elif name in _COUNTED and isinstance(part, (int, torch.SymInt)):
            tensors.append(torch.zeros(part, dtype=torch.int8))
            attributes.append(f"{name}=count")
        else:
            attributes.append(f"{name}={_described(part, tensors)}")
    return f"{cls.__name__}({', '.join(attributes)})"


def _described_room(layer: Any, room: int, tensors: list[torch.Tensor]) -> str:
    if layer.keys is None:
        tensors.append(torch.zeros(room, dtype=torch.int8))
        return "room"
    return "filled" if layer.keys.shape[2] == room else repr(room)


_parsed = functools.lru_cache(ast.parse)


def _made(opened: Opened, old: Any) -> Any:
    """Return the cache; reuse an older object of the same class."""
    tensors = iter(opened.tensors)

    def made(node: ast.expr, old: Any) -> Any:
        match node:
            case ast.Name("tensor"):
                return next(tensors)
            case ast.Name("count" | "room"):
                return next(tensors).shape[0]
            case ast.Attribute(ast.Name("torch"), name):
                return getattr(torch, name)
            case ast.Call(ast.Name("device"), [ast.Name(kind), index]):
                return torch.device(kind, ast.literal_eval(index))
            case ast.Name(name):
                return getattr(sys.modules[CACHES], name)
            case ast.List(items):
                whole = old if isinstance(old, list) else []
                older = [*whole, *[None] * len(items)]
                whole[:] = [made(item, older[i]) for i, item in enumerate(items)]
                return whole
            case ast.Dict(keys, items):
                whole = old if isinstance(old, dict) else {}
                numbers = [ast.literal_eval(key) for key in keys if key is not None]
                pairs = zip(numbers, items, strict=True)
                rebuilt = {key: made(item, whole.get(key)) for key, item in pairs}
                whole.clear()
                whole.update(rebuilt)
                return whole
            case ast.Call(ast.Name(name), [], attributes):
                cls = getattr(sys.modules[CACHES], name)
                whole = old if type(old) is cls else cls.__new__(cls)
                for attribute in attributes:
                    match attribute.value:
                        case ast.Name("filled"):
                            value = whole.keys.shape[2]
                        case description:
                            value = made(description, vars(whole).get(str(attribute.arg)))
                    setattr(whole, str(attribute.arg), value)
                return whole
        return ast.literal_eval(node)

    (statement,) = _parsed(opened.description).body
    assert isinstance(statement, ast.Expr)
    return made(statement.value, old)
