"""Benchmark requests, and their runners: an engine, the interpreter on its params, transformers on
its weights, or llama.cpp on its GGUF file.

A request is a prompt of `input_len` tokens after `context` tokens in the KV cache, then `output_len
- 1` decode steps: `output_len` output tokens. A decode step's input token is fixed too, not the one
that the model chose before, so that no request ends at end-of-sequence, all runners do the same
work, and a text cannot loop. All tokens are random, of a fixed seed, or taken from a text. A
transformers model runs in the same process, on as many threads as the engine, and computes the
logits of the last position only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from g4ir.chat.prompt import text_ids
from g4ir.chat.text_files import read_text
from g4ir.check.hf import HfSession, hf_model, hf_origin
from g4ir.check.reference import reference_engine
from g4ir.check.tokens import check_no_media, random_ids
from g4ir.engine.engine import Engine
from g4ir.errors import InputError
from g4ir.plan.engine_limits import Limits

DEFAULT_INPUT, DEFAULT_OUTPUT = 512, 64


@dataclass(frozen=True)
class Workload:
    """Exact token counts of each of a request's `batch` sequences: `context` in the KV cache before
    the prompt, `input_len` of the prompt, `output_len` of the output. `text`: path of a text file
    from which the tokens are taken; None: random tokens."""

    input_len: int
    output_len: int
    batch: int = 1
    context: int = 0
    text: str | None = None

    @property
    def max_len(self) -> int:
        """Tokens in the KV cache of a sequence after a request."""
        return self.context + self.input_len + self.output_len - 1


def plan_workload(
    limits: Sequence[Limits],
    input_len: int | None = None,
    output_len: int | None = None,
    batch: int = 1,
    context: int = 0,
    text: str | None = None,
) -> Workload:
    """Return a workload within every engine's limits. Lengths of None become 512 and 64, or less if
    the engines' max_seq is short. InputError names the sizes that do not fit, and the limit."""
    max_seq, max_batch = min(x.max_seq for x in limits), min(x.max_batch for x in limits)
    for flag, size, low, high, limit in (
        ("--context", context, 0, max_seq - 2, f"--max-seq {max_seq}"),
        ("--batch", batch, 1, max_batch, f"--max-batch {max_batch}"),
        ("--input-len", input_len, 1, max_seq, f"--max-seq {max_seq}"),
        ("--output-len", output_len, 2, max_seq, f"--max-seq {max_seq}"),
    ):
        if size is not None and not low <= size <= high:
            raise InputError(f"bench: {flag} {size}: expected {low} to {high} ({limit})")
    free = max_seq - context
    outputs = output_len or max(2, min(DEFAULT_OUTPUT, free // 4, free - (input_len or 1) + 1))
    inputs = input_len or max(1, min(DEFAULT_INPUT, free - outputs + 1))
    w = Workload(inputs, outputs, batch, context, text)
    if w.max_len > max_seq:
        lengths = f"--context {context}, --input-len {inputs} and --output-len {outputs}"
        limit = f"the engine was built with --max-seq {max_seq}"
        raise InputError(f"bench: {lengths} cache {w.max_len} tokens per sequence; {limit}")
    return w


def draw_tokens(w: Workload, engine: Engine) -> torch.Tensor:
    """Return i64[batch, max_len]: the context, the prompt, then the token of each decode step.
    InputError if the workload's text is too short or has a placeholder of media."""
    if w.text is None:
        return random_ids(engine, (w.batch, w.max_len))
    source = f"bench: --text {w.text}"
    ids = text_ids(engine.tokenizer(), ["".join(read_text(Path(w.text)))])[0]
    count = w.batch * w.max_len
    if len(ids) < count:
        raise InputError(f"{source}: {len(ids)} tokens; {count} are needed; give a longer text")
    check_no_media(engine, ids[:count], source)
    return torch.tensor(ids[:count]).view(w.batch, w.max_len)


def request_steps(w: Workload, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tokens of each step of a request: the prompt i64[batch, input_len], then those of
    the decode steps, i64[batch, 1]."""
    start = w.context + w.input_len
    yield tokens[:, w.context : start]
    yield from tokens[:, start : w.max_len].split(1, dim=1)


@dataclass(frozen=True)
class RequestTiming:
    """Times of one request in seconds: to the first token, and from each token to the next."""

    ttft: float
    itl: tuple[float, ...]

    @property
    def decode(self) -> float:
        """Seconds of all decode steps."""
        return math.fsum(self.itl)

    @property
    def e2e(self) -> float:
        return self.ttft + self.decode


Rounds = Sequence[Sequence[RequestTiming]]


class BenchRunner:
    """A batch of sequences of one engine or baseline, computed by `session`. role: its key in a
    report; label: its description; engine: None for a baseline; name: the engine's name in a
    report. first_request_s: seconds of its first request; peak_memory: peak bytes by kind until the
    end of that; rounds: request times of each round."""

    engine: Engine | None = None
    name: str | None = None
    first_request_s: float
    peak_memory: dict[str, int]

    def __init__(self, role: str, label: str, session: Any, device: str = "cpu") -> None:
        self.role, self.label, self.session, self.device = role, label, session, device
        self.rounds: list[list[RequestTiming]] = []
        self._context_tokens = torch.zeros(1, 0)

    def set_context(self, tokens: torch.Tensor) -> None:
        """Set the KV cache's contents to the tokens i64[B, n]; n may be 0."""
        self._context_tokens = tokens
        self.session.reset()
        if tokens.shape[1]:
            self.step(tokens)

    def rewind(self) -> None:
        """Reset the KV cache to the tokens of the last `set_context`."""
        self.set_context(self._context_tokens)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append tokens i64[B, n]; return the logits [B, vocab] after the last one, on the runner's
        device. They are valid until the next step."""
        return self.session.step(tokens)


class EngineRunner(BenchRunner):
    """A session of an engine; `rewind` restores a snapshot of the context."""

    def __init__(
        self, engine: Engine, batch: int, role: str = "engine", name: str | None = None
    ) -> None:
        facts = f"{engine.spec.name}, {engine.config.backend}, {engine.device}"
        super().__init__(role, f"{engine.path} ({facts})", engine.session(batch), engine.device)
        self.engine, self.name, self._snapshot = engine, name, self.session.snapshot()

    def set_context(self, tokens: torch.Tensor) -> None:
        super().set_context(tokens)
        self._snapshot = self.session.snapshot()

    def rewind(self) -> None:
        self.session.restore(self._snapshot)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        *_, logits = self.session.prefill_steps(tokens)
        assert logits is not None
        return logits


def reference_runner(engine: Engine, batch: int) -> EngineRunner:
    """Return a runner of the interpreter on the engine's text graphs and params."""
    return EngineRunner(reference_engine(engine, resident=True), batch, "reference")


#: transformers baseline -> label, cache class, whether decode steps are compiled
MODES = {
    "hf": ("eager, growing cache", "DynamicCache", False),
    "hf-static": ("eager, static cache", "StaticCache", False),
    "hf-compile": ("decode compiled, static cache", "StaticCache", True),
}


def hf_runner(model: Any, max_len: int, mode: str) -> BenchRunner:
    """Return a runner of a transformers model in a mode of MODES. A static cache has `max_len`
    tokens per sequence and no more, since its cost follows its size."""
    import transformers

    label, cache, compiled = MODES[mode]
    size = {"max_cache_len": max_len} if cache == "StaticCache" else {}
    # As in transformers' `generate`: decode steps are compiled, with CUDA graphs on a GPU; prompts
    # run eagerly, since each length would recompile.
    single = torch.compile(model.forward, mode="reduce-overhead") if compiled else None
    new_cache = partial(getattr(transformers, cache), config=model.config, **size)
    label, session = f"{transformers.__version__} {label}", HfSession(model, new_cache, single)
    return BenchRunner(mode, f"transformers {label}", session, model.device.type)


def peer_model(engine: Engine, checkpoint: str | Path | None = None) -> Any:
    """Return the transformers text model on the weights of `checkpoint` (default: the engine's
    checkpoint or seed), in the engine's dtype and on its device."""
    return hf_model(engine, hf_origin(engine, checkpoint, "bench --peer"), engine.device)
