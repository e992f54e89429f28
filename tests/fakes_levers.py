"""A board's fan, clock tool, npu-smi and DCMI library as files of a temporary folder."""

from __future__ import annotations

import contextlib
import getpass
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAM = (sys.executable, "-I", "-m", "edged.guard.levers.root")


class Board:
    """folder/sys is its sysfs, folder/levers.toml the helper's file, folder/saved/ its memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sysfs, self.config = folder / "sys", folder / "levers.toml"
        self.saved, self.socket = folder / "saved" / "saved.json", folder / "levers.sock"
        self.hwmon = self.sysfs / "class" / "hwmon" / "hwmon0"
        self.hwmon.mkdir(parents=True)
        self.put(name="pwmfan", pwm1="102", pwm1_enable="2")
        self.configure()

    def put(self, **files: str) -> None:
        for name, text in files.items():
            (self.hwmon / name).write_text(text + "\n", encoding="ascii")

    def fan(self) -> tuple[int, int]:
        """(pwm, enable); 0 while a file is being written, which the kernel's never show."""
        files = (self.hwmon / "pwm1", self.hwmon / "pwm1_enable")
        pwm, enable = (int(file.read_text() or 0) for file in files)
        return pwm, enable

    def configure(self, **values: Any) -> None:
        """JSON's scalars and lists are TOML's; npu-smi and DCMI are off unless named."""
        values = {"user": getpass.getuser(), "work_power_gears": False, **values}
        values.setdefault("npu_smi", str(self.folder / "no-npu-smi"))
        lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        self.config.write_text("\n".join(lines) + "\n", encoding="utf-8")
        self.config.chmod(0o644)

    def command(self, *more: str) -> list[str]:
        places = ["--config", self.config, "--saved", self.saved, "--sysfs", self.sysfs]
        return [*PROGRAM, *map(str, places), *more]

    def restore(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command("--restore"), capture_output=True, text=True, timeout=60)

    @contextlib.contextmanager
    def helper(self) -> Iterator[subprocess.Popen[bytes]]:
        """The real program on a real socket; killed at the end if it still runs."""
        process = subprocess.Popen(self.command("--socket", str(self.socket)))
        try:
            until(self._listens)
            yield process
        finally:
            process.kill()
            process.wait(10)

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), Asker(self.socket) as asker:
            return bool(asker.ask(verb="hello")["ok"])
        return False


class Asker:
    """A client without any of our client's care."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(20)
        try:
            self._socket.connect(str(path))
        except OSError:
            self._socket.close()
            raise
        self._file = self._socket.makefile("rb")

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._socket.close()

    def send(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # refused already: the words are there
            self._socket.sendall(data)

    def ask(self, **request: Any) -> dict[str, Any]:
        self.send(json.dumps(request).encode() + b"\n")
        return self.said()

    def said(self) -> dict[str, Any]:
        line = self._file.readline()
        found: dict[str, Any] = json.loads(line) if line else {}
        return found


def until(true: Any, bound_s: float = 20.0) -> None:
    end_s = time.monotonic() + bound_s
    while not true():
        assert time.monotonic() < end_s, "it did not come true in time"
        time.sleep(0.01)


def script(path: Path, text: str) -> Path:
    path.write_text("#!/bin/sh\n" + text, encoding="utf-8")
    path.chmod(0o755)
    return path


def clock_tool(folder: Path, mhz: int = 800, on_set: str = 'echo "$2" > "$clock"') -> Path:
    """`clock get`, `clock set MHZ`; the clock is in folder/mhz. on_set: what set really does."""
    (folder / "mhz").write_text(f"{mhz}\n", encoding="ascii")
    text = f'clock={folder}/mhz\nif [ "$1" = get ]; then cat "$clock"; exit; fi\n{on_set}\n'
    return script(folder / "clock", text)


def npu_smi(folder: Path, mode: str = "auto", duty: int = 39) -> Path:
    """Fan verbs as the 200I A2's documentation has them: duty only in manual mode."""
    (folder / "mode").write_text(mode, encoding="ascii")
    (folder / "duty").write_text(str(duty), encoding="ascii")
    text = f"""cd {folder}
case "$1 $3" in
"info pwm-mode") echo "        pwm-mode                 : $(cat mode)" ;;
"info pwm-duty-ratio") echo "        pwm-duty-ratio(%)        : $(cat duty)" ;;
"set pwm-mode") [ "$5" = 1 ] && echo auto > mode || echo manual > mode ;;
"set pwm-duty-ratio") grep -q manual mode && echo "$5" > duty || exit 1 ;;
*) echo "This device does not support $3"; exit 1 ;;
esac
"""
    return script(folder / "npu-smi", text)


# A library of the same C interface. Its state is a text file beside it: level, clock, flash,
# mode ("live", "reboot": the clock stays, "denied").
_LIBDCMI = r"""
#include <stdio.h>
#include <string.h>
struct gear { unsigned v[6]; unsigned char pad[32]; };
struct state { unsigned level, mhz, flash; char mode[16]; };
static const unsigned GEARS[3][3] = {{0, 500, 1000}, {1, 250, 1000}, {2, 250, 800}};
static struct state load(void) {
    struct state s = {0};
    FILE *f = fopen(PLACE, "r");
    fscanf(f, "%u %u %u %15s", &s.level, &s.mhz, &s.flash, s.mode);
    fclose(f);
    return s;
}
int dcmi_init(void) { puts("a library that talks"); return 0; }
int dcmi_get_card_list(int *n, int *list, int len) { *n = 1; list[0] = 4; return len < 1; }
int dcmi_get_device_frequency(int card, int dev, int type, unsigned *mhz) {
    if (card != 4 || dev != 0 || type != 7) return -8001;
    *mhz = load().mhz;
    return 0;
}
int dcmi_get_device_info(int card, int dev, int cmd, unsigned sub, void *out, unsigned *size) {
    if (card != 4 || dev != 0 || cmd != 8) return -8001;
    unsigned *u = out;
    if (sub == 8) { if (*size < 8) return -8001; u[0] = load().level; u[1] = 3; return 0; }
    if (sub != 6 || *size < 4 + 3 * sizeof(struct gear)) return -8001;
    u[0] = 3;
    struct gear *g = (struct gear *)(u + 1);
    for (int i = 0; i < 3; i++) {
        g[i].v[0] = GEARS[i][0]; g[i].v[2] = GEARS[i][1]; g[i].v[4] = GEARS[i][2];
    }
    return 0;
}
int dcmi_set_device_info(int card, int dev, int cmd, unsigned sub, const void *in, unsigned size) {
    struct state s = load();
    const unsigned *u = in;
    if (card != 4 || dev != 0 || cmd != 8 || sub != 7 || size < 8 || u[0] > 2) return -8001;
    if (!strcmp(s.mode, "denied")) return -8002;
    FILE *f = fopen(PLACE, "w");
    unsigned mhz = strcmp(s.mode, "live") ? s.mhz : GEARS[u[0]][1];
    fprintf(f, "%u %u %u %s\n", u[0], mhz, s.flash + u[1], s.mode);
    fclose(f);
    return 0;
}
"""


def libdcmi(folder: Path, mode: str) -> Path | None:
    """Compiled; None without a C compiler. Its state: folder/dcmi as "level mhz flash mode"."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    (folder / "dcmi").write_text(f"0 500 0 {mode}\n", encoding="ascii")
    source, library = folder / "dcmi.c", folder / "libdcmi.so"
    source.write_text(_LIBDCMI, encoding="ascii")
    place = f'-DPLACE="{folder / "dcmi"}"'
    words = [compiler, "-shared", "-fPIC", "-w", place, "-o", str(library), str(source)]
    subprocess.run(words, check=True, timeout=60)
    return library
