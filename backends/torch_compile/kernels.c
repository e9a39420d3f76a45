/* Products of a weight [n, k] with a few rows. Every weight row is read from memory once, front to
 * back, by one thread; for one row that is as fast as memory delivers it. Sums are fp32. */
#include <stdint.h>
#include <string.h>
#ifdef __AVX512BF16__
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
