//! Blocks of keys, of which each batch sees some.

use crate::flex::{
    AttendParams, Blocks, Geometry, MaskMod, ScoreMod, attend, schedule, stage, workspace_bytes,
};
use crate::paged::{ScheduleOptions, Target};
use crate::work::WorkList;
use crate::{DType, Stream};

use super::memory::{Numbers, Outputs, noise, scratch};
use super::{Bits, Family, Row, Setting, row};

/// A row is a batch of `l` queries, and its keys are counted in blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct InBlocks<'a> {
    pub(super) g: usize,
    pub(super) group: usize,
    pub(super) l: usize,
    pub(super) d: usize,
    pub(super) dv: usize,
    /// Keys of a block.
    pub(super) block: usize,
    pub(super) scores: &'a [ScoreMod<'a>],
    pub(super) masks: &'a [MaskMod<'a>],
}

pub(super) const BLOCK: usize = 16;
/// Position of query 0 among the keys, for mods.
pub(super) const OFFSET: i64 = 1271;
/// Blocks that are stored of each row: more than it sees.
pub(super) const STORED: usize = 80;

impl InBlocks<'_> {
    pub(super) fn narrow() -> InBlocks<'static> {
        InBlocks { g: 1, group: 2, l: 9, d: 64, dv: 64, block: BLOCK, scores: &[], masks: &[] }
    }

    /// Which stored blocks a row sees, ascending.
    pub(super) fn visible(row: &Row, place: u64) -> Vec<usize> {
        let mut all: Vec<usize> = (0..STORED).collect();
        all.sort_by_key(|&block| noise(&[55, place, row.id, block as u64]).to_bits());
        all.truncate(row.kv);
        all.sort_unstable();
        all
    }
}

impl Family for InBlocks<'_> {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn company(&self, rows: usize) -> Vec<Row> {
        // More than two leaves, none, one, some.
        let blocks = [3, 70, 0, 1, 5, 2];
        (0..rows).map(|at| row(at as u64, self.l, blocks[at % blocks.len()])).collect()
    }

    fn run(&self, stream: &Stream, set: &Setting, rows: &[Row]) -> Vec<Bits> {
        let InBlocks { g, group, l, d, dv, block: size, scores, masks } = *self;
        let (dtype, junk, h, m) = (set.dtype, set.junk, g * group, STORED * size);
        let options = ScheduleOptions { workers: 1, target: Target::Blocks, ..ScheduleOptions::default() };
        let mut work = WorkList::default();
        let mut last = None;
        for rows in set.batches(rows) {
            let b = rows.len();
            let geometry = Geometry {
                batch: b,
                num_qo_heads: h,
                num_kv_heads: g,
                head_dim_qk: d,
                head_dim_vo: dv,
                q_dtype: dtype,
                kv_dtype: dtype,
            };
            let seen: Vec<Vec<usize>> = rows.iter().map(|row| Self::visible(row, set.place)).collect();
            let (mut indptr, mut indices) = (vec![0i32], Vec::new());
            for blocks in &seen {
                indices.extend(blocks.iter().map(|&block| block as i32));
                indptr.push(indices.len() as i32);
            }
            // The mask decides of each other block.
            let partial: Vec<u8> = match masks {
                [] => Vec::new(),
                _ => (0..indices.len()).map(|at| u8::from(at % 2 == 0)).collect(),
            };
            let visible = Blocks {
                q_len: l,
                kv_len: m,
                block_q: l,
                block_kv: size,
                batch: b,
                heads: 1,
                indptr: &indptr,
                indices: &indices,
                partial: &partial,
                positions: None,
            };
            schedule(&geometry, &visible, &options, &mut work).unwrap();
            stage(stream, &mut work, scores, masks).unwrap();
            let bytes = workspace_bytes(&work, 1);
            // [B, H, L, D], and [B, G, M, D] by the ordinal of a block among those that are seen.
            let mut q = Numbers::filled(dtype, b * h * l * d, junk);
            for (at, row) in rows.iter().enumerate() {
                let id = row.id;
                q.set_all(at * h * l * d, h * l * d, |i| 1.5 * noise(&[3, id, i as u64]));
            }
            let stored = |width: usize, salt: u64| {
                let mut to = Numbers::filled(dtype, b * g * m * width, junk);
                for (at, row) in rows.iter().enumerate() {
                    for head in 0..g {
                        for (ordinal, block) in seen[at].iter().enumerate() {
                            for key in 0..size {
                                let to_key = ((at * g + head) * m + block * size + key) * width;
                                let of = [salt, row.id, head as u64, (ordinal * size + key) as u64];
                                to.set_all(to_key, width, |i| noise(&[of[0], of[1], of[2], of[3], i as u64]));
                            }
                        }
                    }
                }
                to.on(stream)
            };
            let (q, k, v) = (q.on(stream), stored(d, 1), stored(dv, 2));
            // Each batch is a token of the outputs.
            let mut outputs = Outputs::new(stream, dtype, [b, h * l, dv], junk);
            let mut workspace = scratch(stream, bytes, junk);
            let mut max_scores = scratch(stream, 4 * b * h * l, junk);
            let (o, lse) = outputs.views(&[b, h, l, dv], &[b, h, l]);
            let params = AttendParams {
                work: &work,
                q: q.tensor(0, dtype, &[b, h, l, d]).unwrap(),
                k: k.tensor(0, dtype, &[b, g, m, d]).unwrap(),
                v: v.tensor(0, dtype, &[b, g, m, dv]).unwrap(),
                sm_scale: 0.2,
                q_offset: OFFSET,
                score_mods: scores,
                mask_mods: masks,
                o,
                lse: Some(lse),
                max_scores: Some(max_scores.tensor_mut(0, DType::F32, &[b, h, l]).unwrap()),
                workspace: workspace.tensor_mut(0, DType::U8, &[bytes]).unwrap(),
                workers: 1,
            };
            attend(stream, params).unwrap();
            stream.synchronize().unwrap();
            last = Some(outputs);
        }
        let units: Vec<Row> = rows.iter().map(|row| Row { q: 1, ..*row }).collect();
        last.expect("a batch was run").rows(stream, &units)
    }
}
