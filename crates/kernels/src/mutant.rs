//! Planted faults, by which the tests are tested.
//!
//! A line that a test must guard asks [`planted`] whether to go wrong. Without the feature `mutants` the answer
//! is the constant `false` and nothing of it is compiled. `tests/mutants.md` lists every fault with the test that
//! catches it; `tools/mutants.sh` runs them all.

/// Whether the fault `name` is planted: the feature `mutants` is on and `MSTAR_MUTANT` is `name`.
#[cfg(feature = "mutants")]
pub fn planted(name: &str) -> bool {
    use std::sync::OnceLock;
    static CHOSEN: OnceLock<Option<String>> = OnceLock::new();
    CHOSEN.get_or_init(|| std::env::var("MSTAR_MUTANT").ok()).as_deref() == Some(name)
}

/// Whether the fault `name` is planted: never, without the feature `mutants`.
#[cfg(not(feature = "mutants"))]
#[inline(always)]
pub const fn planted(_name: &str) -> bool {
    false
}
