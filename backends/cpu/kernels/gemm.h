/* A GEMM in bf16 for products of many rows with quantised weights and for attention of prompts, if the
 * CPU multiplies bf16 and has no matrix unit, with which a library is faster. Operands are packed in
 * panels of words; a word is two neighbouring values along k, whose products one instruction adds: A
 * [k / 2, ROWS], B [k / 2, vectors, LANE], C [ROWS, vectors, LANE] in fp32. */
#pragma once
#include "common.h"

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__) && !defined(__AMX_BF16__)
#define GEMM
/* Rows of C, vectors of it at most, and values of a vector: 24 sums, as registers hold them. */
enum { ROWS = 8, VECTORS_MOST = 3, LANE = 16, COLUMNS = VECTORS_MOST * LANE };

/* C = A B, or C += A B with `more`. */
ALWAYS micro_kernel(const int vectors, int64_t words, const uint32_t *a, const uint32_t *b, float *c,
                    int more) {
    __m512 sum[ROWS][VECTORS_MOST];
    UNROLLED for (int i = 0; i < ROWS; i++)
        UNROLLED for (int v = 0; v < vectors; v++)
            sum[i][v] = more ? _mm512_loadu_ps(c + (i * vectors + v) * LANE) : _mm512_setzero_ps();
    for (const uint32_t *end = a + words * ROWS; a < end; a += ROWS, b += vectors * LANE)
        UNROLLED for (int i = 0; i < ROWS; i++) {
            __m512bh one = (__m512bh)_mm512_set1_epi32(a[i]);
            UNROLLED for (int v = 0; v < vectors; v++) {
                __m512bh other = (__m512bh)_mm512_loadu_si512(b + v * LANE);
                sum[i][v] = _mm512_dpbf16_ps(sum[i][v], other, one);
            }
        }
    UNROLLED for (int i = 0; i < ROWS; i++)
        UNROLLED for (int v = 0; v < vectors; v++)
            _mm512_storeu_ps(c + (i * vectors + v) * LANE, sum[i][v]);
}
#define MICRO_KERNEL(VECTORS)                                                                   \
    static void micro_kernel_##VECTORS(int64_t words, const uint32_t *a, const uint32_t *b,     \
                                       float *c, int more) {                                    \
        micro_kernel(VECTORS, words, a, b, c, more);                                            \
    }
MICRO_KERNEL(1)
MICRO_KERNEL(2)
MICRO_KERNEL(3)
static void (*const micro_kernels[])(int64_t, const uint32_t *, const uint32_t *, float *, int) = {
    NULL, micro_kernel_1, micro_kernel_2, micro_kernel_3};

/* Words of the values of two vectors, rounded to bf16. */
static inline __m512i words_of(__m512 first, __m512 second) {
    __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23,
                                     7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

/* Packs ROWS rows of `words` words, `apart` bytes from each other, in a panel of A; those from `here` on
 * are zero. */
static void pack_rows(const char *rows, int64_t apart, int64_t here, int64_t words, uint32_t *to) {
    for (int64_t i = 0; i < ROWS; i++) {
        const uint32_t *row = (const uint32_t *)(rows + i * apart);
        for (int64_t j = 0; j < words; j++) to[j * ROWS + i] = i < here ? row[j] : 0;
    }
}
#endif
