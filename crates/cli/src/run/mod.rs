//! `mstar run`: a spec's workload through its attention resources, and what that cost.
//!
//! | room | what is in it |
//! | --- | --- |
//! | [`workload`] | requests: drawn, or read from a trace |
//! | [`content`], [`script`] | what each token is; what a request does next |
//! | [`scheduler`], [`need`], [`event`] | continuous batching over a virtual clock; what one request needs to its end; what happened |
//! | [`mod@model`], [`warm`], [`declare`], [`runtime`] | the engine of a spec; its buckets tried; steps for it; the scheduler's hands |
//! | [`cache`], [`room`] | the requests' pages or ring; an attention resource, alone or under an indexer |
//! | [`saved`] | worlds of a ring that are saved and come back |
//! | [`entries`], [`buffers`], [`forward`] | synthetic queries and cache entries; one forward, layer after layer |
//! | [`shown`], [`verify`], [`digest`], [`replay`] | a layer's outputs as others see them; rows against the oracle; outputs as a hash; hits against the log |
//! | [`phases`], [`memory`], [`limit`], [`report`], [`files`], [`paths`], [`plot`] | costs, and how they are told |

mod args;
pub(crate) mod buffers;
mod cache;
mod content;
mod declare;
mod digest;
pub(crate) mod entries;
pub(crate) mod event;
mod files;
mod format;
mod forward;
pub(crate) mod limit;
mod memory;
mod model;
mod need;
mod paths;
pub(crate) mod phases;
mod plot;
mod regions;
mod replay;
mod report;
mod room;
pub(crate) mod runtime;
mod saved;
pub(crate) mod scheduler;
pub(crate) mod script;
pub(crate) mod shapes;
pub(crate) mod shown;
mod twin;
pub(crate) mod verify;
mod warm;
pub(crate) mod workload;

#[cfg(test)]
mod tests;

use std::io::IsTerminal;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, bail};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use mstar_core::attend::SparseWork;
use mstar_core::kv::RingKv;
use mstar_kernels::Device;
use mstar_kernels::buffer::{peak_allocated_bytes_on, peak_pinned_bytes};

pub(crate) use self::args::Arguments;

use self::buffers::{Buffers, Widths};
use self::event::Event;
use self::files::{Files, StepLine};
use self::limit::Roof;
use self::memory::Memory;
use self::model::Model;
pub(crate) use self::model::kernels_missing;
use self::phases::Phases;
use self::report::Report;
use self::runtime::Live;
use self::scheduler::{Counts, Limits, Scheduler, Tick};
use crate::backends::loaded_kernels;
use crate::exit::Exit;
use crate::explain::{Place, Prepared, prepare};
use crate::interrupt::Interrupt;
use crate::kernels;
use crate::text::{bytes, print, say};

/// Runs the subcommand.
pub(crate) fn command(args: Arguments) -> anyhow::Result<Exit> {
    if !(0.0..=1.0).contains(&args.verify) {
        bail!("--verify: {} is no share of rows; give a number from 0 to 1", args.verify);
    }
    let threads = args.threads.map_or(0, usize::from); // 0: as many as there are processors
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    let pool = pool.context("cannot start the worker threads")?;
    pool.install(|| run(&args))
}

fn run(args: &Arguments) -> anyhow::Result<Exit> {
    let prepared = prepare(&args.spec)?;
    prepared.refuse()?;
    paths::distinct(args, prepared.trace.as_ref())?;
    kernels::tell(args.quiet);
    // Opened before the work, so that a path that cannot be written is not found out after it.
    let mut files = Files::open(args)?;
    let interrupt = Interrupt::install().context("cannot take SIGINT and SIGTERM")?;
    if !args.quiet {
        if let Some(note) = &prepared.note {
            say(note);
        }
        if let Some(trace) = &prepared.trace {
            let (path, by) = (trace.path.display(), trace.named_by(&args.spec.set));
            say(format_args!("trace: {path} (named by {by}, found {})", trace.found));
        }
        let estimate = &prepared.estimate;
        say(format_args!(
            "memory: {} from the start, {} at most",
            foreseen(estimate.total()),
            foreseen(estimate.most())
        ));
    }
    let report = drive(args, &prepared, &mut files, &interrupt)?;
    // The run is over: whatever of the table and the files cannot be written, the others are.
    let printed = if args.quiet { Ok(()) } else { print(&report.table()) };
    let finished = files.finish(&report);
    if !report.passed() {
        let replay = report.ring.as_ref().and_then(|ring| ring.first_difference.as_deref());
        let known = report.verify.first_failure.as_deref().or(replay);
        say(format_args!("a check failed: {}", known.unwrap_or("the prefix index disagrees with its log")));
    }
    finished?;
    printed.context("the table: cannot write to stdout")?;
    Ok(match interrupt.code().filter(|_| report.interrupted) {
        _ if !report.passed() => Exit::CheckFailed,
        Some(code) => Exit::Interrupted(code),
        None => Exit::Success,
    })
}

fn foreseen(total: u128) -> String {
    bytes(total)
}

/// Builds the model, runs the workload and reports.
fn drive(
    args: &Arguments,
    prepared: &Prepared,
    files: &mut Files,
    interrupt: &Interrupt,
) -> anyhow::Result<Report> {
    let spec = &prepared.spec;
    let roof = Roof::measure(prepared.machine.isa, spec.dtype);
    let phases = Arc::new(Phases::default());
    let (model, buffers) = build(prepared, &phases)?;
    let mut live = Live::new(&model, &prepared.requests, buffers, spec.seed, args.verify, phases.clone());
    let mut scheduler = Scheduler::new(&prepared.requests, limits(prepared, &model)?);
    let most_steps = most_steps(prepared, args.steps);
    let bar = progress(args.quiet, prepared.requests.len());
    let prepared_kernels = loaded_kernels();
    let started = Instant::now();
    let mut computed = 0u64;
    let mut ended = false;
    while !ended && scheduler.counts().steps < most_steps && interrupt.code().is_none() {
        let (before, clock) = (StepLine::phases(&phases), Instant::now());
        match scheduler.tick(&mut live)? {
            Tick::Done => ended = true,
            Tick::Ran(_) => {
                let cost = live.last();
                computed += cost.tokens as u64;
                let line = StepLine::new(&scheduler, cost, clock.elapsed(), before, &phases);
                files.step(&line);
                bar.set_position((scheduler.counts().finished + scheduler.counts().refused) as u64);
                bar.set_message(format!("step {}, {} active", scheduler.counts().steps, scheduler.active()));
            }
        }
    }
    bar.finish_and_clear();
    let elapsed_s = started.elapsed().as_secs_f64();
    let stopped_early = !ended && scheduler.unfinished() > 0;
    // A signal that came while the last request finished has interrupted nothing.
    let interrupted = stopped_early && interrupt.code().is_some();
    let late_kernels = (loaded_kernels() - prepared_kernels) as u64;
    let memory = live.memory();
    let measured = Measured { elapsed_s, computed, stopped_early, interrupted, roof, memory, late_kernels };
    Ok(tell(args, prepared, &model, &live, &scheduler, &phases, &measured))
}

/// The resources of a spec, on its device.
pub(crate) fn model(prepared: &Prepared, phases: &Arc<Phases>) -> anyhow::Result<Model> {
    let Prepared { spec, device, attentions, sparse, requests, .. } = prepared;
    let largest = buffers::largest_step(spec, requests);
    Model::build(spec, *device, attentions, sparse, largest, phases)
}

/// The model of a spec and the memory of its forwards, every bucket tried.
pub(crate) fn build(prepared: &Prepared, phases: &Arc<Phases>) -> anyhow::Result<(Model, Buffers)> {
    let model = model(prepared, phases)?;
    let widths = Widths::of(&prepared.spec, &prepared.requests)
        .context("run needs a cache of heads or latents, or a ring")?;
    let mut buffers = Buffers::new(widths, model.queue.stream())?;
    warm::up(&model, &mut buffers)?;
    phases.clear();
    Ok((model, buffers))
}

/// What the scheduler keeps to.
pub(crate) fn limits(prepared: &Prepared, model: &Model) -> anyhow::Result<Limits> {
    let workload = prepared.spec.workload.as_ref().context("the spec has no workload")?;
    // Who has no world waits for one: it enters when another request has left.
    let worlds = model.kv.ring().map_or(usize::MAX, |ring| ring.config().num_worlds);
    Ok(Limits {
        max_batch: workload.max_batch.min(worlds),
        chunked_prefill: workload.chunked_prefill,
        step_ms: workload.step_ms,
        preplan: workload.preplan,
    })
}

/// Steps to stop after: the fewer of those asked for and the spec's.
pub(crate) fn most_steps(prepared: &Prepared, asked: Option<u64>) -> u64 {
    let own = prepared.spec.workload.as_ref().and_then(|workload| workload.max_steps);
    [asked, own].into_iter().flatten().min().unwrap_or(u64::MAX)
}

/// A bar on stderr, where that is a terminal.
pub(crate) fn progress(quiet: bool, requests: usize) -> ProgressBar {
    if quiet || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(Some(requests as u64), ProgressDrawTarget::stderr_with_hz(8));
    let style = ProgressStyle::with_template("{bar:32} {pos}/{len} requests  {msg}  {elapsed}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}

/// What was measured around the loop.
struct Measured {
    elapsed_s: f64,
    computed: u64,
    stopped_early: bool,
    interrupted: bool,
    roof: Roof,
    memory: Memory,
    late_kernels: u64,
}

fn tell(
    args: &Arguments,
    prepared: &Prepared,
    model: &Model,
    live: &Live<'_>,
    scheduler: &Scheduler<'_>,
    phases: &Phases,
    measured: &Measured,
) -> Report {
    let spec = &prepared.spec;
    let Counts {
        steps, promoted, replanned, finished, refused, offloads, reloads, restarts, put_off, ..
    } = scheduler.counts();
    let Measured { elapsed_s, computed, stopped_early, interrupted, roof, memory, .. } = *measured;
    let events = scheduler.events().to_vec();
    let prompt = events.iter().map(|event| match event {
        Event::Admit { prompt_tokens, .. } => *prompt_tokens,
        _ => 0,
    });
    let refusals = events.iter().filter_map(|event| match event {
        Event::Refuse { request, why, .. } => {
            Some(report::Refused { request: request.to_string(), why: why.clone() })
        }
        _ => None,
    });
    let indexed = model.config().filter(|config| config.prefix_cache);
    let replayed = indexed.map(|config| replay::replay(&prepared.requests, &events, config.page_size));
    let verified = live.verified();
    Report {
        schema: report::SCHEMA,
        name: spec.name.clone(),
        spec: prepared.path.display().to_string(),
        trace: prepared.trace.as_ref().map(|trace| report::Trace {
            file: trace.path.display().to_string(),
            named_by: trace.named_by(&args.spec.set),
            found: trace.found.to_string(),
        }),
        interrupted,
        device: prepared.device.to_string(),
        dtype: spec.dtype.to_string(),
        seed: spec.seed,
        machine: report::MachineReport {
            cpu: prepared.machine.cpu.clone(),
            isa: prepared.machine.isa.to_string(),
            threads: rayon::current_num_threads(),
            read_bytes_per_s: roof.read,
            flops_per_s: roof.flops,
        },
        requests: report::Requests {
            total: prepared.requests.len(),
            finished,
            refused,
            unfinished: scheduler.unfinished(),
            peak_active: scheduler.counts().peak_active,
        },
        tokens: report::Tokens { prompt: prompt.sum(), prefix_hits: scheduler.counts().hit_tokens, computed },
        steps: report::Steps {
            total: steps,
            stopped_early,
            planned_ahead: promoted,
            replanned,
            padded: live.padded_steps(),
            captured: live.regions().graphs().captures(),
            replayed: live.regions().graphs().replays(),
            late_kernels: measured.late_kernels,
            virtual_ms: scheduler.now_ms(),
        },
        elapsed_s,
        tokens_per_s: if elapsed_s > 0.0 { computed as f64 / elapsed_s } else { 0.0 },
        phases: phases
            .all()
            .into_iter()
            .map(|(phase, resource, cost)| told(phase, resource, cost, &roof))
            .collect(),
        kernels: live.kernels().clone(),
        attention: live
            .regions()
            .calls()
            .iter()
            .map(|((node, walk), &calls)| report::Attention {
                node: node.clone(),
                walk: (*walk).to_owned(),
                calls,
            })
            .collect(),
        sparse: (!prepared.sparse.is_empty()).then(|| {
            let SparseWork { scored, attended, dense } = live.pairs();
            let share = if dense == 0 { 0.0 } else { attended as f64 / dense as f64 };
            report::Sparse { scored, attended, dense, share }
        }),
        memory: report::MemoryReport {
            estimated: u64::try_from(prepared.estimate.total()).unwrap_or(u64::MAX),
            estimated_most: u64::try_from(prepared.estimate.most()).unwrap_or(u64::MAX),
            allocated_peak: memory.allocated as u64,
            resident_peak: memory.resident.map(|bytes| bytes as u64),
            apart: (prepared.device != Device::Cpu).then(|| report::Apart {
                device_estimated: prepared.estimate.taken(Place::Device) as u64,
                device_peak: peak_allocated_bytes_on(prepared.device) as u64,
                pinned_estimated: prepared.estimate.taken(Place::Pinned) as u64,
                pinned_peak: peak_pinned_bytes() as u64,
            }),
        },
        cache: model.kv.pages().map(|pages| {
            let stats = pages.store().stats();
            report::Cache {
                page_size: pages.store().config().page_size,
                pages: stats.pages_total,
                evictions: stats.evictions,
                offloads,
                reloads,
                restarts,
                put_off,
                copies: stats.copies,
                repointed: stats.repointed,
            }
        }),
        ring: live.worlds(),
        verify: report::Verify {
            rate: args.verify,
            rows: verified.rows,
            checks: verified.checks,
            vectors: verified.vectors,
            picks: verified.picks,
            failed: verified.failed,
            worst_share_of_allowed: verified.worst,
            first_failure: verified.first_failure.clone(),
        },
        prefix_model: replayed.map(|replayed| report::PrefixModel {
            requests: replayed.requests,
            hit_tokens: replayed.hit_tokens,
            mismatches: replayed
                .mismatches
                .into_iter()
                .map(|m| report::Mismatch { request: m.request, expected: m.expected, got: m.got })
                .collect(),
        }),
        digest: live.digest().hex(),
        refusals: refusals.collect(),
        events: events.clone(),
    }
}

/// One phase as reports tell it.
fn told(phase: &'static str, resource: String, cost: phases::Cost, roof: &Roof) -> report::Phase {
    let seconds = cost.elapsed.as_secs_f64();
    let rate = |n: u64| (n > 0 && seconds > 0.0).then(|| n as f64 / seconds);
    let bytes = cost.work.bytes_read + cost.work.bytes_written;
    // What a step has just made lies in a processor's cache: only phases that stream memory are held to a limit.
    let bound = matches!(phase, "attend" | "select" | "offload" | "reload") && seconds > 0.0;
    let least = roof.least_seconds(&cost.work);
    report::Phase {
        phase: phase.to_owned(),
        resource,
        calls: cost.calls,
        seconds,
        tokens: cost.work.tokens,
        bytes,
        flops: cost.work.flops,
        tokens_per_s: rate(cost.work.tokens),
        bytes_per_s: rate(bytes),
        flops_per_s: rate(cost.work.flops),
        share_of_limit: (bound && least > 0.0).then(|| least / seconds),
    }
}
