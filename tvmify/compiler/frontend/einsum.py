"""``einsum`` of two tensors as one matrix product, without extra axes of one element. PyTorch's own
decomposition pads both operands to all letters and multiplies three-dimensional tensors, so that
weights and attention are no longer recognized.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from tvmify.torch_compat.symbols import identities_of, identity_of


def einsum(equation: str, operands: Sequence[torch.Tensor], **options: Any) -> torch.Tensor:
    """Compute `torch.einsum`, by PyTorch's own decomposition if there is no single product."""
    named = _letters(equation.replace(" ", ""), operands)
    if named is None:
        # By dispatch key, since this function replaces the operator at present.
        key = torch._C.DispatchKey.CompositeImplicitAutograd
        return torch.ops.aten.einsum.default._op_dk(key, equation, operands, **options)
    left, right, out, sizes = named
    a, b = operands
    batch = [letter for letter in out if letter in left and letter in right]
    summed = [letter for letter in left if letter in right and letter not in out]
    rows = [letter for letter in out if letter in left and letter not in right]
    columns = [letter for letter in out if letter in right and letter not in left]

    def extent(letters: Sequence[str]) -> int:
        return prod(sizes[letter] for letter in letters)

    lead = [sizes[letter] for letter in batch]
    # Without a batch, rows need not be flattened, and a right-hand side of two axes is a weight.
    height = [extent(rows)] if batch else [sizes[letter] for letter in rows]
    x = _turned(a, left, [*batch, *rows, *summed])
    x = _shaped(x, [*lead, *height, extent(summed)])
    y = _turned(b, right, [*batch, *summed, *columns])
    y = _shaped(y, [*lead, extent(summed), extent(columns)])
    # As in torch, which multiplies tensors of two dtypes if nothing is summed.
    product = x * y if identity_of(extent(summed)) == 1 else x @ y
    made = [*batch, *rows, *columns]
    return _turned(_shaped(product, [sizes[letter] for letter in made]), "".join(made), out)


def _letters(
    equation: str, operands: Sequence[torch.Tensor]
) -> tuple[str, str, str, dict[str, int]] | None:
    """Return the letters of both operands and of the result, with ``...`` expanded, and the sizes.
    None if there are not two operands and a result, a letter is summed or repeated within an
    operand, or an axis of one element is broadcast.
    """
    before, arrow, out = equation.partition("->")
    inputs = before.split(",")
    if not arrow or len(inputs) != 2:
        return None
    spare = "".join(letter for letter in string.ascii_letters if letter not in equation)
    counts = [x.dim() - len(i.replace("...", "")) for i, x in zip(inputs, operands, strict=True)]
    shared = spare[: max(counts)]
    left, right = (
        letters.replace("...", shared[len(shared) - count :])
        for letters, count in zip(inputs, counts, strict=True)
    )
    out = out.replace("...", shared)
    once = all(len(set(letters)) == len(letters) for letters in (left, right, out))
    alone = (set(left) ^ set(right)) - set(out)
    shape = operands[0].shape + operands[1].shape
    extents = set(zip(left + right, identities_of(shape), strict=True))
    sizes = dict(zip(left + right, shape, strict=True))
    is_product = once and not alone and set(out) <= {*left, *right} and len(sizes) == len(extents)
    return (left, right, out, sizes) if is_product else None


# Neither emits an operator that changes nothing, which would hide attention from its recognition.


def _turned(x: torch.Tensor, letters: str, order: Sequence[str]) -> torch.Tensor:
    """Permute axes from one order to another."""
    axes = [letters.index(letter) for letter in order]
    return x if axes == sorted(axes) else x.permute(axes)


def _shaped(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Merge or split axes."""
    return x if identities_of(x.shape) == identities_of(sizes) else x.reshape(sizes)
