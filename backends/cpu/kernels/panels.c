/* GEMM and prefill attention on packed panels (gemm.h) of bf16 (PANELS_BF16) or fp32; weights are quantised in FORM,
 * or dense if FORM is not defined. Where bf16 panels do not pay, fp32 panels serve both dtypes, except for
 * formats that the GEMM multiplies as integers (form.c). */
#include "gemm.h"

#ifdef FORM
/* At -O3 compilers take minutes, with no speedup; sanitized code keeps its own level. */
#if WIDE == 32 && !defined(SANITIZED)
#pragma GCC optimize("O2")
#endif
#include "panels.h"
#else
#include "dense_panels.h"
#include "prefill_attention.h"
#endif

__attribute__((constructor)) static void add_panels(void) {
#ifdef PANELS_BF16
    int first = BF16, end = bf16_pays() ? F32 : BF16;
#elif defined(FORM)
    int first = bf16_pays() || EXACT_INTEGERS(FORM) ? F32 : BF16, end = F32 + 1;
#else
    int first = bf16_pays() ? F32 : BF16, end = F32 + 1;
#endif
    for (int dtype = first; dtype < end; dtype++) {
        panel_kernels *of = g4ir_panels + dtype;
#ifdef FORM
        of->gemm[FORM] = multiply_panels;
#else
        of->linear = multiply_dense_rows;
        of->add_products = add_dense_products;
        of->attend_chunk = attend_prompt;
#endif
    }
}
