"""Rows of the table of processors in ``docs/versions.md``, on a processor with more features."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tvmify
from tests.tolerances import assert_close_to_reference
from tvmify.errors import UnsupportedTarget
from tvmify.runtime import cpu_features

_AVX2 = ["avx", "avx2", "f16c", "fma"]
_AVX512 = [*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"]
_BF16 = [*_AVX512, "avx512bf16"]
ROWS = {"AVX2": _AVX2, "AVX-512": _AVX512, "AVX-512 BF16": _BF16, "AMX": [*_BF16, "amx-bf16"]}
#: Features that libraries use only if the processor has them; our own code never uses them.
OPTIONAL = {"amx-bf16"}


class Net(nn.Module):
    """Convolutions, a product and a reduction in float32, and a product in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 3, padding=1)
        self.depthwise = nn.Conv2d(32, 32, 3, groups=32)
        self.linear = nn.Linear(32 * 36, 64)
        self.narrow = nn.Linear(64, 48).bfloat16()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.relu(self.depthwise(torch.relu(self.conv(x))))
        y = nn.functional.layer_norm(self.linear(y.flatten(1)), (64,))
        return y.softmax(-1), self.narrow(y.to(self.narrow.weight.dtype))


def runs(row: str) -> bool:
    return set(ROWS[row]) - OPTIONAL <= set(cpu_features())


def target_of(row: str) -> dict[str, object]:
    if not runs(row):
        pytest.skip(f"this processor has no {row}")
    mattr = [f"+{feature}" for feature in ROWS[row]]
    return {"kind": "llvm", "mtriple": "x86_64-unknown-linux-gnu", "mcpu": "x86-64", "mattr": mattr}


@pytest.mark.parametrize("row", ROWS)
def test_each_target_matches_eager(row: str) -> None:
    torch.manual_seed(0)
    net = Net().eval()
    fast = tvmify.tvmify(net, target=target_of(row), strict=True)
    x = torch.randn(4, 3, 8, 8)
    with torch.inference_mode():
        assert_close_to_reference(fast(x), net, (x,))
    assert fast.cache_info().builds + fast.cache_info().disk_hits == 1


def test_file_for_all_rows_uses_the_first_fit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(4, 3, 8, 8)
    wanted = [row for row in reversed(ROWS) if runs(row)]
    absent = {"kind": "llvm", "mattr": ["+avx512f", "+amx-tile"]}
    file = tmp_path / "net.pt"
    tvmify.save(net, file, example_inputs=x, targets=[absent, *map(target_of, wanted)])
    loaded = tvmify.load(file, strict=True)
    with torch.inference_mode():
        assert_close_to_reference(loaded(x), net, (x,))
    used = ["not used" not in line for line in loaded._tvmify.explain()]
    assert used[0] is False and used[1] is True and len(used) == 1 + len(wanted)


def test_a_program_for_amx_leaves_products_of_bfloat16_to_a_library() -> None:
    torch.manual_seed(0)
    net, x = nn.Linear(768, 768).bfloat16().eval(), torch.randn(64, 768).bfloat16()
    fast = tvmify.tvmify(net, target=target_of("AMX"), strict=True, compare=False)
    with torch.inference_mode():
        assert_close_to_reference(fast(x), net, (x,))
    assert "by a library" in fast.explain()


def test_an_unknown_attribute_is_named() -> None:
    fast = tvmify.tvmify(nn.Linear(8, 4).eval(), target={"kind": "llvm", "foo": 1}, strict=True)
    with pytest.raises(UnsupportedTarget, match=r"'foo'.*Correct the option target="):
        fast(torch.randn(2, 8))
