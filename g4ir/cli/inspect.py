"""`g4ir inspect`: prints the origin of an engine, or the metadata of a model."""

from __future__ import annotations

from collections import Counter

from g4ir.artefact.trust import provenance
from g4ir.model.media import supported_media
from g4ir.ops.types import TORCH_NAMES
from g4ir.quant.rewrite import schemes_of

from .common import print_facts
from .models import Model, named_model
from .verb import ANY_MODEL, Verb, argument, json_flag


class Inspect(Verb):
    """Print the origin of an engine, or the metadata of a model."""

    engine: str = argument(ANY_MODEL, "MODEL")
    json: bool = json_flag()

    def __call__(self) -> int:
        model = named_model(self.engine)
        facts = provenance(model.engine) if model.engine else _stated(self.engine, model)
        return print_facts(self.json, facts, width=14)


def _stated(word: str, model: Model) -> dict[str, str]:
    """Return {name: text} of the metadata of a model that is not an engine."""
    spec = model.spec
    forms = Counter(s.form for s in schemes_of(model.quant, spec).values())
    return {
        "model": word,
        "variant": f"{spec.name} ({spec.hub or 'no hub id'})",
        "digest": spec.digest(),
        "layers": str(spec.text.num_hidden_layers),
        "positions": str(spec.text.max_position_embeddings),
        "takes": ", ".join(("text", *supported_media(spec))),
        "dtype": TORCH_NAMES[spec.dtype],
        "quantised": ", ".join(f"{n} {fmt}" for fmt, n in forms.items()) or "none",
        "engine": "none: verbs that run one build it on first use",
    }
