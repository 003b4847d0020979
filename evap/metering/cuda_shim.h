// Enough of CUDA to run kernels.cu on a CPU, put in front of it by the build (-include). C++20, POSIX ucontext.
//
// A block of one thread is called directly: that is the CPU engines' counter writer. Larger blocks run as fibres on one
// host thread; between barriers they take turns in an order drawn from a seed, so a failing run can be run again.
//
// Model mode (evap_model): stores to the host do not happen at once. They wait in a store buffer and become visible one
// by one in a drawn order; only two rules hold: stores to one address keep their order, and a fence of thread t first
// makes visible all stores of t and all that a barrier or a kernel boundary put before it (PTX calls it cumulativity).
// After each visible store the observer is called; it plays the reader. This tries orders at random, it proves nothing;
// it models stores only, not loads, and not races within device memory (compute-sanitizer does that on a GPU).
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ucontext.h>

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#define __global__
#define __device__
#define __shared__ static thread_local

namespace evap_shim {

constexpr size_t STACK_BYTES = 64 << 10;
enum class Ask { none, barrier, store, fence, done };

struct Dim {
    u32 x = 0;
};
struct Fibre {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    Ask ask;
};
struct Store {
    void* at;
    u64 value;
    u8 size;
    u32 thread;
    u64 epoch;  // barriers and launches so far
};
struct World {
    Dim thread, block, block_size;
    std::vector<Fibre> fibres;
    ucontext_t scheduler;
    std::function<void()> kernel;
    bool fibred = false, model = false, no_fences = false;
    u64 random = 0x9E3779B97F4A7C15ull, epoch = 0, clock_ns = 0;
    u32 eagerness = 50;  // per cent: how readily a waiting store becomes visible
    std::vector<Store> waiting;
    void (*observer)() = nullptr;
};
inline thread_local World world;
// Set for good by the first launch that needs fibres. Until then a store is a store: no look at thread-local state,
// which would cost more than the rest of the counting.
static bool fibres_in_use = false;

inline u64 draw(u64 below) {  // splitmix64
    u64 z = world.random += 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return (z ^ z >> 31) % below;
}

inline void make_visible(const Store& s) {
    if (s.size == 8)
        __atomic_store_n((u64*)s.at, s.value, __ATOMIC_RELAXED);
    else
        __atomic_store_n((u8*)s.at, (u8)s.value, __ATOMIC_RELAXED);
}

// Runs on the scheduler's stack: the observer may be Python.
inline void release_one(size_t pick) {
    auto& waiting = world.waiting;
    const void* at = waiting[pick].at;
    pick = std::find_if(waiting.begin(), waiting.end(), [&](const Store& s) { return s.at == at; }) - waiting.begin();
    const Store store = waiting[pick];
    waiting.erase(waiting.begin() + pick);
    make_visible(store);
    if (world.observer) world.observer();
}

template <class Which>
inline void release_all(Which which) {
    for (;;) {
        std::vector<size_t> picks;
        for (size_t i = 0; i < world.waiting.size(); i++)
            if (which(world.waiting[i])) picks.push_back(i);
        if (picks.empty()) return;
        release_one(picks[draw(picks.size())]);
    }
}

inline void ask(Ask what) {
    Fibre& me = world.fibres[world.thread.x];
    me.ask = what;
    swapcontext(&me.context, &world.scheduler);
}

inline void store(void* at, u64 value, u8 size) {
    const Store s{at, value, size, fibres_in_use ? world.thread.x : 0, fibres_in_use ? world.epoch : 0};
    if (!fibres_in_use || !world.model) return make_visible(s);
    world.waiting.push_back(s);
    ask(Ask::store);
}

inline void fence() {
    __atomic_thread_fence(__ATOMIC_ACQ_REL);
    if (fibres_in_use && world.model && !world.no_fences) ask(Ask::fence);
}

inline void fibre_main() {
    world.kernel();
    world.fibres[world.thread.x].ask = Ask::done;
    swapcontext(&world.fibres[world.thread.x].context, &world.scheduler);
}

inline void serve(u32 thread) {
    if (world.fibres[thread].ask == Ask::fence)
        release_all([&](const Store& s) { return s.thread == thread || s.epoch < world.epoch; });
    if (world.model)
        while (!world.waiting.empty() && draw(100) < world.eagerness) release_one(draw(world.waiting.size()));
}

inline void run_block(u32 threads) {
    if (world.fibres.size() < threads) world.fibres.resize(threads);
    std::vector<u32> ready, parked;
    for (u32 t = 0; t < threads; t++) {
        Fibre& f = world.fibres[t];
        if (!f.stack) f.stack = std::make_unique<char[]>(STACK_BYTES);
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.get();
        f.context.uc_stack.ss_size = STACK_BYTES;
        f.context.uc_link = nullptr;
        makecontext(&f.context, fibre_main, 0);
        ready.push_back(t);
    }
    while (!ready.empty()) {
        const size_t pick = draw(ready.size());
        const u32 thread = world.thread.x = ready[pick];
        world.fibres[thread].ask = Ask::none;
        swapcontext(&world.scheduler, &world.fibres[thread].context);
        serve(thread);
        const Ask asked = world.fibres[thread].ask;
        if (asked == Ask::barrier || asked == Ask::done) {
            ready.erase(ready.begin() + pick);
            if (asked == Ask::barrier) parked.push_back(thread);
        }
        if (ready.empty()) {
            ready.swap(parked);
            world.epoch++;
        }
    }
}

inline void launch(u32 blocks, u32 threads, std::function<void()> kernel) {
    world.kernel = std::move(kernel);
    world.block_size.x = threads;
    world.fibred = threads > 1 || world.model;
    if (world.fibred) fibres_in_use = true;
    std::vector<u32> order(blocks);
    for (u32 b = 0; b < blocks; b++) order[b] = b;
    if (world.fibred)
        for (u32 b = blocks; b > 1; b--) std::swap(order[b - 1], order[draw(b)]);
    for (u32 b : order) {
        world.block.x = b;
        world.thread.x = 0;
        if (world.fibred)
            run_block(threads);
        else
            world.kernel();
    }
    world.epoch++;
}

}  // namespace evap_shim

using evap_shim::launch;
#define threadIdx (evap_shim::world.thread)
#define blockIdx (evap_shim::world.block)
#define blockDim (evap_shim::world.block_size)

inline void __syncthreads() {
    if (evap_shim::fibres_in_use && evap_shim::world.fibred) evap_shim::ask(evap_shim::Ask::barrier);
}
inline void atomicAdd(u32* at, u32 value) { *at += value; }
inline void st_host(u64* at, u64 value) { evap_shim::store(at, value, 8); }
inline void st_host8(u8* at, u8 value) { evap_shim::store(at, value, 1); }
inline u64 device_clock() { return evap_shim::world.clock_ns; }
#define EVAP_FENCE() evap_shim::fence()

extern "C" void evap_clock(u64 ns) { evap_shim::world.clock_ns = ns; }
extern "C" void evap_seed(u64 seed) { evap_shim::world.random = seed; }
// Everything becomes visible, as after a synchronise.
extern "C" void evap_model_drain() {
    evap_shim::release_all([](const evap_shim::Store&) { return true; });
}
// eagerness 0..100: how readily stores become visible by themselves. observer may be null. no_fences: a broken machine,
// to show that the tests would notice.
extern "C" void evap_model(int on, u32 eagerness, void (*observer)(), int no_fences) {
    evap_model_drain();
    evap_shim::world.model = on;
    evap_shim::world.eagerness = eagerness;
    evap_shim::world.observer = observer;
    evap_shim::world.no_fences = no_fences;
}
