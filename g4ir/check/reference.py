"""Interpreters of an engine's graphs on its params or its original weights, and checks that float64
fits in free memory."""

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
from g4ir.ir.interpret import Run
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


def reference_engine(engine: Engine, resident: bool = False, run: Run | None = None) -> Engine:
    """Return an engine that interprets the same text graphs, without towers. It reads the params
    from the engine's files, or computes them from the linked checkpoint or the seed; with
    `resident` it uses the tensors that the engine's runtime has in memory. `run`: callback that
    executes a node (ignored with several ranks)."""
    return replace(engine, runtime=interpreted(engine, "resident" if resident else "stored", run))


def with_run(engine: Engine, run: Callable[..., Tensors | None]) -> Engine:
    """Return the engine with `run` (GraphRun, state -> outputs) in place of the function that runs
    its text graphs."""
    inner = engine.runtime
    runtime: Any = SimpleNamespace(run=run, new_state=inner.new_state, embed=inner.embed)
    return replace(engine, runtime=runtime)


def float64_engine(engine: Engine, run: Run | None = None) -> Engine:
    """Return an engine that interprets the text graphs in float64, on params of the engine."""
    return replace(engine, runtime=interpreted(engine, "float64", run))


def plain_packing(engine: Engine) -> Packing:
    """Return the text graphs of an engine's model without quantisation, and their weight
    prologue."""
    options = engine.config.options.changed(NarrowOptions()).changed(ActivationOptions())
    plain = replace(engine.config, options=options, quant=None, ranks=1, ep=False)
    packing = plain.packing(find_backend(plain.backend))
    return Packing(text_graphs(packing.program), packing.prologue)


def plain_engine(engine: Engine, params: MadeParams) -> Engine:
    """Return an engine that interprets the text graphs of a `plain_packing` on its `params`."""
    program, device = params.packing.program, engine.device
    runtime = ReferenceRuntime(program, engine.limits, device, params)
    embedded = program.graphs["embed"].params
    tables = {v.name: open_table(params, v, DEFAULT_PLACEMENT, device) for v in embedded}
    plain = engine.configured(quant=None)
    return replace(plain, program=program, runtime=runtime, tables=tables)


def original_weights(engine: Engine, checkpoint: str | Path | None) -> Checkpoint | None:
    """Return the weights that an engine was built from: those of `checkpoint`, else those that the
    engine links to, else those of its seed; None if none of these is known."""
    if checkpoint is not None:
        return open_weights(engine, find_origin(checkpoint), engine.media.kinds)
    source = engine.runtime.source
    if isinstance(source, MadeParams):
        return source.source
    seed = engine.facts.seed
    if seed is None:
        return None
    return random_weights(engine.spec, seed, torch_dtype(engine.dtype), drafter=engine.drafter)


def acting(engine: Engine) -> PassOptions:
    """Return the options of the passes that ran on an engine's graphs."""
    skipped, options = engine.config.skip, engine.config.options
    kinds = {type(OPTIONS[name]) for name in skipped if name in OPTIONS}
    return replace(options, records=tuple(r for r in options.records if type(r) not in kinds))


def coarse(engine: Engine) -> tuple[str, ...]:
    """Return the formats that KV cache and activations of an engine are rounded to."""
    formats = acting(engine).of(NarrowOptions).to, acting(engine).of(ActivationOptions).to
    return tuple(to for to in formats if to != OFF)


@contextmanager
def unquantised(
    engine: Engine, checkpoint: str | Path | None, dequantise: bool = False
) -> Iterator[Engine | str]:
    """Yield an engine that interprets the text graphs without quantisation, on the original weights
    (see `original_weights`), or the reason why there is none. dequantise: if the original weights
    are quantised, use their dequantised values."""
    if engine.config.quant is None and not coarse(engine):
        yield "nothing is quantised"
        return
    source = original_weights(engine, checkpoint)
    try:
        if source is None or (source.forms and not dequantise):
            plain = "" if dequantise else ", not quantised"
            yield f"give --checkpoint DIR with the original weights{plain}"
            return
        source = source.dequantised()
        packing = plain_packing(engine)
        needed = sum(v.type.nbytes() for v in packing.program.params().values())
        text = "the original weights take {} in addition to what is loaded"
        short = refusal(text, needed, engine.device, param_bytes(engine))
        yield short or plain_engine(engine, MadeParams(packing, source))
    finally:
        if source and checkpoint is not None:
            source.close()


def param_bytes(engine: Engine) -> int:
    """Return the bytes of an engine's params, as stored."""
    return sum(v.type.nbytes() for v in engine.program.params().values())


def refusal(text: str, needed: int, device: str, used: int) -> str | None:
    """Return why `needed` bytes do not fit on a device of which `used` bytes are in use, or None;
    `text`: beginning of the message, with {} for the needed size."""
    free = max(device_memory(device) - used, 0)
    if needed <= free:
        return None
    return text.format(size_text(needed)) + f", and {size_text(free)} are free"


def float64_refusal(engine: Engine, tokens: int, rows: int, device: str) -> str | None:
    """Return why a forward pass in float64 over `tokens` tokens and `rows` rows of logits does not
    fit on a device in addition to the weights of engine and reference, or None. The bytes are
    estimated from the spec, before a reference is loaded."""
    types = cache_types(engine.program, 1, engine.limits.max_seq).values()
    caches = sum(t.numel() * (8 if t.dtype in FLOATS else ITEMSIZE[t.dtype]) for t in types)
    needed = float64_bytes(engine.spec, tokens, rows) + caches
    text = "float64 takes {} in addition to the weights"
    return refusal(text, needed, device, 2 * param_bytes(engine))


def float64_bytes(spec: Spec, tokens: int, rows: int) -> int:
    """Return the bytes of a forward pass in float64 without a cache: one block of a weight, scores
    of one layer (raw, masked, weights, and those rounded), a layer's activations, every layer's
    output, and three copies of the logits."""
    text = spec.text
    widest = max(2 * text.intermediate_size * 2, text.hidden_size)
    scores = 4 * text.num_attention_heads * tokens * tokens
    activations = tokens * (3 * widest + (text.num_hidden_layers + 8) * text.hidden_size)
    return 8 * (BLOCK + scores + activations + 3 * rows * text.vocab_size)
