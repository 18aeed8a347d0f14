"""Tensors without memory, anywhere in a module: their bytes are never read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tvmify
from tests.memoryless import KINDS, WITH_VALUES, Wrapper, fake, freed
from tests.tolerances import assert_close_to_reference
from tvmify.errors import NotCompiled, SaveError
from tvmify.torch_compat.memory import extent, has_memory

EVERYWHERE = [
    *((kind, "buffer") for kind in KINDS),
    *((kind, how) for kind in ("wrapper", "freed") for how in ("parameter", "attribute", "list")),
]


class Holder(nn.Module):
    """A layer, and a tensor; ``read`` says what ``forward`` reads of it."""

    def __init__(self, tensor: Any, held_as: str, read: str = "nothing") -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.read = read
        if held_as == "parameter":
            self.held = nn.Parameter(tensor, requires_grad=False)
        elif held_as == "buffer":
            self.register_buffer("held", tensor)
        else:
            self.held = tensor if held_as == "attribute" else [tensor]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if self.read == "elements":
            return y + self.held
        if self.read == "shape":
            return y + self.held.shape[0]  # type: ignore[union-attr]
        return y


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def decorated(module: nn.Module, **options: Any) -> Any:
    return tvmify.tvmify(module.eval(), cache=False, compare=False, progress=False, **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4, 3),
        lambda: torch.randn(4, 3).T,
        lambda: torch.randn(3).expand(1000, 3),
        lambda: torch.randn(9).as_strided((4, 6), (1, 1)),
        lambda: torch.randn(40)[7::3],
        lambda: torch.empty(0, 5),
        lambda: torch.empty(0, 5, device="meta"),
        lambda: freed(torch.empty(0)),
        lambda: torch.randn(4).to_sparse(),
    ],
)
def test_backed_tensors(make: Callable[[], torch.Tensor]):
    assert has_memory(make())


@pytest.mark.parametrize("make", [KINDS[kind] for kind in KINDS if "asked" not in kind])
def test_unbacked_tensors(make: Callable[[torch.Tensor], torch.Tensor]):
    assert not has_memory(make(torch.randn(8)))


@pytest.mark.parametrize("missing", [0, 1, 4])
def test_the_last_byte_counts(missing: int):
    tensor = torch.randn(40)[7::3]
    tensor.untyped_storage().resize_(38 * 4 - missing)
    assert has_memory(tensor) == (missing == 0)


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [((), (), 1), ((3, 0), (1, 1), 0), ((4, 3), (3, 1), 12), ((9, 3), (0, 1), 3), ((4,), (5,), 16)],
)
def test_strides_decide_how_far_a_tensor_reaches(shape, strides, expected):
    assert extent(shape, strides) == expected


@pytest.mark.parametrize(("kind", "held_as"), EVERYWHERE)
def test_held_tensor_does_not_prevent_compilation(kind: str, held_as: str):
    module = Holder(KINDS[kind](torch.randn(8)), held_as)
    fast, x = decorated(module, strict=True), torch.randn(4, 8)
    for _ in range(2):
        assert_close_to_reference(fast(x), module.layer, (x,))
    assert fast.cache_info().entries == 1


@pytest.mark.parametrize(
    ("kind", "held_as"),
    [*((kind, "buffer") for kind in WITH_VALUES), ("wrapper", "parameter")],
)
@pytest.mark.filterwarnings("ignore::tvmify.TvmifyWarning")
def test_tensors_without_memory_run_eager(kind: str, held_as: str):
    module = Holder(KINDS[kind](torch.randn(8)), held_as, "elements")
    fast, x = decorated(module), torch.randn(4, 8)
    for _ in range(2):
        torch.testing.assert_close(fast(x), module(x), rtol=0, atol=0)
    assert fast.cache_info().entries == 0 and "runs in eager PyTorch" in str(fast.explain())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::tvmify.TvmifyWarning")
def test_shape_of_an_unbacked_tensor_is_readable(kind: str):
    module = Holder(KINDS[kind](torch.randn(8)), "buffer", "shape")
    fast, x = decorated(module), torch.randn(4, 8)
    torch.testing.assert_close(fast(x), module(x), rtol=0, atol=0)  # eager's own, in eager


@pytest.mark.filterwarnings("ignore::tvmify.TvmifyWarning")
def test_weight_swapped_with_a_wrapper():
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    fast, x = decorated(module), torch.randn(4, 8)
    plain = module[0].weight
    wrapper = nn.Parameter(Wrapper.of(torch.randn(8, 8)), requires_grad=False)
    for weight in (plain, wrapper, plain, wrapper):
        module[0].weight = weight
        if weight is plain:
            assert_close_to_reference(fast(x), module, (x,))
        else:
            torch.testing.assert_close(fast(x), module(x), rtol=0, atol=0)  # eager's own
    info = fast.cache_info()
    assert (info.entries, info.misses) == (1, 2)


def test_weight_freed_and_refilled_between_calls():
    module = nn.Linear(8, 8)
    fast, x = decorated(module, strict=True), torch.randn(4, 8)
    storage = module.weight.untyped_storage()
    for value in range(3):
        storage.resize_(8 * 8 * 4)
        module.weight.fill_(value)
        assert_close_to_reference(fast(x), module, (x,))
        storage.resize_(0)
        with pytest.raises(NotCompiled, match="'weight' has no storage"):
            fast(x)
    assert fast.cache_info().entries == 1


def test_unbacked_closure_tensor_is_not_a_constant():
    held = fake(torch.randn(8))
    fast = tvmify.tvmify(lambda x: x + held, cache=False, strict=True, progress=False)
    with pytest.raises(NotCompiled):
        fast(torch.randn(8))
    assert fast.cache_info().entries == 0


@pytest.mark.parametrize(
    ("kind", "held_as"), [("wrapper", "parameter"), ("freed view", "buffer"), ("fake", "buffer")]
)
def test_unbacked_tensors_cannot_be_saved(kind: str, held_as: str, tmp_path: Path):
    fast = decorated(Holder(KINDS[kind](torch.randn(8)), held_as))
    for save, name in ((tvmify.save, "net.pt"), (tvmify.export, "net.pt2")):
        with pytest.raises(SaveError, match="'held' has no storage"):
            save(fast, tmp_path / name, example_inputs=torch.randn(4, 8))
    assert not list(tmp_path.iterdir())
