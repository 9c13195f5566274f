//! Too few pages: offload and reload, refusals with their numbers, and the memory that was foreseen.

use crate::program::{Ran, run, spec};

fn tight(more: &[&str]) -> Ran {
    let base = ["--set", "workload.requests=6", "--set", "workload.output_len=40", "--verify", "0.1"];
    run(&spec("tight-memory-offload.yaml"), &[&base[..], more].concat()).good()
}

#[test]
fn f32_offload_and_reload_give_the_same_bits_as_plenty_of_pages() {
    let lengths = ["--set", "workload.prompt_len=[200, 150, 180]"];
    let plenty = tight(&[&lengths[..], &["--set", "resources.kv.max_num_pages=1000"]].concat());
    assert_eq!(plenty.number("cache.offloads"), 0);
    let few = tight(&[&lengths[..], &["--set", "resources.kv.max_num_pages=40"]].concat());
    assert!(few.number("cache.offloads") > 0 && few.number("cache.reloads") > 0, "{}", few.stdout);
    assert_eq!(few.number("requests.finished"), 6);
    assert_eq!(few.digest(), plenty.digest());
    // With the prefix index on, what is found there is not computed again: right within the gate, row by row.
    let indexed = tight(
        &[
            &lengths[..],
            &["--set", "resources.kv.max_num_pages=40", "--set", "resources.kv.prefix_cache=true"],
        ]
        .concat(),
    );
    assert_eq!((indexed.number("verify.failed"), indexed.number("requests.finished")), (0, 6));
}

#[test]
fn without_a_place_on_the_host_requests_begin_anew_and_end_alike() {
    let lengths = ["--set", "workload.prompt_len=[200, 150, 180]"];
    let plenty = tight(&[&lengths[..], &["--set", "resources.kv.max_num_pages=1000"]].concat());
    let none = ["--set", "resources.kv.max_num_pages=40", "--set", "resources.kv.host_pages=0"];
    let none = tight(&[&lengths[..], &none].concat());
    assert!(none.number("cache.restarts") > 0 && none.number("cache.offloads") == 0);
    assert_eq!(none.digest(), plenty.digest());
}

#[test]
fn a_request_that_cannot_fit_is_refused_with_what_it_lacks_and_the_others_finish() {
    let ran =
        tight(&["--set", "workload.prompt_len=[100, 900, 120]", "--set", "resources.kv.max_num_pages=31"]);
    assert_eq!((ran.number("requests.refused"), ran.number("requests.finished")), (2, 4));
    // 900 + 39 stored tokens are 59 pages of 16; 30 may be held.
    let why = ran.report["refusals"][0]["why"].as_str().expect("a reason");
    assert!(why.contains("29 pages short of the 59 it needs at once; the pool has 30"), "{why}");
    assert!(ran.stdout.contains("29 pages short"), "{}", ran.stdout);
    let long = tight(&["--set", "workload.prompt_len=[100, 900]", "--set", "resources.kv.max_seq_len=500"]);
    assert!(long.report["refusals"][0]["why"].as_str().expect("a reason").contains("max_seq_len is 500"));
}

/// Alone in a pool of exactly the pages that a refusal named, a request runs to its end; with one page less it is refused
/// before its first step, whatever it would hold and give back on its way.
#[test]
fn a_request_runs_in_the_pages_that_its_refusal_named_and_not_in_fewer() {
    let base = ["--set", "workload.requests=1", "--set", "resources.kv.host_pages=0"];
    let prompt = ["--set", "workload.prompt_len=70", "--set", "workload.chunked_prefill=32"];
    let kept = ["--set", "model.window_left=24", "--set", "resources.kv.retention=24"];
    for (name, more) in [
        ("quickstart.yaml", vec!["--set", "workload.output_len=30"]),
        ("speculative-tree.yaml", vec!["--set", "workload.output_len=20"]),
        ("speculative-tree.yaml", [&["--set", "workload.output_len=20"][..], &kept].concat()),
        ("cfg-forks.yaml", vec!["--set", "workload.output_len=2"]),
        ("cfg-forks.yaml", [&["--set", "workload.output_len=2"][..], &kept].concat()),
        ("tight-memory-offload.yaml", [&["--set", "workload.output_len=50"][..], &kept].concat()),
    ] {
        let with = |pages: usize| {
            let pages = format!("resources.kv.max_num_pages={pages}");
            run(&spec(name), &[&base[..], &prompt, &more, &["--set", &pages]].concat()).good()
        };
        let why = |ran: &Ran| {
            assert_eq!(
                (ran.number("requests.refused"), ran.number("steps.total")),
                (1, 0),
                "{name} {more:?}"
            );
            ran.report["refusals"][0]["why"].as_str().expect("a reason").to_owned()
        };
        let said = why(&with(2));
        let needed = said.split("short of the ").nth(1).and_then(|rest| rest.split(' ').next());
        let needed: usize = needed.and_then(|pages| pages.parse().ok()).expect("the pages needed");
        let enough = with(needed + 1); // and the sink
        assert_eq!(enough.number("requests.finished"), 1, "{name} {more:?}: {said}");
        let short = why(&with(needed));
        assert!(short.contains(&format!(" 1 pages short of the {needed} ")), "{name} {more:?}: {short}");
    }
}

#[test]
fn memory_is_what_was_foreseen() {
    for name in [
        "quickstart.yaml",
        "cfg-forks.yaml",
        "whisper-cross.yaml",
        "mooncake-prefix.yaml",
        "deepseek-mla-mixed.yaml",
        "glm-dsa-decode.yaml",
        "dsa-trace.yaml",
    ] {
        let ran = run(&spec(name), &["--steps", "30"]).good();
        let (allocated, foreseen) = (ran.number("memory.allocated_peak"), ran.number("memory.estimated"));
        assert_eq!(
            ran.number("cache.offloads"),
            0,
            "{name}: nothing was taken beside what is held from the start"
        );
        let off = allocated.abs_diff(foreseen);
        assert!(off <= foreseen / 100, "{name}: {allocated} bytes allocated, {foreseen} foreseen");
        if let Some(resident) = ran.report["memory"]["resident_peak"].as_u64() {
            let limit = foreseen + foreseen / 10 + (64 << 20);
            assert!(resident <= limit, "{name}: {resident} bytes resident, {foreseen} foreseen");
        }
    }
    let tight = run(&spec("tight-memory-offload.yaml"), &[]).good();
    assert!(tight.number("cache.offloads") > 0);
    assert!(tight.number("memory.allocated_peak") <= tight.number("memory.estimated_most"));
}
