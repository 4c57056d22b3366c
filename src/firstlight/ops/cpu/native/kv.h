// Keys and values as the pages hold them: for each token and KV head a row of halves, of bfloat16, or of 8-bit codes
// with a tail: their scale, and the largest of them, which is kept apart in 16 bits as in a `Group`.
//
// `ops/kv_rows.py` writes and reads the same bits. Invariant: a row depends on the values that it was made from alone.
#pragma once
#include "program.h"
#include "rows.h"
#include "simd.h"

struct HalfRow {
    static constexpr int64_t VALUE_BYTES = 2, TAIL_BYTES = 0;
    HalfRow(const uint8_t*, int64_t) {}
    f8 values(const void* p) const { return load_half(p); }
    void finish(float*) const {}
};

struct BfloatRow {
    static constexpr int64_t VALUE_BYTES = 2, TAIL_BYTES = 0;
    BfloatRow(const uint8_t*, int64_t) {}
    f8 values(const void* p) const { return load_bfloat(p); }
    void finish(float*) const {}
};

struct Tail {
    float scale;
    int16_t outlier;  // its code
    uint16_t place;   // where the codes have a 0 for it
};

struct CodesRow {
    static constexpr int64_t VALUE_BYTES = 1, TAIL_BYTES = sizeof(Tail);
    Tail tail;
    int64_t size;
    CodesRow(const uint8_t* row, int64_t num) : size(num) { memcpy(&tail, row + num, sizeof tail); }
    f8 values(const void* p) const { return signed_bytes((const uint8_t*)p) * tail.scale; }
    // A slot that was never written may be read when operators are measured: its place may be any.
    void finish(float* to) const { to[tail.place < size ? tail.place : 0] = (float)tail.outlier * tail.scale; }
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

// round(x / scale). The scale is made for the second largest, which gets 8 bits; the largest gets 16. Infinity or NaN
// make the scale NaN, and with it the whole row.
static inline void write_codes(uint8_t* to, const float* from, int64_t size) {
    float last[8] = {};
    int64_t whole = size / 8 * 8;
    memcpy(last, from + whole, (size_t)(size - whole) * 4);
    LargestTwo most = {f8{}, f8{}};
    f8 wrong = f8{};
    for (int64_t i = 0; i < size; i += 8) {
        f8 v = load(i < whole ? from + i : last), a = absolute(v);
        most = {more(most.first, a), more(most.second, less(most.first, a))};
        wrong = wrong + (v - v);  // 0, or NaN for infinity and NaN
    }
    most = merge(most, turned(most, i8{4, 5, 6, 7, 0, 1, 2, 3}));
    most = merge(most, turned(most, i8{2, 3, 0, 1, 6, 7, 4, 5}));
    most = merge(most, turned(most, i8{1, 0, 3, 2, 5, 4, 7, 6}));
    float first = most.first[0], second = most.second[0], check = sum(wrong);
    bool is_finite = check == check, is_zero = !(first > 1e-30f);
    float scale = second / MOST_8 > first / MOST_16 ? second / MOST_8 : first / MOST_16;
    float inverse = is_zero || !is_finite ? 0.0f : 1.0f / scale;
    int64_t place = 0;
    while (is_finite && place < size - 1 && !(__builtin_fabsf(from[place]) == first)) place++;
    Tail tail = {!is_finite ? __builtin_nanf("") : is_zero ? 0.0f : scale, 0, (uint16_t)place};
    for (int64_t i = 0; i < size; i += 8) {
        f8 v = load(i < whole ? from + i : last), scaled = is_finite ? v * inverse : f8{};
        i8 codes = to_int((scaled + 12582912.0f) - 12582912.0f);
        if (place / 8 == i / 8) {
            tail.outlier = (int16_t)codes[place % 8];
            codes[place % 8] = 0;
        }
        b8 bytes = __builtin_convertvector(codes, b8);
        if (i < whole) memcpy(to + i, &bytes, sizeof bytes);
        else memcpy(to + i, &bytes, (size_t)(size - whole));
    }
    memcpy(to + size, &tail, sizeof tail);
}

// The keys or the values of one token: a row for each KV head.
static inline void write_token(int64_t type, void* pool, int64_t slot, const float* from, int64_t kv_heads, int64_t size) {
    uint8_t* to = (uint8_t*)pool;
    int64_t width = kv_heads * size, row_bytes = size + CodesRow::TAIL_BYTES;
    if (type == KV_HALF) return write_half(to + slot * width * 2, from, width);
    if (type == KV_BFLOAT) return write_bfloat(to + slot * width * 2, from, width);
    for (int64_t head = 0; head < kv_heads; head++)
        write_codes(to + (slot * kv_heads + head) * row_bytes, from + head * size, size);
}
