//! Numbers in memory of a dtype, on a device and back.

use half::{bf16, f16};

use crate::{Buffer, DType, Device, Stream, TensorMut, TensorRef, copy};

use super::Row;

/// A number in -1..1 that follows from its parts.
pub(super) fn noise(parts: &[u64]) -> f32 {
    let mut x = 0x9e37_79b9_7f4a_7c15u64;
    for &part in parts {
        x = (x ^ part).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x ^= x >> 29;
    }
    (x >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// Elements on the host, as bytes.
pub(super) struct Numbers {
    dtype: DType,
    pub(super) bytes: Vec<u8>,
}

impl Numbers {
    /// So many, every byte the same.
    pub(super) fn filled(dtype: DType, len: usize, byte: u8) -> Numbers {
        Numbers { dtype, bytes: vec![byte; len * dtype.size()] }
    }

    pub(super) fn set(&mut self, at: usize, x: f32) {
        let size = self.dtype.size();
        let to = &mut self.bytes[at * size..(at + 1) * size];
        match self.dtype {
            DType::F32 => to.copy_from_slice(&x.to_ne_bytes()),
            DType::Bf16 => to.copy_from_slice(&bf16::from_f32(x).to_ne_bytes()),
            DType::F16 => to.copy_from_slice(&f16::from_f32(x).to_ne_bytes()),
            other => panic!("no float: {other}"),
        }
    }

    /// `width` elements from `at` on.
    pub(super) fn set_all(&mut self, at: usize, width: usize, of: impl Fn(usize) -> f32) {
        (0..width).for_each(|i| self.set(at + i, of(i)));
    }

    /// On a device.
    pub(super) fn on(&self, stream: &Stream) -> Buffer {
        put(stream, &self.bytes)
    }
}

/// Queries `[T, width]` of rows, then of nobody.
pub(super) fn queries(
    dtype: DType,
    rows: &[Row],
    tokens: usize,
    width: usize,
    junk: u8,
    salt: u64,
) -> Numbers {
    let mut to = Numbers::filled(dtype, tokens * width, junk);
    let mut token = 0;
    for row in rows {
        for t in 0..row.q {
            to.set_all(token * width, width, |i| 1.5 * noise(&[salt, row.id, t as u64, i as u64]));
            token += 1;
        }
    }
    to
}

/// Numbers as a device's memory.
pub(crate) fn put(stream: &Stream, bytes: &[u8]) -> Buffer {
    let mut buffer = Buffer::zeroed_on(stream.device(), bytes.len().max(1)).unwrap();
    let to = buffer.tensor_mut(0, DType::U8, &[bytes.len()]).unwrap();
    copy(stream, TensorRef::from_slice(bytes, &[bytes.len()]).unwrap(), to).unwrap();
    buffer
}

/// The first bytes of a device's memory, once the stream has come there.
pub(crate) fn take(stream: &Stream, buffer: &Buffer, len: usize) -> Vec<u8> {
    let mut bytes = vec![0u8; len];
    let from = buffer.tensor(0, DType::U8, &[len]).unwrap();
    copy(stream, from, TensorMut::from_slice(&mut bytes, &[len]).unwrap()).unwrap();
    bytes
}

/// A device's first `count` elements, once the stream has come there.
pub(crate) fn take_all<T: bytemuck::Pod>(stream: &Stream, buffer: &Buffer, count: usize) -> Vec<T> {
    let bytes = take(stream, buffer, count * size_of::<T>());
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

/// Bytes as numbers.
pub(super) fn floats(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let of = |bytes: &[u8]| match dtype {
        DType::F32 => f32::from_ne_bytes(bytes.try_into().expect("4 bytes")),
        DType::Bf16 => bf16::from_ne_bytes(bytes.try_into().expect("2 bytes")).to_f32(),
        DType::F16 => f16::from_ne_bytes(bytes.try_into().expect("2 bytes")).to_f32(),
        other => panic!("no float: {other}"),
    };
    bytes.chunks_exact(dtype.size()).map(of).collect()
}

/// Outputs `[T, width]` and log-sum-exps `[T, heads]` of a run on a device, with what lies around them.
pub(super) struct Outputs {
    dtype: DType,
    width: usize,
    heads: usize,
    tokens: usize,
    o: Buffer,
    lse: Buffer,
}

/// Elements before and after outputs that nobody may write.
const GUARD: usize = 64;
const GUARDED: u8 = 0xa5;

impl Outputs {
    pub(super) fn new(
        stream: &Stream,
        dtype: DType,
        [tokens, heads, width]: [usize; 3],
        junk: u8,
    ) -> Outputs {
        let guarded = |bytes: usize| {
            let mut all = vec![GUARDED; bytes + 8 * GUARD];
            all[4 * GUARD..4 * GUARD + bytes].fill(junk);
            put(stream, &all)
        };
        let o = guarded(tokens * heads * width * dtype.size());
        let lse = guarded(tokens * heads * 4);
        Outputs { dtype, width, heads, tokens, o, lse }
    }

    /// Views of outputs and log-sum-exps of other shapes of as many elements.
    pub(super) fn views(&mut self, o: &[usize], lse: &[usize]) -> (TensorMut<'_>, TensorMut<'_>) {
        let o = self.o.tensor_mut(4 * GUARD, self.dtype, o).unwrap();
        (o, self.lse.tensor_mut(4 * GUARD, DType::F32, lse).unwrap())
    }

    /// The bytes of each token: outputs, then log-sum-exps. Guards must be as they were.
    pub(super) fn tokens(&self, stream: &Stream) -> Vec<Vec<u8>> {
        let (width, heads) = (self.heads * self.width * self.dtype.size(), self.heads * 4);
        let read = |buffer: &Buffer, bytes: usize| {
            let all = take(stream, buffer, bytes + 8 * GUARD);
            let (before, rest) = all.split_at(4 * GUARD);
            let (inside, after) = rest.split_at(bytes);
            assert!(before.iter().chain(after).all(|&byte| byte == GUARDED), "a guard was written");
            inside.to_vec()
        };
        let (o, lse) = (read(&self.o, self.tokens * width), read(&self.lse, self.tokens * heads));
        o.chunks_exact(width).zip(lse.chunks_exact(heads)).map(|(o, lse)| [o, lse].concat()).collect()
    }

    /// Whether a token's bytes are those of a query that sees nothing: 0 and `-inf`.
    pub(super) fn is_nothing(&self, token: &[u8]) -> bool {
        let (o, lse) = token.split_at(self.heads * self.width * self.dtype.size());
        o.iter().all(|&byte| byte == 0) && floats(DType::F32, lse).iter().all(|&lse| lse == f32::NEG_INFINITY)
    }

    /// Whether a token's bytes hold no NaN.
    pub(super) fn is_sane(&self, token: &[u8]) -> bool {
        let (o, lse) = token.split_at(self.heads * self.width * self.dtype.size());
        let mut all = floats(self.dtype, o).into_iter().chain(floats(DType::F32, lse));
        all.all(|x| !x.is_nan())
    }

    /// What each row's tokens are, padding checked and left out.
    pub(super) fn rows(&self, stream: &Stream, rows: &[Row]) -> Vec<super::Bits> {
        let tokens = self.tokens(stream);
        let mut at = 0;
        let bits = rows
            .iter()
            .map(|row| {
                let own = &tokens[at..at + row.q];
                assert!(own.iter().all(|token| self.is_sane(token)), "NaN in {row:?}");
                let nothing = row.kv == 0;
                assert!(!nothing || own.iter().all(|token| self.is_nothing(token)), "{row:?}");
                at += row.q;
                super::Bits(own.concat())
            })
            .collect();
        assert!(tokens[at..].iter().all(|token| self.is_nothing(token)), "a padded token yields something");
        bits
    }
}

/// Where rows' pages lie: each row's ids, of a pool of twice as many and a few more.
pub(super) struct Pages {
    pub(super) size: usize,
    pub(super) pool: usize,
    pub(super) indptr: Vec<i32>,
    pub(super) indices: Vec<i32>,
}

impl Pages {
    pub(super) fn of(rows: &[Row], keys: impl Fn(&Row) -> usize, size: usize, place: u64) -> Pages {
        let mut indptr = vec![0];
        rows.iter().for_each(|row| indptr.push(indptr[indptr.len() - 1] + keys(row).div_ceil(size) as i32));
        let used = indptr[rows.len()] as usize;
        let pool = 2 * used + 3;
        let mut ids: Vec<i32> = (0..pool as i32).collect();
        ids.sort_by_key(|&id| noise(&[77, place, id as u64]).to_bits());
        ids.truncate(used);
        Pages { size, pool, indptr, indices: ids }
    }

    /// The slot of a row's key.
    pub(super) fn slot(&self, row: usize, key: usize) -> usize {
        let page = self.indices[self.indptr[row] as usize + key / self.size] as usize;
        page * self.size + key % self.size
    }

    pub(super) fn last(&self, rows: &[Row]) -> Vec<i32> {
        rows.iter().map(|row| if row.kv == 0 { 0 } else { ((row.kv - 1) % self.size + 1) as i32 }).collect()
    }

    /// A pool of `width` elements a slot, junk where no row's key is.
    pub(super) fn fill(
        &self,
        dtype: DType,
        rows: &[Row],
        keys: impl Fn(&Row) -> usize,
        width: usize,
        junk: u8,
        salt: u64,
    ) -> Numbers {
        let mut pool = Numbers::filled(dtype, self.pool * self.size * width, junk);
        for (at, row) in rows.iter().enumerate() {
            for key in 0..keys(row) {
                let slot = self.slot(at, key);
                pool.set_all(slot * width, width, |i| noise(&[salt, row.id, key as u64, i as u64]));
            }
        }
        pool
    }
}

/// Where each row's queries start.
pub(super) fn indptr(rows: &[Row], of: impl Fn(&Row) -> usize) -> Vec<i32> {
    let mut at = 0;
    let ends = rows.iter().map(|row| {
        at += of(row) as i32;
        at
    });
    std::iter::once(0).chain(ends).collect()
}

/// Scratch of a device, every byte the same.
pub(super) fn scratch(stream: &Stream, bytes: usize, junk: u8) -> Buffer {
    debug_assert!(stream.device() != Device::Cpu);
    put(stream, &vec![junk; bytes.max(1)])
}
