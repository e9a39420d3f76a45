/* Products of many rows of x with a weight in rows, both in bf16 or, where panels hold fp32, in that. */
#pragma once
#include "many_rows.h"

#ifdef GEMM
typedef struct {
    const void *w;
    int dtype;
    int64_t k;
} dense_weight;

static void unpack_rows(const void *weight, int64_t column, int64_t columns, int64_t first, int64_t last,
                        panel_word *to) {
    const dense_weight *w = weight;
    const int64_t words = (last - first) / PER_WORD;
    for (int64_t i = 0; i < columns; i++) {
        int64_t at = (column + i) * w->k + first;
#ifdef GEMM_BF16
        for (int64_t j = 0; j < words; j++)
            to[j * columns + i] = ((const uint32_t *)((const bf16 *)w->w + at))[j];
#else
        if (w->dtype == F32)
            for (int64_t j = 0; j < words; j++) to[j * columns + i] = ((const float *)w->w)[at + j];
        else
            for (int64_t j = 0; j < words; j++) to[j * columns + i] = widen(((const bf16 *)w->w)[at + j]);
#endif
    }
}

static int takes_many_rows(int dtype, int64_t n, int64_t k) {
    return (dtype == BF16 || PER_WORD == 1) && n % LANE == 0 && k % PER_WORD == 0;
}

static int multiply_dense_rows(const void *w, const void *x, void *y, int dtype, int64_t rows, int64_t n,
                               int64_t k, int threads) {
    dense_weight weight = {w, dtype, k};
    many_rows m = {.x = x, .y = y, .dtype = dtype, .rows = rows, .n = n, .k = k, .unpack = unpack_rows,
                   .weight = &weight};
    return multiply_many_rows(&m, threads);
}
#else
static int takes_many_rows(int dtype, int64_t n, int64_t k) { return 0; }
static int multiply_dense_rows(const void *w, const void *x, void *y, int dtype, int64_t rows, int64_t n,
                               int64_t k, int threads) {
    return 1;
}
#endif
