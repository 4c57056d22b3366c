// Eight lanes of float or int32 by GCC's vector extensions, with intrinsics where they matter.
//
// Compiled once for each instruction set. `-ffp-contract=off` keeps the compiler from fusing what is not fused
// here, so every number of rows runs the same operations.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif
// FL_EMULATE_VNNI: the code for AVX-512 with VNNI on a processor with AVX2, for testing.
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define FL_VNNI
#elif defined(FL_EMULATE_VNNI) && defined(__AVX2__)
#define FL_VNNI
#endif

typedef float f8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef int8_t b8 __attribute__((vector_size(8)));

static inline f8 load(const float* p) {
    f8 v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline void store(float* p, f8 v) { memcpy(p, &v, sizeof v); }
static inline f8 all(float x) { return f8{x, x, x, x, x, x, x, x}; }
static inline i8 bits_of(f8 v) { return (i8)v; }
static inline f8 to_float(i8 v) { return __builtin_convertvector(v, f8); }
static inline i8 to_int(f8 v) { return __builtin_convertvector(v, i8); }

static inline f8 fma8(f8 a, f8 b, f8 c) {
#if defined(__FMA__)
    return (f8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

#if defined(FL_VNNI)
// To each of 8 sums of 32 bits, four products of an unsigned byte and a signed one.
static inline __m256i dpbusd(__m256i sums, __m256i codes, __m256i activations) {
#if !defined(__AVX512VNNI__) || !defined(__AVX512VL__)
    __m256i even = _mm256_and_si256(codes, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(codes, 8);
    __m256i a = _mm256_srai_epi16(_mm256_slli_epi16(activations, 8), 8), b = _mm256_srai_epi16(activations, 8);
    return _mm256_add_epi32(sums, _mm256_add_epi32(_mm256_madd_epi16(even, a), _mm256_madd_epi16(odd, b)));
#else
    return _mm256_dpbusd_epi32(sums, codes, activations);
#endif
}
#endif

static inline f8 absolute(f8 v) { return (f8)(bits_of(v) & 0x7fffffff); }
// Both keep a NaN in `v`.
static inline f8 at_least(f8 v, f8 low) { return low > v ? low : v; }
static inline f8 at_most(f8 v, f8 high) { return v > high ? high : v; }

static inline float largest(f8 v) {
    float best = v[0];
    for (int k = 1; k < 8; k++) best = v[k] > best ? v[k] : best;
    return best;
}
static inline float sum(f8 v) { return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7])); }

static inline float half_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = (half >> 10) & 31, mantissa = half & 1023;
    uint32_t word;
    if (exponent == 31) {
        word = sign | 0x7f800000u | (mantissa << 13);
    } else if (exponent == 0) {
        float value = (float)mantissa * 5.9604644775390625e-8f;  // 2^-24
        memcpy(&word, &value, 4);
        word |= sign;
    } else {
        word = sign | ((exponent + 112) << 23) | (mantissa << 13);
    }
    float value;
    memcpy(&value, &word, 4);
    return value;
}

static inline uint16_t float_to_half(float value) {
    uint32_t word;
    memcpy(&word, &value, 4);
    uint32_t sign = (word >> 16) & 0x8000, rest = word & 0x7fffffff;
    if (rest > 0x7f800000u) return (uint16_t)(sign | 0x7e00);
    if (rest >= 0x477ff000u) return (uint16_t)(sign | 0x7c00);  // rounds to more than 65504
    if (rest < 0x38800000u) {                                   // subnormal: the sum rounds to a step of 2^-24
        float size;
        memcpy(&size, &rest, 4);
        size += 0.5f;
        uint32_t raised;
        memcpy(&raised, &size, 4);
        return (uint16_t)(sign | (raised - 0x3f000000u));
    }
    uint32_t odd = (rest >> 13) & 1;
    return (uint16_t)(sign | ((rest - 0x38000000u + 0xfffu + odd) >> 13));
}

static inline f8 load_half(const void* p) {
#if defined(__F16C__)
    return (f8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    uint16_t h[8];
    memcpy(h, p, sizeof h);
    f8 v;
    for (int k = 0; k < 8; k++) v[k] = half_to_float(h[k]);
    return v;
#endif
}

static inline void store_half(uint16_t* p, f8 v) {
#if defined(__F16C__)
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int k = 0; k < 8; k++) p[k] = float_to_half(v[k]);
#endif
}

static inline f8 unsigned_bytes(const uint8_t* p) {
#if defined(__AVX2__)
    return to_float((i8)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    f8 v;
    for (int k = 0; k < 8; k++) v[k] = (float)p[k];
    return v;
#endif
}
static inline f8 signed_bytes(const uint8_t* p) {
#if defined(__AVX2__)
    return to_float((i8)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    f8 v;
    for (int k = 0; k < 8; k++) v[k] = (float)(int8_t)p[k];
    return v;
#endif
}

static inline f8 load_bfloat(const void* p) {
#if defined(__AVX2__)
    return (f8)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
    uint16_t h[8];
    memcpy(h, p, sizeof h);
    i8 v;
    for (int k = 0; k < 8; k++) v[k] = (int32_t)((uint32_t)h[k] << 16);
    return (f8)v;
#endif
}

// 8 floats of 8 bits (e4m3): as float16 they are 256 times smaller. The two NaNs are not known here.
constexpr float FLOAT8_UNIT = 256.0f;
static inline f8 load_float8(const uint8_t* p) {
#if defined(__AVX2__) && defined(__F16C__)
    __m128i words = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p));
    __m128i sign = _mm_slli_epi16(_mm_and_si128(words, _mm_set1_epi16(0x80)), 8);
    __m128i rest = _mm_slli_epi16(_mm_and_si128(words, _mm_set1_epi16(0x7f)), 7);
    return (f8)_mm256_cvtph_ps(_mm_or_si128(sign, rest));
#else
    f8 v;
    for (int k = 0; k < 8; k++) v[k] = half_to_float((uint16_t)((p[k] & 0x80) << 8 | (p[k] & 0x7f) << 7));
    return v;
#endif
}

// 8 pairs of floats of 4 bits (e2m1), the first of each in the low half of its byte.
static inline void load_float4(const uint8_t* p, f8* pairs) {
    constexpr float SIZES[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
#if defined(__AVX2__)
    __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
    for (int k = 0; k < 2; k++) {
        __m256i codes = k ? _mm256_srli_epi32(bytes, 4) : bytes;
        f8 sizes = (f8)_mm256_permutevar8x32_ps((__m256)load(SIZES), codes);
        __m256i signs = _mm256_slli_epi32(_mm256_and_si256(codes, _mm256_set1_epi32(8)), 28);
        pairs[k] = (f8)_mm256_xor_ps((__m256)sizes, _mm256_castsi256_ps(signs));
    }
#else
    for (int lane = 0; lane < 8; lane++)
        for (int k = 0; k < 2; k++) {
            int code = k ? p[lane] >> 4 : p[lane] & 15;
            pairs[k][lane] = code & 8 ? -SIZES[code & 7] : SIZES[code & 7];
        }
#endif
}

static inline uint16_t float_to_bfloat(float value) {
    uint32_t word;
    memcpy(&word, &value, 4);
    if ((word & 0x7fffffff) > 0x7f800000u) return (uint16_t)(word >> 16 | 0x40);
    return (uint16_t)((word + 0x7fffu + (word >> 16 & 1)) >> 16);
}

// e^x with an error of about one unit in the last place; NaN stays, what is below -87.3 becomes about 1e-38.
static inline __attribute__((always_inline)) f8 exp8(f8 x) {
    x = at_most(at_least(x, all(-87.3f)), all(88.3f));
    f8 n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    f8 r = fma8(n, all(-0.693359375f), x);
    r = fma8(n, all(2.12194440e-4f), r);
    f8 p = all(1.9875691500e-4f);
    p = fma8(p, r, all(1.3981999507e-3f));
    p = fma8(p, r, all(8.3334519073e-3f));
    p = fma8(p, r, all(4.1665795894e-2f));
    p = fma8(p, r, all(1.6666665459e-1f));
    p = fma8(p, r, all(5.0000001201e-1f));
    p = fma8(p, r * r, r) + 1.0f;
    // The maximum keeps the conversion of a NaN in range; p carries the NaN on.
    f8 safe = n > -200.0f ? n : all(-126.0f);
    i8 power = (to_int(safe) + 127) << 23;
    return p * (f8)power;
}
