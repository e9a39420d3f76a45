"""Makes the folder that `vllm serve` is given: an engine's tokenizer files, and a config.json.

    python -m g4ir_vllm.prepare ENGINE OUT

The engine stays where it is, and as it is: its folder is sealed by digests.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from g4ir.artefact.directory import Artefact, open_artefact
from g4ir.engine.engine import TOKENIZER
from g4ir.engine.prompts import read_defaults
from g4ir.errors import EngineError, G4Error, InputError
from g4ir.model.media import placeholders
from g4ir.weights.checkpoint import CONFIG, GENERATION

from .config import ARCHITECTURE, MODEL_TYPE

TOKENIZER_CONFIG = "tokenizer_config.json"
#: what vLLM reads beside the files that are made here
COPIED = (TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json", "chat_template.jinja")
DTYPES = {"f32": "float32", "bf16": "bfloat16"}


def prepare(engine: Path | str, out: Path | str) -> Path:
    """Make the folder `out`, and return it. EngineError where the engine cannot be read or has no
    tokenizer, InputError where `out` holds something already."""
    folder, out = Path(engine).resolve(), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out}: exists and is not empty; name another folder")
    found = open_artefact(folder)
    if not (folder / TOKENIZER).is_file():
        raise EngineError(f"{folder} has no {TOKENIZER}: vLLM cannot serve it")
    config = config_of(found) | {"engine": os.path.relpath(folder, out.resolve())}
    generation = generation_of(found)
    out.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)
    if not (out / TOKENIZER_CONFIG).exists():
        _write(out / TOKENIZER_CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast"})
    _write(out / GENERATION, generation)
    _write(out / CONFIG, config)  # last: a folder without it is refused
    return out


def config_of(found: Artefact) -> dict[str, Any]:
    """Return the config.json of an engine. Of the model it says only what vLLM asks each for: a
    block of vLLM's is a row of the engine, and no shape of a cache counts."""
    text, limits = found.spec.text, found.config.limits
    media = placeholders(found.spec.tokens, found.config.media.kinds)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "dtype": DTYPES[found.config.dtype],
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": text.hidden_size,
        "max_position_embeddings": limits.max_seq,
        "max_batch": limits.max_batch,
        "prefill_chunk": limits.prefill_chunk,
        "media_ids": sorted(media.values()),
    }


def generation_of(found: Artefact) -> dict[str, Any]:
    """Return the generation_config.json of an engine: what ends an answer, and how one is drawn
    where a request does not say. What is never drawn the worker knows from the engine itself."""
    said = read_defaults(found.path / GENERATION, found.spec.text.vocab_size)
    stop = found.spec.tokens.eos if said.stop is None else said.stop
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # vLLM knows no others
    drawn = {k: said.sampling[k] for k in names if k in said.sampling}
    return {"eos_token_id": list(stop), "temperature": 0.0, **drawn}


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n")


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser("python -m g4ir_vllm.prepare", description=__doc__)
    parser.add_argument("engine", help="an engine directory (g4ir build)")
    parser.add_argument("out", help="a new folder: what `vllm serve` is given")
    given = parser.parse_args(words)
    try:
        out = prepare(given.engine, given.out)
    except G4Error as e:
        print(f"g4ir_vllm: error: {e}", file=sys.stderr)
        return e.exit_code
    if not any((out / name).is_file() for name in COPIED[-1:]):
        print("g4ir_vllm: the engine has no chat_template.jinja; chats need vLLM's --chat-template")
    print(f"g4ir_vllm: made {out}; serve it with: vllm serve {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
