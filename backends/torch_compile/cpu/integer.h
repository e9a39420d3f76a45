/* Products of quantised weights with rows of x as integers: 4-bit codes, and bytes whose groups have
 * scales. A second part, for AVX-512 alone, is integer_avx512.h. */
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define WIDE 64
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define WIDE 32
#endif

#ifdef WIDE

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
