"""A build up to TensorRT's builder, on any machine.

The recorder stands for TensorRT. First the variant in small (g4ir/shrink.py): it is written, every
rule that the recorder knows is checked, and it is run, prefill in chunks and decode, beside the
interpreter. Then the network at its full size, without weights.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from g4ir.errors import CheckError, LowerError
from g4ir.interpret import interpret
from g4ir.ir import Program

from ..base import Limits, Progress
from ..reference import ReferenceRuntime
from . import build
from .probe import Api, probe
from .recorder import RuleError, recorder
from .recorder.layers import MAX_VOLUME
from .recorder.network import check, volumes
from .runtime import TrtRuntime, deserialize, give_weights

if TYPE_CHECKING:
    from g4ir.engine import Prepared

#: which TensorRT the recorder stands for
EMULATED = "11.4.0"
SMALL = Limits(max_batch=3, max_seq=96, prefill_chunk=11)
#: tokens that each row of the small network is given, and steps after them
LENGTHS, STEPS = (29, 0, 17), 3
#: logits, against the rms of their row. fp32 differs in the order of sums; the others also in
#: where a sum that was taken in another order falls on rounding.
BUDGETS: Mapping[str, float] = {"f32": 1e-4, "f16": 1.5e-1, "bf16": 1.5e-1}


def dry_run(p: Prepared, progress: Progress) -> dict[str, Any]:
    """What `g4ir build --dry-run` says of the network, and what saying it took. CheckError where
    the small network is off."""
    start = time.monotonic()
    api = probe(recorder(EMULATED))
    progress("checking the network in small")
    with one_thread():
        errors = {d: float(f"{check_small(api, p, d):.1e}") for d in ("f32", p.dtype)}
    progress("writing the network at full size")
    found = {
        "tensorrt": f"emulated {api.version}", "logits_error": errors, **full_size(api, p),
        "dry_run_s": round(time.monotonic() - start, 1), "peak_bytes": _peak_bytes(),
    }  # fmt: skip
    return found


def check_sizes(
    api: Api, program: Program, limits: Limits, settings: Mapping[str, str]
) -> build.Written:
    """The network at full size, without weights, on the recorder. LowerError where it breaks a
    rule, or where a tensor would have more elements than TensorRT takes."""
    written = build.write_network(api, program, limits, None, settings)
    try:
        check(written.network)
    except RuleError as e:
        raise LowerError(f"TensorRT would refuse the network: {e}") from e
    io = written.interface
    # Those of prefill are the largest: in all else, decode has the same ranges.
    largest = {name: io.shapes(name, "prefill")[2] for name in io.dynamic()}
    sizes = volumes(written.network, largest)
    name = max(sizes, key=lambda n: sizes[n])
    if sizes[name] > MAX_VOLUME:
        raise LowerError(
            f"TensorRT takes tensors of up to {MAX_VOLUME} elements; {name} has {sizes[name]} in "
            f"the largest chunk: build with a smaller --prefill-chunk, --max-batch or "
            f"--max-seq{_smaller(name, settings)}"
        )
    return written


def _smaller(name: str, settings: Mapping[str, str]) -> str:
    """The setting under which this tensor does not exist."""
    if settings["attention"] == "explicit" and "attn" in name:
        return ", or with --set attention=fused, which keeps no scores"
    if settings["experts"] != "plugin" and "experts" in name:
        return ", or with --set experts=plugin, which multiplies chosen experts alone"
    return ""


def full_size(api: Api, p: Prepared) -> dict[str, Any]:
    """The network of the build, without weights: its size and what it is fed."""
    written = check_sizes(api, p.packing.program, p.limits, p.settings)
    weights = sum(v.type.nbytes() for v in written.graph.params)
    expected = build.estimate(written, weights, p.settings)
    io = written.interface
    return {
        "layers": written.network.num_layers,
        "layer_kinds": dict(_kinds(written.network)),
        "inputs": {n: str(t) for n, t in io.inputs.items() if n not in io.caches.values()},
        "outputs": {n: str(t) for n, t in io.outputs.items() if n not in io.caches},
        "caches": {"in_place": len(io.aliased), "two_buffers": len(io.swapped)},
        "builder": str(expected),
        "notes": written.emitter.notes,
    }


def _kinds(network: Any) -> list[tuple[str, int]]:
    """Layers of each class, most frequent first."""
    layers = (network.get_layer(i) for i in range(network.num_layers))
    return Counter(type(layer).__name__ for layer in layers).most_common()


# --- in small ---------------------------------------------------------------------------------


def check_small(api: Api, p: Prepared, dtype: str) -> float:
    """Largest error of the small network's logits in this dtype; CheckError beyond the budget."""
    packing, params = p.in_small(dtype)
    one = emulated(api, packing.program, SMALL, params, p.settings)
    two = ReferenceRuntime(packing.program, SMALL, "cpu", params)
    error = compare(packing.program, params, one, two)
    budget = BUDGETS[dtype] if dtype == "f32" or _rounds_alike(p.settings) else float("inf")
    if not error <= budget:
        raise CheckError(
            f"dry run: logits of {p.spec.name} in small differ from the reference by {error:.1e} "
            f"of their rms, allowed {budget:.0e}; this is an error of the lowering: report it"
        )
    return error


def _rounds_alike(settings: Mapping[str, str]) -> bool:
    """Whether the network rounds where the reference does. Fused kernels keep more digits, and in
    a small model with experts that is enough for a token to choose others."""
    return settings["attention"] == "explicit" and settings["experts"] != "plugin"


def emulated(
    api: Api, program: Program, limits: Limits, params: Any, settings: Mapping[str, str]
) -> TrtRuntime:
    """The program built and loaded by the recorder."""
    written = build.write_network(api, program, limits, params, settings)
    config = build.configure(api, written, settings, memory=1 << 33, weights=0)
    plan = written.builder.build_serialized_network(written.network, config)
    if plan is None:
        raise LowerError(build.refusal(written.log.errors, []))
    engine = deserialize(api, memoryview(plan), written.log)
    give_weights(api, engine, written.log, params, settings["weights"])
    return TrtRuntime(api, engine, written.log, written.interface, limits, "cpu", params, None)


def compare(program: Program, params: Any, one: Any, two: Any) -> float:
    """Largest difference of logits of two runtimes, relative to their row's rms: rows of different
    lengths in chunks, one of them empty, then decode steps."""
    embed = program.graphs["embed"]
    tables = {v.name: params.tensor(v.name) for v in embed.params}
    lengths = torch.tensor(LENGTHS)
    states = [r.new_state(len(LENGTHS)) for r in (one, two)]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 200, (len(LENGTHS), max(LENGTHS) + STEPS), generator=generator)
    held, errors = torch.zeros_like(lengths), list[float]()
    for start, stop in _spans(max(LENGTHS), STEPS):
        decoding = stop > max(LENGTHS)
        valid = torch.ones_like(lengths) if decoding else (lengths - start).clamp(0, stop - start)
        feeds, _ = interpret(embed, {"tokens": tokens[:, start:stop]}, tables, {})
        feeds |= {"positions": held[:, None] + torch.arange(stop - start), "lengths": valid}
        held = held + valid
        phase = "decode" if stop - start == 1 else "prefill"
        a, b = (
            r.run(phase, dict(feeds), s, int(held.max()), True)
            for r, s in zip((one, two), states, strict=True)
        )
        errors.append(_error(a[valid > 0], b[valid > 0]))
    return max(errors, key=lambda e: (e != e, e))


def _spans(length: int, steps: int) -> list[tuple[int, int]]:
    """Chunks of a prompt, then single tokens."""
    chunk = SMALL.prefill_chunk
    chunks = [(i, min(i + chunk, length)) for i in range(0, length, chunk)]
    return chunks + [(i, i + 1) for i in range(length, length + steps)]


def _error(a: torch.Tensor, b: torch.Tensor) -> float:
    rms = b.float().pow(2).mean(-1, keepdim=True).sqrt()
    return ((a.float() - b.float()).abs() / rms).max().item() if len(b) else 0.0


@contextmanager
def one_thread() -> Iterator[None]:
    """Products this small are slower on several threads, by far where the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _peak_bytes() -> int:
    """Most memory that this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
