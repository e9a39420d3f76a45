/* Blocked GEMM of many rows of x with a weight of any format, on the micro kernels of gemm.h or gemm_integers.h. x is
 * packed once; the weight is packed a panel at a time, which stays in L1 for all rows of a unit of work. */
#pragma once
#include "gemm.h"

/* Values along k per weight panel. */
#define PANEL 256
/* Distance, in rows of y, at which lines are prefetched before a store. */
#define STORES_AHEAD 8
/* UNIT_MAX: maximum rows of x per unit of work (twice as many of bf16 panels and of BYTES), rounded up to whole
 * panels. UNIT_MIN: units of more rows are halved if that occupies more threads. WIDTH_MAX: maximum columns of a unit;
 * its strips share one read of a panel of x from memory. */
enum { UNIT_MAX = 256, UNIT_MIN = 64, WIDTH_MAX = 256 };

/* A set of micro kernels and its panel layout. */
typedef struct {
    int64_t rows, lane, columns;      /* rows of an x panel; lanes of a vector; max columns of a strip */
    int64_t values, x_words, w_words; /* values of a step along k; its panel words per row of x and column of w */
    void (*pack)(const char *rows, int dtype, int64_t stride, int64_t count, int64_t values, void *to);
    micro_kernel_of *const *kernels; /* indexed by number of vectors */
    void (*begin)(void), (*end)(void); /* called once per thread before and after the kernels */
} micro_kernel_set;
static const micro_kernel_set FLOAT_SET = {
    .rows = ROWS, .lane = LANE, .columns = COLUMNS, .values = PER_WORD * DEPTH, .x_words = DEPTH,
    .w_words = DEPTH, .pack = pack_rows, .kernels = micro_kernels, .begin = begin_products,
    .end = end_products};

/* y[rows, n] = x[rows, k] w^T. */
typedef struct {
    const void *x;
    void *y;
    int dtype; /* of x and y */
    int upper; /* adds x^T x to the upper triangle of fp32 y [n, n]; `rows` and n count columns of x */
    int64_t stride; /* with `upper`: elements from one row of x to the next */
    int64_t rows, n, k;
    const micro_kernel_set *by;
    /* Packs values `first` to `last` of `columns` weight rows (a multiple of the vector) from `column` on into
     * a panel of B, zero-padded beyond the weight. */
    void (*unpack)(const void *weight, int64_t column, int64_t columns, int64_t first, int64_t last,
                   void *to);
    const void *weight;
    /* derived from the above */
    uint32_t *panels;              /* x over all k */
    int64_t unit, strips, columns; /* rows of x and strips per unit; units across the weight */
} many_rows;

static int64_t in_whole(int64_t count, int64_t each) { return (count + each - 1) / each * each; }

/* Number of steps along k for `values` values, and their panel words per row of x. */
static int64_t steps_of(const many_rows *p, int64_t values) {
    return (values + p->by->values - 1) / p->by->values;
}
static int64_t words_of_x(const many_rows *p, int64_t values) { return steps_of(p, values) * p->by->x_words; }

static int pack_x_units(void *context, units *left) {
    const many_rows *p = context;
    int64_t size = p->dtype == F32 ? 4 : 2, stride = p->upper ? p->stride : p->k * size;
    for (int64_t i; (i = take_unit(left)) >= 0;) {
        int64_t first = i * p->by->rows;
        p->by->pack((const char *)p->x + first * (p->upper ? size : stride), p->dtype, stride, p->rows - first, p->k,
                    p->panels + first * words_of_x(p, p->k));
    }
    return 0;
}

/* Stores sums [rows, columns padded to vectors] as columns of y from `column` on; with `upper` adds them. */
static void store_sums(const many_rows *p, const float *sums, int64_t first, int64_t rows, int64_t column,
                       int64_t columns) {
    int64_t stride = in_whole(columns, p->by->lane);
    for (int64_t r = 0; r < rows; r++, sums += stride) {
        int64_t at = (first + r) * p->n + column;
        if (p->upper)
            for (int64_t i = 0; i < columns; i++) ((float *)p->y)[at + i] += sums[i];
        else if (p->dtype == F32)
            memcpy((float *)p->y + at, sums, columns * sizeof *sums);
        else {
            if (r + STORES_AHEAD < rows) __builtin_prefetch((bf16 *)p->y + at + STORES_AHEAD * p->n, 1);
            narrow_row(sums, (bf16 *)p->y + at, columns);
        }
    }
}

/* Returns how many of `rows` rows of x from `from` on are multiplied with a strip of columns, the last of which is
 * `end` - 1: all, or with `upper` only rows before `end`. */
static int64_t rows_before(const many_rows *p, int64_t from, int64_t rows, int64_t end) {
    return p->upper ? least(rows, end > from ? end - from : 0) : rows;
}

/* Multiplies a unit's rows of x with `columns` weight rows: sums [strips, rows, columns of a strip]. */
static void multiply_unit(const many_rows *p, int64_t from, int64_t rows, int64_t column, int64_t columns,
                          uint32_t *b, float *sums) {
    const micro_kernel_set *by = p->by;
    for (int64_t first = 0; first < p->k; first += PANEL) {
        int64_t last = least(first + PANEL, p->k);
        float *c = sums;
        for (int64_t s = 0; s < columns; s += by->columns) {
            int64_t here = in_whole(least(by->columns, columns - s), by->lane);
            p->unpack(p->weight, column + s, here, first, last, b);
            const uint32_t *x = p->panels + from * words_of_x(p, p->k) + by->rows * words_of_x(p, first);
            const int64_t count = rows_before(p, from, rows, column + s + here);
            for (int64_t r = 0; r < count; r += by->rows) {
                by->kernels[here / by->lane](steps_of(p, last - first), x, b, c + r * here, first > 0);
                x += by->rows * words_of_x(p, p->k);
            }
            c += in_whole(rows, by->rows) * here;
        }
    }
}

static int many_row_units(void *context, units *left) {
    const many_rows *p = context;
    const micro_kernel_set *by = p->by;
    int64_t width = p->strips * by->columns, panel = PANEL / by->values * by->w_words * by->columns;
    uint32_t *b = take_lines((panel + p->unit * width) * sizeof *b);
    if (!b) return 1;
    by->begin();
    for (int64_t u; (u = take_unit(left)) >= 0;) {
        int64_t column = u % p->columns * width, from = u / p->columns * p->unit;
        int64_t columns = least(width, p->n - column), rows = least(p->unit, p->rows - from);
        float *sums = (float *)(b + panel);
        multiply_unit(p, from, rows, column, columns, b, sums);
        for (int64_t s = 0; s < columns; s += by->columns) {
            int64_t here = least(by->columns, columns - s);
            store_sums(p, sums, from, rows_before(p, from, rows, column + s + here), column + s, here);
            sums += in_whole(rows, by->rows) * in_whole(here, by->lane);
        }
    }
    by->end();
    free_lines(b);
    return 0;
}

/* Sets the size of a unit and returns the number of units: halves first the strips, then the rows of a unit, until
 * there are PARTS units per thread or a unit has one strip and at most UNIT_MIN rows. */
static int64_t divide(many_rows *p, int threads) {
    int64_t each = p->by->rows, most = p->upper ? UNIT_MAX : UNIT_MAX * least(2, p->by->values / p->by->x_words);
    int64_t turns = (p->rows + most - 1) / most;
    p->unit = in_whole((p->rows + turns - 1) / turns, each), p->strips = WIDTH_MAX / p->by->columns;
    for (;;) {
        p->columns = (p->n + p->strips * p->by->columns - 1) / (p->strips * p->by->columns);
        int64_t count = (p->rows + p->unit - 1) / p->unit * p->columns;
        if (count >= PARTS * threads || p->strips == 1 && p->unit <= UNIT_MIN) return count;
        if (p->strips > 1)
            p->strips /= 2;
        else
            p->unit = in_whole(p->unit / 2, each);
    }
}

/* Returns 0, or 1 if out of memory. */
static int multiply_many_rows(many_rows *p, int threads) {
    int64_t panels = (p->rows + p->by->rows - 1) / p->by->rows;
    int64_t bytes = panels * p->by->rows * words_of_x(p, p->k) * 4;
    p->panels = take_lines(in_whole(bytes, LINE));
    if (!p->panels) return 1;
    run_region(pack_x_units, p, panels, threads);
    int64_t count = divide(p, threads);
    int failed = run_region(many_row_units, p, count, threads);
    free_lines(p->panels);
    return failed;
}
