// Up to 16 query vectors over pages: keys and values are streamed once for all of a key head's (of 8 at a time, or of 16).
//
// Products are turned round, so that few query vectors pad little: scores are keys [KEYS x WIDTH] times queries, and the result's
// columns are values [VALUES x KEYS] times weights. With g = lane / 4 and t = lane % 4, a lane has of a product the rows g and g + 8
// of 16 (keys, or columns of the result) and the query vectors 2 t and 2 t + 1 of 8.
//
// A leaf is four quarters of neighbouring keys, each summed from zero by one warp. Quarters and leaves are joined along one tree: what
// is a warp's by the warp, what a round's warps have by the block. See few_ring.cuh.
//
// Defines: KV_TYPE; WIDTH, the padded head width; VALUES, the padded value columns of a pass; COLUMNS 8 or 16; STAGES of a warp's
// ring; GENERAL 1 where a soft cap or slopes change scores; RESIDENT blocks an SM.
#define ONE_PLANE
#include "few_ring.cuh"
#include "arrive.cuh"
#include "cap.cuh"

constexpr u32 N_TILES = COLUMNS / 8, V_TILES = VALUES / 16, K_TILES = KEYS / 16, STEPS = WIDTH / 16;
// Query vectors that a lane has.
constexpr u32 MINE = 2 * N_TILES;
// Whether queries are held in registers; else they lie in shared memory.
constexpr bool HELD = N_TILES * WIDTH <= 128;
constexpr u32 PAIRS = HELD ? 2 * STEPS : 1;
// Tiles of the result that the warps join at a time: what they write is `AREA` bytes.
constexpr u32 AREA = N_TILES == 1 ? 16384 : 8192, MOST_SLICE = N_TILES == 1 ? 8 : 2;
static_assert(MOST_SLICE * N_TILES * 4 * 512 <= AREA, "a tile of 8 query vectors is 512 bytes of a warp");
constexpr u32 SLICE = V_TILES < MOST_SLICE ? V_TILES : MOST_SLICE;
constexpr u32 SLICES = (V_TILES + SLICE - 1) / SLICE;
// Factors of a query vector at a round's end: of three joins of warps and of those with nodes that waited; the last is the row's.
constexpr u32 JOINS = 8, FACTORS = 2 * JOINS + 1;
constexpr u32 FIGURES = COLUMNS == 8 ? 256 : 512;  // floats

// The softmax state of some keys, for a lane's query vectors: m is a base-2 logit, l a lane's share until it is summed.
struct State {
    float m[MINE], l[MINE];
    float o[V_TILES][N_TILES][4];
};
DEVICE void clear(State& s, float m) {
    UNROLL
    for (u32 c = 0; c < MINE; c++) s.m[c] = m, s.l[c] = 0.0f;
    UNROLL
    for (u32 n = 0; n < V_TILES; n++) {
        UNROLL
        for (u32 j = 0; j < N_TILES; j++) s.o[n][j][0] = s.o[n][j][1] = s.o[n][j][2] = s.o[n][j][3] = 0.0f;
    }
}

// What the eight lanes of a query vector agree on.
DEVICE float column_max(float v) {
    v = larger(v, shfl_xor(v, 4));
    v = larger(v, shfl_xor(v, 8));
    return larger(v, shfl_xor(v, 16));
}
DEVICE float column_sum(float v) {
    v += shfl_xor(v, 4);
    v += shfl_xor(v, 8);
    return v + shfl_xor(v, 16);
}

// What of an item a block is at: some of its query vectors, and some of its value columns.
struct Job {
    u32 index, from, column;
    bool masked;
};
// How a lane's scores are biased, and what all of its query vectors see.
struct Lanes {
    float slope[MINE];
    u32 whole_lo, whole_hi;  // keys within are seen by all
};
// A lane's query vector `c`, the last one for those past it.
DEVICE u32 vector_of(const Attend& p, const Task& task, const Job& job, u32 c) {
    return least(job.from + 8 * (c / 2) + 2 * (lane() % 4) + c % 2, task.q_count * (p.H / p.G) - 1);
}
// Its query token, of the item.
DEVICE u32 token_of(const Attend& p, const Task& task, const Job& job, u32 c) {
    return task.q_count == 1 ? 0 : vector_of(p, task, job, c) / (p.H / p.G);
}
typedef u32 Held[HELD ? STEPS : 1][N_TILES][2];

// Begins an item, or a part of it: its queries, and what they see.
DEVICE void begin_job(const Attend& p, Job& job, bool whole, bool negate, u8* queries, Held& held, Lanes& of) {
    const Task& task = task_of(p, job.index);
    const u32 heads = p.H / p.G, lanes = task.q_count * heads, g = lane() / 4, t = lane() % 4;
    job.masked = task.mask_words != 0;
    Queries q;
    q.token = p.q.stride[0], q.head = p.q.stride[1];
    q.at = p.q.at + u64((i64(task.token) * q.token + i64(task.head * heads) * q.head) * 2);
    if (HELD) {
        UNROLL
        for (u32 j = 0; j < N_TILES; j++) {
            const u32 vector = job.from + 8 * j + g;
            const bool there = vector < lanes;
            const u32 token = task.q_count == 1 || !there ? 0 : vector / heads;
            const u32 head = there ? vector - token * heads : 0;
            const T* row = reinterpret_cast<const T*>(q.at) + i64(token) * q.token + i64(head) * q.head;
            const u32 turn = negate ? 0x80008000u : 0, mask = there ? ~0u : 0;
            // All loads are under way at once: a vector that is not there is read elsewhere and put out afterwards.
            if (whole) {
                UNROLL
                for (u32 n = 0; n < PAIRS; n++) {
                    u32& pair = held[n / 2][j][n % 2];
                    pair = 0;
                    if (8 * n < p.D) pair = *reinterpret_cast<const u32*>(row + 8 * n + 2 * t);
                }
            } else {
                UNROLL
                for (u32 n = 0; n < PAIRS; n++) {
                    const u32 at = 8 * n + 2 * t;
                    u32& pair = held[n / 2][j][n % 2];
                    pair = at < p.D ? row[at].bits : 0;
                    pair |= at + 1 < p.D ? u32(row[at + 1].bits) << 16 : 0;
                }
            }
            UNROLL
            for (u32 n = 0; n < PAIRS; n++) held[n / 2][j][n % 2] = (held[n / 2][j][n % 2] ^ turn) & mask;
        }
    } else {
        block_sync();
        bring_queries<WIDTH, COLUMNS, THREADS>(p, q, queries, job.from, lanes, heads, negate);
        block_sync();
    }
    of.whole_lo = task.lo, of.whole_hi = task.hi;
    if (task.q_count > 1) {
        const Reach last = span_of(p, task, task.q_count - 1);
        of.whole_lo = last.lo, of.whole_hi = least(span_of(p, task, 0).hi, last.hi);
    }
    UNROLL
    for (u32 c = 0; c < MINE; c++) {
        const u32 head = task.head * heads + vector_of(p, task, job, c) % heads;
        of.slope[c] = GENERAL && p.slopes ? p.slopes[head] : 0.0f;
    }
}

DEVICE void attend(const Attend& p, const Job& job, const Lanes& lanes, float factor, u8* stage, u8* queries, const Held& held,
                   u32 base, State& s) {
    const u32 l = opaque(lane()), g = l / 4;
    // Even and odd steps of the width are summed side by side, where a product is of one tile.
    constexpr bool TWICE = K_TILES * N_TILES == 1;
    float x[K_TILES][N_TILES][4], y[TWICE ? K_TILES : 1][TWICE ? N_TILES : 1][4];
    UNROLL
    for (u32 n = 0; n < K_TILES; n++) {
        UNROLL
        for (u32 j = 0; j < N_TILES; j++) {
            UNROLL
            for (u32 i = 0; i < 4; i++) x[n][j][i] = y[TWICE ? n : 0][TWICE ? j : 0][i] = 0.0f;
        }
    }
    UNROLL
    for (u32 k = 0; k < STEPS; k++) {
        u32 b[N_TILES][2];
        UNROLL
        for (u32 j = 0; j < N_TILES; j++) b[j][0] = held[HELD ? k : 0][j][0], b[j][1] = held[HELD ? k : 0][j][1];
        if (!HELD) {
            u32 c[2], d[2];
            // Of 8 query vectors, what lies behind the tile is loaded and not used.
            load_k<WIDTH>(c, d, queries, 0, k, N_TILES == 1 ? l & 15 : l);
            b[0][0] = c[0], b[0][1] = c[1];
            if (N_TILES == 2) b[N_TILES - 1][0] = d[0], b[N_TILES - 1][1] = d[1];
        }
        UNROLL
        for (u32 n = 0; n < K_TILES; n++) {
            u32 a[4];
            load_a<WIDTH>(a, stage, 16 * n, k, l);
            UNROLL
            for (u32 j = 0; j < N_TILES; j++) mma<T>(TWICE && k % 2 ? y[TWICE ? n : 0][TWICE ? j : 0] : x[n][j], a, b[j]);
        }
    }
    if (TWICE) {
        UNROLL
        for (u32 i = 0; i < 4; i++) x[0][0][i] += y[0][0][i];
    }
    if (GENERAL) {
        const Cap cap = cap_of(p.soft_cap);
        const float scale = p.scale * LOG2_E;
        const i64 first_query = task_of(p, job.index).first;
        u32 token[MINE];
        UNROLL
        for (u32 c = 0; c < MINE; c++) token[c] = token_of(p, task_of(p, job.index), job, c);
        UNROLL
        for (u32 n = 0; n < K_TILES; n++) {
            UNROLL
            for (u32 j = 0; j < N_TILES; j++) {
                UNROLL
                for (u32 i = 0; i < 4; i++) {
                    const u32 c = 2 * j + i % 2;
                    float v = x[n][j][i] * scale;
                    if (p.soft_cap > 0.0f) v = capped(cap, v);
                    i64 at = first_query + i64(token[c]);
                    float distance = float(i64(base + 16 * n + g + 8 * (i / 2)) - at);
                    x[n][j][i] = fused(lanes.slope[c] * LOG2_E, distance, v);
                }
            }
        }
    }
    if (job.masked || base < lanes.whole_lo || base + KEYS > lanes.whole_hi) {
        UNROLL
        for (u32 c = 0; c < MINE; c++) {
            const Task& task = task_of(p, job.index);
            const u32 token = token_of(p, task, job, c);
            const Reach span = span_of(p, task, token);
            u32 bits = u32(range_bits(span.lo, span.hi, base));
            if (job.masked) bits &= u32(mask_bits(p, task, token, base));
            UNROLL
            for (u32 n = 0; n < K_TILES; n++) {
                UNROLL
                for (u32 i = c % 2; i < 4; i += 2) {
                    if (!(bits >> (16 * n + g + 8 * (i / 2)) & 1)) x[n][c / 2][i] = -infinity();
                }
            }
        }
    }
    float shrink[MINE];
    bool moved = false;
    UNROLL
    for (u32 c = 0; c < MINE; c++) {
        float top = -infinity();
        UNROLL
        for (u32 n = 0; n < K_TILES; n++) top = larger(top, larger(x[n][c / 2][c % 2], x[n][c / 2][c % 2 + 2]));
        shrink[c] = step_of(s.m[c], column_max(top), factor);
        moved = moved || shrink[c] != 1.0f;
        float sum = 0.0f;
        UNROLL
        for (u32 n = 0; n < K_TILES; n++) {
            UNROLL
            for (u32 i = c % 2; i < 4; i += 2) {
                x[n][c / 2][i] = ex2(fused(x[n][c / 2][i], factor, -s.m[c]));
                sum += x[n][c / 2][i];
            }
        }
        s.l[c] = fused(s.l[c], shrink[c], sum);
    }
    // Products with exactly 1 may be left out.
    if (warp_any(moved)) {
        UNROLL
        for (u32 n = 0; n < V_TILES; n++) {
            UNROLL
            for (u32 j = 0; j < N_TILES; j++) {
                UNROLL
                for (u32 i = 0; i < 4; i++) s.o[n][j][i] *= shrink[2 * j + i % 2];
            }
        }
    }
    UNROLL
    for (u32 k = 0; k < K_TILES; k++) {
        u32 b[N_TILES][2];
        UNROLL
        for (u32 j = 0; j < N_TILES; j++) {
            b[j][0] = transposed(pack<T>(x[k][j][0], x[k][j][1]));
            b[j][1] = transposed(pack<T>(x[k][j][2], x[k][j][3]));
        }
        UNROLL
        for (u32 n = 0; n < V_TILES; n++) {
            u32 a[4];
            ldmatrix_x4_trans(a, chunk_at<VALUES>(stage + K_BYTES, 16 * k + (l & 7) + ((l >> 4) << 3), 2 * n + ((l >> 3) & 1)));
            UNROLL
            for (u32 j = 0; j < N_TILES; j++) mma<T>(s.o[n][j], a, b[j]);
        }
    }
}

// Ends the sum of a leaf's quarter.
DEVICE void seal(State& s) {
    UNROLL
    for (u32 c = 0; c < MINE; c++) s.m[c] = top_of(s.m[c]), s.l[c] = column_sum(s.l[c]);
}
// Joins the state of the keys right of `a`'s.
DEVICE void join(State& a, const State& b) {
    Meeting with[MINE];
    UNROLL
    for (u32 c = 0; c < MINE; c++) {
        with[c] = meet(a.m[c], b.m[c]);
        a.l[c] = both(a.l[c], with[c].left, b.l[c], with[c].right);
    }
    UNROLL
    for (u32 n = 0; n < V_TILES; n++) {
        UNROLL
        for (u32 j = 0; j < N_TILES; j++) {
            UNROLL
            for (u32 i = 0; i < 4; i++) {
                const Meeting& w = with[2 * j + i % 2];
                a.o[n][j][i] = both(a.o[n][j][i], w.left, b.o[n][j][i], w.right);
            }
        }
    }
}

// Where the states lie that a block has no registers for, under its key head: nodes that wait for a sibling, and what an item
// hands on.
DEVICE Output slot_at(const Attend& p, const Output& out, const Task& task, u32 leaf) {
    Output state = out;
    state.state = state_at(states_of(p, task), leaf);
    return state;
}
DEVICE void joined_here(Floats& a, const Floats& b, const float* left, const float* right) {
    a.x = both(a.x, left[0], b.x, right[0]), a.y = both(a.y, left[1], b.y, right[1]);
    a.z = both(a.z, left[0], b.z, right[0]), a.w = both(a.w, left[1], b.w, right[1]);
}

// A round's end: joins what the warps have, then nodes that wait for this one. What comes of it waits too; at the item's end it is
// handed on, or is the row's result. `begin` is the item's first leaf; `waiting` has a bit a height. Called by all; `sum` of a warp
// without keys is empty.
DEVICE void leave(const Attend& p, const Job& job, const Path& path, u32 begin, u8* area, float* figures, const State& sum,
                  u32& waiting) {
    const Task& task = task_of(p, job.index);
    const u32 g = lane() / 4, t = lane() % 4, thread = thread_x();
    Output out;
    out.state = nullptr, out.group = p.H / p.G, out.lanes = task.q_count * out.group, out.width = p.Dv;
    out.head_begin = task.head * out.group, out.token_begin = task.token;
    const u32 live = least(out.lanes - job.from, u32(COLUMNS));
    const bool last = is_last(path, task);
    const bool finished = last && task.leaf_first >> task.level == (task.leaf_end - 1) >> task.level;
    // Heights that are joined: left siblings that hold some of the item's leaves; of the last round, all that wait.
    u32 height = path.level, joins = 0;
    if (last) {
        joins = waiting;
    } else {
        NO_UNROLL
        while (height < task.level && path.index >> height & 1) joins |= 1u << height, height++;
        joins &= waiting;
    }
    const u32 kept = waiting & ~joins;
    // Where a node lies: behind those that came before.
    const u32 slot = begin + popcount(kept), end = begin + popcount(waiting);
    // Query vectors in pairs, a power of two of them.
    const u32 shift = N_TILES == 1 ? (live > 4 ? 2 : live > 2 ? 1 : 0) : 3, pair = t;
    float* m_of = figures;                 // [4 warps][COLUMNS]
    float* l_of = figures + 4 * COLUMNS;   // the same
    float* factor_of = figures + (COLUMNS == 8 ? 64 : 128);  // [COLUMNS][FACTORS]
    static_assert(8 * COLUMNS + COLUMNS * FACTORS <= FIGURES, "figures have room");
    UNROLL
    for (u32 slice = 0; slice < SLICES; slice++) {
        block_sync();
        if (slice == 0 && g == 0) {
            UNROLL
            for (u32 c = 0; c < MINE; c++) {
                m_of[COLUMNS * warp() + 8 * (c / 2) + 2 * t + c % 2] = sum.m[c];
                l_of[COLUMNS * warp() + 8 * (c / 2) + 2 * t + c % 2] = sum.l[c];
            }
        }
        U4* mine = reinterpret_cast<U4*>(area) + warp() * (AREA / 64);
        UNROLL
        for (u32 n = 0; n < SLICE; n++) {
            UNROLL
            for (u32 j = 0; j < N_TILES; j++) {
                if (slice * SLICE + n >= V_TILES) continue;
                const float(&o)[4] = sum.o[slice * SLICE + n < V_TILES ? slice * SLICE + n : 0][j];
                if (pair + 4 * j < 1u << shift) {
                    mine[((n << shift) + pair + 4 * j) * 8 + g] =
                        U4{float_bits(o[0]), float_bits(o[1]), float_bits(o[2]), float_bits(o[3])};
                }
            }
        }
        block_sync();
        if (slice == 0) {
            if (thread < live) {
                const u32 of = job.from + thread;
                float m[4], l[4];
                UNROLL
                for (u32 w = 0; w < 4; w++) m[w] = m_of[COLUMNS * w + thread], l[w] = l_of[COLUMNS * w + thread];
                float* to = factor_of + thread * FACTORS;
                auto join = [&](u32 a, float& ma, float& la, float mb, float lb) {
                    Meeting with = meet(ma, mb);
                    la = both(la, with.left, lb, with.right);
                    to[2 * a] = with.left, to[2 * a + 1] = with.right;
                };
                join(0, m[0], l[0], m[1], l[1]);
                join(1, m[2], l[2], m[3], l[3]);
                join(2, m[0], l[0], m[2], l[2]);
                u32 at = 3;
                NO_UNROLL
                for (u32 left = end; left > slot; left--, at++) {
                    Output state = slot_at(p, out, task, left - 1);
                    float before = *state.m(of), sum_before = *state.l(of);
                    join(at, before, sum_before, m[0], l[0]);
                    m[0] = before, l[0] = sum_before;
                }
                if (finished) {
                    to[2 * JOINS] = finish(p, out, of, m[0], l[0], job.column == 0);
                } else {
                    Output state = slot_at(p, out, task, slot);
                    *state.m(of) = m[0], *state.l(of) = l[0];
                }
            }
            block_sync();
        }
        NO_UNROLL
        for (u32 unit = thread; unit < (SLICE * 8) << shift; unit += THREADS) {
            const u32 n = slice * SLICE + (unit >> (3 + shift)), vector = 2 * (unit >> 3 & ((1u << shift) - 1));
            const u32 of = job.from + vector, to = job.column + 16 * n + unit % 8;
            if (n >= V_TILES || vector >= live || to >= p.Dv) continue;
            Floats part[4];
            UNROLL
            for (u32 w = 0; w < 4; w++) part[w] = floats_at(reinterpret_cast<float*>(area + w * (AREA / 4)) + 4 * unit);
            const float* a = factor_of + vector * FACTORS;
            const float* b = a + FACTORS;
            auto join = [&](u32 at, Floats& left, const Floats& right) {
                const float l[2] = {a[2 * at], b[2 * at]}, r[2] = {a[2 * at + 1], b[2 * at + 1]};
                joined_here(left, right, l, r);
            };
            join(0, part[0], part[1]);
            join(1, part[2], part[3]);
            join(2, part[0], part[2]);
            const bool two = vector + 1 < live, eight = to + 8 < p.Dv;
            u32 at = 3;
            NO_UNROLL
            for (u32 left = end; left > slot; left--, at++) {
                Output state = slot_at(p, out, task, left - 1);
                const float* first = state.acc(of) + to;
                const float* second = state.acc(of + two) + to;
                const u32 far = eight ? 8 : 0;
                Floats before{first[0], second[0], first[far], second[far]};
                join(at, before, part[0]);
                part[0] = before;
            }
            const Floats& v = part[0];
            if (finished) {
                const float fa = a[2 * JOINS], fb = b[2 * JOINS];
                T* first = output_row<T>(p, out, of) + to;
                T* second = output_row<T>(p, out, of + two) + to;
                first[0] = from_float<T>(v.x * fa + 0.0f);
                if (eight) first[8] = from_float<T>(v.z * fa + 0.0f);
                if (two) second[0] = from_float<T>(v.y * fb + 0.0f);
                if (two && eight) second[8] = from_float<T>(v.w * fb + 0.0f);
            } else {
                Output state = slot_at(p, out, task, slot);
                float* first = state.acc(of) + to;
                float* second = state.acc(of + two) + to;
                first[0] = v.x;
                if (eight) first[8] = v.z;
                if (two) second[0] = v.y;
                if (two && eight) second[8] = v.w;
            }
        }
    }
    waiting = last ? 0 : kept | 1u << height;
}

MSTAR_KERNEL(decode_few, Attend, THREADS, RESIDENT) {
    SHARED(memory);
    u8* ring = memory + warp() * (STAGES * STAGE);
    u8* area = memory + WARPS * STAGES * STAGE;
    float* figures = reinterpret_cast<float*>(area + AREA);
    u8* queries = reinterpret_cast<u8*>(figures + FIGURES);
    const bool whole = (p.flags & ALIGNED) && p.D % 8 == 0 && p.Dv % 8 == 0;
    const Scale scale = scale_of<GENERAL>(p);
    const float factor = GENERAL ? 1.0f : scale.factor;
    Fetch ahead;
    // The image has room for a task a block: what is read before it is known whether there is one is of no consequence.
    ahead.index = block_x(), ahead.from = ahead.column = 0, ahead.page = 0, ahead.path = Path{};
    const u32 items = p.image->few;
    ahead.end = items;
    Path path{};
    Job job;
    job.index = block_x(), job.from = job.column = 0, job.masked = false;
    u32 first = 0;  // leaf of the item
    Lanes of{};
    Held held = {};
    // The sum under way, the node that it belongs to, and of four quarters the node of the latter two.
    State state, half, node;
    State& sum = MOST_ROUND > 0 ? node : state;
    clear(state, LOWEST);
    bool begun = false;
    u32 quarters = 0;  // that are summed of the warp's part
    u32 slot = 0, waiting = 0;
    // A ring's worth of keys is on its way before the first is waited for.
    NO_UNROLL
    for (u32 step = 0;; step++) {
        u8* stage = ring + slot * STAGE;
        if (step > STAGES) {
            if (job.index >= items) break;
            cp_async_wait<STAGES - 1>();
            warp_sync();
            attend(p, job, of, factor, stage, queries, held, path.at, state);
            warp_sync();
            path.at += KEYS;
            if (path.at >= path.stop || (path.level > 0 && (path.at & (path.quarter - 1)) == 0)) {
                seal(state);
                if (MOST_ROUND > 0) {
                    if (quarters == 0) sum = state;
                    else if (MOST_ROUND == 1 || quarters == 1) join(sum, state);
                    else if (quarters == 2) half = state;
                    else join(half, state), join(sum, half);
                    clear(state, LOWEST);
                }
                quarters++;
            }
        }
        if (step > 0) {
            fetch(p, ahead, stage, whole);
            slot = slot + 1 == STAGES ? 0 : slot + 1;
        }
        settle(p, ahead, step == 0);
        if (step < STAGES) continue;
        NO_UNROLL
        while (path.at >= path.stop && job.index < items) {
            if (begun) {
                if (quarters == 0) clear(sum, -infinity());
                leave(p, job, path, first, area, figures, sum, waiting);
                if (MOST_ROUND == 0) clear(state, LOWEST);
                quarters = 0;
                const Task& task = task_of(p, job.index);
                begun = !is_last(path, task);
                if (begun) {
                    next_round(path, task);
                } else {
                    if (next_part<COLUMNS, VALUES>(p, task.q_count, job.from, job.column)) {
                        const bool single = task.leaf_first >> task.level == (task.leaf_end - 1) >> task.level;
                        if (!single && p.tickets) arrive<T>(p, task, first, figures);
                        // Nothing of the item was kept in registers.
                        clear(state, LOWEST), clear(sum, -infinity());
                        if (MOST_ROUND == 2) clear(half, -infinity());
                        UNROLL
                        for (u32 n = 0; n < PAIRS * N_TILES; n++) held[n / N_TILES / 2][n % N_TILES][n / N_TILES % 2] = 0;
                        of = Lanes{};
                        job.index += grid_x();
                    }
                }
            } else {
                begin_path(path, task_of(p, job.index));
                first = path.index;
                begin_job(p, job, whole, scale.negate, queries, held, of);
                begun = true;
            }
        }
    }
    cp_async_wait<0>();
    leave_empties<T>(p, warp(), THREADS / 32);
}
