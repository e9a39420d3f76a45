/* Transposes matrices of 32-bit words. */
#pragma once
#include "common.h"

#ifdef __AVX512F__
/* Transposes sixteen rows of sixteen words: interleaves the words of pairs of rows, then pairs of words, and
 * exchanges quarters of vectors. */
static void transpose_16(const uint32_t *from, int64_t from_row, uint32_t *to, int64_t to_row) {
    __m512i line[16], made[16];
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) line[i] = _mm512_loadu_si512(from + i * from_row);
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i += 2) {
        made[i] = _mm512_unpacklo_epi32(line[i], line[i + 1]);
        made[i + 1] = _mm512_unpackhi_epi32(line[i], line[i + 1]);
    }
    /* column 4 q + j of rows i to i + 3, as quarter q of line[i + j] */
    UNROLLED for (int i = 0; i < 16; i += 4) {
        UNROLLED for (int h = 0; h < 2; h++) {
            line[i + 2 * h] = _mm512_unpacklo_epi64(made[i + h], made[i + 2 + h]);
            line[i + 2 * h + 1] = _mm512_unpackhi_epi64(made[i + h], made[i + 2 + h]);
        }
    }
    UNROLLED for (int j = 0; j < 4; j++) {
        __m512i low[2], high[2];
        UNROLLED for (int h = 0; h < 2; h++) {
            low[h] = _mm512_shuffle_i32x4(line[8 * h + j], line[8 * h + 4 + j], 0x44);
            high[h] = _mm512_shuffle_i32x4(line[8 * h + j], line[8 * h + 4 + j], 0xee);
        }
        _mm512_storeu_si512(to + j * to_row, _mm512_shuffle_i32x4(low[0], low[1], 0x88));
        _mm512_storeu_si512(to + (4 + j) * to_row, _mm512_shuffle_i32x4(low[0], low[1], 0xdd));
        _mm512_storeu_si512(to + (8 + j) * to_row, _mm512_shuffle_i32x4(high[0], high[1], 0x88));
        _mm512_storeu_si512(to + (12 + j) * to_row, _mm512_shuffle_i32x4(high[0], high[1], 0xdd));
    }
}
#endif

/* Writes words [rows, columns] as [columns, rows]; `from_row`, `to_row`: row strides in words. */
static void transpose(const uint32_t *from, int64_t from_row, uint32_t *to, int64_t to_row, int64_t rows,
                      int64_t columns) {
    int64_t r = 0;
#ifdef __AVX512F__
    for (; r + 16 <= rows; r += 16) {
        int64_t c = 0;
        for (; c + 16 <= columns; c += 16)
            transpose_16(from + r * from_row + c, from_row, to + c * to_row + r, to_row);
        for (; c < columns; c++)
            for (int i = 0; i < 16; i++) to[c * to_row + r + i] = from[(r + i) * from_row + c];
    }
#endif
#ifdef __SSE2__
    const int64_t others = r;
    for (; r + 4 <= rows; r += 4)
        for (int64_t c = 0; c + 4 <= columns; c += 4) {
            __m128i line[4], half[4];
            UNROLLED for (int i = 0; i < 4; i++)
                line[i] = _mm_loadu_si128((const __m128i *)(from + (r + i) * from_row + c));
            UNROLLED for (int i = 0; i < 2; i++) {
                half[i] = _mm_unpacklo_epi32(line[2 * i], line[2 * i + 1]);
                half[2 + i] = _mm_unpackhi_epi32(line[2 * i], line[2 * i + 1]);
            }
            UNROLLED for (int i = 0; i < 2; i++) {
                __m128i *at = (__m128i *)(to + (c + 2 * i) * to_row + r);
                __m128i *next = (__m128i *)(to + (c + 2 * i + 1) * to_row + r);
                _mm_storeu_si128(at, _mm_unpacklo_epi64(half[2 * i], half[2 * i + 1]));
                _mm_storeu_si128(next, _mm_unpackhi_epi64(half[2 * i], half[2 * i + 1]));
            }
        }
    for (int64_t s = others; s < r; s++)
        for (int64_t c = columns / 4 * 4; c < columns; c++) to[c * to_row + s] = from[s * from_row + c];
#endif
    for (; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) to[c * to_row + r] = from[r * from_row + c];
}
