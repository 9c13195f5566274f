//! Several devices as one machine for the scheduler: each is asked the same, and all must answer alike.

use std::fmt::{self, Debug};

use anyhow::{Context, Result};
use mstar_core::{Outcome, Refusal, ResourceName};

use super::line::{Head, Tail};
use crate::run::event::Event;
use crate::run::runtime::Live;
use crate::run::scheduler::{Runtime, Work};
use crate::run::script::Progress;
use crate::run::workload::RequestPlan;

/// Two devices did not do the same steps: an answer of one was not the other's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Parted(pub(super) String);

impl fmt::Display for Parted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the devices did not take the same steps: {}", self.0)
    }
}

impl std::error::Error for Parted {}

/// The models at work, the first device's first.
pub(super) struct Together<'a> {
    /// With the names of their devices.
    lives: Vec<(String, Live<'a>)>,
    head: &'a Head,
    tails: &'a [Tail],
}

impl<'a> Together<'a> {
    /// `lives`, of which the first is shown to `head` and each other one to its tail.
    pub(super) fn new(lives: Vec<(String, Live<'a>)>, head: &'a Head, tails: &'a [Tail]) -> Together<'a> {
        Together { lives, head, tails }
    }

    /// The models.
    pub(super) fn lives(&self) -> impl Iterator<Item = (&str, &Live<'a>)> {
        self.lives.iter().map(|(name, live)| (name.as_str(), live))
    }

    fn first(&self) -> &Live<'a> {
        &self.lives[0].1
    }

    /// Asks everybody, who must answer alike.
    fn all<T: PartialEq + Debug>(
        &mut self,
        what: &str,
        mut ask: impl FnMut(&mut Live<'a>) -> Result<T>,
    ) -> Result<T> {
        let mut asked = self.lives.iter_mut();
        let (first, live) = asked.next().context("no device (a bug of mstar's)")?;
        let answer = ask(live).with_context(|| first.clone())?;
        for (name, live) in asked {
            let other = ask(live).with_context(|| name.clone())?;
            if other != answer {
                return Err(Parted(format!("{what}: {first} says {answer:?}, {name} {other:?}")).into());
            }
        }
        Ok(answer)
    }
}

impl Runtime for Together<'_> {
    fn impossible(&self, plan: &RequestPlan, chunked_prefill: usize) -> Option<Refusal> {
        self.first().impossible(plan, chunked_prefill)
    }

    fn whole_need(
        &self,
        plan: &RequestPlan,
        chunked_prefill: usize,
        cache: &ResourceName,
    ) -> Option<[usize; 2]> {
        self.first().whole_need(plan, chunked_prefill, cache)
    }

    fn ingest(&mut self, request: usize) -> Result<usize> {
        self.all("prompt tokens that are in the prefix index", |live| live.ingest(request))
    }

    fn admit(&mut self, step: &[Work]) -> Result<Outcome> {
        self.all("whether a step is admitted", |live| live.admit(step))
    }

    fn preplan(&mut self, step: &[Work]) -> Result<bool> {
        self.all("whether a step is planned ahead", |live| live.preplan(step))
    }

    fn promote(&mut self) -> Result<bool> {
        self.all("whether a plan made ahead stands", |live| live.promote())
    }

    fn clear_preplan(&mut self) -> Result<()> {
        self.all("giving up a plan made ahead", |live| live.clear_preplan())
    }

    /// Every device on a thread of its own.
    fn run(&mut self, step: &[Work]) -> Result<()> {
        let (head, tails) = (self.head, self.tails);
        let [(first, lead), others @ ..] = self.lives.as_mut_slice() else { return Ok(()) };
        std::thread::scope(|scope| {
            let others: Vec<_> = others
                .iter_mut()
                .zip(tails)
                .map(|((name, live), tail)| scope.spawn(move || follow(name, live, tail, step)))
                .collect();
            let led = {
                let _end = head.step();
                lead.run(step).with_context(|| first.clone())
            };
            let join = |other: std::thread::ScopedJoinHandle<'_, Result<()>>| {
                other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            let followed: Vec<Result<()>> = others.into_iter().map(join).collect();
            // What stopped the first device is what stopped the others.
            led.and_then(|()| followed.into_iter().collect())
        })
    }

    fn offload(&mut self, request: usize) -> Result<Option<usize>> {
        self.all("pages that are offloaded", |live| live.offload(request))
    }

    fn reload(&mut self, request: usize, spare: usize) -> Result<Option<usize>> {
        self.all("pages that are brought back", |live| live.reload(request, spare))
    }

    fn remove(&mut self, request: usize, finished: bool) -> Result<()> {
        self.all("leaving", |live| live.remove(request, finished))
    }

    fn saves(&self, request: usize, progress: &Progress) -> bool {
        self.first().saves(request, progress)
    }

    fn rewind(&mut self, request: usize, progress: &Progress) -> Result<Option<Progress>> {
        self.all("how far a saved world had come", |live| live.rewind(request, progress))
    }

    fn held_pages(&self, request: usize) -> usize {
        self.first().held_pages(request)
    }

    fn page_size(&self) -> usize {
        self.first().page_size()
    }

    fn drain_events(&mut self) -> Vec<Event> {
        // The answers to the scheduler were alike, so that what led to them is told once.
        let mut drained = self.lives.iter_mut().map(|(_, live)| live.drain_events());
        let first = drained.next().unwrap_or_default();
        drained.for_each(drop);
        first
    }
}

/// A step of a device that is not the first.
fn follow(name: &str, live: &mut Live<'_>, tail: &Tail, step: &[Work]) -> Result<()> {
    let rest = tail.step();
    live.run(step).with_context(|| name.to_owned())?;
    match rest.count() {
        0 => Ok(()),
        n => Err(Parted(format!("{name} ended a step {n} layers before the first device")).into()),
    }
}
