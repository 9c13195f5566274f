//! A run that a signal ends: what was done is reported, what was there before is not lost.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use crate::program::spec;

/// A run of more steps than anybody waits for, once its first steps are done: its CSV goes to a pipe, line by line.
fn started(dir: &Path) -> (Child, BufReader<std::process::ChildStdout>) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mstar"));
    command.current_dir(dir).arg("run").arg(spec("quickstart.yaml"));
    // Long outputs for one request at a time: many small steps.
    for set in ["workload.requests=1000000", "workload.max_batch=1"] {
        command.args(["--set", set]);
    }
    command.args(["--report", "report.json", "--plot", "steps.svg", "--csv", "/dev/stdout", "--quiet"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let mut lines = BufReader::new(child.stdout.take().expect("piped"));
    for _ in 0..3 {
        let mut line = String::new();
        lines.read_line(&mut line).expect("a line of the CSV");
        assert!(!line.is_empty(), "the run ended by itself");
    }
    (child, lines)
}

fn send(child: &Child, signal: &str) {
    let sent = Command::new("kill").args([&format!("-{signal}"), &child.id().to_string()]).status();
    assert!(sent.expect("kill").success());
}

#[test]
fn a_signal_ends_the_run_after_its_step_and_the_report_says_so() {
    for (signal, code) in [("INT", 130), ("TERM", 143)] {
        let dir = tempfile::tempdir().expect("a folder");
        std::fs::write(dir.path().join("report.json"), "earlier").expect("a report");
        let (mut child, lines) = started(dir.path());
        let before = std::fs::read_to_string(dir.path().join("report.json")).expect("the earlier report");
        assert_eq!(before, "earlier");
        send(&child, signal);
        let rest = lines.lines().map(|line| line.expect("text")).collect::<Vec<_>>();
        let status = child.wait().expect("it ends");
        assert_eq!(status.code(), Some(code), "{signal}");
        let text = std::fs::read(dir.path().join("report.json")).expect("a report");
        let report: Value = serde_json::from_slice(&text).expect("JSON");
        assert_eq!(report["interrupted"], true);
        assert_eq!(report["steps"]["stopped_early"], true);
        assert!(report["requests"]["unfinished"].as_u64() > Some(0));
        // Two of the lines read at the start were steps, and every step has a line.
        assert_eq!(report["steps"]["total"].as_u64(), Some(2 + rest.len() as u64));
        assert!(rest.last().is_none_or(|line| line.split(',').count() == 16), "{rest:?}");
        let mut names: Vec<_> =
            dir.path().read_dir().expect("a folder").map(|e| e.expect("an entry").file_name()).collect();
        names.sort();
        assert_eq!(names, ["report.json", "steps.svg"]);
    }
}

#[test]
fn a_second_signal_ends_the_run_at_once_and_leaves_an_earlier_report() {
    let dir = tempfile::tempdir().expect("a folder");
    std::fs::write(dir.path().join("report.json"), "earlier").expect("a report");
    let mut command = Command::new(env!("CARGO_BIN_EXE_mstar"));
    command.current_dir(dir.path()).arg("run").arg(spec("quickstart.yaml")).args(["--report", "report.json"]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("it starts");
    // Said once the signals are taken, and before the machine's limits are measured, which takes its time.
    let mut lines = BufReader::new(child.stderr.take().expect("piped")).lines();
    assert!(lines.any(|line| line.expect("text").starts_with("mstar: memory: ")));
    let pid = child.id().to_string();
    let both = Command::new("sh").args(["-c", "kill -INT $0; sleep 0.02; kill -TERM $0", &pid]).status();
    assert!(both.expect("kill").success());
    assert_eq!(child.wait().expect("it ends").code(), Some(143));
    assert_eq!(std::fs::read_to_string(dir.path().join("report.json")).expect("a report"), "earlier");
    assert_eq!(dir.path().read_dir().expect("a folder").count(), 1);
}
