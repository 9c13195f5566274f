//! Non-owning tensors: pointer, device, dtype, shape and element strides in one value.
//!
//! A view is checked when it is made, so a view in hand is in bounds. Strides are counted in elements and
//! are never negative; any outer stride is accepted (fused QKV, HND by strides), and a kernel that needs
//! the innermost axis contiguous says so by name. All arithmetic is 64-bit.

use std::fmt;
use std::marker::PhantomData;

use crate::{DType, Device, Element, Error, Result};

/// Axes that a view can have.
pub const MAX_RANK: usize = 6;

/// Up to [`MAX_RANK`] extents or strides, held inline.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    values: [usize; MAX_RANK],
    rank: u8,
}

impl Dims {
    /// The extents of a slice.
    ///
    /// # Panics
    /// When `values` has more than [`MAX_RANK`] entries: a bug of the caller's, not of its data.
    #[track_caller]
    pub fn new(values: &[usize]) -> Dims {
        assert!(values.len() <= MAX_RANK, "a view has at most {MAX_RANK} axes, got {values:?}");
        let mut inline = [0; MAX_RANK];
        inline[..values.len()].copy_from_slice(values);
        Dims { values: inline, rank: values.len() as u8 }
    }

    /// Row-major strides of a contiguous tensor of these extents; `None` when they overflow.
    fn contiguous(self) -> Option<Dims> {
        let mut strides = self;
        let mut step = 1usize;
        for axis in (0..self.len()).rev() {
            strides.values[axis] = step;
            step = step.checked_mul(self.values[axis].max(1))?;
        }
        Some(strides)
    }

    #[track_caller]
    fn insert(self, axis: usize, value: usize) -> Dims {
        let mut values: [usize; MAX_RANK + 1] = [0; MAX_RANK + 1];
        values[..axis].copy_from_slice(&self[..axis]);
        values[axis] = value;
        values[axis + 1..=self.len()].copy_from_slice(&self[axis..]);
        Dims::new(&values[..=self.len()])
    }

    fn remove(self, axis: usize) -> Dims {
        let mut out = self;
        for i in axis..self.len() - 1 {
            out.values[i] = self.values[i + 1];
        }
        out.rank -= 1;
        out
    }
}

impl std::ops::Deref for Dims {
    type Target = [usize];
    fn deref(&self) -> &[usize] {
        &self.values[..self.rank as usize]
    }
}

impl fmt::Debug for Dims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// Elements from the first to one past the last that a view touches; 0 for an empty one.
fn span(shape: &Dims, strides: &Dims) -> Option<usize> {
    if shape.contains(&0) {
        return Some(0);
    }
    let mut last = 0usize;
    for (&extent, &stride) in shape.iter().zip(strides.iter()) {
        last = last.checked_add((extent - 1).checked_mul(stride)?)?;
    }
    last.checked_add(1)
}

/// Everything of a view but its lifetime and mutability.
#[derive(Clone, Copy)]
struct Raw {
    ptr: *mut u8,
    device: Device,
    dtype: DType,
    shape: Dims,
    strides: Dims,
}

impl Raw {
    fn from_parts(
        ptr: *mut u8,
        available: usize,
        dtype: DType,
        shape: &[usize],
        strides: Option<&[usize]>,
    ) -> Result<Raw> {
        let shape = Dims::new(shape);
        let overflow = || Error::Overflow { shape: shape.to_vec() };
        let strides = match strides {
            Some(strides) => Dims::new(strides),
            None => shape.contiguous().ok_or_else(overflow)?,
        };
        if strides.len() != shape.len() {
            return Err(Error::Shape {
                tensor: "strides",
                expected: format!("{} entries", shape.len()),
                got: strides.to_vec(),
            });
        }
        let needed = span(&shape, &strides).ok_or_else(overflow)?;
        needed.checked_mul(dtype.size()).filter(|&b| b <= isize::MAX as usize).ok_or_else(overflow)?;
        if needed > available {
            return Err(Error::OutOfBounds {
                shape: shape.to_vec(),
                strides: strides.to_vec(),
                needed,
                available,
            });
        }
        Ok(Raw { ptr, device: Device::Cpu, dtype, shape, strides })
    }

    fn offset(mut self, elements: usize) -> Raw {
        if !self.shape.contains(&0) {
            self.ptr = self.ptr.wrapping_add(elements * self.dtype.size());
        }
        self
    }

    fn narrow(mut self, axis: usize, start: usize, len: usize) -> Result<Raw> {
        let extent = *self.shape.get(axis).unwrap_or(&0);
        let end = start.checked_add(len).filter(|&end| axis < self.shape.len() && end <= extent);
        let Some(end) = end else {
            return Err(Error::Range { axis, start, end: start.saturating_add(len), extent });
        };
        let step = self.strides[axis];
        self.shape.values[axis] = end - start;
        Ok(self.offset(start * step))
    }

    fn select(self, axis: usize, index: usize) -> Result<Raw> {
        let mut out = self.narrow(axis, index, 1)?;
        out.shape = out.shape.remove(axis);
        out.strides = out.strides.remove(axis);
        Ok(out)
    }

    fn transpose(mut self, a: usize, b: usize) -> Raw {
        self.shape.values.swap(a, b);
        self.strides.values.swap(a, b);
        self
    }

    #[track_caller]
    fn insert_axis(mut self, axis: usize) -> Raw {
        // The stride of an axis of one entry is never multiplied by anything but 0; this one keeps a packed view packed.
        let step = match (self.shape.get(axis), self.strides.get(axis)) {
            (Some(&extent), Some(&stride)) => extent.max(1).saturating_mul(stride),
            _ => 1,
        };
        self.shape = self.shape.insert(axis, 1);
        self.strides = self.strides.insert(axis, step);
        self
    }

    fn inner_contiguous(&self) -> bool {
        match (self.shape.last(), self.strides.last()) {
            (Some(&extent), Some(&stride)) => extent <= 1 || stride == 1,
            _ => true,
        }
    }

    fn is_contiguous(&self) -> bool {
        let Some(packed) = self.shape.contiguous() else { return false };
        self.shape.contains(&0)
            || self.shape.iter().enumerate().all(|(a, &n)| n == 1 || self.strides[a] == packed[a])
    }
}

impl fmt::Debug for Raw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?} strides {:?} on {}", self.dtype, self.shape, self.strides, self.device)
    }
}

/// A tensor that may be read for as long as `'a`.
#[derive(Clone, Copy)]
pub struct TensorRef<'a> {
    raw: Raw,
    lifetime: PhantomData<&'a [u8]>,
}

/// A tensor that may be read and written for as long as `'a`.
pub struct TensorMut<'a> {
    raw: Raw,
    lifetime: PhantomData<&'a mut [u8]>,
}

// SAFETY: a `TensorRef` is a shared borrow of plain data, as `&[T]` with `T: Sync` is.
unsafe impl Send for TensorRef<'_> {}
// SAFETY: as above.
unsafe impl Sync for TensorRef<'_> {}
// SAFETY: a `TensorMut` is a unique borrow of plain data, as `&mut [T]` with `T: Send` is.
unsafe impl Send for TensorMut<'_> {}
// SAFETY: a shared reference to a `TensorMut` only allows reads.
unsafe impl Sync for TensorMut<'_> {}

impl<'a> TensorRef<'a> {
    /// A row-major view of `shape` over a slice.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] when the slice is shorter than the shape, [`Error::Overflow`] when the shape
    /// has no size.
    pub fn from_slice<T: Element>(data: &'a [T], shape: &[usize]) -> Result<TensorRef<'a>> {
        let raw = Raw::from_parts(data.as_ptr() as *mut u8, data.len(), T::DTYPE, shape, None)?;
        Ok(TensorRef { raw, lifetime: PhantomData })
    }

    /// A view of `shape` over a slice with the given strides, in elements.
    ///
    /// # Errors
    /// As [`TensorRef::from_slice`].
    pub fn from_slice_strided<T: Element>(
        data: &'a [T],
        shape: &[usize],
        strides: &[usize],
    ) -> Result<TensorRef<'a>> {
        let raw = Raw::from_parts(data.as_ptr() as *mut u8, data.len(), T::DTYPE, shape, Some(strides))?;
        Ok(TensorRef { raw, lifetime: PhantomData })
    }

    /// A view of memory that Rust does not know: a foreign pool, a mapped file, device memory.
    ///
    /// # Errors
    /// [`Error::Overflow`] when shape times strides overflows.
    ///
    /// # Safety
    /// `ptr` is on `device`, aligned for `dtype`, and readable for every element that `shape` and `strides`
    /// (in elements) reach, for as long as `'a`; nobody writes there meanwhile, other than in stream order.
    pub unsafe fn from_raw_parts(
        ptr: *const u8,
        device: Device,
        dtype: DType,
        shape: &[usize],
        strides: &[usize],
    ) -> Result<TensorRef<'a>> {
        let mut raw = Raw::from_parts(ptr.cast_mut(), usize::MAX, dtype, shape, Some(strides))?;
        raw.device = device;
        Ok(TensorRef { raw, lifetime: PhantomData })
    }

    /// The elements, when the view is contiguous, on the CPU and of type `T`.
    pub fn as_slice<T: Element>(&self) -> Option<&'a [T]> {
        if self.raw.device != Device::Cpu || self.raw.dtype != T::DTYPE || !self.raw.is_contiguous() {
            return None;
        }
        if self.numel() == 0 {
            return Some(&[]);
        }
        // SAFETY: the view was made over at least `numel` readable elements of this type (checked in
        // `from_parts`, or promised to `from_raw_parts`), borrowed for `'a`.
        Some(unsafe { std::slice::from_raw_parts(self.raw.ptr.cast(), self.numel()) })
    }
}

impl<'a> TensorMut<'a> {
    /// A row-major view of `shape` over a slice.
    ///
    /// # Errors
    /// As [`TensorRef::from_slice`].
    pub fn from_slice<T: Element>(data: &'a mut [T], shape: &[usize]) -> Result<TensorMut<'a>> {
        let raw = Raw::from_parts(data.as_mut_ptr().cast(), data.len(), T::DTYPE, shape, None)?;
        Ok(TensorMut { raw, lifetime: PhantomData })
    }

    /// A view of `shape` over a slice with the given strides, in elements. Elements may not overlap.
    ///
    /// # Errors
    /// As [`TensorRef::from_slice`].
    pub fn from_slice_strided<T: Element>(
        data: &'a mut [T],
        shape: &[usize],
        strides: &[usize],
    ) -> Result<TensorMut<'a>> {
        let raw = Raw::from_parts(data.as_mut_ptr().cast(), data.len(), T::DTYPE, shape, Some(strides))?;
        Ok(TensorMut { raw, lifetime: PhantomData })
    }

    /// A view of memory that Rust does not know.
    ///
    /// # Errors
    /// [`Error::Overflow`] when shape times strides overflows.
    ///
    /// # Safety
    /// As [`TensorRef::from_raw_parts`], and the memory is writable, its elements do not overlap, and nobody
    /// else reads or writes it for as long as `'a`, other than in stream order.
    pub unsafe fn from_raw_parts(
        ptr: *mut u8,
        device: Device,
        dtype: DType,
        shape: &[usize],
        strides: &[usize],
    ) -> Result<TensorMut<'a>> {
        let mut raw = Raw::from_parts(ptr, usize::MAX, dtype, shape, Some(strides))?;
        raw.device = device;
        Ok(TensorMut { raw, lifetime: PhantomData })
    }

    /// The same tensor, read-only, for as long as `self` is borrowed.
    pub fn as_ref(&self) -> TensorRef<'_> {
        TensorRef { raw: self.raw, lifetime: PhantomData }
    }

    /// The same tensor for a shorter time.
    pub fn reborrow(&mut self) -> TensorMut<'_> {
        TensorMut { raw: self.raw, lifetime: PhantomData }
    }

    /// The elements, when the view is contiguous, on the CPU and of type `T`.
    pub fn as_mut_slice<T: Element>(&mut self) -> Option<&mut [T]> {
        if self.raw.device != Device::Cpu || self.raw.dtype != T::DTYPE || !self.raw.is_contiguous() {
            return None;
        }
        if self.numel() == 0 {
            return Some(&mut []);
        }
        // SAFETY: as in `TensorRef::as_slice`; the borrow is unique.
        Some(unsafe { std::slice::from_raw_parts_mut(self.raw.ptr.cast(), self.numel()) })
    }

    /// Pointer to the first element.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.raw.ptr
    }
}

macro_rules! shared {
    ($view:ident) => {
        impl<'a> $view<'a> {
            /// Extents, outermost first.
            pub fn shape(&self) -> &[usize] {
                &self.raw.shape
            }

            /// Strides in elements, outermost first.
            pub fn strides(&self) -> &[usize] {
                &self.raw.strides
            }

            /// The element type.
            pub fn dtype(&self) -> DType {
                self.raw.dtype
            }

            /// Where the memory lives.
            pub fn device(&self) -> Device {
                self.raw.device
            }

            /// Number of axes.
            pub fn rank(&self) -> usize {
                self.raw.shape.len()
            }

            /// Number of elements.
            pub fn numel(&self) -> usize {
                self.raw.shape.iter().product()
            }

            /// Pointer to the first element.
            pub fn as_ptr(&self) -> *const u8 {
                self.raw.ptr
            }

            /// Whether neighbours along the last axis are neighbours in memory.
            pub fn inner_contiguous(&self) -> bool {
                self.raw.inner_contiguous()
            }

            /// Whether the view is packed in row-major order.
            pub fn is_contiguous(&self) -> bool {
                self.raw.is_contiguous()
            }

            /// Entries `start..start + len` of an axis.
            ///
            /// # Errors
            /// [`Error::Range`] when that is outside the axis.
            pub fn narrow(self, axis: usize, start: usize, len: usize) -> Result<$view<'a>> {
                Ok($view { raw: self.raw.narrow(axis, start, len)?, lifetime: PhantomData })
            }

            /// One entry of an axis, which is dropped.
            ///
            /// # Errors
            /// [`Error::Range`] when it is outside the axis.
            pub fn select(self, axis: usize, index: usize) -> Result<$view<'a>> {
                Ok($view { raw: self.raw.select(axis, index)?, lifetime: PhantomData })
            }

            /// The view with two axes swapped.
            ///
            /// # Panics
            /// When the view has no such axis.
            #[track_caller]
            pub fn transpose(self, a: usize, b: usize) -> $view<'a> {
                assert!(a < self.rank() && b < self.rank(), "transpose({a}, {b}) of {:?}", self.raw);
                $view { raw: self.raw.transpose(a, b), lifetime: PhantomData }
            }

            /// The view with one more axis, of extent 1, before `axis`.
            ///
            /// # Panics
            /// When the view has fewer axes than that, or [`MAX_RANK`] already.
            #[track_caller]
            pub fn insert_axis(self, axis: usize) -> $view<'a> {
                assert!(axis <= self.rank(), "insert_axis({axis}) of {:?}", self.raw);
                $view { raw: self.raw.insert_axis(axis), lifetime: PhantomData }
            }

            /// The same bytes as e4m3 codes: a pool of u8 that somebody else quantised, or will have quantised.
            ///
            /// # Errors
            /// [`Error::DTypeMismatch`] when the view is neither of u8 nor of codes.
            pub fn as_codes(self) -> Result<$view<'a>> {
                if !matches!(self.raw.dtype, DType::U8 | DType::E4m3) {
                    let expected = "u8 or fp8_e4m3".into();
                    return Err(Error::DTypeMismatch { tensor: "codes", expected, got: self.raw.dtype });
                }
                let raw = Raw { dtype: DType::E4m3, ..self.raw };
                Ok($view { raw, lifetime: PhantomData })
            }

            /// Refuses another rank, another extent (`None` fits any), dtype or device, or a strided
            /// innermost axis. `tensor` and `letters` name it in the message.
            ///
            /// # Errors
            /// The mismatch, with what was expected.
            pub fn expect(
                &self,
                tensor: &'static str,
                letters: &str,
                extents: &[Option<usize>],
                dtype: Option<DType>,
                device: Device,
            ) -> Result<()> {
                let fits = self.rank() == extents.len()
                    && self
                        .shape()
                        .iter()
                        .zip(extents)
                        .all(|(&got, want)| want.is_none_or(|want| want == got));
                if !fits {
                    let numbers: Vec<String> =
                        extents.iter().map(|e| e.map_or("_".into(), |e| e.to_string())).collect();
                    let expected = format!("{letters} = [{}]", numbers.join(", "));
                    return Err(Error::Shape { tensor, expected, got: self.shape().to_vec() });
                }
                if let Some(expected) = dtype.filter(|&dtype| dtype != self.dtype()) {
                    return Err(Error::DTypeMismatch {
                        tensor,
                        expected: expected.to_string(),
                        got: self.dtype(),
                    });
                }
                if self.device() != device {
                    return Err(Error::DeviceMismatch { tensor, expected: device, got: self.device() });
                }
                if !self.inner_contiguous() {
                    let (shape, strides) = (self.shape().to_vec(), self.strides().to_vec());
                    return Err(Error::Layout { tensor, shape, strides });
                }
                Ok(())
            }
        }

        impl fmt::Debug for $view<'_> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{} {:?}", stringify!($view), self.raw)
            }
        }
    };
}
shared!(TensorRef);
shared!(TensorMut);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrow_select_and_transpose_address_the_same_elements() {
        let data: Vec<i32> = (0..24).collect();
        let view = TensorRef::from_slice(&data, &[2, 3, 4]).unwrap();
        let row = view.select(0, 1).unwrap().select(0, 2).unwrap();
        assert_eq!(row.as_slice::<i32>().unwrap(), &[20, 21, 22, 23]);
        let tail = view.narrow(2, 3, 1).unwrap();
        assert!(!tail.is_contiguous() && tail.inner_contiguous());
        assert!(!view.transpose(0, 2).inner_contiguous());
        let batch = view.select(0, 1).unwrap().transpose(0, 1).insert_axis(0).insert_axis(3);
        assert_eq!((batch.shape(), batch.numel()), (&[1, 4, 3, 1][..], 12));
        let element = batch.select(1, 3).unwrap().select(1, 2).unwrap().select(1, 0).unwrap();
        assert_eq!(element.as_slice::<i32>().unwrap(), &[23]);
        assert!(view.as_slice::<f32>().is_none());
    }

    #[test]
    fn a_view_in_hand_is_in_bounds() {
        let data = [0f32; 10];
        assert!(matches!(TensorRef::from_slice(&data, &[11]), Err(Error::OutOfBounds { needed: 11, .. })));
        assert!(TensorRef::from_slice_strided(&data, &[2, 5], &[6, 1]).is_err());
        assert!(TensorRef::from_slice_strided(&data, &[2, 4], &[6, 1]).is_ok());
        assert!(matches!(TensorRef::from_slice(&data, &[usize::MAX, 2]), Err(Error::Overflow { .. })));
        let view = TensorRef::from_slice(&data, &[10]).unwrap();
        assert!(matches!(view.narrow(0, usize::MAX, 2), Err(Error::Range { .. })));
        assert!(matches!(view.narrow(1, 0, 0), Err(Error::Range { .. })));
    }

    #[test]
    fn empty_views_are_legal_everywhere() {
        let view = TensorRef::from_slice::<f32>(&[], &[0, 4]).unwrap();
        assert_eq!(view.numel(), 0);
        assert_eq!(view.as_slice::<f32>(), Some(&[][..]));
        assert_eq!(view.narrow(0, 0, 0).unwrap().shape(), &[0, 4]);
    }

    #[test]
    fn expectations_name_the_tensor_and_both_shapes() {
        let data = [0f32; 12];
        let view = TensorRef::from_slice(&data, &[3, 4]).unwrap();
        let said = view.expect("q", "[T, D]", &[None, Some(8)], None, Device::Cpu).unwrap_err().to_string();
        assert_eq!(said, "q: expected shape [T, D] = [_, 8], got [3, 4]");
        let said = view.expect("q", "[T, D]", &[None, None], Some(DType::Bf16), Device::Cpu).unwrap_err();
        assert_eq!(said.to_string(), "q: expected dtype bf16, got f32");
    }
}
