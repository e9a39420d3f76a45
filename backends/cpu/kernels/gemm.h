/* Micro kernels of products of many rows: with quantised weights (panels.h) and in attention of prompts
 * (prefill_attention.h). Operands are packed in panels of words: of two neighbouring values along k in bf16,
 * where an instruction adds their products, else of one in fp32. A [k, ROWS], B [k, vectors, LANE], k counted
 * in words; C [ROWS, vectors, LANE] in fp32. With a matrix unit a library is faster. */
#pragma once
#include "common.h"

#if defined(__AMX_BF16__)
#elif defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define GEMM
#define GEMM_BF16
enum { LANE = 16, ROWS = 8, VECTORS_MAX = 3 };
#elif defined(__AVX512F__)
#define GEMM
enum { LANE = 16, ROWS = 8, VECTORS_MAX = 3 };
#elif defined(__AVX2__) && defined(__FMA__)
#define GEMM
enum { LANE = 8, ROWS = 6, VECTORS_MAX = 2 };
#elif defined(__ARM_NEON)
#define GEMM
enum { LANE = 4, ROWS = 6, VECTORS_MAX = 4 };
#elif defined(__SSE4_1__)
#define GEMM
enum { LANE = 4, ROWS = 6, VECTORS_MAX = 2 };
#endif

#ifdef GEMM
/* ROWS x VECTORS_MAX sums are what registers hold. */
enum { COLUMNS = VECTORS_MAX * LANE };
typedef float lanes __attribute__((vector_size(LANE * 4)));
typedef float any_lanes __attribute__((vector_size(LANE * 4), aligned(4), may_alias));
typedef int32_t lane_masks __attribute__((vector_size(LANE * 4)));

#ifdef GEMM_BF16
/* Values of a word, and what it is stored as. */
enum { PER_WORD = 2 };
typedef uint32_t panel_word;
typedef uint32_t word_lanes __attribute__((vector_size(LANE * 4)));
typedef uint32_t any_word_lanes __attribute__((vector_size(LANE * 4), aligned(4), may_alias));

static inline lanes add_products(lanes sum, word_lanes b, panel_word a) {
    return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)b, (__m512bh)_mm512_set1_epi32(a));
}

/* Words of the values of two vectors, rounded to bf16. */
static inline word_lanes words_of(lanes first, lanes second) {
    __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23,
                                     7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    return (word_lanes)_mm512_permutexvar_epi16(order, both);
}
#else
enum { PER_WORD = 1 };
typedef float panel_word;
typedef lanes word_lanes;
typedef any_lanes any_word_lanes;

static inline lanes add_products(lanes sum, word_lanes b, panel_word a) { return sum + b * a; }
#endif

/* C = A B, or C += A B with `more`. */
ALWAYS micro_kernel(const int vectors, int64_t words, const panel_word *a, const panel_word *b, float *c,
                    int more) {
    lanes sum[ROWS][VECTORS_MAX];
    UNROLLED for (int i = 0; i < ROWS; i++)
        UNROLLED for (int v = 0; v < vectors; v++)
            sum[i][v] = more ? *(any_lanes *)(c + (i * vectors + v) * LANE) : (any_lanes){0};
    for (const panel_word *end = a + words * ROWS; a < end; a += ROWS, b += vectors * LANE) {
        word_lanes other[VECTORS_MAX];
        UNROLLED for (int v = 0; v < vectors; v++) other[v] = *(const any_word_lanes *)(b + v * LANE);
        UNROLLED for (int i = 0; i < ROWS; i++)
            UNROLLED for (int v = 0; v < vectors; v++) sum[i][v] = add_products(sum[i][v], other[v], a[i]);
    }
    UNROLLED for (int i = 0; i < ROWS; i++)
        UNROLLED for (int v = 0; v < vectors; v++) *(any_lanes *)(c + (i * vectors + v) * LANE) = sum[i][v];
}
typedef void micro_kernel_of(int64_t words, const void *a, const void *b, float *c, int more);
#define MICRO_KERNEL(VECTORS)                                                                       \
    static void micro_kernel_##VECTORS(int64_t words, const void *a, const void *b, float *c, int more) {  \
        micro_kernel(VECTORS, words, a, b, c, more);                                                \
    }
MICRO_KERNEL(1)
MICRO_KERNEL(2)
#if defined(__ARM_NEON) || defined(__AVX512F__)
MICRO_KERNEL(3)
#endif
#ifdef __ARM_NEON
MICRO_KERNEL(4)
#endif
static micro_kernel_of *const micro_kernels[] = {NULL, micro_kernel_1, micro_kernel_2,
#if defined(__ARM_NEON) || defined(__AVX512F__)
                                                 micro_kernel_3,
#endif
#ifdef __ARM_NEON
                                                 micro_kernel_4,
#endif
};

/* Packs `count` rows of x, `stride` bytes from each other, in a panel of A; others of ROWS are zero. */
static void pack_rows(const char *rows, int dtype, int64_t stride, int64_t count, int64_t words,
                      void *panel) {
    panel_word *to = panel;
    for (int64_t i = 0; i < ROWS; i++) {
        const char *row = rows + i * stride;
        for (int64_t j = 0; j < words; j++)
#ifdef GEMM_BF16
            to[j * ROWS + i] = i < count ? ((const uint32_t *)row)[j] : 0;
#else
            to[j * ROWS + i] = i < count ? load(row, j, dtype) : 0;
#endif
    }
}
#endif
