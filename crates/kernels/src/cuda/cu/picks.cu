// Around attention over picks: counting and ordering each row's picks before it, joining its leaves after it, and all of it with
// plain arithmetic where tensor cores do not serve.
//
// Defines: Q_TYPE and KV_TYPE (0 f32, 1 bf16, 2 f16; of latents also 3, e4m3 under scales).

#include "codes.cuh"
#include "sparse.cuh"
#include "near.cuh"

#if Q_TYPE == 0
typedef float Query;
#elif Q_TYPE == 1
typedef Bf16 Query;
#else
typedef F16 Query;
#endif
#if KV_TYPE == 0
typedef float Stored;
#elif KV_TYPE == 1
typedef Bf16 Stored;
#elif KV_TYPE == 2
typedef F16 Stored;
#else
typedef u8 Stored;
#endif
// Lane `lane` of a latent.
template <class T>
DEVICE float lane_of(const T* latent, u32 lane, u32) {
    return to_float(latent[lane]);
}
DEVICE float lane_of(const u8* latent, u32 lane, u32 C) { return latent_lane(latent, lane, C); }

// Where the arrays of the list lie that rows row_begin..row_end are put as: of every row its picks as pages of one slot.
struct Listed {
    Image* image;
    Task* tasks;
    Row* rows;
    Item* items;
    Member* members;
    i32* pages;
};
DEVICE Listed listed(const Sparse& p, u32 items) {
    const u32 rows = p.row_end - p.row_begin;
    const u32 task_at = sizeof(Image), row_at = task_at + items * u32(sizeof(Task)), item_at = row_at + rows * u32(sizeof(Row));
    const u32 member_at = item_at + (items * u32(sizeof(Item)) + 15) / 16 * 16;
    return Listed{reinterpret_cast<Image*>(p.image), reinterpret_cast<Task*>(p.image + task_at), reinterpret_cast<Row*>(p.image + row_at),
                  reinterpret_cast<Item*>(p.image + item_at), reinterpret_cast<Member*>(p.image + member_at),
                  reinterpret_cast<i32*>(p.image + member_at + u64(items) * sizeof(Member))};
}
// Items of rows first..row: as many of each row of few queries as K picks have, and of others one.
DEVICE u32 items_of(const Sparse& p, u32 first, u32 row) {
    return few_rows(p.table, first, row) * p.leaves + many_rows(p.table, first, row);
}
DEVICE void list_head(const Sparse& p, const Listed& to, u32 items) {
    auto at = [&](const void* array) { return u32(reinterpret_cast<const u8*>(array) - p.image); };
    Image image{};
    image.rows = image.tokens = p.row_end - p.row_begin, image.items = image.few = items, image.lanes = p.H;
    image.row_at = at(to.rows), image.item_at = at(to.items), image.member_at = at(to.members), image.page_at = at(to.pages);
    *to.image = image;
}
// By the first threads of a block. An item without picks has no queries, but for a row's first: a row that picks nothing is one leaf
// without keys.
DEVICE void list_row(const Sparse& p, const Listed& to, u32 row, u32 count) {
    const u32 index = row - p.row_begin, span = span_of(p, row), items = span == ONE_LEAF ? 1 : p.leaves;
    if (thread_x() >= items) return;
    if (thread_x() == 0) to.rows[index] = Row{NO_MASK, 0, row, 1, count, 0, 0, index * p.topk, count, 0, span};
    const bool direct = count <= span;
    const u64 first = direct ? 0 : u64(few_rows(p.table, p.row_begin, row)) * p.leaves;
    for (u32 item = thread_x(); item < items; item += threads()) {
        const bool real = item == 0 || item * span < count;
        const u32 at = items_of(p, p.row_begin, row) + item;
        to.items[at] = Item{0, at, 1, 0, 1, 0, real ? 1u : 0u, item, item + 1};
        Task& task = to.tasks[at];
        task.lo = item * span, task.hi = real ? least(count, (item + 1) * span) : item * span;
        task.page_begin = index * p.topk, task.kv_offset = task.head = task.mask_words = 0;
        task.leaf_keys = span == ONE_LEAF ? ONE_LEAF : p.leaf, task.level = p.level;
        // Its own leaves, and where others follow or come before, some of another item: a state, which lies where `state` says.
        task.leaf_first = item << p.level, task.leaf_end = task.leaf_first + (direct ? 1 : 2 << p.level);
        task.ticket = 0, task.token = row, task.q_begin = 0, task.q_count = real, task.mask_begin = NO_MASK;
        task.state = (first + item) * state_len(p.H, p.C), task.first = i64(count) - 1;
        to.members[at] = Member{direct ? DIRECT : (first + item) * state_len(p.H, p.C), index, 0};
    }
}

// Picks that a thread has at once, which are neighbours, and that a block has.
constexpr u32 ORDER_THREADS = 256, MINE = 8, TOGETHER = ORDER_THREADS * MINE;
struct Mine {
    i32 of[MINE];
};
// This thread's picks from `from` on; what is no pick past the end. They need not wait for the table.
DEVICE Mine mine_of(const Sparse& p, const i32* picks, u32 from) {
    Mine mine;
    const u32 first = from + thread_x() * MINE;
    if (first + MINE <= p.topk && reinterpret_cast<u64>(picks + first) % 16 == 0) {
        UNROLL
        for (u32 i = 0; i < MINE; i += 4) {
            const U4 four = load16(picks + first + i);
            mine.of[i] = i32(four.x), mine.of[i + 1] = i32(four.y), mine.of[i + 2] = i32(four.z), mine.of[i + 3] = i32(four.w);
        }
    } else {
        UNROLL
        for (u32 i = 0; i < MINE; i++) mine.of[i] = first + i < p.topk ? picks[first + i] : -1;
    }
    return mine;
}

// Counts a row's picks, and puts it into the list, if there is one. Picks that are listed in ascending order, then -1, are read where
// they are; others are ranked by counting, which no list that a selection makes needs.
MSTAR_KERNEL(picks_order, Sparse, ORDER_THREADS, 3) {
    SHARED(shared);
    // Sums of warps, two in turn.
    u32(*sums)[ORDER_THREADS / 32] = reinterpret_cast<u32(*)[ORDER_THREADS / 32]>(shared);
    u32 turn = 0;
    for (u32 row = p.row_begin + block_x(); row < p.row_end; row += grid_x()) {
        const i32* picks = p.selection + i64(row) * p.selection_stride;
        const u32 before = thread_x() * MINE;
        Mine mine = mine_of(p, picks, 0);
        i32 last = before > 0 && before <= p.topk ? picks[before - 1] : -1;
        const u32 end = end_row(p), items = p.image ? items_of(p, p.row_begin, end) : 0;
        const i32 request = row < end ? request_of(p.table, row) : -1;
        const Listed to = listed(p, items);
        if (p.image && row == p.row_begin && thread_x() == 0) list_head(p, to, items);
        if (request < 0) continue;
        const Slots slots = slots_of(p.table, request);
        const u32 stored = slots.stored;
        // A pick is never larger than the next, and nothing is picked behind what is none.
        bool ordered = true;
        u32 count = 0;
        for (u32 from = 0; from < p.topk; from += TOGETHER) {
            if (from > 0) mine = mine_of(p, picks, from), last = from + before <= p.topk ? picks[from + before - 1] : -1;
            UNROLL
            for (u32 i = 0; i < MINE; i++) {
                const bool here = u32(mine.of[i]) < stored;
                count += here;
                if (here && (i > 0 || from + before > 0)) ordered &= u32(last) < stored && last <= mine.of[i];
                last = mine.of[i];
            }
        }
        u32 together = warp_add(count);
        if (lane() == 0) sums[turn][warp()] = together;
        const bool sort = block_any(!ordered);
        count = 0;
        UNROLL
        for (u32 w = 0; w < ORDER_THREADS / 32; w++) count += sums[turn][w];
        turn ^= 1;
        if (thread_x() == 0) p.counts[row] = count | (sort ? SORTED : 0);
        if (sort) {
            i32* sorted = p.sorted + u64(row) * p.topk;
            auto picked = [&](u32 at) { return u32(picks[at]) < stored; };
            for (u32 at = thread_x(); at < p.topk; at += ORDER_THREADS) {
                if (!picked(at)) continue;
                u32 rank = 0;
                for (u32 other = 0; other < p.topk; other++)
                    rank += picked(other) && (picks[other] < picks[at] || (picks[other] == picks[at] && other < at));
                sorted[rank] = picks[at];
            }
            block_sync();
            picks = sorted;
        }
        if (!p.image) continue;
        list_row(p, to, row, count);
        i32* pages = to.pages + u64(row - p.row_begin) * p.topk;
        for (u32 from = 0; from < count; from += TOGETHER) {
            if (from > 0 || sort || p.topk > TOGETHER) mine = mine_of(p, picks, from);
            const u32 first = from + before;
            i32 at[MINE];
            UNROLL
            for (u32 i = 0; i < MINE; i++) at[i] = first + i < count ? i32(slot_at(slots, u32(mine.of[i]), p.S, i64(p.apart), 1)) : 0;
            if (first + MINE <= p.topk && p.topk % 4 == 0) {
                UNROLL
                for (u32 i = 0; i < MINE; i += 4)
                    store16(pages + first + i, U4{u32(at[i]), u32(at[i + 1]), u32(at[i + 2]), u32(at[i + 3])});
            } else {
                UNROLL
                for (u32 i = 0; i < MINE; i++)
                    if (first + i < count) pages[first + i] = at[i];
            }
        }
    }
}

// The row of few queries of which so many come before, from row_begin on.
DEVICE u32 few_row(const Sparse& p, u32 before) {
    u32 first = p.row_begin, past = end_row(p);
    while (past - first > 1) {
        const u32 middle = first + (past - first) / 2;
        if (few_rows(p.table, p.row_begin, middle) <= before) first = middle;
        else past = middle;
    }
    return first;
}

template <u32 ACROSS>
DEVICE void merge_rows(const Sparse& p, u64 rows) {
    const u32 slices = (p.C + WARP_COLUMNS<ACROSS> - 1) / WARP_COLUMNS<ACROSS>, span = p.leaf << p.level;
    // Where all rows are of few queries, each is as many rows on.
    const bool all = rows == end_row(p) - p.row_begin;
    NO_UNROLL
    for (u64 unit = u64(block_x()) * 4 + warp(); unit < rows * p.H * slices; unit += u64(grid_x()) * 4) {
        const u32 slice = u32(unit % slices), head = u32(unit / slices % p.H), before = u32(unit / slices / p.H);
        const u32 row = all ? p.row_begin + before : few_row(p, before), count = picks_of(p, row).count;
        if (count <= span) continue;
        const u32 column = slice * WARP_COLUMNS<ACROSS> + lane_column<ACROSS>();
        const float* first = p.partials + u64(before) * p.leaves * state_len(p.H, p.C);
        const u32 there = column < p.C ? column : 0;
        const Node node = join_tree<ACROSS>(0, (count + span - 1) / span, [&](u32 item) {
            const float* state = first + u64(item) * state_len(p.H, p.C);
            return Spot{state + head, state + state_lanes(p.H) + head,
                        state + 2 * state_lanes(p.H) + u64(head) * state_width(p.C) + there};
        });
        const float factor = finish(p, row, head, node.m, node.l, slice == 0 && lane() == 0);
        if (lane_run<ACROSS>() != 0) continue;
        Query* o = reinterpret_cast<Query*>(p.o) + i64(row) * p.o_token + i64(head) * p.o_head + column;
        const float acc[4] = {node.acc.x, node.acc.y, node.acc.z, node.acc.w};
        UNROLL
        for (u32 i = 0; i < 4; i++)
            if (column + i < p.C) o[i] = from_float<Query>(acc[i] * factor + 0.0f);
    }
}

// Joins the items of rows that have several along the tree of their leaves, as merge.cu does, and writes the result. A warp has one head
// of a row and some columns.
MSTAR_KERNEL(picks_merge_few, Sparse, 128, 4) { merge_rows<2>(p, few_rows(p.table, p.row_begin, end_row(p))); }
MSTAR_KERNEL(picks_merge_many, Sparse, 128, 4) { merge_rows<0>(p, few_rows(p.table, p.row_begin, end_row(p))); }

// The same for rows of at most NEAR items.
MSTAR_KERNEL(picks_merge_near, Sparse, 128, 4) {
    const u32 end = end_row(p), rows = few_rows(p.table, p.row_begin, end), slices = (p.C + SLICE - 1) / SLICE, span = p.leaf << p.level;
    const u32 warps = grid_x() * 4, each = least(slices_each(rows * p.H * slices, warps), slices), groups = (slices + each - 1) / each;
    const bool all = rows == end - p.row_begin;
    NO_UNROLL
    for (u32 unit = block_x() * 4 + warp(); unit < rows * p.H * groups; unit += warps) {
        const u32 slice = unit % groups * each, head = unit / groups % p.H, before = unit / groups / p.H;
        const u32 row = all ? p.row_begin + before : few_row(p, before), count = picks_of(p, row).count;
        if (count <= span) continue;
        const float* first = p.partials + u64(before) * p.leaves * state_len(p.H, p.C);
        Query* o = reinterpret_cast<Query*>(p.o) + i64(row) * p.o_token + i64(head) * p.o_head;
        float factor = 0.0f;
        auto spot = [&](u32 item) {
            const float* state = first + u64(item) * state_len(p.H, p.C);
            return Spot{state + head, state + state_lanes(p.H) + head,
                        state + 2 * state_lanes(p.H) + u64(head) * state_width(p.C)};
        };
        auto figures = [&](float m, float l) { factor = finish(p, row, head, m, l, slice == 0 && lane() == 0); };
        auto put = [&](u32 s, const Floats& acc) {
            const u32 column = s * SLICE + 4 * lane();
            if (column < p.C) put_four(o + column, acc, factor, p.C - column);
        };
        join_near(0, (count + span - 1) / span, slice, least(slice + each, slices), p.C, spot, figures, put);
    }
}

constexpr u32 PLAIN_KEYS = 64, PLAIN_COLUMNS = 4;

// A block has one head of a row and 1024 columns of its value, over all picks; a warp a score.
MSTAR_KERNEL(picks_plain, Sparse, 256, 2) {
    SHARED(shared);
    float* scores = reinterpret_cast<float*>(shared);
    const u32 slices = (p.C + 256 * PLAIN_COLUMNS - 1) / (256 * PLAIN_COLUMNS);
    const u64 rows = end_row(p) - p.row_begin;
    const float scale = p.scale * LOG2_E;
    for (u64 unit = block_x(); unit < rows * p.H * slices; unit += grid_x()) {
        const u32 slice = u32(unit % slices), head = u32(unit / slices % p.H), row = p.row_begin + u32(unit / slices / p.H);
        const i32 request = request_of(p.table, row);
        if (request < 0) continue;
        const Picks picks = picks_of(p, row);
        const Slots slots = slots_of(p.table, request);
        const Query* q = reinterpret_cast<const Query*>(p.q) + i64(row) * p.q_token + i64(head) * p.q_head;
        const Query* pe = reinterpret_cast<const Query*>(p.q_pe) + i64(row) * p.pe_token + i64(head) * p.pe_head;
        auto latent = [&](u32 key) {
            return reinterpret_cast<const Stored*>(p.latents) +
                   slot_at(slots, u32(picks.positions[key]), p.S, p.page, p.slot);
        };
        float m = -infinity(), l = 0.0f, acc[PLAIN_COLUMNS] = {0.0f, 0.0f, 0.0f, 0.0f};
        for (u32 from = 0; from < picks.count; from += PLAIN_KEYS) {
            const u32 keys = least(PLAIN_KEYS, picks.count - from);
            block_sync();
            for (u32 key = warp(); key < keys; key += 8) {
                const Stored* k = latent(from + key);
                float sum = 0.0f;
                for (u32 d = lane(); d < p.C; d += 32) sum = fused(to_float(q[d]), lane_of(k, d, p.C), sum);
                for (u32 d = lane(); d < p.E; d += 32) sum = fused(to_float(pe[d]), lane_of(k, p.C + d, p.C), sum);
                UNROLL
                for (u32 by = 16; by > 0; by /= 2) sum += shfl_xor(sum, by);
                if (lane() == 0) scores[key] = sum * scale;
            }
            block_sync();
            float top = m;
            for (u32 key = 0; key < keys; key++) top = scores[key] > top ? scores[key] : top;
            float reference = top == -infinity() ? 0.0f : top, alpha = m == -infinity() ? 1.0f : ex2(m - top);
            m = top, l *= alpha;
            UNROLL
            for (u32 i = 0; i < PLAIN_COLUMNS; i++) acc[i] *= alpha;
            for (u32 key = 0; key < keys; key++) {
                const Stored* k = latent(from + key);
                float weight = ex2(scores[key] - reference);
                l += weight;
                UNROLL
                for (u32 i = 0; i < PLAIN_COLUMNS; i++) {
                    u32 column = (slice * PLAIN_COLUMNS + i) * 256 + thread_x();
                    if (column < p.C) acc[i] = fused(weight, lane_of(k, column, p.C), acc[i]);
                }
            }
        }
        float factor = finish(p, row, head, m, l, slice == 0 && thread_x() == 0);
        Query* o = reinterpret_cast<Query*>(p.o) + i64(row) * p.o_token + i64(head) * p.o_head;
        UNROLL
        for (u32 i = 0; i < PLAIN_COLUMNS; i++) {
            u32 column = (slice * PLAIN_COLUMNS + i) * 256 + thread_x();
            if (column < p.C) o[column] = from_float<Query>(acc[i] * factor + 0.0f);
        }
    }
}
