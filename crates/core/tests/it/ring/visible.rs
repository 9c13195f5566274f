//! Visible blocks against the oracle, over random geometries and passes.

use mstar_core::kv::{RingConfig, RingGeometry, RingKv};
use mstar_kernels::DType;
use mstar_kernels::reference::ring::{self, Ring};
use proptest::prelude::*;

use super::harness::*;

const NAMES: [&str; 3] = ["a", "b", "c"];

fn geometry() -> impl Strategy<Value = RingGeometry> {
    (1usize..6, 1usize..6, 1usize..5).prop_map(|(ring_frames, buckets, pinned_dilation)| RingGeometry {
        ring_frames,
        ring_buckets: buckets.min(ring_frames),
        pinned_dilation,
    })
}

/// What the oracle says each pass attends.
fn oracle(config: &RingConfig, geometry: &RingGeometry, passes: &[ring::Pass]) -> Vec<Vec<i32>> {
    let zeros = vec![0f32; passes.len() * config.tokens_per_frame];
    let out = ring::ring(&Ring {
        q: &zeros,
        k: &zeros,
        v: &zeros,
        passes,
        num_qo_heads: 1,
        num_kv_heads: 1,
        head_dim_qk: 1,
        head_dim_vo: 1,
        tokens_per_frame: config.tokens_per_frame,
        ring_frames: geometry.ring_frames,
        ring_buckets: geometry.ring_buckets,
        pinned_dilation: geometry.pinned_dilation as u64,
        num_worlds: config.num_worlds,
        sm_scale: 1.0,
    })
    .unwrap();
    let at = |i: usize| out.visible_indptr[i] as usize;
    (0..passes.len())
        .map(|i| out.visible_blocks[at(i)..at(i + 1)].iter().map(|&b| b as i32).collect())
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn every_pass_sees_the_oracles_blocks(
        geometries in prop::collection::vec(geometry(), 1..4),
        worlds in 1usize..4,
        draws in prop::collection::vec((0usize..3, prop::bool::weighted(0.7)), 1..48),
    ) {
        let config = RingConfig { num_worlds: worlds, ..RingConfig::new(geometries, F, 1, DType::F32) };
        let rig = Rig::new(config.clone(), &NAMES[..worlds]);
        // Worlds are claimed lowest first: the oracle's numbers are those of the names.
        let all: Vec<_> = NAMES[..worlds].iter().map(|name| pass(name, 0, false)).collect();
        rig.run(&all);
        let mut clocks = [0u64; 3];
        let (mut passes, mut seen) = (Vec::new(), Vec::new());
        for (draw, commit) in draws {
            let world = draw % worlds;
            let frame_pos = clocks[world];
            passes.push(ring::Pass { world, frame_pos, commit });
            seen.push(rig.run(&[pass(NAMES[world], frame_pos, commit)]));
            clocks[world] += u64::from(commit);
        }
        for (group, geometry) in rig.ring.groups().geometries.iter().enumerate() {
            let expected = oracle(&config, geometry, &passes);
            let got: Vec<_> = seen.iter().map(|groups| groups[group].clone()).collect();
            prop_assert_eq!(got, expected, "{:?}", geometry);
        }
    }
}

#[test]
fn frames_of_several_blocks_are_seen_whole() {
    let geometry = RingGeometry { ring_frames: 3, ring_buckets: 2, pinned_dilation: 2 };
    let config = RingConfig { num_worlds: 2, ..RingConfig::new(vec![geometry], 3 * F, 1, DType::F32) };
    let passes: Vec<_> = (0..9u64)
        .flat_map(|f| [1, 0].map(|world| ring::Pass { world, frame_pos: f, commit: true }))
        .collect();
    let expected = oracle(&config, &geometry, &passes);
    for (pass, expected) in passes.iter().zip(expected) {
        let mut blocks = Vec::new();
        geometry.visible(pass.frame_pos).push_blocks(pass.world * 4 * 3, 3, &mut blocks);
        assert_eq!(blocks, expected, "{pass:?}");
    }
}
