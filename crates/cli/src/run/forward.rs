//! One forward: for every plan label of a step, layer after layer, synthetic queries and entries through the caches and the
//! attention resources, and then a look at what came out.

use std::collections::HashMap;

use anyhow::{Context, ensure};
use mstar_core::attend::{IndexGeometry, SparseWork, Work as Least, write_kv};
use mstar_core::kv::{PagedKv, PagedKvCache};
use mstar_core::{Forward, Label, PlanId, PlannedStep, RequestId};
use mstar_kernels::reference::Real;
use mstar_kernels::{DType, Element, TensorMut};
use rayon::prelude::*;

use super::buffers::{Buffers, Fresh, Written};
use super::cache::PackedPlan;
use super::content::mix;
use super::declare::{self, draft_mask};
use super::digest::{self, Place};
use super::model::Model;
use super::phases::Phases;
use super::regions::{Call, Reads, Regions};
use super::room::Room;
use super::scheduler::Work;
use super::script::{Addition, Content, Walk, Written as What};
use super::shown::{Shown, Witness};
use super::verify::{self, Layers, Pick, Row, Sample, Verdict};
use super::workload::RequestPlan;

/// What a forward needs beside the model.
pub(crate) struct Scene<'a> {
    /// The workload.
    pub(crate) plans: &'a [RequestPlan],
    /// Content of the active requests, by their index.
    pub(crate) contents: &'a HashMap<usize, Content>,
    /// The run's seed.
    pub(crate) seed: u64,
    /// Share of rows to verify.
    pub(crate) verify: f64,
    /// The step's number in the run.
    pub(crate) step: u64,
    /// Costs.
    pub(crate) phases: &'a Phases,
    /// Who is shown every layer.
    pub(crate) witness: Option<&'a dyn Witness>,
}

/// What a forward found.
#[derive(Default)]
pub(crate) struct Outcome {
    /// Sum of the output hashes of each request, by index.
    pub(crate) digests: HashMap<usize, u64>,
    /// One verdict a checked (row, layer, attention).
    pub(crate) verdicts: Vec<Verdict>,
    /// Rows chosen to be checked.
    pub(crate) rows_checked: usize,
    /// Query tokens, padding left out, over all plan labels.
    pub(crate) tokens: usize,
    /// Rows, padding left out.
    pub(crate) rows: usize,
    /// Which kernels ran.
    pub(crate) kernels: Vec<String>,
    /// Pairs of a query and a key under an indexer, over all layers.
    pub(crate) pairs: SparseWork,
}

/// One row of a plan, and whose it is.
pub(super) struct Packed<'a> {
    pub(super) work: &'a Work,
    pub(super) addition: &'a Addition,
    pub(super) label: Label,
    /// Its tokens in the plan.
    pub(super) tokens: std::ops::Range<usize>,
    /// Content keys of its queries.
    pub(super) keys: Vec<u64>,
    /// Uncommitted passes before it.
    pass: usize,
    pub(super) index: usize,
}

/// A row that is verified, and what it may see.
struct Checked {
    packed: usize,
    held: Held,
}

/// What a row may see.
pub(super) struct Held {
    /// Content keys of its stream up to its last query.
    pub(super) own: Vec<u64>,
    pub(super) mask: Option<Vec<bool>>,
    /// What samples of it are drawn by.
    pub(super) salt: u64,
}

/// Runs every plan label of `planned`, whose turns are `works`.
pub(crate) fn run(
    model: &Model,
    buffers: &mut Buffers,
    regions: &mut Regions,
    planned: &PlannedStep,
    works: &[Work],
    scene: &Scene<'_>,
) -> anyhow::Result<Outcome> {
    let mut outcome = Outcome::default();
    if let Some(context) = &model.context {
        write_context(model, context, buffers, planned, works, scene)?;
    }
    for label in model.kv.plan_labels(planned.serial())? {
        let id = PlanId { slot: planned.slot(), label, serial: planned.serial() };
        let plan = model.kv.packed(&id)?;
        if plan.tokens == 0 {
            continue;
        }
        run_label(model, buffers, regions, planned, &plan, works, scene, &mut outcome)?;
    }
    Ok(outcome)
}

/// Writes the contexts that a step's encoders made.
fn write_context(
    model: &Model,
    cache: &PagedKvCache,
    buffers: &mut Buffers,
    planned: &PlannedStep,
    works: &[Work],
    scene: &Scene<'_>,
) -> anyhow::Result<()> {
    for label in cache.plan_labels(planned.serial())? {
        let id = PlanId { slot: planned.slot(), label: label.clone(), serial: planned.serial() };
        let plan = cache.kv_plan(&id)?;
        if plan.slots.iter().all(|&slot| slot < 0) {
            continue;
        }
        let (packed, keys) = pack(&PackedPlan::of_pages(&plan), works, scene)?;
        ensure!(
            packed.iter().all(|row| row.work.turn.walk == Walk::Encode),
            "a context grew after it was written"
        );
        let stream = model.queue.stream();
        let mut forward = planned.forward(label, &stream);
        for layer in 0..model.layers {
            generate(buffers, scene, &[Fresh::Entries], layer, &keys)?;
            forward.set_layer(layer);
            write_kv(cache, &forward, buffers.views(keys.len())?.entries)?;
        }
    }
    Ok(())
}

/// Runs one plan label of the requests' own cache.
fn run_label(
    model: &Model,
    buffers: &mut Buffers,
    regions: &mut Regions,
    planned: &PlannedStep,
    plan: &PackedPlan,
    works: &[Work],
    scene: &Scene<'_>,
    outcome: &mut Outcome,
) -> anyhow::Result<()> {
    let tokens = plan.tokens;
    ensure!(
        tokens <= buffers.tokens(),
        "a plan of {tokens} tokens is larger than the {} that were foreseen (a bug of mstar's)",
        buffers.tokens()
    );
    let (packed, keys) = pack(plan, works, scene)?;
    outcome.tokens += packed.iter().map(|row| row.tokens.len()).sum::<usize>();
    outcome.rows += packed.len();
    let checked = choose(&packed, scene);
    outcome.rows_checked += checked.len();
    let stream = model.queue.stream();
    let mut forward = planned.forward(plan.id.label.clone(), &stream);
    let (lease, walk) = (planned.lease(), declare::walk(works));
    let attentions = model.rooms().count();
    for layer in 0..model.layers {
        generate(buffers, scene, &[Fresh::Queries, Fresh::Entries], layer, &keys)?;
        if model.rooms().filter_map(Room::indexer).any(|index| index.is_full(layer)) {
            generate(buffers, scene, &[Fresh::Index], layer, &keys)?;
        }
        forward.set_layer(layer);
        for (turn, room) in model.own.iter().enumerate() {
            // The first resource over the cache sees to it that the entries are written; the others find them there.
            let (reads, part) = (Reads::Own { write: turn == 0 }, layer * attentions + room.index);
            let call = Call { room, reads, lease, walk, part, tokens };
            regions
                .attend(&call, &mut forward, buffers, scene.phases)
                .with_context(|| format!("layer {layer} of {}", room.name))?;
            let looked_at = !checked.is_empty() || scene.witness.is_some();
            let picked = if looked_at { Picked::copy(room, &forward, plan)? } else { None };
            let seen = Seen { room, layer, query_layer: layer, picked: picked.as_ref() };
            look(model, buffers, plan, &packed, &checked, scene, seen, outcome)?;
        }
        for room in &model.cross {
            // A cross-attention projects queries of its own: those of a layer past the last.
            let query_layer = model.layers + layer;
            generate(buffers, scene, &[Fresh::Queries], query_layer, &keys)?;
            let (reads, part) = (Reads::Context, layer * attentions + room.index);
            let call = Call { room, reads, lease, walk, part, tokens };
            regions
                .attend(&call, &mut forward, buffers, scene.phases)
                .with_context(|| format!("layer {layer} of {}", room.name))?;
            let seen = Seen { room, layer, query_layer, picked: None };
            look(model, buffers, plan, &packed, &checked, scene, seen, outcome)?;
        }
    }
    for room in model.rooms() {
        outcome.kernels.push(room.kernel(&plan.id)?);
        outcome.pairs += room.pairs(&plan.id, model.layers).unwrap_or_default();
    }
    Ok(())
}

/// An indexer's picks of one layer, as it used them.
pub(super) struct Picked {
    /// The full layer that they were made by.
    pub(super) layer: usize,
    /// `[T, K]`; `None` when the plan needed none.
    pub(super) selection: Option<Vec<i32>>,
}

impl Picked {
    /// The picks that `room` attended in the layer of `forward`; `None` for a room without an indexer.
    fn copy(room: &Room, forward: &Forward<'_>, plan: &PackedPlan) -> anyhow::Result<Option<Picked>> {
        let layer = forward.layer();
        let Some(index) = room.indexer() else { return Ok(None) };
        // By the rule itself, and not by the function that the resource follows.
        let full = index.full_layers.iter().copied().filter(|&full| full <= layer).max();
        let full = full.context("no layer before it selects (a bug of mstar's)")?;
        let Some(sparse) = room.selects(&plan.id)? else {
            return Ok(Some(Picked { layer: full, selection: None }));
        };
        let shape = [plan.tokens, index.index_topk];
        let mut selection = vec![0i32; shape[0] * shape[1]];
        let selected = forward.last_selection().context("nothing was selected (a bug of mstar's)")?;
        ensure!(
            selected.layer() == full,
            "layer {layer} attended the pick of layer {}, not that of layer {full} (a bug of mstar's)",
            selected.layer()
        );
        sparse.copy_selection(selected, TensorMut::from_slice(&mut selection, &shape)?)?;
        Ok(Some(Picked { layer: full, selection: Some(selection) }))
    }

    /// What of it concerns the tokens `tokens` of the plan.
    fn of<'a>(&'a self, index: &'a IndexGeometry, tokens: std::ops::Range<usize>) -> Pick<'a> {
        let topk = index.index_topk;
        let selection = self.selection.as_ref().map(|all| &all[tokens.start * topk..tokens.end * topk]);
        Pick { index, layer: self.layer, selection }
    }
}

/// The plan's rows with whose they are, and the content key of every token; padding has key 0.
fn pack<'a>(
    plan: &PackedPlan,
    works: &'a [Work],
    scene: &Scene<'_>,
) -> anyhow::Result<(Vec<Packed<'a>>, Vec<u64>)> {
    let mut whose: HashMap<(&RequestId, Label), (&Work, &Addition)> = HashMap::new();
    for work in works {
        let request = &scene.plans[work.request];
        for addition in &work.turn.additions {
            whose.insert((&request.id, work.turn.label(request, addition.stream)), (work, addition));
        }
    }
    let mut keys = vec![0u64; plan.tokens];
    let mut packed = Vec::with_capacity(plan.rows.len());
    for (index, row) in plan.rows.iter().enumerate() {
        let (work, addition) = whose.get(&(&row.request, row.label.clone())).copied().with_context(|| {
            format!("the plan has a row of {} ({}) that no turn made", row.request, row.label)
        })?;
        ensure!(
            row.tokens.len() == addition.span && row.start == addition.start,
            "request {} ({}) is planned as {} tokens after {}, its turn is {} after {}",
            row.request,
            row.label,
            row.tokens.len(),
            row.start,
            addition.span,
            addition.start
        );
        let request = &scene.plans[work.request];
        let (_, own) = scene.contents[&work.request].added(request, work.turn.walk, addition);
        let tokens = row.tokens.clone();
        keys[tokens.clone()].copy_from_slice(&own);
        let pass = match addition.written {
            What::Noise(pass) => pass + 1,
            What::Draft => 1,
            What::Kept => 0,
        };
        packed.push(Packed { work, addition, label: row.label.clone(), tokens, keys: own, pass, index });
    }
    Ok((packed, keys))
}

fn generate(
    buffers: &mut Buffers,
    scene: &Scene<'_>,
    which: &[Fresh],
    layer: usize,
    keys: &[u64],
) -> anyhow::Result<()> {
    let tokens = Least { tokens: keys.len() as u64, ..Least::default() };
    scene.phases.timed("synthesize", tokens, || {
        which.iter().try_for_each(|&which| buffers.generate(which, scene.seed, layer, keys))
    })?;
    Ok(())
}

/// The rows of a plan that are verified, with the content keys of all that each may see.
fn choose(packed: &[Packed<'_>], scene: &Scene<'_>) -> Vec<Checked> {
    let mut checked = Vec::new();
    for (index, row) in packed.iter().enumerate() {
        let request = &scene.plans[row.work.request];
        let stream = row.addition.stream;
        if !verify::chosen(scene.verify, scene.seed, scene.step, request.ordinal, stream) {
            continue;
        }
        checked.push(Checked { packed: index, held: content(row, scene) });
    }
    checked
}

/// What a row may see, by its request's plan alone.
pub(super) fn content(row: &Packed<'_>, scene: &Scene<'_>) -> Held {
    let (request, stream) = (&scene.plans[row.work.request], row.addition.stream);
    let held = &scene.contents[&row.work.request].streams[stream];
    let mut own = held.keys[..row.addition.start].to_vec();
    own.extend_from_slice(&row.keys);
    let mask = draft_mask(request, row.addition.written);
    let salt = mix(mix(mix(scene.seed, scene.step), request.ordinal), stream as u64);
    Held { own, mask, salt }
}

/// Whose output lies in the buffers.
#[derive(Clone, Copy)]
pub(super) struct Seen<'a> {
    pub(super) room: &'a Room,
    pub(super) layer: usize,
    pub(super) query_layer: usize,
    pub(super) picked: Option<&'a Picked>,
}

/// Hashes what a layer wrote, and verifies the chosen rows of it.
fn look(
    model: &Model,
    buffers: &mut Buffers,
    plan: &PackedPlan,
    packed: &[Packed<'_>],
    checked: &[Checked],
    scene: &Scene<'_>,
    seen: Seen<'_>,
    outcome: &mut Outcome,
) -> anyhow::Result<()> {
    let written = buffers.written(plan.tokens)?;
    if let Some(witness) = scene.witness {
        let (label, tokens) = (&plan.id.label, plan.tokens);
        witness.see(&Shown { model, scene, seen, packed, label, tokens, written })?;
    }
    let hashes: Vec<u64> = scene.phases.timed("digest", Least::default(), || {
        packed.par_iter().map(|row| hash_row(row, &written, &seen)).collect()
    });
    for (row, hash) in packed.iter().zip(hashes) {
        let digest = outcome.digests.entry(row.work.request).or_default();
        *digest = digest.wrapping_add(hash);
    }
    if scene.verify <= 0.0 {
        return Ok(());
    }
    let verdicts = scene.phases.timed("verify", Least::default(), || {
        let judge = |check: &Checked| judge(model, &packed[check.packed], check, &written, scene, &seen);
        let mut verdicts: Vec<Verdict> = checked.par_iter().filter_map(judge).collect();
        verdicts.extend(padding(plan, packed, &written, scene, &seen));
        verdicts
    });
    outcome.verdicts.extend(verdicts);
    Ok(())
}

fn hash_row(row: &Packed<'_>, written: &Written<'_>, seen: &Seen<'_>) -> u64 {
    let hash = |(i, t): (usize, usize)| {
        let place = Place {
            attention: seen.room.index,
            layer: seen.layer,
            stream: row.addition.stream,
            position: row.addition.start + i,
            pass: row.pass,
        };
        digest::vector(place, written.token_bytes(t), written.token_lse(t))
    };
    row.tokens.clone().enumerate().map(hash).fold(0, u64::wrapping_add)
}

/// Verifies one row of one layer, if the row's sample has that layer.
fn judge(
    model: &Model,
    packed: &Packed<'_>,
    check: &Checked,
    written: &Written<'_>,
    scene: &Scene<'_>,
    seen: &Seen<'_>,
) -> Option<Verdict> {
    let plan = &scene.plans[packed.work.request];
    let shape = &seen.room.shape;
    let is_cross = !shape.causal && seen.query_layer != seen.layer;
    let keys = if is_cross { &scene.contents[&packed.work.request].context.keys } else { &check.held.own };
    let index = seen.room.indexer();
    let sample = Sample::of(shape, index, model.layers, packed.keys.len(), keys.len(), check.held.salt);
    if !sample.layers.contains(&seen.layer) {
        return None;
    }
    let row = Row {
        attention: &seen.room.name,
        shape,
        request: &plan.id,
        label: &packed.label,
        step: scene.step,
        index: packed.index,
        keys,
        queries: &packed.keys,
        own_mask: if is_cross { None } else { check.held.mask.as_deref() },
        first_position: packed.addition.start,
        pick: index.zip(seen.picked).map(|(index, picked)| picked.of(index, packed.tokens.clone())),
    };
    Some(match model.dtype {
        DType::Bf16 => judge_typed::<half::bf16>(&row, &sample, scene, seen, written, packed),
        DType::F16 => judge_typed::<half::f16>(&row, &sample, scene, seen, written, packed),
        _ => judge_typed::<f32>(&row, &sample, scene, seen, written, packed),
    })
}

fn judge_typed<T: Real + Element>(
    row: &Row<'_>,
    sample: &Sample,
    scene: &Scene<'_>,
    seen: &Seen<'_>,
    written: &Written<'_>,
    packed: &Packed<'_>,
) -> Verdict {
    let all = written.o.as_slice::<T>().expect("a contiguous view of the run's dtype");
    let o = &all[packed.tokens.start * written.vector..packed.tokens.end * written.vector];
    let lse = &written.lse[packed.tokens.start * written.heads..packed.tokens.end * written.heads];
    let layers = Layers { own: seen.layer, query: seen.query_layer };
    verify::check(row, sample, scene.seed, layers, T::DTYPE, o, lse)
}

/// Padded rows yield zeros and `-inf`, bit for bit.
fn padding(
    plan: &PackedPlan,
    packed: &[Packed<'_>],
    written: &Written<'_>,
    scene: &Scene<'_>,
    seen: &Seen<'_>,
) -> Option<Verdict> {
    let first = packed.last().map_or(0, |row| row.tokens.end);
    let wrong = (first..plan.tokens).find(|&t| {
        written.token_bytes(t).iter().any(|&byte| byte != 0)
            || written.token_lse(t).iter().any(|&lse| lse != f32::NEG_INFINITY)
    })?;
    let failure = format!(
        "step {}, {} layer {}: padded token {wrong} of plan {} is not 0 with lse -inf",
        scene.step, seen.room.name, seen.layer, plan.id.label
    );
    Some(Verdict { failure: Some(failure), ..Verdict::default() })
}
