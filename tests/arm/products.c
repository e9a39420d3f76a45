/* Products of a weight in codes on another CPU: reads numbers, codes, scales and x, writes y (test_arm.py). */
#include "kernels.h"

#include <stdio.h>
#include <stdlib.h>

static void *read_bytes(int64_t count) {
    void *at = aligned_alloc(64, (count + 63) / 64 * 64);
    if (!at || fread(at, 1, count, stdin) != (size_t)count) exit(2);
    return at;
}

int main(void) {
    int64_t n[11];
    while (fread(n, sizeof n, 1, stdin) == 1) {
        int form = n[0], tiles = n[1], scales_dtype = n[2], rounded = n[3];
        int64_t rows = n[4], outs = n[5], k = n[6], groups = n[7];
        void *codes = read_bytes(n[8]), *scales = read_bytes(n[9]), *x = read_bytes(n[10]);
        uint16_t *y = calloc(rows * outs, sizeof *y);
        int failed;
        if (g4ir_takes_codes(form, rounded, BF16, rows, k, groups))
            failed = g4ir_linear_coded(codes, form, tiles, scales, scales_dtype, x, rounded, y, BF16, rows,
                                       outs, k, groups, 2);
        else if (g4ir_takes_gemm(form, rounded, BF16, rows, outs, k, groups))
            failed = g4ir_gemm(codes, form, scales, scales_dtype, x, rounded, y, BF16, rows, outs, k, groups, 2);
        else
            return 3;
        if (failed) return 4;
        if (fwrite(y, sizeof *y, rows * outs, stdout) != (size_t)(rows * outs)) return 5;
        free(codes), free(scales), free(x), free(y);
    }
    return 0;
}
