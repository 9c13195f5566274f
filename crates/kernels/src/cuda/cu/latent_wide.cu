// Latent attention over a work list on a Hopper: 64 query vectors a block, by three warpgroups.
//
//   producer   gathers tiles of latents into a ring, and the block's queries (latent_ring.cuh)
//   first      scores, softmax, and the left half of the result's columns
//   second     the right half, with weights and factors that the first leaves in shared memory
//
// Defines: those of latent_ring.cuh, with ROWS 64.

#include "latent_leaves.cuh"

constexpr u32 THREADS = 3 * GROUP;
constexpr u32 HALF_COLUMNS = HALF / LANES;
static_assert(ROWS == 64 && (BOXES || SHARES == KEYS / 16), "rows of a product; keys of one");
// Values of a half are multiplied in as many batches, each of which gives back a share of the tile's room. The first group goes over keys,
// 16 at a time, as their weights are made; blocks of columns are all free at its end. The second has all weights, and goes over blocks.
constexpr u32 STEPS = KEYS / 16, BATCHES = BOXES ? HALF_COLUMNS : STEPS;

constexpr u32 WEIGHTS_AT = AFTER_RING;
constexpr u32 FACTORS_AT = WEIGHTS_AT + BLOCK_BYTES;
constexpr u32 TOLD_AT = FACTORS_AT + 2 * ROWS * 4;
constexpr u32 HANDED_AT = TOLD_AT + sizeof(Told);
constexpr u32 SHARED_BYTES = HANDED_AT + 3 * sizeof(Mark);
static_assert(SHARED_BYTES <= 232448, "what a block of a Hopper has");

constexpr u32 CONSUMER_WARPS = 8;

// What the first group hands to the second, again and again: weights and factors are there; they may be written over. Every thread
// arrives: what one lane's arrival says of its warp, a race checker does not follow. `settled`: the first has a tile's scores.
struct Handed {
    Mark there, free, settled;
};
DEVICE Handed& handed_of(u8* shared) { return *reinterpret_cast<Handed*>(shared + HANDED_AT); }
// The factors of this thread's first row, and 8 behind it those of the other; of nodes that are joined there are two a row. Where they lie
// is found again each time, rather than kept in registers.
DEVICE float* my_factors(u8* shared) { return reinterpret_cast<float*>(shared + FACTORS_AT) + opaque(my_row()); }

// Rows of values are the other product's columns: the left or right half of a tile's, 16 keys at a time.
DEVICE u64 values_at(const u8* tile, u32 half) {
    return tile_desc(tile + half * HALF_COLUMNS * BLOCK_BYTES, BLOCK_BYTES, EIGHT_ROWS);
}

// Gives back, batch by batch as it is done, what the second group multiplies: the tile's right half, or shares of all of it.
template <u32 LEFT = BATCHES>
DEVICE void given_back_right(Told& told, const Turn& turn) {
    if constexpr (LEFT > 0) {
        wgmma_wait<LEFT - 1>();
        room(&told.empty[turn.slot][(BOXES ? HALF_COLUMNS : 0) + BATCHES - LEFT]);
        given_back_right<LEFT - 1>(told, turn);
    }
}
// The left half of a tile that came in boxes.
DEVICE void given(Told& told, const Turn& turn) {
    UNROLL
    for (u32 i = 0; i < HALF_COLUMNS; i++) room(&told.empty[turn.slot][i % SHARES]);
}
// Waits for the first group's values, and gives back what they needed.
template <u32 LEFT = STEPS>
DEVICE void given_back(Told& told, const Turn& turn) {
    if constexpr (BOXES) {
        wgmma_wait<0>();
        given(told, turn);
    } else if constexpr (LEFT > 0) {
        wgmma_wait<LEFT - 1>();
        room(&told.empty[turn.slot][STEPS - LEFT]);
        given_back<LEFT - 1>(told, turn);
    }
}
// Asks for the values of half of a tile, times weights, batch by batch.
DEVICE void add_values(float (&out)[HALF / 2], const u32 (&packed)[STEPS][4], u64 values) {
    wgmma_fence();
    UNROLL
    for (u32 batch = 0; batch < BATCHES; batch++) {
        if (BOXES) {
            // A block of columns; the sums of which lie together.
            float(&block)[LANES / 2] = reinterpret_cast<float(&)[LANES / 2]>(out[batch % HALF_COLUMNS * (LANES / 2)]);
            UNROLL
            for (u32 k = 0; k < STEPS; k++)
                wgmma_rs<Element, LANES, true>(block, packed[k], after(values, batch * BLOCK_BYTES + k * 2 * EIGHT_ROWS), true);
        } else {
            wgmma_rs<Element, HALF, true>(out, packed[batch % STEPS], after(values, batch * 2 * EIGHT_ROWS), true);
        }
        wgmma_commit();
    }
}
// Where this lane's row of each pair of 8 x 8 matrices of a group's weights is; pieces are turned by the row.
DEVICE u8* weights_at(u8* shared, u32 k) {
    const u32 row = warp() % 4 * 16 + lane() % 16;
    return shared + WEIGHTS_AT + row * LANES * 2 + ((2 * k + lane() / 16) ^ (row % 8)) * 16;
}

DEVICE void clear(float (&sums)[HALF / 2]) {
    UNROLL
    for (u32 i = 0; i < HALF / 2; i++) sums[i] = 0.0f;
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
        // -0 becomes 0: whether a hidden key was skipped or weighed 0 must not show.
        auto result = [&](u32 at) { return sums[at] * factors[r] + 0.0f; };
        if (pairs) {
            UNROLL
            for (u32 j = 0; j < HALF / 8; j++) {
                const u32 column = first_column + 8 * j, at = 4 * j + 2 * r;
                if (column < C) *reinterpret_cast<u32*>(to + column) = pack<Element>(result(at), result(at + 1));
            }
            continue;
        }
        UNROLL
        for (u32 j = 0; j < HALF / 8; j++) {
            const u32 column = first_column + 8 * j, at = 4 * j + 2 * r;
            if (column < C) to[column] = from_float<Element>(result(at));
            if (column + 1 < C) to[column + 1] = from_float<Element>(result(at + 1));
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
    const u64 all_queries = tile_desc(shared, 0, EIGHT_ROWS);
    Turn turn{0, 0};
    // Asks for a tile's scores in as many batches as it has blocks, and calls `asked` behind each.
    auto ask = [&](float(&scores)[KEYS / 2], auto asked) {
        u64 queries = all_queries;
        pin(queries);
        const u64 keys = tile_desc(shared + RING_AT + turn.slot * TILE_BYTES, 0, EIGHT_ROWS);
        wgmma_fence();
        UNROLL
        for (u32 i = 0; i < COLUMNS; i++) {
            const u32 column = column_at(i);
            if (BOXES) mark_wait(&told.full[turn.slot][column % FULLS], turn.parity);
            // Behind the lanes of a latent there are none to multiply, where its value is padded further than it.
            UNROLL
            for (u32 step = 0; step < (column < DEPTH / LANES ? LANES / 16 : 0); step++) {
                const u32 bytes = column * BLOCK_BYTES + step * 32;
                wgmma_ss<Element, KEYS, false, false>(scores, after(queries, bytes), after(keys, bytes), i + step != 0);
            }
            wgmma_commit();
            asked(i);
        }
    };
    // Waits for them, and gives back what scores alone need.
    auto settle = [&](float(&scores)[KEYS / 2]) {
        wgmma_wait<0>();
        pin(scores);
        UNROLL
        for (u32 column = VALUES; BOXES && column < COLUMNS; column++) room(&told.empty[turn.slot][column % SHARES]);
        if (BOXES) mark_arrive(&handed.settled);
    };
    each_told(told, [&](const Unit& unit, u32) {
        float out[HALF / 2], top[2] = {-infinity(), -infinity()}, sum[2] = {0.0f, 0.0f};
        clear(out);
        Leaves leaves(unit);
        const u32 end = unit.tiles();
        u32 tile = unit.tile();
        const u32 limits[2] = {unit.limit(unit.first + row), unit.limit(unit.first + row + 8)};
        const u32 all_see = unit.all_see, lo = unit.lo;
        if (tile >= end) released(&told.queries_read);
        float scores[KEYS / 2];
        NO_UNROLL
        while (tile < end) {
            const u32 stop = leaves.stop(end);
            const bool last = stop == end;
            if (!BOXES) mark_wait(&told.full[turn.slot][0], turn.parity);
            // Of queries too.
            async_fence();
            ask(scores, [](u32) {});
            settle(scores);
            if (tile + 1 >= end) released(&told.queries_read);
            NO_UNROLL
            for (; tile < stop; tile++) {
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
                float alpha[2], reference[2], now[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};
                stand(scores, step, top, alpha, reference);
                scaled(out, alpha[0], alpha[1]);
                mark_wait(&handed.free, turns % 2 ^ 1);
                // Weights of 16 keys at a time, so that the first values are multiplied while the others are made.
                const u64 values = values_at(latents, 0);
                u32 packed[STEPS][4];
                pin(out);
                UNROLL
                for (u32 k = 0; k < STEPS; k++) {
                    weigh_some(scores, k, step, reference, now);
                    UNROLL
                    for (u32 i = 0; i < 4; i++) packed[k][i] = pack<Element>(scores[8 * k + 2 * i], scores[8 * k + 2 * i + 1]);
                    wgmma_fence();
                    wgmma_rs<Element, HALF, true>(out, packed[k], after(values, k * 2 * EIGHT_ROWS), true);
                    wgmma_commit();
                    stmatrix_x4(weights_at(shared, k), packed[k]);
                }
                if (t == 0) factors[row] = alpha[0], factors[row + 8] = alpha[1];
                mark_arrive(&handed.there);
                turns++;
                add_weights(sum, alpha, now);

                const Turn done = turn;
                turn.next();
                if (tile + 1 < stop) {
                    // Scores of the next tile are asked for behind this one's values. Where what is gathered has not come yet, this one's room
                    // is not to wait for it; boxes come one by one.
                    const bool there = BOXES || warp_all(mark_passed(&told.full[turn.slot][0], turn.parity));
                    if (!BOXES) {
                        if (!there) given_back(told, done);
                        mark_wait(&told.full[turn.slot][0], turn.parity);
                        async_fence();
                    }
                    ask(scores, [&](u32 i) {
                        // So many batches of values are under way still, and i + 1 of scores.
                        if (BOXES && i == 0) {
                            wgmma_wait<1>();
                            given(told, done);
                        } else if (!BOXES && i < STEPS) {
                            wgmma_wait<STEPS>();
                            if (there) room(&told.empty[done.slot][i % SHARES]);
                        }
                    });
                    pin(out);
                    settle(scores);
                    UNROLL
                    for (u32 i = COLUMNS; !BOXES && i < STEPS; i++)
                        if (there) room(&told.empty[done.slot][i % SHARES]);
                    if (tile + 2 >= end) released(&told.queries_read);
                } else {
                    given_back(told, done);
                    pin(out);
                }
            }
            add_up(sum);
            leaves.rise(
                unit, last,
                [&](u32 at) {
                    const Output node = waiting(p, unit, at);
                    float left[2], right[2];
                    join_figures(node, unit, top, sum, left, right);
                    mark_wait(&handed.free, turns % 2 ^ 1);
                    if (t == 0) factors[row] = left[0], factors[row + 8] = left[1];
                    if (t == 0) factors[ROWS + row] = right[0], factors[ROWS + row + 8] = right[1];
                    mark_arrive(&handed.there);
                    turns++;
                    join_half(node, unit, out, 0, left, right);
                },
                [&](u32 at) {
                    const Output node = waiting(p, unit, at);
                    put_figures(node, unit, top, sum);
                    put_half(node, unit, out, 0);
                    clear(out);
                    top[0] = top[1] = -infinity(), sum[0] = sum[1] = 0.0f;
                });
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
    Turn turn{0, 0};
    Handed& handed = handed_of(shared);
    u32 turns = 0, settled = 0;
    each_told(told, [&](const Unit& unit, u32) {
        float out[HALF / 2];
        clear(out);
        Leaves leaves(unit);
        const u32 end = unit.tiles();
        u32 tile = unit.tile();
        released(&told.queries_read);
        NO_UNROLL
        while (tile < end) {
            const u32 stop = leaves.stop(end);
            const bool last = stop == end;
            NO_UNROLL
            for (; tile < stop; tile++) {
                const u8* latents = shared + RING_AT + turn.slot * TILE_BYTES;
                if (!BOXES) mark_wait(&told.full[turn.slot][0], turn.parity);
                UNROLL
                for (u32 i = 0; BOXES && i < HALF_COLUMNS; i++) mark_wait(&told.full[turn.slot][(HALF_COLUMNS + i) % FULLS], turn.parity);
                mark_wait(&handed.there, turns % 2);
                u32 packed[STEPS][4];
                UNROLL
                for (u32 k = 0; k < STEPS; k++) ldmatrix_x4(packed[k], weights_at(shared, k));
                const float* factors = my_factors(shared);
                const float alpha[2] = {factors[0], factors[8]};
                if (!BOXES) {
                    mark_arrive(&handed.free);
                    async_fence();
                }
                scaled(out, alpha[0], alpha[1]);
                // Where products bind, these are for while the first group makes the next weights and multiplies nothing: they do not slow the
                // next scores. Weights are free behind that, so that no more than one tile's scores settle unheard.
                settled++;
                if (BOXES) {
                    if (tile + 1 < stop) mark_wait(&handed.settled, settled % 2);
                    mark_arrive(&handed.free);
                }
                turns++;
                pin(out);
                add_values(out, packed, values_at(latents, 1));
                given_back_right(told, turn);
                pin(out);
                turn.next();
            }
            leaves.rise(
                unit, last,
                [&](u32 at) {
                    mark_wait(&handed.there, turns % 2);
                    const float* factors = my_factors(shared);
                    const float left[2] = {factors[0], factors[8]}, right[2] = {factors[ROWS], factors[ROWS + 8]};
                    mark_arrive(&handed.free);
                    turns++;
                    join_half(waiting(p, unit, at), unit, out, 1, left, right);
                },
                [&](u32 at) {
                    put_half(waiting(p, unit, at), unit, out, 1);
                    clear(out);
                });
        }
        mark_wait(&handed.there, turns % 2);
        const float* factors = my_factors(shared);
        const float factor[2] = {factors[0], factors[8]};
        mark_arrive(&handed.free);
        turns++;
        store(p, unit, out, 1, factor);
    });
}

#if BOXES
typedef AttendMapped Params;
#else
typedef Attend Params;
#endif

#if CLUSTER > 1
MSTAR_KERNEL_OF_CLUSTERS(latent_wide, Params, THREADS, 1, CLUSTER) {
#else
MSTAR_KERNEL(latent_wide, Params, THREADS, 1) {
#endif
    SHARED(shared);
#if BOXES
    const Attend& call = p.attend;
    const TensorMap* map = &p.map;
#else
    const Attend& call = p;
    const TensorMap* map = nullptr;
#endif
    Told& told = *reinterpret_cast<Told*>(shared + TOLD_AT);
    if (thread_x() == 0) {
        Handed& handed = handed_of(shared);
        mark_init(&handed.there, GROUP);
        mark_init(&handed.free, GROUP);
        mark_init(&handed.settled, GROUP);
    }
    start(told, CONSUMER_WARPS);
    const u32 group = group_index();
    if (group == 2) {
        registers_fewer<72>();
        produce(call, map, shared, told);
        leave_empties<Element>(call, warp() % 4, 4);
    } else if (group == 0) {
        registers_more<216>();
        consume_first(call, shared, told);
    } else {
        registers_more<216>();
        consume_second(call, shared, told);
    }
    // A peer gives back room, and its boxes come, until it is done too.
    if (CLUSTER > 1) cluster_sync();
}
