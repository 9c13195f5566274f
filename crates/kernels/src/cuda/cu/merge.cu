// The end of rows that several items worked for: their states joined along the fixed tree, finished and written.
//
// A merge takes its parts in the order of their leaves, joins a node with its left sibling as soon as both are there, and
// passes nodes without one up as they are (work.rs, cpu/paged/state.rs: Tree). Parts of a list for blocks are neighbours of one height.
//
// Defines: Q_TYPE, the output's (0 f32, 1 bf16, 2 f16).
#include "tree.cuh"

#if Q_TYPE == 0
typedef float Result;
#elif Q_TYPE == 1
typedef Bf16 Result;
#else
typedef F16 Result;
#endif

constexpr u32 WARPS = 4;

template <u32 ACROSS>
DEVICE void merge_all(const Attend& p, u32 merges, u32 pieces) {
    const Image* image = p.image;
    const u32 slices = (p.Dv + WARP_COLUMNS<ACROSS> - 1) / WARP_COLUMNS<ACROSS>;
    NO_UNROLL
    for (u32 at = block_x(); at < merges * pieces; at += grid_x()) {
        const Merge merge = merges_of(image)[at / pieces];
        const Row row = rows_of(image)[merge.row];
        const Output out = output_at(p, row, merge.q_begin, merge.q_count, merge.kv_head_begin, DIRECT);
        const Part* parts = parts_of(image) + merge.part_begin;
        const u32 first = merge.part_count ? parts->index : 0;
        const u64 head_at = u64(merge.kv_head_begin) * state_len(out.lanes, p.Dv);
        NO_UNROLL
        for (u32 unit = at % pieces * WARPS + warp(); unit < out.lanes * slices; unit += pieces * WARPS) {
            const u32 lane_of = unit / slices, column = unit % slices * WARP_COLUMNS<ACROSS> + lane_column<ACROSS>();
            Node node{-infinity(), 0.0f, Floats{0.0f, 0.0f, 0.0f, 0.0f}};
            if (merge.part_count) {
                const u32 there = column < p.Dv ? column : 0;
                node = join_tree<ACROSS>(first, merge.part_count, [&](u32 i) {
                    Output state = out;
                    state.state = p.partials + parts[i].partial + head_at;
                    return Spot{state.m(lane_of), state.l(lane_of), state.acc(lane_of) + there};
                });
            }
            const float factor = finish(p, out, lane_of, node.m, node.l, lane() == 0 && unit % slices == 0);
            if (lane_run<ACROSS>() != 0) continue;
            Result* to = output_row<Result>(p, out, lane_of) + column;
            const float values[4] = {node.acc.x, node.acc.y, node.acc.z, node.acc.w};
            UNROLL for (u32 i = 0; i < 4; i++) {
                if (column + i < p.Dv) to[i] = from_float<Result>(values[i] * factor + 0.0f);
            }
        }
    }
}

MSTAR_KERNEL(merge, Attend, 128, 3) {
    const u32 merges = p.image->merges - (p.tickets ? p.image->fused : 0);
    // Each merge is cut into `walk` pieces, a block each; eight lanes a node take four times as many.
    const u64 vectors = u64(merges) * p.walk * WARPS;
    if (vectors < MANY_VECTORS) {
        merge_all<2>(p, merges, p.walk * 4);
    } else {
        merge_all<0>(p, merges, p.walk);
    }
}
