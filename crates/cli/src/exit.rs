//! Exit codes.

use std::process::ExitCode;

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// 0: everything asked for was done, and every check passed.
    Success,
    /// 1: the work was done and a check failed: a parity case, a verified row.
    CheckFailed,
    /// 2: the input was refused, or could not be read: arguments, a spec, a recorded case, a trace.
    Refused,
    /// 130 after SIGINT, 143 after SIGTERM: it stopped early and in order, and what was done is told.
    Interrupted(u8),
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> ExitCode {
        ExitCode::from(match exit {
            Exit::Success => 0,
            Exit::CheckFailed => 1,
            Exit::Refused => 2,
            Exit::Interrupted(code) => code,
        })
    }
}

/// What `--help` says of them.
pub(crate) const HELP: &str = "\
Exit codes: 0 done; 1 done, and a check failed; 2 the input was refused;
130 or 143 interrupted (SIGINT, SIGTERM): run ends after its step and reports.";
