// What tasks over pages say: which keys each query token of an item sees.
#pragma once

#include "tile.cuh"

// Read where it is needed, rather than held in registers.
DEVICE const Task& task_of(const Attend& p, u32 index) { return tasks_of(p.image)[index]; }

// The visible positions of query token `t` of an item.
DEVICE Reach span_of(const Attend& p, const Task& task, u32 t) {
    return span_at(p, Reach{task.lo, task.hi}, task.first + t);
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

// Goes on to the next part of an item, so many query vectors and value columns; whether there is none.
template <u32 VECTORS, u32 ACROSS>
DEVICE bool next_part(const Attend& p, u32 q_count, u32& from, u32& column) {
    column += ACROSS;
    if (column < p.Dv) return false;
    column = 0, from += VECTORS;
    if (from < q_count * (p.H / p.G)) return false;
    from = 0;
    return true;
}
