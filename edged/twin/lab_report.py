"""What a lab run comes to: figures, table, results.json and a picture per scenario."""

from __future__ import annotations

import importlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edged.twin.lab_run import Outcome, Sample

NO_PLOT = "matplotlib is missing, install the extra `lab` (pip install 'edged[lab]')"
Figures = dict[str, float | int | None]
FIGURES = (
    "tokens_per_s",
    "request_p50_s",
    "request_p95_s",
    "request_p99_s",
    "ttft_p99_s",
    "itl_std_s",
    "requests",
    "failed",
    "mean_temperature_c",
    "max_temperature_c",
    "seconds_over_limit",
    "measured_s",
    "frequency_changes_per_hour",
    "joules_per_token",
)


def quantile(values: Sequence[float], share: float) -> float | None:
    """Nearest rank of sorted values; None of none."""
    if not values:
        return None
    return values[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


def figures(outcome: Outcome) -> Figures:
    """The figures of one run, everything after its warm-up. None = nothing to measure."""
    warm_s = outcome.scenario.warmup_s
    ended = [r for r in outcome.records if r.ended_s > warm_s]
    good = [r for r in ended if r.ok]
    waits = sorted(r.ended_s - r.asked_s for r in good)
    firsts = sorted(r.first_s - r.asked_s for r in good if r.first_s is not None)
    gaps = [
        gap
        for r in outcome.records
        for gap, at_s in zip(r.gaps_s, r.token_times_s[1:], strict=False)
        if at_s > warm_s
    ]
    totals = outcome.totals
    return {
        "tokens_per_s": outcome.tokens / totals.seconds,
        "request_p50_s": quantile(waits, 0.50),
        "request_p95_s": quantile(waits, 0.95),
        "request_p99_s": quantile(waits, 0.99),
        "ttft_p99_s": quantile(firsts, 0.99),
        "itl_std_s": statistics.pstdev(gaps) if len(gaps) > 1 else None,
        "requests": len(ended),
        "failed": len(ended) - len(good),
        "mean_temperature_c": totals.degree_seconds / totals.seconds,
        "max_temperature_c": totals.max_c,
        "seconds_over_limit": totals.over_s,
        "measured_s": totals.seconds,
        "frequency_changes_per_hour": totals.clock_changes * 3600.0 / totals.seconds,
        "joules_per_token": totals.joules / outcome.tokens if outcome.tokens else None,
    }


def table(name: str, feasible: bool, rows: Mapping[str, Figures]) -> str:
    """One scenario as a Markdown table."""
    heads = "policy | tokens/s | P50 s | P99 s | first P99 s | gap std s | failed | mean °C"
    heads += " | max °C | over limit % | clock changes/h | J/token"
    lines = [f"### {name}{'' if feasible else ' (infeasible: idle alone is too warm)'}", ""]
    lines += [f"| {heads} |", "|" + " --- |" * (heads.count("|") + 1)]
    for policy, row in rows.items():
        over = 100.0 * float(row["seconds_over_limit"] or 0.0) / float(row["measured_s"] or 1.0)
        cells = [
            policy,
            _cell(row["tokens_per_s"], 2),
            _cell(row["request_p50_s"], 1),
            _cell(row["request_p99_s"], 1),
            _cell(row["ttft_p99_s"], 1),
            _cell(row["itl_std_s"], 3),
            f"{row['failed']} of {row['requests']}",
            _cell(row["mean_temperature_c"], 1),
            _cell(row["max_temperature_c"], 1),
            _cell(over, 1),
            _cell(row["frequency_changes_per_hour"], 0),
            _cell(row["joules_per_token"], 2),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def write_json(path: Path, results: Mapping[str, Any]) -> None:
    text = json.dumps(results, indent=2, sort_keys=True, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def plot(path: Path, title: str, limit_c: float, runs: Mapping[str, Sequence[Sample]]) -> bool:
    """Temperature, clock, batch, duty and tokens/s over time; False when matplotlib is missing."""
    try:
        importlib.import_module("matplotlib").use("agg")
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        return False

    figure, axes = pyplot.subplots(5, 1, sharex=True, figsize=(11, 12), layout="constrained")
    names = ("°C", "MHz", "batch", "duty", "tokens/s")
    for policy, samples in runs.items():
        minutes = [s.at_s / 60 for s in samples]
        columns = (
            [s.temperature_c for s in samples],
            [s.clock_mhz for s in samples],
            [s.batch for s in samples],
            [s.duty for s in samples],
            speed(samples),
        )
        for axis, column in zip(axes, columns, strict=True):
            axis.plot(minutes, column, label=policy, linewidth=0.8)
    for axis, name in zip(axes, names, strict=True):
        axis.set_ylabel(name)
        axis.grid(alpha=0.3)
    axes[0].axhline(limit_c, color="black", linestyle=":", linewidth=1)
    axes[0].set_title(title)
    axes[0].legend(loc="lower right", ncols=3, fontsize="small")
    axes[-1].set_xlabel("minutes")
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
    return True


def speed(samples: Sequence[Sample], over_s: float = 60.0) -> list[float]:
    """Tokens per second over the minute before each sample."""
    speeds, first = [], 0
    for sample in samples:
        while sample.at_s - samples[first].at_s > over_s:
            first += 1
        span_s = sample.at_s - samples[first].at_s
        made = sample.tokens - samples[first].tokens
        speeds.append(made / span_s if span_s else 0.0)
    return speeds
