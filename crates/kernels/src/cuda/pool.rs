//! A device's memory, taken and given back without a wait for anybody's work.
//!
//! A driver's plain allocation may wait for the device, and its plain free does. So memory comes from a pool of the driver's that is
//! this crate's own, beside the default one that other libraries of the process use, and that keeps what was given back to it.
//!
//! The discipline, which is what makes memory as free as the host's to whoever has a [`Buffer`](crate::Buffer):
//!
//! - *Taking.* Memory is taken on a stream of the pool's own, cleared there, and the host waits for that: it may be used on any
//!   stream at once. That stream never waits for another one, so nobody's work is waited for.
//! - *Giving back.* Memory is given back on a second stream, which first waits for all work that was put into any stream through
//!   this crate ([`Uses`](super::uses::Uses)). The host does not wait. Work that other code puts in by an address must have been waited for, or
//!   be ordered before work that is put in here.
//! - *Again.* The pool hands out what was given back when the free's turn has come; it orders no stream behind another one for the
//!   sake of memory. Where there is no more, and only then, the host waits for frees that are under way, and what the pool holds
//!   in pieces that fit nothing goes back to the device.

use super::Context;
use super::api::{Api, Called, Failed, Handle};
use crate::Result;

const CALL: &str = "cuMemAllocFromPoolAsync";
const OUT_OF_MEMORY: i32 = 2;
const CAPTURE_UNSUPPORTED: i32 = 900;

/// The pool of a device.
pub(super) struct Pool {
    raw: Handle,
    /// Memory is given back here.
    freeing: Handle,
}

/// What a device's pool holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pooled {
    /// Bytes of the device.
    pub held: usize,
    /// Of which are handed out.
    pub used: usize,
}

impl Pool {
    pub(super) fn new(api: &dyn Api, context: Handle, ordinal: u32) -> Called<Pool> {
        Ok(Pool { raw: api.create_pool(ordinal)?, freeing: api.create_stream(context, false)? })
    }

    /// The stream that waits for whoever may use what is given back.
    pub(super) fn freeing(&self) -> Handle {
        self.freeing
    }

    fn bytes(&self, api: &dyn Api) -> Called<Pooled> {
        api.pool_bytes(self.raw).map(|(held, used)| Pooled { held, used })
    }

    fn take(&self, api: &dyn Api, context: Handle, service: Handle, bytes: usize) -> Called<*mut u8> {
        let mut taken = api.allocate_from(context, self.raw, service, bytes);
        let none = |taken: &Called<*mut u8>| matches!(taken, Err(failed) if failed.code == OUT_OF_MEMORY);
        // SAFETY: the stream is the pool's.
        if none(&taken) && !unsafe { api.query_stream(context, self.freeing) }? {
            // SAFETY: as above.
            unsafe { api.synchronize_stream(context, self.freeing) }?;
            taken = api.allocate_from(context, self.raw, service, bytes);
        }
        if none(&taken) {
            api.trim_pool(self.raw, 0)?;
            taken = api.allocate_from(context, self.raw, service, bytes);
        }
        taken
    }
}

impl Context {
    /// `bytes` bytes, at least 1, zeroed: they may be used on any stream at once.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory), or [`Error::Cuda`](crate::Error::Cuda), as in a capture of this thread.
    pub(super) fn take_memory(&self, bytes: usize) -> Result<*mut u8> {
        {
            let mut held = self.uses().held();
            if held.is_capturing() {
                return Err(self.error(Failed { call: CALL, code: CAPTURE_UNSUPPORTED }));
            }
            if !held.given.is_empty() {
                self.ask(|api, raw| self.give_back(&mut held, api, raw))?;
            }
        }
        let service = self.service();
        let ptr = self.ask_for_memory(bytes, |api, raw| match self.pool() {
            Some(pool) => pool.take(api, raw, service, bytes),
            None => api.allocate(raw, bytes),
        })?;
        // SAFETY: the bytes were just allocated, and are nobody else's until the stream has passed.
        let cleared = self.ask(|api, raw| unsafe {
            api.fill(raw, service, ptr, 0, bytes)?;
            api.synchronize_stream(raw, service)
        });
        if let Err(why) = cleared {
            // SAFETY: nobody else has it.
            unsafe { self.give_memory(ptr) };
            return Err(why);
        }
        Ok(ptr)
    }

    /// Gives memory back when all work that was put in has run; waits for none of it, where the device has pools.
    ///
    /// # Safety
    /// `ptr` is of [`Context::take_memory`], and given back once; no later work touches it.
    pub(super) unsafe fn give_memory(&self, ptr: *mut u8) {
        let mut held = self.uses().held();
        held.given.push(ptr as usize);
        self.ask_or_note(|api, raw| self.give_back(&mut held, api, raw));
    }

    /// Gives back what is held back, unless a stream is captured.
    fn give_back(&self, held: &mut super::uses::Held, api: &dyn Api, context: Handle) -> Called<()> {
        if let Some(pool) = self.pool()
            && !self.uses().hold(held, api, context, pool.freeing)?
        {
            return Ok(());
        }
        if self.pool().is_none() && held.is_capturing() {
            return Ok(());
        }
        while let Some(at) = held.given.pop() {
            let ptr = at as *mut u8;
            // SAFETY: by the contract of `give_memory`; the freeing stream waits for all work that may touch it, and a plain free
            // waits for the device.
            unsafe {
                match self.pool() {
                    Some(pool) => api.free_async(context, pool.freeing, ptr)?,
                    None => api.free(context, ptr)?,
                }
            }
        }
        Ok(())
    }

    /// What the pool holds; `None` for a device without pools, whose frees wait.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda).
    pub fn pooled(&self) -> Result<Option<Pooled>> {
        self.pool().map(|pool| self.ask(|api, _| pool.bytes(api))).transpose()
    }

    /// Gives what the pool holds and nobody uses back to the device, for other programs and libraries, and pinned memory that is
    /// kept back to the host, which waits for the device.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda).
    pub fn trim(&self) -> Result<()> {
        self.trim_pinned(0)?;
        match self.pool() {
            Some(pool) => self.ask(|api, _| api.trim_pool(pool.raw, 0)),
            None => Ok(()),
        }
    }
}
