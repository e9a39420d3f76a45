/* Products of a weight [n, k] with a few rows of x: the order of work and the threads. The weight is
 * read from memory once for TOGETHER rows, each part by one thread; in bf16, with instructions for it,
 * about as fast as memory delivers it for up to five rows. Sums are fp32. */
#include "kernels.h"
#include "team.h"

#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "number.h"

/* ---- the order of work ---- */

#define LINE 64
/* Bytes that are read ahead of their use, of all rows of a weight that are taken together, and of the
 * scales of each: left alone, some CPUs stop reading ahead at the end of every page. */
#define AHEAD 8192
#define SCALES_AHEAD 256
/* Rows of the weight that share what is loaded of x, at most. */
#define SIDE 4
/* Rows of x that are multiplied together at most: with numbers, and with codes. */
#define TOGETHER 8
#ifdef __AVX512F__
#define CODED_TOGETHER 6
#else
#define CODED_TOGETHER 4
#endif
/* Rows of a part of a weight at least. */
#define PART_LEAST 32

/* Makes one row of k numbers the form in which a product takes it. */
typedef void to_form(const void *x, int dtype, void *form, int64_t k);

typedef struct {
    const uint8_t *w;
    int64_t bytes; /* of 256 numbers of the weight */
    int64_t stride; /* numbers from one row of it to the next */
    const void *scales;
    int scales_dtype;
    int64_t groups, each; /* scales of a row; numbers that one serves */
    const void *x;
    to_form *to;   /* what makes rows of x as they are taken of those given; NULL: they are */
    int64_t apart; /* bytes between rows of x as they are taken */
    void *y;
    int dtype;
    int64_t rows, n, k;
    int64_t beside; /* from one row of the weight to the next of those that are taken together */
} product;

/* Which row of the weight is the one with number s of those that are taken together from o on. */
static inline int64_t beside(const product *p, int64_t o, int s) { return o + s * p->beside; }

static inline const uint8_t *weights(const product *p, int64_t o, int64_t at) {
    return p->w + (o * p->stride + at) * p->bytes / 256;
}

static inline const char *scales_of(const product *p, int64_t o) {
    return (const char *)p->scales + o * p->groups * (p->scales_dtype == F32 ? 4 : 2);
}

static inline const char *row_of(const product *p, int64_t r) {
    return (const char *)p->x + r * p->apart;
}

/* Reads what lies ahead of what is taken now of one row of `outs`, into the second cache: into the
 * nearest one it is a seventh slower for one row of x in bf16 (Zen 4), and a third for four. */
static inline void read_ahead(const void *now, const int outs) {
    __builtin_prefetch((const char *)now + AHEAD / outs, 0, 2);
}

/* Sums of one row of the weight with up to TOGETHER rows of x. */
typedef float sums[TOGETHER];

/* Sets out to the products of rows of the weight, from o on, with rows of x, from r on. */
typedef void (*dot)(const product *p, int64_t o, int64_t r, sums *out);

/* The same function for one row of x to TOGETHER, and for one row of the weight or `outs` of them, each
 * with its numbers as constants: loops over them are unrolled, and sums stay in registers, as many as
 * a CPU has. */
#define ALWAYS static inline __attribute__((always_inline)) void
#define UNROLLED _Pragma("GCC unroll 8")
#define SUMS _Pragma("GCC unroll 24")
/* How many rows of the weight, by rows of x: as many as make so many sums at most, and four. */
#define SUMS_24(F, NAME)                                                                        \
    F(NAME, 4, 1) F(NAME, 4, 2) F(NAME, 4, 3) F(NAME, 4, 4) F(NAME, 4, 5) F(NAME, 4, 6)         \
    F(NAME, 3, 7) F(NAME, 3, 8)
#define SUMS_12(F, NAME)                                                                        \
    F(NAME, 4, 1) F(NAME, 4, 2) F(NAME, 4, 3) F(NAME, 3, 4) F(NAME, 2, 5) F(NAME, 2, 6)
#define SUMS_4(F, NAME) F(NAME, 4, 1) F(NAME, 2, 2)
#define NONE(F, NAME)
/* One row of the weight, by rows of x. */
#define ONE_3_4(F, NAME) F(NAME, 1, 3) F(NAME, 1, 4)
#define ONE_7_8(F, NAME) F(NAME, 1, 7) F(NAME, 1, 8)
#define ONE_TO_4(F, NAME) F(NAME, 1, 1) F(NAME, 1, 2) ONE_3_4(F, NAME)
#define ONE_TO_6(F, NAME) ONE_TO_4(F, NAME) F(NAME, 1, 5) F(NAME, 1, 6)
#define ONE_TO_8(F, NAME) ONE_TO_6(F, NAME) ONE_7_8(F, NAME)
#define MOST_SUMS 24
#define DOT_OF(NAME, OUTS, ROWS)                                                                \
    static void NAME##_##OUTS##_##ROWS(const product *p, int64_t o, int64_t r, sums *out) {     \
        NAME(OUTS, ROWS, p, o, r, out);                                                         \
    }
#define DOTS_OF(NAME, OUTS, ROWS) {NAME##_1_##ROWS, NAME##_##OUTS##_##ROWS, OUTS},
typedef struct {
    dot one, several;
    int outs;
} dots;
/* By rows of x: those that several rows of the weight share, then those that one has alone. */
#define DOTS(NAME, ONES, SEVERAL, ALONE)                                                        \
    ONES(DOT_OF, NAME)                                                                          \
    SEVERAL(DOT_OF, NAME)                                                                       \
    static const dots NAME##s[] = {{0}, SEVERAL(DOTS_OF, NAME) ALONE(DOTS_OF, NAME)};

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* A thread's own rows of x in the form in which a product takes them; NULL where memory is short. */
static void *formed(product *p) {
    size_t size = p->rows * p->apart, item = p->dtype == F32 ? 4 : 2;
    char *form = aligned_alloc(LINE, (size + LINE - 1) / LINE * LINE);
    for (int64_t r = 0; form && r < p->rows; r++)
        p->to((const char *)p->x + r * p->k * item, p->dtype, form + r * p->apart, p->k);
    p->x = form;
    return form;
}

/* Products of `outs` rows of the weight, from o on, with `here` rows of x from r on. */
static void multiply_rows(const product *p, dot of, int outs, int64_t o, int64_t r, int64_t here) {
    sums out[SIDE];
    of(p, o, r, out);
    for (int64_t i = 0; i < here; i++)
        for (int s = 0; s < outs; s++)
            store(p->y, (r + i) * p->n + beside(p, o, s), out[s][i], p->dtype);
}

/* The same from row `first` to `last`. Those that are taken together lie apart, so that each is one of
 * a run of rows, which a CPU reads ahead by itself. */
static void multiply_part(product p, const dots *of, int64_t first, int64_t last, int64_t r,
                          int64_t here) {
    int64_t outs = of->outs, each = (last - first) / outs;
    p.beside = each;
    for (int64_t o = first; o < first + each; o++) multiply_rows(&p, of->several, outs, o, r, here);
    for (int64_t o = first + outs * each; o < last; o++) multiply_rows(&p, of->one, 1, o, r, here);
}

typedef struct {
    const product *p;
    const dots *of;
    /* rows of x that are multiplied together; rows of the weight in a unit, and units of a turn */
    int64_t together, part, parts;
} multiplication;

static int multiply_units(void *context, units *left) {
    const multiplication *m = context;
    product own = *m->p;
    void *form = own.to ? formed(&own) : NULL;
    if (own.to && !form) return 1;
    for (int64_t i; (i = take_unit(left)) >= 0;) {
        int64_t r = i / m->parts * m->together, o = i % m->parts * m->part;
        int64_t here = least(m->together, own.rows - r);
        multiply_part(own, m->of + here, o, least(o + m->part, own.n), r, here);
    }
    free(form);
    return 0;
}

/* y[rows, n] = x[rows, k] @ w[n, k]^T, all contiguous. Returns 0, or 1 where memory is short.
 *
 * Several rows of the weight share what is loaded of x. Each thread brings x into its form itself: x
 * is less to carry from one core to another than the form. */
static int multiply(const product *p, const dots *of, int64_t most, int threads) {
    int64_t turns = (p->rows + most - 1) / most, part = p->n / (threads * PARTS) + SIDE;
    if (part < PART_LEAST) part = PART_LEAST;
    multiplication m = {p, of, (p->rows + turns - 1) / turns, part, (p->n + part - 1) / part};
    int64_t groups = (p->rows + m.together - 1) / m.together;
    return run_region(multiply_units, &m, groups * m.parts, threads);
}

