//! The machine that the program runs on: its processors and its memory.

use std::fs;

use mstar_kernels::cpu::Isa;

/// What there is.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    /// The processor's name; empty where it is not told.
    pub cpu: String,
    /// The instruction set that kernels will use.
    pub isa: Isa,
    /// Threads of the pool that kernels run in.
    pub threads: usize,
    /// Bytes of memory; `None` where it is not told.
    pub memory_total: Option<u64>,
    /// Bytes that could be taken now without swapping, under the limit of the process's control group too.
    pub memory_available: Option<u64>,
}

impl Machine {
    /// Looks.
    pub(crate) fn probe() -> Machine {
        let read = |path: &str| fs::read_to_string(path).ok();
        let info = read("/proc/meminfo").unwrap_or_default();
        let limit = read("/sys/fs/cgroup/memory.max").and_then(|text| text.trim().parse::<u64>().ok());
        let used = read("/sys/fs/cgroup/memory.current").and_then(|text| text.trim().parse::<u64>().ok());
        let room = limit.map(|limit| limit.saturating_sub(used.unwrap_or(0)));
        let least = |a: Option<u64>, b: Option<u64>| a.into_iter().chain(b).min();
        Machine {
            cpu: read("/proc/cpuinfo").as_deref().and_then(cpu_name).unwrap_or_default(),
            isa: Isa::current(),
            threads: rayon::current_num_threads(),
            memory_total: least(meminfo(&info, "MemTotal"), limit),
            memory_available: least(meminfo(&info, "MemAvailable"), room),
        }
    }
}

/// Bytes of one line of `/proc/meminfo`, which counts in kB.
fn meminfo(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn cpu_name(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_files_are_read() {
        let text = "MemTotal:       24636424 kB\nMemFree: 1 kB\nMemAvailable:   23636424 kB\n";
        assert_eq!(meminfo(text, "MemTotal"), Some(24_636_424 * 1024));
        assert_eq!(meminfo(text, "Mem"), None);
        assert_eq!(meminfo("MemTotal: 99999999999999999999 kB", "MemTotal"), None);
        assert_eq!(cpu_name("processor: 0\nmodel name\t: AMD EPYC\n").as_deref(), Some("AMD EPYC"));
        assert_eq!(cpu_name(""), None);
    }
}
