//! When a selection matches: the same set of positions in each row, or near enough for its scores.
//!
//! A position may be swapped for another whose recorded score differs by at most `atol`; among positions
//! whose recorded scores are equal the earlier ones must be the ones picked. Order within a row means nothing.

use std::cmp::Ordering;

use mstar_kernels::DType;
use mstar_kernels::mutant::planted;

use super::compare::Judgement;

/// Judges `x` `[T, K]` against `out` `[T, K]`, -1 padded. `scores` holds one run of `position + 1` a row.
pub(super) fn judge(
    topk: usize,
    positions: &[i32],
    scores: &[f32],
    atol: f64,
    x: &[i32],
    out: &[i32],
) -> Judgement {
    let name = "out.selection";
    if x.len() != out.len() || out.len() != positions.len() * topk {
        let fault = format!("{name} has {} entries, {} were recorded", x.len(), out.len());
        return Judgement::failed(name, DType::I32, fault);
    }
    let mut start = 0;
    for (row, &position) in positions.iter().enumerate() {
        let seen = position as usize + 1;
        let run = &scores[start..start + seen];
        start += seen;
        let span = row * topk..(row + 1) * topk;
        if let Err(why) = judge_row(run, topk, atol, &x[span.clone()], &out[span]) {
            let fault = Some(format!("{name} row {row}: {why}"));
            let worst = Some(vec![row]);
            return Judgement { worst, fault, ..Judgement::failed(name, DType::I32, String::new()) };
        }
    }
    Judgement {
        name,
        dtype: DType::I32,
        within_tolerance: true,
        accurate: None,
        fault: None,
        worst: None,
        figures: None,
    }
}

fn judge_row(scores: &[f32], topk: usize, atol: f64, x: &[i32], out: &[i32]) -> Result<(), String> {
    let picked = set(scores.len(), x).map_err(|why| format!("computed {why}"))?;
    let recorded = set(scores.len(), out).map_err(|why| format!("recorded {why}"))?;
    let (ours, theirs) = (count(&picked), count(&recorded));
    let wanted = topk.min(scores.len());
    if ours != wanted || theirs != wanted {
        return Err(format!("{wanted} positions are to be picked; computed {ours}, recorded {theirs}"));
    }
    // Both in order of score; sorted lists pair off with the least possible largest difference.
    let only = |a: &[bool], b: &[bool]| -> Vec<usize> {
        let mut only: Vec<usize> = (0..a.len()).filter(|&s| a[s] && !b[s]).collect();
        only.sort_by(|&a, &b| descending(scores[a], scores[b]));
        only
    };
    for (a, b) in only(&picked, &recorded).into_iter().zip(only(&recorded, &picked)) {
        let apart = (f64::from(scores[a]) - f64::from(scores[b])).abs();
        // Equal infinities are no distance apart.
        if !(scores[a] == scores[b] || apart <= atol) {
            return Err(format!(
                "position {a} for {b}: their scores are {apart:.3e} apart, {atol:.3e} allowed"
            ));
        }
    }
    // Of equal scores an earlier one must not be left while a later one is taken.
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| descending(scores[a], scores[b]).then(a.cmp(&b)));
    for pair in order.windows(2) {
        let tie = scores[pair[0]] == scores[pair[1]] && !planted("selection-ignores-ties");
        if tie && !picked[pair[0]] && picked[pair[1]] {
            let score = scores[pair[0]];
            return Err(format!(
                "position {} for {}: both score {score}, the earlier is due",
                pair[1], pair[0]
            ));
        }
    }
    Ok(())
}

fn descending(a: f32, b: f32) -> Ordering {
    // Recorded scores are read without NaN.
    b.partial_cmp(&a).unwrap_or(Ordering::Equal)
}

fn count(set: &[bool]) -> usize {
    set.iter().filter(|&&picked| picked).count()
}

/// Which of `seen` positions are named; each at most once, -1 names none.
fn set(seen: usize, positions: &[i32]) -> Result<Vec<bool>, String> {
    let mut set = vec![false; seen];
    for &position in positions.iter().filter(|&&position| position != -1) {
        match usize::try_from(position).ok().and_then(|position| set.get_mut(position)) {
            None => return Err(format!("position {position}: the row sees 0..{seen}")),
            Some(picked) if *picked => return Err(format!("position {position} twice")),
            Some(picked) => *picked = true,
        }
    }
    Ok(set)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCORES: [f32; 5] = [3.0, 1.0, 1.0, 1.05, 0.0];

    fn one(topk: usize, x: &[i32], out: &[i32]) -> Judgement {
        judge(topk, &[4], &SCORES, 0.1, x, out)
    }

    #[test]
    fn order_means_nothing_and_near_scores_may_be_swapped() {
        assert!(one(2, &[3, 0], &[0, 3]).passed());
        assert!(one(2, &[0, 1], &[0, 3]).passed());
        let j = one(2, &[0, 4], &[0, 3]);
        assert!(!j.passed() && j.fault.unwrap().contains("position 4 for 3"));
    }

    #[test]
    fn f22_of_equal_scores_the_earlier_is_due() {
        let j = one(2, &[0, 2], &[0, 3]);
        assert_eq!(
            j.fault.unwrap(),
            "out.selection row 0: position 2 for 1: both score 1, the earlier is due"
        );
        assert!(one(3, &[0, 1, 3], &[0, 1, 3]).passed());
    }

    #[test]
    fn f23_positions_are_distinct_in_range_and_as_many_as_there_should_be() {
        assert!(!one(2, &[0, 0], &[0, 3]).passed());
        assert!(!one(2, &[0, 5], &[0, 3]).passed());
        assert!(!one(2, &[0, -2], &[0, 3]).passed());
        assert!(!one(2, &[0, -1], &[0, 3]).passed());
        assert!(!one(2, &[0], &[0, 3]).passed());
        assert!(judge(3, &[1], &[0.0, 1.0], 0.0, &[-1, 0, 1], &[0, 1, -1]).passed());
    }

    #[test]
    fn each_row_reads_its_own_run_of_scores() {
        let scores = [0.0, 5.0, 1.0];
        assert!(judge(1, &[0, 1], &scores, 0.0, &[0, 0], &[0, 0]).passed());
        let j = judge(1, &[0, 1], &scores, 0.0, &[0, 1], &[0, 0]);
        assert_eq!(j.worst, Some(vec![1]));
    }
}
