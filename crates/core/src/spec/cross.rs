//! Checks between sections, made once every section reads well on its own.

use mstar_kernels::DType;

use super::resources::{AttentionSpec, KvSpec, ResourceKind};
use super::settled::Spec;
use super::workload::{WorkloadKind, WorkloadSpec};
use super::{Faults, Node};
use crate::kv::KvLayout;

/// Refuses what no section can see alone.
pub(super) fn check(spec: &Spec, root: &Node, faults: &Faults) {
    let at = |path: &[&str]| {
        let mut node = root;
        for key in path {
            match node.get(key) {
                Some(next) => node = next,
                None => break,
            }
        }
        node
    };
    for (name, attention) in spec.attentions() {
        let place = |key: &str| at(&["resources", name.as_str(), key]);
        if let Some(why) = wrong_cache(spec, attention) {
            faults.push(place("kv_cache").error(why));
        }
        if let Some(why) = wrong_queries(spec, attention) {
            faults.push(place("query_from").error(why));
        }
        if attention.backend == "cross" {
            // What a decoder's page holds depends on the context too, which the prefix index does not see.
            for (cache, _) in spec.caches().filter(|(_, kv)| kv.config.prefix_cache) {
                let node = at(&["resources", cache.as_str(), "prefix_cache"]);
                let why =
                    format!("{name} attends a context, so equal prompts have unequal pages; write false");
                faults.push(node.error(why));
            }
            for (key, given) in
                [("window_left", spec.model.window_left.is_some()), ("alibi", spec.model.alibi)]
            {
                if given {
                    let why = format!(
                        "{name} attends a context, whose tokens have no distance to its queries; remove it"
                    );
                    faults.push(at(&["model", key]).error(why));
                }
            }
        }
        if let Some(why) = short_retention(spec, name.as_str(), attention) {
            let cache = attention.kv_cache.as_ref().map_or("", |cache| cache.as_str());
            faults.push(at(&["resources", cache, "retention"]).error(why));
        }
    }
    // e4m3 is quantised from whatever a step writes.
    let other = |kv: &KvSpec| ![spec.dtype, DType::E4m3].contains(&kv.config.dtype);
    for (name, kv) in spec.caches().filter(|(_, kv)| other(kv)) {
        let (has, step) = (kv.config.dtype, spec.dtype);
        let why = format!(
            "{has}, and a step's keys and values are {step}; write {step}, or fp8_e4m3, or change dtype"
        );
        faults.push(at(&["resources", name.as_str(), "dtype"]).error(why));
    }
    for (name, ring) in spec.rings() {
        if ring.config.dtype != spec.dtype {
            let (has, step) = (ring.config.dtype, spec.dtype);
            let why =
                format!("{has}, and a step's keys and values are {step}; write {step}, or change dtype");
            faults.push(at(&["resources", name.as_str(), "dtype"]).error(why));
        }
        for (cache, _) in spec.caches().filter(|(_, kv)| kv.config.prefix_cache) {
            let node = at(&["resources", cache.as_str(), "prefix_cache"]);
            let why = format!("a matched prefix would skip frames that {name} must hold; write false");
            faults.push(node.error(why));
        }
    }
    for resource in &spec.resources {
        if let ResourceKind::Dsa(dsa) = &resource.kind
            && !cache_is(spec, &dsa.kv_cache, |layout| matches!(layout, KvLayout::Mla { .. }))
        {
            let node = at(&["resources", resource.name.as_str(), "kv_cache"]);
            faults.push(node.error(format!("{} is not a kv cache of layout mla", dsa.kv_cache)));
        }
        if let ResourceKind::Dsa(dsa) = &resource.kind
            && spec.caches().any(|(cache, kv)| *cache == dsa.kv_cache && kv.config.retention.is_some())
        {
            let node = at(&["resources", dsa.kv_cache.as_str(), "retention"]);
            faults.push(node.error(format!("{} scores every token; remove retention", resource.name)));
        }
    }
    if let Some(workload) = &spec.workload {
        check_workload(spec, workload, at(&["workload"]), faults);
    }
}

fn cache_is(spec: &Spec, name: &crate::ResourceName, fits: impl Fn(KvLayout) -> bool) -> bool {
    spec.caches().any(|(cache, kv)| cache == name && fits(kv.config.layout))
}

fn wrong_cache(spec: &Spec, attention: &AttentionSpec) -> Option<String> {
    let name = attention.kv_cache.as_ref()?;
    match &spec.resource(name)?.kind {
        ResourceKind::Kv(_) | ResourceKind::Ring(_) => None,
        other => Some(format!("{name} is a resource of kind {}; name a kv or ring cache", other.name())),
    }
}

fn wrong_queries(spec: &Spec, attention: &AttentionSpec) -> Option<String> {
    let name = attention.query_from.as_ref()?;
    if attention.kv_cache.as_ref() == Some(name) {
        return Some(format!("{name} is the cache that is attended already; remove query_from"));
    }
    match &spec.resource(name)?.kind {
        ResourceKind::Kv(_) => None,
        other => Some(format!("{name} is a resource of kind {}; name a kv cache, or step", other.name())),
    }
}

/// A cache that gives back pages which attention still reads.
fn short_retention(spec: &Spec, name: &str, attention: &AttentionSpec) -> Option<String> {
    let cache = attention.kv_cache.as_ref()?;
    let ResourceKind::Kv(kv) = &spec.resource(cache)?.kind else { return None };
    let kept = kv.config.retention?;
    if attention.backend == "cross" {
        return Some(format!("{name} attends a whole context; remove retention"));
    }
    match spec.model.window_left {
        None => Some(format!(
            "{name} attends every token, {kept} would be kept; set model.window_left to {kept} or less, or remove retention"
        )),
        Some(window) if kept < window => Some(format!(
            "{kept} tokens are fewer than the {window} to the left of a query that {name} sees (model.window_left)"
        )),
        Some(_) => None,
    }
}

fn check_workload(spec: &Spec, workload: &WorkloadSpec, node: &Node, faults: &Faults) {
    let crosses: Vec<&str> =
        spec.attentions().filter(|(_, a)| a.backend == "cross").map(|(name, _)| name.as_str()).collect();
    let sparse = spec.resources.iter().any(|resource| matches!(resource.kind, ResourceKind::Dsa(_)));
    if spec.attentions().next().is_none() && !sparse {
        faults.push(node.error("nothing to run: resources has no attention"));
    }
    if let WorkloadKind::Synthetic(synthetic) = &workload.kind
        && synthetic.snapshot.is_some()
        && spec.rings().next().is_none()
    {
        let at = node.get("snapshot").unwrap_or(node);
        faults.push(at.error("has no effect without a resource of kind ring; remove it"));
    }
    match &workload.kind {
        WorkloadKind::Synthetic(synthetic) => match (&synthetic.context_len, crosses.first()) {
            (None, Some(cross)) => {
                faults.push(node.error(format!("missing context_len; {cross} attends an encoder's context")));
            }
            (Some(_), None) => {
                let at = node.get("context_len").unwrap_or(node);
                faults.push(
                    at.error("has no effect without an attention resource of backend cross; remove it"),
                );
            }
            _ => {}
        },
        WorkloadKind::Trace(_) => {
            if let Some(cross) = crosses.first() {
                let why = format!("a trace has no encoder context for {cross}; use kind synthetic");
                faults.push(node.error(why));
            }
        }
    }
}
