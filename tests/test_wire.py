"""The wire's promises: what is encoded is decoded, what is cut or unknown is an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edged import wire
from edged.errors import WireError

ids = st.integers(0, 2**31 - 1)
floats = st.floats(allow_nan=False, width=64)
rows = st.builds(
    wire.Row,
    ids,
    st.lists(ids, max_size=3),
    st.lists(st.tuples(floats, st.lists(st.tuples(ids, floats), max_size=2)), max_size=2),
    st.sampled_from(["", "stop", "length", "cancelled", "row_fault"]),
    st.text(max_size=20),
    st.integers(-1, 100),
)
reports = st.builds(
    wire.Report, st.lists(rows, max_size=4), st.just("decode"), ids, ids, ids, floats, ids, floats
)
to_daemon = st.one_of(
    reports,
    st.builds(wire.Hello, ids, ids),
    st.builds(wire.Phase, st.text(max_size=9), floats),
    st.builds(wire.Fault, st.text(max_size=9), st.text(max_size=99)),
)


@given(st.lists(to_daemon, max_size=6), st.integers(1, 37))
def test_frames_survive_any_cut_of_the_byte_stream(
    messages: list[wire.ToDaemon], piece_bytes: int
) -> None:
    """decode(encode(x)) == x, however the bytes are split on the way."""
    data = b"".join(wire.encode(message) for message in messages)
    frames = wire.DaemonFrames()
    got: list[wire.ToDaemon] = []
    for at in range(0, len(data), piece_bytes):
        got += frames.messages(data[at : at + piece_bytes])

    assert got == messages
    assert frames.pending_bytes == 0


@given(st.binary(min_size=1, max_size=64))
def test_garbage_is_an_error_or_an_unfinished_frame(junk: bytes) -> None:
    """Unreadable bytes raise WireError or leave a visible rest; nothing is guessed."""
    frames = wire.DaemonFrames()
    body = len(junk).to_bytes(4, "big") + junk
    try:
        list(frames.messages(body))
    except WireError:
        return
    assert frames.pending_bytes in (0, len(body))


def test_a_frame_beyond_the_limit_is_refused_on_both_sides() -> None:
    """Neither side sends or accepts more than 1 MiB."""
    with pytest.raises(WireError):
        wire.encode(wire.Fault("x", "a" * wire.MAX_FRAME_BYTES))
    with pytest.raises(WireError):
        list(wire.DaemonFrames().messages(b"\xff\xff\xff\xff"))


def test_a_message_of_the_other_direction_is_an_error() -> None:
    """The worker does not accept what only the daemon may hear."""
    with pytest.raises(WireError):
        list(wire.WorkerFrames().messages(wire.encode(wire.Hello(1, 2))))
