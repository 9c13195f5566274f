//! The recorded operations: what each case of one must hold, and how it is run.

mod dense;
mod dsa_attend;
mod dsa_select;
mod flex;
mod indices;
mod mla;
mod paged;
mod ring;
#[cfg(any(feature = "paged", feature = "mla", feature = "dense", feature = "flex", feature = "dsa"))]
mod unwritten;

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Result, bail};
use half::{bf16, f16};
use mstar_kernels::{DType, Element, reference};

use super::case::Case;
use super::params::Params;
use super::place::Place;
use super::shapes::{Letters, Tensor};

/// A recorded operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Op {
    Paged,
    Cross,
    Mla,
    Dense,
    Flex,
    Ring,
    DsaSelect,
    DsaAttend,
}

/// What ran a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Engine {
    /// The f64 oracle.
    Reference,
    /// The op's own backend, which was compiled in.
    Fast,
}

/// What a run computed, in the outputs' own types.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Computed {
    /// Floats, already rounded to the output's dtype.
    Floats(Vec<f32>),
    /// Integers.
    Integers(Vec<i32>),
}

/// What a run computed, by the name of the output.
pub(super) type Outputs = BTreeMap<&'static str, Computed>;

/// Why a case was not run, although it could be read.
#[derive(Debug)]
pub(super) enum NotRun {
    /// No backend for it here.
    #[allow(dead_code, reason = "a build with every backend never says it")]
    Unsupported(String),
    /// The backend refused it.
    Failed(String),
}

impl Op {
    const ALL: [Op; 8] =
        [Op::Paged, Op::Cross, Op::Mla, Op::Dense, Op::Flex, Op::Ring, Op::DsaSelect, Op::DsaAttend];

    /// The name in a case's metadata.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Op::Paged => "paged",
            Op::Cross => "cross",
            Op::Mla => "mla",
            Op::Dense => "dense",
            Op::Flex => "flex",
            Op::Ring => "ring",
            Op::DsaSelect => "dsa_select",
            Op::DsaAttend => "dsa_attend",
        }
    }

    /// The op of that name.
    pub(super) fn parse(name: &str) -> Result<Op> {
        if let Some(op) = Op::ALL.into_iter().find(|op| op.name() == name) {
            return Ok(op);
        }
        let known: Vec<&str> = Op::ALL.iter().map(|op| op.name()).collect();
        bail!("unknown op {name:?}: this program knows {}", known.join(", "))
    }

    /// The Cargo feature of the op's backend.
    pub(super) const fn family(self) -> &'static str {
        match self {
            Op::Paged | Op::Cross => "paged",
            Op::Mla => "mla",
            Op::Dense => "dense",
            Op::Flex | Op::Ring => "flex",
            Op::DsaSelect | Op::DsaAttend => "dsa",
        }
    }

    /// Every tensor of the op.
    pub(super) const fn tensors(self) -> &'static [Tensor] {
        match self {
            Op::Paged | Op::Cross => paged::TENSORS,
            Op::Mla => mla::TENSORS,
            Op::Dense => dense::TENSORS,
            Op::Flex => flex::TENSORS,
            Op::Ring => ring::TENSORS,
            Op::DsaSelect => dsa_select::TENSORS,
            Op::DsaAttend => dsa_attend::TENSORS,
        }
    }

    /// The extents that the parameters fix.
    pub(super) fn letters(self, params: &Params) -> Result<Letters> {
        match self {
            Op::Paged | Op::Cross => paged::letters(params),
            Op::Mla => mla::letters(params),
            Op::Dense => dense::letters(params),
            Op::Flex => flex::letters(params),
            Op::Ring => ring::letters(params),
            Op::DsaSelect => dsa_select::letters(params),
            Op::DsaAttend => dsa_attend::letters(params),
        }
    }

    /// Holds parameters and index arrays against what the op allows, whoever will run it.
    pub(super) fn check(self, case: &Case) -> Result<()> {
        lse_in_base_2(&case.params)?;
        match self {
            Op::Paged | Op::Cross => paged::Inputs::new(case).map(drop),
            Op::Mla => mla::Inputs::new(case).map(drop),
            Op::Dense => dense::Inputs::new(case).map(drop),
            Op::Flex => flex::Inputs::new(case).map(drop),
            Op::Ring => ring::Inputs::new(case).map(drop),
            Op::DsaSelect => dsa_select::check(case),
            Op::DsaAttend => dsa_attend::Inputs::new(case).map(drop),
        }
    }

    /// Runs a case.
    pub(super) fn run(self, case: &Case, engine: Engine, place: &Place) -> Result<Outputs, NotRun> {
        let computed = match (engine, case.dtype) {
            (Engine::Fast, _) => return self.fast(case, place),
            (Engine::Reference, DType::Bf16) => self.reference::<bf16>(case),
            (Engine::Reference, DType::F16) => self.reference::<f16>(case),
            (Engine::Reference, _) => self.reference::<f32>(case),
        };
        computed.map_err(|error| NotRun::Failed(error.to_string()))
    }

    fn reference<E: Element + reference::Real>(self, case: &Case) -> mstar_kernels::Result<Outputs> {
        match self {
            Op::Paged | Op::Cross => paged::reference::<E>(case),
            Op::Mla => mla::reference::<E>(case),
            Op::Dense => dense::reference::<E>(case),
            Op::Flex => flex::reference::<E>(case),
            Op::Ring => ring::reference::<E>(case),
            Op::DsaSelect => dsa_select::reference::<E>(case),
            Op::DsaAttend => dsa_attend::reference::<E>(case),
        }
    }

    fn fast(self, case: &Case, place: &Place) -> Result<Outputs, NotRun> {
        match self {
            Op::Paged | Op::Cross => paged::fast(case, place),
            Op::Mla => mla::fast(case, place),
            Op::Dense => dense::fast(case, place),
            Op::Flex => flex::fast(case, place),
            Op::Ring => ring::fast(case, place),
            Op::DsaSelect => dsa_select::fast(case, place),
            Op::DsaAttend => dsa_attend::fast(case, place),
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why a backend that this program was built without cannot run a case.
#[cfg(not(all(feature = "paged", feature = "mla", feature = "dense", feature = "flex", feature = "dsa")))]
fn not_compiled(op: Op) -> String {
    format!("built without feature `{0}`: rebuild with --features {0}, or --backend reference", op.family())
}

/// Whether the case's lse is recorded in base 2 (`params.lse_base: 2`); ours is natural and converted once.
fn lse_in_base_2(params: &Params) -> Result<bool> {
    match params.number_or_none("lse_base")? {
        None => Ok(false),
        Some(2.0) => Ok(true),
        Some(base) if (base - std::f64::consts::E).abs() < 1e-6 => Ok(false),
        Some(base) => bail!("params.lse_base = {base}: must be 2, or absent for the natural logarithm"),
    }
}

/// `o` and `lse` of an attention op, in the case's dtype and log base.
fn attended(case: &Case, attended: &reference::Attended) -> Outputs {
    let base_2 = lse_in_base_2(&case.params).expect("checked when the case was read");
    let to_base = if base_2 { std::f64::consts::LOG2_E } else { 1.0 };
    let lse = attended.lse.iter().map(|&lse| (lse * to_base) as f32).collect();
    Outputs::from([
        ("out.o", Computed::Floats(rounded(case.dtype, &attended.o))),
        ("out.lse", Computed::Floats(lse)),
    ])
}

/// f64 results as an output of that dtype would hold them.
pub(super) fn rounded(dtype: DType, values: &[f64]) -> Vec<f32> {
    let round = |&x: &f64| match dtype {
        DType::Bf16 => bf16::from_f64(x).to_f32(),
        DType::F16 => f16::from_f64(x).to_f32(),
        _ => x as f32,
    };
    values.iter().map(round).collect()
}

/// Refuses query heads that the key heads do not divide.
fn group(letters: &Letters) -> Result<()> {
    let (h, g) = (letters.get("H"), letters.get("G"));
    if g == 0 || h == 0 || !h.is_multiple_of(g) {
        bail!("{h} query heads over {g} key heads: H must be a positive multiple of G");
    }
    Ok(())
}

/// Refuses extents that must not be 0.
fn positive(letters: &Letters, names: &[&str]) -> Result<()> {
    match names.iter().find(|name| letters.get(name) == 0) {
        Some(name) => bail!("{name} = 0: must be at least 1"),
        None => Ok(()),
    }
}
