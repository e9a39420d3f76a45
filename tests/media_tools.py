"""Files of media made on the spot, and a tokenizer with the special tokens of media."""

from __future__ import annotations

import wave
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from g4ir.spec.parts import Tokens

#: as the checkpoints spell them
SPECIAL = {
    "image": "<|image|>",
    "video": "<|video|>",
    "audio": "<|audio|>",
    "boi": "<|image>",
    "eoi": "<image|>",
    "boa": "<|audio>",
    "eoa": "<audio|>",
}
RATE = 16_000


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def png(path: Path, width: int = 96, height: int = 48, seed: int = 0) -> Path:
    """A picture of noise; the ending decides the format."""
    from PIL import Image

    Image.fromarray(noise(height, width, 3, seed=seed)).save(path)
    return path


def wav(path: Path, samples: int = 4_000, seed: int = 0) -> Path:
    """Noise at 16 kHz."""
    values = np.random.default_rng(seed).integers(-8_000, 8_000, samples, dtype=np.int16)
    with wave.open(str(path), "wb") as file:
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
