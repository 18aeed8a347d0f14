"""``flex_attention`` under ``torch.compile``."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import tvmify


def attend(q: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    def score(score: torch.Tensor, b: object, h: object, i: object, j: object) -> torch.Tensor:
        return torch.where(i >= j, score + bias[h], -float("inf"))

    return flex_attention(q, q * 2, q + 1, score_mod=score).sin()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_users_score_is_compiled() -> None:
    torch.manual_seed(0)
    q, bias = torch.randn(1, 2, 5, 8), torch.tensor([0.5, -2.0])
    compiled = torch.compile(attend, backend="tvmify", options={"compare": False, "strict": True})
    with torch.no_grad():
        torch.testing.assert_close(compiled(q, bias), attend(q, bias))
    assert tvmify.cache_info(compiled).eager == 0
