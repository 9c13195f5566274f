// Index scores as scores.cu has them, by products of a warpgroup: 64 keys are the rows, all heads the columns.
//
// A block is one group. The tiles of 64 keys of all rows, row after row, are shared among blocks in runs of equal length, and each
// warp brings 16 keys of every tile of the run through a ring of its own, ahead of what is computed and across the ends of rows.
// Keys go from there to registers, e4m3 as f16, which holds each; the row's queries lie in shared memory.
//
// The depth is summed in an order that suits how keys are read, the same for keys and queries (`column_of`). Heads are summed in
// order in registers, and across four lanes at the end. Queries for e4m3 keys become f16 too, each head times a power of two that
// brings its largest number under 2^16; the head's weight takes it back. A score's bits follow from its row's query and weights and
// its key's bytes alone.
//
// Defines: Q_TYPE (1 bf16, 2 f16), KEY_TYPE (Q_TYPE, or 3: e4m3 with a scale a key, at multiples of 4 bytes), DEPTH (Di padded to a
// multiple of 64, at most 256), HEADS, STAGES (tiles of the ring), KEYS_ALIGNED (1: keys start at multiples of 16 bytes and Di is a
// multiple of 8, or KEY_TYPE is 3), MIN_BLOCKS.

#include "hopper.cuh"
#include "scores.cuh"

#if Q_TYPE == 1
typedef Bf16 Query;
#else
typedef F16 Query;
#endif
#if KEY_TYPE == 1
typedef Bf16 Factor;
#else
typedef F16 Factor;
#endif

constexpr u32 THREADS = 128, TILE = 64, WARP_KEYS = 16;
constexpr bool CODES = KEY_TYPE == 3;
// Heads of one product, and products that all heads need.
constexpr u32 N = HEADS > 32 ? 64 : HEADS > 16 ? 32 : HEADS > 8 ? 16 : 8, GROUPS = (HEADS + N - 1) / N;
constexpr u32 STEPS = DEPTH / 16;
// Queries: [group][64 lanes of depth][head] rows of 128 bytes.
constexpr u32 COLUMNS_BYTES = N * 128, GROUP_BYTES = DEPTH / 64 * COLUMNS_BYTES;
constexpr u32 WEIGHTS_AT = GROUPS * GROUP_BYTES, RING_AT = WEIGHTS_AT + GROUPS * N * 4;
// Codes are followed by their scale.
constexpr u32 PITCH = CODES ? DEPTH + 4 : DEPTH * 2, STAGE_BYTES = WARP_KEYS * PITCH;
static_assert(DEPTH % 64 == 0 && STAGE_BYTES % 16 == 0 && RING_AT % 16 == 0, "see above");

// ---- queries ----
struct alignas(8) Four {
    u32 low, high;
};
// Four lanes of a query, of which `room` are there, zeros behind them.
DEVICE Four four_at(const Query* q, u32 room) {
    u32 lanes[4];
    UNROLL
    for (u32 i = 0; i < 4; i++) lanes[i] = i < room ? q[i].bits : 0;
    return Four{lanes[0] | lanes[1] << 16, lanes[2] | lanes[3] << 16};
}
// Which column of the product has the first two of four lanes of depth, by their number; the others are 8 columns on.
DEVICE u32 column_of(u32 four) {
    // Lane t of four reads a quarter of a key's codes, or of other keys 16 bytes of each 64.
    u32 step = CODES ? four % STEPS : four / 8 * 2 + four % 2, t = CODES ? four / STEPS : four % 8 / 2;
    return step * 16 + 2 * t;
}
DEVICE void store_pair(u8* queries, u32 head, u32 column, u32 pair) {
    u32 row = head % N, piece = column % 64 / 8 ^ row % 8;
    u8* at = queries + head / N * GROUP_BYTES + column / 64 * COLUMNS_BYTES + row * 128 + piece * 16 + column % 8 * 2;
    *reinterpret_cast<u32*>(at) = pair;
}
// Of bf16: the magnitude as an integer, that order alike; 0 of what is not finite.
DEVICE u32 finite(u32 bits) { return (bits & 0x7fff) < 0x7f80 ? bits & 0x7fff : 0; }
DEVICE float power_of_two(i32 exponent) { return bits_float(u32(exponent + 127) << 23); }

// Has the queries and weights of a row brought to the second-level cache, by all warps.
DEVICE void near_queries(const Scores& p, u32 row) {
    const Query* queries = reinterpret_cast<const Query*>(p.q) + i64(row) * p.q_token;
    const float* weights = p.weights + i64(row) * p.weight_token;
    NO_UNROLL
    for (u32 at = thread_x(); at < HEADS * (DEPTH / 64); at += THREADS) {
        const u32 head = at / (DEPTH / 64), lane_at = at % (DEPTH / 64) * 64;
        if (lane_at < p.width) prefetch_l2(queries + i64(head) * p.q_head + lane_at);
        if (at % 32 == 0 && at < HEADS) prefetch_l2(weights + at);
    }
}

// The queries and weights of a row, by all warps; heads past the last are zeros.
DEVICE void stage_queries(const Scores& p, u32 row, u8* shared) {
    constexpr u32 EACH = GROUPS * N / 4, MOST = CODES || DEPTH > 128 ? 8 : 16, BATCH = EACH < MOST ? EACH : MOST, FOURS = (DEPTH / 4 + 31) / 32;
    static_assert(EACH % BATCH == 0, "whole batches");
    const u32 w = warp(), l = lane();
    const Query* queries = reinterpret_cast<const Query*>(p.q) + i64(row) * p.q_token;
    const bool whole = (reinterpret_cast<u64>(queries) | u64(p.q_head * 2) | u64(p.width * 2)) % 8 == 0;
    float* weights = reinterpret_cast<float*>(shared + WEIGHTS_AT);
    NO_UNROLL
    for (u32 first = 0; first < EACH; first += BATCH) {
        Four raw[BATCH][FOURS];
        float weight[BATCH];
        UNROLL
        for (u32 b = 0; b < BATCH; b++) {
            const u32 head = (first + b) * 4 + w;
            weight[b] = head < HEADS ? p.weights[i64(row) * p.weight_token + head] : 0.0f;
        }
        // Which of the two it is, is found out once: under a branch of its own each load would be a trip.
        auto ask = [&](auto four) {
            UNROLL
            for (u32 b = 0; b < BATCH; b++) {
                const u32 head = (first + b) * 4 + w;
                UNROLL
                for (u32 i = 0; i < FOURS; i++) {
                    const u32 at = (i * 32 + l) * 4;
                    raw[b][i] = head < HEADS && at < p.width ? four(queries + i64(head) * p.q_head + at, at) : Four{0, 0};
                }
            }
        };
        if (whole) ask([](const Query* q, u32) { return *reinterpret_cast<const Four*>(q); });
        else ask([&](const Query* q, u32 at) { return four_at(q, p.width - at); });
        UNROLL
        for (u32 b = 0; b < BATCH; b++) {
            const u32 head = (first + b) * 4 + w;
            i32 shift = 0;
            if (CODES && Q_TYPE == 1) {
                u32 largest = 0;
                UNROLL
                for (u32 i = 0; i < FOURS; i++)
                    largest = most(most(most(largest, finite(raw[b][i].low)), most(finite(raw[b][i].low >> 16), finite(raw[b][i].high))),
                                   finite(raw[b][i].high >> 16));
                // Numbers under 2^-45 are not brought up all the way.
                shift = least(142 - i32(warp_max(largest) >> 7), 60);
            }
            UNROLL
            for (u32 i = 0; i < FOURS; i++) {
                u32 four = i * 32 + l, low = raw[b][i].low, high = raw[b][i].high;
                if (four >= DEPTH / 4) continue;
                if (CODES && Q_TYPE == 1) {
                    float by = power_of_two(shift);
                    low = pack<F16>(bits_float(low << 16) * by, bits_float(low & 0xffff0000u) * by);
                    high = pack<F16>(bits_float(high << 16) * by, bits_float(high & 0xffff0000u) * by);
                }
                store_pair(shared, head, column_of(four), low);
                store_pair(shared, head, column_of(four) + 8, high);
            }
            if (l == 0) weights[head] = weight[b] * power_of_two(-shift);
        }
    }
}

// ---- keys ----
// 16 bytes of a key from lane `at` on, zeros past its width.
DEVICE U4 piece_of(const u16* key, u32 at, u32 width) {
    u32 words[4];
    UNROLL
    for (u32 i = 0; i < 4; i++) {
        u32 low = at + 2 * i < width ? key[at + 2 * i] : 0, high = at + 2 * i + 1 < width ? key[at + 2 * i + 1] : 0;
        words[i] = low | high << 16;
    }
    return U4{words[0], words[1], words[2], words[3]};
}
// Where a piece of a key of a warp lies, so that four lanes of two keys never meet in a bank.
DEVICE u32 piece_at(u32 key, u32 piece) { return key * PITCH + (piece ^ key % 2 * 4) * 16; }

// A warp's keys of a tile, of which lane l knows where key l % 16 lies, on their way to `to`.
DEVICE void bring_keys(u8* to, u64 at, u32 width) {
    const u32 l = lane(), low = u32(at), high = u32(at >> 32);
    auto base = [&](u32 key) {
        return reinterpret_cast<const u8*>(u64(shfl_idx(low, key)) | u64(shfl_idx(high, key)) << 32);
    };
    if (CODES) {
        // Keys that follow each other in memory as they do here, from a multiple of 16 bytes on, are one run of bytes.
        const u64 first = u64(shfl_idx(low, 0)) | u64(shfl_idx(high, 0)) << 32;
        if (warp_all(width == DEPTH && first % 16 == 0 && at == first + l % WARP_KEYS * PITCH)) {
            const u8* from = reinterpret_cast<const u8*>(first);
            UNROLL
            for (u32 byte = 0; byte < STAGE_BYTES; byte += 512)
                if (byte + 512 <= STAGE_BYTES || byte + l * 16 < STAGE_BYTES) cp_async_16(to + byte + l * 16, from + byte + l * 16, true);
            return;
        }
        UNROLL
        for (u32 key = 0; key < WARP_KEYS; key++) {
            const u8* from = base(key);
            UNROLL
            for (u32 word = l * 4; word < DEPTH; word += 128)
                if (word < width) cp_async_4(to + key * PITCH + word, from + word);
        }
        if (l < WARP_KEYS) cp_async_4(to + l * PITCH + DEPTH, reinterpret_cast<const u8*>(at) + width);
        return;
    }
    constexpr u32 PIECES = DEPTH / 8, COPIES = WARP_KEYS * PIECES / 32;
    if (KEYS_ALIGNED) {
        UNROLL
        for (u32 i = 0; i < COPIES; i++) {
            u32 key = (i * 32 + l) / PIECES, piece = (i * 32 + l) % PIECES;
            bool real = piece * 8 < width;
            cp_async_16(to + piece_at(key, piece), base(key) + (real ? piece * 16 : 0), real);
        }
    } else {
        NO_UNROLL
        for (u32 i = 0; i < COPIES; i++) {
            u32 key = (i * 32 + l) / PIECES, piece = (i * 32 + l) % PIECES;
            store16(to + piece_at(key, piece), piece_of(reinterpret_cast<const u16*>(base(key)), piece * 8, width));
        }
    }
}

// A warp's keys as left operands.
DEVICE void read_keys(u32 (&a)[STEPS][4], const u8* from) {
    const u32 g = lane() / 4, t = lane() % 4;
    if (CODES) {
        UNROLL
        for (u32 step = 0; step < STEPS; step++) {
            u32 at = g * PITCH + (t * STEPS + step) * 4;
            u32 upper = *reinterpret_cast<const u32*>(from + at), lower = *reinterpret_cast<const u32*>(from + at + 8 * PITCH);
            a[step][0] = halves_of_e4m3(u16(upper)), a[step][1] = halves_of_e4m3(u16(lower));
            a[step][2] = halves_of_e4m3(u16(upper >> 16)), a[step][3] = halves_of_e4m3(u16(lower >> 16));
        }
    } else {
        UNROLL
        for (u32 step = 0; step < STEPS; step += 2) {
            U4 upper = load16(from + piece_at(g, step * 2 + t)), lower = load16(from + piece_at(g + 8, step * 2 + t));
            a[step][0] = upper.x, a[step][1] = lower.x, a[step][2] = upper.y, a[step][3] = lower.y;
            a[step + 1][0] = upper.z, a[step + 1][1] = lower.z, a[step + 1][2] = upper.w, a[step + 1][3] = lower.w;
        }
    }
}

// ---- tiles ----
// A tile of a row.
struct Cursor {
    u32 row, tile, seen;
};
DEVICE u32 seen_by(const Scores& p, u32 row) { return u32(least(i64(seen_of(p.table, row)), p.to_stride)); }
DEVICE u32 tiles_of(u32 seen) { return (seen + TILE - 1) / TILE; }
// The tile after one that is not the last of all.
DEVICE void advance(const Scores& p, Cursor& cursor) {
    if (++cursor.tile < tiles_of(cursor.seen)) return;
    cursor.tile = 0;
    do {
        cursor.seen = seen_by(p, ++cursor.row);
    } while (cursor.seen == 0);
}

// This block's run of tiles: where it begins, and how many.
struct Run {
    Cursor first;
    u32 count;
};
DEVICE Run run_of(const Scores& p, u32 end_row) {
    const u32 l = lane();
    // Four rows a lane.
    u32 seen[4], tiles = 0;
    auto read = [&](u32 first) {
        UNROLL
        for (u32 i = 0; i < 4; i++) {
            u32 row = first + l * 4 + i;
            seen[i] = row < end_row ? seen_by(p, row) : 0;
        }
        tiles = tiles_of(seen[0]) + tiles_of(seen[1]) + tiles_of(seen[2]) + tiles_of(seen[3]);
    };
    u64 all = 0;
    for (u32 first = p.row_begin; first < end_row; first += 128) {
        read(first);
        all += warp_add(tiles);
    }
    u64 begin = all * block_x() / grid_x(), end = all * (block_x() + 1) / grid_x();
    Run run{Cursor{0, 0, 0}, u32(end - begin)};
    if (begin == end) return run;
    const bool once = end_row - p.row_begin <= 128;
    for (u32 first = p.row_begin; first < end_row; first += 128) {
        if (!once) read(first);
        u32 through = tiles;
        UNROLL
        for (u32 by = 1; by < 32; by *= 2) {
            u32 below = shfl_up(through, by);
            if (l >= by) through += below;
        }
        u32 together = shfl_idx(through, 31);
        if (begin >= together) {
            begin -= together;
            continue;
        }
        u32 of = lowest_bit(ballot(begin < through)) - 1;
        u32 left = u32(begin) - shfl_idx(through - tiles, of);
        bool found = false;
        UNROLL
        for (u32 i = 0; i < 4; i++) {
            u32 its = shfl_idx(seen[i], of);
            if (!found && left < tiles_of(its)) run.first = Cursor{first + of * 4 + i, left, its}, found = true;
            if (!found) left -= tiles_of(its);
        }
        break;
    }
    return run;
}

MSTAR_KERNEL(scores_wide, Scores, THREADS, MIN_BLOCKS) {
    SHARED(shared);
    // The table's first lines at once, which are read one after the other; its page ids are shared among blocks.
    auto near = [&](u64 line) {
        if (line * 128 < p.table_bytes) prefetch_l2(reinterpret_cast<const u8*>(p.table) + line * 128);
    };
    if (thread_x() < 32) near(thread_x());
    if (p.table_bytes > 4096) near(u64(block_x()) * THREADS + thread_x());
    clear_states(p);
    const u32 w = warp(), l = lane(), g = l / 4, t = l % 4;
    const u32 end_row = least(p.row_end, p.table->rows);
    u8* ring = shared + RING_AT + w * STAGES * STAGE_BYTES;
    if (CODES && p.width < DEPTH) {
        for (u32 at = l * 16; at < STAGES * STAGE_BYTES; at += 512) store16(ring + at, U4{0, 0, 0, 0});
        warp_sync();
    }
    const Run run = run_of(p, end_row);
    Cursor cursor = run.first, ahead = run.first;
    Slots slots{nullptr, 0, 0};
    if (run.count > 0) slots = slots_of(p.table, request_of(p.table, ahead.row));
    // The page of key l % 16 of the warp, and its slot there; past the end it is the last key, whose score is not stored. Asked for
    // long before it is needed.
    struct Place {
        i32 page;
        u32 slot;
    };
    auto ask = [&]() -> Place {
        // A row's first tile is of another row than the one before it.
        if (ahead.tile == 0) slots = slots_of(p.table, request_of(p.table, ahead.row));
        u32 offset = slots.start + least(ahead.tile * TILE + w * WARP_KEYS + l % WARP_KEYS, ahead.seen - 1);
        return Place{slots.pages[offset / p.S], offset % p.S};
    };
    auto place = [&](const Place& of) {
        return reinterpret_cast<u64>(p.keys) + u64(i64(of.page) * p.key_page + i64(of.slot) * p.key_slot);
    };
    Place at[STAGES], next{0, 0};
    UNROLL
    for (u32 stage = 0; stage < STAGES; stage++) {
        at[stage] = Place{0, 0};
        if (stage >= run.count) continue;
        if (stage > 0) advance(p, ahead);
        at[stage] = ask();
    }
    UNROLL
    for (u32 stage = 0; stage < STAGES; stage++) {
        if (stage < run.count) bring_keys(ring + stage * STAGE_BYTES, place(at[stage]), p.width);
        cp_async_commit();
    }
    if (STAGES < run.count) advance(p, ahead), next = ask();

    // What rows have room for past what they see.
    for (u32 row = p.row_begin + block_x(); row < end_row && p.to_width > 0; row += grid_x()) {
        float* out = p.to + i64(row - p.to_row) * p.to_stride;
        for (u32 key = seen_by(p, row) + thread_x(); key < p.to_width; key += THREADS) out[key] = -infinity();
    }

    const u64 queries = tile_desc(shared, 16, 1024);
    const float* weights = reinterpret_cast<const float*>(shared + WEIGHTS_AT);
    u32 slot = 0;
    NO_UNROLL
    for (u32 index = 0; index < run.count; index++) {
        if (index == 0 || cursor.tile == 0) {
            block_sync();
            stage_queries(p, cursor.row, shared);
            async_fence();
            block_sync();
        }
        cp_async_wait<STAGES - 1>();
        warp_sync();
        u8* keys = ring + slot * STAGE_BYTES;
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        u32 a[STEPS][4];
        read_keys(a, keys);
        float scale[2] = {1.0f, 1.0f};
        if (CODES) {
            scale[0] = *reinterpret_cast<const float*>(keys + g * PITCH + DEPTH);
            scale[1] = *reinterpret_cast<const float*>(keys + (g + 8) * PITCH + DEPTH);
        }
        warp_sync();
        if (index + STAGES < run.count) {
            bring_keys(keys, place(next), p.width);
            if (index + STAGES + 1 < run.count) {
                advance(p, ahead), next = ask();
                // The queries of a row to come are asked for while there is time.
                if (ahead.tile == 0) near_queries(p, ahead.row);
            }
        }
        cp_async_commit();

        float total[2] = {0.0f, 0.0f};
        NO_UNROLL
        for (u32 group = 0; group < GROUPS; group++) {
            float d[N / 2];
            wgmma_fence();
            UNROLL
            for (u32 step = 0; step < STEPS; step++) {
                u32 on = group * GROUP_BYTES + step / 4 * COLUMNS_BYTES + step % 4 * 32;
                wgmma_rs<Factor, N, false>(d, a[step], desc_on(queries, on), step != 0);
            }
            wgmma_commit();
            wgmma_wait<0>();
            pin(d);
            UNROLL
            for (u32 eight = 0; eight < N / 8; eight++) {
                const u32 head = group * N + eight * 8 + 2 * t;
                float w0 = weights[head], w1 = weights[head + 1];
                // A head past the last is zeros, which an infinite key would make NaN.
                bool real0 = HEADS % N == 0 || head < HEADS, real1 = HEADS % N == 0 || head + 1 < HEADS;
                UNROLL
                for (u32 half = 0; half < 2; half++) {
                    if (real0) total[half] = fused(w0, relu(d[eight * 4 + 2 * half]), total[half]);
                    if (real1) total[half] = fused(w1, relu(d[eight * 4 + 2 * half + 1]), total[half]);
                }
            }
        }
        float* out = p.to + i64(cursor.row - p.to_row) * p.to_stride;
        UNROLL
        for (u32 half = 0; half < 2; half++) {
            float sum = total[half];
            sum += shfl_xor(sum, 1);
            sum += shfl_xor(sum, 2);
            u32 key = cursor.tile * TILE + w * WARP_KEYS + half * 8 + g;
            if (t == 0 && key < cursor.seen) out[key] = CODES ? sum * scale[half] : sum;
        }
        if (index + 1 < run.count) advance(p, cursor);
    }
    cp_async_wait<0>();
}
