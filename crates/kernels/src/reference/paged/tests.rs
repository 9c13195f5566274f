//! The oracle itself against hand-computed answers: with `K = 0` a query's output is the mean of what it sees.

use super::*;

/// One row, `H = G = 1`, `D = 1`, keys 0 and values `0, 1, 2, ...` in pages laid out backwards, then one page of NaN.
struct Counted {
    q_len: usize,
    kv_len: usize,
    page_size: usize,
}

impl Counted {
    fn run(&self, change: impl FnOnce(&mut Paged<'_, f32, f32>)) -> Result<Attended> {
        let s = self.page_size;
        let pages = self.kv_len.div_ceil(s);
        let mut k = vec![f32::NAN; (pages + 1) * s];
        let mut v = k.clone();
        let kv_indices: Vec<i32> = (0..pages as i32).rev().collect();
        for j in 0..self.kv_len {
            let at = kv_indices[j / s] as usize * s + j % s;
            (k[at], v[at]) = (0.0, j as f32);
        }
        let last = if pages == 0 { 0 } else { self.kv_len - (pages - 1) * s };
        let mut p = Paged {
            q: &vec![1.0; self.q_len],
            cache: Cache::Split { k: &k, v: &v },
            qo_indptr: &[0, self.q_len as i32],
            kv_indptr: &[0, pages as i32],
            kv_indices: &kv_indices,
            kv_last_page_len: &[last as i32],
            num_qo_heads: 1,
            num_kv_heads: 1,
            head_dim_qk: 1,
            head_dim_vo: 1,
            page_size: s,
            sm_scale: 1.0,
            causal: true,
            options: Options::default(),
        };
        change(&mut p);
        paged(&p)
    }
}

#[track_caller]
fn near(got: &[f64], want: &[f64]) {
    let close = |(g, w): (&f64, &f64)| g == w || (g - w).abs() < 1e-12;
    assert!(got.len() == want.len() && got.iter().zip(want).all(close), "{got:?} is not {want:?}");
}

#[test]
fn f01_a_fully_masked_query_is_zero_and_minus_infinity() {
    let out = Counted { q_len: 5, kv_len: 2, page_size: 2 }.run(|_| ()).unwrap();
    let none = f64::NEG_INFINITY;
    near(&out.o, &[0.0, 0.0, 0.0, 0.0, 0.5]);
    near(&out.lse, &[none, none, none, 0.0, 2f64.ln()]);
}

#[test]
fn f02_very_negative_scores_are_still_scores() {
    let run = |keys: i32, kv: &[f32], sm_scale: f64| {
        paged(&Paged {
            q: &[1024f32, 1.0],
            cache: Cache::Split { k: kv, v: &[1.0, 0.0, 7.0] },
            qo_indptr: &[0, 1],
            kv_indptr: &[0, 1],
            kv_indices: &[0],
            kv_last_page_len: &[keys],
            num_qo_heads: 1,
            num_kv_heads: 1,
            head_dim_qk: 2,
            head_dim_vo: 1,
            page_size: 3,
            sm_scale,
            causal: false,
            options: Options::default(),
        })
        .unwrap()
    };
    // The third key is past the end and would win by far.
    let kv = [-512.0, 0.0, -512.0, -1.0, 512.0, 0.0];
    let two = run(2, &kv, 1.0);
    assert!((two.o[0] - 0.731058578).abs() < 1e-8 && (two.lse[0] + 524287.686738).abs() < 1e-6);
    let one = run(1, &kv, 1.0);
    assert_eq!((one.o[0], one.lse[0]), (1.0, -524288.0));
    assert!(run(2, &kv, 128f64.powf(-0.5)).o[0] > 0.5);
}

#[test]
fn f03_slots_nobody_owns_are_never_read() {
    for kv_len in [1, 15, 17] {
        let out = Counted { q_len: 1, kv_len, page_size: 16 }.run(|_| ()).unwrap();
        near(&out.o, &[(kv_len - 1) as f64 / 2.0]);
    }
}

#[test]
fn f06_causal_is_aligned_to_the_newest_key() {
    let out = Counted { q_len: 2, kv_len: 5, page_size: 2 }.run(|_| ()).unwrap();
    near(&out.o, &[1.5, 2.0]);
    near(&out.lse, &[4f64.ln(), 5f64.ln()]);
    near(&Counted { q_len: 3, kv_len: 3, page_size: 1 }.run(|_| ()).unwrap().o, &[0.0, 0.5, 1.0]);
}

#[test]
fn f07_a_window_counts_tokens_to_the_left() {
    let square = Counted { q_len: 10, kv_len: 10, page_size: 4 };
    let out = square.run(|p| p.options.window_left = 3).unwrap();
    assert!((out.o[9] - 7.5).abs() < 1e-12 && (out.lse[9] - 4f64.ln()).abs() < 1e-12);
    assert!((out.o[2] - 1.0).abs() < 1e-12 && (out.lse[2] - 3f64.ln()).abs() < 1e-12);
    near(
        &square.run(|p| p.options.window_left = 0).unwrap().o,
        &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0],
    );
    let whole = square.run(|_| ()).unwrap();
    for window_left in [9, 10, 1_000_000, i64::MAX] {
        assert_eq!(square.run(|p| p.options.window_left = window_left).unwrap(), whole);
    }
    let prefix = Counted { q_len: 2, kv_len: 10, page_size: 4 };
    near(&prefix.run(|p| p.options.window_left = 3).unwrap().o, &[6.5, 7.5]);
    let open = Counted { q_len: 1, kv_len: 4, page_size: 4 };
    near(&open.run(|p| (p.causal, p.options.window_left) = (false, 1)).unwrap().o, &[2.5]);
}

#[test]
fn f08_the_cap_comes_before_the_mask() {
    let out = Counted { q_len: 2, kv_len: 2, page_size: 2 }.run(|p| p.options.logits_soft_cap = 1.0).unwrap();
    assert_eq!(out.o[0], 0.0);
    let capped = paged(&Paged {
        q: &[1f32],
        cache: Cache::Split { k: &[10f32, 0.0], v: &[1.0, 0.0] },
        qo_indptr: &[0, 1],
        kv_indptr: &[0, 1],
        kv_indices: &[0],
        kv_last_page_len: &[2],
        num_qo_heads: 1,
        num_kv_heads: 1,
        head_dim_qk: 1,
        head_dim_vo: 1,
        page_size: 2,
        sm_scale: 1.0,
        causal: true,
        options: Options { logits_soft_cap: 2.0, ..Options::default() },
    })
    .unwrap();
    assert!((capped.o[0] - 0.880778).abs() < 1e-6 && (capped.lse[0] - 2.126768).abs() < 1e-6);
}

#[test]
fn f11_page_tables_out_of_range_are_refused() {
    let row = Counted { q_len: 1, kv_len: 8, page_size: 4 };
    for (last, tokens) in [(1, 5.0), (4, 8.0)] {
        let out = row.run(|p| p.kv_last_page_len = if last == 1 { &[1] } else { &[4] }).unwrap();
        near(&out.lse, &[f64::ln(tokens)]);
    }
    for last in [&[0], &[5], &[-1], &[i32::MAX]] {
        let said = row.run(|p| p.kv_last_page_len = last).unwrap_err().to_string();
        assert!(said.starts_with("kv_last_page_len[0] = "), "{said}");
    }
    let empty = Counted { q_len: 1, kv_len: 0, page_size: 4 };
    near(&empty.run(|_| ()).unwrap().o, &[0.0]);
    assert!(empty.run(|p| p.kv_last_page_len = &[1]).is_err());
    for kv_indptr in [&[2, 0][..], &[1, 2], &[0, 3], &[0], &[]] {
        assert!(row.run(|p| p.kv_indptr = kv_indptr).is_err(), "{kv_indptr:?}");
    }
    assert!(row.run(|p| p.qo_indptr = &[0, 2]).is_err());
    assert!(row.run(|p| p.kv_indices = &[0, 3]).is_err());
    assert!(row.run(|p| p.kv_indices = &[0, -1]).is_err());
}

#[test]
fn f15_heads_that_do_not_divide_are_refused() {
    let row = Counted { q_len: 6, kv_len: 2, page_size: 2 };
    let wrong = |h: usize, g: usize| row.run(|p| (p.num_qo_heads, p.num_kv_heads) = (h, g)).is_err();
    assert!(wrong(3, 2) && wrong(1, 0) && wrong(0, 1));
}

#[test]
fn a_mask_narrows_what_causal_leaves() {
    const MASK: &[bool] = &[true, false, true, true, false, true, false, true];
    let row = Counted { q_len: 2, kv_len: 4, page_size: 2 };
    near(&row.run(|p| p.options.masks = &[Some(MASK)]).unwrap().o, &[1.0, 2.0]);
    let open = row.run(|p| (p.causal, p.options.masks) = (false, &[Some(MASK)])).unwrap();
    near(&open.o, &[5.0 / 3.0, 2.0]);
    near(&row.run(|p| p.options.masks = &[None]).unwrap().o, &[1.0, 1.5]);
    let none = row.run(|p| p.options.masks = &[Some(&[false; 8])]).unwrap();
    assert_eq!(none.lse, [f64::NEG_INFINITY; 2]);
    assert!(row.run(|p| p.options.masks = &[Some(&[true; 7])]).is_err());
}

#[test]
fn alibi_falls_with_distance() {
    let out =
        Counted { q_len: 1, kv_len: 2, page_size: 2 }.run(|p| p.options.alibi_slopes = Some(&[0.5])).unwrap();
    near(&out.lse, &[(1.0 + (-0.5f64).exp()).ln()]);
}

#[test]
fn retention_drops_the_tokens_before_the_first_kept_one() {
    let row = Counted { q_len: 1, kv_len: 8, page_size: 4 };
    near(&row.run(|p| p.options.page_start = &[3]).unwrap().o, &[5.0]);
    // The same pages of a stream whose first page was given back: the same keys, at later positions.
    near(&row.run(|p| (p.options.kv_offset, p.options.page_start) = (&[4], &[3])).unwrap().o, &[5.0]);
    near(&row.run(|p| (p.options.kv_offset, p.options.window_left) = (&[4], 1)).unwrap().o, &[6.5]);
    assert!(row.run(|p| p.options.page_start = &[9]).is_err());
    assert!(row.run(|p| p.options.kv_offset = &[usize::MAX]).is_err());
}

#[test]
fn a_sink_is_in_the_lse_and_not_in_an_empty_query() {
    let out = Counted { q_len: 2, kv_len: 1, page_size: 1 }.run(|p| p.options.sinks = Some(&[0.0])).unwrap();
    near(&out.lse, &[f64::NEG_INFINITY, 2f64.ln()]);
}
