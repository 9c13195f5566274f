//! A prepared spec in words and in JSON.

use mstar_core::attend::{IndexStore, Rank};
use mstar_core::kv::{KvConfig, KvLayout, RingConfig, RingGeometry};
use mstar_core::spec::{Fallback, KernelFamily, ResourceKind, ResourceSpec, Schedule};
use mstar_kernels::Device;
use serde_json::{Value, json};

use super::memory::Place;
use super::prepare::{Prepared, Served, ServedSparse};
use crate::run::workload::RequestPlan;
use crate::text::{COLUMNS, bytes, count, wrap};

/// The kernels that a device will run, one an entry, or why they cannot be told.
pub(super) type Kernels = Result<Vec<String>, String>;

/// In words, at most 80 columns wide.
pub(super) fn as_text(p: &Prepared, kernels: &Kernels) -> String {
    let mut out = wrap("", &format!("{} ({})", p.spec.name, p.path.display()));
    for (head, text) in settings(p) {
        out += &wrap(&format!("  {head:<11}"), &text);
    }
    out += "\nresources, in the order in which a step takes them\n";
    for (index, resource) in p.spec.resources.iter().enumerate() {
        let name = resource.name.as_str();
        out += &wrap(&format!("  {} {name:<8} ", index + 1), &describe(resource));
    }
    if !p.attentions.is_empty() || !p.sparse.is_empty() {
        out += "\nlayers\n";
    }
    for served in &p.attentions {
        let layers = match served.geometry.num_layers {
            1 => "0".to_string(),
            n => format!("0-{}", n - 1),
        };
        out += &wrap(&format!("  {layers:<10} "), &format!("{}: {}", served.name, serving(p, served)));
    }
    for served in &p.sparse {
        for (layers, text) in sparse(p, served) {
            out += &wrap(&format!("  {layers:<10} "), &format!("{}: {text}", served.name));
        }
    }
    match kernels {
        Ok(kernels) if kernels.is_empty() => {}
        Ok(kernels) => {
            out += &format!("\nkernels compiled for {}\n", p.device);
            out += &kernels.iter().map(|kernel| wrap("  ", kernel)).collect::<String>();
        }
        Err(why) => out += &wrap("\nkernels  ", why),
    }
    if !p.requests.is_empty() {
        out += "\nworkload\n";
        for (head, text) in workload(&p.requests) {
            out += &wrap(&format!("  {head:<11}"), &text);
        }
    }
    out += "\nmemory\n";
    for line in &p.estimate.lines {
        let most = if line.at_most { ", at most" } else { "" };
        out += &row(&format!("{}{most}", line.what), &bytes(line.bytes));
        out += &wrap("      ", &line.how);
    }
    out += &row("taken at the start", &bytes(p.estimate.total()));
    if p.device != Device::Cpu {
        for (what, place) in [("of it", Place::Device), ("pinned", Place::Pinned), ("otherwise", Place::Host)]
        {
            let taken = p.estimate.taken(place);
            let at = if place == Place::Device { p.device.to_string() } else { "the host".into() };
            if taken > 0 {
                out += &row(&format!("  {what} on {at}"), &bytes(taken));
            }
        }
    }
    if p.estimate.most() > p.estimate.total() {
        out += &row("at most", &bytes(p.estimate.most()));
    }
    if let Some((free, total)) = p.available.device {
        out += &row(&format!("free on {}, of {}", p.device, bytes(total.into())), &bytes(free.into()));
    }
    if let Some(available) = p.available.host {
        out += &row("available here", &bytes(available.into()));
    }
    let refusals = p.refusals();
    out +=
        if refusals.is_empty() { "\nmstar run would start it.\n" } else { "\nmstar run would refuse it\n" };
    for why in refusals {
        out += &wrap("  - ", &why);
    }
    out
}

/// A line with a figure at the right margin.
fn row(left: &str, right: &str) -> String {
    let left: String = left.chars().take(COLUMNS - 16).collect();
    let width = COLUMNS - 2 - left.chars().count();
    format!("  {left}{right:>width$}\n")
}

fn settings(p: &Prepared) -> Vec<(&'static str, String)> {
    let (spec, model) = (&p.spec, &p.spec.model);
    let device = match (&p.note, p.device) {
        (Some(note), _) => note.trim_start_matches("device auto: ").to_string(),
        (None, device) => device.to_string(),
    };
    let on = match p.device {
        Device::Cpu => format!("{device}; {}, threads {}", p.machine.isa.name(), p.machine.threads),
        _ => device,
    };
    let mut rows = vec![("device", on)];
    rows.push((
        "numbers",
        format!(
            "{}, seed {}, schedule {}, fallback {}, kernels {}",
            spec.dtype,
            spec.seed,
            schedule(spec.schedule),
            fallback(spec.fallback),
            family(spec.kernels)
        ),
    ));
    if spec.schedule == Schedule::Throughput {
        let bits = "the batch decides how long the leaves of paged and latent rows of few queries are: a row's bits may depend on its company";
        rows.push(("throughput", bits.into()));
    }
    let heads = match (model.num_kv_heads, model.head_dim, model.kv_lora_rank) {
        (Some(g), Some(d), _) => format!("{} query heads over {g} KV heads of {d}", model.num_qo_heads),
        (_, _, Some(c)) => {
            format!("{} query heads over latents of {c} + {}", model.num_qo_heads, model.qk_rope_head_dim)
        }
        _ => format!("{} query heads", model.num_qo_heads),
    };
    let ranks = match spec.world_size {
        1 => String::new(),
        n => format!(", one of {n} ranks"),
    };
    rows.push(("model", format!("{} layers, {heads}{ranks}", model.layers)));
    let mut softmax = format!("scale {}", model.sm_scale);
    if let Some(window) = model.window_left {
        softmax += &format!(", window_left {window} (a query sees {} keys)", window as u64 + 1);
    }
    if let Some(cap) = model.logits_soft_cap {
        softmax += &format!(", soft cap {cap}");
    }
    softmax += if model.sinks { ", sinks" } else { "" };
    softmax += if model.alibi { ", ALiBi" } else { "" };
    rows.push(("softmax", softmax));
    if let Some(graph) = &spec.graph {
        let buckets: Vec<String> = graph.buckets.iter().map(usize::to_string).collect();
        rows.push(("graph", format!("buckets of {} rows, {} slots", buckets.join(", "), graph.slots)));
    }
    rows
}

fn schedule(schedule: Schedule) -> &'static str {
    match schedule {
        Schedule::Invariant => "invariant",
        Schedule::Throughput => "throughput",
    }
}

fn fallback(fallback: Fallback) -> &'static str {
    match fallback {
        Fallback::Refuse => "refuse",
        Fallback::Reference => "reference",
    }
}

fn family(family: KernelFamily) -> &'static str {
    match family {
        KernelFamily::Auto => "auto",
        KernelFamily::Mma => "mma",
        KernelFamily::Wgmma => "wgmma",
    }
}

fn describe(resource: &ResourceSpec) -> String {
    let after: Vec<&str> = resource.depends_on.iter().map(|name| name.as_str()).collect();
    let after = if after.is_empty() { String::new() } else { format!("; after {}", after.join(", ")) };
    let text = match &resource.kind {
        ResourceKind::Kv(kv) => {
            let host = match kv.host_pages {
                0 => String::new(),
                n => format!(", offload to {} host pages", count(n as u64)),
            };
            format!("kv cache, {}{host}", cache(&kv.config))
        }
        ResourceKind::Attention(attention) => {
            let over = attention.kv_cache.as_ref().map_or(String::new(), |cache| format!(" over {cache}"));
            let from = match &attention.query_from {
                Some(cache) => format!(", queries packed as in {cache}"),
                None => String::new(),
            };
            format!("attention{over}, backend {}{from}", attention.backend)
        }
        ResourceKind::Dsa(dsa) => format!(
            "sparse attention over {}, {} index heads of {}, {} keys in {}, top {}, {} of its layers select",
            dsa.kv_cache,
            dsa.index.index_n_heads,
            dsa.index.index_head_dim,
            dsa.index.format,
            if dsa.index.store == IndexStore::Pages { "its pages" } else { "buffers" },
            dsa.index.index_topk,
            dsa.index.full_layers.len()
        ),
        ResourceKind::Ring(ring) => format!("ring, {}", frames(&ring.config)),
        _ => resource.kind.name().to_string(),
    };
    text + &after
}

fn frames(ring: &RingConfig) -> String {
    let groups = ring.groups();
    let each = groups.geometries.iter().enumerate().map(|(group, geometry)| {
        let layers = groups.of_layer.iter().filter(|&&of| of == group).count();
        let RingGeometry { ring_frames, ring_buckets, pinned_dilation } = geometry;
        match (ring_buckets == ring_frames, pinned_dilation) {
            (true, 1) => format!("{layers} layers keep the last {ring_frames} frames"),
            _ => format!(
                "{layers} layers keep {ring_buckets} frames, one in {pinned_dilation}, in {ring_frames} slots"
            ),
        }
    });
    let each: Vec<String> = each.collect();
    format!(
        "{} worlds, frames of {} tokens, {} heads of {}, {}: {}",
        ring.num_worlds,
        ring.tokens_per_frame,
        ring.num_kv_heads,
        ring.head_dim,
        ring.dtype,
        each.join(", ")
    )
}

fn cache(kv: &KvConfig) -> String {
    let layout = match kv.layout {
        KvLayout::Nhd { num_kv_heads, head_dim } => format!("nhd, {num_kv_heads} heads of {head_dim}"),
        KvLayout::Mla { kv_lora_rank, qk_rope_head_dim } => {
            format!("mla, latents of {kv_lora_rank} + {qk_rope_head_dim}")
        }
        _ => "another layout".into(),
    };
    let usable = kv.max_num_pages as u64 - 1;
    let mut text = format!(
        "{layout}, {}, {} pages of {} (page 0 is the sink): {} tokens; streams of up to {}",
        kv.dtype,
        count(kv.max_num_pages as u64),
        kv.page_size,
        count(usable * kv.page_size as u64),
        count(kv.max_seq_len as u64)
    );
    text += if kv.prefix_cache { "; prefix cache" } else { "" };
    if let Some(kept) = kv.retention {
        text += &format!("; keeps the last {}", count(kept as u64));
    }
    for plane in &kv.planes {
        text += &format!("; plane {} of {} {}", plane.name, plane.width, plane.dtype);
    }
    text
}

fn serving(p: &Prepared, served: &Served) -> String {
    let asked = if served.named { "named by the spec" } else { "the best that auto found" };
    let how = match &served.support {
        Err(reason) => format!("does not serve it: {reason}"),
        Ok(rank) => format!("{} on {}", rank_in_words(*rank), place(p)),
    };
    let unwritten = unwritten(p, served).map_or(String::new(), |text| format!("; {text}"));
    format!("backend {} ({asked}): {how}{unwritten}", served.backend)
}

/// Where kernels run: a device, and what its processor is told apart by.
fn place(p: &Prepared) -> String {
    match p.device {
        Device::Cpu => format!("{} with {}", p.device, p.machine.isa.name()),
        device => device.to_string(),
    }
}

/// Pages that a step of a dense pass reserves like any other and never writes: the price of naming a backend that a spec
/// may swap for one over pages.
fn unwritten(p: &Prepared, served: &Served) -> Option<String> {
    let denoise = p.spec.synthetic()?.denoise.as_ref().filter(|_| served.backend == "dense")?;
    let pages = denoise.tokens.div_ceil(served.geometry.page_size);
    let streams = p.requests.iter().map(RequestPlan::generating).max().unwrap_or(1);
    Some(format!(
        "a pass of {} tokens that is not kept reserves up to {} pages for each of a request's {streams} streams and writes \
         none of them",
        count(denoise.tokens as u64),
        count(pages as u64)
    ))
}

/// Which layers of a resource of kind `dsa` do what, and by whom.
fn sparse(p: &Prepared, served: &ServedSparse) -> Vec<(String, String)> {
    let index = &served.index;
    let layers = served.geometry.num_layers;
    let how = match (&served.support, &served.factory) {
        (Err(reason), _) => format!("nobody serves it: {reason}"),
        (Ok(_), None) => "nobody serves it".to_string(),
        (Ok(rank), Some(factory)) => {
            let rank = rank_in_words(*rank);
            format!("{} serves it: {rank} on {}", factory.name(), place(p))
        }
    };
    let dense = p.spec.attentions().find(|(_, attention)| {
        attention.kv_cache.as_ref() == Some(&served.kv_cache) && attention.query_from.is_none()
    });
    let dense = dense.map_or(String::new(), |(dense, _)| {
        format!("; plans whose queries see no more than that are run by {dense}")
    });
    let full: Vec<String> = index.full_layers.iter().map(usize::to_string).collect();
    let selects = format!(
        "select: score {} heads of {} over every key, keep {} and attend them{dense}; {how}",
        index.index_n_heads,
        index.index_head_dim,
        count(index.index_topk as u64)
    );
    let mut rows = vec![(full.join(","), selects)];
    let shared: Vec<usize> = (0..layers).filter(|&layer| !index.is_full(layer)).collect();
    if !shared.is_empty() {
        let names: Vec<String> = shared.iter().map(usize::to_string).collect();
        let of = |&layer: &usize| Some(format!("{layer} of {}", index.full_layer_of(layer)?));
        let from: Vec<String> = shared.iter().filter_map(of).collect();
        rows.push((names.join(","), format!("share a pick: {}", from.join(", "))));
    }
    rows
}

fn rank_in_words(rank: Rank) -> &'static str {
    match rank {
        Rank::REFERENCE => "the slow reference",
        rank if rank >= Rank::FAST => "a kernel made for this shape",
        _ => "a kernel that is right for any shape, and not tuned for this one",
    }
}

fn workload(requests: &[RequestPlan]) -> Vec<(&'static str, String)> {
    let spread = |mut lengths: Vec<u64>| {
        lengths.sort_unstable();
        let (first, last) = (lengths[0], lengths[lengths.len() - 1]);
        let all: u64 = lengths.iter().sum();
        let median = lengths[lengths.len() / 2];
        format!(
            "{} tokens: {} to {} a request, median {}",
            count(all),
            count(first),
            count(last),
            count(median)
        )
    };
    let of =
        |length: fn(&RequestPlan) -> usize| requests.iter().map(|r| length(r) as u64).collect::<Vec<u64>>();
    let seconds = requests.last().map_or(0.0, |last| last.arrival_ms / 1e3);
    let mut rows =
        vec![("requests", format!("{}, the last after {seconds:.1} virtual seconds", requests.len()))];
    rows.push(("prompts", spread(of(RequestPlan::prompt_len))));
    rows.push(("outputs", spread(of(RequestPlan::stored_output))));
    if requests.iter().any(|r| r.context_len > 0) {
        rows.push(("contexts", spread(of(|r| r.context_len))));
    }
    rows
}

/// As JSON, with the same content.
pub(super) fn as_json(p: &Prepared, kernels: &Kernels) -> String {
    let resources: Vec<Value> = p
        .spec
        .resources
        .iter()
        .map(|resource| {
            json!({
                "name": resource.name.as_str(),
                "kind": resource.kind.name(),
                "after": resource.depends_on.iter().map(|n| n.as_str()).collect::<Vec<_>>(),
                "about": describe(resource),
            })
        })
        .collect();
    let layers: Vec<Value> = p
        .attentions
        .iter()
        .map(|served| {
            json!({
                "resource": served.name.as_str(),
                "layers": served.geometry.num_layers,
                "backend": served.backend,
                "named": served.named,
                "supported": served.support.is_ok(),
                "why": serving(p, served),
            })
        })
        .collect();
    let sparse: Vec<Value> = p
        .sparse
        .iter()
        .map(|served| {
            json!({
                "resource": served.name.as_str(),
                "kv_cache": served.kv_cache.as_str(),
                "full_layers": served.index.full_layers,
                "index_topk": served.index.index_topk,
                "supported": served.support.is_ok(),
                "why": sparse(p, served).into_iter().map(|(_, text)| text).collect::<Vec<_>>().join("; "),
            })
        })
        .collect();
    let memory: Vec<Value> = p
        .estimate
        .lines
        .iter()
        .map(
            |line| json!({ "what": line.what, "how": line.how, "bytes": line.bytes as u64, "at_most": line.at_most, "key": line.key, "place": line.place.name() }),
        )
        .collect();
    let value = json!({
        "name": p.spec.name,
        "spec": p.path.display().to_string(),
        "device": p.device.to_string(),
        "note": p.note,
        "settings": settings(p).into_iter().collect::<std::collections::BTreeMap<_, _>>(),
        "resources": resources,
        "layers": layers,
        "sparse": sparse,
        "kernels": kernels.as_ref().ok(),
        "requests": p.requests.len(),
        "memory": memory,
        "memory_bytes": p.estimate.total() as u64,
        "memory_most_bytes": p.estimate.most() as u64,
        "memory_available_bytes": p.available.host,
        "memory_device_bytes": p.estimate.taken(Place::Device) as u64,
        "memory_pinned_bytes": p.estimate.taken(Place::Pinned) as u64,
        "memory_host_bytes": p.estimate.taken(Place::Host) as u64,
        "device_free_bytes": p.available.device.map(|(free, _)| free),
        "device_memory_bytes": p.available.device.map(|(_, total)| total),
        "refusals": p.refusals(),
    });
    format!("{value:#}\n")
}
