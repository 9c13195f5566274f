//! The largest of a row in linear time.

use crate::cpu::Isa;

/// Writes to `out` the positions of the `out.len()` largest scores, ascending, of equal ones the earlier, never NaN; -1
/// where there are no more.
pub(crate) fn pick(_isa: Isa, scores: &[f32], out: &mut [i32]) {
    let mut order: Vec<i32> = (0..scores.len() as i32).filter(|&j| !scores[j as usize].is_nan()).collect();
    order.sort_by(|&a, &b| scores[b as usize].partial_cmp(&scores[a as usize]).expect("no NaN"));
    order.truncate(out.len());
    order.sort_unstable();
    out.fill(-1);
    out[..order.len()].copy_from_slice(&order);
}
