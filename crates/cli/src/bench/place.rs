//! Where cases run: a device, a stream, and memory there.

use half::bf16;
use mstar_kernels::cuda::OwnedStream;
use mstar_kernels::{Buffer, DType, Device, Stream, copy};

/// Numbers that are made on the host; a longer tensor on a device repeats them.
const PATTERN: usize = 1 << 24;

/// A device with a stream of its own.
pub(super) struct Place {
    queue: OwnedStream,
}

impl Place {
    /// The device, if it is there.
    pub(super) fn on(device: Device) -> anyhow::Result<Place> {
        Ok(Place { queue: OwnedStream::new(device)? })
    }

    pub(super) fn stream(&self) -> Stream {
        self.queue.stream()
    }

    pub(super) fn device(&self) -> Device {
        self.stream().device()
    }

    pub(super) fn is_cpu(&self) -> bool {
        self.device() == Device::Cpu
    }

    /// Room for a tensor.
    pub(super) fn room(&self, dtype: DType, shape: &[usize]) -> anyhow::Result<Buffer> {
        Ok(Buffer::for_tensor_on(self.device(), dtype, shape)?)
    }

    /// Scratch.
    #[allow(dead_code, reason = "not every backend's cases have any on the CPU")]
    pub(super) fn scratch(&self, bytes: usize) -> anyhow::Result<Buffer> {
        Ok(Buffer::zeroed_on(self.device(), bytes)?)
    }

    /// Numbers in -1..1.
    pub(super) fn filled(&self, dtype: DType, len: usize) -> anyhow::Result<Buffer> {
        if self.is_cpu() {
            return numbers(dtype, len);
        }
        self.repeated(&numbers(dtype, len.min(PATTERN))?, dtype, len)
    }

    /// What the host made.
    pub(super) fn moved(&self, host: Buffer) -> anyhow::Result<Buffer> {
        let len = host.len();
        self.tiled(host, len)
    }

    /// `len` bytes, those that the host made over and over.
    pub(super) fn tiled(&self, host: Buffer, len: usize) -> anyhow::Result<Buffer> {
        if self.is_cpu() && len == host.len() {
            return Ok(host);
        }
        self.repeated(&host, DType::U8, len)
    }

    /// `len` elements, those of `host` over and over.
    fn repeated(&self, host: &Buffer, dtype: DType, len: usize) -> anyhow::Result<Buffer> {
        let stream = self.stream();
        let some = host.len() / dtype.size();
        let mut pattern = self.room(dtype, &[some])?;
        copy(&stream, host.tensor(0, dtype, &[some])?, pattern.tensor_mut(0, dtype, &[some])?)?;
        if some == len {
            return Ok(pattern);
        }
        let mut buffer = self.room(dtype, &[len])?;
        for start in (0..len).step_by(some.max(1)) {
            let run = some.min(len - start);
            let to = buffer.tensor_mut(start * dtype.size(), dtype, &[run])?;
            copy(&stream, pattern.tensor(0, dtype, &[run])?, to)?;
        }
        Ok(buffer)
    }
}

/// Numbers in -1..1 on the host.
fn numbers(dtype: DType, len: usize) -> anyhow::Result<Buffer> {
    let mut buffer = Buffer::for_tensor(dtype, &[len])?;
    let number = |i: usize| ((i as u32).wrapping_mul(2_654_435_761) >> 16) as f32 / 32_768.0 - 1.0;
    let mut view = buffer.tensor_mut(0, dtype, &[len])?;
    if let Some(numbers) = view.as_mut_slice::<f32>() {
        numbers.iter_mut().enumerate().for_each(|(i, x)| *x = number(i));
    } else if let Some(numbers) = view.as_mut_slice::<bf16>() {
        numbers.iter_mut().enumerate().for_each(|(i, x)| *x = bf16::from_f32(number(i)));
    }
    Ok(buffer)
}
