// Paged grouped-query attention of some rows of one sequence over one KV head.
//
// The history is walked in spans of 64 positions, at the same places for every row; each row keeps its largest
// score, the sum of its weights and the weighted values. So a row's bits depend on its position and its history
// alone, whether it comes alone, in a chunk, or in whatever batch.
#pragma once
#include "program.h"
#include "rows.h"
#include "simd.h"

struct Heads {
    int64_t num_heads, num_kv_heads, size, padded, row_stride, window;
    float scale;
};

static inline Heads heads_of(const Op& op) {
    return {op.n[0], op.n[1], op.n[2], (op.n[2] + 7) / 8 * 8, op.n[3], op.n[4], op.f[0]};
}

static inline size_t attention_scratch_floats(const Heads& h) {
    size_t group = (size_t)(h.num_heads / h.num_kv_heads), padded = (size_t)h.padded;
    return padded * (2 * SPAN + 2 * ATTENTION_ROWS * group) + 2 * ATTENTION_ROWS * group + SPAN + group * padded;
}

// Keys and values of positions [first, end) of one KV head as padded floats.
static inline void read_span(const Context& c, const Heads& h, const Op& op, int64_t sequence, int64_t kv_head,
                             int64_t first, int64_t end, float* keys, float* values) {
    const Step& s = *c.step;
    const int64_t* pages = s.pages + sequence * s.table_width;
    int64_t slot_stride = h.num_kv_heads * h.size;
    for (int64_t position = first; position < end; position++) {
        int64_t slot = pages[position / s.page_size] * s.page_size + position % s.page_size;
        const uint16_t* key = (const uint16_t*)op.p[1] + slot * slot_stride + kv_head * h.size;
        const uint16_t* value = (const uint16_t*)op.p[2] + slot * slot_stride + kv_head * h.size;
        float* k = keys + (position % SPAN) * h.padded;
        float* v = values + (position % SPAN) * h.padded;
        int64_t i = 0;
        for (; i + 8 <= h.size; i += 8) {
            store(k + i, load_half(key + i));
            store(v + i, load_half(value + i));
        }
        if (i == h.size) continue;
        uint16_t tail[16] = {};
        memcpy(tail, key + i, (size_t)(h.size - i) * 2);
        memcpy(tail + 8, value + i, (size_t)(h.size - i) * 2);
        store(k + i, load_half(tail));
        store(v + i, load_half(tail + 8));
    }
}

// Scores of four keys against one query: the same sums in the same order as one by one.
static inline void four_scores(const float* q, const float* keys, int64_t padded, float scale, float* out) {
    f8 a = f8{}, b = f8{}, c = f8{}, d = f8{};
    for (int64_t i = 0; i < padded; i += 8) {
        f8 x = load(q + i);
        a = fma8(x, load(keys + i), a);
        b = fma8(x, load(keys + padded + i), b);
        c = fma8(x, load(keys + 2 * padded + i), c);
        d = fma8(x, load(keys + 3 * padded + i), d);
    }
#if defined(__AVX2__)
    __m256 ab = _mm256_hadd_ps((__m256)a, (__m256)b), cd = _mm256_hadd_ps((__m256)c, (__m256)d);
    __m256 pairs = _mm256_hadd_ps(ab, cd);
    __m128 sums = _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
    _mm_storeu_ps(out, _mm_mul_ps(sums, _mm_set1_ps(scale)));
#else
    out[0] = sum(a) * scale;
    out[1] = sum(b) * scale;
    out[2] = sum(c) * scale;
    out[3] = sum(d) * scale;
#endif
}

template <int LANES>
static inline void add_values(const float* weights, const float* values, int64_t from, int64_t to, int64_t padded,
                              float shrink, float* sums) {
    f8 held[LANES];
    for (int k = 0; k < LANES; k++) held[k] = load(sums + 8 * k) * shrink;
    for (int64_t j = from; j < to; j++)
        for (int k = 0; k < LANES; k++) held[k] = fma8(all(weights[j]), load(values + j * padded + 8 * k), held[k]);
    for (int k = 0; k < LANES; k++) store(sums + 8 * k, held[k]);
}

// One row and head against the positions [from, to) of a span (counted within it).
static inline void attend_span(const float* q, const float* keys, const float* values, int64_t from, int64_t to,
                               const Heads& h, float* weights, float* state, float* sums) {
    for (int64_t j = from / 4 * 4; j < to; j += 4) four_scores(q, keys + j * h.padded, h.padded, h.scale, weights + j);
    for (int64_t j = from / 8 * 8; j < from; j++) weights[j] = -__builtin_inff();
    for (int64_t j = to; j < (to + 7) / 8 * 8; j++) weights[j] = -__builtin_inff();
    f8 most = all(-__builtin_inff());
    for (int64_t j = from / 8 * 8; j < to; j += 8) most = at_least(load(weights + j), most);
    float best = largest(most);
    best = state[0] > best ? state[0] : best;
    // Nothing but -inf so far (keys that overflowed): 0 keeps what follows a number.
    float reference = best == -__builtin_inff() ? 0.0f : best;
    f8 total = f8{};
    for (int64_t j = from / 8 * 8; j < to; j += 8) {
        f8 score = load(weights + j);
        f8 weight = exp8(score - reference);
        weight = score == -__builtin_inff() ? f8{} : weight;
        store(weights + j, weight);
        total = total + weight;
    }
    float shrink = state[0] == -__builtin_inff() ? 0.0f : exp8(all(state[0] - reference))[0];
    state[0] = best;
    state[1] = state[1] * shrink + sum(total);
    int64_t i = 0;
    for (; i + 64 <= h.padded; i += 64) add_values<8>(weights, values + i, from, to, h.padded, shrink, sums + i);
    for (; i + 32 <= h.padded; i += 32) add_values<4>(weights, values + i, from, to, h.padded, shrink, sums + i);
    for (; i < h.padded; i += 8) add_values<1>(weights, values + i, from, to, h.padded, shrink, sums + i);
}

static inline void attend_rows(const Op& op, const Context& c, const Rows& rows, int64_t kv_head) {
    Heads h = heads_of(op);
    int64_t group = h.num_heads / h.num_kv_heads, padded = h.padded;
    float* keys = (float*)c.worker->scratch;
    float* values = keys + SPAN * padded;
    float* queries = values + SPAN * padded;
    float* sums = queries + ATTENTION_ROWS * group * padded;
    float* states = sums + ATTENTION_ROWS * group * padded;
    float* weights = states + 2 * ATTENTION_ROWS * group;
    float* joined = weights + SPAN;
    for (int64_t r = 0; r < rows.count; r++)
        for (int64_t n = 0; n < group; n++) {
            const float* q = (const float*)op.p[0] + (rows.first_row + r) * h.row_stride + (kv_head * group + n) * h.size;
            int64_t at = r * group + n;
            memcpy(queries + at * padded, q, (size_t)h.size * 4);
            memset(queries + at * padded + h.size, 0, (size_t)(padded - h.size) * 4);
            memset(sums + at * padded, 0, (size_t)padded * 4);
            states[2 * at] = -__builtin_inff();
            states[2 * at + 1] = 0.0f;
        }
    int64_t end = rows.position + rows.count;
    int64_t oldest = h.window && rows.position + 1 > h.window ? rows.position + 1 - h.window : 0;
    for (int64_t span = oldest / SPAN * SPAN; span < end; span += SPAN) {
        int64_t first = oldest > span ? oldest : span, last = end < span + SPAN ? end : span + SPAN;
        read_span(c, h, op, rows.sequence, kv_head, first, last, keys, values);
        for (int64_t r = 0; r < rows.count; r++) {
            int64_t position = rows.position + r;
            int64_t low = h.window && position + 1 > h.window ? position + 1 - h.window : 0;
            int64_t from = low > span ? low - span : 0, to = position + 1 < last ? position + 1 - span : last - span;
            for (int64_t n = 0; n < group && from < to; n++) {
                int64_t at = r * group + n;
                attend_span(queries + at * padded, keys, values, from, to, h, weights, states + 2 * at, sums + at * padded);
            }
        }
    }
    for (int64_t r = 0; r < rows.count; r++) {
        float* out = op.p[3] ? (float*)op.p[3] + (rows.first_row + r) * h.num_heads * h.size + kv_head * group * h.size : joined;
        for (int64_t n = 0; n < group; n++) {
            int64_t at = r * group + n;
            float inverse = 1.0f / states[2 * at + 1];
            for (int64_t i = 0; i < h.size; i++) out[n * h.size + i] = sums[at * padded + i] * inverse;
        }
        if (op.p[4])
            quantize_range(out, kv_head * group * h.size, group * h.size, rows.first_row + r, h.num_heads * h.size,
                           *(const Quantized*)op.p[4]);
    }
}
