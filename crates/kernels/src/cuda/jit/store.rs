//! Kernels that this process has loaded.

use std::collections::{HashMap, HashSet};
use std::sync::{LazyLock, PoisonError, RwLock};

use rayon::prelude::*;

use super::compile::{Binary, compile};
use super::key::Key;
use super::target::Target;
use super::watch::{Event, tell};
use crate::cuda::{Context, Function, Image, Module};
use crate::{Device, Error};

type Loaded = HashMap<Device, HashMap<Key, Function>>;

static LOADED: LazyLock<RwLock<Loaded>> = LazyLock::new(RwLock::default);

/// Compiles and loads what is not loaded yet, several at a time. Planning calls it, so that running compiles nothing.
///
/// # Errors
/// [`Error::Kernel`] of the first that cannot be compiled or loaded; [`Error::NoDevice`]. What was loaded by then stays.
pub fn prepare(device: Device, keys: &[Key]) -> Result<(), Error> {
    #[cfg(test)]
    if asked::note(keys) {
        return Ok(());
    }
    if keys.iter().all(|key| loaded(device, key).is_some()) {
        return Ok(());
    }
    let target = target_of(device)?;
    let mut distinct = HashSet::new();
    let missing: Vec<&Key> =
        keys.iter().filter(|key| loaded(device, key).is_none() && distinct.insert(*key)).collect();
    tell(&Event::Begin { kernels: missing.len() });
    // Two threads that prepare the same kernel both make it, and the first one's stays: waiting for each other within a thread
    // pool could wait for ever.
    let outcome = missing.par_iter().try_for_each(|key| load(device, target, key).map(|_| ()));
    tell(&Event::End);
    outcome
}

/// A kernel: where it was prepared, a lookup that allocates nothing.
///
/// # Errors
/// As [`prepare`].
pub fn function(device: Device, key: &Key) -> Result<Function, Error> {
    #[cfg(test)]
    if asked::note(std::slice::from_ref(key)) {
        return Err(Error::Kernel { kernel: key.to_string(), why: "it is only asked for".into() });
    }
    match loaded(device, key) {
        Some(function) => Ok(function),
        None => load(device, target_of(device)?, key),
    }
}

/// Kernels that this process has loaded, of all devices: a run whose kernels were prepared leaves it unchanged.
pub fn count() -> usize {
    LOADED.read().unwrap_or_else(PoisonError::into_inner).values().map(HashMap::len).sum()
}

fn loaded(device: Device, key: &Key) -> Option<Function> {
    LOADED.read().unwrap_or_else(PoisonError::into_inner).get(&device)?.get(key).copied()
}

/// What a thread asks for, with nothing compiled: for a test of which kernels a call takes.
#[cfg(test)]
pub(crate) mod asked {
    use std::cell::RefCell;

    use super::Key;

    thread_local!(static ASKED: RefCell<Option<Vec<Key>>> = const { RefCell::new(None) });

    pub(super) fn note(keys: &[Key]) -> bool {
        ASKED.with_borrow_mut(|all| all.as_mut().map(|all| all.extend(keys.iter().cloned())).is_some())
    }

    /// The keys that were asked for. Each call ends where it would look a kernel up.
    pub(crate) fn by(run: impl FnOnce()) -> Vec<Key> {
        ASKED.set(Some(Vec::new()));
        run();
        ASKED.take().unwrap_or_default()
    }
}

/// All that this process has loaded for a device.
#[cfg(test)]
pub(crate) fn all_loaded(device: Device) -> Vec<(Key, Function)> {
    let all = LOADED.read().unwrap_or_else(PoisonError::into_inner);
    let all = all.get(&device).into_iter().flatten();
    all.map(|(key, function)| (key.clone(), *function)).collect()
}

/// Kernels that were asked for on a device, in the order of their names: on a device on paper
/// ([`Context::on_paper`]) what its resources would run.
pub fn asked_for(device: Device) -> Vec<Key> {
    let all = LOADED.read().unwrap_or_else(PoisonError::into_inner);
    let mut keys: Vec<Key> = all.get(&device).into_iter().flat_map(HashMap::keys).cloned().collect();
    keys.sort_by_cached_key(Key::to_string);
    keys
}

/// What a device's kernels are compiled for.
///
/// # Errors
/// [`Error::NoDevice`].
pub fn target_of(device: Device) -> Result<Target, Error> {
    let context = Context::of(device)?;
    #[cfg(feature = "emulator")]
    if context.is_emulated() {
        return Ok(Target::Emulated);
    }
    let (major, minor) = context.arch();
    Ok(Target::Sm { major, minor })
}

fn load(device: Device, target: Target, key: &Key) -> Result<Function, Error> {
    if Context::of(device)?.is_on_paper() {
        return keep(device, key, bring_in(device, key, &Binary::Cubin(Vec::new()))?);
    }
    let compiled = compile(target, key)?;
    let function = match bring_in(device, key, &compiled.binary) {
        // Another process may have made room in the cache between our looking and the loader's opening.
        Err(_) if matches!(&compiled.binary, Binary::Shared(path) if !path.exists()) => {
            bring_in(device, key, &compile(target, key)?.binary)
        }
        outcome => outcome,
    }
    .map_err(|why| Error::Kernel {
        kernel: format!("{key} ({target})"),
        why: format!("compiled, but not loaded: {why}"),
    })?;
    tell(&Event::Ready { key, compiled: &compiled });
    keep(device, key, function)
}

fn keep(device: Device, key: &Key, function: Function) -> Result<Function, Error> {
    let mut all = LOADED.write().unwrap_or_else(PoisonError::into_inner);
    Ok(*all.entry(device).or_default().entry(key.clone()).or_insert(function))
}

fn bring_in(device: Device, key: &Key, binary: &Binary) -> Result<Function, Error> {
    let image = match binary {
        Binary::Cubin(bytes) => Image::Cubin(bytes),
        Binary::Shared(path) => Image::SharedObject(path),
    };
    let shared = Context::of(device)?.shared_per_block_optin();
    // SAFETY: the image was compiled from a text of ours, or read from the user's cache, where its checksum was right. A
    // snippet in it is the user's own code, which they ask to be run.
    let module = unsafe { Module::load(device, image) }?;
    module.function(key.entry, shared)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::jit::Unit;
    use crate::cuda::{Launch, launch};
    use crate::{Buffer, DType, Stream, TensorMut, copy};
    use bytemuck::{Pod, Zeroable};

    const UNIT: Unit = Unit::of(
        "number.cu",
        "#include \"ptx.cuh\"\n\
         struct Params { u64 at; };\n\
         MSTAR_KERNEL(number, Params, 32, 1) { reinterpret_cast<i32*>(p.at)[thread_x()] = NUMBER * i32(thread_x()); }\n",
    );
    const DEVICE: Device = Device::Cuda(0);

    #[derive(Clone, Copy, Pod, Zeroable)]
    #[repr(C)]
    struct Params {
        at: u64,
    }

    fn key(number: i64) -> Key {
        Key::new(UNIT, "number").with("NUMBER", number)
    }

    /// The device to test on, with a compiler for it; the word aloud where there is none.
    fn is_here(test: &str) -> bool {
        let why = match target_of(DEVICE) {
            Err(why) => why.to_string(),
            Ok(target) => match compile(target, &key(0)) {
                Ok(_) => return true,
                // With a compiler, a text that does not compile is no reason to skip.
                Err(why) if cfg!(feature = "emulator") || crate::cuda::jit::Nvrtc::here().is_ok() => {
                    panic!("{why}")
                }
                Err(why) => why.to_string(),
            },
        };
        println!("SKIPPED {test}: {why}");
        false
    }

    fn run(function: &Function) -> Vec<i32> {
        let stream = crate::cuda::OwnedStream::new(DEVICE).unwrap();
        let stream: Stream = stream.stream();
        let mut device = Buffer::zeroed_on(DEVICE, 128).unwrap();
        let at = device.tensor_mut(0, DType::I32, &[32]).unwrap().as_mut_ptr() as u64;
        let how = Launch { grid: [1, 1, 1], block: 32, shared: 0 };
        // SAFETY: the parameter is the kernel's, and points to 32 words of the device, which live until `copy` has waited.
        unsafe { launch(function, &stream, how, &Params { at }) }.unwrap();
        let mut words = vec![0i32; 32];
        let dst = TensorMut::from_slice(&mut words, &[32]).unwrap();
        copy(&stream, device.tensor(0, DType::I32, &[32]).unwrap(), dst).unwrap();
        words
    }

    #[test]
    fn what_was_prepared_is_found_and_each_variant_is_its_own() {
        if !is_here("what_was_prepared_is_found") {
            return;
        }
        let keys = [key(1), key(2), key(1), key(3)];
        assert!(loaded(DEVICE, &keys[0]).is_none());
        prepare(DEVICE, &keys).unwrap();
        prepare(DEVICE, &keys).unwrap();
        for (number, key) in [(1, &keys[0]), (2, &keys[1]), (3, &keys[3])] {
            assert!(loaded(DEVICE, key).is_some());
            let expected: Vec<i32> = (0..32).map(|i| number * i).collect();
            assert_eq!(run(&function(DEVICE, key).unwrap()), expected);
        }
        assert!(loaded(DEVICE, &key(4)).is_none());
        assert_eq!(run(&function(DEVICE, &key(4)).unwrap())[31], 124, "made when it is asked for, too");
    }

    #[test]
    fn one_that_does_not_compile_is_named_and_the_others_serve() {
        if !is_here("one_that_does_not_compile_is_named") {
            return;
        }
        let bad = Key::new(UNIT, "number");
        let error = prepare(DEVICE, &[key(5), bad.clone()]).unwrap_err().to_string();
        assert!(error.contains("kernel number.cu number (") && error.contains("NUMBER"), "{error}");
        assert!(loaded(DEVICE, &bad).is_none());
        assert_eq!(run(&function(DEVICE, &key(5)).unwrap())[1], 5);
        let absent = Key::new(UNIT, "no_such_kernel").with("NUMBER", 1);
        let error = function(DEVICE, &absent).unwrap_err().to_string();
        assert!(error.contains("no_such_kernel") && error.contains("not loaded"), "{error}");
    }

    #[test]
    fn the_host_has_no_kernels() {
        assert!(matches!(prepare(Device::Cpu, &[key(1)]), Err(Error::NoDevice { .. })));
        assert!(matches!(function(Device::Cpu, &key(1)), Err(Error::NoDevice { .. })));
        assert_eq!(prepare(Device::Cpu, &[]), Ok(()));
    }
}
