//! What a compiled kernel takes of a multiprocessor, read from the compiler's log.

/// Resources of one kernel, as `ptxas -v` tells them; the most of any function, where a kernel calls some that were not inlined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// 32-bit registers a thread at the entry; 0 when the compiler did not say what the kernel takes.
    pub registers: u32,
    /// Bytes a thread stores to spilled registers.
    pub spill_stores: u32,
    /// Bytes a thread loads from spilled registers.
    pub spill_loads: u32,
    /// Bytes of local memory a thread: spills, and arrays that are indexed at run time.
    pub stack: u32,
    /// Bytes of static shared memory a block. Dynamic shared memory is chosen at launch.
    pub shared: u32,
    /// Warnings C75xx: matrix instructions made to wait for each other, or register hints ignored.
    pub serialised: u32,
}

impl Resources {
    /// Whether the kernel is known to leave local memory alone and to have no matrix instructions serialised: what a shipped kernel
    /// may not do without a reason.
    pub fn is_clean(&self) -> bool {
        let Resources { registers, spill_stores, spill_loads, stack, shared: _, serialised } = *self;
        registers > 0 && spill_stores == 0 && spill_loads == 0 && stack == 0 && serialised == 0
    }

    /// Reads what a log says of one kernel; `None` when it says nothing of its registers.
    pub fn parse(log: &str, entry: &str) -> Option<Resources> {
        let quoted = format!("'{entry}'");
        let mut all = Resources::default();
        let (mut told, mut ours) = (false, false);
        for line in log.lines() {
            if line.contains("(C75") {
                // A warning stands before the kernels' own lines, and mostly names the function.
                all.serialised += u32::from(line.contains(&quoted) || !line.contains('\''));
            }
            if line.contains("Compiling entry function '") {
                ours = line.contains(&quoted);
            }
            if !ours {
                continue;
            }
            if let Some(registers) = before(line, " registers") {
                told = true;
                all.registers = all.registers.max(registers);
                all.stack = all.stack.max(before(line, " bytes cumulative stack size").unwrap_or(0));
                all.shared = all.shared.max(before(line, " bytes smem").unwrap_or(0));
            }
            if let Some(stack) = before(line, " bytes stack frame") {
                all.stack = all.stack.max(stack);
                all.spill_stores = all.spill_stores.max(before(line, " bytes spill stores").unwrap_or(0));
                all.spill_loads = all.spill_loads.max(before(line, " bytes spill loads").unwrap_or(0));
            }
        }
        told.then_some(all)
    }
}

/// The number that stands right before `words`.
fn before(line: &str, words: &str) -> Option<u32> {
    let text = &line[..line.find(words)?];
    let digits = text.rfind(|c: char| !c.is_ascii_digit()).map_or(0, |at| at + 1);
    text[digits..].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_is_read_and_not_its_neighbour() {
        let log = "ptxas info    : 0 bytes gmem\n\
            ptxas info    : Compiling entry function 'k2' for 'sm_90a'\n\
            ptxas info    : Function properties for k2\n\
            ptxas         .     800 bytes stack frame, 16 bytes spill stores, 8 bytes spill loads\n\
            ptxas info    : Used 255 registers, used 1 barriers, 800 bytes cumulative stack size\n\
            ptxas info    : Compiling entry function 'k' for 'sm_90a'\n\
            ptxas info    : Function properties for k\n\
            ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
            ptxas info    : Used 12 registers, used 1 barriers, 128 bytes smem, 364 bytes cmem[0]\n\
            ptxas info    : Compile time = 2.430 ms\n";
        let read = Resources::parse(log, "k").unwrap();
        assert_eq!(read, Resources { registers: 12, shared: 128, ..Resources::default() });
        assert!(read.is_clean());
    }

    #[test]
    fn spills_stacks_and_serialised_matrix_instructions_are_seen_in_any_function() {
        let log = "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to \
            insufficient register resources for the wgmma pipeline in function 'k'\n\
            ptxas info    : (C7512) Potential Performance Loss: the same in function 'other'\n\
            ptxas info    : Compiling entry function 'k' for 'sm_90a'\n\
            ptxas info    : Function properties for helper\n    \
            0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
            ptxas info    : Function properties for k\n    \
            96 bytes stack frame, 64 bytes spill stores, 72 bytes spill loads\n\
            ptxas info    : Used 168 registers, used 3 barriers, 800 bytes cumulative stack size\n";
        let read = Resources::parse(log, "k").unwrap();
        let expected = Resources {
            registers: 168,
            spill_stores: 64,
            spill_loads: 72,
            stack: 800,
            shared: 0,
            serialised: 1,
        };
        assert_eq!(read, expected);
        assert!(!read.is_clean());
        assert!(!Resources { stack: 8, ..Resources::default() }.is_clean());
        assert!(!Resources { serialised: 1, ..Resources::default() }.is_clean());
    }

    #[test]
    fn a_log_without_resources_is_not_taken_for_a_clean_one() {
        assert_eq!(Resources::parse("", "k"), None);
        assert_eq!(
            Resources::parse(
                "a.cu(3): warning #177-D: variable \"x\" was declared but never referenced",
                "k"
            ),
            None
        );
    }
}
