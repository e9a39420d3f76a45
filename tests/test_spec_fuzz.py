"""No input makes the spec loaders raise anything but SpecError, hang, or accept an illegal spec.

The number of examples comes from the loaded hypothesis profile (`--full` raises it).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from g4ir.errors import SpecError
from g4ir.model.tensors import dead_tensors, numel, text_tensors, tower_tensors
from g4ir.plan.count import counts
from g4ir.spec.reader import MAX_ERRORS
from g4ir.spec.record import Spec, check_spec, diff_specs, load_spec, spec_names, spec_path
from tests.mutations import mutate

BASES = {name: load_spec(name) for name in spec_names()}
SMALL_BASES = ("tiny-dense", "tiny-moe", "tiny-ple", "12b")

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.sampled_from([2**31, 2**63, -(2**70), 10**40, 512, 1024, 262144]),
    st.floats(),
    st.sampled_from(["", "full", "sliding", "vision", "all", "1e-6", "bf16", "on", "e2b", "null"]),
    st.text(max_size=8),
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)
KEYS = st.text(max_size=12)


def mutate_bytes(data: st.DataObject, text: bytes) -> bytes:
    """A slice replaced by other bytes, up to three times."""
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = start + data.draw(st.sampled_from([0, 0, 1, 1, 2, 5, 40]))
        piece = data.draw(st.binary(max_size=6) | st.sampled_from(PIECES))
        text = text[:start] + piece + text[end:]
    return text


PIECES = (
    *(b"\n", b"  ", b": ", b"- ", b"&a ", b"*a", b"<<: ", b"!!int ", b"{", b"}", b"[", b"]"),
    *(b'"', b"'", b"|\n", b"---\n", b"...\n", b"%TAG ! x\n", b"? ", b"#", b"\t", b",", b"~"),
    *(b"9" * 30, b"\\x", b'"\\UFFFFFFFF"', b"\xff", b"\xe2\x80\xa8", b".inf", b"-", b"1e9"),
)


def attempt(read: Callable[[], Spec]) -> Spec | None:
    """The spec, or None after a SpecError of printable lines."""
    try:
        spec = read()
    except SpecError as err:
        lines = str(err).split("\n")
        assert len(lines) <= MAX_ERRORS + 1
        for line in lines:
            line.encode()
            assert line and len(line) < 2000, line
        return None
    consistent(spec)
    return spec


def consistent(spec: Spec) -> None:
    """What holds for every spec that a loader accepts."""
    assert check_spec(spec) is spec
    layers = spec.layers()
    assert len(layers) == spec.text.num_hidden_layers
    for layer in layers:
        if layer.donor is not None:
            donor = layers[layer.donor]
            assert donor.donor is None and donor.kind == layer.kind
    live = text_tensors(spec)
    assert not live.keys() & dead_tensors(spec).keys()
    assert all(dim > 0 for shape in live.values() for dim in shape)
    count = counts(spec)
    assert count.active > 0 and count.text == numel(live)
    assert count.loaded == count.text + numel(tower_tensors(spec))
    assert load_text(spec.to_yaml().encode()) == spec


#: written anew for each example: making a directory takes as long as loading a spec
FOLDER = tempfile.TemporaryDirectory()
FILE = Path(FOLDER.name) / "mine.yaml"


def load_text(text: bytes) -> Spec:
    FILE.write_bytes(text)
    return load_spec(FILE)


@given(st.data(), st.sampled_from(SMALL_BASES))
def test_mutated_spec_data(data: st.DataObject, name: str) -> None:
    whole = json.loads(json.dumps({"schema": 1, **BASES[name].to_dict()}))
    tree = mutate(data, whole, values, KEYS)
    attempt(lambda: load_text(yaml.safe_dump(tree, allow_unicode=True).encode("utf-8", "replace")))


@given(st.data(), st.sampled_from(spec_names()))
def test_mutated_spec_bytes(data: st.DataObject, name: str) -> None:
    text = mutate_bytes(data, spec_path(name).read_bytes())
    attempt(lambda: load_text(text))


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda t: t.encode("utf-8", "replace")))
def test_any_bytes(text: bytes) -> None:
    attempt(lambda: load_text(text))
    attempt(lambda: from_json(text))


def from_json(text: bytes) -> Spec:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(text)
        return Spec.from_hf(folder)


@given(st.data(), st.sampled_from(SMALL_BASES))
def test_mutated_config(data: st.DataObject, name: str) -> None:
    tree = mutate(data, BASES[name].to_hf(), values, KEYS)
    spec = attempt(lambda: Spec.from_hf(tree))
    if spec is not None:  # what was read can be written and read again
        again = Spec.from_hf(json.loads(json.dumps(spec.to_hf())), name=spec.name)
        assert diff_specs(spec, again) == []


kinds = st.lists(st.sampled_from(["sliding", "full"]), min_size=1, max_size=6)


@st.composite
def legal_text(draw: Callable[..., Any]) -> dict[str, Any]:
    """A legal `text` section: any mix of pattern, window, heads, K=V, sharing, wide, PLE, MoE."""
    layers = draw(st.integers(1, 12) | st.sampled_from([40, 100]))
    pattern = draw(kinds)
    named = [pattern[i % len(pattern)] for i in range(layers - 1)] + ["full"]
    shares = [n for n in range(layers) if set(named[layers - n :]) <= set(named[: layers - n])]
    heads = draw(st.sampled_from([1, 2, 4, 6]))
    experts = draw(st.integers(1, 8))
    some = draw(st.none() | st.sets(st.integers(0, layers - 1), min_size=1))
    moe = {
        "num_experts": experts,
        "top_k_experts": draw(st.integers(1, experts)),
        "intermediate_size": draw(st.integers(1, 40)),
        "layers": None if some is None else sorted(some),
    }
    ple = {"dim": draw(st.integers(1, 16)), "vocab_size": draw(st.integers(1, 999))}
    return {
        "vocab_size": draw(st.integers(3, 999)),
        "hidden_size": draw(st.integers(1, 99)),
        "intermediate_size": draw(st.integers(1, 99)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "pattern": pattern,
        "sliding": {**draw(geometry(heads)), "window": draw(st.integers(1, 20))},
        "full": draw(geometry(heads)),
        "max_position_embeddings": draw(st.integers(1, 4096)),
        "num_kv_shared_layers": draw(st.sampled_from(shares)),
        "use_double_wide_mlp": draw(st.booleans()),
        "moe": draw(st.none() | st.just(moe)),
        "ple": draw(st.none() | st.just(ple)),
        "final_logit_softcapping": draw(st.none() | st.just(30.0)),
        "attn_logit_softcapping": draw(st.none() | st.just(50.0)),
        "use_bidirectional_attention": draw(st.sampled_from([None, "vision"])),
        "tie_word_embeddings": draw(st.booleans()),
    }


@st.composite
def geometry(draw: Callable[..., Any], heads: int) -> dict[str, Any]:
    head_dim = 2 * draw(st.integers(1, 80))
    rotary = draw(st.sampled_from([None, 0.05, 0.25, 0.5, 1.0]))
    rotary = rotary and min(1.0, max(rotary, 2.001 / head_dim))  # at least one pair
    rope: dict[str, Any] = {"kind": "default", "theta": draw(st.sampled_from([1e4, 1e6]))}
    if rotary is not None:
        rope |= {"kind": "proportional", "rotary_fraction": rotary}
        rope["factor"] = draw(st.none() | st.just(8.0))
    return {
        "head_dim": head_dim,
        "num_key_value_heads": draw(st.sampled_from([k for k in (1, 2, 3, 6) if heads % k == 0])),
        "k_eq_v": draw(st.booleans()),
        "rope": rope,
    }


def drawn(text: dict[str, Any]) -> Spec:
    tokens = {"bos": 2, "eos": [1], "pad": 0}
    tree = {"schema": 1, "name": "drawn", "model_type": "gemma4", "dtype": "f32"}
    return load_text(yaml.safe_dump({**tree, "text": text, "tokens": tokens}).encode())


# Each example is loaded, written and loaded again, as YAML and as a config.
@settings(max_examples=settings.default.max_examples // 4)
@given(legal_text())
def test_every_legal_combination_loads(text: dict[str, Any]) -> None:
    spec = drawn(text)
    consistent(spec)
    uniform = replace(
        spec.text,
        attn_logit_softcapping=None,
        sliding=replace(spec.text.sliding, k_eq_v=False),
        moe=replace(spec.text.moe, layers=None) if spec.text.moe else None,
    )
    said = replace(spec, text=uniform)  # what a Hugging Face config can say
    assert diff_specs(Spec.from_hf(said.to_hf(), name="drawn"), said) == []
