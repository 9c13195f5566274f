// Around attention over picks: counting and ordering each row's picks before it, joining its leaves after it, and all of it with
// plain arithmetic where tensor cores do not serve.
//
// Defines: Q_TYPE and KV_TYPE (0 f32, 1 bf16, 2 f16).

#include "sparse.cuh"

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
#else
typedef F16 Stored;
#endif

// A row as the kernels of work lists read it: its picks as pages of one slot, an item a leaf, whose state lies where `state_of` says.
// Items that are nobody's have no queries. By a whole block.
DEVICE void list_row(const Sparse& p, u32 row) {
    const u32 rows = p.row_end - p.row_begin, index = row - p.row_begin;
    Image* image = reinterpret_cast<Image*>(p.image);
    const u32 items = rows * p.leaves;
    const u32 row_at = sizeof(Image), item_at = row_at + rows * u32(sizeof(Row));
    const u32 member_at = item_at + (items * u32(sizeof(Item)) + 15) / 16 * 16, page_at = member_at + items * u32(sizeof(Member));
    if (index == 0 && thread_x() == 0) {
        Image to{};
        to.rows = to.tokens = rows, to.items = items;
        to.row_at = row_at, to.item_at = item_at, to.member_at = member_at, to.page_at = page_at;
        *image = to;
    }
    const bool there = row < p.table->rows && request_of(p.table, row) >= 0;
    const u32 count = there ? picks_of(p, row).count : 0, leaves = (count + LEAF - 1) / LEAF;
    if (thread_x() == 0) {
        Row to{NO_MASK, 0, row, 1, count, 0, 0, index * p.topk, count, 0, LEAF};
        reinterpret_cast<Row*>(p.image + row_at)[index] = to;
    }
    for (u32 leaf = thread_x(); leaf < p.leaves; leaf += threads()) {
        // A row that picks nothing is one leaf without keys.
        const bool real = there && leaf < most(leaves, 1u);
        const u32 at = index * p.leaves + leaf;
        reinterpret_cast<Item*>(p.image + item_at)[at] = Item{0, at, 1, 0, 1, 0, real ? 1u : 0u, leaf, leaf + 1};
        reinterpret_cast<Member*>(p.image + member_at)[at] = Member{leaves <= 1 ? DIRECT : u64(at) * state_len(p.H, p.C), index, 0};
    }
    if (count == 0) return;
    const Picks picks = picks_of(p, row);
    const Slots slots = slots_of(p.table, request_of(p.table, row));
    i32* pages = reinterpret_cast<i32*>(p.image + page_at) + u64(index) * p.topk;
    for (u32 at = thread_x(); at < count; at += threads()) pages[at] = i32(slot_at(slots, u32(picks.positions[at]), p.S, i64(p.apart), 1));
}

// Counts a row's picks. Those that are listed in ascending order, then -1, are read where they are; others are ranked by
// counting, which no list that a selection makes needs.
MSTAR_KERNEL(picks_order, Sparse, 256, 4) {
    SHARED(shared);
    u32* total = reinterpret_cast<u32*>(shared);
    for (u32 row = p.row_begin + block_x(); row < p.row_end; row += grid_x()) {
        const i32 request = row < p.table->rows ? request_of(p.table, row) : -1;
        if (request < 0) {
            if (p.image) list_row(p, row);
            continue;
        }
        const u32 stored = slots_of(p.table, request).stored;
        const i32* listed = p.selection + i64(row) * p.selection_stride;
        auto picked = [&](u32 at) { return u32(listed[at]) < stored; };
        if (thread_x() == 0) *total = 0;
        block_sync();
        bool ordered = true;
        u32 count = 0;
        for (u32 at = thread_x(); at < p.topk; at += 256) {
            bool here = picked(at);
            count += here;
            if (here && at > 0) ordered &= picked(at - 1) && listed[at - 1] <= listed[at];
        }
        atomic_add(total, count);
        bool sort = block_any(!ordered);
        if (thread_x() == 0) p.counts[row] = *total | (sort ? SORTED : 0);
        if (sort) {
            i32* to = p.sorted + u64(row) * p.topk;
            for (u32 at = thread_x(); at < p.topk; at += 256) {
                if (!picked(at)) continue;
                u32 rank = 0;
                for (u32 other = 0; other < p.topk; other++)
                    rank += picked(other) && (listed[other] < listed[at] || (listed[other] == listed[at] && other < at));
                to[rank] = listed[at];
            }
        }
        block_sync();
        if (p.image) list_row(p, row);
    }
}

// Joins the leaves of rows that have several, from the first on, and writes the result. A warp has one head of a row and 128
// columns, four a lane.
MSTAR_KERNEL(picks_merge, Sparse, 128, 4) {
    const u32 slices = (p.C + 127) / 128;
    const u32 end_row = least(p.row_end, p.table->rows);
    const u64 rows = end_row > p.row_begin ? end_row - p.row_begin : 0;
    for (u64 unit = u64(block_x()) * 4 + warp(); unit < rows * p.H * slices; unit += u64(grid_x()) * 4) {
        const u32 slice = u32(unit % slices), head = u32(unit / slices % p.H), row = p.row_begin + u32(unit / slices / p.H);
        if (request_of(p.table, row) < 0) continue;
        const u32 count = picks_of(p, row).count;
        if (count <= LEAF) continue;
        const u32 column = slice * 128 + lane() * 4;
        float m = -infinity(), l = 0.0f, acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        for (u32 leaf = 0; leaf < (count + LEAF - 1) / LEAF; leaf++) {
            const float* state = state_of(p, row, leaf);
            float right_m = state[head], right_l = state[state_lanes(p.H) + head];
            U4 right{0, 0, 0, 0};
            if (column < p.C) right = load16(state + 2 * state_lanes(p.H) + u64(head) * state_width(p.C) + column);
            float top = right_m > m ? right_m : m, reference = top == -infinity() ? 0.0f : top;
            float left_factor = ex2(m - reference), factor = ex2(right_m - reference);
            m = top, l = l * left_factor + right_l * factor;
            u32 words[4] = {right.x, right.y, right.z, right.w};
            UNROLL
            for (u32 i = 0; i < 4; i++) acc[i] = acc[i] * left_factor + bits_float(words[i]) * factor;
        }
        float factor = finish(p, row, head, m, l, slice == 0 && lane() == 0);
        Query* o = reinterpret_cast<Query*>(p.o) + i64(row) * p.o_token + i64(head) * p.o_head + column;
        UNROLL
        for (u32 i = 0; i < 4; i++)
            if (column + i < p.C) o[i] = from_float<Query>(acc[i] * factor + 0.0f);
    }
}

constexpr u32 PLAIN_KEYS = 64, PLAIN_COLUMNS = 4;

// A block has one head of a row and 1024 columns of its value, over all picks; a warp a score.
MSTAR_KERNEL(picks_plain, Sparse, 256, 2) {
    SHARED(shared);
    float* scores = reinterpret_cast<float*>(shared);
    const u32 slices = (p.C + 256 * PLAIN_COLUMNS - 1) / (256 * PLAIN_COLUMNS);
    const u32 end_row = least(p.row_end, p.table->rows);
    const u64 rows = end_row > p.row_begin ? end_row - p.row_begin : 0;
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
                for (u32 d = lane(); d < p.C; d += 32) sum = fused(to_float(q[d]), to_float(k[d]), sum);
                for (u32 d = lane(); d < p.E; d += 32) sum = fused(to_float(pe[d]), to_float(k[p.C + d]), sum);
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
                    if (column < p.C) acc[i] = fused(weight, to_float(k[column]), acc[i]);
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
