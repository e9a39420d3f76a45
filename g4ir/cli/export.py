"""`g4ir export`: a model as other programs read it."""

from __future__ import annotations

from typing import Any, Literal

from g4ir.errors import InputError
from g4ir.plan.options import BuildOptions
from g4ir.ui import console

from .common import Source, output
from .verb import Verb, argument, flag, options

CHECKPOINT = "of a checkpoint"


class Export(Verb):
    """Write an engine's or a checkpoint's model as a Hugging Face checkpoint or a GGUF file.

    model MODEL: an engine directory (which need not run here), a checkpoint directory, a GGUF file,
        a Hugging Face id or a variant
    out DIR: output directory; with --format gguf a FILE.gguf, or the directory for one
    format: hf (default): config.json, safetensors, tokenizer
    dtype T: of weights: float32, bfloat16 or float16 (default: the engine's or the checkpoint's);
        with --format gguf: F32, F16, BF16 (default), Q8_0 or Q4_0
    """

    json: bool = False
    model: str | None = argument("?")
    out: str
    format: Literal["hf", "gguf"] = "hf"
    dtype: str | None = None
    options: BuildOptions = options({"": "media", CHECKPOINT: "checkpoint mmproj adapter"})
    source: Source = flag(title=CHECKPOINT)

    def __call__(self) -> int:
        from g4ir.builder.export import export

        o = self.options
        if self.model is not None and o.checkpoint is not None:
            raise InputError("give MODEL or --checkpoint, not both")
        model = self.model or o.checkpoint
        if model is None:
            what = "an engine directory, a checkpoint directory or a GGUF file"
            raise InputError(f"give MODEL: {what}")
        console.spec_warnings()
        how: dict[str, Any] = {"adapter": o.adapter, "mmproj": o.mmproj, "media": o.media}
        how |= {"format": self.format, "dtype": self.dtype}
        with console.Progress() as progress:
            path = export(model, self.out, spec=self.source.load(), progress=progress, **how)
        return output(self.json, {"path": str(path), "format": self.format}, f"{path}\n")
