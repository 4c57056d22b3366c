// The largest of a row: one, or the first so many in falling order. For sampling without copying the logits.
//
// Invariant: of equal values the lower place comes first; a value that is no number counts as the largest.
#pragma once
#include "program.h"
#include "simd.h"

static inline void largest_of_row(const float* x, int64_t width, int64_t* where, float* value) {
    int64_t best = 0;
    f8 most = all(-__builtin_inff()), wrong = f8{};
    int64_t i = 0;
    for (; i + 8 <= width; i += 8) {
        f8 v = load(x + i);
        most = at_least(v, most);
        wrong = v != v ? v : wrong;
    }
    float top = largest(most);
    for (int k = 0; k < 8; k++) top = wrong[k] != wrong[k] ? wrong[k] : top;
    for (; i < width; i++) top = x[i] > top || x[i] != x[i] ? x[i] : top;
    while (best < width && !(x[best] == top || (top != top && x[best] != x[best]))) best++;
    *where = best < width ? best : 0;
    *value = top;
}

// A value and its place as one integer: larger values, and of equal ones the lower place, give larger integers.
static inline uint64_t ranked(float value, int64_t place) {
    float plain = value + 0.0f;  // makes 0 of -0
    uint32_t bits;
    memcpy(&bits, &plain, 4);
    bits = plain != plain ? 0xffffffffu : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (uint64_t)bits << 32 | (0xffffffffu - (uint32_t)place);
}

static inline int64_t place_of(uint64_t rank) { return (int64_t)(0xffffffffu - (uint32_t)rank); }

static inline size_t top_scratch_bytes(int64_t num) { return (size_t)num * sizeof(uint64_t); }

// Puts `rank` into the place of the root of a heap whose root is the smallest. Written out, because templates of the
// standard library would be merged between the instruction sets.
static inline void sink(uint64_t* heap, int64_t size, uint64_t rank) {
    int64_t at = 0;
    for (int64_t child = 1; child < size; child = 2 * at + 1) {
        if (child + 1 < size && heap[child + 1] < heap[child]) child++;
        if (rank <= heap[child]) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = rank;
}

// The first `num` of x / divisor, 1 <= `num` <= width; `heap` has room for them.
static inline void top_of_row(const float* x, int64_t width, float divisor, int64_t num, uint64_t* heap, int64_t* places,
                       float* values) {
    for (int64_t n = 0; n < num; n++) heap[n] = 0;
    float least = -__builtin_inff();  // what is below it cannot be among the first
    auto offer = [&](float value, int64_t place) {
        uint64_t rank = ranked(value, place);
        if (rank <= heap[0]) return;
        sink(heap, num, rank);
        if (heap[0]) least = x[place_of(heap[0])] / divisor;
    };
    int64_t i = 0;
    for (; i + 8 <= width; i += 8) {
        f8 v = load(x + i) / divisor;
        i8 below = v < all(least);
        if ((below[0] & below[1]) & (below[2] & below[3]) & (below[4] & below[5]) & (below[6] & below[7])) continue;
        for (int k = 0; k < 8; k++)
            if (!below[k]) offer(v[k], i + k);
    }
    for (; i < width; i++) offer(x[i] / divisor, i);
    for (int64_t n = num - 1; n >= 0; n--) {
        places[n] = place_of(heap[0]);
        values[n] = x[places[n]] / divisor;
        sink(heap, n, heap[n]);
    }
}
