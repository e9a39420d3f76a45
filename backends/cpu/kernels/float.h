/* Products of weights in floating point. */

/* The product of what is left of two rows behind whole vectors, one function for all sums: its loop in
 * each place was a third of the code. */
#define REST(NAME, TYPE, OTHER, WIDEN, WIDEN_OTHER)                                             \
    static __attribute__((noinline)) float rest_##NAME(const TYPE *w, const OTHER *x,           \
                                                       int64_t count) {                         \
        float rest = 0;                                                                         \
        for (int64_t j = 0; j < count; j++) rest += WIDEN(w[j]) * WIDEN_OTHER(x[j]);            \
        return rest;                                                                            \
    }

/* Rows are fp32; of the weight, a pair is made wide once for all rows. Sums of a row of the weight and
 * one of x: enough of them to hide the latency of the multiply-add, and as registers can hold. */
#define DOT(NAME, TYPE, WIDEN)                                                                  \
    REST(NAME, TYPE, float, WIDEN, same)                                                        \
    ALWAYS dot_##NAME(const int outs, const int rows, const product *p, int64_t o, int64_t r,   \
                      sums *out) {                                                              \
        const int all = outs * rows;                                                            \
        const int chains = all > REGISTERS / 2 ? 1 : all > REGISTERS / 4 ? 2 : all > 1 ? 4 : 8; \
        const int unroll = chains > 2 ? chains / 2 : 1;                                         \
        vector sum[MOST_SUMS][8];                                                               \
        SUMS for (int b = 0; b < all; b++)                                                      \
            UNROLLED for (int u = 0; u < 8; u++) sum[b][u] = (vector){0};                       \
        int64_t i = 0;                                                                          \
        for (; i + unroll * PAIR <= p->k; i += unroll * PAIR)                                   \
            UNROLLED for (int s = 0; s < outs; s++)                                             \
                UNROLLED for (int u = 0; u < unroll; u++) {                                     \
                    const TYPE *w = (const TYPE *)weights(p, beside(p, o, s), 0) + i + u * PAIR;\
                    read_ahead(w, outs);                                                        \
                    pair v = pair_##NAME(w);                                                    \
                    UNROLLED for (int q = 0; q < rows; q++) {                                   \
                        const float *row = (const float *)row_of(p, r + q) + i + u * PAIR;      \
                        pair x = pair_f32(row);                                                 \
                        const int b = s * rows + q, odd = chains > 1 ? 2 * u + 1 : 0;           \
                        sum[b][2 * u] += v.first * x.first;                                     \
                        sum[b][odd] += v.second * x.second;                                     \
                    }                                                                           \
                }                                                                               \
        UNROLLED for (int s = 0; s < outs; s++)                                                 \
            UNROLLED for (int q = 0; q < rows; q++) {                                           \
                const TYPE *w = (const TYPE *)weights(p, beside(p, o, s), 0);                   \
                const float *x = (const float *)row_of(p, r + q);                               \
                vector whole = sum[s * rows + q][0];                                            \
                UNROLLED for (int u = 1; u < chains; u++) whole += sum[s * rows + q][u];        \
                int64_t j = i;                                                                  \
                for (; j + PAIR <= p->k; j += PAIR) {                                           \
                    pair v = pair_##NAME(w + j), y = pair_f32(x + j);                           \
                    whole += v.first * y.first + v.second * y.second;                           \
                }                                                                               \
                float rest = j < p->k ? rest_##NAME(w + j, x + j, p->k - j) : 0;                \
                for (unsigned l = 0; l < VECTOR / sizeof(float); l++) rest += whole[l];         \
                out[s][q] = rest;                                                               \
            }                                                                                   \
    }                                                                                           \
    DOTS_WIDE(dot_##NAME)

#ifdef __AVX512BF16__
#define LANES 32
#define LOAD(p) ((__m512bh)_mm512_loadu_si512(p))

REST(bf16, bf16, bf16, widen, widen)
/* Four independent sums at least hide the latency of the multiply-add. */
ALWAYS dot_bf16(const int outs, const int rows, const product *p, int64_t o, int64_t r, sums *out) {
    const int all = outs * rows, unroll = all > 8 ? 1 : all > 2 ? 2 : 4;
    __m512 sum[MOST_SUMS][4];
    SUMS for (int b = 0; b < all; b++)
        UNROLLED for (int u = 0; u < 4; u++) sum[b][u] = _mm512_setzero_ps();
    int64_t i = 0;
    for (; i + unroll * LANES <= p->k; i += unroll * LANES)
        UNROLLED for (int s = 0; s < outs; s++)
            UNROLLED for (int u = 0; u < unroll; u++) {
                const bf16 *w = (const bf16 *)weights(p, beside(p, o, s), 0) + i + u * LANES;
                read_ahead(w, outs);
                __m512bh v = LOAD(w);
                UNROLLED for (int q = 0; q < rows; q++) {
                    const bf16 *x = (const bf16 *)row_of(p, r + q) + i + u * LANES;
                    sum[s * rows + q][u] = _mm512_dpbf16_ps(sum[s * rows + q][u], v, LOAD(x));
                }
            }
    UNROLLED for (int s = 0; s < outs; s++)
        UNROLLED for (int q = 0; q < rows; q++) {
            const bf16 *w = (const bf16 *)weights(p, beside(p, o, s), 0);
            const bf16 *x = (const bf16 *)row_of(p, r + q);
            __m512 whole = sum[s * rows + q][0];
            UNROLLED for (int u = 1; u < unroll; u++)
                whole = _mm512_add_ps(whole, sum[s * rows + q][u]);
            float rest = i < p->k ? rest_bf16(w + i, x + i, p->k - i) : 0;
            out[s][q] = _mm512_reduce_add_ps(whole) + rest;
        }
}
DOTS_WIDE(dot_bf16)
typedef bf16 bf16_row;
#else
DOT(bf16, bf16, widen)
typedef float bf16_row;
#endif
DOT(f32, float, same)

/* One row of x as pair_bf16 takes the weight. */
static void in_pairs(const void *x, int dtype, void *form, int64_t k) {
    const bf16 *from = x;
    float *to = form;
    int64_t i = 0;
    for (; i + PAIR <= k; i += PAIR) {
        pair v = pair_bf16(from + i);
        memcpy(to + i, &v, sizeof v);
    }
    for (; i < k; i++) to[i] = widen(from[i]);
}

static const int EMULATED = sizeof(bf16_row) == sizeof(float);

/* Most rows that a product takes; of bf16 where the CPU cannot multiply it (measured at
 * 12288 x 1536, beside the faster of the library in bf16 and in fp32: 2.7x at 8 rows, 1.3x at 16,
 * 1.03x at 24, 0.88x at 32). */
#define BF16_ROWS TOGETHER
#define EMULATED_ROWS 24
#define F32_ROWS 4

int g4ir_takes(int dtype, int64_t rows) {
    if (dtype != BF16 && dtype != F32) return 0;
    return rows >= 1 && rows <= (dtype == F32 ? F32_ROWS : EMULATED ? EMULATED_ROWS : BF16_ROWS);
}

int g4ir_linear(const void *w, const void *x, void *y, int dtype, int64_t rows, int64_t n,
                int64_t k, int threads) {
    int64_t size = dtype == BF16 ? sizeof(bf16_row) : sizeof(float);
    product p = {.w = w, .bytes = dtype == BF16 ? 512 : 1024, .stride = k, .x = x,
                 .to = dtype == BF16 && EMULATED ? in_pairs : NULL, .apart = k * size, .y = y,
                 .dtype = dtype, .rows = rows, .n = n, .k = k};
    return multiply(&p, dtype == BF16 ? dot_bf16s : dot_f32s, TOGETHER, threads);
}
