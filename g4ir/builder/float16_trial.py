"""Runs a short text through a float16 engine's graphs before they are compiled.

Weights that fit float16 can make values that do not: the residual stream of trained models may
exceed 65504, and what follows is NaN.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

from g4ir.backends.base import Prepared
from g4ir.backends.reference import ReferenceRuntime, WideRuntime, text_graphs
from g4ir.engine.engine import TOKENIZER, read_tokenizer
from g4ir.engine.parts import embed_rows
from g4ir.errors import WeightsError
from g4ir.ir.graph import Program
from g4ir.ir.names import layer_of
from g4ir.model.text import build_graph
from g4ir.ops.finite import TOO_LARGE, advice
from g4ir.ops.kv_quant import comparable
from g4ir.passes.scale_residual import DIVISORS, ScaleOptions, divided_values
from g4ir.quant.rewrite import quantised
from g4ir.weights.checkpoint import Checkpoint
from g4ir.weights.pack import ParamSource, open_table
from g4ir.weights.random import WithDrafter

TEXT = (
    "The quick brown fox jumps over the lazy dog. def area(r): return 3.14159 * r ** 2\n"
    "Die Donau fließt nach Osten; 2024 年に東京で。 <b>Total:</b> $1,299.00"
)
MOST_TOKENS = 48
MOST = 65504.0
#: a peak above this share of MOST is reported
NEAR = 0.5

log = logging.getLogger(__name__)


def why_untried(p: Prepared) -> str | None:
    """Return why no text can be tried on a float16 build; None if one can, or for other dtypes."""
    if p.dtype != "f16":
        return None
    source = p.source.model if isinstance(p.source, WithDrafter) else p.source
    if not isinstance(source, Checkpoint):
        return "the weights are random"
    if p.ranks > 1:
        return "several ranks share the model"
    return None if TOKENIZER in p.side_files else "the checkpoint has no tokenizer.json"


def try_float16(p: Prepared, params: ParamSource) -> None:
    """Interpret the text graphs on a few dozen tokens of text. WeightsError names the first value
    that is NaN or infinite, and a residual scale that would do; a peak near the end of the range is
    logged as a warning."""
    try:
        peaks = _peaks(p, params, ReferenceRuntime, MOST)
    except WeightsError as e:
        raise WeightsError(
            f"{e}{_scale_for(p, _peaks(p, params, WideRuntime, math.inf))}"
        ) from None
    name, peak = max(peaks.items(), key=lambda x: x[1])
    if peak > NEAR * MOST:
        what = (
            "float16: %%%s reaches %.0f on a text of %d tokens, and %s; other texts may exceed it"
        )
        given = name, peak, MOST_TOKENS, TOO_LARGE, _scale_for(p, peaks)
        log.warning(f"{what}: build with --dtype bfloat16%s", *given)


def _peaks(
    p: Prepared, params: ParamSource, interpreter: type[ReferenceRuntime], most: float
) -> dict[str, float]:
    """Return the peak of each value of a prefill; WeightsError for one above `most`."""
    import torch

    runtime = interpreter(text_graphs(p.packing.program), p.limits, "cpu", params)
    embed, state = runtime.program.graphs["embed"], runtime.new_state(1)
    peaks: dict[str, float] = {}
    tiled = {v.name for n in embed.find("embedding_tiles") for v in n.inputs}
    tables = {
        v.name: params.tensor(v.name) if v.name in tiled else open_table(params, v, "mmap", "cpu")
        for v in embed.params
    }

    def look(name: str, value: Any) -> None:
        if not value.is_floating_point():
            return
        largest = float(comparable(value).abs().max())
        if not largest <= most:
            layer = layer_of(name)
            where = "outside the layers" if layer is None else f"layer {layer}"
            raise WeightsError(
                f"float16, tried on a text of {MOST_TOKENS} tokens: %{name} ({where}): NaN or "
                f"infinite; {advice('f16')}"
            )
        peaks[name] = max(peaks.get(name, 0.0), largest)

    start = 0
    for tokens in torch.tensor([_tokens(p)]).split(p.limits.prefill_chunk, dim=1):
        end = start + tokens.shape[1]
        feeds = embed_rows(embed, tables, tokens)
        feeds |= {"positions": torch.arange(start, end)[None]}
        feeds |= {"lengths": torch.tensor([end - start])}
        phase = "decode" if end - start == 1 else "prefill"
        runtime.run(phase, feeds, state, end, True, look)
        start = end
    return peaks


def _tokens(p: Prepared) -> list[int]:
    tokenizer = read_tokenizer(Path(TOKENIZER), p.side_files[TOKENIZER])
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    bos = [] if p.spec.tokens.bos is None else [p.spec.tokens.bos]
    known = [i for i in (*bos, *ids) if i < p.spec.text.readable_ids]
    return known[: min(MOST_TOKENS, p.limits.max_seq)]


def _scale_for(p: Prepared, peaks: dict[str, float]) -> str:
    """Return the advice of the smallest residual scale that keeps the stream, whose peaks are those
    in float64, below half of the range; "" if other values leave the range too."""
    plain = Program({"prefill": build_graph(p.spec, "prefill", dtype=p.dtype)})
    graph = quantised(plain, p.spec, p.recipe, p.dtype).graphs["prefill"]
    divided, now = divided_values(graph), p.options.of(ScaleOptions).divisor
    inside = {True: 0.0, False: 0.0}
    for name, peak in peaks.items():
        key = name.removesuffix(".last") in divided
        inside[key] = max(inside[key], peak)
    rest, stream = inside[False], now * inside[True]
    enough = (n for n in DIVISORS if n > now and stream <= n * NEAR * MOST)
    found = next(enough, None) if rest <= MOST else None
    told = f", or --residual-scale {found}: the residual stream reaches {stream:.0f}"
    return told if found else ""
