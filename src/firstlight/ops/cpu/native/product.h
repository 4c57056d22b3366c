// Products of packed weights with rows of activations: T tiles of 8 outputs against R rows at once.
//
// Q formats: the dot product of a group, its outlier included, is an integer below 2^24, so floats hold it exactly and
// only the scaled sum over the groups rounds, in the order of the groups. So neither R nor T nor the instruction set
// of the integers changes a bit. Used by `linear.h`.
#pragma once
#include "formats.h"
#include "program.h"
#include "simd.h"

#if defined(FL_VNNI)
constexpr int MAX_ROWS = 8;
#else
constexpr int MAX_ROWS = 4;
#endif

#if defined(__AVX2__)
static inline __m256i four_codes(const int8_t* p) {
    int32_t word;
    memcpy(&word, p, 4);
    return _mm256_set1_epi32(word);
}

static inline __m256i count_of(const int32_t& bits) { return _mm256_castsi128_si256(_mm_cvtsi32_si128(bits)); }
static inline __m256i right_by(__m256i v, const int32_t& bits) {
    return _mm256_srl_epi32(v, _mm256_castsi256_si128(count_of(bits)));
}
static inline __m256i left_by(__m256i v, const int32_t& bits) {
    return _mm256_sll_epi32(v, _mm256_castsi256_si128(count_of(bits)));
}
static inline __m256i quad_at(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }

// Keeps the compiler from another order of integer sums, for which the registers do not suffice.
static inline void hold(__m256i& v) { __asm__("" : "+x"(v)); }

// Sums of products of unsigned codes up to 15 with signed ones, and what turns a group's sums into integers.
static inline __m256i add_small(__m256i sums, __m256i codes, __m256i activations) {
#if defined(FL_VNNI)
    return dpbusd(sums, codes, activations);
#else
    return _mm256_add_epi16(sums, _mm256_maddubs_epi16(codes, activations));
#endif
}
static inline i8 finish_small(__m256i sums) {
#if defined(FL_VNNI)
    return (i8)sums;
#else
    return (i8)_mm256_madd_epi16(sums, _mm256_set1_epi16(1));
#endif
}

template <int R, int T>
static inline void add_quad(const __m256i* codes, const Group* const* rows, int input, __m256i (*sums)[T]) {
    #pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        __m256i activations = four_codes(rows[r]->codes + input);
        #pragma GCC unroll 8
        for (int t = 0; t < T; t++) {
            sums[r][t] = add_small(sums[r][t], codes[t], activations);
            hold(sums[r][t]);
        }
    }
}

template <int R, int T>
static inline void dot_small(const uint8_t* const* p, const Group* const* rows, i8 (*dots)[T]) {
    const __m256i low_mask = _mm256_set1_epi8(15);
    __m256i sums[R][T];
    #pragma GCC unroll 8
    for (int r = 0; r < R; r++)
        #pragma GCC unroll 8
        for (int t = 0; t < T; t++) sums[r][t] = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int quad = 0; quad < 4; quad++) {
        __m256i codes[T];
        #pragma GCC unroll 8
        for (int t = 0; t < T; t++) codes[t] = _mm256_and_si256(quad_at(p[t] + 32 * quad), low_mask);
        add_quad<R, T>(codes, rows, 4 * quad, sums);
        #pragma GCC unroll 8
        for (int t = 0; t < T; t++)
            codes[t] = _mm256_and_si256(_mm256_srli_epi16(quad_at(p[t] + 32 * quad), 4), low_mask);
        add_quad<R, T>(codes, rows, 16 + 4 * quad, sums);
    }
    #pragma GCC unroll 8
    for (int r = 0; r < R; r++)
        #pragma GCC unroll 8
        for (int t = 0; t < T; t++) dots[r][t] = finish_small(sums[r][t]);
}

template <int R, int T>
static inline void dot_wide(const uint8_t* const* p, const Group* const* rows, i8 (*dots)[T]) {
    __m256i sums[R][T];
    #pragma GCC unroll 8
    for (int r = 0; r < R; r++)
        #pragma GCC unroll 8
        for (int t = 0; t < T; t++) sums[r][t] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int quad = 0; quad < 8; quad++) {
        #pragma GCC unroll 8
        for (int t = 0; t < T; t++) {
            __m256i weights = quad_at(p[t] + 32 * quad);
#if defined(FL_VNNI)
            __m256i raised = _mm256_xor_si256(weights, _mm256_set1_epi8((char)0x80));
            #pragma GCC unroll 8
            for (int r = 0; r < R; r++) sums[r][t] = dpbusd(sums[r][t], raised, four_codes(rows[r]->codes + 4 * quad));
#else
            // |w| * (a with w's sign): at most 2 * 128 * 127, which 16 bits hold.
            __m256i size = _mm256_abs_epi8(weights);
            #pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                __m256i a = _mm256_sign_epi8(four_codes(rows[r]->codes + 4 * quad), weights);
                __m256i pairs = _mm256_maddubs_epi16(size, a);
                sums[r][t] = _mm256_add_epi32(sums[r][t], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
            }
#endif
        }
    }
    #pragma GCC unroll 8
    for (int r = 0; r < R; r++)
        #pragma GCC unroll 8
        for (int t = 0; t < T; t++) dots[r][t] = (i8)sums[r][t];
}

static inline i8 small_column(const uint8_t* p, const Group& a) {
    __m256i column = right_by(quad_at(p + ((a.place & 12) << 3)), a.right);
    return (i8)_mm256_and_si256(column, _mm256_set1_epi32(15));
}
static inline i8 wide_column(const uint8_t* p, const Group& a) {
    __m256i column = quad_at(p + ((a.place & 28) << 3));
#if defined(FL_VNNI)
    column = left_by(_mm256_xor_si256(column, _mm256_set1_epi8((char)0x80)), a.left);
    return (i8)_mm256_srli_epi32(column, 24);
#else
    return (i8)_mm256_srai_epi32(left_by(column, a.left), 24);
#endif
}
#else
template <int R, int T>
static inline void dot_small(const uint8_t* const* p, const Group* const* rows, i8 (*dots)[T]) {
    #pragma GCC unroll 8
    for (int r = 0; r < R; r++)
        #pragma GCC unroll 8
        for (int t = 0; t < T; t++) {
            const int8_t* a = rows[r]->codes;
            i8 sums = {};
            for (int quad = 0; quad < 4; quad++)
                for (int output = 0; output < TILE; output++)
                    for (int k = 0; k < 4; k++) {
                        int byte = p[t][32 * quad + 4 * output + k];
                        sums[output] += (byte & 15) * a[4 * quad + k] + (byte >> 4) * a[16 + 4 * quad + k];
                    }
            dots[r][t] = sums;
        }
}

template <int R, int T>
static inline void dot_wide(const uint8_t* const* p, const Group* const* rows, i8 (*dots)[T]) {
    #pragma GCC unroll 8
    for (int r = 0; r < R; r++)
        #pragma GCC unroll 8
        for (int t = 0; t < T; t++) {
            const int8_t* a = rows[r]->codes;
            i8 sums = {};
            for (int quad = 0; quad < 8; quad++)
                for (int output = 0; output < TILE; output++)
                    for (int k = 0; k < 4; k++) sums[output] += (int8_t)p[t][32 * quad + 4 * output + k] * a[4 * quad + k];
            dots[r][t] = sums;
        }
}

static inline i8 small_column(const uint8_t* p, const Group& a) {
    i8 column;
    for (int output = 0; output < TILE; output++)
        column[output] = (p[((a.place & 12) << 3) + 4 * output + (a.place & 3)] >> (a.place & 16 ? 4 : 0)) & 15;
    return column;
}
static inline i8 wide_column(const uint8_t* p, const Group& a) {
    i8 column;
    for (int output = 0; output < TILE; output++)
        column[output] = (int8_t)p[((a.place & 28) << 3) + 4 * output + (a.place & 3)];
    return column;
}
#endif

// What a code was raised by, so that it is unsigned where the instructions want it so.
template <int32_t FORMAT>
constexpr float raised_by() {
#if defined(FL_VNNI)
    if (FORMAT == Q8) return 128.0f;
#endif
    return FORMAT == Q4 ? 8.0f : 0.0f;
}

template <int32_t FORMAT, int R, int T>
static inline void multiply_group(const uint8_t* const* p, const Group* const* rows, f8 (*sums)[T]) {
    i8 dots[R][T];
    if constexpr (FORMAT == Q8)
        dot_wide<R, T>(p, rows, dots);
    else
        dot_small<R, T>(p, rows, dots);
    #pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
        f8 scale = load_half(p[t] + code_bytes(FORMAT));
        #pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const Group& a = *rows[r];
            i8 column = FORMAT == Q8 ? wide_column(p[t], a) : small_column(p[t], a);
            f8 dot = fma8(to_float(column), all(a.outlier), to_float(dots[r][t]));
            if constexpr (raised_by<FORMAT>() != 0.0f) dot = fma8(all(-raised_by<FORMAT>()), all(a.sum), dot);
            sums[r][t] = fma8(dot, scale * a.scale, sums[r][t]);
        }
        if constexpr (FORMAT == Q4_MIN) {
            f8 minimum = load_half(p[t] + code_bytes(FORMAT) + 16);
            #pragma GCC unroll 8
            for (int r = 0; r < R; r++) sums[r][t] = fma8(minimum, all(rows[r]->scaled_sum), sums[r][t]);
        }
    }
}

// `tile_bytes` apart lie the tiles, `num_groups` apart the rows.
template <int32_t FORMAT, int R, int T>
static inline void multiply_codes(const uint8_t* tile, int64_t tile_bytes, int64_t num_groups, const Group* activations,
                                  f8 (*out)[T]) {
    f8 sums[R][T];
    #pragma GCC unroll 8
    for (int r = 0; r < R; r++)
        #pragma GCC unroll 8
        for (int t = 0; t < T; t++) sums[r][t] = f8{};
    for (int64_t g = 0; g < num_groups; g++, tile += group_bytes(FORMAT)) {
        const uint8_t* p[T];
        const Group* rows[R];
        #pragma GCC unroll 8
        for (int t = 0; t < T; t++) p[t] = tile + t * tile_bytes;
        #pragma GCC unroll 8
        for (int r = 0; r < R; r++) rows[r] = activations + r * num_groups + g;
        #pragma GCC unroll 8
        for (int t = 0; t < T; t++)
            for (int line = 0; line < 3; line++) __builtin_prefetch(p[t] + 1024 + 64 * line);
        multiply_group<FORMAT, R, T>(p, rows, sums);
    }
    #pragma GCC unroll 8
    for (int r = 0; r < R; r++)
        #pragma GCC unroll 8
        for (int t = 0; t < T; t++) out[r][t] = sums[r][t];
}

template <int32_t FORMAT>
static inline f8 load_weights(const uint8_t* tile, int64_t input) {
    if constexpr (FORMAT == FLOAT32) return load((const float*)tile + input * TILE);
    if constexpr (FORMAT == FLOAT16) return load_half(tile + input * TILE * 2);
    return load_bfloat(tile + input * TILE * 2);
}

// Plain weights and float activations: four chains of sums, joined at the end in one order.
template <int32_t FORMAT, int R>
static inline void multiply_plain(const uint8_t* tile, int64_t num_inputs, const float* x, f8 (*out)[1]) {
    f8 sums[R][4];
    #pragma GCC unroll 8
    for (int r = 0; r < R; r++)
        for (int k = 0; k < 4; k++) sums[r][k] = f8{};
    int64_t i = 0;
    for (; i + 4 <= num_inputs; i += 4)
        for (int k = 0; k < 4; k++) {
            f8 weights = load_weights<FORMAT>(tile, i + k);
            #pragma GCC unroll 8
            for (int r = 0; r < R; r++) sums[r][k] = fma8(weights, all(x[r * num_inputs + i + k]), sums[r][k]);
        }
    for (; i < num_inputs; i++) {
        f8 weights = load_weights<FORMAT>(tile, i);
        #pragma GCC unroll 8
        for (int r = 0; r < R; r++) sums[r][i & 3] = fma8(weights, all(x[r * num_inputs + i]), sums[r][i & 3]);
    }
    #pragma GCC unroll 8
    for (int r = 0; r < R; r++) out[r][0] = (sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3]);
}
