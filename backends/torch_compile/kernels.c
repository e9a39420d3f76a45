/* Products of a weight [n, k] with one to four rows. Every weight row is read once, front to back,
 * by one thread; for one row that is as fast as memory delivers the weight. Sums are fp32. */
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
#else
#define DOT_BF16(ROWS)                                                                        \
    static inline void dot_bf16_##ROWS(const bf16 *w, const bf16 *x, float *out, int64_t k) { \
        for (int r = 0; r < ROWS; r++) {                                                      \
            float sum = 0;                                                                    \
            _Pragma("omp simd reduction(+ : sum)")                                            \
            for (int64_t i = 0; i < k; i++) sum += widen(w[i]) * widen(x[r * k + i]);         \
            out[r] = sum;                                                                     \
        }                                                                                     \
    }
#endif

#define DOT_F32(ROWS)                                                                           \
    static inline void dot_f32_##ROWS(const float *w, const float *x, float *out, int64_t k) {  \
        enum { WIDTH = 32 };                                                                    \
        float sum[ROWS][WIDTH];                                                                 \
        memset(sum, 0, sizeof sum);                                                             \
        int64_t i = 0;                                                                          \
        for (; i + WIDTH <= k; i += WIDTH)                                                      \
            for (int r = 0; r < ROWS; r++) {                                                    \
                _Pragma("omp simd")                                                             \
                for (int j = 0; j < WIDTH; j++) sum[r][j] += w[i + j] * x[r * k + i + j];       \
            }                                                                                   \
        for (int r = 0; r < ROWS; r++) {                                                        \
            float all = 0;                                                                      \
            for (int j = 0; j < WIDTH; j++) all += sum[r][j];                                   \
            for (int64_t j = i; j < k; j++) all += w[j] * x[r * k + j];                         \
            out[r] = all;                                                                       \
        }                                                                                       \
    }

static inline float same(float f) { return f; }

#define PRODUCT(NAME, TYPE, STORE, ROWS)                                                         \
    static void product_##NAME##_##ROWS(const TYPE *w, const TYPE *x, TYPE *y, int64_t n,        \
                                        int64_t k, int threads) {                                \
        _Pragma("omp parallel for schedule(static) num_threads(threads)")                        \
        for (int64_t o = 0; o < n; o++) {                                                        \
            float out[ROWS];                                                                     \
            dot_##NAME##_##ROWS(w + o * k, x, out, k);                                           \
            for (int r = 0; r < ROWS; r++) y[r * n + o] = STORE(out[r]);                         \
        }                                                                                        \
    }

#define KERNELS(ROWS)                 \
    DOT_BF16(ROWS)                    \
    DOT_F32(ROWS)                     \
    PRODUCT(bf16, bf16, narrow, ROWS) \
    PRODUCT(f32, float, same, ROWS)

KERNELS(1)
KERNELS(2)
KERNELS(3)
KERNELS(4)

#define ENTRY(NAME, TYPE)                                                                     \
    void g4ir_linear_##NAME(const TYPE *w, const TYPE *x, TYPE *y, int64_t rows, int64_t n,   \
                            int64_t k, int threads) {                                         \
        static void (*const table[])(const TYPE *, const TYPE *, TYPE *, int64_t, int64_t,    \
                                     int) = {product_##NAME##_1, product_##NAME##_2,          \
                                             product_##NAME##_3, product_##NAME##_4};         \
        table[rows - 1](w, x, y, n, k, threads);                                              \
    }

/* y[rows, n] = x[rows, k] @ w[n, k]^T for 1 to 4 rows, all contiguous. */
ENTRY(bf16, bf16)
ENTRY(f32, float)
