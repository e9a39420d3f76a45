/* The CPU kernels (kernels.h) of every engine: products of dense weights, attention, and the calls of
 * products in the forms that its library has (form.c). They are one translation unit: attention inlines
 * the loops of product.h. */
#include "product.h"

#include "vectors.h"

#include "gemm.h"

#include "float.h"

#include "attention.h"

#include "prefill_attention.h"

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
              int64_t rows, int64_t n, int64_t k, int64_t groups, int threads) {
    if (!of_form(form)) return NO_FORM;
    return of_form(form)->gemm(codes, form, scales, scales_dtype, x, y, rows, n, k, groups, threads);
}

int g4ir_decode(const void *codes, int form, int tiles, const void *scales, int scales_dtype, void *y,
                int dtype, int64_t n, int64_t k, int64_t groups, int threads) {
    if (!of_form(form)) return NO_FORM;
    return of_form(form)->decode(codes, form, tiles, scales, scales_dtype, y, dtype, n, k, groups, threads);
}
