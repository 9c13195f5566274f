//! Modules, kernels and their launch.

use bytemuck::Pod;

use super::Context;
use super::api::{FunctionAttributes, Handle, Image, Launch};
use crate::{Device, Error, Result, Stream};

/// Loaded code of a device. It stays loaded for as long as the process lives, so that a [`Function`] is always good.
#[derive(Clone, Copy, Debug)]
pub struct Module {
    context: &'static Context,
    raw: Handle,
}

impl Module {
    /// Loads code.
    ///
    /// # Errors
    /// [`Error::Cuda`]: no image, or one for another device; [`Error::NoDevice`].
    ///
    /// # Safety
    /// The image holds what the caller means to run: loading a shared object runs its initialisers, and the functions of
    /// either kind do what they do.
    pub unsafe fn load(device: Device, image: Image<'_>) -> Result<Module> {
        let context = Context::of(device)?;
        // SAFETY: the caller's.
        let raw = context.ask(|api, own| unsafe { api.load_module(own, image) })?;
        Ok(Module { context, raw })
    }

    /// A kernel of it, which may have up to `shared` bytes of dynamic shared memory a block.
    ///
    /// # Errors
    /// [`Error::Cuda`]: there is no such kernel, or the device has less shared memory.
    pub fn function(&self, name: &str, shared: u32) -> Result<Function> {
        let module = self.raw;
        // SAFETY: the module is loaded for good.
        let raw = self.context.ask(|api, own| unsafe { api.function(own, module, name, shared) })?;
        Ok(Function { context: self.context, raw })
    }
}

/// A kernel of a loaded [`Module`].
#[derive(Clone, Copy, Debug)]
pub struct Function {
    context: &'static Context,
    raw: Handle,
}

impl Function {
    /// The device that it was loaded for.
    pub fn device(&self) -> Device {
        self.context.device()
    }

    /// What the compiler made of it. All 0 but `max_threads` on the emulated device.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn attributes(&self) -> Result<FunctionAttributes> {
        // SAFETY: a function of a module that is loaded for good.
        self.context.ask(|api, own| unsafe { api.attributes(own, self.raw) })
    }

    /// Blocks of `block` threads and `shared` bytes of dynamic shared memory that fit a multiprocessor at once.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn blocks_per_sm(&self, block: u32, shared: u32) -> Result<u32> {
        // SAFETY: a function of a module that is loaded for good.
        self.context.ask(|api, own| unsafe { api.blocks_per_sm(own, self.raw, block, shared) })
    }
}

/// Puts a kernel into a stream. The parameter is copied at the call; nothing is allocated, and nothing waits. A grid without
/// a block puts nothing in.
///
/// # Errors
/// [`Error::DeviceMismatch`] for a stream of another device; [`Error::Cuda`] for a launch beyond the device's limits.
///
/// # Safety
/// `P` is laid out as the kernel's one parameter is. What it points to lies on the device, is there until the kernel has run,
/// and is read and written by others in stream order alone; the kernel keeps inside it.
pub unsafe fn launch<P: Pod>(function: &Function, stream: &Stream, launch: Launch, params: &P) -> Result<()> {
    if stream.device() != function.device() {
        return Err(Error::DeviceMismatch {
            tensor: "stream",
            expected: function.device(),
            got: stream.device(),
        });
    }
    if launch.grid.contains(&0) {
        return Ok(());
    }
    #[cfg(test)]
    launched::note(function);
    let (raw, stream) = (function.raw, Handle(stream.as_raw()));
    // SAFETY: the caller's; the parameter is `size_of::<P>()` bytes.
    function.context.put(stream, |api, own| unsafe {
        api.launch(own, raw, stream, launch, std::ptr::from_ref(params).cast(), size_of::<P>())
    })
}

/// Which kernels a thread has launched, for a test that counts them.
#[cfg(test)]
pub(crate) mod launched {
    use std::cell::RefCell;
    use std::collections::HashSet;

    use super::Function;

    thread_local!(static LAUNCHED: RefCell<HashSet<usize>> = RefCell::default());

    pub(super) fn note(function: &Function) {
        LAUNCHED.with_borrow_mut(|all| all.insert(function.raw.0 as usize));
    }

    /// Whether this thread has launched it.
    pub(crate) fn has(function: &Function) -> bool {
        LAUNCHED.with_borrow(|all| all.contains(&(function.raw.0 as usize)))
    }
}
