//! The whole operation in one call, for whoever has one layer and no plan to keep.

use mstar_kernels::flex::{Geometry, ScoreMod};
use mstar_kernels::{Buffer, DType, Error, Result, Stream, TensorMut, TensorRef, copy};

use crate::{AuxOutput, AuxRequest, BlockMask, Inputs, KernelOptions, MaskShape, Outputs, Plan, run};

/// The arguments of [`flex_attention_masked`] beside the tensors.
#[derive(Clone, Copy, Debug, Default)]
pub struct FlexArgs<'a> {
    /// What happens to the scaled scores, in this order.
    pub score_mods: &'a [ScoreMod<'a>],
    /// Which keys are seen, with the rule of the partial blocks in it; `None`: all of them.
    pub block_mask: Option<&'a BlockMask>,
    /// Factor of the dot product; `None`: `D^-0.5`.
    pub scale: Option<f32>,
    /// Whether there may be fewer key heads than query heads.
    pub enable_gqa: bool,
    /// What to return beside the output.
    pub return_aux: AuxRequest,
    /// How it is done.
    pub kernel_options: KernelOptions,
}

/// Attends `q` `[B, H, L, D]` over `k` `[B, G, M, D]` and `v` `[B, G, M, Dv]`, all f32, bf16 or f16, into `o` `[B, H, L, Dv]`
/// of the queries' type, under a mask and score mods (FlexAttention, arXiv 2412.05496). It plans, allocates scratch and
/// runs; several layers under one mask are served faster by a [`Plan`].
///
/// # Errors
/// Key heads that are not the query heads while `enable_gqa` is off, or that do not divide them; what [`Plan::new`] and
/// [`run`] refuse. Nothing is then written.
pub fn flex_attention_masked(
    stream: &Stream,
    q: TensorRef<'_>,
    k: TensorRef<'_>,
    v: TensorRef<'_>,
    args: &FlexArgs<'_>,
    o: TensorMut<'_>,
) -> Result<AuxOutput> {
    let axes = |tensor: &'static str, view: &TensorRef<'_>, letters: &str| match *view.shape() {
        [a, b, c, d] => Ok([a, b, c, d]),
        _ => Err(Error::Shape { tensor, expected: letters.into(), got: view.shape().to_vec() }),
    };
    let [batch, num_qo_heads, q_len, head_dim_qk] = axes("q", &q, "[B, H, L, D]")?;
    let [_, num_kv_heads, kv_len, _] = axes("k", &k, "[B, G, M, D]")?;
    let [.., head_dim_vo] = axes("v", &v, "[B, G, M, Dv]")?;
    if num_qo_heads != num_kv_heads && !args.enable_gqa {
        let why = format!(
            "{num_qo_heads} query heads need as many key heads unless enable_gqa says that they share them"
        );
        return Err(Error::Parameter {
            name: "enable_gqa",
            why,
            got: format!("false, {num_kv_heads} key heads"),
        });
    }
    let geometry = Geometry {
        batch,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        head_dim_vo,
        q_dtype: q.dtype(),
        kv_dtype: k.dtype(),
    };
    let all;
    let mask = match args.block_mask {
        Some(mask) => {
            let shape = mask.shape();
            for (tensor, got, letter, extent) in
                [("q", q_len, "L", shape.q_len), ("k", kv_len, "M", shape.kv_len)]
            {
                if got != extent {
                    let view = if tensor == "q" { &q } else { &k };
                    let expected = format!("{letter} = {extent}, the mask's");
                    return Err(Error::Shape { tensor, expected, got: view.shape().to_vec() });
                }
            }
            mask
        }
        None => {
            let shape = MaskShape { block_q: q_len.max(1), ..MaskShape::new(q_len, kv_len) };
            all = BlockMask::full(shape)?;
            &all
        }
    };
    let device = stream.device();
    let mut plan = Plan::new(&geometry, mask, &KernelOptions { device, ..args.kernel_options })?;
    plan.stage(stream, args.score_mods)?;
    let mut workspace = plan.workspace()?;
    let shape = [batch, num_qo_heads, q_len];
    let AuxRequest { lse, max_scores } = args.return_aux;
    let per_query =
        |asked: bool| asked.then(|| Buffer::for_tensor_on(device, DType::F32, &shape)).transpose();
    let (mut lse, mut max_scores) = (per_query(lse)?, per_query(max_scores)?);
    let inputs = Inputs { q, k, v, scale: args.scale, score_mods: args.score_mods };
    let outputs = Outputs { o, lse: view(&mut lse, &shape)?, max_scores: view(&mut max_scores, &shape)? };
    run(&plan, stream, &mut workspace, inputs, outputs)?;
    // Plan and scratch go when this returns.
    stream.synchronize()?;
    let fetch = |buffer: Option<Buffer>| -> Result<Option<Vec<f32>>> {
        let Some(buffer) = buffer else { return Ok(None) };
        let mut values = vec![0.0; shape.iter().product()];
        copy(stream, buffer.tensor(0, DType::F32, &shape)?, TensorMut::from_slice(&mut values, &shape)?)?;
        Ok(Some(values))
    };
    Ok(AuxOutput { lse: fetch(lse)?, max_scores: fetch(max_scores)? })
}

/// `[B, H, L]`, where it was asked for.
fn view<'a>(buffer: &'a mut Option<Buffer>, shape: &[usize]) -> Result<Option<TensorMut<'a>>> {
    buffer.as_mut().map(|buffer| buffer.tensor_mut(0, DType::F32, shape)).transpose()
}
