/* GEMM of many rows of x with a dense row-major weight: both bf16, or with fp32 panels also both fp32. */
#pragma once
#include "many_rows.h"
#include "transpose.h"

typedef struct {
    const void *w;
    int dtype;
    int64_t n, k;
} dense_weight;

/* Expands panel words of two bf16 values to two words of one fp32 value each. */
static void widen_pairs(uint32_t *panel, int64_t pairs, int64_t columns) {
    const uint32_t *from = panel + pairs * columns;
    for (int64_t j = 0; j < pairs; j++)
        for (int64_t i = 0; i < columns; i++) {
            uint32_t pair = from[j * columns + i];
            panel[2 * j * columns + i] = pair << 16, panel[(2 * j + 1) * columns + i] = pair & 0xffff0000u;
        }
}

static void unpack_rows(const void *weight, int64_t column, int64_t columns, int64_t first, int64_t last,
                        void *panel) {
    const dense_weight *w = weight;
    const int size = w->dtype == F32 ? 4 : 2, widens = PER_WORD == 1 && w->dtype == BF16;
    const int64_t words = words_in_panel(last - first), stride = w->k * size;
    const int64_t here = least(columns, w->n - column), whole = stride % 4 ? 0 : (last - first) * size / 4;
    const char *from = (const char *)w->w + column * stride + first * size;
    uint32_t *to = panel;
    transpose((const uint32_t *)from, stride / 4, to + whole * columns * widens, columns, here, whole);
    if (widens) widen_pairs(to, whole, columns);
    for (int64_t j = 0; j < words; j++)
        for (int64_t i = j < whole * (1 + widens) ? here : 0; i < columns; i++)
            ((panel_word *)to)[j * columns + i] =
                word_at(from + i * stride, j, i < here ? last - first : 0, w->dtype);
}

static int multiply_dense_rows(const void *w, const void *x, void *y, int dtype, int64_t rows, int64_t n,
                               int64_t k, int threads) {
    dense_weight weight = {w, dtype, n, k};
    many_rows m = {.x = x, .y = y, .dtype = dtype, .rows = rows, .n = n, .k = k, .by = &FLOAT_SET,
                   .unpack = unpack_rows, .weight = &weight};
    return multiply_many_rows(&m, threads);
}

/* ---- x^T x ---- */

typedef struct {
    const void *x;
    int dtype;
    int64_t columns, stride; /* elements from one row of x to the next */
} columns_of_rows;

/* Word j of column i of x: two consecutive rows in bf16, or one row in fp32; zero from row `values` on. */
static inline panel_word word_of_column(const char *x, int dtype, int64_t stride, int64_t i, int64_t j, int64_t values) {
#ifdef PANELS_BF16
    const bf16 *at = (const bf16 *)x + 2 * j * stride + i;
    return 2 * j + 1 < values ? at[0] | (uint32_t)at[stride] << 16 : 2 * j < values ? at[0] : 0;
#else
    return j < values ? load(x, j * stride + i, dtype) : 0;
#endif
}

/* Packs `here` columns of x as rows of A (`depth` DEPTH) or columns of B (`depth` 1), and zeros up to `width`. */
INLINED void pack_columns_by(const int64_t depth, const char *x, int dtype, int64_t stride, int64_t here, int64_t width,
                     int64_t values, panel_word *to) {
    const int64_t words = words_in_panel(values), whole = values / PER_WORD;
    for (int64_t j = 0; j < words; j++) {
        panel_word *row = to + j / depth * depth * width + j % depth;
        if (j < whole)
            for (int64_t i = 0; i < here; i++) row[i * depth] = word_of_column(x, dtype, stride, i, j, INT64_MAX);
        else
            for (int64_t i = 0; i < here; i++) row[i * depth] = word_of_column(x, dtype, stride, i, j, values);
        for (int64_t i = here; i < width; i++) row[i * depth] = 0;
    }
}

static void pack_columns(const char *x, int dtype, int64_t stride, int64_t count, int64_t values, void *panel) {
    pack_columns_by(DEPTH, x, dtype, stride, least(count, ROWS), ROWS, values, panel);
}

static void unpack_columns(const void *weight, int64_t column, int64_t columns, int64_t first, int64_t last,
                           void *panel) {
    const columns_of_rows *w = weight;
    const int size = w->dtype == F32 ? 4 : 2;
    pack_columns_by(1, (const char *)w->x + (first * w->stride + column) * size, w->dtype, w->stride,
                    least(columns, w->columns - column), columns, last - first, panel);
}

/* Adds x^T x to the upper triangle of y [columns, columns] in fp32. */
static int add_dense_products(const void *x, float *y, int dtype, int64_t rows, int64_t columns, int64_t stride,
                              int threads) {
    columns_of_rows w = {x, dtype, columns, stride};
    if (!rows) return 0;
    micro_kernel_set set = FLOAT_SET;
    set.pack = pack_columns;
    many_rows m = {.x = x, .y = y, .dtype = dtype, .stride = stride, .upper = 1, .rows = columns, .n = columns, .k = rows,
                   .by = &set, .unpack = unpack_columns, .weight = &w};
    return multiply_many_rows(&m, threads);
}
