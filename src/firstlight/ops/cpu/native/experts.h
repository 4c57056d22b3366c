// Which experts a row goes to, rows in the order of their experts, and the weighed sum of what comes back.
//
// Used by `kernels.cpp`; `ops/expert_layer.py` says what is chosen. Invariant: a row's experts, weights and sum depend on
// its own scores and rows alone.
#pragma once
#include "choose.h"
#include "program.h"
#include "simd.h"

static inline int64_t whole_vectors(int64_t num) { return (num + 7) / 8 * 8; }

static inline size_t routing_scratch_bytes(int64_t num) { return (size_t)whole_vectors(num) * 6 * sizeof(uint64_t); }

// The sum of a group's best scores, the largest first.
static inline float sum_of_best(const float* x, int64_t size, int64_t num, uint64_t* heap) {
    int64_t* places = (int64_t*)(heap + num);
    float *best = (float*)(places + num), total = 0.0f;
    top_of_row(x, size, 1.0f, num, heap, places, best);
    for (int64_t i = 0; i < num; i++) total = i ? total + best[i] : best[0];
    return total;
}

// Experts of the groups that are not among the best ones are out of reach.
static inline void keep_best_groups(const Op& op, float* wishes, uint64_t* heap, float* judged) {
    int64_t groups = op.n[3], size = op.n[0] / groups, num = op.n[4];
    int64_t* places = (int64_t*)(heap + num);
    float* values = (float*)(places + num);
    for (int64_t g = 0; g < groups; g++) judged[g] = sum_of_best(wishes + g * size, size, op.n[5], heap);
    top_of_row(judged, groups, 1.0f, num, heap, places, values);
    for (int64_t g = 0; g < groups; g++) {
        bool is_kept = false;
        for (int64_t i = 0; i < num; i++) is_kept |= places[i] == g;
        for (int64_t e = g * size; !is_kept && e < (g + 1) * size; e++) wishes[e] = -__builtin_inff();
    }
}

static inline void weigh_scores(const float* scores, int64_t num, bool is_sigmoid, float* weights) {
    int64_t padded = whole_vectors(num);
    for (int64_t i = 0; i < padded; i++) weights[i] = i < num ? scores[i] : 0.0f;
    if (is_sigmoid) {
        for (int64_t i = 0; i < padded; i += 8) store(weights + i, 1.0f / (exp8(-load(weights + i)) + 1.0f));
        return;
    }
    float most = weights[0], total = 0.0f;
    for (int64_t i = 1; i < num; i++) most = weights[i] > most ? weights[i] : most;
    for (int64_t i = 0; i < padded; i += 8) store(weights + i, exp8(load(weights + i) - most));
    for (int64_t i = 0; i < num; i++) total += weights[i];
    for (int64_t i = 0; i < padded; i += 8) store(weights + i, load(weights + i) / total);
}

// n: experts, chosen ones, whether by sigmoid, groups, chosen groups, scores of a group, whether weights add up to 1.
static inline void choose_experts(const Op& op, int64_t row, void* scratch) {
    int64_t num = op.n[0], chosen = op.n[1], padded = whole_vectors(num);
    uint64_t* heap = (uint64_t*)scratch;
    float *weights = (float*)(heap + 4 * padded), *wishes = weights + padded, *judged = wishes + padded;
    const float* bias = (const float*)op.p[1];
    weigh_scores((const float*)op.p[0] + row * num, num, op.n[2], weights);
    for (int64_t i = 0; i < num; i++) wishes[i] = bias ? weights[i] + bias[i] : weights[i];
    if (op.n[3] > 1) keep_best_groups(op, wishes, heap, judged);
    int64_t* places = (int64_t*)op.p[2] + row * chosen;
    float *out = (float*)op.p[3] + row * chosen, total = 0.0f;
    top_of_row(wishes, num, 1.0f, chosen, heap, places, out);
    for (int64_t i = 0; i < chosen; i++) {
        out[i] = weights[places[i]];
        total = i ? total + out[i] : out[0];
    }
    for (int64_t i = 0; i < chosen; i++) out[i] = (op.n[6] ? out[i] / (total + 1e-20f) : out[i]) * op.f[0];
}

// n: experts, chosen ones. Where the rows of each expert begin, which choice each of them is, and where each choice is.
static inline void sort_by_expert(const Op& op, int64_t num_rows) {
    int64_t num = op.n[0], total = num_rows * op.n[1];
    const int64_t* chosen = (const int64_t*)op.p[0];
    int64_t *starts = (int64_t*)op.p[1], *order = (int64_t*)op.p[2], *place = (int64_t*)op.p[3];
    memset(starts, 0, (size_t)(num + 1) * sizeof(int64_t));
    for (int64_t i = 0; i < total; i++) starts[chosen[i] + 1]++;
    for (int64_t e = 0; e < num; e++) starts[e + 1] += starts[e];
    for (int64_t i = 0; i < total; i++) {
        place[i] = starts[chosen[i]]++;
        order[place[i]] = i;
    }
    for (int64_t e = num; e > 0; e--) starts[e] = starts[e - 1];
    starts[0] = 0;
}

// n: width, chosen ones, and the first expert of this rank and the one behind its last. What a row's experts gave, weighed
// and added up in the order of its choice; experts of other ranks give nothing.
static inline void combine_experts(const Op& op, int64_t row) {
    int64_t width = op.n[0], chosen = op.n[1];
    const int64_t* place = (const int64_t*)op.p[1] + row * chosen;
    const float* weights = (const float*)op.p[2] + row * chosen;
    const int64_t* starts = (const int64_t*)op.p[4];
    float* out = (float*)op.p[3] + row * width;
    for (int64_t k = 0; k < chosen; k++) {
        if (place[k] < starts[op.n[2]] || place[k] >= starts[op.n[3]]) {
            if (k == 0) memset(out, 0, (size_t)width * sizeof(float));
            continue;
        }
        const float* x = (const float*)op.p[0] + place[k] * width;
        int64_t i = 0;
        for (; i + 8 <= width; i += 8) {
            f8 part = load(x + i) * weights[k];
            store(out + i, k ? load(out + i) + part : part);
        }
        for (; i < width; i++) out[i] = k ? out[i] + x[i] * weights[k] : x[i] * weights[k];
    }
}
