/* Vector access to tiles of quantised weights (layout.h): codes, scales, dequantisation. */
#pragma once
#include "common.h"
#include "layout.h"
#include "transpose.h"

/* Arguments of a matmul: quantised weight [n, k], and rows of x. */
typedef struct {
    const uint8_t *w;
    const void *scales;
    int scales_dtype;
    int64_t groups, each; /* scales per row; values per scale */
    const void *x;
    void *y;
    int dtype; /* of x and y */
    int64_t rows, n, k;
} coded;

static inline coded weight(const void *codes, const void *scales, int scales_dtype, int64_t n, int64_t k,
                           int64_t groups) {
    return (coded){.w = codes, .scales = scales, .scales_dtype = scales_dtype, .groups = groups,
                   .each = k / groups * (1 + MINIMA(FORM)), .n = n, .k = k};
}

/* Bytes of a row's codes. */
static inline int64_t row_bytes(const coded *p) { return p->k / BLOCK / BLOCKS_OF(FORM) * BYTES_OF(FORM); }
/* Bytes of a tile's codes, of a scale, and of a tile; addresses of a tile's codes and scales. */
static inline int64_t tile_codes(const coded *p) { return TILE * row_bytes(p); }
static inline int64_t tile_scale(const coded *p) { return p->scales_dtype == F32 ? 4 : 2; }
static inline int64_t tile_bytes(const coded *p) {
    return tile_codes(p) + TILE * p->groups * tile_scale(p);
}
static inline const uint8_t *codes_of_tile(const coded *p, int64_t tile) {
    return p->w + tile * tile_codes(p);
}
static inline const char *scales_of_tile(const coded *p, int64_t tile) {
    return (const char *)p->scales + tile * TILE * p->groups * tile_scale(p);
}

/* Converts a tile to row-major: codes, then scales; returns the address of the scales. */
static const void *rows_of_tile(const coded *p, int64_t tile, uint8_t *to) {
    int64_t words = row_bytes(p) / 4, size = tile_scale(p);
    const char *scales = scales_of_tile(p, tile);
    char *after = (char *)to + tile_codes(p);
    transpose((const uint32_t *)codes_of_tile(p, tile), TILE, (uint32_t *)to, words, words, TILE);
    for (int64_t g = 0; g < p->groups; g++)
        for (int r = 0; r < TILE; r++)
            memcpy(after + (r * p->groups + g) * size, scales + (g * TILE + r) * size, size);
    return after;
}

/* Converts row-major rows to a tile, zero-padded after the weight's last row; returns the address of the
 * scales. */
static const void *tile_of_rows(const coded *p, int64_t tile, uint8_t *to) {
    int64_t words = row_bytes(p) / 4, size = tile_scale(p), rows = least(TILE, p->n - tile * TILE);
    const char *scales = scales_of_tile(p, tile);
    char *after = (char *)to + tile_codes(p);
    if (rows < TILE) memset(to, 0, tile_bytes(p));
    transpose((const uint32_t *)codes_of_tile(p, tile), words, (uint32_t *)to, TILE, rows, words);
    for (int64_t g = 0; g < p->groups; g++)
        for (int64_t r = 0; r < rows; r++)
            memcpy(after + (g * TILE + r) * size, scales + (r * p->groups + g) * size, size);
    return after;
}

/* ---- vectors: one word, or value, of each of WORDS rows ---- */

/* Prefetch distance in bytes (to L2), mostly with one or two streams: hardware prefetchers cover four. */
#define TILE_AHEAD 4096
#define WORDS (WIDE / 4)
typedef uint32_t row_words __attribute__((vector_size(WIDE)));
typedef uint32_t any_row_words __attribute__((vector_size(WIDE), aligned(4), may_alias));
typedef int32_t row_sums __attribute__((vector_size(WIDE)));
typedef float row_floats __attribute__((vector_size(WIDE)));
typedef float any_row_floats __attribute__((vector_size(WIDE), aligned(4), may_alias));


/* Whether codes are signed: NEON's dot product is signed x signed; x86's takes unsigned codes. */
#ifdef __ARM_NEON
#define WITH_SIGN 1
#else
#define WITH_SIGN 0
#endif

static inline row_words words_at(const uint8_t *tile, int64_t word) {
    return *(const any_row_words *)(tile + word * TILE * 4);
}

static inline row_floats tile_scales(const void *scales, int64_t at, int dtype) {
    if (dtype == F32) return *(const any_row_floats *)((const float *)scales + at);
    const uint16_t *p = (const uint16_t *)scales + at;
#if WIDE == 64
    __m256i u = _mm256_loadu_si256((const __m256i *)p);
    if (dtype == F16) return _mm512_cvtph_ps(u);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(u), 16));
#elif WIDE == 32
    __m128i u = _mm_loadu_si128((const __m128i *)p);
    if (dtype == F16) return _mm256_cvtph_ps(u);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(u), 16));
#elif defined(__ARM_NEON)
    uint16x4_t u = vld1_u16(p);
    if (dtype == F16) return (row_floats)vcvt_f32_f16((float16x4_t)u);
    return (row_floats)vshll_n_u16(u, 16);
#else
    row_floats made;
    for (int r = 0; r < WORDS; r++) made[r] = load(p, r, dtype);
    return made;
#endif
}

/* Broadcasts `value`. */
static inline row_floats all_rows(float value) {
#if WIDE == 64
    return _mm512_set1_ps(value);
#elif WIDE == 32
    return _mm256_set1_ps(value);
#else
    return (row_floats){0} + value;
#endif
}

#ifdef __ARM_NEON
#define IN_VECTOR "w"
#else
#define IN_VECTOR "v"
#endif
/* A row's sums must not depend on the other rows: these two keep compilers from fusing or reordering
 * multiplications and additions. */
static inline row_floats product_of(row_floats a, row_floats b) {
    row_floats c = a * b;
    __asm__("" : "+" IN_VECTOR (c));
    return c;
}

static inline row_floats multiply_add(row_floats a, row_floats b, row_floats c) {
#if WIDE == 64
    return _mm512_fmadd_ps(a, b, c);
#elif WIDE == 32
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_NEON)
    return (row_floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return product_of(a, b) + c;
#endif
}

static inline row_floats smaller(row_floats a, row_floats b) {
#if WIDE == 64
    return _mm512_min_ps(a, b);
#elif WIDE == 32
    return _mm256_min_ps(a, b);
#else
    row_sums less = a < b;
    return (row_floats)(((row_sums)a & less) | ((row_sums)b & ~less));
#endif
}

/* ---- codes ---- */

#define NIBBLES 0x0f0f0f0fu
/* Bias of unpacked codes (code_word): code = value + BIAS. */
static const int BIAS[FORMS] = {[INT8] = WITH_SIGN ? 0 : 128, [INT4] = 8, [INT6] = 32, [INT5] = 16, [INT3K] = 4,
                                [IQ4] = WITH_SIGN ? 0 : 128, [INT2] = 2, [INT3] = 4,
                                [FP4] = WITH_SIGN ? 0 : 12,  [NL4] = WITH_SIGN ? 0 : 128,
                                [NL3] = WITH_SIGN ? 0 : 128, [NL2] = WITH_SIGN ? 0 : 128};
#define WORDS_OF(form) (BYTES_OF(form) / 4)

/* Looks up the table values of the codes, plus BIAS (unsigned bytes on x86). */
INLINED row_words values_listed(const int form, row_words codes) {
    uint8_t table[TILE] __attribute__((aligned(TILE)));
    UNROLLED for (int i = 0; i < TILE; i++) table[i] = (uint8_t)(TABLE[TABLE_OF(form)][i] + BIAS[form]);
#if WIDE == 64
    __m128i list = _mm_load_si128((const __m128i *)table);
    return (row_words)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(list), (__m512i)codes);
#elif WIDE == 32
    __m128i list = _mm_load_si128((const __m128i *)table);
    return (row_words)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(list), (__m256i)codes);
#elif defined(__ARM_NEON)
    return (row_words)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)codes);
#elif defined(__SSSE3__)
    return (row_words)_mm_shuffle_epi8(_mm_load_si128((const __m128i *)table), (__m128i)codes);
#else
    uint8_t *c = (uint8_t *)&codes;
    for (int i = 0; i < WIDE; i++) c[i] = table[c[i]];
    return codes;
#endif
}

/* Decodes values 4j to 4j + 3 of block `b` of the nonuniform super-block at `p`: level + shift + BIAS, a byte each. */
INLINED row_words nonuniform_word(const int form, const uint8_t *p, int b, int j) {
    row_words chosen = words_at(p, WORDS_OF(form) - 1) >> (8 * b) & 1;
    row_words shift = -chosen & 0x01010101u * SHIFT_OF(form);
    row_words codes = form == NL4 ? words_at(p, 8 * (b % 2) + j) >> (4 * (b / 2)) & NIBBLES
                                  : words_at(p, j) >> (2 * b) & 0x03030303u;
    if (form == NL3) codes |= (words_at(p, NL3_HIGH / 4 + j % 4) >> (2 * b + j / 4) & 0x01010101u) << 2;
    return values_listed(form, codes) + shift; /* no byte carries into the next */
}

/* Word j of the (biased, fp8: plain) codes of block `b` of the super-block at `p`. */
INLINED row_words code_word(const int form, const uint8_t *p, int b, int j) {
    if (form == FP8) return words_at(p, 8 * b + j);
    if (NONUNIFORM(form)) return nonuniform_word(form, p, b, j);
    if (form == INT8) return words_at(p, 8 * b + j) ^ (WITH_SIGN ? 0 : 0x80808080u);
    if (form == INT6) {
        row_words low = words_at(p, 8 * (b % 2) + j) >> (4 * (b / 2)) & NIBBLES;
        row_words high = words_at(p, SIXES_HIGH / 4 + j) >> (2 * b) & 0x03030303u;
        return low | high << 4;
    }
    if (form == INT3K || form == UINT2) {
        row_words low = words_at(p, j) >> (2 * b) & 0x03030303u;
        if (form == UINT2) return low;
        return low | (words_at(p, THREES_HIGH / 4 + j % 4) >> (b + j / 4 * 4) & 0x01010101u) << 2;
    }
    if (FOURTHS(form)) {
        row_words low = words_at(p, j / 4) >> (j % 4 * 2) & 0x03030303u;
        if (form == INT2) return low;
        row_words u = words_at(p, INT2_BYTES / 4);
        return low | (j < 2 ? u << (2 - j) : u >> (j - 2)) & 0x04040404u;
    }
    row_words c = words_at(p, 4 * b + j / 2) >> (j % 2 * 4) & NIBBLES;
    if (TABLE_OF(form)) return values_listed(form, c);
    if (form == INT5 || form == MIN5) {
        row_words u = words_at(p, HALF / 4);
        return c | (j < 4 ? u << (4 - j) : u >> (j - 4)) & 0x10101010u;
    }
    if (form != UINT5) return c;
    row_words upper = words_at(p, ABOVE_HIGH / 4 + 4 * (b % 2) + j / 2) >> (2 * (b / 2) + j % 2);
    return c | (upper & 0x01010101u) << 4;
}

/* signed_byte: byte `nth` of each word, sign-extended. integer_in: the unsigned 6-bit scale of block b, or with
 * `least` its minimum. */
static inline row_floats signed_byte(row_words w, int nth) {
    return __builtin_convertvector((row_sums)(w << (24 - 8 * nth)) >> 24, row_floats);
}
static inline row_floats integer_in(row_words low, row_words last, row_words first, int b,
                                    const int least) {
    row_words bits = b < 4 ? low >> (8 * b) & 63
                           : (last >> (8 * (b - 4) + 4 * least) & 15) |
                                 (first >> (8 * (b - 4) + 2) & 0x30);
    return __builtin_convertvector((row_sums)bits, row_floats);
}

/* The weight rows of one vector (a tile or part of a tile): addresses of their codes, scales and dot products. */
typedef struct {
    const uint8_t *codes;
    const char *scales;
    float *out;
} strip;
static inline strip strip_of(const coded *p, int64_t tile, int lane, float *out) {
    return (strip){codes_of_tile(p, tile) + lane * 4, scales_of_tile(p, tile) + lane * tile_scale(p),
                   out + lane};
}
#define EACH_STRIP UNROLLED for (int s = 0; s < strips; s++)

/* Decodes e4m3 code t of each word: the lesser of `high`, which is right for normal codes, and `low`, for subnormal
 * ones (below 2^-6). */
INLINED row_floats fp8_number(row_words codes, int t) {
    row_words c = codes << (24 - 8 * t);
    row_floats high = (row_floats)((c >> 4 & 0x07f00000u) + (120u << 23));
    row_floats low = multiply_add(high, all_rows(2), all_rows(-0x1p-6f));
    return (row_floats)((row_words)smaller(low, high) | (c & 0x80000000u));
}

/* Scales of the half blocks of block `b` of the super-block at `p`, and the minima to subtract. */
ALWAYS block_factors(const int form, const uint8_t *p, int b, row_floats scale,
                                 row_floats least, row_floats *factor, row_floats *below) {
    factor[0] = factor[1] = scale;
    below[0] = below[1] = MINIMA(form) ? least : (row_floats){0};
    if (HALVES(form)) {
        row_words shared = words_at(p, SHARED_OF(form) / 4 + b / 2);
        UNROLLED for (int h = 0; h < 2; h++) {
            int nth = b % 2 * 2 + h;
            row_floats integer = signed_byte(form == UINT2 ? shared & NIBBLES : shared, nth);
            factor[h] = product_of(scale, form == FP4 ? fp8_number(shared, nth) : integer);
            if (form == UINT2) below[h] = product_of(least, signed_byte(shared >> 4 & NIBBLES, nth));
        }
    }
    if (NONUNIFORM(form)) {
        row_sums integer = (row_sums)(words_at(p, WORDS_OF(form) - 1) << (24 - 8 * b)) >> 25;
        factor[0] = factor[1] = product_of(scale, __builtin_convertvector(integer, row_floats));
    }
    if (SUPER(form)) {
        row_words first = words_at(p, WORDS_OF(form) - 3);
        row_words second = words_at(p, WORDS_OF(form) - 2);
        row_words last = words_at(p, WORDS_OF(form) - 1);
        factor[0] = factor[1] = product_of(scale, integer_in(first, last, first, b, 0));
        below[0] = below[1] = product_of(least, integer_in(second, last, second, b, 1));
    }
}
