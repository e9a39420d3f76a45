/* Products of a weight [n, k] with a few rows, and attention of a few queries. The weight is read from
 * memory once for TOGETHER rows, each part by one thread; of bf16, with instructions for it, that is for
 * up to five rows about as fast as memory delivers it. Sums are fp32. */
#include "kernels.h"
#include "team.h"

#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

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
    if ((u & 0x7fffffffu) > 0x7f800000u) return (bf16)((u >> 16) | 0x40);
    return (bf16)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
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

/* ---- the order of work ---- */

#define LINE 64
/* Bytes that are read ahead of their use, of all rows of a weight that are taken together, and of the
 * scales of each: left alone, some CPUs stop reading ahead at the end of every page. */
#define AHEAD 8192
#define SCALES_AHEAD 256
/* Rows of the weight that share what is loaded of x, at most. */
#define SIDE 4
/* Rows of x that are multiplied together at most: with numbers, and with codes. */
#define TOGETHER 8
#ifdef __AVX512F__
#define CODED_TOGETHER 6
#else
#define CODED_TOGETHER 4
#endif
/* Parts of a weight for each thread: one that others hold up takes fewer; rows of a part at least. */
#define PARTS 4
#define PART_LEAST 32

/* Makes one row of k numbers the form in which a product takes it. */
typedef void to_form(const void *x, int dtype, void *form, int64_t k);

typedef struct {
    const uint8_t *w;
    int64_t bytes; /* of 256 numbers of the weight */
    int64_t stride; /* numbers from one row of it to the next */
    const void *scales;
    int scales_dtype;
    int64_t groups, each; /* scales of a row; numbers that one serves */
    const void *x;
    to_form *to;   /* what makes rows of x as they are taken of those given; NULL: they are */
    int64_t apart; /* bytes between rows of x as they are taken */
    void *y;
    int dtype;
    int64_t rows, n, k;
    int64_t beside; /* from one row of the weight to the next of those that are taken together */
} product;

/* Which row of the weight is the one with number s of those that are taken together from o on. */
static inline int64_t beside(const product *p, int64_t o, int s) { return o + s * p->beside; }

static inline const uint8_t *weights(const product *p, int64_t o, int64_t at) {
    return p->w + (o * p->stride + at) * p->bytes / 256;
}

static inline const char *scales_of(const product *p, int64_t o) {
    return (const char *)p->scales + o * p->groups * (p->scales_dtype == F32 ? 4 : 2);
}

static inline const char *row_of(const product *p, int64_t r) {
    return (const char *)p->x + r * p->apart;
}

/* Reads what lies ahead of what is taken now of one row of `outs`, into the nearest cache. */
static inline void read_ahead(const void *now, const int outs) {
    __builtin_prefetch((const char *)now + AHEAD / outs, 0, 3);
}

/* Sums of one row of the weight with up to TOGETHER rows of x. */
typedef float sums[TOGETHER];

/* Sets out to the products of rows of the weight, from o on, with rows of x, from r on. */
typedef void (*dot)(const product *p, int64_t o, int64_t r, sums *out);

/* The same function for one row of x to TOGETHER, and for one row of the weight or `outs` of them, each
 * with its numbers as constants: loops over them are unrolled, and sums stay in registers, as many as
 * a CPU has. */
#define ALWAYS static inline __attribute__((always_inline)) void
#define UNROLLED _Pragma("GCC unroll 8")
#define SUMS _Pragma("GCC unroll 24")
/* How many rows of the weight, by rows of x: as many as make so many sums at most, and four. The second
 * list is of those that are one. */
#define SEVERAL_24(F, NAME)                                                                     \
    F(NAME, 4, 1) F(NAME, 4, 2) F(NAME, 4, 3) F(NAME, 4, 4) F(NAME, 4, 5) F(NAME, 4, 6)         \
    F(NAME, 3, 7) F(NAME, 3, 8)
#define ALONE_24(F, NAME)
#define SEVERAL_12(F, NAME)                                                                     \
    F(NAME, 4, 1) F(NAME, 4, 2) F(NAME, 4, 3) F(NAME, 3, 4) F(NAME, 2, 5) F(NAME, 2, 6)
#define ALONE_12(F, NAME) F(NAME, 1, 7) F(NAME, 1, 8)
#define SEVERAL_8(F, NAME) F(NAME, 4, 1) F(NAME, 4, 2) F(NAME, 2, 3) F(NAME, 2, 4)
#define ALONE_8(F, NAME) F(NAME, 1, 5) F(NAME, 1, 6) ALONE_12(F, NAME)
#define SEVERAL_4(F, NAME) F(NAME, 4, 1) F(NAME, 2, 2)
#define ALONE_4(F, NAME) F(NAME, 1, 3) F(NAME, 1, 4) ALONE_8(F, NAME)
#define SEVERAL_1(F, NAME)
#define ALONE_1(F, NAME) F(NAME, 1, 1) F(NAME, 1, 2) ALONE_4(F, NAME)
#define MOST_SUMS 24
#define DOT_OF(NAME, OUTS, ROWS)                                                                \
    static void NAME##_##OUTS##_##ROWS(const product *p, int64_t o, int64_t r, sums *out) {     \
        NAME(OUTS, ROWS, p, o, r, out);                                                         \
    }
#define DOTS_OF(NAME, OUTS, ROWS) {NAME##_1_##ROWS, NAME##_##OUTS##_##ROWS, OUTS},
typedef struct {
    dot one, several;
    int outs;
} dots;
/* By rows of x. */
#define DOTS(NAME, MOST)                                                                        \
    ALONE_1(DOT_OF, NAME)                                                                       \
    SEVERAL_##MOST(DOT_OF, NAME)                                                                \
    static const dots NAME##s[] = {{0}, SEVERAL_##MOST(DOTS_OF, NAME) ALONE_##MOST(DOTS_OF, NAME)};

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* A thread's own rows of x in the form in which a product takes them; NULL where memory is short. */
static void *formed(product *p) {
    size_t size = p->rows * p->apart, item = p->dtype == F32 ? 4 : 2;
    char *form = aligned_alloc(LINE, (size + LINE - 1) / LINE * LINE);
    for (int64_t r = 0; form && r < p->rows; r++)
        p->to((const char *)p->x + r * p->k * item, p->dtype, form + r * p->apart, p->k);
    p->x = form;
    return form;
}

/* Products of `outs` rows of the weight, from o on, with `here` rows of x from r on. */
static void multiply_rows(const product *p, dot of, int outs, int64_t o, int64_t r, int64_t here) {
    sums out[SIDE];
    of(p, o, r, out);
    for (int64_t i = 0; i < here; i++)
        for (int s = 0; s < outs; s++)
            store(p->y, (r + i) * p->n + beside(p, o, s), out[s][i], p->dtype);
}

/* The same from row `first` to `last`. Those that are taken together lie apart, so that each is one of
 * a run of rows, which a CPU reads ahead by itself. */
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
    /* rows of x that are multiplied together; rows of the weight in a unit, and units of a turn */
    int64_t together, part, parts;
} multiplication;

static int multiply_units(void *context, units *left) {
    const multiplication *m = context;
    product own = *m->p;
    void *form = own.to ? formed(&own) : NULL;
    if (own.to && !form) return 1;
    for (int64_t i; (i = take_unit(left)) >= 0;) {
        int64_t r = i / m->parts * m->together, o = i % m->parts * m->part;
        int64_t here = least(m->together, own.rows - r);
        multiply_part(own, m->of + here, o, least(o + m->part, own.n), r, here);
    }
    free(form);
    return 0;
}

/* y[rows, n] = x[rows, k] @ w[n, k]^T, all contiguous. Returns 0, or 1 where memory is short.
 *
 * Several rows of the weight share what is loaded of x. Each thread brings x into its form itself: x
 * is less to carry from one core to another than the form. */
static int multiply(const product *p, const dots *of, int64_t most, int threads) {
    int64_t turns = (p->rows + most - 1) / most, part = p->n / (threads * PARTS) + SIDE;
    if (part < PART_LEAST) part = PART_LEAST;
    multiplication m = {p, of, (p->rows + turns - 1) / turns, part, (p->n + part - 1) / part};
    int64_t groups = (p->rows + m.together - 1) / m.together;
    return run_region(multiply_units, &m, groups * m.parts, threads);
}

/* ---- weights in floating point ---- */

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

/* Of bf16, the even numbers and then the odd ones: one instruction makes each wide. Rows of x are
 * brought into that order. */
static inline pair pair_bf16(const bf16 *p) {
    words u = *(const any_words *)p;
    return (pair){(vector)(u << 16), (vector)(u & 0xffff0000u)};
}

static inline pair pair_f32(const float *p) {
    const any_vector *v = (const any_vector *)p;
    return (pair){v[0], v[1]};
}

#ifdef __AVX512F__
#define REGISTERS 24
#define DOTS_WIDE(NAME) DOTS(NAME, 24)
#define DOTS_BLOCKS(NAME) DOTS(NAME, 12)
#else
#define REGISTERS 12
#define DOTS_WIDE(NAME) DOTS(NAME, 12)
#define DOTS_BLOCKS(NAME) DOTS(NAME, 4)
#endif

/* Rows are fp32; of the weight, a pair is made wide once for all rows. Sums of a row of the weight and
 * one of x: enough of them to hide the latency of the multiply-add, and as registers can hold. */
#define DOT(NAME, TYPE, WIDEN)                                                                  \
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
                float rest = 0;                                                                 \
                for (; j < p->k; j++) rest += WIDEN(w[j]) * x[j];                               \
                for (unsigned l = 0; l < VECTOR / sizeof(float); l++) rest += whole[l];         \
                out[s][q] = rest;                                                               \
            }                                                                                   \
    }                                                                                           \
    DOTS_WIDE(dot_##NAME)

#ifdef __AVX512BF16__
#define LANES 32
#define LOAD(p) ((__m512bh)_mm512_loadu_si512(p))

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
            float rest = 0;
            for (int64_t j = i; j < p->k; j++) rest += widen(w[j]) * widen(x[j]);
            out[s][q] = _mm512_reduce_add_ps(whole) + rest;
        }
}
DOTS(dot_bf16, 24)
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

/* ---- weights in codes (g4ir/ops/quant.py), x in fp32 ---- */

/* Codes that are read at a time, and codes that share a scale at least: a row is a multiple of the
 * one, a group of the other. */
#define BLOCK 32
#define HALF 16
/* Codes of int6 that lie together, and bytes of their parts: the low 4 bits of numbers, the upper 2,
 * the integers of half blocks. */
#define SIXES 128
enum { SIXES_HIGH = 64, SIXES_SHARED = 96, SIXES_BYTES = 104 };
/* The same of forms with minima: the low 4 bits, of uint5 the upper one, the integers of blocks. */
#define ABOVE 256
enum { ABOVE_HIGH = 128, ABOVE_uint4 = 140, ABOVE_uint5 = 172 };

typedef uint8_t half_block __attribute__((vector_size(HALF)));
typedef uint32_t half_words __attribute__((vector_size(HALF)));

/* Sixteen bytes hold the even codes of a block of 4-bit codes and the odd ones; x is brought into
 * that order too. The bits of e4m3 are those of a half 2^8 times smaller. */
#ifdef __AVX512BW__
typedef struct {
    __m512 first, second;
} block;

static inline block read_int8(const uint8_t *w, int64_t i) {
    const uint8_t *p = w + i;
    __m512i a = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
    __m512i b = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p + 16)));
    return (block){_mm512_cvtepi32_ps(a), _mm512_cvtepi32_ps(b)};
}

static inline block read_int4(const uint8_t *w, int64_t i) {
    __m512i c = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(w + (i >> 1))));
    __m512 t = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    __m512 odd = _mm512_permutexvar_ps(_mm512_srli_epi32(c, 4), t);
    return (block){_mm512_permutexvar_ps(c, t), odd};
}

static inline block read_fp8(const uint8_t *w, int64_t i) {
    __m512i c = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(w + i)));
    c = _mm512_and_si512(_mm512_slli_epi16(c, 7), _mm512_set1_epi16((short)0xbfff));
    __m256i second = _mm512_extracti64x4_epi64(c, 1);
    return (block){_mm512_cvtph_ps(_mm512_castsi512_si256(c)), _mm512_cvtph_ps(second)};
}

#define ZERO ((block){_mm512_setzero_ps(), _mm512_setzero_ps()})

static inline block halves_times(block v, float s, float t) {
    return (block){_mm512_mul_ps(v.first, _mm512_set1_ps(s)),
                   _mm512_mul_ps(v.second, _mm512_set1_ps(t))};
}

static inline block above_least(block v, float s, float least) {
    __m512 scale = _mm512_set1_ps(s), below = _mm512_set1_ps(least);
    return (block){_mm512_fmsub_ps(v.first, scale, below), _mm512_fmsub_ps(v.second, scale, below)};
}

/* The sums change places: the next addition does not wait for this one. */
static inline block add_scaled(block sum, block v, const float *x, float s) {
    __m512 part = _mm512_mul_ps(v.first, _mm512_loadu_ps(x));
    part = _mm512_fmadd_ps(v.second, _mm512_loadu_ps(x + HALF), part);
    return (block){sum.second, _mm512_fmadd_ps(part, _mm512_set1_ps(s), sum.first)};
}

static inline block add_halves(block sum, block v, const float *x, float s, float t) {
    __m512 first = _mm512_mul_ps(v.first, _mm512_loadu_ps(x));
    __m512 second = _mm512_mul_ps(v.second, _mm512_loadu_ps(x + HALF));
    return (block){_mm512_fmadd_ps(first, _mm512_set1_ps(s), sum.first),
                   _mm512_fmadd_ps(second, _mm512_set1_ps(t), sum.second)};
}

static inline block add(block sum, block v, const float *x) {
    __m512 first = _mm512_fmadd_ps(v.first, _mm512_loadu_ps(x), sum.first);
    return (block){first, _mm512_fmadd_ps(v.second, _mm512_loadu_ps(x + HALF), sum.second)};
}

static inline float total(block sum) {
    return _mm512_reduce_add_ps(_mm512_add_ps(sum.first, sum.second));
}
#else
/* Of a block, so many vectors. */
#define VECTORS (BLOCK * 4 / VECTOR)
#define EACH UNROLLED for (int i = 0; i < VECTORS; i++)
typedef struct {
    vector at[VECTORS];
} block;
typedef int32_t ints __attribute__((vector_size(VECTOR)));
typedef int8_t quarter __attribute__((vector_size(VECTOR / 4)));

#define ZERO ((block){{{0}}})

static inline ints wide(const void *p) {
#ifdef __AVX2__ /* compilers do not find it */
    return (ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
#endif
    quarter v;
    memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, ints);
}

static inline block read_int8(const uint8_t *w, int64_t at) {
    block v;
    EACH v.at[i] = __builtin_convertvector(wide(w + at + i * VECTOR / 4), vector);
    return v;
}

static inline block read_int4(const uint8_t *w, int64_t i) {
    half_block codes[2];
    memcpy(codes, w + (i >> 1), HALF);
    codes[1] = (codes[0] >> 4) - 8;
    codes[0] = (codes[0] & 15) - 8;
    return read_int8((const uint8_t *)codes, 0);
}

/* 2^8 times smaller, as DECODE and others expect it. Below 2^-6 a number of e4m3 has no leading bit: it
 * is read with one, which is then subtracted. */
static inline block read_fp8(const uint8_t *w, int64_t at) {
    block v;
    EACH {
        ints c = wide(w + at + i * VECTOR / 4), size = (c & 0x7f) << 20, small = size < 1 << 23;
        ints one = (ints){0} + (113 << 23);
        vector low = (vector)(size + one) - (vector)one, high = (vector)(size + (112 << 23));
        v.at[i] = (vector)((((ints)low & small) | ((ints)high & ~small)) | (c & INT32_MIN));
    }
    return v;
}

static inline block halves_times(block v, float s, float t) {
    EACH v.at[i] *= i < VECTORS / 2 ? s : t;
    return v;
}

static inline block above_least(block v, float s, float least) {
    EACH v.at[i] = v.at[i] * s - least;
    return v;
}

/* The sums change places: the next addition does not wait for this one. */
static inline block add_scaled(block sum, block w, const float *x, float s) {
    const any_vector *y = (const any_vector *)x;
    vector part = w.at[0] * y[0];
    UNROLLED for (int i = 1; i < VECTORS; i++) part += w.at[i] * y[i];
    vector last = sum.at[0] + part * s;
    UNROLLED for (int i = 1; i < VECTORS; i++) sum.at[i - 1] = sum.at[i];
    sum.at[VECTORS - 1] = last;
    return sum;
}

static inline block add_halves(block sum, block w, const float *x, float s, float t) {
    const any_vector *y = (const any_vector *)x;
    EACH sum.at[i] += w.at[i] * y[i] * (i < VECTORS / 2 ? s : t);
    return sum;
}

static inline block add(block sum, block w, const float *x) {
    const any_vector *y = (const any_vector *)x;
    EACH sum.at[i] += w.at[i] * y[i];
    return sum;
}

static inline float total(block sum) {
    vector all = sum.at[0];
    UNROLLED for (int i = 1; i < VECTORS; i++) all += sum.at[i];
    float one = 0;
    for (unsigned l = 0; l < VECTOR / sizeof(float); l++) one += all[l];
    return one;
}
#endif

typedef uint32_t block_words __attribute__((vector_size(BLOCK)));
typedef uint8_t block_bytes __attribute__((vector_size(BLOCK)));

/* Codes of int6 are numbers times the integer of their half block. */
static inline block read_int6(const uint8_t *w, int64_t i) {
    const uint8_t *p = w + i / SIXES * SIXES_BYTES;
    int b = i % SIXES / BLOCK;
    const int8_t *shared = (const int8_t *)p + SIXES_SHARED + 2 * b;
    block_words low, high;
    memcpy(&low, p + b % 2 * BLOCK, BLOCK);
    memcpy(&high, p + SIXES_HIGH, BLOCK);
    low = low >> b / 2 * 4 & 0x0f0f0f0f;
    high = (high >> b * 2 & 0x03030303) << 4;
    block_bytes numbers = (block_bytes)(low | high) - 32;
    return halves_times(read_int8((const uint8_t *)&numbers, 0), shared[0], shared[1]);
}

/* The even numbers and then the odd ones of a block with a minimum. `high`, a constant here and below,
 * says whether there is an upper bit. */
static inline void numbers_above(const int high, const uint8_t *p, int b, half_block *to) {
    half_words low, upper;
    memcpy(&low, p + b * HALF, HALF);
    half_words even = low & 0x0f0f0f0f, odd = low >> 4 & 0x0f0f0f0f;
    if (high) {
        memcpy(&upper, p + ABOVE_HIGH + b % 2 * HALF, HALF);
        upper >>= b / 2 * 2;
        even |= (upper & 0x01010101) << 4;
        odd |= (upper >> 1 & 0x01010101) << 4;
    }
    to[0] = (half_block)even, to[1] = (half_block)odd;
}

/* The integers of eight blocks, or those of their minima, a byte each. */
static inline uint64_t integers_above(const uint8_t *six, const int least) {
    uint32_t first, last;
    memcpy(&first, six + 4 * least, sizeof first);
    memcpy(&last, six + 8, sizeof last);
    last = (last >> 4 * least & 0x0f0f0f0f) | (first >> 2 & 0x30303030);
    return (uint64_t)last << 32 | (first & 0x3f3f3f3f);
}

static inline float integer_of(uint64_t bytes, int b) { return bytes >> 8 * b & 63; }

/* Codes in the order in which they are meant. */
#define ordered_int8 read_int8
#define ordered_int6 read_int6
#define ordered_fp8 read_fp8

static inline block ordered(const half_block *halves) {
    uint8_t codes[BLOCK];
#ifdef __AVX2__
    __m128i even = (__m128i)halves[0], odd = (__m128i)halves[1];
    _mm_storeu_si128((__m128i *)codes, _mm_unpacklo_epi8(even, odd));
    _mm_storeu_si128((__m128i *)(codes + HALF), _mm_unpackhi_epi8(even, odd));
#else
    for (int j = 0; j < HALF; j++) codes[2 * j] = halves[0][j], codes[2 * j + 1] = halves[1][j];
#endif
    return read_int8(codes, 0);
}

static inline block ordered_int4(const uint8_t *w, int64_t i) {
    half_block codes[2];
    memcpy(codes, w + (i >> 1), HALF);
    codes[1] = (codes[0] >> 4) - 8;
    codes[0] = (codes[0] & 15) - 8;
    return ordered(codes);
}

/* Rows of x as the blocks of codes lie. */
static inline void as_codes_int8(float *v) {}
static inline void as_codes_int6(float *v) {}
static inline void as_codes_fp8(float *v) {}

static inline void as_codes_int4(float *v) {
    float w[BLOCK];
    memcpy(w, v, sizeof w);
    for (int j = 0; j < HALF; j++) v[j] = w[2 * j], v[HALF + j] = w[2 * j + 1];
}
#define as_codes_uint4 as_codes_int4
#define as_codes_uint5 as_codes_int4

/* `each` codes in a row share a scale. */
#define DOT_CODED(NAME, BYTES, UNIT)                                                            \
    ALWAYS rowwise_##NAME(const int outs, const int rows, const product *p, int64_t o,          \
                          int64_t r, sums *out) {                                               \
        block sum[MOST_SUMS];                                                                   \
        SUMS for (int b = 0; b < outs * rows; b++) sum[b] = ZERO;                               \
        for (int64_t i = 0; i < p->k; i += BLOCK)                                               \
            UNROLLED for (int s = 0; s < outs; s++) {                                           \
                const uint8_t *w = weights(p, beside(p, o, s), 0);                              \
                read_ahead(w + i * BYTES / BLOCK, outs);                                        \
                block v = read_##NAME(w, i);                                                    \
                UNROLLED for (int q = 0; q < rows; q++) {                                       \
                    const float *x = (const float *)row_of(p, r + q) + i;                       \
                    sum[s * rows + q] = add(sum[s * rows + q], v, x);                           \
                }                                                                               \
            }                                                                                   \
        UNROLLED for (int s = 0; s < outs; s++) {                                               \
            float scale = load(scales_of(p, beside(p, o, s)), 0, p->scales_dtype) * UNIT;       \
            UNROLLED for (int q = 0; q < rows; q++)                                             \
                out[s][q] = total(sum[s * rows + q]) * scale;                                   \
        }                                                                                       \
    }                                                                                           \
    ALWAYS groupwise_##NAME(const int outs, const int rows, const product *p, int64_t o,        \
                            int64_t r, sums *out) {                                             \
        const uint8_t *w = weights(p, o, 0);                                                    \
        const char *scales = scales_of(p, o);                                                   \
        block sum[TOGETHER];                                                                    \
        UNROLLED for (int b = 0; b < rows; b++) sum[b] = ZERO;                                  \
        int64_t g = 0, left = p->each;                                                          \
        float s = load(scales, g, p->scales_dtype) * UNIT;                                      \
        for (int64_t i = 0; i < p->k; i += BLOCK) {                                             \
            read_ahead(w + i * BYTES / BLOCK, 1);                                               \
            block v = read_##NAME(w, i);                                                        \
            if (!left) s = load(scales, ++g, p->scales_dtype) * UNIT, left = p->each;           \
            float t = s;                                                                        \
            if (left == HALF) t = load(scales, ++g, p->scales_dtype) * UNIT, left += p->each;   \
            UNROLLED for (int q = 0; q < rows; q++) {                                           \
                const float *x = (const float *)row_of(p, r + q) + i;                           \
                sum[q] = s == t ? add_scaled(sum[q], v, x, s) : add_halves(sum[q], v, x, s, t); \
            }                                                                                   \
            left -= BLOCK, s = t;                                                               \
        }                                                                                       \
        UNROLLED for (int q = 0; q < rows; q++) out[0][q] = total(sum[q]);                      \
    }                                                                                           \
    DOTS_BLOCKS(rowwise_##NAME)                                                                 \
    DOTS(groupwise_##NAME, 1)

DOT_CODED(int8, 32, 1)
DOT_CODED(int6, 26, 1)
DOT_CODED(int4, 16, 1)
DOT_CODED(fp8, 32, 0x1p8f)

/* Scales lie beside minima. */
ALWAYS groupwise_above(const int rows, const int high, const product *p, int64_t o, int64_t r,
                       sums *out) {
    const int size = high ? ABOVE_uint5 : ABOVE_uint4;
    const uint8_t *w = weights(p, o, 0);
    const char *scales = scales_of(p, o);
    block sum[TOGETHER];
    UNROLLED for (int b = 0; b < rows; b++) sum[b] = ZERO;
    for (int64_t i = 0; i < p->k; i += ABOVE, w += size) {
        float s = load(scales, i / p->each * 2, p->scales_dtype);
        float least = load(scales, i / p->each * 2 + 1, p->scales_dtype);
        uint64_t scale = integers_above(w + size - 12, 0), below = integers_above(w + size - 12, 1);
        for (int b = 0; b < 8; b++) {
            read_ahead(w + b * size / 8, 1);
            half_block codes[2];
            numbers_above(high, w, b, codes);
            block v = read_int8((const uint8_t *)codes, 0);
            v = above_least(v, s * integer_of(scale, b), least * integer_of(below, b));
            UNROLLED for (int q = 0; q < rows; q++)
                sum[q] = add(sum[q], v, (const float *)row_of(p, r + q) + i + b * BLOCK);
        }
    }
    UNROLLED for (int q = 0; q < rows; q++) out[0][q] = total(sum[q]);
}
#define DOT_ABOVE(NAME, HIGH)                                                                   \
    ALWAYS groupwise_##NAME(const int outs, const int rows, const product *p, int64_t o,        \
                            int64_t r, sums *out) {                                             \
        groupwise_above(rows, HIGH, p, o, r, out);                                              \
    }                                                                                           \
    DOTS(groupwise_##NAME, 1)

DOT_ABOVE(uint4, 0)
DOT_ABOVE(uint5, 1)
/* Scales of a row are two at least. */
#define rowwise_uint4s groupwise_uint4s
#define rowwise_uint5s groupwise_uint5s

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define WIDE 64
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define WIDE 32
#endif

#ifdef WIDE
/* ---- weights in codes, x in integers ---- */

/* 4-bit codes times bf16 rows without floating point: x as 16-bit integers times a power of two for
 * each block, exact where a number is at least 1/128 of the block's largest; below, as near as for
 * 1/128. An x of bytes `high` and `low` is 256 high + low. A vector of codes is a chunk. */
#define CHUNK (2 * WIDE)
#define BLOCKS (CHUNK / BLOCK)
typedef uint8_t unsigned_bytes __attribute__((vector_size(WIDE)));
typedef uint8_t any_bytes __attribute__((vector_size(WIDE), aligned(1), may_alias));
typedef int8_t signed_bytes __attribute__((vector_size(WIDE)));
typedef int32_t sums_of_four __attribute__((vector_size(WIDE)));
typedef float lanes __attribute__((vector_size(WIDE)));

typedef struct {
    signed_bytes even_high, odd_high, even_low, odd_low;
    union {
        sums_of_four less; /* -8 times the sum over each lane: codes are stored as code + 8 */
        lanes below; /* -1 times the sum over each of eight blocks, in the last lanes: for minima */
    };
    lanes unit; /* of each block */
} fixed;

/* Adds the products of bytes, four to a lane. */
static inline sums_of_four add_bytes(sums_of_four sum, unsigned_bytes a, signed_bytes x,
                                     unsigned_bytes b, signed_bytes y) {
#if WIDE == 64
    __m512i first = _mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)x);
    return (sums_of_four)_mm512_dpbusd_epi32(first, (__m512i)b, (__m512i)y);
#else /* of codes below 32, whose sums have room in 16 bits */
    __m256i first = _mm256_maddubs_epi16((__m256i)a, (__m256i)x);
    __m256i both = _mm256_add_epi16(first, _mm256_maddubs_epi16((__m256i)b, (__m256i)y));
    return sum + (sums_of_four)_mm256_madd_epi16(both, _mm256_set1_epi16(1));
#endif
}

/* The same of one vector: of codes below 64 with AVX2. */
static inline sums_of_four add_line_of_bytes(sums_of_four sum, unsigned_bytes a, signed_bytes x) {
#if WIDE == 64
    return (sums_of_four)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)x);
#else
    __m256i both = _mm256_maddubs_epi16((__m256i)a, (__m256i)x);
    return sum + (sums_of_four)_mm256_madd_epi16(both, _mm256_set1_epi16(1));
#endif
}

/* a * b + sum: compilers split it where they take that for faster. */
static inline lanes multiply_add(lanes a, lanes b, lanes sum) {
#if WIDE == 64
    return _mm512_fmadd_ps(a, b, sum);
#else
    return _mm256_fmadd_ps(a, b, sum);
#endif
}

/* Numbers of blocks, each for the lanes of its block. */
static inline lanes in_lanes(__m128 each) {
#if WIDE == 64
    __m512i lane = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return _mm512_permutexvar_ps(lane, _mm512_castps128_ps512(each));
#else
    __m256i lane = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
    return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(each), lane);
#endif
}

/* What takes numbers of an exponent to integers of `bits` bits, and the unit of these: NaN where one
 * is no finite number, 0 where all are too small. */
static inline float scaled_to(int bits, uint32_t exponent, int bad, float *unit) {
    int zero = (int)exponent < bits;
    uint32_t inverse = zero || bad ? 0 : (253 + bits - exponent) << 23;
    uint32_t u = bad ? 0x7fc00000u : zero ? 0 : (exponent - bits + 1) << 23;
    float times;
    memcpy(&times, &inverse, 4);
    memcpy(unit, &u, 4);
    return times;
}

/* One block of x as integers times `unit`; that is NaN where one of it is no finite number. `parts`, a
 * constant here and below, is 2, or 1 for x as fake_quantize has it: then a number is `high`. */
typedef struct {
    int8_t high[BLOCK], low[BLOCK]; /* a number is 256 high + low */
    float unit;
} integers;

static inline integers block_to_integers(const int parts, const bf16 *x) {
    integers out = {{0}};
    uint16_t top = 0;
    for (int j = 0; j < BLOCK; j++) {
        uint16_t size = x[j] & 0x7fff;
        top = size > top ? size : top;
    }
    /* the largest number is below 2^15 units, and rounds to 255 * 2^7 + 127 at most */
    uint32_t exponent = (top >> 7) + ((top & 0x7f) == 0x7f);
    int bad = top >= 0x7f80;
    float times = scaled_to(15, exponent, bad, &out.unit);
    if (bad) return out;
    if (parts == 1) out.unit = top ? widen(top) / 127 : 1;
    for (int j = 0; j < BLOCK; j++) {
        float v = widen(x[j]);
        int32_t all = (int32_t)rintf(parts == 1 ? v / out.unit : v * times);
        int32_t high = parts == 1 ? all : (all + 128) >> 8;
        out.high[j] = (int8_t)high;
        out.low[j] = (int8_t)(all - high * 256);
    }
    return out;
}

/* A sum of products with `high` and one with `low`. */
static inline sums_of_four joined(const int parts, sums_of_four high, sums_of_four low) {
    return parts == 1 ? high : (high << 8) + low;
}

ALWAYS in_chunks(const int parts, const int above, const bf16 *x, fixed *to, int64_t k) {
    for (int64_t i = 0; i < k; i += CHUNK, to++) {
        memset(to, 0, sizeof *to);
        float unit[4] = {0};
        for (int b = 0; b < BLOCKS && i + b * BLOCK < k; b++) {
            integers v = block_to_integers(parts, x + i + b * BLOCK);
            for (int j = 0; j < HALF; j++) {
                to->even_high[b * HALF + j] = v.high[2 * j];
                to->odd_high[b * HALF + j] = v.high[2 * j + 1];
                to->even_low[b * HALF + j] = v.low[2 * j];
                to->odd_low[b * HALF + j] = v.low[2 * j + 1];
            }
            unit[b] = v.unit;
        }
        to->unit = in_lanes(_mm_loadu_ps(unit));
        unsigned_bytes one = (unsigned_bytes){0} + 1;
        sums_of_four zero = {0};
        sums_of_four high = add_bytes(zero, one, to->even_high, one, to->odd_high);
        sums_of_four low = add_bytes(zero, one, to->even_low, one, to->odd_low);
        sums_of_four all = joined(parts, high, low);
        int64_t nth = i % ABOVE / BLOCK;
        for (int l = 0; above && l < WIDE / 4; l++)
            to[-nth / BLOCKS].below[WIDE / 4 - 8 + nth + l / 4] -= all[l] * unit[l / 4];
        if (!above) to->less = all * -8;
    }
}

static void to_fixed(const void *x, int dtype, void *form, int64_t k) {
    in_chunks(2, 0, x, form, k);
}
static void to_fixed_above(const void *x, int dtype, void *form, int64_t k) {
    in_chunks(2, 1, x, form, k);
}

/* Scales of `count` runs of codes, of `size` each, from one on. */
static __attribute__((noinline)) __m128 some_scales(const void *scales, int64_t at, int64_t each,
                                                    int dtype, int64_t size, int64_t count) {
    float s[4] = {0};
    for (int b = 0; b < count; b++) s[b] = load(scales, (at + b * size) / each, dtype);
    return _mm_loadu_ps(s);
}

/* The same of a whole chunk, for scales of 16 bits and groups of one block, in lanes. */
static inline lanes chunk_scales(const char *scales, int64_t at, int dtype) {
    uint64_t bits = 0;
    memcpy(&bits, scales + at / (BLOCK / 2), 2 * BLOCKS);
    if (dtype == F16) return in_lanes(_mm_cvtph_ps(_mm_cvtsi64_si128((int64_t)bits)));
#if WIDE == 64 /* the upper half of a float is the bf16, each in four lanes */
    __m128i order = _mm_setr_epi32(0x0100ffff, 0x0302ffff, 0x0504ffff, 0x0706ffff);
    __m512i lane = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    __m512i bytes = _mm512_permutexvar_epi32(lane, _mm512_castsi128_si512(order));
    return (lanes)_mm512_shuffle_epi8(_mm512_set1_epi64((int64_t)bits), bytes);
#else
    __m128i u = _mm_cvtepu16_epi32(_mm_cvtsi64_si128((int64_t)bits));
    return in_lanes(_mm_castsi128_ps(_mm_slli_epi32(u, 16)));
#endif
}

/* Reads a line of scales ahead, of two bytes for each block, where numbers from i on begin one. */
static inline void scales_ahead(const char *scales, int64_t i) {
    if (i % (LINE / 2 * BLOCK) == 0) __builtin_prefetch(scales + i / BLOCK * 2 + SCALES_AHEAD, 0, 3);
}

/* Adds the products of a chunk of codes; `above`, a constant: those with minima. */
ALWAYS add_chunk(const int rows, const int parts, const int above, unsigned_bytes even,
                 unsigned_bytes odd, lanes scale, const fixed *const *x, int64_t chunk,
                 lanes *sum) {
    UNROLLED for (int q = 0; q < rows; q++) {
        const fixed *f = x[q] + chunk;
        sums_of_four zero = {0}, less = above ? zero : f->less, first = parts == 1 ? less : zero;
        sums_of_four all = add_bytes(first, even, f->even_high, odd, f->odd_high);
        if (parts == 2) all = add_bytes((all << 8) + less, even, f->even_low, odd, f->odd_low);
        lanes part = __builtin_convertvector(all, lanes);
        sum[q] = multiply_add(part, scale * f->unit, sum[q]);
    }
}

/* Adds the products of numbers at .. end. `all` is the dtype where all chunks are whole and have
 * scales of 16 bits, or F32: a constant too. */
ALWAYS fixed_chunks(const int outs, const int rows, const int parts, const int all,
                    const product *p, int64_t o, int64_t at, int64_t end, int64_t r, lanes *sum) {
    const uint8_t *w[SIDE];
    const char *scales[SIDE];
    const fixed *x[TOGETHER];
    UNROLLED for (int s = 0; s < outs; s++)
        w[s] = weights(p, beside(p, o, s), 0), scales[s] = scales_of(p, beside(p, o, s));
    UNROLLED for (int q = 0; q < rows; q++) x[q] = (const fixed *)row_of(p, r + q);
    for (int64_t i = at; i < end; i += CHUNK) {
        int64_t blocks = least(end - i, CHUNK) / BLOCK;
        UNROLLED for (int s = 0; s < outs; s++) {
            read_ahead(w[s] + i / 2, outs);
            if (all != F32) scales_ahead(scales[s], i);
            unsigned_bytes codes = {0};
            if (all == F32)
                memcpy(&codes, w[s] + i / 2, blocks * HALF);
            else
                codes = *(const any_bytes *)(w[s] + i / 2);
            unsigned_bytes even = codes & 15, odd = codes >> 4;
            lanes scale = all == F32 ? in_lanes(some_scales(scales[s], i, p->each, p->scales_dtype,
                                                            BLOCK, blocks))
                                     : chunk_scales(scales[s], i, all);
            add_chunk(rows, parts, 0, even, odd, scale, x, i / CHUNK, sum + s * rows);
        }
    }
}

ALWAYS add_lanes(const int outs, const int rows, const lanes *sum, sums *out) {
    SUMS for (int b = 0; b < outs * rows; b++) {
        float all = 0;
        for (int l = 0; l < WIDE / 4; l++) all += sum[b][l];
        out[b / rows][b % rows] = all;
    }
}

ALWAYS parts_int4(const int outs, const int rows, const int parts, const product *p, int64_t o,
                  int64_t r, sums *out) {
    lanes sum[MOST_SUMS];
    SUMS for (int b = 0; b < outs * rows; b++) sum[b] = (lanes){0};
    int64_t full = p->each == BLOCK ? p->k - p->k % CHUNK : 0;
    if (p->scales_dtype == BF16)
        fixed_chunks(outs, rows, parts, BF16, p, o, 0, full, r, sum);
    else if (p->scales_dtype == F16)
        fixed_chunks(outs, rows, parts, F16, p, o, 0, full, r, sum);
    else
        full = 0;
    fixed_chunks(outs, rows, parts, F32, p, o, full, p->k, r, sum);
    add_lanes(outs, rows, sum, out);
}

#if WIDE == 64
#define DOTS_PARTS(NAME) DOTS(NAME, 12)
#else
#define DOTS_PARTS(NAME) DOTS(NAME, 4)
#endif
#define IN_PARTS(NAME, PARTS, FORM)                                                             \
    ALWAYS NAME##_##FORM(const int outs, const int rows, const product *p, int64_t o,           \
                         int64_t r, sums *out) {                                                \
        parts_##FORM(outs, rows, PARTS, p, o, r, out);                                          \
    }                                                                                           \
    DOTS_PARTS(NAME##_##FORM)

IN_PARTS(fixed, 2, int4)

/* Scales of eight blocks, and of their minima. */
typedef struct {
    lanes scale, least; /* in the first lanes; in the last ones */
} factors;

/* A scale and its minimum. */
static inline __m128 pair_of(const char *scales, int64_t at, int dtype) {
    if (dtype == F32) return _mm_castsi128_ps(_mm_loadl_epi64((const __m128i *)(scales + 4 * at)));
    uint32_t two;
    memcpy(&two, scales + 2 * at, sizeof two);
    __m128i u = _mm_cvtsi32_si128((int)two);
    if (dtype == F16) return _mm_cvtph_ps(u);
    return _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(u), 16));
}

/* The integers as integers_above has them, in the order of their blocks, times the pair. */
static inline factors factors_of(const uint8_t *six, __m128 pair) {
    __m128i all = _mm_loadu_si128((const __m128i *)(six - 4)), low = _mm_set1_epi8(15);
    __m128i first = _mm_srli_si128(all, 4), last = _mm_srli_si128(all, 12);
    last = _mm_unpacklo_epi32(last, _mm_srli_epi32(last, 4));
    __m128i upper = _mm_and_si128(_mm_srli_epi32(first, 2), _mm_set1_epi8(0x30));
    upper = _mm_or_si128(upper, _mm_and_si128(last, low));
    __m128i bytes = _mm_unpacklo_epi32(_mm_and_si128(first, _mm_set1_epi8(63)), upper);
#if WIDE == 64
    __m512i lane = _mm512_inserti64x4(_mm512_set1_epi32(1), _mm256_setzero_si256(), 0);
    __m512 times = _mm512_permutexvar_ps(lane, _mm512_castps128_ps512(pair));
    __m512 both = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)), times);
    return (factors){both, both};
#else
    __m256 scale = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
    __m256 least = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)));
    return (factors){scale * _mm256_broadcastss_ps(pair),
                     least * _mm256_broadcastss_ps(_mm_movehdup_ps(pair))};
#endif
}

/* Of the first eight lanes, those from one on that a vector of codes needs, each four times. */
static inline lanes four_times(lanes eight, int first) {
#if WIDE == 64
    __m512i lane = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return _mm512_permutexvar_ps(_mm512_add_epi32(lane, _mm512_set1_epi32(first)), eight);
#else
    __m256i lane = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
    return _mm256_permutevar8x32_ps(eight, _mm256_add_epi32(lane, _mm256_set1_epi32(first)));
#endif
}

/* Upper bits of the even codes of a chunk, or of the odd ones, as 16. */
static inline unsigned_bytes upper_bits(const uint8_t *p, int chunk, const int odd) {
#if WIDE == 64 /* each bit is turned to its place */
    __m512i all = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(p + ABOVE_HIGH)));
    __m512i turns = _mm512_inserti64x4(_mm512_set1_epi32((34 - odd - 4 * chunk) & 31),
                                       _mm256_set1_epi32((36 - odd - 4 * chunk) & 31), 0);
    return (unsigned_bytes)_mm512_rolv_epi32(all, turns) & 16;
#else
    __m256i all = _mm256_loadu_si256((const __m256i *)(p + ABOVE_HIGH));
    __m256i bits = _mm256_srl_epi16(all, _mm_cvtsi32_si128(2 * chunk + odd));
    return (unsigned_bytes)_mm256_slli_epi16(_mm256_and_si256(bits, _mm256_set1_epi8(1)), 4);
#endif
}

/* Codes with minima. */
ALWAYS parts_above(const int outs, const int rows, const int parts, const int high,
                   const product *p, int64_t o, int64_t r, sums *out) {
    const int size = high ? ABOVE_uint5 : ABOVE_uint4;
    lanes sum[MOST_SUMS];
    SUMS for (int b = 0; b < outs * rows; b++) sum[b] = (lanes){0};
    const fixed *x[TOGETHER];
    UNROLLED for (int q = 0; q < rows; q++) x[q] = (const fixed *)row_of(p, r + q);
    const uint8_t *w = weights(p, o, 0);
    int64_t row = p->beside * p->k * p->bytes / 256, i = 0;
    for (int64_t g = 0; g < p->groups; g += 2)
        for (int64_t end = i + p->each; i < end; i += ABOVE, w += size) {
            factors f[SIDE];
            UNROLLED for (int s = 0; s < outs; s++) {
                UNROLLED for (int l = 0; l < 3; l++) read_ahead(w + s * row + l * LINE, outs);
                __m128 pair = pair_of(scales_of(p, beside(p, o, s)), g, p->scales_dtype);
                f[s] = factors_of(w + s * row + size - 12, pair);
                UNROLLED for (int q = 0; q < rows; q++) {
                    const int b = s * rows + q;
                    sum[b] = multiply_add(f[s].least, x[q][i / CHUNK].below, sum[b]);
                }
            }
            UNROLLED for (int c = 0; c < ABOVE / CHUNK; c++)
                UNROLLED for (int s = 0; s < outs; s++) {
                    const uint8_t *at = w + s * row;
                    unsigned_bytes codes = *(const any_bytes *)(at + c * WIDE);
                    unsigned_bytes even = codes & 15, odd = codes >> 4;
                    if (high) even |= upper_bits(at, c, 0), odd |= upper_bits(at, c, 1);
                    add_chunk(rows, parts, 1, even, odd, four_times(f[s].scale, c * BLOCKS), x,
                              i / CHUNK + c, sum + s * rows);
                }
        }
    add_lanes(outs, rows, sum, out);
}
#define PARTS_ABOVE(FORM, HIGH)                                                                 \
    ALWAYS parts_##FORM(const int outs, const int rows, const int parts, const product *p,      \
                        int64_t o, int64_t r, sums *out) {                                      \
        parts_above(outs, rows, parts, HIGH, p, o, r, out);                                     \
    }
PARTS_ABOVE(uint4, 0)
PARTS_ABOVE(uint5, 1)
IN_PARTS(fixed, 2, uint4)
IN_PARTS(fixed, 2, uint5)

/* Codes of a byte whose groups have scales: x as for 4-bit codes, a vector of codes at a time. */
typedef struct {
    signed_bytes high, low;
    sums_of_four less; /* -BIAS times the sum over each lane: codes are taken as code + BIAS */
    lanes unit;        /* of each block */
} fixed_line;

enum { BIAS_int8 = 128, BIAS_int6 = 32 };

ALWAYS in_lines(const int parts, const int bias, const bf16 *x, fixed_line *to, int64_t k) {
    for (int64_t i = 0; i < k; i += WIDE, to++) {
        memset(to, 0, sizeof *to);
        float unit[4] = {0};
        for (int b = 0; b < WIDE / BLOCK && i + b * BLOCK < k; b++) {
            integers v = block_to_integers(parts, x + i + b * BLOCK);
            memcpy((char *)&to->high + b * BLOCK, v.high, BLOCK);
            memcpy((char *)&to->low + b * BLOCK, v.low, BLOCK);
            unit[b * 2] = unit[b * 2 + 1] = v.unit;
        }
        unsigned_bytes one = (unsigned_bytes){0} + 1;
        sums_of_four zero = {0}, high = add_line_of_bytes(zero, one, to->high);
        to->less = joined(parts, high, add_line_of_bytes(zero, one, to->low)) * -bias;
        to->unit = in_lanes(_mm_loadu_ps(unit));
    }
}

#define LINES_OF(NAME, PARTS, FORM)                                                             \
    static void to_##NAME##_##FORM(const void *x, int dtype, void *form, int64_t k) {           \
        in_lines(PARTS, BIAS_##FORM, x, form, k);                                               \
    }
LINES_OF(fixed, 2, int6)

/* Adds the products of a line of codes + BIAS, with the scales of its half blocks in lanes. */
ALWAYS add_line(const int rows, const int parts, unsigned_bytes codes, lanes scale,
                const fixed_line *const *x, int64_t line, lanes *sum) {
    UNROLLED for (int q = 0; q < rows; q++) {
        const fixed_line *f = x[q] + line;
        sums_of_four zero = {0}, first = parts == 1 ? f->less : zero;
        sums_of_four high = add_line_of_bytes(first, codes, f->high);
        sums_of_four low = add_line_of_bytes(f->less, codes, f->low);
        lanes part = __builtin_convertvector(joined(parts, high, low), lanes);
        sum[q] = multiply_add(part, scale * f->unit, sum[q]);
    }
}

/* A vector of the numbers + 32 that lie together in int6. */
static inline unsigned_bytes sixes(const uint8_t *p, const int nth) {
#if WIDE == 64 /* each upper part is turned to its place */
    __m512i low = _mm512_loadu_si512(p);
    __m256i upper = _mm256_loadu_si256((const __m256i *)(p + SIXES_HIGH));
    __m512i turns = _mm512_inserti64x4(_mm512_set1_epi32(nth ? 30 : 2),
                                       _mm256_set1_epi32(nth ? 0 : 4), 0);
    __m512i high = _mm512_rolv_epi32(_mm512_broadcast_i64x4(upper), turns);
    if (nth) low = _mm512_srli_epi32(low, 4);
    low = _mm512_and_si512(low, _mm512_set1_epi8(15));
    /* low | high & 0x30 */
    return (unsigned_bytes)_mm512_ternarylogic_epi32(low, high, _mm512_set1_epi8(0x30), 0xf8);
#else
    __m256i low = _mm256_loadu_si256((const __m256i *)(p + nth % 2 * BLOCK));
    __m256i upper = _mm256_loadu_si256((const __m256i *)(p + SIXES_HIGH));
    if (nth / 2) low = _mm256_srli_epi16(low, 4);
    upper = nth < 3 ? _mm256_slli_epi16(upper, 4 - 2 * nth) : _mm256_srli_epi16(upper, 2);
    low = _mm256_and_si256(low, _mm256_set1_epi8(15));
    return (unsigned_bytes)_mm256_or_si256(low, _mm256_and_si256(upper, _mm256_set1_epi8(0x30)));
#endif
}

/* The scales of half blocks that lie together: their integers times the scale of the group. */
static inline lanes shared_scales(const uint8_t *p, float scale) {
    __m256i integers = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p + SIXES_SHARED)));
    __m256 made = _mm256_mul_ps(_mm256_cvtepi32_ps(integers), _mm256_set1_ps(scale));
#if WIDE == 64
    return _mm512_castps256_ps512(made);
#else
    return made;
#endif
}

ALWAYS parts_int6(const int outs, const int rows, const int parts, const product *p, int64_t o,
                  int64_t r, sums *out) {
    lanes sum[MOST_SUMS];
    SUMS for (int b = 0; b < outs * rows; b++) sum[b] = (lanes){0};
    const fixed_line *x[TOGETHER];
    UNROLLED for (int q = 0; q < rows; q++) x[q] = (const fixed_line *)row_of(p, r + q);
    const uint8_t *w = weights(p, o, 0);
    int64_t row = p->beside * p->k * p->bytes / 256, i = 0;
    for (int64_t g = 0; g < p->groups; g++) {
        float scale[SIDE];
        UNROLLED for (int s = 0; s < outs; s++)
            scale[s] = load(scales_of(p, beside(p, o, s)), g, p->scales_dtype);
        for (int64_t end = i + p->each; i < end; i += SIXES, w += SIXES_BYTES) {
            lanes shared[SIDE];
            UNROLLED for (int s = 0; s < outs; s++) {
                UNROLLED for (int l = 0; l < 2; l++) read_ahead(w + s * row + l * LINE, outs);
                shared[s] = shared_scales(w + s * row, scale[s]);
            }
            UNROLLED for (int nth = 0; nth < SIXES / WIDE; nth++)
                UNROLLED for (int s = 0; s < outs; s++)
                    add_line(rows, parts, sixes(w + s * row, nth),
                             four_times(shared[s], nth * WIDE / HALF), x, i / WIDE + nth,
                             sum + s * rows);
        }
    }
    add_lanes(outs, rows, sum, out);
}
IN_PARTS(fixed, 2, int6)

/* The product with rows of x in another form, of so many bytes each. */
#define IN_FORM(TO, BYTES, DOTS_OF)                                                             \
    {                                                                                           \
        p.apart = BYTES, p.to = TO;                                                             \
        return multiply(&p, DOTS_OF, CODED_TOGETHER, threads);                                  \
    }
#define CHUNKS(k) ((k + CHUNK - 1) / CHUNK)
#define FIXED_int4                                                                              \
    if (dtype == BF16) IN_FORM(to_fixed, CHUNKS(k) * sizeof(fixed), fixed_int4s)
#define FIXED_int6                                                                              \
    if (dtype == BF16)                                                                          \
        IN_FORM(to_fixed_int6, k / WIDE * sizeof(fixed_line), fixed_int6s)
#define FIXED_uint4                                                                             \
    if (dtype == BF16) IN_FORM(to_fixed_above, CHUNKS(k) * sizeof(fixed), fixed_uint4s)
#define FIXED_uint5                                                                             \
    if (dtype == BF16) IN_FORM(to_fixed_above, CHUNKS(k) * sizeof(fixed), fixed_uint5s)
#else
#define FIXED_int4
#define FIXED_int6
#define FIXED_uint4
#define FIXED_uint5
#endif

#if WIDE == 64
static void to_rounded(const void *x, int dtype, void *form, int64_t k) {
    in_chunks(1, 0, x, form, k);
}
static void to_rounded_above(const void *x, int dtype, void *form, int64_t k) {
    in_chunks(1, 1, x, form, k);
}
IN_PARTS(rounded, 1, int4)
IN_PARTS(rounded, 1, uint4)
IN_PARTS(rounded, 1, uint5)

LINES_OF(fixed, 2, int8)
LINES_OF(rounded, 1, int8)
LINES_OF(rounded, 1, int6)

static inline __m512 widen_16(const bf16 *p) {
    __m512i u = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(u, 16));
}

/* Scales of the half blocks of a line, of which there are `halves`. `form`, a constant, says how they
 * lie: two of 16 bits, four of 32, or as they may; or that there is one for the row, which counts
 * later. */
enum { TWO_BF16, TWO_F16, FOUR_F32, ANY, PER_ROW };

static inline __m128 line_scales(const int form, const product *p, const char *scales, int64_t at,
                                 int64_t halves) {
    if (form == ANY) return some_scales(scales, at, p->each, p->scales_dtype, HALF, halves);
    if (form == PER_ROW) return _mm_set1_ps(1);
    if (form == FOUR_F32) return _mm_loadu_ps((const float *)scales + at / HALF);
    uint32_t two;
    memcpy(&two, scales + at / HALF, sizeof two);
    __m128i u = _mm_cvtsi32_si128((int)two);
    u = _mm_unpacklo_epi16(u, u);
    if (form == TWO_F16) return _mm_cvtph_ps(u);
    return _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(u), 16));
}

ALWAYS fixed_lines(const int outs, const int rows, const int parts, const int form,
                   const product *p, int64_t o, int64_t at, int64_t end, int64_t r, lanes *sum) {
    const uint8_t *w[TOGETHER];
    const char *scales[TOGETHER];
    const fixed_line *x[TOGETHER];
    UNROLLED for (int s = 0; s < outs; s++)
        w[s] = weights(p, beside(p, o, s), 0), scales[s] = scales_of(p, beside(p, o, s));
    UNROLLED for (int q = 0; q < rows; q++) x[q] = (const fixed_line *)row_of(p, r + q);
    __m512i bias = _mm512_set1_epi8((char)0x80);
    for (int64_t i = at; i < end; i += LINE) {
        int64_t halves = end - i < LINE ? (end - i) / HALF : LINE / HALF;
        __mmask64 there = halves < LINE / HALF ? (1ull << halves * HALF) - 1 : ~0ull;
        UNROLLED for (int s = 0; s < outs; s++) {
            read_ahead(w[s] + i, outs);
            if (form < FOUR_F32) scales_ahead(scales[s], i);
            __m512i codes = form >= ANY ? _mm512_maskz_loadu_epi8(there, w[s] + i)
                                        : _mm512_loadu_si512(w[s] + i);
            unsigned_bytes biased = (unsigned_bytes)_mm512_xor_si512(codes, bias);
            lanes scale = in_lanes(line_scales(form, p, scales[s], i, halves));
            add_line(rows, parts, biased, scale, x, i / LINE, sum + s * rows);
        }
    }
}

ALWAYS parts_int8(const int outs, const int rows, const int parts, const product *p, int64_t o,
                  int64_t r, sums *out) {
    lanes sum[MOST_SUMS];
    SUMS for (int b = 0; b < outs * rows; b++) sum[b] = (lanes){0};
    int64_t full = p->k - p->k % LINE;
    if (p->each == BLOCK && p->scales_dtype == F16)
        fixed_lines(outs, rows, parts, TWO_F16, p, o, 0, full, r, sum);
    else if (p->each == BLOCK && p->scales_dtype == BF16)
        fixed_lines(outs, rows, parts, TWO_BF16, p, o, 0, full, r, sum);
    else if (p->each == HALF && p->scales_dtype == F32)
        fixed_lines(outs, rows, parts, FOUR_F32, p, o, 0, full, r, sum);
    else
        full = 0;
    fixed_lines(outs, rows, parts, ANY, p, o, full, p->k, r, sum);
    add_lanes(outs, rows, sum, out);
}
IN_PARTS(fixed, 2, int8)
IN_PARTS(rounded, 1, int8)

IN_PARTS(rounded, 1, int6)

/* Of codes with one scale for a row. */
ALWAYS rounded_row(const int outs, const int rows, const product *p, int64_t o, int64_t r,
                   sums *out) {
    lanes sum[MOST_SUMS];
    SUMS for (int b = 0; b < outs * rows; b++) sum[b] = (lanes){0};
    fixed_lines(outs, rows, 1, PER_ROW, p, o, 0, p->k, r, sum);
    SUMS for (int b = 0; b < outs * rows; b++) {
        const char *scales = scales_of(p, beside(p, o, b / rows));
        sum[b] = _mm512_mul_ps(sum[b], _mm512_set1_ps(load(scales, 0, p->scales_dtype)));
    }
    add_lanes(outs, rows, sum, out);
}
DOTS(rounded_row, 12)

/* 8-bit codes with one scale for a row: x as integers of 22 bits times a power of two for the whole
 * row, exact where a number is at least 2^-14 of the row's largest, in three bytes. Sums over so many
 * numbers stay below 2^31. */
#define WHOLE_MOST 65536

typedef struct {
    __m512i high, middle, low;
} bytes;

typedef struct {
    bytes *at;
    double unit, sum; /* of the integers */
} whole;
#define WHOLE_HEAD LINE

static inline int64_t lines(int64_t k) { return (k + LINE - 1) / LINE; }

/* Splits off the lowest byte, as a number from -128 to 127. */
static inline __m128i low_bytes(__m512i *v) {
    __m512i carried = _mm512_srai_epi32(_mm512_add_epi32(*v, _mm512_set1_epi32(128)), 8);
    __m512i low = _mm512_sub_epi32(*v, _mm512_slli_epi32(carried, 8));
    *v = carried;
    return _mm512_cvtepi32_epi8(low);
}

static void to_whole(const void *row, int dtype, void *form, int64_t k) {
    const bf16 *x = row;
    whole *to = form;
    uint16_t most = 0;
    for (int64_t i = 0; i < k; i++) {
        uint16_t size = x[i] & 0x7fff;
        most = size > most ? size : most;
    }
    int bad = most >> 7 == 0xff;
    float unit, times = scaled_to(22, most >> 7, bad, &unit);
    bytes *b = to->at = (bytes *)((char *)to + WHOLE_HEAD);
    memset(b, 0, lines(k) * sizeof(bytes));
    __m512i sum = _mm512_setzero_si512();
    for (int64_t i = 0; i < k && !bad; i += HALF) {
        __m512i v = _mm512_cvtps_epi32(_mm512_mul_ps(widen_16(x + i), _mm512_set1_ps(times)));
        sum = _mm512_add_epi64(sum, _mm512_cvtepi32_epi64(_mm512_castsi512_si256(v)));
        sum = _mm512_add_epi64(sum, _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(v, 1)));
        char *line = (char *)(b + i / LINE) + i % LINE;
        _mm_storeu_si128((__m128i *)(line + offsetof(bytes, low)), low_bytes(&v));
        _mm_storeu_si128((__m128i *)(line + offsetof(bytes, middle)), low_bytes(&v));
        _mm_storeu_si128((__m128i *)(line + offsetof(bytes, high)), low_bytes(&v));
    }
    to->unit = unit;
    to->sum = (double)_mm512_reduce_add_epi64(sum);
}

ALWAYS whole_int8(const int outs, const int rows, const product *p, int64_t o, int64_t r, sums *out) {
    __m512i high[MOST_SUMS], middle[MOST_SUMS], low[MOST_SUMS];
    SUMS for (int b = 0; b < outs * rows; b++)
        high[b] = middle[b] = low[b] = _mm512_setzero_si512();
    const uint8_t *w[TOGETHER];
    UNROLLED for (int s = 0; s < outs; s++) w[s] = weights(p, beside(p, o, s), 0);
    __m512i bias = _mm512_set1_epi8((char)0x80);
    for (int64_t i = 0; i < p->k; i += LINE) {
        __mmask64 there = p->k - i < LINE ? (1ull << (p->k - i)) - 1 : ~0ull;
        UNROLLED for (int s = 0; s < outs; s++) {
            read_ahead(w[s] + i, outs);
            __m512i codes = _mm512_xor_si512(_mm512_maskz_loadu_epi8(there, w[s] + i), bias);
            UNROLLED for (int q = 0; q < rows; q++) {
                const bytes *x = ((const whole *)row_of(p, r + q))->at + i / LINE;
                int b = s * rows + q;
                high[b] = _mm512_dpbusd_epi32(high[b], codes, x->high);
                middle[b] = _mm512_dpbusd_epi32(middle[b], codes, x->middle);
                low[b] = _mm512_dpbusd_epi32(low[b], codes, x->low);
            }
        }
    }
    SUMS for (int b = 0; b < outs * rows; b++) {
        const whole *x = (const whole *)row_of(p, r + b % rows);
        double all = 65536.0 * _mm512_reduce_add_epi32(high[b]);
        all += 256.0 * _mm512_reduce_add_epi32(middle[b]);
        all += _mm512_reduce_add_epi32(low[b]);
        all -= 128 * x->sum;
        out[b / rows][b % rows] =
            (float)(all * x->unit) * load(scales_of(p, beside(p, o, b / rows)), 0, p->scales_dtype);
    }
}
DOTS(whole_int8, 8)

#define FIXED_int8                                                                              \
    if (dtype == BF16 && groups == 1 && k <= WHOLE_MOST)                                        \
        IN_FORM(to_whole, WHOLE_HEAD + lines(k) * sizeof(bytes), whole_int8s)                   \
    if (dtype == BF16)                                                                          \
        IN_FORM(to_fixed_int8, lines(k) * sizeof(fixed_line), fixed_int8s)
#define ROUNDED_int4 IN_FORM(to_rounded, CHUNKS(k) * sizeof(fixed), rounded_int4s)
#define ROUNDED_uint4                                                                           \
    IN_FORM(to_rounded_above, CHUNKS(k) * sizeof(fixed), rounded_uint4s)
#define ROUNDED_uint5                                                                           \
    IN_FORM(to_rounded_above, CHUNKS(k) * sizeof(fixed), rounded_uint5s)
#define ROUNDED_int8                                                                            \
    IN_FORM(to_rounded_int8, lines(k) * sizeof(fixed_line),                                     \
            groups == 1 ? rounded_rows : rounded_int8s)
#define ROUNDED_int6                                                                            \
    IN_FORM(to_rounded_int6, lines(k) * sizeof(fixed_line), rounded_int6s)
static const int ROUNDS = 1;
#else
#define FIXED_int8
#define ROUNDED_int4
#define ROUNDED_uint4
#define ROUNDED_uint5
#define ROUNDED_int8
#define ROUNDED_int6
static const int ROUNDS = 0;
#endif
#define FIXED_fp8
#define ROUNDED_fp8

#define PRODUCT_CODED(NAME, BYTES, PER)                                                         \
    static void wide_##NAME(const void *x, int dtype, void *form, int64_t k) {                  \
        float *wide = form;                                                                     \
        for (int64_t i = 0; i < k; i += BLOCK) {                                                \
            for (int j = 0; j < BLOCK; j++) wide[i + j] = load(x, i + j, dtype);                \
            as_codes_##NAME(wide + i);                                                          \
        }                                                                                       \
    }                                                                                           \
    static int product_##NAME(const uint8_t *w, const void *scales, int scales_dtype,           \
                              const void *x, int rounded, void *y, int dtype, int64_t rows,     \
                              int64_t n, int64_t k, int64_t groups, int threads) {              \
        product p = {.w = w, .bytes = BYTES, .stride = k, .scales = scales,                     \
                     .scales_dtype = scales_dtype, .groups = groups, .each = k / groups * PER,  \
                     .x = x, .to = wide_##NAME, .apart = k * sizeof(float), .y = y,             \
                     .dtype = dtype, .rows = rows, .n = n, .k = k};                             \
        if (rounded) { ROUNDED_##NAME }                                                         \
        FIXED_##NAME                                                                            \
        const dots *of = groups == 1 ? rowwise_##NAME##s : groupwise_##NAME##s;                 \
        return multiply(&p, of, CODED_TOGETHER, threads);                                       \
    }

/* Bytes of 256 numbers, and scales of a group. */
PRODUCT_CODED(int8, 256, 1)
PRODUCT_CODED(int6, 2 * SIXES_BYTES, 1)
PRODUCT_CODED(int4, 128, 1)
PRODUCT_CODED(fp8, 256, 1)
PRODUCT_CODED(uint4, ABOVE_uint4, 2)
PRODUCT_CODED(uint5, ABOVE_uint5, 2)

/* Rows of a weight for a library's product. */
#define DECODE(NAME, BYTES, UNIT)                                                               \
    static void decode_##NAME(const uint8_t *w, const void *scales, int scales_dtype, void *y,  \
                              int dtype, int64_t first, int64_t last, int64_t k,                \
                              int64_t groups) {                                                 \
        int64_t each = k / groups;                                                              \
        for (int64_t o = first; o < last; o++)                                                  \
            for (int64_t i = 0; i < k; i += BLOCK) {                                            \
                float v[BLOCK];                                                                 \
                float s = load(scales, o * groups + i / each, scales_dtype) * UNIT;             \
                float t = load(scales, o * groups + (i + HALF) / each, scales_dtype) * UNIT;    \
                block b = ordered_##NAME(w + o * k / BLOCK * BYTES, i);                         \
                memcpy(v, &b, sizeof v);                                                        \
                for (int j = 0; j < BLOCK; j++) v[j] *= j < HALF ? s : t;                       \
                if (dtype == F32)                                                               \
                    memcpy((float *)y + o * k + i, v, sizeof v);                                \
                else                                                                            \
                    for (int j = 0; j < BLOCK; j++) ((bf16 *)y)[o * k + i + j] = narrow(v[j]);  \
            }                                                                                   \
    }

DECODE(int8, 32, 1)
DECODE(int6, 26, 1)
DECODE(int4, 16, 1)
DECODE(fp8, 32, 0x1p8f)

/* Each product is rounded by itself, and so is the difference, as the definition has it: what is
 * said to change in memory is neither reordered nor fused. */
#define ROUNDED(V) __asm__("" : "+m"(V))
static inline void decode_above(const int high, const uint8_t *w, const void *scales,
                                int scales_dtype, void *y, int dtype, int64_t first,
                                int64_t last, int64_t k, int64_t groups) {
    const int size = high ? ABOVE_uint5 : ABOVE_uint4;
    for (int64_t at = first * k / ABOVE; at < last * k / ABOVE; at++) {
        int64_t pair = at * ABOVE / (k / groups * 2) * 2;
        float s = load(scales, pair, scales_dtype), least = load(scales, pair + 1, scales_dtype);
        const uint8_t *from = w + at * size;
        uint64_t scale = integers_above(from + size - 12, 0);
        uint64_t minima = integers_above(from + size - 12, 1);
        for (int b = 0; b < 8; b++) {
            float v[BLOCK], below = least * integer_of(minima, b);
            half_block codes[2];
            numbers_above(high, from, b, codes);
            block numbers = ordered(codes);
            memcpy(v, &numbers, sizeof v);
            for (int j = 0; j < BLOCK; j++) v[j] *= integer_of(scale, b);
            ROUNDED(v);
            for (int j = 0; j < BLOCK; j++) v[j] *= s;
            ROUNDED(v);
            for (int j = 0; j < BLOCK; j++) v[j] -= below;
            int64_t to = at * ABOVE + b * BLOCK;
            if (dtype == F32)
                memcpy((float *)y + to, v, sizeof v);
            else
                for (int j = 0; j < BLOCK; j++) ((bf16 *)y)[to + j] = narrow(v[j]);
        }
    }
}
#define DECODE_ABOVE(NAME, HIGH)                                                                \
    static void decode_##NAME(const uint8_t *w, const void *scales, int scales_dtype, void *y,  \
                              int dtype, int64_t first, int64_t last, int64_t k,                \
                              int64_t groups) {                                                 \
        decode_above(HIGH, w, scales, scales_dtype, y, dtype, first, last, k, groups);          \
    }

DECODE_ABOVE(uint4, 0)
DECODE_ABOVE(uint5, 1)

#ifdef __AVX512BW__
/* Sixteen numbers in bf16, as narrow() has them. */
static inline __m256i in_bf16(__m512 v) {
    __m512i u = _mm512_castps_si512(v), even = _mm512_set1_epi32(0x7fff);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    u = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, even)), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(u, nan, _mm512_set1_epi32(0x7fc0)));
}

/* What sixteen codes from `first` on are in bf16. */
static inline __m256i values_of(float first, float scale, float least) {
    __m512 codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    codes = _mm512_add_ps(codes, _mm512_set1_ps(first));
    return in_bf16(_mm512_fmsub_ps(codes, _mm512_set1_ps(scale), _mm512_set1_ps(least)));
}

/* As decode_int4 does, six times as fast: codes look up the values of their group. */
static void decode_int4_bf16(const uint8_t *w, const void *scales, int scales_dtype, bf16 *y,
                             int64_t first, int64_t last, int64_t k, int64_t groups) {
    for (int64_t g = first * groups; g < last * groups; g++) {
        __m512i values = _mm512_broadcast_i64x4(values_of(-8, load(scales, g, scales_dtype), 0));
        for (int64_t i = g * (k / groups); i < (g + 1) * (k / groups); i += BLOCK) {
            __m512i c = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(w + i / 2)));
            c = _mm512_or_si512(c, _mm512_slli_epi32(c, 12));
            _mm512_storeu_si512(y + i, _mm512_permutexvar_epi16(c, values));
        }
    }
}

/* The same of codes with minima, for scales of 16 bits, whose products are exact. */
static inline void decode_above_bf16(const int high, const uint8_t *w, const void *scales,
                                     int scales_dtype, bf16 *y, int64_t first, int64_t last,
                                     int64_t k, int64_t groups) {
    const int size = high ? ABOVE_uint5 : ABOVE_uint4;
    for (int64_t at = first * k / ABOVE; at < last * k / ABOVE; at++) {
        int64_t pair = at * ABOVE / (k / groups * 2) * 2;
        float s = load(scales, pair, scales_dtype), least = load(scales, pair + 1, scales_dtype);
        const uint8_t *from = w + at * size;
        uint64_t scale = integers_above(from + size - 12, 0);
        uint64_t minima = integers_above(from + size - 12, 1);
        for (int b = 0; b < 8; b++) {
            float d = s * integer_of(scale, b), below = least * integer_of(minima, b);
            __m512i values = _mm512_broadcast_i64x4(values_of(0, d, below));
            __m512i c = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(from + b * HALF)));
            c = _mm512_and_si512(_mm512_or_si512(c, _mm512_slli_epi32(c, 12)),
                                 _mm512_set1_epi32(0xf000f));
            if (high) {
                const uint8_t *p = from + ABOVE_HIGH + b % 2 * HALF;
                __m512i u = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
                u = _mm512_srl_epi32(u, _mm_cvtsi32_si128(b / 2 * 2));
                u = _mm512_or_si512(_mm512_slli_epi32(u, 4), _mm512_slli_epi32(u, 19));
                c = _mm512_or_si512(c, _mm512_and_si512(u, _mm512_set1_epi32(0x100010)));
                values = _mm512_inserti64x4(values, values_of(16, d, below), 1);
            }
            _mm512_storeu_si512(y + at * ABOVE + b * BLOCK, _mm512_permutexvar_epi16(c, values));
        }
    }
}
#endif

/* The functions of each form, the codes that share a scale at least, and scales of a group. */
static const struct {
    int (*product)(const uint8_t *, const void *, int, const void *, int, void *, int, int64_t,
                   int64_t, int64_t, int64_t, int);
    void (*decode)(const uint8_t *, const void *, int, void *, int, int64_t, int64_t, int64_t,
                   int64_t);
    int64_t group, scales;
} OF[FORMS] = {
    [INT8] = {product_int8, decode_int8, HALF, 1},
    [INT6] = {product_int6, decode_int6, SIXES, 1},
    [INT4] = {product_int4, decode_int4, BLOCK, 1},
    [FP8] = {product_fp8, decode_fp8, HALF, 1},
    [UINT4] = {product_uint4, decode_uint4, ABOVE, 2},
    [UINT5] = {product_uint5, decode_uint5, ABOVE, 2},
};

/* Most rows that are multiplied with codes as they are. */
#define CODED_ROWS 8

int g4ir_takes_codes(int form, int rounded, int dtype, int64_t rows, int64_t k, int64_t groups) {
    if (rounded && !(ROUNDS && dtype == BF16 && form != FP8)) return 0;
    if (form < 0 || form >= FORMS || (dtype != BF16 && dtype != F32)) return 0;
    int64_t scales = OF[form].scales;
    if (groups % scales) return 0;
    groups /= scales;
    if (rows < 1 || rows > CODED_ROWS || k % BLOCK || groups < 1 || k % groups) return 0;
    return k / groups % OF[form].group == 0;
}

int g4ir_linear_coded(const void *codes, int form, const void *scales, int scales_dtype,
                      const void *x, int rounded, void *y, int dtype, int64_t rows, int64_t n,
                      int64_t k, int64_t groups, int threads) {
    return OF[form].product(codes, scales, scales_dtype, x, rounded, y, dtype, rows, n, k, groups,
                            threads);
}

/* Rows of the weight in a unit of g4ir_decode. */
#define DECODED_ROWS 16

typedef struct {
    const void *codes, *scales;
    void *y;
    int form, scales_dtype, dtype;
    int64_t n, k, groups;
} decoding;

static void decode_rows(const decoding *d, int64_t first, int64_t last) {
#ifdef __AVX512BW__
    int in_16_bits = d->dtype == BF16 && d->scales_dtype != F32;
    if (d->form == INT4 && d->dtype == BF16)
        return decode_int4_bf16(d->codes, d->scales, d->scales_dtype, d->y, first, last, d->k,
                                d->groups);
    if (d->form == UINT4 && in_16_bits)
        return decode_above_bf16(0, d->codes, d->scales, d->scales_dtype, d->y, first, last, d->k,
                                 d->groups);
    if (d->form == UINT5 && in_16_bits)
        return decode_above_bf16(1, d->codes, d->scales, d->scales_dtype, d->y, first, last, d->k,
                                 d->groups);
#endif
    OF[d->form].decode(d->codes, d->scales, d->scales_dtype, d->y, d->dtype, first, last, d->k,
                       d->groups);
}

static int decode_units(void *context, units *left) {
    const decoding *d = context;
    for (int64_t i; (i = take_unit(left)) >= 0;)
        decode_rows(d, i * DECODED_ROWS, least((i + 1) * DECODED_ROWS, d->n));
    return 0;
}

void g4ir_decode(const void *codes, int form, const void *scales, int scales_dtype, void *y,
                 int dtype, int64_t n, int64_t k, int64_t groups, int threads) {
    decoding d = {codes, scales, y, form, scales_dtype, dtype, n, k, groups};
    run_region(decode_units, &d, (n + DECODED_ROWS - 1) / DECODED_ROWS, threads);
}

/* ---- attention of a few queries over a cache (g4ir/ops/attention.py) ---- */

/* Keys that are taken together, a multiple of the rows that a product takes; their values wait in a
 * core's own cache meanwhile. A thread has so many at least. */
#define KEYS 96
#define KEYS_LEAST 48
/* The score of what a query does not see. */
#define UNSEEN -3e38f

typedef float eight __attribute__((vector_size(32)));
typedef float any_eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t whole_eight __attribute__((vector_size(32)));
_Static_assert(sizeof(sums) == sizeof(eight), "scores of a key are one vector");

typedef struct {
    const void *q, *kept[2]; /* keys and values */
    const int64_t *positions, *written;
    void *out;
    int dtype, held; /* of queries and the result; of rows */
    int64_t batch, queries, heads, kv_heads, d, slots, width, window;
    float scale;
    /* The same of all: */
    int64_t parts, group, rows; /* of the keys; heads and queries that share keys */
    int64_t wide;               /* numbers of a row as it is taken */
    int as_held;                /* whether that is as it is held, else in fp32 */
    float *partial;
    uint32_t *made; /* parts of each head of K and V that are computed */
} attention;

/* Keys or values that lie evenly. */
typedef struct {
    const char *at;
    int64_t stride, count; /* numbers from one to the next */
} row_run;

/* A thread's own. */
typedef struct {
    char *q;
    float *made;   /* rows in fp32 */
    sums *scores;  /* of the keys taken, by groups of rows */
    uint32_t *two; /* the same of pairs of keys, in bf16 */
} room;

/* By parts: sums of values [rows, wide], then the most and the total of each row. */
static inline int64_t partial_size(const attention *a) {
    return a->rows * a->wide + 2 * ((a->rows + TOGETHER - 1) / TOGETHER * TOGETHER);
}

static inline int64_t held_bytes(const attention *a) {
    return a->held == F32 ? 4 : a->held > F16 ? 1 : 2;
}

/* The first position that a row of the batch reads of its cache, and how many. */
static int64_t span(const attention *a, int64_t b, int64_t *count) {
    const int64_t *at = a->positions + b * a->queries;
    int64_t first = at[0], last = at[0];
    for (int64_t s = 1; s < a->queries; s++) {
        first = least(first, at[s]);
        last = -least(-last, -at[s]);
    }
    int64_t oldest = a->written[b] - a->slots, end = least(last + 1, a->written[b]);
    first = a->window ? first - a->window + 1 : 0;
    first = -least(-first, -oldest);
    first = first < 0 ? 0 : first;
    *count = end > first ? end - first : 0;
    return first;
}

/* Keys (0) or values (1) of a head from the i-th on that are read. */
static row_run run_of(const attention *a, int value, int64_t b, int64_t h, int64_t first,
                      int64_t count, int64_t i) {
    int64_t slot = (first + i) % a->slots, row = (slot * a->batch + b) * a->kv_heads + h;
    const char *rows = a->kept[value];
    return (row_run){rows + row * a->width * held_bytes(a), a->batch * a->kv_heads * a->width,
                     least(count - i, a->slots - slot)};
}

static inline float widen_fp8(uint8_t c) {
    float f = widen_half((uint16_t)((c & 0x80) << 8 | (c & 0x7f) << 7)) * 0x1p8f;
    return (c & 0x7f) == 0x7f ? NAN : f;
}

/* What a row says, as g4ir/ops/kv_quant.py has it. */
static void widen_row(const char *row, int held, float *to, int64_t d) {
    if (held == ROWS_INT8)
        for (int64_t j = 0; j < d; j++) to[j] = (int8_t)row[j] * load(row + d, j / 32, BF16);
    else if (held == ROWS_FP8)
        for (int64_t j = 0; j < d; j++) to[j] = widen_fp8(row[j]);
    else if (held == F16)
        for (int64_t j = 0; j < d; j++) to[j] = load(row, j, F16);
    else
        for (int64_t j = 0; j < d; j++) to[j] = load(row, j, held);
}

/* Rows of fp32, padded with nothing to what is read at a time. */
static row_run widened(const attention *a, row_run from, float *to) {
    for (int64_t i = 0; i < from.count; i++) {
        const char *row = from.at + i * from.stride * held_bytes(a);
        float *made = to + i * a->wide;
        widen_row(row, a->held, made, a->d);
        for (int64_t j = a->d; j < a->wide; j++) made[j] = 0;
    }
    return (row_run){(const char *)to, a->wide, from.count};
}

static int64_t query_bytes(const attention *a) {
    return a->wide * (a->as_held && a->dtype == BF16 ? (int64_t)sizeof(bf16_row) : 4);
}

/* The queries of a head, in the form in which a product takes them. */
static void formed_queries(const attention *a, int64_t b, int64_t h, char *to) {
    int64_t size = a->dtype == F32 ? 4 : 2;
    for (int64_t r = 0; r < a->rows; r++, to += query_bytes(a)) {
        int64_t row = (b * a->queries + r / a->group) * a->heads + h * a->group + r % a->group;
        const char *q = (const char *)a->q + row * a->d * size;
        if (!a->as_held) {
            for (int64_t j = 0; j < a->d; j++) ((float *)to)[j] = load(q, j, a->dtype);
            for (int64_t j = a->d; j < a->wide; j++) ((float *)to)[j] = 0;
        } else if (a->dtype == BF16 && EMULATED)
            in_pairs(q, BF16, to, a->d);
        else
            memcpy(to, q, a->d * size);
    }
}

/* Scores of keys with up to TOGETHER rows; the values of these keys are read ahead. */
static void score_keys(const attention *a, row_run keys, row_run values, const char *q, int64_t here,
                       sums *out) {
    int two = a->as_held && a->dtype == BF16;
    int64_t size = two ? 2 : 4, line = LINE / size;
    product p = {.w = (const uint8_t *)keys.at, .bytes = 256 * size, .stride = keys.stride, .x = q,
                 .apart = query_bytes(a), .beside = 1, .k = a->wide};
    const dots *of = (two ? dot_bf16s : dot_f32s) + here;
    for (int64_t o = 0; o < keys.count;) {
        int64_t outs = o + of->outs <= keys.count ? of->outs : 1;
        for (int64_t i = o; i < o + outs; i++)
            for (int64_t j = 0; j < a->wide; j += line)
                __builtin_prefetch(values.at + (i * values.stride + j) * size, 0, 2);
        (outs > 1 ? of->several : of->one)(&p, o, 0, out + o);
        o += outs;
    }
}

/* Marks what rows do not see of keys whose positions begin with `first`. */
static void mark_unseen(const attention *a, int64_t b, int64_t first, int64_t keys, int64_t r,
                        int64_t here, sums *scores) {
    for (int64_t q = 0; q < here; q++) {
        int64_t last = a->positions[b * a->queries + (r + q) / a->group];
        int64_t from = a->window ? last - a->window + 1 : 0;
        for (int64_t t = 0; t < least(keys, from - first); t++) scores[t][q] = UNSEEN;
        for (int64_t t = -least(0, first - last - 1); t < keys; t++) scores[t][q] = UNSEEN;
    }
}

static inline eight chosen(whole_eight which, eight yes, eight no) {
    return (eight)((which & (whole_eight)yes) | (~which & (whole_eight)no));
}

/* 2^y for y <= 0; NaN stays NaN. */
static inline eight power(eight y) {
    eight none = {0};
    y = chosen(y < -126.0f, none - 126.0f, y);
    whole_eight whole = __builtin_convertvector(y - 0.5f, whole_eight);
    eight x = y - __builtin_convertvector(whole, eight);
    eight z = none + 0.00015403530f;
    z = z * x + 0.0013333558f;
    z = z * x + 0.0096181291f;
    z = z * x + 0.055504109f;
    z = z * x + 0.24022651f;
    z = z * x + 0.69314718f;
    z = z * x + 1.0f;
    return z * (eight)((whole + 127) << 23);
}

/* Scores of keys become weights: powers of their distance from the most of a row so far. Returns
 * whether that grew, and by which factors what was summed before shrinks. */
static int weigh(any_eight *scores, int64_t count, float scale, any_eight *most, any_eight *total,
                 eight *factor) {
    eight top = *most, sum = {0};
    for (int64_t t = 0; t < count; t++) {
        eight s = scores[t];
        scores[t] = s = chosen(s <= UNSEEN, s, s * scale);
        top = chosen(s > top, s, top);
    }
    for (int64_t t = 0; t < count; t++) {
        eight s = scores[t];
        scores[t] = s = chosen(s <= UNSEEN, s - s, power(s - top));
        sum += s;
    }
    *factor = power(*most - top);
    whole_eight grown = top > *most;
    int64_t any[4];
    memcpy(any, &grown, sizeof any);
    *total = *total * *factor + sum;
    *most = top;
    return (any[0] | any[1] | any[2] | any[3]) != 0;
}

/* Values are added to sums that stay in registers, as many as a CPU has. */
#ifdef __AVX512F__
#define ADDED 8
#else
#define ADDED 4
#endif
#define VALUES_AT(TYPE, T) ((const TYPE *)v.at + (T) * v.stride + c + u * PAIR)
#define ADD(NAME, TYPE, WEIGHT, STEP, MORE)                                                     \
    ALWAYS add_##NAME(const int rows, const int pairs, row_run v, const WEIGHT *weights,        \
                      float *out, int64_t wide, int64_t *from) {                                \
        int64_t c = *from;                                                                      \
        for (; c + pairs * PAIR <= wide; c += pairs * PAIR) {                                   \
            pair sum[ADDED][4];                                                                 \
            UNROLLED for (int q = 0; q < rows; q++)                                             \
                UNROLLED for (int u = 0; u < pairs; u++)                                        \
                    sum[q][u] = pair_f32(out + q * wide + c + u * PAIR);                        \
            for (int64_t t = 0; t < v.count; t += STEP)                                         \
                UNROLLED for (int u = 0; u < pairs; u++) MORE(TYPE)                             \
            UNROLLED for (int q = 0; q < rows; q++)                                             \
                UNROLLED for (int u = 0; u < pairs; u++)                                        \
                    memcpy(out + q * wide + c + u * PAIR, &sum[q][u], sizeof(pair));            \
        }                                                                                       \
        *from = c;                                                                              \
    }                                                                                           \
    ADD_ROWS(NAME, WEIGHT, 1, 4)                                                                \
    ADD_ROWS(NAME, WEIGHT, 2, 2)                                                                \
    ADD_ROWS(NAME, WEIGHT, 3, 1)                                                                \
    ADD_ROWS(NAME, WEIGHT, 4, 1)                                                                \
    MORE_ROWS(NAME, WEIGHT)
#define ADD_ROWS(NAME, WEIGHT, ROWS, PAIRS)                                                     \
    static void add_##NAME##_##ROWS(row_run v, const WEIGHT *weights, float *out,               \
                                    int64_t wide) {                                             \
        int64_t from = 0;                                                                       \
        add_##NAME(ROWS, PAIRS, v, weights, out, wide, &from);                                  \
        if (PAIRS > 1) add_##NAME(ROWS, 1, v, weights, out, wide, &from);                       \
    }
#ifdef __AVX512F__
#define MORE_ROWS(NAME, WEIGHT)                                                                 \
    ADD_ROWS(NAME, WEIGHT, 5, 1)                                                                \
    ADD_ROWS(NAME, WEIGHT, 6, 1)                                                                \
    ADD_ROWS(NAME, WEIGHT, 7, 1)                                                                \
    ADD_ROWS(NAME, WEIGHT, 8, 1)                                                                \
    static void (*const add_##NAME##s[])(row_run, const WEIGHT *, float *, int64_t) = {         \
        NULL, add_##NAME##_1, add_##NAME##_2, add_##NAME##_3, add_##NAME##_4, add_##NAME##_5,   \
        add_##NAME##_6, add_##NAME##_7, add_##NAME##_8};
#else
#define MORE_ROWS(NAME, WEIGHT)                                                                 \
    static void (*const add_##NAME##s[])(row_run, const WEIGHT *, float *, int64_t) = {         \
        NULL, add_##NAME##_1, add_##NAME##_2, add_##NAME##_3, add_##NAME##_4};
#endif

#define ADD_ONE(TYPE)                                                                           \
    {                                                                                           \
        pair x = PAIR_OF_##TYPE(VALUES_AT(TYPE, t));                                            \
        UNROLLED for (int q = 0; q < rows; q++) {                                               \
            sum[q][u].first += x.first * weights[t * TOGETHER + q];                             \
            sum[q][u].second += x.second * weights[t * TOGETHER + q];                           \
        }                                                                                       \
    }
#define PAIR_OF_float pair_f32
#define PAIR_OF_bf16 pair_bf16
ADD(f32, float, float, 1, ADD_ONE)

#ifdef __AVX512BF16__
/* Two keys at once; where the second is missing, it weighs nothing. */
#define ADD_TWO(TYPE)                                                                           \
    {                                                                                           \
        words a = *(const any_words *)VALUES_AT(TYPE, t);                                       \
        words b = *(const any_words *)VALUES_AT(TYPE, t + 1 < v.count ? t + 1 : t);             \
        __m512bh even = (__m512bh)((a & 0xffffu) | (b << 16));                                  \
        __m512bh odd = (__m512bh)((a >> 16) | (b & 0xffff0000u));                               \
        UNROLLED for (int q = 0; q < rows; q++) {                                               \
            __m512bh w = (__m512bh)_mm512_set1_epi32(weights[t / 2 * TOGETHER + q]);            \
            sum[q][u].first = (vector)_mm512_dpbf16_ps((__m512)sum[q][u].first, even, w);       \
            sum[q][u].second = (vector)_mm512_dpbf16_ps((__m512)sum[q][u].second, odd, w);      \
        }                                                                                       \
    }
ADD(bf16, bf16, uint32_t, 2, ADD_TWO)

static void in_twos(const sums *weights, int64_t count, uint32_t *to) {
    for (int64_t t = 0; t < count; t += 2)
        for (int q = 0; q < TOGETHER; q++) {
            uint32_t second = t + 1 < count ? narrow(weights[t + 1][q]) : 0;
            to[t / 2 * TOGETHER + q] = narrow(weights[t][q]) | second << 16;
        }
}
#else
ADD(bf16, bf16, float, 1, ADD_ONE)
#endif

/* out += weights * values of up to TOGETHER rows. */
static void add_values(const attention *a, row_run values, const sums *weights, room *own,
                       int64_t here, float *out) {
    const float *plain = weights[0];
    int two = a->as_held && a->dtype == BF16;
#ifdef __AVX512BF16__
    const uint32_t *pairs = own->two;
    if (two) in_twos(weights, values.count, own->two);
#else
    const float *pairs = plain;
#endif
    for (int64_t r = 0; r < here; r += ADDED) {
        int64_t some = least(ADDED, here - r);
        if (two)
            add_bf16s[some](values, pairs + r, out + r * a->wide, a->wide);
        else
            add_f32s[some](values, plain + r, out + r * a->wide, a->wide);
    }
}

static void attend_keys(const attention *a, int64_t b, int64_t h, int64_t from, int64_t end,
                        int64_t first, int64_t count, room *own, float *out) {
    int64_t groups = (a->rows + TOGETHER - 1) / TOGETHER;
    float *most = out + a->rows * a->wide, *total = most + groups * TOGETHER;
    for (int64_t i = 0; i < a->rows * a->wide; i++) out[i] = 0;
    for (int64_t g = 0; g < groups * TOGETHER; g++) most[g] = UNSEEN, total[g] = 0;
    for (int64_t i = from, taken; i < end; i += taken) {
        row_run keys = run_of(a, 0, b, h, first, count, i);
        row_run values = run_of(a, 1, b, h, first, count, i);
        keys.count = values.count = taken = least(keys.count, least(KEYS, end - i));
        if (!a->as_held) keys = widened(a, keys, own->made);
        for (int64_t g = 0; g < groups; g++) {
            int64_t r = g * TOGETHER, here = least(TOGETHER, a->rows - r);
            sums *scores = own->scores + g * KEYS;
            eight factor;
            score_keys(a, keys, values, own->q + r * query_bytes(a), here, scores);
            mark_unseen(a, b, first + i, taken, r, here, scores);
            if (!weigh((any_eight *)scores, taken, a->scale, (any_eight *)(most + r),
                       (any_eight *)(total + r), &factor))
                continue;
            for (int64_t q = 0; q < here; q++)
                for (int64_t c = 0; c < a->wide; c++) out[(r + q) * a->wide + c] *= factor[q];
        }
        if (!a->as_held) values = widened(a, values, own->made);
        for (int64_t r = 0; r < a->rows; r += TOGETHER)
            add_values(a, values, own->scores + r / TOGETHER * KEYS, own,
                       least(TOGETHER, a->rows - r), out + r * a->wide);
    }
}

static void attend_part(const attention *a, int64_t unit, room *own) {
    int64_t head = unit / a->parts, part = unit % a->parts, count;
    int64_t b = head / a->kv_heads, h = head % a->kv_heads, first = span(a, b, &count);
    formed_queries(a, b, h, own->q);
    attend_keys(a, b, h, count * part / a->parts, count * (part + 1) / a->parts, first, count, own,
                a->partial + unit * partial_size(a));
}

/* Adds the parts of one row of queries. */
static void join_parts(const attention *a, int64_t at) {
    int64_t b = at / a->heads / a->queries, s = at / a->heads % a->queries, head = at % a->heads;
    int64_t r = s * a->group + head % a->group, size = partial_size(a);
    const float *part = a->partial + (b * a->kv_heads + head / a->group) * a->parts * size;
    int64_t most = a->rows * a->wide + r, total = most + (size - a->rows * a->wide) / 2;
    float top = UNSEEN, sum = 0, factors[a->parts];
    for (int64_t i = 0; i < a->parts; i++)
        if (part[i * size + most] > top) top = part[i * size + most];
    for (int64_t i = 0; i < a->parts; i++) {
        eight y = {part[i * size + most] - top};
        factors[i] = power(y)[0];
        sum += part[i * size + total] * factors[i];
    }
    int paired = a->as_held && a->dtype == BF16;
    for (int64_t c = 0; c < a->d; c++) {
        int64_t from = r * a->wide + c;
        if (paired) from += c % 2 * (PAIR / 2) + c % PAIR / 2 - c % PAIR;
        float value = 0;
        for (int64_t i = 0; i < a->parts; i++) value += part[i * size + from] * factors[i];
        store(a->out, at * a->d + c, sum == 0 ? 0 : value / sum, a->dtype);
    }
}

static int make_room(const attention *a, room *own) {
    int64_t groups = (a->rows + TOGETHER - 1) / TOGETHER, lines = LINE - 1;
    int64_t q = (a->rows * query_bytes(a) + lines) / LINE * LINE;
    int64_t made = a->as_held ? 0 : KEYS * a->wide * sizeof(float);
    char *at = aligned_alloc(LINE, q + made + (groups * KEYS + KEYS / 2) * sizeof(sums));
    if (!at) return 1;
    own->q = at;
    own->made = (float *)(at + q);
    own->scores = (sums *)(at + q + made);
    own->two = (uint32_t *)(own->scores + groups * KEYS);
    memset(own->scores, 0, groups * KEYS * sizeof(sums));
    return 0;
}

/* Who computes the last part of a head's keys adds the parts. */
static int attend_units(void *context, units *left) {
    attention *a = context;
    room own;
    if (make_room(a, &own)) return 1;
    for (int64_t i; (i = take_unit(left)) >= 0;) {
        int64_t head = i / a->parts, b = head / a->kv_heads, h = head % a->kv_heads;
        attend_part(a, i, &own);
        if (__atomic_add_fetch(a->made + head, 1, __ATOMIC_ACQ_REL) < a->parts) continue;
        for (int64_t s = 0; s < a->queries; s++)
            for (int64_t g = 0; g < a->group; g++)
                join_parts(a, (b * a->queries + s) * a->heads + h * a->group + g);
    }
    free(own.q);
    return 0;
}

int g4ir_attend(const void *q, const int64_t *positions, const int64_t *written, const void *k,
                const void *v, void *out, int dtype, int held, int64_t batch, int64_t queries,
                int64_t heads, int64_t kv_heads, int64_t d, int64_t slots, int64_t width,
                int64_t window, double scale, int threads) {
    attention a = {.q = q, .kept = {k, v}, .positions = positions, .written = written,
                   .out = out, .dtype = dtype, .held = held, .batch = batch,
                   .queries = queries, .heads = heads, .kv_heads = kv_heads, .d = d,
                   .slots = slots, .width = width, .window = window, .scale = scale * 1.4426950408889634,
                   .group = heads / kv_heads, .rows = queries * heads / kv_heads,
                   .wide = (d + PAIR - 1) / PAIR * PAIR, .as_held = held == dtype && d % PAIR == 0};
    int64_t shared = batch * kv_heads, units;
    a.parts = least((threads + shared - 1) / shared, slots / KEYS_LEAST + 1);
    units = shared * a.parts;
    int64_t partial = (units * partial_size(&a) + 15) / 16 * LINE;
    a.partial = aligned_alloc(LINE, partial + (shared * sizeof *a.made + LINE - 1) / LINE * LINE);
    if (!a.partial) return 1;
    a.made = memset((char *)a.partial + partial, 0, shared * sizeof *a.made);
    int failed = run_region(attend_units, &a, units, threads);
    free(a.partial);
    return failed;
}
