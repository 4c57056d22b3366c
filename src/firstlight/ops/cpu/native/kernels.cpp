// Every operator for one instruction set. Compiled several times, each with its own name in FL_KERNELS.
//
// An operator falls into pieces, which the threads of the pool share out; see `Kernels`.
#include "attention.h"
#include "choose.h"
#include "product.h"
#include "program.h"
#include "rows.h"
#include "simd.h"

static inline int64_t num_rows(const Op& op, const Context& c) {
    return op.flags & LOGIT_ROWS ? c.step->num_logits : c.step->num_rows;
}

static inline int64_t rows_of_piece(const Op& op, const Context& c) {
    return num_rows(op, c) / (4 * c.worker->num_threads) + 1;
}

template <typename F>
static inline void each_row(const Op& op, const Context& c, int64_t piece, F run) {
    int64_t size = rows_of_piece(op, c), end = (piece + 1) * size, total = num_rows(op, c);
    for (int64_t row = piece * size; row < end && row < total; row++) run(row);
}

// --- products ---

constexpr int64_t BLOCK_ROWS = 64;  // whose activations stay in the cache while tiles pass by

static inline void put(const Op& op, int64_t row, int64_t tile, f8 sums) {
    int64_t width = op.n[1], first = tile * TILE;
    float* out = (float*)op.p[3] + row * op.n[3] + first;
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

template <int32_t FORMAT, int R>
static void rows_of_tile(const Op& op, const uint8_t* weights, int64_t tile, int64_t row) {
    int64_t num_inputs = op.n[2];
    f8 sums[R];
    if constexpr (FORMAT <= Q8) {
        const Quantized& x = *(const Quantized*)op.p[1];
        int64_t groups = num_inputs / GROUP;
        RowsOfCodes rows;
        for (int r = 0; r < R; r++) {
            rows.codes[r] = x.codes + (row + r) * num_inputs;
            rows.scales[r] = x.scales + (row + r) * groups;
            rows.scaled_sums[r] = x.scaled_sums + (row + r) * groups;
            rows.sums[r] = x.sums + (row + r) * groups;
            rows.outliers[r] = x.outliers + (row + r) * groups;
        }
        multiply_codes<FORMAT, R>(weights, groups, rows, sums);
    } else {
        const float* x[R];
        for (int r = 0; r < R; r++) x[r] = (const float*)op.p[2] + (row + r) * num_inputs;
        multiply_plain<FORMAT, R>(weights, num_inputs, x, sums);
    }
    for (int r = 0; r < R; r++) put(op, row + r, tile, sums[r]);
}

struct Pieces {
    int64_t num_tiles, size, across, down;  // tiles, of a piece, pieces over the tiles, over blocks of rows
};

static inline Pieces pieces_of(const Op& op, const Context& c) {
    Pieces p;
    int64_t wanted = 6 * c.worker->num_threads;
    p.num_tiles = (op.n[1] + TILE - 1) / TILE;
    p.size = c.worker->num_threads == 1 ? p.num_tiles : (p.num_tiles + wanted - 1) / wanted;
    p.across = (p.num_tiles + p.size - 1) / p.size;
    p.down = (num_rows(op, c) + BLOCK_ROWS - 1) / BLOCK_ROWS;
    return p;
}

template <int32_t FORMAT>
static void linear(const Op& op, const Context& c, int64_t index) {
    constexpr int MOST = FORMAT <= Q8 ? MAX_ROWS : 2;
    Pieces p = pieces_of(op, c);
    int64_t value_bytes = FORMAT == FLOAT32 ? 4 : 2, total = num_rows(op, c);
    int64_t tile_bytes = FORMAT <= Q8 ? op.n[2] / GROUP * group_bytes(FORMAT) : op.n[2] * TILE * value_bytes;
    int64_t first_row = index / p.across * BLOCK_ROWS, first = index % p.across * p.size;
    int64_t end_row = first_row + BLOCK_ROWS < total ? first_row + BLOCK_ROWS : total;
    int64_t end = first + p.size < p.num_tiles ? first + p.size : p.num_tiles;
    for (int64_t tile = first; tile < end; tile++) {
        const uint8_t* weights = (const uint8_t*)op.p[0] + tile * tile_bytes;
        int64_t row = first_row;
        for (; row + MOST <= end_row; row += MOST) rows_of_tile<FORMAT, MOST>(op, weights, tile, row);
        if constexpr (MOST > 4)
            for (; row + 4 <= end_row; row += 4) rows_of_tile<FORMAT, 4>(op, weights, tile, row);
        switch (end_row - row) {
            case 3:
                if constexpr (MOST > 3) rows_of_tile<FORMAT, 3>(op, weights, tile, row);
                break;
            case 2:
                if constexpr (MOST > 2) rows_of_tile<FORMAT, 2>(op, weights, tile, row);
                break;
            case 1: rows_of_tile<FORMAT, 1>(op, weights, tile, row); break;
            default: break;
        }
    }
}

static void linear_of_any(const Op& op, const Context& c, int64_t piece) {
    switch (op.n[0]) {
        case Q4_MIN: return linear<Q4_MIN>(op, c, piece);
        case Q4: return linear<Q4>(op, c, piece);
        case Q8: return linear<Q8>(op, c, piece);
        case FLOAT32: return linear<FLOAT32>(op, c, piece);
        case FLOAT16: return linear<FLOAT16>(op, c, piece);
        default: return linear<BFLOAT16>(op, c, piece);
    }
}

// --- the ends of the model ---

static void embed_row(const Op& op, int64_t token, float* out) {
    int64_t format = op.n[0], width = op.n[1], tile = token / TILE, lane = token % TILE;
    const uint8_t* weights = (const uint8_t*)op.p[0];
    if (format >= FLOAT32) {
        for (int64_t i = 0; i < width; i++) {
            int64_t at = (tile * width + i) * TILE + lane;
            if (format == FLOAT32) {
                out[i] = ((const float*)weights)[at];
            } else {
                uint16_t half = ((const uint16_t*)weights)[at];
                uint32_t word = (uint32_t)half << 16;
                if (format == FLOAT16)
                    out[i] = half_to_float(half);
                else
                    memcpy(out + i, &word, 4);
            }
        }
        return;
    }
    int64_t groups = width / GROUP, bytes = group_bytes((int32_t)format), code_bytes = format == Q8 ? 256 : 128;
    for (int64_t g = 0; g < groups; g++) {
        const uint8_t* p = weights + (tile * groups + g) * bytes;
        float scale = load_half(p + code_bytes)[lane];
        float minimum = format == Q4_MIN ? load_half(p + code_bytes + 16)[lane] : 0.0f;
        for (int64_t i = 0; i < GROUP; i++) {
            if (format == Q8) {
                out[g * GROUP + i] = (float)(int8_t)p[32 * (i / 4) + 4 * lane + i % 4] * scale;
                continue;
            }
            int64_t within = i % 16;
            int byte = p[32 * (within / 4) + 4 * lane + within % 4], code = i < 16 ? byte & 15 : byte >> 4;
            out[g * GROUP + i] = format == Q4 ? (float)(code - 8) * scale : (float)code * scale + minimum;
        }
    }
}

// --- dispatch ---

static void turn_and_write(const Op& op, const Context& c, int64_t row) {
    int64_t heads = op.n[0], kv_heads = op.n[1], size = op.n[2];
    float* x = (float*)op.p[0] + row * (heads + 2 * kv_heads) * size;
    const float* turn = c.step->turns + row * size;
    for (int64_t head = 0; head < heads + kv_heads; head++) {
        const float* weight = (const float*)op.p[head < heads ? 3 : 4];
        if (weight) norm_row(x + head * size, weight, size, op.f[0], x + head * size);
        turn_head(x + head * size, turn, size);
    }
    int64_t at = c.step->write_slots[row] * kv_heads * size;
    write_half((uint16_t*)op.p[1] + at, x + heads * size, kv_heads * size);
    write_half((uint16_t*)op.p[2] + at, x + (heads + kv_heads) * size, kv_heads * size);
}

static void attend(const Op& op, const Context& c, int64_t piece) {
    // From the last one on: later rows of a long prompt look at more, and the longest work should start first.
    int64_t kv_heads = op.n[1], task = c.num_blocks * kv_heads - 1 - piece;
    if (c.num_parts) return attend_share(op, c, piece / c.num_parts, piece % c.num_parts);
    attend_rows(op, c, c.rows[task / kv_heads], task % kv_heads);
}

static void measure_read(const Op& op, const Context& c, int64_t piece) {
    int64_t words = op.n[0] / c.worker->num_threads / 256 * 64;
    const float* p = (const float*)op.p[0] + piece * words;
    i8 seen[4] = {};
    for (int64_t i = 0; i + 32 <= words; i += 32)
        for (int k = 0; k < 4; k++) seen[k] ^= bits_of(load(p + i + 8 * k));
    i8 all_seen = (seen[0] ^ seen[1]) ^ (seen[2] ^ seen[3]);
    memcpy((char*)op.p[1] + 64 * piece, &all_seen, 32);
}

static void measure_multiply(const Op& op, int64_t piece) {
#if defined(__AVX2__)
    __m256i sums[6], codes = _mm256_set1_epi8(3), x = _mm256_set1_epi8((char)op.n[1]);
    for (int k = 0; k < 6; k++) sums[k] = _mm256_setzero_si256();
    for (int64_t i = 0; i < op.n[0]; i++)
        for (int k = 0; k < 6; k++) {
            sums[k] = add_small(sums[k], codes, x);
            __asm__("" : "+x"(sums[k]), "+x"(x));
        }
    for (int k = 1; k < 6; k++) sums[0] = _mm256_xor_si256(sums[0], sums[k]);
    _mm256_storeu_si256((__m256i*)((char*)op.p[1] + 64 * piece), sums[0]);
#else
    (void)op, (void)piece;
#endif
}

static int64_t num_pieces(const Op& op, const Context& c) {
    switch (op.kind) {
        case OP_LINEAR: {
            Pieces p = pieces_of(op, c);
            return p.across * p.down;
        }
        case OP_ATTEND: return c.num_blocks * op.n[1] * (c.num_parts ? c.num_parts : 1);
        case OP_READ:
        case OP_MULTIPLY: return c.worker->num_threads;
        default: return (num_rows(op, c) + rows_of_piece(op, c) - 1) / rows_of_piece(op, c);
    }
}

static void run_piece(const Op& op, const Context& c, int64_t piece) {
    switch (op.kind) {
        case OP_EMBED:
            return each_row(op, c, piece, [&](int64_t row) {
                embed_row(op, c.step->tokens[row], (float*)op.p[1] + row * op.n[1]);
            });
        case OP_NORM:
            return each_row(op, c, piece, [&](int64_t row) {
                int64_t from = op.flags & LOGIT_ROWS && op.n[1] ? c.step->logit_rows[row] : row, width = op.n[0];
                float* out = op.p[2] ? (float*)op.p[2] + row * width : (float*)c.worker->scratch;
                norm_row((const float*)op.p[0] + from * width, (const float*)op.p[1], width, op.f[0], out);
                if (op.p[3]) quantize_row(out, row, width, *(const Quantized*)op.p[3]);
            });
        case OP_QUANTIZE:
            return each_row(op, c, piece, [&](int64_t row) {
                quantize_row((const float*)op.p[0] + row * op.n[0], row, op.n[0], *(const Quantized*)op.p[1]);
            });
        case OP_LINEAR: return linear_of_any(op, c, piece);
        case OP_SILU:
            return each_row(op, c, piece, [&](int64_t row) {
                int64_t width = op.n[0];
                const float* x = (const float*)op.p[0] + row * 2 * width;
                float* out = op.p[1] ? (float*)op.p[1] + row * width : (float*)c.worker->scratch;
                gate_row(x, x + width, width, out);
                if (op.p[2]) quantize_row(out, row, width, *(const Quantized*)op.p[2]);
            });
        case OP_TURN_AND_WRITE: return each_row(op, c, piece, [&](int64_t row) { turn_and_write(op, c, row); });
        case OP_ATTEND: return attend(op, c, piece);
        case OP_LARGEST:
            return each_row(op, c, piece, [&](int64_t row) {
                largest_of_row((const float*)op.p[0] + row * op.n[0], op.n[0], (int64_t*)op.p[1] + row,
                               (float*)op.p[2] + row);
            });
        case OP_TOP:
            return each_row(op, c, piece, [&](int64_t row) {
                int64_t num = op.n[1], from = op.flags & LOGIT_ROWS ? c.step->logit_rows[row] : row;
                top_of_row((const float*)op.p[0] + from * op.n[0], op.n[0], ((const float*)op.p[1])[row], num,
                           (uint64_t*)c.worker->scratch, (int64_t*)op.p[2] + row * num, (float*)op.p[3] + row * num);
            });
        case OP_READ: return measure_read(op, c, piece);
        case OP_MULTIPLY: return measure_multiply(op, piece);
        default: return;
    }
}

extern "C" const Kernels FL_KERNELS = {num_pieces, run_piece};
