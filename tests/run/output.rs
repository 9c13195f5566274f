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
