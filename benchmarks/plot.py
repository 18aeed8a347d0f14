"""The plot of a run: the speed of each contender relative to eager PyTorch."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl  # pyright: ignore[reportMissingImports]
from matplotlib import pyplot as plt  # pyright: ignore[reportMissingImports]
from matplotlib.ticker import FuncFormatter, LogLocator  # pyright: ignore[reportMissingImports]

from benchmarks.contenders import BASELINE, CONTENDERS, OURS
from benchmarks.results import Row

#: Colour and marker of each contender; the peers' are muted, so that ours stand out.
LOOKS = {
    "torchscript": ("#9c9c9c", "v"),
    "inductor": ("#c9a227", "s"),
    "freezing": ("#e07b39", "D"),
    "openvino": ("#7b5ea7", "^"),
    "onnxruntime": ("#3a8fb7", "P"),
    OURS: ("#c2185b", "o"),
}
INK = "#333333"
BEHIND = "#777777"


def plot(rows: list[Row], machine: str, path: Path) -> None:
    """Draw one line per model, and write it as PNG.

    Parameters
    ----------
    rows
        The measurements; those without a time of eager PyTorch are left out.
    machine
        A line about the machine, for the subtitle.
    path
        Where to write the file.
    """
    rows = [row for row in rows if row.median_ms(BASELINE)][::-1]
    if not rows:
        return
    mpl.use("Agg")
    figure, axes = plt.subplots(figsize=(9, 1.8 + 0.42 * len(rows)), layout="constrained")
    several = len({row.threads for row in rows}) > 1
    for height, row in enumerate(rows):
        speeds = _speeds(row)
        peers = [speed for name, speed in speeds.items() if name != OURS]
        if OURS in speeds:
            ours, rival = speeds[OURS], max([1.0, *peers])  # eager is a peer, too
            colour = LOOKS[OURS][0] if ours >= rival else BEHIND
            axes.plot([rival, ours], [height] * 2, color=colour, linewidth=3, alpha=0.35)
            axes.annotate(
                f"{ours:.1f}×",
                (ours, height),
                xytext=(0, 6),  # above: markers may be on either side
                textcoords="offset points",
                ha="center",
                color=LOOKS[OURS][0],
                fontweight="bold",
            )
        for name, speed in speeds.items():
            colour, marker = LOOKS[name]
            size = 95 if name == OURS else 38
            axes.scatter(
                speed, height, s=size, color=colour, marker=marker, zorder=3, edgecolor="white"
            )
    labels = [f"{row.model}, {row.threads} threads" if several else row.model for row in rows]
    axes.set_yticks(range(len(rows)), labels)
    _dress(axes, rows)
    figure.suptitle(
        "How many times as fast as eager PyTorch", x=0.01, ha="left", color=INK, fontweight="bold"
    )
    threads = "" if several else f", {rows[0].threads} threads"
    axes.set_title(f"{machine}{threads}", loc="left", fontsize=9, color="#777777")
    figure.savefig(path, dpi=160)
    plt.close(figure)


def _speeds(row: Row) -> dict[str, float]:
    eager = row.median_ms(BASELINE) or 0.0
    times = {name: row.median_ms(name) for name in LOOKS}
    return {name: eager / taken for name, taken in times.items() if taken}


def _dress(axes: plt.Axes, rows: list[Row]) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.xaxis.set_minor_locator(plt.NullLocator())
    axes.margins(x=0.1)
    axes.axvline(1, color=INK, linewidth=1)
    axes.grid(axis="x", color="#eeeeee")
    axes.set_axisbelow(True)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.tick_params(length=0, colors=INK)
    axes.spines[:].set_visible(False)
    shown = [name for name in LOOKS if any(name in _speeds(row) for row in rows)]
    for name in shown:
        colour, marker = LOOKS[name]
        axes.scatter([], [], color=colour, marker=marker, label=CONTENDERS[name].title)
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=len(shown), frameon=False, fontsize=9
    )
