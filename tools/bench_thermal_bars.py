"""What bench_thermal.py promises: each figure with its bar, and one row per scenario.

Pure arithmetic on finished runs. A scenario's disturbances are its own steps of load and
surroundings; for STEP_S after one the chip may be a degree warmer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edged.guard.policy import DUTY_FLOOR
from edged.twin import lab_scenario as scenarios
from edged.twin.lab_report import Figures
from edged.twin.lab_run import Sample
from edged.twin.lab_scenario import Scenario

STEP_S, SETTLED_S = 60.0, 10.0
Runs = dict[tuple[str, str], tuple[Figures, list[Sample]]]


@dataclass(frozen=True)
class Bar:
    """name: key of the figure; at_least or else at most `value`."""

    name: str
    value: float
    at_least: bool = True

    def holds(self, found: float) -> bool:
        return found >= self.value if self.at_least else found <= self.value

    def line(self, found: float) -> str:
        sign = ">=" if self.at_least else "<="
        verdict = "holds" if self.holds(found) else "MISSED"
        return f"{verdict}: {self.name.replace('_', ' ')} {found:g} {sign} {self.value:g}"


HEADLINE = (
    Bar("oracle_ratio_fine_sensor", 0.97),
    Bar("oracle_ratio_coarse_sensor", 0.94),
    Bar("ratio_to_none_at_4", 1.15),
    Bar("policy_gain_at_8", 1.10),
    Bar("gap_std_gain", 4.0),
    Bar("mean_c", 80.0, at_least=False),
    Bar("max_c", 82.0, at_least=False),
    Bar("over_limit_ratio", 0.02, at_least=False),
    Bar("failed", 0.0, at_least=False),
    Bar("times_real_time", 500.0),
    Bar("all_scenarios_s", 300.0, at_least=False),
)


@dataclass(frozen=True)
class Row:
    """One scenario under `edged`. calm_c, stirred_c: the warmest outside of and within STEP_S
    after a disturbance, from readings once per second; oracle_ratio None = infeasible."""

    name: str
    oracle_ratio: float | None
    calm_c: float
    stirred_c: float
    changes_per_hour: float
    failed: int
    lowest: bool | None  # infeasible: at its lowest SETTLED_S after the last disturbance

    def misses(self, limit_c: float) -> list[str]:
        if self.oracle_ratio is None:
            return [] if self.lowest else ["not at its lowest"]
        found = {
            f"{self.oracle_ratio:.3f} of the oracle": self.oracle_ratio < 0.90,
            f"{self.calm_c:.1f} °C": self.calm_c > limit_c + 2.0,
            f"{self.stirred_c:.1f} °C after a step": self.stirred_c > limit_c + 3.0,
            f"{self.changes_per_hour:.0f} changes an hour": self.changes_per_hour > 20,
            f"{self.failed} lost": self.failed > 0,
        }
        return [what for what, missed in found.items() if missed]


def steps_s(scenario: Scenario) -> list[float]:
    """When load or surroundings change at once, the start included."""
    around = scenario.surroundings
    profiles = (scenario.load.clients, around.resistance, around.cpu_ratio)
    moments = {at_s for profile in profiles for at_s, _ in profile}
    every_s = scenario.load.burst_every_s
    if every_s:
        moments |= {n * every_s for n in range(int(scenario.duration_s / every_s) + 1)}
    return sorted(moments)


def row(scenario: Scenario, runs: Runs) -> Row:
    figures, samples = runs[scenario.name, "edged"]
    best = runs[scenario.name, "oracle"][0]
    feasible, steps = scenarios.feasible(scenario), steps_s(scenario)
    warm = [s for s in samples if s.at_s > scenario.warmup_s]
    stirred = [s.temperature_c for s in warm if _after_a_step(s.at_s, steps)]
    calm = [s.temperature_c for s in warm if not _after_a_step(s.at_s, steps)]
    ratio = float(figures["tokens_per_s"] or 0.0) / float(best["tokens_per_s"] or 1.0)
    return Row(
        scenario.name,
        ratio if feasible else None,
        max(calm),
        max(stirred, default=max(calm)),
        float(figures["frequency_changes_per_hour"] or 0.0),
        int(figures["failed"] or 0),
        None if feasible else _lowest(scenario, samples),
    )


def _after_a_step(at_s: float, steps: Sequence[float]) -> bool:
    return any(step_s <= at_s < step_s + STEP_S for step_s in steps)


def _lowest(scenario: Scenario, samples: Sequence[Sample]) -> bool:
    """From SETTLED_S after it became infeasible (or was loaded first): lowest clock, at most
    one sequence, floor duty."""
    board = scenarios.board_of(scenario)
    hot_s = scenario.surroundings.resistance[-1][0]
    late = [s for s in samples if s.at_s >= hot_s + SETTLED_S + scenario.sensor.interval_s]
    clock_mhz = min(board.clock.gears_mhz) if board.clock.settable else None
    return all(
        s.clock_mhz == (clock_mhz or s.clock_mhz) and s.batch <= 1 and s.duty <= DUTY_FLOOR
        for s in late
    )


def table(rows: Sequence[Row]) -> str:
    """One Markdown row per scenario."""
    heads = "scenario | of the oracle's tokens/s | max °C | max °C after a step | changes/h | lost"
    lines = [f"| {heads} |", "|" + " --- |" * (heads.count("|") + 1)]
    for r in rows:
        ratio = "infeasible, at its lowest" if r.oracle_ratio is None else f"{r.oracle_ratio:.3f}"
        if r.oracle_ratio is None and not r.lowest:
            ratio = "infeasible, NOT at its lowest"
        cells = f"{r.calm_c:.1f} | {r.stirred_c:.1f} | {r.changes_per_hour:.0f} | {r.failed}"
        lines.append(f"| {r.name} | {ratio} | {cells} |")
    return "\n".join(lines)
