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
    assert!(why.contains("29 pages short of the 59"), "{why}");
    assert!(ran.stdout.contains("29 pages short"), "{}", ran.stdout);
    let long = tight(&["--set", "workload.prompt_len=[100, 900]", "--set", "resources.kv.max_seq_len=500"]);
    assert!(long.report["refusals"][0]["why"].as_str().expect("a reason").contains("max_seq_len is 500"));
}

#[test]
fn memory_is_what_was_foreseen() {
    for name in ["quickstart.yaml", "cfg-forks.yaml", "whisper-cross.yaml", "mooncake-prefix.yaml"] {
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
