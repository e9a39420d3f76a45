/* Products and decoding of weights in the form FORM: what kernels.h declares. */
#define PRODUCT_CODED(NAME)                                                                     \
    static void wide_##NAME(const void *x, int dtype, void *form, int64_t k) {                  \
        float *wide = form;                                                                     \
        for (int64_t i = 0; i < k; i += BLOCK) {                                                \
            for (int j = 0; j < BLOCK; j++) wide[i + j] = load(x, i + j, dtype);                \
            as_codes_##NAME(wide + i);                                                          \
        }                                                                                       \
    }

PRODUCT_CODED(int8)
PRODUCT_CODED(int6)
PRODUCT_CODED(int5)
PRODUCT_CODED(int4)
PRODUCT_CODED(fp8)
PRODUCT_CODED(uint4)
PRODUCT_CODED(uint5)

/* Rows of a weight for a library's product. */
#define DECODE(NAME, BYTES, UNIT)                                                               \
    static void decode_##NAME(const uint8_t *w, const void *scales, int scales_dtype, void *y,  \
                              int dtype, int64_t first, int64_t last, int64_t k,                \
                              int64_t groups) {                                                 \
        int64_t each = k / groups;                                                              \
        for (int64_t o = first; o < last; o++)                                                  \
            for (int64_t i = 0; i < k; i += BLOCK) {                                            \
                float v[BLOCK];                                                                 \
                float s = load(scales, o * groups + i / each, scales_dtype) * UNIT;             \
                float t = load(scales, o * groups + (i + HALF) / each, scales_dtype) * UNIT;    \
                block b = ordered_##NAME(w + o * k / BLOCK * BYTES, i);                         \
                memcpy(v, &b, sizeof v);                                                        \
                for (int j = 0; j < BLOCK; j++) v[j] *= j < HALF ? s : t;                       \
                if (dtype == F32)                                                               \
                    memcpy((float *)y + o * k + i, v, sizeof v);                                \
                else                                                                            \
                    for (int j = 0; j < BLOCK; j++) ((bf16 *)y)[o * k + i + j] = narrow(v[j]);  \
            }                                                                                   \
    }

DECODE(int8, 32, 1)
DECODE(int6, 26, 1)
DECODE(int5, FIVES_BYTES, 1)
DECODE(int4, 16, 1)
DECODE(fp8, 32, 0x1p8f)

/* Each product is rounded by itself, and so is the difference, as the definition has it: what is
 * said to change in memory is neither reordered nor fused. */
#define ROUNDED(V) __asm__("" : "+m"(V))
static inline void decode_above(const int high, const uint8_t *w, const void *scales,
                                int scales_dtype, void *y, int dtype, int64_t first,
                                int64_t last, int64_t k, int64_t groups) {
    const int size = high ? ABOVE_uint5 : ABOVE_uint4;
    for (int64_t at = first * k / ABOVE; at < last * k / ABOVE; at++) {
        int64_t pair = at * ABOVE / (k / groups * 2) * 2;
        float s = load(scales, pair, scales_dtype), least = load(scales, pair + 1, scales_dtype);
        const uint8_t *from = w + at * size;
        uint64_t scale = integers_above(from + size - 12, 0);
        uint64_t minima = integers_above(from + size - 12, 1);
        for (int b = 0; b < 8; b++) {
            float v[BLOCK], below = least * integer_of(minima, b);
            half_block codes[2];
            numbers_above(high, from, b, codes);
            block numbers = ordered(codes);
            memcpy(v, &numbers, sizeof v);
            for (int j = 0; j < BLOCK; j++) v[j] *= integer_of(scale, b);
            ROUNDED(v);
            for (int j = 0; j < BLOCK; j++) v[j] *= s;
            ROUNDED(v);
            for (int j = 0; j < BLOCK; j++) v[j] -= below;
            int64_t to = at * ABOVE + b * BLOCK;
            if (dtype == F32)
                memcpy((float *)y + to, v, sizeof v);
            else
                for (int j = 0; j < BLOCK; j++) ((bf16 *)y)[to + j] = narrow(v[j]);
        }
    }
}
#define DECODE_ABOVE(NAME, HIGH)                                                                \
    static void decode_##NAME(const uint8_t *w, const void *scales, int scales_dtype, void *y,  \
                              int dtype, int64_t first, int64_t last, int64_t k,                \
                              int64_t groups) {                                                 \
        decode_above(HIGH, w, scales, scales_dtype, y, dtype, first, last, k, groups);          \
    }

DECODE_ABOVE(uint4, 0)
DECODE_ABOVE(uint5, 1)

#ifdef __AVX512BW__
/* What sixteen codes from `first` on are in bf16. */
static inline __m256i values_of(float first, float scale, float least) {
    __m512 codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    codes = _mm512_add_ps(codes, _mm512_set1_ps(first));
    return in_bf16(_mm512_fmsub_ps(codes, _mm512_set1_ps(scale), _mm512_set1_ps(least)));
}

/* As decode_int4 does, six times as fast: codes look up the values of their group. */
static void decode_int4_bf16(const uint8_t *w, const void *scales, int scales_dtype, bf16 *y,
                             int64_t first, int64_t last, int64_t k, int64_t groups) {
    for (int64_t g = first * groups; g < last * groups; g++) {
        __m512i values = _mm512_broadcast_i64x4(values_of(-8, load(scales, g, scales_dtype), 0));
        for (int64_t i = g * (k / groups); i < (g + 1) * (k / groups); i += BLOCK) {
            __m512i c = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(w + i / 2)));
            c = _mm512_or_si512(c, _mm512_slli_epi32(c, 12));
            _mm512_storeu_si512(y + i, _mm512_permutexvar_epi16(c, values));
        }
    }
}

/* The same of codes with minima, for scales of 16 bits, whose products are exact. */
static inline void decode_above_bf16(const int high, const uint8_t *w, const void *scales,
                                     int scales_dtype, bf16 *y, int64_t first, int64_t last,
                                     int64_t k, int64_t groups) {
    const int size = high ? ABOVE_uint5 : ABOVE_uint4;
    for (int64_t at = first * k / ABOVE; at < last * k / ABOVE; at++) {
        int64_t pair = at * ABOVE / (k / groups * 2) * 2;
        float s = load(scales, pair, scales_dtype), least = load(scales, pair + 1, scales_dtype);
        const uint8_t *from = w + at * size;
        uint64_t scale = integers_above(from + size - 12, 0);
        uint64_t minima = integers_above(from + size - 12, 1);
        for (int b = 0; b < 8; b++) {
            float d = s * integer_of(scale, b), below = least * integer_of(minima, b);
            __m512i values = _mm512_broadcast_i64x4(values_of(0, d, below));
            __m512i c = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(from + b * HALF)));
            c = _mm512_and_si512(_mm512_or_si512(c, _mm512_slli_epi32(c, 12)),
                                 _mm512_set1_epi32(0xf000f));
            if (high) {
                const uint8_t *p = from + ABOVE_HIGH + b % 2 * HALF;
                __m512i u = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
                u = _mm512_srl_epi32(u, _mm_cvtsi32_si128(b / 2 * 2));
                u = _mm512_or_si512(_mm512_slli_epi32(u, 4), _mm512_slli_epi32(u, 19));
                c = _mm512_or_si512(c, _mm512_and_si512(u, _mm512_set1_epi32(0x100010)));
                values = _mm512_inserti64x4(values, values_of(16, d, below), 1);
            }
            _mm512_storeu_si512(y + at * ABOVE + b * BLOCK, _mm512_permutexvar_epi16(c, values));
        }
    }
}
#endif

/* The functions of each form: what makes rows of x, products with a scale for a row or for each group,
 * what makes rows of the weight; the codes that share a scale at least, scales of a group, and bytes of
 * 256 numbers. */
static const struct {
    to_form *wide;
    const dots *rowwise, *groupwise;
    void (*decode)(const uint8_t *, const void *, int, void *, int, int64_t, int64_t, int64_t,
                   int64_t);
    int64_t group, scales, bytes;
} OF =
#define OF_INT8 {wide_int8, rowwise_int8s, groupwise_int8s, decode_int8, HALF, 1, 256}
#define OF_INT6 {wide_int6, rowwise_int6s, groupwise_int6s, decode_int6, SIXES, 1, 2 * SIXES_BYTES}
    /* No file holds int5 with one scale for a row: a function of its own is not compiled. */
#define OF_INT5 {wide_int5, groupwise_int5s, groupwise_int5s, decode_int5, BLOCK, 1, 8 * FIVES_BYTES}
#define OF_INT4 {wide_int4, rowwise_int4s, groupwise_int4s, decode_int4, BLOCK, 1, 128}
#define OF_FP8 {wide_fp8, rowwise_fp8s, groupwise_fp8s, decode_fp8, HALF, 1, 256}
#define OF_UINT4 {wide_uint4, groupwise_uint4s, groupwise_uint4s, decode_uint4, ABOVE, 2, ABOVE_uint4}
#define OF_UINT5 {wide_uint5, groupwise_uint5s, groupwise_uint5s, decode_uint5, ABOVE, 2, ABOVE_uint5}
    OF_FORM(OF_);

/* Most rows that are multiplied with codes as they are. */
#define CODED_ROWS 8

static int takes_codes(int form, int rounded, int dtype, int64_t rows, int64_t k, int64_t groups) {
    if (rounded && !(dtype == BF16 && HAS_ROUNDED)) return 0;
    if (dtype != BF16 && dtype != F32) return 0;
    int64_t scales = OF.scales;
    if (groups % scales) return 0;
    groups /= scales;
    if (rows < 1 || rows > CODED_ROWS || k % BLOCK || groups < 1 || k % groups) return 0;
    return k / groups % OF.group == 0;
}

static int linear_coded(const void *codes, int form, int tiles, const void *scales, int scales_dtype,
                        const void *x, int rounded, void *y, int dtype, int64_t rows, int64_t n,
                        int64_t k, int64_t groups, int threads) {
    product p = {.w = codes, .bytes = OF.bytes, .stride = k, .scales = scales,
                 .scales_dtype = scales_dtype, .groups = groups, .each = k / groups * OF.scales,
                 .x = x, .y = y, .dtype = dtype, .rows = rows, .n = n, .k = k};
    if (tiles && dtype == BF16 && HAS_TILES) return multiply_tiles(&p, rounded ? 1 : 2, threads);
    p.to = OF.wide, p.apart = k * sizeof(float);
    const dots *of = groups == 1 ? OF.rowwise : OF.groupwise;
    if (tiles) return multiply_from_tiles(&p, of, threads);
    return multiply(&p, of, CODED_TOGETHER, threads);
}

typedef struct {
    const void *codes, *scales;
    void *y;
    int tiles, scales_dtype, dtype;
    int64_t n, k, groups;
} decoding;

static void decode_rows(const decoding *d, int64_t first, int64_t last) {
#ifdef __AVX512BW__
    int in_16_bits = d->dtype == BF16 && d->scales_dtype != F32;
    if (FORM == INT4 && d->dtype == BF16)
        return decode_int4_bf16(d->codes, d->scales, d->scales_dtype, d->y, first, last, d->k,
                                d->groups);
    if (FORM == UINT4 && in_16_bits)
        return decode_above_bf16(0, d->codes, d->scales, d->scales_dtype, d->y, first, last, d->k,
                                 d->groups);
    if (FORM == UINT5 && in_16_bits)
        return decode_above_bf16(1, d->codes, d->scales, d->scales_dtype, d->y, first, last, d->k,
                                 d->groups);
#endif
    OF.decode(d->codes, d->scales, d->scales_dtype, d->y, d->dtype, first, last, d->k, d->groups);
}

static int decode_units(void *context, units *left) {
    const decoding *d = context;
    decoding own = *d;
    product p = {.w = d->codes, .bytes = OF.bytes, .k = d->k, .scales = d->scales,
                 .scales_dtype = d->scales_dtype, .groups = d->groups};
    uint8_t *rows = d->tiles ? malloc(tile_bytes(&p)) : NULL;
    if (d->tiles && !rows) return 1;
    for (int64_t i; (i = take_unit(left)) >= 0;) {
        if (!d->tiles) {
            decode_rows(d, i * TILE, least((i + 1) * TILE, d->n));
            continue;
        }
        own.codes = rows, own.scales = rows_of_tile(&p, i, rows);
        own.y = (char *)d->y + i * TILE * d->k * (d->dtype == F32 ? 4 : 2);
        decode_rows(&own, 0, TILE);
    }
    free(rows);
    return 0;
}

static int decode(const void *codes, int form, int tiles, const void *scales, int scales_dtype,
                  void *y, int dtype, int64_t n, int64_t k, int64_t groups, int threads) {
    decoding d = {codes, scales, y, tiles, scales_dtype, dtype, n, k, groups};
    return run_region(decode_units, &d, (n + TILE - 1) / TILE, threads);
}
