//! Every refusal of the loader, through `check(change, expected line)`.

use mstar_kernels::DType;

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
    assert_eq!((kv.config.retention, kv.host_pages), (Some(256), 256));
    assert_eq!(spec.graph.unwrap().buckets, [1, 8]);
}

/// One change to the good spec, and the lines that refuse it.
#[track_caller]
fn check(from: &str, to: &str, expected: &str) {
    assert_eq!(GOOD.matches(from).count(), 1, "{from:?} should stand once in the good spec");
    let said = match load(&GOOD.replace(from, to)) {
        Ok(_) => "accepted".to_string(),
        Err(said) => said,
    };
    assert_eq!(said, expected);
}

/// As [`check`], where it is accepted.
#[track_caller]
fn accept(from: &str, to: &str) -> Spec {
    assert_eq!(GOOD.matches(from).count(), 1, "{from:?} should stand once in the good spec");
    load(&GOOD.replace(from, to)).unwrap()
}

#[test]
fn f36_a_misspelt_key_is_refused_with_the_nearest() {
    check(
        "page_size",
        "page_sze",
        "s.yaml:17:5: resources.kv.page_sze: unknown key in a resource of kind kv; did you mean page_size?",
    );
    check(
        "chunked_prefill",
        "chunked_prefil",
        "s.yaml:36:3: workload.chunked_prefil: unknown key in a workload of kind synthetic; did you mean chunked_prefill?",
    );
    check(
        "schedule: invariant",
        "shedule: invariant",
        "s.yaml:5:1: shedule: unknown key in the spec; did you mean schedule?",
    );
}

#[test]
fn f36_a_misplaced_key_is_told_its_section() {
    check(
        "seed: 7",
        "page_size: 7",
        "s.yaml:4:1: page_size: unknown key in the spec; it belongs to a resource of kind kv",
    );
    check(
        "  layers: 2",
        "  layers: 2\n  max_batch: 4",
        "s.yaml:10:3: model.max_batch: unknown key in model; it belongs to workload",
    );
    check(
        "  slots: 2",
        "  slots: 2\n  head_dim: 64",
        "s.yaml:29:3: graph.head_dim: unknown key in graph; it belongs to model",
    );
}

#[test]
fn f36_hyphens_are_told_underscores() {
    check(
        "  slots: 2",
        "  slots: 2\nworld-size: 1",
        "s.yaml:29:1: world-size: unknown key in the spec; write world_size",
    );
    check(
        "    retention: 256",
        "    retention: 256\n    host-pages: 4",
        "s.yaml:22:5: resources.kv.host-pages: unknown key in a resource of kind kv; write host_pages",
    );
}

#[test]
fn f36_a_duplicate_key_names_both_lines() {
    check("seed: 7", "seed: 7\nseed: 8", "s.yaml:5:1: seed: given twice; the first is on line 4");
    check(
        "    page_size: 16",
        "    page_size: 16\n    page_size: 16",
        "s.yaml:18:5: resources.kv.page_size: given twice; the first is on line 17",
    );
}

#[test]
fn f36_false_is_false() {
    let on = accept("prefix_cache: false", "prefix_cache: true");
    let off = load(GOOD).unwrap();
    let prefix = |spec: &Spec| spec.caches().next().unwrap().1.config.prefix_cache;
    assert_eq!((prefix(&on), prefix(&off)), (true, false));
    let sinks = |to: &str| accept("  head_dim: 64", &format!("  head_dim: 64\n  {to}")).model;
    assert!(sinks("sinks: true").sinks && !sinks("sinks: false").sinks);
    assert!(sinks("alibi: true").alibi && !sinks("alibi: false").alibi);
    let workload = |to: &str| accept("  max_batch: 4", &format!("  max_batch: 4\n  {to}")).workload.unwrap();
    assert!(workload("preplan: true").preplan && !workload("preplan: false").preplan);
    let forks = |to: &str| match workload(&format!("forks: {{ labels: [cond, uncond], {to} }}")).kind {
        workload::WorkloadKind::Synthetic(synthetic) => synthetic.forks.unwrap().combined,
        _ => unreachable!(),
    };
    assert!(forks("combined: true") && !forks("combined: false"));
    check(
        "prefix_cache: false",
        "prefix_cache: no",
        "s.yaml:20:19: resources.kv.prefix_cache: expected true or false, got no; write false",
    );
    check(
        "prefix_cache: false",
        "prefix_cache: \"false\"",
        "s.yaml:20:19: resources.kv.prefix_cache: expected true or false, got the text \"false\"; remove the quotes",
    );
}

#[test]
fn f36_numbers_out_of_range_name_the_range() {
    let page_size = |value: &str, said: &str| {
        check(
            "page_size: 16",
            &format!("page_size: {value}"),
            &format!(
                "s.yaml:17:16: resources.kv.page_size: expected a whole number from 1 to 65536, got {said}"
            ),
        );
    };
    page_size("0", "0");
    page_size("-1", "-1");
    page_size("1e9", "1e9; write 1000000000");
    page_size("18446744073709551615", "18446744073709551615");
    page_size("18446744073709551616", "18446744073709551616");
    page_size(".nan", ".nan");
    page_size(".inf", ".inf");
    page_size("\"16\"", "the text \"16\"; remove the quotes");
    page_size("true", "true");
    page_size("16.5", "16.5");
    page_size("0x10", "0x10");
    page_size("16_384", "16_384; write 16384");
    page_size("~", "nothing");
    page_size("[16]", "a list of 1");
    page_size("{ a: 16 }", "a map");
    check(
        "max_num_pages: 256",
        "max_num_pages: 1",
        "s.yaml:18:20: resources.kv.max_num_pages: expected a whole number from 2 to 2147483647, got 1",
    );
    check(
        "max_seq_len: 2048",
        "max_seq_len: 4294967296",
        "s.yaml:19:18: resources.kv.max_seq_len: expected a whole number from 1 to 2147483647, got 4294967296",
    );
    check(
        "layers: 2",
        "layers: 0",
        "s.yaml:9:11: model.layers: expected a whole number from 1 to 1024, got 0",
    );
    check(
        "head_dim: 64",
        "head_dim: 513",
        "s.yaml:12:13: model.head_dim: expected a whole number from 1 to 512, got 513",
    );
    check(
        "seed: 7",
        "seed: -7",
        "s.yaml:4:7: seed: expected a whole number from 0 to 18446744073709551615, got -7",
    );
    assert_eq!(accept("seed: 7", "seed: 18446744073709551615").seed, u64::MAX);
    check(
        "seed: 7",
        "seed: 18446744073709551616",
        "s.yaml:4:7: seed: expected a whole number from 0 to 18446744073709551615, got 18446744073709551616",
    );
    check(
        "  head_dim: 64",
        "  head_dim: 64\n  sm_scale: .nan",
        "s.yaml:13:13: model.sm_scale: expected a number from 0.000001 to 1000000, got .nan",
    );
    check(
        "  head_dim: 64",
        "  head_dim: 64\n  logits_soft_cap: 0",
        "s.yaml:13:20: model.logits_soft_cap: expected a number from 0.000001 to 1000000, got 0",
    );
    check(
        "window_left: 127",
        "window_left: -2",
        "s.yaml:13:16: model.window_left: expected a whole number from 0 to 2147483647, got -2",
    );
    let everything = GOOD.replace("window_left: 127", "window_left: -1").replace("    retention: 256\n", "");
    assert_eq!(load(&everything).unwrap().model.window_left, None);
}

#[test]
fn f36_a_list_for_a_map_is_refused() {
    check(
        "graph:\n  buckets: [1, 8]\n  slots: 2",
        "graph: [1, 8]",
        "s.yaml:26:8: graph: expected a map with keys such as `buckets`, got a list of 2",
    );
    check(
        "graph:\n  buckets: [1, 8]\n  slots: 2",
        "graph: 3",
        "s.yaml:26:8: graph: expected a map with keys such as `buckets`, got 3",
    );
    let text = "model: [1]\nresources: [2]\nworkload: [3]\n";
    assert_eq!(
        load(text).unwrap_err(),
        "s.yaml:1:8: model: expected a map with keys such as `layers`, got a list of 1\n\
         s.yaml:2:12: resources: expected a map of names to resources, got a list of 1\n\
         s.yaml:3:11: workload: expected a map with keys such as `kind`, got a list of 1"
    );
    check(
        "  attn:\n    kind: attention\n    backend: paged\n    kv_cache: kv",
        "  attn: attention",
        "s.yaml:22:9: resources.attn: expected a map with the key `kind`, got attention",
    );
}

#[test]
fn nothing_is_allocated_from_an_unchecked_number() {
    check("max_num_pages: 256", "max_num_pages: 2147483647", "accepted");
    check(
        "    page_size: 16\n    max_num_pages: 256",
        "    page_size: 65536\n    max_num_pages: 2147483647",
        "s.yaml:18:20: resources.kv.max_num_pages: 2147483647 pages of 67108864 bytes each are more than any machine has; lower it",
    );
    check(
        "requests: 4",
        "requests: 99999999999",
        "s.yaml:31:13: workload.requests: expected a whole number from 1 to 1000000, got 99999999999",
    );
    check(
        "buckets: [1, 8]",
        "buckets: [1, 99999999]",
        "s.yaml:27:16: graph.buckets[1]: expected a whole number from 1 to 65536, got 99999999",
    );
}

#[test]
fn words_are_told_apart() {
    check("dtype: bf16", "dtype: bfloat16", "s.yaml:3:8: dtype: expected f32, bf16 or f16, got bfloat16");
    check(
        "dtype: bf16",
        "dtype: bf6",
        "s.yaml:3:8: dtype: expected f32, bf16 or f16, got bf6; did you mean bf16?",
    );
    check(
        "device: cpu",
        "device: gpu",
        "s.yaml:2:9: device: expected auto, cpu, cuda or cuda:N with N below 1024, got gpu",
    );
    check(
        "device: cpu",
        "device: 'cuda:'",
        "s.yaml:2:9: device: expected auto, cpu, cuda or cuda:N with N below 1024, got cuda:",
    );
    check(
        "device: cpu",
        "device: cuda:+1",
        "s.yaml:2:9: device: expected auto, cpu, cuda or cuda:N with N below 1024, got cuda:+1",
    );
    check(
        "schedule: invariant",
        "schedule: fast",
        "s.yaml:5:11: schedule: expected invariant or throughput, got fast",
    );
    check(
        "fallback: refuse",
        "fallback: refrence",
        "s.yaml:6:11: fallback: expected refuse or reference, got refrence; did you mean reference?",
    );
    check(
        "kernels: auto",
        "kernels: [mma]",
        "s.yaml:7:10: kernels: expected auto, mma or wgmma, got a list of 1",
    );
    check(
        "    kind: kv",
        "    kind: kvs",
        "s.yaml:16:11: resources.kv.kind: expected kv, attention, dsa or ring, got kvs; did you mean kv?",
    );
    check(
        "  kind: synthetic",
        "  kind: sinthetic",
        "s.yaml:30:9: workload.kind: expected synthetic or trace, got sinthetic; did you mean synthetic?",
    );
    check("    kind: kv\n", "", "s.yaml:16:5: resources.kv: missing kind; it is kv, attention, dsa or ring");
    check(
        "arrivals: { poisson: 10 }",
        "arrivals: never",
        "s.yaml:32:13: workload.arrivals: expected all_at_once or { poisson: RATE }, got never",
    );
}

#[test]
fn a_model_is_checked() {
    check(
        "num_kv_heads: 2",
        "num_kv_heads: 3",
        "s.yaml:10:17: model.num_qo_heads: 8 is not a multiple of num_kv_heads, which is 3",
    );
    check(
        "  head_dim: 64\n",
        "",
        "s.yaml:9:3: model.head_dim: missing; a cache of heads needs it (a latent cache needs kv_lora_rank)",
    );
    check(
        "  num_kv_heads: 2\n",
        "",
        "s.yaml:9:3: model.num_kv_heads: missing; a cache of heads needs it, and head_dim is given",
    );
    check("  layers: 2\n", "", "s.yaml:9:3: model.layers: missing; model needs it");
    check(
        "  head_dim: 64",
        "  head_dim: 64\n  head_dim_vo: 32",
        "s.yaml:17:5: resources.kv: a page holds keys and values of one width; model.head_dim_vo must be 64 or left out",
    );
    check(
        "  head_dim: 64",
        "  head_dim: 64\n  qk_rope_head_dim: 32",
        "s.yaml:13:21: model.qk_rope_head_dim: has no effect without kv_lora_rank; remove it",
    );
    // With a head_dim beside it too: that is the width of another cache's queries.
    for head_dim in ["  head_dim: 64\n", ""] {
        check(
            "  head_dim: 64\n",
            &format!("{head_dim}  kv_lora_rank: 512\n"),
            "s.yaml:9:3: model.sm_scale: missing; it belongs to the width of a query before absorption, \
             (nope + rope)^-0.5 of the model's own query, which kv_lora_rank does not say",
        );
    }
    check(
        "kernels: auto",
        "kernels: auto\nworld_size: 3",
        "s.yaml:8:13: world_size: 8 num_qo_heads cannot be shared evenly by world_size 3",
    );
    let sharded = accept("kernels: auto", "kernels: auto\nworld_size: 4");
    assert_eq!(sharded.model.rank_heads(4), Ok(RankHeads { num_qo_heads: 2, num_kv_heads: 1 }));
}

#[test]
fn names_of_resources_are_resolved() {
    check(
        "kv_cache: kv",
        "kv_cache: kw",
        "s.yaml:25:15: resources.attn.kv_cache: no resource is called kw; did you mean kv?",
    );
    check(
        "kv_cache: kv",
        "kv_cache: pages",
        "s.yaml:25:15: resources.attn.kv_cache: no resource is called pages; there is kv, attn",
    );
    check(
        "kv_cache: kv",
        "kv_cache: attn",
        "s.yaml:23:5: resources.attn: attn -> attn depend on one another; remove one of them",
    );
    check(
        "kv_cache: kv",
        "kv_cache: kv\n    query_from: kv",
        "s.yaml:26:17: resources.attn.query_from: kv is the cache that is attended already; remove query_from",
    );
    check(
        "    retention: 256",
        "    retention: 256\n    depends_on: [attn]",
        "s.yaml:24:5: resources.attn: attn -> kv -> attn depend on one another; remove one of them",
    );
    check(
        "  kv:\n",
        "  \"k v\":\n",
        "s.yaml:15:3: resources.k v: a resource's name is made of letters, digits, _ and -\ns.yaml:25:15: resources.attn.kv_cache: no resource is called kv; did you mean k v?",
    );
}

#[test]
fn retention_reaches_as_far_as_the_window() {
    check(
        "retention: 256",
        "retention: 126",
        "s.yaml:21:16: resources.kv.retention: 126 tokens are fewer than the 127 to the left of a query that attn sees (model.window_left)",
    );
    accept("retention: 256", "retention: 127");
    check(
        "  window_left: 127\n",
        "",
        "s.yaml:20:16: resources.kv.retention: attn attends every token, 256 would be kept; set model.window_left to 256 or less, or remove retention",
    );
    check(
        "backend: paged",
        "backend: cross",
        "s.yaml:13:16: model.window_left: attn attends a context, whose tokens have no distance to its queries; remove it\ns.yaml:21:16: resources.kv.retention: attn attends a whole context; remove retention\ns.yaml:30:3: workload: missing context_len; attn attends an encoder's context",
    );
}

#[test]
fn a_cache_holds_what_a_step_writes() {
    check(
        "    page_size: 16",
        "    page_size: 16\n    dtype: f16",
        "s.yaml:18:12: resources.kv.dtype: f16, and a step's keys and values are bf16; write bf16, or fp8_e4m3, or change dtype",
    );
    accept("    page_size: 16", "    page_size: 16\n    dtype: bf16");
    let spec = accept("    page_size: 16", "    page_size: 16\n    dtype: fp8_e4m3");
    let (_, kv) = spec.caches().next().unwrap();
    assert_eq!(kv.config, kv.config.clone().quantised());
    assert_eq!((kv.config.dtype, kv.config.planes.len()), (DType::E4m3, 1));
    assert!(kv.config.check().is_ok());
    let named = "planes: [{ name: kv_scales, dtype: f32, width: 4 }]";
    let said = load(
        &GOOD.replace("    page_size: 16", &format!("    page_size: 16\n    dtype: fp8_e4m3\n    {named}")),
    );
    assert!(said.unwrap_err().contains("has the plane kv_scales of its own"));
    let said = load(&GOOD.replace("dtype: bf16", "dtype: fp8_e4m3")).unwrap_err();
    assert!(said.contains("dtype: expected f32, bf16 or f16, got fp8_e4m3"), "{said}");
}

#[test]
fn cross_attention_and_the_prefix_index_exclude_one_another() {
    let text = decoder().replace("prefix_cache: false", "prefix_cache: true");
    assert_eq!(
        load(&text).unwrap_err(),
        "s.yaml:19:19: resources.kv.prefix_cache: attn attends a context, so equal prompts have unequal pages; write false"
    );
}

#[test]
fn cross_attention_refuses_what_counts_positions_once_and_where_it_stands() {
    load(&decoder()).expect("a decoder over contexts");
    for (line, key) in
        [("window_left: 12", "13:16: model.window_left"), ("alibi: true", "13:10: model.alibi")]
    {
        let text = decoder().replace("resources:", &format!("  {line}\nresources:"));
        let why = "attn attends a context, whose tokens have no distance to its queries; remove it";
        assert_eq!(load(&text).unwrap_err(), format!("s.yaml:{key}: {why}"));
    }
}

/// `GOOD`, attending contexts.
fn decoder() -> String {
    GOOD.replace("backend: paged", "backend: cross")
        .replace("    retention: 256\n", "")
        .replace("  window_left: 127\n", "")
        .replace("  max_batch: 4", "  context_len: 30\n  max_batch: 4")
}

#[test]
fn a_workload_is_checked() {
    check(
        "prompt_len: { uniform: [16, 64] }",
        "prompt_len: { uniform: [64, 16] }",
        "s.yaml:33:26: workload.prompt_len.uniform: expected [MIN, MAX] with MIN no larger than MAX",
    );
    check(
        "prompt_len: { uniform: [16, 64] }",
        "prompt_len: { uniform: [64] }",
        "s.yaml:33:26: workload.prompt_len.uniform: expected [MIN, MAX] with MIN no larger than MAX",
    );
    check(
        "prompt_len: { uniform: [16, 64] }",
        "prompt_len: { normal: [16, 64] }",
        "s.yaml:33:17: workload.prompt_len.normal: unknown key in a length; did you mean lognormal?",
    );
    check(
        "prompt_len: { uniform: [16, 64] }",
        "prompt_len: {}",
        "s.yaml:33:15: workload.prompt_len: expected one of uniform and lognormal, got 0 keys",
    );
    check(
        "prompt_len: { uniform: [16, 64] }",
        "prompt_len: 0",
        "s.yaml:33:15: workload.prompt_len: expected a whole number from 1 to 1073741823, got 0",
    );
    check(
        "prompt_len: { uniform: [16, 64] }",
        "prompt_len: []",
        "s.yaml:33:15: workload.prompt_len: expected a list of 1 to 4096 lengths, got a list of 0",
    );
    check(
        "prompt_len: { uniform: [16, 64] }",
        "prompt_len: { lognormal: { median: 100, sigma: 1, min: 9, max: 8 } }",
        "s.yaml:33:66: workload.prompt_len.lognormal.max: 8 is below min, which is 9",
    );
    check(
        "  max_batch: 4",
        "  max_batch: 4\n  file: x.csv",
        "s.yaml:36:3: workload.file: unknown key in a workload of kind synthetic; it belongs to a workload of kind trace",
    );
    check(
        "  max_batch: 4",
        "  max_batch: 4\n  tree: { branching: [64, 64, 64] }",
        "s.yaml:36:22: workload.tree.branching: a tree of more than 4096 nodes; lower the counts",
    );
    check(
        "  max_batch: 4",
        "  max_batch: 4\n  forks: { labels: [main] }",
        "s.yaml:36:21: workload.forks.labels[0]: main is the name of a stream that every request may have; choose another",
    );
    check(
        "  max_batch: 4",
        "  max_batch: 4\n  forks: { labels: [a, a] }",
        "s.yaml:36:24: workload.forks.labels[1]: a is listed twice",
    );
    check(
        "  max_batch: 4",
        "  max_batch: 4\n  context_len: 5",
        "s.yaml:36:16: workload.context_len: has no effect without an attention resource of backend cross; remove it",
    );
    check(
        "  max_batch: 4",
        "  max_batch: 4\n  snapshot: { after: 2, frames: 5 }",
        "s.yaml:36:13: workload.snapshot: has no effect without a resource of kind ring; remove it",
    );
    check(
        "buckets: [1, 8]",
        "buckets: [8, 1]",
        "s.yaml:27:12: graph.buckets: expected rows in rising order, none twice",
    );
    let trace = "  kind: trace\n  file: x.csv\n  time_scale: -1\n";
    let said = load(&format!("{}workload:\n{trace}", &GOOD[..GOOD.find("workload:").unwrap()])).unwrap_err();
    assert_eq!(said, "s.yaml:32:15: workload.time_scale: expected a number from 0 to 1000000, got -1");
}

#[test]
fn other_kinds_of_resource_are_checked() {
    let with = |resource: &str| {
        load(&GOOD.replace("graph:\n", &format!("  other: {resource}\ngraph:\n"))).map_or_else(
            |said| said.lines().map(|l| l.split_once(": ").unwrap().1.to_string()).collect(),
            |_| vec!["accepted".to_string()],
        )
    };
    let dsa = "kind: dsa, index_n_heads: 4, index_head_dim: 32, index_topk: 16";
    assert_eq!(
        with(&format!("{{ {dsa}, kv_cache: kv }}")),
        [
            "resources.kv.retention: other scores every token; remove retention",
            "resources.other.kv_cache: kv is not a kv cache of layout mla",
        ]
    );
    assert_eq!(
        with(&format!("{{ {dsa} }}")),
        ["resources.other.kv_cache: missing; a resource of kind dsa needs it"]
    );
    assert_eq!(
        with(&format!("{{ {dsa}, kv_cache: kv, full_layers: [1] }}")).last().unwrap(),
        "resources.other.full_layers: layer 0 has no selection to share; begin with 0, not 1"
    );
    assert_eq!(
        with(&format!("{{ {dsa}, kv_cache: kv, full_layers: [0, 2] }}")).last().unwrap(),
        "resources.other.full_layers[1]: expected a whole number from 0 to 1, got 2"
    );
    let planes = |planes: &str| {
        with(&format!("{{ kind: kv, page_size: 16, max_num_pages: 8, max_seq_len: 64, planes: {planes} }}"))
    };
    assert_eq!(planes("[{ name: scales, dtype: u8, width: 4 }]"), ["accepted"]);
    assert_eq!(
        planes("[{ name: a, dtype: u8, width: 4 }, { name: a, dtype: u8, width: 4 }]"),
        ["resources.other.planes[1].name: two planes are called a"]
    );
    assert_eq!(planes("{}"), ["resources.other.planes: expected a list of 1 to 16 planes, got a map"]);
    assert_eq!(
        with("{ kind: kv, layout: mla, page_size: 16, max_num_pages: 8, max_seq_len: 64 }"),
        ["resources.other.layout: mla needs model.kv_lora_rank"]
    );
}

#[test]
fn every_fault_of_a_file_is_listed_up_to_ten() {
    let mut text = GOOD.to_string();
    for n in 0..13 {
        text = text.replace("graph:\n", &format!("zzz{n}: 1\ngraph:\n"));
    }
    let said = load(&text).unwrap_err();
    assert_eq!(said.lines().count(), 11, "{said}");
    assert!(said.ends_with("s.yaml: and 3 more"), "{said}");
}

#[test]
fn overrides_are_judged_like_the_file() {
    let with = |set: &str| {
        Spec::from_yaml(GOOD.as_bytes(), &[set.to_string()], "s.yaml").map_err(|errors| errors.to_string())
    };
    assert_eq!(with("resources.kv.page_size=32").unwrap().caches().next().unwrap().1.config.page_size, 32);
    assert_eq!(with("graph.buckets=[2, 4]").unwrap().graph.unwrap().buckets, [2, 4]);
    let said = |set: &str| with(set).unwrap_err();
    assert_eq!(
        said("resources.kv.page_sze=32"),
        "s.yaml: --set resources.kv.page_sze: unknown key in a resource of kind kv; did you mean page_size?"
    );
    assert_eq!(
        said("resources.kw.page_size=32"),
        "s.yaml: --set resources.kw: no such resource in the file, and no kind is given; did you mean kv?"
    );
    assert_eq!(
        said("resources.kv.page_size=0"),
        "s.yaml: --set resources.kv.page_size: expected a whole number from 1 to 65536, got 0"
    );
    assert_eq!(said("seed"), "s.yaml: --set seed: expected key=value, such as workload.requests=20");
}

#[test]
fn a_file_that_is_no_spec_is_one_line() {
    let said = |path: &str| Spec::load(std::path::Path::new(path), &[]).unwrap_err().to_string();
    assert_eq!(
        said("/nonexistent/x.yaml"),
        "/nonexistent/x.yaml: no such file; specs/quickstart.yaml is one to begin with"
    );
    assert_eq!(said("/"), "/: a directory, not a spec; name one file");
    if std::path::Path::new("/dev/zero").exists() {
        assert!(said("/dev/zero").contains("expected at most"), "{}", said("/dev/zero"));
        assert!(said("/dev/null").contains("empty"), "{}", said("/dev/null"));
    }
}

mod fuzz;
mod ring;
