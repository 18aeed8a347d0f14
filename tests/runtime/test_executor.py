"""Binding weights: which are packed, which are shared, and when."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.runtime import programs
from tvmify.runtime import Executor, PackedWeights


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x.double(), weight.double(), bias.double()).float()


def weights(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(8, 16, dtype=dtype), torch.randn(8, dtype=dtype)]


def test_bound_weights_are_read():
    executor = Executor(programs.linear())
    call = executor.call()
    x = torch.randn(4, 16)
    for _ in range(3):
        bound = weights()
        executor.bind(bound, PackedWeights())
        torch.testing.assert_close(call((x,)), reference(x, *bound))


def test_parameters_can_be_bound():
    executor = Executor(programs.linear())
    bound = [torch.nn.Parameter(weight) for weight in weights()]
    executor.bind(bound, PackedWeights())
    x = torch.randn(4, 16)
    y = executor.call()((x,))
    torch.testing.assert_close(y, reference(x, *bound).detach())
    assert not y.requires_grad


def test_instances_share_a_library_but_not_weights():
    first = Executor(programs.linear())
    second = first.share()
    for executor in (first, second):
        executor.bind(weights(), PackedWeights())
    x = torch.randn(4, 16)
    assert not torch.equal(first.call()((x,)), second.call()((x,)))
    with pytest.raises(RuntimeError, match="TVM's"):
        first.share().compiled.forward([x])


def test_executors_of_one_instance_share_packed_weights():
    store = PackedWeights()
    bound = weights()
    executors = [Executor(programs.linear(rows)) for rows in (1, 4, 9)]
    for executor in executors:
        executor.bind(bound, store)
    assert len(store) == 2
    for executor, rows in zip(executors, (1, 4, 9), strict=True):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(executor.call()((x,)), reference(x, *bound))


def test_stored_weights_are_not_repacked():
    asked: list[list[bool]] = []

    def pack(wanted: list[bool]) -> Sequence[torch.Tensor]:
        asked.append(wanted)
        return [torch.full((1,), float(number)) for number, flag in enumerate(wanted) if flag]

    store = PackedWeights()
    first = store.take(["a", "b"], pack)
    again = store.take(["b", "a"], pack)
    assert all(x is y for x, y in zip(again, first[::-1], strict=True))
    third, second = store.take(["c", "b"], pack)
    assert second is first[1] and third.item() == 0.0
    assert asked == [[True, True], [True, False]]
    assert len(store) == 3


MEGABYTE = 1 << 20


def test_small_packed_weights_lie_in_one_piece_and_large_ones_begin_with_a_huge_page():
    shapes = [(3, 7), (700, 700), (0, 5), (1000, 700), (600, 700)]
    given = [torch.randn(shape) for shape in shapes]
    *packed, first = Executor(programs.packing(*shapes)).compiled.pack(given)
    assert first.data_ptr() == given[0].data_ptr()
    for tensor, weight in zip(packed, given, strict=True):
        assert torch.equal(tensor, 2 * weight) and tensor.is_contiguous()
    large = packed.pop(3)
    starts = [tensor.data_ptr() for tensor in packed if tensor.numel()]
    assert large.data_ptr() % (2 * MEGABYTE) == starts[0] % (2 * MEGABYTE) == 0
    assert starts[1] == starts[0] + 128 and starts[2] - starts[1] == -(-700 * 700 * 4 // 64) * 64
    # The piece lives as long as any of them.
    last = packed.pop()
    del packed, tensor, large
    assert torch.equal(last, 2 * given[-1])


def test_few_packed_weights_have_separate_memory():
    shapes = [(300, 300), (200, 300)]
    packed = Executor(programs.packing(*shapes)).compiled.pack([torch.ones(s) for s in shapes])
    assert packed[1].data_ptr() != packed[0].data_ptr() + -(-300 * 300 * 4 // 64) * 64


def test_unwanted_weights_are_not_kept():
    shapes = [(700, 700), (1000, 700)]
    given = [torch.randn(shape) for shape in shapes]
    compiled = Executor(programs.packing(*shapes)).compiled
    second, first = compiled.pack(given, [False, True, True])
    assert torch.equal(second, 2 * given[1]) and torch.equal(first, given[0])
    assert second.data_ptr() % (2 * MEGABYTE) == 0
    with pytest.raises(RuntimeError, match="packed 3 weights instead of 2"):
        compiled.pack(given, [True, True])


def test_packing_keeps_no_extra_memory():
    shapes = [(9 * MEGABYTE,)] * 3  # each more than malloc would keep

    def resident() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) << 10

    compiled = Executor(programs.packing(*shapes)).compiled
    given = [torch.ones(shape) for shape in shapes]
    before = resident()
    packed = compiled.pack(given)
    size = sum(tensor.nbytes for tensor in packed[:-1])
    assert size <= resident() - before < 1.25 * size


def test_unpacked_weight_is_not_copied():
    _, bias = bound = weights()
    executor = Executor(programs.linear())
    packed = executor.compiled.pack(bound)
    assert packed[1].data_ptr() == bias.data_ptr()
    assert packed[0].shape == (16, 8) and torch.equal(packed[0], bound[0].T)


@pytest.mark.parametrize("make", [lambda: torch.randn(16)[::2], lambda: torch.randn(9)[1:]])
def test_weights_not_readable_in_place_are_copied_once(make):
    weight, bias = torch.randn(16, 8).T, make()
    executor = Executor(programs.linear())
    first, second = (executor.compiled.pack([weight, bias])[1] for _ in range(2))
    assert torch.equal(first, bias) and first.is_contiguous() and first.data_ptr() % 64 == 0
    assert second.data_ptr() != bias.data_ptr()
    executor.bind([weight, bias], PackedWeights())
    x = torch.randn(4, 16)
    torch.testing.assert_close(executor.call()((x,)), reference(x, weight, bias))


def test_weights_outlive_their_module():
    executor = Executor(programs.linear())
    x, bound = torch.randn(4, 16), weights()
    expected = reference(x, *bound)
    executor.bind(bound, PackedWeights())
    del bound
    torch.testing.assert_close(executor.call()((x,)), expected)


def test_wrong_weights_are_refused():
    executor = Executor(programs.linear())
    with pytest.raises(TypeError, match="dense CPU tensors"):
        executor.bind([torch.randn(8, 16).to_sparse(), torch.randn(8)], PackedWeights())
    for wrong in (weights(torch.float64), [torch.randn(8, 15), torch.randn(8)], weights()[:1]):
        with pytest.raises(RuntimeError, match="TVM's"):
            executor.bind(wrong, PackedWeights())


def test_a_program_without_weights_needs_none():
    executor = Executor(programs.added())
    executor.bind([], PackedWeights())
    x = torch.randn(4, 16)
    assert torch.equal(executor.call()((x,)), x + x)
