//! Which instructions this machine has, probed once, and which of them the kernels shall use.
//!
//! Every kernel has one portable body and several SIMD bodies. The choice is made at a kernel's entry by
//! asking [`Isa::current`], and travels down as a value; nothing below probes again. Bits may differ between
//! bodies, never within one, so the choice must not change while results are compared.

use std::cell::Cell;
use std::fmt;
use std::sync::OnceLock;

/// The variable that names the body to use: `avx512bf16`, `avx512`, `avx2`, `neon` or `portable`.
pub const ISA_VARIABLE: &str = "MSTAR_ISA";

/// A kernel body, by the instructions it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Isa {
    /// AVX-512 F, BW, DQ and VL with the BF16 dot products: bf16 operands are multiplied without widening.
    Avx512Bf16,
    /// AVX-512 F, BW, DQ and VL: arithmetic in f32.
    Avx512,
    /// AVX2 with FMA and F16C.
    Avx2Fma,
    /// Advanced SIMD of AArch64.
    Neon,
    /// Plain Rust, for any machine; the compiler vectorises what it can.
    Portable,
}

/// Why [`ISA_VARIABLE`] cannot be followed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IsaRefused {
    /// What the variable holds.
    pub requested: String,
    /// What would be accepted here, best first.
    pub supported: Vec<Isa>,
}

impl fmt::Display for IsaRefused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.supported.iter().map(|isa| isa.name()).collect();
        write!(f, "{ISA_VARIABLE}={}: this machine runs {}", self.requested, names.join(", "))
    }
}

impl std::error::Error for IsaRefused {}

thread_local! {
    static FORCED: Cell<Option<Isa>> = const { Cell::new(None) };
}

impl Isa {
    /// Every body, best first.
    const ALL: [Isa; 5] = [Isa::Avx512Bf16, Isa::Avx512, Isa::Avx2Fma, Isa::Neon, Isa::Portable];

    /// The name used in [`ISA_VARIABLE`], reports and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Avx512Bf16 => "avx512bf16",
            Isa::Avx512 => "avx512",
            Isa::Avx2Fma => "avx2",
            Isa::Neon => "neon",
            Isa::Portable => "portable",
        }
    }

    /// Whether this machine, and its operating system, run the body.
    pub fn is_supported(self) -> bool {
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => Isa::Avx512.is_supported() && is_x86_feature_detected!("avx512bf16"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                Isa::Avx2Fma.is_supported()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2Fma => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            #[allow(unreachable_patterns)]
            _ => false,
        }
    }

    /// The bodies that this machine runs, best first; [`Isa::Portable`] always ends the list.
    pub fn supported() -> &'static [Isa] {
        static SUPPORTED: OnceLock<([Isa; Isa::ALL.len()], usize)> = OnceLock::new();
        let (isas, count) = SUPPORTED.get_or_init(|| {
            let (mut isas, mut count) = ([Isa::Portable; Isa::ALL.len()], 0);
            for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
                isas[count] = isa;
                count += 1;
            }
            (isas, count)
        });
        &isas[..*count]
    }

    /// The body to use: the one forced on this thread by [`Isa::force`], else the one that
    /// [`ISA_VARIABLE`] names, else the best supported one. A variable that cannot be followed is passed
    /// over here; [`Isa::requested`] tells a program about it, so that it can refuse to start.
    pub fn current() -> Isa {
        static CHOSEN: OnceLock<Isa> = OnceLock::new();
        FORCED.get().unwrap_or_else(|| {
            *CHOSEN.get_or_init(|| Isa::requested().ok().flatten().unwrap_or(Isa::supported()[0]))
        })
    }

    /// What [`ISA_VARIABLE`] asks for; `None` when it is unset or empty.
    ///
    /// # Errors
    /// [`IsaRefused`] when it names no body, or one that this machine does not run.
    pub fn requested() -> Result<Option<Isa>, IsaRefused> {
        match std::env::var_os(ISA_VARIABLE) {
            Some(name) if !name.is_empty() => Isa::parse(&name.to_string_lossy()).map(Some),
            _ => Ok(None),
        }
    }

    /// The supported body called `name`.
    ///
    /// # Errors
    /// [`IsaRefused`] when there is none of that name here.
    pub fn parse(name: &str) -> Result<Isa, IsaRefused> {
        let known = Isa::supported().iter().find(|isa| isa.name().eq_ignore_ascii_case(name));
        known
            .copied()
            .ok_or_else(|| IsaRefused { requested: name.to_owned(), supported: Isa::supported().to_vec() })
    }

    /// Makes [`Isa::current`] answer `isa` on this thread until the guard is dropped: tests and benches run
    /// every body on one machine. Kernels ask on the thread that enters them, not on their workers.
    ///
    /// # Errors
    /// [`IsaRefused`] when this machine does not run it.
    pub fn force(isa: Isa) -> Result<ForcedIsa, IsaRefused> {
        Isa::parse(isa.name())?;
        Ok(ForcedIsa { before: FORCED.replace(Some(isa)), not_send: std::marker::PhantomData })
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// While it lives, [`Isa::current`] answers what [`Isa::force`] was given, on the thread that made it.
#[derive(Debug)]
#[must_use = "the choice is undone when the guard is dropped"]
pub struct ForcedIsa {
    before: Option<Isa>,
    // The guard restores a thread-local, so it must be dropped where it was made.
    not_send: std::marker::PhantomData<*const ()>,
}

impl Drop for ForcedIsa {
    fn drop(&mut self) {
        FORCED.set(self.before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_portable_body_runs_everywhere_and_is_last() {
        assert_eq!(Isa::supported().last(), Some(&Isa::Portable));
        assert!(Isa::supported().iter().all(|isa| isa.is_supported()));
    }

    #[test]
    fn names_are_parsed_and_unknown_ones_are_refused_with_the_choice() {
        for &isa in Isa::supported() {
            assert_eq!(Isa::parse(isa.name()), Ok(isa));
        }
        let said = Isa::parse("sse9").unwrap_err().to_string();
        assert!(said.contains("MSTAR_ISA=sse9") && said.contains("portable"), "{said}");
    }

    #[test]
    fn forcing_nests_and_is_undone() {
        let natural = Isa::current();
        let outer = Isa::force(Isa::Portable).unwrap();
        for &isa in Isa::supported() {
            let _inner = Isa::force(isa).unwrap();
            assert_eq!(Isa::current(), isa);
        }
        assert_eq!(Isa::current(), Isa::Portable);
        drop(outer);
        assert_eq!(Isa::current(), natural);
    }
}
