"""`edged simulate`: scenarios x policies on the virtual loop -> table, results.json, pictures.

Deterministic by each scenario's seed. Runs are spread over processes; nothing here touches a
board, a socket or the daemon.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from tqdm import tqdm

from edged.errors import ConfigError
from edged.guard.policy import Levers, Settings
from edged.twin import lab_report, lab_run
from edged.twin import lab_scenario as scenarios
from edged.twin.lab_oracle import Oracle
from edged.twin.lab_policies import Base, Edged, FieldGuard, LabPolicy, Nothing, StepWise
from edged.twin.lab_report import Figures
from edged.twin.lab_run import Sample
from edged.twin.lab_scenario import Scenario
from edged.twin.physics import Board

POLICIES = ("none", "field-guard", "step-wise", "base", "edged", "oracle")
Results = dict[str, dict[str, object]]


def make_policy(name: str, scenario: Scenario, board: Board, levers: Levers) -> LabPolicy:
    settings = Settings(limit_c=scenario.limit_c, itl_slo_s=scenario.itl_slo_s)
    if name == "none":
        return Nothing()
    if name == "field-guard":
        return FieldGuard(levers, scenario.limit_c)
    if name == "step-wise":
        return StepWise(levers, scenario.limit_c)
    if name == "base":
        return Base(settings, levers)
    if name == "edged":
        return Edged(settings, levers)
    return Oracle(scenario, board, levers)


def run_one(scenario: Scenario, policy: str) -> tuple[Figures, list[Sample]]:
    """One run of one policy; pure but for CPU time."""
    outcome = lab_run.run(scenario, lambda s, b, levers: make_policy(policy, s, b, levers))
    return lab_report.figures(outcome), outcome.timeline


def run_all(
    chosen: Sequence[Scenario], policies: Sequence[str], processes: int
) -> dict[tuple[str, str], tuple[Figures, list[Sample]]]:
    """Every scenario under every policy, longest scenarios first, with a progress bar."""
    jobs = [(s, p) for s in sorted(chosen, key=lambda s: -s.duration_s) for p in policies]
    done: dict[tuple[str, str], tuple[Figures, list[Sample]]] = {}
    context = multiprocessing.get_context("spawn")  # no fork: threads of the caller stay alone
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        futures = {pool.submit(run_one, s, p): (s.name, p) for s, p in jobs}
        for future in tqdm(as_completed(futures), total=len(futures), unit="run", desc="lab"):
            done[futures[future]] = future.result()
    return done


def results_of(
    chosen: Sequence[Scenario],
    policies: Sequence[str],
    done: dict[tuple[str, str], tuple[Figures, list[Sample]]],
) -> Results:
    """The content of results.json."""
    return {
        scenario.name: {
            "feasible": scenarios.feasible(scenario),
            "policies": {policy: done[scenario.name, policy][0] for policy in policies},
        }
        for scenario in chosen
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="edged simulate", description=__doc__)
    parser.add_argument("scenarios", nargs="+", type=Path, metavar="SCENARIO.toml")
    parser.add_argument(
        "--policy", default=",".join(POLICIES), help="comma-separated; default: all (%(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("lab"), metavar="DIR")
    parser.add_argument("--processes", type=int, default=0, help="default: one per CPU")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Raises ConfigError naming what is wrong with a scenario or a policy's name."""
    arguments = _parser().parse_args(argv)
    policies = [name.strip() for name in arguments.policy.split(",") if name.strip()]
    unknown = [name for name in policies if name not in POLICIES]
    if unknown or not policies:
        raise ConfigError(f"--policy: unknown {unknown}; choose from {', '.join(POLICIES)}")
    chosen = [scenarios.load(path) for path in arguments.scenarios]
    if len({s.name for s in chosen}) < len(chosen):
        raise ConfigError("two scenarios have the same file name; results would overwrite")
    done = run_all(chosen, policies, arguments.processes or multiprocessing.cpu_count())
    results = results_of(chosen, policies, done)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    lab_report.write_json(out / "results.json", results)
    tables = [
        lab_report.table(s.name, scenarios.feasible(s), {p: done[s.name, p][0] for p in policies})
        for s in chosen
    ]
    (out / "table.md").write_text("\n".join(tables), encoding="utf-8")
    print("\n".join(tables))
    plotted = [
        lab_report.plot(
            out / f"{s.name}.png",
            f"{s.name}: {s.description}",
            s.limit_c,
            {p: done[s.name, p][1] for p in policies},
        )
        for s in chosen
    ]
    if not all(plotted):
        print(f"no pictures: {lab_report.NO_PLOT}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(f"edged simulate: {error}")
