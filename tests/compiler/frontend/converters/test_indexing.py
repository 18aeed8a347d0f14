"""Shapes, slices, and reading at computed positions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tvm import tirx

from tests.compiler.programs import check, check_each, compiled, executed
from tests.tolerances import assert_close_to_reference
from tvmify import tvmify
from tvmify.compiler.frontend.converters import loops
from tvmify.errors import UnsupportedOperator


def test_views_and_slices():
    check_each(
        {
            "view": lambda x: x.view(24, 8),
            "permute": lambda x: x.permute(2, 0, -2),
            "transpose": lambda x: x.transpose(1, 2).reshape(4, -1),
            "squeeze": lambda x: x[:, :1].squeeze(1).unsqueeze(-1),
            "expand": lambda x: x[:1].expand(5, 6, 8),
            "slice": lambda x: x[1:3, ::2, -3:],
            "select": lambda x: x[:, -1],
            "split": lambda x: x.split([1, 5], dim=1),
            "chunk": lambda x: x.chunk(3, dim=2),
            "unbind": lambda x: x.unbind(0),
            "flip": lambda x: x.flip(0, 2),
            "roll": lambda x: x.roll((1, -2), (0, 2)),
            "repeat": lambda x: x.repeat(2, 1, 3),
            "interleave": lambda x: x.repeat_interleave(2, 1),
            "triangles": lambda x: (x.tril(1), x.triu(-1)),
            "diagonal": lambda x: (x.diagonal(1, 1, 2), x.diagonal(-2, 0, 1)),
            "unfold": lambda x: x.unfold(1, 3, 2),
            "stack": lambda x: torch.stack([x, x + 1], 1),
            "cat": lambda x: torch.cat([x, x.int()], 1),
        },
        torch.randn(4, 6, 8),
    )


def test_tensors_without_axes_are_read_as_one_element():
    check_each(
        {
            "select": lambda x, at: x.index_select(0, at),
            "select by scalar": lambda x, at: x.index_select(-1, at[0]),
            "gather": lambda x, at: x.gather(0, at),
            "unfold": lambda x, at: x.unfold(0, 1, 2) * 2,
        },
        torch.randn(()),
        torch.tensor([0]),
    )


@pytest.mark.parametrize(
    ("widths", "mode"),
    [
        ((1, 2, 0, 3), "constant"),
        ((-1, 2), "constant"),
        ((-1, -2), "constant"),
        ((1, 2), "reflect"),
        ((1, 2), "replicate"),
        ((1, 2), "circular"),
    ],
)
def test_padding(widths: tuple[int, ...], mode: str):
    check(lambda x: F.pad(x, widths, mode=mode), torch.randn(4, 6, 8))


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
@pytest.mark.parametrize(
    "pad",
    [
        lambda x, mode: F.pad(x, (3, 2), mode=mode),
        lambda x, mode: F.pad(x, (-1, 2, 1, -2), mode=mode) * 2,
        lambda x, mode: F.pad(x, (x.shape[2] // 2, x.shape[2] // 3), mode=mode),
    ],
    ids=["widened", "cropped", "by a part of the size"],
)
def test_borders_of_any_size(pad: Callable[[torch.Tensor, str], torch.Tensor], mode: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return pad(x, mode)

    fast = tvmify(function, dynamic=True, cache=False, strict=True)
    for height, width in ((5, 9), (12, 4), (7, 12)):
        x = torch.randn(2, height, width)
        torch.testing.assert_close(fast(x), function(x), rtol=0, atol=0)
    assert fast.cache_info().builds == 1


@pytest.mark.parametrize(
    ("shape", "axis", "size", "step"),
    [((2, 12), 1, 4, 2), ((2, 13, 3), 1, 5, 2), ((11, 2), 0, 2, 3), ((2, 9), -1, 9, 1)],
    ids=["whole steps", "parts of steps", "gaps", "one window"],
)
def test_windows_are_added_where_they_overlap(
    shape: tuple[int, ...], axis: int, size: int, step: int
) -> None:
    def added(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.unfold_backward(x, shape, axis, size, step) * 2

    x = torch.randn(shape).unfold(axis, size, step).contiguous()
    check(added, x)
    if axis:
        check(added, x[:1].clone())


def test_inverse_fourier_transforms_of_any_length():
    class Inverse(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            spectrum = torch.complex(x[:, 0], x[:, 1])
            return torch.istft(spectrum, 16, 4, window=torch.hann_window(16))

    torch.manual_seed(0)
    module = Inverse().eval()
    fast = tvmify(module, dynamic=True, cache=False, strict=True)
    for batch, frames in ((2, 9), (3, 20), (2, 6)):
        x = torch.randn(batch, 2, 9, frames)
        assert_close_to_reference(fast(x), module, (x,), {})
    assert fast.cache_info().builds == 1


def test_as_strided_reads_memory_as_it_is_in_eager():
    def windows(x: torch.Tensor) -> torch.Tensor:
        stride = x.stride()
        return x.as_strided((4, 2, 4, 3), (stride[0], stride[1] * 2, stride[1], stride[2]))

    check_each(
        {
            "transposed argument": lambda x: windows(x.transpose(1, 2).reshape(4, 6, 3)) + 1,
            "transposed": lambda x: windows((x * 2).transpose(1, 2).reshape(4, 6, 3)),
            "plain": lambda x: windows((x * 2).reshape(4, 6, 3)),
            "overlapping": lambda x: x.exp().as_strided((3, 4, 2), (1, 1, 7), 3),
            "of no axes": lambda x: (x * 2).as_strided((), (), 4),
        },
        torch.randn(1, 6, 4, 3),
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * 2)[:, 1:].as_strided((2, 3), (3, 1), 0),
        lambda x: (x[:, :1] * 2).expand(-1, 6, -1, -1).as_strided((2, 2), (3, 1)),
    ],
)
def test_as_strided_refuses_memory_beside_its_argument(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with pytest.raises(UnsupportedOperator, match="as_strided"):
        compiled(function, torch.randn(1, 6, 4, 3))


def test_constants():
    check_each(
        {
            "like": lambda x: (torch.ones_like(x) + x, torch.zeros_like(x), x.new_full((2,), 3)),
            "arange": lambda x: x + torch.arange(8),
            "eye": lambda x: x + torch.eye(8)[:6],
            "literal": lambda x: x * torch.tensor([2.0]),
            "large": lambda x: x[0, 0, 0] + torch.ones(600, 600),
            "output": lambda x: torch.zeros(3),
        },
        torch.randn(4, 6, 8),
    )


def test_embeddings():
    index = torch.randint(0, 10, (3, 5))
    check(nn.Embedding(10, 16), index)
    check(nn.Embedding(10, 16, padding_idx=0), index.int())


def test_reading_at_positions():
    check_each(
        {
            "one": lambda x, i, j: x[i],
            "two": lambda x, i, j: x[i, j],
            "negative": lambda x, i, j: x[i - 4, -j - 1],
            "middle": lambda x, i, j: x[:, j[:, None]],
            "separated": lambda x, i, j: x[i, :, j],
            "broadcast": lambda x, i, j: x[i[:, None], j],
            "select": lambda x, i, j: x.index_select(1, j),
            "gather": lambda x, i, j: x.gather(2, j.expand(4, 6, 3)),
            "gather rows": lambda x, i, j: x.gather(0, i.view(3, 1, 1).expand(3, 6, 8)),
            "gather of fewer": lambda x, i, j: x.gather(0, i.view(3, 1, 1).expand(3, 5, 8)),
            "gather of one for all": lambda x, i, j: x.gather(
                2, j[:1].view(1, 1, 1).expand(4, 6, 5)
            ),
            "gather of pairs": lambda x, i, j: x.gather(
                1, (i[:, None] + j[None, :2] // 5)[:, None].transpose(1, 2).expand(3, 2, 8)
            ),
            "gather of repeated": lambda x, i, j: (
                x[:, None, 0].expand(4, 3, 8).gather(0, i.view(3, 1, 1).expand(3, 3, 8))
            ),
            "one_hot": lambda x, i, j: F.one_hot(i, 4),
        },
        torch.randn(4, 6, 8),
        torch.tensor([3, 0, 1]),
        torch.tensor([5, 2, 0]),
    )


def test_narrow_positions_in_what_was_moved():
    check_each(
        {
            "index": lambda x, i: x.flip(0)[i] * 2,
            "select": lambda x, i: x.transpose(0, 1).index_select(1, i) * 2,
            "embedding": lambda x, i: F.embedding(i, x[0].expand(5, 4)) * 2,
        },
        torch.randn(3, 4),
        torch.tensor([2, 0, 1], dtype=torch.int32),
    )


@pytest.mark.parametrize("position", [4, -5])
def test_out_of_range_position_raises(position: int):
    def program(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return x[i]

    args = torch.randn(4, 3), torch.tensor([1, 2])
    artifact = compiled(program, *args)
    with pytest.raises(Exception, match="out of range"):
        executed(artifact, program, args[0], torch.tensor([1, position]))


OUT_OF_RANGE = {
    "gather": lambda x, i: torch.gather(x, 1, i[None]),
    "gather of no axes": lambda x, i: x.sum().gather(0, i),
    "gather rows": lambda x, i: x.gather(0, i[:, None].expand(2, 4)),
    "scatter_add of rows": lambda x, i: x.scatter_add(0, i[:, None].expand(2, 4), x[:2]),
    "scatter": lambda x, i: x.scatter(1, i[None], x[:1, :2]),
    "one_hot": lambda x, i: F.one_hot(i, 4),
    "index_select": lambda x, i: x.index_select(0, i),
    "index_select of no axes": lambda x, i: x.sum().index_select(0, i[1:]),
    "embedding": lambda x, i: F.embedding(i, x),
    "take": lambda x, i: x.take(i * 2),
    "cross_entropy": lambda x, i: F.cross_entropy(x[:2], i),
    "median of bools": lambda x, i: (x > i.sum()).median(),
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_errors_match_eager(name: str):
    program = OUT_OF_RANGE[name]
    fast = tvmify(program, cache=False, compare=False)
    x, inside, outside = torch.randn(3, 4), torch.tensor([0, 0]), torch.tensor([0, 9])
    if name != "median of bools":
        torch.testing.assert_close(fast(x, inside), program(x, inside))
    with pytest.raises(Exception) as expected:
        program(x, outside)
    with pytest.raises(type(expected.value)) as raised:
        fast(x, outside)
    assert type(raised.value) is type(expected.value)
    assert str(raised.value) == str(expected.value)


@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_positions_of_extrema_of_booleans_are_an_error(name: str):
    def program(x: torch.Tensor) -> torch.Tensor:
        return getattr(x, name)(0)

    x = torch.rand(4, 3) > 0.5
    artifact = compiled(program, x)
    with pytest.raises(RuntimeError, match="bool"):
        executed(artifact, program, x)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_positions_may_be_narrower_than_the_sizes_of_the_tensor(dtype: str):
    rows = tirx.Var("rows", "int64")
    function = loops.check_positions(5, (rows, 3), 0, (dtype, "float32"), wrap=True)
    arguments = [str(parameter.ty.dtype) for parameter in function.params]
    assert arguments == [dtype, "float32", dtype]
