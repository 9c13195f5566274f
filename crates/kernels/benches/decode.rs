//! Paged decode on the CPU, in bytes of keys and values a second.
//!
//! `cargo bench -p mstar-kernels --features paged --bench decode`

mod common;

use common::Shape;
use criterion::Throughput;
use mstar_kernels::DType::{Bf16, F32};

const LONG: Shape = Shape {
    name: "h32g8_d128_kv65536_f32",
    dtype: F32,
    num_qo_heads: 32,
    num_kv_heads: 8,
    head_dim: 128,
    rows: 1,
    q_len: 1,
    kv_len: 65536,
    causal: true,
};

const SHORT: Shape = Shape { name: "h32g8_d128_kv8192_f32", kv_len: 8192, ..LONG };

const BATCH: Shape = Shape { name: "h32g8_d128_bs16_kv2048_f32", rows: 16, kv_len: 2048, ..LONG };

const SHAPES: [Shape; 6] = [
    LONG,
    Shape { name: "h32g8_d128_kv65536_bf16", dtype: Bf16, ..LONG },
    SHORT,
    Shape { name: "h32g8_d128_kv8192_bf16", dtype: Bf16, ..SHORT },
    BATCH,
    Shape { name: "h32g8_d128_bs16_kv2048_bf16", dtype: Bf16, ..BATCH },
];

fn main() {
    common::main("decode", &SHAPES, |shape| Throughput::Bytes(kv_bytes(shape)));
}

/// Bytes of keys and values.
fn kv_bytes(shape: &Shape) -> u64 {
    let elements = 2 * shape.rows * shape.kv_len * shape.num_kv_heads * shape.head_dim;
    (elements * shape.dtype.size()) as u64
}
