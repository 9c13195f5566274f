// Index scores: sum over heads of w[h] * relu(q[h] . k), of every key that a row sees.
//
// A warp takes 32 keys (KEY_TILES times 16) straight from memory into registers, 16 bytes a lane, and multiplies them with all
// heads of the row from shared memory. The depth is summed in an order that suits those loads, the same for keys and queries: in
// a step of 32 lanes of depth, lane t of four has depth 8t..8t+7, of which a product takes four and the next the others. Heads are
// then summed in registers, in order, and across four lanes at the end. A score's bits follow from its row's query and weights and
// its key's bytes alone.
//
// Defines: Q_TYPE (1 bf16, 2 f16), KEY_TYPE (Q_TYPE, or 3: e4m3 with a scale a key), DEPTH (Di padded to a multiple of 32, at most
// 256), KEY_TILES, KEYS_ALIGNED (1: keys start at multiples of 16 bytes and Di is a multiple of 8), MIN_BLOCKS.
// scores_plain: Q_TYPE and KEY_TYPE 0 (f32), 1, 2, 3 as they come, any Di.

#include "scores.cuh"

#ifdef DEPTH
#if Q_TYPE == 1
typedef Bf16 Element;
#else
typedef F16 Element;
#endif

constexpr u32 THREADS = 192, WARPS = 6;
constexpr u32 WARP_KEYS = KEY_TILES * 16, STEPS = DEPTH / 32;
// Bytes from one head's query to the next: 64 past a multiple of 128, so that eight lanes never meet in a bank.
constexpr u32 PITCH = (DEPTH * 2 + 127) / 128 * 128 + 64;

// Eight lanes of a key from depth `at` on, as pairs; zeros past its width.
DEVICE U4 key_lanes(const u8* key, u32 at, u32 width) {
    if (KEY_TYPE != 3 && KEYS_ALIGNED) return at < width ? load16(key + at * 2) : U4{0, 0, 0, 0};
    u32 words[4];
    if (KEY_TYPE == 3) {
        u32 codes[2] = {0, 0};
        if (at < width) codes[0] = *reinterpret_cast<const u32*>(key + at);
        if (at + 4 < width) codes[1] = *reinterpret_cast<const u32*>(key + at + 4);
        UNROLL
        for (u32 i = 0; i < 4; i++) {
            u32 pair = codes[i / 2] >> (16 * (i % 2));
            words[i] = pack<Element>(e4m3(pair), e4m3(pair >> 8));
        }
    } else {
        const u16* lanes = reinterpret_cast<const u16*>(key);
        UNROLL
        for (u32 i = 0; i < 4; i++) {
            u32 low = at + 2 * i < width ? lanes[at + 2 * i] : 0, high = at + 2 * i + 1 < width ? lanes[at + 2 * i + 1] : 0;
            words[i] = low | high << 16;
        }
    }
    return U4{words[0], words[1], words[2], words[3]};
}

MSTAR_KERNEL(scores, Scores, THREADS, MIN_BLOCKS) {
    SHARED(shared);
    clear_states(p);
    const Table* table = p.table;
    const u32 w = warp(), l = lane(), g = l / 4, t = l % 4;
    const u32 heads = (p.heads + 7) / 8 * 8;
    // [heads] queries, then [heads] weights; heads past the last weigh 0.
    float* weights = reinterpret_cast<float*>(shared + heads * PITCH);
    const u32 chunks = (most(table->keys, p.to_width) + p.chunk - 1) / p.chunk;
    const u32 end_row = least(p.row_end, table->rows);
    const u32 rows = end_row > p.row_begin ? end_row - p.row_begin : 0;
    u32 loaded = ~0u;
    for (u32 unit = block_x(); unit < rows * chunks; unit += grid_x()) {
        const u32 row = p.row_begin + unit / chunks, from = unit % chunks * p.chunk;
        const u32 seen = u32(least(i64(seen_of(table, row)), p.to_stride));
        float* out = p.to + i64(row - p.to_row) * p.to_stride;
        for (u32 key = most(from, seen) + thread_x(); key < least(from + p.chunk, p.to_width); key += THREADS)
            out[key] = -infinity();
        if (from >= seen) continue;
        if (loaded != row) {
            block_sync();
            for (u32 head = w; head < heads; head += WARPS) {
                const Element* q = reinterpret_cast<const Element*>(p.q) + i64(row) * p.q_token + i64(head) * p.q_head;
                u32* to = reinterpret_cast<u32*>(shared + head * PITCH);
                for (u32 i = l; i < DEPTH / 2; i += 32) {
                    bool low = head < p.heads && 2 * i < p.width, high = head < p.heads && 2 * i + 1 < p.width;
                    to[i] = u32(low ? q[2 * i].bits : u16(0)) | u32(high ? q[2 * i + 1].bits : u16(0)) << 16;
                }
            }
            for (u32 head = thread_x(); head < heads; head += THREADS)
                weights[head] = head < p.heads ? p.weights[i64(row) * p.weight_token + head] : 0.0f;
            block_sync();
            loaded = row;
        }
        const Slots slots = slots_of(table, request_of(table, row));
        const u32 to = least(from + p.chunk, seen);
        NO_UNROLL
        for (u32 first = from + w * WARP_KEYS; first < to; first += WARPS * WARP_KEYS) {
            // Lane l knows where key first + l lies; past the end it is the last key, whose score is not stored.
            u32 mine = least(first + least(l, WARP_KEYS - 1), to - 1);
            u64 at = reinterpret_cast<u64>(p.keys) + u64(slot_at(slots, mine, p.S, p.key_page, p.key_slot));
            float scale = KEY_TYPE == 3 ? *reinterpret_cast<const float*>(at + p.width) : 1.0f;
            U4 keys[KEY_TILES][2][STEPS];
            UNROLL
            for (u32 tile = 0; tile < KEY_TILES; tile++)
                UNROLL
                for (u32 half = 0; half < 2; half++) {
                    u32 of = tile * 16 + half * 8 + g;
                    const u8* key = reinterpret_cast<const u8*>(u64(shfl_idx(u32(at), of)) |
                                                                u64(shfl_idx(u32(at >> 32), of)) << 32);
                    UNROLL
                    for (u32 step = 0; step < STEPS; step++)
                        keys[tile][half][step] = key_lanes(key, step * 32 + t * 8, p.width);
                }
            float total[KEY_TILES][2];
            UNROLL
            for (u32 tile = 0; tile < KEY_TILES; tile++) total[tile][0] = total[tile][1] = 0.0f;
            NO_UNROLL
            for (u32 head = 0; head < heads; head += 8) {
                float c[KEY_TILES][4];
                UNROLL
                for (u32 tile = 0; tile < KEY_TILES; tile++) c[tile][0] = c[tile][1] = c[tile][2] = c[tile][3] = 0.0f;
                UNROLL
                for (u32 step = 0; step < STEPS; step++) {
                    U4 q = load16(shared + (head + g) * PITCH + (step * 32 + t * 8) * 2);
                    u32 first_b[2] = {q.x, q.y}, second_b[2] = {q.z, q.w};
                    UNROLL
                    for (u32 tile = 0; tile < KEY_TILES; tile++) {
                        const U4 &upper = keys[tile][0][step], &lower = keys[tile][1][step];
                        u32 first_a[4] = {upper.x, lower.x, upper.y, lower.y}, second_a[4] = {upper.z, lower.z, upper.w, lower.w};
                        mma<Element>(c[tile], first_a, first_b);
                        mma<Element>(c[tile], second_a, second_b);
                    }
                }
                float w0 = weights[head + 2 * t], w1 = weights[head + 2 * t + 1];
                // A head past the last is zeros, which an infinite key would make NaN.
                bool real0 = head + 2 * t < p.heads, real1 = head + 2 * t + 1 < p.heads;
                UNROLL
                for (u32 tile = 0; tile < KEY_TILES; tile++)
                    UNROLL
                    for (u32 half = 0; half < 2; half++) {
                        if (real0) total[tile][half] = fused(w0, relu(c[tile][2 * half]), total[tile][half]);
                        if (real1) total[tile][half] = fused(w1, relu(c[tile][2 * half + 1]), total[tile][half]);
                    }
            }
            float mine_score = 0.0f;
            UNROLL
            for (u32 tile = 0; tile < KEY_TILES; tile++)
                UNROLL
                for (u32 half = 0; half < 2; half++) {
                    float sum = total[tile][half];
                    sum += shfl_xor(sum, 1);
                    sum += shfl_xor(sum, 2);
                    // Lane l stores key l: the sum is with lanes 4 (l % 8)..
                    float moved = shfl_idx(sum, l % 8 * 4);
                    if (l / 8 == tile * 2 + half) mine_score = moved;
                }
            if (l < WARP_KEYS && first + l < to) out[first + l] = KEY_TYPE == 3 ? mine_score * scale : mine_score;
        }
    }
}
#else

#if Q_TYPE == 0
typedef float Query;
#elif Q_TYPE == 1
typedef Bf16 Query;
#else
typedef F16 Query;
#endif

DEVICE float key_lane(const u8* key, u32 at) {
    if (KEY_TYPE == 3) return e4m3(key[at]);
    if (KEY_TYPE == 1) return to_float(reinterpret_cast<const Bf16*>(key)[at]);
    if (KEY_TYPE == 2) return to_float(reinterpret_cast<const F16*>(key)[at]);
    return reinterpret_cast<const float*>(key)[at];
}

// A thread a key.
MSTAR_KERNEL(scores_plain, Scores, 128, 4) {
    clear_states(p);
    const Table* table = p.table;
    const u32 chunks = (most(table->keys, p.to_width) + 127) / 128;
    const u32 end_row = least(p.row_end, table->rows);
    const u32 rows = end_row > p.row_begin ? end_row - p.row_begin : 0;
    for (u32 unit = block_x(); unit < rows * chunks; unit += grid_x()) {
        const u32 row = p.row_begin + unit / chunks, key = unit % chunks * 128 + thread_x();
        const u32 seen = u32(least(i64(seen_of(table, row)), p.to_stride));
        float* out = p.to + i64(row - p.to_row) * p.to_stride;
        if (key >= seen) {
            if (key < p.to_width) out[key] = -infinity();
            continue;
        }
        const Slots slots = slots_of(table, request_of(table, row));
        const u8* at = p.keys + slot_at(slots, key, p.S, p.key_page, p.key_slot);
        const Query* q = reinterpret_cast<const Query*>(p.q) + i64(row) * p.q_token;
        float total = 0.0f;
        for (u32 head = 0; head < p.heads; head++) {
            float sum = 0.0f;
            for (u32 d = 0; d < p.width; d++) sum = fused(to_float(q[i64(head) * p.q_head + d]), key_lane(at, d), sum);
            total = fused(p.weights[i64(row) * p.weight_token + head], relu(sum), total);
        }
        if (KEY_TYPE == 3) {
            // A key may start anywhere.
            const u8* scale = at + p.width;
            total *= bits_float(u32(scale[0]) | u32(scale[1]) << 8 | u32(scale[2]) << 16 | u32(scale[3]) << 24);
        }
        out[key] = total;
    }
}
#endif
