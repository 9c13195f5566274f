//! Worlds of frames: right through every wrap of the ring, whoever takes turns in it, and the same bits however they do.

use crate::program::{Ran, run, spec};

/// Six layers, of which two keep one frame in three, over frames of one block: rings go round every 2 and every 6 frames.
const SMALL: [&str; 14] = [
    "--set",
    "model={ layers: 6, num_qo_heads: 4, num_kv_heads: 2, head_dim: 32 }",
    "--set",
    "resources.ring.tokens_per_frame=128",
    "--set",
    "resources.ring.layers=[{ count: 2, ring_frames: 2 }, { ring_frames: 3, ring_buckets: 2, pinned_dilation: 3 }]",
    "--set",
    "workload.denoise={ steps: 2, tokens: 128 }",
    "--set",
    "workload.prompt_len=[128, 256]",
    "--set",
    "workload.output_len=[19, 8, 11, 5]",
    "--set",
    "resources.ring.num_worlds=3",
];

fn worlds(more: &[&str]) -> Ran {
    let ran = run(&spec("world-model.yaml"), &[&SMALL[..], more].concat()).good();
    assert_eq!((ran.number("verify.failed"), ran.number("requests.finished")), (0, 4), "{more:?}");
    ran
}

#[test]
fn every_row_is_right_through_two_wraps_of_every_ring() {
    let ran = worlds(&["--verify", "1"]);
    // One given frame and 19 of its own; the slowest rings hold what 6 frames leave there.
    assert_eq!((ran.number("ring.most_frames"), ran.number("ring.wraps")), (20, 2), "{}", ran.stdout);
    assert_eq!(ran.number("ring.frames"), 20 + 10 + 12 + 7);
    // Each frame of output is passed three times, each given one once.
    assert_eq!(ran.number("tokens.computed"), 128 * (3 * (19 + 8 + 11 + 5) + 6));
    assert_eq!(ran.number("verify.rows"), 3 * (19 + 8 + 11 + 5) + 6);
    assert!(ran.number("steps.padded") > 0 && ran.number("steps.planned_ahead") > 0, "{}", ran.stdout);
    assert!(ran.stdout.contains("cpu flex") && ran.report["cache"].is_null(), "{}", ran.stdout);
}

#[test]
fn mods_are_right_in_frames() {
    for sets in [
        &["--set", "resources.attn.mask_mod=causal"][..],
        &["--set", "resources.attn.mask_mod=window", "--set", "model.window_left=300"],
        &["--set", "resources.attn.score_mod=alibi", "--set", "model.alibi=true"],
        &["--set", "resources.attn.score_mod=soft_cap", "--set", "model.logits_soft_cap=2"],
        &["--set", "model.head_dim_vo=48"],
        &["--set", "dtype=f32"],
        &["--set", "workload.denoise={ steps: 1, tokens: 128 }"],
    ] {
        let short = ["--verify", "0.3", "--set", "workload.output_len=[8, 3]"];
        let ran = worlds(&[&short[..], sets].concat());
        assert!(ran.number("verify.checks") > 60, "{sets:?}: {}", ran.stdout);
        let off = ran.number("memory.allocated_peak").abs_diff(ran.number("memory.estimated"));
        assert!(off <= ran.number("memory.estimated") / 100, "{sets:?}: {off} bytes off");
    }
}

#[test]
fn company_threads_padding_plans_ahead_and_worlds_change_no_bit() {
    let base = worlds(&[]);
    for more in [
        &["--threads", "1"][..],
        &["--set", "workload.max_batch=1"],
        &["--set", "resources.ring.num_worlds=1"],
        &["--set", "resources.ring.num_worlds=7"],
        &["--set", "workload.arrivals=all_at_once"],
        &["--set", "workload.preplan=false", "--set", "graph={ buckets: [2], slots: 1 }"],
        &["--set", "graph={ buckets: [16], slots: 2 }"],
        &["--set", "workload.chunked_prefill=1024"],
    ] {
        assert_eq!(worlds(more).digest(), base.digest(), "{more:?}");
    }
    // Another geometry shows other frames: the digest would tell.
    let other = "resources.ring.layers=[{ ring_frames: 2 }]";
    assert_ne!(worlds(&["--set", other]).digest(), base.digest());
}

#[test]
fn worlds_too_few_for_the_batch_are_waited_for() {
    let few = worlds(&["--set", "resources.ring.num_worlds=2", "--set", "workload.arrivals=all_at_once"]);
    assert_eq!((few.number("requests.peak_active"), few.number("requests.refused")), (2, 0));
    let order: Vec<_> = few.report["events"]
        .as_array()
        .expect("events")
        .iter()
        .filter(|event| event["event"] == "admit" || event["event"] == "finish")
        .map(|event| (event["event"].as_str().unwrap_or(""), event["request"].as_str().unwrap_or("")))
        .collect();
    // Who enters takes the world that another has left.
    assert_eq!(
        order[..4],
        [("admit", "r0"), ("admit", "r1"), ("finish", "r1"), ("admit", "r2")],
        "{order:?}"
    );
}

#[test]
fn a_snapshot_and_the_same_twenty_frames_give_the_same_bits() {
    let long = ["--set", "workload.output_len=[32, 27, 34, 29]"];
    let straight = worlds(&long);
    let saved = ["--set", "workload.snapshot={ after: 7, frames: 20 }", "--verify", "0.3"];
    let again = worlds(&[&long[..], &saved].concat());
    assert_eq!((again.number("ring.saved"), again.number("ring.replayed")), (4, 80), "{}", again.stdout);
    assert_eq!((again.number("ring.differ"), again.digest()), (0, straight.digest()));
    assert!(again.stdout.contains("80 frames came again after a restore"), "{}", again.stdout);
    assert!(again.number("memory.allocated_peak") <= again.number("memory.estimated_most"));
    // 20 frames of three passes more, in each of four requests.
    let more = again.number("tokens.computed") - straight.number("tokens.computed");
    assert_eq!(more, 4 * 20 * 3 * 128);
}

#[test]
fn what_does_not_go_together_is_refused_before_it_starts() {
    for (set, said) in [
        ("workload.denoise={ steps: 2, tokens: 64 }", "a frame of ring has 128; write 128"),
        ("workload.prompt_len=200", "takes whole frames of 128; write a multiple of 128"),
        ("workload.forks={ labels: [a, b] }", "a world of ring has no streams"),
        ("resources.attn.backend=paged", "attends pages, and ring is a ring; say backend: flex"),
        ("resources.ring.tokens_per_frame=100", "expected a multiple of 128, got 100"),
        ("resources.more={ kind: ring, tokens_per_frame: 128, ring_frames: 2 }", "a run drives one ring"),
        ("resources.kv={ kind: kv, page_size: 16, max_num_pages: 9, max_seq_len: 64 }", "remove one"),
        ("resources.attn.score_mod=alibi", "alibi needs the model's slopes"),
    ] {
        let ran = run(&spec("world-model.yaml"), &[&SMALL[..], &["--set", set]].concat());
        assert_eq!(ran.code, Some(2), "{set}: {}", ran.stderr);
        assert!(ran.stderr.contains(said) && ran.report.is_null(), "{set}: {}", ran.stderr);
    }
    let said = "has no effect without a resource of kind ring; remove it";
    let ran = run(&spec("quickstart.yaml"), &["--set", "workload.snapshot={ after: 1, frames: 1 }"]);
    assert!(ran.code == Some(2) && ran.stderr.contains(said), "{}", ran.stderr);
    let ran = run(&spec("quickstart.yaml"), &["--set", "resources.attn.backend=flex"]);
    assert!(
        ran.code == Some(2) && ran.stderr.contains("attends a ring; name one in kv_cache"),
        "{}",
        ran.stderr
    );
}
