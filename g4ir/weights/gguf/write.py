"""Writes a text model as a GGUF file, for llama.cpp and for `gguf.checkpoint`.

Matrices have one type, or F16 if its blocks do not divide their rows. Quantised ones keep their
codes if the type has the same ones, and scales are per row or per multiple of 32 values. Tables and
the head have at least 8 bits; routers and vectors are F32. A spec that GGUF metadata cannot express
is refused: the metadata are read back and compared before any weight is written.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from g4ir.errors import InputError, SpecError, WeightsError
from g4ir.model.names import CODES, NORM, SCALES, checkpoint_name
from g4ir.model.tensors import text_tensors
from g4ir.ops.codecs import SAME_CODES, quantize_values, unpack_codes
from g4ir.ops.finite import cast
from g4ir.ops.layouts import LAYOUTS
from g4ir.ops.types import dtype_name, torch
from g4ir.spec.parts import SLIDING
from g4ir.spec.record import Spec, diff_specs
from g4ir.ui.files import check_disk_space, check_folder, write_file
from g4ir.ui.progress import Progress, no_progress
from g4ir.weights.checkpoint import GENERATION, Checkpoint
from g4ir.weights.tensorfile import bytes_of, parse_json
from g4ir.weights.write import PIECE, in_pieces

from .blocks import CODED
from .container import (
    ALIGNMENT,
    ARRAY,
    BOOL,
    MAGIC,
    MAX_FLOAT,
    ROPE,
    SCALARS,
    STRING,
    TABLES,
    TYPES,
    VERSIONS,
    checkpoint_names,
    read_container,
)
from .metadata import (
    BOTH_WAYS,
    CONTROL,
    DRAWN,
    LAST_N,
    NO_TOP_K,
    POOLED_BY_MEAN,
    PREFIX,
    SAMPLING,
    SCORED,
    SETTINGS,
    TEMPLATE,
    UNROTATED,
    UNSAID,
    USER_DEFINED,
    read_spec,
)

#: file kind -> general.file_type, tensor type of tables and the head
WRITTEN: dict[str, tuple[int, str]] = {name: (i, of) for name, (i, of) in TABLES["written"].items()}
#: Python type of a value -> GGUF type
_KINDS: dict[type, int] = {bool: BOOL, int: 4, float: 6, str: STRING}
_INT32 = 5
_CODE = {t.name: code for code, t in TYPES.items()}
TOP_K, REPEAT = f"{SAMPLING}top_k", f"{SAMPLING}penalty_repeat"
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
#: token types, in addition to CONTROL and USER_DEFINED
NORMAL, UNKNOWN, UNUSED, BYTE = 1, 2, 5, 6


def write_gguf(
    path: Path,
    spec: Spec,
    source: Checkpoint,
    kind: str,
    side_files: Mapping[str, bytes],
    progress: Progress = no_progress,
) -> Path:
    """Write a text model with tokenizer, chat template and generation defaults, atomically; `kind`:
    a key of WRITTEN. SpecError if GGUF cannot express the spec, InputError if the path exists or
    the disk has no room."""
    check_folder(path.parent)
    if path.exists() or path.is_symlink():
        raise InputError(f"{path}: exists already; choose another --out")
    tensors = [*_tensors(spec, source, kind)]
    head = _head(_metadata(spec, kind, side_files), tensors)
    size = len(head) + sum(t.aligned_nbytes for t in tensors)
    rope = (piece for t in tensors if t.name == ROPE for piece in t.pieces())
    _check(path.name, spec, [head, *rope], size)
    check_disk_space(path, size)
    path.parent.mkdir(parents=True, exist_ok=True)
    progress(f"writing {path.name}")
    write_file(path, [head], (piece for t in tensors for piece in t.pieces()))
    return path


@dataclass(frozen=True)
class _Tensor:
    """A tensor of a file; `kind`: its GGUF type; `rows` yields its data, a few rows at a time."""

    name: str
    kind: str
    shape: tuple[int, ...]
    rows: Callable[[], Iterator[torch.Tensor]]

    @property
    def nbytes(self) -> int:
        stored = TYPES[_CODE[self.kind]]
        return prod(self.shape) // stored.block * stored.nbytes

    @property
    def aligned_nbytes(self) -> int:
        """Bytes in the file, padded to ALIGNMENT."""
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT

    def pieces(self) -> Iterator[memoryview]:
        for rows in self.rows():
            yield bytes_of(rows)
        yield memoryview(bytes(self.aligned_nbytes - self.nbytes))


def architecture_of(spec: Spec) -> str:
    """Return general.architecture of a spec; SpecError for a draft model, or a spec that has
    none."""
    rules = TABLES["architectures"]
    of = [name for name, rule in rules.items() if rule.get("of") == spec.model_type]
    name: str = of[0] if of else spec.model_type.partition("_")[0]
    if name not in rules or spec.drafter:
        msg = f"a model of model_type {spec.model_type} cannot be written as a GGUF file"
        raise SpecError(f"spec {spec.name}: {msg}; give --format hf")
    return name


# --- tensors ----------------------------------------------------------------------------------


def _tensors(spec: Spec, source: Checkpoint, kind: str) -> Iterator[_Tensor]:
    """Yield the tensors, RoPE frequencies first if the file has them: `read_spec` needs no other
    tensor's data."""
    rules = _rules(spec)
    names = checkpoint_names(spec.text.num_hidden_layers, rules)
    stored = {bare: name for name, bare in reversed(names.items())}
    if rules.keys().isdisjoint(("alike", "rope")):
        pairs = spec.text.full.head_dim // 2
        rotated = int(spec.text.full.rope.rotary_fraction * pairs)
        ones = torch.tensor([1.0] * rotated + [UNROTATED] * (pairs - rotated))
        yield _Tensor(ROPE, "F32", (pairs,), lambda: iter([ones]))
    for bare, shape in text_tensors(spec).items():
        if bare not in source.defaults:
            tensor_kind = _kind(bare, shape, kind)
            added = rules.get("norms", 0.0) if NORM.fullmatch(bare) else 0.0
            rows = partial(_rows, source, bare, shape, tensor_kind, added)
            yield _Tensor(stored[bare], tensor_kind, shape, rows)


def _rules(spec: Spec) -> dict[str, Any]:
    return TABLES["architectures"][architecture_of(spec)]


def _kind(bare: str, shape: tuple[int, ...], kind: str) -> str:
    if len(shape) < 2 or ".router." in bare:
        return "F32"
    kind = WRITTEN[kind][1] if bare in _TABLES else kind
    return kind if shape[-1] % TYPES[_CODE[kind]].block == 0 else "F16"


_TABLES = [checkpoint_name(param) for param in ("embed.table", "ple.table", "head.w", "ple.w")]
#: type -> scheme of its blocks
_BLOCKS = {kind: CODED[kind].scheme for kind in WRITTEN if kind in CODED}
_DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _rows(
    source: Checkpoint, bare: str, shape: tuple[int, ...], kind: str, added: float
) -> Iterator[torch.Tensor]:
    """Yield a tensor's data for the GGUF file, a few rows at a time: cast or quantised to `kind`,
    or repacked if the checkpoint has the same codes. `added` (of norms) is added to unquantised
    values."""
    scheme, block = source.forms.get(bare), _BLOCKS.get(kind)
    code_format = scheme and SAME_CODES.get(scheme.form, scheme.form)
    if scheme and block and code_format == block.form and scheme.group % block.group == 0:
        parts = [source.tensor(f"{bare}{part}").flatten(0, -2) for part in (CODES, SCALES)]
        for codes, scales in zip(*(t.split(_count(parts[0])) for t in parts), strict=True):
            codes = unpack_codes(codes)
            each = codes.shape[-1] // block.group // scales.shape[-1]
            yield _blocks(codes, scales.repeat_interleave(each, -1), kind, bare)
        source.release(bare)
        return
    for piece in in_pieces(source, bare, shape):
        matrix = piece.flatten(0, -2) if piece.dim() > 1 else piece[None]
        for x in matrix.split(_count(matrix)):
            yield _stored(x, kind, added, bare)
    source.release(bare)


def _stored(x: torch.Tensor, kind: str, added: float, name: str) -> torch.Tensor:
    if kind in _DENSE:
        return cast(x.float() + added if added else x, dtype_name(_DENSE[kind]), name)
    block = _BLOCKS[kind]
    codes, scales = quantize_values(x.float(), block.form, block.group, "f16")
    return _blocks(unpack_codes(codes), scales, kind, name)


def _count(t: torch.Tensor) -> int:
    return max(1, PIECE // t.shape[-1])


def _blocks(codes: torch.Tensor, scales: torch.Tensor, kind: str, name: str) -> torch.Tensor:
    """Pack codes i8 [n, K] and scales [n, K/32] into blocks u8 [n * K/32, bytes]. WeightsError,
    which begins with the tensor's `name`, for a scale that overflows float16."""
    layout = LAYOUTS[kind]
    data = (codes.reshape(-1, layout.values) + layout.zero).view(torch.uint8)
    scales = scales.half()
    if bool(scales.isinf().any()):
        raise WeightsError(f"{name}: a scale of {kind} does not fit float16; give --dtype BF16")
    return layout.write(data, scales=scales.reshape(-1, 1).contiguous().view(torch.uint8))


# --- metadata ---------------------------------------------------------------------------------


def _metadata(spec: Spec, kind: str, side_files: Mapping[str, bytes]) -> dict[str, Any]:
    arch = architecture_of(spec)
    return {
        "general.architecture": arch,
        "general.type": "model",
        "general.name": spec.name,
        "general.file_type": WRITTEN[kind][0],
        "general.quantization_version": 2,
        **{f"{arch}.{key}": value for key, value in _of_text(spec).items()},
        **_sampling(side_files),
        **_tokenizer(spec, side_files),
    }


def _of_text(spec: Spec) -> dict[str, Any]:
    text, layers, head = spec.text, spec.layers(), spec.embedding
    rules, window = _rules(spec), text.sliding.window
    if window and head:
        window = (window - 1) * BOTH_WAYS
    sliding = [x.kind == SLIDING for x in layers]
    out: dict[str, Any] = {
        "block_count": text.num_hidden_layers,
        "context_length": text.max_position_embeddings,
        "embedding_length": text.hidden_size,
        "feed_forward_length": _alike([x.intermediate_size for x in layers]),
        "attention.head_count": text.num_attention_heads,
        "attention.head_count_kv": _alike([x.attention.num_key_value_heads for x in layers]),
        "attention.layer_norm_rms_epsilon": text.rms_norm_eps,
        "attention.sliding_window": window,
        "attention.shared_kv_layers": text.num_kv_shared_layers,
        "embedding_length_per_layer_input": text.ple.dim if text.ple else 0,
        "rope.freq_base": text.full.rope.theta,
        "rope.freq_base_swa": text.sliding.rope.theta,
    }
    period = rules.get("period")
    if not period or sliding != [(i + 1) % period != 0 for i in range(len(layers))]:
        out["attention.sliding_window_pattern"] = sliding
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        out |= {key: text.full.head_dim, f"{key}_swa": text.sliding.head_dim}
    if text.final_logit_softcapping:
        out["final_logit_softcapping"] = text.final_logit_softcapping
    if text.moe:
        sizes = (text.moe.num_experts, text.moe.top_k_experts, text.moe.intermediate_size)
        out |= dict(zip((key for key, _ in TABLES["experts"].values()), sizes, strict=True))
    out = {k: v for k, v in out.items() if not k.endswith(tuple(rules.get("unsaid", ())))}
    if head:
        out["pooling_type"] = POOLED_BY_MEAN
        if head.projection:
            out |= {"embedding_length_out": head.projection, "attention.causal": False}
        for i, (n, width) in enumerate(pairwise((text.hidden_size, *head.dense)), 2):
            out |= {f"dense_{i}_feat_in": n, f"dense_{i}_feat_out": width}
    if text.full.rope.factor:
        out |= {"rope.scaling.type": "linear", "rope.scaling.factor": text.full.rope.factor}
    return out


def _alike(values: list[int]) -> Any:
    return values if len(set(values)) > 1 else values[0]


def _sampling(side_files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the generation defaults that have GGUF keys."""
    values = _json(side_files, GENERATION)
    if values.get("do_sample"):
        values = {"temperature": 1.0, **{k: v for k, v in values.items() if v is not None}}
    else:
        values = {k: v for k, v in values.items() if k not in DRAWN}
    out = {key: _written(key, values.get(name)) for key, name in SETTINGS.items()}
    if out[REPEAT] is not None:
        out[LAST_N] = -1  # penalties cover the full text, as in g4ir
    out |= {key: value for key, value in values.items() if key.startswith(SAMPLING)}
    out[f"{PREFIX}suppress_tokens"] = _ids(values, "suppress_tokens") or None
    return {key: value for key, value in out.items() if value is not None}


def _written(key: str, value: Any) -> Any:
    """Convert a setting to its GGUF type; None if it is absent or no finite float32. A top_k that
    int32 cannot hold becomes 0 (off)."""
    if key == TOP_K:
        return None if value is None else int(value) if value < NO_TOP_K else 0
    return float(value) if value is not None and abs(value) <= MAX_FLOAT else None


def _ids(values: Mapping[str, Any], name: str) -> list[int]:
    value = values.get(name)
    return value if isinstance(value, list) else [] if value is None else [value]


def _stops(spec: Spec, side_files: Mapping[str, bytes]) -> dict[str, int]:
    """Return key of tokenizer.ggml -> stop token id, from generation_config.json, else from the
    spec."""
    values = _json(side_files, GENERATION)
    stated = _ids(values, "eos_token_id")
    stops = spec.tokens.eos if values.get("eos_token_id") is None else stated
    valid = [i for i in dict.fromkeys(stops) if 0 <= i < spec.text.vocab_size]
    return dict(zip(TABLES["stops"], valid, strict=False))


def _json(side_files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    return parse_json(Path(name), side_files[name]) if name in side_files else {}


def _tokenizer(spec: Spec, side_files: Mapping[str, bytes]) -> dict[str, Any]:
    tokenizer, config = (_json(side_files, f"{n}.json") for n in ("tokenizer", "tokenizer_config"))
    if not tokenizer:
        return {}
    model = tokenizer["model"]
    if model.get("type") != "BPE" or not model.get("byte_fallback"):
        raise InputError("tokenizer.json: expected BPE with byte_fallback; give --format hf")
    added = {t["content"]: t for t in tokenizer.get("added_tokens", ())}
    ids = {**model["vocab"], **{text: t["id"] for text, t in added.items()}}
    texts = {i: text for text, i in ids.items()}
    tokens = [texts.get(i, f"[PAD{i}]") for i in range(spec.text.vocab_size)]
    merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    kind = _rules(spec)["tokenizer"]
    types = [_type(t, ids, added, model.get("unk_token")) for t in tokens]
    fields = {
        "model": kind,
        "pre": "default" if kind == SCORED else kind,
        "tokens": tokens,
        "scores": _scores(tokens, merges, kind),
        "token_type": types,
        "merges": [" ".join(m) for m in merges],
        "bos_token_id": spec.tokens.bos,
        **_stops(spec, side_files),
        "unknown_token_id": ids.get(model.get("unk_token")),
        "padding_token_id": spec.tokens.pad,
        "add_bos_token": config.get("add_bos_token") is not False,
        "add_eos_token": _ends_texts(tokenizer) or None,
        "add_space_prefix": False,
    }
    out = {f"{PREFIX}{key}": value for key, value in fields.items() if value is not None}
    template = side_files.get("chat_template.jinja", b"").decode() or config.get("chat_template")
    return out | ({TEMPLATE: template} if isinstance(template, str) else {})


def _ends_texts(tokenizer: Mapping[str, Any]) -> bool:
    """Whether a tokenizer appends a token to every text, as those of encoders do."""
    parts = (tokenizer.get("post_processor") or {}).get("single") or [{}]
    return len(parts) > 1 and "SpecialToken" in parts[-1]


def _type(text: str, ids: Mapping[str, int], added: Mapping[str, Any], unknown: Any) -> int:
    if text not in ids:
        return UNUSED
    if text in added and text not in TABLES["printed"]:
        return CONTROL if added[text]["special"] else USER_DEFINED
    if text in added:
        return USER_DEFINED
    if text == unknown:
        return UNKNOWN
    return BYTE if _BYTE.fullmatch(text) else NORMAL


def _scores(tokens: list[str], merges: list[list[str]], kind: str) -> list[float]:
    """Return a score for each token: minus the rank of its merge, if `kind` is SentencePiece's;
    minus the number of tokens for all others."""
    rank: dict[str, int] = {}
    for one, two in merges if kind == SCORED else ():
        rank.setdefault(one + two, len(rank))
    return [-float(rank[t]) if t in rank else -float(len(tokens)) for t in tokens]


# --- the container ----------------------------------------------------------------------------


def _head(values: Mapping[str, Any], tensors: list[_Tensor]) -> bytes:
    """Return header, metadata and tensor table, padded to ALIGNMENT."""
    starts = [0]
    for t in tensors:
        starts.append(starts[-1] + t.aligned_nbytes)
    parts = [MAGIC, struct.pack("<IQQ", VERSIONS[-1], len(tensors), len(values))]
    for key, value in values.items():
        parts += [_text(key), _value(value)]
    for t, (start, _) in zip(tensors, pairwise(starts), strict=True):
        dims = struct.pack(f"<I{len(t.shape)}Q", len(t.shape), *t.shape[::-1])
        parts += [_text(t.name), dims, struct.pack("<IQ", _CODE[t.kind], start)]
    head = b"".join(parts)
    return head + bytes(-len(head) % ALIGNMENT)


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if not isinstance(value, list):
        kind = _INT32 if type(value) is int and value < 0 else _KINDS[type(value)]
        return struct.pack("<I", kind) + _plain(kind, value)
    first = value[0] if value else ""  # llama.cpp requires the key, even if empty
    kind = _INT32 if type(first) is int else _KINDS[type(first)]
    head = struct.pack("<IIQ", ARRAY, kind, len(value))
    return head + b"".join(_plain(kind, v) for v in value)


def _plain(kind: int, value: Any) -> bytes:
    return _text(value) if kind == STRING else SCALARS[kind].pack(value)


def _check(name: str, spec: Spec, head: list[Any], size: int) -> None:
    """Raise SpecError if reading the header back gives another text model."""
    with TemporaryDirectory() as folder:
        file = Path(folder, name)
        file.write_bytes(b"".join(head))
        os.truncate(file, size)  # sparse: the data are not written
        written = read_spec(read_container(file))
    rows = [r for r in diff_specs(spec, written) if r[0].startswith("text.")]
    for key, expected, actual in rows:
        if key not in UNSAID:
            msg = f"{expected!r} would be read back as {actual!r} from a GGUF file"
            raise SpecError(f"spec {spec.name}: {key}: {msg}; give --format hf")
