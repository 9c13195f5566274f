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
#[cfg(all(feature = "cuda", any(feature = "paged", feature = "mla")))]
mod step;

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
    /// Another case that this one is to keep up with.
    pub(super) beside: Option<Beside>,
    /// Allocates and fills what a call needs.
    pub(super) make: Make,
}

/// A case whose share of its limit another is held against.
#[derive(Clone, Debug)]
pub(super) struct Beside {
    /// Its name.
    pub(super) of: String,
    /// The least part of that share.
    pub(super) least: f64,
    /// Whether this is a neighbour, which is in no table: those can be left out.
    pub(super) neighbour: bool,
}

impl Case {
    /// Kernel and shape.
    pub(super) fn name(&self) -> String {
        format!("{} {}", self.kernel, self.shape)
    }

    /// Held against `of`, as rows of another geometry are.
    #[cfg(feature = "paged")]
    fn beside(self, of: &Case, least: f64) -> Case {
        let of = of.beside.as_ref().map_or_else(|| of.name(), |beside| beside.of.clone());
        Case { beside: Some(Beside { of, least, neighbour: false }), ..self }
    }

    /// This case, and two that no table knows of, which are to reach 90 % of what it does.
    #[cfg(any(feature = "paged", feature = "mla", feature = "dsa"))]
    fn with_neighbours(self, neighbours: [Case; 2]) -> Vec<Case> {
        let of = self.name();
        let near = neighbours.map(|case| {
            let beside = Some(Beside { of: of.clone(), least: 0.9, neighbour: true });
            Case { beside, ..case }
        });
        [self].into_iter().chain(near).collect()
    }
}

/// A number of keys beside the round ones.
#[cfg(any(feature = "paged", feature = "mla", feature = "dsa"))]
fn longer(keys: usize) -> usize {
    keys * 137 / 100
}

/// An odd number of rows beside the round ones.
#[cfg(any(feature = "paged", feature = "mla", feature = "dsa"))]
fn odd(rows: usize) -> usize {
    if rows < 4 { 3 } else { rows - 3 }
}

/// Page ids in an order in which neighbours lie far apart in the pool, as they do after a while of serving; each once.
#[cfg(any(feature = "paged", feature = "mla", feature = "dsa"))]
fn strewn(pages: usize) -> impl Fn(usize) -> i32 {
    fn gcd(a: usize, b: usize) -> usize {
        if b == 0 { a } else { gcd(b, a % b) }
    }
    let step = (pages * 5 / 8..).find(|&step| gcd(step.max(1), pages) == 1).unwrap_or(1).max(1);
    move |index| (index * step % pages) as i32
}

/// Every case of a place, large shapes or small ones (of which there are no neighbours).
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
        #[cfg(all(feature = "cuda", any(feature = "paged", feature = "mla")))]
        if cpu { Vec::new() } else { step::list_on_device(quick) },
        if cpu { memory::list(quick) } else { memory::list_on_device(quick) },
    ];
    let mut cases: Vec<Case> = families.into_iter().flatten().collect();
    if quick {
        // Small shapes fall together.
        let mut names = std::collections::HashSet::new();
        cases.retain(|case| {
            case.beside.as_ref().is_none_or(|beside| !beside.neighbour) && names.insert(case.name())
        });
    }
    cases
}

#[cfg(test)]
mod tests {
    use mstar_kernels::Device;

    use super::*;

    /// Runs every quick case of a place, and names those of the large list.
    fn check(place: &Place) {
        for case in list(place, true) {
            assert!(super::super::KERNELS.contains(&case.kernel));
            let name = case.name();
            assert!(name.len() <= 36, "{name}");
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
        let large = list(place, false);
        let names: std::collections::HashSet<String> = large.iter().map(Case::name).collect();
        assert!(names.len() == large.len() && names.iter().all(|name| name.len() <= 36), "{names:?}");
        for case in &large {
            // What a case is held against comes before it.
            assert!(case.beside.as_ref().is_none_or(|beside| names.contains(&beside.of)), "{}", case.name());
        }
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
