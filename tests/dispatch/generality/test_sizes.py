"""Calls that differ in the sizes of tensors, and the programs that serve them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.tolerances import assert_close_to_reference
from tvmify import TensorSpec, TvmifyWarning, WarmUpError
from tvmify import tvmify as decorate
from tvmify.capture import exporting
from tvmify.dispatch.generality import numbers

#: Around the edges of tiles of eight rows, and one beyond the largest class.
LENGTHS = (2, 7, 8, 9, 15, 16, 17, 31, 33, 65)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Recorded(Encoder):
    """TorchScript does not know star arguments."""

    def forward(self, *tensors: Any) -> torch.Tensor:
        return super().forward(*tensors)


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


class Pair(Linear):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:  # type: ignore[override]
        return self.linear(x), y + 1


class Optional(Linear):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        x = self.linear(x)
        return x if y is None else x + y


class Parity(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x.relu() if x.size(0) % 2 == 1 else x.tanh()


def compiled(module: nn.Module, dynamic: bool | None = None, **options: Any) -> Any:
    """Decorate a copy of a module, which calls count the programs of."""
    options = {"cache": False, "strict": True} | options
    return decorate(copy.deepcopy(module).eval(), dynamic=dynamic, **options)


def check(fast: Any, module: nn.Module, *args: Any) -> None:
    with torch.no_grad():
        assert_close_to_reference(fast(*args), module.eval(), args, {})


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("cls", [Encoder, Recorded])
def test_a_few_programs_serve_all_lengths(cls: type[Encoder]) -> None:
    torch.manual_seed(0)
    module = cls()
    fast = compiled(module)
    for length in (5, *LENGTHS):
        check(fast, module, drawn(1, length, 16))
    # The first shape, and one for each class: up to 64 and up to 256.
    assert fast.cache_info().builds == 3
    assert fast.cache_info().eager == 0


class Cached(Linear):
    """Attention of one query, with keys that grow."""

    def forward(self, x: torch.Tensor, keys: torch.Tensor) -> Any:  # type: ignore[override]
        keys = torch.cat([keys, self.linear(x)], 1)
        found = nn.functional.scaled_dot_product_attention(x, keys, keys)
        return torch.relu(found * 2 + x), keys


class Slices(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        at = torch.arange(x.size(1))
        half = x[:, : math.ceil(x.size(1) / 2)] * 2
        joined = torch.cat([x[:, :1], x[:, 1:] * 2], 1) + at[:, None]
        return joined, x[:, -1] * 2, x.mean(1), half


class Moved(nn.Module):
    """What moves and counts elements."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        padded = nn.functional.pad(x, (1, -1, 0, 2), value=3.0)
        running = (x.cumsum(0), torch.relu(x.cumsum(0) * 2), x.cumsum(1), x.t().cumprod(0))
        larger = nn.functional.interpolate(x[None, None], scale_factor=1.5, mode="bilinear")
        return padded, *running, x.flip(1)[:, ::2] * 2, y * x.shape[0], y + 1, larger


class Found(nn.Module):
    """Elements at computed positions along an axis of varying size."""

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> Any:
        ends = x.argmax(0, keepdim=True)
        return x[at] * 2, x.gather(0, ends), x[torch.arange(x.size(0)), x.argmax(-1)]


class Written(nn.Module):
    """Elements that are written or added at computed positions."""

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> Any:
        zeros, rows = x.new_zeros(4, 5), at[:, None].expand(-1, 5)
        largest = (x.size(0) - 1 - at)[:, None]
        return (
            zeros.scatter_add(0, rows, x),
            zeros.index_add(0, at, x),
            x.index_put((largest, at[None, :2]), x[:, :1], accumulate=True),
            x.scatter(1, at[:, None], x[:, 1:]),
        )


class Windows(nn.Module):
    """Attention within windows, the number of which is where the number of heads is otherwise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, size = x.shape
        padded = nn.functional.pad(x, (0, 0, 0, (4 - length % 4) % 4))
        windows = padded.view(batch, -1, 4, size)
        found = nn.functional.scaled_dot_product_attention(windows, windows, windows)
        return found.reshape(batch, -1, size)[:, :length]


class Views(nn.Module):
    """Results that are views of an argument, or of one another."""

    def forward(self, x: torch.Tensor) -> Any:
        y = x * 2
        return x.t(), x[1:], y, y[:, 1:], y.flatten(), y.t()


class Parts(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return (x * 2).chunk(2, -1)


class LeftToTorch(nn.Module):
    """Operators without a converter: sizes are their arguments, and those of complex results."""

    def forward(self, x: torch.Tensor) -> Any:
        spectrum = torch.fft.rfft(2 * x, dim=0)
        values, order = (x + 1).sort(0)
        larger, _ = (x * 2).topk(x.size(0) // 2 + 1, 0)
        return (spectrum * spectrum.conj()).real, values * 2, order + 1, larger.relu()


LAYERS: dict[str, tuple[nn.Module, Any]] = {
    "cache": (Cached(), lambda n: (drawn(1, 1, 8), drawn(1, n, 8))),
    "slices": (Slices(), lambda n: (drawn(2, n, 8),)),
    "moved": (Moved(), lambda n: (drawn(n, 5), torch.ones(0, n))),
    "found": (Found(), lambda n: (drawn(n, 5), torch.tensor([n - 1, 0, -n]))),
    "views": (Views(), lambda n: (drawn(n, 8),)),
    "parts": (Parts(), lambda n: (drawn(n, 8),)),
    "left to torch": (LeftToTorch(), lambda n: (drawn(n, 6),)),
    "lstm": (nn.LSTM(8, 8, batch_first=True), lambda n: (drawn(2, n, 8),)),
    "both directions": (nn.LSTM(8, 8, bidirectional=True), lambda n: (drawn(n, 2, 8),)),
    "written": (Written(), lambda n: (drawn(n, 5), torch.arange(n) % 4)),
    "images": (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        lambda n: (drawn(n, 3, 6, 6),),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_dynamic_program_matches_eager(name: str) -> None:
    torch.manual_seed(0)
    module, arguments = LAYERS[name]
    for part in module.modules():  # drawn at import, after whatever other files draw
        if isinstance(part, nn.Linear | nn.Conv2d | nn.LSTM):
            part.reset_parameters()
    fast = compiled(module)
    for size in (5, 7, 3, 8, 9, 15, 16):
        check(fast, module, *arguments(size))
    assert fast.cache_info().builds == 2
    assert fast.cache_info().eager == 0


def test_one_program_attends_within_any_number_of_windows() -> None:
    module = Windows()
    fast = compiled(module)
    for length in (5, 9, 7, 13, 18):
        check(fast, module, drawn(2, length, 8))
    assert fast.cache_info().builds == 2


@pytest.mark.parametrize("position", [7, -8])
def test_a_position_outside_of_an_axis_of_varying_size_is_an_error(position: int) -> None:
    fast = compiled(Found())
    for rows in (5, 8, 7):
        fast(drawn(rows, 5), torch.tensor([0]))
    with pytest.raises(IndexError):
        fast(drawn(7, 5), torch.tensor([0, position]))


def test_dynamic_views_alias_as_in_eager() -> None:
    fast, module = compiled(Views()), Views()
    for rows in (3, 5, 7):
        x = drawn(rows, 8)
        for run in (fast, module):
            results = run(x)
            memory = [result.untyped_storage().data_ptr() for result in results]
            assert memory[:2] == [x.untyped_storage().data_ptr()] * 2
            assert len(set(memory[2:])) == 1
        assert [r.stride() for r in fast(x)] == [r.stride() for r in module(x)]
    assert fast.cache_info().builds == 2


def test_served_shapes_are_hits() -> None:
    module = Linear()
    fast = compiled(module)
    for rows in (3, 5, 6):
        check(fast, module, drawn(rows, 8))
    before = fast.cache_info()
    for rows in (3, 6, 5, 6):
        check(fast, module, drawn(rows, 8))
    after = fast.cache_info()
    assert (after.misses, after.builds) == (before.misses, 2)
    assert after.hits == before.hits + 4


def test_other_shapes_see_changed_weights() -> None:
    net = Linear()
    fast = compiled(net, dynamic=True)
    for rows in (2, 5, 6, 5, 7):
        check(fast, net, drawn(rows, 8))
        with torch.no_grad():
            for module in (net, fast):
                module.linear.weight.mul_(-1)
                module.linear.bias = nn.Parameter(module.linear.bias + 1)
    assert fast.cache_info().builds == 1


def test_dynamic_false_builds_per_shape() -> None:
    module = Linear()
    fast = compiled(module, dynamic=False)
    for rows in (3, 5, 6):
        check(fast, module, drawn(rows, 8))
    assert fast.cache_info().builds == 3


def test_dynamic_true_starts_symbolic() -> None:
    module = Linear()
    fast = compiled(module, dynamic=True)
    for rows in (3, 5, 6):
        check(fast, module, drawn(rows, 8))
    assert fast.cache_info().builds == 1


def test_a_size_that_becomes_a_number_in_translation_is_a_guard() -> None:
    """PyTorch records the fast path of this layer without asking how many features there are."""
    module = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    fast = compiled(module, dynamic=True)
    for batch, length in ((5, 9), (7, 8), (3, 20)):
        check(fast, module, drawn(batch, length, 8))
    assert fast.cache_info().builds == 1
    assert "s2 == 8" in str(fast.explain())


class Masked(Encoder):
    def forward(self, x: torch.Tensor, mask: torch.Tensor, y: torch.Tensor) -> Any:  # type: ignore[override]
        return self.layer(x, src_key_padding_mask=mask), y.t(), y[1:] * 2


def test_sizes_that_become_equal_in_translation_are_one() -> None:
    """PyTorch records the fast path without asking whether the mask fits. The symbols of the last
    argument, of which a view is returned, get other names.
    """
    torch.manual_seed(0)
    module = Masked()
    fast = compiled(module, dynamic=True)
    for batch, length, rows in ((5, 20, 3), (7, 16, 9), (4, 30, 4)):
        mask = torch.arange(length).expand(batch, -1) >= length - 2
        check(fast, module, drawn(batch, length, 16), mask, drawn(rows, 5))
    assert fast.cache_info().entries == 1
    assert "(float32[s0, s1, 16] cpu, bool[s0, s1] cpu, float32[s2, s3] cpu)" in str(fast.explain())


class Attends(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.transpose(1, 2)).softmax(-1) @ x


def test_attention_of_any_number_of_features() -> None:
    fast = compiled(Attends(), dynamic=True)
    for shape in ((2, 7, 4), (3, 5, 3), (2, 2, 9)):
        check(fast, Attends(), drawn(*shape))
    assert fast.cache_info().builds == 1


class Rounds(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        length = x.size(0)
        parts = math.floor(length * 0.75 - 0.5), math.ceil(length / 3 - 0.25)
        return [x.new_zeros(part) for part in parts], x * 2


def test_rounded_lines_of_a_size_are_exact() -> None:
    fast = compiled(Rounds(), dynamic=True)
    for length in range(9, 30):
        check(fast, Rounds(), drawn(length))
    assert fast.cache_info().builds == 1


def test_channels_of_volumes_are_not_symbols_at_first() -> None:
    module = nn.MaxPool3d(2)
    fast = compiled(module, dynamic=True)
    for sides in ((9, 8, 6), (7, 9, 8)):
        check(fast, module, drawn(2, 3, *sides))
    assert fast.cache_info().builds == 1


@pytest.mark.parametrize("axes", [(0, 2), (0, 1, 2)])
@pytest.mark.parametrize("pool", [nn.MaxPool1d(3, 2), nn.AvgPool1d(3, 2)], ids=str)
def test_pools_of_sequences_of_any_length(pool: nn.Module, axes: tuple[int, ...]) -> None:
    fast = compiled(pool, dynamic_shapes=(dict.fromkeys(axes, Dim.AUTO),))
    for batch, length in ((3, 17), (5, 8), (2, 20)):
        check(fast, pool, drawn(batch, 4 if len(axes) < 3 else batch, length))
    assert fast.cache_info().builds == 1


def test_sizes_read_by_code_have_no_size_class(tmp_path: Path) -> None:
    module = Linear()
    first = compiled(module, dynamic=True, cache=str(tmp_path))
    for rows, builds in ((64, 1), (9, 1), (65, 2), (40, 2), (80, 2)):
        check(first, module, drawn(rows, 8))
        assert first.cache_info().builds == builds
    later = compiled(module, dynamic=True, cache=str(tmp_path))
    check(later, module, drawn(80, 8))  # under the first key there is the program of 64 rows
    assert later.cache_info().builds == 0
    assert "tuned for 128" in str(later.explain())


def test_each_kind_of_call_may_have_symbolic_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tvmify.dispatch.generality.sizes.MOST_PROGRAMS", 1)
    module = Optional()
    fast = compiled(module)
    for count in (1, 2):
        for length in (3, 5, 4, 7):
            check(fast, module, *(drawn(length, 8) for _ in range(count)))
    assert fast.cache_info().builds == 4


def test_sizes_0_and_1_have_separate_programs() -> None:
    module = Linear()
    fast = compiled(module, strict=False, compare=False)
    for rows in (3, 5, 1, 0, 4):
        check(fast, module, drawn(rows, 8))
    info = fast.cache_info()
    assert info.builds + info.eager == 4


def test_programs_with_other_constant_sizes_keep_their_calls() -> None:
    module = nn.GELU()
    fast = compiled(module, dynamic=True)
    for rows in (17, 0, 1, 0, 1):
        check(fast, module, drawn(rows, 8))
    info = fast.cache_info()
    assert (info.builds, info.eager) == (3, 0)


def test_a_branch_on_a_size_leads_to_two_programs() -> None:
    module = Parity()
    fast = compiled(module)
    for rows in (3, 5, 7, 4, 6, 8, 9):
        check(fast, module, drawn(rows, 8))
    assert fast.cache_info().builds == 3  # one for 3, one for odd numbers, one for even ones


def test_accidentally_equal_sizes_may_differ_later() -> None:
    module = Pair()
    fast = compiled(module)
    for rows, others in ((3, 3), (5, 5), (6, 6), (4, 7), (7, 4)):
        check(fast, module, drawn(rows, 8), drawn(others))
    assert fast.cache_info().builds == 3


def test_operator_without_symbolic_rule_stays_static_with_a_reason() -> None:
    module = nn.Upsample(scale_factor=1.3, mode="bicubic")
    fast = compiled(module, dynamic=True)
    for size in (8, 9, 10):
        check(fast, module, drawn(1, 3, size, size))
    assert fast.cache_info().builds == 3
    assert fast.cache_info().eager == 0
    assert "for this shape alone: " in str(fast.explain())


class Sides(nn.Module):
    """Results of half and of a quarter of the rows, which are joined."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Conv2d(3, 16, 3, padding=1)
        self.down = nn.Sequential(first, nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.deep = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.MaxPool2d(2))
        self.point = nn.Conv2d(32, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = self.down(x)
        deep = nn.functional.interpolate(self.deep(half), scale_factor=2.0, mode="nearest")
        return self.point(torch.cat([half, deep], 1))


class Segments(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 4, 3, 2, 1))
        self.mode = mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.interpolate(self.layers(x), size=x.shape[-2:], mode=self.mode)


#: How a module is made, and what height and width are multiples of.
IMAGES: dict[str, Any] = {
    "skips": (Sides, 4),
    "bilinear": (lambda: Segments("bilinear"), 1),
    "nearest": (lambda: Segments("nearest"), 1),
    "bicubic": (lambda: Segments("bicubic"), 1),
    "enlarged twice": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, 3),
            nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
            nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
        ),
        6,
    ),
    "means": (lambda: nn.AvgPool2d(3, 2, 1), 1),
    "transposed": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.ConvTranspose2d(8, 4, 3, 2, 1, 1), nn.ReLU()
        ),
        1,
    ),
    "transposed without overlap": (lambda: nn.ConvTranspose2d(3, 4, 2, 2), 1),
}


@pytest.mark.parametrize("name", IMAGES)
def test_one_program_serves_images_of_any_size(name: str) -> None:
    torch.manual_seed(0)
    make, step = IMAGES[name]
    module = make()
    sides = {2: Dim.AUTO, 3: Dim.AUTO}
    fast = compiled(module, dynamic_shapes=(sides,))
    for height, width in ((9, 8), (8, 9), (7, 10), (15, 5), (16, 8), (17, 15)):
        check(fast, module, drawn(1, 3, height * step, width * step))
    info = fast.cache_info()
    assert (info.builds, info.eager) == (1, 0)


def test_few_image_sizes_have_separate_programs() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    fast = compiled(module)
    for size in (17, 19, 18, 23):
        check(fast, module, drawn(1, 3, size, size + 1))
    assert fast.cache_info().builds == 4
    for size in (20, 31, 33, 18, 40):
        check(fast, module, drawn(1, 3, size, size + 1))
    assert fast.cache_info().builds == 5


def test_degenerate_size_is_specialized_alone() -> None:
    module = Slices()
    fast = compiled(module)
    for size in (5, 2, 7, 3):  # of two the second slice is one
        check(fast, module, drawn(2, size, 8))
    assert fast.cache_info().builds == 3


def test_explain_shows_symbols_and_ranges() -> None:
    module = Linear()
    fast = compiled(module)
    for rows in (3, 5):
        check(fast, module, drawn(rows, 8))
    text = str(fast.explain())
    assert "float32[s0, 8]" in text
    assert "2 <= s0" in text
    assert "tuned for 48" in text


class Six(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.size(0) == 6 else x - 1


def test_explain_shows_constant_sizes() -> None:
    fast = compiled(Six(), dynamic=True)
    for columns in (4, 5):
        check(fast, Six(), drawn(6, columns))
    (signature,) = fast.explain().signatures
    assert signature.signature == "(float32[6, s0] cpu)"
    assert signature.shapes[1] == "6 * s0 <= 2147483647"


def test_next_process_loads_the_general_program(tmp_path: Path) -> None:
    module = Parity()
    first = compiled(module, cache=str(tmp_path))
    for rows in (3, 5, 4):
        check(first, module, drawn(rows, 8))
    assert first.cache_info().builds == 3
    del first
    later = compiled(module, cache=str(tmp_path), dynamic=True)
    for rows in (8, 7):
        check(later, module, drawn(rows, 8))
    info = later.cache_info()
    assert info.builds <= 2


def test_gradients_lead_to_the_weights_through_any_shape() -> None:
    module = Linear()
    fast = compiled(module)
    for rows in (3, 5, 6):
        x = drawn(rows, 8)
        fast.zero_grad()
        fast(x).sum().backward()
        (expected,) = torch.autograd.grad(module(x).sum(), module.linear.weight)
        torch.testing.assert_close(fast.linear.weight.grad, expected)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)

    def forward(self, ids: torch.Tensor, scale: float) -> torch.Tensor:
        return self.table(ids).mean(1) * scale


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_all_classes_of_sizes_are_made_ahead(dynamic: bool | None) -> None:
    module = Linear()
    fast = compiled(module, dynamic)
    info = fast.warmup([(Dim("rows", max=100), 8)])
    assert info.builds == 2  # up to 64 and up to 256
    for rows in (2, 17, 64, 65, 100):
        check(fast, module, drawn(rows, 8))
    assert fast.warmup([(Dim("rows", max=100), 8)]).builds == 2
    check(fast, module, drawn(101, 8))
    assert fast.cache_info().builds == 3


def test_warmup_generalizes_earlier_shapes() -> None:
    module = Linear()
    fast = compiled(module)
    for rows in (2, 3):
        check(fast, module, drawn(rows, 8))
    fast.warmup([(Dim.AUTO(max=16), 8)])
    builds = fast.cache_info().builds
    for rows in (2, 3, 4, 5):
        check(fast, module, drawn(rows, 8))
    assert fast.cache_info().builds == builds


def test_dims_may_stand_for_any_size_of_any_argument() -> None:
    torch.manual_seed(0)
    rows, length = Dim("rows", max=4), Dim("length", max=4)
    module = Embedded().eval()
    fast = compiled(module)
    ids = TensorSpec((rows, length), torch.int64)
    assert fast.warmup({"ids": ids, "scale": 0.5}).builds == 1
    with torch.no_grad():
        for shape in ((2, 3), (4, 4), (3, 2)):
            ids = torch.zeros(shape, dtype=torch.int64)
            torch.testing.assert_close(fast(ids=ids, scale=0.5), module(ids, 0.5))
    assert fast.cache_info().builds == 1

    pair = compiled(Pair())
    assert pair.warmup([(rows, 8), (rows,)]).builds == 1
    pair(drawn(4, 8), drawn(4))
    assert pair.cache_info().builds == 1
    pair(drawn(4, 8), drawn(3))  # these are not equal
    assert pair.cache_info().builds == 2


def test_ungeneralizable_dim_warns_and_builds_one_size() -> None:
    fast = compiled(nn.Upsample(scale_factor=1.3, mode="bicubic"))
    with pytest.warns(TvmifyWarning, match="no program for all sizes of"):
        info = fast.warmup([(1, 3, Dim("height"), 8)])
    assert info.builds == 1


@pytest.mark.parametrize("size", [Dim.STATIC, Dim("n", max=1)])
def test_invariable_dim_is_refused(size: Any) -> None:
    with pytest.raises(WarmUpError, match="is static"):
        compiled(Linear()).warmup([(size, 8)])


class Widths(Linear):
    """TorchScript does not know star arguments, and the number is a constant of the program."""

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.linear(tensors[0]) * {3: 2.0, 5: 3.0, 6: 4.0}[int(tensors[0].shape[0])]


class Cases(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.size(0) == 3:
            return self.linear(x)
        return self.linear(x) * 2 if x.size(0) == 5 else self.linear(x) * 3


@pytest.fixture
def recordings(count_calls: Callable[..., list[Any]]) -> list[str]:
    """Get the name of each module that is recorded from now on."""
    return count_calls(exporting, "_export", lambda module, *rest: type(module).__name__)


@pytest.mark.parametrize("cls", [Widths, Cases])
def test_static_program_is_captured_once(cls: type[Linear], recordings: list[str]) -> None:
    module = cls()
    fast = compiled(module)
    for rows, times in ((3, 1), (5, 2)):
        check(fast, module, drawn(rows, 8))
        assert len(recordings) == times
    assert fast.cache_info().builds == 2


def test_uncompilable_program_is_captured_once_per_shape(recordings: list[str]) -> None:
    def decides(*tensors: torch.Tensor) -> torch.Tensor:
        return tensors[0].relu() if tensors[0].sum() > 0 else tensors[0] * 2

    fast = decorate(decides, cache=False)
    with pytest.warns(TvmifyWarning, match="depends on the values"):
        for rows, times in ((3, 1), (5, 2)):
            torch.testing.assert_close(fast(drawn(rows, 8)), decides(drawn(rows, 8)))
            assert len(recordings) == times


def test_failing_call_does_not_block_others() -> None:
    module = Linear()
    fast = compiled(module, strict=False)
    for columns in (7, 9):
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            fast(drawn(3, columns))
    for rows in (3, 5, 6, 7):
        check(fast, module, drawn(rows, 8))
    assert fast.cache_info().builds == 2


class Counted(Linear):
    """Sizes among the results: of an axis, computed from some, and all of a tensor."""

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        y = self.linear(x)
        return y, x.shape[0], y.size(0) * 2 + 1, y.shape, {"last": (x.size(1), y[1:].size())}


class CountedScripted(Linear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:  # type: ignore[override]
        return self.linear(x), x.size(0) // 2


@pytest.mark.parametrize("cls", [Counted, CountedScripted])
def test_returned_sizes_are_those_of_the_call(cls: type[Linear]) -> None:
    module = cls()
    fast = compiled(module)
    for rows in (3, 5, 6, 4, 64):
        x = drawn(rows, 8)
        found, expected = fast(x), module(x)
        assert str(found[1:]) == str(expected[1:])
        torch.testing.assert_close(found[0], expected[0])
        found[0].sum().backward()  # eager PyTorch computes it
    assert fast.cache_info().builds == 2
    assert fast.cache_info().eager == 0


class Scaled(Linear):
    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:  # type: ignore[override]
        return self.linear(x) * scale


class ScaledRecorded(Linear):
    def forward(self, *given: Any) -> torch.Tensor:  # type: ignore[override]
        return self.linear(given[0]) * given[1]


class Cut(Linear):
    """One number decides on a shape."""

    def forward(self, x: torch.Tensor, scale: float, kept: int) -> torch.Tensor:  # type: ignore[override]
        return (self.linear(x) * scale)[:, :kept]


@pytest.mark.parametrize("cls", [Scaled, ScaledRecorded])
@pytest.mark.parametrize("dynamic", [None, True])
def test_one_program_serves_any_sizes_and_numbers(cls: type[Linear], dynamic: bool | None) -> None:
    module = cls()
    fast = compiled(module, dynamic)
    for rows, scale in ((3, 0.5), (5, 0.25), (6, -2.0), (7, 3.5), (2, 0.0)):
        check(fast, module, drawn(rows, 8), scale)
    before = fast.cache_info()
    for rows, scale in ((6, 4.5), (3, 1.5), (7, -1.0)):
        check(fast, module, drawn(rows, 8), scale)
    after = fast.cache_info()
    assert (after.builds, after.eager) == (1 if dynamic else 2, 0)
    assert (after.misses, after.hits) == (before.misses, before.hits + 3)


def test_forgetting_the_signatures_of_a_program_builds_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(numbers, "_MOST_SIGNATURES", 2)
    module = Scaled()
    fast = compiled(module)
    for rows in (*range(2, 9), *range(2, 9)):
        check(fast, module, drawn(rows, 8), rows / 8)
    assert (fast.cache_info().builds, fast.cache_info().eager) == (2, 0)


def test_shape_deciding_number_is_part_of_the_key() -> None:
    module = Cut()
    fast = compiled(module)
    for rows, scale in ((3, 0.5), (5, 0.25), (6, -2.0), (7, 3.5)):
        check(fast, module, drawn(rows, 8), scale, 4)
    assert fast.cache_info().builds <= 3
    check(fast, module, drawn(7, 8), 0.125, 5)
