// What a device can do at most, for other kernels to be held against: reading memory, and multiplying matrices.
#include "ptx.cuh"

struct Peak {
    u64 at;     // 16-byte pieces to read
    u64 count;  // how many there are; of multiply: rounds
    u64 sink;   // 0: results go nowhere, though the compiler cannot know
};
static_assert(sizeof(Peak) == 24, "as in peak.rs");

constexpr u32 IN_FLIGHT = 8, SUMS = 8;

// Every piece once, eight in flight a thread; a warp reads 512 bytes in a row.
MSTAR_KERNEL(read_all, Peak, 512, 2) {
    const U4* from = reinterpret_cast<const U4*>(p.at);
    const u64 step = u64(grid_x()) * threads();
    u64 i = u64(block_x()) * threads() + thread_x();
    u32 fold = 0;
    for (; i + (IN_FLIGHT - 1) * step < p.count; i += IN_FLIGHT * step) {
        U4 piece[IN_FLIGHT];
        UNROLL
        for (u32 j = 0; j < IN_FLIGHT; ++j) piece[j] = load16_once(from + i + j * step);
        UNROLL
        for (u32 j = 0; j < IN_FLIGHT; ++j) fold ^= piece[j].x ^ piece[j].y ^ piece[j].z ^ piece[j].w;
    }
    for (; i < p.count; i += step) {
        U4 piece = load16_once(from + i);
        fold ^= piece.x ^ piece.y ^ piece.z ^ piece.w;
    }
    if (p.sink) atomic_max(reinterpret_cast<u32*>(p.sink), fold);
}

// Products of 16 x 16 by 16 x 8 into eight sums a warp, so that none waits for another; SUMS * 4096 operations a warp and round.
// The factors are no zeros: those would spare power, and show a clock that no kernel has.
MSTAR_KERNEL(multiply, Peak, 256, 2) {
    float sum[SUMS][4] = {};
    u32 a[4], b[2];
    UNROLL
    for (u32 j = 0; j < 4; ++j) a[j] = 0x3f803f80u ^ ((thread_x() * 2654435761u >> j) & 0x807f807fu);
    UNROLL
    for (u32 j = 0; j < 2; ++j) b[j] = 0x3f803f80u ^ ((thread_x() * 2246822519u >> j) & 0x807f807fu);
    NO_UNROLL
    for (u64 round = 0; round < p.count; ++round) {
        UNROLL
        for (u32 j = 0; j < SUMS; ++j) mma<Bf16>(sum[j], a, b);
    }
    float all = 0.0f;
    UNROLL
    for (u32 j = 0; j < SUMS; ++j) all += sum[j][0] + sum[j][1] + sum[j][2] + sum[j][3];
    if (p.sink) atomic_max(reinterpret_cast<u32*>(p.sink), float_bits(all));
}
