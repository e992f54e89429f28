"""The thermal guard in the lab: the figures that are promised, and the table of every scenario.

Writes the section of docs/benchmarks.md between its thermal marks and, with matplotlib, a plot.
Deterministic by seed. Prints whether each bar of bench_thermal_bars.py holds, exits 1 if one does
not, and ends with one line `RESULT ` + JSON; every ratio is of tokens per second.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path

import bench_thermal_bars as bars
import msgspec
from bench_thermal_bars import Runs

from edged.twin import lab, lab_report
from edged.twin import lab_scenario as scenarios
from edged.twin.lab_report import Figures
from edged.twin.lab_scenario import SCENARIOS_DIR, Scenario

DOCS = Path(__file__).parents[1] / "docs"
PLOT = DOCS / "images" / "thermal.png"
BEGIN, END = "<!-- thermal:begin -->", "<!-- thermal:end -->"
QUICK_S = 1500.0
PLOTTED_S = 1200
PROCESSES = os.cpu_count() or 1


def variants(quick: bool) -> list[Scenario]:
    """field-sustained as it is, and what it is compared with, each under a name of its own."""
    sustained = scenarios.load(SCENARIOS_DIR / "field-sustained.toml")
    if quick:
        sustained = msgspec.structs.replace(sustained, duration_s=QUICK_S)

    def variant(name: str, **changes: object) -> Scenario:
        return msgspec.structs.replace(sustained, name=name, **changes)

    four = msgspec.structs.replace(sustained.load, clients=((0.0, 4.0),))
    rounds = msgspec.structs.replace(sustained.load, rounds=True)
    fine = scenarios.Sensor(quantum_c=0.1)
    return [
        variant("sustained"),
        variant("sustained-fine", sensor=fine),
        variant("steady", jitter=0.0),
        variant("steady-4", jitter=0.0, load=four),
        variant("sustained-4", load=four),
        variant("rounds-direct", load=rounds, allocator="direct"),
        variant("rounds-arena", load=rounds),
    ]


def ratio(runs: Runs, ours: tuple[str, str], theirs: tuple[str, str], key: str) -> float:
    one, other = runs[ours][0][key], runs[theirs][0][key]
    assert one is not None
    assert other
    return round(float(one) / float(other), 4)


def headline(runs: Runs) -> dict[str, float]:
    """The promised figures. The arena's gain and the policy's are told apart."""
    ours = runs["sustained", "edged"][0]
    speed = "tokens_per_s"
    return {
        "oracle_ratio_fine_sensor": ratio(
            runs, ("sustained-fine", "edged"), ("sustained-fine", "oracle"), speed
        ),
        "oracle_ratio_coarse_sensor": ratio(
            runs, ("sustained", "edged"), ("sustained", "oracle"), speed
        ),
        "ratio_to_none_at_4": ratio(runs, ("sustained", "edged"), ("sustained-4", "none"), speed),
        "policy_gain_at_8": ratio(runs, ("sustained", "edged"), ("sustained", "none"), speed),
        "arena_gain_none_at_8": ratio(
            runs, ("rounds-arena", "none"), ("rounds-direct", "none"), speed
        ),
        "direct_failed_ratio": ratio_failed(runs["rounds-direct", "none"][0]),
        "arena_failed_ratio": ratio_failed(runs["rounds-arena", "none"][0]),
        "gap_std_gain": ratio(runs, ("steady-4", "none"), ("steady", "edged"), "itl_std_s"),
        "mean_c": round(float(ours["mean_temperature_c"] or 0.0), 2),
        "max_c": round(float(ours["max_temperature_c"] or 0.0), 2),
        "over_limit_ratio": round(
            float(ours["seconds_over_limit"] or 0.0) / float(ours["measured_s"] or 1.0), 4
        ),
        "failed": float(ours["failed"] or 0),
    }


def ratio_failed(row: Figures) -> float:
    return round(float(row["failed"] or 0) / float(row["requests"] or 1), 4)


def needed(chosen: list[Scenario], processes: int) -> Runs:
    """Only the runs that a figure asks for."""
    wanted = {
        "sustained": ("none", "edged", "oracle"),
        "sustained-fine": ("edged", "oracle"),
        "steady": ("edged",),
    }
    runs: Runs = {}
    for scenario in chosen:
        runs |= lab.run_all([scenario], wanted.get(scenario.name, ("none",)), processes)
    return runs


def speed_factor() -> float:
    """Seconds of simulated time per second of CPU, field-sustained under the policy, 1 process."""
    scenario = scenarios.load(SCENARIOS_DIR / "field-sustained.toml")
    began_s = time.process_time()
    lab.run_one(scenario, "edged")
    return round(scenario.duration_s / (time.process_time() - began_s))


def section(found: dict[str, float], rows: list[bars.Row], tables: list[str]) -> str:
    lines = ["| figure | value |", "| --- | --- |"]
    lines += [f"| {name.replace('_', ' ')} | {value:g} |" for name, value in found.items()]
    parts = ["\n".join(lines), bars.table(rows), *tables]
    return f"{BEGIN}\n" + "\n\n".join(parts) + f"\n{END}"


def write_section(path: Path, text: str) -> None:
    """Between the marks, or at the end under a heading of its own."""
    whole = path.read_text(encoding="utf-8") if path.exists() else "# Figures\n"
    if BEGIN in whole:
        before, _, rest = whole.partition(BEGIN)
        whole = before + text + rest.partition(END)[2]
    else:
        whole = f"{whole.rstrip()}\n\n## The thermal guard in the lab\n\n{text}\n"
    path.write_text(whole, encoding="utf-8")


def shipped(chosen: list[Scenario], processes: int) -> tuple[Runs, dict[str, float]]:
    """Every scenario under every policy, with the seconds and the CPU seconds it took."""
    began_s, began_cpu_s = time.perf_counter(), _children_cpu_s()
    runs = lab.run_all(chosen, lab.POLICIES, processes)
    return runs, {
        "all_scenarios_s": round(time.perf_counter() - began_s, 1),
        "all_scenarios_cpu_s": round(_children_cpu_s() - began_cpu_s, 1),
        "all_scenarios_processes": processes,
    }


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def plot(runs: Runs) -> None:
    name = "field-sustained"
    samples = {p: runs[name, p][1][:PLOTTED_S] for p in ("none", "edged", "oracle")}
    title = "8 clients at 30 °C: the first 20 minutes"
    PLOT.parent.mkdir(exist_ok=True)
    if not lab_report.plot(PLOT, title, 80.0, samples):
        print(f"no plot: {lab_report.NO_PLOT}")


def missed(found: dict[str, float], rows: list[bars.Row]) -> int:
    """Prints every bar's verdict; returns how many are missed."""
    known = [bar for bar in bars.HEADLINE if bar.name in found]
    print("\n".join(bar.line(found[bar.name]) for bar in known))
    bad = {row.name: row.misses(80.0) for row in rows if row.misses(80.0)}
    for name, what in bad.items():
        print(f"MISSED: {name}: {', '.join(what)}")
    return len(bad) + sum(not bar.holds(found[bar.name]) for bar in known)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short runs, headline only, no docs")
    parser.add_argument("--processes", type=int, default=PROCESSES, help="default: one per CPU")
    arguments = parser.parse_args()
    found = headline(needed(variants(arguments.quick), arguments.processes))
    found["times_real_time"] = speed_factor()
    rows: list[bars.Row] = []
    if not arguments.quick:
        chosen = [scenarios.load(path) for path in sorted(SCENARIOS_DIR.glob("*.toml"))]
        runs, took = shipped(chosen, arguments.processes)
        found |= took
        rows = [bars.row(scenario, runs) for scenario in chosen]
        tables = [
            lab_report.table(
                s.name, scenarios.feasible(s), {p: runs[s.name, p][0] for p in lab.POLICIES}
            )
            for s in chosen
        ]
        plot(runs)
        write_section(DOCS / "benchmarks.md", section(found, rows, tables))
    count = missed(found, rows)
    print("RESULT " + json.dumps(found))
    return 1 if count and not arguments.quick else 0


if __name__ == "__main__":
    sys.exit(main())
