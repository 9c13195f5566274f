//! The scheduler's [`Runtime`] over a real engine: ingest, admit, plan, preplan, run, commit, offload.

use std::collections::HashMap;
use std::sync::Arc;

use anyhow::Context;
use mstar_core::attend::{SparseWork, Work as Least};
use mstar_core::kv::{KvEvent, PagedKvCache, RingKv};
use mstar_core::{
    Admission, Ingest, Label, Outcome, PlannedStep, PreplannedStep, Refusal, RequestId, Resource,
    ResourceName,
};

use super::buffers::Buffers;
use super::declare;
use super::digest::RunDigest;
use super::event::Event;
use super::forward::{self, Scene};
use super::memory::Memory;
use super::model::Model;
use super::need::Need;
use super::phases::Phases;
use super::regions::Regions;
use super::report;
use super::saved::SavedWorlds;
use super::scheduler::{Runtime, Work};
use super::script::{CONTEXT, Content, Progress};
use super::shown::Witness;
use super::workload::RequestPlan;

/// Steps between two looks at resident memory.
const LOOK_EVERY: u64 = 32;

/// What was verified so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Verified {
    /// Rows chosen.
    pub(crate) rows: u64,
    /// (row, layer, attention) checks made.
    pub(crate) checks: u64,
    /// (query, head, layer) vectors recomputed.
    pub(crate) vectors: u64,
    /// (query, layer) pairs whose pick was judged.
    pub(crate) picks: u64,
    /// Checks that failed.
    pub(crate) failed: u64,
    /// The largest error as a share of what was allowed.
    pub(crate) worst: f64,
    /// The first failure, in full.
    pub(crate) first_failure: Option<String>,
}

/// What one step did, for the CSV and the timeline.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct StepCost {
    /// Kinds of turns.
    pub(crate) walk: &'static str,
    /// Rows, padding left out.
    pub(crate) rows: usize,
    /// Query tokens, padding left out.
    pub(crate) tokens: usize,
    /// Whether it ran padded in a bucket.
    pub(crate) padded: bool,
}

/// A model at work.
pub(crate) struct Live<'a> {
    model: &'a Model,
    plans: &'a [RequestPlan],
    seed: u64,
    verify: f64,
    phases: Arc<Phases>,
    buffers: Buffers,
    regions: Regions,
    contents: HashMap<usize, Content>,
    digests: HashMap<usize, u64>,
    digest: RunDigest,
    admitted: Option<PlannedStep>,
    ahead: Option<PreplannedStep>,
    /// Pages of each offloaded request: of its streams, and of its context.
    host: HashMap<usize, [usize; 2]>,
    steps: u64,
    padded_steps: u64,
    verified: Verified,
    last: StepCost,
    kernels: std::collections::BTreeMap<String, u64>,
    pairs: SparseWork,
    /// Frames that were kept, and the most of one request.
    frames: [u64; 2],
    saved: SavedWorlds,
    memory: Memory,
    witness: Option<&'a dyn Witness>,
    plans_only: bool,
}

impl<'a> Live<'a> {
    /// A model at work on `plans`.
    pub(crate) fn new(
        model: &'a Model,
        plans: &'a [RequestPlan],
        buffers: Buffers,
        seed: u64,
        verify: f64,
        phases: Arc<Phases>,
    ) -> Live<'a> {
        let mut memory = Memory::default();
        memory.look();
        Live {
            model,
            plans,
            seed,
            verify,
            phases,
            buffers,
            regions: Regions::default(),
            contents: HashMap::new(),
            digests: HashMap::new(),
            digest: RunDigest::default(),
            admitted: None,
            ahead: None,
            host: HashMap::new(),
            steps: 0,
            padded_steps: 0,
            verified: Verified::default(),
            last: StepCost::default(),
            kernels: std::collections::BTreeMap::new(),
            pairs: SparseWork::default(),
            frames: [0; 2],
            saved: SavedWorlds::default(),
            memory,
            witness: None,
            plans_only: false,
        }
    }

    /// The same, whose steps are planned and committed and not run: for a device on paper. Over a ring the first step alone makes
    /// sense: a frame that no layer writes cannot be committed, and the step is undone.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "a build without devices has none on paper"))]
    pub(crate) fn planning_only(self) -> Live<'a> {
        Live { plans_only: true, ..self }
    }

    /// The same, with `witness` shown every layer.
    pub(crate) fn shown_to(self, witness: &'a dyn Witness) -> Live<'a> {
        Live { witness: Some(witness), ..self }
    }

    /// What was verified.
    pub(crate) fn verified(&self) -> &Verified {
        &self.verified
    }

    /// The digest over the requests that finished.
    pub(crate) fn digest(&self) -> RunDigest {
        self.digest
    }

    /// The step that ran last.
    pub(crate) fn last(&self) -> &StepCost {
        &self.last
    }

    /// Steps that ran padded in a bucket.
    pub(crate) fn padded_steps(&self) -> u64 {
        self.padded_steps
    }

    /// What a device captured, and how calls were made.
    pub(crate) fn regions(&self) -> &Regions {
        &self.regions
    }

    /// Which kernels ran, and in how many plans.
    pub(crate) fn kernels(&self) -> &std::collections::BTreeMap<String, u64> {
        &self.kernels
    }

    /// Pairs of a query and a key under an indexer, over all layers.
    pub(crate) fn pairs(&self) -> SparseWork {
        self.pairs
    }

    /// What became of a ring's worlds, where the model has one.
    pub(crate) fn worlds(&self) -> Option<report::Ring> {
        let config = self.model.kv.ring()?.config();
        let ([frames, most_frames], counts) = (self.frames, self.saved.counts());
        let around = config.layers.iter().map(|layer| layer.ring_buckets * layer.pinned_dilation);
        let around = around.max().unwrap_or(1) as u64;
        Some(report::Ring {
            worlds: config.num_worlds,
            tokens_per_frame: config.tokens_per_frame,
            frames,
            most_frames,
            wraps: (most_frames / around).saturating_sub(1),
            saved: counts.saved,
            replayed: counts.replayed,
            differ: counts.differ,
            first_difference: counts.first.clone(),
        })
    }

    fn note_frames(&mut self, works: &[Work]) {
        let Some(frame) = self.model.parts.frame else { return };
        for work in works.iter().filter(|work| work.turn.walk.commits()) {
            let ends = work.turn.additions.iter().map(|addition| (addition.start + addition.span) / frame);
            self.frames[0] += 1;
            self.frames[1] = self.frames[1].max(ends.max().unwrap_or(0) as u64);
        }
    }

    /// Memory so far.
    pub(crate) fn memory(&mut self) -> Memory {
        self.memory.look();
        self.memory
    }

    fn caches(&self) -> impl Iterator<Item = (usize, &Arc<PagedKvCache>)> {
        [self.model.kv.pages(), self.model.context.as_ref()].into_iter().flatten().enumerate()
    }

    /// What `plan` needs of each cache of pages, and under which label. Of a ring it needs one world.
    fn needs(&self, plan: &RequestPlan, chunked_prefill: usize) -> Vec<(&Arc<PagedKvCache>, Label, Need)> {
        let own = self
            .model
            .kv
            .pages()
            .map(|cache| (cache, Label::main(), Need::of(plan, cache.store().config(), chunked_prefill)));
        let context = self.model.context.as_ref().map(|cache| {
            (cache, Label::new(CONTEXT), Need::of_context(plan.context_len, cache.store().config()))
        });
        own.into_iter().chain(context).collect()
    }

    fn id(&self, request: usize) -> &'a RequestId {
        &self.plans[request].id
    }

    fn declared(&self, works: &[Work]) -> mstar_core::Step {
        declare::step(works, self.plans, |request| &self.contents[&request], &self.model.parts)
    }

    fn note(&mut self, outcome: forward::Outcome) {
        for (request, hash) in outcome.digests {
            let digest = self.digests.entry(request).or_default();
            *digest = digest.wrapping_add(hash);
        }
        self.last.rows = outcome.rows;
        self.last.tokens = outcome.tokens;
        self.verified.rows += outcome.rows_checked as u64;
        for verdict in outcome.verdicts {
            self.verified.checks += 1;
            self.verified.vectors += verdict.vectors;
            self.verified.picks += verdict.picks;
            if verdict.allowed > 0.0 {
                self.verified.worst = self.verified.worst.max(verdict.error / verdict.allowed);
            }
            if let Some(failure) = verdict.failure {
                self.verified.failed += 1;
                self.verified.first_failure.get_or_insert(failure);
            }
        }
        self.pairs += outcome.pairs;
        for kernel in outcome.kernels {
            *self.kernels.entry(kernel).or_default() += 1;
        }
    }
}

impl Runtime for Live<'_> {
    fn impossible(&self, plan: &RequestPlan, chunked_prefill: usize) -> Option<Refusal> {
        self.needs(plan, chunked_prefill).into_iter().find_map(|(cache, label, need)| {
            let reason = need.unmet(cache.store().config(), &plan.id, label)?;
            Some(Refusal { resource: Resource::name(&**cache).clone(), reason })
        })
    }

    fn whole_need(
        &self,
        plan: &RequestPlan,
        chunked_prefill: usize,
        cache: &ResourceName,
    ) -> Option<[usize; 2]> {
        let mut needs = self.needs(plan, chunked_prefill).into_iter();
        let (cache, _, need) = needs.find(|(found, ..)| Resource::name(&***found) == cache)?;
        Some([need.pages, cache.store().config().usable_pages()])
    }

    fn ingest(&mut self, request: usize) -> anyhow::Result<usize> {
        let plan = &self.plans[request];
        let content = Content::of(plan);
        let prompt = &content.streams[0].tokens[..plan.prompt_len()];
        let ingest = Ingest { prompts: vec![(Label::main(), prompt.into())], ..Ingest::new(plan.id.clone()) };
        self.model.engine.ingest(&ingest)?;
        let hits = match self.model.kv.pages() {
            Some(pages) => pages.store().ingest_report(&plan.id)?,
            None => Vec::new(),
        };
        self.contents.insert(request, content);
        self.digests.insert(request, 0);
        Ok(hits.iter().find(|(label, _)| *label == Label::main()).map_or(0, |(_, tokens)| *tokens))
    }

    fn admit(&mut self, works: &[Work]) -> anyhow::Result<Outcome> {
        let engine = &self.model.engine;
        let step = self.declared(works);
        let bucket = self.model.buckets.pick_for(&step).ok();
        let admission = match &bucket {
            Some(bucket) => engine.admit_in(step, bucket)?,
            None => engine.admit(step)?,
        };
        match admission {
            Admission::Admitted(admitted) => {
                self.admitted = Some(engine.plan(admitted)?);
                Ok(Outcome::Admitted)
            }
            Admission::NotReady(refusal) => Ok(Outcome::NotReady(refusal)),
            Admission::Refused(refusal) => Ok(Outcome::Refused(refusal)),
        }
    }

    fn preplan(&mut self, works: &[Work]) -> anyhow::Result<bool> {
        let engine = &self.model.engine;
        let Some(running) = self.admitted.as_ref().filter(|_| engine.supports_preplan()) else {
            return Ok(false);
        };
        let step = self.declared(works);
        let admission = match self.model.buckets.pick_for(&step).ok() {
            Some(bucket) => engine.preplan_in(running, step, &bucket)?,
            None => engine.preplan(running, step)?,
        };
        if let Admission::Admitted(ahead) = admission {
            self.ahead = Some(ahead);
        }
        Ok(self.ahead.is_some())
    }

    fn promote(&mut self) -> anyhow::Result<bool> {
        let ahead = self.ahead.take().context("no step was planned ahead")?;
        let admission = self.model.engine.promote(ahead).map_err(|failed| failed.error)?;
        if let Admission::Admitted(planned) = admission {
            self.admitted = Some(planned);
        }
        Ok(self.admitted.is_some())
    }

    fn clear_preplan(&mut self) -> anyhow::Result<()> {
        if let Some(ahead) = self.ahead.take() {
            self.model.engine.clear(ahead);
        }
        Ok(())
    }

    fn run(&mut self, works: &[Work]) -> anyhow::Result<()> {
        let planned = self.admitted.take().context("no step was admitted")?;
        if self.plans_only {
            match self.model.kv.ring() {
                // No layer writes its frame.
                Some(_) => self.model.engine.abort(planned),
                None => self.model.engine.commit(planned)?,
            }
            return Ok(());
        }
        let padded = planned.lease().is_some();
        self.last = StepCost { walk: declare::walk(works), padded, ..StepCost::default() };
        self.padded_steps += u64::from(padded);
        let scene = Scene {
            plans: self.plans,
            contents: &self.contents,
            seed: self.seed,
            verify: self.verify,
            step: self.steps,
            phases: &self.phases,
            witness: self.witness,
        };
        let outcome =
            forward::run(self.model, &mut self.buffers, &mut self.regions, &planned, works, &scene)?;
        self.model.engine.commit(planned)?;
        self.note(outcome);
        self.note_frames(works);
        self.steps += 1;
        if self.steps.is_multiple_of(LOOK_EVERY) {
            self.memory.look();
        }
        Ok(())
    }

    fn held_pages(&self, request: usize) -> usize {
        let id = self.id(request);
        self.caches().map(|(_, cache)| cache.store().pages_held(id).unwrap_or(0)).sum()
    }

    fn offload(&mut self, request: usize) -> anyhow::Result<Option<usize>> {
        let id = self.id(request);
        let on_host: usize = self.host.values().flatten().sum();
        if on_host + self.held_pages(request) > self.model.host_pages {
            return Ok(None);
        }
        let mut moved = [0; 2];
        for (index, cache) in self.caches() {
            let store = cache.store();
            let before = store.stats().offloaded_bytes;
            let started = std::time::Instant::now();
            moved[index] = store.offload(id)?;
            let bytes = store.stats().offloaded_bytes - before;
            let work = Least { bytes_read: bytes, bytes_written: bytes, ..Least::default() };
            self.phases.add("offload", cache_name(cache), started.elapsed(), work);
        }
        self.host.insert(request, moved);
        Ok(Some(moved.iter().sum()))
    }

    fn reload(&mut self, request: usize, spare: usize) -> anyhow::Result<Option<usize>> {
        let id = self.id(request);
        let moved = self.host.get(&request).copied().unwrap_or_default();
        for (index, cache) in self.caches() {
            let stats = cache.store().stats();
            if moved[index] + spare > stats.pages_free + stats.pages_evictable {
                return Ok(None);
            }
        }
        for (index, cache) in self.caches() {
            let store = cache.store();
            let started = std::time::Instant::now();
            match store.reload(id)? {
                Outcome::Admitted => {}
                Outcome::NotReady(why) | Outcome::Refused(why) => {
                    anyhow::bail!("request {id} was counted to fit and does not: {why} (a bug of mstar's)")
                }
            }
            let bytes = (moved[index] * store.config().page_bytes()?) as u64;
            let work = Least { bytes_read: bytes, bytes_written: bytes, ..Least::default() };
            self.phases.add("reload", cache_name(cache), started.elapsed(), work);
        }
        self.host.remove(&request);
        Ok(Some(moved.iter().sum()))
    }

    fn remove(&mut self, request: usize, finished: bool) -> anyhow::Result<()> {
        self.model.engine.remove(self.id(request))?;
        self.contents.remove(&request);
        self.saved.remove(request);
        let digest = self.digests.remove(&request).unwrap_or(0);
        if finished {
            self.digest.add(self.id(request).as_str(), digest);
        }
        Ok(())
    }

    fn saves(&self, request: usize, progress: &Progress) -> bool {
        self.saved.due(request, &self.plans[request], progress)
    }

    fn rewind(&mut self, request: usize, progress: &Progress) -> anyhow::Result<Option<Progress>> {
        let Some(ring) = self.model.kv.ring() else { return Ok(None) };
        let digest = self.digests.entry(request).or_default();
        let back = self.saved.settle(request, &self.plans[request], ring, progress, digest)?;
        self.memory.look();
        Ok(back)
    }

    fn page_size(&self) -> usize {
        self.model.config().map_or(1, |config| config.page_size)
    }

    fn drain_events(&mut self) -> Vec<Event> {
        let pages = self.model.kv.pages();
        let events = pages.map(|pages| pages.store().drain_events()).unwrap_or_default();
        let kept = events.into_iter().filter_map(|event| match event {
            KvEvent::Indexed { entry, request, label, ordinal } => {
                Some(Event::Index { step: 0, entry, request, label, ordinal })
            }
            KvEvent::Evicted { entry } => Some(Event::Evict { step: 0, entry }),
            _ => None,
        });
        kept.chain(self.saved.drain()).collect()
    }
}

fn cache_name(cache: &PagedKvCache) -> &str {
    Resource::name(cache).as_str()
}
