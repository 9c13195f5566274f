//! Mods where block-mask attention is not compiled: there are none.

use std::convert::Infallible;
use std::marker::PhantomData;

use super::simd::Simd;

/// Never there.
#[derive(Clone, Copy)]
pub(crate) struct TileMods<'a>(Infallible, PhantomData<&'a ()>);

/// Never there.
pub(super) struct Places(Infallible);

impl TileMods<'_> {
    pub(super) fn places(&self, _: usize, _: usize) -> Places {
        Places(self.0)
    }

    pub(super) fn see_whole(&self, _: usize, _: &Places) -> bool {
        match self.0 {}
    }

    pub(super) fn visible(&self, _: usize, _: usize, _: &Places, _: u128) -> u128 {
        match self.0 {}
    }

    pub(super) fn mask_by_head(&self) -> bool {
        match self.0 {}
    }

    pub(super) fn change_scores(&self) -> bool {
        match self.0 {}
    }

    /// # Safety
    /// None: it cannot be called.
    #[allow(clippy::too_many_arguments)] // As the one that does something.
    pub(super) unsafe fn modify<S: Simd>(
        &self,
        _: S,
        _: usize,
        _: usize,
        places: &Places,
        _: *mut f32,
        _: (usize, usize),
        _: f32,
        _: u128,
    ) -> u128 {
        match places.0 {}
    }
}
