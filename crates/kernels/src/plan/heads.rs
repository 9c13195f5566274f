//! Plans over a key and a value for each key head.

use crate::Result;
use crate::paged::{Geometry, PageTable, ScheduleOptions, Stored, Variant, renew, schedule, workspace_bytes};
use crate::work::WorkList;

use super::{Kernel, Planned};

/// A slot holds a key and a value for each key head: [`paged::attend`](crate::paged::attend) runs the plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Heads;

impl Kernel for Heads {
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
        list.is_for(geometry, variant, table)
    }

    fn renew(
        list: &mut WorkList,
        geometry: &Geometry,
        variant: &Variant,
        table: &PageTable<'_>,
        options: &ScheduleOptions,
    ) -> Option<Planned> {
        renew(list, Stored::Heads, geometry, variant, table, options).planned()
    }

    fn workspace_bytes(list: &WorkList, workers: usize) -> usize {
        workspace_bytes(list, workers)
    }
}
