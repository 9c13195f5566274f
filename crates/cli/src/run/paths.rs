//! Every file of a run in a place of its own: no output over another, nor over what the run reads.

use std::path::{Path, PathBuf};

use anyhow::bail;

use super::args::Arguments;
use super::workload::trace::Located;

/// Checks that `--report`, `--csv` and `--plot` name different files, none of them the spec or its trace. What is no file,
/// such as `/dev/null`, may be named twice: nothing is lost there.
///
/// # Errors
/// The two that are one file.
pub(crate) fn distinct(args: &Arguments, trace: Option<&Located>) -> anyhow::Result<()> {
    let mut seen: Vec<(&str, PathBuf)> = vec![("the spec", resolved(&args.spec.spec))];
    seen.extend(trace.map(|located| ("the trace", resolved(&located.path))));
    for (option, path) in [("--report", &args.report), ("--csv", &args.csv), ("--plot", &args.plot)] {
        let Some(path) = path else { continue };
        let real = resolved(path);
        if real.exists() && !real.is_file() {
            continue;
        }
        if let Some((other, _)) = seen.iter().find(|(_, taken)| *taken == real) {
            bail!("{option}: {} is also {other}; name another file", path.display());
        }
        seen.push((option, real));
    }
    Ok(())
}

/// `path` without links and dots; a file that is not there yet, in its folder without them.
fn resolved(path: &Path) -> PathBuf {
    let in_folder = || {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Some(folder.canonicalize().ok()?.join(path.file_name()?))
    };
    path.canonicalize().ok().or_else(in_folder).unwrap_or_else(|| path.to_owned())
}
