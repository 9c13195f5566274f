//! `mstar parity --across`: devices compared over a spec.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::built::{Run, mstar, mstar_with};

/// Two layers over pages: prompts cut in chunks, decode in company, hits in the prefix index.
const PAGED: &str = "
name: pages
seed: 3
dtype: bf16
model: { layers: 2, num_qo_heads: 4, num_kv_heads: 2, head_dim: 64 }
resources:
  kv: { kind: kv, page_size: 16, max_num_pages: 64, max_seq_len: 256, prefix_cache: true }
  attn: { kind: attention, backend: paged, kv_cache: kv }
workload:
  { kind: synthetic, requests: 3, prompt_len: { uniform: [20, 50] }, output_len: 4, max_batch: 4, chunked_prefill: 32 }
";

/// An indexer that picks 16 of up to 60 keys, and a layer that shares its pick.
const SPARSE: &str = "
name: picks
seed: 3
dtype: bf16
model: { layers: 2, num_qo_heads: 4, kv_lora_rank: 64, qk_rope_head_dim: 16, sm_scale: 0.125 }
resources:
  kv: { kind: kv, layout: mla, page_size: 16, max_num_pages: 64, max_seq_len: 256 }
  attn: { kind: attention, backend: mla, kv_cache: kv }
  dsa: { kind: dsa, kv_cache: kv, index_n_heads: 2, index_head_dim: 32, index_topk: 16, full_layers: [0] }
workload:
  { kind: synthetic, requests: 3, prompt_len: { uniform: [20, 50] }, output_len: 4, max_batch: 4, chunked_prefill: 32 }
";

fn written(dir: &Path, text: &str) -> PathBuf {
    let path = dir.join("spec.yaml");
    std::fs::write(&path, text).expect("a folder to write to");
    path
}

/// Compares `devices` over the spec `text`.
fn across(devices: &str, text: &str, more: &[&str], (variable, value): (&str, &str)) -> (Run, Value) {
    let dir = tempfile::tempdir().expect("a folder");
    let spec = written(dir.path(), text);
    let mut arguments = vec!["--across", devices, "--json", spec.to_str().expect("plain letters")];
    arguments.extend(more);
    let run = mstar_with(variable, value, arguments);
    let document = serde_json::from_str(&run.stdout).unwrap_or(Value::Null);
    (run, document)
}

/// The attention resources compared, and how many rows of each.
fn rows(compared: &Value) -> Vec<(String, u64)> {
    let nodes = compared["nodes"].as_array().expect("a list");
    let of = |node: &Value| {
        (node["attention"].as_str().expect("a name").to_owned(), node["rows"].as_u64().expect("a number"))
    };
    nodes.iter().map(of).collect()
}

#[test]
fn the_processor_agrees_with_itself_bit_for_bit() {
    for (text, needs) in
        [(PAGED, cfg!(feature = "paged")), (SPARSE, cfg!(all(feature = "dsa", feature = "mla")))]
    {
        if !needs {
            continue;
        }
        for more in [&[][..], &["--set", "graph={ buckets: [1, 4], slots: 2 }"]] {
            let (run, found) = across("cpu,cpu,cpu", text, more, ("NO_COLOR", "1"));
            assert_eq!((run.code, &found["summary"]["verdict"]), (0, &"pass".into()), "{}", run.stderr);
            assert_eq!(found["devices"], serde_json::json!(["cpu", "cpu (2)", "cpu (3)"]));
            let digests = found["digests"].as_array().expect("a list");
            assert!(digests.iter().all(|digest| *digest == digests[0]), "{digests:?}");
            let compared = found["compared"].as_array().expect("a list");
            assert_eq!(compared.len(), 2);
            for compared in compared {
                assert_eq!((&compared["exact"], &compared["disagree"]), (&true.into(), &0.into()));
                let node = &compared["nodes"][0];
                assert!(
                    node["vectors"].as_u64() > Some(500) && node["vectors"] == node["same_bits"],
                    "{node}"
                );
                // Two layers of every row of every step.
                assert!(rows(compared)[0].1 >= 2 * found["steps"].as_u64().expect("a number"), "{found}");
            }
        }
    }
}

/// With the feature `mutants` alone: the second device draws other content than the first.
#[test]
#[cfg(all(feature = "mutants", feature = "paged"))]
fn a_device_that_goes_wrong_is_told_with_place_values_and_bound() {
    let (run, found) = across("cpu,cpu", PAGED, &[], ("MSTAR_MUTANT", "across-other-content"));
    assert_eq!((run.code, &found["summary"]["verdict"]), (1, &"fail".into()));
    assert!(
        run.stderr.contains("a check failed: step 0, attn, request r0 (main), layer 0, position"),
        "{}",
        run.stderr
    );
    let told = found["compared"][0]["disagreements"].as_array().expect("a list");
    assert!((1..=8).contains(&told.len()), "{told:?}");
    for told in told {
        assert!(told["position"].is_u64() && told["head"].is_u64() && told["step"].is_u64(), "{told}");
        assert!(told["error"].as_f64() > told["allowed"].as_f64(), "{told}");
        assert_ne!(told["values"][0], told["values"][1], "{told}");
    }
}

#[test]
fn what_cannot_be_compared_is_refused_with_the_cure() {
    let dir = tempfile::tempdir().expect("a folder");
    let spec = written(dir.path(), PAGED);
    let spec = spec.to_str().expect("plain letters");
    for (arguments, said) in [
        (&["--across", "cpu", spec][..], "name two devices or more, such as cpu,cuda:0"),
        (&["--across", "auto,cpu", spec], "name each, such as cpu,cuda:0"),
        (&["--across", "cpu,tpu", spec], "--across: "),
        (&["--across", "cpu,cuda:99", spec], "cuda:99"),
        (&["--across", "cpu,cuda:99", spec], "leave it out of --across"),
        (&["--across", "cpu,cpu", spec, spec], "one spec is compared, 2 were named"),
        (&["--across", "cpu,cpu", "no/such/spec.yaml"], "no/such/spec.yaml"),
        (&["--across", "cpu,cpu", spec, "--set", "model.layers=0"], "model.layers"),
        (&["--across", "cpu,cpu", spec, "--device", "cpu"], "--device"),
        (&["--across", "cpu,cpu", spec, "--dump", "x"], "--dump"),
        (&[spec, "--steps", "3"], "--across"),
    ] {
        let run = mstar(arguments);
        assert_eq!(run.code, 2, "{arguments:?}: {}", run.stderr);
        assert!(run.stderr.contains(said), "{arguments:?}: {}", run.stderr);
        assert_eq!(run.stdout, "", "{arguments:?}");
    }
}

#[test]
#[cfg(feature = "paged")]
fn a_comparison_of_nothing_is_no_agreement_and_steps_are_limited() {
    let (run, found) = across("cpu,cpu", PAGED, &["--steps", "0"], ("NO_COLOR", "1"));
    assert_eq!((run.code, &found["summary"]["rows"]), (1, &0.into()));
    assert!(run.stderr.contains("nothing of cpu (2) was compared"), "{}", run.stderr);
    let (run, found) = across("cpu,cpu", PAGED, &["--steps", "2"], ("NO_COLOR", "1"));
    assert_eq!((run.code, &found["steps"], &found["stopped_early"]), (0, &2.into(), &true.into()));
    let dir = tempfile::tempdir().expect("a folder");
    let spec = written(dir.path(), PAGED);
    let run =
        mstar(["--across", "cpu,cpu", "--quiet", "--steps", "1", spec.to_str().expect("plain letters")]);
    assert_eq!((run.code, run.stdout.as_str(), run.stderr.as_str()), (0, "", ""));
}

/// With the feature `emulator` alone: the kernels of a device against those of the processor.
#[test]
#[cfg(all(feature = "emulator", feature = "paged", feature = "mla", feature = "dsa"))]
fn the_emulated_device_agrees_with_the_processor_and_with_itself() {
    for (text, more) in [
        (PAGED, &["--set", "workload.requests=2"][..]),
        (PAGED, &["--set", "workload.requests=2", "--set", "graph={ buckets: [1, 4], slots: 2 }"]),
        (SPARSE, &["--set", "workload.requests=2"]),
        (PAGED, &["--set", "workload.requests=2", "--set", "resources.kv.dtype=fp8_e4m3"]),
        (SPARSE, &["--set", "workload.requests=2", "--set", "resources.kv.dtype=fp8_e4m3"]),
    ] {
        let (run, found) = across("cpu,cuda:0,cuda:0", text, more, ("MSTAR_CUDA", "emulated"));
        assert_eq!(run.code, 0, "{} {found:#}", run.stderr);
        let first = &found["compared"][0];
        let node = &first["nodes"][0];
        // It is another machine, and rounds otherwise.
        assert_eq!(first["exact"], false);
        assert!(node["same_bits"].as_u64() < node["vectors"].as_u64(), "{node}");
        assert!(node["worst_row"]["error"].as_f64() > Some(0.0), "{node}");
        if more.contains(&"graph={ buckets: [1, 4], slots: 2 }") {
            assert!(found["captured"][1].as_u64() > Some(0) && found["captured"][0] == 0, "{found}");
        }
    }
    let (run, found) = across("cuda:0,cuda:0", PAGED, &["--steps", "4"], ("MSTAR_CUDA", "emulated"));
    assert_eq!((run.code, &found["compared"][0]["exact"]), (0, &true.into()), "{}", run.stderr);
}
