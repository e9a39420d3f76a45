/* GEMM micro kernels, for quantised and dense weights (panels.h, dense_panels.h) and prefill attention
 * (prefill_attention.h). Operands are packed in panels of words: two bf16 values adjacent along k (with PANELS_BF16,
 * for dot-product instructions), else one fp32 value. A [k / DEPTH, ROWS, DEPTH], B [k, vectors, LANE], k counted in
 * words; C [ROWS, vectors, LANE] in fp32. A step is DEPTH words along k. */
#pragma once
#include "amx_registers.h"

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

/* LANE: lanes of a vector. ROWS: rows of C per micro kernel. VECTORS_MAX: maximum vectors per row of C. DEPTH: words
 * along k of a row of A that are contiguous (k is padded to a multiple). */
#if defined(PANELS_BF16) && defined(__AMX_BF16__)
#define PANELS_AMX
enum { LANE = 16, ROWS = 32, VECTORS_MAX = 2, DEPTH = 16 };
#elif defined(__AVX512F__)
enum { LANE = 16, ROWS = 8, VECTORS_MAX = 3, DEPTH = 1 };
#elif defined(__AVX2__) && defined(__FMA__)
enum { LANE = 8, ROWS = 6, VECTORS_MAX = 2, DEPTH = 1 };
#elif defined(__ARM_NEON)
enum { LANE = 4, ROWS = 6, VECTORS_MAX = 4, DEPTH = 1 };
#else
enum { LANE = 4, ROWS = 6, VECTORS_MAX = 2, DEPTH = 1 };
#endif

/* Columns of C per micro kernel: ROWS x VECTORS_MAX sums fill the registers. */
enum { COLUMNS = VECTORS_MAX * LANE };
typedef float lanes __attribute__((vector_size(LANE * 4)));
typedef float any_lanes __attribute__((vector_size(LANE * 4), aligned(4), may_alias));
typedef int32_t lane_masks __attribute__((vector_size(LANE * 4)));

#ifdef PANELS_BF16
/* Values per word, and the word's type. */
enum { PER_WORD = 2 };
typedef uint32_t panel_word;
typedef uint32_t word_lanes __attribute__((vector_size(LANE * 4)));
typedef uint32_t any_word_lanes __attribute__((vector_size(LANE * 4), aligned(4), may_alias));

/* Rounds two vectors to bf16 and interleaves them to words. */
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
#endif

/* Index of row 0's word `word` along k in a panel of A. */
static inline int64_t in_panel(int64_t word) { return word / DEPTH * DEPTH * ROWS + word % DEPTH; }

#ifdef PANELS_AMX
/* AMX tile registers 0 to 3 hold C (halves of ROWS by vectors), 4 and 5 A, 6 and 7 B. */
static void begin_products(void) {
    amx_shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) shapes.bytes[i] = LINE, shapes.rows[i] = DEPTH;
    shape_amx(&shapes);
}
static void end_products(void) { end_amx(); }

/* C = A B, or C += A B with `more`. */
ALWAYS micro_kernel(const int vectors, int64_t steps, const panel_word *a, const panel_word *b, float *c,
                    int more) {
    const int both = vectors == 2, apart = vectors * LINE;
    float *low = c + DEPTH * vectors * LANE;
    CLEAR_AMX(0); CLEAR_AMX(1); CLEAR_AMX(2); CLEAR_AMX(3);
    if (more) { LOAD_AMX(0, c, apart); LOAD_AMX(2, low, apart); }
    if (more && both) { LOAD_AMX(1, c + LANE, apart); LOAD_AMX(3, low + LANE, apart); }
    for (const panel_word *end = a + steps * DEPTH * ROWS; a < end; a += DEPTH * ROWS, b += DEPTH * vectors * LANE) {
        LOAD_AMX(6, b, apart);
        LOAD_AMX(4, a, LINE);
        MULTIPLY_AMX(tdpbf16ps, 0, 4, 6);
        LOAD_AMX(5, a + DEPTH * DEPTH, LINE);
        MULTIPLY_AMX(tdpbf16ps, 2, 5, 6);
        if (!both) continue;
        LOAD_AMX(7, b + LANE, apart);
        MULTIPLY_AMX(tdpbf16ps, 1, 4, 7);
        MULTIPLY_AMX(tdpbf16ps, 3, 5, 7);
    }
    STORE_AMX(0, c, apart); STORE_AMX(2, low, apart);
    if (both) { STORE_AMX(1, c + LANE, apart); STORE_AMX(3, low + LANE, apart); }
}
#else
static void begin_products(void) {}
static void end_products(void) {}

static inline lanes add_products(lanes sum, word_lanes b, panel_word a) {
#ifdef PANELS_BF16
    return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)b, (__m512bh)_mm512_set1_epi32(a));
#else
    return sum + b * a;
#endif
}

/* C = A B, or C += A B with `more`. */
ALWAYS micro_kernel(const int vectors, int64_t steps, const panel_word *a, const panel_word *b, float *c,
                    int more) {
    lanes sum[ROWS][VECTORS_MAX];
    UNROLLED for (int i = 0; i < ROWS; i++)
        UNROLLED for (int v = 0; v < vectors; v++)
            sum[i][v] = more ? *(any_lanes *)(c + (i * vectors + v) * LANE) : (any_lanes){0};
    for (const panel_word *end = a + steps * DEPTH * ROWS; a < end; a += ROWS, b += vectors * LANE) {
        word_lanes other[VECTORS_MAX];
        UNROLLED for (int v = 0; v < vectors; v++) other[v] = *(const any_word_lanes *)(b + v * LANE);
        UNROLLED for (int i = 0; i < ROWS; i++)
            UNROLLED for (int v = 0; v < vectors; v++) sum[i][v] = add_products(sum[i][v], other[v], a[i]);
    }
    UNROLLED for (int i = 0; i < ROWS; i++)
        UNROLLED for (int v = 0; v < vectors; v++) *(any_lanes *)(c + (i * vectors + v) * LANE) = sum[i][v];
}
#endif

/* Indexed by number of vectors; entries above VECTORS_MAX are never called. */
typedef void micro_kernel_of(int64_t steps, const void *a, const void *b, float *c, int more);
#define MICRO_KERNEL(VECTORS)                                                                       \
    static void micro_kernel_##VECTORS(int64_t steps, const void *a, const void *b, float *c, int more) {  \
        micro_kernel(VECTORS <= VECTORS_MAX ? VECTORS : 1, steps, a, b, c, more);                   \
    }
MICRO_KERNEL(1)
MICRO_KERNEL(2)
MICRO_KERNEL(3)
MICRO_KERNEL(4)
static micro_kernel_of *const micro_kernels[] = {NULL, micro_kernel_1, micro_kernel_2, micro_kernel_3,
                                                 micro_kernel_4};

/* Number of panel words for this many values. */
static inline int64_t words_in_panel(int64_t values) {
    const int each = PER_WORD * DEPTH;
    return (values + each - 1) / each * DEPTH;
}

/* Word j of a row in memory, zero-padded after its last value. */
static inline panel_word word_at(const char *row, int64_t j, int64_t values, int dtype) {
#ifdef PANELS_BF16
    panel_word word = 0;
    if (j * 2 < values) memcpy(&word, row + j * 4, j * 2 + 1 < values ? 4 : 2);
    return word;
#else
    return j < values ? load(row, j, dtype) : 0;
#endif
}

/* Packs `count` rows with a stride of `stride` bytes into a panel of A; the remaining rows of ROWS are zero. */
static void pack_rows(const char *rows, int dtype, int64_t stride, int64_t count, int64_t values,
                      void *panel) {
    const int64_t whole = values / PER_WORD / DEPTH * DEPTH, words = words_in_panel(values);
    for (int64_t i = 0; i < ROWS; i++) {
        const char *row = rows + i * stride;
        panel_word *to = (panel_word *)panel + i * DEPTH;
        int64_t j = 0, here = i < count ? values : 0;
        for (; here && j < whole; j += DEPTH)
            UNROLLED for (int t = 0; t < DEPTH; t++)
                to[j * ROWS + t] = word_at(row, j + t, INT64_MAX, dtype);
        for (; j < words; j++) to[in_panel(j)] = word_at(row, j, here, dtype);
    }
}
