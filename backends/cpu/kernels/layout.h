/* Memory layout of quantised weights (g4ir/ops/codecs.py), and the division of tiles among threads.
 *
 * A row's codes are blocks of 32. A tile interleaves 16 rows word by word (4 bytes), so that a vector load gets
 * one word of each row; scales are interleaved element by element. */
#pragma once
#include "kernels.h"
#include "team.h"

#define BLOCK 32
#define HALF 16
/* Rows of a tile. */
#define TILE 16
/* Super-blocks of 128 values: byte offsets of the upper bits and of the half blocks' scales, and the size in
 * bytes. The low bits come first. int6 (SIXES): 4 + 2 bits, int8 scales; int3k (THREES): 2 + 1 bits, int8 scales;
 * uint2 (TWOS): 2 bits, a byte of 4-bit scale and minimum. */
enum { SIXES_HIGH = 64, SIXES_SHARED = 96, SIXES_BYTES = 104 };
enum { THREES_HIGH = 32, THREES_SHARED = 48, THREES_BYTES = 56, TWOS_SHARED = 32, TWOS_BYTES = 40 };
/* Super-blocks of uint4 and uint5, of ABOVE values: low 4 bits; at ABOVE_HIGH the upper bits of uint5; then 12 bytes
 * of 6-bit scales and minima of the blocks; sizes in bytes. */
#define ABOVE 256
enum { ABOVE_HIGH = 128, ABOVE_UINT4 = 140, ABOVE_UINT5 = 172 };
/* Bytes of a block of int5 or min5: low 4 bits, then a word of the upper bits. */
#define FIVES_BYTES 20
/* Bytes of a block of int2 (2 bits per value) and of int3 (low 2 bits, then a word of the upper bits). */
enum { INT2_BYTES = 8, INT3_BYTES = 12 };
/* Super-block of fp4, of 64 values: byte offset of the half blocks' e4m3 scales, and the size in bytes. */
enum { FP4_SHARED = 32, FP4_BYTES = 36 };
/* Byte offset of the scales of half blocks, for formats that have them (HALVES). */
#define SHARED_OF(form)                                                                         \
    ((form) == INT6 ? SIXES_SHARED : (form) == INT3K ? THREES_SHARED : (form) == FP4 ? FP4_SHARED : TWOS_SHARED)

/* Nonuniform formats: super-blocks of 128 values, low bits first, at NL3_HIGH the upper bits of nl3; then a byte for
 * each block: bit 0 is set if SHIFT_OF is added to its levels, the bits above are its signed 7-bit scale. */
enum { NL3_HIGH = 32, NL4_BYTES = 68, NL3_BYTES = 52, NL2_BYTES = 36 };
#define NONUNIFORM(form) ((form) >= NL4 && (form) <= NL2)
#define SHIFT_OF(form) ((form) == NL2 ? 5 : 4)

/* SUPER: formats with super-blocks of ABOVE values. MINIMA: with minima. HALVES: with a scale per half block. */
#define SUPER(form) ((form) == UINT4 || (form) == UINT5)
#define MINIMA(form) (SUPER(form) || (form) == UINT2 || (form) == MIN4 || (form) == MIN5)
#define HALVES(form) ((form) == INT6 || (form) == INT3K || (form) == UINT2 || (form) == FP4)
/* Blocks per super-block (1: the format has none), and the size in bytes of a super-block, or else of a block. */
#define BLOCKS_OF(form) ((form) == FP4 ? 2 : HALVES(form) || NONUNIFORM(form) ? 4 : SUPER(form) ? 8 : 1)
#define BYTES_OF(form)                                                                          \
    ((form) == INT4 || (form) == IQ4 || (form) == MIN4 ? HALF                                   \
     : (form) == INT5 || (form) == MIN5 ? FIVES_BYTES                                           \
     : (form) == INT2 ? INT2_BYTES                                                              \
     : (form) == INT3 ? INT3_BYTES                                                              \
     : (form) == FP4  ? FP4_BYTES                                                               \
     : (form) == INT6 ? SIXES_BYTES                                                             \
     : (form) == INT3K ? THREES_BYTES                                                            \
     : (form) == UINT2 ? TWOS_BYTES                                                             \
     : (form) == UINT4 ? ABOVE_UINT4                                                            \
     : (form) == UINT5 ? ABOVE_UINT5                                                            \
     : (form) == NL4 ? NL4_BYTES                                                                \
     : (form) == NL3 ? NL3_BYTES                                                                \
     : (form) == NL2 ? NL2_BYTES : BLOCK)
/* Minimum values per group (values that share a scale); group sizes are multiples of it. */
#define SHARE_OF(form) ((form) == INT8 || (form) == FP8 ? HALF : BLOCKS_OF(form) * BLOCK)
/* Order of values in unpacked words. EVEN_ODD, formats with two adjacent codes per byte: of every eight values the even
 * ones, then the odd ones. FOURTHS, with four adjacent ones: of every sixteen every fourth one. Others: as they are. */
#define FOURTHS(form) ((form) == INT2 || (form) == INT3)
#define EVEN_ODD(form)                                                                          \
    ((form) == FP4 || (form) != INT8 && (form) != FP8 && !HALVES(form) && !FOURTHS(form) && !NONUNIFORM(form))
/* Index in its block of the value that byte j % 4 of unpacked word j / 4 has. */
static inline int value_at(int form, int j) {
    if (FOURTHS(form)) return j / 16 * 16 + j / 4 % 4 + j % 4 * 4;
    return EVEN_ODD(form) ? j / 8 * 8 + j / 4 % 2 + j % 4 * 2 : j;
}

/* Maximum tiles multiplied at a time with one row of x; each is read as a separate memory stream. AMD CPUs
 * (detected by SSE4A) are fastest with four streams and no prefetch: int8 34 and 51 GB/s against 30 and 36 for
 * one prefetched stream (Zen 4, slow and fast memory), int4 and fp8 8 and 35 % faster. Intel CPUs are fastest
 * with two prefetched streams: a decode step of E2B takes 95 ms instead of 112 in Q8_0, 53 instead of 57 in
 * Q4_0 (Emerald Rapids). Formats that take more instructions to unpack are fastest with two streams, or with one
 * (strips_of). */
#define STRIPS_MOST 4
static inline int strips_of_one(void) {
#ifdef __x86_64__
    if (__builtin_cpu_supports("sse4a")) return STRIPS_MOST;
#endif
    return 2;
}
/* Whether AMX (amx.h) is used for this many rows of x: with weights in cache, eight rows take 0.8 of the time with
 * int4 and uint4, 0.7 with 5 bits (Emerald Rapids). No gain for four rows, for int8 (no unpacking) or for one digit
 * of x; formats with a scale per half block would store twice as many sums. */
#if defined(__AMX_INT8__) && defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define ON_AMX
#endif
static inline int on_amx(int form, int digits, int64_t rows) {
#ifdef ON_AMX
    return rows > 4 && digits == 2 && !HALVES(form) && (EVEN_ODD(form) || FOURTHS(form) || NONUNIFORM(form));
#endif
    return 0;
}

/* Whether the kernels of integers.h and gemm_integers.h are compiled: they need AVX2, AVX-512 VNNI, SSSE3 or NEON's
 * dotprod. */
#if WIDE > 16 || defined(__SSSE3__) || defined(__ARM_FEATURE_DOTPROD)
#define INTEGERS
#endif
/* Whether the GEMM multiplies bf16 rows of x as 15-bit integers (gemm_integers.h) where bf16 panels do not pay: in 0.74
 * (AVX2) and 0.6 (AVX-512 VNNI, SSE4; Zen 4) of the time of fp32 panels. AVX-512 without VNNI would have to do so in
 * half the width. */
#if defined(INTEGERS) && !(defined(__AVX512F__) && WIDE == 32) && !defined(__AMX_BF16__)
#define EXACT_INTEGERS(form) ((form) != FP8)
#else
#define EXACT_INTEGERS(form) 0
#endif

static inline int strips_of(int form, int digits, int64_t rows) {
    if (on_amx(form, digits, rows)) return 2;
    if (rows > 2 || HALVES(form) || MINIMA(form)) return 1;
    return rows == 2 || form == INT5 || form == IQ4 || NONUNIFORM(form) ? 2 : strips_of_one();
}

/* Tiles per unit of work: a multiple of `runs`, the streams of a unit, so that they are of equal length. The last unit
 * may have fewer tiles; one of them may then be multiplied twice. */
static inline int64_t tiles_of_part(int64_t tiles, int64_t threads, int64_t runs) {
    int64_t part = (tiles + threads * PARTS - 1) / (threads * PARTS);
    return part > runs ? part - part % runs : runs;
}
