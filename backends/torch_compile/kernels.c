/* Products of a weight [n, k] with a few rows. Every weight row is read from memory once, front to
 * back, by one thread; for one row that is as fast as memory delivers it. Sums are fp32. */
#include <stdint.h>
#include <string.h>
#ifdef __AVX512BW__
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

#define LINE 64
/* Bytes that the read of a weight is ahead of its use: left alone, a CPU stops reading ahead at the
 * end of every page. */
#define AHEAD 4096

/* Rows are fp32; of the weight, a block is made wide once for all rows. */
#define DOT(NAME, TYPE, WIDEN, ROWS)                                                            \
    static inline void dot_##NAME##_##ROWS(const TYPE *w, const float *x, float *out,           \
                                           int64_t k) {                                         \
        enum { WIDTH = 32 };                                                                    \
        float sum[ROWS][WIDTH];                                                                 \
        memset(sum, 0, sizeof sum);                                                             \
        int64_t i = 0;                                                                          \
        for (; i + WIDTH <= k; i += WIDTH) {                                                    \
            float v[WIDTH];                                                                     \
            for (unsigned b = 0; b < sizeof(TYPE) * WIDTH; b += LINE)                           \
                __builtin_prefetch((const char *)(w + i) + AHEAD + b, 0, 2);                    \
            _Pragma("omp simd")                                                                 \
            for (int j = 0; j < WIDTH; j++) v[j] = WIDEN(w[i + j]);                             \
            for (int r = 0; r < ROWS; r++) {                                                    \
                _Pragma("omp simd")                                                             \
                for (int j = 0; j < WIDTH; j++) sum[r][j] += v[j] * x[r * k + i + j];           \
            }                                                                                   \
        }                                                                                       \
        for (int r = 0; r < ROWS; r++) {                                                        \
            float all = 0;                                                                      \
            for (int j = 0; j < WIDTH; j++) all += sum[r][j];                                   \
            for (int64_t j = i; j < k; j++) all += WIDEN(w[j]) * x[r * k + j];                  \
            out[r] = all;                                                                       \
        }                                                                                       \
    }

#ifdef __AVX512BF16__
#define LANES 32
#define LOAD(p) ((__m512bh)_mm512_loadu_si512(p))

/* Four independent sums for each row hide the latency of the multiply-add. */
#define DOT_BF16(ROWS)                                                                          \
    static inline void dot_bf16_##ROWS(const bf16 *w, const bf16 *x, float *out, int64_t k) {   \
        enum { UNROLL = ROWS > 2 ? 2 : 4 };                                                     \
        __m512 sum[ROWS][UNROLL];                                                               \
        for (int r = 0; r < ROWS; r++)                                                          \
            for (int u = 0; u < UNROLL; u++) sum[r][u] = _mm512_setzero_ps();                   \
        int64_t i = 0;                                                                          \
        for (; i + UNROLL * LANES <= k; i += UNROLL * LANES)                                    \
            for (int u = 0; u < UNROLL; u++) {                                                  \
                __builtin_prefetch((const char *)(w + i + u * LANES) + AHEAD, 0, 2);            \
                __m512bh v = LOAD(w + i + u * LANES);                                           \
                for (int r = 0; r < ROWS; r++)                                                  \
                    sum[r][u] = _mm512_dpbf16_ps(sum[r][u], v, LOAD(x + r * k + i + u * LANES)); \
            }                                                                                   \
        for (int r = 0; r < ROWS; r++) {                                                        \
            __m512 all = sum[r][0];                                                             \
            for (int u = 1; u < UNROLL; u++) all = _mm512_add_ps(all, sum[r][u]);               \
            float rest = 0;                                                                     \
            for (int64_t j = i; j < k; j++) rest += widen(w[j]) * widen(x[r * k + j]);          \
            out[r] = _mm512_reduce_add_ps(all) + rest;                                          \
        }                                                                                       \
    }
typedef bf16 bf16_row;
#else
#define DOT_BF16(ROWS) DOT(bf16, bf16, widen, ROWS)
typedef float bf16_row;
#endif

/* y[rows, n] = x[rows, k] @ w[n, k]^T, all contiguous. Four rows at a time: the sums of more would
 * not fit the registers. */
#define PRODUCT(NAME, TYPE, ROW, STORE)                                                         \
    void g4ir_linear_##NAME(const TYPE *w, const ROW *x, TYPE *y, int64_t rows, int64_t n,      \
                            int64_t k, int threads) {                                           \
        _Pragma("omp parallel for schedule(static) num_threads(threads)")                       \
        for (int64_t o = 0; o < n; o++) {                                                       \
            const TYPE *row = w + o * k;                                                        \
            for (int64_t r = 0; r < rows; r += 4) {                                             \
                int64_t left = rows - r < 4 ? rows - r : 4;                                     \
                float out[4];                                                                   \
                switch (left) {                                                                 \
                    case 1: dot_##NAME##_1(row, x + r * k, out, k); break;                      \
                    case 2: dot_##NAME##_2(row, x + r * k, out, k); break;                      \
                    case 3: dot_##NAME##_3(row, x + r * k, out, k); break;                      \
                    default: dot_##NAME##_4(row, x + r * k, out, k);                            \
                }                                                                               \
                for (int64_t i = 0; i < left; i++) y[(r + i) * n + o] = STORE(out[i]);          \
            }                                                                                   \
        }                                                                                       \
    }

DOT_BF16(1)
DOT_BF16(2)
DOT_BF16(3)
DOT_BF16(4)
DOT(f32, float, same, 1)
DOT(f32, float, same, 2)
DOT(f32, float, same, 3)
DOT(f32, float, same, 4)

/* Whether the rows that the bf16 kernel takes are fp32. */
const int g4ir_bf16_rows_are_f32 = sizeof(bf16_row) == sizeof(float);

PRODUCT(bf16, bf16, bf16_row, narrow)
PRODUCT(f32, float, float, same)

/* ---- weights in codes (g4ir/ops/quant.py) ---- */

/* Codes that are read at a time; a group of codes with one scale is a multiple of that. */
#define BLOCK 32

/* Of a scale and of the result: whether it is fp32, or bf16. */
static inline float load(const void *p, int64_t i, int wide) {
    return wide ? ((const float *)p)[i] : widen(((const bf16 *)p)[i]);
}

static inline void store(void *p, int64_t i, float value, int wide) {
    if (wide)
        ((float *)p)[i] = value;
    else
        ((bf16 *)p)[i] = narrow(value);
}

/* Sixteen bytes hold the even codes of a block and the odd ones; x lies in that order too (see
 * pyops.py). The bits of e4m3 are those of a half 2^8 times smaller. */
#ifdef __AVX512BW__
typedef struct {
    __m512 first, second;
} block;

static inline block read_int8(const uint8_t *p) {
    __m512i a = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
    __m512i b = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p + 16)));
    return (block){_mm512_cvtepi32_ps(a), _mm512_cvtepi32_ps(b)};
}

static inline block read_int4(const uint8_t *p) {
    __m512i c = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    __m512 t = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    __m512 odd = _mm512_permutexvar_ps(_mm512_srli_epi32(c, 4), t);
    return (block){_mm512_permutexvar_ps(c, t), odd};
}

static inline block read_fp8(const uint8_t *p) {
    __m512i c = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p));
    c = _mm512_and_si512(_mm512_slli_epi16(c, 7), _mm512_set1_epi16((short)0xbfff));
    __m256i second = _mm512_extracti64x4_epi64(c, 1);
    return (block){_mm512_cvtph_ps(_mm512_castsi512_si256(c)), _mm512_cvtph_ps(second)};
}

#define ZERO ((block){_mm512_setzero_ps(), _mm512_setzero_ps()})

/* The sums change places: the next addition does not wait for this one. */
static inline block add_scaled(block sum, block v, const float *x, float s) {
    __m512 part = _mm512_mul_ps(v.first, _mm512_loadu_ps(x));
    part = _mm512_fmadd_ps(v.second, _mm512_loadu_ps(x + 16), part);
    return (block){sum.second, _mm512_fmadd_ps(part, _mm512_set1_ps(s), sum.first)};
}

static inline block add(block sum, block v, const float *x) {
    __m512 first = _mm512_fmadd_ps(v.first, _mm512_loadu_ps(x), sum.first);
    return (block){first, _mm512_fmadd_ps(v.second, _mm512_loadu_ps(x + 16), sum.second)};
}

static inline float total(block sum) {
    return _mm512_reduce_add_ps(_mm512_add_ps(sum.first, sum.second));
}
#else
typedef struct {
    float at[BLOCK];
} block;

#define ZERO ((block){{0}})
#define EACH(RESULT, VALUE)                                                                     \
    block RESULT;                                                                               \
    _Pragma("omp simd")                                                                         \
    for (int j = 0; j < BLOCK; j++) RESULT.at[j] = VALUE;                                       \
    return RESULT;

static inline block read_int8(const uint8_t *p) { EACH(v, (float)(int8_t)p[j]) }

static inline block read_int4(const uint8_t *p) {
    uint8_t c[BLOCK];
    for (int j = 0; j < BLOCK / 2; j++) c[j] = p[j] & 15;
    for (int j = 0; j < BLOCK / 2; j++) c[BLOCK / 2 + j] = p[j] >> 4;
    EACH(v, (float)((int)c[j] - 8))
}

static inline float half_of(uint32_t c) {
    uint32_t u = (c & 0x80) << 24 | (c & 0x7f) << 20;
    float f;
    memcpy(&f, &u, 4);
    return f * 0x1p112f;
}

static inline block read_fp8(const uint8_t *p) { EACH(v, half_of(p[j])) }

static inline block add_scaled(block sum, block w, const float *x, float s) {
    EACH(v, sum.at[j] + w.at[j] * x[j] * s)
}

static inline block add(block sum, block w, const float *x) { EACH(v, sum.at[j] + w.at[j] * x[j]) }

static inline float total(block sum) {
    float all = 0;
    for (int j = 0; j < BLOCK; j++) all += sum.at[j];
    return all;
}
#endif

/* `each` codes in a row share a scale; all k of them do where it is k. */
#define DOT_CODED(NAME, BYTES, UNIT, ROWS)                                                      \
    static inline void coded_##NAME##_##ROWS(const uint8_t *w, const void *scales, int wide,    \
                                             int64_t each, const float *x, float *out,          \
                                             int64_t k) {                                       \
        block sum[ROWS];                                                                        \
        for (int r = 0; r < ROWS; r++) sum[r] = ZERO;                                           \
        if (each == k) {                                                                        \
            for (int64_t i = 0; i < k; i += BLOCK, w += BYTES) {                                \
                __builtin_prefetch((const char *)w + AHEAD, 0, 2);                              \
                block v = read_##NAME(w);                                                       \
                for (int r = 0; r < ROWS; r++) sum[r] = add(sum[r], v, x + r * k + i);          \
            }                                                                                   \
            float s = load(scales, 0, wide) * UNIT;                                             \
            for (int r = 0; r < ROWS; r++) out[r] = total(sum[r]) * s;                          \
            return;                                                                             \
        }                                                                                       \
        int64_t left = each;                                                                    \
        float s = load(scales, 0, wide) * UNIT;                                                 \
        for (int64_t i = 0, g = 0; i < k; i += BLOCK, w += BYTES) {                             \
            if (!left) left = each, s = load(scales, ++g, wide) * UNIT;                         \
            left -= BLOCK;                                                                      \
            __builtin_prefetch((const char *)w + AHEAD, 0, 2);                                  \
            block v = read_##NAME(w);                                                           \
            for (int r = 0; r < ROWS; r++) sum[r] = add_scaled(sum[r], v, x + r * k + i, s);    \
        }                                                                                       \
        for (int r = 0; r < ROWS; r++) out[r] = total(sum[r]);                                  \
    }

/* y[rows, n] = x[rows, k] @ w[n, k]^T: k is a multiple of BLOCK, and so is k / groups. */
#define PRODUCT_CODED(NAME, BYTES, UNIT)                                                        \
    DOT_CODED(NAME, BYTES, UNIT, 1)                                                             \
    DOT_CODED(NAME, BYTES, UNIT, 2)                                                             \
    DOT_CODED(NAME, BYTES, UNIT, 3)                                                             \
    DOT_CODED(NAME, BYTES, UNIT, 4)                                                             \
    void g4ir_coded_##NAME(const uint8_t *w, const void *scales, int scales_wide,               \
                           const float *x, void *y, int y_wide, int64_t rows, int64_t n,        \
                           int64_t k, int64_t groups, int threads) {                            \
        int64_t bytes = k / BLOCK * BYTES, each = k / groups, size = scales_wide ? 4 : 2;       \
        _Pragma("omp parallel for schedule(static) num_threads(threads)")                       \
        for (int64_t o = 0; o < n; o++) {                                                       \
            const uint8_t *row = w + o * bytes;                                                 \
            const void *s = (const char *)scales + o * groups * size;                           \
            for (int64_t r = 0; r < rows; r += 4) {                                             \
                int64_t left = rows - r < 4 ? rows - r : 4;                                     \
                const float *from = x + r * k;                                                  \
                float out[4];                                                                   \
                switch (left) {                                                                 \
                    case 1: coded_##NAME##_1(row, s, scales_wide, each, from, out, k); break;   \
                    case 2: coded_##NAME##_2(row, s, scales_wide, each, from, out, k); break;   \
                    case 3: coded_##NAME##_3(row, s, scales_wide, each, from, out, k); break;   \
                    default: coded_##NAME##_4(row, s, scales_wide, each, from, out, k);         \
                }                                                                               \
                for (int64_t i = 0; i < left; i++) store(y, (r + i) * n + o, out[i], y_wide);   \
            }                                                                                   \
        }                                                                                       \
    }

/* y[n, k] = round(code * scale): rows of a weight for a library's product. */
#define DECODE(NAME, BYTES, UNIT)                                                               \
    void g4ir_decode_##NAME(const uint8_t *w, const void *scales, int scales_wide, void *y,     \
                            int y_wide, int64_t n, int64_t k, int64_t groups, int threads) {    \
        int64_t each = k / groups;                                                              \
        _Pragma("omp parallel for schedule(static) num_threads(threads)")                       \
        for (int64_t o = 0; o < n; o++)                                                         \
            for (int64_t i = 0; i < k; i += BLOCK) {                                            \
                float v[BLOCK], s = load(scales, o * groups + i / each, scales_wide) * UNIT;    \
                block b = read_##NAME(w + (o * k + i) / BLOCK * BYTES);                         \
                memcpy(v, &b, sizeof v);                                                        \
                in_order_##NAME(v);                                                             \
                if (y_wide)                                                                     \
                    for (int j = 0; j < BLOCK; j++) ((float *)y)[o * k + i + j] = v[j] * s;     \
                else                                                                            \
                    for (int j = 0; j < BLOCK; j++) ((bf16 *)y)[o * k + i + j] = narrow(v[j] * s); \
            }                                                                                   \
    }

static inline void in_order_int8(float *v) {}
static inline void in_order_fp8(float *v) {}

static inline void in_order_int4(float *v) {
    float w[BLOCK];
    memcpy(w, v, sizeof w);
    for (int j = 0; j < BLOCK / 2; j++) v[2 * j] = w[j], v[2 * j + 1] = w[BLOCK / 2 + j];
}

DECODE(int8, 32, 1)
DECODE(int4, 16, 1)
DECODE(fp8, 32, 0x1p8f)

PRODUCT_CODED(int8, 32, 1)
PRODUCT_CODED(int4, 16, 1)
PRODUCT_CODED(fp8, 32, 0x1p8f)
