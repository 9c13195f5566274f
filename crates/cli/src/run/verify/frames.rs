//! Rows over a ring: the oracle's answer over the frames that a pass should see, by the rule itself. Nothing is asked of
//! the ring, neither its slots nor its clocks: which frames are kept, and which of them are still there, follows from
//! frame numbers, and what they hold from content keys.

use mstar_core::kv::{RingConfig, RingGeometry};
use mstar_core::spec::Node;
use mstar_kernels::reference::flex::{Flex, ScoreMod, flex};
use mstar_kernels::reference::{Attended, Real};
use mstar_kernels::synth::{self, Kind};

use super::heads::entries;
use super::{Judged, Layers, Row, Sample, Shape};
use crate::explain::words;

/// The frames of a world, as its layers keep them, and what becomes of scores over them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Frames {
    tokens_per_frame: usize,
    layers: Vec<RingGeometry>,
    /// In their order.
    changes: Vec<Change>,
    /// `[2 W + 1]`, where scores are biased.
    bias: Vec<f32>,
    /// Frames a document, where there are documents.
    document: Option<usize>,
}

/// What becomes of a score, beside what hides its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Alibi,
    RelBias,
    SoftCap,
}

impl Frames {
    /// Those of a ring, attended with a backend's options, which were checked when it was built.
    pub(crate) fn of(ring: &RingConfig, options: &Node) -> Frames {
        let change = |word| match word {
            "alibi" => Some(Change::Alibi),
            "rel_bias" => Some(Change::RelBias),
            "soft_cap" => Some(Change::SoftCap),
            _ => None,
        };
        let documents = words(options, "mask_mod").any(|word| word == "document");
        Frames {
            tokens_per_frame: ring.tokens_per_frame,
            layers: ring.layers.clone(),
            changes: words(options, "score_mod").filter_map(change).collect(),
            bias: words(options, "rel_bias")
                .filter_map(|number| number.parse::<f64>().ok())
                .map(|bias| bias as f32)
                .collect(),
            document: words(options, "document_frames")
                .find_map(|frames| frames.parse().ok())
                .filter(|_| documents),
        }
    }

    /// Whether scores depend on how far a key lies from the query.
    fn ask_distances(&self) -> bool {
        self.changes.iter().any(|change| *change != Change::SoftCap)
    }

    /// Whether a pass over `frame` may see an `earlier` one.
    fn of_one_document(&self, earlier: usize, frame: usize) -> bool {
        self.document.is_none_or(|frames| earlier / frames == frame / frames)
    }

    /// The most tokens that a pass over the last frame of `kv_len` tokens sees in any layer.
    pub(super) fn most_seen(&self, kv_len: usize) -> usize {
        let last = (kv_len / self.tokens_per_frame).saturating_sub(1);
        let frames = self.layers.iter().map(|layer| earlier(layer, last).len() + 1).max().unwrap_or(1);
        frames * self.tokens_per_frame
    }
}

/// The frames before `frame` that its pass sees, rising. One in `pinned_dilation` is kept, and of those the last
/// `ring_buckets` are still there; a frame that will be kept itself does not see the one it takes the place of.
fn earlier(layer: &RingGeometry, frame: usize) -> Vec<usize> {
    let RingGeometry { ring_buckets, pinned_dilation, .. } = *layer;
    let kept: Vec<usize> = (0..frame).step_by(pinned_dilation).collect();
    let mut there = kept[kept.len().saturating_sub(ring_buckets)..].to_vec();
    if frame.is_multiple_of(pinned_dilation) && there.len() == ring_buckets {
        there.remove(0);
    }
    there
}

/// What a row's queries may see, in an array of keys: `place` is where each position lies in it.
struct Seen {
    /// `[keys]` positions, rising.
    positions: Vec<usize>,
    /// `[keys]` indices into the oracle's array.
    places: Vec<usize>,
    /// Its length.
    len: usize,
}

impl Seen {
    /// The keys of a pass over `frame`. Where scores ask for distances the array has a place for every position from the
    /// first that is seen, else for those alone.
    fn of(frames: &Frames, layer: usize, frame: usize, distances: bool) -> Seen {
        let f = frames.tokens_per_frame;
        let shown = earlier(&frames.layers[layer], frame).into_iter().chain([frame]);
        let shown = shown.filter(|&earlier| frames.of_one_document(earlier, frame));
        let positions: Vec<usize> = shown.flat_map(|frame| frame * f..(frame + 1) * f).collect();
        let places = match distances {
            true => positions.iter().map(|at| at - positions[0]).collect(),
            false => (0..positions.len()).collect::<Vec<_>>(),
        };
        let len = places.last().map_or(0, |last| last + 1);
        Seen { positions, places, len }
    }
}

/// Adds every sampled (query, head) of the row to `judged`; `o` is `[q_len, H, Dv]`, `lse` `[q_len, H]`.
///
/// # Errors
/// What the oracle refuses.
pub(super) fn judge<T: Real>(
    row: &Row<'_>,
    frames: &Frames,
    [num_kv_heads, d, dv]: [usize; 3],
    sample: &Sample,
    seed: u64,
    layers: Layers,
    o: &[T],
    lse: &[f32],
    judged: &mut Judged,
) -> Result<(), String> {
    let frame = row.first_position / frames.tokens_per_frame;
    let seen = Seen::of(frames, layers.own, frame, frames.ask_distances());
    let keys: Vec<u64> = seen.positions.iter().map(|&at| row.keys[at]).collect();
    let group = row.shape.num_qo_heads / num_kv_heads.max(1);
    let (mut k, mut v) = (Vec::new(), Vec::new());
    for kv_head in 0..num_kv_heads {
        let heads: Vec<usize> = sample.heads.iter().copied().filter(|h| h / group == kv_head).collect();
        if heads.is_empty() {
            continue;
        }
        entries(seed, Kind::Key, layers.own, &keys, kv_head, d, &mut k);
        entries(seed, Kind::Value, layers.own, &keys, kv_head, dv, &mut v);
        let (k, v) = (spread(&seen, &k, d), spread(&seen, &v, dv));
        for &query in &sample.queries {
            let position = row.first_position + query;
            let mut written = vec![0u8; seen.len];
            for (&at, &place) in seen.positions.iter().zip(&seen.places) {
                written[place] = u8::from(sees(row.shape, position, at));
            }
            let mut q = vec![0f32; heads.len() * d];
            for (lanes, &head) in q.chunks_exact_mut(d.max(1)).zip(&heads) {
                synth::fill_lanes(seed, Kind::Query, layers.query, row.queries[query], head, lanes);
            }
            let expected = oracle(
                row.shape,
                frames,
                [d, dv],
                &heads,
                &q,
                (&k, &v),
                &written,
                position - seen.positions[0],
            );
            let expected = expected.map_err(|error| format!("the oracle: {error}"))?;
            judged.add(row, query, &heads, &expected, o, lse);
        }
    }
    Ok(())
}

/// Whether a query at `position` sees the key at `at`, of those that the ring shows.
fn sees(shape: &Shape, position: usize, at: usize) -> bool {
    (!shape.causal || at <= position)
        && (shape.window_left < 0 || (at as i64) >= position as i64 - shape.window_left)
}

/// `packed` `[keys, width]` at its places in the oracle's array; nothing is read elsewhere.
fn spread(seen: &Seen, packed: &[f32], width: usize) -> Vec<f32> {
    let mut all = vec![0f32; seen.len * width];
    for (lanes, &place) in packed.chunks_exact(width.max(1)).zip(&seen.places) {
        all[place * width..][..width].copy_from_slice(lanes);
    }
    all
}

/// One query's `heads` over `[keys, width]` keys and values of one key head, in f64.
fn oracle(
    shape: &Shape,
    frames: &Frames,
    [d, dv]: [usize; 2],
    heads: &[usize],
    q: &[f32],
    (k, v): (&[f32], &[f32]),
    written: &[u8],
    place: usize,
) -> mstar_kernels::Result<Attended> {
    let slopes: Vec<f64> = shape
        .alibi_slopes
        .iter()
        .flat_map(|slopes| heads.iter().map(|&head| f64::from(slopes[head])))
        .collect();
    let bias: Vec<f32> = heads.iter().flat_map(|_| frames.bias.iter().copied()).collect();
    let mods: Vec<ScoreMod<'_>> = frames
        .changes
        .iter()
        .map(|change| match change {
            Change::Alibi => ScoreMod::Alibi { slopes: &slopes },
            Change::RelBias => ScoreMod::RelBias { table: &bias, window: frames.bias.len() / 2 },
            Change::SoftCap => ScoreMod::SoftCap(shape.logits_soft_cap),
        })
        .collect();
    flex(&Flex {
        q,
        k,
        v,
        written,
        batch: 1,
        num_qo_heads: heads.len(),
        num_kv_heads: 1,
        head_dim_qk: d,
        head_dim_vo: dv,
        block_size: 1,
        sm_scale: shape.sm_scale,
        q_offset: place as i64,
        score_mod: ScoreMod::Chain(&mods),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The recorded cases' rule, pass after pass: what lies in which slot, and who sees it.
    fn by_slots(layer: &RingGeometry, frames: usize) -> Vec<Vec<usize>> {
        let mut slots: Vec<Option<usize>> = vec![None; layer.ring_frames];
        let own = |frame: usize| {
            let kept = frame.is_multiple_of(layer.pinned_dilation);
            kept.then(|| (frame / layer.pinned_dilation) % layer.ring_buckets)
        };
        (0..frames)
            .map(|frame| {
                let shown = slots.iter().enumerate().filter(|(slot, _)| Some(*slot) != own(frame));
                let mut seen: Vec<usize> = shown.filter_map(|(_, frame)| *frame).collect();
                seen.sort_unstable();
                if let Some(slot) = own(frame) {
                    slots[slot] = Some(frame);
                }
                seen
            })
            .collect()
    }

    #[test]
    fn what_a_pass_sees_is_what_slots_would_hold() {
        for ring_frames in 1..6 {
            for ring_buckets in 1..=ring_frames {
                for pinned_dilation in 1..5 {
                    let layer = RingGeometry { ring_frames, ring_buckets, pinned_dilation };
                    let plain = by_slots(&layer, 3 * ring_buckets * pinned_dilation + 2);
                    for (frame, seen) in plain.iter().enumerate() {
                        assert_eq!(earlier(&layer, frame), *seen, "{layer:?} frame {frame}");
                    }
                }
            }
        }
    }

    #[test]
    fn distances_need_places_for_what_lies_between() {
        let layers = vec![RingGeometry { ring_frames: 2, ring_buckets: 2, pinned_dilation: 3 }];
        let frames = Frames { tokens_per_frame: 2, layers, changes: vec![], bias: vec![], document: None };
        // Frame 7 sees frames 3 and 6 and itself.
        let near = Seen::of(&frames, 0, 7, false);
        assert_eq!((near.positions.as_slice(), near.len), (&[6, 7, 12, 13, 14, 15][..], 6));
        let apart = Seen::of(&frames, 0, 7, true);
        assert_eq!((apart.places.as_slice(), apart.len), (&[0, 1, 6, 7, 8, 9][..], 10));
        assert_eq!(spread(&apart, &[1.0; 6], 1).iter().sum::<f32>(), 6.0);
        assert_eq!((frames.most_seen(16), frames.most_seen(2)), (6, 2));
        // Frames 4 to 7 are a document.
        let frames = Frames { document: Some(4), ..frames };
        assert_eq!(Seen::of(&frames, 0, 7, false).positions, [12, 13, 14, 15]);
    }
}
