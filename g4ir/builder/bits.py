"""`--bits N`: a quantisation config with at most N bits per weight of the layers' matrices.

The Kullback-Leibler divergence that quantising a weight costs is, to second order and for errors
that are independent from output to output, half the sum over outputs of E[g^2 (e x)^2]: g is the
gradient, by the output, of log p of a token drawn from the model (E[g^2]: Fisher information), e
the error of the weight's row, x the input. g and e x are measured at the same tokens of a
calibration text; a format for each weight is then chosen by a Lagrangian of divergence and bits.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from g4ir.errors import CheckError, InputError
from g4ir.ir.graph import Node
from g4ir.ir.names import layer_of
from g4ir.ops.codecs import dequantize_codes
from g4ir.ops.types import Type
from g4ir.plan.options import BuildConfig
from g4ir.quant.compensation import Inputs
from g4ir.quant.recipe import ENGINE, MEASURED, SCHEMES, QuantConfig, Rule, Scheme
from g4ir.quant.rewrite import weights_of
from g4ir.ui.files import write_file
from g4ir.ui.paths import cache_root, private
from g4ir.ui.progress import Progress
from g4ir.weights.checkpoint import Checkpoint

from .calibration import (
    FOLDER,
    CalibrationText,
    Stages,
    cache_key,
    input_sums,
    matrices_of,
    quantised_weight,
)

#: range of --bits
MIN_BITS, MAX_BITS = 2.5, 8.0
#: candidate schemes; int6 with groups of 128, which divide the row length of most matrices
CANDIDATES = (
    *(SCHEMES[name] for name in ("nl2", "nl3", "nl4", "int5", "int8")),
    Scheme("int6", 128, "f16"),
)
#: formats that are not measured if int5 is, since their divergence is small -> int5's divergence
#: divided by theirs (median over the matrices of Gemma 3 270M)
FINER = {"int6": 5.4, "int8": 24.0}
#: formats with errors so large that the estimate is too small -> factor; with it Gemma 3 270M
#: diverges by 0.231 instead of 0.251 at 3.2 bits, and by 0.146 instead of 0.156 at 3.5
COARSE = {"nl2": 2.0}
#: at most WINDOWS windows of the text calibrate; on MEASURED_WINDOWS of them errors are measured,
#: at about TOKENS tokens of each, with gradients of tokens sampled at about DRAWN positions. About
#: ROWS rows of a matrix, or SOME_EXPERTS experts of a layer, are quantised to measure the errors
WINDOWS, MEASURED_WINDOWS, TOKENS, DRAWN, ROWS, SOME_EXPERTS = 16, 4, 128, 128, 512, 4

Tensor = torch.Tensor


@dataclass(frozen=True)
class Measured:
    """Cost of quantising a weight by a scheme: its bytes, and the divergence in nats per token."""

    scheme: Scheme
    nbytes: int
    divergence: float


def bits_config(
    bits: float,
    c: BuildConfig,
    source: Checkpoint,
    kind: Any,
    text: CalibrationText,
    progress: Progress,
) -> QuantConfig:
    """Return a config with at most `bits` bits per weight of the layers' matrices, scales included;
    tables and head in int8. `kind`: the manifest's record of the engine's weights, part of the
    cache key. InputError if the smallest formats need more bits."""
    weights = weights_of(c.spec)
    matrices = {name: t for name, t in weights.items() if layer_of(name) is not None}
    key = cache_key(c.spec, c.dtype, source, text, kind, Path(__file__).read_bytes())
    file = private(cache_root() / FOLDER) / f"{key}.json"
    divergences = measured_divergences(c, source, matrices, text, file, progress)
    costs = {}
    for name, t in matrices.items():
        pairs = zip(_candidates(t), divergences[name], strict=True)
        costs[name] = [Measured(s, s.nbytes(t, c.dtype), d) for s, d in pairs]
    chosen = choose(costs, bits * sum(t.numel() for t in matrices.values()) / 8, bits)
    tables = {name: SCHEMES["int8"] for name in weights if name not in matrices}
    by_scheme: dict[Scheme, list[str]] = {}
    for name, scheme in {**tables, **chosen}.items():
        by_scheme.setdefault(scheme, []).append(name)
    rules = (
        Rule(tuple(names), s.form, None, s.group, s.scale or ENGINE)
        for s, names in by_scheme.items()
    )
    return QuantConfig(tuple(rules), MEASURED)


# --- measurement ------------------------------------------------------------------------------


def measured_divergences(
    c: BuildConfig,
    source: Checkpoint,
    matrices: Mapping[str, Type],
    text: CalibrationText,
    file: Path,
    progress: Progress,
) -> dict[str, list[float]]:
    """Return weight -> divergences in nats per token of the candidates that fit it; layers that
    were measured before are read from a JSON file, new ones written to it. CheckError if a gradient
    or an input is NaN or infinite."""
    done: dict[str, list[float]] = json.loads(file.read_bytes()) if file.is_file() else {}
    if done.keys() >= matrices.keys():
        return done
    windows = text.windows(c.spec.tokens.bos)
    windows = windows[:: max(1, len(windows) // WINDOWS)][:WINDOWS]
    every = max(1, len(windows) // MEASURED_WINDOWS)
    windows = [w for i in range(every) for w in windows[i::every]]  # measured ones first
    squares: list[dict[str, Tensor]] = []
    for i, window in enumerate(windows[:MEASURED_WINDOWS]):
        progress(f"bits: gradients, window {i + 1} of {len(windows[:MEASURED_WINDOWS])}")
        stages = Stages(c.spec, c.dtype, source, [window])
        squares.append(_squared_gradients(stages, matrices, seed=i))
    stages = Stages(c.spec, c.dtype, source, windows)
    for layer, end in enumerate(stages.ends):
        progress(f"bits: errors of layer {layer + 1} of {len(stages.ends)}")
        pending = [n for n in matrices if layer_of(n) == layer and n not in done]
        watched, inputs = _Watched(pending, len(squares)), dict[str, list[Inputs]]()
        for m in stages.matmuls(end, pending):
            stages.run(m.node, watched)
            inputs |= dict.fromkeys(m.weights, input_sums(m, stages))
        stages.run(end, watched)
        for name, seen in watched.seen.items():
            w, information = stages.params.tensor(name), [window[name] for window in squares]
            args = w, inputs[name], seen, information
            done[name] = _divergences(*args, _candidates(matrices[name]), c.dtype)
        write_file(file, [json.dumps(done).encode()])
    return done


def _candidates(t: Type) -> list[Scheme]:
    return [scheme for scheme in CANDIDATES if scheme.fits(t)]


class _Watched:
    """Callback that collects, by weight, inputs [T, K] and outputs [T, N] of matmuls with these
    matrices at T (about TOKENS) tokens of the first `windows` windows; for experts, inputs and
    outputs of the op `experts`."""

    def __init__(self, matrices: Container[str], windows: int) -> None:
        self.matrices, self.windows = matrices, windows
        self.seen: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, n: Node, tensors: list[Any], results: tuple[Any, ...]) -> None:
        for name in matrices_of(n, self.matrices):
            if len(seen := self.seen.setdefault(name, [])) < self.windows:
                seen.append((_some(tensors[0]), _some(results[0])))


def _some(t: Tensor) -> Tensor:
    """Take T of the S tokens of [1, S, N] at equal distances, about TOKENS; return fp32 [T, N]."""
    return t[0, :: max(1, t.shape[1] // TOKENS)].detach().float()


def _squared_gradients(stages: Stages, matrices: Container[str], seed: int) -> dict[str, Tensor]:
    """Return weight -> squared gradients [T, N], with respect to the weight's outputs at T tokens,
    of the log-probabilities of drawn tokens; scaled so that sums over T are per token of the
    text."""
    squares: dict[str, Tensor] = {}

    def keep(name: str, g: Tensor) -> None:
        squares[name] = _some(g).square()

    def watch(n: Node, tensors: list[Any], results: tuple[Any, ...]) -> None:
        for name in matrices_of(n, matrices):
            if results[0].requires_grad:
                results[0].register_hook(partial(keep, name))

    (env,) = stages.windows
    size = env["positions"].shape[1]
    with torch.enable_grad():
        for name, t in env.items():
            if t.is_floating_point():
                env[name] = t.clone().requires_grad_()
        for end in stages.ends:
            stages.run(end, watch)
        rows = torch.arange(0, size, max(1, size // DRAWN))
        log_p = stages.logits(env, rows).float().log_softmax(-1)
        random = torch.Generator().manual_seed(seed)
        drawn = torch.multinomial(log_p.detach().exp(), 1, generator=random)
        log_p.gather(1, drawn).sum().backward()
    for name, t in squares.items():
        if not bool(t.isfinite().all()):
            fix = "build with --dtype float32, or with --quant instead of --bits"
            raise CheckError(f"--bits: gradients at {name} are NaN or infinite; {fix}")
    return {name: t * (size / len(t) / len(rows)) for name, t in squares.items()}


def _divergences(
    w: Tensor,
    inputs: Sequence[Inputs],
    seen: Sequence[tuple[Tensor, Tensor]],
    information: Sequence[Tensor],
    candidates: Sequence[Scheme],
    dtype: str,
) -> list[float]:
    """Return the divergence of each candidate scheme; that of FINER formats is derived from int5's
    if int5 is a candidate."""
    args, out = (w, inputs, seen, information), dict[str, float]()
    for scheme in candidates:
        if scheme.form in FINER and "int5" in out:
            out[scheme.form] = out["int5"] / FINER[scheme.form]
        else:
            out[scheme.form] = _divergence(*args, scheme, dtype) * COARSE.get(scheme.form, 1.0)
    return [*out.values()]


def _divergence(
    w: Tensor,
    inputs: Sequence[Inputs],
    seen: Sequence[tuple[Tensor, Tensor]],
    information: Sequence[Tensor],
    scheme: Scheme,
    dtype: str,
) -> float:
    """Return the divergence in nats per token of a weight quantised by a scheme and calibrated by
    the inputs, on average over windows, measured on about ROWS of its rows. For stacked experts,
    the relative error of about SOME_EXPERTS of them stands for that of the op's output."""
    every = 1 if w.ndim > 2 else max(1, len(w) // ROWS)
    w = w[::every]
    if w.ndim > 2:
        some = range(0, len(w), max(1, len(w) // SOME_EXPERTS))
        w, inputs = w[some], [inputs[min(e, len(inputs) - 1)] for e in some]
    codes, scales = quantised_weight(w, inputs, scheme, dtype)
    off = dequantize_codes(codes, scales, torch.float32) - w.float()
    if w.ndim > 2:
        error, size = (
            sum(float(i.errors(e).sum()) for i, e in zip(inputs, each, strict=True))
            for each in (off, w.float())
        )
        outputs = [y.square() * (error / size) for _, y in seen]
    else:
        outputs = [(x @ off.T).square() * every for x, _ in seen]
    parts = [float((g[:, ::every] * e).sum()) for g, e in zip(information, outputs, strict=True)]
    return 0.5 * sum(parts) / len(parts)


# --- choice -----------------------------------------------------------------------------------


def choose(
    costs: Mapping[str, Sequence[Measured]], budget: float, bits: float
) -> dict[str, Scheme]:
    """Return weight -> scheme, with at most `budget` bytes in total: minimises divergence + price *
    bytes at the lowest price that meets the budget, then upgrades weights while bytes remain, best
    gain per byte first. InputError if the smallest schemes exceed `budget`; `bits`: its --bits."""
    fewest = sum(min(m.nbytes for m in each) for each in costs.values())
    if fewest > budget:
        need = -(-100 * bits * fewest // budget) / 100  # rounded up
        raise InputError(f"--bits {bits:g}: the smallest formats take {need:g}; give at least that")

    def at(price: float) -> dict[str, Measured]:
        return {
            name: min(each, key=lambda m: m.divergence + price * m.nbytes)
            for name, each in costs.items()
        }

    low, high = 1e-30, 1e30
    for _ in range(200):
        middle = (low * high) ** 0.5
        fits = sum(m.nbytes for m in at(middle).values()) <= budget
        low, high = (low, middle) if fits else (middle, high)
    chosen = at(high)
    free = budget - sum(m.nbytes for m in chosen.values())
    while upgrades := [
        ((chosen[name].divergence - m.divergence) / (m.nbytes - chosen[name].nbytes), name, m)
        for name, each in costs.items()
        for m in each
        if 0 < m.nbytes - chosen[name].nbytes <= free and m.divergence < chosen[name].divergence
    ]:
        _, name, best = max(upgrades, key=lambda u: u[:2])
        free -= best.nbytes - chosen[name].nbytes
        chosen[name] = best
    return {name: m.scheme for name, m in chosen.items()}
