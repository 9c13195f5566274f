//! A batch over segments as a work list.

use crate::paged::{ScheduleOptions, Stored, padding};
use crate::work::{Segment, WorkList};
use crate::{Error, Result};

use super::{Geometry, Prefix, Table, Variant};

/// Checks a batch and writes its work list into `list`, whose memory is used again. The list is for [`attend`](super::attend)
/// alone. `options.cascade` has no meaning here.
///
/// # Errors
/// What [`Geometry::check`], [`Variant::check`] and [`Table::check`] refuse, a `pad_to` below the batch's tokens; `list` is then
/// as it was.
pub fn schedule(
    geometry: &Geometry,
    variant: &Variant,
    table: &Table<'_>,
    options: &ScheduleOptions,
    list: &mut WorkList,
) -> Result<()> {
    geometry.check()?;
    variant.check()?;
    table.check()?;
    let tokens = table.num_tokens();
    let padded = options.pad_to.unwrap_or(tokens);
    if padded < tokens || padded > i32::MAX as usize {
        let why = format!("the batch has {tokens} query tokens");
        return Err(Error::Parameter { name: "pad_to", why, got: padded.to_string() });
    }
    let heads = geometry.with_pages(table.page_size());
    list.start(Stored::Segments, &heads, &variant.of_pages(), padded);
    list.padded = padded > tokens;
    list.num_pages = table.num_pages();
    list.pages.extend_from_slice(table.pages());
    list.segments.rows.clear();
    list.segments.prefixed = !matches!(table.prefix, Prefix::None);
    list.segments.paged = matches!(table.prefix, Prefix::Pages { .. });
    (list.segments.packed, list.segments.fresh) = packed(table);
    for index in 0..table.num_rows() {
        let (row, segment) = table.row(index);
        list.rows.push(row);
        list.segments.rows.push(segment);
    }
    if list.padded {
        list.rows.push(padding(Stored::Segments, &heads, tokens, padded));
        list.segments.rows.push(Segment::default());
    }
    list.cut(&ScheduleOptions { cascade: false, ..*options });
    Ok(())
}

/// Keys that packed prefixes have in all, and fresh ones.
fn packed(table: &Table<'_>) -> (usize, usize) {
    let last = |indptr: &[i32]| indptr.last().map_or(0, |&end| end.max(0) as usize);
    let prefix = if let Prefix::Packed { cu_p } = table.prefix { last(cu_p) } else { 0 };
    (prefix, last(table.cu_k))
}

/// Whether `list` is the list of this batch, compared in full; never for a table that would be refused.
pub fn is_for(list: &WorkList, geometry: &Geometry, variant: &Variant, table: &Table<'_>) -> bool {
    let rows = table.num_rows();
    list.stored == Stored::Segments
        && list.geometry == geometry.with_pages(table.page_size())
        && list.variant == variant.of_pages()
        && table.check().is_ok()
        && list.rows.len() == rows + usize::from(list.padded)
        && list.num_pages == table.num_pages()
        && list.pages == table.pages()
        && list.segments.prefixed != matches!(table.prefix, Prefix::None)
        && list.segments.paged == matches!(table.prefix, Prefix::Pages { .. })
        && (list.segments.packed, list.segments.fresh) == packed(table)
        && (0..rows).all(|row| table.row(row) == (list.rows[row], list.segments.rows[row]))
}
