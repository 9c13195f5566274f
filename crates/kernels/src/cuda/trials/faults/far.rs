//! Pages beyond 2^32 elements, and batches beyond 65,535 rows.

use std::alloc::{Layout, alloc_zeroed, dealloc};

use super::super::memory::{noise, scratch};
use super::*;
use crate::cpu::scatter::scatter_at;
use crate::dsa::{self, DeviceTable, KeyFormat, ScoresParams, Table};
use crate::lse::{Merged, Partial, merge_all_natural_at};
use crate::{TensorMut, TensorRef, mla};

const BF16: DType = DType::Bf16;
const PAGES: usize = 131_073;
const SIZE: usize = 64;
const WIDTH: usize = 576;

/// A pool of `[PAGES, SIZE, WIDTH]` bf16 (9.7 GB): a card's memory, or on the emulated device memory of the host that nobody has
/// touched, which costs nothing.
enum Pool {
    Card(Buffer),
    Host(*mut u8),
}

impl Pool {
    /// Aligned as `calloc` aligns, which leaves it untouched.
    const LAYOUT: Layout = match Layout::from_size_align(PAGES * SIZE * WIDTH * 2, 16) {
        Ok(layout) => layout,
        Err(_) => panic!("a size and an alignment that are some"),
    };

    fn here(stream: &Stream) -> std::result::Result<Pool, String> {
        let context = Context::of(stream.device()).map_err(|why| why.to_string())?;
        let bytes = Pool::LAYOUT.size();
        if context.is_emulated() {
            // SAFETY: the layout has a size.
            let at = unsafe { alloc_zeroed(Pool::LAYOUT) };
            return if at.is_null() {
                Err(format!("the host gives no {bytes} bytes"))
            } else {
                Ok(Pool::Host(at))
            };
        }
        let free = context.free_memory().map_err(|why| why.to_string())?;
        if free < bytes + (2 << 30) {
            return Err(format!("{bytes} bytes and some more are needed, {free} are free"));
        }
        Buffer::zeroed_on(stream.device(), bytes).map(Pool::Card).map_err(|why| why.to_string())
    }

    fn at(&self) -> *mut u8 {
        match self {
            Pool::Card(memory) => memory.as_ptr().cast_mut(),
            Pool::Host(at) => *at,
        }
    }

    /// All of it, as entries of some axes.
    fn view(&self, entry: &[usize]) -> TensorRef<'_> {
        let shape = [&[PAGES, SIZE], entry].concat();
        assert_eq!(entry.iter().product::<usize>(), WIDTH);
        let strides: Vec<usize> = (0..shape.len()).map(|axis| shape[axis + 1..].iter().product()).collect();
        // SAFETY: the memory is there, and so large; on the emulated device all memory is the host's.
        unsafe { TensorRef::from_raw_parts(self.at(), DEVICE, BF16, &shape, &strides) }.unwrap()
    }

    fn view_mut(&mut self, entry: &[usize]) -> TensorMut<'_> {
        let of = self.view(entry);
        let (shape, strides) = (of.shape().to_vec(), of.strides().to_vec());
        // SAFETY: as above, and `&mut` makes it ours.
        unsafe { TensorMut::from_raw_parts(self.at(), DEVICE, BF16, &shape, &strides) }.unwrap()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if let Pool::Host(at) = *self {
            // SAFETY: allocated with this layout, and freed once.
            unsafe { dealloc(at, Pool::LAYOUT) };
        }
    }
}

#[test]
fn f09_pages_past_2_32_elements_are_written_and_read() {
    let test = "f09_pages_past_2_32_elements";
    let Some(owned) = stream(test) else { return };
    let stream = owned.stream();
    let mut pool = match Pool::here(&stream) {
        Ok(pool) => pool,
        Err(why) => return println!("SKIPPED {test}: {why}"),
    };
    // One request's 40 tokens, appended to page 0, to the last page, and beyond 2^31 elements.
    let tokens = 40;
    let entries: Vec<f32> = (0..tokens * WIDTH).map(|i| noise(&[1, i as u64])).collect();
    let entries = put(&stream, &encoded(BF16, &entries));
    let places = [0i32, 58_254, 58_255, 131_072];
    for place in places {
        let slots: Vec<i64> = (0..tokens as i64).map(|t| i64::from(place) * SIZE as i64 + t).collect();
        let slots = put(&stream, bytemuck::cast_slice(&slots));
        let slots = slots.tensor(0, DType::I64, &[tokens]).unwrap();
        let from = entries.tensor(0, BF16, &[tokens, WIDTH]).unwrap();
        scatter_at(&stream, slots, from, pool.view_mut(&[WIDTH])).unwrap();
        stream.synchronize().unwrap();
    }
    let results: Vec<[Vec<u8>; 4]> = places
        .iter()
        .map(|&place| {
            [
                heads(&stream, &pool, place, 1),
                heads(&stream, &pool, place, 20),
                latents(&stream, &pool, place),
                scores(&stream, &pool, place),
            ]
        })
        .collect();
    for (place, got) in places.iter().zip(&results) {
        for (what, (got, want)) in
            ["decode", "append", "latents", "index keys"].iter().zip(got.iter().zip(&results[0]))
        {
            assert!(got.iter().any(|&byte| byte != 0 && byte != NAN), "{what}: nothing");
            assert_eq!(got, want, "{what} of page {place}");
        }
    }
    // Gathered from there, they are what was appended.
    for place in places {
        let mut out = scratch(&stream, tokens * WIDTH * 2, NAN);
        let to = out.tensor_mut(0, BF16, &[tokens, WIDTH]).unwrap();
        crate::cpu::gather::gather_pages(&stream, pool.view(&[WIDTH]), &[place], 0, to).unwrap();
        assert_eq!(take(&stream, &out, out.len()), take(&stream, &entries, entries.len()), "page {place}");
    }
}

/// Paged attention of `q` queries over a page, 9 heads of 64 as keys and as values.
fn heads(stream: &Stream, pool: &Pool, place: i32, q: usize) -> Vec<u8> {
    let geometry = Geometry { num_qo_heads: 9, num_kv_heads: 9, ..narrow(1, SIZE, BF16) };
    let variant = Variant::causal(64);
    let rows = Rows::of(SIZE, &[(q, 40, &[place])]);
    let options = PlanOptions { device: DEVICE, ..PlanOptions::default() };
    let mut plan = Plan::<Heads>::new(&geometry, &variant, &rows.table(PAGES), &options).unwrap();
    plan.stage(stream).unwrap();
    let shape = [q, 9, 64];
    let queries: Vec<f32> = (0..q * WIDTH).map(|i| noise(&[2, i as u64])).collect();
    let queries = put(stream, &encoded(BF16, &queries));
    let mut o = scratch(stream, q * WIDTH * 2, NAN);
    let bytes = plan.workspace_bytes();
    let mut workspace = scratch(stream, bytes, NAN);
    let params = AttendParams {
        work: plan.work(),
        q: queries.tensor(0, BF16, &shape).unwrap(),
        k: pool.view(&[9, 64]),
        v: pool.view(&[9, 64]),
        kv_scales: None,
        sinks: None,
        alibi_slopes: None,
        o: o.tensor_mut(0, BF16, &shape).unwrap(),
        lse: None,
        workspace: workspace.tensor_mut(0, DType::U8, &[bytes]).unwrap(),
        workers: 1,
    };
    attend(stream, params).unwrap();
    take(stream, &o, o.len())
}

fn latents(stream: &Stream, pool: &Pool, place: i32) -> Vec<u8> {
    let h = 2;
    let geometry = mla::Geometry {
        num_qo_heads: h,
        kv_lora_rank: 512,
        qk_rope_head_dim: 64,
        page_size: SIZE,
        q_dtype: BF16,
        kv_dtype: BF16,
    };
    let variant = mla::Variant { sm_scale: 0.1, causal: true };
    let rows = Rows::of(SIZE, &[(1, 40, &[place])]);
    let options = PlanOptions { device: DEVICE, ..PlanOptions::default() };
    let mut plan =
        Plan::<crate::plan::Latents>::new(&geometry, &variant, &rows.table(PAGES), &options).unwrap();
    plan.stage(stream).unwrap();
    let queries: Vec<f32> = (0..h * WIDTH).map(|i| noise(&[3, i as u64])).collect();
    let queries = put(stream, &encoded(BF16, &queries));
    let mut o = scratch(stream, h * 512 * 2, NAN);
    let bytes = plan.workspace_bytes();
    let mut workspace = scratch(stream, bytes, NAN);
    let params = mla::AttendParams {
        work: plan.work(),
        q_nope: queries.tensor(0, BF16, &[1, h, 512]).unwrap(),
        q_pe: queries.tensor(h * 512 * 2, BF16, &[1, h, 64]).unwrap(),
        latent: pool.view(&[WIDTH]),
        o: o.tensor_mut(0, BF16, &[1, h, 512]).unwrap(),
        lse: None,
        workspace: workspace.tensor_mut(0, DType::U8, &[bytes]).unwrap(),
        workers: 1,
    };
    mla::attend(stream, params).unwrap();
    take(stream, &o, o.len())
}

/// Index scores of the first 128 lanes of each entry.
fn scores(stream: &Stream, pool: &Pool, place: i32) -> Vec<u8> {
    let (h, d) = (8, 128);
    dsa::prepare_select(stream, BF16, KeyFormat::Bf16, h, d, crate::Kernels::Auto).unwrap();
    let table = Table {
        row_request: &[0],
        positions: &[39],
        kv_indptr: &[0, 1],
        kv_indices: &[place],
        page_start: &[0],
        kv_lens: &[40],
    };
    let mut on = DeviceTable::with_capacity(stream, 1, 1, 1, 0).unwrap();
    on.set(stream, &table).unwrap();
    let queries: Vec<f32> = (0..h * d).map(|i| noise(&[4, i as u64])).collect();
    let queries = put(stream, &encoded(BF16, &queries));
    let weights = put(stream, &encoded(DType::F32, &vec![0.5; h]));
    let (mut out, mut nothing) = (scratch(stream, 4 * 40, NAN), scratch(stream, 64, NAN));
    let params = ScoresParams {
        q: queries.tensor(0, BF16, &[1, h, d]).unwrap(),
        weights: weights.tensor(0, DType::F32, &[1, h]).unwrap(),
        keys: pool.view(&[WIDTH]).narrow(2, 0, d).unwrap(),
        format: KeyFormat::Bf16,
        row_request: table.row_request,
        positions: table.positions,
        kv_indptr: table.kv_indptr,
        kv_indices: table.kv_indices,
        page_start: table.page_start,
        kv_lens: table.kv_lens,
        scores: out.tensor_mut(0, DType::F32, &[1, 40]).unwrap(),
        workspace: nothing.tensor_mut(0, DType::U8, &[64]).unwrap(),
        workers: 1,
    };
    dsa::scores_at(stream, &on, params).unwrap();
    take(stream, &out, out.len())
}

#[test]
fn f10_more_rows_and_tokens_than_a_grid_has_blocks() {
    let test = "f10_more_rows_and_tokens_than_a_grid_has_blocks";
    let Some(owned) = stream(test) else { return };
    let stream = owned.stream();
    if is_emulated() {
        return println!("SKIPPED {test}: 65,537 rows take the emulated device minutes; a card runs them");
    }
    // Row r has page r, whose value says which it is.
    let value = |page: usize| (page % 251) as f32;
    let number =
        |is_value: bool, page: usize, _: usize, _: usize| Some(if is_value { value(page) } else { 0.0 });
    let layer = Paged::new(&stream, narrow(1, 1, BF16), Variant::causal(64), 70_000, number);
    let pages: Vec<i32> = (0..70_000).collect();
    for rows in [65_535, 65_536, 65_537] {
        let batch: Vec<(usize, usize, &[i32])> = (0..rows).map(|row| (1, 1, &pages[row..])).collect();
        let (o, lse) = layer.eager(&stream, &Rows::of(1, &batch));
        assert!(lse.iter().all(|&lse| lse == 0.0));
        for (row, o) in o.chunks_exact(64).enumerate() {
            assert!(o.iter().all(|&o| o == value(row)), "{rows} rows, row {row}: {}", o[0]);
        }
    }
    // One prefill of 70,000 tokens: the means of what each sees.
    let window = Variant { window_left: Some(0), ..Variant::causal(64) };
    let layer = Paged { variant: window, ..layer };
    let (o, _) = layer.eager(&stream, &Rows::of(1, &[(70_000, 70_000, &pages)]));
    for (token, o) in o.chunks_exact(64).enumerate() {
        assert!(o.iter().all(|&o| o == value(token)), "token {token}: {}", o[0]);
    }
    // Partial results of as many tokens.
    let (tokens, width) = (70_000, 4);
    let numbers: Vec<f32> = (0..tokens * width).map(|i| value(i / width)).collect();
    let o = put(&stream, &encoded(DType::F32, &numbers));
    let lse = put(&stream, &vec![0; 4 * tokens]);
    let (mut o_out, mut lse_out) = (scratch(&stream, o.len(), NAN), scratch(&stream, lse.len(), NAN));
    let part = Partial {
        o: o.tensor(0, DType::F32, &[tokens, 1, width]).unwrap(),
        lse: lse.tensor(0, DType::F32, &[tokens, 1]).unwrap(),
    };
    let mut out = Merged {
        o: o_out.tensor_mut(0, DType::F32, &[tokens, 1, width]).unwrap(),
        lse: lse_out.tensor_mut(0, DType::F32, &[tokens, 1]).unwrap(),
    };
    merge_all_natural_at(&stream, &[part, part], &mut out).unwrap();
    assert_eq!(floats(DType::F32, &take(&stream, &o_out, o_out.len())), numbers);
}
