"""A network of one kernel alone, built and run before a large one is: whether TensorRT takes
plugins, and how much shared memory their kernels may use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from g4ir.errors import G4Error
from g4ir.ops.types import Type, torch_dtype

from ...trt.emitter import TrtEmitter
from ...trt.interface import Interface
from ...trt.log import all_taken, logger, new_network
from ...trt.probe import MOST_SHARED_BYTES, Api
from ...trt.recorder import SHARED_BYTES
from ...trt.runtime import Opened, TrtTower, deserialize
from .plugins import Decode, add_plugin, result_types
from .reference import run as meaning
from .table import PLUGINS, Plan

Feeds = dict[str, torch.Tensor]

#: of the largest value, how far a kernel may be off: sums in another order, probabilities rounded
TOLERANCE = 2.0**-6
#: an attention whose kernel needs most shared memory: one key head of 512, eight query heads
LARGEST = Decode("bf16", 1, 1, 8, 512, 256, 0, 1.0, 0.0)


def shared_memory(api: Api, device: str, log: Any = None) -> int:
    """Return the bytes of dynamic shared memory that kernels of plugins may use: more than every
    launch may ask for only where a network of one such kernel is built, runs, and is right."""
    plan = LARGEST.plans(MOST_SHARED_BYTES)[0]
    # What a share without keys has is not written.
    plan = replace(plan, constants={**plan.constants, "SPLITS": 1})
    return MOST_SHARED_BYTES if _works(api, plan, _example(plan), device, log) else SHARED_BYTES


def _works(api: Api, plan: Plan, feeds: Feeds, device: str, log: Any) -> bool:
    """Whether a kernel runs, or else was refused or wrong. What is said of it is not kept."""
    log = log or logger(api.trt)
    kept, log.errors = log.errors, []
    try:
        return _runs(api, plan, feeds, device, log)
    except (G4Error, RuntimeError):  # TensorRT's refusal, or CUDA's of the launch
        return False
    finally:
        log.errors = kept


def _runs(api: Api, plan: Plan, feeds: Feeds, device: str, log: Any) -> bool:
    plugin = PLUGINS[plan.plugin]
    kinds = plugin.kinds(plan.dtype)
    types = {n: Type(k, tuple(feeds[n].shape)) for n, k in zip(plugin.inputs, kinds)}
    results = dict(zip(plugin.outputs, result_types(plan, types), strict=True))
    builder = api.trt.Builder(log)
    network = new_network(builder, api.network_flags(plugins=True), log)
    e = TrtEmitter(api.trt, network, None, MOST_SHARED_BYTES, log.said)
    with all_taken(log, "the network of a plugin"):
        made = add_plugin(e, plan, *(e.input(n, t) for n, t in types.items()))
        for name, x in zip(results, made, strict=True):
            e.output(name, x)
    serialized = builder.build_serialized_network(network, builder.create_builder_config())
    if serialized is None:
        return False
    engine = deserialize(api, memoryview(serialized), log)
    io = Interface(types, results, {}, frozenset(), {})
    tower = TrtTower(Opened(api, engine, log, io, device))
    found = tower.run_all({n: t.to(device) for n, t in feeds.items()})
    wanted = meaning(plan, *feeds.values())
    return all(_close(a.cpu(), b) for a, b in zip(found.values(), wanted, strict=True))


def _example(plan: Plan) -> Feeds:
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
