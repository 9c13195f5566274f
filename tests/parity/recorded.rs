//! Every recorded case, through the oracle and through the backends that are built.

use std::path::{Path, PathBuf};

use crate::built::{Run, mstar, mstar_with};

/// The folder of recorded cases, or none, said aloud.
fn recorded() -> Option<PathBuf> {
    let named = std::env::var_os("MSTAR_REFERENCE").map(PathBuf::from);
    let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/reference");
    let folder = named.clone().unwrap_or(beside);
    if folder.is_dir() {
        return Some(folder);
    }
    assert!(named.is_none(), "MSTAR_REFERENCE names {}, which is not a folder", folder.display());
    eprintln!("SKIPPED: no recorded cases at {}; MSTAR_REFERENCE=DIR names them", folder.display());
    None
}

fn passes_all(run: &Run, cases: usize) {
    let failed: Vec<String> = run
        .cases()
        .iter()
        .filter(|(_, case)| case["verdict"] != "pass")
        .map(|(name, case)| format!("{name}: {case}"))
        .collect();
    assert_eq!((run.code, failed.as_slice()), (0, [].as_slice()), "{}", run.stderr);
    assert_eq!(run.cases().len(), cases);
}

#[test]
fn every_recorded_case_of_every_op_passes_through_the_oracle() {
    let Some(folder) = recorded() else { return };
    for (op, cases) in [
        ("paged", 37),
        ("cross", 8),
        ("mla", 14),
        ("dense", 17),
        ("flex", 13),
        ("ring", 6),
        ("dsa_select", 18),
        ("dsa_attend", 14),
    ] {
        let folder = folder.join(op);
        passes_all(&mstar(["--backend", "reference", "--json", folder.to_str().unwrap()]), cases);
    }
}

/// The cases of `ops`, by the backends that were built, on every instruction set that this machine has.
#[cfg(any(feature = "paged", feature = "dense", feature = "flex"))]
fn passes_on_every_instruction_set(ops: &[&str], cases: usize) {
    let Some(folder) = recorded() else { return };
    let folders: Vec<String> = ops.iter().map(|op| folder.join(op).to_str().unwrap().to_owned()).collect();
    let args = || std::iter::once("--json").chain(folders.iter().map(String::as_str));
    passes_all(&mstar(args()), cases);
    for isa in ["portable", "avx2", "avx512", "avx512bf16"] {
        let run = mstar_with("MSTAR_ISA", isa, args());
        if run.code == 2 && run.stdout.is_empty() && run.stderr.contains("MSTAR_ISA") {
            assert_ne!(isa, "portable", "{}", run.stderr);
            eprintln!("SKIPPED {isa}: {}", run.stderr.trim());
            continue;
        }
        passes_all(&run, cases);
    }
}

#[cfg(feature = "paged")]
#[test]
fn every_recorded_paged_and_cross_case_passes_on_every_instruction_set() {
    passes_on_every_instruction_set(&["paged", "cross"], 45);
}

#[cfg(feature = "dense")]
#[test]
fn every_recorded_dense_case_passes_on_every_instruction_set() {
    passes_on_every_instruction_set(&["dense"], 17);
}

#[cfg(feature = "flex")]
#[test]
fn every_recorded_flex_and_ring_case_passes_on_every_instruction_set() {
    passes_on_every_instruction_set(&["flex", "ring"], 19);
}

#[test]
fn operations_without_a_kernel_are_unsupported_and_never_passed() {
    let Some(folder) = recorded() else { return };
    let folder = folder.join("mla");
    let run = mstar(["--json", folder.to_str().unwrap()]);
    let verdicts: Vec<_> = run.cases().into_values().map(|case| case["verdict"].clone()).collect();
    if verdicts.iter().any(|verdict| verdict == "unsupported") {
        assert_eq!(run.code, 2);
        assert!(run.stderr.contains("--backend reference"), "{}", run.stderr);
    } else {
        passes_all(&run, 14);
    }
}
