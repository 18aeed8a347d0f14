"""The goals of tvmify with two threads, and whether it meets them."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.results import Row, geometric_mean

#: By model: the largest ratios of our time to the best peer's and to eager's.
PER_MODEL: dict[str, tuple[float, float]] = {
    "resnet18": (0.80, 0.30),
    "mobilenet_v2": (0.90, 0.25),
    "vgg16": (0.65, 0.45),
    "bert_base": (0.97, 0.72),
    "vit_base": (0.97, 0.72),
    "mlp_*": (0.85, 0.70),
    "minilm_16": (0.85, 0.70),
    "gpt2_decode": (0.85, 0.70),
}
MEAN = (0.85, 0.50)
WORST = (1.15, 1.00)
FIRST_CALL = 0.60


class Goal(NamedTuple):
    """One goal.

    Attributes
    ----------
    subject
        The model, or group of models.
    measure
        The name of the ratio.
    bound
        The largest ratio that meets the goal.
    reached
        The measured ratio, or None.
    """

    subject: str
    measure: str
    bound: float
    reached: float | None

    @property
    def met(self) -> bool:
        """Whether the ratio was measured and is within the bound."""
        return self.reached is not None and self.reached <= self.bound


def goals(rows: list[Row]) -> list[Goal]:
    """Return the goals that apply to these rows."""
    found: list[Goal] = []
    measures: tuple[tuple[str, Callable[[Row], float | None]], ...] = (
        ("tvmify / best peer", lambda row: row.to_best_peer),
        ("tvmify / eager", lambda row: row.to_eager),
    )
    for row in rows:
        bounds = [b for name, b in PER_MODEL.items() if fnmatch.fnmatch(row.model, name)]
        for (measure, ratio), bound in zip(measures, bounds[0] if bounds else (), strict=False):
            found.append(Goal(row.model, measure, bound, ratio(row)))
    for index, (measure, ratio) in enumerate(measures):
        ratios = [ratio(row) for row in rows]
        worst = max((r for r in ratios if r is not None), default=None)
        found.append(Goal("geometric mean", measure, MEAN[index], geometric_mean(ratios)))
        found.append(Goal("worst model", measure, WORST[index], worst))
    first = geometric_mean(row.first_call for row in rows)
    found.append(Goal("first call, geometric mean", "tvmify / freezing", FIRST_CALL, first))
    return found
