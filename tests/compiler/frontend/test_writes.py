"""Writes to rows of an argument: in place if nothing else reads the old elements."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.compiler.programs import compiled, scheduled
from tvmify import tvmify as decorate
from tvmify.compiler.frontend.decompositions import decompose
from tvmify.compiler.frontend.sharing import written_bases
from tvmify.compiler.frontend.writes import writes_in_place

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # raised by torch.export

Forward = Callable[[Tensor, Tensor, Tensor], Any]


def copied(rows: Tensor, at: Tensor, new: Tensor) -> Any:
    rows.index_copy_(1, at, new)
    return rows.sum(1), rows


def assigned(rows: Tensor, at: Tensor, new: Tensor) -> Any:
    rows[:, at] = new * 2
    return rows + 1


def and_a_copy(rows: Tensor, at: Tensor, new: Tensor) -> Any:
    rows[:, at] = new
    return rows.clone(), rows.view(2, -1).clone()


def read_before(rows: Tensor, at: Tensor, new: Tensor) -> Any:
    before = rows.sum(1)
    rows[:, at] = new
    return before


def depends_on_itself(rows: Tensor, at: Tensor, new: Tensor) -> Any:
    rows[:, at] = rows[:, at] + new
    return rows * 2


def elsewhere(rows: Tensor, at: Tensor, new: Tensor) -> Any:
    return rows.index_copy(1, at, new)


def slices(rows: Tensor, at: Tensor, new: Tensor) -> Any:
    rows[:, 1:4] = new
    return rows.sum(1)


def slices_of_slices(rows: Tensor, at: Tensor, new: Tensor) -> Any:
    rows[:1, -3:][:, :, 2:5] = new[:1, :, :3]
    return rows * 2


def indices(rows: Tensor, at: Tensor, new: Tensor) -> Any:
    rows[1, -2] = new[0, 0]
    return rows + 1


def slices_of_one_axis(rows: Tensor, at: Tensor, new: Tensor) -> Any:
    rows[:, 1:5][:, 1:4] = new
    return rows + 1


def numbers(rows: Tensor, at: Tensor, new: Tensor) -> Any:
    rows[:, 1:3, :4] = 7
    return new + rows.sum()


def broadcast(rows: Tensor, at: Tensor, new: Tensor) -> Any:
    rows[:, 2:5] = new[0, :1].double()
    return new + rows.sum()


def several(rows: Tensor, at: Tensor, new: Tensor) -> Any:
    rows[:, 1:4] = new
    rows[:, at] = new * 2
    rows[0, :3, ::1] = new[1]
    return rows + 1


def whole(rows: Tensor, at: Tensor, new: Tensor) -> Any:
    rows[:] = new.sum()
    return rows + 1


def read_between(rows: Tensor, at: Tensor, new: Tensor) -> Any:
    rows[:, 1:4] = new
    total = rows.sum(1)
    rows[:, :3] = new
    return total


def gaps(rows: Tensor, at: Tensor, new: Tensor) -> Any:
    rows[:, :5:2] = new
    return rows + 1


def part_of_itself(rows: Tensor, at: Tensor, new: Tensor) -> Any:
    rows[:, 1:4] = rows[:, :3] + new
    return rows + 1


def added(rows: Tensor, at: Tensor, new: Tensor) -> Any:
    rows[:1, 1:4] += new[:1]
    return rows + 1


class Net(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.call = forward

    def forward(self, rows: Tensor, at: Tensor, new: Tensor) -> Any:
        return self.call(rows, at, new)


def arguments(length: int = 6, at: tuple[int, ...] = (4, 1, 4)) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(length)
    return torch.randn(2, length, 16), torch.tensor(at), torch.randn(2, len(at), 16)


@pytest.mark.parametrize(
    ("forward", "count"),
    [
        (copied, 1),
        (assigned, 1),
        (and_a_copy, 1),
        (slices, 1),
        (slices_of_slices, 1),
        (indices, 1),
        (slices_of_one_axis, 1),
        (numbers, 1),
        (broadcast, 1),
        (several, 3),
        (whole, 0),  # the tensor is replaced
        (read_before, 0),
        (read_between, 0),
        (gaps, 0),
        (depends_on_itself, 0),
        (part_of_itself, 0),
        (added, 0),
        (elsewhere, 0),
    ],
)
def test_rows_without_other_readers_are_written_in_place(forward: Forward, count: int) -> None:
    net = Net(forward).eval()
    program = decompose(torch.export.export(net, arguments())).program
    assert len(writes_in_place(written_bases(program).values(), ())) == count
    fast = decorate(net, cache=False, compare=False, strict=True)
    for length in (6, 9, 11):  # for one shape, and for any
        given, wanted = arguments(length), arguments(length)
        memory = given[0].data_ptr()
        results, expected = fast(*given), net(*wanted)
        torch.testing.assert_close(results, expected)
        torch.testing.assert_close(given[0], wanted[0], rtol=0, atol=0)
        assert given[0].data_ptr() == memory
        for result in results if isinstance(results, tuple) else [results]:
            result.add_(1)  # a separate tensor, or the argument
        for result in expected if isinstance(expected, tuple) else [expected]:
            result.add_(1)
        torch.testing.assert_close(given[0], wanted[0], rtol=0, atol=0)


def test_memory_of_a_result_is_not_written_in_place() -> None:
    net = Net(copied).eval()
    program = decompose(torch.export.export(net, arguments())).program
    written = written_bases(program).values()
    assert writes_in_place(written, set(written)) == set()


@pytest.mark.parametrize("at", [slice(1, 4), torch.tensor([4, 1, 4]), 2], ids=str)
def test_elements_of_a_vector_are_written_in_place(at: Any) -> None:
    class Write(nn.Module):
        def forward(self, line: Tensor, new: Tensor) -> Tensor:
            line[at] = new
            return line * 2

    net, new = Write().eval(), torch.randn_like(torch.zeros(6)[at])
    program = decompose(torch.export.export(net, (torch.zeros(6), new))).program
    assert len(writes_in_place(written_bases(program).values(), ())) == 1
    assert not compiled(net, torch.zeros(6), new).report["bridged"]
    fast = decorate(net, cache=False, compare=False, strict=True)
    for length in (6, 9, 11):  # for one shape, and for any
        given, wanted = torch.zeros(length), torch.zeros(length)
        torch.testing.assert_close(fast(given, new), net(wanted, new), rtol=0, atol=0)
        torch.testing.assert_close(given, wanted, rtol=0, atol=0)


def test_rows_of_a_strided_or_unaligned_tensor() -> None:
    net = Net(assigned).eval()
    fast = decorate(net, cache=False, compare=False, strict=True)
    rows, at, new = arguments()
    for strange in (rows.mT.contiguous().mT, torch.zeros(193)[1:].view(2, 6, 16)):
        mine, other = copy.deepcopy(strange), strange.clone()
        version = mine._version
        torch.testing.assert_close(fast(mine, at, new), net(other, at, new))
        torch.testing.assert_close(mine, other, rtol=0, atol=0)
        assert mine._version > version  # autograd is told


def test_lazy_clone_is_copied_before_a_write() -> None:
    net = Net(assigned).eval()
    fast = decorate(net, cache=False, compare=False, strict=True)
    rows, at, new = arguments()
    mine, other = torch.ops.aten._lazy_clone(rows), rows.clone()
    unchanged = rows.clone()
    torch.testing.assert_close(fast(mine, at, new), net(other, at, new))
    torch.testing.assert_close(mine, other, rtol=0, atol=0)
    torch.testing.assert_close(rows, unchanged, rtol=0, atol=0)


def test_failed_call_leaves_arguments_unwritten() -> None:
    def check_first(rows: Tensor, at: Tensor, new: Tensor) -> Any:
        found = nn.functional.embedding(at, new[0])
        rows.index_copy_(1, at, new)
        return rows * 2, torch.tanh(found) + 1

    fast = decorate(Net(check_first).eval(), cache=False, compare=False)
    fast(*arguments(at=(2, 1, 2)))
    rows, at, new = arguments(at=(4, 1, 4))  # `new[0]` has three rows
    unchanged = rows.clone()
    with pytest.raises(IndexError):
        fast(rows, at, new)
    torch.testing.assert_close(rows, unchanged, rtol=0, atol=0)


def test_failing_call_raises_and_writes_as_eager() -> None:
    def two(rows: Tensor, at: Tensor, new: Tensor) -> Any:
        rows.index_copy_(1, at[:1], new[:, :1])
        return rows.sum() + nn.functional.embedding(at, new[0]).sum()

    net = Net(two).eval()
    fast = decorate(net, cache=False, compare=False)
    fast(*arguments(at=(2, 1, 2)))
    given, wanted = arguments(at=(4, 1, 4)), arguments(at=(4, 1, 4))  # `new[0]` has three rows
    for run, (rows, at, new) in ((fast, given), (net, wanted)):
        with pytest.raises(IndexError):
            run(rows, at, new)
    torch.testing.assert_close(given[0], wanted[0], rtol=0, atol=0)


@pytest.mark.parametrize(("forward", "count"), [(copied, 0), (read_before, 1)])
def test_in_place_write_does_not_copy_its_target(forward: Forward, count: int) -> None:
    rows, at, new = arguments(1000, at=(4,))
    planned, _ = scheduled(Net(forward).eval(), rows, at, new)
    sizes = re.findall(r"alloc_storage\(R.shape\(\[(\d+)\]\)", planned["main"].script())
    assert sizes
    assert sum(int(size) >= rows.nbytes for size in sizes) == count
