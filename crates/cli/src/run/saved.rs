//! Worlds that a run saves and comes back to, and whether what came again had the same bits.

use std::collections::HashMap;

use anyhow::{Context, bail};
use mstar_core::kv::{RingCache, RingKv, WorldSnapshot};
use mstar_core::{Outcome, RequestId};

use super::event::Event;
use super::script::Progress;
use super::workload::RequestPlan;

/// What a request was when its world was saved, and what came of it.
#[derive(Debug)]
struct Saved {
    progress: Progress,
    /// Its digest then.
    digest: u64,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// The world lies on the host.
    Held(WorldSnapshot),
    /// The world is back; its digest at the end, the first time.
    Again(u64),
    /// What came again was compared.
    Done,
}

/// Counts over a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Worlds saved.
    pub(crate) saved: u64,
    /// Frames that came again and were compared.
    pub(crate) replayed: u64,
    /// Requests that differed the second time.
    pub(crate) differ: u64,
    /// The first of them.
    pub(crate) first: Option<String>,
}

/// What a run has saved.
#[derive(Debug, Default)]
pub(crate) struct SavedWorlds {
    saved: HashMap<usize, Saved>,
    counts: Counts,
    events: Vec<Event>,
}

/// Frames that a request has kept.
fn frames(plan: &RequestPlan, progress: &Progress) -> usize {
    plan.frame.map_or(0, |frame| (progress.prompt + progress.output) / frame)
}

impl SavedWorlds {
    /// Counts so far.
    pub(crate) fn counts(&self) -> &Counts {
        &self.counts
    }

    /// What happened since the last call.
    pub(crate) fn drain(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// Whether the world of request `index`, at `progress`, is to be saved now.
    pub(crate) fn due(&self, index: usize, plan: &RequestPlan, progress: &Progress) -> bool {
        plan.snapshot.is_some_and(|snapshot| {
            frames(plan, progress) == snapshot.after && !self.saved.contains_key(&index)
        })
    }

    /// Saves, brings back or compares the world of request `index`, whichever its `progress` calls for. A world that came back
    /// goes on from where it was saved: how far that is, and `digest` with it.
    ///
    /// # Errors
    /// What the ring says; a world that cannot be had.
    pub(crate) fn settle(
        &mut self,
        index: usize,
        plan: &RequestPlan,
        ring: &RingCache,
        progress: &Progress,
        digest: &mut u64,
    ) -> anyhow::Result<Option<Progress>> {
        let Some(snapshot) = plan.snapshot else { return Ok(None) };
        let at = frames(plan, progress);
        if self.due(index, plan, progress) {
            let world =
                ring.snapshot(&plan.id).with_context(|| format!("request {} after {at} frames", plan.id))?;
            let stage = Stage::Held(world);
            self.saved.insert(index, Saved { progress: *progress, digest: *digest, stage });
            self.counts.saved += 1;
            self.events.push(Event::Save { step: 0, request: plan.id.clone(), frames: at });
            return Ok(None);
        }
        if at != snapshot.after.saturating_add(snapshot.frames) {
            return Ok(None);
        }
        let Some(saved) = self.saved.get_mut(&index) else { return Ok(None) };
        match std::mem::replace(&mut saved.stage, Stage::Done) {
            Stage::Held(world) => {
                restore(ring, &plan.id, &world)?;
                saved.stage = Stage::Again(*digest);
                *digest = saved.digest;
                let request = plan.id.clone();
                self.events.push(Event::Restore { step: 0, request, frames: snapshot.after });
                Ok(Some(saved.progress))
            }
            Stage::Again(first) => {
                self.counts.replayed += snapshot.frames as u64;
                if first != *digest {
                    self.counts.differ += 1;
                    self.counts.first.get_or_insert(format!(
                        "request {}: {} frames from frame {} on came out otherwise once its world was restored",
                        plan.id, snapshot.frames, snapshot.after
                    ));
                }
                Ok(None)
            }
            Stage::Done => Ok(None),
        }
    }

    /// Forgets a request.
    pub(crate) fn remove(&mut self, index: usize) {
        self.saved.remove(&index);
    }
}

fn restore(ring: &RingCache, request: &RequestId, world: &WorldSnapshot) -> anyhow::Result<()> {
    match ring.restore(request, world)? {
        Outcome::Admitted => Ok(()),
        Outcome::NotReady(why) | Outcome::Refused(why) => {
            bail!("request {request} holds a world and could not have it back: {why} (a bug of mstar's)")
        }
    }
}
