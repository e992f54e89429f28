"""npu-smi's text: every layout seen, and whatever else it may print."""

# ruff: noqa: E501  tables of npu-smi keep their width

from __future__ import annotations

import math

import pytest
from fakes_sensors import CELL, TABLE_310B4
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.guard.sensors import Raw, SensorError
from edged.guard.sensors.npu_smi import parse

MIB = 1 << 20

DUO = """\
+-------------------------------+-----------------+------------------------------------------------------+
| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
+===============================+=================+======================================================+
| 1       310P3                 | OK              | NA           49                0     / 0             |
| 0       0                     | 0000:01:00.0    | 0            1448 / 44278                            |
+-------------------------------+-----------------+------------------------------------------------------+
| 1       310P3                 | OK              | NA           45                0     / 0             |
| 1       1                     | 0000:01:00.0    | 7            1511 / 43693                            |
+===============================+=================+======================================================+
| 32768   310P3                 | OK              | NA           46                8808  / 8808          |
| 0       2                     | 0000:81:00.0    | 0            19562/ 21527                            |
+===============================+=================+======================================================+
+-------------------------------+-----------------+------------------------------------------------------+
| NPU     Chip                  | Process id      | Process name             | Process memory(MB)        |
+===============================+=================+======================================================+
| No running processes found in NPU 1                                                                    |
+===============================+=================+======================================================+
| 32768   0                     | 4711            | python                   | 18044                     |
+===============================+=================+======================================================+
"""
OLD_22_0_4 = """\
| NPU   Name          | Health    | Power(W)  Temp(C)    Hugepages-Usage(page)|
| Chip                | Bus-Id    | AICore(%) Memory-Usage(MB)                |
| 0     310           | OK        | 12.8      41         0    / 0             |
| 0                   | 0000:3B:00.0 | 3      2457 / 8192                     |
"""
BOX = """\
| 0       {name}                 | {health}           | {power}          {temp}                {pages}            |
| 0       0                     | {bus}              | {load}            {memory}                            |
"""


def row(name: str, health: str, power: str, temp: str, pages: str, load: str, memory: str) -> str:
    return BOX.format(
        name=name, health=health, power=power, temp=temp, pages=pages, load=load, memory=memory,
        bus="NA",
    )  # fmt: skip


def figures(raw: Raw) -> tuple[object, ...]:
    used = None if raw.memory_used_bytes is None else raw.memory_used_bytes // MIB
    total = None if raw.memory_total_bytes is None else raw.memory_total_bytes // MIB
    return raw.temperature_c, raw.power_w, raw.utilization_ratio, used, total, raw.health


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (TABLE_310B4, (65, 0.0, 0.0, 3628, 15609, "Alarm")),
        (row("310B4", "Alarm", "0.0", "80", "647/647", "93", "13844/15610"),
         (80, 0.0, 0.93, 13844, 15610, "Alarm")),
        (row("310B4", "Alarm", "0.0", "71", "15/15", "68", "14541/ 15610"),
         (71, 0.0, 0.68, 14541, 15610, "Alarm")),
        (row("310B1", "Alarm", "-", "-", "647/647", "85", "7383/23673"),
         (None, None, 0.85, 7383, 23673, "Alarm")),
        (row("310B", "OK", "7.6", "42", "15/1304", "-", "1003/10810"),
         (42, 7.6, None, 1003, 10810, "OK")),
        (row("310B1", "Alarm", "0.0", "NA", "NA", "NA", "600/7578"),
         (None, 0.0, None, 600, 7578, "Alarm")),
        (row("310P3", "Critical", "NA", "49", "16885/16885", "0", "1844/21527"),
         (49, None, 0.0, 1844, 21527, "Critical")),
        (row("910B", "OK", "90.1", "-5", "0 / 0", "1", "0    / 0        3161 / 32768"),
         (-5, 90.1, 0.01, 3161, 32768, "OK")),
        (row("310B4", "告警", "0.0", "66", "15 / 15", "0", "3628 / 15609"),
         (66, 0.0, 0.0, 3628, 15609, "告警")),
        (OLD_22_0_4, (41, 12.8, 0.03, 2457, 8192, "OK")),
    ],
)  # fmt: skip
def test_the_table_of_every_board_is_read(text: str, wanted: tuple[object, ...]) -> None:
    """Boards, versions, glued cells, missing figures, another language: the figures come out."""
    assert figures(parse(text)) == wanted


@pytest.mark.parametrize(
    ("chip", "celsius", "used"), [(0, 49, 1448), (1, 45, 1511), (2, 46, 19562)]
)
def test_chips_are_counted_in_their_order(chip: int, celsius: float, used: int) -> None:
    """Two chips that share an NPU id are two chips, and the process table is none."""
    raw = parse(DUO, chip)
    assert (raw.temperature_c, raw.memory_used_bytes) == (celsius, used * MIB)


def test_a_chip_that_is_not_there_is_named() -> None:
    """Asking for the fourth of three chips says how many there are and which setting is meant."""
    with pytest.raises(SensorError, match=r"lists 3 chips, no chip 3; see sensors\.chip"):
        parse(DUO, 3)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("\tTemperature (C)                : 50\n", Raw(temperature_c=50)),
        ("\t温度 (C)                       ： 50\n", Raw(temperature_c=50)),
        ("\tNPU Real-time Power(W)         : 9.1\n", Raw(power_w=9.1)),
        (
            "NPU ID : 0\nChip Count : 1\nChip ID : 0\nMemory Usage Rate(%) : 10\n"
            "Aicore Usage Rate(%) : 25\nTemperature(C) : 61\nRated Power Dissipation(W) : 4.0\n",
            Raw(temperature_c=61, utilization_ratio=0.25),
        ),
        (
            "Memory Capacity(MB) : 15609\nMemory Usage Rate(%) : 50\nHugepages Total(page) : 15\n"
            "Hugepages Usage Rate(%) : 100\nAicore Usage Rate(%) : 68\nAicpu Usage Rate(%) : 1\n"
            "Ctrlcpu Usage Rate(%) : 2\nMemory Bandwidth Usage Rate(%) : 3\n",
            Raw(
                utilization_ratio=0.68,
                memory_used_bytes=15609 * MIB // 2,
                memory_total_bytes=15609 * MIB,
            ),
        ),
        (
            "Capacity(MB) : 10810\nClock Speed(MHz) : 2131\n",
            Raw(memory_total_bytes=10810 * MIB),
        ),
        (
            "Health Status : Alarm\nError Code : 80E3A203\nError Information : x\n",
            Raw(health="Alarm"),
        ),
        (
            "NpuID(Idx)  ChipId(Idx) Pwr(W)      Temp(C)     AI Core(%)  AI Cpu(%)   Memory BW(%)\n"
            "0           0           0.0         70          68          0           12\n"
            "0           0           9.5         71          69          0           12\n",
            Raw(temperature_c=71, power_w=9.5, utilization_ratio=0.69),
        ),
    ],
)  # fmt: skip
def test_typed_queries_are_read(text: str, wanted: Raw) -> None:
    """Temperature, power, usages, memory, common, health and watch give what they name."""
    assert parse(text) == wanted


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it printed nothing"),
        ("This device does not support querying temp.\n", "does not support"),
        ("dcmi module initialize failed. ret is -8005\n", "ret is -8005"),
        ("+----+\n| 该命令不支持在容器中执行 |\n", "容器"),
        ("\x1b[31mboom\x07\n", "boom"),
        (TABLE_310B4.replace(CELL.format(65), ""), "npu-smi 23.0.0"),
    ],
)
def test_other_text_is_an_error_in_its_words(text: str, words: str) -> None:
    """What is no answer is told with the tool's own words, fit for a terminal."""
    with pytest.raises(SensorError) as caught:
        parse(text)
    assert words in str(caught.value)
    assert str(caught.value).isprintable()


def _mangled(text: str) -> st.SearchStrategy[str]:
    """Cuts, doubled pieces and foreign characters anywhere in real output."""
    place = st.integers(0, len(text))
    piece = st.one_of(
        st.text(max_size=40),
        st.sampled_from(["|", "/", "9" * 30, "NA", "\n", "٣", "-", "1e9", " : ", "(C)", "\x00"]),
    )
    return st.lists(st.tuples(place, place, piece), max_size=8).map(
        lambda edits: _edited(text, edits)
    )


def _edited(text: str, edits: list[tuple[int, int, str]]) -> str:
    for start, end, piece in edits:
        text = text[:start] + piece + text[end:]
    return text


@given(
    st.one_of(st.text(), *(_mangled(t) for t in (TABLE_310B4, DUO, OLD_22_0_4))),
    st.integers(0, 3),
)
@settings(deadline=None, max_examples=400)
def test_no_text_can_do_harm(text: str, chip: int) -> None:
    """Whatever it prints, there are figures or an error in words, and the figures are numbers."""
    try:
        raw = parse(text, chip)
    except SensorError as error:
        assert str(error)
        return
    assert raw.temperature_c is None or math.isfinite(raw.temperature_c)
    assert raw.memory_total_bytes is None or raw.memory_total_bytes >= 0


@pytest.mark.parametrize("text", ["| " * 200_000, "A" * 300_000, "NpuID ChipId " + "a " * 150_000])
def test_endless_lines_cost_nothing(text: str) -> None:
    """A line no version prints is skipped, so that no pattern can be kept busy."""
    with pytest.raises(SensorError):
        parse(text)
