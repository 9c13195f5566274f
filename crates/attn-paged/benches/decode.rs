//! Decode through the wrapper level: bytes of keys and values read per second.
//!
//! `cargo bench -p mstar-attn-paged --bench decode`

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;
use mstar_attn_paged::{
    Geometry, Inputs, Outputs, PageTable, Plan, PlanOptions, Stream, TensorMut, Variant, Workspace, run,
};
use mstar_kernels::{Buffer, Element};

/// A buffer, as caches are made of, of numbers in -1..1.
fn fill<T: Element>(len: usize, of: impl Fn(f32) -> T) -> Buffer {
    let mut buffer = Buffer::for_tensor(T::DTYPE, &[len]).unwrap();
    let mut view = buffer.tensor_mut(0, T::DTYPE, &[len]).unwrap();
    for (i, x) in view.as_mut_slice::<T>().unwrap().iter_mut().enumerate() {
        *x = of(((i as u32).wrapping_mul(2_654_435_761) >> 16) as f32 / 32768.0 - 1.0);
    }
    buffer
}

fn decode<T: Element>(c: &mut Criterion, name: &str, rows: usize, kv_len: usize, of: impl Fn(f32) -> T) {
    let (h, g, d, s) = (32, 8, 128, 16);
    let per_row = kv_len.div_ceil(s);
    let pages = rows * per_row;
    let geometry = Geometry {
        num_qo_heads: h,
        num_kv_heads: g,
        head_dim_qk: d,
        head_dim_vo: d,
        page_size: s,
        q_dtype: T::DTYPE,
        kv_dtype: T::DTYPE,
    };
    // Pages lie scattered: neighbours in a row are far apart in the pool.
    let step = (pages * 5 / 8) | 1;
    let step = (step..).find(|step| gcd(*step, pages) == 1).unwrap_or(1);
    let indices: Vec<i32> = (0..pages).map(|i| (i * step % pages) as i32).collect();
    let table = PageTable {
        qo_indptr: &(0..=rows as i32).collect::<Vec<_>>(),
        kv_indptr: &(0..=rows).map(|r| (r * per_row) as i32).collect::<Vec<_>>(),
        kv_indices: &indices,
        kv_last_page_len: &vec![((kv_len - 1) % s + 1) as i32; rows],
        num_pages: pages,
        ..PageTable::default()
    };
    let plan = Plan::new(&geometry, &Variant::causal(d), &table, &PlanOptions::default()).unwrap();
    let mut workspace = Workspace::for_plan(&plan).unwrap();
    let q = fill(rows * h * d, &of);
    let (k, v) = (fill(pages * s * g * d, &of), fill(pages * s * g * d, &of));
    let mut o = vec![of(0.0); rows * h * d];
    let bytes = 2 * rows * kv_len * g * d * size_of::<T>();
    let mut group = c.benchmark_group("decode 32/8 heads, D 128, page 16");
    group.throughput(Throughput::BytesDecimal(bytes as u64));
    group.bench_function(BenchmarkId::new(name, format!("{rows} x {kv_len}")), |b| {
        b.iter(|| {
            let inputs = Inputs {
                q: q.tensor(0, T::DTYPE, &[rows, h, d]).unwrap(),
                k: k.tensor(0, T::DTYPE, &[pages, s, g, d]).unwrap(),
                v: v.tensor(0, T::DTYPE, &[pages, s, g, d]).unwrap(),
                sinks: None,
                alibi_slopes: None,
            };
            let outputs = Outputs { o: TensorMut::from_slice(&mut o, &[rows, h, d]).unwrap(), lse: None };
            run(black_box(&plan), &Stream::cpu(), &mut workspace, inputs, outputs).unwrap();
        });
    });
    group.finish();
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The ceiling: all threads add up a large array.
fn read(c: &mut Criterion) {
    use rayon::prelude::*;
    let data = fill(64 << 20, |x| x);
    let data = data.tensor(0, f32::DTYPE, &[64 << 20]).unwrap().as_slice::<f32>().unwrap();
    let mut group = c.benchmark_group("read");
    group.throughput(Throughput::BytesDecimal(4 * data.len() as u64));
    group.bench_function("sum of 256 MiB", |b| {
        b.iter(|| {
            let part = |chunk: &[f32]| {
                let mut sums = [0f32; 64];
                for row in chunk.chunks_exact(64) {
                    sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
                }
                sums.iter().sum::<f32>()
            };
            data.par_chunks(1 << 16).map(part).sum::<f32>()
        });
    });
    group.finish();
}

fn benches(c: &mut Criterion) {
    read(c);
    for (rows, kv_len) in [(1, 8192), (1, 65536), (64, 1024)] {
        decode(c, "f32", rows, kv_len, |x| x);
        decode(c, "bf16", rows, kv_len, bf16::from_f32);
    }
}

criterion_group!(decode_benches, benches);
criterion_main!(decode_benches);
