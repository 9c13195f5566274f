// Latent attention over a work list: an item is some query tokens of one row under all heads, over one leaf of its keys.
// Items of more than ROWS query vectors are cut into pieces, which read the same latents.
//
// Defines: those of latent.cuh, and PIECES, those of the largest item (a multiple of those that one token's heads make).

#include "latent.cuh"
#include "finish.cuh"
#include "gather.cuh"

MSTAR_KERNEL(latent_attend, Attend, latent::THREADS, MIN_BLOCKS) {
    SHARED(shared);
    const Image* image = p.image;
    const u32 C = p.Dv, E = p.D - p.Dv;
    const bool aligned = (p.flags & ALIGNED) && C % 8 == 0 && E % 8 == 0, causal = p.flags & CAUSAL;
    const Span span = items_of(p);
    // Pieces that every item has are neighbours, so that the second finds the latents of the first nearby; those that only
    // items of several tokens have come after all of them.
    const u32 sure = (p.H + ROWS - 1) / ROWS, units = (span.end - span.begin) * sure;
    for (u32 at = block_x(); at < units / sure * PIECES; at += grid_x()) {
        const Item item = items_of(image)[span.begin + at % units / sure];
        const Member member = members_of(image)[item.member_begin];
        const Row row = rows_of(image)[member.row];
        const Output output = output_of(p, item, member, row);
        const u32 first = (at / units * sure + at % sure) * ROWS;
        if (first >= output.lanes) continue;
        const Queries queries = queries_of<LATENTS>(p, row, item.q_begin, 0, sizeof(Element));
        const Keys keys = keys_of<LATENTS>(p, member.row, row, 0, sizeof(Element));
        const Reach reach = reach_of(p, row, item);

        // Query `i` of a row is at position kv_len - q_len + i.
        const i64 before = i64(row.kv_len) - i64(row.q_len) + i64(item.q_begin) + 1;
        auto limit = [&](u32 lane) -> u32 {
            return causal ? u32(least(most(before + i64(lane / p.H), i64(0)), i64(reach.hi))) : reach.hi;
        };
        const u32 to = limit(least(first + ROWS, output.lanes) - 1);

        latent::attend(
            shared, C, E, reach.lo, to, p.scale * LOG2_E, aligned,
            [&](u32 r) -> latent::Query {
                u32 lane = first + r;
                if (lane >= output.lanes) return {nullptr, nullptr};
                i64 token = lane / p.H, head = lane % p.H;
                return {reinterpret_cast<const Element*>(queries.at) + token * queries.token + head * queries.head,
                        reinterpret_cast<const Element*>(queries.pe_at) + token * queries.pe_token + head * queries.pe_head};
            },
            [&](u32 r) { return limit(first + r); },
            [&](u32 key) { return reinterpret_cast<const Element*>(key_at<LATENTS>(keys, key).k); },
            [&](u32 r, float top, float sum) -> float {
                u32 lane = first + r;
                if (lane >= output.lanes) return 0.0f;
                if (output.direct()) return finish(p, output, lane, top, sum, true);
                *output.m(lane) = top, *output.l(lane) = sum;
                return 1.0f;
            },
            [&](u32 r, float factor, const float* sums) {
                u32 lane = first + r;
                if (lane >= output.lanes) return;
                if (output.direct()) latent::store_row(output_row<Element>(p, output, lane), sums, factor, C);
                else latent::store_state(output.acc(lane), sums, C);
            });
    }
}
