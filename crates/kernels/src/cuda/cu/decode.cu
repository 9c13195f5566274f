// Few query vectors over pages, of more than decode_few.cu takes, or over codes: keys and values are streamed once for all of a key head's.
//
// Four warps share 64-key tiles at absolute positions. Each loads and sums 16 of a tile's keys (ROWS 16; with 32 or 64 rows,
// two or four warps share 32 or 64 keys and divide the rows) with its own running softmax; at a leaf's end the four are joined
// in fixed order, and leaves along their tree. Tiles come by a ring (decode_ring.cuh).
//
// Keys and values in e4m3 (CODES 1, with queries of bf16) come into the ring as they lie, and each warp makes bf16 of its own once they are
// there, which is exact; their scales meet scores, and weights before these meet values.
//
// Defines: KV_TYPE; CODES; WIDTH, the padded head width; VALUES, the padded value columns of a pass; ROWS 16, 32, 64; STAGES of the
// ring; GENERAL 1 where a soft cap or slopes change scores; RESIDENT blocks an SM.
#include "arrive.cuh"
#include "cap.cuh"
#include "decode_ring.cuh"

constexpr u32 SHARERS = ROWS / 16;        // warps that share a group of keys, 16 rows each
constexpr u32 GROUPS = 4 / SHARERS;       // groups of warps, each with its own keys of a tile
constexpr u32 KEYS = 16 * SHARERS;        // keys of a tile that a group takes
constexpr u32 SLICE = 64;                 // value columns that are joined at a time
constexpr u32 Q_BYTES = ROWS * WIDTH * 2, JOIN_BYTES = 4 * 16 * SLICE * 4;
constexpr bool HELD = WIDTH <= 128;       // queries are held in registers, and lie where states are joined afterwards
constexpr u32 JOIN_AT = HELD ? 0 : Q_BYTES;
constexpr u32 AREA = HELD && Q_BYTES > JOIN_BYTES ? Q_BYTES : JOIN_AT + JOIN_BYTES;
constexpr u32 STEPS = WIDTH / 16, COLUMNS = VALUES / 8, TILES = KEYS / 8;

// What of an item a block is at: some of its query vectors, and some of its value columns.
struct Job {
    u32 index, from, column;
    bool masked;
};

// Waits for the warps that share this warp's keys.
DEVICE void sharers_sync() {
    if (SHARERS == 1) warp_sync();
    else if (SHARERS == 4) block_sync();
    else if (warp() < 2) named_sync(1, 64);
    else named_sync(2, 64);
}

// A row's running softmax: m is a base-2 logit, l is this lane's share.
struct Running {
    float m[2], l[2];
    float o[COLUMNS][4];
};

DEVICE Running empty() {
    Running s;
    s.m[0] = s.m[1] = LOWEST;
    s.l[0] = s.l[1] = 0.0f;
    UNROLL
    for (u32 n = 0; n < COLUMNS; n++) s.o[n][0] = s.o[n][1] = s.o[n][2] = s.o[n][3] = 0.0f;
    return s;
}

// What of a tile the two rows of a lane see, and how their scores become logits.
struct Lanes {
    Reach span[2];
    u32 token[2];  // of the item
    float slope[2];
    u32 whole_lo, whole_hi;  // a tile within is seen whole by every row
};

DEVICE void attend(const Attend& p, const Job& job, const Lanes& lanes, float factor, u8* stage, const float* scales, u8* queries,
                   const u32 (&held)[HELD ? STEPS : 1][4], u32 tile, Running& s) {
    const u32 thread = opaque(thread_x()), l = thread % 32, t = l % 4;
    const u32 rows = 16 * (thread / 32 % SHARERS), first = KEYS * (thread / 32 / SHARERS);
    u8* values = stage + K_BYTES;
    float x[TILES][4];
    UNROLL
    for (u32 n = 0; n < TILES; n++) x[n][0] = x[n][1] = x[n][2] = x[n][3] = 0.0f;
    UNROLL
    for (u32 k = 0; k < STEPS; k++) {
        u32 a[4];
        if (HELD) {
            UNROLL
            for (u32 i = 0; i < 4; i++) a[i] = held[k][i];
        } else {
            load_a<WIDTH>(a, queries, rows, k, l);
        }
        UNROLL
        for (u32 n = 0; n < TILES; n += 2) {
            u32 b[2], c[2];
            load_k<WIDTH>(b, c, stage, first + 8 * n, k, l);
            mma<T>(x[n], a, b);
            mma<T>(x[n + 1], a, c);
        }
    }
    if (CODES) {
        UNROLL
        for (u32 n = 0; n < TILES; n++) {
            UNROLL
            for (u32 i = 0; i < 4; i++) x[n][i] *= scales[first + 8 * n + 2 * t + i % 2];
        }
    }
    u32 base = tile * 64 + first;
    if (GENERAL) {
        const Cap cap = cap_of(p.soft_cap);
        const float scale = p.scale * LOG2_E;
        const i64 first_query = task_of(p, job.index).first;
        UNROLL
        for (u32 n = 0; n < TILES; n++) {
            UNROLL
            for (u32 i = 0; i < 4; i++) {
                float v = x[n][i] * scale;
                if (p.soft_cap > 0.0f) v = capped(cap, v);
                i64 at = first_query + i64(lanes.token[i / 2]);
                float distance = float(i64(base + 8 * n + 2 * t + i % 2) - at);
                x[n][i] = fused(lanes.slope[i / 2] * LOG2_E, distance, v);
            }
        }
    }
    if (job.masked || base < lanes.whole_lo || base + KEYS > lanes.whole_hi) {
        u64 bits[2];
        UNROLL
        for (u32 r = 0; r < 2; r++) {
            bits[r] = range_bits(lanes.span[r].lo, lanes.span[r].hi, tile * 64);
            if (job.masked) bits[r] &= mask_bits(p, task_of(p, job.index), lanes.token[r], tile * 64);
            bits[r] >>= first;
        }
        UNROLL
        for (u32 n = 0; n < TILES; n++) {
            UNROLL
            for (u32 i = 0; i < 4; i++) {
                if (!(bits[i / 2] >> (8 * n + 2 * t + i % 2) & 1)) x[n][i] = -infinity();
            }
        }
    }
    float shrink[2];
    UNROLL
    for (u32 r = 0; r < 2; r++) {
        float top = -infinity();
        UNROLL
        for (u32 n = 0; n < TILES; n++) top = larger(top, larger(x[n][2 * r], x[n][2 * r + 1]));
        shrink[r] = step_of(s.m[r], row_max(top), factor);
        float sum = 0.0f;
        UNROLL
        for (u32 n = 0; n < TILES; n++) {
            UNROLL
            for (u32 i = 2 * r; i < 2 * r + 2; i++) {
                x[n][i] = ex2(fused(x[n][i], factor, -s.m[r]));
                sum += x[n][i];
            }
        }
        s.l[r] = fused(s.l[r], shrink[r], sum);
    }
    // Products with exactly 1 may be left out.
    if (warp_any(shrink[0] != 1.0f || shrink[1] != 1.0f)) {
        UNROLL
        for (u32 n = 0; n < COLUMNS; n++) {
            UNROLL
            for (u32 i = 0; i < 4; i++) s.o[n][i] *= shrink[i / 2];
        }
    }
    if (CODES) {
        UNROLL
        for (u32 n = 0; n < TILES; n++) {
            UNROLL
            for (u32 i = 0; i < 4; i++) x[n][i] *= scales[64 + first + 8 * n + 2 * t + i % 2];
        }
    }
    UNROLL
    for (u32 k = 0; k < KEYS / 16; k++) {
        u32 a[4] = {pack<T>(x[2 * k][0], x[2 * k][1]), pack<T>(x[2 * k][2], x[2 * k][3]),
                    pack<T>(x[2 * k + 1][0], x[2 * k + 1][1]), pack<T>(x[2 * k + 1][2], x[2 * k + 1][3])};
        u32 rest[4] = {};
        UNROLL
        for (u32 i = 0; i < 4 && CODES; i++) rest[i] = rest_of(x[2 * k + i / 2][i % 2 * 2], x[2 * k + i / 2][i % 2 * 2 + 1], a[i]);
        UNROLL
        for (u32 n = 0; n < COLUMNS; n += 2) {
            u32 b[2], c[2];
            load_v<VALUES>(b, c, values, first + 16 * k, n / 2, l);
            mma<T>(s.o[n], a, b);
            mma<T>(s.o[n + 1], a, c);
            if (CODES) mma<T>(s.o[n], rest, b), mma<T>(s.o[n + 1], rest, c);
        }
    }
}

// Where a warp's weighted sum at (row, column) of a slice lies while the four are joined; rows a lane group writes at once are
// in different banks.
DEVICE float* join_at(u8* area, u32 of_warp, u32 row, u32 column) {
    return reinterpret_cast<float*>(area) + (of_warp * 16 + row) * SLICE + (column ^ ((row & 3) << 3));
}

// Where the states lie that an item has no registers for, under its key head: nodes that wait for a sibling, and what it hands on.
DEVICE Output slot_at(const Attend& p, const Output& out, const Task& task, u32 slot) {
    Output state = out;
    States states = states_of(p, task);
    state.state = state_at(states, task.lo / task.leaf_keys + slot);
    return state;
}
DEVICE Node node_at(const Output& state, u32 of, u32 column) {
    return Node{*state.m(of), *state.l(of), floats_at(state.acc(of) + column)};
}

// A leaf's end: joins the groups' states, in the order of their keys, then the `joins` nodes that wait on top of the `depth` there
// are. What comes of it waits too; of the item's last leaf, it is handed on, or finished where it is the row's.
DEVICE void leave(const Attend& p, const Job& job, u32 depth, u32 joins, bool finished, u8* area, float* sums, Running& s) {
    const Task& task = task_of(p, job.index);
    u32 g = lane() / 4, t = lane() % 4, sharer = warp() % SHARERS;
    Output out;
    out.state = nullptr, out.group = p.H / p.G, out.lanes = task.q_count * out.group, out.width = p.Dv;
    out.head_begin = task.head * out.group, out.token_begin = task.token;
    float* most_of = sums;              // [4 warps][16]
    float* sum_of = sums + 64;          // [4 warps][16]
    float* leaf_m = sums + 128;         // [64]
    float* leaf_l = sums + 192;         // [64]
    UNROLL
    for (u32 r = 0; r < 2; r++) {
        s.m[r] = top_of(s.m[r]);
        s.l[r] = row_sum(s.l[r]);
        if (t == 0) {
            most_of[16 * warp() + g + 8 * r] = s.m[r];
            sum_of[16 * warp() + g + 8 * r] = s.l[r];
        }
    }
    block_sync();
    float shrink[2];
    UNROLL
    for (u32 r = 0; r < 2; r++) {
        float m = -infinity();
        UNROLL
        for (u32 w = 0; w < GROUPS; w++) m = larger(m, most_of[16 * (w * SHARERS + sharer) + g + 8 * r]);
        float reference = m == -infinity() ? 0.0f : m;
        shrink[r] = ex2(s.m[r] - reference);
        float part[GROUPS];
        UNROLL
        for (u32 w = 0; w < GROUPS; w++) {
            u32 at = 16 * (w * SHARERS + sharer) + g + 8 * r;
            part[w] = sum_of[at] * ex2(most_of[at] - reference);
        }
        float l = part[0];
        if (GROUPS == 2) l = part[0] + part[GROUPS - 1];
        if (GROUPS == 4) l = (part[0] + part[GROUPS / 4]) + (part[GROUPS / 2] + part[GROUPS - 1]);
        u32 row = 16 * sharer + g + 8 * r;
        if (warp() < SHARERS && t == 0) leaf_m[row] = m, leaf_l[row] = l;
    }
    const u32 live = least(out.lanes - job.from, u32(ROWS)), waiting = depth - joins;
    UNROLL
    for (u32 slice = 0; slice < VALUES / SLICE; slice++) {
        UNROLL
        for (u32 r = 0; r < 2; r++) {
            if (16 * sharer + g + 8 * r >= live) continue;
            UNROLL
            for (u32 n = 0; n < SLICE / 8; n++) {
                float* at = join_at(area, warp(), g + 8 * r, 8 * n + 2 * t);
                at[0] = s.o[slice * (SLICE / 8) + n][2 * r] * shrink[r];
                at[1] = s.o[slice * (SLICE / 8) + n][2 * r + 1] * shrink[r];
            }
        }
        block_sync();
        NO_UNROLL
        for (u32 i = thread_x(); i < live * (SLICE / 4); i += THREADS) {
            u32 row = i / (SLICE / 4), column = i % (SLICE / 4) * 4, of = job.from + row;
            u32 to = job.column + slice * SLICE + column;
            if (to >= p.Dv) continue;
            Floats part[GROUPS];
            UNROLL
            for (u32 w = 0; w < GROUPS; w++) {
                part[w] = floats_at(join_at(area, w * SHARERS + row / 16, row % 16, column));
            }
            Node node{leaf_m[row], leaf_l[row], part[0]};
            if (GROUPS == 2) node.acc = sum_of_two(part[0], part[GROUPS - 1]);
            if (GROUPS == 4) {
                node.acc = sum_of_two(sum_of_two(part[0], part[GROUPS / 4]),
                                      sum_of_two(part[GROUPS / 2], part[GROUPS - 1]));
            }
            NO_UNROLL
            for (u32 left = depth; left > waiting; left--) {
                node = joined(node_at(slot_at(p, out, task, left - 1), of, to), node);
            }
            if (finished) {
                float f = finish(p, out, of, node.m, node.l, to == 0);
                T* at = output_row<T>(p, out, of) + to;
                store_pair(at, node.acc.x * f + 0.0f, node.acc.y * f + 0.0f, to + 1 < p.Dv);
                if (to + 2 < p.Dv) store_pair(at + 2, node.acc.z * f + 0.0f, node.acc.w * f + 0.0f, to + 3 < p.Dv);
            } else {
                U4 v{float_bits(node.acc.x), float_bits(node.acc.y), float_bits(node.acc.z), float_bits(node.acc.w)};
                store16(slot_at(p, out, task, waiting).acc(of) + to, v);
            }
        }
        block_sync();
    }
    if (!finished && thread_x() < live) {
        // All have read the figures of nodes that waited.
        u32 of = job.from + thread_x();
        Node node{leaf_m[thread_x()], leaf_l[thread_x()], Floats{0.0f, 0.0f, 0.0f, 0.0f}};
        NO_UNROLL
        for (u32 left = depth; left > waiting; left--) {
            Output state = slot_at(p, out, task, left - 1);
            node = joined(Node{*state.m(of), *state.l(of), node.acc}, node);
        }
        Output state = slot_at(p, out, task, waiting);
        *state.m(of) = node.m, *state.l(of) = node.l;
    }
}

// Up to 8 query vectors have a leaf's end of their own: a warp has whole rows of what the four make, so that their nodes wait for a
// sibling in its registers, those of the two lowest heights, which come and go most; the others wait in memory.
constexpr bool FEW_ROWS = ROWS == 16 && VALUES <= 128;
constexpr u32 LOW = 2;
struct Tree {
    u32 waiting;        // a bit a height
    u32 turn;           // which half of the area the next leaf takes
    Node low[LOW][2];   // rows warp() and warp() + 4, columns 4 lane()..
};
// Where a warp's weighted sums lie while the four are joined.
DEVICE float* few_at(float* sums, u32 of_warp, u32 height, u32 row, u32 column) {
    return sums + (of_warp * height + row) * VALUES + (column ^ ((row & 3) << 3));
}
DEVICE void leave_few(const Attend& p, const Job& job, u32 leaf, u32 live, bool last, bool finished, u8* area, float* figures,
                      Running& s, Tree& tree) {
    const u32 g = lane() / 4, t = lane() % 4, level = task_of(p, job.index).level, column = 4 * lane();
    // Of 4 rows there are two areas, taken in turns: who is late still reads the other.
    const u32 height = live > 4 ? 8 : 4;
    float* sums = reinterpret_cast<float*>(area) + tree.turn * (4 * 4 * VALUES);
    float* m_of = figures + tree.turn * 64;
    float* l_of = m_of + 32;
    float m = top_of(s.m[0]), l = row_sum(s.l[0]);
    if (g < live) {
        if (t == 0) m_of[8 * warp() + g] = m, l_of[8 * warp() + g] = l;
        UNROLL
        for (u32 n = 0; n < COLUMNS; n++) {
            float* at = few_at(sums, warp(), height, g, 8 * n + 2 * t);
            at[0] = s.o[n][0], at[1] = s.o[n][1];
        }
    }
    block_sync();
    const bool mine = column < VALUES && job.column + column < p.Dv;
    Node node[2];
    UNROLL
    for (u32 r = 0; r < 2; r++) {
        u32 row = warp() + 4 * r;
        node[r] = Node{-infinity(), 0.0f, Floats{0.0f, 0.0f, 0.0f, 0.0f}};
        if (row >= live) continue;
        float top = -infinity();
        UNROLL
        for (u32 w = 0; w < 4; w++) top = larger(top, m_of[8 * w + row]);
        float reference = top == -infinity() ? 0.0f : top, sum[4];
        Floats part[4];
        UNROLL
        for (u32 w = 0; w < 4; w++) {
            float f = ex2(m_of[8 * w + row] - reference);
            sum[w] = l_of[8 * w + row] * f;
            Floats o{0.0f, 0.0f, 0.0f, 0.0f};
            if (column < VALUES) o = floats_at(few_at(sums, w, height, row, column));
            part[w] = Floats{o.x * f, o.y * f, o.z * f, o.w * f};
        }
        node[r] = Node{top, (sum[0] + sum[1]) + (sum[2] + sum[3]),
                       sum_of_two(sum_of_two(part[0], part[1]), sum_of_two(part[2], part[3]))};
    }
    if (height == 4) tree.turn ^= 1;
    else block_sync();
    Output out;
    out.state = nullptr, out.group = p.H / p.G, out.lanes = task_of(p, job.index).q_count * out.group, out.width = p.Dv;
    out.head_begin = task_of(p, job.index).head * out.group, out.token_begin = task_of(p, job.index).token;
    // Joined with left siblings that hold some of the item's leaves; the last leaf with all that waits.
    u32 k = 0;
    UNROLL
    for (u32 low = 0; low < LOW; low++) {
        if (k == low && (last || (low < level && (leaf >> low & 1)))) {
            if (tree.waiting >> low & 1) {
                UNROLL
                for (u32 r = 0; r < 2; r++) node[r] = joined(tree.low[low][r], node[r]);
            }
            tree.waiting &= ~(1u << low);
            k = low + 1;
        }
    }
    NO_UNROLL
    while (k >= LOW && (last ? tree.waiting >> k != 0 : k < level && (leaf >> k & 1))) {
        if (tree.waiting >> k & 1) {
            Output state = slot_at(p, out, task_of(p, job.index), popcount(tree.waiting >> (k + 1)));
            UNROLL
            for (u32 r = 0; r < 2; r++) {
                u32 of = warp() + 4 * r;
                if (of >= live) continue;
                Node left{*state.m(of), *state.l(of), Floats{0.0f, 0.0f, 0.0f, 0.0f}};
                if (mine) left.acc = floats_at(state.acc(of) + job.column + column);
                node[r] = joined(left, node[r]);
            }
        }
        tree.waiting &= ~(1u << k);
        k++;
    }
    if (!last) tree.waiting |= 1u << k;
    UNROLL
    for (u32 low = 0; low < LOW; low++) {
        if (!last && k == low) {
            UNROLL
            for (u32 r = 0; r < 2; r++) tree.low[low][r] = node[r];
        }
    }
    if (!last && k < LOW) return;
    Output state = out;
    if (!finished) state = slot_at(p, out, task_of(p, job.index), last ? 0 : popcount(tree.waiting >> (k + 1)));
    // All lanes have read what the first one is about to write over.
    warp_sync();
    UNROLL
    for (u32 r = 0; r < 2; r++) {
        u32 of = warp() + 4 * r, to = job.column + column;
        if (of >= live) continue;
        const Floats& acc = node[r].acc;
        if (finished) {
            float f = finish(p, out, of, node[r].m, node[r].l, to == 0);
            T* at = output_row<T>(p, out, of) + to;
            if (mine) store_pair(at, acc.x * f + 0.0f, acc.y * f + 0.0f, to + 1 < p.Dv);
            if (mine && to + 2 < p.Dv) store_pair(at + 2, acc.z * f + 0.0f, acc.w * f + 0.0f, to + 3 < p.Dv);
        } else {
            if (mine) {
                store16(state.acc(of) + to,
                        U4{float_bits(acc.x), float_bits(acc.y), float_bits(acc.z), float_bits(acc.w)});
            }
            if (lane() == 0) *state.m(of) = node[r].m, *state.l(of) = node[r].l;
        }
    }
    warp_sync();
}

// Nodes waiting in the item that a leaf of it is joined with: left siblings that hold some of the item's leaves.
DEVICE u32 joins_of(const Task& task, u32 leaf) {
    u32 first = task.lo / task.leaf_keys, joins = 0;
    NO_UNROLL
    for (u32 k = 0; k < task.level && (leaf >> k) & 1; k++) joins += (leaf >> k) << k > first;
    return joins;
}

MSTAR_KERNEL(decode, Attend, THREADS, RESIDENT) {
    SHARED(memory);
    u8* area = memory + RING_BYTES;
    float* sums = reinterpret_cast<float*>(area + AREA);
    const bool whole = (p.flags & ALIGNED) && p.D % (16 / SIZE) == 0 && p.Dv % (16 / SIZE) == 0;
    const u32 heads = p.H / p.G;
    const Scale scale = scale_of<GENERAL>(p);
    const float factor = GENERAL ? 1.0f : scale.factor;
    Fetch ahead;
    ahead.index = block_x(), ahead.from = ahead.column = 0;
    // The image has room for a task a block: what is read before it is known whether there is one is of no consequence.
    ahead.step_pages = 64 / p.S, ahead.step_slots = 64 % p.S, ahead.page = 0;
    const u32 items = p.image->few;
    ahead.end = items;
    begin(p, ahead, task_of(p, block_x()));
    Job job;
    job.index = block_x(), job.from = job.column = 0;
    Lanes of{};
    Running state = empty();
    Tree tree{};
    u32 held[HELD ? STEPS : 1][4] = {};
    u32 slot = 0, tile = 0, tile_end = 0, leaf_end = 0, depth = 0;
    // A ring's worth of tiles is on its way before the first is waited for.
    NO_UNROLL
    for (u32 step = 0;; step++) {
        if (step >= STAGES) {
            if (tile == tile_end) {
                if (job.index >= items) break;
                const Task& task = task_of(p, job.index);
                job.masked = task.mask_words != 0;
                const u32 lanes = task.q_count * heads, head = task.head;
                Queries q;
                q.token = p.q.stride[0], q.head = p.q.stride[1];
                q.at = p.q.at + u64((i64(task.token) * q.token + i64(head * heads) * q.head) * 2);
                block_sync();
                bring_queries<WIDTH, ROWS, THREADS>(p, q, area, job.from, lanes, heads, scale.negate);
                block_sync();
                if (HELD) {
                    UNROLL
                    for (u32 k = 0; k < STEPS; k++) {
                        load_a<WIDTH>(held[HELD ? k : 0], area, 16 * (warp() % SHARERS), k, lane());
                    }
                    // States are joined where the queries lie now.
                    block_sync();
                }
                UNROLL
                for (u32 r = 0; r < 2; r++) {
                    u32 lane_of = job.from + 16 * (warp() % SHARERS) + lane() / 4 + 8 * r;
                    u32 within = least(lane_of, lanes - 1);
                    of.token[r] = within / heads;
                    of.slope[r] = GENERAL && p.slopes ? p.slopes[head * heads + within % heads] : 0.0f;
                    of.span[r] = span_of(p, task, of.token[r]);
                }
                Reach last = span_of(p, task, task.q_count - 1);
                of.whole_lo = last.lo, of.whole_hi = least(span_of(p, task, 0).hi, last.hi);
                tile = leaf_end = task.lo / 64, tile_end = (task.hi + 63) / 64, depth = 0;
            }
            if (tile == leaf_end) {
                u32 tiles = task_of(p, job.index).leaf_keys / 64;
                leaf_end = least(tile_end, (tile / tiles + 1) * tiles);
            }
            cp_async_wait<STAGES - 1>();
            if (CODES) {
                const u32 thread = opaque(thread_x()), l = thread % 32, first = thread / 32 * 16;
                u8 *rows = memory + slot * STAGE, *to = memory + STAGES * STAGE;
                warp_sync();
                widen_rows<WIDTH>(to, rows, first, l);
                widen_rows<VALUES>(to + K_BYTES, rows + STAGE / (WIDTH + VALUES) * WIDTH, first, l);
            }
            sharers_sync();
            attend(p, job, of, factor, CODES ? memory + STAGES * STAGE : memory + slot * STAGE, scales_of(memory, slot), area, held, tile,
                   state);
            sharers_sync();
            tile++;
        }
        fetch(p, ahead, memory + slot * STAGE, scales_of(memory, slot), whole);
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        if (step < STAGES || tile != leaf_end) continue;
        const Task& task = task_of(p, job.index);
        const bool last = tile == tile_end;
        const u32 leaf = (tile - 1) * 64 / task.leaf_keys, level = task.level;
        const bool single = task.leaf_first >> level == (task.leaf_end - 1) >> level;
        const u32 lanes = task.q_count * heads;
        if (FEW_ROWS && lanes <= 8) {
            leave_few(p, job, leaf, lanes, last, last && single, area + JOIN_AT, sums, state, tree);
        } else {
            const u32 joins = last ? depth : joins_of(task, leaf);
            leave(p, job, depth, joins, last && single, area + JOIN_AT, sums, state);
            depth = depth - joins + 1;
        }
        state = empty();
        if (last && next_part<ROWS, VALUES>(p, task.q_count, job.from, job.column)) {
            // Nothing of the item is kept in registers from here on.
            UNROLL
            for (u32 k = 0; k < STEPS; k++) {
                UNROLL
                for (u32 i = 0; i < 4 && HELD; i++) held[HELD ? k : 0][i] = 0;
            }
            of = Lanes{}, tree = Tree{};
            if (!single && p.tickets) arrive<T>(p, task, leaf, sums);
            job.index += grid_x();
        }
    }
    cp_async_wait<0>();
    leave_empties<T>(p, warp(), THREADS / 32);
}
