/* Integer GEMM of many rows of x with a tiled weight. Blocks of 32 values of x become 15-bit integers, or are quantised
 * to int8 (`rounded`). After the words of each block a panel stores corrections and the scale of x, or the scales (and
 * minima) of the weight. Sums of integers equal those of integers.h; scales are multiplied in another order. */
#pragma once
#include "digits.h"
#include "many_rows.h"

#ifdef INTEGERS
#define HAS_INTEGER_PANELS (FORM != FP8)

/* How panels store integers (digits.h). Of DIGITS the high ones of a block come first; of PAIRS codes have 16 bits too,
 * without bias. */
#define EXACT (NO_DOT_PRODUCTS ? PAIRS : DIGITS)
#define ROUNDED                                                                                 \
    (NO_DOT_PRODUCTS && (WIDE == 16 || FORM == INT8 || FORM == IQ4 || NONUNIFORM(FORM)) ? PAIRS : BYTES)
/* Scales of the weight per block; words of integers per block, of x and of codes. */
enum { SCALED = 1 + HALVES(FORM) };
#define X_INTEGERS(as) ((as) == BYTES ? 8 : 16)
#define W_INTEGERS(as) ((as) == PAIRS ? 16 : 8)
/* Words of a block that one accumulator can sum without overflow. */
#define HALF_SUMMED (HALVES(FORM) || BYTES_OF(FORM) == FIVES_BYTES || FORM == UINT5)
#define WORDS_SUMMED(as)                                                                        \
    (!NO_DOT_PRODUCTS || (as) == PAIRS ? W_INTEGERS(as) / SCALED : FORM == INT6 ? 2 : HALF_SUMMED ? 4 : 8)
/* Panel words per block. For x: integers; for each scale of the weight the bias correction, or for formats with minima
 * the sum of the values; the scale of x. For the weight: codes, scales, minima. */
#define CORRECTED(as) (MINIMA(FORM) || (as) != PAIRS)
#define X_WORDS(as) (X_INTEGERS(as) + SCALED * CORRECTED(as) + 1)
#define W_WORDS(as) (W_INTEGERS(as) + SCALED * (1 + MINIMA(FORM)))
#if defined(__ARM_NEON)
#define INTEGER_ROWS(as) 4
enum { ROWS_MOST = 4, INTEGER_VECTORS = 4 };
#else
#define INTEGER_ROWS(as) (WIDE == 64 || (as) == PAIRS ? 6 : 5 - NO_DOT_PRODUCTS)
enum { ROWS_MOST = 6, INTEGER_VECTORS = 2 };
#endif

#ifdef __ARM_NEON
/* Adds to SUM[I][V] the products of the codes of vector V with word I of x, which has a word of each of four rows. */
#define ADD_ROW(SUM, V, I)                                                                      \
    SUM[I][V] = (row_sums)vdotq_laneq_s32((int32x4_t)SUM[I][V], (int8x16_t)codes[V], vld1q_s8((const int8_t *)x), I)
#else
/* Adds to each lane the dot product of its integers with those of a word of x. Sums are int32; of BYTES without dot
 * products a lane has two int16 sums (in_32_bits adds them). */
static inline row_sums add_integers(const int as, row_sums sum, row_words codes, int32_t x) {
#if WIDE == 64
    return (row_sums)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(x));
#elif WIDE == 32 && !NO_DOT_PRODUCTS
    return (row_sums)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, _mm256_set1_epi32(x));
#elif WIDE == 32
    __m256i all = _mm256_set1_epi32(x);
    if (as == PAIRS) return sum + (row_sums)_mm256_madd_epi16((__m256i)codes, all);
    return (row_sums)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)codes, all));
#else
    return sum + (row_sums)_mm_madd_epi16((__m128i)codes, _mm_set1_epi32(x));
#endif
}
#endif

static inline row_sums in_32_bits(const int as, row_sums sum) {
#if WIDE == 32 && NO_DOT_PRODUCTS
    if (as == BYTES) return (row_sums)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1));
#endif
    return sum;
}

/* Formats of which all blocks of a panel can have the same scales. */
#define SCALED_BY_GROUP (BLOCKS_OF(FORM) == 1 && !MINIMA(FORM))

/* C = A B, or C += A B with `more`, over `blocks` blocks along k. `by_panel`: they have the same scales, which
 * multiply their sum. */
ALWAYS integer_kernel(const int as, const int vectors, const int by_panel, int64_t blocks, const int32_t *a,
                      const int32_t *b, float *c, int more) {
    const int rows = INTEGER_ROWS(as), words = W_INTEGERS(as), stride = vectors * WORDS;
    row_floats total[ROWS_MOST][INTEGER_VECTORS];
#define EACH_TOTAL UNROLLED for (int i = 0; i < rows; i++) UNROLLED for (int v = 0; v < vectors; v++)
    EACH_TOTAL {
        total[i][v] = (row_floats){0};
        if (more && !by_panel) total[i][v] = *(any_row_floats *)(c + i * stride + v * WORDS);
    }
    for (; blocks-- > 0; a += X_WORDS(as) * rows, b += W_WORDS(as) * stride) {
        const float *unit = (const float *)a + (X_WORDS(as) - 1) * rows;
        const float *scales = (const float *)b + words * stride;
        UNROLLED for (int h = 0; h < SCALED; h++) {
            const int32_t *start = a + (X_INTEGERS(as) + h) * rows;
            row_sums sum[ROWS_MOST][INTEGER_VECTORS];
            const int first = h * words / SCALED, last = first + words / SCALED;
            for (int j = first; j < last; j += WORDS_SUMMED(as)) {
                row_sums part[ROWS_MOST][INTEGER_VECTORS];
                EACH_TOTAL part[i][v] = (row_sums){0};
                for (int d = 0; d < 1 + (as == DIGITS); d++) {
                    if (d) EACH_TOTAL part[i][v] <<= 8;
                    __asm__ volatile("" ::: "memory"); /* codes are loaded again for the second digit, not kept */
                    UNROLLED for (int t = j; t < j + WORDS_SUMMED(as); t++) {
                        const int32_t *x = a + (d * words + t) * rows;
                        row_words codes[INTEGER_VECTORS];
                        UNROLLED for (int v = 0; v < vectors; v++)
                            codes[v] = *(const any_row_words *)(b + t * stride + v * WORDS);
#ifdef __ARM_NEON
                        UNROLLED for (int v = 0; v < vectors; v++) {
                            ADD_ROW(part, v, 0); ADD_ROW(part, v, 1); ADD_ROW(part, v, 2); ADD_ROW(part, v, 3);
                        }
#else
                        EACH_TOTAL {
                            part[i][v] = add_integers(as, part[i][v], codes[v], x[i]);
                            __asm__("" : "+v"(part[i][v])); /* no reordering, no spills */
                        }
#endif
                    }
                }
                EACH_TOTAL {
                    row_sums all = in_32_bits(as, part[i][v]);
                    if (j > first)
                        sum[i][v] += all;
                    else
                        sum[i][v] = MINIMA(FORM) || as == PAIRS ? all : all + start[i];
                }
            }
            EACH_TOTAL {
                row_floats one = __builtin_convertvector(sum[i][v], row_floats);
                if (!by_panel) one = product_of(one, *(const any_row_floats *)(scales + h * stride + v * WORDS));
                if (MINIMA(FORM)) {
                    row_floats below = *(const any_row_floats *)(scales + (SCALED + h) * stride + v * WORDS);
                    total[i][v] = multiply_add(below, all_rows(((const float *)start)[i]), total[i][v]);
                }
                total[i][v] = multiply_add(one, all_rows(unit[i]), total[i][v]);
            }
        }
    }
    const float *scales = (const float *)b - stride;
    EACH_TOTAL {
        any_row_floats *to = (any_row_floats *)(c + i * stride + v * WORDS);
        if (by_panel) {
            row_floats before = {0};
            if (more) before = *to;
            total[i][v] = multiply_add(total[i][v], *(const any_row_floats *)(scales + v * WORDS), before);
        }
        *to = total[i][v];
    }
}
#define KERNEL(NAME, AS, VECTORS, BY_PANEL)                                                     \
    static void NAME(int64_t blocks, const void *a, const void *b, float *c, int more) {        \
        integer_kernel(AS, VECTORS, BY_PANEL, blocks, a, b, c, more);                           \
    }
#define KERNELS(VECTORS)                                                                        \
    KERNEL(exact_##VECTORS, EXACT, VECTORS, 0)                                                  \
    KERNEL(exact_panel_##VECTORS, EXACT, VECTORS, SCALED_BY_GROUP)                              \
    KERNEL(rounded_##VECTORS, ROUNDED, VECTORS, 0)                                              \
    KERNEL(rounded_panel_##VECTORS, ROUNDED, VECTORS, SCALED_BY_GROUP)
/* Kernels by number of vectors. */
#if WIDE == 64
KERNELS(1)
KERNELS(2)
#define BY_VECTORS(NAME) {NULL, NAME##_1, NAME##_2}
#elif defined(__ARM_NEON)
KERNELS(4)
#define BY_VECTORS(NAME) {[4] = NAME##_4}
#else
KERNELS(2)
#define BY_VECTORS(NAME) {[2] = NAME##_2}
#endif
/* Indexed by whether x is rounded, by whether all blocks of a panel have the same scales, and by number of vectors. */
static micro_kernel_of *const integer_kernels[2][2][INTEGER_VECTORS + 1] = {
    {BY_VECTORS(exact), BY_VECTORS(exact_panel)}, {BY_VECTORS(rounded), BY_VECTORS(rounded_panel)}};

/* Converts `count` rows of x to integers, and packs them into a panel of A; the remaining rows are zero. */
ALWAYS pack_integers(const int as, const int digits_of_x, const char *rows, int64_t stride, int64_t count,
                     int64_t values, void *panel) {
    const int64_t blocks = values / BLOCK, each = INTEGER_ROWS(as);
    for (int64_t i = 0; i < each; i++)
        for (int64_t b = 0; b < blocks; b++) {
            int32_t *to = (int32_t *)panel + b * X_WORDS(as) * each + i;
            digits d = {0};
            const bf16 *x = (const bf16 *)(rows + i * stride) + b * BLOCK;
            if (i < count) quantize_block(digits_of_x, FORM, as == PAIRS, x, &d);
            for (int j = 0; j < X_INTEGERS(as); j++) to[j * each] = d.pairs[j]; /* bytes: `high`, then `low` */
            to += X_INTEGERS(as) * each;
            for (int h = 0; CORRECTED(as) && h < SCALED; h++, to += each) {
                float sum = sum_of_part(FORM, &d, h);
                *to = SCALED == 2 ? d.less[h] : d.both;
                if (MINIMA(FORM)) memcpy(to, &sum, 4);
            }
            memcpy(to, &d.unit, 4);
        }
}
static void pack_exact(const char *rows, int dtype, int64_t stride, int64_t count, int64_t values, void *panel) {
    pack_integers(EXACT, 2, rows, stride, count, values, panel);
}
static void pack_rounded(const char *rows, int dtype, int64_t stride, int64_t count, int64_t values, void *panel) {
    pack_integers(ROUNDED, 1, rows, stride, count, values, panel);
}

typedef int16_t word_pairs __attribute__((vector_size(WIDE)));
/* Expands the four codes of word j of a block to two words of 16 bits, at their places in the panel. */
static inline void store_pairs(row_words codes, int j, int32_t *to, int64_t stride) {
    UNROLLED for (int i = 0; i < 2; i++) {
        word_pairs pairs = (word_pairs)(codes >> (8 * i) & EVERY_OTHER) - (int16_t)BIAS[FORM];
        *(any_row_words *)(to + pair_at(FORM, j, i) * stride) = (row_words)pairs;
    }
}

/* Packs values `first` to `last` of `columns` rows of the weight as a panel of B. */
ALWAYS unpack_codes(const int as, const coded *p, int64_t column, int64_t columns, int64_t first, int64_t last,
                    void *panel) {
    const int together = BLOCKS_OF(FORM), words = W_INTEGERS(as);
    for (int64_t v = 0; v < columns; v += WORDS) {
        strip of = strip_of(p, (column + v) / TILE, (column + v) % TILE, NULL);
        int32_t *to = (int32_t *)panel + v;
        for (int64_t i = first; i < last; i += BLOCK, to += W_WORDS(as) * columns) {
            const uint8_t *w = of.codes + i / BLOCK / together * WORDS_OF(FORM) * LINE;
            const int b = i / BLOCK % together;
            row_floats scale[2], least = {0}, factor[2], below[2];
            scales_at(p, &of, i, scale, &least);
            block_factors(FORM, w, b, scale[0], least, factor, below);
            UNROLLED for (int j = 0; j < 8; j++) {
                row_words codes = code_word(FORM, w, b, j);
                if (as == PAIRS)
                    store_pairs(codes, j, to, columns);
                else
                    *(any_row_words *)(to + j * columns) = codes;
            }
            for (int h = 0; h < SCALED; h++) {
                *(any_row_floats *)(to + (words + h) * columns) = factor[h];
                if (MINIMA(FORM)) *(any_row_floats *)(to + (words + SCALED + h) * columns) = -below[h];
            }
        }
    }
}
static void unpack_exact(const void *w, int64_t column, int64_t columns, int64_t first, int64_t last, void *to) {
    unpack_codes(EXACT, w, column, columns, first, last, to);
}
static void unpack_rounded(const void *w, int64_t column, int64_t columns, int64_t first, int64_t last, void *to) {
    unpack_codes(ROUNDED, w, column, columns, first, last, to);
}

#define INTEGER_SET(AS, IS_ROUNDED, BY_PANEL)                                                   \
    {.rows = INTEGER_ROWS(AS), .lane = WORDS, .columns = INTEGER_VECTORS * WORDS, .values = BLOCK, \
     .x_words = X_WORDS(AS), .w_words = W_WORDS(AS), .pack = IS_ROUNDED ? pack_rounded : pack_exact, \
     .kernels = integer_kernels[IS_ROUNDED][BY_PANEL], .begin = begin_products, .end = end_products}
/* Indexed as integer_kernels. */
static const micro_kernel_set INTEGER_SETS[2][2] = {{INTEGER_SET(EXACT, 0, 0), INTEGER_SET(EXACT, 0, 1)},
                                                    {INTEGER_SET(ROUNDED, 1, 0), INTEGER_SET(ROUNDED, 1, 1)}};

/* y = x w^T, or int8(x) w^T; n is a multiple of TILE, the values per scale are a multiple of BLOCK. Returns 0, or 1 if
 * out of memory. */
static int multiply_integer_panels(const coded *p, int rounded, int threads) {
    const int by_panel = SCALED_BY_GROUP && (p->each % PANEL == 0 || p->each == p->k);
    many_rows m = {.x = p->x, .y = p->y, .dtype = p->dtype, .rows = p->rows, .n = p->n, .k = p->k,
                   .by = &INTEGER_SETS[rounded][by_panel], .unpack = rounded ? unpack_rounded : unpack_exact,
                   .weight = p};
    return multiply_many_rows(&m, threads);
}
#else
#define HAS_INTEGER_PANELS 0
static int multiply_integer_panels(const coded *p, int rounded, int threads) { return 1; }
#endif
