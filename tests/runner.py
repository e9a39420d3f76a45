"""A session over graphs that the interpreter runs, with the interface of `engine.session`.

Tests of numerics ask for `open_session` only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from g4ir import Engine, Spec, build_program, empty_state, interpret
from g4ir.ir.graph import Program, Value
from g4ir.ir.rewrite import split_prologue
from g4ir.passes import PassOptions, run_program
from g4ir.passes.latent_kv import LatentOptions
from g4ir.passes.narrow_kv import NarrowOptions
from g4ir.quant.recipe import find_quant_config
from g4ir.quant.rewrite import quantise
from tests.oracle import Oracle, graph_params, pieces

DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float64: "f32"}
Watch = Callable[[Value, Any], None]


def open_session(
    oracle: Oracle,
    batch: int,
    chunk: int,
    all_logits: bool = False,
    skip: Iterable[str] = (),
    max_seq: int = 128,
    latent_kv: str = "off",
) -> Session:
    """A session on the oracle's weights, prefilling in chunks of at most `chunk` tokens."""
    dtype = DTYPES[oracle.dtype]
    program = built_program(oracle.spec, all_logits, tuple(skip), dtype, latent_kv)
    return Session(program, oracle.tensors, batch, chunk, max_seq, all_logits)


def with_chunk(engine: Engine, size: int) -> Engine:
    """The same engine, prefilling in chunks of at most `size` tokens."""
    assert size <= engine.limits.prefill_chunk
    return engine.configured(limits=replace(engine.limits, prefill_chunk=size))


_PROGRAMS: dict[Any, Program] = {}


def built_program(
    spec: Spec,
    all_logits: bool = False,
    skip: tuple[str, ...] = (),
    dtype: str | None = None,
    latent_kv: str = "off",
    quant: str = "",
    narrow_kv: str = "off",
) -> Program:
    """The graphs after the passes, kept for the next test."""
    key = (spec, all_logits, skip, dtype, latent_kv, quant, narrow_kv)
    if key not in _PROGRAMS:
        options = PassOptions((LatentOptions(latent_kv), NarrowOptions(narrow_kv)))
        plain = build_program(spec, all_logits, dtype)
        plain = quantise(plain, spec, find_quant_config(quant or None), dtype or spec.dtype)
        _PROGRAMS[key] = run_program(plain, skip=skip, options=options)
    return _PROGRAMS[key]


@dataclass
class Session:
    """See `open_session`: prompts in chunks, then single tokens. `length` i64[batch] is the number
    of tokens that each row holds."""

    program: Program
    tensors: Mapping[str, torch.Tensor]
    batch: int
    chunk: int
    max_seq: int
    all_logits: bool
    watch: Watch | None = None

    def __post_init__(self) -> None:
        graphs = {name: split_prologue(g) for name, g in self.program.graphs.items()}
        self.graphs = {name: main for name, (_, main) in graphs.items()}
        self.params: dict[str, dict[str, Any]] = {}
        for name, (prologue, main) in graphs.items():
            given = graph_params(self.program.graphs[name], self.tensors)
            packed, _ = interpret(prologue, {}, given, {})
            self.params[name] = {v.name: {**given, **packed}[v.name] for v in main.params}
        dims = {"B": self.batch, "C": self.max_seq}
        dtype = self.tensors["model.embed_tokens.weight"].dtype
        wider = dtype if dtype == torch.float64 else None  # than the graph declares
        self.state = empty_state(self.program.graphs["prefill"], dims, wider)
        self.length = torch.zeros(self.batch, dtype=torch.int64)

    def prefill(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor | None = None,
        all_logits: bool | None = None,
    ) -> torch.Tensor:
        """[B, vocab] at each row's last token, or [B, S, vocab] in an all-logits program."""
        assert all_logits in (None, self.all_logits)
        if lengths is None:
            lengths = torch.full((self.batch,), tokens.shape[1])
        outs, last = [], None
        for start, end in pieces(tokens.shape[1], self.chunk):
            valid = (lengths - start).clamp(0, end - start)
            outs.append(self._run("prefill", tokens[:, start:end], valid))
            ends = (valid > 0)[:, None]  # a later chunk replaces the row's logits
            last = outs[-1][:, -1] if last is None else torch.where(ends, outs[-1][:, -1], last)
        assert last is not None
        return torch.cat(outs, 1) if self.all_logits else last

    def decode(self, tokens: torch.Tensor, active: torch.Tensor | None = None) -> torch.Tensor:
        """i64[B] -> [B, vocab]; rows where `active` is False are left untouched."""
        valid = torch.ones_like(tokens) if active is None else active.to(torch.int64)
        return self._run("decode", tokens[:, None], valid)[:, -1]

    def _run(self, phase: str, tokens: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        embeds, _ = interpret(self.graphs["embed"], {"tokens": tokens}, self.params["embed"], {})
        positions = self.length[:, None] + torch.arange(tokens.shape[1])
        inputs = {**embeds, "positions": positions, "lengths": valid}
        given = (inputs, self.params[phase], self.state, self.watch)
        outs, self.state = interpret(self.graphs[phase], *given)
        self.length = self.length + valid
        return outs["logits"]


def prefill_then_decode(session: Any, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
    """Return logits at every position: `prompt` tokens prefilled, the rest decoded."""
    outs = [session.prefill(tokens[:, :prompt], all_logits=True)]
    outs += [session.decode(column)[:, None] for column in tokens[:, prompt:].unbind(1)]
    return torch.cat(outs, 1)
