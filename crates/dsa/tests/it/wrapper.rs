//! The wrapper level: foreign pools and page tables, no request, no store.

use mstar_dsa::{
    Capacity, DType, Geometry, IndexInputs, Indexer, Inputs, KeyFormat, Layer, Outputs, PageTable, Plan,
    PlanOptions, Stream, TensorMut, TensorRef, attend, select_picks,
};
use mstar_kernels::reference::dsa_attend::{DsaAttend, dsa_attend};
use mstar_kernels::reference::dsa_select::{DsaSelect, dsa_select};
use mstar_kernels::synth::{Kind, fill};

use crate::rig::{close, judge};

const H: usize = 2;
const C: usize = 16;
const E: usize = 8;
const HI: usize = 3;
const DI: usize = 8;
const S: usize = 4;
const P: usize = 40;
const K: usize = 6;

fn layer() -> Layer {
    let geometry = Geometry {
        num_qo_heads: H,
        kv_lora_rank: C,
        qk_rope_head_dim: E,
        page_size: S,
        q_dtype: DType::F32,
        kv_dtype: DType::F32,
    };
    let indexer = Indexer { index_n_heads: HI, index_head_dim: DI, index_topk: K, format: KeyFormat::F32 };
    Layer { geometry, sm_scale: 0.2, indexer }
}

/// `[n, heads, width]`.
fn values(kind: Kind, n: usize, heads: usize, width: usize) -> Vec<f32> {
    let keys: Vec<u64> = (0..n as u64).map(|n| 1000 + n).collect();
    let mut values = vec![0f32; n * heads * width];
    fill(3, kind, 0, &keys, &mut TensorMut::from_slice(&mut values, &[n, heads, width]).unwrap()).unwrap();
    values
}

/// What a batch of `T` queries over the pool reads.
struct Batch {
    tokens: usize,
    latent: Vec<f32>,
    keys: Vec<f32>,
    q_nope: Vec<f32>,
    q_pe: Vec<f32>,
    index_q: Vec<f32>,
    weights: Vec<f32>,
}

impl Batch {
    fn new(tokens: usize) -> Batch {
        Batch {
            tokens,
            latent: values(Kind::Latent, P * S, 1, C + E),
            keys: values(Kind::IndexKey, P * S, 1, DI),
            q_nope: values(Kind::Query, tokens, H, C),
            q_pe: values(Kind::Value, tokens, H, E),
            index_q: values(Kind::IndexQuery, tokens, HI, DI),
            weights: values(Kind::IndexWeight, tokens, HI, 1),
        }
    }

    /// `o`, `lse` and picks, all written over what means nothing, in a workspace of exactly the bytes asked for.
    fn run(&self, plan: &Plan, workspace: usize) -> mstar_dsa::Result<(Vec<f32>, Vec<f32>, Vec<i32>)> {
        let (t, stream) = (self.tokens, Stream::cpu());
        let (mut o, mut lse) = (vec![f32::NAN; t * H * C], vec![f32::NAN; t * H]);
        let (mut picks, mut scratch) = (vec![i32::MIN; t * K], vec![0xabu8; workspace]);
        let inputs = IndexInputs {
            q: TensorRef::from_slice(&self.index_q, &[t, HI, DI])?,
            weights: TensorRef::from_slice(&self.weights, &[t, HI])?,
            keys: TensorRef::from_slice(&self.keys, &[P, S, DI])?,
        };
        if plan.needs_selection() {
            let to = TensorMut::from_slice(&mut picks, &[t, K])?;
            select_picks(plan, &stream, TensorMut::from_slice(&mut scratch, &[workspace])?, inputs, to)?;
        }
        let inputs = Inputs {
            q_nope: TensorRef::from_slice(&self.q_nope, &[t, H, C])?,
            q_pe: TensorRef::from_slice(&self.q_pe, &[t, H, E])?,
            latent: TensorRef::from_slice(&self.latent, &[P, S, C + E])?,
        };
        let outputs = Outputs {
            o: TensorMut::from_slice(&mut o, &[t, H, C])?,
            lse: Some(TensorMut::from_slice(&mut lse, &[t, H])?),
        };
        let given = plan.needs_selection().then(|| TensorRef::from_slice(&picks, &[t, K])).transpose()?;
        attend(plan, &stream, TensorMut::from_slice(&mut scratch, &[workspace])?, inputs, given, outputs)?;
        Ok((o, lse, picks))
    }

    /// Holds one row against the oracle: queries `from..from + q_len` at the end of the keys in `slots`.
    fn check(
        &self,
        (o, lse, picks): &(Vec<f32>, Vec<f32>, Vec<i32>),
        from: usize,
        q_len: usize,
        slots: &[usize],
    ) {
        let gather = |of: &[f32], width: usize| -> Vec<f32> {
            slots.iter().flat_map(|&slot| of[slot * width..][..width].to_vec()).collect()
        };
        let (keys, latent) = (gather(&self.keys, DI), gather(&self.latent, C + E));
        for query in from..from + q_len {
            let seen = (slots.len() + query + 1).saturating_sub(from + q_len);
            let mut used: Vec<i32> = (0..seen as i32).collect();
            if seen > K {
                used = picks[query * K..][..K].to_vec();
                let scores = dsa_select(&DsaSelect {
                    q: &self.index_q[query * HI * DI..][..HI * DI],
                    weights: &self.weights[query * HI..][..HI],
                    keys: &keys,
                    key_indptr: &[0, slots.len() as i32],
                    row_request: &[0],
                    positions: &[seen as i32 - 1],
                    index_n_heads: HI,
                    index_head_dim: DI,
                    topk: K,
                })
                .unwrap()
                .scores;
                judge(&used, &scores, &format!("query {query}"));
            }
            let want = dsa_attend(&DsaAttend {
                q_nope: &self.q_nope[query * H * C..][..H * C],
                q_pe: &self.q_pe[query * H * E..][..H * E],
                latent: &latent,
                selection: &used,
                kv_indptr: &[0, 1],
                kv_indices: &[0],
                row_request: &[0],
                page_start: &[0],
                num_qo_heads: H,
                kv_lora_rank: C,
                qk_rope_head_dim: E,
                page_size: slots.len().max(1),
                sm_scale: f64::from(layer().sm_scale),
            });
            // Without a slot there is no pool for the oracle either.
            let want = want.map_or((vec![0.0; H * C], vec![f64::NEG_INFINITY; H]), |w| (w.o, w.lse));
            close(&o[query * H * C..][..H * C], &want.0, 1e-6, &format!("o of query {query}"));
            close(&lse[query * H..][..H], &want.1, 1e-6, &format!("lse of query {query}"));
        }
    }
}

/// Six rows: past `topk`, crossing it on a later start, without keys, without queries, of more queries than keys, at it.
const TABLE: PageTable<'static> = PageTable {
    qo_indptr: &[0, 1, 6, 8, 8, 13, 14],
    kv_indptr: &[0, 3, 6, 6, 8, 9, 11],
    kv_indices: &[7, 3, 9, 12, 11, 30, 1, 2, 39, 5, 6],
    kv_last_page_len: &[2, 1, 0, 3, 3, 2],
    kv_offset: Some(&[0, 8, 0, 0, 0, 0]),
    page_start: Some(&[0, 1, 0, 0, 0, 0]),
    mask: None,
    num_pages: P,
};

fn slots(pages: &[usize], start: usize, end: usize) -> Vec<usize> {
    let all = pages.iter().flat_map(|page| page * S..page * S + S);
    all.skip(start).take(end - start).collect()
}

fn check(batch: &Batch, out: &(Vec<f32>, Vec<f32>, Vec<i32>)) {
    batch.check(out, 0, 1, &slots(&[7, 3, 9], 0, 10));
    batch.check(out, 1, 5, &slots(&[12, 11, 30], 1, 9));
    batch.check(out, 6, 2, &[]);
    batch.check(out, 8, 5, &slots(&[39], 0, 3));
    batch.check(out, 13, 1, &slots(&[5, 6], 0, 6));
}

#[test]
fn a_foreign_batch_agrees_with_the_oracle() {
    let plan = Plan::new(&layer(), &TABLE, &PlanOptions::default()).unwrap();
    assert!(plan.needs_selection() && plan.rows().spans.is_empty());
    assert_eq!(plan.rows().row_request, [0, -1, -1, -1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1]);
    assert_eq!(plan.rows().positions, [9, 3, 4, 5, 6, 7, -1, -1, -1, -1, 0, 1, 2, 5]);
    let batch = Batch::new(14);
    check(&batch, &batch.run(&plan, plan.workspace_bytes()).unwrap());
}

#[test]
fn f01_queries_that_see_no_key_yield_nothing() {
    let plan = Plan::new(&layer(), &TABLE, &PlanOptions::default()).unwrap();
    let (o, lse, picks) = Batch::new(14).run(&plan, plan.workspace_bytes()).unwrap();
    // A row without keys, and the first two of five queries over three keys.
    for query in [6, 7, 8, 9] {
        assert!(o[query * H * C..][..H * C].iter().all(|x| x.to_bits() == 0), "query {query}");
        assert!(lse[query * H..][..H].iter().all(|x| *x == f32::NEG_INFINITY), "query {query}");
        assert!(picks[query * K..][..K].iter().all(|&p| p == -1), "query {query}");
    }
    assert!(lse.iter().enumerate().all(|(at, x)| x.is_finite() != (6..10).contains(&(at / H))));
}

#[test]
fn f17_padding_of_a_foreign_batch_yields_nothing_and_changes_no_bit() {
    let plan = Plan::new(&layer(), &TABLE, &PlanOptions::default()).unwrap();
    let capacity = Some(Capacity { rows: 8, tokens: 20, pages: 30 });
    let padded = Plan::new(&layer(), &TABLE, &PlanOptions { capacity, ..PlanOptions::default() }).unwrap();
    assert_eq!((plan.num_tokens(), padded.num_tokens()), (14, 20));
    let (o, lse, picks) = Batch::new(14).run(&plan, plan.workspace_bytes()).unwrap();
    let (wide_o, wide_lse, wide_picks) = Batch::new(20).run(&padded, padded.workspace_bytes()).unwrap();
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!((bits(&wide_o[..14 * H * C]), bits(&wide_lse[..14 * H])), (bits(&o), bits(&lse)));
    assert_eq!(wide_picks[..14 * K], picks);
    assert!(wide_o[14 * H * C..].iter().all(|x| x.to_bits() == 0));
    assert!(wide_lse[14 * H..].iter().all(|x| *x == f32::NEG_INFINITY));
    assert!(wide_picks[14 * K..].iter().all(|&p| p == -1));
    let capacity = Some(Capacity { rows: 8, tokens: 13, pages: 30 });
    assert!(Plan::new(&layer(), &TABLE, &PlanOptions { capacity, ..PlanOptions::default() }).is_err());
}

#[test]
fn f18_a_workspace_of_the_bytes_asked_for_is_enough_and_one_less_is_not() {
    let plan = Plan::new(&layer(), &TABLE, &PlanOptions { workers: 2, ..PlanOptions::default() }).unwrap();
    let (batch, bytes) = (Batch::new(14), plan.workspace_bytes());
    let out = batch.run(&plan, bytes).unwrap();
    check(&batch, &out);
    let said = batch.run(&plan, bytes - 1).unwrap_err().to_string();
    assert!(said.contains(&format!("needs {bytes} bytes, {} are there", bytes - 1)), "{said}");
    // The plan still runs, to the same bits.
    assert_eq!(format!("{:?}", batch.run(&plan, bytes + 64).unwrap()), format!("{out:?}"));
}

#[test]
fn f11_hostile_tables_are_refused_with_row_and_value() {
    let said = |change: &dyn Fn(&mut PageTable<'static>)| {
        let mut table = TABLE;
        change(&mut table);
        Plan::new(&layer(), &table, &PlanOptions::default()).unwrap_err().to_string()
    };
    assert!(said(&|t| t.kv_last_page_len = &[5, 1, 0, 3, 3, 2]).contains("kv_last_page_len[0] = 5"));
    assert!(said(&|t| t.kv_last_page_len = &[2, 1, 0, -1, 3, 2]).contains("kv_last_page_len[3] = -1"));
    assert!(said(&|t| t.kv_last_page_len = &[2]).contains("kv_last_page_len"));
    assert!(said(&|t| t.kv_indptr = &[0, 3, 2, 6, 8, 9, 11]).contains("kv_indptr[2] = 2"));
    assert!(said(&|t| t.kv_indptr = &[0, 3, 6, 6, 8, 9, i32::MAX]).contains("kv_indptr[6]"));
    assert!(said(&|t| t.qo_indptr = &[1, 1, 6, 8, 8, 13, 14]).contains("qo_indptr[0] = 1"));
    assert!(said(&|t| t.qo_indptr = &[]).contains("qo_indptr"));
    assert!(said(&|t| t.kv_indices = &[7, 3, 9, 12, 11, 40, 1, 2, 39, 5, 6]).contains("kv_indices[5] = 40"));
    assert!(said(&|t| t.kv_offset = Some(&[0, -8, 0, 0, 0, 0])).contains("kv_offset[1] = -8"));
    assert!(said(&|t| t.page_start = Some(&[0, 9, 0, 0, 0, 0])).contains("page_start[1] = 9"));
}

#[test]
fn layers_that_cannot_be_are_refused_and_picks_that_are_missing_too() {
    let said = |change: &dyn Fn(&mut Layer)| {
        let mut layer = layer();
        change(&mut layer);
        Plan::new(&layer, &TABLE, &PlanOptions::default()).unwrap_err().to_string()
    };
    assert!(said(&|l| l.sm_scale = f32::INFINITY).starts_with("sm_scale: must be finite"));
    assert!(said(&|l| l.indexer.index_topk = 0).starts_with("index_topk"));
    assert!(said(&|l| l.geometry.kv_lora_rank = 0).contains("kv_lora_rank"));
    assert!(said(&|l| l.indexer.index_n_heads = 0).starts_with("index_n_heads"));
    assert!(said(&|l| l.indexer.index_head_dim = 0).starts_with("index_head_dim"));
    let odd = said(&|l| (l.indexer.format, l.indexer.index_head_dim) = (KeyFormat::Fp8, 33));
    assert!(odd.starts_with("index_head_dim: fp8 keys have a multiple of 4 lanes"), "{odd}");
    let plan = Plan::new(&layer(), &TABLE, &PlanOptions::default()).unwrap();
    let (batch, t) = (Batch::new(14), 14);
    let (mut o, mut scratch) = (vec![0f32; t * H * C], vec![0u8; plan.workspace_bytes()]);
    let inputs = Inputs {
        q_nope: TensorRef::from_slice(&batch.q_nope, &[t, H, C]).unwrap(),
        q_pe: TensorRef::from_slice(&batch.q_pe, &[t, H, E]).unwrap(),
        latent: TensorRef::from_slice(&batch.latent, &[P, S, C + E]).unwrap(),
    };
    let bytes = scratch.len();
    let workspace = TensorMut::from_slice(&mut scratch, &[bytes]).unwrap();
    let outputs = Outputs { o: TensorMut::from_slice(&mut o, &[t, H, C]).unwrap(), lse: None };
    let said = attend(&plan, &Stream::cpu(), workspace, inputs, None, outputs).unwrap_err().to_string();
    assert!(said.starts_with("picks: some query sees more than 6 keys"), "{said}");
    assert!(o.iter().all(|&x| x == 0.0));
}

#[test]
fn what_attend_refuses_leaves_every_output_as_it_was() {
    let plan = Plan::new(&layer(), &TABLE, &PlanOptions { workers: 2, ..PlanOptions::default() }).unwrap();
    let (batch, t) = (Batch::new(14), 14);
    let (_, _, picks) = batch.run(&plan, plan.workspace_bytes()).unwrap();
    // Queries that attend all they see come beside those whose picks, or whose scratch, are refused.
    let needed = mstar_dsa::sparse_workspace_bytes(&layer().geometry, K, 2);
    let said = |picks: &[i32], bytes: usize| {
        let (mut o, mut lse, mut scratch) = (vec![7f32; t * H * C], vec![7f32; t * H], vec![0u8; bytes]);
        let inputs = Inputs {
            q_nope: TensorRef::from_slice(&batch.q_nope, &[t, H, C]).unwrap(),
            q_pe: TensorRef::from_slice(&batch.q_pe, &[t, H, E]).unwrap(),
            latent: TensorRef::from_slice(&batch.latent, &[P, S, C + E]).unwrap(),
        };
        let outputs = Outputs {
            o: TensorMut::from_slice(&mut o, &[t, H, C]).unwrap(),
            lse: Some(TensorMut::from_slice(&mut lse, &[t, H]).unwrap()),
        };
        let workspace = TensorMut::from_slice(&mut scratch, &[bytes]).unwrap();
        let picks = TensorRef::from_slice(picks, &[t, picks.len() / t]).unwrap();
        let said = attend(&plan, &Stream::cpu(), workspace, inputs, Some(picks), outputs).unwrap_err();
        assert!(o.iter().chain(&lse).all(|&x| x == 7.0), "{said}");
        said.to_string()
    };
    for bad in [-2, i32::MIN, 10, i32::MAX] {
        let mut picks = picks.clone();
        picks[2] = bad;
        let said = said(&picks, plan.workspace_bytes());
        assert!(said.contains(&format!("selection[2] = {bad}")), "{said}");
    }
    assert!(said(&picks, needed - 1).contains("workspace"));
    assert!(said(&picks[..t * (K - 1)], plan.workspace_bytes()).starts_with("picks: expected shape [T, K]"));
}
