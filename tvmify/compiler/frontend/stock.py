"""The converters of TVM's importer that are trusted: each is run against eager by the tests.

What is in neither this list nor `CONVERTERS` is refused, whatever TVM's importer may think of it:
several of its converters are wrong in silence.
"""

from __future__ import annotations

STOCK = frozenset(
    """
    flip.default pixel_shuffle.default repeat.default
    roll.default stack.default transpose.int tril.default triu.default
    """.split()
)
