//! Index keys in buffers of their own: the plain path, which needs no pages.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use mstar_core::RequestId;
use mstar_core::attend::IndexFormat;
use mstar_kernels::{Buffer, DType, Device, TensorRef};

use crate::encode::{encode, expect_keys, key_format};
use crate::{Error, Result};

/// Growing buffers of index keys, one for each request and layer, in order of position.
///
/// Position 0 of a request is the first key of each of its buffers, and no position is left out. A step that was not kept
/// (it was aborted, or said `commit: false`) is simply run again: see [`IndexKeyStore::append`].
#[derive(Debug)]
pub struct IndexKeyStore {
    format: IndexFormat,
    index_head_dim: usize,
    keys: HashMap<RequestId, BTreeMap<usize, Keys>>,
}

/// One buffer: room for more keys than there are.
#[derive(Debug)]
struct Keys {
    buffer: Buffer,
    capacity: usize,
    len: usize,
}

impl IndexKeyStore {
    /// An empty store of keys of `index_head_dim` lanes, kept in `format`.
    ///
    /// # Errors
    /// A width that the format cannot hold.
    pub fn new(format: IndexFormat, index_head_dim: usize) -> Result<IndexKeyStore> {
        let fp8 = format == IndexFormat::Fp8;
        if index_head_dim == 0 || (fp8 && !index_head_dim.is_multiple_of(4)) {
            let why = if fp8 { "fp8 keys have a multiple of 4 lanes" } else { "at least one lane" };
            let (name, got) = ("index_head_dim", index_head_dim.to_string());
            return Err(mstar_kernels::Error::Parameter { name, why: why.into(), got }.into());
        }
        key_format(format)?;
        Ok(IndexKeyStore { format, index_head_dim, keys: HashMap::new() })
    }

    /// How a key is stored.
    pub fn format(&self) -> IndexFormat {
        self.format
    }

    /// Stores one chunk of keys `[n, Di]` (f32, bf16 or f16) at positions `start_pos..start_pos + n` of a request's layer.
    ///
    /// At the stored length they are appended. Before it, they take the place of what is stored from `start_pos` on, all of
    /// which is forgotten: a chunk that is run again stands as if it had been run once, and no key behind it survives from a
    /// step that was not kept. Behind it they are refused, since a key would be missing.
    ///
    /// # Errors
    /// [`Error::Gap`]; keys of another shape or dtype; memory that cannot be had. The store is then as it was.
    pub fn append(
        &mut self,
        request: &RequestId,
        layer: usize,
        keys: TensorRef<'_>,
        start_pos: usize,
    ) -> Result<()> {
        expect_keys(&keys, None, self.index_head_dim, Device::Cpu)?;
        let stored = self.tokens(request, layer);
        if start_pos > stored {
            return Err(Error::Gap { request: request.clone(), layer, start_pos, stored });
        }
        let (n, width, dtype) = (keys.shape()[0], self.width(), self.format.dtype());
        self.reserve(request, layer, start_pos.saturating_add(n))?;
        let found = self.keys.get_mut(request).and_then(|layers| layers.get_mut(&layer));
        let found = found.expect("room was just made for it");
        let at = start_pos * width * dtype.size();
        encode(keys, self.format, found.buffer.tensor_mut(at, dtype, &[n, width])?)?;
        found.len = start_pos + n;
        Ok(())
    }

    /// Makes room for `tokens` keys, so that appending up to there allocates nothing. Stored keys stay.
    ///
    /// # Errors
    /// Memory that cannot be had; the store is then as it was.
    pub fn reserve(&mut self, request: &RequestId, layer: usize, tokens: usize) -> Result<()> {
        let (width, dtype) = (self.width(), self.format.dtype());
        match self.keys.get_mut(request).and_then(|layers| layers.get_mut(&layer)) {
            Some(found) if found.capacity >= tokens => {}
            Some(found) => {
                let capacity = tokens.max(found.capacity.saturating_mul(2));
                let mut buffer = Buffer::for_tensor(dtype, &[capacity, width])?;
                let used = found.len * width * dtype.size();
                let old = found.buffer.tensor(0, DType::U8, &[used])?;
                let mut new = buffer.tensor_mut(0, DType::U8, &[used])?;
                let both = new.as_mut_slice::<u8>().zip(old.as_slice::<u8>());
                let (new, old) = both.expect("contiguous bytes on the CPU");
                new.copy_from_slice(old);
                (found.buffer, found.capacity) = (buffer, capacity);
            }
            None => {
                let buffer = Buffer::for_tensor(dtype, &[tokens, width])?;
                let keys = Keys { buffer, capacity: tokens, len: 0 };
                self.keys.entry(request.clone()).or_default().insert(layer, keys);
            }
        }
        Ok(())
    }

    /// The first `length` stored keys, `[length, W]` as stored: a view, not a copy.
    ///
    /// # Errors
    /// [`Error::History`] when fewer are stored: a query never scores more than was appended.
    pub fn history(&self, request: &RequestId, layer: usize, length: usize) -> Result<TensorRef<'_>> {
        let (stored, width, dtype) = (self.tokens(request, layer), self.width(), self.format.dtype());
        if length > stored {
            return Err(Error::History { request: request.clone(), layer, length, stored });
        }
        match self.found(request, layer) {
            Some(found) => Ok(found.buffer.tensor(0, dtype, &[length, width])?),
            None => Ok(empty(dtype, width)?),
        }
    }

    /// As [`IndexKeyStore::history`], as one page `[1, length, W]`: what the selection reads.
    pub(crate) fn page(&self, request: &RequestId, layer: usize, length: usize) -> Result<TensorRef<'_>> {
        self.history(request, layer, length)?;
        match self.found(request, layer) {
            Some(found) => Ok(found.buffer.tensor(0, self.format.dtype(), &[1, length, self.width()])?),
            None => Ok(empty(self.format.dtype(), self.width())?),
        }
    }

    /// Drops all of a request's buffers. Idempotent: a request may be retired that never stored a key.
    pub fn evict(&mut self, request: &RequestId) {
        self.keys.remove(request);
    }

    /// Keys stored for a request's layer; 0 when there is none.
    pub fn tokens(&self, request: &RequestId, layer: usize) -> usize {
        self.found(request, layer).map_or(0, |found| found.len)
    }

    /// Requests that have buffers.
    pub fn tracked_requests(&self) -> BTreeSet<RequestId> {
        self.keys.keys().cloned().collect()
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.keys.values().flat_map(BTreeMap::values).map(|keys| keys.buffer.len()).sum()
    }

    fn found(&self, request: &RequestId, layer: usize) -> Option<&Keys> {
        self.keys.get(request)?.get(&layer)
    }

    fn width(&self) -> usize {
        self.format.width(self.index_head_dim)
    }
}

/// No key: a view of nothing, `[0, W]`.
fn empty(dtype: DType, width: usize) -> mstar_kernels::Result<TensorRef<'static>> {
    match dtype {
        DType::F32 => TensorRef::from_slice::<f32>(&[], &[0, width]),
        DType::Bf16 => TensorRef::from_slice::<half::bf16>(&[], &[0, width]),
        DType::F16 => TensorRef::from_slice::<half::f16>(&[], &[0, width]),
        _ => TensorRef::from_slice::<u8>(&[], &[0, width]),
    }
}

#[cfg(test)]
mod tests;
