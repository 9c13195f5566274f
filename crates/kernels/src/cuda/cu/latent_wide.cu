// Latent attention over a work list on a Hopper: 64 query vectors a block, by three warpgroups.
//
//   producer   gathers tiles of latents into a ring, and the block's queries (latent_ring.cuh)
//   first      scores, softmax, and the left half of the result's columns
//   second     the right half, with weights and factors that the first leaves in shared memory
//
// Defines: those of latent_ring.cuh, with ROWS 64.

#include "latent_ring.cuh"
#include "latent_softmax.cuh"

constexpr u32 THREADS = 3 * GROUP;
constexpr u32 HALF = WIDTH / 2, HALF_COLUMNS = HALF / LANES;
static_assert(ROWS == 64 && SHARES == KEYS / 16, "rows of a product; keys of one");

constexpr u32 WEIGHTS_AT = AFTER_RING;
constexpr u32 FACTORS_AT = WEIGHTS_AT + BLOCK_BYTES;
constexpr u32 TOLD_AT = FACTORS_AT + ROWS * 4;
constexpr u32 HANDED_AT = TOLD_AT + sizeof(Told);
constexpr u32 SHARED_BYTES = HANDED_AT + 2 * sizeof(Mark);
static_assert(SHARED_BYTES <= 232448, "what a block of a Hopper has");

constexpr u32 CONSUMER_WARPS = 8;

// What the first group hands to the second, again and again: weights and factors are there; they may be written over. Every thread
// arrives: what one lane's arrival says of its warp, a race checker does not follow.
struct Handed {
    Mark there, free;
};
DEVICE Handed& handed_of(u8* shared) { return *reinterpret_cast<Handed*>(shared + HANDED_AT); }

// Rows of values are the other product's columns: the left or right half of a tile's, 16 keys at a time.
DEVICE u64 values_at(const u8* tile, u32 half) {
    return tile_desc(tile + half * HALF_COLUMNS * BLOCK_BYTES, BLOCK_BYTES, EIGHT_ROWS);
}

// Gives back the room of a tile whose values are being multiplied, share by share, when a batch of products each is done.
DEVICE void given_back(Mark* shares) {
    wgmma_wait<3>();
    released(&shares[0]);
    wgmma_wait<2>();
    released(&shares[1]);
    wgmma_wait<1>();
    released(&shares[2]);
    wgmma_wait<0>();
    released(&shares[3]);
}

DEVICE void scaled(float (&sums)[HALF / 2], float upper, float lower) {
    // Only multiplications by 1 are left out.
    if (warp_all(upper == 1.0f && lower == 1.0f)) return;
    UNROLL
    for (u32 i = 0; i < HALF / 2; i++) sums[i] *= i / 2 % 2 ? lower : upper;
}

// Writes half of a block's results, or of its unfinished state.
DEVICE void store(const Attend& p, const Unit& unit, const float (&sums)[HALF / 2], u32 half, const float (&factors)[2]) {
    const u32 first_column = half * HALF + lane() % 4 * 2, C = p.Dv;
    UNROLL
    for (u32 r = 0; r < 2; r++) {
        const u32 lane_of = unit.first + my_row() + 8 * r;
        if (lane_of >= unit.output.lanes) continue;
        if (!unit.output.direct()) {
            // A state is padded to whole lines.
            float* to = unit.output.acc(lane_of);
            UNROLL
            for (u32 j = 0; j < HALF / 8; j++) {
                const u32 column = first_column + 8 * j;
                if (column < C) {
                    *reinterpret_cast<Two*>(to + column) = Two{sums[4 * j + 2 * r], sums[4 * j + 2 * r + 1]};
                }
            }
            continue;
        }
        Element* to = output_row<Element>(p, unit.output, lane_of);
        const bool pairs = reinterpret_cast<u64>(to) % 4 == 0 && C % 2 == 0;
        UNROLL
        for (u32 j = 0; j < HALF / 8; j++) {
            const u32 column = first_column + 8 * j;
            // -0 becomes 0: whether a hidden key was skipped or weighed 0 must not show.
            const float a = sums[4 * j + 2 * r] * factors[r] + 0.0f, b = sums[4 * j + 2 * r + 1] * factors[r] + 0.0f;
            if (pairs) {
                if (column < C) *reinterpret_cast<u32*>(to + column) = pack<Element>(a, b);
            } else {
                if (column < C) to[column] = from_float<Element>(a);
                if (column + 1 < C) to[column + 1] = from_float<Element>(b);
            }
        }
    }
}

DEVICE void consume_first(const Attend& p, u8* shared, Told& told) {
    Handed& handed = handed_of(shared);
    u32 turns = 0;
    float* factors = reinterpret_cast<float*>(shared + FACTORS_AT);
    const u32 row = my_row(), t = lane() % 4;
    // Scores grow with what they are made of, but for a scale that is not positive: then they are scaled first.
    const float scale = p.scale * LOG2_E, step = scale > 0.0f ? scale : 1.0f;
    // Where this lane's row of each pair of 8 x 8 matrices of weights goes; pieces are turned by the row.
    const u32 weight_row = warp() % 4 * 16 + lane() % 16;
    u8* weights = shared + WEIGHTS_AT + weight_row * LANES * 2;
    const u64 all_queries = tile_desc(shared, 0, EIGHT_ROWS);
    Turn turn{0, 0};
    // Asks for a tile's scores in as many batches as it has shares, and calls `asked` behind each.
    auto ask = [&](float(&scores)[KEYS / 2], auto asked) {
        u64 queries = all_queries;
        pin(queries);
        const u64 keys = tile_desc(shared + RING_AT + turn.slot * TILE_BYTES, 0, EIGHT_ROWS);
        constexpr u32 STEPS = DEPTH / 16;
        wgmma_fence();
        UNROLL
        for (u32 share = 0; share < SHARES; share++) {
            UNROLL
            for (u32 step = share * STEPS / SHARES; step < (share + 1) * STEPS / SHARES; step++) {
                const u32 bytes = step / 4 * BLOCK_BYTES + step % 4 * 32;
                wgmma_ss<Element, KEYS, false, false>(scores, after(queries, bytes), after(keys, bytes), step != 0);
            }
            wgmma_commit();
            asked(share);
        }
    };
    each_told(told, [&](const Unit& unit) {
        float out[HALF / 2], top[2] = {-infinity(), -infinity()}, sum[2] = {0.0f, 0.0f};
        UNROLL
        for (u32 i = 0; i < HALF / 2; i++) out[i] = 0.0f;
        const u32 begin = unit.tile(), end = unit.tiles();
        const u32 limits[2] = {unit.limit(unit.first + row), unit.limit(unit.first + row + 8)};
        const u32 all_see = unit.all_see, lo = unit.lo;
        if (begin >= end) released(&told.queries_read);
        float scores[KEYS / 2];
        if (begin < end) {
            mark_wait(&told.full[turn.slot], turn.parity);
            async_fence();
            ask(scores, [](u32) {});
            wgmma_wait<0>();
            pin(scores);
        }
        NO_UNROLL
        for (u32 tile = begin; tile < end; tile++) {
            const u8* latents = shared + RING_AT + turn.slot * TILE_BYTES;
            if (!(scale > 0.0f)) {
                UNROLL
                for (u32 i = 0; i < KEYS / 2; i++) scores[i] *= scale;
            }
            if (tile * KEYS < lo || tile * KEYS + KEYS > all_see) {
                UNROLL
                for (u32 i = 0; i < KEYS / 2; i++) {
                    const u32 key = tile * KEYS + i / 4 * 8 + t * 2 + i % 2;
                    if (key < lo || key >= limits[i / 2 % 2]) scores[i] = -infinity();
                }
            }
            float alpha[2];
            weigh(scores, step, top, sum, alpha);
            u32 packed[KEYS / 16][4];
            UNROLL
            for (u32 k = 0; k < KEYS / 16; k++)
                UNROLL
                for (u32 i = 0; i < 4; i++) packed[k][i] = pack<Element>(scores[8 * k + 2 * i], scores[8 * k + 2 * i + 1]);

            mark_wait(&handed.free, turns % 2 ^ 1);
            UNROLL
            for (u32 k = 0; k < KEYS / 16; k++)
                stmatrix_x4(weights + ((2 * k + lane() / 16) ^ (weight_row % 8)) * 16, packed[k]);
            if (t == 0) factors[row] = alpha[0], factors[row + 8] = alpha[1];
            async_fence();
            mark_arrive(&handed.there);
            turns++;

            scaled(out, alpha[0], alpha[1]);
            const u64 values = values_at(latents, 0);
            pin(out);
            wgmma_fence();
            // A step is a share of the tile's keys.
            UNROLL
            for (u32 k = 0; k < SHARES; k++) {
                wgmma_rs<Element, HALF, true>(out, packed[k], after(values, k * 2 * EIGHT_ROWS), true);
                wgmma_commit();
            }
            Mark* done = told.empty[turn.slot];
            turn.next();
            if (tile + 1 < end) {
                // Scores of the next tile are asked for behind this one's values; where it has not come yet, this one's room is not to
                // wait for it.
                const bool there = warp_all(mark_passed(&told.full[turn.slot], turn.parity));
                if (!there) {
                    given_back(done);
                    pin(out);
                    mark_wait(&told.full[turn.slot], turn.parity);
                }
                async_fence();
                ask(scores, [&](u32 share) {
                    wgmma_wait<SHARES>();
                    if (there) released(&done[share]);
                });
                pin(out);
                wgmma_wait<0>();
                pin(scores);
            } else {
                given_back(done);
                pin(out);
                released(&told.queries_read);
            }
        }

        float factor[2];
        conclude(p, unit, top, sum, factor);
        mark_wait(&handed.free, turns % 2 ^ 1);
        if (t == 0) factors[row] = factor[0], factors[row + 8] = factor[1];
        mark_arrive(&handed.there);
        turns++;
        store(p, unit, out, 0, factor);
    });
}

DEVICE void consume_second(const Attend& p, u8* shared, Told& told) {
    const float* factors = reinterpret_cast<const float*>(shared + FACTORS_AT);
    const u32 row = my_row();
    const u64 weights = tile_desc(shared + WEIGHTS_AT, 0, EIGHT_ROWS);
    Turn turn{0, 0};
    Handed& handed = handed_of(shared);
    u32 turns = 0;
    each_told(told, [&](const Unit& unit) {
        float out[HALF / 2];
        UNROLL
        for (u32 i = 0; i < HALF / 2; i++) out[i] = 0.0f;
        const u32 begin = unit.tile(), end = unit.tiles();
        released(&told.queries_read);
        NO_UNROLL
        for (u32 tile = begin; tile < end; tile++) {
            const u8* latents = shared + RING_AT + turn.slot * TILE_BYTES;
            mark_wait(&told.full[turn.slot], turn.parity);
            mark_wait(&handed.there, turns % 2);
            async_fence();
            scaled(out, factors[row], factors[row + 8]);
            const u64 values = values_at(latents, 1);
            pin(out);
            wgmma_fence();
            UNROLL
            for (u32 k = 0; k < SHARES; k++) {
                wgmma_ss<Element, HALF, false, true>(out, after(weights, k * 32), after(values, k * 2 * EIGHT_ROWS), true);
                wgmma_commit();
            }
            given_back(told.empty[turn.slot]);
            pin(out);
            mark_arrive(&handed.free);
            turns++;
            turn.next();
        }
        mark_wait(&handed.there, turns % 2);
        const float factor[2] = {factors[row], factors[row + 8]};
        mark_arrive(&handed.free);
        turns++;
        store(p, unit, out, 1, factor);
    });
}

MSTAR_KERNEL(latent_wide, Attend, THREADS, 1) {
    SHARED(shared);
    Told& told = *reinterpret_cast<Told*>(shared + TOLD_AT);
    if (thread_x() == 0) {
        Handed& handed = handed_of(shared);
        mark_init(&handed.there, GROUP);
        mark_init(&handed.free, GROUP);
    }
    start(told, CONSUMER_WARPS);
    const u32 group = group_index();
    if (group == 2) {
        registers_fewer<72>();
        produce(p, shared, told);
        leave_empties<Element>(p, warp() % 4, 4);
    } else if (group == 0) {
        registers_more<216>();
        consume_first(p, shared, told);
    } else {
        registers_more<216>();
        consume_second(p, shared, told);
    }
}
