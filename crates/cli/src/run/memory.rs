//! What memory a run took: bytes of our own buffers, and what the system says is resident.

use mstar_kernels::buffer;

/// Memory of this process, watched over a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Memory {
    /// The most that live buffers held, in bytes.
    pub(crate) allocated: usize,
    /// The most that was resident when looked at, in bytes; `None` where the system does not say.
    pub(crate) resident: Option<usize>,
}

impl Memory {
    /// Looks now, and keeps the most of both.
    pub(crate) fn look(&mut self) {
        let status = std::fs::read_to_string("/proc/self/status").ok();
        self.allocated = self.allocated.max(buffer::peak_allocated_bytes());
        self.resident = self.resident.max(status.as_deref().and_then(resident));
    }
}

/// `VmRSS` of `/proc/self/status`, in bytes.
fn resident(status: &str) -> Option<usize> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resident_memory_is_read_in_bytes() {
        assert_eq!(resident("Name:\tmstar\nVmHWM:\t 9 kB\nVmRSS:\t    1234 kB\n"), Some(1234 * 1024));
        assert_eq!(resident("VmRSS:\t many kB\n"), None);
        assert_eq!(resident(""), None);
    }
}
