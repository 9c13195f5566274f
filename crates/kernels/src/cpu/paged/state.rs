//! The unfinished softmax of some query vectors over some keys, and the fixed tree that joins two of them.
//!
//! A state holds, for each of its *lanes* (query vectors of one key head), the largest score `m`, the sum `l` of
//! `2^((s - m) c)` and the sum of those weights times the values, undivided. Its memory is
//! `[m: lanes][l: lanes][acc: lanes x width]`, each part padded to whole cache lines. A lane that saw nothing
//! has `m = -inf`, and joining it changes the other side by no bit.

use crate::mutant::planted;

/// Floats in a cache line; every part of a state starts on one.
pub(crate) const LINE: usize = 16;

/// Floats from one lane's accumulator to the next.
pub(crate) const fn acc_stride(head_dim_vo: usize) -> usize {
    head_dim_vo.next_multiple_of(LINE)
}

/// Where a state's accumulators begin, in floats.
pub(crate) const fn acc_begin(lanes: usize) -> usize {
    2 * lanes.next_multiple_of(LINE)
}

/// Floats of the state of `lanes` query vectors.
pub(crate) const fn state_len(lanes: usize, head_dim_vo: usize) -> usize {
    acc_begin(lanes) + lanes * acc_stride(head_dim_vo)
}

/// A state's memory, split into its parts.
pub(crate) struct State<'a> {
    pub(crate) m: &'a mut [f32],
    pub(crate) l: &'a mut [f32],
    pub(crate) acc: &'a mut [f32],
}

impl<'a> State<'a> {
    /// The state in `memory`, which is `state_len(lanes, head_dim_vo)` long.
    pub(crate) fn new(memory: &'a mut [f32], lanes: usize, head_dim_vo: usize) -> State<'a> {
        let padded = lanes.next_multiple_of(LINE);
        let (m, rest) = memory.split_at_mut(padded);
        let (l, acc) = rest.split_at_mut(padded);
        State { m: &mut m[..lanes], l: &mut l[..lanes], acc: &mut acc[..lanes * acc_stride(head_dim_vo)] }
    }

    #[cfg(feature = "tiles")]
    /// As [`State::new`], with lanes' accumulators `head_dim_vo` floats apart.
    pub(crate) fn dense(memory: &'a mut [f32], lanes: usize, head_dim_vo: usize) -> State<'a> {
        let mut state = State::new(memory, lanes, head_dim_vo);
        state.acc = &mut state.acc[..lanes * head_dim_vo];
        state
    }

    #[cfg(feature = "tiles")]
    /// Turns a dense state into one as [`State::new`] sees it.
    pub(crate) fn pad(memory: &'a mut [f32], lanes: usize, head_dim_vo: usize) -> State<'a> {
        let state = State::new(memory, lanes, head_dim_vo);
        let stride = acc_stride(head_dim_vo);
        if stride != head_dim_vo {
            for lane in (0..lanes).rev() {
                state.acc.copy_within(lane * head_dim_vo..(lane + 1) * head_dim_vo, lane * stride);
            }
        }
        state
    }

    #[cfg(any(feature = "tiles", test))]
    /// Makes every lane one that saw nothing.
    pub(crate) fn clear(&mut self) {
        self.m.fill(f32::NEG_INFINITY);
        self.l.fill(0.0);
        self.acc.fill(0.0);
    }

    /// Some of the lanes.
    pub(crate) fn lanes(&self, from: usize, count: usize) -> StateRef<'_> {
        let stride = if self.m.is_empty() { 0 } else { self.acc.len() / self.m.len() };
        StateRef {
            m: &self.m[from..from + count],
            l: &self.l[from..from + count],
            acc: &self.acc[from * stride..(from + count) * stride],
        }
    }

    /// Copies a state of as many lanes.
    pub(crate) fn copy_from(&mut self, other: &StateRef<'_>) {
        self.m.copy_from_slice(other.m);
        self.l.copy_from_slice(other.l);
        self.acc.copy_from_slice(other.acc);
    }

    /// Joins the state of the keys right of this one's. `c` turns a difference of scores into a base-2
    /// exponent.
    pub(crate) fn join(&mut self, right: &State<'_>, c: f32) {
        let lanes = self.m.len();
        if lanes == 0 {
            return;
        }
        let stride = self.acc.len() / lanes;
        for lane in 0..lanes {
            let (ma, mb) = (self.m[lane], right.m[lane]);
            // Empty states are identities; one whose sum is NaN is not empty.
            if mb == f32::NEG_INFINITY && !right.l[lane].is_nan() {
                continue;
            }
            let span = lane * stride..(lane + 1) * stride;
            let (acc, other) = (&mut self.acc[span.clone()], &right.acc[span]);
            if ma == f32::NEG_INFINITY && !self.l[lane].is_nan() {
                (self.m[lane], self.l[lane]) = (mb, right.l[lane]);
                acc.copy_from_slice(other);
                continue;
            }
            let m = ma.max(mb);
            let (fa, fb) = (((ma - m) * c).exp2(), ((mb - m) * c).exp2());
            let (fa, fb) = if planted("leaf-merge-unscaled") { (1.0, 1.0) } else { (fa, fb) };
            self.m[lane] = m;
            self.l[lane] = self.l[lane] * fa + right.l[lane] * fb;
            for (a, b) in acc.iter_mut().zip(other) {
                *a = *a * fa + *b * fb;
            }
        }
    }
}

/// Some lanes of a state, read only.
pub(crate) struct StateRef<'a> {
    pub(crate) m: &'a [f32],
    pub(crate) l: &'a [f32],
    pub(crate) acc: &'a [f32],
}

/// Where nodes of the tree stand while leaves come in from left to right. `join(left, right)` joins the nodes at
/// two neighbouring positions; afterwards the left position holds the parent.
#[derive(Debug)]
pub(crate) struct Tree {
    nodes: [(u32, u32); 33],
    len: usize,
}

impl Tree {
    /// No node.
    pub(crate) fn new() -> Tree {
        Tree { nodes: [(0, 0); 33], len: 0 }
    }

    /// Nodes that wait for a sibling; the next node belongs at this position.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Takes the node `index << level`, which stands at position `len()`. Missing left siblings are empty, so
    /// the node stands for its parent.
    pub(crate) fn push(&mut self, mut level: u32, mut index: u32, mut join: impl FnMut(usize)) {
        while index % 2 == 1 {
            if self.len > 0 && self.nodes[self.len - 1] == (level, index - 1) {
                join(self.len - 1);
                self.len -= 1;
            } else if self.len > 0 {
                break;
            }
            (level, index) = (level + 1, index / 2);
        }
        self.nodes[self.len] = (level, index);
        self.len += 1;
    }

    /// Joins what is left, from the right: missing right children are skipped. Position 0 then holds the root.
    pub(crate) fn finish(&mut self, mut join: impl FnMut(usize)) {
        while self.len > 1 {
            join(self.len - 2);
            self.len -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tree as text, straight from its definition.
    fn node(level: u32, index: u32, first: u32, end: u32) -> Option<String> {
        let (begin, upto) = (u64::from(index) << level, u64::from(index + 1) << level);
        if begin >= end.into() || upto <= first.into() {
            return None;
        }
        if level == 0 {
            return Some(index.to_string());
        }
        match (node(level - 1, 2 * index, first, end), node(level - 1, 2 * index + 1, first, end)) {
            (Some(a), Some(b)) => Some(format!("({a}+{b})")),
            (a, b) => a.or(b),
        }
    }

    fn joined(parts: &[(u32, u32, String)]) -> String {
        let at = std::cell::RefCell::new(vec![String::new(); 40]);
        let join = |left: usize| {
            let mut at = at.borrow_mut();
            at[left] = format!("({}+{})", at[left], at[left + 1]);
        };
        let mut tree = Tree::new();
        for (level, index, text) in parts {
            at.borrow_mut()[tree.len()] = text.clone();
            tree.push(*level, *index, join);
        }
        tree.finish(join);
        at.borrow()[0].clone()
    }

    #[test]
    fn any_cut_into_aligned_runs_gives_the_same_tree() {
        for first in 0..20 {
            for end in first + 1..40 {
                let whole = node(6, 0, first, end).unwrap();
                for cap in [1u32, 2, 4, 8, 64] {
                    let mut parts = Vec::new();
                    let mut leaf = first;
                    while leaf < end {
                        let level = if leaf == 0 { 6 } else { leaf.trailing_zeros() }.min(cap.ilog2());
                        let upto = (leaf + (1 << level)).min(end);
                        let leaves: Vec<_> = (leaf..upto).map(|leaf| (0, leaf, leaf.to_string())).collect();
                        parts.push((level, leaf >> level, joined(&leaves)));
                        leaf = upto;
                    }
                    assert_eq!(joined(&parts), whole, "leaves {first}..{end} by {cap}");
                }
            }
        }
    }

    #[test]
    fn f04_an_empty_state_is_the_identity() {
        let (lanes, width) = (3, 20);
        let mut left = vec![0f32; state_len(lanes, width)];
        let mut right = left.clone();
        for (index, value) in right.iter_mut().enumerate() {
            *value = index as f32 * 0.37 - 5.0;
        }
        let before = right.clone();
        State::new(&mut left, lanes, width).clear();
        State::new(&mut right, lanes, width).join(&State::new(&mut left, lanes, width), 1.3);
        assert_eq!(before, right);
        let other = State::new(&mut right, lanes, width);
        let mut empty = State::new(&mut left, lanes, width);
        empty.join(&other, 1.3);
        assert_eq!((&empty.m, &empty.l, &empty.acc), (&other.m, &other.l, &other.acc));
    }

    #[test]
    fn f04_two_empty_states_stay_empty_and_a_very_low_one_is_not_empty() {
        let mut memory = vec![0f32; 2 * state_len(1, 4)];
        let (left, right) = memory.split_at_mut(state_len(1, 4));
        let mut a = State::new(left, 1, 4);
        let mut b = State::new(right, 1, 4);
        a.clear();
        b.clear();
        a.join(&b, 1.0);
        assert_eq!((a.m[0], a.l[0]), (f32::NEG_INFINITY, 0.0));
        (b.m[0], b.l[0]) = (-1e30, 1.0);
        b.acc.fill(2.0);
        a.join(&b, 1.0);
        assert_eq!((a.m[0], a.l[0], a.acc[3]), (-1e30, 1.0, 2.0));
    }
}
