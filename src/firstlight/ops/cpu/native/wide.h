// Products of two tiles at once, a tile in each half of a register of 64 bytes: for processors with AVX-512 and VNNI.
//
// What `product.h` computes for the codes of a group, with half the instructions. Invariant: a lane runs the operations
// of `add_group` in their order, so pairs of tiles change no bit.
#pragma once
#include "dots.h"
#include "formats.h"
#include "program.h"
#include "simd.h"

#if defined(FL_VNNI)
typedef float f16 __attribute__((vector_size(64)));
typedef int32_t i16 __attribute__((vector_size(64)));

static inline f16 all16(float x) { return f16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
static inline i16 all_bytes(int8_t x) { return i16{} + (int32_t)(0x01010101u * (uint8_t)x); }
static inline f16 to_float(i16 v) { return __builtin_convertvector(v, f16); }
static inline i16 beside(__m256i low, __m256i high) {
    return __builtin_shufflevector((i8)low, (i8)high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
static inline i16 dpbusd(i16 sums, i16 codes, i16 activations) {
    return (i16)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, (__m512i)activations);
}
static inline f16 fma16(f16 a, f16 b, f16 c) { return (f16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#else
static inline i16 dpbusd(i16 sums, i16 codes, i16 activations) {
    __m256i s[2], c[2], a[2];
    memcpy(s, &sums, sizeof s), memcpy(c, &codes, sizeof c), memcpy(a, &activations, sizeof a);
    return beside(dpbusd(s[0], c[0], a[0]), dpbusd(s[1], c[1], a[1]));
}
static inline f16 fma16(f16 a, f16 b, f16 c) {
    f8 x[2], y[2], z[2];
    memcpy(x, &a, sizeof x), memcpy(y, &b, sizeof y), memcpy(z, &c, sizeof z);
    return (f16)beside((__m256i)fma8(x[0], y[0], z[0]), (__m256i)fma8(x[1], y[1], z[1]));
}
#endif

// The same 32 bytes of two tiles.
static inline i16 quads_at(const uint8_t* const* p, int64_t at) { return beside(quad_at(p[0] + at), quad_at(p[1] + at)); }
static inline f16 beside(f8 low, f8 high) { return (f16)beside((__m256i)low, (__m256i)high); }
static inline i16 same_four(const int8_t* p) {
    int32_t word;
    memcpy(&word, p, 4);
    return i16{} + word;
}

template <int R>
static inline void dot_small_pair(const uint8_t* const* p, const Group* const* rows, i16* sums) {
    for (int r = 0; r < R; r++) sums[r] = i16{};
#pragma GCC unroll 4
    for (int quad = 0; quad < 4; quad++) {
        i16 both = quads_at(p, 32 * quad), first = both & all_bytes(15), last = (both >> 4) & all_bytes(15);
        for (int r = 0; r < R; r++) sums[r] = dpbusd(sums[r], first, same_four(rows[r]->codes + 4 * quad));
        for (int r = 0; r < R; r++) sums[r] = dpbusd(sums[r], last, same_four(rows[r]->codes + 16 + 4 * quad));
    }
}

template <int R>
static inline void dot_wide_pair(const uint8_t* const* p, const Group* const* rows, i16* sums) {
    for (int r = 0; r < R; r++) sums[r] = i16{};
#pragma GCC unroll 8
    for (int quad = 0; quad < 8; quad++) {
        i16 raised = quads_at(p, 32 * quad) ^ all_bytes(-128);
        for (int r = 0; r < R; r++) sums[r] = dpbusd(sums[r], raised, same_four(rows[r]->codes + 4 * quad));
    }
}

static inline i16 small_column_pair(const uint8_t* const* p, const Group& a) {
    return quads_at(p, ((a.place & 12) << 3) + (a.place & 3)) & a.small_mask;
}
static inline i16 wide_column_pair(const uint8_t* const* p, const Group& a) {
    return (quads_at(p, ((a.place & 28) << 3) + (a.place & 3)) ^ all_bytes(-128)) & 255;
}

// The tiles' scales and minima.
struct PairScales {
    f16 scale, minimum;
};

static inline PairScales pair_scales(int32_t format, const uint8_t* const* p, const uint8_t* const* heads) {
    Scales low = scales_of(format, p[0], heads[0]), high = scales_of(format, p[1], heads[1]);
    return {beside(low.first, high.first), beside(low.minimum, high.minimum)};
}

// R rows with the tiles at `tile` and `tile_stride` bytes behind it; `num_groups` apart lie the rows.
template <int32_t FORMAT, int R>
static inline void multiply_pair(const uint8_t* tile, int64_t tile_stride, int64_t num_groups, const Group* activations,
                                 f8 (*out)[2]) {
    f16 sums[R];
    for (int r = 0; r < R; r++) sums[r] = f16{};
    for (int64_t g = 0; g < num_groups; g++) {
        const uint8_t *low = tile + group_at(FORMAT, g), *head = tile + head_at(FORMAT, g);
        const uint8_t *p[2] = {low, low + tile_stride}, *heads[2] = {head, head + tile_stride};
        for (const uint8_t* tile_group : p) fetch_ahead(tile_group, group_bytes(FORMAT));
        const Group* rows[R];
        i16 dots[R];
        for (int r = 0; r < R; r++) rows[r] = activations + r * num_groups + g;
        if constexpr (FORMAT == Q8_0)
            dot_wide_pair<R>(p, rows, dots);
        else
            dot_small_pair<R>(p, rows, dots);
        PairScales scales = pair_scales(FORMAT, p, heads);
        for (int r = 0; r < R; r++) {
            const Group& a = *rows[r];
            i16 column = FORMAT == Q8_0 ? wide_column_pair(p, a) : small_column_pair(p, a);
            f16 dot = fma16(to_float(column), all16(FORMAT == Q8_0 ? a.outlier : a.small_outlier), to_float(dots[r]));
            if constexpr (raised_by<FORMAT>() != 0.0f) dot = fma16(all16(-raised_by<FORMAT>()), all16(a.sum), dot);
            sums[r] = fma16(dot, scales.scale * a.scale, sums[r]);
            if constexpr (has_minimum(FORMAT)) sums[r] = fma16(scales.minimum, all16(a.scaled_sum), sums[r]);
        }
    }
    for (int r = 0; r < R; r++) memcpy(out[r], &sums[r], sizeof sums[r]);
}
#endif
