/* Matmul of a tiled weight with five or more rows of x on AMX: per block of 32, the int8 digits of all rows are
 * a tile of A, the codes a tile of B, their sums a tile of C. The integer sums, and so the results, equal those
 * of integers.h. Codes and sums pass through memory in a software pipeline: each iteration unpacks the codes of
 * a later block, multiplies a block, and accumulates the sums of an earlier one. Two tiles of the weight share
 * A, whose loads would otherwise take a fifth of the time. */
#pragma once
#include "amx_registers.h"
#include "digits.h"

#ifdef ON_AMX
/* AMX_APART: blocks between unpacking and multiplying, and between multiplying and accumulating. AMX_RING: blocks in
 * the pipeline's ring buffers. */
enum { AMX_APART = 2, AMX_RING = 4 };
#define BOTH UNROLLED for (int s = 0; s < 2; s++)

/* Configures the tile registers: 0 and 1 hold C, 2 A, 3 and 4 B; `tall`: rows of A and C. */
static void set_amx(int tall) {
    amx_shapes shapes = {.palette = 1, .bytes = {LINE, LINE, BLOCK, LINE, LINE},
                         .rows = {tall, tall, tall, 8, 8}};
    shape_amx(&shapes);
}

#define SUMS_OF(C, B, CODES, SUMS)                                                                  \
    CLEAR_AMX(C); LOAD_AMX(B, CODES, LINE); MULTIPLY_AMX(tdpbsud, C, 2, B); STORE_AMX(C, SUMS, LINE)

typedef struct {
    row_words codes[AMX_RING][8];
    row_sums sums[AMX_RING][2 * TOGETHER];
} amx_room;

/* Returns the address of the (super-)block that contains block i of a strip. */
static inline const uint8_t *codes_at(const int form, const strip *of, int64_t i) {
    return of->codes + i / BLOCKS_OF(form) * WORDS_OF(form) * LINE;
}

ALWAYS unpack_block(const int form, const strip *of, int64_t i, row_words *to) {
    const uint8_t *w = codes_at(form, of, i);
    const int b = i % BLOCKS_OF(form), line = b * WORDS_OF(form) / BLOCKS_OF(form);
    UNROLLED for (int j = 0; j < (WORDS_OF(form) + BLOCKS_OF(form) - 1) / BLOCKS_OF(form); j++)
        __builtin_prefetch(w + (line + j) * LINE + TILE_AHEAD, 0, 2);
    UNROLLED for (int j = 0; j < 8; j++) to[j] = code_word(form, w, b, j);
}

/* Multiplies two strips with `rows` rows of x; `a`: the digits of x, [blocks][rows][parts][BLOCK]. */
ALWAYS amx_product(const int form, const int rows, const int parts, const coded *p, const strip *of,
                   const digits *const *x, const int8_t *a) {
    const int minima = MINIMA(form), dtype = p->scales_dtype;
    const int64_t blocks = p->k / BLOCK;
    amx_room room[2] __attribute__((aligned(LINE)));
    row_floats sum[2][TOGETHER], scale[2], least[2];
    BOTH UNROLLED for (int r = 0; r < rows; r++) sum[s][r] = (row_floats){0};
    int64_t left = p->each, group = 0;
    for (int64_t i = -AMX_APART; i < blocks + AMX_APART; i++) {
        int64_t next = i + AMX_APART, done = i - AMX_APART;
        if (next < blocks) BOTH unpack_block(form, of + s, next, room[s].codes[next % AMX_RING]);
        if (i >= 0 && i < blocks) {
            int at = i % AMX_RING;
            LOAD_AMX(2, a + i * rows * parts * BLOCK, BLOCK);
            SUMS_OF(0, 3, room[0].codes[at], room[0].sums[at]);
            SUMS_OF(1, 4, room[1].codes[at], room[1].sums[at]);
        }
        if (done < 0) continue;
        if (left >= p->each) {
            BOTH scale[s] = tile_scales(of[s].scales, group * TILE, dtype);
            if (minima) BOTH least[s] = tile_scales(of[s].scales, (group + 1) * TILE, dtype);
            group += 1 + minima, left = 0;
        }
        left += BLOCK;
        BOTH {
            const row_sums *made = room[s].sums[done % AMX_RING];
            row_floats factor[2], below[2];
            block_factors(form, codes_at(form, of + s, done), done % BLOCKS_OF(form), scale[s], least[s],
                          factor, below);
            UNROLLED for (int r = 0; r < rows; r++) {
                const digits *d = x[r] + done;
                row_sums digit[2] = {made[r * parts], made[r * parts + parts - 1]};
                digit[parts - 1] += d->both;
                if (minima) sum[s][r] = multiply_add(-below[0], all_rows(d->sum), sum[s][r]);
                sum[s][r] = multiply_add(total_of(form, parts, digit), factor[0] * d->unit, sum[s][r]);
            }
        }
    }
    BOTH UNROLLED for (int r = 0; r < rows; r++)
        *(any_row_floats *)(of[s].out + r * TILE) = sum[s][r];
}
#elif defined(INTEGERS)
static inline void set_amx(int tall) {}
static inline void end_amx(void) {}
ALWAYS amx_product(const int form, const int rows, const int parts, const coded *p, const strip *of,
                   const digits *const *x, const int8_t *a) {}
#endif
