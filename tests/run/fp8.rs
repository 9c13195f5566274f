//! Caches in e4m3: every row is that of the oracle over what the codes stand for, and scales go wherever their pages go.

use crate::program::{run, spec};

const SET: &str = "--set";

#[test]
fn every_row_over_codes_is_right_and_the_report_names_their_type() {
    let ran = run(&spec("fp8-cache.yaml"), &["--verify", "0.5"]).good();
    assert_eq!((ran.number("verify.failed"), ran.number("requests.finished")), (0, 12));
    assert!(ran.number("verify.rows") > 100, "{}", ran.stdout);
}

/// Plenty of pages or few, padded and planned ahead or not: what is offloaded and shared brings its scales along.
#[test]
fn offload_buckets_and_plans_ahead_change_no_bit() {
    let digest = |more: &[&str]| {
        let ran = run(&spec("fp8-cache.yaml"), &[&["--verify", "0.05"], more].concat()).good();
        assert_eq!(ran.number("verify.failed"), 0, "{more:?}");
        ran.digest().to_owned()
    };
    let few = digest(&[]);
    assert_eq!(few, digest(&[SET, "resources.kv.max_num_pages=1025"]));
    assert_eq!(few, digest(&[SET, "graph={ buckets: [1, 4, 8], slots: 2 }", SET, "workload.preplan=true"]));
}

#[test]
fn forks_copy_scales_with_their_pages() {
    for spec_of in ["cfg-forks.yaml", "speculative-tree.yaml"] {
        let ran = run(
            &spec(spec_of),
            &["--verify", "0.3", "--steps", "24", SET, "resources.kv.dtype=fp8_e4m3", SET, "device=cpu"],
        )
        .good();
        assert_eq!(ran.number("verify.failed"), 0, "{spec_of}");
    }
}

#[test]
fn latents_in_656_bytes_and_picks_over_them_are_right() {
    for spec_of in ["deepseek-mla-decode.yaml", "glm-dsa-decode.yaml"] {
        let args =
            ["--verify", "0.2", "--steps", "10", SET, "resources.kv.dtype=fp8_e4m3", SET, "device=cpu"];
        let ran = run(&spec(spec_of), &args).good();
        assert_eq!(ran.number("verify.failed"), 0, "{spec_of}");
        assert!(ran.number("verify.rows") > 0, "{spec_of}");
    }
}
