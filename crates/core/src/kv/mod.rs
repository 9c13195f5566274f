//! Paged KV caches: what they are made of, what a plan of one says, and what a backend sees of one.

use std::sync::Arc;

use mstar_kernels::{DType, Stream, TensorRef};

use crate::{Label, PlanId, RequestId, Resource, Result};

/// Page 0 of every store: no request is ever given it. Padded table entries name it, so that every id is legal.
pub const SINK_PAGE: i32 = 0;

/// How a page's tokens lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KvLayout {
    /// Keys and values per head: `[P, 2, S, G, D]` a layer.
    Nhd {
        /// `G`: key and value heads on this rank.
        num_kv_heads: usize,
        /// `D`: width of a key and of a value.
        head_dim: usize,
    },
    /// One latent a token, `[ckv | kpe]`: `[P, S, C + E]` a layer.
    Mla {
        /// `C`.
        kv_lora_rank: usize,
        /// `E`; may be 0.
        qk_rope_head_dim: usize,
    },
}

/// A cache's geometry.
#[derive(Clone, Debug, PartialEq)]
pub struct KvConfig {
    /// How a page's tokens lie.
    pub layout: KvLayout,
    /// Element type of the stored keys, values or latents.
    pub dtype: DType,
    /// `S`: tokens a page.
    pub page_size: usize,
    /// `P`: pages, the sink among them.
    pub max_num_pages: usize,
    /// Tokens that a stream may hold.
    pub max_seq_len: usize,
    /// Layers, each with its own pages under the one table.
    pub num_layers: usize,
    /// Further planes under the same table.
    pub planes: Vec<PlaneConfig>,
    /// Whether filled pages are offered to the prefix index.
    pub prefix_cache: bool,
    /// Tokens kept at the end of a stream; earlier whole pages are given back. `None` keeps all.
    pub retention: Option<usize>,
}

/// One more array of per-token entries, `[P, S, width]` a layer, moved with the pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlaneConfig {
    /// Its name: `index_keys`, `scales`.
    pub name: String,
    /// Its element type.
    pub dtype: DType,
    /// Elements a token.
    pub width: usize,
}

/// One segment in a plan, in packed order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvRow {
    /// Whose stream; a padded row has a dummy id.
    pub request: RequestId,
    /// Which of its streams.
    pub label: Label,
    /// Query tokens: the segment's span.
    pub q_len: usize,
    /// Absolute position one past the last token, the step's own included.
    pub kv_len: usize,
    /// Absolute position of slot 0 of the first listed page: a multiple of the page size, 0 unless retention gave pages back.
    pub kv_offset: usize,
    /// Slots of the first listed page that lie before the stream's first kept token.
    pub page_start: usize,
    /// The stream's generation when the plan was made.
    pub generation: u64,
}

/// The packed rows and page tables of one plan label. Names and meaning of the arrays are the field's;
/// `R` rows, `T` tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvPlan {
    /// Which plan this is.
    pub id: PlanId,
    /// `[R]`.
    pub rows: Vec<KvRow>,
    /// `[R + 1]`: where each row's tokens start.
    pub qo_indptr: Vec<i32>,
    /// `[R + 1]`: where each row's pages start in `kv_indices`.
    pub kv_indptr: Vec<i32>,
    /// Page ids, row after row.
    pub kv_indices: Vec<i32>,
    /// `[R]`: tokens in each row's last page, `1..=S`; 0 for a row without pages.
    pub kv_last_page_len: Vec<i32>,
    /// `[T]`: the cache slot (`page * S + slot`) that each token is written to; -1 writes nothing.
    pub slots: Vec<i64>,
    /// `[T]`: each token's absolute position; -1 for padding.
    pub positions: Vec<i32>,
    /// Rows that are real; the others pad the plan to its bucket.
    pub real_rows: usize,
}

/// One layer of a cache, as a kernel reads it.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum LayerView<'a> {
    /// `k` and `v`, each `[P, S, G, D]`.
    Nhd {
        /// Keys.
        k: TensorRef<'a>,
        /// Values.
        v: TensorRef<'a>,
    },
    /// `latent`, `[P, S, C + E]`.
    Mla {
        /// Latents.
        latent: TensorRef<'a>,
    },
}

/// What a step writes into a cache.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum KvEntries<'a> {
    /// `k` and `v`, each `[T, G, D]`.
    Nhd {
        /// Keys.
        k: TensorRef<'a>,
        /// Values.
        v: TensorRef<'a>,
    },
    /// `ckv` `[T, C]` and `kpe` `[T, E]`.
    Mla {
        /// Compressed latents.
        ckv: TensorRef<'a>,
        /// Rotary parts.
        kpe: TensorRef<'a>,
    },
}

/// A paged cache, as attention resources see it.
pub trait PagedKv: Resource {
    /// Its geometry.
    fn config(&self) -> &KvConfig;

    /// A plan made by [`Resource::plan`].
    ///
    /// # Errors
    /// When there is none, or it belongs to another step.
    fn kv_plan(&self, id: &PlanId) -> Result<Arc<KvPlan>>;

    /// The labels that a step was planned under.
    ///
    /// # Errors
    /// When the step was not planned.
    fn plan_labels(&self, serial: crate::StepSerial) -> Result<Vec<Label>>;

    /// One layer's pages.
    ///
    /// # Errors
    /// A layer that the cache does not have.
    fn layer(&self, layer: usize) -> Result<LayerView<'_>>;

    /// A plane of one layer, `[P, S, width]`.
    ///
    /// # Errors
    /// A layer or plane that the cache does not have.
    fn plane(&self, name: &str, layer: usize) -> Result<TensorRef<'_>>;

    /// Writes the step's entries of one layer to the planned slots.
    ///
    /// # Errors
    /// Shapes or dtypes that are not the cache's; nothing is written.
    fn write_kv(&self, id: &PlanId, layer: usize, entries: KvEntries<'_>, stream: &Stream) -> Result<()>;
}
