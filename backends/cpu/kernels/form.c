/* Kernels of quantised weights in the format FORM (kernels.h); compiled once per format. */
#include "decode.h"
#include "many_rows.h"
#include "tiles.h"

/* At -O3 compilers take minutes, with no speedup over O2 with unrolled loops; sanitized code keeps its own level. */
#if WIDE == 32 && !defined(SANITIZED)
#define AT_O2
#endif
#ifdef AT_O2
#pragma GCC push_options
#pragma GCC optimize("O2", "peel-loops")
#endif
#include "floats.h"
#include "integers.h"
#include "gemm_int8.h"
#ifdef AT_O2
#pragma GCC pop_options
#endif

/* Maximum rows of x for which codes are used directly (GEMV), without dequantising to panels (GEMM). More for integer
 * kernels on x86-64 without AMX, where this was measured: a decode step of 9, 16, 24 and 32 sequences takes 0.45, 0.63,
 * 0.73 and 0.89 of the time of the GEMM on Zen 4, and 0.45, 0.53, 0.63 and 0.73 restricted to AVX2 (Gemma 3 270M
 * Q4_K_M). */
#define CODED_FLOAT_ROWS 8
#if defined(__x86_64__) && !defined(__AMX_INT8__)
#define CODED_ROWS 32
#else
#define CODED_ROWS CODED_FLOAT_ROWS
#endif

static int takes_codes(int form, int rounded, int dtype, int64_t rows, int64_t k, int64_t groups) {
    if (rounded && !(dtype == BF16 && HAS_INTEGERS)) return 0;
    if (dtype != BF16 && dtype != F32) return 0;
    if (groups % (1 + MINIMA(FORM))) return 0;
    groups /= 1 + MINIMA(FORM);
    const int64_t rows_most = dtype == BF16 && HAS_INTEGERS ? CODED_ROWS : CODED_FLOAT_ROWS;
    if (rows < 1 || rows > rows_most || k % BLOCK || groups < 1 || k % groups) return 0;
    return k / groups % SHARE_OF(FORM) == 0;
}

static int linear_coded(const void *codes, int form, int tiles, const void *scales, int scales_dtype,
                        const void *x, int rounded, void *y, int dtype, int64_t rows, int64_t n,
                        int64_t k, int64_t groups, int threads) {
    coded p = weight(codes, scales, scales_dtype, n, k, groups);
    p.x = x, p.y = y, p.dtype = dtype, p.rows = rows;
    if (tiles && dtype == BF16 && HAS_INTEGERS) return multiply_integers(&p, rounded ? 1 : 2, threads);
    return multiply_floats(&p, tiles, threads);
}

static int takes_gemm(int form, int rounded, int dtype, int64_t rows, int64_t n, int64_t k, int64_t groups) {
    const int scales = 1 + MINIMA(FORM);
    if (rounded && !(dtype == BF16 && HAS_INT8_PANELS && groups >= scales && groups % scales == 0 &&
                     k % (groups / scales * BLOCK) == 0))
        return 0;
    if (dtype != BF16 && dtype != F32) return 0;
    return rows >= 1 && n >= 1 && n % TILE == 0 && k >= 1 && k % BLOCK == 0;
}

static int gemm_rounded(const void *codes, int form, const void *scales, int scales_dtype, const void *x,
                      int rounded, void *y, int dtype, int64_t rows, int64_t n, int64_t k, int64_t groups,
                      int threads) {
    coded p = weight(codes, scales, scales_dtype, n, k, groups);
    p.x = x, p.y = y, p.dtype = dtype, p.rows = rows;
    return multiply_int8_panels(&p, threads);
}

typedef struct {
    const coded *p;
    int tiles;
    rows_to_decode rows;
} decoding;

static int decode_units(void *context, units *left) {
    const decoding *d = context;
    rows_to_decode own = d->rows;
    uint8_t *rows = d->tiles ? malloc(tile_bytes(d->p)) : NULL;
    if (d->tiles && !rows) return 1;
    for (int64_t i; (i = take_unit(left)) >= 0;) {
        if (!d->tiles) {
            decode_rows(&own, i * TILE, least((i + 1) * TILE, d->p->n));
            continue;
        }
        own.codes = rows, own.scales = rows_of_tile(d->p, i, rows);
        own.y = (char *)d->rows.y + i * TILE * own.k * (own.dtype == F32 ? 4 : 2);
        decode_rows(&own, 0, TILE);
    }
    free(rows);
    return 0;
}

static int decode(const void *codes, int form, int tiles, const void *scales, int scales_dtype,
                  void *y, int dtype, int64_t n, int64_t k, int64_t groups, int threads) {
    coded p = weight(codes, scales, scales_dtype, n, k, groups);
    decoding d = {&p, tiles, {codes, scales, scales_dtype, y, dtype, k, groups}};
    return run_region(decode_units, &d, (n + TILE - 1) / TILE, threads);
}

__attribute__((constructor)) static void add_form(void) {
    static const form_kernels own = {takes_codes, linear_coded, takes_gemm, gemm_rounded, decode};
    g4ir_forms[FORM] = &own;
}
