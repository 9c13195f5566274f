//! The fixed shapes that forwards are captured at, and how a step is padded to one.

use std::collections::BTreeMap;
use std::fmt;

use crate::resource::PaddedShape;
use crate::step::{Declaration, KvStep};
use crate::{Label, RefusalReason, Step};

/// A captured shape: every plan label of a step that runs in it has this many rows and query tokens.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Bucket {
    /// The kind of forward that was captured.
    pub walk: String,
    /// Rows and query tokens, padding among them.
    pub shape: PaddedShape,
}

impl fmt::Display for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} [{} rows, {} tokens]", self.walk, self.shape.rows, self.shape.tokens)
    }
}

/// The buckets there are.
#[derive(Clone, Debug, Default)]
pub struct Buckets {
    by_walk: BTreeMap<String, Vec<PaddedShape>>,
}

impl Buckets {
    /// The given buckets, in any order; one that is given twice counts once.
    pub fn new(buckets: impl IntoIterator<Item = Bucket>) -> Buckets {
        let mut by_walk: BTreeMap<String, Vec<PaddedShape>> = BTreeMap::new();
        for Bucket { walk, shape } in buckets {
            by_walk.entry(walk).or_default().push(shape);
        }
        for shapes in by_walk.values_mut() {
            shapes.sort_by_key(|shape| (shape.tokens, shape.rows));
            shapes.dedup();
        }
        Buckets { by_walk }
    }

    /// Buckets of one walk with one query token a row, as a spec's `graph.buckets` lists them.
    pub fn decode(walk: &str, rows: &[usize]) -> Buckets {
        let shape = |&rows: &usize| PaddedShape { rows, tokens: rows };
        Buckets::new(rows.iter().map(|rows| Bucket { walk: walk.to_owned(), shape: shape(rows) }))
    }

    /// Whether there is none, in which case everything runs eagerly.
    pub fn is_empty(&self) -> bool {
        self.by_walk.is_empty()
    }

    /// Every bucket, by walk and then by size.
    pub fn iter(&self) -> impl Iterator<Item = Bucket> {
        self.by_walk
            .iter()
            .flat_map(|(walk, shapes)| shapes.iter().map(|&shape| Bucket { walk: walk.clone(), shape }))
    }

    /// The smallest bucket of `walk` that holds `needed`: fewest tokens, then fewest rows.
    ///
    /// # Errors
    /// [`RefusalReason::NoBucket`] when none does; run eagerly then, or refuse.
    pub fn pick(&self, walk: &str, needed: PaddedShape) -> Result<Bucket, RefusalReason> {
        let shapes = self.by_walk.get(walk).map_or(&[][..], Vec::as_slice);
        let fits = |shape: &&PaddedShape| padded_q_lens(**shape, needed).is_some();
        let shape = shapes.iter().find(fits).copied();
        shape
            .map(|shape| Bucket { walk: walk.to_owned(), shape })
            .ok_or(RefusalReason::NoBucket { rows: needed.rows, tokens: needed.tokens })
    }

    /// The smallest bucket that holds every plan label of `step`.
    ///
    /// # Errors
    /// As [`Buckets::pick`].
    pub fn pick_for(&self, step: &Step) -> Result<Bucket, RefusalReason> {
        self.pick(&step.walk, step_shape(step))
    }
}

/// Query lengths of the rows that pad a plan of `real` rows and tokens to `shape`: the tokens left over, spread evenly
/// over the rows left over. `None` when it does not fit, or when tokens are left over and no row is left to hold them.
pub fn padded_q_lens(shape: PaddedShape, real: PaddedShape) -> Option<Vec<usize>> {
    let rows = shape.rows.checked_sub(real.rows)?;
    let tokens = shape.tokens.checked_sub(real.tokens)?;
    if rows == 0 {
        return (tokens == 0).then(Vec::new);
    }
    Some((0..rows).map(|i| tokens / rows + usize::from(i < tokens % rows)).collect())
}

/// Rows and query tokens of a step: the most that any of its plan labels has.
pub fn step_shape(step: &Step) -> PaddedShape {
    let mut most = PaddedShape { rows: 0, tokens: 0 };
    for declaration in step.resources.values() {
        match declaration {
            Declaration::Kv(kv) => kv_shape(kv, &mut most),
            Declaration::Attention(attention) => {
                let queries = attention.queries.iter().flatten();
                widen_by(&mut most, queries.map(|segment| (&segment.label, segment.span)));
            }
            Declaration::Ring(ring) => {
                widen_by(&mut most, ring.segments.iter().map(|segment| (&segment.label, segment.span)));
            }
        }
    }
    most
}

/// Widens `most` to the rows and tokens of each label.
fn widen_by<'a>(most: &mut PaddedShape, spans: impl Iterator<Item = (&'a Label, usize)>) {
    let mut labels: BTreeMap<&Label, PaddedShape> = BTreeMap::new();
    for (label, span) in spans {
        add(labels.entry(label).or_insert(PaddedShape { rows: 0, tokens: 0 }), span);
    }
    labels.values().for_each(|shape| widen(most, *shape));
}

fn kv_shape(kv: &KvStep, most: &mut PaddedShape) {
    let mut labels: BTreeMap<&Label, PaddedShape> = BTreeMap::new();
    for segment in &kv.segments {
        add(labels.entry(&segment.label).or_insert(PaddedShape { rows: 0, tokens: 0 }), segment.span);
    }
    labels.values().for_each(|shape| widen(most, *shape));
    for group in &kv.combined {
        let mut sum = PaddedShape { rows: 0, tokens: 0 };
        for part in group.parts.iter().filter_map(|part| labels.get(part)) {
            sum.rows += part.rows;
            sum.tokens += part.tokens;
        }
        widen(most, sum);
    }
}

fn add(shape: &mut PaddedShape, span: usize) {
    shape.rows += 1;
    shape.tokens += span;
}

fn widen(most: &mut PaddedShape, shape: PaddedShape) {
    most.rows = most.rows.max(shape.rows);
    most.tokens = most.tokens.max(shape.tokens);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{RequestId, Segment};

    fn shape(rows: usize, tokens: usize) -> PaddedShape {
        PaddedShape { rows, tokens }
    }

    #[test]
    fn the_smallest_bucket_that_holds_the_step_is_picked() {
        let buckets = Buckets::decode("decode", &[64, 1, 8, 8]);
        assert_eq!(buckets.iter().count(), 3);
        for (rows, want) in [(1, 1), (2, 8), (8, 8), (9, 64), (64, 64)] {
            assert_eq!(buckets.pick("decode", shape(rows, rows)).unwrap().shape, shape(want, want));
        }
        let none = buckets.pick("decode", shape(65, 65)).unwrap_err();
        assert_eq!(none, RefusalReason::NoBucket { rows: 65, tokens: 65 });
        assert!(buckets.pick("prefill", shape(1, 1)).is_err(), "a walk that was not captured");
    }

    #[test]
    fn left_over_tokens_need_a_row_of_their_own() {
        assert_eq!(padded_q_lens(shape(8, 8), shape(3, 3)), Some(vec![1; 5]));
        assert_eq!(padded_q_lens(shape(4, 64), shape(2, 21)), Some(vec![22, 21]));
        assert_eq!(padded_q_lens(shape(4, 4), shape(2, 4)), Some(vec![0, 0]));
        assert_eq!(padded_q_lens(shape(1, 128), shape(1, 100)), None);
        assert_eq!(padded_q_lens(shape(1, 128), shape(1, 128)), Some(vec![]));
        assert_eq!(padded_q_lens(shape(2, 2), shape(3, 1)), None);
    }

    #[test]
    fn a_group_of_labels_counts_as_one_plan() {
        let segment = |label: &str, span| Segment {
            request: RequestId::from("r"),
            label: label.into(),
            span,
            tokens: [].into(),
        };
        let kv = KvStep {
            segments: vec![segment("cond", 3), segment("uncond", 2)],
            combined: vec![crate::step::Combined {
                label: "both".into(),
                parts: vec!["cond".into(), "uncond".into()],
            }],
            ..KvStep::default()
        };
        let step = Step::new("denoise").with("kv", Declaration::Kv(kv));
        assert_eq!(step_shape(&step), shape(2, 5));
    }
}
