//! Lists run by a device's blocks, on whatever device there is: the emulated one under the feature `emulator`.

#[cfg(feature = "paged")]
mod heads;
#[cfg(feature = "paged")]
mod paged;

use crate::cuda::{Context, OwnedStream};
use crate::{Buffer, Device, Element, Stream, TensorMut, TensorRef, copy};

const DEVICE: Device = Device::Cuda(0);

/// A stream of the device to test on, if there is one.
fn stream() -> Option<OwnedStream> {
    #[cfg(feature = "emulator")]
    assert!(crate::cuda::emulate(), "another test chose the driver");
    match Context::of(DEVICE).and_then(|_| OwnedStream::new(DEVICE)) {
        Ok(stream) => Some(stream),
        Err(why) => {
            println!("SKIPPED: {why}");
            None
        }
    }
}

/// A copy of `data` on the device.
fn put<E: Element>(stream: &Stream, data: &[E], shape: &[usize]) -> Buffer {
    let mut buffer = Buffer::for_tensor_on(stream.device(), E::DTYPE, shape).unwrap();
    let to = buffer.tensor_mut(0, E::DTYPE, shape).unwrap();
    copy(stream, TensorRef::from_slice(data, shape).unwrap(), to).unwrap();
    buffer
}

/// What a buffer holds once the stream has come there.
fn take<E: Element + Default>(stream: &Stream, buffer: &Buffer, len: usize) -> Vec<E> {
    let mut data = vec![E::default(); len];
    let from = buffer.tensor(0, E::DTYPE, &[len]).unwrap();
    copy(stream, from, TensorMut::from_slice(&mut data, &[len]).unwrap()).unwrap();
    data
}

mod moves {
    use super::*;
    use crate::cpu::copy::{PageCopy, copy_pages};
    use crate::cpu::gather::{gather_pages, gather_pages_at, gather_rows, gather_rows_at};
    use crate::cpu::scatter::{scatter, scatter_at, scatter_both_at};
    use crate::lse::{Merged, Partial, merge_all_natural, merge_all_natural_at, merge_natural_in_place_at};
    use crate::synth::{Exact, Kind, chain, fill, fill_at};

    /// Entries of `heads` runs of `width` elements, `heads * gap` apart from each other in the second array.
    const SHAPES: [(usize, usize, usize); 5] = [(2, 16, 0), (3, 5, 0), (1, 1, 3), (2, 8, 1), (4, 7, 2)];

    fn numbers(len: usize, from: i32) -> Vec<i32> {
        (0..len as i32).map(|i| from + i).collect()
    }

    #[test]
    fn f14_tokens_go_to_their_slots_as_on_the_cpu_and_minus_one_nowhere() {
        let Some(owned) = stream() else { return };
        let stream = owned.stream();
        let (pages, size, tokens) = (7, 3, 600);
        for (heads, width, gap) in SHAPES {
            let entry = heads * (width + gap);
            // More tokens than a launch lists; each slot at most once.
            let slots: Vec<i64> =
                (0..tokens as i64).map(|t| if t % 37 == 5 { 20 - t / 37 } else { -1 }).collect();
            let entries = numbers(tokens * heads * width, 1);
            let cache = numbers(pages * size * entry, -1_000_000);
            let strides = [size * entry, entry, width + gap, 1];
            let shape = [pages, size, heads, width];
            let mut want = cache.clone();
            let given = TensorRef::from_slice(&entries, &[tokens, heads, width]).unwrap();
            let to = TensorMut::from_slice_strided(&mut want, &shape, &strides).unwrap();
            scatter(&Stream::cpu(), &slots, given, to).unwrap();
            let on = put(&stream, &entries, &[tokens, heads, width]);
            let at = put(&stream, &slots, &[tokens]);
            for by_array in [false, true] {
                let mut there = put(&stream, &cache, &[cache.len()]);
                let given = on.tensor(0, i32::DTYPE, &[tokens, heads, width]).unwrap();
                let whole = there.tensor_mut(0, i32::DTYPE, &[cache.len()]).unwrap();
                let base = { whole }.as_mut_ptr();
                // SAFETY: the buffer holds the cache; nobody else uses it.
                let to =
                    unsafe { TensorMut::from_raw_parts(base, DEVICE, i32::DTYPE, &shape, &strides) }.unwrap();
                if by_array {
                    let at = at.tensor(0, i64::DTYPE, &[tokens]).unwrap();
                    scatter_at(&stream, at, given, to).unwrap();
                } else {
                    scatter(&stream, &slots, given, to).unwrap();
                }
                assert_eq!(
                    take::<i32>(&stream, &there, cache.len()),
                    want,
                    "{heads} {width} {gap} {by_array}"
                );
            }
        }
    }

    #[test]
    fn f14_both_sides_of_tokens_go_to_their_slots_at_once_as_one_by_one() {
        let Some(owned) = stream() else { return };
        let stream = owned.stream();
        let (pages, size, tokens) = (5, 4, 300);
        // Widths in 16s, 4s and single bytes; the wider side reaches over several rounds of a warp's lanes.
        for (wide, narrow) in [(2 << 10, 128), (640, 12), (1100, 7), (0, 16), (3, 0)] {
            let slots: Vec<i64> = (0..tokens as i64)
                .map(|t| if t % 17 == 3 { t / 17 } else { [-1, 20, -5][t as usize % 3] })
                .collect();
            let at = put(&stream, &slots, &[tokens]);
            let of = |width: usize, from: usize| -> Vec<u8> {
                (0..tokens * width).map(|i| (i * 7 + from) as u8).collect()
            };
            let sides = [(wide, of(wide, 1)), (narrow, of(narrow, 2))];
            let given = sides.each_ref().map(|(width, entries)| put(&stream, entries, &[tokens, *width]));
            let [one_by_one, at_once] = [false, true].map(|at_once| {
                let mut pools = sides.each_ref().map(|(width, _)| {
                    let all = pages * size * width;
                    (put(&stream, &vec![9u8; all], &[all]), *width)
                });
                let at = || at.tensor(0, i64::DTYPE, &[tokens]).unwrap();
                let [first, second] = &mut pools;
                let [first, second] =
                    [(first, &given[0]), (second, &given[1])].map(|((pool, width), given)| {
                        let entries = given.tensor(0, u8::DTYPE, &[tokens, *width]).unwrap();
                        (entries, pool.tensor_mut(0, u8::DTYPE, &[pages, size, *width]).unwrap())
                    });
                if at_once {
                    scatter_both_at(&stream, at(), [first, second]).unwrap();
                } else {
                    scatter_at(&stream, at(), first.0, first.1).unwrap();
                    scatter_at(&stream, at(), second.0, second.1).unwrap();
                }
                pools.map(|(pool, width)| take::<u8>(&stream, &pool, pages * size * width))
            });
            assert!(one_by_one == at_once, "{wide} {narrow}");
            for (of, (width, entries)) in at_once.iter().zip(&sides) {
                let mut want = vec![9u8; of.len()];
                for (token, &slot) in slots.iter().enumerate().filter(|(_, slot)| (0..20).contains(*slot)) {
                    let (to, from) = (slot as usize * width, token * width);
                    want[to..to + width].copy_from_slice(&entries[from..from + width]);
                }
                assert!(*of == want, "{width}");
            }
        }
    }

    #[test]
    fn rows_and_pages_are_gathered_and_pages_copied_as_on_the_cpu() {
        let Some(owned) = stream() else { return };
        let stream = owned.stream();
        for (heads, width, _) in SHAPES {
            let entry = heads * width;
            let (pages, size, rows) = (600, 2, 700);
            let cache = numbers(pages * size * entry, 0);
            let on = put(&stream, &cache, &[pages, size, heads, width]);
            let paged = |buffer: &'_ Buffer| {
                buffer.tensor(0, i32::DTYPE, &[pages, size, heads, width]).unwrap().shape().to_vec()
            };
            assert_eq!(paged(&on), [pages, size, heads, width]);
            // Rows by index, negative ones zeros.
            let index: Vec<i64> =
                (0..rows as i64).map(|r| if r % 5 == 0 { -1 } else { (r * 7) % 1200 }).collect();
            let mut want = vec![-1i32; rows * entry];
            let flat = TensorRef::from_slice(&cache, &[pages * size, heads, width]).unwrap();
            gather_rows(
                &Stream::cpu(),
                flat,
                &index,
                TensorMut::from_slice(&mut want, &[rows, heads, width]).unwrap(),
            )
            .unwrap();
            let at = put(&stream, &index, &[rows]);
            for by_array in [false, true] {
                let mut out = put(&stream, &vec![-1i32; rows * entry], &[rows, heads, width]);
                let from = on.tensor(0, i32::DTYPE, &[pages * size, heads, width]).unwrap();
                let to = out.tensor_mut(0, i32::DTYPE, &[rows, heads, width]).unwrap();
                match by_array {
                    true => {
                        gather_rows_at(&stream, from, at.tensor(0, i64::DTYPE, &[rows]).unwrap(), to).unwrap()
                    }
                    false => gather_rows(&stream, from, &index, to).unwrap(),
                }
                assert_eq!(take::<i32>(&stream, &out, rows * entry), want);
            }
            // A stream's pages, more than a launch lists, from an odd offset.
            let list: Vec<i32> = (0..550).map(|i| (i * 11 + 3) % 600).collect();
            let (first, tokens) = (3, 1090);
            let mut want = vec![-1i32; tokens * entry];
            let whole = TensorRef::from_slice(&cache, &[pages, size, heads, width]).unwrap();
            let to = TensorMut::from_slice(&mut want, &[tokens, heads, width]).unwrap();
            gather_pages(&Stream::cpu(), whole, &list, first, to).unwrap();
            let at = put(&stream, &list, &[list.len()]);
            for by_array in [false, true] {
                let mut out = put(&stream, &vec![-1i32; tokens * entry], &[tokens, heads, width]);
                let from = on.tensor(0, i32::DTYPE, &[pages, size, heads, width]).unwrap();
                let to = out.tensor_mut(0, i32::DTYPE, &[tokens, heads, width]).unwrap();
                let list_at = at.tensor(0, i32::DTYPE, &[list.len()]).unwrap();
                match by_array {
                    true => gather_pages_at(&stream, from, list_at, first, to).unwrap(),
                    false => gather_pages(&stream, from, &list, first, to).unwrap(),
                }
                assert_eq!(take::<i32>(&stream, &out, tokens * entry), want);
            }
            // Pages to pages, more than a launch lists.
            let copies: Vec<PageCopy> =
                (0..400).map(|i| PageCopy { from: (i * 7) % 600, to: i, tokens: i % 3 }).collect();
            let mut want = vec![-1i32; 400 * size * entry];
            let to = TensorMut::from_slice(&mut want, &[400, size, heads, width]).unwrap();
            copy_pages(&Stream::cpu(), whole, to, &copies).unwrap();
            let mut out = put(&stream, &vec![-1i32; 400 * size * entry], &[400, size, heads, width]);
            let from = on.tensor(0, i32::DTYPE, &[pages, size, heads, width]).unwrap();
            let to = out.tensor_mut(0, i32::DTYPE, &[400, size, heads, width]).unwrap();
            copy_pages(&stream, from, to, &copies).unwrap();
            assert_eq!(take::<i32>(&stream, &out, 400 * size * entry), want);
        }
    }

    #[test]
    fn synthetic_values_have_the_bits_of_the_cpu() {
        let Some(owned) = stream() else { return };
        let stream = owned.stream();
        fn check<E: Element + Exact + Default + PartialEq + std::fmt::Debug>(stream: &Stream) {
            for (tokens, heads, width) in [(5, 3, 7), (2, 1, 64), (9, 2, 1)] {
                let keys: Vec<u64> = (0..tokens as u64).map(|t| chain(t * 99, t)).collect();
                let mut want = vec![E::default(); tokens * heads * width];
                let mut to = TensorMut::from_slice(&mut want, &[tokens, heads, width]).unwrap();
                fill(3, Kind::Value, 2, &keys, &mut to).unwrap();
                let at = put(stream, bytemuck::cast_slice::<u64, i64>(&keys), &[tokens]);
                let mut out = put(stream, &vec![E::default(); want.len()], &[tokens, heads, width]);
                let at = at.tensor(0, i64::DTYPE, &[tokens]).unwrap();
                let mut to = out.tensor_mut(0, E::DTYPE, &[tokens, heads, width]).unwrap();
                fill_at(stream, 3, Kind::Value, 2, at, &mut to).unwrap();
                assert_eq!(take::<E>(stream, &out, want.len()), want);
            }
        }
        check::<f32>(&stream);
        check::<half::bf16>(&stream);
        check::<half::f16>(&stream);
    }

    #[test]
    fn f02_partial_results_join_as_on_the_cpu_and_empty_ones_are_identities() {
        let Some(owned) = stream() else { return };
        let stream = owned.stream();
        let (tokens, heads, width) = (3, 2, 37);
        for parts in [1usize, 2, 5, 40] {
            let lse = |part: usize, row: usize| match (part + row) % 4 {
                0 => f32::NEG_INFINITY,
                _ => ((part * 7 + row * 3) % 11) as f32 - 5.0,
            };
            let rows = tokens * heads;
            let lses: Vec<Vec<f32>> = (0..parts).map(|p| (0..rows).map(|r| lse(p, r)).collect()).collect();
            let os: Vec<Vec<f32>> = (0..parts)
                .map(|p| {
                    let value = |i: usize| {
                        if lse(p, i / width) == f32::NEG_INFINITY {
                            f32::NAN
                        } else {
                            (i * 13 + p) as f32 % 7.0
                        }
                    };
                    (0..rows * width).map(value).collect()
                })
                .collect();
            let (mut o, mut l) = (vec![0f32; rows * width], vec![0f32; rows]);
            let (o_shape, l_shape) = ([tokens, heads, width], [tokens, heads]);
            let host: Vec<Partial<'_>> = os
                .iter()
                .zip(&lses)
                .map(|(o, lse)| Partial {
                    o: TensorRef::from_slice(o, &o_shape).unwrap(),
                    lse: TensorRef::from_slice(lse, &l_shape).unwrap(),
                })
                .collect();
            let mut want = Merged {
                o: TensorMut::from_slice(&mut o, &o_shape).unwrap(),
                lse: TensorMut::from_slice(&mut l, &l_shape).unwrap(),
            };
            merge_all_natural(&host, &mut want).unwrap();
            let on: Vec<(Buffer, Buffer)> = os
                .iter()
                .zip(&lses)
                .map(|(o, l)| (put(&stream, o, &o_shape), put(&stream, l, &l_shape)))
                .collect();
            let there: Vec<Partial<'_>> = on
                .iter()
                .map(|(o, l)| Partial {
                    o: o.tensor(0, f32::DTYPE, &o_shape).unwrap(),
                    lse: l.tensor(0, f32::DTYPE, &l_shape).unwrap(),
                })
                .collect();
            let close = |got: &[f32], want: &[f32]| {
                for (got, want) in got.iter().zip(want) {
                    assert!(
                        got == want || (got - want).abs() <= 2e-6 * want.abs().max(1.0),
                        "{got} {want} of {parts}"
                    );
                }
            };
            let (mut o_on, mut l_on) = (
                put(&stream, &vec![9f32; rows * width], &o_shape),
                put(&stream, &vec![9f32; rows], &l_shape),
            );
            let mut out = Merged {
                o: o_on.tensor_mut(0, f32::DTYPE, &o_shape).unwrap(),
                lse: l_on.tensor_mut(0, f32::DTYPE, &l_shape).unwrap(),
            };
            merge_all_natural_at(&stream, &there, &mut out).unwrap();
            close(&take(&stream, &o_on, rows * width), &o);
            close(&take(&stream, &l_on, rows), &l);
            // Onto an empty accumulator, one at a time.
            let nothing = vec![f32::NEG_INFINITY; rows];
            let (mut o_on, mut l_on) =
                (put(&stream, &vec![f32::NAN; rows * width], &o_shape), put(&stream, &nothing, &l_shape));
            for part in &there {
                let mut acc = Merged {
                    o: o_on.tensor_mut(0, f32::DTYPE, &o_shape).unwrap(),
                    lse: l_on.tensor_mut(0, f32::DTYPE, &l_shape).unwrap(),
                };
                merge_natural_in_place_at(&stream, &mut acc, part).unwrap();
            }
            close(&take(&stream, &o_on, rows * width), &o);
            close(&take(&stream, &l_on, rows), &l);
        }
    }
}
