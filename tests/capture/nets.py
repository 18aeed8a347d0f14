"""Small modules, each with one feature that capture has to get right.

Annotations are evaluated here: TorchScript cannot read annotations of attributes as strings.
"""

from typing import Any, Dict, List, NamedTuple, Optional, Tuple, Union  # noqa: UP035

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# TorchScript in torch 2.13 reads the old spellings of generic types everywhere.
# ruff: noqa: UP006, UP007, UP045


class Pair(NamedTuple):
    first: Tensor
    second: Optional[Tensor]


class Convolutions(nn.Module):
    """Batch norm has a branch on ``training``, convolutions one on their padding mode."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, stride=2, groups=8, bias=False)
        self.blocks = nn.Sequential(nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Hardswish())
        self.up = nn.ConvTranspose2d(4, 2, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn(self.conv(x))), 2)
        return self.up(self.blocks(self.depthwise(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.heads = 4

    def forward(self, x: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).unbind(2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, width))


class ShapeLoop(nn.Module):
    """Loops and branches on sizes, flags and dtypes, with carried numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = [0.5, 1.5, 2.5]
        self.reverse = True

    def forward(self, x: Tensor, steps: int = 2) -> Tensor:
        total = torch.zeros_like(x[0])
        size = x.size(0)
        for i in range(size):
            if i % 2 == 0:
                total = total + x[i] * self.scales[i % len(self.scales)]
            elif i < 100:
                total = total - x[i]
        while steps > 0 and size > 1:
            total = total * 2
            steps -= 1
            size = size // 2
        if self.reverse:
            total = total.flip(0)
        if x.dtype == torch.float64:
            return total.to(torch.float32)
        return total


class Structures(nn.Module):
    """Lists, dictionaries, tuples and NamedTuples, in and out."""

    def forward(
        self, tensors: List[Tensor], options: Dict[str, Tensor], pair: Pair, scale: float = 2.0
    ) -> Tuple[Dict[str, Tensor], List[Tensor], Pair, int]:
        result: Dict[str, Tensor] = {}
        for name, tensor in options.items():
            result[name + "!"] = tensor * scale
        collected: List[Tensor] = []
        for i, tensor in enumerate(tensors):
            collected.append(tensor + float(i))
        second = pair.second
        if second is not None:
            collected.insert(0, second)
        collected.extend([pair.first])
        last = collected.pop()
        collected[0] = collected[0] - 1
        return result, collected[::-1], Pair(last, None), len(collected)


class TensorAttributes(nn.Module):
    """Tensors that are not registered, also in a list; literals; a non-persistent buffer."""

    tables: List[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.plain = torch.rand(4)
        self.tables = [torch.rand(4), torch.rand(4)]
        self.register_buffer("unsaved", torch.rand(4), persistent=False)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) * self.plain + self.unsaved
        for table in self.tables:
            x = x + table
        return x * torch.tensor([1.0, 2.0, 3.0, 4.0])


class Indexing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.tensor([2, 0, 1]))

    def forward(self, x: Tensor) -> Tensor:
        y = x[self.rows][:, None, ..., 1:3]
        z = x.clone()
        z[0] = 1.0
        z[self.rows, 0] = y[:, 0, 0]
        first, second = z.chunk(2, dim=1)
        values, order = torch.topk(first, 2)
        return torch.cat([values, order.to(x.dtype), second], dim=1) + x.T.mean()


class Arithmetic(nn.Module):
    """Python numbers and strings; TorchScript's operators on them are not the dispatcher's."""

    def __init__(self) -> None:
        super().__init__()
        self.mode = "half"

    def forward(self, x: Tensor, factor: float = 3.0, name: str = "no") -> Tensor:
        n = x.shape[-1]
        half = n // 2 if self.mode == "half" else n
        number = (half**2 - n % 3) / 4 + max(n, 5) + abs(-half) + round(factor / 7.0)
        if name.upper().startswith("YES") or not n > 2:
            number = -number
        assert len(x.shape) == 2, f"got {x.shape}"
        sizes = sorted([n, half, int(factor)])
        x = x.new_full([sizes[0], n], number) + x.sum() + float(sum(sizes))
        return x.to(x.device).type_as(x)


class StringMethods(nn.Module):
    def forward(self, x: Tensor, word: str) -> Tensor:
        return x * len(word.replace("a", "bb").split("b")) + len("-".join([word, word]))


class Optionals(nn.Module):
    def forward(
        self, x: Tensor, shift: Optional[Tensor] = None, flag: bool = False
    ) -> Tuple[Tensor, Optional[Tensor]]:
        if shift is not None:
            x = x + shift
        return (x, shift) if flag else (x, None)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(4, 4)
        self.decode = nn.Linear(4, 4)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


class BranchOnValues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x + 1
        return x - 1


class LoopOnValues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        while x.sum() < 100:
            x = x * 2
        return x


class NumberFromValues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()


class ShapeFromValues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


class SplitByValues(nn.Module):
    """A split into one part only, whose length torch.export knows."""

    def forward(self, x: Tensor) -> Tensor:
        bounds = torch.zeros(1, dtype=torch.long), (x > 2).sum()[None] + x.shape[0]
        lengths = torch.cat(bounds).diff()
        (part,) = x.split(lengths.tolist(), 0)
        return part.softmax(0)


class ChecksArguments(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # `torch.compile` turns validation off by default, for the whole process.
        return torch.distributions.Normal(x, x.exp(), validate_args=True).log_prob(x)


class UnscriptableBranch(nn.Module):
    """The star in the signature keeps it from being scripted."""

    def forward(self, *tensors: Tensor) -> Tensor:
        return tensors[0] + 1 if tensors[0].sum() > 0 else tensors[0]


class Counter(nn.Module):
    calls: int

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.calls


class UnscriptableCounter(Counter):
    def forward(self, *tensors: Tensor) -> Tensor:
        self.calls += 1
        return tensors[0] + self.calls


class Appender(nn.Module):
    seen: List[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.seen = [torch.ones(1)]

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return x


class Accumulator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.total = self.total + x
        return self.total


class UnscriptableAccumulator(Accumulator):
    def forward(self, *tensors: Tensor) -> Tensor:
        self.total = self.total + tensors[0]
        return self.total


class WritesCopy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.double()
        y.add_(1)
        y[0] = 3
        return y


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 2:
            raise ValueError("two dimensions, please")
        return x + 1


class Unscriptable(nn.Module):
    """Lambdas, dictionaries of mixed values and keyword dictionaries: Python, not TorchScript."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.config: Dict[str, Any] = {"scale": 2.0, "act": lambda x: x.relu()}
        self.plain = torch.rand(4)
        self.tables = [torch.rand(4), torch.rand(4)]
        self.register_buffer("unsaved", torch.rand(4), persistent=False)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor, **options: Any) -> Dict[str, Any]:
        x = self.config["act"](self.linear(x)) * self.config["scale"] + self.plain
        x = x + self.tables[options.get("table", 1)] + self.unsaved
        return {"x": x * torch.tensor([1.0, 2.0, 3.0, 4.0]), "pair": Pair(x.sum(), None)}


class Starred(nn.Module):
    """The same program, kept from being scripted by the star."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *tensors: Tensor) -> Any:
        return self.inner(*tensors)


class Unions(nn.Module):
    def forward(self, x: Union[Tensor, int], y: Tensor) -> Tensor:
        if isinstance(x, int):
            return y + x
        return y * x


def plain_function(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x) @ y - 0.5


class Cached(nn.Module):
    """Tensors in a dictionary, under keys that are names of methods or have dots in them."""

    cache: Dict[str, Tensor]

    def __init__(self) -> None:
        super().__init__()
        names = ("cpu", "a.b", "a%2eb", 'said "so"\n')
        self.cache = {name: torch.rand(4) for name in names}

    def forward(self, x: Tensor) -> Tensor:
        cache = self.cache
        return x * cache["cpu"] + cache["a.b"] - 2 * cache["a%2eb"] + cache['said "so"\n']


class CachedByDevice(Cached):
    """Keys with a device, as LeViT uses for the biases of its attention."""

    def forward(self, x: Tensor) -> Tensor:
        cache = {**self.cache}
        return x * cache[str(x.device)] + cache["a.b"] - 2 * cache["a%2eb"]


class CachedByNumber(nn.Module):
    """The key 1 is not the key "1"."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = {1: torch.rand(4), "1": torch.rand(4)}

    def forward(self, x: Tensor, *keys: int) -> Tensor:
        return x * self.cache[1] - self.cache["1"]
