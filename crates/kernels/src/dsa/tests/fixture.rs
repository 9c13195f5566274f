//! A batch of requests with their keys in shuffled pages, NaN wherever nobody may look.

use half::{bf16, f16};

use crate::dsa::{self, KeyFormat, ScoresParams, SelectParams, f32_to_e4m3};
use crate::reference::{self, dsa_select::DsaSelect};
use crate::{Buffer, DType, Error, Stream, TensorMut, TensorRef};

pub(super) const FORMATS: [KeyFormat; 4] = [KeyFormat::F32, KeyFormat::Bf16, KeyFormat::F16, KeyFormat::Fp8];
pub(super) const FLOATS: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

/// Numbers that are the same in every run.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb) >> 20
    }

    pub(super) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// -1..1.
    pub(super) fn number(&mut self) -> f32 {
        (self.next() & 0xffff) as f32 / 32768.0 - 1.0
    }
}

/// One request: its keys as numbers, and slots of its first page before them.
#[derive(Clone)]
pub(super) struct Request {
    pub(super) keys: Vec<f32>,
    pub(super) page_start: usize,
}

#[derive(Clone)]
pub(super) struct Batch {
    pub(super) heads: usize,
    pub(super) width: usize,
    pub(super) page_size: usize,
    pub(super) q_dtype: DType,
    pub(super) format: KeyFormat,
    pub(super) requests: Vec<Request>,
    /// (request or -1, position).
    pub(super) rows: Vec<(i32, i32)>,
    /// `[T, Hi, Di]`.
    pub(super) q: Vec<f32>,
    /// `[T, Hi]`.
    pub(super) weights: Vec<f32>,
    pub(super) topk: usize,
    pub(super) workers: usize,
    /// Seed of where pages lie.
    pub(super) place: u64,
}

/// `x` as a dtype stores it.
pub(super) fn rounded(x: f32, dtype: DType) -> f32 {
    match dtype {
        DType::Bf16 => bf16::from_f32(x).to_f32(),
        DType::F16 => f16::from_f32(x).to_f32(),
        _ => x,
    }
}

/// Numbers in memory of a dtype.
pub(super) fn stored(dtype: DType, numbers: &[f32]) -> Buffer {
    let mut buffer = Buffer::for_tensor(dtype, &[numbers.len()]).unwrap();
    let mut view = buffer.tensor_mut(0, dtype, &[numbers.len()]).unwrap();
    let fill = |view: &mut TensorMut<'_>| match dtype {
        DType::F32 => view.as_mut_slice::<f32>().unwrap().copy_from_slice(numbers),
        DType::Bf16 => {
            let to = view.as_mut_slice::<bf16>().unwrap();
            to.iter_mut().zip(numbers).for_each(|(to, &x)| *to = bf16::from_f32(x));
        }
        _ => {
            let to = view.as_mut_slice::<f16>().unwrap();
            to.iter_mut().zip(numbers).for_each(|(to, &x)| *to = f16::from_f32(x));
        }
    };
    fill(&mut view);
    buffer
}

/// A key's bytes.
fn encoded(format: KeyFormat, key: &[f32]) -> Vec<u8> {
    match format {
        KeyFormat::F32 => key.iter().flat_map(|x| x.to_ne_bytes()).collect(),
        KeyFormat::Bf16 => key.iter().flat_map(|&x| bf16::from_f32(x).to_ne_bytes()).collect(),
        KeyFormat::F16 => key.iter().flat_map(|&x| f16::from_f32(x).to_ne_bytes()).collect(),
        KeyFormat::Fp8 => {
            let scale = fp8_scale(key);
            let codes = key.iter().map(|x| f32_to_e4m3(x / scale));
            codes.chain(scale.to_ne_bytes()).collect()
        }
    }
}

/// That of [`dsa::quantise_keys`]; but a power of two for whole numbers, which then stay whole up to 8.
fn fp8_scale(key: &[f32]) -> f32 {
    let largest = key.iter().fold(0f32, |a, x| a.max(x.abs()));
    if largest == 0.0 || !largest.is_finite() {
        1.0
    } else if key.iter().all(|x| x.fract() == 0.0) {
        2f32.powi(largest.log2().floor() as i32 - 6)
    } else {
        largest / 448.0
    }
}

/// What the key's bytes say.
pub(super) fn decoded(format: KeyFormat, key: &[f32]) -> Vec<f32> {
    match format {
        KeyFormat::Fp8 => {
            let bytes = encoded(format, key);
            (0..key.len()).map(|lane| dsa::dequantise_key(&bytes, key.len(), lane)).collect()
        }
        _ => key.iter().map(|&x| rounded(x, format.dtype())).collect(),
    }
}

/// Pages and tables of a batch, as a call takes them.
pub(super) struct Pool {
    pub(super) keys: Buffer,
    pub(super) pages: usize,
    pub(super) kv_indptr: Vec<i32>,
    pub(super) kv_indices: Vec<i32>,
    pub(super) page_start: Vec<i32>,
    pub(super) kv_lens: Vec<i32>,
}

impl Batch {
    /// Random keys, queries and weights; `requests` are (keys, slots before them).
    pub(super) fn random(seed: u64, heads: usize, width: usize, requests: &[(usize, usize)]) -> Batch {
        let mut random = Random(seed);
        let requests: Vec<Request> = requests
            .iter()
            .map(|&(len, page_start)| Request {
                keys: (0..len * width).map(|_| random.number()).collect(),
                page_start,
            })
            .collect();
        Batch {
            heads,
            width,
            page_size: 16,
            q_dtype: DType::F32,
            format: KeyFormat::F32,
            requests,
            rows: Vec::new(),
            q: Vec::new(),
            weights: Vec::new(),
            topk: 8,
            workers: 1,
            place: seed,
        }
    }

    /// Adds a row with random queries and weights of either sign.
    pub(super) fn row(&mut self, request: i32, position: i32) -> &mut Batch {
        let mut random = Random(0x5eed ^ (self.rows.len() as u64) << 32 ^ position as u64);
        self.rows.push((request, position));
        self.q.extend((0..self.heads * self.width).map(|_| random.number()));
        self.weights.extend((0..self.heads).map(|_| random.number()));
        self
    }

    /// Whole numbers of small size instead: every sum is exact in f32 and ties abound.
    pub(super) fn whole(mut self) -> Batch {
        let round = |x: &mut f32| *x = (*x * 3.0).round();
        self.q.iter_mut().for_each(round);
        self.weights.iter_mut().for_each(round);
        self.requests.iter_mut().for_each(|request| request.keys.iter_mut().for_each(round));
        self
    }

    pub(super) fn pool(&self) -> Pool {
        let per_request: Vec<usize> = (self.requests.iter())
            .map(|r| (r.keys.len() / self.width + r.page_start).div_ceil(self.page_size))
            .collect();
        let pages = per_request.iter().sum::<usize>() + 3;
        let mut ids: Vec<i32> = (0..pages as i32).collect();
        let mut random = Random(self.place);
        (1..pages).rev().for_each(|i| ids.swap(i, random.below(i + 1)));
        let bytes = self.format.bytes(self.width);
        let width = self.format.width(self.width);
        let mut keys = Buffer::for_tensor(self.format.dtype(), &[pages * self.page_size * width]).unwrap();
        let len = keys.len();
        let mut memory = keys.tensor_mut(0, DType::U8, &[len]).unwrap();
        let memory = memory.as_mut_slice::<u8>().unwrap();
        memory.fill(0xff);
        let (mut kv_indptr, mut at) = (vec![0], 0);
        for (request, count) in self.requests.iter().zip(per_request) {
            for (position, key) in request.keys.chunks(self.width).enumerate() {
                let offset = request.page_start + position;
                let page = ids[at + offset / self.page_size] as usize;
                let slot = page * self.page_size + offset % self.page_size;
                memory[slot * bytes..][..bytes].copy_from_slice(&encoded(self.format, key));
            }
            at += count;
            kv_indptr.push(at as i32);
        }
        ids.truncate(at);
        Pool {
            keys,
            pages,
            kv_indptr,
            kv_indices: ids,
            page_start: self.requests.iter().map(|r| r.page_start as i32).collect(),
            kv_lens: self.requests.iter().map(|r| (r.keys.len() / self.width) as i32).collect(),
        }
    }

    fn columns(&self) -> (Vec<i32>, Vec<i32>) {
        self.rows.iter().copied().unzip()
    }

    /// The selection `[T, K]`, under a change to the parameters.
    pub(super) fn select_with(
        &self,
        change: impl FnOnce(&mut SelectParams<'_>),
    ) -> Result<Vec<i32>, (Error, Vec<i32>)> {
        self.run(|mut params| {
            change(&mut params);
            dsa::select(&Stream::cpu(), params)
        })
    }

    /// The selection `[T, K]`, or what was refused and what had been written, by a call of the caller's.
    pub(super) fn run(
        &self,
        call: impl FnOnce(SelectParams<'_>) -> crate::Result<()>,
    ) -> Result<Vec<i32>, (Error, Vec<i32>)> {
        let pool = self.pool();
        let (row_request, positions) = self.columns();
        let t = self.rows.len();
        let (q, w) = (stored(self.q_dtype, &self.q), stored(DType::F32, &self.weights));
        let most = pool.kv_lens.iter().copied().max().unwrap_or(0) as usize;
        let bytes = dsa::select_workspace_bytes(t, most, self.heads, self.width, self.topk, self.workers);
        let mut workspace = vec![0xffu8; bytes];
        let mut out = vec![-7; t * self.topk];
        let params = SelectParams {
            q: q.tensor(0, self.q_dtype, &[t, self.heads, self.width]).unwrap(),
            weights: w.tensor(0, DType::F32, &[t, self.heads]).unwrap(),
            keys: self.keys(&pool),
            format: self.format,
            row_request: &row_request,
            positions: &positions,
            kv_indptr: &pool.kv_indptr,
            kv_indices: &pool.kv_indices,
            page_start: &pool.page_start,
            kv_lens: &pool.kv_lens,
            topk: self.topk,
            selection: TensorMut::from_slice(&mut out, &[t, self.topk]).unwrap(),
            workspace: TensorMut::from_slice(&mut workspace, &[bytes]).unwrap(),
            workers: self.workers,
        };
        match call(params) {
            Ok(()) => Ok(out),
            Err(error) => Err((error, out)),
        }
    }

    pub(super) fn select(&self) -> Vec<i32> {
        self.select_with(|_| {}).unwrap()
    }

    fn keys<'a>(&self, pool: &'a Pool) -> TensorRef<'a> {
        let shape = [pool.pages, self.page_size, self.format.width(self.width)];
        pool.keys.tensor(0, self.format.dtype(), &shape).unwrap()
    }

    /// Scores `[T, N]`; how wide they are.
    pub(super) fn scores(&self) -> (Vec<f32>, usize) {
        let pool = self.pool();
        let (row_request, positions) = self.columns();
        let t = self.rows.len();
        let (q, w) = (stored(self.q_dtype, &self.q), stored(DType::F32, &self.weights));
        let width = pool.kv_lens.iter().copied().max().unwrap_or(0) as usize;
        let bytes = dsa::scores_workspace_bytes(t, width, self.heads, self.width, self.workers);
        let mut workspace = vec![0xffu8; bytes];
        let mut out = vec![f32::NAN; t * width];
        let params = ScoresParams {
            q: q.tensor(0, self.q_dtype, &[t, self.heads, self.width]).unwrap(),
            weights: w.tensor(0, DType::F32, &[t, self.heads]).unwrap(),
            keys: self.keys(&pool),
            format: self.format,
            row_request: &row_request,
            positions: &positions,
            kv_indptr: &pool.kv_indptr,
            kv_indices: &pool.kv_indices,
            page_start: &pool.page_start,
            kv_lens: &pool.kv_lens,
            scores: TensorMut::from_slice(&mut out, &[t, width]).unwrap(),
            workspace: TensorMut::from_slice(&mut workspace, &[bytes]).unwrap(),
            workers: self.workers,
        };
        dsa::scores(&Stream::cpu(), params).unwrap();
        (out, width)
    }

    /// The oracle's answer over what the stored numbers say; rows of no request are left out.
    pub(super) fn oracle(&self) -> reference::dsa_select::Selection {
        let q: Vec<f32> = self.q.iter().map(|&x| rounded(x, self.q_dtype)).collect();
        let keys: Vec<f32> = (self.requests.iter())
            .flat_map(|r| r.keys.chunks(self.width).flat_map(|key| decoded(self.format, key)))
            .collect();
        let mut key_indptr = vec![0i32];
        for request in &self.requests {
            key_indptr.push(key_indptr[key_indptr.len() - 1] + (request.keys.len() / self.width) as i32);
        }
        let (row_request, positions) = self.columns();
        reference::dsa_select(&DsaSelect {
            q: &q,
            weights: &self.weights,
            keys: &keys,
            key_indptr: &key_indptr,
            row_request: &row_request,
            positions: &positions,
            index_n_heads: self.heads,
            index_head_dim: self.width,
            topk: self.topk,
        })
        .unwrap()
    }
}

/// The pick of a row by a plain stable sort.
pub(super) fn sorted(scores: &[f32], topk: usize) -> Vec<i32> {
    let mut out = vec![0; topk];
    let view = TensorRef::from_slice(scores, &[1, scores.len()]).unwrap();
    let to = TensorMut::from_slice(&mut out, &[1, topk]).unwrap();
    dsa::select_topk_causal(view, &[scores.len() as i32 - 1], topk, to).unwrap();
    out
}
