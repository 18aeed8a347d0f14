"""Every measured number of the schedules: costs, and the sizes from which things pay off.

Rules and plans contain no numbers of their own; they name a field of these tables. Each field has a
unit and a `Source`; what was found is in docs/measurements/constants.md, by the names of the
fields. ``python -m benchmarks.fit`` fits those of matrix products to measured times.

Limits that keep results accurate (the length of one sum) or compile times short are not costs, and
are defined where they are used.
"""

from __future__ import annotations

from tvmify.compiler.costs.convolutions import CONVOLUTION, WINOGRAD
from tvmify.compiler.costs.core import CORE, NEST, TILE
from tvmify.compiler.costs.gpu import GPU
from tvmify.compiler.costs.layers import ATTENTION, RECURRENT
from tvmify.compiler.costs.products import COMPACT, LIBRARY, MATMUL, PREFETCH
from tvmify.compiler.costs.source import Kind, Number, Source, numbers

__all__ = [
    "ATTENTION",
    "COMPACT",
    "CONVOLUTION",
    "CORE",
    "GPU",
    "LIBRARY",
    "MATMUL",
    "NEST",
    "PREFETCH",
    "RECURRENT",
    "TILE",
    "WINOGRAD",
    "Kind",
    "Number",
    "Source",
    "numbers",
]
