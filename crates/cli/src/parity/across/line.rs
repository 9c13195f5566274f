//! One step on several devices, layer beside layer: the first device tells the others what it wrote, and waits for them.
//!
//! A line holds one layer's outputs, so that a device is never more than two layers ahead of the slowest: what is kept is three
//! layers' outputs of one step, whatever a run is long.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use mstar_core::Label;

use super::findings::Findings;
use super::gate::Gate;
use super::together::Parted;
use crate::run::shown::{Outputs, Shown, Witness};

/// A layer that the first device wrote.
pub(super) struct Layer {
    /// Where: step, attention resource, layer, plan label, tokens.
    place: Place,
    /// `[T, H, Dv]`, as bytes.
    o: Vec<u8>,
    /// `[T, H]`.
    lse: Vec<f32>,
    /// `[T, K]`.
    selection: Option<Vec<i32>>,
}

/// Where a layer stands in a run.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Place {
    step: u64,
    attention: String,
    layer: usize,
    label: Label,
    tokens: usize,
}

impl Place {
    fn of(shown: &Shown<'_>) -> Place {
        Place {
            step: shown.step(),
            attention: shown.attention().to_string(),
            layer: shown.layer(),
            label: shown.label().clone(),
            tokens: shown.tokens(),
        }
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Place { step, attention, layer, label, tokens } = self;
        write!(f, "step {step}, {attention} layer {layer}, plan {label} of {tokens} tokens")
    }
}

impl Layer {
    /// The first device's outputs.
    pub(super) fn outputs(&self) -> Outputs<'_> {
        Outputs { o: &self.o, lse: &self.lse, selection: self.selection.as_deref() }
    }
}

enum Message {
    Layer(Arc<Layer>),
    /// The step is over on the first device, well or not.
    End,
}

/// The first device's end of the lines.
pub(super) struct Head {
    lines: Vec<SyncSender<Message>>,
}

/// Another device's end.
pub(super) struct Tail {
    line: Mutex<Line>,
    gate: Gate,
    findings: Mutex<Findings>,
}

struct Line {
    receiver: Receiver<Message>,
    /// Whether this step's end has been read.
    ended: bool,
}

/// A line to each of `others`, which are compared as their gates say.
pub(super) fn lines(gates: &[Gate]) -> (Head, Vec<Tail>) {
    let ends = gates.iter().map(|&gate| {
        let (sender, receiver) = sync_channel(1);
        let line = Mutex::new(Line { receiver, ended: false });
        (sender, Tail { line, gate, findings: Mutex::new(Findings::default()) })
    });
    let (lines, tails) = ends.unzip();
    (Head { lines }, tails)
}

impl Witness for Head {
    fn see(&self, shown: &Shown<'_>) -> anyhow::Result<()> {
        let Outputs { o, lse, selection } = shown.outputs();
        let layer = Arc::new(Layer {
            place: Place::of(shown),
            o: o.to_vec(),
            lse: lse.to_vec(),
            selection: selection.map(<[i32]>::to_vec),
        });
        for line in &self.lines {
            // A tail reads its line to the step's end, whatever becomes of its device.
            let _ = line.send(Message::Layer(layer.clone()));
        }
        Ok(())
    }
}

impl Head {
    /// Ends the step when it is dropped.
    pub(super) fn step(&self) -> impl Drop + use<'_> {
        struct End<'a>(&'a Head);
        impl Drop for End<'_> {
            fn drop(&mut self) {
                for line in &self.0.lines {
                    let _ = line.send(Message::End);
                }
            }
        }
        End(self)
    }
}

impl Witness for Tail {
    fn see(&self, shown: &Shown<'_>) -> anyhow::Result<()> {
        let Some(layer) = self.next() else {
            return Err(
                Parted(format!("{}: the first device did not come that far", Place::of(shown))).into()
            );
        };
        let place = Place::of(shown);
        if layer.place != place {
            return Err(Parted(format!("{place}, where the first device is at {}", layer.place)).into());
        }
        self.findings.lock().unwrap_or_else(PoisonError::into_inner).add(self.gate, shown, layer.outputs());
        Ok(())
    }
}

impl Tail {
    /// The next layer of the step; `None` after its end.
    fn next(&self) -> Option<Arc<Layer>> {
        let mut line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        if line.ended {
            return None;
        }
        match line.receiver.recv() {
            Ok(Message::Layer(layer)) => Some(layer),
            Ok(Message::End) | Err(_) => {
                line.ended = true;
                None
            }
        }
    }

    /// Reads on to the step's end when it is dropped, so that the first device never waits for one that has stopped.
    pub(super) fn step(&self) -> Rest<'_> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner).ended = false;
        Rest(self)
    }

    /// What was found so far.
    pub(super) fn findings(&self) -> Findings {
        self.findings.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How it compares.
    pub(super) fn gate(&self) -> Gate {
        self.gate
    }
}

/// What is left of a step.
pub(super) struct Rest<'a>(&'a Tail);

impl Rest<'_> {
    /// How many layers this device did not come to.
    pub(super) fn count(&self) -> usize {
        std::iter::from_fn(|| self.0.next()).count()
    }
}

impl Drop for Rest<'_> {
    fn drop(&mut self) {
        self.count();
    }
}

#[cfg(test)]
mod tests {
    use mstar_kernels::DType;

    use super::*;

    fn layer(step: u64) -> Message {
        let place = Place { step, attention: "attn".into(), layer: 0, label: Label::main(), tokens: 1 };
        Message::Layer(Arc::new(Layer { place, o: vec![], lse: vec![], selection: None }))
    }

    #[test]
    fn a_device_that_stops_holds_nobody_up_and_what_it_missed_is_counted() {
        let gate = Gate { dtype: DType::F32, exact: false };
        let (head, tails) = lines(&[gate, gate]);
        for step in 0..3 {
            std::thread::scope(|scope| {
                for (index, tail) in tails.iter().enumerate() {
                    scope.spawn(move || {
                        let rest = tail.step();
                        // One reads everything, the other stops after `step` layers.
                        let read = if index == 0 { 5 } else { step as usize };
                        (0..read).for_each(|_| assert_eq!(tail.next().expect("a layer").place.step, step));
                        assert_eq!(rest.count(), 5 - read);
                        assert!(tail.next().is_none());
                    });
                }
                let end = head.step();
                for _ in 0..5 {
                    head.lines.iter().for_each(|line| line.send(layer(step)).expect("it is read"));
                }
                drop(end);
            });
        }
    }
}
