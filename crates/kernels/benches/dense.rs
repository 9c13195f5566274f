//! Dense and block-mask attention on the CPU, in useful operations a second, and each beside the other.
//!
//! `cargo bench -p mstar-kernels --features dense,flex --bench dense`. With `--time NAME CALLS` it prints the median seconds
//! of a call of one shape, for `tools/torch_flex.py`; with `--ratios` it times pairs of shapes in turns, seven times, and
//! prints the ratio of their medians with the least and the greatest of one repetition.

use std::time::Instant;

use criterion::{BenchmarkId, Criterion, Throughput};
use half::bf16;
use mstar_kernels::DType::{Bf16, F32};
use mstar_kernels::flex::{Blocks, MaskMod, ScoreMod, UserMod};
use mstar_kernels::paged::ScheduleOptions;
use mstar_kernels::work::WorkList;
use mstar_kernels::{Buffer, DType, Stream, TensorRef, dense, flex};

/// Threads that both sides of a comparison use.
const THREADS: usize = 2;

/// Slots a page, where a prefix lies in pages.
const PAGE: usize = 16;

/// Keys a block.
const BLOCK: usize = 128;

/// How keys lie, and what happens to scores.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Dense,
    /// Three quarters of the keys are a packed prefix.
    Packed,
    /// They lie in shuffled pages.
    Pages,
    /// All blocks of the mask are visible.
    Blocks,
    /// Three quarters of the blocks are visible: those make up `keys`.
    Ring,
    /// As `Ring`, visible in part, with a window that hides nothing.
    Partial,
    Causal,
    Alibi,
    RelBias,
    SoftCap,
    User,
}

#[derive(Clone, Copy)]
struct Shape {
    name: &'static str,
    kind: Kind,
    dtype: DType,
    heads: usize,
    kv_heads: usize,
    width: usize,
    queries: usize,
    /// Visible keys.
    keys: usize,
}

const BASE: Shape = Shape {
    name: "dense_f32",
    kind: Kind::Dense,
    dtype: F32,
    heads: 8,
    kv_heads: 8,
    width: 64,
    queries: 512,
    keys: 3840,
};

const HALF: Shape = Shape { name: "dense_bf16", dtype: Bf16, ..BASE };

const SHAPES: [Shape; 20] = [
    BASE,
    Shape { name: "packed_f32", kind: Kind::Packed, ..BASE },
    Shape { name: "pages_f32", kind: Kind::Pages, ..BASE },
    Shape { name: "blocks_f32", kind: Kind::Blocks, ..BASE },
    Shape { name: "ring_f32", kind: Kind::Ring, ..BASE },
    HALF,
    Shape { name: "packed_bf16", kind: Kind::Packed, ..HALF },
    Shape { name: "pages_bf16", kind: Kind::Pages, ..HALF },
    Shape { name: "blocks_bf16", kind: Kind::Blocks, ..HALF },
    Shape { name: "ring_bf16", kind: Kind::Ring, ..HALF },
    Shape { name: "partial_f32", kind: Kind::Partial, ..BASE },
    Shape { name: "causal_f32", kind: Kind::Causal, ..BASE },
    Shape { name: "alibi_f32", kind: Kind::Alibi, ..BASE },
    Shape { name: "rel_bias_f32", kind: Kind::RelBias, ..BASE },
    Shape { name: "soft_cap_f32", kind: Kind::SoftCap, ..BASE },
    Shape { name: "user_f32", kind: Kind::User, ..BASE },
    Shape { name: "dense_gqa_d128_bf16", heads: 16, kv_heads: 4, width: 128, ..HALF },
    Shape { name: "packed_gqa_d128_bf16", kind: Kind::Packed, heads: 16, kv_heads: 4, width: 128, ..HALF },
    Shape { name: "pages_gqa_d128_bf16", kind: Kind::Pages, heads: 16, kv_heads: 4, width: 128, ..HALF },
    Shape { name: "ring_gqa_d128_bf16", kind: Kind::Ring, heads: 16, kv_heads: 4, width: 128, ..HALF },
];

/// What is compared with what.
const PAIRS: [(&str, &str); 16] = [
    ("packed_f32", "dense_f32"),
    ("pages_f32", "dense_f32"),
    ("packed_bf16", "dense_bf16"),
    ("pages_bf16", "dense_bf16"),
    ("packed_gqa_d128_bf16", "dense_gqa_d128_bf16"),
    ("pages_gqa_d128_bf16", "dense_gqa_d128_bf16"),
    ("ring_f32", "dense_f32"),
    ("ring_bf16", "dense_bf16"),
    ("ring_gqa_d128_bf16", "dense_gqa_d128_bf16"),
    ("blocks_f32", "dense_f32"),
    ("partial_f32", "ring_f32"),
    ("causal_f32", "ring_f32"),
    ("alibi_f32", "ring_f32"),
    ("rel_bias_f32", "ring_f32"),
    ("soft_cap_f32", "ring_f32"),
    ("user_f32", "ring_f32"),
];

impl Shape {
    fn is_dense(&self) -> bool {
        matches!(self.kind, Kind::Dense | Kind::Packed | Kind::Pages)
    }

    fn prefix(&self) -> usize {
        if matches!(self.kind, Kind::Packed | Kind::Pages) { self.keys / 4 * 3 } else { 0 }
    }

    /// Visible blocks, and how many there are.
    fn blocks(&self) -> (Vec<i32>, usize) {
        let visible = self.keys / BLOCK;
        match self.kind {
            Kind::Blocks => ((0..visible as i32).collect(), visible),
            // Of four blocks the third is hidden.
            _ => ((0..).filter(|block| block % 4 != 2).take(visible).collect(), visible.div_ceil(3) * 4),
        }
    }

    fn flops(&self) -> u64 {
        4 * (self.queries * self.keys * self.heads * self.width) as u64
    }
}

/// A shape with its memory.
struct Batch {
    shape: Shape,
    work: WorkList,
    pool: rayon::ThreadPool,
    q: Buffer,
    k: [Buffer; 2],
    v: [Buffer; 2],
    o: Buffer,
    workspace: Buffer,
    slopes: Vec<f32>,
    bias: Vec<f32>,
    user: UserMod,
}

impl Batch {
    fn new(shape: Shape) -> Batch {
        let Shape { dtype, heads, kv_heads, width, queries, keys, .. } = shape;
        let mut work = WorkList::default();
        let options = ScheduleOptions { workers: THREADS, ..ScheduleOptions::default() };
        let (prefix, total) = (shape.prefix(), shape.blocks().1 * BLOCK);
        let rows = if shape.is_dense() { keys - prefix } else { total };
        if shape.is_dense() {
            let geometry = dense::Geometry {
                num_qo_heads: heads,
                num_kv_heads: kv_heads,
                head_dim_qk: width,
                head_dim_vo: width,
                q_dtype: dtype,
                kv_dtype: dtype,
            };
            let pages = prefix / PAGE;
            // An odd step goes once round a number of pages that it does not divide.
            let indices: Vec<i32> = (0..pages).map(|page| (page * 77 % pages) as i32).collect();
            let (cu_p, kv_indptr) = ([0, prefix as i32], [0, pages as i32]);
            let prefix = match shape.kind {
                Kind::Packed => dense::Prefix::Packed { cu_p: &cu_p },
                Kind::Pages => dense::Prefix::Pages {
                    kv_indptr: &kv_indptr,
                    kv_indices: &indices,
                    prefix_len: &cu_p[1..],
                    page_size: PAGE,
                    page_start: None,
                    num_pages: pages,
                },
                _ => dense::Prefix::None,
            };
            let table = dense::Table { cu_q: &[0, queries as i32], prefix, cu_k: &[0, rows as i32] };
            let variant = dense::Variant::full(width);
            dense::schedule(&geometry, &variant, &table, &options, &mut work).expect("a legal batch");
        } else {
            let geometry = flex::Geometry {
                batch: 1,
                num_qo_heads: heads,
                num_kv_heads: kv_heads,
                head_dim_qk: width,
                head_dim_vo: width,
                q_dtype: dtype,
                kv_dtype: dtype,
            };
            let lists = queries.div_ceil(BLOCK);
            let (visible, _) = shape.blocks();
            let indptr: Vec<i32> = (0..=lists).map(|list| (list * visible.len()) as i32).collect();
            let indices = visible.repeat(lists);
            let partial = vec![1; if shape.kind == Kind::Partial { indices.len() } else { 0 }];
            let blocks = Blocks {
                q_len: queries,
                kv_len: total,
                block_q: BLOCK,
                block_kv: BLOCK,
                batch: 1,
                heads: 1,
                indptr: &indptr,
                indices: &indices,
                partial: &partial,
                positions: None,
            };
            flex::schedule(&geometry, &blocks, &options, &mut work).expect("a legal batch");
        }
        let bytes = dense::workspace_bytes(&work, THREADS);
        let buffers = |seed| {
            [filled(dtype, rows * kv_heads * width, seed), filled(dtype, prefix * kv_heads * width, seed + 1)]
        };
        Batch {
            shape,
            work,
            pool: rayon::ThreadPoolBuilder::new().num_threads(THREADS).build().expect("two threads"),
            q: filled(dtype, queries * heads * width, 1),
            k: buffers(2),
            v: buffers(4),
            o: Buffer::for_tensor(dtype, &[queries * heads * width]).expect("memory"),
            workspace: Buffer::zeroed(bytes).expect("memory"),
            slopes: (0..heads).map(|h| 0.5f32.powi(h as i32 + 1)).collect(),
            bias: (0..heads * 257).map(|i| (i % 31) as f32 * 0.01).collect(),
            user: UserMod::new("distance", |scores, row| {
                let position = row.q_idx as i32 + row.q_offset as i32;
                for (score, &k) in scores.iter_mut().zip(row.k_idx) {
                    *score -= 0.001 * (k - position).abs() as f32;
                }
            }),
        }
    }

    /// Attends once.
    fn run(&mut self) {
        let Batch { shape, work, pool, q, k, v, o, workspace, slopes, bias, user } = self;
        let Shape { dtype, heads, kv_heads, width, queries, keys, .. } = *shape;
        let bytes = workspace.len();
        let workspace = workspace.tensor_mut(0, DType::U8, &[bytes]).expect("sized for it");
        if shape.is_dense() {
            let prefix = shape.prefix();
            let fresh = [keys - prefix, kv_heads, width];
            let packed = [prefix, kv_heads, width];
            let pages = [prefix / PAGE, PAGE, kv_heads, width];
            let frozen: &[usize] = if shape.kind == Kind::Pages { &pages } else { &packed };
            let params = dense::AttendParams {
                work,
                q: view(q, dtype, &[queries, heads, width]),
                k_prefix: (prefix > 0).then(|| view(&k[1], dtype, frozen)),
                v_prefix: (prefix > 0).then(|| view(&v[1], dtype, frozen)),
                k: view(&k[0], dtype, &fresh),
                v: view(&v[0], dtype, &fresh),
                o: o.tensor_mut(0, dtype, &[queries, heads, width]).expect("sized for it"),
                lse: None,
                workspace,
                workers: THREADS,
            };
            pool.install(|| dense::attend(&Stream::cpu(), params)).expect("a legal call");
            return;
        }
        let total = shape.blocks().1 * BLOCK;
        let window = [MaskMod::SlidingWindow { left: usize::MAX, right: usize::MAX }];
        let score = match shape.kind {
            Kind::Causal => ScoreMod::Causal,
            Kind::Alibi => ScoreMod::Alibi { slopes },
            Kind::RelBias => ScoreMod::RelBias { table: bias, window: 128 },
            Kind::SoftCap => ScoreMod::SoftCap(20.0),
            Kind::User => ScoreMod::User(user),
            _ => ScoreMod::None,
        };
        let params = flex::AttendParams {
            work,
            q: view(q, dtype, &[1, queries, heads, width]).transpose(1, 2),
            k: view(&k[0], dtype, &[1, total, kv_heads, width]).transpose(1, 2),
            v: view(&v[0], dtype, &[1, total, kv_heads, width]).transpose(1, 2),
            sm_scale: (width as f32).powf(-0.5),
            q_offset: (total - queries) as i64,
            score_mods: &[score],
            mask_mods: &window[..usize::from(shape.kind == Kind::Partial)],
            o: o.tensor_mut(0, dtype, &[1, queries, heads, width]).expect("sized for it").transpose(1, 2),
            lse: None,
            max_scores: None,
            workspace,
            workers: THREADS,
        };
        pool.install(|| flex::attend(&Stream::cpu(), params)).expect("a legal call");
    }

    fn median_seconds(&mut self, calls: usize) -> f64 {
        self.run();
        let mut seconds: Vec<f64> = (0..calls.max(1))
            .map(|_| {
                let start = Instant::now();
                self.run();
                start.elapsed().as_secs_f64()
            })
            .collect();
        median(&mut seconds)
    }
}

fn median(of: &mut [f64]) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

fn view<'a>(buffer: &'a Buffer, dtype: DType, shape: &[usize]) -> TensorRef<'a> {
    buffer.tensor(0, dtype, shape).expect("sized for it")
}

/// Roughly normal numbers.
fn filled(dtype: DType, len: usize, seed: u64) -> Buffer {
    let mut buffer = Buffer::for_tensor(dtype, &[len]).expect("memory");
    let mut state = seed;
    let mut normal = || {
        let mut sum = 0;
        for _ in 0..4 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            sum += state >> 48;
        }
        (sum as f32 / 65536.0 - 2.0) * 1.73
    };
    let mut tensor = buffer.tensor_mut(0, dtype, &[len]).expect("sized for it");
    match dtype {
        F32 => tensor.as_mut_slice::<f32>().expect("f32").fill_with(normal),
        _ => tensor.as_mut_slice::<bf16>().expect("bf16").fill_with(|| bf16::from_f32(normal())),
    }
    buffer
}

fn find(name: &str) -> Shape {
    *SHAPES.iter().find(|shape| shape.name == name).unwrap_or_else(|| {
        let names: Vec<&str> = SHAPES.iter().map(|shape| shape.name).collect();
        eprintln!("{name} is none of {}", names.join(", "));
        std::process::exit(2);
    })
}

fn ratios() {
    for (name, beside) in PAIRS {
        let (mut a, mut b) = (Batch::new(find(name)), Batch::new(find(beside)));
        let (mut ours, mut theirs, mut each) = (Vec::new(), Vec::new(), Vec::new());
        (0..3).for_each(|_| a.run());
        for _ in 0..7 {
            ours.push(a.median_seconds(5));
            theirs.push(b.median_seconds(5));
            each.push(ours[ours.len() - 1] / theirs[theirs.len() - 1]);
        }
        let ratio = median(&mut ours) / median(&mut theirs);
        median(&mut each);
        let rate = a.shape.flops() as f64 / median(&mut ours) / 1e9;
        println!("{name:22} {rate:6.1} GFLOP/s {ratio:6.3} of {beside} ({:.3}-{:.3})", each[0], each[6]);
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if arguments.iter().any(|argument| argument == "--ratios") {
        return ratios();
    }
    if let Some(at) = arguments.iter().position(|argument| argument == "--time") {
        let shape = find(arguments.get(at + 1).map_or("", String::as_str));
        let calls = arguments.get(at + 2).and_then(|calls| calls.parse().ok()).unwrap_or(10);
        println!("{:e}", Batch::new(shape).median_seconds(calls));
        return;
    }
    let mut criterion = Criterion::default().configure_from_args();
    let mut benches = criterion.benchmark_group("dense");
    for shape in SHAPES {
        let mut batch = None;
        benches.throughput(Throughput::Elements(shape.flops()));
        benches.bench_function(BenchmarkId::from_parameter(shape.name), |bencher| {
            let batch = batch.get_or_insert_with(|| Batch::new(shape));
            bencher.iter(|| batch.run());
        });
    }
    benches.finish();
    criterion.final_summary();
}
