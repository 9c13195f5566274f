//! Over e4m3 latents a pick has the bits of one over an f32 pool of what they stand for; on a device, the oracle's numbers.

use super::*;
use crate::fp8;

/// A batch over what codes stand for, and the codes. Slots that no request stores are NaN under NaN.
struct Codes<T> {
    batch: Batch<T>,
    /// What the codes stand for.
    numbers: Vec<f32>,
    bytes: Vec<u8>,
}

impl<T: Number> Codes<T> {
    fn of(batch: Batch<T>) -> Codes<T> {
        let Geometry { kv_lora_rank: c, qk_rope_head_dim: e, page_size: s, .. } = batch.geometry;
        let (bytes, slots) = (fp8::latent_bytes(c, e), batch.latent.len() / (c + e));
        let mut numbers: Vec<f32> = batch.latent.iter().map(|x| x.to_f64() as f32).collect();
        // Groups of lanes and tokens of a magnitude of their own.
        for (at, x) in numbers.iter_mut().enumerate() {
            let (slot, lane) = (at / (c + e), at % (c + e));
            if lane < c {
                *x *= 10f32.powf(noise(&[slot as u64, (lane / 128) as u64, 4]));
            }
        }
        let held: Vec<i64> =
            (0..slots).map(|slot| if numbers[slot * (c + e)].is_nan() { -1 } else { slot as i64 }).collect();
        let mut stored = vec![0xffu8; slots * bytes];
        let all = TensorRef::from_slice(&numbers, &[slots, c + e]).unwrap();
        fp8::store_latents(
            &Stream::cpu(),
            TensorRef::from_slice(&held, &[slots]).unwrap(),
            all.narrow(1, 0, c).unwrap(),
            all.narrow(1, c, e).unwrap(),
            TensorMut::from_slice(&mut stored, &[batch.num_pages, s, bytes]).unwrap(),
        )
        .unwrap();
        for (at, x) in numbers.iter_mut().enumerate() {
            *x = fp8::dequantise_latent(&stored[at / (c + e) * bytes..][..bytes], c, at % (c + e));
        }
        Codes { batch, numbers, bytes: stored }
    }

    fn geometry(&self) -> Geometry {
        Geometry { kv_dtype: DType::E4m3, ..self.batch.geometry }
    }

    fn pool(&self) -> [usize; 3] {
        let Geometry { kv_lora_rank: c, qk_rope_head_dim: e, page_size: s, .. } = self.batch.geometry;
        [self.batch.num_pages, s, fp8::latent_bytes(c, e)]
    }
}

#[test]
fn f_fp8_picks_over_codes_have_the_bits_of_an_f32_cache() {
    let (h, c, e, s) = (3, 132, 6, 8);
    let rows = [(0, picks(40, 90, 1)), (1, picks(7, 30, 2)), (-1, vec![]), (0, vec![])];
    on_every_isa(|| {
        let codes = Codes::of(Batch::<f32>::make((h, c, e, s), &[(3, 90), (0, 30)], &rows, 64, 5));
        let mut batch = codes.batch.clone();
        batch.latent.copy_from_slice(&codes.numbers);
        batch.check();
        let want = batch.run();
        let geometry = codes.geometry();
        let t = batch.row_request.len();
        let (mut o, mut lse) = (vec![7f32; t * h * c], vec![7f32; t * h]);
        let mut workspace = vec![0xffu8; sparse_workspace_bytes(&geometry, batch.topk, 2)];
        let available = workspace.len();
        let params = SparseParams {
            geometry,
            sm_scale: batch.sm_scale,
            q_nope: TensorRef::from_slice(&batch.q_nope, &[t, h, c]).unwrap(),
            q_pe: TensorRef::from_slice(&batch.q_pe, &[t, h, e]).unwrap(),
            latent: TensorRef::from_slice(&codes.bytes, &codes.pool()).unwrap(),
            selection: TensorRef::from_slice(&batch.selection, &[t, batch.topk]).unwrap(),
            row_request: &batch.row_request,
            kv_indptr: &batch.kv_indptr,
            kv_indices: &batch.kv_indices,
            page_start: &batch.page_start,
            kv_lens: &batch.kv_lens,
            o: TensorMut::from_slice(&mut o, &[t, h, c]).unwrap(),
            lse: Some(TensorMut::from_slice(&mut lse, &[t, h]).unwrap()),
            workspace: TensorMut::from_slice(&mut workspace, &[available]).unwrap(),
            workers: 2,
        };
        sparse_attend(&Stream::cpu(), params).unwrap();
        assert!(o.iter().zip(&want.o).all(|(a, b)| a.to_bits() == b.to_bits()));
        assert!(lse.iter().zip(&want.lse).all(|(a, b)| a.to_bits() == b.to_bits()));
    });
}

/// Needs the helpers of the device's own tests.
#[cfg(all(feature = "cuda", feature = "paged", feature = "dense", feature = "flex"))]
pub(crate) mod device {
    use super::*;
    use crate::cuda::trials::memory::{put, take_all};
    use crate::cuda::trials::{DEVICE, stream, whole};
    use crate::dsa::{DeviceTable, Table, prepare_sparse, sparse_attend_at, sparse_workspace_bytes_on};

    impl<T: Number> Codes<T> {
        fn on_device(&self, stream: &Stream) -> Got<T> {
            let batch = &self.batch;
            let geometry = self.geometry();
            let Geometry { num_qo_heads: h, kv_lora_rank: c, qk_rope_head_dim: e, .. } = geometry;
            prepare_sparse(stream, &geometry, crate::Kernels::Auto).unwrap();
            let (t, k, size) = (batch.row_request.len(), batch.topk, T::DTYPE.size());
            let positions = vec![0; t];
            let table = Table {
                row_request: &batch.row_request,
                positions: &positions,
                kv_indptr: &batch.kv_indptr,
                kv_indices: &batch.kv_indices,
                page_start: &batch.page_start,
                kv_lens: &batch.kv_lens,
            };
            let mut on = DeviceTable::with_capacity(stream, 0, 0, 0, 0).unwrap();
            on.set(stream, &table).unwrap();
            let upload = |numbers: &[T]| put(stream, bytemuck::cast_slice(numbers));
            let (q_nope, q_pe) = (upload(&batch.q_nope), upload(&batch.q_pe));
            let (latent, picked) =
                (put(stream, &self.bytes), put(stream, bytemuck::cast_slice(&batch.selection)));
            let start = vec![7u8; t * h * c * size];
            let (mut o, mut lse) = (put(stream, &start), put(stream, &vec![7u8; t * h * 4]));
            let bytes = sparse_workspace_bytes_on(DEVICE, &geometry, t, k, 1);
            let mut workspace = put(stream, &vec![0xff; bytes]);
            let params = SparseParams {
                geometry,
                sm_scale: batch.sm_scale,
                q_nope: q_nope.tensor(0, T::DTYPE, &[t, h, c]).unwrap(),
                q_pe: q_pe.tensor(0, T::DTYPE, &[t, h, e]).unwrap(),
                latent: latent.tensor(0, DType::U8, &self.pool()).unwrap(),
                selection: picked.tensor(0, DType::I32, &[t, k]).unwrap(),
                row_request: &batch.row_request,
                kv_indptr: &batch.kv_indptr,
                kv_indices: &batch.kv_indices,
                page_start: &batch.page_start,
                kv_lens: &batch.kv_lens,
                o: o.tensor_mut(0, T::DTYPE, &[t, h, c]).unwrap(),
                lse: Some(lse.tensor_mut(0, DType::F32, &[t, h]).unwrap()),
                workspace: workspace.tensor_mut(0, DType::U8, &[bytes]).unwrap(),
                workers: 1,
            };
            sparse_attend_at(stream, &on, params).unwrap();
            let got = Got { o: take_all(stream, &o, t * h * c), lse: take_all(stream, &lse, t * h) };
            for (row, _) in batch.row_request.iter().enumerate().filter(|&(_, &request)| request < 0) {
                let bytes: &[u8] = bytemuck::cast_slice(&got.o[row * h * c..(row + 1) * h * c]);
                assert!(bytes.iter().all(|&x| x == 7), "a row of nobody is written");
            }
            got
        }

        /// Holds a run against the oracle over what the codes stand for.
        fn check_on(&self, stream: &Stream) {
            let got = self.on_device(stream);
            let geometry = Geometry { kv_dtype: DType::F32, ..self.batch.geometry };
            let Geometry { num_qo_heads: h, kv_lora_rank: c, .. } = geometry;
            // The oracle is over one type: queries are what they are in f32 too.
            let wide = |numbers: &[T]| numbers.iter().map(|x| x.to_f64() as f32).collect();
            let batch = &self.batch;
            let over = Batch::<f32> {
                geometry: Geometry { q_dtype: DType::F32, ..geometry },
                latent: self.numbers.clone(),
                q_nope: wide(&batch.q_nope),
                q_pe: wide(&batch.q_pe),
                sm_scale: batch.sm_scale,
                topk: batch.topk,
                kv_indptr: batch.kv_indptr.clone(),
                kv_indices: batch.kv_indices.clone(),
                page_start: batch.page_start.clone(),
                kv_lens: batch.kv_lens.clone(),
                num_pages: batch.num_pages,
                row_request: batch.row_request.clone(),
                selection: batch.selection.clone(),
            };
            let want = over.reference();
            let bound = match T::DTYPE {
                DType::F32 => 2e-6,
                DType::F16 => 6e-4,
                _ => 4.2e-3,
            };
            let (mut error, mut norm, mut of_lse, mut size) = (0.0, 0.0, 0.0, 1.0);
            for (row, &request) in batch.row_request.iter().enumerate() {
                if request < 0 {
                    continue;
                }
                for at in row * h * c..(row + 1) * h * c {
                    let (got, want) = (got.o[at].to_f64(), want.o[at]);
                    assert!(!got.is_nan(), "NaN at {at} of {geometry:?}");
                    error += (got - want).powi(2);
                    norm += want * want;
                }
                for at in row * h..(row + 1) * h {
                    let (got, want) = (f64::from(got.lse[at]), want.lse[at]);
                    if want.is_finite() {
                        of_lse += (got - want).powi(2);
                        size += want * want;
                    } else {
                        assert_eq!(got, want);
                    }
                }
            }
            let (error, of_lse) = ((error / norm).sqrt(), (of_lse / size).sqrt());
            assert!(error <= bound, "o of {geometry:?}: {error:e}, {bound:e} allowed");
            assert!(of_lse <= 2e-6, "lse of {geometry:?}: {of_lse:e}");
        }
    }

    fn rows() -> Vec<(i32, Vec<i32>)> {
        vec![
            (0, picks(560, 700, 1)),
            (1, picks(7, 30, 2)),
            (-1, vec![]),
            (0, vec![]),
            (0, picks(40, 700, 3)),
            (1, picks(1, 30, 4)),
        ]
    }

    /// A small ragged batch, for tools that watch memory.
    pub(crate) fn run_small<T: Number>(stream: &Stream, h: usize, c: usize, e: usize) {
        Codes::of(Batch::<T>::make(
            (h, c, e, 8),
            &[(3, 90), (0, 30)],
            &[(0, picks(40, 90, 1)), (-1, vec![]), (1, vec![])],
            64,
            5,
        ))
        .on_device(stream);
    }

    #[test]
    fn picks_over_codes_have_the_oracles_numbers_on_a_device() {
        let Some(own) = stream("picks_over_codes") else { return };
        let stream = &own.stream();
        let requests = [(3, 700), (0, 30)];
        Codes::of(Batch::<bf16>::make((5, 64, 16, 8), &requests, &rows(), 600, 5)).check_on(stream);
        Codes::of(Batch::<f16>::make((3, 132, 6, 8), &requests, &rows()[1..], 64, 6)).check_on(stream);
        Codes::of(Batch::<f32>::make((2, 64, 0, 8), &requests, &rows()[1..], 64, 7)).check_on(stream);
        Codes::of(Batch::<bf16>::make((40, 256, 64, 16), &requests, &rows()[1..], 64, 8)).check_on(stream);
        Codes::of(Batch::<bf16>::make((16, 512, 64, 64), &requests, &rows()[1..], 64, 9)).check_on(stream);
        if whole() {
            Codes::of(Batch::<bf16>::make((66, 512, 64, 64), &requests, &rows(), 600, 9)).check_on(stream);
            // Pages of one slot start at it.
            let requests = [(0, 700), (0, 30)];
            Codes::of(Batch::<bf16>::make((128, 512, 64, 1), &requests, &rows(), 600, 9)).check_on(stream);
        }
    }

    /// In whatever order picks are listed, and whoever else is in the call.
    #[test]
    fn picks_over_codes_have_the_bits_of_the_set_of_picks() {
        let Some(own) = stream("the_set_of_picks") else { return };
        for (h, c, e) in [(3, 64, 16), (5, 512, 64)] {
            let batch =
                |seed| Codes::of(Batch::<bf16>::make((h, c, e, 8), &[(3, 700), (0, 30)], &rows(), 600, seed));
            let mut other = batch(5);
            let one = other.on_device(&own.stream());
            for row in other.batch.selection.chunks_mut(600) {
                row.reverse();
            }
            assert_eq!(one, other.on_device(&own.stream()), "{h} heads");
        }
    }

    #[test]
    fn f_fp8_nan_encodings_of_picks_are_nan_where_they_are_picked() {
        let Some(own) = stream("nan_encodings_of_picks") else { return };
        for (h, c, e) in [(2, 64, 2), (5, 512, 64)] {
            let s = 8;
            let rows = [(0, vec![1, 3, 9]), (0, vec![1, 4]), (0, vec![3])];
            let mut codes = Codes::of(Batch::<bf16>::make((h, c, e, s), &[(0, 30)], &rows, 8, 3));
            let slot = codes.batch.kv_indices[0] as usize * s + 3;
            codes.bytes[slot * fp8::latent_bytes(c, e) + 5] = 0xff;
            let got = codes.on_device(&own.stream());
            let nan = |row: usize| got.o[row * h * c..(row + 1) * h * c].iter().all(|x| x.to_f32().is_nan());
            assert!(nan(0) && nan(2));
            assert!(got.o[h * c..2 * h * c].iter().all(|x| x.to_f32().is_finite()));
        }
    }
}
