"""What tvmify reports to the user: counts, reasons, and warnings that appear once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tvmify.dispatch.counts import CacheInfo, Counts
from tvmify.dispatch.found import Source
from tvmify.dispatch.outcome import Choice, Compiled, Facts, Outcome, Partitioned
from tvmify.errors import warn

if TYPE_CHECKING:
    from tvmify.cache import Neighbours
    from tvmify.dispatch.outcomes import Outcomes
    from tvmify.dispatch.parts import Parts


def explain(
    name: str, outcomes: Collection[Outcome], info: CacheInfo, neighbours: Neighbours
) -> str:
    """Describe what ran where, and why.

    Parameters
    ----------
    name
        Name of the module or function.
    outcomes
        Those in its memory cache.
    info
        Its counts.
    neighbours
        Finds the disk entries that were most similar to its programs.
    """
    lines = [
        f"{name}: {info.builds} built, {info.disk_hits} loaded from disk, "
        f"{info.hits} hits, {info.misses} misses"
    ]
    if info.eager or info.evictions:
        lines.append(f"  calls in eager PyTorch: {info.eager}, evicted: {info.evictions}")
    if info.postponed:
        lines.append(f"  calls whose capture was postponed: {info.postponed}")
    for outcome in outcomes:
        facts = outcome.facts
        lines += ["", f"  {facts.title}", *_how(outcome), *_notes(facts)]
        if facts.key is not None and facts.source is Source.BUILT:
            lines += [f"      {line}" for line in neighbours.lines(facts.key)]
        if isinstance(outcome, Compiled):
            lines += _report_lines(outcome.executor.artifact.report)
    if info.seconds:
        lines += ["", "  seconds: " + _seconds(info.seconds)]
    for parts in _parts_of(outcomes):
        lines += parts.explain(neighbours)
    return "\n".join(lines)


def info_of(memory: Outcomes, counts: Counts, latest_hits: int) -> CacheInfo:
    """Return the counts of one module or function, and of its parts.

    Parameters
    ----------
    memory
        Its memory cache.
    counts
        What its misses and its calls in eager have counted.
    latest_hits
        How many calls its `LatestCall` has made.
    """
    outcomes, others = memory.values(), memory.undescribed
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
    return info.with_parts(x for parts in _parts_of(outcomes) for x in parts.cache_infos())


def _how(outcome: Outcome) -> list[str]:
    if isinstance(outcome, Partitioned):
        how, reason = outcome.parts.how, outcome.parts.reason
        return [f"    runs by regions: {how}", f"      {reason.reason}"]
    if isinstance(outcome, Compiled):
        gradients = "    gradients, if asked for, are computed in eager PyTorch"
        return ["    runs compiled", *([gradients] if outcome.differentiable else [])]
    if isinstance(outcome.why, Choice):
        faster = ", which is faster here" if outcome.why is Choice.FASTER else ""
        return [f"    runs in eager PyTorch{faster}"]
    return [f"    runs in eager PyTorch: {outcome.why.reason}", f"      {outcome.why.next_step}"]


def _notes(facts: Facts) -> list[str]:
    captured, key, source = facts.captured, facts.key, facts.source
    notes = {
        "captured by": captured and captured.method,
        "not scripted": captured and captured.not_scripted,
        "key": key and key.digest,
        "code": source and source.value,
        "writes to": facts.writes,
        "no CUDA graph": facts.no_graph,
        "for this shape alone": facts.one_shape and facts.one_shape.reason,
        "compared": facts.verdict and str(facts.verdict),
    }
    lines = [f"    {title}: {text}" for title, text in notes.items() if text]
    if facts.shapes is not None:
        lines += ["    serves sizes with", *(f"      {line}" for line in facts.shapes.lines())]
    return lines


def _parts_of(outcomes: Iterable[Outcome]) -> list[Parts]:
    """Return what runs those of the outcomes that are no program as a whole, each once."""
    return list(dict.fromkeys(x.parts for x in outcomes if isinstance(x, Partitioned)))


def _report_lines(report: Mapping[str, object]) -> list[str]:
    try:
        return _lines_of(report)
    except (LookupError, TypeError, ValueError, AttributeError):
        # The report came from a cache, where nothing else validates it.
        return ["    the compiler's report cannot be read"]


def _lines_of(report: Mapping[str, object]) -> list[str]:
    lines = []
    kernels = report.get("kernels")
    if isinstance(kernels, Mapping):
        rules: dict[str, int] = {}
        for rule in kernels.values():
            rules[str(rule)] = rules.get(str(rule), 0) + 1
        counts = ", ".join(f"{count} {rule}" for rule, count in sorted(rules.items()))
        lines.append(f"    kernels: {len(kernels)} ({counts})")
    if isinstance(report.get("unscheduled"), int):
        lines.append(f"    without a schedule: {report['unscheduled']}")
    bridged = report.get("bridged")
    if isinstance(bridged, Mapping) and bridged:
        calls = ", ".join(f"{count} {operator}" for operator, count in bridged.items())
        lines.append(f"    computed by PyTorch, inside of the program: {calls}")
    libraries = report.get("libraries")
    if isinstance(libraries, Mapping):
        lines += [f"    by a library: {work}: {name}" for work, name in libraries.items()]
    tuning = report.get("tuning")
    if isinstance(tuning, Mapping):
        lines += _tuning_lines(tuning)
    seconds = report.get("seconds")
    if isinstance(seconds, Mapping):
        lines.append(f"    seconds when it was built: {_seconds(seconds)}")
    return lines


def _tuning_lines(tuning: Mapping[str, Any]) -> list[str]:
    known = tuning["workloads"] - tuning["measured"] - tuning["left"]
    text = f"{tuning['workloads']} workloads, {tuning['measured']} measured, {known} known before"
    if tuning["left"]:
        text += f", {tuning['left']} left to the rules for lack of time"
    changed = tuning["changed"]
    lines = [f"    tuned: {text}; {len(changed)} not as the rules choose"]
    lines += [f"      {workload}: {winner}" for workload, winner in changed.items()]
    return lines + [f"      {name}: not built: {why}" for name, why in tuning["failed"].items()]


def _seconds(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{stage} {value:.2f}" for stage, value in seconds.items())


def warn_once(said: set[str], message: str) -> None:
    """Warn at the caller's line, unless ``said`` already has the message."""
    if message in said:
        return
    said.add(message)
    warn(message)
