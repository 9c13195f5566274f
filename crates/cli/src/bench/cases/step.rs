//! A whole decode step of a few layers from one captured graph: what it takes beyond its kernels, and what a bucket costs.
//!
//! A step renews the plan for rows that grew by a token, sends list and slots to the device, and replays a graph that writes each
//! layer's entries to their slots and attends. A graph of a bucket serves any batch up to it; another, of the batch's own size,
//! says what that costs.

use std::cell::RefCell;
use std::rc::Rc;

use mstar_kernels::cpu::scatter::{scatter_at, scatter_both_at};
use mstar_kernels::cuda::{Graph, capture};
use mstar_kernels::paged::PageTable;
#[cfg(feature = "paged")]
use mstar_kernels::plan::Heads;
#[cfg(feature = "mla")]
use mstar_kernels::plan::Latents;
use mstar_kernels::plan::{Capacity, Plan, PlanOptions};
use mstar_kernels::{Buffer, DType, Staged, Stream};

use super::{Case, Cost, Made, Place, strewn};
use crate::bench::measure::{Alone, Step, Work};

/// Layers of a step.
const LAYERS: usize = 4;
const DTYPE: DType = DType::Bf16;

/// What a slot holds.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stored {
    /// 8 keys and values of 128 under 32 query heads, pages of 16.
    #[cfg(feature = "paged")]
    Heads,
    /// DeepSeek's latents under 16 query heads, pages of 64.
    #[cfg(feature = "mla")]
    Latents,
}

impl Stored {
    fn page(self) -> usize {
        match self {
            #[cfg(feature = "paged")]
            Stored::Heads => 16,
            #[cfg(feature = "mla")]
            Stored::Latents => 64,
        }
    }

    fn name(self) -> &'static str {
        match self {
            #[cfg(feature = "paged")]
            Stored::Heads => "32/8",
            #[cfg(feature = "mla")]
            Stored::Latents => "16 heads",
        }
    }

    /// Query heads, widths of a query and of an output.
    fn heads(self) -> [usize; 3] {
        match self {
            #[cfg(feature = "paged")]
            Stored::Heads => [32, 128, 128],
            #[cfg(feature = "mla")]
            Stored::Latents => [16, 576, 512],
        }
    }

    /// Shapes of a token's entries, one a pool.
    fn entries(self) -> &'static [&'static [usize]] {
        match self {
            #[cfg(feature = "paged")]
            Stored::Heads => &[&[8, 128], &[8, 128]],
            #[cfg(feature = "mla")]
            Stored::Latents => &[&[576]],
        }
    }
}

/// `live` rows in a graph for `bucket` of them.
#[derive(Clone, Copy)]
struct Rows {
    stored: Stored,
    live: usize,
    bucket: usize,
    kv_len: usize,
}

/// Those of a device.
pub(super) fn list_on_device(quick: bool) -> Vec<Case> {
    // Every launch is run in earnest on the emulated device.
    let shapes: &[(usize, usize, usize)] = match quick {
        true => &[(3, 4, 64)],
        false => {
            &[(16, 16, 1024), (16, 16, 8192), (64, 64, 1024), (64, 64, 8192), (48, 64, 1024), (48, 64, 8192)]
        }
    };
    let kinds = [
        #[cfg(feature = "paged")]
        Stored::Heads,
        #[cfg(feature = "mla")]
        Stored::Latents,
    ];
    let mut cases = Vec::new();
    for stored in kinds {
        cases
            .extend(shapes.iter().map(|&(live, bucket, kv_len)| step(Rows { stored, live, bucket, kv_len })));
    }
    cases
}

impl Rows {
    fn shape(&self) -> String {
        let Rows { stored, live, bucket, kv_len } = self;
        let rows = if live == bucket { live.to_string() } else { format!("{live} of {bucket}") };
        format!("{rows} x {kv_len}, {}, {DTYPE}", stored.name())
    }

    /// What every layer reads, as a kernel alone would.
    fn cost(&self) -> Cost {
        let [heads, width, value] = self.stored.heads();
        let token: usize = self.stored.entries().iter().map(|shape| shape.iter().product::<usize>()).sum();
        let elements = self.live * (self.kv_len * token + heads * (width + value));
        let flops = 2 * self.live * self.kv_len * heads * (width + value);
        Cost { bytes: (LAYERS * elements * DTYPE.size()) as f64, flops: (LAYERS * flops) as f64 }
    }
}

/// The plan of either kind.
enum Planned {
    #[cfg(feature = "paged")]
    Heads(Plan<Heads>),
    #[cfg(feature = "mla")]
    Latents(Plan<Latents>),
}

/// All that a step needs, at addresses that stay.
struct Steps {
    rows: Rows,
    stream: Stream,
    options: PlanOptions,
    plan: Planned,
    qo_indptr: Vec<i32>,
    kv_indptr: Vec<i32>,
    kv_indices: Vec<i32>,
    last: Vec<i32>,
    /// `[bucket]` i64; -1 for rows that pad.
    slots: Staged,
    /// Each layer's pools.
    layers: Vec<Vec<Buffer>>,
    entries: Vec<Buffer>,
    q: Buffer,
    o: Buffer,
    workspace: Buffer,
    turn: usize,
}

#[cfg(feature = "paged")]
fn heads_geometry() -> mstar_kernels::paged::Geometry {
    mstar_kernels::paged::Geometry {
        num_qo_heads: 32,
        num_kv_heads: 8,
        head_dim_qk: 128,
        head_dim_vo: 128,
        page_size: 16,
        q_dtype: DTYPE,
        kv_dtype: DTYPE,
    }
}

#[cfg(feature = "mla")]
fn latents_geometry() -> mstar_kernels::mla::Geometry {
    mstar_kernels::mla::Geometry {
        num_qo_heads: 16,
        kv_lora_rank: 512,
        qk_rope_head_dim: 64,
        page_size: 64,
        q_dtype: DTYPE,
        kv_dtype: DTYPE,
    }
}

#[cfg(feature = "paged")]
fn causal() -> mstar_kernels::paged::Variant {
    mstar_kernels::paged::Variant::causal(128)
}

#[cfg(feature = "mla")]
const LATENT_CAUSAL: mstar_kernels::mla::Variant =
    mstar_kernels::mla::Variant { sm_scale: 0.0721688, causal: true };

impl Steps {
    fn new(place: &Place, rows: Rows) -> anyhow::Result<Steps> {
        let Rows { stored, live, bucket, kv_len } = rows;
        let stream = place.stream();
        let each = kv_len.div_ceil(stored.page());
        let pages = live * each;
        let (qo_indptr, kv_indptr) = (
            (0..=live as i32).collect::<Vec<i32>>(),
            (0..=live).map(|row| (row * each) as i32).collect::<Vec<i32>>(),
        );
        let kv_indices: Vec<i32> = (0..pages).map(strewn(pages)).collect();
        let last = vec![1; live];
        let capacity = Some(Capacity { rows: bucket, tokens: bucket, pages: bucket * each });
        let options = PlanOptions { device: place.device(), capacity, ..PlanOptions::default() };
        let table = PageTable {
            qo_indptr: &qo_indptr,
            kv_indptr: &kv_indptr,
            kv_indices: &kv_indices,
            kv_last_page_len: &last,
            num_pages: pages,
            ..PageTable::default()
        };
        let (plan, bytes) = match stored {
            #[cfg(feature = "paged")]
            Stored::Heads => {
                let plan = Plan::new(&heads_geometry(), &causal(), &table, &options)?;
                let bytes = plan.workspace_bytes();
                (Planned::Heads(plan), bytes)
            }
            #[cfg(feature = "mla")]
            Stored::Latents => {
                let plan = Plan::new(&latents_geometry(), &LATENT_CAUSAL, &table, &options)?;
                let bytes = plan.workspace_bytes();
                (Planned::Latents(plan), bytes)
            }
        };
        let [heads, width, value] = stored.heads();
        let pool =
            |shape: &&[usize]| place.filled(DTYPE, pages * stored.page() * shape.iter().product::<usize>());
        let fresh = |shape: &&[usize]| place.filled(DTYPE, bucket * shape.iter().product::<usize>());
        let layer = |_| stored.entries().iter().map(pool).collect();
        let mut steps = Steps {
            rows,
            options,
            plan,
            qo_indptr,
            kv_indptr,
            kv_indices,
            last,
            slots: Staged::with_capacity(&stream, bucket * size_of::<i64>())?,
            layers: (0..LAYERS).map(layer).collect::<anyhow::Result<_>>()?,
            entries: stored.entries().iter().map(fresh).collect::<anyhow::Result<_>>()?,
            q: place.filled(DTYPE, bucket * heads * width)?,
            o: place.room(DTYPE, &[bucket, heads, value])?,
            workspace: place.scratch(bytes)?,
            turn: 0,
            stream,
        };
        steps.stage()?;
        Ok(steps)
    }

    /// The next step's plan and slots, on their way to the device.
    fn stage(&mut self) -> anyhow::Result<()> {
        let Rows { stored, live, bucket, .. } = self.rows;
        let page = stored.page();
        self.turn += 1;
        self.last.fill((self.turn % page + 1) as i32);
        let table = PageTable {
            qo_indptr: &self.qo_indptr,
            kv_indptr: &self.kv_indptr,
            kv_indices: &self.kv_indices,
            kv_last_page_len: &self.last,
            num_pages: self.kv_indices.len(),
            ..PageTable::default()
        };
        match &mut self.plan {
            #[cfg(feature = "paged")]
            Planned::Heads(plan) => {
                plan.replan(&heads_geometry(), &causal(), &table, &self.options)?;
                plan.stage(&self.stream)?;
            }
            #[cfg(feature = "mla")]
            Planned::Latents(plan) => {
                plan.replan(&latents_geometry(), &LATENT_CAUSAL, &table, &self.options)?;
                plan.stage(&self.stream)?;
            }
        }
        let (indices, indptr, last) = (&self.kv_indices, &self.kv_indptr, &self.last);
        Ok(self.slots.set_with(&self.stream, bucket * size_of::<i64>(), |to| {
            for (row, slot) in to.chunks_exact_mut(size_of::<i64>()).enumerate() {
                let at = if row < live {
                    i64::from(indices[indptr[row + 1] as usize - 1]) * page as i64 + i64::from(last[row]) - 1
                } else {
                    -1
                };
                slot.copy_from_slice(&at.to_ne_bytes());
            }
        })?)
    }

    /// A layer's pools are given the step's entries.
    fn write(&mut self, layer: usize) -> anyhow::Result<()> {
        let Rows { stored, bucket, .. } = self.rows;
        let slots = self.slots.tensor(DType::I64, &[bucket])?;
        let sides = stored.entries().iter().zip(&self.entries).zip(&mut self.layers[layer]);
        let mut sides = sides.map(|((shape, entries), pool)| -> anyhow::Result<_> {
            let pages = [&[self.kv_indices.len(), stored.page()][..], shape].concat();
            let entries = entries.tensor(0, DTYPE, &[&[bucket][..], shape].concat())?;
            Ok((entries, pool.tensor_mut(0, DTYPE, &pages)?))
        });
        let first = sides.next().expect("a slot holds something")?;
        match sides.next() {
            Some(second) => Ok(scatter_both_at(&self.stream, slots, [first, second?])?),
            None => Ok(scatter_at(&self.stream, slots, first.0, first.1)?),
        }
    }

    fn attend(&mut self, layer: usize) -> anyhow::Result<()> {
        let Rows { stored, bucket, .. } = self.rows;
        let [heads, width, value] = stored.heads();
        let (pages, bytes) = ([self.kv_indices.len(), stored.page()], self.workspace.len());
        let q = self.q.tensor(0, DTYPE, &[bucket, heads, width])?;
        let o = self.o.tensor_mut(0, DTYPE, &[bucket, heads, value])?;
        let workspace = self.workspace.tensor_mut(0, DType::U8, &[bytes])?;
        let pools = &self.layers[layer];
        let pool = |pool: usize| pools[pool].tensor(0, DTYPE, &[&pages[..], stored.entries()[pool]].concat());
        match &self.plan {
            #[cfg(feature = "paged")]
            Planned::Heads(plan) => {
                use mstar_kernels::paged::{AttendParams, attend};
                let params = AttendParams {
                    work: plan.work(),
                    q,
                    k: pool(0)?,
                    v: pool(1)?,
                    kv_scales: None,
                    sinks: None,
                    alibi_slopes: None,
                    o,
                    lse: None,
                    workspace,
                    workers: 1,
                };
                Ok(attend(&self.stream, params)?)
            }
            #[cfg(feature = "mla")]
            Planned::Latents(plan) => {
                use mstar_kernels::mla::{AttendParams, attend};
                let params = AttendParams {
                    work: plan.work(),
                    q_nope: q.narrow(2, 0, value)?,
                    q_pe: q.narrow(2, value, width - value)?,
                    latent: pool(0)?,
                    o,
                    lse: None,
                    workspace,
                    workers: 1,
                };
                Ok(attend(&self.stream, params)?)
            }
        }
    }

    /// Every layer, as it is captured.
    fn forward(&mut self) -> anyhow::Result<()> {
        for layer in 0..LAYERS {
            self.write(layer)?;
            self.attend(layer)?;
        }
        Ok(())
    }
}

/// What is captured may fail for reasons of either kind.
struct Why(anyhow::Error);

impl From<mstar_kernels::Error> for Why {
    fn from(why: mstar_kernels::Error) -> Why {
        Why(why.into())
    }
}

/// A step's own work, from its graph, and how many nodes that has.
#[allow(unsafe_code, reason = "a graph holds addresses, not borrows")]
fn replayed(steps: &Rc<RefCell<Steps>>) -> anyhow::Result<(Work, usize)> {
    let stream = steps.borrow().stream;
    // Whatever is loaded or taken at the first call is there before the second is captured.
    steps.borrow_mut().forward()?;
    stream.synchronize()?;
    let graph: Graph =
        capture(&stream, || steps.borrow_mut().forward().map_err(Why)).map_err(|Why(why)| why)?;
    let (nodes, steps) = (graph.nodes(), steps.clone());
    let work = move || {
        steps.borrow_mut().stage()?;
        // SAFETY: the graph reads and writes what `steps` owns, which this closure keeps, on its one stream; staging moves nothing
        // within the capacity that the plan was made for.
        Ok(unsafe { graph.launch(&stream) }?)
    };
    Ok((Box::new(work), nodes))
}

/// A piece of a step.
type Part = Box<dyn FnMut(&mut Steps) -> anyhow::Result<()>>;

fn step(rows: Rows) -> Case {
    let make = move |place: &Place| -> anyhow::Result<Made> {
        let made = |rows: Rows| -> anyhow::Result<Rc<RefCell<Steps>>> {
            Ok(Rc::new(RefCell::new(Steps::new(place, rows)?)))
        };
        let steps = made(rows)?;
        let (work, nodes) = replayed(&steps)?;
        let part = |times: usize, mut part: Part| {
            let steps = steps.clone();
            Alone { times, work: Box::new(move || part(&mut steps.borrow_mut())) }
        };
        let parts = vec![
            part(1, Box::new(Steps::stage)),
            part(LAYERS, Box::new(|steps| steps.attend(0))),
            part(LAYERS, Box::new(|steps| steps.write(0))),
        ];
        let exact = match rows.live < rows.bucket {
            true => Some(replayed(&made(Rows { bucket: rows.live, ..rows })?)?.0),
            false => None,
        };
        // A launch that finds nothing to do.
        let slots = place.moved({
            let mut slots = Buffer::for_tensor(DType::I64, &[1])?;
            slots.tensor_mut(0, DType::I64, &[1])?.as_mut_slice::<i64>().unwrap_or_default().fill(-1);
            slots
        })?;
        let (from, mut to) = (place.room(DTYPE, &[1, 8])?, place.room(DTYPE, &[1, 1, 8])?);
        let stream = place.stream();
        let nothing = move || {
            let (from, to) = (from.tensor(0, DTYPE, &[1, 8])?, to.tensor_mut(0, DTYPE, &[1, 1, 8])?);
            Ok(scatter_at(&stream, slots.tensor(0, DType::I64, &[1])?, from, to)?)
        };
        let step = Step { parts, nothing: Box::new(nothing), exact, nodes };
        Ok(Made { work, throughput: None, step: Some(step), reads: None })
    };
    Case {
        kernel: "step",
        shape: rows.shape(),
        dtype: DTYPE,
        cost: rows.cost(),
        beside: None,
        make: Box::new(make),
    }
}
