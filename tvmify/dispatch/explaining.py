"""Makes what `explain()` and `cache_info()` return for one module or function."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tvmify.dispatch.counts import CacheInfo, Counts
from tvmify.dispatch.explanation import ExplainedSignature, ExplainedSubject
from tvmify.dispatch.outcome import Choice, Compiled, Outcome, Partitioned
from tvmify.dispatch.programs import Source

if TYPE_CHECKING:
    from tvmify.cache import Neighbours
    from tvmify.dispatch.memory import Memory
    from tvmify.dispatch.parts import ReportsCalls


def explain(
    name: str,
    outcomes: Collection[Outcome],
    info: CacheInfo,
    neighbours: Neighbours,
    called: Sequence[ReportsCalls] = (),
) -> ExplainedSubject:
    """Describe what ran where, and why.

    Parameters
    ----------
    name
        Name of the module or function.
    outcomes
        The outcomes in its memory cache.
    info
        Its counts.
    neighbours
        Finds the most similar entries of the disk cache.
    called
        Parts that other methods of the module call.
    """
    parts = [part.explain(neighbours) for part in _parts_of(outcomes, called)]
    return ExplainedSubject(
        name=name,
        info=info,
        signatures=tuple(_signature(outcome, neighbours) for outcome in outcomes),
        parts=tuple(part for part in parts if part.info.hits or part.info.misses),
    )


def info_of(
    memory: Memory, counts: Counts, latest_hits: int, called: Sequence[ReportsCalls] = ()
) -> CacheInfo:
    """Return the counts of one module or function, and of its parts.

    Parameters
    ----------
    memory
        Its memory cache.
    counts
        Its counts of misses and of calls in eager.
    latest_hits
        How many calls its `LatestCall` has run.
    called
        As for `explain`.
    """
    outcomes, others = memory.values(), memory.undescribed.by_reason
    info = CacheInfo(
        hits=memory.hits + others.hits + latest_hits,
        misses=memory.misses + others.misses,
        builds=counts.builds,
        disk_hits=counts.disk_hits,
        entries=sum(isinstance(outcome, Compiled) for outcome in outcomes),
        seconds=dict(counts.seconds),
        eager=counts.eager,
        evictions=memory.evictions,
        postponed=counts.postponed,
    )
    return info.with_parts(part.cache_info() for part in _parts_of(outcomes, called))


def _signature(outcome: Outcome, neighbours: Neighbours) -> ExplainedSignature:
    facts = outcome.facts
    captured, key = facts.captured, facts.key
    is_built = key is not None and facts.source is Source.BUILT
    explained = ExplainedSignature(
        signature=facts.title,
        runs="compiled",
        captured_by=captured.method if captured else "",
        not_scripted=(captured and captured.not_scripted) or "",
        key=key.digest if key else "",
        source=facts.source.value if facts.source else "",
        writes=facts.writes,
        no_cuda_graph=facts.no_graph,
        one_shape=facts.one_shape.reason if facts.one_shape else "",
        verdict=facts.verdict,
        shapes=tuple(facts.shapes.lines()) if facts.shapes is not None else (),
        nearest=tuple(neighbours.lines(key)) if key is not None and is_built else (),
    )
    if isinstance(outcome, Compiled):
        report = outcome.executor.artifact.report
        failure = outcome.failure.reason if outcome.failure else ""
        explained = replace(explained, served=outcome.served, report=report, failure=failure)
        return replace(explained, gradients_in_eager=outcome.differentiable)
    if isinstance(outcome, Partitioned):
        how, reason = outcome.parts.how, outcome.parts.reason.reason
        return replace(explained, runs="regions", runs_control_flow=how, reason=reason)
    if isinstance(outcome.why, Choice):
        if outcome.why is Choice.FASTER:
            return replace(explained, runs="eager", faster_in_eager=True)
        return replace(explained, runs="eager", reason=outcome.why.value)
    why = outcome.why
    return replace(explained, runs="eager", reason=why.reason, next_step=why.next_step)


def _parts_of(outcomes: Iterable[Outcome], called: Sequence[ReportsCalls]) -> list[ReportsCalls]:
    """Return the distinct parts by which outcomes run, and those that other methods call."""
    partitioned = [outcome.parts for outcome in outcomes if isinstance(outcome, Partitioned)]
    found = [part for parts in partitioned for part in parts.parts]
    return list(dict.fromkeys([*found, *called]))
