/* Products of quantised weights in tiles: 16 rows of a weight whose words of four bytes alternate, so
 * that a vector has one word of each row. A row's bytes are those of quantised.h, and its scales
 * alternate in the same way, element by element. Rows of x are integers of 15 bits (two digits of 8)
 * times a power of two for each block of 32, exact where a number is at least 1/128 of the largest of
 * its block; with one digit they are what fake_quantize makes. Integer sums need no horizontal sums and
 * no floating point but one multiply-add a block. */
#define TILE 16
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define WIDE 64
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define WIDE 32
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
#define WORDS (WIDE / 4)
typedef uint32_t row_words __attribute__((vector_size(WIDE)));
typedef uint32_t any_row_words __attribute__((vector_size(WIDE), aligned(4), may_alias));
typedef int32_t row_sums __attribute__((vector_size(WIDE)));
typedef float row_floats __attribute__((vector_size(WIDE)));
typedef float any_row_floats __attribute__((vector_size(WIDE), aligned(4), may_alias));

/* A block of a row of x: numbers are (256 high + low) * unit, in the order of a form's words. `unit`
 * is NaN where a number is not finite. */
typedef struct {
    int32_t high[BLOCK / 4], low[BLOCK / 4];
    int32_t less[2], both; /* what codes are stored above themselves by, of each half; of both */
    float unit, sum; /* sum: of the numbers */
} digits;

static inline row_words words_at(const uint8_t *tile, int64_t word) {
    return *(const any_row_words *)(tile + word * TILE * 4);
}

/* Adds the products of four codes below 256 (64 with AVX2) with four signed bytes, in each row. */
static inline row_sums add_word(row_sums sum, row_words codes, const int32_t *x) {
#if WIDE == 64
    /* compilers load the word by an instruction of its own */
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*x));
    return sum;
#else
    __m256i both = _mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(*x));
    return sum + (row_sums)_mm256_madd_epi16(both, _mm256_set1_epi16(1));
#endif
}

static inline row_floats tile_scales(const void *scales, int64_t at, int dtype) {
    if (dtype == F32) return *(const any_row_floats *)((const float *)scales + at);
    const uint16_t *p = (const uint16_t *)scales + at;
#if WIDE == 64
    __m256i u = _mm256_loadu_si256((const __m256i *)p);
    if (dtype == F16) return _mm512_cvtph_ps(u);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(u), 16));
#else
    __m128i u = _mm_loadu_si128((const __m128i *)p);
    if (dtype == F16) return _mm256_cvtph_ps(u);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(u), 16));
#endif
}

/* Each number of a vector is `value`. */
static inline row_floats all_rows(float value) { return (row_floats){0} + value; }

#define NIBBLES 0x0f0f0f0fu
static const int BIAS[FORMS] = {[INT8] = 128, [INT4] = 8, [INT6] = 32};
/* Whether words have even numbers and odd ones, as bytes of two 4-bit codes do. */
#define IN_PAIRS(form) ((form) != INT8 && (form) != INT6)

/* The words of the codes, without sign, of block `b` of those that lie together at `p`. */
static inline void codes_of(const int form, const uint8_t *p, int b, row_words *c) {
    if (form == INT8) {
        UNROLLED for (int j = 0; j < 8; j++) c[j] = words_at(p, 8 * b + j) ^ 0x80808080u;
    } else if (form == INT6) {
        UNROLLED for (int j = 0; j < 8; j++) {
            row_words low = words_at(p, 8 * (b % 2) + j) >> (4 * (b / 2)) & NIBBLES;
            row_words high = words_at(p, SIXES_HIGH / 4 + j) >> (2 * b) & 0x03030303u;
            c[j] = low | high << 4;
        }
    } else {
        UNROLLED for (int j = 0; j < 4; j++) {
            row_words both = words_at(p, 4 * b + j);
            c[2 * j] = both & NIBBLES, c[2 * j + 1] = both >> 4 & NIBBLES;
            if (form == UINT5) {
                row_words upper = words_at(p, ABOVE_HIGH / 4 + 4 * (b % 2) + j) >> (2 * (b / 2));
                c[2 * j] |= (upper & 0x01010101u) << 4;
                c[2 * j + 1] |= (upper & 0x02020202u) << 3;
            }
        }
    }
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
#define BLOCKS_OF(form) ((form) == INT6 ? 4 : (form) >= UINT4 ? 8 : 1)
#define WORDS_OF(form)                                                                          \
    ((form) == INT8 ? 8 : (form) == INT4 ? 4 : (form) == INT6 ? SIXES_BYTES / 4                 \
     : (form) == UINT4 ? ABOVE_uint4 / 4 : ABOVE_uint5 / 4)

/* One tile, or a part of WORDS rows from `lane` on, times `rows` rows of x. */
ALWAYS tile_product(const int form, const int rows, const int parts, const product *p,
 int64_t tile, int lane, const digits *const *x, float *out) {
    const int dtype = p->scales_dtype;
    row_floats sum[TOGETHER];
    UNROLLED for (int r = 0; r < rows; r++) sum[r] = (row_floats){0};
    const uint8_t *w = codes_of_tile(p, tile) + lane * 4;
    const char *scales = scales_of_tile(p, tile);
    const int together = BLOCKS_OF(form), minima = form >= UINT4;
    int64_t left = p->each, group = 0, blocks = p->k / BLOCK;
    row_floats scale = {0}, least = {0};
    for (int64_t i = 0; i < blocks; i += together, w += WORDS_OF(form) * TILE * 4) {
        if (left >= p->each) {
            scale = tile_scales(scales, group * TILE + lane, dtype);
            if (minima) least = tile_scales(scales, (group + 1) * TILE + lane, dtype);
            group += 1 + minima, left = 0;
        }
        left += together * BLOCK;
        UNROLLED for (int b = 0; b < together; b++) {
            UNROLLED for (int j = 0; j <= WORDS_OF(form) / together; j++)
                __builtin_prefetch(w + (b * (WORDS_OF(form) / together) + j) * LINE + AHEAD, 0, 2);
            row_words c[8];
            codes_of(form, w, b, c);
            row_floats factor[2] = {scale, scale}, below = {0};
            if (form == INT6) {
                row_words shared = words_at(w, SIXES_SHARED / 4 + b / 2);
                factor[0] = scale * signed_byte(shared, b % 2 * 2);
                factor[1] = scale * signed_byte(shared, b % 2 * 2 + 1);
            }
            if (minima) {
                row_words first = words_at(w, WORDS_OF(form) - 3);
                row_words second = words_at(w, WORDS_OF(form) - 2);
                row_words last = words_at(w, WORDS_OF(form) - 1);
                factor[0] = scale * integer_in(first, last, first, b, 0);
                below = least * integer_in(second, last, second, b, 1);
            }
            const int halves = form == INT6 ? 2 : 1;
            UNROLLED for (int r = 0; r < rows; r++) {
                const digits *d = x[r] + i + b;
                UNROLLED for (int h = 0; h < halves; h++) {
                    row_sums start = (row_sums){0} + (halves == 2 ? d->less[h] : d->both);
                    row_sums high = parts == 1 ? start : (row_sums){0}, low = start;
                    UNROLLED for (int j = h * 4; j < (halves == 2 ? h * 4 + 4 : 8); j++) {
                        high = add_word(high, c[j], d->high + j);
                        if (parts == 2) low = add_word(low, c[j], d->low + j);
                    }
                    if (parts == 2) high = (high << 8) + low;
                    row_floats made = __builtin_convertvector(high, row_floats);
                    sum[r] += made * (factor[h] * d->unit);
                }
                if (minima) sum[r] -= below * d->sum;
            }
        }
    }
    UNROLLED for (int r = 0; r < rows; r++) *(any_row_floats *)(out + r * TILE + lane) = sum[r];
}

/* Sums of a tile with rows of x, [rows][TILE]. */
typedef void tile_dot(const product *p, int64_t tile, const digits *const *x, float *out);

#define TILE_DOT(FORM, PARTS, ROWS)                                                             \
    static void tile_##FORM##_##PARTS##_##ROWS(const product *p, int64_t tile,                  \
                                               const digits *const *x, float *out) {            \
        for (int lane = 0; lane < TILE; lane += WORDS)                                          \
            tile_product(FORM, ROWS, PARTS, p, tile, lane, x, out);                             \
    }
/* Rows of x that are multiplied together: five are six, seven are eight. */
#define BY_ROWS(F, FORM, PARTS)                                                                 \
    F(FORM, PARTS, 1) F(FORM, PARTS, 2) F(FORM, PARTS, 3) F(FORM, PARTS, 4) F(FORM, PARTS, 6)   \
    F(FORM, PARTS, 8)
#define TILE_NAME(FORM, PARTS, ROWS) [ROWS] = tile_##FORM##_##PARTS##_##ROWS,
#define TILE_DOTS(FORM)                                                                         \
    BY_ROWS(TILE_DOT, FORM, 1)                                                                  \
    BY_ROWS(TILE_DOT, FORM, 2)                                                                  \
    static tile_dot *const tiles_##FORM[][TOGETHER + 1] = {                                     \
        {0}, {BY_ROWS(TILE_NAME, FORM, 1)}, {BY_ROWS(TILE_NAME, FORM, 2)}};
TILE_DOTS(INT4)
TILE_DOTS(INT6)
TILE_DOTS(UINT4)
TILE_DOTS(UINT5)
#if WIDE == 64
TILE_DOTS(INT8)
#else
#define tiles_INT8 NULL
#endif
/* By form, digits of x and rows of it. */
static tile_dot *const (*const TILES[FORMS])[TOGETHER + 1] = {
    [INT8] = tiles_INT8, [INT4] = tiles_INT4, [INT6] = tiles_INT6, [UINT4] = tiles_UINT4,
    [UINT5] = tiles_UINT5};

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

#if WIDE == 64
/* The same, sixteen numbers at a time, for x as it is. */
static inline __m512i sixteen(const bf16 *x) {
    __m512i u = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x));
    return _mm512_slli_epi32(u, 16);
}

static void block_digits_512(const int form, const bf16 *x, digits *to) {
    __m512i first = sixteen(x), second = sixteen(x + HALF), sign = _mm512_set1_epi32(0x7fffffff);
    __m512i most = _mm512_max_epi32(_mm512_and_si512(first, sign), _mm512_and_si512(second, sign));
    uint32_t top = (uint32_t)_mm512_reduce_max_epi32(most) >> 16;
    if (top >= 0x7f80) {
        memset(to, 0, sizeof *to);
        to->unit = to->sum = NAN;
        return;
    }
    __m512 times = _mm512_set1_ps(to_15_bits((top >> 7) + ((top & 0x7f) == 0x7f), &to->unit));
    int32_t sums[2];
    for (int h = 0; h < 2; h++) {
        __m512 v = _mm512_castsi512_ps(h ? second : first);
        __m512i all = _mm512_cvtps_epi32(_mm512_mul_ps(v, times));
        __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(all, _mm512_set1_epi32(128)), 8);
        __m128i high = _mm512_cvtepi32_epi8(upper), low = _mm512_cvtepi32_epi8(all);
        if (IN_PAIRS(form)) {
            __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
            high = _mm_shuffle_epi8(high, order), low = _mm_shuffle_epi8(low, order);
        }
        _mm_storeu_si128((__m128i *)to->high + h, high);
        _mm_storeu_si128((__m128i *)to->low + h, low);
        sums[h] = _mm512_reduce_add_epi32(all);
        to->less[h] = -BIAS[form] * sums[h];
    }
    to->both = to->less[0] + to->less[1];
    to->sum = (float)(sums[0] + sums[1]) * to->unit;
}
#else
#define block_digits_512(FORM, X, TO) block_digits(2, FORM, X, TO)
#endif

static void block_digits(const int parts, const int form, const bf16 *x, digits *to) {
    uint16_t top = 0;
    for (int j = 0; j < BLOCK; j++) {
        uint16_t size = x[j] & 0x7fff;
        top = size > top ? size : top;
    }
    memset(to, 0, sizeof *to);
    if (top >= 0x7f80) {
        to->unit = to->sum = NAN;
        return;
    }
    /* the largest number is below 2^15 units, and rounds to 255 * 2^7 + 127 at most */
    float times = to_15_bits((top >> 7) + ((top & 0x7f) == 0x7f), &to->unit);
    if (parts == 1) to->unit = top ? widen(top) / 127 : 1;
    int32_t all[BLOCK];
    for (int j = 0; j < BLOCK; j++)
        all[j] = (int32_t)rintf(parts == 1 ? widen(x[j]) / to->unit : widen(x[j]) * times);
    int8_t *high = (int8_t *)to->high, *low = (int8_t *)to->low;
    int32_t sums[2] = {0};
    for (int j = 0; j < BLOCK; j++) sums[j / HALF] += all[j];
    for (int j = 0; j < BLOCK; j++) {
        int from = IN_PAIRS(form) ? j / 8 * 8 + j % 4 * 2 + j % 8 / 4 : j;
        int32_t upper = parts == 1 ? all[from] : (all[from] + 128) >> 8;
        high[j] = (int8_t)upper;
        low[j] = (int8_t)(all[from] - upper * 256);
    }
    to->less[0] = -BIAS[form] * sums[0], to->less[1] = -BIAS[form] * sums[1];
    to->both = to->less[0] + to->less[1];
    to->sum = (float)(sums[0] + sums[1]) * to->unit;
}

typedef struct {
    const product *p;
    int form, parts;
    int64_t together, part, units;
} tiled_product;

static int tile_units(void *context, units *left) {
    const tiled_product *m = context;
    const product *p = m->p;
    int64_t blocks = p->k / BLOCK, tiles = p->n / TILE;
    digits *form = aligned_alloc(LINE, (p->rows * blocks * sizeof(digits) + LINE - 1) / LINE * LINE);
    if (!form) return 1;
    for (int64_t i = 0; i < p->rows * blocks; i++) {
        const bf16 *x = (const bf16 *)p->x + i * BLOCK;
        if (m->parts == 1) block_digits(1, m->form, x, form + i);
        else block_digits_512(m->form, x, form + i);
    }
    tile_dot *const *of = TILES[m->form][m->parts];
    for (int64_t u; (u = take_unit(left)) >= 0;) {
        int64_t r = u / m->units * m->together, here = least(m->together, p->rows - r);
        int64_t first = u % m->units * m->part, last = least(first + m->part, tiles);
        const digits *x[TOGETHER];
        int64_t taken = of[here] ? here : here + 1;
        for (int64_t i = 0; i < taken; i++) x[i] = form + (r + least(i, here - 1)) * blocks;
        for (int64_t t = first; t < last; t++) {
            float out[TOGETHER * TILE];
            of[taken](p, t, x, out);
            for (int64_t i = 0; i < here * TILE; i++)
                store(p->y, (r + i / TILE) * p->n + t * TILE + i % TILE, out[i], p->dtype);
        }
    }
    free(form);
    return 0;
}

static int multiply_tiles(const product *p, int form, int parts, int threads) {
    int64_t tiles = p->n / TILE, turns = (p->rows + TOGETHER - 1) / TOGETHER;
    int64_t part = tiles / (threads * PARTS) + 1;
    tiled_product m = {p, form, parts, (p->rows + turns - 1) / turns, part,
                       (tiles + part - 1) / part};
    return run_region(tile_units, &m, turns * m.units, threads);
}

static int has_tiles(int form) { return TILES[form] != NULL; }
#else
static int has_tiles(int form) { return 0; }
static int multiply_tiles(const product *p, int form, int parts, int threads) { return 1; }
#endif
