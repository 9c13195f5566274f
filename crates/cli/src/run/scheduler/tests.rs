//! The scheduler against a simulated machine that counts pages and checks every turn.

use std::collections::BTreeMap;

use mstar_core::{Label, Outcome, Refusal, RefusalReason, ResourceName};

use super::*;
use crate::run::content::{Run, Source, mix};
use crate::run::workload::Generation;

/// A page pool by arithmetic: no prefix index, no copies.
struct Simulated<'a> {
    plans: &'a [RequestPlan],
    pages: usize,
    page_size: usize,
    host_pages: usize,
    /// Tokens of each stream of each resident request.
    held: BTreeMap<usize, Vec<usize>>,
    host: BTreeMap<usize, Vec<usize>>,
    admitted: Option<Vec<Work>>,
    ahead: Option<Vec<Work>>,
    ran: BTreeMap<usize, usize>,
    finished: Vec<usize>,
    stale_every: usize,
    promotions: usize,
    /// Worlds of a ring, each the first requests' that pass in it; `None` over pages.
    worlds: Option<usize>,
    owners: Vec<usize>,
}

impl<'a> Simulated<'a> {
    fn new(plans: &'a [RequestPlan], pages: usize, page_size: usize) -> Simulated<'a> {
        Simulated {
            plans,
            pages,
            page_size,
            host_pages: usize::MAX,
            held: BTreeMap::new(),
            host: BTreeMap::new(),
            admitted: None,
            ahead: None,
            ran: BTreeMap::new(),
            finished: Vec::new(),
            stale_every: 0,
            promotions: 0,
            worlds: None,
            owners: Vec::new(),
        }
    }

    fn used(held: &BTreeMap<usize, Vec<usize>>, page_size: usize) -> usize {
        held.values().flatten().map(|len| len.div_ceil(page_size)).sum()
    }

    fn after(&self, base: &BTreeMap<usize, Vec<usize>>, step: &[Work]) -> BTreeMap<usize, Vec<usize>> {
        let mut held = base.clone();
        for work in step {
            let streams = held.get_mut(&work.request).expect("a turn of a resident request");
            for a in &work.turn.additions {
                let at = place(work, a.stream, streams.len());
                assert_eq!(streams[at], a.start, "turns follow one another");
                streams[at] += a.span;
            }
            if work.turn.forks {
                let main = streams[0];
                let forks = 1..streams.len() - 1;
                streams[forks].fill(main);
            }
        }
        held
    }

    fn short(&self, held: &BTreeMap<usize, Vec<usize>>, step: &[Work]) -> Option<Refusal> {
        let needed = Self::used(held, self.page_size);
        (needed > self.pages).then(|| Refusal {
            resource: ResourceName::new("kv"),
            reason: RefusalReason::AllocationFailed {
                pages_short: needed - self.pages,
                pages_needed: needed,
                request: self.plans[step[0].request].id.clone(),
                label: Label::main(),
            },
        })
    }
}

impl Runtime for Simulated<'_> {
    fn impossible(&self, _: &RequestPlan, _: usize) -> Option<Refusal> {
        None
    }

    fn whole_need(&self, plan: &RequestPlan, _: usize, _: &ResourceName) -> Option<[usize; 2]> {
        Some([plan.final_len().div_ceil(self.page_size), self.pages])
    }

    fn ingest(&mut self, request: usize) -> anyhow::Result<usize> {
        assert!(self.ahead.is_none(), "nobody enters while a plan made ahead is outstanding");
        self.held.insert(request, vec![0; 2 + self.plans[request].forks.len()]);
        self.ran.remove(&request);
        Ok(0)
    }

    fn admit(&mut self, step: &[Work]) -> anyhow::Result<Outcome> {
        assert!(self.admitted.is_none() && !step.is_empty());
        let commits = step[0].turn.walk.commits();
        assert!(step.iter().all(|work| work.turn.walk.commits() == commits), "one step, one fate");
        if let Some(refusal) = self.short(&self.after(&self.held, step), step) {
            return Ok(Outcome::Refused(refusal));
        }
        if let Some(worlds) = self.worlds {
            let new = step.iter().map(|work| work.request).filter(|request| !self.owners.contains(request));
            let new: Vec<usize> = new.collect();
            let free = worlds - self.owners.len();
            if let Some(&first) = new.get(free) {
                let request = self.plans[first].id.clone();
                let (worlds_short, worlds_needed) = (new.len() - free, new.len());
                let reason =
                    RefusalReason::NoWorldFree { request, worlds_short, worlds_needed, worlds_total: worlds };
                return Ok(Outcome::Refused(Refusal { resource: ResourceName::new("ring"), reason }));
            }
            self.owners.extend(new);
        }
        self.admitted = Some(step.to_vec());
        Ok(Outcome::Admitted)
    }

    fn preplan(&mut self, step: &[Work]) -> anyhow::Result<bool> {
        let mut base = self.held.clone();
        commit(&mut base, self.admitted.as_deref().expect("a step to run first"));
        let fits = self.short(&self.after(&base, step), step).is_none();
        self.ahead = fits.then(|| step.to_vec());
        Ok(fits)
    }

    fn promote(&mut self) -> anyhow::Result<bool> {
        self.promotions += 1;
        let step = self.ahead.take().expect("a step planned ahead");
        if self.stale_every > 0 && self.promotions.is_multiple_of(self.stale_every) {
            return Ok(false);
        }
        self.after(&self.held, &step);
        self.admitted = Some(step);
        Ok(true)
    }

    fn clear_preplan(&mut self) -> anyhow::Result<()> {
        self.ahead = None;
        Ok(())
    }

    fn run(&mut self, step: &[Work]) -> anyhow::Result<()> {
        assert_eq!(self.admitted.take().as_deref(), Some(step));
        commit(&mut self.held, step);
        for work in step {
            *self.ran.entry(work.request).or_default() += work.turn.tokens();
        }
        assert!(Self::used(&self.held, self.page_size) <= self.pages);
        Ok(())
    }

    fn offload(&mut self, request: usize) -> anyhow::Result<Option<usize>> {
        assert!(self.ahead.is_none() && self.admitted.is_none(), "no step may hold the pages");
        let pages = self.held_pages(request);
        if Self::used(&self.host, self.page_size) + pages > self.host_pages {
            return Ok(None);
        }
        let streams = self.held.remove(&request).expect("a resident request");
        self.host.insert(request, streams);
        Ok(Some(pages))
    }

    fn reload(&mut self, request: usize, spare: usize) -> anyhow::Result<Option<usize>> {
        let streams = self.host.get(&request).expect("an offloaded request").clone();
        let pages = streams.iter().map(|len| len.div_ceil(self.page_size)).sum::<usize>();
        if Self::used(&self.held, self.page_size) + pages + spare > self.pages {
            return Ok(None);
        }
        self.host.remove(&request);
        self.held.insert(request, streams);
        Ok(Some(pages))
    }

    fn remove(&mut self, request: usize, finished: bool) -> anyhow::Result<()> {
        self.owners.retain(|owner| *owner != request);
        self.held.remove(&request).expect("a resident request");
        if finished {
            self.finished.push(request);
        }
        Ok(())
    }

    fn held_pages(&self, request: usize) -> usize {
        self.held[&request].iter().map(|len| len.div_ceil(self.page_size)).sum()
    }

    fn page_size(&self) -> usize {
        self.page_size
    }

    fn drain_events(&mut self) -> Vec<Event> {
        Vec::new()
    }
}

/// Where a stream's length is held: `main`, the forks, and last the context.
fn place(work: &Work, stream: usize, held: usize) -> usize {
    if work.turn.walk == Walk::Encode { held - 1 } else { stream }
}

/// Lengths as a commit leaves them; forks start as copies of `main`.
fn commit(held: &mut BTreeMap<usize, Vec<usize>>, step: &[Work]) {
    for work in step.iter().filter(|work| work.turn.walk.commits()) {
        let streams = held.get_mut(&work.request).expect("resident");
        for a in &work.turn.additions {
            let at = place(work, a.stream, streams.len());
            streams[at] += a.span;
        }
        if work.turn.forks {
            let main = streams[0];
            let forks = 1..streams.len() - 1;
            streams[forks].fill(main);
        }
    }
}

fn plan(ordinal: u64, arrival_ms: f64, prompt: usize, output: usize) -> RequestPlan {
    RequestPlan::new(ordinal, arrival_ms, vec![Run { source: Source::Prompt(ordinal), len: prompt }], output)
}

fn limits(max_batch: usize, chunked_prefill: usize) -> Limits {
    Limits { max_batch, chunked_prefill, step_ms: 1.0, preplan: false }
}

fn drive(scheduler: &mut Scheduler<'_>, machine: &mut Simulated<'_>) -> Vec<Vec<Work>> {
    let mut steps = Vec::new();
    while let Tick::Ran(step) = scheduler.tick(machine).unwrap() {
        steps.push(step);
        assert!(steps.len() < 100_000, "no end");
    }
    assert!(machine.held.is_empty() && machine.host.is_empty(), "everybody left");
    steps
}

#[test]
fn decode_rows_ride_along_with_one_chunk_of_prefill() {
    let plans = [plan(0, 0.0, 4, 4), plan(1, 0.0, 10, 2)];
    let mut machine = Simulated::new(&plans, 100, 4);
    let steps = drive(&mut Scheduler::new(&plans, limits(8, 4)), &mut machine);
    let shape: Vec<Vec<(usize, usize)>> =
        steps.iter().map(|s| s.iter().map(|w| (w.request, w.turn.tokens())).collect()).collect();
    assert_eq!(
        shape,
        [
            vec![(0, 4)], // a second cut would pass the chunk
            vec![(0, 1), (1, 4)],
            vec![(0, 1), (1, 4)],
            vec![(0, 1), (1, 2)],
            vec![(1, 1)],
        ]
    );
}

#[test]
fn arrivals_follow_the_virtual_clock() {
    let plans = [plan(0, 0.0, 1, 3), plan(1, 2.0, 1, 1), plan(2, 500.0, 1, 1)];
    let mut machine = Simulated::new(&plans, 100, 4);
    let mut scheduler = Scheduler::new(&plans, limits(8, 4));
    let steps = drive(&mut scheduler, &mut machine);
    let who: Vec<Vec<usize>> = steps.iter().map(|s| s.iter().map(|w| w.request).collect()).collect();
    assert_eq!(who, [vec![0], vec![0], vec![0, 1], vec![2]]);
    assert_eq!(scheduler.now_ms(), 501.0);
    assert_eq!(scheduler.counts().finished, 3);
}

#[test]
fn max_batch_holds() {
    let plans: Vec<_> = (0..9).map(|i| plan(i, 0.0, 3, 3)).collect();
    let mut machine = Simulated::new(&plans, 1000, 4);
    let mut scheduler = Scheduler::new(&plans, limits(2, 64));
    let steps = drive(&mut scheduler, &mut machine);
    assert!(steps.iter().all(|step| step.len() <= 2));
    assert_eq!((scheduler.counts().peak_active, scheduler.counts().finished), (2, 9));
}

#[test]
fn when_pages_run_out_the_latest_request_goes_and_comes_back() {
    let plans = [plan(0, 0.0, 8, 9), plan(1, 0.0, 8, 9), plan(2, 0.0, 8, 9)];
    let mut machine = Simulated::new(&plans, 8, 4);
    let mut scheduler = Scheduler::new(&plans, limits(8, 64));
    drive(&mut scheduler, &mut machine);
    let offloaded: Vec<_> = scheduler
        .events()
        .iter()
        .filter_map(|event| match event {
            Event::Offload { request, .. } => Some(request.as_str().to_owned()),
            _ => None,
        })
        .collect();
    assert_eq!(offloaded.first().map(String::as_str), Some("r2"), "{offloaded:?}");
    assert!(!offloaded.contains(&"r0".to_owned()), "the oldest never goes");
    assert_eq!(machine.ran.values().copied().collect::<Vec<_>>(), [16, 16, 16]);
    let counts = scheduler.counts();
    assert_eq!((counts.finished, counts.refused), (3, 0));
    assert!(counts.offloads > 0 && counts.offloads == counts.reloads, "{counts:?}");
}

#[test]
fn where_the_host_is_full_the_latest_request_begins_anew() {
    let plans = [plan(0, 0.0, 8, 9), plan(1, 0.0, 8, 9), plan(2, 0.0, 8, 9), plan(3, 0.0, 8, 9)];
    let mut machine = Simulated { host_pages: 3, ..Simulated::new(&plans, 8, 4) };
    let mut scheduler = Scheduler::new(&plans, limits(8, 64));
    drive(&mut scheduler, &mut machine);
    let counts = scheduler.counts();
    assert!(counts.restarts > 0, "{counts:?}");
    assert_eq!((counts.finished, counts.refused), (4, 0));
    assert_eq!(machine.ran.values().copied().collect::<Vec<_>>(), [16; 4], "every run to the end is whole");
}

#[test]
fn what_can_never_fit_is_refused_with_its_shortage_and_others_finish() {
    let plans = [plan(0, 0.0, 8, 2), plan(1, 0.0, 100, 2), plan(2, 0.0, 8, 2)];
    let mut machine = Simulated::new(&plans, 10, 4);
    let mut scheduler = Scheduler::new(&plans, limits(8, 64));
    drive(&mut scheduler, &mut machine);
    assert_eq!(scheduler.counts().finished, 2);
    let refused: Vec<_> = scheduler
        .events()
        .iter()
        .filter_map(|event| match event {
            Event::Refuse { request, why, .. } => Some((request.as_str().to_owned(), why.clone())),
            _ => None,
        })
        .collect();
    assert_eq!(refused.len(), 1);
    assert_eq!(refused[0].0, "r1");
    // 64 tokens fit into 16 pages, 6 more than there are.
    assert!(refused[0].1.contains("6 pages short"), "{}", refused[0].1);
    // Its 101 tokens to the end take 26.
    assert!(refused[0].1.ends_with("to its end it needs 26 at once, the pool has 10"), "{}", refused[0].1);
}

#[test]
fn contexts_are_written_first_so_that_requests_decode_together() {
    let mut plans = [plan(0, 0.0, 2, 4), plan(1, 0.0, 2, 4), plan(2, 0.0, 2, 4)];
    plans.iter_mut().for_each(|plan| plan.context_len = 10);
    let mut machine = Simulated::new(&plans, 1000, 4);
    let steps = drive(&mut Scheduler::new(&plans, limits(8, 16)), &mut machine);
    let rows: Vec<(&str, usize)> = steps.iter().map(|s| (s[0].turn.walk.name(), s.len())).collect();
    // Two contexts pass 16 tokens, so each is encoded in a step of its own.
    assert_eq!(rows[..4], [("encode", 1), ("encode", 1), ("encode", 1), ("prefill", 3)]);
    assert_eq!(rows[4..], [("decode", 3); 3]);
}

#[test]
fn classes_take_turns_so_that_nobody_starves() {
    let mut plans = [plan(0, 0.0, 4, 3), plan(1, 2.0, 12, 2)];
    plans[0].generation = Generation::Denoise { passes: 30, tokens: 2 };
    let mut machine = Simulated::new(&plans, 1000, 4);
    let steps = drive(&mut Scheduler::new(&plans, limits(8, 4)), &mut machine);
    let last = steps.iter().rposition(|step| step.iter().any(|work| work.request == 1)).unwrap();
    // Three cuts and one token, each after a pass of the other at most, from step 2 on.
    assert!(last <= 2 + 2 * 4, "request r1 was done after step {last}");
}

#[test]
fn a_context_waits_for_pages_and_nobody_leaves_for_it() {
    let mut plans = [plan(0, 0.0, 8, 6), plan(1, 2.0, 4, 2)];
    plans[1].context_len = 20;
    let mut machine = Simulated::new(&plans, 7, 4);
    let mut scheduler = Scheduler::new(&plans, limits(8, 64));
    drive(&mut scheduler, &mut machine);
    let counts = scheduler.counts();
    assert_eq!((counts.finished, counts.offloads, counts.restarts), (2, 0, 0), "{counts:?}");
    assert!(counts.put_off > 0);
}

#[test]
fn preplanning_changes_no_step() {
    let plans: Vec<_> = (0..7).map(|i| plan(i, i as f64 * 3.0, 5 + 3 * i as usize, 6)).collect();
    let run = |preplan, stale_every| {
        let mut machine = Simulated { stale_every, ..Simulated::new(&plans, 1000, 4) };
        let mut scheduler = Scheduler::new(&plans, Limits { preplan, ..limits(3, 8) });
        let steps = drive(&mut scheduler, &mut machine);
        (steps, scheduler.counts())
    };
    let (plain, _) = run(false, 0);
    let (ahead, counts) = run(true, 0);
    assert_eq!(plain, ahead);
    assert!(counts.promoted > counts.steps / 2, "{counts:?}");
    let (stale, counts) = run(true, 3);
    assert_eq!(plain, stale);
    assert!(counts.replanned > 0 && counts.promoted > 0);
}

#[test]
fn random_workloads_end_with_every_token_run_once() {
    for seed in 0..300u64 {
        let draw = |what: u64, below: u64| mix(mix(seed, 77), what) % below;
        let count = 1 + draw(0, 9);
        let plans: Vec<RequestPlan> = (0..count)
            .map(|i| {
                let d = |what: u64, below: u64| draw(1000 + 10 * i + what, below);
                let mut one = plan(i, d(0, 20) as f64, 1 + d(1, 40) as usize, d(2, 12) as usize);
                match draw(5, 4) {
                    0 => {
                        one.forks = vec![Label::new("cond"), Label::new("uncond")];
                        one.generation = Generation::Denoise { passes: 2, tokens: 5 };
                    }
                    1 => one.generation = Generation::Tree { branching: vec![2, 2] },
                    2 => one.context_len = 1 + d(3, 30) as usize,
                    _ => {}
                }
                one
            })
            .collect();
        let mut plans = plans;
        plans.sort_by(|a, b| a.arrival_ms.total_cmp(&b.arrival_ms));
        let page_size = 1 + draw(1, 6) as usize;
        let mut machine = Simulated::new(&plans, 4 + draw(2, 40) as usize, page_size);
        let limits =
            Limits { preplan: draw(4, 2) == 1, ..limits(1 + draw(3, 6) as usize, 1 + draw(6, 16) as usize) };
        let mut scheduler = Scheduler::new(&plans, limits);
        drive(&mut scheduler, &mut machine);
        let counts = scheduler.counts();
        assert_eq!(counts.finished + counts.refused, plans.len(), "seed {seed}");
        for &request in &machine.finished {
            let plan = &plans[request];
            let mut expected = 0;
            let mut progress = Progress::default();
            while let Some(turn) = progress.next(plan, limits.chunked_prefill) {
                expected += turn.tokens();
                progress = progress.after(&turn);
            }
            assert_eq!(machine.ran[&request], expected, "seed {seed}, request {request}");
        }
    }
}

#[test]
fn f34_requests_without_a_world_wait_until_another_has_left() {
    let mut plans = [plan(0, 0.0, 4, 3), plan(1, 0.0, 4, 2), plan(2, 0.0, 4, 2), plan(3, 1.0, 4, 1)];
    for plan in &mut plans {
        plan.generation = Generation::Denoise { passes: 2, tokens: 4 };
    }
    for worlds in 1..4 {
        let mut machine = Simulated::new(&plans, 1000, 4);
        machine.worlds = Some(worlds);
        let mut scheduler = Scheduler::new(&plans, limits(4, 4));
        drive(&mut scheduler, &mut machine);
        assert_eq!((scheduler.counts().finished, scheduler.counts().refused), (4, 0), "{worlds} worlds");
        assert!(scheduler.counts().put_off > 0, "{worlds} worlds");
    }
}

#[test]
fn a_world_that_nobody_gives_up_is_an_error_that_says_what_to_do() {
    let plans = [plan(0, 0.0, 4, 1)];
    let mut machine = Simulated::new(&plans, 1000, 4);
    machine.worlds = Some(0);
    let said = Scheduler::new(&plans, limits(1, 4)).tick(&mut machine).unwrap_err().to_string();
    assert!(said.contains("1 worlds short") && said.contains("raise the ring's num_worlds"), "{said}");
    let busy = advice(&RefusalReason::WorldBusy { request: plans[0].id.clone() });
    assert!(busy.contains("again"), "{busy}");
}
