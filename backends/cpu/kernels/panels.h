/* Products of many rows of x in bf16 with a weight in tiles, as panels of gemm.h. A value is rounded to bf16
 * once, behind its product and sum. */
#pragma once
#include "gemm.h"
#include "tiles.h"

#ifdef GEMM
#define HAS_PANELS (FORM != FP8)
/* Packs values `first` to `last` of LANE rows of a weight as one vector of a panel of B, whose words are
 * `apart` from each other. */
static void unpack_tile(const coded *p, int64_t tile, int64_t first, int64_t last, uint32_t *to,
                        int64_t apart) {
    const int form = FORM;
    const int together = BLOCKS_OF(form), minima = MINIMA(form), dtype = p->scales_dtype;
    const uint8_t *w = codes_of_tile(p, tile) + first / BLOCK / together * WORDS_OF(form) * LINE;
    const char *scales = scales_of_tile(p, tile);
    for (int64_t i = first; i < last; i += together * BLOCK, w += WORDS_OF(form) * LINE) {
        int64_t group = i / p->each * (1 + minima);
        row_floats scale = tile_scales(scales, group * TILE, dtype), least = {0};
        if (minima) least = tile_scales(scales, (group + 1) * TILE, dtype);
        UNROLLED for (int b = 0; b < together; b++) {
            row_words c[8];
            UNROLLED for (int j = 0; j < 8; j++) c[j] = code_word(form, w, b, j);
            row_floats factor[2], below;
            block_factors(form, w, b, scale, least, factor, &below);
            UNROLLED for (int j = 0; j < BLOCK / 2; j++, to += apart) {
                row_words even = EVEN_ODD(form) ? c[j / 4 * 2] >> j % 4 * 8 : c[j / 2] >> j % 2 * 16;
                row_words odd = EVEN_ODD(form) ? c[j / 4 * 2 + 1] >> j % 4 * 8 : even >> 8;
                row_floats one = __builtin_convertvector((row_sums)(even & 255) - BIAS[form], row_floats);
                row_floats two = __builtin_convertvector((row_sums)(odd & 255) - BIAS[form], row_floats);
                row_floats f = factor[j / (HALF / 2)];
                _mm512_storeu_si512(to, words_of((__m512)(one * f - below), (__m512)(two * f - below)));
            }
        }
    }
}
/* Values along k of a panel: one of B lies in a core's nearest cache. */
#define PANEL 256
/* Rows of x in a unit: at most, and at least if there are to be enough units for the threads. */
enum { UNIT_MOST = 512, UNIT_LEAST = 64 };

typedef struct {
    const coded *p;
    uint32_t *x;           /* panels of x over all k */
    int64_t rows, columns; /* rows of x in a unit; units that cover the weight */
} gemm;

static int pack_x_units(void *context, units *left) {
    const gemm *m = context;
    const coded *p = m->p;
    for (int64_t i; (i = take_unit(left)) >= 0;)
        pack_rows((const char *)p->x + i * ROWS * p->k * 2, p->k * 2, p->rows - i * ROWS, p->k / 2,
                  m->x + i * ROWS * p->k / 2);
    return 0;
}

static void store_sums(const coded *p, const float *sums, int64_t first, int64_t rows, int64_t tile,
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
    const coded *p = m->p;
    uint32_t *b = aligned_alloc(LINE, (PANEL / 2 + m->rows) * COLUMNS * sizeof *b);
    if (!b) return 1;
    float *sums = (float *)(b + PANEL / 2 * COLUMNS);
    for (int64_t u; (u = take_unit(left)) >= 0;) {
        int64_t tile = u % m->columns * VECTORS_MOST, from = u / m->columns * m->rows;
        int64_t vectors = least(VECTORS_MOST, p->n / LANE - tile), rows = least(m->rows, p->rows - from);
        for (int64_t first = 0; first < p->k; first += PANEL) {
            int64_t last = least(first + PANEL, p->k);
            for (int64_t v = 0; v < vectors; v++)
                unpack_tile(p, tile + v, first, last, b + v * LANE, vectors * LANE);
            for (int64_t r = 0; r < rows; r += ROWS)
                micro_kernels[vectors]((last - first) / 2, m->x + ((from + r) * p->k + first * ROWS) / 2,
                                       b, sums + r * vectors * LANE, first > 0);
        }
        store_sums(p, sums, from, rows, tile, vectors);
    }
    free(b);
    return 0;
}

/* y = x w^T; n is a multiple of LANE, k of BLOCK. Returns 0, or 1 if
 * memory is short. */
static int multiply_panels(const coded *p, int threads) {
    int64_t panels = (p->rows + ROWS - 1) / ROWS, units;
    gemm m = {p, aligned_alloc(LINE, (panels * ROWS * p->k * 2 + LINE - 1) / LINE * LINE), UNIT_MOST,
              (p->n / LANE + VECTORS_MOST - 1) / VECTORS_MOST};
    if (!m.x) return 1;
    run_region(pack_x_units, &m, panels, threads);
    while ((units = (p->rows + m.rows - 1) / m.rows * m.columns) < PARTS * threads && m.rows > UNIT_LEAST)
        m.rows /= 2;
    int failed = run_region(gemm_units, &m, units, threads);
    free(m.x);
    return failed;
}
#else
#define HAS_PANELS 0
static int multiply_panels(const coded *p, int threads) { return 1; }
#endif
