//! Mods of the caller's as snippets, and masks: causal, windows, documents, against the oracle's softmax in plain loops.

use std::borrow::Cow;

use crate::DType;
use crate::flex::{CudaSnippet, MaskMod, ScoreMod, UserMask, UserMod};
use crate::testing::judge;

use super::blocks::{BLOCK, InBlocks, OFFSET, STORED};
use super::memory::{Numbers, floats, noise};
use super::{Bits, DTYPES, Family, NAN, Row, Setting, row, stream};

/// A visible key's score, or `None` where it is hidden: scaled score, batch, head, query, key, and whether masks decide of its block.
type Change<'a> = &'a dyn Fn(f64, usize, usize, usize, usize, bool) -> Option<f64>;

/// A number as a dtype has it.
fn rounded(dtype: DType, x: f32) -> f64 {
    let mut one = Numbers::filled(dtype, 1, 0);
    one.set(0, x);
    floats(dtype, &one.bytes)[0].into()
}

/// Outputs `[H, L, Dv]` and log-sum-exps `[H, L]` of one row.
fn oracle(
    family: &InBlocks<'_>,
    dtype: DType,
    rows: &[Row],
    b: usize,
    change: Change<'_>,
) -> (Vec<f64>, Vec<f64>) {
    let InBlocks { g, group, l, d, dv, block: size, .. } = *family;
    let (row, h) = (rows[b], g * group);
    let seen = InBlocks::visible(&row, Setting::of(dtype).place);
    let before: usize = rows[..b].iter().map(|row| row.kv).sum();
    let (mut o, mut lse) = (vec![0.0; h * l * dv], vec![f64::NEG_INFINITY; h * l]);
    for at in 0..h * l {
        let (head, query) = (at / l, at % l);
        let of = |i: usize| rounded(dtype, 1.5 * noise(&[3, row.id, i as u64]));
        let q: Vec<f64> = (0..d).map(|i| of(at * d + i)).collect();
        let kv = |salt: u64, key: usize, i: usize| {
            rounded(dtype, noise(&[salt, row.id, (head / group) as u64, key as u64, i as u64]))
        };
        let mut scores = Vec::new();
        for (ordinal, block) in seen.iter().enumerate() {
            // As `InBlocks` has it: each other block of all lists is visible in part.
            let partial = !family.masks.is_empty() && (before + ordinal).is_multiple_of(2);
            for key in 0..size {
                let content = ordinal * size + key;
                let dot: f64 = (0..d).map(|i| q[i] * kv(1, content, i)).sum();
                let score = change(f64::from(0.2f32) * dot, b, head, query, block * size + key, partial);
                scores.extend(score.map(|score| (content, score)));
            }
        }
        let top = scores.iter().fold(f64::NEG_INFINITY, |top, of| top.max(of.1));
        if top == f64::NEG_INFINITY {
            continue;
        }
        let total: f64 = scores.iter().map(|of| (of.1 - top).exp()).sum();
        lse[at] = top + total.ln();
        for (content, score) in scores {
            let weight = (score - top).exp() / total;
            (0..dv).for_each(|i| o[at * dv + i] += weight * kv(2, content, i));
        }
    }
    (o, lse)
}

fn hold(what: &str, block: usize, scores: &[ScoreMod<'_>], masks: &[MaskMod<'_>], change: Change<'_>) {
    let Some(owned) = stream(what) else { return };
    let stream = owned.stream();
    // Batches of no block, of one, of a leaf and more.
    let rows = [row(0, L, 3), row(1, L, 0), row(2, L, 1), row(3, L, 9)];
    let family = InBlocks { g: 1, group: 2, l: L, d: 32, dv: 32, block, scores, masks };
    for dtype in super::dtypes(&DTYPES) {
        let set = Setting { junk: NAN, ..Setting::of(dtype) };
        let got = family.run(&stream, &set, &rows);
        let (o_bound, lse_bound) = match dtype {
            DType::Bf16 => (5e-3, 2e-5),
            DType::F16 => (8e-4, 2e-5),
            _ => (3e-6, 2e-6),
        };
        for (b, Bits(bytes)) in got.iter().enumerate() {
            let (want, want_lse) = oracle(&family, dtype, &rows, b, change);
            let (o, lse) = bytes.split_at(want.len() * dtype.size());
            let what = format!("{what}, {dtype}, batch {b}");
            judge(&what, floats(dtype, o).into_iter().map(f64::from), &want, o_bound);
            judge(
                &format!("lse, {what}"),
                floats(DType::F32, lse).into_iter().map(f64::from),
                &want_lse,
                lse_bound,
            );
        }
    }
}

const L: usize = 9;
/// A block of whole tiles, in which kernels know a key's neighbours.
const WHOLE: usize = 64;

fn distance(query: usize, key: usize) -> i64 {
    key as i64 - (query as i64 + OFFSET)
}

#[test]
fn a_users_score_mod_is_a_snippet() {
    // A bias of a head and of where the key is, from numbers of the caller's; then a cap of its own; one key is dropped.
    let bias: Vec<f32> = (0..2 * 7).map(|i| i as f32 / 10.0 - 0.7).collect();
    let dropped = 5;
    let user = UserMod {
        name: Cow::Borrowed("bias"),
        cpu: None,
        cuda: Some(CudaSnippet {
            source: "if (k_idx % 11 == ints[0]) return -infinity();\n\
                     float s = score + floats[head * 7 + u32(k_idx) % 7] * (q_idx % 2 == 0 ? 1.0f : 0.5f);\n\
                     return s > 1.0f ? 1.0f : s;"
                .into(),
            floats: bias.clone(),
            ints: vec![dropped],
        }),
    };
    for block in [BLOCK, WHOLE] {
        hold("a user's score mod", block, &[ScoreMod::User(&user)], &[], &|score, _, head, query, key, _| {
            if key % 11 == dropped as usize {
                return None;
            }
            let factor = if query % 2 == 0 { 1.0 } else { 0.5 };
            Some((score + f64::from(bias[head * 7 + key % 7]) * factor).min(1.0))
        });
    }
}

#[test]
fn a_users_mask_is_a_snippet() {
    let user = UserMask {
        name: Cow::Borrowed("stripes"),
        cpu: None,
        cuda: Some(CudaSnippet {
            source: "return (k_idx + q_idx + i32(batch) + ints[head]) % 3 != 0;".into(),
            floats: Vec::new(),
            ints: vec![4, 5],
        }),
    };
    let mask = |batch: usize, head: usize, query: usize, key: usize| {
        !(key + query + batch + 4 + head).is_multiple_of(3)
    };
    hold("a user's mask", BLOCK, &[], &[MaskMod::User(&user)], &|score, batch, head, query, key, partial| {
        (!partial || mask(batch, head, query, key)).then_some(score)
    });
    // Behind others: all must allow a key.
    let (q_ids, kv_ids): (Vec<i32>, Vec<i32>) = (
        (0..L as i32).map(|query| query / 4).collect(),
        (0..(STORED * BLOCK) as i32).map(|key| key / 50 % 3).collect(),
    );
    let both = [MaskMod::Document { q_ids: &q_ids, kv_ids: &kv_ids }, MaskMod::User(&user)];
    hold("documents and a user's mask", BLOCK, &[], &both, &|score, batch, head, query, key, partial| {
        let seen = mask(batch, head, query, key) && q_ids[query] == kv_ids[key];
        (!partial || seen).then_some(score)
    });
}

#[test]
fn slopes_caps_and_biases_are_the_oracles_in_any_order() {
    const WINDOW: i64 = 40;
    let slopes = [0.004, 0.002];
    let table: Vec<f32> = (0..2 * (2 * WINDOW + 1)).map(|i| noise(&[91, i as u64])).collect();
    let alibi = ScoreMod::Alibi { slopes: &slopes };
    let bias = ScoreMod::RelBias { table: &table, window: WINDOW as usize };
    let sloped = |head: usize, query, key| f64::from(slopes[head]) * distance(query, key) as f64;
    let biased = |head: usize, query, key| {
        let at = distance(query, key).clamp(-WINDOW, WINDOW) + WINDOW;
        f64::from(table[head * (2 * WINDOW as usize + 1) + at as usize])
    };
    let capped = |score: f64| f64::from(0.9f32) * (score / f64::from(0.9f32)).tanh();
    for block in [BLOCK, WHOLE] {
        let mods = [alibi, ScoreMod::SoftCap(0.9), bias];
        hold("slopes, a cap and a bias", block, &mods, &[], &|s, _, head, query, key, _| {
            Some(capped(s + sloped(head, query, key)) + biased(head, query, key))
        });
        let mods = [bias, ScoreMod::Causal, alibi];
        hold("a bias, causal and slopes", block, &mods, &[], &|s, _, head, query, key, _| {
            let score = s + biased(head, query, key) + sloped(head, query, key);
            (distance(query, key) <= 0).then_some(score)
        });
    }
}

#[test]
fn causal_masks_and_windows_are_the_oracles() {
    hold("causal", BLOCK, &[], &[MaskMod::Causal], &|score, _, _, query, key, partial| {
        (!partial || distance(query, key) <= 0).then_some(score)
    });
    let window = [MaskMod::SlidingWindow { left: 900, right: 1 }];
    hold("a window", BLOCK, &[], &window, &|score, _, _, query, key, partial| {
        (!partial || (-900..=1).contains(&distance(query, key))).then_some(score)
    });
    // In every block, and with a cap before.
    let scores = [ScoreMod::SoftCap(0.9), ScoreMod::Causal];
    for block in [BLOCK, WHOLE] {
        hold("a cap, then causal", block, &scores, &[], &|score, _, _, query, key, _| {
            (distance(query, key) <= 0).then(|| 0.9f32 as f64 * (score / 0.9f32 as f64).tanh())
        });
    }
}

#[test]
fn a_mod_without_a_snippet_is_refused_by_name_and_one_that_does_not_compile_shows_the_log() {
    let Some(owned) = stream("a_mod_without_a_snippet") else { return };
    let stream = owned.stream();
    let rows = [row(0, L, 2)];
    let refused = |user: &UserMod| {
        let family = InBlocks { scores: &[ScoreMod::User(user)], ..InBlocks::narrow() };
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            family.run(&stream, &Setting::of(DType::Bf16), &rows);
        }));
        *caught.unwrap_err().downcast::<String>().expect("an unwrapped error's words")
    };
    let none = refused(&UserMod::new("halved", |scores, _| scores.iter_mut().for_each(|s| *s *= 0.5)));
    assert!(none.contains("halved") && none.contains("no CUDA half"), "{none}");
    let snippet = CudaSnippet { source: "return scores;".into(), ..CudaSnippet::default() };
    let wrong = refused(&UserMod { name: "wrong".into(), cpu: None, cuda: Some(snippet) });
    assert!(wrong.contains("scores"), "{wrong}");
}
