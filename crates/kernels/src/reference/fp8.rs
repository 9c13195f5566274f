//! What e4m3 caches stand for, in f64: oracles over them are the oracles over these numbers.

/// The number of an e4m3 code, from its fields: sign, four exponent bits of bias 7, three mantissa bits; `S.1111.111` is NaN, and
/// there is no infinity.
pub fn e4m3(code: u8) -> f64 {
    let (sign, exponent, mantissa) = (code >> 7, i32::from(code >> 3 & 15), f64::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f64::NAN,
        (0, _) => mantissa / 8.0 * 2f64.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
    };
    if sign == 1 { -magnitude } else { magnitude }
}

/// Keys or values `[.., D]` as numbers: `codes` `[.., D]` under `scales` `[..]`, `D` being `width`.
///
/// # Panics
/// When there is not one scale for each `width` codes.
pub fn heads(codes: &[u8], scales: &[f32], width: usize) -> Vec<f64> {
    assert_eq!(codes.len(), scales.len() * width, "a scale for each row of codes");
    codes
        .chunks(width)
        .zip(scales)
        .flat_map(|(row, &scale)| row.iter().map(move |&x| e4m3(x) * f64::from(scale)))
        .collect()
}

/// Latents `[.., C + E]` as numbers: `stored` `[.., B]`, a token being `[C e4m3 | ceil(C / 128) f32 | E bf16]` in the machine's
/// byte order.
///
/// # Panics
/// When the bytes are not whole tokens.
pub fn latents(stored: &[u8], c: usize, e: usize) -> Vec<f64> {
    let groups = c.div_ceil(128);
    let bytes = c + 4 * groups + 2 * e;
    assert_eq!(stored.len() % bytes, 0, "whole tokens");
    let mut out = Vec::new();
    for token in stored.chunks(bytes) {
        let (codes, rest) = token.split_at(c);
        let (scales, rope) = rest.split_at(4 * groups);
        for (lane, &code) in codes.iter().enumerate() {
            let at = lane / 128 * 4;
            let scale = [scales[at], scales[at + 1], scales[at + 2], scales[at + 3]];
            out.push(e4m3(code) * f64::from(f32::from_ne_bytes(scale)));
        }
        out.extend(rope.chunks(2).map(|lane| half::bf16::from_ne_bytes([lane[0], lane[1]]).to_f64()));
    }
    out
}

/// Replaces lanes that share a scale by what a cache in e4m3 keeps of them. The format says how: the scale is the largest magnitude
/// over 448 in f32 (1 for zeros, never below the smallest normal f32), a code the nearest number to `lane / scale` in f32, ties to
/// the even mantissa. Lanes are finite.
pub fn kept(lanes: &mut [f32]) {
    let largest = lanes.iter().fold(0f32, |most, lane| most.max(lane.abs()));
    let scale = if largest == 0.0 { 1.0 } else { (largest / 448.0).max(f32::MIN_POSITIVE) };
    for lane in lanes {
        let x = f64::from(*lane / scale);
        // Numbers of 2^e..2^(e + 1) are multiples of 2^(e - 3); below 2^-6 of 2^-9.
        let exponent = if x == 0.0 { -6 } else { (x.abs().log2().floor() as i32).max(-6) };
        let step = 2f64.powi(exponent - 3);
        *lane = ((x / step).round_ties_even() * step * f64::from(scale)) as f32;
    }
}
