// What is done to one row of activations: norm, gate, rotary embedding, and quantising to 8-bit codes.
#pragma once
#include "program.h"
#include "simd.h"

struct LargestTwo {
    f8 first, second;
};
static inline f8 more(f8 a, f8 b) { return a > b ? a : b; }
static inline f8 less(f8 a, f8 b) { return a > b ? b : a; }
static inline LargestTwo merge(LargestTwo a, LargestTwo b) {
    return {more(a.first, b.first), more(less(a.first, b.first), more(a.second, b.second))};
}
static inline LargestTwo turned(LargestTwo a, i8 lanes) {
    return {__builtin_shuffle(a.first, lanes), __builtin_shuffle(a.second, lanes)};
}

constexpr float MOST_8 = 127.0f, MOST_16 = 32000.0f;

// Whole numbers: any order of the sum gives the same.
static inline int32_t total(i8 v) {
#if defined(__AVX2__)
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
#else
    return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7]));
#endif
}

// Which of the lanes hold: a bit for each.
static inline uint32_t lanes_of(i8 holds) {
#if defined(__AVX2__)
    return (uint32_t)_mm256_movemask_ps((__m256)holds);
#else
    uint32_t lanes = 0;
    for (int k = 0; k < 8; k++) lanes |= holds[k] ? 1u << k : 0u;
    return lanes;
#endif
}

// The first place where a value has this size; the last one if none has, because it is no number.
static inline int32_t place_of_size(const f8* v, float size) {
    uint32_t places = 1u << (GROUP - 1);
    for (int k = 0; k < 4; k++) places |= lanes_of(absolute(v[k]) == all(size)) << 8 * k;
    return __builtin_ctz(places);
}

// 32 values as integers: round(x / scale). The scale is made for the second largest, which gets 8 bits; the largest
// gets 16. Infinity or NaN make the scale NaN, so that everything behind it is NaN too.
static inline void quantize_group(const float* x, Group& to) {
    f8 v[4], wrong = f8{};
    LargestTwo pairs[2];
    for (int k = 0; k < 4; k++) {
        v[k] = load(x + 8 * k);
        wrong = wrong + (v[k] - v[k]);  // 0, or NaN for infinity and NaN
    }
    for (int k = 0; k < 2; k++) {
        f8 a = absolute(v[2 * k]), b = absolute(v[2 * k + 1]);
        pairs[k] = {more(a, b), less(a, b)};
    }
    LargestTwo most = merge(pairs[0], pairs[1]);
    most = merge(most, turned(most, i8{4, 5, 6, 7, 0, 1, 2, 3}));
    most = merge(most, turned(most, i8{2, 3, 0, 1, 6, 7, 4, 5}));
    most = merge(most, turned(most, i8{1, 0, 3, 2, 5, 4, 7, 6}));
    bool is_finite = lanes_of(wrong != wrong) == 0;
    float first = most.first[0], second = most.second[0];
    bool is_zero = !(first > 1e-30f);
    float scale = second / MOST_8 > first / MOST_16 ? second / MOST_8 : first / MOST_16;
    float inverse = is_zero || !is_finite ? 0.0f : 1.0f / scale;
    int32_t place = place_of_size(v, first);
    i8 code[4];
    for (int k = 0; k < 4; k++) {
        f8 scaled = is_finite ? v[k] * inverse : f8{};
        code[k] = to_int((scaled + 12582912.0f) - 12582912.0f);
    }
    int32_t first_sum = total(code[0] + code[1]), all_codes = first_sum + total(code[2] + code[3]);
    to.outlier = ((is_finite ? x[place] * inverse : 0.0f) + 12582912.0f) - 12582912.0f;
    to.place = place;
    to.small_mask = place & 16 ? 240 : 15;
    to.small_outlier = place & 16 ? to.outlier * 0.0625f : to.outlier;
#if defined(__AVX2__)
    __m256i low = _mm256_packs_epi32((__m256i)code[0], (__m256i)code[1]);
    __m256i high = _mm256_packs_epi32((__m256i)code[2], (__m256i)code[3]);
    __m256i bytes = _mm256_packs_epi16(low, high);
    bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i*)to.codes, bytes);
#else
    for (int k = 0; k < GROUP; k++) to.codes[k] = (int8_t)code[k / 8][k % 8];
#endif
    to.codes[place] = 0;
    to.scale = !is_finite ? __builtin_nanf("") : is_zero ? 0.0f : scale;
    to.sum = (float)all_codes;
    to.first_sum = (float)first_sum;
    to.scaled_sum = to.scale * to.sum;
}

static inline void quantize_range(const float* x, int64_t first, int64_t width, int64_t row, int64_t row_width,
                                  const Quantized& to) {
    Group* groups = to.groups + (row * row_width + first) / GROUP;
    for (int64_t i = 0; i < width; i += GROUP) quantize_group(x + i, groups[i / GROUP]);
}

static inline void quantize_row(const float* x, int64_t row, int64_t width, const Quantized& to) {
    quantize_range(x, 0, width, row, width, to);
}

static inline void norm_row(const float* x, const float* weight, int64_t width, float eps, float* out) {
    f8 squares = f8{};
    int64_t i = 0;
    for (; i + 8 <= width; i += 8) squares = fma8(load(x + i), load(x + i), squares);
    float total = sum(squares);
    for (; i < width; i++) total += x[i] * x[i];
    float scale = 1.0f / __builtin_sqrtf(total / (float)width + eps);
    for (i = 0; i + 8 <= width; i += 8) store(out + i, load(x + i) * scale * load(weight + i));
    for (; i < width; i++) out[i] = x[i] * scale * weight[i];
}

static inline void add_row(const float* x, int64_t width, float* out) {
    int64_t i = 0;
    for (; i + 8 <= width; i += 8) store(out + i, load(out + i) + load(x + i));
    for (; i < width; i++) out[i] += x[i];
}

static inline f8 silu8(f8 gate) { return gate / (exp8(-gate) + 1.0f); }

static inline void gate_row(const float* gate, const float* up, int64_t width, float* out) {
    int64_t i = 0;
    for (; i + 8 <= width; i += 8) store(out + i, silu8(load(gate + i)) * load(up + i));
    if (i == width) return;
    float tail[16] = {};
    for (int64_t k = i; k < width; k++) {
        tail[k - i] = gate[k];
        tail[8 + k - i] = up[k];
    }
    f8 last = silu8(load(tail)) * load(tail + 8);
    for (int64_t k = i; k < width; k++) out[k] = last[k - i];
}

// Pairs (2i, 2i+1) turned by (cos, sin), in place. Each product and sum is rounded: spelt out, because GCC 12
// makes fused operations of the plain loop even with -ffp-contract=off.
static inline void turn_head(float* x, const float* turn, int64_t size) {
    int64_t i = 0;
#if defined(__AVX2__)
    for (; i + 8 <= size; i += 8) {
        __m256 pairs = _mm256_loadu_ps(x + i), both = _mm256_loadu_ps(turn + i);
        __m256 swapped = _mm256_permute_ps(pairs, 0xb1);
        __m256 straight = _mm256_mul_ps(pairs, _mm256_moveldup_ps(both));
        _mm256_storeu_ps(x + i, _mm256_addsub_ps(straight, _mm256_mul_ps(swapped, _mm256_movehdup_ps(both))));
    }
#endif
    for (; i + 1 < size; i += 2) {
        float even = x[i], odd = x[i + 1], cosine = turn[i], sine = turn[i + 1];
        volatile float crossed = odd * sine, other = even * sine;
        x[i] = even * cosine - crossed;
        x[i + 1] = other + odd * cosine;
    }
}
