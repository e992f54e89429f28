"""What the text side of a stream promises, whatever steps its ids arrive in."""

from __future__ import annotations

from fakes import LetterText, request
from hypothesis import given
from hypothesis import strategies as st

from edged.core import Step, TokenLogprob
from edged.engine.writer import Writer


def write(ids: list[int], cuts: list[int], stop: tuple[str, ...], finish: str = "length") -> Writer:
    """Feed ids in pieces; keep what was shown on the writer for the asserts."""
    writer = Writer(request(stop=stop), LetterText())  # type: ignore[arg-type]
    writer.text, writer.shown = "", []  # type: ignore[attr-defined]
    at = 0
    for size in [*cuts, len(ids)]:
        piece, at = ids[at : at + size], at + size
        step = Step(
            tuple(piece),
            tuple(TokenLogprob(i, -1.0) for i in piece),
            finish if at >= len(ids) else None,  # type: ignore[arg-type]
        )
        delta = writer.feed(step)
        if delta is not None:
            writer.text += delta.text  # type: ignore[attr-defined]
            writer.shown += [p.token_id for p in delta.logprobs]  # type: ignore[attr-defined]
    return writer


letters = st.lists(st.integers(0, 2), max_size=20)
stops = st.lists(st.text("abc", min_size=1, max_size=3), max_size=3).map(tuple)


@given(ids=letters, cuts=st.lists(st.integers(1, 5), max_size=9), stop=stops)
def test_text_ends_before_the_first_stop_string_however_steps_are_cut(
    ids: list[int], cuts: list[int], stop: tuple[str, ...]
) -> None:
    """No character of a stop string is shown, none before it is lost, logprobs follow the text."""
    whole = "".join(chr(97 + i) for i in ids)
    writer = write(ids, cuts, stop)
    ends = [(whole.find(s) + len(s), whole.find(s)) for s in stop if s in whole]
    expected = whole[: min(ends)[1]] if ends else whole

    assert writer.text == expected  # type: ignore[attr-defined]
    assert writer.finish == ("stop" if ends else "length")
    assert writer.shown == ids[: len(expected)]  # type: ignore[attr-defined]
    assert len(writer.generated) == (min(ends)[0] if ends else len(ids))


def test_nothing_is_written_after_the_end() -> None:
    """Steps that arrive after a stop string are ignored, count included."""
    writer = write([0, 1, 2, 0], [], ("b",))
    assert writer.feed(Step((1, 1), finish="length")) is None
    assert (writer.generated, writer.finish) == ([0, 1], "stop")
