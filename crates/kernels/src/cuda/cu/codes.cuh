// Numbers in eight bits: e4m3 codes under f32 scales, as fp8/mod.rs has them. A lane is `scale * code`, one multiplication in f32.
#pragma once
#include "ptx.cuh"

constexpr float E4M3_MOST = 448.0f;
// Lanes of a latent that share a scale.
constexpr u32 LATENT_GROUP = 128;

// The nearest e4m3 number to one that is not NaN, ties to even, saturating.
DEVICE u32 nearest_code(float x) {
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
// The code of a lane under a scale, to the bits of a host.
DEVICE u8 code_of(float x, float scale) {
    u32 magnitude = float_bits(x) & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return u8((float_bits(x) >> 24 & 0x80) | 0x7f);
    // An infinity over itself, whose sign a host's division sets.
    if (magnitude == 0x7f800000u) return 0xff;
    return u8(nearest_code(x / scale));
}
// What a lane counts towards the scale: magnitudes order as integers, and NaN does not count.
DEVICE u32 counted(float x) {
    u32 magnitude = float_bits(x) & 0x7fffffffu;
    return magnitude > 0x7f800000u ? 0 : magnitude;
}
// The scale of lanes of which `largest` counts most.
DEVICE float scale_under(u32 largest) {
    return largest == 0 ? 1.0f : most(bits_float(largest) / E4M3_MOST, 1.17549435e-38f);
}

// Numbers at any address.
DEVICE u32 word_at(const u8* from) { return u32(from[0]) | u32(from[1]) << 8 | u32(from[2]) << 16 | u32(from[3]) << 24; }
DEVICE void put_word(u8* to, u32 word) {
    UNROLL
    for (u32 i = 0; i < 4; i++) to[i] = u8(word >> (8 * i));
}

// A latent of `C` lanes under scales and others in bf16: [C e4m3 | ceil(C / 128) f32 | E bf16].
DEVICE u32 latent_scales(u32 C) { return (C + LATENT_GROUP - 1) / LATENT_GROUP; }
DEVICE float latent_lane(const u8* token, u32 lane, u32 C) {
    const u8* scales = token + C;
    if (lane < C) return from_e4m3(token[lane]) * bits_float(word_at(scales + lane / LATENT_GROUP * 4));
    const u8* at = scales + 4 * latent_scales(C) + 2 * (lane - C);
    return to_float(Bf16{u16(at[0] | at[1] << 8)});
}

// Two codes in the upper bytes of two halves as two bf16, exactly: their digits moved to where a bf16 has its own are 2^-120 of them,
// but for NaN.
DEVICE u32 widened(u32 codes) { return multiply_bf16((codes & 0x7f007f00u) >> 4 | (codes & 0x80008000u), 0x7b807b80u); }
// Bits of codes that are NaN: the highest of each byte.
DEVICE u32 nans_of(u32 codes) { return (codes & 0x7f7f7f7fu) + 0x01010101u & 0x80808080u; }
// The same where they are.
DEVICE u32 with_nans(u32 pair, u32 nans) { return pair | (nans & 0x8000 ? 0x7fffu : 0) | (nans & 0x80000000u ? 0x7fff0000u : 0); }
// Sixteen codes as bf16, exactly: the first eight, and the others; turned, the others first.
struct Widened {
    U4 first, second;
};
DEVICE Widened widened(const U4& codes, bool turned) {
    const u32 words[4] = {turned ? codes.z : codes.x, turned ? codes.w : codes.y, turned ? codes.x : codes.z, turned ? codes.y : codes.w};
    u32 pairs[8];
    UNROLL
    for (u32 i = 0; i < 8; i++) pairs[i] = widened(permuted(words[i / 2], i % 2 ? 0x3424 : 0x1404));
    const u32 sums = ((words[0] & 0x7f7f7f7fu) + 0x01010101u) | ((words[1] & 0x7f7f7f7fu) + 0x01010101u) |
                     ((words[2] & 0x7f7f7f7fu) + 0x01010101u) | ((words[3] & 0x7f7f7f7fu) + 0x01010101u);
    if (sums & 0x80808080u) {
        UNROLL
        for (u32 i = 0; i < 8; i++) pairs[i] = with_nans(pairs[i], nans_of(permuted(words[i / 2], i % 2 ? 0x3424 : 0x1404)));
    }
    return Widened{{pairs[0], pairs[1], pairs[2], pairs[3]}, {pairs[4], pairs[5], pairs[6], pairs[7]}};
}

// What rounding left of two weights times scales. A product of its own adds it: a row that one key decides would have that key's
// scale rounded in every lane alike.
DEVICE u32 rest_of(float lo, float hi, u32 pair) {
    return pack<Bf16>(lo - bits_float(pair << 16), hi - bits_float(pair & 0xffff0000u));
}
