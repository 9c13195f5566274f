// Attention over latents in e4m3 on a Hopper: 64 query vectors a block, by four warpgroups, each of which works on a tile of its own turn.
//
//   scores     products of queries and a tile, softmax; weights take the room of the tile's rotary lanes, which nobody needs any more
//   values     two groups, each half of the result's columns
//   producer   makes tiles of bf16 out of codes, which is exact, and lays the block's queries out
//
// Scales never meet codes: a score is what the rotary lanes give, and then, for each 128 lanes, their product times their scale, in f32;
// a weight is times its key's scale before it is rounded for a product, once for each 128 columns. What that rounding adds to the sum of
// a row's weights is summed as well, and the result is divided by what was in fact added up: a row that one key decides would have that
// key's scale rounded in every lane alike.
//
// Defines: DEPTH, 512 or 576: lanes of a latent, padded to a multiple of 64; PIECES of the largest item, a multiple of those that
// one token's heads make. Queries are bf16.
#include "codes.cuh"

typedef Bf16 Element;
constexpr u32 ROWS = 64, STAGES = 2;
#include "latent_softmax.cuh"

constexpr u32 THREADS = 4 * GROUP;
// Registers of a thread, of which a block has 128 each when it begins: groups that ask for more in all wait for ever.
constexpr u32 PRODUCER = 72, SCORER = 104, ADDER = 168;
static_assert(PRODUCER + SCORER + 2 * ADDER <= 4 * 128, "see above");
constexpr u32 WIDTH = 512, SCALES = WIDTH / LATENT_GROUP;
constexpr u32 COLUMNS = DEPTH / LANES, ROPE_STEPS = (DEPTH - WIDTH) / 16;
// From the first lane under a scale to the rotary ones, which every tile has room for.
constexpr u32 ROPE_AT = WIDTH / LANES * BLOCK_BYTES, TILE_BYTES = ROPE_AT + BLOCK_BYTES;
static_assert(DEPTH == 512 || DEPTH == 576, "see above");

struct alignas(8) Scale {
    float of, inverse;  // the latter 0 where it, or a rounding times it, might be none
};
constexpr u32 RING_AT = COLUMNS * BLOCK_BYTES;
// Of each tile of the ring, SCALES rows of a scale a key, and what former sums of a row shrink by.
constexpr u32 SCALES_AT = RING_AT + STAGES * TILE_BYTES;
constexpr u32 FACTORS_AT = SCALES_AT + STAGES * SCALES * KEYS * sizeof(Scale);
// Of two units in turn: what a row's sums are multiplied by, and its sum of weights.
constexpr u32 ENDS_AT = FACTORS_AT + STAGES * ROWS * 4;
constexpr u32 TOLD_AT = ENDS_AT + 2 * 2 * ROWS * 4;

// What groups of a block tell each other: marks of the ring's tiles, of their weights, and that their room is free; of a unit and its
// queries, and the unit, two in turn; of what ends a unit. Every thread arrives.
struct Told {
    Mark full[STAGES], weighed[STAGES], empty[STAGES], queries, queries_read, ended[2];
    Unit units[2];
};
constexpr u32 SHARED_BYTES = TOLD_AT + sizeof(Told);
static_assert(sizeof(Told) == 336, "as in exec/latents.rs");
static_assert(SHARED_BYTES <= 232448, "what a block of a Hopper has");

DEVICE Scale* scales_of(u8* shared, u32 slot, u32 group) {
    return reinterpret_cast<Scale*>(shared + SCALES_AT) + (slot * SCALES + group) * KEYS;
}
DEVICE float* factors_of(u8* shared, u32 slot) { return reinterpret_cast<float*>(shared + FACTORS_AT) + slot * ROWS; }
DEVICE float* ends_of(u8* shared, u32 turn) { return reinterpret_cast<float*>(shared + ENDS_AT) + turn % 2 * 2 * ROWS; }
DEVICE Scale scale_with(u32 bits) {
    const u32 exponent = bits >> 23 & 0xff;
    const float of = bits_float(bits);
    return Scale{of, exponent > 26 && exponent < 253 ? reciprocal(of) : 0.0f};
}

// ---- producer ----

DEVICE U4 words_at(const u8* from) { return U4{word_at(from), word_at(from + 4), word_at(from + 8), word_at(from + 12)}; }

// Eight threads have a row of a tile, and every sixteenth row.
constexpr u32 TIMES = KEYS / (GROUP / PIECE), CHUNKS = WIDTH / 16 / PIECE;
// What a thread has of a row: each eighth 16 codes of it, eight rotary lanes, and of the first threads a scale.
struct Share {
    U4 codes[CHUNKS], rope;
    u32 scale;
};
// Where a row's bytes lie; null for rows of zeros.
struct Latent {
    const u8* at;
    bool aligned, rope;

    U4 load(u32 offset) const {
        const u8* from = at + offset + thread_x() % PIECE * 16;
        return !at ? U4{0, 0, 0, 0} : aligned ? load16(from) : words_at(from);
    }
    U4 codes(u32 chunk) const { return load(chunk * PIECE * 16); }
    U4 lanes() const { return rope ? load(WIDTH + 4 * SCALES) : U4{0, 0, 0, 0}; }
    u32 scale() const {
        const u8* from = at + WIDTH + 4 * (thread_x() % SCALES);
        return !at ? 0 : aligned ? *reinterpret_cast<const u32*>(from) : word_at(from);
    }
};
// Rows of a unit's tiles, in the order in which a thread takes them. Page ids are asked for six rows before they are needed, a
// row's bytes to come near three, and the bytes themselves one.
constexpr u32 FAR = 6, NEAR = 3;
struct Ahead {
    i32 ids[FAR];  // pages of the rows after the one in hand; -1: not seen
    u32 key;       // of the one in hand

    void find(const Keys& keys, const Unit& unit, u32 after) {
        const u32 of = key + after * (KEYS / TIMES), offset = of - keys.kv_offset;
        ids[after - 1] = -1;
        if (of >= unit.lo && of < unit.to) ids[after - 1] = keys.pages[keys.S == 1 ? offset : offset / keys.S];
    }
    // Where the row so many after the one in hand lies.
    const u8* at(const Keys& keys, u32 after) const {
        const u32 offset = key + after * (KEYS / TIMES) - keys.kv_offset, slot = keys.S == 1 ? 0 : offset % keys.S;
        const u64 place = keys.k + u64(i64(ids[after - 1]) * keys.k_page + i64(slot) * keys.k_slot);
        return ids[after - 1] < 0 ? nullptr : reinterpret_cast<const u8*>(place);
    }
    void ask(const Keys& keys, u32 after) const {
        const u32 piece = thread_x() % PIECE, line = piece < 5 ? piece * 128 : WIDTH + SCALES * 4 + 2 * (DEPTH - WIDTH) - 1;
        const u8* latent = at(keys, after);
        if (latent && piece < 6) prefetch_l2(latent + line);
    }
    void next(const Keys& keys, const Unit& unit) {
        UNROLL
        for (u32 i = 0; i + 1 < FAR; i++) ids[i] = ids[i + 1];
        key += KEYS / TIMES;
        find(keys, unit, FAR);
        ask(keys, NEAR);
    }
};
// Lays a share into row `row` of a tile, and its scales beside; what has been laid gives its registers to what `next` has in its place.
DEVICE void lay(u8* tile, Scale* scales, u32 row, Share& share, const Latent& next) {
    const u32 piece = thread_x() % PIECE;
    u8* to = tile + row * LANES * 2;
    UNROLL
    for (u32 j = 0; j < CHUNKS; j++) {
        // 16 codes are two pieces, of which half of the threads write the second one first: none meets another in a bank.
        const u32 chunk = j * PIECE + piece, turned = piece / 4, at = chunk % 4 * 2;
        const Widened wide = widened(share.codes[j], turned);
        share.codes[j] = next.codes(j);
        u8* block = to + chunk / 4 * BLOCK_BYTES;
        store16(block + ((at + turned) ^ (row % 8)) * 16, wide.first);
        store16(block + ((at + 1 - turned) ^ (row % 8)) * 16, wide.second);
    }
    if (ROPE_STEPS > 0) store16(to + WIDTH / LANES * BLOCK_BYTES + (piece ^ (row % 8)) * 16, share.rope);
    share.rope = next.lanes();
    if (piece < SCALES) scales[piece * KEYS + row] = scale_with(share.scale);
    share.scale = next.scale();
}

DEVICE void produce(const Attend& p, u8* shared, Told& told) {
    const u32 thread = thread_x() % GROUP, D = p.D, E = D - WIDTH;
    const bool aligned = p.flags & ALIGNED;
    const u32 row = thread / PIECE, piece = thread % PIECE;
    const bool rope = ROPE_STEPS > 0 && piece * PIECE < E;
    Turn turn{0, 0};
    u32 count = 0;
    auto tell = [&](const Unit& unit) {
        mark_wait(&told.queries_read, count % 2 ^ 1);
        // Copies arrive by themselves, which says nothing of what was stored: that has an arrival of its own.
        if (thread == 0) {
            told.units[count % 2] = unit;
            mark_arrive(&told.queries);
        }
    };
    auto fetch_queries = [&](const Unit& unit) {
        const Queries queries = queries_of<LATENTS>(p, unit.row, unit.q_begin, 0, sizeof(Element));
        NO_UNROLL
        for (u32 i = 0; i < TIMES; i++) {
            const u32 row_of = row + i * (ROWS / TIMES), lane = unit.first + row_of;
            const Element *nope = nullptr, *pe = nullptr;
            if (lane < unit.output.lanes) {
                const i64 token = lane / p.H, head = lane % p.H;
                nope = reinterpret_cast<const Element*>(queries.at) + token * queries.token + head * queries.head;
                pe = reinterpret_cast<const Element*>(queries.pe_at) + token * queries.pe_token + head * queries.pe_head;
            }
            u8* to = shared + row_of * LANES * 2 + (piece ^ (row_of % 8)) * 16;
            UNROLL
            for (u32 block = 0; block < COLUMNS; block++) {
                // What may be named where nothing is read.
                if (aligned && !nope) cp_async_16(to + block * BLOCK_BYTES, reinterpret_cast<const void*>(p.q.at), false);
                else put(to + block * BLOCK_BYTES, nope, pe, block * LANES + piece * PIECE, WIDTH, D, aligned);
            }
        }
    };
    walk(p, [&](const Unit& unit) {
        const Keys keys = keys_of<LATENTS>(p, unit.row_index, unit.row, 0, 1);
        const u32 begin = unit.tile(), end = unit.tiles();
        // In hand is the row before the first.
        Ahead ahead;
        ahead.key = begin * KEYS + row - KEYS / TIMES;
        UNROLL
        for (u32 i = 1; i <= FAR; i++) ahead.find(keys, unit, i);
        UNROLL
        for (u32 i = 1; i <= NEAR; i++) ahead.ask(keys, i);
        const Latent first{ahead.at(keys, 1), aligned, rope};
        Share share{};
        UNROLL
        for (u32 j = 0; j < CHUNKS; j++) share.codes[j] = first.codes(j);
        share.rope = first.lanes(), share.scale = first.scale();
        // The first tile goes ahead: the queries' place is free later than a tile's.
        u32 tile = begin;
        NO_UNROLL
        do {
            if (tile < end) {
                u8* to = shared + RING_AT + turn.slot * TILE_BYTES;
                Scale* scales = scales_of(shared, turn.slot, 0);
                mark_wait(&told.empty[turn.slot], turn.parity ^ 1);
                NO_UNROLL
                for (u32 i = 0; i < TIMES; i++) {
                    ahead.next(keys, unit);
                    lay(to, scales, row + i * (KEYS / TIMES), share, Latent{ahead.at(keys, 1), aligned, rope});
                }
                async_fence();
                mark_arrive(&told.full[turn.slot]);
                turn.next();
            }
            if (tile == begin) {
                tell(unit);
                if (begin < end) fetch_queries(unit);
                announce(&told.queries, aligned);
                count += 1;
            }
            tile += 1;
        } while (tile < end);
    });
    Unit last{};
    last.over = true;
    tell(last);
    announce(&told.queries, aligned);
    cp_async_commit();
    cp_async_wait<0>();
}

// ---- consumers ----

// The barrier of the group that makes weights.
constexpr u32 SCORERS = 1;

// Calls `each(unit, count)` for what the producer tells of; in the order in which it does.
template <class Each>
DEVICE void each_unit(Told& told, Each each) {
    NO_UNROLL
    for (u32 count = 0;; count++) {
        mark_wait(&told.queries, count % 2);
        const Unit& unit = told.units[count % 2];
        if (unit.over) break;
        each(unit, count);
    }
}
// Of the tiles that a block has had, which one's turn it is in the ring.
DEVICE Turn turn_of(u32 tiles) { return Turn{tiles % STAGES, tiles / STAGES % 2}; }

// A descriptor of whose lower word the compiler knows nothing.
DEVICE u64 again(u64 desc) { return (desc & ~0xffffffffull) | opaque(u32(desc)); }

// Asks for the scores of STEPS times 16 lanes.
template <u32 STEPS>
DEVICE void multiply(float (&sums)[KEYS / 2], u64 queries, u64 keys) {
    // Steps' places are computed from here again, rather than kept over a tile.
    queries = again(queries), keys = again(keys);
    UNROLL
    for (u32 step = 0; step < STEPS; step++) {
        const u32 bytes = step / 4 * BLOCK_BYTES + step % 4 * 32;
        wgmma_ss<Element, KEYS, false, false>(sums, after(queries, bytes), after(keys, bytes), step != 0);
    }
    wgmma_commit();
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

// Writes half of a block's results, or of its unfinished state.
DEVICE void store(const Attend& p, const Unit& unit, const Sums& sums, u32 half, const float (&factors)[2][2]) {
    UNROLL
    for (u32 r = 0; r < 2; r++) {
        const u32 lane_of = unit.first + my_row() + 8 * r;
        if (lane_of >= unit.output.lanes) continue;
        const u32 first_column = half * (WIDTH / 2) + lane() % 4 * 2;
        float* state = unit.output.direct() ? nullptr : unit.output.acc(lane_of);
        Element* to = unit.output.direct() ? output_row<Element>(p, unit.output, lane_of) : nullptr;
        const bool pairs = reinterpret_cast<u64>(to) % 4 == 0;
        UNROLL
        for (u32 part = 0; part < 2; part++)
            UNROLL
            for (u32 j = 0; j < LATENT_GROUP / 8; j++) {
                const u32 column = first_column + part * LATENT_GROUP + 8 * j;
                const float a = sums.of[part][4 * j + 2 * r] * factors[part][r], b = sums.of[part][4 * j + 2 * r + 1] * factors[part][r];
                if (state) {
                    *reinterpret_cast<Two*>(state + column) = Two{a, b};
                    continue;
                }
                // -0 becomes 0: whether a hidden key was skipped or weighed 0 must not show.
                const u32 word = pack<Element>(a + 0.0f, b + 0.0f);
                if (pairs) *reinterpret_cast<u32*>(to + column) = word;
                else to[column].bits = u16(word), to[column + 1].bits = u16(word >> 16);
            }
    }
}

DEVICE void weigh_tiles(const Attend& p, u8* shared, Told& told) {
    u32 tiles = 0;
    each_unit(told, [&](const Unit& unit, u32 count) {
        // Queries were copied; of tiles the producer says so itself.
        async_fence();
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
            // Products of the lanes under one scale, and of what has been scaled; the groups that add values have the tensor cores meanwhile.
            float scores[KEYS / 2], part[KEYS / 2];
            wgmma_fence();
            if (ROPE_STEPS > 0) {
                multiply<(ROPE_STEPS > 0 ? ROPE_STEPS : 1)>(scores, after(queries, ROPE_AT), after(keys, ROPE_AT));
            } else {
                UNROLL
                for (u32 i = 0; i < KEYS / 2; i++) scores[i] = 0.0f;
            }
            UNROLL
            for (u32 group = 0; group < SCALES; group++) {
                const u32 before = group * (LATENT_GROUP / LANES) * BLOCK_BYTES;
                wgmma_fence();
                multiply<LATENT_GROUP / 16>(part, after(queries, before), after(keys, before));
                wgmma_wait<0>();
                if (group == 0) pin(scores);
                pin(part);
                const Scale* scales = scales_of(shared, turn.slot, group) + 2 * t;
                UNROLL
                for (u32 j = 0; j < KEYS / 8; j++) {
                    const U4 two = load16(scales + 8 * j);
                    UNROLL
                    for (u32 i = 0; i < 4; i++)
                        scores[4 * j + i] = fused(part[4 * j + i], bits_float(i % 2 ? two.z : two.x), scores[4 * j + i]);
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
            weigh(scores, step, top, sum, alpha);
            // Weights go, as f16, where the rotary lanes were, which all warps have read by here. This lane has a row of each pair of 8 x 8
            // matrices; pieces are turned by the row.
            named_sync(SCORERS, GROUP);
            const u32 weight_row = thread % GROUP / 32 * 16 + thread % 16;
            u8* weights = latents + ROPE_AT + weight_row * LANES * 2;
            UNROLL
            for (u32 k = 0; k < KEYS / 16; k++) {
                u32 packed[4];
                UNROLL
                for (u32 i = 0; i < 4; i++) packed[i] = pack<F16>(scores[8 * k + 2 * i], scores[8 * k + 2 * i + 1]);
                stmatrix_x4(weights + ((2 * k + thread % 32 / 16) ^ (weight_row % 8)) * 16, packed);
            }
            float* factors = factors_of(shared, turn.slot) + row;
            if (t == 0) factors[0] = alpha[0], factors[8] = alpha[1];
            mark_arrive(&told.weighed[turn.slot]);
        }
        if (begin >= end) mark_arrive(&told.queries_read);
        float factor[2];
        conclude(p, unit, top, sum, factor);
        float* ends = ends_of(shared, count) + my_row();
        if (lane() % 4 == 0) ends[0] = factor[0], ends[8] = factor[1], ends[ROWS] = sum[0], ends[ROWS + 8] = sum[1];
        mark_arrive(&told.ended[count % 2]);
    });
}

DEVICE void add_tiles(const Attend& p, u8* shared, Told& told, u32 half) {
    u32 tiles = 0;
    each_unit(told, [&](const Unit& unit, u32 count) {
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
            const u8* weights = latents + ROPE_AT + weight_row * LANES * 2;
            const Scale* scales = scales_of(shared, turn.slot, 2 * half) + thread % 4 * 2;
            const u64 values = tile_desc(latents + half * (WIDTH / 2 / LANES) * BLOCK_BYTES, BLOCK_BYTES, EIGHT_ROWS);
            mark_wait(&told.weighed[turn.slot], turn.parity);
            const float* factors = factors_of(shared, turn.slot) + row;
            out.scale(factors[0], factors[8]);
            pin(out.of[0]), pin(out.of[1]);
            UNROLL
            for (u32 k = 0; k < KEYS / 16; k++) {
                u32 packed[4];
                ldmatrix_x4(packed, weights + ((2 * k + thread % 32 / 16) ^ (weight_row % 8)) * 16);
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
    if (thread_x() == 0) {
        UNROLL
        for (u32 slot = 0; slot < STAGES; slot++) {
            mark_init(&told.full[slot], GROUP);
            mark_init(&told.weighed[slot], GROUP);
            mark_init(&told.empty[slot], 2 * GROUP);
        }
        mark_init(&told.queries, GROUP + 1);
        mark_init(&told.queries_read, 3 * GROUP);
        mark_init(&told.ended[0], GROUP);
        mark_init(&told.ended[1], GROUP);
        marks_ready();
    }
    block_sync();
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
