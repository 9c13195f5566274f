//! Every key that a spec may hold, by section, and what to say of one that no section holds here.

/// A kind of map and the keys it takes.
#[derive(Debug)]
pub struct Section {
    /// What messages call it: `the spec`, `model`, `a resource of kind kv`.
    pub name: &'static str,
    /// Its keys.
    pub keys: &'static [&'static str],
}

/// The top of a spec.
pub static SPEC: Section = Section {
    name: "the spec",
    keys: &[
        "name",
        "device",
        "dtype",
        "seed",
        "schedule",
        "fallback",
        "kernels",
        "world_size",
        "model",
        "resources",
        "graph",
        "workload",
    ],
};

/// `model`.
pub static MODEL: Section = Section {
    name: "model",
    keys: &[
        "layers",
        "num_qo_heads",
        "num_kv_heads",
        "head_dim",
        "head_dim_vo",
        "kv_lora_rank",
        "qk_rope_head_dim",
        "sm_scale",
        "window_left",
        "logits_soft_cap",
        "sinks",
        "alibi",
    ],
};

/// A resource whose kind is a paged KV cache.
pub static KV: Section = Section {
    name: "a resource of kind kv",
    keys: &[
        "kind",
        "depends_on",
        "layout",
        "dtype",
        "page_size",
        "max_num_pages",
        "max_seq_len",
        "prefix_cache",
        "retention",
        "planes",
        "host_pages",
    ],
};

/// One further plane of a KV cache.
pub static PLANE: Section = Section { name: "a plane", keys: &["name", "dtype", "width"] };

/// A resource whose kind is an attention backend; further keys are the backend's own.
pub static ATTENTION: Section = Section {
    name: "a resource of kind attention",
    keys: &["kind", "depends_on", "backend", "kv_cache", "query_from"],
};

/// A resource whose kind is DeepSeek sparse attention.
pub static DSA: Section = Section {
    name: "a resource of kind dsa",
    keys: &[
        "kind",
        "depends_on",
        "kv_cache",
        "index_n_heads",
        "index_head_dim",
        "index_topk",
        "index_dtype",
        "index_store",
        "full_layers",
    ],
};

/// A resource whose kind is a ring of frames.
pub static RING: Section = Section {
    name: "a resource of kind ring",
    keys: &[
        "kind",
        "depends_on",
        "dtype",
        "tokens_per_frame",
        "num_worlds",
        "ring_frames",
        "ring_buckets",
        "pinned_dilation",
        "layers",
    ],
};

/// One run of a ring's `layers`.
pub static RING_LAYERS: Section = Section {
    name: "a run of a ring's layers",
    keys: &["count", "ring_frames", "ring_buckets", "pinned_dilation"],
};

/// `graph`.
pub static GRAPH: Section = Section { name: "graph", keys: &["buckets", "slots"] };

/// `workload` of kind synthetic.
pub static SYNTHETIC: Section = Section {
    name: "a workload of kind synthetic",
    keys: &[
        "kind",
        "max_batch",
        "chunked_prefill",
        "max_steps",
        "step_ms",
        "preplan",
        "requests",
        "arrivals",
        "prompt_len",
        "output_len",
        "shared_prefixes",
        "forks",
        "denoise",
        "tree",
        "context_len",
        "snapshot",
    ],
};

/// `workload` of kind trace.
pub static TRACE: Section = Section {
    name: "a workload of kind trace",
    keys: &[
        "kind",
        "max_batch",
        "chunked_prefill",
        "max_steps",
        "step_ms",
        "preplan",
        "file",
        "format",
        "requests",
        "skip",
        "time_scale",
        "length_scale",
        "block_tokens",
    ],
};

/// `workload` before its kind is known.
pub static WORKLOAD: Section = Section { name: "workload", keys: &["kind"] };

/// `arrivals` written as a map.
pub static ARRIVALS: Section = Section { name: "arrivals", keys: &["poisson"] };

/// A length distribution written as a map.
pub static LENGTHS: Section = Section { name: "a length", keys: &["uniform", "lognormal"] };

/// A log-normal distribution of lengths.
pub static LOGNORMAL: Section = Section { name: "lognormal", keys: &["median", "sigma", "min", "max"] };

/// `shared_prefixes`.
pub static SHARED_PREFIXES: Section = Section { name: "shared_prefixes", keys: &["count", "len", "share"] };

/// `forks`.
pub static FORKS: Section = Section { name: "forks", keys: &["labels", "combined"] };

/// `workload.snapshot`.
pub static SNAPSHOT: Section = Section { name: "snapshot", keys: &["after", "frames"] };

/// `denoise`.
pub static DENOISE: Section = Section { name: "denoise", keys: &["steps", "tokens"] };

/// `tree`.
pub static TREE: Section = Section { name: "tree", keys: &["branching"] };

/// All of them; what a misplaced key is looked up in.
static ALL: &[&Section] = &[
    &SPEC,
    &MODEL,
    &KV,
    &ATTENTION,
    &DSA,
    &RING,
    &RING_LAYERS,
    &GRAPH,
    &TRACE,
    &SYNTHETIC,
    &PLANE,
    &ARRIVALS,
    &LENGTHS,
    &LOGNORMAL,
    &SHARED_PREFIXES,
    &FORKS,
    &DENOISE,
    &TREE,
];

/// What to say of `key`, which `section` does not have: the key meant, the section it belongs to, or what there is.
pub(super) fn unknown(key: &str, section: &Section) -> String {
    let head = format!("unknown key in {}", section.name);
    let underscored = key.replace('-', "_").to_lowercase();
    if section.keys.contains(&underscored.as_str()) {
        return format!("{head}; write {underscored}");
    }
    let elsewhere = |key: &str| {
        let both = SYNTHETIC.keys.contains(&key) && TRACE.keys.contains(&key);
        let found = ALL.iter().find(|other| other.keys.contains(&key))?;
        Some(if both { WORKLOAD.name } else { found.name })
    };
    if let Some(other) = elsewhere(key) {
        return format!("{head}; it belongs to {other}");
    }
    if let Some(near) = nearest(key, section.keys.iter().copied()) {
        return format!("{head}; did you mean {near}?");
    }
    if let Some(other) = elsewhere(&underscored) {
        return format!("{head}; {underscored} belongs to {other}");
    }
    let far = nearest(key, ALL.iter().flat_map(|other| other.keys.iter().copied()));
    match far.and_then(|far| Some((far, elsewhere(far)?))) {
        Some((far, other)) => format!("{head}; did you mean {far}, which belongs to {other}?"),
        None => format!("{head}; it has {}", section.keys.join(", ")),
    }
}

/// Whether `key`, which the section does not have, is `meant` misspelt.
pub(super) fn is_misspelt(key: &str, meant: &str, section: &Section) -> bool {
    !section.keys.contains(&key)
        && (key.replace('-', "_").to_lowercase() == meant
            || nearest(key, section.keys.iter().copied()) == Some(meant))
}

/// The name nearest to `got`, if one is near enough to be what was meant: at most a third of the letters wrong.
pub fn nearest<'a>(got: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    if got.len() > 64 {
        return None;
    }
    let got = got.to_lowercase();
    names
        .map(|name| (strsim::damerau_levenshtein(&got, name), name))
        .filter(|&(distance, name)| {
            distance <= (name.len().max(got.len()) / 3).max(1) && distance < name.len()
        })
        .min_by_key(|&(distance, _)| distance)
        .map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_strange_key_is_told_what_was_meant() {
        let check = |key: &str, section: &Section, expected: &str| {
            assert_eq!(unknown(key, section), format!("unknown key in {}; {expected}", section.name));
        };
        check("page_sze", &KV, "did you mean page_size?");
        check("page-size", &KV, "write page_size");
        check("Page_Size", &KV, "write page_size");
        check("page_size", &MODEL, "it belongs to a resource of kind kv");
        check("max-batch", &SPEC, "max_batch belongs to workload");
        check("num_kv_head", &KV, "did you mean num_kv_heads, which belongs to model?");
        check("zzzzzz", &GRAPH, "it has buckets, slots");
    }

    #[test]
    fn a_long_key_costs_nothing() {
        assert_eq!(nearest(&"x".repeat(1 << 20), ["page_size"].into_iter()), None);
        assert_eq!(nearest("", ["page_size"].into_iter()), None);
    }
}
