//! A row of paged keys and values with its queries, the kernel over it, and the f64 loops that judge.

use std::ops::Range;

use half::{bf16, f16};

use super::super::{
    KEY_TILE, KeyRun, RowMask, Slots, TileJob, TileState, accumulate, scratch_words, tile_tokens,
};
use crate::cpu::Isa;
use crate::{DType, Device, TensorRef};

/// Shape and options of one row.
#[derive(Clone)]
pub(super) struct Row {
    pub(super) dtype: DType,
    pub(super) q_len: usize,
    pub(super) kv_len: usize,
    pub(super) kv_heads: usize,
    pub(super) group: usize,
    pub(super) d: usize,
    pub(super) dv: usize,
    pub(super) page_size: usize,
    pub(super) kv_offset: usize,
    pub(super) kv_begin: usize,
    pub(super) sm_scale: f32,
    pub(super) causal: bool,
    pub(super) window_left: Option<usize>,
    pub(super) cap: f32,
    pub(super) slopes: Option<Vec<f32>>,
    pub(super) mask: Option<Vec<u64>>,
    pub(super) seed: u64,
}

impl Default for Row {
    fn default() -> Row {
        Row {
            dtype: DType::F32,
            q_len: 5,
            kv_len: 5,
            kv_heads: 1,
            group: 1,
            d: 32,
            dv: 32,
            page_size: 16,
            kv_offset: 0,
            kv_begin: 0,
            sm_scale: 0.25,
            causal: true,
            window_left: None,
            cap: 0.0,
            slopes: None,
            mask: None,
            seed: 1,
        }
    }
}

/// Normalised output and natural LSE of every query row `[q_len, H]`.
#[derive(Clone, PartialEq)]
pub(super) struct Output {
    pub(super) o: Vec<f32>,
    pub(super) lse: Vec<f32>,
}

/// SplitMix64, summed up to something bell-shaped.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) fn normal(&mut self) -> f32 {
        let bits = self.next();
        let sum: u64 = (0..4).map(|i| (bits >> (16 * i)) & 0xffff).sum();
        (sum as f32 / 65536.0 - 2.0) * 1.73
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

/// Elements of a tensor, as bytes of its dtype.
pub(super) struct Data {
    dtype: DType,
    words: Vec<u64>,
}

impl Data {
    fn new(dtype: DType, values: &[f32]) -> Data {
        let bytes: Vec<u8> = match dtype {
            DType::F32 => values.iter().flat_map(|x| x.to_ne_bytes()).collect(),
            DType::Bf16 => values.iter().flat_map(|&x| bf16::from_f32(x).to_ne_bytes()).collect(),
            _ => values.iter().flat_map(|&x| f16::from_f32(x).to_ne_bytes()).collect(),
        };
        let words = bytes
            .chunks(8)
            .map(|c| {
                let mut word = [0; 8];
                word[..c.len()].copy_from_slice(c);
                u64::from_ne_bytes(word)
            })
            .collect();
        Data { dtype, words }
    }

    fn view<'a>(&'a self, shape: &[usize], strides: &[usize]) -> TensorRef<'a> {
        // SAFETY: the words hold every element that the callers' shapes reach: `cache` and `queries` below
        // make them of the same extents.
        unsafe {
            TensorRef::from_raw_parts(self.words.as_ptr().cast(), Device::Cpu, self.dtype, shape, strides)
        }
        .expect("small shapes")
    }
}

/// `x` as the dtype stores it.
fn stored(dtype: DType, x: f32) -> f32 {
    match dtype {
        DType::F32 => x,
        DType::Bf16 => bf16::from_f32(x).to_f32(),
        _ => f16::from_f32(x).to_f32(),
    }
}

/// A row with its numbers.
pub(super) struct Case {
    pub(super) row: Row,
    /// `[q_len, H, D]`.
    pub(super) q: Vec<f32>,
    /// `[kv_len, G, D]`, by absolute position.
    pub(super) k: Vec<f32>,
    /// `[kv_len, G, Dv]`.
    pub(super) v: Vec<f32>,
    /// What slots that nobody owns hold.
    pub(super) junk: f32,
    /// Shuffles the pages.
    pub(super) placement: u64,
}

impl Case {
    pub(super) fn new(row: Row) -> Case {
        let mut random = Random(row.seed);
        let mut fill =
            |n: usize| -> Vec<f32> { (0..n).map(|_| stored(row.dtype, random.normal())).collect() };
        let heads = row.kv_heads * row.group;
        let q = fill(row.q_len * heads * row.d);
        let k = fill(row.kv_len * row.kv_heads * row.d);
        let v = fill(row.kv_len * row.kv_heads * row.dv);
        Case { row, q, k, v, junk: f32::NAN, placement: 7 }
    }

    fn heads(&self) -> usize {
        self.row.kv_heads * self.row.group
    }

    fn pages(&self) -> usize {
        (self.row.kv_len - self.row.kv_offset).div_ceil(self.row.page_size)
    }

    /// The row's page list, and the number of pages of the cache.
    fn page_list(&self) -> (Vec<i32>, usize) {
        let total = self.pages() + 3;
        let mut ids: Vec<i32> = (0..total as i32).collect();
        let mut random = Random(self.placement);
        for i in (1..total).rev() {
            ids.swap(i, random.below(i + 1));
        }
        ids.truncate(self.pages());
        (ids, total)
    }

    /// `[P, S, G, width]` with `padding` elements between heads, junk wherever the row owns nothing.
    fn cache(&self, values: &[f32], width: usize, padding: usize) -> Data {
        let (ids, total) = self.page_list();
        let (s, g) = (self.row.page_size, self.row.kv_heads);
        let mut cache = vec![self.junk; total * s * g * (width + padding)];
        for j in self.row.kv_begin..self.row.kv_len {
            let at = j - self.row.kv_offset;
            let slot = ids[at / s] as usize * s + at % s;
            for head in 0..g {
                let (from, to) = ((j * g + head) * width, (slot * g + head) * (width + padding));
                cache[to..to + width].copy_from_slice(&values[from..from + width]);
            }
        }
        Data::new(self.row.dtype, &cache)
    }

    /// The kernel over the whole row, in tiles of `tokens`, each over the key ranges that `cuts` make.
    pub(super) fn run_cut(&self, isa: Isa, tokens: usize, cuts: &[usize]) -> Output {
        let row = &self.row;
        let (heads, pad) = (self.heads(), 3);
        let (ids, total) = self.page_list();
        let q = Data::new(row.dtype, &self.q);
        let (k, v) = (self.cache(&self.k, row.d, pad), self.cache(&self.v, row.dv, pad));
        let strides = |width: usize| {
            let head = width + pad;
            [row.page_size * row.kv_heads * head, row.kv_heads * head, head, 1]
        };
        let mut out = Output {
            o: vec![0.0; row.q_len * heads * row.dv],
            lse: vec![f32::NEG_INFINITY; row.q_len * heads],
        };
        let mut scratch = vec![0xffff_ffffu32; scratch_words(tokens * row.group, row.d, row.dv)];
        for kv_head in 0..row.kv_heads {
            for t0 in (0..row.q_len).step_by(tokens) {
                let pages = |width| [total, row.page_size, row.kv_heads, width];
                let run = KeyRun {
                    k: Slots::of_pages(k.view(&pages(row.d), &strides(row.d)), kv_head),
                    v: Slots::of_pages(v.view(&pages(row.dv), &strides(row.dv)), kv_head),
                    scales: None,
                    pages: &ids,
                    origin: row.kv_offset as i64,
                    end: row.kv_len,
                };
                let job = TileJob {
                    q: q.view(&[row.q_len, heads, row.d], &[heads * row.d, row.d, 1]),
                    keys: [run; 2],
                    kv_begin: row.kv_begin,
                    kv_len: row.kv_len,
                    t0,
                    tokens: tokens.min(row.q_len - t0),
                    query0: t0,
                    q_pos0: row.kv_len as i64 - row.q_len as i64 + t0 as i64,
                    kv_head,
                    group: row.group,
                    sm_scale: row.sm_scale,
                    causal: row.causal,
                    window_left: row.window_left,
                    logits_soft_cap: row.cap,
                    alibi_slopes: row.slopes.as_deref(),
                    mask: row
                        .mask
                        .as_deref()
                        .map(|words| RowMask { words, words_per_query: row.kv_len.div_ceil(64) }),
                    mods: None,
                };
                let rows = job.tokens * row.group;
                let (mut m, mut l) = (vec![f32::NEG_INFINITY; rows], vec![0.0; rows]);
                let mut o = vec![0.0; rows * row.dv];
                let mut from = 0;
                for &to in cuts.iter().chain([&row.kv_len]) {
                    let mut state = TileState { m: &mut m, l: &mut l, o: &mut o };
                    accumulate(isa, &job, Range { start: from, end: to }, &mut state, &mut scratch);
                    from = to;
                }
                for r in 0..rows {
                    let head = kv_head * row.group + r % row.group;
                    let at = (t0 + r / row.group) * heads + head;
                    if l[r] != 0.0 {
                        out.lse[at] = (m[r] + l[r].log2()) * std::f32::consts::LN_2;
                        for c in 0..row.dv {
                            out.o[at * row.dv + c] = o[r * row.dv + c] / l[r];
                        }
                    }
                }
            }
        }
        out
    }

    /// The kernel as the planner runs it.
    pub(super) fn run(&self, isa: Isa) -> Output {
        self.run_cut(isa, tile_tokens(self.row.q_len, self.row.group), &[])
    }

    fn sees(&self, i: usize, j: usize) -> bool {
        let row = &self.row;
        let position = row.kv_len as i64 - row.q_len as i64 + i as i64;
        let words = row.kv_len.div_ceil(64);
        j >= row.kv_begin
            && (!row.causal || j as i64 <= position)
            && row.window_left.is_none_or(|w| j as i64 >= position - (w.min(1 << 40) as i64))
            && row.mask.as_ref().is_none_or(|mask| mask[i * words + j / 64] >> (j % 64) & 1 == 1)
    }

    /// The same in plain f64 loops.
    pub(super) fn oracle(&self) -> (Vec<f64>, Vec<f64>) {
        let row = &self.row;
        let heads = self.heads();
        let (mut o, mut lse) = (Vec::new(), Vec::new());
        for i in 0..row.q_len {
            for h in 0..heads {
                let g = h / row.group;
                let position = row.kv_len as f64 - row.q_len as f64 + i as f64;
                let mut scores = Vec::new();
                for j in (0..row.kv_len).filter(|&j| self.sees(i, j)) {
                    let dot: f64 = (0..row.d)
                        .map(|c| {
                            f64::from(self.q[(i * heads + h) * row.d + c])
                                * f64::from(self.k[(j * row.kv_heads + g) * row.d + c])
                        })
                        .sum();
                    let mut s = dot * f64::from(row.sm_scale);
                    if row.cap > 0.0 {
                        s = f64::from(row.cap) * (s / f64::from(row.cap)).tanh();
                    }
                    if let Some(slopes) = &row.slopes {
                        s += f64::from(slopes[h]) * (j as f64 - position);
                    }
                    scores.push((j, s));
                }
                let most = scores.iter().fold(f64::NEG_INFINITY, |m, &(_, s)| m.max(s));
                let total: f64 = scores.iter().map(|&(_, s)| (s - most).exp()).sum();
                lse.push(if scores.is_empty() { f64::NEG_INFINITY } else { most + total.ln() });
                for c in 0..row.dv {
                    let sum: f64 = scores
                        .iter()
                        .map(|&(j, s)| {
                            (s - most).exp() / total * f64::from(self.v[(j * row.kv_heads + g) * row.dv + c])
                        })
                        .sum();
                    o.push(sum);
                }
            }
        }
        (o, lse)
    }

    /// Holds the kernel on `isa` against the loops.
    pub(super) fn judge(&self, isa: Isa, what: &str) {
        let got = self.run(isa);
        let (o, lse) = self.oracle();
        // Weights rounded to bf16 cost about as much as storing the output so.
        let dots = isa == Isa::Avx512Bf16 && self.row.dtype == DType::Bf16;
        let bound = if dots { 2.5e-3 } else { 1e-6 };
        let error = relative(&got.o, &o);
        assert!(error < bound, "{what} on {isa}: o is off by {error:e}");
        let error = relative(&got.lse, &lse);
        assert!(error < 1e-6, "{what} on {isa}: lse is off by {error:e}");
    }
}

/// Relative L2 error over what is finite in `want`; infinities must match.
pub(super) fn relative(got: &[f32], want: &[f64]) -> f64 {
    let (mut error, mut norm) = (0.0, 0.0);
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        assert!(!g.is_nan(), "NaN at {i}, {w} expected");
        if w.is_infinite() || g.is_infinite() {
            assert_eq!(f64::from(g), w, "at {i}");
            continue;
        }
        error += (f64::from(g) - w).powi(2);
        norm += w.powi(2);
    }
    if norm == 0.0 { error.sqrt() } else { (error / norm).sqrt() }
}

/// Key ranges that meet at every tile edge below `kv_len`.
pub(super) fn every_edge(kv_len: usize) -> Vec<usize> {
    (KEY_TILE..kv_len).step_by(KEY_TILE).collect()
}
