/* Attention of a prompt's chunk over the KV cache and the chunk itself (g4ir/ops/attention.py), by the
 * micro-kernel of gemm.h. Query heads that share K and V are rows of one matrix; a unit of work is a
 * block of COLUMNS of them. It goes over the keys that its queries see, BLOCK_KEYS at a time, with a
 * running softmax: scores never leave a core's cache. Scores and sums are fp32; weights of values are
 * rounded to bf16. */
#pragma once
#include "attention.h"
#include "gemm.h"

#ifdef GEMM
#define BLOCK_KEYS 128

typedef struct {
    const void *q, *kept[2], *fresh[2]; /* K, V of the cache and of the chunk */
    const int64_t *positions, *last, *written; /* last: the last position that a query sees */
    void *out;
    int held;
    int64_t batch, queries, heads, kv_heads, d, slots, width, window;
    float scale;
    /* derived */
    int64_t group, blocks;   /* query heads of a head of K; blocks of keys */
    uint32_t *packed[2];     /* K, V [batch, kv_heads, blocks, BLOCK_KEYS * d / 2] */
    int32_t *at, *low, *high; /* positions of keys, -1: none; the least and most of ROWS keys */
} prefill;

static inline int64_t words_in_block(const prefill *a) { return BLOCK_KEYS * a->d / 2; }

/* Position of key i of a sequence: those of the cache, then those of the chunk; -1 if there is none. */
static int32_t position_of(const prefill *a, int64_t b, int64_t i) {
    if (i >= a->slots) return i < a->slots + a->queries ? a->positions[b * a->queries + i - a->slots] : -1;
    int64_t newest = a->written[b] - 1, back = (newest - i) % a->slots;
    int64_t at = newest - (back < 0 ? back + a->slots : back);
    return at < 0 ? -1 : at;
}

static void find_positions(const prefill *a, int64_t b) {
    int64_t groups = a->blocks * BLOCK_KEYS / ROWS;
    for (int64_t g = 0; g < groups; g++) {
        int32_t low = INT32_MAX, high = -1;
        for (int64_t i = g * ROWS; i < (g + 1) * ROWS; i++) {
            int32_t at = a->at[b * groups * ROWS + i] = position_of(a, b, i);
            low = at < low ? at : low;
            high = at > high ? at : high;
        }
        a->low[b * groups + g] = low, a->high[b * groups + g] = high;
    }
}

/* Row of K (0) or V (1) in bf16, in `room` unless it is held so; zeros for a key that does not exist. */
static const bf16 *row_of_key(const prefill *a, int value, int64_t b, int64_t h, int64_t i, void *room) {
    int64_t fresh = i - a->slots, size = a->held == F32 ? 4 : a->held > F16 ? 1 : 2;
    if (a->at[b * a->blocks * BLOCK_KEYS + i] < 0) return memset(room, 0, a->d * 2);
    int64_t row = fresh >= 0 ? b * a->queries + fresh : i * a->batch + b;
    const char *from = fresh >= 0 ? a->fresh[value] : a->kept[value];
    from += (row * a->kv_heads + h) * a->width * size;
    if (a->held == BF16) return (const bf16 *)from;
    float *wide = (float *)((char *)room + a->d * 2);
    widen_row(from, a->held, wide, a->d);
    for (int64_t j = 0; j < a->d; j++) ((bf16 *)room)[j] = narrow(wide[j]);
    return room;
}

/* Packs K [BLOCK_KEYS / ROWS, d / 2, ROWS] words of two neighbours, V [d / ROWS, BLOCK_KEYS / 2, ROWS]
 * words of two keys. */
static void pack_block(const prefill *a, int64_t unit, char *room) {
    int64_t block = unit % a->blocks, h = unit / a->blocks % a->kv_heads, b = unit / a->blocks / a->kv_heads;
    uint32_t *k = a->packed[0] + unit * words_in_block(a), *v = a->packed[1] + unit * words_in_block(a);
    for (int64_t i = 0; i < BLOCK_KEYS; i += 2) {
        const bf16 *rows[2];
        for (int s = 0; s < 2; s++) {
            const uint32_t *row = (const uint32_t *)row_of_key(a, 0, b, h, block * BLOCK_KEYS + i + s, room);
            uint32_t *to = k + (i + s) / ROWS * ROWS * a->d / 2 + (i + s) % ROWS;
            for (int64_t j = 0; j < a->d / 2; j++) to[j * ROWS] = row[j];
        }
        for (int s = 0; s < 2; s++)
            rows[s] = row_of_key(a, 1, b, h, block * BLOCK_KEYS + i + s, room + s * 6 * a->d);
        for (int64_t j = 0; j < a->d; j++)
            v[(j / ROWS * BLOCK_KEYS / 2 + i / 2) * ROWS + j % ROWS] = rows[0][j] | (uint32_t)rows[1][j] << 16;
    }
}

/* Whether a block has keys. */
static int exists(const prefill *a, int64_t unit) {
    int64_t groups = BLOCK_KEYS / ROWS, b = unit / a->blocks / a->kv_heads, any = -1;
    const int32_t *high = a->high + (b * a->blocks + unit % a->blocks) * groups;
    for (int64_t g = 0; g < groups; g++) any = high[g] > any ? high[g] : any;
    return any >= 0;
}

static int pack_units(void *context, units *left) {
    const prefill *a = context;
    char *room = malloc(12 * a->d);
    for (int64_t i; room && (i = take_unit(left)) >= 0;)
        if (exists(a, i)) pack_block(a, i, room);
    free(room);
    return !room;
}

/* ---- a block of queries ---- */

typedef struct {
    uint32_t *q;         /* [d / 2, COLUMNS] words of two neighbours */
    float *scores;       /* [BLOCK_KEYS, COLUMNS] */
    uint32_t *weights;   /* [BLOCK_KEYS / 2, COLUMNS] words of two keys */
    float *sums;         /* [d, COLUMNS] */
    float most[COLUMNS], total[COLUMNS];
    int32_t from[COLUMNS], last[COLUMNS]; /* positions that a query sees */
    int32_t first_from, most_from, least_last, most_last; /* over the block's queries */
} query_block;

static int64_t query_row(const prefill *a, int64_t b, int64_t h, int64_t r) {
    return (b * a->queries + r / a->group) * a->heads + h * a->group + r % a->group;
}

static void load_queries(const prefill *a, int64_t b, int64_t h, int64_t first, query_block *own) {
    int64_t rows = a->queries * a->group;
    own->first_from = own->least_last = INT32_MAX, own->most_from = own->most_last = -1;
    for (int64_t l = 0; l < COLUMNS; l++) {
        int64_t r = least(first + l, rows - 1), s = b * a->queries + r / a->group;
        const uint32_t *row = (const uint32_t *)((const bf16 *)a->q + query_row(a, b, h, r) * a->d);
        for (int64_t j = 0; j < a->d / 2; j++) own->q[j * COLUMNS + l] = row[j];
        int64_t from = a->window ? a->positions[s] - a->window + 1 : 0;
        own->from[l] = from = from < 0 ? 0 : from, own->last[l] = a->last[s];
        own->most[l] = LOWEST, own->total[l] = 0;
        if (from < own->first_from) own->first_from = from;
        if (from > own->most_from) own->most_from = from;
        if (a->last[s] < own->least_last) own->least_last = a->last[s];
        if (a->last[s] > own->most_last) own->most_last = a->last[s];
    }
    memset(own->sums, 0, a->d * COLUMNS * sizeof *own->sums);
}

/* 2^y; y is at most 0. */
static inline __m512 power_512(__m512 y) {
    __m512 whole = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 x = _mm512_sub_ps(y, whole), z = _mm512_set1_ps(0.00015403530f);
    const float of[] = {0.0013333558f, 0.0096181291f, 0.055504109f, 0.24022651f, 0.69314718f, 1};
    UNROLLED for (int i = 0; i < 6; i++) z = _mm512_fmadd_ps(z, x, _mm512_set1_ps(of[i]));
    return _mm512_scalef_ps(z, whole);
}

/* Scores of `count` keys at positions `at` become weights, for LANE queries from l on. Sets *factor to
 * what earlier sums are multiplied by; returns whether that is not 1. */
static int weigh_lane(const prefill *a, query_block *own, int l, const int32_t *at, int64_t count, int all,
                      __m512 *factor) {
    __m512i from = _mm512_loadu_si512(own->from + l), last = _mm512_loadu_si512(own->last + l);
    __m512 before = _mm512_loadu_ps(own->most + l), top = before, sum = _mm512_setzero_ps();
    __m512 scale = _mm512_set1_ps(a->scale), unseen = _mm512_set1_ps(LOWEST);
    for (int64_t t = 0; t < count; t++) {
        float *score = own->scores + t * COLUMNS + l;
        __m512 s = _mm512_mul_ps(_mm512_loadu_ps(score), scale);
        if (!all) {
            __m512i key = _mm512_set1_epi32(at[t]);
            __mmask16 seen = _mm512_cmple_epi32_mask(from, key) & _mm512_cmple_epi32_mask(key, last);
            s = _mm512_mask_mov_ps(unseen, seen, s);
        }
        _mm512_storeu_ps(score, s);
        top = _mm512_max_ps(s, top); /* of NaN, the second */
    }
    for (int64_t t = 0; t < count; t += 2) {
        __m512 p[2];
        for (int s = 0; s < 2; s++) {
            __m512 score = _mm512_loadu_ps(own->scores + (t + s) * COLUMNS + l);
            __mmask16 seen = _mm512_cmp_ps_mask(score, unseen, _CMP_NLE_UQ);
            p[s] = _mm512_maskz_mov_ps(seen, power_512(_mm512_sub_ps(score, top)));
            sum = _mm512_add_ps(sum, p[s]);
        }
        _mm512_storeu_si512(own->weights + t / 2 * COLUMNS + l, words_of(p[0], p[1]));
    }
    *factor = power_512(_mm512_sub_ps(before, top));
    __m512 total = _mm512_loadu_ps(own->total + l);
    _mm512_storeu_ps(own->total + l, _mm512_fmadd_ps(total, *factor, sum));
    _mm512_storeu_ps(own->most + l, top);
    return _mm512_cmp_ps_mask(top, before, _CMP_GT_OQ) != 0;
}

static void weigh_keys(const prefill *a, query_block *own, const int32_t *at, int64_t count, int all) {
    __m512 factor[COLUMNS / LANE];
    int grown = 0;
    for (int v = 0; v < COLUMNS / LANE; v++)
        grown |= weigh_lane(a, own, v * LANE, at, count, all, factor + v);
    for (int64_t j = 0; grown && j < a->d; j++)
        UNROLLED for (int v = 0; v < COLUMNS / LANE; v++) {
            float *sum = own->sums + j * COLUMNS + v * LANE;
            _mm512_storeu_ps(sum, _mm512_mul_ps(_mm512_loadu_ps(sum), factor[v]));
        }
}

/* Attends to what is seen of a block of keys: to groups of ROWS of them, from the first one seen to the
 * last. */
static void attend_block(const prefill *a, int64_t b, int64_t h, int64_t block, query_block *own) {
    int64_t groups = BLOCK_KEYS / ROWS, at = (b * a->blocks + block) * groups, first = 0, last = groups;
    const int32_t *low = a->low + at, *high = a->high + at;
    while (first < last && (high[first] < own->first_from || low[first] > own->most_last)) first++;
    while (first < last && (high[last - 1] < own->first_from || low[last - 1] > own->most_last)) last--;
    if (first == last) return;
    int all = 1;
    for (int64_t g = first; g < last; g++) all &= low[g] >= own->most_from && high[g] <= own->least_last;
    int64_t unit = (b * a->kv_heads + h) * a->blocks + block, words = a->d / 2;
    const uint32_t *k = a->packed[0] + unit * words_in_block(a), *v = a->packed[1] + unit * words_in_block(a);
    for (int64_t g = first; g < last; g++)
        micro_kernel_3(words, k + g * words * ROWS, own->q, own->scores + (g - first) * ROWS * COLUMNS, 0);
    weigh_keys(a, own, a->at + (at + first) * ROWS, (last - first) * ROWS, all);
    for (int64_t c = 0; c < a->d; c += ROWS)
        micro_kernel_3((last - first) * ROWS / 2, v + c * BLOCK_KEYS / 2 + first * ROWS / 2 * ROWS,
                         own->weights, own->sums + c * COLUMNS, 1);
}

static void store_queries(const prefill *a, int64_t b, int64_t h, int64_t first, query_block *own) {
    for (int v = 0; v < COLUMNS; v += LANE) {
        __m512 total = _mm512_loadu_ps(own->total + v), one = _mm512_set1_ps(1);
        __mmask16 any = _mm512_cmp_ps_mask(total, _mm512_setzero_ps(), _CMP_NEQ_UQ);
        __m512 inverse = _mm512_maskz_div_ps(any, one, total);
        for (int64_t j = 0; j < a->d; j += 2) {
            __m512 sums[2];
            for (int s = 0; s < 2; s++)
                sums[s] = _mm512_mul_ps(_mm512_loadu_ps(own->sums + (j + s) * COLUMNS + v), inverse);
            _mm512_storeu_si512(own->q + j / 2 * COLUMNS + v, words_of(sums[0], sums[1]));
        }
    }
    for (int64_t l = 0; l < least(COLUMNS, a->queries * a->group - first); l++) {
        uint32_t *to = (uint32_t *)((bf16 *)a->out + query_row(a, b, h, first + l) * a->d);
        for (int64_t j = 0; j < a->d / 2; j++) to[j] = own->q[j * COLUMNS + l];
    }
}

static int prefill_units(void *context, units *left) {
    const prefill *a = context;
    query_block own;
    int64_t rows = a->queries * a->group, parts = (rows + COLUMNS - 1) / COLUMNS;
    own.q = aligned_alloc(LINE, (a->d / 2 * 3 + BLOCK_KEYS / 2 * 3) * COLUMNS * 4);
    if (!own.q) return 1;
    own.sums = (float *)(own.q + a->d / 2 * COLUMNS);
    own.scores = own.sums + a->d * COLUMNS;
    own.weights = (uint32_t *)(own.scores + BLOCK_KEYS * COLUMNS);
    for (int64_t i; (i = take_unit(left)) >= 0;) {
        /* the last queries first: they see most */
        int64_t head = i % (a->batch * a->kv_heads), part = parts - 1 - i / (a->batch * a->kv_heads);
        int64_t b = head / a->kv_heads, h = head % a->kv_heads;
        load_queries(a, b, h, part * COLUMNS, &own);
        for (int64_t block = 0; block < a->blocks; block++) attend_block(a, b, h, block, &own);
        store_queries(a, b, h, part * COLUMNS, &own);
    }
    free(own.q);
    return 0;
}

int g4ir_attend_chunk(const void *q, const int64_t *positions, const int64_t *last,
                      const int64_t *written, const void *k, const void *v, const void *fresh_k,
                      const void *fresh_v, void *out, int held, int64_t batch, int64_t queries,
                      int64_t heads, int64_t kv_heads, int64_t d, int64_t slots, int64_t width,
                      int64_t window, double scale, int threads) {
    prefill a = {.q = q, .kept = {k, v}, .fresh = {fresh_k, fresh_v}, .positions = positions,
                 .last = last, .written = written, .out = out, .held = held, .batch = batch,
                 .queries = queries, .heads = heads, .kv_heads = kv_heads, .d = d, .slots = slots,
                 .width = width, .window = window, .scale = scale * 1.4426950408889634,
                 .group = heads / kv_heads, .blocks = (slots + queries + BLOCK_KEYS - 1) / BLOCK_KEYS};
    int64_t packs = batch * kv_heads * a.blocks, keys = batch * a.blocks * BLOCK_KEYS;
    a.packed[0] = aligned_alloc(LINE, packs * words_in_block(&a) * 8 + keys * 8);
    if (!a.packed[0]) return 1;
    a.packed[1] = a.packed[0] + packs * words_in_block(&a);
    a.at = (int32_t *)(a.packed[1] + packs * words_in_block(&a));
    a.low = a.at + keys, a.high = a.low + keys / ROWS;
    for (int64_t b = 0; b < batch; b++) find_positions(&a, b);
    int64_t parts = (queries * a.group + COLUMNS - 1) / COLUMNS;
    int failed = run_region(pack_units, &a, packs, threads);
    if (!failed) failed = run_region(prefill_units, &a, parts * batch * kv_heads, threads);
    free(a.packed[0]);
    return failed;
}

int g4ir_takes_chunk(int dtype, int held, int64_t d) {
    return dtype == BF16 && held >= BF16 && held <= ROWS_FP8 && d % ROWS == 0;
}
#else
int g4ir_takes_chunk(int dtype, int held, int64_t d) { return 0; }
int g4ir_attend_chunk(const void *q, const int64_t *positions, const int64_t *last,
                      const int64_t *written, const void *k, const void *v, const void *fresh_k,
                      const void *fresh_v, void *out, int held, int64_t batch, int64_t queries,
                      int64_t heads, int64_t kv_heads, int64_t d, int64_t slots, int64_t width,
                      int64_t window, double scale, int threads) {
    return 1;
}
#endif
