// Words for blocks that run side by side as a cluster, and reach into each other's shared memory.
//
// A kernel made by MSTAR_KERNEL_OF_CLUSTERS (ptx.cuh) is launched as any other, with a grid whose x is a multiple of the cluster: blocks
// that follow each other along x are one. Whoever uses these words keeps to four rules, which the emulator holds it to:
//   - Marks are made, then `cluster_sync`, and then a peer is touched: before that it may not have begun.
//   - A block ends when no peer touches it any more: behind a last `cluster_sync`, or when it has waited at marks of its own for all that
//     is sent to it. What is under way by itself (boxes, what is sent) no `cluster_sync` waits for, marks alone do.
//   - Bytes that are sent to a mark are expected there, by an arrival of the same phase; they may come before it.
//   - What is stored is handed over: `remote_arrive_handing` and `mark_wait_handed`, or `cluster_sync`. Both are dear (all that the thread
//     wrote is waited for, the first-level cache emptied): tiles are better sent, and room is given back by `remote_arrive`.
#pragma once
#include "hopper.cuh"

// A place in the shared memory of a block of the cluster.
struct Remote {
    u32 at;
};
DEVICE Remote remote_behind(Remote place, u32 bytes) { return Remote{place.at + bytes}; }

#ifdef MSTAR_EMULATED
#include "emulated_cluster.hpp"
#else

// ---- the cluster ----
// Which block of its cluster this is, and how many there are.
DEVICE u32 cluster_rank() {
    u32 r;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
DEVICE u32 cluster_size() {
    u32 r;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(r));
    return r;
}
// A barrier of all threads of the cluster that have not ended, in two halves: what was written before a thread arrives is seen by those who
// have waited. A thread calls both in turn, with all of its warp.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

// ---- a peer's memory ----
// Where block `rank` of the cluster has what this one has at `at`; its own too.
DEVICE Remote remote_of(const void* at, u32 rank) {
    Remote r;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r.at) : "r"(shared_address(at)), "r"(rank));
    return r;
}
DEVICE void remote_store4(Remote to, u32 v) { asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(to.at), "r"(v) : "memory"); }
DEVICE void remote_store16(Remote to, U4 v) {
    asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to.at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE u32 remote_load4(Remote from) {
    u32 r;
    asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(r) : "r"(from.at) : "memory");
    return r;
}
DEVICE U4 remote_load16(Remote from) {
    U4 r;
    asm volatile("ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(from.at) : "memory");
    return r;
}
// Stores some time, and then counts the bytes at `mark`, which lies in the same block: who has waited there sees them.
DEVICE void remote_send4(Remote to, u32 v, Remote mark) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to.at), "r"(v), "r"(mark.at) : "memory");
}
DEVICE void remote_send16(Remote to, U4 v, Remote mark) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to.at), "r"(v.x),
                 "r"(v.y), "r"(v.z), "r"(v.w), "r"(mark.at)
                 : "memory");
}
// The same for so many bytes of this block's memory, a multiple of 16, from and to a multiple of 16. What this block wrote there was fenced
// (`async_fence`), and stays until they have landed. By one thread.
DEVICE void remote_send(Remote to, const void* from, u32 bytes, Remote mark) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to.at),
                 "r"(shared_address(from)), "r"(bytes), "r"(mark.at)
                 : "memory");
}
// As `async_fence`, of what this thread stored in any block's memory.
DEVICE void remote_async_fence() { asm volatile("fence.proxy.async.shared::cluster;" ::: "memory"); }

// ---- a peer's marks ----
// Arrives at a mark of any block. It says that this thread has read what it read, and nothing of what it stored.
DEVICE void remote_arrive(Remote mark) { asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mark.at) : "memory"); }
// The same, and hands over what it stored.
DEVICE void remote_arrive_handing(Remote mark) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(mark.at) : "memory");
}
// As `mark_wait`, where peers hand over.
DEVICE void mark_wait_handed(Mark* mark, u32 parity) {
    u32 passed, at = shared_address(mark);
    do {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(passed)
                     : "r"(at), "r"(parity)
                     : "memory");
    } while (!passed);
}

// ---- boxes for several ----
// As `box_2d` .. `box_4d`, to each block of the cluster whose bit is in `blocks`: at `to`, and counted at `mark`, as that block has them.
DEVICE void box_2d_to(u32 blocks, void* to, const TensorMap& map, i32 x, i32 y, Mark* mark) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(
            shared_address(to)),
        "l"(&map), "r"(x), "r"(y), "r"(shared_address(mark)), "h"(u16(blocks))
        : "memory");
}
DEVICE void box_3d_to(u32 blocks, void* to, const TensorMap& map, i32 x, i32 y, i32 z, Mark* mark) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(
            shared_address(to)),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(mark)), "h"(u16(blocks))
        : "memory");
}
DEVICE void box_4d_to(u32 blocks, void* to, const TensorMap& map, i32 x, i32 y, i32 z, i32 w, Mark* mark) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(
            shared_address(to)),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(mark)), "h"(u16(blocks))
        : "memory");
}
#endif
