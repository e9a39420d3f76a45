"""What the C kernels of this process's instruction set compute."""

from __future__ import annotations

from g4ir.ui.processor import instruction_set

#: elements of a weight from which on the C kernels gain
FROM = 1 << 16
#: dtype of codes -> name of its form, in the order of their numbers in kernels/kernels.h
KERNEL_FORMS = {
    "i8": "INT8",
    "u8": "INT4",
    "f8e4m3": "FP8",
    "i64": "INT6",
    "i32": "UINT4",
    "i16": "UINT5",
    "u16": "INT5",
}
#: sets of extensions with any of which tiles are multiplied by integers: of most forms, of others
_EXTENSIONS = ({"avx512_vnni", "avx512bw"}, {"avx2", "fma"}, {"asimddp"})
_OF_FORM = {"fp8": ({"avx512_vnni", "avx512bw", "avx512_bf16", "avx512vbmi"},)}


def multiplies_integers(form: str) -> bool:
    """Whether rows of x in bf16, rounded ones too, are multiplied with tiles of a form as integers
    (kernels/digits.h); else in fp32."""
    flags = instruction_set().flags
    return any(need <= flags for need in _OF_FORM.get(form, _EXTENSIONS))
