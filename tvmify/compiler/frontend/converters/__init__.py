"""Our converters from ATen operators to Relax, where TVM's are wrong or missing."""

from __future__ import annotations

from tvmify.compiler.frontend.converters import (  # noqa: F401  (importing them fills CONVERTERS)
    attention,
    bits,
    complex_numbers,
    convolution,
    indexing,
    matmul,
    normalization,
    pointwise,
    pooling,
    recurrent,
    reduction,
    scattering,
    shape,
    slices,
)
from tvmify.compiler.frontend.converters.registry import COMPLEX_CONVERTERS, CONVERTERS

__all__ = ["COMPLEX_CONVERTERS", "CONVERTERS", "STOCK"]

#: The converters of TVM's importer that are trusted: tests compare each with eager. Others are not
#: used, since several of them are silently wrong.
STOCK = frozenset(
    "flip.default pixel_shuffle.default roll.default stack.default transpose.int tril.default "
    "triu.default".split()
)
