//! `mstar parity --across`: one spec on several devices, step for step, every layer's outputs compared with the first device's.
//!
//! | room | what is in it |
//! | --- | --- |
//! | `together` | the devices as one machine: one scheduler, whose questions all must answer alike |
//! | `line` | a layer from the first device to the others, one at a time |
//! | `gate` | what two devices are allowed to differ by, and why |
//! | `findings` | figures by attention resource and label, and the first rows that disagree |
//! | `report` | how they are told |
//!
//! The devices draw the same content from the same seed and take the same steps: a step is declared once, and admitted, planned
//! and run by each. Where picks of an indexer differ, each is judged by its scores in f64 with the bound that `--verify` states, and
//! attention is held against the oracle over the pick that was used; elsewhere the outputs themselves are compared.

mod findings;
mod gate;
mod line;
mod report;
mod together;

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use mstar_core::spec::DeviceChoice;
use mstar_kernels::Device;
use mstar_kernels::mutant::planted;

use self::gate::Gate;
use self::report::{Compared, Report};
use self::together::{Parted, Together};
use crate::exit::Exit;
use crate::explain::{Prepared, SpecArguments, prepare};
use crate::interrupt::Interrupt;
use crate::run::phases::Phases;
use crate::run::runtime::Live;
use crate::run::scheduler::{Scheduler, Tick};
use crate::run::{self};
use crate::text::{bytes, print, say};

/// What was asked for.
pub(super) struct Across {
    /// The devices, as they were named.
    pub(super) devices: Vec<String>,
    /// The spec.
    pub(super) spec: PathBuf,
    /// What to replace in it.
    pub(super) set: Vec<String>,
    /// Steps to stop after.
    pub(super) steps: Option<u64>,
    /// Nothing on stdout, no bar.
    pub(super) quiet: bool,
    /// One JSON document on stdout.
    pub(super) json: bool,
}

/// Runs the spec on every device, and compares.
pub(super) fn command(asked: &Across) -> Result<Exit> {
    let devices = devices(&asked.devices)?;
    let prepared = devices.iter().map(|&device| ready(asked, device)).collect::<Result<Vec<_>>>()?;
    room(&prepared, &devices)?;
    let interrupt = Interrupt::install().context("cannot take SIGINT and SIGTERM")?;
    let report = drive(asked, &prepared, &devices, &interrupt)?;
    if asked.json {
        print(&report.json()?)?;
    } else if !asked.quiet {
        print(&report.text())?;
    }
    if let Some(why) = report.failure() {
        say(format_args!("a check failed: {why}"));
        return Ok(Exit::CheckFailed);
    }
    Ok(match interrupt.code().filter(|_| report.interrupted) {
        Some(code) => Exit::Interrupted(code),
        None => Exit::Success,
    })
}

/// The devices that were named: two or more, each by its name.
fn devices(named: &[String]) -> Result<Vec<Device>> {
    let parse = |name: &String| match DeviceChoice::parse(name) {
        Ok(DeviceChoice::Named(device)) => Ok(device),
        Ok(DeviceChoice::Auto) => bail!("--across: auto is one device; name each, such as cpu,cuda:0"),
        Err(why) => Err(anyhow!("--across: {why}")),
    };
    let devices = named.iter().map(parse).collect::<Result<Vec<_>>>()?;
    if devices.len() < 2 {
        bail!(
            "--across: nothing to compare {} with; name two devices or more, such as cpu,cuda:0",
            named.join(",")
        );
    }
    Ok(devices)
}

/// The spec as it runs on `device`.
fn ready(asked: &Across, device: Device) -> Result<Prepared> {
    let arguments =
        SpecArguments { spec: asked.spec.clone(), set: asked.set.clone(), device: Some(device.to_string()) };
    // A device that was named is not there: what helps is to name another list.
    let cure = |why: anyhow::Error| {
        anyhow!("{}", format!("{why:#}").replace("use --device cpu", "leave it out of --across"))
    };
    let prepared = prepare(&arguments).map_err(cure)?;
    prepared.refuse().with_context(|| format!("--across {device}"))?;
    Ok(prepared)
}

/// Refuses what fits once and not as often as it is asked for.
fn room(prepared: &[Prepared], devices: &[Device]) -> Result<()> {
    let on_host = prepared.iter().zip(devices).filter(|(_, device)| **device == Device::Cpu);
    let most: u128 = on_host.map(|(prepared, _)| prepared.estimate.most()).sum();
    match prepared.first().and_then(|prepared| prepared.machine.memory_available) {
        Some(available) if most > u128::from(available) => bail!(
            "--across: the runs on cpu may take {} of memory together and {} are available; name cpu once, or make the \
             spec smaller with --set",
            bytes(most),
            bytes(available.into())
        ),
        _ => {}
    }
    for (index, (one, device)) in prepared.iter().zip(devices).enumerate() {
        let Some((free, _)) = one.available.device else { continue };
        let (mut most, mut runs) = (0, 0);
        for (other, _) in prepared.iter().zip(devices).filter(|(_, other)| *other == device) {
            (most, runs) = (most + other.estimate.most_of_device(), runs + 1);
        }
        if devices[..index].contains(device) || runs < 2 || most <= u128::from(free) {
            continue;
        }
        bail!(
            "--across: the runs on {device} may take {} of its memory together and {} are free; name {device} once, or \
             make the spec smaller with --set",
            bytes(most),
            bytes(free.into())
        );
    }
    Ok(())
}

/// What each is called: its device, with a number behind it from the second time on.
fn names(devices: &[Device]) -> Vec<String> {
    let name =
        |(index, device): (usize, &Device)| match devices[..index].iter().filter(|d| *d == device).count() {
            0 => device.to_string(),
            before => format!("{device} ({})", before + 1),
        };
    devices.iter().enumerate().map(name).collect()
}

fn drive(asked: &Across, prepared: &[Prepared], devices: &[Device], interrupt: &Interrupt) -> Result<Report> {
    let first = prepared.first().context("no device (a bug of mstar's)")?;
    let (spec, names) = (&first.spec, names(devices));
    let phases: Vec<Arc<Phases>> = devices.iter().map(|_| Arc::default()).collect();
    let build = |((prepared, name), phases): ((&Prepared, &String), &Arc<Phases>)| {
        run::build(prepared, phases).with_context(|| name.clone())
    };
    let built: Vec<_> = prepared.iter().zip(&names).zip(&phases).map(build).collect::<Result<Vec<_>>>()?;
    let limits = run::limits(first, &built[0].0)?;
    let gates: Vec<Gate> =
        devices[1..].iter().map(|&device| Gate { dtype: spec.dtype, exact: device == devices[0] }).collect();
    let (head, tails) = line::lines(&gates);
    let (mut models, mut buffers) = (Vec::new(), Vec::new());
    for (model, made) in built {
        models.push(model);
        buffers.push(made);
    }
    let mut lives = Vec::new();
    for (index, ((model, buffers), name)) in models.iter().zip(buffers).zip(&names).enumerate() {
        let seed = if index > 0 && planted("across-other-content") { spec.seed + 1 } else { spec.seed };
        let live = Live::new(model, &prepared[index].requests, buffers, seed, 0.0, phases[index].clone());
        let live = match index {
            0 => live.shown_to(&head),
            n => live.shown_to(&tails[n - 1]),
        };
        lives.push((name.clone(), live));
    }
    let mut together = Together::new(lives, &head, &tails);
    let mut scheduler = Scheduler::new(&first.requests, limits);
    let most = run::most_steps(first, asked.steps);
    let bar = run::progress(asked.quiet, first.requests.len());
    let (mut ended, mut parted) = (false, None);
    while !ended && scheduler.counts().steps < most && interrupt.code().is_none() {
        match scheduler.tick(&mut together) {
            Ok(Tick::Done) => ended = true,
            Ok(Tick::Ran(_)) => {
                bar.set_position((scheduler.counts().finished + scheduler.counts().refused) as u64);
                bar.set_message(format!("step {}, {} active", scheduler.counts().steps, scheduler.active()));
            }
            // That they part is what is looked for; what was compared until then is told.
            Err(why) => match why.downcast_ref::<Parted>() {
                Some(Parted(why)) => {
                    parted = Some(why.clone());
                    break;
                }
                None => return Err(why),
            },
        }
    }
    bar.finish_and_clear();
    let stopped_early = !ended && scheduler.unfinished() > 0;
    Ok(Report {
        name: spec.name.clone(),
        spec: first.path.display().to_string(),
        dtype: spec.dtype,
        steps: scheduler.counts().steps,
        captured: together.lives().map(|(_, live)| live.regions().graphs().captures()).collect(),
        digests: together.lives().map(|(_, live)| live.digest().hex()).collect(),
        stopped_early,
        interrupted: stopped_early && interrupt.code().is_some(),
        parted,
        compared: tails
            .iter()
            .zip(&names[1..])
            .map(|(tail, name)| Compared {
                device: name.clone(),
                exact: tail.gate().exact,
                findings: tail.findings(),
            })
            .collect(),
        devices: names,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_each_and_two_at_least() {
        let parse = |list: &str| devices(&list.split(',').map(str::to_owned).collect::<Vec<_>>());
        let said = |list: &str| parse(list).unwrap_err().to_string();
        assert_eq!(parse("cpu,cuda:1").unwrap(), [Device::Cpu, Device::Cuda(1)]);
        assert_eq!(parse("cuda,cpu,cpu").unwrap(), [Device::Cuda(0), Device::Cpu, Device::Cpu]);
        assert!(said("cpu").starts_with("--across: nothing to compare cpu with; name two devices"));
        assert!(said("auto,cpu").contains("name each, such as cpu,cuda:0"));
        assert!(said("cpu,tpu").starts_with("--across: "));
    }

    #[test]
    fn the_second_of_a_name_has_a_number() {
        let named = names(&[Device::Cpu, Device::Cuda(0), Device::Cpu, Device::Cpu]);
        assert_eq!(named, ["cpu", "cuda:0", "cpu (2)", "cpu (3)"]);
    }
}
