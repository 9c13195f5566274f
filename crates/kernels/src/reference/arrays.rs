//! Lengths and index arrays, checked before any loop runs: bad input is an error, never a panic.

use std::ops::Range;

use crate::{Error, Result};

/// `extents` multiplied, when the product exists.
pub(super) fn product(array: &'static str, extents: &[usize]) -> Result<usize> {
    let size = extents.iter().try_fold(1usize, |n, &extent| n.checked_mul(extent));
    size.filter(|&n| n <= isize::MAX as usize / 8).ok_or_else(|| Error::Parameter {
        name: array,
        why: "its extents have no product in this address space".into(),
        got: format!("{extents:?}"),
    })
}

/// Refuses an array whose length is not the product of `extents`.
pub(super) fn length<T>(array: &'static str, data: &[T], extents: &[usize]) -> Result<()> {
    if data.len() == product(array, extents)? {
        return Ok(());
    }
    Err(Error::Shape { tensor: array, expected: format!("{extents:?}"), got: vec![data.len()] })
}

/// How many blocks of `extents` an array holds; it must hold a whole number.
pub(super) fn outer<T>(array: &'static str, data: &[T], extents: &[usize]) -> Result<usize> {
    let block = product(array, extents)?;
    if block == 0 {
        return Err(zero(array, extents));
    }
    if data.len().is_multiple_of(block) {
        return Ok(data.len() / block);
    }
    Err(Error::Shape { tensor: array, expected: format!("[_, {extents:?}]"), got: vec![data.len()] })
}

fn zero(name: &'static str, extents: &[usize]) -> Error {
    Error::Parameter { name, why: "every extent must be at least 1".into(), got: format!("{extents:?}") }
}

/// Refuses query heads that the key heads do not divide.
pub(super) fn heads(num_qo_heads: usize, num_kv_heads: usize) -> Result<usize> {
    if num_kv_heads == 0 || num_qo_heads == 0 || !num_qo_heads.is_multiple_of(num_kv_heads) {
        return Err(Error::Parameter {
            name: "num_qo_heads",
            why: format!("must be a positive multiple of num_kv_heads ({num_kv_heads})"),
            got: num_qo_heads.to_string(),
        });
    }
    Ok(num_qo_heads / num_kv_heads)
}

/// The ranges that an indptr cuts `0..total` into. It starts at 0, never falls and ends at `total`.
pub(super) fn ranges(array: &'static str, indptr: &[i32], total: usize) -> Result<Vec<Range<usize>>> {
    let wrong = |index: usize, why: String| Error::Index { array, index, got: i64::from(indptr[index]), why };
    match indptr.first() {
        None => return Err(Error::Shape { tensor: array, expected: "[R + 1]".into(), got: vec![0] }),
        Some(0) => {}
        Some(_) => return Err(wrong(0, "an indptr starts at 0".into())),
    }
    for index in 1..indptr.len() {
        if indptr[index] < indptr[index - 1] {
            return Err(wrong(index, format!("below its predecessor {}", indptr[index - 1])));
        }
    }
    let last = indptr.len() - 1;
    if indptr[last] as usize != total {
        return Err(wrong(last, format!("must end at {total}, the entries that there are")));
    }
    Ok(indptr.windows(2).map(|pair| pair[0] as usize..pair[1] as usize).collect())
}

/// Refuses an index that is not in `0..bound`.
pub(super) fn indices(array: &'static str, data: &[i32], bound: usize) -> Result<()> {
    match data.iter().position(|&i| i < 0 || i as usize >= bound) {
        None => Ok(()),
        Some(index) => Err(Error::Index {
            array,
            index,
            got: i64::from(data[index]),
            why: format!("must be in 0..{bound}"),
        }),
    }
}

/// Refuses a scale or cap that is not a finite number.
pub(super) fn finite(name: &'static str, value: f64) -> Result<()> {
    if value.is_finite() {
        return Ok(());
    }
    Err(Error::Parameter { name, why: "must be finite".into(), got: value.to_string() })
}
