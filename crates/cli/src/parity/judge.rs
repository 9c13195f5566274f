//! One case from file to verdict.

use std::path::{Path, PathBuf};

use mstar_kernels::DType;

use super::case::Case;
use super::compare::{self, Judgement};
use super::find::Found;
use super::ops::{Computed, Engine, NotRun, Op, Outputs};
use super::place::Place;
use super::{Backend, dump, selection};

/// What became of one case.
#[derive(Debug)]
pub(super) struct Report {
    /// The name that it is reported under.
    pub(super) label: PathBuf,
    /// Where it lies.
    pub(super) path: PathBuf,
    /// What it is, when that much could be read.
    pub(super) about: Option<About>,
    /// How it ended.
    pub(super) outcome: Outcome,
}

/// What a case says of itself, and what ran it.
#[derive(Debug)]
pub(super) struct About {
    pub(super) op: Op,
    pub(super) dtype: DType,
    pub(super) source: String,
    pub(super) backend: &'static str,
    pub(super) notes: Vec<String>,
}

/// How a case ended.
#[derive(Debug)]
pub(super) enum Outcome {
    /// It was run and compared.
    Judged(Vec<Judgement>),
    /// It cannot be read, or what was computed could not be dumped.
    Unreadable(String),
    /// No backend runs it here, or the one that should refused it.
    Unsupported(String),
}

impl Report {
    /// Whether every output passed.
    pub(super) fn passed(&self) -> bool {
        matches!(&self.outcome, Outcome::Judged(outputs) if outputs.iter().all(Judgement::passed))
    }
}

/// Reads, runs and judges one case, and dumps what was computed where that is asked for.
pub(super) fn judge(found: &Found, backend: Backend, place: &Place, dump_folder: Option<&Path>) -> Report {
    let report =
        |about, outcome| Report { label: found.label.clone(), path: found.path.clone(), about, outcome };
    if let Some(fault) = &found.fault {
        return report(None, Outcome::Unreadable(fault.clone()));
    }
    let case = match Case::read(&found.path) {
        Ok(case) => case,
        Err(error) => return report(None, Outcome::Unreadable(one_line(&format!("{error:#}")))),
    };
    let (op, engine) =
        (case.op, if backend == Backend::Reference { Engine::Reference } else { Engine::Fast });
    let name = if engine == Engine::Reference { "reference" } else { op.family() };
    let about = About {
        op,
        dtype: case.dtype,
        source: case.source.clone(),
        backend: name,
        notes: case.notes.clone(),
    };
    if let Some(family) = backend.family().filter(|&family| family != op.family()) {
        let why = format!("backend {family} does not run {op}; {} does", op.family());
        return report(Some(about), Outcome::Unsupported(why));
    }
    let outputs = match op.run(&case, engine, place) {
        Ok(outputs) => outputs,
        Err(NotRun::Unsupported(why)) => return report(Some(about), Outcome::Unsupported(why)),
        Err(NotRun::Failed(why)) => {
            let why = format!("the {name} backend refused it: {why}");
            return report(Some(about), Outcome::Unsupported(one_line(&why)));
        }
    };
    let outcome = Outcome::Judged(compare_all(&case, &outputs));
    if let Some(folder) = dump_folder
        && let Err(error) = dump::write(folder, &found.label, &case, &found.path, name, &outputs)
    {
        return report(Some(about), Outcome::Unreadable(one_line(&format!("not dumped: {error:#}"))));
    }
    report(Some(about), outcome)
}

/// Every recorded output against what was computed.
pub(super) fn compare_all(case: &Case, outputs: &Outputs) -> Vec<Judgement> {
    let recorded = case.op.tensors().iter().map(|tensor| tensor.name).filter(|name| name.starts_with("out."));
    recorded
        .map(|name| {
            let dtype = case.dtype(name);
            match outputs.get(name) {
                None => Judgement::failed(name, dtype, format!("{name} was not computed")),
                Some(Computed::Floats(x)) => {
                    let reference = case.floats(&name.replacen("out.", "ref.", 1));
                    let out = case.floats(name);
                    compare::floats(name, dtype, case.shape(name), case.tolerance, x, &out, &reference)
                }
                Some(Computed::Integers(x)) if case.op == Op::DsaSelect => selection::judge(
                    case.letters.get("K"),
                    &case.elements::<i32>("in.positions"),
                    &case.elements::<f32>("ref.scores"),
                    case.tolerance.atol,
                    x,
                    &case.elements::<i32>(name),
                ),
                Some(Computed::Integers(x)) => {
                    compare::integers(name, case.shape(name), x, &case.elements::<i32>(name))
                }
            }
        })
        .collect()
}

/// A fault is one line, whatever a file put into it, and no control character reaches a terminal.
fn one_line(text: &str) -> String {
    const MOST: usize = 400;
    let mut line: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(MOST).collect();
    if text.chars().count() > MOST {
        line.push_str("...");
    }
    line
}
