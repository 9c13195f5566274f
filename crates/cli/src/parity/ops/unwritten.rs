//! What every op's own backend needs of a case: outputs that nobody wrote yet, and results in the case's terms.

use half::{bf16, f16};
use mstar_kernels::reference::Real;
use mstar_kernels::{DType, Element};

use super::{Case, Computed, NotRun, Outputs, Place, lse_in_base_2};

/// A scalar that can stand in an output before the run; NaN, so that an entry left unwritten fails the gate.
pub(super) trait Unwritten: Element + Real {
    const UNWRITTEN: Self;
}

impl Unwritten for f32 {
    const UNWRITTEN: f32 = f32::NAN;
}
impl Unwritten for bf16 {
    const UNWRITTEN: bf16 = bf16::NAN;
}
impl Unwritten for f16 {
    const UNWRITTEN: f16 = f16::NAN;
}

/// What an attention op computed: `o` as f32 and the natural `lse`.
pub(super) type Attended = mstar_kernels::Result<(Vec<f32>, Vec<f32>)>;

/// A case's outputs from what its backend computed in the case's own type; the lse in the case's base.
pub(super) fn outputs(
    case: &Case,
    place: &Place,
    f32: fn(&Case, &Place) -> Attended,
    bf16: fn(&Case, &Place) -> Attended,
    f16: fn(&Case, &Place) -> Attended,
) -> Result<Outputs, NotRun> {
    let result = match case.dtype {
        DType::Bf16 => bf16(case, place),
        DType::F16 => f16(case, place),
        _ => f32(case, place),
    };
    let (o, mut lse) = result.map_err(|error| NotRun::Failed(error.to_string()))?;
    if lse_in_base_2(&case.params).expect("checked when the case was read") {
        lse.iter_mut().for_each(|lse| *lse = mstar_kernels::lse::base2_from_natural(*lse));
    }
    Ok(Outputs::from([("out.o", Computed::Floats(o)), ("out.lse", Computed::Floats(lse))]))
}
