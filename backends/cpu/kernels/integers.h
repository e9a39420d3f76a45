/* GEMV of a tiled weight with a few bf16 rows of x, on vector integer instructions (x as integers, digits.h; fp8
 * weights: on bf16 dot products). */
#pragma once
#include "amx.h"

#ifdef INTEGERS
/* Whether this weight format has an integer kernel. */
#ifdef FP8_TILES
#define HAS_INTEGERS 1
#else
#define HAS_INTEGERS (FORM != FP8)
#endif

/* Maximum vectors of a line (a word of each row of a tile) that are multiplied together, so that a word of x is
 * broadcast once for them. */
#define VECTORS_MOST (WIDE == 32 ? 2 : 1)
#define EACH_VECTOR UNROLLED for (int v = 0; v < vectors; v++)
#define EACH_ROW UNROLLED for (int r = 0; r < rows; r++)

/* Accumulates the products of word j of block b of the codes at byte offset `at` with block i of each row of x. */
ALWAYS word_product(const int form, const int rows, const int vectors, const int as, int b, int j,
                    int64_t at, const strip *of, const digits *const *x, int64_t i,
                    row_sums (*made)[TOGETHER][3]) {
    row_words factors[VECTORS_MOST][2];
    EACH_VECTOR factors_of(as, code_word(form, of[v].codes + at, b, j), factors[v]);
    EACH_ROW add_word(form, vectors, as, factors, x[r] + i, j, made, r);
#if WIDE == 32 /* keeps compilers from loading all words first, to more registers than there are; of INT2 and INT3 four
                * words come from one load */
    if (!FOURTHS(form)) __asm__ volatile("" ::: "memory");
#endif
}

/* Multiplies block b of the codes at byte offset `at` with block i of each row of x; `of`: strips of one tile. */
ALWAYS block_product(const int form, const int rows, const int vectors, const int as, int b, int64_t at,
                     const strip *of, const row_floats *scale, const row_floats *least,
                     const digits *const *x, int64_t i, row_floats (*sum)[TOGETHER]) {
    const int halves = 1 + HALVES(form), minima = MINIMA(form);
    row_floats factor[VECTORS_MOST][2], below[VECTORS_MOST][2];
    EACH_VECTOR block_factors(form, of[v].codes + at, b, scale[v], least[v], factor[v], below[v]);
    if (minima)
        EACH_ROW UNROLLED for (int h = 0; h < halves; h++) {
            row_floats x_sum = all_rows(sum_of_part(form, x[r] + i, h));
            EACH_VECTOR sum[v][r] = multiply_add(-below[v][h], x_sum, sum[v][r]);
        }
    UNROLLED for (int h = 0; h < halves; h++) {
        row_sums made[VECTORS_MOST][TOGETHER][3];
        EACH_ROW {
            int32_t less = minima ? 0 : halves == 2 ? x[r][i].less[h] : x[r][i].both;
            EACH_VECTOR start_sums(as, less, made[v][r]);
        }
        /* written out: GCC at -O2 does not unroll a loop of this size */
#define WORD(J)                                                                                 \
    if (halves == 1 || (J) / 4 == h) word_product(form, rows, vectors, as, b, J, at, of, x, i, made)
        WORD(0); WORD(1); WORD(2); WORD(3); WORD(4); WORD(5); WORD(6); WORD(7);
        EACH_ROW {
            row_floats unit = all_rows(x[r][i].unit);
            EACH_VECTOR sum[v][r] =
                multiply_add(total_of(form, as, made[v][r]), factor[v][h] * unit, sum[v][r]);
        }
    }
}

/* Multiplies strips with `rows` rows of x; each `vectors` consecutive strips belong to one tile. */
ALWAYS tile_product(const int form, const int rows, const int strips, const int vectors, const int as,
                    const coded *p, const strip *of, const digits *const *x) {
    const int dtype = p->scales_dtype;
    const int together = BLOCKS_OF(form), minima = MINIMA(form);
    row_floats sum[2 * STRIPS_MOST][TOGETHER], scale[2 * STRIPS_MOST], least[2 * STRIPS_MOST];
    EACH_STRIP UNROLLED for (int r = 0; r < rows; r++) sum[s][r] = (row_floats){0};
    int64_t left = p->each, group = 0, blocks = p->k / BLOCK, at = 0;
    for (int64_t i = 0; i < blocks; i += together, at += WORDS_OF(form) * LINE) {
        if (left >= p->each) {
            EACH_STRIP scale[s] = tile_scales(of[s].scales, group * TILE, dtype);
            if (minima) EACH_STRIP least[s] = tile_scales(of[s].scales, (group + 1) * TILE, dtype);
            group += 1 + minima, left = 0;
        }
        left += together * BLOCK;
        UNROLLED for (int b = 0; b < together; b++) UNROLLED for (int s = 0; s < strips; s += vectors) {
            const int line = b * WORDS_OF(form) / together;
            /* four streams are prefetched only for formats of few bits on AVX2: int4 in 0.9 of the time (Zen 4) */
            if (strips / vectors < STRIPS_MOST || SUMS_IN_16_BITS(form))
                UNROLLED for (int j = line; j < (b + 1) * WORDS_OF(form) / together; j++)
                    __builtin_prefetch(of[s].codes + at + j * LINE + TILE_AHEAD, 0, 2);
            block_product(form, rows, vectors, as, b, at, of + s, scale + s, least + s, x, i + b, sum + s);
        }
    }
    EACH_STRIP UNROLLED for (int r = 0; r < rows; r++)
        *(any_row_floats *)(of[s].out + r * TILE) = sum[s][r];
}

/* Writes dot products of one or several tiles with rows of x to out[tiles][rows][TILE]. `a`: the digits of x in the
 * layout of amx.h. */
typedef void tile_dot(const coded *p, const int64_t *tiles, const digits *const *x, const int8_t *a,
                      float *out);

/* Rows of x whose sums fit the registers. */
#define ROWS_AT_ONCE(ROWS) ((ROWS) > 4 && (WIDE < 64 || MINIMA(FORM) && (ROWS) == 8) ? (ROWS) / 2 : (ROWS))
ALWAYS strip_products(const int rows, const int tiles_at_once, const int parts, const coded *p,
                      const int64_t *tiles, const digits *const *x, const int8_t *a, float *out) {
    const int amx = on_amx(FORM, parts, rows), each = amx ? rows : ROWS_AT_ONCE(rows);
    const int as = stored_as(FORM, parts, rows), sums = each * (1 + (as == DIGITS));
    const int sums_most = SUPER(FORM) ? 2 : 4;
    const int vectors = sums <= sums_most ? VECTORS_MOST : 1;
    const int strips = tiles_at_once * vectors;
    for (int lane = 0; lane < TILE; lane += vectors * WORDS)
        for (int r = 0; r < rows; r += each) {
            strip of[2 * STRIPS_MOST];
            EACH_STRIP of[s] = strip_of(p, tiles[s / vectors], lane + s % vectors * WORDS,
                                        out + (s / vectors * rows + r) * TILE);
            if (amx)
                amx_product(FORM, rows, parts, p, of, x, a);
            else
                tile_product(FORM, each, strips, vectors, as, p, of, x + r);
        }
}
#define TILE_DOT(PARTS, ROWS)                                                                   \
    static void tile_##PARTS##_##ROWS(const coded *p, const int64_t *tiles,                     \
                                      const digits *const *x, const int8_t *a, float *out) {    \
        switch (strips_of(FORM, PARTS, ROWS)) {                                                 \
        case 1: strip_products(ROWS, 1, PARTS, p, tiles, x, a, out); break;                     \
        case 2: strip_products(ROWS, 2, PARTS, p, tiles, x, a, out); break;                     \
        default: strip_products(ROWS, STRIPS_MOST, PARTS, p, tiles, x, a, out);                 \
        }                                                                                       \
    }
/* Instances by rows of x: five rows use that of six, seven that of eight. */
#define BY_ROWS(F, PARTS) F(PARTS, 1) F(PARTS, 2) F(PARTS, 3) F(PARTS, 4) F(PARTS, 6) F(PARTS, 8)
#define TILE_NAME(PARTS, ROWS) [ROWS] = tile_##PARTS##_##ROWS,
BY_ROWS(TILE_DOT, 1)
BY_ROWS(TILE_DOT, 2)
/* Indexed by digits of x (one: x is quantised to int8) and rows of x. */
static tile_dot *const TILE_DOTS[][TOGETHER + 1] = {{0}, {BY_ROWS(TILE_NAME, 1)}, {BY_ROWS(TILE_NAME, 2)}};

typedef struct {
    const coded *p;
    int parts; /* digits of x */
    int64_t together, part, turns; /* rows of x per pass; tiles per unit of work; passes over the rows */
} tiled_product;

static void store_tile(const coded *p, int64_t r, int64_t tile, const float *sums) {
    bf16 *to = (bf16 *)p->y + r * p->n + tile * TILE;
    narrow_row(sums, to, TILE);
}

/* Writes the digits of all rows of x, block by block; repeats the last row up to `tall` rows. */
static void rows_of_a(const tiled_product *m, const digits *form, int64_t tall, int8_t *to) {
    int64_t blocks = m->p->k / BLOCK, bytes = m->parts * BLOCK;
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t r = 0; r < tall; r++, to += bytes)
            memcpy(to, form + least(r, m->p->rows - 1) * blocks + b, bytes);
}

static int tile_units(void *context, units *left) {
    const tiled_product *m = context;
    const coded *p = m->p;
    tile_dot *const *of = TILE_DOTS[m->parts];
    int64_t blocks = p->k / BLOCK, tiles = p->n / TILE;
    int64_t tall = of[m->together] ? m->together : m->together + 1, amx = on_amx(FORM, m->parts, tall);
    int64_t bytes = (p->rows * blocks * sizeof(digits) + LINE - 1) / LINE * LINE;
    int64_t of_a = amx ? blocks * tall * m->parts * BLOCK : 0;
    digits *form = take_lines(bytes + (of_a + LINE - 1) / LINE * LINE);
    if (!form) return 1;
    const int as = stored_as(FORM, m->parts, m->together); /* a last pass of several has at least four rows */
    for (int64_t i = 0; i < p->rows * blocks; i++)
        quantize_block(m->parts, FORM, as == PAIRS, (const bf16 *)p->x + i * BLOCK, form + i);
    int8_t *a = (int8_t *)form + bytes;
    if (amx) set_amx(tall * m->parts), rows_of_a(m, form, tall, a); /* with AMX one pass has all rows */
    for (int64_t u; (u = take_unit(left)) >= 0;) {
        /* consecutive units have the same tiles, which are in cache for the later rows */
        int64_t r = u % m->turns * m->together, here = least(m->together, p->rows - r);
        int64_t first = u / m->turns * m->part, last = least(first + m->part, tiles);
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
    free_lines(form);
    return 0;
}

static int multiply_integers(const coded *p, int parts, int threads) {
    int64_t tiles = p->n / TILE, turns = (p->rows + TOGETHER - 1) / TOGETHER;
    int64_t together = (p->rows + turns - 1) / turns;
    int64_t part = tiles_of_part(tiles, threads, strips_of(FORM, parts, together));
    tiled_product m = {p, parts, together, part, turns};
    return run_region(tile_units, &m, turns * ((tiles + part - 1) / part), threads);
}
#else
#define HAS_INTEGERS 0
static int multiply_integers(const coded *p, int parts, int threads) { return 1; }
#endif
