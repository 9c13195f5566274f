//! A resource of kind ring: both ways to say what layers keep, and every refusal.

use super::{GOOD, load};
use crate::kv::RingGeometry;
use crate::spec::RingSpec;

/// The ring of a spec of six layers, or what the loader said, without line and column.
fn ring(text: &str) -> Result<RingSpec, Vec<String>> {
    let spec = GOOD.replace("  layers: 2\n", "  layers: 6\n");
    let spec = load(&spec.replace("graph:\n", &format!("  ring: {{ kind: ring, {text} }}\ngraph:\n")));
    match spec {
        Ok(spec) => Ok(spec.rings().next().unwrap().1.clone()),
        Err(said) => Err(said.lines().map(|l| l.split_once(": ").unwrap().1.to_string()).collect()),
    }
}

fn refused(text: &str) -> String {
    ring(text).unwrap_err().join("\n")
}

#[test]
fn uniform_layers_are_said_in_three_keys() {
    let spec = ring("ring_frames: 4, tokens_per_frame: 256").unwrap();
    assert_eq!(spec.config.layers, [RingGeometry::last(4); 6]);
    let RingSpec { config } = spec;
    assert_eq!((config.tokens_per_frame, config.num_worlds, config.num_kv_heads), (256, 1, 2));
    assert_eq!((config.head_dim, config.head_dim_vo, config.dtype.size()), (64, 64, 2));
    let text = "ring_frames: 8, ring_buckets: 6, pinned_dilation: 4, tokens_per_frame: 128, num_worlds: 3";
    let spec = ring(text).unwrap();
    let wide = RingGeometry { ring_frames: 8, ring_buckets: 6, pinned_dilation: 4 };
    assert_eq!((spec.config.layers, spec.config.num_worlds), (vec![wide; 6], 3));
}

#[test]
fn runs_of_layers_repeat_until_all_have_one() {
    let runs = "tokens_per_frame: 128, layers: [{ count: 2, ring_frames: 2 }, { ring_frames: 3, pinned_dilation: 4 }]";
    let spec = ring(runs).unwrap();
    let (near, far) = (RingGeometry::last(2), RingGeometry { pinned_dilation: 4, ..RingGeometry::last(3) });
    assert_eq!(spec.config.layers, [near, near, far, near, near, far]);
    let whole = "tokens_per_frame: 128, layers: [{ count: 4, ring_frames: 2 }, { count: 2, ring_frames: 3 }]";
    assert_eq!(ring(whole).unwrap().config.layers[3..5], [near, RingGeometry::last(3)]);
}

#[test]
fn f34_what_no_ring_can_be_is_refused_by_key() {
    assert_eq!(
        refused("ring_frames: 4, tokens_per_frame: 100"),
        "resources.ring.tokens_per_frame: expected a multiple of 128, got 100"
    );
    assert_eq!(
        refused("ring_frames: 4, ring_buckets: 5, tokens_per_frame: 128"),
        "resources.ring.ring_buckets: expected at most ring_frames, 4, got 5"
    );
    assert!(refused("tokens_per_frame: 128").starts_with("resources.ring.ring_frames: missing"));
    assert_eq!(
        refused("tokens_per_frame: 128, layers: [{ count: 4, ring_frames: 4 }]"),
        "resources.ring.layers: the counts add up to 4, and the runs repeat until all layers have one; model.layers \
         is 6, no multiple of it"
    );
    assert_eq!(
        refused("tokens_per_frame: 128, layers: [{ count: 7, ring_frames: 4 }]"),
        "resources.ring.layers[0].count: expected a whole number from 1 to 6, got 7"
    );
    assert_eq!(
        refused("tokens_per_frame: 128, ring_frames: 4, layers: [{ count: 6, ring_frames: 4 }]"),
        "resources.ring.ring_frames: has no effect here; remove it"
    );
    let said = refused("tokens_per_frame: 128, layers: [{ count: 6, ring_frame: 4 }]");
    assert!(said.contains("resources.ring.layers[0].ring_frame: unknown key"), "{said}");
    assert!(said.contains("did you mean ring_frames?"), "{said}");
    assert_eq!(
        refused("ring_frames: 65536, tokens_per_frame: 1048576, num_worlds: 65536"),
        "resources.ring.num_worlds: 65536 worlds of 393222 frames over all layers are more than any machine has; lower it"
    );
    assert!(
        refused("ring_frames: 4, tokens_per_frame: 128, dtype: f32")
            .contains("ring.dtype: f32, and a step's")
    );
}

#[test]
fn a_prefix_cache_beside_a_ring_is_refused() {
    let text = GOOD.replace("prefix_cache: false", "prefix_cache: true");
    let ring = "  ring: { kind: ring, ring_frames: 2, tokens_per_frame: 128 }\ngraph:\n";
    let said = load(&text.replace("graph:\n", ring)).unwrap_err();
    assert!(
        said.contains("resources.kv.prefix_cache: a matched prefix would skip frames that ring must hold"),
        "{said}"
    );
}
