//! The order in which resources are admitted and planned: dependencies first, and the file's order otherwise.

/// Sorts `names[i]` after everything in `depends_on[i]` (indices into `names`). The order of the file is kept wherever
/// dependencies leave a choice, so that a spec has one order.
///
/// # Errors
/// The indices along one cycle, its first repeated at the end.
pub fn sort(depends_on: &[Vec<usize>]) -> Result<Vec<usize>, Vec<usize>> {
    let mut placed = vec![false; depends_on.len()];
    let mut order = Vec::with_capacity(depends_on.len());
    while order.len() < depends_on.len() {
        let ready = (0..depends_on.len()).find(|&i| !placed[i] && depends_on[i].iter().all(|&d| placed[d]));
        let Some(next) = ready else { return Err(cycle(depends_on, &placed)) };
        placed[next] = true;
        order.push(next);
    }
    Ok(order)
}

/// Every resource that is not placed waits for another that is not: following them must come back.
fn cycle(depends_on: &[Vec<usize>], placed: &[bool]) -> Vec<usize> {
    let waits_for = |i: usize| depends_on[i].iter().copied().find(|&d| !placed[d]);
    let mut path: Vec<usize> = (0..placed.len()).find(|&i| !placed[i]).into_iter().collect();
    while let Some(next) = path.last().and_then(|&last| waits_for(last)) {
        let seen = path.iter().position(|&i| i == next);
        path.push(next);
        if let Some(start) = seen {
            return path.split_off(start);
        }
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_go_first_and_the_file_decides_the_rest() {
        assert_eq!(sort(&[vec![2], vec![], vec![]]), Ok(vec![1, 2, 0]));
        assert_eq!(sort(&[vec![], vec![], vec![]]), Ok(vec![0, 1, 2]));
        assert_eq!(sort(&[]), Ok(vec![]));
    }

    #[test]
    fn a_cycle_is_walked() {
        assert_eq!(sort(&[vec![1], vec![2], vec![1]]), Err(vec![1, 2, 1]));
        assert_eq!(sort(&[vec![0]]), Err(vec![0, 0]));
    }
}
