"""Tensors are passed without a copy if possible, copied if necessary, or refused."""

from __future__ import annotations

import weakref

import pytest
import torch

from tests.runtime import programs
from tvmify.artifact import Artifact
from tvmify.runtime import Executor, PackedWeights

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def run(artifact: Artifact, *leaves: torch.Tensor):
    return Executor(artifact).call()(leaves)


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape) * 50).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (3, 5), (2, 3, 4), (0, 3), (1, 1, 7)], ids=str)
def test_all_dtypes_and_shapes_round_trip(shape, dtype):
    x = values(shape, dtype)
    name = str(dtype).removeprefix("torch.")
    y = run(programs.transposed(shape, name), x)
    expected = x.permute(tuple(reversed(range(x.dim())))).contiguous()
    assert y.dtype == dtype and y.shape == expected.shape and y.is_contiguous()
    assert torch.equal(y, expected)


def test_an_input_is_read_where_it_is():
    # Only memory that is not copied can come back as a view of the argument.
    x = torch.randn(4, 16)
    y = run(programs.flattened(), x)
    assert y.data_ptr() == x.data_ptr()


def test_returned_input_is_the_callers_tensor():
    x = torch.randn(4, 16)
    assert run(programs.identity(), x) is x
    # Kernels may have written to the copy that they read instead.
    strided = torch.randn(16, 4).T
    assert torch.equal(run(programs.identity(), strided), strided)


def test_a_view_of_an_input_shares_its_storage_and_version():
    x = torch.randn(4, 16)
    y = run(programs.flattened(), x)
    version = x._version
    y[0] = 7.0
    assert x[0, 0] == 7.0 and x._version > version
    assert y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_a_view_keeps_its_input_alive():
    expected = torch.randn(4, 16)
    y = run(programs.flattened(), expected.clone())
    assert torch.equal(y, expected.flatten())


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(16, 4).T,
        lambda: torch.randn(4, 32)[:, ::2],
        lambda: torch.randn(4, 1).expand(4, 16),
        lambda: torch.randn(1 + 64)[1:].view(4, 16),
        lambda: torch.randn(8, 16)[1:5],
        lambda: torch.randn(64 + 3).narrow(0, 3, 64).view(4, 16),
    ],
    ids=["transposed", "strided", "expanded", "misaligned", "offset", "narrowed"],
)
def test_inputs_not_readable_in_place(make):
    x = make()
    before = x.clone()
    y = run(programs.added(), x)
    assert torch.equal(y, x + x) and torch.equal(x, before)


def in_memory(memory: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """Return a part of some memory as a separate storage."""
    return torch.frombuffer(memory.numpy(), dtype=torch.float32, offset=start * 4, count=count)


@pytest.mark.parametrize(
    "make",
    [
        lambda row: row.expand(32, 32),
        lambda row: row.as_strided((32, 32), (0, 1)),
        lambda row: row[:1].expand(32, 32),
        lambda row: row[::2].expand(64, 16),
        lambda row: row.as_strided((32, 1, 32), (1, 0, 0)).expand(32, 2, 32),
        lambda row: row[:0].expand(32, 0),
    ],
    ids=["rows", "strided", "scalar", "steps", "columns", "empty"],
)
def test_inputs_inside_an_expanded_span_do_not_alias(make):
    # A contiguous tensor of this shape would reach into another tensor.
    memory = torch.randn(4096)
    x, y = make(in_memory(memory, 0, 32)), in_memory(memory, 64, 64).view(4, 16)
    view, twice_x, twice_y = run(programs.beside(tuple(x.shape)), x, y)
    assert torch.equal(twice_x, x + x) and torch.equal(twice_y, y + y)
    assert view.data_ptr() == y.data_ptr() and view._base is y._base
    for result in (twice_x, twice_y):
        assert result.untyped_storage().nbytes() == result.nbytes and result._base is None


def test_overlapping_elements_are_read_one_by_one():
    x, y = torch.randn(63).as_strided((32, 32), (1, 1)), torch.randn(4, 16)
    assert torch.equal(run(programs.beside((32, 32)), x, y)[1], x + x)


@pytest.mark.parametrize("columns", [slice(0, 64), slice(64, 128)])
def test_memory_between_the_rows_of_an_input_is_its_storages(columns):
    memory = torch.randn(32, 128)
    x, y = memory[:, columns], memory[3, 64:128].view(4, 16)
    view, twice_x, _ = run(programs.beside((32, 64)), x, y)
    assert torch.equal(twice_x, x + x) and view.data_ptr() == y.data_ptr()
    view.zero_()
    assert not memory[3, 64:].any()


def test_strides_of_dimensions_of_size_one_do_not_matter():
    x = torch.randn(16).as_strided((1, 16), (999, 1))
    assert torch.equal(run(programs.added((1, 16)), x), x + x)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4, 16, dtype=torch.complex64).conj().imag,
        lambda: torch._neg_view(torch.randn(4, 16)),
        lambda: torch._neg_view(torch.randn(16, 4)).mT,
    ],
)
def test_negatives_that_wait_are_computed(make):
    x = make()
    assert x.is_neg() and torch.equal(run(programs.added(), x), x + x)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch._efficientzerotensor(4, 16),
        lambda: torch.randn(4, 16).to_sparse(),
        lambda: torch.randn(4, 16, device="meta"),
        lambda: torch.quantize_per_tensor(torch.randn(4, 16), 0.1, 0, torch.qint8),
    ],
    ids=["zero", "sparse", "meta", "quantized"],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_tensors_whose_bytes_are_not_their_values_are_refused(make):
    executor, x = Executor(programs.added()), make()
    with pytest.raises(TypeError, match="dense CPU tensors"):
        executor.compiled.forward([x])
    assert executor.call()((x,)) is NotImplemented


@pytest.mark.parametrize("size", [0, 4, 4 * 16 * 4 - 1])
def test_an_input_without_memory_is_for_eager(size):
    call = Executor(programs.added()).call()
    x = torch.randn(4, 16)
    assert call.obstacle((x,)) is None
    x.untyped_storage().resize_(size)
    assert call((x,)) is NotImplemented and "has no storage" in (call.obstacle((x,)) or "")
    x.untyped_storage().resize_(4 * 16 * 4)
    assert torch.equal(call((x.zero_(),)), x)


def test_a_weight_without_memory_is_not_packed():
    weight = torch.randn(16)
    weight.untyped_storage().resize_(0)
    with pytest.raises(TypeError, match="has no memory"):
        Executor(programs.leaking()).bind([weight], PackedWeights())


@pytest.mark.parametrize("x", [torch.randn(4, 15), torch.randn(4), torch.randn(4, 16).double()])
def test_executor_survives_tvm_errors(x):
    executor = Executor(programs.added())
    call = executor.call()
    with pytest.raises(RuntimeError, match="TVM's"):
        executor.compiled.forward([x])
    assert call((x,)) is NotImplemented
    good = torch.randn(4, 16)
    assert torch.equal(call((good,)), good + good)


def test_later_calls_do_not_write_to_an_earlier_result():
    call = Executor(programs.added()).call()
    inputs = [torch.randn(4, 16) for _ in range(50)]
    outputs = [call((x,)) for x in inputs]
    assert len({y.data_ptr() for y in outputs}) == len(outputs)
    assert all(torch.equal(y, x + x) for x, y in zip(inputs, outputs, strict=True))


def test_results_outlive_the_executor():
    x = torch.randn(4, 16)
    executor = Executor(programs.added())
    y = executor.call()((x,))
    del executor
    assert torch.equal(y, x + x)


def test_results_can_be_resized_and_written_to():
    y = run(programs.added(), torch.ones(4, 16))
    y.mul_(2)
    y.resize_(100, 100)
    assert torch.equal(y.flatten()[:64], torch.full((64,), 4.0))


def test_an_output_returned_twice_is_one_tensor():
    first, second = run(programs.twice(), torch.randn(4, 16))
    assert first is second


def test_inputs_are_released_after_the_call():
    x = torch.randn(4, 16)
    alive = weakref.ref(x)
    call = Executor(programs.added()).call()
    call((x,))
    del x
    assert alive() is None


def test_packed_weights_are_not_exposed():
    weight = torch.randn(16)
    executor = Executor(programs.leaking())
    executor.bind([weight], PackedWeights())
    call = executor.call()
    x = torch.randn(16)
    _, leaked, view = call((x,))
    assert torch.equal(leaked, weight) and torch.equal(view, weight.view(4, 4))
    leaked.zero_()
    view.zero_()
    assert torch.equal(call((x,))[0], x + weight)


@pytest.mark.parametrize("start", [0, 16, 48])
def test_aliased_weights_are_not_exposed(start):
    weight = torch.randn(64)
    expected = weight.clone()
    executor = Executor(programs.overlapping())
    executor.bind([weight, weight[start : start + 16]], PackedWeights())
    call = executor.call()
    x = torch.randn(64)
    for leaked in call((x,))[1:]:
        leaked.zero_()
    assert torch.equal(weight, expected) and torch.equal(call((x,))[0], x + expected)


def test_results_do_not_require_a_gradient():
    with torch.enable_grad():
        y = run(programs.added(), torch.randn(4, 16, requires_grad=True))
    assert not y.requires_grad and y.grad_fn is None


def test_results_in_inference_mode_are_inference_tensors():
    with torch.inference_mode():
        y = run(programs.added(), torch.randn(4, 16))
    assert y.is_inference() and torch.equal(run(programs.added(), y), y + y)
