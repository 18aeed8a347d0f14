"""The converters of TVM's importer that are trusted: tests compare each with eager. Operators in
neither this list nor `CONVERTERS` are not left to TVM's importer, since several of its converters
are silently wrong.
"""

from __future__ import annotations

STOCK = frozenset(
    """
    flip.default pixel_shuffle.default
    roll.default stack.default transpose.int tril.default triu.default
    """.split()
)
