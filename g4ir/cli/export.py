"""`g4ir export`: writes a model in a format that other programs read."""

from __future__ import annotations

from typing import Any, Literal

from g4ir.plan.options import BuildOptions
from g4ir.spec.record import load_spec
from g4ir.ui import console

from .common import output
from .verb import ANY_MODEL, Verb, argument, flag, json_flag, options


class Export(Verb):
    """Write an engine's or a checkpoint's model as a Hugging Face checkpoint or a GGUF file."""

    model: str = argument(ANY_MODEL, "MODEL")
    out: str = flag("output directory; with --format gguf also a file", None, "DIR", required=True)
    format: Literal["hf", "gguf"] = flag("hf: config.json, safetensors, tokenizer (default)", "hf")
    dtype: str | None = flag(
        "float32, bfloat16, float16 (default: MODEL's); gguf: F32, F16, BF16 (default), Q8_0, Q4_0",
        None,
        "T",
    )
    options: BuildOptions = options("media mmproj adapter")
    spec: str | None = flag("variant or file, if a checkpoint's config is incomplete", None, "F")
    json: bool = json_flag()

    def __call__(self) -> int:
        from g4ir.builder.export import export

        o = self.options
        console.spec_warnings()
        how: dict[str, Any] = {"adapter": o.adapter, "mmproj": o.mmproj, "media": o.media}
        how |= {"format": self.format, "dtype": self.dtype}
        with console.Progress() as progress:
            spec = None if self.spec is None else load_spec(self.spec)
            path = export(self.model, self.out, spec=spec, progress=progress, **how)
        return output(self.json, {"path": str(path), "format": self.format}, f"{path}\n")
