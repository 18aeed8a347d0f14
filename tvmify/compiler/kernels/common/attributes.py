"""Names of annotations and attributes that several packages write or read."""

from __future__ import annotations

#: Annotations of a tile of sums: the length of the whole reduction, and whether all columns of some
#: rows come before the next rows; those of a convolution are channels and pixels.
DEPTH, ROWS_FIRST = "tvmify.depth", "tvmify.rows_first"
#: Attribute of a function whose assertions check what the executor has not checked.
ASSERTS = "tvmify.asserts"
#: Attribute of a handwritten kernel: the numbers of the operands of which it reads each element
#: once, so that what computes them can be fused into it (`finish.join_producers`).
READS_ONCE = "tvmify.reads_once"
