//! The wrapper level: a batch on foreign page tables, checked once; who of it is selected and what the others attend.

use std::sync::Arc;

use mstar_core::kv::KvPlan;
use mstar_core::resource::PaddedShape;
use mstar_kernels::dsa::{
    DeviceTable, KeyFormat, prepare_select, prepare_sparse, select_workspace_bytes_on,
    sparse_workspace_bytes_on,
};
use mstar_kernels::mla::{Geometry, Variant};
use mstar_kernels::paged::PageTable;
use mstar_kernels::plan::{Capacity, Latents, PlanOptions};
use mstar_kernels::{Device, Error, Kernels, Stream, paged};

use crate::{DsaPlan, Result};

/// The indexer of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Indexer {
    /// `Hi`.
    pub index_n_heads: usize,
    /// `Di`.
    pub index_head_dim: usize,
    /// `K`: keys that a query attends at the most.
    pub index_topk: usize,
    /// How a key lies in its slot.
    pub format: KeyFormat,
}

/// Compiles and loads all that attending such a layer runs, picked or not. Nothing on the CPU.
///
/// # Errors
/// A kernel that cannot be built.
pub(crate) fn prepare(layer: &Layer, kernels: Kernels, stream: &Stream) -> Result<()> {
    let device = stream.device();
    if device == Device::Cpu {
        return Ok(());
    }
    let variant = Variant { sm_scale: layer.sm_scale, causal: true };
    // For a bucket of one row: its run may be over rows of any kind. How many query vectors a block takes doubles.
    for tokens in (0..7).map(|power| 1 << power) {
        let table = PageTable {
            qo_indptr: &[0, tokens as i32],
            kv_indptr: &[0, 1],
            kv_indices: &[0],
            kv_last_page_len: &[1],
            num_pages: 1,
            ..PageTable::default()
        };
        let capacity = Some(Capacity { rows: 1, tokens, pages: 1 });
        let options = PlanOptions { device, capacity, kernels, ..PlanOptions::default() };
        let dense = mstar_kernels::plan::Plan::<Latents>::new(&layer.geometry, &variant, &table, &options);
        dense?.stage(stream)?;
    }
    prepare_picks(layer, kernels, stream)
}

fn prepare_picks(layer: &Layer, kernels: Kernels, stream: &Stream) -> Result<()> {
    let Indexer { index_n_heads, index_head_dim, format, .. } = layer.indexer;
    prepare_select(stream, layer.geometry.q_dtype, format, index_n_heads, index_head_dim, kernels)?;
    Ok(prepare_sparse(stream, &layer.geometry, kernels)?)
}

/// The layer that a batch is planned for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Layer {
    /// Latents and heads.
    pub geometry: Geometry,
    /// Factor of the dot product; finite. As for latent attention it has no default.
    pub sm_scale: f32,
    /// The indexer.
    pub indexer: Indexer,
}

impl Layer {
    fn check(&self) -> Result<()> {
        self.geometry.check()?;
        let refuse =
            |name, why: &str, got: String| Err(Error::Parameter { name, why: why.into(), got }.into());
        if !self.sm_scale.is_finite() {
            return refuse("sm_scale", "must be finite", self.sm_scale.to_string());
        }
        let topk = self.indexer.index_topk;
        if !(1..=i32::MAX as usize).contains(&topk) {
            return refuse("index_topk", "must be 1..=2147483647", topk.to_string());
        }
        if self.indexer.index_n_heads == 0 {
            return refuse("index_n_heads", "an indexer has at least 1 head", "0".into());
        }
        Ok(self.indexer.format.check(self.indexer.index_head_dim)?)
    }
}

/// What the arrays of a plan are to have room for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Room {
    pub(crate) rows: usize,
    pub(crate) tokens: usize,
    pub(crate) pages: usize,
    /// Keys that a row may see.
    pub(crate) keys: usize,
}

impl Room {
    /// Grows to a shape and its page ids.
    pub(crate) fn add(&mut self, shape: PaddedShape, pages: usize) {
        self.rows = self.rows.max(shape.rows);
        self.tokens = self.tokens.max(shape.tokens);
        self.pages = self.pages.max(pages);
    }
}

/// The rows on a device. A copy of a plan has nothing there.
#[derive(Debug, Default)]
struct OnDevice(Option<DeviceTable>);

impl Clone for OnDevice {
    fn clone(&self) -> OnDevice {
        OnDevice(None)
    }
}

/// A checked batch: its rows, and the work of those that attend all they see. It owns what it needs: the table may go.
#[derive(Clone, Debug)]
pub struct Plan {
    layer: Layer,
    rows: Arc<DsaPlan>,
    dense: mstar_kernels::plan::Plan<Latents>,
    on: OnDevice,
    /// Keys that a row may see in a step to come.
    keys: usize,
}

impl Plan {
    /// Checks and plans the rows of a table. They are causal; a table's masks are refused. A capacity is the batch's own:
    /// a row that crosses `topk` is still one row of it.
    ///
    /// # Errors
    /// A layer, table or mask that is refused, with the parameter, or the array, the row and the value; a batch larger than
    /// the capacity.
    pub fn new(layer: &Layer, table: &PageTable<'_>, options: &PlanOptions) -> Result<Plan> {
        layer.check()?;
        if table.mask.is_some() {
            let why = "sparse attention has no masks; leave it out".into();
            return Err(Error::Parameter { name: "mask", why, got: "a mask".into() }.into());
        }
        table.check(&one_head(&layer.geometry))?;
        let tokens = options.capacity.map_or(0, |capacity| capacity.tokens);
        let mut rows = DsaPlan::default();
        rows.make_of(table, layer.geometry.page_size, tokens, layer.indexer.index_topk);
        let pages = options.capacity.map_or(0, |capacity| capacity.pages);
        let keys = pages.saturating_mul(layer.geometry.page_size);
        Plan::of_rows(layer, Arc::new(rows), None, (table.num_pages, keys), options)
    }

    /// The plan of rows that were made already, in the memory of `before`.
    fn of_rows(
        layer: &Layer,
        rows: Arc<DsaPlan>,
        before: Option<(mstar_kernels::plan::Plan<Latents>, OnDevice)>,
        (num_pages, keys): (usize, usize),
        options: &PlanOptions,
    ) -> Result<Plan> {
        let mut options = *options;
        if let Some(capacity) = &mut options.capacity {
            capacity.rows = capacity.rows.saturating_mul(2);
        }
        let variant = Variant { sm_scale: layer.sm_scale, causal: true };
        let table = rows.dense(num_pages);
        let (dense, on) = match before {
            Some((mut dense, on)) => {
                dense.replan(&layer.geometry, &variant, &table, &options)?;
                (dense, on)
            }
            None => {
                let dense = mstar_kernels::plan::Plan::new(&layer.geometry, &variant, &table, &options)?;
                (dense, OnDevice::default())
            }
        };
        Ok(Plan { layer: *layer, rows, dense, on, keys })
    }

    /// The plan of a cache's own rows, in the memory of `before`.
    pub(crate) fn of_cache(
        layer: &Layer,
        kv: &KvPlan,
        before: Option<Plan>,
        room: Room,
        num_pages: usize,
        options: &PlanOptions,
    ) -> Result<Plan> {
        let (mut rows, before) =
            before.map_or_else(Default::default, |plan| (plan.rows, Some((plan.dense, plan.on))));
        // Copied when somebody still looks at the rows before.
        let made = Arc::make_mut(&mut rows);
        made.reserve(room.rows, room.tokens, room.pages);
        made.make(kv, layer.geometry.page_size, layer.indexer.index_topk);
        Plan::of_rows(layer, rows, before, (num_pages, room.keys), options)
    }

    /// The layer planned for. There is no way to give a run another.
    pub fn layer(&self) -> &Layer {
        &self.layer
    }

    /// The rows.
    pub fn rows(&self) -> &Arc<DsaPlan> {
        &self.rows
    }

    /// Whether some query sees more than `topk` keys, and so attends a pick. On a device a plan with a capacity always does, where
    /// a step to come may: a captured run selects whatever comes.
    pub fn needs_selection(&self) -> bool {
        self.rows.needs_selection || self.is_captured() && self.max_keys() > self.layer.indexer.index_topk
    }

    /// Whether a run may be captured and go over other rows.
    pub(crate) fn is_captured(&self) -> bool {
        let options = self.dense.options();
        options.device != Device::Cpu && options.capacity.is_some()
    }

    /// Keys that a row sees, or may see in a step to come.
    pub(crate) fn max_keys(&self) -> usize {
        if self.device() == Device::Cpu { self.rows.max_keys() } else { self.keys.max(self.rows.max_keys()) }
    }

    /// The device that the plan is for.
    pub fn device(&self) -> Device {
        self.dense.options().device
    }

    /// Which kernels its runs are of, on a device.
    pub fn kernels(&self) -> Kernels {
        self.dense.options().kernels
    }

    /// Has the plan where its runs read it: on a device, work list and rows on their way and kernels built; nothing on the CPU.
    /// Belongs to planning, and never waits for the device.
    ///
    /// # Errors
    /// A stream of another device than was planned for; kernels that cannot be built; memory that cannot be had.
    pub fn stage(&mut self, stream: &Stream) -> Result<()> {
        self.dense.stage(stream)?;
        if self.device() == Device::Cpu || !self.needs_selection() {
            return Ok(());
        }
        let kernels = self.kernels();
        prepare_picks(&self.layer, kernels, stream)?;
        let keys = self.max_keys();
        let rows = &self.rows;
        let serves = |on: &DeviceTable| {
            on.device() == stream.device() && on.max_keys() >= keys && on.kernels() == kernels
        };
        let on = match self.on.0.take().filter(serves) {
            Some(on) => on,
            None => {
                let (tokens, requests) = (rows.row_request.len(), rows.row_keys.len());
                DeviceTable::with_capacity(stream, tokens, requests, rows.pages.capacity(), keys)?
                    .with_kernels(kernels)
            }
        };
        self.on.0.insert(on).set(stream, &rows.table())?;
        Ok(())
    }

    /// What a captured run of the plan takes for granted, as a number: what its dense rows do
    /// ([`capture_key`](mstar_kernels::plan::Plan::capture_key)), where the rows lie on the device, and how scratch is cut. `None`
    /// for a plan that is not staged on a device.
    pub fn capture_key(&self) -> Option<u64> {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let dense = self.dense.capture_key()?;
        let table = match (self.needs_selection(), &self.on.0) {
            (false, _) => None,
            (true, on) => Some(on.as_ref()?),
        };
        let mut hasher = DefaultHasher::new();
        (dense, table.map(|on| (on.address(), on.max_keys(), on.kernels(), on.num_requests())))
            .hash(&mut hasher);
        Some(hasher.finish())
    }

    /// The rows on the stream's device; `None` on the CPU.
    ///
    /// # Errors
    /// A plan that was not staged there.
    pub(crate) fn table(&self, stream: &Stream) -> Result<Option<&DeviceTable>> {
        let device = stream.device();
        match self.on.0.as_ref().filter(|on| on.device() == device) {
            _ if device == Device::Cpu => Ok(None),
            Some(on) => Ok(Some(on)),
            None => {
                let why = "the plan is not on this device; stage it after planning".into();
                Err(Error::Parameter { name: "plan", why, got: format!("a run on {device}") }.into())
            }
        }
    }

    /// `T`: query tokens that a run takes, padding included.
    pub fn num_tokens(&self) -> usize {
        self.rows.num_tokens()
    }

    /// Bytes of scratch that [`select_picks`](crate::select_picks) and [`attend`](crate::attend) need, one after the other.
    pub fn workspace_bytes(&self) -> usize {
        let dense = self.dense.workspace_bytes();
        if !self.needs_selection() {
            return dense;
        }
        let workers = self.workers();
        dense.max(sparse_scratch(&self.layer, self.num_tokens(), self.max_keys(), workers, self.device()))
    }

    /// Threads that a run may use.
    pub fn workers(&self) -> usize {
        self.dense.workers()
    }

    pub(crate) fn dense(&self) -> &mstar_kernels::plan::Plan<Latents> {
        &self.dense
    }
}

/// Scratch of selecting, and of attending picks.
pub(crate) fn sparse_scratch(
    layer: &Layer,
    tokens: usize,
    keys: usize,
    workers: usize,
    device: Device,
) -> usize {
    let Indexer { index_n_heads: heads, index_head_dim: width, index_topk: topk, .. } = layer.indexer;
    let select = select_workspace_bytes_on(device, tokens, keys, heads, width, topk, workers);
    select.max(sparse_workspace_bytes_on(device, &layer.geometry, tokens, topk, workers))
}

/// Latents as one key head: what a page table is checked against.
fn one_head(geometry: &Geometry) -> paged::Geometry {
    paged::Geometry {
        num_qo_heads: geometry.num_qo_heads,
        num_kv_heads: 1,
        head_dim_qk: geometry.latent_dim(),
        head_dim_vo: geometry.kv_lora_rank,
        page_size: geometry.page_size,
        q_dtype: geometry.q_dtype,
        kv_dtype: geometry.kv_dtype,
    }
}
