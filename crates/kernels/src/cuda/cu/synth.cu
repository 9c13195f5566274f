// Synthetic queries, keys and values, bit for bit those of synth.rs: integers alone, then bf16 bits.
//
// Define: OUT_TYPE (0 f32, 1 bf16, 2 f16).
#include "ptx.cuh"

constexpr u64 GOLDEN = 0x9e3779b97f4a7c15ull;
constexpr u32 THREADS = 256;

struct Fill {
    u64 keys;  // [T] u64, the content keys of positions
    u64 out;   // [T, heads, D]
    u64 stem;
    i64 token, head;  // elements
    u32 tokens, heads, width, reserved;
};
static_assert(sizeof(Fill) == 56, "as in exec/synth.rs");

DEVICE u64 mix(u64 x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}
DEVICE u32 word_of(u64 state, u32 pair) {
    u32 x = u32(state) + pair * 0x9e3779b9u;
    x = ((x ^ (x >> 16)) * 0x7feb352du) ^ u32(state >> 32);
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}
DEVICE u32 value_bits(u32 hash) {
    u32 sign = hash & 0x8000, mantissa = hash & 0x7f, choice = (hash >> 7) & 7;
    u32 down = (choice & 1) + u32((choice & 3) == 3) + u32(choice == 7);
    return sign | ((127 - down) << 7) | mantissa;
}
#if OUT_TYPE == 0
typedef float Value;
DEVICE Value value_of(u32 bits) { return bits_float(bits << 16); }
#elif OUT_TYPE == 1
typedef Bf16 Value;
DEVICE Value value_of(u32 bits) { return Bf16{u16(bits)}; }
#else
typedef F16 Value;
// Exponents are 124..127, in range of f16, whose bias is 112 lower.
DEVICE Value value_of(u32 bits) { return F16{u16((bits & 0x8000) | (((bits & 0x7fff) << 3) - (112 << 10)))}; }
#endif

MSTAR_KERNEL(synth, Fill, 256, 4) {
    const u64* keys = reinterpret_cast<const u64*>(p.keys);
    const u32 pairs = (p.width + 1) / 2;
    const u64 all = u64(p.tokens) * p.heads * pairs;
    for (u64 i = u64(block_x()) * THREADS + thread_x(); i < all; i += u64(grid_x()) * THREADS) {
        u32 pair = u32(i % pairs), head = u32(i / pairs % p.heads);
        u64 token = i / pairs / p.heads;
        u64 state = mix(mix(p.stem ^ keys[token]) + (u64(head) + 1) * GOLDEN);
        u32 word = word_of(state, pair);
        Value* out = reinterpret_cast<Value*>(p.out) + i64(token) * p.token + i64(head) * p.head + 2 * pair;
        out[0] = value_of(value_bits(word & 0xffff));
        if (2 * pair + 1 < p.width) out[1] = value_of(value_bits(word >> 16));
    }
}
