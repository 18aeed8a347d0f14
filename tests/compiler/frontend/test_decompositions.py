from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.compiler.programs import compiled, executed


@pytest.mark.parametrize("wrong", ["input", "target"])
def test_cross_entropy_of_what_is_no_probability_is_an_error(wrong: str) -> None:
    program = F.binary_cross_entropy
    x, y = torch.rand(5), torch.rand(5)
    artifact = compiled(program, x, y)
    torch.testing.assert_close(executed(artifact, program, x, y), program(x, y))
    bad = (x + 1, y) if wrong == "input" else (x, y - 1)
    with pytest.raises(RuntimeError, match=f"all elements of {wrong} should be between 0 and 1"):
        executed(artifact, program, *bad)


def test_the_inverse_of_a_singular_tensor_is_an_error() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.tensorinv(x.view(4, 2, 2), 1) * 2

    x = torch.randn(4, 4) + 4 * torch.eye(4)
    artifact = compiled(program, x)
    torch.testing.assert_close(executed(artifact, program, x), program(x))
    with pytest.raises(RuntimeError, match="singular"):
        executed(artifact, program, torch.zeros(4, 4))
