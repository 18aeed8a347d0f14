"""A program for any size against a program for each size.

    python -m benchmarks.sizes [--models bert_base,resnet18] [--sizes 5,17,64] [--rounds 9]

Both run in this process on one thread, and take turns. Times are CPU seconds of the thread, which
other processes affect least; the table shows medians. Programs are built first: a model with 20
sizes takes some minutes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks import models
from benchmarks.results import geometric_mean

if TYPE_CHECKING:
    from torch import Tensor

#: Lengths at the edges of tiles, and between them.
LENGTHS = (2, 5, 7, 8, 9, 13, 15, 16, 17, 24, 31, 33, 47, 64, 65, 100, 128, 200, 384, 512)
BATCHES = (2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 20, 24, 25, 28, 29, 30, 31, 32, 33)
#: Heights and widths of images, which are halved five times.
SIDES = (96, 160, 192, 224, 256, 320)
#: The number of rounds of each call, and the least CPU seconds of a round.
ROUNDS, SHORTEST = 9, 0.02


class Varied(NamedTuple):
    """A model of the benchmark, called with axes of varying size.

    Attributes
    ----------
    axes
        Axes of all arguments; they share one size.
    sizes
        The default sizes to measure.
    """

    model: str
    axes: tuple[int, ...]
    sizes: tuple[int, ...]


CASES = {
    case.model: case
    for case in (
        Varied("bert_base", (1,), LENGTHS),
        Varied("minilm_16", (1,), LENGTHS),
        Varied("gpt2_prefill", (1,), LENGTHS),
        Varied("vit_base", (0,), BATCHES),
        Varied("lstm", (1,), LENGTHS),
        Varied("resnet18", (2, 3), SIDES),
        Varied("mobilenet_v2", (2, 3), SIDES),
    )
}


def resized(arguments: tuple[Tensor, ...], axes: tuple[int, ...], size: int) -> tuple[Tensor, ...]:
    """Repeat or cut the arguments of a call along some axes."""
    import torch

    for axis in axes:
        arguments = tuple(
            x.index_select(axis, torch.arange(size) % x.size(axis)).contiguous() for x in arguments
        )
    return arguments


def in_turns(calls: list[Callable[[], Any]], rounds: int) -> list[float]:
    """Make the calls in turns; return the median CPU seconds of each."""
    repeats = []
    for call in calls:
        call()
        start = time.thread_time()
        call()
        repeats.append(max(1, round(SHORTEST / max(time.thread_time() - start, 1e-6))))
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, repeat, times in zip(calls, repeats, taken, strict=True):
            start = time.thread_time()
            for _ in range(repeat):
                call()
            times.append((time.thread_time() - start) / repeat)
    return [statistics.median(times) for times in taken]


def compare(case: Varied, sizes: tuple[int, ...], rounds: int) -> dict[int, float]:
    """Print a line for each size, and return the ratios of the times."""
    from torch.export import Dim

    from tvmify import tvmify

    module, arguments = models.build(case.model)
    options: dict[str, Any] = {"compare": False, "progress": False, "strict": True}
    # Without the declaration, the first call (for images the first four) would get its own program.
    declared = tuple(dict.fromkeys(case.axes, Dim.AUTO) for _ in arguments)
    of_images = len(case.axes) > 1
    one = tvmify(module, dynamic_shapes=declared if of_images else None, **options)
    each = tvmify(module, dynamic=False, cache_size=2 * len(sizes), **options)
    if not of_images:
        one(*resized(arguments, case.axes, sizes[0] + 1))
    ratios: dict[int, float] = {}
    for size in sizes:
        inputs = resized(arguments, case.axes, size)
        symbolic, static = in_turns([lambda: one(*inputs), lambda: each(*inputs)], rounds)  # noqa: B023
        ratios[size] = symbolic / static
        print(
            f"{case.model:14} {size:5} {symbolic * 1e3:9.2f} {static * 1e3:9.2f} "
            f"{ratios[size]:6.3f}",
            flush=True,
        )
    if "for this shape alone" in one.explain():
        raise SystemExit(f"no program for any size:\n{one.explain()}")
    programs = one.cache_info().builds - (not of_images)
    worst = max(ratios, key=ratios.__getitem__)
    print(
        f"{case.model}: geometric mean {geometric_mean(list(ratios.values())):.3f}, worst "
        f"{ratios[worst]:.3f} at {worst}; {programs} programs against "
        f"{each.cache_info().builds}",
        flush=True,
    )
    return ratios


def main() -> None:
    """Measure the models and sizes that the arguments name."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sizes", description=__doc__)
    parser.add_argument("--models", default="*", help="names or patterns")
    parser.add_argument("--sizes", help="instead of the model's default sizes")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    import os

    with tempfile.TemporaryDirectory() as folder:
        os.environ["TVMIFY_CACHE_DIR"] = folder
        import torch

        torch.set_num_threads(1)
        print(f"{'':14} {'size':>5} {'any, ms':>9} {'each, ms':>9} {'ratio':>6}")
        with torch.inference_mode():
            for name in models.chosen(given.models, list(CASES)):
                case = CASES[name]
                sizes = tuple(map(int, given.sizes.split(","))) if given.sizes else case.sizes
                compare(case, sizes, given.rounds)


if __name__ == "__main__":
    main()
