//! e4m3 keys and values: the bits of an f32 cache of what they stand for, the oracle's numbers, and whose scale is whose.

use half::{bf16, f16};

use crate::cpu::Isa;
use crate::paged::{
    AttendParams, Geometry, PageTable, ScheduleOptions, Variant, attend, schedule, workspace_bytes,
};
use crate::reference;
use crate::testing::{Number, noise};
use crate::work::WorkList;
use crate::{DType, Element, Error, Result, Stream, TensorMut, TensorRef, fp8};

/// Rows over one pool, whose pages are dealt out in a jumble. Slots that no row holds are NaN under scales of NaN.
#[derive(Clone)]
struct Batch<Q> {
    geometry: Geometry,
    variant: Variant,
    rows: Vec<(usize, usize)>,
    pages: usize,
    qo_indptr: Vec<i32>,
    kv_indptr: Vec<i32>,
    kv_indices: Vec<i32>,
    last: Vec<i32>,
    q: Vec<Q>,
    codes: [Vec<u8>; 2],
    scales: [Vec<f32>; 2],
}

/// `G`, `H / G`, `D`, `Dv`, `S`.
type Shape = (usize, usize, usize, usize, usize);

impl<Q: Number> Batch<Q> {
    /// `(q_len, kv_len)` a row. Rows of keys and values differ in magnitude by up to a thousand times, so that a scale that is
    /// another's shows.
    fn new((g, group, d, dv, s): Shape, rows: &[(usize, usize)], variant: Variant) -> Batch<Q> {
        let geometry = Geometry {
            num_qo_heads: g * group,
            num_kv_heads: g,
            head_dim_qk: d,
            head_dim_vo: dv,
            page_size: s,
            q_dtype: Q::DTYPE,
            kv_dtype: DType::E4m3,
        };
        let pages = rows.iter().map(|(_, kv)| kv.div_ceil(s)).sum::<usize>() + 2;
        let mut ids: Vec<i32> = (0..pages as i32).collect();
        ids.sort_by_key(|&id| noise(&[id as u64, 5]).to_bits());
        let mut batch = Batch {
            geometry,
            variant,
            rows: rows.to_vec(),
            pages,
            qo_indptr: vec![0],
            kv_indptr: vec![0],
            kv_indices: Vec::new(),
            last: Vec::new(),
            q: Vec::new(),
            codes: [vec![0x7f; pages * s * g * d], vec![0xff; pages * s * g * dv]],
            scales: [vec![f32::NAN; pages * s * g], vec![f32::NAN; pages * s * g]],
        };
        for (row, &(q_len, kv_len)) in rows.iter().enumerate() {
            let count = kv_len.div_ceil(s);
            batch.kv_indices.extend(ids.drain(..count));
            batch.kv_indptr.push(batch.kv_indices.len() as i32);
            batch.qo_indptr.push(batch.qo_indptr[row] + q_len as i32);
            batch.last.push(if kv_len == 0 { 0 } else { (kv_len - (count - 1) * s) as i32 });
            let q = |i: usize| Q::of(1.5 * noise(&[row as u64, i as u64, 3]));
            batch.q.extend((0..q_len * g * group * d).map(q));
            batch.store(row, 0, 1.0);
        }
        batch
    }

    /// The slots of a row's keys.
    fn slots(&self, row: usize) -> Vec<i64> {
        let s = self.geometry.page_size;
        let table = &self.kv_indices[self.kv_indptr[row] as usize..self.kv_indptr[row + 1] as usize];
        (0..self.rows[row].1).map(|at| i64::from(table[at / s]) * s as i64 + (at % s) as i64).collect()
    }

    /// Stores a row's keys and values, of generation `salt`, times `by`, by the scatter that quantises.
    fn store(&mut self, row: usize, salt: u64, by: f32) {
        let Geometry { num_kv_heads: g, head_dim_qk, head_dim_vo, page_size: s, .. } = self.geometry;
        let (slots, pages) = (self.slots(row), self.pages);
        for (side, d) in [head_dim_qk, head_dim_vo].into_iter().enumerate() {
            let entries: Vec<f32> = (0..slots.len() * g * d)
                .map(|i| {
                    let of = (i / d) as u64;
                    let size = 10f32.powf(1.5 * noise(&[row as u64, of, side as u64, salt, 8]));
                    by * size * noise(&[row as u64, i as u64, side as u64, salt])
                })
                .collect();
            fp8::store_heads(
                &Stream::cpu(),
                TensorRef::from_slice(&slots, &[slots.len()]).unwrap(),
                TensorRef::from_slice(&entries, &[slots.len(), g, d]).unwrap(),
                TensorMut::from_slice(&mut self.codes[side], &[pages, s, g, d]).unwrap().as_codes().unwrap(),
                TensorMut::from_slice(&mut self.scales[side], &[pages, s, g]).unwrap(),
            )
            .unwrap();
        }
    }

    fn work(&self, geometry: &Geometry, workers: usize) -> WorkList {
        let table = PageTable {
            qo_indptr: &self.qo_indptr,
            kv_indptr: &self.kv_indptr,
            kv_indices: &self.kv_indices,
            kv_last_page_len: &self.last,
            num_pages: self.pages,
            ..PageTable::default()
        };
        let mut work = WorkList::default();
        let options = ScheduleOptions { workers, ..ScheduleOptions::default() };
        schedule(geometry, &self.variant, &table, &options, &mut work).unwrap();
        work
    }

    fn call<K: Element>(
        &self,
        geometry: Geometry,
        pools: [&[K]; 2],
        scales: Option<[TensorRef<'_>; 2]>,
        workers: usize,
    ) -> Result<(Vec<Q>, Vec<f32>)> {
        let Geometry {
            num_qo_heads: h, num_kv_heads: g, head_dim_qk: d, head_dim_vo: dv, page_size: s, ..
        } = geometry;
        let work = self.work(&geometry, workers);
        let t = work.num_tokens();
        let (mut o, mut lse) = (vec![Q::of(7.0); t * h * dv], vec![7f32; t * h]);
        let mut workspace = vec![0xffu8; workspace_bytes(&work, workers)];
        let bytes = workspace.len();
        let slopes: Vec<f32> = (0..h).map(|head| 0.03 * head as f32).collect();
        let view = |pool: &'_ [K], d: usize| -> Result<TensorRef<'_>> {
            let view = TensorRef::from_slice(pool, &[self.pages, s, g, d])?;
            // SAFETY: of the same memory, for as long.
            Ok(unsafe {
                TensorRef::from_raw_parts(
                    view.as_ptr(),
                    view.device(),
                    geometry.kv_dtype,
                    view.shape(),
                    view.strides(),
                )?
            })
        };
        let params = AttendParams {
            work: &work,
            q: TensorRef::from_slice(&self.q, &[t, h, d])?,
            k: view(pools[0], d)?,
            v: view(pools[1], dv)?,
            kv_scales: scales,
            sinks: None,
            alibi_slopes: self.variant.alibi.then(|| TensorRef::from_slice(&slopes, &[h]).unwrap()),
            o: TensorMut::from_slice(&mut o, &[t, h, dv])?,
            lse: Some(TensorMut::from_slice(&mut lse, &[t, h])?),
            workspace: TensorMut::from_slice(&mut workspace, &[bytes])?,
            workers,
        };
        let done = attend(&Stream::cpu(), params);
        if done.is_err() {
            assert!(o.iter().all(|x| *x == Q::of(7.0)) && lse.iter().all(|&x| x == 7.0), "written");
        }
        done.map(|()| (o, lse))
    }

    /// The scales as tensors.
    fn beside(&self) -> [TensorRef<'_>; 2] {
        let shape = [self.pages, self.geometry.page_size, self.geometry.num_kv_heads];
        [0, 1].map(|side| TensorRef::from_slice(&self.scales[side], &shape).unwrap())
    }

    fn run_with(&self, workers: usize) -> (Vec<Q>, Vec<f32>) {
        let codes = [&self.codes[0][..], &self.codes[1][..]];
        self.call(self.geometry, codes, Some(self.beside()), workers).unwrap()
    }

    fn run(&self) -> (Vec<Q>, Vec<f32>) {
        self.run_with(2)
    }

    /// The same over an f32 cache of what the codes stand for.
    fn over_numbers(&self) -> (Vec<Q>, Vec<f32>) {
        let widths = [self.geometry.head_dim_qk, self.geometry.head_dim_vo];
        let pool = |side: usize| -> Vec<f32> {
            let rows = self.codes[side].chunks(widths[side]).zip(&self.scales[side]);
            rows.flat_map(|(row, &scale)| row.iter().map(move |&x| fp8::e4m3_to_f32(x) * scale)).collect()
        };
        let (k, v) = (pool(0), pool(1));
        let geometry = Geometry { kv_dtype: DType::F32, ..self.geometry };
        self.call(geometry, [&k, &v], None, 2).unwrap()
    }

    /// Holds a run against the oracle over the numbers in f64, and against the f32 cache to the bit.
    fn check(&self) {
        let got = self.run();
        let bound = match Q::DTYPE {
            DType::F32 => 2e-6,
            DType::F16 => 6e-4,
            _ => 3.2e-3,
        };
        self.judge(&got, bound);
        same(&got, &self.over_numbers(), "an f32 cache");
    }

    /// Holds results against the oracle: a relative error in the root mean square.
    fn judge(&self, (o, lse): &(Vec<Q>, Vec<f32>), bound: f64) {
        let g = &self.geometry;
        let (k, v) = (
            reference::fp8::heads(&self.codes[0], &self.scales[0], g.head_dim_qk),
            reference::fp8::heads(&self.codes[1], &self.scales[1], g.head_dim_vo),
        );
        let slopes: Vec<f32> = (0..g.num_qo_heads).map(|head| 0.03 * head as f32).collect();
        let want = reference::paged(&reference::paged::Paged {
            q: &self.q,
            cache: reference::paged::Cache::Split { k: &k, v: &v },
            qo_indptr: &self.qo_indptr,
            kv_indptr: &self.kv_indptr,
            kv_indices: &self.kv_indices,
            kv_last_page_len: &self.last,
            num_qo_heads: g.num_qo_heads,
            num_kv_heads: g.num_kv_heads,
            head_dim_qk: g.head_dim_qk,
            head_dim_vo: g.head_dim_vo,
            page_size: g.page_size,
            sm_scale: self.variant.sm_scale.into(),
            causal: self.variant.causal,
            options: reference::paged::Options {
                window_left: self.variant.window_left.map_or(-1, |left| left as i64),
                logits_soft_cap: self.variant.logits_soft_cap.unwrap_or(0.0).into(),
                alibi_slopes: self.variant.alibi.then_some(&slopes[..]),
                ..Default::default()
            },
        })
        .unwrap();
        let far = |got: &mut dyn Iterator<Item = f64>, want: &[f64]| {
            let (mut error, mut norm) = (0.0, 0.0);
            for (index, (got, &want)) in got.zip(want).enumerate() {
                assert!(!got.is_nan(), "NaN at {index} of {:?}", self.geometry);
                if want.is_finite() {
                    (error, norm) = (error + (got - want) * (got - want), norm + want * want);
                } else {
                    assert_eq!(got, want);
                }
            }
            if norm == 0.0 { error } else { (error / norm).sqrt() }
        };
        let error = far(&mut o.iter().map(|x| x.to_f64()), &want.o);
        assert!(error <= bound, "o: {error:.3e} of {:?} {:?}", self.geometry, self.rows);
        let error = far(&mut lse.iter().map(|&x| x.into()), &want.lse);
        assert!(error <= 2e-6, "lse: {error:.3e} of {:?} {:?}", self.geometry, self.rows);
    }
}

fn same<Q: Number>(a: &(Vec<Q>, Vec<f32>), b: &(Vec<Q>, Vec<f32>), what: &str) {
    let bits = |x: &(Vec<Q>, Vec<f32>)| -> (Vec<u8>, Vec<u32>) {
        (bytemuck::cast_slice(&x.0).to_vec(), x.1.iter().map(|x| x.to_bits()).collect())
    };
    assert!(bits(a) == bits(b), "bits differ from those of {what}");
}

fn on_every_isa(mut test: impl FnMut()) {
    for &isa in Isa::supported() {
        let _forced = Isa::force(isa).unwrap();
        test();
    }
}

/// Needs the helpers of the device's own tests.
#[cfg(all(feature = "cuda", feature = "dense", feature = "flex", feature = "dsa"))]
pub(crate) mod device;

const DECODE: [(usize, usize); 9] =
    [(1, 1), (1, 63), (1, 64), (1, 65), (0, 5), (1, 0), (2, 130), (1, 700), (3, 2)];
const PREFILL: [(usize, usize); 6] = [(37, 37), (70, 300), (17, 5), (128, 128), (33, 129), (1, 9)];

#[test]
fn decode_rows_have_the_bits_of_an_f32_cache_and_the_oracles_numbers() {
    on_every_isa(|| {
        let plain = Variant::causal(64);
        Batch::<f32>::new((2, 4, 64, 64, 16), &DECODE, plain).check();
        Batch::<bf16>::new((2, 4, 64, 64, 16), &DECODE, plain).check();
        Batch::<f16>::new((1, 7, 48, 80, 4), &DECODE, Variant::causal(48)).check();
        Batch::<bf16>::new((8, 1, 128, 128, 1), &DECODE, Variant::causal(128)).check();
        Batch::<f32>::new((3, 2, 33, 21, 5), &DECODE, Variant::full(33)).check();
    });
}

#[test]
fn tiles_have_the_bits_of_an_f32_cache_and_the_oracles_numbers() {
    on_every_isa(|| {
        Batch::<f32>::new((2, 3, 64, 64, 16), &PREFILL, Variant::causal(64)).check();
        Batch::<bf16>::new((2, 3, 64, 96, 16), &PREFILL, Variant::full(64)).check();
        Batch::<f16>::new((1, 2, 33, 21, 7), &PREFILL, Variant::causal(33)).check();
    });
}

#[test]
fn windows_caps_and_slopes_reach_codes_too() {
    let variant =
        Variant { window_left: Some(40), logits_soft_cap: Some(3.0), alibi: true, ..Variant::causal(32) };
    on_every_isa(|| {
        Batch::<f32>::new((2, 2, 32, 32, 8), &DECODE, variant).check();
        Batch::<bf16>::new((2, 2, 32, 32, 8), &PREFILL, variant).check();
    });
}

#[test]
fn long_rows_over_several_leaves_and_any_number_of_workers_agree() {
    let batch = Batch::<bf16>::new((2, 4, 64, 64, 16), &[(1, 3000), (40, 5000)], Variant::causal(64));
    batch.check();
    let one = batch.run_with(1);
    for workers in [2, 5, 16] {
        same(&one, &batch.run_with(workers), "one worker");
    }
}

/// One row a head of whose keys or values changes: what changes with it is what that head's queries see of it.
#[test]
fn f_fp8_a_scale_is_its_own_tokens_and_heads_alone() {
    on_every_isa(|| {
        for rows in [&[(1, 90), (1, 33)][..], &[(60, 90), (20, 33)][..]] {
            let (g, group, d) = (3, 2, 32);
            // Flat weights, so that each key counts.
            let flat = Variant { sm_scale: 0.01, ..Variant::causal(d) };
            let batch = Batch::<f32>::new((g, group, d, d, 8), rows, flat);
            let (before, _) = batch.run();
            for (side, position, head) in [(0, 0, 1), (1, 0, 1), (0, 41, 0), (1, 41, 2)] {
                let mut changed = batch.clone();
                changed.scales[side][batch.slots(0)[position] as usize * g + head] *= 3.0;
                let (after, _) = changed.run();
                same(&(after.clone(), Vec::new()), &(changed.over_numbers().0, Vec::new()), "an f32 cache");
                let tokens = rows.iter().map(|row| row.0).sum::<usize>();
                for token in 0..tokens {
                    let first = rows[0].1 - rows[0].0;
                    for h in 0..g * group {
                        let at = (token * g * group + h) * d..(token * g * group + h + 1) * d;
                        let sees = token < rows[0].0 && first + token >= position && h / group == head;
                        let moved = after[at.clone()] != before[at];
                        // A first token has a softmax of one weight, whatever its key's scale.
                        let alone = side == 0 && first + token == 0;
                        assert!(moved == (sees && !alone), "side {side} token {token} head {h}");
                    }
                }
            }
        }
    });
}

#[test]
fn f_fp8_scales_that_double_double_what_they_scale() {
    on_every_isa(|| {
        for rows in [&DECODE[..], &PREFILL[..]] {
            let batch = Batch::<f32>::new((2, 2, 32, 32, 8), rows, Variant::causal(32));
            let mut double = batch.clone();
            double.scales[1].iter_mut().for_each(|scale| *scale *= 2.0);
            let (once, twice) = (batch.run(), double.run());
            assert!(
                once.0.iter().zip(&twice.0).all(|(a, b)| 2.0 * a == *b),
                "of values: powers of two are exact"
            );
            let mut keys = batch.clone();
            keys.scales[0].iter_mut().for_each(|scale| *scale *= 2.0);
            keys.variant.sm_scale /= 2.0;
            same(&once, &keys.run(), "twice the keys under half the scale");
        }
    });
}

/// `0x7f` and `0xff` are NaN under any scale, zero among them; what no query sees is never read.
#[test]
fn f_fp8_both_nan_encodings_are_nan_where_they_are_seen_and_nowhere_else() {
    on_every_isa(|| {
        for rows in [&[(1, 70), (1, 40)][..], &[(30, 70), (20, 40)][..]] {
            let (g, d) = (2, 32);
            let batch = Batch::<f32>::new((g, 2, d, d, 8), rows, Variant::causal(d));
            let before = batch.run();
            assert!(before.0.iter().all(|x| x.is_finite()));
            for (side, code, scale) in [(0, 0x7f, 1.0), (0, 0xff, 0.5), (1, 0x7f, 0.0), (1, 0xff, 2.0)] {
                let mut bad = batch.clone();
                let slot = batch.slots(1)[0] as usize * g + 1;
                bad.codes[side][slot * d + 9] = code;
                bad.scales[side][slot] = scale;
                let (o, _) = bad.run();
                let queries = rows[0].0;
                for (at, (x, before)) in o.iter().zip(&before.0).enumerate() {
                    let (token, head, lane) = (at / (g * 2 * d), at / d % (g * 2), at % d);
                    let hit = token >= queries && head / 2 == 1 && (side == 0 || lane == 9);
                    assert!(
                        if hit { x.is_nan() } else { side == 1 || !x.is_nan() },
                        "{side} {code:x} at {at}"
                    );
                    if token < queries || head / 2 == 0 {
                        assert_eq!(x.to_bits(), before.to_bits());
                    }
                }
            }
        }
    });
}

#[test]
fn f_fp8_a_page_that_is_used_again_has_nothing_of_its_former_scales() {
    on_every_isa(|| {
        let fresh = Batch::<bf16>::new((2, 2, 64, 64, 8), &[(1, 50), (9, 40)], Variant::causal(64));
        let mut reused = fresh.clone();
        for row in 0..2 {
            reused.store(row, 77, 1e20);
            reused.store(row, 0, 1.0);
        }
        same(&fresh.run(), &reused.run(), "a fresh pool");
        assert_eq!(fresh.codes, reused.codes);
    });
}

/// Rows of zeros, of denormals and of huge numbers, and rows with one outlier.
#[test]
fn hostile_magnitudes_are_those_of_the_numbers_stored() {
    on_every_isa(|| {
        for by in [0.0, 1e-44, 1e-30, 1e15] {
            for rows in [&DECODE[..], &PREFILL[..]] {
                let mut batch = Batch::<f32>::new((2, 2, 32, 32, 8), rows, Variant::causal(32));
                (0..rows.len()).for_each(|row| batch.store(row, 3, by));
                // Scores of huge keys are huge: what is compared is then which key wins.
                batch.variant.sm_scale = if by > 1.0 { 1.0 / by } else { 1.0 };
                let (o, lse) = batch.run();
                same(&(o, lse), &batch.over_numbers(), "an f32 cache");
            }
        }
        let mut outlier = Batch::<f32>::new((1, 2, 32, 32, 8), &[(1, 100), (40, 60)], Variant::causal(32));
        let (key, value) = (outlier.slots(0)[7] as usize, outlier.slots(1)[5] as usize);
        outlier.codes[0][key * 32 + 3] = 0x7e;
        outlier.scales[1][value] = 1e6;
        outlier.check();
    });
}

#[test]
fn scales_may_lie_in_any_strides() {
    let batch = Batch::<f32>::new((2, 2, 32, 32, 8), &[(1, 60), (20, 30)], Variant::causal(32));
    let (p, s, g) = (batch.pages, 8, 2);
    // `[P, S, 2, G]`: both scales of a token side by side.
    let mut both = vec![f32::NAN; p * s * 2 * g];
    for at in 0..p * s * g {
        for side in 0..2 {
            both[(at / g * 2 + side) * g + at % g] = batch.scales[side][at];
        }
    }
    let view = TensorRef::from_slice(&both, &[p, s, 2, g]).unwrap();
    let scales = [view.select(2, 0).unwrap(), view.select(2, 1).unwrap()];
    let codes = [&batch.codes[0][..], &batch.codes[1][..]];
    same(&batch.run(), &batch.call(batch.geometry, codes, Some(scales), 2).unwrap(), "planes apart");
}

#[test]
fn scales_that_are_missing_superfluous_or_of_another_shape_are_refused() {
    let batch = Batch::<f32>::new((2, 2, 32, 32, 8), &[(1, 60)], Variant::causal(32));
    let codes = [&batch.codes[0][..], &batch.codes[1][..]];
    let said = batch.call(batch.geometry, codes, None, 1).unwrap_err().to_string();
    assert!(said.contains("kv_scales") && said.contains("fp8_e4m3"), "{said}");
    let [k, v] = batch.beside();
    let few = [k.narrow(0, 0, batch.pages - 1).unwrap(), v];
    let said = batch.call(batch.geometry, codes, Some(few), 1).unwrap_err();
    assert!(matches!(said, Error::Shape { tensor: "k_scales", .. }), "{said}");
    let plain = Geometry { kv_dtype: DType::F32, ..batch.geometry };
    let numbers = [vec![0f32; batch.codes[0].len()], vec![0f32; batch.codes[1].len()]];
    let said = batch.call(plain, [&numbers[0], &numbers[1]], Some([k, v]), 1).unwrap_err().to_string();
    assert!(said.contains("leave them out"), "{said}");
}
