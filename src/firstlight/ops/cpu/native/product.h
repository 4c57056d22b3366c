// Products of packed weights with rows of activations: one tile of 8 outputs against 1 to `MAX_ROWS` rows.
//
// Q formats: the dot product of a group, with its outlier, is an exact integer, so only one fused multiply-add a group rounds (and
// one for the minimum), in the order of the groups. Used by `kernels.cpp`.
#pragma once
#include "program.h"
#include "simd.h"

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
constexpr int MAX_ROWS = 8;
#else
constexpr int MAX_ROWS = 4;
#endif

constexpr int64_t group_bytes(int32_t format) {
    return format == Q4_MIN ? 160 : format == Q4 ? 144 : format == Q8 ? 272 : 0;
}

// Activations of some rows, each from the first group on.
struct RowsOfCodes {
    const int8_t* codes[MAX_ROWS];
    const float* scales[MAX_ROWS];
    const float* scaled_sums[MAX_ROWS];
    const int32_t* sums[MAX_ROWS];
    const Outlier* outliers[MAX_ROWS];
};

#if defined(__AVX2__)
static inline __m256i four_codes(const int8_t* p) {
    int32_t word;
    memcpy(&word, p, 4);
    return _mm256_set1_epi32(word);
}

// Sums of products of unsigned codes up to 15 with signed ones, and what turns a group's sums into integers.
static inline __m256i add_small(__m256i sums, __m256i codes, __m256i activations) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return _mm256_dpbusd_epi32(sums, codes, activations);
#else
    return _mm256_add_epi16(sums, _mm256_maddubs_epi16(codes, activations));
#endif
}
static inline i8 finish_small(__m256i sums) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return (i8)sums;
#else
    return (i8)_mm256_madd_epi16(sums, _mm256_set1_epi16(1));
#endif
}

template <int R>
static inline void dot_small(const uint8_t* p, const RowsOfCodes& rows, int64_t input, i8* dots) {
    const __m256i low_mask = _mm256_set1_epi8(15);
    __m256i sums[R];
    for (int r = 0; r < R; r++) sums[r] = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int quad = 0; quad < 4; quad++) {
        __m256i packed = _mm256_loadu_si256((const __m256i*)(p + 32 * quad));
        __m256i low = _mm256_and_si256(packed, low_mask);
        __m256i high = _mm256_and_si256(_mm256_srli_epi16(packed, 4), low_mask);
        for (int r = 0; r < R; r++) {
            const int8_t* a = rows.codes[r] + input + 4 * quad;
            sums[r] = add_small(sums[r], low, four_codes(a));
            sums[r] = add_small(sums[r], high, four_codes(a + 16));
        }
    }
    for (int r = 0; r < R; r++) {
        Outlier outlier = rows.outliers[r][input / GROUP];
        int within = outlier.place & 15, shift = 8 * (within & 3) + (outlier.place >> 4) * 4;
        __m256i column = _mm256_loadu_si256((const __m256i*)(p + 32 * (within >> 2)));
        column = _mm256_and_si256(_mm256_srl_epi32(column, _mm_cvtsi32_si128(shift)), _mm256_set1_epi32(15));
        __m256i extra = _mm256_madd_epi16(column, _mm256_set1_epi32(outlier.code));
        dots[r] = finish_small(sums[r]) + (i8)extra;
    }
}

template <int R>
static inline void dot_wide(const uint8_t* p, const RowsOfCodes& rows, int64_t input, i8* dots) {
    __m256i sums[R];
    for (int r = 0; r < R; r++) sums[r] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int quad = 0; quad < 8; quad++) {
        __m256i weights = _mm256_loadu_si256((const __m256i*)(p + 32 * quad));
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
        __m256i raised = _mm256_xor_si256(weights, _mm256_set1_epi8((char)0x80));
        for (int r = 0; r < R; r++)
            sums[r] = _mm256_dpbusd_epi32(sums[r], raised, four_codes(rows.codes[r] + input + 4 * quad));
#else
        // |w| * (a with w's sign): at most 2 * 128 * 127, which 16 bits hold.
        __m256i size = _mm256_abs_epi8(weights);
        for (int r = 0; r < R; r++) {
            __m256i a = _mm256_sign_epi8(four_codes(rows.codes[r] + input + 4 * quad), weights);
            __m256i pairs = _mm256_maddubs_epi16(size, a);
            sums[r] = _mm256_add_epi32(sums[r], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        }
#endif
    }
    for (int r = 0; r < R; r++) {
        Outlier outlier = rows.outliers[r][input / GROUP];
        __m256i column = _mm256_loadu_si256((const __m256i*)(p + 32 * (outlier.place >> 2)));
        column = _mm256_sll_epi32(column, _mm_cvtsi32_si128(24 - 8 * (outlier.place & 3)));
        column = _mm256_srai_epi32(column, 24);
        dots[r] = (i8)sums[r] + (i8)_mm256_madd_epi16(column, _mm256_set1_epi32(outlier.code));
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
        // The outlier's product is not raised by 128, but its code is in the sum.
        dots[r] -= 128 * (rows.sums[r][input / GROUP] - (int16_t)outlier.code);
#endif
    }
}
#else
template <int R>
static inline void dot_small(const uint8_t* p, const RowsOfCodes& rows, int64_t input, i8* dots) {
    for (int r = 0; r < R; r++) {
        const int8_t* a = rows.codes[r] + input;
        i8 sums = {};
        for (int quad = 0; quad < 4; quad++)
            for (int output = 0; output < TILE; output++)
                for (int k = 0; k < 4; k++) {
                    int byte = p[32 * quad + 4 * output + k];
                    sums[output] += (byte & 15) * a[4 * quad + k] + (byte >> 4) * a[16 + 4 * quad + k];
                }
        Outlier outlier = rows.outliers[r][input / GROUP];
        int within = outlier.place & 15;
        for (int output = 0; output < TILE; output++) {
            int byte = p[32 * (within >> 2) + 4 * output + (within & 3)];
            sums[output] += (outlier.place < 16 ? byte & 15 : byte >> 4) * (int16_t)outlier.code;
        }
        dots[r] = sums;
    }
}

template <int R>
static inline void dot_wide(const uint8_t* p, const RowsOfCodes& rows, int64_t input, i8* dots) {
    for (int r = 0; r < R; r++) {
        const int8_t* a = rows.codes[r] + input;
        i8 sums = {};
        for (int quad = 0; quad < 8; quad++)
            for (int output = 0; output < TILE; output++)
                for (int k = 0; k < 4; k++)
                    sums[output] += (int8_t)p[32 * quad + 4 * output + k] * a[4 * quad + k];
        Outlier outlier = rows.outliers[r][input / GROUP];
        for (int output = 0; output < TILE; output++)
            sums[output] += (int8_t)p[32 * (outlier.place >> 2) + 4 * output + (outlier.place & 3)] * (int16_t)outlier.code;
        dots[r] = sums;
    }
}
#endif

template <int32_t FORMAT, int R>
static inline void multiply_codes(const uint8_t* tile, int64_t num_groups, const RowsOfCodes& rows, f8* out) {
    constexpr int64_t num_code_bytes = FORMAT == Q8 ? 256 : 128;
    f8 sums[R];
    for (int r = 0; r < R; r++) sums[r] = f8{};
    for (int64_t g = 0; g < num_groups; g++, tile += group_bytes(FORMAT)) {
        i8 dots[R];
#if defined(__GNUC__)
        __builtin_prefetch(tile + 1024);
        __builtin_prefetch(tile + 1088);
        __builtin_prefetch(tile + 1152);
#endif
        if constexpr (FORMAT == Q8)
            dot_wide<R>(tile, rows, g * GROUP, dots);
        else
            dot_small<R>(tile, rows, g * GROUP, dots);
        f8 scale = load_half(tile + num_code_bytes);
        for (int r = 0; r < R; r++) {
            if constexpr (FORMAT == Q4) dots[r] -= 8 * rows.sums[r][g];
            sums[r] = fma8(to_float(dots[r]), scale * rows.scales[r][g], sums[r]);
        }
        if constexpr (FORMAT == Q4_MIN) {
            f8 minimum = load_half(tile + num_code_bytes + 16);
            for (int r = 0; r < R; r++) sums[r] = fma8(minimum, all(rows.scaled_sums[r][g]), sums[r]);
        }
    }
    for (int r = 0; r < R; r++) out[r] = sums[r];
}

template <int32_t FORMAT>
static inline f8 load_weights(const uint8_t* tile, int64_t input) {
    if constexpr (FORMAT == FLOAT32) return load((const float*)tile + input * TILE);
    if constexpr (FORMAT == FLOAT16) return load_half(tile + input * TILE * 2);
    return load_bfloat(tile + input * TILE * 2);
}

// Plain weights and float activations: four chains of sums, joined at the end in one order.
template <int32_t FORMAT, int R>
static inline void multiply_plain(const uint8_t* tile, int64_t num_inputs, const float* const* x, f8* out) {
    f8 sums[R][4];
    for (int r = 0; r < R; r++)
        for (int k = 0; k < 4; k++) sums[r][k] = f8{};
    int64_t i = 0;
    for (; i + 4 <= num_inputs; i += 4)
        for (int k = 0; k < 4; k++) {
            f8 weights = load_weights<FORMAT>(tile, i + k);
            for (int r = 0; r < R; r++) sums[r][k] = fma8(weights, all(x[r][i + k]), sums[r][k]);
        }
    for (; i < num_inputs; i++) {
        f8 weights = load_weights<FORMAT>(tile, i);
        for (int r = 0; r < R; r++) sums[r][i & 3] = fma8(weights, all(x[r][i]), sums[r][i & 3]);
    }
    for (int r = 0; r < R; r++) out[r] = (sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3]);
}
