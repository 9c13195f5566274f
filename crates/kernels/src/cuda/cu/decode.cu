// Few query vectors over pages: keys and values are streamed once for all of a key head's.
//
// Four warps share 64-key tiles at absolute positions. Each loads and sums 16 of a tile's keys (ROWS 16; with 32 or 64 rows,
// two or four warps share 32 or 64 keys and divide the rows) with its own running softmax; at an item's end the four are joined
// in fixed order. A ring of tiles is kept in flight by cp.async, over the borders of items too, so that it never drains.
//
// Defines: KV_TYPE; WIDTH, the padded head width; VALUES, the padded value columns of a pass; ROWS 16, 32, 64; STAGES of the
// ring; GENERAL 1 where a soft cap or slopes change scores; RESIDENT blocks an SM.
#include "cap.cuh"
#include "tile.cuh"

constexpr u32 THREADS = 128;
constexpr u32 SHARERS = ROWS / 16;        // warps that share a group of keys, 16 rows each
constexpr u32 GROUPS = 4 / SHARERS;       // groups of warps, each with its own keys of a tile
constexpr u32 KEYS = 16 * SHARERS;        // keys of a tile that a group takes
constexpr u32 SLICE = 64;                 // value columns that are joined at a time
constexpr u32 K_BYTES = 64 * WIDTH * 2, V_BYTES = 64 * VALUES * 2, STAGE = K_BYTES + V_BYTES;
constexpr u32 Q_BYTES = ROWS * WIDTH * 2, JOIN_BYTES = 4 * 16 * SLICE * 4;
// Queries lie where the states are joined afterwards.
constexpr u32 AREA = Q_BYTES > JOIN_BYTES ? Q_BYTES : JOIN_BYTES;
constexpr bool HELD = WIDTH <= 128;       // queries are held in registers
constexpr u32 STEPS = WIDTH / 16, COLUMNS = VALUES / 8, TILES = KEYS / 8;

// What of an item a block is at: some of its query vectors, and some of its value columns.
struct Job {
    u32 index, end;  // the item, and one past the launch's last
    u32 from, column;
    Item item;
    Row row;
    u64 partial;
    Reach reach;
};
DEVICE void open(const Attend& p, Job& job) {
    if (job.index >= job.end) return;
    job.item = items_of(p.image)[job.index];
    Member member = members_of(p.image)[job.item.member_begin];
    job.row = rows_of(p.image)[member.row];
    job.partial = member.partial;
    job.reach = reach_of(p, job.row, job.item);
    job.from = job.column = 0;
}
DEVICE void advance(const Attend& p, Job& job) {
    job.column += VALUES;
    if (job.column < p.Dv) return;
    job.column = 0, job.from += ROWS;
    if (job.from < job.item.q_count * (p.H / p.G)) return;
    job.index += grid_x();
    open(p, job);
}

// The side of a block that fetches: which job, which of its tiles is next, and the page of this lane's key in it.
struct Fetch {
    Job job;
    Keys keys;
    u32 tile, tile_end;
    u64 at;  // of this lane's key (lanes 0-15) or value (16-31) in the next tile; 0: not seen
};
// Which key of the next tile is this lane's, and where it lies.
DEVICE void locate(const Attend& p, Fetch& f) {
    u32 base = f.tile * 64, key = base + 16 * warp() + (lane() & 15);
    bool seen = key >= f.job.reach.lo && key < f.job.reach.hi;
    if (f.job.row.mask_begin != NO_MASK) {
        // A key that the mask hides from every query is not read: its value may be anything.
        u64 bits = 0;
        for (u32 t = 0; t < f.job.item.q_count; t++) {
            u32 token = f.job.item.q_begin + t;
            Reach span = span_of(p, f.job.row, f.job.reach, token);
            bits |= mask_word(p, f.job.row, token, base) & range_bits(span.lo, span.hi, base);
        }
        seen = seen && (bits >> (key - base) & 1);
    }
    f.at = 0;
    if (seen) {
        Place2 place = key_at<PAGES>(f.keys, key);
        f.at = lane() < 16 ? place.k : place.v;
    }
}
// Goes to the next tile that there is, if any.
DEVICE void settle(const Attend& p, Fetch& f, bool opened) {
    while (f.job.index < f.job.end) {
        if (opened) {
            f.keys = keys_of<PAGES>(p, 0, f.job.row, f.job.item.kv_head_begin, 2);
            f.keys.v += f.job.column * 2;
            f.tile = f.job.reach.lo / 64, f.tile_end = (f.job.reach.hi + 63) / 64;
            if (f.job.reach.lo >= f.job.reach.hi) f.tile_end = f.tile;
        }
        if (f.tile < f.tile_end) {
            locate(p, f);
            return;
        }
        advance(p, f.job);
        opened = true;
    }
}
// What lane `of` located.
DEVICE u64 address_of(const Fetch& f, u32 of) {
    return u64(shfl_idx(u32(f.at), of)) | u64(shfl_idx(u32(f.at >> 32), of)) << 32;
}
// Starts the copies of this warp's 16 keys and values of the next tile, and closes their group; an empty one past the end.
DEVICE void fetch(const Attend& p, Fetch& f, u8* stage, bool whole) {
    if (f.job.index < f.job.end) {
        constexpr u32 K_CHUNKS = WIDTH / 8, V_CHUNKS = VALUES / 8;
        const u32 thread = opaque(thread_x()), l = thread % 32, first = thread / 32 * 16;
        u32 width = p.Dv - f.job.column;
        if (whole) {
            UNROLL
            for (u32 i = 0; i < 16 * K_CHUNKS / 32; i++) {
                u32 at = i * 32 + l, r = at / K_CHUNKS, chunk = at % K_CHUNKS;
                bring(chunk_at<WIDTH>(stage, first + r, chunk), address_of(f, r), p.D, chunk);
            }
            UNROLL
            for (u32 i = 0; i < 16 * V_CHUNKS / 32; i++) {
                u32 at = i * 32 + l, r = at / V_CHUNKS, chunk = at % V_CHUNKS;
                bring(chunk_at<VALUES>(stage + K_BYTES, first + r, chunk), address_of(f, 16 + r), width, chunk);
            }
        } else {
            NO_UNROLL
            for (u32 at = l; at < 16 * K_CHUNKS; at += 32) {
                u32 r = at / K_CHUNKS, chunk = at % K_CHUNKS;
                bring_slowly(chunk_at<WIDTH>(stage, first + r, chunk), address_of(f, r), p.D, chunk);
            }
            NO_UNROLL
            for (u32 at = l; at < 16 * V_CHUNKS; at += 32) {
                u32 r = at / V_CHUNKS, chunk = at % V_CHUNKS;
                bring_slowly(chunk_at<VALUES>(stage + K_BYTES, first + r, chunk), address_of(f, 16 + r), width,
                             chunk);
            }
        }
        f.tile++;
        settle(p, f, false);
    }
    cp_async_commit();
}

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

// What of a tile the two rows of a lane see, and how their scores become logits.
struct Lanes {
    Reach span[2];
    u32 token[2];
    float slope[2];
    u32 whole_lo, whole_hi;  // a tile within is seen whole by every row
};

DEVICE void attend(const Attend& p, const Job& job, const Lanes& lanes, float factor, u8* stage, u8* queries,
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
    u32 base = tile * 64 + first;
    if (GENERAL) {
        const Cap cap = cap_of(p.soft_cap);
        const float scale = p.scale * LOG2_E;
        UNROLL
        for (u32 n = 0; n < TILES; n++) {
            UNROLL
            for (u32 i = 0; i < 4; i++) {
                float v = x[n][i] * scale;
                if (p.soft_cap > 0.0f) v = capped(cap, v);
                i64 at = i64(job.row.kv_len) - i64(job.row.q_len) + i64(lanes.token[i / 2]);
                float distance = float(i64(base + 8 * n + 2 * t + i % 2) - at);
                x[n][i] = fused(lanes.slope[i / 2] * LOG2_E, distance, v);
            }
        }
    }
    bool masked = job.row.mask_begin != NO_MASK;
    if (masked || base < lanes.whole_lo || base + KEYS > lanes.whole_hi) {
        u64 bits[2];
        UNROLL
        for (u32 r = 0; r < 2; r++) {
            bits[r] = range_bits(lanes.span[r].lo, lanes.span[r].hi, tile * 64);
            if (masked) bits[r] &= mask_word(p, job.row, lanes.token[r], tile * 64);
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
    UNROLL
    for (u32 k = 0; k < KEYS / 16; k++) {
        u32 a[4] = {pack<T>(x[2 * k][0], x[2 * k][1]), pack<T>(x[2 * k][2], x[2 * k][3]),
                    pack<T>(x[2 * k + 1][0], x[2 * k + 1][1]), pack<T>(x[2 * k + 1][2], x[2 * k + 1][3])};
        UNROLL
        for (u32 n = 0; n < COLUMNS; n += 2) {
            u32 b[2], c[2];
            load_v<VALUES>(b, c, values, first + 16 * k, n / 2, l);
            mma<T>(s.o[n], a, b);
            mma<T>(s.o[n + 1], a, c);
        }
    }
}

// Where a warp's weighted sum at (row, column) of a slice lies while the four are joined; rows a lane group writes at once are
// in different banks.
DEVICE float* join_at(u8* area, u32 of_warp, u32 row, u32 column) {
    return reinterpret_cast<float*>(area) + (of_warp * 16 + row) * SLICE + (column ^ ((row & 3) << 3));
}

// Joins the groups' states, in the order of their keys, and hands them on or finishes.
DEVICE void leave(const Attend& p, const Job& job, u8* area, float* sums, Running& s) {
    u32 g = lane() / 4, t = lane() % 4, sharer = warp() % SHARERS;
    Output out = output_at(p, job.row, job.item.q_begin, job.item.q_count, job.item.kv_head_begin, job.partial);
    float* most_of = sums;              // [4 warps][16]
    float* sum_of = sums + 64;          // [4 warps][16]
    float* factor_of = sums + 128;      // [64]
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
        u32 row = 16 * sharer + g + 8 * r, of = job.from + row;
        if (warp() < SHARERS && t == 0 && of < out.lanes) {
            bool first = job.column == 0;
            if (out.direct()) {
                factor_of[row] = finish(p, out, of, m, l, first);
            } else {
                factor_of[row] = 1.0f;
                if (first) *out.m(of) = m, *out.l(of) = l;
            }
        }
    }
    UNROLL
    for (u32 slice = 0; slice < VALUES / SLICE; slice++) {
        UNROLL
        for (u32 n = 0; n < SLICE / 8; n++) {
            UNROLL
            for (u32 r = 0; r < 2; r++) {
                float* at = join_at(area, warp(), g + 8 * r, 8 * n + 2 * t);
                at[0] = s.o[slice * (SLICE / 8) + n][2 * r] * shrink[r];
                at[1] = s.o[slice * (SLICE / 8) + n][2 * r + 1] * shrink[r];
            }
        }
        block_sync();
        NO_UNROLL
        for (u32 i = thread_x(); i < ROWS * SLICE / 2; i += THREADS) {
            u32 row = i / (SLICE / 2), column = i % (SLICE / 2) * 2, of = job.from + row;
            u32 to = job.column + slice * SLICE + column;
            if (of >= out.lanes || to >= p.Dv) continue;
            float sum[2];
            UNROLL
            for (u32 j = 0; j < 2; j++) {
                float part[GROUPS];
                UNROLL
                for (u32 w = 0; w < GROUPS; w++) {
                    part[w] = join_at(area, w * SHARERS + row / 16, row % 16, column)[j];
                }
                sum[j] = part[0];
                if (GROUPS == 2) sum[j] = part[0] + part[GROUPS - 1];
                if (GROUPS == 4) sum[j] = (part[0] + part[GROUPS / 4]) + (part[GROUPS / 2] + part[GROUPS - 1]);
            }
            if (out.direct()) {
                float f = factor_of[row];
                store_pair(output_row<T>(p, out, of) + to, sum[0] * f + 0.0f, sum[1] * f + 0.0f, to + 1 < p.Dv);
            } else {
                out.acc(of)[to] = sum[0];
                if (to + 1 < p.Dv) out.acc(of)[to + 1] = sum[1];
            }
        }
        block_sync();
    }
}

MSTAR_KERNEL(decode, Attend, THREADS, RESIDENT) {
    SHARED(memory);
    u8* area = memory + STAGES * STAGE;
    float* sums = reinterpret_cast<float*>(area + AREA);
    bool whole = (p.flags & ALIGNED) && p.D % 8 == 0 && p.Dv % 8 == 0;
    u32 heads = p.H / p.G;
    Scale scale = scale_of<GENERAL>(p);
    float factor = GENERAL ? 1.0f : scale.factor;
    Span span = items_of(p);
    Job job;
    job.index = span.begin + block_x(), job.end = span.end;
    open(p, job);
    Fetch ahead;
    ahead.job = job, ahead.tile = ahead.tile_end = 0, ahead.at = 0;
    settle(p, ahead, true);
    for (u32 i = 0; i < STAGES; i++) fetch(p, ahead, memory + i * STAGE, whole);
    u32 slot = 0;
    while (job.index < job.end) {
        u32 lanes = job.item.q_count * heads, head = job.item.kv_head_begin;
        Queries q = queries_of<PAGES>(p, job.row, job.item.q_begin, head, 2);
        bring_queries<WIDTH, ROWS, THREADS>(p, q, area, job.from, lanes, heads, scale.negate);
        block_sync();
        u32 held[HELD ? STEPS : 1][4];
        if (HELD) {
            UNROLL
            for (u32 k = 0; k < STEPS; k++) load_a<WIDTH>(held[HELD ? k : 0], area, 16 * (warp() % SHARERS), k, lane());
        }
        Lanes of;
        UNROLL
        for (u32 r = 0; r < 2; r++) {
            u32 lane_of = job.from + 16 * (warp() % SHARERS) + lane() / 4 + 8 * r;
            u32 within = least(lane_of, lanes - 1);
            of.token[r] = job.item.q_begin + within / heads;
            of.slope[r] = GENERAL && p.slopes ? p.slopes[head * heads + within % heads] : 0.0f;
            of.span[r] = span_of(p, job.row, job.reach, of.token[r]);
        }
        Reach first = span_of(p, job.row, job.reach, job.item.q_begin);
        Reach last = span_of(p, job.row, job.reach, job.item.q_begin + job.item.q_count - 1);
        of.whole_lo = last.lo, of.whole_hi = least(first.hi, last.hi);
        Running state;
        state.m[0] = state.m[1] = LOWEST;
        state.l[0] = state.l[1] = 0.0f;
        UNROLL
        for (u32 n = 0; n < COLUMNS; n++) state.o[n][0] = state.o[n][1] = state.o[n][2] = state.o[n][3] = 0.0f;
        u32 tile = job.reach.lo / 64, end = job.reach.lo < job.reach.hi ? (job.reach.hi + 63) / 64 : tile;
        NO_UNROLL
        for (; tile < end; tile++) {
            cp_async_wait<STAGES - 1>();
            sharers_sync();
            attend(p, job, of, factor, memory + slot * STAGE, area, held, tile, state);
            sharers_sync();
            fetch(p, ahead, memory + slot * STAGE, whole);
            slot = slot + 1 == STAGES ? 0 : slot + 1;
        }
        // All warps are done with the queries, where states are joined.
        block_sync();
        leave(p, job, area, sums, state);
        advance(p, job);
    }
    cp_async_wait<0>();
}
