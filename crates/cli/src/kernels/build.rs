//! `mstar kernels build`.

use std::fmt::Write;
use std::io::IsTerminal;
use std::time::Instant;

use anyhow::bail;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use mstar_kernels::cuda::jit::{Compiled, Event, Key, Nvrtc, Resources, Target, cached, compile, watch};
use mstar_kernels::cuda::{driver, variants};
use rayon::prelude::*;

use super::Build;
use super::needed::needed_for;
use crate::exit::Exit;
use crate::explain::SpecArguments;
use crate::text::{print, say, wrap};

/// Compiles the list for each architecture.
pub(super) fn command(args: Build) -> anyhow::Result<Exit> {
    let targets = targets(&args.arch, !args.list)?;
    if args.list {
        return list(&args, &targets);
    }
    watch(|event| {
        if let Event::NotKept { why } = event {
            say(format_args!("kernels are not kept: {why}"));
        }
    });
    let mut good = true;
    for target in targets {
        let keys = keys(&args, target)?;
        let made = build(target, &keys);
        print(&report(target, &made, args.check))?;
        good &= made.iter().all(|made| made.is_good(args.check));
    }
    if let Some((folder, _, _)) = cached() {
        print(&wrap("", &format!("kept in {}", folder.display())))?;
    }
    Ok(if good { Exit::Success } else { Exit::CheckFailed })
}

/// Names what would be compiled.
fn list(args: &Build, targets: &[Target]) -> anyhow::Result<Exit> {
    for &target in targets {
        let lines = keys(args, target)?.iter().map(|key| wrap("  ", &key.to_string())).collect::<String>();
        print(&format!("{target}\n{lines}"))?;
    }
    Ok(Exit::Success)
}

/// What is compiled for a target: the list, or what the spec needs there.
fn keys(args: &Build, target: Target) -> anyhow::Result<Vec<Key>> {
    let mut keys = match &args.spec {
        None => variants::variants_for(target),
        Some(spec) => {
            let arguments = SpecArguments { spec: spec.clone(), set: args.set.clone(), device: None };
            needed_for(&arguments, target)?
        }
    };
    if let Some(only) = &args.only {
        keys.retain(|key| key.to_string().contains(only.as_str()));
        if keys.is_empty() {
            bail!("--only {only}: no kernel of the list has it in its line");
        }
    }
    Ok(keys)
}

/// The architectures named, or those of the cards here, each once.
fn targets(named: &[String], compiled: bool) -> anyhow::Result<Vec<Target>> {
    let mut targets = Vec::new();
    for word in named {
        targets.push(Target::parse(word).map_err(|why| anyhow::anyhow!("--arch: {why}"))?);
    }
    if named.is_empty() {
        let cards = driver().map(|driver| driver.cards).unwrap_or_default();
        for (major, minor) in cards.iter().map(|card| card.compute_capability) {
            targets.push(Target::parse(&format!("sm_{major}{minor}")).map_err(anyhow::Error::msg)?);
        }
    }
    let mut distinct: Vec<Target> = Vec::new();
    for target in targets {
        if !distinct.contains(&target) {
            distinct.push(target);
        }
    }
    if distinct.is_empty() {
        bail!("no card is here to compile for; name an architecture, such as --arch sm_90a");
    }
    if compiled && distinct.iter().any(|target| matches!(target, Target::Sm { .. })) {
        Nvrtc::here().map_err(anyhow::Error::msg)?;
    }
    Ok(distinct)
}

/// What became of one variant.
struct Made<'a> {
    key: &'a Key,
    outcome: Result<(Resources, bool), String>,
    seconds: f64,
}

impl Made<'_> {
    /// What is wrong with it.
    fn fault(&self) -> Option<String> {
        variants::fault(self.key, &self.outcome.as_ref().ok()?.0)
    }

    fn is_good(&self, check: bool) -> bool {
        self.outcome.is_ok() && !(check && self.fault().is_some())
    }
}

/// All of them, several at a time; one that fails stops no other.
fn build(target: Target, keys: &[Key]) -> Vec<Made<'_>> {
    let bar = progress(target, keys.len());
    let made = keys
        .par_iter()
        .map(|key| {
            bar.set_message(key.unit.name());
            let start = Instant::now();
            let outcome = compile(target, key)
                .map(|Compiled { resources, cached, .. }| (resources, cached))
                .map_err(|why| why.to_string());
            bar.inc(1);
            Made { key, outcome, seconds: start.elapsed().as_secs_f64() }
        })
        .collect();
    bar.finish_and_clear();
    made
}

/// A bar on stderr, where that is a terminal.
fn progress(target: Target, kernels: usize) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(Some(kernels as u64), ProgressDrawTarget::stderr_with_hz(8));
    let style = ProgressStyle::with_template("{prefix} {bar:32} {pos}/{len} kernels  {msg}  {elapsed}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.set_prefix(target.to_string());
    bar
}

fn report(target: Target, all: &[Made<'_>], check: bool) -> String {
    let mut out = format!("{target}\n");
    let mut seconds = 0.0;
    for made in all {
        let line = match &made.outcome {
            Ok((resources, cached)) => {
                let mut line = format!("{}: {}", made.key, taken(resources));
                match cached {
                    true => line += ", from the cache",
                    false => _ = write!(line, ", {:.1} s", made.seconds),
                }
                line
            }
            // The error names the kernel, and its log has lines of its own.
            Err(why) => {
                out += &format!("  FAILED {why}\n");
                continue;
            }
        };
        seconds += made.seconds;
        out += &wrap("  ", &line);
        if let Some(fault) = made.fault() {
            out += &wrap("    ", &format!("{} {fault}", if check { "FAULT" } else { "note:" }));
        }
    }
    let failed = all.iter().filter(|made| made.outcome.is_err()).count();
    let faults = all.iter().filter(|made| made.fault().is_some()).count();
    let cached = all.iter().filter(|made| matches!(made.outcome, Ok((_, true)))).count();
    let compiled = all.len() - failed - cached;
    out += &wrap(
        "",
        &format!(
            "{target}: {compiled} compiled, {cached} from the cache, {failed} failed, {faults} with a fault; {seconds:.1} s of work"
        ),
    );
    out
}

fn taken(resources: &Resources) -> String {
    let Resources { registers, spill_stores, spill_loads, stack, shared, serialised: _ } = resources;
    let mut text = format!("{registers} registers");
    if *shared > 0 {
        let _ = write!(text, ", {shared} B of static shared memory");
    }
    if *stack > 0 {
        let _ = write!(text, ", {stack} B of local memory");
    }
    if *spill_stores + *spill_loads > 0 {
        let _ = write!(text, ", {spill_stores} B spilled and {spill_loads} B loaded");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::COLUMNS;
    use mstar_kernels::cuda::jit::Unit;

    #[test]
    fn architectures_are_read_once_each_or_refused() {
        let parse =
            |words: &[&str]| targets(&words.iter().map(|word| word.to_string()).collect::<Vec<_>>(), true);
        let error = parse(&["sm_90a", "volta"]).unwrap_err().to_string();
        assert!(error.starts_with("--arch: volta"), "{error}");
        match (parse(&["sm_90", "sm_90a", "sm_80"]), Nvrtc::here()) {
            (Ok(targets), Ok(_)) => assert_eq!(targets.len(), 2),
            (Err(error), Err(why)) => assert_eq!(error.to_string(), why),
            (targets, here) => panic!("{targets:?} {here:?}"),
        }
    }

    #[test]
    fn the_report_fits_a_terminal_and_a_fault_counts_only_when_asked() {
        let mut key = Key::new(Unit::of("paged.cu", ""), "a_kernel_with_a_long_name");
        for name in ["DTYPE", "KV_DTYPE", "WIDTH", "GROUP", "CAUSAL", "SOFT_CAP", "WINDOW", "PAGE_SIZE"] {
            key = key.with(name, 128);
        }
        let of = |resources| Made { key: &key, outcome: Ok((resources, false)), seconds: 1.25 };
        let clean = of(Resources { registers: 168, shared: 1024, ..Resources::default() });
        let spills = of(Resources {
            registers: 255,
            spill_stores: 16,
            spill_loads: 24,
            stack: 16,
            ..Resources::default()
        });
        assert!(clean.is_good(true) && spills.is_good(false) && !spills.is_good(true));
        let failed = Made { key: &key, outcome: Err("kernel paged.cu: no".into()), seconds: 0.0 };
        assert!(!failed.is_good(false));
        let target = Target::Sm { major: 9, minor: 0 };
        let text = report(target, &[clean, spills, failed], true);
        assert!(text.lines().all(|line| line.chars().count() <= COLUMNS), "{text}");
        assert!(text.contains("FAULT 16 bytes of local memory"), "{text}");
        assert!(text.contains("2 compiled, 0 from the cache, 1 failed, 1 with a"), "{text}");
    }
}
