"""Weights quantised by the inputs of their matmuls on a calibration text (quant/compensation.py).

The text graph is interpreted twice, unquantised and with the matrices quantised so far, from matmul
to matmul: all windows of the text run up to one, products of its inputs in both are summed, and its
matrix is quantised. The quantised values and scales of a layer are written to a file of a cache
folder, from which an interrupted build resumes.
"""

from __future__ import annotations

import hashlib
import lzma
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files as package_files
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import torch

from g4ir.artefact.directory import Calibration
from g4ir.backends.base import Prepared
from g4ir.backends.cpu.packing import KERNELS
from g4ir.chat.text_files import check_files, cut_blocks, read_text
from g4ir.chat.tokenizer_file import read_tokenizer
from g4ir.engine.parts import embed_rows
from g4ir.errors import CheckError, InputError
from g4ir.ir.graph import Graph, Node, Program, Value
from g4ir.ir.interpret import run_node
from g4ir.ir.names import layer_of
from g4ir.ir.rewrite import drop_dead
from g4ir.model.names import CODES, SCALES
from g4ir.model.text import build_graph
from g4ir.ops.codecs import dequantize_codes
from g4ir.ops.mlp import activate
from g4ir.ops.types import torch_dtype, zeros
from g4ir.quant import compensation
from g4ir.quant.compensation import Codes, Inputs, column_parts, is_compensated
from g4ir.quant.recipe import QuantConfig, Scheme
from g4ir.quant.rewrite import schemes_of, weights_of
from g4ir.spec.reader import Line
from g4ir.spec.record import Spec
from g4ir.ui.paths import cache_root, private
from g4ir.ui.progress import Progress
from g4ir.weights import tensorfile
from g4ir.weights.checkpoint import TOKENIZER, Checkpoint, sha256
from g4ir.weights.pack import MadeParams, Packing, StoredParams, open_table

#: maximum and minimum tokens of the texts; tokens of a window, without <bos>; tokens that are read
#: of a text for each that is used
MAX_TOKENS, MIN_TOKENS, WINDOW, READ = 32_768, 256, 512, 4
#: models with more weights in their layers take a quarter of MAX_TOKENS, so that two cores need
#: about 16 minutes for Gemma 4 E2B, and 22 with `--bits`
LARGE = 10**9
#: name of the text that comes with the package, and its file
DEFAULT, _DEFAULT_FILE = "default", "calibration.txt.xz"
#: folder in the cache of quantised layers, and of divergences measured for --bits
FOLDER = "calibration"

Tensor = torch.Tensor


def read_default_text() -> str:
    """Return the package's calibration text: English prose and articles of the Universal
    Declaration of Human Rights in eleven languages, all in the public domain, and g4ir's own
    documentation and code."""
    return lzma.decompress((package_files(__package__) / _DEFAULT_FILE).read_bytes()).decode()


@dataclass(frozen=True)
class CalibrationText:
    """Tokens of calibration texts, as many of each, and the texts' records for the manifest."""

    records: tuple[Calibration, ...]
    ids: tuple[int, ...]

    @classmethod
    def read(
        cls, paths: Sequence[str | Path], spec: Spec, side_files: Mapping[str, bytes]
    ) -> CalibrationText:
        """Read and tokenise files with the checkpoint's tokenizer; InputError names the file and
        the problem: missing, empty, no text, all too short, or no tokenizer."""
        named = ", ".join(map(str, paths))
        check_files([str(p) for p in paths if str(p) != DEFAULT], "--calibrate")
        if TOKENIZER not in side_files:
            why = f"there is no {TOKENIZER}, which a text needs"
            raise InputError(f"calibration text {named}: {why}; give a --checkpoint with one")
        tokenizer = read_tokenizer(Path(TOKENIZER), side_files[TOKENIZER])
        size = sum(t.numel() for n, t in weights_of(spec).items() if layer_of(n) is not None)
        max_tokens = (MAX_TOKENS // 4 if size > LARGE else MAX_TOKENS) // len(paths)
        ids_end = spec.text.readable_ids
        records, ids = [], list[int]()
        for path in paths:
            default = str(path) == DEFAULT
            blocks = cut_blocks([read_default_text()] if default else read_text(Path(path)))
            encoded = (tokenizer.encode(b, add_special_tokens=False).ids for b in blocks)
            every = (i for block_ids in encoded for i in block_ids if i < ids_end)
            tokens = _spread([*islice(every, READ * max_tokens)], max_tokens)
            ids += tokens
            name = Line(DEFAULT if default else Path(path).resolve())
            digest = _digest(read_default_text()) if default else sha256(Path(path))
            records.append(Calibration(name, digest, len(tokens)))
        if len(ids) < MIN_TOKENS:
            problem = f"{len(ids)} tokens, and at least {MIN_TOKENS} are needed"
            raise InputError(f"--calibrate {named}: {problem}; give a longer text")
        return cls(tuple(records), tuple(ids))

    def windows(self, bos: int | None) -> list[Tensor]:
        """Return the tokens [1, n] of each window, beginning with <bos> unless `bos` is None."""
        start = torch.tensor([] if bos is None else [bos]).long()
        return [torch.cat([start, w])[None] for w in torch.tensor(self.ids).split(WINDOW)]


def _spread(ids: Sequence[int], size: int) -> list[int]:
    """Return at most `size` tokens of a text: windows at equal distances."""
    windows = [ids[i : i + WINDOW] for i in range(0, len(ids), WINDOW)]
    count = min(-(-size // WINDOW), len(windows))
    return [t for i in range(count) for t in windows[i * len(windows) // count]][:size]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# --- the text through the model, layer by layer --------------------------------------------------


@dataclass(frozen=True)
class Matmuls:
    """Weights of a layer whose matmuls have the same input, and the first such node's index."""

    node: int
    weights: list[str]


def matrices_of(n: Node, weights: Container[str]) -> list[str]:
    """Return those of `weights` that a node multiplies."""
    operands = {"linear": ("w",), "experts": ("gate_up", "down")}.get(n.op, ())
    return [n[operand].name for operand in operands if n[operand].name in weights]


class Stages:
    """The text model of a checkpoint on windows of tokens, some nodes at a time."""

    def __init__(
        self, spec: Spec, dtype: str, source: Checkpoint, windows: Sequence[Tensor]
    ) -> None:
        self.dtype = dtype
        graphs = {name: build_graph(spec, name, True, dtype) for name in ("embed", "prefill")}
        embed, text = graphs.values()
        plain = Packing(Program(graphs), Graph("prologue", (), (), (), (), ()))
        self.params = MadeParams(plain, source)
        tables = {v.name: open_table(self.params, v, "mmap", "cpu") for v in embed.params}
        head = next(n for n in reversed(text.nodes) if n.op == "linear")
        #: nodes of the head: from the LM head's matmul on
        self.head = text.nodes[text.nodes.index(head) :]
        self.graph = drop_dead(replace(text, outputs=(head["x"],), next={}))
        self.last_use = {v.name: i for i, n in enumerate(self.graph.nodes) for v in n.inputs}
        self.last_use[head["x"].name] = len(self.graph.nodes)
        self.windows = [self._feeds(embed, tables, tokens) for tokens in windows]
        #: index of the next node; by name: weights that replace params, params of the next nodes
        self.next, self.replaced, self.loaded = 0, dict[str, Tensor](), dict[str, Any]()

    @staticmethod
    def _feeds(embed: Graph, tables: dict[str, Any], tokens: Tensor) -> dict[str, Any]:
        size = tokens.shape[1]
        positions = {"positions": torch.arange(size)[None], "lengths": torch.tensor([size])}
        return {**embed_rows(embed, tables, tokens), **positions}

    def copy(self) -> Stages:
        """Return stages at the same node of the same windows, which share the tensors."""
        other = copy(self)
        other.windows, other.replaced, other.loaded = [{**env} for env in self.windows], {}, {}
        return other

    @cached_property
    def ends(self) -> list[int]:
        """For each layer, the index of the node after it; the first layer also has the nodes before
        it, the last those after it."""
        layers = (layer_of(n.outputs[0].name) or 0 for n in self.graph.nodes)
        return [*accumulate(Counter(accumulate(layers, max)).values())]

    def matmuls(self, end: int, weights: Container[str]) -> list[Matmuls]:
        """Return the matmuls with `weights` from the next node to node `end`, by input."""
        found: dict[tuple[str, bool], Matmuls] = {}
        for i in range(self.next, end):
            n = self.graph.nodes[i]
            for w in matrices_of(n, weights):
                key = n["x"].name, n.op == "experts" and w == n["down"].name
                found.setdefault(key, Matmuls(i, [])).weights.append(w)
        return [*found.values()]

    def run(self, end: int, *use: Callable[[Node, list[Any], tuple[Any, ...]], None]) -> None:
        """Run all windows from the next node up to node `end`, which is the next one then; each
        callback of `use` gets each node, its operands and its results."""
        for env in self.windows:
            for i in range(self.next, end):
                n = self.graph.nodes[i]
                tensors = [self._operand(v, env) for v in n.inputs]
                results = run_node(n, tensors)
                for f in use:
                    f(n, tensors, results)
                env |= zip((v.name for v in n.outputs), results, strict=True)
                for v in (*n.inputs, *n.outputs):
                    if self.last_use.get(v.name, 0) <= i:
                        env.pop(v.name, None)
        self.next = end
        self.loaded.clear()

    def inputs(self, m: Matmuls, env: Mapping[str, Any], routed: Mapping[str, Any]) -> list[Tensor]:
        """Return the inputs [T, K] of matmuls at the next node in a window; for down projections of
        experts those of each expert, at the tokens that the router chose in the window `routed`."""
        n = self.graph.nodes[m.node]
        rows = env[n["x"].name].flatten(0, -2)
        if n.op != "experts" or m.weights != [n["down"].name]:
            return [rows]
        index, hidden = routed[n["index"].name].flatten(0, -2), []
        for e, w in enumerate(self._operand(n["gate_up"], env)):
            gate, up = (rows[(index == e).any(-1)] @ w.mT).chunk(2, -1)
            hidden.append(activate(gate, n.word("act")) * up)
        return hidden

    def logits(self, env: Mapping[str, Any], rows: Tensor) -> Tensor:
        """Return the logits [len(rows), vocab] at positions `rows` of a window whose values `env`
        are those after all layers."""
        values = {self.head[0]["x"].name: env[self.head[0]["x"].name][:, rows]}
        for n in self.head:
            tensors = [
                values[v.name] if v.name in values else self.params.load_input(v) for v in n.inputs
            ]
            values |= zip((v.name for v in n.outputs), run_node(n, tensors), strict=True)
        return values[self.head[-1].outputs[0].name][0]

    def _operand(self, v: Value, env: Mapping[str, Any]) -> Any:
        for tensors in (env, self.replaced):
            if v.name in tensors:
                return tensors[v.name]
        if v in self.graph.param_set:
            if v.name not in self.loaded:
                self.loaded[v.name] = self.params.load_input(v)
            return self.loaded[v.name]
        return zeros(v.type.bind({"B": len(env["positions"]), "C": 1}))  # an empty cache


def input_sums(m: Matmuls, *streams: Stages) -> list[Inputs]:
    """Return the sums over all windows for the inputs of matmuls at the next node, for each expert
    if these differ: of the last of `streams`, compared with the first one if there are two.
    CheckError if one is NaN or infinite. An expert without tokens gets the sum over all experts."""
    sums: dict[int, list[Tensor]] = {}
    for envs in zip(*(s.windows for s in streams), strict=True):
        inputs = [s.inputs(m, env, envs[-1]) for s, env in zip(streams, envs, strict=True)]
        for e, pair in enumerate(zip(inputs[0], inputs[-1], strict=True)):
            x, y = map(column_parts, pair)
            if e not in sums:
                sums[e] = [torch.zeros(*y.shape[::2], y.shape[-1]) for _ in streams]
            products, *drifts = sums[e]
            for total, columns in zip(products, y, strict=True):
                KERNELS.products(total, columns)
            for drift in drifts:
                drift.baddbmm_((x.float() - y.float()).mT, y.float())
    if not all(bool(t.isfinite().all()) for each in sums.values() for t in each):
        fix = "build with --dtype float32, or without --calibrate and --bits"
        raise CheckError(f"calibration: inputs of {m.weights[0]} are NaN or infinite; {fix}")
    if unused := [e for e, each in sums.items() if not bool(each[0].any())]:
        total = [torch.stack(each).sum(0) for each in zip(*sums.values(), strict=True)]
        sums |= dict.fromkeys(unused, total)
    return [Inputs(t.triu() + t.triu(1).mT, *drift) for t, *drift in sums.values()]


# --- quantised weights ----------------------------------------------------------------------------


def calibrated_schemes(config: QuantConfig, spec: Spec) -> dict[str, Scheme]:
    """Return weight -> scheme for the layers' matrices whose format supports calibration."""
    return {
        name: scheme
        for name, scheme in schemes_of(config, spec).items()
        if layer_of(name) is not None and is_compensated(scheme.form)
    }


def calibrate(p: Prepared, progress: Progress) -> tuple[dict[str, Codes], Path]:
    """Return weight -> (codes, scales) for the weights of `calibrated_schemes`, quantised on the
    calibration text, and the folder of their files, which the caller removes. Layers that an
    interrupted build has quantised with the same weights, text and config are not quantised
    again."""
    assert p.config.quant
    c, schemes = p.config, calibrated_schemes(p.config.quant, p.config.spec)
    key = cache_key(c.spec, c.dtype, p.source, p.calibration, p.weights, sorted(schemes.items()))
    folder = private(cache_root() / FOLDER / key)
    plain = Stages(c.spec, c.dtype, p.source, p.calibration.windows(c.spec.tokens.bos))
    streams, dtype = (plain, plain.copy()), torch_dtype(c.dtype)
    done = [folder / f"layer-{i:04d}.safetensors" for i in range(len(plain.ends))]
    last = max((i for i, file in enumerate(done) if not file.is_file()), default=-1)
    for layer, file in enumerate(done[: last + 1]):
        progress(f"calibration: layer {layer + 1} of {len(done)}")
        if file.is_file():
            stored = _stored_codes([file]).items()
            streams[1].replaced = {w: dequantize_codes(*t, dtype) for w, t in stored}
        else:
            _quantise_layer(plain.ends[layer], streams, schemes, file)
        for stages in streams:
            stages.run(plain.ends[layer])
    return _stored_codes(done), folder


def _quantise_layer(
    end: int, streams: tuple[Stages, Stages], schemes: Mapping[str, Scheme], file: Path
) -> None:
    """Write the codes and scales of a layer's weights to a file; `streams` are the model with its
    weights and with quantised ones, at the start of the layer, of which `end` is the end."""
    plain, quantised = streams
    quantised.replaced, tensors = {}, dict[str, tensorfile.FileTensor]()
    for m in plain.matmuls(end, schemes):
        for stages in streams:
            stages.run(m.node)
        inputs = input_sums(m, *streams)
        for name in m.weights:
            w = plain.params.tensor(name)
            codes = quantised_weight(w, inputs, schemes[name], plain.dtype)
            quantised.replaced[name] = dequantize_codes(*codes, torch_dtype(plain.dtype))
            for suffix, t in zip((CODES, SCALES), codes, strict=True):
                tensors[f"{name}{suffix}"] = tensorfile.FileTensor.of(t)
    tensorfile.write_tensors(file, tensors)


def _stored_codes(files: list[Path]) -> dict[str, Codes]:
    """Return weight -> (codes, scales) of the files of layers."""
    stored = StoredParams.open(files)
    weights = [n.removesuffix(CODES) for n in stored.files.names if n.endswith(CODES)]
    return {w: (stored.tensor(f"{w}{CODES}"), stored.tensor(f"{w}{SCALES}")) for w in weights}


def quantised_weight(w: Tensor, inputs: Sequence[Inputs], scheme: Scheme, dtype: str) -> Codes:
    """Return codes and scales of a weight [.., N, K]; stacked experts share inputs or have one
    each."""
    if w.ndim == 2:
        return compensation.calibrated(w, inputs[0], scheme, dtype, KERNELS)
    each = [inputs[min(e, len(inputs) - 1)] for e in range(len(w))]
    parts = [compensation.calibrated(x, i, scheme, dtype, KERNELS) for x, i in zip(w, each)]
    codes = torch.stack([codes.view(torch.uint8) for codes, _ in parts]).view(parts[0][0].dtype)
    return codes, torch.stack([scales for _, scales in parts])


def cache_key(
    spec: Spec, dtype: str, source: Checkpoint, text: CalibrationText, *facts: Any
) -> str:
    """Return a digest of what affects the result: spec, dtype, weight files, tokens of the text,
    `facts` (options), and the source of compensation.py and of this file."""
    method = [Path(f).read_bytes() for f in (compensation.__file__, __file__)]
    files = [(h.path, h.identity) for h in source.headers]
    if not files and source.directory.exists():  # random weights have no files
        files = [(f, tensorfile.identity(f.stat())) for f in weight_files(source.directory)]
    return _digest(repr((spec.digest(), dtype, files, text.ids, WINDOW, facts, method)))[:32]


def weight_files(path: Path) -> list[Path]:
    """Return a checkpoint's file, or the files in its directory."""
    return sorted(path.iterdir()) if path.is_dir() else [path]
