//! Prefixes gathered out of pages: what lies where, for whom, and when it may be served again.
//!
//! Each plan label in each slot has one buffer, `[L, 2, U, G, D]` (a layer's keys, then its values), at an address that
//! stays. A plan's prefixes lie in it in the order of its rows. One is served again only where the very same stream, at
//! the very same generation, lies at the very same place; one that has grown since is gathered from where it ended.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use mstar_core::attend::pages::EagerSlotKey;
use mstar_core::kv::{KvPlan, LayerView, PagedKv};
use mstar_core::{Error, Label, PlanId, RequestId, ResourceName, Result, StepSerial};
use mstar_kernels::cpu::gather::gather_pages;
use mstar_kernels::mutant::planted;
use mstar_kernels::{Buffer, Stream, TensorRef};

use crate::Geometry;

/// How many prefixes, each of a stream in a plan, were gathered and how many were there already.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GatherCounts {
    /// Gathered whole, every layer.
    pub gathered: u64,
    /// Gathered from where the one at hand ended.
    pub extended: u64,
    /// Served as they were.
    pub kept: u64,
    /// Tokens gathered, each once for all its layers.
    pub tokens: u64,
}

/// A prefix in a buffer.
#[derive(Clone, Debug)]
struct Held {
    request: RequestId,
    label: Label,
    generation: u64,
    /// Its first token in the buffer.
    start: usize,
    len: usize,
    /// The step whose plan gathered it: what an undone step gathered is not served again.
    by: StepSerial,
}

/// A prefix to gather.
#[derive(Debug)]
struct Wanted {
    held: Held,
    /// The row, whose pages are the plan's.
    row: usize,
    /// Tokens that are there already.
    from: usize,
}

/// The buffer of one plan label in one slot.
#[derive(Debug)]
pub(super) struct Memory {
    stream: Stream,
    buffer: Buffer,
    geometry: Geometry,
    /// `U`: tokens that a layer has room for.
    tokens: usize,
}

impl Memory {
    fn bytes(geometry: &Geometry, layers: usize, tokens: usize) -> mstar_kernels::Result<usize> {
        let Geometry { num_kv_heads: g, head_dim_qk: d, kv_dtype, .. } = *geometry;
        let shape = [layers, 2, tokens, g, d];
        let bytes = shape.iter().try_fold(kv_dtype.size(), |n, &extent| n.checked_mul(extent));
        bytes.ok_or_else(|| mstar_kernels::Error::Overflow { shape: shape.to_vec() })
    }

    fn new(
        stream: Stream,
        geometry: &Geometry,
        layers: usize,
        tokens: usize,
    ) -> mstar_kernels::Result<Memory> {
        let buffer = Buffer::zeroed_on(stream.device(), Memory::bytes(geometry, layers, tokens)?);
        let buffer = buffer.map_err(|why| why.wanted_for("gathered prefixes"))?;
        Ok(Memory { stream, buffer, geometry: *geometry, tokens })
    }

    /// Bytes before keys (`which` 0) or values (1) of a layer, and their shape.
    fn part(&self, layer: usize, which: usize) -> (usize, [usize; 3]) {
        let Geometry { num_kv_heads: g, head_dim_qk: d, kv_dtype, .. } = self.geometry;
        ((layer * 2 + which) * self.tokens * g * d * kv_dtype.size(), [self.tokens, g, d])
    }

    /// Keys (`which` 0) or values (1) of a layer, `[U, G, D]`.
    fn view(&self, layer: usize, which: usize) -> mstar_kernels::Result<TensorRef<'_>> {
        let (offset, shape) = self.part(layer, which);
        self.buffer.tensor(offset, self.geometry.kv_dtype, &shape)
    }

    /// Keys and values of a layer, each `[U, G, D]`.
    pub(super) fn layer(&self, layer: usize) -> mstar_kernels::Result<[TensorRef<'_>; 2]> {
        Ok([self.view(layer, 0)?, self.view(layer, 1)?])
    }

    /// Copies `wanted`'s tokens of one layer out of its pages.
    fn gather(
        &mut self,
        layer: usize,
        kv: [TensorRef<'_>; 2],
        pages: &[i32],
        wanted: &Wanted,
    ) -> mstar_kernels::Result<()> {
        let Wanted { held: Held { start, len, .. }, from, .. } = *wanted;
        for (which, cache) in kv.into_iter().enumerate() {
            let (offset, shape) = self.part(layer, which);
            let all = self.buffer.tensor_mut(offset, self.geometry.kv_dtype, &shape)?;
            gather_pages(&self.stream, cache, pages, from, all.narrow(0, start + from, len - from)?)?;
        }
        Ok(())
    }
}

/// A place: what its buffer holds, and the buffer under a lock of its own, which is held over copies.
#[derive(Debug)]
struct Place {
    held: Vec<Held>,
    /// As [`Memory`]'s.
    tokens: usize,
    memory: Arc<Mutex<Memory>>,
}

#[derive(Debug, Default)]
struct Places {
    by_key: HashMap<EagerSlotKey, Place>,
    counts: GatherCounts,
}

/// All of a resource's gathered prefixes.
#[derive(Debug)]
pub(super) struct Prefixes {
    stream: Stream,
    name: ResourceName,
    geometry: Geometry,
    layers: usize,
    /// Tokens that each place has room for from the first.
    foreseen: usize,
    places: Mutex<Places>,
}

impl Prefixes {
    /// None yet. Gathers are enqueued on `stream`, and the buffers lie on its device.
    pub(super) fn new(
        stream: Stream,
        name: ResourceName,
        geometry: Geometry,
        layers: usize,
        foreseen: usize,
    ) -> Prefixes {
        Prefixes { stream, name, geometry, layers, foreseen, places: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn said<T>(&self, result: mstar_kernels::Result<T>) -> Result<T> {
        result.map_err(|error| Error::backend(self.name.as_str(), error))
    }

    /// Sees to it that the place of `id` holds the prefixes of `plan`, packed in the order of its rows. A prefix is kept when
    /// `keep` says so of its request, and nothing of its stream has changed.
    ///
    /// # Errors
    /// Memory that cannot be had; a cache of another layout.
    pub(super) fn gather(
        &self,
        id: &PlanId,
        plan: &KvPlan,
        kv: &dyn PagedKv,
        keep: impl Fn(&RequestId) -> bool,
    ) -> Result<()> {
        let key = EagerSlotKey::from(id);
        let (wanted, memory) = self.wanted(&key, id.serial, plan, keep)?;
        if wanted.is_empty() {
            return Ok(());
        }
        {
            let mut memory = held_by_nobody(&memory, "Resource::plan")?;
            for layer in 0..self.layers {
                let LayerView::Nhd { k, v } = kv.layer(layer)? else {
                    let why = format!("the layers of {} are not keys and values a head", kv.name());
                    return Err(Error::Step { resource: self.name.clone(), why });
                };
                for prefix in &wanted {
                    let (begin, end) = (plan.kv_indptr[prefix.row], plan.kv_indptr[prefix.row + 1]);
                    let pages = &plan.kv_indices[begin as usize..end as usize];
                    self.said(memory.gather(layer, [k, v], pages, prefix))?;
                }
            }
        }
        if let Some(place) = self.lock().by_key.get_mut(&key) {
            place.held.extend(wanted.into_iter().map(|prefix| prefix.held));
        }
        Ok(())
    }

    /// Leaves in the place what is served as it is, and says what else is wanted there.
    fn wanted(
        &self,
        key: &EagerSlotKey,
        serial: StepSerial,
        plan: &KvPlan,
        keep: impl Fn(&RequestId) -> bool,
    ) -> Result<(Vec<Wanted>, Arc<Mutex<Memory>>)> {
        let mut places = self.lock();
        let Places { by_key, counts } = &mut *places;
        let total: usize = plan.rows.iter().map(|row| row.kv_len.saturating_sub(row.q_len)).sum();
        let room = by_key.get(key).map(|place| place.tokens);
        if room.is_none_or(|room| room < total) {
            let tokens = total.max(self.foreseen).max(room.map_or(0, |room| room.saturating_mul(2)));
            let memory = self.said(Memory::new(self.stream, &self.geometry, self.layers, tokens))?;
            let memory = Arc::new(Mutex::new(memory));
            by_key.insert(key.clone(), Place { held: Vec::new(), tokens, memory });
        }
        let place = by_key.get_mut(key).expect("it is there, or was made");
        let had = std::mem::take(&mut place.held);
        let (mut wanted, mut start) = (Vec::new(), 0);
        for (index, row) in plan.rows.iter().enumerate() {
            let len = row.kv_len.saturating_sub(row.q_len);
            if len == 0 {
                continue;
            }
            let same = had.iter().find(|held| {
                let moved = held.generation != row.generation && !planted("dense-stale-prefix");
                held.start == start
                    && !moved
                    && held.request == row.request
                    && held.label == row.label
                    && (held.len <= len)
                    && keep(&row.request)
            });
            let prefix = Held {
                request: row.request.clone(),
                label: row.label.clone(),
                generation: row.generation,
                start,
                len,
                by: serial,
            };
            match same {
                Some(held) if held.len == len || planted("dense-grown-prefix-kept") => {
                    counts.kept += 1;
                    place.held.push(held.clone());
                }
                Some(held) => {
                    counts.extended += 1;
                    counts.tokens += (len - held.len) as u64;
                    wanted.push(Wanted { held: prefix, row: index, from: held.len });
                }
                None => {
                    counts.gathered += 1;
                    counts.tokens += len as u64;
                    wanted.push(Wanted { held: prefix, row: index, from: 0 });
                }
            }
            start += len;
        }
        Ok((wanted, Arc::clone(&place.memory)))
    }

    /// Lends the buffer of a planned step.
    ///
    /// # Errors
    /// [`Error::UnknownPlan`] when nothing was gathered under its label and slot; [`Error::Order`] while another layer runs.
    pub(super) fn with<T>(&self, id: &PlanId, run: impl FnOnce(&Memory) -> Result<T>) -> Result<T> {
        let memory = self.lock().by_key.get(&EagerSlotKey::from(id)).map(|place| Arc::clone(&place.memory));
        let memory = memory.ok_or_else(|| Error::UnknownPlan {
            resource: self.name.clone(),
            label: id.label.clone(),
            serial: id.serial,
        })?;
        let memory = held_by_nobody(&memory, "Attention::run")?;
        run(&memory)
    }

    /// Where the buffer of a plan label and slot lies, and how many tokens a layer has there: what a captured run takes for granted.
    pub(super) fn place(&self, id: &PlanId) -> Option<[u64; 2]> {
        let memory =
            self.lock().by_key.get(&EagerSlotKey::from(id)).map(|place| Arc::clone(&place.memory))?;
        let memory = held_by_nobody(&memory, "capture_key").ok()?;
        Some([memory.buffer.as_ptr().addr() as u64, memory.tokens as u64])
    }

    /// Forgets what a step gathered that is undone: its streams may come to be others.
    pub(super) fn undo(&self, serial: StepSerial) {
        if planted("dense-undone-prefix-kept") {
            return;
        }
        for place in self.lock().by_key.values_mut() {
            place.held.retain(|held| held.by != serial);
        }
    }

    /// Forgets what lies there of a request.
    pub(super) fn forget(&self, request: &RequestId) {
        if planted("dense-request-kept") {
            return;
        }
        for place in self.lock().by_key.values_mut() {
            place.held.retain(|held| held.request != *request);
        }
    }

    /// Requests of which something lies there.
    pub(super) fn requests(&self) -> Vec<RequestId> {
        let places = self.lock();
        places.by_key.values().flat_map(|place| &place.held).map(|held| held.request.clone()).collect()
    }

    pub(super) fn counts(&self) -> GatherCounts {
        self.lock().counts
    }

    /// Bytes of all buffers.
    pub(super) fn bytes(&self) -> usize {
        let each = |place: &Place| Memory::bytes(&self.geometry, self.layers, place.tokens).unwrap_or(0);
        self.lock().by_key.values().map(each).sum()
    }
}

/// Never waits: the layer that holds the buffer may be waiting for this very thread.
fn held_by_nobody<'a>(memory: &'a Mutex<Memory>, call: &'static str) -> Result<MutexGuard<'a, Memory>> {
    match memory.try_lock() {
        Ok(memory) => Ok(memory),
        Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => {
            let why = "another layer of this plan label is running; run one after the other".into();
            Err(Error::Order { call, why })
        }
    }
}
