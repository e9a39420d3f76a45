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
#include "gemm_integers.h"
#ifdef AT_O2
#pragma GCC pop_options
#endif

/* Maximum rows of x for which codes are used directly (GEMV), without unpacking to panels (GEMM). More for integer
 * kernels of AVX2 and AVX-512 without AMX: 9, 16 and 32 rows take 0.75, 0.83 and 0.86 of the time of the integer GEMM
 * with AVX-512 VNNI; with AVX2 0.78, 0.85 and 0.88 for int8 and int4, but 1.0, 1.12 and 1.17 for uint4, whose rows then
 * keep the bits that they have alone. With SSE4 1.4 to 1.7 (2048 x 2048, Zen 4). */
#define CODED_FLOAT_ROWS 8
#if defined(__x86_64__) && WIDE > 16 && !defined(__AMX_INT8__)
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
    if (rounded && !(dtype == BF16 && HAS_INTEGER_PANELS && groups >= scales && groups % scales == 0 &&
                     k % (groups / scales * BLOCK) == 0))
        return 0;
    if (dtype != BF16 && dtype != F32) return 0;
    return rows >= 1 && n >= 1 && n % TILE == 0 && k >= 1 && k % BLOCK == 0;
}

/* For bf16 rows of x. Groups that are no multiple of BLOCK take fp32 panels. */
static int gemm_integers(const void *codes, int form, const void *scales, int scales_dtype, const void *x,
                         int rounded, void *y, int dtype, int64_t rows, int64_t n, int64_t k, int64_t groups,
                         int threads) {
    coded p = weight(codes, scales, scales_dtype, n, k, groups);
    p.x = x, p.y = y, p.dtype = dtype, p.rows = rows;
    if (p.each % BLOCK)
        return g4ir_panels[F32].gemm[FORM](codes, form, scales, scales_dtype, x, 0, y, dtype, rows, n, k, groups,
                                           threads);
    return multiply_integer_panels(&p, rounded, threads);
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

/* With AMX, the digits of many rows are multiplied faster; without dot products, int8 may be multiplied as int16. */
static int screened_rows(void) {
#ifdef INTEGERS
    if (CODED_ROWS > CODED_FLOAT_ROWS && HAS_INTEGERS && stored_as(FORM, 1, CODED_ROWS) != PAIRS) return CODED_ROWS;
#endif
    return 0;
}

__attribute__((constructor)) static void add_form(void) {
    static form_kernels own = {takes_codes, linear_coded, takes_gemm, gemm_integers, decode};
    own.screened_rows = screened_rows();
    g4ir_forms[FORM] = &own;
    if (EXACT_INTEGERS(FORM) && !bf16_pays()) g4ir_panels[BF16].gemm[FORM] = gemm_integers;
}
