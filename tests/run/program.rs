//! Running the program and reading what it said.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// The repository's root.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace is there")
}

/// A spec that comes with the project.
pub(crate) fn spec(name: &str) -> PathBuf {
    root().join("specs").join(name)
}

/// What a run left behind.
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    /// The JSON report; null when none was written.
    pub(crate) report: Value,
    /// The directory of its files.
    pub(crate) dir: tempfile::TempDir,
}

impl Ran {
    /// The run's digest.
    pub(crate) fn digest(&self) -> &str {
        self.report["digest"].as_str().expect("a report")
    }

    /// A number of the report, by its path.
    pub(crate) fn number(&self, path: &str) -> u64 {
        let value = path.split('.').fold(&self.report, |value, key| &value[key]);
        value.as_u64().unwrap_or_else(|| panic!("{path} is {value}; {}", self.stderr))
    }

    /// The run, if it ended well.
    pub(crate) fn good(self) -> Ran {
        assert_eq!(self.code, Some(0), "stderr: {}\nstdout: {}", self.stderr, self.stdout);
        self
    }
}

/// Runs `mstar run SPEC ARGS --report ..` with `MSTAR_DATA` as given or unset.
pub(crate) fn run_in(spec: &Path, args: &[&str], data: Option<&Path>) -> Ran {
    let dir = tempfile::tempdir().expect("a directory for reports");
    let path = dir.path().join("report.json");
    let mut command = Command::new(env!("CARGO_BIN_EXE_mstar"));
    command.current_dir(dir.path()).arg("run").arg(spec).args(args).arg("--report").arg(&path);
    match data {
        Some(data) => command.env("MSTAR_DATA", data),
        None => command.env_remove("MSTAR_DATA"),
    };
    // Where it is compiled in, a run that names a device gets the emulated one.
    command.env("MSTAR_CUDA", "emulated");
    let output = command.output().expect("the program starts");
    let text = std::fs::read_to_string(&path).unwrap_or_default();
    Ran {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).expect("text"),
        stderr: String::from_utf8(output.stderr).expect("text"),
        report: serde_json::from_str(&text).unwrap_or(Value::Null),
        dir,
    }
}

/// As [`run_in`], without `MSTAR_DATA`.
pub(crate) fn run(spec: &Path, args: &[&str]) -> Ran {
    run_in(spec, args, None)
}
