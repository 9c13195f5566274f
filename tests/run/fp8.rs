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

/// On the emulated device: every row is right there too, and what is offloaded and forked brings its scales along.
#[cfg(feature = "emulator")]
mod device {
    use super::*;

    const ON: [&str; 2] = ["--device", "cuda:0"];

    fn few(name: &str, sets: &[&str]) -> String {
        let sets = sets.iter().flat_map(|set| [SET, set]);
        let args: Vec<&str> = ON.into_iter().chain(["--verify", "0.5"]).chain(sets).collect();
        let ran = run(&spec(name), &args).good();
        assert_eq!(ran.number("verify.failed"), 0, "{name}");
        assert!(ran.number("verify.rows") > 2, "{name}: {}", ran.stdout);
        ran.digest().to_owned()
    }

    #[test]
    fn rows_over_codes_are_right_wherever_their_pages_were() {
        let short = [
            "workload.requests=5",
            "workload.prompt_len=[60, 84, 102, 51, 76]",
            "workload.shared_prefixes.len=32",
            "workload.output_len=8",
            "workload.max_batch=4",
            "resources.kv.max_seq_len=512",
        ];
        let of = |pages: &'static str| few("fp8-cache.yaml", &[&short[..], &[pages]].concat());
        let plenty = of("resources.kv.max_num_pages=129");
        assert_eq!(plenty, of("resources.kv.max_num_pages=20"), "offload brings scales along");
    }

    #[test]
    fn forks_copy_scales_there() {
        let sets = ["resources.kv.dtype=fp8_e4m3", "workload.requests=2", "workload.max_batch=2"];
        let small = [
            "workload.denoise={ steps: 2, tokens: 8 }",
            "workload.output_len=2",
            "workload.prompt_len=[40, 25]",
        ];
        few("cfg-forks.yaml", &[&sets[..], &small].concat());
    }

    #[test]
    fn latents_in_codes_and_picks_over_them_are_right() {
        let sets = [
            "resources.kv.dtype=fp8_e4m3",
            "workload.requests=3",
            "workload.max_batch=3",
            "workload.prompt_len=[40, 25, 60]",
            "workload.output_len=3",
            "workload.arrivals=all_at_once",
            "model.kv_lora_rank=64",
            "model.qk_rope_head_dim=16",
            "resources.kv.max_seq_len=512",
        ];
        few("deepseek-mla-decode.yaml", &[&sets[..], &["model.num_qo_heads=4", "model.layers=2"]].concat());
        let indexer = [
            "resources.dsa.index_n_heads=2",
            "resources.dsa.index_topk=36",
            "model.num_qo_heads=4",
            "model.layers=3",
        ];
        few("glm-dsa-decode.yaml", &[&sets[..], &indexer].concat());
    }
}
