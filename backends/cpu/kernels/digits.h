/* Converts rows of x to integers, for tiled weights on CPUs with integer dot products (VNNI, AVX2, SSSE3, dotprod): 15
 * bits (two 8-bit digits) times a power-of-two scale per block of 32, exact for values above 1/128 of the block's
 * maximum. With one digit (int8) the values equal those of the op fake_quantize. With integers a block of a weight row
 * (or half block, in formats with a scale for each) needs one floating-point multiply-add, one more for a minimum, and
 * no horizontal sum. fp8 codes are expanded to bf16 and multiplied with x in bf16. */
#pragma once
#include "tiles.h"

#ifdef INTEGERS
#if WIDE == 64 && defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define FP8_TILES
#endif
/* Whether the CPU lacks instructions for dot products of four bytes. */
#if WIDE < 64 && !defined(__AVXVNNI__) && !defined(__ARM_FEATURE_DOTPROD)
#define NO_DOT_PRODUCTS 1
#else
#define NO_DOT_PRODUCTS 0
#endif
/* How integers of x are stored. BYTES: one digit; DIGITS: two; PAIRS: pairs of 16 bits: bf16 for fp8 weights, else
 * int16, whose products AVX2 and SSE accumulate without saturation. */
enum { PAIRS, BYTES, DIGITS };
/* Formats that need no int16 on AVX2, since 16 bits hold a block's sums of products of bytes: codes below 16, or below
 * 32 (fp4: up to 24) with sums per half block. Codes of 5 and 6 bits would need more partial sums, which is slower from
 * four rows on. */
#define SUMS_IN_16_BITS(form)                                                                   \
    (NO_DOT_PRODUCTS && WIDE == 32 && ((form) == INT4 || (form) == UINT4 || (form) == MIN4 || FOURTHS(form) ||\
                         HALVES(form) && (form) != INT6))
/* How a pass over `rows` rows of x stores them. For formats that need no int16, pairs take half as many sums as two
 * digits, but more instructions to unpack codes: with four and eight rows 0.83 of the time for int4, 0.9 for two and
 * three bits, 0.97 for uint4; with one row 1.15 (Zen 4). */
#define PAIRS_FROM(form) ((form) == INT4 || (form) == UINT4 || (form) == MIN4 || (form) == FP4 ? 3 : 2)
static inline int stored_as(int form, int parts, int64_t rows) {
    if (form == FP8 || NO_DOT_PRODUCTS && !SUMS_IN_16_BITS(form)) return PAIRS;
    return SUMS_IN_16_BITS(form) && parts == 2 && rows >= PAIRS_FROM(form) ? PAIRS : parts;
}

/* A block of a row of x, permuted to the order of the weight's words. Its values are (256 high + low) * unit (one
 * digit: high * unit), or pairs * unit: the first pair for bytes 0 and 2 of a word, the second for bytes 1 and 3.
 * `unit` is NaN if a value is not finite. */
typedef struct {
    union {
        struct {
            int32_t high[BLOCK / 4], low[BLOCK / 4];
        };
        int32_t pairs[BLOCK / 2];
    };
    /* corrections for the codes' bias, -bias * sum of the integers (UINT2: the sums): per half block and block */
    int32_t less[2], both;
    float unit, sum; /* scale of the integers; sum of the values */
} digits;

/* Index in `pairs` of the pair of values for bytes 0 and 2 of word j, or with `odd` for bytes 1 and 3. */
static inline int pair_at(int form, int j, int odd) {
    return FOURTHS(form) ? j / 4 * 8 + odd * 4 + j % 4 : 2 * j + odd;
}

#ifdef FP8_TILES
/* Lookup tables e4m3 (without sign) -> bf16: upper and lower bytes. */
static uint8_t fp8_upper[128] __attribute__((aligned(64))), fp8_lower[128] __attribute__((aligned(64)));

__attribute__((constructor)) static void list_fp8(void) {
    for (int c = 0; c < 128; c++) {
        float size = c < 8 ? c * 0x1p-9f : (8 + c % 8) * 0x1p-10f * (1 << c / 8);
        bf16 number = c == 127 ? 0x7fc0 : narrow(size);
        fp8_upper[c] = number >> 8, fp8_lower[c] = (uint8_t)number;
    }
}

static inline row_words listed(const uint8_t *table, row_words codes) {
    const __m512i *t = (const __m512i *)table;
    return (row_words)_mm512_permutex2var_epi8(t[0], (__m512i)codes, t[1]);
}
#endif

#define EVERY_OTHER 0x00ff00ffu
typedef uint16_t word_halves __attribute__((vector_size(WIDE)));
/* Expands the four codes of a word to the operands of the dot product: bytes, or two pairs of 16 bits. */
static inline void factors_of(const int as, row_words codes, row_words *to) {
    to[0] = codes;
    if (as != PAIRS) return;
    row_words lower = codes, upper = {0};
#ifdef FP8_TILES
    lower = listed(fp8_lower, codes), upper = listed(fp8_upper, codes) | (codes & 0x80808080u);
#endif
#if NO_DOT_PRODUCTS
    to[0] = codes & EVERY_OTHER, to[1] = (row_words)((word_halves)codes >> 8);
    return;
#endif
    to[0] = (lower & EVERY_OTHER) | (upper & EVERY_OTHER) << 8;
    to[1] = (lower >> 8 & EVERY_OTHER) | (upper & ~EVERY_OTHER);
}

/* Adds the dot product of each lane with a word of x, which the instruction broadcasts from memory: compilers would
 * emit a separate load. */
#define ADD_PRODUCTS(INSTRUCTION, SUM, FACTORS, X)                                              \
    __asm__(INSTRUCTION " %2%{1to16%}, %1, %0" : "+v"(SUM) : "v"(FACTORS), "m"(*(X)))

/* Keeps compilers from reordering the additions of a sum: reordered, they take more registers than AVX2 has. */
#define ADD_NOW(SUM) __asm__ volatile("" : "+x"(SUM))

#if WIDE == 32
/* Broadcasts a word of x. Volatile: compilers would move it, or share it between strips, which takes more registers
 * than there are. */
static inline __m256i word_of_x(const int32_t *word) {
    __m256i x;
    __asm__ volatile("vpbroadcastd %1, %0" : "=x"(x) : "m"(*word));
    return x;
}
#endif

/* Accumulates the products of word j of a block of each vector with that of row r of x. */
ALWAYS add_word(const int form, const int vectors, const int as, row_words (*factors)[2], const digits *d,
                int j, row_sums (*sum)[TOGETHER][3], int r) {
#if WIDE == 64
    row_sums *all = sum[0][r];
    if (form == FP8) {
        ADD_PRODUCTS("vdpbf16ps", all[0], factors[0][0], d->pairs + 2 * j);
        ADD_PRODUCTS("vdpbf16ps", all[1], factors[0][1], d->pairs + 2 * j + 1);
    } else {
        ADD_PRODUCTS("vpdpbusd", all[0], factors[0][0], d->high + j);
        if (as == DIGITS) ADD_PRODUCTS("vpdpbusd", all[1], factors[0][0], d->low + j);
    }
#elif defined(__ARM_NEON)
    row_sums *all = sum[0][r];
    int8x16_t codes = (int8x16_t)factors[0][0];
    all[0] = (row_sums)vdotq_s32((int32x4_t)all[0], codes, (int8x16_t)vdupq_n_s32(d->high[j]));
    if (as == DIGITS) all[1] = (row_sums)vdotq_s32((int32x4_t)all[1], codes, (int8x16_t)vdupq_n_s32(d->low[j]));
#elif WIDE == 16
    UNROLLED for (int i = 0; i < 2; i++)
        sum[0][r][0] += (row_sums)_mm_madd_epi16((__m128i)factors[0][i], _mm_set1_epi32(d->pairs[pair_at(form, j, i)]));
#else
    const int pairs = as == PAIRS, words = pairs ? 2 : as;
    UNROLLED for (int i = 0; i < words; i++) {
        __m256i x = word_of_x(pairs ? d->pairs + pair_at(form, j, i) : (i ? d->low : d->high) + j);
        UNROLLED for (int v = 0; v < vectors; v++) {
            row_sums *to = &sum[v][r][pairs ? 0 : i];
            __m256i codes = (__m256i)factors[v][pairs ? i : 0];
#ifdef __AVXVNNI__
            *to = (row_sums)_mm256_dpbusd_avx_epi32((__m256i)*to, codes, x);
#else
            *to = pairs ? *to + (row_sums)_mm256_madd_epi16(codes, x)
                        : (row_sums)_mm256_add_epi16((__m256i)*to, _mm256_maddubs_epi16(codes, x));
#endif
            ADD_NOW(*to);
        }
    }
#endif
}

/* Initialises the partial sums with the bias correction `less`; total_of combines them to one fp32 sum per lane. */
static inline void start_sums(const int as, int32_t less, row_sums *sum) {
    sum[0] = sum[1] = sum[2] = (row_sums){0};
    sum[as == PAIRS ? 0 : NO_DOT_PRODUCTS ? 2 : as == DIGITS] += less;
}

static inline row_floats total_of(const int form, const int as, const row_sums *sum) {
    if (form == FP8) return (row_floats)sum[0] + (row_floats)sum[1];
#if WIDE == 32 && NO_DOT_PRODUCTS
    if (as != PAIRS) {
        __m256i all = _mm256_madd_epi16((__m256i)sum[0], _mm256_set1_epi16(as == DIGITS ? 256 : 1));
        if (as == DIGITS) all = _mm256_add_epi32(all, _mm256_madd_epi16((__m256i)sum[1], _mm256_set1_epi16(1)));
        return __builtin_convertvector((row_sums)all + sum[2], row_floats);
    }
#endif
    row_sums all = as == DIGITS ? (sum[0] << 8) + sum[1] : sum[0];
    return __builtin_convertvector(all, row_floats);
}

/* Returns the factor that scales values of up to this exponent (of bf16, biased) to 15-bit integers, and sets the
 * inverse, `unit`; both are 0 if the exponent is too small. */
static inline float to_15_bits(uint32_t exponent, float *unit) {
    uint32_t inverse = exponent < 15 ? 0 : (268 - exponent) << 23;
    uint32_t u = exponent < 15 ? 0 : (exponent - 14) << 23;
    float times;
    memcpy(&times, &inverse, 4);
    memcpy(unit, &u, 4);
    return times;
}

/* Marks a block with a NaN or infinity: all its products become NaN. */
static void not_finite(digits *to) {
    memset(to, 0, sizeof *to);
    to->unit = to->sum = NAN;
}

/* Returns the factor to 15-bit integers; for one digit (8 bits) values are divided by `unit` instead. `top`: bits of
 * the block's maximum absolute value in bf16. */
static inline float integers_by(int parts, uint32_t top, float *unit) {
    /* the block's maximum has at most 254 * 2^7 units: 255 * 2^7 would need a high digit of 128 */
    float times = to_15_bits((top >> 7) + ((top & 0x7f) == 0x7f), unit);
    if (parts == 1) *unit = top ? widen(top) / 127 : 1;
    return times;
}

static inline void set_sums(int form, const int32_t *sums, digits *to) {
    const int by = form == UINT2 ? 1 : -BIAS[form];
    to->less[0] = by * sums[0], to->less[1] = by * sums[1];
    to->both = to->less[0] + to->less[1];
    to->sum = (float)(sums[0] + sums[1]) * to->unit;
}

/* Only for formats with minima: the sum of x's values over a half block (UINT2), else over the block. */
static inline float sum_of_part(const int form, const digits *d, int half) {
    return HALVES(form) ? (float)d->less[half] * d->unit : d->sum;
}

#if WIDE > 16
/* Permutes a block's bytes to the order of the weight's words. */
static inline __m256i in_order(int form, __m256i bytes) {
    __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    __m128i fourths = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    if (FOURTHS(form)) return _mm256_shuffle_epi8(bytes, _mm256_broadcastsi128_si256(fourths));
    return EVEN_ODD(form) ? _mm256_shuffle_epi8(bytes, _mm256_broadcastsi128_si256(order)) : bytes;
}

/* Maximum absolute value of a block, as bits of a bf16. */
static inline uint32_t top_of(__m256i first, __m256i second) {
    __m256i sign = _mm256_set1_epi16(0x7fff);
    __m256i most = _mm256_max_epu16(_mm256_and_si256(first, sign), _mm256_and_si256(second, sign));
    __m128i few = _mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    few = _mm_minpos_epu16(_mm_xor_si128(few, _mm_set1_epi16(-1)));
    return ~_mm_cvtsi128_si32(few) & 0xffff;
}
#endif

#if WIDE == 64
static inline __m512 sixteen(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

/* Sums of the two half blocks. */
static inline __m128i sums_of(__m512i all) {
    __m512i pairs = _mm512_madd_epi16(all, _mm512_set1_epi16(1));
    __m256i few = _mm256_hadd_epi32(_mm512_castsi512_si256(pairs), _mm512_extracti64x4_epi64(pairs, 1));
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(few), _mm256_extracti128_si256(few, 1));
    return _mm_hadd_epi32(four, four);
}

static inline void block_digits(int parts, int form, const bf16 *x, digits *to) {
    __m512i given = _mm512_loadu_si512(x), all;
    __m256i first = _mm512_castsi512_si256(given), second = _mm512_extracti64x4_epi64(given, 1);
    uint32_t top = top_of(first, second);
    if (top >= 0x7f80) {
        not_finite(to);
        return;
    }
    __m512 times = _mm512_set1_ps(integers_by(parts, top, &to->unit)), unit = _mm512_set1_ps(to->unit);
    __m512 v[2] = {sixteen(first), sixteen(second)};
    __m256i halves[2];
    UNROLLED for (int h = 0; h < 2; h++) {
        v[h] = parts == 1 ? _mm512_div_ps(v[h], unit) : _mm512_mul_ps(v[h], times);
        if (form == FP8) {
            __m512i u = _mm512_castps_si512(_mm512_roundscale_ps(v[h], _MM_FROUND_TO_NEAREST_INT));
            halves[h] = _mm512_cvtepi32_epi16(_mm512_srli_epi32(u, 16));
        } else
            halves[h] = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(v[h]));
    }
    all = _mm512_inserti64x4(_mm512_castsi256_si512(halves[0]), halves[1], 1);
    if (form == FP8) {
        if (parts == 2) all = given, to->unit = 1;
        all = _mm512_shufflehi_epi16(_mm512_shufflelo_epi16(all, 0xd8), 0xd8);
        _mm512_storeu_si512(to->pairs, all);
        to->both = 0;
        return;
    }
    __m512i upper = _mm512_srai_epi16(_mm512_add_epi16(all, _mm512_set1_epi16(128)), 8);
    if (parts == 1) upper = all;
    _mm256_storeu_si256((__m256i *)to->high, in_order(form, _mm512_cvtepi16_epi8(upper)));
    _mm256_storeu_si256((__m256i *)to->low, in_order(form, _mm512_cvtepi16_epi8(all)));
    int32_t sums[4];
    _mm_storeu_si128((__m128i *)sums, sums_of(all));
    set_sums(form, sums, to);
}
#elif WIDE == 32
/* Converts a block of x to integers: to pairs of 16 bits with `pairs`, else to digits. */
static inline void integers_of_block(int parts, int form, int pairs, const bf16 *x, digits *to) {
    __m256i first = _mm256_loadu_si256((const __m256i *)x), second = _mm256_loadu_si256((const __m256i *)x + 1);
    uint32_t top = top_of(first, second);
    if (top >= 0x7f80) {
        not_finite(to);
        return;
    }
    float times = integers_by(parts, top, &to->unit);
    __m256i eight[4], all[2], upper[2], bytes[2];
    UNROLLED for (int i = 0; i < 4; i++) {
        __m256i u = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x + i));
        __m256 v = _mm256_castsi256_ps(_mm256_slli_epi32(u, 16));
        v = parts == 1 ? _mm256_div_ps(v, _mm256_set1_ps(to->unit)) : _mm256_mul_ps(v, _mm256_set1_ps(times));
        eight[i] = _mm256_cvtps_epi32(v);
    }
    int32_t sums[2];
    UNROLLED for (int h = 0; h < 2; h++) {
        all[h] = _mm256_permute4x64_epi64(_mm256_packs_epi32(eight[2 * h], eight[2 * h + 1]), 0xd8);
        __m256i twos = _mm256_madd_epi16(all[h], _mm256_set1_epi16(1));
        __m128i fours = _mm_add_epi32(_mm256_castsi256_si128(twos), _mm256_extracti128_si256(twos, 1));
        fours = _mm_hadd_epi32(fours, fours);
        sums[h] = _mm_cvtsi128_si32(_mm_hadd_epi32(fours, fours));
    }
    set_sums(form, sums, to);
    if (pairs && FOURTHS(form)) {
        UNROLLED for (int h = 0; h < 2; h++) {
            __m128i low = _mm256_castsi256_si128(all[h]), high = _mm256_extracti128_si256(all[h], 1);
            _mm_storeu_si128((__m128i *)to->pairs + 2 * h, _mm_unpacklo_epi16(low, high));
            _mm_storeu_si128((__m128i *)to->pairs + 2 * h + 1, _mm_unpackhi_epi16(low, high));
        }
        return;
    }
    if (pairs) {
        __m128i order = EVEN_ODD(form) ? _mm_setr_epi8(0, 1, 8, 9, 4, 5, 12, 13, 2, 3, 10, 11, 6, 7, 14, 15)
                                       : _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
        UNROLLED for (int h = 0; h < 2; h++)
            _mm256_storeu_si256((__m256i *)to->pairs + h,
                                _mm256_shuffle_epi8(all[h], _mm256_broadcastsi128_si256(order)));
        return;
    }
    UNROLLED for (int h = 0; h < 2; h++) {
        upper[h] = _mm256_srai_epi16(_mm256_add_epi16(all[h], _mm256_set1_epi16(128)), 8);
        if (parts == 1) upper[h] = all[h];
        all[h] = _mm256_and_si256(all[h], _mm256_set1_epi16(255));
    }
    bytes[0] = _mm256_packs_epi16(upper[0], upper[1]), bytes[1] = _mm256_packus_epi16(all[0], all[1]);
    UNROLLED for (int h = 0; h < 2; h++) bytes[h] = in_order(form, _mm256_permute4x64_epi64(bytes[h], 0xd8));
    _mm256_storeu_si256((__m256i *)to->high, bytes[0]);
    _mm256_storeu_si256((__m256i *)to->low, bytes[1]);
}
#else
/* The same without AVX2. */
static inline void integers_of_block(int parts, int form, int pairs, const bf16 *x, digits *to) {
    uint16_t top = 0;
    for (int j = 0; j < BLOCK; j++) {
        uint16_t size = x[j] & 0x7fff;
        top = size > top ? size : top;
    }
    if (top >= 0x7f80) {
        not_finite(to);
        return;
    }
    float times = integers_by(parts, top, &to->unit);
    int32_t all[BLOCK], sums[2] = {0};
    for (int j = 0; j < BLOCK; j++)
        all[j] = (int32_t)rintf(parts == 1 ? widen(x[j]) / to->unit : widen(x[j]) * times);
    for (int j = 0; j < BLOCK; j++) sums[j / HALF] += all[j];
    set_sums(form, sums, to);
    int8_t *high = (int8_t *)to->high, *low = (int8_t *)to->low;
    for (int j = 0; j < BLOCK; j++) { /* value value_at(j) is for byte j % 4 of word j / 4 */
        int value = all[value_at(form, j)];
        if (pairs)
            ((int16_t *)(to->pairs + pair_at(form, j / 4, j % 2)))[j % 4 / 2] = value;
        else
            high[j] = parts == 1 ? value : (value + 128) >> 8, low[j] = (int8_t)value;
    }
}
#endif

/* Converts a block to one digit or two, as bytes, or with `pairs` (not on AVX-512) as pairs of 16 bits. */
static inline void quantize_block(int parts, int form, int pairs, const bf16 *x, digits *to) {
#if WIDE == 64
    block_digits(parts, form, x, to);
#else
    integers_of_block(parts, form, pairs, x, to);
#endif
}
#endif
