/* Dequantises KV cache rows to fp32, for decode and prefill attention. */
#pragma once
#include "number.h"

#include <math.h>

/* Less than every score: the initial maximum. */
#define LOWEST -3e38f

static inline float widen_fp8(uint8_t c) {
    float f = widen_half((uint16_t)((c & 0x80) << 8 | (c & 0x7f) << 7)) * 0x1p8f;
    return (c & 0x7f) == 0x7f ? NAN : f;
}

/* Converts a cache row of d values, stored as `held`, to fp32 (quantised rows: g4ir/ops/kv_quant.py). */
static void widen_row(const char *row, int held, float *to, int64_t d) {
    if (held == ROWS_INT8)
        for (int64_t j = 0; j < d; j++) to[j] = (int8_t)row[j] * load(row + d, j / 32, BF16);
    else if (held == ROWS_FP8)
        for (int64_t j = 0; j < d; j++) to[j] = widen_fp8(row[j]);
    else if (held == F16)
        for (int64_t j = 0; j < d; j++) to[j] = load(row, j, F16);
    else if (held == BF16)
        for (int64_t j = 0; j < d; j++) to[j] = load(row, j, BF16);
    else
        for (int64_t j = 0; j < d; j++) to[j] = load(row, j, held);
}
