"""Calls that differ in the sizes of tensors, and the programs that serve them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.dispatch.generality.nets import Encoder, Linear, Pair, Slices, check, compiled, drawn
from tvmify import TvmifyWarning
from tvmify import tvmify as decorate
from tvmify.artifact import Artifact
from tvmify.cache import Key
from tvmify.capture import exporting
from tvmify.dispatch import attempt
from tvmify.dispatch.progress import Stages
from tvmify.dispatch.work import Work
from tvmify.errors import BuildError

#: Around the edges of tiles of eight rows, and one beyond the largest class.
LENGTHS = (2, 7, 8, 9, 15, 16, 17, 31, 33, 65)


class Recorded(Encoder):
    """Recorded by torch.export, since TorchScript refuses star arguments."""

    def forward(self, *tensors: Any) -> torch.Tensor:
        return super().forward(*tensors)


class Optional(Linear):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        x = self.linear(x)
        return x if y is None else x + y


class Parity(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x.relu() if x.size(0) % 2 == 1 else x.tanh()


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


def test_sizes_read_by_code_have_no_size_class(tmp_path: Path) -> None:
    module = Linear()
    first = compiled(module, dynamic=True, cache=str(tmp_path))
    for rows, builds in ((64, 1), (9, 1), (65, 2), (40, 2), (80, 2)):
        check(first, module, drawn(rows, 8))
        assert first.cache_info().builds == builds
    later = compiled(module, dynamic=True, cache=str(tmp_path))
    check(later, module, drawn(80, 8))  # the first key has the program for 64 rows
    assert later.cache_info().builds == 0
    assert "tuned for 128" in str(later.explain())


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[Key]:
    """The keys of programs of the second class, none of which can be built."""
    build, failures = Work.build, []

    def fail(work: Work, stages: Stages) -> Artifact:
        if 128 in work.request.varying.hints.values():
            failures.append(work.key)
            raise BuildError("no rule schedules it", "Report it.")
        return build(work, stages)

    monkeypatch.setattr(Work, "build", fail)
    return failures


def test_class_that_cannot_be_built_is_served_by_another(failures: list[Key]) -> None:
    module = Linear()
    fast = compiled(module)
    for rows in (3, 5, 100, 101, 300, 6):
        check(fast, module, drawn(rows, 8))
    info = fast.cache_info()
    assert (info.builds, info.eager, len(failures)) == (2, 0, 1)
    assert "float32[s0, 8]" in str(fast.explain())


def test_program_of_another_class_is_tried_once(
    failures: list[Key], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        loads.append(None)
        raise BuildError("there is no memory", "Free some.")

    loads: list[None] = []
    module = Linear()
    fast = compiled(module)
    for rows in (3, 5):
        check(fast, module, drawn(rows, 8))
    monkeypatch.setattr(attempt, "load_again", fail)
    check(fast, module, drawn(100, 8))
    info = fast.cache_info()
    assert (info.builds, info.eager, len(failures), len(loads)) == (3, 0, 1, 1)


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


def test_degenerate_size_is_specialized_alone() -> None:
    module = Slices()
    fast = compiled(module)
    for size in (5, 2, 7, 3):  # for two, the second slice has one row
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


class Widths(Linear):
    """TorchScript refuses star arguments, and the number is a constant of the program."""

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.linear(tensors[0]) * {3: 2.0, 5: 3.0, 6: 4.0}[int(tensors[0].shape[0])]


class Cases(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.size(0) == 3:
            return self.linear(x)
        return self.linear(x) * 2 if x.size(0) == 5 else self.linear(x) * 3


@pytest.fixture
def recordings(count_calls: Callable[..., list[Any]]) -> list[str]:
    """The names of modules that are recorded from now on."""
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
    """Sizes among the results: of one axis, computed from several, and all of a tensor."""

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        y = self.linear(x)
        return y, x.shape[0], y.size(0) * 2 + 1, y.shape, {"last": (x.size(1), y[1:].size())}


class CountedScripted(Linear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:  # type: ignore[override]
        return self.linear(x), x.size(0) // 2


@pytest.mark.parametrize("cls", [Counted, CountedScripted])
def test_returned_sizes_match_the_call(cls: type[Linear]) -> None:
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
