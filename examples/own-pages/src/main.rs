//! An engine that keeps its own pages and attends them through `mstar-attn-paged` alone: no store, no step, no
//! spec. Its pool lies head first (`[P, G, S, D]` for keys and again for values), which a view with strides
//! hands over as it is.
//!
//! Two sequences grow token by token in pages taken in any order; after each token every sequence is attended and
//! held against a plain loop. The program fails when a number is wrong.

mod pool;

use std::error::Error;

use mstar_attn_paged::{
    DType, Geometry, Inputs, Outputs, PageTable, Plan, PlanOptions, Stream, TensorMut, TensorRef, Variant,
    Workspace, run,
};

use crate::pool::{Pool, Sequence};

/// The model's layer: 8 query heads over 2 key heads of width 64.
const QUERY_HEADS: usize = 8;
const KEY_HEADS: usize = 2;
const WIDTH: usize = 64;
const PAGE_SIZE: usize = 16;

fn main() -> Result<(), Box<dyn Error>> {
    let mut pool = Pool::new(16, KEY_HEADS, PAGE_SIZE, WIDTH);
    let mut sequences = [Sequence::default(), Sequence::default()];
    // The second one has a prompt already, so that the rows are ragged.
    for _ in 0..37 {
        pool.append(&mut sequences[1])?;
    }

    let geometry = Geometry {
        num_qo_heads: QUERY_HEADS,
        num_kv_heads: KEY_HEADS,
        head_dim_qk: WIDTH,
        head_dim_vo: WIDTH,
        page_size: PAGE_SIZE,
        q_dtype: DType::F32,
        kv_dtype: DType::F32,
    };
    let variant = Variant::causal(WIDTH);
    let mut plan: Option<Plan> = None;
    let mut worst = 0f32;

    for step in 0..50 {
        for sequence in &mut sequences {
            pool.append(sequence)?;
        }
        let (kv_indptr, kv_indices, kv_last_page_len) = pool.table(&sequences);
        let table = PageTable {
            qo_indptr: &[0, 1, 2],
            kv_indptr: &kv_indptr,
            kv_indices: &kv_indices,
            kv_last_page_len: &kv_last_page_len,
            num_pages: pool.pages(),
            ..PageTable::default()
        };
        // A plan is made once and then made again in place: its memory is reused.
        match &mut plan {
            Some(plan) => drop(plan.replan(&geometry, &variant, &table, &PlanOptions::default())?),
            None => plan = Some(Plan::new(&geometry, &variant, &table, &PlanOptions::default())?),
        }
        let plan = plan.as_ref().expect("made above");
        let mut workspace = Workspace::for_plan(plan)?;

        let tokens = sequences.len();
        let q: Vec<f32> =
            (0..tokens * QUERY_HEADS * WIDTH).map(|i| pool::noise(step * 1_000_003 + i)).collect();
        let mut o = vec![0f32; q.len()];
        let mut lse = vec![0f32; tokens * QUERY_HEADS];
        run(
            plan,
            &Stream::cpu(),
            &mut workspace,
            Inputs {
                q: TensorRef::from_slice(&q, &[tokens, QUERY_HEADS, WIDTH])?,
                k: pool.keys()?,
                v: pool.values()?,
                sinks: None,
                alibi_slopes: None,
            },
            Outputs {
                o: TensorMut::from_slice(&mut o, &[tokens, QUERY_HEADS, WIDTH])?,
                lse: Some(TensorMut::from_slice(&mut lse, &[tokens, QUERY_HEADS])?),
            },
        )?;

        for (t, sequence) in sequences.iter().enumerate() {
            for head in 0..QUERY_HEADS {
                let at = (t * QUERY_HEADS + head) * WIDTH;
                let wanted =
                    pool.plain_attention(sequence, &q[at..at + WIDTH], head / (QUERY_HEADS / KEY_HEADS));
                for (got, wanted) in o[at..at + WIDTH].iter().zip(wanted) {
                    worst = worst.max((got - wanted).abs());
                }
            }
        }
    }
    println!(
        "50 steps of 2 rows through 16 pages of our own: largest difference from a plain loop {worst:.1e}"
    );
    if !(worst < 1e-5) {
        return Err(format!("the difference should be below 1e-5, it is {worst}").into());
    }
    Ok(())
}
