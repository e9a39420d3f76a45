/* Products of quantised weights (g4ir/ops/quant.py) with rows of x in fp32. */

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

/* The same of int5, whose blocks lie alone: the low 4 bits, the upper one. */
#define FIVES_BYTES 20

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

/* Sixteen numbers in bf16, as narrow() has them. */
static inline __m256i in_bf16(__m512 v) {
    __m512i u = _mm512_castps_si512(v), even = _mm512_set1_epi32(0x7fff);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    u = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, even)), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(u, nan, _mm512_set1_epi32(0x7fc0)));
}

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

/* The even codes and then the odd ones of a block of int5. */
static inline void codes_int5(const uint8_t *w, int64_t i, half_block *to) {
    const uint8_t *p = w + i / BLOCK * FIVES_BYTES;
    uint32_t high;
    half_words low;
    memcpy(&low, p, HALF), memcpy(&high, p + HALF, sizeof high);
    half_words upper = (half_words){high, high >> 2, high >> 4, high >> 6};
    to[0] = (half_block)(low & 0x0f0f0f0f | (upper & 0x01010101) << 4) - 16;
    to[1] = (half_block)(low >> 4 & 0x0f0f0f0f | (upper >> 1 & 0x01010101) << 4) - 16;
}

static inline block read_int5(const uint8_t *w, int64_t i) {
    half_block codes[2];
    codes_int5(w, i, codes);
    return read_int8((const uint8_t *)codes, 0);
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

static inline block ordered_int5(const uint8_t *w, int64_t i) {
    half_block codes[2];
    codes_int5(w, i, codes);
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
#define as_codes_int5 as_codes_int4
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
    DOTS_GROUPS(groupwise_##NAME)

DOT_CODED(int8, 32, 1)
DOT_CODED(int6, 26, 1)
DOT_CODED(int5, FIVES_BYTES, 1)
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
    DOTS_GROUPS(groupwise_##NAME)

DOT_ABOVE(uint4, 0)
DOT_ABOVE(uint5, 1)
/* Scales of a row are two at least. */
#define rowwise_uint4s groupwise_uint4s
#define rowwise_uint5s groupwise_uint5s

