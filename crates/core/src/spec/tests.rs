//! Every refusal of the loader, through `check(change, expected line)`.

use super::*;

/// A spec that is right, and on which every test below makes one thing wrong.
const GOOD: &str = "\
name: good
device: cpu
dtype: bf16
seed: 7
schedule: invariant
fallback: refuse
kernels: auto
model:
  layers: 2
  num_qo_heads: 8
  num_kv_heads: 2
  head_dim: 64
  window_left: 127
resources:
  kv:
    kind: kv
    page_size: 16
    max_num_pages: 256
    max_seq_len: 2048
    prefix_cache: false
    retention: 256
  attn:
    kind: attention
    backend: paged
    kv_cache: kv
graph:
  buckets: [1, 8]
  slots: 2
workload:
  kind: synthetic
  requests: 4
  arrivals: { poisson: 10 }
  prompt_len: { uniform: [16, 64] }
  output_len: 8
  max_batch: 4
  chunked_prefill: 32
";

fn load(text: &str) -> Result<Spec, String> {
    Spec::from_yaml(text.as_bytes(), &[], "s.yaml").map_err(|errors| errors.to_string())
}

#[test]
fn a_good_spec_reads_as_it_was_written() {
    let spec = load(GOOD).unwrap();
    assert_eq!((spec.name.as_str(), spec.seed, spec.model.layers), ("good", 7, 2));
    assert_eq!(spec.model.sm_scale, 0.125);
    let names: Vec<&str> = spec.resources.iter().map(|r| r.name.as_str()).collect();
    assert_eq!(names, ["kv", "attn"]);
    let (_, kv) = spec.caches().next().unwrap();
    assert_eq!((kv.config.retention, kv.host_pages), (Some(256), 0));
    assert_eq!(spec.graph.unwrap().buckets, [1, 8]);
}
