//! Denoising over a frozen prefix: right whatever serves it, and what changes no bit.

use crate::program::{Ran, run, spec};

fn denoised(more: &[&str]) -> Ran {
    let small = ["--set", "workload.denoise={ steps: 3, tokens: 40 }", "--set", "workload.output_len=2"];
    let ran = run(&spec("diffusion-cfg.yaml"), &[&small[..], more].concat()).good();
    assert_eq!((ran.number("verify.failed"), ran.number("requests.finished")), (0, 4), "{more:?}");
    ran
}

#[test]
fn every_row_is_right_from_gathered_prefixes_from_pages_and_from_the_paged_backend() {
    let gathered = denoised(&["--verify", "1"]);
    assert!(gathered.number("verify.rows") > 20, "{}", gathered.stdout);
    assert!(gathered.stdout.contains("cpu dense") && gathered.stdout.contains("prefix gathered"));
    let pages = denoised(&["--verify", "1", "--set", "resources.attn.prefix=pages"]);
    assert!(pages.stdout.contains("prefix in pages"), "{}", pages.stdout);
    assert_eq!(pages.digest(), gathered.digest(), "where a prefix lies changes no bit");
    let paged = denoised(&["--verify", "1", "--set", "resources.attn.backend=paged"]);
    assert!(paged.stdout.contains("cpu paged"), "{}", paged.stdout);
    // What denoising passes would write is not written: only texts and the blocks that stay.
    let written = |ran: &Ran| {
        let phases = ran.report["phases"].as_array().expect("phases");
        let write = phases.iter().find(|phase| phase["phase"] == "kv write").expect("something is written");
        write["calls"].as_u64().expect("a count")
    };
    assert!(written(&gathered) * 2 < written(&paged), "{} {}", written(&gathered), written(&paged));
}

#[test]
fn company_plans_ahead_padding_and_gathering_anew_change_no_bit() {
    let base = denoised(&[]);
    for more in [
        &["--set", "resources.attn.keep_prefix=false"][..],
        &["--set", "workload.max_batch=1"],
        &["--set", "workload.forks={ labels: [cond, uncond], combined: false }"],
        &["--set", "workload.preplan=true"],
        &["--set", "workload.preplan=true", "--set", "graph={ buckets: [8], slots: 2 }"],
        &["--set", "resources.kv.max_num_pages=48", "--set", "resources.kv.host_pages=64"],
    ] {
        assert_eq!(denoised(more).digest(), base.digest(), "{more:?}");
    }
}
