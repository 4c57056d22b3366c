// How packed weights lie in memory, and the values of one output: for the embedding, and as the layout's definition.
//
// Weights lie in tiles of 8 outputs. Plain formats: for each input the 8 values. Coded formats: a tile's groups of 32
// inputs one after the other, each with its codes and 8 scales. Codes come in quads: for each output those of 4
// neighbouring inputs. 4 bits: inputs i and i + 16 share a byte. Nested formats: 8 groups make a block, which begins
// with the 8 scales (and 8 scales of the minima) that its groups' whole numbers are multiplied with; Q6 has a scale for
// each 16 inputs, and its two upper bits lie in quads of their own, four inputs 4 apart to a byte. Scaled formats: small
// floats as in a plain format, in groups that end with a float32 scale for each output; of 4 bits, two inputs share a
// byte.
#pragma once
#include "program.h"
#include "simd.h"

constexpr bool is_nested(int32_t format) { return format == Q4_K || format == Q6_K; }
constexpr bool is_coded(int32_t format) { return format <= Q8_0 || is_nested(format) || format == INT4_ZERO; }
constexpr bool is_scaled(int32_t format) { return format == FP8 || format == FP4; }
constexpr bool has_minimum(int32_t format) { return format == Q4_1 || format == Q4_K || format == INT4_ZERO; }

constexpr int64_t scaled_inputs(int32_t format) { return format == FP8 ? 32 : 16; }
constexpr int64_t scales_at(int32_t format) { return scaled_inputs(format) * (format == FP8 ? TILE : TILE / 2); }
constexpr int64_t scaled_bytes(int32_t format) { return scales_at(format) + 4 * TILE; }

constexpr int64_t code_bytes(int32_t format) { return format == Q8_0 ? 256 : format == Q6_K ? 192 : 128; }

constexpr int64_t group_bytes(int32_t format) {
    return code_bytes(format) + (format == Q4_1 || format == INT4_ZERO ? 32 : 16);
}

constexpr int64_t GROUPS_OF_BLOCK = 8;
constexpr int64_t head_bytes(int32_t format) { return format == Q4_K ? 32 : format == Q6_K ? 16 : 0; }
constexpr int64_t block_bytes(int32_t format) { return head_bytes(format) + GROUPS_OF_BLOCK * group_bytes(format); }

static inline int64_t group_at(int32_t format, int64_t group) {
    return group * group_bytes(format) + (group / GROUPS_OF_BLOCK + 1) * head_bytes(format);
}
static inline int64_t head_at(int32_t format, int64_t group) { return group / GROUPS_OF_BLOCK * block_bytes(format); }

static inline int64_t tile_bytes_of(int32_t format, int64_t num_inputs) {
    if (is_nested(format)) return num_inputs / (GROUP * GROUPS_OF_BLOCK) * block_bytes(format);
    if (is_coded(format)) return num_inputs / GROUP * group_bytes(format);
    if (is_scaled(format)) return num_inputs / scaled_inputs(format) * scaled_bytes(format);
    return num_inputs * TILE * (format == F32 ? 4 : 2);
}

// What is multiplied with the codes of a group's first and last 16 inputs, and what is added to each product.
struct Scales {
    f8 first, last, minimum;
};

static inline Scales scales_of(int32_t format, const uint8_t* group, const uint8_t* head) {
    const uint8_t* behind = group + code_bytes(format);
    if (!is_nested(format)) {
        f8 scale = load_half(behind);
        if (format == INT4_ZERO) return {scale, scale, -(scale * load_half(behind + 16))};
        return {scale, scale, format == Q4_1 ? load_half(behind + 16) : f8{}};
    }
    f8 scale = load_half(head);
    if (format == Q6_K) return {scale * signed_bytes(behind), scale * signed_bytes(behind + 8), f8{}};
    f8 both = scale * unsigned_bytes(behind);
    return {both, both, -(load_half(head + 16) * unsigned_bytes(behind + 8))};
}

static inline float plain_value(int32_t format, const uint8_t* weights, int64_t at) {
    if (format == F32) return ((const float*)weights)[at];
    uint16_t half = ((const uint16_t*)weights)[at];
    if (format == F16) return half_to_float(half);
    uint32_t word = (uint32_t)half << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

static inline int code_of(int32_t format, const uint8_t* group, int64_t i, int64_t lane) {
    int64_t within = 4 * lane + i % 4, quad = i % 16 / 4;
    if (format == Q8_0) return (int8_t)group[32 * (i / 4) + within];
    int byte = group[32 * quad + within], code = i < 16 ? byte & 15 : byte >> 4;
    if (format == Q6_K) code += (group[128 + 32 * (i / 16) + within] >> (2 * quad) & 3) * 16 - 32;
    return format == Q4_0 ? code - 8 : code;
}

// The small floats of two neighbouring inputs of a group, 1 / `scaled_unit` of what they stand for.
constexpr float scaled_unit(int32_t format) { return format == FP8 ? FLOAT8_UNIT : 1.0f; }
template <int32_t FORMAT>
static inline void two_inputs(const uint8_t* group, int64_t input, f8* weights) {
    if constexpr (FORMAT == FP8) {
        weights[0] = load_float8(group + input * TILE);
        weights[1] = load_float8(group + (input + 1) * TILE);
    } else {
        load_float4(group + input / 2 * TILE, weights);
    }
}

template <int32_t FORMAT>
static inline void scaled_values(const uint8_t* tile, int64_t num_inputs, int64_t lane, float* out) {
    constexpr int64_t SIZE = scaled_inputs(FORMAT);
    for (int64_t at = 0; at < num_inputs; at += SIZE, tile += scaled_bytes(FORMAT)) {
        float scale = load((const float*)(tile + scales_at(FORMAT)))[lane] * scaled_unit(FORMAT);
        for (int64_t i = 0; i < SIZE; i += 2) {
            f8 weights[2];
            two_inputs<FORMAT>(tile, i, weights);
            out[at + i] = weights[0][lane] * scale;
            out[at + i + 1] = weights[1][lane] * scale;
        }
    }
}

// One tile of a coded format out of a file's rows, whose groups begin with their scales. Sizes: of a row and of a group
// in the file, and of a group's scales. Both keep codes and scales in one order; only outputs come to lie side by side.
static inline void pack_tile(const uint8_t* from, int64_t outputs, int64_t row_bytes, int64_t group_bytes,
                             int64_t scale_bytes, uint8_t* to) {
    int64_t codes = group_bytes - scale_bytes;
    for (int64_t at = 0; at < row_bytes; at += group_bytes, to += TILE * group_bytes)
        for (int64_t lane = 0; lane < outputs; lane++) {
            const uint8_t* group = from + lane * row_bytes + at;
            for (int64_t i = 0; i < codes; i += 4) memcpy(to + TILE * i + 4 * lane, group + scale_bytes + i, 4);
            for (int64_t i = 0; i < scale_bytes; i += 2) memcpy(to + TILE * (codes + i) + 2 * lane, group + i, 2);
        }
}

// The weights of one output.
static inline void output_values(int32_t format, const uint8_t* weights, int64_t num_inputs, int64_t output, float* out) {
    const uint8_t* tile = weights + output / TILE * tile_bytes_of(format, num_inputs);
    int64_t lane = output % TILE;
    if (format == FP8) return scaled_values<FP8>(tile, num_inputs, lane, out);
    if (format == FP4) return scaled_values<FP4>(tile, num_inputs, lane, out);
    if (!is_coded(format)) {
        for (int64_t i = 0; i < num_inputs; i++) out[i] = plain_value(format, tile, i * TILE + lane);
        return;
    }
    for (int64_t g = 0; g < num_inputs / GROUP; g++) {
        const uint8_t* group = tile + group_at(format, g);
        Scales scales = scales_of(format, group, tile + head_at(format, g));
        float first = scales.first[lane], last = scales.last[lane], minimum = scales.minimum[lane];
        for (int64_t i = 0; i < GROUP; i++) {
            float value = (float)code_of(format, group, i, lane) * (i < 16 ? first : last);
            out[g * GROUP + i] = has_minimum(format) ? value + minimum : value;
        }
    }
}
