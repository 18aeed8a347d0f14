"""The hints of a program follow from the independent sizes of a call."""

from __future__ import annotations

from tvmify.artifact.expressions import Term
from tvmify.artifact.shapes import Shapes, Symbol
from tvmify.capture import Varying
from tvmify.dispatch.generality.hints import TYPICAL_CACHE, numbers, tuned
from tvmify.dispatch.generality.symbols import cache_lengths, joined


def test_tokens_and_their_mask_are_one_size_until_they_differ():
    known = {0: ("batch", "tokens"), 1: (None, "mask")}
    equal, unequal = ((12, 12), (1, 12)), ((12, 12), (1, 13))
    assert joined(known, [equal]) == {0: ("batch", "tokens"), 1: (None, "tokens")}
    assert joined(known, [equal, unequal]) == known


def test_derived_size_is_not_independent():
    varying = Varying({0: ("n",), 1: ("more",), 2: ("same",), 3: ("fixed",)})
    leaves = {0: ("s0",), 1: (Term("+", ("s0", 1)),), 2: ("s0",), 3: (7,)}
    shapes = Shapes.canonical([Symbol("s0", 2)], leaves, hints={"s0": 48})
    assert numbers(varying, shapes) == {"more", "same", "fixed"}
    assert tuned(varying, ((30,), (31,), (30,), (7,)), numbers(varying, shapes)).hints == {"n": 48}


def test_keys_and_values_and_the_masks_for_them_have_the_length_of_a_cache():
    cache = (None, None, "past", None)
    known = {0: (None, "new"), 1: (None, "mask"), 2: cache, 3: cache}
    sizes = ((1, 3), (1, 33), (1, 2, 30, 8), (1, 2, 30, 8))
    assert cache_lengths(known, sizes) == {"past", "mask"}
    varying = Varying(known, typical=dict.fromkeys(("past", "mask"), TYPICAL_CACHE))
    assert tuned(varying, sizes).hints == {"new": 48, "past": 256, "mask": 256}


def test_four_dimensional_mask_is_not_an_image():
    known = {0: (None, "new"), 1: (None, None, "new", "keys")}
    sizes = ((1, 11), (1, 1, 11, 16))
    assert cache_lengths(known, sizes) == {"keys"}
    varying = Varying(known, typical={"keys": TYPICAL_CACHE})
    assert tuned(varying, sizes).hints == {"new": 48, "keys": 256}


def test_images_have_no_length():
    assert not cache_lengths({0: (None, None, "height", "width")}, ((1, 3, 9, 9),))
    assert not cache_lengths({0: (None, None, "height", None)}, ((1, 3, 9, 9),))
    known = {0: (None, "labels"), 1: (None, None, None, "width")}
    assert not cache_lengths(known, ((1, 5), (1, 3, 9, 9)))


def test_many_tensors_are_in_the_last_class():
    known = {leaf: (f"rows{leaf}", f"columns{leaf}") for leaf in range(8)}
    sizes = ((64, 300),) * 8  # their product is above 2**62
    assert set(tuned(Varying(known), sizes).hints) == {n for names in known.values() for n in names}
