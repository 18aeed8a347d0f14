"""What ``explain()`` returns: data that prints as text, and as HTML in a notebook."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tvmify.dispatch.counts import CacheInfo
from tvmify.dispatch.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class ExplainedSignature:
    """How calls of one signature run, and why.

    Attributes
    ----------
    signature
        The arguments, as text.
    runs
        ``"compiled"``, ``"regions"`` (parts of it compiled) or ``"eager"``.
    reason, next_step
        Why calls do not run compiled, or not as one program, and what to do about it; empty if they
        do.
    faster_in_eager
        Whether eager PyTorch won the comparison.
    runs_control_flow
        What runs the code between the regions.
    gradients_in_eager
        Whether results have gradients, which eager PyTorch computes.
    failure
        Why compiled code failed in a call, which ran in eager PyTorch then; empty if it never did.
    captured_by
        ``"torchscript"`` or ``"export"``; empty if nothing was captured.
    not_scripted
        Why it was not captured by TorchScript.
    key
        Digest of the program in the cache, as `tvmify list` shows it.
    source
        Where the compiled code came from.
    writes
        What calls write to besides their results.
    no_cuda_graph
        Why calls are not replayed as CUDA graphs, if the option is set.
    one_shape
        Why the program serves a single shape, although sizes vary.
    verdict
        Seconds that a call takes compiled and in eager PyTorch, if they were compared.
    served
        How many signatures the program has served so far.
    shapes
        Which sizes the program serves, if more than one.
    nearest
        How a program that was built differs from the most similar older entry of the cache.
    report
        The compiler's notes: ``"kernels"`` and the schedule rule of each, operators ``"bridged"``
        to PyTorch, ``"libraries"``, ``"tuning"``, ``"seconds"``. Read from the cache without
        validation.
    """

    signature: str
    runs: Literal["compiled", "regions", "eager"]
    reason: str = ""
    next_step: str = ""
    faster_in_eager: bool = False
    runs_control_flow: str = ""
    gradients_in_eager: bool = False
    failure: str = ""
    captured_by: str = ""
    not_scripted: str = ""
    key: str = ""
    source: str = ""
    writes: str = ""
    no_cuda_graph: str = ""
    one_shape: str = ""
    verdict: Verdict | None = None
    served: int = 1
    shapes: tuple[str, ...] = ()
    nearest: tuple[str, ...] = ()
    report: Mapping[str, object] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """Yield the lines of the text."""
        yield f"  {self.signature}"
        yield from self._how()
        notes = {
            "captured by": self.captured_by,
            "not scripted": self.not_scripted,
            "key": self.key,
            "code": self.source,
            "writes to": self.writes,
            "no CUDA graph": self.no_cuda_graph,
            "for this shape alone": self.one_shape,
            "compared": self.verdict and str(self.verdict),
        }
        yield from (f"    {title}: {text}" for title, text in notes.items() if text)
        if self.shapes:
            yield f"    has served {self.served} shapes so far, serves sizes with"
            yield from (f"      {line}" for line in self.shapes)
        yield from (f"      {line}" for line in self.nearest)
        yield from _report_lines(self.report)

    def _how(self) -> Iterator[str]:
        if self.runs == "compiled":
            but = ", but failed in a call, which ran in eager PyTorch"
            yield f"    runs compiled{but * bool(self.failure)}"
            if self.failure:
                yield f"      {self.failure}"
            if self.gradients_in_eager:
                yield "    gradients are computed in eager PyTorch"
        elif self.runs == "regions":
            yield f"    runs by regions: {self.runs_control_flow}"
            yield f"      {self.reason}"
        elif self.reason:
            yield f"    runs in eager PyTorch: {self.reason}"
            if self.next_step:
                yield f"      {self.next_step}"
        else:
            yield "    runs in eager PyTorch, which is faster here"


@dataclass(frozen=True, kw_only=True)
class ExplainedSubject:
    """How calls of one function, method or part of a module run.

    Attributes
    ----------
    name
        Its name.
    info
        Its counts.
    signatures
        One for each signature in memory.
    parts
        The regions or submodules that are compiled separately and were called.
    operators
        For a region, the number of calls of each operator.
    """

    name: str
    info: CacheInfo
    signatures: tuple[ExplainedSignature, ...] = ()
    parts: tuple[ExplainedSubject, ...] = ()
    operators: Mapping[str, int] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """Yield the lines of the text."""
        info = self.info
        if self.operators:
            operators = ", ".join(f"{n} {name}" for name, n in self.operators.items())
            yield f"a region of {sum(self.operators.values())} operators: {operators}"
        yield (
            f"{self.name}: {info.builds} built, {info.disk_hits} loaded from disk, "
            f"{info.hits} hits, {info.misses} misses"
        )
        if info.eager or info.evictions:
            yield f"  calls in eager PyTorch: {info.eager}, evicted: {info.evictions}"
        if info.postponed:
            yield f"  calls whose capture was postponed: {info.postponed}"
        for signature in self.signatures:
            yield ""
            yield from signature.lines()
        if info.seconds:
            yield from ("", "  seconds: " + _seconds(info.seconds))
        for part in self.parts:
            yield ""
            yield from (f"  {line}" if line else "" for line in part.lines())


class Explanation(str):
    """What ran where, and why, of a decorated object.

    Its text is for people; the form may change. The attributes are for programs.

    Attributes
    ----------
    methods
        One for each decorated method, or one for a function.

    Examples
    --------
    >>> print(net.explain())
    >>> [s.reason for s in net.explain().signatures if s.runs == "eager"]
    """

    methods: tuple[ExplainedSubject, ...]

    def __new__(cls, methods: tuple[ExplainedSubject, ...]) -> Explanation:  # noqa: D102
        text = "\n\n".join("\n".join(method.lines()) for method in methods)
        made = super().__new__(cls, text)
        made.methods = methods
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:  # for copies and pickles
        return (self.methods,)

    @property
    def signatures(self) -> tuple[ExplainedSignature, ...]:
        """The signatures of all methods and of their parts."""
        return tuple(_signatures(self.methods))

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self)}</pre>"


def _signatures(subjects: tuple[ExplainedSubject, ...]) -> Iterator[ExplainedSignature]:
    for subject in subjects:
        yield from subject.signatures
        yield from _signatures(subject.parts)


def _report_lines(report: Mapping[str, object]) -> list[str]:
    try:
        return _lines_of(report)
    except (LookupError, TypeError, ValueError, AttributeError):
        # The report comes from a cache, and nothing else validates it.
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
        lines.append(f"    computed by PyTorch, inside the program: {calls}")
    libraries = report.get("libraries")
    if isinstance(libraries, Mapping):
        lines += [f"    computed by a library: {work}: {name}" for work, name in libraries.items()]
    tuning = report.get("tuning")
    if isinstance(tuning, Mapping):
        lines += _tuning_lines(tuning)
    seconds = report.get("seconds")
    if isinstance(seconds, Mapping):
        lines.append(f"    seconds per stage of the build: {_seconds(seconds)}")
    return lines


def _tuning_lines(tuning: Mapping[str, Any]) -> list[str]:
    known = tuning["workloads"] - tuning["measured"] - tuning["left"]
    text = f"{tuning['workloads']} workloads, {tuning['measured']} measured, {known} known before"
    if tuning["left"]:
        text += f", {tuning['left']} not measured for lack of time"
    changed = tuning["changed"]
    lines = [f"    tuned: {text}; {len(changed)} faster than the rules' choice"]
    lines += [f"      {workload}: {winner}" for workload, winner in changed.items()]
    return lines + [f"      {name}: not built: {why}" for name, why in tuning["failed"].items()]


def _seconds(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{stage} {value:.2f}" for stage, value in seconds.items())
