// The integer part of a product: sums of codes' products over a group of 32 inputs, and the weights of one input.
//
// For T tiles of 8 outputs against R rows. Every result is a whole number that 32 bits hold, so the order of these sums
// changes no bit and each instruction set has its own. Used by `product.h`.
#pragma once
#include "formats.h"
#include "program.h"
#include "simd.h"

// Where products are this quick, the processor does not see far enough ahead by itself: 8 rows took twice as long from
// memory as from the cache (Zen 5). The distance is the best of 1, 2, 3 and 4 kilobytes.
static inline void fetch_ahead([[maybe_unused]] const uint8_t* group, [[maybe_unused]] int64_t num_bytes) {
#if defined(FL_VNNI)
    for (int64_t at = 4096; at < 4096 + num_bytes; at += 64) __builtin_prefetch(group + at);
#endif
}

// What a code was raised by, so that it is unsigned where the instructions want it so.
template <int32_t FORMAT>
constexpr float raised_by() {
#if defined(FL_VNNI)
    if (FORMAT == Q8_0) return 128.0f;
#endif
    return FORMAT == Q4_0 ? 8.0f : 0.0f;
}

#if defined(__AVX2__)
static inline __m256i four_codes(const int8_t* p) {
    int32_t word;
    memcpy(&word, p, 4);
    return _mm256_set1_epi32(word);
}

static inline __m256i right_by(__m256i v, int32_t bits) { return _mm256_srl_epi32(v, _mm_cvtsi32_si128(bits)); }
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
static inline void dot_small(const uint8_t* const* p, const Group* const* rows, i8 (*dots)[2][T]) {
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
        for (int t = 0; t < T; t++) dots[r][0][t] = finish_small(sums[r][t]);
}

template <int R, int T>
static inline void dot_wide(const uint8_t* const* p, const Group* const* rows, i8 (*dots)[2][T]) {
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
        for (int t = 0; t < T; t++) dots[r][0][t] = (i8)sums[r][t];
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

// A column is read from its own byte on: the lowest byte of each lane is its weight, or holds it.
static inline i8 six_column(const uint8_t* p, const Group& a) {
    __m256i lower = right_by(quad_at(p + ((a.place & 12) << 3) + (a.place & 3)), (a.place >> 2) & 4);
    __m256i upper = right_by(quad_at(p + 128 + ((a.place & 16) << 1) + (a.place & 3)), (a.place >> 1) & 6);
    return (i8)_mm256_or_si256(_mm256_and_si256(lower, _mm256_set1_epi32(15)),
                               _mm256_slli_epi32(_mm256_and_si256(upper, _mm256_set1_epi32(3)), 4));
}

// Codes of the upper half of a byte are 16 times too large; `small_outlier` is as much smaller.
static inline i8 small_column(const uint8_t* p, const Group& a) {
    __m256i column = quad_at(p + ((a.place & 12) << 3) + (a.place & 3));
    return (i8)_mm256_and_si256(column, _mm256_set1_epi32(a.small_mask));
}
static inline i8 wide_column(const uint8_t* p, const Group& a) {
    __m256i column = quad_at(p + ((a.place & 28) << 3) + (a.place & 3));
#if defined(FL_VNNI)
    column = _mm256_xor_si256(column, _mm256_set1_epi8((char)0x80));
    return (i8)_mm256_and_si256(column, _mm256_set1_epi32(255));
#else
    return (i8)_mm256_srai_epi32(_mm256_slli_epi32(column, 24), 24);
#endif
}
#else
template <int R, int T>
static inline void dot_small(const uint8_t* const* p, const Group* const* rows, i8 (*dots)[2][T]) {
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
            dots[r][0][t] = sums;
        }
}

template <int R, int T>
static inline void dot_wide(const uint8_t* const* p, const Group* const* rows, i8 (*dots)[2][T]) {
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++) {
            const int8_t* a = rows[r]->codes;
            i8 sums = {};
            for (int quad = 0; quad < 8; quad++)
                for (int output = 0; output < TILE; output++)
                    for (int k = 0; k < 4; k++) sums[output] += (int8_t)p[t][32 * quad + 4 * output + k] * a[4 * quad + k];
            dots[r][0][t] = sums;
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
                        sums[output] += (code_of(Q6_K, p[t], i, output) + 32) * rows[r]->codes[i];
                dots[r][half][t] = sums;
            }
}

static inline i8 six_column(const uint8_t* p, const Group& a) {
    i8 column;
    for (int output = 0; output < TILE; output++) column[output] = code_of(Q6_K, p, a.place, output) + 32;
    return column;
}

static inline i8 small_column(const uint8_t* p, const Group& a) {
    i8 column;
    for (int output = 0; output < TILE; output++)
        column[output] = p[((a.place & 12) << 3) + 4 * output + (a.place & 3)] & a.small_mask;
    return column;
}
static inline i8 wide_column(const uint8_t* p, const Group& a) {
    i8 column;
    for (int output = 0; output < TILE; output++)
        column[output] = (int8_t)p[((a.place & 28) << 3) + 4 * output + (a.place & 3)];
    return column;
}
#endif
