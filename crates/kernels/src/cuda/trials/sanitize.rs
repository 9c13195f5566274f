//! One small ragged batch a kernel variant of [`variants`](crate::cuda::variants), in one process, for tools that watch every access
//! of memory (compute-sanitizer, which makes kernels ten to fifty times slower). What a run yields is held for being a number at
//! all; that it is the right one is for other tests. Every variant must have been launched: a list that grows without a batch for
//! what is new fails here.

use crate::cpu::copy::{PageCopy, copy_pages};
use crate::cpu::gather::{gather_pages, gather_pages_at, gather_rows, gather_rows_at};
use crate::cpu::scatter::{scatter, scatter_at, scatter_both_at};
use crate::cuda::exec::{Joiner, with_joiner};
use crate::cuda::jit::Key;
use crate::cuda::{Context, forced, jit, launched, peak, variants};
use crate::dsa::{KeyFormat, store_keys_at};
use crate::flex::{MaskMod, ScoreMod};
use crate::lse::{Merged, Partial, merge_all_natural_at};
use crate::paged::Variant;
use crate::synth::{Kind, fill_at};
use crate::{DType, Kernels, Stream};

use super::blocks::{BLOCK, InBlocks, STORED};
use super::heads::OverHeads;
use super::latents::OverLatents;
use super::memory::{put, scratch};
use super::segments::{OverSegments, Prefixes};
use super::sparse::{OverPicks, Picked};
use super::{DEVICE, Family, NAN, Row, Setting, row, stream, whole};

const BF16: DType = DType::Bf16;
const F16: DType = DType::F16;
const F32: DType = DType::F32;

/// Bytes of shared memory that a block has on an H200, on an A100, and where only the plain kernel fits.
const HOPPER: u32 = 227 << 10;
const AMPERE: u32 = 163 << 10;
const PLAIN: u32 = 24 << 10;

/// Rows of few queries and of a tile, of no key, and at a page's end.
fn small() -> Vec<Row> {
    [(1, 300), (19, 45), (1, 0), (2, 16), (1, 17)]
        .into_iter()
        .zip(0..)
        .map(|((q, kv), id)| row(id, q, kv))
        .collect()
}

/// How batches run.
struct Runner {
    stream: Stream,
    /// Whether kernels are only asked for, and every call ends where it would look one up.
    asks: bool,
}

impl Runner {
    fn call(&self, call: impl FnOnce(&Stream)) {
        if !self.asks {
            call(&self.stream);
            return self.stream.synchronize().unwrap();
        }
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| call(&self.stream)));
        let words = ended.expect_err("a kernel is looked up").downcast::<String>().unwrap_or_default();
        assert!(words.contains("it is only asked for"), "{words}");
    }

    fn run(&self, family: &dyn Family, rows: &[Row], dtype: DType, pad: usize, shared: u32) {
        let set = Setting { junk: NAN, pad, ..Setting::of(dtype) };
        self.call(|stream| forced::with_shared(Some(shared), || drop(family.run(stream, &set, rows))));
    }
}

fn heads(runner: &Runner) {
    let capped = |of: OverHeads| OverHeads {
        variant: Variant { logits_soft_cap: Some(3.0), sinks: true, alibi: true, ..of.variant },
        ..of
    };
    let of = OverHeads::new;
    for (dtype, family, shared) in [
        (F32, of(2, 128, 128), HOPPER),
        (BF16, of(2, 64, 64), PLAIN),
        (BF16, of(4, 64, 64), HOPPER),
        (BF16, capped(of(4, 64, 64)), HOPPER),
        (F16, capped(of(9, 64, 64)), HOPPER),
        (F16, capped(of(40, 64, 64)), HOPPER),
        (BF16, of(2, 128, 128), HOPPER),
        (BF16, of(9, 128, 128), HOPPER),
        (F16, capped(of(3, 128, 128)), HOPPER),
        (F16, capped(of(20, 128, 128)), HOPPER),
        (BF16, of(33, 128, 128), HOPPER),
        (BF16, of(2, 192, 128), HOPPER),
        (F16, of(2, 256, 256), HOPPER),
        (F16, of(9, 256, 256), HOPPER),
        // Of widths that Hopper's tiles are not for.
        (F16, capped(of(3, 124, 124)), HOPPER),
        (BF16, capped(of(4, 60, 60)), HOPPER),
        (BF16, capped(of(3, 128, 128)), HOPPER),
        (BF16, capped(of(2, 512, 512)), HOPPER),
        (BF16, capped(of(9, 512, 512)), HOPPER),
        (F16, of(1, 512, 512), HOPPER),
    ] {
        runner.run(&family, &small(), dtype, 0, shared);
    }
    // Rows of so few keys have no more parts than the other kernels join.
    with_joiner(Joiner::Many, || runner.run(&of(2, 128, 128), &small(), F32, 0, HOPPER));
}

fn segments(runner: &Runner) {
    let of =
        |d, dv, prefixes, soft_cap| OverSegments { g: 1, d, dv, soft_cap, ..OverSegments::narrow(prefixes) };
    runner.run(&of(40, 200, Prefixes::Packed, None), &small(), F32, 3, HOPPER);
    runner.run(&of(128, 128, Prefixes::Pages, None), &small(), BF16, 0, HOPPER);
    runner.run(&of(64, 64, Prefixes::Packed, None), &small(), F16, 0, HOPPER);
    runner.run(&of(256, 256, Prefixes::None, None), &small(), BF16, 0, HOPPER);
    runner.run(&of(192, 128, Prefixes::Packed, None), &small(), F16, 0, AMPERE);
    runner.run(&of(192, 128, Prefixes::Packed, None), &small(), BF16, 0, HOPPER);
    runner.run(&of(252, 252, Prefixes::None, Some(2.0)), &small(), BF16, 0, HOPPER);
}

fn blocks(runner: &Runner) {
    // Rows are batches of nine queries, of so many blocks.
    let rows = [3, 18, 0, 1].map(|blocks| row(blocks as u64, 9, blocks));
    let of = |dv| InBlocks { d: 128.min(dv), dv, ..InBlocks::narrow() };
    runner.run(&of(100), &rows, F16, 0, PLAIN);
    runner.run(&of(24), &rows, F32, 0, HOPPER);
    runner.run(&of(128), &rows, F16, 0, HOPPER);
    runner.run(&InBlocks { masks: &[MaskMod::Causal], ..of(128) }, &rows, F16, 0, HOPPER);
    let table: Vec<f32> = (0..2 * 17).map(|i| i as f32 / 34.0).collect();
    let (q_ids, kv_ids) = (vec![0i32; 9], vec![0i32; STORED * BLOCK]);
    let scores = [ScoreMod::Causal, ScoreMod::RelBias { table: &table, window: 8 }];
    let masks = [
        MaskMod::SlidingWindow { left: 2000, right: 0 },
        MaskMod::Document { q_ids: &q_ids, kv_ids: &kv_ids },
    ];
    runner.run(&InBlocks { scores: &scores, masks: &masks, ..of(128) }, &rows, F16, 0, HOPPER);
    let slopes = [0.01, 0.02];
    let scores = [
        ScoreMod::Alibi { slopes: &slopes },
        ScoreMod::SoftCap(2.0),
        ScoreMod::RelBias { table: &table, window: 8 },
    ];
    // Blocks of whole tiles.
    let rows = [3, 0, 1].map(|blocks| row(blocks as u64, 9, blocks));
    runner.run(&InBlocks { scores: &scores, block: 64, ..of(128) }, &rows, F16, 0, HOPPER);
}

fn latents(runner: &Runner) {
    let of = |h, c, e| OverLatents { h, c, e, page: 16, offset: 0, kernels: Kernels::Auto };
    let mma = |h, c, e| OverLatents { kernels: Kernels::Mma, ..of(h, c, e) };
    for (dtype, family, shared) in [
        (F32, of(2, 512, 64), HOPPER),
        (BF16, of(16, 512, 64), HOPPER),
        (F16, of(32, 512, 64), HOPPER),
        (BF16, of(128, 512, 64), HOPPER),
        (BF16, OverLatents { page: 64, ..of(128, 512, 64) }, HOPPER),
        (F16, of(64, 512, 0), HOPPER),
        (F16, of(8, 48, 16), HOPPER),
        (BF16, mma(16, 512, 64), HOPPER),
        (BF16, mma(32, 512, 64), HOPPER),
        (BF16, mma(128, 512, 64), HOPPER),
        (F16, mma(64, 512, 128), HOPPER),
        (F16, mma(32, 256, 64), HOPPER),
        (F16, mma(16, 48, 16), HOPPER),
        (BF16, of(16, 512, 64), AMPERE),
        (BF16, of(128, 512, 64), AMPERE),
    ] {
        // Rows of one query, then with rows of many.
        let rows = small();
        runner.run(&family, &[rows[0], rows[2], rows[4]], dtype, 0, shared);
        if family.h <= 32 {
            runner.run(&family, &rows, dtype, 0, shared);
        }
    }
}

fn sparse(runner: &Runner) {
    let of = |h, c, e, kernels| OverPicks { h, c, e, topk: 520, kernels };
    let rows = [row(0, 1, 300), row(1, 2, 17), row(2, 1, 0)];
    for (dtype, h, c, e) in [(BF16, 16, 512, 64), (BF16, 128, 512, 64), (F16, 32, 256, 64), (F32, 2, 40, 8)] {
        // Over picks as they are, and on a Hopper over a list of them.
        for kernels in [Kernels::Mma, Kernels::Auto] {
            runner.run(&of(h, c, e, kernels), &rows, dtype, 0, HOPPER);
        }
    }
    let few = of(32, 256, 64, Kernels::Auto);
    with_joiner(Joiner::Many, || runner.run(&few, &rows, F16, 0, HOPPER));
    let of = |width, format| Picked { heads: 8, width, topk: 24, format, gap: 0 };
    for (dtype, family) in [
        (BF16, of(128, None)),
        (BF16, of(128, Some(KeyFormat::Fp8))),
        (F16, of(32, Some(KeyFormat::Fp8))),
        (F16, of(256, None)),
        (BF16, Picked { gap: 1, ..of(128, None) }),
        (F32, of(20, None)),
        (F32, of(20, Some(KeyFormat::Fp8))),
        (BF16, of(20, Some(KeyFormat::F16))),
    ] {
        runner.run(&family, &small(), dtype, 2, AMPERE);
    }
    let of = |heads, width, format| Picked { heads, width, topk: 24, format, gap: 0 };
    for (dtype, family) in [
        (BF16, of(64, 128, None)),
        (BF16, of(64, 128, Some(KeyFormat::Fp8))),
        (F16, of(8, 32, Some(KeyFormat::Fp8))),
        (F16, of(40, 256, None)),
        (BF16, Picked { gap: 1, ..of(8, 128, None) }),
    ] {
        runner.run(&family, &small(), dtype, 2, HOPPER);
    }
    for dtype in [F32, BF16, F16] {
        runner.call(|stream| {
            let (t, d) = (9, 36);
            let keys = super::memory::queries(dtype, &[row(0, t, 0)], t, d, NAN, 1).on(stream);
            let mut out = scratch(stream, t * (d + 4), NAN);
            let to = out.tensor_mut(0, DType::U8, &[t, d + 4]).unwrap();
            store_keys_at(stream, keys.tensor(0, dtype, &[t, d]).unwrap(), KeyFormat::Fp8, to).unwrap();
        });
    }
}

/// Caches in e4m3.
fn codes(runner: &Runner) {
    use crate::dsa::attend::tests::fp8::device as picks;
    use crate::fp8::tests::device as stores;
    use crate::mla::tests::fp8::device as latents;
    use crate::paged::tests::fp8::device as heads;
    use half::{bf16, f16};
    let run = |call: &dyn Fn(&Stream)| {
        runner.call(|stream| forced::with_shared(Some(HOPPER), || call(stream)));
    };
    run(&|stream| heads::run_small::<f16>(stream, (1, 2, 128, 128, 16), false));
    run(&|stream| heads::run_small::<bf16>(stream, (1, 2, 128, 128, 16), false));
    run(&|stream| heads::run_small::<bf16>(stream, (1, 20, 64, 64, 16), true));
    run(&|stream| heads::run_small::<bf16>(stream, (1, 2, 256, 256, 16), true));
    run(&|stream| latents::run_small::<f16>(stream, 2, 512, 64));
    run(&|stream| latents::run_small::<bf16>(stream, 128, 512, 64));
    run(&|stream| latents::run_small::<bf16>(stream, 16, 512, 0));
    run(&|stream| picks::run_small::<f16>(stream, 2, 64, 16));
    run(&|stream| picks::run_small::<bf16>(stream, 16, 512, 64));
    run(&|stream| stores::run_small(stream, false));
    run(&|stream| stores::run_small(stream, true));
}

fn moves(runner: &Runner) {
    // Entries whose bytes are a multiple of 16, of 4, of 2, and of nothing.
    for width in [32, 12, 6, 5] {
        for of in 0..8 {
            runner.call(|stream| moved(stream, width, of));
        }
    }
    for dtype in [F32, BF16, F16] {
        let (tokens, heads, width) = (3, 2, 37);
        let shape = [tokens, heads, width];
        let bytes = tokens * heads * width * 4;
        runner.call(|stream| {
            let keys = put(stream, bytemuck::cast_slice(&[1u64, 2, 3]));
            let mut out = scratch(stream, bytes, NAN);
            let mut to = out.tensor_mut(0, dtype, &shape).unwrap();
            let keys = keys.tensor(0, DType::I64, &[tokens]).unwrap();
            fill_at(stream, 3, Kind::Value, 2, keys, &mut to).unwrap();
        });
        runner.call(|stream| {
            let (o, lse) = (put(stream, &vec![0u8; bytes]), put(stream, &vec![0u8; tokens * heads * 4]));
            let (mut o_on, mut lse_on) = (scratch(stream, bytes, NAN), scratch(stream, lse.len(), NAN));
            let (o, lse) = (o.tensor(0, dtype, &shape).unwrap(), lse.tensor(0, F32, &shape[..2]).unwrap());
            let part = Partial { o, lse };
            let mut merged = Merged {
                o: o_on.tensor_mut(0, dtype, &shape).unwrap(),
                lse: lse_on.tensor_mut(0, F32, &shape[..2]).unwrap(),
            };
            merge_all_natural_at(stream, &[part, part, part], &mut merged).unwrap();
        });
    }
    runner.call(|stream| {
        let bytes = put(stream, &vec![1u8; 4096]);
        peak::read(stream, bytes.tensor(0, DType::U8, &[4096]).unwrap()).unwrap();
    });
    runner.call(|stream| assert!(peak::multiply_warps(stream, 2).unwrap() > 0.0));
    if Context::of(DEVICE).unwrap().is_hopper() {
        runner.call(|stream| assert!(peak::multiply_groups(stream, 2).unwrap() > 0.0));
    }
}

/// One of the ways in which entries go from place to place.
fn moved(stream: &Stream, width: usize, of: usize) {
    const PAGES: usize = 7;
    const SIZE: usize = 4;
    let tokens = 11;
    let slots: Vec<i64> = (0..tokens as i64).map(|t| if t == 4 { -1 } else { 2 * t }).collect();
    let at = put(stream, bytemuck::cast_slice(&slots));
    let at = at.tensor(0, DType::I64, &[tokens]).unwrap();
    let pages = [5i32, 1, 6, 2];
    let pages_at = put(stream, bytemuck::cast_slice(&pages));
    let pages_at = pages_at.tensor(0, DType::I32, &[4]).unwrap();
    let entries = put(stream, &vec![3u8; tokens * width]);
    let from = entries.tensor(0, DType::U8, &[tokens, width]).unwrap();
    let shape = [PAGES, SIZE, width];
    let (mut pool, mut other) =
        (scratch(stream, PAGES * SIZE * width, NAN), put(stream, &vec![7u8; PAGES * SIZE * width]));
    let mut out = scratch(stream, tokens * width, NAN);
    let to = out.tensor_mut(0, DType::U8, &[tokens, width]).unwrap();
    let cache = pool.tensor_mut(0, DType::U8, &shape).unwrap();
    let copies = [PageCopy { from: 1, to: 0, tokens: 3 }, PageCopy { from: 5, to: 6, tokens: 4 }];
    let rows = other.tensor_mut(0, DType::U8, &[PAGES * SIZE, width]).unwrap();
    let rows = rows.as_ref();
    match of {
        0 => scatter(stream, &slots, from, cache),
        1 => scatter_at(stream, at, from, cache),
        2 => gather_rows(stream, rows, &slots, to),
        3 => gather_rows_at(stream, rows, at, to),
        4 => gather_pages(stream, cache.as_ref(), &pages, 3, to),
        5 => gather_pages_at(stream, cache.as_ref(), pages_at, 3, to),
        6 => scatter_both_at(
            stream,
            at,
            [(from, cache), (from, other.tensor_mut(0, DType::U8, &shape).unwrap())],
        ),
        _ => {
            let from = other.tensor(0, DType::U8, &shape).unwrap();
            copy_pages(stream, from, cache, &copies)
        }
    }
    .unwrap();
    stream.is_idle().unwrap();
}

/// A key as kernels read it: no mods and mods that are not spoken of are one.
fn plainly(key: &Key) -> (&'static str, &'static str, Vec<(&'static str, i64)>) {
    let spoken = |&(name, value): &(&'static str, i64)| value != 0 || !matches!(name, "SCORES" | "MASKS");
    let defines = key.defines.as_slice().iter().copied().filter(|define| spoken(define)).collect();
    (key.unit.name(), key.entry, defines)
}

fn all(runner: &Runner) {
    for part in [heads, segments, blocks, latents, sparse, codes, moves] {
        part(runner);
    }
}

/// Variants of the list that none of the keys is.
fn missing(keys: impl IntoIterator<Item = Key>) -> Vec<String> {
    let keys: Vec<_> = keys.into_iter().map(|key| plainly(&key)).collect();
    let missing = variants::variants().into_iter().filter(|key| !keys.contains(&plainly(key)));
    missing.map(|key| key.to_string()).collect()
}

/// Whether a device's blocks have the shared memory that the list was chosen by.
fn is_hopper(test: &str) -> bool {
    let shared = Context::of(DEVICE).unwrap().shared_per_block_optin();
    if shared < HOPPER {
        println!(
            "SKIPPED {test}: a block has {shared} bytes of shared memory, the list was chosen by {HOPPER}"
        );
    }
    shared >= HOPPER
}

#[test]
fn every_variant_of_the_list_has_a_batch() {
    let Some(owned) = stream("every_variant_of_the_list_has_a_batch") else { return };
    let asked = jit::asked::by(|| all(&Runner { stream: owned.stream(), asks: true }));
    if is_hopper("every_variant_of_the_list_has_a_batch") {
        let missing = missing(asked);
        assert!(missing.is_empty(), "nobody asks for\n{}", missing.join("\n"));
    }
}

#[test]
fn every_variant_of_the_list_runs_a_small_ragged_batch() {
    let test = "every_variant_of_the_list_runs";
    let Some(owned) = stream(test) else { return };
    if !whole() {
        return println!("SKIPPED {test}: on the emulated device it takes minutes; MSTAR_TRIALS=all runs it");
    }
    all(&Runner { stream: owned.stream(), asks: false });
    let launched = jit::all_loaded(DEVICE).into_iter().filter(|(_, function)| launched::has(function));
    let launched: Vec<Key> = launched.map(|(key, _)| key).collect();
    println!("{} kernels were launched", launched.len());
    if is_hopper(test) {
        let missing = missing(launched);
        assert!(missing.is_empty(), "never launched:\n{}", missing.join("\n"));
    }
}
