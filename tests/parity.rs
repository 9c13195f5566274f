//! `mstar parity` as a program: recorded cases, hostile files, verdicts, exit codes, dumps, devices compared.

#[path = "parity/across.rs"]
mod across;
#[path = "parity/built.rs"]
mod built;
#[path = "parity/hostile.rs"]
mod hostile;
#[path = "parity/recorded.rs"]
mod recorded;
#[path = "parity/verdicts.rs"]
mod verdicts;
