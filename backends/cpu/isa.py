"""What the C kernels compute on this machine's processor."""

from __future__ import annotations

from g4ir.backends.host_cpu import cpu_flags

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
#: sets of extensions with any of which a CPU multiplies tiles by integers: of most forms, of others
_EXTENSIONS = ({"avx512_vnni", "avx512bw"}, {"avx2", "fma"}, {"asimddp"})
_OF_FORM = {"fp8": ({"avx512_vnni", "avx512bw", "avx512_bf16", "avx512vbmi"},)}


def has_gemm() -> bool:
    """Whether the C kernels compute products of many rows and attention of prompts
    (kernels/gemm.h): the CPU has vectors for them and no matrix unit, with which a library is
    faster."""
    flags = {*cpu_flags()}
    return "amx_bf16" not in flags and ({"avx2", "fma"} <= flags or "asimd" in flags)


def multiplies_many_rows(dtype: str) -> bool:
    """Whether those products, and attention of prompts, take x of this dtype: panels hold bf16
    where it has instructions, else fp32."""
    in_bf16 = {"avx512_bf16", "avx512_vnni"} <= {*cpu_flags()}
    return has_gemm() and dtype in (("bf16",) if in_bf16 else ("bf16", "f32"))


def multiplies_integers(form: str) -> bool:
    """Whether this CPU multiplies rows of x in bf16, rounded ones too, with tiles of a form as
    integers (kernels/digits.h); others do so in fp32."""
    return any(need <= {*cpu_flags()} for need in _OF_FORM.get(form, _EXTENSIONS))
