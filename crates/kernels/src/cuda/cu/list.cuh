// A work list on a device, and the parameters of the kernels that walk it. `exec/` has the same structures in Rust and
// asserts the same sizes; `work.rs` says what every field means.
#pragma once

#include "ptx.cuh"

// Keys a leaf of a row that is never cut.
constexpr u32 ONE_LEAF = 1u << 31;
// `Member::partial` of an item that writes the row's result itself.
constexpr u64 DIRECT = ~0ull;
// `Row::mask_begin` of a row without a mask.
constexpr u64 NO_MASK = ~0ull;

struct Row {
    u64 mask_begin;
    u32 mask_words, q_begin, q_len, kv_len, kv_begin, kv_offset, page_begin, page_count, family, leaf_keys;
};
struct Item {
    u64 cost;
    u32 member_begin, member_count, kv_head_begin, kv_head_count, q_begin, q_count, leaf_begin, leaf_end;
};
struct Member {
    u64 partial;
    u32 row, waits;
};
struct Merge {
    u32 row, q_begin, q_count, kv_head_begin, kv_head_count, part_begin, part_count, reserved;
};
struct Part {
    u64 partial;
    u32 index, level;
};
struct Segment {
    u32 prefix_len, prefix_begin, fresh_begin, reserved;
};
static_assert(sizeof(Row) == 48 && sizeof(Item) == 40 && sizeof(Member) == 16, "as in work.rs");
static_assert(sizeof(Merge) == 32 && sizeof(Part) == 16 && sizeof(Segment) == 16, "as in work.rs");

// What a list's image starts with: counts, and where its arrays lie, in bytes from the image's start (multiples of 16).
struct Image {
    u32 rows, items, merges, tokens;
    u32 row_at, item_at, member_at, merge_at, part_at, page_at, mask_at, segment_at;
    // Beside the pages of a list over blocks: u8, not 0 where a mask decides; i32, which block of the sequence each is
    // (0 bytes: the page id itself). `table_at`: what mods read (ModTable).
    u32 flag_at, position_at, table_at;
    u32 few;    // items of few query vectors (families Decode and Latent), which come first
    u32 fused;  // of the merges, the last ones, which the decode kernel does where it has tickets
    u32 lanes;  // over latents, most query vectors of an item with a task
    u32 least;  // over latents, fewest query vectors of an item; 0: not counted
    u32 reserved;
};
static_assert(sizeof(Image) == 80, "as in exec/image.rs");

// An item of few query vectors over pages: all that its block needs to know. They lie right behind the header.
struct alignas(16) Task {
    u32 lo, hi;                // absolute positions of the keys that some query of the item sees; never empty
    u32 page_begin, kv_offset;
    u32 head, mask_words;      // key head; 0: no custom mask
    u32 leaf_keys;             // keys a leaf
    u32 leaf_first, leaf_end;  // the row's leaves
    u32 ticket;                // where the head's tickets start
    u32 token, q_begin;        // first query token, in the batch and in the row
    u32 q_count, level;        // query tokens; an item is up to 1 << level leaves, a node of the row's tree
    u64 mask_begin;
    u64 state;                 // of the first leaf and key head, in floats from the start of the workspace
    i64 first;                 // absolute position of the first query token
};
static_assert(sizeof(Task) == 80, "as in work.rs");

template <class T>
DEVICE const T* array_of(const Image* image, u32 at) {
    return reinterpret_cast<const T*>(reinterpret_cast<const u8*>(image) + at);
}
DEVICE const Row* rows_of(const Image* image) { return array_of<Row>(image, image->row_at); }
DEVICE const Item* items_of(const Image* image) { return array_of<Item>(image, image->item_at); }
DEVICE const Member* members_of(const Image* image) { return array_of<Member>(image, image->member_at); }
DEVICE const Merge* merges_of(const Image* image) { return array_of<Merge>(image, image->merge_at); }
DEVICE const Part* parts_of(const Image* image) { return array_of<Part>(image, image->part_at); }
DEVICE const Task* tasks_of(const Image* image) { return array_of<Task>(image, sizeof(Image)); }
DEVICE const i32* pages_of(const Image* image) { return array_of<i32>(image, image->page_at); }
DEVICE const u64* masks_of(const Image* image) { return array_of<u64>(image, image->mask_at); }
DEVICE const Segment* segments_of(const Image* image) { return array_of<Segment>(image, image->segment_at); }

// A tensor whose innermost axis is contiguous: its first element, and the elements between neighbours of its outer axes.
//   q [T, H, D]: token, head. k, v in pages [P, S, G, D]: page, slot, head; packed [U, G, D]: token, head;
//   latents [P, S, C + E]: page, slot. Over blocks: q [B, H, L, D]: batch, head, token; k, v [B, G, M, D]: the same.
struct View {
    u64 at;
    i64 stride[3];
};
// A result [T, H, ..] (or [T, H]): as `Out` and `Planes` of the CPU's executor. plane_tokens is ~0 when there is one plane.
struct Place {
    u64 at;  // 0: not wanted
    i64 token, head;
    u64 plane_tokens, plane_heads;
    i64 plane_batch, plane_head;
};
DEVICE i64 place_of(const Place& place, u64 token, u64 head) {
#ifdef ONE_PLANE
    // Of a unit whose results are never in planes, to spare the divisions.
    return i64(token) * place.token + i64(head) * place.head;
#endif
    if (place.plane_tokens == ~0ull) return i64(token) * place.token + i64(head) * place.head;
    u64 plane = token / place.plane_tokens;
    return i64(plane / place.plane_heads) * place.plane_batch + i64(plane % place.plane_heads) * place.plane_head +
           i64(token % place.plane_tokens) * place.token + i64(head) * place.head;
}

// One layer over a list.
struct Attend {
    const Image* image;
    float* partials;           // states that items leave for merges
    View q, q_pe;              // q_pe [T, H, E]: over latents, the other lanes of each query
    View k, v;                 // over latents, v is k
    View k_prefix, v_prefix;   // over segments: prefixes, packed or in pages
    Place o, lse, max_scores;  // of the query type; f32; f32
    const float* sinks;        // [H], or null
    const float* slopes;       // [H], or null
    i64 window_left;           // -1: none
    i64 q_offset;              // over blocks: position of query 0 among the keys
    u32 H, G, D, Dv, S;        // heads, key heads, widths (latents: D = C + E, Dv = C), slots a page or block
    u32 q_len, kv_len;         // over blocks: L and M
    u32 heads, kv_heads;       // over blocks: H and G of the tensors, where rows may be of one head each
    float scale;               // sm_scale
    float soft_cap;            // 0: none
    u32 flags;                 // CAUSAL, PER_HEAD, ..
    u32 walk;                  // which items this launch walks: ALL, FEW, MANY; of merges, the pieces that each is cut into
    u32 empties;               // not 0: no merge is launched behind this; those that there are have no parts (leave_empties)
    u32* tickets;              // of the decode kernel: zeros, which it leaves as zeros; null where merges are launched behind it
    View k_scales, v_scales;   // of keys and values in e4m3 [P, S, G], f32: page, slot, head
};
static_assert(sizeof(View) == 32 && sizeof(Place) == 56 && sizeof(Attend) == 536, "as in exec/params.rs");
constexpr u32 CAUSAL = 1;
// Over blocks: rows are of one query head each.
constexpr u32 PER_HEAD = 2;
// Prefixes lie in pages.
constexpr u32 PREFIX_PAGES = 4;
// Bases and outer strides of q, q_pe, keys, values and prefixes are multiples of 16 bytes.
constexpr u32 ALIGNED = 8;
// The kernel has a map of the keys.
constexpr u32 MAPPED = 16;

constexpr u32 ALL = 0, FEW = 1, MANY = 2;
struct Span {
    u32 begin, end;
};
// The items that a launch walks: block b takes begin + b, and every grid_x()-th after it.
DEVICE Span items_of(const Attend& p) {
    u32 few = p.image->few, items = p.image->items;
    return Span{p.walk == MANY ? few : 0, p.walk == FEW ? few : items};
}

// The state of `lanes` query vectors of one key head, in f32: [m: lanes][l: lanes][acc: lanes x width], each part padded to
// STATE_LINE floats, lanes' accumulators `state_width` apart. m is in base-2 units; -inf for a lane that saw nothing.
constexpr u32 STATE_LINE = 16;
DEVICE u32 state_width(u32 width) { return (width + STATE_LINE - 1) / STATE_LINE * STATE_LINE; }
DEVICE u32 state_lanes(u32 lanes) { return (lanes + STATE_LINE - 1) / STATE_LINE * STATE_LINE; }
DEVICE u64 state_len(u32 lanes, u32 width) { return 2ull * state_lanes(lanes) + u64(lanes) * state_width(width); }

// A mod's numbers, one a mod of the call in order (score mods first): what it points at lies in the image.
struct ModTable {
    u32 floats_at, ints_at;  // bytes from the image's start
    i32 a, b;                // left, right; W; lengths
    float value;             // the cap
    u32 reserved[3];
};
