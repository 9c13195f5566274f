//! Faults that users of other projects met, as tests of dense attention.

use mstar_attn_dense::{
    DenseOptions, DensePlan, Inputs, Outputs, PlanOptions, Prefix, PrefixSource, Stream, Table, TensorMut,
    TensorRef, Variant, Workspace, run,
};

use crate::oracle::{Batch, Shape};
use crate::rig::{D, G, Rig, denoise, noise, step, written};

#[test]
fn f03_nan_left_in_pages_and_in_gathered_buffers_reaches_no_row() {
    for prefix in [PrefixSource::Gathered, PrefixSource::Pages] {
        let rig = Rig::new(DenseOptions { causal: false, prefix, ..DenseOptions::default() });
        // Every page is filled with NaN by a stream that then goes.
        rig.ingest(&["nan"]);
        let planned = rig.planned(written("nan", 250), None);
        for layer in 0..crate::rig::L {
            let stream = Stream::cpu();
            let mut forward = planned.forward("main", &stream);
            forward.set_layer(layer);
            let nan = vec![f32::NAN; 250 * G * D];
            let view = TensorRef::from_slice(&nan, &[250, G, D]).unwrap();
            let entries = mstar_core::kv::KvEntries::Nhd { k: view, v: view };
            mstar_core::attend::write_kv(&*rig.kv, &forward, entries).unwrap();
        }
        rig.engine.commit(planned).unwrap();
        rig.engine.remove(&"nan".into()).unwrap();
        rig.ingest(&["a", "b"]);
        rig.step(step(&[("a", "main", 9), ("b", "main", 6)], true), 1);
        rig.step(step(&[("b", "main", 5), ("a", "main", 3)], false), 2);
    }
}

#[test]
fn f05_rows_without_queries_prefix_or_fresh_keys_change_nothing_of_their_neighbours() {
    let shape = Shape { h: 4, g: 2, d: 32, dv: 32 };
    let rows = [(0, 0, 0), (4, 9, 4), (0, 12, 0), (3, 0, 0), (0, 0, 0), (2, 0, 2), (0, 0, 0)];
    for causal in [true, false] {
        Batch::<f32>::of(shape, causal, &rows).agrees();
    }
    // In a step: a read of span 0 beside a denoising row.
    let rig = Rig::new(DenseOptions::default());
    rig.ingest(&["a", "b"]);
    rig.step(step(&[("a", "main", 9), ("b", "main", 6)], true), 1);
    rig.step(step(&[("a", "main", 0), ("b", "main", 4)], false), 2);
    rig.step(step(&[("a", "main", 0), ("b", "main", 0)], false), 3);
}

#[test]
fn f06_causality_is_aligned_to_the_last_key() {
    // With equal keys and values 0, 1, 2, .. a query's output is half of what it sees last.
    let (prefix, fresh) = (5usize, 3usize);
    let shape = Shape { h: 1, g: 1, d: 4, dv: 4 };
    let geometry = Batch::<f32>::of(shape, true, &[]).geometry();
    let table = Table { cu_q: &[0, 3], prefix: Prefix::Packed { cu_p: &[0, 5] }, cu_k: &[0, 3] };
    let plan = DensePlan::new(&geometry, &Variant::causal(4), &table, &PlanOptions::default()).unwrap();
    let values = |from: usize, len: usize| -> Vec<f32> {
        (from..from + len).flat_map(|position| [position as f32; 4]).collect()
    };
    let (v_prefix, v) = (values(0, prefix), values(prefix, fresh));
    let zeros = [0f32; 20];
    let (mut o, mut lse) = ([f32::NAN; 12], [f32::NAN; 3]);
    let mut workspace = Workspace::with_bytes(plan.workspace_bytes()).unwrap();
    let view = |x, tokens| Some(TensorRef::from_slice(x, &[tokens, 1, 4]).unwrap());
    let inputs = Inputs {
        q: TensorRef::from_slice(&zeros[..12], &[3, 1, 4]).unwrap(),
        k_prefix: view(&zeros, prefix),
        v_prefix: view(&v_prefix[..], prefix),
        k: TensorRef::from_slice(&zeros[..12], &[3, 1, 4]).unwrap(),
        v: TensorRef::from_slice(&v, &[3, 1, 4]).unwrap(),
    };
    let outputs = Outputs {
        o: TensorMut::from_slice(&mut o, &[3, 1, 4]).unwrap(),
        lse: Some(TensorMut::from_slice(&mut lse, &[3, 1]).unwrap()),
    };
    run(&plan, &Stream::cpu(), &mut workspace, inputs, outputs).unwrap();
    for query in 0..fresh {
        let last = (prefix + query) as f32;
        assert!((o[query * 4] - last / 2.0).abs() < 1e-5, "query {query} averages to {}", o[query * 4]);
        assert!((lse[query] - (last + 1.0).ln()).abs() < 1e-6);
    }
}

#[test]
fn f13_entries_past_a_rows_pages_are_never_read() {
    // Two rows of one and two pages of 4; a third page is listed for the second and holds none of its prefix.
    let (s, g, d) = (4, 1, 16);
    let geometry = Batch::<f32>::of(Shape { h: 2, g, d, dv: d }, false, &[]).geometry();
    let attend = |kv_indices: &[i32], poison: f32| {
        let pool: Vec<f32> = (0..6 * s * g * d)
            .map(|at| if at / (s * g * d) == 5 { poison } else { noise(&[at as u64]) })
            .collect();
        let pool = TensorRef::from_slice(&pool, &[6, s, g, d]).unwrap();
        let prefix = Prefix::Pages {
            kv_indptr: &[0, 1, 4],
            kv_indices,
            prefix_len: &[3, 6],
            page_size: s,
            page_start: None,
            num_pages: 6,
        };
        let table = Table { cu_q: &[0, 1, 3], prefix, cu_k: &[0, 1, 3] };
        let plan = DensePlan::new(&geometry, &Variant::full(d), &table, &PlanOptions::default()).unwrap();
        let mut workspace = Workspace::with_bytes(plan.workspace_bytes()).unwrap();
        let own: Vec<f32> = (0..3 * 2 * d).map(|at| noise(&[7, at as u64])).collect();
        let mut o = vec![f32::NAN; 3 * 2 * d];
        let kv = TensorRef::from_slice(&own[..3 * d], &[3, g, d]).unwrap();
        let inputs = Inputs {
            q: TensorRef::from_slice(&own, &[3, 2, d]).unwrap(),
            k_prefix: Some(pool),
            v_prefix: Some(pool),
            k: kv,
            v: kv,
        };
        let outputs = Outputs { o: TensorMut::from_slice(&mut o, &[3, 2, d]).unwrap(), lse: None };
        run(&plan, &Stream::cpu(), &mut workspace, inputs, outputs).unwrap();
        o
    };
    let clean = attend(&[1, 2, 3, 4], 0.0);
    assert!(clean.iter().all(|x| x.is_finite()));
    assert_eq!(clean, attend(&[1, 2, 3, 5, 777, -9], f32::NAN));
}

#[test]
fn f15_any_group_size_maps_heads_right() {
    for group in [1, 2, 3, 5, 6, 7, 12] {
        let shape = Shape { h: 2 * group, g: 2, d: 32, dv: 48 };
        Batch::<f32>::of(shape, true, &[(5, 40, 5), (1, 9, 1)]).agrees();
    }
}

#[test]
fn f17_rows_that_pad_a_bucket_yield_zero_and_write_nothing_and_real_rows_equal_eager() {
    for (commit, rows) in [(false, 3), (true, 3), (false, 5), (true, 5)] {
        let run = |bucket| {
            let rig = Rig::new(DenseOptions::default());
            rig.ingest(&["a", "b"]);
            rig.step(step(&[("a", "main", 9), ("b", "main", 4)], true), 1);
            let outs = rig.step_in(step(&[("a", "main", 3), ("b", "main", 5)], commit), 2, bucket);
            let bits: Vec<_> = outs.iter().flat_map(|row| row.bits()).collect();
            // What padding would write is NaN, which `forward` feeds it.
            (bits, rig.pool())
        };
        let shape = mstar_core::resource::PaddedShape { rows, tokens: 16 };
        assert!(run(None) == run(Some(shape)), "{rows} rows, kept: {commit}");
    }
}

#[test]
fn f18_memory_is_what_was_foreseen_and_stays_where_it_is() {
    let largest = mstar_core::attend::StepShape { rows: 2, tokens: 24, kv_len: 40 };
    let rig = Rig::with(crate::rig::config(4, 64), DenseOptions::default(), Some(largest));
    rig.ingest(&["a", "b"]);
    rig.step(step(&[("a", "main", 12), ("b", "main", 12)], true), 1);
    let before = mstar_kernels::buffer::allocated_bytes();
    for pass in 2..6 {
        rig.step(written("a", 5), pass);
        rig.step(step(&[("a", "main", 8), ("b", "main", 12)], false), pass);
        rig.step(denoise("b", 24), pass);
    }
    assert!(rig.attn.bytes() > 0 && before > 0);
    let geometry = crate::rig::build_context(&rig.kv, Some(largest)).geometry;
    let each =
        mstar_core::attend::BackendOptions::beside_workspaces(&DenseOptions::default(), &geometry, largest)
            + mstar_attn_dense::workspace_bound(&geometry, largest, 0, mstar_attn_dense::Device::Cpu)
                .unwrap();
    // One label in the first slot; the rest are plans of a few hundred bytes on the heap.
    let took = rig.attn.buffer_bytes();
    assert_eq!(took, each);
}
