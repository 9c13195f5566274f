// Attention over the latents that each row picked, in ascending order of position: bits depend on what was picked, never on the
// order in which it was listed. A block has up to ROWS heads of a row over one leaf of its picks; a row of several leaves leaves
// states, which picks.cu joins.
//
// Defines: those of latent.cuh, and PIECES, those that H heads are cut into.

#include "latent.cuh"
#include "sparse.cuh"

MSTAR_KERNEL(sparse_attend, Sparse, latent::THREADS, MIN_BLOCKS) {
    SHARED(shared);
    const u32 rows = end_row(p) - p.row_begin;
    const Element* latents = reinterpret_cast<const Element*>(p.latents);
    // Pieces of a leaf are neighbours, so that the second finds the latents of the first nearby.
    for (u64 unit = block_x(); unit < u64(rows) * p.leaves * PIECES; unit += grid_x()) {
        const u32 first = u32(unit % PIECES) * ROWS, leaf = u32(unit / PIECES % p.leaves);
        const u32 row = p.row_begin + u32(unit / PIECES / p.leaves);
        const i32 request = request_of(p.table, row);
        if (request < 0) continue;
        const Picks picks = picks_of(p, row);
        const u32 leaf_picks = span_of(p, row), from = leaf * leaf_picks, to = least(from + leaf_picks, picks.count);
        // A row that picks nothing is one leaf without keys.
        if (leaf > 0 && (from >= picks.count || leaf_picks == ONE_LEAF)) continue;
        const bool direct = picks.count <= leaf_picks;
        const Slots slots = slots_of(p.table, request);
        float* state = state_of(p, row, leaf);
        latent::attend(
            shared, p.C, p.E, from, to, p.scale * LOG2_E, p.aligned != 0,
            [&](u32 r) -> latent::Query {
                u32 head = first + r;
                if (head >= p.H) return {nullptr, nullptr};
                return {reinterpret_cast<const Element*>(p.q) + i64(row) * p.q_token + i64(head) * p.q_head,
                        reinterpret_cast<const Element*>(p.q_pe) + i64(row) * p.pe_token + i64(head) * p.pe_head};
            },
            [&](u32) { return to; },
            [&](u32 key) { return latents + slot_at(slots, u32(picks.positions[key]), p.S, p.page, p.slot); },
            [&](u32 r, float top, float sum) -> float {
                u32 head = first + r;
                if (head >= p.H) return 0.0f;
                if (direct) return finish(p, row, head, top, sum, true);
                state[head] = top, state[state_lanes(p.H) + head] = sum;
                return 1.0f;
            },
            [&](u32 r, float factor, const float* sums) {
                u32 head = first + r;
                if (head >= p.H) return;
                if (direct) {
                    Element* o = reinterpret_cast<Element*>(p.o) + i64(row) * p.o_token + i64(head) * p.o_head;
                    latent::store_row(o, sums, factor, p.C);
                } else {
                    latent::store_state(state + 2 * state_lanes(p.H) + u64(head) * state_width(p.C), sums, p.C);
                }
            });
    }
}
