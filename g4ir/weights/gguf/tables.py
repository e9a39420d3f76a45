"""Types of GGUF tensors and the names of llama.cpp's converter, from tables.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from g4ir.model.names import checkpoint_name

TABLES: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
#: divides the frequencies of full layers: the spec's reader looks at it, no graph does
ROPE = "rope_freqs.weight"
#: prefixes of towers' tensors
TOWERS = ("v.", "a.", "mm.")
#: halves of a weight that some files store apart: rows of the first, then those of the second
HALVES = ("ffn_gate_exps.weight", "ffn_up_exps.weight")


@dataclass(frozen=True)
class GgufType:
    """A type: its name, the elements and bytes of a block; the safetensors dtype of plain
    numbers."""

    name: str
    block: int
    nbytes: int
    dtype: str | None = None

    def __str__(self) -> str:
        return self.name


#: code in the file -> type
TYPES = {code: GgufType(*row) for code, row in TABLES["types"].items()}


def known_names(layers: int) -> dict[str, str]:
    """Return name in a GGUF file -> name in a checkpoint, for a model of so many layers; several
    names may lead to one weight."""
    names = {name: checkpoint_name(param) for name, param in TABLES["text"].items()}
    for i in range(layers):
        for name, param in TABLES["layer"].items():
            names[f"blk.{i}.{name}"] = checkpoint_name(f"L{i}.{param}")
    return names


def fused_parts(name: str) -> tuple[str, ...]:
    """Return the names of the matrices whose rows a fused tensor holds; none for another tensor."""
    *layer, own = name.split(".", 2)
    return tuple(".".join((*layer, part)) for part in TABLES["fused"].get(own, ()))
