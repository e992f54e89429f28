"""Stop strings never leak, whatever pieces the text arrives in, and nothing else is lost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.text.stops import StopMatcher

# Few letters make overlaps, repeats and near misses likely.
_TEXT = st.text(alphabet="ab.\n", max_size=40)
_STOPS = st.lists(st.text(alphabet="ab.\n", min_size=1, max_size=5), max_size=4)


def run(stops: Sequence[str], pieces: Sequence[str]) -> tuple[str, bool]:
    """All text a stream emits, and whether a stop string ended it."""
    matcher = StopMatcher(stops)
    emitted = ""
    for piece in pieces:
        text, stopped = matcher.push(piece)
        emitted += text
        if stopped:
            return emitted, True
    return emitted + matcher.flush(), False


def expected(stops: Sequence[str], text: str) -> tuple[str, bool]:
    """The rule itself, character by character: the first stop string to be complete ends it."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in cuts)})
    return [text[start:stop] for start, stop in pairwise(places)]


@given(_STOPS, _TEXT, st.lists(st.integers(0, 40), max_size=12))
@settings(deadline=None, max_examples=400)
def test_the_pieces_do_not_matter(stops: list[str], text: str, cuts: list[int]) -> None:
    """Any cutting of the text gives what the rule gives for the whole text."""
    assert run(stops, cut(text, cuts)) == expected(stops, text)


@given(_STOPS, _TEXT)
@settings(deadline=None, max_examples=300)
def test_it_holds_back_only_what_may_become_a_stop(stops: list[str], text: str) -> None:
    """At any moment the held text is the longest ending that begins a stop string."""
    matcher = StopMatcher(stops)
    seen = ""
    for char in text:
        _, stopped = matcher.push(char)
        if stopped:
            assert matcher.held == ""
            return
        seen += char
        beginnings = [s[:n] for s in stops for n in range(1, len(s)) if seen.endswith(s[:n])]
        assert matcher.held == max(beginnings, key=len, default="")


def test_a_stop_across_three_tokens_does_not_leak() -> None:
    """'</s>' arriving as '<', '/s', '>' is never seen by the client."""
    matcher = StopMatcher(["</s>"])
    assert matcher.push("Hi <") == ("Hi ", False)
    assert matcher.push("/s") == ("", False)
    assert matcher.push("> more") == ("", True)
    assert matcher.push("late") == ("", True)
    assert matcher.flush() == ""


def test_a_near_miss_is_given_back() -> None:
    """What began like a stop string but went on otherwise is emitted in full."""
    assert run(["END."], ["a EN", "D!", " EN"]) == ("a END! EN", False)


def test_the_first_complete_stop_wins() -> None:
    """Of 'abcd' and 'bc' the latter is complete first; of equals the longest counts."""
    assert run(["abcd", "bc"], ["xabcd"]) == ("xa", True)
    assert run(["cd", "bcd"], ["xabcd"]) == ("xa", True)


def test_without_stops_everything_passes_at_once() -> None:
    """No stop strings: no delay."""
    assert StopMatcher().push("any text") == ("any text", False)


def test_an_empty_stop_string_is_refused() -> None:
    """It would end every answer before its first character."""
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(["x", ""])
