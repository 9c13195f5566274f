// Many query vectors on a Hopper, over segments or pages: two or three times 64 of them a block, as FlashAttention-3 does it (Shah et al.,
// arXiv 2407.08608).
//
//   producer   brings tiles of keys and values into a ring, and the block's queries (tile_ring.cuh)
//   consumers  64 query vectors each: scores, softmax and sums in registers
//
// A consumer asks for the next tile's scores ahead of this tile's values, so that its softmax lies under the latter, also where the next tile
// is another item's. What of it does not lies under another consumer's products, which nothing orders: see docs/perf-notes.md. Tiles start
// at multiples of KEYS, whatever else a block works on.
//
// Values are whole pieces of 8 wide. Defines: those of tile_ring.cuh; GENERAL 1 where a soft cap or slopes change scores.

// Results are never in planes.
#define ONE_PLANE
#include "cap.cuh"
#include "tile_ring.cuh"

constexpr u32 THREADS = (CONSUMERS + 1) * GROUP, CONSUMER_WARPS = CONSUMERS * 4;
// Registers of a thread of each role: those that the block is launched with, 168 for each of three groups or 128 for each of four.
constexpr u32 PRODUCER = SOURCE == PAGES && WIDTH > 64 ? 40 : 56;
constexpr u32 CONSUMER = ((CONSUMERS == 2 ? 3 * 168 : 4 * 128) - PRODUCER) / CONSUMERS;
static_assert(CONSUMERS == 2 || CONSUMERS == 3, "groups whose registers were counted");
constexpr u32 STEPS = KEYS / 16, COLUMNS = VALUES / 8;

struct alignas(8) Two {
    float x, y;
};

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

// Turns a square of words that four lanes have a column each of: word i of lane t becomes word t of lane i.
DEVICE void turn_square(u32 (&w)[4]) {
    UNROLL
    for (u32 by = 1; by <= 2; by *= 2) {
        const bool upper = lane() & by;
        UNROLL
        for (u32 i = 0; i < 4; i++) {
            if (i & by) continue;
            const u32 got = shfl_xor(upper ? w[i] : w[i + by], by);
            if (upper) w[i] = got;
            else w[i + by] = got;
        }
    }
}

// Writes a thread's rows, or their unfinished states. Results go in pieces of 16 bytes, four times fewer than pairs.
DEVICE void leave(const Attend& p, const Unit& unit, u32 first, const Softmax& softmax, const float (&sums)[VALUES / 2]) {
    const u32 t = lane() % 4;
    UNROLL
    for (u32 r = 0; r < 2; r++) {
        const bool there = first + 8 * r < unit.output.lanes;
        const u32 of = there ? first + 8 * r : 0;
        const float m = top_of(softmax.tops[r]), l = row_sum(softmax.sums[r]);
        if (!unit.output.direct()) {
            if (!there) continue;
            if (t == 0) *unit.output.m(of) = m, *unit.output.l(of) = l;
            // A state is padded to whole lines.
            float* to = unit.output.acc(of) + 2 * t;
            UNROLL
            for (u32 n = 0; n < COLUMNS; n++)
                if (8 * n + 2 * t < p.Dv) *reinterpret_cast<Two*>(to + 8 * n) = Two{sums[4 * n + 2 * r], sums[4 * n + 2 * r + 1]};
            continue;
        }
        const float f = finish(p, unit.output, of, m, l, there && t == 0);
        T* to = output_row<T>(p, unit.output, of) + 8 * t;
        const bool aligned = reinterpret_cast<u64>(to) % 16 == 0;
        UNROLL
        for (u32 n = 0; n < COLUMNS; n += 4) {
            u32 w[4];
            UNROLL
            for (u32 i = 0; i < 4; i++) w[i] = pack<T>(sums[4 * (n + i) + 2 * r] * f + 0.0f, sums[4 * (n + i) + 2 * r + 1] * f + 0.0f);
            turn_square(w);
            if (!there || 8 * (n + t) >= p.Dv) continue;
            if (aligned) {
                store16(to + 8 * n, U4{w[0], w[1], w[2], w[3]});
            } else {
                UNROLL
                for (u32 i = 0; i < 8; i++) to[8 * n + i].bits = u16(w[i / 2] >> (16 * (i % 2)));
            }
        }
    }
}

// What a thread's rows see of a unit's keys.
DEVICE Reach sees(const Attend& p, const Unit& unit, u32 of) {
    return span_at(p, unit.reach, unit.first + i64(least(of, unit.output.lanes - 1) / unit.output.group));
}
// What all rows of a warp see.
DEVICE Reach sight_of(const Attend& p, const Unit& unit, u32 first) {
    const Reach a = sees(p, unit, first), b = sees(p, unit, first + 8);
    return Reach{warp_max(most(a.lo, b.lo)), ~warp_max(~least(a.hi, b.hi))};
}
// Scores of the tile at `base` become base-2 logits, capped, and what slopes take for their distance.
DEVICE void change(const Attend& p, float (&x)[KEYS / 2], const Unit& unit, u32 first, u32 base) {
    const float scale = p.scale * LOG2_E;
    UNROLL
    for (u32 i = 0; i < KEYS / 2; i++) x[i] *= scale;
    if (p.soft_cap > 0.0f) {
        const Cap cap = cap_of(p.soft_cap);
        UNROLL
        for (u32 i = 0; i < KEYS / 2; i++) x[i] = capped(cap, x[i]);
    }
    if (!p.slopes) return;
    UNROLL
    for (u32 r = 0; r < 2; r++) {
        const u32 of = least(first + 8 * r, unit.output.lanes - 1);
        const float slope = p.slopes[unit.output.head(of)] * LOG2_E;
        const float distance = float(i64(base + 2 * (lane() % 4)) - (unit.first + i64(of / unit.output.group)));
        UNROLL
        for (u32 n = 0; n < KEYS / 8; n++) {
            UNROLL
            for (u32 i = 0; i < 2; i++) {
                float& s = x[4 * n + 2 * r + i];
                s = fused(slope, distance + float(8 * n + i), s);
            }
        }
    }
}
// The same, and of keys that a row does not see -inf.
DEVICE void see(const Attend& p, float (&x)[KEYS / 2], const Unit& unit, const Reach& sight, u32 first, u32 base) {
    if (GENERAL) change(p, x, unit, first, base);
    const u32 from = base + 2 * (lane() % 4);
    if (base < sight.lo || base + KEYS > sight.hi) {
        UNROLL
        for (u32 r = 0; r < 2; r++) {
            const Reach seen = sees(p, unit, first + 8 * r);
            UNROLL
            for (u32 n = 0; n < KEYS / 8; n++) {
                UNROLL
                for (u32 i = 0; i < 2; i++) {
                    const u32 key = from + 8 * n + i;
                    if (key < seen.lo || key >= seen.hi) x[4 * n + 2 * r + i] = -infinity();
                }
            }
        }
    }
    if (SOURCE != PAGES || !unit.mask_words) return;
    UNROLL
    for (u32 r = 0; r < 2; r++) {
        const u32 token = least(first + 8 * r, unit.output.lanes - 1) / unit.output.group;
        UNROLL
        for (u32 n = 0; n < KEYS / 8; n++) {
            const u32 at = from + 8 * n;
            const u32 bits = u32(masked(p, unit, token, at / 64) >> (at % 64));
            UNROLL
            for (u32 i = 0; i < 2; i++)
                if (!(bits >> i & 1)) x[4 * n + 2 * r + i] = -infinity();
        }
    }
}

DEVICE void consume(const Attend& p, u8* shared, Told& told, u32 group) {
    const float factor = GENERAL ? 1.0f : scale_of<false>(p).factor;
    const u32 first = group * ROWS + warp() % 4 * 16 + lane() / 4;
    Turn keys_turn{0, 0}, values_turn{0, 0};
    float sums[VALUES / 2], x[KEYS / 2];
    u32 weights[STEPS][4];
    // Asks for the scores of the next tile in the ring, by the count-th unit's queries.
    auto ask_scores = [&](u32 count) {
        const u64 rows = tile_desc(queries_at(shared, shfl_idx(count, 0)) + group * ROWS * ROW_BYTES, 0, EIGHT_ROWS);
        const u64 keys = tile_desc(shared + KEYS_AT + keys_turn.slot * KEY_BYTES, 0, EIGHT_ROWS);
        wgmma_fence();
        UNROLL
        for (u32 i = 0; i < WIDTH / 16; i++) {
            const u32 block = i / (LANES / 16), step = i % (LANES / 16) * 32;
            wgmma_ss<T, KEYS, false, false>(x, desc_behind(rows, block * QUERY_BLOCK_BYTES + step), desc_behind(keys, block * BLOCK_BYTES + step), i != 0);
        }
        wgmma_commit();
    };
    auto ask_values = [&] {
        const u64 values = tile_desc(shared + VALUES_AT + values_turn.slot * VALUE_BYTES, BLOCK_BYTES, EIGHT_ROWS);
        wgmma_fence();
        UNROLL
        for (u32 k = 0; k < STEPS; k++) wgmma_rs<T, VALUES, true>(sums, weights[k], desc_behind(values, k * 2 * EIGHT_ROWS), true);
        wgmma_commit();
    };
    auto keys_read = [&] {
        released(&told.keys_read[keys_turn.slot]);
        keys_turn.next();
    };
    // The next tile's scores, then this tile's values; returns with the scores.
    auto ask_both = [&](u32 count) {
        mark_wait(&told.keys[keys_turn.slot], keys_turn.parity);
        ask_scores(count);
        mark_wait(&told.values[values_turn.slot], values_turn.parity);
        ask_values();
        wgmma_wait<1>();
        pin(x);
        keys_read();
    };
    auto values_read = [&] {
        released(&told.values_read[values_turn.slot]);
        values_turn.next();
    };
    auto clear = [&] {
        UNROLL
        for (u32 i = 0; i < VALUES / 2; i++) sums[i] = 0.0f;
    };
    clear();
    const Softmax fresh{{LOWEST, LOWEST}, {0.0f, 0.0f}, {1.0f, 1.0f}};
    Softmax softmax = fresh;
    Reach sight{0, 0};
    // Whether the weights of a unit's first tile were made behind the last one of the unit before.
    bool begun = false;
    NO_UNROLL
    for (u32 count = 0;; count++) {
        const Turn turn = query_turn(count);
        const Unit& unit = told.units[count % 2];
        if (!begun) {
            mark_wait(&told.queries[turn.slot], turn.parity);
            if (warp_any(unit.over)) break;
            softmax = fresh;
        }
        // The same for all threads, as the compiler is to know.
        const u32 begin = shfl_idx(unit.tile(), 0), end = shfl_idx(unit.tiles(), 0);
        if (!begun && begin < end) {
            sight = sight_of(p, unit, first);
            mark_wait(&told.keys[keys_turn.slot], keys_turn.parity);
            ask_scores(count);
            wgmma_wait<0>();
            pin(x);
            keys_read();
            see(p, x, unit, sight, first, begin * KEYS);
            weigh(x, factor, softmax);
            packed(weights, x);
        }
        NO_UNROLL
        for (u32 tile = begin + 1; tile < end; tile++) {
            ask_both(count);
            see(p, x, unit, sight, first, tile * KEYS);
            weigh(x, factor, softmax);
            settle(sums, softmax);
            values_read();
            packed(weights, x);
        }
        begun = false;
        const Unit& other = told.units[(count + 1) % 2];
        if (QUERY_STAGES == 1) {
            released(&told.queries_read[turn.slot]);
        } else if (begin < end) {
            const Turn next = query_turn(count + 1);
            mark_wait(&told.queries[next.slot], next.parity);
            begun = !warp_any(other.over) && shfl_idx(other.tile(), 0) < shfl_idx(other.tiles(), 0);
        }
        const Softmax ended = softmax;
        if (QUERY_STAGES > 1 && begun) {
            // The next unit's first scores and weights under this one's last values.
            ask_both(count + 1);
            softmax = fresh;
            sight = sight_of(p, other, first);
            see(p, x, other, sight, first, other.tile() * KEYS);
            weigh(x, factor, softmax);
            settle(sums, Softmax{{}, {softmax.sums[0], softmax.sums[1]}, {1.0f, 1.0f}});
            values_read();
            packed(weights, x);
        } else if (begin < end) {
            mark_wait(&told.values[values_turn.slot], values_turn.parity);
            ask_values();
            wgmma_wait<0>();
            pin(sums);
            values_read();
        }
        leave(p, unit, opaque(first), ended, sums);
        clear();
        if (QUERY_STAGES > 1) released(&told.queries_read[turn.slot]);
    }
}

MSTAR_KERNEL(tile_wide, AttendBoxes, THREADS, 1) {
    SHARED(shared);
    Told& told = *reinterpret_cast<Told*>(shared + TOLD_AT);
    start(told, CONSUMER_WARPS);
    const u32 group = group_index();
    if (group == CONSUMERS) {
        registers_fewer<PRODUCER>();
        produce(p, shared, told);
    } else {
        registers_more<CONSUMER>();
        consume(p.attend, shared, told, group);
    }
}
