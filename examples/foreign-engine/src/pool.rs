//! The engine's own memory: a latent pool, and an allocator that hands pages out from the back.

use mstar_attn_mla::{Result, TensorRef};

use crate::model::{C, E, PAGE_SIZE};

/// Pages of the pool: fewer than all requests together would fill.
pub const PAGES: usize = 24;

/// `[P, S, C + E]` with a lane to spare after each latent, which the view steps over.
const STRIDE: usize = C + E + 4;

pub struct Pool {
    latents: Vec<f32>,
    free: Vec<i32>,
}

impl Pool {
    pub fn new() -> Pool {
        // What nobody wrote must reach no result.
        Pool { latents: vec![f32::NAN; PAGES * PAGE_SIZE * STRIDE], free: (0..PAGES as i32).collect() }
    }

    pub fn free_pages(&self) -> usize {
        self.free.len()
    }

    /// A page of nobody's, wiped.
    pub fn take(&mut self) -> Option<i32> {
        let page = self.free.pop()?;
        let at = page as usize * PAGE_SIZE * STRIDE;
        self.latents[at..at + PAGE_SIZE * STRIDE].fill(f32::NAN);
        Some(page)
    }

    pub fn give_back(&mut self, pages: impl IntoIterator<Item = i32>) {
        self.free.extend(pages);
    }

    pub fn write(&mut self, page: i32, slot: usize, latent: &[f32; C + E]) {
        let at = (page as usize * PAGE_SIZE + slot) * STRIDE;
        self.latents[at..at + C + E].copy_from_slice(latent);
    }

    /// The pool as kernels read it: a view with strides, nothing is copied.
    pub fn view(&self) -> Result<TensorRef<'_>> {
        let shape = [PAGES, PAGE_SIZE, C + E];
        TensorRef::from_slice_strided(&self.latents, &shape, &[PAGE_SIZE * STRIDE, STRIDE, 1])
    }
}
