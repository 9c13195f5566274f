// Latent attention over a work list on a Hopper: 16 or 32 query vectors a block, by three warpgroups.
//
//   first      scores, softmax, and the left half of the result's columns
//   second     the right half, with weights and factors that the first leaves in shared memory
//   producer   gathers tiles of latents into a ring, and the block's queries
//
// Products are turned round, so that few query vectors pad nothing: scores are keys [64 x depth] times queries, and the result's
// columns are values [64 of the width x keys] times weights. A tile in shared memory is the left operand of both. A thread has, of
// a product, rows (keys, or columns of the result) lane / 4 and 8 below it of its warp's 16, and query vectors 8 j + 2 (lane % 4)
// and the next.
//
// A tile has two parts: the lanes that are its values, and those behind them, which the first product alone reads: of these there is
// one less, and the weights lie where they were. So three tiles fit where a latent has 576 lanes: one that is summed, and two that
// are under way.
//
// With 16 query vectors an item may have several leaves, an aligned run of them: their states are joined here, as a merge would join them.
// Those that wait for a sibling are in registers, and in the workspace where they are of eight leaves or more.
//
// Defines: those of latent_ring.cuh, with ROWS 16 or 32.

#include "latent_ring.cuh"

constexpr u32 THREADS = 3 * GROUP, WARPS = 4;
static_assert(ROWS == 16 || ROWS == 32, "columns of a product");
// Registers of threads, of which a block has 168 each when it begins: groups that ask for more in all wait for ever.
constexpr u32 PRODUCER = 104, CONSUMER = 200;
static_assert(PRODUCER + 2 * CONSUMER <= 3 * 168, "see above");
// Most leaves of an item, as a power of two; paged/family.rs has the same.
constexpr u32 HEIGHT = ROWS == 16 ? 5 : 0;
// Heights whose nodes wait in registers; paged/family.rs has the same.
constexpr u32 AT_HAND = HEIGHT < 3 ? HEIGHT : 3;
// Query vectors that a thread has; blocks of 64 columns of the result, and those of a group.
constexpr u32 MINE = ROWS / 4, PARTS = WIDTH / LANES, HALF = PARTS / 2;
// Blocks of a tile behind its values, and how many tiles have them at once.
constexpr u32 REST = COLUMNS - PARTS, RESTS = STAGES == 2 ? 2 : STAGES - 1;

// Shared memory: queries, values, what is behind them, weights (ROWS rows of 64 keys, two turns) where nothing is, what warps tell each
// other of each query vector, and what the first group tells the second, each in two turns, so that nobody waits for readers.
constexpr u32 VALUE_BYTES = PARTS * BLOCK_BYTES, REST_BYTES = REST * BLOCK_BYTES, WEIGHT_BYTES = ROWS * KEYS * 2;
constexpr u32 REST_AT = RING_AT + STAGES * VALUE_BYTES;
constexpr u32 WEIGHTS_AT = REST_AT + RESTS * REST_BYTES;
constexpr u32 EXCHANGE_AT = WEIGHTS_AT + (REST ? 0 : 2 * WEIGHT_BYTES);
constexpr u32 FACTORS_AT = EXCHANGE_AT + 2 * WARPS * ROWS * 4;
constexpr u32 TOLD_FROM = FACTORS_AT + 2 * 2 * ROWS * 4;

// What a block works on: an item's query vectors from `first` on, which lies where a task has its key head: latents have one.
struct Work {
    Task task;

    u32 first() const { return task.head; }
};
// What groups tell each other: marks of tiles; marks of an item and its queries; what the first hands to the second is there, and may be
// written over, two in turn; and the item, two in turn. But for tiles every thread arrives: what one lane's arrival says of its warp, a
// race checker does not follow.
struct FewTold {
    Mark full[STAGES], empty[STAGES], queries, queries_read, there[2], free[2];
    Work works[2];
};
constexpr u32 SHARED_BYTES = TOLD_FROM + sizeof(FewTold);
static_assert(SHARED_BYTES <= 232448, "what a block of a Hopper has");
static_assert(sizeof(Work) == 80 && TOLD_FROM % 16 == 0, "as in exec/latents.rs");

// The named barrier of the first group.
constexpr u32 TOGETHER = 1;

// What groups find out of an item.
struct Share {
    u32 lo, to;   // keys lo..to are seen by some query vector of the block
    u32 hi, H;
    i64 before;   // keys that token 0 of the item sees under causality
    u32 lanes;    // query vectors of the item
    bool causal;

    // One past the last key that a lane of the item sees.
    u32 limit(u32 lane) const { return causal ? u32(least(most(before + i64(lane / H), i64(0)), i64(hi))) : hi; }
    u32 tile() const { return lo / KEYS; }
    u32 tiles() const { return lo < to ? (to + KEYS - 1) / KEYS : lo / KEYS; }
};

DEVICE Share share_of(const Attend& p, const Work& work) {
    const Task& task = work.task;
    Share share;
    share.lo = task.lo, share.hi = task.hi, share.H = p.H, share.lanes = task.q_count * p.H;
    // Query `i` of a row is at position kv_len - q_len + i.
    share.before = task.first + 1, share.causal = p.flags & CAUSAL;
    share.to = share.lanes ? share.limit(least(work.first() + ROWS, share.lanes) - 1) : task.lo;
    return share;
}
// Where an item's unfinished state goes; null where it writes the results.
DEVICE float* state_of(const Attend& p, const Task& task) {
    if (task.leaf_first >> task.level == (task.leaf_end - 1) >> task.level) return nullptr;
    const u32 leaf = most(task.lo / task.leaf_keys >> task.level << task.level, task.leaf_first);
    return p.partials + task.state + u64(leaf - task.leaf_first) * state_len(task.q_count * p.H, p.Dv);
}

// Calls `each(work, next, settled)` for what this block is to do. A task is read while the one before it is worked on: `next` is what
// comes then once `each` has asked, as it does once, whether it is there.
template <class Each>
DEVICE void walk_tasks(const Attend& p, Each each) {
    const Task* tasks = tasks_of(p.image);
    // The image has room for a task a block: what is read before it is known whether there is one is of no consequence.
    Work next{tasks[block_x()]};
    next.task.head = 0;
    const u32 count = p.image->few, pieces = least((p.image->lanes + ROWS - 1) / ROWS, u32(PIECES));
    // A piece of every item, then those that only items of several tokens have.
    const u32 units = count * pieces;
    u32 at = block_x();
    auto take = [&]() { next.task = tasks[at % count], next.task.head = at / count * ROWS; };
    if (at >= count && at < units) take();
    // Past what is not there: pieces that an item does not have, and items of picks that nobody has.
    auto skip = [&]() {
        NO_UNROLL
        while (at < units && next.first() >= next.task.q_count * p.H) {
            at += grid_x();
            if (at < units) take();
        }
    };
    skip();
    NO_UNROLL
    while (at < units) {
        const Work work = next;
        at += grid_x();
        if (at < units) take();
        each(work, next, [&]() {
            skip();
            return at < units;
        });
    }
}

// ---- producer ----

// Page ids of this thread's latents of a tile: they are asked for a tile before they are needed.
struct Ids {
    i32 page[TIMES];
};
// Where an item's latents are looked up.
struct Book {
    const i32* pages;
    u32 lo, to, kv_offset;
    bool whole;  // a tile lies in one page
};
DEVICE Book book_of(const Attend& p, const Work& work) {
    const Share share = share_of(p, work);
    const Task& task = work.task;
    return Book{pages_of(p.image) + task.page_begin, share.lo, share.to, task.kv_offset,
                p.S % KEYS == 0 && task.kv_offset % KEYS == 0};
}
DEVICE u32 my_key(u32 tile, u32 i) { return tile * KEYS + thread_x() % GROUP / PIECE + i * (KEYS / TIMES); }
DEVICE Ids ids_of(const Attend& p, const Book& book, u32 tile) {
    Ids ids{};
    if (book.whole) {
        i32 page = 0;
        if (tile * KEYS < book.to) page = book.pages[(tile * KEYS - book.kv_offset) / p.S];
        UNROLL
        for (u32 i = 0; i < TIMES; i++) ids.page[i] = page;
        return ids;
    }
    UNROLL
    for (u32 i = 0; i < TIMES; i++) {
        const u32 key = my_key(tile, i);
        if (key >= book.lo && key < book.to) ids.page[i] = book.pages[(key - book.kv_offset) / p.S];
    }
    return ids;
}
// Where they lie; null for keys that nobody sees.
DEVICE Latents places_of(const Attend& p, const Book& book, u32 tile, const Ids& ids) {
    Latents latents;
    latents.somewhere = reinterpret_cast<const Element*>(p.k.at);
    const u32 whole_slot = book.whole ? (tile * KEYS - book.kv_offset) % p.S : 0;
    UNROLL
    for (u32 i = 0; i < TIMES; i++) {
        const u32 key = my_key(tile, i);
        const u32 slot = book.whole ? whole_slot + (key - tile * KEYS) : (key - book.kv_offset) % p.S;
        const bool seen = key >= book.lo && key < book.to;
        const i64 at = i64(ids.page[i]) * p.k.stride[0] + i64(slot) * p.k.stride[1];
        latents.at[i] = seen ? latents.somewhere + at : nullptr;
    }
    return latents;
}
// What a loop that is not unrolled takes from registers.
template <u32 N>
DEVICE const Element* one_of(const Element* const (&of)[N], u32 i) {
    const Element* one = of[0];
    UNROLL
    for (u32 k = 1; k < N; k++)
        if (i == k) one = of[k];
    return one;
}
// This thread's pieces of blocks of a tile, from block BEGIN to END. Each copy is one instruction where a latent is as wide as the tile.
template <u32 BEGIN, u32 END>
DEVICE void fetch_blocks(u8* to, const Latents& latents, u32 D, bool aligned) {
    const u32 piece = thread_x() % PIECE;
    if (aligned && D == COLUMNS * LANES) {
        // Row by row: neighbours in memory are asked for together.
        UNROLL
        for (u32 i = 0; i < TIMES; i++) {
            const bool there = latents.at[i] != nullptr;
            const Element* from = there ? latents.at[i] + piece * PIECE : latents.somewhere;
            UNROLL
            for (u32 block = BEGIN; block < END; block++)
                cp_async_16(to + (block - BEGIN) * BLOCK_BYTES + i * (BLOCK_BYTES / TIMES), from + block * LANES, there);
        }
        return;
    }
    NO_UNROLL
    for (u32 block = BEGIN; block < END; block++)
        NO_UNROLL
        for (u32 i = 0; i < TIMES; i++) {
            const Element* from = one_of(latents.at, i);
            put(to + (block - BEGIN) * BLOCK_BYTES + i * (BLOCK_BYTES / TIMES), from, from, block * LANES + piece * PIECE, D, D, aligned);
        }
}

// Whether rows of blocks share out a group's threads evenly, which `fetch_in_line` takes them to.
constexpr bool IN_LINE = (PARTS & (PARTS - 1)) == 0 && (REST & (REST - 1)) == 0;

// Blocks BEGIN to END of a tile whose latents follow each other in memory, and are as wide as it: neighbours in memory are asked for together,
// each copy being one instruction.
template <u32 BEGIN, u32 END>
DEVICE void fetch_in_line(u8* to, const Element* latents) {
    constexpr u32 BLOCKS = END > BEGIN ? END - BEGIN : 1, AT_ONCE = GROUP / (BLOCKS * PIECE);
    const u32 thread = thread_x() % GROUP, row = thread / (BLOCKS * PIECE), piece = thread % (BLOCKS * PIECE);
    const Element* from = latents + row * (COLUMNS * LANES) + BEGIN * LANES + piece * 8;
    to += piece / PIECE * BLOCK_BYTES + row * LANES * 2;
    UNROLL
    for (u32 k = 0; k < KEYS / AT_ONCE; k++)
        cp_async_16(to + k * AT_ONCE * LANES * 2 + ((piece ^ (row + k * AT_ONCE)) % 8) * 16, from + k * AT_ONCE * (COLUMNS * LANES), true);
}

DEVICE void fetch_queries(const Attend& p, u8* to, const Work& work, bool aligned) {
    const u32 row = thread_x() % GROUP / PIECE, lanes = work.task.q_count * p.H;
    const Element *nope[QUERY_TIMES], *pe[QUERY_TIMES];
    UNROLL
    for (u32 i = 0; i < QUERY_TIMES; i++) {
        const u32 lane_of = work.first() + row + i * (ROWS / QUERY_TIMES);
        nope[i] = pe[i] = nullptr;
        if (lane_of < lanes) {
            const i64 token = i64(work.task.token) + lane_of / p.H, head = lane_of % p.H;
            nope[i] = reinterpret_cast<const Element*>(p.q.at) + token * p.q.stride[0] + head * p.q.stride[1];
            pe[i] = reinterpret_cast<const Element*>(p.q_pe.at) + token * p.q_pe.stride[0] + head * p.q_pe.stride[1];
        }
    }
    put_queries(p, to, nope, pe, aligned);
}

DEVICE void produce_few(const Attend& p, u8* shared, FewTold& told) {
    const u32 thread = thread_x() % GROUP;
    const bool aligned = (p.flags & ALIGNED) && p.Dv % 8 == 0 && p.D % 8 == 0;
    const u32 row = thread / PIECE, at = row * LANES * 2 + (thread % PIECE ^ row % 8) * 16;
    const bool in_line = IN_LINE && aligned && p.D == COLUMNS * LANES && p.k.stride[1] == i64(p.D);
    Turn turn{0, 0};
    u32 count = 0, rest = 0;
    auto tell = [&](const Work& work) {
        mark_wait(&told.queries_read, count % 2 ^ 1);
        // Copies arrive by themselves, which says nothing of what was stored: that has an arrival of its own.
        if (thread == 0) {
            told.works[count % 2] = work;
            mark_arrive(&told.queries);
        }
        count += 1;
    };
    Book book{};
    Ids ids{};
    bool begun = false;
    walk_tasks(p, [&](const Work& work, const Work& next, auto settled) {
        const Share share = share_of(p, work);
        const u32 begin = share.tile(), end = share.tiles();
        if (!begun) book = book_of(p, work), ids = ids_of(p, book, begin);
        Book book_after{};
        u32 tile = begin;
        // The first tile goes ahead: the queries' place is free later than a tile's.
        NO_UNROLL
        do {
            const Ids mine = ids;
            if (tile + 1 < end) {
                ids = ids_of(p, book, tile + 1);
            } else if ((begun = settled())) {
                book_after = book_of(p, next);
                ids = ids_of(p, book_after, book_after.lo / KEYS);
            }
            if (tile < end) {
                mark_wait(&told.empty[turn.slot], turn.parity ^ 1);
                u8 *values = shared + RING_AT + turn.slot * VALUE_BYTES, *behind = shared + REST_AT + rest * REST_BYTES;
                Mark* full = &told.full[turn.slot];
                turn.next();
                rest = rest + 1 == RESTS ? 0 : rest + 1;
                // What lies behind the values, of which there is one less, is free as soon as the next tile's values have room.
                auto await_rest = [&]() {
                    if (RESTS < STAGES) mark_wait(&told.empty[turn.slot], turn.parity ^ 1);
                };
                if (in_line && book.whole && tile * KEYS >= book.lo && tile * KEYS + KEYS <= book.to) {
                    const i64 slot = (tile * KEYS - book.kv_offset) % p.S;
                    const Element* latents = reinterpret_cast<const Element*>(p.k.at) + i64(mine.page[0]) * p.k.stride[0] + slot * p.k.stride[1];
                    fetch_in_line<0, PARTS>(values, latents);
                    if (REST) {
                        await_rest();
                        fetch_in_line<PARTS, COLUMNS>(behind, latents);
                    }
                } else {
                    const Latents latents = places_of(p, book, tile, mine);
                    fetch_blocks<0, PARTS>(values + at, latents, p.D, aligned);
                    if (REST) {
                        await_rest();
                        fetch_blocks<PARTS, COLUMNS>(behind + at, latents, p.D, aligned);
                    }
                }
                announce(full, aligned);
            }
            if (tile == begin) {
                tell(work);
                if (begin < end) fetch_queries(p, shared + at, work, aligned);
                announce(&told.queries, aligned);
            }
            tile += 1;
        } while (tile < end);
        book = book_after;
    });
    Work last{};
    tell(last);
    announce(&told.queries, aligned);
    cp_async_commit();
    cp_async_wait<0>();
}

// ---- consumers ----

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

// What a thread has of an unfinished state: sums over its group's values, and of each query vector the largest score and the sum of
// weights.
struct State {
    float out[HALF][ROWS / 2], top[MINE], sum[MINE];

    void clear() {
        UNROLL
        for (u32 part = 0; part < HALF; part++)
            UNROLL
            for (u32 i = 0; i < ROWS / 2; i++) out[part][i] = 0.0f;
        UNROLL
        for (u32 c = 0; c < MINE; c++) top[c] = -infinity(), sum[c] = 0.0f;
    }
    void scale(const float (&factors)[MINE]) {
        bool same = true;
        UNROLL
        for (u32 c = 0; c < MINE; c++) same = same && factors[c] == 1.0f;
        // Only multiplications by 1 are left out.
        if (warp_all(same)) return;
        UNROLL
        for (u32 part = 0; part < HALF; part++)
            UNROLL
            for (u32 i = 0; i < ROWS / 2; i++) out[part][i] *= factors[i / 4 * 2 + i % 2];
    }
};

// Joins the state of keys to the left; as merge.cu joins nodes.
DEVICE void join_left(State& state, const State& left) {
    float fa[MINE], fb[MINE];
    UNROLL
    for (u32 c = 0; c < MINE; c++) {
        const float top = left.top[c], sum = left.sum[c];
        const bool none = top == -infinity() && sum == sum, all = state.top[c] == -infinity() && state.sum[c] == state.sum[c];
        const float m = most(top, state.top[c]), reference = m == -infinity() ? 0.0f : m;
        // Empty states are identities; one whose sum is NaN is not empty.
        fa[c] = none ? 0.0f : all ? 1.0f : ex2(top - reference);
        fb[c] = all ? 0.0f : none ? 1.0f : ex2(state.top[c] - reference);
        if (all) state.top[c] = top, state.sum[c] = sum;
        else if (!none) state.top[c] = m, state.sum[c] = fused(sum, fa[c], state.sum[c] * fb[c]);
    }
    UNROLL
    for (u32 part = 0; part < HALF; part++)
        UNROLL
        for (u32 i = 0; i < ROWS / 2; i++) {
            const u32 c = i / 4 * 2 + i % 2;
            state.out[part][i] = fused(left.out[part][i], fa[c], state.out[part][i] * fb[c]);
        }
}

// What a thread has of a node of eight leaves or more waits in the workspace, as it is, where the state of the leaf that completes it would
// be and in the one before: only for states of 16 query vectors and whole values, and rows that begin with their first leaf.
DEVICE U4* waiting(const Attend& p, const Task& task, u32 leaf) {
    return reinterpret_cast<U4*>(p.partials + task.state + u64(leaf - 1) * state_len(task.q_count * p.H, p.Dv)) + thread_x();
}
DEVICE void put_node(U4* at, const State& node) {
    UNROLL
    for (u32 i = 0; i < HALF * ROWS / 8; i++) {
        const float* of = &node.out[i / (ROWS / 8)][i % (ROWS / 8) * 4];
        at[(i + 2) * 2 * GROUP] = U4{float_bits(of[0]), float_bits(of[1]), float_bits(of[2]), float_bits(of[3])};
    }
    at[0] = U4{float_bits(node.top[0]), float_bits(node.top[1]), float_bits(node.top[2]), float_bits(node.top[3])};
    at[2 * GROUP] = U4{float_bits(node.sum[0]), float_bits(node.sum[1]), float_bits(node.sum[2]), float_bits(node.sum[3])};
}
DEVICE void take_node(const U4* at, State& node) {
    UNROLL
    for (u32 i = 0; i < HALF * ROWS / 8; i++) {
        float* of = &node.out[i / (ROWS / 8)][i % (ROWS / 8) * 4];
        const U4 v = at[(i + 2) * 2 * GROUP];
        of[0] = bits_float(v.x), of[1] = bits_float(v.y), of[2] = bits_float(v.z), of[3] = bits_float(v.w);
    }
    const U4 top = at[0], sum = at[2 * GROUP];
    node.top[0] = bits_float(top.x), node.top[1] = bits_float(top.y), node.top[2] = bits_float(top.z), node.top[3] = bits_float(top.w);
    node.sum[0] = bits_float(sum.x), node.sum[1] = bits_float(sum.y), node.sum[2] = bits_float(sum.z), node.sum[3] = bits_float(sum.w);
}

// The nodes of an item that wait for a sibling.
struct Tree {
    State left[AT_HAND ? AT_HAND : 1];
    u32 waits;  // a bit a height

    // A leaf's node, joined with those left of it as far as their parents are complete; at the item's end, with all.
    void join(const Attend& p, const Task& task, State& state, u32 leaf, bool last) {
        bool climbs = true;
        UNROLL
        for (i32 k = 0; k < i32(AT_HAND); k++) {
            if (!climbs) continue;
            climbs = last || (leaf >> k & 1);
            if (climbs) {
                if (waits >> k & 1) join_left(state, left[k]);
                waits &= ~(1u << k);
            } else {
                left[k] = state, waits |= 1u << k;
            }
        }
        NO_UNROLL
        for (u32 k = AT_HAND; HEIGHT > AT_HAND && climbs; k++) {
            if (k == HEIGHT) break;
            climbs = last || (leaf >> k & 1);
            if (climbs) {
                if (waits >> k & 1) {
                    take_node(waiting(p, task, (leaf >> k << k) - 1), left[0]);
                    join_left(state, left[0]);
                }
                waits &= ~(1u << k);
            } else {
                put_node(waiting(p, task, leaf), state);
                waits |= 1u << k;
            }
        }
    }
};

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
        join_rows(now, exchange + at.said * WARPS * ROWS, [](float a, float b) { return larger(a, b); });
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
    join_rows(sum, exchange + at.said * WARPS * ROWS, [](float a, float b) { return a + b; });
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
