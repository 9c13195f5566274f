//! Batches over pages: whole runs, alone and in company, eager and captured.

use std::collections::HashMap;

use half::bf16;

use super::{DEVICE, put, stream, take};
use crate::cuda::{Graph, capture};
use crate::paged::{
    AttendParams, Geometry, PageTable, ScheduleOptions, Target, Variant, attend, schedule, workspace_bytes,
};
use crate::plan::{Capacity, Heads, Plan, PlanOptions, Schedule};
use crate::work::{DIRECT, WorkList};
use crate::{Buffer, DType, Element, Error, Stream};

const PAGE: usize = 16;
const PAGES: usize = 200;
const G: usize = 2;
const D: usize = 32;

fn geometry(group: usize) -> Geometry {
    Geometry {
        num_qo_heads: G * group,
        num_kv_heads: G,
        head_dim_qk: D,
        head_dim_vo: D,
        page_size: PAGE,
        q_dtype: DType::Bf16,
        kv_dtype: DType::Bf16,
    }
}

/// A batch: `(q_len, kv_len)` a row, and where each row's pages start in a shuffled pool.
struct Batch {
    rows: Vec<(usize, usize, usize)>,
}

struct Arrays {
    qo: Vec<i32>,
    indptr: Vec<i32>,
    indices: Vec<i32>,
    last: Vec<i32>,
}

impl Batch {
    fn arrays(&self) -> Arrays {
        let mut arrays = Arrays { qo: vec![0], indptr: vec![0], indices: vec![], last: vec![] };
        for &(q, kv, first) in &self.rows {
            arrays.qo.push(arrays.qo[arrays.qo.len() - 1] + q as i32);
            arrays.indices.extend((0..kv.div_ceil(PAGE)).map(|page| ((first + page) * 61 % PAGES) as i32));
            arrays.indptr.push(arrays.indices.len() as i32);
            arrays.last.push(if kv == 0 { 0 } else { ((kv - 1) % PAGE + 1) as i32 });
        }
        arrays
    }
}

impl Arrays {
    fn table(&self) -> PageTable<'_> {
        PageTable {
            qo_indptr: &self.qo,
            kv_indptr: &self.indptr,
            kv_indices: &self.indices,
            kv_last_page_len: &self.last,
            num_pages: PAGES,
            ..PageTable::default()
        }
    }
}

/// The pool, and what is read and written.
struct Bench {
    k: Buffer,
    v: Buffer,
    q: Buffer,
    o: Buffer,
    lse: Buffer,
    workspace: Buffer,
    heads: usize,
    tokens: usize,
}

fn value(index: usize, salt: usize) -> bf16 {
    let hash = (index.wrapping_mul(0x9e37_79b1) ^ salt.wrapping_mul(0x85eb_ca6b)) as u32;
    bf16::from_f32((hash.wrapping_mul(0x27d4_eb2f) >> 8) as f32 / (1 << 23) as f32 - 1.0)
}

impl Bench {
    fn new(stream: &Stream, tokens: usize, heads: usize) -> Bench {
        let pool = |salt| -> Vec<bf16> { (0..PAGES * PAGE * G * D).map(|i| value(i, salt)).collect() };
        let q: Vec<bf16> = (0..tokens * heads * D).map(|i| value(i, 3)).collect();
        Bench {
            k: put(stream, &pool(1), &[PAGES, PAGE, G, D]),
            v: put(stream, &pool(2), &[PAGES, PAGE, G, D]),
            q: put(stream, &q, &[tokens, heads, D]),
            o: put(stream, &vec![bf16::NAN; tokens * heads * D], &[tokens, heads, D]),
            lse: put(stream, &vec![f32::NAN; tokens * heads], &[tokens, heads]),
            workspace: Buffer::zeroed_on(DEVICE, 4 << 20).unwrap(),
            heads,
            tokens,
        }
    }

    fn run(&mut self, stream: &Stream, work: &WorkList) -> crate::Result<()> {
        let (pool, shape) = ([PAGES, PAGE, G, D], [self.tokens, self.heads, D]);
        let bytes = self.workspace.len();
        assert!(workspace_bytes(work, 1) <= bytes);
        let params = AttendParams {
            work,
            q: self.q.tensor(0, DType::Bf16, &shape)?,
            k: self.k.tensor(0, DType::Bf16, &pool)?,
            v: self.v.tensor(0, DType::Bf16, &pool)?,
            kv_scales: None,
            sinks: None,
            alibi_slopes: None,
            o: self.o.tensor_mut(0, DType::Bf16, &shape)?,
            lse: Some(self.lse.tensor_mut(0, f32::DTYPE, &shape[..2])?),
            workspace: self.workspace.tensor_mut(0, DType::U8, &[bytes])?,
            workers: 1,
        };
        attend(stream, params)
    }

    /// `o` and `lse` as bits.
    /// What a captured run of a plan writes; another is captured where other kernels are launched: for tiles of queries, and for rows
    /// that nobody joins.
    fn replayed(
        &mut self,
        stream: &Stream,
        plan: &Plan<Heads>,
        graphs: &mut HashMap<u64, Graph>,
    ) -> (Vec<u16>, Vec<u32>) {
        let graph = graphs
            .entry(plan.capture_key().unwrap())
            .or_insert_with(|| capture(stream, || self.run(stream, plan.work())).unwrap());
        // SAFETY: the bench and the plan's image are there and nobody else uses them.
        unsafe { graph.launch(stream) }.unwrap();
        self.bits(stream)
    }

    fn bits(&self, stream: &Stream) -> (Vec<u16>, Vec<u32>) {
        let o = take::<bf16>(stream, &self.o, self.tokens * self.heads * D);
        let lse = take::<f32>(stream, &self.lse, self.tokens * self.heads);
        (o.into_iter().map(bf16::to_bits).collect(), lse.into_iter().map(f32::to_bits).collect())
    }
}

#[test]
fn a_list_for_blocks_covers_every_token_head_and_leaf_once_and_has_the_rows_of_one_for_threads() {
    let batch =
        Batch { rows: vec![(1, 1500, 0), (40, 40, 3), (1, 0, 0), (0, 64, 9), (3, 700, 5), (300, 320, 7)] };
    let (arrays, geometry) = (batch.arrays(), geometry(4));
    for variant in
        [Variant::causal(D), Variant::full(D), Variant { window_left: Some(100), ..Variant::causal(D) }]
    {
        let [mut threads, mut blocks] = [WorkList::default(), WorkList::default()];
        let of = |target| ScheduleOptions { target, pad_to: Some(360), ..ScheduleOptions::default() };
        schedule(&geometry, &variant, &arrays.table(), &of(Target::Threads), &mut threads).unwrap();
        schedule(&geometry, &variant, &arrays.table(), &of(Target::Blocks), &mut blocks).unwrap();
        assert_eq!(threads.rows(), blocks.rows());
        // Times that each (token, head) is written.
        let mut written = vec![0; 360 * G];
        let mut floats = vec![false; blocks.partial_len as usize];
        for (index, item) in blocks.items().iter().enumerate() {
            assert_eq!((item.member_count, item.kv_head_count, item.leaf_end - item.leaf_begin), (1, 1, 1));
            let member = blocks.members()[item.member_begin as usize];
            let row = blocks.rows()[member.row as usize];
            assert_eq!(index < blocks.few, row.family == 0, "few query vectors first");
            let lanes = item.q_count as usize * 4;
            assert!(lanes <= 128 && item.q_begin + item.q_count <= row.q_len);
            if member.partial == DIRECT {
                for token in 0..item.q_count {
                    written
                        [(row.q_begin + item.q_begin + token) as usize * G + item.kv_head_begin as usize] +=
                        1;
                }
            } else {
                let len = crate::cpu::paged::state_len(lanes, D);
                let at = member.partial as usize + item.kv_head_begin as usize * len;
                assert!(floats[at..at + len].iter().all(|taken| !taken), "states overlap");
                floats[at..at + len].fill(true);
            }
        }
        for few in [&blocks.items()[..blocks.few], &blocks.items()[blocks.few..]] {
            assert!(few.windows(2).all(|pair| pair[0].cost * 9 / 8 + 8 >= pair[1].cost), "longest first");
        }
        for merge in blocks.merges() {
            let row = blocks.rows()[merge.row as usize];
            let parts = &blocks.parts()[merge.part_begin as usize..][..merge.part_count as usize];
            assert!(parts.windows(2).all(|pair| pair[0].index + 1 == pair[1].index && pair[0].level == 0));
            for token in 0..merge.q_count {
                written[(row.q_begin + merge.q_begin + token) as usize * G + merge.kv_head_begin as usize] +=
                    1;
            }
        }
        assert!(written.iter().all(|&times| times == 1), "{variant:?}");
    }
}

/// Two rows of 16 MB each, or one of twice the keys, are what a large device's cache holds: their tiles come together, longest first, and the
/// longest row before the others.
#[test]
fn tiles_of_rows_that_a_cache_holds_come_together() {
    let heads = 16;
    let geometry = Geometry {
        num_qo_heads: heads,
        num_kv_heads: heads,
        head_dim_qk: 128,
        head_dim_vo: 128,
        ..geometry(1)
    };
    let keys = [2048, 2048, 2048, 2048, 4096];
    let begins = |of: &dyn Fn(usize) -> usize| {
        let mut at = 0;
        let ends = keys.iter().map(|&keys| {
            at += of(keys) as i32;
            at
        });
        std::iter::once(0).chain(ends).collect::<Vec<i32>>()
    };
    let (qo, indptr) = (begins(&|keys| keys), begins(&|keys| keys / PAGE));
    let pages = indptr[keys.len()] as usize;
    let table = PageTable {
        qo_indptr: &qo,
        kv_indptr: &indptr,
        kv_indices: &(0..pages as i32).collect::<Vec<_>>(),
        kv_last_page_len: &[PAGE as i32; 5],
        num_pages: pages,
        ..PageTable::default()
    };
    let options = ScheduleOptions { target: Target::Blocks, ..ScheduleOptions::default() };
    let mut list = WorkList::default();
    schedule(&geometry, &Variant::causal(128), &table, &options, &mut list).unwrap();
    let row = |item: &crate::work::Item| list.members()[item.member_begin as usize].row;
    let mut items = list.items();
    for section in [&[4][..], &[0, 1], &[2, 3]] {
        let tiles = section.iter().map(|&row| keys[row as usize] / 128 * heads).sum();
        let (own, others) = items.split_at(tiles);
        assert!(own.iter().all(|item| section.contains(&row(item))), "{section:?}");
        assert!(own.windows(2).all(|pair| pair[0].cost * 9 / 8 + 8 >= pair[1].cost), "longest first");
        items = others;
    }
    assert!(items.is_empty());
}

#[test]
fn a_row_has_the_same_bits_alone_and_in_company() {
    let Some(owned) = stream() else { return };
    let stream = owned.stream();
    let (geometry, variant) = (geometry(4), Variant::causal(D));
    let company = Batch { rows: vec![(1, 1300, 0), (33, 600, 11), (1, 1, 4), (2, 50, 70), (1, 0, 0)] };
    let arrays = company.arrays();
    let options = PlanOptions { device: DEVICE, ..PlanOptions::default() };
    let mut plan = Plan::<Heads>::new(&geometry, &variant, &arrays.table(), &options).unwrap();
    plan.stage(&stream).unwrap();
    let tokens = plan.num_tokens();
    let mut bench = Bench::new(&stream, tokens, G * 4);
    bench.run(&stream, plan.work()).unwrap();
    let all = bench.bits(&stream);
    assert!(all.1[(tokens - 1) * 8..].iter().all(|&bits| f32::from_bits(bits) == f32::NEG_INFINITY));
    assert!(all.0[(tokens - 1) * 8 * D..].iter().all(|&bits| bits == 0));
    let mut begin = 0;
    for &(q, kv, first) in &company.rows {
        let alone = Batch { rows: vec![(q, kv, first)] }.arrays();
        plan.replan(&geometry, &variant, &alone.table(), &options).unwrap();
        plan.stage(&stream).unwrap();
        let mut own = Bench::new(&stream, q, G * 4);
        let whole: Vec<bf16> = (0..tokens * 8 * D).map(|i| value(i, 3)).collect();
        own.q = put(&stream, &whole[begin * 8 * D..(begin + q) * 8 * D], &[q, 8, D]);
        own.run(&stream, plan.work()).unwrap();
        let bits = own.bits(&stream);
        assert_eq!(bits.0, all.0[begin * 8 * D..(begin + q) * 8 * D], "{q} {kv}");
        assert_eq!(bits.1, all.1[begin * 8..(begin + q) * 8]);
        begin += q;
    }
}

/// Alone, a row's leaves are an item each, joined by the last to arrive in two stages; in company an item has several; and a
/// workspace that comes too late for tickets has its merges launched. Windows begin in the middle of a run of leaves.
#[test]
fn leaves_joined_in_a_block_by_the_last_to_arrive_and_by_a_launch_give_the_same_bits() {
    let Some(owned) = stream() else { return };
    let stream = owned.stream();
    let geometry = geometry(1);
    let company = Batch { rows: (0..30).map(|row| (1, 9000 - 3 * row, 7 * row)).collect() };
    let alone = Batch { rows: company.rows[..1].to_vec() };
    let options = PlanOptions { device: DEVICE, ..PlanOptions::default() };
    for variant in [Variant::causal(D), Variant { window_left: Some(8700), ..Variant::causal(D) }] {
        let plan_of = |batch: &Batch| {
            let mut plan =
                Plan::<Heads>::new(&geometry, &variant, &batch.arrays().table(), &options).unwrap();
            plan.stage(&stream).unwrap();
            plan
        };
        let levels = |plan: &Plan<Heads>| plan.work().tasks.iter().map(|task| task.level).max();
        let plan = plan_of(&alone);
        assert_eq!((levels(&plan), plan.work().items().len() > 32), (Some(0), true), "two stages");
        let mut bench = Bench::new(&stream, 1, G);
        bench.run(&stream, plan.work()).unwrap();
        let bits = bench.bits(&stream);
        bench.run(&stream, plan.work()).unwrap();
        assert!(bits == bench.bits(&stream), "tickets are as they were");
        let others: Vec<Bench> = (0..8).map(|_| Bench::new(&stream, 1, G)).collect();
        for mut other in others {
            other.run(&stream, plan.work()).unwrap();
            assert!(bits == other.bits(&stream), "a launch of merges");
        }
        let plan = plan_of(&company);
        assert!(levels(&plan) > Some(0));
        let mut bench = Bench::new(&stream, 30, G);
        bench.run(&stream, plan.work()).unwrap();
        let all = bench.bits(&stream);
        assert!(bits.0 == all.0[..G * D] && bits.1 == all.1[..G], "{variant:?}");
    }
}

/// However many leaves an item has: groups of one row a warp, of two, and of more, with nodes that wait in registers and in memory.
#[test]
fn how_many_leaves_an_item_has_changes_no_bit() {
    let Some(owned) = stream() else { return };
    let stream = owned.stream();
    let options = PlanOptions { device: DEVICE, ..PlanOptions::default() };
    let batch = Batch { rows: vec![(1, 9000, 3)] };
    for (group, window) in
        [(1, None), (4, Some(8700)), (7, None), (12, None), (16, None), (16, Some(4000)), (20, None)]
    {
        let (geometry, variant) = (geometry(group), Variant { window_left: window, ..Variant::causal(D) });
        let bits = [0, 1, 2, 3, 4, 5].map(|level| {
            let mut plan = crate::paged::forced::with_level(level, || {
                Plan::<Heads>::new(&geometry, &variant, &batch.arrays().table(), &options).unwrap()
            });
            assert!(plan.work().tasks.iter().all(|task| task.level == level));
            plan.stage(&stream).unwrap();
            let mut bench = Bench::new(&stream, 1, G * group);
            bench.run(&stream, plan.work()).unwrap();
            bench.bits(&stream)
        });
        assert!(bits.iter().all(|level| *level == bits[0]), "{group} {window:?}");
    }
}

#[test]
fn a_captured_run_goes_over_whatever_list_was_staged_last() {
    let Some(owned) = stream() else { return };
    let stream = owned.stream();
    let (geometry, variant) = (geometry(2), Variant::causal(D));
    let capacity = Some(Capacity { rows: 4, tokens: 24, pages: 150 });
    let options = PlanOptions { device: DEVICE, capacity, ..PlanOptions::default() };
    let batches = [
        vec![(1, 700, 0)],
        vec![(1, 20, 5), (1, 1200, 7), (1, 600, 90)],
        vec![(20, 30, 1), (1, 513, 3)],
        vec![],
        vec![(1, 1, 0), (1, 2, 4), (1, 3, 8), (1, 4, 12)],
    ];
    let first = Batch { rows: batches[0].clone() }.arrays();
    let mut plan = Plan::<Heads>::new(&geometry, &variant, &first.table(), &options).unwrap();
    plan.stage(&stream).unwrap();
    let mut bench = Bench::new(&stream, 24, G * 2);
    let mut graphs = HashMap::new();
    for rows in batches {
        let arrays = Batch { rows }.arrays();
        plan.replan(&geometry, &variant, &arrays.table(), &options).unwrap();
        plan.stage(&stream).unwrap();
        let captured = bench.replayed(&stream, &plan, &mut graphs);
        let mut eager = Bench::new(&stream, 24, G * 2);
        eager.run(&stream, plan.work()).unwrap();
        assert!(captured == eager.bits(&stream), "{:?}", arrays.indptr);
    }
    // Tiles of queries or none, and merges of as many query vectors: no more than are kept of a region.
    assert!((2..=4).contains(&graphs.len()), "{}", graphs.len());
}

/// Decode rows are one launch, which writes what padding yields too; tiles are launched where there are any.
#[test]
fn a_captured_run_launches_what_its_list_has_work_for() {
    let Some(owned) = stream() else { return };
    let stream = owned.stream();
    let (geometry, variant) = (geometry(4), Variant::causal(D));
    let capacity = Some(Capacity { rows: 4, tokens: 4, pages: 400 });
    let options = PlanOptions { device: DEVICE, capacity, ..PlanOptions::default() };
    let full = vec![(1, 700, 0), (1, 20, 50), (1, 505, 9), (1, 1, 2)];
    for (rows, nodes) in [(full.clone(), 1), (full[..3].to_vec(), 1), (vec![(1, 30, 0), (3, 40, 7)], 1)] {
        let arrays = Batch { rows }.arrays();
        let mut plan = Plan::<Heads>::new(&geometry, &variant, &arrays.table(), &options).unwrap();
        plan.stage(&stream).unwrap();
        let mut bench = Bench::new(&stream, 4, 4 * G);
        let graph = capture(&stream, || bench.run(&stream, plan.work())).unwrap();
        assert_eq!(graph.nodes(), nodes, "{:?}", arrays.indptr);
    }
}

#[test]
fn a_step_that_only_grew_has_the_bits_of_a_plan_made_anew() {
    let Some(owned) = stream() else { return };
    let stream = owned.stream();
    let (geometry, variant) = (geometry(4), Variant::causal(D));
    for capacity in [None, Some(Capacity { rows: 4, tokens: 4, pages: 400 })] {
        let options = PlanOptions { device: DEVICE, capacity, ..PlanOptions::default() };
        let of = |rows| Batch { rows }.arrays();
        let first = of(vec![(1, 700, 0), (1, 20, 50), (1, 505, 9)]);
        let mut plan = Plan::<Heads>::new(&geometry, &variant, &first.table(), &options).unwrap();
        plan.stage(&stream).unwrap();
        // Within pages, into new ones, past a leaf, and onto other pages; some of it twice before it is staged.
        for (step, pages, staged) in [
            (1, 0, true),
            (2, 0, false),
            (3, 0, true),
            (4, 3, false),
            (5, 3, true),
            (12, 3, true),
            (30, 1, true),
        ] {
            let rows = vec![(1, 700 + step, pages), (1, 20 + step, 50), (1, 505 + step, 9 + pages)];
            let arrays = of(rows);
            plan.replan(&geometry, &variant, &arrays.table(), &options).unwrap();
            if !staged {
                continue;
            }
            plan.stage(&stream).unwrap();
            let tokens = plan.num_tokens();
            let run = |plan: &Plan<Heads>| {
                let mut bench = Bench::new(&stream, tokens, G * 4);
                bench.run(&stream, plan.work()).unwrap();
                bench.bits(&stream)
            };
            let renewed = run(&plan);
            let mut anew = Plan::<Heads>::new(&geometry, &variant, &arrays.table(), &options).unwrap();
            anew.stage(&stream).unwrap();
            assert!(renewed == run(&anew), "step {step}, {capacity:?}");
        }
    }
}

/// Leaves that suit the batch: right, the same every time, eager and captured, and whatever list was there before.
#[test]
fn a_throughput_schedule_is_right_and_the_same_every_time() {
    let Some(owned) = stream() else { return };
    let stream = owned.stream();
    let float = |bits: &u16| bf16::from_bits(*bits).to_f32();
    let mut others = 0;
    for (group, window_left) in [(1, None), (4, Some(1500)), (20, None)] {
        let (geometry, variant) = (geometry(group), Variant { window_left, ..Variant::causal(D) });
        let capacity = Some(Capacity { rows: 6, tokens: 6, pages: 800 });
        let invariant = PlanOptions { device: DEVICE, capacity, ..PlanOptions::default() };
        let options = PlanOptions { schedule: Schedule::Throughput, ..invariant };
        let batches = [
            vec![(1, 3000, 0)],
            vec![(1, 20, 5), (1, 3111, 7), (1, 600, 90), (1, 0, 0), (1, 2500, 3)],
            vec![(1, 21, 5), (1, 3112, 7), (1, 601, 90), (1, 0, 0), (1, 2501, 3)],
            vec![(1, 9, 1); 6],
        ];
        let arrays = |rows: &Vec<_>| Batch { rows: rows.clone() }.arrays();
        let first = arrays(&batches[0]);
        let mut plan = Plan::<Heads>::new(&geometry, &variant, &first.table(), &options).unwrap();
        plan.stage(&stream).unwrap();
        let mut bench = Bench::new(&stream, 6, G * group);
        let mut graphs = HashMap::new();
        for rows in &batches {
            let arrays = arrays(rows);
            plan.replan(&geometry, &variant, &arrays.table(), &options).unwrap();
            plan.stage(&stream).unwrap();
            let captured = bench.replayed(&stream, &plan, &mut graphs);
            let mut anew = Plan::<Heads>::new(&geometry, &variant, &arrays.table(), &options).unwrap();
            assert!(anew.work().items().iter().all(|item| item.leaf_end - item.leaf_begin == 1));
            anew.stage(&stream).unwrap();
            let mut eager = Bench::new(&stream, 6, G * group);
            eager.run(&stream, anew.work()).unwrap();
            assert!(captured == eager.bits(&stream), "{group} {rows:?}");
            let mut own = Plan::<Heads>::new(&geometry, &variant, &arrays.table(), &invariant).unwrap();
            own.stage(&stream).unwrap();
            let mut tree = Bench::new(&stream, 6, G * group);
            tree.run(&stream, own.work()).unwrap();
            let want = tree.bits(&stream);
            let apart = captured.0.iter().zip(&want.0).map(|(a, b)| (float(a) - float(b)).abs());
            assert!(apart.fold(0.0, f32::max) < 4e-3, "{group} {rows:?}");
            for (a, b) in
                captured.1.iter().zip(&want.1).map(|(&a, &b)| (f32::from_bits(a), f32::from_bits(b)))
            {
                assert!(a == b || (a - b).abs() < 1e-4, "{a} {b}");
            }
            others += usize::from(captured != want);
        }
    }
    assert!(others > 4, "other leaves, other bits: {others}");
}

#[test]
fn what_was_not_staged_as_it_is_is_refused() {
    let Some(owned) = stream() else { return };
    let stream = owned.stream();
    let (geometry, variant) = (geometry(1), Variant::causal(D));
    let (one, two) = (Batch { rows: vec![(1, 30, 0)] }.arrays(), Batch { rows: vec![(1, 40, 0)] }.arrays());
    let options = PlanOptions { device: DEVICE, ..PlanOptions::default() };
    let mut plan = Plan::<Heads>::new(&geometry, &variant, &one.table(), &options).unwrap();
    let mut bench = Bench::new(&stream, 1, G);
    let refused = |said: crate::Result<()>| {
        assert!(matches!(&said, Err(Error::Parameter { name: "work", .. })), "{said:?}");
    };
    refused(bench.run(&stream, plan.work()));
    plan.stage(&stream).unwrap();
    bench.run(&stream, plan.work()).unwrap();
    plan.replan(&geometry, &variant, &two.table(), &options).unwrap();
    refused(bench.run(&stream, plan.work()));
    plan.stage(&stream).unwrap();
    refused(bench.run(&stream, &plan.work().clone()));
    bench.run(&stream, plan.work()).unwrap();
    // A list that was cut for threads has no place on a device.
    let mut threads = Plan::<Heads>::new(&geometry, &variant, &one.table(), &PlanOptions::default()).unwrap();
    assert!(matches!(threads.stage(&stream), Err(Error::Parameter { name: "stream", .. })));
    refused(bench.run(&stream, threads.work()));
    stream.synchronize().unwrap();
}
