// The plain C interface of the library, shared by its sources and mirrored by `ops/cpu/library.py`,
// which compares its mirror with `interface.cpp` when it loads the library.
//
// A program is an array of `Op`s that all threads of a pool run together, one after the other; a `Step`
// holds what changes from one run to the next. Invariant: the bits of a row depend on that row alone, never on
// the number of rows, on the thread that computes it, or on how rows are blocked.
#pragma once
#include <stddef.h>
#include <stdint.h>

enum Kind : int32_t {
    OP_EMBED = 0,
    OP_NORM = 1,
    OP_QUANTIZE = 2,
    OP_LINEAR = 3,
    OP_SILU = 4,
    OP_TURN_AND_WRITE = 5,
    OP_ATTEND = 6,
    OP_LARGEST = 7,
    OP_READ = 8,     // for measuring: reads memory and does nothing with it
    OP_MULTIPLY = 9,  // for measuring: integer products out of registers
    OP_TOP = 10,     // the first so many of a row
    OP_EXPERTS = 11,  // products of rows, sorted by expert, with the weights of their experts
    OP_PACK = 12,     // a file's blocks into tiles; the rows of its step are tiles
    OP_COPY = 13,     // rows into wider rows, or to the step's slots
    OP_CHOOSE = 14,   // the experts of each row; see `experts.h`
    OP_SORT = 15,     // rows by expert
    OP_GATHER = 16,   // rows in that order
    OP_COMBINE = 17,  // the weighed sum of what a row's experts gave
    OP_LATENT = 18,   // see `latent.h`
    OP_BY_HEAD = 19,
    OP_HEADS = 20,    // products of rows, head by head, with the weights of heads
    NUM_OPERATORS = 21
};

// By the names that files have for them: `facts/checkpoint/formats.py`. How they lie here: `formats.h`.
enum Format : int32_t {
    Q4_1 = 0,
    Q4_0 = 1,
    Q8_0 = 2,
    F32 = 3,
    F16 = 4,
    BF16 = 5,
    Q4_K = 6,
    Q6_K = 7,
    INT4_ZERO = 8,
    FP8 = 9,   // e4m3
    FP4 = 10   // e2m1
};

// How the pages hold keys and values; see `kv.h`.
enum KVType : int64_t { KV_HALF = 0, KV_BFLOAT = 1, KV_CODES = 2 };

// EACH: n[7] rows for each of the step's.
enum Flag : int32_t { ADD_TO_OUTPUT = 1, LOGIT_ROWS = 2, TO_SLOTS = 4, EACH = 8 };

constexpr int TILE = 8;
constexpr int GROUP = 32;
constexpr int SPAN = 64;           // positions of an attention block: fixed, so that a row's sums are too
constexpr int PART = 128;          // positions that are summed apart, so that threads can share a history
constexpr int SHARED_ROWS = 8;     // most rows of a block whose history is shared
constexpr int ATTENTION_ROWS = 32;  // rows of a sequence that share the conversion of a block of keys

// A group of 32 activations as integers. The largest of them is kept apart, in 16 bits: it would coarsen the scale of
// the others. All floats but the scales hold whole numbers.
struct alignas(64) Group {
    int8_t codes[GROUP];  // 0 at the outlier's place
    float scale;
    float scaled_sum;  // scale * sum
    float sum;         // of all integers, the outlier among them
    float first_sum;   // of the first 16
    float outlier;
    int32_t place;  // of the outlier
    int32_t small_mask;   // of its weight within a byte of two 4-bit codes
    float small_outlier;  // for its weight as it is within that byte, which may be 16 times too large
};

// Activations as integers: groups [rows, width / 32].
struct Quantized {
    Group* groups;
};

struct Op {
    int32_t kind;
    int32_t flags;
    int64_t n[8];
    float f[2];
    void* p[8];
    uint64_t label;  // what the black box shows while the operator runs
};

struct Step {
    int64_t num_rows;
    int64_t num_logits;
    int64_t num_sequences;
    int64_t page_size;
    int64_t table_width;          // pages in a row of `pages`
    const int64_t* tokens;        // [rows]
    const float* turns;           // [rows, D/2, 2]
    const int64_t* write_slots;   // [rows]
    const int64_t* logit_rows;    // [logits]
    const int64_t* starts;        // [sequences] position of the first row
    const int64_t* counts;        // [sequences] number of rows
    const int64_t* pages;         // [sequences, table_width]
    // [rows, branch_width], or null: where a node of a tree of drafts finds its sequence's positions from the first row
    // on, up to itself: their places in the pages, then -1. Nothing but -1 for a row of no tree.
    const int64_t* branches;
    int64_t branch_width;
};

// Rows of one sequence that are attended together, for every KV head. `end` is behind the last position of any; of a
// tree, `position` is that of its root, otherwise that of the first row.
struct Rows {
    int64_t sequence, first_row, position, count, end;
};

struct Worker {
    int32_t thread, num_threads;
    void* scratch;
    size_t scratch_bytes;
};

// How far an operator is, in pieces: handed out, and done.
struct alignas(16) Progress {
    int64_t next, done;
};

struct Context {
    const Step* step;
    const Rows* rows;
    int64_t num_blocks;
    Worker* worker;
    // Of attention whose histories are shared: results of the parts, and how many of each block and KV head are there.
    float* partials;
    int32_t* arrived;
    int64_t num_parts;  // of the longest history; 0: histories are not shared
};

// `num_pieces` says into how many pieces an operator falls, `run` does one; the result of a piece does not depend
// on who does it, or when.
struct Kernels {
    int64_t (*num_pieces)(const Op&, const Context&);
    void (*run)(const Op&, const Context&, int64_t piece);
};
