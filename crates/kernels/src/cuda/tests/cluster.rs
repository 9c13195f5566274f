//! Words of blocks that reach into each other (`cu/cluster.cuh`), used rightly and, on the emulated device, wrongly.

use bytemuck::{Pod, Zeroable};

use super::products::is_hopper;
use super::*;
use crate::TensorRef;
use crate::cuda::jit::{self, Key, Unit};
use crate::cuda::tensor_map::{Boxes, Swizzle, TensorMap};

/// Each block asks for a box for all, and gives the next one a piece of every thread's, what lies in its memory, and a word that is stored
/// there; then it reads one of the next one's. Again and again, in the same memory.
const TALK: Unit = Unit::of(
    "talk.cu",
    r#"
#include "cluster.cuh"
struct Params { u64 out; u64 rounds; u64 unused[6]; TensorMap map; };
struct Marks { Mark boxed, sent, stored, free; };
constexpr u32 BOX = 8 * 128, PIECES = 128 * 16;
MSTAR_KERNEL_OF_CLUSTERS(talk, Params, 128, 1, CLUSTER) {
    SHARED(memory);
    u8 *boxed = memory, *pieces = memory + CLUSTER * BOX, *copied = pieces + PIECES, *mine = copied + PIECES, *stored = mine + PIECES;
    Marks& marks = *reinterpret_cast<Marks*>(stored + 512);
    const u32 t = thread_x(), next = (cluster_rank() + 1) % CLUSTER, all = (1 << CLUSTER) - 1;
    if (t == 0) {
        mark_init(&marks.boxed, 1);
        mark_init(&marks.sent, 1);
        mark_init(&marks.stored, 128);
        mark_init(&marks.free, CLUSTER * 128);
        marks_ready();
    }
    cluster_sync();
    for (u32 round = 0; round < p.rounds; round++) {
        const u32 parity = round % 2, value = (round * grid_x() + block_x()) * 128 + t;
        if (round > 0) mark_wait(&marks.free, parity ^ 1);
        store16(mine + 16 * t, U4{value, value + 1, value + 2, value + 3});
        async_fence();
        cluster_sync();
        if (t == 0) {
            mark_arrive_expecting(&marks.boxed, CLUSTER * BOX);
            box_2d_to(all, boxed + cluster_rank() * BOX, p.map, 0, (round * CLUSTER + cluster_rank()) * 8, &marks.boxed);
            mark_arrive_expecting(&marks.sent, 2 * PIECES);
            remote_send(remote_of(copied, next), mine, PIECES, remote_of(&marks.sent, next));
        }
        const Remote sent = remote_of(&marks.sent, next), piece = remote_of(pieces + 16 * t, next);
        if (t % 2) {
            remote_send16(piece, U4{~value, 0, 0, value}, sent);
        } else {
            for (u32 i = 0; i < 4; i++) remote_send4(remote_behind(piece, 4 * i), i == 0 ? ~value : i == 3 ? value : 0, sent);
        }
        const Remote word = remote_of(stored + 4 * t, next);
        remote_store4(word, value ^ 0x5555);
        remote_arrive_handing(remote_of(&marks.stored, next));
        mark_wait(&marks.boxed, parity);
        mark_wait(&marks.sent, parity);
        mark_wait_handed(&marks.stored, parity);
        U4 got{0, 0, 0, 0};
        for (u32 i = 0; i < CLUSTER; i++) got.x += reinterpret_cast<const u16*>(boxed + i * BOX)[4 * t];
        got.y = load16(pieces + 16 * t).x + load16(pieces + 16 * t).w;  // ~v + v
        got.z = load16(copied + 16 * t).y;
        got.w = reinterpret_cast<const u32*>(stored)[t] ^ remote_load16(remote_of(mine + 16 * t, next)).z;
        if (remote_load4(remote_of(mine + 16 * t, next)) + 2 != remote_load16(remote_of(mine + 16 * t, next)).z) got.w = 0;
        store16(reinterpret_cast<u8*>(p.out) + 16 * value, got);
        for (u32 i = 0; i < CLUSTER; i++) remote_arrive(remote_of(&marks.free, i));
    }
    cluster_sync();
}
"#,
);

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    out: u64,
    rounds: u64,
    unused: [u64; 6],
    map: TensorMap,
}

const ROUNDS: usize = 5;
const BLOCKS: usize = 16;

fn talk(cluster: usize) {
    let (context, owned) = (context().unwrap(), OwnedStream::new(DEVICE).unwrap());
    let stream = owned.stream();
    let rows = ROUNDS * cluster * 8;
    let host: Vec<u16> = (0..rows * 64).map(|i| (i * 7 + 1) as u16).collect();
    let bytes: &[u8] = bytemuck::cast_slice(&host);
    let mut memory = Buffer::zeroed_on(DEVICE, bytes.len()).unwrap();
    let to = memory.tensor_mut(0, DType::U8, &[bytes.len()]).unwrap();
    copy(&stream, TensorRef::from_slice(bytes, &[bytes.len()]).unwrap(), to).unwrap();
    let tensor = memory.tensor(0, DType::Bf16, &[rows, 64]).unwrap();
    let map = Boxes::of(&tensor, &[8, 64], Swizzle::None).unwrap().map(context).unwrap();
    let words = ROUNDS * BLOCKS * 128 * 4;
    let out = Buffer::zeroed_on(DEVICE, 4 * words).unwrap();
    let params = Params { out: out.as_ptr() as u64, rounds: ROUNDS as u64, unused: [0; 6], map };
    let key = Key::new(TALK, "talk").with("CLUSTER", cluster as i64);
    let function = jit::function(DEVICE, &key).unwrap();
    assert_eq!(function.attributes().unwrap().cluster, cluster as u32);
    let mut how = Launch { grid: [BLOCKS as u32 + 1, 1, 1], block: 128, shared: 32 << 10 };
    // SAFETY: it is refused where it is not all clusters.
    let whole = cluster == 1 || unsafe { launch(&function, &stream, how, &params) }.is_err();
    assert!(whole, "a part of a cluster");
    how.grid[0] -= 1;
    // SAFETY: the kernel's one parameter; its addresses are of buffers that live until the copy below has waited.
    unsafe { launch(&function, &stream, how, &params) }.unwrap();
    let mut got = vec![0i32; words];
    copy(
        &stream,
        out.tensor(0, DType::I32, &[words]).unwrap(),
        crate::TensorMut::from_slice(&mut got, &[words]).unwrap(),
    )
    .unwrap();
    for (at, got) in got.chunks(4).enumerate() {
        let (round, block, t) = (at / 128 / BLOCKS, at / 128 % BLOCKS, at % 128);
        let of = |turn: usize| {
            let peer = block / cluster * cluster + (block + turn) % cluster;
            ((round * BLOCKS + peer) * 128 + t) as i32
        };
        let boxed = (0..cluster).map(|i| i32::from(host[(round * cluster + i) * 8 * 64 + 4 * t])).sum();
        let (before, next) = (of(cluster - 1), of(1));
        let expected = [boxed, -1, before + 1, (before ^ 0x5555) ^ (next + 2)];
        assert_eq!(got, expected, "clusters of {cluster}, round {round}, block {block}, thread {t}");
    }
}

#[test]
fn blocks_of_a_cluster_reach_each_other() {
    if !is_hopper("blocks_of_a_cluster_reach_each_other") {
        return;
    }
    for cluster in [1, 2, 8] {
        talk(cluster);
    }
}

/// This test again, in a process of its own, where `variable` is `value`; what it said, if it failed.
#[cfg(feature = "emulator")]
fn again(test: &str, variable: &str, value: &str) -> std::result::Result<(), String> {
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args([&format!("cuda::tests::cluster::{test}"), "--exact", "--nocapture", "--test-threads", "1"])
        // In another order a fault may be met by another name.
        .env_remove("MSTAR_EMULATOR_SEED")
        .env(variable, value)
        .output()
        .unwrap();
    if child.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&child.stderr).into_owned()) }
}

#[test]
#[cfg(feature = "emulator")]
fn they_do_in_other_orders_too() {
    for seed in ["1", "2", "3", "4"] {
        again("blocks_of_a_cluster_reach_each_other", "MSTAR_EMULATOR_SEED", seed).unwrap();
    }
}

/// What a pair does wrongly, one after the other.
#[cfg(feature = "emulator")]
const WRONG: Unit = Unit::of(
    "wrong.cu",
    r#"
#include "cluster.cuh"
struct Params { u64 which; u64 unused[7]; TensorMap map; };
MSTAR_KERNEL_OF_CLUSTERS(wrong, Params, 32, 1, 2) {
    SHARED(memory);
    Mark* mark = reinterpret_cast<Mark*>(memory);
    u8* place = memory + 1024;
    const u32 which = p.which, rank = cluster_rank(), peer = rank ^ 1;
    const bool one = thread_x() == 0;
    if (one) mark_init(mark, 1);
    const Remote there = remote_of(place, peer), marked = remote_of(mark, peer);
    if (which == 1 && one) remote_arrive(marked);
    cluster_sync();
    // No wait, and no barrier, for an arrival.
    if (which == 2 && one && rank == 0) remote_arrive(marked);
    if (which == 2 && rank == 1 && one) mark_wait(mark, 1);
    // Bytes that nobody expects, and more than are.
    if (which == 3 && one && rank == 0) remote_send16(there, U4{0, 0, 0, 0}, marked), remote_arrive(marked);
    if (which == 3 && one && rank == 1) mark_wait(mark, 0);
    if (which == 4 && one && rank == 0) remote_send16(there, U4{0, 0, 0, 0}, marked);
    if (which == 4 && one && rank == 1) mark_arrive_expecting(mark, 8), mark_wait(mark, 0);
    // Bytes that do not come.
    if (which == 5 && one) remote_send4(there, 0, marked), mark_arrive_expecting(mark, 8), mark_wait(mark, 0);
    // Stores that are not handed over, or waited for as if they were not.
    if (which == 6 && one) remote_store4(there, 1), remote_arrive(marked), mark_wait(mark, 0);
    if (which == 7 && one) remote_store4(there, 1), remote_arrive_handing(marked), mark_wait(mark, 0);
    // A block ends while it is read, and is read when it has ended.
    if (which == 8 && one && rank == 0) remote_load4(there);
    if (which == 9 && one && rank == 1) remote_load4(there);
    // What is sent had not left yet; what is sent does not come where the mark is.
    if (which == 10 && one && rank == 0) remote_send(there, place, 64, marked);
    if (which == 10 && rank == 1) {
        if (one) mark_arrive_expecting(mark, 64);
        mark_wait(mark, 0);
    }
    if (which == 11 && one) remote_send4(there, 0, remote_of(mark, rank));
    // Halves of a barrier.
    if (which == 12) cluster_arrive();
    if (which == 13) cluster_wait();
    if (which == 14) cluster_arrive(), cluster_arrive();
    if (which == 15 && one) cluster_arrive();
    // Places that there are not.
    if (which == 16 && one) remote_store4(remote_of(place, 2), 0);
    if (which == 17 && one) remote_store16(remote_behind(there, 4), U4{0, 0, 0, 0});
    if (which == 18 && one) remote_store4(remote_behind(there, 1024), 0);
    if (which == 19 && one) box_2d_to(5, place, p.map, 0, 0, mark);
    if (which == 20 && one) remote_arrive(there);
    // A box for both, of which one expects none.
    if (which == 21 && one && rank == 0) box_2d_to(3, place, p.map, 0, 0, mark), mark_arrive_expecting(mark, 128), mark_wait(mark, 0);
    // An arrival at a mark is waited for, and what was sent to it not.
    if (which == 22 && one) remote_send4(there, 0, marked);
    if (which == 22) cluster_sync();
}
"#,
);

#[cfg(feature = "emulator")]
const WRONGS: [&str; 22] = [
    "cluster_sync comes first",
    "a peer's arrival",
    "nobody expects",
    "nobody expects",
    "wait for each other",
    "handed over to nobody",
    "mark_wait_handed",
    "may still touch",
    "that has ended",
    "had left it",
    "are of one block",
    "between cluster_arrive and cluster_wait",
    "without cluster_arrive",
    "cluster_arrive twice",
    "wait for each other",
    "that the cluster does not have",
    "not aligned",
    "beyond shared memory",
    "blocks of the cluster",
    "a mark that was not made",
    "under way",
    "under way",
];

/// What a card does with these is nobody's to say; the emulated device says it.
#[test]
#[cfg(feature = "emulator")]
fn wrong_uses_of_a_cluster_are_refused() {
    const VARIABLE: &str = "MSTAR_CLUSTER_WRONG";
    let Some(context) = context() else { return };
    let go = |which: usize| {
        let owned = OwnedStream::new(DEVICE).unwrap();
        let stream = owned.stream();
        let memory = Buffer::zeroed_on(DEVICE, 128).unwrap();
        let tensor = memory.tensor(0, DType::Bf16, &[1, 64]).unwrap();
        let map = Boxes::of(&tensor, &[1, 64], Swizzle::None).unwrap().map(context).unwrap();
        let params = Params { out: which as u64, rounds: 0, unused: [0; 6], map };
        let function = jit::function(DEVICE, &Key::new(WRONG, "wrong")).unwrap();
        let how = Launch { grid: [2, 1, 1], block: 32, shared: 2048 };
        // SAFETY: the parameter is the kernel's, and what it points to lives until the stream has run.
        unsafe { launch(&function, &stream, how, &params) }.unwrap();
        stream.synchronize().unwrap();
    };
    if let Ok(which) = std::env::var(VARIABLE) {
        return go(which.parse().unwrap());
    }
    go(0);
    for (i, named) in WRONGS.iter().enumerate() {
        let which = (i + 1).to_string();
        let said = again("wrong_uses_of_a_cluster_are_refused", VARIABLE, &which).unwrap_err();
        assert!(said.contains(named), "wrong use {which} is to be told as {named:?}: {said}");
    }
}
