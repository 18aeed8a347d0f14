"""What tvmify reports to the user: counts, reasons, and warnings that appear once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tvmify.errors import warn

if TYPE_CHECKING:
    from tvmify.cache import Neighbours
    from tvmify.dispatch.entry import Entry
    from tvmify.dispatch.regions import Driven
    from tvmify.dispatch.submodules import Children


class CacheInfo(NamedTuple):
    """Cache statistics of one decorated module or function.

    Attributes
    ----------
    hits, misses
        Calls whose signature was, or was not, in the memory cache.
    builds
        Programs that were compiled.
    disk_hits
        Programs that were loaded from the disk cache.
    entries
        Compiled signatures in the memory cache now.
    seconds
        Seconds spent on new entries, by stage.
    eager
        Calls that ran in eager PyTorch, for any reason.
    evictions
        Signatures that were evicted from the memory cache.
    postponed
        Calls that ran in eager because capturing would have blocked them or others.
    """

    hits: int
    misses: int
    builds: int
    disk_hits: int
    entries: int
    seconds: Mapping[str, float]
    eager: int = 0
    evictions: int = 0
    postponed: int = 0

    def with_regions(self, entries: Iterable[Entry]) -> CacheInfo:
        """Return these counts, plus those of the programs of the entries' regions."""
        builds, disk_hits, compiled = self.builds, self.disk_hits, self.entries
        seconds = dict(self.seconds)
        for driven in _drivens(entries):
            for info in driven.cache_infos():
                builds += info.builds
                disk_hits += info.disk_hits
                compiled += info.entries
                for stage, value in info.seconds.items():
                    seconds[stage] = seconds.get(stage, 0.0) + value
        return self._replace(builds=builds, disk_hits=disk_hits, entries=compiled, seconds=seconds)

    @classmethod
    def total(cls, parts: Sequence[CacheInfo]) -> CacheInfo:
        """Return the sums over several modules or functions."""
        seconds: Counter[str] = Counter()
        for part in parts:
            seconds.update(part.seconds)
        names = [name for name in cls._fields if name != "seconds"]
        counts = {name: sum(getattr(part, name) for part in parts) for name in names}
        return cls(**counts, seconds=dict(seconds))


def explain(name: str, entries: Collection[Entry], info: CacheInfo, neighbours: Neighbours) -> str:
    """Describe what ran where, and why.

    Parameters
    ----------
    name
        Name of the module or function.
    entries
        Entries of its memory cache.
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
    for entry in entries:
        lines += ["", f"  {entry.signature}"]
        if entry.reason is not None:
            lines += [
                f"    runs in eager PyTorch: {entry.reason.reason}",
                f"      {entry.reason.next_step}",
            ]
        elif entry.driven is not None:
            lines += [
                f"    runs by regions: {entry.driven.how}",
                f"      {entry.driven.reason.reason}",
            ]
        elif entry.executor is None:
            faster = ", which is faster here" if "compared" in entry.notes else ""
            lines.append(f"    runs in eager PyTorch{faster}")
        else:
            lines.append("    runs compiled")
            if entry.differentiable:
                lines.append("    gradients, if asked for, are computed in eager PyTorch")
        lines += [f"    {title}: {text}" for title, text in entry.notes.items()]
        if entry.built_for is not None:
            lines += [f"      {line}" for line in neighbours.lines(entry.built_for)]
        if entry.executor is not None:
            lines += _report_lines(entry.executor.artifact.report)
    if info.seconds:
        lines += ["", "  seconds: " + _seconds(info.seconds)]
    for driven in _drivens(entries):
        lines += driven.explain(neighbours)
    return "\n".join(lines)


def _drivens(entries: Iterable[Entry]) -> list[Driven | Children]:
    return list(dict.fromkeys(e.driven for e in entries if e.driven is not None))


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
