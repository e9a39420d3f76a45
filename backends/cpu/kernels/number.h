/* Scalar conversions between bf16, fp16 and fp32. */
#pragma once
#include "kernels.h"

#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;

static inline float widen(bf16 h) {
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

/* Round to nearest even; NaN stays NaN. */
static inline bf16 narrow(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    uint32_t near = u + 0x7fffu + ((u >> 16) & 1), nan = u | 0x400000u;
    return (bf16)(((u & 0x7fffffffu) > 0x7f800000u ? nan : near) >> 16);
}

static inline float same(float f) { return f; }

static inline float widen_half(uint16_t h) {
    uint32_t u = (uint32_t)(h & 0x8000) << 16 | (uint32_t)(h & 0x7fff) << 13;
    float f;
    memcpy(&f, &u, 4);
    return f * 0x1p112f;
}

static inline float load(const void *p, int64_t i, int dtype) {
    if (dtype == F32) return ((const float *)p)[i];
    return dtype == F16 ? widen_half(((const uint16_t *)p)[i]) : widen(((const bf16 *)p)[i]);
}

static inline void store(void *p, int64_t i, float value, int dtype) {
    if (dtype == F32)
        ((float *)p)[i] = value;
    else
        ((bf16 *)p)[i] = narrow(value);
}
