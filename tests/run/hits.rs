//! Prefix hits: against a function of the trace alone, and against a model that replays the reported log.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use serde_json::Value;

use crate::program::{Ran, root, run, spec};

/// Tokens of a block after the spec's `length_scale`, and of a page.
const BLOCK: usize = 64;
const PAGE: usize = 16;

/// What each request of a trace should hit when they run one after another and nothing is evicted: whole pages of its
/// prompt that an earlier prompt had under the same prefix, less what would leave no token to compute.
fn expected_hits(trace: &str, requests: usize) -> Vec<usize> {
    let mut seen: HashSet<Vec<(u64, usize)>> = HashSet::new();
    let mut hits = Vec::new();
    for line in trace.lines().take(requests) {
        let request: Value = serde_json::from_str(line).expect("JSON");
        let ids: Vec<u64> =
            request["hash_ids"].as_array().expect("ids").iter().filter_map(Value::as_u64).collect();
        let len = (request["input_length"].as_u64().expect("a length") as usize).div_ceil(512 / BLOCK);
        // A prefix is named by its blocks, the last one by how much of it there is.
        let prefix = |tokens: usize| -> Vec<(u64, usize)> {
            (0..tokens.div_ceil(BLOCK)).map(|b| (ids[b], BLOCK.min(tokens - b * BLOCK))).collect()
        };
        let pages = (1..=(len - 1) / PAGE).take_while(|page| seen.contains(&prefix(page * PAGE))).count();
        hits.push(pages * PAGE);
        seen.extend((1..=len / PAGE).map(|page| prefix(page * PAGE)));
    }
    hits
}

fn trace() -> String {
    std::fs::read_to_string(root().join("specs/data/conversation_trace.jsonl"))
        .expect("the project's own trace")
}

fn events(ran: &Ran) -> &[Value] {
    ran.report["events"].as_array().expect("a log")
}

fn hits(ran: &Ran) -> BTreeMap<usize, usize> {
    let admits = events(ran).iter().filter(|event| event["event"] == "admit");
    admits
        .map(|event| (ordinal(&event["request"]), event["hit_tokens"].as_u64().expect("a count") as usize))
        .collect()
}

fn ordinal(request: &Value) -> usize {
    request.as_str().and_then(|id| id.strip_prefix('r')?.parse().ok()).expect("an id like r7")
}

#[test]
fn one_at_a_time_hits_are_what_thirty_lines_over_hash_ids_say() {
    let ran =
        run(&spec("mooncake-prefix.yaml"), &["--set", "workload.max_batch=1", "--verify", "0.02"]).good();
    assert_eq!(ran.number("cache.evictions"), 0, "nothing is evicted in this run");
    let expected = expected_hits(&trace(), 200);
    assert!(expected.iter().sum::<usize>() > 1000);
    let got = hits(&ran);
    assert_eq!(got.len(), expected.len());
    for (request, expected) in expected.into_iter().enumerate() {
        assert_eq!(got[&request], expected, "request r{request}");
    }
}

#[test]
fn the_reported_log_explains_every_hit_even_when_pages_are_evicted() {
    let tight = ["--set", "resources.kv.max_num_pages=300", "--set", "workload.output_len=1"];
    let ran = run(&spec("mooncake-prefix.yaml"), &tight[..2]).good();
    assert!(ran.number("cache.evictions") > 0, "{}", ran.stdout);
    let blocks: Vec<(Vec<u64>, usize)> = trace()
        .lines()
        .map(|line| {
            let request: Value = serde_json::from_str(line).expect("JSON");
            let ids = request["hash_ids"].as_array().expect("ids").iter().filter_map(Value::as_u64).collect();
            (ids, (request["input_length"].as_u64().expect("a length") as usize).div_ceil(512 / BLOCK))
        })
        .collect();
    // A page is the prefix that it ends: blocks, and how far into the last one. Pages past the prompt are a request's own.
    let page = |request: usize, ordinal: usize| -> Option<Vec<(u64, usize)>> {
        let (ids, len) = &blocks[request];
        let end = (ordinal + 1) * PAGE;
        (end <= *len)
            .then(|| (0..end.div_ceil(BLOCK)).map(|b| (ids[b], BLOCK.min(end - b * BLOCK))).collect())
    };
    let mut index: BTreeSet<Vec<(u64, usize)>> = BTreeSet::new();
    let mut entries: HashMap<u64, Vec<(u64, usize)>> = HashMap::new();
    let mut found = 0;
    for event in events(&ran) {
        let number = |key: &str| event[key].as_u64().expect("a number");
        match event["event"].as_str() {
            Some("admit") => {
                let request = ordinal(&event["request"]);
                let most = (blocks[request].1 - 1) / PAGE;
                let held =
                    (0..most).take_while(|&p| page(request, p).is_some_and(|page| index.contains(&page)));
                let expected = held.count() * PAGE;
                assert_eq!(number("hit_tokens") as usize, expected, "request r{request}");
                found += expected;
            }
            Some("commit") => {
                let request = ordinal(&event["request"]);
                let stored = event["streams"][0]["tokens"].as_u64().expect("a length") as usize;
                index.extend((0..stored / PAGE).filter_map(|p| page(request, p)));
            }
            Some("index") => {
                if let Some(page) = page(ordinal(&event["request"]), number("ordinal") as usize) {
                    entries.insert(number("entry"), page);
                }
            }
            Some("evict") => {
                if let Some(page) = entries.get(&number("entry")) {
                    index.remove(page);
                }
            }
            _ => {}
        }
    }
    assert!(found > 0);
    assert_eq!(found as u64, ran.number("tokens.prefix_hits"));
    assert_eq!(found as u64, ran.number("prefix_model.hit_tokens"), "the program's own model agrees");
}
