// Random shapes through every operator of the native library, on every instruction set that this machine has.
//
// Built with sanitizers by `make sanitize`. All buffers have exactly the size the contract demands, so that a read
// or a write beside them is an error; results are compared with plain loops in double, and each row's bits with
// those of the row alone. Usage: fuzz ROUNDS [SEED]
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <random>
#include <vector>

#include "program.h"
#include "simd.h"

extern "C" {
int32_t fl_instruction_sets();
void* fl_pool(int32_t, const int32_t*, int32_t, int32_t);
void fl_end_pool(void*);
int32_t fl_run(void*, const Op*, int64_t, const Step*, uint64_t*, uint64_t);
}

static std::mt19937_64 chance;
static int64_t between(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(chance); }
static float any_value() { return std::normal_distribution<float>(0.0f, 1.0f)(chance); }

static std::vector<float> values(int64_t num) {
    std::vector<float> made((size_t)num);
    for (float& value : made) value = any_value() * (between(0, 30) ? 1.0f : 300.0f);
    return made;
}

static void require(bool holds, const char* what) {
    if (holds) return;
    fprintf(stderr, "failed: %s\n", what);
    abort();
}

static bool close_to(double got, double wanted, double size) { return fabs(got - wanted) <= 2e-5 * (size + 1e-3); }

struct Coded {
    std::vector<Group> groups;
    Quantized view;
    Coded(int64_t rows, int64_t width) : groups((size_t)(rows * width / GROUP)), view{groups.data()} {}
    const Group& of(size_t at) const { return groups[at / GROUP]; }
    double value(size_t at) const {
        const Group& group = of(at);
        double code = (size_t)group.place == at % GROUP ? group.outlier : group.codes[at % GROUP];
        return code * (double)group.scale;
    }
};

static Op make(Kind kind, std::vector<int64_t> n, std::vector<const void*> p) {
    Op op = {};
    op.kind = kind;
    for (size_t i = 0; i < n.size(); i++) op.n[i] = n[i];
    for (size_t i = 0; i < p.size(); i++) op.p[i] = (void*)p[i];
    return op;
}

static void run(void* pool, const std::vector<Op>& ops, const Step& step) {
    uint64_t counter = 0;
    require(fl_run(pool, ops.data(), (int64_t)ops.size(), &step, &counter, 7) == 0, "memory");
    require(counter == 7, "the counter of steps");
}

// A packed weight with its exact values [outputs, inputs].
struct Weight {
    int32_t format;
    int64_t outputs, inputs;
    std::vector<uint8_t> packed;
    std::vector<double> exact;
};

static void set_half(uint8_t* p, float value, double* exact) {
    uint16_t half = float_to_half(value);
    memcpy(p, &half, 2);
    *exact = half_to_float(half);
}

static void fill_group(Weight& w, int64_t tile, int64_t g, uint8_t* p) {
    int64_t code_bytes = w.format == Q8_0 ? 256 : 128;
    for (int64_t i = 0; i < code_bytes; i++) p[i] = (uint8_t)between(0, 255);
    for (int64_t lane = 0; lane < TILE; lane++) {
        double scale, minimum = 0.0;
        set_half(p + code_bytes + 2 * lane, any_value() * 0.01f, &scale);
        if (w.format == Q4_1) set_half(p + code_bytes + 16 + 2 * lane, any_value() * 0.1f, &minimum);
        if (w.format == INT4_ZERO) {
            set_half(p + code_bytes + 16 + 2 * lane, (float)between(0, 16), &minimum);
            minimum *= -scale;
        }
        int64_t output = tile * TILE + lane;
        for (int64_t i = 0; i < GROUP && output < w.outputs; i++) {
            double code;
            if (w.format == Q8_0) {
                code = (int8_t)p[32 * (i / 4) + 4 * lane + i % 4];
            } else {
                int byte = p[32 * (i % 16 / 4) + 4 * lane + i % 4];
                code = (i < 16 ? byte & 15 : byte >> 4) - (w.format == Q4_0 ? 8 : 0);
            }
            w.exact[(size_t)(output * w.inputs + g * GROUP + i)] = code * scale + minimum;
        }
    }
}

static bool has_blocks(int32_t format) { return format == Q4_K || format == Q6_K; }
static bool has_groups(int32_t format) { return format <= Q8_0 || format == INT4_ZERO; }
static bool has_scales(int32_t format) { return format == FP8 || format == FP4; }
static bool has_codes(int32_t format) { return has_groups(format) || has_blocks(format); }

// A float of 8 or 4 bits: sign, exponent, `digits` bits behind the point.
static double small_float(int code, int bits, int digits, int bias) {
    int exponent = (code >> digits) & ((1 << (bits - 1 - digits)) - 1), rest = code & ((1 << digits) - 1);
    double size = exponent ? ldexp(1.0 + ldexp(rest, -digits), exponent - bias) : ldexp(rest, 1 - bias - digits);
    return code >> (bits - 1) ? -size : size;
}

// A group of small floats of 8 outputs, whose scales come last.
static void fill_scaled(Weight& w, int64_t tile, int64_t g, uint8_t* p) {
    bool is_eight = w.format == FP8;
    int64_t size = is_eight ? 32 : 16, codes = is_eight ? 256 : 64;
    for (int64_t i = 0; i < codes; i++) {
        do p[i] = (uint8_t)between(0, 255);
        while (is_eight && (p[i] & 127) == 127);  // not a number
    }
    for (int64_t lane = 0; lane < TILE; lane++) {
        float scale = any_value() * 0.01f;
        memcpy(p + codes + 4 * lane, &scale, 4);
        int64_t output = tile * TILE + lane;
        for (int64_t i = 0; i < size && output < w.outputs; i++) {
            int byte = is_eight ? p[TILE * i + lane] : p[TILE * (i / 2) + lane] >> (4 * (i % 2)) & 15;
            double value = is_eight ? small_float(byte, 8, 3, 7) : small_float(byte, 4, 1, 1);
            w.exact[(size_t)(output * w.inputs + g * size + i)] = value * scale;
        }
    }
}

// A block of 8 groups and 8 outputs of a nested format.
static void fill_block(Weight& w, int64_t tile, int64_t block, uint8_t* p) {
    bool is_six = w.format == Q6_K;
    int64_t head = is_six ? 16 : 32, bytes = is_six ? 208 : 144;
    for (int64_t i = 0; i < head + 8 * bytes; i++) p[i] = (uint8_t)between(0, 255);
    for (int64_t lane = 0; lane < TILE; lane++) {
        double scale, minimum = 0.0;
        set_half(p + 2 * lane, any_value() * 0.001f, &scale);
        if (!is_six) set_half(p + 16 + 2 * lane, any_value() * 0.01f, &minimum);
        int64_t output = tile * TILE + lane;
        for (int64_t i = 0; i < 256 && output < w.outputs; i++) {
            const uint8_t* group = p + head + i / 32 * bytes;
            int64_t half = i % 32 / 16, quad = i % 16 / 4, at = 4 * lane + i % 4;
            int code = half ? group[32 * quad + at] >> 4 : group[32 * quad + at] & 15;
            double value;
            if (is_six) {
                int upper = group[128 + 32 * half + at] >> (2 * quad) & 3;
                value = scale * (int8_t)group[192 + 8 * half + lane] * (code + 16 * upper - 32);
            } else {
                value = scale * group[128 + lane] * code - minimum * group[136 + lane];
            }
            w.exact[(size_t)(output * w.inputs + block * 256 + i)] = value;
        }
    }
}

static Weight make_weight(int32_t format) {
    Weight w;
    w.format = format;
    w.outputs = between(1, 70);
    w.inputs = has_blocks(format)   ? 256 * between(1, 2)
               : has_groups(format) ? GROUP * between(1, 7)
               : has_scales(format) ? (format == FP8 ? 32 : 16) * between(1, 7)
                                    : between(1, 90);
    w.exact.resize((size_t)(w.outputs * w.inputs));
    int64_t tiles = (w.outputs + TILE - 1) / TILE;
    if (has_blocks(format)) {
        int64_t blocks = w.inputs / 256, bytes = format == Q4_K ? 1184 : 1680;
        w.packed.resize((size_t)(tiles * blocks * bytes));
        for (int64_t i = 0; i < tiles * blocks; i++) fill_block(w, i / blocks, i % blocks, w.packed.data() + i * bytes);
        return w;
    }
    if (has_scales(format)) {
        int64_t groups = w.inputs / (format == FP8 ? 32 : 16), bytes = format == FP8 ? 288 : 96;
        w.packed.resize((size_t)(tiles * groups * bytes));
        for (int64_t i = 0; i < tiles * groups; i++) fill_scaled(w, i / groups, i % groups, w.packed.data() + i * bytes);
        return w;
    }
    if (has_groups(format)) {
        int64_t groups = w.inputs / GROUP, bytes = format == Q8_0 ? 272 : format == Q4_0 ? 144 : 160;
        w.packed.resize((size_t)(tiles * groups * bytes));
        for (int64_t tile = 0; tile < tiles; tile++)
            for (int64_t g = 0; g < groups; g++) fill_group(w, tile, g, w.packed.data() + (tile * groups + g) * bytes);
        return w;
    }
    w.packed.resize((size_t)(tiles * TILE * w.inputs * (format == F32 ? 4 : 2)));
    for (int64_t output = 0; output < w.outputs; output++)
        for (int64_t i = 0; i < w.inputs; i++) {
            int64_t at = (output / TILE * w.inputs + i) * TILE + output % TILE;
            float value = any_value();
            uint32_t word;
            memcpy(&word, &value, 4);
            double& exact = w.exact[(size_t)(output * w.inputs + i)];
            if (format == F16) {
                set_half(w.packed.data() + 2 * at, value, &exact);
            } else {
                if (format == BF16) word &= 0xffff0000u;
                uint16_t high = (uint16_t)(word >> 16);
                memcpy(&value, &word, 4);
                exact = value;
                memcpy(w.packed.data() + (format == F32 ? 4 : 2) * at, format == F32 ? (void*)&word : (void*)&high,
                       format == F32 ? 4 : 2);
            }
        }
    return w;
}

static std::vector<float> product(void* pool, const Weight& w, const float* x, int64_t rows, const float* bias, bool adds) {
    std::vector<float> out((size_t)(rows * w.outputs), adds ? 1.5f : NAN);
    Coded coded(rows, has_codes(w.format) ? w.inputs : GROUP);
    std::vector<Op> ops;
    if (has_codes(w.format)) ops.push_back(make(OP_QUANTIZE, {w.inputs}, {x, &coded.view}));
    Op op = make(OP_LINEAR, {w.format, w.outputs, w.inputs, w.outputs}, {w.packed.data(), &coded.view, x, out.data(), bias});
    op.flags = adds ? ADD_TO_OUTPUT : 0;
    ops.push_back(op);
    Step step = {};
    step.num_rows = rows;
    run(pool, ops, step);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t o = 0; o < w.outputs; o++) {
            double wanted = (bias ? bias[o] : 0.0) + (adds ? 1.5 : 0.0), size = fabs(wanted);
            for (int64_t i = 0; i < w.inputs; i++) {
                double value = x[r * w.inputs + i];
                if (has_codes(w.format)) {
                    size_t at = (size_t)(r * w.inputs + i);
                    require(fabs(value - coded.value(at)) <= 0.51 * coded.of(at).scale, "codes");
                    value = coded.value(at);
                }
                double term = w.exact[(size_t)(o * w.inputs + i)] * value;
                wanted += term;
                size += fabs(term);
            }
            require(close_to(out[(size_t)(r * w.outputs + o)], wanted, size), "product");
        }
    return out;
}

static void fuzz_product(void* pool) {
    Weight w = make_weight((int32_t)between(0, FP4));
    int64_t rows = between(0, 3) ? between(1, 12) : between(1, 150);
    std::vector<float> x = values(rows * w.inputs), bias = values(w.outputs);
    bool adds = between(0, 1);
    const float* b = between(0, 1) ? bias.data() : nullptr;
    std::vector<float> all_rows = product(pool, w, x.data(), rows, b, adds);
    int64_t row = between(0, rows - 1);
    std::vector<float> alone(x.begin() + row * w.inputs, x.begin() + (row + 1) * w.inputs);
    std::vector<float> one = product(pool, w, alone.data(), 1, b, adds);
    require(memcmp(one.data(), all_rows.data() + row * w.outputs, one.size() * 4) == 0, "bits of a row of a product");
    int64_t token = between(0, w.outputs - 1);
    std::vector<float> embedded((size_t)w.inputs);
    Step step = {};
    step.num_rows = 1;
    step.tokens = &token;
    run(pool, {make(OP_EMBED, {w.format, w.inputs}, {w.packed.data(), embedded.data()})}, step);
    for (int64_t i = 0; i < w.inputs; i++)
        require(close_to(embedded[(size_t)i], w.exact[(size_t)(token * w.inputs + i)], fabs(w.exact[(size_t)(token * w.inputs + i)])), "embedding");
}

// Rows of some experts, many of which have none: the bits of the ordinary products.
static void fuzz_experts(void* pool) {
    Weight w = make_weight((int32_t)between(0, FP4));
    int64_t experts = between(1, 9), each = (int64_t)w.packed.size();
    std::vector<uint8_t> packed;
    std::vector<int64_t> starts = {0};
    std::vector<Weight> of;
    for (int64_t e = 0; e < experts; e++) {
        of.push_back(w);
        for (int64_t i = 0; i < each / 32 * 16; i++) of.back().packed[(size_t)between(0, each - 1)] ^= 1;
        packed.insert(packed.end(), of.back().packed.begin(), of.back().packed.end());
        starts.push_back(starts.back() + (between(0, 1) ? 0 : between(0, 4) ? between(1, 9) : between(60, 70)));
    }
    int64_t rows = starts.back();
    if (rows == 0) return;
    std::vector<float> x = values(rows * w.inputs), out((size_t)(rows * w.outputs), NAN);
    Coded coded(rows, has_codes(w.format) ? w.inputs : GROUP);
    Step step = {};
    step.num_rows = rows;
    std::vector<Op> ops;
    if (has_codes(w.format)) ops.push_back(make(OP_QUANTIZE, {w.inputs}, {x.data(), &coded.view}));
    std::vector<int64_t> sizes = {w.format, w.outputs, w.inputs, w.outputs, experts};
    ops.push_back(make(OP_EXPERTS, sizes, {packed.data(), &coded.view, x.data(), out.data(), nullptr, starts.data()}));
    run(pool, ops, step);
    for (int64_t e = 0; e < experts; e++) {
        int64_t first = starts[(size_t)e], count = starts[(size_t)e + 1] - first;
        if (count == 0) continue;
        std::vector<float> alone((size_t)(count * w.outputs));
        std::vector<Op> single;
        step.num_rows = count;
        if (has_codes(w.format)) single.push_back(make(OP_QUANTIZE, {w.inputs}, {x.data() + first * w.inputs, &coded.view}));
        single.push_back(make(OP_LINEAR, {w.format, w.outputs, w.inputs, w.outputs},
                              {of[(size_t)e].packed.data(), &coded.view, x.data() + first * w.inputs, alone.data()}));
        run(pool, single, step);
        require(memcmp(alone.data(), out.data() + first * w.outputs, alone.size() * 4) == 0, "bits of an expert's rows");
    }
}

// Rows that go to experts which give them back: the weights of a row's experts add up to the scale.
static void fuzz_routing(void* pool) {
    int64_t rows = between(1, 40), groups = between(1, 5), size = between(1, 9), experts = groups * size;
    int64_t best = between(1, groups), chosen = between(1, best * size), width = between(1, 40);
    std::vector<float> scores = values(rows * experts), bias = values(experts), x = values(rows * width);
    std::vector<float> weights((size_t)(rows * chosen)), moved((size_t)(rows * chosen * width)), out((size_t)(rows * width), NAN);
    std::vector<int64_t> taken((size_t)(rows * chosen)), order = taken, place = taken, starts((size_t)experts + 1);
    Op choose = make(OP_CHOOSE, {experts, chosen, between(0, 1), groups, best, between(1, size), 1},
                     {scores.data(), between(0, 1) ? bias.data() : nullptr, taken.data(), weights.data()});
    choose.f[0] = 2.5f;
    Op gather = make(OP_GATHER, {4 * width, 0, 0, 0, 0, 0, 0, chosen}, {x.data(), moved.data(), order.data()});
    gather.flags = EACH;
    Step step = {};
    step.num_rows = rows;
    run(pool, {choose, make(OP_SORT, {experts, chosen}, {taken.data(), starts.data(), order.data(), place.data()}), gather,
               make(OP_COMBINE, {width, chosen, 0, experts}, {moved.data(), place.data(), weights.data(), out.data(), starts.data()})}, step);
    require(starts[0] == 0 && starts[(size_t)experts] == rows * chosen, "starts of experts");
    for (int64_t e = 0; e < experts; e++)
        for (int64_t i = starts[(size_t)e]; i < starts[(size_t)e + 1]; i++)
            require(taken[(size_t)order[(size_t)i]] == e && place[(size_t)order[(size_t)i]] == i, "rows by expert");
    for (int64_t r = 0; r < rows; r++) {
        double total = 0.0;
        for (int64_t k = 0; k < chosen; k++) {
            total += weights[(size_t)(r * chosen + k)];
            for (int64_t j = 0; j < k; j++)
                require(taken[(size_t)(r * chosen + k)] != taken[(size_t)(r * chosen + j)], "different experts");
        }
        for (int64_t i = 0; i < width; i++) {
            double value = x[(size_t)(r * width + i)];
            require(close_to(out[(size_t)(r * width + i)], value * total, fabs(value) * 2.5), "what experts give");
        }
    }
}

// Heads whose products are those of an ordinary product, from rows that lie head by head.
static void fuzz_heads(void* pool) {
    Weight w = make_weight((int32_t)between(F32, BF16));
    int64_t rows = between(1, 70), heads = between(1, 5), wide = heads * w.outputs + between(0, 3);
    std::vector<float> x = values(rows * heads * w.inputs), moved(x.size()), out((size_t)(rows * wide), NAN);
    std::vector<uint8_t> packed;
    for (int64_t h = 0; h < heads; h++) packed.insert(packed.end(), w.packed.begin(), w.packed.end());
    Step step = {};
    step.num_rows = rows;
    Op product = make(OP_HEADS, {w.format, w.outputs, w.inputs, wide, heads, w.outputs},
                      {packed.data(), nullptr, moved.data(), out.data()});
    run(pool, {make(OP_BY_HEAD, {heads, w.inputs}, {x.data(), moved.data()}), product}, step);
    std::vector<float> alone((size_t)(rows * heads * w.outputs));
    step.num_rows = rows * heads;
    run(pool, {make(OP_LINEAR, {w.format, w.outputs, w.inputs, w.outputs}, {w.packed.data(), nullptr, x.data(), alone.data()})}, step);
    for (int64_t r = 0; r < rows; r++)
        require(memcmp(&alone[(size_t)(r * heads * w.outputs)], &out[(size_t)(r * wide)], (size_t)(heads * w.outputs) * 4) == 0,
                "bits of a head's rows");
}

static void fuzz_rows(void* pool) {
    int64_t rows = between(1, 40), width = between(1, 200);
    std::vector<float> x = values(rows * width), weight = values(width), out((size_t)(rows * width));
    Step step = {};
    step.num_rows = rows;
    Op norm = make(OP_NORM, {width}, {x.data(), weight.data(), out.data()});
    norm.f[0] = 1e-5f;
    std::vector<float> gates = values(rows * 2 * width), gated((size_t)(rows * width)), best((size_t)rows);
    std::vector<int64_t> where((size_t)rows);
    run(pool, {norm, make(OP_SILU, {width}, {gates.data(), gated.data()}), make(OP_LARGEST, {width}, {x.data(), where.data(), best.data()})}, step);
    for (int64_t r = 0; r < rows; r++) {
        double squares = 0.0;
        for (int64_t i = 0; i < width; i++) squares += (double)x[(size_t)(r * width + i)] * x[(size_t)(r * width + i)];
        for (int64_t i = 0; i < width; i++) {
            size_t at = (size_t)(r * width + i);
            double wanted = x[at] / sqrt(squares / (double)width + 1e-5) * weight[(size_t)i];
            require(close_to(out[at], wanted, fabs(wanted)), "norm");
            double gate = gates[(size_t)(r * 2 * width + i)], up = gates[(size_t)(r * 2 * width + width + i)];
            require(close_to(gated[at], gate / (1.0 + exp(-gate)) * up, fabs(gate * up)), "gated silu");
            require(x[at] <= best[(size_t)r] && (x[at] < best[(size_t)r] || i >= where[(size_t)r]), "largest");
        }
    }
}

static int64_t row_bytes(int64_t type, int64_t size) { return type == KV_CODES ? size + 8 : 2 * size; }

static double stored_value(int64_t type, const uint8_t* row, int64_t size, int64_t i) {
    float scale;
    uint16_t half;
    if (type == KV_CODES) {
        int16_t outlier;
        uint16_t place;
        memcpy(&scale, row + size, 4);
        memcpy(&outlier, row + size + 4, 2);
        memcpy(&place, row + size + 6, 2);
        return (double)((i == place ? (float)outlier : (float)(int8_t)row[i]) * scale);
    }
    memcpy(&half, row + 2 * i, 2);
    if (type == KV_HALF) return half_to_float(half);
    uint32_t word = (uint32_t)half << 16;
    memcpy(&scale, &word, 4);
    return scale;
}

struct Attention {
    int64_t heads, kv_heads, size, window, page_size, num_pages, type;
    int64_t latent = 0;  // of latent attention: the size of a value, the beginning of the one row that a slot has
    int64_t pool_heads() const { return latent ? 1 : kv_heads; }
    int64_t out_size() const { return latent ? latent : size; }
    const std::vector<uint8_t>& value_rows() const { return latent ? keys : values; }
    std::vector<uint8_t> keys, values;
    std::vector<int64_t> pages, starts, counts, branches;  // branches: none without trees
    int64_t table_width, branch_width = 0;
};

static std::vector<float> attend(void* pool, const Attention& a, const float* q, int64_t rows, const int64_t* pages,
                                 const std::vector<int64_t>& starts, const std::vector<int64_t>& counts) {
    std::vector<float> out((size_t)(rows * a.heads * a.out_size()), NAN);
    Op op = make(OP_ATTEND, {a.heads, a.kv_heads, a.size, a.heads * a.size, a.window, a.type, a.latent}, {q, a.keys.data(), a.value_rows().data(), out.data()});
    op.f[0] = 1.0f / sqrtf((float)a.size);
    Step step = {};
    step.num_rows = rows;
    step.num_sequences = (int64_t)starts.size();
    step.page_size = a.page_size;
    step.table_width = a.table_width;
    step.starts = starts.data();
    step.counts = counts.data();
    step.pages = pages;
    if (a.branch_width) {
        step.branches = a.branches.data();
        step.branch_width = a.branch_width;
    }
    run(pool, {op}, step);
    return out;
}

static void check_attention(const Attention& a, const float* q, const float* got, int64_t sequence, int64_t position) {
    const int64_t* pages = a.pages.data() + sequence * a.table_width;
    int64_t first = a.window && position + 1 > a.window ? position + 1 - a.window : 0;
    for (int64_t head = 0; head < a.heads; head++) {
        int64_t kv = a.latent ? 0 : head / (a.heads / a.kv_heads);
        std::vector<double> weights;
        double total = 0.0, most = -INFINITY;
        auto at = [&](int64_t p) { return ((pages[p / a.page_size] * a.page_size + p % a.page_size) * a.pool_heads() + kv) * row_bytes(a.type, a.size); };
        for (int64_t p = first; p <= position; p++) {
            double score = 0.0;
            for (int64_t i = 0; i < a.size; i++) score += (double)q[head * a.size + i] * stored_value(a.type, a.keys.data() + at(p), a.size, i);
            weights.push_back(score / sqrt((double)a.size));
            most = fmax(most, weights.back());
        }
        for (double& weight : weights) total += weight = exp(weight - most);
        for (int64_t i = 0; i < a.out_size(); i++) {
            double wanted = 0.0;
            for (int64_t p = first; p <= position; p++) wanted += weights[(size_t)(p - first)] / total * stored_value(a.type, a.value_rows().data() + at(p), a.size, i);
            require(close_to(got[head * a.out_size() + i], wanted, 3.0), "attention");
        }
    }
}

// Writes every slot of the pool by the operator; what is stored is close to what was given.
static void fill_pool(void* pool, Attention& a) {
    int64_t slots = a.num_pages * a.page_size, each = row_bytes(a.type, a.size);
    a.keys.resize((size_t)(slots * a.kv_heads * each));
    a.values.resize(a.keys.size());
    std::vector<float> turns((size_t)(slots * a.size)), qkv;
    for (size_t i = 0; i < turns.size(); i += 2) turns[i] = 1.0f;
    for (int64_t i = slots * (a.heads + 2 * a.kv_heads) * a.size; i > 0; i--) qkv.push_back(any_value());
    std::vector<int64_t> places;
    for (int64_t slot = 0; slot < slots; slot++) places.push_back(slots - 1 - slot);
    Step step = {};
    step.num_rows = slots;
    step.turns = turns.data();
    step.write_slots = places.data();
    run(pool, {make(OP_TURN_AND_WRITE, {a.heads, a.kv_heads, a.size, a.type}, {qkv.data(), a.keys.data(), a.values.data()})}, step);
    double share = a.type == KV_HALF ? 0x1p-11 : a.type == KV_BFLOAT ? 0x1p-8 : 0.51 / 127.0;
    for (int64_t slot = 0; slot < slots; slot++)
        for (int64_t head = 0; head < 2 * a.kv_heads; head++) {
            const float* given = qkv.data() + (slot * (a.heads + 2 * a.kv_heads) + a.heads + head) * a.size;
            const std::vector<uint8_t>& stored = head < a.kv_heads ? a.keys : a.values;
            const uint8_t* row = stored.data() + (places[(size_t)slot] * a.kv_heads + head % a.kv_heads) * each;
            double most = 0.0;
            for (int64_t i = 0; i < a.size; i++) most = fmax(most, fabs((double)given[i]));
            for (int64_t i = 0; i < a.size; i++) {
                double size = a.type == KV_CODES ? most : fabs((double)given[i]);
                require(fabs(stored_value(a.type, row, a.size, i) - given[i]) <= share * size + 1e-7, "a stored key or value");
            }
        }
}

static Attention any_attention() {
    Attention a;
    a.kv_heads = between(1, 3);
    a.heads = a.kv_heads * between(1, 4);
    a.size = between(0, 1) ? between(1, 20) * 2 : 16 * between(1, 6);
    a.window = between(0, 2) ? 0 : between(1, 100);
    a.page_size = between(1, 20);
    a.type = between(KV_HALF, KV_CODES);
    return a;
}

static void fuzz_attention(void* pool) {
    Attention a = any_attention();
    int64_t sequences = between(1, 4);
    int64_t rows = 0, longest = 0;
    for (int64_t s = 0; s < sequences; s++) {
        a.starts.push_back(between(0, 1) ? between(0, 150) : 0);
        a.counts.push_back(between(0, 1) ? 1 : between(1, 100));
        rows += a.counts.back();
        longest = std::max(longest, a.starts.back() + a.counts.back());
    }
    a.table_width = (longest + a.page_size - 1) / a.page_size;
    a.num_pages = sequences * a.table_width;
    for (int64_t page = 0; page < a.num_pages; page++) a.pages.push_back(a.num_pages - 1 - page);
    bool is_latent = between(0, 2) == 0;
    if (is_latent) a.kv_heads = 1;
    fill_pool(pool, a);
    if (is_latent) {
        a.latent = between(1, a.size);
        for (a.kv_heads = between(1, a.heads); a.heads % a.kv_heads;) a.kv_heads--;  // shares of the heads
    }
    std::vector<float> q = values(rows * a.heads * a.size);
    std::vector<float> out = attend(pool, a, q.data(), rows, a.pages.data(), a.starts, a.counts);
    int64_t width = a.heads * a.size, out_width = a.heads * a.out_size();
    for (int64_t s = 0, row = 0; s < sequences; row += a.counts[(size_t)s++]) {
        int64_t within = between(0, a.counts[(size_t)s] - 1), position = a.starts[(size_t)s] + within;
        const float* mine = q.data() + (row + within) * width;
        check_attention(a, mine, out.data() + (row + within) * out_width, s, position);
        std::vector<float> alone(mine, mine + width);
        std::vector<float> one = attend(pool, a, alone.data(), 1, a.pages.data() + s * a.table_width, {position}, {1});
        require(memcmp(one.data(), out.data() + (row + within) * out_width, (size_t)out_width * 4) == 0, "bits of an attended row");
    }
}

// A tree beside a chunk: each node has the bits of a row whose branch lies in order, in pages of one position.
static void fuzz_trees(void* pool) {
    Attention a = any_attention();
    a.starts = {between(0, 200), between(0, 60)};
    a.counts = {between(2, 64), between(1, 40)};
    if (between(0, 1)) {
        std::swap(a.starts[0], a.starts[1]);
        std::swap(a.counts[0], a.counts[1]);
    }
    int64_t tree = between(0, 1), rows = a.counts[0] + a.counts[1], first = tree ? a.counts[0] : 0;
    a.branch_width = between(1, 8);
    a.branches.assign((size_t)(rows * a.branch_width), -1);
    std::vector<int64_t> depths;
    for (int64_t node = 0; node < a.counts[(size_t)tree]; node++) {
        int64_t* mine = a.branches.data() + (first + node) * a.branch_width;
        int64_t parent = node && a.branch_width > 1 ? between(0, node - 1) : 0;
        while (node && a.branch_width > 1 && depths[(size_t)parent] + 1 == a.branch_width) parent = between(0, node - 1);
        int64_t depth = node && a.branch_width > 1 ? depths[(size_t)parent] + 1 : 0;
        for (int64_t d = 0; d < depth; d++) mine[d] = a.branches[(size_t)((first + parent) * a.branch_width + d)];
        mine[depth] = a.starts[(size_t)tree] + node;
        depths.push_back(depth);
    }
    int64_t longest = std::max(a.starts[0] + a.counts[0], a.starts[1] + a.counts[1]);
    a.table_width = (longest + a.page_size - 1) / a.page_size;
    a.num_pages = 2 * a.table_width;
    for (int64_t page = 0; page < a.num_pages; page++) a.pages.push_back(a.num_pages - 1 - page);
    fill_pool(pool, a);
    std::vector<float> q = values(rows * a.heads * a.size);
    std::vector<float> out = attend(pool, a, q.data(), rows, a.pages.data(), a.starts, a.counts);
    int64_t width = a.heads * a.size;
    for (int64_t look = 0; look < 4; look++) {
        int64_t s = between(0, 1), within = between(0, a.counts[(size_t)s] - 1), row = (s ? a.counts[0] : 0) + within;
        int64_t start = a.starts[(size_t)s], position = start + (s == tree ? depths[(size_t)within] : within);
        Attention straight = a;
        straight.page_size = 1;
        straight.table_width = position + 1;
        straight.branch_width = 0;
        straight.pages.clear();
        for (int64_t p = 0; p <= position; p++) {
            int64_t place = s == tree && p >= start ? a.branches[(size_t)(row * a.branch_width + p - start)] : p;
            straight.pages.push_back(a.pages[(size_t)(s * a.table_width + place / a.page_size)] * a.page_size + place % a.page_size);
        }
        const float* mine = q.data() + row * width;
        check_attention(straight, mine, out.data() + row * width, 0, position);
        std::vector<float> one = attend(pool, straight, mine, 1, straight.pages.data(), {position}, {1});
        require(memcmp(one.data(), out.data() + row * width, (size_t)width * 4) == 0, "bits of a node");
    }
}

int main(int argc, char** argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 100;
    chance.seed(argc > 2 ? (uint64_t)atoll(argv[2]) : 1);
    for (int32_t set = 1; set <= 4; set *= 2) {
        if (!(fl_instruction_sets() & set)) {
            printf("instruction set %d: this machine does not have it, not run\n", set);
            continue;
        }
        for (int32_t threads : {1, 3}) {
            void* pool = fl_pool(threads, nullptr, set, 100);
            require(pool != nullptr, "a pool");
            for (int round = 0; round < rounds; round++) {
                fuzz_product(pool);
                fuzz_experts(pool);
                fuzz_routing(pool);
                fuzz_heads(pool);
                fuzz_rows(pool);
                fuzz_attention(pool);
                fuzz_trees(pool);
            }
            fl_end_pool(pool);
        }
        printf("instruction set %d: %d rounds of every operator on 1 and 3 threads\n", set, rounds);
    }
    return 0;
}
