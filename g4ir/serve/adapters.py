"""LoRA adapters of a served model: the actions of the endpoints that load and remove them, with
vLLM's paths and fields (https://docs.vllm.ai/en/latest/features/lora.html)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from g4ir.engine.adapters import Adapters
from g4ir.engine.engine import Engine

from . import request_schema as schema
from .http_errors import Refused

#: action(adapters, fields, folders) -> message for the client
Action = Callable[[Adapters, Mapping[str, Any], Sequence[Path]], str]


def load(adapters: Adapters, fields: Mapping[str, Any], folders: Sequence[Path]) -> str:
    """Load the adapter directory `lora_path` under the name `lora_name` and return a message;
    `load_inplace`: replace an adapter of that name. Refused for a path outside of `folders`, so
    that clients cannot read arbitrary files; InputError and WeightsError of `Adapters.load`."""
    name = schema.TEXT(fields.get("lora_name"), "lora_name")
    path = Path(schema.TEXT(fields.get("lora_path"), "lora_path"))
    if not any(path.resolve().is_relative_to(f.resolve()) for f in folders):
        why = "is neither below the parent folder of an --adapter nor below --set adapter_dir"
        raise Refused(403, f"lora_path: {str(path)[:200]!r} {why}", param="lora_path")
    adapters.load(name, path, schema.FLAG(fields.get("load_inplace") or False, "load_inplace"))
    return f"LoRA adapter {name!r} was loaded"


def unload(adapters: Adapters, fields: Mapping[str, Any], folders: Sequence[Path]) -> str:
    """Remove the adapter `lora_name` and return a message; running requests that use it finish.
    Refused (404) if it is not loaded."""
    name = schema.TEXT(fields.get("lora_name"), "lora_name")
    if name not in adapters.loaded:
        message = f"lora_name: no adapter {name[:80]!r} is loaded"
        raise Refused(404, message, param="lora_name", code="model_not_found")
    adapters.unload(name)
    return f"LoRA adapter {name!r} was removed"


def adapters_of(engine: Engine) -> Adapters:
    """Return an engine's adapters; Refused if it has no adapter slots."""
    if engine.adapters is None:
        message = "this server has no adapters: serve this model alone, with --adapter"
        message += " or --set adapter_slots=4"
        raise Refused(400, message, code="not_supported")
    return engine.adapters
