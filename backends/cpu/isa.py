"""Weight formats of the C kernels, and which of them this process's instruction set multiplies as
integers."""

from __future__ import annotations

from g4ir.ui.processor import instruction_set

#: min elements of a weight that is tiled; smaller ones stay row-major, which is fast enough
FROM = 1 << 16
#: dtype of a quantised weight -> its format, in the order of the ids in kernels/kernels.h
KERNEL_FORMATS = {
    "i8": "INT8",
    "u8": "INT4",
    "f8e4m3": "FP8",
    "i64": "INT6",
    "i32": "UINT4",
    "i16": "UINT5",
    "u16": "INT5",
    "b2": "INT3K",
    "b16": "UINT2",
    "b8": "IQ4",
    "b4": "MIN4",
    "b1": "MIN5",
    "u64": "INT2",
    "u32": "INT3",
    "f4": "FP4",
    "nl4": "NL4",
    "nl3": "NL3",
    "nl2": "NL2",
}
#: sets of ISA extensions, each sufficient for integer dot products with tiles
_EXTENSIONS = ({"ssse3"}, {"asimddp"})
#: format with other requirements -> its sets
_FORMAT_EXTENSIONS = {"fp8": ({"avx512_vnni", "avx512bw", "avx512_bf16", "avx512vbmi"},)}


def multiplies_integers(fmt: str) -> bool:
    """Whether bf16 rows of x are multiplied with tiles of a format by integer dot products (fp8: by
    bf16 ones; kernels/digits.h); otherwise in fp32."""
    flags = instruction_set().flags
    return any(need <= flags for need in _FORMAT_EXTENSIONS.get(fmt, _EXTENSIONS))
