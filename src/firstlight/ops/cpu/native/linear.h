// The operator of a matrix product: which rows and tiles belong to a piece, and how they are blocked.
//
// Used by `kernels.cpp`. Tiles go by while a block of rows stays in the cache; several tiles and rows are
// multiplied at once. Invariant: blocking changes no bit, see `product.h`.
#pragma once
#include "formats.h"
#include "product.h"
#include "program.h"

constexpr int64_t BLOCK_ROWS = 64;  // whose activations stay in the cache while tiles pass by
// Of few rows in fewer pieces: they wait for memory, and each piece begins to read anew.
constexpr int64_t FEW_ROWS = 8, PIECES_OF_A_THREAD = 6, PIECES_OF_FEW_ROWS = 3;

// A product of some rows: of all of a step, or of those of one expert.
struct Product {
    const Op& op;
    const uint8_t* weights;
    int64_t first_row, end_row;
    float* out;  // of the first row
};

static inline void put(const Product& product, int64_t row, int64_t tile, f8 sums) {
    const Op& op = product.op;
    int64_t width = op.n[1], first = tile * TILE;
    float* out = product.out + (row - product.first_row) * op.n[3] + first;
    const float* bias = (const float*)op.p[4];
    bool adds = op.flags & ADD_TO_OUTPUT;
    if (first + TILE <= width) {
        if (bias) sums = sums + load(bias + first);
        store(out, adds ? load(out) + sums : sums);
        return;
    }
    for (int k = 0; first + k < width; k++) {
        float value = sums[k];
        if (bias) value += bias[first + k];
        out[k] = adds ? out[k] + value : value;
    }
}

constexpr int tiles_at_once(int32_t format) { return is_coded(format) && format != Q6_K ? MAX_TILES : 1; }

// R rows with T tiles: `tile` and those that lie `apart` tiles behind it and behind each other.
template <int32_t FORMAT, int R, int T>
static void rows_of_tiles(const Product& product, int64_t tile, int64_t apart, int64_t row) {
    const Op& op = product.op;
    int64_t num_inputs = op.n[2], tile_bytes = tile_bytes_of(FORMAT, num_inputs);
    const uint8_t* weights = product.weights + tile * tile_bytes;
    f8 sums[R][T];
    if constexpr (is_coded(FORMAT)) {
        int64_t groups = num_inputs / GROUP;
        const Group* activations = ((const Quantized*)op.p[1])->groups + row * groups;
        multiply_codes<FORMAT, R, T>(weights, apart * tile_bytes, groups, activations, sums);
    } else if constexpr (is_scaled(FORMAT)) {
        multiply_scaled<FORMAT, R>(weights, num_inputs, (const float*)op.p[2] + row * num_inputs, sums);
    } else {
        multiply_plain<FORMAT, R>(weights, num_inputs, (const float*)op.p[2] + row * num_inputs, sums);
    }
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++) put(product, row + r, tile + t * apart, sums[r][t]);
}

template <int32_t FORMAT, int T>
static void all_rows_of_tiles(const Product& product, int64_t tile, int64_t apart, int64_t row, int64_t end_row) {
    // The last tile of an odd number is rare: no code of its own for many rows. More than usual are for a lone row.
    constexpr bool is_main = T == tiles_at_once(FORMAT), is_lone = T > tiles_at_once(FORMAT);
    constexpr int FEW = MAX_ROWS < 2 || is_lone ? 1 : 2;
    constexpr int MOST = is_main && (is_coded(FORMAT) || is_scaled(FORMAT)) ? MAX_ROWS : FEW;
    for (; row + MOST <= end_row; row += MOST) rows_of_tiles<FORMAT, MOST, T>(product, tile, apart, row);
    if constexpr (MOST > 4)
        for (; row + 4 <= end_row; row += 4) rows_of_tiles<FORMAT, 4, T>(product, tile, apart, row);
    switch (end_row - row) {
        case 3:
            if constexpr (MOST > 3) rows_of_tiles<FORMAT, 3, T>(product, tile, apart, row);
            break;
        case 2:
            if constexpr (MOST > 2) rows_of_tiles<FORMAT, 2, T>(product, tile, apart, row);
            break;
        case 1:
            if constexpr (MOST > 1) rows_of_tiles<FORMAT, 1, T>(product, tile, apart, row);
            break;
        default: break;
    }
}

// T tiles at once, one of each T-th part: so every part is read from its beginning to its end, and the processor
// fetches ahead. Neighbouring tiles at once would be T short pieces of memory each time. Gives the first tile left.
template <int32_t FORMAT, int T>
static int64_t side_by_side(const Product& product, int64_t first, int64_t end, int64_t row, int64_t end_row) {
    int64_t apart = (end - first) / T;
    for (int64_t tile = first; tile < first + apart; tile++)
        all_rows_of_tiles<FORMAT, T>(product, tile, apart, row, end_row);
    return first + apart * T;
}

template <int32_t FORMAT>
static void multiply(const Product& product, int64_t first, int64_t end) {
    constexpr int T = tiles_at_once(FORMAT);
    for (int64_t row = product.first_row; row < product.end_row; row += BLOCK_ROWS) {
        int64_t end_row = row + BLOCK_ROWS < product.end_row ? row + BLOCK_ROWS : product.end_row, tile = first;
        if constexpr (T > 1)
            if (end_row - row == 1) tile = side_by_side<FORMAT, LONE_ROW_TILES>(product, tile, end, row, end_row);
        tile = side_by_side<FORMAT, T>(product, tile, end, row, end_row);
        if constexpr (T > 1) side_by_side<FORMAT, 1>(product, tile, end, row, end_row);
    }
}

static void multiply_any(const Product& product, int64_t first, int64_t end) {
    switch (product.op.n[0]) {
        case Q4_1: return multiply<Q4_1>(product, first, end);
        case Q4_0: return multiply<Q4_0>(product, first, end);
        case Q8_0: return multiply<Q8_0>(product, first, end);
        case F32: return multiply<F32>(product, first, end);
        case F16: return multiply<F16>(product, first, end);
        case Q4_K: return multiply<Q4_K>(product, first, end);
        case Q6_K: return multiply<Q6_K>(product, first, end);
        case INT4_ZERO: return multiply<INT4_ZERO>(product, first, end);
        case FP8: return multiply<FP8>(product, first, end);
        case FP4: return multiply<FP4>(product, first, end);
        default: return multiply<BF16>(product, first, end);
    }
}

struct Pieces {
    int64_t num_tiles, size, across, down;  // tiles, of a piece, pieces over the tiles, over blocks of rows
};

// Pieces of an even number of tiles, because two are multiplied at once.
static inline Pieces pieces_of(const Op& op, int64_t num_rows, int num_threads) {
    Pieces p;
    int64_t wanted = (num_rows < FEW_ROWS ? PIECES_OF_FEW_ROWS : PIECES_OF_A_THREAD) * num_threads;
    p.num_tiles = (op.n[1] + TILE - 1) / TILE;
    p.size = num_threads == 1 ? p.num_tiles : ((p.num_tiles + wanted - 1) / wanted + 1) / 2 * 2;
    p.across = (p.num_tiles + p.size - 1) / p.size;
    p.down = (num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    return p;
}

static inline void linear(const Op& op, int64_t num_rows, int num_threads, int64_t piece) {
    Pieces p = pieces_of(op, num_rows, num_threads);
    int64_t first_row = piece / p.across * BLOCK_ROWS, first = piece % p.across * p.size;
    int64_t end_row = first_row + BLOCK_ROWS < num_rows ? first_row + BLOCK_ROWS : num_rows;
    int64_t end = first + p.size < p.num_tiles ? first + p.size : p.num_tiles;
    multiply_any({op, (const uint8_t*)op.p[0], first_row, end_row, (float*)op.p[3] + first_row * op.n[3]}, first, end);
}

// --- products with the weights of experts: n[4] of them, one after the other; p[5] says where the rows of each begin ---

static inline int64_t num_touched(const Op& op) {
    if (op.kind == OP_HEADS) return op.n[4];
    const int64_t* starts = (const int64_t*)op.p[5];
    int64_t touched = 0;
    for (int64_t e = 0; e < op.n[4]; e++) touched += starts[e + 1] > starts[e];
    return touched;
}

static inline int64_t num_expert_pieces(const Op& op, int num_threads) {
    return num_touched(op) * pieces_of(op, 1, num_threads).across;
}

// A piece is a part of the outputs of one expert that has rows, for all of them. Of OP_HEADS every row goes to every head;
// n[5]: how far the heads of an output row are apart.
static inline void multiply_expert(const Op& op, int64_t num_rows, int num_threads, int64_t piece) {
    Pieces p = pieces_of(op, 1, num_threads);
    int64_t expert = piece / p.across, start = expert * num_rows, end_row = start + num_rows;
    float* out = (float*)op.p[3] + expert * op.n[5];
    if (op.kind != OP_HEADS) {
        const int64_t* starts = (const int64_t*)op.p[5];
        int64_t before = expert;
        for (expert = 0; starts[expert + 1] <= starts[expert] || before-- > 0;) expert++;
        start = starts[expert], end_row = starts[expert + 1];
        out = (float*)op.p[3] + start * op.n[3];
    }
    int64_t first = piece % p.across * p.size, end = first + p.size < p.num_tiles ? first + p.size : p.num_tiles;
    int64_t expert_bytes = p.num_tiles * tile_bytes_of((int32_t)op.n[0], op.n[2]);
    const uint8_t* weights = (const uint8_t*)op.p[0] + expert * expert_bytes;
    multiply_any({op, weights, start, end_row, out}, first, end);
}
