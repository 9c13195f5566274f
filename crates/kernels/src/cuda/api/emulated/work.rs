//! What is put into a stream of the emulated device.

use std::ffi::c_void;
use std::sync::Arc;

use super::super::{Called, Failed, Handle, Launch, Way};

/// A kernel in a shared object: grid along x, y and z, threads of a block, bytes of shared memory, the one parameter.
/// Anything but 0 says that it went wrong.
pub(super) type Entry = unsafe extern "C" fn(u32, u32, u32, u32, u32, *const c_void) -> i32;

const LAUNCH_FAILED: i32 = 719;

/// A loaded kernel.
#[derive(Clone, Copy)]
pub(super) struct Kernel {
    pub(super) entry: Entry,
    /// Bytes of shared memory that it may have.
    pub(super) shared: u32,
    /// Blocks of a cluster.
    pub(super) cluster: u32,
}

/// Parameters up to this size are held inline, so that a launch allocates nothing.
const INLINE: usize = 512;

/// A kernel's parameter, copied at the launch.
#[expect(clippy::large_enum_variant, reason = "held inline on purpose: a launch allocates nothing")]
pub(super) enum Params {
    Inline(Aligned<INLINE>),
    Large(Vec<Aligned<64>>),
}

/// Bytes aligned as strictly as a parameter may be.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Aligned<const N: usize>([u8; N]);

impl Params {
    /// # Safety
    /// `bytes` bytes can be read at `params`.
    pub(super) unsafe fn copy(params: *const u8, bytes: usize) -> Params {
        if bytes <= INLINE {
            let mut inline = Aligned([0; INLINE]);
            // SAFETY: the caller's, and they fit.
            unsafe { std::ptr::copy_nonoverlapping(params, inline.0.as_mut_ptr(), bytes) };
            return Params::Inline(inline);
        }
        let mut large = vec![Aligned([0; 64]); bytes.div_ceil(64)];
        // SAFETY: the caller's, and they fit.
        unsafe { std::ptr::copy_nonoverlapping(params, large.as_mut_ptr().cast(), bytes) };
        Params::Large(large)
    }

    fn as_ptr(&self) -> *const c_void {
        match self {
            Params::Inline(inline) => inline.0.as_ptr().cast(),
            Params::Large(large) => large.as_ptr().cast(),
        }
    }
}

/// One piece of work.
#[expect(clippy::large_enum_variant, reason = "most work is launches, and none of it allocates")]
pub(super) enum Work {
    Launch {
        entry: Entry,
        launch: Launch,
        params: Params,
    },
    Copy {
        way: Way,
        src: usize,
        dst: usize,
        bytes: usize,
    },
    Fill {
        dst: usize,
        value: u8,
        bytes: usize,
    },
    Call {
        call: unsafe extern "C" fn(*mut c_void),
        data: Handle,
    },
    Record {
        event: Handle,
    },
    /// Holds a stream until the record of this number has run.
    Wait {
        mark: u64,
    },
    /// Memory of the pool given back.
    Free {
        at: usize,
    },
    Graph(Arc<Vec<Work>>),
}

impl Work {
    /// Runs what touches memory; events, graphs and the pool are the device's.
    ///
    /// # Safety
    /// What was promised when it was put in still holds.
    pub(super) unsafe fn run(&self) -> Called<()> {
        match self {
            Work::Launch { entry, launch, params } => {
                let [x, y, z] = launch.grid;
                // SAFETY: the caller's; the parameter lives until the call returns.
                let code = unsafe { entry(x, y, z, launch.block, launch.shared, params.as_ptr()) };
                if code != 0 {
                    return Err(Failed { call: "cuLaunchKernel", code: LAUNCH_FAILED });
                }
            }
            // Memory of one device may overlap itself, as `memmove` allows.
            // SAFETY: the caller's; the device's side was checked when it was put in.
            Work::Copy { src, dst, bytes, .. } => unsafe {
                std::ptr::copy(*src as *const u8, *dst as *mut u8, *bytes);
            },
            // SAFETY: the caller's; the range was checked when it was put in.
            Work::Fill { dst, value, bytes } => unsafe { (*dst as *mut u8).write_bytes(*value, *bytes) },
            // SAFETY: the caller's.
            Work::Call { call, data } => unsafe { call(data.0) },
            Work::Record { .. } | Work::Wait { .. } | Work::Free { .. } | Work::Graph(_) => {}
        }
        Ok(())
    }
}
