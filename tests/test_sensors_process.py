"""Sensors that hang, crash or babble: real processes, and nothing of them stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest
from fakes_sensors import (
    TABLE_310B4,
    FakeDcmi,
    alive,
    build_dcmi,
    open_files,
    printing,
    program,
    starts,
    thermal_root,
    until,
)

from edged.guard.sensors import Raw, SensorError
from edged.guard.sensors.command import CommandSensor
from edged.guard.sensors.helped import HelpedSensor
from edged.guard.sensors.npu_smi import NpuSmi
from edged.guard.sensors.process import kill_group

PATIENT_S, SOON_S = 20.0, 0.3
MIB = 1 << 20


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_dcmi(tmp_path_factory.mktemp("dcmi"))


@pytest.fixture
def dcmi(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDcmi:
    monkeypatch.setenv("FAKE_DCMI", str(tmp_path / "control"))
    return FakeDcmi(library, tmp_path / "control")


def dcmi_sensor(dcmi: FakeDcmi, chip: int = 0, timeout_s: float = PATIENT_S) -> HelpedSensor:
    return HelpedSensor("dcmi", ("dcmi", str(dcmi.library), str(chip)), timeout_s)


def npu_smi(path: Path, timeout_s: float = PATIENT_S) -> NpuSmi:
    return NpuSmi(str(path), 0, timeout_s)


async def failure(sensor: HelpedSensor | NpuSmi | CommandSensor) -> str:
    with pytest.raises(SensorError) as caught:
        await sensor.read()
    return str(caught.value)


# npu-smi -----------------------------------------------------------------------------------------


async def test_npu_smi_is_run_and_read(tmp_path: Path) -> None:
    """The tool's table becomes figures, and its process is gone afterwards."""
    path = printing(tmp_path, TABLE_310B4)
    sensor = npu_smi(path)
    assert (await sensor.read()).temperature_c == 65
    assert sensor.process.pid is None
    await sensor.stop()


async def test_an_npu_smi_that_hangs_is_ended_with_all_it_started(tmp_path: Path) -> None:
    """A reading takes no longer than its time-out; the tool and its own child are dead then."""
    path = program(tmp_path, f"sleep 600 & echo $! >> {tmp_path}/npu-smi.starts\nwait")
    sensor = npu_smi(path, timeout_s=SOON_S)
    assert "did not end within 0.3 s" in await failure(sensor)
    await until(lambda: len(starts(path)) == 2 and not any(map(alive, starts(path))))
    await until(lambda: sensor.process.pid is None)
    await sensor.stop()


async def test_a_tool_that_cannot_be_killed_is_not_started_twice(tmp_path: Path) -> None:
    """While the killed process hangs in the driver no other is started, and it is told; when it
    has died the tool is used again."""
    path = program(tmp_path, "exec sleep 600")
    spared: list[int] = []
    sensor = NpuSmi(str(path), 0, SOON_S, kill=spared.append)  # such as a process in state D
    assert "did not end" in await failure(sensor)
    for _ in range(2):
        assert "hangs in the driver and cannot be ended" in await failure(sensor)
    assert len(starts(path)) == 1
    os.killpg(starts(path)[0], signal.SIGKILL)
    await until(lambda: sensor.process.pid is None)
    printing(tmp_path, TABLE_310B4)
    sensor._timeout_s = PATIENT_S
    assert (await sensor.read()).temperature_c == 65
    await sensor.stop()


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("", 0, "it printed nothing"),
        ("dcmi module initialize failed. ret is -8005\n", 0, "ret is -8005"),
        ("This command is not supported in a container.\n", 1, "code 1: This command is not"),
        (TABLE_310B4, 255, "exited with code 255"),
        ("设备不存在\n", 1, "设备不存在"),
    ],
)
async def test_an_npu_smi_that_refuses_is_told_in_its_words(
    tmp_path: Path, text: str, code: int, words: str
) -> None:
    """Error text with or without an exit code is a lost sensor with the tool's own reason."""
    sensor = npu_smi(printing(tmp_path, text, code))
    assert words in await failure(sensor)
    await sensor.stop()


async def test_an_npu_smi_that_is_missing_is_named(tmp_path: Path) -> None:
    """A path without a program is told with the path; the next reading may find it."""
    sensor = npu_smi(tmp_path / "npu-smi")
    assert await failure(sensor) == f"cannot start {tmp_path}/npu-smi: No such file or directory"
    printing(tmp_path, TABLE_310B4)
    assert (await sensor.read()).temperature_c == 65
    await sensor.stop()


async def test_endless_output_is_cut_off(tmp_path: Path) -> None:
    """A program that prints for ever is stopped long before its time-out."""
    path = program(tmp_path, "exec yes")
    sensor = npu_smi(path)
    assert "printed more than" in await failure(sensor)
    await until(lambda: sensor.process.pid is None)
    assert not any(map(alive, starts(path)))
    await sensor.stop()


async def test_a_program_that_leaves_something_behind_is_still_read(tmp_path: Path) -> None:
    """What the tool leaves running is ended, and does not keep its answer from us."""
    (tmp_path / "table").write_text(TABLE_310B4)
    path = program(
        tmp_path, f"sleep 600 & echo $! >> {tmp_path}/npu-smi.starts\ncat {tmp_path}/table"
    )
    sensor = npu_smi(path)
    assert (await sensor.read()).temperature_c == 65
    await until(lambda: not any(map(alive, starts(path))))
    await sensor.stop()


# the configured command --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("65\n", Raw(temperature_c=65)),
        ("temp1: +65.5°C (crit = 110)\n", Raw(temperature_c=65.5)),
        ("-3.25", Raw(temperature_c=-3.25)),
        ('{"temperature_c": 71, "power_w": 9.5, "fan": 3}', Raw(temperature_c=71, power_w=9.5)),
    ],
)
async def test_a_configured_command_gives_the_temperature(
    tmp_path: Path, text: str, wanted: Raw
) -> None:
    """Its first number counts, or a JSON object with our names."""
    sensor = CommandSensor((str(printing(tmp_path, text, name="temp")),), PATIENT_S)
    assert await sensor.read() == wanted
    await sensor.stop()


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("no sensor\n", 0, "printed no number: no sensor"),
        ("", 0, "printed no number: nothing"),
        ("65\n", 3, "exited with code 3"),
        ('{"power_w": 3}', 0, "without temperature_c"),
        ('{"temperature_c": "hot"}', 0, "sensors.command: "),
        ("{" * 100_000, 0, "sensors.command: "),
    ],
)
async def test_a_command_that_gives_no_temperature_is_told(
    tmp_path: Path, text: str, code: int, words: str
) -> None:
    """Anything else is a lost sensor that names the setting."""
    sensor = CommandSensor((str(printing(tmp_path, text, code, name="temp")),), PATIENT_S)
    assert words in await failure(sensor)
    await sensor.stop()


# DCMI, in the long-lived child -------------------------------------------------------------------


async def test_dcmi_gives_all_figures(dcmi: FakeDcmi) -> None:
    """Temperature, clock, power, utilisation, memory, health and the device's own limits."""
    sensor = dcmi_sensor(dcmi)
    assert await sensor.read() == Raw(
        temperature_c=65,
        frequency_mhz=500,
        power_w=9.1,
        utilization_ratio=0.68,
        memory_used_bytes=3628 * MIB,
        memory_total_bytes=15609 * MIB,
        throttle_c=95,
        reset_c=105,
        health="Alarm",
    )
    child = sensor.process.pid
    dcmi.say(70)
    assert (await sensor.read()).temperature_c == 70
    assert sensor.process.pid == child, "one child serves all readings"
    await sensor.stop()
    assert child is not None
    assert not alive(child)


async def test_dcmi_without_extras_still_gives_the_temperature(dcmi: FakeDcmi) -> None:
    """What a device does not support is missing, not wrong."""
    dcmi.say(65, mode=5)
    sensor = dcmi_sensor(dcmi)
    assert await sensor.read() == Raw(temperature_c=65)
    await sensor.stop()


@pytest.mark.parametrize(("chip", "celsius"), [(0, 65), (1, 66), (2, 67)])
async def test_dcmi_counts_chips_over_all_cards(dcmi: FakeDcmi, chip: int, celsius: int) -> None:
    """Card ids have holes and a card may have two chips; ours is the n-th of all."""
    sensor = dcmi_sensor(dcmi, chip)
    assert (await sensor.read()).temperature_c == celsius
    await sensor.stop()


async def test_a_dcmi_that_refuses_is_told_and_tried_again(dcmi: FakeDcmi) -> None:
    """An error code comes in words; when the device is ready the same child answers."""
    dcmi.say(65, mode=2)
    sensor = dcmi_sensor(dcmi)
    assert await failure(sensor) == "dcmi_init: the device is not ready (-8012)"
    dcmi.say(65)
    assert (await sensor.read()).temperature_c == 65
    await sensor.stop()
    sensor = dcmi_sensor(dcmi, chip=7)
    assert "lists 3 chips, no chip 7" in await failure(sensor)
    await sensor.stop()


async def test_a_dcmi_that_hangs_is_replaced(dcmi: FakeDcmi) -> None:
    """A call that does not return costs one time-out and one process, then DCMI works again."""
    sensor = dcmi_sensor(dcmi)
    await sensor.read()
    child = sensor.process.pid
    assert child is not None
    sensor._timeout_s = SOON_S
    dcmi.say(65, mode=1)
    assert "did not answer within 0.3 s" in await failure(sensor)
    await until(lambda: sensor.process.pid is None)
    assert not alive(child)
    dcmi.say(66)
    sensor._timeout_s = PATIENT_S
    assert (await sensor.read()).temperature_c == 66
    assert sensor.process.pid != child
    await sensor.stop()


async def test_a_dcmi_that_crashes_is_replaced(dcmi: FakeDcmi) -> None:
    """A crash in the vendor's library ends its own process and is told."""
    sensor = dcmi_sensor(dcmi)
    await sensor.read()
    dcmi.say(65, mode=3)
    assert "killed by SIGABRT" in await failure(sensor)
    dcmi.say(67)
    assert (await sensor.read()).temperature_c == 67
    await sensor.stop()


async def test_a_library_that_prints_does_not_garble_answers(dcmi: FakeDcmi) -> None:
    """Whatever the vendor's library writes to standard output is no answer."""
    dcmi.say(65, mode=4)
    sensor = dcmi_sensor(dcmi)
    for _ in range(3):
        assert (await sensor.read()).temperature_c == 65
    await sensor.stop()


async def test_a_library_that_is_missing_is_named(tmp_path: Path) -> None:
    """Status tells which file could not be loaded and what to set."""
    (tmp_path / "libdcmi.so").write_text("no library")
    for path in (tmp_path / "none.so", tmp_path / "libdcmi.so"):
        sensor = HelpedSensor("dcmi", ("dcmi", str(path), "0"), PATIENT_S)
        words = await failure(sensor)
        assert f"cannot load {path}" in words
        assert "LD_LIBRARY_PATH" in words
        await sensor.stop()


# the long-lived child ----------------------------------------------------------------------------


async def test_a_stopped_or_killed_child_is_replaced(tmp_path: Path) -> None:
    """SIGSTOP costs one time-out, SIGKILL one reading; no child is left over."""
    root = thermal_root(tmp_path, {"npu-thermal": "65000"})
    sensor = HelpedSensor("linux", ("linux", str(root), ""), PATIENT_S)
    children = []
    for harm in (signal.SIGSTOP, signal.SIGKILL):
        assert (await sensor.read()).temperature_c == 65
        child = sensor.process.pid
        assert child is not None
        children.append(child)
        os.kill(child, harm)
        sensor._timeout_s = SOON_S if harm == signal.SIGSTOP else PATIENT_S
        words = await failure(sensor)
        assert ("did not answer" if harm == signal.SIGSTOP else "killed by SIGKILL") in words
        await until(lambda: sensor.process.pid is None)
        assert not any(map(alive, children))
        sensor._timeout_s = PATIENT_S
    assert (await sensor.read()).temperature_c == 65
    await sensor.stop()


async def test_a_child_that_cannot_die_is_not_doubled_and_stop_returns(tmp_path: Path) -> None:
    """Stop gives up on a process that no signal ends, within seconds."""
    root = thermal_root(tmp_path, {"npu-thermal": "65000"})
    spared: list[int] = []
    sensor = HelpedSensor("linux", ("linux", str(root), ""), PATIENT_S, kill=spared.append)
    await sensor.read()
    child = sensor.process.pid
    assert child is not None
    os.kill(child, signal.SIGSTOP)
    sensor._timeout_s = SOON_S
    assert "did not answer" in await failure(sensor)
    assert "cannot be ended" in await failure(sensor)
    await asyncio.wait_for(sensor.stop(), 10)
    assert spared
    kill_group(child)
    await until(lambda: sensor.process.pid is None)


async def test_a_child_does_not_outlive_the_daemon(tmp_path: Path, library: Path) -> None:
    """A child that hangs in the driver ends when its daemon is killed, without being told."""
    control = tmp_path / "control"
    FakeDcmi(library, control)
    code = (
        "import asyncio, sys\n"
        "from edged.guard.sensors.helped import HelpedSensor\n"
        "async def main():\n"
        f"    sensor = HelpedSensor('dcmi', ('dcmi', {str(library)!r}, '0'), 60)\n"
        "    await sensor.read()\n"
        f"    open({str(control)!r}, 'w').write('65 0 0 0 0 1')\n"
        "    task = asyncio.ensure_future(sensor.read())\n"
        "    await asyncio.sleep(0.2)\n"
        "    print(sensor.process.pid, flush=True)\n"
        "    await task\n"
        "asyncio.run(main())\n"
    )
    daemon = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        code,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "FAKE_DCMI": str(control)},
    )
    assert daemon.stdout is not None
    child = int(await daemon.stdout.readline())
    assert alive(child)
    daemon.kill()
    await daemon.wait()
    await until(lambda: not alive(child))


async def test_a_cancelled_question_is_never_answered_to_the_next(tmp_path: Path) -> None:
    """Giving up on a reading in mid-flight does not leave its answer for the next one."""
    root = thermal_root(tmp_path, {"npu-thermal": "65000"})
    sensor = HelpedSensor("linux", ("linux", str(root), ""), PATIENT_S)
    await sensor.read()
    question = asyncio.ensure_future(sensor.read())
    await asyncio.sleep(0)
    question.cancel()
    await asyncio.gather(question, return_exceptions=True)
    (root / "class/thermal/thermal_zone0/temp").write_text("71000\n")
    await until(lambda: sensor.process.pid is None)
    assert (await sensor.read()).temperature_c == 71
    await sensor.stop()


async def test_readings_leak_neither_files_nor_processes(tmp_path: Path, dcmi: FakeDcmi) -> None:
    """After good, late, crashed and refused readings, as many files are open as before."""
    good = printing(tmp_path, TABLE_310B4, name="good")
    bad = printing(tmp_path, "sorry", 1, name="bad")
    late = program(tmp_path, "exec sleep 600", name="late")

    async def round_trip() -> None:
        for path, timeout_s in ((good, PATIENT_S), (bad, PATIENT_S), (late, 0.1)):
            tool = npu_smi(path, timeout_s)
            with contextlib.suppress(SensorError):
                await tool.read()
            await tool.stop()
        sensor = dcmi_sensor(dcmi)
        await sensor.read()
        dcmi.say(65, mode=3)
        await failure(sensor)
        dcmi.say(65)
        await sensor.read()
        await sensor.stop()

    await round_trip()
    before = open_files()
    for _ in range(3):
        await round_trip()
    await until(lambda: open_files() <= before)
    assert not any(alive(pid) for path in (good, bad, late) for pid in starts(path))
