//! One tile of latents under all lanes of an item: where queries, bounds, scores and weights lie.

use half::{bf16, f16};

use crate::DType;
use crate::cpu::arena::{Arena, arena_bytes};
use crate::cpu::paged::{LINE, acc_stride};
use crate::fp8::{LATENT_GROUP, latent_scales};
use crate::mutant::planted;

use super::body::{Body, GROUP, Scores, Softmax, TILE, Values};

/// What all items of a call have in common.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) body: Body,
    /// `C`.
    pub(super) width: usize,
    /// `C + E`.
    pub(super) depth: usize,
    pub(super) q_dtype: DType,
    pub(super) kv_dtype: DType,
    /// Factor of the scores.
    pub(super) scale: f32,
    /// Factor that turns a difference of scores into a base-2 exponent.
    pub(super) c: f32,
}

impl Shape {
    /// Whether latents are copied, widened or padded, before they are multiplied.
    fn staged(&self) -> bool {
        if self.body.pairs { !self.depth.is_multiple_of(2) } else { self.kv_dtype != DType::F32 }
    }

    /// Widens a latent of e4m3 codes, `[C | scales | rotary lanes]`, each group of lanes under its own scale.
    ///
    /// # Safety
    /// The body's instruction set is supported, and `latent_bytes` bytes are readable at `row`.
    unsafe fn dequantise(&self, row: *const u8, to: &mut [f32]) {
        let (codes, rope) = to.split_at_mut(self.width);
        let scales = row.wrapping_add(self.width);
        for (group, lanes) in codes.chunks_mut(LATENT_GROUP).enumerate() {
            let of = if planted("fp8-neighbours-scale") { group / 2 } else { group };
            // SAFETY: the caller's promise; there are as many scales as groups.
            unsafe {
                let scale = scales.cast::<f32>().add(of).read_unaligned();
                let scale = if planted("fp8-scale-ignored") { 1.0 } else { scale };
                (self.body.widen_codes)(row.add(group * LATENT_GROUP), scale, lanes);
            }
        }
        let from = scales.wrapping_add(size_of::<f32>() * latent_scales(self.width));
        // SAFETY: as above; the rotary lanes are bf16.
        unsafe { (self.body.widen)(from, DType::Bf16, rope) };
    }

    /// The depth as bodies see it: whole pairs.
    fn padded_depth(&self) -> usize {
        if self.body.pairs { self.depth.next_multiple_of(2) } else { self.depth }
    }
}

/// Scratch of one item.
pub(super) struct Engine<'a> {
    shape: Shape,
    lanes: usize,
    queries: &'a mut [f32],
    from: &'a mut [u32],
    to: &'a mut [u32],
    scores: &'a mut [f32],
    weights: &'a mut [f32],
    alpha: &'a mut [f32],
    stage: &'a mut [f32],
    zeros: &'a [f32],
}

fn padded(lanes: usize) -> usize {
    lanes.next_multiple_of(GROUP)
}

/// Floats of a staged latent, or of one of zeros.
fn stage_stride(depth: usize) -> usize {
    depth.next_multiple_of(LINE)
}

impl<'a> Engine<'a> {
    /// Bytes of scratch for `lanes` lanes.
    pub(super) fn bytes(lanes: usize, depth: usize) -> usize {
        let lanes = padded(lanes);
        arena_bytes::<f32>(lanes * depth.next_multiple_of(2))
            + 3 * arena_bytes::<f32>(lanes)
            + 2 * arena_bytes::<f32>(lanes * TILE)
            + arena_bytes::<f32>(TILE * stage_stride(depth))
            + arena_bytes::<f32>(stage_stride(depth))
    }

    /// Scratch for `lanes` lanes, none of which sees anything yet.
    pub(super) fn new(arena: &mut Arena<'a>, shape: Shape, lanes: usize) -> Engine<'a> {
        let all = padded(lanes);
        let queries = arena.take::<f32>(all * shape.depth.next_multiple_of(2));
        let (from, to) = (arena.take::<u32>(all), arena.take::<u32>(all));
        let alpha = arena.take::<f32>(all);
        let (scores, weights) = (arena.take::<f32>(all * TILE), arena.take::<f32>(all * TILE));
        let stage = arena.take::<f32>(TILE * stage_stride(shape.depth));
        let zeros = arena.take::<f32>(stage_stride(shape.depth));
        queries.fill(0.0);
        from.fill(0);
        to.fill(0);
        zeros.fill(0.0);
        Engine { shape, lanes, queries, from, to, scores, weights, alpha, stage, zeros }
    }

    /// Copies a lane's query, `[q_nope | q_pe]`, and notes that it sees keys `from..to`.
    ///
    /// # Safety
    /// `C` elements are readable at `nope` and `depth - C` at `pe`.
    pub(super) unsafe fn set_lane(
        &mut self,
        lane: usize,
        nope: *const u8,
        pe: *const u8,
        from: u32,
        to: u32,
    ) {
        (self.from[lane], self.to[lane]) = (from, to);
        let (width, rope) = (self.shape.width, self.shape.depth - self.shape.width);
        // SAFETY: the caller's promise.
        unsafe {
            self.set_part(lane, 0, nope, width);
            if !planted("mla-rope-dropped") {
                self.set_part(lane, width, pe, rope);
            }
        }
    }

    /// # Safety
    /// `count` elements are readable at `from`.
    unsafe fn set_part(&mut self, lane: usize, at: usize, from: *const u8, count: usize) {
        let (group, lane) = (lane / GROUP, lane % GROUP);
        let depth = self.shape.padded_depth();
        if self.shape.body.pairs {
            let first = at.next_multiple_of(2).min(at + count) - at;
            let whole = (count - first) / 2;
            let all: &mut [u32] = bytemuck::cast_slice_mut(self.queries);
            let to = &mut all[group * depth / 2 * GROUP..][..depth / 2 * GROUP];
            // SAFETY: the caller's promise; pairs are of bf16 queries. The first and the last one may be half a pair.
            unsafe {
                let half = |i: usize| u32::from(from.cast::<u16>().add(i).read_unaligned());
                if first == 1 {
                    to[at / 2 * GROUP + lane] |= half(0) << 16;
                }
                let start = (at + first) / 2;
                let pairs = to[start * GROUP..].iter_mut().skip(lane).step_by(GROUP).take(whole);
                for (i, to) in pairs.enumerate() {
                    *to = from.add(2 * first).cast::<u32>().add(i).read_unaligned();
                }
                if first + 2 * whole < count {
                    to[(start + whole) * GROUP + lane] |= half(count - 1);
                }
            }
            return;
        }
        let to = &mut self.queries[group * depth * GROUP..][..depth * GROUP];
        for (i, to) in to[at * GROUP..].iter_mut().skip(lane).step_by(GROUP).take(count).enumerate() {
            // SAFETY: the caller's promise.
            *to = unsafe { widen(from, i, self.shape.q_dtype) };
        }
    }

    /// A latent of zeros, for keys that no lane sees.
    pub(super) fn zeros(&self) -> *const u8 {
        self.zeros.as_ptr().cast()
    }

    /// Whether every lane sees all of the keys `from..to`.
    pub(super) fn all_see(&self, from: u32, to: u32) -> bool {
        let (begins, ends) = (&self.from[..self.lanes], &self.to[..self.lanes]);
        begins.iter().all(|&begin| begin <= from) && ends.iter().all(|&end| to <= end)
    }

    /// Adds a tile of latents to the state in `memory`. `rows[0]` is the key at position `first`; with `hidden`, a lane
    /// sees only the keys within its bounds. `ahead` names latents that are wanted next.
    ///
    /// # Safety
    /// The body's instruction set is supported. Each of `rows`, an even number up to `TILE`, names `depth` readable
    /// elements of the latents' type, or is [`Engine::zeros`].
    pub(super) unsafe fn tile(
        &mut self,
        rows: &[*const u8],
        first: u32,
        hidden: bool,
        ahead: &[*const u8],
        memory: &mut [f32],
    ) {
        let Shape { body, width, kv_dtype, scale, c, .. } = self.shape;
        let groups = self.lanes.div_ceil(GROUP);
        let padded = groups * GROUP;
        let mut staged = [std::ptr::null::<u8>(); TILE];
        let mut shifted = [std::ptr::null::<u8>(); TILE];
        let mut rows = rows;
        if self.shape.staged() {
            // SAFETY: the caller's promise.
            unsafe { self.stage(rows, &mut staged) };
            rows = &staged[..rows.len()];
        }
        let mut values = rows;
        if planted("mla-value-shifted") {
            let size = if self.shape.staged() && !body.pairs { 4 } else { kv_dtype.size() };
            for (to, from) in shifted.iter_mut().zip(rows) {
                *to = from.wrapping_add((self.shape.depth - width) * size);
            }
            values = &shifted[..rows.len()];
        }
        let (m, rest) = memory.split_at_mut(padded);
        let (l, acc) = rest.split_at_mut(padded);
        let depth = self.shape.padded_depth();
        // SAFETY: the caller's promise; queries, scores and weights were cut for these lanes.
        unsafe {
            (body.scores)(&mut Scores {
                queries: self.queries,
                groups,
                depth,
                keys: rows,
                ahead,
                scores: self.scores,
            });
            (body.softmax)(&mut Softmax {
                groups,
                keys: rows.len(),
                first,
                hidden,
                from: self.from,
                to: self.to,
                scale,
                c,
                scores: self.scores,
                weights: self.weights,
                m,
                l,
                alpha: self.alpha,
            });
            if planted("mla-rescale-dropped") {
                self.alpha.fill(1.0);
            }
            (body.values)(&mut Values {
                weights: self.weights,
                alpha: self.alpha,
                lanes: self.lanes,
                values,
                width,
                acc,
                acc_stride: acc_stride(width),
            });
        }
    }

    /// Copies latents, widened to f32, or in bf16 with a zero after.
    ///
    /// # Safety
    /// As for [`Engine::tile`].
    unsafe fn stage(&mut self, rows: &[*const u8], staged: &mut [*const u8; TILE]) {
        let depth = self.shape.depth;
        let stride = stage_stride(depth);
        for (index, &row) in rows.iter().enumerate() {
            let to = &mut self.stage[index * stride..(index + 1) * stride];
            if self.shape.body.pairs {
                let to: &mut [u16] = bytemuck::cast_slice_mut(to);
                for (i, to) in to[..depth].iter_mut().enumerate() {
                    // SAFETY: the caller's promise.
                    *to = unsafe { row.cast::<u16>().add(i).read_unaligned() };
                }
                to[depth] = 0;
            } else if self.shape.kv_dtype == DType::E4m3 {
                // SAFETY: the caller's promise.
                unsafe { self.shape.dequantise(row, &mut to[..depth]) };
            } else {
                // SAFETY: the caller's promise.
                unsafe { (self.shape.body.widen)(row, self.shape.kv_dtype, &mut to[..depth]) };
            }
            staged[index] = to.as_ptr().cast();
        }
    }
}

/// Element `index` at `from` as f32.
///
/// # Safety
/// It is readable and of that type.
unsafe fn widen(from: *const u8, index: usize, dtype: DType) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::Bf16 => from.cast::<bf16>().add(index).read_unaligned().to_f32(),
            DType::F16 => from.cast::<f16>().add(index).read_unaligned().to_f32(),
            _ => from.cast::<f32>().add(index).read_unaligned(),
        }
    }
}
