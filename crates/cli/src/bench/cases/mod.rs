//! The kernels and their shapes, one file a family, each through the level that other projects call.

#[cfg(feature = "dense")]
mod dense;
#[cfg(feature = "dsa")]
mod dsa;
#[cfg(feature = "flex")]
mod flex;
mod memory;
#[cfg(any(feature = "mla", feature = "dsa"))]
mod mla;
#[cfg(feature = "paged")]
mod paged;

use half::bf16;
use mstar_kernels::{Buffer, DType};

use super::measure::Made;
use super::report::Cost;

/// A kernel at one shape.
pub(super) struct Case {
    /// The name that selects it.
    pub(super) kernel: &'static str,
    /// The shape, as printed.
    pub(super) shape: String,
    /// Type of what is multiplied.
    pub(super) dtype: DType,
    /// Useful work of a call.
    pub(super) cost: Cost,
    /// Allocates and fills what a call needs.
    pub(super) make: Box<dyn FnOnce() -> anyhow::Result<Made>>,
}

/// Every case, large shapes or small ones.
pub(super) fn list(quick: bool) -> Vec<Case> {
    let families = [
        #[cfg(feature = "paged")]
        paged::list(quick),
        #[cfg(feature = "dsa")]
        dsa::list(quick),
        #[cfg(any(feature = "mla", feature = "dsa"))]
        mla::list(quick),
        #[cfg(feature = "dense")]
        dense::list(quick),
        #[cfg(feature = "flex")]
        flex::list(quick),
        memory::list(quick),
    ];
    families.into_iter().flatten().collect()
}

/// A buffer of numbers in -1..1.
fn filled(dtype: DType, len: usize) -> anyhow::Result<Buffer> {
    let mut buffer = Buffer::for_tensor(dtype, &[len])?;
    let number = |i: usize| ((i as u32).wrapping_mul(2_654_435_761) >> 16) as f32 / 32_768.0 - 1.0;
    let mut view = buffer.tensor_mut(0, dtype, &[len])?;
    if let Some(numbers) = view.as_mut_slice::<f32>() {
        numbers.iter_mut().enumerate().for_each(|(i, x)| *x = number(i));
    } else if let Some(numbers) = view.as_mut_slice::<bf16>() {
        numbers.iter_mut().enumerate().for_each(|(i, x)| *x = bf16::from_f32(number(i)));
    }
    Ok(buffer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_quick_case_runs_and_is_one_that_can_be_named() {
        for case in list(true) {
            assert!(super::super::KERNELS.contains(&case.kernel));
            assert!(case.kernel.len() + case.shape.len() < 34, "{} {}", case.kernel, case.shape);
            let mut made = (case.make)().unwrap();
            (made.work)().unwrap_or_else(|error| panic!("{} {}: {error:#}", case.kernel, case.shape));
            assert_eq!(made.reads.is_some(), case.kernel == "decode");
            if let Some(mut reads) = made.reads {
                (reads.in_order)().unwrap();
                (reads.in_page_order)().unwrap();
                assert!(reads.bytes <= case.cost.bytes);
            }
        }
        assert!(list(false).iter().all(|case| case.kernel.len() + case.shape.len() < 34));
    }
}
