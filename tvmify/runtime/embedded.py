"""Programs inside of ``torch.export`` programs: the Python half of ``tvmify::execute``.

The operator itself is native (``native/operator.cpp``). Here are its fake kernel, by which
``torch.export`` and ``torch.compile`` see its results without running it, and the two operators
that it calls where its code cannot run, or where gradients are asked for. They run the original,
which the same file holds as a ``torch.export`` program of its own.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

# Loads the library that defines the operators.
import tvmify.runtime.native  # noqa: F401
from tvmify.errors import TvmifyWarning
from tvmify.system import forks
from tvmify.torch_compat.memory import has_memory
from tvmify.torch_compat.tracing import tracing

#: Of the description. Raised whenever the meaning of a line changes; native code refuses others.
FORMAT = 1
#: So many originals a process keeps ready.
_MOST_ORIGINALS = 16

#: Runs an original: takes weights and inputs, returns the tensors of the results.
_Original = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], list[torch.Tensor]]


def description(facts: Mapping[str, object]) -> str:
    """Return the description of a program that ``tvmify::execute`` takes: a line for each fact.

    Parameters
    ----------
    facts
        ``inputs``, ``weights``, ``outputs``
            `kinds` of the tensors that the operator takes and returns.
        ``reads``, ``packs``
            Indices of the inputs that the compiled ``main`` takes, and of the weights that
            ``pack`` takes.
        ``code``, ``features``, ``runtime``, ``sha1``
            The state of the ``CompiledModule`` but for its library.
        ``original``
            `digest` of the bytes of the original.
        ``strict``
            True where it shall be an error if the code cannot run; else absent.
    """
    lines = {"tvmify": FORMAT} | dict(facts)
    return "\n".join(f"{name} {value}" for name, value in lines.items())


def kinds(tensors: Iterable[torch.Tensor]) -> str:
    """Return dtypes and shapes as text: ``float32[1, 3, 224, 224] int64[]``."""
    return " ".join(
        f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors
    )


def digest(data: bytes) -> str:
    """Return by what damaged bytes are told."""
    return hashlib.sha256(data).hexdigest()


@functools.lru_cache(maxsize=64)
def _facts(text: str) -> dict[str, str]:
    lines = (line.partition(" ") for line in text.splitlines())
    return {name: value for name, _, value in lines}


@torch.library.register_fake("tvmify::execute")
def _fake_execute(
    library: torch.Tensor,
    original: torch.Tensor,
    description: str,
    weights: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    device = next((tensor.device for tensor in (*inputs, *weights)), library.device)
    outputs = (kind.partition("[") for kind in _facts(description)["outputs"].split("] "))
    results = []
    for dtype, _, sizes in outputs:
        shape = [int(size) for size in sizes.strip("]").split(",") if size]
        results.append(torch.empty(shape, dtype=getattr(torch, dtype), device=device))
    return results


@torch.library.impl("tvmify::execute_eager", "CompositeExplicitAutograd")
def _execute_eager(
    original: torch.Tensor,
    description: str,
    news: str,
    weights: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Run the original; ``news`` is a reason that nobody has heard of yet."""
    if news:
        message = f"an exported program runs in PyTorch instead of compiled code: {news}"
        warnings.warn(message, TvmifyWarning, stacklevel=2)
    return list(_original(original, description)(weights, inputs))


@torch.library.impl("tvmify::execute_backward", "CompositeExplicitAutograd")
def _execute_backward(
    original: torch.Tensor,
    description: str,
    weights: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    wanted: Sequence[bool],
) -> list[torch.Tensor]:
    """Return the gradients of those weights and inputs that ``wanted`` marks, in their order."""
    tensors = [*weights, *inputs]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*tensors, *gradients)):
        raise NotImplementedError(
            "a program of tvmify.export can be differentiated once, not twice. Use the original "
            "module for gradients of gradients."
        )
    leaves = [
        tensor.detach().requires_grad_(want) for tensor, want in zip(tensors, wanted, strict=True)
    ]
    with _recorded_by_autograd():
        results = _original(original, description)(leaves[: len(weights)], leaves[len(weights) :])
    reached = [(r, g) for r, g in zip(results, gradients, strict=True) if r.requires_grad]
    targets = [leaf for leaf in leaves if leaf.requires_grad]
    return list(
        torch.autograd.grad(
            [result for result, _ in reached],
            targets,
            [gradient for _, gradient in reached],
            materialize_grads=True,
        )
    )


@contextlib.contextmanager
def _recorded_by_autograd() -> Iterator[None]:
    """Turn autograd on; compiled graphs call operators from below it."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


@torch.library.register_fake("tvmify::execute_backward")
def _fake_backward(
    original: torch.Tensor,
    description: str,
    weights: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    wanted: Sequence[bool],
) -> list[torch.Tensor]:
    marked = zip((*weights, *inputs), wanted, strict=True)
    return [torch.empty_like(tensor) for tensor, want in marked if want]


_originals: OrderedDict[str, _Original] = OrderedDict()
_loading = forks.Lock()


def _original(data: torch.Tensor, description: str) -> _Original:
    """Return the original program, from its bytes when it is first needed."""
    expected = _facts(description)["original"]
    with _loading:
        original = _originals.pop(expected, None)
        if original is None:
            # One without memory is damaged, like one of other bytes.
            original = _load(bytes(data.cpu().numpy()) if has_memory(data) else b"", expected)
        _originals[expected] = original
        if len(_originals) > _MOST_ORIGINALS:
            _originals.popitem(last=False)
    return original


def _load(data: bytes, expected: str) -> Any:
    if digest(data) != expected:
        raise RuntimeError(
            f"the original of an exported program, {len(data)} bytes, is damaged: its SHA-256 is "
            "not the one that it was exported with. Export the model, or copy the file, again."
        )
    # Whatever mode the call is in, the program serves others.
    with tracing(beside_others=True), torch.inference_mode(False):
        return torch.export.load(io.BytesIO(data)).module(check_guards=False)
