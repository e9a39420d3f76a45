/* What kernels.c does; all arrays are contiguous. Dtypes, forms of codes and results are numbered as
 * in pyops.py. */
#pragma once
#include <stdint.h>

/* Dtypes of scales; x and results have one of the first two. */
enum { BF16, F32, F16 };
/* Forms of codes: a byte each, two in one, 128 in 104 bytes, 256 with minima in 140 or 172, or 32 in 20. */
enum { INT8, INT4, FP8, INT6, UINT4, UINT5, INT5, FORMS };

/* y[rows, n] = x[rows, k] @ w[n, k]^T; sums are fp32, rounded once. Returns 0, or 1 where memory is
 * short. */
int g4ir_linear(const void *w, const void *x, void *y, int dtype, int64_t rows, int64_t n,
                int64_t k, int threads);

/* The same of a chunk's rows, each of which is computed alike however many they are. */
int g4ir_linear_chunk(const void *w, const void *x, void *y, int dtype, int64_t rows, int64_t n,
                      int64_t k, int threads);

/* The same of quantised weights, for w = codes[n, k] * scales[n, groups], less minima that lie beside
 * scales, where the form has such; `tiles`: they lie in tiles of 16 rows (layout.h), as n and
 * groups allow it; `rounded`: rows of x, in bf16, are rounded to 8 bits first, with a scale for each 32
 * numbers; tiles alone. */
int g4ir_takes_codes(int form, int rounded, int dtype, int64_t rows, int64_t k, int64_t groups);
int g4ir_linear_coded(const void *codes, int form, int tiles, const void *scales, int scales_dtype,
                      const void *x, int rounded, void *y, int dtype, int64_t rows, int64_t n,
                      int64_t k, int64_t groups, int threads);

/* The same for more rows and a weight in tiles; x in bf16 may have it rounded to bf16. */
int g4ir_takes_gemm(int form, int rounded, int dtype, int64_t rows, int64_t n, int64_t k, int64_t groups);
int g4ir_gemm(const void *codes, int form, const void *scales, int scales_dtype, const void *x, int rounded,
              void *y, int dtype, int64_t rows, int64_t n, int64_t k, int64_t groups, int threads);

/* y[n, k] = round(codes * scales), for what is taken as one row. */
int g4ir_decode(const void *codes, int form, int tiles, const void *scales, int scales_dtype,
                void *y, int dtype, int64_t n, int64_t k, int64_t groups, int threads);

/* The kernels of each form (form.c). */
typedef struct {
    __typeof__(g4ir_takes_codes) *takes_codes;
    __typeof__(g4ir_linear_coded) *linear_coded;
    __typeof__(g4ir_takes_gemm) *takes_gemm;
    __typeof__(g4ir_gemm) *gemm_rounded;
    __typeof__(g4ir_decode) *decode;
} form_kernels;
extern const form_kernels *g4ir_forms[FORMS];

/* What rows of a cache may be held in beside dtypes (g4ir/ops/kv_quant.py). */
enum { ROWS_INT8 = F16 + 1, ROWS_FP8 };

/* out[batch, queries, heads, d] = softmax(q k^T * scale) v, of what g4ir/ops/attention.py says that
 * queries at positions[batch, queries] see: of a cache k, v[slots, batch, kv_heads, width] that holds
 * written[batch] tokens. Sums and weights are fp32, but for weights of values in bf16, which are
 * rounded where the CPU has instructions for these. Returns 0, or 1 where memory is short. */
int g4ir_attend(const void *q, const int64_t *positions, const int64_t *written, const void *k,
                const void *v, void *out, int dtype, int held, int64_t batch, int64_t queries,
                int64_t heads, int64_t kv_heads, int64_t d, int64_t slots, int64_t width,
                int64_t window, double scale, int threads);

/* The same of a prompt's chunk: queries see the cache, then k and v[batch, queries, kv_heads,
 * width] of the chunk, up to position last[batch, queries]. Of which dtypes and heads: */
int g4ir_takes_chunk(int dtype, int held, int64_t d);
int g4ir_attend_chunk(const void *q, const int64_t *positions, const int64_t *last,
                      const int64_t *written, const void *k, const void *v, const void *fresh_k,
                      const void *fresh_v, void *out, int dtype, int held, int64_t batch, int64_t queries,
                      int64_t heads, int64_t kv_heads, int64_t d, int64_t slots, int64_t width,
                      int64_t window, double scale, int threads);

/* Products of many rows of x in a dtype and attention of prompts (panels.c); by dtype. */
typedef struct {
    __typeof__(g4ir_linear) *linear;
    __typeof__(g4ir_attend_chunk) *attend_chunk;
    __typeof__(g4ir_gemm) *gemm[FORMS];
} panel_kernels;
extern panel_kernels g4ir_panels[F32 + 1];

/* Runs `count` instructions of step.c over their operands; `room`: three rows of the widest operand, in
 * fp32. Returns 0; 1 where memory is short; 2 where an instruction is unknown. */
int g4ir_run_instructions(const void *instructions, const void *operands, int64_t count, float *room,
                          int threads);
/* Runs a program that ends a step until as many steps are done as `pace` says are wanted; returns as
 * above. */
int g4ir_run_steps(const void *instructions, const void *operands, int64_t count, int64_t *pace,
                   float *room, int threads);
/* Wants more steps of a program that runs in another thread; 0 if it has ended. */
int g4ir_request_steps(int64_t *pace, int64_t more);
/* Returns once so many steps are done, or have failed. */
void g4ir_wait_steps(int64_t *pace, int64_t steps);

/* The op `quantize` of 4-bit codes with bf16 scales (packing.c). */
int g4ir_takes_packing(int dtype, int64_t group);
int g4ir_pack(const void *w, const float *moments, void *codes, void *scales, int64_t groups, int64_t group,
              int64_t row, int64_t matrix, int dtype, int threads);
