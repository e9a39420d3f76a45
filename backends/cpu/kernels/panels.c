/* Products of many rows of x and attention of prompts by panels (gemm.h) of bf16, with PANELS_BF16, or of fp32:
 * with a weight in the codes of FORM, or without one with dense weights. Where the CPU has no instructions for
 * bf16, panels of fp32 serve both dtypes. */
#include "gemm.h"

#ifdef FORM
#if WIDE == 32 /* at level 3 compilers take minutes, with nothing gained */
#pragma GCC optimize("O2")
#endif
#include "panels.h"
#else
#include "dense_panels.h"
#include "prefill_attention.h"
#endif

#ifdef PANELS_BF16
enum { FIRST = BF16, LAST = BF16 };
#elif defined(__AVX512BF16__) && defined(__AVX512VNNI__)
enum { FIRST = F32, LAST = F32 };
#else
enum { FIRST = BF16, LAST = F32 };
#endif
__attribute__((constructor)) static void add_panels(void) {
    for (int dtype = FIRST; dtype <= LAST; dtype++) {
        panel_kernels *of = g4ir_panels + dtype;
#ifdef FORM
        of->gemm[FORM] = multiply_panels;
#else
        of->linear = multiply_dense_rows;
        of->attend_chunk = attend_prompt;
#endif
    }
}
