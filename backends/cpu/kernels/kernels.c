/* What kernels.h declares of dense weights and attention; products of quantised weights are handed to the
 * forms that the library has (form.c). One translation unit: attention inlines the loops of dense.h. */
#include "dense.h"
#include "dense_panels.h"
#include "attention.h"
#include "prefill_attention.h"

/* Most rows that a product takes; of bf16 where the CPU cannot multiply it (measured at
 * 12288 x 1536, beside the faster of the library in bf16 and in fp32: 2.7x at 8 rows, 1.3x at 16,
 * 1.03x at 24, 0.88x at 32). */
#define BF16_ROWS TOGETHER
#define EMULATED_ROWS 24
#define F32_ROWS 4

static int is_few(int dtype, int64_t rows) {
    return rows <= (dtype == F32 ? F32_ROWS : EMULATED ? EMULATED_ROWS : BF16_ROWS);
}

int g4ir_takes(int dtype, int64_t rows, int64_t n, int64_t k) {
    if (dtype != BF16 && dtype != F32 || rows < 1) return 0;
    return is_few(dtype, rows) || dtype == BF16 && takes_many_rows(dtype, n, k);
}

int g4ir_linear(const void *w, const void *x, void *y, int dtype, int64_t rows, int64_t n,
                int64_t k, int threads) {
    if (!is_few(dtype, rows) && takes_many_rows(dtype, n, k))
        return multiply_dense_rows(w, x, y, dtype, rows, n, k, threads);
    int64_t size = dtype == BF16 ? sizeof(bf16_row) : sizeof(float);
    product p = {.w = w, .bytes = dtype == BF16 ? 512 : 1024, .stride = k, .x = x,
                 .as_pairs = dtype == BF16 && EMULATED, .apart = k * size, .y = y,
                 .dtype = dtype, .rows = rows, .n = n, .k = k};
    return multiply(&p, dtype == BF16 ? dot_bf16s : dot_f32s, threads);
}

/* ---- quantised weights ---- */

const form_kernels *g4ir_forms[FORMS];
enum { NO_FORM = 2 };

void g4ir_share_forms(const form_kernels **with) {
    for (int form = 0; form < FORMS; form++) {
        const form_kernels *own = g4ir_forms[form], *other = with[form];
        g4ir_forms[form] = with[form] = own && (!other || own->rounded > other->rounded) ? own : other;
    }
}

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

int g4ir_takes_gemm(int form, int dtype, int64_t rows, int64_t n, int64_t k) {
    return of_form(form) && of_form(form)->takes_gemm(form, dtype, rows, n, k);
}

int g4ir_gemm(const void *codes, int form, const void *scales, int scales_dtype, const void *x, void *y,
              int dtype, int64_t rows, int64_t n, int64_t k, int64_t groups, int threads) {
    if (!of_form(form)) return NO_FORM;
    return of_form(form)->gemm(codes, form, scales, scales_dtype, x, y, dtype, rows, n, k, groups, threads);
}

int g4ir_decode(const void *codes, int form, int tiles, const void *scales, int scales_dtype, void *y,
                int dtype, int64_t n, int64_t k, int64_t groups, int threads) {
    if (!of_form(form)) return NO_FORM;
    return of_form(form)->decode(codes, form, tiles, scales, scales_dtype, y, dtype, n, k, groups, threads);
}
