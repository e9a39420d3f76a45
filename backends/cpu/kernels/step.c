/* Interpreter of step programs: instructions over fixed addresses, recorded by step_program.py. Rows are
 * computed in fp32; elementwise results are rounded where the definitions of the ops round (g4ir/ops). */
#include "layout.h"
#include "number.h"
#include "system.h"
#include "team.h"

#include <float.h>
#include <math.h>

/* PIECE: elements of a unit of work (by_pieces). SHARED: min elements of a result that threads share by rows or
 * pieces. */
#define PIECE 2048
#define SHARED 16384
/* Max bytes of a weight to prefetch for each of the first two units of work. */
#define READ_AHEAD (1 << 20)
/* Nanoseconds after which a thread that waits for steps looks again. */
#define LOOK_NS 50000000
/* Max rows of x for which the GEMV takes any quantised format (some take more); without a GEMM kernel, x is multiplied
 * this many rows at a time. */
#define ROWS_TOGETHER 8
/* Result of a step after which no sequence is active. */
#define ALL_REST -1

/* `outer` x `inner` rows of `width` elements; strides in elements. */
typedef struct {
    char *at;
    int64_t outer, outer_stride, inner, inner_stride, width, dtype, bytes;
} operand;

/* Kinds of instructions, in the order of step_program.py. */
enum {
    COPY, RMS_NORM, ADD, MUL, SCALE, SOFTCAP, GLU, ROPE, ROPE_TABLE, CACHE_WRITE, ATTENTION, LINEAR,
    LINEAR_CODED, ROW_START, ADD_INTEGERS, TOP_K, EXPERTS, NARROW_ROW, MUL_INTEGERS, MASK_IDS,
    EMBED_ROWS, GREEDY, END_STEP, ATTEND_CHUNK, LAST_ROW, LAST_SEEN, CLUSTER_HEAD, PICK_ID, ATTEND_TEXTS,
    MEAN_TEXTS, UNIT_NORM, LORA, BEST_LOGITS, KINDS
};

typedef struct {
    int64_t kind, first; /* index of its first operand; outputs come last (not in EXPERTS and END_STEP) */
    int64_t n[4];
    double f;
} instruction;

typedef struct {
    const instruction *i;
    const operand *of;
    float *scratch; /* three fp32 rows of the widest operand */
    int threads;
} running;

static inline int64_t rows_of(const operand *o) { return o->outer * o->inner; }

static inline char *row(const operand *o, int64_t r) {
    return o->at + (r / o->inner * o->outer_stride + r % o->inner * o->inner_stride) * o->bytes;
}

static inline float rounded(float f, int64_t dtype) {
    uint32_t u;
    memcpy(&u, &f, 4);
    uint32_t near = (u + 0x7fffu + ((u >> 16) & 1)) & 0xffff0000u, nan = u | 0x400000u;
    u = dtype == F32 ? u : (u & 0x7fffffffu) > 0x7f800000u ? nan : near;
    memcpy(&f, &u, 4);
    return f;
}

static void read_numbers(const void *from, int64_t dtype, float *to, int64_t count) {
    if (dtype == F32)
        memcpy(to, from, count * 4);
    else
        for (int64_t j = 0; j < count; j++) to[j] = widen(((const bf16 *)from)[j]);
}

static void write_numbers(void *to, int64_t dtype, const float *from, int64_t count) {
    if (dtype == F32)
        memcpy(to, from, count * 4);
    else
        for (int64_t j = 0; j < count; j++) {
            float f = rounded(from[j], BF16);
            uint32_t u;
            memcpy(&u, &f, 4);
            ((bf16 *)to)[j] = u >> 16;
        }
}

/* ---- scalar functions ---- */

/* e^x as a power of two times a polynomial on [-ln 2 / 2, ln 2 / 2]. */
static inline float exponential(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    float whole = rintf(x * 1.44269504f);
    float r = x - whole * 0.693147182f, p = 1.0f / 5040;
    p = p * r + 1.0f / 720, p = p * r + 1.0f / 120, p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6, p = p * r + 0.5f, p = p * r + 1.0f, p = p * r + 1.0f;
    uint32_t power = (uint32_t)((int32_t)whole + 127) << 23;
    float scale;
    memcpy(&scale, &power, 4);
    return p * scale;
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

/* tanh x; near 0 a rational approximation, since 1 - 2 / (e^2x + 1) would cancel. */
static inline float tangent(float x) {
    float a = fabsf(x), z = x * x;
    float near = x * (135135 + z * (17325 + z * (378 + z))) / (135135 + z * (62370 + z * (3150 + z * 28)));
    float far = 1.0f - 2.0f / (exponential(2 * a) + 1.0f);
    far = x < 0 ? -far : far;
    return a < 0.7f ? near : far;
}

enum { GELU_TANH, GELU, SILU, RELU };

static inline void activate(float *x, int64_t which, int64_t count) {
    if (which == GELU_TANH)
        for (int64_t j = 0; j < count; j++) {
            float u = 0.797884561f * (x[j] + 0.044715f * x[j] * x[j] * x[j]);
            x[j] = x[j] * sigmoid(2 * u);
        }
    else if (which == SILU)
        for (int64_t j = 0; j < count; j++) x[j] = x[j] * sigmoid(x[j]);
    else if (which == GELU)
        for (int64_t j = 0; j < count; j++) x[j] = x[j] * 0.5f * (1 + erff(x[j] * 0.707106781f));
    else
        for (int64_t j = 0; j < count; j++) x[j] = x[j] < 0 ? 0 : x[j];
}

/* ---- instructions; each comment lists the operands in order ---- */

/* Computes rows `from` to `to` of an output; `scratch`: memory of the thread. */
typedef void row_body(const running *a, int64_t from, int64_t to, float *scratch);

typedef struct {
    const running *a;
    row_body *const *bodies;
    int64_t count, rows, each, scratch; /* instructions, total rows, rows of a unit, floats of scratch memory */
} row_work;

static int row_units(void *context, units *left) {
    const row_work *w = context;
    float *scratch = malloc((w->scratch + 1) * sizeof *scratch);
    for (int64_t unit; scratch && (unit = take_unit(left)) >= 0;) {
        int64_t from = unit * w->each, end = from + w->each < w->rows ? from + w->each : w->rows;
        for (int64_t i = 0; i < w->count; i++) w->bodies[i](w->a + i, from, end, scratch);
    }
    return !scratch;
}

static inline int are_shared(const operand *y, int threads) {
    return threads > 1 && rows_of(y) * y->width >= SHARED;
}

/* Runs the bodies of `count` instructions for a unit's rows of y before the next unit's: rows stay in cache. */
static int share_rows(const running *a, int64_t count, const operand *y, row_body *const *bodies, int64_t scratch) {
    int64_t rows = rows_of(y), parts = (int64_t)a->threads * PARTS;
    row_work w = {a, bodies, count, rows, (rows + parts - 1) / parts, scratch};
    return run_region(row_units, &w, (rows + w.each - 1) / w.each, a->threads);
}

/* Runs the body for all rows of y, on several threads if y is large. */
static int by_rows(const running *a, const operand *y, row_body *body, int64_t scratch) {
    if (are_shared(y, a->threads)) return share_rows(a, 1, y, &body, scratch);
    body(a, 0, rows_of(y), a->scratch);
    return 0;
}

/* x, y */
static void copy(const running *a, int64_t from, int64_t to, float *scratch) {
    const operand *x = a->of, *y = a->of + 1;
    for (int64_t r = from; r < to; r++) memcpy(row(y, r), row(x, r), y->width * y->bytes);
}

/* Four sums at a time hide the latency of additions. */
static float sum_of_squares(const float *x, int64_t count) {
    float sums[4] = {0};
    int64_t j = 0, part = count / 4;
    for (; j < part; j++)
        for (int i = 0; i < 4; i++) sums[i] += x[i * part + j] * x[i * part + j];
    for (j *= 4; j < count; j++) sums[0] += x[j] * x[j];
    return sums[0] + sums[1] + (sums[2] + sums[3]);
}

/* x, w (one row for all; null: none), y; f: eps */
static void rms_norm(const running *a, int64_t from, int64_t to, float *scratch) {
    const operand *x = a->of, *w = a->of + 1, *y = a->of + 2;
    int64_t width = x->width;
    float *h = scratch, *by = scratch + width;
    if (w->at) read_numbers(w->at, w->dtype, by, width);
    for (int64_t r = from; r < to; r++) {
        read_numbers(row(x, r), x->dtype, h, width);
        float factor = 1.0f / sqrtf(sum_of_squares(h, width) / width + (float)a->i->f);
        for (int64_t j = 0; j < width; j++) h[j] *= factor;
        if (w->at)
            for (int64_t j = 0; j < width; j++) h[j] *= by[j];
        write_numbers(row(y, r), y->dtype, h, width);
    }
}

/* x, other, y */
static void add(const running *a, int64_t from, int64_t to, float *scratch) {
    const operand *x = a->of, *other = a->of + 1, *y = a->of + 2;
    const int64_t width = x->width;
    float *one = scratch, *two = scratch + width;
    for (int64_t r = from; r < to; r++) {
        read_numbers(row(x, r), x->dtype, one, width);
        read_numbers(row(other, r), other->dtype, two, width);
        for (int64_t j = 0; j < width; j++) one[j] += two[j];
        write_numbers(row(y, r), y->dtype, one, width);
    }
}

/* x, w (a scalar or one row), y */
static void mul(const running *a, int64_t from, int64_t to, float *scratch) {
    const operand *x = a->of, *w = a->of + 1, *y = a->of + 2;
    const int64_t width = x->width;
    float *one = scratch, *two = scratch + width;
    read_numbers(w->at, w->dtype, two, w->width);
    for (int64_t j = w->width; j < width; j++) two[j] = two[0];
    for (int64_t r = from; r < to; r++) {
        read_numbers(row(x, r), x->dtype, one, width);
        for (int64_t j = 0; j < width; j++) one[j] *= two[j];
        write_numbers(row(y, r), y->dtype, one, width);
    }
}

/* x, y; f: factor */
static void scale(const running *a, int64_t from, int64_t to, float *scratch) {
    const operand *x = a->of, *y = a->of + 1;
    const int64_t width = x->width;
    float factor = a->i->f;
    for (int64_t r = from; r < to; r++) {
        read_numbers(row(x, r), x->dtype, scratch, width);
        for (int64_t j = 0; j < width; j++) scratch[j] *= factor;
        write_numbers(row(y, r), y->dtype, scratch, width);
    }
}

/* Runs the body for each piece of each row of y. */
static int by_pieces(const running *a, const operand *y, region *body) {
    int64_t pieces = (y->width + PIECE - 1) / PIECE * rows_of(y);
    return run_region(body, (void *)a, pieces, rows_of(y) * y->width < SHARED ? 1 : a->threads);
}

static inline char *piece(const operand *o, int64_t unit) {
    int64_t each = (o->width + PIECE - 1) / PIECE;
    return row(o, unit / each) + unit % each * PIECE * o->bytes;
}

/* Number of elements of a piece. */
static inline int64_t piece_size(const operand *o, int64_t unit) {
    int64_t from = unit % ((o->width + PIECE - 1) / PIECE) * PIECE;
    return o->width - from < PIECE ? o->width - from : PIECE;
}

static inline void cap_numbers(float *x, int64_t count, float cap, int64_t dtype) {
    for (int64_t j = 0; j < count; j++) x[j] = rounded(x[j] / cap, dtype);
    for (int64_t j = 0; j < count; j++) x[j] = tangent(x[j]);
    for (int64_t j = 0; j < count; j++) x[j] = rounded(x[j], dtype) * cap;
}

/* x, y; f: cap */
static int softcap_pieces(void *context, units *left) {
    const running *a = context;
    const operand *x = a->of, *y = a->of + 1;
    float h[PIECE], cap = a->i->f;
    for (int64_t unit; (unit = take_unit(left)) >= 0;) {
        int64_t n = piece_size(y, unit);
        read_numbers(piece(x, unit), x->dtype, h, n);
        cap_numbers(h, n, cap, x->dtype);
        write_numbers(piece(y, unit), y->dtype, h, n);
    }
    return 0;
}

/* gate, up, y; n: activation */
static int glu_pieces(void *context, units *left) {
    const running *a = context;
    const operand *gate = a->of, *up = a->of + 1, *y = a->of + 2;
    float h[PIECE], other[PIECE];
    for (int64_t unit; (unit = take_unit(left)) >= 0;) {
        int64_t n = piece_size(y, unit);
        read_numbers(piece(gate, unit), gate->dtype, h, n);
        read_numbers(piece(up, unit), up->dtype, other, n);
        activate(h, a->i->n[0], n);
        for (int64_t j = 0; j < n; j++) h[j] = rounded(h[j], y->dtype) * other[j];
        write_numbers(piece(y, unit), y->dtype, h, n);
    }
    return 0;
}

/* Rotates the halves of a row; products are rounded to bf16 for bf16 inputs. */
static inline __attribute__((always_inline)) void turn(float *restrict low, float *restrict high,
                                                       const float *restrict c, const float *restrict s,
                                                       int64_t half, const int dtype) {
    for (int64_t j = 0; j < half; j++) {
        float x = low[j], y = high[j];
        low[j] = rounded(x * c[j], dtype) + rounded(-y * s[j], dtype);
        high[j] = rounded(y * c[half + j], dtype) + rounded(x * s[half + j], dtype);
    }
}

/* x, cos, sin, y; n: number of heads, which share a row of the tables */
static void rope(const running *a, int64_t from, int64_t to, float *scratch) {
    const operand *x = a->of, *cosines = a->of + 1, *sines = a->of + 2, *y = a->of + 3;
    int64_t d = x->width, half = d / 2, dtype = x->dtype;
    float *h = scratch, *c = h + d, *s = c + d;
    for (int64_t r = from; r < to; r++) {
        if (r == from || r % a->i->n[0] == 0) {
            read_numbers(row(cosines, r / a->i->n[0]), cosines->dtype, c, d);
            read_numbers(row(sines, r / a->i->n[0]), sines->dtype, s, d);
        }
        read_numbers(row(x, r), dtype, h, d);
        if (dtype == F32)
            turn(h, h + half, c, s, half, F32);
        else
            turn(h, h + half, c, s, half, BF16);
        write_numbers(row(y, r), y->dtype, h, d);
    }
}

/* positions, fp32 inverse frequencies of half a row, cos, sin */
static void rope_table(const running *a, int64_t from, int64_t to, float *scratch) {
    const operand *positions = a->of, *cosines = a->of + 2, *sines = a->of + 3;
    const float *frequencies = (const float *)a->of[1].at;
    int64_t half = cosines->width / 2;
    float *c = scratch, *s = c + 2 * half;
    for (int64_t r = from; r < to; r++) {
        float position = ((const int64_t *)positions->at)[r];
        for (int64_t j = 0; j < half; j++) {
            float angle = position * frequencies[j];
            c[j] = c[j + half] = cosf(angle), s[j] = s[j + half] = sinf(angle);
        }
        write_numbers(row(cosines, r), cosines->dtype, c, 2 * half);
        write_numbers(row(sines, r), sines->dtype, s, 2 * half);
    }
}

static inline uint8_t to_fp8(float f) {
    float a = fabsf(f) < 448.0f ? fabsf(f) : 448.0f;
    uint32_t u;
    memcpy(&u, &a, 4);
    u += 0x7ffffu + ((u >> 20) & 1);
    uint8_t code = a < 0x1p-6f ? (uint8_t)rintf(a * 512) : (uint8_t)(((u >> 23) - 120) << 3 | (u >> 20 & 7));
    return (f != f ? 0x7f : code) | (signbit(f) ? 0x80 : 0);
}

/* Quantises one row to int8: codes, then a bf16 scale per 32 values (g4ir/ops/kv_quant.py). */
static void to_int8(const float *x, char *to, int64_t d) {
    for (int64_t g = 0; g < d; g += 32) {
        int64_t end = g + 32 < d ? g + 32 : d;
        float most = 0;
        for (int64_t j = g; j < end; j++) most = fabsf(x[j]) > most || x[j] != x[j] ? fabsf(x[j]) : most;
        float scale = widen(narrow(most / 127));
        if (scale == 0) scale = 1;
        for (int64_t j = g; j < end; j++) {
            float code = rintf(x[j] / scale);
            to[j] = (int8_t)(code > 127 ? 127 : code < -127 ? -127 : code);
        }
        bf16 held = narrow(scale);
        memcpy(to + d + g / 16, &held, 2);
    }
}

/* x, y; n: dtype of the KV cache (kernels.h) */
static void narrow_row(const running *a, int64_t from, int64_t to, float *scratch) {
    const operand *x = a->of, *y = a->of + 1;
    const float most = 3.3895313892515355e38f;
    const int64_t width = x->width, held = a->i->n[0];
    float *h = scratch;
    for (int64_t r = from; r < to; r++) {
        char *codes = row(y, r);
        read_numbers(row(x, r), x->dtype, h, width);
        if (held == ROWS_INT8)
            to_int8(h, codes, width);
        else if (held == ROWS_FP8)
            for (int64_t j = 0; j < width; j++) codes[j] = to_fp8(h[j]);
        else
            for (int64_t j = 0; j < width; j++)
                ((bf16 *)codes)[j] = narrow(h[j] > most ? most : h[j] < -most ? -most : h[j]);
    }
}

/* rows [B * S, n, d], start, lengths, cache [C, B, n, d]; n: B, S, heads */
static void cache_write(const running *a) {
    const operand *x = a->of, *cache = a->of + 3;
    const int64_t *start = (const int64_t *)a->of[1].at, *lengths = (const int64_t *)a->of[2].at;
    int64_t batch = a->i->n[0], tokens = a->i->n[1], heads = a->i->n[2];
    int64_t slots = rows_of(cache) / (batch * heads), size = x->width * x->bytes;
    for (int64_t b = 0; b < batch; b++)
        for (int64_t s = 0; s < lengths[b]; s++) {
            int64_t slot = (start[b] + s) % slots;
            if (lengths[b] - s > slots) continue;
            for (int64_t h = 0; h < heads; h++)
                memcpy(cache->at + ((slot * batch + b) * heads + h) * size,
                       row(x, (b * tokens + s) * heads + h), size);
        }
}

/* q, positions, written, k, v, out; n: B, S, window, KV heads; f: scale */
static int attention(const running *a) {
    const operand *q = a->of, *k = a->of + 3;
    const int64_t *n = a->i->n;
    return g4ir_attend(q->at, (const int64_t *)a->of[1].at, (const int64_t *)a->of[2].at, k->at,
                       a->of[4].at, a->of[5].at, q->dtype, k->dtype, n[0], n[1],
                       rows_of(q) / (n[0] * n[1]), n[3], q->width, rows_of(k) / (n[0] * n[3]),
                       k->width, n[2], a->i->f, a->threads);
}

/* q, positions, last visible positions, written, k, v, k and v of the chunk, out; n: B, S, window, KV heads; f:
 * scale. While no sequence has filled the cache, only the slots written so far are passed. */
static int attend_chunk(const running *a) {
    const operand *q = a->of, *k = a->of + 4;
    const int64_t *n = a->i->n, *written = (const int64_t *)a->of[3].at;
    int64_t slots = rows_of(k) / (n[0] * n[3]), used = 0;
    for (int64_t b = 0; b < n[0]; b++) used = written[b] > used ? written[b] : used;
    return g4ir_attend_chunk(q->at, (const int64_t *)a->of[1].at, (const int64_t *)a->of[2].at, written,
                             k->at, a->of[5].at, a->of[6].at, a->of[7].at, a->of[8].at, q->dtype, k->dtype,
                             n[0], n[1], rows_of(q) / (n[0] * n[1]), n[3], q->width,
                             used < slots ? used : slots, k->width, n[2], a->i->f, a->threads);
}

/* q, k, v [S, heads, d], cumulative lengths of texts, out; n: S, window, KV heads; f: scale. Each text is computed as
 * a separate chunk without a cache, so that its values do not depend on its neighbours; so are the tokens after the
 * last text. */
static int attend_texts(const running *a) {
    const operand *q = a->of, *k = a->of + 1, *v = a->of + 2, *texts = a->of + 3, *out = a->of + 4;
    const int64_t *n = a->i->n, *ends = (const int64_t *)texts->at, none = 0;
    int64_t heads = rows_of(q) / n[0], failed = 0, begin = 0, tokens = n[0];
    int64_t *positions = malloc(2 * (tokens + 1) * sizeof *positions), *last = positions + tokens + 1;
    if (!positions) return 1;
    for (int64_t i = 0; i < tokens; i++) positions[i] = i;
    for (int64_t b = 0, end; b <= texts->width && !failed; b++, begin = end) {
        end = b < texts->width ? ends[b] : tokens;
        int64_t length = end - begin, from = begin * heads, kv_from = begin * n[2];
        for (int64_t i = 0; i < length; i++) last[i] = n[1] && i + n[1] < length ? i + n[1] - 1 : length - 1;
        if (length)
            failed = g4ir_attend_chunk(row(q, from), positions, last, &none, NULL, NULL, row(k, kv_from),
                                       row(v, kv_from), row(out, from), q->dtype, k->dtype, 1, length, heads,
                                       n[2], q->width, 0, k->width, n[1], a->i->f, a->threads);
    }
    free(positions);
    return failed;
}

/* x [S, D], cumulative lengths of texts, y [B, D] */
static void mean_texts(const running *a, int64_t from, int64_t to, float *scratch) {
    const operand *x = a->of, *y = a->of + 2;
    const int64_t *ends = (const int64_t *)a->of[1].at;
    int64_t width = x->width;
    float *sum = scratch, *one = scratch + width;
    for (int64_t b = from; b < to; b++) {
        int64_t begin = b ? ends[b - 1] : 0, count = ends[b] > begin ? ends[b] - begin : 1;
        for (int64_t j = 0; j < width; j++) sum[j] = 0;
        for (int64_t r = begin; r < ends[b]; r++) {
            read_numbers(row(x, r), x->dtype, one, width);
            for (int64_t j = 0; j < width; j++) sum[j] += one[j];
        }
        for (int64_t j = 0; j < width; j++) sum[j] /= count;
        write_numbers(row(y, b), y->dtype, sum, width);
    }
}

/* x, y (fp32) */
static void unit_norm(const running *a, int64_t from, int64_t to, float *scratch) {
    const operand *x = a->of, *y = a->of + 1;
    for (int64_t r = from; r < to; r++) {
        double sum = 0;
        read_numbers(row(x, r), x->dtype, scratch, x->width);
        for (int64_t j = 0; j < x->width; j++) sum += (double)scratch[j] * scratch[j];
        float norm = sqrt(sum);
        norm = norm < 1e-12f ? 1e-12f : norm;
        for (int64_t j = 0; j < x->width; j++) scratch[j] /= norm;
        write_numbers(row(y, r), y->dtype, scratch, x->width);
    }
}

/* x [B, S, width], lengths, y; n: B, S: gathers the row of token lengths[b] - 1 */
static void last_row(const running *a) {
    const operand *x = a->of, *y = a->of + 2;
    int64_t batch = a->i->n[0], tokens = a->i->n[1], size = rows_of(y) / batch * y->width * y->bytes;
    for (int64_t b = 0; b < batch; b++) {
        int64_t length = ((const int64_t *)a->of[1].at)[b];
        memcpy(y->at + b * size, x->at + (b * tokens + (length > 0 ? length - 1 : 0)) * size, size);
    }
}

/* positions [B, S], block ids [B, S], y [B, S]: last position of each token's bidirectional block; its own
 * position if it is in none */
static void last_seen(const running *a) {
    const operand *ids = a->of + 1;
    for (int64_t b = 0; b < rows_of(ids); b++) {
        int64_t at = b * ids->width, *y = (int64_t *)a->of[2].at + at;
        const int64_t *position = (const int64_t *)a->of[0].at + at, *id = (const int64_t *)ids->at + at;
        for (int64_t s = 0; s < ids->width; s++) {
            y[s] = position[s];
            for (int64_t t = 0; id[s] >= 0 && t < ids->width; t++)
                if (id[t] == id[s] && position[t] > y[s]) y[s] = position[t];
        }
    }
}

/* x, w, y; n: whether x is a prefill chunk */
static int linear(const running *a) {
    const operand *x = a->of, *w = a->of + 1, *y = a->of + 2;
    __typeof__(g4ir_linear) *multiply = a->i->n[0] ? g4ir_linear_chunk : g4ir_linear;
    return multiply(w->at, x->at, y->at, x->dtype, rows_of(x), y->width, x->width, a->threads);
}

/* Arguments of a matmul with a quantised weight. */
typedef struct {
    const char *codes, *scales;
    const void *x;
    void *y;
    int64_t form, tiles, rounded, chunk, scales_dtype, dtype, rows, n, k, groups;
} coded_product;

/* Fake-quantises rows of x to int8, with a scale per 32 values (g4ir/ops/codecs.py). */
static void round_row(const char *x, int64_t dtype, char *y, int64_t width, float *scratch) {
    read_numbers(x, dtype, scratch, width);
    for (int64_t g = 0; g < width; g += 32) {
        int64_t end = g + 32 < width ? g + 32 : width;
        float most = 0;
        for (int64_t j = g; j < end; j++)
            most = fabsf(scratch[j]) > most || scratch[j] != scratch[j] ? fabsf(scratch[j]) : most;
        float by = most / 127 == 0 ? 1 : most / 127;
        for (int64_t j = g; j < end; j++) {
            float code = rintf(scratch[j] / by);
            scratch[j] = (code > 127 ? 127 : code < -127 ? -127 : code) * by;
        }
    }
    write_numbers(y, dtype, scratch, width);
}

static void round_rows(const running *a, int64_t from, int64_t to, float *scratch) {
    const operand *x = a->of, *y = a->of + 1;
    for (int64_t r = from; r < to; r++) round_row(row(x, r), x->dtype, row(y, r), x->width, scratch);
}

static int takes_gemm(const coded_product *p) {
    return g4ir_takes_gemm(p->form, p->rounded, p->dtype, p->rows, p->n, p->k, p->groups);
}

/* GEMV for few rows; GEMM on packed panels, if the weight is tiled and these sizes are supported, for more rows and for
 * all prefill chunks, so that a prompt's rows do not depend on where it is cut; else GEMVs. */
static int multiply_coded(const coded_product *p, int threads) {
    int few = !p->chunk && g4ir_takes_codes(p->form, p->rounded, p->dtype, p->rows, p->k, p->groups);
    if (!few && p->tiles && takes_gemm(p))
        return g4ir_gemm(p->codes, p->form, p->scales, p->scales_dtype, p->x, p->rounded, p->y, p->dtype,
                         p->rows, p->n, p->k, p->groups, threads);
    int64_t size = p->dtype == F32 ? 4 : 2, failed = 0, each = few ? p->rows : ROWS_TOGETHER;
    for (int64_t r = 0; r < p->rows && !failed; r += each)
        failed = g4ir_linear_coded(p->codes, p->form, p->tiles, p->scales, p->scales_dtype,
                                   (const char *)p->x + r * p->k * size, p->rounded,
                                   (char *)p->y + r * p->n * size, p->dtype,
                                   p->rows - r < each ? p->rows - r : each, p->n, p->k, p->groups, threads);
    return failed;
}

/* The arguments of LINEAR_CODED. */
static coded_product arguments_of(const running *a) {
    const operand *x = a->of, *codes = a->of + 1, *scales = a->of + 2, *y = a->of + 3;
    const int64_t *n = a->i->n;
    return (coded_product){.codes = codes->at, .scales = scales->at, .x = x->at, .y = y->at, .form = n[0],
                           .tiles = n[1], .rounded = n[2], .chunk = n[3], .scales_dtype = scales->dtype,
                           .dtype = x->dtype, .rows = rows_of(x), .n = y->width, .k = x->width,
                           .groups = scales->width};
}

/* x, codes, scales, y; n: format, tiles, rounded, whether x is a prefill chunk */
static int linear_coded(const running *a) {
    const operand *x = a->of;
    coded_product p = arguments_of(a);
    if (!p.rounded || !p.chunk && p.rows <= ROWS_TOGETHER || p.tiles && takes_gemm(&p))
        return multiply_coded(&p, a->threads);
    operand both[2] = {*x, *x};
    running rounding = {a->i, both, a->scratch, a->threads};
    p.x = both[1].at = malloc(rows_of(x) * x->width * x->bytes);
    p.rounded = 0;
    int failed = !p.x || by_rows(&rounding, x, round_rows, x->width) || multiply_coded(&p, a->threads);
    free(both[1].at);
    return failed;
}

/* x [T, d], cluster scores [T, C], cluster weights [C, size, d], token ids [C * size], logits [T, k * size] and
 * ids of the tokens in the k best clusters; n: k */
static int cluster_head(const running *a) {
    const operand *x = a->of, *scores = a->of + 1, *rows = a->of + 2, *logits = a->of + 4, *ids = a->of + 5;
    int64_t d = x->width, size = logits->width / a->i->n[0];
    for (int64_t t = 0; t < rows_of(x); t++) {
        read_numbers(row(scores, t), scores->dtype, a->scratch, scores->width);
        for (int64_t i = 0; i < a->i->n[0]; i++) {
            int64_t best = 0;
            for (int64_t c = 1; c < scores->width; c++) best = a->scratch[c] > a->scratch[best] ? c : best;
            a->scratch[best] = -INFINITY;
            memcpy((int64_t *)row(ids, t) + i * size, (const int64_t *)a->of[3].at + best * size, size * 8);
            if (g4ir_linear(rows->at + best * size * d * rows->bytes, row(x, t),
                            row(logits, t) + i * size * logits->bytes, x->dtype, 1, size, d, a->threads))
                return 1;
        }
    }
    return 0;
}

/* ids [B, n], indices [B], y [B]: ids[b][index of b] */
static void pick_id(const running *a) {
    const int64_t *at = (const int64_t *)a->of[1].at;
    for (int64_t b = 0; b < rows_of(a->of); b++)
        ((int64_t *)a->of[2].at)[b] = ((const int64_t *)row(a->of, b))[at[b]];
}

/* positions [B, S], start [B]: the first position of each sequence */
static void row_start(const running *a) {
    int64_t *to = (int64_t *)a->of[1].at;
    for (int64_t b = 0; b < rows_of(a->of); b++) to[b] = *(const int64_t *)row(a->of, b);
}

/* x, other, y */
static void add_integers(const running *a) {
    const int64_t *x = (const int64_t *)a->of[0].at, *other = (const int64_t *)a->of[1].at;
    int64_t *y = (int64_t *)a->of[2].at;
    for (int64_t j = 0; j < rows_of(a->of) * a->of->width; j++) y[j] = x[j] + other[j];
}

/* x, other, y */
static void mul_integers(const running *a) {
    const int64_t *x = (const int64_t *)a->of[0].at, *other = (const int64_t *)a->of[1].at;
    int64_t *y = (int64_t *)a->of[2].at;
    for (int64_t j = 0; j < rows_of(a->of) * a->of->width; j++) y[j] = x[j] * other[j];
}

/* ids, ids to replace, y; n: replacement */
static void mask_ids(const running *a) {
    const operand *ids = a->of, *masked = a->of + 1;
    int64_t *y = (int64_t *)a->of[2].at;
    for (int64_t j = 0; j < rows_of(ids) * ids->width; j++) {
        y[j] = ((const int64_t *)ids->at)[j];
        for (int64_t m = 0; m < masked->width; m++)
            if (y[j] == ((const int64_t *)masked->at)[m]) {
                y[j] = a->i->n[0];
                break;
            }
    }
}

/* Gathers a row of a tiled table (layout.h), whose rows are interleaved in pieces of `size` bytes. */
static const char *row_of_tile(const operand *table, int64_t r, int64_t size, char *to) {
    int64_t bytes = table->width * table->bytes;
    const char *tile = table->at + r / TILE * TILE * bytes;
    for (int64_t i = 0; i < bytes / size; i++)
        memcpy(to + i * size, tile + (i * TILE + r % TILE) * size, size);
    return to;
}

/* ids [T], table or codes, scales, y [T, d]; n: format (negative: not quantised), tiles; f: scale */
static int embed_rows(const running *a) {
    const operand *ids = a->of, *table = a->of + 1, *scales = a->of + 2, *y = a->of + 3;
    int64_t form = a->i->n[0], tiles = a->i->n[1], d = y->width;
    float factor = rounded(a->i->f, y->dtype), *h = a->scratch;
    char *codes_room = (char *)(h + d), *scales_room = (char *)(h + 2 * d);
    for (int64_t r = 0; r < rows_of(y); r++) {
        int64_t id = ((const int64_t *)ids->at)[r];
        const char *from = table->at + id * table->width * table->bytes, *by = NULL;
        if (form >= 0) {
            by = scales->at + id * scales->width * scales->bytes;
            if (tiles) {
                from = row_of_tile(table, id, 4, codes_room);
                by = row_of_tile(scales, id, scales->bytes, scales_room);
            }
            if (g4ir_decode(from, form, 0, by, scales->dtype, row(y, r), y->dtype, 1, d,
                            scales->width, 1))
                return 1;
            from = row(y, r);
        }
        read_numbers(from, y->dtype, h, d);
        for (int64_t j = 0; j < d; j++) h[j] *= factor;
        write_numbers(row(y, r), y->dtype, h, d);
    }
    return 0;
}

/* order_*: maps the bits of a float to an integer with the same order; both zeros to 0. largest_*: the maximum of `count`
 * logits as such an integer; sets `flaw` if one is NaN or infinite. */
#define LARGEST(NAME, WORD, ORDERED, MOST, EXPONENT)                                            \
    static inline ORDERED order_##NAME(WORD u) {                                                \
        ORDERED s = u;                                                                          \
        s ^= s >> (8 * sizeof s - 1) & MOST;                                                    \
        return s + (s == -1);                                                                   \
    }                                                                                           \
    static int64_t largest_##NAME(const WORD *x, int64_t count, int *flaw) {                    \
        ORDERED most = order_##NAME(x[0]);                                                      \
        WORD odd = 0;                                                                           \
        for (int64_t j = 0; j < count; j++) {                                                   \
            ORDERED one = order_##NAME(x[j]);                                                   \
            most = one > most ? one : most;                                                     \
            odd |= (x[j] & EXPONENT) == EXPONENT;                                               \
        }                                                                                       \
        *flaw = odd;                                                                            \
        return most;                                                                            \
    }
LARGEST(bf16, bf16, int16_t, 0x7fff, 0x7f80)
LARGEST(f32, uint32_t, int32_t, 0x7fffffff, 0x7f800000)

/* Overwrites the finite logits of suppressed ids with the lowest value. */
static void suppress(char *logits, int64_t dtype, const operand *never) {
    for (int64_t i = 0; i < never->width; i++) {
        int64_t id = ((const int64_t *)never->at)[i];
        float *single = (float *)logits + id;
        bf16 *half = (bf16 *)logits + id;
        if (dtype == F32 ? isfinite(*single) : (*half & 0x7f80) != 0x7f80)
            dtype == F32 ? (void)(*single = -FLT_MAX) : (void)(*half = 0xff7f);
    }
}

/* logits [B, vocab], suppressed ids, tokens [B], flaws [B]: whether a logit is NaN or infinite. Argmax; the lowest
 * id of equal logits wins; finite logits of suppressed ids are overwritten with the lowest value. Threads reduce by
 * atomic max over keys: the logit in the upper 32 bits, the complement of the piece in the lower. */
static int greedy_pieces(void *context, units *left) {
    const running *a = context;
    const operand *x = a->of;
    int64_t *keys = (int64_t *)a->of[2].at, *flaws = (int64_t *)a->of[3].at;
    int64_t each = (x->width + PIECE - 1) / PIECE;
    for (int64_t unit; (unit = take_unit(left)) >= 0;) {
        int flaw;
        int64_t n = piece_size(x, unit), r = unit / each;
        const void *p = piece(x, unit);
        int64_t value = x->dtype == F32 ? largest_f32(p, n, &flaw) : largest_bf16(p, n, &flaw);
        int64_t key = value * ((int64_t)1 << 32) | (0xffffffff - unit % each);
        if (flaw) __atomic_store_n(flaws + r, 1, __ATOMIC_RELAXED);
        int64_t now = __atomic_load_n(keys + r, __ATOMIC_RELAXED);
        while (key > now && !__atomic_compare_exchange_n(keys + r, &now, key, 0, __ATOMIC_RELAXED,
                                                         __ATOMIC_RELAXED)) {}
    }
    return 0;
}

static int greedy(const running *a) {
    const operand *x = a->of, *never = a->of + 1;
    int64_t *tokens = (int64_t *)a->of[2].at, *flaws = (int64_t *)a->of[3].at;
    for (int64_t r = 0; r < rows_of(x); r++) {
        tokens[r] = INT64_MIN, flaws[r] = 0;
        suppress(row(x, r), x->dtype, never);
    }
    if (by_pieces(a, x, greedy_pieces)) return 1;
    for (int64_t r = 0; r < rows_of(x); r++) {
        int64_t at = (0xffffffff - (tokens[r] & 0xffffffff)) * PIECE, value = tokens[r] >> 32;
        const void *p = row(x, r);
        while ((x->dtype == F32 ? order_f32(((uint32_t *)p)[at]) : order_bf16(((bf16 *)p)[at])) != value) at++;
        tokens[r] = at;
    }
    return 0;
}

/* ---- logits for an argmax: with x as int8, and again as 15-bit integers where the maximum may be ---- */

/* Rows of the weight in a group, which are computed again together; if more than GROUPS_AGAIN of a row of x are, all
 * logits are. */
#define GROUP (16 * TILE)
#define GROUPS_AGAIN 64
/* Relative bounds: of rounding to bf16, and of sums in fp32. */
#define ROUNDING (1.0f / 256)
#define SUMMING 1e-4f

typedef struct {
    const running *a;
    coded_product p;
    int64_t groups;
    int all; /* set if all logits have to be computed again */
} best_of;

/* Returns the product of row r of x with group i. */
static coded_product group_of(const best_of *m, int64_t r, int64_t i) {
    const operand *of = m->a->of;
    coded_product p = m->p;
    p.codes += i * GROUP * of[1].width * of[1].bytes, p.scales += i * GROUP * of[2].width * of[2].bytes;
    p.n = p.n - i * GROUP < GROUP ? p.n - i * GROUP : GROUP;
    p.rows = 1, p.x = row(of, r), p.y = row(of + 3, r) + i * GROUP * sizeof(bf16);
    return p;
}

/* Returns the norm of a row of x, and a bound of its difference from int8, which has a scale for each block. */
static float norm_of(const bf16 *x, int64_t count, float *difference) {
    float all = 0, tops = 0;
    for (int64_t b = 0; b < count; b += BLOCK) {
        float top = 0;
        for (int64_t j = b; j < b + BLOCK; j++) {
            float one = fabsf(widen(x[j]));
            top = one > top ? one : top, all += one * one;
        }
        tops += top * top;
    }
    *difference = sqrtf(tops * BLOCK) * (0.51f / 127) + sqrtf(all) * SUMMING; /* of 0.51, 0.01 are for the 15 bits */
    return sqrtf(all);
}

static float capped(float logit, float cap) {
    if (cap > 0) cap_numbers(&logit, 1, cap, BF16);
    return rounded(logit, BF16);
}

static float top_of_group(const best_of *m, int64_t r, int64_t i) {
    coded_product p = group_of(m, r, i);
    int flaw;
    int64_t top = largest_bf16(p.y, p.n, &flaw);
    return widen(top < 0 ? top ^ 0x7fff : top);
}

static int best_units(void *context, units *left) {
    best_of *m = context;
    const operand *x = m->a->of, *y = m->a->of + 3, *never = m->a->of + 4;
    const float *norms = (const float *)m->a->of[5].at, cap = m->a->i->f;
    float *tops = malloc(m->groups * sizeof *tops);
    int failed = !tops;
    for (int64_t r; !failed && (r = take_unit(left)) >= 0;) {
        float error, lowest, size = norm_of((const bf16 *)row(x, r), x->width, &error);
        int64_t top = 0, again = 0;
        int all = !(size * norms[m->groups] < FLT_MAX / 4); /* a logit may be NaN or infinite */
        suppress(row(y, r), BF16, never);
        for (int64_t i = 0; i < m->groups; i++)
            tops[i] = top_of_group(m, r, i), top = tops[i] > tops[top] ? i : top;
        /* the first group in the order of the loop is that of the maximum, which sets `lowest` for the others: no logit
         * up to it is equal to the maximum after rounding and softcap */
        for (int64_t j = -1; j < m->groups && !all && !failed; j++) {
            int64_t i = j < 0 ? top : j;
            if (j >= 0 && (i == top || tops[i] + fabsf(tops[i]) * ROUNDING + norms[i] * error < lowest)) continue;
            coded_product p = group_of(m, r, i);
            if (++again > GROUPS_AGAIN) all = 1;
            failed = multiply_coded(&p, 1);
            suppress(row(y, r), BF16, never);
            if (j >= 0) continue;
            float best = lowest = top_of_group(m, r, i);
            while (isfinite(lowest) && capped(lowest, cap) == capped(best, cap)) lowest -= fabsf(lowest) / 256 + FLT_MIN;
        }
        if (all) __atomic_store_n(&m->all, 1, __ATOMIC_RELAXED);
    }
    free(tops);
    return failed;
}

/* x, codes, scales, y, suppressed ids, the largest norms of the rows of each group and of all, `exact` [1]; n: as of
 * LINEAR_CODED; f: cap of the softcap that follows, or 0. Unless `exact`, only logits that may be the maximum of a row
 * are exact; others are less. */
static int best_logits(const running *a) {
    best_of m = {a, arguments_of(a), a->of[5].width - 1};
    if (*(const int64_t *)a->of[6].at) return multiply_coded(&m.p, a->threads);
    m.p.rounded = 1;
    if (multiply_coded(&m.p, a->threads)) return 1;
    m.p.rounded = 0;
    if (run_region(best_units, &m, m.p.rows, a->threads)) return 1;
    return m.all && multiply_coded(&m.p, a->threads);
}

/* Indices of `pace`: steps requested, steps done, and the step count that a sleeping thread waits for. */
enum { WANTED, DONE, SLEPT_FOR };
/* pace[WANTED] once the program has ended. */
#define ENDED -1
/* pace[DONE] after a failure: releases all waiters. */
#define FAILED ((int64_t)1 << 62)

static int64_t get(const int64_t *pace, int which) {
    return __atomic_load_n(pace + which, __ATOMIC_SEQ_CST);
}

static void done(int64_t *pace, int64_t steps) {
    __atomic_store_n(pace + DONE, steps, __ATOMIC_SEQ_CST);
    if (get(pace, SLEPT_FOR) && steps >= get(pace, SLEPT_FOR))
        wake((uint32_t *)(pace + DONE), 1);
}

/* chosen [B], flaws [B], tokens [B], lengths [B], active [B], stops [B, N], made [steps, B], pace: appends the
 * chosen token to each active sequence, which becomes inactive after a flaw or a stop id. `made` records the
 * tokens; -1: flaw, -2: inactive. Returns whether no sequence is active. */
static int end_step(const running *a) {
    const int64_t *chosen = (const int64_t *)a->of[0].at, *flaws = (const int64_t *)a->of[1].at;
    int64_t *tokens = (int64_t *)a->of[2].at, *lengths = (int64_t *)a->of[3].at;
    int64_t *active = (int64_t *)a->of[4].at, *pace = (int64_t *)a->of[7].at, run = 0;
    int64_t *made = (int64_t *)row(a->of + 6, pace[DONE] % rows_of(a->of + 6));
    for (int64_t b = 0; b < a->of[6].width; b++) {
        made[b] = -2;
        if (!active[b]) continue;
        made[b] = flaws[b] ? -1 : chosen[b];
        tokens[b] = chosen[b], lengths[b]++, active[b] = !flaws[b];
        for (int64_t i = 0; i < a->of[5].width; i++)
            if (((const int64_t *)row(a->of + 5, b))[i] == chosen[b]) active[b] = 0;
        run += active[b];
    }
    done(pace, pace[DONE] + 1);
    return run == 0;
}

/* scores [T, E], factors [E], weights f32 [T, k], index [T, k]: softmax, top k, renormalised and multiplied by
 * the per-expert factor */
static void top_k(const running *a, int64_t from, int64_t to, float *scratch) {
    const operand *scores = a->of, *factors = a->of + 1, *weights = a->of + 2, *index = a->of + 3;
    int64_t experts = scores->width, k = weights->width;
    float *p = scratch, *by = p + experts;
    read_numbers(factors->at, factors->dtype, by, experts);
    for (int64_t r = from; r < to; r++) {
        float *to = (float *)row(weights, r), most = -INFINITY, all = 0, sum = 0;
        int64_t *chosen = (int64_t *)row(index, r);
        read_numbers(row(scores, r), scores->dtype, p, experts);
        for (int64_t e = 0; e < experts; e++) most = p[e] > most || p[e] != p[e] ? p[e] : most;
        for (int64_t e = 0; e < experts; e++) all += p[e] = expf(p[e] - most);
        for (int64_t i = 0; i < k; i++) {
            int64_t best = 0;
            for (int64_t e = 1; e < experts; e++) best = p[e] > p[best] ? e : best;
            to[i] = p[best] / all, chosen[i] = best, p[best] = -1;
            sum += to[i];
        }
        for (int64_t i = 0; i < k; i++) to[i] = to[i] / sum * by[chosen[i]];
    }
}

/* Index of expert e among the rank's `local` experts; `local` for experts of other ranks. */
static inline int64_t local_expert(const running *a, int64_t e, int64_t local) {
    const int64_t *first = (const int64_t *)a->of[13].at;
    e -= first ? *first : 0;
    return e < 0 || e > local ? local : e;
}

/* Grouped GEMM: multiplies rows of x, sorted by expert, with their experts' weights. `w`: weight and scales; `form`:
 * negative if the weight is not quantised; `tiles`: 1 if it is tiled, plus 4 for a prefill chunk. */
static int expert_products(const running *a, const operand *w, int64_t form, int tiles, const operand *x,
                           const operand *y) {
    const operand *scales = w + 1;
    const int64_t *chosen = (const int64_t *)a->of[2].at, *order = (const int64_t *)a->of[11].at;
    int64_t n = y->width, count = rows_of(y), local = rows_of(w) / n;
    for (int64_t from = 0, end; from < count; from = end) {
        int64_t e = local_expert(a, chosen[order[from]], local);
        if (e == local) return 0; /* the remaining rows are of other ranks' experts */
        for (end = from; end < count && local_expert(a, chosen[order[end]], local) == e;) end++;
        const char *at = w->at + e * n * w->width * w->bytes;
        coded_product p = {.codes = at, .scales = scales->at + e * n * scales->width * scales->bytes,
                           .x = row(x, from), .y = row(y, from), .form = form, .tiles = tiles & 1, .chunk = tiles >> 2,
                           .scales_dtype = scales->dtype, .dtype = x->dtype, .rows = end - from, .n = n,
                           .k = x->width, .groups = scales->width};
        __typeof__(g4ir_linear) *dense = p.chunk ? g4ir_linear_chunk : g4ir_linear;
        if (form < 0 ? dense(at, p.x, p.y, p.dtype, p.rows, n, p.k, a->threads)
                     : multiply_coded(&p, a->threads))
            return 1;
    }
    return 0;
}

/* Counting sort of the (token, expert) pairs by expert: `order` is the permutation, then its inverse. */
static void by_expert(const running *a, int64_t count, int64_t local, int64_t *order) {
    const int64_t *chosen = (const int64_t *)a->of[2].at;
    int64_t starts[local + 2];
    for (int64_t e = 0; e < local + 2; e++) starts[e] = 0;
    for (int64_t i = 0; i < count; i++) starts[local_expert(a, chosen[i], local) + 1]++;
    for (int64_t e = 0; e <= local; e++) starts[e + 1] += starts[e];
    for (int64_t i = 0; i < count; i++) {
        int64_t at = starts[local_expert(a, chosen[i], local)]++;
        order[at] = i, order[count + i] = at;
    }
}

/* Gathers rows of x, sorted by expert. */
static void expert_rows(const running *a, int64_t from, int64_t to, float *scratch) {
    const operand *x = a->of, *rows = a->of + 7;
    int64_t k = a->of[2].width;
    for (int64_t i = from; i < to; i++)
        memcpy(row(rows, i), row(x, ((const int64_t *)a->of[11].at)[i] / k), x->width * x->bytes);
}

static void expert_glu(const running *a, int64_t from, int64_t to, float *scratch) {
    const operand *both = a->of + 8, *act = a->of + 9;
    int64_t inner = act->width;
    for (int64_t i = from; i < to; i++) {
        read_numbers(row(both, i), both->dtype, scratch, 2 * inner);
        activate(scratch, a->i->n[0], inner);
        for (int64_t j = 0; j < inner; j++) scratch[j] = rounded(scratch[j], act->dtype) * scratch[inner + j];
        write_numbers(row(act, i), act->dtype, scratch, inner);
    }
}

/* Sums each token's expert outputs, weighted, in top-k order. */
static void weigh(const running *a, int64_t from, int64_t to, float *scratch) {
    const operand *weights = a->of + 1, *made = a->of + 10, *y = a->of + 12;
    int64_t d = y->width, k = weights->width, local = rows_of(a->of + 5) / d;
    const int64_t *chosen = (const int64_t *)a->of[2].at;
    const int64_t *place = (const int64_t *)a->of[11].at + rows_of(made);
    float *one = scratch + d;
    for (int64_t t = from; t < to; t++) {
        for (int64_t j = 0; j < d; j++) scratch[j] = 0;
        for (int64_t s = t * k; s < (t + 1) * k; s++) {
            if (local_expert(a, chosen[s], local) == local) continue;
            float by = ((const float *)weights->at)[s];
            read_numbers(row(made, place[s]), made->dtype, one, d);
            for (int64_t j = 0; j < d; j++) scratch[j] += one[j] * by;
        }
        write_numbers(row(y, t), y->dtype, scratch, d);
    }
}

/* x [T, D], weights [T, k], index [T, k], gate_up, its scales, down, its scales; scratch: gathered x [T * k,
 * D], gate_up outputs [T * k, 2 I], activation, down outputs, order [2, T * k]; y. n: activation, formats of
 * both weights, bit flags: gate_up tiled, down tiled, prefill chunk. Last operand: the index of the rank's
 * first expert, or none; experts of other ranks add nothing. */
static int experts(const running *a) {
    const operand *up = a->of + 3, *down = a->of + 5, *rows = a->of + 7;
    const operand *both = a->of + 8, *act = a->of + 9, *made = a->of + 10, *y = a->of + 12;
    const int64_t *n = a->i->n;
    by_expert(a, rows_of(rows), rows_of(up) / both->width, (int64_t *)a->of[11].at);
    return by_rows(a, rows, expert_rows, 0) || expert_products(a, up, n[1], n[3] & 5, rows, both) ||
           by_rows(a, act, expert_glu, both->width) ||
           expert_products(a, down, n[2], n[3] >> 1 & 1 | n[3] & 4, act, made) || by_rows(a, y, weigh, 2 * y->width);
}

/* Units of work of a LoRA adapter: rows of A (lora_low), columns of y (lora_high). */
#define LOW_ROWS 8
#define HIGH_COLUMNS 512

static float low_dot(const void *w, int64_t dtype, const float *x, int64_t count) {
    const float *wide = w;
    const bf16 *half = w;
    float lanes[16] = {0}, sum = 0;
    int64_t j = 0;
    if (dtype == F32)
        for (; j + 16 <= count; j += 16)
            for (int l = 0; l < 16; l++) lanes[l] += wide[j + l] * x[j + l];
    else
        for (; j + 16 <= count; j += 16)
            for (int l = 0; l < 16; l++) lanes[l] += widen(half[j + l]) * x[j + l];
    for (; j < count; j++) sum += (dtype == F32 ? wide[j] : widen(half[j])) * x[j];
    for (int l = 0; l < 16; l++) sum += lanes[l];
    return sum;
}

/* h = A x, in fp32, for the sequences with an adapter */
static int lora_low(void *context, units *left) {
    const running *a = context;
    const operand *x = a->of, *index = a->of + 1, *low = a->of + 2, *h = a->of + 5;
    int64_t per_row = (h->width + LOW_ROWS - 1) / LOW_ROWS;
    float *one = malloc((x->width + 1) * sizeof *one);
    for (int64_t unit; one && (unit = take_unit(left)) >= 0;) {
        int64_t t = unit / per_row, i = unit % per_row * LOW_ROWS, slot = ((const int64_t *)index->at)[t / a->i->n[0]];
        if (slot < 0) continue;
        read_numbers(row(x, t), x->dtype, one, x->width);
        for (int64_t end = i + LOW_ROWS < h->width ? i + LOW_ROWS : h->width; i < end; i++)
            ((float *)row(h, t))[i] = low_dot(row(low, slot * h->width + i), low->dtype, one, x->width);
    }
    free(one);
    return !one;
}

/* y += h B, for the sequences with an adapter */
static int lora_high(void *context, units *left) {
    const running *a = context;
    const operand *index = a->of + 1, *high = a->of + 3, *h = a->of + 5, *y = a->of + 6;
    int64_t per_row = (y->width + HIGH_COLUMNS - 1) / HIGH_COLUMNS, rank = h->width / a->i->n[1];
    float out[HIGH_COLUMNS];
    for (int64_t unit; (unit = take_unit(left)) >= 0;) {
        int64_t t = unit / per_row, from = unit % per_row * HIGH_COLUMNS, slot = ((const int64_t *)index->at)[t / a->i->n[0]];
        int64_t end = from + HIGH_COLUMNS < y->width ? from + HIGH_COLUMNS : y->width, start = 0;
        if (slot < 0) continue;
        read_numbers(row(y, t) + from * y->bytes, y->dtype, out, end - from);
        for (int64_t p = 0; p < a->i->n[1]; p++) {
            int64_t stop = start + ((const int64_t *)a->of[4].at)[p];
            int64_t first = start > from ? start : from, last = stop < end ? stop : end;
            start = stop;
            for (int64_t r = 0; r < rank && first < last; r++) {
                float by = ((const float *)row(h, t))[p * rank + r];
                const char *b = row(high, slot * rank + r);
                if (by == 0) continue; /* as beyond the rank of this adapter */
                if (high->dtype == F32)
                    for (int64_t j = first; j < last; j++) out[j - from] += by * ((const float *)b)[j];
                else
                    for (int64_t j = first; j < last; j++) out[j - from] += by * widen(((const bf16 *)b)[j]);
            }
        }
        write_numbers(row(y, t) + from * y->bytes, y->dtype, out, end - from);
    }
    return 0;
}

/* x [T, K], adapter slot of each sequence [B] (-1: none), A [slots, P R, K], B [slots, R, N], columns of each of the P
 * parts of y [P]; scratch h [T, P R]; y [T, N], which is added to. n: tokens of a sequence, P. A sequence's result does
 * not depend on the others'. */
static int lora(const running *a) {
    const operand *x = a->of, *h = a->of + 5, *y = a->of + 6;
    int64_t rows = rows_of(x), active = 0;
    for (int64_t b = 0; b < rows / a->i->n[0]; b++) active += ((const int64_t *)a->of[1].at)[b] >= 0;
    if (!active) return 0;
    int64_t low = rows * ((h->width + LOW_ROWS - 1) / LOW_ROWS);
    int64_t high = rows * ((y->width + HIGH_COLUMNS - 1) / HIGH_COLUMNS);
    int threads = active * a->i->n[0] * h->width * x->width < SHARED ? 1 : a->threads;
    return run_region(lora_low, (void *)a, low, threads) || run_region(lora_high, (void *)a, high, threads);
}

/* Instructions that compute row r of y from row r of each operand, weights and tables aside: body, index of y, rows
 * of scratch memory. */
static const struct {
    row_body *body;
    int y, scratch;
} ROWWISE[KINDS] = {[COPY] = {copy, 1, 0},      [RMS_NORM] = {rms_norm, 2, 2}, [ADD] = {add, 2, 2},
                       [MUL] = {mul, 2, 2},    [SCALE] = {scale, 1, 1},       [ROPE] = {rope, 3, 3},
                       [UNIT_NORM] = {unit_norm, 1, 1}};

/* Whether two operands have the same rows at the same addresses, or share no memory. */
static int are_same_rows(const operand *a, const operand *b) {
    if (!a->at || !b->at) return 1;
    const char *end_a = row(a, rows_of(a) - 1) + a->width * a->bytes;
    const char *end_b = row(b, rows_of(b) - 1) + b->width * b->bytes;
    if (end_a <= b->at || end_b <= a->at) return 1;
    return a->at == b->at && a->bytes == b->bytes && a->width == b->width && a->outer == b->outer &&
           a->inner == b->inner && a->inner_stride == b->inner_stride && a->outer_stride == b->outer_stride;
}

/* Whether the last of `count` instructions may run for some rows before the others have run for all: they have as
 * many rows, and none reads or writes a row that another writes as a different one (stack_layers does). */
static int may_interleave(const running *a, int64_t count) {
    const running *last = a + count - 1;
    const operand *y = last->of + ROWWISE[last->i->kind].y;
    for (const running *earlier = a; earlier < last; earlier++) {
        const operand *before = earlier->of + ROWWISE[earlier->i->kind].y;
        if (rows_of(before) != rows_of(y)) return 0;
        for (const operand *x = last->of; x <= y; x++)
            if (!are_same_rows(before, x)) return 0;
        for (const operand *x = earlier->of; x < before; x++)
            if (!are_same_rows(x, y)) return 0;
    }
    return 1;
}

/* Maximum instructions that run together. */
#define ROWWISE_MAX 8
/* Runs as many of `count` instructions, from the first on, as threads can share row by row. Returns their number, or
 * -1 if out of memory. */
static int64_t run_rowwise(const instruction *i, const operand *operands, int64_t count, float *scratch,
                           int threads) {
    running a[ROWWISE_MAX];
    row_body *bodies[ROWWISE_MAX];
    const operand *y = operands + i->first + ROWWISE[i->kind].y;
    int64_t n = 0, max_scratch = 0;
    if (!ROWWISE[i->kind].body || !are_shared(y, threads)) return 0;
    for (; n < count && n < ROWWISE_MAX && ROWWISE[i[n].kind].body; n++) {
        a[n] = (running){i + n, operands + i[n].first, scratch, threads}, bodies[n] = ROWWISE[i[n].kind].body;
        if (!may_interleave(a, n + 1)) break;
        int64_t needed = ROWWISE[i[n].kind].scratch * a[n].of->width;
        max_scratch = needed > max_scratch ? needed : max_scratch;
    }
    return share_rows(a, n, y, bodies, max_scratch) ? -1 : n;
}

static int run_one(const running *a) {
    const int64_t kind = a->i->kind;
    if (ROWWISE[kind].body) {
        ROWWISE[kind].body(a, 0, rows_of(a->of + ROWWISE[kind].y), a->scratch);
        return 0;
    }
    switch (kind) {
    case SOFTCAP: return by_pieces(a, a->of + 1, softcap_pieces);
    case GLU: return by_pieces(a, a->of + 2, glu_pieces);
    case ROPE_TABLE: return by_rows(a, a->of + 2, rope_table, 2 * a->of[2].width);
    case CACHE_WRITE: cache_write(a); return 0;
    case ATTENTION: return attention(a);
    case LINEAR: return linear(a);
    case LINEAR_CODED: return linear_coded(a);
    case ROW_START: row_start(a); return 0;
    case ADD_INTEGERS: add_integers(a); return 0;
    case TOP_K: return by_rows(a, a->of + 2, top_k, 2 * a->of->width);
    case NARROW_ROW: return by_rows(a, a->of + 1, narrow_row, a->of->width);
    case MUL_INTEGERS: mul_integers(a); return 0;
    case MASK_IDS: mask_ids(a); return 0;
    case EMBED_ROWS: return embed_rows(a);
    case GREEDY: return greedy(a);
    case END_STEP: return end_step(a) ? ALL_REST : 0;
    case EXPERTS: return experts(a);
    case ATTEND_CHUNK: return attend_chunk(a);
    case LAST_ROW: last_row(a); return 0;
    case LAST_SEEN: last_seen(a); return 0;
    case CLUSTER_HEAD: return cluster_head(a);
    case PICK_ID: pick_id(a); return 0;
    case ATTEND_TEXTS: return attend_texts(a);
    case MEAN_TEXTS: return by_rows(a, a->of + 2, mean_texts, 2 * a->of->width);
    case LORA: return lora(a);
    case BEST_LOGITS: return best_logits(a);
    }
    return 2;
}

static int is_product(const instruction *i) {
    return i->kind == LINEAR || i->kind == LINEAR_CODED || i->kind == BEST_LOGITS;
}

/* Lets idle threads prefetch the start of the next matmul's weight, for its first two units of work. */
static void read_ahead(const instruction *i, const instruction *end, const operand *operands,
                       int threads) {
    if (!is_product(i++)) return;
    while (i < end && !is_product(i)) i++;
    if (i == end) return;
    const operand *x = operands + i->first, *w = x + 1;
    int runs = i->kind != LINEAR ? strips_of(i->n[0], 2, rows_of(x)) : 1;
    int64_t part = tiles_of_part(rows_of(w) / TILE, threads, runs) * TILE * w->width * w->bytes;
    int64_t size = (part < READ_AHEAD ? part : READ_AHEAD) / runs;
    read_next(w->at, part / runs, 2 * runs, size);
}

/* Runs instructions; returns 0, ALL_REST (no sequence is active), or an error. */
static int run_part(const instruction *i, const operand *operands, int64_t count, float *scratch,
                    int threads) {
    for (int64_t at = 0; at < count; at++) {
        running a = {i + at, operands + i[at].first, scratch, threads};
        int64_t rowwise = run_rowwise(i + at, operands, count - at, scratch, threads);
        if (rowwise < 0) return 1;
        if (rowwise > 0) {
            at += rowwise - 1;
            continue;
        }
        read_ahead(i + at, i + count, operands, threads);
        int failed = run_one(&a);
        if (failed) return failed;
    }
    return 0;
}

int g4ir_run_instructions(const void *instructions, const void *operands, int64_t count, float *scratch,
                          int threads) {
    int failed = run_part(instructions, operands, count, scratch, threads);
    return failed == ALL_REST ? 0 : failed;
}

int g4ir_run_steps(const void *instructions, const void *operands, int64_t count, int64_t *pace,
                   float *scratch, int threads) {
    int64_t skipped = 0; /* once no sequence is active: all instructions except END_STEP */
    for (;;) {
        int64_t wanted = get(pace, WANTED);
        if (wanted <= get(pace, DONE)) {
            if (__atomic_compare_exchange_n(pace + WANTED, &wanted, ENDED, 0, __ATOMIC_SEQ_CST,
                                            __ATOMIC_SEQ_CST))
                return 0;
            continue;
        }
        int failed = run_part((const instruction *)instructions + skipped, operands, count - skipped,
                              scratch, threads);
        if (failed == ALL_REST) {
            skipped = count - 1;
        } else if (failed) {
            done(pace, FAILED); /* before ENDED, so that a thread that sees ENDED also sees FAILED */
            __atomic_store_n(pace + WANTED, ENDED, __ATOMIC_SEQ_CST);
            return failed;
        }
    }
}

int g4ir_request_steps(int64_t *pace, int64_t more) {
    int64_t wanted = get(pace, WANTED);
    while (wanted != ENDED)
        if (__atomic_compare_exchange_n(pace + WANTED, &wanted, wanted + more, 0, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST))
            return 1;
    return 0;
}

void g4ir_wait_steps(int64_t *pace, int64_t steps) {
    __atomic_store_n(pace + SLEPT_FOR, steps, __ATOMIC_SEQ_CST);
    for (int64_t now; (now = get(pace, DONE)) < steps;)
        sleep_on((uint32_t *)(pace + DONE), (uint32_t)now, LOOK_NS);
    __atomic_store_n(pace + SLEPT_FOR, 0, __ATOMIC_SEQ_CST);
}
