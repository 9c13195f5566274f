//! Determinism and batch invariance: what changes no bit of any output.

use crate::program::{run, spec};

const BASE: [&str; 6] = [
    "--set",
    "resources.kv.prefix_cache=false",
    "--set",
    "workload.requests=8",
    "--set",
    "workload.output_len=6",
];

fn digest(more: &[&str]) -> String {
    run(&spec("quickstart.yaml"), &[&BASE[..], more].concat()).good().digest().to_owned()
}

#[test]
fn one_thread_and_two_give_the_same_bits_and_so_does_running_again() {
    let one = digest(&["--threads", "1"]);
    assert_eq!(one, digest(&["--threads", "2"]));
    assert_eq!(one, digest(&["--threads", "2"]));
    assert_ne!(one, digest(&["--set", "seed=8"]), "another seed is another run");
}

#[test]
fn f40_neighbours_padding_and_plans_made_ahead_change_no_bit() {
    let base = digest(&[]);
    for more in [
        &["--set", "workload.max_batch=1"][..],
        &["--set", "workload.max_batch=7"],
        &["--set", "workload.arrivals=all_at_once"],
        &["--set", "workload.preplan=true"],
        &["--set", "graph={ buckets: [1, 3, 8], slots: 2 }"],
        &["--set", "graph={ buckets: [8], slots: 2 }", "--set", "workload.preplan=true"],
        &["--set", "resources.kv.max_num_pages=700"],
    ] {
        assert_eq!(digest(more), base, "{more:?}");
    }
}

#[test]
fn a_decoder_over_contexts_has_the_same_bits_padded_to_buckets() {
    let run = |more: &[&str]| {
        let small = [
            "--set",
            "workload.requests=5",
            "--set",
            "workload.output_len={ uniform: [3, 9] }",
            "--set",
            "workload.context_len=150",
            "--verify",
            "1",
        ];
        run(&spec("whisper-cross.yaml"), &[&small[..], more].concat()).good()
    };
    let eager = run(&[]);
    assert_eq!((eager.number("verify.failed"), eager.number("steps.padded")), (0, 0));
    // Steps that fill their bucket, steps that leave rows over, and both planned ahead.
    for more in [
        &["--set", "graph={ buckets: [1, 2, 3, 4], slots: 2 }"][..],
        &["--set", "graph={ buckets: [7], slots: 1 }"],
        &["--set", "graph={ buckets: [2, 4], slots: 2 }", "--set", "workload.preplan=true"],
    ] {
        let padded = run(more);
        assert_eq!(padded.digest(), eager.digest(), "{more:?}");
        assert!(padded.number("steps.padded") > 0, "{more:?}");
        assert_eq!((padded.number("verify.failed"), padded.number("requests.finished")), (0, 5), "{more:?}");
    }
}

#[test]
fn retention_gives_pages_back_and_changes_no_bit() {
    let window = ["--set", "model.window_left=40", "--verify", "0.3"];
    let kept = run(&spec("quickstart.yaml"), &[&BASE[..], &window].concat()).good();
    let retention = [&BASE[..], &window, &["--set", "resources.kv.retention=48"]].concat();
    let given_back = run(&spec("quickstart.yaml"), &retention).good();
    assert_eq!(kept.digest(), given_back.digest());
    assert_eq!(given_back.number("verify.failed"), 0);
}
