//! What memory a run took: bytes of our own buffers, and what the system says is resident.

use mstar_kernels::buffer;

/// Memory of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Memory {
    /// The most that live buffers held, in bytes.
    pub(crate) allocated_peak: usize,
    /// The most that was resident, in bytes; `None` where the system does not say.
    pub(crate) resident_peak: Option<usize>,
}

impl Memory {
    /// As of now.
    pub(crate) fn now() -> Memory {
        let status = std::fs::read_to_string("/proc/self/status").ok();
        Memory {
            allocated_peak: buffer::peak_allocated_bytes(),
            resident_peak: status.as_deref().and_then(high_water),
        }
    }
}

/// `VmHWM` of `/proc/self/status`, in bytes.
fn high_water(status: &str) -> Option<usize> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_high_water_mark_is_read_in_bytes() {
        assert_eq!(high_water("Name:\tmstar\nVmHWM:\t    1234 kB\nVmRSS:\t 1 kB\n"), Some(1234 * 1024));
        assert_eq!(high_water("VmHWM:\t many kB\n"), None);
        assert_eq!(high_water(""), None);
    }
}
