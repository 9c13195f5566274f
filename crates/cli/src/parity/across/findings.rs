//! What comparing a device with the first one came to: figures by attention resource and label, and the first rows that disagree.

use std::collections::{BTreeMap, HashSet};

use super::gate::{self, Apart, Error, Gate, Side};
use crate::run::shown::{Outputs, Shown, ShownRow};

/// Rows that disagree and are told in full.
const TOLD: usize = 8;

/// Figures of one attention resource and one label.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Node {
    /// Rows of a layer that were compared.
    pub(super) rows: u64,
    /// Of those, the ones that disagree.
    pub(super) disagree: u64,
    /// Vectors of a query and a head that were compared.
    pub(super) vectors: u64,
    /// Those of the same bits.
    pub(super) same: u64,
    /// The row of `o` that uses up the most of its bound.
    pub(super) row: Error,
    /// The vector that does.
    pub(super) vector: Error,
    /// The row of `lse` that does.
    pub(super) lse: Error,
    /// Queries of a layer whose picks differ.
    pub(super) picks_differ: u64,
    /// Picks judged by their scores, on either side.
    pub(super) picks_judged: u64,
    /// Vectors recomputed over the pick that was used, on either side.
    pub(super) picks_vectors: u64,
}

/// A row that disagrees.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Disagreement {
    /// The step.
    pub(super) step: u64,
    /// The attention resource.
    pub(super) attention: String,
    /// Whose row.
    pub(super) request: String,
    /// Which stream of theirs.
    pub(super) label: String,
    /// The layer.
    pub(super) layer: usize,
    /// What is wrong.
    pub(super) what: What,
}

/// What is wrong with a row.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum What {
    /// Both sides are too far apart, farthest at this absolute position.
    Apart {
        /// The position.
        position: usize,
        /// How far.
        apart: Apart,
    },
    /// One side's pick, or attention over it, is wrong by the oracle.
    Pick {
        /// Whether it is the first device's.
        first: bool,
        /// Why.
        why: String,
    },
    /// Padding that is not 0 with `lse` `-inf` alike.
    Padding {
        /// Token of the plan.
        token: usize,
    },
}

/// Everything found of one device.
#[derive(Clone, Debug, Default)]
pub(super) struct Findings {
    /// By attention resource and label.
    pub(super) nodes: BTreeMap<(String, String), Node>,
    /// The first of them.
    pub(super) disagreements: Vec<Disagreement>,
}

impl Findings {
    /// Rows compared.
    pub(super) fn rows(&self) -> u64 {
        self.nodes.values().map(|node| node.rows).sum()
    }

    /// Rows that disagree.
    pub(super) fn disagree(&self) -> u64 {
        self.nodes.values().map(|node| node.disagree).sum()
    }

    /// Compares a layer with what the `first` device wrote of it.
    pub(super) fn add(&mut self, gate: Gate, shown: &Shown<'_>, first: Outputs<'_>) {
        let mut end = 0;
        for (index, row) in shown.rows().enumerate() {
            end = end.max(row.tokens.end);
            self.add_row(gate, shown, index, &row, first);
        }
        self.add_padding(shown, end, first);
    }

    fn add_row(
        &mut self,
        gate: Gate,
        shown: &Shown<'_>,
        index: usize,
        row: &ShownRow<'_>,
        first: Outputs<'_>,
    ) {
        let second = shown.outputs();
        let [heads, width] = shown.vectors();
        let bytes = width * gate.dtype.size();
        let differing = differing(shown.index_topk(), row.tokens.clone(), first.selection, second.selection);
        let skipped: HashSet<usize> = differing.iter().copied().collect();
        let [a, b] = [first, second].map(|outputs| part(outputs, row.tokens.clone(), heads, bytes));
        let found = gate::compare(gate, [heads, width], a, b, |query| skipped.contains(&query));
        // Keys that were picked otherwise are attended otherwise: each side is held against the oracle over its own pick.
        let verdicts = match differing.as_slice() {
            [] => Vec::new(),
            queries => [(true, first), (false, second)]
                .map(|(is_first, outputs)| (is_first, shown.verify(index, queries, outputs)))
                .to_vec(),
        };
        let wrong = match &found.apart {
            Some(apart) => {
                let position = row.first_position + apart.query;
                Some(What::Apart { position, apart: apart.clone() })
            }
            // One device has no right to two picks.
            None if gate.exact && !differing.is_empty() => Some(What::Pick {
                first: false,
                why: format!("query {} has another pick than the same device's", differing[0]),
            }),
            None => verdicts.iter().find_map(|(first, verdict)| {
                Some(What::Pick { first: *first, why: verdict.failure.clone()? })
            }),
        };
        let node = self.node(shown, row.label.as_str());
        node.rows += 1;
        node.disagree += u64::from(wrong.is_some());
        node.vectors += found.vectors;
        node.same += found.same;
        node.row.keep_worse(found.row);
        node.vector.keep_worse(found.vector);
        node.lse.keep_worse(found.lse);
        node.picks_differ += differing.len() as u64;
        node.picks_judged += verdicts.iter().map(|(_, verdict)| verdict.picks).sum::<u64>();
        node.picks_vectors += verdicts.iter().map(|(_, verdict)| verdict.vectors).sum::<u64>();
        if let Some(what) = wrong {
            self.tell(shown, row.request.to_string(), row.label.to_string(), what);
        }
    }

    /// What follows the rows pads the plan to a bucket, and is the same bits everywhere.
    fn add_padding(&mut self, shown: &Shown<'_>, end: usize, first: Outputs<'_>) {
        let [heads, width] = shown.vectors();
        let bytes = width * shown.dtype().size();
        let of = |outputs: Outputs<'_>, token: usize| -> (Vec<u8>, Vec<u32>) {
            let Side { o, lse } = part(outputs, token..token + 1, heads, bytes);
            (o.to_vec(), lse.iter().map(|lse| lse.to_bits()).collect())
        };
        let wrong = (end..shown.tokens()).find(|&token| of(first, token) != of(shown.outputs(), token));
        if let Some(token) = wrong {
            let label = shown.label().to_string();
            self.node(shown, &label).disagree += 1;
            self.tell(shown, "padding".into(), label, What::Padding { token });
        }
    }

    fn node(&mut self, shown: &Shown<'_>, label: &str) -> &mut Node {
        self.nodes.entry((shown.attention().to_string(), label.to_owned())).or_default()
    }

    fn tell(&mut self, shown: &Shown<'_>, request: String, label: String, what: What) {
        if self.disagreements.len() < TOLD {
            let (step, attention, layer) = (shown.step(), shown.attention().to_string(), shown.layer());
            self.disagreements.push(Disagreement { step, attention, request, label, layer, what });
        }
    }
}

/// Outputs of some tokens, of `heads` vectors of so many bytes each.
fn part(outputs: Outputs<'_>, tokens: std::ops::Range<usize>, heads: usize, bytes: usize) -> Side<'_> {
    let of = |each: usize| tokens.start * each..tokens.end * each;
    Side { o: &outputs.o[of(heads * bytes)], lse: &outputs.lse[of(heads)] }
}

/// The queries of a row whose picks are not the same set; kernels write a pick in rising order.
fn differing(
    topk: Option<usize>,
    tokens: std::ops::Range<usize>,
    first: Option<&[i32]>,
    second: Option<&[i32]>,
) -> Vec<usize> {
    let Some(topk) = topk else { return Vec::new() };
    match (first, second) {
        (Some(first), Some(second)) => {
            let of = |selection: &'_ [i32], token: usize| selection[token * topk..][..topk].to_vec();
            let differs = |&query: &usize| {
                let token = tokens.start + query;
                of(first, token) != of(second, token)
            };
            (0..tokens.len()).filter(differs).collect()
        }
        (None, None) => Vec::new(),
        // A pick on one side alone is a pick too many or one too few.
        _ => (0..tokens.len()).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn picks_that_differ_are_found_by_row_and_one_side_alone_differs_throughout() {
        let first = [0, 1, 2, 3, 4, 5, 1, 2, 3];
        let mut second = first;
        second[8] = 9;
        let of = |tokens, first, second| differing(Some(3), tokens, first, second);
        assert_eq!(of(0..3, Some(&first), Some(&second)), [2]);
        assert_eq!(of(2..3, Some(&first), Some(&second)), [0]);
        assert_eq!(of(0..2, Some(&first), Some(&second)), [0; 0]);
        assert_eq!(of(1..3, Some(&first), None), [0, 1]);
        assert_eq!(of(0..3, None, None), [0; 0]);
        assert_eq!(differing(None, 0..3, None, None), [0; 0]);
    }
}
