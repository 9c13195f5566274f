//! Every recorded case, through the oracle and through the backends that are built.

use std::path::{Path, PathBuf};

use crate::built::{Run, mstar};

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
