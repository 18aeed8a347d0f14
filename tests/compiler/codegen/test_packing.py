"""The names of packed weights: equal exactly if equal weights are packed alike."""

from __future__ import annotations

import torch
from torch import nn

from tests.compiler.programs import check, compiled
from tests.models import trained
from tvmify.runtime import Executor, PackedWeights


def convnet() -> nn.Module:
    return trained(
        nn.Sequential(
            nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 1)
        )
    )


def test_equal_packings_have_equal_names():
    small = compiled(convnet(), torch.randn(1, 8, 16, 16))
    large = compiled(convnet(), torch.randn(1, 8, 32, 32))
    assert small.packed == large.packed
    assert len(set(small.packed)) == len(small.packed)


def test_batch_sizes_of_a_linear_layer_share_its_weights():
    names = {compiled(nn.Linear(64, 64), torch.randn(n, 64)).packed for n in (8, 16)}
    assert len(names) == 1


def test_another_constant_in_the_packing_is_another_name():
    one = trained(nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8, eps=1e-5)))
    two = trained(nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8, eps=1e-3)))
    x = torch.randn(1, 8, 4, 4)
    assert set(compiled(one, x).packed).isdisjoint(compiled(two, x).packed)


class Wired(nn.Module):
    def __init__(self, *, swapped: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
        self.swapped = swapped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        difference = self.b - self.a if self.swapped else self.a - self.b
        return x * difference


def test_another_wiring_of_the_same_weights_is_another_name():
    straight, swapped = (compiled(Wired(swapped=s), torch.randn(8, 8)) for s in (False, True))
    assert sorted(straight.weights) == sorted(swapped.weights)
    assert set(straight.packed).isdisjoint(swapped.packed)


def test_unpacked_weight_passes_through():
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    module = Scale()
    artifact = check(module, torch.randn(4, 8))
    assert artifact.packed == ("scale: float32[8]",)
    (packed,) = Executor(artifact).compiled.pack([module.scale.detach()])
    assert packed.data_ptr() == module.scale.data_ptr()


def test_tied_weights():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 16)
            self.head = nn.Linear(16, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(index))

    check(Tied(), torch.randint(0, 10, (2, 3)))


def test_one_store_serves_both_shapes():
    module = convnet()
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    store = PackedWeights()
    sizes = []
    for side in (16, 32):
        artifact = compiled(module, torch.randn(1, 8, side, side))
        Executor(artifact).bind([tensors[name] for name in artifact.weights], store)
        sizes.append(len(store))
    assert sizes[0] == sizes[1]
