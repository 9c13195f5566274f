//! One batch of paged attention, made once and attended again and again, for criterion and for the clock.

use std::time::Instant;

use criterion::{BenchmarkId, Criterion, Throughput};
use mstar_kernels::paged::{
    AttendParams, Geometry, PageTable, ScheduleOptions, Variant, attend, schedule, workspace_bytes,
};
use mstar_kernels::work::WorkList;
use mstar_kernels::{Buffer, DType, Stream};

/// Threads that both sides of a comparison use.
pub(crate) const THREADS: usize = 2;

/// A batch of equal rows.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) name: &'static str,
    pub(crate) dtype: DType,
    pub(crate) num_qo_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) rows: usize,
    pub(crate) q_len: usize,
    pub(crate) kv_len: usize,
    pub(crate) causal: bool,
}

const PAGE_SIZE: usize = 16;

/// A shape with its memory.
pub(crate) struct Batch {
    shape: Shape,
    work: WorkList,
    pool: rayon::ThreadPool,
    q: Buffer,
    /// `[P, 2, S, G, D]`.
    kv: Buffer,
    o: Buffer,
    workspace: Buffer,
    pages: usize,
}

impl Batch {
    pub(crate) fn new(shape: Shape) -> Batch {
        let pages_per_row = shape.kv_len.div_ceil(PAGE_SIZE);
        let pages = shape.rows * pages_per_row;
        let geometry = Geometry {
            num_qo_heads: shape.num_qo_heads,
            num_kv_heads: shape.num_kv_heads,
            head_dim_qk: shape.head_dim,
            head_dim_vo: shape.head_dim,
            page_size: PAGE_SIZE,
            q_dtype: shape.dtype,
            kv_dtype: shape.dtype,
        };
        let mut variant = Variant::causal(shape.head_dim);
        variant.causal = shape.causal;
        // Pages as a pool that has lived for a while hands them out: in no order.
        let mut indices: Vec<i32> = (0..pages as i32).collect();
        let mut random = Random(7);
        for i in (1..pages).rev() {
            indices.swap(i, (random.next() % (i as u64 + 1)) as usize);
        }
        let indptr = |step: usize| (0..=shape.rows).map(|r| (r * step) as i32).collect::<Vec<_>>();
        let last = (shape.kv_len - (pages_per_row - 1) * PAGE_SIZE) as i32;
        let table = PageTable {
            qo_indptr: &indptr(shape.q_len),
            kv_indptr: &indptr(pages_per_row),
            kv_indices: &indices,
            kv_last_page_len: &vec![last; shape.rows],
            num_pages: pages,
            ..PageTable::default()
        };
        let mut work = WorkList::default();
        let options = ScheduleOptions { workers: THREADS, ..ScheduleOptions::default() };
        schedule(&geometry, &variant, &table, &options, &mut work).expect("a legal batch");
        let tokens = shape.rows * shape.q_len;
        let q_len = tokens * shape.num_qo_heads * shape.head_dim;
        Batch {
            shape,
            pool: rayon::ThreadPoolBuilder::new().num_threads(THREADS).build().expect("two threads"),
            q: filled(shape.dtype, q_len, 1),
            kv: filled(shape.dtype, pages * 2 * PAGE_SIZE * shape.num_kv_heads * shape.head_dim, 2),
            o: Buffer::for_tensor(shape.dtype, &[q_len]).expect("memory"),
            workspace: Buffer::zeroed(workspace_bytes(&work, THREADS)).expect("memory"),
            work,
            pages,
        }
    }

    /// Attends once.
    pub(crate) fn run(&mut self) {
        let Batch { shape, work, pool, q, kv, o, workspace, pages } = self;
        let q_shape = [shape.rows * shape.q_len, shape.num_qo_heads, shape.head_dim];
        let kv_shape = [*pages, 2, PAGE_SIZE, shape.num_kv_heads, shape.head_dim];
        let kv = kv.tensor(0, shape.dtype, &kv_shape).expect("sized for it");
        let bytes = workspace.len();
        let params = AttendParams {
            work,
            q: q.tensor(0, shape.dtype, &q_shape).expect("sized for it"),
            k: kv.select(1, 0).expect("keys"),
            v: kv.select(1, 1).expect("values"),
            kv_scales: None,
            sinks: None,
            alibi_slopes: None,
            o: o.tensor_mut(0, shape.dtype, &q_shape).expect("sized for it"),
            lse: None,
            workspace: workspace.tensor_mut(0, DType::U8, &[bytes]).expect("sized for it"),
            workers: THREADS,
        };
        pool.install(|| attend(&Stream::cpu(), params)).expect("a legal call");
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
        _ => view.as_mut_slice::<half::bf16>().expect("bf16").fill_with(|| half::bf16::from_f32(normal())),
    }
    buffer
}

/// Runs `shapes` under criterion; with `--time NAME CALLS`, prints the median seconds of a call of one shape
/// instead, for `tools/torch_sdpa.py`.
pub(crate) fn main(group: &str, shapes: &[Shape], throughput: impl Fn(&Shape) -> Throughput) {
    let arguments: Vec<String> = std::env::args().collect();
    if let Some(at) = arguments.iter().position(|argument| argument == "--time") {
        let name = arguments.get(at + 1).map_or("", String::as_str);
        let calls = arguments.get(at + 2).and_then(|calls| calls.parse().ok()).unwrap_or(10);
        match shapes.iter().find(|shape| shape.name == name) {
            Some(shape) => println!("{:e}", median_seconds(*shape, calls)),
            None => {
                let names: Vec<&str> = shapes.iter().map(|shape| shape.name).collect();
                eprintln!("--time {name}: one of {}", names.join(", "));
                std::process::exit(2);
            }
        }
        return;
    }
    let mut criterion = Criterion::default().configure_from_args();
    let mut benches = criterion.benchmark_group(group);
    for shape in shapes {
        let mut batch = None;
        benches.throughput(throughput(shape));
        benches.bench_function(BenchmarkId::from_parameter(shape.name), |bencher| {
            let batch = batch.get_or_insert_with(|| Batch::new(*shape));
            bencher.iter(|| batch.run());
        });
    }
    benches.finish();
    criterion.final_summary();
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
