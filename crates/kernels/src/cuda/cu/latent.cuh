// Query vectors against latents, on tensor cores: every head reads the same latents, and a latent's first lanes are its value.
//
// A block takes up to ROWS query vectors and walks tiles of KEYS latents through a ring in shared memory. Each tile:
//   scores   a warp multiplies a quarter of the depth; quarters meet in shared memory
//   softmax  a warp has ROWS / 8 query vectors, a lane a key; weights go to shared memory, rounded to the queries' type
//   values   a warp has WIDTH / 8 columns of the result for all query vectors, in registers
// A score sums its quarters in one order, a result takes its keys tile by tile, tiles lie at fixed keys: neither ROWS nor what
// else the block works on changes a bit.
//
// Compile-time choices: Q_TYPE (1 bf16, 2 f16), ROWS (16, 32, 64), DEPTH (lanes of a latent, padded to a multiple of 64), WIDTH
// (lanes of its value, padded to a multiple of 128), STAGES (tiles of the ring), MIN_BLOCKS (blocks an SM).
#pragma once

#include "element.cuh"
#include "list.cuh"

namespace latent {

constexpr u32 THREADS = 256, WARPS = 8;
// Latents a tile: one a lane in the softmax.
constexpr u32 KEYS = 32;
constexpr u32 KEYS_A_WARP = KEYS / WARPS;
// Bytes from one row in shared memory to the next: an odd number of 16-byte pieces, so that eight rows never meet in a bank.
constexpr u32 PITCH = (DEPTH > WIDTH ? DEPTH : WIDTH) * 2 + 16;
constexpr u32 WEIGHT_PITCH = KEYS * 2 + 16;
constexpr u32 QUARTER = DEPTH / 4;
constexpr u32 CHUNKS_A_ROW = DEPTH / 8;
static_assert(DEPTH % 64 == 0 && WIDTH % 128 == 0 && (ROWS == 16 || ROWS == 32 || ROWS == 64), "see above");
// Two groups of warps share a quarter: halves of the keys under 16 query vectors, else halves of the query vectors.
constexpr u32 SCORE_M = ROWS == 64 ? 2 : 1, SCORE_N = ROWS == 16 ? 2 : 4;
constexpr u32 M = ROWS / 16;
constexpr u32 ROWS_A_WARP = ROWS / WARPS;
// Pairs of 8 columns that a warp has.
constexpr u32 PAIRS = WIDTH / WARPS / 16;

// Floats from one row of results to the next.
constexpr u32 RESULT_PITCH = WIDTH + 8;
constexpr u32 RING_AT = ROWS * PITCH;
constexpr u32 SCORES_AT = RING_AT + STAGES * KEYS * PITCH;
constexpr u32 WEIGHTS_AT = SCORES_AT + 4 * ROWS * KEYS * 4;
constexpr u32 ALPHA_AT = WEIGHTS_AT + ROWS * WEIGHT_PITCH;
constexpr u32 LIMIT_AT = ALPHA_AT + ROWS * 4;
constexpr u32 SHARED_BYTES = LIMIT_AT + ROWS * 4;
static_assert(ROWS * RESULT_PITCH * 4 <= SCORES_AT, "results fit in the memory of queries and latents");

struct alignas(8) Two {
    float x, y;
};

// A row's results, by all lanes of a warp.
DEVICE void store_row(Element* to, const float* sums, float factor, u32 C) {
    // -0 becomes 0: whether a hidden key was skipped or weighed 0 must not show.
    if (reinterpret_cast<u64>(to) % 4 == 0 && C % 2 == 0) {
        for (u32 i = lane() * 2; i < C; i += 64)
            *reinterpret_cast<u32*>(to + i) = pack<Element>(sums[i] * factor + 0.0f, sums[i + 1] * factor + 0.0f);
    } else {
        for (u32 i = lane(); i < C; i += 32) to[i] = from_float<Element>(sums[i] * factor + 0.0f);
    }
}

DEVICE void store_state(float* to, const float* sums, u32 C) {
    // States are padded to whole lines, and so are rows of results.
    for (u32 i = lane() * 4; i < C; i += 128) store16(to + i, load16(sums + i));
}

// Where a partial score lies; columns are turned so that neither its writers nor its readers meet in a bank.
DEVICE u32 score_at(u32 quarter, u32 row, u32 key) { return (quarter * ROWS + row) * KEYS + (key ^ ((row & 3) * 8)); }

// `count` lanes at `from`, in elements, into a row of shared memory from lane `at` on; all lanes of a warp.
DEVICE void copy_lanes(u8* row, u32 at, const Element* from, u32 count, bool aligned) {
    if (aligned) {
        for (u32 i = lane() * 8; i < count; i += 256) cp_async_16(row + (at + i) * 2, from + i, true);
    } else {
        for (u32 i = lane(); i < count; i += 32) reinterpret_cast<Element*>(row)[at + i] = from[i];
    }
}
DEVICE void zero_lanes(u8* row, u32 from, u32 to) {
    for (u32 i = from + lane(); i < to; i += 32) reinterpret_cast<u16*>(row)[i] = 0;
}

// Where a query vector lies: C lanes at `nope`, E at `pe`; null for a row of the block that has none.
struct Query {
    const Element* nope;
    const Element* pe;
};

// Sums keys `from..to`, one leaf, for the block's query vectors.
//   query(row) -> Query, in a warp
//   limit(row) -> u32: one past the last key that it sees
//   locate(key) -> const Element*: the latent; asked of keys `from..to` alone
//   state(row, top, sum) -> float: once a row; what the sums over values are multiplied by
//   emit(row, factor, sums): `WIDTH` floats in shared memory; called by all lanes of one warp
// All threads of the block call it; the block's shared memory is free before and after.
template <class QueryOf, class Limit, class Locate, class State, class Emit>
DEVICE void attend(u8* shared, u32 C, u32 E, u32 from, u32 to, float scale, bool aligned, QueryOf query, Limit limit,
                   Locate locate, State state, Emit emit) {
    u32 w = warp(), l = lane();
    u32 D = C + E;
    float* scores = reinterpret_cast<float*>(shared + SCORES_AT);
    float* alphas = reinterpret_cast<float*>(shared + ALPHA_AT);
    u32* limits = reinterpret_cast<u32*>(shared + LIMIT_AT);

    for (u32 row = w; row < ROWS; row += WARPS) {
        Query q = query(row);
        u8* to_row = shared + row * PITCH;
        if (q.nope) {
            copy_lanes(to_row, 0, q.nope, C, aligned);
            copy_lanes(to_row, C, q.pe, E, aligned);
        }
        zero_lanes(to_row, q.nope ? D : 0, DEPTH);
        if (l == 0) limits[row] = q.nope ? limit(row) : 0;
    }

    u32 tile = from / KEYS, tiles = from < to ? (to + KEYS - 1) / KEYS : tile;
    // The latent that this lane knows the place of, if it is one of the first four: of the next tile to be fetched.
    auto place = [&](u32 of_tile) -> u64 {
        u32 key = of_tile * KEYS + w * KEYS_A_WARP + l;
        bool there = l < KEYS_A_WARP && of_tile < tiles && key >= from && key < to;
        return there ? reinterpret_cast<u64>(locate(key)) : 0;
    };
    auto fetch = [&](u32 slot, u64 at) {
        u8* rows = shared + RING_AT + (slot * KEYS + w * KEYS_A_WARP) * PITCH;
        u32 low = u32(at), high = u32(at >> 32);
        if (aligned) {
            UNROLL
            for (u32 i = 0; i < KEYS_A_WARP * CHUNKS_A_ROW / 32; i++) {
                u32 piece = i * 32 + l, row = piece / CHUNKS_A_ROW, lanes = piece % CHUNKS_A_ROW * 8;
                u64 base = u64(shfl_idx(low, row)) | u64(shfl_idx(high, row)) << 32;
                bool there = base != 0 && lanes < D;
                cp_async_16(rows + row * PITCH + lanes * 2, reinterpret_cast<const u8*>(base) + (there ? lanes * 2 : 0),
                            there);
            }
        } else {
            NO_UNROLL
            for (u32 row = 0; row < KEYS_A_WARP; row++) {
                u64 base = u64(shfl_idx(low, row)) | u64(shfl_idx(high, row)) << 32;
                const Element* latent = reinterpret_cast<const Element*>(base);
                Element* to_row = reinterpret_cast<Element*>(rows + row * PITCH);
                NO_UNROLL
                for (u32 i = l; i < DEPTH; i += 32) to_row[i] = base != 0 && i < D ? latent[i] : Element{0};
            }
        }
    };

    u64 next = place(tile);
    UNROLL
    for (u32 stage = 0; stage + 1 < STAGES; stage++) {
        if (tile + stage < tiles) fetch(stage, next);
        cp_async_commit();
        next = place(tile + stage + 1);
    }

    float out[M][PAIRS][2][4];
    UNROLL
    for (u32 m = 0; m < M; m++)
        UNROLL
        for (u32 n = 0; n < PAIRS; n++)
            UNROLL
            for (u32 i = 0; i < 4; i++) out[m][n][0][i] = out[m][n][1][i] = 0.0f;
    float top[ROWS_A_WARP], sum[ROWS_A_WARP];
    UNROLL
    for (u32 i = 0; i < ROWS_A_WARP; i++) top[i] = -infinity(), sum[i] = 0.0f;

    u32 quarter = w % 4, half = w / 4;
    u32 score_row = ROWS == 16 ? 0 : half * (ROWS / 2), score_key = ROWS == 16 ? half * 16 : 0;
    const u8* q_rows = shared + (score_row + l % 16) * PITCH + (quarter * QUARTER + l / 16 * 8) * 2;
    u32 k_row = (score_key + l % 8 + l / 16 * 8) * PITCH + (quarter * QUARTER + l / 8 % 2 * 8) * 2;
    u32 v_row = l % 16 * PITCH + (w * PAIRS * 16 + l / 16 * 8) * 2;
    const u8* p_row = shared + WEIGHTS_AT + l % 16 * WEIGHT_PITCH + l / 16 * 16;

    u32 slot = 0;
    NO_UNROLL
    for (; tile < tiles; tile++) {
        cp_async_wait<STAGES - 2>();
        block_sync();
        {
            u32 ahead = slot == 0 ? STAGES - 1 : slot - 1;
            if (tile + STAGES - 1 < tiles) fetch(ahead, next);
            cp_async_commit();
            next = place(tile + STAGES);
        }
        const u8* latents = shared + RING_AT + slot * KEYS * PITCH;
        slot = slot + 1 == STAGES ? 0 : slot + 1;

        float c[SCORE_M][SCORE_N][4];
        UNROLL
        for (u32 m = 0; m < SCORE_M; m++)
            UNROLL
            for (u32 n = 0; n < SCORE_N; n++)
                UNROLL
                for (u32 i = 0; i < 4; i++) c[m][n][i] = 0.0f;
        UNROLL
        for (u32 step = 0; step < QUARTER / 16; step++) {
            u32 a[SCORE_M][4];
            UNROLL
            for (u32 m = 0; m < SCORE_M; m++) ldmatrix_x4(a[m], q_rows + m * 16 * PITCH + step * 32);
            UNROLL
            for (u32 n = 0; n < SCORE_N; n += 2) {
                u32 b[4];
                ldmatrix_x4(b, latents + k_row + n * 8 * PITCH + step * 32);
                u32 first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
                UNROLL
                for (u32 m = 0; m < SCORE_M; m++) {
                    mma<Element>(c[m][n], a[m], first);
                    mma<Element>(c[m][n + 1], a[m], second);
                }
            }
        }
        UNROLL
        for (u32 m = 0; m < SCORE_M; m++)
            UNROLL
            for (u32 n = 0; n < SCORE_N; n++) {
                u32 row = score_row + m * 16 + l / 4, key = score_key + n * 8 + l % 4 * 2;
                *reinterpret_cast<Two*>(scores + score_at(quarter, row, key)) = Two{c[m][n][0], c[m][n][1]};
                *reinterpret_cast<Two*>(scores + score_at(quarter, row + 8, key)) = Two{c[m][n][2], c[m][n][3]};
            }
        block_sync();

        u32 key = tile * KEYS + l;
        UNROLL
        for (u32 i = 0; i < ROWS_A_WARP; i++) {
            u32 row = w * ROWS_A_WARP + i;
            float s = (scores[score_at(0, row, l)] + scores[score_at(1, row, l)]) +
                      (scores[score_at(2, row, l)] + scores[score_at(3, row, l)]);
            bool seen = key >= from && key < limits[row];
            float most_now = seen ? s * scale : -infinity();
            UNROLL
            for (u32 by = 16; by > 0; by /= 2) {
                float other = shfl_xor(most_now, by);
                // A NaN is passed over here, and makes the sum NaN.
                most_now = other > most_now || most_now != most_now ? other : most_now;
            }
            most_now = most_now > top[i] ? most_now : top[i];
            float reference = most_now == -infinity() ? 0.0f : most_now;
            float p = seen ? ex2(s * scale - reference) : 0.0f;
            float alpha = top[i] == -infinity() ? 1.0f : ex2(top[i] - most_now);
            top[i] = most_now;
            sum[i] = sum[i] * alpha + p;
            reinterpret_cast<Element*>(shared + WEIGHTS_AT + row * WEIGHT_PITCH)[l] = from_float<Element>(p);
            if (l == 0) alphas[row] = alpha;
        }
        block_sync();

        UNROLL
        for (u32 m = 0; m < M; m++) {
            float upper = alphas[m * 16 + l / 4], lower = alphas[m * 16 + l / 4 + 8];
            // Only multiplications by 1 are left out.
            if (warp_all(upper == 1.0f && lower == 1.0f)) continue;
            UNROLL
            for (u32 n = 0; n < PAIRS; n++)
                UNROLL
                for (u32 b = 0; b < 2; b++) {
                    out[m][n][b][0] *= upper, out[m][n][b][1] *= upper;
                    out[m][n][b][2] *= lower, out[m][n][b][3] *= lower;
                }
        }
        UNROLL
        for (u32 step = 0; step < KEYS / 16; step++) {
            u32 a[M][4];
            UNROLL
            for (u32 m = 0; m < M; m++) ldmatrix_x4(a[m], p_row + m * 16 * WEIGHT_PITCH + step * 32);
            UNROLL
            for (u32 n = 0; n < PAIRS; n++) {
                u32 b[4];
                ldmatrix_x4_trans(b, latents + v_row + step * 16 * PITCH + n * 32);
                u32 first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
                UNROLL
                for (u32 m = 0; m < M; m++) {
                    mma<Element>(out[m][n][0], a[m], first);
                    mma<Element>(out[m][n][1], a[m], second);
                }
            }
        }
    }
    cp_async_wait<0>();
    block_sync();

    UNROLL
    for (u32 i = 0; i < ROWS_A_WARP; i++) {
        u32 row = w * ROWS_A_WARP + i;
        UNROLL
        for (u32 by = 16; by > 0; by /= 2) sum[i] += shfl_xor(sum[i], by);
        if (l == 0) alphas[row] = state(row, top[i], sum[i]);
    }
    // Queries and latents are done with: results pass through their memory, so that rows are written as they lie.
    Two* results = reinterpret_cast<Two*>(shared);
    UNROLL
    for (u32 m = 0; m < M; m++)
        UNROLL
        for (u32 n = 0; n < PAIRS; n++)
            UNROLL
            for (u32 b = 0; b < 2; b++) {
                u32 row = m * 16 + l / 4, column = (w * PAIRS + n) * 16 + b * 8 + l % 4 * 2;
                results[(row * RESULT_PITCH + column) / 2] = Two{out[m][n][b][0], out[m][n][b][1]};
                results[((row + 8) * RESULT_PITCH + column) / 2] = Two{out[m][n][b][2], out[m][n][b][3]};
            }
    block_sync();
    NO_UNROLL
    for (u32 row = w; row < ROWS; row += WARPS)
        emit(row, alphas[row], reinterpret_cast<const float*>(shared) + row * RESULT_PITCH);
    block_sync();
}

}  // namespace latent
