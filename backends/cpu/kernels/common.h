/* Shared by matmuls and attention: number conversion, threads, vector width of this CPU, unrolled loops. */
#pragma once
#include "kernels.h"
#include "number.h"
#include "system.h"
#include "team.h"

#include <math.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

/* Vector width, in bytes, of the kernels for tiled weights. */
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define WIDE 64
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define WIDE 32
#else
#define WIDE 16
#endif
/* Maximum rows of x per pass of a GEMV over the weight. */
#define TOGETHER 8
/* Functions whose first arguments are compile-time constants at each call: inlined, so that loops unroll and
 * sums stay in registers. */
#define INLINED static inline __attribute__((always_inline))
#define ALWAYS INLINED void
#define UNROLLED _Pragma("GCC unroll 8")

/* Tables of the values of codes: the codes themselves; IQ4 and NL4; FP4; NL3; NL2 (g4ir/ops/codecs.py). */
#define TABLE_OF(form)                                                                          \
    ((form) == IQ4 || (form) == NL4 ? 1 : (form) == FP4 ? 2 : (form) == NL3 ? 3 : (form) == NL2 ? 4 : 0)
static const int8_t TABLE[5][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
    {-63, -40, -23, -10, 1, 13, 28, 47},
    {-31, -13, 1, 17}};

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

#ifdef __AVX512F__
/* Rounds sixteen values to bf16 as narrow() does, except that every NaN becomes 0x7fc0. */
static inline __m256i in_bf16(__m512 v) {
    __m512i u = _mm512_castps_si512(v), even = _mm512_set1_epi32(0x7fff);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    u = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, even)), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(u, nan, _mm512_set1_epi32(0x7fc0)));
}
#endif

static inline void narrow_row(const float *from, bf16 *to, int64_t count) {
    int64_t i = 0;
#ifdef __AVX512F__
    for (; i + 16 <= count; i += 16)
        _mm256_storeu_si256((__m256i *)(to + i), in_bf16(_mm512_loadu_ps(from + i)));
#endif
    for (; i < count; i++) to[i] = narrow(from[i]);
}
