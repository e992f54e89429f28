"""Model folders: from configuration to the exported model of each engine of the chain."""

from __future__ import annotations

from pathlib import Path

import structlog

from edged import models
from edged.errors import ConfigError
from edged.settings import Config
from edged.twin import boards


def prepared(checked: Config) -> dict[str, Path]:
    """The exported model of each engine that has one here; blocks for the time of an export.

    Raises ConfigError naming the key.
    """
    own = [name for name in checked.engines.chain if name != "openai"]
    return {name: _model_dir(name, checked) for name in own}


def _model_dir(engine: str, checked: Config) -> Path:
    state_dir = Path(checked.state_dir)
    log = structlog.get_logger("edged")
    dtype: str = checked.cpu.dtype
    target, gears = "cpu", list[str]()
    if engine == "npu":
        npu = checked.npu
        if npu.model:
            return _expanded("npu.model", npu.model)
        dtype, target = npu.dtype, "twin"
        gears = ["--batch-gears", ",".join(map(str, npu.batch_gears))]
        gears += ["--context-gears", ",".join(map(str, npu.context_gears))]
        gears += ["--prefill-chunk", str(npu.prefill_chunk)]
        gears += ["--soc", boards.load(npu.twin).soc]
    if engine == "cpu" and checked.cpu.model:
        source = _existing("cpu.model", checked.cpu.model)
    else:
        source = _source(checked, state_dir)
    return models.ensure_exported(
        source,
        state_dir,
        dtype,
        lambda line: log.info("preparing_model", engine=engine, what=line),
        target,
        gears,
    )


def _source(checked: Config, state_dir: Path) -> Path:
    """The model to serve: model.path, else the demo model."""
    if checked.model.path:
        return _existing("model.path", checked.model.path)
    path = models.demo_path(state_dir)
    if not path.exists():
        raise ConfigError(
            "model.path: not set, and the demo model is not there; "
            "run `edged models fetch demo` or set model.path"
        )
    return path


def _existing(key: str, given: str) -> Path:
    path = _expanded(key, given)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{key}: {path} does not exist") from None
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from None
    return path


def _expanded(key: str, given: str) -> Path:
    try:
        return Path(given).expanduser().absolute()  # workers have another working directory
    except RuntimeError:  # a user without a home
        raise ConfigError(f"{key}: the home folder is unknown; give a full path") from None
