//! Batches made from a few numbers, run through the call, through the oracle and through plain loops.

use crate::flex::{
    AttendParams, Blocks, Geometry, MaskMod, ScoreMod, attend, is_for, schedule, workspace_bytes,
};
use crate::paged::ScheduleOptions;
use crate::reference::Attended;
use crate::testing::{Number, bound, judge, noise, on_every_isa};
use crate::work::WorkList;
use crate::{Stream, TensorMut, TensorRef};

/// Shapes of a layer and a batch, all but the types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) b: usize,
    pub(super) h: usize,
    pub(super) g: usize,
    pub(super) l: usize,
    pub(super) m: usize,
    pub(super) d: usize,
    pub(super) dv: usize,
    /// Queries and keys a block.
    pub(super) blocks: [usize; 2],
}

/// The visible blocks of each (mask batch, mask head, block of queries), and whether in part.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Lists {
    pub(super) batch: usize,
    pub(super) heads: usize,
    pub(super) lists: Vec<Vec<(usize, bool)>>,
}

/// What a run wrote.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Output<Q> {
    pub(super) o: Vec<Q>,
    pub(super) lse: Vec<f32>,
    pub(super) max_scores: Vec<f32>,
}

#[derive(Clone, Debug)]
pub(super) struct Batch {
    pub(super) shape: Shape,
    pub(super) lists: Lists,
    pub(super) positions: Option<Vec<i32>>,
    pub(super) sm_scale: f32,
    pub(super) q_offset: i64,
    pub(super) workers: usize,
    /// What stands wherever no key is visible.
    pub(super) junk: f32,
    /// Content of the key stored at an index, where it is not the index itself.
    pub(super) content: Option<Vec<u64>>,
    /// What each query is made of, where it is not its index.
    pub(super) queries: Option<Vec<u64>>,
}

/// A score after what a test does to it: scaled score, batch, head, query, key.
pub(super) type Loop<'a> = &'a dyn Fn(f64, usize, usize, usize, usize) -> Option<f64>;

impl Batch {
    pub(super) fn new(shape: Shape, lists: Lists) -> Batch {
        Batch {
            shape,
            lists,
            positions: None,
            sm_scale: (shape.d as f32).powf(-0.5),
            q_offset: 0,
            workers: 2,
            junk: f32::NAN,
            content: None,
            queries: None,
        }
    }

    /// Every query sees the same whole blocks.
    pub(super) fn shared(shape: Shape, blocks: &[usize]) -> Batch {
        let list: Vec<_> = blocks.iter().map(|&block| (block, false)).collect();
        let lists = vec![list; shape.l.div_ceil(shape.blocks[0])];
        Batch::new(shape, Lists { batch: 1, heads: 1, lists })
    }

    pub(super) fn geometry<Q: Number, K: Number>(&self) -> Geometry {
        let s = &self.shape;
        Geometry {
            batch: s.b,
            num_qo_heads: s.h,
            num_kv_heads: s.g,
            head_dim_qk: s.d,
            head_dim_vo: s.dv,
            q_dtype: Q::DTYPE,
            kv_dtype: K::DTYPE,
        }
    }

    /// The list of (batch, head, query).
    fn list(&self, b: usize, h: usize, i: usize) -> &[(usize, bool)] {
        let of = |n: usize, at: usize| if n == 1 { 0 } else { at };
        let plane = of(self.lists.batch, b) * self.lists.heads + of(self.lists.heads, h);
        let blocks = self.shape.l.div_ceil(self.shape.blocks[0]);
        &self.lists.lists[plane * blocks + i / self.shape.blocks[0]]
    }

    /// Whether some query sees the block of a key.
    fn is_visible(&self, b: usize, kv_head: usize, j: usize) -> bool {
        let Shape { h, g, l, .. } = self.shape;
        let block = j / self.shape.blocks[1];
        let heads = kv_head * (h / g)..(kv_head + 1) * (h / g);
        heads.into_iter().any(|head| {
            (0..l).step_by(self.shape.blocks[0]).any(|i| self.list(b, head, i).iter().any(|x| x.0 == block))
        })
    }

    pub(super) fn q<Q: Number>(&self) -> Vec<Q> {
        let Shape { b, h, l, d, .. } = self.shape;
        let id = |i: usize| self.queries.as_ref().map_or(i as u64, |ids| ids[i]);
        let number = |n: usize| {
            let (i, c, plane) = (n / d % l, n % d, n / d / l);
            Q::of(1.5 * noise(&[1, plane as u64, id(i), c as u64]))
        };
        (0..b * h * l * d).map(number).collect()
    }

    /// Keys (`side` 2) or values (3), `[B, G, M, width]`; junk where no query looks.
    pub(super) fn kv<K: Number>(&self, side: u64, width: usize) -> Vec<K> {
        let Shape { b, g, m, .. } = self.shape;
        let id = |j: usize| self.content.as_ref().map_or(j as u64, |ids| ids[j]);
        let mut out = Vec::with_capacity(b * g * m * width);
        for plane in 0..b * g {
            for j in 0..m {
                let junk = !self.is_visible(plane / g, plane % g, j);
                out.extend((0..width).map(|c| {
                    K::of(if junk { self.junk } else { noise(&[side, plane as u64, id(j), c as u64]) })
                }));
            }
        }
        out
    }

    /// Calls with what is visible.
    fn with_blocks<R>(&self, take: impl FnOnce(&Blocks<'_>) -> R) -> R {
        let Shape { l, m, blocks: [block_q, block_kv], .. } = self.shape;
        let (mut indptr, mut indices, mut partial) = (vec![0i32], Vec::new(), Vec::new());
        for list in &self.lists.lists {
            indices.extend(list.iter().map(|x| x.0 as i32));
            partial.extend(list.iter().map(|x| u8::from(x.1)));
            indptr.push(indices.len() as i32);
        }
        take(&Blocks {
            q_len: l,
            kv_len: m,
            block_q,
            block_kv,
            batch: self.lists.batch,
            heads: self.lists.heads,
            indptr: &indptr,
            indices: &indices,
            partial: &partial,
            positions: self.positions.as_deref(),
        })
    }

    pub(super) fn work<Q: Number, K: Number>(&self) -> WorkList {
        let options = ScheduleOptions { workers: self.workers, ..ScheduleOptions::default() };
        let mut work = WorkList::default();
        self.with_blocks(|blocks| schedule(&self.geometry::<Q, K>(), blocks, &options, &mut work)).unwrap();
        work
    }

    /// Whether a list is this batch's.
    pub(super) fn owns<Q: Number, K: Number>(&self, work: &WorkList) -> bool {
        self.with_blocks(|blocks| is_for(work, &self.geometry::<Q, K>(), blocks))
    }

    pub(super) fn run<Q: Number, K: Number>(&self, score: &[ScoreMod], mask: &[MaskMod]) -> Output<Q> {
        let Shape { b, h, g, l, m, d, dv, .. } = self.shape;
        let work = self.work::<Q, K>();
        // Heads innermost, as a projection leaves them, so that every outer stride is another's.
        let (q, k, v) = (self.q::<Q>(), self.kv::<K>(2, d), self.kv::<K>(3, dv));
        let (q, k, v) = (swap(&q, [b, h, l, d]), swap(&k, [b, g, m, d]), swap(&v, [b, g, m, dv]));
        let mut o = vec![Q::of(7.0); b * h * l * dv];
        let (mut lse, mut max_scores) = (vec![7f32; b * h * l], vec![7f32; b * h * l]);
        let bytes = workspace_bytes(&work, self.workers);
        let mut workspace = vec![0xa5u8; bytes];
        let params = AttendParams {
            work: &work,
            q: TensorRef::from_slice(&q, &[b, l, h, d]).unwrap().transpose(1, 2),
            k: TensorRef::from_slice(&k, &[b, m, g, d]).unwrap().transpose(1, 2),
            v: TensorRef::from_slice(&v, &[b, m, g, dv]).unwrap().transpose(1, 2),
            sm_scale: self.sm_scale,
            q_offset: self.q_offset,
            score_mods: score,
            mask_mods: mask,
            o: TensorMut::from_slice(&mut o, &[b, l, h, dv]).unwrap().transpose(1, 2),
            lse: Some(TensorMut::from_slice(&mut lse, &[b, h, l]).unwrap()),
            max_scores: Some(TensorMut::from_slice(&mut max_scores, &[b, l, h]).unwrap().transpose(1, 2)),
            workspace: TensorMut::from_slice(&mut workspace, &[bytes]).unwrap(),
            workers: self.workers,
        };
        attend(&Stream::cpu(), params).unwrap();
        Output { o: swap(&o, [b, l, h, dv]), lse, max_scores: swap(&max_scores, [b, l, h, 1]) }
    }

    /// The same in plain f64 loops; `change` gives a visible key's score, or hides it. Also the largest scores.
    pub(super) fn loops<Q: Number, K: Number>(&self, change: Loop<'_>) -> (Attended, Vec<f64>) {
        let Shape { b, h, g, l, m, d, dv, blocks: [_, block_kv] } = self.shape;
        let (q, k, v) = (self.q::<Q>(), self.kv::<K>(2, d), self.kv::<K>(3, dv));
        let mut out = Attended { o: vec![0.0; b * h * l * dv], lse: vec![f64::NEG_INFINITY; b * h * l] };
        let mut tops = vec![f64::NEG_INFINITY; b * h * l];
        for at in 0..b * h * l {
            let (i, head, batch) = (at % l, at / l % h, at / l / h);
            let plane = batch * g + head / (h / g);
            let mut scores = Vec::new();
            for &(block, _) in self.list(batch, head, i) {
                for j in block * block_kv..((block + 1) * block_kv).min(m) {
                    let key = &k[(plane * m + j) * d..][..d];
                    let dot: f64 =
                        q[at * d..][..d].iter().zip(key).map(|(a, b)| a.to_f64() * b.to_f64()).sum();
                    let score = change(dot * f64::from(self.sm_scale), batch, head, i, j);
                    scores.extend(score.map(|score| (j, score)));
                }
            }
            let top = scores.iter().fold(f64::NEG_INFINITY, |top, x| top.max(x.1));
            let total: f64 = scores.iter().map(|x| (x.1 - top).exp()).sum();
            if scores.is_empty() {
                continue;
            }
            (out.lse[at], tops[at]) = (top + total.ln(), top);
            for (j, score) in scores {
                let weight = (score - top).exp() / total;
                for c in 0..dv {
                    out.o[at * dv + c] += weight * v[(plane * m + j) * dv + c].to_f64();
                }
            }
        }
        (out, tops)
    }

    /// Holds a run on every instruction set against the loops.
    pub(super) fn hold<Q: Number, K: Number>(
        &self,
        score: &[ScoreMod],
        mask: &[MaskMod],
        change: Loop<'_>,
        what: &str,
    ) {
        let (want, tops) = self.loops::<Q, K>(change);
        on_every_isa(|isa| {
            let what = format!("{what}, {} over {} on {isa}, {:?}", Q::DTYPE, K::DTYPE, self.shape);
            let got = self.run::<Q, K>(score, mask);
            judge(&what, got.o.iter().map(|o| o.to_f64()), &want.o, bound(Q::DTYPE, K::DTYPE));
            judge(&format!("lse, {what}"), got.lse.iter().map(|&x| x.into()), &want.lse, 3e-6);
            judge(&format!("max, {what}"), got.max_scores.iter().map(|&x| x.into()), &tops, 3e-6);
        });
    }
}

/// `[a, b, c, d]` with its middle axes swapped.
fn swap<T: Copy>(data: &[T], [a, b, c, d]: [usize; 4]) -> Vec<T> {
    let mut out = Vec::with_capacity(data.len());
    for x in 0..a {
        for z in 0..c {
            for y in 0..b {
                out.extend_from_slice(&data[((x * b + y) * c + z) * d..][..d]);
            }
        }
    }
    out
}
