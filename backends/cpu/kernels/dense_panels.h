/* Products of many rows of x in bf16 with a weight in rows. */
#pragma once
#include "many_rows.h"

#ifdef GEMM
typedef struct {
    const bf16 *w;
    int64_t k;
} dense_weight;

static void unpack_rows(const void *weight, int64_t column, int64_t columns, int64_t first, int64_t last,
                        panel_word *to) {
    const dense_weight *w = weight;
    const int64_t words = (last - first) / PER_WORD;
    for (int64_t i = 0; i < columns; i++) {
        const bf16 *row = w->w + (column + i) * w->k + first;
#ifdef GEMM_BF16
        for (int64_t j = 0; j < words; j++) to[j * columns + i] = ((const uint32_t *)row)[j];
#else
        for (int64_t j = 0; j < words; j++) to[j * columns + i] = widen(row[j]);
#endif
    }
}

static int takes_many_rows(int dtype, int64_t n, int64_t k) {
    return dtype == BF16 && n % LANE == 0 && k % PER_WORD == 0;
}

static int multiply_dense_rows(const void *w, const void *x, void *y, int64_t rows, int64_t n, int64_t k,
                               int threads) {
    dense_weight weight = {w, k};
    many_rows m = {.x = x, .y = y, .dtype = BF16, .rows = rows, .n = n, .k = k, .unpack = unpack_rows,
                   .weight = &weight};
    return multiply_many_rows(&m, threads);
}
#else
static int takes_many_rows(int dtype, int64_t n, int64_t k) { return 0; }
static int multiply_dense_rows(const void *w, const void *x, void *y, int64_t rows, int64_t n, int64_t k,
                               int threads) {
    return 1;
}
#endif
