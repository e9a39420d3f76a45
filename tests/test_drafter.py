"""Draft models beside transformers' assistants: every step, and the text of all rounds; what
drafting is expected to gain.

Speculative decoding: texts are those of single steps, in `generate`, sessions, the scheduler,
`run`, `chat` and `serve`; what `verify` and `bench` say of it.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import g4ir
from g4ir import Engine, Session, load_engine
from g4ir.backends.sampling import SamplingParams
from g4ir.check.logits import verify_engine
from g4ir.check.passes import verify_each_pass
from g4ir.check.reference import reference_engine
from g4ir.check.stages import BACKEND
from g4ir.engine import speculative
from g4ir.engine.requests import Event, Request
from g4ir.engine.scheduler import Scheduler, SchedulerConfig
from g4ir.engine.speculative import AcceptanceStats, NgramProposer, SpeculativeConfig, StepCosts
from g4ir.errors import G4Error, InputError, WeightsError
from g4ir.model.decoder import VERIFY
from g4ir.model.draft import NEXT_HIDDEN, TOKEN, check_pair
from g4ir.model.tensors import media_tensors, numel, text_tensors
from g4ir.spec.parts import SLIDING
from g4ir.spec.record import DRAFTER, Spec, diff_specs, drafter_names, load_spec
from tests.cli_tools import g4ir as command
from tests.cli_tools import refused
from tests.configs import VARIANTS, short
from tests.contract.flows import FLOWS, in_a_loop
from tests.contract.session import AnyOrder
from tests.engines import CASES, some_tokens
from tests.media_tools import png, wav
from tests.oracle import (
    Oracle,
    Weights,
    find_oracle,
    hf_model,
    random_tokens,
    randomize,
    relative,
    save_checkpoint,
)
from tests.serve.running import chat_engine, eventually, running
from tests.shrink import shrink, shrink_drafter
from tests.test_verify import break_pass, smaller_rings, turned
from tests.trt import fake
from tests.uncompiled import run_uncompiled

STEPS = 4
LIMITS = {"max_seq": 96, "prefill_chunk": 16, "draft_tokens": 4, "max_batch": 3}


@dataclass(frozen=True)
class Pair:
    """A model and its drafter, both of transformers and random."""

    oracle: Oracle
    spec: Spec
    assistant: Any

    def save(self, folder: Path) -> tuple[Path, Path]:
        """Write both as transformers does."""
        model = save_checkpoint(self.oracle, folder / "model")
        self.assistant.save_pretrained(folder / "drafter")
        return model, folder / "drafter"


def assistant_of(spec: Spec, seed: int = 1) -> Any:
    """A transformers assistant of a spec, every weight random."""
    import transformers

    config = spec.to_hf()
    cls = getattr(transformers, config["architectures"][0])
    model = cls(transformers.AutoConfig.for_model(**config)).eval()
    randomize(model, seed)
    return model


@cache
def pair_of(name: str) -> Pair:
    oracle = find_oracle(shrink(load_spec(name)))
    spec = shrink_drafter(load_spec(f"{name}{DRAFTER}"), oracle.spec)
    return Pair(oracle, spec, assistant_of(spec))


#: of a model that often says the same token again: its blocks add little
REPEATING = Weights(query=1.0, post=0.12, scalar=0.9, experts=0.2, router=2.0)


@cache
def copying(name: str, vocab: int = 0) -> Pair:
    """A model that often says the same token again, and a drafter that mostly does: it has the
    model's own table and final norm, takes its row as it is, and its layers add little. Each token
    takes every expert, so that rounding chooses none."""
    spec = shrink(load_spec(name))
    moe = spec.text.moe and replace(spec.text.moe, top_k_experts=spec.text.moe.num_experts)
    text = replace(spec.text, moe=moe, vocab_size=vocab or spec.text.vocab_size)
    spec = replace(spec, name=f"{name}-copying", text=text)
    model = hf_model(spec)
    randomize(model, 3, REPEATING)
    oracle = Oracle(spec, 3, model, random_tokens(spec, 2, 4 * 8 + 5))
    spec, model = shrink_drafter(load_spec(f"{name}{DRAFTER}"), spec), model.model
    spec = replace(spec, text=replace(spec.text, hidden_size=oracle.spec.text.hidden_size))
    made = assistant_of(spec)
    with torch.no_grad():
        made.model.embed_tokens.weight.copy_(model.embed_tokens.weight)
        made.model.norm.weight.copy_(model.norm.weight)
        size = spec.text.hidden_size
        made.pre_projection.weight.copy_(torch.eye(size, 2 * size))
        if head := made.masked_embedding:  # heads that find their own tokens
            rows = model.embed_tokens.weight[head.token_ordering]
            head.centroids.weight.copy_(rows.unflatten(0, (head.num_centroids, -1)).sum(1))
        for layer in made.model.layers:
            for norm in (layer.post_attention_layernorm, layer.post_feedforward_layernorm):
                norm.weight.mul_(0.2)
    return Pair(oracle, spec, made)


Build = Callable[..., Engine]


@pytest.fixture(scope="module")
def built(make_engine: Build, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """`built(pair, backend="reference", position="next", ...)`."""
    folder = tmp_path_factory.mktemp("drafters")

    def engine(pair: Pair, **options: Any) -> Engine:
        files = folder / f"{pair.oracle.spec.name}-{pair.spec.text.hidden_size}"
        if not files.exists():
            pair.save(files)
        given = {"checkpoint": files / "model", "drafter": files / "drafter", **LIMITS, **options}
        return make_engine(None, random_weights=None, **given)

    return engine


#: of one row: the token, the next hidden state, and the logits
Step = tuple[int, torch.Tensor, torch.Tensor]


def theirs(pair: Pair, tokens: torch.Tensor, newest: int, last: bool) -> list[Step]:
    """The steps of transformers' assistant behind tokens [p], over the keys that the model made."""
    model, out = pair.oracle.model, list[Step]()
    count, window = len(tokens), pair.oracle.window
    place = torch.tensor([[count - int(last)]])
    with torch.no_grad():
        made = model.model(tokens[None], use_cache=False, return_shared_kv_states=True)
        keys = {
            kind: tuple(t[:, :, -window:] if SLIDING in kind else t for t in both)
            for kind, both in made.shared_kv_states.items()
        }
        hidden, token = made.last_hidden_state[:, -1:], torch.tensor([[newest]])
        for _ in range(STEPS):
            row = torch.cat((model.model.embed_tokens(token), hidden), -1)
            step = pair.assistant(inputs_embeds=row, position_ids=place, shared_kv_states=keys)
            hidden, token = step.last_hidden_state, step.logits[0, 0].argmax()[None, None]
            out.append((int(token), hidden[0, 0], step.logits[0, 0]))
    return out


LENGTHS = (5, 23, 36)


@pytest.mark.covering
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", short("e2b", "12b", of=VARIANTS))
def test_every_step_is_the_assistants(built: Build, name: str, last: bool) -> None:
    """Rows of different lengths, past three windows, behind chunks that wrap the rings."""
    pair = pair_of(name)
    engine = built(pair)
    if last:
        spec: Any = engine.drafter
        last_spec = replace(spec, drafter=replace(spec.drafter, position="last"))
        engine = engine.configured(drafter=last_spec)
    tokens, session = pair.oracle.tokens[0], engine.session(len(LENGTHS))
    padded = torch.stack([tokens[: max(LENGTHS)]] * len(LENGTHS))
    session.prefill(padded, torch.tensor(LENGTHS))
    newest = {row: int(tokens[n]) for row, n in enumerate(LENGTHS)}
    drafts = session.draft(newest, dict.fromkeys(newest, STEPS))
    for row, n in enumerate(LENGTHS):
        want = theirs(pair, tokens[:n], newest[row], last)
        assert drafts[row] == [step[0] for step in want]
        values = engine.values(tokens[:n], ["draft.*", "logits"])
        want = theirs(pair, tokens[:n], int(values["logits"][0, -1].argmax()), last)
        assert values[TOKEN][0].tolist() == [step[0] for step in want]
        for i, (_, hidden, logits) in enumerate(want):
            ids = values["draft.ids"][0, i] if "draft.ids" in values else slice(None)
            assert relative(values[NEXT_HIDDEN][0, i], hidden) <= pair.oracle.budget
            assert relative(values["draft.logits"][0, i], logits[ids]) <= pair.oracle.budget


def prompts_of(pair: Pair) -> list[list[int]]:
    return [pair.oracle.tokens[i % 2, : LENGTHS[i]].tolist() for i in range(3)]


OPTIONS = CASES["drafted under options"] | {v: (v, {"backend": "torch"}) for v in VARIANTS}


@pytest.mark.parametrize("option", short("e2b", *[*OPTIONS][1:3], of=OPTIONS))
def test_text_is_that_of_single_steps(built: Build, option: str) -> None:
    """Greedy and drawn, rows of different lengths. Drafts would never be right, had they the keys
    of another layer kind or the state of another place. In caches of bytes the order of a sum may
    decide between two codes: their texts are shorter."""
    name, options = OPTIONS[option]
    engine, given = built(copying(name), **options), prompts_of(copying(name))
    count, ways = 48, ({}, {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 5})
    if "kv_dtype" in options:
        count, ways = 30, ways[:1]
    for how in ways:
        tally = AcceptanceStats()
        want = engine.generate(given, count, stop_ids=(), **how)
        assert engine.generate(given, count, stop_ids=(), draft="mtp", tally=tally, **how) == want
        assert tally.tokens == 3 * (count - 1) and (how or sum(tally.accepted.values()) > 0)


@pytest.mark.parametrize("backend", short("trt", of=("onnx", "trt")))
def test_a_network_of_the_drafter(
    built: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """In ONNX, and in its dialect for TensorRT: the same text of rows of different lengths, also of
    steps that are replayed."""
    pair = copying("e2b")
    with FLOWS[backend].using(tmp_path):
        engine, plain = built(pair, backend=backend), built(pair)
    given, tally = prompts_of(pair), AcceptanceStats()
    want = plain.generate(given, 30, stop_ids=())
    assert engine.generate(given, 30, stop_ids=(), draft="mtp", tally=tally) == want
    assert sum(tally.accepted.values()) > 0
    if backend == "trt":
        made = cast(Any, engine.runtime)
        for steps in (made, *made.extra_engines.values()):
            monkeypatch.setattr(steps, "record", fake.recording)
        monkeypatch.setattr(engine, "_idle", None)
        assert engine.generate(given, 30, stop_ids=(), draft="mtp") == want


def test_images_and_audio(tmp_path: Path) -> None:
    """Behind chunks whose tokens see each other, too."""
    options = {"backend": "reference", "random_weights": 4, "max_seq": 256, "drafter": "default"}
    engine = g4ir.build("tiny-unified", tmp_path / "e", audio_seconds=(1,), **options)
    ids = engine.spec.tokens
    assert ids.image is not None and ids.audio is not None
    given = [2, 9, ids.image, 14, 7, ids.audio, 21]
    media = {"images": [png(tmp_path / "a.png")], "audio": [wav(tmp_path / "a.wav")]}
    want, tally = engine.generate(given, 8, stop_ids=(), **media), AcceptanceStats()
    assert engine.generate(given, 8, stop_ids=(), draft="mtp", tally=tally, **media) == want
    assert tally.drafted


def drafted(session: Session, token: int) -> list[list[int]]:
    rows = range(session.batch)
    found = session.draft(dict.fromkeys(rows, token), dict.fromkeys(rows, 3))
    return [found[row] for row in rows]


def test_the_state_follows_the_row(built: Build) -> None:
    """Through prompts in pieces, steps, cuts, copies and snapshots; where it is not known, nothing
    is drafted."""
    pair = pair_of("e2b")
    engine, tokens = built(pair), pair.oracle.tokens[:, :30]
    session = engine.session(2)
    assert drafted(session, 5) == [[], []]
    session.prefill(tokens[:, :20])
    want = drafted(session, 5)
    assert all(len(row) == 3 for row in want) and drafted(session, 5) == want
    kept, other = session.snapshot(), engine.session(1)
    other.copy_row(session, 1, 0)
    assert drafted(other, 5) == want[1:]
    later = drafted_after(session, tokens)
    session.restore(kept)
    assert drafted(session, 5) == want
    session.truncate(19)  # a state that nobody kept
    assert drafted(session, 5) == [[], []]
    session.decode(tokens[:, 19])
    assert drafted(session, 5) == want
    assert drafted_after(session, tokens) == later
    session.reset([0])
    assert drafted(session, 5)[0] == []


def drafted_after(session: Session, tokens: torch.Tensor) -> list[list[int]]:
    """Drafts behind tokens 20 to 22, of which the last was verified and taken back."""
    session.verify(tokens[:, 20:24])
    session.truncate(23)
    want = drafted(session, 7)
    session.truncate(20)
    session.prefill(tokens[:, 20:23])
    assert drafted(session, 7) == want and all(want)
    return want


def test_specs() -> None:
    """Each belongs to the model of its name, survives being written, and has the published size."""
    for name in drafter_names():
        spec, model = load_spec(name), name.removesuffix(DRAFTER)
        check_pair(load_spec(model), spec)
        named = {"name": spec.name, "hub": spec.hub}
        assert diff_specs(replace(Spec.from_hf(spec.to_hf()), **named), spec) == []
        with pytest.raises(InputError, match="is a drafter"):
            g4ir.build_graph(spec)
        if published := CASES["published_drafters"].get(model):
            assert numel(text_tensors(spec) | media_tensors(spec, ())) == published


def test_build_refused(tmp_path: Path) -> None:
    model, drafter = pair_of("e2b").save(tmp_path)
    for words, options in CASES["drafters"].items():
        given = {"checkpoint": model, "drafter": drafter, "backend": "reference", **options}
        with pytest.raises(G4Error, match=words):
            g4ir.build(None, tmp_path / "out", **given)
        assert not (tmp_path / "out").exists()


def test_broken_checkpoint(tmp_path: Path) -> None:
    """It lacks a tensor, or has it changed."""
    from safetensors.torch import load_file, save_file

    model, drafter = pair_of("e2b").save(tmp_path)
    whole = load_file(file := drafter / "model.safetensors")
    for name, says in CASES["broken_drafters"].items():
        stored = next(n for n in whole if n.endswith(name))
        tensors = {n: t for n, t in whole.items() if n != stored}
        if name == "token_ordering":
            tensors[stored] = whole[stored].clone()
            tensors[stored][5] = tensors[stored][6]
        if name == "masked_embedding.token_ordering":
            tensors[stored] = whole[stored].float()
        save_file(tensors, file, {"format": "pt"})
        options = {"checkpoint": model, "drafter": drafter, "backend": "reference"}
        with pytest.raises(WeightsError, match=f"(?s){says}"):
            g4ir.build(None, tmp_path / "out", **options)


def test_each_pass_and_the_backend(tmp_path: Path) -> None:
    """A drafter's step is run after each pass too, and by the backend."""
    options = {"backend": "reference", "random_weights": 4, "max_seq": 64, "drafter": "default"}
    engine = reference_engine(g4ir.build("tiny-dense", tmp_path / "e", **options))
    weights = engine.runtime.params  # type: ignore[attr-defined]
    assert verify_each_pass(engine, [*range(5, 11)]).ok
    weights["draft.L1.mlp.w_down"] = weights["draft.L1.mlp.w_down"] + 0.1
    culprit = verify_each_pass(engine, [*range(5, 11)]).culprit
    assert culprit and culprit.first and culprit.first.value == "draft.L1.mlp.down"


def test_rounds_on_the_device(built: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and drawn, ragged rows, stop tokens, a budget that ends within a round: the tokens are
    those of single steps, and steps of each kind are recorded once for a batch."""
    run_uncompiled(monkeypatch)
    pair = copying("12b")
    settings = {"programs": "inductor"}
    engine, given = built(pair, backend="torch", settings=settings), prompts_of(pair)
    some = engine.generate(given, 24, stop_ids=())
    stops = tuple({some[0][7], some[2][13]})
    drawn = {"temperature": 0.9, "top_k": 40, "seed": 5}
    cases = [(24, (), {}), (23, stops, {}), (24, (), drawn), (1, (), {}), (2, (), {})]
    want = [engine.generate(given, n, stop_ids=s, **o) for n, s, o in cases]
    recorded = in_a_loop(engine, monkeypatch)
    tallies = [AcceptanceStats() for _ in cases]
    for (n, s, o), w, tally in zip(cases, want, tallies, strict=True):
        assert engine.generate(given, n, stop_ids=s, draft="mtp", tally=tally, **o) == w
        assert tally.tokens == sum(map(len, w)) - len(w)
    assert sum(tallies[0].accepted.values()) > 0
    assert 1 <= len(recorded) <= 6  # three kinds, two batches


def test_rounds_of_changing_batches(built: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request joins and another ends: rounds go on from the states that the device left."""
    pair = copying("12b")
    engine, given = built(pair, backend="torch"), prompts_of(pair)[:2]
    want = [engine.generate(p, 30, stop_ids=()) for p in given]
    recorded = in_a_loop(engine, monkeypatch)
    draft = SpeculativeConfig("mtp", 3)
    scheduler = Scheduler(engine, SchedulerConfig(draft=draft, draft_rows=1, patience=0))
    params = SamplingParams(ignore_eos=True)
    first = scheduler.submit(Request(tuple(given[0]), 30, params))
    while len(first.answers[0].tokens) < 6:
        scheduler.step()
    second = scheduler.submit(Request(tuple(given[1]), 30, params))
    while scheduler.busy:
        scheduler.step()
    assert recorded and [h.answers[0].tokens for h in (first, second)] == want
    assert sum(second.tally.accepted.values()) > 0


Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def made(make_engine: Make) -> Make:
    limits = {"max_seq": 96, "prefill_chunk": 16, "max_batch": 3, "draft_tokens": 8}
    return partial(make_engine, random_weights=3, dtype="float32", **limits)


def prompts(*lengths: int) -> list[list[int]]:
    return [some_tokens(1, n, n)[0].tolist() for n in lengths]


def test_stops_within_a_round(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of different lengths, past three windows, some of whose drafts are right."""
    engine, given, rng = made("tiny-ple", backend="torch"), prompts(9, 21), random.Random(1)
    monkeypatch.setattr(Engine, "chooses_on_device", False)
    how: dict[str, Any] = {"temperature": 0.6, "seed": 5, "top_p": 0.7}
    want = engine.generate(given, 40, stop_ids=(), **how)
    whole = [[*p, *w] for p, w in zip(given, want, strict=True)]

    def propose(text: NgramProposer, count: int) -> list[int]:
        right = whole[int(text._ids[0] != given[0][0])][text._count :][: rng.randint(0, count)]
        return [t if rng.random() < 0.7 else rng.randrange(3, 500) for t in right]

    monkeypatch.setattr(NgramProposer, "propose", propose)
    monkeypatch.setattr(speculative.Pace, "count", lambda *_: 4)
    tally = AcceptanceStats()
    options = {"draft": "ngram", "tally": tally, **how}
    assert engine.generate(given, 40, stop_ids=(), **options) == want
    assert tally.tokens == 2 * 39 and tally.rounds < 60
    stops = {want[0][7], want[1][12]}
    ends = [1 + next(i for i, t in enumerate(row) if t in stops) for row in want]
    got = engine.generate(given, 40, stop_ids=stops, **options)
    assert got == [row[:end] for row, end in zip(want, ends, strict=True)]


def test_rows_as_slots(made: Make) -> None:
    """Penalties, seeds, masks and ends are by row; drafts are off while many rows decode."""
    engine, every = made("tiny-moe", backend="torch"), prompts(7, 12, 18, 9, 25)
    ways: list[dict[str, Any]] = [{"logprobs": 2}, {"temperature": 0.7, "top_k": 5}]
    ways += [{"presence_penalty": 0.3}, {"temperature": 1.0, "top_k": 4}, {"ignore_eos": False}]
    params = [
        SamplingParams(seed=i, min_tokens=12, **{"ignore_eos": True, **w})
        for i, w in enumerate(ways)
    ]
    jobs = [Request(tuple(p * 2), 40, s) for p, s in zip(every, params, strict=True)]

    def texts(settings: SchedulerConfig) -> tuple[list[list[int]], Scheduler]:
        scheduler = Scheduler(engine, settings)
        handles, events = [scheduler.submit(job) for job in jobs], list[Event]()
        while scheduler.busy:
            events += scheduler.step()
        for t in handles:
            own = [e for e in events if e.handle is t]
            assert [e.token for e in own] == t.answers[0].tokens
            assert [bool(e.finish) for e in own] == [False] * (len(own) - 1) + [True]
        assert sum(e.logprobs is not None for e in events) == len(handles[0].answers[0].tokens)
        return [t.answers[0].tokens for t in handles], scheduler

    want, _ = texts(SchedulerConfig())
    got, scheduler = texts(SchedulerConfig(draft=SpeculativeConfig("ngram", 4), draft_rows=3))
    tally = scheduler.totals.tally
    assert got == want and tally.tokens > tally.rounds > 0
    off, scheduler = texts(SchedulerConfig(draft=SpeculativeConfig("ngram", 4), draft_rows=1))
    assert off == want and scheduler.totals.tally.rounds < tally.rounds


@pytest.mark.parametrize("variant", ["tiny-ple", "tiny-moe"])
def test_sessions_in_any_order_equal_full_recomputation(made: Make, variant: str) -> None:
    """Rounds too, beside what tests/contract/session.py does in any order."""
    engine = made(variant)
    acts = AnyOrder(engine, lambda text: engine.session(1).prefill(text[None])[0], 0)
    acts.run(60, ["verify"] * 5)


words = st.lists(st.integers(0, 3), min_size=1, max_size=60)


@given(words, st.integers(1, 12), st.integers(0, 59))
def test_lookup_finds_the_longest_match(ids: list[int], count: int, cut: int) -> None:
    """As a search through every earlier place does; pieces make no difference."""
    text = NgramProposer(ids[:cut])
    text.extend(ids[cut:])
    matches = []
    for end in range(len(ids) - 1):
        size = 0
        while size <= end and size < speculative.MAX_MATCH and ids[end - size] == ids[-1 - size]:
            size += 1
        matches.append((size, end))
    size, end = max(matches, default=(0, 0))
    behind = ids[end + 1 :]
    want = [behind[i % len(behind)] for i in range(count)] if size >= speculative.MIN_MATCH else []
    assert text.propose(count) == NgramProposer(ids).propose(count) == want


#: of steps that are not measured
COSTS = StepCosts().of(1, 9)


def paced(chance: float, costs: list[float], rounds: int = 400) -> tuple[float, list[int]]:
    """Steps of one token that a text takes, by each of its tokens, whose drafts are right with this
    chance; and the counts of drafts."""
    pace, rng, took, tokens, counts = speculative.Pace(8), random.Random(0), 0.0, 0, list[int]()
    for _ in range(rounds):
        counts.append(count := pace.count(costs))
        right = next((i for i in range(count) if rng.random() >= chance), count)
        pace.record(count, right, costs)
        took, tokens = took + costs[count], tokens + right + 1
    return took / tokens, counts[rounds // 2 :]


def test_pace_follows_what_is_right_and_what_steps_cost() -> None:
    """Wrong drafts cost next to nothing; right ones are as many as steps make cheap."""
    cheap, dear = [1 + 0.02 * i for i in range(9)], [1 + 0.6 * i for i in range(9)]
    assert paced(0, COSTS)[0] < 1.03 and paced(0, dear)[0] < 1.1
    assert {*paced(1, COSTS)[1]} == {*paced(1, dear)[1]} == {8}
    assert paced(0.2, cheap)[0] < 0.87 and paced(0.2, dear)[0] < 1.1
    steps = [1, 1.02, 1.04, 1.1, 2, 3, 4, 5, 6]
    took, counts = paced(0.8, steps)
    assert took < 0.5 and max(counts) == 3
    assert median(paced(0.8, cheap)[1]) > median(paced(0.5, cheap)[1]) >= 1


@given(
    st.lists(st.floats(0, 1.5), min_size=1, max_size=8),
    st.lists(st.integers(0, 8), max_size=200),
    st.integers(32, 400),
)
def test_drafts_never_make_a_text_slower(
    more: list[float], accepted: list[int], tokens: int
) -> None:
    """By more than 3 %, whatever is right and whatever the steps of this machine cost."""
    costs = [1 + x for x in itertools.accumulate(more, initial=0.0)]
    pace, took, made, told = speculative.Pace(len(more)), 0.0, 0, iter(accepted)
    while made < tokens:
        count = min(pace.count(costs), tokens - made - 1)
        right = min(next(told, 0), count)
        pace.record(count, right, costs)
        took, made = took + costs[count], made + right + 1
    assert took <= 1.03 * made


def test_costs_of_steps() -> None:
    """The median of the newest ones, by batch; what is not measured costs a little more."""
    costs = StepCosts()
    for batch, tokens, times in ((1, 1, (9, 2, 2)), (1, 3, (90, 3, 99, 3)), (1, 4, (5, 2.8))):
        for seconds in times:
            costs.add(batch, tokens, seconds)
    cost = speculative.COST
    assert costs.of(1, 6) == pytest.approx([1, 1 + cost, 1.4, 1.4, 1.4 + cost, 1.4 + 2 * cost])
    assert costs.of(2, 3) == pytest.approx([1, 1 + cost, 1 + 2 * cost])
    for _ in range(99):
        costs.add(1, 1, 1.4)
    assert costs.of(1, 3) == pytest.approx([1, 1 + cost, 2])


def test_drafts_that_seem_free_are_paused() -> None:
    """Steps were measured while the machine was slow, verification steps while it was fast."""
    costs = StepCosts()
    for tokens in (1, 2, 3, 9):
        for _ in range(2):
            costs.add(1, tokens, 1 / tokens)
    measured = costs.of(1, 9)
    assert measured == [1] + 8 * [1 + speculative.MIN_EXTRA]
    assert sum(count > 0 for count in paced(0, measured)[1]) < 20  # of 200 steps


#: what an answer of a server or of a conversation is made to say
SAID = "abcdef" * 5
TOLD = re.compile(r"; (\d\.\d\d) tokens per step; ended by")
#: a prompt that a random model repeats pieces of
PROMPT = "2,5,7,9,5,7,9,5,7,9"
GREEDY = ("--temperature", "0", "--max-new-tokens", "40")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine with a tokenizer of chats, that verifies 4 tokens."""
    return chat_engine(tmp_path_factory.mktemp("draft") / "engine", draft_tokens=4)


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured costs decide how many tokens are drafted: of a tiny model none, or any number."""
    monkeypatch.setattr(StepCosts, "add", lambda *_: None)
    monkeypatch.setattr(StepCosts, "is_measured", lambda *_: True)


@pytest.mark.usefixtures("unmeasured")
def test_run_tells_its_rounds(folder: Path) -> None:
    words = ("run", folder, "--tokens", PROMPT, *GREEDY)
    want, got = command(*words), command(*words, "--draft", "ngram")
    assert got.code == 0 and got.out == want.out
    told = TOLD.search(got.err)
    assert told and float(told[1]) > 1 and "tokens per step" not in want.err
    (told,) = counts(command(*words, "--json", "--draft", "ngram", "--draft-tokens", "2").err)
    drafts = told["drafts"]
    assert drafts["rounds"] < 39 and len(drafts["accepted"]) == 2
    assert drafts["tokens_per_round"] == pytest.approx(39 / drafts["rounds"], abs=1e-4)
    for off in ("--draft none", "--draft ngram --draft-tokens 0"):
        (told,) = counts(command(*words, "--json", *off.split()).err)
        assert "drafts" not in told


def counts(err: str) -> list[dict[str, Any]]:
    """What is told in JSON; a slow machine is told of the progress beside it."""
    return [json.loads(line) for line in err.splitlines() if line.startswith("{")]


@pytest.mark.usefixtures("unmeasured")
def test_usage_and_counts_of_a_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": len(SAID)}
    config = SchedulerConfig(draft=SpeculativeConfig("ngram"))
    with running(lambda: load_engine(folder), config=config) as served:
        eventually(lambda: served.server.service)
        served.dictate(monkeypatch, SAID)
        with served.client() as client:
            got = client.post("/v1/chat/completions", json=body).json()
            metrics = client.get("/metrics").text
    assert got["choices"][0]["message"]["content"] == SAID
    told = got["usage"]["completion_tokens_details"]
    right, wrong = told["accepted_prediction_tokens"], told["rejected_prediction_tokens"]
    assert right > len(SAID) / 3 and wrong >= 0

    def count(name: str) -> float:
        found = re.findall(rf"^g4ir_{name}_total(?:{{.*}})? (\S+)$", metrics, re.M)
        return sum(map(float, found))

    assert count("draft_accepted_tokens") == right
    assert count("draft_tokens") == right + wrong
    assert count("draft_round_tokens") == count("generation_tokens") - 1
    assert count("draft_rounds") == count("draft_round_tokens") - right
    assert 'g4ir_draft_tokens_total{position="1"}' in metrics


def test_drafts_that_an_engine_cannot_verify(made: Make) -> None:
    """More than it was built for, or those of a drafter that it has not."""
    few = made("tiny-ple")
    with pytest.raises(InputError, match="10 tokens; an engine of --draft-tokens 8 takes 9"):
        few.session(2).verify(some_tokens(2, 10))
    with pytest.raises(InputError, match="build it again with a larger --draft-tokens for more"):
        few.generate([2, 5, 7], 4, draft="ngram", draft_tokens=9)
    with pytest.raises(InputError, match=r"has no draft model; .* with --drafter"):
        few.generate([2, 5, 7], 4, draft="mtp")
    told = refused("run", few.path, "--tokens", "2,5", "--draft", "ngram", "--draft-tokens", "-1")
    assert "draft-tokens -1: expected 1 to 8, which this engine was built for" in told


#: as many as a ring of 8 slots and more
IDS = [*range(5, 26)]


@pytest.fixture(scope="module")
def checked(made: Make) -> Engine:
    return made("tiny-dense", max_seq=48, max_batch=1, draft_tokens=4)


def test_the_steps_are_verified_in_rounds(checked: Engine) -> None:
    report = verify_engine(checked)
    steps = [n for n in report.turns if n == 1]
    assert report.ok and len(report.rounds) == len(steps) > 8
    assert [p.at for p in report.rounds] == [p.at for p in report.positions][-len(steps) :]
    assert f"{len(steps)} of {len(steps)} within tolerance in verification steps" in report.text()
    told = command("verify", checked.path, "--tokens", "5,6,7,8,9,5,6,7", "--json")
    assert told.code == 0 and len(json.loads(told.out)["rounds"]) == 2


def test_each_pass_is_seen_in_rounds(checked: Engine) -> None:
    report = verify_each_pass(checked)
    assert report.ok and report.rounds == (5, 4), report.text()
    assert "also in verification steps of 5, 4" in report.text()
    assert report.to_dict()["rounds"] == (5, 4) and not report.media


def test_rounds_that_pass_an_engines_end(made: Make) -> None:
    engine = made("tiny-ple", all_logits=True, max_seq=32, max_batch=1, draft_tokens=31)
    report, stages = verify_engine(engine), verify_each_pass(engine)
    assert report.ok and report.rounds, report.text()
    assert stages.ok and max(stages.rounds) <= 32, stages.text()


def test_rounds_that_are_wrong(checked: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    turned(checked, VERIFY, monkeypatch)
    report = verify_engine(checked, tokens=IDS)
    assert not report.ok and not any(p.ok for p in report.rounds)
    assert all(p.ok for p in report.positions)
    assert "(rope_table)" in (report.first_difference or ""), "positions are those of another token"
    assert "0 of 7 within tolerance in" in report.text()
    culprit = verify_each_pass(checked, IDS).culprit
    assert culprit and culprit.name == BACKEND and culprit.first
    assert culprit.first.phase == VERIFY


def test_rings_of_less_slack_are_named(checked: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One slot less is enough for prompts and single steps."""
    break_pass(monkeypatch, "plan_cache", smaller_rings)
    culprit = verify_each_pass(checked).culprit
    assert culprit and culprit.name == "plan_cache" and culprit.first
    assert (culprit.first.phase, culprit.first.at) == (VERIFY, 17)
    assert "attention" in culprit.first.ops
