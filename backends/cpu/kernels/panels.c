/* GEMM and prefill attention on packed panels (gemm.h) of bf16 (PANELS_BF16) or fp32; weights are quantised in FORM,
 * or dense if FORM is not defined. Where bf16 panels do not pay, fp32 panels serve both dtypes. */
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

/* Whether bf16 x uses bf16 panels. On Intel CPUs vdpbf16ps issues at half the rate of fp32 FMAs: without AMX, fp32
 * panels are 1.6 times as fast (240 against 150 GFLOP/s on two threads). */
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
        of->add_products = add_dense_products;
        of->attend_chunk = attend_prompt;
#endif
    }
}
