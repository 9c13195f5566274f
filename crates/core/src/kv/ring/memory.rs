//! The keys and values of a ring: one buffer each for every layer, and the copies between frames of one world.
//!
//! Who may touch which frame when is the ledger's business. This room promises that nothing but the frames named is
//! touched, and takes every address from a checked view.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use mstar_kernels::cpu::scatter::{scatter, scatter_both_at};
use mstar_kernels::cuda::{Moving, prepare_moves};
use mstar_kernels::mutant::planted;
use mstar_kernels::{
    Buffer, DType, Device, Error as KernelError, Stream, TensorMut, TensorRef, copy_async, fill,
};

use super::{RingConfig, RingGeometry, RingLayer};
use crate::Result;

/// One layer's memory.
#[derive(Debug)]
struct Layer {
    geometry: RingGeometry,
    k: Buffer,
    v: Buffer,
}

/// All layers of a ring.
#[derive(Debug)]
pub(super) struct RingMemory {
    layers: Vec<Layer>,
    config: Arc<RingConfig>,
    /// `0..F`: where a frame's tokens go in the frame.
    order: Vec<i64>,
    stream: Stream,
}

/// Keys, or values.
#[derive(Clone, Copy)]
enum Part {
    Keys,
    Values,
}

impl RingMemory {
    /// Zeroed memory for a checked geometry, exactly [`RingConfig::memory_bytes`], on `stream`'s device. Copies go on `stream`,
    /// in order with the layers that write and read frames.
    pub(super) fn new(config: &Arc<RingConfig>, stream: Stream) -> Result<RingMemory> {
        config.check()?;
        let device = stream.device();
        // A pass moves frames without compiling anything.
        let runs = [config.head_dim, config.head_dim_vo].map(|width| width * config.dtype.size());
        let heads = runs.map(|run| run * config.num_kv_heads);
        prepare_moves(device, &[Moving::ScatterBoth, Moving::ScatterListed], &[runs, heads].concat())?;
        let layers = config.layers.iter().map(|&geometry| {
            let (tokens, heads) = (config.layer_tokens(&geometry), config.num_kv_heads);
            let buffer = |width| {
                let made = Buffer::for_tensor_on(device, config.dtype, &[tokens, heads, width]);
                made.map_err(|why| why.wanted_for("a layer of all worlds"))
            };
            Ok(Layer { geometry, k: buffer(config.head_dim)?, v: buffer(config.head_dim_vo)? })
        });
        let layers = layers.collect::<Result<_>>()?;
        let order = (0..config.tokens_per_frame as i64).collect();
        Ok(RingMemory { layers, config: Arc::clone(config), order, stream })
    }

    /// Bytes allocated.
    pub(super) fn allocated(&self) -> usize {
        self.layers.iter().map(|layer| layer.k.len() + layer.v.len()).sum()
    }

    /// Where it is.
    pub(super) fn device(&self) -> Device {
        self.stream.device()
    }

    fn find(&self, layer: usize) -> Result<&Layer> {
        self.layers.get(layer).ok_or_else(|| {
            let why = format!("the ring has {} layers", self.layers.len());
            KernelError::Parameter { name: "layer", why, got: layer.to_string() }.into()
        })
    }

    fn part<'a>(&self, layer: &'a Layer, part: Part) -> (&'a Buffer, usize) {
        match part {
            Part::Keys => (&layer.k, self.config.head_dim),
            Part::Values => (&layer.v, self.config.head_dim_vo),
        }
    }

    /// One layer, all worlds.
    pub(super) fn layer(&self, layer: usize) -> Result<RingLayer<'_>> {
        let layer = self.find(layer)?;
        let (tokens, heads, dtype) =
            (self.config.layer_tokens(&layer.geometry), self.config.num_kv_heads, self.config.dtype);
        Ok(RingLayer {
            k: layer.k.tensor(0, dtype, &[tokens, heads, self.config.head_dim])?,
            v: layer.v.tensor(0, dtype, &[tokens, heads, self.config.head_dim_vo])?,
        })
    }

    /// Refuses keys and values that are not `rows` frames of this ring's.
    pub(super) fn check_frames(
        &self,
        layer: usize,
        rows: usize,
        k: &TensorRef<'_>,
        v: &TensorRef<'_>,
    ) -> Result<()> {
        self.find(layer)?;
        let RingConfig { tokens_per_frame, num_kv_heads, head_dim, head_dim_vo, dtype, .. } = *self.config;
        let extents = |width| [Some(rows * tokens_per_frame), Some(num_kv_heads), Some(width)];
        let device = self.device();
        k.expect("k", "[R * F, G, D]", &extents(head_dim), Some(dtype), device)?;
        Ok(v.expect("v", "[R * F, G, Dv]", &extents(head_dim_vo), Some(dtype), device)?)
    }

    /// Writes row `row` of checked frames to a world's scratch.
    ///
    /// The caller is the only one who touches that scratch in this layer meanwhile: it is in the gate of the one step
    /// that runs, whose plan lists the world once.
    pub(super) fn write(
        &self,
        layer: usize,
        world: usize,
        row: usize,
        (k, v): (TensorRef<'_>, TensorRef<'_>),
        stream: &Stream,
    ) -> Result<()> {
        let layer = self.find(layer)?;
        let (f, scratch) = (self.config.tokens_per_frame, layer.geometry.ring_frames);
        for (part, entries) in [(Part::Keys, k), (Part::Values, v)] {
            // SAFETY: the scratch is the caller's alone.
            let to = unsafe { self.frames_mut(layer, part, world, scratch..scratch + 1)? };
            scatter(stream, &self.order, entries.narrow(0, row * f, f)?, to)?;
        }
        Ok(())
    }

    /// Writes checked frames to the scratches of all worlds of a plan, by the places of their tokens on the device, `[R * F]` i64.
    ///
    /// The caller is the only one who touches those scratches in this layer meanwhile, as in [`RingMemory::write`].
    pub(super) fn write_at(
        &self,
        layer: usize,
        places: TensorRef<'_>,
        (k, v): (TensorRef<'_>, TensorRef<'_>),
        stream: &Stream,
    ) -> Result<()> {
        let layer = self.find(layer)?;
        let frames = self.config.num_worlds * layer.geometry.frames();
        // SAFETY: what is written are scratches, which are the caller's alone; keys and values lie apart.
        let (to_k, to_v) = unsafe {
            let to_k = self.frames_mut(layer, Part::Keys, 0, 0..frames)?;
            (to_k, self.frames_mut(layer, Part::Values, 0, 0..frames)?)
        };
        Ok(scatter_both_at(stream, places, [(k, to_k), (v, to_v)])?)
    }

    /// Copies a world's scratch to the slot that frame `frame_pos` takes, in every layer that keeps it. Nobody else
    /// touches the world meanwhile.
    pub(super) fn keep(&self, world: usize, frame_pos: u64) -> Result<()> {
        for layer in &self.layers {
            let Some(slot) = layer.geometry.slot_of(frame_pos) else { continue };
            let scratch = layer.geometry.ring_frames;
            for part in [Part::Keys, Part::Values] {
                let from = self.bytes(layer, part, world, scratch..scratch + 1)?;
                // SAFETY: slot and scratch are different frames of buffers that live as long as this, and the world is the
                // caller's alone: whoever has it next works behind the copy on the same stream.
                unsafe {
                    copy_async(&self.stream, from, self.bytes_mut(layer, part, world, slot..slot + 1)?)?
                };
            }
        }
        Ok(())
    }

    /// Zeroes a world, every frame of every layer. Nobody else touches it meanwhile.
    pub(super) fn zero(&self, world: usize) -> Result<()> {
        for layer in &self.layers {
            for part in [Part::Keys, Part::Values] {
                // SAFETY: the world is the caller's alone.
                let to = unsafe { self.bytes_mut(layer, part, world, 0..layer.geometry.frames())? };
                fill(&self.stream, to, 0)?;
            }
        }
        Ok(())
    }

    /// Copies a world to the host, layer after layer, keys and then values, and waits for the copies. Nobody writes it meanwhile.
    ///
    /// # Errors
    /// When the host has no memory for it; what the device says.
    pub(super) fn save(&self, world: usize) -> Result<Buffer> {
        let mut host = Buffer::zeroed(self.config.world_bytes()?)?;
        let saved = self.parts(|layer, part, at| {
            let from = self.bytes(layer, part, world, 0..layer.geometry.frames())?;
            if planted("ring-snapshot-without-values") && matches!(part, Part::Values) {
                return Ok(from.numel());
            }
            let to = host.tensor_mut(at, DType::U8, from.shape())?;
            // SAFETY: this waits below, on every path, before `host` goes to anybody.
            unsafe { copy_async(&self.stream, from, to)? };
            Ok(from.numel())
        });
        let waited = self.stream.synchronize();
        saved?;
        waited?;
        Ok(host)
    }

    /// Copies a saved world of the same geometry back, and waits for the copies. Nobody else touches the world meanwhile.
    ///
    /// # Errors
    /// What the device says; the world holds anything then.
    pub(super) fn load(&self, world: usize, host: &Buffer) -> Result<()> {
        let loaded = self.parts(|layer, part, at| {
            // SAFETY: the world is the caller's alone.
            let to = unsafe { self.bytes_mut(layer, part, world, 0..layer.geometry.frames())? };
            let bytes = to.numel();
            // SAFETY: this waits below, on every path, while `host` is borrowed.
            unsafe { copy_async(&self.stream, host.tensor(at, DType::U8, &[bytes])?, to)? };
            Ok(bytes)
        });
        let waited = self.stream.synchronize();
        loaded?;
        Ok(waited?)
    }

    /// Calls `each` for the keys and the values of every layer, with the bytes before them in a saved world; it returns their own.
    fn parts(&self, mut each: impl FnMut(&Layer, Part, usize) -> Result<usize>) -> Result<()> {
        let mut at = 0;
        for layer in &self.layers {
            for part in [Part::Keys, Part::Values] {
                at += each(layer, part, at)?;
            }
        }
        Ok(())
    }

    /// First byte and number of bytes of some of a world's frames.
    fn span(&self, layer: &Layer, width: usize, world: usize, frames: &Range<usize>) -> (usize, usize) {
        let frame =
            self.config.tokens_per_frame * self.config.num_kv_heads * width * self.config.dtype.size();
        ((world * layer.geometry.frames() + frames.start) * frame, frames.len() * frame)
    }

    /// Some of a world's frames, `[n, F, G, D]`, to write to.
    ///
    /// # Safety
    /// Nobody else reads or writes these frames while the view lives.
    unsafe fn frames_mut<'a>(
        &self,
        layer: &'a Layer,
        part: Part,
        world: usize,
        frames: Range<usize>,
    ) -> Result<TensorMut<'a>> {
        let (buffer, width) = self.part(layer, part);
        let shape = [frames.len(), self.config.tokens_per_frame, self.config.num_kv_heads, width];
        let (offset, _) = self.span(layer, width, world, &frames);
        // SAFETY: the caller's promise is the one that is asked for.
        Ok(unsafe { buffer.as_mut_shared(offset, self.config.dtype, &shape)? })
    }

    /// As [`RingMemory::frames_mut`], as bytes.
    ///
    /// # Safety
    /// Nobody else reads or writes these frames while the view lives.
    unsafe fn bytes_mut<'a>(
        &self,
        layer: &'a Layer,
        part: Part,
        world: usize,
        frames: Range<usize>,
    ) -> Result<TensorMut<'a>> {
        let (buffer, width) = self.part(layer, part);
        let (offset, bytes) = self.span(layer, width, world, &frames);
        // SAFETY: the caller's promise is the one that is asked for.
        Ok(unsafe { buffer.as_mut_shared(offset, DType::U8, &[bytes])? })
    }

    /// The bytes of some of a world's frames, to read.
    fn bytes<'a>(
        &self,
        layer: &'a Layer,
        part: Part,
        world: usize,
        frames: Range<usize>,
    ) -> Result<TensorRef<'a>> {
        let (buffer, width) = self.part(layer, part);
        let (offset, bytes) = self.span(layer, width, world, &frames);
        Ok(buffer.tensor(offset, DType::U8, &[bytes])?)
    }
}
