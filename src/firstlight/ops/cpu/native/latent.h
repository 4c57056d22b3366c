// Latent attention before and behind its attending: rows turned and written, and rows head by head.
//
// Used by `kernels.cpp`; `models/layers/latent.py` says what it is. Invariant: a row depends on its own values.
#pragma once
#include "kv.h"
#include "program.h"
#include "rows.h"

// n: heads, values of a head that stay and that turn, latent size, KV type, and how far rows of queries and of latents
// are apart. The norm of the latent and the turned key go to the row's slot; what stays of a query goes to its head's
// rows, and what turns behind the place of its latent.
static inline void turn_latents(const Op& op, const Context& c, int64_t row) {
    int64_t heads = op.n[0], still = op.n[1], turning = op.n[2], latent = op.n[3], entry = latent + turning;
    const float* queries = (const float*)op.p[0] + row * op.n[5];
    const float* key = (const float*)op.p[1] + row * op.n[6];
    const float* turn = c.step->turns + row * turning;
    float* held = (float*)c.worker->scratch;
    norm_row(key, (const float*)op.p[2], latent, op.f[0], held);
    memcpy(held + latent, key + latent, (size_t)turning * 4);
    turn_head(held + latent, turn, turning);
    write_token(op.n[4], op.p[3], c.step->write_slots[row], held, 1, entry);
    for (int64_t head = 0; head < heads; head++) {
        const float* x = queries + head * (still + turning);
        float* turned = (float*)op.p[5] + (row * heads + head) * entry + latent;
        memcpy((float*)op.p[4] + (head * c.step->num_rows + row) * still, x, (size_t)still * 4);
        memcpy(turned, x + still, (size_t)turning * 4);
        turn_head(turned, turn, turning);
    }
}

// n: heads, width of each. Rows of all heads become rows of one head after the other.
static inline void head_by_head(const Op& op, int64_t row, int64_t num_rows) {
    int64_t heads = op.n[0], width = op.n[1];
    for (int64_t head = 0; head < heads; head++)
        memcpy((float*)op.p[1] + (head * num_rows + row) * width, (const float*)op.p[0] + (row * heads + head) * width,
               (size_t)width * 4);
}
