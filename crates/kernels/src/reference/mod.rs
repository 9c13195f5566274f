//! The oracle: every operation in plain f64 loops over raw row-major arrays.
//!
//! Slow and obvious on purpose. It takes slices and plain numbers, in the layouts of the recorded parity
//! cases, and shares no mask, index or page code with the page store, the planner or the fast kernels:
//! where they agree, they agree for independent reasons. One file an operation.
//!
//! | operation | what it attends |
//! | --- | --- |
//! | [`paged`](mod@paged) | rows over pages of keys and values; cross-attention is the same, not causal |
//! | [`mla`](mod@mla) | absorbed queries over paged latents |
//! | [`dense`](mod@dense) | packed rows over packed keys, `[prefix \| fresh]` |
//! | [`flex`](mod@flex) | batches over blocks written or not, with a score mod |
//! | [`ring`](mod@ring) | passes over a ring of frames per world, and which blocks each pass saw |
//! | [`dsa_select`](mod@dsa_select), [`dsa_attend`](mod@dsa_attend) | top-k by index keys, and absorbed attention over the pick |
//! | [`fp8`] | what caches of e4m3 stand for, for the oracles above |
//!
//! Rules that all of them share: query head `h` reads key head `h / (H / G)`; scores are `sm_scale * q.k`
//! in f64; a query that sees no key has `o = 0` and `lse = -inf`, with or without a sink; `lse` is natural.
//! A slot that a query does not see is never read.

pub mod dense;
pub mod dsa_attend;
pub mod dsa_select;
pub mod flex;
pub mod fp8;
pub mod mla;
pub mod paged;
pub mod ring;

mod arrays;
mod latents;
mod softmax;

pub use dense::dense;
pub use dsa_attend::dsa_attend;
pub use dsa_select::dsa_select;
pub use flex::flex;
pub use mla::mla;
pub use paged::paged;
pub use ring::ring;

/// A scalar that the oracle can read exactly.
pub trait Real: Copy {
    /// The same number in f64.
    fn to_f64(self) -> f64;
}

macro_rules! real {
    ($($t:ty: $convert:expr),* $(,)?) => { $(impl Real for $t { fn to_f64(self) -> f64 { $convert(self) } })* };
}
real! { f64: |x| x, f32: f64::from, half::bf16: half::bf16::to_f64, half::f16: half::f16::to_f64 }

/// What an attention operation returns.
#[derive(Clone, Debug, PartialEq)]
pub struct Attended {
    /// The weighted values, row-major: `[T, H, Dv]`, or as the operation says.
    pub o: Vec<f64>,
    /// Natural log of each query's softmax denominator: `[T, H]`, or as the operation says.
    pub lse: Vec<f64>,
}

/// `sum_d a[d] * b[d]`, in order.
fn dot<A: Real, B: Real>(a: &[A], b: &[B]) -> f64 {
    a.iter().zip(b).map(|(&x, &y)| x.to_f64() * y.to_f64()).sum()
}
