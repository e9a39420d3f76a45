"""A weight made of its codes, for products of more rows than are multiplied with codes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from g4ir.ir.graph import RESULT, Graph, Node
from g4ir.ops.codecs import FORMS

from ..target import Target
from .base import Choice, Kernel, Sample, Shape, both_in_codes, codes_of, is_skinny, size

if TYPE_CHECKING:
    from ..run import Run


def _shape(g: Graph, n: Node, target: Target) -> Shape | None:
    """Return the shape of a weight with a user that is the library's."""
    form, users = codes_of(g, n.out), g.users().get(n.out.name, [RESULT])
    if not form or all(
        u is not RESULT and (is_skinny(u, target) or both_in_codes(g, u)) for u in users
    ):
        return None
    k = size(n.out.type, -1)
    return {"n": n.out.type.numel() // k, "k": k, **form}


def _dequantize(run: Run, n: Node, choice: Choice, codes: Any, scales: Any) -> Any:
    from .dequantize_triton import dequantize

    return dequantize(codes, scales, n.word("to"), **choice.use)


#: shape of the codes in numbers, form, groups of a row
SIZES = [
    ((5, 40), "int8", 1),
    ((2, 3, 96), "int4", 3),
    ((9, 40), "int4", 1),
    ((3, 40), "fp8", 1),
    ((4, 256), "fp8", 2),
]


def _sample(shape: tuple[int, ...], form: str, groups: int) -> Sample:
    f, rows, k = FORMS[form], ",".join(map(str, shape[:-1])), shape[-1]
    return Sample(
        (f"{f.codes}[{rows},{k // f.packed}]", f"T[{rows},{groups}]"),
        {"to": "T"},
        {"block_n": 2, "block_k": 64, "warps": 1},
        packed=True,
    )


KERNELS = (
    Kernel(
        op="dequantize",
        starts={"dequantize": 1},
        rule=_shape,
        call=_dequantize,
        samples=tuple(_sample(*sizes) for sizes in SIZES),
        error=1e-6,
        differ=0,
        use={"block_n": 8, "block_k": 1024, "warps": 8},
    ),
)
