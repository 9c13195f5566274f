//! Rounding to bf16 in plain integer operations, which vectorise.

/// Nearest bf16, ties to even; NaN stays NaN.
#[inline(always)]
pub(crate) fn to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16;
    if value.is_nan() { (bits >> 16) as u16 | 0x40 } else { rounded }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounding_is_that_of_half() {
        for bits in (0..u32::MAX).step_by(65_521) {
            let value = f32::from_bits(bits);
            let (got, want) = (to_bf16(value), half::bf16::from_f32(value).to_bits());
            assert!(got == want || value.is_nan() && half::bf16::from_bits(got).is_nan(), "{bits:#x}");
        }
    }
}
