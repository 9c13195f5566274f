//! A small model: a latent cache, an engine, an indexer, and inputs that are a function of a stream's content alone, so that
//! any row can be checked whatever batch it ran in and whatever became of its pages.

mod inputs;
mod oracle;

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use mstar_core::attend::{
    AttnGeometry, BuildContext, IndexFormat, IndexGeometry, IndexStore, Softmax, SparseAttention, StepShape,
};
use mstar_core::graph::Bucket;
use mstar_core::kv::{KvConfig, KvEntries, KvLayout, KvPlan, PagedKv, PagedKvCache};
use mstar_core::resource::{EngineOptions, PaddedShape};
use mstar_core::spec::{Fallback, KernelFamily, Schedule};
use mstar_core::step::{Declaration, KvStep};
use mstar_core::{Engine, Forward, Ingest, Label, PlanId, PlannedStep, RequestId, Resource, Segment, Step};
use mstar_dsa::DsaManager;
use mstar_kernels::synth::{Kind, chain};
use mstar_kernels::{Buffer, DType, Stream, TensorMut, TensorRef};

pub(crate) use inputs::Inputs;
use inputs::{bytes, chained, floats};
pub(crate) use oracle::{close, judge};

/// Query heads.
pub(crate) const H: usize = 3;
/// Value lanes of a latent.
pub(crate) const C: usize = 32;
/// Rotary lanes.
pub(crate) const E: usize = 16;
/// Index heads.
pub(crate) const HI: usize = 4;
/// Index width.
pub(crate) const DI: usize = 16;
/// Layers.
pub(crate) const L: usize = 4;
/// Factor of the dot product.
pub(crate) const SCALE: f32 = 0.144;

/// What a rig is made of.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) dtype: DType,
    pub(crate) page_size: usize,
    pub(crate) pages: usize,
    pub(crate) topk: usize,
    pub(crate) format: IndexFormat,
    pub(crate) store: IndexStore,
    pub(crate) full_layers: Vec<usize>,
    pub(crate) retention: Option<usize>,
    pub(crate) prefix_cache: bool,
    pub(crate) largest: Option<StepShape>,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            dtype: DType::F32,
            page_size: 4,
            pages: 400,
            topk: 8,
            format: IndexFormat::F32,
            store: IndexStore::Pages,
            full_layers: vec![0, 2],
            retention: None,
            prefix_cache: false,
            largest: None,
        }
    }
}

impl Setup {
    pub(crate) fn index(&self) -> IndexGeometry {
        IndexGeometry {
            index_n_heads: HI,
            index_head_dim: DI,
            index_topk: self.topk,
            format: self.format,
            store: self.store,
            full_layers: self.full_layers.clone(),
        }
    }

    pub(crate) fn config(&self) -> KvConfig {
        let layout = KvLayout::Mla { kv_lora_rank: C, qk_rope_head_dim: E };
        KvConfig {
            num_layers: L,
            planes: self.index().plane(&"dsa".into()).into_iter().collect(),
            retention: self.retention,
            prefix_cache: self.prefix_cache,
            ..KvConfig::new(layout, self.dtype, self.page_size, self.pages)
        }
    }

    pub(crate) fn context(&self, kv: Option<Arc<PagedKvCache>>) -> BuildContext {
        BuildContext {
            name: "dsa".into(),
            geometry: AttnGeometry::over(&self.config(), H, self.dtype, Softmax::scaled(SCALE)),
            stream: Stream::cpu(),
            kv_cache: kv.map(|kv| kv as Arc<dyn PagedKv>),
            ring: None,
            query_from: None,
            slots: 2,
            largest: self.largest,
            schedule: Schedule::Invariant,
            kernels: KernelFamily::Auto,
            fallback: Fallback::Refuse,
        }
    }
}

/// One row's results in one layer: `o` `[q, H, C]`, `lse` `[q, H]`, and the pick that the layer attended, `[q, K]`.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct LayerOut {
    pub(crate) o: Vec<f32>,
    pub(crate) lse: Vec<f32>,
    pub(crate) picks: Vec<i32>,
}

/// One row's results, layer after layer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RowOut {
    pub(crate) request: RequestId,
    pub(crate) label: Label,
    pub(crate) q_len: usize,
    pub(crate) kv_len: usize,
    pub(crate) first_kept: usize,
    pub(crate) layers: Vec<LayerOut>,
}

impl RowOut {
    /// Equal to the bit, whatever the rows are called.
    #[track_caller]
    pub(crate) fn assert_same_bits(&self, other: &RowOut) {
        assert_eq!((self.q_len, self.kv_len), (other.q_len, other.kv_len));
        for (layer, (a, b)) in self.layers.iter().zip(&other.layers).enumerate() {
            assert_eq!(a.picks, b.picks, "{} layer {layer}", self.request);
            for (a, b) in [(&a.o, &b.o), (&a.lse, &b.lse)] {
                let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(a), bits(b), "{} at {} layer {layer}", self.request, self.kv_len);
            }
        }
    }

    /// Query `query` of one layer's pick, without padding.
    pub(crate) fn pick(&self, layer: usize, query: usize) -> Vec<i32> {
        let picks = &self.layers[layer].picks;
        let topk = picks.len() / self.q_len;
        picks[query * topk..][..topk].iter().copied().filter(|&position| position >= 0).collect()
    }
}

/// What the indexer is fed instead of synthetic values: for a kind and a position, all lanes of a token.
pub(crate) type IndexInputs = Box<dyn Fn(Kind, usize, &mut [f32])>;

pub(crate) struct Rig {
    pub(crate) setup: Setup,
    pub(crate) engine: Engine,
    pub(crate) kv: Arc<PagedKvCache>,
    pub(crate) dsa: Arc<DsaManager>,
    pub(crate) index_inputs: Option<IndexInputs>,
    content: RefCell<HashMap<(RequestId, Label), Vec<u64>>>,
}

impl Rig {
    pub(crate) fn new(setup: Setup) -> Rig {
        let kv = Arc::new(PagedKvCache::new("kv".into(), setup.config()).unwrap());
        let dsa = Arc::new(DsaManager::build(&setup.context(Some(kv.clone())), &setup.index()).unwrap());
        let resources: Vec<Arc<dyn Resource>> = vec![dsa.clone(), kv.clone()];
        let options = EngineOptions { preplan: setup.store == IndexStore::Pages, ..Default::default() };
        let engine = Engine::with_options(resources, options).unwrap();
        Rig { setup, engine, kv, dsa, index_inputs: None, content: RefCell::default() }
    }

    pub(crate) fn ingest(&self, requests: &[&str]) {
        for request in requests {
            self.engine.ingest(&Ingest::new((*request).into())).unwrap();
        }
    }

    /// Takes a request in whose prompt may be found in the prefix index; says how many of its tokens were.
    pub(crate) fn ingest_prompt(&self, request: &str, prompt: &[u64]) -> usize {
        let prompts = vec![(Label::main(), prompt.into())];
        self.engine.ingest(&Ingest { prompts, ..Ingest::new(request.into()) }).unwrap();
        self.content.borrow_mut().insert((request.into(), Label::main()), prompt.to_vec());
        self.kv.store().ingest_report(&request.into()).unwrap()[0].1
    }

    /// A label's stream now has the content of another.
    pub(crate) fn forked(&self, request: &str, from: &str, to: &str) {
        let mut content = self.content.borrow_mut();
        let tokens = content.get(&(request.into(), from.into())).cloned().unwrap_or_default();
        content.insert((request.into(), Label::from(to)), tokens);
    }

    /// A stream starts again.
    pub(crate) fn emptied(&self, request: &str) {
        self.content.borrow_mut().retain(|(of, _), _| of.as_str() != request);
    }

    pub(crate) fn planned(&self, step: Step, bucket: Option<PaddedShape>) -> PlannedStep {
        let admission = match bucket {
            None => self.engine.admit(step),
            Some(shape) => self.engine.admit_in(step, &Bucket { walk: "decode".into(), shape }),
        };
        self.engine.plan(admission.unwrap().admitted().unwrap()).unwrap()
    }

    /// One whole step over (request, tokens) rows, kept.
    pub(crate) fn step(&self, rows: &[(&str, usize)], bucket: Option<PaddedShape>) -> Vec<RowOut> {
        let planned = self.planned(step(rows), bucket);
        let out = self.forward(&planned, "main");
        self.engine.commit(planned).unwrap();
        out
    }

    pub(crate) fn kv_plan(&self, planned: &PlannedStep, label: &str) -> Arc<KvPlan> {
        self.kv.kv_plan(&plan_id(planned, label)).unwrap()
    }

    /// Takes the step's tokens into the streams' content, and gives the content key of each of the plan's tokens; `None`
    /// for padding.
    fn keys(&self, planned: &PlannedStep, plan: &KvPlan) -> Vec<Option<u64>> {
        let mut content = self.content.borrow_mut();
        let kv = planned.step().kv(&"kv".into()).expect("every step of a rig names the cache").clone();
        let mut keys = Vec::new();
        for (index, row) in plan.rows[..plan.real_rows].iter().enumerate() {
            let stream = (row.request.clone(), row.label.clone());
            let tokens = content.entry(stream).or_default();
            let stored = row.kv_len - row.q_len;
            assert!(tokens.len() >= stored, "the rig knows what was stored");
            tokens.truncate(stored);
            let said = kv.segments.iter().find(|s| s.request == row.request && s.label == row.label).unwrap();
            match said.tokens.is_empty() {
                true => tokens.extend((stored..row.kv_len).map(|p| own_token(row.request.as_str(), p))),
                false => tokens.extend_from_slice(&said.tokens),
            }
            keys.extend(chained(tokens)[stored..].iter().copied().map(Some));
            assert_eq!(keys.len(), plan.qo_indptr[index + 1] as usize);
        }
        keys.resize(plan.slots.len(), None);
        keys
    }

    /// The queries `[T, H, C + E]` of one layer of a step that was run.
    pub(crate) fn queries(&self, planned: &PlannedStep, layer: usize) -> Buffer {
        let plan = self.kv_plan(planned, "main");
        let keys = self.keys(planned, &plan);
        let mut inputs = Inputs::new(self, keys.len());
        inputs.fill(self, layer, &keys, &plan);
        inputs.q
    }

    /// Every layer of one plan label. Padding is fed NaN, and outputs start as NaN.
    pub(crate) fn forward(&self, planned: &PlannedStep, label: &str) -> Vec<RowOut> {
        let stream = Stream::cpu();
        let mut forward = planned.forward(label, &stream);
        self.layers(planned, &mut forward)
    }

    pub(crate) fn layers(&self, planned: &PlannedStep, forward: &mut Forward<'_>) -> Vec<RowOut> {
        let plan = self.kv.kv_plan(forward.plan_id()).unwrap();
        let keys = self.keys(planned, &plan);
        let mut outs: Vec<RowOut> = plan.rows[..plan.real_rows]
            .iter()
            .map(|row| RowOut {
                request: row.request.clone(),
                label: row.label.clone(),
                q_len: row.q_len,
                kv_len: row.kv_len,
                first_kept: row.kv_offset + row.page_start,
                layers: Vec::new(),
            })
            .collect();
        let tokens = keys.len();
        let mut inputs = Inputs::new(self, tokens);
        for layer in 0..L {
            forward.set_layer(layer);
            inputs.fill(self, layer, &keys, &plan);
            let (mut o, mut lse) =
                (Buffer::for_tensor(self.setup.dtype, &[tokens, H, C]).unwrap(), vec![f32::NAN; tokens * H]);
            inputs.attend(self, forward, &mut o, &mut lse);
            let mut picks = vec![i32::MIN; tokens * self.setup.topk];
            let full = self.dsa.index().full_layer_of(layer).unwrap();
            // A plan that needs no selection makes none; its copy is all -1.
            let none = || mstar_core::attend::Selection::new(forward.plan_id().clone(), full, 0);
            let selection = forward.last_selection().cloned().unwrap_or_else(none);
            assert_eq!(selection.layer(), full);
            let to = TensorMut::from_slice(&mut picks, &[tokens, self.setup.topk]).unwrap();
            self.dsa.copy_selection(&selection, to).unwrap();
            split(&plan, &floats(&o, self.setup.dtype), &lse, &picks, &mut outs);
        }
        outs
    }

    /// Writes `value` to every latent of a request's step, as if its model had computed that.
    pub(crate) fn overwrite_latents(&self, request: &str, span: usize, value: f32) {
        let planned = self.planned(step(&[(request, span)]), None);
        let values = vec![value; span * (C + E)];
        let latent = TensorRef::from_slice(&values, &[span, C + E]).unwrap();
        for layer in 0..L {
            let (ckv, kpe) = (latent.narrow(1, 0, C).unwrap(), latent.narrow(1, C, E).unwrap());
            let entries = KvEntries::Mla { ckv, kpe };
            self.kv.write_kv(&plan_id(&planned, "main"), layer, entries, &Stream::cpu()).unwrap();
            if self.setup.full_layers.contains(&layer) {
                let keys = TensorRef::from_slice(&values[..span * DI], &[span, DI]).unwrap();
                let id = plan_id(&planned, "main");
                self.kv.write_plane(&id, "dsa.index_keys", layer, keys, &Stream::cpu()).unwrap();
            }
        }
        self.engine.commit(planned).unwrap();
    }

    /// Bytes of every latent and index key of the pool.
    pub(crate) fn pool(&self) -> Vec<u8> {
        let mut all = Vec::new();
        for layer in 0..L {
            let mstar_core::kv::LayerView::Mla { latent } = self.kv.layer(layer).unwrap() else {
                unreachable!()
            };
            all.extend(bytes(latent));
            if self.setup.store == IndexStore::Pages && self.setup.full_layers.contains(&layer) {
                all.extend(bytes(self.kv.plane("dsa.index_keys", layer).unwrap()));
            }
        }
        all
    }
}

/// Rows of (request, tokens) on `main`.
pub(crate) fn step(rows: &[(&str, usize)]) -> Step {
    kv_step(KvStep {
        segments: rows.iter().map(|&(request, span)| segment(request, "main", span)).collect(),
        ..KvStep::default()
    })
}

pub(crate) fn kv_step(kv: KvStep) -> Step {
    Step::new("decode").with("kv", Declaration::Kv(kv))
}

/// A segment whose content is the request's own.
pub(crate) fn segment(request: &str, label: &str, span: usize) -> Segment {
    Segment { request: request.into(), label: label.into(), span, tokens: [].into() }
}

/// A segment of known content, which pages are indexed by.
pub(crate) fn tokens(request: &str, tokens: &[u64]) -> Segment {
    Segment { request: request.into(), label: Label::main(), span: tokens.len(), tokens: tokens.into() }
}

pub(crate) fn plan_id(planned: &PlannedStep, label: &str) -> PlanId {
    PlanId { slot: planned.slot(), label: label.into(), serial: planned.serial() }
}

/// What a request says at a position, when nothing else was said for it. Names that differ only behind a `~` say the same.
fn own_token(request: &str, position: usize) -> u64 {
    let name = request.split('~').next().unwrap_or(request);
    name.bytes().fold(position as u64, |token, byte| chain(token, u64::from(byte)))
}

/// Gives each real row its part of a layer's outputs, and checks that padding is 0, `-inf` and no pick.
fn split(plan: &KvPlan, o: &[f32], lse: &[f32], picks: &[i32], outs: &mut [RowOut]) {
    let topk = picks.len() / plan.slots.len().max(1);
    for index in 0..=plan.rows.len() {
        let begin = plan.qo_indptr[index] as usize;
        let end = plan.qo_indptr.get(index + 1).map_or(plan.slots.len(), |&end| end as usize);
        let of = LayerOut {
            o: o[begin * H * C..end * H * C].to_vec(),
            lse: lse[begin * H..end * H].to_vec(),
            picks: picks[begin * topk..end * topk].to_vec(),
        };
        match outs.get_mut(index) {
            Some(out) => out.layers.push(of),
            None => {
                assert!(
                    of.o.iter().all(|x| x.to_bits() == 0),
                    "f17: a padded row leaves something in the output"
                );
                assert!(of.lse.iter().all(|x| *x == f32::NEG_INFINITY), "f17: a padded row has an lse");
                assert!(of.picks.iter().all(|&p| p == -1), "f17: a padded row picks");
            }
        }
    }
}
