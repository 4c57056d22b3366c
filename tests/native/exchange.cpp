// Ranks as threads over one piece of memory: sums and gatherings of random sizes, compared bit by bit.
//
// Built with ThreadSanitizer and AddressSanitizer by `make sanitize`. Every rank knows what the others bring, as it
// is made from the rank and the round. Some ranks come late, and some calls wait so briefly that they have to be
// continued. Usage: exchange ROUNDS [SEED]
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <random>
#include <thread>
#include <vector>

extern "C" {
int64_t fl_exchange_bytes(int32_t, int64_t);
void* fl_exchange_open(void*, int32_t, int32_t, int64_t, int64_t);
void fl_exchange_close(void*);
int32_t fl_exchange_go(void*, int64_t);
int32_t fl_exchange_sum(void*, float*, int64_t, uint64_t, uint64_t, int64_t);
int32_t fl_exchange_join(void*, const void*, void*, int64_t, const int64_t*, uint64_t, uint64_t, int64_t);
uint64_t fl_exchange_number(void*, int32_t);
}

static void require(bool holds, const char* what) {
    if (holds) return;
    fprintf(stderr, "failed: %s\n", what);
    abort();
}

static std::vector<float> values(uint64_t round, int rank, int64_t num) {
    std::mt19937 random((uint32_t)(round * 977 + (uint64_t)rank));
    std::vector<float> made((size_t)num);
    for (float& value : made) value = (float)(int32_t)random() * (random() % 8 ? 1e-3f : 1e4f);
    return made;
}

struct Order {
    uint64_t round;
    bool is_sum;
    int64_t rows, wait_ns;
    std::vector<int64_t> widths;  // floats
    std::vector<int> late_us;
};

static int32_t finish(void* handle, int32_t state, int64_t wait_ns) {
    while (state > 0) state = fl_exchange_go(handle, wait_ns);
    return state;
}

static void take_part(void* handle, int rank, int num_ranks, const Order& order) {
    if (order.late_us[(size_t)rank]) usleep((useconds_t)order.late_us[(size_t)rank]);
    std::vector<std::vector<float>> all;
    for (int r = 0; r < num_ranks; r++)
        all.push_back(values(order.round, r, order.rows * order.widths[order.is_sum ? 0 : (size_t)r]));
    std::vector<float> own = all[(size_t)rank];
    if (order.is_sum) {
        int32_t state = fl_exchange_sum(handle, own.data(), (int64_t)own.size(), 7, order.round, order.wait_ns);
        require(!finish(handle, state, order.wait_ns), "all are in the same sum");
        for (size_t i = 0; i < own.size(); i++) {
            float sum = all[0][i];
            for (int r = 1; r < num_ranks; r++) sum += all[(size_t)r][i];
            require(!memcmp(&sum, &own[i], 4), "a sum has the bits of the order of the ranks");
        }
        return;
    }
    int64_t whole = 0, bytes[64];
    for (int r = 0; r < num_ranks; r++) whole += order.widths[(size_t)r], bytes[r] = order.widths[(size_t)r] * 4;
    std::vector<float> joined((size_t)(order.rows * whole));
    int32_t state =
        fl_exchange_join(handle, own.data(), joined.data(), order.rows, bytes, 8, order.round, order.wait_ns);
    require(!finish(handle, state, order.wait_ns), "all are in the same gathering");
    for (int64_t row = 0, at = 0; row < order.rows; row++)
        for (int r = 0; r < num_ranks; r++)
            for (int64_t i = 0; i < order.widths[(size_t)r]; i++, at++)
                require(joined[(size_t)at] == all[(size_t)r][(size_t)(row * order.widths[(size_t)r] + i)],
                        "every column is in its place");
}

int main(int argc, char** argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 100;
    std::mt19937 chance(argc > 2 ? (uint32_t)atoi(argv[2]) : 1);
    auto between = [&](int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(chance); };
    for (int num_ranks : {1, 2, 3, 5}) {
        int64_t slot_bytes = num_ranks == 3 ? 128 * 1024 : 64 * between(1, 40);
        size_t bytes = (size_t)fl_exchange_bytes(num_ranks, slot_bytes);
        void* memory = nullptr;
        require(!posix_memalign(&memory, 4096, bytes), "memory");
        memset(memory, 0, bytes);
        std::vector<Order> orders;
        for (int round = 1; round <= rounds; round++) {
            Order order = {(uint64_t)round, between(0, 2) > 0, between(1, 4), between(0, 3) ? 1000000000 : 1000, {}, {}};
            int64_t most = between(0, 9) ? 300 : num_ranks == 3 ? 50000 : 5000;
            for (int r = 0; r < num_ranks; r++) order.widths.push_back(between(0, most));
            for (int r = 0; r < num_ranks; r++) order.late_us.push_back(between(0, 19) ? 0 : (int)between(1, 300));
            orders.push_back(order);
        }
        std::vector<std::thread> threads;
        std::vector<void*> handles;
        for (int r = 0; r < num_ranks; r++)
            handles.push_back(fl_exchange_open(memory, r, num_ranks, slot_bytes, between(0, 1) * 50000));
        for (int r = 0; r < num_ranks; r++)
            threads.emplace_back([&, r] {
                for (const Order& order : orders) take_part(handles[(size_t)r], r, num_ranks, order);
                require(fl_exchange_number(handles[(size_t)r], r) == (uint64_t)rounds, "the number of the last one");
            });
        for (std::thread& thread : threads) thread.join();
        // One sums, the other gathers: both are told.
        if (num_ranks == 2) {
            float value = 1, both[2] = {};
            int64_t widths[2] = {4, 4};
            std::thread other([&] {
                int32_t state = fl_exchange_join(handles[1], &value, both, 1, widths, 8, 999, 1000000000);
                require(finish(handles[1], state, 1000000000) == -1, "rank 1 hears that rank 0 is elsewhere");
            });
            float mine = 1;
            int32_t state = fl_exchange_sum(handles[0], &mine, 1, 8, 999, 1000000000);
            require(finish(handles[0], state, 1000000000) == -2, "rank 0 hears that rank 1 is elsewhere");
            other.join();
        }
        for (void* handle : handles) fl_exchange_close(handle);
        free(memory);
        printf("%d ranks: %d rounds, slots of %lld bytes\n", num_ranks, rounds, (long long)slot_bytes);
    }
    return 0;
}
