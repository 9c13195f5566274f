// Many query vectors on a Hopper, over segments: 128 query vectors a block by three warpgroups, as FlashAttention-3 does it (Shah et al.,
// arXiv 2407.08608).
//
//   producer   brings tiles of keys and values into a ring, and the block's queries (tile_ring.cuh)
//   consumers  64 query vectors each: scores, softmax and sums in registers
//
// A consumer asks for the next tile's scores ahead of this tile's values, so that its softmax lies under the latter; what of it does not lies
// under the other's products, which nothing orders: see docs/perf-notes.md. Tiles start at multiples of KEYS, whatever else a block works on.
//
// Defines: those of tile_ring.cuh.

#include "tile_ring.cuh"

constexpr u32 THREADS = 3 * GROUP, CONSUMERS = 2, ROWS = QUERIES / CONSUMERS, CONSUMER_WARPS = CONSUMERS * 4;
constexpr u32 STEPS = KEYS / 16, COLUMNS = VALUES / 8;

// Scores of a tile become weights: a thread has two rows, of which `tops` are the largest logits, `sums` its share of the weights, and
// `shrink` what both rows' former sums are multiplied by.
struct Softmax {
    float tops[2], sums[2], shrink[2];
};
DEVICE void weigh(float (&x)[KEYS / 2], float factor, Softmax& of) {
    UNROLL
    for (u32 r = 0; r < 2; r++) {
        float top = x[2 * r];
        UNROLL
        for (u32 n = 0; n < KEYS / 8; n++) top = larger(top, larger(x[4 * n + 2 * r], x[4 * n + 2 * r + 1]));
        of.shrink[r] = step_of(of.tops[r], row_max(top), factor);
    }
    float now[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};
    UNROLL
    for (u32 n = 0; n < KEYS / 8; n++) {
        UNROLL
        for (u32 i = 0; i < 4; i++) {
            float& s = x[4 * n + i];
            s = ex2(fused(s, factor, -of.tops[i / 2]));
            now[i / 2][i % 2] += s;
        }
    }
    UNROLL
    for (u32 r = 0; r < 2; r++) of.sums[r] = fused(of.sums[r], of.shrink[r], now[r][0] + now[r][1]);
}
// Weights as the left operand of products.
DEVICE void packed(u32 (&to)[STEPS][4], const float (&x)[KEYS / 2]) {
    UNROLL
    for (u32 k = 0; k < STEPS; k++) {
        UNROLL
        for (u32 i = 0; i < 4; i++) to[k][i] = pack<T>(x[8 * k + 2 * i], x[8 * k + 2 * i + 1]);
    }
}
// Waits for the values that are under way, and shrinks what was summed: products with exactly 1 may be left out. Where to wait is decided by
// what all weights are part of, so that the compiler makes these first, while values are multiplied; a NaN among them is as good.
DEVICE void settle(float (&sums)[VALUES / 2], const Softmax& of) {
    const bool stays = of.shrink[0] == 1.0f && of.shrink[1] == 1.0f;
    if (warp_all(stays && of.sums[0] >= 0.0f && of.sums[1] >= 0.0f)) {
        wgmma_wait<0>();
        pin(sums);
        return;
    }
    wgmma_wait<0>();
    pin(sums);
    UNROLL
    for (u32 i = 0; i < VALUES / 2; i++) sums[i] *= of.shrink[i / 2 % 2];
}

// Writes a thread's rows, or their unfinished states.
DEVICE void leave(const Attend& p, const Unit& unit, u32 first, const Softmax& softmax, const float (&sums)[VALUES / 2]) {
    const u32 t = lane() % 4;
    float total[2];
    UNROLL
    for (u32 r = 0; r < 2; r++) total[r] = row_sum(softmax.sums[r]);
    UNROLL
    for (u32 r = 0; r < 2; r++) {
        const u32 of = first + 8 * r;
        if (of >= unit.output.lanes) continue;
        const float m = top_of(softmax.tops[r]), l = total[r];
        if (unit.output.direct()) {
            const float f = finish(p, unit.output, of, m, l, t == 0);
            T* to = output_row<T>(p, unit.output, of);
            UNROLL
            for (u32 n = 0; n < COLUMNS; n++) {
                const u32 at = 8 * n + 2 * t;
                const float a = sums[4 * n + 2 * r] * f + 0.0f, b = sums[4 * n + 2 * r + 1] * f + 0.0f;
                if (at < p.Dv) store_pair(to + at, a, b, at + 1 < p.Dv);
            }
        } else {
            if (t == 0) *unit.output.m(of) = m, *unit.output.l(of) = l;
            float* to = unit.output.acc(of);
            UNROLL
            for (u32 n = 0; n < COLUMNS; n++) {
                const u32 at = 8 * n + 2 * t;
                if (at < p.Dv) to[at] = sums[4 * n + 2 * r];
                if (at + 1 < p.Dv) to[at + 1] = sums[4 * n + 2 * r + 1];
            }
        }
    }
}

DEVICE void consume(const Attend& p, u8* shared, Told& told, u32 group) {
    const float factor = scale_of<false>(p).factor;
    const u32 t = lane() % 4, first = group * ROWS + warp() % 4 * 16 + lane() / 4;
    const u64 queries = tile_desc(shared + group * ROWS * ROW_BYTES, 0, EIGHT_ROWS);
    Turn keys_turn{0, 0}, values_turn{0, 0};
    auto ask_scores = [&](float(&x)[KEYS / 2]) {
        u64 rows = queries;
        pin(rows);
        const u64 keys = tile_desc(shared + KEYS_AT + keys_turn.slot * KEY_BYTES, 0, EIGHT_ROWS);
        wgmma_fence();
        UNROLL
        for (u32 i = 0; i < WIDTH / 16; i++) {
            const u32 block = i / (LANES / 16), step = i % (LANES / 16) * 32;
            wgmma_ss<T, KEYS, false, false>(x, after(rows, block * QUERY_BLOCK_BYTES + step), after(keys, block * BLOCK_BYTES + step), i != 0);
        }
        wgmma_commit();
    };
    auto ask_values = [&](float(&sums)[VALUES / 2], const u32(&weights)[STEPS][4]) {
        const u64 values = tile_desc(shared + VALUES_AT + values_turn.slot * VALUE_BYTES, BLOCK_BYTES, EIGHT_ROWS);
        wgmma_fence();
        UNROLL
        for (u32 k = 0; k < STEPS; k++) wgmma_rs<T, VALUES, true>(sums, weights[k], after(values, k * 2 * EIGHT_ROWS), true);
        wgmma_commit();
    };
    each_told(told, [&](const Unit& unit, u32) {
        float sums[VALUES / 2], x[KEYS / 2];
        u32 weights[STEPS][4];
        Softmax softmax{{LOWEST, LOWEST}, {0.0f, 0.0f}, {1.0f, 1.0f}};
        UNROLL
        for (u32 i = 0; i < VALUES / 2; i++) sums[i] = 0.0f;
        const u32 begin = unit.tile(), end = unit.tiles();
        // What this thread's rows see, and what all rows of the warp do.
        u32 lo[2], hi[2];
        UNROLL
        for (u32 r = 0; r < 2; r++) {
            const u32 of = least(first + 8 * r, unit.output.lanes - 1);
            const Reach sees = span_at(p, unit.reach, unit.first + i64(of / unit.output.group));
            lo[r] = sees.lo, hi[r] = sees.hi;
        }
        const u32 all_lo = warp_max(most(lo[0], lo[1])), all_hi = ~warp_max(~least(hi[0], hi[1]));
        auto hide = [&](u32 base) {
            if (base >= all_lo && base + KEYS <= all_hi) return;
            UNROLL
            for (u32 i = 0; i < KEYS / 2; i++) {
                const u32 key = base + 2 * t + i / 4 * 8 + i % 2;
                if (key < lo[i / 2 % 2] || key >= hi[i / 2 % 2]) x[i] = -infinity();
            }
        };
        mark_wait(&told.keys[keys_turn.slot], keys_turn.parity);
        ask_scores(x);
        wgmma_wait<0>();
        pin(x);
        released(&told.keys_read[keys_turn.slot]);
        keys_turn.next();
        if (begin + 1 >= end) released(&told.queries_read);
        hide(begin * KEYS);
        weigh(x, factor, softmax);
        packed(weights, x);
        NO_UNROLL
        for (u32 tile = begin + 1; tile < end; tile++) {
            mark_wait(&told.keys[keys_turn.slot], keys_turn.parity);
            ask_scores(x);
            mark_wait(&told.values[values_turn.slot], values_turn.parity);
            ask_values(sums, weights);
            wgmma_wait<1>();
            pin(x);
            released(&told.keys_read[keys_turn.slot]);
            keys_turn.next();
            if (tile + 1 >= end) released(&told.queries_read);
            hide(tile * KEYS);
            weigh(x, factor, softmax);
            settle(sums, softmax);
            released(&told.values_read[values_turn.slot]);
            values_turn.next();
            packed(weights, x);
        }
        mark_wait(&told.values[values_turn.slot], values_turn.parity);
        ask_values(sums, weights);
        wgmma_wait<0>();
        pin(sums);
        released(&told.values_read[values_turn.slot]);
        values_turn.next();
        leave(p, unit, first, softmax, sums);
    });
}

MSTAR_KERNEL(tile_wide, AttendBoxes, THREADS, 1) {
    SHARED(shared);
    Told& told = *reinterpret_cast<Told*>(shared + TOLD_AT);
    start(told, CONSUMER_WARPS);
    const u32 group = group_index();
    if (group == CONSUMERS) {
        registers_fewer<40>();
        produce(p, shared, told);
    } else {
        registers_more<232>();
        consume(p.attend, shared, told, group);
    }
}
