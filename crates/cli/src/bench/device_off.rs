//! The names of `device` in a build without CUDA, where there is no other place than the CPU.

use std::convert::Infallible;

use super::limits::Limits;
use super::measure::{Made, Timed};
use super::place::Place;

pub(super) struct Clock(Infallible);

impl Clock {
    pub(super) fn of(place: &Place) -> anyhow::Result<Clock> {
        anyhow::bail!("{}: CUDA was not compiled in", place.device())
    }

    pub(super) fn is_emulated(&self) -> bool {
        match self.0 {}
    }

    pub(super) fn limits(&mut self, _: &Place) -> anyhow::Result<Limits> {
        match self.0 {}
    }

    pub(super) fn measure(&mut self, _: &Place, _: Made, _: bool) -> anyhow::Result<Timed> {
        match self.0 {}
    }
}
