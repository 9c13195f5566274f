//! Whole runs in this process, over an attention backend made of the oracle alone: what is tested here is the
//! scheduler, the steps, the store's answers and the checks, whichever backends were compiled in.

use mstar_kernels::Stream;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use mstar_core::attend::{
    AttnGeometry, AttnOut, BackendOptions, BuildContext, Fresh, IndexBuf, Query, Rank, Softmax,
};
use mstar_core::kv::{LayerView, PagedKv};
use mstar_core::resource::{Fingerprint, Promotion, StepContext};
use mstar_core::spec::Spec;
use mstar_core::step::{MaskKeys, RowMask};
use mstar_core::{
    Attention, Forward, Ingest, Outcome, PlanId, RequestId, Resource, ResourceName, Result, Step, StepSerial,
};
use mstar_kernels::reference::paged;
use mstar_kernels::reference::paged::{Cache, Options, Paged};
use mstar_kernels::{Device, TensorMut, TensorRef};

mod latents;

use super::replay::Replayed;
use super::runtime::Verified;
use super::*;
use crate::explain::{Served, ServedSparse};

/// Options of the oracle's backend: what it is to do wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Plain {
    wrong: Option<Wrong>,
}

/// A planted fault.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Wrong {
    /// The last page has one token less.
    LastPage,
    /// Two pages of a row change places.
    Pages,
    /// Masks are dropped.
    Mask,
    /// Layers beyond the first read the first one's pages.
    Layer,
}

impl BackendOptions for Plain {
    fn build(&self, cx: &BuildContext) -> Result<Arc<dyn Attention>> {
        let kv = cx.kv_cache.clone().expect("a cache");
        let (name, geometry) = (cx.name.clone(), cx.geometry.clone());
        Ok(Arc::new(Oracle { name, geometry, kv, masks: Mutex::default(), wrong: self.wrong }))
    }
}

struct Oracle {
    name: ResourceName,
    geometry: AttnGeometry,
    kv: Arc<dyn PagedKv>,
    masks: Mutex<HashMap<StepSerial, Vec<RowMask>>>,
    wrong: Option<Wrong>,
}

fn floats(view: TensorRef<'_>) -> Vec<f32> {
    let [pages, slots, heads, width] = view.shape().try_into().expect("four axes");
    let mut all = Vec::with_capacity(pages * slots * heads * width);
    for page in 0..pages {
        let page = view.select(0, page).unwrap();
        all.extend_from_slice(page.as_slice::<f32>().expect("a page's heads are contiguous"));
    }
    all
}

impl Resource for Oracle {
    fn name(&self) -> &ResourceName {
        &self.name
    }
    fn depends_on(&self) -> Vec<ResourceName> {
        vec![self.kv.name().clone()]
    }
    fn fingerprint(&self) -> Option<Fingerprint> {
        None
    }
    fn ingest_request(&self, _: &Ingest) -> Result<()> {
        Ok(())
    }
    fn admit(&self, _: &StepContext, _: &Step) -> Result<Outcome> {
        Ok(Outcome::Admitted)
    }
    fn rollback(&self, _: StepSerial) {}
    fn plan(&self, cx: &StepContext, step: &Step) -> Result<()> {
        let masks = step.attention(&self.name).map_or_else(Vec::new, |attention| attention.masks.clone());
        self.masks.lock().unwrap().insert(cx.serial, masks);
        Ok(())
    }
    fn promote(&self, _: &StepContext, _: &Step) -> Result<Promotion> {
        Ok(Promotion::Valid)
    }
    fn commit(&self, serial: StepSerial, _: &Step) -> Result<()> {
        self.masks.lock().unwrap().remove(&serial);
        Ok(())
    }
    fn reset_request(&self, _: &RequestId, _: bool) -> Result<()> {
        Ok(())
    }
    fn remove_request(&self, _: &RequestId) -> Result<()> {
        Ok(())
    }
    fn tracked_requests(&self) -> Vec<RequestId> {
        Vec::new()
    }
}

impl Attention for Oracle {
    fn requires_kv_write(&self) -> bool {
        true
    }
    fn kv_cache(&self) -> Option<&dyn PagedKv> {
        Some(&*self.kv)
    }
    fn run(&self, forward: &mut Forward<'_>, q: Query<'_>, _: Fresh<'_>, mut out: AttnOut<'_>) -> Result<()> {
        let plan = self.kv.kv_plan(forward.plan_id())?;
        let layer = if self.wrong == Some(Wrong::Layer) { 0 } else { forward.layer() };
        let (k, v) = match self.kv.layer(layer)? {
            LayerView::Nhd { k, v } => (k, v),
            LayerView::Mla { latent } => {
                let rows = latents::Rows { plan: &plan, latent, geometry: &self.geometry, wrong: self.wrong };
                return rows.attend(q, |_, seen| (0..seen as i32).collect(), out);
            }
            _ => panic!("another layout"),
        };
        let Query::Heads(q) = q else { panic!("heads") };
        let declared = self.masks.lock().unwrap()[&forward.serial()].clone();
        let masks: Vec<Option<Vec<bool>>> = plan
            .rows
            .iter()
            .map(|row| {
                let mask = declared.iter().find(|m| m.request == row.request && m.label == row.label)?;
                let MaskKeys::Own(own) = &mask.visible else { panic!("own keys") };
                let before = row.kv_len - row.q_len;
                let seen = |i: usize, j: usize| j < before || own[i * row.q_len + j - before];
                (self.wrong != Some(Wrong::Mask))
                    .then(|| (0..row.q_len).flat_map(|i| (0..row.kv_len).map(move |j| seen(i, j))).collect())
            })
            .collect();
        let masks: Vec<Option<&[bool]>> = masks.iter().map(Option::as_deref).collect();
        let (mut indices, mut last) = (plan.kv_indices.clone(), plan.kv_last_page_len.clone());
        match self.wrong {
            Some(Wrong::LastPage) => last.iter_mut().filter(|last| **last > 1).for_each(|last| *last -= 1),
            Some(Wrong::Pages) if indices.len() > 2 => indices.swap(0, 1),
            _ => {}
        }
        let Softmax { sm_scale, window_left, sinks, .. } = &self.geometry.softmax;
        let (h, width) = (self.geometry.num_qo_heads, k.shape()[3]);
        let attended = paged(&Paged {
            q: q.as_slice::<f32>().expect("contiguous"),
            cache: Cache::Split { k: &floats(k), v: &floats(v) },
            qo_indptr: &plan.qo_indptr,
            kv_indptr: &plan.kv_indptr,
            kv_indices: &indices,
            kv_last_page_len: &last,
            num_qo_heads: h,
            num_kv_heads: k.shape()[2],
            head_dim_qk: width,
            head_dim_vo: width,
            page_size: k.shape()[1],
            sm_scale: f64::from(*sm_scale),
            causal: true,
            options: Options {
                window_left: window_left.map_or(-1, |w| w as i64),
                sinks: sinks.as_ref().map(|sinks| &sinks[forward.layer() * h..][..h]),
                masks: &masks,
                kv_offset: &plan.rows.iter().map(|row| row.kv_offset).collect::<Vec<_>>(),
                page_start: &plan.rows.iter().map(|row| row.page_start).collect::<Vec<_>>(),
                ..Options::default()
            },
        })?;
        let o = out.o.as_mut_slice::<f32>().expect("contiguous");
        o.iter_mut().zip(attended.o).for_each(|(o, x)| *o = x as f32);
        let lse = out.lse.as_mut().and_then(|lse| lse.as_mut_slice::<f32>()).expect("contiguous");
        lse.iter_mut().zip(attended.lse).for_each(|(lse, x)| *lse = x as f32);
        Ok(())
    }
    fn select_last_hidden(&self, _: &Forward<'_>, _: TensorRef<'_>, _: TensorMut<'_>) -> Result<()> {
        Ok(())
    }
    fn qo_indptr_buf(&self, _: &PlanId) -> Result<IndexBuf> {
        IndexBuf::with_capacity(&Stream::cpu(), 0)
    }
    fn kv_len_buf(&self, _: &PlanId) -> Result<IndexBuf> {
        IndexBuf::with_capacity(&Stream::cpu(), 0)
    }
}

/// What a run left behind.
struct Ran {
    counts: Counts,
    verified: Verified,
    digest: String,
    pairs: SparseWork,
    kernels: Vec<String>,
    padded: u64,
    replayed: Replayed,
    refusals: Vec<String>,
}

const SPEC: &str = "
name: small
seed: 3
model: { layers: 2, num_qo_heads: 4, num_kv_heads: 2, head_dim: 8 }
resources:
  kv: { kind: kv, layout: nhd, page_size: 4, max_num_pages: 200, max_seq_len: 400 }
  attn: { kind: attention, backend: auto, kv_cache: kv }
workload:
  kind: synthetic
  requests: 9
  max_batch: 4
  chunked_prefill: 8
  prompt_len: { uniform: [1, 30] }
  output_len: { uniform: [1, 9] }
";

fn ran(sets: &[&str], wrong: Option<Wrong>) -> Ran {
    ran_with(SPEC, sets, wrong, |_| Vec::new())
}

fn ran_with(
    text: &str,
    sets: &[&str],
    wrong: Option<Wrong>,
    sparse: impl Fn(&Spec) -> Vec<ServedSparse>,
) -> Ran {
    let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
    let spec = Spec::from_yaml(text.as_bytes(), &sets, "small").unwrap_or_else(|e| panic!("{e}"));
    let workload = spec.workload.as_ref().unwrap();
    let requests = workload::load(workload, spec.seed, None).unwrap();
    let heads = spec.model.num_qo_heads;
    let served: Vec<Served> = spec
        .attentions()
        .map(|(name, _)| {
            let (_, kv) = spec.caches().next().unwrap();
            let softmax = crate::backends::softmax(&spec, heads);
            let geometry = AttnGeometry::over(&kv.config, heads, spec.dtype, softmax);
            let options = Box::new(Plain { wrong });
            let (backend, named) = ("oracle", false);
            Served { name: name.clone(), backend, named, geometry, support: Ok(Rank::REFERENCE), options }
        })
        .collect();
    let phases = Arc::new(Phases::default());
    let model = Model::build(&spec, Device::Cpu, &served, &sparse(&spec), None, &phases).unwrap();
    let mut buffers = Buffers::new(Widths::of(&spec, &requests).unwrap(), Stream::cpu()).unwrap();
    warm::up(&model, &mut buffers).unwrap();
    let mut live = Live::new(&model, &requests, buffers, spec.seed, 1.0, phases.clone());
    let limits = Limits {
        max_batch: workload.max_batch,
        chunked_prefill: workload.chunked_prefill,
        step_ms: workload.step_ms,
        preplan: workload.preplan,
    };
    let mut scheduler = Scheduler::new(&requests, limits);
    while let Tick::Ran(_) = scheduler.tick(&mut live).unwrap() {
        assert!(scheduler.counts().steps < 5000, "no end");
        model.kv.pages().unwrap().store().check().unwrap();
    }
    let stats = model.kv.pages().unwrap().store().stats();
    assert_eq!((stats.pages_held, stats.requests), (0, 0), "everybody left");
    model.engine.post_warmup_validate().unwrap();
    let refusals = scheduler.events().iter().filter_map(|event| match event {
        Event::Refuse { request, why, .. } => Some(format!("{request}: {why}")),
        _ => None,
    });
    Ran {
        counts: scheduler.counts(),
        verified: live.verified().clone(),
        digest: live.digest().hex(),
        pairs: live.pairs(),
        kernels: live.kernels().keys().cloned().collect(),
        padded: live.padded_steps(),
        replayed: if let Some(config) = model.config().filter(|config| config.prefix_cache) {
            replay::replay(&requests, scheduler.events(), config.page_size)
        } else {
            Replayed::default()
        },
        refusals: refusals.collect(),
    }
}

fn right(ran: &Ran) {
    assert_eq!(ran.verified.first_failure, None);
    assert!(ran.verified.checks > 0 && ran.verified.failed == 0);
    assert_eq!(ran.replayed.mismatches, []);
}

#[test]
fn every_row_of_a_plain_run_is_right() {
    let ran = ran(&[], None);
    right(&ran);
    assert_eq!((ran.counts.finished, ran.counts.refused), (9, 0));
}

#[test]
fn planted_faults_are_caught_by_verify() {
    for (wrong, sets) in [
        (Wrong::LastPage, &[][..]),
        (Wrong::Pages, &[]),
        (Wrong::Layer, &[]),
        (Wrong::Mask, &["workload.tree={ branching: [2, 2] }"]),
    ] {
        let ran = ran(sets, Some(wrong));
        assert!(ran.verified.failed > 0, "{wrong:?}");
        assert!(ran.verified.first_failure.unwrap().contains("request r"), "{wrong:?}");
    }
}

#[test]
fn few_pages_give_the_same_bits_as_plenty() {
    let long = ["workload.max_batch=9", "workload.output_len=25"];
    let with = |more: &[&str]| ran(&[&long[..], more].concat(), None);
    let plenty = with(&[]);
    let few = with(&["resources.kv.max_num_pages=16"]);
    right(&few);
    assert!(few.counts.offloads > 0 && few.counts.reloads == few.counts.offloads, "{:?}", few.counts);
    assert_eq!(few.counts.finished, 9);
    assert_eq!(few.digest, plenty.digest);
    // Without a place on the host, requests begin anew.
    let none = with(&["resources.kv.max_num_pages=16", "resources.kv.host_pages=0"]);
    right(&none);
    assert!(none.counts.restarts > 0 && none.counts.offloads == 0, "{:?}", none.counts);
    assert_eq!(none.digest, plenty.digest);
}

#[test]
fn a_request_that_can_never_fit_is_refused_with_its_shortage() {
    let ran = ran(
        &["workload.prompt_len=[10, 300, 10]", "workload.output_len=4", "resources.kv.max_num_pages=50"],
        None,
    );
    right(&ran);
    assert_eq!((ran.counts.finished, ran.counts.refused), (6, 3));
    // 303 stored tokens are 76 pages of 4; 49 may be held.
    assert!(ran.refusals[0].contains("27 pages short of the 76"), "{:?}", ran.refusals);
}

#[test]
fn batches_and_plans_ahead_change_no_bit() {
    let base = ran(&[], None);
    for sets in [
        &["workload.max_batch=1"][..],
        &["workload.max_batch=9"],
        &["workload.preplan=true"],
        &["graph={ buckets: [1, 2, 4], slots: 2 }"],
        &["graph={ buckets: [1, 2, 4], slots: 2 }", "workload.preplan=true"],
        &["workload.arrivals={ poisson: 20 }"],
    ] {
        let other = ran(sets, None);
        right(&other);
        assert_eq!(other.digest, base.digest, "{sets:?}");
    }
    let padded = ran(&["graph={ buckets: [3], slots: 2 }", "workload.preplan=true"], None);
    assert!(padded.padded > 0 && padded.counts.promoted > 0, "{:?}", padded.counts);
}

#[test]
fn guided_denoising_forks_and_keeps_nothing_until_it_commits() {
    let forks = "workload.forks={ labels: [cond, uncond], combined: true }";
    let denoise = "workload.denoise={ steps: 3, tokens: 5 }";
    let combined = ran(&[forks, denoise, "workload.output_len=2"], None);
    right(&combined);
    assert_eq!(combined.counts.finished, 9);
    let apart = ran(
        &["workload.forks={ labels: [cond, uncond], combined: false }", denoise, "workload.output_len=2"],
        None,
    );
    right(&apart);
    assert_eq!(apart.digest, combined.digest, "how rows are packed changes no bit");
    let few = ran(&[forks, denoise, "workload.output_len=2", "resources.kv.max_num_pages=24"], None);
    right(&few);
    assert_eq!(few.digest, combined.digest);
}

#[test]
fn drafted_trees_are_verified_under_their_mask_and_their_paths_kept() {
    let ran = ran(&["workload.tree={ branching: [3, 2, 1] }", "workload.output_len=12"], None);
    right(&ran);
    assert_eq!(ran.counts.finished, 9);
}

#[test]
fn windows_with_retention_give_the_same_bits_as_without() {
    let window = &["model.window_left=9", "workload.prompt_len=40", "workload.output_len=20"];
    let kept = ran(window, None);
    right(&kept);
    let mut sets = window.to_vec();
    sets.push("resources.kv.retention=12");
    let given_back = ran(&sets, None);
    right(&given_back);
    assert_eq!(given_back.digest, kept.digest);
}

#[test]
fn hits_are_those_that_the_log_implies() {
    let shared = "workload.shared_prefixes={ count: 2, len: 18, share: 0.8 }";
    let sets = [shared, "workload.prompt_len=25", "resources.kv.prefix_cache=true", "workload.requests=24"];
    let plenty = ran(&sets, None);
    right(&plenty);
    assert!(plenty.counts.hit_tokens > 0 && plenty.replayed.hit_tokens == plenty.counts.hit_tokens);
    let mut tight = sets.to_vec();
    tight.push("resources.kv.max_num_pages=30");
    let tight = ran(&tight, None);
    right(&tight);
    assert_eq!(tight.replayed.hit_tokens, tight.counts.hit_tokens);
}
