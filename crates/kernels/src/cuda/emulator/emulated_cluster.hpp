// cluster.cuh's names for a host compiler. Stricter than a device: what is stored in a peer's memory is there when it was handed over and not
// before, arrivals and what is sent come when nothing else can go on, and a block that ends must have heard of all that was done to it.
#pragma once

namespace emulated {

// A place of a peer, as a device numbers it: the block's rank in the upper byte.
struct Reached {
    Block& block;
    u8* at;
};
static inline Block& peer(u32 rank) {
    Cluster& cluster = *now->block->cluster;
    if (rank >= cluster.blocks.size()) fail("a block that the cluster does not have");
    Block& block = cluster.blocks[rank];
    if (&block != now->block && cluster.generation == 0) fail("a peer is touched that may not have begun: cluster_sync comes first");
    if (block.left == 0) fail("a peer is touched that has ended");
    return block;
}
static inline Reached reach(Remote place, u32 bytes) {
    Block& block = peer(place.at >> 24);
    const u32 offset = place.at & 0xffffff;
    if (offset + bytes > block.shared_bytes) fail("a remote place beyond shared memory");
    if (offset % (bytes < 16 ? bytes : 16)) fail("a remote place that is not aligned");
    return Reached{block, block.shared + offset};
}
// The barrier of the cluster that what this thread does now comes before.
static inline u32 next_barrier() { return now->clusters + 1; }
static inline void touch(Block& block) {
    if (&block != now->block) block.touched[now->block->rank] = next_barrier();
}

static inline void store(Remote to, const void* value, u32 bytes) {
    Reached there = reach(to, bytes);
    touch(there.block);
    std::memset(there.at, 0xff, bytes);
    auto held = std::make_shared<U4>();
    std::memcpy(held.get(), value, bytes);
    now->block->stores.push_back({there.at, held.get(), bytes, nullptr, held});
}
static inline void load(void* to, Remote from, u32 bytes) {
    Reached there = reach(from, bytes);
    touch(there.block);
    land(now->block->stores);  // which a thread sees of its own
    std::memcpy(to, there.at, bytes);
}
static inline Reached at_mark(Remote mark) {
    Reached there = reach(mark, sizeof(Mark));
    phase_of(reinterpret_cast<Mark*>(there.at));
    return there;
}
static inline void send(Remote to, Copy copy, Remote mark, Block* from) {
    if (to.at >> 24 != mark.at >> 24) fail("what is sent, and the mark where it is counted, are of one block");
    Reached there = reach(to, copy.bytes), counted = at_mark(mark);
    copy.to = there.at;
    std::memset(there.at, 0xff, copy.bytes);
    const u32 barrier = &there.block == now->block ? 0 : NONE;
    now->block->cluster->late.push_back({{copy}, counted.at, &landed, copy.bytes, &there.block, from, barrier});
}
static inline void send_value(Remote to, const void* value, u32 bytes, Remote mark) {
    auto held = std::make_shared<U4>();
    std::memcpy(held.get(), value, bytes);
    send(to, {nullptr, held.get(), bytes, nullptr, held}, mark, nullptr);
}
static inline void arrive_at(Remote mark, bool handing) {
    Reached there = at_mark(mark);
    Block& own = *now->block;
    // Who waits for this has waited for what the block did before; that no thread of it goes on afterwards is not followed.
    there.block.touched.erase(own.rank);
    Late late{{}, there.at, &arrived, 0, &there.block, nullptr, next_barrier(), handing};
    if (handing) late.copies.swap(own.stores);
    own.cluster->late.push_back(std::move(late));
}
static inline void boxes(u32 blocks, void* to, const TensorMap& map, const i32* corner, u32 axes, Mark* mark) {
    if (blocks == 0 || blocks >> now->block->cluster->blocks.size()) fail("boxes go to blocks of the cluster, and to one at least");
    for (u32 rank = 0; blocks >> rank; rank++) {
        if (blocks >> rank & 1) box(peer(rank), to, map, corner, axes, mark);
    }
}

}  // namespace emulated

DEVICE u32 cluster_rank() { return emulated::now->block->rank; }
DEVICE u32 cluster_size() { return u32(emulated::now->block->cluster->blocks.size()); }
DEVICE void cluster_arrive() {
    emulated::exchange(emulated::MEET, nullptr, 0);
    emulated::Fiber* self = emulated::now;
    if (self->arrived) emulated::fail("cluster_arrive twice, with no cluster_wait in between");
    self->arrived = true;
    self->clusters++;
    emulated::land(self->block->stores);
    self->block->cluster->arrived++;
    emulated::cluster_barrier(*self->block->cluster);
}
DEVICE void cluster_wait() {
    emulated::exchange(emulated::MEET, nullptr, 0);
    emulated::Fiber* self = emulated::now;
    if (!self->arrived) emulated::fail("cluster_wait without cluster_arrive");
    const u32& generation = self->block->cluster->generation;
    while (generation < self->clusters) emulated::wait_until_changed(&generation, self->clusters - 1);
    self->arrived = false;
}
DEVICE void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

DEVICE Remote remote_of(const void* at, u32 rank) {
    const u32 offset = shared_address(at);
    if (rank >= cluster_size()) emulated::fail("a block that the cluster does not have");
    if (offset >= emulated::now->block->shared_bytes) emulated::fail("a remote place is that of something in shared memory");
    return Remote{rank << 24 | offset};
}
DEVICE void remote_store4(Remote to, u32 v) { emulated::store(to, &v, 4); }
DEVICE void remote_store16(Remote to, U4 v) { emulated::store(to, &v, 16); }
DEVICE u32 remote_load4(Remote from) {
    u32 r;
    emulated::load(&r, from, 4);
    return r;
}
DEVICE U4 remote_load16(Remote from) {
    U4 r;
    emulated::load(&r, from, 16);
    return r;
}
DEVICE void remote_send4(Remote to, u32 v, Remote mark) { emulated::send_value(to, &v, 4, mark); }
DEVICE void remote_send16(Remote to, U4 v, Remote mark) { emulated::send_value(to, &v, 16, mark); }
DEVICE void remote_send(Remote to, const void* from, u32 bytes, Remote mark) {
    if (bytes == 0 || bytes % 16 || shared_address(from) % 16 || to.at % 16) emulated::fail("what is sent lies on 16 bytes, and is so many");
    if (shared_address(from) + bytes > emulated::now->block->shared_bytes) emulated::fail("what is sent lies in shared memory");
    emulated::send(to, {nullptr, from, bytes}, mark, emulated::now->block);
}
DEVICE void remote_async_fence() {}
DEVICE void remote_arrive(Remote mark) { emulated::arrive_at(mark, false); }
DEVICE void remote_arrive_handing(Remote mark) { emulated::arrive_at(mark, true); }
DEVICE void mark_wait_handed(Mark* mark, u32 parity) { emulated::wait(mark, parity, true); }
DEVICE void box_2d_to(u32 blocks, void* to, const TensorMap& map, i32 x, i32 y, Mark* mark) {
    const i32 corner[2] = {x, y};
    emulated::boxes(blocks, to, map, corner, 2, mark);
}
DEVICE void box_3d_to(u32 blocks, void* to, const TensorMap& map, i32 x, i32 y, i32 z, Mark* mark) {
    const i32 corner[3] = {x, y, z};
    emulated::boxes(blocks, to, map, corner, 3, mark);
}
DEVICE void box_4d_to(u32 blocks, void* to, const TensorMap& map, i32 x, i32 y, i32 z, i32 w, Mark* mark) {
    const i32 corner[4] = {x, y, z, w};
    emulated::boxes(blocks, to, map, corner, 4, mark);
}
