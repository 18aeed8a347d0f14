"""Which sizes of a call vary, by the option ``dynamic_shapes`` and the marks on tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tvmify.dispatch.subject import Declared, Subject, parameters_of
from tvmify.errors import OptionError
from tvmify.signature import Args, Kwargs
from tvmify.torch_compat.declared_sizes import (
    STATIC,
    DeclaredShape,
    declared_size,
    is_dim,
    joined,
    marked_sizes,
)


def declared_sizes(subject: Subject, args: Args, kwargs: Kwargs, given: Declared) -> Declared:
    """Return what is declared about the sizes of a call.

    Parameters
    ----------
    subject
        The module or function; its options have ``dynamic_shapes``.
    args, kwargs
        The arguments of the call. Marks on tensors take precedence over the option.
    given
        Declarations that take precedence over both.

    Raises
    ------
    OptionError
        The option does not fit the call.
    """
    leaves = pytree.tree_leaves((args, kwargs))
    declared: dict[int, DeclaredShape] = {}
    declare = None if subject.options.dynamic is False else subject.declare
    known = {} if declare is None else declare(args, kwargs)
    option = {} if subject.is_part else _of_option(subject, args, kwargs, leaves)
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            nothing = (None,) * leaf.dim()
            declared[number] = joined(
                known.get(number, nothing),
                option.get(number, nothing),
                marked_sizes(leaf),
                given.get(number, nothing),
            )
    return {
        number: shape
        for number, shape in declared.items()
        if any(size is not None for size in shape)
    }


def in_order(
    subject: Subject, args: Args, kwargs: Kwargs, declared: Declared
) -> tuple[dict[str, Any], Declared]:
    """Return keyword arguments in the order of their definition, and the declared sizes by the
    indices that the tensors then have.
    """
    leaves, structure = pytree.tree_flatten((args, kwargs))
    numbers = pytree.tree_unflatten(range(len(leaves)), structure)
    order = pytree.tree_leaves((numbers[0], subject.in_order(numbers[1])))
    declared = {place: declared[number] for place, number in enumerate(order) if number in declared}
    return subject.in_order(kwargs), declared


def check_names(dynamic_shapes: Any, functions: Sequence[Callable[..., Any]]) -> None:
    """Refuse a name in ``dynamic_shapes`` that is not an argument of any of the functions.

    Raises
    ------
    OptionError
        There is one; the message lists the arguments.
    """
    if not isinstance(dynamic_shapes, Mapping):
        return
    names = list(dict.fromkeys(name for f in functions for name in parameters_of(f).parameters))
    for name in dynamic_shapes:
        if name not in names:
            raise OptionError(
                f"option 'dynamic_shapes' names {name!r}, but the arguments are "
                f"{', '.join(map(repr, names))}"
            )


def _of_option(subject: Subject, args: Args, kwargs: Kwargs, leaves: Sequence[Any]) -> Declared:
    shapes = subject.options.dynamic_shapes
    if shapes is None:
        return {}
    # The arguments as a tree, with a number in place of each leaf.
    structure = pytree.tree_structure((args, kwargs))
    numbers = pytree.tree_unflatten(range(len(leaves)), structure)
    try:
        bound = _parameters_of(subject).bind(*numbers[0], **numbers[1]).arguments
    except TypeError:
        return {}  # the call raises it
    if not isinstance(shapes, Mapping):
        if len(shapes) > len(bound):
            raise OptionError(
                f"option 'dynamic_shapes' has {len(shapes)} entries, but the call has "
                f"{len(bound)}: {', '.join(bound)}"
            )
        shapes = dict(zip(bound, shapes, strict=False))
    found: dict[int, DeclaredShape] = {}
    for name, given in shapes.items():
        if name in bound:  # the argument may have a default
            found.update(_of_tree(name, given, bound[name], leaves))
    return found


def _of_tree(
    path: str, given: Any, tree: Any, leaves: Sequence[Any]
) -> Iterator[tuple[int, DeclaredShape]]:
    if type(tree) is int:
        if isinstance(leaves[tree], torch.Tensor):
            yield tree, _of_tensor(path, given, leaves[tree])
        elif given is not None and not (is_dim(given) and declared_size(given) == STATIC):
            raise _unfit(path, given, f"{leaves[tree]!r}, not a tensor: give None")
        return
    if isinstance(tree, Mapping):
        parts, steps = list(tree.values()), [f"[{key!r}]" for key in tree]
        kind = f"a dict of {', '.join(map(repr, tree))}"
        if isinstance(given, Mapping):
            if unknown := [key for key in given if key not in tree]:
                raise _unfit(path, {unknown[0]: given[unknown[0]]}, kind)
            given = [given.get(key, _NOTHING) for key in tree]
    else:
        parts, _ = pytree.tree_flatten(tree, is_leaf=lambda item: item is not tree)
        steps = [f"[{place}]" for place in range(len(parts))]
        kind = f"a {type(tree).__name__} of {len(parts)}"
    if given is None:
        given = [None] * len(parts)
    if not isinstance(given, (list, tuple)) or len(given) != len(parts):
        raise _unfit(path, given, kind)
    for step, each, part in zip(steps, given, parts, strict=True):
        if each is not _NOTHING:
            yield from _of_tree(path + step, each, part, leaves)


_NOTHING = object()


def _of_tensor(path: str, given: Any, tensor: torch.Tensor) -> DeclaredShape:
    rank = tensor.dim()
    if given is None:
        return (STATIC,) * rank
    if isinstance(given, (list, tuple)) and len(given) == rank:
        return tuple(map(declared_size, given))
    if isinstance(given, Mapping):
        axes: list[Any] = [None] * rank
        for axis, size in given.items():
            if type(axis) is not int or not -rank <= axis < rank:
                raise _unfit(path, given, f"a tensor of {rank} axes: there is no axis {axis!r}")
            axes[axis] = declared_size(size)
        return tuple(axes)
    raise _unfit(path, given, f"a tensor of {rank} axes: give a dict by axis, or {rank} sizes")


def _unfit(path: str, given: Any, found: str) -> OptionError:
    return OptionError(f"option 'dynamic_shapes' has {given!r} for {path}, which is {found}")


def _parameters_of(subject: Subject) -> inspect.Signature:
    captured = subject.captured()
    if isinstance(captured, torch.jit.ScriptModule):
        return parameters_of(captured)
    module = subject.module()
    return parameters_of(subject.eager if module is None else partial(subject.eager, module))
