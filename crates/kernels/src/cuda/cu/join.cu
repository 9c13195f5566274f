// Partial results of attention joined (lse.rs): a warp has one query under one head. What weighs nothing is not read.
//
// Define: OUT_TYPE, the output's (0 f32, 1 bf16, 2 f16).
#include "ptx.cuh"

#if OUT_TYPE == 0
typedef float Result;
#elif OUT_TYPE == 1
typedef Bf16 Result;
#else
typedef F16 Result;
#endif

constexpr u32 WARPS = 8, MOST = 60;
constexpr float LN_2 = 0.693147180559945309f, LOG2_E = 1.44269504088896341f;

// o [T, H, W] and lse [T, H]; distances in elements.
struct Partial {
    u64 o, lse;
    i64 o_token, o_head, lse_token, lse_head;
    u32 dtype, reserved;
};
struct Join {
    Partial out;
    u32 parts, tokens, heads, width;
    Partial part[MOST];
};
static_assert(sizeof(Partial) == 56 && sizeof(Join) == 72 + 56 * MOST, "as in join.rs");

DEVICE float number_at(u64 row, u32 dtype, u32 at) {
    if (dtype == 1) return to_float(reinterpret_cast<const Bf16*>(row)[at]);
    if (dtype == 2) return to_float(reinterpret_cast<const F16*>(row)[at]);
    return reinterpret_cast<const float*>(row)[at];
}

MSTAR_KERNEL(join, Join, 256, 4) {
    const u64 rows = u64(p.tokens) * p.heads;
    for (u64 row = u64(block_x()) * WARPS + warp(); row < rows; row += u64(grid_x()) * WARPS) {
        const i64 token = i64(row / p.heads), head = i64(row % p.heads);
        // Two parts a lane.
        float lse[2], weight[2];
        float top = -infinity();
        UNROLL for (u32 i = 0; i < 2; i++) {
            u32 of = lane() + 32 * i;
            lse[i] = -infinity();
            if (of < p.parts) {
                const Partial& part = p.part[of];
                lse[i] = reinterpret_cast<const float*>(part.lse)[token * part.lse_token + head * part.lse_head];
            }
            top = most(top, lse[i]);
        }
        UNROLL for (u32 by = 1; by < 32; by *= 2) top = most(top, shfl_xor(top, by));
        const float reference = top == -infinity() ? 0.0f : top;
        float total = 0.0f;
        UNROLL for (u32 i = 0; i < 2; i++) {
            weight[i] = ex2((lse[i] - reference) * LOG2_E);
            total += weight[i];
        }
        UNROLL for (u32 by = 1; by < 32; by *= 2) total += shfl_xor(total, by);
        // Where nothing was seen, there is nothing to divide.
        const float share = total == 0.0f ? 0.0f : 1.0f / total;
        UNROLL for (u32 i = 0; i < 2; i++) weight[i] *= share;
        for (u32 begin = 0; begin < p.width; begin += 32) {
            const u32 at = begin + lane();
            float sum = 0.0f;
            bool first = true;
            for (u32 of = 0; of < p.parts; of++) {
                float w = shfl_idx(of < 32 ? weight[0] : weight[1], of % 32);
                if (w == 0.0f) continue;
                const Partial& part = p.part[of];
                const u64 size = part.dtype == 0 ? 4 : 2;
                const u64 from = part.o + u64(token * part.o_token + head * part.o_head) * size;
                float x = at < p.width ? w * number_at(from, part.dtype, at) : 0.0f;
                sum = first ? x : sum + x;
                first = false;
            }
            Result* to = reinterpret_cast<Result*>(p.out.o) + token * p.out.o_token + head * p.out.o_head;
            if (at < p.width) to[at] = from_float<Result>(sum);
        }
        if (lane() == 0) {
            float all = total == 0.0f ? -infinity() : reference + lg2(total) * LN_2;
            reinterpret_cast<float*>(p.out.lse)[token * p.out.lse_token + head * p.out.lse_head] = all;
        }
    }
}
