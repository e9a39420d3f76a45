/* Products of quantised weights in tiles: 16 rows of a weight whose words of four bytes alternate, so
 * that a vector has one word of each row. A row's bytes are those of quantised.h, and its scales
 * alternate in the same way, element by element. Rows of x are integers of 15 bits (two digits of 8)
 * times a power of two for each block of 32, exact where a number is at least 1/128 of the largest of
 * its block; with one digit they are what fake_quantize makes. Integer sums need no horizontal sums and
 * no floating point but one multiply-add a block. Codes of fp8 are multiplied as what they are in
 * bf16, with x as it is. */
#define TILE 16
/* Bytes that are read ahead of their use, into the second cache, of one run or two; CPUs read four ahead by
 * themselves. */
#define TILE_AHEAD 4096
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define WIDE 64
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define WIDE 32
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#define WIDE 16
#endif

/* Bytes of the codes and scales of a tile, and where they begin. */
static inline int64_t tile_codes(const product *p) { return TILE * (p->k * p->bytes / 256); }
static inline int64_t tile_scale(const product *p) { return p->scales_dtype == F32 ? 4 : 2; }
static inline int64_t tile_bytes(const product *p) {
    return tile_codes(p) + TILE * p->groups * tile_scale(p);
}
static inline const uint8_t *codes_of_tile(const product *p, int64_t tile) {
    return p->w + tile * tile_codes(p);
}
static inline const char *scales_of_tile(const product *p, int64_t tile) {
    return (const char *)p->scales + tile * TILE * p->groups * tile_scale(p);
}

/* Writes the rows of a tile, codes and then scales, one behind the other; returns where scales begin. */
static const void *rows_of_tile(const product *p, int64_t tile, uint8_t *to) {
    const uint32_t *words = (const uint32_t *)codes_of_tile(p, tile);
    const char *scales = scales_of_tile(p, tile);
    int64_t count = tile_codes(p) / TILE / 4, size = tile_scale(p);
    char *after = (char *)to + tile_codes(p);
    for (int64_t w = 0; w < count; w++)
        for (int r = 0; r < TILE; r++) memcpy(to + (r * count + w) * 4, words + w * TILE + r, 4);
    for (int64_t g = 0; g < p->groups; g++)
        for (int r = 0; r < TILE; r++)
            memcpy(after + (r * p->groups + g) * size, scales + (g * TILE + r) * size, size);
    return after;
}

typedef struct {
    const product *p;
    const dots *of;
} tiled_rows;

/* Products of tiles row by row, in fp32. */
static int tile_rows(void *context, units *left) {
    const tiled_rows *m = context;
    product own = *m->p;
    uint8_t *rows = malloc(tile_bytes(m->p));
    void *form = rows ? formed(&own) : NULL;
    for (int64_t t; form && (t = take_unit(left)) >= 0;) {
        own.scales = rows_of_tile(m->p, t, rows), own.w = rows;
        own.y = (char *)m->p->y + t * TILE * (own.dtype == F32 ? 4 : 2);
        for (int64_t r = 0; r < own.rows; r += CODED_TOGETHER) {
            int64_t here = least(CODED_TOGETHER, own.rows - r);
            multiply_part(own, m->of + here, 0, TILE, r, here);
        }
    }
    free(form), free(rows);
    return !form;
}

static int multiply_from_tiles(const product *p, const dots *of, int threads) {
    tiled_rows m = {p, of};
    return run_region(tile_rows, &m, p->n / TILE, threads);
}

#ifdef WIDE
#if WIDE == 32 /* at level 3 compilers take minutes, with nothing gained */
#pragma GCC push_options
#pragma GCC optimize("O2")
#endif
#define WORDS (WIDE / 4)
typedef uint32_t row_words __attribute__((vector_size(WIDE)));
typedef uint32_t any_row_words __attribute__((vector_size(WIDE), aligned(4), may_alias));
typedef int32_t row_sums __attribute__((vector_size(WIDE)));
typedef float row_floats __attribute__((vector_size(WIDE)));
typedef float any_row_floats __attribute__((vector_size(WIDE), aligned(4), may_alias));

#if WIDE == 64 && defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define FP8_TILES
#endif
/* Whether codes have their signs: instructions multiply bytes with a sign, and not bytes without. */
#define WITH_SIGN (WIDE == 16)
/* Whether rows of x are pairs of 16 bits: numbers in bf16, or integers, which AVX2 adds up without loss. */
#define IN_16_BITS(form) (WIDE == 32 || (form) == FP8)

/* A block of a row of x in the order of a form's words: its numbers are (256 high + low) * unit, or
 * pairs * unit, each for the first and third byte of a word, or the others. `unit` is NaN where a
 * number is not finite. */
typedef struct {
    union {
        struct {
            int32_t high[BLOCK / 4], low[BLOCK / 4];
        };
        int32_t pairs[BLOCK / 2];
    };
    int32_t less[2], both; /* what codes are stored above themselves by, of each half; of both */
    float unit, sum; /* sum: of the numbers */
} digits;

static inline row_words words_at(const uint8_t *tile, int64_t word) {
    return *(const any_row_words *)(tile + word * TILE * 4);
}

#ifdef FP8_TILES
/* The upper and the lower bytes of all codes of e4m3 without sign, in bf16. */
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
/* What four codes of a word are multiplied as: bytes, or two pairs of 16 bits. */
static inline void factors_of(const int form, row_words codes, row_words *to) {
    to[0] = codes;
    if (!IN_16_BITS(form)) return;
    row_words lower = codes, upper = {0};
#ifdef FP8_TILES
    lower = listed(fp8_lower, codes), upper = listed(fp8_upper, codes) | (codes & 0x80808080u);
#endif
    to[0] = (lower & EVERY_OTHER) | (upper & EVERY_OTHER) << 8;
    to[1] = (lower >> 8 & EVERY_OTHER) | (upper & ~EVERY_OTHER);
}

/* Multiplies each lane with the same word of x; compilers load the word by an instruction of its own. */
#define ADD_PRODUCTS(INSTRUCTION, SUM, FACTORS, X)                                              \
    __asm__(INSTRUCTION " %2%{1to16%}, %1, %0" : "+v"(SUM) : "v"(FACTORS), "m"(*(X)))

/* Adds to the sums of each row the products of word j of a block with that of a row of x. */
static inline void add_word(const int form, const int parts, const row_words *factors,
                            const digits *d, int j, row_sums *sum) {
#if WIDE == 64
    if (form == FP8) {
        ADD_PRODUCTS("vdpbf16ps", sum[0], factors[0], d->pairs + 2 * j);
        ADD_PRODUCTS("vdpbf16ps", sum[1], factors[1], d->pairs + 2 * j + 1);
    } else {
        ADD_PRODUCTS("vpdpbusd", sum[0], factors[0], d->high + j);
        if (parts == 2) ADD_PRODUCTS("vpdpbusd", sum[1], factors[0], d->low + j);
    }
#elif WIDE == 16
    int8x16_t codes = (int8x16_t)factors[0];
    sum[0] = (row_sums)vdotq_s32((int32x4_t)sum[0], codes, (int8x16_t)vdupq_n_s32(d->high[j]));
    if (parts == 2) sum[1] = (row_sums)vdotq_s32((int32x4_t)sum[1], codes, (int8x16_t)vdupq_n_s32(d->low[j]));
#else
    UNROLLED for (int i = 0; i < 2; i++) {
        __m256i x = _mm256_set1_epi32(d->pairs[2 * j + i]);
        sum[0] += (row_sums)_mm256_madd_epi16((__m256i)factors[i], x);
    }
#endif
}

/* What sums start with that are to be `less`, and what they come to. */
static inline void start_sums(const int form, const int parts, int32_t less, row_sums *sum) {
    sum[0] = sum[1] = (row_sums){0};
    sum[parts == 2 && !IN_16_BITS(form)] += less;
}

static inline row_floats total_of(const int form, const int parts, const row_sums *sum) {
    if (form == FP8) return (row_floats)sum[0] + (row_floats)sum[1];
    row_sums all = parts == 2 && !IN_16_BITS(form) ? (sum[0] << 8) + sum[1] : sum[0];
    return __builtin_convertvector(all, row_floats);
}

static inline row_floats tile_scales(const void *scales, int64_t at, int dtype) {
    if (dtype == F32) return *(const any_row_floats *)((const float *)scales + at);
    const uint16_t *p = (const uint16_t *)scales + at;
#if WIDE == 64
    __m256i u = _mm256_loadu_si256((const __m256i *)p);
    if (dtype == F16) return _mm512_cvtph_ps(u);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(u), 16));
#elif WIDE == 16
    uint16x4_t u = vld1_u16(p);
    if (dtype == F16) return (row_floats)vcvt_f32_f16((float16x4_t)u);
    return (row_floats)vshll_n_u16(u, 16);
#else
    __m128i u = _mm_loadu_si128((const __m128i *)p);
    if (dtype == F16) return _mm256_cvtph_ps(u);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(u), 16));
#endif
}

/* Each number of a vector is `value`. */
static inline row_floats all_rows(float value) { return (row_floats){0} + value; }

#if WIDE == 16
#define IN_VECTOR "w"
#else
#define IN_VECTOR "v"
#endif
/* A row has the same sums beside any others: compilers keep the order of a product and of a * b + c. */
static inline row_floats product_of(row_floats a, row_floats b) {
    row_floats c = a * b;
    __asm__("" : "+" IN_VECTOR (c));
    return c;
}

static inline row_floats multiply_add(row_floats a, row_floats b, row_floats c) {
#if WIDE == 64
    return _mm512_fmadd_ps(a, b, c);
#elif WIDE == 16
    return (row_floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return _mm256_fmadd_ps(a, b, c);
#endif
}

#define NIBBLES 0x0f0f0f0fu
static const int BIAS[FORMS] = {[INT8] = WITH_SIGN ? 0 : 128, [INT4] = 8, [INT6] = 32, [INT5] = 16};
#define MINIMA(form) ((form) == UINT4 || (form) == UINT5)
/* Whether words have even numbers and odd ones, as bytes of two 4-bit codes do. */
#define EVEN_ODD(form) ((form) == INT4 || (form) >= UINT4)

/* Word j of the codes, without sign but for fp8, of block `b` of those that lie together at `p`. */
static inline row_words code_word(const int form, const uint8_t *p, int b, int j) {
    if (form == FP8) return words_at(p, 8 * b + j);
    if (form == INT8) return words_at(p, 8 * b + j) ^ (WITH_SIGN ? 0 : 0x80808080u);
    if (form == INT6) {
        row_words low = words_at(p, 8 * (b % 2) + j) >> (4 * (b / 2)) & NIBBLES;
        row_words high = words_at(p, SIXES_HIGH / 4 + j) >> (2 * b) & 0x03030303u;
        return low | high << 4;
    }
    row_words c = words_at(p, 4 * b + j / 2) >> (j % 2 * 4) & NIBBLES;
    if (form == INT5) {
        row_words u = words_at(p, HALF / 4);
        return c | (j < 4 ? u << (4 - j) : u >> (j - 4)) & 0x10101010u;
    }
    if (form != UINT5) return c;
    row_words upper = words_at(p, ABOVE_HIGH / 4 + 4 * (b % 2) + j / 2) >> (2 * (b / 2) + j % 2);
    return c | (upper & 0x01010101u) << 4;
}

/* A byte of a word, with its sign or without. */
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

/* Blocks that lie together, and words of them. */
#define BLOCKS_OF(form) ((form) == INT6 ? 4 : MINIMA(form) ? 8 : 1)
#define WORDS_OF(form)                                                                          \
    ((form) == INT8 || (form) == FP8 ? 8 : (form) == INT5 ? FIVES_BYTES / 4 : (form) == INT4 ? 4 \
     : (form) == INT6 ? SIXES_BYTES / 4 : (form) == UINT4 ? ABOVE_uint4 / 4 : ABOVE_uint5 / 4)

/* What the halves of block `b` of those that lie together at `p` are multiplied by, and what is then
 * taken off. */
static inline void block_factors(const int form, const uint8_t *p, int b, row_floats scale,
                                 row_floats least, row_floats *factor, row_floats *below) {
    factor[0] = factor[1] = scale, *below = (row_floats){0};
    if (form == INT6) {
        row_words shared = words_at(p, SIXES_SHARED / 4 + b / 2);
        factor[0] = product_of(scale, signed_byte(shared, b % 2 * 2));
        factor[1] = product_of(scale, signed_byte(shared, b % 2 * 2 + 1));
    }
    if (MINIMA(form)) {
        row_words first = words_at(p, WORDS_OF(form) - 3);
        row_words second = words_at(p, WORDS_OF(form) - 2);
        row_words last = words_at(p, WORDS_OF(form) - 1);
        factor[0] = factor[1] = product_of(scale, integer_in(first, last, first, b, 0));
        *below = product_of(least, integer_in(second, last, second, b, 1));
    }
}

/* Rows of a weight that make a vector: a tile or a part of one. */
typedef struct {
    const uint8_t *codes;
    const char *scales;
    float *out;
} strip;

/* Strips times `rows` rows of x. */
#define EACH_STRIP UNROLLED for (int s = 0; s < strips; s++)
ALWAYS tile_product(const int form, const int rows, const int strips, const int parts,
                    const product *p, const strip *of, const digits *const *x) {
    const int dtype = p->scales_dtype;
    const int together = BLOCKS_OF(form), minima = MINIMA(form);
    row_floats sum[STRIPS_MOST][TOGETHER], scale[STRIPS_MOST], least[STRIPS_MOST];
    EACH_STRIP UNROLLED for (int r = 0; r < rows; r++) sum[s][r] = (row_floats){0};
    int64_t left = p->each, group = 0, blocks = p->k / BLOCK, at = 0;
    for (int64_t i = 0; i < blocks; i += together, at += WORDS_OF(form) * LINE) {
        if (left >= p->each) {
            EACH_STRIP scale[s] = tile_scales(of[s].scales, group * TILE, dtype);
            if (minima) EACH_STRIP least[s] = tile_scales(of[s].scales, (group + 1) * TILE, dtype);
            group += 1 + minima, left = 0;
        }
        left += together * BLOCK;
        UNROLLED for (int b = 0; b < together; b++) EACH_STRIP {
            const uint8_t *w = of[s].codes + at;
            const int line = b * WORDS_OF(form) / together;
            if (strips < STRIPS_MOST)
                UNROLLED for (int j = line; j < (b + 1) * WORDS_OF(form) / together; j++)
                    __builtin_prefetch(w + j * LINE + TILE_AHEAD, 0, 2);
            row_floats factor[2], below;
            block_factors(form, w, b, scale[s], least[s], factor, &below);
            if (minima)
                UNROLLED for (int r = 0; r < rows; r++)
                    sum[s][r] = multiply_add(-below, all_rows(x[r][i + b].sum), sum[s][r]);
            const int halves = form == INT6 ? 2 : 1;
            UNROLLED for (int h = 0; h < halves; h++) {
                row_sums made[TOGETHER][2];
                UNROLLED for (int r = 0; r < rows; r++) {
                    const digits *d = x[r] + i + b;
                    start_sums(form, parts, halves == 2 ? d->less[h] : d->both, made[r]);
                }
                UNROLLED for (int j = h * 4; j < (halves == 2 ? h * 4 + 4 : 8); j++) {
                    row_words factors[2];
                    factors_of(form, code_word(form, w, b, j), factors);
                    UNROLLED for (int r = 0; r < rows; r++)
                        add_word(form, parts, factors, x[r] + i + b, j, made[r]);
                }
                UNROLLED for (int r = 0; r < rows; r++)
                    sum[s][r] = multiply_add(total_of(form, parts, made[r]), factor[h] * x[r][i + b].unit,
                                             sum[s][r]);
            }
        }
    }
    EACH_STRIP UNROLLED for (int r = 0; r < rows; r++)
        *(any_row_floats *)(of[s].out + r * TILE) = sum[s][r];
}

#include "amx.h"

/* Sums of a tile with rows of x, [rows][TILE], and of the others where there are several strips. `a`: the
 * digits as amx.h has them. */
typedef void tile_dot(const product *p, const int64_t *tiles, const digits *const *x, const int8_t *a,
                      float *out);

/* Rows of x of which registers hold all sums. */
#define ROWS_AT_ONCE(FORM, ROWS)                                                                \
    ((ROWS) > 4 && (WIDE < 64 || MINIMA(FORM) && (ROWS) == 8) ? (ROWS) / 2 : (ROWS))
#define TILE_DOT(FORM, PARTS, ROWS)                                                             \
    static void tile_##FORM##_##PARTS##_##ROWS(const product *p, const int64_t *tiles,          \
                                               const digits *const *x, const int8_t *a,         \
                                               float *out) {                                    \
        const int each = on_amx(FORM, PARTS, ROWS) ? ROWS : ROWS_AT_ONCE(FORM, ROWS);           \
        const int strips = strips_of(FORM, PARTS, ROWS);                                        \
        for (int lane = 0; lane < TILE; lane += WORDS)                                          \
            for (int r = 0; r < ROWS; r += each) {                                              \
                strip of[STRIPS_MOST];                                                          \
                EACH_STRIP of[s] = (strip){codes_of_tile(p, tiles[s]) + lane * 4,               \
                                           scales_of_tile(p, tiles[s]) + lane * tile_scale(p),  \
                                           out + (s * ROWS + r) * TILE + lane};                 \
                if (on_amx(FORM, PARTS, ROWS))                                                  \
                    amx_product(FORM, ROWS, PARTS, p, of, x, a);                                \
                else                                                                            \
                    tile_product(FORM, each, strips, PARTS, p, of, x + r);                      \
            }                                                                                   \
    }
/* Rows of x that are multiplied together: five are six, seven are eight. */
#define BY_ROWS(F, FORM, PARTS)                                                                 \
    F(FORM, PARTS, 1) F(FORM, PARTS, 2) F(FORM, PARTS, 3) F(FORM, PARTS, 4) F(FORM, PARTS, 6)   \
    F(FORM, PARTS, 8)
#define TILE_NAME(FORM, PARTS, ROWS) [ROWS] = tile_##FORM##_##PARTS##_##ROWS,
/* One digit: rows that are rounded. */
#ifdef ROUNDED
#define ONE_DIGIT BY_ROWS
#else
#define ONE_DIGIT(F, FORM, PARTS)
#endif
#define TILE_DOTS(FORM)                                                                         \
    ONE_DIGIT(TILE_DOT, FORM, 1)                                                                \
    BY_ROWS(TILE_DOT, FORM, 2)                                                                  \
    static tile_dot *const tiles_##FORM[][TOGETHER + 1] = {                                     \
        {0}, {ONE_DIGIT(TILE_NAME, FORM, 1)}, {BY_ROWS(TILE_NAME, FORM, 2)}};
TILE_DOTS(INT8)
TILE_DOTS(INT4)
TILE_DOTS(INT6)
TILE_DOTS(UINT4)
TILE_DOTS(UINT5)
TILE_DOTS(INT5)
#ifdef FP8_TILES
TILE_DOTS(FP8)
#else
#define tiles_FP8 NULL
#endif
/* By digits of x and rows of it. */
static tile_dot *const (*const TILES)[TOGETHER + 1] = OF_FORM(tiles_);
#define HAS_TILES (TILES != NULL)
#define HAS_ROUNDED (HAS_TILES && TILES[1][1] != NULL)

/* ---- rows of x ---- */

/* What takes numbers of an exponent to integers of 15 bits, and their unit; 0 for those that are all too
 * small. */
static inline float to_15_bits(uint32_t exponent, float *unit) {
    uint32_t inverse = exponent < 15 ? 0 : (268 - exponent) << 23;
    uint32_t u = exponent < 15 ? 0 : (exponent - 14) << 23;
    float times;
    memcpy(&times, &inverse, 4);
    memcpy(unit, &u, 4);
    return times;
}

/* A block with a number that is not finite: no product of it is. */
static void not_finite(digits *to) {
    memset(to, 0, sizeof *to);
    to->unit = to->sum = NAN;
}

/* Sets how numbers of 15 bits, or of 8 for one digit, become integers: times a factor or divided by
 * their unit. */
static inline float integers_by(int parts, uint32_t top, float *unit) {
    /* the largest number is below 2^15 units, and rounds to 255 * 2^7 + 127 at most */
    float times = to_15_bits((top >> 7) + ((top & 0x7f) == 0x7f), unit);
    if (parts == 1) *unit = top ? widen(top) / 127 : 1;
    return times;
}

static inline void set_sums(int form, const int32_t *sums, digits *to) {
    to->less[0] = -BIAS[form] * sums[0], to->less[1] = -BIAS[form] * sums[1];
    to->both = to->less[0] + to->less[1];
    to->sum = (float)(sums[0] + sums[1]) * to->unit;
}

#if WIDE == 64
static inline __m512 sixteen(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

static inline __m256i in_order(int form, __m256i bytes) {
    __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    return EVEN_ODD(form) ? _mm256_shuffle_epi8(bytes, _mm256_broadcastsi128_si256(order)) : bytes;
}

/* The sums of the first and the second sixteen integers. */
static inline __m128i sums_of(__m512i all) {
    __m512i pairs = _mm512_madd_epi16(all, _mm512_set1_epi16(1));
    __m256i few = _mm256_hadd_epi32(_mm512_castsi512_si256(pairs), _mm512_extracti64x4_epi64(pairs, 1));
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(few), _mm256_extracti128_si256(few, 1));
    return _mm_hadd_epi32(four, four);
}

static inline void block_digits(int parts, int form, const bf16 *x, digits *to) {
    __m512i given = _mm512_loadu_si512(x), all;
    __m256i first = _mm512_castsi512_si256(given), second = _mm512_extracti64x4_epi64(given, 1);
    __m256i sign = _mm256_set1_epi16(0x7fff);
    __m256i most = _mm256_max_epu16(_mm256_and_si256(first, sign), _mm256_and_si256(second, sign));
    __m128i few = _mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    few = _mm_minpos_epu16(_mm_xor_si128(few, _mm_set1_epi16(-1)));
    uint32_t top = ~_mm_cvtsi128_si32(few) & 0xffff;
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
#else
static inline void block_digits(int parts, int form, const bf16 *x, digits *to) {
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
    int16_t *pairs = (int16_t *)to->pairs;
    int8_t *high = (int8_t *)to->high, *low = (int8_t *)to->low;
    for (int j = 0; j < BLOCK; j++) { /* byte j % 4 of word j / 4 */
        int of = EVEN_ODD(form) ? j / 8 * 8 + j / 4 % 2 + j % 4 * 2 : j;
        if (IN_16_BITS(form))
            pairs[j / 4 * 4 + j % 2 * 2 + j % 4 / 2] = all[of];
        else
            high[j] = parts == 1 ? all[of] : (all[of] + 128) >> 8, low[j] = (int8_t)all[of];
    }
    set_sums(form, sums, to);
}
#endif

typedef struct {
    const product *p;
    int parts;
    int64_t together, part, units;
} tiled_product;

static void store_tile(const product *p, int64_t r, int64_t tile, const float *sums) {
    bf16 *to = (bf16 *)p->y + r * p->n + tile * TILE;
#if WIDE == 64
    _mm256_storeu_si256((__m256i *)to, in_bf16(_mm512_loadu_ps(sums)));
#else
    for (int j = 0; j < TILE; j++) to[j] = narrow(sums[j]);
#endif
}

/* Writes the digits of all rows of x one behind the other, block by block; those of the last one again
 * where `tall` rows are multiplied. */
static void rows_of_a(const tiled_product *m, const digits *form, int64_t tall, int8_t *to) {
    int64_t blocks = m->p->k / BLOCK, bytes = m->parts * BLOCK;
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t r = 0; r < tall; r++, to += bytes)
            memcpy(to, form + least(r, m->p->rows - 1) * blocks + b, bytes);
}

static int tile_units(void *context, units *left) {
    const tiled_product *m = context;
    const product *p = m->p;
    tile_dot *const *of = TILES[m->parts];
    int64_t blocks = p->k / BLOCK, tiles = p->n / TILE;
    int64_t tall = of[m->together] ? m->together : m->together + 1, amx = on_amx(FORM, m->parts, tall);
    int64_t bytes = (p->rows * blocks * sizeof(digits) + LINE - 1) / LINE * LINE;
    int64_t of_a = amx ? blocks * tall * m->parts * BLOCK : 0;
    digits *form = aligned_alloc(LINE, bytes + (of_a + LINE - 1) / LINE * LINE);
    if (!form) return 1;
    for (int64_t i = 0; i < p->rows * blocks; i++)
        block_digits(m->parts, FORM, (const bf16 *)p->x + i * BLOCK, form + i);
    int8_t *a = (int8_t *)form + bytes;
    if (amx) set_amx(tall * m->parts), rows_of_a(m, form, tall, a); /* such rows are one turn */
    for (int64_t u; (u = take_unit(left)) >= 0;) {
        int64_t r = u / m->units * m->together, here = least(m->together, p->rows - r);
        int64_t first = u % m->units * m->part, last = least(first + m->part, tiles);
        const digits *x[TOGETHER];
        int64_t taken = of[here] ? here : here + 1;
        for (int64_t i = 0; i < taken; i++) x[i] = form + (r + least(i, here - 1)) * blocks;
        int64_t strips = strips_of(FORM, m->parts, taken), run = (last - first + strips - 1) / strips;
        for (int64_t t = first; t < first + run; t++) {
            int64_t of_run[STRIPS_MOST];
            for (int64_t s = 0; s < strips; s++) of_run[s] = t + s * run < last ? t + s * run : t;
            float out[2 * TOGETHER * TILE];
            of[taken](p, of_run, x, a, out);
            for (int64_t s = 0; s < strips; s++)
                for (int64_t i = 0; i < here; i++)
                    store_tile(p, r + i, of_run[s], out + (s * taken + i) * TILE);
        }
    }
    if (amx) end_amx();
    free(form);
    return 0;
}

static int multiply_tiles(const product *p, int parts, int threads) {
    int64_t most = on_amx(FORM, parts, TOGETHER) && !amx_allowed ? 4 : TOGETHER;
    int64_t tiles = p->n / TILE, turns = (p->rows + most - 1) / most;
    int64_t together = (p->rows + turns - 1) / turns;
    int64_t part = tiles_of_part(tiles, threads, strips_of(FORM, parts, together));
    tiled_product m = {p, parts, together, part, (tiles + part - 1) / part};
    return run_region(tile_units, &m, turns * m.units, threads);
}

#if WIDE == 32
#pragma GCC pop_options
#endif
#else
#define HAS_TILES 0
#define HAS_ROUNDED 0
static int multiply_tiles(const product *p, int parts, int threads) { return 1; }
#endif
