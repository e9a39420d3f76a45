/* Implements kernels.h for dense weights and attention, and dispatches quantised weights by format (form.c).
 * One translation unit, since attention inlines the loops of dense.h. */
#include "dense.h"
#include "attention.h"

/* Maximum rows of x of the GEMV kernel, by dtype. EMULATED_ROWS: for bf16 without AVX512-BF16 (speedup over the faster
 * of the BLAS library's bf16 and fp32 at 12288 x 1536: 2.7x at 8 rows, 1.3x at 16, 1.03x at 24, 0.88x at 32). */
#define BF16_ROWS TOGETHER
#define EMULATED_ROWS 24
#define F32_ROWS 4

static int is_few(int dtype, int64_t rows) {
    return rows <= (dtype == F32 ? F32_ROWS : EMULATED ? EMULATED_ROWS : BF16_ROWS);
}

panel_kernels g4ir_panels[F32 + 1];

int g4ir_linear(const void *w, const void *x, void *y, int dtype, int64_t rows, int64_t n,
                int64_t k, int threads) {
    if (!is_few(dtype, rows)) return g4ir_linear_chunk(w, x, y, dtype, rows, n, k, threads);
    int64_t size = dtype == BF16 ? sizeof(bf16_row) : sizeof(float);
    product p = {.w = w, .bytes = dtype == BF16 ? 512 : 1024, .stride = k, .x = x,
                 .as_pairs = dtype == BF16 && EMULATED, .apart = k * size, .y = y,
                 .dtype = dtype, .rows = rows, .n = n, .k = k};
    return multiply(&p, dtype == BF16 ? dot_bf16s : dot_f32s, threads);
}

int g4ir_linear_chunk(const void *w, const void *x, void *y, int dtype, int64_t rows, int64_t n,
                      int64_t k, int threads) {
    return g4ir_panels[dtype].linear(w, x, y, dtype, rows, n, k, threads);
}

int g4ir_add_products(const void *x, float *y, int dtype, int64_t rows, int64_t columns, int64_t stride,
                      int threads) {
    return g4ir_panels[dtype].add_products(x, y, dtype, rows, columns, stride, threads);
}

int g4ir_takes_chunk(int dtype, int held, int64_t d) {
    return (dtype == BF16 || dtype == F32) && held >= BF16 && held <= ROWS_FP8 && d % 2 == 0;
}

int g4ir_attend_chunk(const void *q, const int64_t *positions, const int64_t *last,
                      const int64_t *written, const void *k, const void *v, const void *fresh_k,
                      const void *fresh_v, void *out, int dtype, int held, int64_t batch, int64_t queries,
                      int64_t heads, int64_t kv_heads, int64_t d, int64_t slots, int64_t width,
                      int64_t window, double scale, int threads) {
    return g4ir_panels[dtype].attend_chunk(q, positions, last, written, k, v, fresh_k, fresh_v, out, dtype,
                                           held, batch, queries, heads, kv_heads, d, slots, width, window,
                                           scale, threads);
}

/* ---- quantised weights ---- */

const form_kernels *g4ir_forms[FORMS];
enum { NO_FORM = 2 };

static const form_kernels *of_form(int form) { return form >= 0 && form < FORMS ? g4ir_forms[form] : NULL; }

int g4ir_takes_codes(int form, int rounded, int dtype, int64_t rows, int64_t k, int64_t groups) {
    return of_form(form) && of_form(form)->takes_codes(form, rounded, dtype, rows, k, groups);
}

int g4ir_linear_coded(const void *codes, int form, int tiles, const void *scales, int scales_dtype,
                      const void *x, int rounded, void *y, int dtype, int64_t rows, int64_t n,
                      int64_t k, int64_t groups, int threads) {
    if (!of_form(form)) return NO_FORM;
    return of_form(form)->linear_coded(codes, form, tiles, scales, scales_dtype, x, rounded, y, dtype, rows,
                                       n, k, groups, threads);
}

int g4ir_screened_rows(int form) { return of_form(form) ? of_form(form)->screened_rows : 0; }

int g4ir_takes_gemm(int form, int rounded, int dtype, int64_t rows, int64_t n, int64_t k, int64_t groups) {
    return of_form(form) && of_form(form)->takes_gemm(form, rounded, dtype, rows, n, k, groups);
}

int g4ir_gemm(const void *codes, int form, const void *scales, int scales_dtype, const void *x, int rounded,
              void *y, int dtype, int64_t rows, int64_t n, int64_t k, int64_t groups, int threads) {
    if (!of_form(form)) return NO_FORM;
    __typeof__(g4ir_gemm) *multiply = rounded ? of_form(form)->gemm_integers : g4ir_panels[dtype].gemm[form];
    return multiply(codes, form, scales, scales_dtype, x, rounded, y, dtype, rows, n, k, groups,
                               threads);
}

int g4ir_decode(const void *codes, int form, int tiles, const void *scales, int scales_dtype, void *y,
                int dtype, int64_t n, int64_t k, int64_t groups, int threads) {
    if (!of_form(form)) return NO_FORM;
    return of_form(form)->decode(codes, form, tiles, scales, scales_dtype, y, dtype, n, k, groups, threads);
}
