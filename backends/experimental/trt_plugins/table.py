"""The plugins: their tensors, whole numbers, and how many programs they start.

All sizes are written once, in an arithmetic that is given: TensorRT's expressions of dims that are
not known yet, or whole numbers. A function of sizes gets the arithmetic, the shapes of the inputs
by name, and the kernel's constants.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

#: the dtype of the network, among the kinds of tensors
T = "T"

Shape = tuple[Any, ...]
Shapes = Mapping[str, Shape]
Constants = Mapping[str, Any]


class Arithmetic(Protocol):
    """Beside + * and // of the sizes themselves, whose left operand is never a plain number."""

    def cdiv(self, a: Any, b: Any) -> Any: ...
    def min(self, a: Any, b: Any) -> Any: ...


class Named:
    """The arithmetic of shapes whose dims have names: what follows from a name has another one."""

    @staticmethod
    def cdiv(a: int, b: Any) -> Any:
        return f"{a}/{b}" if isinstance(b, str) else Whole.cdiv(a, b)

    @staticmethod
    def min(a: Any, b: Any) -> Any:
        raise ValueError(f"min of {a} and {b}: no shape needs it")


class Whole:
    """The arithmetic of numbers that are known."""

    @staticmethod
    def cdiv(a: int, b: int) -> int:
        return -(-a // b)

    @staticmethod
    def min(a: int, b: int) -> int:
        return a if a < b else b


Sizes = Callable[[Arithmetic, Shapes, Constants], Shape]


@dataclass(frozen=True)
class Plugin:
    """The kernel `name` of `module`.py, whose parameters are the inputs, the whole numbers, the
    outputs, and then constants. Kinds are dtypes of the IR, or T."""

    name: str
    module: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    #: one shape per output
    shapes: Callable[[Arithmetic, Shapes, Constants], tuple[Shape, ...]]
    grid: Sizes
    whole: Mapping[str, Callable[[Shapes, Constants], Any]]

    def kinds(self, dtype: str) -> list[str]:
        """Return the dtypes of the parameters in order; `whole` for whole numbers."""
        of = {T: dtype}
        return [
            *(of.get(k, k) for k in self.inputs.values()),
            *(["whole"] * len(self.whole)),
            *(of.get(k, k) for k in self.outputs.values()),
        ]


@dataclass(frozen=True)
class Plan:
    """How one layer's kernel is made: the plugin's only attribute, as text. (Numbers as attributes
    are read by TensorRT 10.16 in a way that numpy 2.4 no longer allows.)"""

    plugin: str
    dtype: str
    constants: Constants
    warps: int
    stages: int
    capability: int = 90

    def text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def parse(text: str) -> Plan:
        return Plan(**json.loads(text))


def blocks(n: int, size: int) -> int:
    """Count the blocks of `size` that cover n."""
    return -(-n // size)


def _tokens(s: Shapes) -> Any:
    first = next(iter(s.values()))
    return first[0] * first[1]


def _count(s: Shapes, c: Constants) -> Any:
    b, n, k = s["order" if "order" in s else "index"]
    return b * n * k


def _columns(a: Arithmetic, s: Shapes, c: Constants) -> Shape:
    return _tokens(s), blocks(c["HIDDEN"], c["BLOCK_N"] if "BLOCK_N" in c else c["BLOCK"])


def _tiles(columns: str) -> Sizes:
    def grid(a: Arithmetic, s: Shapes, c: Constants) -> Shape:
        """Return the grid: an expert in use has one tile that may not be full, and full ones."""
        count = _count(s, c)
        tiles = count // c["BLOCK_M"] + a.min(count, c["EXPERTS"])
        return tiles, blocks(c[columns], c["BLOCK_N"])

    return grid


def _rows(a: Arithmetic, s: Shapes, c: Constants) -> Shape:
    return (_tokens(s),)


_DUAL = ("a", "w_a", "b", "w_b", "w", "residual")
#: plugin -> the op that it is, whether with a scalar, and which pre-norms have a weight
NORMS: Mapping[str, tuple[str, bool, tuple[bool, ...]]] = {
    "norm_residual": ("norm_residual", False, ()),
    "norm_residual_norm": ("norm_residual", False, (True,)),
    "norm_residual_scaled_norm": ("norm_residual", True, (True,)),
    "norm_residual_norms": ("norm_residual", False, (True, True, False)),
    "dual_norm_residual_scaled_norm": ("dual_norm_residual", True, (True,)),
}


def _norms(name: str) -> Plugin:
    """Return the plugin of an end of a block: results are like its first input."""
    op, scaled, weighted = NORMS[name]
    rows = ("x", "residual", "w") if op == "norm_residual" else _DUAL
    weights = [f"w{i + 1}" for i, has in enumerate(weighted) if has]
    inputs = [*rows, *(["scalar"] if scaled else []), *weights]
    outputs = ["y", *(f"y{i + 1}" for i in range(len(weighted)))]
    return Plugin(
        *(name, "norms", dict.fromkeys(inputs, T), dict.fromkeys(outputs, T)),
        lambda a, s, c: (s[inputs[0]],) * len(outputs),
        _rows,
        {},
    )


def _looked_at(s: Shapes, c: Constants) -> Any:
    return s["slots"][0]


def _shares(a: Arithmetic, tokens: Shape, c: Constants) -> Any:
    """Count the programs that split a token's keys, of a tensor [B, S, ...]."""
    return a.cdiv(c["SPLITS"], tokens[1])


_LOOK = {"looked_at": _looked_at, "tokens": lambda s, c: s["positions"][1]}

PLUGINS: Mapping[str, Plugin] = {
    p.name: p
    for p in (
        Plugin(
            "moe_sort",
            "moe",
            {"index": "i32"},
            {"order": "i32", "offsets": "i32"},
            lambda a, s, c: (s["index"], (c["EXPERTS"] + 1,)),
            lambda a, s, c: (c["EXPERTS"],),
            {"count": _count},
        ),
        Plugin(
            "moe_gate_up_grouped",
            "moe",
            {"x": T, "order": "i32", "offsets": "i32", "gate_up": T},
            {"act": T},
            lambda a, s, c: ((*s["order"], c["INNER"]),),
            _tiles("INNER"),
            {"count": _count},
        ),
        Plugin(
            "moe_down_grouped",
            "moe",
            {"act": T, "order": "i32", "offsets": "i32", "down": T},
            {"parts": T},
            lambda a, s, c: ((*s["order"], c["HIDDEN"]),),
            _tiles("HIDDEN"),
            {"count": _count},
        ),
        Plugin(
            "moe_combine",
            "moe",
            {"parts": T, "weights": "f32"},
            {"out": T},
            lambda a, s, c: ((*s["weights"][:2], c["HIDDEN"]),),
            _columns,
            {},
        ),
        Plugin(
            "decode_parts",
            "attention",
            {"q": T, "keys": T, "values": T, "positions": "i32", "slots": "i32"},
            {"parts": "f32", "stats": "f32"},
            lambda a, s, c: (
                (*s["q"][:2], c["HEADS"], _shares(a, s["q"], c), c["GROUP"], c["D"]),
                (*s["q"][:2], c["HEADS"], _shares(a, s["q"], c), 2, c["GROUP"]),
            ),
            lambda a, s, c: (_tokens(s), c["HEADS"], _shares(a, s["q"], c)),
            _LOOK,
        ),
        Plugin(
            "decode_merge",
            "attention",
            {"parts": "f32", "stats": "f32", "positions": "i32", "slots": "i32"},
            {"out": T},
            lambda a, s, c: ((*s["positions"], c["HEADS"] * c["GROUP"], c["D"]),),
            lambda a, s, c: (_tokens(s), c["HEADS"], c["D"] // c["BLOCK"]),
            _LOOK,
        ),
        *map(_norms, NORMS),
    )
}
