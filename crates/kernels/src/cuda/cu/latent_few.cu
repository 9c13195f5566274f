// Latent attention over a work list on a Hopper: 16 or 32 query vectors a block, by three warpgroups.
//
//   first      scores, softmax, and the left half of the result's columns
//   second     the right half, with weights and factors that the first leaves in shared memory
//   producer   gathers tiles of latents into a ring, and the block's queries (latent_tasks.cuh)
//
// Products are turned round (turned.cuh).
//
// With 16 query vectors an item may have several leaves, an aligned run of them: their states are joined here (latent_states.cuh).
//
// Defines: those of latent_ring.cuh, with ROWS 16 or 32.

#include "latent_states.cuh"

// What the first group hands to the second, turn after turn.
DEVICE float* factors_of(u8* shared, u32 turn) { return reinterpret_cast<float*>(shared + FACTORS_AT) + turn % 2 * 2 * ROWS; }
DEVICE void hand_over(FewTold& told, u32 turn) { mark_arrive(&told.there[turn % 2]); }
DEVICE void await(FewTold& told, u32 turn) { mark_wait(&told.there[turn % 2], turn / 2 % 2); }
DEVICE void give_back(FewTold& told, u32 turn) { mark_arrive(&told.free[turn % 2]); }
// Of the first two turns at once.
DEVICE void await_room(FewTold& told, u32 turn) { mark_wait(&told.free[turn % 2], turn / 2 % 2 ^ 1); }

// The weights of a tile: where what is behind its values was, which the first product alone reads.
DEVICE u8* weights_of(u8* shared, u32 rest, u32 turn) {
    return REST ? shared + REST_AT + rest * REST_BYTES : shared + WEIGHTS_AT + turn % 2 * WEIGHT_BYTES;
}
// Adds a tile's weighted values to half of the columns.
DEVICE void weigh(State& state, const u8* latents, const u8* weights_at, u32 half) {
    UNROLL
    for (u32 part = 0; part < HALF; part++) pin(state.out[part]);
    wgmma_fence();
    const u64 values = tile_desc(latents + half * HALF * BLOCK_BYTES, BLOCK_BYTES, EIGHT_ROWS);
    const u64 weights = tile_desc(weights_at, 0, EIGHT_ROWS);
    UNROLL
    for (u32 k = 0; k < KEYS / 16; k++)
        UNROLL
        for (u32 part = 0; part < HALF; part++)
            wgmma_ss<Element, ROWS, true, false>(state.out[part], after(values, part * BLOCK_BYTES + k * 2 * EIGHT_ROWS),
                                                 after(weights, k * 32), true);
    wgmma_commit();
    wgmma_wait<0>();
    UNROLL
    for (u32 part = 0; part < HALF; part++) pin(state.out[part]);
}

// The element of a result of one plane where a query vector's begins.
DEVICE i64 row_of(const Place& place, u32 token, u32 head) { return i64(token) * place.token + i64(head) * place.head; }

// Writes half of a block's results, or of its unfinished state; the first group what a query vector has one of.
DEVICE void store(const Attend& p, const Work& work, const State& state, u32 half) {
    const u32 w = warp() % WARPS, first_row = half * HALF * LANES + w * 16 + lane() / 4, C = p.Dv, lanes = work.task.q_count * p.H;
    const bool write = half == 0 && w == 0 && lane() < 4;
    Output output;
    output.lanes = lanes, output.width = C, output.state = state_of(p, work.task);
    UNROLL
    for (u32 c = 0; c < MINE; c++) {
        const u32 lane_of = work.first() + my_column(c);
        if (lane_of >= lanes) continue;
        if (output.direct()) {
            const u32 token = work.task.token + lane_of / p.H, head = lane_of % p.H;
            const Root r = root(state.top[c], state.sum[c], p.sinks ? p.sinks + head : nullptr);
            if (write && p.lse.at) reinterpret_cast<float*>(p.lse.at)[row_of(p.lse, token, head)] = r.lse;
            Element* to = reinterpret_cast<Element*>(p.o.at) + row_of(p.o, token, head);
            UNROLL
            for (u32 i = 0; i < 2 * HALF; i++) {
                const u32 column = i / 2 * LANES + first_row + i % 2 * 8;
                // -0 becomes 0: whether a hidden key was skipped or weighed 0 must not show.
                if (column < C) to[column] = from_float<Element>(state.out[i / 2][c / 2 * 4 + i % 2 * 2 + c % 2] * r.factor + 0.0f);
            }
            continue;
        }
        if (write) *output.m(lane_of) = state.top[c], *output.l(lane_of) = state.sum[c];
        float* to = output.acc(lane_of);
        UNROLL
        for (u32 i = 0; i < 2 * HALF; i++) {
            const u32 column = i / 2 * LANES + first_row + i % 2 * 8;
            if (column < C) to[column] = state.out[i / 2][c / 2 * 4 + i % 2 * 2 + c % 2];
        }
    }
}

// What the merges behind this launch read first, on its way to the second-level cache meanwhile.
DEVICE void prefetch_merges(const Attend& p) {
    const u32 from = p.image->merge_at, to = p.image->page_at;
    if (p.image->merges == 0) return;
    NO_UNROLL
    for (u32 at = from + (block_x() * GROUP + thread_x() % GROUP) * 128; at < to; at += grid_x() * GROUP * 128)
        prefetch_l2(reinterpret_cast<const u8*>(p.image) + at);
}

// Where a group is: in the ring, and in what the first group hands to the second.
struct Stand {
    Turn turn;
    u32 rest, said, turns;

    void next_tile() {
        turn.next();
        rest = rest + 1 == RESTS ? 0 : rest + 1;
    }
};

// The first group's part of a leaf, or of what an item has of it: tiles begin..end, of which the last may be the item's.
DEVICE void first_leaf(const Attend& p, u8* shared, FewTold& told, const Share& share, u32 first, u32 begin, u32 end, bool last,
                       Stand& at, State& state) {
    const u32 w = warp() % WARPS, first_key = w * 16 + lane() / 4, all_see = share.limit(first), lo = share.lo;
    const float scale = p.scale * LOG2_E;
    float* exchange = reinterpret_cast<float*>(shared + EXCHANGE_AT);
    const u64 queries = tile_desc(shared, 0, EIGHT_ROWS);
    auto& top = state.top;
    auto& sum = state.sum;
    NO_UNROLL
    for (u32 tile = begin; tile < end; tile++) {
        const u8* latents = shared + RING_AT + at.turn.slot * VALUE_BYTES;
        const u8* behind = shared + REST_AT + at.rest * REST_BYTES;
        mark_wait(&told.full[at.turn.slot], at.turn.parity);
        async_fence();
        float scores[ROWS / 2];
        const u64 keys = tile_desc(latents, 0, EIGHT_ROWS), keys_behind = tile_desc(behind, 0, EIGHT_ROWS);
        wgmma_fence();
        UNROLL
        for (u32 step = 0; step < DEPTH / 16; step++)
            wgmma_ss<Element, ROWS, false, false>(scores,
                                                  step / 4 < PARTS ? after(keys, step / 4 * BLOCK_BYTES + step % 4 * 32)
                                                                   : after(keys_behind, (step / 4 - PARTS) * BLOCK_BYTES + step % 4 * 32),
                                                  after(queries, step / 4 * QUERY_BLOCK_BYTES + step % 4 * 32), step != 0);
        wgmma_commit();
        wgmma_wait<0>();
        pin(scores);
        if (last && tile + 1 == end) mark_arrive(&told.queries_read);

        UNROLL
        for (u32 i = 0; i < ROWS / 2; i++) scores[i] *= scale;
        if (tile * KEYS < lo || tile * KEYS + KEYS > all_see) {
            UNROLL
            for (u32 c = 0; c < MINE; c++) {
                const u32 limit = share.limit(first + my_column(c));
                UNROLL
                for (u32 r = 0; r < 2; r++) {
                    const u32 key = tile * KEYS + first_key + 8 * r;
                    if (key < lo || key >= limit) scores[c / 2 * 4 + 2 * r + c % 2] = -infinity();
                }
            }
        }
        float now[MINE];
        UNROLL
        for (u32 c = 0; c < MINE; c++) now[c] = larger(scores[c / 2 * 4 + c % 2], scores[c / 2 * 4 + 2 + c % 2]);
        // A NaN is passed over here, and makes the sum NaN. Behind this all warps have read what is behind the values.
        join_rows(now, exchange + at.said * EXCHANGED, [](float a, float b) { return larger(a, b); });
        at.said ^= 1;
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
        await_room(told, at.turns);
        float* factors = factors_of(shared, at.turns);
        if (w == 0 && lane() < 4)
            UNROLL
            for (u32 c = 0; c < MINE; c++) factors[my_column(c)] = alpha[c];
        // Weights of a query vector in a row, so that they are the right operand: pieces of 8 keys, turned by the row.
        u8* weights = weights_of(shared, at.rest, at.turns);
        UNROLL
        for (u32 j = 0; j < ROWS / 8; j += 2) {
            const u32 words[4] = {pack<Element>(scores[4 * j], scores[4 * j + 1]), pack<Element>(scores[4 * j + 2], scores[4 * j + 3]),
                                  pack<Element>(scores[4 * j + 4], scores[4 * j + 5]),
                                  pack<Element>(scores[4 * j + 6], scores[4 * j + 7])};
            const u32 row = j * 8 + lane() / 16 * 8 + lane() % 8, piece = 2 * w + lane() / 8 % 2;
            stmatrix_x4_trans(weights + row * KEYS * 2 + (piece ^ (row % 8)) * 16, words);
        }
        async_fence();
        hand_over(told, at.turns);
        at.turns++;
        state.scale(alpha);
        named_sync(TOGETHER, GROUP);
        weigh(state, latents, weights, 0);
        released(&told.empty[at.turn.slot]);
        at.next_tile();
    }
    if (begin >= end) mark_arrive(&told.queries_read);
    join_rows(sum, exchange + at.said * EXCHANGED, [](float a, float b) { return a + b; });
    at.said ^= 1;
    await_room(told, at.turns);
    float* figures = factors_of(shared, at.turns);
    if (w == 0 && lane() < 4)
        UNROLL
        for (u32 c = 0; c < MINE; c++) figures[my_column(c)] = top[c], figures[ROWS + my_column(c)] = sum[c];
    hand_over(told, at.turns);
    at.turns++;
}

// The second group's.
DEVICE void second_leaf(u8* shared, FewTold& told, u32 begin, u32 end, Stand& at, State& state) {
    NO_UNROLL
    for (u32 tile = begin; tile < end; tile++) {
        mark_wait(&told.full[at.turn.slot], at.turn.parity);
        await(told, at.turns);
        async_fence();
        const float* factors = factors_of(shared, at.turns);
        float alpha[MINE];
        UNROLL
        for (u32 c = 0; c < MINE; c++) alpha[c] = factors[my_column(c)];
        state.scale(alpha);
        weigh(state, shared + RING_AT + at.turn.slot * VALUE_BYTES, weights_of(shared, at.rest, at.turns), 1);
        give_back(told, at.turns);
        at.turns++;
        released(&told.empty[at.turn.slot]);
        at.next_tile();
    }
    await(told, at.turns);
    const float* figures = factors_of(shared, at.turns);
    UNROLL
    for (u32 c = 0; c < MINE; c++) state.top[c] = figures[my_column(c)], state.sum[c] = figures[ROWS + my_column(c)];
    give_back(told, at.turns);
    at.turns++;
}

// By both groups. What they do alike is the same instructions: few of them are cold when a launch begins.
DEVICE void consume(const Attend& p, u8* shared, FewTold& told, u32 group) {
    Stand at{{0, 0}, 0, 0, 0};
    NO_UNROLL
    for (u32 count = 0;; count++) {
        mark_wait(&told.queries, count % 2);
        const Work& work = told.works[count % 2];
        if (work.task.q_count == 0) break;
        if (group == 1) mark_arrive(&told.queries_read);
        const Share share = share_of(p, work);
        const u32 end = share.tiles(), leaf_keys = work.task.leaf_keys;
        State state;
        Tree tree;
        state.clear();
        tree.waits = 0;
        u32 tile = share.tile();
        NO_UNROLL
        for (;;) {
            const u32 leaf = tile * KEYS / leaf_keys, leaf_end = least(end, (leaf + 1) * (leaf_keys / KEYS));
            const bool last = leaf_end >= end;
            if (group == 0) first_leaf(p, shared, told, share, work.first(), tile, leaf_end, last, at, state);
            else second_leaf(shared, told, tile, leaf_end, at, state);
            tree.join(p, work.task, state, leaf, last);
            if (last) break;
            state.clear();
            tile = leaf_end;
        }
        store(p, work, state, group);
    }
}

MSTAR_KERNEL(latent_few, Attend, THREADS, 1) {
    SHARED(shared);
    FewTold& told = *reinterpret_cast<FewTold*>(shared + TOLD_FROM);
    if (thread_x() == 0) {
        UNROLL
        for (u32 slot = 0; slot < STAGES; slot++) {
            mark_init(&told.full[slot], GROUP);
            mark_init(&told.empty[slot], 2 * WARPS);
        }
        UNROLL
        for (u32 turn = 0; turn < 2; turn++) {
            mark_init(&told.there[turn], GROUP);
            mark_init(&told.free[turn], GROUP);
        }
        mark_init(&told.queries, GROUP + 1);
        mark_init(&told.queries_read, 2 * GROUP);
        marks_ready();
    }
    block_sync();
    const u32 group = group_index();
    if (group == 2) {
        registers_fewer<PRODUCER>();
        produce_few(p, shared, told);
        leave_empties<Element>(p, warp() % WARPS, WARPS);
    } else {
        registers_more<CONSUMER>();
        if (group == 1) prefetch_merges(p);
        consume(p, shared, told, group);
    }
}
