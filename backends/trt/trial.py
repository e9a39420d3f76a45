"""Small builds before a large one: what takes an hour should not fail at its end for a reason that
seconds show.

    shared_memory    how much of it kernels of plugins may use
    attention_form   whether TensorRT builds each attention of a graph, at its real sizes
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from g4ir.errors import G4Error, LowerError
from g4ir.ir.graph import Graph, Node
from g4ir.ops.types import Type, torch_dtype
from g4ir.plan.limits import Limits
from g4ir.ui.progress import Progress

from . import build
from .emitter import SHARED_BYTES, TrtEmitter, without_weights
from .interface import Interface
from .log import logger
from .plugin_kernels.reference import run as meaning
from .plugin_kernels.table import PLUGINS, Plan
from .plugins import MOST_SHARED_BYTES, Decode, add_plugin, result_types
from .probe import Api
from .runtime import TrtTower, deserialize

#: of the largest value, how far a kernel may be off: sums in another order, probabilities rounded
TOLERANCE = 2.0**-6
#: an attention whose kernel needs most shared memory: one key head of 512, eight query heads
LARGEST = Decode("bf16", 1, 1, 8, 512, 256, 0, 1.0, 0.0)


# --- plugins ----------------------------------------------------------------------------------


def shared_memory(api: Api, device: str, log: Any = None) -> int:
    """Bytes of dynamic shared memory that kernels of plugins may use: more than every launch may
    ask for only where a network of one such kernel is built, runs, and is right."""
    plan = LARGEST.plans(MOST_SHARED_BYTES)[0]
    # What a share without keys has is not written.
    plan = replace(plan, constants={**plan.constants, "SPLITS": 1})
    return MOST_SHARED_BYTES if builds_and_runs(api, plan, device, log) else SHARED_BYTES


def builds_and_runs(api: Api, plan: Plan, device: str, log: Any = None) -> bool:
    """Whether TensorRT takes a network of this `decode_parts` alone, and computes what it means."""
    log = log or logger(api.trt)
    kept, log.errors = log.errors, []
    try:
        return _runs(api, plan, device, log)
    except (G4Error, RuntimeError):  # TensorRT's refusal, or CUDA's of the launch
        return False
    finally:
        log.errors = kept


def _runs(api: Api, plan: Plan, device: str, log: Any) -> bool:
    feeds = _example(plan)
    names = PLUGINS[plan.plugin].inputs
    kinds = PLUGINS[plan.plugin].kinds(plan.dtype)
    types = {n: Type(k, tuple(feeds[n].shape)) for n, k in zip(names, kinds)}
    builder = api.trt.Builder(log)
    flags = build.network_flags(api, plugins=True)
    emitter = TrtEmitter(
        api.trt, builder.create_network(flags), without_weights, MOST_SHARED_BYTES, log.said
    )
    net: Any = _Alone(emitter)
    made = add_plugin(net, plan, *(emitter.input(n, t) for n, t in types.items()))
    results = dict(zip(PLUGINS[plan.plugin].outputs, result_types(plan, types), strict=True))
    for name, x in zip(results, made, strict=True):
        emitter.output(name, x)
    serialized = builder.build_serialized_network(emitter.network, builder.create_builder_config())
    if serialized is None:
        return False
    engine = deserialize(api, memoryview(serialized), log)
    io = Interface(types, results, {}, {}, {})
    found = TrtTower(api, engine, log, io, device).run_all(
        {n: t.to(device) for n, t in feeds.items()}
    )
    wanted = meaning(plan, *feeds.values())
    return all(_close(a.cpu(), b) for a, b in zip(found.values(), wanted, strict=True))


class _Alone:
    """What `add_plugin` asks of a network."""

    def __init__(self, e: TrtEmitter) -> None:
        self.e = e


def _example(plan: Plan) -> dict[str, torch.Tensor]:
    """Inputs of a `decode_parts` for one token that sees every slot."""
    c, g = plan.constants, torch.Generator().manual_seed(0)
    shapes = {"q": (1, 1, c["HEADS"] * c["GROUP"], c["D"])}
    shapes |= dict.fromkeys(("keys", "values"), (1, c["HEADS"], c["SLOTS"], c["D"]))
    feeds = {
        n: (torch.randn(s, generator=g) * c["D"] ** -0.25).to(torch_dtype(plan.dtype))
        for n, s in shapes.items()
    }
    feeds["positions"] = torch.full((1, 1), c["SLOTS"] - 1, dtype=torch.int32)
    return feeds | {"slots": torch.arange(c["SLOTS"], dtype=torch.int32)}


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a.double() - b.double()).abs().max() <= TOLERANCE * b.double().abs().max())


# --- attention --------------------------------------------------------------------------------


def attention_graphs(graph: Graph) -> list[Graph]:
    """Of each distinct attention of a graph a graph of it alone, which reads caches and writes
    none."""
    kinds: dict[Any, Graph] = {}
    for n in graph.find("attention", "attention_latent"):
        key = (n.op, tuple(sorted(n.attrs.items())), *(v.type for v in n.inputs))
        kinds.setdefault(key, _alone(n))
    return [*kinds.values()]


def _alone(n: Node) -> Graph:
    others = tuple(dict.fromkeys(v for v in n.inputs if v not in n.caches))
    return Graph("prefill", others, (), tuple(dict.fromkeys(n.caches)), (n,), n.outputs, {})


def attention_form(
    api: Api,
    graph: Graph,
    limits: Limits,
    settings: Mapping[str, str],
    memory: int,
    timing: Path,
    progress: Progress,
    log: Any = None,
    shared: int = SHARED_BYTES,
) -> str:
    """The form of attention that TensorRT builds: that of the settings, or `plain` where a refusal
    names the wrapper that takes layers for attention. LowerError of another refusal."""

    def build_alone(g: Graph, form: str) -> None:
        chosen = {**settings, "attention": form}
        _build_alone(api, g, limits, chosen, memory, timing, log, shared)

    form = settings["attention"]
    for g in attention_graphs(graph):
        place = g.outputs[0].name
        progress(f"trial build of the attention of {place}")
        try:
            build_alone(g, form)
        except build.RefusedError as e:
            if form == "plain" or build.WRAPPER not in str(e):
                raise LowerError(f"a trial build of the attention of {place} alone: {e}") from e
            form = "plain"
            build_alone(g, form)
    return form


def _build_alone(
    api: Api,
    g: Graph,
    limits: Limits,
    settings: Mapping[str, str],
    memory: int,
    timing: Path,
    log: Any,
    shared: int,
) -> None:
    """What is timed counts for the whole network too, whose kernels have so much shared memory."""
    plain = {**settings, "weights": "baked"}
    w = build.write_network(api, g, limits, None, plain, log, shared)
    with tempfile.TemporaryDirectory() as folder:
        config = build.configure(api, w, plain, memory)
        build.build_plan(api, w, config, timing, Path(folder) / "plan", lambda message: None)
