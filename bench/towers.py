"""The towers of a variant, before the prompt: beside transformers eager and compiled, in one run.

    python bench/towers.py [--variant e2b] [--budget 280] [--audio 10] [--dtypes bf16,f32]
                           [--rounds 7] [--device cpu] [--save]

The towers have their full size; the text model behind them is small, since none of it runs. One
image that fills its budget, and a sound that fills its tower. Built into build/bench/. --save
writes bench/results/towers-DEVICE.txt.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import arguments, finish, middle, seconds

import g4ir
from g4ir.bench.measure import interleave
from g4ir.bench.roof import synchronize
from g4ir.media.audio import Waveform, prepare_audio
from g4ir.media.images import prepare_image
from g4ir.model.audio import audio_settings
from g4ir.model.images import image_settings
from g4ir.model.media import KINDS
from g4ir.ops.types import TORCH_NAMES, torch_dtype
from g4ir.spec.parts import FULL, SLIDING
from g4ir.spec.record import Spec, load_spec
from g4ir.ui.table import aligned
from g4ir.weights.random import RandomCheckpoint
from g4ir.weights.write import write_checkpoint

BUILD = Path("build/bench/towers")
MODES = ("g4ir", "eager", "compiled")


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


def build(spec: Spec, dtype: str, args: Any) -> tuple[Any, Any]:
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
        audio_seconds=[args.audio],
        device=args.device,
    )
    model = AutoModelForMultimodalLM.from_pretrained(checkpoint, dtype=torch_dtype(dtype))
    shutil.rmtree(folder / "checkpoint")
    return engine, model.model.eval().to(args.device)


def picture(spec: Spec, budget: int) -> Any:
    """Return the image that fills the most of its budget."""
    settings = image_settings(spec, budget)
    sizes = [(settings.side * n, settings.side * (budget // n)) for n in range(8, 28)]
    width, height = max(sizes, key=lambda s: s[0] * s[1])
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return prepare_image(pixels, settings)


def clip(spec: Spec, length: float) -> Any:
    settings = audio_settings(spec)
    wave = np.random.default_rng(0).standard_normal(round(length * settings.sampling_rate))
    samples = (0.2 * wave).astype(np.float32)
    return prepare_audio(Waveform(samples, settings.sampling_rate), settings)


def row(kind: str, engine: Any, item: Any, features: Any, given: list[Any], args: Any) -> list[str]:
    """Return milliseconds of each, interleaved, how many times faster than the faster peer, and how
    far the results lie apart: the largest difference of a row, relative to its rms."""
    given = [t.to(args.device) for t in given]

    def peer(f: Callable[..., Any]) -> Any:
        with torch.no_grad():
            return f(*given)

    runs = {
        "g4ir": lambda: engine.encode(kind, item),
        "eager": partial(peer, features),
        "compiled": partial(peer, torch.compile(features)),
    }
    (soft,) = runs["g4ir"]().pieces
    wanted = runs["eager"]().pooler_output[0][: len(soft)].float().to(soft.device)
    runs["compiled"]()  # the others ran once already

    def timed(f: Callable[[], Any]) -> float:
        return seconds(lambda: (f(), synchronize(args.device)))

    _, times = interleave(
        args.rounds, lambda: None, {k: partial(timed, f) for k, f in runs.items()}
    )
    found = {k: middle(many, 1e3) for k, many in times.items()}
    best = min(found[p].value for p in MODES[1:]) / found["g4ir"].value
    apart = (soft.float() - wanted).abs().amax(-1) / wanted.pow(2).mean(-1).sqrt()
    ms = (f"{found[k].value:.1f} ± {found[k].spread:.1f}" for k in MODES)
    return [kind, engine.dtype, str(len(soft)), *ms, f"{best:.2f}x", f"{float(apart.max()):.1e}"]


def rows_of(args: Any, dtype: str) -> list[list[str]]:
    spec = with_small_text(load_spec(args.variant))
    engine, model = build(spec, dtype, args)
    image, sound = picture(spec, args.budget), clip(spec, args.audio)
    seen, heard = (
        [torch.from_numpy(a)[None] for a in arrays]
        for arrays in ((image.patches, image.positions), (sound.features, sound.mask))
    )
    heard[0] = heard[0].to(torch_dtype(dtype))
    return [
        row("image", engine, image, model.get_image_features, seen, args),
        row("audio", engine, sound, model.get_audio_features, heard, args),
    ]


def main() -> None:
    flags: dict[str, Any] = {"variant": "e2b", "budget": 280, "audio": 10.0, "device": "cpu"}
    args = arguments(__doc__, **flags, dtypes=("bf16", "f32"), rounds=7)
    rows = [found for dtype in args.dtypes for found in rows_of(args, dtype)]
    head = ["tower", "dtype", "tokens", *(f"{k} ms" for k in MODES), "speed-up", "difference"]
    finish(args, f"towers-{args.device}", aligned([head, *rows], indent=0), args.device)


if __name__ == "__main__":
    main()
