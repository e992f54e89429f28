"""Notices when an engine starts to repeat itself in several streams at once. Pure, ids only.

A broken kernel or cache often ends in loops, long before anything is NaN. So do some prompts:
hence a stream has one vote, and an engine is measured against its own past. What is noticed
here is a reason for a self test, never a verdict.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

# Prose hardly repeats six tokens in a row; four (names, list marks) it does. A loop is noticed
# that many tokens after its first turn, so longer ones would only be later.
GRAM_TOKENS = 6
_REMEMBERED = 256  # latest different n-grams of a stream: longer loops are not noticed
_SEGMENT = 64  # n-grams that make a vote
_LAST_SEGMENT = 24  # n-grams that make one at a stream's end
_RECENT_SEGMENTS = 64  # of the engine, after which a vote is forgotten
_VOTERS = 5  # streams looked at, at least; all running ones are
_LOOPING_STREAMS = 3  # at least, to call it a jump
_LOOPING_SHARE = 0.6  # of the streams looked at
_LEARN_SEGMENTS = 32  # before anything is called a jump
_LEARN_PER_STREAM = 8  # segments of one stream that count for the usual share
_QUIET_SEGMENTS = 128  # after a jump: the test it led to has just answered
_FORGET = 1 / 256  # per segment: the usual share follows slowly
_JUMP = 0.35  # above the usual share
_LEAST_SHARE = 0.5
_MAX_STREAMS = 1024  # whose end was never told; the oldest is dropped


@dataclass
class _Tail:
    """The end of one stream. grams: the latest different ones, oldest first."""

    last: deque[int] = field(default_factory=lambda: deque(maxlen=GRAM_TOKENS))
    grams: dict[tuple[int, ...], None] = field(default_factory=dict)
    counted: int = 0
    repeated: int = 0
    segments: int = 0

    def add(self, token: int) -> None:
        self.last.append(token)
        if len(self.last) < GRAM_TOKENS:
            return
        gram = tuple(self.last)
        self.counted += 1
        if gram in self.grams:
            self.repeated += 1
            del self.grams[gram]
        elif len(self.grams) >= _REMEMBERED:
            del self.grams[next(iter(self.grams))]
        self.grams[gram] = None


@dataclass(frozen=True)
class _Vote:
    share: float  # of repeated n-grams in a stream's latest segment
    segment: int  # of the engine, when it was cast


class Repetition:
    """For one engine. A token costs a dictionary look-up, whatever ran before it.

    The share of a segment is (n-grams that the stream had among its latest 256 different ones)
    / (n-grams of the segment). It is blind to an engine whose usual share is above 0.65.
    """

    def __init__(self) -> None:
        self._tails: dict[int, _Tail] = {}
        self._votes: dict[int, _Vote] = {}  # by stream, the latest last
        self._segments = 0
        self._learned = 0
        self._usual = 0.0
        self._quiet_until = 0
        self._news = False

    @property
    def usual(self) -> float:
        """The engine's long-run share, 0..1."""
        return self._usual

    def feed(self, stream: int, ids: Sequence[int]) -> None:
        """Ids a stream was just given. Stream numbers must not be used twice."""
        tail = self._tails.get(stream)
        if tail is None:
            if len(self._tails) >= _MAX_STREAMS:
                self.end(next(iter(self._tails)))
            tail = self._tails[stream] = _Tail()
        for token in ids:
            tail.add(token)
            if tail.counted >= _SEGMENT:
                self._vote(stream, tail)

    def end(self, stream: int) -> None:
        """The stream has ended or moved away; what it said last still counts."""
        tail = self._tails.pop(stream, None)
        if tail is not None and tail.counted >= _LAST_SEGMENT:
            self._vote(stream, tail)

    def jumped(self) -> str | None:
        """Words, once for each jump, then not before 8192 more tokens. Cheap when nothing new
        was said."""
        if not self._news:
            return None
        self._news = False
        limit = max(_LEAST_SHARE, self._usual + _JUMP)
        shares = self._recent_shares()
        looping = [share for share in shares if share >= limit]
        if self._segments < self._quiet_until or self._learned < _LEARN_SEGMENTS:
            return None
        if len(looping) < max(_LOOPING_STREAMS, _LOOPING_SHARE * len(shares)):
            return None
        self._votes.clear()
        self._quiet_until = self._segments + _QUIET_SEGMENTS
        return (
            f"{len(looping)} of the latest {len(shares)} streams repeat themselves: "
            f"{sum(looping) / len(looping):.0%} of their {GRAM_TOKENS}-grams were said before, "
            f"usually {self._usual:.0%} are"
        )

    def _vote(self, stream: int, tail: _Tail) -> None:
        share = tail.repeated / tail.counted
        tail.counted = tail.repeated = 0
        tail.segments += 1
        self._segments += 1
        if tail.segments <= _LEARN_PER_STREAM:
            self._learned += 1
            weight = max(_FORGET, 1 / self._learned)
            self._usual += weight * (share - self._usual)
        self._votes.pop(stream, None)
        self._votes[stream] = _Vote(share, self._segments)
        oldest = next(iter(self._votes))
        if self._votes[oldest].segment <= self._segments - _RECENT_SEGMENTS:
            del self._votes[oldest]
        self._news = True

    def _recent_shares(self) -> list[float]:
        """Of all running streams, and of the latest others up to _VOTERS. One that has not voted
        yet counts with what it said so far: loops must not decide before the others spoke."""
        running = [
            self._votes[stream].share
            if stream in self._votes
            else tail.repeated / max(_LAST_SEGMENT, tail.counted)
            for stream, tail in self._tails.items()
        ]
        missing = max(0, _VOTERS - len(running))
        ended = [v.share for stream, v in self._votes.items() if stream not in self._tails]
        return running + ended[max(0, len(ended) - missing) :] if missing else running
