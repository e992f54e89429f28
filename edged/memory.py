"""Memory: what a load will need, what the machine has, and whether the one fits the other.

Reads model.json and /proc, never a weight. The sum is an upper estimate made before a process
exists; the NPU's worker repeats it with the library's own figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

SPARE_BYTES = 512 << 20  # left to the rest of the machine
BESIDE_BYTES = 1 << 30  # left where a fallback is kept loaded beside the NPU's model
_PROCESS_BYTES = 64 << 20  # interpreter and libraries, measured on x86
# Of the weights, while they are loaded: staging of a driver, unpacking of a few tensors.
_TRANSIENT_SHARE = {"npu": 0.2, "cpu": 0.1}
_GRAPH_FILES = {"npu": "model.om", "cpu": "model.onnx"}
_TYPE_BYTES = {"fp32": 4, "fp16": 2}
_MIB = 1 << 20


@dataclass(frozen=True)
class Needs:
    """Bytes of one launch: for a moment while loading, for good, and for slots."""

    transient_bytes: int
    resident_bytes: int
    arena_bytes: int

    @property
    def held_bytes(self) -> int:
        """What it occupies once loaded."""
        return self.resident_bytes + self.arena_bytes

    @property
    def total_bytes(self) -> int:
        return self.transient_bytes + self.held_bytes + SPARE_BYTES

    def words(self) -> str:
        parts = (self.resident_bytes, self.arena_bytes, self.transient_bytes, SPARE_BYTES)
        resident, arena, transient, spare = (size // _MIB for size in parts)
        return (
            f"weights {resident} + slots {arena} + loading {transient} + spare {spare} = "
            f"{self.total_bytes // _MIB} MiB"
        )


class _Manifest(msgspec.Struct, frozen=True):
    """The part of model.json that tells the size of the caches."""

    layers: int
    kv_heads: int
    head_dim: int
    vocab: int
    context_tokens: int
    cache_dtype: str
    gears: list[tuple[int, int, int]] = []


def needs(kind: str, model_dir: Path, slots: int, context_tokens: int) -> Needs | None:
    """kind: "npu" or "cpu". None when the folder cannot be read: its worker tells why, better."""
    try:
        manifest = msgspec.json.decode((model_dir / "model.json").read_bytes(), type=_Manifest)
        files = list(model_dir.glob(_GRAPH_FILES[kind] + "*"))
        weight_bytes = sum(path.stat().st_size for path in files)
    except (OSError, msgspec.DecodeError):
        return None
    longest = longest_tokens(model_dir)
    context = min(longest, context_tokens or longest)
    planes = 2 * manifest.layers * manifest.kv_heads * manifest.head_dim
    row_bytes = planes * _TYPE_BYTES.get(manifest.cache_dtype, 4)
    cache_bytes = slots * context * row_bytes
    transient_bytes = int(_TRANSIENT_SHARE[kind] * weight_bytes)
    if kind == "cpu":  # its cache grows: for a moment the smaller half lies beside the new one
        transient_bytes = max(transient_bytes, cache_bytes // 2)
    rows = max([slots, *(tokens for _, tokens, _ in manifest.gears)])
    scratch_bytes = slots * manifest.vocab * 4 + rows * row_bytes
    return Needs(transient_bytes, weight_bytes + _PROCESS_BYTES, cache_bytes + scratch_bytes)


def longest_tokens(model_dir: Path) -> int:
    """The longest sequence the model of this folder holds; 0 when it cannot be read."""
    try:
        manifest = msgspec.json.decode((model_dir / "model.json").read_bytes(), type=_Manifest)
    except (OSError, msgspec.DecodeError):
        return 0
    longest = max((context for _, _, context in manifest.gears), default=manifest.context_tokens)
    return min(manifest.context_tokens, longest)


@dataclass(frozen=True)
class Pressure:
    """Percent of the last 10 s in which some, or all, tasks waited for memory."""

    some: float
    full: float


class Memory:
    """The machine's figures. proc, cgroups: where procfs and the control groups (version 2) are; a
    missing file gives None, never an error."""

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc, self._cgroups = proc, cgroups

    def available_bytes(self) -> int | None:
        """MemAvailable, or what a limit on our control group (MemoryMax=) leaves, if less."""
        kib = self._number("meminfo", "MemAvailable:")
        counts = [] if kib is None else [kib * 1024]
        return min([*counts, *self._group_counts()], default=None)

    def _group_counts(self) -> list[int]:
        """Free bytes of our group and of each around it that has a limit."""
        own = next((x[3:] for x in self._lines("self/cgroup") if x.startswith("0::/")), "")
        groups = [own.strip("/"), *map(str, Path(own.strip("/")).parents)] if own else []
        counts = []
        for folder in (self._cgroups / group for group in groups):
            limit, used, cache = (
                _first_number(folder / "memory.max", ""),
                _first_number(folder / "memory.current", ""),
                _first_number(folder / "memory.stat", "inactive_file"),
            )
            if limit is not None and used is not None:
                counts.append(max(0, limit - used + (cache or 0)))  # cache goes when it must
        return counts

    def total_bytes(self) -> int | None:
        kib = self._number("meminfo", "MemTotal:")
        return None if kib is None else kib * 1024

    def oom_kills(self) -> int | None:
        """Processes the kernel has killed for memory since boot."""
        return self._number("vmstat", "oom_kill")

    def resident_bytes(self, pid: int) -> int | None:
        """What a process has of it; a device's memory is not in that count."""
        kib = self._number(f"{pid}/status", "VmRSS:")
        return None if kib is None else kib * 1024

    def pressure(self) -> Pressure | None:
        """None where the kernel does not count it (CONFIG_PSI)."""
        found = {}
        for line in self._lines("pressure/memory"):
            kind, *pairs = line.split()
            values = dict(pair.split("=") for pair in pairs)
            found[kind] = float(values.get("avg10", "nan"))
        return Pressure(found["some"], found["full"]) if {"some", "full"} <= found.keys() else None

    def _number(self, file: str, name: str) -> int | None:
        return _first_number(self._proc / file, name)

    def _lines(self, file: str) -> list[str]:
        return _lines(self._proc / file)


def _first_number(path: Path, name: str) -> int | None:
    """Of the line that begins with this word; "" = of the only line. None: no such number."""
    for line in _lines(path):
        words = line.split() if name else ["", *line.split()]
        if words[:1] == [name] and words[1:] and words[1].isdigit():
            return int(words[1])
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []


@dataclass(frozen=True)
class Verdict:
    fits: bool
    words: str


class Admission:
    """Who may load now. Loads under way are promised their memory until they have taken it."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._promised: dict[str, int] = {}  # by engine

    def ask(self, engine: str, load: Needs, device_free_bytes: int | None = None) -> Verdict:
        """A yes is a promise until `settle`. device_free_bytes: of a device with a count of its
        own, on top of what Linux says."""
        promised = self._promised_beside(engine)
        free = self._free_bytes(engine, 0, device_free_bytes)
        if free is None:
            return Verdict(True, f"{load.words()}; what is available is unknown here")
        others = f" ({promised // _MIB} more are promised to other loads)" if promised else ""
        words = f"{load.words()}, {max(0, free) // _MIB} MiB are available{others}"
        if load.total_bytes > free:
            return Verdict(False, f"{words}; use fewer slots, a shorter context or a smaller model")
        self.reserve(engine, load)
        return Verdict(True, words)

    def reserve(self, engine: str, load: Needs) -> None:
        """Streams wait for this engine: nobody else gets the memory it will ask for."""
        self._promised[engine] = load.transient_bytes + load.held_bytes

    def settle(self, engine: str) -> None:
        """Its load is over, well or not: what it took shows in the machine's figures."""
        self._promised.pop(engine, None)

    def room(
        self, engine: str, now: Needs, wanted: Needs, device_free_bytes: int | None = None
    ) -> bool:
        """Would `wanted` fit in place of `now`, which this engine has loaded?"""
        held = now.held_bytes
        device = None if device_free_bytes is None else device_free_bytes + held
        return self.fits(engine, wanted, held, device)

    def fits(
        self, engine: str, wanted: Needs, more_bytes: int, device_free_bytes: int | None = None
    ) -> bool:
        """Would it fit if the machine had `more_bytes` more? Promises nothing."""
        free = self._free_bytes(engine, more_bytes, device_free_bytes)
        return free is None or wanted.total_bytes <= free

    def _free_bytes(
        self, engine: str, more_bytes: int, device_free_bytes: int | None
    ) -> int | None:
        """By the smaller count, without what others will take; None = unknown."""
        available = self._memory.available_bytes()
        counts = [] if available is None else [available + more_bytes]
        counts += [] if device_free_bytes is None else [device_free_bytes]
        return min(counts) - self._promised_beside(engine) if counts else None

    def _promised_beside(self, engine: str) -> int:
        return sum(size for name, size in self._promised.items() if name != engine)


def pressed(memory: Memory, floor_bytes: int, some_percent: float, full_percent: float) -> str:
    """Why the kernel may soon kill somebody, in words; empty while it will not."""
    available = memory.available_bytes()
    if available is not None and available < floor_bytes:
        return f"{available // _MIB} MiB of memory are left, less than {floor_bytes // _MIB}"
    pressure = memory.pressure()
    if pressure is None:
        return ""
    if pressure.full >= full_percent:
        return f"all tasks waited for memory {pressure.full:.0f} % of the last 10 s"
    if pressure.some >= some_percent:
        return f"tasks waited for memory {pressure.some:.0f} % of the last 10 s"
    return ""
