// Latent attention over a work list on a Hopper: 16 or 32 query vectors a block, and one warpgroup that sums.
//
// Products are turned round, so that few query vectors pad nothing: scores are keys [64 x depth] times queries, and the result's
// columns are values [64 of the width x keys] times weights. A tile in shared memory is the left operand of both. A thread has, of
// a product, rows (keys, or columns of the result) lane / 4 and 8 below it of its warp's 16, and query vectors 8 j + 2 (lane % 4)
// and the next.
//
// With 16 query vectors an item may have up to four leaves, an aligned run of them: their states are joined here, as a merge would
// join them. The left one of two waits in registers, that of four in shared memory.
//
// Defines: those of latent_ring.cuh, with ROWS 16 or 32.

#include "latent_ring.cuh"

constexpr u32 THREADS = 2 * GROUP, WARPS = 4;
static_assert(ROWS == 16 || ROWS == 32, "columns of a product");
constexpr bool TREES = ROWS == 16;
// Query vectors that a thread has, and blocks of 64 columns of the result.
constexpr u32 MINE = ROWS / 4, PARTS = WIDTH / LANES;

// Weights: ROWS rows of 64 keys.
constexpr u32 WEIGHTS_AT = AFTER_RING;
// What warps tell each other of each query vector: two turns, so that nobody waits for readers.
constexpr u32 EXCHANGE_AT = WEIGHTS_AT + ROWS * KEYS * 2;
constexpr u32 TOLD_AT = EXCHANGE_AT + 2 * WARPS * ROWS * 4;
constexpr u32 KEPT_AT = (TOLD_AT + sizeof(Told) + 15) / 16 * 16;
// Floats of a state that a thread has.
constexpr u32 OURS = PARTS * ROWS / 2 + 2 * MINE;
constexpr u32 SHARED_BYTES = KEPT_AT + (TREES ? OURS * GROUP * 4 : 0);
static_assert(SHARED_BYTES <= 232448, "what a block of a Hopper has");

// The named barrier of the warpgroup that sums.
constexpr u32 TOGETHER = 1;

// The query vector of a thread's c-th column.
DEVICE u32 my_column(u32 c) { return c / 2 * 8 + lane() % 4 * 2 + c % 2; }

// Joins what the rows of a product have of each query vector: over the lanes of a warp, then over warps.
template <class Join>
DEVICE void join_rows(float (&of)[MINE], float* exchange, Join join) {
    UNROLL
    for (u32 c = 0; c < MINE; c++)
        UNROLL
        for (u32 by = 4; by < 32; by *= 2) of[c] = join(of[c], shfl_xor(of[c], by));
    if (lane() < 4)
        UNROLL
        for (u32 c = 0; c < MINE; c++) exchange[warp() % WARPS * ROWS + my_column(c)] = of[c];
    named_sync(TOGETHER, GROUP);
    UNROLL
    for (u32 c = 0; c < MINE; c++) {
        const float* said = exchange + my_column(c);
        of[c] = join(join(said[0], said[ROWS]), join(said[2 * ROWS], said[3 * ROWS]));
    }
}

// What a thread has of an unfinished state: sums over values, and of each query vector the largest score and the sum of weights.
struct State {
    float out[PARTS][ROWS / 2], top[MINE], sum[MINE];

    void clear() {
        UNROLL
        for (u32 part = 0; part < PARTS; part++)
            UNROLL
            for (u32 i = 0; i < ROWS / 2; i++) out[part][i] = 0.0f;
        UNROLL
        for (u32 c = 0; c < MINE; c++) top[c] = -infinity(), sum[c] = 0.0f;
    }
};

// Joins the state of keys to the left, of which `left` tells the floats in order; as merge.cu joins nodes.
template <class Left>
DEVICE void joined(State& state, Left left) {
    float fa[MINE], fb[MINE];
    UNROLL
    for (u32 c = 0; c < MINE; c++) {
        const float top = left(PARTS * ROWS / 2 + c), sum = left(PARTS * ROWS / 2 + MINE + c);
        const bool none = top == -infinity() && sum == sum, all = state.top[c] == -infinity() && state.sum[c] == state.sum[c];
        const float m = most(top, state.top[c]), reference = m == -infinity() ? 0.0f : m;
        // Empty states are identities; one whose sum is NaN is not empty.
        fa[c] = none ? 0.0f : all ? 1.0f : ex2(top - reference);
        fb[c] = all ? 0.0f : none ? 1.0f : ex2(state.top[c] - reference);
        if (all) state.top[c] = top, state.sum[c] = sum;
        else if (!none) state.top[c] = m, state.sum[c] = fused(sum, fa[c], state.sum[c] * fb[c]);
    }
    UNROLL
    for (u32 part = 0; part < PARTS; part++)
        UNROLL
        for (u32 i = 0; i < ROWS / 2; i++) {
            const u32 c = i / 4 * 2 + i % 2;
            state.out[part][i] = fused(left(part * ROWS / 2 + i), fa[c], state.out[part][i] * fb[c]);
        }
}
DEVICE float ours(const State& state, u32 i) {
    constexpr u32 SUMS = PARTS * ROWS / 2;
    return i < SUMS ? state.out[i / (ROWS / 2)][i % (ROWS / 2)] : i < SUMS + MINE ? state.top[i - SUMS] : state.sum[i - SUMS - MINE];
}

DEVICE void store(const Attend& p, const Unit& unit, const float (&out)[PARTS][ROWS / 2], const float (&factors)[MINE]) {
    const u32 first_row = warp() % WARPS * 16 + lane() / 4, C = p.Dv;
    UNROLL
    for (u32 c = 0; c < MINE; c++) {
        const u32 lane_of = unit.first + my_column(c);
        if (lane_of >= unit.output.lanes) continue;
        float* state = unit.output.direct() ? nullptr : unit.output.acc(lane_of);
        Element* to = unit.output.direct() ? output_row<Element>(p, unit.output, lane_of) : nullptr;
        UNROLL
        for (u32 part = 0; part < PARTS; part++)
            UNROLL
            for (u32 r = 0; r < 2; r++) {
                const u32 column = part * LANES + first_row + 8 * r;
                const float sum = out[part][c / 2 * 4 + 2 * r + c % 2];
                if (column >= C) continue;
                // -0 becomes 0: whether a hidden key was skipped or weighed 0 must not show.
                if (state) state[column] = sum;
                else to[column] = from_float<Element>(sum * factors[c] + 0.0f);
            }
    }
}

DEVICE void consume(const Attend& p, u8* shared, Told& told) {
    const u32 t = lane() % 4, w = warp() % WARPS, first_key = w * 16 + lane() / 4;
    const float scale = p.scale * LOG2_E;
    float* exchange = reinterpret_cast<float*>(shared + EXCHANGE_AT);
    const u64 queries = tile_desc(shared, 0, EIGHT_ROWS);
    const u64 weights = tile_desc(shared + WEIGHTS_AT, 0, EIGHT_ROWS);
    Turn turn{0, 0};
    u32 said = 0;
    each_told(told, [&](const Unit& unit) {
        State state;
        auto& out = state.out;
        auto& top = state.top;
        auto& sum = state.sum;
        state.clear();
        State left;
        bool waits = false, kept = false;
        const u32 begin = unit.tile(), end = unit.tiles(), all_see = unit.limit(unit.first), lo = unit.lo;
        if (begin >= end) released(&told.queries_read);
        const u32 leaf_keys = unit.row.leaf_keys;
        float* keep = reinterpret_cast<float*>(shared + KEPT_AT) + thread_x() % GROUP;
        auto finish_leaf = [&](u32 leaf, bool last) {
            join_rows(sum, exchange + said * WARPS * ROWS, [](float a, float b) { return a + b; });
            said ^= 1;
            if (!TREES) return;
            if (leaf % 2 == 1 && waits) joined(state, [&](u32 i) { return ours(left, i); });
            if (leaf % 2 == 1) waits = false;
            if (leaf / 2 == 1 && kept && (leaf % 2 == 1 || last)) joined(state, [&](u32 i) { return keep[i * GROUP]; });
        };
        NO_UNROLL
        for (u32 tile = begin; tile < end; tile++) {
            const u8* latents = shared + RING_AT + turn.slot * TILE_BYTES;
            mark_wait(&told.full[turn.slot], turn.parity);
            async_fence();
            float scores[ROWS / 2];
            const u64 keys = tile_desc(latents, 0, EIGHT_ROWS);
            wgmma_fence();
            UNROLL
            for (u32 step = 0; step < DEPTH / 16; step++)
                wgmma_ss<Element, ROWS, false, false>(scores, after(keys, step / 4 * BLOCK_BYTES + step % 4 * 32),
                                                      after(queries, step / 4 * QUERY_BLOCK_BYTES + step % 4 * 32), step != 0);
            wgmma_commit();
            wgmma_wait<0>();
            pin(scores);
            if (tile + 1 == end) released(&told.queries_read);

            UNROLL
            for (u32 i = 0; i < ROWS / 2; i++) scores[i] *= scale;
            if (tile * KEYS < lo || tile * KEYS + KEYS > all_see) {
                UNROLL
                for (u32 c = 0; c < MINE; c++) {
                    const u32 limit = unit.limit(unit.first + my_column(c));
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
            // A NaN is passed over here, and makes the sum NaN.
            join_rows(now, exchange + said * WARPS * ROWS, [](float a, float b) { return larger(a, b); });
            said ^= 1;
            float alpha[MINE];
            bool same = true;
            UNROLL
            for (u32 c = 0; c < MINE; c++) {
                const float most_now = larger(top[c], now[c]), reference = most_now == -infinity() ? 0.0f : most_now;
                alpha[c] = top[c] == -infinity() ? 1.0f : ex2(top[c] - most_now);
                same = same && alpha[c] == 1.0f;
                top[c] = most_now;
                float& upper = scores[c / 2 * 4 + c % 2];
                float& lower = scores[c / 2 * 4 + 2 + c % 2];
                upper = ex2(upper - reference), lower = ex2(lower - reference);
                sum[c] = sum[c] * alpha[c] + (upper + lower);
            }
            // Weights of a query vector in a row, so that they are the right operand: pieces of 8 keys, turned by the row.
            UNROLL
            for (u32 j = 0; j < ROWS / 8; j += 2) {
                const u32 words[4] = {pack<Element>(scores[4 * j], scores[4 * j + 1]), pack<Element>(scores[4 * j + 2], scores[4 * j + 3]),
                                      pack<Element>(scores[4 * j + 4], scores[4 * j + 5]),
                                      pack<Element>(scores[4 * j + 6], scores[4 * j + 7])};
                const u32 row = j * 8 + lane() / 16 * 8 + lane() % 8, piece = 2 * w + lane() / 8 % 2;
                stmatrix_x4_trans(shared + WEIGHTS_AT + row * KEYS * 2 + (piece ^ (row % 8)) * 16, words);
            }
            async_fence();
            // Only multiplications by 1 are left out.
            if (!warp_all(same)) {
                UNROLL
                for (u32 part = 0; part < PARTS; part++)
                    UNROLL
                    for (u32 i = 0; i < ROWS / 2; i++) out[part][i] *= alpha[i / 4 * 2 + i % 2];
            }
            named_sync(TOGETHER, GROUP);
            UNROLL
            for (u32 part = 0; part < PARTS; part++) pin(out[part]);
            wgmma_fence();
            const u64 values = tile_desc(latents, BLOCK_BYTES, EIGHT_ROWS);
            UNROLL
            for (u32 k = 0; k < KEYS / 16; k++)
                UNROLL
                for (u32 part = 0; part < PARTS; part++)
                    wgmma_ss<Element, ROWS, true, false>(out[part], after(values, part * BLOCK_BYTES + k * 2 * EIGHT_ROWS),
                                                         after(weights, k * 32), true);
            wgmma_commit();
            wgmma_wait<0>();
            UNROLL
            for (u32 part = 0; part < PARTS; part++) pin(out[part]);
            released(&told.empty[turn.slot]);
            turn.next();

            const bool last = tile + 1 == end;
            if (!TREES || last || (tile + 1) * KEYS % leaf_keys != 0) continue;
            // A leaf ends, and there are more.
            const u32 leaf = tile * KEYS / leaf_keys % 4;
            finish_leaf(leaf, false);
            if (leaf % 2 == 0) {
                left = state, waits = true;
            } else {
                UNROLL
                for (u32 i = 0; i < OURS; i++) keep[i * GROUP] = ours(state, i);
                kept = true;
            }
            state.clear();
        }
        finish_leaf(begin < end ? (end - 1) * KEYS / leaf_keys % 4 : 0, true);
        float factors[MINE];
        UNROLL
        for (u32 c = 0; c < MINE; c++) {
            const u32 lane_of = unit.first + my_column(c);
            const bool write = w == 0 && lane() < 4;
            factors[c] = 1.0f;
            if (lane_of >= unit.output.lanes) continue;
            if (unit.output.direct()) {
                factors[c] = finish(p, unit.output, lane_of, top[c], sum[c], write);
            } else if (write) {
                *unit.output.m(lane_of) = top[c], *unit.output.l(lane_of) = sum[c];
            }
        }
        store(p, unit, out, factors);
    });
}

MSTAR_KERNEL(latent_few, Attend, THREADS, 1) {
    SHARED(shared);
    Told& told = *reinterpret_cast<Told*>(shared + TOLD_AT);
    start(told, WARPS);
    if (group_index() == 1) produce(p, shared, told);
    else consume(p, shared, told);
}
