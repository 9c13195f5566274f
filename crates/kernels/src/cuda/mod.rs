//! CUDA: the driver, opened by name when it is asked for. No kernel is built for it in this version.

mod driver;
pub mod jit;

pub use driver::driver;
