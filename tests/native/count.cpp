// A fixed small step, for counting its instructions: two layers of a small model, 1 row and then 5, on one thread.
//
// Run under callgrind by `tests/native/test_instructions.py`. Everything that decides the count is fixed here: shapes,
// values, the instruction set (AVX2, which valgrind knows), one thread. Usage: count PART, a name of PARTS or "all".
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

#include "program.h"
#include "simd.h"

extern "C" {
int32_t fl_instruction_sets();
void* fl_pool(int32_t, const int32_t*, int32_t, int32_t);
void fl_end_pool(void*);
int32_t fl_run(void*, const Op*, int64_t, const Step*, uint64_t*, uint64_t);
}

constexpr int64_t HIDDEN = 256, INNER = 512, HEADS = 4, KV_HEADS = 2, SIZE = 64, VOCABULARY = 1000, ROWS = 5;
constexpr int64_t QKV = (HEADS + 2 * KV_HEADS) * SIZE, PAGE = 16, PAGES = 8, HISTORY = 100;

static uint32_t state = 1;
static float value() {
    state = state * 1664525u + 1013904223u;
    return (float)(int32_t)state / 2147483648.0f;
}

template <typename T>
static T* room(int64_t num) {
    T* made = (T*)aligned_alloc(64, ((size_t)num * sizeof(T) + 127) / 64 * 64);
    memset((void*)made, 0, (size_t)num * sizeof(T));
    return made;
}

static float* floats(int64_t num, float scale) {
    float* made = room<float>(num);
    for (int64_t i = 0; i < num; i++) made[i] = value() * scale;
    return made;
}

static Quantized* codes(int64_t width) {
    return new Quantized{room<Group>(ROWS * width / GROUP)};
}

static uint8_t* weight(int32_t format, int64_t outputs, int64_t inputs) {
    int64_t group = format == Q4_1 ? 160 : 272, code_bytes = format == Q4_1 ? 128 : 256;
    int64_t num = outputs / TILE * (inputs / GROUP);
    uint8_t* made = room<uint8_t>(num * group);
    for (int64_t g = 0; g < num; g++)
        for (int64_t i = 0; i < group; i++) made[g * group + i] = (uint8_t)(value() * 127.0f);
    for (int64_t g = 0; g < num; g++)
        for (int64_t i = code_bytes; i < group; i += 2) {
            uint16_t half = float_to_half(value() * 0.01f);
            memcpy(made + g * group + i, &half, 2);
        }
    return made;
}

static Op make(Kind kind, std::vector<int64_t> n, std::vector<const void*> p) {
    Op op = {};
    op.kind = kind;
    for (size_t i = 0; i < n.size(); i++) op.n[i] = n[i];
    for (size_t i = 0; i < p.size(); i++) op.p[i] = (void*)p[i];
    op.f[0] = kind == OP_ATTEND ? 0.125f : 1e-5f;
    return op;
}

static Op product(int32_t format, int64_t outputs, int64_t inputs, Quantized* x, float* out, int32_t flags) {
    Op op = make(OP_LINEAR, {format, outputs, inputs, outputs}, {weight(format, outputs, inputs), x, nullptr, out});
    op.flags = flags;
    return op;
}

int main(int argc, char** argv) {
    const char* part = argc > 1 ? argv[1] : "all";
    if (!(fl_instruction_sets() & 2)) return 3;
    float *x = floats(ROWS * HIDDEN, 1.0f), *qkv = room<float>(ROWS * QKV), *gate = room<float>(ROWS * 2 * INNER);
    float *logits = room<float>(ROWS * VOCABULARY), *best = room<float>(ROWS), *top = room<float>(ROWS * 40);
    float* divisors = room<float>(ROWS);
    int64_t *where = room<int64_t>(ROWS), *places = room<int64_t>(ROWS * 40);
    for (int64_t row = 0; row < ROWS; row++) divisors[row] = 0.5f;
    Quantized *normed = codes(HIDDEN), *attended = codes(HEADS * SIZE), *inner = codes(INNER);
    uint8_t* table = weight(Q8_0, VOCABULARY, HIDDEN);
    float* ones = floats(HIDDEN, 1.0f);

    std::vector<Op> ends = {make(OP_EMBED, {Q8_0, HIDDEN}, {table, x})}, norms, products, attention, gates, choice;
    for (int layer = 0; layer < 2; layer++) {
        int64_t slots = PAGES * PAGE * KV_HEADS * SIZE;
        uint16_t *keys = room<uint16_t>(slots), *values = room<uint16_t>(slots);
        for (int64_t i = 0; i < slots; i++) {
            keys[i] = float_to_half(value());
            values[i] = float_to_half(value());
        }
        norms.push_back(make(OP_NORM, {HIDDEN}, {x, ones, nullptr, normed}));
        products.push_back(product(Q4_1, QKV, HIDDEN, normed, qkv, 0));
        attention.push_back(make(OP_TURN_AND_WRITE, {HEADS, KV_HEADS, SIZE}, {qkv, keys, values}));
        attention.push_back(make(OP_ATTEND, {HEADS, KV_HEADS, SIZE, QKV, 0}, {qkv, keys, values, nullptr, attended}));
        products.push_back(product(Q4_1, HIDDEN, HEADS * SIZE, attended, x, ADD_TO_OUTPUT));
        products.push_back(product(Q4_1, 2 * INNER, HIDDEN, normed, gate, 0));
        gates.push_back(make(OP_SILU, {INNER}, {gate, nullptr, inner}));
        products.push_back(product(Q4_1, HIDDEN, INNER, inner, x, ADD_TO_OUTPUT));
    }
    Op head = product(Q8_0, VOCABULARY, HIDDEN, normed, logits, 0);
    ends.push_back(head);
    choice.push_back(make(OP_LARGEST, {VOCABULARY}, {logits, where, best}));
    choice.push_back(make(OP_TOP, {VOCABULARY, 40}, {logits, divisors, places, top}));

    int64_t tokens[ROWS] = {3, 1, 4, 1, 5}, slots[ROWS], logit_rows[ROWS] = {0, 1, 2, 3, 4}, pages[PAGES];
    float* turns = floats(ROWS * SIZE, 1.0f);
    for (int64_t i = 0; i < PAGES; i++) pages[i] = i;
    void* pool = fl_pool(1, nullptr, 2, 100);
    int wrong = 0;
    for (int64_t rows : {(int64_t)1, ROWS}) {
        int64_t start = HISTORY, count = rows;
        for (int64_t row = 0; row < rows; row++) slots[row] = start + row;
        Step step = {rows, rows, 1, PAGE, PAGES, tokens, turns, slots, logit_rows, &start, &count, pages};
        auto run = [&](const char* name, const std::vector<Op>& ops) {
            if (strcmp(part, "all") && strcmp(part, name)) return;
            wrong |= fl_run(pool, ops.data(), (int64_t)ops.size(), &step, nullptr, 0);
        };
        run("norms", norms);
        run("products", products);
        run("attention", attention);
        run("gates", gates);
        run("ends", ends);
        run("choice", choice);
    }
    fl_end_pool(pool);
    return wrong;
}
