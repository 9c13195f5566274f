//! A batch over latents as a work list.

use crate::paged::{self, PageTable, ScheduleOptions, Stored};
use crate::work::WorkList;
use crate::{Error, Result};

use super::{Geometry, Variant};

/// Checks a batch and writes its work list into `list`, whose memory is used again. The list is for [`attend`](super::attend)
/// alone; [`paged::attend`](crate::paged) refuses it.
///
/// # Errors
/// What [`Geometry::check`], [`paged::Variant::check`] and [`PageTable::check`] refuse, and a table with custom masks;
/// `list` is then as it was.
pub fn schedule(
    geometry: &Geometry,
    variant: &Variant,
    table: &PageTable<'_>,
    options: &ScheduleOptions,
    list: &mut WorkList,
) -> Result<()> {
    geometry.check()?;
    if table.mask.is_some() {
        let why = "latent attention takes no custom masks; leave it out".into();
        return Err(Error::Parameter { name: "mask", why, got: "a mask".into() });
    }
    let (geometry, variant) = (geometry.one_head(), variant.of_heads());
    paged::schedule_as(Stored::Latents, &geometry, &variant, table, options, list)
}

/// Whether `list` is the list of this batch, compared in full; never for a table that would be refused.
pub fn is_for(list: &WorkList, geometry: &Geometry, variant: &Variant, table: &PageTable<'_>) -> bool {
    paged::is_for(list, Stored::Latents, &geometry.one_head(), &variant.of_heads(), table)
}
