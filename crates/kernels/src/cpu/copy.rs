//! Copies of whole pages, or of the first tokens of one: forks, copy on write, offload and reload.

use rayon::prelude::*;

use super::tokens::{SERIAL_BYTES, Tokens, apart, same_entries};
use crate::{Error, Result, Stream, TensorMut, TensorRef};

/// One page's copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageCopy {
    /// The page read.
    pub from: u32,
    /// The page written.
    pub to: u32,
    /// Token slots copied, from slot 0.
    pub tokens: u32,
}

/// Copies pages from `from` `[P, S, ..]` to `to` `[P', S, ..]`, one cache to another; inner axes and dtypes are equal.
///
/// # Errors
/// Shapes, dtypes or layouts that do not fit, a page that is not there, more tokens than a page has, a page written
/// twice; nothing is then written.
pub fn copy_pages(
    stream: &Stream,
    from: TensorRef<'_>,
    mut to: TensorMut<'_>,
    copies: &[PageCopy],
) -> Result<()> {
    let device = crate::device::supported("page copy", stream)?;
    let source = Tokens::of("from", from.as_ptr().cast_mut(), &from, 2, device)?;
    let base = to.as_mut_ptr();
    let target = Tokens::of("to", base, &to.as_ref(), 2, device)?;
    same_entries("to", &to.as_ref(), 1, &from, 1)?;
    apart("to", &to)?;
    check(copies, from.shape()[0], to.shape()[0], from.shape()[1])?;
    run(stream, &source, &target, from.shape()[1], copies)
}

/// Copies pages within one cache `[P, S, ..]`.
///
/// # Errors
/// As [`copy_pages`]; and a page that is both read and written.
pub fn copy_pages_within(stream: &Stream, mut cache: TensorMut<'_>, copies: &[PageCopy]) -> Result<()> {
    let device = crate::device::supported("page copy", stream)?;
    let base = cache.as_mut_ptr();
    let pages = Tokens::of("cache", base, &cache.as_ref(), 2, device)?;
    apart("cache", &cache)?;
    check(copies, cache.shape()[0], cache.shape()[0], cache.shape()[1])?;
    let mut read: Vec<u32> = copies.iter().map(|copy| copy.from).collect();
    read.sort_unstable();
    for (index, copy) in copies.iter().enumerate() {
        if read.binary_search(&copy.to).is_ok() {
            let why = "the page is also read by this call; copy in two calls".into();
            return Err(Error::Index { array: "copies.to", index, got: copy.to.into(), why });
        }
    }
    run(stream, &pages, &pages, cache.shape()[1], copies)
}

fn check(copies: &[PageCopy], from: usize, to: usize, page_size: usize) -> Result<()> {
    let refuse = |array, index, got: u32, why| Err(Error::Index { array, index, got: got.into(), why });
    for (index, copy) in copies.iter().enumerate() {
        if copy.from as usize >= from {
            return refuse("copies.from", index, copy.from, format!("there are pages 0..{from}"));
        }
        if copy.to as usize >= to {
            return refuse("copies.to", index, copy.to, format!("there are pages 0..{to}"));
        }
        if copy.tokens as usize > page_size {
            return refuse("copies.tokens", index, copy.tokens, format!("a page has {page_size} slots"));
        }
    }
    let mut written: Vec<u32> = copies.iter().map(|copy| copy.to).collect();
    written.sort_unstable();
    if let Some(pair) = written.windows(2).find(|pair| pair[0] == pair[1]) {
        let index = copies.iter().rposition(|copy| copy.to == pair[0]).unwrap_or(0);
        return refuse("copies.to", index, pair[0], "the page is written twice".into());
    }
    Ok(())
}

fn run(
    stream: &Stream,
    source: &Tokens,
    target: &Tokens,
    page_size: usize,
    copies: &[PageCopy],
) -> Result<()> {
    #[cfg(feature = "cuda")]
    if stream.device() != crate::Device::Cpu {
        let numbers = copies.iter().map(|copy| [copy.from.into(), copy.to.into(), copy.tokens.into()]);
        return crate::cuda::moves::Moves { stream, from: *source, to: *target }.pages(page_size, numbers);
    }
    let _ = (stream, page_size);
    let copy = |copy: &PageCopy| {
        for slot in 0..u64::from(copy.tokens) {
            let from = source.at(u64::from(copy.from) * source.outer + slot * source.inner);
            let to = target.at(u64::from(copy.to) * target.outer + slot * target.inner);
            // SAFETY: pages and slots are in range, entries equal; no page is written twice, nor read and written.
            unsafe { source.copy_part(from, target, to, 0, 1) };
        }
    };
    let bytes: usize = copies.iter().map(|copy| copy.tokens as usize * source.entry_bytes()).sum();
    if bytes < SERIAL_BYTES {
        copies.iter().for_each(copy);
    } else {
        copies.par_iter().for_each(copy);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(from: u32, to: u32, tokens: u32) -> PageCopy {
        PageCopy { from, to, tokens }
    }

    #[test]
    fn whole_and_partial_pages_land_where_they_should() {
        let (pages, size, width) = (4, 3, 2);
        let mut cache: Vec<i32> = (0..24).collect();
        let view = TensorMut::from_slice(&mut cache, &[pages, size, width]).unwrap();
        copy_pages_within(&Stream::cpu(), view, &[page(1, 3, 3), page(1, 2, 1)]).unwrap();
        let mut expected: Vec<i32> = (0..24).collect();
        expected.copy_within(6..12, 18);
        expected.copy_within(6..8, 12);
        assert_eq!(cache, expected);
        let mut host = vec![0; 12];
        let from = TensorRef::from_slice(&cache, &[pages, size, width]).unwrap();
        let to = TensorMut::from_slice(&mut host, &[2, size, width]).unwrap();
        copy_pages(&Stream::cpu(), from, to, &[page(3, 0, 3)]).unwrap();
        assert_eq!(host, [6, 7, 8, 9, 10, 11, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn overlapping_and_missing_pages_are_refused() {
        let mut cache = vec![0u8; 24];
        let mut view = TensorMut::from_slice(&mut cache, &[4, 3, 2]).unwrap();
        let bad = [
            vec![page(0, 4, 1)],
            vec![page(4, 0, 1)],
            vec![page(0, 1, 4)],
            vec![page(0, 1, 1), page(2, 1, 1)],
            vec![page(0, 0, 1)],
            vec![page(0, 1, 1), page(1, 2, 1)],
        ];
        for copies in bad {
            assert!(copy_pages_within(&Stream::cpu(), view.reborrow(), &copies).is_err(), "{copies:?}");
        }
    }
}
