// The end of rows that several items worked for: their states joined along the fixed tree, finished and written.
//
// A merge takes its parts in the order of their leaves, joins a node with its left sibling as soon as both are there, and
// passes nodes without one up as they are (work.rs, cpu/paged/state.rs: Tree). A warp has one query vector and 128 lanes of its
// value, four a thread; waiting nodes are in shared memory.
//
// Defines: Q_TYPE, the output's (0 f32, 1 bf16, 2 f16); LEVELS, most nodes that can wait.
#include "node.cuh"

#if Q_TYPE == 0
typedef float Result;
#elif Q_TYPE == 1
typedef Bf16 Result;
#else
typedef F16 Result;
#endif

// Parts that a warp has on their way at once.
constexpr u32 WARPS = 4, AHEAD = LEVELS <= 4 ? 4 : 8, SLICE = 128;

// Nodes that wait for a sibling, for one warp.
struct Waiting {
    Node nodes[LEVELS][32];
    u32 level[LEVELS][32], index[LEVELS][32];  // each thread's own copy, so that no thread waits for another
};

// Few nodes take little shared memory, and then as many blocks as there are registers for hide each other's loads.
MSTAR_KERNEL(merge, Attend, 128, LEVELS <= 4 ? 7 : 4) {
    SHARED(memory);
    const u32 mine = lane();
    Waiting& waiting = reinterpret_cast<Waiting*>(memory)[warp()];
    const Image* image = p.image;
    const u32 slices = (p.Dv + SLICE - 1) / SLICE, pieces = p.walk;
    const u32 merges = image->merges - (p.tickets ? image->fused : 0);
    for (u32 at = block_x(); at < merges * pieces; at += grid_x()) {
        const Merge merge = merges_of(image)[at / pieces];
        const Row row = rows_of(image)[merge.row];
        const Output out = output_at(p, row, merge.q_begin, merge.q_count, merge.kv_head_begin, DIRECT);
        const Part* parts = parts_of(image) + merge.part_begin;
        const u64 head_at = u64(merge.kv_head_begin) * state_len(out.lanes, p.Dv);
        for (u32 unit = at % pieces * WARPS + warp(); unit < out.lanes * slices; unit += pieces * WARPS) {
            const u32 lane_of = unit / slices, column = unit % slices * SLICE + 4 * mine;
            Node node{-infinity(), 0.0f, Floats{0.0f, 0.0f, 0.0f, 0.0f}};
            u32 depth = 0;
            for (u32 from = 0; from < merge.part_count; from += AHEAD) {
                Node next[AHEAD];
                Part part[AHEAD];
                UNROLL for (u32 i = 0; i < AHEAD; i++) {
                    part[i] = parts[least(from + i, merge.part_count - 1)];
                    Output state = out;
                    state.state = p.partials + part[i].partial + head_at;
                    next[i].m = *state.m(lane_of), next[i].l = *state.l(lane_of);
                    // A state is padded to whole lines, which are multiples of four floats.
                    next[i].acc = column < p.Dv ? floats_at(state.acc(lane_of) + column) : Floats{0.0f, 0.0f, 0.0f, 0.0f};
                }
                UNROLL for (u32 i = 0; i < AHEAD; i++) {
                    if (from + i >= merge.part_count) break;
                    u32 level = part[i].level, index = part[i].index;
                    Node now = next[i];
                    while (index % 2 == 1) {
                        if (depth > 0) {
                            const u32 top = depth - 1;
                            if (waiting.level[top][mine] != level || waiting.index[top][mine] != index - 1) break;
                            now = joined(waiting.nodes[top][mine], now);
                            depth = top;
                        }
                        level += 1, index /= 2;
                    }
                    waiting.nodes[depth][mine] = now;
                    waiting.level[depth][mine] = level, waiting.index[depth][mine] = index;
                    depth += 1;
                }
            }
            if (depth > 0) {
                node = waiting.nodes[depth - 1][mine];
                for (u32 left = depth - 1; left > 0; left--) node = joined(waiting.nodes[left - 1][mine], node);
            }
            float factor = finish(p, out, lane_of, node.m, node.l, mine == 0 && unit % slices == 0);
            Result* to = output_row<Result>(p, out, lane_of) + column;
            float values[4] = {node.acc.x, node.acc.y, node.acc.z, node.acc.w};
            UNROLL for (u32 i = 0; i < 4; i++) {
                if (column + i < p.Dv) to[i] = from_float<Result>(values[i] * factor + 0.0f);
            }
        }
    }
}
