"""A build up to TensorRT's builder, on any machine.

First the variant in small (spec/shrink.py), in fp32: its networks are computed by onnxruntime
(execute.py), prefill in chunks and decode, its towers, and a step of its drafter, and compared with
the interpreter. Then the networks at full size, without weights; what TensorRT-RTX makes of the
text model's, where it is installed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from g4ir.backends.onnx_graph.backend import require
from g4ir.backends.primitives.graph import MEDIA, tower_graphs
from g4ir.backends.primitives.network import BLOCK_IDS, NO_BLOCK
from g4ir.backends.reference import ReferenceRuntime, WideRuntime
from g4ir.errors import CheckError, InputError
from g4ir.ir.distance import rounding_room, row_errors
from g4ir.ir.graph import Program
from g4ir.ir.interpret import interpret
from g4ir.model.decoder import HIDDEN, VERIFY
from g4ir.model.draft import DRAFT, NEXT_HIDDEN, layers_read
from g4ir.model.media import AUDIO, find_media
from g4ir.model.text import build_program
from g4ir.passes.latent_kv import LatentOptions
from g4ir.plan.engine_limits import Limits
from g4ir.quant.recipe import Recipe
from g4ir.quant.rewrite import quantised, weights_of
from g4ir.spec.record import Spec
from g4ir.spec.shrink import shrink, shrink_drafter
from g4ir.ui.posix import resource
from g4ir.ui.progress import Progress
from g4ir.weights.pack import MadeParams, Packing, ParamSource, make_packing
from g4ir.weights.random import random_weights

from . import build
from .compiled import summary
from .host import Api, installed, require_library
from .interface import ENGINE, interface, networks, spans
from .target import RTX, TARGETS
from .trial import compile_once, parse_once

if TYPE_CHECKING:
    from g4ir.backends.base import Prepared

#: host memory that a builder may take of a dry run
MOST_COMPILED = 3 * build.GIB
SMALL = Limits(max_batch=3, max_seq=4200, prefill_chunk=11)
#: tokens that each row of the small network is given, and tokens that are verified after steps
LENGTHS, VERIFIED = (29, 0, 17), 2
#: patches in a row of the image that small towers are given
WIDTH = 24
#: largest difference of a row relative to its rms, which comes of the order of sums
BUDGET = 1e-4


def dry_run(p: Prepared, progress: Progress) -> dict[str, Any]:
    """Return the report of `g4ir build --dry-run` on the network, and what it took. CheckError
    where the small network is off."""
    require("onnx", "onnxruntime", backend="trt")
    start = time.monotonic()
    progress("checking the network in small")
    with one_thread():
        errors = check_small(p)
    progress("writing the network at full size")
    found = full_size(p)
    if installed(RTX):
        progress("asking TensorRT-RTX")
        found |= by_library(require_library(RTX), p)
    return {
        **{f"{name}_error": float(f"{e:.1e}") for name, e in errors.items()},
        **found,
        "dry_run_s": round(time.monotonic() - start, 1),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def by_library(api: Api, p: Prepared) -> dict[str, Any]:
    """Return what a library that needs no GPU makes of the text model's network: its layers as the
    parser writes them, and what a small one is compiled to, a line for each profile. LowerError
    where it is refused."""
    every = networks(p.packing.program)
    given = (api, every[ENGINE], p.config.limits, p.config.settings)
    name = f"{api.library.name} {api.version}"
    if build.estimate([*every.values()]).host_bytes > MOST_COMPILED:
        return {"parsed": f"{parse_once(*given)} layers, by {name}"}
    made = compile_once(*given, TARGETS["rtx"])
    return {"parsed": f"{made.layers} layers, by {name}", "compiled": summary(made.profiles)}


def full_size(p: Prepared) -> dict[str, Any]:
    """Return the networks of the build without weights: size, and what the text model is fed."""
    from g4ir.backends.onnx_graph.export import Nowhere

    from .dialect import emitted

    graphs = networks(p.packing.program)
    written = {
        n: emitted(g, p.config.limits, Nowhere(), p.config.settings) for n, g in graphs.items()
    }
    sizes = {name: f"{len(e.nodes)} nodes" for name, (e, _) in written.items()}
    dense = sum(1 for _ in p.packing.prologue.find("dense"))
    made_dense = (
        f"{dense} quantised weights are made dense at build: gates of per-layer embeddings, and "
        f"what TensorRT does not take: it takes 8 bits with a scale for each row, in the engine's "
        f"dtype, and 4 bits with scales of groups"
    )
    io = interface(graphs[ENGINE], p.config.limits)
    found = {
        "network": sizes.pop(ENGINE),
        "inputs": {n: str(t) for n, t in io.inputs.items() if n not in io.aliased.values()},
        "outputs": {n: str(t) for n, t in io.outputs.items() if n not in io.aliased},
        "caches": {"in_place": len(io.aliased)},
        "builder": str(build.estimate([*graphs.values()])),
        "notes": [*written[ENGINE][1], *([made_dense] if dense else [])],
    }
    drafter = {DRAFT: sizes.pop(DRAFT)} if DRAFT in sizes else {}
    return {**found, **drafter, **({"towers": sizes} if sizes else {})}


# --- in small ---------------------------------------------------------------------------------


def in_small(p: Prepared) -> tuple[Packing, ParamSource]:
    """Return the variant in small (shrink.py) through the same passes, in fp32, with the same kinds
    of media, each in one size, and random weights, quantised where the recipe fits it. It is one
    rank's, of one: those of several have the same networks but for their collectives."""
    kinds = p.config.media.kinds
    spec = shrink(p.config.spec, media=bool(kinds))
    media = find_media(spec, kinds, seconds=(1.0,) if AUDIO in kinds else None)
    drafter = shrink_drafter(p.config.drafter, spec) if p.config.drafter else None
    latent = replace(p.config.options.of(LatentOptions), keep=layers_read(spec, drafter))
    packing = make_packing(
        spec=spec,
        all_logits=p.config.all_logits,
        dtype="f32",
        media=media,
        skip=p.config.skip,
        options=p.config.options.changed(latent),
        recipe=_fitting(p.config.quant, spec),
        stored=partial(p.backend.stored, device=p.config.device),
        drafter=drafter,
    )
    source = random_weights(spec, 0, torch.float32, drafter=drafter)
    return packing, MadeParams(packing, source)


def _fitting(recipe: Recipe | None, spec: Spec) -> Recipe | None:
    """Return a recipe, or none where a rule is about layers that a small spec does not have."""
    with suppress(InputError):
        if recipe and recipe.schemes(weights_of(spec)):
            quantised(build_program(spec, dtype="f32"), spec, recipe, "f32")
            return recipe
    return None


def check_small(p: Prepared) -> dict[str, float]:
    """Return the largest errors of the small networks: `logits`, `soft` tokens where there are
    towers, and `drafts`, the states of a drafter. CheckError beyond the budget, which is wider
    where the reference itself lies far from float64, as `verify` has it."""
    from .execute import DialectRuntime

    packing, params = in_small(p)
    program = packing.program

    def of(kind: type[ReferenceRuntime]) -> dict[str, Tensor]:
        return results(program, params, kind(program, SMALL, "cpu", params))

    got = results(program, params, DialectRuntime(program, SMALL, params, p.config.settings))
    want, wide = of(ReferenceRuntime), cache(partial(of, WideRuntime))
    errors = {name: _worst(got[name], want[name]) for name in got}
    for name, error in errors.items():
        if not (error <= BUDGET or error <= rounding_room(_worst(want[name], wide()[name]))):
            raise CheckError(
                f"dry run: {name} of {p.config.spec.name} in small differ from the reference by "
                f"{error:.1e} of their rms, which is more than rounding to f32; this is an "
                f"error of the lowering: report it"
            )
    return errors


def results(program: Program, params: ParamSource, runtime: Any) -> dict[str, Tensor]:
    """Return what `run_small` gives, and the `soft` tokens of towers."""
    made = run_small(program, params, runtime)
    soft = [runtime.encode(name, feeds)[0] for name, feeds in tower_feeds(program)]
    return {**made, "soft": torch.cat(soft)} if soft else made


def _worst(got: Tensor, want: Tensor) -> float:
    return row_errors(got, want).relative.max().item()


def run_small(program: Program, params: Any, runtime: Any) -> dict[str, Tensor]:
    """Return `logits` [N, vocab] of rows of different lengths in chunks, one of them empty, then of
    decode steps; and `drafts` [spans * B,1,hidden], by the state behind the last over each span."""
    embed, plan, lengths = program.graphs["embed"], _plan(program), torch.tensor(LENGTHS)
    tables = {v.name: params.tensor(v.name) for v in embed.params}
    state, generator = runtime.new_state(len(LENGTHS)), torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 200, (len(LENGTHS), plan[-1][2]), generator=generator)
    held, found = torch.zeros_like(lengths), list[Tensor]()
    for phase, start, stop, context in plan:
        size, every = stop - start, start >= max(LENGTHS)
        valid = torch.full_like(lengths, size) if every else (lengths - start).clamp(0, size)
        feeds, _ = interpret(embed, {"tokens": tokens[:, start:stop]}, tables, {})
        feeds |= {"positions": held[:, None] + torch.arange(size), "lengths": valid}
        held = held + valid
        if phase == MEDIA:
            feeds[BLOCK_IDS] = _blocks(valid, stop)
        made = runtime.run(phase, feeds, state, max(context, int(held.max())), True)
        found.append(made["logits"][_given(made["logits"], valid)].double())
    results = {"logits": torch.cat(found)}
    if DRAFT in program.graphs:
        feeds = {"embeds": feeds["embeds"][:, -1:], HIDDEN: made[HIDDEN][:, -1:], "written": held}
        feeds |= {"positions": held[:, None], "last": held[:, None] - 1}
        drafts = [runtime.run(DRAFT, feeds, state, n, True)[NEXT_HIDDEN] for n in _contexts()]
        results["drafts"] = torch.cat(drafts).double()
    return results


def _given(logits: Tensor, valid: Tensor) -> Tensor:
    """Return the mask bool[B,S] of logits [B,S,vocab] behind tokens: behind padding they are not
    defined. Logits of the last tokens alone have S = 1."""
    return torch.arange(logits.shape[1]) < valid[:, None]


def _blocks(valid: Tensor, width: int) -> Tensor:
    """Return i64[B, width]: blocks of three tokens, and every fourth in none."""
    at = torch.arange(width).expand(len(valid), width)
    return torch.where((at < valid[:, None]) & (at % 4 < 3), at // 4, NO_BLOCK)


def tower_feeds(program: Program) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield example inputs of each tower, a fifth of them padding: numbers, a mask, or places of a
    image 24 wide."""
    generator = torch.Generator().manual_seed(0)
    for name, g in tower_graphs(program).items():
        feeds = {}
        for v in g.inputs:
            shape = [int(d) for d in v.type.shape]
            at = torch.arange(shape[1])
            valid = at < shape[1] * 4 // 5
            if v.type.dtype == "bool":
                feeds[v.name] = valid[None]
            elif v.type.dtype == "i64":
                places = torch.stack((at % WIDTH, at // WIDTH), 1)
                feeds[v.name] = torch.where(valid[:, None], places, -1)[None]
            else:
                feeds[v.name] = torch.rand(shape, generator=generator)
        yield name, feeds


def _plan(program: Program) -> list[tuple[str, int, int, int]]:
    """Return the phases of steps, each with the tokens that it has, from .. to, and how many rows
    are taken to hold at least: the chunks of a prompt, a single token for each span of the caches,
    and, of a model with a drafter, tokens that are verified: every profile has its step."""
    length, contexts = max(LENGTHS), _contexts()
    first = MEDIA if MEDIA in program.graphs else "prefill"
    starts = range(0, length, SMALL.prefill_chunk)
    steps = [
        ("prefill" if i else first, i, min(i + SMALL.prefill_chunk, length), 0) for i in starts
    ]
    steps += [("decode", length + i, length + i + 1, n) for i, n in enumerate(contexts)]
    end = length + len(contexts)
    return steps + ([(VERIFY, end, end + VERIFIED, 0)] if VERIFY in program.graphs else [])


def _contexts() -> list[int]:
    """Return how much rows hold where a step looks at each span of the small caches."""
    return [min(n, SMALL.max_seq) for n in spans(SMALL)]


@contextmanager
def one_thread() -> Iterator[None]:
    """A context of one thread: products this small are slower on several, by far where the machine
    is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
