// Index keys stored in another type: rounded, or as e4m3 with a scale a key, [Di e4m3 | f32], to the bits of dsa/keys.rs. A warp
// has a token.
//
// Defines: KEY_TYPE (0 f32, 1 bf16, 2 f16), the type that keys come in; of `convert`, TO_TYPE, that in which they are kept.

#include "codes.cuh"

#if KEY_TYPE == 0
typedef float Key;
#elif KEY_TYPE == 1
typedef Bf16 Key;
#else
typedef F16 Key;
#endif

struct Quantise {
    const u8* keys;  // [T, Di]
    u8* to;          // [T, Di + 4]
    i64 from_stride, to_stride;  // elements; elements of what they become
    u32 tokens, width;
};
static_assert(sizeof(Quantise) == 40, "as in exec/select.rs");

#ifdef TO_TYPE
#if TO_TYPE == 0
typedef float Kept;
#elif TO_TYPE == 1
typedef Bf16 Kept;
#else
typedef F16 Kept;
#endif

MSTAR_KERNEL(convert, Quantise, 128, 4) {
    for (u64 token = u64(block_x()) * 4 + warp(); token < p.tokens; token += u64(grid_x()) * 4) {
        const Key* key = reinterpret_cast<const Key*>(p.keys) + i64(token) * p.from_stride;
        Kept* to = reinterpret_cast<Kept*>(p.to) + i64(token) * p.to_stride;
        for (u32 d = lane(); d < p.width; d += 32) to[d] = from_float<Kept>(to_float(key[d]));
    }
}
#else
MSTAR_KERNEL(quantise, Quantise, 128, 4) {
    for (u64 token = u64(block_x()) * 4 + warp(); token < p.tokens; token += u64(grid_x()) * 4) {
        const Key* key = reinterpret_cast<const Key*>(p.keys) + i64(token) * p.from_stride;
        u8* to = p.to + i64(token) * p.to_stride;
        u32 largest = 0;
        for (u32 d = lane(); d < p.width; d += 32) largest = most(largest, counted(to_float(key[d])));
        const float scale = scale_under(warp_max(largest));
        for (u32 d = lane(); d < p.width; d += 32) to[d] = code_of(to_float(key[d]), scale);
        // A key's bytes start at any address.
        if (lane() < 4) to[p.width + lane()] = u8(float_bits(scale) >> (8 * lane()));
    }
}
#endif
