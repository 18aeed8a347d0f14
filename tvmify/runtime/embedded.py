"""Programs inside ``torch.export`` programs: the Python half of ``tvmify::execute``.

The operator itself is native (``native/operator.cpp``). Here are its fake kernel, from which
``torch.export`` and ``torch.compile`` infer its results, and the two operators that it calls when
its code cannot run, or for gradients. Both run the original, which the file also contains, as a
separate ``torch.export`` program.
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
from tvmify.torch_compat.dtypes import dtype_name
from tvmify.torch_compat.memory import has_memory
from tvmify.torch_compat.tracing import tracing

#: Version of the description. Increase it when the meaning of a line changes; native code refuses
#: all others.
FORMAT = 1
#: The most originals that a process keeps loaded.
_MOST_ORIGINALS = 16

#: Runs an original: takes weights and inputs, returns the tensors of the results.
_Original = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], list[torch.Tensor]]


def description(facts: Mapping[str, object]) -> str:
    """Return the description of a program for ``tvmify::execute``, one line per fact.

    Parameters
    ----------
    facts
        ``inputs``, ``weights``, ``outputs``
            `kinds` of the tensors that the operator takes and returns.
        ``reads``, ``packs``
            Indices of the inputs that the compiled ``main`` takes, and of the weights that
            ``pack`` takes.
        ``code``, ``features``, ``runtime``, ``sha1``, ``complex``
            The state of the ``CompiledModule`` without its library; the last if there are complex
            results.
        ``original``
            `digest` of the bytes of the original.
        ``strides``
            True if it serves contiguous inputs only; otherwise absent.
        ``strict``
            True to raise an error if the code cannot run; otherwise absent.
    """
    lines = {"tvmify": FORMAT} | dict(facts)
    return "\n".join(f"{name} {value}" for name, value in lines.items())


def kinds(tensors: Iterable[torch.Tensor]) -> str:
    """Return dtypes and shapes as text: ``float32[1, 3, 224, 224] int64[]``."""
    return " ".join(f"{dtype_name(tensor.dtype)}{list(tensor.shape)}" for tensor in tensors)


def digest(data: bytes) -> str:
    """Return the checksum that reveals damaged bytes."""
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
    """Run the original; ``news`` is the reason to warn about, empty if it is not new."""
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
    """Return the gradients of the weights and inputs marked in ``wanted``, in order."""
    tensors = [*weights, *inputs]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*tensors, *gradients)):
        raise NotImplementedError(
            "a program from tvmify.export can be differentiated once, not twice. Use the original "
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
    """Turn autograd on; compiled graphs call operators below the autograd dispatch keys."""
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
    """Return the original program, loading it from its bytes on first use."""
    expected = _facts(description)["original"]
    with _loading:
        original = _originals.pop(expected, None)
        if original is None:
            # A tensor without memory counts as damaged.
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
    # The program also serves later calls, which may be in other modes.
    with tracing(beside_others=True), torch.inference_mode(False):
        return torch.export.load(io.BytesIO(data)).module(check_guards=False)
