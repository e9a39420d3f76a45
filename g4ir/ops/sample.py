"""Ops that choose the next token from logits, as far as that needs no random number."""

from __future__ import annotations

from typing import Any

from .base import cases, op, require
from .budgets import MOVES
from .types import Type, Types


def _check(name: str, logits: Type) -> None:
    fits = logits.rank == 3 and logits.shape[1] == 1 and isinstance(logits.shape[2], int)
    require(fits, f"{name}: logits {logits} are not [B, 1, vocab]")


@op
class greedy:
    """The token of the largest logit of each row, the lowest of equal ones; i64[B]"""

    budget = MOVES
    kind = "head"

    @staticmethod
    def infer(logits: Type) -> Type:
        _check("greedy", logits)
        return Type("i64", logits.shape[:1])

    @staticmethod
    def reference(logits: Any) -> Any:
        return logits[:, 0].argmax(-1)

    @staticmethod
    def flops(ins: Types, outs: Types) -> int:
        return ins[0].numel()

    samples = cases("f32[3,1,33]")


@op
class candidates:
    """The k largest logits of each row in descending order, equal ones by lower token first, and
    their tokens; f32[B,k], i64[B,k]"""

    budget = MOVES
    kind = "head"

    @staticmethod
    def infer(logits: Type, *, k: int) -> tuple[Type, Type]:
        _check("candidates", logits)
        vocab = logits.shape[2]
        require(isinstance(vocab, int) and 0 < k <= vocab, f"candidates: {k} of {logits}")
        shape = (logits.shape[0], k)
        return Type("f64" if logits.dtype == "f64" else "f32", shape), Type("i64", shape)

    @staticmethod
    def reference(logits: Any, *, k: int) -> tuple[Any, Any]:
        values, index = logits[:, 0].sort(dim=-1, descending=True, stable=True)
        wide = values if values.element_size() == 8 else values.float()
        return wide[:, :k], index[:, :k]

    @staticmethod
    def flops(ins: Types, outs: Types, **_: Any) -> int:
        return ins[0].numel()

    samples = cases("f32[3,1,33]", k=5)
