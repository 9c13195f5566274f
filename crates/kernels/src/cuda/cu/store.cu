// Tokens into a cache of e4m3: a scatter that quantises on its way, to the bits of fp8/store.rs.
//
// A warp has what one scale is for: a head of a token, or 128 lanes of a latent. A slot that is not there is written nothing, and
// tokens that go to one slot leave any mixture of themselves.
#include "codes.cuh"

// Keys or values [T, G, D] into codes [P, S, G, D] and scales [P, S, G]; or latents [T, C] and [T, E] into [P, S, B]. All distances
// are in bytes.
struct Store {
    const i64* slots;  // [T]
    const u8* from;
    const u8* pe;      // of latents: the rotary lanes
    u8* to;
    u8* scales;
    i64 from_token, from_head, pe_token;
    i64 to_page, to_slot, to_head;
    i64 scale_page, scale_slot, scale_head;
    u64 tokens;
    u64 limit;         // what a slot must be below
    u32 page_size, heads, width, pe_width;
    u32 type, pe_type; // 0 f32, 1 bf16, 2 f16
};
// One side of the same tokens, or two: keys and values.
struct Both {
    Store of[2];
};
static_assert(sizeof(Store) == 152 && sizeof(Both) == 304, "as in store.rs");

// Number `index` of a run of floats of a type. A NaN keeps its sign and digits, as on a host.
DEVICE float number_at(const u8* from, u32 index, u32 type) {
    if (type == 1) return to_float(reinterpret_cast<const Bf16*>(from)[index]);
    if (type == 2) {
        const F16 half = reinterpret_cast<const F16*>(from)[index];
        const u32 bits = half.bits;
        if ((bits & 0x7fff) > 0x7c00) return bits_float((bits & 0x8000) << 16 | 0x7fc00000u | (bits & 0x3ff) << 13);
        return to_float(half);
    }
    return reinterpret_cast<const float*>(from)[index];
}
// Writes `count` lanes as codes; their scale. By a whole warp.
DEVICE float quantise(const u8* from, u32 type, u32 first, u32 count, u8* to) {
    u32 largest = 0;
    for (u32 i = lane(); i < count; i += 32) largest = most(largest, counted(number_at(from, first + i, type)));
    const float scale = scale_under(warp_max(largest));
    for (u32 i = lane(); i < count; i += 32) to[i] = code_of(number_at(from, first + i, type), scale);
    return scale;
}
// A bf16's bits, rounded to nearest even; a NaN keeps its sign and leading digits, as on a host.
DEVICE u16 rounded(float x) {
    u32 bits = float_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return u16(bits >> 16 | 0x40);
    return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
// The slot of a token as an offset; whether there is one.
DEVICE bool slot_of(const Store& p, u64 token, i64& page, i64& slot) {
    const i64 at = p.slots[token];
    if (at < 0 || u64(at) >= p.limit) return false;
    page = i64(u64(at) / p.page_size), slot = i64(u64(at) % p.page_size);
    return true;
}

MSTAR_KERNEL(store_heads, Both, 256, 4) {
    const u64 first = p.of[0].tokens * p.of[0].heads, all = first + p.of[1].tokens * p.of[1].heads;
    for (u64 at = u64(block_x()) * 8 + warp(); at < all; at += u64(grid_x()) * 8) {
        const Store& side = p.of[at >= first];
        const u64 of = at >= first ? at - first : at, token = of / side.heads;
        const i64 head = i64(of % side.heads);
        i64 page, slot;
        if (!slot_of(side, token, page, slot)) continue;
        const float scale = quantise(side.from + i64(token) * side.from_token + head * side.from_head, side.type, 0, side.width,
                                     side.to + page * side.to_page + slot * side.to_slot + head * side.to_head);
        u8* scale_at = side.scales + page * side.scale_page + slot * side.scale_slot + head * side.scale_head;
        if (lane() == 0) *reinterpret_cast<float*>(scale_at) = scale;
    }
}

MSTAR_KERNEL(store_latents, Store, 256, 4) {
    const u32 C = p.width, groups = latent_scales(C), parts = groups + (p.pe_width > 0);
    for (u64 at = u64(block_x()) * 8 + warp(); at < p.tokens * parts; at += u64(grid_x()) * 8) {
        const u64 token = at / parts;
        const u32 group = u32(at % parts), first = group * LATENT_GROUP;
        i64 page, slot;
        if (!slot_of(p, token, page, slot)) continue;
        u8* to = p.to + page * p.to_page + slot * p.to_slot;
        if (group < groups) {
            const u32 count = least(LATENT_GROUP, C - first);
            const float scale = quantise(p.from + i64(token) * p.from_token, p.type, first, count, to + first);
            if (lane() == 0) put_word(to + C + 4 * group, float_bits(scale));
            continue;
        }
        to += C + 4 * groups;
        const u8* pe = p.pe + i64(token) * p.pe_token;
        for (u32 i = lane(); i < p.pe_width; i += 32) {
            const u16 bits = rounded(number_at(pe, i, p.pe_type));
            to[2 * i] = u8(bits), to[2 * i + 1] = u8(bits >> 8);
        }
    }
}
