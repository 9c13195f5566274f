//! The specs that come with the project, each as it stands.

use crate::program::{root, run, spec};

#[test]
fn every_spec_starts_as_it_stands_and_every_row_is_right() {
    let mut names: Vec<_> = std::fs::read_dir(root().join("specs"))
        .expect("specs/")
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.ends_with(".yaml"))
        .collect();
    names.sort();
    assert!(names.len() >= 10, "{names:?}");
    for name in names {
        let ran = run(&spec(&name), &["--steps", "12", "--verify", "0.6", "--quiet"]).good();
        assert!(ran.number("verify.checks") > 0 && ran.number("verify.failed") == 0, "{name}");
        assert!(ran.stdout.is_empty() && ran.stderr.is_empty(), "{name}: {}{}", ran.stdout, ran.stderr);
    }
}

#[test]
fn the_quickstart_runs_to_its_end() {
    let ran = run(&spec("quickstart.yaml"), &["--verify", "0.05"]).good();
    assert_eq!(ran.number("requests.finished"), ran.number("requests.total"));
    assert!(ran.number("tokens.prefix_hits") > 0);
    assert!(ran.stdout.contains("attend") && ran.stdout.contains("digest"), "{}", ran.stdout);
}

#[test]
fn guidance_forks_and_drafted_trees_are_right_to_the_end() {
    let small = ["--verify", "1", "--set", "workload.requests=2", "--set", "workload.output_len=3"];
    let forks = run(&spec("cfg-forks.yaml"), &small).good();
    assert_eq!((forks.number("verify.failed"), forks.number("requests.finished")), (0, 2));
    assert!(forks.number("cache.copies") > 0, "forks copy their partial page when they part");
    let tree =
        run(&spec("speculative-tree.yaml"), &[&small[..4], &["--set", "workload.output_len=20"]].concat())
            .good();
    assert_eq!((tree.number("verify.failed"), tree.number("requests.finished")), (0, 2));
    let cross =
        run(&spec("whisper-cross.yaml"), &[&small[..4], &["--set", "workload.output_len=6"]].concat()).good();
    assert_eq!((cross.number("verify.failed"), cross.number("requests.finished")), (0, 2));
}

#[test]
fn contexts_and_passes_do_not_keep_requests_from_sharing_steps() {
    for name in ["whisper-cross.yaml", "cfg-forks.yaml"] {
        let ran = run(&spec(name), &["--csv", "steps.csv", "--steps", "30", "--quiet"]).good();
        let csv = std::fs::read_to_string(ran.dir.path().join("steps.csv")).expect("a CSV");
        let rows = csv.lines().skip(1).filter_map(|line| line.split(',').nth(2)?.parse::<usize>().ok());
        assert!(rows.max() >= Some(4), "{name}: no step has four rows\n{csv}");
    }
}
