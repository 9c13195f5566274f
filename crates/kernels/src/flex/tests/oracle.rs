//! Every named score mod over written blocks against the oracle, on every instruction set.

use half::{bf16, f16};

use super::batch::{Batch, Shape};
use crate::flex::ScoreMod;
use crate::reference;
use crate::testing::{Number, bound, judge, noise, on_every_isa};

const SHAPE: Shape = Shape { b: 2, h: 4, g: 2, l: 70, m: 300, d: 24, dv: 40, blocks: [32, 64] };

struct Tables {
    slopes: Vec<f32>,
    bias: Vec<f32>,
    window: usize,
}

impl Tables {
    fn new(h: usize, window: usize) -> Tables {
        let slopes = (0..h).map(|h| 0.25 / (1 + h) as f32).collect();
        let bias = (0..h * (2 * window + 1)).map(|i| noise(&[9, i as u64])).collect();
        Tables { slopes, bias, window }
    }

    fn mods(&self) -> [ScoreMod<'_>; 5] {
        [
            ScoreMod::None,
            ScoreMod::Causal,
            ScoreMod::Alibi { slopes: &self.slopes },
            ScoreMod::RelBias { table: &self.bias, window: self.window },
            ScoreMod::SoftCap(0.7),
        ]
    }
}

fn hold<Q: Number, K: Number>(batch: &Batch, written: &[usize], mods: &[ScoreMod]) {
    let Shape { b, h, g, m, d, dv, blocks: [_, block_size], .. } = batch.shape;
    for score in mods {
        let slopes: Vec<f64> = match score {
            ScoreMod::Alibi { slopes } => slopes.iter().map(|&s| s.into()).collect(),
            _ => Vec::new(),
        };
        let score_mod = match score {
            ScoreMod::Causal => reference::flex::ScoreMod::Causal,
            ScoreMod::Alibi { .. } => reference::flex::ScoreMod::Alibi { slopes: &slopes },
            ScoreMod::RelBias { table, window } => {
                reference::flex::ScoreMod::RelBias { table, window: *window }
            }
            ScoreMod::SoftCap(cap) => reference::flex::ScoreMod::SoftCap(f64::from(*cap)),
            _ => reference::flex::ScoreMod::None,
        };
        let want = reference::flex(&reference::flex::Flex {
            q: &batch.q::<Q>(),
            k: &batch.kv::<K>(2, d),
            v: &batch.kv::<K>(3, dv),
            written: &(0..m).map(|j| u8::from(written.contains(&(j / block_size)))).collect::<Vec<_>>(),
            batch: b,
            num_qo_heads: h,
            num_kv_heads: g,
            head_dim_qk: d,
            head_dim_vo: dv,
            block_size,
            sm_scale: batch.sm_scale.into(),
            q_offset: batch.q_offset,
            score_mod,
        })
        .unwrap();
        on_every_isa(|isa| {
            let got = batch.run::<Q, K>(&[*score], &[]);
            let what = format!("{:?}, {written:?}, {} on {isa}", batch.shape, Q::DTYPE);
            judge(&what, got.o.iter().map(|o| o.to_f64()), &want.o, bound(Q::DTYPE, K::DTYPE));
            judge(&what, got.lse.iter().map(|&x| x.into()), &want.lse, 3e-6);
        });
    }
}

#[test]
fn every_named_mod_agrees_in_every_dtype() {
    let tables = Tables::new(4, 13);
    for (written, q_offset) in [(&[0, 2, 4][..], 230), (&[1, 2, 3], 0), (&[], 5), (&[4], -40)] {
        let batch = Batch { q_offset, ..Batch::shared(SHAPE, written) };
        hold::<f32, f32>(&batch, written, &tables.mods());
        hold::<bf16, bf16>(&batch, written, &tables.mods());
        hold::<f16, f16>(&batch, written, &tables.mods());
        hold::<f32, bf16>(&batch, written, &tables.mods());
    }
}

#[test]
fn a_negative_scale_and_one_of_zero_agree() {
    let tables = Tables::new(4, 200);
    for sm_scale in [-0.3, 0.0] {
        let batch = Batch { sm_scale, ..Batch::shared(SHAPE, &[1, 4]) };
        hold::<f32, f32>(&batch, &[1, 4], &tables.mods());
    }
}

#[test]
fn f15_any_width_group_and_block_agrees() {
    let sizes = [(1, 1), (7, 33), (192, 128), (64, 64), (512, 512), (16, 512)];
    for (i, (d, dv)) in sizes.into_iter().enumerate() {
        let group = [1, 3, 7, 8, 5][i % 5];
        let blocks = [[128, 128], [1, 1], [16, 5], [50, 256], [400, 16], [3, 130]][i];
        let shape = Shape { b: 1, h: 2 * group, g: 2, l: 9, m: 150, d, dv, blocks };
        let last = 150usize.div_ceil(blocks[1]) - 1;
        let written: Vec<usize> = (0..=last).filter(|block| block % 3 != 1 || *block == last).collect();
        let tables = Tables::new(shape.h, 4);
        let batch = Batch { q_offset: 100, ..Batch::shared(shape, &written) };
        hold::<f32, f32>(&batch, &written, &tables.mods());
        hold::<bf16, bf16>(&batch, &written, &tables.mods()[2..4]);
    }
}

#[test]
fn many_queries_and_several_leaves_agree() {
    let shape = Shape { b: 1, h: 2, g: 1, l: 300, m: 4600, d: 8, dv: 8, blocks: [128, 128] };
    let written: Vec<usize> = (0..36).filter(|block| block % 7 != 3).collect();
    let batch = Batch { q_offset: 4300, ..Batch::shared(shape, &written) };
    let tables = Tables::new(2, 40);
    hold::<f32, f32>(&batch, &written, &tables.mods());
}
