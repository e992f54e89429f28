"""Rungs: the launch configurations of an engine, from the full one to the smallest. Pure but for
the sizes of files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from edged import wire
from edged.memory import Needs, longest_tokens, needs
from edged.settings import Config

_HALVINGS = 2


@dataclass(frozen=True)
class Rung:
    """A launch configuration. needs: None = unknown, not checked."""

    words: str
    launch: wire.Launch
    needs: Needs | None = None


def make_rungs(name: str, config: Config, model_dir: Path, context_tokens: int) -> list[Rung]:
    """From the full configuration to the smallest."""
    section = config.npu if name == "npu" else config.cpu
    launch = wire.Launch(
        engine=name,
        model_dir=str(model_dir),
        slots=section.slots,
        context_tokens=context_tokens,
        threads=config.cpu.threads,
        prefill_chunk=min(section.prefill_chunk, context_tokens),
        golden_dir=str(Path(config.state_dir) / "golden"),
    )
    counts = sorted({max(1, section.slots >> n) for n in range(_HALVINGS + 1)}, reverse=True)
    rungs = [_rung(msgspec.structs.replace(launch, slots=slots), "") for slots in counts]
    if name == "npu" and config.npu.small_model:
        slots = counts[min(1, len(counts) - 1)]
        small = _shortened(launch, small_model_dir(config), slots)
        rungs.append(_rung(small, " of the small model"))
    if name == "npu" and config.npu.memory == "own":
        rungs = [replace(rung, needs=None) for rung in rungs]  # the worker asks the card
    return rungs


def small_model_dir(config: Config) -> Path:
    """Absolute: workers have another working directory."""
    return Path(config.npu.small_model).expanduser().absolute()


def _shortened(launch: wire.Launch, model_dir: Path, slots: int) -> wire.Launch:
    """The same with another model, which may hold less."""
    return msgspec.structs.replace(
        launch,
        model_dir=str(model_dir),
        slots=slots,
        context_tokens=min(launch.context_tokens, longest_tokens(model_dir)),
    )


def _rung(launch: wire.Launch, of: str) -> Rung:
    words = f"{launch.slots} slot{'s' if launch.slots > 1 else ''}{of}"
    sums = needs(launch.engine, Path(launch.model_dir), launch.slots, launch.context_tokens)
    return Rung(words, launch, sums)
