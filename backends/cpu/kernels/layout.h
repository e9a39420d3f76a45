/* How quantised weights lie (g4ir/ops/codecs.py), and how their tiles are divided among threads.
 *
 * The codes of a row are blocks of 32; a row is a multiple of these. In a tile the words of four bytes of 16
 * rows alternate, so that a vector has one word of each row; so do their scales, element by element. */
#pragma once
#include "kernels.h"
#include "team.h"

#define BLOCK 32
#define HALF 16
/* Rows of a tile. */
#define TILE 16
/* Codes of int6 that lie together, and bytes of their parts: the low 4 bits of numbers, the upper 2,
 * the integers of half blocks. */
#define SIXES 128
enum { SIXES_HIGH = 64, SIXES_SHARED = 96, SIXES_BYTES = 104 };
/* The same of forms with minima: the low 4 bits, of uint5 the upper one, the integers of blocks. */
#define ABOVE 256
enum { ABOVE_HIGH = 128, ABOVE_UINT4 = 140, ABOVE_UINT5 = 172 };
/* The same of int5, whose blocks lie alone: the low 4 bits, the upper one. */
#define FIVES_BYTES 20

#define MINIMA(form) ((form) == UINT4 || (form) == UINT5)
/* Blocks that lie together, and bytes of them. */
#define BLOCKS_OF(form) ((form) == INT6 ? 4 : MINIMA(form) ? 8 : 1)
#define BYTES_OF(form)                                                                          \
    ((form) == INT4   ? HALF                                                                    \
     : (form) == INT5 ? FIVES_BYTES                                                             \
     : (form) == INT6 ? SIXES_BYTES                                                             \
     : (form) == UINT4 ? ABOVE_UINT4                                                            \
     : (form) == UINT5 ? ABOVE_UINT5 : BLOCK)
/* Codes that share a scale at least: a group is a multiple of them. */
#define SHARE_OF(form) ((form) == INT8 || (form) == FP8 ? HALF : BLOCKS_OF(form) * BLOCK)
/* Whether words have the even numbers of a block and then the odd ones, as bytes of two codes do. */
#define EVEN_ODD(form) ((form) == INT4 || (form) >= UINT4)

/* Tiles of a weight that are multiplied with one row of x at a time, each of a run of its own. AMD's CPUs
 * (which alone have SSE4A) read four runs fastest, without a prefetch: int8 at 34 and 51 GB/s where one
 * with a prefetch does at 30 and 36 (Zen 4, its memory slow and fast), int4 and fp8 by 8 and 35 % more.
 * Intel's read two with one: a step of E2B in Q8_0 takes 95 ms for 112, in Q4_0 53 for 57 (Emerald Rapids).
 * What takes more work is faster with two, or slower so. */
#define STRIPS_MOST 4
static inline int strips_of_one(void) {
#ifdef __x86_64__
    if (__builtin_cpu_supports("sse4a")) return STRIPS_MOST;
#endif
    return 2;
}
/* Whether so many rows of x are multiplied on AMX (amx.h): in cache eight rows take 0.8 of the time with int4
 * and uint4, 0.7 with 5 bits (Emerald Rapids). Four rows do not gain, nor does int8, whose codes need no
 * unpacking, nor one digit of x; int6, with scales for half a block, has twice as many sums to store. */
#if defined(__AMX_INT8__) && defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define ON_AMX
#endif
static inline int on_amx(int form, int digits, int64_t rows) {
#ifdef ON_AMX
    return rows > 4 && digits == 2 && (form == INT4 || form > INT6);
#endif
    return 0;
}

static inline int strips_of(int form, int digits, int64_t rows) {
    if (on_amx(form, digits, rows)) return 2;
    if (rows > 2 || form > FP8 && form != INT5) return 1;
    return rows == 2 || form == INT5 ? 2 : strips_of_one();
}

/* Tiles of a part of a weight. Each is made of so many equal runs, so that no tile is multiplied twice. */
static inline int64_t tiles_of_part(int64_t tiles, int64_t threads, int64_t runs) {
    int64_t part = (tiles + threads * PARTS - 1) / (threads * PARTS);
    return part > runs ? part - part % runs : runs;
}
