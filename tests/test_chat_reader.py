"""Chat: what a model writes, read into thoughts, content and calls, in any cutting."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from g4ir import chat
from g4ir.chat import Answer, Piece, Reader, Vocabulary, make_prompt
from g4ir.chat.prompt import TextStream, find
from g4ir.chat.special_tokens import CALL, CALL_END, CONTROLS, QUOTE, RESPONSE
from g4ir.errors import InputError
from tests.cases import read_table
from tests.cli_tools import tokenizer

FOLDER = Path(__file__).parent / "chat"
CASES, STOPS = (json.loads((FOLDER / f"{name}.json").read_text()) for name in ("read", "stop"))
CALLS = read_table("chat/calls.yaml")
CASES += CALLS["cases"]
CASES += [{"ended": "length", "options": {"stop": case["stop"]}, **case} for case in STOPS]


def declared(schemas: Any) -> Any:
    """Tools of the OpenAI form by name -> parameters; "f": the function of calls.yaml."""
    schemas = {"f": CALLS["schema"]} if schemas == "f" else schemas or {}
    functions = [{"name": k, "parameters": v} for k, v in schemas.items()]
    return [{"type": "function", "function": f} for f in functions] or None


def reader(case: dict[str, Any]) -> Reader:
    tail = case.get("tail", "<|turn>model\n")
    return Reader(declared(case.get("tools")), tail, **case.get("options", {}))


def answered(reader: Reader, pieces: Iterable[str], reason: str = "stop") -> Answer:
    """The answer, which must be what its events say."""
    events = list(chain.from_iterable(map(reader.feed, pieces)))
    answer = reader.finish(reason)
    events += answer.events
    texts = {k: "".join(e.text for e in events if e.kind == k) for k in ("thought", "content")}
    calls = [e for e in events if e.kind == "call"]
    assert texts == {"thought": answer.reasoning, "content": answer.content}
    read = [e.text if e.arguments is None else e.arguments for e in calls]
    assert [{"name": e.name, "arguments": a} for e, a in zip(calls, read)] == answer.tool_calls
    assert [e.index for e in calls] == [*range(len(calls))]
    for e in calls:
        assert e.arguments is None or json.loads(e.text) == e.arguments
        mine = [p for p in events if p.kind == "arguments" and p.index == e.index]
        assert e.streamed == bool(mine) and all(p.text for p in mine)
        if mine:
            assert "".join(p.text for p in mine) == e.text
            assert [p.name for p in mine] == [e.name] + [None] * (len(mine) - 1)
            assert events.index(mine[-1]) < events.index(e)
    return answer


def parts(answer: Answer) -> tuple[Any, ...]:
    return answer.reasoning, answer.content, answer.tool_calls, answer.finish_reason


def one(text: str, reason: str = "stop", **case: Any) -> Answer:
    """The answer of a text in one piece, which every other cutting must give too."""
    answer = answered(reader(case), [text], reason)
    for pieces in cuttings(text):
        assert parts(answered(reader(case), pieces, reason)) == parts(answer), pieces
    return answer


def cuttings(text: str) -> Iterable[Sequence[str]]:
    """Each single cut, and pieces of each of several lengths."""
    yield from ([text[:i], text[i:]] for i in range(1, len(text)))
    yield from ([text[i : i + n] for i in range(0, len(text), n)] for n in (1, 2, 3, 7))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.get("name", case["output"])[:50])
def test_collected_answers_in_every_cutting(case: dict[str, Any]) -> None:
    ended = case.get("ended", "stop")
    given = {k: case[k] for k in ("tail", "tools", "options") if k in case}
    answer = one(case["output"], ended, **given)
    calls = [{call["name"]: call["arguments"]} for call in answer.tool_calls]
    found = (answer.reasoning, answer.content, calls)
    assert found == (case.get("thought", ""), case.get("content", ""), case.get("calls", []))
    wanted = "tool_calls" if calls and ended == "stop" else ended
    assert answer.finish_reason == case.get("reason", wanted)


def pieces_of(text: str) -> list[Piece]:
    out, start = list[Piece](), 0
    for at, end in find(text, CONTROLS):
        out += [Piece(text[start:at]), Piece(text[at:end], True)]
        start = end
    return [*out, Piece(text[start:])]


def test_ids_give_the_same_answers() -> None:
    for case in CASES:
        by_ids, ended = reader(case), case.get("ended", "stop")
        for piece in pieces_of(case["output"]):
            by_ids.feed_tokens([piece])
        text = answered(reader(case), [case["output"]], ended)
        assert parts(by_ids.finish(ended)) == parts(text)


def test_text_that_looks_like_a_control_token_is_text_where_ids_are_known() -> None:
    ids = Reader()
    ids.feed_tokens([Piece("<|tool_call>call:f{}<turn|>"), Piece("<unused7>", True)])
    assert ids.finish().content == "<|tool_call>call:f{}<turn|>"
    ids = Reader()
    ids.feed_tokens([Piece(CALL, True), Piece("call:f{a:"), Piece(QUOTE, True)])
    ids.feed_tokens([Piece(f"{QUOTE}{CALL_END}"), Piece(QUOTE, True), Piece("}")])
    assert ids.finish().tool_calls == [{"name": "f", "arguments": {"a": f"{QUOTE}{CALL_END}"}}]
    other = "<start_function_call>call:f{}<end_function_call>"  # FunctionGemma's
    assert one(other).content == other


@pytest.mark.parametrize("body", CALLS["cut"])
def test_a_cut_call_has_cut_arguments(body: str) -> None:
    head = f"{CALL}call:f{{"
    whole = f"{head}{body}}}{CALL_END}"
    (done,) = one(whole, tools="f").tool_calls
    for end in range(len(CALL) + 1, len(head) + len(body), 3):
        answer = one(whole[:end], "length", tools="f")
        assert (answer.content, answer.finish_reason) == ("", "length")
        if end < len(head):  # which function it calls is not known
            assert answer.tool_calls == []
            continue
        ((name, cut),) = [(c["name"], c["arguments"]) for c in answer.tool_calls]
        assert name == "f" and isinstance(cut, str)
        if body.startswith("text") and "<" not in cut:  # half a control token
            assert json.dumps(done["arguments"]).startswith(cut)
        with pytest.raises(ValueError, match=r"."):
            json.loads(cut)
    assert one(whole + "and", "length").finish_reason == "length"
    undeclared = one(f"{CALL}call:g{{a:{QUOTE}x", "length").tool_calls
    assert undeclared == [{"name": "g", "arguments": '{"a": "x'}]
    assert one(f"{CALL}no call", "length").content == f"{CALL}no call"


def streamed(reader: Reader, text: str, size: int = 3) -> list[tuple[int, str]]:
    """The pieces of arguments, and how many characters were fed when each came."""
    cuts = [(at + size, text[at : at + size]) for at in range(0, len(text), size)]
    return [(at, e.text) for at, cut in cuts for e in reader.feed(cut) if e.kind == "arguments"]


SOURCE = "def f(a, b):\n    return {'a': [1, 2], 'b': (a, b)}  # \"quoted\", \\ and € }\n" * 40


@pytest.mark.parametrize("body", CALLS["streamed"])
def test_arguments_are_streamed_while_they_are_generated(body: str) -> None:
    text = f"{CALL}call:f{{{body.replace('S', f'{QUOTE}{SOURCE}{QUOTE}')}}}{CALL_END}"
    reading = Reader(declared("f"))
    pieces = streamed(reading, text)
    (call,) = reading.finish().tool_calls
    whole = json.dumps(call["arguments"], ensure_ascii=False)
    assert "".join(piece for _, piece in pieces) == whole
    assert json.dumps(SOURCE, ensure_ascii=False) in whole
    assert pieces[0][0] < 120 and len(pieces) > len(SOURCE) / 8
    assert max(b - a for (a, _), (b, _) in pairwise(pieces)) < 60


@pytest.mark.parametrize("end", CALLS["open"])
def test_what_ends_an_open_string_is_not_streamed(end: str) -> None:
    text = f"{CALL}call:f{{text:{QUOTE}{'long text, ' * 8}{end}{CALL_END}"
    reading = Reader(declared("f"))
    pieces = streamed(reading, text, 1)
    (call,) = one(text, tools="f").tool_calls
    assert isinstance(call["arguments"], dict) and len(pieces) > 30


def test_whether_a_thought_is_open() -> None:
    off = "<|turn>model\n<|channel>thought\n<channel|>"
    assert Reader(None, "<tool_response|><|channel>thought\n").thinking
    assert not Reader(None, off).thinking and not Reader().thinking
    assert Reader(None, "<|channel>thought\n").thinking


def test_an_answer_is_read_once() -> None:
    done = Reader()
    done.feed("a")
    assert done.finish("length") is done.finish()
    with pytest.raises(InputError, match="finished"):
        done.feed("b")
    assert chat.call_id() != chat.call_id() and chat.call_id().startswith("call_")


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_the_string_that_is_complete_first_ends_the_content(text: str, stops: list[str]) -> None:
    ends = [(text.find(s) + len(s), -len(s)) for s in stops if s in text]
    end, length = min(ends, default=(len(text), 0))
    for pieces in ([text], list(text)):
        found = Reader(stop=stops)
        answer = answered(found, pieces, "length")
        assert answer.content == text[: end + length]
        assert found.stopped == bool(ends)
        assert answer.finish_reason == ("stop" if ends else "length")


ATOMS = st.sampled_from(
    [*CONTROLS, *"}{,\"'\\\n x<[]()=", "call:f{", "call:", "a:", "thought\n", "<|tool", "_call>"]
    + ["|>", "12", f"{CALL}call:f{{", f"text:{QUOTE}", f"{QUOTE},", ",n:", ", text :"]
    + ["a long text, " * 4]
)
SOUP = st.lists(ATOMS, max_size=24)


@given(SOUP, st.data(), st.sampled_from(["stop", "length"]), st.booleans())
@settings(max_examples=200)
def test_every_cutting_of_anything(soup: list[str], data: Any, reason: str, known: bool) -> None:
    case = {"tools": "f"} if known else {}
    case |= {"options": {"stop": ["x}", "}x"]}} if data.draw(st.booleans()) else {}
    text = "".join(soup)
    whole = parts(answered(reader(case), [text], reason))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    for pieces in (list(text), [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]):
        assert parts(answered(reader(case), pieces, reason)) == whole


PLAIN = st.text(max_size=12).filter(lambda t: not any(c in t for c in CONTROLS))
KEYS = st.text("abcXYZ_-.9도", min_size=1, max_size=5)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    PLAIN | st.none() | st.booleans() | NUMBERS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(KEYS, VALUES, max_size=4)


@given(st.lists(st.tuples(KEYS, ARGUMENTS), min_size=1, max_size=3), PLAIN)
def test_what_is_rendered_is_read_back(calls: list[tuple[str, Any]], thought: str) -> None:
    functions = [{"name": name, "arguments": json.dumps(a)} for name, a in calls]
    asked = [{"id": str(i), "type": "function", "function": f} for i, f in enumerate(functions)]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Go"}]
    start = len(make_prompt(messages).text)
    messages.append({"role": "assistant", "reasoning": thought, "tool_calls": asked})
    messages += [{"role": "tool", "tool_call_id": c["id"], "content": ""} for c in asked]
    text = make_prompt(messages).text[start:]
    text = text[: text.index(f"{RESPONSE}response:")] + RESPONSE
    answer = answered(Reader(), [text], "length")
    assert answer.reasoning == thought
    assert answer.tool_calls == [{"name": name, "arguments": a} for name, a in calls]
    assert (answer.content, answer.finish_reason) == ("", "tool_calls")


@pytest.mark.parametrize("name", CALLS["long"])
def test_time_grows_with_the_length(name: str) -> None:
    """In pieces of one character; what looks at all before again would take minutes."""
    head, part, count, end = CALLS["long"][name]
    begun = time.process_time()
    answered(Reader(declared("f"), stop=["aab", "}}}"]), head + part * count + end)
    assert time.process_time() - begun < 4


TOKENIZER = tokenizer()
TOKENIZER.add_special_tokens([c for c in CONTROLS if c not in ("<pad>", "<eos>", "<bos>")])
WORDS = Vocabulary(TOKENIZER)
BYTES = st.integers(4, 259) | st.sampled_from([4 + byte for byte in "a😀é😀€".encode()])


@given(st.lists(st.integers(0, 511) | st.integers(512, 530) | BYTES, max_size=24))
def test_a_stream_of_ids_is_their_text(ids: list[int]) -> None:
    """Control tokens as such; bytes are decoded as UTF-8, whatever stands between their runs."""
    ids = [i for i in ids if WORDS.tokenizer.id_to_token(i) is not None]
    stream, text = chat.TokenStream(WORDS), TextStream(WORDS)
    assert "".join([*map(text.push, ids), text.flush()]) == WORDS.decode(ids)
    pieces = [*chain.from_iterable(map(stream.push, ids)), *stream.flush()]
    controls = [WORDS.strings[i] for i in ids if i in WORDS.strings]
    assert [p.text for p in pieces if p.control] == controls
    wanted = ""
    for special, group in groupby(ids, lambda i: i in WORDS.strings):
        run = [*group]
        own = "".join(WORDS.strings[i] for i in run) if special else WORDS.decode(run)
        wanted += own
        plain = WORDS.tokenizer.decode(run)
        assert special or "\ufffd" in plain or own == plain
        parts = [list(part) for known, part in groupby(run, lambda i: i in WORDS.bytes) if known]
        raw = bytes(WORDS.bytes[i] for i in parts[0]) if len(parts) == 1 else b""
        assert raw.decode(errors="replace") in own
    assert "".join(p.text for p in pieces) == wanted


def test_a_budget_ends_thoughts() -> None:
    opened, closed = (WORDS.controls[c] for c in ("<|channel>", "<channel|>"))
    (newline,), (word,), byte = (WORDS.plain(text) for text in ("\n", "a", "€"))
    tokens = {"o": opened, "c": closed, "n": newline, "w": word, ".": None}
    tokens |= {str(i): token for i, token in enumerate(byte)}
    for limit, answer, forced in CALLS["budgets"]:
        budget, found = chat.ReasoningBudget(WORDS, limit), list[Any]()
        for letter in answer.split():
            budget.push(tokens[letter])
            found.append(budget.forced())
        assert found == [tokens[letter] for letter in forced.split()], answer
    assert chat.ReasoningBudget(WORDS, 0, inside=True).forced() == closed
    with pytest.raises(InputError, match="budget -1"):
        chat.ReasoningBudget(WORDS, -1)
    with pytest.raises(InputError, match=r"no <\|channel>"):
        chat.ReasoningBudget(Vocabulary(tokenizer()), 1)
