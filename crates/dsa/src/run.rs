//! The two calls of a layer, on borrowed views: select, and attend.

use mstar_kernels::dsa::{SelectParams, SparseParams, select, select_at, sparse_attend, sparse_attend_at};
use mstar_kernels::mla::{self, AttendParams};
use mstar_kernels::{DType, Error, Stream, TensorMut, TensorRef};

use crate::{Plan, Result};

/// What an indexer reads. `T`, `Hi`, `Di`, `P`, `S` are the plan's; with padding, `T` is the padded count.
#[derive(Clone, Copy, Debug)]
pub struct IndexInputs<'a> {
    /// `[T, Hi, Di]` f32, bf16 or f16. Outer strides are free.
    pub q: TensorRef<'a>,
    /// `[T, Hi]` f32: head weights, scale factors folded in.
    pub weights: TensorRef<'a>,
    /// `[P, S, W]` of the format: index keys, in the slots of their latents, the batch's own among them.
    pub keys: TensorRef<'a>,
}

/// What attention reads.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// `[T, H, C]`, of `q_dtype`: queries multiplied into latent space. Outer strides are free.
    pub q_nope: TensorRef<'a>,
    /// `[T, H, E]`, of `q_dtype`; empty when `E` is 0.
    pub q_pe: TensorRef<'a>,
    /// `[P, S, C + E]`, of `kv_dtype`: `[ckv | kpe]` a token. Outer strides are free.
    pub latent: TensorRef<'a>,
}

/// What attention writes: every element, the padded tokens' included.
#[derive(Debug)]
pub struct Outputs<'a> {
    /// `[T, H, C]`, of `q_dtype`, in latent space. Rows may be strided, never overlapping.
    pub o: TensorMut<'a>,
    /// `[T, H]` f32, natural logarithm; `-inf` where a query sees nothing or picks nothing.
    pub lse: Option<TensorMut<'a>>,
}

/// Picks the keys of every query that sees more than `topk`: `picks` `[T, K]` i32 gets positions within the row, counted
/// from its first kept key, rising, then -1. Other queries pick nothing. `workspace` `[n]` u8 has at least
/// [`Plan::workspace_bytes`]. Allocates nothing. Layers that share these picks [`attend`] the same ones.
///
/// # Errors
/// Tensors that are not what was planned, a workspace that is too small. Nothing is then written.
pub fn select_picks(
    plan: &Plan,
    stream: &Stream,
    workspace: TensorMut<'_>,
    inputs: IndexInputs<'_>,
    picks: TensorMut<'_>,
) -> Result<()> {
    let (rows, indexer) = (plan.rows(), plan.layer().indexer);
    let IndexInputs { q, weights, keys } = inputs;
    let (tokens, heads) = (Some(plan.num_tokens()), Some(indexer.index_n_heads));
    q.expect("q", "[T, Hi, Di]", &[tokens, heads, Some(indexer.index_head_dim)], None, stream.device())?;
    let params = SelectParams {
        q,
        weights,
        keys,
        format: indexer.format,
        row_request: &rows.row_request,
        positions: &rows.positions,
        kv_indptr: &rows.row_page_offset,
        kv_indices: &rows.pages,
        page_start: &rows.row_start,
        kv_lens: &rows.row_keys,
        topk: indexer.index_topk,
        selection: picks,
        workspace,
        workers: plan.workers(),
    };
    match plan.table(stream)? {
        Some(on) => select_at(stream, on, params)?,
        None => select(stream, params)?,
    }
    Ok(())
}

/// Attends one layer: queries with a pick attend that, the others every key that they see. `picks` may be `None` for a plan
/// that [needs none](Plan::needs_selection). Allocates nothing.
///
/// # Errors
/// A plan that needs picks and is given none; tensors that are not what was planned; a pick beyond what its row holds; a
/// workspace that is too small. Nothing is then written.
pub fn attend(
    plan: &Plan,
    stream: &Stream,
    mut workspace: TensorMut<'_>,
    inputs: Inputs<'_>,
    picks: Option<TensorRef<'_>>,
    mut outputs: Outputs<'_>,
) -> Result<()> {
    let (rows, workers) = (plan.rows(), plan.workers());
    let Inputs { q_nope, q_pe, latent } = inputs;
    let picks = match (plan.needs_selection(), picks) {
        (false, _) => None,
        (true, Some(picks)) => Some(picks),
        (true, None) => {
            let topk = plan.layer().indexer.index_topk;
            let why = format!("some query sees more than {topk} keys; select its picks first");
            return Err(Error::Parameter { name: "picks", why, got: "none".into() }.into());
        }
    };
    // Asked first, since what attends all it sees is written first.
    if let Some(selection) = picks {
        let shape = [Some(plan.num_tokens()), Some(plan.layer().indexer.index_topk)];
        selection.expect("picks", "[T, K]", &shape, Some(DType::I32), stream.device())?;
        let (o, lse) = (outputs.o.reborrow(), outputs.lse.as_mut().map(TensorMut::reborrow));
        sparse(plan, inputs, selection, Outputs { o, lse }, workspace.reborrow()).check(stream)?;
    }
    // Where every query has a pick, dense attention would have only zeros to write.
    if picks.is_none() || plan.is_captured() || !rows.all_selected() {
        let params = AttendParams {
            work: plan.dense().work(),
            q_nope,
            q_pe,
            latent,
            o: outputs.o.reborrow(),
            lse: outputs.lse.as_mut().map(TensorMut::reborrow),
            workspace: workspace.reborrow(),
            workers,
        };
        mla::attend(stream, params)?;
    }
    let Some(selection) = picks else { return Ok(()) };
    let params = sparse(plan, inputs, selection, outputs, workspace);
    match plan.table(stream)? {
        Some(on) => sparse_attend_at(stream, on, params)?,
        None => sparse_attend(stream, params)?,
    }
    Ok(())
}

/// What the kernel of picks takes.
fn sparse<'a>(
    plan: &'a Plan,
    inputs: Inputs<'a>,
    selection: TensorRef<'a>,
    outputs: Outputs<'a>,
    workspace: TensorMut<'a>,
) -> SparseParams<'a> {
    let rows = plan.rows();
    SparseParams {
        geometry: plan.layer().geometry,
        sm_scale: plan.layer().sm_scale,
        q_nope: inputs.q_nope,
        q_pe: inputs.q_pe,
        latent: inputs.latent,
        selection,
        row_request: &rows.row_request,
        kv_indptr: &rows.row_page_offset,
        kv_indices: &rows.pages,
        page_start: &rows.row_start,
        kv_lens: &rows.row_keys,
        o: outputs.o,
        lse: outputs.lse,
        workspace,
        workers: plan.workers(),
    }
}
