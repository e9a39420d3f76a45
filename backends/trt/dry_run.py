"""A build up to TensorRT's builder, on any machine.

The recorder stands for TensorRT. First the variant in small (spec/shrink.py): it is written, every
rule that the recorder knows is checked, and it is run, prefill in chunks and decode, beside the
interpreter; so are its towers, and a step of its drafter. Several ranks run it in a thread each,
and are to compute what one does. Then the networks, the largest tower of each kind, at full size,
without weights.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from g4ir.backends.primitives.graph import MEDIA, network_graph, tower_graphs
from g4ir.backends.primitives.network import BLOCK_IDS, NO_BLOCK
from g4ir.backends.reference import ReferenceRuntime, WideRuntime
from g4ir.errors import CheckError, InputError, LowerError
from g4ir.ir.distance import ROUNDED, Anchor, Tolerance, rounding_room, row_errors, worst_of
from g4ir.ir.graph import Graph, Node, Program
from g4ir.ir.interpret import interpret, run_node
from g4ir.model.decoder import HIDDEN, VERIFY
from g4ir.model.draft import DRAFT, NEXT_HIDDEN, layers_read
from g4ir.model.media import AUDIO, find_media
from g4ir.model.text import build_program
from g4ir.ops.collective import COLLECTIVES
from g4ir.ops.types import torch_dtype
from g4ir.parallel.group import exchanged
from g4ir.parallel.shard import shard_program
from g4ir.parallel.table import Share, can_share
from g4ir.passes.latent_kv import LatentOptions
from g4ir.plan.engine_limits import Limits
from g4ir.quant.recipe import Recipe
from g4ir.quant.rewrite import quantised, weights_of
from g4ir.spec.record import Spec
from g4ir.spec.shrink import shrink, shrink_drafter, with_all_experts
from g4ir.ui.posix import resource
from g4ir.ui.progress import Progress
from g4ir.weights.checkpoint import WeightSource
from g4ir.weights.pack import MadeParams, Packing, ParamSource, make_packing
from g4ir.weights.random import RandomCheckpoint, WithDrafter

from . import build, recorder
from .compiled import summary
from .host import CODES, Api, capsule, installed, probe, require_library
from .interface import draft_graph, networks, spans
from .recorder import Exchange
from .runtime import Opened, TrtRuntime, deserialize, stream_weights
from .target import RTX, TARGETS
from .trial import compile_once

if TYPE_CHECKING:
    from g4ir.backends.base import Prepared

#: which TensorRT the recorder stands for
EMULATED = "11.4.0"
#: host memory that a builder may take of a dry run
MOST_COMPILED = 3 * build.GIB
SMALL = Limits(max_batch=3, max_seq=4200, prefill_chunk=11)
#: tokens that each row of the small network is given, and tokens that are verified after steps
LENGTHS, VERIFIED = (29, 0, 17), 2
#: patches in a row of the image that small towers are given
WIDTH = 24
#: largest difference of a row relative to its rms. fp32 differs in the order of sums; the others
#: also in where such a sum falls on rounding, which logits have a measure of their own for.
BUDGETS: Mapping[str, float] = {"f32": 1e-4, "bf16": 1.5e-1}
#: how much farther a row may lie from float64 where products of codes are rounded, and once more
#: behind their scales
ROUNDED_TWICE = 1.5
#: `logits`, `drafts` of each rank; `soft` tokens of each tower
Results = dict[str, list[Tensor]]


def emulator(version: str = EMULATED) -> Api:
    """Return the recorder in the place of TensorRT."""
    return probe(recorder.recorder(version))


def dry_run(p: Prepared, progress: Progress) -> dict[str, Any]:
    """Return the report of `g4ir build --dry-run` on the network, and what it took. CheckError
    where the small network is off."""
    start = time.monotonic()
    api = emulator()
    progress("checking the network in small")
    with one_thread():
        errors = {d: check_small(api, p, d) for d in ("f32", p.config.dtype)}
    progress("writing the network at full size")
    found = full_size(api, p)
    estimate = build.estimate([*networks(p.packing.program).values()])
    if estimate.host_bytes <= MOST_COMPILED and installed(RTX):
        progress("compiling the network of the text model")
        found |= {"compiled": compiled_lines(p)}
    rounded = {
        f"{name}_error": {d: float(f"{e[name]:.1e}") for d, e in errors.items()}
        for name in errors["f32"]
    }
    return {
        "tensorrt": f"emulated {api.version}",
        **rounded,
        **found,
        "dry_run_s": round(time.monotonic() - start, 1),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def compiled_lines(p: Prepared) -> list[str]:
    """Return what TensorRT-RTX makes of the text model's network, a line for each profile."""
    graph, api = network_graph(p.packing.program), require_library(RTX)
    made = compile_once(api, graph, p.config.limits, p.config.settings, TARGETS["rtx"])
    return summary(made.profiles)


def check_sizes(
    api: Api, graph: Graph, limits: Limits, settings: Mapping[str, str]
) -> tuple[build.Written, int]:
    """Return the network at full size, without weights, on the recorder, and bytes of scratch
    memory in the largest chunk where nothing is fused. LowerError where it breaks a rule."""
    written = build.write_network(api, graph, limits, None, settings)
    try:
        recorder.check(written.network)
    except recorder.RuleError as e:
        raise LowerError(f"TensorRT would refuse the network: {e}") from e
    io = written.interface
    # Those of prefill are the largest, where there are any: nothing else has as many tokens.
    widest = [*io.of_phase(DRAFT), *io.of_phase("prefill")]
    largest = {name: io.shapes(name, widest[-1])[2] for name in io.dynamic()}
    return written, recorder.scratch_bytes(written.network, largest)


def full_size(api: Api, p: Prepared) -> dict[str, Any]:
    """Return the networks of the build without weights: size, and what the text model is fed."""
    program = p.packing.program
    written, scratch = check_sizes(api, network_graph(program), p.config.limits, p.config.settings)
    towers = sorted(tower_graphs(program).values(), key=lambda g: g.inputs[0].type.numel())
    largest = {g.name.split("_")[0]: g for g in towers}  # others have the same layers
    others = draft_graph(program) | {g.name: g for g in largest.values()}
    beside = {
        name: check_sizes(api, g, p.config.limits, p.config.settings) for name, g in others.items()
    }
    dense = sum(1 for _ in p.packing.prologue.find("dense"))
    made_dense = (
        f"{dense} quantised weights are made dense at build: gates of per-layer embeddings, and "
        f"what TensorRT does not take: it takes 8 bits with a scale for each row, in the engine's "
        f"dtype, and 4 bits with scales of groups"
    )
    io, network = written.interface, written.network
    layers = (network.get_layer(i) for i in range(network.num_layers))
    found = {
        "layers": network.num_layers,
        "layer_kinds": dict(Counter(type(layer).__name__ for layer in layers).most_common()),
        "inputs": {n: str(t) for n, t in io.inputs.items() if n not in io.aliased.values()},
        "outputs": {n: str(t) for n, t in io.outputs.items() if n not in io.aliased},
        "caches": {"in_place": len(io.aliased)},
        "scratch_bytes": max([scratch, *(size for _, size in beside.values())]),
        "builder": str(build.estimate([*networks(program).values()])),
        "notes": [*written.notes, *([made_dense] if dense else [])],
    }
    sizes = {name: f"{w.network.num_layers} layers" for name, (w, _) in beside.items()}
    drafter = {DRAFT: sizes.pop(DRAFT)} if DRAFT in sizes else {}
    return {**found, **drafter, **({"towers": sizes} if sizes else {})}


# --- in small ---------------------------------------------------------------------------------


def in_small(p: Prepared, dtype: str) -> tuple[Packing, list[ParamSource]]:
    """Return the variant in small (shrink.py) through the same passes, with the same kinds of
    media, each in one size, and random weights of each rank, quantised where the recipe fits it. In
    16 bits all experts are taken, so that rounding says how far two runs may lie apart."""
    kinds = p.config.media.kinds
    spec = shrink(p.config.spec, media=bool(kinds))
    if dtype in ROUNDED:
        spec = with_all_experts(spec)
    media = find_media(spec, kinds, seconds=(1.0,) if AUDIO in kinds else None)
    drafter = shrink_drafter(p.config.drafter, spec) if p.config.drafter else None
    latent = replace(p.config.options.of(LatentOptions), keep=layers_read(spec, drafter))
    ranks = small_ranks(p, spec, drafter)
    shares = [Share(spec, rank, ranks, p.config.ep and ranks > 1) for rank in range(ranks)]
    packing = make_packing(
        spec=spec,
        all_logits=p.config.all_logits,
        dtype=dtype,
        media=media,
        skip=p.config.skip,
        options=p.config.options.changed(latent),
        recipe=_fitting(p.config.quant, dtype, shares[0]),
        stored=partial(p.backend.stored, device=p.config.device),
        drafter=drafter,
        ranks=ranks,
        ep=shares[0].ep,
    )
    source: WeightSource = RandomCheckpoint(spec, 0, torch_dtype(dtype))
    if drafter:
        source = WithDrafter(source, RandomCheckpoint(drafter, 1, torch_dtype(dtype)))
    return packing, [MadeParams(packing, source, share=share) for share in shares]


def small_ranks(p: Prepared, spec: Spec, drafter: Spec | None) -> int:
    """Return how many ranks can share a model in small and its drafter, at most those of p."""
    heads = drafter.text.num_attention_heads if drafter else 0
    fits = (
        n
        for n in range(p.config.ranks, 1, -1)
        if can_share(spec, n, p.config.ep) and heads % n == 0
    )
    return next(fits, 1)


def _fitting(recipe: Recipe | None, dtype: str, share: Share) -> Recipe | None:
    """Return a recipe, or none where a rule is about layers that a small spec does not have, or
    about groups of numbers that its ranks cannot share."""
    spec = share.spec
    with suppress(InputError):
        if recipe and recipe.schemes(weights_of(spec)):
            made = quantised(build_program(spec, dtype=dtype), spec, recipe, dtype)
            shard_program(made, spec, share.ranks, share.ep)
            return recipe
    return None


def check_small(api: Api, p: Prepared, dtype: str) -> dict[str, float]:
    """Return the largest errors of the small networks in this dtype: `logits`, `soft` tokens where
    there are towers, and `drafts`, the states of a drafter. CheckError beyond the budget, which is
    wider where the reference itself lies far from float64, as `verify` has it."""
    packing, params = in_small(p, dtype)
    program = packing.program
    made = [emulated(api, program, SMALL, own, p.config.settings) for own in params]

    def linked(rank: int, exchange: Exchange) -> TrtRuntime:
        if len(params) > 1:
            made[rank].link(partial(capsule, recorder.communicator(exchange)))
        return made[rank]

    def of(kind: type[ReferenceRuntime]) -> Results:
        def beside(rank: int, exchange: Exchange) -> ReferenceRuntime:
            run = partial(run_beside, rank, exchange)
            return kind(program, SMALL, "cpu", params[rank], run)

        return results(program, params, beside, kind(program, SMALL, "cpu", params[0]))

    got, want = results(program, params, linked, made[0]), of(ReferenceRuntime)
    wide = cache(partial(of, WideRuntime))
    errors = {name: _worst(got[name], want[name]) for name in got}
    for name, error in errors.items():
        if dtype in ROUNDED and name == "logits":
            rows = zip(got[name], want[name], wide()[name], strict=True)
            times = ROUNDED_TWICE if _has_rows(program) else 1.0
            right = all(rounds_alike(*of_rank, dtype, times) for of_rank in rows)
        else:
            right = error <= BUDGETS[dtype] or error <= rounding_room(
                _worst(want[name], wide()[name])
            )
        if not right:
            raise CheckError(
                f"dry run: {name} of {p.config.spec.name} in small differ from the reference by "
                f"{error:.1e} of their rms, which is more than rounding to {dtype}; this is an "
                f"error of the lowering: report it"
            )
    return errors


def run_beside(rank: int, exchange: Exchange, n: Node, tensors: list[Any]) -> tuple[Any, ...]:
    """Run an op as `interpret` does, what ranks exchange beside the others."""
    if n.op not in COLLECTIVES:
        return run_node(n, tensors)
    parts = zip(*map(exchange, tensors), strict=True)
    return tuple(exchanged(n, [[*own] for own in parts])[rank])


def results(
    program: Program,
    params: Sequence[ParamSource],
    opened: Callable[[int, Exchange], Any],
    one: Any,
) -> Results:
    """Return what `run_small` gives, of each rank's runtime (`opened`), and the soft tokens of
    towers, which one runs."""

    def run(rank: int, exchange: Exchange) -> dict[str, Tensor]:
        return run_small(program, params[rank], opened(rank, exchange))

    ranks = recorder.side_by_side(len(params), run)
    soft = [one.encode(name, feeds)[0] for name, feeds in tower_feeds(program)]
    found = {name: [of_rank[name] for of_rank in ranks] for name in ranks[0]}
    return {**found, "soft": soft} if soft else found


def _worst(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    pairs = zip(got, want, strict=True)
    return worst_of([row_errors(a, b).relative.max().item() for a, b in pairs])


def _has_rows(program: Program) -> bool:
    """Whether a weight has codes of 8 bits, whose products are multiplied by scales of rows."""
    found = (n["codes"] for g in program.graphs.values() for n in g.find("dequantize"))
    return any(v.type.dtype in CODES for v in found)


def rounds_alike(got: Tensor, want: Tensor, wide: Tensor, dtype: str, times: float = 1.0) -> bool:
    """Whether logits in 16 bits are as near to float64 as the reference's (g4ir/ir/distance.py), or
    so many times as far. Fused kernels keep more digits than it: the two need not be near each
    other."""
    rounding = Anchor("float64", wide, ()).rounding(want, dtype)
    farther = {k: times * getattr(rounding, k) for k in ("median", "worst")}
    anchor, budget = Anchor("float64", wide, ()), Tolerance(rounding=replace(rounding, **farther))
    return budget.all_hold(anchor.errors(got, want))


def emulated(
    api: Api, program: Program, limits: Limits, params: Any, settings: Mapping[str, str]
) -> TrtRuntime:
    """Return the program built and loaded by the recorder."""

    def opened(graph: Graph) -> Opened:
        written = build.write_network(api, graph, limits, params, settings)
        config = build.configure(api, written, settings, memory=1 << 33)
        plan = written.builder.build_serialized_network(written.network, config)
        if plan is None:
            raise LowerError(build.refusal(written.log.errors, []))
        engine = deserialize(api, memoryview(plan), written.log)
        if settings["weights"] == "streamed":
            stream_weights(engine, 0)
        return Opened(api, engine, written.log, written.interface, "cpu")

    def other(name: str) -> Opened:
        return opened(program.graphs[name])

    return TrtRuntime(opened(network_graph(program)), limits, None, params, other, program)


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
