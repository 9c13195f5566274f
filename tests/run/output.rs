//! What a run writes: the table, the documented report, the CSV, the timeline.

use serde_json::Value;

use crate::program::{root, run, spec};

#[test]
fn the_table_fits_80_columns_and_has_no_escapes_when_piped() {
    let ran = run(&spec("quickstart.yaml"), &["--verify", "0.1", "--steps", "20"]).good();
    assert!(ran.stdout.contains("stopped after 20 steps"), "{}", ran.stdout);
    assert!(!ran.stdout.contains('\u{1b}') && !ran.stderr.contains('\u{1b}'));
    for line in ran.stdout.lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
    assert!(ran.number("requests.unfinished") > 0 && ran.report["steps"]["stopped_early"] == true);
}

/// Every key of the report, with the path of its section; entries of lists count once.
fn keys(value: &Value, path: &str, all: &mut Vec<String>) {
    match value {
        // Keys of this map are names of kernels.
        Value::Object(_) if path.ends_with("kernels") => {}
        Value::Object(map) => {
            for (key, value) in map {
                all.push(key.clone());
                keys(value, &format!("{path}.{key}"), all);
            }
        }
        Value::Array(list) => list.iter().for_each(|value| keys(value, path, all)),
        _ => {}
    }
}

#[test]
fn every_key_of_the_report_is_documented() {
    let docs = std::fs::read_to_string(root().join("docs/report.md")).expect("docs/report.md");
    let tight = ["--set", "workload.requests=7", "--set", "workload.output_len=60", "--verify", "0.1"];
    let indexed = ["--set", "resources.kv.prefix_cache=true"];
    let ran = run(&spec("tight-memory-offload.yaml"), &[&tight[..], &indexed].concat()).good();
    let mut all = Vec::new();
    keys(&ran.report, "", &mut all);
    all.sort();
    all.dedup();
    assert!(all.len() > 60, "{all:?}");
    for key in &all {
        assert!(docs.contains(&format!("`{key}`")), "docs/report.md does not mention `{key}`");
    }
    let named = ran.report["events"].as_array().expect("a log").iter().filter_map(|e| e["event"].as_str());
    for event in named.collect::<std::collections::BTreeSet<_>>() {
        assert!(docs.contains(&format!("`{event}`")), "docs/report.md does not mention the event `{event}`");
    }
    assert_eq!(ran.report["schema"], "mstar.run/1");
    assert!(docs.contains("mstar.run/1"));
}

#[test]
fn csv_has_a_line_a_step_and_the_timeline_is_a_drawing() {
    let files = ["--csv", "steps.csv", "--plot", "steps.svg", "--steps", "15", "--quiet"];
    let ran = run(&spec("quickstart.yaml"), &files).good();
    let csv = std::fs::read_to_string(ran.dir.path().join("steps.csv")).expect("a CSV");
    let lines: Vec<&str> = csv.lines().collect();
    assert_eq!(lines.len(), 16);
    let columns = lines[0].split(',').count();
    assert!(lines.iter().all(|line| line.split(',').count() == columns));
    assert!(lines[1].starts_with("0,prefill,"), "{}", lines[1]);
    let svg = std::fs::read_to_string(ran.dir.path().join("steps.svg")).expect("a drawing");
    assert!(svg.starts_with("<svg") && svg.contains("15 steps"));
}

/// `mstar ARGS` where stdout and stderr go to the files named.
#[cfg(target_os = "linux")]
fn into(args: &[&str], stdout: &str, stderr: &str) -> Option<i32> {
    let open = |path: &str| std::fs::OpenOptions::new().write(true).open(path).expect("a device");
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_mstar"));
    let status = command.args(args).stdout(open(stdout)).stderr(open(stderr)).status();
    status.expect("the program starts").code()
}

#[cfg(target_os = "linux")]
#[test]
fn a_stderr_that_takes_nothing_changes_no_exit_code() {
    let quick = spec("quickstart.yaml").display().to_string();
    let (null, full) = ("/dev/null", "/dev/full");
    assert_eq!(into(&["run", &quick, "--steps", "5"], null, full), Some(0));
    for refused in
        [&["run", "no-such-spec.yaml"][..], &["run", "--no-such"], &["parity", "no-such-case"], &[]]
    {
        assert_eq!(into(refused, null, full), Some(2), "{refused:?}");
    }
    // A table that is lost is a fault, and no panic.
    assert_eq!(into(&["run", &quick, "--steps", "5"], full, full), Some(2));
}

#[cfg(target_os = "linux")]
#[test]
fn a_file_that_cannot_be_written_loses_neither_the_table_nor_the_other_files() {
    for (option, others) in [("--csv", ["--plot", "a.svg"]), ("--plot", ["--csv", "a.csv"])] {
        // Steps enough for the CSV to fill its buffer long before the end.
        let ran = run(&spec("quickstart.yaml"), &[&[option, "/dev/full"][..], &others].concat());
        assert_eq!(ran.code, Some(2), "{}", ran.stderr);
        assert!(ran.stderr.contains(&format!("mstar: {option}: cannot write: No space")), "{}", ran.stderr);
        assert!(ran.stdout.contains("digest"), "{}", ran.stdout);
        assert!(ran.number("requests.finished") > 0);
        let other = std::fs::metadata(ran.dir.path().join(others[1])).expect("the other file");
        assert!(other.len() > 1000, "{}", other.len());
    }
    let quick = spec("quickstart.yaml").display().to_string();
    let args = ["run", &quick, "--steps", "5", "--report", "/dev/full"];
    let output =
        std::process::Command::new(env!("CARGO_BIN_EXE_mstar")).args(args).output().expect("it starts");
    let (said, table) = (String::from_utf8_lossy(&output.stderr), String::from_utf8_lossy(&output.stdout));
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(
        said.contains("mstar: --report: cannot write: No space") && table.contains("digest"),
        "{said}{table}"
    );
}

/// Names in a folder, but for the runner's own report.
fn names(dir: &std::path::Path) -> Vec<String> {
    let all = std::fs::read_dir(dir).expect("a folder");
    let mut all: Vec<_> =
        all.map(|e| e.expect("an entry").file_name().into_string().expect("text")).collect();
    all.sort();
    all
}

#[test]
fn an_earlier_report_outlives_a_run_that_is_refused_or_given_up() {
    let dir = tempfile::tempdir().expect("a folder");
    let report = dir.path().join("report.json");
    std::fs::write(&report, "earlier").expect("a report");
    let quick = spec("quickstart.yaml").display().to_string();
    let csv = dir.path().join("none/steps.csv").display().to_string();
    for extra in [&["--set", "workload.requests=0"][..], &["--csv", &csv]] {
        let args = [&["run", &quick, "--report", report.to_str().expect("text")], extra].concat();
        let output =
            std::process::Command::new(env!("CARGO_BIN_EXE_mstar")).args(args).output().expect("it starts");
        assert_eq!(output.status.code(), Some(2));
        assert_eq!(std::fs::read_to_string(&report).expect("a report"), "earlier");
        assert_eq!(names(dir.path()), ["report.json"]);
    }
}

#[test]
fn a_bench_that_cannot_save_its_results_times_nothing() {
    let args = ["bench", "merge", "--quick", "--json", "/no/such/directory/x.json"];
    let output =
        std::process::Command::new(env!("CARGO_BIN_EXE_mstar")).args(args).output().expect("it starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(
        said.contains("/no/such/directory/x.json: cannot be written") && output.stdout.is_empty(),
        "{said}"
    );
}

#[test]
fn the_report_and_the_terminal_name_the_trace_that_was_read() {
    let dir = tempfile::tempdir().expect("a folder");
    let line = "{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 9, \"hash_ids\": [1, 2]}\n";
    let here = dir.path().join("conversation_trace.jsonl");
    std::fs::write(&here, line).expect("a trace");
    let few = ["--set", "workload.requests=1"];
    let told = |args: &[&str], data: Option<&std::path::Path>, expected: [&str; 3]| {
        let ran = crate::program::run_in(&spec("mooncake-prefix.yaml"), args, data).good();
        let trace = &ran.report["trace"];
        for (key, expected) in ["file", "named_by", "found"].into_iter().zip(expected) {
            let told = trace[key].as_str().expect("text");
            assert!(told.ends_with(expected), "{key} is {told}, not {expected}");
        }
        let lines: Vec<&str> = ran.stderr.lines().filter(|line| line.starts_with("mstar: trace: ")).collect();
        assert_eq!(lines.len(), 1, "{}", ran.stderr);
        assert!(lines[0].contains(expected[0]) && lines[0].contains(expected[2]), "{}", lines[0]);
    };
    let name = "conversation_trace.jsonl";
    told(&few, Some(dir.path()), [here.to_str().expect("text"), "the spec", "in MSTAR_DATA"]);
    told(&few, None, [&format!("specs/data/{name}"), "the spec", "in data beside the spec"]);
    let empty = tempfile::tempdir().expect("a folder");
    told(
        &few,
        Some(empty.path()),
        [&format!("specs/data/{name}"), "the spec", "; MSTAR_DATA does not have it"],
    );
    let set = format!("workload.file={}", here.display());
    told(&[&few[..], &["--set", &set]].concat(), None, [here.to_str().expect("text"), "--set", "as named"]);
    let drawn = run(&spec("quickstart.yaml"), &["--steps", "1"]).good();
    assert!(drawn.report["trace"].is_null() && !drawn.stderr.contains("trace:"), "{}", drawn.stderr);
}
