//! The bytes of a cache: one buffer a plane, `[layers, P, S * width]`, and the only unsafe code of this crate.
//!
//! A page is one contiguous block in each layer of each plane, so that a fork's copy, an offload and a reload
//! move blocks whatever the layout is. Addresses come from [`page_offset`] alone and are 64-bit. Which page
//! may be written when is the store's business: this room only promises that nothing outside a page is touched.
#![allow(unsafe_code)]

use std::ptr::NonNull;

use mstar_kernels::cpu::scatter::{scatter_at, scatter_both_at};
use mstar_kernels::cuda::{Event, Moving, OwnedStream, prepare_moves};
use mstar_kernels::fp8::{HeadsInCodes, prepare_store, store_both_heads, store_latents};
use mstar_kernels::mutant::planted;
use mstar_kernels::{Buffer, DType, Device, Error as KernelError, Stream, TensorMut, TensorRef, copy_async};

use super::config::Stored;
use super::{KvConfig, KvEntries, KvLayout, LayerView, SCALES};
use crate::Result;

/// Elements before page `page` of a plane with `width` elements a token and `page_size` tokens a page. Pages of
/// layer `l` are numbered from `l * P` on.
pub const fn page_offset(page: u64, page_size: u64, width: u64) -> u64 {
    page * page_size * width
}

/// One plane's memory.
#[derive(Debug)]
struct Plane {
    name: String,
    dtype: DType,
    /// Elements a token.
    width: usize,
    /// Layers that it has.
    layers: usize,
    /// Where each of the cache's layers lies among them; `None` when each has its own number.
    place: Option<Vec<Option<usize>>>,
    /// First byte of `buffer`, which owns it.
    base: NonNull<u8>,
    buffer: Buffer,
}

/// All planes of a cache.
#[derive(Debug)]
pub(super) struct KvMemory {
    planes: Vec<Plane>,
    layout: KvLayout,
    /// What the cache keeps: a latent in e4m3 is a plane of bytes.
    dtype: DType,
    layers: usize,
    pages: usize,
    page_size: usize,
    stream: Stream,
    /// The queue of copies to and from the host.
    copies: OwnedStream,
    /// Where the cache's stream is when a copy is asked for.
    behind: Event,
}

// SAFETY: `base` points into `buffer`, which is plain bytes and `Send`.
unsafe impl Send for Plane {}
// SAFETY: reads and writes through `base` are kept apart by the store: a slot has one writer, the step that
// reserved it, and is listed for readers only in plans that come after the write.
unsafe impl Sync for Plane {}

/// Pages of a request on the host, as blocks in page order.
#[derive(Debug)]
pub(super) struct HostPages {
    buffer: Buffer,
    pages: usize,
}

impl HostPages {
    /// Bytes held.
    pub(super) fn bytes(&self) -> usize {
        self.buffer.len()
    }

    /// Pages held.
    pub(super) fn pages(&self) -> usize {
        self.pages
    }
}

/// Bytes of the runs that a cache's entries move in: of a head and of a token's heads, or of a latent's two parts and of both; of
/// a plane's entry.
fn runs(config: &KvConfig) -> Vec<usize> {
    let widths = match config.layout {
        KvLayout::Nhd { num_kv_heads, head_dim } => vec![head_dim, num_kv_heads * head_dim],
        KvLayout::Mla { kv_lora_rank: c, qk_rope_head_dim: e } => vec![c, e, c + e],
    };
    let planes = config.planes.iter().map(|plane| plane.width * plane.dtype.size());
    widths.into_iter().map(|width| width * config.dtype.size()).chain(planes).collect()
}

fn floats(name: &'static str, got: &TensorRef<'_>) -> Result<()> {
    if got.dtype().is_float() {
        return Ok(());
    }
    let expected = "f32, bf16 or f16".to_owned();
    Err(KernelError::DTypeMismatch { tensor: name, expected, got: got.dtype() }.into())
}

impl KvMemory {
    /// Zeroed memory for a checked geometry, on `stream`'s device. Copies between pages go on `stream`, in order with the
    /// layers that write and read them.
    pub(super) fn new(config: &KvConfig, stream: Stream) -> Result<KvMemory> {
        config.check()?;
        let device = stream.device();
        // A step moves entries without compiling anything.
        prepare_moves(device, &[Moving::Scatter, Moving::ScatterBoth], &runs(config))?;
        if config.dtype == DType::E4m3 {
            prepare_store(device, matches!(config.layout, KvLayout::Mla { .. }))?;
        }
        let planes = config.all_planes().expect("a checked geometry has a size");
        let planes = planes.into_iter().map(|Stored { name, dtype, width, layers: some }| {
            let layers = some.as_ref().map_or(config.num_layers, Vec::len);
            let place = some.map(|some| {
                (0..config.num_layers).map(|layer| some.iter().position(|&l| l == layer)).collect()
            });
            let shape = [layers, config.max_num_pages, config.page_size, width];
            let wanted = format_args!("{} pages ({name})", config.max_num_pages);
            let buffer = Buffer::for_tensor_on(device, dtype, &shape);
            let mut buffer = buffer.map_err(|why| why.wanted_for(wanted))?;
            let bytes = buffer.len();
            let start = buffer.tensor_mut(0, DType::U8, &[bytes])?.as_mut_ptr();
            let base = NonNull::new(start).expect("a buffer's memory is never null");
            Ok(Plane { name, dtype, width, layers, place, base, buffer })
        });
        Ok(KvMemory {
            planes: planes.collect::<Result<_>>()?,
            layout: config.layout,
            dtype: config.dtype,
            layers: config.num_layers,
            pages: config.max_num_pages,
            page_size: config.page_size,
            stream,
            copies: OwnedStream::new(device)?,
            behind: Event::new(device)?,
        })
    }

    fn device(&self) -> Device {
        self.stream.device()
    }

    /// Bytes allocated.
    pub(super) fn bytes(&self) -> usize {
        self.planes.iter().map(|p| p.buffer.len()).sum()
    }

    fn check_layer(&self, layer: usize) -> Result<()> {
        if layer >= self.layers {
            let why = format!("the cache has {} layers", self.layers);
            return Err(KernelError::Parameter { name: "layer", why, got: layer.to_string() }.into());
        }
        Ok(())
    }

    /// The index of a further plane, from 1.
    pub(super) fn plane_index(&self, name: &str) -> Result<usize> {
        match self.planes[1..].iter().position(|p| p.name == name) {
            Some(i) => Ok(i + 1),
            None => {
                let have: Vec<&str> = self.planes[1..].iter().map(|p| p.name.as_str()).collect();
                let why = format!("the cache has the planes {have:?}");
                Err(KernelError::Parameter { name: "plane", why, got: name.to_owned() }.into())
            }
        }
    }

    /// Where a layer of the cache lies in a plane.
    fn layer_of(&self, plane: &Plane, layer: usize) -> Result<usize> {
        self.check_layer(layer)?;
        match &plane.place {
            None => Ok(layer),
            Some(place) => place[layer].ok_or_else(|| {
                let why = format!("the plane {} has entries in {} other layers", plane.name, plane.layers);
                KernelError::Parameter { name: "layer", why, got: layer.to_string() }.into()
            }),
        }
    }

    /// First element of a page of one of a plane's layers, in bytes from its base. The caller has checked both.
    fn block(&self, plane: &Plane, layer: usize, page: usize) -> usize {
        debug_assert!(layer < plane.layers && page < self.pages);
        let index = (layer * self.pages + page) as u64;
        page_offset(index, self.page_size as u64, plane.width as u64) as usize * plane.dtype.size()
    }

    /// Bytes of one page in one layer of a plane.
    fn block_bytes(&self, plane: &Plane) -> usize {
        self.page_size * plane.width * plane.dtype.size()
    }

    fn view(&self, plane: &Plane, layer: usize, part: usize, shape: &[usize]) -> Result<TensorRef<'_>> {
        let mut strides = [1usize; 4];
        for axis in (1..shape.len()).rev() {
            strides[axis - 1] = strides[axis] * shape[axis];
        }
        strides[0] = self.page_size * plane.width; // a page's block, whatever part of it is viewed
        let offset = self.block(plane, layer, 0) + part * plane.dtype.size();
        // SAFETY: the layer's block starts inside the buffer (`check_layer`), every page of `shape[0] = P` lies
        // `S * width` elements after the one before it, and `part + [S, ..]` stays inside a page. Writers are
        // kept apart from readers by the store (see `Sync`).
        unsafe {
            let first = self.planes_base(plane).add(offset);
            Ok(TensorRef::from_raw_parts(first, self.device(), plane.dtype, shape, &strides[..shape.len()])?)
        }
    }

    fn planes_base(&self, plane: &Plane) -> *mut u8 {
        plane.base.as_ptr()
    }

    /// One layer of the keys and values, or latents.
    pub(super) fn layer(&self, layer: usize) -> Result<LayerView<'_>> {
        self.check_layer(layer)?;
        let (plane, p, s) = (&self.planes[0], self.pages, self.page_size);
        match self.layout {
            KvLayout::Nhd { num_kv_heads: g, head_dim: d } => {
                let (k, v) = self.sides(plane, layer, &[p, s, g, d])?;
                if plane.dtype != DType::E4m3 {
                    return Ok(LayerView::Nhd { k, v });
                }
                let scales = &self.planes[self.plane_index(SCALES)?];
                let all = self.view(scales, layer, 0, &[p, s, 2 * g])?;
                Ok(LayerView::Fp8 { k, v, scales: [all.narrow(2, 0, g)?, all.narrow(2, g, g)?] })
            }
            KvLayout::Mla { .. } => {
                Ok(LayerView::Mla { latent: self.view(plane, layer, 0, &[p, s, plane.width])? })
            }
        }
    }

    /// The two halves of a page's block, each of `shape`, pages first.
    fn sides(&self, plane: &Plane, layer: usize, shape: &[usize]) -> Result<(TensorRef<'_>, TensorRef<'_>)> {
        let half = shape[1..].iter().product();
        Ok((self.view(plane, layer, 0, shape)?, self.view(plane, layer, half, shape)?))
    }

    /// One layer of a further plane, `[P, S, width]`.
    pub(super) fn plane(&self, name: &str, layer: usize) -> Result<TensorRef<'_>> {
        let plane = &self.planes[self.plane_index(name)?];
        let layer = self.layer_of(plane, layer)?;
        self.view(plane, layer, 0, &[self.pages, self.page_size, plane.width])
    }

    /// As [`KvMemory::view`], to write to.
    ///
    /// # Safety
    /// Nobody else reads or writes the elements that are written through the view, while it lives.
    unsafe fn view_mut(
        &self,
        plane: &Plane,
        layer: usize,
        part: usize,
        shape: &[usize],
    ) -> Result<TensorMut<'_>> {
        let view = self.view(plane, layer, part, shape)?;
        // SAFETY: the view lies inside the plane's buffer, which outlives it and is writable through `base`;
        // a page's tokens do not overlap; that nobody else touches what is written is the caller's promise.
        unsafe {
            let first = view.as_ptr().cast_mut();
            Ok(TensorMut::from_raw_parts(first, self.device(), plane.dtype, view.shape(), view.strides())?)
        }
    }

    /// Writes one layer's entries, token `t` to `slots[t]`; -1 writes nothing. All is checked before anything is
    /// written.
    ///
    /// The caller is the only writer of these slots while this runs, and nobody reads them: the slots are those of
    /// a plan, whose step is outstanding and in whose gate the caller is.
    pub(super) fn write(
        &self,
        layer: usize,
        slots: TensorRef<'_>,
        entries: KvEntries<'_>,
        stream: &Stream,
    ) -> Result<()> {
        self.check_layer(layer)?;
        let (t, p, s, plane) = (slots.numel(), self.pages, self.page_size, &self.planes[0]);
        let dtype = Some(plane.dtype);
        if self.dtype == DType::E4m3 {
            return self.write_codes(layer, slots, entries, stream);
        }
        match (self.layout, entries) {
            (KvLayout::Nhd { num_kv_heads: g, head_dim: d }, KvEntries::Nhd { k, v }) => {
                let extents = [Some(t), Some(g), Some(d)];
                k.expect("k", "[T, G, D]", &extents, dtype, self.device())?;
                v.expect("v", "[T, G, D]", &extents, dtype, self.device())?;
                // SAFETY: keys and values are different parts of a page, and the slots are the caller's alone.
                let (to_k, to_v) = unsafe {
                    let k = self.view_mut(plane, layer, 0, &[p, s, g, d])?;
                    (k, self.view_mut(plane, layer, s * g * d, &[p, s, g, d])?)
                };
                Ok(scatter_both_at(stream, slots, [(k, to_k), (v, to_v)])?)
            }
            (KvLayout::Mla { kv_lora_rank: c, qk_rope_head_dim: e }, KvEntries::Mla { ckv, kpe }) => {
                ckv.expect("ckv", "[T, C]", &[Some(t), Some(c)], dtype, self.device())?;
                kpe.expect("kpe", "[T, E]", &[Some(t), Some(e)], dtype, self.device())?;
                // SAFETY: the two are different columns of a token, and the slots are the caller's alone.
                let (to_ckv, to_kpe) = unsafe {
                    let whole = [p, s, c + e];
                    let ckv = self.view_mut(plane, layer, 0, &whole)?.narrow(2, 0, c)?;
                    (ckv, self.view_mut(plane, layer, 0, &whole)?.narrow(2, c, e)?)
                };
                match e {
                    0 => Ok(scatter_at(stream, slots, ckv, to_ckv)?),
                    _ => Ok(scatter_both_at(stream, slots, [(ckv, to_ckv), (kpe, to_kpe)])?),
                }
            }
            (_, entries) => Err(self.other_layout(&entries)),
        }
    }

    /// As [`KvMemory::write`], of floats of any type that are kept as e4m3.
    fn write_codes(
        &self,
        layer: usize,
        slots: TensorRef<'_>,
        entries: KvEntries<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let (t, p, s, plane) = (slots.numel(), self.pages, self.page_size, &self.planes[0]);
        match (self.layout, entries) {
            (KvLayout::Nhd { num_kv_heads: g, head_dim: d }, KvEntries::Nhd { k, v }) => {
                let extents = [Some(t), Some(g), Some(d)];
                for (name, tensor) in [("k", &k), ("v", &v)] {
                    tensor.expect(name, "[T, G, D]", &extents, None, self.device())?;
                    floats(name, tensor)?;
                }
                let scales = &self.planes[self.plane_index(SCALES)?];
                let side = |side: usize, entries| -> Result<_> {
                    // SAFETY: keys and values are different parts of a page, their scales different columns of a token, and the
                    // slots are the caller's alone.
                    let (codes, scales) = unsafe {
                        let codes = self.view_mut(plane, layer, side * s * g * d, &[p, s, g, d])?;
                        (codes, self.view_mut(scales, layer, 0, &[p, s, 2 * g])?.narrow(2, side * g, g)?)
                    };
                    Ok(HeadsInCodes { entries, codes, scales })
                };
                Ok(store_both_heads(stream, slots, [side(0, k)?, side(1, v)?])?)
            }
            (KvLayout::Mla { kv_lora_rank: c, qk_rope_head_dim: e }, KvEntries::Mla { ckv, kpe }) => {
                ckv.expect("ckv", "[T, C]", &[Some(t), Some(c)], None, self.device())?;
                kpe.expect("kpe", "[T, E]", &[Some(t), Some(e)], None, self.device())?;
                // SAFETY: the slots are the caller's alone.
                let cache = unsafe { self.view_mut(plane, layer, 0, &[p, s, plane.width])? };
                Ok(store_latents(stream, slots, ckv, kpe, cache)?)
            }
            (_, entries) => Err(self.other_layout(&entries)),
        }
    }

    fn other_layout(&self, entries: &KvEntries<'_>) -> crate::Error {
        let got = match entries {
            KvEntries::Nhd { .. } => "keys and values",
            KvEntries::Mla { .. } => "latents",
        };
        let why = format!("the cache's layout is {:?}", self.layout);
        KernelError::Parameter { name: "entries", why, got: got.to_owned() }.into()
    }

    /// Writes one layer's entries `[T, width]` of a further plane; otherwise as [`KvMemory::write`].
    pub(super) fn write_plane(
        &self,
        plane: usize,
        layer: usize,
        slots: TensorRef<'_>,
        entries: TensorRef<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let plane = &self.planes[plane];
        let layer = self.layer_of(plane, layer)?;
        let extents = [Some(slots.numel()), Some(plane.width)];
        entries.expect("plane", "[T, width]", &extents, Some(plane.dtype), self.device())?;
        // SAFETY: the slots are the caller's alone.
        let to = unsafe { self.view_mut(plane, layer, 0, &[self.pages, self.page_size, plane.width])? };
        Ok(scatter_at(stream, slots, entries, to)?)
    }

    /// Copies whole pages, every plane and layer: a fork's partial last page, made writable. On a device the copy is
    /// enqueued on the cache's stream.
    ///
    /// Both ids are pages of this cache; nobody writes the first or touches the second meanwhile.
    ///
    /// # Errors
    /// What the device says.
    pub(super) fn copy_page(&self, from: i32, to: i32) -> Result<()> {
        let (from, to) = (self.checked(from), self.checked(to));
        let copied = if planted("fork-forgets-planes") { 1 } else { self.planes.len() };
        for plane in &self.planes[..copied] {
            let bytes = self.block_bytes(plane);
            for layer in 0..plane.layers {
                let (src, dst) = (self.block(plane, layer, from), self.block(plane, layer, to));
                // SAFETY: both blocks lie inside the plane (`checked`), and equal ids copy nothing.
                unsafe {
                    let base = self.planes_base(plane);
                    if src != dst {
                        self.move_block(
                            &self.stream,
                            base.add(src),
                            self.device(),
                            base.add(dst),
                            self.device(),
                            bytes,
                        )?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Moves `bytes` bytes; on a device, in `stream`'s order.
    ///
    /// # Safety
    /// Both ranges are memory of their devices, they do not overlap, and nobody else touches them before the copy is done.
    unsafe fn move_block(
        &self,
        stream: &Stream,
        from: *const u8,
        from_device: Device,
        to: *mut u8,
        to_device: Device,
        bytes: usize,
    ) -> Result<()> {
        if stream.device() == Device::Cpu {
            // SAFETY: the caller's promise.
            unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe {
            let from = TensorRef::from_raw_parts(from, from_device, DType::U8, &[bytes], &[1])?;
            let to = TensorMut::from_raw_parts(to, to_device, DType::U8, &[bytes], &[1])?;
            Ok(copy_async(stream, from, to)?)
        }
    }

    /// The queue for copies to and from the host, behind all that the cache's stream was given so far.
    fn copies(&self) -> Result<Stream> {
        let copies = self.copies.stream();
        self.behind.record(&self.stream)?;
        self.behind.hold(&copies)?;
        Ok(copies)
    }

    /// Copies pages to the host, in order, and waits for the copies; work that is enqueued meanwhile does not wait. Nobody
    /// writes the pages meanwhile.
    ///
    /// # Errors
    /// When the host has no memory for them; what the device says.
    pub(super) fn save(&self, pages: &[i32]) -> Result<HostPages> {
        let each: usize = self.planes.iter().map(|p| self.block_bytes(p) * p.layers).sum();
        let mut buffer = Buffer::pinned(self.device(), each * pages.len())?;
        let bytes = buffer.len();
        let host = buffer.tensor_mut(0, DType::U8, &[bytes])?.as_mut_ptr();
        let stream = self.copies()?;
        let mut at = 0;
        let saved = self.blocks(pages, |plane, block, bytes| {
            // SAFETY: `blocks` yields blocks inside the planes, `at` walks exactly the buffer's length, and the
            // two allocations are distinct. The copies are waited for below, on every path.
            unsafe {
                self.move_block(&stream, plane.add(block), self.device(), host.add(at), Device::Cpu, bytes)?
            };
            at += bytes;
            Ok(())
        });
        let waited = stream.synchronize();
        saved?;
        waited?;
        Ok(HostPages { buffer, pages: pages.len() })
    }

    /// Copies saved pages back, into the same number of pages, and waits for the copies. Nobody else touches them meanwhile.
    ///
    /// # Errors
    /// What the device says; the pages hold anything then.
    pub(super) fn load(&self, host: &HostPages, pages: &[i32]) -> Result<()> {
        assert_eq!(host.pages, pages.len(), "a reload has a page for each one saved");
        let view = host.buffer.tensor(0, DType::U8, &[host.buffer.len()])?;
        let stream = self.copies()?;
        let mut at = 0;
        let first = self.planes_base(&self.planes[0]);
        let loaded = self.blocks(pages, |plane, block, bytes| {
            if planted("reload-forgets-planes") && plane != first {
                at += bytes;
                return Ok(());
            }
            // SAFETY: as in `save`, which made the buffer with this very walk.
            unsafe {
                let from = view.as_ptr().add(at);
                self.move_block(&stream, from, Device::Cpu, plane.add(block), self.device(), bytes)?;
            }
            at += bytes;
            Ok(())
        });
        let waited = stream.synchronize();
        loaded?;
        Ok(waited?)
    }

    /// Calls `each` with a plane's base, a block's offset and its bytes, for every page, plane and layer.
    fn blocks(&self, pages: &[i32], mut each: impl FnMut(*mut u8, usize, usize) -> Result<()>) -> Result<()> {
        for &page in pages {
            let page = self.checked(page);
            for plane in &self.planes {
                let bytes = self.block_bytes(plane);
                for layer in 0..plane.layers {
                    each(self.planes_base(plane), self.block(plane, layer, page), bytes)?;
                }
            }
        }
        Ok(())
    }

    /// A page id as an index.
    fn checked(&self, page: i32) -> usize {
        let index = usize::try_from(page).ok().filter(|&p| p < self.pages);
        index.unwrap_or_else(|| panic!("broken invariant: page {page} of a cache of {} pages", self.pages))
    }
}

#[cfg(test)]
mod tests;
