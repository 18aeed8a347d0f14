"""Tables of the results of the operator samples."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

from rich.console import Console
from rich.table import Table

from conformance.document import replace_section
from conformance.operators import BRIDGED, CRASHED, DTYPES, EAGER, OUTCOMES, WRONG, Case, Result

Found = dict[Case, Result]


def show(console: Console, found: Found) -> None:
    """Print the totals, the reasons, and each deviation."""
    header, *rows = totals(found)
    table = Table(title="Operator samples", title_justify="left", box=None)
    for title in header:
        table.add_column(title, justify="right" if title else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for reason, counts in eager_reasons(found).items():
        console.print(f"{sum(counts.values()):6} {reason}", markup=False, highlight=False)
    for line in deviations(found):
        console.print(line, markup=False, highlight=False, style="red")


def write(found: Found) -> None:
    """Write the section of docs/coverage.md."""
    header, *rows = totals(found)
    lines = [_row(header), _row(["---"] + ["---:"] * (len(header) - 1)), *map(_row, rows), ""]
    deviating = deviations(found)
    lines += (
        ["Deviations:", "", *(f"- {line}" for line in deviating), ""]
        if deviating
        else [
            "Deviations: none.",
            "",
        ]
    )
    lines += ["| in eager because | samples | operators |", "| --- | ---: | --- |"]
    for reason, counts in eager_reasons(found).items():
        lines.append(_row([reason, f"{sum(counts.values()):,}", ", ".join(sorted(counts))]))
    bridged = Counter(
        name for result in found.values() if result.outcome == BRIDGED for name in result.operators
    )
    if bridged:
        lines += ["", "| computed by PyTorch, inside the program | samples |", "| --- | ---: |"]
        lines += [_row([f"`{name}`", f"{count:,}"]) for name, count in bridged.most_common()]
    replace_section("opinfo", "\n".join(lines))


def totals(found: Found) -> list[list[str]]:
    """Return the rows of the table of outcomes, the header first."""
    rows = [["", "operators", "samples", *OUTCOMES]]
    dtypes = [dtype for dtype in DTYPES if any(case.dtype == dtype for case in found)]
    total = "both" if len(dtypes) == 2 else "all"
    for dtype in (*dtypes, total):
        cases = [case for case in found if dtype in (case.dtype, total)]
        counts = Counter(found[case].outcome for case in cases)
        names = {(case.operator, case.variant) for case in cases}
        shares = [f"{counts[o]:,} ({counts[o] / max(len(cases), 1):.1%})" for o in OUTCOMES]
        rows.append([dtype, f"{len(names):,}", f"{len(cases):,}", *shares])
    return rows


def eager_reasons(found: Found) -> dict[str, Counter[str]]:
    """Count the samples that ran in eager, by reason and operator."""
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for case, result in found.items():
        if result.outcome == EAGER:
            reasons[_reason(result)][case.operator] += 1
    return dict(sorted(reasons.items(), key=lambda item: -sum(item[1].values())))


def deviations(found: Found) -> list[str]:
    """Return a line for each case that differs from eager or ended its process."""
    return [
        f"{case}: {result.outcome}: {result.reason}"
        for case, result in sorted(found.items())
        if result.outcome in (WRONG, CRASHED)
    ]


def _reason(result: Result) -> str:
    """Return a reason without its details of a sample: names, shapes and places."""
    if result.kind == "UnsupportedOperator" and not result.reason:
        return "an operator has no converter"
    reason = re.sub(r" \((no source known|File .*|[^()]*:\d+[^()]*)\)", "", result.reason)
    reason = re.sub(r"torch\.(return_types\.\w+|\w+Tensor\b)", "torch.…", reason)
    reason = re.sub(r"['`]\w+['`]", "…", reason)
    reason = re.sub(r"[\[(][-\d, ]+[\])]", "…", reason)
    return re.sub(r"(?<![\w.])-?\d+(\.\d+)?", "…", reason).replace("|", "/")


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
