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

use mstar_kernels::DType;

use super::measure::Made;
use super::place::Place;
use super::report::Cost;

/// Makes a case at a place.
type Make = Box<dyn FnOnce(&Place) -> anyhow::Result<Made>>;

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
    pub(super) make: Make,
}

/// Every case of a place, large shapes or small ones.
pub(super) fn list(place: &Place, quick: bool) -> Vec<Case> {
    let cpu = place.is_cpu();
    let families = [
        #[cfg(feature = "paged")]
        if cpu { paged::list(quick) } else { paged::list_on_device(quick) },
        #[cfg(feature = "dsa")]
        if cpu { dsa::list(quick) } else { dsa::list_on_device(quick) },
        #[cfg(any(feature = "mla", feature = "dsa"))]
        if cpu { mla::list(quick) } else { mla::list_on_device(quick) },
        #[cfg(feature = "dense")]
        if cpu { dense::list(quick) } else { dense::list_on_device(quick) },
        #[cfg(feature = "flex")]
        if cpu { flex::list(quick) } else { flex::list_on_device(quick) },
        if cpu { memory::list(quick) } else { memory::list_on_device(quick) },
    ];
    families.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use mstar_kernels::Device;

    use super::*;

    /// Runs every quick case of a place, and names those of the large list.
    fn check(place: &Place) {
        for case in list(place, true) {
            assert!(super::super::KERNELS.contains(&case.kernel));
            assert!(case.kernel.len() + case.shape.len() < 34, "{} {}", case.kernel, case.shape);
            let name = format!("{} {}", case.kernel, case.shape);
            let mut made = (case.make)(place).unwrap_or_else(|error| panic!("{name}: {error:#}"));
            (made.work)().unwrap_or_else(|error| panic!("{name}: {error:#}"));
            place.stream().synchronize().unwrap();
            assert_eq!(made.reads.is_some(), case.kernel == "decode" && place.is_cpu());
            if let Some(mut reads) = made.reads {
                (reads.in_order)().unwrap();
                (reads.in_page_order)().unwrap();
                assert!(reads.bytes <= case.cost.bytes);
            }
        }
        assert!(list(place, false).iter().all(|case| case.kernel.len() + case.shape.len() < 34));
    }

    #[test]
    fn every_quick_case_runs_and_is_one_that_can_be_named() {
        check(&Place::on(Device::Cpu).unwrap());
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn every_quick_case_of_a_device_runs_and_is_timed() {
        #[cfg(feature = "emulator")]
        mstar_kernels::cuda::emulate();
        let place = match Place::on(Device::Cuda(0)) {
            Ok(place) => place,
            Err(why) => return println!("SKIPPED: {why}"),
        };
        check(&place);
        let mut clock = super::super::device::Clock::of(&place).unwrap();
        let limits = clock.limits(&place).unwrap();
        assert!(limits.read > 0.0 && limits.flops_bf16 > 0.0);
        let case = list(&place, true).into_iter().find(|case| case.kernel == "scatter").unwrap();
        let timed = clock.measure(&place, (case.make)(&place).unwrap(), true).unwrap();
        assert!(timed.median > 0.0 && timed.repetitions == 3);
    }
}
