//! e4m3 codes widened to f32 under a scale: what every kernel over an fp8 cache does to a row before it multiplies it.
//!
//! A code stands for a number that f32 holds exactly, and there is one multiplication: all bodies give the same bits, those of
//! [`e4m3_to_f32`] times the scale. So attention over codes has the bits of attention over an f32 cache of what they stand for.

use crate::cpu::Isa;
use crate::fp8::e4m3_to_f32;

/// Widens as many codes as `to` has floats. Needs the instruction set, and that many readable bytes.
pub(crate) type Widen = unsafe fn(from: *const u8, scale: f32, to: &mut [f32]);

/// The body for an instruction set that this machine has.
pub(crate) fn widen_on(isa: Isa) -> Widen {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 | Isa::Avx512 => widen_avx512,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2Fma => widen_avx2,
        _ => widen_portable,
    }
}

/// The f32 of every code.
static NUMBERS: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        table[code] = e4m3_to_f32(code as u8);
        code += 1;
    }
    table
};

unsafe fn widen_portable(from: *const u8, scale: f32, to: &mut [f32]) {
    for (lane, to) in to.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        *to = NUMBERS[usize::from(unsafe { *from.add(lane) })] * scale;
    }
}

/// Eight codes a register. Exponent and mantissa are put in the places of an f32's, 2^120 too small, subnormals as well.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn widen_avx2(from: *const u8, scale: f32, to: &mut [f32]) {
    use std::arch::x86_64::*;
    let whole = to.len() / 8 * 8;
    let (low, grow) = (_mm256_set1_epi32(0x7f), _mm256_set1_ps(f32::from_bits((127 + 120) << 23)));
    let by = _mm256_set1_ps(scale);
    // SAFETY: the caller's promise; whole registers lie below `whole`.
    unsafe {
        for at in (0..whole).step_by(8) {
            let codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.add(at).cast()));
            let magnitude = _mm256_and_si256(codes, low);
            let number = _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32::<20>(magnitude)), grow);
            let nan = _mm256_and_si256(_mm256_cmpeq_epi32(magnitude, low), _mm256_set1_epi32(0x7fc0_0000));
            let sign = _mm256_slli_epi32::<24>(_mm256_xor_si256(codes, magnitude));
            let number = _mm256_or_ps(number, _mm256_castsi256_ps(_mm256_or_si256(nan, sign)));
            _mm256_storeu_ps(to.as_mut_ptr().add(at), _mm256_mul_ps(number, by));
        }
        widen_portable(from.add(whole), scale, &mut to[whole..]);
    }
}

/// As [`widen_avx2`], sixteen codes a register.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn widen_avx512(from: *const u8, scale: f32, to: &mut [f32]) {
    use std::arch::x86_64::*;
    let (low, grow) = (_mm512_set1_epi32(0x7f), _mm512_set1_ps(f32::from_bits((127 + 120) << 23)));
    let by = _mm512_set1_ps(scale);
    for at in (0..to.len()).step_by(16) {
        let left = to.len() - at;
        let mask = if left >= 16 { u16::MAX } else { (1u16 << left) - 1 };
        // SAFETY: the caller's promise; only lanes below the length are read and written.
        unsafe {
            let codes = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, from.add(at).cast()));
            let magnitude = _mm512_and_si512(codes, low);
            let number = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32::<20>(magnitude)), grow);
            let nan = _mm512_maskz_set1_epi32(_mm512_cmpeq_epi32_mask(magnitude, low), 0x7fc0_0000);
            let sign = _mm512_slli_epi32::<24>(_mm512_xor_si512(codes, magnitude));
            let number = _mm512_castps_si512(number);
            let number = _mm512_castsi512_ps(_mm512_or_si512(number, _mm512_or_si512(nan, sign)));
            _mm512_mask_storeu_ps(to.as_mut_ptr().add(at), mask, _mm512_mul_ps(number, by));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_body_gives_every_code_the_same_bits_under_any_scale_and_length() {
        let codes: Vec<u8> = (0..=255).chain(0..19).collect();
        let tiny = f32::from_bits(3);
        for scale in [1.0, 0.1, 1e30, f32::MIN_POSITIVE, tiny, f32::INFINITY, f32::NAN, 0.0] {
            for count in [0, 1, 7, 8, 15, 16, 17, 31, 256, 275] {
                for &isa in Isa::supported() {
                    let mut got = vec![7f32; count + 1];
                    // SAFETY: the body is for an instruction set of this machine, and there are as many codes.
                    unsafe { widen_on(isa)(codes.as_ptr(), scale, &mut got[..count]) };
                    for (lane, got) in got[..count].iter().enumerate() {
                        let want = e4m3_to_f32(codes[lane]) * scale;
                        let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                        assert!(same, "{isa}: code {} under {scale}: {got} for {want}", codes[lane]);
                    }
                    assert_eq!(got[count], 7.0);
                }
            }
        }
    }
}
