//! A denoiser that keeps its own buffers and attends them through `mstar-attn-dense` alone: no store, no step, no spec.
//!
//! Two images, each under its own text. The texts' keys and values were computed once and lie packed; every pass computes
//! the images' anew, as one fused projection `[T, H + 2 G, D]` whose parts are handed over as views. One plan serves
//! all passes. Each pass is held against a plain loop, and the program fails when a number is wrong.

mod plain;

use std::error::Error;

use mstar_attn_dense::{
    DType, DensePlan, Geometry, Inputs, Outputs, PlanOptions, Prefix, Stream, Table, TensorMut, TensorRef,
    Variant, Workspace, run,
};

use crate::plain::{Row, noise};

/// The model's layer: 8 query heads over 2 key heads of width 64.
const QUERY_HEADS: usize = 8;
const KEY_HEADS: usize = 2;
const WIDTH: usize = 64;

/// Tokens of each image and of each text.
const IMAGES: [usize; 2] = [48, 80];
const TEXTS: [usize; 2] = [17, 5];

fn main() -> Result<(), Box<dyn Error>> {
    let geometry = Geometry {
        num_qo_heads: QUERY_HEADS,
        num_kv_heads: KEY_HEADS,
        head_dim_qk: WIDTH,
        head_dim_vo: WIDTH,
        q_dtype: DType::F32,
        kv_dtype: DType::F32,
    };
    let (tokens, prefix) = (IMAGES.iter().sum::<usize>(), TEXTS.iter().sum::<usize>());
    let cu_q = [0, IMAGES[0] as i32, tokens as i32];
    let cu_p = [0, TEXTS[0] as i32, prefix as i32];
    let table = Table { cu_q: &cu_q, prefix: Prefix::Packed { cu_p: &cu_p }, cu_k: &cu_q };
    // Every token of an image sees its text and the whole image.
    let plan = DensePlan::new(&geometry, &Variant::full(WIDTH), &table, &PlanOptions::default())?;
    let mut workspace = Workspace::with_bytes(plan.workspace_bytes())?;

    let text = |kind: usize| -> Vec<f32> {
        (0..prefix * KEY_HEADS * WIDTH).map(|at| noise(kind * 1_000_003 + at)).collect()
    };
    let (k_prefix, v_prefix) = (text(1), text(2));
    let packed = [prefix, KEY_HEADS, WIDTH];
    let mut worst = 0f32;

    for pass in 0..6 {
        let heads = QUERY_HEADS + 2 * KEY_HEADS;
        let fused: Vec<f32> =
            (0..tokens * heads * WIDTH).map(|at| noise((pass + 3) * 1_000_003 + at)).collect();
        let part = |first: usize, count: usize| {
            TensorRef::from_slice_strided(
                &fused[first * WIDTH..],
                &[tokens, count, WIDTH],
                &[heads * WIDTH, WIDTH, 1],
            )
        };
        let mut o = vec![0f32; tokens * QUERY_HEADS * WIDTH];
        let mut lse = vec![0f32; tokens * QUERY_HEADS];
        run(
            &plan,
            &Stream::cpu(),
            &mut workspace,
            Inputs {
                q: part(0, QUERY_HEADS)?,
                k_prefix: Some(TensorRef::from_slice(&k_prefix, &packed)?),
                v_prefix: Some(TensorRef::from_slice(&v_prefix, &packed)?),
                k: part(QUERY_HEADS, KEY_HEADS)?,
                v: part(QUERY_HEADS + KEY_HEADS, KEY_HEADS)?,
            },
            Outputs {
                o: TensorMut::from_slice(&mut o, &[tokens, QUERY_HEADS, WIDTH])?,
                lse: Some(TensorMut::from_slice(&mut lse, &[tokens, QUERY_HEADS])?),
            },
        )?;
        for (row, segment) in plan.segments().iter().enumerate() {
            let image = Row {
                fused: &fused,
                heads,
                k_prefix: &k_prefix,
                v_prefix: &v_prefix,
                text: cu_p[row] as usize..cu_p[row + 1] as usize,
                image: segment.fresh_start..segment.fresh_start + segment.fresh_len,
            };
            for query in segment.q_start..segment.q_start + segment.q_len {
                for head in 0..QUERY_HEADS {
                    let at = (query * QUERY_HEADS + head) * WIDTH;
                    let wanted = image.attend(query, head, head / (QUERY_HEADS / KEY_HEADS));
                    for (got, wanted) in o[at..at + WIDTH].iter().zip(wanted) {
                        worst = worst.max((got - wanted).abs());
                    }
                }
            }
        }
    }
    println!(
        "6 passes over 2 images, {} keys at most: largest difference from a plain loop {worst:.1e}",
        plan.max_k()
    );
    if !(worst < 1e-5) {
        return Err(format!("the difference should be below 1e-5, it is {worst}").into());
    }
    Ok(())
}
