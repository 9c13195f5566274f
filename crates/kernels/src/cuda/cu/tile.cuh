// What the kernels over tiles of keys share: swizzled rows in shared memory, fragments, the running softmax.
//
// A warp's part of a product is 16 query vectors (rows) over some keys (columns). In an accumulator of 16 x 8, a lane has the
// columns 2 t and 2 t + 1 of the rows g and g + 8 (g = lane / 4, t = lane % 4), so that it keeps two rows' running softmax.
#pragma once

#include "finish.cuh"
#include "gather.cuh"

#ifndef KV_TYPE
#error "KV_TYPE: 1 bf16, 2 f16; queries, keys and values alike"
#endif
#if KV_TYPE == 1
typedef Bf16 T;
#else
typedef F16 T;
#endif

// Where the 16 bytes `chunk` of row `row` lie in a tile of rows of W elements, a multiple of 64: eight rows' equal chunks
// are in eight different bank groups.
template <u32 W>
DEVICE u8* chunk_at(u8* tile, u32 row, u32 chunk) {
    static_assert(W % 64 == 0, "rows are whole lines of 128 bytes");
    return tile + row * (2 * W) + ((chunk ^ (row & 7)) << 4);
}

// 8 elements of a row of `width` from its chunk `chunk` on, zeros past its end; the row need not be aligned.
DEVICE U4 load_chunk(const T* row, u32 width, u32 chunk, bool aligned) {
    U4 r{0, 0, 0, 0};
    u32 first = chunk * 8;
    if (first >= width) return r;
    if (aligned && first + 8 <= width) return load16(row + first);
    u32 w[4] = {0, 0, 0, 0};
    UNROLL
    for (u32 i = 0; i < 8; i++) {
        if (first + i < width) w[i / 2] |= u32(row[first + i].bits) << (16 * (i % 2));
    }
    return U4{w[0], w[1], w[2], w[3]};
}

// Brings one chunk of a row of `width` elements into shared memory, asynchronously; the row is aligned and of whole chunks.
// `row` 0 is a row of zeros.
DEVICE void bring(u8* to, u64 row, u32 width, u32 chunk) {
    bool valid = row != 0 && chunk * 8 < width;
    cp_async_16(to, reinterpret_cast<const void*>(row + chunk * 16), valid);
}
// The same of any row, at once.
DEVICE void bring_slowly(u8* to, u64 row, u32 width, u32 chunk) {
    U4 r{0, 0, 0, 0};
    if (row != 0) r = load_chunk(reinterpret_cast<const T*>(row), width, chunk, false);
    store16(to, r);
}

// The A fragment of rows row..row + 15 and elements 16 k.. of a tile; `l` is the lane.
template <u32 W>
DEVICE void load_a(u32 (&a)[4], u8* tile, u32 row, u32 k, u32 l) {
    ldmatrix_x4(a, chunk_at<W>(tile, row + (l & 15), 2 * k + (l >> 4)));
}
// The B fragments of K^T: elements 16 k.. of keys key..key + 7, and of the eight after them.
template <u32 W>
DEVICE void load_k(u32 (&first)[2], u32 (&second)[2], u8* tile, u32 key, u32 k, u32 l) {
    u32 r[4];
    ldmatrix_x4(r, chunk_at<W>(tile, key + (l & 7) + ((l >> 4) << 3), 2 * k + ((l >> 3) & 1)));
    first[0] = r[0], first[1] = r[1], second[0] = r[2], second[1] = r[3];
}
// The B fragments of V: columns 16 n..16 n + 7 of keys key..key + 15, and the eight columns after them.
template <u32 W>
DEVICE void load_v(u32 (&first)[2], u32 (&second)[2], u8* tile, u32 key, u32 n, u32 l) {
    u32 r[4];
    ldmatrix_x4_trans(r, chunk_at<W>(tile, key + (l & 15), 2 * n + (l >> 4)));
    first[0] = r[0], first[1] = r[1], second[0] = r[2], second[1] = r[3];
}

// What the four lanes of a row agree on.
DEVICE float row_max(float v) {
    v = larger(v, shfl_xor(v, 1));
    return larger(v, shfl_xor(v, 2));
}
DEVICE float row_sum(float v) {
    v += shfl_xor(v, 1);
    return v + shfl_xor(v, 2);
}

// How scores become base-2 logits, one layer's.
struct Scale {
    float factor;  // of what leaves the product; times log2(e) where nothing else happens to scores
    bool negate;   // queries are turned around: a plain scale is never negative, so that the largest score stays the largest
};
// CHANGED: cap or slopes follow, and the logits' factor is log2(e) after them.
template <bool CHANGED>
DEVICE Scale scale_of(const Attend& p) {
    if (CHANGED) return Scale{p.scale, false};
    float factor = p.scale < 0.0f ? -p.scale : p.scale;
    // Not 0: -inf, a hidden key's score, must stay what it is.
    return Scale{most(factor * LOG2_E, 1e-30f), p.scale < 0.0f};
}
DEVICE u32 turned(u32 pair, bool negate) { return negate ? pair ^ 0x80008000u : pair; }

// Copies an item's queries `from`..`from + COUNT` (lanes) to a tile; zeros past its last.
template <u32 W, u32 COUNT, u32 BY>
DEVICE void bring_queries(const Attend& p, const Queries& q, u8* tile, u32 from, u32 lanes, u32 group, bool negate) {
    constexpr u32 CHUNKS = W / 8;
    bool aligned = p.flags & ALIGNED;
    NO_UNROLL
    for (u32 i = thread_x(); i < COUNT * CHUNKS; i += BY) {
        u32 r = i / CHUNKS, chunk = i % CHUNKS, of = from + r;
        U4 v{0, 0, 0, 0};
        if (of < lanes) {
            i64 at = i64(of / group) * q.token + i64(of % group) * q.head;
            v = load_chunk(reinterpret_cast<const T*>(q.at) + at, p.D, chunk, aligned);
        }
        v = U4{turned(v.x, negate), turned(v.y, negate), turned(v.z, negate), turned(v.w, negate)};
        store16(chunk_at<W>(tile, r, chunk), v);
    }
}

// Starts the copies of 16 rows of W elements, which lie `stride` bytes apart from `at` on.
template <u32 W>
DEVICE void bring_rows(u8* tile, u32 first, u32 l, u64 at, u32 stride, u32 width) {
    constexpr u32 CHUNKS = W / 8;
    UNROLL
    for (u32 i = 0; i < 16 * CHUNKS / 32; i++) {
        u32 n = i * 32 + l, r = n / CHUNKS, chunk = n % CHUNKS;
        if (32 % CHUNKS == 0) r = i * (32 / CHUNKS) + l / CHUNKS, chunk = l % CHUNKS;
        const void* from = reinterpret_cast<const void*>(at + u64(r) * stride + chunk * 16);
        cp_async_16(chunk_at<W>(tile, first + r, chunk), from, chunk * 8 < width);
    }
}

// The absolute positions [lo, hi) that the query token at `at` sees within `reach`, a mask aside.
DEVICE Reach span_at(const Attend& p, const Reach& reach, i64 at) {
    i64 lo = reach.lo, hi = reach.hi;
    if (p.window_left >= 0) lo = most(lo, at - p.window_left);
    if (p.flags & CAUSAL) hi = least(hi, at + 1);
    return lo < hi ? Reach{u32(lo), u32(hi)} : Reach{reach.lo, reach.lo};
}
// That of query token `token` of a row.
DEVICE Reach span_of(const Attend& p, const Row& row, const Reach& reach, u32 token) {
    return span_at(p, reach, i64(row.kv_len) - i64(row.q_len) + i64(token));
}
// Bits of the 64 keys at `base` (a multiple of 64) that the custom mask leaves to query token `token` of a row.
DEVICE u64 mask_word(const Attend& p, const Row& row, u32 token, u32 base) {
    u32 word = base / 64;
    if (word >= row.mask_words) return 0;
    return masks_of(p.image)[row.mask_begin + u64(token) * row.mask_words + word];
}
// Bits [lo, hi) of the 64 at `base`.
DEVICE u64 range_bits(u32 lo, u32 hi, u32 base) {
    u32 from = lo > base ? least(lo - base, 64u) : 0, to = hi > base ? least(hi - base, 64u) : 0;
    if (from >= to) return 0;
    return (~0ull >> (64 - (to - from))) << from;
}

// The largest logit of a row that saw nothing yet: finite, so that exponents against it are numbers.
constexpr float LOWEST = -1e38f;
DEVICE float top_of(float m) { return m == LOWEST ? -infinity() : m; }
// One step of a row's running softmax: takes the largest score of a tile; what the former sums shrink by, exactly 1 where the
// largest logit stays.
DEVICE float step_of(float& m, float top, float factor) {
    float before = m;
    m = larger(before, top * factor);
    return ex2(before - m);
}

// Two neighbouring results; the pair need not be aligned, nor the second be there.
DEVICE void store_pair(T* to, float a, float b, bool both) {
    u32 pair = pack<T>(a, b);
    if (both && reinterpret_cast<u64>(to) % 4 == 0) {
        *reinterpret_cast<u32*>(to) = pair;
    } else {
        to[0].bits = u16(pair);
        if (both) to[1].bits = u16(pair >> 16);
    }
}
