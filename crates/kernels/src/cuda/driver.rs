//! The CUDA driver, asked what is there.
//!
//! The library is opened by name, each symbol is looked up, and each call's result is read: a machine without a driver, with
//! a broken one, or with one that sees no card gets an answer, never a panic (some bindings load the driver lazily and
//! abort). Nothing else of this crate opens it, so work on the CPU never touches it. No context is made.

use std::ffi::{c_char, c_int, c_uint};

use libloading::{Library, Symbol};

use crate::cards::{Card, Driver, NoCuda};

/// Names under which the driver is installed.
#[cfg(windows)]
const NAMES: &[&str] = &["nvcuda.dll"];
/// Names under which the driver is installed.
#[cfg(not(windows))]
const NAMES: &[&str] = &["libcuda.so.1", "libcuda.so"];

const SUCCESS: c_int = 0;
const NO_DEVICE: c_int = 100;
const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
const COMPUTE_CAPABILITY_MINOR: c_int = 76;
const MEMORY_POOLS_SUPPORTED: c_int = 115;
/// More cards than a host has; a driver that reports more is not believed.
const MOST_CARDS: c_int = 1024;

/// The driver and its cards; of the emulated device, where the process uses it, what that one says.
///
/// # Errors
/// [`NoCuda`]: no library under its names, one whose calls fail, or an environment that asks for neither.
pub fn driver() -> Result<Driver, NoCuda> {
    match super::api::is_emulated()? {
        true => super::api::emulated_driver(),
        false => ask_driver(),
    }
}

/// The driver of the machine, asked itself.
pub(super) fn ask_driver() -> Result<Driver, NoCuda> {
    let library = NAMES.iter().find_map(|name| {
        // SAFETY: loading runs the library's initialisers; these are the names of NVIDIA's driver, which a process
        // may load at any time and more than once.
        unsafe { Library::new(*name) }.ok()
    });
    let Some(library) = library else { return Err(NoCuda::NoDriver { tried: NAMES.join(", ") }) };
    ask(&library)
}

fn ask(library: &Library) -> Result<Driver, NoCuda> {
    type Init = unsafe extern "C" fn(c_uint) -> c_int;
    type Number = unsafe extern "C" fn(*mut c_int) -> c_int;
    type Get = unsafe extern "C" fn(*mut c_int, c_int) -> c_int;
    type Name = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
    type Memory = unsafe extern "C" fn(*mut usize, c_int) -> c_int;
    type Attribute = unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int;

    // SAFETY: this type, and those below, are those of cuda.h for these names, unchanged since CUDA 3.2.
    let init: Symbol<'_, Init> = unsafe { symbol(library, "cuInit")? };
    // SAFETY: as above.
    let version: Symbol<'_, Number> = unsafe { symbol(library, "cuDriverGetVersion")? };
    // SAFETY: as above.
    let count: Symbol<'_, Number> = unsafe { symbol(library, "cuDeviceGetCount")? };
    // SAFETY: as above.
    let get: Symbol<'_, Get> = unsafe { symbol(library, "cuDeviceGet")? };
    // SAFETY: as above.
    let name: Symbol<'_, Name> = unsafe { symbol(library, "cuDeviceGetName")? };
    // SAFETY: as above.
    let memory: Symbol<'_, Memory> = unsafe { symbol(library, "cuDeviceTotalMem_v2")? };
    // SAFETY: as above.
    let attribute: Symbol<'_, Attribute> = unsafe { symbol(library, "cuDeviceGetAttribute")? };

    let mut raw_version = 0;
    // SAFETY: writes one integer, and may be called before `cuInit`.
    check("cuDriverGetVersion", unsafe { version(&mut raw_version) })?;
    let version = (raw_version / 1000, raw_version % 1000 / 10);
    // SAFETY: takes flags, of which 0 is the only value.
    match unsafe { init(0) } {
        NO_DEVICE => return Ok(Driver { version, cards: Vec::new() }),
        code => check("cuInit", code)?,
    }
    let mut cards = 0;
    // SAFETY: writes one integer.
    check("cuDeviceGetCount", unsafe { count(&mut cards) })?;
    let mut found = Vec::new();
    for ordinal in 0..cards.clamp(0, MOST_CARDS) {
        let (mut device, mut bytes, mut major, mut minor, mut pools) = (0, 0usize, 0, 0, 0);
        let mut text = [0 as c_char; 256];
        // SAFETY: `ordinal` is below the driver's count; each call writes one value, or at most 256 characters.
        unsafe {
            check("cuDeviceGet", get(&mut device, ordinal))?;
            check("cuDeviceGetName", name(text.as_mut_ptr(), text.len() as c_int, device))?;
            check("cuDeviceTotalMem", memory(&mut bytes, device))?;
            check("cuDeviceGetAttribute", attribute(&mut major, COMPUTE_CAPABILITY_MAJOR, device))?;
            check("cuDeviceGetAttribute", attribute(&mut minor, COMPUTE_CAPABILITY_MINOR, device))?;
            // A driver that knows no such attribute has no pools.
            if attribute(&mut pools, MEMORY_POOLS_SUPPORTED, device) != SUCCESS {
                pools = 0;
            }
        }
        let name: Vec<u8> = text.iter().take_while(|&&c| c != 0).map(|&c| c as u8).collect();
        found.push(Card {
            ordinal: ordinal as u32,
            name: String::from_utf8_lossy(&name).into_owned(),
            memory_bytes: bytes,
            compute_capability: (major, minor),
            pools: pools != 0,
        });
    }
    Ok(Driver { version, cards: found })
}

/// # Safety
/// `T` is the type of the function called `name`.
unsafe fn symbol<'l, T>(library: &'l Library, name: &'static str) -> Result<Symbol<'l, T>, NoCuda> {
    // SAFETY: the caller's.
    unsafe { library.get(name.as_bytes()) }.map_err(|_| NoCuda::Broken { call: name, code: None })
}

fn check(call: &'static str, code: c_int) -> Result<(), NoCuda> {
    if code == SUCCESS { Ok(()) } else { Err(NoCuda::Broken { call, code: Some(code) }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f37_no_driver_is_an_answer_not_a_panic() {
        match ask_driver() {
            Ok(driver) => assert!(driver.version.0 > 0, "{driver:?}"),
            Err(why) => assert!(why.to_string().contains("CUDA"), "{why}"),
        }
    }

    #[cfg(feature = "emulator")]
    #[test]
    fn the_emulated_device_stands_in_for_a_card() {
        assert!(crate::cuda::emulate());
        let driver = driver().unwrap();
        assert_eq!((driver.version, driver.cards.len()), ((12, 8), 1));
        assert_eq!((driver.cards[0].ordinal, driver.cards[0].compute_capability), (0, (9, 0)));
    }

    #[test]
    fn another_library_is_a_broken_driver() {
        // SAFETY: the C library is loaded already.
        let Ok(library) = (unsafe { Library::new("libc.so.6") }) else { return };
        assert_eq!(ask(&library).unwrap_err(), NoCuda::Broken { call: "cuInit", code: None });
    }
}
