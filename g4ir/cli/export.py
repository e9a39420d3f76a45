"""`g4ir export`: a model as other programs read it."""

from __future__ import annotations

import argparse

from g4ir.errors import InputError
from g4ir.ui import console

from .common import given_spec, output


def export(args: argparse.Namespace) -> int:
    """Write an engine's or a checkpoint's model as a Hugging Face checkpoint or a GGUF file."""
    from g4ir.builder.export import export

    model = args.model or args.checkpoint
    if model is None:
        raise InputError("give MODEL: an engine directory, a checkpoint directory or a GGUF file")
    console.spec_warnings()
    names = ("format", "adapter", "mmproj", "media", "dtype", "quant")
    how = {name: vars(args)[name] for name in names}
    with console.Progress() as progress:
        path = export(model, args.out, spec=given_spec(args), progress=progress, **how)
    return output(args, {"path": str(path), "format": args.format}, f"{path}\n")
