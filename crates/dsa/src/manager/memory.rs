//! What one plan label of one slot holds between its layers, at addresses that stay: picks, keys on their way into a
//! store, scratch.

use mstar_core::attend::pages::workspace_bound;
use mstar_core::attend::{IndexFormat, IndexGeometry, StepShape};
use mstar_kernels::mla::{Geometry, Variant};
use mstar_kernels::paged::PageTable;
use mstar_kernels::plan::{Latents, PlanOptions};
use mstar_kernels::{Buffer, DType, Device, Result, TensorMut, TensorRef};

use crate::batch::sparse_scratch;
use crate::{Layer, Plan};

/// Bytes of each part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sizes {
    /// Picks `[T, K]` i32; 0 where no row can outgrow `K`.
    pub(crate) selection: usize,
    /// The step's index keys as they will be stored; 0 where they are stored as they come.
    pub(crate) staging: usize,
    /// Scratch of a kernel.
    pub(crate) workspace: usize,
}

impl Sizes {
    /// All together.
    pub(crate) fn total(&self) -> usize {
        self.selection.saturating_add(self.staging).saturating_add(self.workspace)
    }

    /// Part by part the larger.
    pub(crate) fn max(self, other: Sizes) -> Sizes {
        Sizes {
            selection: self.selection.max(other.selection),
            staging: self.staging.max(other.staging),
            workspace: self.workspace.max(other.workspace),
        }
    }

    /// What a plan needs, in a bucket of `tokens`.
    pub(crate) fn of_plan(plan: &Plan, tokens: usize, index: &IndexGeometry) -> Sizes {
        let (tokens, keys) = (tokens.max(plan.num_tokens()), plan.max_keys());
        let mut sizes = Sizes::of(tokens, keys, plan.layer(), index, (plan.workers(), plan.device()));
        if !plan.needs_selection() {
            sizes = Sizes { selection: 0, workspace: 0, ..sizes };
        }
        sizes.workspace = sizes.workspace.max(plan.dense().workspace_bytes());
        sizes
    }

    /// What steps of up to `largest` need on `workers` threads. Rows attend densely up to `K` keys, so that is as far as the
    /// scratch of that reaches.
    pub(crate) fn foreseen(
        layer: &Layer,
        index: &IndexGeometry,
        largest: StepShape,
        device: Device,
    ) -> Result<Sizes> {
        let workers = rayon::current_num_threads();
        let mut sizes = Sizes::of(largest.tokens, largest.kv_len, layer, index, (workers, device));
        if largest.kv_len <= index.index_topk {
            sizes = Sizes { selection: 0, workspace: 0, ..sizes };
        }
        let longest = StepShape { kv_len: largest.kv_len.min(index.index_topk), ..largest };
        sizes.workspace = sizes.workspace.max(dense_bound(&layer.geometry, longest, workers, device)?);
        Ok(sizes)
    }

    fn of(
        tokens: usize,
        keys: usize,
        layer: &Layer,
        index: &IndexGeometry,
        (workers, device): (usize, Device),
    ) -> Sizes {
        let (format, topk) = (index.format, index.index_topk);
        let converted = IndexFormat::of(layer.geometry.q_dtype) != Some(format);
        let key = format.width(index.index_head_dim).saturating_mul(format.dtype().size());
        Sizes {
            selection: tokens.saturating_mul(topk).saturating_mul(size_of::<i32>()),
            staging: if converted { tokens.saturating_mul(key) } else { 0 },
            workspace: sparse_scratch(layer, tokens, keys, workers, device),
        }
    }
}

/// The memory itself.
#[derive(Debug)]
pub(crate) struct Memory {
    selection: Buffer,
    staging: Buffer,
    workspace: Buffer,
    /// The full layer whose index keys were stored last.
    pub(crate) stored: Option<usize>,
    /// The full layer whose pick `selection` holds, and which of all its picks that is.
    pub(crate) selected: Option<(usize, u64)>,
    /// Picks that were made here, over all plans.
    turns: u64,
}

fn room(device: Device, bytes: usize) -> Result<Buffer> {
    Buffer::zeroed_on(device, bytes).map_err(|why| why.wanted_for("picks and their workspace"))
}

impl Memory {
    pub(crate) fn new(device: Device, sizes: Sizes) -> Result<Memory> {
        Ok(Memory {
            selection: room(device, sizes.selection)?,
            staging: room(device, sizes.staging)?,
            workspace: room(device, sizes.workspace)?,
            stored: None,
            selected: None,
            turns: 0,
        })
    }

    /// Notes that `selection` holds a pick of `layer` from now on; returns its number.
    pub(crate) fn turn(&mut self, layer: usize) -> u64 {
        self.turns += 1;
        self.selected = Some((layer, self.turns));
        self.turns
    }

    /// Forgets the plan before, and grows each part to what the next needs; one that is large enough stays where it is.
    ///
    /// # Errors
    /// When the memory cannot be had; each part is then as it was, or larger.
    pub(crate) fn reserve(&mut self, sizes: Sizes) -> Result<()> {
        (self.stored, self.selected) = (None, None);
        let parts = [
            (&mut self.selection, sizes.selection),
            (&mut self.staging, sizes.staging),
            (&mut self.workspace, sizes.workspace),
        ];
        for (buffer, needed) in parts {
            if buffer.len() < needed {
                *buffer = room(buffer.device(), needed)?;
            }
        }
        Ok(())
    }

    /// Where each part lies, and how large scratch is, by which it is cut: what a captured run takes for granted.
    pub(crate) fn places(&self) -> [u64; 4] {
        let [selection, staging, workspace] =
            [&self.selection, &self.staging, &self.workspace].map(|part| part.as_ptr().addr() as u64);
        [selection, staging, workspace, self.workspace.len() as u64]
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        self.selection.len() + self.staging.len() + self.workspace.len()
    }

    /// Scratch, whole.
    pub(crate) fn workspace(&mut self) -> Result<TensorMut<'_>> {
        let bytes = self.workspace.len();
        self.workspace.tensor_mut(0, DType::U8, &[bytes])
    }

    /// `[tokens, W]` of `format`, to be filled before it is stored.
    pub(crate) fn staging(&mut self, tokens: usize, index: &IndexGeometry) -> Result<TensorMut<'_>> {
        let width = index.format.width(index.index_head_dim);
        self.staging.tensor_mut(0, index.format.dtype(), &[tokens, width])
    }

    /// The picks `[tokens, K]`.
    pub(crate) fn picks(&self, tokens: usize, topk: usize) -> Result<TensorRef<'_>> {
        self.selection.tensor(0, DType::I32, &[tokens, topk])
    }

    /// The picks, to be written, and scratch beside them.
    pub(crate) fn picks_mut(&mut self, tokens: usize, topk: usize) -> Result<(TensorMut<'_>, TensorMut<'_>)> {
        let bytes = self.workspace.len();
        let picks = self.selection.tensor_mut(0, DType::I32, &[tokens, topk])?;
        Ok((picks, self.workspace.tensor_mut(0, DType::U8, &[bytes])?))
    }

    /// The picks, to be read, and scratch beside them.
    pub(crate) fn picks_and_workspace(
        &mut self,
        tokens: usize,
        topk: usize,
    ) -> Result<(TensorRef<'_>, TensorMut<'_>)> {
        let bytes = self.workspace.len();
        let picks = self.selection.tensor(0, DType::I32, &[tokens, topk])?;
        Ok((picks, self.workspace.tensor_mut(0, DType::U8, &[bytes])?))
    }
}

/// Scratch of attention to every visible key, for the steps up to `largest` that need most.
fn dense_bound(geometry: &Geometry, largest: StepShape, workers: usize, device: Device) -> Result<usize> {
    // Scratch depends on lengths and not on pages: each row gets one page.
    let geometry = Geometry { page_size: largest.kv_len.max(1), ..*geometry };
    let options = PlanOptions { workers, device, ..PlanOptions::default() };
    // On a device a shorter row may have more leaves: most where its length is a power of two.
    let shorter =
        StepShape { kv_len: (largest.kv_len / 2 + 1).next_power_of_two().min(largest.kv_len), ..largest };
    let bytes_of = |shape: StepShape| {
        workspace_bound(shape, |rows| {
            let table = PageTable {
                qo_indptr: rows.qo_indptr,
                kv_indptr: rows.kv_indptr,
                kv_indices: rows.kv_indices,
                kv_last_page_len: rows.kv_last_page_len,
                num_pages: rows.num_pages,
                ..PageTable::default()
            };
            let variant = Variant { sm_scale: 1.0, causal: rows.causal };
            Ok(mstar_kernels::plan::Plan::<Latents>::new(&geometry, &variant, &table, &options)?
                .workspace_bytes())
        })
    };
    Ok(bytes_of(largest)?.max(bytes_of(shorter)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_large_enough_stays_where_it_is_and_forgets_what_it_held() {
        let large = Sizes { selection: 400, staging: 64, workspace: 128 };
        let mut memory = Memory::new(Device::Cpu, large).unwrap();
        let addresses = |memory: &mut Memory| {
            let (picks, workspace) = memory.picks_and_workspace(10, 10).unwrap();
            (picks.as_ptr().addr(), workspace.as_ref().as_ptr().addr())
        };
        let before = addresses(&mut memory);
        memory.stored = Some(2);
        assert_eq!((memory.turn(2), memory.turn(4)), (1, 2));
        memory.reserve(Sizes { selection: 8, staging: 0, workspace: 1 }).unwrap();
        assert_eq!((addresses(&mut memory), memory.bytes()), (before, large.total()));
        assert_eq!((memory.stored, memory.selected), (None, None));
        assert_eq!(memory.turn(2), 3, "a number is never given again");
        memory.reserve(Sizes { workspace: 4096, ..large }).unwrap();
        assert_eq!(memory.bytes(), 400 + 64 + 4096);
        assert_eq!(addresses(&mut memory).0, before.0);
    }

    #[test]
    fn f18_no_pick_is_foreseen_where_no_row_can_outgrow_topk() {
        let geometry = Geometry {
            num_qo_heads: 16,
            kv_lora_rank: 512,
            qk_rope_head_dim: 64,
            page_size: 64,
            q_dtype: DType::Bf16,
            kv_dtype: DType::Bf16,
        };
        let index = IndexGeometry {
            index_n_heads: 64,
            index_head_dim: 128,
            index_topk: 2048,
            format: IndexFormat::Bf16,
            store: mstar_core::attend::IndexStore::Pages,
            full_layers: vec![0],
        };
        let format = mstar_kernels::dsa::KeyFormat::Bf16;
        let indexer = crate::Indexer { index_n_heads: 64, index_head_dim: 128, index_topk: 2048, format };
        let layer = Layer { geometry, sm_scale: 1.0, indexer };
        let of = |rows, tokens, kv_len| {
            Sizes::foreseen(&layer, &index, StepShape { rows, tokens, kv_len }, Device::Cpu).unwrap()
        };
        let short = of(64, 64, 2048);
        assert_eq!((short.selection, short.staging), (0, 0));
        let long = of(64, 64, 2049);
        assert_eq!(long.selection, 64 * 2048 * 4);
        // Sixty-four decode rows over 32k keys: scores of a block, not of the batch.
        assert!(of(64, 64, 32_768).total() < 96 << 20, "{:?}", of(64, 64, 32_768));
    }
}
