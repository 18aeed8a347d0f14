"""The functions and methods for decorated objects."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from typing_extensions import TypeIs

from tvmify.cache import Neighbours
from tvmify.decorate.methods import (
    WITH_CACHE,
    Decoration,
    dispatcher_of_method,
    dispatcher_with_cache,
)
from tvmify.dispatch import examples
from tvmify.dispatch.counts import CacheInfo
from tvmify.dispatch.dispatcher import Dispatcher
from tvmify.dispatch.examples import Example
from tvmify.dispatch.explanation import Explanation
from tvmify.errors import OptionError, SaveError, WarmUpError, warn
from tvmify.runtime import autocast_text
from tvmify.target import KINDS

#: Find the dispatchers of objects that were compiled other than by the decorator, or return None.
#: Modules that offer such a way register a function here when they are imported.
FINDERS: list[Callable[[Any], list[Dispatcher] | None]] = []


def cache_info(subject: Any) -> CacheInfo:
    """Return the counts of a decorated object; for several methods, their sums.

    Parameters
    ----------
    subject
        A decorated object.

    Returns
    -------
    CacheInfo
        Hits, misses, builds, disk hits, entries, seconds per stage, calls in eager, evictions.

    Raises
    ------
    TypeError
        The object is not decorated.

    Examples
    --------
    >>> assert net.cache_info().eager == 0  # every call so far ran compiled code
    """
    return CacheInfo.total([d.cache_info() for d in dispatchers_of(subject)])


def explain(subject: Any) -> Explanation:
    """Return which signatures ran compiled, which ran in eager, and why.

    For a program that was compiled in this process, it also names the nearest entry of the disk
    cache and what differs.

    Parameters
    ----------
    subject
        A decorated object.

    Returns
    -------
    Explanation
        Prints as text; programs use its attributes.

    Raises
    ------
    TypeError
        The object is not decorated.

    Examples
    --------
    >>> print(net.explain())
    """
    dispatchers = dispatchers_of(subject)
    if not dispatchers:  # not called yet
        return Explanation(())
    options = dispatchers[0].subject.options
    neighbours = Neighbours(options.cache_directory())  # reads the cache once
    return Explanation(tuple(dispatcher.explain(neighbours) for dispatcher in dispatchers))


def refresh(subject: Any) -> None:
    """Make the next call inspect the whole module again.

    Changes to parameters, buffers, attributes, submodules, hooks and modes are noticed without it.
    Call it after changes that would be too expensive to check for in every call: an object in an
    attribute was edited in place, other than a list, dict or set of at most 64 items; single
    elements of a weight were written through ``tensor.data``; a global variable or class attribute
    changed; or a module that a decorated function calls changed. It also retries compilations that
    failed.

    Programs that did not change are not compiled again.

    Parameters
    ----------
    subject
        A decorated object.

    Raises
    ------
    TypeError
        The object is not decorated.

    Examples
    --------
    >>> net.config.scale = 2.0
    >>> net.refresh()
    """
    for dispatcher in dispatchers_of(subject):
        dispatcher.refresh()


def warmup(
    subject: Any,
    *signatures: Any,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    method: str | None = None,
) -> CacheInfo:
    """Compile programs, or load them from the cache, before the first call needs them.

    If the option ``compare`` allows it, programs are timed against eager on zeros.

    Parameters
    ----------
    subject
        A decorated object.
    *signatures
        One per kind of call: a list with a shape, a `TensorSpec` or an example tensor for each
        argument, such as ``[(1, 3, 224, 224)]``, or a dict of keyword arguments. A size may be a
        ``torch.export.Dim``, ``Dim.AUTO`` or ``Dim.DYNAMIC``: then the programs for all classes of
        sizes within its limits are compiled, regardless of the option ``dynamic``.
    dtype
        Dtype of arguments that are given as bare shapes.
    device
        Device of arguments that are given as bare shapes; by default that of the weights.
    method
        The method to compile for; needed if several are decorated.

    Returns
    -------
    CacheInfo
        The counts afterwards.

    Raises
    ------
    WarmUpError
        A signature has none of these forms, or not the arguments of the method; or ``method`` is
        missing or not decorated. The message shows the forms, or lists the methods.
    OptionError
        No size is within the limits of a ``Dim``.
    NotCompiled
        With ``strict=True``: a signature cannot be compiled.

    Warns
    -----
    TvmifyWarning
        No program serves all sizes of a ``Dim``, so one was compiled for a single shape; and why.

    Examples
    --------
    >>> net.warmup([(1, 3, 224, 224)], [(8, 3, 224, 224)])
    >>> bert.warmup({"input_ids": TensorSpec((1, 128), torch.int64)})
    >>> net.warmup([(Dim("batch", max=64), 3, 224, 224)])
    """
    dispatcher = dispatcher_of(subject, method)
    name = dispatcher.subject.name
    for signature in signatures:
        for call in example_calls(dispatcher, signature, dtype, device):
            try:
                dispatcher.subject.check_arguments(call.args, call.kwargs)
            except TypeError as error:
                raise WarmUpError(
                    f"{name} cannot be called with {signature!r}: {error}. Give each call a "
                    "signature of its own: warmup([(2, 8)], [(4, 8)])"
                ) from error
            outcome = dispatcher.warm_up(call.args, call.kwargs, call.declared)
            if call.declared and outcome.facts.shapes is None:
                why = outcome.facts.one_shape or outcome.reason or "its sizes are static"
                warn(f"{name} has no program for all sizes of {signature}: {why}")
                break
    return cache_info(subject)


def example_calls(
    dispatcher: Dispatcher,
    signature: Any,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    *,
    shapes: bool = True,
) -> list[Example]:
    """Return example calls of a dispatcher for a signature of `warmup`.

    One call, or, if sizes vary, one for each class of sizes. Without `shapes`, it holds the
    arguments of a call, among which a tuple of ints is a value.
    """
    if isinstance(signature, Mapping):
        signature = dispatcher.subject.in_order(signature)
    if device is None:
        module = dispatcher.module()
        weights = iter(()) if module is None else module.parameters()
        first = next(weights, None)
        device = first.device if first is not None else torch.get_default_device()
    return examples.example_calls(signature, dtype, torch.device(device), shapes=shapes)


#: The methods that the decorator adds.
METHODS = (cache_info, explain, refresh, warmup)


class Decorated(Protocol):
    """The type of a decorated object: it has the methods that the decorator adds.

    Type checkers do not see what a class decorator adds to a class. They do if the class also has
    this as a base, which changes nothing at run time.

    Examples
    --------
    >>> @tvmify
    ... class Net(nn.Module, Decorated): ...
    >>> def report(net: Decorated) -> None:
    ...     print(net.explain())
    """

    def cache_info(self) -> CacheInfo:
        """Return the counts: see `tvmify.cache_info`."""
        return cache_info(self)

    def explain(self) -> Explanation:
        """Return what ran where, and why: see `tvmify.explain`."""
        return explain(self)

    def refresh(self) -> None:
        """Make the next call inspect the whole module again: see `tvmify.refresh`."""
        refresh(self)

    def warmup(
        self,
        *signatures: Any,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        method: str | None = None,
    ) -> CacheInfo:
        """Compile programs ahead of calls: see `tvmify.warmup`."""
        return warmup(self, *signatures, dtype=dtype, device=device, method=method)


class Single:
    """A decorated object with a single dispatcher: a function or a TorchScript module."""

    _tvmify_dispatcher: Dispatcher

    cache_info = cache_info
    explain = explain
    refresh = refresh
    warmup = warmup


def is_decorated(subject: object) -> TypeIs[Decorated]:
    """Return whether `tvmify` returned an object, or it is an instance of a decorated class.

    Parameters
    ----------
    subject
        Any object. A decorated class is not a decorated object, but its instances are.

    Examples
    --------
    >>> fast = net if tvmify.is_decorated(net) else tvmify.tvmify(net)
    """
    return isinstance(subject, Single) or getattr(type(subject), "__tvmify__", None) is not None


def refuse_path(subject: object) -> None:
    """Refuse a path, or the value of an option, in place of a module.

    Raises
    ------
    OptionError
        It is one; the message says what to pass instead.
    """
    if not isinstance(subject, (str, os.PathLike)):
        return
    text = os.fspath(subject)
    if text in ("cpu", *KINDS):
        raise OptionError(f"options are keywords: write tvmify(target={text!r})")
    load = "torch.export.load" if str(text).endswith(".pt2") else "torch.jit.load"
    raise OptionError(f"{text!r} is not a module: load the file first, as {load}({text!r})")


def dispatcher_of(
    subject: Any, method: str | None = None, *, with_cache: bool = False
) -> Dispatcher:
    """Return the dispatcher of a decorated object, or of one of its methods.

    Parameters
    ----------
    with_cache
        Return that for calls with a cache of transformers.

    Raises
    ------
    TypeError
        The object is not decorated.
    WarmUpError
        There is no such method; several are decorated and none is named; or the object has no calls
        with a cache.
    """
    if isinstance(subject, Single):
        if with_cache:
            raise WarmUpError("functions and TorchScript modules have no calls with a cache")
        return subject._tvmify_dispatcher
    decoration = _decoration_of(subject)
    names = list(decoration.methods)
    name = method or (names[0] if len(names) == 1 else None)
    if name not in names:
        raise WarmUpError(f"choose one of the decorated methods with method=: {', '.join(names)}")
    make = dispatcher_with_cache if with_cache else dispatcher_of_method
    return make(subject, name, decoration)


def dispatchers_of(subject: Any) -> list[Dispatcher]:
    """Return the dispatchers of a decorated object, one for each of its methods.

    A method that was called with a cache of transformers has a second one for such calls.
    """
    if isinstance(subject, Single):
        return [subject._tvmify_dispatcher]
    if getattr(type(subject), "__tvmify__", None) is None:
        for find in FINDERS:
            if (found := find(subject)) is not None:
                return found
    decoration = _decoration_of(subject)
    others = [f"{decoration.attribute}{name}{WITH_CACHE}" for name in decoration.methods]
    return [
        *(dispatcher_of_method(subject, name, decoration) for name in decoration.methods),
        *(vars(subject)[other] for other in others if other in vars(subject)),
    ]


def _decoration_of(subject: Any) -> Decoration:
    decoration = getattr(type(subject), "__tvmify__", None)
    if decoration is None:
        refuse_path(subject)
        raise TypeError(f"{type(subject).__qualname__} is not decorated with tvmify")
    return decoration


def saved_method(subject: Any) -> Dispatcher:
    """Return the dispatcher of ``forward``, the only method that files contain.

    Raises
    ------
    SaveError
        It is not among the decorated methods; or autocast is on, which files do not support.
    """
    if autocast_text():
        raise SaveError("files cannot contain the casts of autocast: leave torch.autocast to save")
    try:
        return dispatcher_of(subject, "forward")
    except WarmUpError:
        raise SaveError(
            f"{type(subject).__qualname__}.forward is not decorated, and files contain no "
            "other method: add 'forward' to methods="
        ) from None
