"""Engines that run the interpreter on an engine's own params, the weights it was built from, and
whether a computation fits in the memory that loaded weights leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from g4ir.backends import find_backend
from g4ir.backends.base import Tensors
from g4ir.backends.reference import ReferenceRuntime, text_graphs
from g4ir.builder.load import open_weights
from g4ir.engine.engine import Engine
from g4ir.engine.ranks import interpreted
from g4ir.ir.wide import BLOCK
from g4ir.ops.types import FLOATS, ITEMSIZE, torch_dtype
from g4ir.passes import OPTIONS, PassOptions
from g4ir.passes.match import OFF
from g4ir.passes.narrow_kv import NarrowOptions
from g4ir.passes.quantize_activations import ActivationOptions
from g4ir.plan.fit import device_memory
from g4ir.plan.formats import cache_types
from g4ir.spec.record import Spec
from g4ir.ui.units import size_text
from g4ir.weights.checkpoint import Checkpoint
from g4ir.weights.origin import find_origin
from g4ir.weights.pack import DEFAULT_PLACEMENT, MadeParams, Packing, open_table
from g4ir.weights.random import random_weights


def reference_engine(engine: Engine, held: bool = False) -> Engine:
    """Return an engine that interprets the same text graphs; it holds no towers. Its params are
    made from the engine's source, or `held`: those that the engine holds."""
    return replace(engine, runtime=interpreted(engine, "held" if held else "made"))


def with_run(engine: Engine, run: Callable[..., Tensors | None]) -> Engine:
    """Return the same engine, whose graphs of text are run by `run`."""
    own = engine.runtime
    runtime: Any = SimpleNamespace(run=run, new_state=own.new_state, embed=own.embed)
    return replace(engine, runtime=runtime)


def wide_engine(engine: Engine) -> Engine:
    """Return an engine that interprets the text graphs in float64, on params of the engine."""
    return replace(engine, runtime=interpreted(engine, "wide"))


def plain_packing(engine: Engine) -> Packing:
    """Return the text graphs of an engine without any quantisation, and what makes their params."""
    options = engine.config.options.changed(NarrowOptions()).changed(ActivationOptions())
    plain = replace(engine.config, options=options, quant=None, ranks=1, ep=False)
    made = plain.packing(find_backend(plain.backend))
    return Packing(text_graphs(made.program), made.prologue)


def plain_engine(engine: Engine, params: MadeParams) -> Engine:
    """Return an engine that interprets the text graphs of `params`, those of `plain_packing`."""
    program, device = params.packing.program, engine.device
    runtime = ReferenceRuntime(program, engine.limits, device, params)
    tables = {
        v.name: open_table(params, v, DEFAULT_PLACEMENT, device)
        for v in program.graphs["embed"].params
    }
    plain = engine.configured(quant=None)
    return replace(plain, program=program, runtime=runtime, tables=tables)


def original_weights(engine: Engine, checkpoint: str | Path | None) -> Checkpoint | None:
    """Return the weights that an engine was built from: those of `checkpoint`, else the engine's
    own source, else those of its seed; None if nothing says what they were."""
    if checkpoint is not None:
        return open_weights(engine, find_origin(checkpoint), engine.media.kinds)
    held = engine.runtime.source
    if isinstance(held, MadeParams):
        return held.source
    seed = engine.facts.seed
    if seed is None:
        return None
    return random_weights(engine.spec, seed, torch_dtype(engine.dtype), drafter=engine.drafter)


def acting(engine: Engine) -> PassOptions:
    """Return the options of the passes that made an engine's graphs."""
    skipped, options = engine.config.skip, engine.config.options
    kinds = {type(OPTIONS[name]) for name in skipped if name in OPTIONS}
    return replace(options, records=tuple(r for r in options.records if type(r) not in kinds))


def coarse(engine: Engine) -> tuple[str, ...]:
    """Return the formats that KV cache and activations of an engine are rounded to."""
    found = acting(engine).of(NarrowOptions).to, acting(engine).of(ActivationOptions).to
    return tuple(to for to in found if to != OFF)


def is_quantised(engine: Engine) -> bool:
    """Whether weights, KV cache or activations are."""
    return engine.config.quant is not None or bool(coarse(engine))


@contextmanager
def unquantised(
    engine: Engine, checkpoint: str | Path | None, taken: int
) -> Iterator[Engine | str]:
    """A context with an engine that interprets the text graphs without any quantisation, on the
    weights as they were; or the reason why there is none. They come from `checkpoint`, else from
    where the engine makes its own. `taken`: bytes of the device that others hold."""
    source = original_weights(engine, checkpoint)
    if source is None:
        yield "give --checkpoint DIR, the weights that it was made of"
        return
    try:
        if source.forms:
            yield "the checkpoint holds codes, and not what they were made of"
            return
        packing = plain_packing(engine)
        need = sum(v.type.nbytes() for v in packing.program.params().values())
        said = "the weights as they were take {} beside what is loaded"
        yield refusal(said, need, engine.device, taken) or plain_engine(
            engine, MadeParams(packing, source)
        )
    finally:
        if checkpoint is not None:
            source.close()


def param_bytes(engine: Engine) -> int:
    """Return the bytes of an engine's params, as stored."""
    return sum(v.type.nbytes() for v in engine.program.params().values())


def refusal(what: str, needed: int, device: str, held: int) -> str | None:
    """Return why `needed` bytes have no room on a device of which `held` are taken, or None."""
    free = max(device_memory(device) - held, 0)
    if needed <= free:
        return None
    return what.format(size_text(needed)) + f", and {size_text(free)} are free"


def float64_refusal(engine: Engine, tokens: int, rows: int, device: str) -> str | None:
    """Return why a pass in float64 over so many tokens, with so many rows of logits, has no room on
    a device beside the weights of engine and peer, or None. It counts sizes that are known before a
    peer is loaded."""
    types = cache_types(engine.program, 1, engine.limits.max_seq).values()
    caches = sum(t.numel() * (8 if t.dtype in FLOATS else ITEMSIZE[t.dtype]) for t in types)
    needed = wide_bytes(engine.spec, tokens, rows) + caches
    held = 2 * param_bytes(engine)
    return refusal("float64 takes {} beside the weights", needed, device, held)


def wide_bytes(spec: Spec, tokens: int, rows: int) -> int:
    """Bytes of a pass in float64 without a cache: one block of a weight, scores of one layer (raw,
    masked, weights, and those rounded), a layer's activations, and every layer's output."""
    text = spec.text
    widest = max(2 * text.intermediate_size * 2, text.hidden_size)
    scores = 4 * text.num_attention_heads * tokens * tokens
    activations = tokens * (3 * widest + (text.num_hidden_layers + 8) * text.hidden_size)
    return 8 * (BLOCK + scores + activations + 3 * rows * text.vocab_size)
