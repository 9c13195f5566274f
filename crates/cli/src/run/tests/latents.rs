//! Latent caches and an indexer over them, both made of the oracle: what is tested is how a layer is wired, and that
//! `--verify` sees what goes wrong there.

use mstar_core::attend::{
    IndexGeometry, Reason, Selection, SparseAttention, SparseFactory, SparseWork, StepShape, Work as Least,
};
use mstar_core::kv::KvPlan;
use mstar_core::spec::ResourceKind;
use mstar_kernels::reference::dsa_attend::DsaAttend;
use mstar_kernels::reference::dsa_select::DsaSelect;
use mstar_kernels::reference::{dsa_attend, dsa_select};

use super::*;

/// Every element, row-major.
pub(super) fn packed(view: TensorRef<'_>) -> Vec<f32> {
    match view.as_slice::<f32>() {
        Some(all) => all.to_vec(),
        None => (0..view.shape()[0]).flat_map(|at| packed(view.select(0, at).unwrap())).collect(),
    }
}

/// A plan's rows over latents.
pub(super) struct Rows<'a> {
    pub(super) plan: &'a KvPlan,
    pub(super) latent: TensorRef<'a>,
    pub(super) geometry: &'a AttnGeometry,
    pub(super) wrong: Option<Wrong>,
}

impl Rows<'_> {
    /// Attends, for each token, the positions that `picked(token, seen keys)` names; padding attends nothing.
    pub(super) fn attend(
        &self,
        q: Query<'_>,
        picked: impl Fn(usize, usize) -> Vec<i32>,
        mut out: AttnOut<'_>,
    ) -> Result<()> {
        let Query::Absorbed { nope, pe } = q else { panic!("absorbed queries") };
        let (latent, plan, h) = (packed(self.latent), self.plan, self.geometry.num_qo_heads);
        let (c, e) = (nope.shape()[2], pe.shape()[2]);
        let mut indices = plan.kv_indices.clone();
        if self.wrong == Some(Wrong::Pages) && indices.len() > 2 {
            indices.swap(0, 1);
        }
        let o = out.o.as_mut_slice::<f32>().expect("contiguous");
        let lse = out.lse.as_mut().and_then(|lse| lse.as_mut_slice::<f32>()).expect("contiguous");
        o.fill(0.0);
        lse.fill(f32::NEG_INFINITY);
        for (row, tokens) in plan.qo_indptr.windows(2).enumerate().take(plan.real_rows) {
            for t in tokens[0] as usize..tokens[1] as usize {
                let short = i32::from(self.wrong == Some(Wrong::LastPage) && plan.positions[t] > 0);
                let selection = picked(t, (plan.positions[t] + 1 - short) as usize);
                let attended = dsa_attend(&DsaAttend {
                    q_nope: &packed(nope.select(0, t)?),
                    q_pe: &packed(pe.select(0, t)?),
                    latent: &latent,
                    selection: &selection,
                    kv_indptr: &plan.kv_indptr,
                    kv_indices: &indices,
                    row_request: &[row as i32],
                    page_start: &vec![0; plan.rows.len()],
                    num_qo_heads: h,
                    kv_lora_rank: c,
                    qk_rope_head_dim: e,
                    page_size: self.geometry.page_size,
                    sm_scale: f64::from(self.geometry.softmax.sm_scale),
                })?;
                o[t * h * c..].iter_mut().zip(attended.o).for_each(|(o, x)| *o = x as f32);
                lse[t * h..].iter_mut().zip(attended.lse).for_each(|(lse, x)| *lse = x as f32);
            }
        }
        Ok(())
    }
}

/// What an indexer does wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mistake {
    /// Of equal scores the later position.
    LaterTie,
    /// The first page's keys are never scored.
    PrefixForgotten,
    /// The second row's keys are scored for the first.
    Neighbour,
    /// Weights lose their sign.
    UnsignedWeights,
    /// Every layer scores the keys of layer 0.
    FirstLayer,
    /// One key of the pick is another than was scored best.
    OneOff,
    /// Every key is attended, whatever was picked.
    AttendsAll,
    /// A selection one key short.
    OneShort,
    /// Rows that need no pick attend one all the same.
    PicksTooEarly,
}

#[derive(Clone, Copy)]
struct Factory(Option<Mistake>);

impl SparseFactory for Factory {
    fn name(&self) -> &'static str {
        "dsa"
    }
    fn about(&self) -> &'static str {
        "the oracle's"
    }
    fn supports(&self, _: Device, _: &AttnGeometry, _: &IndexGeometry) -> std::result::Result<Rank, Reason> {
        Ok(Rank::REFERENCE)
    }
    fn bytes(&self, _: Device, _: &AttnGeometry, _: &IndexGeometry, _: StepShape) -> Result<usize> {
        Ok(0)
    }
    fn build(&self, cx: &BuildContext, index: &IndexGeometry) -> Result<Arc<dyn SparseAttention>> {
        Ok(Arc::new(Indexer {
            name: cx.name.clone(),
            geometry: cx.geometry.clone(),
            index: index.clone(),
            kv: cx.kv_cache.clone().expect("a cache"),
            picks: Mutex::default(),
            mistake: self.0,
        }))
    }
}

struct Indexer {
    name: ResourceName,
    geometry: AttnGeometry,
    index: IndexGeometry,
    kv: Arc<dyn PagedKv>,
    /// The last pick of each plan, and the layer that made it.
    picks: Mutex<HashMap<PlanId, (usize, Vec<i32>)>>,
    mistake: Option<Mistake>,
}

impl Resource for Indexer {
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
    fn plan(&self, _: &StepContext, _: &Step) -> Result<()> {
        Ok(())
    }
    fn promote(&self, _: &StepContext, _: &Step) -> Result<Promotion> {
        Ok(Promotion::Valid)
    }
    fn commit(&self, serial: StepSerial, _: &Step) -> Result<()> {
        self.picks.lock().unwrap().retain(|plan, _| plan.serial != serial);
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

impl SparseAttention for Indexer {
    fn kv_cache(&self) -> &dyn PagedKv {
        &*self.kv
    }
    fn index(&self) -> &IndexGeometry {
        &self.index
    }
    fn needs_selection(&self, plan: &PlanId) -> Result<bool> {
        let plan = self.kv.kv_plan(plan)?;
        Ok(plan.positions.iter().any(|&position| position >= self.index.index_topk as i32))
    }
    fn store_keys(&self, forward: &Forward<'_>, keys: TensorRef<'_>) -> Result<()> {
        let plane = IndexGeometry::plane_name(&self.name);
        self.kv.write_plane(forward.plan_id(), &plane, forward.layer(), keys, forward.stream())
    }
    fn select(
        &self,
        forward: &mut Forward<'_>,
        q: TensorRef<'_>,
        weights: TensorRef<'_>,
    ) -> Result<Selection> {
        let plan = self.kv.kv_plan(forward.plan_id())?;
        let (layer, k, s) = (forward.layer(), self.index.index_topk, self.geometry.page_size);
        let from = if self.mistake == Some(Mistake::FirstLayer) { 0 } else { layer };
        let plane = packed(self.kv.plane(&IndexGeometry::plane_name(&self.name), from)?);
        let di = self.index.index_head_dim;
        let mut picks = vec![-1i32; plan.slots.len() * k];
        for (row, tokens) in plan.qo_indptr.windows(2).enumerate().take(plan.real_rows) {
            let read = match self.mistake {
                Some(Mistake::Neighbour) if row == 0 && plan.real_rows > 1 => 1,
                _ => row,
            };
            let pages = plan.kv_indptr[read] as usize..plan.kv_indptr[read + 1] as usize;
            let page = |j: usize| plan.kv_indices[pages.start + (j / s).min(pages.len() - 1)] as usize;
            let mut keys: Vec<f32> = (0..plan.rows[row].kv_len)
                .flat_map(|j| plane[(page(j) * s + j % s) * di..][..di].iter().copied())
                .collect();
            if self.mistake == Some(Mistake::PrefixForgotten) {
                keys.iter_mut().take(s * di).for_each(|lane| *lane = f32::NAN);
            }
            for t in tokens[0] as usize..tokens[1] as usize {
                let position = plan.positions[t] as usize;
                let from = if self.mistake == Some(Mistake::PicksTooEarly) { k - 1 } else { k };
                if position < from {
                    continue;
                }
                let mut weights = packed(weights.select(0, t)?);
                if self.mistake == Some(Mistake::UnsignedWeights) {
                    weights.iter_mut().for_each(|weight| *weight = weight.abs());
                }
                let mut keys = keys[..(position + 1) * di].to_vec();
                if self.mistake == Some(Mistake::LaterTie) {
                    let turned: Vec<&[f32]> = keys.chunks(di).rev().collect();
                    keys = turned.concat();
                }
                let mut picked = dsa_select(&DsaSelect {
                    q: &packed(q.select(0, t)?),
                    weights: &weights,
                    keys: &keys,
                    key_indptr: &[0, position as i32 + 1],
                    row_request: &[0],
                    positions: &[position as i32],
                    index_n_heads: self.index.index_n_heads,
                    index_head_dim: di,
                    topk: k,
                })?
                .selection;
                if self.mistake == Some(Mistake::LaterTie) {
                    picked = picked.into_iter().rev().map(|at| position as i32 - at).collect();
                }
                picks[t * k..][..k].copy_from_slice(&picked);
                if self.mistake == Some(Mistake::OneOff) {
                    let pick = &mut picks[t * k..][..k];
                    let left =
                        (0..=position as i32).filter(|at| !pick.contains(at)).min().expect("one is left");
                    pick[0] = left;
                    pick.sort_unstable();
                }
                if self.mistake == Some(Mistake::OneShort) {
                    picks[t * k + k - 1] = -1;
                }
            }
        }
        let selection = Selection::new(forward.plan_id().clone(), layer, 0);
        forward.note_selection(selection.clone());
        self.picks.lock().unwrap().insert(forward.plan_id().clone(), (layer, picks));
        Ok(selection)
    }
    fn shared_selection(&self, forward: &Forward<'_>) -> Result<Selection> {
        let layer = self.index.full_layer_of(forward.layer()).expect("the first layer is full");
        let last = forward.last_selection().expect("a full layer came before");
        assert_eq!(last.layer(), layer);
        Ok(last.clone())
    }
    fn attend(
        &self,
        forward: &Forward<'_>,
        selection: Option<&Selection>,
        q: Query<'_>,
        out: AttnOut<'_>,
    ) -> Result<()> {
        let plan = self.kv.kv_plan(forward.plan_id())?;
        let LayerView::Mla { latent } = self.kv.layer(forward.layer())? else { panic!("latents") };
        let picks = self.picks.lock().unwrap();
        let picked = selection.map(|selection| &picks[selection.plan()].1);
        let k = self.index.index_topk;
        let rows = Rows { plan: &plan, latent, geometry: &self.geometry, wrong: None };
        let of = |t: usize, seen: usize| match picked {
            Some(picks) if picks[t * k] != -1 && self.mistake != Some(Mistake::AttendsAll) => {
                picks[t * k..][..k].to_vec()
            }
            _ => (0..seen as i32).collect(),
        };
        rows.attend(q, of, out)
    }
    fn copy_selection(&self, selection: &Selection, mut out: TensorMut<'_>) -> Result<()> {
        let picks = self.picks.lock().unwrap();
        let (layer, picked) = &picks[selection.plan()];
        assert_eq!(*layer, selection.layer(), "overwritten");
        out.as_mut_slice::<i32>().expect("contiguous").copy_from_slice(picked);
        Ok(())
    }
    fn sparse_work(&self, plan: &PlanId) -> SparseWork {
        let plan = self.kv.kv_plan(plan).expect("a plan");
        let seen = || plan.positions.iter().map(|&position| (position + 1) as u64);
        let topk = self.index.index_topk as u64;
        SparseWork {
            scored: seen().filter(|&seen| seen > topk).sum(),
            attended: seen().map(|seen| seen.min(topk)).sum(),
            dense: seen().sum(),
        }
    }
    fn work(&self, _: &PlanId) -> (Least, Least) {
        Default::default()
    }
    fn kernel(&self, _: &PlanId) -> Option<String> {
        Some("the oracle: 1 row".into())
    }
}

const LATENTS: &str = "
name: small
seed: 3
model: { layers: 2, num_qo_heads: 4, kv_lora_rank: 12, qk_rope_head_dim: 4, sm_scale: 0.25 }
resources:
  kv: { kind: kv, layout: mla, page_size: 4, max_num_pages: 200, max_seq_len: 400 }
  attn: { kind: attention, backend: mla, kv_cache: kv }
workload:
  kind: synthetic
  requests: 9
  max_batch: 4
  chunked_prefill: 8
  prompt_len: { uniform: [1, 30] }
  output_len: { uniform: [1, 9] }
";

/// Three layers, of which the first and the last select: prompts cross `index_topk` in prefill and in decode.
const INDEXED: &str = "
name: small
seed: 3
model: { layers: 3, num_qo_heads: 4, kv_lora_rank: 12, qk_rope_head_dim: 4, sm_scale: 0.25 }
resources:
  kv: { kind: kv, layout: mla, page_size: 4, max_num_pages: 200, max_seq_len: 400 }
  attn: { kind: attention, backend: mla, kv_cache: kv }
  dsa:
    kind: dsa
    kv_cache: kv
    index_n_heads: 3
    index_head_dim: 8
    index_topk: 12
    full_layers: [0, 2]
workload:
  kind: synthetic
  requests: 9
  max_batch: 4
  chunked_prefill: 8
  prompt_len: { uniform: [1, 30] }
  output_len: { uniform: [1, 9] }
";

fn served(spec: &Spec, mistake: Option<Mistake>) -> Vec<ServedSparse> {
    let kinds = spec.resources.iter().filter_map(|resource| match &resource.kind {
        ResourceKind::Dsa(dsa) => Some((resource.name.clone(), dsa)),
        _ => None,
    });
    kinds
        .map(|(name, dsa)| {
            let (_, kv) = spec.caches().next().unwrap();
            let heads = spec.model.num_qo_heads;
            let softmax = crate::backends::softmax(spec, heads);
            ServedSparse {
                name,
                kv_cache: dsa.kv_cache.clone(),
                geometry: AttnGeometry::over(&kv.config, heads, spec.dtype, softmax),
                index: dsa.index.clone(),
                factory: Some(Arc::new(Factory(mistake))),
                support: Ok(Rank::REFERENCE),
            }
        })
        .collect()
}

fn latents(sets: &[&str], wrong: Option<Wrong>) -> Ran {
    ran_with(LATENTS, sets, wrong, |_| Vec::new())
}

fn indexed(sets: &[&str], mistake: Option<Mistake>) -> Ran {
    ran_with(INDEXED, sets, None, |spec| served(spec, mistake))
}

#[test]
fn every_row_over_latents_is_right_with_a_rotary_part_and_without() {
    for sets in [&[][..], &["model.qk_rope_head_dim=0"], &["resources.kv.page_size=1"]] {
        let ran = latents(sets, None);
        right(&ran);
        assert_eq!((ran.counts.finished, ran.pairs), (9, SparseWork::default()), "{sets:?}");
    }
}

#[test]
fn planted_faults_over_latents_are_caught_by_verify() {
    for wrong in [Wrong::LastPage, Wrong::Pages, Wrong::Layer] {
        let ran = latents(&[], Some(wrong));
        assert!(ran.verified.failed > 0, "{wrong:?}");
    }
}

#[test]
fn every_row_under_an_indexer_is_right_and_its_picks_judged() {
    let ran = indexed(&[], None);
    right(&ran);
    assert_eq!(ran.counts.finished, 9);
    assert!(ran.verified.picks > 50, "{}", ran.verified.picks);
    let SparseWork { scored, attended, dense } = ran.pairs;
    assert!(scored > 0 && scored < dense && attended < dense, "{:?}", ran.pairs);
    // Plans below and above index_topk are run by one and by the other.
    assert_eq!(ran.kernels.len(), 2, "{:?}", ran.kernels);
    assert!(ran.kernels.contains(&"dsa: the oracle".to_owned()), "{:?}", ran.kernels);
}

#[test]
fn an_indexer_without_a_dense_resource_attends_all_plans() {
    let alone = INDEXED.replace("  attn: { kind: attention, backend: mla, kv_cache: kv }\n", "");
    let alone = ran_with(&alone, &[], None, |spec| served(spec, None));
    right(&alone);
    assert_eq!(alone.digest, indexed(&[], None).digest);
    assert_eq!(alone.kernels, ["dsa: the oracle"]);
}

#[test]
fn mistakes_of_an_indexer_are_caught_by_verify() {
    use Mistake::*;
    for (mistake, said) in [
        (PrefixForgotten, "were picked, 12 are due"),
        (Neighbour, "and left out position"),
        (UnsignedWeights, "and left out position"),
        (FirstLayer, "and left out position"),
        (OneOff, "and left out position"),
        (AttendsAll, "relative error of o"),
        (OneShort, "11 of"),
        (PicksTooEarly, "no more than 12, and 12 were picked"),
    ] {
        let ran = indexed(&[], Some(mistake));
        assert!(ran.verified.failed > 0, "{mistake:?}");
        let failure = ran.verified.first_failure.unwrap();
        assert!(failure.contains(said), "{mistake:?}: {failure}");
        for part in ["request r", "step ", "layer ", "(position "] {
            assert!(failure.contains(part), "{mistake:?}: {failure}");
        }
    }
}

#[test]
fn f22_a_tie_to_the_later_position_is_caught_by_verify() {
    // One index head: every key whose product is negative scores 0, and of those the earlier are due.
    let one = ["resources.dsa.index_n_heads=1", "workload.prompt_len={ uniform: [30, 60] }"];
    right(&indexed(&one, None));
    let ran = indexed(&one, Some(Mistake::LaterTie));
    assert!(ran.verified.failed > 0);
    let failure = ran.verified.first_failure.unwrap();
    assert!(failure.contains("both score 0, the earlier is due"), "{failure}");
}

#[test]
fn below_index_topk_the_indexer_changes_nothing() {
    let short = ["workload.prompt_len=6", "workload.output_len=5", "model.layers=3"];
    let with = indexed(&short, None);
    right(&with);
    assert_eq!((with.verified.picks, with.pairs.scored), (0, 0));
    assert_eq!(with.digest, latents(&short, None).digest);
}

#[test]
fn pages_batches_and_plans_ahead_change_no_bit_under_an_indexer() {
    let long = ["workload.max_batch=9", "workload.output_len=25"];
    let with = |more: &[&str]| {
        let ran = indexed(&[&long[..], more].concat(), None);
        right(&ran);
        ran
    };
    let base = with(&[]);
    let few = with(&["resources.kv.max_num_pages=16"]);
    assert!(few.counts.offloads > 0, "{:?}", few.counts);
    for (ran, what) in [
        (few, "few pages"),
        (with(&["workload.max_batch=1"]), "one at a time"),
        (with(&["workload.preplan=true"]), "planned ahead"),
        (with(&["graph={ buckets: [1, 2, 4, 9], slots: 2 }"]), "buckets"),
        (with(&["resources.kv.page_size=1", "resources.kv.max_num_pages=900"]), "pages of 1"),
        (with(&["resources.kv.page_size=64"]), "pages of 64"),
    ] {
        assert_eq!(ran.digest, base.digest, "{what}");
    }
}

#[test]
fn forks_and_prefix_hits_under_an_indexer_are_right() {
    let forks = "workload.forks={ labels: [cond, uncond], combined: true }";
    let forked =
        indexed(&[forks, "workload.prompt_len={ uniform: [10, 30] }", "workload.output_len=9"], None);
    right(&forked);
    assert!(forked.verified.picks > 0);
    let shared = "workload.shared_prefixes={ count: 2, len: 18, share: 0.8 }";
    let sets = [shared, "workload.prompt_len=25", "resources.kv.prefix_cache=true", "workload.requests=24"];
    let hits = indexed(&sets, None);
    right(&hits);
    assert!(hits.counts.hit_tokens > 0 && hits.replayed.hit_tokens == hits.counts.hit_tokens);
}
