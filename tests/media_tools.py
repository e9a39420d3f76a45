"""Files of media made on the spot, and a tokenizer with the special tokens of media."""

from __future__ import annotations

import importlib
import inspect
import random
import wave
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import g4ir
from g4ir import Engine, Spec, load_spec
from g4ir.errors import InputError
from g4ir.media import videos
from g4ir.media.videos import Footage
from g4ir.model.media import KINDS
from g4ir.spec.parts import Tokens
from tests.cases import TABLES
from tests.engines import add_file, random_checkpoint
from tests.torchvision_half import find_torchvision

#: as the checkpoints spell them
SPECIAL = TABLES["media tools"]["tokens"]
RATE = 16_000
#: a variant of each kind of model
TOWER, UNIFIED = "e2b", "12b"
PROCESSORS = {
    TOWER: "gemma4.{}_gemma4.Gemma4{}",
    UNIFIED: "gemma4_unified.{}_gemma4_unified.Gemma4Unified{}",
}


@cache
def processor(variant: str, kind: str = "image") -> Any:
    """The reference's processor with its defaults; skips if torchvision is not installed."""
    if not find_torchvision():
        pytest.skip("the reference's processors need torchvision")
    path = PROCESSORS[variant].format(f"{kind}_processing", f"{kind.title()}Processor")
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"transformers.models.{module}"), name)()


def smooth(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Something like a photo: flat areas, edges, a gradient."""
    x, y = np.meshgrid(np.linspace(0, 6, width), np.linspace(0, 4, height))
    waves = [np.sin(x * (c + 1) + y + seed) * 90 + 128 + 60 * (x > 3) for c in range(3)]
    return np.clip(np.stack(waves, -1), 0, 255).astype(np.uint8)


def damaged(data: bytes, draw: random.Random, head: int = 3_000) -> bytes:
    """A copy with up to a dozen other bytes, most of them in its head, every other one cut off."""
    content = bytearray(data)
    for _ in range(draw.randint(0, 12)):
        end = draw.choice((len(data), min(len(data), head), min(len(data), 64)))
        content[draw.randrange(end)] = draw.randrange(256)
    return bytes(content[: draw.choice((len(data), draw.randint(1, len(data))))])


def outlives_damage(read: Callable[[Path], Any], data: bytes, path: Path) -> None:
    """Of 80 copies, cut or with other bytes: one InputError that names the file, or its content."""
    draw = random.Random(path.name)
    for _ in range(80):
        path.write_bytes(damaged(data, draw))
        try:
            assert len(read(path))
        except InputError as e:
            assert str(e).startswith(f"{path}: ")


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def read_video(path: str | Path, frames: int | None = None, fps: float | None = None) -> Any:
    """The frames that `read_footage` prepares, in full resolution, with their times."""
    sample = videos._sample(Path(path), frames, fps)
    pixels = np.stack([*videos._decoded(Path(path), sample)])
    return SimpleNamespace(frames=pixels, rate=sample.rate, seconds=sample.seconds)


def png(path: Path, width: int = 96, height: int = 48, seed: int = 0) -> Path:
    """A picture of noise; the ending decides the format."""
    from PIL import Image

    Image.fromarray(noise(height, width, 3, seed=seed)).save(path)
    return path


def wav(path: Any, samples: int = 4_000, seed: int = 0) -> Any:
    """Noise at 16 kHz, into a path or an open file."""
    values = np.random.default_rng(seed).integers(-8_000, 8_000, samples, dtype=np.int16)
    with wave.open(str(path) if isinstance(path, Path) else path, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(values.tobytes())
    return path


def mp4(path: Path, frames: int = 5, rate: int = 2) -> Path:
    """Frames of 64 x 64 pixels."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for image in noise(frames, 64, 64, 3):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
    return path


def media_tokenizer(tokens: Tokens, size: int) -> tuple[Any, Tokens]:
    """A tokenizer of `size` ids that has the special tokens of `tokens` at their ids, and those
    tokens; where they have none of a kind, the last ids are taken.

    Words may begin before a frame's time and end in it, as a tokenizer that does not split digits
    would have them.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    names = {"pad": "<pad>", "eos": "<eos>", "bos": "<bos>", **SPECIAL}
    last = iter(range(size - 1, 0, -1))
    filled = {k: getattr(tokens, k) for k in SPECIAL}
    filled = {k: next(last) if i is None else i for k, i in filled.items()}
    at = {"pad": 0, "eos": 1, "bos": 2, **filled}
    special = {i: names[k] for k, i in at.items()}
    letters = "abcdefghijklmnopqrstuvwxyz0123456789:.,!?<>|\\\n▁"
    words = iter([*letters, "<unk>", "00", "▁0", "▁00", "▁00:", *(f"w{i}" for i in range(size))])
    vocab = {special[i] if i in special else next(words): i for i in range(size)}
    merges = [("▁", "0"), ("▁0", "0"), ("▁00", ":"), ("0", "0")]
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>"))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Replace("▁", " ")
    made.add_special_tokens(list(special.values()))
    return made, replace(tokens, pad=0, eos=(1,), bos=2, **filled)


def made(folder: Path, variant: str, **options: Any) -> Path:
    """An engine directory by the reference backend."""
    limits = {"max_seq": 640, "prefill_chunk": 128, "backend": "reference", "random_weights": 0}
    g4ir.build(variant, folder, **{**limits, **options}).close()
    return folder


def media_pair(spec: Spec, folder: Path, seed: int, **options: Any) -> tuple[Engine, Any]:
    """An engine of a checkpoint with towers, every tensor random, and transformers' model of it."""
    from transformers import AutoModelForMultimodalLM

    checkpoint = random_checkpoint(folder / "checkpoint", spec, seed, media=KINDS)
    given = {"checkpoint": checkpoint, "backend": "reference", **options}
    engine = g4ir.build(spec, folder / "engine", **given)
    model, loading = AutoModelForMultimodalLM.from_pretrained(
        checkpoint, dtype=torch.float32, output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["mismatched_keys"]
    return engine, model.eval()


def media_engine(folder: Path) -> Path:
    """Takes every kind; it gets the tokenizer that a checkpoint would have brought."""
    made(folder, "tiny-media", max_batch=2, image_budgets=[70, 140])
    spec = load_spec("tiny-media")
    tokenizer, _ = media_tokenizer(spec.tokens, spec.text.vocab_size)
    add_file(folder, "tokenizer.json", tokenizer.to_str())
    return folder


def media_files(folder: Path) -> Path:
    """a.png, b.jpg, c.mp4, d.wav."""
    folder.mkdir(exist_ok=True)
    png(folder / "a.png")
    png(folder / "b.jpg", 48, 96, seed=1)
    mp4(folder / "c.mp4")
    wav(folder / "d.wav")
    return folder


def broken_files(folder: Path) -> Path:
    """These, and more that are not what they should be."""
    media_files(folder)
    (folder / "empty").touch()
    for name in ("a.png", "d.wav", "c.mp4"):
        data = (folder / name).read_bytes()
        (folder / f"cut{Path(name).suffix}").write_bytes(data[: len(data) // 2])
    (folder / "a.wav.mp4").write_bytes((folder / "d.wav").read_bytes())
    wav(folder / "long.wav", 31 * RATE)
    return folder


def video_inputs(model: Any, videos: Sequence[Footage]) -> dict[str, np.ndarray]:
    """What a transformers model takes: videos stacked; since 5.24 all frames along one axis, with
    the number of each video's."""
    counts = "num_frames_per_video"
    flat = counts in inspect.signature(model.forward).parameters
    join = np.concatenate if flat else np.stack
    given = {
        "pixel_values_videos": join([v.patches for v in videos]),
        "video_position_ids": join([v.positions for v in videos]),
    }
    return given | ({counts: np.array([len(v.patches) for v in videos])} if flat else {})
