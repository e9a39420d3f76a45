/* A GEMM in bf16 for products of many rows with quantised weights and for attention of prompts, if the
 * CPU multiplies bf16 and has no matrix unit, with which a library is faster. Operands are packed in
 * panels of words; a word is two neighbouring values along k, whose products one instruction adds: A
 * [k / 2, ROWS], B [k / 2, vectors, LANE], C [ROWS, vectors, LANE] in fp32. */
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__) && !defined(__AMX_BF16__)
#define GEMM
/* Rows of C, vectors of it at most, and values of a vector: 24 sums, as registers hold them. */
enum { ROWS = 8, VECTORS_MOST = 3, LANE = 16, COLUMNS = VECTORS_MOST * LANE };

/* C = A B, or C += A B with `more`. */
ALWAYS micro_kernel(const int vectors, int64_t words, const uint32_t *a, const uint32_t *b, float *c,
                    int more) {
    __m512 sum[ROWS][VECTORS_MOST];
    UNROLLED for (int i = 0; i < ROWS; i++)
        UNROLLED for (int v = 0; v < vectors; v++)
            sum[i][v] = more ? _mm512_loadu_ps(c + (i * vectors + v) * LANE) : _mm512_setzero_ps();
    for (const uint32_t *end = a + words * ROWS; a < end; a += ROWS, b += vectors * LANE)
        UNROLLED for (int i = 0; i < ROWS; i++) {
            __m512bh one = (__m512bh)_mm512_set1_epi32(a[i]);
            UNROLLED for (int v = 0; v < vectors; v++) {
                __m512bh other = (__m512bh)_mm512_loadu_si512(b + v * LANE);
                sum[i][v] = _mm512_dpbf16_ps(sum[i][v], other, one);
            }
        }
    UNROLLED for (int i = 0; i < ROWS; i++)
        UNROLLED for (int v = 0; v < vectors; v++)
            _mm512_storeu_ps(c + (i * vectors + v) * LANE, sum[i][v]);
}
#define MICRO_KERNEL(VECTORS)                                                                   \
    static void micro_kernel_##VECTORS(int64_t words, const uint32_t *a, const uint32_t *b,     \
                                       float *c, int more) {                                    \
        micro_kernel(VECTORS, words, a, b, c, more);                                            \
    }
MICRO_KERNEL(1)
MICRO_KERNEL(2)
MICRO_KERNEL(3)
static void (*const micro_kernels[])(int64_t, const uint32_t *, const uint32_t *, float *, int) = {
    NULL, micro_kernel_1, micro_kernel_2, micro_kernel_3};

/* Words of the values of two vectors, rounded to bf16. */
static inline __m512i words_of(__m512 first, __m512 second) {
    __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23,
                                     7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

/* Packs ROWS rows of `words` words, `apart` bytes from each other, in a panel of A; those from `here` on
 * are zero. */
static void pack_rows(const char *rows, int64_t apart, int64_t here, int64_t words, uint32_t *to) {
    for (int64_t i = 0; i < ROWS; i++) {
        const uint32_t *row = (const uint32_t *)(rows + i * apart);
        for (int64_t j = 0; j < words; j++) to[j * ROWS + i] = i < here ? row[j] : 0;
    }
}

/* Packs values `first` to `last` of LANE rows of a weight as one vector of a panel of B, whose words are
 * `apart` from each other. */
typedef void pack_weight(const product *p, int64_t tile, int64_t first, int64_t last, uint32_t *to,
                         int64_t apart);

/* Values along k of a panel: one of B lies in a core's nearest cache. */
#define PANEL 256
/* Rows of x in a unit: at most, and at least if there are to be enough units for the threads. */
enum { UNIT_MOST = 512, UNIT_LEAST = 64 };

typedef struct {
    const product *p;
    pack_weight *pack;
    uint32_t *x;           /* panels of x over all k */
    int64_t rows, columns; /* rows of x in a unit; units that cover the weight */
} gemm;

static int pack_x_units(void *context, units *left) {
    const gemm *m = context;
    const product *p = m->p;
    for (int64_t i; (i = take_unit(left)) >= 0;)
        pack_rows((const char *)p->x + i * ROWS * p->k * 2, p->k * 2, p->rows - i * ROWS, p->k / 2,
                  m->x + i * ROWS * p->k / 2);
    return 0;
}

static void store_sums(const product *p, const float *sums, int64_t first, int64_t rows, int64_t tile,
                       int64_t vectors) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t v = 0; v < vectors; v++) {
            bf16 *to = (bf16 *)p->y + (first + r) * p->n + (tile + v) * LANE;
            __m512 sum = _mm512_loadu_ps(sums + (r * vectors + v) * LANE);
            _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(sum));
        }
}

static int gemm_units(void *context, units *left) {
    const gemm *m = context;
    const product *p = m->p;
    uint32_t *b = aligned_alloc(LINE, (PANEL / 2 + m->rows) * COLUMNS * sizeof *b);
    if (!b) return 1;
    float *sums = (float *)(b + PANEL / 2 * COLUMNS);
    for (int64_t u; (u = take_unit(left)) >= 0;) {
        int64_t tile = u % m->columns * VECTORS_MOST, from = u / m->columns * m->rows;
        int64_t vectors = least(VECTORS_MOST, p->n / LANE - tile), rows = least(m->rows, p->rows - from);
        for (int64_t first = 0; first < p->k; first += PANEL) {
            int64_t last = least(first + PANEL, p->k);
            for (int64_t v = 0; v < vectors; v++)
                m->pack(p, tile + v, first, last, b + v * LANE, vectors * LANE);
            for (int64_t r = 0; r < rows; r += ROWS)
                micro_kernels[vectors]((last - first) / 2, m->x + ((from + r) * p->k + first * ROWS) / 2,
                                       b, sums + r * vectors * LANE, first > 0);
        }
        store_sums(p, sums, from, rows, tile, vectors);
    }
    free(b);
    return 0;
}

/* y = x w^T of a weight that `pack` reads; n is a multiple of LANE, k of BLOCK. Returns 0, or 1 if
 * memory is short. */
static int multiply_packed(const product *p, pack_weight *pack, int threads) {
    int64_t panels = (p->rows + ROWS - 1) / ROWS, units;
    gemm m = {p, pack, aligned_alloc(LINE, (panels * ROWS * p->k * 2 + LINE - 1) / LINE * LINE), UNIT_MOST,
              (p->n / LANE + VECTORS_MOST - 1) / VECTORS_MOST};
    if (!m.x) return 1;
    run_region(pack_x_units, &m, panels, threads);
    while ((units = (p->rows + m.rows - 1) / m.rows * m.columns) < PARTS * threads && m.rows > UNIT_LEAST)
        m.rows /= 2;
    int failed = run_region(gemm_units, &m, units, threads);
    free(m.x);
    return failed;
}
#endif
