//! Faults that users of such software have met.

use mstar_core::attend::{IndexFormat, IndexStore};
use mstar_core::resource::PaddedShape;
use mstar_core::step::KvStep;
use mstar_dsa::{TensorMut, TensorRef, TopkParams, index_topk, select_topk_causal, topk};
use mstar_kernels::Stream;
use mstar_kernels::synth::Kind;

use crate::rig::{HI, L, Rig, RowOut, Setup, kv_step};

#[test]
fn f03_what_lies_in_slots_that_nobody_owns_never_shows() {
    let outs = |poison: Option<f32>| {
        let rig = Rig::new(Setup { pages: 30, ..Setup::default() });
        if let Some(value) = poison {
            rig.ingest(&["poison"]);
            rig.overwrite_latents("poison", 110, value);
            rig.engine.remove(&"poison".into()).unwrap();
        }
        rig.ingest(&["a", "b"]);
        let mut outs = rig.step(&[("a", 15), ("b", 1)], None);
        outs.extend(rig.step(&[("a", 2), ("b", 16)], None));
        outs.extend(rig.step(&[("a", 1), ("b", 1)], Some(PaddedShape { rows: 4, tokens: 6 })));
        outs
    };
    let clean = outs(None);
    for value in [f32::NAN, f32::INFINITY, 1e30] {
        for (dirty, clean) in outs(Some(value)).iter().zip(&clean) {
            dirty.assert_same_bits(clean);
        }
    }
}

#[test]
fn f05_rows_without_queries_stand_between_others() {
    let rig = Rig::new(Setup::default());
    rig.ingest(&["a", "b", "c"]);
    rig.step(&[("a", 20), ("b", 20), ("c", 3)], None);
    let outs = rig.step(&[("a", 1), ("b", 0), ("c", 1)], None);
    outs.iter().for_each(|row| rig.check(row));
    assert!(outs[1].layers.iter().all(|layer| layer.o.is_empty() && layer.lse.is_empty()));
    // No query at all.
    let outs = rig.step(&[("a", 0), ("b", 0)], None);
    assert!(outs.iter().all(|row| row.layers.len() == L));
    let planned = rig.planned(kv_step(KvStep::default()), None);
    rig.engine.commit(planned).unwrap();
}

#[test]
fn f12_no_extra_key_at_a_page_boundary() {
    for page_size in [1, 2, 4, 8] {
        let rig = Rig::new(Setup { page_size, topk: 3, ..Setup::default() });
        rig.ingest(&["a"]);
        for _ in 0..18 {
            rig.step(&[("a", 1)], None).iter().for_each(|row| rig.check(row));
        }
    }
}

#[test]
fn f16_a_smaller_batch_in_the_bucket_of_a_larger_one_is_as_if_alone() {
    let shape = PaddedShape { rows: 9, tokens: 30 };
    let rig = Rig::new(Setup { pages: 900, ..Setup::default() });
    let names: Vec<String> = (0..8).map(|i| format!("r{i}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    rig.ingest(&names);
    let long: Vec<(&str, usize)> = names.iter().map(|&name| (name, 200)).collect();
    rig.step(&long, None);
    let many: Vec<(&str, usize)> = names.iter().map(|&name| (name, 3)).collect();
    // Both slots hold the larger batch's picks and scratch.
    rig.step(&many, Some(shape));
    rig.step(&many, Some(shape));
    rig.ingest(&["small", "tiny"]);
    let fresh = Rig::new(Setup::default());
    fresh.ingest(&["small", "tiny"]);
    for rows in [[("small", 11), ("tiny", 2)], [("small", 1), ("tiny", 1)], [("small", 2), ("tiny", 1)]] {
        for (out, expected) in rig.step(&rows, Some(shape)).iter().zip(fresh.step(&rows, None)) {
            out.assert_same_bits(&expected);
        }
    }
}

#[test]
fn f17_padded_rows_yield_nothing_pick_nothing_and_write_nothing() {
    let shape = PaddedShape { rows: 8, tokens: 12 };
    for store in [IndexStore::Pages, IndexStore::Buffers] {
        let rig = Rig::new(Setup { store, ..Setup::default() });
        let eager = Rig::new(Setup { store, ..Setup::default() });
        for rig in [&rig, &eager] {
            rig.ingest(&["a", "b", "c"]);
            rig.step(&[("a", 30), ("b", 8), ("c", 5)], None);
        }
        for rows in [&[("a", 1), ("b", 1), ("c", 3)][..], &[("c", 4)], &[("a", 5), ("b", 0), ("c", 7)]] {
            // `Rig::forward` feeds padding NaN and checks that it comes out as 0 and -inf.
            for (out, expected) in rig.step(rows, Some(shape)).iter().zip(eager.step(rows, None)) {
                out.assert_same_bits(&expected);
            }
            assert_eq!(rig.pool(), eager.pool());
        }
    }
}

#[test]
fn f20_several_queries_of_a_decode_row_see_what_each_would_alone() {
    let rig = Rig::new(Setup::default());
    let one = Rig::new(Setup::default());
    for rig in [&rig, &one] {
        rig.ingest(&["a", "b"]);
        rig.step(&[("a", 7), ("b", 40)], None);
    }
    let drafts = rig.step(&[("a", 3), ("b", 3)], None);
    drafts.iter().for_each(|row| rig.check(row));
    for query in 0..3 {
        for (draft, alone) in drafts.iter().zip(one.step(&[("a", 1), ("b", 1)], None)) {
            for layer in 0..L {
                assert_eq!(draft.pick(layer, query), alone.pick(layer, 0), "{} layer {layer}", draft.request);
            }
        }
    }
}

#[test]
fn f21_lse_of_picks_is_natural() {
    // All index keys alike: the earliest 8 are picked, and the oracle's lse over them is natural.
    let mut rig = Rig::new(Setup::default());
    rig.index_inputs = Some(Box::new(|_, _, lanes| lanes.fill(1.0)));
    rig.ingest(&["a"]);
    let out = rig.step(&[("a", 30)], None).remove(0);
    rig.check(&out);
    assert_eq!(out.pick(1, 29), (0..8).collect::<Vec<i32>>());
}

/// One head over keys `[S, 1]`, the query at the last; picked by both forms of the selection.
fn picks(keys: &[f32], weight: f32, k: usize) -> Vec<i32> {
    let n = keys.len();
    let (mut fast, mut plain, mut at_once) = (vec![i32::MIN; k], vec![i32::MIN; k], vec![i32::MIN; k]);
    let scores: Vec<f32> = keys.iter().map(|&key| weight * if key <= 0.0 { 0.0 } else { key }).collect();
    let scores = TensorRef::from_slice(&scores, &[1, n]).unwrap();
    let positions = [n as i32 - 1];
    let out = TensorMut::from_slice(&mut fast, &[1, k]).unwrap();
    topk(&Stream::cpu(), TopkParams { scores, positions: &positions, topk: k, out, workers: 2 }).unwrap();
    let out = TensorMut::from_slice(&mut plain, &[1, k]).unwrap();
    select_topk_causal(scores, &positions, k, out).unwrap();
    assert_eq!(plain, fast, "the linear selection picks what a stable sort does");
    let q = TensorRef::from_slice(&[1f32], &[1, 1, 1]).unwrap();
    let weights = [weight];
    let weights = TensorRef::from_slice(&weights, &[1, 1]).unwrap();
    let keys = TensorRef::from_slice(keys, &[n, 1]).unwrap();
    let out = TensorMut::from_slice(&mut at_once, &[1, k]).unwrap();
    index_topk(q, weights, keys, &positions, k, out).unwrap();
    assert_eq!(at_once, fast, "scores and pick at once");
    fast
}

#[test]
fn f22_many_equal_scores_leave_no_hole() {
    let keys: Vec<f32> = (0..8320).map(|s| if s % 83 == 0 && s < 8300 { 1.0 } else { -1.0 }).collect();
    let picked = picks(&keys, 1.0, 2048);
    let mut expected: Vec<i32> = (0..100).map(|i| 83 * i).collect();
    expected.extend((0..8320).filter(|s| s % 83 != 0 || *s >= 8300).take(1948));
    expected.sort_unstable();
    assert_eq!(picked, expected);
    for _ in 0..20 {
        assert_eq!(picks(&keys, 1.0, 2048), expected);
    }
    for k in [99, 100, 101] {
        let mut first: Vec<i32> = (0..100.min(k as i32)).collect();
        first.resize(k, -1);
        assert_eq!(picks(&[0.0; 100], 1.0, k), first);
        assert_eq!(picks(&[f32::INFINITY; 100], 1.0, k), first);
    }
}

#[test]
fn f22_equal_scores_through_pages_pick_the_earliest() {
    let mut rig = Rig::new(Setup { topk: 10, ..Setup::default() });
    rig.index_inputs = Some(Box::new(|kind, position, lanes| {
        let value = if kind == Kind::IndexKey && position % 7 != 3 { -1.0 } else { 1.0 };
        lanes.fill(value);
    }));
    rig.ingest(&["a"]);
    let out = rig.step(&[("a", 45)], None).remove(0);
    rig.check(&out);
    // Winners 3, 10, 17, 24, 31, 38 and the four earliest others.
    assert_eq!(out.pick(0, 44), [0, 1, 2, 3, 4, 10, 17, 24, 31, 38]);
}

#[test]
fn f23_nan_is_never_picked_and_an_empty_pick_attends_to_nothing() {
    let run = |feed: fn(Kind, usize, &mut [f32])| {
        let mut rig = Rig::new(Setup { topk: 16, ..Setup::default() });
        rig.index_inputs = Some(Box::new(feed));
        rig.ingest(&["a"]);
        rig.step(&[("a", 99)], None);
        let out = rig.step(&[("a", 1)], None).remove(0);
        rig.check(&out);
        out
    };
    let one = run(|kind, position, lanes| {
        if kind == Kind::IndexKey && position == 40 {
            lanes[3] = f32::NAN;
        }
    });
    assert!((0..L).all(|layer| one.pick(layer, 0).len() == 16 && !one.pick(layer, 0).contains(&40)));
    for all in [
        run(|kind, _, lanes| {
            if kind == Kind::IndexKey {
                lanes[0] = f32::NAN;
            }
        }),
        run(|kind, _, lanes| {
            if kind == Kind::IndexWeight {
                lanes[HI - 1] = f32::NAN;
            }
        }),
    ] {
        for layer in &all.layers {
            assert!(layer.picks.iter().all(|&p| p == -1));
            assert!(layer.o.iter().all(|x| x.to_bits() == 0), "{:?}", layer.o);
            assert!(layer.lse.iter().all(|&x| x == f32::NEG_INFINITY));
        }
    }
    // -inf is a score like any other, and the least.
    let mut keys = vec![0.0; 100];
    keys[70] = f32::INFINITY;
    assert_eq!(picks(&keys, -1.0, 99), (0..100).filter(|&s| s != 70).collect::<Vec<i32>>());
    assert_eq!(picks(&keys, -1.0, 100), (0..100).collect::<Vec<i32>>());
}

#[test]
fn f24_the_indexer_scores_the_whole_prefix_however_it_came() {
    // Key 5 wins clearly, key 61 comes second.
    let feed = |kind: Kind, position: usize, lanes: &mut [f32]| match (kind, position) {
        (Kind::IndexKey, 5) => lanes.fill(40.0),
        (Kind::IndexKey, 61) => lanes.fill(20.0),
        (Kind::IndexKey, _) => {}
        _ => lanes.iter_mut().for_each(|lane| *lane = lane.abs()),
    };
    let run = |chunks: &[usize], store, format| {
        let mut rig = Rig::new(Setup { store, format, ..Setup::default() });
        rig.index_inputs = Some(Box::new(feed));
        rig.ingest(&["a"]);
        let outs: Vec<RowOut> = chunks.iter().flat_map(|&span| rig.step(&[("a", span)], None)).collect();
        outs.iter().for_each(|row| rig.check(row));
        let pick = |layer: usize, position: usize| {
            let row = outs.iter().find(|row| row.kv_len > position).unwrap();
            row.pick(layer, position + row.q_len - row.kv_len)
        };
        let of: Vec<Vec<i32>> = (60..64)
            .flat_map(|position| (0..L).map(move |layer| (layer, position)))
            .map(|(l, p)| pick(l, p))
            .collect();
        of
    };
    let chunkings: [&[usize]; 4] = [&[64], &[60, 4], &[63, 1], &[7, 7, 7, 7, 7, 7, 7, 7, 7, 1]];
    for store in [IndexStore::Pages, IndexStore::Buffers] {
        for format in [IndexFormat::F32, IndexFormat::Fp8] {
            let whole = run(chunkings[0], store, format);
            for (at, pick) in whole.iter().enumerate() {
                let position = 60 + at / L;
                assert!(pick.contains(&5) && pick.len() == 8);
                assert_eq!(pick.contains(&61), position >= 61, "{pick:?} at {position}");
                assert!(pick.iter().all(|&p| p as usize <= position));
            }
            for chunks in &chunkings[1..] {
                assert_eq!(run(chunks, store, format), whole, "{chunks:?}");
            }
        }
    }
}

#[test]
fn f18_a_step_as_large_as_was_foreseen_takes_what_was_foreseen() {
    let largest = mstar_core::attend::StepShape { rows: 6, tokens: 64, kv_len: 700 };
    for topk in [8, 200, 1000] {
        let rig = Rig::new(Setup { topk, pages: 1200, largest: Some(largest), ..Setup::default() });
        let names = ["a", "b", "c", "d", "e", "f"];
        rig.ingest(&names);
        rig.step(&[("a", 1)], None);
        let foreseen = rig.dsa.bytes();
        for _ in 0..10 {
            rig.step(&[("a", 64)], None);
        }
        rig.step(&[("a", 40), ("b", 20), ("c", 1), ("d", 1), ("e", 1), ("f", 1)], None);
        let decode: Vec<(&str, usize)> = names.iter().map(|&name| (name, 1)).collect();
        rig.step(&decode, None);
        assert_eq!(rig.dsa.bytes(), foreseen, "topk {topk}");
    }
}
