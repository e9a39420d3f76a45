"""Second moments of matmul inputs on a calibration text (an importance matrix): they weight the
squared errors that the scales of 4-bit weights minimise.

The text graph of the unquantised model is interpreted window by window; only the column sums of
squares of each matmul's input are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from g4ir.artefact.directory import Calibration
from g4ir.backends.base import Prepared
from g4ir.chat.text_files import check_files, cut_blocks, read_text
from g4ir.engine.engine import read_tokenizer
from g4ir.engine.parts import embed_rows
from g4ir.errors import InputError
from g4ir.ir.graph import Graph, Node, Program, Value
from g4ir.ir.interpret import empty_state, interpret, run_node
from g4ir.ir.rewrite import drop_dead
from g4ir.model.text import build_graph
from g4ir.ops.mlp import activate
from g4ir.spec.reader import Line
from g4ir.spec.record import Spec
from g4ir.ui.progress import Progress
from g4ir.weights.checkpoint import TOKENIZER, sha256
from g4ir.weights.pack import MadeParams, Packing, open_table

#: maximum and minimum tokens of the text; tokens of one context, without <bos>
MAX_TOKENS, MIN_TOKENS, WINDOW = 4096, 256, 512
#: minimum second moment of a column, relative to the mean: other texts may use columns that this
#: one does not
FLOOR = 1e-3

Moments = dict[str, torch.Tensor]


@dataclass(frozen=True)
class CalibrationText:
    """The first tokens of a text file, and the file's digest."""

    path: Path
    sha256: str
    ids: tuple[int, ...]

    @classmethod
    def read(cls, path: Path, spec: Spec, side_files: Mapping[str, bytes]) -> CalibrationText:
        """Read and tokenise a file with the checkpoint's tokenizer; InputError names the file and
        the problem: missing, empty, no text, too short, or no tokenizer."""
        check_files([str(path)], "--calibrate")
        if TOKENIZER not in side_files:
            why = f"the weights come without {TOKENIZER}, and a text needs one"
            raise InputError(f"--calibrate {path}: {why}; give --checkpoint with a tokenizer")
        tokenizer = read_tokenizer(Path(TOKENIZER), side_files[TOKENIZER])
        ids: list[int] = []
        for block in cut_blocks(read_text(path)):
            block_ids = tokenizer.encode(block, add_special_tokens=False).ids
            ids += (i for i in block_ids if i < spec.text.readable_ids)
            if len(ids) >= MAX_TOKENS:
                break
        if len(ids) < MIN_TOKENS:
            problem = f"{len(ids)} tokens, and {MIN_TOKENS} are the least that say something"
            raise InputError(f"--calibrate {path}: {problem}; give a longer text")
        return cls(path, sha256(path), tuple(ids[:MAX_TOKENS]))

    @property
    def record(self) -> Calibration:
        """Return the manifest's record of the text."""
        return Calibration(Line(self.path.resolve()), self.sha256, len(self.ids))


def column_moments(p: Prepared, progress: Progress) -> Moments:
    """Return weight -> second moments of its input on the calibration text, relative to their mean:
    f32 [1, K]; for stacked experts [1, 1, K] or [E, 1, K]. The model is computed in its dtype, one
    weight in memory at a time as far as files are mapped."""
    spec, dtype = p.config.spec, p.config.dtype
    graphs = {name: build_graph(spec, name, True, dtype) for name in ("embed", "prefill")}
    embed, text = graphs.values()
    plain = Packing(Program(graphs), Graph("prologue", (), (), (), (), ()))
    params = MadeParams(plain, p.source)
    tables = {v.name: open_table(params, v, "mmap", "cpu") for v in embed.params}
    head = next(n for n in reversed(text.nodes) if n.op == "linear")
    text = drop_dead(replace(text, outputs=(head["x"],)))
    sums = _Sums(params)
    ids, bos = torch.tensor(p.calibration.ids), spec.tokens.bos
    for done, window in enumerate(ids.split(WINDOW)):
        progress(f"calibration: {done * WINDOW} of {len(ids)} tokens")
        tokens = torch.cat([torch.tensor([] if bos is None else [bos]), window])[None].long()
        size = tokens.shape[1]
        feeds = embed_rows(embed, tables, tokens)
        feeds |= {"positions": torch.arange(size)[None], "lengths": torch.tensor([size])}
        state = empty_state(text, {"B": 1, "C": size})
        out, _ = interpret(text, feeds, {v.name: v for v in text.params}, state, run=sums.run)
        sums.add(head["w"].name, out[head["x"].name].flatten(0, -2))
    return {name: _relative(t) for name, t in sums.sums.items()}


def _relative(sums: torch.Tensor) -> torch.Tensor:
    """Divide sums by their mean; an expert that saw no token gets the sums over all experts."""
    sums = sums.where(sums.sum(-1, keepdim=True) > 0, sums.sum(0, keepdim=True))
    mean = sums.mean(-1, keepdim=True)
    return (sums / mean.where(mean > 0, 1.0)).clamp(min=FLOOR).float()


class _Sums:
    """Runs nodes, reads params on first use, and accumulates the squared inputs of matmuls."""

    def __init__(self, params: MadeParams) -> None:
        self.params = params
        self.sums: Moments = {}

    def run(self, n: Node, args: list[Any]) -> tuple[Any, ...]:
        tensors = [self.params.load_input(t) if isinstance(t, Value) else t for t in args]
        if n.op == "linear":
            self.add(n["w"].name, tensors[0].flatten(0, -2))
        elif n.op == "experts":
            self._add_experts(n, *tensors)
        return run_node(n, tensors)

    def add(self, name: str, rows: torch.Tensor) -> None:
        """Accumulate the column sums of squares of a matmul's input rows [.., n, K]."""
        squares = rows.double().square().sum(-2, keepdim=True)
        self.sums[name] = self.sums.get(name, 0) + squares

    def _add_experts(self, n: Node, x: Any, _: Any, index: Any, gate_up: Any, down: Any) -> None:
        """Accumulate the inputs of an MoE layer: gate and up share one, each expert's down has its
        own."""
        rows, chosen = x.flatten(0, -2), index.flatten(0, -2)
        self.add(n["gate_up"].name, rows[None])
        inner = torch.zeros(len(down), 1, down.shape[-1], dtype=torch.double)
        for e in chosen.unique().tolist():
            gate, up = (rows[(chosen == e).any(-1)] @ gate_up[e].mT).chunk(2, -1)
            hidden = activate(gate, n.word("act")) * up
            inner[e] = hidden.double().square().sum(0, keepdim=True)
        self.sums[n["down"].name] = self.sums.get(n["down"].name, 0) + inner
