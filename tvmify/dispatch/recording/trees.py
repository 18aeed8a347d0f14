"""Converts the arguments of calls to JSON values, and back.

Nothing is evaluated, unpickled or imported: a class that a value names must be imported already.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tvmify.artifact.structure import structure_of, structure_text
from tvmify.errors import NotCompiled, WarmUpError
from tvmify.signature import check_tensor
from tvmify.torch_compat.dtypes import dtype_name


def tree_of(value: Any) -> Any:
    """Return an argument as a JSON value.

    ``None``, bools, ints, strings and lists are unchanged. Anything else is an object whose first
    key names the kind: ``tensor`` (its shape), ``float``, ``dtype``, ``device``, ``tuple``,
    ``dict`` (pairs), ``structure`` (of another container that pytree knows).

    Raises
    ------
    WarmUpError
        It is of an unsupported kind.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:  # JSON has no NaN or infinity
        return {"float": repr(value)}
    if isinstance(value, torch.Tensor):
        return _tensor_tree(value)
    if kind in (torch.dtype, torch.device):
        return {kind.__name__: str(value).removeprefix("torch.")}
    if kind is list:
        return [tree_of(item) for item in value]
    if kind is tuple:
        return {"tuple": [tree_of(item) for item in value]}
    if kind is dict:
        return {"dict": [[tree_of(name), tree_of(item)] for name, item in value.items()]}
    leaves, structure = pytree.tree_flatten(value)
    if structure.is_leaf():
        raise WarmUpError(f"a {kind.__module__}.{kind.__qualname__} cannot be written as JSON")
    try:
        text = structure_text(structure)
    except NotCompiled as error:
        raise WarmUpError(str(error)) from error
    return {"structure": text, "leaves": [tree_of(leaf) for leaf in leaves]}


def _tensor_tree(tensor: torch.Tensor) -> dict[str, Any]:
    try:
        check_tensor("a tensor", tensor)
    except NotCompiled as error:
        raise WarmUpError(error.reason) from error
    tree: dict[str, Any] = {
        "tensor": list(tensor.shape),
        "dtype": dtype_name(tensor.dtype),
        "device": str(tensor.device),
    }
    if not tensor.is_contiguous():
        tree["strides"] = list(tensor.stride())
    if tensor.requires_grad and torch.is_grad_enabled():
        tree["requires_grad"] = True
    return tree


def value_of(tree: Any) -> Any:
    """Return what `tree_of` described; the elements of tensors are zero.

    Raises
    ------
    ValueError, KeyError, TypeError, AttributeError, RuntimeError, NotCompiled
        It is not such a description.
    """
    if isinstance(tree, list):
        return [value_of(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if "tensor" in tree:
        return _tensor(tree)
    if "float" in tree:
        return float(tree["float"])
    if "dtype" in tree:
        return dtype_of(tree["dtype"])
    if "device" in tree:
        return torch.device(tree["device"])
    if "tuple" in tree:
        return tuple(value_of(item) for item in tree["tuple"])
    if "dict" in tree:
        return {value_of(name): value_of(item) for name, item in tree["dict"]}
    leaves = [value_of(leaf) for leaf in tree["leaves"]]
    return pytree.tree_unflatten(leaves, structure_of(tree["structure"]))


def _tensor(tree: Mapping[str, Any]) -> torch.Tensor:
    dtype, device = dtype_of(tree["dtype"]), torch.device(tree["device"])
    shape, strides = tree["tensor"], tree.get("strides")
    if strides is None:
        tensor = torch.zeros(shape, dtype=dtype, device=device)
    else:
        last = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        elements = 0 if 0 in shape else last + 1
        tensor = torch.zeros(elements, dtype=dtype, device=device).as_strided(shape, strides)
    return tensor.requires_grad_(bool(tree.get("requires_grad", False)))


def on_cpu(tree: Any) -> Any:
    """Return a description with all tensors on the CPU."""
    if isinstance(tree, list):
        return [on_cpu(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if "tensor" in tree:
        return tree | {"device": "cpu"}
    return {name: on_cpu(part) for name, part in tree.items()}


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype with a name, which may begin with ``torch.``.

    Raises
    ------
    ValueError
        There is no such dtype.
    """
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of torch")
    return dtype


def text_of(tree: Any) -> str:
    """Return a tree as a person would write it."""
    if isinstance(tree, list):
        return f"[{', '.join(map(text_of, tree))}]"
    if not isinstance(tree, dict):
        return repr(tree)
    if "tensor" in tree:
        return f"{tree.get('dtype')}{tree['tensor']}"
    if "tuple" in tree:
        return f"({', '.join(map(text_of, tree['tuple']))})"
    if "dict" in tree:
        return (
            f"{{{', '.join(f'{text_of(name)}: {text_of(item)}' for name, item in tree['dict'])}}}"
        )
    if "leaves" in tree:
        return f"<{', '.join(map(text_of, tree['leaves']))}>"
    return str(next(iter(tree.values()), tree))
