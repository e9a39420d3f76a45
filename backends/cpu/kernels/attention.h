/* Attention of a few queries over a KV cache (g4ir/ops/attention.py). */
#pragma once
#include "cache_rows.h"
#include "dense.h"

/* KEYS: keys per block, a multiple of the keys that a dot product takes at once, few enough that their values stay in
 * the core's private cache. KEYS_LEAST: slots of the cache for each split after the first. */
#define KEYS 96
#define KEYS_LEAST 48
/* Maximum splits: each has its own sums, for every sequence of a batch. */
#define PARTS_MOST 16

typedef float eight __attribute__((vector_size(32)));
typedef float any_eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t whole_eight __attribute__((vector_size(32)));
_Static_assert(sizeof(sums) == sizeof(eight), "scores of a key are one vector");

typedef struct {
    const void *q, *kept[2]; /* kept: K and V caches */
    const int64_t *positions, *written;
    void *out;
    int dtype, held; /* dtype of queries and output; of cache rows */
    int64_t batch, queries, heads, kv_heads, d, slots, width, window;
    float scale;
    /* Derived from the arguments: */
    int64_t parts, group;       /* splits of the keys (split-KV); query heads per KV head */
    int64_t rows, padded;       /* queries * group; group, padded to a multiple of TOGETHER */
    int64_t wide;               /* d, rounded up to a multiple of PAIR */
    int as_held;                /* whether cache rows are used as stored, else converted to fp32 */
    float *partial;
    uint32_t *made; /* number of completed splits of each KV head of each sequence */
} attention;

/* Keys or values at a constant stride. */
typedef struct {
    const char *at;
    int64_t stride, count; /* elements from one row to the next; number of rows */
} row_run;

/* Scratch memory of a thread. */
typedef struct {
    char *q;
    float *made;   /* cache rows converted to fp32 */
    sums *scores;  /* [groups of TOGETHER query rows][keys of a block] */
    uint32_t *two; /* softmax weights of pairs of keys, in bf16 */
} room;

/* Floats of the partial result of a split: weighted sums of values [rows, wide], then each row's maximum and total. */
static inline int64_t partial_size(const attention *a) {
    return a->rows * a->wide + 2 * a->queries * a->padded;
}

static inline int64_t held_bytes(const attention *a) {
    return a->held == F32 ? 4 : a->held > F16 ? 1 : 2;
}

/* Key positions of a query in a split that are not read yet: `from` to `end`, exclusive. */
typedef struct {
    int64_t from, end;
} keys_left;

/* Returns the keys of the cache that a split of a query reads. */
static keys_left keys_of(const attention *a, int64_t b, int64_t s, int64_t part) {
    int64_t last = a->positions[b * a->queries + s], oldest = a->written[b] - a->slots;
    int64_t first = a->window ? last - a->window + 1 : 0;
    first = -least(-first, -oldest);
    first = first < 0 ? 0 : first;
    int64_t count = least(last + 1, a->written[b]) - first;
    count = count > 0 ? count : 0;
    return (keys_left){first + count * part / a->parts, first + count * (part + 1) / a->parts};
}

/* Returns the next keys (value 0) or values (1) of a head in the cache, at most KEYS; the run ends at the last slot of
 * a ring. */
static row_run run_of(const attention *a, int value, int64_t b, int64_t h, keys_left left) {
    int64_t slot = left.from % a->slots, row = (slot * a->batch + b) * a->kv_heads + h;
    const char *rows = a->kept[value];
    return (row_run){rows + row * a->width * held_bytes(a), a->batch * a->kv_heads * a->width,
                     least(KEYS, least(left.end - left.from, a->slots - slot))};
}

/* Converts cache rows to fp32 in `to`, zero-padded to the vector width. */
static row_run widened(const attention *a, row_run from, float *to) {
    for (int64_t i = 0; i < from.count; i++) {
        const char *row = from.at + i * from.stride * held_bytes(a);
        float *made = to + i * a->wide;
        widen_row(row, a->held, made, a->d);
        for (int64_t j = a->d; j < a->wide; j++) made[j] = 0;
    }
    return (row_run){(const char *)to, a->wide, from.count};
}

static int64_t query_bytes(const attention *a) {
    return a->wide * (a->as_held && a->dtype == BF16 ? (int64_t)sizeof(bf16_row) : 4);
}

/* Copies the query rows of a KV head in the layout of the dot products: as stored, permuted (pair_bf16), or in fp32. */
static void formed_queries(const attention *a, int64_t b, int64_t h, char *to) {
    int64_t size = a->dtype == F32 ? 4 : 2;
    for (int64_t r = 0; r < a->rows; r++, to += query_bytes(a)) {
        int64_t row = (b * a->queries + r / a->group) * a->heads + h * a->group + r % a->group;
        const char *q = (const char *)a->q + row * a->d * size;
        if (!a->as_held) {
            for (int64_t j = 0; j < a->d; j++) ((float *)to)[j] = load(q, j, a->dtype);
            for (int64_t j = a->d; j < a->wide; j++) ((float *)to)[j] = 0;
        } else if (a->dtype == BF16 && EMULATED)
            in_pairs((const bf16 *)q, (float *)to, a->d);
        else
            memcpy(to, q, a->d * size);
    }
}

/* Computes the scores of keys with up to TOGETHER query rows; prefetches the values of these keys. */
static void score_keys(const attention *a, row_run keys, row_run values, const char *q, int64_t here,
                       sums *out) {
    int two = a->as_held && a->dtype == BF16;
    int64_t size = two ? 2 : 4, line = LINE / size;
    product p = {.w = (const uint8_t *)keys.at, .bytes = 256 * size, .stride = keys.stride, .x = q,
                 .apart = query_bytes(a), .beside = 1, .k = a->wide};
    const dots *of = (two ? dot_bf16s : dot_f32s) + here;
    for (int64_t o = 0; o < keys.count;) {
        int64_t outs = o + of->outs <= keys.count ? of->outs : 1;
        for (int64_t i = o; i < o + outs; i++)
            for (int64_t j = 0; j < a->wide; j += line)
                __builtin_prefetch(values.at + (i * values.stride + j) * size, 0, 2);
        (outs > 1 ? of->several : of->one)(&p, o, 0, out + o);
        o += outs;
    }
}

static inline eight chosen(whole_eight which, eight yes, eight no) {
    return (eight)((which & (whole_eight)yes) | (~which & (whole_eight)no));
}

/* 2^y for y <= 0; NaN stays NaN. */
static inline eight power(eight y) {
    eight none = {0};
    y = chosen(y < -126.0f, none - 126.0f, y);
    whole_eight whole = __builtin_convertvector(y - 0.5f, whole_eight);
    eight x = y - __builtin_convertvector(whole, eight);
    eight z = none + 0.00015403530f;
    z = z * x + 0.0013333558f;
    z = z * x + 0.0096181291f;
    z = z * x + 0.055504109f;
    z = z * x + 0.24022651f;
    z = z * x + 0.69314718f;
    z = z * x + 1.0f;
    return z * (eight)((whole + 127) << 23);
}

/* Online softmax step: turns scores into 2^(score - running maximum). Returns whether a maximum grew, and sets
 * the factors that rescale earlier sums. */
static int weigh(any_eight *scores, int64_t count, float scale, any_eight *most, any_eight *total,
                 eight *factor) {
    eight top = *most, sum = {0};
    for (int64_t t = 0; t < count; t++) {
        eight s = scores[t] = scores[t] * scale;
        top = chosen(s > top, s, top);
    }
    for (int64_t t = 0; t < count; t++) {
        sum += scores[t] = power(scores[t] - top);
    }
    *factor = power(*most - top);
    whole_eight grown = top > *most;
    int64_t any[4];
    memcpy(any, &grown, sizeof any);
    *total = *total * *factor + sum;
    *most = top;
    return (any[0] | any[1] | any[2] | any[3]) != 0;
}

/* Maximum query rows per pass over the values: the registers have room for their sums. */
#ifdef __AVX512F__
#define ADDED 8
#else
#define ADDED 4
#endif
#define VALUES_AT(TYPE, T) ((const TYPE *)v.at + (T) * v.stride + c + u * PAIR)
#define ADD(NAME, TYPE, WEIGHT, STEP, MORE)                                                     \
    ALWAYS add_##NAME(const int rows, const int pairs, row_run v, const WEIGHT *weights,        \
                      float *out, int64_t wide, int64_t *from) {                                \
        int64_t c = *from;                                                                      \
        for (; c + pairs * PAIR <= wide; c += pairs * PAIR) {                                   \
            pair sum[ADDED][4];                                                                 \
            UNROLLED for (int q = 0; q < rows; q++)                                             \
                UNROLLED for (int u = 0; u < pairs; u++)                                        \
                    sum[q][u] = pair_f32(out + q * wide + c + u * PAIR);                        \
            for (int64_t t = 0; t < v.count; t += STEP)                                         \
                UNROLLED for (int u = 0; u < pairs; u++) MORE(TYPE)                             \
            UNROLLED for (int q = 0; q < rows; q++)                                             \
                UNROLLED for (int u = 0; u < pairs; u++)                                        \
                    memcpy(out + q * wide + c + u * PAIR, &sum[q][u], sizeof(pair));            \
        }                                                                                       \
        *from = c;                                                                              \
    }                                                                                           \
    ADD_ROWS(NAME, WEIGHT, 1, 4)                                                                \
    ADD_ROWS(NAME, WEIGHT, 2, 2)                                                                \
    ADD_ROWS(NAME, WEIGHT, 3, 1)                                                                \
    ADD_ROWS(NAME, WEIGHT, 4, 1)                                                                \
    MORE_ROWS(NAME, WEIGHT)
#define ADD_ROWS(NAME, WEIGHT, ROWS, PAIRS)                                                     \
    static void add_##NAME##_##ROWS(row_run v, const WEIGHT *weights, float *out,               \
                                    int64_t wide) {                                             \
        int64_t from = 0;                                                                       \
        add_##NAME(ROWS, PAIRS, v, weights, out, wide, &from);                                  \
        if (PAIRS > 1) add_##NAME(ROWS, 1, v, weights, out, wide, &from);                       \
    }
#ifdef __AVX512F__
#define MORE_ROWS(NAME, WEIGHT)                                                                 \
    ADD_ROWS(NAME, WEIGHT, 5, 1)                                                                \
    ADD_ROWS(NAME, WEIGHT, 6, 1)                                                                \
    ADD_ROWS(NAME, WEIGHT, 7, 1)                                                                \
    ADD_ROWS(NAME, WEIGHT, 8, 1)                                                                \
    static void (*const add_##NAME##s[])(row_run, const WEIGHT *, float *, int64_t) = {         \
        NULL, add_##NAME##_1, add_##NAME##_2, add_##NAME##_3, add_##NAME##_4, add_##NAME##_5,   \
        add_##NAME##_6, add_##NAME##_7, add_##NAME##_8};
#else
#define MORE_ROWS(NAME, WEIGHT)                                                                 \
    static void (*const add_##NAME##s[])(row_run, const WEIGHT *, float *, int64_t) = {         \
        NULL, add_##NAME##_1, add_##NAME##_2, add_##NAME##_3, add_##NAME##_4};
#endif

#define ADD_ONE(TYPE)                                                                           \
    {                                                                                           \
        pair x = PAIR_OF_##TYPE(VALUES_AT(TYPE, t));                                            \
        UNROLLED for (int q = 0; q < rows; q++) {                                               \
            sum[q][u].first += x.first * weights[t * TOGETHER + q];                             \
            sum[q][u].second += x.second * weights[t * TOGETHER + q];                           \
        }                                                                                       \
    }
#define PAIR_OF_float pair_f32
#define PAIR_OF_bf16 pair_bf16
ADD(f32, float, float, 1, ADD_ONE)

#ifdef __AVX512BF16__
/* Two keys at once; a missing second key has weight 0. */
#define ADD_TWO(TYPE)                                                                           \
    {                                                                                           \
        words a = *(const any_words *)VALUES_AT(TYPE, t);                                       \
        words b = *(const any_words *)VALUES_AT(TYPE, t + 1 < v.count ? t + 1 : t);             \
        __m512bh even = (__m512bh)((a & 0xffffu) | (b << 16));                                  \
        __m512bh odd = (__m512bh)((a >> 16) | (b & 0xffff0000u));                               \
        UNROLLED for (int q = 0; q < rows; q++) {                                               \
            __m512bh w = (__m512bh)_mm512_set1_epi32(weights[t / 2 * TOGETHER + q]);            \
            sum[q][u].first = (vector)_mm512_dpbf16_ps((__m512)sum[q][u].first, even, w);       \
            sum[q][u].second = (vector)_mm512_dpbf16_ps((__m512)sum[q][u].second, odd, w);      \
        }                                                                                       \
    }
ADD(bf16, bf16, uint32_t, 2, ADD_TWO)

static void in_twos(const sums *weights, int64_t count, uint32_t *to) {
    for (int64_t t = 0; t < count; t += 2)
        for (int q = 0; q < TOGETHER; q++) {
            uint32_t second = t + 1 < count ? narrow(weights[t + 1][q]) : 0;
            to[t / 2 * TOGETHER + q] = narrow(weights[t][q]) | second << 16;
        }
}
#else
ADD(bf16, bf16, float, 1, ADD_ONE)
#endif

/* out += weights * values, for up to TOGETHER query rows. */
static void add_values(const attention *a, row_run values, const sums *weights, room *own,
                       int64_t here, float *out) {
    const float *plain = weights[0];
    int two = a->as_held && a->dtype == BF16;
#ifdef __AVX512BF16__
    const uint32_t *pairs = own->two;
    if (two) in_twos(weights, values.count, own->two);
#else
    const float *pairs = plain;
#endif
    for (int64_t r = 0; r < here; r += ADDED) {
        int64_t some = least(ADDED, here - r);
        if (two)
            add_bf16s[some](values, pairs + r, out + r * a->wide, a->wide);
        else
            add_f32s[some](values, plain + r, out + r * a->wide, a->wide);
    }
}

/* Attends to the next block of keys of one query (rows `q`, `out`, `most`, `total`: its heads in the group). Returns
 * the number of keys. */
static int64_t attend_keys(const attention *a, int64_t b, int64_t h, keys_left left, room *own,
                           const char *q, float *out, float *most, float *total) {
    row_run keys = run_of(a, 0, b, h, left), values = run_of(a, 1, b, h, left);
    if (!a->as_held) keys = widened(a, keys, own->made);
    for (int64_t r = 0; r < a->group; r += TOGETHER) {
        int64_t here = least(TOGETHER, a->group - r);
        sums *scores = own->scores + r / TOGETHER * KEYS;
        eight factor;
        score_keys(a, keys, values, q + r * query_bytes(a), here, scores);
        if (!weigh((any_eight *)scores, keys.count, a->scale, (any_eight *)(most + r),
                   (any_eight *)(total + r), &factor))
            continue;
        for (int64_t i = 0; i < here; i++)
            for (int64_t c = 0; c < a->wide; c++) out[(r + i) * a->wide + c] *= factor[i];
    }
    if (!a->as_held) values = widened(a, values, own->made);
    for (int64_t r = 0; r < a->group; r += TOGETHER)
        add_values(a, values, own->scores + r / TOGETHER * KEYS, own, least(TOGETHER, a->group - r),
                   out + r * a->wide);
    return keys.count;
}

/* Computes the partial result of one split. A query reads its keys in an order that does not depend on the other
 * queries of the sequence. Queries are interleaved block by block, so that keys are read from memory once. */
static void attend_part(const attention *a, int64_t unit, room *own) {
    int64_t head = unit / a->parts, b = head / a->kv_heads, h = head % a->kv_heads, taken;
    float *out = a->partial + unit * partial_size(a), *most = out + a->rows * a->wide;
    float *total = most + a->queries * a->padded;
    keys_left left[a->queries];
    formed_queries(a, b, h, own->q);
    memset(out, 0, a->rows * a->wide * sizeof *out);
    for (int64_t i = 0, all = a->queries * a->padded; i < all; i++) most[i] = LOWEST, total[i] = 0;
    for (int64_t s = 0; s < a->queries; s++) left[s] = keys_of(a, b, s, unit % a->parts);
    do {
        taken = 0;
        for (int64_t s = 0; s < a->queries; s++) {
            int64_t r = s * a->group;
            if (left[s].from == left[s].end) continue;
            left[s].from += attend_keys(a, b, h, left[s], own, own->q + r * query_bytes(a),
                                        out + r * a->wide, most + s * a->padded,
                                        total + s * a->padded);
            taken = 1;
        }
    } while (taken);
}

/* Restores the order of PAIR values that `pair_bf16` split into even and odd lanes. */
static inline void interleave(float *x) {
    float halves[PAIR];
    memcpy(halves, x, sizeof halves);
    for (int j = 0; j < PAIR / 2; j++) x[2 * j] = halves[j], x[2 * j + 1] = halves[PAIR / 2 + j];
}

/* Merges the splits of one query row, `at` of [batch, queries, heads], and stores it. */
static void join_parts(const attention *a, int64_t at) {
    int64_t b = at / a->heads / a->queries, s = at / a->heads % a->queries, head = at % a->heads;
    int64_t r = s * a->group + head % a->group, size = partial_size(a);
    const float *part = a->partial + (b * a->kv_heads + head / a->group) * a->parts * size;
    int64_t most = a->rows * a->wide + s * a->padded + head % a->group;
    int64_t total = most + a->queries * a->padded;
    float top = LOWEST, sum = 0, factors[a->parts];
    for (int64_t i = 0; i < a->parts; i++)
        if (part[i * size + most] > top) top = part[i * size + most];
    for (int64_t i = 0; i < a->parts; i++) {
        eight y = {part[i * size + most] - top};
        factors[i] = power(y)[0];
        sum += part[i * size + total] * factors[i];
    }
    for (int64_t c = 0; c < a->d; c += PAIR) {
        float value[PAIR] = {0};
        for (int64_t i = 0; i < a->parts; i++)
            for (int j = 0; j < PAIR; j++) value[j] += part[i * size + r * a->wide + c + j] * factors[i];
        for (int j = 0; j < PAIR; j++) value[j] = sum == 0 ? 0 : value[j] / sum;
        if (a->as_held && a->dtype == BF16) interleave(value);
        const void *made = value;
        bf16 narrowed[PAIR];
        if (a->dtype == BF16) {
            for (int j = 0; j < PAIR; j++) narrowed[j] = narrow(value[j]);
            made = narrowed;
        }
        int64_t item = a->dtype == BF16 ? sizeof(bf16) : sizeof(float);
        memcpy((char *)a->out + (at * a->d + c) * item, made, least(PAIR, a->d - c) * item);
    }
}

static int make_room(const attention *a, room *own) {
    int64_t groups = a->padded / TOGETHER, lines = LINE - 1;
    int64_t q = (a->rows * query_bytes(a) + lines) / LINE * LINE;
    int64_t made = a->as_held ? 0 : KEYS * a->wide * sizeof(float);
    char *at = take_lines(q + made + (groups * KEYS + KEYS / 2) * sizeof(sums));
    if (!at) return 1;
    own->q = at;
    own->made = (float *)(at + q);
    own->scores = (sums *)(at + q + made);
    own->two = (uint32_t *)(own->scores + groups * KEYS);
    memset(own->scores, 0, groups * KEYS * sizeof(sums));
    return 0;
}

/* The thread that completes a head's last split merges the splits. */
static int attend_units(void *context, units *left) {
    attention *a = context;
    room own;
    if (make_room(a, &own)) return 1;
    for (int64_t i; (i = take_unit(left)) >= 0;) {
        int64_t head = i / a->parts, b = head / a->kv_heads, h = head % a->kv_heads;
        attend_part(a, i, &own);
        if (__atomic_add_fetch(a->made + head, 1, __ATOMIC_ACQ_REL) < a->parts) continue;
        for (int64_t s = 0; s < a->queries; s++)
            for (int64_t g = 0; g < a->group; g++)
                join_parts(a, (b * a->queries + s) * a->heads + h * a->group + g);
    }
    free_lines(own.q);
    return 0;
}

int g4ir_attend(const void *q, const int64_t *positions, const int64_t *written, const void *k,
                const void *v, void *out, int dtype, int held, int64_t batch, int64_t queries,
                int64_t heads, int64_t kv_heads, int64_t d, int64_t slots, int64_t width,
                int64_t window, double scale, int threads) {
    attention a = {.q = q, .kept = {k, v}, .positions = positions, .written = written,
                   .out = out, .dtype = dtype, .held = held, .batch = batch,
                   .queries = queries, .heads = heads, .kv_heads = kv_heads, .d = d,
                   .slots = slots, .width = width, .window = window, .scale = scale * 1.4426950408889634,
                   .group = heads / kv_heads, .rows = queries * heads / kv_heads,
                   .padded = (heads / kv_heads + TOGETHER - 1) / TOGETHER * TOGETHER,
                   .wide = (d + PAIR - 1) / PAIR * PAIR, .as_held = held == dtype && d % PAIR == 0};
    int64_t shared = batch * kv_heads, units;
    /* Not fewer for a larger batch: sums of a sequence must not depend on the others. */
    a.parts = least(least((threads + kv_heads - 1) / kv_heads, PARTS_MOST), slots / KEYS_LEAST + 1);
    units = shared * a.parts;
    int64_t partial = (units * partial_size(&a) + 15) / 16 * LINE;
    a.partial = take_lines(partial + (shared * sizeof *a.made + LINE - 1) / LINE * LINE);
    if (!a.partial) return 1;
    a.made = memset((char *)a.partial + partial, 0, shared * sizeof *a.made);
    int failed = run_region(attend_units, &a, units, threads);
    free_lines(a.partial);
    return failed;
}
