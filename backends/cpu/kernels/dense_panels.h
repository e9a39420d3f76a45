/* GEMM of many rows of x with a dense row-major weight, both bf16, or fp32 if panels are fp32. */
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
