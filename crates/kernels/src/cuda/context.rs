//! A device in use: its primary context, kept for as long as the process lives.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use super::api::{Api, Called, Failed, Handle, Paper, Properties, api};
use super::jit::Target;
use super::pinned::Pinned;
use super::pool::Pool;
use super::uses::Uses;
use crate::buffer::MOST_DEVICES;
use crate::cards::NoCuda;
use crate::{Device, Error, Result};

const OUT_OF_MEMORY: i32 = 2;

/// A device that this process uses. It is the primary context, so that memory and streams of other libraries work in it.
pub struct Context {
    device: Device,
    api: &'static dyn Api,
    raw: Handle,
    properties: Properties,
    /// For what is done outside of any caller's stream: taking memory and clearing it. It waits for no other stream.
    service: Handle,
    /// Absent where the device has none.
    pool: Option<Pool>,
    pinned: Pinned,
    uses: Uses,
    /// Streams that were given back, for whoever asks next.
    idle: Mutex<Vec<Handle>>,
    /// What went wrong where nobody could be told, and how often.
    noted: Mutex<Option<Failed>>,
    notes: AtomicUsize,
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.device, self.properties.name)
    }
}

static CONTEXTS: [OnceLock<&'static Context>; MOST_DEVICES] = [const { OnceLock::new() }; MOST_DEVICES];
/// Held while a context is made, so that each is made once.
static MAKING: Mutex<()> = Mutex::new(());
/// What there is a device on paper for, from the last number down.
static ON_PAPER: Mutex<Vec<Target>> = Mutex::new(Vec::new());

impl Context {
    /// The context of a device, made at its first use. Later calls are a lookup.
    ///
    /// # Errors
    /// [`Error::NoDevice`] for the CPU, and where there is no such card or no driver that works; it says what would help.
    pub fn of(device: Device) -> Result<&'static Context> {
        let no = |why: String| Error::NoDevice { device, why };
        let Device::Cuda(ordinal) = device else { return Err(no("it is no CUDA device".into())) };
        let Some(slot) = CONTEXTS.get(ordinal as usize) else {
            return Err(no(format!("a CUDA device's number is below {MOST_DEVICES}")));
        };
        if let Some(context) = slot.get() {
            return Ok(context);
        }
        let _making = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = slot.get() {
            return Ok(context);
        }
        let api = api().map_err(|why: NoCuda| no(why.to_string()))?;
        let failed = |failed: Failed| Error::Cuda { device, call: failed.call, code: failed.code };
        let count = api.device_count().map_err(failed)?;
        if ordinal >= count {
            return Err(no(match count {
                0 => "the CUDA driver sees no card".into(),
                1 => "there is one card, cuda:0".into(),
                n => format!("there are {n} cards, cuda:0 to cuda:{}", n - 1),
            }));
        }
        let properties = api.properties(ordinal).map_err(failed)?;
        let context = Context::make(device, api, ordinal, properties).map_err(failed)?;
        Ok(slot.get_or_init(|| context))
    }

    /// A device on paper for a target, by a number that no card has: resources that are built on it ask for the kernels that they
    /// would ask a card of that architecture for, and none is compiled. [`jit::asked_for`](super::jit::asked_for) says which.
    /// Nothing may be attended there: its memory is no memory.
    ///
    /// # Errors
    /// [`Error::NoDevice`] for the emulator's target where the driver was chosen, and after some dozens of targets.
    pub fn on_paper(target: Target) -> Result<Device> {
        let mut all = ON_PAPER.lock().unwrap_or_else(PoisonError::into_inner);
        let number = |index: usize| Device::Cuda((MOST_DEVICES - 1 - index) as u32);
        if let Some(index) = all.iter().position(|other| *other == target) {
            return Ok(number(index));
        }
        let (index, device) = (all.len(), number(all.len().min(MOST_DEVICES - 1)));
        let no = |why: String| Error::NoDevice { device, why };
        if index >= MOST_DEVICES / 2 {
            return Err(no(format!("there are {index} devices on paper already")));
        }
        let properties = match target {
            Target::Sm { major, minor } => Paper::card((major, minor)),
            #[cfg(feature = "emulator")]
            Target::Emulated => Context::of(Device::Cuda(0))?.properties.clone(),
        };
        let paper = Paper::new(properties);
        let properties = paper.properties(0).map_err(|failed| no(failed.call.into()))?;
        let context = Context::make(device, Box::leak(Box::new(paper)), 0, properties);
        let context = context.map_err(|failed| no(failed.call.into()))?;
        let slot = &CONTEXTS[MOST_DEVICES - 1 - index];
        slot.set(context).map_err(|_| no("its number is taken by a card".into()))?;
        all.push(target);
        Ok(device)
    }

    /// It stays for as long as the process lives.
    pub(super) fn make(
        device: Device,
        api: &'static dyn Api,
        ordinal: u32,
        properties: Properties,
    ) -> Called<&'static Context> {
        let raw = api.retain(ordinal)?;
        let service = api.create_stream(raw, true)?;
        let pool = if properties.pools { Some(Pool::new(api, raw, ordinal)?) } else { None };
        Ok(Box::leak(Box::new(Context {
            device,
            api,
            raw,
            properties,
            service,
            pool,
            pinned: Pinned::default(),
            uses: Uses::default(),
            idle: Mutex::new(Vec::new()),
            noted: Mutex::new(None),
            notes: AtomicUsize::new(0),
        })))
    }

    /// A context of the first device as if it had no pools.
    ///
    /// # Errors
    /// As [`Context::of`].
    #[cfg(all(test, feature = "emulator"))]
    pub(super) fn without_pool() -> Result<&'static Context> {
        let first = Context::of(Device::Cuda(0))?;
        let properties = Properties { pools: false, ..first.properties.clone() };
        Context::make(first.device, first.api, 0, properties).map_err(|failed| first.error(failed))
    }

    /// The device.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.properties.name
    }

    /// Its compute capability: (9, 0) is `sm_90`.
    pub fn arch(&self) -> (u32, u32) {
        self.properties.arch
    }

    /// Whether it runs what `cu/hopper.cuh` declares, and has a Hopper's shared memory.
    pub(crate) fn is_hopper(&self) -> bool {
        self.arch() == (9, 0) && self.shared_per_block_optin() >= 227 << 10
    }

    /// Its multiprocessors.
    pub fn sm_count(&self) -> u32 {
        self.properties.sm_count
    }

    /// Bytes of shared memory that a block may ask for.
    pub fn shared_per_block_optin(&self) -> u32 {
        #[cfg(test)]
        if let Some(bytes) = forced::shared() {
            return bytes.min(self.properties.shared_per_block_optin);
        }
        self.properties.shared_per_block_optin
    }

    /// Bytes of its memory.
    pub fn memory_bytes(&self) -> usize {
        self.properties.memory_bytes
    }

    /// The newest CUDA version that the driver serves, as (major, minor).
    pub fn driver_version(&self) -> (u32, u32) {
        self.properties.driver_version
    }

    /// Whether it is the emulated device.
    pub fn is_emulated(&self) -> bool {
        self.api.is_emulated()
    }

    /// Whether it is a device on paper.
    pub(super) fn is_on_paper(&self) -> bool {
        self.api.is_on_paper()
    }

    /// Bytes of its memory that are free now, with those that its pool holds and nobody uses.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn free_memory(&self) -> Result<usize> {
        let free = self.ask(|api, raw| api.free_memory(raw))?;
        Ok(free + self.pooled()?.map_or(0, |pooled| pooled.held.saturating_sub(pooled.used)))
    }

    /// What went wrong in a place that could tell nobody, such as freeing memory: the first such error since the last call.
    ///
    /// # Errors
    /// That error.
    pub fn check(&self) -> Result<()> {
        match self.noted.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(failed) => Err(self.error(failed)),
            None => Ok(()),
        }
    }

    /// How many such errors there have been since the process started.
    pub fn noted_errors(&self) -> usize {
        self.notes.load(Ordering::Relaxed)
    }

    /// Makes calls in this context.
    pub(super) fn ask<T>(&self, calls: impl FnOnce(&'static dyn Api, Handle) -> Called<T>) -> Result<T> {
        calls(self.api, self.raw).map_err(|failed| self.error(failed))
    }

    /// Puts work into a stream that may touch memory.
    pub(super) fn put(
        &self,
        stream: Handle,
        work: impl FnOnce(&'static dyn Api, Handle) -> Called<()>,
    ) -> Result<()> {
        self.ask(work)?;
        self.used_by(self, stream)
    }

    /// Says that a stream of `of` was given work that may touch this context's memory.
    pub(super) fn used_by(&self, of: &Context, stream: Handle) -> Result<()> {
        of.ask(|api, raw| self.uses.put(api, raw, stream))
    }

    /// Makes calls where nobody can be told of an error; it is noted.
    pub(super) fn ask_or_note(&self, calls: impl FnOnce(&'static dyn Api, Handle) -> Called<()>) {
        if let Err(failed) = calls(self.api, self.raw) {
            self.notes.fetch_add(1, Ordering::Relaxed);
            self.noted.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(failed);
        }
    }

    /// Asks for memory: that there is none is an error of its own.
    pub(super) fn ask_for_memory<T>(
        &self,
        bytes: usize,
        calls: impl FnOnce(&'static dyn Api, Handle) -> Called<T>,
    ) -> Result<T> {
        calls(self.api, self.raw).map_err(|failed| match failed.code {
            OUT_OF_MEMORY => self.out_of_memory(bytes),
            _ => self.error(failed),
        })
    }

    pub(super) fn out_of_memory(&self, bytes: usize) -> Error {
        let free = self.free_memory().ok().map(|free| (free, self.properties.memory_bytes));
        Error::OutOfMemory { bytes, what: String::new(), device: self.device, free }
    }

    pub(super) fn error(&self, failed: Failed) -> Error {
        Error::Cuda { device: self.device, call: failed.call, code: failed.code }
    }

    pub(super) fn raw(&self) -> Handle {
        self.raw
    }

    pub(super) fn service(&self) -> Handle {
        self.service
    }

    pub(super) fn pool(&self) -> Option<&Pool> {
        self.pool.as_ref()
    }

    pub(super) fn pinned(&self) -> &Pinned {
        &self.pinned
    }

    pub(super) fn uses(&self) -> &Uses {
        &self.uses
    }

    /// A stream that was given back, or a new one.
    pub(super) fn take_stream(&self) -> Result<Handle> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        match idle {
            Some(stream) => Ok(stream),
            None => self.ask(|api, raw| {
                let (stream, mark) = (api.create_stream(raw, false)?, api.create_event(raw, false)?);
                self.uses.know(stream, mark);
                Ok(stream)
            }),
        }
    }

    pub(super) fn give_back_stream(&self, stream: Handle) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(stream);
    }
}

/// What tests have kernels chosen by, on the thread that plans.
#[cfg(test)]
pub(crate) mod forced {
    use std::cell::Cell;

    thread_local!(static SHARED: Cell<Option<u32>> = const { Cell::new(None) });

    pub(super) fn shared() -> Option<u32> {
        SHARED.get()
    }

    /// Runs with kernels chosen as for a device with less shared memory a block.
    pub(crate) fn with_shared<R>(bytes: Option<u32>, run: impl FnOnce() -> R) -> R {
        let before = SHARED.replace(bytes);
        let result = run();
        SHARED.set(before);
        result
    }
}
