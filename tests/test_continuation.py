"""Continuation where ids cannot pass between two engines: no character lost, none twice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from fakes_http import tiny_model
from fakes_text import write_model
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.core import (
    Chat,
    ChatMessage,
    Delta,
    Finish,
    Health,
    Prompt,
    Request,
    Sampling,
    Step,
    TokenLogprob,
)
from edged.engine.foreign import ForeignEngine
from edged.engine.writer import Writer
from edged.errors import EngineBusy, EngineFault, RequestError, RowFault
from edged.queue import Queue
from edged.scheduler import Scheduler, Stream
from edged.text.continuation import continued
from edged.text.model import TextModel
from edged.twin.virtual_loop import run_virtual

REFERENCE = "a🙂 ünï\n\ncode</s> end 🤖🤖</ss> of it"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HELLO = Chat((ChatMessage("user", "hello"),))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """Its tokens are single bytes, so that engines may part inside a character."""
    return tiny_model(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """Another tokenizer and another template."""
    return TextModel.load(write_model(tmp_path_factory.mktemp("other") / "m", CHATML))


def asked(stop: tuple[str, ...] = (), max_tokens: int = 500, **more: Any) -> Request:
    return Request("r", "tiny", (5, 6), max_tokens, Sampling(), stop, source=HELLO, **more)


class ScriptRun:
    """Gives its steps, then fails."""

    def __init__(self, steps: list[Step], fault: Exception | None) -> None:
        self.steps, self.fault = steps, fault

    def __aiter__(self) -> ScriptRun:
        return self

    async def __anext__(self) -> Step:
        await asyncio.sleep(0.01)
        if self.steps:
            return self.steps.pop(0)
        raise self.fault or StopAsyncIteration

    def close(self) -> None:
        self.steps = []


class IdsEngine:
    """Writes REFERENCE byte by byte after the ids it is given; fails after `turns`' next number."""

    def __init__(self, name: str, turns: list[int], text: TextModel) -> None:
        self.name, self.model, self.turns, self.text = name, "tiny", turns, text
        self.begun: list[str] = []
        self.budgets: list[int] = []

    def capacity(self) -> int:
        return 1

    def health(self) -> Health:
        return Health("ready")

    def run(self, request: Request, prefix: Sequence[int]) -> ScriptRun:
        done = b"".join(self.text.token_bytes(i) for i in prefix)
        whole = REFERENCE.encode()
        assert whole.startswith(done)
        self.begun.append(self.name)
        self.budgets.append(request.max_tokens - len(prefix))
        rest = [self.text.text_ids_of(bytes([b])) for b in whole[len(done) :]]  # type: ignore[attr-defined]
        most = self.turns.pop(0) if self.turns else len(rest)
        return ScriptRun(*script([Step((i,)) for i in rest], most))


class WordsEngine:
    """Writes REFERENCE in pieces of three characters after the text it is given."""

    def __init__(self, name: str, turns: list[int], tells: bool) -> None:
        self.name, self.model, self.turns, self.tells = name, "words", turns, tells
        self.budgets: list[int] = []
        self.busy = 0

    def capacity(self) -> int:
        return 1

    def health(self) -> Health:
        return Health("ready")

    def unsuited(self, request: Request, begun: bool) -> str:
        return "logprobs" if request.sampling.logprobs is not None else ""

    def run_text(self, request: Request, written: str) -> ScriptRun:
        if self.busy:
            self.busy -= 1
            raise EngineBusy("busy")
        assert REFERENCE.startswith(written)
        self.budgets.append(request.max_tokens)
        rest = REFERENCE[len(written) :]
        pieces = [rest[at : at + 3] for at in range(0, len(rest), 3)]
        tokens = [min(3 * n + 3, len(rest)) if self.tells else None for n in range(len(pieces))]
        most = self.turns.pop(0) if self.turns else len(pieces)
        steps = [Step(text=p, tokens=t) for p, t in zip(pieces, tokens, strict=True)]
        return ScriptRun(*script(steps, most))


def script(steps: list[Step], most: int) -> tuple[list[Step], Exception | None]:
    if most >= len(steps):
        return [*steps, Step(finish="stop", text="" if steps and steps[0].text else None)], None
    return steps[:most], EngineFault("died")


def bytes_of(text: TextModel) -> TextModel:
    """Ids of single bytes, which text_ids cannot give for a half character."""
    ids = {text.token_bytes(i): i for i in range(3, text.vocab_tokens)}
    object.__setattr__(text, "text_ids_of", ids.__getitem__)
    return text


async def read(stream: Stream) -> tuple[str, Finish]:
    shown = ""
    async for event in stream:
        if isinstance(event, Delta):
            shown += event.text
        else:
            finish = event
    return shown, finish


def scheduler_of(engines: Sequence[Any], text: TextModel) -> Scheduler:
    return Scheduler(engines, {"tiny": text}, Queue(8, 10_000, 10.0))


def until_stop(stop: tuple[str, ...]) -> str:
    ends = [(REFERENCE.find(s) + len(s), REFERENCE.find(s)) for s in stop if s in REFERENCE]
    return REFERENCE[: min(ends)[1]] if ends else REFERENCE


@settings(deadline=None, max_examples=150)
@given(
    turns=st.lists(st.tuples(st.sampled_from("itT"), st.integers(0, 12)), max_size=6),
    last=st.sampled_from("itT"),
    stop=st.lists(st.sampled_from(["</s>", "</ss>", "🤖🤖<", "\n\nc", "zz"]), max_size=2),
)
def test_no_character_is_lost_or_doubled_wherever_a_stream_moves(
    text: TextModel, turns: list[tuple[str, int]], last: str, stop: list[str]
) -> None:
    """Engines by ids and by text in any order, parting inside characters, blanks and stop
    strings: the client reads one text, and it ends before the first stop string."""
    run_virtual(_moves(bytes_of(text), [*turns, (last, 10**6)], tuple(stop)))


async def _moves(text: TextModel, turns: list[tuple[str, int]], stop: tuple[str, ...]) -> None:
    engines: list[Any] = []
    for number, (kind, most) in enumerate(turns):
        name = f"{kind}{number}"
        engines.append(
            IdsEngine(name, [most], text)
            if kind == "i"
            else WordsEngine(name, [most], tells=kind == "T")
        )
    stream = scheduler_of(engines, text).submit(asked(stop))
    shown, finish = await read(stream)

    assert (shown, finish.reason) == (until_stop(stop), "stop")
    spans = finish.engines
    assert [s.name for s in spans] == [e.name for e in engines][: len(spans)]
    assert spans[0].from_token == 0 and spans[-1].to_token == finish.usage.completion_tokens
    assert all(a.to_token == b.from_token for a, b in pairwise(spans))
    writer = spans[0]
    for before, span in pairwise(spans):
        writer = before if before.to_token > before.from_token else writer
        by_text = {span.name[0], writer.name[0]} & {"t", "T"}
        assert span.approximate == bool(by_text and before.to_token > 0)
    assert not spans[0].approximate


def test_what_is_left_of_the_budget_moves_with_the_stream(text: TextModel) -> None:
    """Each engine may write what the ones before it left, whatever their tokens are."""

    async def run() -> None:
        ids = IdsEngine("i0", [10], bytes_of(text))
        words = WordsEngine("T1", [2], tells=True)
        again = IdsEngine("i2", [10**6], text)
        _, finish = await read(scheduler_of([ids, words, again], text).submit(asked()))

        assert (ids.budgets, words.budgets, again.budgets) == ([500], [490], [484])
        assert [(s.from_token, s.to_token) for s in finish.engines][:2] == [(0, 10), (10, 16)]

    run_virtual(run())


def test_tokens_that_nobody_tells_are_counted_by_our_tokenizer(text: TextModel) -> None:
    """An upstream without usage still gives an honest count."""

    async def run() -> None:
        stream = scheduler_of([WordsEngine("t0", [], tells=False)], text).submit(asked())
        _, finish = await read(stream)
        assert finish.usage.completion_tokens == len(REFERENCE.encode())

    run_virtual(run())


def test_a_busy_engine_is_asked_again_and_leaves_no_trace(text: TextModel) -> None:
    """Busy is no failure: the stream goes there later, as if for the first time."""

    async def run() -> None:
        engine = WordsEngine("t0", [], tells=True)
        engine.busy = 3
        _, finish = await read(scheduler_of([engine], text).submit(asked()))
        assert [(s.name, s.reason, s.approximate) for s in finish.engines] == [
            ("t0", "first", False)
        ]

    run_virtual(run())


def test_an_engine_that_is_always_busy_ends_the_stream(text: TextModel) -> None:
    """Nobody waits for ever in a circle."""

    async def run() -> None:
        engine = WordsEngine("t0", [], tells=True)
        engine.busy = 10**6
        _, finish = await read(scheduler_of([engine], text).submit(asked()))
        assert (finish.reason, finish.error_code) == ("failed", "engine_fault")

    run_virtual(run())


def test_a_request_goes_to_the_first_engine_that_can_do_it(text: TextModel) -> None:
    """What an engine cannot do is not ignored: another takes it, or the refusal names it."""

    async def run() -> None:
        words = WordsEngine("t0", [], tells=True)
        ids = IdsEngine("i1", [], bytes_of(text))
        wish = asked()
        picky = Request("r", "tiny", (5,), 99, Sampling(logprobs=0), source=HELLO)
        scheduler = scheduler_of([words, ids], text)
        results = [await read(scheduler.submit(r)) for r in (wish, picky)]
        assert [f.engines[0].name for _, f in results] == ["t0", "i1"]
        with pytest.raises(RequestError) as refused:
            scheduler_of([words], text).submit(picky)
        assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "logprobs")

    run_virtual(run())


def test_no_engine_that_suits_is_waited_for_when_it_is_off(text: TextModel) -> None:
    """A stream whose last suited engine fails ends, though an unsuited one serves on."""

    async def run() -> None:
        ids = IdsEngine("i0", [3], bytes_of(text))
        picky = Request("r", "tiny", (5,), 99, Sampling(logprobs=0), source=HELLO)
        stream = scheduler_of([ids, WordsEngine("t1", [], tells=True)], text).submit(picky)
        _, finish = await read(stream)
        assert (finish.reason, finish.error_code) == ("failed", "engine_fault")

    run_virtual(run())


async def test_the_other_model_reads_the_conversation_in_its_own_template(
    other: TextModel,
) -> None:
    """Prompt and answer so far are rendered and tokenised by the model that goes on."""
    prompt, prefix = await continued(other, HELLO, "Hi <|im_end|>")

    assert prompt == await other.chat_ids(HELLO.messages)
    assert b"".join(other.token_bytes(i) for i in prefix) == b"Hi <|im_end|>"
    assert not set(prefix) & set(other.eos_ids)
    raw, prefix = await continued(other, Prompt("abc"), "d" * 10_000)
    assert b"".join(other.token_bytes(i) for i in (*raw, *prefix)) == b"abc" + b"d" * 10_000


async def test_a_final_message_is_continued_not_closed(other: TextModel) -> None:
    """continue_final puts the message behind the generation prompt, open at its end."""
    begun = Chat((*HELLO.messages, ChatMessage("assistant", "Hi t")), continue_final=True)
    prompt, prefix = await continued(other, begun, "here")

    assert prompt[: -len(other.text_ids("Hi t"))] == await other.chat_ids(HELLO.messages)
    assert b"".join(other.token_bytes(i) for i in (*prompt, *prefix)).endswith(b"Hi there")


class Inner:
    """The engine inside a ForeignEngine: draws the ids of `says` after what it is given."""

    name, model = "cpu", "other"

    def __init__(self, text: TextModel, says: str) -> None:
        self.text, self.says = text, says
        self.asked: list[tuple[Request, tuple[int, ...]]] = []

    def capacity(self) -> int:
        return 2

    def health(self) -> Health:
        return Health("ready", slots=2)

    def run(self, request: Request, prefix: Sequence[int]) -> ScriptRun:
        self.asked.append((request, tuple(prefix)))
        ids = self.text.text_ids(self.says)
        return ScriptRun([*(Step((i,)) for i in ids), Step(finish="stop")], None)


async def test_an_engine_with_another_tokenizer_goes_on_by_text(
    text: TextModel, other: TextModel
) -> None:
    """It takes over in its own ids, within its own context, and gives whole characters back."""
    inner = Inner(other, " und weiter 🙂")
    engine = ForeignEngine(inner, other, 4096)  # type: ignore[arg-type]
    run = engine.run_text(asked(max_tokens=30), "So weit")
    assert engine.capacity() == 1  # its slot is taken while the prompt is rendered
    steps = [step async for step in run]

    assert "".join(s.text or "" for s in steps) == " und weiter 🙂"
    assert steps[-1].tokens == len(other.text_ids(" und weiter 🙂"))
    request, prefix = inner.asked[0]
    assert request.prompt_ids == await other.chat_ids(HELLO.messages)
    assert list(prefix) == other.text_ids("So weit")
    assert request.max_tokens == len(prefix) + 30
    assert engine.capacity() == 2


async def test_what_does_not_fit_the_other_model_is_that_streams_trouble(
    other: TextModel,
) -> None:
    """A prompt beyond the smaller context, or words it cannot read, is a row fault in words."""
    engine = ForeignEngine(Inner(other, ""), other, 8)  # type: ignore[arg-type]
    with pytest.raises(RowFault, match="context holds 8"):
        await engine.run_text(asked(), "So weit").__anext__()
    assert engine.unsuited(Request("r", "tiny", (5,), 9), False) == "prompt"
    assert engine.capacity() == 2


async def test_a_closed_run_never_reaches_the_engine_inside(other: TextModel) -> None:
    """Leaving while the prompt is rendered starts nothing and frees the slot."""
    inner = Inner(other, "x")
    engine = ForeignEngine(inner, other, 4096)  # type: ignore[arg-type]
    run = engine.run_text(asked(), "")
    run.close()
    with pytest.raises(asyncio.CancelledError):
        await run.__anext__()
    assert (inner.asked, engine.capacity()) == ([], 2)


def test_a_request_never_shows_its_words() -> None:
    """What a client wrote is in no repr, so in no log line and no traceback."""
    assert "hello" not in repr(asked())


def test_a_character_begun_by_ids_is_drawn_anew_by_text(text: TextModel) -> None:
    """Its bytes are neither shown as garbage nor lost."""
    bytes_of(text)
    writer = Writer(asked(), text)
    first, second = "🙂".encode()[:1], "🙂".encode()[1:2]
    ids = [text.text_ids_of(b) for b in (b"a", first, second)]  # type: ignore[attr-defined]
    shown = [writer.feed(Step(tuple(ids)))]
    writer.settle()
    assert writer.written == "a"
    shown.append(writer.feed(Step(text="🙂b", tokens=2, finish="stop")))

    assert "".join(d.text for d in shown if d) == "a🙂b"
    assert (writer.tokens, writer.finish) == (5, "stop")


def test_log_probabilities_of_text_wait_with_their_text(text: TextModel) -> None:
    """Held back with a partly matched stop string, shown with what is shown, by their bytes."""
    tokens = ["a", "<", "/s", "b"]
    told = {t: TokenLogprob(t.encode(), -1.0) for t in tokens}
    writer = Writer(asked(("</x>",)), text)
    shown = [writer.feed(Step(text=t, logprobs=(told[t],))) for t in tokens]

    assert [(d.text, d.logprobs) for d in shown if d] == [
        ("a", (told["a"],)),
        ("</s", (told["<"], told["/s"])),
        ("b", (told["b"],)),
    ]


async def test_the_other_models_log_probabilities_are_told_by_bytes(other: TextModel) -> None:
    """Its ids would name other words here."""
    inner = Inner(other, "ab")
    ids = other.text_ids("ab")
    engine = ForeignEngine(inner, other, 4096)  # type: ignore[arg-type]
    run = engine.run_text(asked(), "")
    told = TokenLogprob(ids[0], -0.5, ((ids[0], -0.5), (2, -3.0)))
    inner.run = lambda request, prefix: ScriptRun(  # type: ignore[method-assign]
        [Step((ids[0],), (told,), finish="length")], None
    )
    step = await run.__anext__()
    first = other.token_bytes(ids[0])
    assert step.logprobs == (
        TokenLogprob(first, -0.5, ((first, -0.5), (other.token_bytes(2), -3.0))),
    )
