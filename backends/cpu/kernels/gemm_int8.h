/* Integer GEMM of many rows of x, quantised to int8 per block of 32, with a tiled weight. After the words of each
 * block a panel stores corrections and the scale of x, or the scales (and minima) of the weight. Computes the same
 * integer sums as integers.h does with one digit; scales are multiplied in another order. */
#pragma once
#include "digits.h"
#include "many_rows.h"

#ifdef INTEGERS
#define HAS_INT8_PANELS (FORM != FP8)
/* Whether panels store integers of 16 bits, not bytes: AVX2 without VNNI sums pairs of byte products in 16 bits,
 * which overflow at once for codes of 8 bits. */
enum { PAIRED = NO_DOT_PRODUCTS && (FORM == INT8 || FORM == IQ4 || NONUNIFORM(FORM)) };
/* Scales of the weight per block; words of integers per block. */
enum { SCALED = 1 + HALVES(FORM), INTEGER_WORDS = 8 << PAIRED };
/* Words of a block that one accumulator can sum without overflow. */
#define HALF_SUMMED (HALVES(FORM) || BYTES_OF(FORM) == FIVES_BYTES || FORM == UINT5)
enum { WORDS_SUMMED = !NO_DOT_PRODUCTS || PAIRED ? INTEGER_WORDS / SCALED : FORM == INT6 ? 2 : HALF_SUMMED ? 4 : 8 };
/* Panel words per block. For x: integers; for each scale of the weight the bias correction, or for formats with minima
 * the sum of the values; the scale of x. For the weight: codes, scales, minima. */
enum { X_WORDS = INTEGER_WORDS + SCALED + 1, W_WORDS = INTEGER_WORDS + SCALED * (1 + MINIMA(FORM)) };
#if WIDE == 64
enum { INT8_ROWS = 6, INT8_VECTORS = 2 };
#elif WIDE == 32
enum { INT8_ROWS = PAIRED ? 6 : 5 - NO_DOT_PRODUCTS, INT8_VECTORS = 2 };
#else
enum { INT8_ROWS = 4, INT8_VECTORS = 4 };
#endif

/* Adds to each lane the dot product of its integers with those of a word of x. Sums are int32; on AVX2 without VNNI a
 * lane of byte codes has two int16 sums (in_32_bits adds them). */
static inline row_sums add_integers(row_sums sum, row_words codes, int32_t x) {
#if WIDE == 64
    return (row_sums)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(x));
#elif WIDE == 16
    return (row_sums)vdotq_s32((int32x4_t)sum, (int8x16_t)codes, (int8x16_t)vdupq_n_s32(x));
#elif !NO_DOT_PRODUCTS
    return (row_sums)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, _mm256_set1_epi32(x));
#else
    __m256i factor = _mm256_set1_epi32(x);
    if (PAIRED) return sum + (row_sums)_mm256_madd_epi16((__m256i)codes, factor);
    return (row_sums)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)codes, factor));
#endif
}

static inline row_sums in_32_bits(row_sums sum) {
#if NO_DOT_PRODUCTS
    if (!PAIRED) return (row_sums)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1));
#endif
    return sum;
}

/* Formats of which all blocks of a panel can have the same scales. */
#define SCALED_BY_GROUP (BLOCKS_OF(FORM) == 1 && !MINIMA(FORM))

/* C = A B, or C += A B with `more`, over `blocks` blocks along k. `by_panel`: they have the same scales, which
 * multiply their sum. */
ALWAYS int8_kernel(const int vectors, const int by_panel, int64_t blocks, const int32_t *a, const int32_t *b,
                   float *c, int more) {
    const int stride = vectors * WORDS;
    row_floats total[INT8_ROWS][INT8_VECTORS];
#define EACH_TOTAL UNROLLED for (int i = 0; i < INT8_ROWS; i++) UNROLLED for (int v = 0; v < vectors; v++)
    EACH_TOTAL {
        total[i][v] = (row_floats){0};
        if (more && !by_panel) total[i][v] = *(any_row_floats *)(c + i * stride + v * WORDS);
    }
    for (; blocks-- > 0; a += X_WORDS * INT8_ROWS, b += W_WORDS * stride) {
        const float *unit = (const float *)a + (X_WORDS - 1) * INT8_ROWS;
        const float *scales = (const float *)b + INTEGER_WORDS * stride;
        UNROLLED for (int h = 0; h < SCALED; h++) {
            const int32_t *start = a + (INTEGER_WORDS + h) * INT8_ROWS;
            row_sums sum[INT8_ROWS][INT8_VECTORS];
            const int first = h * INTEGER_WORDS / SCALED, last = first + INTEGER_WORDS / SCALED;
            for (int j = first; j < last; j += WORDS_SUMMED) {
                row_sums part[INT8_ROWS][INT8_VECTORS];
                EACH_TOTAL part[i][v] = (row_sums){0};
                UNROLLED for (int t = j; t < j + WORDS_SUMMED; t++) {
                    row_words codes[INT8_VECTORS];
                    UNROLLED for (int v = 0; v < vectors; v++)
                        codes[v] = *(const any_row_words *)(b + t * stride + v * WORDS);
                    EACH_TOTAL {
                        part[i][v] = add_integers(part[i][v], codes[v], a[t * INT8_ROWS + i]);
                        __asm__("" : "+" IN_VECTOR (part[i][v])); /* no reordering, no spills */
                    }
                }
                EACH_TOTAL {
                    row_sums all = in_32_bits(part[i][v]);
                    if (j > first)
                        sum[i][v] += all;
                    else
                        sum[i][v] = MINIMA(FORM) ? all : all + start[i];
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
#define INT8_KERNEL(VECTORS)                                                                        \
    static void int8_kernel_##VECTORS(int64_t blocks, const void *a, const void *b, float *c, int more) {  \
        int8_kernel(VECTORS, 0, blocks, a, b, c, more);                                             \
    }                                                                                               \
    static void int8_panel_##VECTORS(int64_t blocks, const void *a, const void *b, float *c, int more) {  \
        int8_kernel(VECTORS, 1, blocks, a, b, c, more);                                             \
    }
#define OF_PANEL(VECTORS) (SCALED_BY_GROUP ? int8_panel_##VECTORS : int8_kernel_##VECTORS)
/* Indexed by whether all blocks of a panel have the same scales, and by number of vectors. */
#if WIDE == 64
INT8_KERNEL(1)
INT8_KERNEL(2)
static micro_kernel_of *const int8_kernels[2][3] = {{NULL, int8_kernel_1, int8_kernel_2},
                                                    {NULL, OF_PANEL(1), OF_PANEL(2)}};
#elif WIDE == 32
INT8_KERNEL(2)
static micro_kernel_of *const int8_kernels[2][3] = {{NULL, NULL, int8_kernel_2}, {NULL, NULL, OF_PANEL(2)}};
#else
INT8_KERNEL(4)
static micro_kernel_of *const int8_kernels[2][5] = {{[4] = int8_kernel_4}, {[4] = OF_PANEL(4)}};
#endif

/* Quantises `count` rows of x and packs them into a panel of A; the remaining rows of INT8_ROWS are zero. */
static void pack_int8_rows(const char *rows, int dtype, int64_t stride, int64_t count, int64_t values,
                           void *panel) {
    const int64_t blocks = values / BLOCK;
    for (int64_t i = 0; i < INT8_ROWS; i++)
        for (int64_t b = 0; b < blocks; b++) {
            int32_t *to = (int32_t *)panel + b * X_WORDS * INT8_ROWS + i;
            digits d = {0};
            const bf16 *x = (const bf16 *)(rows + i * stride) + b * BLOCK;
            if (i < count) quantize_block(FORM, PAIRED, x, &d);
            for (int j = 0; j < INTEGER_WORDS; j++) to[j * INT8_ROWS] = d.pairs[j]; /* bytes: `high` */
            to += INTEGER_WORDS * INT8_ROWS;
            for (int h = 0; h < SCALED; h++) {
                float sum = sum_of_part(FORM, &d, h);
                to[h * INT8_ROWS] = SCALED == 2 ? d.less[h] : d.both;
                if (MINIMA(FORM)) memcpy(to + h * INT8_ROWS, &sum, 4);
            }
            memcpy(to + SCALED * INT8_ROWS, &d.unit, 4);
        }
}

/* Packs values `first` to `last` of `columns` rows of the weight as a panel of B. */
static void unpack_codes(const void *weight, int64_t column, int64_t columns, int64_t first, int64_t last,
                         void *panel) {
    const coded *p = weight;
    const int together = BLOCKS_OF(FORM);
    for (int64_t v = 0; v < columns; v += WORDS) {
        strip of = strip_of(p, (column + v) / TILE, (column + v) % TILE, NULL);
        int32_t *to = (int32_t *)panel + v;
        for (int64_t i = first; i < last; i += BLOCK, to += W_WORDS * columns) {
            const uint8_t *w = of.codes + i / BLOCK / together * WORDS_OF(FORM) * LINE;
            const int b = i / BLOCK % together;
            row_floats scale[2], least = {0}, factor[2], below[2];
            scales_at(p, &of, i, scale, &least);
            block_factors(FORM, w, b, scale[0], least, factor, below);
            UNROLLED for (int j = 0; j < 8; j++) {
                row_words codes[2] = {code_word(FORM, w, b, j)};
                if (PAIRED) factors_of(FORM, codes[0], codes);
                UNROLLED for (int i = 0; i <= PAIRED; i++)
                    *(any_row_words *)(to + ((j << PAIRED) + i) * columns) = codes[i];
            }
            for (int h = 0; h < SCALED; h++) {
                *(any_row_floats *)(to + (INTEGER_WORDS + h) * columns) = factor[h];
                if (MINIMA(FORM)) *(any_row_floats *)(to + (INTEGER_WORDS + SCALED + h) * columns) = -below[h];
            }
        }
    }
}

#define INT8_SET(BY_PANEL)                                                                          \
    {.rows = INT8_ROWS, .lane = WORDS, .columns = INT8_VECTORS * WORDS, .values = BLOCK, .x_words = X_WORDS,  \
     .w_words = W_WORDS, .pack = pack_int8_rows, .kernels = int8_kernels[BY_PANEL], .begin = begin_products,  \
     .end = end_products}
static const micro_kernel_set INT8_SETS[] = {INT8_SET(0), INT8_SET(1)};

/* y = int8(x) w^T; n is a multiple of TILE, the values per scale are a multiple of BLOCK. Returns 0, or 1 if out of
 * memory. */
static int multiply_int8_panels(const coded *p, int threads) {
    const int by_panel = SCALED_BY_GROUP && (p->each % PANEL == 0 || p->each == p->k);
    many_rows m = {.x = p->x, .y = p->y, .dtype = p->dtype, .rows = p->rows, .n = p->n, .k = p->k,
                   .by = INT8_SETS + by_panel, .unpack = unpack_codes, .weight = p};
    return multiply_many_rows(&m, threads);
}
#else
#define HAS_INT8_PANELS 0
static int multiply_int8_panels(const coded *p, int threads) { return 1; }
#endif
