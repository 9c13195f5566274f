//! Steps padded to buckets: the bits of steps that are not, planned ahead or not; on a device from captured regions, all of them.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::program::{Ran, root, run_in};

const BUCKETS: &str = "graph={ buckets: [1, 4, 8], slots: 2 }";
/// Walks that have buckets.
const GENERATING: [&str; 3] = ["decode", "denoise", "verify"];

/// Specs over pages of keys and values.
const PAGES: [&str; 9] = [
    "azure-code",
    "azure-conv",
    "cfg-forks",
    "llama-gqa-decode",
    "mixed-prefill-decode",
    "mooncake-prefix",
    "quickstart",
    "speculative-tree",
    "tight-memory-offload",
];
/// Those whose caches are codes.
const CODES: [&str; 1] = ["fp8-cache"];
/// Those whose attention takes keys straight from the layer, or from an encoder.
const STRAIGHT: [&str; 3] = ["diffusion-cfg", "diffusion-video", "whisper-cross"];
/// Those over latents, and with an indexer.
const LATENTS: [&str; 5] =
    ["deepseek-mla-decode", "deepseek-mla-mixed", "dsa-trace", "glm-dsa-decode", "glm-dsa-prefill"];
/// Those over rings.
const RINGS: [&str; 1] = ["world-model"];

/// What makes a shipped spec small: its kind of work, on few heads and short requests that arrive together.
fn small(name: &str) -> Vec<&'static str> {
    let few = ["workload.requests=4", "workload.max_batch=3"];
    let heads = ["model.num_qo_heads=4", "model.num_kv_heads=2", "model.head_dim=32"];
    let latents = [
        "model.num_qo_heads=4",
        "model.kv_lora_rank=64",
        "model.qk_rope_head_dim=16",
        "resources.kv.max_seq_len=512",
    ];
    let indexer = ["resources.dsa.index_n_heads=2", "resources.dsa.index_topk=36"];
    let short =
        ["workload.arrivals=all_at_once", "workload.prompt_len=[40, 25, 60, 33]", "workload.output_len=5"];
    let own: &[&str] = match name {
        "azure-code" => &["workload.length_scale=0.2"],
        "azure-conv" => &["workload.length_scale=0.05"],
        "cfg-forks" => &["workload.denoise={ steps: 2, tokens: 8 }", "workload.output_len=2"],
        "deepseek-mla-mixed" => &["workload.shared_prefixes.len=16", "workload.preplan=false"],
        "diffusion-cfg" | "diffusion-video" => {
            &["workload.denoise={ steps: 2, tokens: 24 }", "workload.output_len=2"]
        }
        "dsa-trace" => &["workload.length_scale=0.0078125"],
        "glm-dsa-decode" => &["model.layers=3"],
        "glm-dsa-prefill" => &["workload.shared_prefixes.len=32"],
        "llama-gqa-decode" => &["workload.preplan=false"],
        "mixed-prefill-decode" => &["resources.kv.retention=48", "model.window_left=40"],
        "mooncake-prefix" => &["workload.length_scale=0.0078125"],
        "speculative-tree" => &["workload.tree.branching=[2, 2]"],
        "tight-memory-offload" => &["resources.kv.max_num_pages=12", "workload.output_len=12"],
        "whisper-cross" => &["model.layers=2", "model.num_kv_heads=4", "workload.context_len=50"],
        "world-model" => &[
            "model={ layers: 3, num_qo_heads: 1, num_kv_heads: 1, head_dim: 32 }",
            "resources.ring.tokens_per_frame=256",
            "workload.requests=2",
            "workload.arrivals=all_at_once",
            "workload.prompt_len=256",
            "workload.output_len=6",
            "workload.denoise={ steps: 1, tokens: 256 }",
            "workload.preplan=false",
        ],
        _ => &[],
    };
    let trace = name.starts_with("azure") || name.ends_with("trace") || name.starts_with("mooncake");
    let mut sets = Vec::new();
    if !RINGS.contains(&name) {
        sets.extend(few);
        if LATENTS.contains(&name) {
            sets.extend(latents)
        } else {
            sets.extend(heads)
        }
        if name.contains("dsa") {
            sets.extend(indexer);
        }
        if !trace {
            sets.extend(short);
        }
    }
    sets.extend(own);
    sets
}

/// Runs a shipped spec, small and without its own buckets, with `more`.
fn ran(name: &str, device: &str, more: &[&str]) -> Ran {
    let folder = tempfile::tempdir().expect("a folder");
    let text = std::fs::read_to_string(root().join(format!("specs/{name}.yaml"))).expect("a shipped spec");
    let bare: Vec<&str> = text.lines().filter(|line| !line.starts_with("graph:")).collect();
    let spec = folder.path().join(format!("{name}.yaml"));
    std::fs::write(&spec, bare.join("\n")).expect("a folder to write to");
    let sets = small(name);
    let mut args = vec!["--device", device];
    args.extend(sets.iter().chain(more).flat_map(|set| ["--set", set]));
    let ran = run_in(&spec, &args, Some(&root().join("specs/data"))).good();
    assert!(ran.number("requests.finished") > 0, "{name}: {}", ran.stdout);
    ran
}

/// The calls of generating steps: those that were replayed, captured, call by call, and of these padded.
fn calls(ran: &Ran) -> Vec<(String, [u64; 4])> {
    let of = |node: &Value| {
        let walk = node["walk"].as_str().expect("a walk");
        let count = |key: &str| node[key].as_u64().expect("a count");
        let name = format!("{} in {walk}", node["node"].as_str().expect("a name"));
        GENERATING.contains(&walk).then(|| (name, ["replayed", "captured", "eager", "padded"].map(count)))
    };
    ran.report["attention"].as_array().expect("a list").iter().filter_map(of).collect()
}

/// Buckets and plans ahead change no bit of a spec on `device`, and every generating step is padded: on a device replayed.
fn check(names: &[&str], device: &str) {
    for name in names {
        let eager = ran(name, device, &[]);
        for more in [&[BUCKETS][..], &[BUCKETS, "workload.preplan=true"]] {
            let padded = ran(name, device, more);
            assert_eq!(padded.digest(), eager.digest(), "{name} {more:?}");
            let all = calls(&padded);
            assert!(!all.is_empty(), "{name} generates nothing: {}", padded.stdout);
            let (mut all_replayed, mut all_captured) = (0, 0);
            for (who, [replayed, captured, call_by_call, of_them_padded]) in all {
                if device == "cpu" {
                    assert!(replayed == 0 && call_by_call == of_them_padded, "{name}: {who}");
                    continue;
                }
                assert!(call_by_call == 0 && captured > 0, "{name}: {who}: {call_by_call} call by call");
                assert!(padded.stdout.contains(&format!("{who}: ")), "{who}: {}", padded.stdout);
                // What a ring shows grows from one leaf to three: the region of a layer stays.
                let ring = RINGS.contains(name) && more.len() == 1;
                assert!(!ring || captured == 3, "{name}: {who}: {captured} regions captured of 3 layers");
                (all_replayed, all_captured) = (all_replayed + replayed, all_captured + captured);
            }
            // What a step changes lies in what is staged, and is no other region.
            let again = device == "cpu" || more.len() > 1 || all_replayed > all_captured;
            assert!(again, "{name}: {all_captured} regions captured for {all_replayed} runs");
        }
    }
}

#[test]
fn every_shipped_spec_is_run_in_buckets() {
    let shipped: BTreeSet<String> = std::fs::read_dir(root().join("specs"))
        .expect("specs is a folder")
        .filter_map(|entry| {
            Some(entry.expect("an entry").file_name().to_str()?.strip_suffix(".yaml")?.to_owned())
        })
        .collect();
    let listed = PAGES.iter().chain(&CODES).chain(&STRAIGHT).chain(&LATENTS).chain(&RINGS);
    assert_eq!(shipped, listed.map(|&name| name.to_owned()).collect());
}

#[test]
fn buckets_and_plans_ahead_change_no_bit_on_the_cpu() {
    for names in [&PAGES[..], &CODES, &STRAIGHT, &LATENTS, &RINGS] {
        check(names, "cpu");
    }
}

/// The emulated device, which has graphs as a card has them.
#[cfg(feature = "emulator")]
mod emulated {
    use super::*;

    #[test]
    fn captured_steps_over_pages_have_the_bits_of_eager_ones() {
        check(&PAGES, "cuda:0");
    }

    #[test]
    fn captured_steps_over_codes_have_the_bits_of_eager_ones() {
        check(&CODES, "cuda:0");
    }

    #[test]
    fn captured_steps_of_fresh_keys_have_the_bits_of_eager_ones() {
        check(&STRAIGHT, "cuda:0");
    }

    #[test]
    fn captured_steps_over_latents_and_picks_have_the_bits_of_eager_ones() {
        check(&LATENTS, "cuda:0");
    }

    #[test]
    fn captured_passes_over_rings_have_the_bits_of_eager_ones() {
        check(&RINGS, "cuda:0");
    }
}
