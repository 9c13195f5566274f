// Index keys stored in another type: rounded, or as e4m3 with a scale a key, [Di e4m3 | f32], to the bits of dsa/keys.rs. A warp
// has a token.
//
// Defines: KEY_TYPE (0 f32, 1 bf16, 2 f16), the type that keys come in; of `convert`, TO_TYPE, that in which they are kept.

#include "ptx.cuh"

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
// The nearest e4m3 number, ties to even, saturating.
DEVICE u32 nearest(float x) {
    u32 bits = float_bits(x), magnitude = bits & 0x7fffffffu, sign = bits >> 24 & 0x80;
    u32 code;
    if (magnitude >= 0x43e00000u) {
        code = 0x7e;
    } else if (magnitude < 0x3c800000u) {
        // Multiples of 2^-9: adding 2^23 rounds to an integer.
        code = float_bits(bits_float(magnitude) * 512.0f + 8388608.0f) & 0xf;
    } else {
        code = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
    }
    return sign | code;
}

MSTAR_KERNEL(quantise, Quantise, 128, 4) {
    for (u64 token = u64(block_x()) * 4 + warp(); token < p.tokens; token += u64(grid_x()) * 4) {
        const Key* key = reinterpret_cast<const Key*>(p.keys) + i64(token) * p.from_stride;
        u8* to = p.to + i64(token) * p.to_stride;
        // Magnitudes order as integers; NaN does not count.
        u32 largest = 0;
        for (u32 d = lane(); d < p.width; d += 32) {
            u32 magnitude = float_bits(to_float(key[d])) & 0x7fffffffu;
            if (magnitude <= 0x7f800000u) largest = most(largest, magnitude);
        }
        largest = warp_max(largest);
        float scale = largest == 0 ? 1.0f : most(bits_float(largest) / 448.0f, 1.17549435e-38f);
        for (u32 d = lane(); d < p.width; d += 32) {
            float x = to_float(key[d]);
            u32 magnitude = float_bits(x) & 0x7fffffffu;
            u32 code;
            if (magnitude > 0x7f800000u) code = (float_bits(x) >> 24 & 0x80) | 0x7f;
            // An infinity over itself, whose sign a host's division sets.
            else if (magnitude == 0x7f800000u) code = 0xff;
            else code = nearest(x / scale);
            to[d] = u8(code);
        }
        // A key's bytes start at any address.
        if (lane() < 4) to[p.width + lane()] = u8(float_bits(scale) >> (8 * lane()));
    }
}
#endif
