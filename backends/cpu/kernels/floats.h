/* GEMV of quantised weights in fp32: for fp32 rows of x, and for bf16 rows if the format has no integer kernel on this
 * CPU (integers.h) or the weight is not tiled. Each lane of a vector belongs to one weight row, so that sums need no
 * horizontal reduction. */
#pragma once
#include "tiles.h"

/* FLOAT_ROWS: maximum rows of x per pass. FLOAT_STRIPS: vectors of a tile per pass, by rows of x. Their sums fit the
 * registers, and are enough to hide the latency of a multiply-add. */
#define FLOAT_ROWS 4
#define FLOAT_STRIPS(ROWS) ((ROWS) < 3 && WORDS < TILE ? 2 : 1)

/* Decodes code t of each word. */
static inline row_floats number(row_words codes, int t) {
    if (FORM == FP8) return fp8_number(codes, t);
    if (WITH_SIGN && FORM == FP4) return signed_byte(codes, t);
    if (FORM == INT8 || FORM == IQ4 || NONUNIFORM(FORM)) return signed_byte(WITH_SIGN ? codes : codes ^ 0x80808080u, t);
    return __builtin_convertvector((row_sums)(codes >> (8 * t) & 255) - BIAS[FORM], row_floats);
}

/* Loads the scales of the two half blocks from value `i` on (a group is at least a half block), and the minimum. */
static inline void scales_at(const coded *p, const strip *of, int64_t i, row_floats *scale,
                             row_floats *least) {
    for (int h = 0; h < 2; h++) {
        int64_t group = (i + h * HALF) / p->each * (1 + MINIMA(FORM));
        scale[h] = tile_scales(of->scales, group * TILE, p->scales_dtype);
        if (MINIMA(FORM)) *least = tile_scales(of->scales, (group + 1) * TILE, p->scales_dtype);
    }
}

/* Multiplies strips with `rows` fp32 rows of x, permuted to the order of words. */
ALWAYS float_product(const int rows, const int strips, const coded *p, const strip *of,
                     const float *const *x) {
    row_floats sum[2][FLOAT_ROWS], scale[2][2], least[2] = {{0}, {0}};
    EACH_STRIP UNROLLED for (int r = 0; r < rows; r++) sum[s][r] = (row_floats){0};
    int64_t next = 0;
    for (int64_t i = 0; i < p->k; i += BLOCK) {
        if (i >= next) {
            EACH_STRIP scales_at(p, of + s, i, scale[s], least + s);
            next = p->each < BLOCK ? i + 1 : i + p->each;
        }
        const int64_t at = i / BLOCK / BLOCKS_OF(FORM) * BYTES_OF(FORM) * TILE;
        const int b = i / BLOCK % BLOCKS_OF(FORM);
        row_floats factor[2][2], below[2][2];
        EACH_STRIP {
            block_factors(FORM, of[s].codes + at, b, scale[s][0], least[s], factor[s], below[s]);
            if (p->each < BLOCK) factor[s][1] = scale[s][1];
        }
        for (int h = 0; h < 2; h++) {
            row_floats part[2][FLOAT_ROWS];
            EACH_STRIP UNROLLED for (int r = 0; r < rows; r++)
                part[s][r] = MINIMA(FORM) ? sum[s][r] : (row_floats){0};
            for (int j = h * 4; j < h * 4 + 4; j++) EACH_STRIP {
                row_words codes = code_word(FORM, of[s].codes + at, b, j);
                UNROLLED for (int t = 0; t < 4; t++) {
                    row_floats v = number(codes, t);
                    if (MINIMA(FORM)) v = multiply_add(v, factor[s][h], -below[s][h]);
                    UNROLLED for (int r = 0; r < rows; r++)
                        part[s][r] = multiply_add(v, all_rows(x[r][i + j * 4 + t]), part[s][r]);
                }
            }
            EACH_STRIP UNROLLED for (int r = 0; r < rows; r++)
                sum[s][r] = MINIMA(FORM) ? part[s][r] : multiply_add(part[s][r], factor[s][h], sum[s][r]);
        }
    }
    EACH_STRIP UNROLLED for (int r = 0; r < rows; r++)
        *(any_row_floats *)(of[s].out + r * TILE) = sum[s][r];
}

/* Writes dot products of a tile with rows of x to out[rows][TILE]. */
typedef void float_dot(const coded *p, int64_t tile, const float *const *x, float *out);
#define FLOAT_DOT(ROWS)                                                                         \
    static void floats_##ROWS(const coded *p, int64_t tile, const float *const *x, float *out) {\
        const int strips = FLOAT_STRIPS(ROWS);                                                  \
        for (int lane = 0; lane < TILE; lane += strips * WORDS) {                               \
            strip of[2];                                                                        \
            EACH_STRIP of[s] = strip_of(p, tile, lane + s * WORDS, out);                        \
            float_product(ROWS, strips, p, of, x);                                              \
        }                                                                                       \
    }
FLOAT_DOT(1)
FLOAT_DOT(2)
FLOAT_DOT(3)
FLOAT_DOT(4)
static float_dot *const FLOAT_DOTS[] = {NULL, floats_1, floats_2, floats_3, floats_4};

/* Converts a row of x to fp32, permuted to the order of values in the words of codes. */
static void row_in_order(const coded *p, int64_t r, float *to) {
    for (int64_t i = 0; i < p->k; i += BLOCK)
        for (int j = 0; j < BLOCK; j++)
            to[i + j] = load(p->x, r * p->k + i + value_at(FORM, j), p->dtype);
}

typedef struct {
    const coded *p;
    int tiled;
} float_products;

static int float_units(void *context, units *left) {
    const float_products *m = context;
    const coded *p = m->p;
    coded own = *p;
    int64_t x_bytes = (p->rows * p->k * sizeof(float) + LINE - 1) / LINE * LINE;
    char *room = take_lines(x_bytes + (tile_bytes(p) + LINE - 1) / LINE * LINE);
    if (!room) return 1;
    float *x = (float *)room;
    uint8_t *tile = (uint8_t *)room + x_bytes;
    for (int64_t r = 0; r < p->rows; r++) row_in_order(p, r, x + r * p->k);
    for (int64_t t; (t = take_unit(left)) >= 0;) {
        if (!m->tiled) own.w = tile, own.scales = tile_of_rows(p, t, tile);
        for (int64_t r = 0; r < p->rows; r += FLOAT_ROWS) {
            int64_t here = least(FLOAT_ROWS, p->rows - r);
            const float *of[FLOAT_ROWS];
            float out[FLOAT_ROWS * TILE];
            for (int64_t i = 0; i < here; i++) of[i] = x + (r + i) * p->k;
            FLOAT_DOTS[here](&own, m->tiled ? t : 0, of, out);
            for (int64_t i = 0; i < here; i++)
                for (int64_t j = 0; j < least(TILE, p->n - t * TILE); j++)
                    store(p->y, (r + i) * p->n + t * TILE + j, out[i * TILE + j], p->dtype);
        }
    }
    free_lines(room);
    return 0;
}

/* y = x w^T for a tiled weight, or a row-major one, which is tiled on the fly. Returns 0, or 1 if out of
 * memory. */
static int multiply_floats(const coded *p, int tiled, int threads) {
    float_products m = {p, tiled};
    return run_region(float_units, &m, (p->n + TILE - 1) / TILE, threads);
}
