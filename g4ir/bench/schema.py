"""The form of a report, as a JSON Schema, and the check that a reader makes.

Keys in vLLM's names (request_throughput, mean_ttft_ms, ...) are about the first engine and are
null where its outputs disagree with what it was compared with. `runs` holds every runner with its
raw samples: `samples_ms.ttft[round][request]`, `samples_ms.itl[round][request][step]`. A stat is
{value, spread}; see stats.py for what the spread is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import InputError

#: counts up when a key changes its meaning or goes away
VERSION = 1
KIND = "g4ir bench"
LATENCIES = ("ttft", "tpot", "itl", "e2el")
THROUGHPUTS = ("request_throughput", "output_throughput", "total_token_throughput")
VLLM_STATISTICS = {"mean": "mean", "median": "p50", "p99": "p99"}

_STAT = {
    "type": "object",
    "required": ["value", "spread"],
    "properties": {"value": {"type": "number"}, "spread": {"type": "number", "minimum": 0}},
    "additionalProperties": False,
}
_STATS = {"type": "object", "additionalProperties": _STAT}
_NUMBER = {"type": ["number", "null"]}
_NUMBERS = {"type": "object", "additionalProperties": {"type": "number"}}
_SAMPLES: dict[str, Any] = {"type": "array", "items": {"type": "array"}}


def _record(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "type": "object",
        "required": list(required),
        "additionalProperties": False,
        "properties": {**required, **(optional or {})},
    }


_COUNT = {"type": "integer", "minimum": 0}
_TEXT = {"type": "string"}
_WORKLOAD = _record(
    {
        "input_len": {"type": "integer", "minimum": 1, "description": "tokens of a prompt"},
        "output_len": {"type": "integer", "minimum": 2, "description": "choices per row, exactly"},
        "batch": {"type": "integer", "minimum": 1, "description": "rows"},
        "context": {
            "type": "integer",
            "minimum": 0,
            "description": "tokens held before the prompt",
        },
        "seed": {"type": "integer", "minimum": 0, "description": "of the tokens"},
        "text": {"type": ["string", "null"], "description": "the file the tokens come from"},
        "rounds": {"type": "integer", "minimum": 2},
        "requests_per_round": {"type": "integer", "minimum": 1},
        "warmup": {"type": "integer", "minimum": 0, "description": "requests before the rounds"},
    }
)
_AGREEMENT = _record(
    {
        "role": _TEXT,
        "base": _TEXT,
        "count": _COUNT,
        "cosine": _NUMBER,
        "relative": _NUMBER,
        "equal": _COUNT,
        "close": _COUNT,
        "ok": {"type": "boolean"},
        "budget": _TEXT,
    },
    {
        "distance_median": _NUMBER,
        "distance_worst": _NUMBER,
        "base_median": _NUMBER,
        "base_worst": _NUMBER,
    },
)
_ROOF = _record(
    {
        "read_bytes_per_s": _STAT,
        "copy_bytes_per_s": _STAT,
        "matmul_flops_per_s": _STAT,
        "matmul_dtype": _TEXT,
        "samples": {"type": "array", "items": _NUMBERS, "description": "one for each round"},
    }
)
_ENGINE = _record(
    {
        "manifest": {"type": "string", "description": "digest of the manifest"},
        "dtype": _TEXT,
        "backend": _TEXT,
        "device": _TEXT,
        "weights": _TEXT,
        "skipped_passes": {"type": "array", "items": _TEXT},
        "limits": {"type": "object"},
    }
)
_COST = _record(
    {
        "flops": _COUNT,
        "weight_bytes": _COUNT,
        "state_bytes": _COUNT,
        "other_bytes": _COUNT,
        "floor_ms": {"type": "number", "description": "at the measured roof"},
        "bound": {"enum": ["memory", "compute"]},
    }
)
_BREAKDOWN = _record(
    {
        "parts_ms": _NUMBERS,
        "kinds_ms": _NUMBERS,
        "kinds": _TEXT,
        "whole_ms": {"type": "number"},
    }
)
_ENGINE_ONLY = {
    "engine": _ENGINE,
    "work": _record({"prefill": _COST, "decode": _COST, "experts": {"type": ["object", "null"]}}),
    "mbu": {**_STAT, "description": "bytes of a decode step / p50 ITL / measured bandwidth"},
    "mfu": {**_STAT, "description": "FLOPs of a prompt / p50 TTFT / measured matmul rate"},
    "roof_ratio": _record({"prefill": _STAT, "decode": _STAT}),
    "calls_per_step": _NUMBERS,
    "breakdown": _BREAKDOWN,
    "cache_bytes": _COUNT,
    "param_bytes": _COUNT,
}
_RUN = _record(
    {
        "role": _TEXT,
        "label": _TEXT,
        "void": {"type": "boolean", "description": "its outputs agree with nobody's"},
        "samples_ms": _record({"ttft": _SAMPLES, "itl": _SAMPLES}),
        "stats": _record({f"{k}_ms": _STATS for k in LATENCIES}),
        "tokens_per_s": _STATS,
        "setup_s": {"type": "object", "additionalProperties": _NUMBER},
        "peak_memory": {"type": "object", "additionalProperties": {"type": "integer"}},
    },
    _ENGINE_ONLY,
)
_SPEEDUP = _record({"over": _TEXT, "prefill": _STAT, "decode": _STAT, "e2e": _STAT})

SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "report of g4ir bench",
    **_record(
        {
            "kind": {"const": KIND},
            "schema": {"type": "integer", "const": VERSION},
            "date": _TEXT,
            "backend": _TEXT,
            "model_id": _TEXT,
            "num_prompts": _COUNT,
            "max_concurrency": _COUNT,
            **dict.fromkeys(THROUGHPUTS, _NUMBER),
            **{f"{s}_{k}_ms": _NUMBER for k in LATENCIES for s in VLLM_STATISTICS},
            "workload": _WORKLOAD,
            "env": {"type": "object", "required": ["torch", "g4ir", "commit", "cores"]},
            "roof": _ROOF,
            "mbu": _NUMBER,
            "mfu": _NUMBER,
            "roof_ratio": {"type": "object", "additionalProperties": _NUMBER},
            "outputs_agree": {"type": "boolean"},
            "agreement": {"type": "array", "items": _AGREEMENT, "minItems": 1},
            "peer": {"type": ["string", "null"], "description": "the fastest one in decode"},
            "speedup": {
                "type": "object",
                "additionalProperties": {"anyOf": [_SPEEDUP, {"type": "null"}]},
                "description": "of the first engine over each other runner; null where void",
            },
            "runs": {"type": "array", "items": _RUN, "minItems": 1},
            "notes": {"type": "array", "items": _TEXT},
        }
    ),
}


def read_report(file: str | Path) -> dict[str, Any]:
    """A report of this version; InputError names the file, what was found and what is expected."""
    try:
        report = json.loads(Path(file).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as e:
        raise InputError(f"{file}: no JSON: {e}") from e
    if not isinstance(report, dict) or report.get("kind") != KIND:
        raise InputError(f'{file}: no report of g4ir bench (key "kind" is not {KIND!r})')
    if report.get("schema") != VERSION:
        raise InputError(
            f"{file}: report of schema version {report.get('schema')!r}, expected {VERSION}; "
            f"run `g4ir bench` again with this g4ir"
        )
    check(report, SCHEMA, f"{file}: ")
    return report


_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
}


def check(value: Any, schema: dict[str, Any], path: str = "") -> None:
    """InputError naming the key where a value is not of the form: the keywords that SCHEMA uses."""
    if "anyOf" in schema:
        return _check_any(value, schema["anyOf"], path)
    if problem := _problem(value, schema):
        raise InputError(f"{path}{problem}")
    if isinstance(value, dict):
        rest = schema.get("additionalProperties", {})
        for key, inner in value.items():
            check(inner, schema.get("properties", {}).get(key, rest), f"{path}{key}: ")
    if isinstance(value, list):
        for i, inner in enumerate(value):
            check(inner, schema.get("items", {}), f"{path}{i}: ")
    return None


def _check_any(value: Any, forms: list[dict[str, Any]], path: str) -> None:
    """The error of the first form, where none fits."""
    errors = []
    for form in forms:
        try:
            return check(value, form, path)
        except InputError as e:
            errors.append(e)
    raise errors[0]


def _problem(value: Any, schema: dict[str, Any]) -> str | None:
    """What is wrong with a value itself, whatever it holds."""
    shown = repr(value)[:40]
    kinds = schema.get("type", ())
    if kinds and not _is_one_of(value, [kinds] if isinstance(kinds, str) else kinds):
        return f"found {shown}, expected {kinds if isinstance(kinds, str) else kinds[0]}"
    allowed = [schema["const"]] if "const" in schema else schema.get("enum", [value])
    if value not in allowed:
        return f"found {shown}, expected {' or '.join(map(repr, allowed))}"
    if "minimum" in schema and value < schema["minimum"]:
        return f"found {shown}, expected at least {schema['minimum']}"
    if "minItems" in schema and len(value) < schema["minItems"]:
        return f"expected at least {schema['minItems']} items"
    return _key_problem(value, schema) if isinstance(value, dict) else None


def _key_problem(value: dict[str, Any], schema: dict[str, Any]) -> str | None:
    known = schema.get("properties", {})
    missing = [key for key in schema.get("required", ()) if key not in value]
    if missing:
        return f"key {missing[0]!r} is missing"
    extra = [key for key in value if key not in known]
    if extra and schema.get("additionalProperties") is False:
        return f"unknown key {extra[0]!r}"
    return None


def _is_one_of(value: Any, kinds: list[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in kinds
    return isinstance(value, tuple(t for kind in kinds for t in _TYPES[kind]))
