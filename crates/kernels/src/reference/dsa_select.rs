//! The pick of DeepSeek sparse attention (DeepSeek-V3.2): the top keys of each query by index score.

use super::{Real, arrays, dot};
use crate::{Error, Result};

/// Everything that [`dsa_select`] reads. `T` query rows, `U` packed keys, `R` requests.
#[derive(Clone, Copy, Debug)]
pub struct DsaSelect<'a, Q, E> {
    /// `[T, Hi, Di]`.
    pub q: &'a [Q],
    /// `[T, Hi]`: a weight a head, the scale factors included.
    pub weights: &'a [f32],
    /// `[U, Di]`.
    pub keys: &'a [E],
    /// `[R + 1]`: where each request's keys start.
    pub key_indptr: &'a [i32],
    /// `[T]`: whose keys each row scores; in any order.
    pub row_request: &'a [i32],
    /// `[T]`: each row sees its request's keys `0..=position`.
    pub positions: &'a [i32],
    /// `Hi`.
    pub index_n_heads: usize,
    /// `Di`.
    pub index_head_dim: usize,
    /// `K`.
    pub topk: usize,
}

/// What [`dsa_select`] returns.
#[derive(Clone, Debug, PartialEq)]
pub struct Selection {
    /// `[T, K]`: positions, ascending, -1 padded.
    pub selection: Vec<i32>,
    /// One run of `position + 1` scores a row, row after row.
    pub scores: Vec<f32>,
}

/// Scores `sum_h weights[t, h] * relu(q[t, h] . keys[s])` and picks the `topk` largest of each row, of equal
/// scores the earlier position. Scores are summed in f64 and compared as f32, the precision in which they
/// are stored: two that are equal there tie. NaN is never picked.
///
/// # Errors
/// An array of another length than the shapes say, a request or position that is not there.
pub fn dsa_select<Q: Real, E: Real>(p: &DsaSelect<'_, Q, E>) -> Result<Selection> {
    let (hi, di) = (p.index_n_heads, p.index_head_dim);
    let tokens = arrays::outer("q", p.q, &[hi, di])?;
    let keys = arrays::outer("keys", p.keys, &[di])?;
    arrays::length("weights", p.weights, &[tokens, hi])?;
    let spans = arrays::ranges("key_indptr", p.key_indptr, keys)?;
    arrays::length("row_request", p.row_request, &[tokens])?;
    arrays::indices("row_request", p.row_request, spans.len())?;
    arrays::length("positions", p.positions, &[tokens])?;

    let mut out = Selection {
        selection: vec![-1; arrays::product("selection", &[tokens, p.topk])?],
        scores: Vec::new(),
    };
    for t in 0..tokens {
        let span = spans[p.row_request[t] as usize].clone();
        let position = p.positions[t];
        if position < 0 || position as usize >= span.len() {
            let why = format!("the request has {} keys", span.len());
            return Err(Error::Index { array: "positions", index: t, got: i64::from(position), why });
        }
        let score = |s: usize| {
            let key = &p.keys[(span.start + s) * di..][..di];
            let head = |h: usize| {
                let product = dot(&p.q[(t * hi + h) * di..][..di], key);
                // Not `max`, which would turn NaN into 0.
                f64::from(p.weights[t * hi + h]) * if product <= 0.0 { 0.0 } else { product }
            };
            (0..hi).map(head).sum::<f64>() as f32
        };
        let scores: Vec<f32> = (0..=position as usize).map(score).collect();
        let picked = top(&scores, p.topk);
        out.selection[t * p.topk..][..picked.len()].copy_from_slice(&picked);
        out.scores.extend(scores);
    }
    Ok(out)
}

/// The positions of the `topk` largest scores, ascending; of equal ones the earlier; never NaN.
fn top(scores: &[f32], topk: usize) -> Vec<i32> {
    let mut order: Vec<usize> = (0..scores.len()).filter(|&s| !scores[s].is_nan()).collect();
    // A stable sort keeps equal scores (0 and -0 among them) in order of position.
    order.sort_by(|&a, &b| scores[b].partial_cmp(&scores[a]).expect("NaN was filtered out"));
    order.truncate(topk);
    order.sort_unstable();
    order.into_iter().map(|s| s as i32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one_head(keys: &[f32], topk: usize) -> Vec<i32> {
        let last = keys.len() as i32 - 1;
        dsa_select(&DsaSelect {
            q: &[1f32],
            weights: &[1.0],
            keys,
            key_indptr: &[0, last + 1],
            row_request: &[0],
            positions: &[last],
            index_n_heads: 1,
            index_head_dim: 1,
            topk,
        })
        .unwrap()
        .selection
    }

    #[test]
    fn f22_ties_go_to_the_earlier_position() {
        let keys: Vec<f32> = (0..8320).map(|s| if s % 83 == 0 && s < 8300 { 1.0 } else { -1.0 }).collect();
        let picked = one_head(&keys, 2048);
        assert_eq!(picked.len(), 2048);
        assert!((0..100).all(|i| picked.contains(&(83 * i))));
        let others: Vec<i32> = picked.iter().copied().filter(|&s| keys[s as usize] < 0.0).collect();
        let earliest: Vec<i32> = (0..8320).filter(|&s| keys[s as usize] < 0.0).take(1948).collect();
        assert_eq!(others, earliest);
        assert_eq!(one_head(&[0.0; 5], 5), [0, 1, 2, 3, 4]);
        assert_eq!(one_head(&[0.0; 5], 6), [0, 1, 2, 3, 4, -1]);
        assert_eq!(one_head(&[1.0, f32::INFINITY, 2.0], 2), [1, 2]);
    }

    #[test]
    fn f23_nan_is_never_picked() {
        assert_eq!(one_head(&[f32::NAN; 4], 2), [-1, -1]);
        assert_eq!(one_head(&[0.0, f32::NAN, 3.0], 3), [0, 2, -1]);
    }
}
