"""However a model writes attention, and however it is captured, one kernel computes all of it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compiler.programs import Program, check, check_values, executed, is_fused, target
from tests.tolerances import assert_close_to_reference
from tvmify.artifact import Artifact
from tvmify.capture import capture
from tvmify.compiler import compile

BATCH, PLACES, HEADS, SIZE = 2, 20, 4, 8
WIDTH = HEADS * SIZE


class Decomposed(nn.Module):
    """The base of all variants."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.scale = SIZE**-0.5
        self.register_buffer("lower", torch.ones(1, 1, PLACES, PLACES).tril())
        self.register_buffer("bias", torch.randn(1, HEADS, PLACES, PLACES))


class NanoGPT(Decomposed):
    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.qkv(x).split(c, dim=2)
        k = k.view(b, t, 4, c // 4).transpose(1, 2)
        q = q.view(b, t, 4, c // 4).transpose(1, 2)
        v = v.view(b, t, 4, c // 4).transpose(1, 2)
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        hidden = self.lower[:, :, :t, :t] == 0  # type: ignore[index]
        scores = scores.masked_fill(hidden, float("-inf"))
        weights = self.dropout(F.softmax(scores, dim=-1))
        return self.out((weights @ v).transpose(1, 2).contiguous().view(b, t, c))


class Bert(Decomposed):
    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = [
            part.view(b, t, 4, 8).permute(0, 2, 1, 3) for part in self.qkv(x).chunk(3, dim=-1)
        ]
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(8)
        scores = scores + (1.0 - padding) * -10000.0
        weights = self.dropout(F.softmax(scores, dim=-1))
        mixed = torch.matmul(weights, v).permute(0, 2, 1, 3).contiguous()
        return self.out(mixed.view(b, t, c))


class Annotated(Decomposed):
    """The annotated transformer."""

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        b, _, c = x.size()
        q, k, v = [part.view(b, -1, 4, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)]
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
        weights = scores.masked_fill(padding == 0, -1e9).softmax(dim=-1)
        return self.out(torch.matmul(weights, v).transpose(1, 2).contiguous().view(b, -1, c))


class T5(Decomposed):
    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = [part.view(b, t, 4, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)]
        scores = torch.matmul(q, k.transpose(3, 2))
        scores += self.bias + (1 - padding) * -1e4
        weights = F.softmax(scores.float(), dim=-1).type_as(scores)
        return self.out(torch.matmul(weights, v).transpose(1, 2).contiguous().view(b, t, c))


class Timm(Decomposed):
    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 4, c // 4).permute(2, 0, 3, 1, 4).unbind(0)
        weights = self.dropout(((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1))
        return self.out((weights @ v).transpose(1, 2).reshape(b, n, c))


class TimmBefore(Decomposed):
    """As in timm before version 0.6."""

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, 4, c // 4).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        weights = ((q @ k.transpose(-2, -1)) * self.scale).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, n, c))


class NeoX(Decomposed):
    """Queries, keys and values of each head are next to each other."""

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        b, n, c = x.shape
        qkv = self.qkv(x).view(b, n, 4, 3, 8)
        q, k, v = [qkv[..., i, :].transpose(1, 2) for i in range(3)]
        weights = ((q @ k.transpose(-2, -1)) * self.scale).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, n, c))


def joined(x: Tensor) -> Tensor:
    """``[batch · heads, positions, size]``."""
    b, t, _ = x.shape
    return x.reshape(b, t, 4, 8).transpose(1, 2).reshape(b * 4, t, 8)


def parted(x: Tensor) -> Tensor:
    heads, t, size = x.shape
    return x.view(heads // 4, 4, t, size).transpose(1, 2).reshape(heads // 4, t, 4 * size)


class Bmm(Decomposed):
    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        q, k, v = [joined(part) for part in self.qkv(x).chunk(3, dim=-1)]
        scores = torch.bmm(q, k.transpose(1, 2)) * self.scale
        return self.out(parted(torch.bmm(F.softmax(scores, dim=-1), v)))


class Baddbmm(Decomposed):
    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        q, k, v = [joined(part) for part in self.qkv(x).chunk(3, dim=-1)]
        bias = self.bias.expand(x.shape[0], -1, -1, -1).reshape(-1, x.shape[1], x.shape[1])
        scores = torch.baddbmm(bias, q, k.transpose(-1, -2), alpha=0.25)
        return self.out(parted(torch.bmm(scores.softmax(-1), v)))


class Bart(Decomposed):
    """Batches and heads are separate axes for the mask only."""

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = [joined(part) for part in self.qkv(x).chunk(3, dim=-1)]
        scores = torch.bmm(q * self.scale, k.transpose(1, 2))
        scores = scores.view(b, 4, t, t) + (1.0 - padding) * -1e4
        weights = F.softmax(scores.view(b * 4, t, t), dim=-1)
        return self.out(parted(torch.bmm(self.dropout(weights), v)))


class Fairseq(Decomposed):
    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = [joined(part) for part in self.qkv(x).chunk(3, dim=-1)]
        scores = torch.bmm(q, k.transpose(1, 2)).view(b, 4, t, t)
        scores = scores.masked_fill(padding == 0, float("-inf")).view(b * 4, t, t)
        return self.out(parted(torch.bmm(scores.softmax(-1), v)))


class Bloom(Decomposed):
    """A mask with batches and heads on one axis, and one with separate axes."""

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = [joined(part) for part in self.qkv(x).chunk(3, dim=-1)]
        alibi = torch.arange(t, dtype=x.dtype).repeat(b * 4, 1, 1)
        scores = alibi.baddbmm(q, k.transpose(1, 2), beta=1.0, alpha=self.scale)
        scores = scores.view(b, 4, t, t) + (1.0 - padding) * -1e4
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(x.dtype)
        return self.out(parted(torch.bmm(weights.view(b * 4, t, t), v)))


class Swin(Decomposed):
    """A mask for each window, a bias for each head."""

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 4, c // 4).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q * self.scale) @ k.transpose(-2, -1) + self.bias  # type: ignore[operator]
        windows = (torch.arange(2 * n).view(2, 1, n) - torch.arange(n).view(n, 1)) % 3 * 10.0
        scores = scores.view(b // 2, 2, 4, n, n) + windows.unsqueeze(1).unsqueeze(0)
        weights = scores.view(-1, 4, n, n).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, n, c))


class CausalBias(Decomposed):
    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = [part.view(b, t, 4, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)]
        scores = q @ k.transpose(-2, -1) * self.scale + self.bias[:, :, :t, :t]  # type: ignore[index]
        scores = scores.masked_fill(torch.ones(t, t).triu(1) > 0, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c))


class Einsum(Decomposed):
    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = [part.reshape(b, t, 4, 8) for part in self.qkv(x).chunk(3, dim=-1)]
        weights = torch.softmax(torch.einsum("blhd,bshd->bhls", q, k) * self.scale, dim=-1)
        return self.out(torch.einsum("bhls,bshd->blhd", weights, v).reshape(b, t, c))


class EinsumOfHeads(Decomposed):
    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        b, t, c = x.shape
        parts = self.qkv(x).chunk(3, dim=-1)
        q, k, v = [part.reshape(b, t, 4, 8).permute(0, 2, 1, 3) for part in parts]
        weights = (torch.einsum("bhid,bhjd->bhij", q, k) * self.scale).softmax(dim=-1)
        mixed = torch.einsum("bhij,bhjd->bhid", weights, v)
        return self.out(mixed.permute(0, 2, 1, 3).reshape(b, t, c))


class Image(Decomposed):
    """Positions are last, as in networks that generate images."""

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        q, k, v = [part.transpose(1, 2).contiguous() for part in self.qkv(x).chunk(3, dim=-1)]
        weights = F.softmax(torch.bmm(q.permute(0, 2, 1), k) * self.scale, dim=2)
        return self.out(torch.bmm(v, weights.permute(0, 2, 1)).transpose(1, 2))


class NonLocal(Decomposed):
    """As `Image`, but the values are transposed."""

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        q, k, v = [part.transpose(1, 2).contiguous() for part in self.qkv(x).chunk(3, dim=-1)]
        weights = F.softmax(torch.matmul(q.permute(0, 2, 1), k), dim=-1)
        return self.out(torch.matmul(weights, v.permute(0, 2, 1)))


class Functional(Decomposed):
    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, 4, c // 4).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(b, n, c))


VARIANTS: tuple[type[Decomposed], ...] = (
    NanoGPT,
    Bert,
    Annotated,
    T5,
    Timm,
    TimmBefore,
    NeoX,
    Bmm,
    Baddbmm,
    Bart,
    Fairseq,
    Bloom,
    Swin,
    CausalBias,
    Einsum,
    EinsumOfHeads,
    Image,
    NonLocal,
    Functional,
)


def through_torchscript(module: nn.Module, *args: Any) -> Artifact:
    with torch.no_grad():
        program = capture(module, args, {})
        assert program.method == "torchscript", program.reason
        artifact = compile(program.export(args, {}), target())
        result = executed(artifact, module, *args)
    assert_close_to_reference(result, module, args)
    return artifact


#: Variants for which TorchScript has special nodes: constants, lists, in-place operators, einsums.
SCRIPTED = (NanoGPT, Bert, T5, NeoX, Baddbmm, Bloom, Swin, CausalBias, Einsum, Functional)


@pytest.mark.parametrize(
    ("through", "variant"),
    [(check, each) for each in VARIANTS] + [(through_torchscript, each) for each in SCRIPTED],
    ids=lambda value: value.__name__,
)
def test_variants(through: Callable[..., Artifact], variant: type[Decomposed]):
    module = variant().eval()
    padding = torch.ones(BATCH, 1, 1, PLACES)
    padding[1, ..., -5:] = 0
    artifact = through(module, torch.randn(BATCH, PLACES, WIDTH), padding)
    kernels = artifact.report["kernels"]
    called = {name: rule for name, rule in kernels.items() if "pack" not in name}
    rules = list(called.values())
    assert rules.count("attention") == 1
    assert rules.count("matmul") == 2  # the projections
    assert "reduction" not in rules
    moving = {"transpose", "slice", "concatenate"}
    assert not [name for name in called if moving & set(re.split("[0-9_]+", name))]


def products(weigh: Callable[[Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weigh(q @ k.transpose(-1, -2)) @ v


UNLIKE: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax over queries": lambda x: x.softmax(-2),
    "transposed weights": lambda x: x.softmax(-1).transpose(-1, -2),
    "scaled by zero": lambda x: (x * 0).softmax(-1),
    "scaled weights": lambda x: x.softmax(-1) * 2,
    "a larger mask": lambda x: (x + torch.ones(3, 1, 1, 1)).softmax(-1)[1],
}


@pytest.mark.parametrize("name", UNLIKE)
def test_similar_patterns_are_not_attention(name: str):
    qkv = [torch.randn(2, 6, 8) for _ in range(3)]
    artifact = check(lambda *qkv: products(UNLIKE[name], *qkv), *qkv)
    assert not is_fused(artifact)


@pytest.mark.parametrize(
    "taken",
    [
        lambda x: x[:, :, 2:],  # some of the positions
        lambda x: x[1:],  # some of the batches
        lambda x: x[:, 1:3],  # some of the heads
        lambda x: x[:, ::2],
        lambda x: x.flip(1),
        lambda x: x[:, :, ::2],
        lambda x: x[..., ::2],  # some of the elements of each head
        lambda x: x[..., 4:],
    ],
)
def test_operands_are_found_through_views(taken: Callable[[Tensor], Tensor]):
    def program(x: Tensor) -> Tensor:
        q, k, v = (x.view(3, 10, 3, 4, 8).permute(2, 0, 3, 1, 4)).unbind(0)
        return F.scaled_dot_product_attention(taken(q), taken(k), taken(v))

    check(Program(program), torch.randn(3, 10, 96))


def test_operands_of_one_place_one_head_or_one_element():
    for shape in [(2, 4, 1, 8), (1, 1, 6, 8), (2, 4, 6, 1), (2, 1, 6, 1), (1, 1, 1, 1)]:
        x = torch.randn(shape[0], shape[2], shape[1] * shape[3])

        def program(x: Tensor, shape: tuple[int, ...] = shape) -> Tensor:
            q = x.view(shape[0], shape[2], shape[1], shape[3]).transpose(1, 2)
            return F.scaled_dot_product_attention(q, q, q)

        check(program, x)


# ------------------------------------------------------------------------------------- odd masks

LEAST = torch.finfo(torch.float32).min


def qkv() -> list[Tensor]:
    return [torch.randn(BATCH, HEADS, PLACES, SIZE) for _ in range(3)]


def attend(masked: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda q, k, v, mask: masked(q @ k.transpose(-1, -2), mask).softmax(-1) @ v


def added(scores: Tensor, mask: Tensor) -> Tensor:
    return scores + mask


def filled(number: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda scores, mask: scores.masked_fill(mask, number)


def masks(shape: tuple[int, ...]) -> dict[str, tuple[Callable[..., Tensor], Tensor]]:
    hidden = torch.rand(shape) > 0.6
    return {
        "added": (added, torch.randn(shape)),
        "hidden": (filled(-math.inf), hidden),
        "filled": (filled(-1.0), hidden),
        "all hidden": (filled(-math.inf), torch.ones_like(hidden)),
    }


@pytest.mark.parametrize("kind", masks(()))
@pytest.mark.parametrize("shape", [(), (PLACES,), (1, PLACES), (HEADS, 1, 1)], ids=str)
def test_masks_of_few_axes(shape: tuple[int, ...], kind: str):
    masked, mask = masks(shape)[kind]
    assert is_fused(check(Program(attend(masked)), *qkv(), mask))


@pytest.mark.parametrize("kind", masks(()))
@pytest.mark.parametrize("shape", [(), (PLACES,), (PLACES, PLACES), (HEADS, 1, 1)], ids=str)
def test_masks_of_batches(shape: tuple[int, ...], kind: str):
    masked, mask = masks(shape)[kind]
    assert is_fused(check(Program(attend(masked)), *(x[0] for x in qkv()), mask))


def test_expanded_key_mask():
    shown = torch.rand(PLACES) > 0.4

    def program(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        mask = mask.expand(PLACES, PLACES)
        return F.scaled_dot_product_attention(q, k, v, mask)

    assert is_fused(check(Program(program), *qkv(), shown))


def few_seen(queries: int) -> Tensor:
    """Return a mask: the first batch sees three keys, and the second none."""
    hidden = torch.tensor([False, True]).view(2, 1, 1, 1).expand(2, 1, queries, PLACES).clone()
    hidden[0, 0, :, 3:] = True
    return hidden


@pytest.mark.parametrize("queries", [1, PLACES])
@pytest.mark.parametrize("number", [-1e9, -1e30, LEAST, -math.inf, 1e30, 3e38, math.nan])
def test_numbers_that_hide(number: float, queries: int):
    """A query with all keys masked by a finite number attends to all of them equally."""
    query, *others = qkv()
    query = query[:, :, :queries]
    check(Program(attend(filled(number))), query, *others, few_seen(queries))


@pytest.mark.parametrize("queries", [1, PLACES])
@pytest.mark.parametrize("program", [attend(added), F.scaled_dot_product_attention])
def test_numbers_that_hide_by_a_sum(program: Callable[..., Tensor], queries: int):
    query, *others = qkv()
    args = [query[:, :, :queries], *others]
    hidden = few_seen(queries)
    zeros = torch.zeros(hidden.shape)
    artifact = check(Program(program), *args, zeros)
    for number in (-1e9, -1e30, LEAST, -math.inf):
        check_values(artifact, Program(program), *args, zeros.masked_fill(hidden, number))


@pytest.mark.parametrize("queries", [1, PLACES])
@pytest.mark.parametrize("fill", [-math.inf, LEAST])
def test_hidden_scores_may_be_anything(fill: float, queries: int):
    """As in a cache of keys and values that is not written yet."""
    query, key, value = qkv()
    query, program = query[:, :, :queries], Program(attend(filled(fill)))
    hidden = torch.zeros(PLACES, dtype=torch.bool)
    hidden[3] = True
    artifact = check(program, query, key, value, hidden)
    for number in (1e38, math.inf, math.nan):
        value = value.clone()
        value[0, 0, 3] = number
        check_values(artifact, program, query, key, value, hidden)


FILLS = {
    "an integer": torch.tensor(0),
    "a flag": torch.tensor(True),
    "half precision": torch.tensor(-65504.0, dtype=torch.float16),
    "beyond float32": torch.tensor(-1e39, dtype=torch.float64),
}


@pytest.mark.parametrize("kind", FILLS)
def test_a_number_is_rounded_to_the_dtype_of_scores(kind: str):
    shown = torch.rand(PLACES, PLACES) > 0.4
    shown[2] = False
    number = FILLS[kind]
    program = Program(attend(lambda scores, mask: torch.where(mask, scores, number)))
    assert is_fused(check(program, *qkv(), shown))


def test_mask_promoting_scores_to_float64():
    q, k, v = qkv()
    mask = torch.randn(PLACES, PLACES, dtype=torch.float64)
    assert not is_fused(check(Program(attend(added)), q, k, v.double(), mask))
    number = torch.full((1,), -5.0, dtype=torch.float64)
    program = Program(attend(lambda scores, mask: torch.where(mask > 0, scores, number)))
    assert not is_fused(check(program, q, k, v.double(), mask))


def test_heads_without_elements():
    q, k, v = qkv()
    check(Program(lambda q, k, v: (q @ k.mT).softmax(-1) @ v), q[..., :0], k[..., :0], v)


# ------------------------------------------------------------------------- views of the scores


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_vector_of_values_behind_a_view(is_transposed: bool):
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.transpose(1, 2)).view(5, 6).softmax(-1)
        return v @ weights.t() if is_transposed else weights @ v

    artifact = check(Program(program), torch.randn(1, 5, 8), torch.randn(1, 6, 8), torch.randn(6))
    assert not is_fused(artifact)


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 5, 5), (4, 0, 5), (4, 5, 0)])
def test_views_of_no_scores(batch: int, queries: int, keys: int):
    def program(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = (q @ k.transpose(1, 2)).view(batch // 4, 4, queries, keys)
        return (scores.view(batch, queries, keys) + mask).softmax(-1) @ v

    sizes = [(batch, queries, 8), (batch, keys, 8), (batch, keys, 8), (1, queries, keys)]
    check(Program(program), *(torch.randn(size) for size in sizes))


def test_causal_mask_behind_a_view_is_not_materialized():
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.full((PLACES, PLACES), -math.inf).triu(1)
        scores = (q @ k.transpose(1, 2) + mask).view(BATCH, HEADS, PLACES, PLACES)
        return scores.softmax(-1).view(BATCH * HEADS, PLACES, PLACES) @ v

    artifact = check(Program(program), *(x.flatten(0, 1) for x in qkv()))
    assert is_fused(artifact)
    assert not [name for name in artifact.report["kernels"] if "mask" in name]
