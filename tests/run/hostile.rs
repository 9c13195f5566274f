//! Arguments, specs and traces that are refused: exit code 2, one line, no panic, nothing written over.

use std::path::Path;

use crate::program::{Ran, run, run_in, spec};

fn refused(ran: &Ran, parts: &[&str]) {
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    assert!(!ran.stderr.contains("panicked"), "{}", ran.stderr);
    for part in parts {
        assert!(ran.stderr.contains(part), "`{part}` is missing from: {}", ran.stderr);
    }
}

#[test]
fn f36_what_is_wrong_with_an_argument_or_a_spec_is_said() {
    let quick = spec("quickstart.yaml");
    refused(&run(Path::new("no-such-spec.yaml"), &[]), &["no-such-spec.yaml"]);
    refused(&run(&quick, &["--verify", "1.5"]), &["--verify", "0 to 1"]);
    refused(&run(&quick, &["--verify", "nan"]), &["--verify"]);
    refused(&run(&quick, &["--threads", "0"]), &["--threads"]);
    refused(&run(&quick, &["--threads", "100000"]), &["--threads", "1024"]);
    refused(&run(&quick, &["--set", "workload.max_bach=3"]), &["max_bach", "max_batch"]);
    refused(&run(&quick, &["--device", "gpu"]), &["--device", "gpu"]);
    refused(&run(&quick, &["--csv", "/no/such/directory/x.csv"]), &["x.csv"]);
}

#[test]
fn a_trace_that_cannot_be_read_is_named_with_its_line_and_column() {
    let dir = tempfile::tempdir().expect("a directory");
    let good = "{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 2, \"hash_ids\": [1, 2]}\n";
    let cases = [
        ("", "empty"),
        ("{\"timestamp\": 0}\n", "line 1"),
        (&format!("{good}{}", good.replace("[1, 2]", "[1]")), "line 2, column"),
        (&format!("{good}{good}{{"), "line 3, column"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,x,1\n", "line 2, column 21"),
        ("\u{0}\u{0}\u{0}", "line 1"),
    ];
    for (index, (text, part)) in cases.into_iter().enumerate() {
        let path = dir.path().join(format!("trace-{index}"));
        std::fs::write(&path, text).expect("a file");
        let set = format!("workload.file={}", path.display());
        let ran = run(&spec("mooncake-prefix.yaml"), &["--set", &set]);
        refused(&ran, &[part, &format!("trace-{index}")]);
    }
    let missing = run(&spec("mooncake-prefix.yaml"), &["--set", "workload.file=nowhere.jsonl"]);
    refused(&missing, &["nowhere.jsonl", "MSTAR_DATA"]);
}

#[test]
fn mstar_data_points_a_spec_at_another_trace() {
    let dir = tempfile::tempdir().expect("a directory");
    let line = "{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 9, \"hash_ids\": [1, 2]}\n";
    std::fs::write(dir.path().join("conversation_trace.jsonl"), line.repeat(3)).expect("a file");
    let ran = run_in(&spec("mooncake-prefix.yaml"), &["--verify", "1"], Some(dir.path())).good();
    assert_eq!((ran.number("requests.total"), ran.number("requests.finished")), (3, 3));
}

#[test]
fn two_files_of_a_run_that_are_one_are_refused_before_anything_is_written() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = |name: &str| dir.path().join(name).display().to_string();
    let mine = dir.path().join("mine.yaml");
    std::fs::copy(spec("quickstart.yaml"), &mine).expect("a copy");
    let before = std::fs::read(&mine).expect("the copy");
    std::fs::create_dir(dir.path().join("sub")).expect("a folder");
    let (new, same) = (at("x.out"), at("sub/../x.out"));
    refused(&run(&mine, &["--csv", &new, "--plot", &same]), &["--plot: ", "x.out is also --csv"]);
    // The runner's own --report.
    refused(&run(&mine, &["--plot", "report.json"]), &["--plot: ", "report.json is also --report"]);
    refused(&run(&mine, &["--csv", &at("sub/../mine.yaml")]), &["--csv: ", "mine.yaml is also the spec"]);
    assert!(!dir.path().join("x.out").exists());
    assert_eq!(std::fs::read(&mine).expect("the spec"), before);

    let line = "{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 2, \"hash_ids\": [1, 2]}\n";
    std::fs::write(at("trace.jsonl"), line).expect("a trace");
    let set = format!("workload.file={}", at("trace.jsonl"));
    let ran = run(&spec("mooncake-prefix.yaml"), &["--set", &set, "--plot", &at("sub/../trace.jsonl")]);
    refused(&ran, &["--plot: ", "trace.jsonl is also the trace"]);
    assert_eq!(std::fs::read_to_string(at("trace.jsonl")).expect("the trace"), line);
    // Nothing is lost where nothing is kept.
    run(&mine, &["--csv", "/dev/null", "--plot", "/dev/null", "--steps", "2"]).good();
}
