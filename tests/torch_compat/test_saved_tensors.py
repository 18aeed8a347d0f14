from __future__ import annotations

import torch
from torch.autograd.graph import saved_tensors_hooks

from tvmify.torch_compat.saved_tensors import without_saved_tensors_hooks


def test_saved_tensor_hooks_are_not_called() -> None:
    seen: list[torch.Tensor] = []
    x = torch.ones(2, requires_grad=True)
    with saved_tensors_hooks(lambda tensor: seen.append(tensor) or tensor, lambda tensor: tensor):
        with without_saved_tensors_hooks():
            y = x.exp()
        assert not seen
        x.exp()
        assert len(seen) == 1
    y.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().exp())


def test_no_hooks_by_default() -> None:
    top = torch._C._autograd._top_saved_tensors_default_hooks  # type: ignore[attr-defined]
    with without_saved_tensors_hooks():
        assert top(False) is None
