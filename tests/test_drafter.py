"""Draft models beside transformers' assistants: every step, and the text of all rounds; what
drafting is expected to gain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import g4ir
from g4ir.backends.sampling import SamplingParams
from g4ir.check.passes import verify_each_pass
from g4ir.check.reference import reference_engine
from g4ir.engine.engine import Engine
from g4ir.engine.requests import Request
from g4ir.engine.scheduler import Scheduler, SchedulerConfig
from g4ir.engine.session import Session
from g4ir.engine.speculative import AcceptanceStats, SpeculativeConfig
from g4ir.errors import G4Error, InputError, WeightsError
from g4ir.model.draft import NEXT_HIDDEN, TOKEN, check_pair
from g4ir.model.tensors import media_tensors, numel, text_tensors
from g4ir.spec.parts import SLIDING
from g4ir.spec.record import DRAFTER, Spec, diff_specs, drafter_names, load_spec
from tests.configs import VARIANTS, short
from tests.contract.flows import FLOWS, in_a_loop
from tests.engines import CASES
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
from tests.shrink import shrink, shrink_drafter
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
