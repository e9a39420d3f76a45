/* Products of quantised weights with rows of x as integers that take AVX-512: rows of x rounded to
 * 8 bits, and weights of 8 bits with a scale for each row. */
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
