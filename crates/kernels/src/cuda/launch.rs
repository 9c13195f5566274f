//! Modules, kernels and their launch.

use bytemuck::Pod;

use super::Context;
use super::api::{Begin, FunctionAttributes, Handle, Image, Launch};
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

    /// What the compiler made of it. All 0 but `max_threads` and `cluster` on the emulated device.
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
    // SAFETY: the caller's.
    unsafe { put(function, stream, launch, Begin::Behind, params) }
}

/// As [`launch`], for a kernel that comes right behind another one of the same call: where the device knows how, it is brought to
/// multiprocessors that have room while that one still runs, and waits there, as every kernel of ours does before anything else
/// (`MSTAR_KERNEL` in `cu/ptx.cuh`).
///
/// # Errors
/// As [`launch`].
///
/// # Safety
/// As [`launch`]; and what was put into the stream last is a kernel of ours. Another one might have begun early and ended
/// without waiting for what comes before it, for which this one would not wait either.
pub(crate) unsafe fn launch_next<P: Pod>(
    function: &Function,
    stream: &Stream,
    launch: Launch,
    params: &P,
) -> Result<()> {
    let begin = if function.context.arch() >= (9, 0) { Begin::Early } else { Begin::Behind };
    // SAFETY: the caller's; every kernel of ours waits before anything else.
    unsafe { put(function, stream, launch, begin, params) }
}

/// # Safety
/// As [`launch`], or [`launch_next`] for a kernel that begins early.
unsafe fn put<P: Pod>(
    function: &Function,
    stream: &Stream,
    launch: Launch,
    begin: Begin,
    params: &P,
) -> Result<()> {
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
        api.launch(own, raw, stream, launch, begin, std::ptr::from_ref(params).cast(), size_of::<P>())
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
