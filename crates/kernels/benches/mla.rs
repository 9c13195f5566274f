//! Latent attention on the CPU: decode, prefill and attention over picks, beside what the machine can do.
//!
//! `cargo bench -p mstar-kernels --features dsa --bench mla`. With `--time NAME CALLS` it prints the median seconds of a
//! call of one shape, for `tools/torch_mla.py`; with `--table` one line a shape: milliseconds, bytes of latents and
//! multiply-adds a second, and both beside this machine's limits.

use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput};
use half::bf16;
use mstar_kernels::cpu::{Isa, peak};
use mstar_kernels::dsa::{SparseParams, sparse_attend, sparse_workspace_bytes};
use mstar_kernels::mla::{AttendParams, Geometry, Variant, attend, schedule, workspace_bytes};
use mstar_kernels::paged::{PageTable, ScheduleOptions};
use mstar_kernels::work::WorkList;
use mstar_kernels::{Buffer, DType, Stream};

/// Threads that both sides of a comparison use.
const THREADS: usize = 2;

const PAGE_SIZE: usize = 64;

/// Equal rows.
#[derive(Clone, Copy)]
struct Shape {
    name: &'static str,
    dtype: DType,
    heads: usize,
    lora: usize,
    rope: usize,
    rows: usize,
    q_len: usize,
    kv_len: usize,
    /// Picks a row; 0 attends every key.
    topk: usize,
}

const DECODE: Shape = Shape {
    name: "h16_c512e64_kv32768_bf16",
    dtype: DType::Bf16,
    heads: 16,
    lora: 512,
    rope: 64,
    rows: 1,
    q_len: 1,
    kv_len: 32768,
    topk: 0,
};

const SHAPES: [Shape; 10] = [
    DECODE,
    Shape { name: "h64_c512e64_kv32768_bf16", heads: 64, ..DECODE },
    Shape { name: "h128_c512e64_kv32768_bf16", heads: 128, ..DECODE },
    Shape { name: "h16_c512e0_kv32768_bf16", rope: 0, ..DECODE },
    Shape { name: "h16_bs16_kv2048_bf16", rows: 16, kv_len: 2048, ..DECODE },
    Shape { name: "h16_c512e64_kv32768_f32", dtype: DType::F32, ..DECODE },
    Shape { name: "h16_prefill2048_bf16", q_len: 2048, kv_len: 2048, ..DECODE },
    Shape { name: "h16_picks2048_of_32768_bf16", topk: 2048, ..DECODE },
    Shape { name: "h64_picks2048_of_32768_bf16", heads: 64, topk: 2048, ..DECODE },
    Shape { name: "h16_bs16_picks2048_of_8192_bf16", rows: 16, kv_len: 8192, topk: 2048, ..DECODE },
];

impl Shape {
    fn depth(&self) -> usize {
        self.lora + self.rope
    }

    /// Keys that a query sees, summed over queries.
    fn pairs(&self) -> f64 {
        let (q, kv) = (self.q_len as f64, self.kv_len as f64);
        let seen = if self.topk > 0 { q * self.topk as f64 } else { q * (kv - (q - 1.0) / 2.0) };
        self.rows as f64 * seen
    }

    /// Floating-point operations of scores and values.
    fn flops(&self) -> f64 {
        2.0 * self.pairs() * (self.heads * (self.depth() + self.lora)) as f64
    }

    /// Bytes of latents that are read at least.
    fn bytes(&self) -> f64 {
        let keys = if self.topk > 0 { self.q_len * self.topk } else { self.kv_len };
        (self.rows * keys * self.depth() * self.dtype.size()) as f64
    }
}

/// A shape with its memory.
struct Batch {
    shape: Shape,
    pool: rayon::ThreadPool,
    work: WorkList,
    kv_indptr: Vec<i32>,
    kv_indices: Vec<i32>,
    selection: Buffer,
    row_request: Vec<i32>,
    q: Buffer,
    latent: Buffer,
    o: Buffer,
    workspace: Buffer,
}

impl Batch {
    fn new(shape: Shape) -> Batch {
        let pages_per_row = shape.kv_len.div_ceil(PAGE_SIZE);
        let pages = shape.rows * pages_per_row;
        // Pages as a pool that has lived for a while hands them out: in no order.
        let mut kv_indices: Vec<i32> = (0..pages as i32).collect();
        let mut random = Random(7);
        for i in (1..pages).rev() {
            kv_indices.swap(i, (random.next() % (i as u64 + 1)) as usize);
        }
        let indptr = |step: usize| (0..=shape.rows).map(|r| (r * step) as i32).collect::<Vec<_>>();
        let kv_indptr = indptr(pages_per_row);
        let last = (shape.kv_len - (pages_per_row - 1) * PAGE_SIZE) as i32;
        let table = PageTable {
            qo_indptr: &indptr(shape.q_len),
            kv_indptr: &kv_indptr,
            kv_indices: &kv_indices,
            kv_last_page_len: &vec![last; shape.rows],
            num_pages: pages,
            ..PageTable::default()
        };
        let mut work = WorkList::default();
        let options = ScheduleOptions { workers: THREADS, ..ScheduleOptions::default() };
        let variant = Variant { sm_scale: 0.072, causal: true };
        schedule(&geometry(&shape), &variant, &table, &options, &mut work).expect("a legal batch");
        let tokens = shape.rows * shape.q_len;
        // Picks as a selection gives them: ascending.
        let picks = shape.topk.max(1);
        let mut selection = Buffer::for_tensor(DType::I32, &[tokens, picks]).expect("memory");
        let mut view = selection.tensor_mut(0, DType::I32, &[tokens * picks]).expect("sized for it");
        for row in view.as_mut_slice::<i32>().expect("i32").chunks_mut(picks) {
            let step = shape.kv_len as u64 / picks as u64;
            for (i, pick) in row.iter_mut().enumerate() {
                *pick = (i as u64 * step + random.next() % step) as i32;
            }
        }
        let bytes = match shape.topk {
            0 => workspace_bytes(&work, THREADS),
            topk => sparse_workspace_bytes(&geometry(&shape), topk, THREADS),
        };
        Batch {
            shape,
            pool: rayon::ThreadPoolBuilder::new().num_threads(THREADS).build().expect("two threads"),
            work,
            kv_indptr,
            kv_indices,
            selection,
            row_request: (0..tokens).map(|t| (t / shape.q_len) as i32).collect(),
            q: filled(shape.dtype, tokens * shape.heads * shape.depth(), 1),
            latent: filled(shape.dtype, pages * PAGE_SIZE * shape.depth(), 2),
            o: Buffer::for_tensor(shape.dtype, &[tokens * shape.heads * shape.lora]).expect("memory"),
            workspace: Buffer::zeroed(bytes).expect("memory"),
        }
    }

    /// Attends once.
    fn run(&mut self) {
        let shape = self.shape;
        let (tokens, pages) = (shape.rows * shape.q_len, self.kv_indices.len());
        let dims = [tokens, shape.heads, shape.depth()];
        let q = self.q.tensor(0, shape.dtype, &dims).expect("sized for it");
        let q_nope = q.narrow(2, 0, shape.lora).expect("the first lanes");
        let q_pe = q.narrow(2, shape.lora, shape.rope).expect("the other lanes");
        let latent =
            self.latent.tensor(0, shape.dtype, &[pages, PAGE_SIZE, shape.depth()]).expect("sized for it");
        let o = self.o.tensor_mut(0, shape.dtype, &[tokens, shape.heads, shape.lora]).expect("sized for it");
        let bytes = self.workspace.len();
        let workspace = self.workspace.tensor_mut(0, DType::U8, &[bytes]).expect("sized for it");
        let (stream, workers) = (Stream::cpu(), THREADS);
        if shape.topk == 0 {
            let work = &self.work;
            let params = AttendParams { work, q_nope, q_pe, latent, o, lse: None, workspace, workers };
            self.pool.install(|| attend(&stream, params)).expect("a legal call");
            return;
        }
        let params = SparseParams {
            geometry: geometry(&shape),
            sm_scale: 0.072,
            q_nope,
            q_pe,
            latent,
            selection: self.selection.tensor(0, DType::I32, &[tokens, shape.topk]).expect("sized for it"),
            row_request: &self.row_request,
            kv_indptr: &self.kv_indptr,
            kv_indices: &self.kv_indices,
            page_start: &vec![0; shape.rows],
            kv_lens: &vec![shape.kv_len as i32; shape.rows],
            o,
            lse: None,
            workspace,
            workers,
        };
        self.pool.install(|| sparse_attend(&stream, params)).expect("a legal call");
    }
}

fn geometry(shape: &Shape) -> Geometry {
    Geometry {
        num_qo_heads: shape.heads,
        kv_lora_rank: shape.lora,
        qk_rope_head_dim: shape.rope,
        page_size: PAGE_SIZE,
        q_dtype: shape.dtype,
        kv_dtype: shape.dtype,
    }
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }
}

/// Roughly normal numbers.
fn filled(dtype: DType, len: usize, seed: u64) -> Buffer {
    let mut buffer = Buffer::for_tensor(dtype, &[len]).expect("memory");
    let mut random = Random(seed);
    let mut normal = || {
        let sum: u64 = (0..4).map(|_| random.next() & 0xffff).sum();
        (sum as f32 / 65536.0 - 2.0) * 1.73
    };
    let mut view = buffer.tensor_mut(0, dtype, &[len]).expect("sized for it");
    match dtype {
        DType::F32 => view.as_mut_slice::<f32>().expect("f32").fill_with(normal),
        _ => view.as_mut_slice::<bf16>().expect("bf16").fill_with(|| bf16::from_f32(normal())),
    }
    buffer
}

fn median_seconds(shape: Shape, calls: usize) -> f64 {
    let mut batch = Batch::new(shape);
    (0..3).for_each(|_| batch.run());
    let mut seconds: Vec<f64> = (0..calls.max(1))
        .map(|_| {
            let start = Instant::now();
            batch.run();
            start.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

/// Operations a second of all threads at once, in registers.
fn peak_of(dtype: DType) -> f64 {
    let one = move || peak::peak_flops(Isa::current(), dtype, Duration::from_millis(200));
    let threads: Vec<_> = (0..THREADS).map(|_| std::thread::spawn(one)).collect();
    threads.into_iter().map(|thread| thread.join().expect("a measurement")).sum()
}

/// Bytes a second that all threads read at once, from arrays of their own that no cache holds.
fn read_bandwidth() -> f64 {
    const WORDS: usize = 32 << 20;
    let data = vec![1u64; THREADS * WORDS];
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        let start = Instant::now();
        std::thread::scope(|scope| {
            for part in data.chunks(WORDS) {
                scope.spawn(|| std::hint::black_box(part.iter().fold(0u64, |sum, &x| sum.wrapping_add(x))));
            }
        });
        best = best.min(start.elapsed().as_secs_f64());
    }
    (data.len() * 8) as f64 / best
}

fn table(names: &[String]) {
    let bandwidth = read_bandwidth();
    let peaks = [peak_of(DType::Bf16), peak_of(DType::F32)];
    println!(
        "read {:.1} GB/s, bf16 {:.0} GFLOP/s, f32 {:.0} GFLOP/s in registers, {THREADS} threads, {}",
        bandwidth / 1e9,
        peaks[0] / 1e9,
        peaks[1] / 1e9,
        Isa::current()
    );
    for shape in SHAPES.iter().filter(|shape| names.is_empty() || names.iter().any(|name| name == shape.name))
    {
        let calls = (1e12 / shape.flops()).clamp(5.0, 200.0) as usize;
        let seconds = median_seconds(*shape, calls);
        let (bytes, flops) = (shape.bytes() / seconds, shape.flops() / seconds);
        let peak = peaks[usize::from(shape.dtype == DType::F32)];
        println!(
            "{:34} {:8.3} ms {:6.1} GB/s ({:3.0} %) {:6.1} GFLOP/s ({:3.0} %)",
            shape.name,
            seconds * 1e3,
            bytes / 1e9,
            100.0 * bytes / bandwidth,
            flops / 1e9,
            100.0 * flops / peak
        );
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let Some(at) = arguments.iter().position(|argument| argument == "--table") {
        table(&arguments[at + 1..]);
        return;
    }
    if let Some(at) = arguments.iter().position(|argument| argument == "--time") {
        let name = arguments.get(at + 1).map_or("", String::as_str);
        let calls = arguments.get(at + 2).and_then(|calls| calls.parse().ok()).unwrap_or(10);
        let Some(shape) = SHAPES.iter().find(|shape| shape.name == name) else {
            let names: Vec<&str> = SHAPES.iter().map(|shape| shape.name).collect();
            eprintln!("--time {name}: one of {}", names.join(", "));
            std::process::exit(2);
        };
        println!("{:e}", median_seconds(*shape, calls));
        return;
    }
    let mut criterion = Criterion::default().configure_from_args();
    let mut benches = criterion.benchmark_group("mla");
    for shape in SHAPES {
        let mut batch = None;
        benches.throughput(Throughput::Bytes(shape.bytes() as u64));
        benches.bench_function(BenchmarkId::from_parameter(shape.name), |bencher| {
            let batch = batch.get_or_insert_with(|| Batch::new(shape));
            bencher.iter(|| batch.run());
        });
    }
    benches.finish();
    criterion.final_summary();
}
