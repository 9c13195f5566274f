// Attention over latents in e4m3 on a Hopper, of few heads: 16 query vectors a block, by four warpgroups: one makes weights, one adds
// values, two widen (codes_ring.cuh).
//
// Products are turned round (turned.cuh).
//
// Defines: DEPTH; PIECES of the largest item, a multiple of those that one token's heads make.
#include "hopper.cuh"

constexpr u32 ROWS = 16, KEYS = 64, STAGES = 2, PRODUCERS = 256, AHEAD = 2;
#include "codes_ring.cuh"
#include "turned.cuh"

constexpr u32 THREADS = 4 * GROUP;
// Registers of a thread, of which a block has 128 each when it begins: groups that ask for more in all wait for ever.
constexpr u32 PRODUCER = 136, SCORER = 128, ADDER = 112;
static_assert(2 * PRODUCER + SCORER + ADDER <= 4 * 128, "see above");
// Blocks of 64 columns of the result; rows of weights times a group's scales.
constexpr u32 PARTS = WIDTH / LANES, WEIGHT_BYTES = ROWS * KEYS * 2;
static_assert(SCALES * WEIGHT_BYTES <= BLOCK_BYTES, "weights go where rotary lanes were");

// Of each tile of the ring, what former sums of a query vector shrink by; of two units in turn, what a query vector's sums over each
// group's lanes are multiplied by; what warps tell each other of each query vector, in two turns.
constexpr u32 FACTORS_AT = AFTER_RING, ENDS_AT = FACTORS_AT + STAGES * ROWS * 4, EXCHANGE_AT = ENDS_AT + 2 * SCALES * ROWS * 4;
constexpr u32 TOLD_AT = EXCHANGE_AT + 2 * EXCHANGED * 4;
constexpr u32 SHARED_BYTES = TOLD_AT + sizeof(Told);
static_assert(SHARED_BYTES <= 232448, "what a block of a Hopper has");

DEVICE float* factors_of(u8* shared, u32 slot) { return reinterpret_cast<float*>(shared + FACTORS_AT) + slot * ROWS; }
DEVICE float* ends_of(u8* shared, u32 turn) { return reinterpret_cast<float*>(shared + ENDS_AT) + turn % 2 * SCALES * ROWS; }

// What warps tell each other, in two turns.
DEVICE float* exchange_of(u8* shared, u32 turn) { return reinterpret_cast<float*>(shared + EXCHANGE_AT) + turn % 2 * EXCHANGED; }

DEVICE void weigh_tiles(const Attend& p, u8* shared, Told& told) {
    const u32 w = warp() % WARPS, first_key = w * 16 + lane() / 4;
    const float scale = p.scale * LOG2_E;
    const u64 queries = tile_desc(shared, 0, EIGHT_ROWS);
    Turn turn{0, 0};
    u32 said = 0;
    each_told(told, [&](const Unit& unit, u32 count) {
        float top[MINE], sum[MINE], rounded[SCALES][MINE];
        UNROLL
        for (u32 c = 0; c < MINE; c++) {
            top[c] = -infinity(), sum[c] = 0.0f;
            UNROLL
            for (u32 group = 0; group < SCALES; group++) rounded[group][c] = 0.0f;
        }
        const u32 begin = unit.tile(), end = unit.tiles();
        NO_UNROLL
        for (u32 tile = begin; tile < end; tile++) {
            u8* latents = shared + RING_AT + turn.slot * TILE_BYTES;
            const u64 keys = tile_desc(latents, 0, EIGHT_ROWS);
            mark_wait(&told.full[turn.slot], turn.parity);
            async_fence();
            // Products of the lanes under each scale, and of the others.
            float parts[SCALES][ROWS / 2], scores[ROWS / 2];
            wgmma_fence();
            UNROLL
            for (u32 group = 0; group < SCALES; group++)
                UNROLL
                for (u32 step = 0; step < LATENT_GROUP / 16; step++) {
                    const u32 block = group * (LATENT_GROUP / LANES) + step / 4, bytes = step % 4 * 32;
                    wgmma_ss<Element, ROWS, false, false>(parts[group], after(keys, block * BLOCK_BYTES + bytes),
                                                          after(queries, block * QUERY_BLOCK_BYTES + bytes), step != 0);
                }
            if (ROPE_STEPS == 0) {
                UNROLL
                for (u32 i = 0; i < ROWS / 2; i++) scores[i] = 0.0f;
            }
            UNROLL
            for (u32 step = 0; step < ROPE_STEPS; step++)
                wgmma_ss<Element, ROWS, false, false>(scores, after(keys, ROPE_AT + step * 32),
                                                      after(queries, WIDTH / LANES * QUERY_BLOCK_BYTES + step * 32), step != 0);
            wgmma_commit();
            float key_scales[SCALES][2];
            UNROLL
            for (u32 group = 0; group < SCALES; group++) {
                const float* of = key_scales_of(shared, turn.slot, group) + first_key;
                key_scales[group][0] = of[0], key_scales[group][1] = of[8];
            }
            wgmma_wait<0>();
            UNROLL
            for (u32 group = 0; group < SCALES; group++) pin(parts[group]);
            pin(scores);
            if (tile + 1 == end) mark_arrive(&told.queries_read);
            UNROLL
            for (u32 i = 0; i < ROWS / 2; i++) {
                UNROLL
                for (u32 group = 0; group < SCALES; group++)
                    scores[i] = fused(parts[group][i], key_scales[group][i / 2 % 2], scores[i]);
                scores[i] *= scale;
            }
            if (tile * KEYS < unit.lo || tile * KEYS + KEYS > unit.all_see) {
                UNROLL
                for (u32 c = 0; c < MINE; c++) {
                    const u32 limit = unit.limit(unit.first + my_column(c));
                    UNROLL
                    for (u32 r = 0; r < 2; r++) {
                        const u32 key = tile * KEYS + first_key + 8 * r;
                        if (key < unit.lo || key >= limit) scores[c / 2 * 4 + 2 * r + c % 2] = -infinity();
                    }
                }
            }
            float now[MINE];
            UNROLL
            for (u32 c = 0; c < MINE; c++) now[c] = larger(scores[c / 2 * 4 + c % 2], scores[c / 2 * 4 + 2 + c % 2]);
            // A NaN is passed over here, and makes the sum NaN. Behind this all warps have read what is behind the values.
            join_rows(now, exchange_of(shared, said++), [](float a, float b) { return larger(a, b); });
            float alpha[MINE];
            UNROLL
            for (u32 c = 0; c < MINE; c++) {
                const float most_now = larger(top[c], now[c]), reference = most_now == -infinity() ? 0.0f : most_now;
                alpha[c] = top[c] == -infinity() ? 1.0f : ex2(top[c] - most_now);
                top[c] = most_now;
                float& upper = scores[c / 2 * 4 + c % 2];
                float& lower = scores[c / 2 * 4 + 2 + c % 2];
                upper = ex2(upper - reference), lower = ex2(lower - reference);
                sum[c] = sum[c] * alpha[c] + (upper + lower);
            }
            float* factors = factors_of(shared, turn.slot);
            if (w == 0 && lane() < 4)
                UNROLL
                for (u32 c = 0; c < MINE; c++) factors[my_column(c)] = alpha[c];
            // Times each group's scales; a query vector's in a row, so that they are the right operand: pieces of 8 keys, turned by the row.
            const u32 row = lane() / 16 * 8 + lane() % 8, piece = 2 * w + lane() / 8 % 2;
            u8* weights = latents + ROPE_AT + row * KEYS * 2 + (piece ^ (row % 8)) * 16;
            UNROLL
            for (u32 group = 0; group < SCALES; group++) {
                const Scale* scales = scales_of(shared, turn.slot, group) + first_key;
                u32 words[ROWS / 4];
                UNROLL
                for (u32 i = 0; i < ROWS / 4; i++) {
                    const Scale by = scales[i % 2 * 8];
                    const float a = scores[2 * i] * by.of, b = scores[2 * i + 1] * by.of;
                    const u32 word = pack<Element>(a, b), c = i / 2 * 2;
                    const float before[2] = {i % 2 ? rounded[group][c] : rounded[group][c] * alpha[c],
                                             i % 2 ? rounded[group][c + 1] : rounded[group][c + 1] * alpha[c + 1]};
                    rounded[group][c] = fused(bits_float(word << 16) - a, by.inverse, before[0]);
                    rounded[group][c + 1] = fused(bits_float(word & 0xffff0000u) - b, by.inverse, before[1]);
                    words[i] = word;
                }
                stmatrix_x4_trans(weights + group * WEIGHT_BYTES, words);
            }
            async_fence();
            mark_arrive(&told.weighed[turn.slot]);
            turn.next();
        }
        if (begin >= end) mark_arrive(&told.queries_read);

        const auto add = [](float a, float b) { return a + b; };
        join_rows(sum, exchange_of(shared, said++), add);
        UNROLL
        for (u32 group = 0; group < SCALES; group++) join_rows(rounded[group], exchange_of(shared, said++), add);
        float* ends = ends_of(shared, count);
        if (w == 0 && lane() < 4)
            UNROLL
            for (u32 c = 0; c < MINE; c++) {
                const u32 lane_of = unit.first + my_column(c);
                float factor = 1.0f;
                if (lane_of < unit.output.lanes) {
                    if (unit.output.direct()) factor = finish(p, unit.output, lane_of, top[c], sum[c], true);
                    else *unit.output.m(lane_of) = top[c], *unit.output.l(lane_of) = sum[c];
                }
                UNROLL
                for (u32 group = 0; group < SCALES; group++) {
                    const float of = rounded[group][c];
                    // What all weights sum up to, and what was added up.
                    ends[group * ROWS + my_column(c)] = of == 0.0f ? factor : factor * (sum[c] / (sum[c] + of));
                }
            }
        mark_arrive(&told.ended[count % 2]);
    });
}

DEVICE void add_tiles(const Attend& p, u8* shared, Told& told) {
    Turn turn{0, 0};
    each_told(told, [&](const Unit& unit, u32 count) {
        // Of queries nothing is read here; the unit stays as it is until all have seen the next.
        mark_arrive(&told.queries_read);
        float out[PARTS][ROWS / 2];
        UNROLL
        for (u32 part = 0; part < PARTS; part++)
            UNROLL
            for (u32 i = 0; i < ROWS / 2; i++) out[part][i] = 0.0f;
        NO_UNROLL
        for (u32 left = unit.tiles() - unit.tile(); left > 0; left--) {
            u8* latents = shared + RING_AT + turn.slot * TILE_BYTES;
            mark_wait(&told.weighed[turn.slot], turn.parity);
            async_fence();
            const float* factors = factors_of(shared, turn.slot);
            float alpha[MINE];
            bool same = true;
            UNROLL
            for (u32 c = 0; c < MINE; c++) alpha[c] = factors[my_column(c)], same = same && alpha[c] == 1.0f;
            // Only multiplications by 1 are left out.
            if (!warp_all(same)) {
                UNROLL
                for (u32 part = 0; part < PARTS; part++)
                    UNROLL
                    for (u32 i = 0; i < ROWS / 2; i++) out[part][i] *= alpha[i / 4 * 2 + i % 2];
            }
            UNROLL
            for (u32 part = 0; part < PARTS; part++) pin(out[part]);
            const u64 values = tile_desc(latents, BLOCK_BYTES, EIGHT_ROWS), weights = tile_desc(latents + ROPE_AT, 0, EIGHT_ROWS);
            wgmma_fence();
            UNROLL
            for (u32 k = 0; k < KEYS / 16; k++)
                UNROLL
                for (u32 part = 0; part < PARTS; part++)
                    wgmma_ss<Element, ROWS, true, false>(out[part], after(values, part * BLOCK_BYTES + k * 2 * EIGHT_ROWS),
                                                         after(weights, part / (LATENT_GROUP / LANES) * WEIGHT_BYTES + k * 32), true);
            wgmma_commit();
            wgmma_wait<0>();
            UNROLL
            for (u32 part = 0; part < PARTS; part++) pin(out[part]);
            mark_arrive(&told.empty[turn.slot]);
            turn.next();
        }
        mark_wait(&told.ended[count % 2], count / 2 % 2);
        const float* ends = ends_of(shared, count);
        const u32 first_column = warp() % WARPS * 16 + lane() / 4;
        UNROLL
        for (u32 c = 0; c < MINE; c++) {
            const u32 lane_of = unit.first + my_column(c);
            if (lane_of >= unit.output.lanes) continue;
            float* state = unit.output.direct() ? nullptr : unit.output.acc(lane_of);
            Element* to = unit.output.direct() ? output_row<Element>(p, unit.output, lane_of) : nullptr;
            UNROLL
            for (u32 i = 0; i < 2 * PARTS; i++) {
                const u32 column = i / 2 * LANES + first_column + i % 2 * 8, group = i / 2 / (LATENT_GROUP / LANES);
                const float of = out[i / 2][c / 2 * 4 + i % 2 * 2 + c % 2] * ends[group * ROWS + my_column(c)];
                // -0 becomes 0: whether a hidden key was skipped or weighed 0 must not show.
                if (state) state[column] = of;
                else to[column] = from_float<Element>(of + 0.0f);
            }
        }
    });
}

MSTAR_KERNEL(latent_codes_few, Attend, THREADS, 1) {
    SHARED(shared);
    Told& told = *reinterpret_cast<Told*>(shared + TOLD_AT);
    start(told, GROUP);
    const u32 group = group_index();
    if (group >= 2) {
        registers_more<PRODUCER>();
        produce(p, shared, told);
    } else if (group == 1) {
        registers_fewer<ADDER>();
        add_tiles(p, shared, told);
    } else {
        weigh_tiles(p, shared, told);
    }
}
