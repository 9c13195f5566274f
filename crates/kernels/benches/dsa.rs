//! The sparse attention indexer on the CPU: scores, the pick by radix selection and by a stable sort, and both at once.
//!
//! `cargo bench -p mstar-kernels --features dsa --bench dsa`
//!
//! With `--time NAME CALLS` it prints the median seconds of a call of one shape instead, for `tools/torch_dsa.py`.

use std::time::Instant;

use criterion::{BenchmarkId, Criterion, Throughput};
use half::bf16;
use mstar_kernels::DType::{self, Bf16, F32, I32, U8};
use mstar_kernels::dsa::{
    KeyFormat, ScoresParams, SelectParams, TopkParams, quantise_keys, scores, scores_workspace_bytes, select,
    select_topk_causal, select_workspace_bytes, topk,
};
use mstar_kernels::{Buffer, Stream};

/// Threads that both sides of a comparison use.
const THREADS: usize = 2;
const HEADS: usize = 64;
const WIDTH: usize = 128;
const KEYS: usize = 32768;
const TOPK: usize = 2048;
const PAGE_SIZE: usize = 64;

/// What is called.
#[derive(Clone, Copy)]
enum Work {
    /// Scores of `rows` rows of one request.
    Scores(KeyFormat),
    /// Those and the pick.
    Select(KeyFormat),
    /// The pick of given scores.
    Topk(Content),
    /// The same by a stable sort.
    Sort(Content),
}

/// How given scores are distributed.
#[derive(Clone, Copy)]
enum Content {
    /// Roughly normal, all different.
    Random,
    /// Of a rectifier: half are 0, and the others repeat.
    Relu,
}

const CASES: [(&str, Work, usize); 13] = [
    ("scores_bf16_r1", Work::Scores(KeyFormat::Bf16), 1),
    ("scores_bf16_r4", Work::Scores(KeyFormat::Bf16), 4),
    ("scores_bf16_r16", Work::Scores(KeyFormat::Bf16), 16),
    ("scores_f32_r1", Work::Scores(KeyFormat::F32), 1),
    ("scores_f32_r4", Work::Scores(KeyFormat::F32), 4),
    ("scores_fp8_r1", Work::Scores(KeyFormat::Fp8), 1),
    ("scores_fp8_r4", Work::Scores(KeyFormat::Fp8), 4),
    ("select_bf16_r1", Work::Select(KeyFormat::Bf16), 1),
    ("select_bf16_r16", Work::Select(KeyFormat::Bf16), 16),
    ("topk_random", Work::Topk(Content::Random), 1),
    ("topk_relu", Work::Topk(Content::Relu), 1),
    ("sort_random", Work::Sort(Content::Random), 1),
    ("sort_relu", Work::Sort(Content::Relu), 1),
];

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn normal(&mut self) -> f32 {
        let sum: u64 = (0..4).map(|_| self.next() & 0xffff).sum();
        (sum as f32 / 65536.0 - 2.0) * 1.73
    }
}

/// Roughly normal numbers.
fn filled(dtype: DType, len: usize, seed: u64) -> Buffer {
    let mut buffer = Buffer::for_tensor(dtype, &[len]).expect("memory");
    let mut random = Random(seed);
    let mut view = buffer.tensor_mut(0, dtype, &[len]).expect("sized for it");
    match dtype {
        F32 => view.as_mut_slice::<f32>().expect("f32").fill_with(|| random.normal()),
        _ => view.as_mut_slice::<bf16>().expect("bf16").fill_with(|| bf16::from_f32(random.normal())),
    }
    buffer
}

/// A case with its memory.
struct Bench {
    pool: rayon::ThreadPool,
    call: Box<dyn FnMut() + Send>,
}

impl Bench {
    fn new(work: Work, rows: usize) -> Bench {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(THREADS).build().expect("two threads");
        let call: Box<dyn FnMut() + Send> = match work {
            Work::Scores(format) => indexer(format, rows, false),
            Work::Select(format) => indexer(format, rows, true),
            Work::Topk(content) => picker(content, rows, false),
            Work::Sort(content) => picker(content, rows, true),
        };
        Bench { pool, call }
    }

    fn run(&mut self) {
        self.pool.install(&mut self.call);
    }
}

/// Rows of one request over keys in shuffled pages.
fn indexer(format: KeyFormat, rows: usize, picks: bool) -> Box<dyn FnMut() + Send> {
    let q_dtype = if format == KeyFormat::F32 { F32 } else { Bf16 };
    let q = filled(q_dtype, rows * HEADS * WIDTH, 1);
    let weights = filled(F32, rows * HEADS, 2);
    let pages = KEYS / PAGE_SIZE;
    let keys = match format {
        KeyFormat::Fp8 => {
            let plain = filled(F32, KEYS * WIDTH, 3);
            let mut stored = Buffer::for_tensor(U8, &[KEYS, WIDTH + 4]).expect("memory");
            let to = stored.tensor_mut(0, U8, &[KEYS, WIDTH + 4]).expect("sized for it");
            quantise_keys(plain.tensor(0, F32, &[KEYS, WIDTH]).expect("sized for it"), to).expect("keys");
            stored
        }
        _ => filled(format.dtype(), KEYS * WIDTH, 3),
    };
    let mut kv_indices: Vec<i32> = (0..pages as i32).collect();
    let mut random = Random(7);
    for i in (1..pages).rev() {
        kv_indices.swap(i, (random.next() % (i as u64 + 1)) as usize);
    }
    let row_request = vec![0; rows];
    // The last query sees every key; all see as many, as the product beside them multiplies.
    let positions = vec![KEYS as i32 - 1; rows];
    let bytes = scores_workspace_bytes(rows, KEYS, HEADS, WIDTH, THREADS)
        .max(select_workspace_bytes(rows, KEYS, HEADS, WIDTH, TOPK, THREADS));
    let mut workspace = Buffer::zeroed(bytes).expect("memory");
    let mut out = Buffer::for_tensor(F32, &[rows, KEYS]).expect("memory");
    let mut selection = Buffer::for_tensor(I32, &[rows, TOPK]).expect("memory");
    Box::new(move || {
        let q = q.tensor(0, q_dtype, &[rows, HEADS, WIDTH]).expect("sized for it");
        let weights = weights.tensor(0, F32, &[rows, HEADS]).expect("sized for it");
        let shape = [pages, PAGE_SIZE, format.width(WIDTH)];
        let keys = keys.tensor(0, format.dtype(), &shape).expect("sized for it");
        let workspace = workspace.tensor_mut(0, U8, &[bytes]).expect("sized for it");
        let (row_request, positions) = (&row_request[..], &positions[..]);
        let (kv_indptr, kv_indices, page_start) = (&[0, pages as i32], &kv_indices[..], &[0]);
        let (kv_lens, workers) = (&[KEYS as i32], THREADS);
        if picks {
            let selection = selection.tensor_mut(0, I32, &[rows, TOPK]).expect("sized for it");
            let params = SelectParams {
                q,
                weights,
                keys,
                format,
                row_request,
                positions,
                kv_indptr,
                kv_indices,
                page_start,
                kv_lens,
                topk: TOPK,
                selection,
                workspace,
                workers,
            };
            select(&Stream::cpu(), params).expect("a legal call");
        } else {
            let scores_out = out.tensor_mut(0, F32, &[rows, KEYS]).expect("sized for it");
            let params = ScoresParams {
                q,
                weights,
                keys,
                format,
                row_request,
                positions,
                kv_indptr,
                kv_indices,
                page_start,
                kv_lens,
                scores: scores_out,
                workspace,
                workers,
            };
            scores(&Stream::cpu(), params).expect("a legal call");
        }
    })
}

fn picker(content: Content, rows: usize, sorts: bool) -> Box<dyn FnMut() + Send> {
    let mut random = Random(5);
    let given: Vec<f32> = (0..rows * KEYS)
        .map(|_| match content {
            Content::Random => random.normal(),
            Content::Relu => (random.normal() * 64.0).round().max(0.0) / 64.0,
        })
        .collect();
    let positions = vec![KEYS as i32 - 1; rows];
    let mut out = Buffer::for_tensor(I32, &[rows, TOPK]).expect("memory");
    Box::new(move || {
        let scores = mstar_kernels::TensorRef::from_slice(&given, &[rows, KEYS]).expect("sized for it");
        let out = out.tensor_mut(0, I32, &[rows, TOPK]).expect("sized for it");
        if sorts {
            select_topk_causal(scores, &positions, TOPK, out).expect("a legal call");
        } else {
            let params = TopkParams { scores, positions: &positions, topk: TOPK, out, workers: THREADS };
            topk(&Stream::cpu(), params).expect("a legal call");
        }
    })
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let Some(at) = arguments.iter().position(|argument| argument == "--time") {
        let name = arguments.get(at + 1).map_or("", String::as_str);
        let calls = arguments.get(at + 2).and_then(|calls| calls.parse().ok()).unwrap_or(10);
        match CASES.iter().find(|case| case.0 == name) {
            Some(&(_, work, rows)) => println!("{:e}", median_seconds(work, rows, calls)),
            None => {
                eprintln!("--time {name}: one of {}", CASES.map(|case| case.0).join(", "));
                std::process::exit(2);
            }
        }
        return;
    }
    let mut criterion = Criterion::default().configure_from_args();
    let mut benches = criterion.benchmark_group("dsa");
    for (name, work, rows) in CASES {
        let mut bench = None;
        benches.throughput(match work {
            Work::Scores(_) | Work::Select(_) => {
                Throughput::Elements((2 * rows * HEADS * WIDTH * KEYS) as u64)
            }
            Work::Topk(_) | Work::Sort(_) => Throughput::Elements((rows * KEYS) as u64),
        });
        benches.bench_function(BenchmarkId::from_parameter(name), |bencher| {
            let bench = bench.get_or_insert_with(|| Bench::new(work, rows));
            bencher.iter(|| bench.run());
        });
    }
    benches.finish();
    criterion.final_summary();
}

fn median_seconds(work: Work, rows: usize, calls: usize) -> f64 {
    let Bench { pool, mut call } = Bench::new(work, rows);
    // In the pool throughout: what is timed is the call, not its way there.
    pool.install(move || {
        (0..3).for_each(|_| call());
        let mut seconds: Vec<f64> = (0..calls.max(1))
            .map(|_| {
                let start = Instant::now();
                call();
                start.elapsed().as_secs_f64()
            })
            .collect();
        seconds.sort_by(f64::total_cmp);
        seconds[seconds.len() / 2]
    })
}
