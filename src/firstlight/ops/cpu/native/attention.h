// Paged grouped-query attention of some rows of one sequence over one KV head.
//
// The history falls into parts of 128 positions, walked in spans of 64, at the same places for every row. For each part
// a row has its largest score, the sum of its weights and the weighted values, and these are merged in the order of
// the parts, whether one thread does them all or several share them. So a row's bits depend on its position and its
// history alone, whether it comes alone, in a chunk, or in whatever batch.
//
// Latent attention has one row a slot for all heads, whose first values are the value too. Its "KV heads" are shares of
// the heads that threads take.
#pragma once
#include "history.h"
#include "kv.h"
#include "program.h"
#include "rows.h"
#include "simd.h"

static inline size_t attention_scratch_floats(const Heads& h) {
    size_t group = (size_t)(h.num_heads / h.num_kv_heads), padded = (size_t)h.padded;
    return padded * (2 * SPAN + 3 * ATTENTION_ROWS * group) + 4 * ATTENTION_ROWS * group + SPAN + group * padded;
}

// Floats of what a row's heads have of a part: for each the weighted values, the largest score and the sum.
static inline int64_t partial_floats(const Heads& h) { return h.num_heads / h.num_kv_heads * (h.padded + 2); }

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
    for (; i + 64 <= h.value_padded; i += 64) add_values<8>(weights, values + i, from, to, h.padded, shrink, sums + i);
    for (; i + 32 <= h.value_padded; i += 32) add_values<4>(weights, values + i, from, to, h.padded, shrink, sums + i);
    for (; i < h.value_padded; i += 8) add_values<1>(weights, values + i, from, to, h.padded, shrink, sums + i);
}

// Where the work of one block of rows and one KV head lies: `states` and `sums` are of a part, or of all.
struct Work {
    Heads h;
    int64_t group, kv_head;
    float *keys, *values, *queries, *sums, *states, *weights, *all_sums, *all_states, *joined;
};

static inline Work work_of(const Op& op, const Context& c, const Rows& rows, int64_t kv_head) {
    Work w;
    w.h = heads_of(op);
    w.group = w.h.num_heads / w.h.num_kv_heads;
    w.kv_head = kv_head;
    int64_t padded = w.h.padded, lines = ATTENTION_ROWS * w.group;
    w.keys = (float*)c.worker->scratch;
    w.queries = w.keys + 2 * SPAN * padded;
    w.values = w.h.is_latent ? w.keys : w.keys + SPAN * padded;
    w.sums = w.queries + lines * padded;
    w.all_sums = w.sums + lines * padded;
    w.states = w.all_sums + lines * padded;
    w.all_states = w.states + 2 * lines;
    w.weights = w.all_states + 2 * lines;
    w.joined = w.weights + SPAN;
    for (int64_t r = 0; r < rows.count; r++)
        for (int64_t n = 0; n < w.group; n++) {
            const float* q = (const float*)op.p[0] + (rows.first_row + r) * w.h.row_stride + (kv_head * w.group + n) * w.h.size;
            float* to = w.queries + (r * w.group + n) * padded;
            memcpy(to, q, (size_t)w.h.size * 4);
            memset(to + w.h.size, 0, (size_t)(padded - w.h.size) * 4);
        }
    return w;
}

static inline void clear(const Work& w, int64_t count, float* states, float* sums) {
    memset(sums, 0, (size_t)(count * w.group * w.h.padded) * 4);
    for (int64_t at = 0; at < count * w.group; at++) {
        states[2 * at] = -__builtin_inff();
        states[2 * at + 1] = 0.0f;
    }
}

// The first position that any of the rows sees.
static inline int64_t oldest_of(const Heads& h, const Rows& rows) {
    return h.window && rows.position + 1 > h.window ? rows.position + 1 - h.window : 0;
}

// `IS_TREE`: the rows are nodes of one. From its root on, each has a branch of its own.
template <bool IS_TREE>
static inline void attend_part_of(const Op& op, const Context& c, const Rows& rows, const Work& w, int64_t part,
                                  float* states, float* sums) {
    const Heads& h = w.h;
    clear(w, rows.count, states, sums);
    int64_t oldest = oldest_of(h, rows), behind = (part + 1) * PART, end = rows.end < behind ? rows.end : behind;
    int64_t root = rows.position;
    for (int64_t span = part * PART; span < end; span += SPAN) {
        int64_t first = oldest > span ? oldest : span, last = end < span + SPAN ? end : span + SPAN;
        if (first >= last) continue;
        int64_t shared = IS_TREE && root < last ? root : last;
        read_span<false>(c, h, op, {rows.sequence, w.kv_head, first, shared, 0, nullptr}, w.keys, w.values);
        for (int64_t r = 0; r < rows.count; r++) {
            int64_t position = rows.position + r;
            if (IS_TREE) {
                const int64_t* branch = branch_of(*c.step, rows.first_row + r);
                position = root + depth_of(*c.step, branch);
                int64_t from = first > root ? first : root, to = last < position + 1 ? last : position + 1;
                read_span<true>(c, h, op, {rows.sequence, w.kv_head, from, to, root, branch}, w.keys, w.values);
            }
            int64_t low = h.window && position + 1 > h.window ? position + 1 - h.window : 0;
            int64_t from = low > span ? low - span : 0, to = position + 1 < last ? position + 1 - span : last - span;
            for (int64_t n = 0; n < w.group && from < to; n++) {
                int64_t at = r * w.group + n;
                attend_span(w.queries + at * h.padded, w.keys, w.values, from, to, h, w.weights, states + 2 * at,
                            sums + at * h.padded);
            }
        }
    }
}

static inline void attend_part(const Op& op, const Context& c, const Rows& rows, const Work& w, int64_t part,
                               float* states, float* sums) {
    if (branch_of(*c.step, rows.first_row)) attend_part_of<true>(op, c, rows, w, part, states, sums);
    else attend_part_of<false>(op, c, rows, w, part, states, sums);
}

// A part is added to those before it. A row that sees nothing of it is left as it is.
static inline void add_part(const Work& w, int64_t count, const float* states, const float* sums) {
    for (int64_t at = 0; at < count * w.group; at++) {
        float before = w.all_states[2 * at], now = states[2 * at];
        if (now == -__builtin_inff() && states[2 * at + 1] == 0.0f) continue;
        if (before == -__builtin_inff() && w.all_states[2 * at + 1] == 0.0f) {  // the first one
            memcpy(w.all_states + 2 * at, states + 2 * at, 8);
            memcpy(w.all_sums + at * w.h.padded, sums + at * w.h.padded, (size_t)w.h.padded * 4);
            continue;
        }
        float most = before > now ? before : now, reference = most == -__builtin_inff() ? 0.0f : most;
        float keep = before == -__builtin_inff() ? 0.0f : exp8(all(before - reference))[0];
        float take = now == -__builtin_inff() ? 0.0f : exp8(all(now - reference))[0];
        w.all_states[2 * at] = most;
        w.all_states[2 * at + 1] = w.all_states[2 * at + 1] * keep + states[2 * at + 1] * take;
        float* to = w.all_sums + at * w.h.padded;
        const float* from = sums + at * w.h.padded;
        for (int64_t i = 0; i < w.h.padded; i += 8) store(to + i, load(to + i) * keep + load(from + i) * take);
    }
}

static inline void put_attended(const Op& op, const Rows& rows, const Work& w) {
    const Heads& h = w.h;
    int64_t size = h.value_size, width = h.num_heads * size, first = w.kv_head * w.group * size;
    for (int64_t r = 0; r < rows.count; r++) {
        float* out = op.p[3] ? (float*)op.p[3] + (rows.first_row + r) * width + first : w.joined;
        for (int64_t n = 0; n < w.group; n++) {
            int64_t at = r * w.group + n;
            float inverse = 1.0f / w.all_states[2 * at + 1];
            for (int64_t i = 0; i < size; i++) out[n * size + i] = w.all_sums[at * h.padded + i] * inverse;
        }
        if (op.p[4])
            quantize_range(out, first, w.group * size, rows.first_row + r, width, *(const Quantized*)op.p[4]);
    }
}

// All parts, by one thread.
static inline void attend_rows(const Op& op, const Context& c, const Rows& rows, int64_t kv_head) {
    Work w = work_of(op, c, rows, kv_head);
    clear(w, rows.count, w.all_states, w.all_sums);
    for (int64_t part = oldest_of(w.h, rows) / PART; part * PART < rows.end; part++) {
        attend_part(op, c, rows, w, part, w.states, w.sums);
        add_part(w, rows.count, w.states, w.sums);
    }
    put_attended(op, rows, w);
}

// One part; whoever comes last merges them. `task` counts blocks of rows and KV heads.
static inline void attend_share(const Op& op, const Context& c, int64_t task, int64_t part) {
    int64_t kv_heads = op.n[1];
    const Rows& rows = c.rows[task / kv_heads];
    Heads h = heads_of(op);
    int64_t size = partial_floats(h) * SHARED_ROWS, lines = rows.count * (h.num_heads / kv_heads);
    float* mine = c.partials + task * c.num_parts * size;
    int64_t first = oldest_of(h, rows) / PART;
    if (part >= first && part * PART < rows.end) {
        Work w = work_of(op, c, rows, task % kv_heads);
        float* sums = mine + part * size;
        attend_part(op, c, rows, w, part, sums + lines * h.padded, sums);
    }
    if (__atomic_add_fetch(&c.arrived[task], 1, __ATOMIC_ACQ_REL) < c.num_parts) return;
    __atomic_store_n(&c.arrived[task], 0, __ATOMIC_RELAXED);
    Work w = work_of(op, c, rows, task % kv_heads);
    clear(w, rows.count, w.all_states, w.all_sums);
    for (part = first; part * PART < rows.end; part++) {
        const float* sums = mine + part * size;
        add_part(w, rows.count, sums + lines * h.padded, sums);
    }
    put_attended(op, rows, w);
}

// What sharing histories takes: parts of the longest one, blocks of rows times KV heads, floats of results.
struct Sharing {
    int64_t num_parts, num_tasks, num_floats;
};

// Few blocks of few rows leave threads without work, or with the longest history alone: then its parts are shared.
static inline Sharing sharing_of(const Op* ops, int64_t num_ops, const Step& step, int64_t num_blocks,
                                 int64_t num_threads) {
    int64_t longest = 0, most_rows = 0, partial = 0, kv_heads = 0;
    for (int64_t s = 0; s < step.num_sequences; s++) {
        int64_t end = step.starts[s] + step.counts[s];
        longest = end > longest ? end : longest;
        most_rows = step.counts[s] > most_rows ? step.counts[s] : most_rows;
    }
    for (int64_t i = 0; i < num_ops; i++) {
        if (ops[i].kind != OP_ATTEND) continue;
        int64_t floats = partial_floats(heads_of(ops[i])) * SHARED_ROWS;
        partial = floats > partial ? floats : partial;
        kv_heads = ops[i].n[1] > kv_heads ? ops[i].n[1] : kv_heads;
    }
    int64_t tasks = num_blocks * kv_heads, num_parts = (longest + PART - 1) / PART;
    bool helps = num_threads > 1 && num_parts > 1 && most_rows <= SHARED_ROWS && tasks < 8 * num_threads;
    return helps ? Sharing{num_parts, tasks, tasks * num_parts * partial} : Sharing{0, 0, 0};
}
