from __future__ import annotations

import random

import pytest

from tvmify.cache import Key, differences, nearest

PROGRAM = """\
argument %0 x: Tensor
argument %1 scale: float = 1.0
%2: List[int] = prim::ListConstruct(1, 1)
%3: Tensor = aten::conv2d(%0, weight(c.weight), None, %2, 1)
%4: Tensor = aten::relu(%3)
%5: Tensor = aten::mul.Tensor(%4, tensor(float32, [2], sha256 {a}))
%6: Tensor = aten::add.Tensor(%5, %3, 1)
return %6
weight c.weight""".replace("{a}", "a" * 64)
WITHOUT_RELU = """\
argument %0 x: Tensor
argument %1 scale: float = 1.0
%2: List[int] = prim::ListConstruct(1, 1)
%3: Tensor = aten::conv2d(%0, weight(c.weight), None, %2, 1)
%4: Tensor = aten::mul.Tensor(%3, tensor(float32, [2], sha256 {a}))
%5: Tensor = aten::add.Tensor(%4, %3, 1)
return %5
weight c.weight""".replace("{a}", "a" * 64)
TARGET = '{"kind": "llvm", "mattr": ["+avx2", "+fma"], "mcpu": "x86-64"}'
ENTRIES = {
    "program": PROGRAM,
    "inputs": "0: float32[1, 3] cpu\n1: int 3\nTreeSpec(tuple, None, [*, *])",
    "weights": "c.bias: float32[8] cpu\nc.weight: float32[8, 3] cpu",
    "unpacked": "",
    "target": TARGET,
    "options": "accuracy='default'\ntune=None",
    "modes": "default dtype: torch.float32",
    "torch": "2.13.0",
    "tvmify": "version: 0.1.0\nformat: 5\nsources: 6697f480f8e8a391",
}
KEY = Key(ENTRIES)


def changed(**entries: str) -> Key:
    return Key(ENTRIES | entries)


@pytest.mark.parametrize(
    ("entry", "old", "new", "lines"),
    [
        ("target", "x86-64", "znver4", ["target.mcpu: x86-64 → znver4"]),
        ("target", '"+fma"', '"+avx"', ["target.mattr: +fma → (not there)",
                                        "target.mattr: (not there) → +avx"]),
        ("target", TARGET, "llvm", [f"target: {TARGET} → llvm"]),
        ("options", "'default'", "'strict'", ["options.accuracy: 'default' → 'strict'"]),
        ("inputs", "[1, 3]", "[2, 3]", ["inputs 0: shape [1, 3] → [2, 3]"]),
        ("inputs", "float32[1, 3] cpu", "int8[1, 3] cuda",
         ["inputs 0: dtype float32 → int8, device cpu → cuda"]),
        ("inputs", "1: int 3", "1: float32[2] cpu", ["inputs 1: int 3 → float32[2] cpu"]),
        ("inputs", "tuple", "list",
         ["inputs: structure TreeSpec(tuple, None, [*, *]) → TreeSpec(list, None, [*, *])"]),
        ("weights", "[8, 3]", "[8, 4]", ["weights: c.weight shape [8, 3] → [8, 4]"]),
        ("weights", "c.bias: float32[8] cpu\n", "",
         ["weights: c.bias float32[8] cpu → (not there)"]),
        ("weights", "[8, 3] cpu", "[8, 3] cpu is c.bias",
         ["weights: c.weight same as (not there) → c.bias"]),
        ("modes", "torch.float32", "torch.float32\nautocast: cpu bfloat16",
         ["modes.autocast: (not there) → cpu bfloat16"]),
        ("torch", "2.13.0", "2.14.0", ["torch: 2.13.0 → 2.14.0"]),
        ("tvmify", "format: 5", "format: 6", ["tvmify.format: 5 → 6"]),
        ("program", "aten::relu", "aten::gelu", ["program: op 3 aten::relu → aten::gelu"]),
        ("program", "ListConstruct(1, 1)", "ListConstruct(1, 2)",
         ["program: op 1 prim::ListConstruct: 1 → 2"]),
        ("program", "(%5, %3, 1)", "(%5, %4, 1)", ["program: op 5 aten::add.Tensor: %3 → %4"]),
        ("program", "a" * 64, "b" * 64,
         ["program: op 4 aten::mul.Tensor: tensor(float32, [2], sha256 aaaaaaaaaaaa…) → "
          "tensor(float32, [2], sha256 bbbbbbbbbbbb…)"]),
        ("program", "= 1.0", "= 2.0",
         ["program: argument scale: float = 1.0 → argument scale: float = 2.0"]),
    ],
)  # fmt: skip
def test_each_kind_of_entry(entry: str, old: str, new: str, lines: list[str]) -> None:
    other = changed(**{entry: ENTRIES[entry].replace(old, new, 1)})
    assert differences(KEY, other) == lines
    back = differences(other, KEY)
    assert len(back) == len(lines)
    assert all(" → " in line for line in back)


def test_added_operation_is_a_one_line_difference() -> None:
    without = changed(program=WITHOUT_RELU)
    assert differences(KEY, without) == ["program: op 3 aten::relu → (not there)"]
    assert differences(without, KEY) == ["program: op 3 (not there) → aten::relu"]


def test_unnamed_difference_is_reported() -> None:
    other = changed(program=PROGRAM + "\nweight c.bias")
    assert differences(KEY, other) == ["program: the texts differ; `tvmify show` prints both"]
    assert differences(KEY, changed(flavour="new\nline")) == ["flavour: (not there) → new\\nline"]


def test_equal_keys_do_not_differ() -> None:
    assert differences(KEY, Key(dict(ENTRIES))) == []


def test_it_is_bounded() -> None:
    weights = "\n".join(f"w{i}: float32[{i}] cpu" for i in range(1000))
    program = "\n".join(f"%{i}: Tensor = aten::op{i}(%{i})" for i in range(20000))
    lines = differences(KEY, changed(weights=weights, program=program))
    assert "weights: and 996 more" in lines
    assert len(lines) < 20
    assert max(map(len, differences(KEY, changed(torch="x" * 10**6)))) < 300


def test_the_same_program_is_nearer_than_another_with_fewer_differences() -> None:
    same = changed(torch="1", tvmify="2", target="3")
    other = changed(program="return", weights="")
    assert nearest(KEY, [other, same]) == (same, differences(KEY, same))


def test_the_same_names_of_weights_are_as_near_as_the_same_program() -> None:
    one, two = changed(program=WITHOUT_RELU), changed(torch="1", options="")
    for stored in ([one, two], [two, one]):
        assert nearest(KEY, stored) == (one, differences(KEY, one))


def test_fewer_entries_come_before_smaller_differences() -> None:
    few, many = changed(program="return"), changed(torch="1", options="")
    assert nearest(KEY, iter([many, few]))[0] == few  # type: ignore[index]
    closer = changed(program=WITHOUT_RELU)
    assert nearest(KEY, [few, closer, many])[0] == closer  # type: ignore[index]


def test_having_no_weights_makes_no_relatives() -> None:
    key, unlike = changed(weights=""), changed(weights="", program="return")
    same = changed(weights="", torch="1", options="", target="")
    assert nearest(key, [unlike, same])[0] == same  # type: ignore[index]


def test_the_key_itself_is_not_its_neighbour() -> None:
    assert nearest(KEY, []) is None
    assert nearest(KEY, [Key(dict(ENTRIES))]) is None


def test_random_texts_are_compared() -> None:
    generator = random.Random(0)
    letters = "%0123 =:()[]{}\"'\\\n,→\x1b\x00→yield block argument"
    for _ in range(300):
        texts = {
            name: "".join(generator.choices(letters, k=generator.randrange(60))) for name in ENTRIES
        }
        lines = differences(KEY, Key(texts))
        assert lines
        assert not any("\n" in line for line in lines)
        assert nearest(KEY, [Key(texts)]) is not None
