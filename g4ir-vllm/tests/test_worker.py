"""vLLM's scheduler and sampler over the slots of an engine, in one process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import CHUNK, ROWS
from vllm import LLM, SamplingParams

from g4ir.builder.load import load_engine
from g4ir.engine.engine import Engine
from g4ir_vllm.prepare import prepare

FREE: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(engine_folder: Path) -> Iterator[Engine]:
    with load_engine(engine_folder) as e:
        yield e


@pytest.fixture(scope="module")
def folder(engine_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(engine_folder, tmp_path_factory.mktemp("worker") / "prepared")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    with pytest.MonkeyPatch.context() as patch:  # engine core in this process, to inspect it
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        return LLM(str(folder))


@pytest.fixture
def runner(llm: LLM) -> Iterator[Any]:
    """The worker's runner; checks that it has no requests after the test."""
    found = worker(llm).runner
    yield found
    settled(llm)
    assert not found.requests and not found.batch.sequences and not found.spoiled
    assert not worker(llm).states


def worker(llm: LLM) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker


def settled(llm: LLM) -> None:
    """Run the step in which the scheduler reports finished requests to the worker."""
    llm.llm_engine.engine_core.engine_core.step()


def steps(core: Any) -> Iterator[list[Any]]:
    """Yield the outputs of each step until no request is unfinished."""
    for _ in range(500):
        if not core.has_unfinished_requests():
            return
        yield core.step()
    raise AssertionError("it does not end")


def prompt(count: int, seed: int = 0) -> list[int]:
    made = torch.Generator().manual_seed(seed)
    return [2, *torch.randint(60, 480, (count - 1,), generator=made).tolist()]


def said(llm: LLM, prompts: Sequence[list[int]], params: Any) -> list[list[int]]:
    given = [{"prompt_token_ids": p} for p in prompts]
    outputs = llm.generate(given, params, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs]


def test_sixteen_requests_over_four_rows(llm: LLM, engine: Engine, runner: Any) -> None:
    """Prompts of many lengths: below, at and above a chunk and its multiples."""
    prompts = [prompt(n, n) for n in (1, 2, 5, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 300)]
    prompts += [prompt(7 + 13 * i, 100 + i) for i in range(8)]
    params = [SamplingParams(temperature=0, **FREE | {"max_tokens": 4 + i}) for i in range(16)]
    found = said(llm, prompts, params)
    want = [engine.generate(p, 4 + i, stop_ids=()) for i, p in enumerate(prompts)]
    assert found == want


SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "seed": 7},
    {"temperature": 1.5, "seed": 8, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.8, "seed": 9, "min_p": 0.05},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 1.0},
    {"temperature": 1.0, "seed": 3, "logit_bias": {70: 5.0, 71: -100.0}, "logprobs": 3},
    {"temperature": 0.0, "bad_words": None, "min_tokens": 5, "stop_token_ids": [90]},
)


def test_settings_alone_and_in_company(llm: LLM, runner: Any) -> None:
    params = [SamplingParams(**FREE | s) for s in SETTINGS]
    prompts = [prompt(10 + 17 * i, i) for i in range(len(params))]
    alone = [said(llm, [p], s)[0] for p, s in zip(prompts, params, strict=True)]
    assert said(llm, prompts, params) == alone
    assert said(llm, prompts[::-1], params[::-1]) == alone[::-1]


def test_what_is_known_of_a_prompt_is_not_computed_again(
    llm: LLM, engine: Engine, runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, params = prompt(5 * CHUNK, 40), SamplingParams(temperature=0, **FREE)
    second = [*first, *prompt(9, 41)]
    computed: list[int] = []
    run = type(runner.prefiller.session)._run

    def counted(self: Any, phase: str, tokens: Any, count: Any, *more: Any) -> Any:
        if self is runner.prefiller._session:
            computed.append(int(count[0]))
        return run(self, phase, tokens, count, *more)

    monkeypatch.setattr(type(runner.prefiller.session), "_run", counted)
    for tokens, most in ((first, len(first)), (second, 9), (second, 1)):
        computed.clear()
        assert said(llm, [tokens], params) == [engine.generate(tokens, 12, stop_ids=())]
        assert sum(computed) <= most
    computed.clear()
    said(llm, [second], SamplingParams(temperature=0, skip_reading_prefix_cache=True, **FREE))
    assert sum(computed) == len(second)


def test_a_prompt_is_computed_between_steps_of_others(
    llm: LLM, engine: Engine, runner: Any
) -> None:
    """While a prompt of many chunks is prefilled, each step decodes a token of the other sequence
    and computes at most two chunks; tokens equal those of single runs."""
    core, params = llm.llm_engine, SamplingParams(temperature=0, **FREE | {"max_tokens": 40})
    short, long = prompt(6, 1), prompt(9 * CHUNK, 2)
    core.add_request("short", {"prompt_token_ids": short}, params)
    for _ in range(3):
        core.step()
    core.add_request("long", {"prompt_token_ids": long}, SamplingParams(temperature=0, **FREE))
    texts: dict[str, list[int]] = {}
    grown, held = [], []
    for outputs in steps(core):
        for output in outputs:
            before = len(texts.get(output.request_id, ()))
            texts[output.request_id] = list(output.outputs[0].token_ids)
            if output.request_id == "short" and "long" not in texts:
                grown.append(len(texts["short"]) - before)
                held.append(runner.prefiller.num_computed)
    assert len(grown) >= 8 and set(grown[1:]) == {1}
    assert all(0 <= b - a <= 2 * CHUNK for a, b in itertools.pairwise(held))
    assert texts["short"] == engine.generate(short, 40, stop_ids=())
    assert texts["long"] == engine.generate(long, 12, stop_ids=())


def test_requests_that_are_aborted(llm: LLM, engine: Engine, runner: Any) -> None:
    """Sequences in decode, one in prefill, and one in the queue."""
    core, params = llm.llm_engine, SamplingParams(temperature=0, **FREE)
    names = []
    for i, count in enumerate((5, 5, 5, 400, 5)):
        given = {"prompt_token_ids": prompt(count, i)}
        names.append(core.add_request(f"r{i}", given, SamplingParams(temperature=0, max_tokens=50)))
    for _ in range(3):
        core.step()
    assert len(runner.batch.sequences) == ROWS - 1 and len(runner.requests) == ROWS
    core.abort_request([f"r{i}" for i in range(5)])
    assert not [*steps(core)]
    settled(llm)
    assert not runner.requests and not runner.batch.sequences
    tokens = prompt(400, 3)
    assert said(llm, [tokens], params) == [engine.generate(tokens, 12, stop_ids=())]


def test_running_requests_that_are_preempted(llm: LLM, engine: Engine, runner: Any) -> None:
    """Their slots are freed; prompt and generated tokens are prefilled again; decode goes on."""
    core = llm.llm_engine
    params = SamplingParams(temperature=0, **FREE | {"max_tokens": 20})
    for i in range(3):
        core.add_request(f"p{i}", {"prompt_token_ids": prompt(30, i)}, params)
    for _ in range(6):
        core.step()
    assert core.reset_prefix_cache(reset_running_requests=True)
    core.step()
    again = [r for r in runner.requests.values() if len(r.tokens) > 30]
    assert again and len(runner.batch.sequences) < 3
    texts = {}
    for outputs in steps(core):
        for output in outputs:
            texts[output.request_id] = list(output.outputs[0].token_ids)
    assert texts == {f"p{i}": engine.generate(prompt(30, i), 20, stop_ids=()) for i in range(3)}


def test_steps_that_leave_rows_out(
    llm: LLM, engine: Engine, runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences that a step does not schedule keep their state, and go on in a later step."""
    core, given = llm.llm_engine, {"presence_penalty": 0.5, "max_tokens": 20}
    params = SamplingParams(temperature=0, **FREE | given)
    prompts = {f"w{i}": prompt(4 + i, i) for i in range(ROWS)}
    want = {name: said(llm, [p], params)[0] for name, p in prompts.items()}
    for name, p in prompts.items():
        streamed = SamplingParams(temperature=0, **FREE | given)
        core.add_request(name, {"prompt_token_ids": p}, streamed)
    texts: dict[str, list[int]] = {}
    for step, outputs in enumerate(steps(core)):
        for output in outputs:
            texts[output.request_id] = list(output.outputs[0].token_ids)
        if step == 4:
            scheduler = core.engine_core.engine_core.scheduler
            monkeypatch.setattr(scheduler, "max_num_scheduled_tokens", 2)
        if step == 7:
            lengths = {len(t) for t in texts.values()}
            assert len(texts) == ROWS and len(lengths) > 1
    assert texts == want


def test_ids_that_are_never_drawn(
    llm: LLM, engine: Engine, runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Suppressed ids are never sampled; log-probabilities are those before suppression."""
    (never,) = worker(llm).batch.logitsprocs.non_argmax_invariant[-1:]
    (first,) = said(llm, [prompt(8)], SamplingParams(temperature=0, **FREE | {"max_tokens": 1}))
    monkeypatch.setattr(never, "ids", torch.tensor(first))
    params = SamplingParams(temperature=0, logprobs=1, **FREE | {"max_tokens": 1})
    (got,) = llm.generate([{"prompt_token_ids": prompt(8)}], params, use_tqdm=False)
    assert list(got.outputs[0].token_ids) != first
    assert {first[0], got.outputs[0].token_ids[0]} <= {*got.outputs[0].logprobs[0]}


@pytest.mark.parametrize(
    "given, words",
    [
        ({"enable_lora": True}, "LoRA"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative"),
        ({"runner": "pooling"}, "pooling"),
        ({"enable_prompt_embeds": True}, "embeddings"),
        ({"additional_config": {"prefix_byte": 1}}, "prefix_byte"),
        ({"additional_config": {"patience": -1}}, "patience"),
    ],
)
def test_what_is_refused_at_the_start(folder: Path, given: dict[str, Any], words: str) -> None:
    from vllm.engine.arg_utils import EngineArgs

    with pytest.raises(ValueError, match=words):
        EngineArgs(str(folder), **given).create_engine_config()


def test_the_limits_of_the_engine(folder: Path) -> None:
    """Larger limits of vLLM are reduced to the engine's; smaller ones are kept."""
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(str(folder)).create_engine_config().scheduler_config
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (ROWS, ROWS + CHUNK)
    config = EngineArgs(str(folder), max_num_seqs=2, max_model_len=32).create_engine_config()
    assert config.scheduler_config.max_num_batched_tokens == 2 + 32
    assert config.cache_config.num_gpu_blocks_override == 3
