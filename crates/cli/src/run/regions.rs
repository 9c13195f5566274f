//! A layer's attention, from its captured region where the step has one, and how often that was so.
//!
//! A region is one attention of one layer of one plan label, under its step's lease: `run` looks at what each of them wrote.

use std::collections::BTreeMap;
use std::time::Instant;

use mstar_core::Forward;
use mstar_core::graph::{Captured, Lease, Ran, Region};
use serde::Serialize;

use super::buffers::{Buffers, Views};
use super::phases::Phases;
use super::room::Room;

/// What a room attends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reads {
    /// The requests' own streams, the step's entries among them; `write` says whether the room sees to it that they are in the cache.
    Own {
        /// Whether it does.
        write: bool,
    },
    /// A context that was written before.
    Context,
}

/// One attention of one layer.
pub(crate) struct Call<'a> {
    /// Who attends.
    pub(crate) room: &'a Room,
    /// What.
    pub(crate) reads: Reads,
    /// The step's hold on a bucket, where it has one.
    pub(crate) lease: Option<&'a Lease>,
    /// The step's walk, for reports.
    pub(crate) walk: &'static str,
    /// Its number among the attentions of a forward.
    pub(crate) part: usize,
    /// Query tokens, padding among them.
    pub(crate) tokens: usize,
}

/// How the calls of one node in one walk were made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Calls {
    /// From a captured region.
    pub(crate) replayed: u64,
    /// Of those, after the region was taken down.
    pub(crate) captured: u64,
    /// Call by call.
    pub(crate) eager: u64,
    /// Of those, in a bucket's buffers: every one of a padded step on the CPU, which has no graphs.
    pub(crate) padded: u64,
}

/// The captured regions of a run, and what was made of them.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    graphs: Captured,
    calls: BTreeMap<(String, &'static str), Calls>,
}

impl Regions {
    /// What a device captured.
    pub(crate) fn graphs(&self) -> &Captured {
        &self.graphs
    }

    /// How calls were made, by the node that made them and the step's walk.
    pub(crate) fn calls(&self) -> &BTreeMap<(String, &'static str), Calls> {
        &self.calls
    }

    /// Attends the forward's layer: on a device a padded step's from its region, which is captured first.
    ///
    /// # Errors
    /// As the room says.
    #[allow(unsafe_code, reason = "a graph holds addresses, not borrows")]
    pub(crate) fn attend(
        &mut self,
        call: &Call<'_>,
        forward: &mut Forward<'_>,
        buffers: &mut Buffers,
        phases: &Phases,
    ) -> mstar_core::Result<()> {
        let Call { room, lease, .. } = *call;
        let mut ran = Ran::Eagerly;
        if let (Some(lease), Some(key)) = (lease, room.capture_key(forward.plan_id())) {
            let (stream, started) = (*forward.stream(), Instant::now());
            let region = Region::new(lease, forward.label(), call.part);
            let views = buffers.views(call.tokens)?;
            let written = matches!(call.reads, Reads::Own { .. }) && room.write_fresh(forward, &views)?;
            let reads = if written { Reads::Context } else { call.reads };
            let record =
                |forward: &mut Forward<'_>| forward.unobserved(|forward| made(room, reads, forward, views));
            // SAFETY: the region reads and writes the run's buffers, caches, plans and workspaces on the model's one stream. They
            // outlive the graphs, and `key` tells where those that may move lie.
            ran = unsafe {
                self.graphs.run(&stream, region, key, forward, record, |forward| room.replaying(forward))?
            };
            if ran != Ran::Eagerly {
                stream.synchronize()?;
                let work = room.work(forward.plan_id(), forward.layer());
                phases.add("replay", room.name.as_str(), started.elapsed(), work);
            }
        }
        let calls = self.calls.entry((room.name.as_str().to_owned(), call.walk)).or_default();
        match ran {
            Ran::Eagerly => {
                calls.eager += 1;
                calls.padded += u64::from(lease.is_some());
                made(room, call.reads, forward, buffers.views(call.tokens)?)?;
            }
            Ran::Captured => (calls.captured, calls.replayed) = (calls.captured + 1, calls.replayed + 1),
            Ran::Replayed => calls.replayed += 1,
        }
        Ok(())
    }
}

/// The call itself.
fn made(room: &Room, reads: Reads, forward: &mut Forward<'_>, views: Views<'_>) -> mstar_core::Result<()> {
    match reads {
        Reads::Own { write } => room.attend(forward, views, write),
        Reads::Context => room.attend_context(forward, views),
    }
}

#[cfg(all(test, feature = "emulator", feature = "mla", feature = "dsa"))]
mod tests;
