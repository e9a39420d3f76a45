"""Types of the IR: element types, dims that are ints or names, tensor types."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        """Proxy that imports torch at its first use: graphs are read, planned and printed without
        it."""

        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch = _Torch()

Dim = int | str

#: IR name -> torch name, bytes per element
_DTYPES = {
    "f64": ("float64", 8),
    "f32": ("float32", 4),
    "bf16": ("bfloat16", 2),
    "f16": ("float16", 2),
    "f8e4m3": ("float8_e4m3fn", 1),
    "i64": ("int64", 8),
    "i32": ("int32", 4),
    "i16": ("int16", 2),
    "u64": ("uint64", 8),
    "u32": ("uint32", 4),
    "u16": ("uint16", 2),
    "i8": ("int8", 1),
    "u8": ("uint8", 1),
    "bool": ("bool", 1),
}
_NAMES = ", ".join(_DTYPES)
_DTYPES |= {
    # quantised weights in torch's dtypes of bits and of pairs of fp4, which support only copies
    "b16": ("bits16", 2),
    "b8": ("bits8", 1),
    "b4": ("bits4x2", 1),
    "b2": ("bits2x4", 1),
    "b1": ("bits1x8", 1),
    "f4": ("float4_e2m1fn_x2", 1),
    # quantised weights in float dtypes that nothing else uses
    "nl4": ("float8_e4m3fnuz", 1),
    "nl3": ("float8_e5m2fnuz", 1),
    "nl2": ("float8_e5m2", 1),
}
#: torch names of the float dtypes that hold quantised weights here: their tensors are no floats
_CARRIERS = frozenset(f"torch.{_DTYPES[name][0]}" for name in ("f4", "nl4", "nl3", "nl2"))
TORCH_NAMES = {name: long for name, (long, _) in _DTYPES.items()}
ITEMSIZE = {name: size for name, (_, size) in _DTYPES.items()}
FLOATS = frozenset({"f64", "f32", "bf16", "f16", "f8e4m3"})


@dataclass(frozen=True)
class Type:
    """A tensor type: `bf16[B,S,64]`. A dim is an int or a name that is bound later."""

    dtype: str
    shape: tuple[Dim, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"unknown dtype {self.dtype!r}; one of {_NAMES}")

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def rank(self) -> int:
        return len(self.shape)

    def with_shape(self, *shape: Dim) -> Type:
        return Type(self.dtype, tuple(shape))

    def bind(self, dims: Mapping[str, int | str]) -> Type:
        """Replace the named dims that have an entry in `dims`, a size or another name."""
        return Type(
            self.dtype, tuple(dims.get(d, d) if isinstance(d, str) else d for d in self.shape)
        )

    def numel(self) -> int:
        """Return the element count; ValueError while a dim is still a name."""
        count = 1
        for d in self.shape:
            if isinstance(d, str):
                raise ValueError(f"{self} has the unbound dim {d}; bind it first")
            count *= d
        return count

    def nbytes(self) -> int:
        return self.numel() * ITEMSIZE[self.dtype]


Types = tuple[Type, ...]

_DIM = r"(?:[0-9]+|[A-Za-z_][A-Za-z0-9_]*)"
_TYPE = re.compile(rf"([a-z0-9]+)\[((?:{_DIM}(?:,{_DIM})*)?)\]")


@lru_cache(maxsize=4096)
def parse_type(text: str) -> Type:
    """`bf16[B,S,64]` -> Type; ValueError otherwise."""
    match = _TYPE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"expected a type such as bf16[B,S,64], found {text!r}")
    dims = [d for d in match[2].split(",") if d]
    return Type(match[1], tuple(int(d) if d.isdigit() else d for d in dims))


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of an IR dtype name."""
    return getattr(torch, TORCH_NAMES[name])


def zeros(t: Type, device: str = "cpu") -> torch.Tensor:
    """Return zeros of a type without named dims."""
    return torch.zeros([int(d) for d in t.shape], dtype=torch_dtype(t.dtype), device=device)


def is_float(t: torch.Tensor) -> bool:
    """Whether a tensor holds floats (fp8 codes too), not packed codes in a dtype of floats."""
    return t.is_floating_point() and str(t.dtype) not in _CARRIERS


def dtype_name(dtype: object) -> str:
    """Return the IR name of a torch dtype or of its name (`bfloat16`, `bf16`); else ValueError."""
    text = str(dtype).removeprefix("torch.")
    for short, long in TORCH_NAMES.items():
        if text in (short, long):
            return short
    raise ValueError(f"unknown dtype {text!r}; one of {_NAMES}")
