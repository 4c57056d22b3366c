// Keys and values of a sequence as floats, from the pages, for the rows that attend to them.
//
// A position lies in the place of the same number in the sequence's pages. Only the nodes of a tree of drafts have
// branches: from the tree's root on, each finds its positions where its branch says.
#pragma once
#include "kv.h"
#include "program.h"
#include "simd.h"

struct Heads {
    int64_t num_heads, num_kv_heads, size, padded, row_stride, window;
    float scale;
    int64_t value_size, value_padded;
    bool is_latent;
};

static inline Heads heads_of(const Op& op) {
    int64_t value_size = op.n[6] ? op.n[6] : op.n[2];
    return {op.n[0], op.n[1], op.n[2],    (op.n[2] + 7) / 8 * 8,    op.n[3],
            op.n[4], op.f[0], value_size, (value_size + 7) / 8 * 8, op.n[6] != 0};
}

// Places of a row's positions from its tree's root on; null for a row of no tree.
static inline const int64_t* branch_of(const Step& s, int64_t row) {
    return s.branches && s.branches[row * s.branch_width] >= 0 ? s.branches + row * s.branch_width : nullptr;
}

// How deep a row lies in its tree; the root 0.
static inline int64_t depth_of(const Step& s, const int64_t* branch) {
    int64_t depth = 0;
    while (depth + 1 < s.branch_width && branch[depth + 1] >= 0) depth++;
    return depth;
}

// Positions of one KV head's history. Those of a branch lie where it says; it begins at `root`.
struct Stretch {
    int64_t sequence, kv_head, first, end, root;
    const int64_t* branch;
};

// The slots of a stretch, position by position, and those a page further on, which the processor is told to fetch in the
// meantime: pages lie anywhere, so it cannot know them by itself.
template <bool OF_BRANCH>
class Slots {
  public:
    Slots(const Step& step, const Stretch& stretch)
        : stretch(stretch), pages(step.pages + stretch.sequence * step.table_width), page_size(step.page_size),
          num_pages(step.table_width), page(stretch.first / page_size), within(stretch.first % page_size) {
        if (!OF_BRANCH && stretch.first < stretch.end) turn();
    }

    // Of `position`; asked for each in their order.
    int64_t of(int64_t position) {
        if constexpr (OF_BRANCH) {
            int64_t place = stretch.branch[position - stretch.root];
            return pages[place / page_size] * page_size + place % page_size;
        }
        if (within == page_size) within = 0, page++, turn();
        ahead = next_page + within;
        return this_page + within++;
    }

    // The rows a page behind the last position that was asked for. `rows`: that of slot 0, `apart` bytes from the next.
    void fetch_ahead(const uint8_t* rows, int64_t apart, int64_t num_bytes) const {
        if constexpr (OF_BRANCH) return;
        for (int64_t at = 0; at < num_bytes; at += 64) __builtin_prefetch(rows + ahead * apart + at);
    }

  private:
    void turn() {
        this_page = pages[page] * page_size;
        next_page = page + 1 < num_pages ? pages[page + 1] * page_size : this_page;
    }

    const Stretch& stretch;
    const int64_t* pages;
    int64_t page_size, num_pages, page, within, this_page = 0, next_page = 0, ahead = 0;
};

// Latents of a stretch as padded floats: keys, and values as their beginnings.
template <typename Row, bool OF_BRANCH>
static inline void read_latents(const Context& c, const Heads& h, const Op& op, const Stretch& at, float* keys) {
    constexpr int64_t EACH = Row::VALUE_BYTES;
    int64_t row_bytes = h.size * EACH + Row::TAIL_BYTES;
    const uint8_t* latents = (const uint8_t*)op.p[1];
    Slots<OF_BRANCH> slots(*c.step, at);
    for (int64_t position = at.first; position < at.end; position++) {
        const uint8_t* latent = latents + slots.of(position) * row_bytes;
        slots.fetch_ahead(latents, row_bytes, row_bytes);
        Row row(latent, h.size);
        float* to = keys + (position % SPAN) * h.padded;
        int64_t i = 0;
        for (; i + 8 <= h.size; i += 8) store(to + i, row.values(latent + i * EACH));
        if (i < h.size) {
            uint8_t last[8 * EACH] = {};
            memcpy(last, latent + i * EACH, (size_t)((h.size - i) * EACH));
            store(to + i, row.values(last));
        }
        row.finish(to);
    }
}

// Keys and values of a stretch as padded floats.
template <typename Row, bool OF_BRANCH>
static inline void read_rows(const Context& c, const Heads& h, const Op& op, const Stretch& at, float* keys,
                             float* values) {
    if (h.is_latent) return read_latents<Row, OF_BRANCH>(c, h, op, at, keys);
    constexpr int64_t EACH = Row::VALUE_BYTES;
    int64_t row_bytes = h.size * EACH + Row::TAIL_BYTES, slot_bytes = h.num_kv_heads * row_bytes;
    const uint8_t* all_keys = (const uint8_t*)op.p[1] + at.kv_head * row_bytes;
    const uint8_t* all_values = (const uint8_t*)op.p[2] + at.kv_head * row_bytes;
    Slots<OF_BRANCH> slots(*c.step, at);
    for (int64_t position = at.first; position < at.end; position++) {
        int64_t at_slot = slots.of(position) * slot_bytes;
        slots.fetch_ahead(all_keys, slot_bytes, row_bytes);
        slots.fetch_ahead(all_values, slot_bytes, row_bytes);
        const uint8_t *key = all_keys + at_slot, *value = all_values + at_slot;
        Row key_row(key, h.size), value_row(value, h.size);
        float* k = keys + (position % SPAN) * h.padded;
        float* v = values + (position % SPAN) * h.padded;
        int64_t i = 0;
        for (; i + 8 <= h.size; i += 8) {
            store(k + i, key_row.values(key + i * EACH));
            store(v + i, value_row.values(value + i * EACH));
        }
        if (i < h.size) {
            uint8_t last[16 * EACH] = {};
            memcpy(last, key + i * EACH, (size_t)((h.size - i) * EACH));
            memcpy(last + 8 * EACH, value + i * EACH, (size_t)((h.size - i) * EACH));
            store(k + i, key_row.values(last));
            store(v + i, value_row.values(last + 8 * EACH));
        }
        key_row.finish(k);
        value_row.finish(v);
    }
}

template <bool OF_BRANCH>
static inline void read_span(const Context& c, const Heads& h, const Op& op, const Stretch& at, float* keys,
                             float* values) {
    switch (op.n[5]) {
        case KV_BFLOAT: return read_rows<BfloatRow, OF_BRANCH>(c, h, op, at, keys, values);
        case KV_CODES: return read_rows<CodesRow, OF_BRANCH>(c, h, op, at, keys, values);
        default: return read_rows<HalfRow, OF_BRANCH>(c, h, op, at, keys, values);
    }
}

// `count` rows of a sequence whose first row is `row`, from its row number `done` on.
static inline Rows block_of(const Step& step, int64_t sequence, int64_t row, int64_t done, int64_t count) {
    int64_t start = step.starts[sequence];
    if (!branch_of(step, row)) return {sequence, row + done, start + done, count, start + done + count};
    int64_t deepest = 0;
    for (int64_t r = 0; r < count; r++) {
        int64_t depth = depth_of(step, branch_of(step, row + done + r));
        deepest = depth > deepest ? depth : deepest;
    }
    return {sequence, row + done, start, count, start + deepest + 1};
}
