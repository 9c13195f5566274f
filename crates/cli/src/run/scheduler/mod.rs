//! Continuous batching: which requests take part in the next step, and who makes room when pages run out.
//!
//! The scheduler decides over a virtual clock and the answers of a [`Runtime`], never over measured time, so a run
//! is the same run on any machine. Its rules:
//!
//! - Requests enter in order of arrival while fewer than `max_batch` are active and none waits on the host.
//! - A step takes the next turn of every resident request whose turn is of the leader's class (an encoder's, one that
//!   commits, one that keeps nothing); the request that was served least recently leads. Prefill cuts and encoder
//!   contexts share `chunked_prefill` tokens a step; at least one always runs, and is admitted whole or not at all.
//! - When pages run out, the latest prefill cuts are put off first; then the latest resident request is offloaded
//!   whole, and so on until the step fits (where the host has no room, it begins anew instead). A request that does not fit alone is refused with the pages it lacks.
//! - Where a ring has no world for a request, its turn is put off until another has left.
//! - Offloaded requests come back oldest first, once there is room for them and for everybody's next turn.
//!
//! **Progress.** The oldest request is never a victim, and no class is led past it at the cost of its pages: where the
//! leader's class does not fit, the oldest leads. As every wait ends in a lead, the oldest is served again and again, its
//! turns run out, and the next one is the oldest. Each round before a step removes a turn from the step, offloads a
//! request, or refuses one; [`Scheduler::tick`] counts its rounds and names itself a bug if they pass that bound.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use mstar_core::{Outcome, Refusal, RefusalReason, ResourceName};

use super::event::{Event, Stored};
use super::script::{Addition, Progress, Turn, Walk};
use super::workload::RequestPlan;

/// One request's turn in a step; `request` is its index in the workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Work {
    /// Whose turn.
    pub(crate) request: usize,
    /// What it does.
    pub(crate) turn: Turn,
}

/// What the scheduler drives: the engine with its caches, or a simulation of one.
pub(crate) trait Runtime {
    /// Why `plan`, cut at multiples of `chunked_prefill`, could never run to its end, whatever else is resident; `None`
    /// when it might.
    fn impossible(&self, plan: &RequestPlan, chunked_prefill: usize) -> Option<Refusal>;

    /// Pages that `plan` needs of `cache` at once to run to its end, and pages that requests may hold there.
    fn whole_need(
        &self,
        plan: &RequestPlan,
        chunked_prefill: usize,
        cache: &ResourceName,
    ) -> Option<[usize; 2]>;

    /// Takes a request in; the prompt tokens that the prefix index had.
    fn ingest(&mut self, request: usize) -> anyhow::Result<usize>;

    /// Reserves and plans a step, or says why not and changes nothing.
    fn admit(&mut self, step: &[Work]) -> anyhow::Result<Outcome>;

    /// Plans a step ahead, while the admitted one has yet to run; whether it did.
    fn preplan(&mut self, step: &[Work]) -> anyhow::Result<bool>;

    /// Makes the step planned ahead the admitted one; whether that still stands. `false` leaves no trace of it.
    fn promote(&mut self) -> anyhow::Result<bool>;

    /// Gives up the step planned ahead.
    fn clear_preplan(&mut self) -> anyhow::Result<()>;

    /// Runs the admitted step and commits it.
    fn run(&mut self, step: &[Work]) -> anyhow::Result<()>;

    /// Moves a request's pages to the host, whole; how many, or `None` where the host has no room for them.
    fn offload(&mut self, request: usize) -> anyhow::Result<Option<usize>>;

    /// Brings a request back if `spare` pages stay available beside its own; the pages it took, or `None`.
    fn reload(&mut self, request: usize, spare: usize) -> anyhow::Result<Option<usize>>;

    /// Forgets a request. `finished` says that it ran to its end.
    fn remove(&mut self, request: usize, finished: bool) -> anyhow::Result<()>;

    /// Whether a request that is at `progress` is to be saved by [`Runtime::rewind`], which no step may hold then.
    fn saves(&self, request: usize, progress: &Progress) -> bool {
        let _ = (request, progress);
        false
    }

    /// Saves a request that has come to `progress`, or brings back what was saved of it: how far it is then.
    fn rewind(&mut self, request: usize, progress: &Progress) -> anyhow::Result<Option<Progress>> {
        let _ = (request, progress);
        Ok(None)
    }

    /// Pages that a resident request would free by leaving.
    fn held_pages(&self, request: usize) -> usize;

    /// Tokens a page.
    fn page_size(&self) -> usize;

    /// What happened in the caches since the last call, in order.
    fn drain_events(&mut self) -> Vec<Event>;
}

/// Limits of the batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Requests active at once.
    pub(crate) max_batch: usize,
    /// Where prompts are cut, and prefill tokens a step.
    pub(crate) chunked_prefill: usize,
    /// Virtual milliseconds a step.
    pub(crate) step_ms: f64,
    /// Whether the next step is planned while one runs.
    pub(crate) preplan: bool,
}

/// A request between its admission and its end.
#[derive(Clone, Debug)]
struct Active {
    request: usize,
    progress: Progress,
    offloaded: bool,
    /// One past the step that served it last, 0 for none.
    served: u64,
}

/// Whose class a step takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lead {
    /// The oldest resident request's.
    Oldest,
    /// That of the one which has waited longest.
    Waiting,
}

/// What one tick did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Tick {
    /// A step ran.
    Ran(Vec<Work>),
    /// Nothing is left.
    Done,
}

/// Counts over a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Steps run.
    pub(crate) steps: u64,
    /// Steps that had been planned ahead.
    pub(crate) promoted: u64,
    /// Plans made ahead and given up, or found stale.
    pub(crate) replanned: u64,
    /// Requests that ran to their end.
    pub(crate) finished: usize,
    /// Requests refused.
    pub(crate) refused: usize,
    /// Whole-request offloads.
    pub(crate) offloads: usize,
    /// Reloads.
    pub(crate) reloads: usize,
    /// Requests begun anew, since neither the cache nor the host had room for what they held.
    pub(crate) restarts: usize,
    /// Prefill cuts put off since pages were short.
    pub(crate) put_off: usize,
    /// Prompt tokens found in the prefix index.
    pub(crate) hit_tokens: usize,
    /// Most requests active at once.
    pub(crate) peak_active: usize,
}

/// The state of a run.
pub(crate) struct Scheduler<'a> {
    plans: &'a [RequestPlan],
    limits: Limits,
    pending: VecDeque<usize>,
    active: Vec<Active>,
    ahead: Option<Vec<Work>>,
    now_ms: f64,
    counts: Counts,
    events: Vec<Event>,
}

impl<'a> Scheduler<'a> {
    /// A run of `plans`, which are in order of arrival.
    pub(crate) fn new(plans: &'a [RequestPlan], limits: Limits) -> Scheduler<'a> {
        Scheduler {
            plans,
            limits,
            pending: (0..plans.len()).collect(),
            active: Vec::new(),
            ahead: None,
            now_ms: 0.0,
            counts: Counts::default(),
            events: Vec::new(),
        }
    }

    /// Counts so far.
    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }

    /// What happened so far, in order.
    pub(crate) fn events(&self) -> &[Event] {
        &self.events
    }

    /// Requests active now.
    pub(crate) fn active(&self) -> usize {
        self.active.len()
    }

    /// Requests that have neither finished nor been refused.
    pub(crate) fn unfinished(&self) -> usize {
        self.plans.len() - self.counts.finished - self.counts.refused
    }

    /// The virtual clock.
    pub(crate) fn now_ms(&self) -> f64 {
        self.now_ms
    }

    /// Runs one step, or finds that nothing is left.
    pub(crate) fn tick(&mut self, machine: &mut impl Runtime) -> anyhow::Result<Tick> {
        // Each round offloads, refuses, restarts or jumps to an arrival at least once; see the module's doc.
        for _ in 0..=8 * self.plans.len() + 8 {
            self.fill(machine)?;
            if self.active.is_empty() {
                let Some(&next) = self.pending.front() else { return Ok(Tick::Done) };
                self.now_ms = self.now_ms.max(self.plans[next].arrival_ms);
                continue;
            }
            let Some(step) = self.admitted(machine)? else { continue };
            self.plan_ahead(machine, &step)?;
            machine.run(&step)?;
            self.drain(machine);
            self.committed(machine, &step)?;
            return Ok(Tick::Ran(step));
        }
        anyhow::bail!(
            "the scheduler made no progress (a bug of mstar's): {} active, {} pending, step {}",
            self.active.len(),
            self.pending.len(),
            self.counts.steps
        )
    }

    /// Brings offloaded requests back and takes new ones in.
    fn fill(&mut self, machine: &mut impl Runtime) -> anyhow::Result<()> {
        if !self.waiting() {
            return Ok(());
        }
        self.give_up_ahead(machine)?;
        self.bring_back(machine)?;
        while self.arrived() && self.active.len() < self.limits.max_batch.max(1) && !self.any_offloaded() {
            let Some(request) = self.pending.pop_front() else { break };
            if let Some(refusal) = machine.impossible(&self.plans[request], self.limits.chunked_prefill) {
                self.refuse(request, refusal.to_string());
                continue;
            }
            let hit = machine.ingest(request)?;
            self.drain(machine);
            self.counts.hit_tokens += hit;
            let (id, prompt_tokens) = (self.plans[request].id.clone(), self.plans[request].prompt_len());
            self.events.push(Event::Admit {
                step: self.counts.steps,
                request: id,
                prompt_tokens,
                hit_tokens: hit,
            });
            self.active.push(Active {
                request,
                progress: Progress::after_hit(hit),
                offloaded: false,
                served: 0,
            });
            self.counts.peak_active = self.counts.peak_active.max(self.active.len());
        }
        Ok(())
    }

    /// Whether `fill` has anything to look at.
    fn waiting(&self) -> bool {
        self.any_offloaded() || (self.arrived() && self.active.len() < self.limits.max_batch.max(1))
    }

    fn arrived(&self) -> bool {
        self.pending.front().is_some_and(|&next| self.plans[next].arrival_ms <= self.now_ms)
    }

    fn any_offloaded(&self) -> bool {
        self.active.iter().any(|active| active.offloaded)
    }

    /// Reloads offloaded requests, oldest first, while there is room.
    fn bring_back(&mut self, machine: &mut impl Runtime) -> anyhow::Result<()> {
        while let Some(at) = self.active.iter().position(|active| active.offloaded) {
            let alone = self.active.iter().all(|active| active.offloaded);
            // Room for the next turn of everybody who would then be resident; alone, a request is always brought back.
            let spare = if alone {
                0
            } else {
                let resident = self.active.iter().enumerate().filter(|(i, a)| !a.offloaded || *i == at);
                resident.map(|(_, a)| self.next_pages(a, machine.page_size())).sum()
            };
            let (request, step) = (self.active[at].request, self.counts.steps);
            let reloaded = machine.reload(request, spare)?;
            self.drain(machine);
            match reloaded {
                Some(pages) => {
                    self.active[at].offloaded = false;
                    self.counts.reloads += 1;
                    self.events.push(Event::Reload { step, request: self.plans[request].id.clone(), pages });
                }
                None if alone => anyhow::bail!(
                    "request {} cannot be brought back into an otherwise empty cache (a bug of mstar's)",
                    self.plans[request].id
                ),
                None => break,
            }
        }
        Ok(())
    }

    /// Pages that a request's next turn may take.
    fn next_pages(&self, active: &Active, page_size: usize) -> usize {
        let turn = active.progress.next(&self.plans[active.request], self.limits.chunked_prefill);
        let pages = |turn: Turn| turn.additions.iter().map(|a| a.span.div_ceil(page_size.max(1))).sum();
        turn.map_or(0, pages)
    }

    /// An admitted step, the one planned ahead if it stands; `None` when a refusal left nothing to run.
    fn admitted(&mut self, machine: &mut impl Runtime) -> anyhow::Result<Option<Vec<Work>>> {
        if let Some(step) = self.ahead.take() {
            if machine.promote()? {
                self.drain(machine);
                self.counts.promoted += 1;
                return Ok(Some(step));
            }
            self.counts.replanned += 1;
        }
        let mut step = self.compose(Lead::Waiting);
        while !step.is_empty() {
            let outcome = machine.admit(&step)?;
            self.drain(machine);
            match outcome {
                Outcome::Admitted => return Ok(Some(step)),
                Outcome::NotReady(refusal) | Outcome::Refused(refusal) => {
                    if self.led_past_the_oldest(&step) {
                        // Nobody older makes room for a younger one's class: it waits.
                        step.pop();
                        self.counts.put_off += 1;
                        if step.is_empty() {
                            step = self.compose(Lead::Oldest);
                        }
                    } else {
                        self.make_room(machine, &mut step, refusal)?;
                    }
                }
            }
        }
        Ok(None)
    }

    /// Whether the oldest resident request waits, since another's class leads.
    fn led_past_the_oldest(&self, step: &[Work]) -> bool {
        let oldest = self.active.iter().find(|active| !active.offloaded).map(|active| active.request);
        step.first().is_some_and(|first| Some(first.request) != oldest)
    }

    /// The next turn of every resident request whose turn is of the leader's class. The one that was served least
    /// recently leads, the oldest of several; or simply the oldest.
    fn compose(&self, lead: Lead) -> Vec<Work> {
        let mut step: Vec<Work> = Vec::new();
        let mut whole_tokens = 0usize;
        let resident = self.active.iter().filter(|active| !active.offloaded);
        let turns: Vec<(&Active, Turn)> = resident
            .filter_map(|active| {
                let plan = &self.plans[active.request];
                Some((active, active.progress.next(plan, self.limits.chunked_prefill)?))
            })
            .collect();
        let leader = match lead {
            Lead::Oldest => turns.first(),
            Lead::Waiting => turns.iter().min_by_key(|(active, _)| active.served),
        };
        let Some(leading) = leader.map(|(_, turn)| class(turn.walk)) else { return step };
        for (active, turn) in turns {
            if class(turn.walk) != leading {
                continue;
            }
            if matches!(turn.walk, Walk::Prefill | Walk::Encode) {
                let with = whole_tokens.saturating_add(turn.tokens());
                if whole_tokens > 0 && with > self.limits.chunked_prefill {
                    continue;
                }
                whole_tokens = with;
            }
            step.push(Work { request: active.request, turn });
        }
        step
    }

    /// Takes a refusal in: puts off prefill, offloads, or refuses a request. `step` loses at least one turn, or a
    /// request loses its pages.
    fn make_room(
        &mut self,
        machine: &mut impl Runtime,
        step: &mut Vec<Work>,
        refusal: Refusal,
    ) -> anyhow::Result<()> {
        match &refusal.reason {
            RefusalReason::AllocationFailed { .. } => {}
            RefusalReason::SequenceTooLong { request, .. } => {
                let named = step.iter().position(|work| self.plans[work.request].id == *request);
                let at =
                    named.ok_or_else(|| anyhow::anyhow!("{refusal}, and no such request is in the step"))?;
                let request = step.remove(at).request;
                return self.drop_refused(machine, request, refusal);
            }
            // Whoever has a world goes on, and gives it up at its end.
            RefusalReason::NoWorldFree { request, .. } if step.len() > 1 => {
                let named = step.iter().position(|work| self.plans[work.request].id == *request);
                step.remove(named.unwrap_or(step.len() - 1));
                self.counts.put_off += 1;
                return Ok(());
            }
            reason => anyhow::bail!("a step was refused: {refusal}{}", advice(reason)),
        }
        // The latest cut of a prompt waits, as long as somebody else still has a turn.
        if step.len() > 1
            && let Some(at) = step.iter().rposition(|work| work.turn.walk == Walk::Prefill)
            && at > 0
        {
            step.remove(at);
            self.counts.put_off += 1;
            return Ok(());
        }
        let keep = step[0].request;
        let victim = self
            .active
            .iter()
            .rposition(|a| !a.offloaded && a.request != keep && machine.held_pages(a.request) > 0);
        if let Some(at) = victim {
            let request = self.active[at].request;
            let offloaded = machine.offload(request)?;
            self.drain(machine);
            step.retain(|work| work.request != request);
            let (now, id) = (self.counts.steps, self.plans[request].id.clone());
            if let Some(pages) = offloaded {
                self.active[at].offloaded = true;
                self.counts.offloads += 1;
                self.events.push(Event::Offload { step: now, request: id, pages });
            } else {
                // It enters anew, before everybody who has yet to enter: as the latest it was the last to.
                machine.remove(request, false)?;
                self.drain(machine);
                self.active.remove(at);
                self.pending.push_front(request);
                self.counts.restarts += 1;
                self.events.push(Event::Restart { step: now, request: id });
            }
            return Ok(());
        }
        if step.len() > 1 {
            // Nobody holds a page that could be freed: fewer turns may still fit.
            step.pop();
            return Ok(());
        }
        step.clear();
        self.drop_refused(machine, keep, refusal)
    }

    /// Removes an active request that cannot go on.
    fn drop_refused(
        &mut self,
        machine: &mut impl Runtime,
        request: usize,
        refusal: Refusal,
    ) -> anyhow::Result<()> {
        machine.remove(request, false)?;
        self.drain(machine);
        self.active.retain(|active| active.request != request);
        let mut why = refusal.to_string();
        // The reason counts what the step lacked; what helps is what the request needs.
        if matches!(refusal.reason, RefusalReason::AllocationFailed { .. })
            && let Some([needed, total]) =
                machine.whole_need(&self.plans[request], self.limits.chunked_prefill, &refusal.resource)
        {
            why += &format!(" for this step; to its end it needs {needed} at once, the pool has {total}");
        }
        self.refuse(request, why);
        Ok(())
    }

    fn refuse(&mut self, request: usize, why: String) {
        self.counts.refused += 1;
        let request = self.plans[request].id.clone();
        self.events.push(Event::Refuse { step: self.counts.steps, request, why });
    }

    /// Plans the step after `step` while `step` runs, where nobody waits to enter it.
    fn plan_ahead(&mut self, machine: &mut impl Runtime, step: &[Work]) -> anyhow::Result<()> {
        if !self.limits.preplan || self.any_offloaded() {
            return Ok(());
        }
        let then = self.advanced(step);
        let now = std::mem::replace(&mut self.active, then);
        let next = self.compose(Lead::Waiting);
        self.active = now;
        if !next.is_empty() && machine.preplan(&next)? {
            self.ahead = Some(next);
        }
        self.drain(machine);
        Ok(())
    }

    fn give_up_ahead(&mut self, machine: &mut impl Runtime) -> anyhow::Result<()> {
        if self.ahead.take().is_some() {
            self.counts.replanned += 1;
            machine.clear_preplan()?;
            self.drain(machine);
        }
        Ok(())
    }

    /// The active requests as they will be once `step` has run.
    fn advanced(&self, step: &[Work]) -> Vec<Active> {
        let mut active = self.active.clone();
        for one in &mut active {
            if let Some(work) = step.iter().find(|work| work.request == one.request) {
                one.progress = one.progress.after(&work.turn);
                one.served = self.counts.steps + 1;
            }
        }
        active
    }

    /// Moves the requests of a committed step on, and lets those that are done go.
    fn committed(&mut self, machine: &mut impl Runtime, step: &[Work]) -> anyhow::Result<()> {
        for work in step.iter().filter(|work| work.turn.walk.commits()) {
            let plan = &self.plans[work.request];
            let stored =
                |a: &Addition| Stored { label: work.turn.label(plan, a.stream), tokens: a.start + a.span };
            self.events.push(Event::Commit {
                step: self.counts.steps,
                request: plan.id.clone(),
                walk: work.turn.walk,
                streams: work.turn.additions.iter().map(stored).collect(),
            });
        }
        self.active = self.advanced(step);
        self.counts.steps += 1;
        self.now_ms += self.limits.step_ms;
        self.rewind(machine, step)?;
        let done: Vec<usize> = self
            .active
            .iter()
            .filter(|a| a.progress.next(&self.plans[a.request], self.limits.chunked_prefill).is_none())
            .map(|a| a.request)
            .collect();
        self.active.retain(|active| !done.contains(&active.request));
        for request in done {
            machine.remove(request, true)?;
            self.drain(machine);
            self.counts.finished += 1;
            let request = self.plans[request].id.clone();
            self.events.push(Event::Finish { step: self.counts.steps - 1, request });
        }
        Ok(())
    }

    /// Saves the requests of a committed step that are to be saved, and rewinds those that go back to it.
    fn rewind(&mut self, machine: &mut impl Runtime, step: &[Work]) -> anyhow::Result<()> {
        for work in step.iter().filter(|work| work.turn.walk.commits()) {
            let Some(at) = self.active.iter().position(|active| active.request == work.request) else {
                continue;
            };
            let progress = self.active[at].progress;
            if machine.saves(work.request, &progress) {
                self.give_up_ahead(machine)?;
            }
            if let Some(back) = machine.rewind(work.request, &progress)? {
                self.active[at].progress = back;
            }
            self.drain(machine);
        }
        Ok(())
    }

    fn drain(&mut self, machine: &mut impl Runtime) {
        let step = self.counts.steps;
        self.events.extend(machine.drain_events().into_iter().map(|event| event.at(step)));
    }
}

/// What to do about a refusal that no other request's leaving helps.
fn advice(reason: &RefusalReason) -> String {
    match reason {
        RefusalReason::NoWorldFree { worlds_total, .. } => {
            format!("; raise the ring's num_worlds, or lower workload.max_batch to {worlds_total}")
        }
        RefusalReason::WorldBusy { .. } => "; offer the step again once that has ended".into(),
        _ => String::new(),
    }
}

/// Turns of one class can share a step: a step commits or keeps nothing, and an encoder runs by itself.
fn class(walk: Walk) -> (bool, bool) {
    (walk.commits(), walk == Walk::Encode)
}
