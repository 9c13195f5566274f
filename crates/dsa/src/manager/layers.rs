//! The calls of a layer: store, select, share, attend.

use mstar_core::attend::pages::key_of;
use mstar_core::attend::{IndexGeometry, Selection, SparseAttention, SparseWork, Work};
use mstar_core::kv::{LayerView, PagedKv};
use mstar_core::{AttnOut, Error, Forward, PlanId, Query, Result};
use mstar_kernels::cpu::Isa;
use mstar_kernels::dsa::{SelectParams, select, store_keys_at};
use mstar_kernels::mutant::planted;
use mstar_kernels::{DType, Device, TensorMut, TensorRef};

use super::DsaManager;
use super::memory::Memory;
use super::places::Stored;
use crate::encode::{as_is, encode, expect_keys};
use crate::{IndexInputs, Inputs, Outputs, attend, select_picks};

fn no_buffers() -> Error {
    Error::Invariant("a planned label has no buffers of index keys".into())
}

impl DsaManager {
    /// The forward's layer, when it selects.
    fn full_layer(&self, forward: &Forward<'_>, call: &str) -> Result<usize> {
        let layer = forward.layer();
        if self.index.is_full(layer) {
            return Ok(layer);
        }
        let why = format!(
            "{call}: layer {layer} shares the pick of layer {}; full layers are {:?}",
            self.index.full_layer_of(layer).map_or_else(|| "none".to_owned(), |full| full.to_string()),
            self.index.full_layers
        );
        Err(Error::Step { resource: self.name.clone(), why })
    }

    /// The full layer whose pick `layer` attends.
    fn sharing(&self, layer: usize, call: &'static str) -> Result<usize> {
        self.index.full_layer_of(layer).ok_or_else(|| {
            let why = format!("no full layer is at or before layer {layer}");
            Error::Order { call, why }
        })
    }

    /// Refuses a pick that is not the one that the buffers of a plan hold.
    fn holds(&self, memory: &Memory, pick: &Selection, call: &'static str) -> Result<()> {
        if memory.selected == Some((pick.layer(), pick.turn())) {
            return Ok(());
        }
        let layer = pick.layer();
        let holds = match memory.selected {
            Some((other, _)) if other == layer => "a later one, which another forward made".to_owned(),
            Some((other, _)) => format!("that of layer {other}"),
            None => "none".to_owned(),
        };
        let why = format!(
            "the pick of layer {layer} is asked for, and the plan's buffers hold {holds}; select first"
        );
        Err(Error::Order { call, why })
    }

    /// Keeps keys in the buffers of each row's stream.
    fn store_in_buffers(&self, stored: &Stored, layer: usize, keys: TensorRef<'_>) -> Result<()> {
        let mut buffers = self.buffers("store_keys")?;
        for span in &stored.plan.rows().spans {
            let store = buffers.get_mut(&span.label).ok_or_else(no_buffers)?;
            let chunk = keys.narrow(0, span.q_start, span.q_len)?;
            let start = span.kept_from + span.ctx_start;
            self.said(store.append(&span.request_id, layer, chunk, start))?;
        }
        Ok(())
    }

    /// Selects row by row, each over its stream's buffer.
    fn select_in_buffers(
        &self,
        forward: &Forward<'_>,
        stored: &Stored,
        memory: &mut Memory,
        q: TensorRef<'_>,
        weights: TensorRef<'_>,
    ) -> Result<()> {
        let (rows, layer, topk) = (stored.plan.rows(), forward.layer(), self.index.index_topk);
        let tokens = rows.num_tokens();
        let buffers = self.buffers("select")?;
        let (mut picks, mut workspace) = memory.picks_mut(tokens, topk)?;
        picks.as_mut_slice::<i32>().expect("contiguous i32 on the CPU").fill(-1);
        for (row, span) in rows.spans.iter().enumerate() {
            let queries = span.q_start..span.q_start + span.q_len;
            if rows.alone[queries.clone()].iter().all(|&of| of < 0) {
                continue;
            }
            let length = span.kept_from + rows.row_keys[row] as usize;
            let store = buffers.get(&span.label).ok_or_else(no_buffers)?;
            let keys = self.said(store.page(&span.request_id, layer, length))?;
            let params = SelectParams {
                q: q.narrow(0, span.q_start, span.q_len)?,
                weights: weights.narrow(0, span.q_start, span.q_len)?,
                keys,
                format: self.layer.indexer.format,
                row_request: &rows.alone[queries.clone()],
                positions: &rows.positions[queries],
                kv_indptr: &[0, 1],
                kv_indices: &[0],
                page_start: &rows.row_kept_from[row..=row],
                kv_lens: &rows.row_keys[row..=row],
                topk,
                selection: picks.reborrow().narrow(0, span.q_start, span.q_len)?,
                workspace: workspace.reborrow(),
                workers: stored.plan.workers(),
            };
            self.said(select(forward.stream(), params))?;
        }
        Ok(())
    }

    /// Selects over the pages of every row at once.
    fn select_in_pages(
        &self,
        forward: &Forward<'_>,
        stored: &Stored,
        memory: &mut Memory,
        q: TensorRef<'_>,
        weights: TensorRef<'_>,
    ) -> Result<()> {
        let keys = self.kv.plane(&self.plane, forward.layer())?;
        let (picks, workspace) = memory.picks_mut(stored.plan.num_tokens(), self.index.index_topk)?;
        let inputs = IndexInputs { q, weights, keys };
        self.said(select_picks(&stored.plan, forward.stream(), workspace, inputs, picks))
    }
}

impl SparseAttention for DsaManager {
    fn kv_cache(&self) -> &dyn PagedKv {
        &*self.kv
    }

    fn index(&self) -> &IndexGeometry {
        &self.index
    }

    fn needs_selection(&self, plan: &PlanId) -> Result<bool> {
        Ok(self.stored(plan)?.plan.needs_selection())
    }

    /// Keys may have the dtype of the queries, or that in which they are stored; they are rounded, or quantised, on the way.
    fn store_keys(&self, forward: &Forward<'_>, keys: TensorRef<'_>) -> Result<()> {
        let layer = self.full_layer(forward, "store_keys")?;
        let stored = self.stored(forward.plan_id())?;
        let (tokens, format) = (stored.plan.num_tokens(), self.index.format);
        let device = forward.stream().device();
        self.said(expect_keys(&keys, Some(tokens), self.index.index_head_dim, device))?;
        let kept = as_is(keys.dtype(), format);
        if !kept && keys.dtype() != self.layer.geometry.q_dtype {
            let expected = format!("{} or {format}", self.layer.geometry.q_dtype);
            let got = keys.dtype();
            return self.said(Err(mstar_kernels::Error::DTypeMismatch { tensor: "keys", expected, got }));
        }
        let mut memory = stored.lock("store_keys")?;
        memory.stored = None;
        if memory.selected.is_some_and(|(of, _)| of == layer) {
            memory.selected = None; // It was picked from other keys.
        }
        if self.in_buffers() {
            self.store_in_buffers(&stored, layer, keys)?;
        } else {
            let (id, stream) = (forward.plan_id(), forward.stream());
            if kept {
                self.kv.write_plane(id, &self.plane, layer, keys, stream)?;
            } else {
                let mut staging = memory.staging(tokens, &self.index)?;
                if device == Device::Cpu {
                    self.said(encode(keys, format, staging.reborrow()))?;
                } else {
                    let format = self.layer.indexer.format;
                    self.said(store_keys_at(stream, keys, format, staging.reborrow()))?;
                }
                self.kv.write_plane(id, &self.plane, layer, staging.as_ref(), stream)?;
            }
        }
        memory.stored = Some(layer);
        Ok(())
    }

    fn select(
        &self,
        forward: &mut Forward<'_>,
        q: TensorRef<'_>,
        weights: TensorRef<'_>,
    ) -> Result<Selection> {
        let layer = self.full_layer(forward, "select")?;
        let stored = self.stored(forward.plan_id())?;
        let (tokens, device) = (Some(stored.plan.num_tokens()), forward.stream().device());
        let (heads, width) = (Some(self.index.index_n_heads), Some(self.index.index_head_dim));
        let dtype = Some(self.layer.geometry.q_dtype);
        self.said(q.expect("q", "[T, Hi, Di]", &[tokens, heads, width], dtype, device))?;
        self.said(weights.expect("weights", "[T, Hi]", &[tokens, heads], Some(DType::F32), device))?;
        let mut memory = stored.lock("select")?;
        if memory.stored != Some(layer) {
            let why =
                format!("the step's index keys of layer {layer} are not stored yet; call store_keys first");
            return Err(Error::Order { call: "select", why });
        }
        let stale = planted("dsa-stale-selection") && memory.selected.is_some();
        if stored.plan.needs_selection() && !stale {
            memory.selected = None;
            match self.in_buffers() {
                true => self.select_in_buffers(forward, &stored, &mut memory, q, weights)?,
                false => self.select_in_pages(forward, &stored, &mut memory, q, weights)?,
            }
        }
        let selection = Selection::new(forward.plan_id().clone(), layer, memory.turn(layer));
        forward.note_selection(selection.clone());
        Ok(selection)
    }

    fn shared_selection(&self, forward: &Forward<'_>) -> Result<Selection> {
        let (call, layer) = ("shared_selection", forward.layer());
        let full = self.sharing(layer, call)?;
        let last = forward.last_selection();
        let Some(selection) = last.filter(|last| last.layer() == full) else {
            let last = last.map_or_else(
                || "none has".to_owned(),
                |last| format!("layer {} was the last that has", last.layer()),
            );
            let why = format!(
                "layer {layer} attends the pick of layer {full}, which has not selected in this forward: {last}"
            );
            return Err(Error::Order { call, why });
        };
        Ok(selection.clone())
    }

    fn attend(
        &self,
        forward: &Forward<'_>,
        selection: Option<&Selection>,
        q: Query<'_>,
        out: AttnOut<'_>,
    ) -> Result<()> {
        let call = "SparseAttention::attend";
        let stored = self.stored(forward.plan_id())?;
        let Query::Absorbed { nope, pe } = q else {
            return self.refuse("takes absorbed queries, q_nope and q_pe; the cache holds latents");
        };
        let LayerView::Mla { latent } = self.kv.layer(forward.layer())? else {
            return self.refuse("the layers of its cache are no latents");
        };
        let mut memory = stored.lock(call)?;
        let plan = &stored.plan;
        if let Some(selection) = selection {
            let full = self.sharing(forward.layer(), call)?;
            if selection.plan() != forward.plan_id() {
                return self
                    .refuse("the pick is another plan's; a pick serves the rows that it was made for");
            }
            if selection.layer() != full {
                let (layer, made) = (forward.layer(), selection.layer());
                let why = format!("layer {layer} attends the pick of layer {full}, not that of layer {made}");
                return Err(Error::Order { call, why });
            }
            self.holds(&memory, selection, call)?;
        } else if plan.needs_selection() {
            let topk = self.index.index_topk;
            let why = format!("some query sees more than {topk} keys; select first, or share a selection");
            return Err(Error::Order { call, why });
        }
        let inputs = Inputs { q_nope: nope, q_pe: pe, latent };
        let outputs = Outputs { o: out.o, lse: out.lse };
        if !plan.needs_selection() {
            return self.said(attend(plan, forward.stream(), memory.workspace()?, inputs, None, outputs));
        }
        let (picks, workspace) = memory.picks_and_workspace(plan.num_tokens(), self.index.index_topk)?;
        self.said(attend(plan, forward.stream(), workspace, inputs, Some(picks), outputs))
    }

    fn copy_selection(&self, selection: &Selection, mut out: TensorMut<'_>) -> Result<()> {
        let stored = self.stored(selection.plan())?;
        let (tokens, topk) = (stored.plan.num_tokens(), self.index.index_topk);
        let shape = [Some(tokens), Some(topk)];
        self.said(out.expect("out", "[T, K]", &shape, Some(DType::I32), Device::Cpu))?;
        let memory = stored.lock("copy_selection")?;
        if stored.plan.needs_selection() {
            self.holds(&memory, selection, "copy_selection")?;
        }
        for token in 0..tokens {
            let mut to = out.reborrow().select(0, token)?;
            if stored.plan.needs_selection() {
                let from = memory.picks(tokens, topk)?.select(0, token)?;
                self.said(mstar_kernels::copy(&self.stream, from, to))?;
            } else {
                to.as_mut_slice::<i32>().expect("rows were found contiguous").fill(-1);
            }
        }
        Ok(())
    }

    /// Where the plan's rows, picks, staging and scratch lie, how many queries there are and how many keys one may see. Whose
    /// queries are selected lies in the rows: a neighbour that crosses `index_topk` is no other region.
    fn capture_key(&self, plan: &PlanId) -> Option<u64> {
        let stored = self.stored(plan).ok()?;
        let of_plan = stored.plan.capture_key()?;
        let selects = u64::from(stored.plan.needs_selection());
        let places = stored.lock("capture_key").ok()?.places();
        let numbers = [of_plan, selects, stored.plan.num_tokens() as u64].into_iter().chain(places);
        Some(key_of(&numbers.collect::<Vec<_>>()))
    }

    fn replaying(&self, forward: &mut Forward<'_>) -> Result<()> {
        let (call, layer) = ("SparseAttention::replaying", forward.layer());
        let stored = self.stored(forward.plan_id())?;
        if self.index.is_full(layer) {
            let mut memory = stored.lock(call)?;
            memory.stored = Some(layer);
            if stored.plan.needs_selection() && !planted("dsa-replay-unnoted") {
                let turn = memory.turn(layer);
                forward.note_selection(Selection::new(forward.plan_id().clone(), layer, turn));
            }
        } else if stored.plan.needs_selection() {
            let selection = self.shared_selection(forward)?;
            self.holds(&*stored.lock(call)?, &selection, call)?;
        }
        Ok(())
    }

    fn sparse_work(&self, plan: &PlanId) -> SparseWork {
        self.stored(plan).map(|stored| stored.plan.rows().work).unwrap_or_default()
    }

    fn work(&self, plan: &PlanId) -> (Work, Work) {
        self.stored(plan).map(|stored| stored.work).unwrap_or_default()
    }

    fn kernel(&self, plan: &PlanId) -> Option<String> {
        let stored = self.stored(plan).ok()?;
        let rows = stored.plan.rows();
        let selected = rows.row_request.iter().filter(|&&row| row >= 0).count();
        let queries: usize = rows.spans.iter().map(|span| span.q_len).sum();
        Some(format!(
            "{} dsa, {}: {selected} queries over a pick of {}, {} over all keys; index keys {} in {}",
            if self.stream.device() == Device::Cpu { "cpu" } else { "cuda" },
            if self.stream.device() == Device::Cpu {
                Isa::current().name()
            } else {
                self.kernels.on(self.stream.device()).name()
            },
            self.index.index_topk,
            queries - selected,
            self.index.format,
            if self.in_buffers() { "buffers" } else { "pages" }
        ))
    }
}
