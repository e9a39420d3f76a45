"""The towers of a variant, before the prompt: beside transformers eager and compiled, in one run.

    python bench/towers.py [--variant e2b] [--budget 280] [--seconds 10] [--dtypes bf16,f32]
                           [--rounds 7] [--device cpu] [--save]

The towers have their full size; the text model behind them is small, since none of it runs. One
image that fills its budget, and a sound that fills its tower. Built into build/bench/.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import save, seconds

import g4ir
from g4ir.bench.measure import interleave
from g4ir.bench.stats import around, median
from g4ir.media.audio import Waveform, prepare_audio
from g4ir.media.images import prepare_image
from g4ir.model.images import image_settings
from g4ir.model.media import KINDS
from g4ir.model.sounds import audio_settings
from g4ir.ops.types import TORCH_NAMES, torch_dtype
from g4ir.spec.parts import FULL, SLIDING
from g4ir.spec.record import Spec, load_spec
from g4ir.ui.table import aligned
from g4ir.weights.random import RandomCheckpoint
from g4ir.weights.write import write_checkpoint

BUILD = Path("build/bench/towers")
PEERS = ("eager", "compiled")
MODES = ("g4ir", *PEERS)


def with_small_text(spec: Spec) -> Spec:
    """Return the spec with the same towers before two narrow layers and a small vocabulary."""
    text = replace(
        spec.text,
        vocab_size=512,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=1,
        pattern=(SLIDING, FULL),
        num_kv_shared_layers=0,
        sliding=replace(spec.text.sliding, head_dim=16, num_key_value_heads=1),
        full=replace(spec.text.full, head_dim=16, num_key_value_heads=1),
        ple=None,
        moe=None,
    )
    ids = {"image": 500, "video": 501, "audio": 502, "boi": 503, "eoi": 504, "boa": 505, "eoa": 506}
    tokens = replace(spec.tokens, bos=2, eos=(1,), pad=0, **ids)
    return replace(spec, name=f"{spec.name}-towers", hub=None, text=text, tokens=tokens)


def build(spec: Spec, dtype: str, args: argparse.Namespace) -> tuple[Any, Any]:
    """Build the engine and the reference model, from one checkpoint."""
    from transformers import AutoModelForMultimodalLM

    folder = BUILD / f"{spec.name}-{dtype}-{args.device}"
    shutil.rmtree(folder, ignore_errors=True)
    source = RandomCheckpoint(spec, 0, torch_dtype(dtype))
    checkpoint = write_checkpoint(folder / "checkpoint", spec, source, media=KINDS)
    engine = g4ir.build(
        spec,
        folder / "engine",
        checkpoint=checkpoint,
        dtype=TORCH_NAMES[dtype],
        max_seq=64,
        prefill_chunk=16,
        media=("image", "audio"),
        image_budgets=[args.budget],
        audio_seconds=[args.seconds],
        device=args.device,
    )
    model = AutoModelForMultimodalLM.from_pretrained(checkpoint, dtype=torch_dtype(dtype))
    shutil.rmtree(folder / "checkpoint")
    return engine, model.model.eval().to(args.device)


def picture(spec: Spec, budget: int) -> Any:
    """Return the image that fills the most of its budget."""
    settings = image_settings(spec, budget)
    rng = np.random.default_rng(0)
    sizes = [(settings.side * n, settings.side * (budget // n)) for n in range(8, 28)]
    width, height = max(sizes, key=lambda s: s[0] * s[1])
    return prepare_image(rng.integers(0, 256, (height, width, 3), dtype=np.uint8), settings)


def clip(spec: Spec, seconds: float) -> Any:
    settings = audio_settings(spec)
    count = round(seconds * settings.sampling_rate)
    wave = 0.2 * np.random.default_rng(0).standard_normal(count)
    return prepare_audio(Waveform(wave.astype(np.float32), settings.sampling_rate), settings)


def tensors(*arrays: Any) -> list[torch.Tensor]:
    return [torch.from_numpy(a)[None] for a in arrays]


def peers(
    features: Callable[..., Any], given: list[torch.Tensor], device: str
) -> dict[str, Callable[[], Any]]:
    """Return the reference's own two modes."""
    compiled = torch.compile(features)

    def run(f: Callable[..., Any]) -> Any:
        with torch.no_grad():
            return f(*(t.to(device) for t in given))

    return {"eager": partial(run, features), "compiled": partial(run, compiled)}


def timed(f: Callable[[], Any]) -> float:
    """Measure the seconds of `f`, all work of a GPU done."""

    def call() -> None:
        f()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return seconds(call)


def measure(
    kind: str, engine: Any, item: Any, theirs: dict[str, Callable[[], Any]], rounds: int
) -> list[str]:
    """Return lines: milliseconds of each, interleaved, how many times faster than the faster peer,
    and how far the results lie apart."""
    runs = {"g4ir": lambda: engine.encode(kind, item), **theirs}
    (soft,) = runs["g4ir"]().pieces
    rows = runs["eager"]().pooler_output[0][: len(soft)].float()
    runs["compiled"]()  # the others ran once already
    _, times = interleave(rounds, lambda: None, {k: partial(timed, f) for k, f in runs.items()})
    found = {k: around(median(many) * 1e3, [t * 1e3 for t in many]) for k, many in times.items()}
    best = min(found[p].value for p in PEERS) / found["g4ir"].value
    apart = float(relative(soft.float(), rows.to(soft.device)).max())
    ms = (f"{found[k].value:.1f} ± {found[k].spread:.1f}" for k in MODES)
    return [kind, engine.dtype, str(len(soft)), *ms, f"{best:.2f}x", f"{apart:.1e}"]


def relative(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the largest difference of each row, relative to its rms."""
    return (got - wanted).abs().amax(-1) / wanted.pow(2).mean(-1).sqrt()


def rows_of(args: argparse.Namespace, dtype: str) -> list[list[str]]:
    spec = with_small_text(load_spec(args.variant))
    engine, model = build(spec, dtype, args)
    image, sound = picture(spec, args.budget), clip(spec, args.seconds)
    kind = torch_dtype(dtype)
    seen = tensors(image.patches, image.positions)
    heard = tensors(sound.features, sound.mask)
    heard[0] = heard[0].to(kind)
    theirs = {
        "image": peers(model.get_image_features, seen, args.device),
        "audio": peers(model.get_audio_features, heard, args.device),
    }
    items = {"image": image, "audio": sound}
    return [measure(k, engine, items[k], theirs[k], args.rounds) for k in items]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", default="e2b")
    parser.add_argument("--budget", type=int, default=280)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--dtypes", default="bf16,f32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--save", action="store_true", help="write bench/results/towers-DEVICE.txt")
    args = parser.parse_args()
    rows = [row for dtype in args.dtypes.split(",") for row in rows_of(args, dtype)]
    head = ["tower", "dtype", "tokens", *(f"{k} ms" for k in MODES), "speed-up", "difference"]
    text = aligned([head, *rows], indent=0)
    print(text, end="")
    if args.save:
        save(f"towers-{args.device}", text, args.device)


if __name__ == "__main__":
    main()
