//! What a run will take of memory, line by line, before a byte of it is taken.
//!
//! Each line is the sum that the code which allocates would make, over the same sizes; sums are made in 128 bits, so
//! that a spec whose size no machine has is told its size.

use mstar_core::kv::{KvConfig, KvLayout};
use mstar_core::spec::Spec;
use mstar_kernels::DType;

use super::prepare::Served;
use crate::run::workload::RequestPlan;

/// One line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Line {
    /// What takes it: `kv: keys and values`.
    pub(crate) what: String,
    /// The product that it is, in the field's letters and numbers.
    pub(crate) how: String,
    /// Bytes.
    pub(crate) bytes: u128,
    /// The key of the spec that it grows with.
    pub(crate) key: String,
    /// Whether it is taken as needed, and this is the most: offloaded requests.
    pub(crate) at_most: bool,
}

/// All of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Estimate {
    /// In the order of the spec.
    pub(crate) lines: Vec<Line>,
}

impl Estimate {
    /// The estimate of a checked spec.
    pub(crate) fn of(spec: &Spec, served: &[Served], requests: &[RequestPlan], threads: usize) -> Estimate {
        let _ = (served, requests, threads);
        let mut lines = Vec::new();
        for (name, kv) in spec.caches() {
            pool(&mut lines, name.as_str(), &kv.config, kv.config.max_num_pages, false);
            if kv.host_pages > 0 {
                pool(&mut lines, name.as_str(), &kv.config, kv.host_pages, true);
            }
        }
        Estimate { lines }
    }

    /// Bytes taken when the run begins, and held to its end.
    pub(crate) fn total(&self) -> u128 {
        self.lines.iter().filter(|line| !line.at_most).map(|line| line.bytes).sum()
    }

    /// The most that may ever be taken: what is taken as needed counted whole.
    pub(crate) fn most(&self) -> u128 {
        self.lines.iter().map(|line| line.bytes).sum()
    }

    /// The key that the largest line grows with.
    pub(crate) fn largest_key(&self) -> &str {
        self.lines.iter().max_by_key(|line| line.bytes).map_or("the spec", |line| &line.key)
    }
}

/// `pages` pages of every plane of a cache, on the device or as offloaded to the host.
fn pool(lines: &mut Vec<Line>, name: &str, kv: &KvConfig, pages: usize, host: bool) {
    let (key, what) = if host { ("host_pages", "offloaded") } else { ("max_num_pages", "pages") };
    let widths = match kv.layout {
        KvLayout::Nhd { num_kv_heads: g, head_dim: d } => format!("2 x G {g} x D {d}"),
        KvLayout::Mla { kv_lora_rank: c, qk_rope_head_dim: e } => format!("(C {c} + E {e})"),
        other => unreachable!("the spec's reader makes no {other:?}"),
    };
    let slots = kv.num_layers as u128 * pages as u128 * kv.page_size as u128;
    let mut push = |what: String, widths: String, width: usize, dtype: DType| {
        lines.push(Line {
            what,
            how: format!(
                "L {} x P {pages} x S {} x {widths} x {} B",
                kv.num_layers,
                kv.page_size,
                dtype.size()
            ),
            bytes: slots * width as u128 * dtype.size() as u128,
            key: format!("resources.{name}.{key}"),
            at_most: host,
        });
    };
    let width = kv.layout.token_width().expect("bounded by the spec's reader");
    push(format!("{name}: {what}"), widths, width, kv.dtype);
    for plane in &kv.planes {
        push(
            format!("{name}: {what}, plane {}", plane.name),
            plane.width.to_string(),
            plane.width,
            plane.dtype,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mstar_core::kv::PlaneConfig;

    #[test]
    fn a_pool_is_what_the_store_allocates() {
        let layouts = [
            KvLayout::Nhd { num_kv_heads: 3, head_dim: 80 },
            KvLayout::Mla { kv_lora_rank: 512, qk_rope_head_dim: 64 },
        ];
        for layout in layouts {
            let mut kv = KvConfig::new(layout, DType::Bf16, 16, 77);
            kv.num_layers = 5;
            kv.planes = vec![PlaneConfig { name: "scales".into(), dtype: DType::U8, width: 7 }];
            let mut lines = Vec::new();
            pool(&mut lines, "kv", &kv, kv.max_num_pages, false);
            let estimate = Estimate { lines };
            assert_eq!(estimate.total(), kv.memory_bytes().unwrap() as u128);
            assert_eq!(estimate.lines.len(), 2);
        }
    }
}
