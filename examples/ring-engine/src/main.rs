//! A video model's engine that keeps its own ring of frames and attends it through `mstar-attn-flex` alone: no request, no
//! step, no spec. The ring lies head first (`[G, M, D]`), as it likes.
//!
//! Frames of two blocks go round six slots; each frame is denoised twice in a scratch frame and then kept. A mask follows
//! the ring by editing only the blocks that changed, and every frame is held against a plain loop over what it may see.
//! The program fails when a number is wrong.

use std::error::Error;

use mstar_attn_flex::{
    AuxRequest, BLOCK, BlockMask, DType, FlexArgs, Geometry, Inputs, KernelOptions, MaskShape, Outputs, Plan,
    Planned, ScoreMod, Stream, TensorMut, TensorRef, flex_attention_masked, make_block_mask, run,
};

const QUERY_HEADS: usize = 4;
const KEY_HEADS: usize = 2;
const WIDTH: usize = 32;
/// Tokens of a frame.
const FRAME: usize = 2 * BLOCK;
/// Slots that frames go round; one more is the scratch.
const SLOTS: usize = 6;
/// Tokens of the ring.
const TOKENS: usize = (SLOTS + 1) * FRAME;
const SOFT_CAP: f32 = 4.0;

/// The blocks of one slot.
fn blocks(slot: usize) -> std::ops::Range<usize> {
    slot * FRAME / BLOCK..(slot + 1) * FRAME / BLOCK
}

/// A number that stands for what a network would have computed.
fn feature(frame: usize, pass: usize, what: usize, at: usize) -> f32 {
    let mixed = (frame * 31 + pass * 7 + what * 3 + 1).wrapping_mul(2_654_435_761) ^ at.wrapping_mul(40_503);
    (mixed % 1009) as f32 / 504.5 - 1.0
}

/// Keys and values, `[G, M, D]` each.
struct Ring {
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Ring {
    fn write(&mut self, slot: usize, frame: usize, pass: usize) {
        for head in 0..KEY_HEADS {
            let at = (head * TOKENS + slot * FRAME) * WIDTH;
            for i in 0..FRAME * WIDTH {
                self.keys[at + i] = feature(frame, pass, 1, head * FRAME * WIDTH + i);
                self.values[at + i] = feature(frame, pass, 2, head * FRAME * WIDTH + i);
            }
        }
    }

    fn views(&self) -> Result<[TensorRef<'_>; 2], mstar_attn_flex::Error> {
        let view = |data| TensorRef::from_slice(data, &[1, KEY_HEADS, TOKENS, WIDTH]);
        Ok([view(&self.keys)?, view(&self.values)?])
    }
}

/// One query of one head over the visible tokens, in plain loops.
fn plainly(ring: &Ring, q: &[f32], head: usize, visible: &[bool]) -> Vec<f64> {
    let of = head / (QUERY_HEADS / KEY_HEADS);
    let scale = (WIDTH as f64).sqrt().recip();
    let (mut out, mut total) = (vec![0f64; WIDTH], 0f64);
    for token in (0..TOKENS).filter(|&token| visible[token]) {
        let at = (of * TOKENS + token) * WIDTH;
        let dot: f64 = (0..WIDTH).map(|c| f64::from(q[c]) * f64::from(ring.keys[at + c])).sum();
        let weight = (f64::from(SOFT_CAP) * (dot * scale / f64::from(SOFT_CAP)).tanh()).exp();
        total += weight;
        out.iter_mut().enumerate().for_each(|(c, o)| *o += weight * f64::from(ring.values[at + c]));
    }
    out.iter().map(|o| o / total).collect()
}

fn main() -> Result<(), Box<dyn Error>> {
    let geometry = Geometry {
        batch: 1,
        num_qo_heads: QUERY_HEADS,
        num_kv_heads: KEY_HEADS,
        head_dim_qk: WIDTH,
        head_dim_vo: WIDTH,
        q_dtype: DType::F32,
        kv_dtype: DType::F32,
    };
    let stream = Stream::cpu();
    // What nobody wrote may hold anything.
    let junk = vec![f32::NAN; KEY_HEADS * TOKENS * WIDTH];
    let mut ring = Ring { keys: junk.clone(), values: junk };
    let mut written = [false; TOKENS];
    written[SLOTS * FRAME..].fill(true);

    // At first a frame sees the scratch alone.
    let shape = MaskShape { block_q: FRAME, ..MaskShape::new(FRAME, TOKENS) };
    let mut mask = BlockMask::full(shape)?;
    mask.update([0, 0, 0], 0..blocks(SLOTS).start, 0..0)?;
    let options = KernelOptions::default();
    let mut plan = Plan::new(&geometry, &mask, &options)?;
    let mut workspace = plan.workspace()?;
    let (mut worst, mut touched, mut stood) = (0f64, 0, 0);

    for frame in 0..20 {
        let slot = frame % SLOTS;
        // The slot that this frame will take is hidden; the one that the last frame took is shown.
        let mut visible = written;
        visible[slot * FRAME..(slot + 1) * FRAME].fill(false);
        let last = if frame > 0 { blocks((frame - 1) % SLOTS) } else { 0..0 };
        touched += mask.update([0, 0, 0], blocks(slot), last)?.written;

        for pass in 0..3 {
            ring.write(SLOTS, frame, pass);
            // The mask is planned once a frame; the passes after the first find the plan as it is.
            if plan.replan(&geometry, &mask, &options)? == Planned::Unchanged {
                stood += 1;
            }
            workspace.reserve_bytes(plan.workspace_bytes())?;
            let q: Vec<f32> =
                (0..QUERY_HEADS * FRAME * WIDTH).map(|at| 3.0 * feature(frame, pass, 0, at)).collect();
            let mut o = vec![0f32; q.len()];
            let [k, v] = ring.views()?;
            let inputs = Inputs {
                q: TensorRef::from_slice(&q, &[1, QUERY_HEADS, FRAME, WIDTH])?,
                k,
                v,
                scale: None,
                score_mods: &[ScoreMod::SoftCap(SOFT_CAP)],
            };
            let outputs = Outputs {
                o: TensorMut::from_slice(&mut o, &[1, QUERY_HEADS, FRAME, WIDTH])?,
                lse: None,
                max_scores: None,
            };
            run(&plan, &stream, &mut workspace, inputs, outputs)?;

            for head in 0..QUERY_HEADS {
                for token in [0, 1, FRAME / 2, FRAME - 1] {
                    let at = (head * FRAME + token) * WIDTH;
                    let want = plainly(&ring, &q[at..at + WIDTH], head, &visible);
                    let gaps =
                        o[at..at + WIDTH].iter().zip(&want).map(|(&o, want)| (f64::from(o) - want).abs());
                    worst = gaps.fold(worst, f64::max);
                    if o[at].is_nan() {
                        return Err(
                            format!("frame {frame}, pass {pass}: a key that nobody wrote was read").into()
                        );
                    }
                }
            }
            if pass == 2 {
                // The same in one call, by what is written rather than by blocks.
                let all = make_block_mask(FRAME, TOKENS, &visible)?;
                let [k, v] = ring.views()?;
                let mut again = vec![0f32; q.len()];
                let args = FlexArgs {
                    score_mods: &[ScoreMod::SoftCap(SOFT_CAP)],
                    block_mask: Some(&all),
                    enable_gqa: true,
                    return_aux: AuxRequest { lse: true, max_scores: true },
                    ..FlexArgs::default()
                };
                let q = TensorRef::from_slice(&q, &[1, QUERY_HEADS, FRAME, WIDTH])?;
                let to = TensorMut::from_slice(&mut again, &[1, QUERY_HEADS, FRAME, WIDTH])?;
                flex_attention_masked(&stream, q, k, v, &args, to)?;
                if again != o {
                    return Err(format!("frame {frame}: one call and a plan differ").into());
                }
            }
        }
        ring.write(slot, frame, 2);
        written[slot * FRAME..(slot + 1) * FRAME].fill(true);
    }
    println!(
        "20 frames, 3 passes each: worst error {worst:.1e}; {touched} entries of the mask written, {stood} of 60 \
         plans found made"
    );
    if worst > 1e-5 || stood < 40 {
        return Err("a number is wrong".into());
    }
    Ok(())
}
