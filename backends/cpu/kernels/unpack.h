/* Weights in tiles as panels of gemm.h. A value is rounded to bf16 once, behind its product and sum. */
#ifdef GEMM
ALWAYS unpack_tile(const int form, const product *p, int64_t tile, int64_t first, int64_t last,
                   uint32_t *to, int64_t apart) {
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
#define UNPACK(FORM)                                                                            \
    static void unpack_##FORM(const product *p, int64_t tile, int64_t first, int64_t last,      \
                              uint32_t *to, int64_t apart) {                                    \
        unpack_tile(FORM, p, tile, first, last, to, apart);                                     \
    }
UNPACK(INT8)
UNPACK(INT6)
UNPACK(INT4)
UNPACK(UINT4)
UNPACK(UINT5)
UNPACK(INT5)
#define unpack_FP8 NULL

static int takes_gemm(int form, int dtype, int64_t rows, int64_t n, int64_t k) {
    if (dtype != BF16 || rows < 1 || n < 1 || n % LANE || k < 1 || k % BLOCK) return 0;
    return OF_FORM(unpack_) != NULL;
}

static int coded_gemm(const void *codes, int form, const void *scales, int scales_dtype, const void *x,
                      void *y, int64_t rows, int64_t n, int64_t k, int64_t groups, int threads) {
    product p = {.w = codes, .bytes = OF.bytes, .scales = scales, .scales_dtype = scales_dtype,
                 .groups = groups, .each = k / groups * OF.scales, .x = x, .y = y, .dtype = BF16,
                 .rows = rows, .n = n, .k = k};
    return multiply_packed(&p, OF_FORM(unpack_), threads);
}
#else
static int takes_gemm(int form, int dtype, int64_t rows, int64_t n, int64_t k) { return 0; }
static int coded_gemm(const void *codes, int form, const void *scales, int scales_dtype, const void *x,
                      void *y, int64_t rows, int64_t n, int64_t k, int64_t groups, int threads) {
    return 1;
}
#endif
