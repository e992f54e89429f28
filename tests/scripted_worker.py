"""A worker that speaks the real wire but computes nothing; faults on cue.

argv: --engine NAME --fd N, plus --fault WORD from the test's command tuple:
none | hang-load | no-hello | version | junk | die-at-3 | hang-at-3 | fault-load |
mute | idle-mute | leaves-helper | memory-at-3 | fatal-at-3 | nan-at-3 | wrong-probe
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import subprocess
import time

from edged import wire


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("engine", "fd", "fault"):
        parser.add_argument(f"--{name}")
    arguments = parser.parse_args()
    fault = arguments.fault
    sock = socket.socket(fileno=int(arguments.fd))
    frames = wire.WorkerFrames()
    if fault == "no-hello":
        time.sleep(60)
    if fault == "junk":
        sock.sendall(b"\0\0\0\4junk")
        time.sleep(60)
    if fault == "leaves-helper":
        subprocess.Popen(["sleep", "100"], pass_fds=(sock.fileno(),))
    print("scripted worker speaks on stdout", flush=True)
    sock.sendall(wire.encode(wire.Hello(99 if fault == "version" else wire.VERSION, os.getpid())))
    streams: dict[int, list[int]] = {}
    step, max_batch = 0, 9
    while True:
        ready, _, _ = select.select([sock], [], [], 0.01 if streams else None)
        ended: list[wire.Row] = []
        if ready:
            data = sock.recv(1 << 16)
            if not data:
                return
            for message in frames.messages(data):
                if isinstance(message, wire.Launch):
                    launch(sock, message, fault)
                elif isinstance(message, wire.Submit) and fault not in ("mute", "idle-mute"):
                    generated = len(message.tokens) - message.prompt_tokens
                    streams[message.stream] = [generated, message.max_tokens]
                    if len(streams) == 1:
                        sock.sendall(wire.encode(wire.Phase("step", 0.5)))
                elif isinstance(message, wire.Cancel) and message.stream in streams:
                    del streams[message.stream]
                    ended.append(wire.Row(message.stream, [], [], "cancelled", "", -1))
                elif isinstance(message, wire.SetLimits):
                    max_batch = message.max_batch
                elif isinstance(message, wire.SelfTest):
                    sock.sendall(
                        wire.encode(wire.SelfTested(fault != "wrong-probe", "tested", 0.1))
                    )
                    if fault == "idle-mute":
                        sock.sendall(wire.encode(wire.Phase("step", 0.0)))
                elif isinstance(message, wire.Shutdown):
                    return
        if streams:
            step += 1
            strike(sock, fault, step)
            if fault == "nan-at-3" and step >= 3:
                ended += [
                    wire.Row(s, [], [], "row_fault", "output is not finite", -1) for s in streams
                ]
                streams.clear()
        rows = ended + [advance(stream, streams) for stream in list(streams)]
        if rows:
            report = wire.Report(
                rows, "decode", max_batch, 1, 256, 0.01, 0, 0.5 if streams else 0.0
            )
            sock.sendall(wire.encode(report))


def launch(sock: socket.socket, message: wire.Launch, fault: str) -> None:
    sock.sendall(wire.encode(wire.Phase("loading", 0.5)))
    if fault == "hang-load":
        time.sleep(60)
    if fault == "fault-load":
        sock.sendall(wire.encode(wire.Fault("load", "model.onnx is missing")))
        raise SystemExit(1)
    sock.sendall(wire.encode(wire.Ready("scripted", 100, 1024, message.slots, 0.1)))


def strike(sock: socket.socket, fault: str, step: int) -> None:
    if step < 3:
        return
    if fault == "die-at-3":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "hang-at-3":
        time.sleep(60)
    elif fault in ("memory-at-3", "fatal-at-3"):
        kind = fault.partition("-")[0]
        sock.sendall(wire.encode(wire.Fault(kind, "decode: no more")))
        raise SystemExit(1)


def advance(stream: int, streams: dict[int, list[int]]) -> wire.Row:
    streams[stream][0] += 1
    index, limit = streams[stream]
    if index >= limit:
        del streams[stream]
    return wire.Row(stream, [index], [], "length" if index >= limit else "", "", -1)


main()
