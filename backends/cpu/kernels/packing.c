/* Quantises a weight to int4 codes with bf16 scales, bit-identical to `int4_scales` of g4ir/ops/codecs.py. Vectorised
 * over groups, one per lane. Sums are in torch's order on x86-64: 4 x 8 partial sums for groups up to GROUP_MOST
 * (larger ones use several levels and are not handled here). Compiled without reassociation and fused multiply-adds
 * (library.py). Also fits scales of nonuniform levels, and quantises columns one after another with error
 * compensation. */
#include "kernels.h"
#include "number.h"
#include "team.h"

#include <math.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

/* SIDE: groups per vector. GROUP_MOST: maximum values of a group. UNIT: vectors of groups per unit of work.
 * ACCUMULATORS x SUMS: torch's partial sums. */
enum { SIDE = 16, GROUP_MOST = 512, UNIT = 64, SUMS = 8, ACCUMULATORS = 4 };
/* Larger weights, infinities and NaN fall back to the Python definition, so that no sum here overflows. */
#define WEIGHT_MOST 4096.0f
#define EACH for (int s = 0; s < SIDE; s++)
typedef float many[SIDE];

/* As in codecs.py: `_STARTS`, `_EXTREMES`, `_FIRST`, `_NEAR`, `_WEIGHTED_STARTS`. */
enum { STARTS = 3, EXTREMES = 15, FIRST = 3, NEIGHBOURS = 3 };
static const float starts[STARTS] = {-8, -7, 7.4f};
static const float extremes[EXTREMES] = {-8, 7, -7, 6, -6, 5, -5, 4, -4, 3, -3, 2, -2, 1, -1};
#define NEAR 0x1p-6f
enum { WEIGHTED_STARTS = 12 };
#define WEIGHTED_START(i) (float)(-2.8 - 0.8 * (i))

typedef struct {
    const void *w;
    const float *moments; /* second moments of a matrix's columns, [matrices, row, group]; NULL: unweighted errors */
    uint8_t *codes;
    bf16 *scales;
    int64_t groups, group, row, matrix; /* number of groups, values per group, groups per row and per matrix */
    int dtype, refused;
} weight;

static inline float nearest(float v) {
    v = v < -8 ? -8 : v;
    v = v > 7 ? 7 : v;
    return rintf(v);
}

static inline float code(float x, float d) { return nearest(x / d); }

static inline float rounded(float scale) {
    float made = widen(narrow(scale));
    return made != 0 ? made : 1;
}

/* Per group: sums of x * code and code^2, or of squared errors, for the codes of x / d. WEIGHTED: weighted by the
 * moments `m`; products then use the codes of x * d. */
enum { PRODUCTS, ERRORS, WEIGHTED_PRODUCTS, WEIGHTED_ERRORS };
static inline __attribute__((always_inline)) void sums(const int kind, const many *x, const many *m,
                                                       const float *d, int64_t group, float *sum,
                                                       float *squares) {
    const int errors = kind == ERRORS || kind == WEIGHTED_ERRORS;
    EACH sum[s] = squares[s] = 0;
    for (int j = 0; j < SUMS; j++) {
        many lane = {0}, lanes = {0};
        for (int a = 0; a < ACCUMULATORS; a++) {
            many part = {0}, parts = {0};
            for (int64_t i = a * SUMS + j; i < group; i += ACCUMULATORS * SUMS) EACH {
                float v = x[i][s];
                float q = kind == WEIGHTED_PRODUCTS ? nearest(v * d[s]) : code(v, d[s]);
                float off = q * d[s] - v, by = kind >= WEIGHTED_PRODUCTS ? m[i][s] : 1;
                part[s] += errors ? off * off * by : q * (v * by);
                parts[s] += errors ? 0 : q * q * by;
            }
            EACH lane[s] += part[s], lanes[s] += parts[s];
        }
        EACH sum[s] += lane[s], squares[s] += lanes[s];
    }
}

/* Least-squares scale: refines each start, and returns the scale of minimum squared error (the first of equal
 * ones). */
static void fitted(const many *x, const float *extreme, int64_t group, float *best) {
    many d, sum, squares, least;
    for (int start = 0; start < STARTS; start++) {
        EACH d[s] = rounded(extreme[s] / starts[start]);
        for (int round = 0; round < 2; round++) {
            sums(PRODUCTS, x, 0, d, group, sum, squares);
            EACH d[s] = rounded(squares[s] > 0 ? sum[s] / squares[s] : d[s]);
        }
        sums(ERRORS, x, 0, d, group, sum, squares);
        EACH {
            int better = !start || sum[s] < least[s];
            best[s] = better ? d[s] : best[s];
            least[s] = better ? sum[s] : least[s];
        }
    }
}

/* Least-squares scale for the codes round(x * factor). */
static void best_for(const many *x, const many *m, const float *factor, int64_t group, float *dot,
                     float *scale) {
    many squares;
    sums(WEIGHTED_PRODUCTS, x, m, factor, group, dot, squares);
    EACH scale[s] = dot[s] / (squares[s] < 1e-30f ? 1e-30f : squares[s]);
}

/* Searches for scales of smaller weighted error; replaces a group's scale if the one found has a smaller error. */
static void weighted(const many *x, const many *m, const float *extreme, int64_t group,
                     float *scales) {
    many best, most = {0}, factor, dot, scale, error, plain;
    EACH best[s] = scales[s];
    for (int start = 0; start < WEIGHTED_STARTS; start++) {
        EACH factor[s] = WEIGHTED_START(start) * (1 / (extreme[s] != 0 ? extreme[s] : 1));
        best_for(x, m, factor, group, dot, scale);
        EACH {
            float gain = dot[s] * scale[s];
            best[s] = gain > most[s] ? scale[s] : best[s];
            most[s] = gain > most[s] || gain != gain ? gain : most[s];
        }
    }
    EACH factor[s] = 1 / rounded(best[s]);
    best_for(x, m, factor, group, dot, scale);
    EACH best[s] = rounded(scale[s]);
    sums(WEIGHTED_ERRORS, x, m, best, group, error, dot);
    sums(WEIGHTED_ERRORS, x, m, scales, group, plain, dot);
    EACH scales[s] = error[s] < plain[s] ? best[s] : scales[s];
}

static int matches(const many *x, int s, float d, int64_t group) {
    if (d == 0) return 0;
    for (int64_t i = 0; i < group; i++)
        if (widen(narrow(code(x[i][s], d) * d)) != x[i][s]) return 0;
    return 1;
}

/* If a group's values are already on a 4-bit grid (quantised before), uses the grid's scale; 1 for a group of
 * zeros. */
static void on_grids(const many *x, const float *extreme, int64_t group, float *scales) {
    int near[EXTREMES][SIDE], any[SIDE] = {0};
    for (int n = 0; n < EXTREMES; n++) {
        EACH near[n][s] = 1;
        for (int i = 0; i < FIRST; i++) EACH {
            float tried = extreme[s] / extremes[n];
            near[n][s] &= fabsf(code(x[i][s], tried) * tried - x[i][s]) <= fabsf(x[i][s]) * NEAR;
        }
        EACH any[s] |= near[n][s];
    }
    EACH {
        int found = extreme[s] == 0;
        if (found) scales[s] = 1;
        for (int by = 0; any[s] && by < NEIGHBOURS && !found; by++)
            for (int n = 0; n < EXTREMES && !found; n++) {
                if (!near[n][s]) continue;
                float d = widen((bf16)(narrow(extreme[s] / extremes[n]) + (by == 2 ? -1 : by)));
                if ((found = matches(x, s, d, group))) scales[s] = d;
            }
    }
}

/* Quantises groups `first` to `first` + SIDE - 1, or up to the last one. */
static void pack_tile(weight *p, int64_t first) {
    const int64_t group = p->group, left = p->groups - first, count = left < SIDE ? left : SIDE;
    many x[GROUP_MOST], m[GROUP_MOST], extreme = {0}, scales;
    uint8_t bytes[GROUP_MOST / 2][SIDE];
    int large = 0;
    for (int s = 0; s < SIDE; s++)
        for (int64_t i = 0; i < group; i++)
            x[i][s] = s < count ? load(p->w, (first + s) * group + i, p->dtype) : 0;
    for (int64_t i = 0; i < group; i++) EACH {
        large |= !(fabsf(x[i][s]) <= WEIGHT_MOST);
        extreme[s] = fabsf(x[i][s]) > fabsf(extreme[s]) ? x[i][s] : extreme[s];
    }
    if (large) {
        __atomic_store_n(&p->refused, 1, __ATOMIC_RELAXED);
        return;
    }
    fitted(x, extreme, group, scales);
    if (p->moments) {
        for (int s = 0; s < SIDE; s++) {
            const int64_t g = first + (s < count ? s : 0), place = g / p->matrix * p->row + g % p->row;
            for (int64_t i = 0; i < group; i++) m[i][s] = p->moments[place * group + i];
        }
        weighted(x, m, extreme, group, scales);
    }
    on_grids(x, extreme, group, scales);
    for (int64_t i = 0; i < group / 2; i++) EACH {
        int even = (int)code(x[2 * i][s], scales[s]), odd = (int)code(x[2 * i + 1][s], scales[s]);
        bytes[i][s] = (uint8_t)((even + 8) | (odd + 8) << 4);
    }
    for (int64_t s = 0; s < count; s++) {
        p->scales[first + s] = narrow(scales[s]);
        for (int64_t i = 0; i < group / 2; i++) p->codes[(first + s) * group / 2 + i] = bytes[i][s];
    }
}

static int pack_units(void *context, units *u) {
    weight *p = context;
    for (int64_t unit; (unit = take_unit(u)) >= 0;)
        for (int64_t tile = unit * UNIT; tile < (unit + 1) * UNIT; tile++)
            if (tile * SIDE < p->groups && !__atomic_load_n(&p->refused, __ATOMIC_RELAXED))
                pack_tile(p, tile * SIDE);
    return 0;
}

/* Whether this group size and dtype (kernels.h) are supported here. */
int g4ir_takes_packing(int dtype, int64_t group) {
    return dtype <= F16 && group > 0 && group <= GROUP_MOST && group % (ACCUMULATORS * SUMS) == 0;
}

/* Writes int4 codes, two per byte, and a bf16 scale per group; `moments` of each matrix's columns weight the
 * errors. Returns 1 if a weight's magnitude is above WEIGHT_MOST or it is not finite; the output is then undefined. */
int g4ir_pack(const void *w, const float *moments, void *codes, void *scales, int64_t groups, int64_t group,
              int64_t row, int64_t matrix, int dtype, int threads) {
    weight p = {w, moments, codes, scales, groups, group, row, matrix, dtype, 0};
    run_region(pack_units, &p, (groups + SIDE * UNIT - 1) / (SIDE * UNIT), threads);
    return p.refused;
}

/* Half the number of entries of a table of levels, which has four entries per unit of y (grids.py). */
enum { REACH = 512 };

/* Looks up the level nearest to y; NaN takes the first entry. */
static inline float level(const float *levels, float y) {
    float at = floorf(y * 4);
    at = at >= -REACH ? at : -REACH;
    at = at <= REACH - 1 ? at : REACH - 1;
    return levels[(int)at + REACH];
}

/* Replaces SIDE values by the levels nearest to them. */
static inline void nearest_levels(const float *levels, float *y) {
#ifdef __AVX512F__
    __m512 at = _mm512_roundscale_ps(_mm512_loadu_ps(y) * 4, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    at = _mm512_min_ps(_mm512_max_ps(at, _mm512_set1_ps(-REACH)), _mm512_set1_ps(REACH - 1));
    _mm512_storeu_ps(y, _mm512_i32gather_ps(_mm512_cvtps_epi32(at), levels + REACH, 4));
#else
    EACH y[s] = level(levels, y[s]);
#endif
}

/* LEVELS_GROUP: values of a group of nonuniform levels. LEVEL_STARTS: number of `_STARTS` of grids.py. */
enum { LEVELS_GROUP = 32, LEVEL_STARTS = 5 };
static const float level_starts[LEVEL_STARTS] = {1.1f, 1.0f, 0.9f, 0.8f, 0.72f};

typedef struct {
    const float *x, *moments, *levels; /* moments [row, LEVELS_GROUP], or NULL */
    float *scales, *shifts;
    int64_t groups, row; /* number of groups, groups per row */
    float lowest, shift;
    int refused;
} grid_search;

/* Sums of x * level and level^2 for the levels nearest to x * factor - shift, weighted by m, in the order of
 * `sums`. */
static void level_products(const grid_search *p, const many *x, const many *m, const float *factor, float shift,
                           float *dot, float *squares) {
    EACH dot[s] = squares[s] = 0;
    for (int j = 0; j < SUMS; j++) {
        many lane = {0}, lanes = {0};
        for (int i = j; i < LEVELS_GROUP; i += SUMS) {
            many q;
            EACH q[s] = x[i][s] * factor[s] - shift;
            nearest_levels(p->levels, q);
            EACH q[s] += shift;
            EACH lane[s] += q[s] * (x[i][s] * m[i][s]), lanes[s] += q[s] * q[s] * m[i][s];
        }
        EACH dot[s] += lane[s], squares[s] += lanes[s];
    }
}

/* `fit_groups` of grids.py for groups `first` to `first` + SIDE - 1, or up to the last one. */
static void fit_tile(grid_search *p, int64_t first) {
    const int64_t left = p->groups - first, count = left < SIDE ? left : SIDE;
    many x[LEVELS_GROUP], m[LEVELS_GROUP], extreme = {0}, inverse, factor, dot, squares;
    many best = {0}, scale = {0}, shift = {0};
    int large = 0;
    for (int s = 0; s < SIDE; s++)
        for (int64_t i = 0; i < LEVELS_GROUP; i++) {
            x[i][s] = s < count ? p->x[(first + s) * LEVELS_GROUP + i] : 0;
            m[i][s] = p->moments ? p->moments[(first + s) % p->row * LEVELS_GROUP + i] : 1;
        }
    for (int i = 0; i < LEVELS_GROUP; i++) EACH {
        large |= !(fabsf(x[i][s]) <= WEIGHT_MOST);
        extreme[s] = fabsf(x[i][s]) > fabsf(extreme[s]) ? x[i][s] : extreme[s];
    }
    if (large) __atomic_store_n(&p->refused, 1, __ATOMIC_RELAXED);
    EACH inverse[s] = p->lowest * (1 / (extreme[s] != 0 ? extreme[s] : 1)); /* as torch divides a number by a tensor */
    for (int n = 0; n < 2 * LEVEL_STARTS; n++) {
        const float add = n < LEVEL_STARTS ? 0 : p->shift;
        EACH factor[s] = inverse[s] * level_starts[n % LEVEL_STARTS];
        level_products(p, x, m, factor, add, dot, squares);
        EACH {
            const float fit = dot[s] / (squares[s] < 1e-30f ? 1e-30f : squares[s]), gain = dot[s] * fit;
            scale[s] = gain > best[s] ? fit : scale[s];
            shift[s] = gain > best[s] ? add : shift[s];
            best[s] = gain > best[s] ? gain : best[s];
        }
    }
    memcpy(p->scales + first, scale, count * sizeof *scale);
    memcpy(p->shifts + first, shift, count * sizeof *shift);
}

static int fit_units(void *context, units *u) {
    grid_search *p = context;
    for (int64_t unit; (unit = take_unit(u)) >= 0;)
        for (int64_t tile = unit * UNIT; tile < (unit + 1) * UNIT; tile++)
            if (tile * SIDE < p->groups) fit_tile(p, tile * SIDE);
    return 0;
}

/* `fit_groups` of grids.py for fp32 groups of LEVELS_GROUP values. Returns 1, as g4ir_pack does, if a value's magnitude
 * is above WEIGHT_MOST or it is not finite. */
int g4ir_fit_groups(const float *x, const float *moments, const float *levels, float *scales, float *shifts,
                    int64_t groups, int64_t row, int lowest, int shift, int threads) {
    grid_search p = {x, moments, levels, scales, shifts, groups, row, lowest, shift, 0};
    run_region(fit_units, &p, (groups + SIDE * UNIT - 1) / (SIDE * UNIT), threads);
    return p.refused;
}

/* LANES: weight rows per unit of work. BLOCK_MOST: maximum columns of a call. */
enum { LANES = 64, BLOCK_MOST = 128 };

typedef struct {
    float *x;
    const float *by, *step, *shift, *start, *levels; /* levels: NULL for integers */
    int64_t count, rows;
    float low, high;
} columns;

static void round_columns(const columns *c, int64_t first) {
    float errors[BLOCK_MOST][LANES];
    const int64_t left = c->rows - first, lanes = left < LANES ? left : LANES;
    for (int64_t j = 0; j < c->count; j++) {
        float v[LANES] = {0}, y[LANES] = {0};
        const int64_t at = j * c->rows + first;
        memcpy(v, c->x + at, lanes * sizeof *v);
        for (int64_t i = 0; i < j; i++) {
            const float by = c->by[j * c->count + i];
            for (int s = 0; s < LANES; s++) v[s] += by * errors[i][s];
        }
        for (int64_t s = 0; s < lanes; s++) y[s] = v[s] / c->step[at + s] - c->shift[at + s];
        if (c->levels)
            for (int s = 0; s < LANES; s += SIDE) nearest_levels(c->levels, y + s);
        else
            for (int s = 0; s < LANES; s++) y[s] = rintf(fminf(fmaxf(y[s], c->low), c->high));
        memset(errors[j], 0, sizeof errors[j]);
        for (int64_t s = 0; s < lanes; s++) {
            const float rounded = (y[s] + c->shift[at + s]) * c->step[at + s];
            c->x[at + s] = errors[j][s] = rounded - c->start[at + s];
        }
    }
}

static int round_units(void *context, units *u) {
    for (int64_t unit; (unit = take_unit(u)) >= 0;) round_columns(context, unit * LANES);
    return 0;
}

/* `quantize_columns` of g4ir/quant/compensation.py for up to BLOCK_MOST columns of `rows` values; levels, or
 * integers from low to high. */
int g4ir_round_columns(float *x, const float *by, const float *step, const float *shift, const float *start,
                       const float *levels, int64_t count, int64_t rows, int low, int high, int threads) {
    columns c = {x, by, step, shift, start, levels, count, rows, low, high};
    run_region(round_units, &c, (rows + LANES - 1) / LANES, threads);
    return 0;
}
