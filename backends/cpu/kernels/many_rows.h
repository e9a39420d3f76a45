/* Products of many rows of x with a weight of any format, by the micro kernels of gemm.h: rows of x are packed
 * once; of the weight a panel at a time, in a core's nearest cache, for all rows of a unit. */
#pragma once
#include "gemm.h"

#ifdef GEMM
#define HAS_PANELS 1
/* Values along k of a panel of the weight. */
#define PANEL 256
/* Rows of x in a unit, and columns of a strip times strips of the weight: at most, and rows at least if there
 * are to be enough units for the threads. A panel of x comes from memory once for all strips of a unit. */
enum { UNIT_MAX = 256 * PER_WORD, UNIT_MIN = 64, WIDTH_MAX = 256 };

/* Micro kernels and their panels. */
typedef struct {
    int64_t rows, lane, columns;      /* of a panel of x; of a vector, and a strip of the weight at most */
    int64_t values, x_words, w_words; /* along k, and words of them in panels, for each row and column */
    void (*pack)(const char *rows, int dtype, int64_t stride, int64_t count, int64_t blocks, void *to);
    micro_kernel_of *const *kernels; /* by vectors */
} micro_kernel_set;
static const micro_kernel_set FLOAT_SET = {.rows = ROWS, .lane = LANE, .columns = COLUMNS, .values = PER_WORD,
                                           .x_words = 1, .w_words = 1, .pack = pack_rows,
                                           .kernels = micro_kernels};

/* y[rows, n] = x[rows, k] w^T. */
typedef struct {
    const void *x;
    void *y;
    int dtype; /* of x and y */
    int64_t rows, n, k;
    const micro_kernel_set *by;
    /* Packs values `first` to `last` of `columns` rows of the weight, at most a strip, from `column` on as a
     * panel of B. */
    void (*unpack)(const void *weight, int64_t column, int64_t columns, int64_t first, int64_t last,
                   void *to);
    const void *weight;
    /* derived */
    uint32_t *panels;              /* x over all k */
    int64_t unit, strips, columns; /* rows of x and strips in a unit; units that cover the weight */
} many_rows;

/* Words of so many values of a row of x in its panel. */
static int64_t words_of_x(const many_rows *p, int64_t values) {
    return values / p->by->values * p->by->x_words;
}

static int pack_x_units(void *context, units *left) {
    const many_rows *p = context;
    int64_t stride = p->k * (p->dtype == F32 ? 4 : 2);
    for (int64_t i; (i = take_unit(left)) >= 0;) {
        int64_t first = i * p->by->rows;
        p->by->pack((const char *)p->x + first * stride, p->dtype, stride, p->rows - first,
                    p->k / p->by->values, p->panels + first * words_of_x(p, p->k));
    }
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
                          uint32_t *b, float *sums) {
    const micro_kernel_set *by = p->by;
    for (int64_t first = 0; first < p->k; first += PANEL) {
        int64_t last = least(first + PANEL, p->k);
        float *c = sums;
        for (int64_t s = 0; s < columns; s += by->columns) {
            int64_t here = least(by->columns, columns - s);
            p->unpack(p->weight, column + s, here, first, last, b);
            const uint32_t *x = p->panels + from * words_of_x(p, p->k) + by->rows * words_of_x(p, first);
            for (int64_t r = 0; r < rows; r += by->rows, c += by->rows * here) {
                by->kernels[here / by->lane]((last - first) / by->values, x, b, c, first > 0);
                x += by->rows * words_of_x(p, p->k);
            }
        }
    }
}

static int many_row_units(void *context, units *left) {
    const many_rows *p = context;
    const micro_kernel_set *by = p->by;
    int64_t width = p->strips * by->columns, panel = PANEL / by->values * by->w_words * by->columns;
    uint32_t *b = take_lines((panel + p->unit * width) * sizeof *b);
    if (!b) return 1;
    for (int64_t u; (u = take_unit(left)) >= 0;) {
        int64_t column = u % p->columns * width, from = u / p->columns * p->unit;
        int64_t columns = least(width, p->n - column), rows = least(p->unit, p->rows - from);
        float *sums = (float *)(b + panel);
        multiply_unit(p, from, rows, column, columns, b, sums);
        for (int64_t s = 0; s < columns; s += by->columns) {
            int64_t here = least(by->columns, columns - s);
            store_sums(p, sums, from, rows, column + s, here);
            sums += (rows + by->rows - 1) / by->rows * by->rows * here;
        }
    }
    free_lines(b);
    return 0;
}

/* Returns the units of a product; a unit becomes smaller until each thread has some. */
static int64_t divide(many_rows *p, int threads) {
    int64_t each = p->by->rows;
    p->unit = UNIT_MAX / each * each, p->strips = WIDTH_MAX / p->by->columns;
    for (;;) {
        p->columns = (p->n + p->strips * p->by->columns - 1) / (p->strips * p->by->columns);
        int64_t count = (p->rows + p->unit - 1) / p->unit * p->columns;
        int halve_rows = p->unit > UNIT_MIN && (p->unit > p->rows || p->strips == 1);
        if (count >= PARTS * threads || !halve_rows && p->strips == 1) return count;
        if (halve_rows)
            p->unit = p->unit / 2 / each * each;
        else
            p->strips /= 2;
    }
}

/* n is a multiple of a vector, k of values that are packed together. Returns 0, or 1 if memory is short. */
static int multiply_many_rows(many_rows *p, int threads) {
    int64_t panels = (p->rows + p->by->rows - 1) / p->by->rows;
    int64_t bytes = panels * p->by->rows * words_of_x(p, p->k) * 4;
    p->panels = take_lines((bytes + LINE - 1) / LINE * LINE);
    if (!p->panels) return 1;
    run_region(pack_x_units, p, panels, threads);
    int64_t count = divide(p, threads);
    int failed = run_region(many_row_units, p, count, threads);
    free_lines(p->panels);
    return failed;
}
#else
#define HAS_PANELS 0
enum { PER_WORD = 1 };
#endif
