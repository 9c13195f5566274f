//! Latents and sparse attention over them: what changes no bit, and what `--verify` says of picks.

use std::path::Path;

use crate::program::{Ran, run, spec};

/// Contexts that cross 64 keys in prefill, in decode, or not at all, of narrower latents than the spec's.
const SMALL: [&str; 12] = [
    "--set",
    "resources.dsa.index_topk=64",
    "--set",
    "workload.prompt_len=[40, 60, 63, 64, 65, 150]",
    "--set",
    "workload.requests=6",
    "--set",
    "workload.output_len={ uniform: [6, 20] }",
    "--set",
    "model.kv_lora_rank=96",
    "--set",
    "model.num_qo_heads=8",
];

fn decode(more: &[&str]) -> Ran {
    let ran = run(&spec("glm-dsa-decode.yaml"), &[&SMALL[..], more].concat()).good();
    assert_eq!((ran.number("verify.failed"), ran.number("requests.finished")), (0, 6), "{more:?}");
    ran
}

/// A shipped spec with its text changed.
fn edited(name: &str, edit: impl Fn(&str) -> String, args: &[&str]) -> Ran {
    let dir = tempfile::tempdir().expect("a directory for specs");
    let path = dir.path().join(name);
    let text = std::fs::read_to_string(spec(name)).expect("a shipped spec");
    let changed = edit(&text);
    assert_ne!(changed, text, "{name} was not changed");
    std::fs::write(&path, changed).expect("a spec is written");
    run(&path, args)
}

/// `text` without the resource `dsa`.
fn without_indexer(text: &str) -> String {
    let (before, rest) = text.split_once("  dsa:\n").expect("a resource dsa");
    let (_, after) = rest.split_once("graph:").expect("the section after it");
    format!("{before}graph:{after}")
}

#[test]
fn every_pick_and_every_row_over_it_is_right() {
    let ran = decode(&["--verify", "1"]);
    assert!(ran.number("verify.picks") > 80, "{}", ran.stdout);
    let (scored, attended) = (ran.number("sparse.scored"), ran.number("sparse.attended"));
    let dense = ran.number("sparse.dense");
    // Two of four layers score.
    assert!(scored > 0 && scored <= dense / 2 && attended < dense, "{scored} {attended} {dense}");
    assert!(ran.stdout.contains("pairs of a query and a key attended of"), "{}", ran.stdout);
    let phases: Vec<&str> = ran.report["phases"]
        .as_array()
        .expect("phases")
        .iter()
        .filter(|phase| phase["resource"] == "dsa")
        .filter_map(|phase| phase["phase"].as_str())
        .collect();
    for phase in ["plan", "kv write", "select", "attend", "commit"] {
        assert!(phases.contains(&phase), "{phase}: {phases:?}");
    }
}

#[test]
fn f24_neighbours_padding_pages_and_threads_change_no_bit_of_a_pick() {
    let base = decode(&[]);
    for more in [
        &["--threads", "1"][..],
        &["--set", "workload.max_batch=1"],
        &["--set", "workload.preplan=true"],
        &["--set", "graph={ buckets: [2], slots: 1 }"],
        &["--set", "graph={ buckets: [16], slots: 2 }", "--set", "workload.preplan=true"],
        &["--set", "resources.kv.page_size=1", "--set", "resources.kv.max_num_pages=2000"],
        &["--set", "resources.kv.page_size=16"],
        &["--set", "resources.dsa.index_store=buffers"],
        &["--set", "resources.dsa.index_dtype=f32"],
    ] {
        assert_eq!(decode(more).digest(), base.digest(), "{more:?}");
    }
    let eager = edited(
        "glm-dsa-decode.yaml",
        |text| text.replace("graph: { buckets: [1, 4, 8], slots: 2 }\n", ""),
        &SMALL,
    );
    let eager = eager.good();
    assert_eq!((eager.digest(), eager.number("steps.padded")), (base.digest(), 0));
    assert!(base.number("steps.padded") > 0);
}

#[test]
fn f32_few_pages_give_the_same_bits_under_an_indexer() {
    let pages = [
        "--set",
        "resources.kv.page_size=16",
        "--set",
        "workload.prompt_len=[40, 60, 63, 64, 65, 90]",
        "--set",
        "workload.output_len=40",
    ];
    let plenty = decode(&[&pages[..], &["--set", "resources.kv.max_num_pages=200"]].concat());
    assert_eq!(plenty.number("cache.offloads"), 0);
    let few = [&pages[..], &["--set", "resources.kv.max_num_pages=30"]].concat();
    let moved = decode(&[&few[..], &["--verify", "0.3"]].concat());
    assert!(moved.number("cache.offloads") > 0 && moved.number("cache.reloads") > 0, "{}", moved.stdout);
    assert_eq!(moved.digest(), plenty.digest());
    let begun_anew = decode(&[&few[..], &["--set", "resources.kv.host_pages=0"]].concat());
    assert!(begun_anew.number("cache.restarts") > 0, "{}", begun_anew.stdout);
    assert_eq!(begun_anew.digest(), plenty.digest());
}

#[test]
fn up_to_index_topk_keys_the_indexer_changes_no_bit() {
    let short = [
        "--set",
        "workload.prompt_len={ uniform: [20, 120] }",
        "--set",
        "workload.output_len=20",
        "--set",
        "workload.requests=6",
    ];
    let with = run(&spec("glm-dsa-decode.yaml"), &short).good();
    assert_eq!((with.number("sparse.scored"), with.report["sparse"]["share"].as_f64()), (0, Some(1.0)));
    let without = edited("glm-dsa-decode.yaml", without_indexer, &short).good();
    assert!(without.report["sparse"].is_null());
    assert_eq!(without.digest(), with.digest());
    // The same requests past index_topk differ: the test would see a pick.
    let past = [&short[..], &["--set", "resources.dsa.index_topk=64"]].concat();
    assert_ne!(run(&spec("glm-dsa-decode.yaml"), &past).good().digest(), with.digest());
}

#[test]
fn forks_and_uncommitted_passes_keep_their_index_keys_apart() {
    let forks = "workload.forks={ labels: [cond, uncond], combined: true }";
    let forked = decode(&["--set", forks, "--verify", "0.5"]);
    assert!(forked.number("cache.copies") > 0 && forked.number("verify.picks") > 0, "{}", forked.stdout);
    let apart = "workload.forks={ labels: [cond, uncond], combined: false }";
    assert_eq!(decode(&["--set", apart]).digest(), forked.digest());
    let few = ["--set", "resources.kv.page_size=16", "--set", "resources.kv.max_num_pages=40"];
    let few = decode(&[&["--set", forks][..], &few].concat());
    assert!(few.number("cache.offloads") > 0, "{}", few.stdout);
    assert_eq!(few.digest(), forked.digest());
    let passes = ["--set", "workload.denoise={ steps: 2, tokens: 8 }", "--set", "workload.output_len=3"];
    let passes = decode(&[&["--set", forks, "--verify", "0.5"][..], &passes].concat());
    assert!(passes.number("verify.picks") > 0, "{}", passes.stdout);
}

#[test]
fn prefix_hits_bring_their_index_keys() {
    for name in ["glm-dsa-prefill.yaml", "dsa-trace.yaml"] {
        let ran = run(&spec(name), &["--verify", "0.3", "--set", "workload.requests=10"]).good();
        assert!(ran.number("tokens.prefix_hits") > 0 && ran.number("verify.picks") > 0, "{}", ran.stdout);
        assert_eq!((ran.number("verify.failed"), ran.number("requests.finished")), (0, 10), "{name}");
    }
}

#[test]
fn f22_ties_quantised_keys_and_f32_are_judged() {
    for sets in [
        // One index head: half of all keys score 0.
        &["--set", "resources.dsa.index_n_heads=1"][..],
        &["--set", "resources.dsa.index_dtype=fp8"],
        &["--set", "dtype=f32"],
        &["--set", "resources.dsa.full_layers=[0, 1, 3]"],
    ] {
        let ran = decode(&[&["--verify", "0.5"][..], sets].concat());
        assert!(ran.number("verify.picks") > 30, "{sets:?}: {}", ran.stdout);
    }
}

#[test]
fn latents_alone_have_the_same_bits_however_they_are_packed() {
    let small = [
        "--set",
        "workload.requests=5",
        "--set",
        "workload.prompt_len={ uniform: [1, 300] }",
        "--set",
        "workload.output_len={ uniform: [2, 12] }",
        "--set",
        "model.num_qo_heads=4",
        "--verify",
        "0.3",
    ];
    let latents = |more: &[&str]| {
        let ran = run(&spec("deepseek-mla-decode.yaml"), &[&small[..], more].concat()).good();
        assert_eq!((ran.number("verify.failed"), ran.number("requests.finished")), (0, 5), "{more:?}");
        ran.digest().to_owned()
    };
    let base = latents(&[]);
    for more in [
        &["--threads", "1"][..],
        &["--set", "workload.max_batch=2"],
        &["--set", "workload.preplan=true"],
        &["--set", "graph={ buckets: [16], slots: 1 }"],
        &["--set", "resources.kv.page_size=1", "--set", "resources.kv.max_num_pages=3000"],
        &["--set", "resources.kv.page_size=16", "--set", "resources.kv.max_num_pages=24"],
    ] {
        assert_eq!(latents(more), base, "{more:?}");
    }
    let hits = run(&spec("deepseek-mla-mixed.yaml"), &[&small[..2], &["--verify", "0.5"]].concat()).good();
    assert_eq!(hits.number("verify.failed"), 0);
}

#[test]
fn what_does_not_go_together_is_refused_before_it_starts() {
    for (set, said) in [
        ("workload.tree={ branching: [2] }", "drafts need masks"),
        ("resources.attn.causal=false", "picks among earlier keys alone"),
        ("resources.kv.retention=100", "dsa scores every token; remove retention"),
        ("model.window_left=64", "no window"),
    ] {
        refused(&spec("glm-dsa-decode.yaml"), &["--set", set], said);
    }
    let buffers = ["--set", "resources.dsa.index_store=buffers", "--set"];
    for (set, said) in [
        ("resources.kv.prefix_cache=true", "knows no prefix hits; say index_store: pages"),
        ("workload.forks={ labels: [a, b], combined: true }", "knows no forks; say index_store: pages"),
    ] {
        refused(&spec("glm-dsa-decode.yaml"), &[&buffers[..], &[set]].concat(), said);
    }
}

#[track_caller]
fn refused(spec: &Path, args: &[&str], said: &str) {
    let ran = run(spec, args);
    assert_eq!(ran.code, Some(2), "{args:?}: {}", ran.stderr);
    assert!(ran.stderr.contains(said) && ran.report.is_null(), "{args:?}: {}", ran.stderr);
    assert!(ran.stdout.is_empty(), "{}", ran.stdout);
}
