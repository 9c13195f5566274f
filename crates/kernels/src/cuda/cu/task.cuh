// What tasks over pages say: which keys each query token of an item sees.
#pragma once

#include "tile.cuh"

// Read where it is needed, rather than held in registers.
DEVICE const Task& task_of(const Attend& p, u32 index) { return tasks_of(p.image)[index]; }

// The visible positions of query token `t` of an item.
DEVICE Reach span_of(const Attend& p, const Task& task, u32 t) {
    i64 at = task.first + t, lo = task.lo, hi = task.hi;
    if (p.window_left >= 0) lo = most(lo, at - p.window_left);
    if (p.flags & CAUSAL) hi = least(hi, at + 1);
    return lo < hi ? Reach{u32(lo), u32(hi)} : Reach{task.lo, task.lo};
}
// Bits of the custom mask for the keys from `base` on, up to the next multiple of 64, and query token `t` of an item.
DEVICE u64 mask_bits(const Attend& p, const Task& task, u32 t, u32 base) {
    u32 word = base / 64;
    if (word >= task.mask_words) return 0;
    return masks_of(p.image)[task.mask_begin + u64(task.q_begin + t) * task.mask_words + word] >> (base % 64);
}
// Bits of the keys from `base` on that some query token of an item sees, by its mask too.
DEVICE u64 seen_bits(const Attend& p, const Task& task, u32 base) {
    u64 bits = 0;
    NO_UNROLL
    for (u32 t = 0; t < task.q_count; t++) {
        Reach span = span_of(p, task, t);
        bits |= mask_bits(p, task, t, base) & range_bits(span.lo, span.hi, base);
    }
    return bits;
}
