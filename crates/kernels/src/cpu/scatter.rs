//! Appending tokens to a paged cache.

use super::address::{split_slot, token_offset};
use super::tokens::{SERIAL_BYTES, Tokens, apart, same_entries, strided};
#[cfg(feature = "cuda")]
use crate::Device;
#[cfg(feature = "cuda")]
use crate::cuda::moves::{Moves, Path};
use crate::{DType, Error, Result, Stream, TensorMut, TensorRef};

/// Writes token `t` of `entries` `[T, ..]` to slot `slots[t]` of `cache` `[P, S, ..]`, where slot `page * S + s` is
/// slot `s` of page `page`. Inner axes and dtypes are equal: `[T, G, D]` and `[P, S, G, D]` for keys or values,
/// `[T, W]` and `[P, S, W]` for latents and planes. Outer strides are free.
///
/// A token with slot -1 (padding) is written nowhere. Where a slot is repeated the last of its tokens stays,
/// whatever the number of threads: they share the work by parts of an entry, never by tokens. On a device it is any one of them.
///
/// # Errors
/// Shapes, dtypes or layouts that do not fit, or a slot that is neither -1 nor below `P * S`, with its index; nothing
/// is then written.
pub fn scatter(
    stream: &Stream,
    slots: &[i64],
    entries: TensorRef<'_>,
    mut cache: TensorMut<'_>,
) -> Result<()> {
    let (from, to) = arrays(stream, &entries, &mut cache)?;
    let (tokens, pages, page_size) = (entries.shape()[0], cache.shape()[0], cache.shape()[1]);
    if slots.len() != tokens {
        let expected = format!("[T] = [{tokens}]");
        return Err(Error::Shape { tensor: "slots", expected, got: vec![slots.len()] });
    }
    let _limit = check_slots(slots, pages, page_size)?;
    #[cfg(feature = "cuda")]
    if stream.device() != Device::Cpu {
        let path = Path::Scatter { page_size, slots: _limit as usize };
        return Moves { stream, from, to }.by_list(path, |token| slots[token], tokens);
    }
    let write = |part: usize, parts: usize| {
        for (token, &slot) in slots.iter().enumerate() {
            let Ok(slot) = u64::try_from(slot) else { continue };
            let (page, slot) = split_slot(slot, page_size as u64);
            let target = to.at(token_offset(page, slot, to.outer, to.inner));
            // SAFETY: the slot is below P * S and the token below T; this thread alone writes this part.
            unsafe { from.copy_part(from.at(token as u64 * from.outer), &to, target, part, parts) };
        }
    };
    let parts = rayon::current_num_threads().min(8);
    if tokens * from.entry_bytes() < SERIAL_BYTES || parts < 2 {
        write(0, 1);
    } else {
        in_parts(0, parts, &|part| write(part, parts));
    }
    Ok(())
}

/// `P * S`, when every slot is below it or -1.
pub(crate) fn check_slots(slots: &[i64], pages: usize, page_size: usize) -> Result<i64> {
    let limit = pages.saturating_mul(page_size).min(i64::MAX as usize) as i64;
    match slots.iter().position(|&slot| !(-1..limit).contains(&slot)) {
        None => Ok(limit),
        Some(index) => {
            let why = format!("token {index} goes to a slot below P * S = {limit}, or to none with -1");
            Err(Error::Index { array: "slots", index, got: slots[index], why })
        }
    }
}

/// As [`scatter`], by slots that lie on the stream's device, `[T]` i64, contiguous: what a captured run reads anew each time.
///
/// On a device a slot out of range writes nothing, since only the device can see it; and of tokens that go to one slot, any one
/// stays.
///
/// # Errors
/// As [`scatter`]; the CPU refuses a slot out of range.
pub fn scatter_at(
    stream: &Stream,
    slots: TensorRef<'_>,
    entries: TensorRef<'_>,
    mut cache: TensorMut<'_>,
) -> Result<()> {
    let tokens = entries.shape().first().copied();
    slots.expect("slots", "[T]", &[tokens], Some(DType::I64), stream.device())?;
    if let Some(slots) = slots.as_slice::<i64>() {
        return scatter(stream, slots, entries, cache);
    }
    let (from, to) = arrays(stream, &entries, &mut cache)?;
    #[cfg(feature = "cuda")]
    if slots.is_contiguous() {
        let (pages, page_size) = (cache.shape()[0], cache.shape()[1]);
        let path = Path::Scatter { page_size, slots: pages.saturating_mul(page_size) };
        return Moves { stream, from, to }.by_array(path, slots.as_ptr(), entries.shape()[0]);
    }
    let _ = (from, to);
    Err(strided("slots", &slots))
}

/// As [`scatter_at`] of two sides of the same tokens, keys and values or the two parts of a latent: of each, `entries` `[T, ..]` go to the
/// slots, i64 `[T]`, of `cache` `[P, S, ..]`. No byte is of both caches, though both may be views of the same pages. On a device they go at
/// once, where two calls would take twice as long.
///
/// # Errors
/// As [`scatter_at`]; nothing is then written of either side.
pub fn scatter_both_at(
    stream: &Stream,
    slots: TensorRef<'_>,
    mut both: [(TensorRef<'_>, TensorMut<'_>); 2],
) -> Result<()> {
    for (entries, _) in &both {
        let tokens = entries.shape().first().copied();
        slots.expect("slots", "[T]", &[tokens], Some(DType::I64), stream.device())?;
    }
    let mut checked = [None, None];
    for (place, (entries, cache)) in checked.iter_mut().zip(&mut both) {
        *place = Some(arrays(stream, entries, cache)?);
        if let Some(slots) = slots.as_slice::<i64>() {
            check_slots(slots, cache.shape()[0], cache.shape()[1])?;
        }
    }
    if let Some(slots) = slots.as_slice::<i64>() {
        return both.into_iter().try_for_each(|(entries, cache)| scatter(stream, slots, entries, cache));
    }
    #[cfg(feature = "cuda")]
    if let ([Some(first), Some(second)], true) = (checked, slots.is_contiguous()) {
        let path = both.each_ref().map(|(_, cache)| {
            let (pages, page_size) = (cache.shape()[0], cache.shape()[1]);
            Path::Scatter { page_size, slots: pages.saturating_mul(page_size) }
        });
        let moves = [first, second].map(|(from, to)| Moves { stream, from, to });
        return Moves::both_by_array(moves, path, slots.as_ptr(), slots.numel());
    }
    let _ = checked;
    Err(strided("slots", &slots))
}

/// Entries and cache as addresses, checked against each other.
fn arrays(stream: &Stream, entries: &TensorRef<'_>, cache: &mut TensorMut<'_>) -> Result<(Tokens, Tokens)> {
    let device = crate::device::supported("scatter", stream)?;
    let from = Tokens::of("entries", entries.as_ptr().cast_mut(), entries, 1, device)?;
    let base = cache.as_mut_ptr();
    let to = Tokens::of("cache", base, &cache.as_ref(), 2, device)?;
    same_entries("entries", entries, 1, &cache.as_ref(), 2)?;
    apart("cache", cache)?;
    Ok((from, to))
}

/// Calls `work` for each part, without allocating.
fn in_parts(from: usize, to: usize, work: &(impl Fn(usize) + Sync)) {
    if to - from == 1 {
        return work(from);
    }
    let middle = from + (to - from) / 2;
    rayon::join(|| in_parts(from, middle, work), || in_parts(middle, to, work));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(pages: usize, size: usize, width: usize) -> Vec<i32> {
        (0..pages * size * width).map(|i| -(i as i32) - 1).collect()
    }

    #[test]
    fn f14_slot_minus_one_writes_nothing() {
        let (pages, size, width) = (3, 4, 2);
        let mut cache = pool(pages, size, width);
        let before = cache.clone();
        let entries: Vec<i32> = (0..16).collect();
        let slots = [5, 2, -1, -1, -1, -1, -1, -1];
        scatter(
            &Stream::cpu(),
            &slots,
            TensorRef::from_slice(&entries, &[8, 2]).unwrap(),
            TensorMut::from_slice(&mut cache, &[pages, size, width]).unwrap(),
        )
        .unwrap();
        let mut expected = before;
        expected[10..12].copy_from_slice(&[0, 1]);
        expected[4..6].copy_from_slice(&[2, 3]);
        assert_eq!(cache, expected);
    }

    #[test]
    fn f14_a_slot_out_of_range_is_refused_and_nothing_is_written() {
        for bad in [12, -2, i64::MAX, i64::MIN] {
            let mut cache = pool(3, 4, 2);
            let before = cache.clone();
            let said = scatter(
                &Stream::cpu(),
                &[0, bad],
                TensorRef::from_slice(&[1, 2, 3, 4], &[2, 2]).unwrap(),
                TensorMut::from_slice(&mut cache, &[3, 4, 2]).unwrap(),
            );
            let index = matches!(said, Err(Error::Index { array: "slots", index: 1, got, .. }) if got == bad);
            assert!(index, "{said:?}");
            assert_eq!(cache, before);
        }
    }

    #[test]
    fn f14_a_repeated_slot_keeps_the_last_token_however_large_the_entries() {
        for width in [3, 40_000] {
            let mut cache = vec![0f32; 4 * width];
            let entries: Vec<f32> = (0..6 * width).map(|i| (i / width) as f32 + 1.0).collect();
            scatter(
                &Stream::cpu(),
                &[1, 3, 1, 3, 1, -1],
                TensorRef::from_slice(&entries, &[6, width]).unwrap(),
                TensorMut::from_slice(&mut cache, &[2, 2, width]).unwrap(),
            )
            .unwrap();
            for (slot, expected) in [0.0, 5.0, 0.0, 4.0].into_iter().enumerate() {
                assert!(cache[slot * width..(slot + 1) * width].iter().all(|&x| x == expected));
            }
        }
    }

    #[test]
    fn strided_entries_reach_an_interleaved_cache() {
        // Keys of a fused [T, 3, G, D] projection into the keys of a [P, 2, S, G, D] pool.
        let (tokens, heads, width, pages, size) = (3, 2, 4, 2, 2);
        let fused: Vec<f32> = (0..tokens * 3 * heads * width).map(|i| i as f32).collect();
        let k = TensorRef::from_slice(&fused, &[tokens, 3, heads, width]).unwrap().select(1, 1).unwrap();
        let mut cache = vec![-1f32; pages * 2 * size * heads * width];
        let view = TensorMut::from_slice(&mut cache, &[pages, 2, size, heads, width]).unwrap();
        scatter(&Stream::cpu(), &[3, 0, 2], k, view.select(1, 0).unwrap()).unwrap();
        let entry = heads * width;
        for (token, slot) in [3usize, 0, 2].into_iter().enumerate() {
            let at = (slot / size * 2 * size + slot % size) * entry;
            let from = (token * 3 + 1) * entry;
            assert_eq!(cache[at..at + entry], fused[from..from + entry], "token {token}");
        }
        assert_eq!(cache.iter().filter(|&&x| x == -1.0).count(), cache.len() - tokens * entry);
    }

    #[test]
    fn shapes_and_dtypes_are_checked_first() {
        let entries = [0f32; 8];
        let view = |shape: &[usize]| TensorRef::from_slice(&entries, shape).unwrap();
        let mut cache = [0f32; 16];
        let mut to = TensorMut::from_slice(&mut cache, &[2, 2, 4]).unwrap();
        assert!(scatter(&Stream::cpu(), &[0, 1], view(&[2, 4]), to.reborrow()).is_ok());
        assert!(scatter(&Stream::cpu(), &[0], view(&[2, 4]), to.reborrow()).is_err());
        assert!(scatter(&Stream::cpu(), &[0, 1], view(&[2, 2, 2]), to.reborrow()).is_err());
        assert!(scatter(&Stream::cpu(), &[0], view(&[1, 8]), to.reborrow()).is_err());
        let ints = [0i32; 8];
        let ints = TensorRef::from_slice(&ints, &[2, 4]).unwrap();
        assert!(matches!(
            scatter(&Stream::cpu(), &[0, 1], ints, to.reborrow()),
            Err(Error::DTypeMismatch { tensor: "entries", .. })
        ));
    }
}
