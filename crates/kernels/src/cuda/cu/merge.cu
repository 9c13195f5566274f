// The end of rows that several items worked for: their states joined along the fixed tree, finished and written.
//
// A merge takes its parts in the order of their leaves, joins a node with its left sibling as soon as both are there, and
// passes nodes without one up as they are (work.rs, cpu/paged/state.rs: Tree). Parts of a list for blocks are neighbours of one height.
//
// Of three kernels the host takes one (exec/merge.rs); bits are the same. Each is small, since what a short merge waits for is its
// instructions: `merge_few` is for few query vectors, `merge_near` for lists whose merges all have parts that near.cuh takes.
//
// Defines: Q_TYPE, the output's (0 f32, 1 bf16, 2 f16).
#include "near.cuh"

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

// How many merges there are, but for those that the decode kernel did.
DEVICE u32 merges_left(const Attend& p) { return p.image->merges - (p.tickets ? p.image->fused : 0); }

// Each merge is cut into `walk` pieces, a block each; eight lanes a node take four times as many.
MSTAR_KERNEL(merge_few, Attend, 128, 4) { merge_all<2>(p, merges_left(p), p.walk * 4); }
MSTAR_KERNEL(merge_many, Attend, 128, 4) { merge_all<0>(p, merges_left(p), p.walk); }

MSTAR_KERNEL(merge_near, Attend, 128, 4) {
    const Image* image = p.image;
    const u32 merges = merges_left(p), slices = (p.Dv + SLICE - 1) / SLICE;
    // A warp has one of `walk` pieces where it takes one slice.
    const u32 each = least(slices_each(merges * p.walk * WARPS, grid_x() * WARPS), slices);
    const u32 groups = (slices + each - 1) / each, pieces = (p.walk + each - 1) / each;
    NO_UNROLL
    for (u32 at = block_x(); at < merges * pieces; at += grid_x()) {
        const Merge merge = merges_of(image)[at / pieces];
        const Row row = rows_of(image)[merge.row];
        const Output out = output_at(p, row, merge.q_begin, merge.q_count, merge.kv_head_begin, DIRECT);
        const Part* parts = parts_of(image) + merge.part_begin;
        const u32 first = merge.part_count ? parts->index : 0;
        const u64 head_at = u64(merge.kv_head_begin) * state_len(out.lanes, p.Dv);
        NO_UNROLL
        for (u32 unit = at % pieces * WARPS + warp(); unit < out.lanes * groups; unit += pieces * WARPS) {
            const u32 lane_of = unit / groups, slice = unit % groups * each, past = least(slice + each, slices);
            Result* to = output_row<Result>(p, out, lane_of);
            float factor = 0.0f;
            auto figures = [&](float m, float l) { factor = finish(p, out, lane_of, m, l, lane() == 0 && slice == 0); };
            auto put = [&](u32 s, const Floats& acc) {
                const u32 column = s * SLICE + 4 * lane();
                if (column < p.Dv) put_four(to + column, acc, factor, p.Dv - column);
            };
            if (merge.part_count == 0) {
                figures(-infinity(), 0.0f);
                NO_UNROLL
                for (u32 s = slice; s < past; s++) put(s, Floats{});
                continue;
            }
            auto spot = [&](u32 i) {
                Output state = out;
                state.state = p.partials + parts[i].partial + head_at;
                return Spot{state.m(lane_of), state.l(lane_of), state.acc(lane_of)};
            };
            join_near(first, merge.part_count, slice, past, p.Dv, spot, figures, put);
        }
    }
}
