//! Faults of others that this crate could share.

use mstar_attn_flex::{
    AuxRequest, BLOCK, BlockMask, FlexArgs, FlexOptions, MaskShape, Stream, TensorMut, TensorRef,
    flex_attention_masked,
};
use mstar_core::attend::Softmax;
use mstar_core::kv::RingGeometry;

use crate::rig::*;

/// One head of width 1, K of zeros, over `m` keys of a buffer that goes on behind them.
fn zeros(l: usize, m: usize, values: &[f32], mask: &BlockMask) -> (Vec<f32>, Vec<f32>) {
    let (q, keys) = (vec![1f32; l], vec![f32::NAN; values.len()]);
    let mut keys = keys;
    keys[..m].fill(0.0);
    let mut o = vec![7f32; l];
    let view = |data| TensorRef::from_slice(data, &[1, 1, values.len(), 1]).unwrap().narrow(2, 0, m).unwrap();
    let return_aux = AuxRequest { lse: true, max_scores: false };
    let args = FlexArgs { block_mask: Some(mask), return_aux, ..FlexArgs::default() };
    let aux = flex_attention_masked(
        &Stream::cpu(),
        TensorRef::from_slice(&q, &[1, 1, l, 1]).unwrap(),
        view(&keys),
        view(values),
        &args,
        TensorMut::from_slice(&mut o, &[1, 1, l, 1]).unwrap(),
    )
    .unwrap();
    (o, aux.lse.unwrap())
}

#[test]
fn f33_lengths_that_are_no_multiple_of_the_block() {
    for m in [1usize, 64, 127, 128, 129, 200] {
        for l in [1, 5, 127, 128, 129] {
            let mut values = vec![f32::NAN; m.next_multiple_of(BLOCK)];
            values[..m].fill(1.0);
            for mask in [
                BlockMask::full(MaskShape::new(l, m)).unwrap(),
                BlockMask::written(l, BLOCK, &vec![true; m]).unwrap(),
                BlockMask::from_predicate(MaskShape::new(l, m), |_, _, _, _| true).unwrap(),
            ] {
                let (o, lse) = zeros(l, m, &values, &mask);
                assert!(o.iter().all(|&o| (o - 1.0).abs() < 1e-6) && o.len() == l, "L {l}, M {m}");
                assert!(lse.iter().all(|&x| (x - (m as f32).ln()).abs() < 1e-5), "L {l}, M {m}: {lse:?}");
            }
            let (o, lse) = zeros(l, m, &values, &BlockMask::written(l, BLOCK, &vec![false; m]).unwrap());
            assert!(o.iter().all(|&o| o == 0.0) && lse.iter().all(|&lse| lse == f32::NEG_INFINITY));
        }
    }
    // Some blocks unwritten.
    let mut values = vec![f32::NAN; 512];
    values[..128].fill(1.0);
    values[256..300].fill(1.0);
    let written: Vec<bool> = (0..300).map(|key| key / BLOCK != 1).collect();
    let (o, lse) = zeros(129, 300, &values, &BlockMask::written(129, BLOCK, &written).unwrap());
    assert!(o.iter().all(|&o| (o - 1.0).abs() < 1e-6) && (lse[128] - 172f32.ln()).abs() < 1e-5);
}

#[test]
fn f03_what_no_block_shows_never_reaches_a_result() {
    let run = |junk: f32| {
        let mut values: Vec<f32> = (0..384).map(|key| noise(&[key])).collect();
        values[128..256].fill(junk);
        let written: Vec<bool> = (0..384).map(|key| key / BLOCK != 1).collect();
        zeros(130, 384, &values, &BlockMask::written(130, BLOCK, &written).unwrap())
    };
    let bits =
        |(o, lse): (Vec<f32>, Vec<f32>)| -> Vec<u32> { o.iter().chain(&lse).map(|x| x.to_bits()).collect() };
    let plain = bits(run(0.0));
    assert!(plain.iter().all(|&bits| f32::from_bits(bits).is_finite()));
    assert!(plain == bits(run(f32::NAN)) && plain == bits(run(f32::INFINITY)));
}

#[test]
fn f03_a_ring_shows_nothing_of_frames_that_a_pass_does_not_see() {
    // World 1 holds other values in each run; so does the frame that world 0 is about to overwrite.
    let run = |junk: u64| {
        let rig =
            Rig::new(config(vec![RingGeometry::last(1)], 2), Softmax::scaled(0.6), FlexOptions::default());
        let pass = |world, frame, commit, content| Pass { world, frame, commit, content };
        rig.run(&[pass(0, 0, true, junk), pass(1, 0, true, junk + 1)]);
        rig.run(&[pass(1, 1, true, junk + 2)]);
        rig.run(&[pass(0, 1, false, 5)])
    };
    assert_eq!(run(100), run(200));
}

#[test]
fn f15_any_group_reads_its_own_key_head() {
    for group in [1usize, 2, 3, 4, 5, 6, 7, 8, 12, 16, 64] {
        let (g, m, dv) = (2usize, 130usize, 3usize);
        let h = g * group;
        for l in [1usize, 40] {
            let (q, k) = (vec![1f32; h * l * 4], vec![0f32; g * m * 4]);
            let v: Vec<f32> = (0..g * m * dv).map(|at| (at / (m * dv)) as f32).collect();
            let mut o = vec![7f32; h * l * dv];
            flex_attention_masked(
                &Stream::cpu(),
                TensorRef::from_slice(&q, &[1, h, l, 4]).unwrap(),
                TensorRef::from_slice(&k, &[1, g, m, 4]).unwrap(),
                TensorRef::from_slice(&v, &[1, g, m, dv]).unwrap(),
                &FlexArgs { enable_gqa: true, ..FlexArgs::default() },
                TensorMut::from_slice(&mut o, &[1, h, l, dv]).unwrap(),
            )
            .unwrap();
            for (at, &o) in o.iter().enumerate() {
                assert_eq!(o, (at / (l * dv) / group) as f32, "group {group}, L {l}, entry {at}");
            }
        }
    }
}
