// What happens to scores over blocks, and which keys of blocks that are visible in part are seen. Which mods there are is
// known when a kernel is compiled (SCORES of them, SCORE_0 ..; MASKS, MASK_0 ..), their numbers lie in the list's image. A
// mod of the caller's is a function that snippet.cuh defines.
#pragma once

#include "cap.cuh"
#include "gather.cuh"

// flex::ScoreMod and flex::MaskMod, by number.
#define SCORE_CAUSAL 1
#define SCORE_ALIBI 2
#define SCORE_BIAS 3
#define SCORE_CAP 4
#define SCORE_USER 5
#define MASK_CAUSAL 1
#define MASK_WINDOW 2
#define MASK_DOCUMENT 3
#define MASK_USER 4
#ifndef SCORES
#define SCORES 0
#endif
#ifndef MASKS
#define MASKS 0
#endif

// Where distances as integers end: a tile's keys further still fit 32 bits, and no table is as wide.
constexpr i64 AHEAD_MOST = (1ll << 31) - 128;

// One query and one key.
struct Pair {
    u32 batch, head;
    i32 q_idx, k_idx;
    i64 q_offset;
};
DEVICE i64 distance(const Pair& pair) { return i64(pair.k_idx) - (i64(pair.q_idx) + pair.q_offset); }

#ifdef MSTAR_SNIPPET
#include "snippet.cuh"
#endif

template <u32 MOD>
DEVICE bool hides(const Pair& pair) {
    return MOD == SCORE_CAUSAL && distance(pair) > 0;
}
// How far a key is ahead of its query: as an integer, held at the ends of 32 bits, and as a float.
struct Ahead {
    i32 by;
    float far;
};
DEVICE Ahead ahead_of(const Pair& pair) {
    i64 by = distance(pair);
    return Ahead{i32(most(-AHEAD_MOST, least(AHEAD_MOST, by))), float(by)};
}
// `s` after a mod. BINARY: scores are base-2 logits that end in weights of half precision, else natural ones.
template <u32 MOD, bool BINARY>
DEVICE float changed(const Image* image, const ModTable& table, float s, const Pair& pair, const Ahead& ahead) {
    constexpr float UNIT = BINARY ? LOG2_E : 1.0f;
    if (MOD == SCORE_CAP) return BINARY ? capped(cap_of(table.value), s) : table.value * tanh_exact(s / table.value);
    if (MOD == SCORE_ALIBI) return fused(array_of<float>(image, table.floats_at)[pair.head] * UNIT, ahead.far, s);
    if (MOD == SCORE_BIAS) {
        // In words of the image, which is as large as 32 bits count.
        const u32 middle = table.floats_at / 4 + pair.head * (2 * u32(table.a) + 1) + u32(table.a);
        const u32 of = middle + u32(most(-table.a, least(table.a, ahead.by)));
        return fused(load_here(reinterpret_cast<const float*>(image) + of), UNIT, s);
    }
    return s;
}
template <u32 MOD>
DEVICE bool keeps(const Image* image, const ModTable& table, const Pair& pair) {
    i64 d = distance(pair);
    if (MOD == MASK_CAUSAL) return d <= 0;
    if (MOD == MASK_WINDOW) return d >= -i64(table.a) && d <= i64(table.b);
    // a: where the keys' documents start among the integers, behind the queries'.
    const i32* ids = array_of<i32>(image, table.ints_at);
    return MOD != MASK_DOCUMENT || ids[table.a + pair.k_idx] == ids[pair.q_idx];
}
#define MSTAR_TABLE(N) array_of<ModTable>(image, image->table_at)[N]
#define MSTAR_USER(N)                                                                                                \
    pair.batch, pair.head, pair.q_idx, pair.k_idx, pair.q_offset, array_of<float>(image, MSTAR_TABLE(N).floats_at), \
        array_of<i32>(image, MSTAR_TABLE(N).ints_at)

// The scaled score `s` after the call's mods; -inf hides the key. BINARY: see `changed`; what a causal mod hides is then the
// caller's matter, and there are no mods of the user's.
template <bool BINARY>
DEVICE float change(const Image* image, float s, const Pair& pair, const Ahead& ahead) {
#define MSTAR_BUILT_IN(N, MOD)                            \
    if (!BINARY && hides<MOD>(pair)) return -infinity(); \
    s = changed<MOD, BINARY>(image, MSTAR_TABLE(N), s, pair, ahead);
#if SCORES > 0
#if SCORE_0 == SCORE_USER
    s = user_score_0(s, MSTAR_USER(0));
#else
    MSTAR_BUILT_IN(0, SCORE_0)
#endif
#endif
#if SCORES > 1
#if SCORE_1 == SCORE_USER
    s = user_score_1(s, MSTAR_USER(1));
#else
    MSTAR_BUILT_IN(1, SCORE_1)
#endif
#endif
#if SCORES > 2
#if SCORE_2 == SCORE_USER
    s = user_score_2(s, MSTAR_USER(2));
#else
    MSTAR_BUILT_IN(2, SCORE_2)
#endif
#endif
#if SCORES > 3
#if SCORE_3 == SCORE_USER
    s = user_score_3(s, MSTAR_USER(3));
#else
    MSTAR_BUILT_IN(3, SCORE_3)
#endif
#endif
#if SCORES > 4
#if SCORE_4 == SCORE_USER
    s = user_score_4(s, MSTAR_USER(4));
#else
    MSTAR_BUILT_IN(4, SCORE_4)
#endif
#endif
#if SCORES > 5
#if SCORE_5 == SCORE_USER
    s = user_score_5(s, MSTAR_USER(5));
#else
    MSTAR_BUILT_IN(5, SCORE_5)
#endif
#endif
#if SCORES > 6
#if SCORE_6 == SCORE_USER
    s = user_score_6(s, MSTAR_USER(6));
#else
    MSTAR_BUILT_IN(6, SCORE_6)
#endif
#endif
#if SCORES > 7
#if SCORE_7 == SCORE_USER
    s = user_score_7(s, MSTAR_USER(7));
#else
    MSTAR_BUILT_IN(7, SCORE_7)
#endif
#endif
    return s;
}

// Whether the masks let a key of a block that is visible in part be seen.
DEVICE bool keep(const Image* image, const Pair& pair) {
#if MASKS > 0
#if MASK_0 == MASK_USER
    if (!user_mask_0(MSTAR_USER(SCORES))) return false;
#else
    if (!keeps<MASK_0>(image, MSTAR_TABLE(SCORES), pair)) return false;
#endif
#endif
#if MASKS > 1
#if MASK_1 == MASK_USER
    if (!user_mask_1(MSTAR_USER(SCORES + 1))) return false;
#else
    if (!keeps<MASK_1>(image, MSTAR_TABLE(SCORES + 1), pair)) return false;
#endif
#endif
#if MASKS > 2
#if MASK_2 == MASK_USER
    if (!user_mask_2(MSTAR_USER(SCORES + 2))) return false;
#else
    if (!keeps<MASK_2>(image, MSTAR_TABLE(SCORES + 2), pair)) return false;
#endif
#endif
#if MASKS > 3
#if MASK_3 == MASK_USER
    if (!user_mask_3(MSTAR_USER(SCORES + 3))) return false;
#else
    if (!keeps<MASK_3>(image, MSTAR_TABLE(SCORES + 3), pair)) return false;
#endif
#endif
#if MASKS > 4
#if MASK_4 == MASK_USER
    if (!user_mask_4(MSTAR_USER(SCORES + 4))) return false;
#else
    if (!keeps<MASK_4>(image, MSTAR_TABLE(SCORES + 4), pair)) return false;
#endif
#endif
#if MASKS > 5
#if MASK_5 == MASK_USER
    if (!user_mask_5(MSTAR_USER(SCORES + 5))) return false;
#else
    if (!keeps<MASK_5>(image, MSTAR_TABLE(SCORES + 5), pair)) return false;
#endif
#endif
#if MASKS > 6
#if MASK_6 == MASK_USER
    if (!user_mask_6(MSTAR_USER(SCORES + 6))) return false;
#else
    if (!keeps<MASK_6>(image, MSTAR_TABLE(SCORES + 6), pair)) return false;
#endif
#endif
#if MASKS > 7
#if MASK_7 == MASK_USER
    if (!user_mask_7(MSTAR_USER(SCORES + 7))) return false;
#else
    if (!keeps<MASK_7>(image, MSTAR_TABLE(SCORES + 7), pair)) return false;
#endif
#endif
    return true;
}
