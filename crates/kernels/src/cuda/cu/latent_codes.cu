// Attention over latents in e4m3 on a Hopper: 64 query vectors a block, by four warpgroups, each of which works on a tile of its own turn:
// two add values, each half of the result's columns; one makes weights; one widens (codes_ring.cuh).
//
// Defines: DEPTH; PIECES of the largest item, a multiple of those that one token's heads make.
#include "hopper.cuh"

constexpr u32 ROWS = 64, KEYS = 32, STAGES = 3, PRODUCERS = 128, AHEAD = 3;
#include "codes_ring.cuh"
#include "latent_softmax.cuh"

constexpr u32 THREADS = 4 * GROUP;
// Registers of a thread, of which a block has 128 each when it begins: groups that ask for more in all wait for ever.
constexpr u32 PRODUCER = 96, SCORER = 80, ADDER = 168;
static_assert(PRODUCER + SCORER + 2 * ADDER <= 4 * 128, "see above");

// Of each tile of the ring, what former sums of a row shrink by; of two units in turn, what a row's sums are multiplied by, and its sum
// of weights.
constexpr u32 FACTORS_AT = AFTER_RING, ENDS_AT = FACTORS_AT + STAGES * ROWS * 4;
constexpr u32 TOLD_AT = ENDS_AT + 2 * 2 * ROWS * 4;
constexpr u32 SHARED_BYTES = TOLD_AT + sizeof(Told);
static_assert(SHARED_BYTES <= 232448, "what a block of a Hopper has");

DEVICE float* factors_of(u8* shared, u32 slot) { return reinterpret_cast<float*>(shared + FACTORS_AT) + slot * ROWS; }
DEVICE float* ends_of(u8* shared, u32 turn) { return reinterpret_cast<float*>(shared + ENDS_AT) + turn % 2 * 2 * ROWS; }

// The barrier of the group that makes weights.
constexpr u32 SCORERS = 1;

// A descriptor of whose lower word the compiler knows nothing.
DEVICE u64 again(u64 desc) { return (desc & ~0xffffffffull) | opaque(u32(desc)); }

constexpr u32 ROPE_QUERIES_AT = WIDTH / LANES * QUERY_BLOCK_BYTES;
// Weights of a tile: a row of a query vector, whose pieces of 8 keys are turned by every second row, so that eight rows meet in no bank.
DEVICE u32 weight_at(u32 row, u32 piece) { return row * KEYS * 2 + (piece ^ row / 2 % 4) * 16; }
static_assert(KEYS == 32 && ROWS * KEYS * 2 <= BLOCK_BYTES, "weights go where rotary lanes were");

// Asks for the scores of STEPS times 16 lanes.
template <u32 STEPS>
DEVICE void multiply(float (&sums)[KEYS / 2], u64 queries, u64 keys) {
    // Steps' places are computed from here again, rather than kept over a tile.
    queries = again(queries), keys = again(keys);
    UNROLL
    for (u32 step = 0; step < STEPS; step++) {
        const u32 block = step / 4, bytes = step % 4 * 32;
        wgmma_ss<Element, KEYS, false, false>(sums, after(queries, block * QUERY_BLOCK_BYTES + bytes),
                                              after(keys, block * BLOCK_BYTES + bytes), step != 0);
    }
    wgmma_commit();
}

// The same, of the lanes under a scale.
DEVICE void multiply_group(float (&sums)[KEYS / 2], u64 queries, u64 keys, u32 group) {
    const u32 block = group * (LATENT_GROUP / LANES);
    multiply<LATENT_GROUP / 16>(sums, after(queries, block * QUERY_BLOCK_BYTES), after(keys, block * BLOCK_BYTES));
}

// Half of a thread's columns: those of two groups of 128 lanes; and what rounding adds to the sums of its rows' weights, a group each.
struct Sums {
    float of[2][LATENT_GROUP / 2], rounded[2][2];

    void clear() {
        UNROLL
        for (u32 part = 0; part < 2; part++) {
            UNROLL
            for (u32 i = 0; i < LATENT_GROUP / 2; i++) of[part][i] = 0.0f;
            rounded[part][0] = rounded[part][1] = 0.0f;
        }
    }
    void scale(float upper, float lower) {
        // Only multiplications by 1 are left out.
        if (warp_all(upper == 1.0f && lower == 1.0f)) return;
        UNROLL
        for (u32 part = 0; part < 2; part++) {
            UNROLL
            for (u32 i = 0; i < LATENT_GROUP / 2; i++) of[part][i] *= i / 2 % 2 ? lower : upper;
            rounded[part][0] *= upper, rounded[part][1] *= lower;
        }
    }
};
DEVICE float lower_half(u32 pair) { return to_float(F16{u16(pair)}); }
DEVICE float upper_half(u32 pair) { return to_float(F16{u16(pair >> 16)}); }
// Weights of 16 keys times a group's scales, which two keys have side by side, as the left operand of a product.
DEVICE void scaled_weights(u32 (&words)[4], float (&rounded)[2], const u32 (&weights)[4], const Scale* scales) {
    UNROLL
    for (u32 half = 0; half < 2; half++) {
        const U4 two = load16(scales + 8 * half);
        UNROLL
        for (u32 r = 0; r < 2; r++) {
            const u32 i = 2 * half + r;
            const float a = lower_half(weights[i]) * bits_float(two.x), b = upper_half(weights[i]) * bits_float(two.z);
            words[i] = pack<Element>(a, b);
            rounded[r] = fused(bits_float(words[i] << 16) - a, bits_float(two.y), rounded[r]);
            rounded[r] = fused(bits_float(words[i] & 0xffff0000u) - b, bits_float(two.w), rounded[r]);
        }
    }
}

// Of four lanes, each lane's i-th word becomes the i-th lane's.
DEVICE void turn_four(u32 (&words)[4]) {
    UNROLL
    for (u32 by = 1; by < 4; by *= 2) {
        const bool upper = lane() & by;
        UNROLL
        for (u32 i = 0; i < 4; i++) {
            if (i & by) continue;
            const u32 other = shfl_xor(upper ? words[i] : words[i | by], by);
            (upper ? words[i] : words[i | by]) = other;
        }
    }
}
// Writes half of a block's results, or of its unfinished state. The four lanes that have a row gather 16 bytes each: a store of what a lane
// has would touch eight lines for four bytes of each.
DEVICE void store(const Attend& p, const Unit& unit, const Sums& sums, u32 half, const float (&factors)[2][2]) {
    const bool direct = unit.output.direct();
    const u32 t = lane() % 4;
    UNROLL
    for (u32 r = 0; r < 2; r++) {
        const u32 lane_of = unit.first + my_row() + 8 * r;
        const bool there = lane_of < unit.output.lanes;
        // Where it goes is found out once: not again behind each store, which might have changed it.
        u64 at = 0;
        if (there) {
            at = direct ? reinterpret_cast<u64>(output_row<Element>(p, unit.output, lane_of) + half * (WIDTH / 2))
                        : reinterpret_cast<u64>(unit.output.acc(lane_of) + half * (WIDTH / 2));
        }
        pin(at);
        UNROLL
        for (u32 part = 0; part < 2; part++)
            UNROLL
            for (u32 j = 0; j < LATENT_GROUP / 8; j += 4) {
                float of[4][2];
                UNROLL
                for (u32 i = 0; i < 8; i++) of[i / 2][i % 2] = sums.of[part][4 * (j + i / 2) + 2 * r + i % 2] * factors[part][r];
                const u32 column = part * LATENT_GROUP + 8 * j;
                if (direct) {
                    // -0 becomes 0: whether a hidden key was skipped or weighed 0 must not show.
                    u32 words[4];
                    UNROLL
                    for (u32 i = 0; i < 4; i++) words[i] = pack<Element>(of[i][0] + 0.0f, of[i][1] + 0.0f);
                    turn_four(words);
                    Element* to = reinterpret_cast<Element*>(at) + column + 8 * t;
                    if (!there) continue;
                    if (at % 16 == 0) {
                        store16(to, U4{words[0], words[1], words[2], words[3]});
                    } else {
                        UNROLL
                        for (u32 i = 0; i < 8; i++) to[i].bits = u16(words[i / 2] >> i % 2 * 16);
                    }
                } else {
                    const bool odd = t % 2;
                    UNROLL
                    for (u32 i = 0; i < 4; i += 2) {
                        // An even lane has the next one's of the first eight columns, which has its of the others.
                        float other[2];
                        UNROLL
                        for (u32 e = 0; e < 2; e++) other[e] = shfl_xor(odd ? of[i][e] : of[i + 1][e], 1);
                        const U4 four{float_bits(odd ? other[0] : of[i][0]), float_bits(odd ? other[1] : of[i][1]),
                                      float_bits(odd ? of[i + 1][0] : other[0]), float_bits(odd ? of[i + 1][1] : other[1])};
                        if (there) store16(reinterpret_cast<float*>(at) + column + 8 * (i + odd) + 2 * (t - odd), four);
                    }
                }
            }
    }
}

// As `weigh`, but what a row's weights stand against is kept while its largest score is less than so much above it, in base-2 logits:
// then nothing that was summed before shrinks.
constexpr float SLACK = 8.0f;
DEVICE void weigh_with_slack(float (&scores)[KEYS / 2], float step, float (&top)[2], float (&sum)[2], float (&alpha)[2]) {
    UNROLL
    for (u32 r = 0; r < 2; r++) {
        // A NaN is passed over here, and makes the sum NaN.
        float most_now = -infinity();
        UNROLL
        for (u32 j = 0; j < KEYS / 8; j++) most_now = larger(most_now, larger(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]));
        most_now = larger(most_now, shfl_xor(most_now, 1));
        most_now = larger(most_now, shfl_xor(most_now, 2)) * step;
        const bool first = top[r] == -infinity(), over = first || most_now > top[r] + SLACK;
        const float now = over ? most_now : top[r], reference = now == -infinity() ? 0.0f : now;
        alpha[r] = first || !over ? 1.0f : ex2(top[r] - now);
        top[r] = now;
        float added[2] = {0.0f, 0.0f};
        UNROLL
        for (u32 j = 0; j < KEYS / 8; j++)
            UNROLL
            for (u32 e = 0; e < 2; e++) {
                float& s = scores[4 * j + 2 * r + e];
                s = ex2(fused(s, step, -reference));
                added[e] += s;
            }
        sum[r] = sum[r] * alpha[r] + (added[0] + added[1]);
    }
}

DEVICE void weigh_tiles(const Attend& p, u8* shared, Told& told) {
    u32 tiles = 0;
    each_told(told, [&](const Unit& unit, u32 count) {
        float top[2] = {-infinity(), -infinity()}, sum[2] = {0.0f, 0.0f};
        const u32 begin = unit.tile(), end = unit.tiles();
        NO_UNROLL
        for (u32 tile = begin; tile < end; tile++) {
            // What follows from the thread is computed again for each tile, rather than kept in registers.
            const u32 thread = opaque(thread_x()), t = thread % 4, row = thread % GROUP / 32 * 16 + thread % 32 / 4;
            const Turn turn = turn_of(tiles);
            tiles++;
            u8* latents = shared + RING_AT + turn.slot * TILE_BYTES;
            const u64 queries = tile_desc(shared, 0, EIGHT_ROWS), keys = tile_desc(latents, 0, EIGHT_ROWS);
            mark_wait(&told.full[turn.slot], turn.parity);
            // Queries were copied, and tiles stored.
            async_fence();
            // Products of the lanes under one scale, two of them under way, and of what has been scaled.
            float scores[KEYS / 2], parts[2][KEYS / 2];
            wgmma_fence();
            if (ROPE_STEPS > 0) {
                multiply<(ROPE_STEPS > 0 ? ROPE_STEPS : 1)>(scores, after(queries, ROPE_QUERIES_AT), after(keys, ROPE_AT));
            } else {
                UNROLL
                for (u32 i = 0; i < KEYS / 2; i++) scores[i] = 0.0f;
            }
            multiply_group(parts[0], queries, keys, 0);
            UNROLL
            for (u32 group = 0; group < SCALES; group++) {
                float(&part)[KEYS / 2] = parts[group % 2];
                if (group + 1 < SCALES) {
                    wgmma_fence();
                    multiply_group(parts[(group + 1) % 2], queries, keys, group + 1);
                    wgmma_wait<1>();
                } else {
                    wgmma_wait<0>();
                }
                if (group == 0) pin(scores);
                pin(part);
                const float* scales = key_scales_of(shared, turn.slot, group) + 2 * t;
                UNROLL
                for (u32 j = 0; j < KEYS / 8; j++) {
                    const Two two = *reinterpret_cast<const Two*>(scales + 8 * j);
                    UNROLL
                    for (u32 i = 0; i < 4; i++) scores[4 * j + i] = fused(part[4 * j + i], i % 2 ? two.y : two.x, scores[4 * j + i]);
                }
            }
            if (tile + 1 == end) mark_arrive(&told.queries_read);
            // Scores grow with what they are made of, but for a scale that is not positive: then they are scaled first.
            const float scale = bits_float(opaque(float_bits(p.scale))) * LOG2_E, step = scale > 0.0f ? scale : 1.0f;
            if (!(scale > 0.0f)) {
                UNROLL
                for (u32 i = 0; i < KEYS / 2; i++) scores[i] *= scale;
            }
            if (tile * KEYS < unit.lo || tile * KEYS + KEYS > unit.all_see) {
                const u32 limits[2] = {unit.limit(unit.first + row), unit.limit(unit.first + row + 8)}, lo = unit.lo;
                UNROLL
                for (u32 i = 0; i < KEYS / 2; i++) {
                    const u32 key = tile * KEYS + i / 4 * 8 + t * 2 + i % 2;
                    if (key < lo || key >= limits[i / 2 % 2]) scores[i] = -infinity();
                }
            }
            float alpha[2];
            weigh_with_slack(scores, step, top, sum, alpha);
            // Weights go, as f16, where the rotary lanes were, which all warps have read by here. This lane has a row of each pair of 8 x 8
            // matrices; pieces are turned by the row.
            named_sync(SCORERS, GROUP);
            const u32 weight_row = thread % GROUP / 32 * 16 + thread % 16;
            u8* weights = latents + ROPE_AT;
            UNROLL
            for (u32 k = 0; k < KEYS / 16; k++) {
                u32 packed[4];
                UNROLL
                for (u32 i = 0; i < 4; i++) packed[i] = pack<F16>(scores[8 * k + 2 * i], scores[8 * k + 2 * i + 1]);
                stmatrix_x4(weights + weight_at(weight_row, 2 * k + thread % 32 / 16), packed);
            }
            float* factors = factors_of(shared, turn.slot) + row;
            if (t == 0) factors[0] = alpha[0], factors[8] = alpha[1];
            mark_arrive(&told.weighed[turn.slot]);
        }
        if (begin >= end) mark_arrive(&told.queries_read);
        float factor[2];
        add_up(sum);
        conclude(p, unit, top, sum, factor);
        float* ends = ends_of(shared, count) + my_row();
        if (lane() % 4 == 0) ends[0] = factor[0], ends[8] = factor[1], ends[ROWS] = sum[0], ends[ROWS + 8] = sum[1];
        mark_arrive(&told.ended[count % 2]);
    });
}

DEVICE void add_tiles(const Attend& p, u8* shared, Told& told, u32 half) {
    u32 tiles = 0;
    each_told(told, [&](const Unit& unit, u32 count) {
        // Of queries nothing is read here; the unit stays as it is until all have seen the next.
        mark_arrive(&told.queries_read);
        Sums out;
        out.clear();
        NO_UNROLL
        for (u32 left = unit.tiles() - unit.tile(); left > 0; left--) {
            const u32 thread = opaque(thread_x()), row = thread % GROUP / 32 * 16 + thread % 32 / 4;
            const u32 weight_row = thread % GROUP / 32 * 16 + thread % 16;
            const Turn turn = turn_of(tiles);
            tiles++;
            u8* latents = shared + RING_AT + turn.slot * TILE_BYTES;
            const u8* weights = latents + ROPE_AT;
            const Scale* scales = scales_of(shared, turn.slot, 2 * half) + thread % 4 * 2;
            const u64 values = tile_desc(latents + half * (WIDTH / 2 / LANES) * BLOCK_BYTES, BLOCK_BYTES, EIGHT_ROWS);
            mark_wait(&told.weighed[turn.slot], turn.parity);
            async_fence();
            const float* factors = factors_of(shared, turn.slot) + row;
            out.scale(factors[0], factors[8]);
            pin(out.of[0]), pin(out.of[1]);
            UNROLL
            for (u32 k = 0; k < KEYS / 16; k++) {
                u32 packed[4];
                ldmatrix_x4(packed, weights + weight_at(weight_row, 2 * k + thread % 32 / 16));
                UNROLL
                for (u32 part = 0; part < 2; part++) {
                    // One part's product is under way while the other's weights are made.
                    if (k > 0) wgmma_wait<1>();
                    u32 words[4];
                    scaled_weights(words, out.rounded[part], packed, scales + part * KEYS + 16 * k);
                    wgmma_fence();
                    wgmma_rs<Element, LATENT_GROUP, true>(
                        out.of[part], words, after(values, part * (LATENT_GROUP / LANES) * BLOCK_BYTES + k * 2 * EIGHT_ROWS), true);
                    wgmma_commit();
                }
            }
            wgmma_wait<0>();
            pin(out.of[0]), pin(out.of[1]);
            mark_arrive(&told.empty[turn.slot]);
        }
        mark_wait(&told.ended[count % 2], count / 2 % 2);
        const float* ends = ends_of(shared, count) + my_row();
        float factors[2][2];
        UNROLL
        for (u32 part = 0; part < 2; part++)
            UNROLL
            for (u32 r = 0; r < 2; r++) {
                float of = out.rounded[part][r];
                of += shfl_xor(of, 1);
                of += shfl_xor(of, 2);
                // What all weights sum up to, and what was added up.
                const float sum = ends[ROWS + 8 * r];
                factors[part][r] = of == 0.0f ? ends[8 * r] : ends[8 * r] * (sum / (sum + of));
            }
        store(p, unit, out, half, factors);
    });
}

MSTAR_KERNEL(latent_codes, Attend, THREADS, 1) {
    SHARED(shared);
    Told& told = *reinterpret_cast<Told*>(shared + TOLD_AT);
    start(told, 2 * GROUP);
    const u32 group = group_index();
    if (group == 3) {
        registers_fewer<PRODUCER>();
        produce(p, shared, told);
    } else if (group == 2) {
        registers_fewer<SCORER>();
        weigh_tiles(p, shared, told);
    } else {
        registers_more<ADDER>();
        add_tiles(p, shared, told, group);
    }
}
