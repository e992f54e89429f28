"""Sources found on a machine, the whole set with real processes, the twin, and what check says."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes_sensors import (
    TABLE_310B4,
    FakeDcmi,
    ScriptedSensor,
    alive,
    build_dcmi,
    lost,
    printing,
    program,
    starts,
    thermal_root,
    until,
)

from edged import config
from edged.errors import ConfigError
from edged.guard.sensors import Raw, SensorError, check, factory, linux, places
from edged.guard.sensors.hub import Hub
from edged.settings import Sensors
from edged.twin import state
from edged.twin.sensor import TwinSensor


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_dcmi(tmp_path_factory.mktemp("dcmi"))


# sysfs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zones", "hwmon", "name", "wanted"),
    [
        ({"cpu-thermal": "50000", "npu-thermal": "65500"}, {}, "", Raw(65.5, reset_c=110)),
        ({"soc_thermal": "61000"}, {"ascend310": "66000"}, "", Raw(66)),
        ({"cpu": "50000", "soc_thermal": "61000"}, {}, "", Raw(61, reset_c=110)),
        ({"npu": "65000", "odd zone": "70000"}, {}, "odd zone", Raw(70, reset_c=110)),
        ({}, {"davinci": "65"}, "", Raw(65)),
        ({"npu": "-5000"}, {}, "", Raw(-5, reset_c=110)),
    ],
)
def test_the_zone_of_the_chip_is_read(
    tmp_path: Path, zones: dict[str, str], hwmon: dict[str, str], name: str, wanted: Raw
) -> None:
    """An NPU's name goes before a SoC's, a configured one before all; thousandths or not."""
    root = thermal_root(tmp_path, zones, hwmon)
    assert linux.read(str(root), name) == wanted


@pytest.mark.parametrize(
    ("zones", "name", "words"),
    [
        ({}, "", "tells of an NPU or SoC; set sensors.linux_name to: none"),
        ({"x86_pkg_temp": "50000", "acpitz": "4"}, "", "linux_name to: acpitz, x86_pkg_temp"),
        ({"npu": "65000"}, "nqu", "is called 'nqu'"),
        ({"npu": "warm"}, "", "holds no number"),
        ({"npu": ""}, "", "holds no number"),
    ],
)
def test_a_machine_without_such_a_zone_says_what_there_is(
    tmp_path: Path, zones: dict[str, str], name: str, words: str
) -> None:
    """A host's own CPU zone is never taken for the chip; the message names the choices."""
    root = thermal_root(tmp_path, zones)
    with pytest.raises(SensorError) as caught:
        linux.read(str(root), name)
    assert words in str(caught.value)


def test_zones_are_taken_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """Of twelve zones called npu it is zone 0, not zone 10, on every start."""
    for index in range(12):
        zone = tmp_path / f"class/thermal/thermal_zone{index}"
        zone.mkdir(parents=True)
        (zone / "type").write_text("npu")
        (zone / "temp").write_text(f"{60 + index}000")
    assert linux.read(str(tmp_path), "").temperature_c == 60
    assert [zone.value.parent.name for zone in linux.zones(tmp_path)][9:] == [
        "thermal_zone9",
        "thermal_zone10",
        "thermal_zone11",
    ]


def test_a_zone_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A file that is gone, or a folder in its place, is told with its path."""
    root = thermal_root(tmp_path, {"npu": "65000"})
    value = root / "class/thermal/thermal_zone0/temp"
    value.unlink()
    value.mkdir()
    with pytest.raises(SensorError, match=r"cannot read .*thermal_zone0/temp: Is a directory"):
        linux.read(str(root), "")


# which sources -----------------------------------------------------------------------------------


def test_auto_takes_what_is_here(tmp_path: Path, library: Path) -> None:
    """With nothing here there is no source; with everything, the most direct one first."""
    nowhere = Sensors(
        dcmi_library=str(tmp_path / "no.so"), npu_smi="no-such-tool", linux_root=str(tmp_path)
    )
    assert factory.wanted(nowhere) == ()
    root = thermal_root(tmp_path / "sys", {"npu": "65000"})
    everything = Sensors(
        dcmi_library=str(library),
        npu_smi=str(printing(tmp_path, TABLE_310B4)),
        linux_root=str(root),
        command=("/bin/echo", "60"),
    )
    assert factory.wanted(everything) == ("command", "dcmi", "npu-smi", "linux")


def test_the_drivers_files_are_found_where_they_may_be(tmp_path: Path, library: Path) -> None:
    """LD_LIBRARY_PATH and PATH are searched; a configured path that is wrong is not replaced."""
    tool = printing(tmp_path, "")
    assert places.npu_smi("", {"PATH": str(tmp_path)}) == str(tool)
    assert places.npu_smi(str(tmp_path / "other"), {"PATH": str(tmp_path)}) is None
    found = places.dcmi_library("", {"LD_LIBRARY_PATH": f":/nowhere:{library.parent}"})
    assert found == str(library)
    assert places.dcmi_library("/nowhere/libdcmi.so", {}) is None


def test_the_drivers_own_libraries_are_found_without_an_environment() -> None:
    """Under systemd nobody has sourced the vendor's script: the usual folders are searched, after
    the operator's own, and never the working folder."""
    assert places.loader_path({}).split(":")[0] == "/usr/lib64"
    assert places.loader_path({"LD_LIBRARY_PATH": "/mine::/usr/lib64:"}).split(":")[:3] == [
        "/mine",
        "/usr/lib64",
        "/usr/local/Ascend/driver/lib64/driver",
    ]
    assert "" not in places.loader_path({"LD_LIBRARY_PATH": ":"}).split(":")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ('sensors.sources=["auto", "dcmi"]', "sensors.sources"),
        ('sensors.sources=["dcmi", "dcmi"]', "sensors.sources"),
        ('sensors.sources=["dcmi", "npu_smi"]', "sensors.sources"),
        ('sensors.sources=["command"]', "sensors.command"),
        ("sensors.good_reads=4", "sensors.good_reads"),
        ("sensors.stale_s=1.5", "sensors.stale_s"),
        ("sensors.timeout_s=0", "sensors.timeout_s"),
        ("sensors.chip=-1", "sensors.chip"),
    ],
)
def test_settings_that_contradict_are_refused_by_name(override: str, key: str) -> None:
    """What cannot work is told at start, with the key."""
    with pytest.raises(ConfigError) as caught:
        config.load(overrides=(override,))
    assert str(caught.value).startswith(key)


async def test_named_sources_are_there_even_if_missing(tmp_path: Path) -> None:
    """A source that was asked for and is not here is in status with the reason, not left out."""
    settings = Sensors(
        sources=("npu-smi", "dcmi", "linux"),
        npu_smi=str(tmp_path / "npu-smi"),
        dcmi_library=str(tmp_path / "libdcmi.so"),
        linux_root=str(tmp_path),
        interval_s=0.05,
    )
    hub = factory.make_hub(settings, [ScriptedSensor("twin", 50)])
    await until_read(hub, lambda: all(state.of >= 1 for state in hub.describe()))
    await until_read(hub, lambda: hub.device() is not None)
    problems = {state.name: state.problem for state in hub.describe()}
    assert list(problems) == ["twin", "npu-smi", "dcmi", "linux"]
    assert "cannot start" in problems["npu-smi"]
    assert "cannot load" in problems["dcmi"]
    assert "sensors.linux_name" in problems["linux"]
    reading = hub.latest(asyncio.get_running_loop().time())
    assert reading is not None
    assert reading.source == "twin"
    await hub.stop()


async def until_read(hub: Hub, condition: object) -> None:
    """Sample until the condition holds, within 20 s."""
    assert callable(condition)
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + 20
    while not condition():
        assert loop.time() < deadline_s, hub.describe()
        await hub.sample()
        await asyncio.sleep(0.02)


async def test_the_set_survives_a_dead_driver(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DCMI hangs in its driver: npu-smi takes over within its time-outs, calls stay short, and
    DCMI is used again when it answers; stop leaves no process."""
    control = tmp_path / "control"
    monkeypatch.setenv("FAKE_DCMI", str(control))
    dcmi, tool = FakeDcmi(library, control), printing(tmp_path, TABLE_310B4)
    settings = Sensors(
        sources=("dcmi", "npu-smi"),
        dcmi_library=str(library),
        npu_smi=str(tool),
        interval_s=0.05,
        standby_interval_s=0.3,
        timeout_s=0.5,
        stale_s=0.8,
    )
    hub = factory.make_hub(settings)
    loop = asyncio.get_running_loop()

    def source() -> str:
        reading = hub.latest(loop.time())
        return "" if reading is None else reading.source

    dcmi.say(70)
    await until_read(hub, lambda: source() == "dcmi")
    dcmi.say(70, mode=1)
    await until_read(hub, lambda: source() == "npu-smi")
    began_s = loop.time()
    await hub.sample()
    assert loop.time() - began_s < 5, "bounded, whatever hangs"
    dcmi.say(71)
    await until_read(hub, lambda: source() == "dcmi")
    await hub.stop()
    assert not any(alive(pid) for pid in starts(tool))
    assert children() == []


def children() -> list[int]:
    """Living children of this process that read sensors; other tests may keep theirs."""
    own = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        reads = b"guard.sensors" in command or b"npu-smi" in command
        if reads and fields[1] == str(os.getpid()) and fields[0] not in "ZX":
            own.append(int(folder.name))
    return own


async def test_stop_ends_what_is_being_read(tmp_path: Path) -> None:
    """A hub that is stopped in the middle of a hanging reading leaves nothing behind."""
    tool = program(tmp_path, "exec sleep 600")
    hub = factory.make_hub(Sensors(sources=("npu-smi",), npu_smi=str(tool), timeout_s=60))
    await hub.sample()
    await until(lambda: bool(starts(tool)))
    await asyncio.wait_for(hub.stop(), 10)
    await until(lambda: not any(map(alive, starts(tool))))


def test_the_child_starts_with_little() -> None:
    """The process that touches drivers needs the standard library alone."""
    code = (
        "import sys, edged.guard.sensors.helper, edged.guard.sensors.dcmi, "
        "edged.guard.sensors.linux\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}"
        " & {'asyncio', 'msgspec', 'structlog', 'psutil', 'aiohttp', 'numpy', 'subprocess'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_the_child_ends_with_its_input() -> None:
    """A child whose daemon went away exits by itself."""
    command = [sys.executable, "-m", "edged.guard.sensors.helper", "linux", "/nowhere", ""]
    done = subprocess.run(command, input="\n", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.count("\n") == 1
    assert "sensors.linux_name" in done.stdout


# the twin ----------------------------------------------------------------------------------------


async def test_the_twin_is_a_sensor(tmp_path: Path) -> None:
    """The simulated board gives tenths of a degree, its clock, power, memory and its own limits."""
    twin = state.create(tmp_path, "310b4")
    sensor = TwinSensor(twin)
    twin.set_temperature(time.monotonic(), 83.04)
    raw = await sensor.read()
    assert raw.temperature_c is not None
    assert abs(raw.temperature_c - 83.0) <= 0.2
    assert raw.temperature_c == round(raw.temperature_c, 1)
    assert (raw.frequency_mhz, raw.throttle_c) == (twin.board.max_mhz, raw.throttle_c)
    assert raw.throttle_c == twin.board.firmware.throttle_c
    assert raw.power_w is not None
    assert raw.power_w > 0
    assert raw.utilization_ratio == 0.0
    await sensor.stop()
    twin.close()
    with pytest.raises(SensorError, match="cannot read the simulated board"):
        await sensor.read()


async def test_the_twin_tells_how_busy_it_was(tmp_path: Path) -> None:
    """Utilisation is the share of the time since the last reading that steps took."""
    twin = state.create(tmp_path, "310b4")
    sensor = TwinSensor(twin)
    assert (await sensor.read()).utilization_ratio == 0.0
    twin.add("busy_s", 1e-9)
    ratio = (await sensor.read()).utilization_ratio
    assert ratio is not None
    assert 0 < ratio < 0.1
    twin.add("busy_s", 3600.0)
    assert (await sensor.read()).utilization_ratio == 1.0
    twin.close()


# check -------------------------------------------------------------------------------------------


async def test_check_says_of_each_source_what_it_gave(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line per source: figures with units, or why not and which setting helps."""
    monkeypatch.setenv("FAKE_DCMI", str(tmp_path / "control"))
    FakeDcmi(library, tmp_path / "control")
    tool = printing(tmp_path, TABLE_310B4)
    settings = Sensors(
        sources=("npu-smi", "linux"),
        dcmi_library=str(library),
        npu_smi=str(tool),
        linux_root=str(tmp_path),
        timeout_s=20,
    )
    lines = await check.lines(settings, [ScriptedSensor("twin", lost("the board is gone"))])
    assert lines == [
        "twin      the board is gone",
        "npu-smi   65 °C, 0% busy, 3628 of 15609 MiB, health Alarm (normal on some boards)  "
        f"[{tool}]",
        "linux     no thermal zone that tells of an NPU or SoC (sensors.linux_name)",
        "command   not configured (sensors.command)  (not used)",
        "dcmi      65 °C, 500 MHz, 9.1 W, 68% busy, 3628 of 15609 MiB, throttles at 95 °C, "
        f"resets at 105 °C, health Alarm (normal on some boards)  [{library}]  (not used)",
    ]
    assert children() == []


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (Raw(), "no reading"),
        (Raw(65000.0), "65000 °C looks like thousandths of a degree; check its unit"),
        (Raw(0.0, health="Critical"), "0 °C means not measured, health Critical"),
    ],
)
def test_check_says_what_is_implausible(raw: Raw, words: str) -> None:
    """A figure that the guard would not believe is not shown as a temperature."""
    assert check.in_words(raw) == words


async def test_a_hub_can_be_stopped_while_its_child_is_stopped(tmp_path: Path) -> None:
    """SIGSTOP of the child in mid-life neither holds up the guard nor its end."""
    root = thermal_root(tmp_path, {"npu": "65000"})
    hub = factory.make_hub(Sensors(sources=("linux",), linux_root=str(root), interval_s=0.05))
    await until_read(hub, lambda: hub.device() is not None)
    (child,) = children()
    os.kill(child, signal.SIGSTOP)
    await hub.sample()
    await asyncio.wait_for(hub.stop(), 10)
    await until(lambda: not alive(child))
