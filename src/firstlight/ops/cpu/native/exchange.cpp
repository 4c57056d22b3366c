// Sums and gatherings between the ranks of one machine, through memory that all of them have mapped.
//
// Each rank has a seat: a count of its announcements, which others wait for, and two slots for values. A rank puts a
// piece of its values into a slot, announces it, waits for the others' announcements and reads their slots. Pieces
// take the two slots in turn: whoever announces a piece has done with the one before, so nobody writes what another
// still reads. Sums add the ranks' values in the order of the ranks, on every rank: all get the same bits.
//
// Waiting looks for a moment and then sleeps on a futex. A call that has waited long enough comes back and is
// continued by `fl_exchange_go`: whether to wait on is for the caller to decide. Invariant: nothing here trusts a
// number that another rank wrote to be an address or a size.
#include <errno.h>
#include <linux/futex.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <new>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int MOST_RANKS = 64;
constexpr int64_t BLOCK = 1024;  // floats that are summed while they lie in the first-level cache
// From so many ranks and bytes on, each rank sums a share and the others copy it: less to read, one wait more.
constexpr int SHARING_RANKS = 3;
constexpr int64_t SHARING_BYTES = 64 * 1024;
constexpr int64_t LOOKS_BETWEEN_CLOCKS = 64;

struct Seat {
    alignas(64) uint32_t announced;
    uint32_t sleepers;
    // Of the latest piece in each slot: what the exchange is, and its number. Written before the announcement.
    uint64_t signs[2], numbers[2];
};

enum Kind { REDUCE, GATHER };
enum Stage { PUT, READ, COLLECT };

struct Exchange {
    char* memory = nullptr;
    int rank = 0, num_ranks = 0;
    int64_t slot_bytes = 0, spin_ns = 0;
    uint32_t announced = 0;  // as this rank's seat has it
    uint64_t pieces = 0;
    // The exchange that is going on.
    Kind kind = REDUCE;
    Stage stage = PUT;
    uint64_t sign = 0, number = 0;
    const char* from = nullptr;
    char* to = nullptr;
    int64_t rows = 0, widths[MOST_RANKS] = {}, row_bytes = 0, most_bytes = 0, done_bytes = 0;

    Seat& seat(int r) const { return ((Seat*)memory)[r]; }
    int side() const { return (int)(pieces & 1); }
    char* slot(int r) const {
        return memory + num_ranks * (int64_t)sizeof(Seat) + (side() * num_ranks + r) * slot_bytes;
    }
    int64_t piece_bytes(int64_t of) const {
        int64_t left = of - done_bytes;
        return left < 0 ? 0 : left < slot_bytes ? left : slot_bytes;
    }
};

int64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ll + time.tv_nsec;
}

void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

bool has_announced(const Exchange& x, int r) {
    return (int32_t)(__atomic_load_n(&x.seat(r).announced, __ATOMIC_SEQ_CST) - x.announced) >= 0;
}

void announce(Exchange& x) {
    Seat& own = x.seat(x.rank);
    __atomic_store_n(&own.announced, ++x.announced, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&own.sleepers, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, &own.announced, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
}

bool spin(const Exchange& x, int r) {
    int64_t until_ns = 0;
    do {
        for (int64_t i = 0; i < LOOKS_BETWEEN_CLOCKS; i++) {
            if (has_announced(x, r)) return true;
            pause_briefly();
        }
        int64_t time_ns = now_ns();
        if (!until_ns) until_ns = time_ns + x.spin_ns;
        if (time_ns >= until_ns) return false;
    } while (true);
}

// Whether rank `r` has announced as much as this one; false when `wait_ns` are over, or a signal wants the caller.
bool wait_for(const Exchange& x, int r, int64_t& wait_ns) {
    if (has_announced(x, r) || spin(x, r)) return true;
    Seat& other = x.seat(r);
    int64_t until_ns = now_ns() + wait_ns;
    bool holds = false, gave_up = false;
    __atomic_fetch_add(&other.sleepers, 1, __ATOMIC_SEQ_CST);
    while (!gave_up) {
        uint32_t seen = __atomic_load_n(&other.announced, __ATOMIC_SEQ_CST);
        if ((holds = has_announced(x, r))) break;
        int64_t left_ns = until_ns - now_ns();
        if (left_ns <= 0) break;
        timespec left = {(time_t)(left_ns / 1000000000), (long)(left_ns % 1000000000)};
        if (syscall(SYS_futex, &other.announced, FUTEX_WAIT, seen, &left, nullptr, 0) && errno == EINTR) gave_up = true;
    }
    __atomic_fetch_sub(&other.sleepers, 1, __ATOMIC_SEQ_CST);
    wait_ns = until_ns - now_ns();
    return holds || has_announced(x, r);
}

void add(float* __restrict sum, const float* __restrict values, int64_t num) {
    for (int64_t i = 0; i < num; i++) sum[i] += values[i];
}

// The sum of all ranks' values [first, last) of this piece, into `to`, which may be this rank's own slot.
void sum(const Exchange& x, int64_t first, int64_t last, float* to) {
    float block[BLOCK];
    for (int64_t at = first; at < last; at += BLOCK) {
        int64_t num = last - at < BLOCK ? last - at : BLOCK;
        memcpy(block, (const float*)x.slot(0) + at, (size_t)num * 4);
        for (int r = 1; r < x.num_ranks; r++) add(block, (const float*)x.slot(r) + at, num);
        memcpy(to + at, block, (size_t)num * 4);
    }
}

int64_t share_start(const Exchange& x, int64_t num, int r) { return num * r / x.num_ranks; }

bool is_shared(const Exchange& x) {
    return x.kind == REDUCE && x.num_ranks >= SHARING_RANKS && x.piece_bytes(x.most_bytes) >= SHARING_BYTES;
}

void put(Exchange& x) {
    Seat& own = x.seat(x.rank);
    int64_t mine = x.kind == REDUCE ? x.most_bytes : x.rows * x.widths[x.rank];
    if (int64_t num = x.piece_bytes(mine)) memcpy(x.slot(x.rank), x.from + x.done_bytes, (size_t)num);
    own.signs[x.side()] = x.sign;
    __atomic_store_n(&own.numbers[x.side()], x.number, __ATOMIC_RELAXED);
    announce(x);
}

// Rank `r`'s piece, at its columns of the rows.
void take_columns(const Exchange& x, int r, int64_t first_column) {
    int64_t width = x.widths[r], num = x.piece_bytes(x.rows * width), at = x.done_bytes;
    const char* from = x.slot(r);
    while (num > 0) {
        int64_t row = at / width, column = at % width, part = width - column < num ? width - column : num;
        memcpy(x.to + row * x.row_bytes + first_column + column, from, (size_t)part);
        from += part, at += part, num -= part;
    }
}

void read(Exchange& x) {
    if (x.kind == GATHER) {
        for (int64_t r = 0, column = 0; r < x.num_ranks; column += x.widths[r++]) take_columns(x, (int)r, column);
        return;
    }
    int64_t num = x.piece_bytes(x.most_bytes) / 4;
    if (!is_shared(x)) {
        sum(x, 0, num, (float*)(x.to + x.done_bytes));
        return;
    }
    sum(x, share_start(x, num, x.rank), share_start(x, num, x.rank + 1), (float*)x.slot(x.rank));
    announce(x);
}

void collect(Exchange& x) {
    int64_t num = x.piece_bytes(x.most_bytes) / 4;
    for (int r = 0; r < x.num_ranks; r++) {
        int64_t first = share_start(x, num, r), last = share_start(x, num, r + 1);
        memcpy(x.to + x.done_bytes + first * 4, x.slot(r) + first * 4, (size_t)(last - first) * 4);
    }
}

// Waits for all; 0, or what `fl_exchange_go` returns.
int32_t meet(const Exchange& x, int64_t& wait_ns) {
    for (int r = 0; r < x.num_ranks; r++)
        if (r != x.rank && !wait_for(x, r, wait_ns)) return 1 + r;
    if (x.stage != READ) return 0;
    for (int r = 0; r < x.num_ranks; r++) {
        const Seat& other = x.seat(r);
        uint64_t number = __atomic_load_n(&other.numbers[x.side()], __ATOMIC_RELAXED);
        if (other.signs[x.side()] != x.sign || number != x.number) return -1 - r;
    }
    return 0;
}

int32_t go(Exchange& x, int64_t wait_ns) {
    for (;;) {
        if (x.stage == PUT) {
            put(x);
            x.stage = READ;
        }
        if (int32_t whom = meet(x, wait_ns)) return whom;
        if (x.stage == READ) {
            bool is_more = is_shared(x);
            read(x);
            x.stage = COLLECT;
            if (is_more) continue;
        } else {
            collect(x);
        }
        x.pieces++;
        x.done_bytes += x.slot_bytes;
        if (x.done_bytes >= x.most_bytes) return 0;
        x.stage = PUT;
    }
}

void begin(Exchange& x, Kind kind, const void* from, void* to, uint64_t sign, uint64_t number) {
    x.kind = kind;
    x.stage = PUT;
    x.from = (const char*)from;
    x.to = (char*)to;
    x.done_bytes = 0;
    x.number = number;
    x.sign = (sign * 2 + kind) * 0x9E3779B97F4A7C15ull + (uint64_t)x.most_bytes;
}

}  // namespace

EXPORT int64_t fl_exchange_bytes(int32_t num_ranks, int64_t slot_bytes) {
    return num_ranks * ((int64_t)sizeof(Seat) + 2 * slot_bytes);
}

// `memory` is zero at first, lies on a page's boundary and has `fl_exchange_bytes`. Null where there is no room.
EXPORT void* fl_exchange_open(void* memory, int32_t rank, int32_t num_ranks, int64_t slot_bytes, int64_t spin_ns) {
    if (num_ranks < 1 || num_ranks > MOST_RANKS || rank < 0 || rank >= num_ranks || slot_bytes % 64) return nullptr;
    void* made = nullptr;
    if (posix_memalign(&made, 64, sizeof(Exchange))) return nullptr;
    Exchange* x = new (made) Exchange;
    x->memory = (char*)memory;
    x->rank = rank;
    x->num_ranks = num_ranks;
    x->slot_bytes = slot_bytes;
    x->spin_ns = spin_ns;
    return x;
}

EXPORT void fl_exchange_close(void* handle) { free(handle); }

// Goes on with the exchange that was begun. 0: it is done. 1 + r: rank r has not come; call again, or give up for
// good. -1 - r: rank r is in another exchange.
EXPORT int32_t fl_exchange_go(void* handle, int64_t wait_ns) { return go(*(Exchange*)handle, wait_ns); }

// Sums `num` floats over the ranks, in place. `sign` says which exchange it is meant to be, `number` which one of
// this rank's. Returns as `fl_exchange_go`.
EXPORT int32_t fl_exchange_sum(void* handle, float* values, int64_t num, uint64_t sign, uint64_t number,
                               int64_t wait_ns) {
    Exchange& x = *(Exchange*)handle;
    x.most_bytes = num * 4;
    begin(x, REDUCE, values, values, sign, number);
    return go(x, wait_ns);
}

// Joins the ranks' columns: `own` is [rows, widths[rank]] bytes, `all` becomes [rows, the sum of widths] bytes.
// `widths` has one for each rank. Returns as `fl_exchange_go`.
EXPORT int32_t fl_exchange_join(void* handle, const void* own, void* all, int64_t rows, const int64_t* widths,
                                uint64_t sign, uint64_t number, int64_t wait_ns) {
    Exchange& x = *(Exchange*)handle;
    x.rows = rows;
    x.row_bytes = x.most_bytes = 0;
    for (int r = 0; r < x.num_ranks; r++) {
        x.widths[r] = widths[r];
        x.row_bytes += widths[r];
        if (rows * widths[r] > x.most_bytes) x.most_bytes = rows * widths[r];
    }
    begin(x, GATHER, own, all, sign, number);
    return go(x, wait_ns);
}

// The number of the latest exchange that a rank has come to; 0 before the first one.
EXPORT uint64_t fl_exchange_number(void* handle, int32_t rank) {
    const Seat& seat = ((Exchange*)handle)->seat(rank);
    uint64_t first = __atomic_load_n(&seat.numbers[0], __ATOMIC_RELAXED);
    uint64_t second = __atomic_load_n(&seat.numbers[1], __ATOMIC_RELAXED);
    return first > second ? first : second;
}
