"""Compare the results of compiled code with those of eager PyTorch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from tvmify.errors import GradientsNeeded, NotCompiled

#: The largest difference, relative to the largest element. The check looks for a wrong branch, a
#: wrong layout or a race, which differ by far more than rounding. TF32 is as precise as float16.
TOLERANCE = {torch.float16: 0.02, torch.bfloat16: 0.05}
_OTHERWISE = 0.01

#: What a user can do if compiled code draws other random numbers than eager PyTorch.
USE_ALL_DRAWS = "Use every number that is drawn, or draw outside of forward and pass the result."
#: How often draws are compared until they agree.
_COMPARISONS_OF_DRAWS = 5


def computes_the_same(
    run: Callable[[], Any], eager: Callable[[], Any], gpu: int | None = None
) -> bool:
    """Whether two ways to compute a call agree; False if one of them raises.

    Both results are in memory at the same time.

    Parameters
    ----------
    run, eager
        Compute the call, from the same state of the random generators.
    gpu
        The index of the GPU that they use; None for the CPU.

    Raises
    ------
    torch.OutOfMemoryError
        The GPU lacks the memory for both results.
    """
    with torch.no_grad(), _same_draws([] if gpu is None else [gpu]) as again:
        try:
            got = pytree.tree_leaves(run())
            again()
            with _without_cudnn_attention():
                want = pytree.tree_leaves(eager())
        except torch.OutOfMemoryError:
            raise
        except Exception:  # of any kind: the call raises it again when it runs
            return False
        return len(got) == len(want) and all(map(_is_alike, got, want))


def undone(run: Callable[[], Any], written: Sequence[torch.Tensor]) -> Callable[[], Any]:
    """Return a function that calls another, and undoes what this writes.

    Parameters
    ----------
    run
        Computes a call.
    written
        What it writes to.

    Returns
    -------
    Callable
        Returns copies of the result, and of what was written.
    """

    def run_and_undo() -> Any:
        before = [tensor.clone() for tensor in written]
        try:
            return pytree.tree_map_only(torch.Tensor, torch.clone, (run(), [*written]))
        finally:
            for tensor, values in zip(written, before, strict=True):
                tensor.copy_(values)

    return run_and_undo if written else run


@contextlib.contextmanager
def _without_cudnn_attention() -> Iterator[None]:
    """Use another attention kernel than cuDNN's, which is wrong in PyTorch 2.11: it reads a float32
    mask as if it had the half type of the queries, and does not mask queries that attend to no key.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def is_same_result(got: Any, want: Any) -> bool:
    """Whether two results have the same structure and types, and values that differ by rounding."""
    found, structure = pytree.tree_flatten(got)
    expected, wanted = pytree.tree_flatten(want)
    return structure == wanted and all(map(_is_same, found, expected))


def _is_same(got: Any, want: Any) -> bool:
    if isinstance(want, torch.Tensor):
        is_exact = not (want.is_floating_point() or want.is_complex())
        return isinstance(got, torch.Tensor) and (
            _is_alike(got, want) and (not is_exact or torch.equal(got, want))
        )
    if type(got) is not type(want):
        return False
    if isinstance(want, float):  # possibly the value of a tensor
        both_nan = math.isnan(got) and math.isnan(want)
        return both_nan or math.isclose(got, want, rel_tol=_OTHERWISE, abs_tol=1e-3)
    return bool(got == want)


class _Draws(NamedTuple):
    """Whether eager PyTorch draws random numbers in a call, and whether compiled code agrees.

    They agree if the generators are in the same state afterwards, and the results are alike.
    """

    in_eager: bool
    agree: bool


def _compare_draws(run: Callable[[], Any], eager: Callable[[], Any], gpu: int | None) -> _Draws:
    gpus = [] if gpu is None else [gpu]

    def states() -> list[torch.Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(gpu) for gpu in gpus)]

    with _same_draws(gpus) as again:
        before = states()
        try:
            want = pytree.tree_leaves(eager())
            after = states()
            again()
            got = pytree.tree_leaves(run())
        except Exception:  # of any kind: the call raises it again when it runs
            return _Draws(in_eager=False, agree=True)
        drawn = not all(map(torch.equal, before, after))
        agree = all(map(torch.equal, after, states()))
        if drawn and agree:
            with torch.no_grad():
                agree = len(got) == len(want) and all(map(_is_alike, got, want))
        return _Draws(drawn, agree)


def check_draws(
    run: Callable[[], Any], eager: Callable[[], Any], gpu: int | None, differentiable: bool
) -> None:
    """Refuse code that does not draw the random numbers that eager PyTorch draws.

    Parameters
    ----------
    run, eager, gpu
        As for `computes_the_same`.
    differentiable
        Whether a backward may run forward again.

    Raises
    ------
    GradientsNeeded
        It draws the same ones, but the backward would draw others.
    NotCompiled
        It draws others.
    """
    # Other threads may draw at the same time, so a single comparison may find what is not there.
    comparisons = (_compare_draws(run, eager, gpu) for _ in range(_COMPARISONS_OF_DRAWS))
    draws = next((draws for draws in comparisons if draws.agree), None)
    if draws is None:
        raise NotCompiled(
            "compiled code would not draw the random numbers that eager PyTorch draws",
            USE_ALL_DRAWS,
        )
    if draws.in_eager and differentiable:
        raise backward_would_draw()


def backward_would_draw() -> GradientsNeeded:
    """Return why a call that draws runs in eager if it needs gradients: its backward runs forward
    again.
    """
    return GradientsNeeded(
        "forward draws random numbers, and weights require gradients: the backward would draw "
        "others",
        "Call under torch.no_grad() or torch.inference_mode().",
    )


def refuse_unseen_draws(random: Sequence[str], written: str) -> None:
    """Refuse a program that writes and draws: a program that writes cannot be run for a comparison.

    Raises
    ------
    NotCompiled
        It has random operators.
    """
    if random:
        raise NotCompiled(
            f"forward draws random numbers ({', '.join(random)}) and writes to {written}, so "
            "tvmify cannot check that compiled code draws the same ones",
            "Draw outside of forward and pass the result.",
        )


@contextlib.contextmanager
def _same_draws(gpus: list[int]) -> Iterator[Callable[[], None]]:
    """Yield a function that resets the random generators; restore them at the end."""
    with torch.random.fork_rng(devices=gpus):
        state = torch.get_rng_state()
        states = [torch.cuda.get_rng_state(gpu) for gpu in gpus]

        def again() -> None:
            torch.set_rng_state(state)
            for gpu, drawn in zip(gpus, states, strict=True):
                torch.cuda.set_rng_state(drawn, gpu)

        yield again


def _is_alike(got: Any, want: Any) -> bool:
    if not isinstance(want, torch.Tensor) or not isinstance(got, torch.Tensor):
        return type(got) is type(want)
    if (got.shape, got.dtype, got.device) != (want.shape, want.dtype, want.device):
        return False
    rtol = TOLERANCE.get(want.dtype, _OTHERWISE)
    # Keep floats as they are, to save memory; abs() of the smallest integer would overflow.
    wide = want if want.is_floating_point() or want.is_complex() else want.double()
    scale = wide.abs().nan_to_num(0, 0, 0).amax().item() if want.numel() else 0.0
    return torch.allclose(got, want, rtol=rtol, atol=rtol * scale, equal_nan=True)
