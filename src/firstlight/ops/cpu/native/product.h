// Products of packed weights with rows of activations: T tiles of 8 outputs against R rows at once.
//
// Q formats: the dot product of a group, its outlier included, is an integer below 2^24, so floats hold it exactly and
// only the scaled sum over the groups rounds, in the order of the groups. So neither R nor T nor the instruction set
// of the integers changes a bit. Used by `linear.h`.
#pragma once
#include "dots.h"
#include "formats.h"
#include "program.h"
#include "simd.h"
#include "wide.h"

#if defined(FL_VNNI)
constexpr int MAX_ROWS = 8, MAX_TILES = 2;
#elif defined(__AVX2__)
constexpr int MAX_ROWS = 4, MAX_TILES = 2;
#else
constexpr int MAX_ROWS = 1, MAX_TILES = 1;  // nothing is shared
#endif
constexpr int LONE_ROW_TILES = 2 * MAX_TILES;  // a lone row leaves room for more tiles, which share its activations

// A row's sums over a tile's outputs go on by a group.
template <int32_t FORMAT>
static inline f8 add_group(const uint8_t* p, const Scales& scales, const Group& a, i8 dot_of_codes, f8 sums) {
    i8 column = FORMAT == Q8_0 ? wide_column(p, a) : small_column(p, a);
    f8 dot = fma8(to_float(column), all(FORMAT == Q8_0 ? a.outlier : a.small_outlier), to_float(dot_of_codes));
    if constexpr (raised_by<FORMAT>() != 0.0f) dot = fma8(all(-raised_by<FORMAT>()), all(a.sum), dot);
    sums = fma8(dot, scales.first * a.scale, sums);
    if constexpr (has_minimum(FORMAT)) sums = fma8(scales.minimum, all(a.scaled_sum), sums);
    return sums;
}

static inline f8 add_group_of_six(const uint8_t* p, const Scales& scales, const Group& a, i8 dot_of_first,
                                  i8 dot_of_last, f8 sums) {
    f8 column = to_float(six_column(p, a));
    float in_first = a.place < 16 ? a.outlier : 0.0f, in_last = a.outlier - in_first;
    f8 first = fma8(column, all(in_first), to_float(dot_of_first));
    f8 last = fma8(column, all(in_last), to_float(dot_of_last));
    first = fma8(all(-32.0f), all(a.first_sum), first);
    last = fma8(all(-32.0f), all(a.sum - a.first_sum), last);
    sums = fma8(first, scales.first * a.scale, sums);
    return fma8(last, scales.last * a.scale, sums);
}

template <int32_t FORMAT, int R, int T>
static inline void dot_group(const uint8_t* const* p, const Group* const* rows, i8 (*dots)[2][T]) {
    if constexpr (FORMAT == Q6_K)
        dot_six<R, T>(p, rows, dots);
    else if constexpr (FORMAT == Q8_0)
        dot_wide<R, T>(p, rows, dots);
    else
        dot_small<R, T>(p, rows, dots);
}

// `tile_stride` bytes apart lie the tiles, `num_groups` apart the rows.
template <int32_t FORMAT, int R, int T>
static inline void multiply_codes(const uint8_t* tile, int64_t tile_stride, int64_t num_groups, const Group* activations,
                                  f8 (*out)[T]) {
#if defined(FL_VNNI)
    if constexpr (T == 2 && FORMAT != Q6_K)
        return multiply_pair<FORMAT, R>(tile, tile_stride, num_groups, activations, out);
#endif
    f8 sums[R][T];
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++) sums[r][t] = f8{};
    for (int64_t g = 0; g < num_groups; g++) {
        const uint8_t* p[T];
        const Group* rows[R];
        i8 dots[R][2][T];  // the second of formats whose halves have scales of their own
        for (int t = 0; t < T; t++) p[t] = tile + t * tile_stride + group_at(FORMAT, g);
        for (int t = 0; t < T; t++) fetch_ahead(p[t], group_bytes(FORMAT));
        for (int r = 0; r < R; r++) rows[r] = activations + r * num_groups + g;
        dot_group<FORMAT, R, T>(p, rows, dots);
        for (int t = 0; t < T; t++) {
            Scales scales = scales_of(FORMAT, p[t], tile + t * tile_stride + head_at(FORMAT, g));
            for (int r = 0; r < R; r++) {
                f8& sum = sums[r][t];
                if constexpr (FORMAT == Q6_K)
                    sum = add_group_of_six(p[t], scales, *rows[r], dots[r][0][t], dots[r][1][t], sum);
                else
                    sum = add_group<FORMAT>(p[t], scales, *rows[r], dots[r][0][t], sum);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++) out[r][t] = sums[r][t];
}

template <int32_t FORMAT>
static inline f8 load_weights(const uint8_t* tile, int64_t input) {
    if constexpr (FORMAT == F32) return load((const float*)tile + input * TILE);
    if constexpr (FORMAT == F16) return load_half(tile + input * TILE * 2);
    return load_bfloat(tile + input * TILE * 2);
}

// Plain weights and float activations: four chains of sums, joined at the end in one order.
template <int32_t FORMAT, int R>
static inline void multiply_plain(const uint8_t* tile, int64_t num_inputs, const float* x, f8 (*out)[1]) {
    f8 sums[R][4];
    for (int r = 0; r < R; r++)
        for (int k = 0; k < 4; k++) sums[r][k] = f8{};
    int64_t i = 0;
    for (; i + 4 <= num_inputs; i += 4)
        for (int k = 0; k < 4; k++) {
            f8 weights = load_weights<FORMAT>(tile, i + k);
            for (int r = 0; r < R; r++) sums[r][k] = fma8(weights, all(x[r * num_inputs + i + k]), sums[r][k]);
        }
    for (; i < num_inputs; i++) {
        f8 weights = load_weights<FORMAT>(tile, i);
        for (int r = 0; r < R; r++) sums[r][i & 3] = fma8(weights, all(x[r * num_inputs + i]), sums[r][i & 3]);
    }
    for (int r = 0; r < R; r++) out[r][0] = (sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3]);
}

// Small floats in groups with scales, and float activations: a group's two chains of sums are joined and scaled.
template <int32_t FORMAT, int R>
static inline void multiply_scaled(const uint8_t* tile, int64_t num_inputs, const float* x, f8 (*out)[1]) {
    constexpr int64_t SIZE = scaled_inputs(FORMAT);
    f8 sums[R];
    for (int r = 0; r < R; r++) sums[r] = f8{};
    for (int64_t at = 0; at < num_inputs; at += SIZE, tile += scaled_bytes(FORMAT)) {
        f8 parts[R][2];
        for (int r = 0; r < R; r++) parts[r][0] = parts[r][1] = f8{};
        for (int64_t i = 0; i < SIZE; i += 2) {
            f8 weights[2];
            two_inputs<FORMAT>(tile, i, weights);
            for (int r = 0; r < R; r++)
                for (int k = 0; k < 2; k++)
                    parts[r][k] = fma8(weights[k], all(x[r * num_inputs + at + i + k]), parts[r][k]);
        }
        f8 scale = load((const float*)(tile + scales_at(FORMAT))) * scaled_unit(FORMAT);
        for (int r = 0; r < R; r++) sums[r] = fma8(parts[r][0] + parts[r][1], scale, sums[r]);
    }
    for (int r = 0; r < R; r++) out[r][0] = sums[r];
}
