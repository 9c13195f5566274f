//! From a variant's name to its binary: the disk cache, or a compiler.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use super::cache::{Cache, Entry, Id};
use super::find::CURE;
use super::key::Key;
use super::nvrtc::Nvrtc;
use super::resources::Resources;
use super::source::{self, Unit};
use super::target::Target;
use super::watch::{Event, tell};
use crate::Error;

/// Part of every entry's name: raised when the way of compiling changes without a change of text or options.
const GENERATION: &str = "mstar kernels 3";

/// A binary, ready to be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Binary {
    /// A CUDA binary, for the driver.
    Cubin(Vec<u8>),
    /// A shared object's file, for the host's loader.
    Shared(PathBuf),
}

/// A variant, compiled.
#[derive(Debug)]
pub struct Compiled {
    /// The binary.
    pub binary: Binary,
    /// What it takes; zeros for the emulator, and where the compiler did not say.
    pub resources: Resources,
    /// Whether it came from disk.
    pub cached: bool,
    /// Holds a binary's file that is in no cache, until it was loaded.
    _file: Option<tempfile::TempPath>,
}

/// Compiles `key` for `target`, or finds it compiled.
///
/// # Errors
/// [`Error::Kernel`] with the compiler's log, or where a compiler was looked for.
pub fn compile(target: Target, key: &Key) -> Result<Compiled, Error> {
    compile_in(Cache::of_user().as_ref(), target, key)
}

pub(super) fn compile_in(cache: Option<&Cache>, target: Target, key: &Key) -> Result<Compiled, Error> {
    build(cache, target, key).map_err(|why| Error::Kernel { kernel: format!("{key} ({target})"), why })
}

fn build(cache: Option<&Cache>, target: Target, key: &Key) -> Result<Compiled, String> {
    match target {
        Target::Sm { .. } => machine_code(cache, Nvrtc::here(), target, key),
        #[cfg(feature = "emulator")]
        Target::Emulated => {
            use std::io::Write;

            use super::twin::Twin;

            let twin = Twin::here()?;
            let options = Twin::options(defines(key));
            let headers = headers(key, |_| true);
            let id = id(key, &headers, &options, twin.version());
            if let Some(entry) = cache.and_then(|cache| cache.get(id, "so")) {
                let binary = Binary::Shared(entry.path);
                return Ok(Compiled { binary, resources: entry.resources, cached: true, _file: None });
            }
            tell(&Event::Compiling { key, target });
            let made = twin.compile(key.unit.name(), key.unit.text(), &headers, &options)?;
            let resources = Resources::default();
            if let Some(path) = keep(cache, id, "so", &made, resources) {
                return Ok(Compiled { binary: Binary::Shared(path), resources, cached: false, _file: None });
            }
            let write = || {
                let mut file = tempfile::Builder::new().suffix(".so").tempfile()?;
                file.write_all(&made)?;
                Ok(file.into_temp_path())
            };
            let file =
                write().map_err(|why: std::io::Error| format!("no file for the shared object: {why}"))?;
            Ok(Compiled {
                binary: Binary::Shared(file.to_path_buf()),
                resources,
                cached: false,
                _file: Some(file),
            })
        }
    }
}

/// A card's. With no compiler here, what another one made ahead of time will do.
fn machine_code(
    cache: Option<&Cache>,
    nvrtc: Result<&Nvrtc, &str>,
    target: Target,
    key: &Key,
) -> Result<Compiled, String> {
    let arch = match nvrtc {
        Ok(nvrtc) => arch_for(nvrtc, target)?,
        Err(_) => target.to_string(),
    };
    let mut options = vec![format!("--gpu-architecture={arch}")];
    options.extend(["--std=c++17", "-default-device", "--ptxas-options=-v"].map(String::from));
    options.extend(defines(key));
    let headers = headers(key, |name| !source::is_emulated(name));
    let from_disk = |entry: Entry| Compiled {
        binary: Binary::Cubin(entry.binary),
        resources: entry.resources,
        cached: true,
        _file: None,
    };
    let nvrtc = match nvrtc {
        Ok(nvrtc) => nvrtc,
        Err(why) => {
            let id = id(key, &headers, &options, "");
            return cache
                .and_then(|cache| cache.get_of_any(id, "cubin"))
                .map(from_disk)
                .ok_or(why.to_string());
        }
    };
    let (major, minor) = nvrtc.version();
    let id = id(key, &headers, &options, &format!("nvrtc {major}.{minor}"));
    if let Some(entry) = cache.and_then(|cache| cache.get(id, "cubin")) {
        return Ok(from_disk(entry));
    }
    tell(&Event::Compiling { key, target });
    let made = nvrtc.compile(key.unit.name(), key.unit.text(), &headers, &options)?;
    // NVRTC 13.0 says nothing of a program that it has compiled before, for another entry of it.
    let resources = Resources::parse(&made.log, key.entry).unwrap_or_default();
    keep(cache, id, "cubin", &made.cubin, resources);
    Ok(Compiled { binary: Binary::Cubin(made.cubin), resources, cached: false, _file: None })
}

/// Keeps a binary where that is possible. Where it is not, the program works from memory and says so once.
fn keep(
    cache: Option<&Cache>,
    id: Id,
    extension: &str,
    binary: &[u8],
    resources: Resources,
) -> Option<PathBuf> {
    static TOLD: AtomicBool = AtomicBool::new(false);
    let why = match cache {
        Some(cache) => match cache.put(id, extension, binary, resources) {
            Ok(path) => return Some(path),
            Err(why) => format!("{} takes no file ({why})", cache.folder().display()),
        },
        None => "no cache folder: neither MSTAR_CACHE_DIR, XDG_CACHE_HOME nor HOME is set".into(),
    };
    if !TOLD.swap(true, Ordering::Relaxed) {
        tell(&Event::NotKept { why: &why });
    }
    None
}

/// The real architecture to compile for.
fn arch_for(nvrtc: &Nvrtc, target: Target) -> Result<String, String> {
    nearest(nvrtc.archs(), target).ok_or_else(|| {
        let (major, minor) = nvrtc.version();
        let known: Vec<String> = nvrtc.archs().iter().map(|arch| format!("sm_{arch}")).collect();
        format!(
            "NVRTC {major}.{minor} ({}) compiles for {}; {target} needs a newer one: {CURE}",
            nvrtc.path().display(),
            known.join(", "),
        )
    })
}

/// The architecture whose binaries run on a card of this capability: its own, or the nearest older one of its major version
/// that the compiler knows.
fn nearest(known: &[i32], target: Target) -> Option<String> {
    let (major, minor) = match target {
        Target::Sm { major, minor } => (major as i32, minor as i32),
        #[cfg(feature = "emulator")]
        Target::Emulated => return None,
    };
    let fits = |arch: &&i32| **arch <= 10 * major + minor && **arch / 10 == major;
    let arch = *known.iter().rev().find(fits)? as u32;
    Some(Target::Sm { major: arch / 10, minor: arch % 10 }.to_string())
}

fn defines(key: &Key) -> Vec<String> {
    let mut defines: Vec<String> =
        key.defines.as_slice().iter().map(|(name, value)| format!("-D{name}={value}")).collect();
    if key.snippet.is_some() {
        defines.push("-DMSTAR_SNIPPET=1".into());
    }
    defines
}

fn headers(key: &Key, wanted: impl Fn(&str) -> bool) -> Vec<(&str, &str)> {
    let mut headers: Vec<(&str, &str)> = Unit::headers(&key.unit);
    headers.retain(|(name, _)| wanted(name));
    if let Some(snippet) = &key.snippet {
        headers.push((source::SNIPPET, snippet));
    }
    headers
}

/// The name of what these make. The entry is no part of a text's compilation, but what is told of the binary depends on it.
fn id(key: &Key, headers: &[(&str, &str)], options: &[String], compiler: &str) -> Id {
    let own = [GENERATION, key.unit.name(), key.unit.text(), key.entry];
    let texts = headers.iter().flat_map(|(name, text)| [*name, *text]);
    let options = options.iter().map(String::as_str);
    Id::of(compiler, own.into_iter().chain(options).chain(["headers"]).chain(texts))
}

#[cfg(test)]
mod tests;
