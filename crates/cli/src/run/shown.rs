//! What a forward shows of each layer to whoever watches it: the outputs, whose they are, and what was picked.
//!
//! A [`Witness`] is called after each layer of each attention resource, before the next one overwrites its outputs. It may wait
//! there, which holds the forward up; an error of its ends the step.

use std::ops::Range;

use mstar_core::{Label, RequestId, ResourceName};
use mstar_kernels::{DType, Element, reference::Real};

use super::buffers::Written;
use super::forward::{Packed, Scene, Seen, content};
use super::model::Model;
use super::verify::{self, Layers, Pick, Row, Sample, Verdict};

/// Who is shown every layer.
pub(crate) trait Witness: Sync {
    /// Looks at a layer.
    ///
    /// # Errors
    /// Whatever is to end the step.
    fn see(&self, shown: &Shown<'_>) -> anyhow::Result<()>;
}

/// One layer of one attention resource, in one plan.
pub(crate) struct Shown<'a> {
    pub(super) model: &'a Model,
    pub(super) scene: &'a Scene<'a>,
    pub(super) seen: Seen<'a>,
    pub(super) packed: &'a [Packed<'a>],
    pub(super) label: &'a Label,
    pub(super) tokens: usize,
    pub(super) written: Written<'a>,
}

/// One row of a plan.
pub(crate) struct ShownRow<'a> {
    /// Whose.
    pub(crate) request: &'a RequestId,
    /// Which of their streams.
    pub(crate) label: &'a Label,
    /// Its tokens in the plan.
    pub(crate) tokens: Range<usize>,
    /// Absolute position of the first.
    pub(crate) first_position: usize,
}

/// Outputs of a layer that may come from elsewhere: what [`Shown::verify`] judges.
#[derive(Clone, Copy)]
pub(crate) struct Outputs<'a> {
    /// `[T, H, Dv]`, as bytes.
    pub(crate) o: &'a [u8],
    /// `[T, H]`.
    pub(crate) lse: &'a [f32],
    /// `[T, K]` positions, -1 padded; `None` where nothing was picked.
    pub(crate) selection: Option<&'a [i32]>,
}

impl<'a> Shown<'a> {
    /// The step's number in the run.
    pub(crate) fn step(&self) -> u64 {
        self.scene.step
    }

    /// The attention resource.
    pub(crate) fn attention(&self) -> &'a ResourceName {
        &self.seen.room.name
    }

    /// The layer.
    pub(crate) fn layer(&self) -> usize {
        self.seen.layer
    }

    /// The plan's label.
    pub(crate) fn label(&self) -> &'a Label {
        self.label
    }

    /// Query tokens of the plan, padding among them.
    pub(crate) fn tokens(&self) -> usize {
        self.tokens
    }

    /// Element type of `o`.
    pub(crate) fn dtype(&self) -> DType {
        self.model.dtype
    }

    /// `[H, Dv]`.
    pub(crate) fn vectors(&self) -> [usize; 2] {
        [self.written.heads, self.written.vector / self.written.heads.max(1)]
    }

    /// The plan's rows, in the order of their tokens; what follows the last pads the plan.
    pub(crate) fn rows(&self) -> impl ExactSizeIterator<Item = ShownRow<'a>> {
        self.packed.iter().map(|row| ShownRow {
            request: &self.scene.plans[row.work.request].id,
            label: &row.label,
            tokens: row.tokens.clone(),
            first_position: row.addition.start,
        })
    }

    /// `K` of an indexer, where the resource has one.
    pub(crate) fn index_topk(&self) -> Option<usize> {
        Some(self.seen.room.indexer()?.index_topk)
    }

    /// What was written.
    pub(crate) fn outputs(&self) -> Outputs<'a> {
        Outputs {
            o: self.written.bytes,
            lse: self.written.lse,
            selection: self.seen.picked.and_then(|picked| picked.selection.as_deref()),
        }
    }

    /// Recomputes some of `queries` of a row in f64, as `--verify` does, and judges `outputs` of this layer by it: each pick by
    /// its scores, attention over the pick that was used. Within `--verify`'s budget; the verdict says how many.
    pub(crate) fn verify(&self, row: usize, queries: &[usize], outputs: Outputs<'_>) -> Verdict {
        match self.model.dtype {
            DType::Bf16 => self.verify_typed::<half::bf16>(row, queries, outputs),
            DType::F16 => self.verify_typed::<half::f16>(row, queries, outputs),
            _ => self.verify_typed::<f32>(row, queries, outputs),
        }
    }

    fn verify_typed<T: Real + Element>(&self, at: usize, queries: &[usize], outputs: Outputs<'_>) -> Verdict {
        let (packed, room) = (&self.packed[at], self.seen.room);
        let plan = &self.scene.plans[packed.work.request];
        let held = content(packed, self.scene);
        let is_cross = !room.shape.causal && self.seen.query_layer != self.seen.layer;
        let keys = if is_cross { &self.scene.contents[&packed.work.request].context.keys } else { &held.own };
        let index = room.indexer();
        // Chosen among the queries that are asked for, of this layer alone.
        let drawn = Sample::of(&room.shape, index, 1, queries.len(), keys.len(), held.salt);
        let of = |chosen: &[usize]| chosen.iter().map(|&at| queries[at]).collect();
        let sample = Sample {
            layers: vec![self.seen.layer],
            heads: drawn.heads,
            queries: of(&drawn.queries),
            picks: of(&drawn.picks),
        };
        let topk = index.map_or(0, |index| index.index_topk);
        let tokens = packed.tokens.clone();
        let pick = index.zip(self.seen.picked).map(|(index, picked)| Pick {
            index,
            layer: picked.layer,
            selection: outputs.selection.map(|all| &all[tokens.start * topk..tokens.end * topk]),
        });
        let row = Row {
            attention: &room.name,
            shape: &room.shape,
            request: &plan.id,
            label: &packed.label,
            step: self.scene.step,
            index: packed.index,
            keys,
            queries: &packed.keys,
            own_mask: if is_cross { None } else { held.mask.as_deref() },
            first_position: packed.addition.start,
            pick,
        };
        let (vector, heads) = (self.written.vector, self.written.heads);
        let width = vector * T::DTYPE.size();
        // What comes from elsewhere may lie anywhere.
        let bytes = &outputs.o[tokens.start * width..tokens.end * width];
        let o: Vec<T> = bytes.chunks_exact(T::DTYPE.size()).map(bytemuck::pod_read_unaligned).collect();
        let lse = &outputs.lse[tokens.start * heads..tokens.end * heads];
        let layers = Layers { own: self.seen.layer, query: self.seen.query_layer };
        verify::check(&row, &sample, self.scene.seed, layers, T::DTYPE, &o, lse)
    }
}
