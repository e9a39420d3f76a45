/* GEMM of many rows of x with a tiled quantised weight, dequantised panel by panel in fp32; for bf16 panels the values
 * are rounded once, after scale and minimum are applied. */
#pragma once
#include "floats.h"
#include "many_rows.h"

/* Returns value 2 * j + odd of a block, from its unpacked words. */
static inline row_floats number_of_pair(const row_words *words, int j, int odd) {
    const int value = 2 * j + odd;
    if (FOURTHS(FORM)) return number(words[value / 16 * 4 + value % 4], value % 16 / 4);
    if (EVEN_ODD(FORM)) return number(words[j / 4 * 2 + odd], j % 4);
    return number(words[j / 2], j % 2 * 2 + odd);
}

/* Packs values `first` to `last` of WORDS weight rows as columns of a panel of B, with `stride` words between
 * steps. */
static void unpack_strip(const coded *p, const strip *of, int64_t first, int64_t last, panel_word *to,
                         int64_t stride) {
    const int together = BLOCKS_OF(FORM);
    const uint8_t *w = of->codes + first / BLOCK / together * WORDS_OF(FORM) * LINE;
    for (int64_t i = first; i < last; i += together * BLOCK, w += WORDS_OF(FORM) * LINE) {
        row_floats scale[2], least = {0};
        scales_at(p, of, i, scale, &least);
        UNROLLED for (int b = 0; b < together; b++) {
            row_words words[8];
            UNROLLED for (int j = 0; j < 8; j++) words[j] = code_word(FORM, w, b, j);
            row_floats factor[2], below[2];
            block_factors(FORM, w, b, scale[0], least, factor, below);
            if (p->each < BLOCK) factor[1] = scale[1];
            UNROLLED for (int j = 0; j < BLOCK / 2; j++) {
                row_floats f = factor[j / (HALF / 2)], least_here = below[j / (HALF / 2)];
                row_floats one = number_of_pair(words, j, 0) * f - least_here;
                row_floats two = number_of_pair(words, j, 1) * f - least_here;
#ifdef PANELS_BF16
                *(any_word_lanes *)to = words_of((lanes)one, (lanes)two), to += stride;
#else
                *(any_row_floats *)to = one, *(any_row_floats *)(to + stride) = two, to += 2 * stride;
#endif
            }
        }
    }
}

static void unpack_tiles(const void *weight, int64_t column, int64_t columns, int64_t first, int64_t last,
                         void *panel) {
    const coded *p = weight;
    panel_word *to = panel;
    for (int64_t i = 0; i < columns; i += WORDS) {
        strip of = strip_of(p, (column + i) / TILE, (column + i) % TILE, NULL);
        unpack_strip(p, &of, first, last, to + i, columns);
    }
}

/* y = x w^T; n is a multiple of TILE, k of BLOCK. Returns 0, or 1 if out of memory. */
static int multiply_panels(const void *codes, int form, const void *scales, int scales_dtype, const void *x,
                           int rounded, void *y, int dtype, int64_t rows, int64_t n, int64_t k,
                           int64_t groups, int threads) {
    coded w = weight(codes, scales, scales_dtype, n, k, groups);
    many_rows m = {.x = x, .y = y, .dtype = dtype, .rows = rows, .n = n, .k = k, .by = &FLOAT_SET,
                   .unpack = unpack_tiles, .weight = &w};
    return multiply_many_rows(&m, threads);
}
