from __future__ import annotations

from benchmarks import shapes
from benchmarks.shapes import Shape


def test_list_is_complete():
    known = shapes.read()
    assert len(known) == shapes.COUNT
    assert len(set(known.values())) > 10


def test_shapes_are_read_back():
    for shape in (
        Shape(3, 4, 5),
        Shape(columns=8, image=(1, 7, 9, 4), window=(3, 2, 1)),
    ):
        assert Shape.parse(str(shape)) == shape


def test_batches():
    assert Shape(3, 4, 5).of_batch(4) == Shape(12, 4, 5)
    image = Shape(columns=8, image=(1, 7, 9, 4))
    assert image.of_batch(2).image == (2, 7, 9, 4)
