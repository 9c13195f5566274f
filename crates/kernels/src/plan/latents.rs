//! Plans over latents that all heads read.

use crate::Result;
use crate::mla::{Geometry, Variant, is_for, schedule, workspace_bytes};
use crate::paged::{PageTable, ScheduleOptions, Stored, renew};
use crate::work::WorkList;

use super::{Kernel, Planned};

/// A slot holds one latent, `[ckv | kpe]`: [`mla::attend`](crate::mla::attend) runs the plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Latents;

impl Kernel for Latents {
    type Geometry = Geometry;
    type Variant = Variant;

    fn schedule(
        geometry: &Geometry,
        variant: &Variant,
        table: &PageTable<'_>,
        options: &ScheduleOptions,
        list: &mut WorkList,
    ) -> Result<()> {
        schedule(geometry, variant, table, options, list)
    }

    fn is_for(list: &WorkList, geometry: &Geometry, variant: &Variant, table: &PageTable<'_>) -> bool {
        is_for(list, geometry, variant, table)
    }

    fn renew(
        list: &mut WorkList,
        geometry: &Geometry,
        variant: &Variant,
        table: &PageTable<'_>,
        options: &ScheduleOptions,
    ) -> Option<Planned> {
        renew(list, Stored::Latents, &geometry.one_head(), &variant.of_heads(), table, options).planned()
    }

    fn workspace_bytes(list: &WorkList, workers: usize) -> usize {
        workspace_bytes(list, workers)
    }
}
