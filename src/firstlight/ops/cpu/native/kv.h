// Keys and values as the pages hold them: for each token and KV head a row of halves, of bfloat16, or of 8-bit codes
// with their scale behind them.
//
// `ops/kv_rows.py` writes and reads the same bits. Invariant: a row depends on the values that it was made from alone.
#pragma once
#include "program.h"
#include "simd.h"

struct HalfRow {
    static constexpr int64_t VALUE_BYTES = 2, SCALE_BYTES = 0;
    HalfRow(const uint8_t*, int64_t) {}
    f8 values(const void* p) const { return load_half(p); }
};

struct BfloatRow {
    static constexpr int64_t VALUE_BYTES = 2, SCALE_BYTES = 0;
    BfloatRow(const uint8_t*, int64_t) {}
    f8 values(const void* p) const { return load_bfloat(p); }
};

struct CodesRow {
    static constexpr int64_t VALUE_BYTES = 1, SCALE_BYTES = 4;
    f8 scale;
    CodesRow(const uint8_t* row, int64_t size) {
        float one;
        memcpy(&one, row + size, sizeof one);
        scale = all(one);
    }
    f8 values(const void* p) const { return signed_bytes((const uint8_t*)p) * scale; }
};

static inline void write_half(uint8_t* to, const float* from, int64_t size) {
    int64_t i = 0;
    for (; i + 8 <= size; i += 8) store_half((uint16_t*)(to + 2 * i), load(from + i));
    for (; i < size; i++) {
        f8 one = f8{};
        one[0] = from[i];
        uint16_t half[8];
        store_half(half, one);
        memcpy(to + 2 * i, half, 2);
    }
}

static inline void write_bfloat(uint8_t* to, const float* from, int64_t size) {
    for (int64_t i = 0; i < size; i++) {
        uint16_t high = float_to_bfloat(from[i]);
        memcpy(to + 2 * i, &high, 2);
    }
}

// round(x / scale) with scale = largest / 127. Infinity or NaN make the scale NaN, and with it the whole row.
static inline void write_codes(uint8_t* to, const float* from, int64_t size) {
    float tail[8] = {};
    int64_t whole = size / 8 * 8;
    memcpy(tail, from + whole, (size_t)(size - whole) * 4);
    f8 most = f8{}, wrong = f8{};
    for (int64_t i = 0; i < size; i += 8) {
        f8 v = load(i < whole ? from + i : tail);
        most = at_least(absolute(v), most);
        wrong = wrong + (v - v);  // 0, or NaN for infinity and NaN
    }
    float first = largest(most), check = sum(wrong);
    bool is_finite = check == check, is_zero = !(first > 1e-30f);
    float scale = !is_finite ? __builtin_nanf("") : is_zero ? 0.0f : first / 127.0f;
    f8 inverse = all(is_finite && !is_zero ? 1.0f / scale : 0.0f);
    for (int64_t i = 0; i < size; i += 8) {
        f8 v = load(i < whole ? from + i : tail), scaled = is_finite ? v * inverse : f8{};
        b8 codes = __builtin_convertvector(to_int((scaled + 12582912.0f) - 12582912.0f), b8);
        memcpy(to + i, &codes, (size_t)(i < whole ? 8 : size - whole));
    }
    memcpy(to + size, &scale, sizeof scale);
}

// The keys or the values of one token: a row for each KV head.
static inline void write_token(int64_t type, void* pool, int64_t slot, const float* from, int64_t kv_heads, int64_t size) {
    uint8_t* to = (uint8_t*)pool;
    int64_t width = kv_heads * size, row_bytes = size + CodesRow::SCALE_BYTES;
    if (type == KV_HALF) return write_half(to + slot * width * 2, from, width);
    if (type == KV_BFLOAT) return write_bfloat(to + slot * width * 2, from, width);
    for (int64_t head = 0; head < kv_heads; head++)
        write_codes(to + (slot * kv_heads + head) * row_bytes, from + head * size, size);
}
