//! What to change when a spec does not fit in memory: a key that the spec has, and a value of it that would fit.

use mstar_core::ResourceName;
use mstar_core::spec::{Faults, Node, ResourceKind, Spec, set, yaml};
use mstar_kernels::Device;

use super::memory::{Available, Estimate};
use super::prepare::{Prepared, Served, ServedSparse};
use crate::run::workload::RequestPlan;

/// Room left for what else the machine does until the spec is run again: one part in this many.
const SPARE: u64 = 50;

/// The key of which the largest value counts.
const BUCKETS: &str = "graph.buckets";

/// A value of a spec that memory grows with.
struct Knob {
    /// The key.
    key: String,
    /// What it is now.
    now: usize,
    /// The least that it may be.
    least: usize,
    /// Gives it another value.
    turn: Turn,
}

type Turn = Box<dyn Fn(&mut Spec, usize)>;

/// What to change so that `prepared` takes no more than is available.
pub(super) fn advice(prepared: &Prepared, available: &Available) -> String {
    let tree = tree(prepared);
    let written = |key: &str| tree.as_ref().is_none_or(|tree| reach(tree, key).is_some());
    let Prepared { spec, attentions, sparse, requests, device, estimate, .. } = prepared;
    advise(spec, attentions, sparse, requests, *device, estimate, &written, available)
}

fn advise(
    spec: &Spec,
    served: &[Served],
    sparse: &[ServedSparse],
    requests: &[RequestPlan],
    device: Device,
    estimate: &Estimate,
    written: &dyn Fn(&str) -> bool,
    available: &Available,
) -> String {
    let spared = |free: u64| free - free / SPARE;
    let available = Available {
        host: available.host.map(spared),
        device: available.device.map(|(free, total)| (spared(free), total)),
    };
    let mut knobs = knobs(spec, written);
    // What takes the most first; among equals those that come first in the spec. Buckets take what would not be taken without.
    let takes = |knob: &Knob| match knob.key == BUCKETS {
        false => estimate.of_key(&knob.key),
        true => {
            let mut spec = spec.clone();
            (knob.turn)(&mut spec, knob.least);
            let without = Estimate::of(&spec, served, sparse, requests, device);
            without.map_or(0, |without| estimate.most().saturating_sub(without.most()))
        }
    };
    knobs.sort_by_cached_key(|knob| std::cmp::Reverse(takes(knob)));
    let fits = |knob: &Knob, value: usize| {
        let mut spec = spec.clone();
        (knob.turn)(&mut spec, value);
        Estimate::of(&spec, served, sparse, requests, device)
            .is_ok_and(|estimate| estimate.too_much(&available).is_none())
    };
    for knob in &knobs {
        if knob.now <= knob.least || !fits(knob, knob.least) {
            continue;
        }
        // The largest that fits, between one that does and one that does not.
        let (mut low, mut high) = (knob.least, knob.now);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if fits(knob, middle) { low = middle } else { high = middle }
        }
        let what = if knob.key == BUCKETS { format!("the largest of {BUCKETS}") } else { knob.key.clone() };
        return format!("lower {what} from {} to at most {low}", knob.now);
    }
    let names: Vec<&str> = knobs.iter().take(3).map(|knob| knob.key.as_str()).collect();
    match names[..] {
        [] => "nothing in the spec makes it smaller".into(),
        [one] => format!("lower {one}, and the model's widths: it alone is not enough"),
        _ => format!("lower {}: none of them alone is enough", names.join(" and ")),
    }
}

/// What may be lowered, of the keys that are written.
fn knobs(spec: &Spec, written: &dyn Fn(&str) -> bool) -> Vec<Knob> {
    let mut all = Vec::new();
    for (name, kv) in spec.caches() {
        let (pages, host) =
            (format!("resources.{name}.max_num_pages"), format!("resources.{name}.host_pages"));
        // As many as `max_num_pages` unless said.
        let follows = !written(&host);
        let (now, of) = (kv.config.max_num_pages, name.clone());
        let turn = Box::new(move |spec: &mut Spec, value| {
            change(spec, &of, |kind| {
                if let ResourceKind::Kv(kv) = kind {
                    kv.config.max_num_pages = value;
                    kv.host_pages = if follows { value } else { kv.host_pages };
                }
            });
        });
        all.push(Knob { key: pages, now, least: 2, turn });
        let (now, of) = (kv.host_pages, name.clone());
        let turn = Box::new(move |spec: &mut Spec, value| {
            change(spec, &of, |kind| {
                if let ResourceKind::Kv(kv) = kind {
                    kv.host_pages = value;
                }
            });
        });
        all.push(Knob { key: host, now, least: 0, turn });
    }
    for (name, ring) in spec.rings() {
        let (now, of) = (ring.config.num_worlds, name.clone());
        let turn = Box::new(move |spec: &mut Spec, value| {
            change(spec, &of, |kind| {
                if let ResourceKind::Ring(ring) = kind {
                    ring.config.num_worlds = value;
                }
            });
        });
        all.push(Knob { key: format!("resources.{name}.num_worlds"), now, least: 1, turn });
    }
    if let Some(graph) = &spec.graph {
        let turn = Box::new(|spec: &mut Spec, value: usize| {
            if let Some(graph) = &mut spec.graph {
                graph.buckets.iter_mut().for_each(|bucket| *bucket = value.min(*bucket));
                graph.buckets.dedup();
            }
        });
        let now = graph.buckets.iter().copied().max().unwrap_or(0);
        all.push(Knob { key: BUCKETS.into(), now, least: 1, turn });
    }
    if let Some(workload) = &spec.workload {
        let turn = Box::new(|spec: &mut Spec, value| {
            spec.workload.iter_mut().for_each(|workload| workload.max_batch = value);
        });
        all.push(Knob { key: "workload.max_batch".into(), now: workload.max_batch, least: 1, turn });
        let turn = Box::new(|spec: &mut Spec, value| {
            spec.workload.iter_mut().for_each(|workload| workload.chunked_prefill = value);
        });
        all.push(Knob {
            key: "workload.chunked_prefill".into(),
            now: workload.chunked_prefill,
            least: 1,
            turn,
        });
    }
    all.retain(|knob| written(&knob.key));
    all
}

fn change(spec: &mut Spec, name: &ResourceName, how: impl FnOnce(&mut ResourceKind)) {
    if let Some(resource) = spec.resources.iter_mut().find(|resource| resource.name == *name) {
        how(&mut resource.kind);
    }
}

/// The spec as it was written, read once more; `None` where it cannot be, such as from a pipe.
fn tree(prepared: &Prepared) -> Option<Node> {
    let meta = std::fs::metadata(&prepared.path).ok()?;
    let bytes = meta.is_file().then(|| std::fs::read(&prepared.path).ok())??;
    let mut root = yaml::read(&bytes, &Faults::new()).ok()?;
    prepared.sets.iter().try_for_each(|assignment| set(&mut root, assignment)).ok()?;
    Some(root)
}

/// The node at a key path.
fn reach<'a>(root: &'a Node, path: &str) -> Option<&'a Node> {
    path.split('.').try_fold(root, |node, key| node.get(key))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::workload;

    const SPEC: &str = "
model: { layers: 2, num_qo_heads: 4, num_kv_heads: 2, head_dim: 64 }
resources:
  kv: { kind: kv, page_size: 16, max_num_pages: 1000, max_seq_len: 4000 }
  attn: { kind: attention, backend: auto, kv_cache: kv }
workload: { kind: synthetic, requests: 99, chunked_prefill: 4000, prompt_len: 3000, output_len: 9 }
";

    fn here(bytes: u64) -> Available {
        Available { host: Some(bytes), device: None }
    }

    fn said(sets: &[&str], available: u64) -> (String, Vec<String>) {
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        let spec = Spec::from_yaml(SPEC.as_bytes(), &sets, "s").unwrap();
        let mut root = yaml::read(SPEC.as_bytes(), &Faults::new()).unwrap();
        sets.iter().for_each(|assignment| set(&mut root, assignment).unwrap());
        let requests = workload::load(spec.workload.as_ref().unwrap(), spec.seed, None).unwrap();
        let estimate = Estimate::of(&spec, &[], &[], &requests, Device::Cpu).unwrap();
        let written = |key: &str| reach(&root, key).is_some();
        (advise(&spec, &[], &[], &requests, Device::Cpu, &estimate, &written, &here(available)), sets)
    }

    #[test]
    fn f36_a_key_that_the_spec_has_is_named_with_a_value_that_fits() {
        // 16 KiB a token and layer pair: 1000 pages are 31 MiB, on the device and once more on the host.
        for (sets, available, key) in [
            (&[][..], 20 << 20, "resources.kv.max_num_pages"),
            (&["resources.kv.host_pages=3000"], 70 << 20, "resources.kv.host_pages"),
            (
                &["resources.kv.max_num_pages=2", "resources.kv.host_pages=0"],
                4 << 20,
                "workload.chunked_prefill",
            ),
        ] {
            let (text, sets) = said(sets, available);
            assert!(text.starts_with(&format!("lower {key} from ")), "{text}");
            let value: usize = text.rsplit(' ').next().unwrap().parse().unwrap();
            let most = |value: usize| {
                let sets = [sets.clone(), vec![format!("{key}={value}")]].concat();
                let spec = Spec::from_yaml(SPEC.as_bytes(), &sets, "s").unwrap();
                let requests = workload::load(spec.workload.as_ref().unwrap(), spec.seed, None).unwrap();
                Estimate::of(&spec, &[], &[], &requests, Device::Cpu).unwrap().most()
            };
            let bound = u128::from(available - available / SPARE);
            assert!(
                most(value) <= bound && most(value + 1) > bound,
                "{text}: {} {}",
                most(value),
                most(value + 1)
            );
        }
        // Buckets far beyond the batch: 64 Ki rows of queries and outputs.
        let sets = &["graph={ buckets: [8, 65536], slots: 2 }"];
        let (text, _) = said(sets, 120 << 20);
        let value: usize = text
            .strip_prefix("lower the largest of graph.buckets from 65536 to at most ")
            .and_then(|value| value.parse().ok())
            .unwrap_or_else(|| panic!("{text}"));
        assert!((8..65536).contains(&value), "{text}");
        // Neither host_pages nor max_batch is written: neither is named.
        let (text, _) = said(&[], 1000);
        assert!(text.contains("resources.kv.max_num_pages and workload.chunked_prefill: none"), "{text}");
        assert!(!text.contains("host_pages") && !text.contains("max_batch"), "{text}");
    }
}
