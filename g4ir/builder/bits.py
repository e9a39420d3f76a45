"""`--bits N`: a quantisation config with at most N bits per weight of the layers' matrices.

The Kullback-Leibler divergence that quantising a weight costs is, to second order and for errors
that are independent from output to output, half the sum over outputs of E[g^2] * E[(e x)^2]: g is
the gradient of log p of a token drawn from the model (its Fisher information), e the error of the
output's row. Both are measured on a calibration text; a format for each weight is then chosen by a
Lagrangian of divergence and bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from g4ir.errors import CheckError, InputError
from g4ir.ir.graph import Node
from g4ir.ir.names import layer_of
from g4ir.ops.codecs import dequantize_codes
from g4ir.ops.quant import quantize
from g4ir.ops.types import Type
from g4ir.quant.compensation import Inputs
from g4ir.quant.recipe import ENGINE, MEASURED, SCHEMES, QuantConfig, Rule, Scheme
from g4ir.quant.rewrite import weights_of
from g4ir.spec.record import Spec
from g4ir.ui.progress import Progress
from g4ir.weights.checkpoint import Checkpoint

from .calibration import CalibrationText, InputProducts, Stages

#: range of --bits
LEAST, MOST = 2.5, 8.0
#: schemes that are chosen from; int6 in groups that divide most rows
CANDIDATES = (
    *(SCHEMES[form] for form in ("nl2", "nl3", "nl4", "int5", "int8")),
    Scheme("int6", 128, "f16"),
)
#: windows of the text for gradients and for errors; positions of a window with a drawn token
GRADIENT_WINDOWS, ERROR_WINDOWS, DRAWN = 4, 8, 128
#: rows of a weight whose errors are measured
ROWS = 256

Tensor = torch.Tensor


@dataclass(frozen=True)
class Measured:
    """What a format of a weight costs: its bytes, and the divergence in nats per token."""

    scheme: Scheme
    nbytes: int
    divergence: float


def bits_config(
    bits: float,
    spec: Spec,
    dtype: str,
    source: Checkpoint,
    text: CalibrationText,
    progress: Progress,
) -> QuantConfig:
    """Return a config with at most `bits` bits per weight of the layers' matrices, scales included;
    tables and head in int8. InputError for fewer bits than the formats that fit the weights
    have."""
    weights = weights_of(spec)
    matrices = {name: t for name, t in weights.items() if layer_of(name) is not None}
    costs = measured_costs(spec, dtype, source, matrices, text, progress)
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


def measured_costs(
    spec: Spec,
    dtype: str,
    source: Checkpoint,
    matrices: Mapping[str, Type],
    text: CalibrationText,
    progress: Progress,
) -> dict[str, list[Measured]]:
    """Return weight -> the candidates that fit it. CheckError if a gradient or an input is no
    number."""
    windows = text.windows(spec.tokens.bos)
    step = max(1, len(windows) // ERROR_WINDOWS)
    windows = windows[::step][:ERROR_WINDOWS]
    information = {name: torch.zeros(1) for name in matrices}
    for i, window in enumerate(windows[:GRADIENT_WINDOWS]):
        progress(f"bits: gradients, window {i + 1} of {GRADIENT_WINDOWS}")
        stages = Stages(spec, dtype, source, [window])
        for name, squares in _squared_gradients(stages, matrices, seed=i).items():
            information[name] = information[name] + squares
    stages = Stages(spec, dtype, source, windows)
    costs: dict[str, list[Measured]] = {}
    for layer in range(len(stages.layers)):
        progress(f"bits: errors of layer {layer + 1} of {len(stages.layers)}")
        products = InputProducts(matrices)
        stages.run(layer, products)
        tokens = sum(w.shape[1] for w in windows)
        for name in products.keys:
            w, inputs = stages.params.tensor(name), products.of(name)
            schemes = [s for s in CANDIDATES if s.fits(matrices[name])]
            costs[name] = [
                Measured(
                    *(s, s.nbytes(matrices[name], dtype)),
                    _divergence(w, inputs, information[name], s, dtype) / tokens,
                )
                for s in schemes
            ]
    return costs


def _squared_gradients(stages: Stages, matrices: Iterable[str], seed: int) -> dict[str, Tensor]:
    """Return weight -> the mean over tokens of the squared gradients of its outputs [N]."""
    squares: dict[str, Tensor] = {}

    def keep(name: str, g: Tensor) -> None:
        squares[name] = g.detach().float().square().flatten(0, -2).sum(0)

    def watch(n: Node, results: tuple[Any, ...]) -> None:
        weights = {"linear": ("w",), "experts": ("gate_up", "down")}.get(n.op, ())
        for name in (n[w].name for w in weights):
            if name in matrices and results[0].requires_grad:
                results[0].register_hook(lambda g, name=name: keep(name, g))

    (env,) = stages.windows
    size = env["positions"].shape[1]
    with torch.enable_grad():
        for name, t in env.items():
            if t.is_floating_point():
                env[name] = t.clone().requires_grad_()
        for layer in range(len(stages.layers)):
            stages.run(layer, lambda n, tensors: None, watch)
        rows = torch.arange(0, size, max(1, size // DRAWN))
        log_p = stages.logits(env, rows).float().log_softmax(-1)
        random = torch.Generator().manual_seed(seed)
        drawn = torch.multinomial(log_p.detach().exp(), 1, generator=random)
        log_p.gather(1, drawn).sum().backward()
    for name, t in squares.items():
        if not bool(t.isfinite().all()):
            fix = "take --dtype float32, or a config with --quant"
            raise CheckError(f"--bits: gradients at {name} are NaN or infinite; {fix}")
    return {name: t / len(rows) for name, t in squares.items()}


def _divergence(
    w: Tensor, inputs: Sequence[Inputs], information: Tensor, scheme: Scheme, dtype: str
) -> float:
    """Return the divergence in nats, summed over the tokens of the inputs, of a weight in a scheme:
    of a sample of its rows, and of stacked experts on average."""
    matrices = [w] if w.ndim == 2 else list(w)
    total = 0.0
    for e, matrix in enumerate(matrices[:: max(1, len(matrices) // 4)]):
        every = max(1, len(matrix) // ROWS)
        rows, given = matrix[::every], inputs[min(e, len(inputs) - 1)]
        attrs = dict[str, Any](scheme.attrs(dtype))
        codes, scales = quantize.reference(rows, **attrs, moments=given.moments)
        off = dequantize_codes(codes, scales, torch.float32) - rows.float()
        errors = ((off @ given.products) * off).sum(-1)
        per_row = information[::every] if len(information) == len(matrix) else information.mean()
        total += 0.5 * float((errors * per_row).sum()) * every
    return total


# --- choice -----------------------------------------------------------------------------------


def choose(
    costs: Mapping[str, Sequence[Measured]], budget: float, bits: float
) -> dict[str, Scheme]:
    """Return weight -> the scheme, so that all have at most `budget` bytes and little divergence:
    the least of divergence + price * bytes, at the lowest price that keeps the budget, then better
    formats as long as they fit, those that gain most per byte first."""
    fewest = sum(min(m.nbytes for m in each) for each in costs.values())
    if fewest > budget:
        have = bits * fewest / budget
        raise InputError(f"--bits {bits:g}: the smallest formats of these weights have {have:.2f}")

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
