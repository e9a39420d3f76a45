"""Weights quantised by the inputs of their matmuls on a calibration text (quant/compensation.py).

The text graph of the unquantised model is interpreted layer by layer: all windows of the text run
through a layer, the outer products of its matmuls' inputs are summed, and its matrices quantised.
The quantised values and scales of a layer are written to a file of a cache folder, from which an
interrupted build resumes.
"""

from __future__ import annotations

import hashlib
import lzma
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files as package_files
from itertools import islice
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
from g4ir.ops.mlp import activate
from g4ir.ops.types import zeros
from g4ir.quant import compensation
from g4ir.quant.compensation import Codes, Inputs, column_parts, is_compensated
from g4ir.quant.recipe import QuantConfig, Scheme
from g4ir.quant.rewrite import schemes_of
from g4ir.spec.reader import Line
from g4ir.spec.record import Spec
from g4ir.ui.paths import cache_root, private
from g4ir.ui.progress import Progress
from g4ir.weights import tensorfile
from g4ir.weights.checkpoint import TOKENIZER, Checkpoint, sha256
from g4ir.weights.pack import MadeParams, Packing, StoredParams, open_table

#: maximum and minimum tokens of the texts; tokens of a window, without <bos>
MAX_TOKENS, MIN_TOKENS, WINDOW = 32_768, 256, 512
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
    """The first tokens of each calibration text, at most MAX_TOKENS in total, and the texts'
    records for the manifest."""

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
        ids_end, max_tokens = spec.text.readable_ids, MAX_TOKENS // len(paths)
        records, ids = [], list[int]()
        for path in paths:
            default = str(path) == DEFAULT
            blocks = cut_blocks([read_default_text()] if default else read_text(Path(path)))
            encoded = (tokenizer.encode(b, add_special_tokens=False).ids for b in blocks)
            every = (i for block_ids in encoded for i in block_ids if i < ids_end)
            tokens = [*islice(every, max_tokens)]
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


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# --- the text through the model, layer by layer --------------------------------------------------


class Stages:
    """The text model of a checkpoint on windows of tokens, a layer at a time."""

    def __init__(
        self, spec: Spec, dtype: str, source: Checkpoint, windows: Sequence[Tensor]
    ) -> None:
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

    @staticmethod
    def _feeds(embed: Graph, tables: dict[str, Any], tokens: Tensor) -> dict[str, Any]:
        size = tokens.shape[1]
        positions = {"positions": torch.arange(size)[None], "lengths": torch.tensor([size])}
        return {**embed_rows(embed, tables, tokens), **positions}

    @cached_property
    def layers(self) -> list[list[int]]:
        """Indices of the nodes of each layer, in order; the first layer also has the nodes before
        it, the last those after it."""
        layers: list[list[int]] = [[]]
        for i, n in enumerate(self.graph.nodes):
            layer = layer_of(n.outputs[0].name)
            if layer is not None and layer >= len(layers):
                layers.append([])
            layers[-1].append(i)
        return layers

    def run(self, layer: int, *use: Callable[[Node, list[Any], tuple[Any, ...]], None]) -> None:
        """Run all windows through a layer; each callback of `use` gets each node, its operands and
        its results."""
        params: dict[str, Any] = {}
        for env in self.windows:
            for i in self.layers[layer]:
                n = self.graph.nodes[i]
                tensors = [self._operand(v, env, params) for v in n.inputs]
                results = run_node(n, tensors)
                for f in use:
                    f(n, tensors, results)
                env |= zip((v.name for v in n.outputs), results, strict=True)
                for v in (*n.inputs, *n.outputs):
                    if self.last_use.get(v.name, 0) <= i:
                        env.pop(v.name, None)

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

    def _operand(self, v: Value, env: Mapping[str, Any], params: dict[str, Any]) -> Any:
        if v.name in env:
            return env[v.name]
        if v in self.graph.param_set:
            if v.name not in params:
                params[v.name] = self.params.load_input(v)
            return params[v.name]
        return zeros(v.type.bind({"B": len(env["positions"]), "C": 1}))  # an empty cache


class InputProducts:
    """Sums of outer products of the inputs of matmuls; weights with the same input share a sum."""

    def __init__(self, weights: Iterable[str]) -> None:
        self.weights = frozenset(weights)
        #: key -> upper triangles of the sums, f32 [parts of the columns, k, k]
        self.sums: dict[str, Tensor] = {}
        #: weight -> its keys in `sums`, one per expert if experts have different inputs; `_owner`:
        #: first key -> the weight whose node updates the sums, which other weights may share
        self.keys: dict[str, list[str]] = {}
        self._owner: dict[str, str] = {}
        self._inputs: dict[str, list[Inputs]] = {}

    def __call__(self, n: Node, tensors: list[Any], results: tuple[Any, ...]) -> None:
        if n.op == "linear" and n["w"].name in self.weights:
            self._add(n["w"].name, [n["x"].name], lambda: [tensors[0].flatten(0, -2)])
        elif n.op == "experts" and {n["gate_up"].name, n["down"].name} & self.weights:
            x, _, index, gate_up, _ = tensors
            rows, name = x.flatten(0, -2), n["down"].name
            self._add(n["gate_up"].name, [n["x"].name], lambda: [rows])
            each = [f"{name}.{e}" for e in range(len(gate_up))]
            self._add(name, each, lambda: _hidden_rows(n, rows, index.flatten(0, -2), gate_up))

    def _add(self, weight: str, keys: list[str], rows: Callable[[], list[Tensor]]) -> None:
        self.keys[weight] = keys
        if self._owner.setdefault(keys[0], weight) != weight:
            return
        for key, x in zip(keys, rows(), strict=True):
            parts = column_parts(x)
            if key not in self.sums:
                self.sums[key] = torch.zeros(*parts.shape[::2], parts.shape[-1])
            for total, columns in zip(self.sums[key], parts, strict=True):
                KERNELS.products(total, columns)

    def of(self, weight: str) -> list[Inputs]:
        """Return the sums of a weight's inputs, per expert if these differ; CheckError if one is
        NaN or infinite. An expert without tokens gets the sum over all experts."""
        keys = self.keys[weight]
        if keys[0] in self._inputs:
            return self._inputs[keys[0]]
        sums = [self.sums[key] for key in keys]
        if not all(bool(t.isfinite().all()) for t in sums):
            fix = "build with --dtype float32, or without --calibrate and --bits"
            raise CheckError(f"calibration: inputs of {weight} are NaN or infinite; {fix}")
        if unused := [i for i, t in enumerate(sums) if not bool(t.any())]:
            total = torch.stack(sums).sum(0)
            sums = [total if i in unused else t for i, t in enumerate(sums)]
        self._inputs[keys[0]] = [Inputs(t.triu() + t.triu(1).mT) for t in sums]
        return self._inputs[keys[0]]


def _hidden_rows(n: Node, rows: Tensor, index: Tensor, gate_up: Tensor) -> list[Tensor]:
    """Return the inputs [tokens of the expert, K] of each expert's down projection."""
    hidden = []
    for e, w in enumerate(gate_up):
        gate, up = (rows[(index == e).any(-1)] @ w.mT).chunk(2, -1)
        hidden.append(activate(gate, n.word("act")) * up)
    return hidden


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
    stages = Stages(c.spec, c.dtype, p.source, p.calibration.windows(c.spec.tokens.bos))
    done = [folder / f"layer-{i:04d}.safetensors" for i in range(len(stages.layers))]
    last = max((i for i, file in enumerate(done) if not file.is_file()), default=-1)
    for layer, file in enumerate(done[: last + 1]):
        progress(f"calibration: layer {layer + 1} of {len(done)}")
        pending = () if file.is_file() else schemes
        products = InputProducts(pending)
        stages.run(layer, products)
        if pending:
            tensors: dict[str, tensorfile.FileTensor] = {}
            for name in products.keys:
                w, inputs = stages.params.tensor(name), products.of(name)
                codes = quantised(w, inputs, schemes[name], c.dtype)
                for end, t in zip((CODES, SCALES), codes, strict=True):
                    tensors[f"{name}{end}"] = tensorfile.FileTensor.of(t)
            tensorfile.write_tensors(file, tensors)
    stored = StoredParams.open(done)
    weights = [n.removesuffix(CODES) for n in stored.files.names if n.endswith(CODES)]
    return {
        w: (stored.tensor(f"{w}{CODES}"), stored.tensor(f"{w}{SCALES}")) for w in weights
    }, folder


def quantised(w: Tensor, inputs: Sequence[Inputs], scheme: Scheme, dtype: str) -> Codes:
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
