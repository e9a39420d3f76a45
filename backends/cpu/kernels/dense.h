/* GEMV of a bf16 or fp32 weight with a few rows of x, over threads. The weight is read from memory once per
 * TOGETHER rows, each part by one thread; with bf16 instructions the GEMV is memory-bandwidth bound for up to
 * five rows. Accumulates in fp32. */
#pragma once
#include "common.h"

/* ---- vectors ---- */

#ifdef __AVX512F__
#define VECTOR 64
#else
#define VECTOR 32
#endif
typedef float vector __attribute__((vector_size(VECTOR)));
typedef float any_vector __attribute__((vector_size(VECTOR), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(VECTOR)));
typedef uint32_t any_words __attribute__((vector_size(VECTOR), aligned(2), may_alias));
typedef struct {
    vector first, second;
} pair;
#define PAIR (int64_t)(sizeof(pair) / sizeof(float))

/* Converts bf16 to fp32: the even lanes (by a shift), then the odd ones (by a mask). x is permuted to match. */
static inline pair pair_bf16(const bf16 *p) {
    words u = *(const any_words *)p;
    return (pair){(vector)(u << 16), (vector)(u & 0xffff0000u)};
}

static inline pair pair_f32(const float *p) {
    const any_vector *v = (const any_vector *)p;
    return (pair){v[0], v[1]};
}

/* Converts a bf16 row of x to fp32, in the lane order of pair_bf16. */
static void in_pairs(const bf16 *from, float *to, int64_t k) {
    int64_t i = 0;
    for (; i + PAIR <= k; i += PAIR) {
        pair v = pair_bf16(from + i);
        memcpy(to + i, &v, sizeof v);
    }
    for (; i < k; i++) to[i] = widen(from[i]);
}

/* ---- the order of work ---- */

/* Maximum rows of the weight that share loads of x. */
#define SIDE 4
/* Prefetch distance in bytes, over all weight rows of a pass: some CPUs' hardware prefetchers stop at every
 * page boundary. */
#define AHEAD 8192
/* Minimum weight rows of a unit of work (the last may have fewer). */
#define PART_LEAST 32

typedef struct {
    const uint8_t *w;
    int64_t bytes; /* bytes of 256 values of the weight */
    int64_t stride; /* elements from one row of the weight to the next */
    const void *x;
    int as_pairs;  /* whether rows of x are permuted for pair_bf16 */
    int64_t apart; /* bytes from one row of x, as multiplied, to the next */
    void *y;
    int dtype;
    int64_t rows, n, k;
    int64_t beside; /* distance between weight rows of a pass */
} product;

/* Index of weight row s of the pass that starts at row o. */
static inline int64_t beside(const product *p, int64_t o, int s) { return o + s * p->beside; }

static inline const uint8_t *weights(const product *p, int64_t o, int64_t at) {
    return p->w + (o * p->stride + at) * p->bytes / 256;
}

static inline const char *row_of(const product *p, int64_t r) {
    return (const char *)p->x + r * p->apart;
}

/* Prefetches one of `outs` weight rows into L2: with a prefetch into L1, bf16 is a seventh slower for one row of x (Zen
 * 4), and a third for four. */
static inline void read_ahead(const void *now, const int outs) {
    __builtin_prefetch((const char *)now + AHEAD / outs, 0, 2);
}

/* Dot products of one weight row with up to TOGETHER rows of x. */
typedef float sums[TOGETHER];

/* Writes to `out` the dot products of the weight rows of a pass (o, o + beside, ..) with consecutive rows of x, the
 * first of which is r. */
typedef void (*dot)(const product *p, int64_t o, int64_t r, sums *out);

/* Instances for 1 to TOGETHER rows of x, and for one or `outs` weight rows, with the counts as compile-time
 * constants. Weight rows per pass, by rows of x: four, or fewer if the registers have no room for their sums. */
#define SUMS _Pragma("GCC unroll 24")
#define MOST_SUMS 24
#ifdef __AVX512F__
#define REGISTERS 24
#define SEVERAL(F, NAME)                                                                        \
    F(NAME, 4, 1) F(NAME, 4, 2) F(NAME, 4, 3) F(NAME, 4, 4) F(NAME, 4, 5) F(NAME, 4, 6)         \
    F(NAME, 3, 7) F(NAME, 3, 8)
#else
#define REGISTERS 12
#define SEVERAL(F, NAME)                                                                        \
    F(NAME, 4, 1) F(NAME, 4, 2) F(NAME, 4, 3) F(NAME, 3, 4) F(NAME, 2, 5) F(NAME, 2, 6)         \
    F(NAME, 1, 7) F(NAME, 1, 8)
#endif
#define DOT_OF(NAME, OUTS, ROWS)                                                                \
    static void NAME##_##OUTS##_of_##ROWS(const product *p, int64_t o, int64_t r, sums *out) {  \
        NAME(OUTS, ROWS, p, o, r, out);                                                         \
    }                                                                                           \
    static void NAME##_one_of_##ROWS(const product *p, int64_t o, int64_t r, sums *out) {       \
        NAME(1, ROWS, p, o, r, out);                                                            \
    }
#define DOTS_OF(NAME, OUTS, ROWS) {NAME##_one_of_##ROWS, NAME##_##OUTS##_of_##ROWS, OUTS},
typedef struct {
    dot one, several;
    int outs;
} dots;
/* Indexed by rows of x. */
#define DOTS(NAME)                                                                              \
    SEVERAL(DOT_OF, NAME)                                                                       \
    static const dots NAME##s[] = {{0}, SEVERAL(DOTS_OF, NAME)};

/* Replaces the rows of x by this thread's copy, in fp32 in the lane order of pair_bf16. Returns the copy, which the
 * caller frees; NULL if out of memory. */
static void *formed(product *p) {
    char *form = take_lines((p->rows * p->apart + LINE - 1) / LINE * LINE);
    for (int64_t r = 0; form && r < p->rows; r++)
        in_pairs((const bf16 *)p->x + r * p->k, (float *)(form + r * p->apart), p->k);
    p->x = form;
    return form;
}

/* Multiplies `outs` weight rows (o, o + beside, ..) with `here` rows of x from r on. */
static void multiply_rows(const product *p, dot of, int outs, int64_t o, int64_t r, int64_t here) {
    sums out[SIDE];
    of(p, o, r, out);
    for (int64_t i = 0; i < here; i++)
        for (int s = 0; s < outs; s++)
            store(p->y, (r + i) * p->n + beside(p, o, s), out[s][i], p->dtype);
}

/* The same for weight rows `first` to `last`, exclusive. The rows of a pass are far apart: each belongs to another
 * sequential run, which the hardware prefetcher follows. */
static void multiply_part(product p, const dots *of, int64_t first, int64_t last, int64_t r,
                          int64_t here) {
    int64_t outs = of->outs, each = (last - first) / outs;
    p.beside = each;
    for (int64_t o = first; o < first + each; o++) multiply_rows(&p, of->several, outs, o, r, here);
    for (int64_t o = first + outs * each; o < last; o++) multiply_rows(&p, of->one, 1, o, r, here);
}

typedef struct {
    const product *p;
    const dots *of;
    /* rows of x per pass; weight rows per unit of work, and units per pass */
    int64_t together, part, parts;
} multiplication;

static int multiply_units(void *context, units *left) {
    const multiplication *m = context;
    product own = *m->p;
    void *form = own.as_pairs ? formed(&own) : NULL;
    if (own.as_pairs && !form) return 1;
    for (int64_t i; (i = take_unit(left)) >= 0;) {
        int64_t r = i / m->parts * m->together, o = i % m->parts * m->part;
        int64_t here = least(m->together, own.rows - r);
        multiply_part(own, m->of + here, o, least(o + m->part, own.n), r, here);
    }
    free_lines(form);
    return 0;
}

/* y[rows, n] = x[rows, k] @ w[n, k]^T, all contiguous. Returns 0, or 1 if out of memory.
 *
 * Several weight rows share loads of x. Each thread permutes x itself: the original is less data to move
 * between cores than the permuted copy. */
static int multiply(const product *p, const dots *of, int threads) {
    int64_t turns = (p->rows + TOGETHER - 1) / TOGETHER, part = p->n / (threads * PARTS) + SIDE;
    if (part < PART_LEAST) part = PART_LEAST;
    multiplication m = {p, of, (p->rows + turns - 1) / turns, part, (p->n + part - 1) / part};
    int64_t groups = (p->rows + m.together - 1) / m.together;
    return run_region(multiply_units, &m, groups * m.parts, threads);
}

/* ---- sums ---- */

/* Dot product of the remainder after the last full vector; not inlined, since these loops were a third of the code. */
#define REST(NAME, TYPE, OTHER, WIDEN, WIDEN_OTHER)                                             \
    static __attribute__((noinline)) float rest_##NAME(const TYPE *w, const OTHER *x,           \
                                                       int64_t count) {                         \
        float rest = 0;                                                                         \
        for (int64_t j = 0; j < count; j++) rest += WIDEN(w[j]) * WIDEN_OTHER(x[j]);            \
        return rest;                                                                            \
    }

/* Rows of x are fp32; each pair of the weight is upcast once for all rows. Partial sums per weight row and row
 * of x: enough to hide the latency of the multiply-add, within the registers. */
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
    DOTS(dot_##NAME)

#ifdef __AVX512BF16__
#define LANES 32
#define LOAD(p) ((__m512bh)_mm512_loadu_si512(p))

REST(bf16, bf16, bf16, widen, widen)
/* At least four independent sums hide the latency of the multiply-add. */
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
DOTS(dot_bf16)
typedef bf16 bf16_row;
#else
DOT(bf16, bf16, widen)
typedef float bf16_row;
#endif
DOT(f32, float, same)

static const int EMULATED = sizeof(bf16_row) == sizeof(float);
