// Every operator for one instruction set. Compiled several times, each with its own name in FL_KERNELS.
//
// An operator falls into pieces, which the threads of the pool share out; see `Kernels`.
#include "attention.h"
#include "choose.h"
#include "experts.h"
#include "formats.h"
#include "kv.h"
#include "latent.h"
#include "linear.h"
#include "product.h"
#include "program.h"
#include "rows.h"
#include "simd.h"

static inline int64_t num_rows(const Op& op, const Context& c) {
    return (op.flags & LOGIT_ROWS ? c.step->num_logits : c.step->num_rows) * (op.flags & EACH ? op.n[7] : 1);
}

static inline int64_t rows_of_piece(const Op& op, const Context& c) {
    return num_rows(op, c) / (4 * c.worker->num_threads) + 1;
}

template <typename F>
static inline void each_row(const Op& op, const Context& c, int64_t piece, F run) {
    int64_t size = rows_of_piece(op, c), end = (piece + 1) * size, total = num_rows(op, c);
    for (int64_t row = piece * size; row < end && row < total; row++) run(row);
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
    int64_t slot = c.step->write_slots[row];
    write_token(op.n[3], op.p[1], slot, x + heads * size, kv_heads, size);
    write_token(op.n[3], op.p[2], slot, x + (heads + kv_heads) * size, kv_heads, size);
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
            Pieces p = pieces_of(op, num_rows(op, c), c.worker->num_threads);
            return p.across * p.down;
        }
        case OP_EXPERTS:
        case OP_HEADS: return num_expert_pieces(op, c.worker->num_threads);
        case OP_SORT: return 1;
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
                output_values((int32_t)op.n[0], (const uint8_t*)op.p[0], op.n[1], c.step->tokens[row],
                              (float*)op.p[1] + row * op.n[1]);
            });
        case OP_NORM:
            return each_row(op, c, piece, [&](int64_t row) {
                int64_t from = op.flags & LOGIT_ROWS && op.n[1] ? c.step->logit_rows[row] : row, width = op.n[0];
                float* out = op.p[2] ? (float*)op.p[2] + row * width : (float*)c.worker->scratch;
                norm_row((const float*)op.p[0] + from * (op.n[2] ? op.n[2] : width), (const float*)op.p[1], width, op.f[0], out);
                if (op.p[3]) quantize_row(out, row, width, *(const Quantized*)op.p[3]);
            });
        case OP_QUANTIZE:
            return each_row(op, c, piece, [&](int64_t row) {
                quantize_row((const float*)op.p[0] + row * op.n[0], row, op.n[0], *(const Quantized*)op.p[1]);
            });
        case OP_LINEAR: return linear(op, num_rows(op, c), c.worker->num_threads, piece);
        case OP_EXPERTS:
        case OP_HEADS: return multiply_expert(op, c.step->num_rows, c.worker->num_threads, piece);
        case OP_CHOOSE:
            return each_row(op, c, piece, [&](int64_t row) { choose_experts(op, row, c.worker->scratch); });
        case OP_SORT: return sort_by_expert(op, c.step->num_rows);
        case OP_GATHER:
            return each_row(op, c, piece, [&](int64_t row) {
                int64_t bytes = op.n[0], from = ((const int64_t*)op.p[2])[row] / op.n[7];
                memcpy((char*)op.p[1] + row * bytes, (const char*)op.p[0] + from * bytes, (size_t)bytes);
            });
        case OP_COMBINE: return each_row(op, c, piece, [&](int64_t row) { combine_experts(op, row); });
        case OP_LATENT: return each_row(op, c, piece, [&](int64_t row) { turn_latents(op, c, row); });
        case OP_BY_HEAD: return each_row(op, c, piece, [&](int64_t row) { head_by_head(op, row, c.step->num_rows); });
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
        case OP_PACK:
            return each_row(op, c, piece, [&](int64_t tile) {
                int64_t outputs = op.n[0] - tile * TILE, row_bytes = op.n[1];
                pack_tile((const uint8_t*)op.p[0] + tile * TILE * row_bytes, outputs < TILE ? outputs : TILE, row_bytes,
                          op.n[2], op.n[3], (uint8_t*)op.p[1] + tile * TILE * row_bytes);
            });
        case OP_COPY:
            return each_row(op, c, piece, [&](int64_t row) {
                int64_t to = op.flags & TO_SLOTS ? c.step->write_slots[row] : row;
                if (op.flags & ADD_TO_OUTPUT)
                    return add_row((const float*)op.p[0] + row * op.n[0], op.n[0], (float*)op.p[1] + to * op.n[1]);
                memcpy((float*)op.p[1] + to * op.n[1], (const float*)op.p[0] + row * op.n[0], (size_t)op.n[0] * 4);
            });
        case OP_READ: return measure_read(op, c, piece);
        case OP_MULTIPLY: return measure_multiply(op, piece);
        default: return;
    }
}

extern "C" const Kernels FL_KERNELS = {num_pieces, run_piece};
