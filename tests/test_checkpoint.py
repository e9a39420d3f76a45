"""Checkpoint directories: what is accepted, what is refused and how the refusal reads.

Random weights: the same bits whatever part is asked for, and sane statistics.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from g4ir.errors import InputError, WeightsError
from g4ir.model.media import KINDS
from g4ir.model.tensors import media_tensors, text_tensors
from g4ir.spec.record import Spec, load_spec
from g4ir.ui.files import write_file
from g4ir.ui.paths import hub_cache
from g4ir.weights import tensorfile
from g4ir.weights.checkpoint import Checkpoint, read_side_files
from g4ir.weights.origin import find_origin, hub_snapshot
from g4ir.weights.random import BLOCK, distribution, random_rows, random_tensor, random_weights
from g4ir.weights.tensorfile import FileTensor, read_header, write_tensors
from g4ir.weights.write import write_checkpoint
from tests.cases import TABLES, read_table
from tests.configs import TINY
from tests.engines import published_checkpoint, rewrite

PREFIX = "model.language_model."
CASES = read_table("checkpoint_cases.yaml")
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def dense() -> Spec:
    return load_spec("tiny-dense")


def source(spec: Spec, dtype: torch.dtype = torch.bfloat16) -> Checkpoint:
    return random_weights(spec, seed=1, dtype=dtype)


def save(directory: Path, spec: Spec, edit: Callable[[Tensors], Any] = lambda t: None) -> Path:
    """A checkpoint as the safetensors library writes it, after `edit` changed its tensors."""
    return rewrite(published_checkpoint(directory, spec, source(spec)), edit)


def refuse(directory: Path, spec: Spec, *words: str) -> str:
    with pytest.raises(WeightsError) as caught:
        Checkpoint.open(directory, spec)
    message = str(caught.value)
    for word in (*words, "fix:"):
        assert word in message
    return message


def test_writing_into_a_mapped_tensor_changes_no_file(tmp_path: Path) -> None:
    save_file({"a": torch.ones(5000)}, tmp_path / "x")
    found = read_header(tmp_path / "x")
    made = tensorfile.view(tensorfile.map_file(found), found.entries["a"])
    made.mul_(3)
    assert made.sum() == 15_000 and load_file(tmp_path / "x")["a"].sum() == 5000


@pytest.mark.parametrize("name", TINY)
def test_transformers_reads_what_we_write_and_the_reverse(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One config through both: names, shapes, prefix, sharding and tying agree."""
    monkeypatch.setattr("g4ir.weights.tensorfile.SHARD_BYTES", 200_000)
    model = pytest.importorskip("transformers").Gemma4ForCausalLM
    spec = load_spec(name)
    random = source(spec)
    ours = write_checkpoint(tmp_path / "ours", spec, random)
    loaded, report = model.from_pretrained(ours, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    loaded.save_pretrained(tmp_path / "theirs", max_shard_size="200KB")
    opened = Checkpoint.open(tmp_path / "theirs", spec)
    assert len(opened.files) > 1 and not opened.ignored and not opened.defaults
    for tensor in text_tensors(spec):
        assert torch.equal(opened.tensor(tensor), random.tensor(tensor)), tensor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_float_dtypes(tmp_path: Path, dense: Spec, dtype: torch.dtype) -> None:
    def edit(tensors: Tensors) -> None:
        wide = {PREFIX + "norm.weight": torch.float32}
        tensors.update({k: v.to(wide.get(k, dtype)) for k, v in tensors.items()})

    opened = Checkpoint.open(save(tmp_path / "c", dense, edit), dense)
    assert opened.dtype is dtype and opened.tensor("layers.0.layer_scalar").dtype is dtype
    assert opened.tensor("norm.weight").dtype is torch.float32


def test_unaligned_data_is_read(tmp_path: Path, dense: Spec) -> None:
    """And the order of names in the header is free."""

    def turn(header: dict[str, Any]) -> None:
        for name in reversed([*header]):
            header[name] = header.pop(name)

    path = save(tmp_path / "c", dense)
    edit_header(path / "model.safetensors", turn)
    opened = Checkpoint.open(path, dense)
    want = source(dense).tensor("layers.1.mlp.up_proj.weight")
    assert torch.equal(opened.tensor("layers.1.mlp.up_proj.weight"), want)
    table, ids = source(dense).tensor("embed_tokens.weight"), torch.tensor([7, 7, 0, 511])
    assert torch.equal(opened.rows("embed_tokens.weight", ids), table[ids])
    assert opened.rows("embed_tokens.weight", ids[:0]).shape == (0, table.shape[1])


@pytest.mark.parametrize("name", CASES["ignored"])
def test_ignored_and_reported(tmp_path: Path, dense: Spec, name: str) -> None:
    path = save(tmp_path / "c", dense, lambda t: t.update({name: torch.zeros(8).long()}))
    ((found, why),) = Checkpoint.open(path, dense).ignored.items()
    kind = "a buffer that follows from the spec" if "rotary" in name else "part of "
    assert found == name and why.startswith(kind)


def test_missing_layer_scalar_is_one(tmp_path: Path, dense: Spec) -> None:
    path = save(tmp_path / "c", dense, lambda t: t.pop(PREFIX + "layers.2.layer_scalar"))
    opened = Checkpoint.open(path, dense)
    assert opened.defaults == {"layers.2.layer_scalar": 1.0}
    assert torch.equal(opened.tensor("layers.2.layer_scalar"), torch.ones(1).bfloat16())


@pytest.mark.parametrize("name, ids, word", CASES["rows"])
def test_bad_rows(tmp_path: Path, dense: Spec, name: str, ids: list[float], word: str) -> None:
    given, opened = torch.tensor(ids), Checkpoint.open(save(tmp_path / "c", dense), dense)
    with pytest.raises(InputError, match=word):
        opened.rows(name, given)
    with pytest.raises(InputError, match=word):
        source(dense).rows(name, given)


def test_views_survive_release_and_close(tmp_path: Path, dense: Spec) -> None:
    opened = Checkpoint.open(save(tmp_path / "c", dense), dense)
    kept = opened.tensor("embed_tokens.weight")
    opened.release("embed_tokens.weight")
    opened.close()
    assert torch.equal(kept, source(dense).tensor("embed_tokens.weight"))
    with pytest.raises(WeightsError, match="closed"):
        opened.tensor("embed_tokens.weight")


def test_views_are_lazy(tmp_path: Path, dense: Spec) -> None:
    """Rows of a 32 MiB table raise resident memory by far less than the table."""
    vocab = 1 << 18
    big = replace(dense, text=replace(dense.text, vocab_size=vocab))
    opened = Checkpoint.open(save(tmp_path / "c", big), big)
    before = psutil.Process().memory_info().rss
    assert opened.rows("embed_tokens.weight", torch.tensor([0, vocab // 2])).shape == (2, 64)
    assert psutil.Process().memory_info().rss - before < 8 << 20


def test_a_file_that_changes_after_the_check_is_refused(tmp_path: Path, dense: Spec) -> None:
    opened = Checkpoint.open(save(tmp_path / "c", dense), dense)
    file = tmp_path / "c" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(WeightsError, match="changed"):
        opened.tensor("norm.weight")


@pytest.mark.parametrize("layout", CASES["layouts"])
def test_layouts(tmp_path: Path, layout: str) -> None:
    spec = load_spec("tiny-ple")

    def edit(tensors: Tensors) -> None:
        for name in [*tensors]:
            tensors[CASES["layouts"][layout].format(name.removeprefix(PREFIX))] = tensors.pop(name)

    opened = Checkpoint.open(save(tmp_path / "c", spec, edit), spec)
    for name in text_tensors(spec):
        assert torch.equal(opened.tensor(name), source(spec).tensor(name)), name
    assert not opened.ignored


@pytest.mark.parametrize("head", CASES["heads"])
def test_a_head_under_another_name(tmp_path: Path, dense: Spec, head: str) -> None:
    made = source(dense).tensor("embed_tokens.weight")
    own = replace(dense, text=replace(dense.text, tie_word_embeddings=False))
    folder = save(tmp_path / "own", own, lambda t: t.update({head: t.pop("lm_head.weight")}))
    want = source(own).tensor("lm_head.weight")
    assert torch.equal(Checkpoint.open(folder, own).tensor("lm_head.weight"), want)
    folder = save(tmp_path / "tied", dense, lambda t: t.update({head: made.clone()}))
    opened = Checkpoint.open(folder, dense)
    assert torch.equal(opened.tensor("embed_tokens.weight"), made)
    assert [*opened.ignored.values()] == ["tied to embed_tokens.weight"]
    folder = save(tmp_path / "other", dense, lambda t: t.update({head: made + 1}))
    opened = Checkpoint.open(folder, dense)
    for read in (opened.tensor, lambda name: opened.rows(name, torch.tensor([0]))):
        with pytest.raises(WeightsError, match=rf"{head}' differs from the embedding it is tied"):
            read("embed_tokens.weight")


MLX, MLX_OTHERS = CASES["mlx"], CASES["mlx_others"]


def mlx_checkpoint(
    folder: Path, spec: Spec, said: Any, key: str = "quantization", edit: Any = lambda t: None
) -> dict[str, torch.Tensor]:
    """A checkpoint as mlx-lm quantises one; returns what its weights mean."""
    random, meant, tensors = source(spec), {}, {}
    for name in text_tensors(spec):
        w, module = random.tensor(name), f"language_model.model.{name.removesuffix('.weight')}"
        own = MLX_OTHERS.get(module, MLX)
        if w.dim() < 2 or not own:
            meant[name] = tensors["language_model.model." + name] = w
            continue
        bits, grouped = own["bits"], w.float().unflatten(-1, (-1, own["group_size"]))
        bias = grouped.amin(-1).bfloat16()
        scale = ((grouped.amax(-1) - grouped.amin(-1)) / (2**bits - 1)).bfloat16()
        codes = (grouped - bias.float()[..., None]) / scale.float()[..., None]
        codes = codes.round().clamp(0, 2**bits - 1)
        meant[name] = (codes * scale.float()[..., None] + bias.float()[..., None]).flatten(-2)
        words = codes.flatten(-2).long().unflatten(-1, (-1, 32 // bits))
        packed = (words << torch.arange(0, 32, bits)).sum(-1).numpy().astype("uint32")
        tensors[f"{module}.weight"] = torch.from_numpy(packed)
        tensors |= {f"{module}.scales": scale, f"{module}.biases": bias}
    edit(tensors)
    write_checkpoint(folder, spec, random)
    rewrite(folder, lambda held: (held.clear(), held.update(tensors)), **{key: said})
    return meant


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_mlx(tmp_path: Path, dense: Spec, key: str, caplog: pytest.LogCaptureFixture) -> None:
    """Of 4 bits, some modules of 8, 2 or none; tables by row."""
    meant = mlx_checkpoint(tmp_path / "c", dense, {**MLX, **MLX_OTHERS}, key)
    origin = find_origin(tmp_path / "c")
    assert origin.spec().text == dense.text
    opened = origin.open(dense, (), "bf16")
    assert "weights of MLX are dequantised to the engine's dtype" in caplog.text
    for name, want in meant.items():
        assert torch.equal(opened.tensor(name), want), name
    ids = torch.tensor([[3, 511], [0, 3]])
    assert torch.equal(opened.rows("embed_tokens.weight", ids), meant["embed_tokens.weight"][ids])


@pytest.mark.parametrize("case", CASES["mlx_refused"])
def test_mlx_refused(tmp_path: Path, dense: Spec, case: str) -> None:
    said, part, words = CASES["mlx_refused"][case]
    name = "layers.0.self_attn.q_proj"

    def edit(tensors: Tensors) -> None:
        if part:
            made = tensors.pop(f"language_model.model.{name}.{part}")
            if part == "scales":
                tensors[f"language_model.model.{name}.{part}"] = made * math.nan

    mlx_checkpoint(tmp_path / "c", dense, said, edit=edit)
    with pytest.raises(WeightsError) as e:
        Checkpoint.open(tmp_path / "c", dense).tensor(f"{name}.weight")
    assert words in str(e.value) and "fix:" in str(e.value), e.value


def test_a_pipe_is_refused_without_waiting(tmp_path: Path, dense: Spec) -> None:
    refuse(tmp_path / "none", dense, "none", "no such")
    os.mkfifo(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    refuse(tmp_path, dense, "ordinary file")


SHARD = "model-00001-of-00002.safetensors"


def test_links_of_the_hub_cache_are_followed(tmp_path: Path, dense: Spec) -> None:
    repo = tmp_path / "models--google--tiny"
    path = published_checkpoint(tmp_path / "ckpt", dense, source(dense), shards=2)
    blobs, snapshot = repo / "blobs", repo / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, file in enumerate(path.iterdir()):
        file.rename(blobs / str(i))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(i))
    opened = Checkpoint.open(snapshot, dense)
    assert torch.equal(opened.tensor("norm.weight"), source(dense).tensor("norm.weight"))
    # Others are refused: what they lead to could be copied into an engine.
    (tmp_path / "private").write_text("secret")
    link = snapshot / "chat_template.jinja"
    link.symlink_to(tmp_path / "private")
    with pytest.raises(WeightsError, match=r"jinja: .* leads outside the checkpoint directory"):
        read_side_files(snapshot)
    (snapshot / SHARD).unlink()
    (snapshot / SHARD).symlink_to(path / ".." / "private")
    with pytest.raises(WeightsError, match=f"'{SHARD}' .* leads outside the checkpoint"):
        Checkpoint.open(snapshot, dense)


def edit_header(file: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change a header; it has an odd length then, so that no data is aligned."""
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    edit(header)
    text = json.dumps(header).encode()
    text += b" " * (1 - len(text) % 2)
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])


def test_tensors_begin_at_a_cache_line(tmp_path: Path) -> None:
    table = {"a": ("F32", (3,)), "b": ("BF16", (32,)), "c": ("U8", (1,)), "d": ("F32", (2, 16))}
    table["e"] = ("F32", (0, 3))
    made = {n: torch.arange(math.prod(s)).to(DTYPES[d]).view(s) for n, (d, s) in table.items()}
    write_tensors(tmp_path / "x", {n: FileTensor.of(t) for n, t in made.items()})
    entries = read_header(tmp_path / "x").entries
    assert [entries[n].start % 64 for n in "bd"] == [0, 0]
    assert all(torch.equal(t, load_file(tmp_path / "x")[n]) for n, t in made.items())


def test_jobs_run_ahead_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """In order; torch computes with as many threads afterwards; an error comes in its turn."""
    monkeypatch.setattr(tensorfile, "PREFETCH_BYTES", 10)
    started, threads = list[int](), torch.get_num_threads()

    def job(i: int) -> int:
        started.append(i)
        if i == 30:
            raise WeightsError("the last")
        return i

    seen = []
    with pytest.raises(WeightsError, match="the last"):
        for i in tensorfile.prefetched((4, partial(job, i)) for i in range(31)):
            seen.append(i)
            assert max(started) <= i + 3
    assert seen == [*range(30)] and torch.get_num_threads() == threads
    assert [*tensorfile.prefetched((99, partial(job, i)) for i in range(3))] == [0, 1, 2]


DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8}


@pytest.mark.parametrize("env, where", CASES["hub_cache"])
def test_hub_cache(env: dict[str, str], where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert hub_cache() == Path(where)


def test_hub_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert hub_snapshot("google/gemma") is None
    repo = tmp_path / "models--google--gemma"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc123\n")
    assert hub_snapshot("google/gemma") is None
    snapshot = repo / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert hub_snapshot("google/gemma") is None  # a download that ended early
    (snapshot / "a.safetensors").touch()
    assert hub_snapshot("google/gemma") == hub_snapshot("google/gemma", "abc123") == snapshot
    index = snapshot / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}')
    assert hub_snapshot("google/gemma") is None
    (snapshot / "b.safetensors").touch()
    assert hub_snapshot("google/gemma") == snapshot and not hub_snapshot("google/gemma", "v2")
    (repo / "refs" / "main").write_text("../../..")
    assert hub_snapshot("google/gemma") is None
    with pytest.raises(InputError, match="org/name"):
        hub_snapshot("../../etc")


def test_writing_is_atomic(tmp_path: Path) -> None:
    def pieces() -> Any:
        yield b"half"
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(OSError, match="No space"):
        write_file(tmp_path / "f", pieces())
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_bytes() == b"old"


NAME = "layers.3.mlp.up_proj.weight"


def test_literal_values() -> None:
    for index, want in TABLES["random weights"].items():
        row, column = divmod(index, 1 << 10)
        got = random_rows(7, NAME, (1 << 38, 1 << 10), torch.tensor([row]), torch.float32)
        assert got[0, column].item() == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(1000, 777), (3, BLOCK + 5), (5, 1), (1, 3 * BLOCK)])
def test_rows_equal_the_full_tensor(shape: tuple[int, int], dtype: torch.dtype) -> None:
    full = random_tensor(1, NAME, shape, dtype)
    assert torch.equal(full, random_tensor(1, NAME, shape, torch.float32).to(dtype))
    ids = torch.tensor([[0, shape[0] - 1], [shape[0] // 2, 0]])
    assert torch.equal(random_rows(1, NAME, shape, ids, dtype), full[ids])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_makes_the_same_bits(dtype: torch.dtype) -> None:
    for name in (NAME, "norm.weight"):
        here = random_tensor(1, name, (1000, 777), dtype)
        there = random_tensor(1, name, (1000, 777), dtype, "cuda")
        ids = torch.tensor([999, 0, 338])
        rows = random_rows(1, name, (1000, 777), ids, dtype, "cuda")
        assert torch.equal(there.cpu(), here) and torch.equal(rows.cpu(), here[ids])


def test_too_large_is_an_error() -> None:
    with pytest.raises(InputError, match="at most"):
        random_rows(0, NAME, (1 << 33, 1 << 16), torch.tensor([0]), torch.float32)


def test_no_rows_and_no_elements() -> None:
    assert random_rows(0, NAME, (8, 4), torch.empty(0).long(), torch.float32).shape == (0, 4)
    assert random_tensor(0, NAME, (0, 4), torch.float32).shape == (0, 4)


LAYERS = {
    "layers.0.layer_scalar": ((1,), 0.95, 0.05),
    "layers.0.self_attn.q_norm.weight": ((4096,), 1 / 64, 0.3 / 64),
    "norm.weight": ((4096,), 4.0, 1.2),
    "embed_tokens.weight": ((8, 512), 0.0, 0.25 * (3 / 512) ** 0.5),
    "layers.0.experts.down_proj": ((4, 8, 512), 0.0, (3 / 512) ** 0.5),
}


@pytest.mark.parametrize("name", LAYERS)
def test_distributions(name: str) -> None:
    shape, centre, half = LAYERS[name]
    assert distribution(name, shape) == pytest.approx((centre, half))
    values = random_tensor(0, name, shape, torch.float32)
    assert values.min() >= centre - 1.00001 * half and values.max() <= centre + 1.00001 * half


def test_norms_about_zero() -> None:
    """Their weights are those of others less 1; scores are as large as without a divisor."""
    zero = load_spec("tiny-gemma3")
    text = replace(zero.text, norms_about_zero=False)
    plain, dim = replace(zero, text=text), zero.text.full.head_dim
    for name in (n for n, shape in text_tensors(zero).items() if len(shape) == 1):
        made, other = (random_weights(s, 0, torch.float32).tensor(name) for s in (zero, plain))
        torch.testing.assert_close(made + 1, other)
        if name.endswith("q_norm.weight"):
            assert other.mean().item() == pytest.approx((24 / dim) ** 0.5, rel=0.1)


@pytest.mark.parametrize(
    "name", ["tiny-dense", "tiny-moe", "tiny-ple", "tiny-media", "tiny-unified"]
)
def test_random_checkpoint_fills_every_tensor(name: str) -> None:
    spec = load_spec(name)
    source = random_weights(spec, seed=4, dtype=torch.float32)
    bounds = {"min": -1, "max": 1}
    text = text_tensors(spec)
    for tensor, shape in (text | media_tensors(spec, KINDS)).items():
        values = source.tensor(tensor)
        assert values.shape == shape and values.isfinite().all()
        assert tensor not in text or values.unique().numel() > values.numel() // 2, tensor
        assert shape or values.sign() == bounds[tensor[-3:]], "a range that holds 0"
    with pytest.raises(WeightsError, match="no tensor"):
        source.tensor("nothing")


@pytest.mark.parametrize("model", ["[]", '{"vocab": [["a", 0]]}', "null"])
def test_a_tokenizer_without_a_table_of_ids(tmp_path: Path, model: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text(f'{{"model": {model}}}')
    assert find_origin(tmp_path).vocabulary() == {}
