/* Dequantises rows of a weight in format FORM, bit-identical to g4ir/ops/quant.py, except that NaN in fp8 becomes
 * 480. */
#pragma once
#include "common.h"
#include "layout.h"

typedef uint8_t half_block __attribute__((vector_size(HALF)));
typedef uint32_t half_words __attribute__((vector_size(HALF)));

/* ---- a block as fp32 ---- */

typedef float eight __attribute__((vector_size(32)));
typedef int32_t eight_codes __attribute__((vector_size(32)));

/* Sign-extends eight codes. */
static inline eight_codes signed_codes(const uint8_t *p) {
#ifdef __AVX2__ /* compilers do not vectorise it themselves */
    return (eight_codes)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    eight_codes c;
    for (int i = 0; i < 8; i++) c[i] = (int8_t)p[i];
    return c;
#endif
}

static inline void read_int8(const uint8_t *p, float *to) {
#ifdef __AVX512BW__
    for (int i = 0; i < BLOCK; i += 16) {
        __m512i codes = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p + i)));
        _mm512_storeu_ps(to + i, _mm512_cvtepi32_ps(codes));
    }
#else
    UNROLLED for (int i = 0; i < BLOCK; i += 8) {
        eight v = __builtin_convertvector(signed_codes(p + i), eight);
        memcpy(to + i, &v, sizeof v);
    }
#endif
}

/* Decodes a block of e4m3 codes. Without AVX-512 a value is the lesser of `high`, which is right for normal codes, and
 * `low`, for subnormal ones (below 2^-6). */
static inline void read_fp8(const uint8_t *p, float *to) {
#ifdef __AVX512BW__ /* e4m3 bits, shifted, are an fp16 2^8 times smaller */
    __m512i c = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p));
    c = _mm512_and_si512(_mm512_slli_epi16(c, 7), _mm512_set1_epi16((short)0xbfff));
    __m512 by = _mm512_set1_ps(0x1p8f);
    _mm512_storeu_ps(to, _mm512_mul_ps(by, _mm512_cvtph_ps(_mm512_castsi512_si256(c))));
    _mm512_storeu_ps(to + 16, _mm512_mul_ps(by, _mm512_cvtph_ps(_mm512_extracti64x4_epi64(c, 1))));
#else
    UNROLLED for (int i = 0; i < BLOCK; i += 8) {
        eight_codes c = signed_codes(p + i), less;
        eight high = (eight)(((c & 0x7f) << 20) + (120 << 23)), low = 2 * high - 0x1p-6f;
        less = low < high;
        less = ((eight_codes)low & less) | ((eight_codes)high & ~less) | (c & INT32_MIN);
        memcpy(to + i, &less, sizeof less);
    }
#endif
}

/* Interleaves the even and the odd codes of a block, as fp32. */
static inline void read_halves(const half_block *halves, float *to) {
    uint8_t codes[BLOCK];
#ifdef __AVX2__
    __m128i even = (__m128i)halves[0], odd = (__m128i)halves[1];
    _mm_storeu_si128((__m128i *)codes, _mm_unpacklo_epi8(even, odd));
    _mm_storeu_si128((__m128i *)(codes + HALF), _mm_unpackhi_epi8(even, odd));
#else
    for (int j = 0; j < HALF; j++) codes[2 * j] = halves[0][j], codes[2 * j + 1] = halves[1][j];
#endif
    read_int8(codes, to);
}

/* Decodes a block of 4-bit codes: minus `zero`, or table values (IQ4, FP4). */
static inline void read_int4(const int form, const uint8_t *p, uint8_t zero, float *to) {
    half_block codes[2];
    memcpy(codes, p, HALF);
    codes[1] = (codes[0] >> 4) - zero;
    codes[0] = (codes[0] & 15) - zero;
    for (int j = 0; TABLE_OF(form) && j < HALF; j++) {
        codes[0][j] = (uint8_t)TABLE[TABLE_OF(form)][codes[0][j]];
        codes[1][j] = (uint8_t)TABLE[TABLE_OF(form)][codes[1][j]];
    }
    read_halves(codes, to);
}

static inline void read_int5(const uint8_t *p, uint8_t zero, float *to) {
    uint32_t high;
    half_words low;
    memcpy(&low, p, HALF), memcpy(&high, p + HALF, sizeof high);
    half_words upper = (half_words){high, high >> 2, high >> 4, high >> 6};
    half_block codes[2] = {(half_block)(low & 0x0f0f0f0f | (upper & 0x01010101) << 4) - zero,
                           (half_block)(low >> 4 & 0x0f0f0f0f | (upper >> 1 & 0x01010101) << 4) - zero};
    read_halves(codes, to);
}

/* Decodes a block of INT2, or with `high` of INT3. */
static inline void read_fourths(const int high, const uint8_t *p, float *to) {
    uint32_t words[3] = {0};
    uint8_t codes[BLOCK];
    memcpy(words, p, high ? INT3_BYTES : INT2_BYTES);
    for (int j = 0; j < 8; j++) {
        uint32_t word = words[j / 4] >> (j % 4 * 2) & 0x03030303;
        if (high) word |= (words[2] >> j & 0x01010101) << 2;
        for (int t = 0; t < 4; t++) codes[j / 4 * 16 + j % 4 + 4 * t] = (word >> (8 * t) & 7) - (high ? 4 : 2);
    }
    read_int8(codes, to);
}

typedef uint32_t block_words __attribute__((vector_size(BLOCK)));
typedef uint8_t block_bytes __attribute__((vector_size(BLOCK)));

/* Block b of a super-block of four: values times the integer scale of their half block (4 bits of UINT2's bytes). */
static inline void read_in_halves(const int form, const uint8_t *p, int b, float *to) {
    const int8_t *shared = (const int8_t *)p + SHARED_OF(form) + 2 * b;
    block_words low, high = {0};
    memcpy(&low, form == INT6 ? p + b % 2 * BLOCK : p, BLOCK);
    if (form == INT6) {
        memcpy(&high, p + SIXES_HIGH, BLOCK);
        low = low >> b / 2 * 4 & 0x0f0f0f0f;
        high = (high >> b * 2 & 0x03030303) << 4;
    } else
        low = low >> b * 2 & 0x03030303;
    if (form == INT3K) {
        half_words upper;
        memcpy(&upper, p + THREES_HIGH, HALF);
        half_words upper_halves[2] = {(upper >> b & 0x01010101) << 2, (upper >> (b + 4) & 0x01010101) << 2};
        memcpy(&high, upper_halves, BLOCK);
    }
    block_bytes numbers = (block_bytes)(low | high) - (uint8_t)(form == INT6 ? 32 : form == INT3K ? 4 : 0);
    read_int8((const uint8_t *)&numbers, to);
    float first = form == UINT2 ? shared[0] & 15 : shared[0], second = form == UINT2 ? shared[1] & 15 : shared[1];
    for (int j = 0; j < BLOCK; j++) to[j] *= j < HALF ? first : second;
}

/* Block b of a super-block of two: values times the e4m3 scale of their half block. */
static inline void read_fp4(const uint8_t *p, int b, float *to) {
    float scales[BLOCK];
    uint8_t shared[BLOCK] = {p[FP4_SHARED + 2 * b], p[FP4_SHARED + 2 * b + 1]};
    read_fp8(shared, scales);
    read_int4(FP4, p + b * HALF, 0, to);
    for (int j = 0; j < BLOCK; j++) to[j] *= scales[j / HALF];
}

/* Block b of a super-block of four: levels times the block's 7-bit scale. */
static inline void read_nonuniform(const int form, const uint8_t *p, int b, float *to) {
    int8_t levels[BLOCK], shared = p[BYTES_OF(form) - 4 + b];
    for (int j = 0; j < BLOCK; j++) {
        int code = form == NL4 ? p[b % 2 * BLOCK + j] >> b / 2 * 4 & 15 : p[j] >> 2 * b & 3;
        if (form == NL3) code |= (p[NL3_HIGH + j % HALF] >> (2 * b + j / HALF) & 1) << 2;
        levels[j] = TABLE[TABLE_OF(form)][code] + (shared & 1) * SHIFT_OF(form);
    }
    read_int8((const uint8_t *)levels, to);
    for (int j = 0; j < BLOCK; j++) to[j] *= shared >> 1;
}

/* Decodes block i of a row: codes minus zero point, or table values, times the scale of the block or half block if the
 * super-block stores one; the caller applies the group's scale, and minima. */
static inline void read_block(const int form, const uint8_t *row, int64_t i, float *to) {
    const uint8_t *p = row + i / BLOCKS_OF(form) * BYTES_OF(form);
    if (form == INT4 || form == IQ4 || form == MIN4) read_int4(form, p, form == INT4 ? 8 : 0, to);
    else if (form == INT5 || form == MIN5) read_int5(p, form == INT5 ? 16 : 0, to);
    else if (FOURTHS(form)) read_fourths(form == INT3, p, to);
    else if (form == FP4) read_fp4(p, i % BLOCKS_OF(form), to);
    else if (HALVES(form)) read_in_halves(form, p, i % BLOCKS_OF(form), to);
    else if (NONUNIFORM(form)) read_nonuniform(form, p, i % BLOCKS_OF(form), to);
    else if (form == FP8) read_fp8(p, to);
    else read_int8(p, to);
}

/* Codes of block b of a UINT4 or UINT5 super-block: the even ones to to[0], the odd ones to to[1]. `high`
 * (compile-time constant): whether codes have a fifth bit. */
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

/* Unpacks the 6-bit scales of eight blocks, or their minima, to a byte each. */
static inline uint64_t integers_above(const uint8_t *six, const int least) {
    uint32_t first, last;
    memcpy(&first, six + 4 * least, sizeof first);
    memcpy(&last, six + 8, sizeof last);
    last = (last >> 4 * least & 0x0f0f0f0f) | (first >> 2 & 0x30303030);
    return (uint64_t)last << 32 | (first & 0x3f3f3f3f);
}

static inline float integer_of(uint64_t bytes, int b) { return bytes >> 8 * b & 63; }

/* ---- rows ---- */

typedef struct {
    const uint8_t *codes;
    const void *scales;
    int scales_dtype;
    void *y;
    int dtype;
    int64_t k, groups;
} rows_to_decode;

static inline void write_block(const float *v, void *y, int dtype, int64_t at) {
    if (dtype == F32)
        memcpy((float *)y + at, v, BLOCK * sizeof *v);
    else
        for (int j = 0; j < BLOCK; j++) ((bf16 *)y)[at + j] = narrow(v[j]);
}

/* An empty asm that claims to modify the value keeps the compiler from reordering or fusing operations. */
#define AS_IT_IS(V) __asm__("" : "+m"(V))

/* Subtracts the minima of block i of a row from its values; `least`: the minimum of the group. */
static inline void subtract_minima(const uint8_t *row, int64_t i, float least, float *v) {
    const uint8_t *shared = row + i / 4 * TWOS_BYTES + TWOS_SHARED + i % 4 * 2;
    float below[2] = {least, least};
    if (FORM == UINT2) below[0] *= shared[0] >> 4, below[1] *= shared[1] >> 4;
    for (int j = 0; j < BLOCK; j++) v[j] -= below[j / HALF];
}

static void decode_blocks(const rows_to_decode *d, int64_t first, int64_t last) {
    const int per_group = 1 + MINIMA(FORM);
    int64_t each = d->k / d->groups * per_group, bytes = d->k / BLOCK / BLOCKS_OF(FORM) * BYTES_OF(FORM);
    for (int64_t o = first; o < last; o++)
        for (int64_t i = 0; i < d->k; i += BLOCK) {
            float v[BLOCK];
            int64_t at = o * d->groups + i / each * per_group;
            float s = load(d->scales, at, d->scales_dtype), t = s;
            if (!MINIMA(FORM)) t = load(d->scales, o * d->groups + (i + HALF) / each, d->scales_dtype);
            read_block(FORM, d->codes + o * bytes, i / BLOCK, v);
            for (int j = 0; j < BLOCK; j++) v[j] *= j < HALF ? s : t;
            if (MINIMA(FORM)) {
                AS_IT_IS(v);
                subtract_minima(d->codes + o * bytes, i / BLOCK, load(d->scales, at + 1, d->scales_dtype), v);
            }
            write_block(v, d->y, d->dtype, o * d->k + i);
        }
}

/* Scale and minimum of a super-block, and the 6-bit scales and minima of its blocks, a byte each. */
typedef struct {
    float scale, least;
    uint64_t scales, minima;
} factors_above;

static inline factors_above factors_at(const rows_to_decode *d, int64_t at, const uint8_t *end) {
    int64_t pair = at * ABOVE / (d->k / d->groups * 2) * 2;
    return (factors_above){load(d->scales, pair, d->scales_dtype),
                           load(d->scales, pair + 1, d->scales_dtype), integers_above(end - 12, 0),
                           integers_above(end - 12, 1)};
}

/* Rounds each product and then the difference (no FMA), as the op's definition does. */
static void decode_above(const rows_to_decode *d, int64_t first, int64_t last) {
    for (int64_t at = first * d->k / ABOVE; at < last * d->k / ABOVE; at++) {
        const uint8_t *from = d->codes + at * BYTES_OF(FORM);
        factors_above f = factors_at(d, at, from + BYTES_OF(FORM));
        for (int b = 0; b < 8; b++) {
            float v[BLOCK], below = f.least * integer_of(f.minima, b);
            half_block codes[2];
            numbers_above(FORM == UINT5, from, b, codes);
            read_halves(codes, v);
            for (int j = 0; j < BLOCK; j++) v[j] *= integer_of(f.scales, b);
            AS_IT_IS(v);
            for (int j = 0; j < BLOCK; j++) v[j] *= f.scale;
            AS_IT_IS(v);
            for (int j = 0; j < BLOCK; j++) v[j] -= below;
            write_block(v, d->y, d->dtype, at * ABOVE + b * BLOCK);
        }
    }
}

#ifdef __AVX512BW__
/* scale * code - least, in bf16, of the sixteen codes from `first` on, or of the table values of codes 0 to 15. */
static inline __m256i values_of(float first, float scale, float least) {
    __m128i bytes = _mm_loadu_si128((const __m128i *)TABLE[TABLE_OF(FORM)]);
    __m512 codes = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    codes = _mm512_add_ps(codes, _mm512_set1_ps(first));
    return in_bf16(_mm512_fmsub_ps(codes, _mm512_set1_ps(scale), _mm512_set1_ps(least)));
}

/* Same results as decode_blocks, six times as fast: looks up each group's sixteen values in a table. */
static void decode_int4_bf16(const rows_to_decode *d, int64_t first, int64_t last) {
    int64_t each = d->k / d->groups;
    for (int64_t g = first * d->groups; g < last * d->groups; g++) {
        float scale = load(d->scales, g, d->scales_dtype);
        __m512i values = _mm512_broadcast_i64x4(values_of(FORM == INT4 ? -8 : 0, scale, 0));
        for (int64_t i = g * each; i < (g + 1) * each; i += BLOCK) {
            __m512i c = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(d->codes + i / 2)));
            c = _mm512_or_si512(c, _mm512_slli_epi32(c, 12));
            _mm512_storeu_si512((bf16 *)d->y + i, _mm512_permutexvar_epi16(c, values));
        }
    }
}

/* The same results as decode_above for 16-bit scales, whose products with 6-bit integers and codes are exact. */
static void decode_above_bf16(const rows_to_decode *rows, int64_t first, int64_t last) {
    for (int64_t at = first * rows->k / ABOVE; at < last * rows->k / ABOVE; at++) {
        const uint8_t *from = rows->codes + at * BYTES_OF(FORM);
        factors_above f = factors_at(rows, at, from + BYTES_OF(FORM));
        for (int b = 0; b < 8; b++) {
            float d = f.scale * integer_of(f.scales, b), below = f.least * integer_of(f.minima, b);
            __m512i values = _mm512_broadcast_i64x4(values_of(0, d, below));
            __m512i c = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(from + b * HALF)));
            c = _mm512_and_si512(_mm512_or_si512(c, _mm512_slli_epi32(c, 12)),
                                 _mm512_set1_epi32(0xf000f));
            if (FORM == UINT5) {
                const uint8_t *p = from + ABOVE_HIGH + b % 2 * HALF;
                __m512i u = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
                u = _mm512_srl_epi32(u, _mm_cvtsi32_si128(b / 2 * 2));
                u = _mm512_or_si512(_mm512_slli_epi32(u, 4), _mm512_slli_epi32(u, 19));
                c = _mm512_or_si512(c, _mm512_and_si512(u, _mm512_set1_epi32(0x100010)));
                values = _mm512_inserti64x4(values, values_of(16, d, below), 1);
            }
            _mm512_storeu_si512((bf16 *)rows->y + at * ABOVE + b * BLOCK, _mm512_permutexvar_epi16(c, values));
        }
    }
}
#endif

static void decode_rows(const rows_to_decode *d, int64_t first, int64_t last) {
#ifdef __AVX512BW__
    if ((FORM == INT4 || FORM == IQ4) && d->dtype == BF16) return decode_int4_bf16(d, first, last);
    if (SUPER(FORM) && d->dtype == BF16 && d->scales_dtype != F32)
        return decode_above_bf16(d, first, last);
#endif
    if (SUPER(FORM)) return decode_above(d, first, last);
    decode_blocks(d, first, last);
}
