// The thread pool, and the one call that runs a program in one parallel region.
//
// The caller is thread 0. An operator begins when all pieces of the one before are done; it does not matter by
// whom, so a thread that the system has put aside holds up nobody unless it has a piece in hand. Waiting threads
// look for a moment and then sleep on a futex: an idle pool costs nothing. Invariant: `fl_run` returns after every
// thread has left the program, and only one thread may call it at a time.
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <new>

#include "attention.h"
#include "choose.h"
#include "experts.h"
#include "program.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

extern "C" const Kernels fl_portable;
#if defined(__x86_64__)
extern "C" const Kernels fl_avx2, fl_avx512;
#endif

namespace {

struct Signal {
    alignas(64) uint32_t value = 0;
    alignas(64) uint32_t sleepers = 0;
};

struct Pool {
    int num_threads = 0;
    bool is_pinned = false;
    int looks = 0;
    pthread_t threads[256];
    int cpus[256];
    Worker workers[256];
    Signal start, turn, left;
    alignas(64) uint32_t gate = 0;  // OPEN, and how many threads are inside
    alignas(64) const Op* ops = nullptr;
    int64_t num_ops = 0;
    const Step* step = nullptr;
    const Kernels* kernels = nullptr;
    bool is_over = false;
    Progress* progress = nullptr;
    int64_t max_progress = 0;
    Rows* rows = nullptr;
    int64_t num_blocks = 0, max_blocks = 0;
    uint64_t* place = nullptr;
    uint64_t* times = nullptr;
    float* partials = nullptr;
    int32_t* arrived = nullptr;
    int64_t max_partials = 0, max_tasks = 0, num_parts = 0;
};

struct Member {
    Pool* pool;
    int index;
};

void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

constexpr uint32_t OPEN = 1u << 31;

// Waits until `holds()`, which becomes true before `signal` changes.
template <typename F>
void wait_until(Signal& signal, int looks, F holds) {
    for (int i = 0; i < looks; i++) {
        if (holds()) return;
        pause_briefly();
    }
    __atomic_fetch_add(&signal.sleepers, 1, __ATOMIC_SEQ_CST);
    for (;;) {
        uint32_t seen = __atomic_load_n(&signal.value, __ATOMIC_SEQ_CST);
        if (holds()) break;
        syscall(SYS_futex, &signal.value, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    }
    __atomic_fetch_sub(&signal.sleepers, 1, __ATOMIC_SEQ_CST);
}

void change(Signal& signal) {
    __atomic_fetch_add(&signal.value, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&signal.sleepers, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, &signal.value, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
}

void run_op(Pool& pool, const Op& op, const Context& context, Progress& progress) {
    int64_t num_pieces = pool.kernels->num_pieces(op, context);
    for (;;) {
        int64_t piece = __atomic_fetch_add(&progress.next, 1, __ATOMIC_RELAXED);
        if (piece >= num_pieces) break;
        pool.kernels->run(op, context, piece);
        if (__atomic_add_fetch(&progress.done, 1, __ATOMIC_SEQ_CST) == num_pieces && pool.num_threads > 1)
            change(pool.turn);
    }
    wait_until(pool.turn, pool.looks,
               [&] { return __atomic_load_n(&progress.done, __ATOMIC_SEQ_CST) >= num_pieces; });
}

uint64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void run_program(Pool& pool, int thread) {
    Context context = {pool.step,     pool.rows,    pool.num_blocks, &pool.workers[thread],
                       pool.partials, pool.arrived, pool.num_parts};
    uint64_t* place = thread == 0 ? pool.place : nullptr;
    uint64_t* times = thread == 0 ? pool.times : nullptr;
    uint64_t since_ns = times ? now_ns() : 0;
    for (int64_t i = 0; i < pool.num_ops; i++) {
        if (place) __atomic_store_n(place, pool.ops[i].label, __ATOMIC_RELAXED);
        run_op(pool, pool.ops[i], context, pool.progress[i]);
        if (times) {
            uint64_t done_ns = now_ns();
            times[pool.ops[i].kind] += done_ns - since_ns;
            since_ns = done_ns;
        }
    }
    if (place) __atomic_store_n(place, 0, __ATOMIC_RELAXED);
}

// Between `enter` and `leave` the program stays as it is.
bool enter(Pool& pool) {
    uint32_t gate = __atomic_load_n(&pool.gate, __ATOMIC_SEQ_CST);
    while (gate & OPEN)
        if (__atomic_compare_exchange_n(&pool.gate, &gate, gate + 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            return true;
    return false;
}

void leave(Pool& pool) {
    if (__atomic_sub_fetch(&pool.gate, 1, __ATOMIC_SEQ_CST) == 0) change(pool.left);
}

void close_gate(Pool& pool) {
    __atomic_fetch_and(&pool.gate, ~OPEN, __ATOMIC_SEQ_CST);
    wait_until(pool.left, pool.looks, [&] { return __atomic_load_n(&pool.gate, __ATOMIC_SEQ_CST) == 0; });
}

void* work(void* argument) {
    Member member = *(Member*)argument;
    free(argument);
    Pool& pool = *member.pool;
    if (pool.is_pinned) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(pool.cpus[member.index], &set);
        sched_setaffinity(0, sizeof set, &set);
    }
    uint32_t seen = 0;
    for (;;) {
        wait_until(pool.start, pool.looks,
                   [&] { return __atomic_load_n(&pool.start.value, __ATOMIC_SEQ_CST) != seen; });
        seen = __atomic_load_n(&pool.start.value, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&pool.is_over, __ATOMIC_SEQ_CST)) return nullptr;
        if (!enter(pool)) continue;
        run_program(pool, member.index);
        leave(pool);
    }
}

size_t scratch_bytes(const Op* ops, int64_t num_ops) {
    size_t most = 4096;
    for (int64_t i = 0; i < num_ops; i++) {
        size_t bytes = 0;
        if (ops[i].kind == OP_ATTEND) bytes = attention_scratch_floats(heads_of(ops[i])) * 4;
        if (ops[i].kind == OP_TOP) bytes = top_scratch_bytes(ops[i].n[1]);
        if (ops[i].kind == OP_CHOOSE) bytes = routing_scratch_bytes(ops[i].n[0]);
        if (ops[i].kind == OP_LATENT) bytes = (size_t)(ops[i].n[2] + ops[i].n[3]) * 4;
        if (ops[i].kind == OP_NORM || ops[i].kind == OP_SILU) bytes = (size_t)ops[i].n[0] * 4;
        if (bytes > most) most = bytes;
    }
    return most + 64;
}

bool grow(void** memory, int64_t* have, int64_t wanted, size_t item_bytes) {
    if (*have >= wanted) return true;
    void* larger = realloc(*memory, (size_t)wanted * 2 * item_bytes);
    if (!larger) return false;
    *memory = larger;
    *have = wanted * 2;
    return true;
}

bool prepare(Pool& pool, int64_t num_ops, const Step& step) {
    if (!grow((void**)&pool.progress, &pool.max_progress, num_ops, sizeof(Progress))) return false;
    memset((void*)pool.progress, 0, (size_t)num_ops * sizeof(Progress));
    int64_t num_blocks = 0;
    for (int64_t s = 0; s < step.num_sequences; s++)
        num_blocks += (step.counts[s] + ATTENTION_ROWS - 1) / ATTENTION_ROWS;
    if (!grow((void**)&pool.rows, &pool.max_blocks, num_blocks, sizeof(Rows))) return false;
    pool.num_blocks = 0;
    for (int64_t s = 0, row = 0; s < step.num_sequences; row += step.counts[s++])
        for (int64_t done = 0; done < step.counts[s]; done += ATTENTION_ROWS) {
            int64_t left = step.counts[s] - done, count = left < ATTENTION_ROWS ? left : ATTENTION_ROWS;
            pool.rows[pool.num_blocks++] = block_of(step, s, row, done, count);
        }
    return true;
}

bool share_histories(Pool& pool, const Op* ops, int64_t num_ops, const Step& step) {
    Sharing shared = sharing_of(ops, num_ops, step, pool.num_blocks, pool.num_threads);
    pool.num_parts = shared.num_parts;
    if (!shared.num_parts) return true;
    if (!grow((void**)&pool.partials, &pool.max_partials, shared.num_floats, sizeof(float))) return false;
    if (!grow((void**)&pool.arrived, &pool.max_tasks, shared.num_tasks, sizeof(int32_t))) return false;
    memset(pool.arrived, 0, (size_t)shared.num_tasks * sizeof(int32_t));
    return true;
}

bool give_scratch(Pool& pool, size_t bytes) {
    if (pool.workers[0].scratch_bytes >= bytes) return true;
    for (int i = 0; i < pool.num_threads; i++) {
        free(pool.workers[i].scratch);
        pool.workers[i].scratch_bytes = 0;
        if (posix_memalign(&pool.workers[i].scratch, 64, bytes)) return false;
        pool.workers[i].scratch_bytes = bytes;
    }
    return true;
}

}  // namespace

// The instruction sets that this machine can run: 1 portable, 2 AVX2 with FMA and F16C, 4 AVX-512 with VNNI. Every
// feature that `build.py` lets the compiler use is asked for.
EXPORT int32_t fl_instruction_sets() {
    int32_t sets = 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (has_avx2) sets |= 2;
    if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
        sets |= 4;
#endif
    return sets;
}

EXPORT void fl_end_pool(void* handle);

// Null where a thread cannot be started. `cpus` has one processor a thread to pin to, or is null: threads go where the system sends them.
EXPORT void* fl_pool(int32_t num_threads, const int32_t* cpus, int32_t instruction_set, int32_t looks) {
    if (num_threads < 1 || num_threads > 256 || !(fl_instruction_sets() & instruction_set)) return nullptr;
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, sizeof(Pool))) return nullptr;
    Pool* pool = new (memory) Pool;
    memset(pool->workers, 0, sizeof pool->workers);
    pool->num_threads = num_threads;
    pool->is_pinned = cpus != nullptr;
    pool->looks = looks;
    pool->kernels = &fl_portable;
#if defined(__x86_64__)
    if (instruction_set == 2) pool->kernels = &fl_avx2;
    if (instruction_set == 4) pool->kernels = &fl_avx512;
#endif
    for (int i = 0; i < num_threads; i++) {
        if (cpus) pool->cpus[i] = cpus[i];
        pool->workers[i].thread = i;
        pool->workers[i].num_threads = num_threads;
    }
    for (int i = 1; i < num_threads; i++) {
        Member* member = (Member*)malloc(sizeof(Member));
        if (member) *member = {pool, i};
        if (!member || pthread_create(&pool->threads[i], nullptr, work, member)) {
            free(member);
            pool->num_threads = i;  // those that are there already
            fl_end_pool(pool);
            return nullptr;
        }
    }
    return pool;
}

EXPORT void fl_end_pool(void* handle) {
    Pool* pool = (Pool*)handle;
    __atomic_store_n(&pool->is_over, true, __ATOMIC_SEQ_CST);
    change(pool->start);
    for (int i = 1; i < pool->num_threads; i++) pthread_join(pool->threads[i], nullptr);
    for (int i = 0; i < pool->num_threads; i++) free(pool->workers[i].scratch);
    free(pool->progress);
    free(pool->rows);
    free(pool->partials);
    free(pool->arrived);
    free(pool);
}

// From now on `place`, a word of the black box, has the label of the operator that a program is in; 0 in none.
EXPORT void fl_watch(void* handle, uint64_t* place) { ((Pool*)handle)->place = place; }

// From now on `times`, with a word for every kind of operator, grows by the nanoseconds that operators of that kind
// took the caller, waiting for the other threads included; null: no clock is read.
EXPORT void fl_time(void* handle, uint64_t* times) { ((Pool*)handle)->times = times; }

// Runs `num_ops` operators on a step. 0, or 1 if memory did not suffice (then nothing ran). `counter` may be a
// word of the black box: `number` is stored there when the program is done.
EXPORT int32_t fl_run(void* handle, const Op* ops, int64_t num_ops, const Step* step, uint64_t* counter,
                      uint64_t number) {
    Pool& pool = *(Pool*)handle;
    if (!give_scratch(pool, scratch_bytes(ops, num_ops)) || !prepare(pool, num_ops, *step) ||
        !share_histories(pool, ops, num_ops, *step))
        return 1;
    pool.ops = ops;
    pool.num_ops = num_ops;
    pool.step = step;
    __atomic_store_n(&pool.gate, OPEN, __ATOMIC_SEQ_CST);
    if (pool.num_threads > 1) change(pool.start);
    run_program(pool, 0);
    close_gate(pool);
    if (counter) __atomic_store_n(counter, number, __ATOMIC_RELEASE);
    return 0;
}
