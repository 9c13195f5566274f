//! Latents over pages.

use crate::cuda::Context;
use crate::cuda::exec::{Joiner, with_joiner};
use crate::mla::{AttendParams, Geometry, Variant, attend};
use crate::paged::PageTable;
use crate::plan::{Capacity, Latents, Plan, PlanOptions};
use crate::{DType, Kernels, Stream};

use super::memory::{Outputs, Pages, indptr, queries, scratch};
use super::{Bits, DEVICE, Family, Row, Setting, ragged, row, stream};
use crate::paged::forced;

#[derive(Clone, Copy, Debug)]
pub(super) struct OverLatents {
    pub(super) h: usize,
    pub(super) c: usize,
    pub(super) e: usize,
    pub(super) page: usize,
    /// Positions before the first page that is listed.
    pub(super) offset: usize,
    pub(super) kernels: Kernels,
}

impl OverLatents {
    pub(super) fn narrow() -> OverLatents {
        OverLatents { h: 6, c: 48, e: 16, page: 16, offset: 0, kernels: Kernels::Auto }
    }

    pub(super) fn geometry(&self, dtype: DType) -> Geometry {
        Geometry {
            num_qo_heads: self.h,
            kv_lora_rank: self.c,
            qk_rope_head_dim: self.e,
            page_size: self.page,
            q_dtype: dtype,
            kv_dtype: dtype,
        }
    }
}

impl OverLatents {
    /// Items that a batch is cut into.
    fn items(&self, set: &Setting, rows: &[Row]) -> usize {
        let batches = set.batches(rows);
        let rows = &batches[0];
        let pages = Pages::of(rows, |row| row.kv, self.page, set.place);
        let (qo, last) = (indptr(rows, |row| row.q), pages.last(rows));
        let table = PageTable {
            qo_indptr: &qo,
            kv_indptr: &pages.indptr,
            kv_indices: &pages.indices,
            kv_last_page_len: &last,
            num_pages: pages.pool,
            ..PageTable::default()
        };
        let options = PlanOptions { device: DEVICE, kernels: self.kernels, ..PlanOptions::default() };
        let variant = Variant { sm_scale: 0.13, causal: true };
        let plan: Plan<Latents> = Plan::new(&self.geometry(set.dtype), &variant, &table, &options).unwrap();
        plan.work().items.len()
    }
}

impl Family for OverLatents {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn company(&self, rows: usize) -> Vec<Row> {
        ragged(rows)
    }

    fn run(&self, stream: &Stream, set: &Setting, rows: &[Row]) -> Vec<Bits> {
        let OverLatents { h, c, e, page, offset, kernels } = *self;
        let (geometry, dtype, junk) = (self.geometry(set.dtype), set.dtype, set.junk);
        let variant = Variant { sm_scale: 0.13, causal: true };
        let batches = set.batches(rows);
        let most = |of: &dyn Fn(&Row) -> usize| {
            batches.iter().map(|rows| rows.iter().map(of).sum::<usize>()).max().unwrap_or(0)
        };
        let capacity = set.is_fixed().then(|| Capacity {
            rows: batches.iter().map(|rows| rows.len()).max().unwrap_or(0) + 1,
            tokens: most(&|row| row.q) + set.pad,
            pages: most(&|row| row.kv.div_ceil(page)) + 5,
        });
        let options = PlanOptions { device: DEVICE, kernels, capacity, ..PlanOptions::default() };
        let mut plan: Option<Plan<Latents>> = None;
        let mut kept = None;
        for rows in batches {
            let pages = Pages::of(rows, |row| row.kv, page, set.place);
            let (qo, last) = (indptr(rows, |row| row.q), pages.last(rows));
            let offsets = vec![offset as i64; rows.len()];
            let table = PageTable {
                qo_indptr: &qo,
                kv_indptr: &pages.indptr,
                kv_indices: &pages.indices,
                kv_last_page_len: &last,
                kv_offset: Some(&offsets),
                num_pages: pages.pool,
                ..PageTable::default()
            };
            let plan = match &mut plan {
                Some(plan) => {
                    plan.replan(&geometry, &variant, &table, &options).unwrap();
                    plan
                }
                None => plan.insert(Plan::new(&geometry, &variant, &table, &options).unwrap()),
            };
            plan.stage(stream).unwrap();
            let (tokens, bytes) = (plan.num_tokens(), plan.workspace_bytes());
            let (outputs, workspace) = kept.get_or_insert_with(|| {
                let outputs = Outputs::new(stream, dtype, [tokens, h, c], junk);
                (outputs, scratch(stream, bytes.max(4 << 20), junk))
            });
            let q_nope = queries(dtype, rows, tokens, h * c, junk, 3).on(stream);
            let q_pe = queries(dtype, rows, tokens, h * e, junk, 4).on(stream);
            let latent = pages.fill(dtype, rows, |row| row.kv, c + e, junk, 1).on(stream);
            let (o, lse) = outputs.views(&[tokens, h, c], &[tokens, h]);
            let available = workspace.len();
            let params = AttendParams {
                work: plan.work(),
                q_nope: q_nope.tensor(0, dtype, &[tokens, h, c]).unwrap(),
                q_pe: q_pe.tensor(0, dtype, &[tokens, h, e]).unwrap(),
                latent: latent.tensor(0, dtype, &[pages.pool, page, c + e]).unwrap(),
                o,
                lse: Some(lse),
                workspace: workspace.tensor_mut(0, DType::U8, &[available]).unwrap(),
                workers: 1,
            };
            attend(stream, params).unwrap();
            stream.synchronize().unwrap();
        }
        kept.expect("a batch was run").0.rows(stream, rows)
    }
}

/// Leaves may be joined by the block that summed them or by a merge: the bits are the same.
#[test]
fn an_item_of_several_leaves_has_the_bits_of_several_items() {
    let Some(owned) = stream("an_item_of_several_leaves") else { return };
    // 1 to 10 leaves of 256 keys, whole and not, and rows of no key.
    let company = [(1, 2500), (1, 768), (2, 530), (1, 256), (1, 257), (1, 7), (1, 0), (2, 1300)];
    let company: Vec<Row> = company.into_iter().zip(0..).map(|((q, kv), id)| row(id, q, kv)).collect();
    // All lanes of a latent beside its value are in the last block of the value's, or they have blocks of their own.
    for (c, e, dtype) in [(80, 16, DType::F16), (128, 64, DType::Bf16)] {
        let family = OverLatents { c, e, ..OverLatents::narrow() };
        let run =
            |level| forced::with_level(level, || family.run(&owned.stream(), &Setting::of(dtype), &company));
        let apart = run(0);
        for level in 1..=3 {
            assert_eq!(apart, run(level), "{} leaves an item", 1 << level);
        }
        if context_is_hopper() {
            let items = |level| forced::with_level(level, || family.items(&Setting::of(dtype), &company));
            assert!((0..3).all(|level| items(level) > items(level + 1)), "{}, {}", items(0), items(3));
        }
    }
}

/// Nodes of more leaves than registers hold wait in the workspace. Tiles of whole pages are asked for in the order of memory.
#[test]
fn an_item_of_many_leaves_has_the_bits_of_several_items() {
    let Some(owned) = stream("an_item_of_many_leaves") else { return };
    let company: Vec<Row> =
        [(1, 4730), (1, 2304)].into_iter().zip(0..).map(|((q, kv), id)| row(id, q, kv)).collect();
    let run = |level, page| {
        let family = OverLatents { h: 16, c: 512, e: 64, page, ..OverLatents::narrow() };
        forced::with_level(level, || family.run(&owned.stream(), &Setting::of(DType::Bf16), &company))
    };
    let apart = run(1, 16);
    for (level, page) in [(3, 64), (4, 16), (5, 128)] {
        assert_eq!(apart, run(level, page), "{} leaves an item, pages of {page}", 1 << level);
    }
}

/// So it is under many heads, where nodes wait in the workspace: as whole blocks of query vectors, of rows of one query token and of several.
#[test]
fn an_item_of_several_leaves_under_many_heads_has_the_bits_of_several_items() {
    let Some(owned) = stream("an_item_of_several_leaves_under_many_heads") else { return };
    // 1 to 6 leaves of 512 keys or of 4,096, whole and not, and rows of no key.
    let company = [(1, 1900), (1, 1024), (2, 4200), (1, 512), (1, 513), (1, 7), (1, 0), (1, 2700)];
    let company: Vec<Row> = company.into_iter().zip(0..).map(|((q, kv), id)| row(id, q, kv)).collect();
    for (h, c, e, page, dtype) in [(64, 128, 64, 16, DType::F16), (128, 128, 0, 64, DType::Bf16)] {
        let family = OverLatents { h, c, e, page, ..OverLatents::narrow() };
        let run =
            |level| forced::with_level(level, || family.run(&owned.stream(), &Setting::of(dtype), &company));
        let apart = run(0);
        for level in 1..=3 {
            assert_eq!(apart, run(level), "{h} heads, {} leaves an item", 1 << level);
        }
        if context_is_hopper() {
            let items = |level| forced::with_level(level, || family.items(&Setting::of(dtype), &company));
            assert!(items(0) > items(1), "{}, {}", items(0), items(1));
        }
    }
}

/// Whichever kernel joins the parts of rows: 1 to 8 that are near each other, and 10, of values narrower than a slice, of some slices, and of so many
/// query vectors that a warp takes several.
#[test]
fn parts_have_the_same_bits_whichever_kernel_joins_them() {
    let Some(owned) = stream("parts_have_the_same_bits") else { return };
    let near = [(1, 2000), (1, 768), (2, 530), (1, 256), (1, 257), (1, 1100), (1, 0), (2, 1300)];
    let company = |kv_lens: &[(usize, usize)]| -> Vec<Row> {
        kv_lens.iter().zip(0..).map(|(&(q, kv), id)| row(id, q, kv)).collect()
    };
    for (h, c, e, dtype) in [(6, 80, 16, DType::F16), (16, 400, 16, DType::Bf16), (64, 128, 64, DType::Bf16)]
    {
        for company in [company(&near), company(&[(1, 2500), (1, 300)])] {
            let family = OverLatents { h, c, e, ..OverLatents::narrow() };
            let run = |joiner| {
                forced::with_level(0, || {
                    with_joiner(joiner, || family.run(&owned.stream(), &Setting::of(dtype), &company))
                })
            };
            let [few, others @ ..] = Joiner::ALL.map(run);
            assert!(others.iter().all(|bits| *bits == few), "{h} heads, {c} columns");
        }
    }
}

/// However many blocks of a latent lie behind its value, tiles of whole pages are those that are gathered slot by slot.
#[test]
fn tiles_of_whole_pages_are_those_of_small_ones_whatever_lies_behind_values() {
    let Some(owned) = stream("tiles_of_whole_pages") else { return };
    let company: Vec<Row> =
        [(1, 200), (2, 65)].into_iter().zip(0..).map(|((q, kv), id)| row(id, q, kv)).collect();
    for (c, e) in [(128, 128), (128, 192), (256, 320), (128, 384)] {
        let run = |page| {
            let family = OverLatents { h: 16, c, e, page, ..OverLatents::narrow() };
            family.run(&owned.stream(), &Setting::of(DType::Bf16), &company)
        };
        assert_eq!(run(16), run(64), "{c} + {e} lanes");
    }
}

/// Where pages are whole tiles, tiles come as boxes, but for the ends of rows and where none lies in one page: the bits are the same.
#[test]
fn tiles_in_boxes_have_the_bits_of_tiles_that_are_gathered() {
    let Some(owned) = stream("tiles_in_boxes") else { return };
    let company = [(1, 700), (2, 257), (3, 64), (1, 7), (1, 0)];
    let company: Vec<Row> = company.into_iter().zip(0..).map(|((q, kv), id)| row(id, q, kv)).collect();
    // A latent narrower than its blocks, and one whose value is; more than a block's query vectors.
    for (h, c, e, dtype) in [(66, 80, 16, DType::F16), (70, 128, 64, DType::Bf16)] {
        for offset in [0, 672] {
            let run = |page: usize| {
                let family = OverLatents { h, c, e, page, offset, ..OverLatents::narrow() };
                family.run(&owned.stream(), &Setting::of(dtype), &company)
            };
            let gathered = run(16);
            for page in [64, 192] {
                assert_eq!(gathered, run(page), "{h} heads, pages of {page} from position {offset} on");
            }
        }
    }
}

/// A ring of two tiles, as models' latents have: a tile that is gathered needs all the room of the one two before it.
#[test]
fn a_last_tile_that_is_gathered_into_a_ring_of_two_has_the_same_bits() {
    let Some(owned) = stream("a_last_tile_that_is_gathered") else { return };
    for kv in [100, 250, 330] {
        let run = |page: usize| {
            let family = OverLatents { h: 66, c: 512, e: 64, page, ..OverLatents::narrow() };
            family.run(&owned.stream(), &Setting::of(DType::Bf16), &[row(0, 2, kv)])
        };
        assert_eq!(run(16), run(64), "{kv} keys");
    }
}

/// Heads of whole pairs of blocks: those of a pair ask for every other box for both. The bits are those of tiles that each block gathers.
#[test]
fn boxes_that_two_blocks_have_together_have_the_same_bits() {
    let Some(owned) = stream("boxes_that_two_blocks_have") else { return };
    let company = [(1, 700), (2, 257), (3, 64), (1, 7), (1, 0), (5, 130)];
    let company: Vec<Row> = company.into_iter().zip(0..).map(|((q, kv), id)| row(id, q, kv)).collect();
    for (h, c, e, dtype) in [(128, 512, 64, DType::Bf16), (256, 80, 16, DType::F16)] {
        for offset in [0, 672] {
            let run = |page: usize| {
                let family = OverLatents { h, c, e, page, offset, ..OverLatents::narrow() };
                family.run(&owned.stream(), &Setting::of(dtype), &company)
            };
            assert_eq!(run(16), run(64), "{h} heads from position {offset} on");
        }
    }
}

fn context_is_hopper() -> bool {
    Context::of(DEVICE).is_ok_and(Context::is_hopper)
}
