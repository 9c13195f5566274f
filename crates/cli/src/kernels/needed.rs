//! Which kernels a spec needs: its resources are built on a device on paper, steps are planned there, and what is
//! asked for is noted.

use std::sync::Arc;

use mstar_core::spec::ResourceKind;
use mstar_kernels::Device;
use mstar_kernels::cuda::Context;
use mstar_kernels::cuda::jit::{Key, Target, asked_for, target_of};

use crate::explain::{Prepared, SpecArguments, prepare_on};
use crate::run;
use crate::run::buffers::{Buffers, Widths};
use crate::run::runtime::Live;
use crate::run::scheduler::{Scheduler, Tick};

/// Steps that are planned.
const PLANNED: u64 = 64;

/// Pages that a cache on paper has at most: who owns a page is kept on the host, and a card's pages may be more than that holds.
const PAGES: usize = 1 << 20;

/// The kernels that a prepared spec will run on its device, a line each; none on the CPU.
///
/// # Errors
/// A spec whose resources cannot be built there.
pub(crate) fn needed(arguments: &SpecArguments, prepared: &Prepared) -> anyhow::Result<Vec<String>> {
    if prepared.device == Device::Cpu {
        return Ok(Vec::new());
    }
    let keys = needed_for(arguments, target_of(prepared.device)?)?;
    Ok(keys.iter().map(Key::to_string).collect())
}

/// The kernels that a spec needs on a card of an architecture, by name.
///
/// # Errors
/// A spec that is refused, or whose resources cannot be built.
pub(super) fn needed_for(arguments: &SpecArguments, target: Target) -> anyhow::Result<Vec<Key>> {
    let device = Context::on_paper(target)?;
    let mut prepared = prepare_on(arguments, device)?;
    for resource in &mut prepared.spec.resources {
        if let ResourceKind::Kv(kv) = &mut resource.kind {
            kv.config.max_num_pages = kv.config.max_num_pages.min(PAGES);
            kv.host_pages = kv.host_pages.min(PAGES);
        }
    }
    plan(&prepared)?;
    Ok(asked_for(device))
}

/// Builds the resources, which prepare what their plans may run, and plans the first steps of the workload, should there be more.
fn plan(prepared: &Prepared) -> anyhow::Result<()> {
    let phases = Arc::default();
    let model = run::model(prepared, &phases)?;
    let Some(widths) = Widths::of(&prepared.spec, &prepared.requests) else { return Ok(()) };
    // Nothing is run, so that a token's room does.
    let buffers = Buffers::new(Widths { tokens: 1, ..widths }, model.queue.stream())?;
    let live = Live::new(&model, &prepared.requests, buffers, prepared.spec.seed, 0.0, phases);
    let (mut live, limits) = (live.planning_only(), run::limits(prepared, &model)?);
    let mut scheduler = Scheduler::new(&prepared.requests, limits);
    let planned = if model.kv.ring().is_some() { 1 } else { PLANNED };
    while scheduler.counts().steps < run::most_steps(prepared, Some(planned)) {
        if scheduler.tick(&mut live)? == Tick::Done {
            break;
        }
    }
    Ok(())
}
