// Any list, any dtype, any width: products, softmax and values in f32. The path of f32, and of shapes that no other kernel
// takes. A block works for ROWS of an item's query vectors at a time, over tiles of TILE keys that start at multiples of it.
//
// Defines: SOURCE; Q_TYPE, KV_TYPE (0 f32, 1 bf16, 2 f16; of keys and values also 3, e4m3 under scales); ROWS; COLUMNS, threads along a value (32, 64, 128); SPANS, times that
// these fit into a value.
#include "codes.cuh"
#include "finish.cuh"
#include "gather.cuh"
#include "mods.cuh"

template <u32 TYPE>
struct Typed;
template <>
struct Typed<0> {
    typedef float type;
};
template <>
struct Typed<1> {
    typedef Bf16 type;
};
template <>
struct Typed<2> {
    typedef F16 type;
};
template <>
struct Typed<3> {
    typedef u8 type;
};
typedef Typed<Q_TYPE>::type Query;
typedef Typed<KV_TYPE>::type Value;

constexpr u32 THREADS = 128, TILE = 64, CHUNK = 32;
constexpr u32 SOFTMAX = THREADS / ROWS;        // threads a row of scores
constexpr u32 SPLIT = THREADS / TILE;          // threads a key, each with some of the rows
constexpr u32 SPLIT_ROWS = ROWS / SPLIT;
constexpr u32 GROUPS = THREADS / COLUMNS;      // threads a column of values, each with some of the rows
constexpr u32 GROUP_ROWS = ROWS / GROUPS;
static_assert(ROWS % SPLIT == 0 && ROWS % GROUPS == 0 && SOFTMAX <= 32, "rows are shared evenly");

// Keys and values a head that are codes; latents bring their scales along.
constexpr bool SCALED = KV_TYPE == 3 && SOURCE == PAGES;

// Lane `lane` of a key or value.
template <u32 TYPE>
DEVICE float lane_of(u64 at, u32 lane, float scale, u32 C) {
    if (TYPE == 3) {
        const u8* codes = reinterpret_cast<const u8*>(at);
        return SOURCE == LATENTS ? latent_lane(codes, lane, C) : from_e4m3(codes[lane]) * scale;
    }
    return to_float(reinterpret_cast<const typename Typed<TYPE == 3 ? 0 : TYPE>::type*>(at)[lane]);
}
// What a block keeps in shared memory; behind it, the queries [ROWS][D], and of codes the scales of a tile's keys and values.
struct Room {
    u64 k[TILE], v[TILE];  // where keys and values lie; 0: not there
    float scores[ROWS][TILE];
    float keys[TILE][CHUNK + 1];
    float shrink[ROWS];
    u32 seen[TILE];  // by some query vector
};

MSTAR_KERNEL(plain, Attend, 128, 1) {
    SHARED(memory);
    Room& room = *reinterpret_cast<Room*>(memory);
    float* queries = reinterpret_cast<float*>(memory + sizeof(Room));
    float* k_scales = queries + ROWS * p.D;
    float* v_scales = k_scales + TILE;
    const Image* image = p.image;
    const u32 t = thread_x(), D = p.D, Dv = p.Dv;
    const bool raw = SOURCE == BLOCKS ? SCORES == 0 : p.soft_cap == 0.0f && !p.slopes;
    const float c = raw ? p.scale * LOG2_E : LOG2_E;
    const Span walked = items_of(p);
    for (u32 index = walked.begin + block_x(); index < walked.end; index += grid_x()) {
        const Item item = items_of(image)[index];
        const Member member = members_of(image)[item.member_begin];
        const Row row = rows_of(image)[member.row];
        const u32 kv_head = item.kv_head_begin;
        const Output out = output_of(p, item, member, row);
        const Queries q = queries_of<SOURCE>(p, row, item.q_begin, kv_head, sizeof(Query));
        const Keys keys = keys_of<SOURCE>(p, member.row, row, kv_head, sizeof(Value));
        const Reach reach = reach_of(p, row, item);
        const i64 first_position = i64(row.kv_len) - i64(row.q_len) + i64(item.q_begin);
        for (u32 lane_begin = 0; lane_begin < out.lanes; lane_begin += ROWS) {
            block_sync();
            NO_UNROLL for (u32 i = t; i < ROWS * D; i += THREADS) {
                u32 lane = lane_begin + i / D, d = i % D;
                float value = 0.0f;
                if (lane < out.lanes) {
                    i64 token = lane / out.group, head = lane % out.group;
                    if (SOURCE == LATENTS && d >= Dv) {
                        i64 at = token * q.pe_token + head * q.pe_head + i64(d - Dv);
                        value = to_float(reinterpret_cast<const Query*>(q.pe_at)[at]);
                    } else {
                        value = to_float(reinterpret_cast<const Query*>(q.at)[token * q.token + head * q.head + i64(d)]);
                    }
                }
                queries[i] = value;
            }
            // This thread's part in the softmax: one row of scores, together with SOFTMAX - 1 others.
            const u32 own = t / SOFTMAX, part = t % SOFTMAX, lane = lane_begin + own;
            const u32 token = lane / out.group, head = q.first_head + lane % out.group;
            const i64 position = first_position + token;
            i64 from = reach.lo, to = reach.hi;
            if (p.flags & CAUSAL) to = least(to, position + 1);
            if (p.window_left >= 0) from = most(from, position - p.window_left);
            if (lane >= out.lanes) to = 0;
            const u64* mask = row.mask_words ? masks_of(image) + row.mask_begin + u64(item.q_begin + token) * row.mask_words : nullptr;
            float m = -infinity(), l = 0.0f;
            float acc[SPANS][GROUP_ROWS];
            UNROLL for (u32 span = 0; span < SPANS; span++) {
                UNROLL for (u32 i = 0; i < GROUP_ROWS; i++) acc[span][i] = 0.0f;
            }
            for (u32 base = reach.lo / TILE * TILE; base < reach.hi; base += TILE) {
                block_sync();
                if (t < TILE) {
                    Place2 place{0, 0};
                    if (base + t >= reach.lo && base + t < reach.hi) place = key_at<SOURCE>(keys, base + t);
                    room.k[t] = place.k, room.v[t] = place.v, room.seen[t] = 0;
                    if (SCALED && place.k) {
                        k_scales[t] = key_scale(p.k_scales, keys, kv_head, base + t);
                        v_scales[t] = key_scale(p.v_scales, keys, kv_head, base + t);
                    }
                }
                // Scores: a key a thread, CHUNK lanes of its keys at a time.
                float sums[SPLIT_ROWS];
                UNROLL for (u32 i = 0; i < SPLIT_ROWS; i++) sums[i] = 0.0f;
                const u32 key = t % TILE, row_begin = t / TILE * SPLIT_ROWS;
                NO_UNROLL for (u32 d = 0; d < D; d += CHUNK) {
                    block_sync();
                    NO_UNROLL for (u32 i = t; i < TILE * CHUNK; i += THREADS) {
                        u32 of = i / CHUNK, at = d + i % CHUNK;
                        u64 k = room.k[of];
                        room.keys[of][i % CHUNK] =
                            k && at < D ? lane_of<KV_TYPE>(k, at, SCALED ? k_scales[of] : 1.0f, Dv) : 0.0f;
                    }
                    block_sync();
                    float some[SPLIT_ROWS];
                    UNROLL for (u32 i = 0; i < SPLIT_ROWS; i++) some[i] = 0.0f;
                    u32 count = least(CHUNK, D - d);
                    for (u32 j = 0; j < count; j++) {
                        float k = room.keys[key][j];
                        UNROLL for (u32 i = 0; i < SPLIT_ROWS; i++) some[i] += queries[(row_begin + i) * D + d + j] * k;
                    }
                    UNROLL for (u32 i = 0; i < SPLIT_ROWS; i++) sums[i] += some[i];
                }
                UNROLL for (u32 i = 0; i < SPLIT_ROWS; i++) room.scores[row_begin + i][key] = sums[i];
                block_sync();
                // Softmax: who sees what, the largest, the weights.
                u32 visible = 0;
                float top = m;
                NO_UNROLL for (u32 j = 0; j < TILE / SOFTMAX; j++) {
                    u32 of = part + j * SOFTMAX;
                    i64 at = i64(base) + of;
                    bool sees = at >= from && at < to;
                    if (sees && mask) sees = (mask[at / 64] >> (at % 64)) & 1;
                    if (!sees) continue;
                    float s = room.scores[own][of];
                    if (SOURCE == BLOCKS) {
                        if (SCORES + MASKS > 0) {
                            Key of_sequence = block_key(keys, u32(at));
                            Pair pair{q.batch, head, i32(q.q_idx + token), of_sequence.index, p.q_offset};
                            if (of_sequence.partial && !keep(image, pair)) continue;
                            if (SCORES > 0) s = change<false>(image, s * p.scale, pair, ahead_of(pair));
                        }
                    } else if (!raw) {
                        s *= p.scale;
                        if (p.soft_cap != 0.0f) s = p.soft_cap * tanh_exact(s / p.soft_cap);
                        if (p.slopes) s = fused(p.slopes[head], float(at - position), s);
                    }
                    room.scores[own][of] = s;
                    if (s == -infinity()) continue;
                    visible |= 1u << j;
                    top = most(top, s * c);
                    room.seen[of] = 1;
                }
                UNROLL for (u32 by = 1; by < SOFTMAX; by *= 2) top = most(top, shfl_xor(top, by));
                const float reference = top == -infinity() ? 0.0f : top;
                float sum = 0.0f;
                NO_UNROLL for (u32 j = 0; j < TILE / SOFTMAX; j++) {
                    u32 of = part + j * SOFTMAX;
                    float weight = visible >> j & 1 ? ex2(fused(room.scores[own][of], c, -reference)) : 0.0f;
                    room.scores[own][of] = weight;
                    sum += weight;
                }
                UNROLL for (u32 by = 1; by < SOFTMAX; by *= 2) sum += shfl_xor(sum, by);
                const float shrink = ex2(m - reference);
                l = l * shrink + sum;
                m = top;
                if (part == 0) room.shrink[own] = shrink;
                block_sync();
                // Values: a column a thread, summed over the tile and then added.
                const u32 column = t % COLUMNS, group_begin = t / COLUMNS * GROUP_ROWS;
                UNROLL for (u32 span = 0; span < SPANS; span++) {
                    u32 at = column + span * COLUMNS;
                    float some[GROUP_ROWS];
                    UNROLL for (u32 i = 0; i < GROUP_ROWS; i++) some[i] = 0.0f;
                    if (at < Dv) {
                        NO_UNROLL for (u32 j = 0; j < TILE; j++) {
                            if (!room.seen[j]) continue;
                            float v = lane_of<KV_TYPE>(room.v[j], at, SCALED ? v_scales[j] : 1.0f, Dv);
                            UNROLL for (u32 i = 0; i < GROUP_ROWS; i++) some[i] += room.scores[group_begin + i][j] * v;
                        }
                    }
                    UNROLL for (u32 i = 0; i < GROUP_ROWS; i++)
                        acc[span][i] = acc[span][i] * room.shrink[group_begin + i] + some[i];
                }
            }
            block_sync();
            // The end: factors of whole results, or the state.
            if (lane < out.lanes) {
                if (out.direct()) {
                    float factor = finish(p, out, lane, m, l, part == 0);
                    if (part == 0) room.shrink[own] = factor;
                } else if (part == 0) {
                    *out.m(lane) = m;
                    *out.l(lane) = l;
                }
            }
            block_sync();
            UNROLL for (u32 span = 0; span < SPANS; span++) {
                u32 at = t % COLUMNS + span * COLUMNS;
                if (at >= Dv) continue;
                UNROLL for (u32 i = 0; i < GROUP_ROWS; i++) {
                    u32 row_of = t / COLUMNS * GROUP_ROWS + i, to_lane = lane_begin + row_of;
                    if (to_lane >= out.lanes) continue;
                    if (out.direct()) {
                        output_row<Query>(p, out, to_lane)[at] = from_float<Query>(acc[span][i] * room.shrink[row_of] + 0.0f);
                    } else {
                        out.acc(to_lane)[at] = acc[span][i];
                    }
                }
            }
        }
    }
}
