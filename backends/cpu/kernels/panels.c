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

/* Whether x in bf16 is multiplied in panels of bf16. Intel's instruction for sums of two products takes two
 * cycles: without AMX, panels of fp32 are half as fast again there (150 and 240 GFLOP/s on two threads). */
static int bf16_pays(void) {
#if defined(__AMX_BF16__)
    return 1;
#elif defined(__AVX512BF16__)
    __builtin_cpu_init();
    return !__builtin_cpu_is("intel");
#else
    return 0;
#endif
}

__attribute__((constructor)) static void add_panels(void) {
#ifdef PANELS_BF16
    int first = BF16, end = bf16_pays() ? F32 : BF16;
#else
    int first = bf16_pays() ? F32 : BF16, end = F32 + 1;
#endif
    for (int dtype = first; dtype < end; dtype++) {
        panel_kernels *of = g4ir_panels + dtype;
#ifdef FORM
        of->gemm[FORM] = multiply_panels;
#else
        of->linear = multiply_dense_rows;
        of->attend_chunk = attend_prompt;
#endif
    }
}
