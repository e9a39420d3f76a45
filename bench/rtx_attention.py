"""Attention as TensorRT-RTX compiles it: each size of heads of a variant alone, in each form.

    python bench/rtx_attention.py e2b,26b-a4b --targets sm80,sm89,sm120 --save

For a decode step over each span of the full-length caches: kernels for each attention, and MiB that
are written to put caches elsewhere. `refused`: the builder has no kernel for the whole layer. Needs
TensorRT-RTX and no GPU; nothing is executed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from common import arguments, finish

from g4ir.backends.trt import build
from g4ir.backends.trt.compiled import compiled
from g4ir.backends.trt.host import Api, logger, require_library
from g4ir.backends.trt.interface import networks
from g4ir.backends.trt.lowerings import AUTO
from g4ir.backends.trt.target import RTX, TARGETS
from g4ir.engine.build import prepare
from g4ir.ir.graph import Graph
from g4ir.plan.options import BuildOptions
from g4ir.spec.record import load_spec
from g4ir.ui.progress import no_progress

FORMS = ("fused", "explicit")


def kinds(variant: str) -> Iterator[tuple[str, Graph]]:
    """Yield the attentions of a variant at full width, by size of heads."""
    options = BuildOptions(backend="trt", target="rtx", media="none", dtype="bfloat16")
    p = prepare(load_spec(variant), options, dry=True)
    found = networks(p.packing.program).values()
    for size, (graph, *_) in build.attention_trials(found).items():
        n = graph.nodes[0]
        heads, held = n["q"].type.shape[2], n.caches[0].type.shape[-2]
        yield f"{size}, {heads}/{held}", graph


def row(api: Api, graph: Graph, limits: object, target: str, form: str) -> str:
    """Return what the builder makes of a decode step: for each span, kernels and MiB of copies."""
    settings = {"attention": AUTO, "experts": "auto", "weights": "baked"}
    sizes = {int(n["q"].type.shape[-1]) for n in graph.nodes}
    with tempfile.TemporaryDirectory() as folder:
        log = logger(api.trt, Path(folder) / "log")
        forms = dict.fromkeys(sizes, form)
        w = build.write_network(api, graph, limits, None, settings, log, forms, trial=True)
        config = build.configure(api, w, settings, None, TARGETS[target])
        try:
            build.build_plan(api, w, config, None, Path(folder) / "plan", no_progress)
        except build.RefusedError:
            return "refused"
        finally:
            log.close()
        caches = [v.name for v in graph.state]
        made = compiled(
            (Path(folder) / "log").read_text(errors="replace"), [*w.interface.profiles], caches
        )
    count = len(graph.nodes)
    return ", ".join(
        f"{m.kernels / count:g} ({m.copied_bytes / count / (1 << 20):.1f})"
        for name, m in made.items()
        if name.startswith("decode")
    )


def main() -> None:
    args = arguments(__doc__, "variants", targets=("sm80", "sm89", "sm120"))
    api = require_library(RTX)
    lines = [f"TensorRT-RTX {api.version}, bf16; kernels of each attention (MiB of copies) by span"]
    lines.append(f"{'variant':9} {'heads':12} {'form':9} {'target':7} decode")
    for variant in args.variants.split(","):
        limits = prepare(
            load_spec(variant), BuildOptions(backend="trt", target="rtx", media="none"), dry=True
        ).limits
        for name, graph in kinds(variant):
            for form in FORMS:
                for target in args.targets:
                    found = row(api, graph, limits, target, form)
                    lines.append(f"{variant:9} {name:12} {form:9} {target:7} {found}")
                    print(lines[-1], flush=True)
    finish(args, "rtx-attention", "\n".join(lines))


if __name__ == "__main__":
    main()
