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
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> ExitCode {
        ExitCode::from(match exit {
            Exit::Success => 0,
            Exit::CheckFailed => 1,
            Exit::Refused => 2,
        })
    }
}

/// What `--help` says of them.
pub(crate) const HELP: &str = "\
Exit codes: 0 done; 1 done, and a check failed; 2 the input was refused.";
