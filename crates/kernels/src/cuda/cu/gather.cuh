// Where an item's queries, keys and values lie, by what its list is over.
#pragma once

#include "list.cuh"

// What a list is over (work.rs: Stored).
constexpr u32 PAGES = 0, SEGMENTS = 1, BLOCKS = 2, LATENTS = 3;

// A row's queries: lane = token * group + head of the group.
struct Queries {
    u64 at;
    i64 token, head;  // elements from one token, one head, to the next
    u64 pe_at;        // over latents: the other lanes of each query
    i64 pe_token, pe_head;
    // For mods: batch, query head of lane 0, index of query token 0 in its batch.
    u32 batch, first_head, q_idx;
};

template <u32 OVER>
DEVICE Queries queries_of(const Attend& p, const Row& row, u32 q_begin, u32 kv_head, u32 element) {
    Queries q;
    u32 group = p.H / p.G;
    q.pe_at = 0, q.pe_token = 0, q.pe_head = 0;
    if (OVER == BLOCKS) {
        u32 first = row.q_begin, plane = p.q_len ? first / p.q_len : 0;
        q.q_idx = (p.q_len ? first % p.q_len : 0) + q_begin;
        // Rows of one head each have a plane a head; the others have one a batch, and all heads.
        u32 heads = p.flags & PER_HEAD ? p.heads : 1;
        q.batch = plane / heads;
        q.first_head = p.flags & PER_HEAD ? plane % heads : kv_head * group;
        i64 first_element = i64(q.batch) * p.q.stride[0] + i64(q.first_head) * p.q.stride[1] + i64(q.q_idx) * p.q.stride[2];
        q.at = p.q.at + u64(first_element * i64(element));
        q.token = p.q.stride[2], q.head = p.q.stride[1];
        return q;
    }
    q.batch = 0, q.first_head = kv_head * group, q.q_idx = q_begin;
    u64 token = u64(row.q_begin) + q_begin;
    q.at = p.q.at + u64((i64(token) * p.q.stride[0] + i64(q.first_head) * p.q.stride[1]) * i64(element));
    q.token = p.q.stride[0], q.head = p.q.stride[1];
    if (OVER == LATENTS) {
        q.pe_at = p.q_pe.at +
                  u64((i64(token) * p.q_pe.stride[0] + i64(q.first_head) * p.q_pe.stride[1]) * i64(element));
        q.pe_token = p.q_pe.stride[0], q.pe_head = p.q_pe.stride[1];
    }
    return q;
}

// A row's keys under one key head.
struct Keys {
    const i32* pages;  // the row's ids
    const u8* flags;   // over blocks: beside them, or null
    const i32* positions;
    u64 k, v, k_prefix, v_prefix;  // first elements, the head's share included
    u32 S, kv_offset;
    i64 k_page, k_slot, v_page, v_slot;  // bytes; packed keys have slots alone
    i64 kp_page, kp_slot, vp_page, vp_slot;
    Segment segment;
    bool prefix_pages;
};

// Where one key and its value begin.
struct Place2 {
    u64 k, v;
};

template <u32 OVER>
DEVICE Keys keys_of(const Attend& p, u32 row_index, const Row& row, u32 kv_head, u32 element) {
    Keys keys;
    const Image* image = p.image;
    i64 size = element;
    keys.pages = pages_of(image) + row.page_begin;
    keys.flags = nullptr, keys.positions = nullptr;
    keys.S = p.S, keys.kv_offset = row.kv_offset;
    keys.k_prefix = keys.v_prefix = 0;
    keys.kp_page = keys.kp_slot = keys.vp_page = keys.vp_slot = 0;
    keys.prefix_pages = false;
    keys.segment = Segment{0, 0, 0, 0};
    if (OVER == PAGES || OVER == LATENTS) {
        // Latents have one head, and the value is the key's first lanes.
        i64 head = OVER == PAGES ? i64(kv_head) : 0;
        keys.k = p.k.at + u64(head * p.k.stride[2] * size);
        keys.k_page = p.k.stride[0] * size, keys.k_slot = p.k.stride[1] * size;
        keys.v = p.v.at + u64(head * p.v.stride[2] * size);
        keys.v_page = p.v.stride[0] * size, keys.v_slot = p.v.stride[1] * size;
    } else if (OVER == SEGMENTS) {
        keys.segment = segments_of(image)[row_index];
        keys.k = p.k.at + u64(i64(kv_head) * p.k.stride[1] * size);
        keys.v = p.v.at + u64(i64(kv_head) * p.v.stride[1] * size);
        keys.k_page = keys.v_page = 0;
        keys.k_slot = p.k.stride[0] * size, keys.v_slot = p.v.stride[0] * size;
        keys.prefix_pages = p.flags & PREFIX_PAGES;
        u32 head = keys.prefix_pages ? 2 : 1, slot = keys.prefix_pages ? 1 : 0;
        keys.k_prefix = p.k_prefix.at + u64(i64(kv_head) * p.k_prefix.stride[head] * size);
        keys.v_prefix = p.v_prefix.at + u64(i64(kv_head) * p.v_prefix.stride[head] * size);
        keys.kp_page = p.k_prefix.stride[0] * size, keys.kp_slot = p.k_prefix.stride[slot] * size;
        keys.vp_page = p.v_prefix.stride[0] * size, keys.vp_slot = p.v_prefix.stride[slot] * size;
    } else {
        u32 plane = p.q_len ? row.q_begin / p.q_len : 0, heads = p.flags & PER_HEAD ? p.heads : 1;
        i64 batch = plane / heads;
        i64 head = p.flags & PER_HEAD ? i64(plane % heads) / i64(p.heads / p.kv_heads) : i64(kv_head);
        keys.k = p.k.at + u64((batch * p.k.stride[0] + head * p.k.stride[1]) * size);
        keys.v = p.v.at + u64((batch * p.v.stride[0] + head * p.v.stride[1]) * size);
        keys.k_slot = p.k.stride[2] * size, keys.v_slot = p.v.stride[2] * size;
        keys.k_page = keys.k_slot * i64(p.S), keys.v_page = keys.v_slot * i64(p.S);
        if (image->flag_at) keys.flags = array_of<u8>(image, image->flag_at) + row.page_begin;
        if (image->position_at) keys.positions = array_of<i32>(image, image->position_at) + row.page_begin;
    }
    return keys;
}

// The key at absolute position `at` of the row (over blocks: the at-th visible key), which is below kv_len.
template <u32 OVER>
DEVICE Place2 key_at(const Keys& keys, u32 at) {
    if (OVER == SEGMENTS) {
        if (at >= keys.segment.prefix_len) {
            i64 slot = i64(at - keys.segment.prefix_len) + keys.segment.fresh_begin;
            return Place2{keys.k + u64(slot * keys.k_slot), keys.v + u64(slot * keys.v_slot)};
        }
        u64 slot = u64(at) + keys.segment.prefix_begin;
        i64 page = 0;
        if (keys.prefix_pages) page = keys.pages[slot / keys.S], slot %= keys.S;
        return Place2{keys.k_prefix + u64(page * keys.kp_page + i64(slot) * keys.kp_slot),
                      keys.v_prefix + u64(page * keys.vp_page + i64(slot) * keys.vp_slot)};
    }
    u32 offset = at - keys.kv_offset;
    i64 page = keys.pages[offset / keys.S], slot = offset % keys.S;
    return Place2{keys.k + u64(page * keys.k_page + slot * keys.k_slot),
                  keys.v + u64(page * keys.v_page + slot * keys.v_slot)};
}

// The scale, of `scales` [P, S, G], of the key or value at absolute position `at` of a row over pages.
DEVICE float key_scale(const View& scales, const Keys& keys, u32 head, u32 at) {
    const u32 offset = at - keys.kv_offset;
    const i64 page = keys.pages[offset / keys.S], slot = offset % keys.S;
    return reinterpret_cast<const float*>(scales.at)[page * scales.stride[0] + slot * scales.stride[1] + i64(head) * scales.stride[2]];
}

// Over blocks: which key of the sequence the at-th visible key is, and whether a mask decides whether it is seen.
struct Key {
    i32 index;
    bool partial;
};
DEVICE Key block_key(const Keys& keys, u32 at) {
    u32 rank = at / keys.S, slot = at % keys.S;
    i32 block = keys.positions ? keys.positions[rank] : keys.pages[rank];
    return Key{i32(block * i64(keys.S) + slot), keys.flags && keys.flags[rank] != 0};
}

// A row's visible keys, from the item's first query token to its last: absolute positions [lo, hi) within its leaves.
struct Reach {
    u32 lo, hi;
};
DEVICE Reach reach_of(const Attend& p, const Row& row, const Item& item) {
    i64 first = i64(row.kv_len) - i64(row.q_len) + i64(item.q_begin), last = first + i64(item.q_count) - 1;
    i64 lo = row.kv_begin, hi = row.kv_len;
    if (p.window_left >= 0) lo = most(lo, first - p.window_left);
    if (p.flags & CAUSAL) hi = least(hi, last + 1);
    lo = most(lo, i64(item.leaf_begin) * i64(row.leaf_keys));
    hi = least(hi, i64(item.leaf_end) * i64(row.leaf_keys));
    return lo < hi ? Reach{u32(lo), u32(hi)} : Reach{row.kv_begin, row.kv_begin};
}
