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
constexpr int MAX_ROWS = 8, MAX_TILES = 2;
#elif defined(__AVX2__)
constexpr int MAX_ROWS = 4, MAX_TILES = 2;
#else
constexpr int MAX_ROWS = 1, MAX_TILES = 1;  // nothing is shared
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
    for (int r = 0; r < R; r++) {
        __m256i activations = four_codes(rows[r]->codes + input);
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
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++) sums[r][t] = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int quad = 0; quad < 4; quad++) {
        __m256i codes[T];
        for (int t = 0; t < T; t++) codes[t] = _mm256_and_si256(quad_at(p[t] + 32 * quad), low_mask);
        add_quad<R, T>(codes, rows, 4 * quad, sums);
        for (int t = 0; t < T; t++)
            codes[t] = _mm256_and_si256(_mm256_srli_epi16(quad_at(p[t] + 32 * quad), 4), low_mask);
        add_quad<R, T>(codes, rows, 16 + 4 * quad, sums);
    }
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++) dots[r][t] = finish_small(sums[r][t]);
}

template <int R, int T>
static inline void dot_wide(const uint8_t* const* p, const Group* const* rows, i8 (*dots)[T]) {
    __m256i sums[R][T];
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++) sums[r][t] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int quad = 0; quad < 8; quad++) {
        for (int t = 0; t < T; t++) {
            __m256i weights = quad_at(p[t] + 32 * quad);
#if defined(FL_VNNI)
            __m256i raised = _mm256_xor_si256(weights, _mm256_set1_epi8((char)0x80));
            for (int r = 0; r < R; r++) {
                sums[r][t] = dpbusd(sums[r][t], raised, four_codes(rows[r]->codes + 4 * quad));
                hold(sums[r][t]);
            }
#else
            // |w| * (a with w's sign): at most 2 * 128 * 127, which 16 bits hold.
            __m256i size = _mm256_abs_epi8(weights);
            for (int r = 0; r < R; r++) {
                __m256i a = _mm256_sign_epi8(four_codes(rows[r]->codes + 4 * quad), weights);
                __m256i pairs = _mm256_maddubs_epi16(size, a);
                sums[r][t] = _mm256_add_epi32(sums[r][t], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
                hold(sums[r][t]);
            }
#endif
        }
    }
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++) dots[r][t] = (i8)sums[r][t];
}

// 6-bit codes: the sums of the first and of the last 16 inputs.
template <int R, int T>
static inline void dot_six(const uint8_t* const* p, const Group* const* rows, i8 (*dots)[2][T]) {
    for (int t = 0; t < T; t++)
        for (int half = 0; half < 2; half++) {
            __m256i upper = quad_at(p[t] + 128 + 32 * half), codes[4];
            for (int quad = 0; quad < 4; quad++) {
                __m256i lower = quad_at(p[t] + 32 * quad);
                if (half) lower = _mm256_srli_epi16(lower, 4);
                __m256i bits = quad < 2 ? _mm256_slli_epi16(upper, 4 - 2 * quad) : _mm256_srli_epi16(upper, 2 * quad - 4);
                codes[quad] = _mm256_or_si256(_mm256_and_si256(lower, _mm256_set1_epi8(15)),
                                              _mm256_and_si256(bits, _mm256_set1_epi8(0x30)));
            }
            for (int r = 0; r < R; r++) {
                // Two quads at a time: 4 * 63 * 127 is what 16 bits hold.
                i8 sums = {};
                for (int pair = 0; pair < 4; pair += 2) {
                    const int8_t* a = rows[r]->codes + 16 * half + 4 * pair;
                    __m256i some = add_small(_mm256_setzero_si256(), codes[pair], four_codes(a));
                    sums += finish_small(add_small(some, codes[pair + 1], four_codes(a + 4)));
                }
                dots[r][half][t] = sums;
            }
        }
}

static inline i8 six_column(const uint8_t* p, const Group& a) {
    int32_t upper_right = 8 * (a.place & 3) + ((a.place >> 1) & 6);
    __m256i lower = right_by(quad_at(p + ((a.place & 12) << 3)), a.right);
    __m256i upper = right_by(quad_at(p + 128 + ((a.place & 16) << 1)), upper_right);
    return (i8)_mm256_or_si256(_mm256_and_si256(lower, _mm256_set1_epi32(15)),
                               _mm256_slli_epi32(_mm256_and_si256(upper, _mm256_set1_epi32(3)), 4));
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
    for (int r = 0; r < R; r++)
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
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++) {
            const int8_t* a = rows[r]->codes;
            i8 sums = {};
            for (int quad = 0; quad < 8; quad++)
                for (int output = 0; output < TILE; output++)
                    for (int k = 0; k < 4; k++) sums[output] += (int8_t)p[t][32 * quad + 4 * output + k] * a[4 * quad + k];
            dots[r][t] = sums;
        }
}

template <int R, int T>
static inline void dot_six(const uint8_t* const* p, const Group* const* rows, i8 (*dots)[2][T]) {
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++)
            for (int half = 0; half < 2; half++) {
                i8 sums = {};
                for (int i = 16 * half; i < 16 * half + 16; i++)
                    for (int output = 0; output < TILE; output++)
                        sums[output] += (code_of(Q6_NESTED, p[t], i, output) + 32) * rows[r]->codes[i];
                dots[r][half][t] = sums;
            }
}

static inline i8 six_column(const uint8_t* p, const Group& a) {
    i8 column;
    for (int output = 0; output < TILE; output++) column[output] = code_of(Q6_NESTED, p, a.place, output) + 32;
    return column;
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
static inline void multiply_group(const uint8_t* const* p, const Scales* scales, const Group* const* rows, f8 (*sums)[T]) {
    i8 dots[R][T];
    if constexpr (FORMAT == Q8)
        dot_wide<R, T>(p, rows, dots);
    else
        dot_small<R, T>(p, rows, dots);
    for (int t = 0; t < T; t++) {
        for (int r = 0; r < R; r++) {
            const Group& a = *rows[r];
            i8 column = FORMAT == Q8 ? wide_column(p[t], a) : small_column(p[t], a);
            f8 dot = fma8(to_float(column), all(a.outlier), to_float(dots[r][t]));
            if constexpr (raised_by<FORMAT>() != 0.0f) dot = fma8(all(-raised_by<FORMAT>()), all(a.sum), dot);
            sums[r][t] = fma8(dot, scales[t].first * a.scale, sums[r][t]);
            if constexpr (FORMAT == Q4_MIN || FORMAT == Q4_NESTED)
                sums[r][t] = fma8(scales[t].minimum, all(a.scaled_sum), sums[r][t]);
        }
    }
}

template <int R, int T>
static inline void multiply_six(const uint8_t* const* p, const Scales* scales, const Group* const* rows, f8 (*sums)[T]) {
    i8 dots[R][2][T];
    dot_six<R, T>(p, rows, dots);
    for (int t = 0; t < T; t++)
        for (int r = 0; r < R; r++) {
            const Group& a = *rows[r];
            f8 column = to_float(six_column(p[t], a));
            float in_first = a.place < 16 ? a.outlier : 0.0f, in_last = a.outlier - in_first;
            f8 first = fma8(column, all(in_first), to_float(dots[r][0][t]));
            f8 last = fma8(column, all(in_last), to_float(dots[r][1][t]));
            first = fma8(all(-32.0f), all(a.first_sum), first);
            last = fma8(all(-32.0f), all(a.sum - a.first_sum), last);
            sums[r][t] = fma8(first, scales[t].first * a.scale, sums[r][t]);
            sums[r][t] = fma8(last, scales[t].last * a.scale, sums[r][t]);
        }
}

// `tile_bytes` apart lie the tiles, `num_groups` apart the rows.
template <int32_t FORMAT, int R, int T>
static inline void multiply_codes(const uint8_t* tile, int64_t tile_bytes, int64_t num_groups, const Group* activations,
                                  f8 (*out)[T]) {
    f8 sums[R][T];
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++) sums[r][t] = f8{};
    for (int64_t g = 0; g < num_groups; g++) {
        const uint8_t* p[T];
        const Group* rows[R];
        Scales scales[T];
        for (int t = 0; t < T; t++) {
            p[t] = tile + t * tile_bytes + group_at(FORMAT, g);
            scales[t] = scales_of(FORMAT, p[t], tile + t * tile_bytes + head_at(FORMAT, g));
            for (int line = 0; line < 3; line++) __builtin_prefetch(p[t] + 1024 + 64 * line);
        }
        for (int r = 0; r < R; r++) rows[r] = activations + r * num_groups + g;
        if constexpr (FORMAT == Q6_NESTED)
            multiply_six<R, T>(p, scales, rows, sums);
        else
            multiply_group<FORMAT, R, T>(p, scales, rows, sums);
    }
    for (int r = 0; r < R; r++)
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
