"""Creates the folder for `vllm serve`: an engine's tokenizer files and chat template, config.json
and generation_config.json.

    python -m g4ir_vllm.prepare ENGINE OUT

The engine directory is neither moved nor changed: digests protect its files.
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
from g4ir.engine.embeddings import need_decoder
from g4ir.engine.engine import TOKENIZER
from g4ir.engine.prompts import read_defaults
from g4ir.errors import EngineError, G4Error, InputError
from g4ir.model.media import placeholders
from g4ir.weights.checkpoint import CONFIG, GENERATION

from .config import ARCHITECTURE, MODEL_TYPE

TOKENIZER_CONFIG = "tokenizer_config.json"
#: files of an engine that vLLM reads; copied if the engine has them
COPIED = (TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json", "chat_template.jinja")
DTYPES = {"f32": "float32", "bf16": "bfloat16"}


def prepare(engine: Path | str, out: Path | str) -> Path:
    """Create the folder `out` and return it. EngineError if the engine cannot be read or has no
    tokenizer; InputError for an encoder, or if `out` exists and is not an empty folder."""
    folder, out = Path(engine).resolve(), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out}: exists and is not an empty folder; name another one")
    artefact = open_artefact(folder)
    need_decoder(artefact.spec, artefact.label)
    if not (folder / TOKENIZER).is_file():
        raise EngineError(
            f"{folder} has no {TOKENIZER}, which vLLM needs; build from a checkpoint with one"
        )
    config = config_of(artefact) | {"engine": os.path.relpath(folder, out.resolve())}
    generation = generation_of(artefact)
    out.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)
    if not (out / TOKENIZER_CONFIG).exists():
        _write(out / TOKENIZER_CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast"})
    _write(out / GENERATION, generation)
    _write(out / CONFIG, config)  # last: vLLM refuses a folder without it
    return out


def config_of(artefact: Artefact) -> dict[str, Any]:
    """Return the config.json of an engine. It has the fields that vLLM requires of every model;
    numbers of layers and heads are placeholders, since vLLM allocates no KV cache."""
    text, limits = artefact.spec.text, artefact.config.limits
    media = placeholders(artefact.spec.tokens, artefact.config.media.kinds)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "dtype": DTYPES[artefact.config.dtype],
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


def generation_of(artefact: Artefact) -> dict[str, Any]:
    """Return the generation_config.json of an engine: stop ids, and the default sampling parameters
    that vLLM reads. Suppressed tokens are not in it: the worker takes them from the engine."""
    defaults = read_defaults(artefact.path / GENERATION, artefact.spec.text.vocab_size)
    stop = artefact.spec.tokens.eos if defaults.stop is None else defaults.stop
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    sampling = {k: defaults.sampling[k] for k in names if k in defaults.sampling}
    return {"eos_token_id": list(stop), "temperature": 0.0, **sampling}


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser("python -m g4ir_vllm.prepare", description=__doc__)
    parser.add_argument("engine", help="an engine directory (g4ir build)")
    parser.add_argument("out", help="directory to create, to be given to `vllm serve` as the model")
    args = parser.parse_args(argv)
    try:
        out = prepare(args.engine, args.out)
    except G4Error as e:
        print(f"g4ir_vllm: error: {e}", file=sys.stderr)
        return e.exit_code
    config = json.loads((out / TOKENIZER_CONFIG).read_bytes())
    if not (config.get("chat_template") or (out / COPIED[-1]).is_file()):
        print("g4ir_vllm: the engine has no chat template; chats need vLLM's --chat-template")
    print(f"g4ir_vllm: created {out}; serve it with: vllm serve {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
