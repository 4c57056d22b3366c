// What Python's mirror of `program.h` is compared with: sizes, offsets and codes by their names. A field that moved or
// a number that changed is an error at load, not a crash or a wrong product.
#include <string.h>

#include "formats.h"
#include "program.h"

#define EXPORT extern "C" __attribute__((visibility("default")))
#define SIZE(type) {#type, sizeof(type)}
#define FIELD(type, field) {#type "." #field, offsetof(type, field)}
#define CODE(name) {#name, name}
// Bytes that a tile of 8 outputs takes for 256 inputs, which are whole blocks of every format.
#define FORMAT(name) {#name, name}, {"tile_bytes " #name, tile_bytes_of(name, 256)}

namespace {

struct Fact {
    const char* name;
    int64_t value;
};

const Fact facts[] = {
    SIZE(Op), FIELD(Op, kind), FIELD(Op, flags), FIELD(Op, n), FIELD(Op, f), FIELD(Op, p), FIELD(Op, label),
    SIZE(Step), FIELD(Step, num_rows), FIELD(Step, num_logits), FIELD(Step, num_sequences), FIELD(Step, page_size),
    FIELD(Step, table_width), FIELD(Step, tokens), FIELD(Step, turns), FIELD(Step, write_slots),
    FIELD(Step, logit_rows), FIELD(Step, starts), FIELD(Step, counts), FIELD(Step, pages), FIELD(Step, branches),
    FIELD(Step, branch_width), SIZE(Group), SIZE(Quantized), CODE(TILE), CODE(GROUP),
    CODE(OP_EMBED), CODE(OP_NORM), CODE(OP_QUANTIZE), CODE(OP_LINEAR), CODE(OP_SILU), CODE(OP_TURN_AND_WRITE),
    CODE(OP_ATTEND), CODE(OP_LARGEST), CODE(OP_READ), CODE(OP_MULTIPLY), CODE(OP_TOP), CODE(OP_EXPERTS),
    CODE(OP_PACK), CODE(OP_COPY), CODE(OP_CHOOSE), CODE(OP_SORT), CODE(OP_GATHER), CODE(OP_COMBINE),
    CODE(OP_LATENT), CODE(OP_BY_HEAD), CODE(OP_HEADS), CODE(NUM_OPERATORS),
    CODE(ADD_TO_OUTPUT), CODE(LOGIT_ROWS), CODE(TO_SLOTS), CODE(EACH),
    CODE(KV_HALF), CODE(KV_BFLOAT), CODE(KV_CODES),
    FORMAT(Q4_1), FORMAT(Q4_0), FORMAT(Q8_0), FORMAT(F32), FORMAT(F16), FORMAT(BF16), FORMAT(Q4_K), FORMAT(Q6_K),
    FORMAT(INT4_ZERO), FORMAT(FP8), FORMAT(FP4),
};

}  // namespace

// The number of this name, or -1.
EXPORT int64_t fl_interface(const char* name) {
    for (const Fact& fact : facts)
        if (!strcmp(fact.name, name)) return fact.value;
    return -1;
}
