//! How much scratch the largest step can need, known before the first.

use super::{Arrays, RowTable};
use crate::attend::StepShape;

/// Lengths of a row between one token and all of a step's that are tried.
const PARTS: usize = 32;

/// Bytes of one workspace (there is one for each plan label and slot) that steps up to `largest` need. Found by planning
/// the shapes that need most, causal and not, each row over the longest context: decode rows alone, prefill alone, both,
/// and rows of a few query tiles. `bytes` plans rows of one page of `largest.kv_len` slots, at least 1, since scratch
/// depends on lengths and not on pages.
///
/// # Errors
/// What `bytes` refuses.
pub fn workspace_bound<E>(
    largest: StepShape,
    mut bytes: impl FnMut(&RowTable<'_>) -> Result<usize, E>,
) -> Result<usize, E> {
    let mut most = 0;
    for q_lens in shapes(largest) {
        let arrays = Arrays::even(&q_lens, largest.kv_len);
        for causal in [true, false] {
            most = most.max(bytes(&arrays.table(causal, 1))?);
        }
    }
    // Lengths between these are cut a little finer: up to a fifth more was seen over a grid of them.
    Ok(most + most / 4)
}

/// Query lengths of batches that need most scratch.
fn shapes(StepShape { rows, tokens, .. }: StepShape) -> Vec<Vec<usize>> {
    let decode = vec![1; rows.min(tokens)];
    let mut mixed = decode.clone();
    if let Some(last) = mixed.last_mut() {
        *last = tokens - (decode.len() - 1);
    }
    let even = vec![tokens.div_ceil(rows.max(1)); rows];
    let mut shapes = vec![vec![1], vec![tokens], decode, mixed, even];
    // A row of a few tiles over a long context is cut finest of all, and more finely beside decode rows.
    for part in 1..=PARTS {
        let q_len = (tokens * part).div_ceil(PARTS);
        for beside in [0, 1, rows / 2, rows.saturating_sub(1)] {
            let mut q_lens = vec![1; beside.min(tokens - q_len)];
            q_lens.push(q_len);
            shapes.push(q_lens);
        }
    }
    shapes
}

impl Arrays<'_> {
    /// Rows of these query lengths, each over the same page of `kv_len` slots.
    pub fn even(q_lens: &[usize], kv_len: usize) -> Arrays<'static> {
        let narrow = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
        let mut qo_indptr = vec![0i32];
        for q_len in q_lens {
            qo_indptr.push(qo_indptr[qo_indptr.len() - 1].saturating_add(narrow(*q_len)));
        }
        let pages = i32::from(kv_len > 0);
        let kv_indptr: Vec<i32> = (0..=q_lens.len() as i32).map(|row| row * pages).collect();
        let indices = vec![0; kv_indptr[q_lens.len()] as usize];
        Arrays {
            qo_indptr: qo_indptr.into(),
            kv_indptr: kv_indptr.into(),
            kv_indices: indices.into(),
            kv_last_page_len: vec![narrow(kv_len); q_lens.len()].into(),
            kv_len: vec![narrow(kv_len); q_lens.len()],
            ..Arrays::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shape_fits_the_step_and_the_extremes_are_among_them() {
        let largest = StepShape { rows: 8, tokens: 520, kv_len: 1088 };
        let shapes = shapes(largest);
        for wanted in [vec![1; 8], vec![520], vec![1, 1, 1, 1, 1, 1, 1, 513]] {
            assert!(shapes.contains(&wanted), "{wanted:?}");
        }
        assert!(shapes.iter().all(|q_lens| q_lens.len() <= 8 && q_lens.iter().sum::<usize>() <= 520));
        let bound = workspace_bound(largest, |rows| Ok::<_, ()>(rows.num_rows() * 4)).unwrap();
        assert_eq!(bound, 40);
        assert_eq!(workspace_bound(largest, |_| Err::<usize, _>("refused")), Err("refused"));
    }
}
