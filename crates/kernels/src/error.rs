//! What can be wrong with a call into this crate.

use crate::{DType, Device};

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// A call that was refused before any kernel ran. Nothing was written.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor has another number of axes, or another extent, than the operation needs.
    #[error("{tensor}: expected shape {expected}, got {got:?}")]
    Shape {
        /// The tensor's name in the operation's documentation.
        tensor: &'static str,
        /// The shape that was expected, in the operation's letters or numbers.
        expected: String,
        /// The shape that came.
        got: Vec<usize>,
    },
    /// A tensor has an element type that the operation does not take.
    #[error("{tensor}: expected dtype {expected}, got {got}")]
    DTypeMismatch {
        /// The tensor's name.
        tensor: &'static str,
        /// What was expected.
        expected: String,
        /// What came.
        got: DType,
    },
    /// A tensor lives on another device than the stream or its neighbours.
    #[error("{tensor}: expected on {expected}, got {got}; copy it there first")]
    DeviceMismatch {
        /// The tensor's name.
        tensor: &'static str,
        /// Where it should be.
        expected: Device,
        /// Where it is.
        got: Device,
    },
    /// A memory layout that no kernel takes.
    #[error("{tensor}: strides {strides:?} of shape {shape:?}: the innermost axis must be contiguous")]
    Layout {
        /// The tensor's name.
        tensor: &'static str,
        /// Its shape.
        shape: Vec<usize>,
        /// Its strides, in elements.
        strides: Vec<usize>,
    },
    /// A view reaches past the end of the memory it was made from.
    #[error(
        "a view of shape {shape:?} and strides {strides:?} needs {needed} elements, the slice has {available}"
    )]
    OutOfBounds {
        /// The view's shape.
        shape: Vec<usize>,
        /// Its strides, in elements.
        strides: Vec<usize>,
        /// Elements that it spans.
        needed: usize,
        /// Elements that there are.
        available: usize,
    },
    /// The extents or strides of a view overflow when multiplied.
    #[error("a view of shape {shape:?} overflows the address space")]
    Overflow {
        /// The view's shape.
        shape: Vec<usize>,
    },
    /// An index axis or range is outside a view.
    #[error("axis {axis}: {start}..{end} is outside extent {extent}")]
    Range {
        /// The axis.
        axis: usize,
        /// First index asked for.
        start: usize,
        /// One past the last index asked for.
        end: usize,
        /// The axis's extent.
        extent: usize,
    },
    /// A numeric parameter is outside what the operation allows.
    #[error("{name}: {why}, got {got}")]
    Parameter {
        /// The parameter's name.
        name: &'static str,
        /// What is wrong, and what would be right.
        why: String,
        /// The value.
        got: String,
    },
    /// An entry of an index array is outside what it may name.
    #[error("{array}[{index}] = {got}: {why}")]
    Index {
        /// The array's name, such as `kv_indices`.
        array: &'static str,
        /// Where in the array.
        index: usize,
        /// The entry.
        got: i64,
        /// What it may be.
        why: String,
    },
    /// A workspace is smaller than the plan needs.
    #[error("workspace: the plan needs {needed} bytes, {available} are there")]
    Workspace {
        /// Bytes needed.
        needed: usize,
        /// Bytes available.
        available: usize,
    },
    /// A batch is larger than its plan was made to hold.
    #[error("{what}: the plan was made for at most {capacity}, the batch has {got}; use a larger bucket")]
    Capacity {
        /// What there is too much of: rows, tokens or pages.
        what: &'static str,
        /// The most that fits.
        capacity: usize,
        /// What came.
        got: usize,
    },
    /// Memory could not be had.
    #[error(
        "cannot allocate {bytes} bytes{} on {device}{}",
        if what.is_empty() { String::new() } else { format!(" for {what}") },
        match free {
            Some((free, total)) => {
                format!(", which has {free} of {total} free; make a cache, a plan or a batch smaller")
            }
            None => String::new(),
        }
    )]
    OutOfMemory {
        /// Bytes asked for.
        bytes: usize,
        /// What for; empty where nobody said.
        what: String,
        /// Where.
        device: Device,
        /// Bytes that were free then, and of how many, where the device tells.
        free: Option<(usize, usize)>,
    },
    /// A device that this process cannot use.
    #[error("{device} cannot be used: {why}")]
    NoDevice {
        /// The device.
        device: Device,
        /// Why, and what would help.
        why: String,
    },
    /// A call of the CUDA driver failed.
    #[error("{device}: {call} failed with code {code} ({}); {}", crate::cards::code_name(*code), crate::cards::cure(*code))]
    Cuda {
        /// The device.
        device: Device,
        /// The driver's function. A kernel's own fault is reported by a later call, whichever comes first.
        call: &'static str,
        /// Its `CUresult`.
        code: i32,
    },
    /// A kernel could not be compiled or loaded.
    #[error("kernel {kernel}: {why}")]
    Kernel {
        /// The kernel's file, name, defines and architecture.
        kernel: String,
        /// Why: the compiler's log, or where a compiler was looked for and how to get one.
        why: String,
    },
    /// No kernel was compiled in, or exists, for this device or shape.
    #[error("{operation} is not supported on {device}: {why}")]
    Unsupported {
        /// The operation.
        operation: &'static str,
        /// The device.
        device: Device,
        /// Why, and what would help.
        why: String,
    },
}

impl Error {
    /// This, with what memory was wanted for: `a workspace of main`. Other errors, and one that says already, stay as they are.
    #[must_use]
    pub fn wanted_for(mut self, wanted: impl std::fmt::Display) -> Error {
        if let Error::OutOfMemory { what, .. } = &mut self
            && what.is_empty()
        {
            *what = wanted.to_string();
        }
        self
    }
}
