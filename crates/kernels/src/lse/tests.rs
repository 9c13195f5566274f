use half::bf16;
use proptest::prelude::*;

use super::*;
use crate::synth::{self, Kind, chain};

const NONE: f32 = f32::NEG_INFINITY;

/// States of one query and one head, each `(o, lse)` with two lanes.
fn merge(parts: &[([f32; 2], f32)]) -> ([f32; 2], f32) {
    let lses: Vec<[f32; 1]> = parts.iter().map(|part| [part.1]).collect();
    let views: Vec<Partial<'_>> = parts
        .iter()
        .zip(&lses)
        .map(|((o, _), lse)| Partial {
            o: TensorRef::from_slice(o, &[1, 1, 2]).unwrap(),
            lse: TensorRef::from_slice(lse, &[1, 1]).unwrap(),
        })
        .collect();
    let (mut o, mut lse) = ([f32::NAN; 2], [f32::NAN]);
    let mut out = Merged {
        o: TensorMut::from_slice(&mut o, &[1, 1, 2]).unwrap(),
        lse: TensorMut::from_slice(&mut lse, &[1, 1]).unwrap(),
    };
    merge_all_natural(&views, &mut out).unwrap();
    if let [first, rest @ ..] = parts {
        // In place, one by one, two-way: the same as all at once for one or two parts.
        let (mut o2, mut lse2) = (first.0, [first.1]);
        for view in &views[1..] {
            let mut acc = Merged {
                o: TensorMut::from_slice(&mut o2, &[1, 1, 2]).unwrap(),
                lse: TensorMut::from_slice(&mut lse2, &[1, 1]).unwrap(),
            };
            merge_natural_in_place(&mut acc, view).unwrap();
        }
        if rest.len() == 1 {
            assert_eq!((o2.map(f32::to_bits), lse2[0].to_bits()), (o.map(f32::to_bits), lse[0].to_bits()));
        }
    }
    (o, lse[0])
}

#[test]
fn f04_empty_states_merge_as_the_identity() {
    let empty = ([0.0, 0.0], NONE);
    let state = ([0.1, -0.0], 3.7);
    assert_eq!(merge(&[]), empty);
    assert_eq!(merge(&[empty, empty]), empty);
    for lse in [3.7, -1e30, f32::MIN, f32::MAX, 0.0] {
        let state = (state.0, lse);
        for parts in [
            vec![empty, state],
            vec![state, empty],
            vec![empty, state, empty, empty],
            vec![empty, empty, empty, state],
        ] {
            let (o, merged) = merge(&parts);
            assert_eq!((o.map(f32::to_bits), merged), (state.0.map(f32::to_bits), lse));
        }
    }
    assert_eq!(merge(&[empty; 4]), empty);
    // What an empty state's output holds is not read.
    assert_eq!(merge(&[([f32::NAN; 2], NONE), ([1.0, 2.0], 0.0)]), ([1.0, 2.0], 0.0));
}

#[test]
fn f04_a_very_negative_lse_is_not_empty() {
    let (o, lse) = merge(&[([2.0, 4.0], -1e30), ([4.0, 8.0], -1e30)]);
    assert_eq!((o, lse), ([3.0, 6.0], -1e30));
    let (o, lse) = merge(&[([2.0, 4.0], -1e30), ([4.0, 8.0], 1.0)]);
    assert_eq!((o, lse), ([4.0, 8.0], 1.0));
}

#[test]
fn f04_nonsense_is_nan_and_never_plausible() {
    for lse in [f32::NAN, f32::INFINITY] {
        assert!(merge(&[([1.0, 1.0], lse), ([2.0, 2.0], 0.0)]).1.is_nan());
        assert!(merge(&[([2.0, 2.0], 0.0), ([1.0, 1.0], lse)]).0[0].is_nan());
    }
}

#[test]
fn f21_the_base_is_natural() {
    let (o, lse) = merge(&[([0.0, 0.0], 2f32.ln()), ([10.0, 10.0], 8f32.ln())]);
    assert!((o[0] - 8.0).abs() < 1e-5 && (lse - std::f32::consts::LN_10).abs() < 1e-6);
    // Base-2 states, converted once each.
    let (o, lse) = merge(&[([0.0; 2], natural_from_base2(1.0)), ([10.0; 2], natural_from_base2(3.0))]);
    assert!((o[0] - 8.0).abs() < 1e-5 && (lse - std::f32::consts::LN_10).abs() < 1e-6);
    assert_eq!(natural_from_base2(NONE), NONE);
    assert_eq!(base2_from_natural(natural_from_base2(3.0)), 3.0);
}

/// Synthetic attention over 4096 keys in `parts` parts, rounded to f32, merged; with the whole beside it.
fn in_parts(parts: usize) -> (Vec<f32>, f32, Vec<f64>, f64) {
    let (n, d) = (4096usize, 16usize);
    let keys: Vec<u64> = (0..n as u64).map(|t| chain(synth::ROOT, t)).collect();
    let (mut k, mut v, mut q) = (vec![0f32; n * d], vec![0f32; n * d], vec![0f32; d]);
    synth::fill(1, Kind::Key, 0, &keys, &mut TensorMut::from_slice(&mut k, &[n, d]).unwrap()).unwrap();
    synth::fill(1, Kind::Value, 0, &keys, &mut TensorMut::from_slice(&mut v, &[n, d]).unwrap()).unwrap();
    synth::fill_lanes(1, Kind::Query, 0, keys[n - 1], 0, &mut q);
    let over = |from: usize, to: usize| {
        let u = (to - from) as i32;
        let span = from * d..to * d;
        crate::reference::dense(&crate::reference::dense::Dense {
            q: &q,
            k: &k[span.clone()],
            v: &v[span],
            cu_q: &[0, 1],
            cu_k: &[0, u],
            num_qo_heads: 1,
            num_kv_heads: 1,
            head_dim_qk: d,
            head_dim_vo: d,
            sm_scale: 0.25,
            causal: false,
        })
        .unwrap()
    };
    let partials: Vec<(Vec<f32>, [f32; 1])> = (0..parts)
        .map(|p| over(p * n / parts, (p + 1) * n / parts))
        .map(|a| (a.o.iter().map(|&x| x as f32).collect(), [a.lse[0] as f32]))
        .collect();
    let views: Vec<Partial<'_>> = partials
        .iter()
        .map(|(o, lse)| Partial {
            o: TensorRef::from_slice(o, &[1, 1, d]).unwrap(),
            lse: TensorRef::from_slice(lse, &[1, 1]).unwrap(),
        })
        .collect();
    let (mut o, mut lse) = (vec![0f32; d], [0f32]);
    let mut out = Merged {
        o: TensorMut::from_slice(&mut o, &[1, 1, d]).unwrap(),
        lse: TensorMut::from_slice(&mut lse, &[1, 1]).unwrap(),
    };
    merge_all_natural(&views, &mut out).unwrap();
    let whole = over(0, n);
    (o, lse[0], whole.o, whole.lse[0])
}

#[test]
fn f21_parts_and_whole_agree() {
    for parts in [1, 2, 3, 7] {
        let (o, lse, whole, whole_lse) = in_parts(parts);
        assert!((f64::from(lse) - whole_lse).abs() < 1e-6, "{parts}: {lse} {whole_lse}");
        for (o, whole) in o.iter().zip(&whole) {
            assert!((f64::from(*o) - whole).abs() < 1e-6, "{parts}: {o} {whole}");
        }
    }
}

#[test]
fn strided_views_and_other_dtypes_merge_alike() {
    // Fused `[T, 2, H, D]`: partial a at index 0 of axis 1, b at 1; bf16 in, f32 out.
    let fused: Vec<bf16> = (0..2 * 2 * 3 * 4).map(|i| bf16::from_f32(i as f32)).collect();
    let whole = TensorRef::from_slice(&fused, &[2, 2, 3, 4]).unwrap();
    let lse = [0f32; 6];
    let lse = TensorRef::from_slice(&lse, &[2, 3]).unwrap();
    let part = |i: usize| Partial { o: whole.select(1, i).unwrap(), lse };
    let (mut o, mut merged) = ([0f32; 24], [0f32; 12]);
    let mut out = Merged {
        o: TensorMut::from_slice(&mut o, &[2, 3, 4]).unwrap(),
        // Every other entry: lse may be strided in both axes but the last.
        lse: TensorMut::from_slice_strided(&mut merged, &[2, 3], &[6, 1]).unwrap(),
    };
    merge_natural(&part(0), &part(1), &mut out).unwrap();
    assert_eq!(o[..4], [6.0, 7.0, 8.0, 9.0]);
    assert_eq!(o[12], 30.0);
    assert_eq!(merged[3..6], [0.0; 3]);
    assert_eq!(merged[6], 2f32.ln());
}

#[test]
fn shapes_that_do_not_fit_are_refused_and_nothing_is_written() {
    let (a, lse) = ([1f32; 8], [0f32; 2]);
    let good = Partial {
        o: TensorRef::from_slice(&a, &[1, 2, 4]).unwrap(),
        lse: TensorRef::from_slice(&lse, &[1, 2]).unwrap(),
    };
    let other = Partial { o: TensorRef::from_slice(&a, &[2, 1, 4]).unwrap(), ..good };
    let swapped = Partial { lse: TensorRef::from_slice(&lse, &[2, 1]).unwrap(), ..good };
    let (mut o, mut out_lse) = ([7f32; 8], [7f32; 2]);
    let mut out = Merged {
        o: TensorMut::from_slice(&mut o, &[1, 2, 4]).unwrap(),
        lse: TensorMut::from_slice(&mut out_lse, &[1, 2]).unwrap(),
    };
    assert!(merge_natural(&good, &other, &mut out).is_err());
    assert!(merge_natural_in_place(&mut out, &swapped).is_err());
    assert!(merge_natural(&good, &good, &mut out).is_ok());
    let mut ints = [0i32; 8];
    let mut wrong = Merged {
        o: TensorMut::from_slice(&mut ints, &[1, 2, 4]).unwrap(),
        lse: TensorMut::from_slice(&mut out_lse, &[1, 2]).unwrap(),
    };
    assert!(matches!(merge_all_natural(&[], &mut wrong), Err(Error::DTypeMismatch { .. })));
    assert_eq!(o, [1.0; 8]);
}

proptest! {
    /// Any order and grouping of parts gives the whole, within f32 rounding.
    #[test]
    fn merging_follows_the_formula(
        parts in prop::collection::vec((-3f32..3.0, prop_oneof![Just(NONE), -20f32..20.0]), 0..6)
    ) {
        let states: Vec<([f32; 2], f32)> = parts.iter().map(|&(x, lse)| ([x, -x], lse)).collect();
        let (o, lse) = merge(&states);
        let sums: Vec<f64> = parts.iter().map(|part| f64::from(part.1).exp()).collect();
        let total: f64 = sums.iter().sum();
        if total == 0.0 {
            prop_assert_eq!((o, lse), ([0.0; 2], NONE));
        } else {
            let want: f64 = parts.iter().zip(&sums).map(|(part, s)| f64::from(part.0) * s / total).sum();
            prop_assert!((f64::from(o[0]) - want).abs() < 2e-6 && o[1] == -o[0]);
            prop_assert!((f64::from(lse) - total.ln()).abs() < 2e-6);
        }
    }
}

/// Numbers of either sign from a counter.
fn number(i: usize) -> f32 {
    ((i as u32).wrapping_mul(2_654_435_761) >> 8) as f32 / 8_388_608.0 - 1.0
}

#[test]
fn every_body_and_number_of_threads_gives_the_bits_of_the_definition() {
    // Enough for threads to share it at the largest width.
    let (tokens, heads) = (137, 5);
    for width in [1, 7, 64, 129] {
        let o =
            |part: usize| -> Vec<f32> { (0..tokens * heads * width).map(|i| number(i * 3 + part)).collect() };
        let lse = |part: usize| -> Vec<f32> {
            let one = |i: usize| match (i + part) % 7 {
                0 => NONE,
                1 => -1e30,
                2 => 1e4,
                _ => 8.0 * number(i * 5 + part),
            };
            (0..tokens * heads).map(one).collect()
        };
        for parts in [1usize, 2, 3] {
            let (os, lses): (Vec<_>, Vec<_>) = (0..parts).map(|part| (o(part), lse(part))).unzip();
            let mut expected = vec![0f32; tokens * heads * width];
            for row in 0..tokens * heads {
                let row_lses: Vec<f32> = lses.iter().map(|lse| lse[row]).collect();
                let (mut weights, mut terms) = (vec![0f32; parts], vec![0f64; parts]);
                weigh(&row_lses, &mut weights, &mut terms);
                let mut live = os.iter().zip(&weights).filter(|(_, weight)| **weight != 0.0);
                let out = &mut expected[row * width..(row + 1) * width];
                let from = |o: &Vec<f32>, lane: usize| o[row * width + lane];
                if let Some((first, weight)) = live.next() {
                    (0..width).for_each(|lane| out[lane] = weight * from(first, lane));
                }
                for (o, weight) in live {
                    (0..width).for_each(|lane| out[lane] += weight * from(o, lane));
                }
            }
            let narrow: Vec<Vec<bf16>> =
                os.iter().map(|o| o.iter().map(|&x| bf16::from_f32(x)).collect()).collect();
            let mut seen: Option<Vec<u16>> = None;
            for isa in crate::cpu::Isa::supported() {
                for threads in [1, 3] {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                    let (mut o, mut merged) = (vec![f32::NAN; expected.len()], vec![0f32; tokens * heads]);
                    let mut rounded = vec![bf16::NAN; expected.len()];
                    let shape = [tokens, heads, width];
                    let view = |lse| TensorRef::from_slice(lse, &shape[..2]).unwrap();
                    let wide: Vec<Partial<'_>> = (0..parts)
                        .map(|i| Partial {
                            o: TensorRef::from_slice(&os[i], &shape).unwrap(),
                            lse: view(&lses[i]),
                        })
                        .collect();
                    let halves: Vec<Partial<'_>> = (0..parts)
                        .map(|i| Partial {
                            o: TensorRef::from_slice(&narrow[i], &shape).unwrap(),
                            lse: view(&lses[i]),
                        })
                        .collect();
                    pool.install(|| {
                        let _body = crate::cpu::Isa::force(*isa).unwrap();
                        let mut out = Merged {
                            o: TensorMut::from_slice(&mut o, &shape).unwrap(),
                            lse: TensorMut::from_slice(&mut merged, &shape[..2]).unwrap(),
                        };
                        merge_all_natural(&wide, &mut out).unwrap();
                        let mut out = Merged {
                            o: TensorMut::from_slice(&mut rounded, &shape).unwrap(),
                            lse: TensorMut::from_slice(&mut merged, &shape[..2]).unwrap(),
                        };
                        merge_all_natural(&halves, &mut out).unwrap();
                    });
                    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(&o), bits(&expected), "{isa}, {threads} threads, width {width}");
                    let rounded: Vec<u16> = rounded.iter().map(|x| x.to_bits()).collect();
                    assert_eq!(seen.get_or_insert_with(|| rounded.clone()), &rounded, "{isa}, {threads}");
                }
            }
        }
    }
}

#[test]
fn an_output_whose_elements_share_a_place_is_refused() {
    let (a, lse) = ([1f32; 8], [0f32; 2]);
    let part = Partial {
        o: TensorRef::from_slice(&a, &[2, 1, 4]).unwrap(),
        lse: TensorRef::from_slice(&lse, &[2, 1]).unwrap(),
    };
    let (mut o, mut out_lse) = ([7f32; 8], [7f32; 2]);
    let mut out = Merged {
        o: TensorMut::from_slice_strided(&mut o, &[2, 1, 4], &[2, 4, 1]).unwrap(),
        lse: TensorMut::from_slice(&mut out_lse, &[2, 1]).unwrap(),
    };
    assert!(merge_natural(&part, &part, &mut out).is_err());
    assert_eq!((o, out_lse), ([7.0; 8], [7.0; 2]));
}
