//! Around `topk`: who is selected is each query's own affair.

use std::collections::HashMap;

use mstar_core::attend::SparseAttention;
use mstar_core::graph::Bucket;
use mstar_core::kv::{KvPlan, LayerView, PagedKv};
use mstar_core::resource::PaddedShape;
use mstar_dsa::DsaPlan;
use mstar_kernels::mla::{AttendParams, Geometry, Variant, attend};
use mstar_kernels::paged::PageTable;
use mstar_kernels::plan::{Latents, Plan, PlanOptions};
use mstar_kernels::{Buffer, DType, Stream, TensorMut};

use crate::rig::{C, E, H, L, Rig, RowOut, SCALE, Setup, plan_id, step};

/// A rig whose requests have so many tokens already.
fn with_context(setup: Setup, requests: &[(&str, usize)]) -> Rig {
    let rig = Rig::new(setup);
    for &(request, tokens) in requests {
        rig.ingest(&[request]);
        if tokens > 0 {
            rig.step(&[(request, tokens)], None);
        }
    }
    rig
}

#[test]
fn needs_selection_is_exact_at_the_boundary() {
    let rig = with_context(Setup::default(), &[("a", 6)]);
    for (kv_len, needed) in [(7, false), (8, false), (9, true), (10, true)] {
        let planned = rig.planned(step(&[("a", 1)]), None);
        let id = plan_id(&planned, "main");
        assert_eq!(rig.kv.kv_plan(&id).unwrap().rows[0].kv_len, kv_len);
        assert_eq!(rig.dsa.needs_selection(&id).unwrap(), needed, "{kv_len} keys");
        let rows = rig.forward(&planned, "main");
        assert_eq!(rows[0].pick(0, 0).len(), if needed { 8 } else { 0 });
        rig.check(&rows[0]);
        rig.engine.commit(planned).unwrap();
    }
}

/// What dense attention alone makes of a step's rows in one layer: `o`, as bits.
fn without_indexer(rig: &Rig, rows: &KvPlan, layer: usize, q: &Buffer) -> Vec<u32> {
    let geometry = Geometry {
        num_qo_heads: H,
        kv_lora_rank: C,
        qk_rope_head_dim: E,
        page_size: rig.setup.page_size,
        q_dtype: DType::F32,
        kv_dtype: DType::F32,
    };
    let variant = Variant { sm_scale: SCALE, causal: true };
    let table = PageTable {
        qo_indptr: &rows.qo_indptr,
        kv_indptr: &rows.kv_indptr,
        kv_indices: &rows.kv_indices,
        kv_last_page_len: &rows.kv_last_page_len,
        num_pages: rig.setup.pages,
        ..PageTable::default()
    };
    let plan = Plan::<Latents>::new(&geometry, &variant, &table, &PlanOptions::default()).unwrap();
    let LayerView::Mla { latent } = rig.kv.layer(layer).unwrap() else { unreachable!() };
    let t = rows.slots.len();
    let q = q.tensor(0, DType::F32, &[t, H, C + E]).unwrap();
    let mut o = vec![f32::NAN; t * H * C];
    let mut workspace = Buffer::zeroed(plan.workspace_bytes()).unwrap();
    let bytes = workspace.len();
    let params = AttendParams {
        work: plan.work(),
        q_nope: q.narrow(2, 0, C).unwrap(),
        q_pe: q.narrow(2, C, E).unwrap(),
        latent,
        o: TensorMut::from_slice(&mut o, &[t, H, C]).unwrap(),
        lse: None,
        workspace: workspace.tensor_mut(0, DType::U8, &[bytes]).unwrap(),
        workers: plan.workers(),
    };
    attend(&Stream::cpu(), params).unwrap();
    o.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn decode_of_at_most_topk_keys_has_the_bits_of_dense_attention() {
    let rig = with_context(Setup { topk: 600, ..Setup::default() }, &[("a", 599), ("b", 3), ("c", 599)]);
    rig.step(&[("c", 1)], None);
    // Beside a row that is selected, and alone.
    for rows in [&[("a", 1), ("b", 1), ("c", 1)][..], &[("b", 1)]] {
        let planned = rig.planned(step(rows), None);
        let plan = rig.kv_plan(&planned, "main");
        let outs = rig.forward(&planned, "main");
        for layer in 0..L {
            let q = rig.queries(&planned, layer);
            let dense = without_indexer(&rig, &plan, layer, &q);
            for (index, out) in outs.iter().enumerate().filter(|(_, out)| out.kv_len <= 600) {
                let bits: Vec<u32> = out.layers[layer].o.iter().map(|x| x.to_bits()).collect();
                assert_eq!(bits, dense[index * H * C..(index + 1) * H * C], "{} layer {layer}", out.request);
            }
        }
        rig.engine.commit(planned).unwrap();
    }
}

fn row<'a>(outs: &'a [RowOut], request: &str) -> &'a RowOut {
    outs.iter().find(|out| out.request.as_str() == request).unwrap()
}

#[test]
fn f40_a_neighbour_that_crosses_topk_changes_no_bit() {
    // Victims: below, at and past topk, a chunk that crosses it, a chunk wholly past it.
    let victims = [("below", 4, 1), ("at", 7, 1), ("past", 8, 1), ("crossing", 5, 9), ("long", 40, 3)];
    let alone: Vec<RowOut> = victims
        .iter()
        .map(|&(name, context, span)| {
            let rig = with_context(Setup::default(), &[(name, context)]);
            rig.step(&[(name, span)], None).remove(0)
        })
        .collect();
    for neighbour in [0, 6, 7, 8, 9, 100] {
        for first in [true, false] {
            let mut requests: Vec<(&str, usize)> =
                victims.iter().map(|&(name, context, _)| (name, context)).collect();
            let mut rows: Vec<(&str, usize)> = victims.iter().map(|&(name, _, span)| (name, span)).collect();
            requests.insert(if first { 0 } else { requests.len() }, ("neighbour", neighbour));
            rows.insert(if first { 0 } else { rows.len() }, ("neighbour", 2));
            let rig = with_context(Setup { page_size: 5, ..Setup::default() }, &requests);
            let outs = rig.step(&rows, None);
            for expected in &alone {
                row(&outs, expected.request.as_str()).assert_same_bits(expected);
            }
        }
    }
}

#[test]
fn buckets_change_no_bit_and_a_crossing_needs_nothing_new() {
    let shape = PaddedShape { rows: 5, tokens: 9 };
    let largest = mstar_core::attend::StepShape { rows: 5, tokens: 40, kv_len: 64 };
    let bucketed = with_context(Setup { largest: Some(largest), ..Setup::default() }, &[("a", 5), ("b", 12)]);
    let eager = with_context(Setup::default(), &[("a", 5), ("b", 12)]);
    let mut before = None;
    for turn in 0..6 {
        let padded = bucketed.step(&[("a", 1), ("b", 2)], Some(shape));
        for (padded, eager) in padded.iter().zip(eager.step(&[("a", 1), ("b", 2)], None)) {
            padded.assert_same_bits(&eager);
        }
        let bytes = bucketed.dsa.bytes();
        assert!(before.is_none_or(|before| before == bytes), "turn {turn}: {before:?} -> {bytes}");
        // Both slots have their memory after the first two.
        before = (turn > 1).then_some(bytes);
    }
}

#[test]
fn work_counts_pairs_scored_attended_and_dense() {
    let rig = with_context(Setup::default(), &[("a", 6), ("b", 20)]);
    let planned = rig.planned(step(&[("a", 4), ("b", 1)]), None);
    let id = plan_id(&planned, "main");
    let work = rig.dsa.sparse_work(&id);
    assert_eq!((work.scored, work.attended, work.dense), (9 + 10 + 21, 7 + 8 * 4, 7 + 8 + 9 + 10 + 21));
    let (select, attend) = rig.dsa.work(&id);
    assert_eq!((select.tokens, attend.tokens), (3, 5));
    assert_eq!(select.flops, 2 * 40 * 4 * 16);
    assert_eq!(attend.flops, 2 * (7 + 32) * 3 * (48 + 32));
    assert_eq!(select.bytes_read, (10 + 21) * 16 * 4 + 3 * 4 * (16 * 4 + 4));
    let said = rig.dsa.kernel(&id).unwrap();
    assert!(said.contains("3 queries over a pick of 8, 2 over all keys; index keys f32 in pages"), "{said}");
    rig.engine.abort(planned);
}

#[test]
fn f40_threads_change_no_bit() {
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let rig = with_context(Setup::default(), &[("a", 700), ("b", 3)]);
            let mut outs = rig.step(&[("a", 33), ("b", 12)], None);
            outs.extend(rig.step(&[("a", 1), ("b", 1)], None));
            outs
        })
    };
    let one = run(1);
    for threads in [2, 3, 7] {
        for (out, expected) in run(threads).iter().zip(&one) {
            out.assert_same_bits(expected);
        }
    }
}

#[test]
fn f19_what_a_slot_holds_stays_and_keeps_its_address_while_another_is_planned() {
    let largest = mstar_core::attend::StepShape { rows: 4, tokens: 40, kv_len: 64 };
    let rig = with_context(Setup { largest: Some(largest), ..Setup::default() }, &[("a", 7), ("b", 12)]);
    let shape = PaddedShape { rows: 4, tokens: 6 };
    let bucket = Bucket { walk: "decode".into(), shape };
    let mut seen = HashMap::new();
    let mut running = rig.planned(step(&[("a", 1), ("b", 2)]), Some(shape));
    for turn in 0..8 {
        let id = plan_id(&running, "main");
        let shown = |rows: &DsaPlan| format!("{rows:?}");
        let before = shown(&rig.dsa.dsa_plan(&id).unwrap());
        let ahead = rig.engine.preplan_in(&running, step(&[("a", 1), ("b", 2)]), &bucket).unwrap();
        let ahead = ahead.admitted().unwrap();
        let rows = rig.dsa.dsa_plan(&id).unwrap();
        assert_eq!(shown(&rows), before);
        let at = [rows.pages.as_ptr(), rows.row_page_offset.as_ptr(), rows.row_start.as_ptr()];
        let at = (at, rows.row_request.as_ptr(), rows.positions.as_ptr());
        drop(rows);
        assert_eq!(*seen.entry(running.slot()).or_insert(at), at, "turn {turn}");
        rig.forward(&running, "main").iter().for_each(|row| rig.check(row));
        rig.engine.commit(running).unwrap();
        running = rig.engine.promote(ahead).unwrap().admitted().unwrap();
    }
    assert_eq!(seen.len(), 2, "both slots were used");
}
