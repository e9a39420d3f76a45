/* Interface of the library; arrays are contiguous unless a stride is given. pyops.py has the same
 * ids of dtypes, isa.py those of weight formats. */
#pragma once
#include <stdint.h>

/* Dtypes of scales; x and outputs are bf16 or fp32. */
enum { BF16, F32, F16 };
/* Formats of quantised weights. Bytes of a block: INT8, FP8: 1 per value; INT4: 1 for two; INT6: 104 for 128; UINT4,
 * UINT5: 140 and 172 for 256, with minima; INT5: 20 for 32; INT3K: 56 for 128; UINT2: 40 for 128, with minima; IQ4: 16
 * for 32 indices of a table; MIN4, MIN5: 16 and 20 for 32, with minima; INT2, INT3: 8 and 12 for 32; FP4: 36 for 64
 * indices; NL4, NL3, NL2: 68, 52 and 36 for 128 indices. */
enum { INT8, INT4, FP8, INT6, UINT4, UINT5, INT5, INT3K, UINT2, IQ4, MIN4, MIN5, INT2, INT3, FP4, NL4, NL3, NL2, FORMS };

/* y[rows, n] = x[rows, k] @ w[n, k]^T, all in `dtype`; accumulates in fp32, rounds once. Returns 0,
 * or 1 if out of memory. */
int g4ir_linear(const void *w, const void *x, void *y, int dtype, int64_t rows, int64_t n,
                int64_t k, int threads);

/* The same for a prefill chunk: a row's result does not depend on the number of rows. */
int g4ir_linear_chunk(const void *w, const void *x, void *y, int dtype, int64_t rows, int64_t n,
                      int64_t k, int threads);

/* Adds x^T x of x[rows, columns], with `stride` elements from one row to the next, to the upper triangle of
 * y[columns, columns] in fp32; some elements below the diagonal change too. Returns 0, or 1 if out of memory. */
int g4ir_add_products(const void *x, float *y, int dtype, int64_t rows, int64_t columns, int64_t stride,
                      int threads);

/* g4ir_linear for quantised weights: w = codes[n, k] * scales[n, groups], minus minima stored next to the scales in
 * formats with minima. `tiles`: weights are in tiles of 16 rows (layout.h). `rounded`, tiles only: bf16 rows of x are
 * quantised to int8 first, with a scale for every 32 values. Returns also 2 for an unknown format. g4ir_takes_codes
 * returns whether these sizes are supported. */
int g4ir_takes_codes(int form, int rounded, int dtype, int64_t rows, int64_t k, int64_t groups);
int g4ir_linear_coded(const void *codes, int form, int tiles, const void *scales, int scales_dtype,
                      const void *x, int rounded, void *y, int dtype, int64_t rows, int64_t n,
                      int64_t k, int64_t groups, int threads);

/* Returns the maximum rows of bf16 x for which products with `rounded` take two thirds of the time; 0: none. */
int g4ir_screened_rows(int form);

/* The same for more rows of x and a tiled weight; if x is bf16, the weight may be rounded to bf16, or x be converted to
 * 15-bit integers (digits.h). g4ir_takes_gemm returns whether these sizes are supported. */
int g4ir_takes_gemm(int form, int rounded, int dtype, int64_t rows, int64_t n, int64_t k, int64_t groups);
int g4ir_gemm(const void *codes, int form, const void *scales, int scales_dtype, const void *x, int rounded,
              void *y, int dtype, int64_t rows, int64_t n, int64_t k, int64_t groups, int threads);

/* y[n, k] = round(codes * scales): dequantises a weight. */
int g4ir_decode(const void *codes, int form, int tiles, const void *scales, int scales_dtype,
                void *y, int dtype, int64_t n, int64_t k, int64_t groups, int threads);

/* The kernels of each format (form.c). */
typedef struct {
    __typeof__(g4ir_takes_codes) *takes_codes;
    __typeof__(g4ir_linear_coded) *linear_coded;
    __typeof__(g4ir_takes_gemm) *takes_gemm;
    __typeof__(g4ir_gemm) *gemm_integers;
    __typeof__(g4ir_decode) *decode;
    int screened_rows;
} form_kernels;
extern const form_kernels *g4ir_forms[FORMS];

/* Dtypes of KV caches in addition to those above (g4ir/ops/kv_quant.py). */
enum { ROWS_INT8 = F16 + 1, ROWS_FP8 };

/* out[batch, queries, heads, d] = softmax(q k^T * scale) v with the mask of g4ir/ops/attention.py for
 * queries at positions[batch, queries], over a cache k, v[slots, batch, kv_heads, width] to which
 * written[batch] tokens were written. `dtype`: of q and out; `held`: of the cache; window 0: none. Scores and sums
 * are fp32; probabilities are rounded to bf16 if q and the cache are bf16, d is a multiple of 32 and the
 * kernels use AVX512-BF16. Returns 0, or 1 if out of memory. */
int g4ir_attend(const void *q, const int64_t *positions, const int64_t *written, const void *k,
                const void *v, void *out, int dtype, int held, int64_t batch, int64_t queries,
                int64_t heads, int64_t kv_heads, int64_t d, int64_t slots, int64_t width,
                int64_t window, double scale, int threads);

/* The same for a prefill chunk: queries attend to the cache, then to the chunk's fresh_k and fresh_v[batch, queries,
 * kv_heads, width], up to position last[batch, queries]. g4ir_takes_chunk returns whether these dtypes and head sizes
 * are supported. */
int g4ir_takes_chunk(int dtype, int held, int64_t d);
int g4ir_attend_chunk(const void *q, const int64_t *positions, const int64_t *last,
                      const int64_t *written, const void *k, const void *v, const void *fresh_k,
                      const void *fresh_v, void *out, int dtype, int held, int64_t batch, int64_t queries,
                      int64_t heads, int64_t kv_heads, int64_t d, int64_t slots, int64_t width,
                      int64_t window, double scale, int threads);

/* GEMM and prefill attention (panels.c), by dtype. */
typedef struct {
    __typeof__(g4ir_linear) *linear;
    __typeof__(g4ir_add_products) *add_products;
    __typeof__(g4ir_attend_chunk) *attend_chunk;
    __typeof__(g4ir_gemm) *gemm[FORMS];
} panel_kernels;
extern panel_kernels g4ir_panels[F32 + 1];

/* Runs `count` instructions of step.c; `scratch`: three fp32 rows of the widest operand. Returns 0; 1 if
 * out of memory; 2 for an unknown instruction or weight format. */
int g4ir_run_instructions(const void *instructions, const void *operands, int64_t count, float *scratch,
                          int threads);
/* Runs a program that ends with END_STEP until the steps requested in `pace` are done; returns as
 * g4ir_run_instructions. */
int g4ir_run_steps(const void *instructions, const void *operands, int64_t count, int64_t *pace,
                   float *scratch, int threads);
/* Requests more steps of a program that runs in another thread; returns 1, or 0 if it has ended. */
int g4ir_request_steps(int64_t *pace, int64_t more);
/* Blocks until `steps` steps are done or one failed. */
void g4ir_wait_steps(int64_t *pace, int64_t steps);

/* Quantisation at build (packing.c): int4 with bf16 scales, fits of nonuniform levels, and error compensation. */
int g4ir_takes_packing(int dtype, int64_t group);
int g4ir_pack(const void *w, const float *moments, void *codes, void *scales, int64_t groups, int64_t group,
              int64_t row, int64_t matrix, int dtype, int threads);
int g4ir_fit_groups(const float *x, const float *moments, const float *levels, float *scales, float *shifts,
                    int64_t groups, int64_t row, int lowest, int shift, int threads);
int g4ir_round_columns(float *x, const float *by, const float *step, const float *shift, const float *start,
                       const float *levels, int64_t count, int64_t rows, int low, int high, int threads);
