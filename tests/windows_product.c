/* Loads a library of the kernels on Windows and multiplies on four threads: says whether each product is
 * the sum that it should be. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>

__declspec(dllimport) void *__stdcall LoadLibraryA(const char *name);
__declspec(dllimport) void *__stdcall GetProcAddress(void *library, const char *name);
typedef int linear(const void *w, const void *x, void *y, int dtype, int64_t rows, int64_t n, int64_t k,
                   int threads);

enum { F32 = 1, TIMES = 200, ROWS = 2, N = 512, K = 1024 };
static float w[N][K], x[ROWS][K], y[ROWS][N];

int main(int count, char **words) {
    void *library = count > 1 ? LoadLibraryA(words[1]) : 0;
    linear *multiply = library ? (linear *)GetProcAddress(library, "g4ir_linear") : 0;
    if (!multiply) return puts("cannot be loaded"), 2;
    for (int i = 0; i < N * K; i++) w[0][i] = i * 7919 % 1000 / 1000.0f - 0.5f;
    for (int i = 0; i < ROWS * K; i++) x[0][i] = i * 104729 % 1000 / 1000.0f - 0.5f;
    double most = 0;
    for (int time = 0; time < TIMES; time++) {
        if (multiply(w, x, y, F32, ROWS, N, K, 4)) return puts("no memory"), 3;
        for (int r = 0; r < ROWS; r++)
            for (int n = 0; n < N; n++) {
                double sum = 0;
                for (int k = 0; k < K; k++) sum += (double)w[n][k] * x[r][k];
                most = fmax(most, fabs(sum - y[r][n]));
            }
    }
    printf("error at most %g\n", most);
    return !(most < 1e-4);
}
