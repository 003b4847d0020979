// What the device writes about tokens: exact counts per slot, the token ring, time stamps.
//
//   meter_begin<<<1, n>>>   before the forward: takes in new generations, stamps the start of the step
//   meter_step<<<1, n>>>    after the sampler: counts, publishes rows, ring records and the step line
//   render_rows<<<rows, n>>> optional: the text field of the row buffer, from a fragment table on the device
//
// One source for three compilers: nvcc and NVRTC (sm_80 on), and any C++20 compiler with cuda_shim.h in front. Layouts are
// evap/ring.py's and evap/metering/layout.py's; a test compares the constants.
//
// Rules
// - The device never loads host memory: what it needs again is in Slot and Meter, in its own memory.
// - Stores meant for the host are single aligned 8-byte words that carry a tag (st_host), except text bytes (st_host8).
// - One block, so that positions come from a prefix sum and the result is the same on every machine. Any block size.
// - One launch at a time (one stream). A slot appears at most once in a launch. Ring capacity >= rows * width.

#ifndef EVAP_CPU
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
__device__ inline void st_host(u64* at, u64 value) {
    asm volatile("st.relaxed.sys.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
__device__ inline void st_host8(u8* at, u8 value) { *(volatile u8*)at = value; }
__device__ inline u64 device_clock() {
    u64 ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}
// Not __threadfence_system(): that is a sequentially consistent fence and empties L1 as well.
#define EVAP_FENCE() asm volatile("fence.acq_rel.sys;" ::: "memory")
#endif

constexpr int RECORD_WORDS = 4;
constexpr int WORD_HEAD = 2;
constexpr int WORD_RECORDS = 16;
constexpr u64 TAG_CYCLE = 0xFFFFFFFFull;
constexpr u32 STEP_MASK = 0xFFFFFFu;
constexpr int LINE_WORDS = 8;
constexpr int VALUE_BITS = 48;
constexpr u32 LINE_TAGS = 65535;
constexpr int WORD_STEP_LINE = 16;
constexpr int WORD_ROWS = 32;
constexpr int JOIN_WORDS = 6;
constexpr u32 FINISH_STOP = 1;
constexpr u32 FINISH_LENGTH = 2;
constexpr u32 SILENT = 0x40;
constexpr int MAX_THREADS = 1024;

struct Slot {
    u32 generation, tag, limit, prompt, cached, computed, emitted, steps, finish;
    int eos;
    u64 first_us, last_us;
};

struct Meter {
    u64 head, step, tag, computed, emitted, begin_ns, busy_ns, epoch_ns;
};

__device__ inline u64 tagged(u32 tag, u64 value) { return (u64)tag << VALUE_BITS | value; }

__device__ inline u64 micros(const Meter* meter, u64 ns) {
    return (ns - meter->epoch_ns) / 1000 & ((1ull << VALUE_BITS) - 1);
}

// Word 0, with the generation, last: see layout.py on writers that die.
__device__ inline void put_line(u64* line, u32 tag, const u64* values) {
    for (int i = LINE_WORDS - 1; i >= 0; i--) st_host(line + i, tagged(tag, values[i]));
}

__device__ inline void put_row(u64* page, int slot, Slot* s) {
    s->tag = s->tag % LINE_TAGS + 1;
    const u64 values[LINE_WORDS] = {s->generation | s->finish << 16, s->prompt, s->cached, s->computed,
                                    s->emitted, s->first_us, s->last_us, s->steps};
    put_line(page + WORD_ROWS + (u64)slot * LINE_WORDS, s->tag, values);
}

__device__ inline void put_record(u64* ring, u32 capacity, u64 position, u32 who, int token, u32 index, u32 last) {
    const u64 tag = (1 + position % TAG_CYCLE) << 32;
    u64* at = ring + WORD_RECORDS + position % capacity * RECORD_WORDS;
    st_host(at, tag | who);
    st_host(at + 1, tag | (u32)token);
    st_host(at + 2, tag | index);
    st_host(at + 3, tag | last);
}

// How many of `count` sampled tokens are emitted: up to the end token or the limit, nothing after either.
template <class Token>
__device__ inline u32 emit(Slot* s, const Token* tokens, u32 count) {
    u32 fresh = 0;
    while (fresh < count && !s->finish) {
        s->emitted++;
        if (s->eos >= 0 && (int)tokens[fresh] == s->eos)
            s->finish = FINISH_STOP;
        else if (s->emitted >= s->limit)
            s->finish = FINISH_LENGTH;
        fresh++;
    }
    return fresh;
}

extern "C" __global__ void meter_begin(const int* joins, int count, Slot* slots, int slot_count, Meter* meter, u64* page) {
    if (threadIdx.x == 0) meter->begin_ns = device_clock();
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const int* join = joins + i * JOIN_WORDS;
        if (join[0] < 0 || join[0] >= slot_count) continue;
        Slot* s = slots + join[0];
        const u32 tag = s->tag;  // goes on over generations: no line may repeat one that a slow reader is looking at
        *s = Slot();
        s->tag = tag;
        s->generation = (u32)join[1] & 0xFFFF;
        s->prompt = (u32)join[2];
        s->cached = (u32)join[3];
        s->limit = (u32)join[4];
        s->eos = join[5];
        put_row(page, join[0], s);
    }
}

template <class Token>
__device__ inline void step(const int* slot_of, const Token* tokens, const int* counts, int rows, int width, Slot* slots,
                            int slot_count, Meter* meter, u64* page, u64* ring, u32 capacity) {
    __shared__ u32 sums[MAX_THREADS];
    __shared__ u64 now;
    __shared__ u32 computed;
    const u32 me = threadIdx.x, team = blockDim.x;
    if (me == 0) {
        now = device_clock();
        computed = 0;
    }
    __syncthreads();
    const u64 now_us = micros(meter, now), first = meter->head;
    const u32 step_low = (u32)(meter->step + 1) & STEP_MASK;
    u64 emitted = 0;
    for (int base = 0; base < rows; base += team) {
        const int row = base + me;
        const int slot = row < rows ? slot_of[row] : -1;
        const Token* mine = tokens + (u64)row * width;
        u32 fresh = 0;
        if (slot >= 0 && slot < slot_count) {
            Slot* s = slots + slot;
            const int given = counts ? counts[row] : 1;
            const u32 count = given < 0 ? 0 : given > width ? width : given;
            s->steps++;
            if (count) {
                if (!s->computed) s->first_us = now_us;
                s->last_us = now_us;
                s->computed += count;
                fresh = emit(s, mine, count);
                atomicAdd(&computed, count);
            }
            put_row(page, slot, s);
        }
        sums[me] = fresh;
        __syncthreads();
        for (u32 reach = 1; reach < team; reach <<= 1) {
            const u32 before = me >= reach ? sums[me - reach] : 0;
            __syncthreads();
            sums[me] += before;
            __syncthreads();
        }
        if (ring && fresh) {
            const Slot* s = slots + slot;
            for (u32 k = 0; k < fresh; k++) {
                u32 last = step_low << 8;
                if (k + 1 == fresh && s->finish) last |= s->finish == FINISH_STOP ? FINISH_STOP | SILENT : s->finish;
                put_record(ring, capacity, first + emitted + sums[me] - fresh + k, s->generation << 16 | slot,
                           (int)mine[k], s->emitted - fresh + k, last);
            }
        }
        emitted += sums[team - 1];
        __syncthreads();
    }
    if (me) return;
    if (ring) meter->head = first + emitted;
    meter->step++;
    meter->tag = meter->tag % LINE_TAGS + 1;
    meter->computed += computed;
    meter->emitted += emitted;
    meter->busy_ns += now - meter->begin_ns;
    const u64 mask = (1ull << VALUE_BITS) - 1;
    const u64 values[LINE_WORDS] = {meter->step & mask, meter->head & mask, meter->computed & mask, meter->emitted & mask,
                                    micros(meter, meter->begin_ns), now_us, meter->busy_ns / 1000 & mask, (u64)rows};
    // All threads' rows and records come before the barrier above, and so before what follows the fence (cumulativity).
    EVAP_FENCE();
    if (ring) st_host(ring + WORD_HEAD, meter->head);
    put_line(page + WORD_STEP_LINE, (u32)meter->tag, values);
}

// slot_of: slot per row, -1 for none. tokens: [rows, width]. counts: tokens kept per row, or null for one each.
// ring null: counters only (when the reader may be lapped, the worker falls back to its own output).
#define EVAP_STEP_ARGS(Token)                                                                                        \
    const int *slot_of, const Token *tokens, const int *counts, int rows, int width, Slot *slots, int slot_count,    \
        Meter *meter, u64 *page, u64 *ring, u32 capacity
#define EVAP_STEP_NAMES slot_of, tokens, counts, rows, width, slots, slot_count, meter, page, ring, capacity

extern "C" __global__ void meter_step(EVAP_STEP_ARGS(int)) { step(EVAP_STEP_NAMES); }
extern "C" __global__ void meter_step_i64(EVAP_STEP_ARGS(long long)) { step(EVAP_STEP_NAMES); }

// buffer[places[row] * stride + offset ...] = fragments[tokens[row]], `width` bytes. Launched before meter_step on the
// same stream, its bytes are there once the step line is.
extern "C" __global__ void render_rows(const int* tokens, const int* places, const u8* fragments, int width, u8* buffer,
                                       int stride, int offset) {
    const u8* from = fragments + (u64)tokens[blockIdx.x] * width;
    u8* to = buffer + (u64)places[blockIdx.x] * stride + offset;
    for (int i = threadIdx.x; i < width; i += blockDim.x) st_host8(to + i, from[i]);
}

#ifdef EVAP_CPU
extern "C" void evap_meter_begin(u32 block, const int* joins, int count, Slot* slots, int slot_count, Meter* meter,
                                 u64* page) {
    launch(1, block, [=] { meter_begin(joins, count, slots, slot_count, meter, page); });
}
extern "C" void evap_meter_step(u32 block, EVAP_STEP_ARGS(int)) {
    launch(1, block, [=] { meter_step(EVAP_STEP_NAMES); });
}
extern "C" void evap_meter_step_i64(u32 block, EVAP_STEP_ARGS(long long)) {
    launch(1, block, [=] { meter_step_i64(EVAP_STEP_NAMES); });
}
extern "C" void evap_render_rows(u32 block, int rows, const int* tokens, const int* places, const u8* fragments, int width,
                                 u8* buffer, int stride, int offset) {
    launch(rows, block, [=] { render_rows(tokens, places, fragments, width, buffer, stride, offset); });
}
#endif
