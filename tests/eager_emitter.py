"""The tensor primitives, computed at once with torch: what a decomposition means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from g4ir.backends.primitives.emitter import Emitter, Operand, reshape_spec
from g4ir.ir.graph import Value
from g4ir.ops.types import Type, torch_dtype

_UNARY: Mapping[str, Callable[..., torch.Tensor]] = {
    "neg": torch.neg,
    "exp": torch.exp,
    "log": torch.log,
    "tanh": torch.tanh,
    "sqrt": torch.sqrt,
    "erf": torch.erf,
    "not": torch.logical_not,
}
_BINARY: Mapping[str, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "pow": torch.pow,
    "max": torch.maximum,
    "min": torch.minimum,
    "eq": torch.eq,
    "gt": torch.gt,
    "lt": torch.lt,
    "and": torch.logical_and,
    "or": torch.logical_or,
    "floor_div": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
}


class EagerEmitter(Emitter):
    """Handles are tensors. Feeds and weights are given; what the network hands back is kept."""

    def __init__(
        self, feeds: Mapping[str, torch.Tensor], params: Callable[[str], torch.Tensor]
    ) -> None:
        self.feeds, self.params = feeds, params
        self.outputs: dict[str, torch.Tensor] = {}

    def made(self, handle: torch.Tensor, t: Type) -> Operand:
        """Every result is compared with its declared type."""
        assert handle.dtype == torch_dtype(t.dtype), f"{self.scope}: {handle.dtype}, not {t}"
        fits = handle.dim() == t.rank and all(
            isinstance(d, str) or d == n for d, n in zip(t.shape, handle.shape, strict=True)
        )
        assert fits, f"{self.scope}: {list(handle.shape)}, not {t}"
        return Operand(t, handle)

    def input(self, name: str, t: Type) -> Operand:
        return self.made(self.feeds[name], t)

    def param(self, v: Value) -> Operand:
        return self.made(self.params(v.name), v.type)

    def constant(self, tensor: Any) -> Operand:
        from g4ir.ops.types import dtype_name

        return Operand(Type(dtype_name(tensor.dtype), tuple(tensor.shape)), tensor)

    def output(self, name: str, x: Operand) -> None:
        self.outputs[name] = x.handle

    def when_one(
        self, x: Operand, axis: int, then: Callable[[], Operand], otherwise: Callable[[], Operand]
    ) -> Operand:
        a, b = then(), otherwise()
        assert a.type == b.type
        return a if x.handle.shape[axis] == 1 else b

    def _unary(self, kind: str, x: Operand, t: Type) -> Operand:
        return self.made(_UNARY[kind](x.handle), t)

    def _binary(self, kind: str, a: Operand, b: Operand, t: Type) -> Operand:
        return self.made(_BINARY[kind](a.handle, b.handle), t)

    def _where(self, condition: Operand, a: Operand, b: Operand, t: Type) -> Operand:
        return self.made(torch.where(condition.handle, a.handle, b.handle), t)

    def _cast(self, x: Operand, t: Type) -> Operand:
        return self.made(x.handle.to(torch_dtype(t.dtype)), t)

    def _linear(self, x: Operand, w: Operand, columns: bool, t: Type) -> Operand:
        rows = w.handle.mT if columns else w.handle
        return self.made(torch.nn.functional.linear(x.handle, rows), t)

    def _dequantize(self, codes: Operand, scales: Operand, axis: int, t: Type) -> Operand:
        x = codes.handle
        if x.dtype == torch.uint8:
            x = torch.stack((x & 15, x >> 4), -1).flatten(-2)
            x = (x ^ 8).to(torch.int8) - 8
        size = t.shape[axis] // scales.handle.shape[axis]  # type: ignore[operator]
        factors = scales.handle.float().repeat_interleave(size, axis)
        return self.made((x.float() * factors).to(torch_dtype(t.dtype)), t)

    def _bits(self, codes: Operand, t: Type) -> Operand:
        return self.made(codes.handle.view(torch.uint8), t)

    def _matmul(self, a: Operand, b: Operand, transpose_b: bool, t: Type) -> Operand:
        right = b.handle.transpose(-1, -2) if transpose_b else b.handle
        return self.made(a.handle @ right, t)

    def _softmax(self, x: Operand, t: Type) -> Operand:
        return self.made(x.handle.softmax(-1), t)

    def _reduce(self, kind: str, x: Operand, axis: int, t: Type) -> Operand:
        f = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax}[kind]
        return self.made(f(x.handle, dim=axis, keepdim=True), t)

    def _topk(self, x: Operand, k: int, values: Type, index: Type) -> tuple[Operand, Operand]:
        found, at = x.handle.topk(k, -1)
        return self.made(found, values), self.made(at, index)

    def _reshape(self, x: Operand, t: Type) -> Operand:
        sizes = [d or x.handle.shape[i] for i, d in enumerate(reshape_spec(x.type, t))]
        return self.made(x.handle.reshape(sizes), t)

    def _transpose(self, x: Operand, order: Sequence[int], t: Type) -> Operand:
        return self.made(x.handle.permute(*order), t)

    def _unsqueeze(self, x: Operand, axes: Sequence[int], t: Type) -> Operand:
        y = x.handle
        for axis in sorted(axes):
            y = y.unsqueeze(axis)
        return self.made(y, t)

    def _concat(self, xs: Sequence[Operand], axis: int, t: Type) -> Operand:
        return self.made(torch.cat([x.handle for x in xs], axis), t)

    def _slice(self, x: Operand, axis: int, start: int, stop: int, t: Type) -> Operand:
        return self.made(x.handle.narrow(axis, start, stop - start), t)

    def _prefix(self, x: Operand, axis: int, like: Operand, t: Type) -> Operand:
        return self.made(x.handle.narrow(axis, 0, like.handle.shape[0]), t)

    def _gather(self, x: Operand, index: Operand, axis: int, t: Type) -> Operand:
        found = x.handle.index_select(axis, index.handle.reshape(-1))
        sizes = (*x.handle.shape[:axis], *index.handle.shape, *x.handle.shape[axis + 1 :])
        return self.made(found.reshape(sizes), t)

    def _gather_rows(self, x: Operand, index: Operand, t: Type) -> Operand:
        row = torch.arange(x.handle.shape[0])[:, None]
        return self.made(x.handle[row, index.handle], t)

    def _append(self, cache: Operand, new: Operand, start: Operand, t: Type) -> Operand:
        out = cache.handle.clone()
        count = new.handle.shape[2]
        for b, at in enumerate(start.handle.tolist()):
            assert at + count <= out.shape[2]
            out[b, :, at : at + count] = new.handle[b]
        return self.made(out, t)
