//! Passes over a cache that is overwritten in place: one ring of frames and a scratch frame per world.

use std::collections::BTreeMap;

use super::{Attended, Real, arrays, dot, softmax};
use crate::{Error, Result};

/// Tokens of one block of `visible_blocks`.
pub const BLOCK: usize = 128;

/// One pass over one frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pass {
    /// Whose ring.
    pub world: usize,
    /// The frame's number in that world.
    pub frame_pos: u64,
    /// Whether the frame is kept; a pass that does not commit rewrites the scratch alone.
    pub commit: bool,
}

/// Everything that [`ring`] reads. `N` passes of `F` tokens.
#[derive(Clone, Copy, Debug)]
pub struct Ring<'a, Q, E> {
    /// `[N, H, F, D]`.
    pub q: &'a [Q],
    /// `[N, G, F, D]`.
    pub k: &'a [E],
    /// `[N, G, F, Dv]`.
    pub v: &'a [E],
    /// `[N]`, in the order in which they ran.
    pub passes: &'a [Pass],
    /// `H`.
    pub num_qo_heads: usize,
    /// `G`, a divisor of `H`.
    pub num_kv_heads: usize,
    /// `D`.
    pub head_dim_qk: usize,
    /// `Dv`.
    pub head_dim_vo: usize,
    /// `F`, a multiple of [`BLOCK`].
    pub tokens_per_frame: usize,
    /// Frame slots of a world, before its scratch frame.
    pub ring_frames: usize,
    /// Slots that commits go round, at most `ring_frames`.
    pub ring_buckets: usize,
    /// Only every so many frames is kept.
    pub pinned_dilation: u64,
    /// Worlds.
    pub num_worlds: usize,
    /// Factor on `q.k`.
    pub sm_scale: f64,
}

/// What [`ring`] returns.
#[derive(Clone, Debug, PartialEq)]
pub struct RingAttended {
    /// `o` `[N, H, F, Dv]`, `lse` `[N, H, F]`.
    pub attended: Attended,
    /// The blocks that each pass attended, ascending, pass after pass. A block counts [`BLOCK`] tokens over
    /// all worlds, each `ring_frames` slots and then the scratch.
    pub visible_blocks: Vec<i64>,
    /// `[N + 1]`: where each pass's blocks start.
    pub visible_indptr: Vec<i64>,
}

/// Replays the passes. Each writes its frame to its world's scratch; a commit whose `frame_pos` is a multiple
/// of the dilation also writes slot `(frame_pos / dilation) % ring_buckets`. A pass attends its world's
/// written slots, less that slot when its `frame_pos` is such a multiple, and the scratch.
///
/// # Errors
/// An array of another length than the shapes say, a frame that is not whole blocks, more buckets than
/// frames, a pass of a world that is not there.
pub fn ring<Q: Real, E: Real>(p: &Ring<'_, Q, E>) -> Result<RingAttended> {
    let (h_q, g, f) = (p.num_qo_heads, p.num_kv_heads, p.tokens_per_frame);
    let (d, dv) = (p.head_dim_qk, p.head_dim_vo);
    let group = arrays::heads(h_q, g)?;
    let n = p.passes.len();
    check_geometry(p)?;
    arrays::length("q", p.q, &[n, h_q, f, d])?;
    arrays::length("k", p.k, &[n, g, f, d])?;
    arrays::length("v", p.v, &[n, g, f, dv])?;
    arrays::finite("sm_scale", p.sm_scale)?;

    let rows = arrays::product("o", &[n, h_q, f])?;
    let mut out =
        Attended { o: vec![0.0; arrays::product("o", &[rows, dv])?], lse: vec![f64::NEG_INFINITY; rows] };
    let (mut visible_blocks, mut visible_indptr) = (Vec::new(), vec![0i64]);
    // Which pass's frame each written ring slot holds, by (world, slot).
    let mut written: BTreeMap<(usize, usize), usize> = BTreeMap::new();
    let blocks_per_frame = f / BLOCK;
    for (pass, &Pass { world, frame_pos, commit }) in p.passes.iter().enumerate() {
        let target = (frame_pos % p.pinned_dilation == 0)
            .then(|| (frame_pos / p.pinned_dilation % p.ring_buckets as u64) as usize);
        let mut frames: Vec<(usize, usize)> = written
            .range((world, 0)..(world, p.ring_frames))
            .map(|(&(_, slot), &frame)| (slot, frame))
            .filter(|&(slot, _)| Some(slot) != target)
            .collect();
        frames.push((p.ring_frames, pass));
        let first = world * (p.ring_frames + 1);
        for &(slot, _) in &frames {
            let block = (first + slot) * blocks_per_frame;
            visible_blocks.extend((block..block + blocks_per_frame).map(|b| b as i64));
        }
        visible_indptr.push(visible_blocks.len() as i64);

        for h in 0..h_q {
            let key = |n: usize, width: usize| {
                let (_, frame) = frames[n / f];
                ((frame * g + h / group) * f + n % f) * width
            };
            for i in 0..f {
                let at = (pass * h_q + h) * f + i;
                let query = &p.q[at * d..][..d];
                let scores: Vec<f64> =
                    (0..frames.len() * f).map(|n| p.sm_scale * dot(query, &p.k[key(n, d)..][..d])).collect();
                out.lse[at] = softmax::attend(&scores, None, &mut out.o[at * dv..][..dv], |n, lane| {
                    p.v[key(n, dv) + lane].to_f64()
                });
            }
        }
        if let (true, Some(slot)) = (commit, target) {
            written.insert((world, slot), pass);
        }
    }
    Ok(RingAttended { attended: out, visible_blocks, visible_indptr })
}

fn check_geometry<Q, E>(p: &Ring<'_, Q, E>) -> Result<()> {
    let refuse = |name: &'static str, why: String, got: String| Err(Error::Parameter { name, why, got });
    if p.tokens_per_frame == 0 || !p.tokens_per_frame.is_multiple_of(BLOCK) {
        let got = p.tokens_per_frame.to_string();
        return refuse("tokens_per_frame", format!("must be a positive multiple of {BLOCK}"), got);
    }
    if p.ring_buckets == 0 || p.ring_buckets > p.ring_frames {
        let why = format!("must be in 1..={}, the ring's frames", p.ring_frames);
        return refuse("ring_buckets", why, p.ring_buckets.to_string());
    }
    if p.pinned_dilation == 0 {
        return refuse("pinned_dilation", "must be at least 1".into(), "0".into());
    }
    let blocks = p.ring_frames.checked_add(1).and_then(|n| n.checked_mul(p.num_worlds));
    let blocks = blocks.and_then(|n| n.checked_mul(p.tokens_per_frame / BLOCK));
    if blocks.is_none_or(|n| n > i32::MAX as usize) {
        return refuse(
            "num_worlds",
            "the blocks of all worlds must have i32 numbers".into(),
            format!("{blocks:?}"),
        );
    }
    match p.passes.iter().find(|pass| pass.world >= p.num_worlds) {
        Some(pass) => {
            refuse("passes", format!("worlds are 0..{}", p.num_worlds), format!("world {}", pass.world))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replay(passes: &[(usize, u64, bool)], frames: usize, buckets: usize, dilation: u64) -> RingAttended {
        let passes: Vec<Pass> =
            passes.iter().map(|&(world, frame_pos, commit)| Pass { world, frame_pos, commit }).collect();
        let k = vec![0f32; passes.len() * BLOCK];
        let v: Vec<f32> = (0..passes.len() * BLOCK).map(|t| (t / BLOCK) as f32).collect();
        ring(&Ring {
            q: &k,
            k: &k,
            v: &v,
            passes: &passes,
            num_qo_heads: 1,
            num_kv_heads: 1,
            head_dim_qk: 1,
            head_dim_vo: 1,
            tokens_per_frame: BLOCK,
            ring_frames: frames,
            ring_buckets: buckets,
            pinned_dilation: dilation,
            num_worlds: 2,
            sm_scale: 1.0,
        })
        .unwrap()
    }

    fn seen(out: &RingAttended, pass: usize) -> &[i64] {
        &out.visible_blocks[out.visible_indptr[pass] as usize..out.visible_indptr[pass + 1] as usize]
    }

    #[test]
    fn f34_a_ring_shows_the_last_frames_once_and_worlds_do_not_mix() {
        let passes: Vec<_> = (0..10).flat_map(|f| [(0, f, true), (1, f, true)]).collect();
        let out = replay(&passes, 4, 4, 1);
        // World 0, frame 9 goes to slot 1, which is hidden: frames 6, 7, 8 in slots 2, 3, 0 and the scratch.
        assert_eq!(seen(&out, 18), [0, 2, 3, 4]);
        assert_eq!(seen(&out, 19), [5, 7, 8, 9]);
        let mean = (12.0 + 14.0 + 16.0 + 18.0) / 4.0;
        assert!((out.attended.o[18 * BLOCK] - mean).abs() < 1e-12);
    }

    #[test]
    fn f34_an_uncommitted_pass_replaces_the_scratch() {
        let out = replay(&[(0, 0, true), (0, 1, false), (0, 1, false), (0, 1, true), (0, 2, false)], 4, 4, 1);
        assert_eq!(seen(&out, 2), [0, 4]);
        assert!((out.attended.o[2 * BLOCK] - 1.0).abs() < 1e-12);
        assert_eq!(seen(&out, 4), [0, 1, 4]);
        assert!((out.attended.o[4 * BLOCK] - (0.0 + 3.0 + 4.0) / 3.0).abs() < 1e-12);
    }

    #[test]
    fn frames_off_the_dilation_reach_the_scratch_alone() {
        let out = replay(&[(0, 0, true), (0, 1, true), (0, 2, true), (0, 4, true), (0, 5, true)], 3, 2, 4);
        assert_eq!(seen(&out, 2), [0, 3]);
        // Frame 4 goes to bucket 1: slot 0 stays visible; at frame 5 both do.
        assert_eq!(seen(&out, 3), [0, 3]);
        assert_eq!(seen(&out, 4), [0, 1, 3]);
    }
}
