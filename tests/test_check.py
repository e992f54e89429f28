"""`edged check`: what it says of a board."""

from __future__ import annotations

from pathlib import Path

import pytest

from edged import cli


def test_check_names_the_sensors_and_levers_of_a_board(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a simulated board with a clock setter and a fan both are proven and put back."""
    assert cli.main(["check", "--twin", "field", "--set", f"state_dir={tmp_path}"]) == 0
    said = capsys.readouterr().out
    assert "frequency: twin/frequency is used, 400, 500, 600, 700, 800 MHz" in said
    assert "fan: twin/fan is used, 40% to 100%" in said
    assert "throttles at 86 °C" in said
    assert "guard: on, policy edged, limit 80 °C" in said
    cli.main(["check", "--twin", "field", "--set", f"state_dir={tmp_path}"])
    assert "800 MHz, 6 W" in capsys.readouterr().out


def test_check_says_what_a_board_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without driver, helper and sensor each is named with its key or file, and nothing fails."""
    empty = tmp_path / "sys"
    empty.mkdir()
    sets = (f"state_dir={tmp_path}", f"levers.helper_socket={tmp_path}/none")
    flags = [word for item in (*sets, f"sensors.linux_root={empty}") for word in ("--set", item)]
    assert cli.main(["check", *flags]) == 0
    said = capsys.readouterr().out
    assert "frequency: not controllable here, holding the limit with batch and duty" in said
    assert f"no helper at {tmp_path}/none" in said
    assert "no thermal zone" in said
