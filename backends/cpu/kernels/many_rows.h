/* Products of many rows of x with a weight of any format, by the micro kernels of gemm.h: rows of x are packed
 * once; of the weight a panel at a time, in a core's nearest cache, for all rows of a unit. */
#pragma once
#include "gemm.h"

#ifdef GEMM
#define HAS_PANELS 1
/* Values along k of a panel of the weight. */
#define PANEL 256
/* Rows of x in a unit, and strips of COLUMNS rows of the weight: at most, and rows at least if there are to be
 * enough units for the threads. A panel of x comes from memory once for all strips of a unit. */
enum { UNIT_MAX = 256 * PER_WORD, UNIT_MIN = 64, STRIPS_MAX = 256 / COLUMNS };

/* y[rows, n] = x[rows, k] w^T. */
typedef struct {
    const void *x;
    void *y;
    int dtype; /* of x and y */
    int64_t rows, n, k;
    /* Packs values `first` to `last` of `columns` rows of the weight, at most COLUMNS, from `column` on as a
     * panel of B. */
    void (*unpack)(const void *weight, int64_t column, int64_t columns, int64_t first, int64_t last,
                   panel_word *to);
    const void *weight;
    /* derived */
    panel_word *panels;            /* x over all k */
    int64_t unit, strips, columns; /* rows of x and strips in a unit; units that cover the weight */
} many_rows;

static int pack_x_units(void *context, units *left) {
    const many_rows *p = context;
    int64_t words = p->k / PER_WORD, stride = p->k * (p->dtype == F32 ? 4 : 2);
    for (int64_t i; (i = take_unit(left)) >= 0;)
        pack_rows((const char *)p->x + i * ROWS * stride, p->dtype, stride, p->rows - i * ROWS, words,
                  p->panels + i * ROWS * words);
    return 0;
}

/* Stores sums [rows, columns] as columns of y from `column` on. */
static void store_sums(const many_rows *p, const float *sums, int64_t first, int64_t rows, int64_t column,
                       int64_t columns) {
    for (int64_t r = 0; r < rows; r++, sums += columns) {
        int64_t at = (first + r) * p->n + column;
        if (p->dtype == F32)
            memcpy((float *)p->y + at, sums, columns * sizeof *sums);
        else
            for (int64_t j = 0; j < columns; j++) ((bf16 *)p->y)[at + j] = narrow(sums[j]);
    }
}

/* Sums of rows of x with `columns` rows of the weight, [strips, rows, columns of a strip]. */
static void multiply_unit(const many_rows *p, int64_t from, int64_t rows, int64_t column, int64_t columns,
                          panel_word *b, float *sums) {
    for (int64_t first = 0; first < p->k; first += PANEL) {
        int64_t last = least(first + PANEL, p->k), words = (last - first) / PER_WORD;
        float *c = sums;
        for (int64_t s = 0; s < columns; s += COLUMNS) {
            int64_t here = least(COLUMNS, columns - s);
            p->unpack(p->weight, column + s, here, first, last, b);
            const panel_word *x = p->panels + (from * p->k + first * ROWS) / PER_WORD;
            for (int64_t r = 0; r < rows; r += ROWS, x += p->k / PER_WORD * ROWS, c += ROWS * here)
                micro_kernels[here / LANE](words, x, b, c, first > 0);
        }
    }
}

static int many_row_units(void *context, units *left) {
    const many_rows *p = context;
    int64_t width = p->strips * COLUMNS, panel = PANEL / PER_WORD * COLUMNS;
    panel_word *b = aligned_alloc(LINE, (panel + p->unit * width) * sizeof *b);
    if (!b) return 1;
    for (int64_t u; (u = take_unit(left)) >= 0;) {
        int64_t column = u % p->columns * width, from = u / p->columns * p->unit;
        int64_t columns = least(width, p->n - column), rows = least(p->unit, p->rows - from);
        float *sums = (float *)(b + panel);
        multiply_unit(p, from, rows, column, columns, b, sums);
        for (int64_t s = 0; s < columns; s += COLUMNS) {
            int64_t here = least(COLUMNS, columns - s);
            store_sums(p, sums, from, rows, column + s, here);
            sums += (rows + ROWS - 1) / ROWS * ROWS * here;
        }
    }
    free(b);
    return 0;
}

/* Returns the units of a product; a unit becomes smaller until each thread has some. */
static int64_t divide(many_rows *p, int threads) {
    p->unit = UNIT_MAX / ROWS * ROWS, p->strips = STRIPS_MAX;
    for (;;) {
        p->columns = (p->n + p->strips * COLUMNS - 1) / (p->strips * COLUMNS);
        int64_t count = (p->rows + p->unit - 1) / p->unit * p->columns;
        int halve_rows = p->unit > UNIT_MIN && (p->unit > p->rows || p->strips == 1);
        if (count >= PARTS * threads || !halve_rows && p->strips == 1) return count;
        if (halve_rows)
            p->unit = p->unit / 2 / ROWS * ROWS;
        else
            p->strips /= 2;
    }
}

/* n is a multiple of LANE, k of PER_WORD. Returns 0, or 1 if memory is short. */
static int multiply_many_rows(many_rows *p, int threads) {
    int64_t panels = (p->rows + ROWS - 1) / ROWS, bytes = panels * ROWS * p->k / PER_WORD * 4;
    p->panels = aligned_alloc(LINE, (bytes + LINE - 1) / LINE * LINE);
    if (!p->panels) return 1;
    run_region(pack_x_units, p, panels, threads);
    int64_t count = divide(p, threads);
    int failed = run_region(many_row_units, p, count, threads);
    free(p->panels);
    return failed;
}
#else
#define HAS_PANELS 0
enum { PER_WORD = 1 };
#endif
