//! The shapes that a spec's steps are padded to: `graph.buckets` counts rows, the workload says how many tokens a row has.

use mstar_core::attend::StepShape;
use mstar_core::graph::{Bucket, Buckets};
use mstar_core::resource::PaddedShape;
use mstar_core::spec::Spec;

use super::script::{self, Walk};

/// The buckets of a spec, for every walk that generates. A row has one token in decode; a frame in every pass over a ring; a
/// block of output where that is denoised, and when it is kept. Where trees of drafts are verified it has the tree's nodes,
/// and when the accepted path is kept up to as many tokens as the tree is deep: a row more stands for those that are left over.
pub(crate) fn buckets(spec: &Spec) -> Buckets {
    let Some(graph) = &spec.graph else { return Buckets::default() };
    let frame = spec.rings().next().map(|(_, ring)| ring.config.tokens_per_frame);
    let drawn = spec.synthetic();
    let denoise = drawn.and_then(|drawn| drawn.denoise.as_ref());
    let tree = drawn.and_then(|drawn| drawn.tree.as_ref());
    let of = |walk: Walk, each: usize, spare: usize| {
        graph.buckets.iter().map(move |&rows| {
            let shape = PaddedShape { rows: rows.saturating_add(spare), tokens: rows.saturating_mul(each) };
            Bucket { walk: walk.name().to_owned(), shape }
        })
    };
    match (frame.or(denoise.map(|denoise| denoise.tokens)), tree) {
        (Some(block), _) => Buckets::new(of(Walk::Denoise, block, 0).chain(of(Walk::Decode, block, 0))),
        (None, Some(tree)) => {
            let drafted = of(Walk::Verify, script::nodes(&tree.branching), 0);
            Buckets::new(drafted.chain(of(Walk::Decode, tree.branching.len().max(1), 1)))
        }
        (None, None) => Buckets::decode(Walk::Decode.name(), &graph.buckets),
    }
}

/// `largest` with what pads it to a bucket: what a resource with buffers of a fixed shape holds from the first.
pub(crate) fn padded(spec: &Spec, largest: StepShape) -> StepShape {
    buckets(spec).iter().fold(largest, |most, Bucket { shape: PaddedShape { rows, tokens }, .. }| StepShape {
        rows: most.rows.max(rows),
        tokens: most.tokens.max(tokens),
        ..most
    })
}

/// What scratch is made for: over pages the rows that pad a bucket need none, over a ring they are tiled like others.
pub(crate) fn of_frames(spec: &Spec, largest: StepShape) -> StepShape {
    if spec.rings().next().is_some() { padded(spec, largest) } else { largest }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(file: &str, expected: &[(&str, usize, usize)]) {
        let path = format!("{}/../../specs/{file}.yaml", env!("CARGO_MANIFEST_DIR"));
        let sets = ["graph={ buckets: [1, 4] }".to_owned()];
        let spec = Spec::load(path.as_ref(), &sets).unwrap();
        let got: Vec<_> = buckets(&spec).iter().map(|of| (of.walk, of.shape.rows, of.shape.tokens)).collect();
        let expected: Vec<_> =
            expected.iter().map(|&(walk, rows, tokens)| (walk.to_owned(), rows, tokens)).collect();
        assert_eq!(got, expected, "{file}");
    }

    #[test]
    fn a_row_has_as_many_tokens_as_the_workload_gives_it() {
        check("quickstart", &[("decode", 1, 1), ("decode", 4, 4)]);
        let blocks = [("decode", 1, 256), ("decode", 4, 1024), ("denoise", 1, 256), ("denoise", 4, 1024)];
        check("diffusion-cfg", &blocks);
        let tree = [("decode", 2, 3), ("decode", 5, 12), ("verify", 1, 15), ("verify", 4, 60)];
        check("speculative-tree", &tree);
    }

    #[test]
    fn steps_are_padded_to_the_largest_bucket_at_the_most() {
        let path = format!("{}/../../specs/speculative-tree.yaml", env!("CARGO_MANIFEST_DIR"));
        let largest = StepShape { rows: 2, tokens: 40, kv_len: 99 };
        for (rows, want) in [(1, (2, 40)), (8, (9, 120))] {
            let spec = Spec::load(path.as_ref(), &[format!("graph={{ buckets: [{rows}] }}")]).unwrap();
            let got = padded(&spec, largest);
            assert_eq!((got.rows, got.tokens, got.kv_len), (want.0, want.1, 99));
        }
    }
}
