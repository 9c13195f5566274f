// ptx.cuh's names for a host compiler: a block's threads are fibers, its warps' collectives are exchanges between them.
//
// What it is for: the arithmetic, indexing, masks and barriers of the kernels, tested with no device. It is stricter than one:
// shared memory starts as NaN, a cp.async lands when it is waited for and not before, a collective that not all lanes of a warp
// call, two different ones at once, and a barrier that is never completed each end the program with a message.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#if !defined(__x86_64__)
#error "the emulator switches fibers on x86-64 only"
#endif

#define DEVICE static inline
#define UNROLL
#define NO_UNROLL
#define MSTAR_KERNEL(NAME, PARAMS, THREADS, MIN_BLOCKS) MSTAR_KERNEL_OF_CLUSTERS(NAME, PARAMS, THREADS, MIN_BLOCKS, 1)
#define MSTAR_KERNEL_OF_CLUSTERS(NAME, PARAMS, THREADS, MIN_BLOCKS, CLUSTER)                                         \
    static void NAME##__body(const PARAMS& p);                                                                       \
    extern "C" {                                                                                                     \
    u32 NAME##__cluster = CLUSTER;                                                                                   \
    }                                                                                                                \
    extern "C" int NAME##__run(u32 gx, u32 gy, u32 gz, u32 block, u32 shared, const void* params) {                  \
        if (block > (THREADS)) emulated::fail("more threads than the kernel's launch bounds");                       \
        PARAMS copy;                                                                                                 \
        std::memcpy(&copy, params, sizeof copy);                                                                     \
        emulated::Grid grid{gx, gy, gz, CLUSTER, block, shared, emulated::at_launch(THREADS, MIN_BLOCKS), &copy,     \
                            [](const void* p) { NAME##__body(*static_cast<const PARAMS*>(p)); }};                    \
        grid.run();                                                                                                  \
        return 0;                                                                                                    \
    }                                                                                                                \
    static void NAME##__body(const PARAMS& p)
#define SHARED(NAME) u8* NAME = emulated::now->block->shared

namespace emulated {

[[noreturn]] static void fail(const char* why) {
    std::fprintf(stderr, "emulator: %s\n", why);
    std::abort();
}

// Registers a thread of a kernel that hands them about (setmaxnreg): all that its blocks leave each other, in eights.
constexpr u32 at_launch(u32 threads, u32 blocks) {
    const u32 each = 65536 / (threads * blocks) / 8 * 8;
    return each < 248 ? each : 248;
}

struct Copy {
    void* to;
    const void* from;  // null: zeros
    u32 bytes = 16;
    std::shared_ptr<bool> landed = nullptr;  // of one that a mark stands for and that is waited for too: whichever comes first
    std::shared_ptr<U4> value = nullptr;     // what `from` is, where it is nobody's memory
};

struct Block;

// A product of hopper.cuh that is under way.
struct Pending {
    float* d;
    u32 n, words[4];
    u64 a, b;
    bool registers, a_mn, b_mn, add;
    double (*half)(u16);
};

// What nobody's thread waits for: copies, which land when nothing else can go on, and then arrive.
struct Late {
    std::vector<Copy> copies;
    void* mark;
    void (*arrive)(const Late&);
    u32 bytes;
    Block* to;                    // where the mark is, and what is copied to
    Block* from = nullptr;        // whose shared memory is copied
    u32 barrier = 0;              // of the cluster, which a remote arrival comes before; of what a mark alone tells of, NONE
    bool handing = false;         // with what a peer stored
};
constexpr u32 NONE = ~0u;

struct Fiber {
    void* stack_pointer = nullptr;
    u32 id = 0;
    bool done = false;
    const u32* waits_for = nullptr;  // runs on when *waits_for != waits_at
    u32 waits_at = 0;
    u32 clusters = 0;  // barriers of the cluster that it has arrived at
    bool arrived = false;  // at one that it has not waited at
    Block* block = nullptr;
    std::vector<std::vector<Copy>> groups;
    std::vector<Copy> open;
    std::vector<std::vector<Pending>> products;  // by batch, the last one open
    u8* stack = nullptr;
};

struct Exchange {
    u32 generation = 0, arrived = 0, operation = 0;
    u32 slot[2][32][8];
};

struct Barrier {
    u32 generation = 0, arrived = 0;
    bool said[2] = {false, false};
};

struct Cluster;

struct Block {
    u32 x, y, z, gx, gy, gz, size, rank, left;  // left: threads that have not ended
    u8* shared;
    u32 shared_bytes;
    u32 registers[32], free, given;  // of each warp's threads; nobody's; how often some were given away
    std::map<void*, i64> owed;  // bytes that marks were promised and that have not landed
    // What peers did here that this block may not have heard of: at a mark (the phase in which, and the barrier before which, it came), and
    // loads and stores of each (the barrier that they come before).
    struct Sent {
        u32 phase, barrier;
    };
    std::map<void*, Sent> sent;
    std::map<u32, u32> touched;
    std::map<void*, bool> handed;  // marks that peers hand over at
    std::vector<Copy> stores;      // of its own threads in peers' memory, not handed over
    Fiber* fibers;
    Exchange* warps;
    Barrier barriers[16];
    Cluster* cluster;
    void* scheduler;
    const void* params;
    void (*body)(const void*);
};

// Blocks that run side by side; of most kernels it is one.
struct Cluster {
    std::vector<Block> blocks;
    std::vector<Late> late;
    u32 generation = 0, arrived = 0, left;
};

static thread_local Fiber* now = nullptr;

__attribute__((naked, noinline)) static void switch_to(void** /*save*/, void* /*load*/) {
    __asm__ volatile(
        "push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
        "mov %rsp, (%rdi)\n mov %rsi, %rsp\n"
        "pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n");
}

static void yield() { switch_to(&now->stack_pointer, now->block->scheduler); }

static void wait_until_changed(const u32* generation, u32 at) {
    while (*generation == at) {
        now->waits_for = generation;
        now->waits_at = at;
        yield();
    }
    now->waits_for = nullptr;
}

static void land(std::vector<Copy>& copies) {
    for (const Copy& copy : copies) {
        if (copy.landed && *copy.landed) continue;
        if (copy.landed) *copy.landed = true;
        if (copy.from) std::memcpy(copy.to, copy.from, copy.bytes);
        else std::memset(copy.to, 0, copy.bytes);
    }
    copies.clear();
}

static void land(Late late) {
    land(late.copies);
    late.arrive(late);
}

// What comes next of what is late.
static void land_one(Cluster& cluster, u32 which) {
    Late late = std::move(cluster.late[which]);
    cluster.late.erase(cluster.late.begin() + which);
    land(std::move(late));
}

// Lets those on who wait at the cluster's barrier, if all others have come or ended. Arrivals that came before it have landed then.
static void cluster_barrier(Cluster& cluster) {
    if (cluster.arrived == 0 || cluster.arrived < cluster.left) return;
    cluster.arrived = 0;
    cluster.generation++;
    for (u32 i = 0; i < cluster.late.size();) {
        const u32 barrier = cluster.late[i].barrier;
        if (barrier != 0 && barrier <= cluster.generation) land_one(cluster, i);
        else i++;
    }
}

// The last thread of a block has ended: what may still come to it?
static void ended(const Block& block) {
    const Cluster& cluster = *block.cluster;
    for (const Late& late : cluster.late) {
        if (late.to == &block) fail("a block ended with copies under way that a mark stands for, or a peer's arrival");
        if (late.from == &block) fail("a block ended before what it sends had left it");
    }
    for (auto& owed : block.owed) {
        if (owed.second) fail("a block ended with bytes that a mark was promised, or that none was");
    }
    if (!block.stores.empty()) fail("a block ended with stores in a peer's memory that it handed over to nobody");
    for (auto& sent : block.sent) {
        if (sent.second.barrier > cluster.generation) fail("a block ended at whose mark a peer arrived, and it has not waited for that");
    }
    for (auto& touched : block.touched) {
        if (touched.second > cluster.generation) fail("a block ended while a peer may still touch its memory");
    }
}

static void entry() {
    Fiber* self = now;
    self->block->body(self->block->params);
    // Those that a mark stands for have until the block ends.
    auto forgotten = [](const std::vector<Copy>& some) {
        return std::any_of(some.begin(), some.end(), [](auto& copy) { return !copy.landed; });
    };
    for (auto& group : self->groups) {
        if (forgotten(group)) fail("a thread ended with a cp.async under way");
    }
    if (forgotten(self->open)) fail("a thread ended with a cp.async that it had not committed");
    if (self->products.size() > 1 || !self->products[0].empty()) fail("a thread ended with products under way");
    if (self->arrived) fail("a thread ended between cluster_arrive and cluster_wait");
    self->done = true;
    Block& block = *self->block;
    block.left--, block.cluster->left--;
    if (block.left == 0) ended(block);
    cluster_barrier(*block.cluster);
    yield();
    fail("a fiber that ended was resumed");
}

// Where MSTAR_EMULATOR_SEED has a number, warps and groups are held up for a while now and then, and copies land before all threads wait
// for them and in another order than they were asked for: one of the orders that a card may have, the same for the same number. Without
// one, every thread goes as far as it can and copies come as late as they can.
struct Chance {
    u64 state = 0;
    u32 round = 0;
    std::vector<u32> until;

    Chance(u32 block, u32 warps) : until(warps) {
        const char* asked = std::getenv("MSTAR_EMULATOR_SEED");
        if (asked) state = (std::strtoull(asked, nullptr, 10) + 1) * 0x9e3779b97f4a7c15ull ^ block * 0xd1342543de82ef95ull ^ 1;
    }
    u32 below(u32 end) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        return u32((state >> 32) * end >> 32);
    }
    // One of `count`, in one of `times` rounds; else none of them.
    u32 one_of(u32 count, u32 times) { return state && count && below(times) == 0 ? below(count) : count; }
    // Another round: some warps, or groups of four, or a block of a cluster, are held up for the next ones.
    void hold(u32 blocks) {
        round++;
        if (!state || below(4) != 0) return;
        const u32 warps = u32(until.size());
        const u32 warp = below(warps), rounds = 1 + below(below(8) == 0 ? 300 : 20);
        const u32 all = blocks > 1 && below(8) == 0 ? warps / blocks : below(2) ? 4 : 1;
        for (u32 w = warp / all * all; w < warps && w < warp / all * all + all; w++) until[w] = round + rounds;
    }
    bool holds(u32 warp) const { return state && until[warp] > round; }
};

struct Grid {
    u32 gx, gy, gz, cluster, block, shared, registers;
    const void* params;
    void (*body)(const void*);

    // A block of a cluster at its start.
    void start(Block& b, u32 index, Fiber* fibers, Exchange* warps, u8* memory) const {
        std::memset(memory, 0xff, shared);
        b.x = index % gx;
        b.y = index / gx % gy;
        b.z = index / gx / gy;
        b.gx = gx, b.gy = gy, b.gz = gz, b.size = b.left = block;
        b.rank = index % cluster;
        for (u32& each : b.registers) each = registers;
        b.shared = memory;
        b.shared_bytes = shared;
        b.fibers = fibers;
        b.warps = warps;
        b.params = params;
        b.body = body;
        for (u32 i = 0; i < block; i++) {
            Fiber& fiber = fibers[i];
            fiber.id = i;
            fiber.done = false;
            fiber.waits_for = nullptr;
            fiber.clusters = 0;
            fiber.arrived = false;
            fiber.block = &b;
            fiber.groups.clear();
            fiber.open.clear();
            fiber.products.assign(1, {});
            void** top = reinterpret_cast<void**>(fiber.stack + STACK);
            *--top = nullptr;  // keeps the stack as a call leaves it
            *--top = reinterpret_cast<void*>(&entry);
            top -= 6;
            std::memset(top, 0, 6 * sizeof *top);
            fiber.stack_pointer = top;
        }
    }

    // The blocks from `index` on that are a cluster. `apart`: bytes from one's memory to the next one's.
    void one(u32 index, std::vector<Fiber>& fibers, u8* memory, u32 apart) const {
        const u32 warps = (block + 31) / 32;
        std::vector<Exchange> exchanges(warps * cluster);
        Cluster all{};
        all.blocks.resize(cluster);
        all.left = block * cluster;
        for (u32 i = 0; i < cluster; i++) {
            Block& b = all.blocks[i];
            b = Block{};
            b.cluster = &all;
            start(b, index + i, &fibers[i * block], &exchanges[i * warps], memory + i * apart);
        }
        Chance chance(index, warps * cluster);
        while (all.left > 0) {
            bool moved = false;
            const u32 early = chance.one_of(u32(all.late.size()), 2);
            if (early < all.late.size()) land_one(all, early);
            chance.hold(cluster);
            for (u32 i = 0; i < block * cluster; i++) {
                Fiber& fiber = fibers[i];
                if (fiber.done || (fiber.waits_for && *fiber.waits_for == fiber.waits_at)) continue;
                if (chance.holds(i / block * warps + i % block / 32)) {
                    moved = true;
                    continue;
                }
                now = &fiber;
                switch_to(&fiber.block->scheduler, fiber.stack_pointer);
                moved = true;
            }
            if (moved) continue;
            for (u32 i = 0; i < block * cluster && all.late.empty(); i++) {
                const Fiber& fiber = fibers[i];
                if (fiber.done) continue;
                if (fiber.waits_for == &fiber.block->given) fail("a group waits for registers that no other gives away (setmaxnreg)");
            }
            if (all.late.empty()) fail("threads of a block wait for each other: a barrier or a collective that not all reach");
            land_one(all, 0);
        }
    }

    static constexpr size_t STACK = 256 << 10;

    void run() const {
        if (block == 0 || block % 32 != 0 || block > 1024) fail("a block has 32 to 1024 threads, whole warps");
        if (cluster == 0 || cluster > 8 || gx % cluster != 0) fail("a grid's x is a multiple of its clusters, which are at most 8 blocks");
        u32 clusters = gx / cluster * gy * gz;
        const char* asked = std::getenv("MSTAR_EMULATOR_THREADS");
        u32 workers = asked ? std::atoi(asked) : std::thread::hardware_concurrency();
        workers = workers < 1 ? 1 : workers > clusters ? (clusters ? clusters : 1) : workers;
        std::atomic<u32> next{0};
        auto work = [&] {
            // Left as it comes: to clear it would touch every page of it.
            std::unique_ptr<u8[]> stacks(new u8[cluster * block * STACK + 64]);
            u8* first = reinterpret_cast<u8*>((reinterpret_cast<size_t>(stacks.get()) + 63) / 64 * 64);
            const u32 apart = (shared + 1023) / 1024 * 1024;
            std::vector<u8> memory(cluster * apart + 1024);
            u8* aligned = reinterpret_cast<u8*>((reinterpret_cast<size_t>(memory.data()) + 1023) / 1024 * 1024);
            std::vector<Fiber> fibers(cluster * block);
            for (u32 i = 0; i < cluster * block; i++) fibers[i].stack = first + i * STACK;
            for (u32 i; (i = next.fetch_add(1)) < clusters;) one(i * cluster, fibers, aligned, apart);
        };
        std::vector<std::thread> others;
        for (u32 i = 1; i < workers; i++) others.emplace_back(work);
        work();
        for (auto& other : others) other.join();
    }
};

// Every lane's words, once all lanes of the warp have come with the same operation.
static inline const u32 (*exchange(u32 operation, const u32* words, u32 count))[8] {
    Fiber* self = now;
    Exchange& warp = self->block->warps[self->id / 32];
    u32 at = warp.generation, lane = self->id % 32;
    if (warp.arrived == 0) warp.operation = operation;
    else if (warp.operation != operation) fail("lanes of a warp call different collectives");
    for (u32 i = 0; i < count; i++) warp.slot[at & 1][lane][i] = words[i];
    if (++warp.arrived == 32) {
        warp.arrived = 0;
        warp.generation++;
    } else {
        wait_until_changed(&warp.generation, at);
    }
    return warp.slot[at & 1];
}

static inline bool barrier(u32 id, u32 count, bool said) {
    Barrier& barrier = now->block->barriers[id];
    u32 at = barrier.generation;
    barrier.said[at & 1] |= said;
    if (++barrier.arrived == count) {
        barrier.arrived = 0;
        barrier.said[(at + 1) & 1] = false;
        barrier.generation++;
    } else {
        wait_until_changed(&barrier.generation, at);
    }
    return barrier.said[at & 1];
}

// Arrives and goes on.
static inline void barrier_arrive(u32 id, u32 count) {
    Barrier& barrier = now->block->barriers[id];
    if (++barrier.arrived == count) {
        barrier.arrived = 0;
        barrier.said[(barrier.generation + 1) & 1] = false;
        barrier.generation++;
    }
}

enum : u32 { XOR, IDX, UP, BALLOT, MATCH, ADD, MAX, SYNC, LDMATRIX, MMA, PRODUCT, STMATRIX, TRANSPOSE, ELECT, MEET };

template <class T>
static inline u32 word(T v) {
    u32 r;
    std::memcpy(&r, &v, 4);
    return r;
}
template <class T>
static inline T unword(u32 v) {
    T r;
    std::memcpy(&r, &v, 4);
    return r;
}
template <class T>
static inline T from_lane(u32 operation, T v, u32 lane) {
    u32 w = word(v);
    return unword<T>(exchange(operation, &w, 1)[lane][0]);
}

}  // namespace emulated

DEVICE u32 thread_x() { return emulated::now->id; }
DEVICE u32 threads() { return emulated::now->block->size; }
DEVICE u32 block_x() { return emulated::now->block->x; }
DEVICE u32 block_y() { return emulated::now->block->y; }
DEVICE u32 block_z() { return emulated::now->block->z; }
DEVICE u32 grid_x() { return emulated::now->block->gx; }
DEVICE u32 grid_y() { return emulated::now->block->gy; }
DEVICE void block_sync() { emulated::barrier(0, emulated::now->block->size, false); }
DEVICE void named_sync(u32 id, u32 count) { emulated::barrier(id, count, false); }
DEVICE void warp_sync() { emulated::exchange(emulated::SYNC, nullptr, 0); }
DEVICE bool block_any(bool said) { return emulated::barrier(0, emulated::now->block->size, said); }

template <class T>
DEVICE T shfl_xor(T v, u32 mask) {
    return emulated::from_lane(emulated::XOR, v, (thread_x() % 32) ^ mask);
}
template <class T>
DEVICE T shfl_idx(T v, u32 lane) {
    return emulated::from_lane(emulated::IDX, v, lane % 32);
}
DEVICE u32 shfl_up(u32 v, u32 by) {
    u32 lane = thread_x() % 32;
    return emulated::from_lane(emulated::UP, v, lane < by ? lane : lane - by);
}
DEVICE u32 ballot(bool said) {
    u32 w = said, r = 0;
    auto all = emulated::exchange(emulated::BALLOT, &w, 1);
    for (u32 i = 0; i < 32; i++) r |= (all[i][0] & 1) << i;
    return r;
}
DEVICE bool warp_any(bool said) { return ballot(said) != 0; }
DEVICE bool warp_all(bool said) { return ballot(said) == 0xffffffffu; }
DEVICE u32 match_any(u32 v) {
    u32 r = 0;
    auto all = emulated::exchange(emulated::MATCH, &v, 1);
    for (u32 i = 0; i < 32; i++) r |= u32(all[i][0] == v) << i;
    return r;
}
DEVICE u32 warp_add(u32 v) {
    u32 r = 0;
    auto all = emulated::exchange(emulated::ADD, &v, 1);
    for (u32 i = 0; i < 32; i++) r += all[i][0];
    return r;
}
DEVICE u32 warp_max(u32 v) {
    u32 r = 0;
    auto all = emulated::exchange(emulated::MAX, &v, 1);
    for (u32 i = 0; i < 32; i++) r = r > all[i][0] ? r : all[i][0];
    return r;
}

DEVICE u32 opaque(u32 v) { return v; }
DEVICE u32 popcount(u32 v) { return __builtin_popcount(v); }
DEVICE u32 leading_zeros(u32 v) { return v ? __builtin_clz(v) : 32; }
DEVICE u32 lowest_bit(u32 v) { return __builtin_ffs(v); }
DEVICE u32 float_bits(float v) { return emulated::word(v); }
DEVICE float bits_float(u32 v) { return emulated::unword<float>(v); }
DEVICE float infinity() { return INFINITY; }
DEVICE float ex2(float v) {
    float r = std::exp2(v);
    return std::fabs(r) < 1.17549435e-38f ? 0.0f : r;
}
DEVICE float reciprocal(float v) { return 1.0f / v; }
DEVICE float larger(float a, float b) { return std::fmax(a, b); }
DEVICE float load_here(const float* at) { return *at; }
DEVICE u32 load_here(const u32* at) { return *at; }
DEVICE float lg2(float v) { return std::log2(v); }
DEVICE float fused(float a, float b, float c) { return float(double(a) * double(b) + double(c)); }
DEVICE float tanh_exact(float v) { return std::tanh(v); }
DEVICE float to_float(Bf16 v) { return bits_float(u32(v.bits) << 16); }
DEVICE float to_float(F16 v) {
    u32 sign = u32(v.bits & 0x8000) << 16, exponent = (v.bits >> 10) & 31, mantissa = v.bits & 1023;
    if (exponent == 31) return bits_float(sign | 0x7f800000u | mantissa << 13);
    if (exponent == 0) {
        float r = std::ldexp(float(mantissa), -24);
        return sign ? -r : r;
    }
    return bits_float(sign | (exponent + 112) << 23 | mantissa << 13);
}
DEVICE float to_float(float v) { return v; }

template <class T>
DEVICE T from_float(float v);
template <>
inline Bf16 from_float<Bf16>(float v) {
    u32 w = float_bits(v);
    if (v != v) return Bf16{0x7fff};
    return Bf16{u16((w + 0x7fff + ((w >> 16) & 1)) >> 16)};
}
template <>
inline F16 from_float<F16>(float v) {
    u16 sign = u16(float_bits(v) >> 16) & 0x8000;
    float size = std::fabs(v);
    if (v != v) return F16{0x7fff};
    if (size >= 65520.0f) return F16{u16(sign | 0x7c00)};
    if (size < 6.103515625e-05f) return F16{u16(sign | u16(std::nearbyint(std::ldexp(size, 24))))};
    u32 w = float_bits(size);
    w += 0xfff + ((w >> 13) & 1);
    return F16{u16(sign | ((w >> 13) - (112 << 10)))};
}
template <>
inline float from_float<float>(float v) {
    return v;
}
template <class T>
DEVICE u32 pack(float lo, float hi) {
    return u32(from_float<T>(lo).bits) | u32(from_float<T>(hi).bits) << 16;
}
DEVICE u32 multiply_bf16(u32 a, u32 b) {
    u32 r = 0;
    for (u32 i = 0; i < 2; i++) {
        float x = to_float(Bf16{u16(a >> (16 * i))}), y = to_float(Bf16{u16(b >> (16 * i))});
        r |= u32(from_float<Bf16>(x * y).bits) << (16 * i);
    }
    return r;
}
DEVICE u32 permuted(u32 v, u32 w, u32 which) {
    u32 r = 0;
    for (u32 i = 0; i < 4; i++) {
        u32 of = which >> (4 * i) & 7;
        r |= ((of < 4 ? v : w) >> (8 * (of % 4)) & 0xff) << (8 * i);
    }
    return r;
}
DEVICE u32 permuted(u32 v, u32 which) { return permuted(v, 0, which); }
DEVICE u8 to_e4m3(float v) {
    u8 sign = float_bits(v) >> 24 & 0x80;
    if (v != v) return sign | 0x7f;
    float size = std::fabs(v);
    if (size >= 448.0f) return sign | 0x7e;
    if (size < 0.015625f) return sign | u8(std::nearbyint(size * 512.0f));
    u32 w = float_bits(size);
    w += 0x7ffff + ((w >> 20) & 1);
    u8 r = u8((w >> 20) - (120 << 3));
    return sign | (r > 0x7e ? 0x7e : r);
}

DEVICE U4 load16(const void* from) {
    if (reinterpret_cast<size_t>(from) % 16) emulated::fail("load16 of an address that is not 16-byte aligned");
    U4 r;
    std::memcpy(&r, from, 16);
    return r;
}
DEVICE U4 load16_once(const void* from) { return load16(from); }
DEVICE void prefetch_l2(const void*) {}
DEVICE U4 load16_fresh(const void* from) { return load16(from); }
DEVICE float load_fresh(const float* from) { return *from; }
DEVICE void store16(void* to, U4 v) {
    if (reinterpret_cast<size_t>(to) % 16) emulated::fail("store16 to an address that is not 16-byte aligned");
    std::memcpy(to, &v, 16);
}
DEVICE u32 atomic_add(u32* at, u32 v) { return __atomic_fetch_add(at, v, __ATOMIC_RELAXED); }
DEVICE u32 atomic_max(u32* at, u32 v) {
    u32 seen = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (seen < v && !__atomic_compare_exchange_n(at, &seen, v, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return seen;
}
DEVICE u32 take_ticket(u32* at) { return __atomic_fetch_add(at, 1, __ATOMIC_ACQ_REL); }
DEVICE void device_fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }

DEVICE void cp_async_16(void* shared, const void* global, bool valid) {
    emulated::Block* block = emulated::now->block;
    (void)block;
    if (reinterpret_cast<size_t>(shared) % 16 || (valid && reinterpret_cast<size_t>(global) % 16))
        emulated::fail("cp_async_16 of an address that is not 16-byte aligned");
    std::memset(shared, 0xff, 16);
    emulated::now->open.push_back({shared, valid ? global : nullptr});
}
DEVICE void cp_async_4(void* shared, const void* global) {
    if (reinterpret_cast<size_t>(shared) % 4 || reinterpret_cast<size_t>(global) % 4)
        emulated::fail("cp_async_4 of an address that is not 4-byte aligned");
    std::memset(shared, 0xff, 4);
    emulated::now->open.push_back({shared, global, 4});
}
DEVICE void cp_async_commit() {
    emulated::now->groups.push_back(std::move(emulated::now->open));
    emulated::now->open.clear();
}
template <u32 N>
DEVICE void cp_async_wait() {
    auto& groups = emulated::now->groups;
    while (groups.size() > N) {
        emulated::land(groups.front());
        groups.erase(groups.begin());
    }
}

namespace emulated {
static inline void ldmatrix(u32 (&r)[4], const void* row, bool transposed) {
    if (reinterpret_cast<size_t>(row) % 16) fail("ldmatrix of a row that is not 16-byte aligned");
    u64 at = reinterpret_cast<u64>(row);
    u32 words[2] = {u32(at), u32(at >> 32)};
    auto all = exchange(LDMATRIX, words, 2);
    u32 lane = thread_x() % 32;
    auto element = [&](u32 matrix, u32 row, u32 column) {
        const u32* of = all[8 * matrix + row];
        return u32(reinterpret_cast<const u16*>(u64(of[0]) | u64(of[1]) << 32)[column]);
    };
    for (u32 i = 0; i < 4; i++) {
        u32 a = lane / 4, b = 2 * (lane % 4);
        r[i] = transposed ? element(i, b, a) | element(i, b + 1, a) << 16
                          : element(i, a, b) | element(i, a, b + 1) << 16;
    }
    exchange(LDMATRIX, words, 0);  // all have read before anyone goes on to write what the rows hold
}
}  // namespace emulated
DEVICE void ldmatrix_x4(u32 (&r)[4], const void* row) { emulated::ldmatrix(r, row, false); }
DEVICE void ldmatrix_x4_trans(u32 (&r)[4], const void* row) { emulated::ldmatrix(r, row, true); }

DEVICE u32 transposed(u32 v) {
    auto all = emulated::exchange(emulated::TRANSPOSE, &v, 1);
    const u32 lane = thread_x() % 32, row = 2 * (lane % 4), column = lane / 4;
    auto element = [&](u32 row) { return all[4 * row + column / 2][0] >> (16 * (column % 2)) & 0xffff; };
    return element(row) | element(row + 1) << 16;
}

template <class T>
DEVICE void mma(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    u32 words[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    auto all = emulated::exchange(emulated::MMA, words, 6);
    u32 g = (thread_x() % 32) / 4, t = (thread_x() % 32) % 4;
    auto half = [](u32 word, u32 which) { return double(to_float(T{u16(word >> (16 * which))})); };
    for (u32 i = 0; i < 4; i++) {
        u32 upper = i / 2, n = 2 * t + i % 2;
        double sum = 0;
        for (u32 k = 0; k < 16; k++) {
            u32 of = (k % 8) / 2;
            double x = half(all[4 * g + of][upper + 2 * (k / 8)], k % 2);
            double y = half(all[4 * n + of][4 + k / 8], k % 2);
            sum += x * y;
        }
        c[i] = float(c[i] + sum);
    }
}
