// What a Hopper's warpgroups multiply at most, for other kernels to be held against.
#include "hopper.cuh"

struct Peak {
    u64 at;     // nothing here
    u64 count;  // rounds
    u64 sink;   // 0: results go nowhere, though the compiler cannot know
};
static_assert(sizeof(Peak) == 24, "as in peak.rs");

// A round is a[64 x 64] b[64 x 256]: 2 * 64 * 64 * 256 operations a group. Each group has a left operand of its own.
constexpr u32 GROUPS = 2, COLUMNS = 256, DEPTH = 64;
constexpr u32 LEFT_BYTES = 64 * DEPTH * 2, RIGHT_BYTES = COLUMNS * DEPTH * 2;

MSTAR_KERNEL(multiply_groups, Peak, GROUPS * 128, 1) {
    SHARED(shared);
    // The factors are of either sign and have whole fractions: zeros would spare power, and show a clock that no kernel has.
    u32* words = reinterpret_cast<u32*>(shared);
    for (u32 i = thread_x(); i < (GROUPS * LEFT_BYTES + RIGHT_BYTES) / 4; i += threads()) {
        u32 mixed = (i + 1) * 2654435761u;
        mixed = (mixed ^ mixed >> 15) * 2246822519u;
        words[i] = 0x3f003f00u ^ ((mixed ^ mixed >> 13) & 0x807f807fu);
    }
    async_fence();
    block_sync();
    const u64 left = tile_desc(shared + group_index() * LEFT_BYTES, 0, 1024);
    const u64 right = tile_desc(shared + GROUPS * LEFT_BYTES, 0, 1024);
    float sums[COLUMNS / 2];
    UNROLL
    for (u32 i = 0; i < COLUMNS / 2; i++) sums[i] = 0.0f;
    NO_UNROLL
    for (u64 round = 0; round < p.count; round++) {
        pin(sums);
        wgmma_fence();
        UNROLL
        for (u32 k = 0; k < DEPTH / 16; k++)
            wgmma_ss<Bf16, COLUMNS, false, false>(sums, desc_on(left, k * 32), desc_on(right, k * 32), true);
        wgmma_commit();
        wgmma_wait<0>();
        pin(sums);
    }
    float all = 0.0f;
    UNROLL
    for (u32 i = 0; i < COLUMNS / 2; i++) all += sums[i];
    if (p.sink) atomic_max(reinterpret_cast<u32*>(p.sink), float_bits(all));
}
