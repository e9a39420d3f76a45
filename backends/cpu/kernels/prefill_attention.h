/* Flash-style prefill attention over the KV cache and the chunk itself (g4ir/ops/attention.py), on the micro
 * kernel of gemm.h. The query heads of a KV head (GQA) are stacked as rows of one matrix; a unit of work is a
 * block of COLUMNS rows. It iterates over the visible keys, BLOCK_KEYS at a time, with an online softmax, so
 * that scores stay in the core's cache. Scores and sums are fp32; with bf16 panels the probabilities are
 * rounded to bf16. */
#pragma once
#include "cache_rows.h"
#include "gemm.h"
#include "transpose.h"

/* Keys per block: a multiple of ROWS and of DEPTH words. */
#define BLOCK_KEYS (ROWS == 6 ? 96 : 128)

typedef struct {
    const void *q, *kept[2], *fresh[2]; /* kept: K, V of the cache; fresh: of the chunk */
    const int64_t *positions, *last, *written; /* last: last visible position per query */
    void *out;
    int dtype, held; /* dtype of queries and output; of cache rows */
    int64_t batch, queries, heads, kv_heads, d, slots, width, window;
    float scale;
    /* derived from the above */
    int64_t group, blocks;   /* query heads per KV head; blocks of keys */
    int64_t padded, words;   /* d rounded up to ROWS; panel words of d, rounded up to DEPTH */
    panel_word *packed[2];   /* K, V [batch, kv_heads, blocks, BLOCK_KEYS * padded / PER_WORD] */
    int32_t *at, *low, *high; /* key positions, -1: no key; min and max over ROWS keys */
} prefill;

static inline int64_t words_in_block(const prefill *a) { return BLOCK_KEYS * a->padded / PER_WORD; }

/* Returns the position of key 0. Keys are indexed by position, from the start of the block of the cache's oldest key
 * on, so that the order of sums does not depend on where a prompt is cut into chunks. */
static int64_t first_position(const prefill *a, int64_t b) {
    int64_t oldest = a->written[b] - a->slots;
    return oldest > 0 ? oldest / BLOCK_KEYS * BLOCK_KEYS : 0;
}

/* Returns the position of key i of a sequence, in the cache or the chunk; -1 if there is none. */
static int32_t position_of(const prefill *a, int64_t b, int64_t i) {
    int64_t at = first_position(a, b) + i, fresh = at - a->written[b];
    if (fresh < 0) return fresh >= -a->slots ? at : -1;
    return fresh < a->queries ? a->positions[b * a->queries + fresh] : -1;
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

/* Returns a row of K (0) or V (1), rounded to the queries' dtype, as fp32 (in `row`, or in place); zeros for a
 * missing key. */
static const float *row_of_key(const prefill *a, int value, int64_t b, int64_t h, int64_t i, float *row) {
    int64_t place = first_position(a, b) + i, fresh = place - a->written[b], size = a->held == F32 ? 4 : a->held > F16 ? 1 : 2;
    if (a->at[b * a->blocks * BLOCK_KEYS + i] < 0) return memset(row, 0, a->d * sizeof *row);
    int64_t at = fresh >= 0 ? b * a->queries + fresh : place % a->slots * a->batch + b;
    const char *from = fresh >= 0 ? a->fresh[value] : a->kept[value];
    from += (at * a->kv_heads + h) * a->width * size;
    if (a->held == F32 && a->dtype == F32) return (const float *)from;
    widen_row(from, a->held, row, a->d);
    if (a->dtype == BF16 && a->held != BF16) /* the op's definition rounds cache rows to bf16 */
        for (int64_t j = 0; j < a->d; j++) row[j] = widen(narrow(row[j]));
    return row;
}

static inline panel_word word_of(const float *values, int64_t stride) {
#ifdef PANELS_BF16
    return narrow(values[0]) | (uint32_t)narrow(values[stride]) << 16;
#else
    return values[0];
#endif
}

/* Packs panels of A: BLOCK_KEYS / ROWS panels of K (k axis: d) and padded / ROWS of V (k axis: keys). `room`:
 * scratch of 2 d floats. */
static void pack_block(const prefill *a, int64_t unit, float *room) {
    int64_t block = unit % a->blocks, h = unit / a->blocks % a->kv_heads, b = unit / a->blocks / a->kv_heads;
    panel_word *k = a->packed[0] + unit * words_in_block(a), *v = a->packed[1] + unit * words_in_block(a);
    for (int64_t i = 0; i < BLOCK_KEYS; i += PER_WORD) {
        for (int64_t s = 0; s < PER_WORD; s++) {
            const float *row = row_of_key(a, 0, b, h, block * BLOCK_KEYS + i + s, room);
            panel_word *to = k + (i + s) / ROWS * ROWS * a->words + (i + s) % ROWS * DEPTH;
            for (int64_t j = 0; j < a->words; j++)
                to[in_panel(j)] = j * PER_WORD < a->d ? word_of(row + j * PER_WORD, 1) : 0;
        }
        const float *row = row_of_key(a, 1, b, h, block * BLOCK_KEYS + i, room);
        if (PER_WORD > 1) {
            if (row != room) memcpy(room, row, a->d * sizeof *row);
            const float *other = row_of_key(a, 1, b, h, block * BLOCK_KEYS + i + 1, room + a->d);
            if (other != room + a->d) memcpy(room + a->d, other, a->d * sizeof *other);
            row = room;
        }
        panel_word *to = v + in_panel(i / PER_WORD);
        for (int64_t j = 0; j < a->padded; j++)
            to[j / ROWS * ROWS * (BLOCK_KEYS / PER_WORD) + j % ROWS * DEPTH] = j < a->d ? word_of(row + j, a->d) : 0;
    }
}

/* Whether a block contains any key. */
static int exists(const prefill *a, int64_t unit) {
    int64_t groups = BLOCK_KEYS / ROWS, b = unit / a->blocks / a->kv_heads, any = -1;
    const int32_t *high = a->high + (b * a->blocks + unit % a->blocks) * groups;
    for (int64_t g = 0; g < groups; g++) any = high[g] > any ? high[g] : any;
    return any >= 0;
}

static int pack_units(void *context, units *left) {
    const prefill *a = context;
    float *room = malloc(2 * a->d * sizeof *room);
    for (int64_t i; room && (i = take_unit(left)) >= 0;)
        if (exists(a, i)) pack_block(a, i, room);
    free(room);
    return !room;
}

/* ---- a block of queries ---- */

typedef struct {
    panel_word *q;       /* [words, COLUMNS] words along d */
    float *scores;       /* [BLOCK_KEYS, COLUMNS] */
    panel_word *weights; /* [BLOCK_KEYS / PER_WORD, COLUMNS] words along keys */
    float *sums;         /* [padded, COLUMNS] */
    float most[COLUMNS], total[COLUMNS];
    int32_t from[COLUMNS], last[COLUMNS]; /* visible positions of each query */
    int32_t first_from, most_from, least_last, most_last; /* min and max over the block's queries */
} query_block;

static int64_t query_row(const prefill *a, int64_t b, int64_t h, int64_t r) {
    return (b * a->queries + r / a->group) * a->heads + h * a->group + r % a->group;
}

/* Writes the panel words of the query that starts at element `at`; with PANELS_BF16 queries are bf16. */
static void query_words(const prefill *a, int64_t at, panel_word *to) {
    const char *row = (const char *)a->q + at * (a->dtype == F32 ? 4 : 2);
    const int64_t words = a->d / PER_WORD;
#ifdef PANELS_BF16
    memcpy(to, row, words * sizeof *to);
#else
    widen_row(row, a->dtype, to, words);
#endif
    memset(to + words, 0, (a->words - words) * sizeof *to);
}

static void load_queries(const prefill *a, int64_t b, int64_t h, int64_t first, query_block *own) {
    int64_t rows = a->queries * a->group;
    panel_word *by_query = (panel_word *)own->sums; /* [COLUMNS, words] */
    own->first_from = own->least_last = INT32_MAX, own->most_from = own->most_last = -1;
    for (int64_t l = 0; l < COLUMNS; l++) {
        int64_t r = least(first + l, rows - 1), s = b * a->queries + r / a->group;
        query_words(a, query_row(a, b, h, r) * a->d, by_query + l * a->words);
        int64_t from = a->window ? a->positions[s] - a->window + 1 : 0;
        own->from[l] = from = from < 0 ? 0 : from, own->last[l] = a->last[s];
        own->most[l] = LOWEST, own->total[l] = 0;
        if (from < own->first_from) own->first_from = from;
        if (from > own->most_from) own->most_from = from;
        if (a->last[s] < own->least_last) own->least_last = a->last[s];
        if (a->last[s] > own->most_last) own->most_last = a->last[s];
    }
    transpose((const uint32_t *)by_query, a->words, (uint32_t *)own->q, COLUMNS, COLUMNS, a->words);
    memset(own->sums, 0, a->padded * COLUMNS * sizeof *own->sums);
}

static inline lanes all_lanes(float value) { return (lanes){0} + value; }

static inline lanes where(lane_masks mask, lanes yes, lanes no) {
    return (lanes)((lane_masks)yes & mask | (lane_masks)no & ~mask);
}

static inline lanes rounded(lanes y) {
#if defined(__AVX512F__)
    return (lanes)_mm512_roundscale_ps((__m512)y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
    return (lanes)_mm256_round_ps((__m256)y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__SSE4_1__)
    return (lanes)_mm_round_ps((__m128)y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    return (lanes)vrndnq_f32((float32x4_t)y);
#endif
}

/* 2^y for y <= 0 or NaN. */
static inline lanes power_of_two(lanes y) {
    lanes low = all_lanes(-127), whole = rounded(where(y < low, low, y)), x = y - whole;
    lanes z = all_lanes(0.00015403530f);
    const float of[] = {0.0013333558f, 0.0096181291f, 0.055504109f, 0.24022651f, 0.69314718f, 1};
    UNROLLED for (int i = 0; i < 6; i++) z = z * x + of[i];
    lanes power = (lanes)((__builtin_convertvector(whole, lane_masks) + 127) << 23);
    return where(y < low, (lanes){0}, z * power);
}

/* Online softmax step for LANE queries from l on: turns the scores of `count` keys at positions `at` into weights;
 * `all`: every query sees every one of these keys. Sets *factor to the rescaling of earlier sums; returns whether it
 * differs from 1. */
static int weigh_lane(const prefill *a, query_block *own, int l, const int32_t *at, int64_t count, int all,
                      lanes *factor) {
    lane_masks from, last, grown;
    memcpy(&from, own->from + l, sizeof from), memcpy(&last, own->last + l, sizeof last);
    lanes before = *(any_lanes *)(own->most + l), top = before, sum = {0}, unseen = all_lanes(LOWEST);
    for (int64_t t = 0; t < count; t++) {
        any_lanes *score = (any_lanes *)(own->scores + t * COLUMNS + l);
        lanes s = *score * a->scale;
        if (!all) s = where((from <= at[t]) & (at[t] <= last), s, unseen);
        *score = s;
        top = where(s > top, s, top); /* ignores NaN */
    }
    for (int64_t t = 0; t < count; t += PER_WORD) {
        lanes p[PER_WORD];
        for (int s = 0; s < PER_WORD; s++) {
            lanes score = *(any_lanes *)(own->scores + (t + s) * COLUMNS + l);
            p[s] = where(score <= unseen, (lanes){0}, power_of_two(score - top));
            sum += p[s];
        }
#ifdef PANELS_BF16
        *(any_word_lanes *)(own->weights + t / 2 * COLUMNS + l) = words_of(p[0], p[1]);
#else
        *(any_word_lanes *)(own->weights + t * COLUMNS + l) = p[0];
#endif
    }
    *factor = power_of_two(before - top);
    any_lanes *total = (any_lanes *)(own->total + l);
    *total = *total * *factor + sum;
    *(any_lanes *)(own->most + l) = top;
    grown = top > before;
    int any = 0;
    for (int i = 0; i < LANE; i++) any |= grown[i];
    return any;
}

static void weigh_keys(const prefill *a, query_block *own, const int32_t *at, int64_t count, int all) {
    lanes factor[VECTORS_MAX];
    int grown = 0;
    for (int v = 0; v < VECTORS_MAX; v++) grown |= weigh_lane(a, own, v * LANE, at, count, all, factor + v);
    for (int64_t j = 0; grown && j < a->d; j++)
        UNROLLED for (int v = 0; v < VECTORS_MAX; v++)
            *(any_lanes *)(own->sums + j * COLUMNS + v * LANE) *= factor[v];
}

/* Attends to the visible part of a block of keys, in groups of ROWS keys. */
static void attend_block(const prefill *a, int64_t b, int64_t h, int64_t block, query_block *own) {
    int64_t groups = BLOCK_KEYS / ROWS, at = (b * a->blocks + block) * groups, first = 0, last = groups;
    const int32_t *low = a->low + at, *high = a->high + at;
    while (first < last && (high[first] < own->first_from || low[first] > own->most_last)) first++;
    while (first < last && (high[last - 1] < own->first_from || low[last - 1] > own->most_last)) last--;
    if (first == last) return;
    int all = 1;
    for (int64_t g = first; g < last; g++) all &= low[g] >= own->most_from && high[g] <= own->least_last;
    int64_t unit = (b * a->kv_heads + h) * a->blocks + block;
    const panel_word *k = a->packed[0] + unit * words_in_block(a), *v = a->packed[1] + unit * words_in_block(a);
    micro_kernel_of *multiply = micro_kernels[VECTORS_MAX];
    for (int64_t g = first; g < last; g++)
        multiply(a->words / DEPTH, k + g * a->words * ROWS, own->q, own->scores + (g - first) * ROWS * COLUMNS, 0);
    weigh_keys(a, own, a->at + (at + first) * ROWS, (last - first) * ROWS, all);
    for (int64_t c = 0; c < a->d; c += ROWS)
        multiply((last - first) * ROWS / PER_WORD / DEPTH, v + (c * BLOCK_KEYS + first * ROWS * ROWS) / PER_WORD,
                 own->weights, own->sums + c * COLUMNS, 1);
}

static void store_queries(const prefill *a, int64_t b, int64_t h, int64_t first, query_block *own) {
    for (int v = 0; v < COLUMNS; v += LANE) {
        lanes total = *(any_lanes *)(own->total + v);
        lanes inverse = where(total == 0, (lanes){0}, 1 / total);
        for (int64_t j = 0; j < a->d; j++) *(any_lanes *)(own->sums + j * COLUMNS + v) *= inverse;
    }
    float *by_query = (float *)own->q; /* [COLUMNS, d] */
    transpose((const uint32_t *)own->sums, COLUMNS, (uint32_t *)by_query, a->d, a->d, COLUMNS);
    for (int64_t l = 0; l < least(COLUMNS, a->queries * a->group - first); l++, by_query += a->d) {
        int64_t to = query_row(a, b, h, first + l) * a->d;
        if (a->dtype == BF16)
            narrow_row(by_query, (bf16 *)a->out + to, a->d);
        else
            for (int64_t j = 0; j < a->d; j++) store(a->out, to + j, by_query[j], a->dtype);
    }
}

static int prefill_units(void *context, units *left) {
    const prefill *a = context;
    query_block own;
    int64_t rows = a->queries * a->group, parts = (rows + COLUMNS - 1) / COLUMNS;
    own.q = take_lines((2 * a->padded + 2 * BLOCK_KEYS) * COLUMNS * sizeof(float));
    if (!own.q) return 1;
    own.sums = (float *)(own.q + a->padded * COLUMNS);
    own.scores = own.sums + a->padded * COLUMNS;
    own.weights = (panel_word *)(own.scores + BLOCK_KEYS * COLUMNS);
    begin_products();
    for (int64_t i; (i = take_unit(left)) >= 0;) {
        /* the last queries first: they have the most visible keys */
        int64_t head = i % (a->batch * a->kv_heads), part = parts - 1 - i / (a->batch * a->kv_heads);
        int64_t b = head / a->kv_heads, h = head % a->kv_heads;
        load_queries(a, b, h, part * COLUMNS, &own);
        for (int64_t block = 0; block < a->blocks; block++) attend_block(a, b, h, block, &own);
        store_queries(a, b, h, part * COLUMNS, &own);
    }
    end_products();
    free_lines(own.q);
    return 0;
}

static int attend_prompt(const void *q, const int64_t *positions, const int64_t *last,
                         const int64_t *written, const void *k, const void *v, const void *fresh_k,
                         const void *fresh_v, void *out, int dtype, int held, int64_t batch,
                         int64_t queries, int64_t heads, int64_t kv_heads, int64_t d, int64_t slots,
                         int64_t width, int64_t window, double scale, int threads) {
    prefill a = {.q = q, .kept = {k, v}, .fresh = {fresh_k, fresh_v}, .positions = positions,
                 .last = last, .written = written, .out = out, .dtype = dtype, .held = held, .batch = batch,
                 .queries = queries, .heads = heads, .kv_heads = kv_heads, .d = d, .slots = slots,
                 .width = width, .window = window, .scale = scale * 1.4426950408889634,
                 .group = heads / kv_heads, .padded = (d + ROWS - 1) / ROWS * ROWS,
                 .words = words_in_panel(d),
                 .blocks = (slots + queries + 2 * BLOCK_KEYS - 2) / BLOCK_KEYS};
    int64_t packs = batch * kv_heads * a.blocks, keys = batch * a.blocks * BLOCK_KEYS;
    a.packed[0] = take_lines(packs * words_in_block(&a) * 8 + keys * 8);
    if (!a.packed[0]) return 1;
    a.packed[1] = a.packed[0] + packs * words_in_block(&a);
    a.at = (int32_t *)(a.packed[1] + packs * words_in_block(&a));
    a.low = a.at + keys, a.high = a.low + keys / ROWS;
    for (int64_t b = 0; b < batch; b++) find_positions(&a, b);
    int64_t parts = (queries * a.group + COLUMNS - 1) / COLUMNS;
    int failed = run_region(pack_units, &a, packs, threads);
    if (!failed) failed = run_region(prefill_units, &a, parts * batch * kv_heads, threads);
    free_lines(a.packed[0]);
    return failed;
}
