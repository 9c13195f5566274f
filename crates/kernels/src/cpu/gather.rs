//! Gathers: rows of a matrix by index, and a stream's pages into contiguous tokens.

use rayon::prelude::*;

use super::address::token_offset;
use super::tokens::{SERIAL_BYTES, Tokens, apart, same_entries, strided};
#[cfg(feature = "cuda")]
use crate::Device;
#[cfg(feature = "cuda")]
use crate::cuda::moves::{Moves, Path};
use crate::{DType, Error, Result, Stream, TensorMut, TensorRef};

/// Copies rows `index[r]` of `from` `[N, ..]` to rows `r` of `to` `[R, ..]`; a negative index yields zeros. Inner axes
/// (one or two) and dtypes are equal.
///
/// # Errors
/// Shapes, dtypes or layouts that do not fit, or an index that is not below `N`; nothing is then written.
pub fn gather_rows(stream: &Stream, from: TensorRef<'_>, index: &[i64], mut to: TensorMut<'_>) -> Result<()> {
    let (source, target) = arrays("row gather", stream, ("from", &from), 1, &mut to)?;
    if to.shape()[0] != index.len() {
        let expected = format!("[R, ..] with R = {}", index.len());
        return Err(Error::Shape { tensor: "to", expected, got: to.shape().to_vec() });
    }
    let rows = from.shape()[0];
    for (at, &row) in index.iter().enumerate() {
        if usize::try_from(row).is_ok_and(|row| row >= rows) {
            let why = format!("from has rows 0..{rows}");
            return Err(Error::Index { array: "index", index: at, got: row, why });
        }
    }
    #[cfg(feature = "cuda")]
    if stream.device() != Device::Cpu {
        let moves = Moves { stream, from: source, to: target };
        return moves.by_list(Path::Gather { rows }, |at| index[at], index.len());
    }
    for (at, &row) in index.iter().enumerate() {
        let place = target.at(at as u64 * target.outer);
        // SAFETY: `row` is below N and `at` below R; the tensors are distinct borrows with equal entries.
        unsafe {
            match u64::try_from(row) {
                Ok(row) => source.copy_part(source.at(row * source.outer), &target, place, 0, 1),
                Err(_) => target.zero(place),
            }
        }
    }
    Ok(())
}

/// As [`gather_rows`], by an index that lies on the stream's device, `[R]` i64, contiguous: what a captured run reads anew each
/// time. On a device an index past the last row leaves its row of `to` as it is, since only the device can see it.
///
/// # Errors
/// As [`gather_rows`]; the CPU refuses an index that is not below `N`.
pub fn gather_rows_at(
    stream: &Stream,
    from: TensorRef<'_>,
    index: TensorRef<'_>,
    mut to: TensorMut<'_>,
) -> Result<()> {
    let rows = to.shape().first().copied();
    index.expect("index", "[R]", &[rows], Some(DType::I64), stream.device())?;
    if let Some(index) = index.as_slice::<i64>() {
        return gather_rows(stream, from, index, to);
    }
    let (source, target) = arrays("row gather", stream, ("from", &from), 1, &mut to)?;
    #[cfg(feature = "cuda")]
    if index.is_contiguous() {
        let moves = Moves { stream, from: source, to: target };
        return moves.by_array(Path::Gather { rows: from.shape()[0] }, index.as_ptr(), to.shape()[0]);
    }
    let _ = (source, target);
    Err(strided("index", &index))
}

/// As [`gather_pages`], by pages that lie on the stream's device, `[N]` i32, contiguous. On a device a page that is not in the
/// cache leaves its tokens of `to` as they are.
///
/// # Errors
/// As [`gather_pages`]; the CPU refuses a page that is not in the cache.
pub fn gather_pages_at(
    stream: &Stream,
    cache: TensorRef<'_>,
    pages: TensorRef<'_>,
    first: usize,
    mut to: TensorMut<'_>,
) -> Result<()> {
    pages.expect("pages", "[N]", &[None], Some(DType::I32), stream.device())?;
    if let Some(pages) = pages.as_slice::<i32>() {
        return gather_pages(stream, cache, pages, first, to);
    }
    let (source, target) = arrays("page gather", stream, ("cache", &cache), 2, &mut to)?;
    let page_size = enough_pages(&cache, pages.shape()[0], first, to.shape()[0])?;
    #[cfg(feature = "cuda")]
    if pages.is_contiguous() {
        let path = Path::Unpage { page_size, pages: cache.shape()[0], first };
        let moves = Moves { stream, from: source, to: target };
        return moves.by_array(path, pages.as_ptr(), to.shape()[0]);
    }
    let _ = (source, target, page_size);
    Err(strided("pages", &pages))
}

/// Both sides as addresses, checked against each other; `from` has `outer_axes` axes before its entries, `to` has one.
fn arrays(
    operation: &'static str,
    stream: &Stream,
    (name, from): (&'static str, &TensorRef<'_>),
    outer_axes: usize,
    to: &mut TensorMut<'_>,
) -> Result<(Tokens, Tokens)> {
    let device = crate::device::supported(operation, stream)?;
    let source = Tokens::of(name, from.as_ptr().cast_mut(), from, outer_axes, device)?;
    let base = to.as_mut_ptr();
    let target = Tokens::of("to", base, &to.as_ref(), 1, device)?;
    same_entries("to", &to.as_ref(), 1, from, outer_axes)?;
    apart("to", to)?;
    Ok((source, target))
}

/// The cache's page size, when `pages` pages hold the offsets `first..first + tokens`.
fn enough_pages(cache: &TensorRef<'_>, pages: usize, first: usize, tokens: usize) -> Result<usize> {
    let page_size = cache.shape()[1];
    let end = first.checked_add(tokens).ok_or_else(|| Error::Overflow { shape: vec![first, tokens] })?;
    if tokens > 0 && (page_size == 0 || end.div_ceil(page_size) > pages) {
        let expected = format!("pages of {page_size} slots for offsets {first}..{end}");
        return Err(Error::Shape { tensor: "pages", expected, got: vec![pages] });
    }
    Ok(page_size)
}

/// Copies a stream's tokens from its pages to `to`: token `t` lies at offset `first + t` of `pages`, that is in page
/// `pages[(first + t) / S]`, slot `(first + t) % S`. `cache` is `[P, S, ..]`, `to` is `[U, ..]` with the same inner
/// axes and dtype: `[U, G, D]` of keys, `[U, W]` of latents.
///
/// # Errors
/// Shapes, dtypes or layouts that do not fit, pages that are too few or not in the cache; nothing is then written.
pub fn gather_pages(
    stream: &Stream,
    cache: TensorRef<'_>,
    pages: &[i32],
    first: usize,
    mut to: TensorMut<'_>,
) -> Result<()> {
    let (source, target) = arrays("page gather", stream, ("cache", &cache), 2, &mut to)?;
    let tokens = to.shape()[0];
    let page_size = enough_pages(&cache, pages.len(), first, tokens)?;
    for (index, &page) in pages.iter().enumerate() {
        if usize::try_from(page).map_or(true, |page| page >= cache.shape()[0]) {
            let why = format!("the cache has pages 0..{}", cache.shape()[0]);
            return Err(Error::Index { array: "pages", index, got: page.into(), why });
        }
    }
    #[cfg(feature = "cuda")]
    if stream.device() != Device::Cpu {
        let path = Path::Unpage { page_size, pages: cache.shape()[0], first };
        return Moves { stream, from: source, to: target }.by_list(path, |page| pages[page].into(), tokens);
    }
    let copy = |token: usize| {
        let at = first + token;
        let (page, slot) = (pages[at / page_size] as u32, (at % page_size) as u32);
        let from = source.at(token_offset(page, slot, source.outer, source.inner));
        // SAFETY: the page is in the cache, the slot below S, the token below U and written by this thread alone;
        // the tensors are distinct borrows with equal entries.
        unsafe { source.copy_part(from, &target, target.at(token as u64 * target.outer), 0, 1) };
    };
    if tokens * source.entry_bytes() < SERIAL_BYTES {
        (0..tokens).for_each(copy);
    } else {
        (0..tokens).into_par_iter().with_min_len(32).for_each(copy);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_become_contiguous_tokens_from_any_offset() {
        let (pages, size, heads, width) = (5, 3, 2, 4);
        let cache: Vec<f32> = (0..pages * size * heads * width).map(|i| i as f32).collect();
        let view = TensorRef::from_slice(&cache, &[pages, size, heads, width]).unwrap();
        let table = [4, 0, 2];
        let entry = heads * width;
        for first in 0..4 {
            for tokens in 0..=(9 - first) {
                let mut out = vec![-1f32; tokens * entry];
                let to = TensorMut::from_slice(&mut out, &[tokens, heads, width]).unwrap();
                gather_pages(&Stream::cpu(), view, &table, first, to).unwrap();
                for token in 0..tokens {
                    let at = first + token;
                    let from = (table[at / size] as usize * size + at % size) * entry;
                    assert_eq!(out[token * entry..(token + 1) * entry], cache[from..from + entry]);
                }
            }
        }
        let mut out = vec![0f32; 10 * entry];
        let mut to = TensorMut::from_slice(&mut out, &[10, heads, width]).unwrap();
        assert!(gather_pages(&Stream::cpu(), view, &table, 0, to.reborrow()).is_err());
        assert!(gather_pages(&Stream::cpu(), view, &[0, 1, 2, 5], 0, to.reborrow()).is_err());
        assert!(gather_pages(&Stream::cpu(), view, &[0, 1, 2, -1], 0, to).is_err());
    }

    #[test]
    fn rows_are_picked_and_missing_ones_are_zero() {
        let from: Vec<i32> = (0..12).collect();
        let view = TensorRef::from_slice(&from, &[4, 3]).unwrap();
        let mut out = [7; 9];
        let to = TensorMut::from_slice(&mut out, &[3, 3]).unwrap();
        gather_rows(&Stream::cpu(), view, &[3, -1, 0], to).unwrap();
        assert_eq!(out, [9, 10, 11, 0, 0, 0, 0, 1, 2]);
        let to = TensorMut::from_slice(&mut out, &[3, 3]).unwrap();
        assert!(gather_rows(&Stream::cpu(), view, &[3, 4, 0], to).is_err());
        assert_eq!(out, [9, 10, 11, 0, 0, 0, 0, 1, 2]);
    }
}
