/* Products of many rows, where a CPU multiplies bf16 and has no matrix unit, for which a library is
 * faster. A word is two neighbouring numbers of a row; words of eight rows of one operand alternate,
 * and so do those of up to 48 rows of the other. */
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && !defined(__AMX_BF16__)
#define MANY_ROWS
#define DOWN 8
#define ACROSS 48
#define LANE 16

/* Products [DOWN][vectors of LANE] of the rows at `a` with those at `b`, added to what is there where
 * there is `more`. */
ALWAYS multiply_words(const int vectors, int64_t words, const uint32_t *a, const uint32_t *b, float *to,
                      int more) {
    __m512 sum[DOWN][ACROSS / LANE];
    UNROLLED for (int i = 0; i < DOWN; i++)
        UNROLLED for (int v = 0; v < vectors; v++)
            sum[i][v] = more ? _mm512_loadu_ps(to + (i * vectors + v) * LANE) : _mm512_setzero_ps();
    for (const uint32_t *end = a + words * DOWN; a < end; a += DOWN, b += vectors * LANE)
        UNROLLED for (int i = 0; i < DOWN; i++) {
            __m512bh one = (__m512bh)_mm512_set1_epi32(a[i]);
            UNROLLED for (int v = 0; v < vectors; v++)
                sum[i][v] = _mm512_dpbf16_ps(sum[i][v], LOAD(b + v * LANE), one);
        }
    UNROLLED for (int i = 0; i < DOWN; i++)
        UNROLLED for (int v = 0; v < vectors; v++)
            _mm512_storeu_ps(to + (i * vectors + v) * LANE, sum[i][v]);
}
#define WORDS_PRODUCT(VECTORS)                                                                  \
    static void multiply_words_##VECTORS(int64_t words, const uint32_t *a, const uint32_t *b,   \
                                         float *to, int more) {                                 \
        multiply_words(VECTORS, words, a, b, to, more);                                         \
    }
WORDS_PRODUCT(1)
WORDS_PRODUCT(2)
WORDS_PRODUCT(3)
/* By vectors. */
static void (*const words_products[])(int64_t, const uint32_t *, const uint32_t *, float *, int) = {
    NULL, multiply_words_1, multiply_words_2, multiply_words_3};

/* Words of two rows of sixteen numbers, rounded to bf16. */
static inline __m512i words_of(__m512 first, __m512 second) {
    __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23,
                                     7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

/* Rows of so many words, `apart` bytes from each other, alternate in DOWN of them; those missing are
 * zero. */
static void alternate(const char *rows, int64_t apart, int64_t here, int64_t words, uint32_t *to) {
    for (int64_t i = 0; i < DOWN; i++) {
        const uint32_t *row = (const uint32_t *)(rows + i * apart);
        for (int64_t j = 0; j < words; j++) to[j * DOWN + i] = i < here ? row[j] : 0;
    }
}

/* ---- quantised weights in tiles, made bf16 a part at a time ---- */

/* Numbers of a row in a part: with 48 rows they lie in a core's nearest cache. */
#define PART_OF_ROW 256
/* Rows of x in a unit: at most, and at least if there are to be enough units for the threads. */
enum { UNIT_MOST = 512, UNIT_LEAST = 64 };

/* Writes numbers `first` to `last` of the rows of a tile, in words that are `apart` from one to the
 * next. */
ALWAYS unpack_tile(const int form, const product *p, int64_t tile, int64_t first, int64_t last,
                   uint32_t *to, int64_t apart) {
    const int together = BLOCKS_OF(form), minima = form >= UINT4, dtype = p->scales_dtype;
    const uint8_t *w = codes_of_tile(p, tile) + first / BLOCK / together * WORDS_OF(form) * LINE;
    const char *scales = scales_of_tile(p, tile);
    for (int64_t i = first; i < last; i += together * BLOCK, w += WORDS_OF(form) * LINE) {
        int64_t group = i / p->each * (1 + minima);
        row_floats scale = tile_scales(scales, group * TILE, dtype), least = {0};
        if (minima) least = tile_scales(scales, (group + 1) * TILE, dtype);
        UNROLLED for (int b = 0; b < together; b++) {
            row_words c[8];
            codes_of(form, w, b, c);
            row_floats factor[2] = {scale, scale}, below = {0};
            if (form == INT6) {
                row_words shared = words_at(w, SIXES_SHARED / 4 + b / 2);
                factor[0] = scale * signed_byte(shared, b % 2 * 2);
                factor[1] = scale * signed_byte(shared, b % 2 * 2 + 1);
            }
            if (minima) {
                row_words one = words_at(w, WORDS_OF(form) - 3);
                row_words other = words_at(w, WORDS_OF(form) - 2);
                row_words both = words_at(w, WORDS_OF(form) - 1);
                factor[0] = factor[1] = scale * integer_in(one, both, one, b, 0);
                below = least * integer_in(other, both, other, b, 1);
            }
            UNROLLED for (int j = 0; j < BLOCK / 2; j++, to += apart) {
                row_words even = IN_PAIRS(form) ? c[j / 4 * 2] >> j % 4 * 8 : c[j / 2] >> j % 2 * 16;
                row_words odd = IN_PAIRS(form) ? c[j / 4 * 2 + 1] >> j % 4 * 8 : even >> 8;
                row_floats first = __builtin_convertvector((row_sums)(even & 255) - BIAS[form], row_floats);
                row_floats second = __builtin_convertvector((row_sums)(odd & 255) - BIAS[form], row_floats);
                row_floats f = factor[j / (HALF / 2)];
                _mm512_storeu_si512(to, words_of((__m512)(first * f - below), (__m512)(second * f - below)));
            }
        }
    }
}
#define UNPACK(FORM)                                                                            \
    static void unpack_##FORM(const product *p, int64_t tile, int64_t first, int64_t last,      \
                              uint32_t *to, int64_t apart) {                                    \
        unpack_tile(FORM, p, tile, first, last, to, apart);                                     \
    }
UNPACK(INT8)
UNPACK(INT6)
UNPACK(INT4)
UNPACK(UINT4)
UNPACK(UINT5)
static void (*const unpacks[FORMS])(const product *, int64_t, int64_t, int64_t, uint32_t *, int64_t) = {
    [INT8] = unpack_INT8, [INT6] = unpack_INT6, [INT4] = unpack_INT4, [UINT4] = unpack_UINT4,
    [UINT5] = unpack_UINT5};

typedef struct {
    const product *p;
    int form;
    uint32_t *x;           /* rows of x, alternating */
    int64_t rows, columns; /* of a unit: rows of x at most; how many units cover the weight */
} many_rows;

static int alternate_units(void *context, units *left) {
    const many_rows *m = context;
    const product *p = m->p;
    for (int64_t i; (i = take_unit(left)) >= 0;)
        alternate((const char *)p->x + i * DOWN * p->k * 2, p->k * 2, p->rows - i * DOWN, p->k / 2,
                  m->x + i * DOWN * p->k / 2);
    return 0;
}

static void store_rows(const product *p, const float *sums, int64_t first, int64_t rows, int64_t tile,
                       int64_t vectors) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t v = 0; v < vectors; v++) {
            __m512 sum = _mm512_load_ps(sums + (r * vectors + v) * LANE);
            bf16 *to = (bf16 *)p->y + (first + r) * p->n + (tile + v) * TILE;
            _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(sum));
        }
}

static int many_rows_units(void *context, units *left) {
    const many_rows *m = context;
    const product *p = m->p;
    uint32_t *w = aligned_alloc(LINE, (PART_OF_ROW / 2 + m->rows) * ACROSS * sizeof *w);
    if (!w) return 1;
    float *sums = (float *)(w + PART_OF_ROW / 2 * ACROSS);
    for (int64_t u; (u = take_unit(left)) >= 0;) {
        int64_t tile = u % m->columns * (ACROSS / LANE), from = u / m->columns * m->rows;
        int64_t vectors = least(ACROSS / LANE, p->n / TILE - tile), rows = least(m->rows, p->rows - from);
        for (int64_t first = 0; first < p->k; first += PART_OF_ROW) {
            int64_t last = least(first + PART_OF_ROW, p->k);
            for (int64_t v = 0; v < vectors; v++)
                unpacks[m->form](p, tile + v, first, last, w + v * LANE, vectors * LANE);
            for (int64_t r = 0; r < rows; r += DOWN)
                words_products[vectors]((last - first) / 2,
                                        m->x + ((from + r) * p->k + first * DOWN) / 2, w,
                                        sums + r * vectors * LANE, first > 0);
        }
        store_rows(p, sums, from, rows, tile, vectors);
    }
    free(w);
    return 0;
}

static int takes_many(int form) { return unpacks[form] != NULL; }

static int multiply_many(const product *p, int form, int threads) {
    int64_t groups = (p->rows + DOWN - 1) / DOWN, columns = (p->n / TILE + 2) / 3;
    many_rows m = {p, form, aligned_alloc(LINE, (groups * DOWN * p->k * 2 + LINE - 1) / LINE * LINE),
                   UNIT_MOST, columns};
    if (!m.x) return 1;
    run_region(alternate_units, &m, groups, threads);
    while (m.rows > UNIT_LEAST && (p->rows + m.rows - 1) / m.rows * columns < PARTS * threads) m.rows /= 2;
    int failed = run_region(many_rows_units, &m, (p->rows + m.rows - 1) / m.rows * columns, threads);
    free(m.x);
    return failed;
}
#else
static int takes_many(int form) { return 0; }
static int multiply_many(const product *p, int form, int threads) { return 1; }
#endif
