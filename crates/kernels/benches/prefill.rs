//! Paged prefill and append on the CPU, in useful operations a second.
//!
//! `cargo bench -p mstar-kernels --features paged --bench prefill`

mod common;

use common::Shape;
use criterion::Throughput;
use mstar_kernels::DType::{Bf16, F32};

const CAUSAL: Shape = Shape {
    name: "h8_d128_l1024_causal_f32",
    dtype: F32,
    num_qo_heads: 8,
    num_kv_heads: 8,
    head_dim: 128,
    rows: 1,
    q_len: 1024,
    kv_len: 1024,
    causal: true,
};

const FULL: Shape =
    Shape { name: "h8_d64_l2048_full_f32", head_dim: 64, q_len: 2048, kv_len: 2048, causal: false, ..CAUSAL };

const GQA: Shape =
    Shape { name: "h32g8_d128_l512_causal_f32", num_qo_heads: 32, q_len: 512, kv_len: 512, ..CAUSAL };

const APPEND: Shape =
    Shape { name: "h32g8_d128_q64_kv8192_causal_f32", num_qo_heads: 32, q_len: 64, kv_len: 8192, ..CAUSAL };

const SHAPES: [Shape; 8] = [
    CAUSAL,
    Shape { name: "h8_d128_l1024_causal_bf16", dtype: Bf16, ..CAUSAL },
    FULL,
    Shape { name: "h8_d64_l2048_full_bf16", dtype: Bf16, ..FULL },
    GQA,
    Shape { name: "h32g8_d128_l512_causal_bf16", dtype: Bf16, ..GQA },
    APPEND,
    Shape { name: "h32g8_d128_q64_kv8192_causal_bf16", dtype: Bf16, ..APPEND },
];

fn main() {
    common::main("prefill", &SHAPES, |shape| Throughput::Elements(flops(shape)));
}

/// Useful operations: unmasked pairs of query and key, two products each.
fn flops(shape: &Shape) -> u64 {
    let (q, kv) = (shape.q_len as u64, shape.kv_len as u64);
    let pairs = if shape.causal { q * (kv - q) + q * (q + 1) / 2 } else { q * kv };
    4 * pairs * (shape.rows * shape.num_qo_heads * shape.head_dim) as u64
}
