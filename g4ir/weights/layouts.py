"""Names that other tools give a checkpoint's tensors, as transformers writes them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from g4ir.errors import WeightsError

from .tensorfile import DOWNLOAD, quoted

T = TypeVar("T")

#: part of a name -> what stands there in transformers' names
RENAMED = tuple(
    (re.compile(pattern), to)
    for pattern, to in (
        (r"(?:^|(?<=\.))_orig_mod\.", ""),  # torch.compile, of the model or of a part of it
        (r"^(?:module|base_model\.model)\.", ""),  # DistributedDataParallel, PEFT
        (r"^(?:model\.)?language_model\.model\.", "language_model."),  # MLX
        (r"^(?:model\.)?(?:language_model\.)?lm_head\.", "lm_head."),  # MLX, older transformers
    )
)
#: buffers that follow from the spec
COMPUTED = re.compile(r"(?:^|\.)(?:rotary_emb\w*\.\w*inv_freq|embed_scale|inv_timescales)$")
#: tensors of an adapter that was not merged
ADAPTER = re.compile(r"\.(?:base_layer|lora_\w+|modules_to_save)\.|\.lora_magnitude_vector")

#: experts as MLX stores them, gate and up apart
MLX_EXPERTS = ".switch_glu."


def plain_name(name: str) -> str:
    """Return the name, or prefix of names, that transformers gives the same tensor."""
    before = ""
    while before != name:  # one tool may wrap what another has wrapped
        before = name
        for pattern, to in RENAMED:
            name = pattern.sub(to, name)
    return name


def by_plain_name(place: object, names: Iterable[tuple[str, T]]) -> Mapping[str, T]:
    """Return tensors by their plain names; WeightsError for two of one name."""
    out: dict[str, T] = {}
    stored: dict[str, str] = {}
    for name, found in names:
        plain = plain_name(name)
        if plain in out:
            raise WeightsError(
                f"{place}: {quoted(stored[plain])} and {quoted(name)} are the same tensor; "
                f"{DOWNLOAD}"
            )
        out[plain], stored[plain] = found, name
    return out
