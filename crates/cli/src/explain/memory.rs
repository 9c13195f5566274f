//! What a run will take of memory, line by line, before a byte of it is taken.
//!
//! Each line is the sum that the code which allocates would make, over the same sizes; sums are made in 128 bits, so
//! that a spec whose size no machine has is told its size.

use mstar_core::attend::{IndexStore, StepShape};
use mstar_core::kv::{KvConfig, KvLayout, RingConfig};
use mstar_core::spec::Spec;
use mstar_kernels::{DType, Device, fp8};

use super::prepare::{Served, ServedSparse};
use crate::backends::workspace_bytes;
use crate::run::buffers::{IndexWidths, Widths, largest_step};
use crate::run::entries::Entries;
use crate::run::shapes::{of_frames, padded};
use crate::run::workload::RequestPlan;

/// Where memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// On the device that the layers run on; the CPU's is the host's.
    Device,
    /// On the host, pinned for the device.
    Pinned,
    /// On the host, where the layers run elsewhere.
    Host,
}

impl Place {
    /// Its name in reports.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Place::Device => "device",
            Place::Pinned => "pinned",
            Place::Host => "host",
        }
    }
}

/// What there is to take from, as far as it is told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Available {
    /// Bytes of the host.
    pub(crate) host: Option<u64>,
    /// Bytes of the device that are free, and of how many; absent where layers run on the host.
    pub(crate) device: Option<(u64, u64)>,
}

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
    /// Where it is.
    pub(crate) place: Place,
}

/// All of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Estimate {
    /// In the order of the spec.
    pub(crate) lines: Vec<Line>,
}

impl Estimate {
    /// The estimate of a checked spec.
    ///
    /// # Errors
    /// A geometry that its backend does not serve.
    pub(crate) fn of(
        spec: &Spec,
        served: &[Served],
        sparse: &[ServedSparse],
        requests: &[RequestPlan],
        device: Device,
    ) -> anyhow::Result<Estimate> {
        let mut lines = Vec::new();
        let apart = device != Device::Cpu;
        for (name, kv) in spec.caches() {
            pool(&mut lines, name.as_str(), &kv.config, kv.config.max_num_pages, None);
            if kv.host_pages > 0 {
                let place = if apart { Place::Pinned } else { Place::Device };
                pool(&mut lines, name.as_str(), &kv.config, kv.host_pages, Some(place));
            }
        }
        for (name, ring) in spec.rings() {
            worlds(&mut lines, name.as_str(), &ring.config);
            snapshots(&mut lines, spec, name.as_str(), &ring.config, requests.len());
            if apart && let Some(Line { at_most: true, place, .. }) = lines.last_mut() {
                *place = Place::Host;
            }
        }
        if let (Some(largest), Some(widths)) = (largest_step(spec, requests), Widths::of(spec, requests)) {
            forward(&mut lines, &widths, Place::Device);
            if apart {
                forward(&mut lines, &widths, Place::Pinned);
            }
            for served in served {
                let largest = of_frames(spec, largest);
                let vo = spec.model.value_width();
                let each =
                    workspace_bytes(served.backend, &served.geometry, vo, largest, device, spec.schedule)?
                        .saturating_add(served.options.beside_workspaces(&served.geometry, largest));
                let what = format!("{}: workspaces", served.name);
                workspaces(&mut lines, spec, what, each, true, largest);
                if apart {
                    let what = format!("{}: indices on their way", served.name);
                    pinned_indices(&mut lines, spec, what, largest);
                }
            }
            for served in sparse {
                // Who cannot serve it allocates nothing; `explain` says why.
                let (Some(factory), Ok(_)) = (&served.factory, &served.support) else { continue };
                let largest = padded(spec, largest);
                let each = factory.bytes(device, &served.geometry, &served.index, largest)?;
                let what = format!("{}: picks and workspaces", served.name);
                workspaces(&mut lines, spec, what, each, false, largest);
                if served.index.store == IndexStore::Buffers {
                    key_buffers(&mut lines, spec, served, requests, apart);
                }
            }
        }
        Ok(Estimate { lines })
    }

    /// Bytes taken when the run begins, and held to its end.
    pub(crate) fn total(&self) -> u128 {
        self.lines.iter().filter(|line| !line.at_most).map(|line| line.bytes).sum()
    }

    /// The most that may ever be taken: what is taken as needed counted whole.
    pub(crate) fn most(&self) -> u128 {
        self.lines.iter().map(|line| line.bytes).sum()
    }

    /// The most that may ever be taken of the device's own memory.
    pub(crate) fn most_of_device(&self) -> u128 {
        self.most_apart(true).0
    }

    /// Bytes taken when the run begins at one place.
    pub(crate) fn taken(&self, place: Place) -> u128 {
        let taken = self.lines.iter().filter(|line| !line.at_most && line.place == place);
        taken.map(|line| line.bytes).sum()
    }

    /// The most that may ever be taken of the device, and of the host where that is another place.
    fn most_apart(&self, apart: bool) -> (u128, u128) {
        let sum = |device: bool| {
            let here = self.lines.iter().filter(|line| (apart && line.place == Place::Device) == device);
            here.map(|line| line.bytes).sum()
        };
        (sum(true), sum(false))
    }

    /// What is too much: at which place (`None` for the host), how many bytes, and of how many.
    pub(crate) fn too_much(&self, available: &Available) -> Option<(Place, u128, u64)> {
        let (device, host) = self.most_apart(available.device.is_some());
        if let Some((free, _)) = available.device
            && device > u128::from(free)
        {
            return Some((Place::Device, device, free));
        }
        let free = available.host.filter(|&free| host > u128::from(free))?;
        Some((Place::Host, host, free))
    }

    /// The bytes of the lines that grow with `key`.
    pub(crate) fn of_key(&self, key: &str) -> u128 {
        self.lines.iter().filter(|line| line.key == key).map(|line| line.bytes).sum()
    }
}

/// `pages` pages of every plane of a cache, on the device or as offloaded to the host.
fn pool(lines: &mut Vec<Line>, name: &str, kv: &KvConfig, pages: usize, host: Option<Place>) {
    let (key, what) = if host.is_some() { ("host_pages", "offloaded") } else { ("max_num_pages", "pages") };
    let widths = match kv.layout {
        KvLayout::Nhd { num_kv_heads: g, head_dim: d } => format!("2 x G {g} x D {d}"),
        KvLayout::Mla { kv_lora_rank: c, qk_rope_head_dim: e } if kv.dtype == DType::E4m3 => {
            format!("(C {c} + 4 x {} + 2 x E {e})", fp8::latent_scales(c))
        }
        KvLayout::Mla { kv_lora_rank: c, qk_rope_head_dim: e } => format!("(C {c} + E {e})"),
        other => unreachable!("the spec's reader makes no {other:?}"),
    };
    let mut push = |what: String, widths: String, width: usize, dtype: DType, layers: usize| {
        let slots = layers as u128 * pages as u128 * kv.page_size as u128;
        lines.push(Line {
            what,
            how: format!("L {layers} x P {pages} x S {} x {widths} x {} B", kv.page_size, dtype.size()),
            bytes: slots * width as u128 * dtype.size() as u128,
            key: format!("resources.{name}.{key}"),
            at_most: host.is_some(),
            place: host.unwrap_or(Place::Device),
        });
    };
    let (width, dtype) = kv.token().expect("bounded by the spec's reader");
    push(format!("{name}: {what}"), widths, width, dtype, kv.num_layers);
    for plane in &kv.planes {
        push(
            format!("{name}: {what}, plane {}", plane.name),
            plane.width.to_string(),
            plane.width,
            plane.dtype,
            plane.layer_count(kv.num_layers),
        );
    }
}

/// Every world of a ring, by the frames that its layers keep.
fn worlds(lines: &mut Vec<Line>, name: &str, ring: &RingConfig) {
    let groups = ring.groups();
    let RingConfig { num_worlds: w, tokens_per_frame: f, num_kv_heads: g, .. } = *ring;
    let (d, dv, size) = (ring.head_dim, ring.head_dim_vo, ring.dtype.size());
    for (group, geometry) in groups.geometries.iter().enumerate() {
        let layers = groups.of_layer.iter().filter(|&&of| of == group).count();
        let frames = geometry.ring_frames;
        lines.push(Line {
            what: format!("{name}: worlds, {frames} frames and scratch"),
            how: format!(
                "L {layers} x worlds {w} x ({frames} + 1) x F {f} x G {g} x (D {d} + Dv {dv}) x {size} B"
            ),
            bytes: [layers, w, geometry.frames(), f, g, d + dv, size].iter().map(|&n| n as u128).product(),
            key: format!("resources.{name}.num_worlds"),
            at_most: false,
            place: Place::Device,
        });
    }
}

/// Worlds on the host, of every request that is active at once, where the workload saves them.
fn snapshots(lines: &mut Vec<Line>, spec: &Spec, name: &str, ring: &RingConfig, requests: usize) {
    let Some(workload) = spec.workload.as_ref() else { return };
    if spec.synthetic().is_none_or(|synthetic| synthetic.snapshot.is_none()) {
        return;
    }
    let saved = workload.max_batch.min(ring.num_worlds).min(requests.max(1));
    let each = ring.world_bytes().expect("bounded by the spec's reader");
    lines.push(Line {
        what: format!("{name}: worlds saved"),
        how: format!("{saved} x {each} B on the host"),
        bytes: saved as u128 * each as u128,
        key: format!("resources.{name}.num_worlds"),
        at_most: true,
        place: Place::Device,
    });
}

/// Queries, cache entries and outputs of one forward, which every layer uses again.
fn forward(lines: &mut Vec<Line>, widths: &Widths, place: Place) {
    let (t, h, size) = (widths.tokens, widths.num_qo_heads, widths.dtype.size());
    let (what, how) = match widths.entries {
        Entries::Heads { num_kv_heads: g, head_dim: d, head_dim_vo: dv } => {
            let each = if d == dv {
                format!("2 x (H {h} + G {g}) x D {d}")
            } else {
                format!("(H {h} + G {g}) x (D {d} + Dv {dv})")
            };
            let how = format!("T {t} x ({each} x {size} B + H {h} x 4 B)");
            ("q, k, v, o and lse of one forward", how)
        }
        Entries::Latents { kv_lora_rank: c, qk_rope_head_dim: e } => {
            let how =
                format!("T {t} x ((H {h} x (2 x C {c} + E {e}) + C {c} + E {e}) x {size} B + H {h} x 4 B)");
            ("q, latents, o and lse of one forward", how)
        }
    };
    let twin = if place == Place::Pinned { ", on the host" } else { "" };
    let mut push = |what: &str, how: String, bytes: Option<usize>| {
        lines.push(Line {
            what: format!("{what}{twin}"),
            how,
            bytes: bytes.map_or(u128::MAX, |bytes| bytes as u128),
            key: "workload.chunked_prefill".into(),
            at_most: false,
            place,
        });
    };
    push(what, how, widths.attended_bytes());
    if let Some(IndexWidths { heads: hi, head_dim: di }) = widths.index {
        let how = format!("T {t} x ((Hi {hi} + 1) x Di {di} x {size} B + Hi {hi} x 4 B)");
        push("index q, keys and weights of one forward", how, widths.index_bytes());
    }
}

/// `each` bytes for every plan label in each slot that it is planned in; `indices`, when `qo_indptr` `[R + 1]` and
/// `kv_len` `[R]` of the largest bucket's rows or the largest step's come beside them.
fn workspaces(
    lines: &mut Vec<Line>,
    spec: &Spec,
    what: String,
    each: usize,
    indices: bool,
    largest: StepShape,
) {
    let each = each as u128;
    let rows = rows_of(spec, largest);
    let (indices, listed) = match indices {
        true => (index_bytes(rows), format!(" + indices of {rows} rows x 16 B + 4 B")),
        false => (0, String::new()),
    };
    let Places { main_slots, forks, fork_slots } = Places::of(spec);
    if each > 0 {
        let beside = match forks {
            0 => String::new(),
            n => format!(" + labels of forks {n} x slots {fork_slots}"),
        };
        lines.push(Line {
            what,
            how: format!(
                "(main x slots {main_slots}{beside}) x ({each} B for {} rows, {} tokens, {} keys a row{listed})",
                largest.rows, largest.tokens, largest.kv_len
            ),
            bytes: (main_slots + forks * fork_slots) as u128 * (each + indices),
            key: "workload.max_batch".into(),
            at_most: false,
            place: Place::Device,
        });
    }
}

/// Rows that index arrays have room for.
fn rows_of(spec: &Spec, largest: StepShape) -> usize {
    padded(spec, largest).rows
}

/// `qo_indptr` `[R + 1]` and `kv_len` `[R]` of 4 bytes, the last tokens `[R]` of 8.
fn index_bytes(rows: usize) -> u128 {
    (4 * rows as u128 + 1) * 4
}

/// The index arrays of every plan, twice, in pinned memory, from where they go to the device.
fn pinned_indices(lines: &mut Vec<Line>, spec: &Spec, what: String, largest: StepShape) {
    let rows = rows_of(spec, largest);
    let Places { main_slots, forks, fork_slots } = Places::of(spec);
    let plans = main_slots + forks * fork_slots;
    lines.push(Line {
        what,
        how: format!("plans {plans} x 2 x indices of {rows} rows x 16 B + 4 B"),
        bytes: 2 * plans as u128 * index_bytes(rows),
        key: "workload.max_batch".into(),
        at_most: false,
        place: Place::Pinned,
    });
}

/// Index keys in buffers of each request, which double as they grow.
fn key_buffers(
    lines: &mut Vec<Line>,
    spec: &Spec,
    served: &ServedSparse,
    requests: &[RequestPlan],
    apart: bool,
) {
    let index = &served.index;
    let active = spec.workload.as_ref().map_or(1, |workload| workload.max_batch).min(requests.len());
    let longest = requests.iter().map(RequestPlan::final_len).max().unwrap_or(0).next_power_of_two();
    let (width, size) = (index.format.width(index.index_head_dim), index.format.dtype().size());
    let layers = index.full_layers.len();
    lines.push(Line {
        what: format!("{}: index keys", served.name),
        how: format!("requests {active} x layers {layers} x tokens {longest} x {width} x {size} B"),
        bytes: [active, layers, longest, width, size].iter().map(|&n| n as u128).product(),
        key: "workload.max_batch".into(),
        at_most: true,
        place: if apart { Place::Host } else { Place::Device },
    });
}

/// Where plans are made: labels, and the slots of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Places {
    /// Slots of `main`, under which buckets are warmed up: in every slot there is.
    main_slots: usize,
    /// Labels of the forks, or the one group that they are packed into.
    forks: usize,
    /// Slots of theirs: the first alone, unless steps are planned ahead.
    fork_slots: usize,
}

impl Places {
    fn of(spec: &Spec) -> Places {
        let preplan = spec.workload.as_ref().is_some_and(|workload| workload.preplan);
        let fork_slots = if preplan { 2 } else { 1 };
        let forks = match spec.synthetic().and_then(|synthetic| synthetic.forks.as_ref()) {
            None => 0,
            Some(forks) if forks.combined => 1,
            Some(forks) => forks.labels.len(),
        };
        let warmed = spec.graph.as_ref().filter(|graph| !graph.buckets.is_empty());
        let main_slots = warmed.map_or(0, |graph| graph.slots).max(fork_slots);
        Places { main_slots, forks, fork_slots }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mstar_core::kv::{PlaneConfig, RingCache, RingGeometry};

    #[test]
    fn a_pool_is_what_the_store_allocates() {
        let layouts = [
            KvLayout::Nhd { num_kv_heads: 3, head_dim: 80 },
            KvLayout::Mla { kv_lora_rank: 512, qk_rope_head_dim: 64 },
        ];
        for layout in layouts {
            let mut kv = KvConfig::new(layout, DType::Bf16, 16, 77);
            kv.num_layers = 5;
            kv.planes = vec![PlaneConfig { name: "scales".into(), dtype: DType::U8, width: 7, layers: None }];
            let mut lines = Vec::new();
            pool(&mut lines, "kv", &kv, kv.max_num_pages, None);
            let estimate = Estimate { lines };
            assert_eq!(estimate.total(), kv.memory_bytes().unwrap() as u128);
            assert_eq!(estimate.lines.len(), 2);
        }
    }

    #[test]
    fn worlds_are_what_a_ring_allocates() {
        let wide = RingGeometry { ring_frames: 3, ring_buckets: 2, pinned_dilation: 4 };
        let layers = vec![RingGeometry::last(2), RingGeometry::last(2), wide];
        let mut ring = RingConfig::new(layers, 128, 16, DType::Bf16);
        (ring.num_worlds, ring.num_kv_heads, ring.head_dim_vo) = (3, 2, 24);
        let mut lines = Vec::new();
        worlds(&mut lines, "ring", &ring);
        let estimate = Estimate { lines };
        assert_eq!((estimate.total(), estimate.lines.len()), (ring.memory_bytes().unwrap() as u128, 2));
        let made = RingCache::new("ring".into(), ring.clone()).unwrap();
        assert_eq!(estimate.total(), made.bytes() as u128);
    }
}
