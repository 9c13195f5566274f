//! What is said on stderr while a command compiles kernels: one line that is rewritten on a terminal, one at the beginning and one
//! at the end elsewhere. Kernels that are on disk are read without a word.

use std::io::{IsTerminal, Write};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use mstar_kernels::cuda::jit::{Compiled, Event, watch};

use crate::text::say;

/// Has compiling told from now on, unless `quiet`.
pub(crate) fn tell(quiet: bool) {
    if quiet {
        return;
    }
    let progress = Mutex::new(Progress::new(std::io::stderr().is_terminal()));
    watch(move |event| {
        let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
        match progress.on(&Step::of(event), Instant::now()) {
            Some(Said::Line(line)) => say(line),
            // Over whatever stands on the line, a bar among it; one write, so that it is whole.
            Some(Said::Over(text)) => _ = std::io::stderr().write_all(format!("\r\x1b[K{text}").as_bytes()),
            None => {}
        }
    });
}

/// What counts of an event.
enum Step {
    Begin(usize),
    Compiling { kernel: String, target: String },
    Ready { compiled: bool },
    End,
    NotKept(String),
    Other,
}

impl Step {
    fn of(event: &Event<'_>) -> Step {
        match event {
            Event::Begin { kernels } => Step::Begin(*kernels),
            Event::Compiling { key, target } => {
                Step::Compiling { kernel: key.unit.name().to_owned(), target: target.to_string() }
            }
            Event::Ready { compiled: Compiled { cached, .. }, .. } => Step::Ready { compiled: !cached },
            Event::End => Step::End,
            Event::NotKept { why } => Step::NotKept((*why).to_owned()),
            _ => Step::Other,
        }
    }
}

#[derive(Debug, PartialEq)]
enum Said {
    /// A line of its own.
    Line(String),
    /// In place of the terminal's last line.
    Over(String),
}

/// Where compiling stands. Several threads may each have begun.
struct Progress {
    terminal: bool,
    open: usize,
    kernels: usize,
    ready: usize,
    compiled: usize,
    since: Option<Instant>,
}

impl Progress {
    fn new(terminal: bool) -> Progress {
        Progress { terminal, open: 0, kernels: 0, ready: 0, compiled: 0, since: None }
    }

    fn on(&mut self, step: &Step, now: Instant) -> Option<Said> {
        match step {
            Step::Begin(kernels) => {
                (self.open, self.kernels) = (self.open + 1, self.kernels + kernels);
                None
            }
            Step::Compiling { kernel, target } => {
                let first = self.since.is_none();
                self.since.get_or_insert(now);
                match self.terminal {
                    true => Some(self.over(kernel)),
                    false if first => Some(Said::Line(format!("compiling kernels for {target}"))),
                    false => None,
                }
            }
            Step::Ready { compiled } => {
                self.ready += 1;
                self.compiled += usize::from(*compiled);
                match self.open {
                    // One that was asked for by itself, in no batch.
                    0 => self.end(now),
                    _ => (self.terminal && self.since.is_some()).then(|| self.over("")),
                }
            }
            Step::End => {
                self.open = self.open.saturating_sub(1);
                if self.open == 0 { self.end(now) } else { None }
            }
            Step::NotKept(why) => Some(self.line(format!("kernels are not kept: {why}"))),
            Step::Other => None,
        }
    }

    /// Everything that was begun is done.
    fn end(&mut self, now: Instant) -> Option<Said> {
        let Progress { compiled, since, .. } = std::mem::replace(self, Progress::new(self.terminal));
        let seconds = now.duration_since(since?).as_secs_f64();
        let kernels = if compiled == 1 { "kernel" } else { "kernels" };
        Some(self.line(format!("compiled {compiled} {kernels} in {seconds:.1} s")))
    }

    /// A line that stays.
    fn line(&self, line: String) -> Said {
        if self.terminal { Said::Over(format!("mstar: {line}\n")) } else { Said::Line(line) }
    }

    fn over(&self, kernel: &str) -> Said {
        let all = self.kernels.max(1);
        Said::Over(format!("mstar: compiling kernels, {} of {all} ready  {kernel}", self.ready))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn compiling(kernel: &str) -> Step {
        Step::Compiling { kernel: kernel.into(), target: "sm_90a".into() }
    }

    /// What is said of a batch of two, of which one is on disk, begun twice over, and of one that is on disk whole.
    fn said(terminal: bool) -> Vec<Said> {
        let (mut progress, start) = (Progress::new(terminal), Instant::now());
        let steps = [
            Step::Begin(2),
            Step::Begin(1),
            Step::Ready { compiled: false },
            compiling("tile.cu"),
            compiling("decode.cu"),
            Step::Ready { compiled: true },
            Step::End,
            Step::Ready { compiled: true },
            Step::End,
            Step::Begin(1),
            Step::Ready { compiled: false },
            Step::End,
        ];
        let at = |index: usize| start + Duration::from_millis(500 * index as u64);
        steps.iter().enumerate().filter_map(|(index, step)| progress.on(step, at(index))).collect()
    }

    #[test]
    fn elsewhere_there_is_one_line_at_the_beginning_and_one_at_the_end() {
        let line = |text: &str| Said::Line(text.into());
        assert_eq!(said(false), [line("compiling kernels for sm_90a"), line("compiled 2 kernels in 2.5 s")]);
    }

    #[test]
    fn on_a_terminal_one_line_is_rewritten() {
        let over = |text: &str| Said::Over(text.into());
        assert_eq!(
            said(true),
            [
                over("mstar: compiling kernels, 1 of 3 ready  tile.cu"),
                over("mstar: compiling kernels, 1 of 3 ready  decode.cu"),
                over("mstar: compiling kernels, 2 of 3 ready  "),
                over("mstar: compiling kernels, 3 of 3 ready  "),
                over("mstar: compiled 2 kernels in 2.5 s\n"),
            ]
        );
    }

    #[test]
    fn one_outside_of_a_batch_is_begun_and_ended_by_itself() {
        let (mut progress, now) = (Progress::new(false), Instant::now());
        assert_eq!(progress.on(&Step::Ready { compiled: false }, now), None);
        let said = [compiling("join.cu"), Step::Ready { compiled: true }].map(|step| progress.on(&step, now));
        let line = |text: &str| Some(Said::Line(text.into()));
        assert_eq!(said, [line("compiling kernels for sm_90a"), line("compiled 1 kernel in 0.0 s")]);
    }

    #[test]
    fn that_kernels_cannot_be_kept_is_a_line() {
        let mut progress = Progress::new(false);
        let said = progress.on(&Step::NotKept("no room".into()), Instant::now());
        assert_eq!(said, Some(Said::Line("kernels are not kept: no room".into())));
    }
}
