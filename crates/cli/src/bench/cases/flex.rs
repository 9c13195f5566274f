//! Block-mask attention: all blocks, three of four of them, score mods, and cutting a mask into work.

use mstar_kernels::DType;
use mstar_kernels::flex::{
    AttendParams, Blocks, Geometry, ScoreMod, attend, schedule, stage, workspace_bytes,
};
use mstar_kernels::paged::{ScheduleOptions, Target};
use mstar_kernels::work::WorkList;

use super::{Case, Cost, Made, Place};

const H: usize = 8;
const D: usize = 64;
/// Heads and width on a device.
const ON_DEVICE: [usize; 2] = [16, 128];
const BLOCK: usize = 128;
/// Queries: a frame of a world model.
const FRAME: usize = 512;

/// What happens to scores.
#[derive(Clone, Copy)]
enum Mod {
    None,
    Alibi,
    RelBias,
    SoftCap,
}

impl Mod {
    fn score<'a>(self, slopes: &'a [f32], table: &'a [f32]) -> ScoreMod<'a> {
        match self {
            Mod::None => ScoreMod::None,
            Mod::Alibi => ScoreMod::Alibi { slopes },
            Mod::RelBias => ScoreMod::RelBias { table, window: 128 },
            Mod::SoftCap => ScoreMod::SoftCap(20.0),
        }
    }
}

/// The cases of this family.
pub(super) fn list(quick: bool) -> Vec<Case> {
    let blocks = if quick { 8 } else { 40 };
    let mut cases = Vec::new();
    for dtype in [DType::F32, DType::Bf16] {
        cases.push(case(blocks, false, Mod::None, dtype, [H, D]));
        cases.push(case(blocks, true, Mod::None, dtype, [H, D]));
    }
    for change in [Mod::Alibi, Mod::RelBias, Mod::SoftCap] {
        cases.push(case(blocks, true, change, DType::F32, [H, D]));
    }
    cases.push(plan(blocks));
    cases
}

/// Those of a device: 6528 of 8704 keys are seen.
pub(super) fn list_on_device(quick: bool) -> Vec<Case> {
    let (blocks, shape) = if quick { (4, [2, 64]) } else { (68, ON_DEVICE) };
    let mods = [Mod::None, Mod::Alibi, Mod::SoftCap];
    mods.map(|change| case(blocks, true, change, DType::Bf16, shape)).into_iter().collect()
}

/// A mask of one list a block of queries: every block of keys, or all but each fourth.
struct Mask {
    total: usize,
    visible: usize,
    indptr: Vec<i32>,
    indices: Vec<i32>,
}

impl Mask {
    fn new(total: usize, holes: bool) -> Mask {
        let list: Vec<i32> = (0..total as i32).filter(|block| !holes || block % 4 != 2).collect();
        let lists = FRAME / BLOCK;
        let indptr = (0..=lists).map(|at| (at * list.len()) as i32).collect();
        Mask { total, visible: list.len(), indptr, indices: list.repeat(lists) }
    }

    fn blocks(&self) -> Blocks<'_> {
        Blocks {
            q_len: FRAME,
            kv_len: self.total * BLOCK,
            block_q: BLOCK,
            block_kv: BLOCK,
            batch: 1,
            heads: 1,
            indptr: &self.indptr,
            indices: &self.indices,
            ..Blocks::default()
        }
    }
}

fn geometry(dtype: DType, [h, d]: [usize; 2]) -> Geometry {
    Geometry {
        batch: 1,
        num_qo_heads: h,
        num_kv_heads: h,
        head_dim_qk: d,
        head_dim_vo: d,
        q_dtype: dtype,
        kv_dtype: dtype,
    }
}

fn case(total: usize, holes: bool, change: Mod, dtype: DType, [h, d]: [usize; 2]) -> Case {
    let mask = Mask::new(total, holes);
    let keys = mask.visible * BLOCK;
    let bytes = (2 * (FRAME + keys) * h * d * dtype.size()) as f64;
    let flops = (4 * FRAME * keys * h * d) as f64;
    let name = match (change, holes) {
        (Mod::None, false) => "all",
        (Mod::None, true) => "3/4",
        (Mod::Alibi, _) => "alibi",
        (Mod::RelBias, _) => "rel_bias",
        (Mod::SoftCap, _) => "soft_cap",
    };
    let shape = format!("{FRAME} of {keys}, {name}, {dtype}");
    let make = move |place: &Place| -> anyhow::Result<Made> {
        let stream = place.stream();
        let options = ScheduleOptions { target: Target::of(place.device()), ..ScheduleOptions::default() };
        let mut work = WorkList::default();
        schedule(&geometry(dtype, [h, d]), &mask.blocks(), &options, &mut work)?;
        let bytes = workspace_bytes(&work, options.workers);
        let mut workspace = place.scratch(bytes)?;
        let stored = total * BLOCK;
        let q = place.filled(dtype, FRAME * h * d)?;
        let [k, v] = [place.filled(dtype, stored * h * d)?, place.filled(dtype, stored * h * d)?];
        let mut o = place.room(dtype, &[1, FRAME, h, d])?;
        let slopes: Vec<f32> = (0..h).map(|head| 0.5f32.powi(head as i32 + 1)).collect();
        let table: Vec<f32> = (0..h * 257).map(|i| (i % 31) as f32 * 0.01).collect();
        stage(&stream, &mut work, &[change.score(&slopes, &table)], &[])?;
        Ok(Made::alone(move || {
            let score = change.score(&slopes, &table);
            // Heads innermost, as a projection leaves them.
            let params = AttendParams {
                work: &work,
                q: q.tensor(0, dtype, &[1, FRAME, h, d])?.transpose(1, 2),
                k: k.tensor(0, dtype, &[1, stored, h, d])?.transpose(1, 2),
                v: v.tensor(0, dtype, &[1, stored, h, d])?.transpose(1, 2),
                sm_scale: (d as f32).powf(-0.5),
                q_offset: 0,
                score_mods: &[score],
                mask_mods: &[],
                o: o.tensor_mut(0, dtype, &[1, FRAME, h, d])?.transpose(1, 2),
                lse: None,
                max_scores: None,
                workspace: workspace.tensor_mut(0, DType::U8, &[bytes])?,
                workers: options.workers,
            };
            Ok(attend(&stream, params)?)
        }))
    };
    Case { kernel: "flex", shape, dtype, cost: Cost { bytes, flops }, beside: None, make: Box::new(make) }
}

/// Cutting a mask that changed; nothing bounds it but the host.
fn plan(total: usize) -> Case {
    let make = move |_: &Place| -> anyhow::Result<Made> {
        let masks = [Mask::new(total, true), Mask::new(total, false)];
        let (options, mut work, mut turn) = (ScheduleOptions::default(), WorkList::default(), 0);
        Ok(Made::alone(move || {
            turn = 1 - turn;
            Ok(schedule(&geometry(DType::F32, [H, D]), &masks[turn].blocks(), &options, &mut work)?)
        }))
    };
    let shape = format!("mask of {total} blocks");
    Case {
        kernel: "plan",
        shape,
        dtype: DType::F32,
        cost: Cost::default(),
        beside: None,
        make: Box::new(make),
    }
}
