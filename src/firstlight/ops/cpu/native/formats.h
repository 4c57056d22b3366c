// How packed weights lie in memory, and the values of one output: for the embedding, and as the layout's definition.
//
// Weights lie in tiles of 8 outputs, a tile's groups of 32 inputs one after the other. In a group the codes come in
// quads: for each output the codes of 4 neighbouring inputs.
#pragma once
#include "program.h"
#include "simd.h"

constexpr bool is_coded(int32_t format) { return format <= Q8; }

constexpr int64_t code_bytes(int32_t format) { return format == Q8 ? 256 : 128; }

constexpr int64_t group_bytes(int32_t format) {
    return format == Q4_MIN ? 160 : format == Q4 ? 144 : format == Q8 ? 272 : 0;
}

static inline int64_t tile_bytes_of(int32_t format, int64_t num_inputs) {
    if (is_coded(format)) return num_inputs / GROUP * group_bytes(format);
    return num_inputs * TILE * (format == FLOAT32 ? 4 : 2);
}

static inline float plain_value(int32_t format, const uint8_t* weights, int64_t at) {
    if (format == FLOAT32) return ((const float*)weights)[at];
    uint16_t half = ((const uint16_t*)weights)[at];
    if (format == FLOAT16) return half_to_float(half);
    uint32_t word = (uint32_t)half << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

static inline float coded_value(int32_t format, const uint8_t* p, int64_t i, int64_t lane, float scale, float minimum) {
    if (format == Q8) return (float)(int8_t)p[32 * (i / 4) + 4 * lane + i % 4] * scale;
    int byte = p[32 * (i % 16 / 4) + 4 * lane + i % 4], code = i < 16 ? byte & 15 : byte >> 4;
    return format == Q4 ? (float)(code - 8) * scale : (float)code * scale + minimum;
}

// The weights of one output.
static inline void output_values(int32_t format, const uint8_t* weights, int64_t num_inputs, int64_t output, float* out) {
    const uint8_t* tile = weights + output / TILE * tile_bytes_of(format, num_inputs);
    int64_t lane = output % TILE;
    if (!is_coded(format)) {
        for (int64_t i = 0; i < num_inputs; i++) out[i] = plain_value(format, tile, i * TILE + lane);
        return;
    }
    for (int64_t g = 0; g < num_inputs / GROUP; g++) {
        const uint8_t* p = tile + g * group_bytes(format);
        float scale = load_half(p + code_bytes(format))[lane];
        float minimum = format == Q4_MIN ? load_half(p + code_bytes(format) + 16)[lane] : 0.0f;
        for (int64_t i = 0; i < GROUP; i++) out[g * GROUP + i] = coded_value(format, p, i, lane, scale, minimum);
    }
}
