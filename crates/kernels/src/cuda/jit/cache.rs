//! Compiled kernels on disk, under the user's cache folder.
//!
//! `$MSTAR_CACHE_DIR`, else `$XDG_CACHE_HOME/mstar`, else `~/.cache/mstar`, and in it the folder `kernels`. An entry is one
//! file, named by the hash of all that made it: the binary as it is, then a trailer of fixed length with the binary's length,
//! what is known of it, and a checksum. (A trailer, since a shared object must begin as one.) It is written under another name
//! in the same folder and renamed, so that nobody sees half of it: neither another process, nor this one after a kill.
//! Whatever does not read back whole is not there. Reading marks an entry as used, and what was used longest ago makes room.

use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::resources::Resources;

/// The most that the folder may hold, in bytes.
pub(super) const LIMIT: u64 = 512 << 20;

/// Ends every entry's file; the last digit is the trailer's version.
const MAGIC: &[u8; 8] = b"mstarjt1";
/// Resources, the binary's length, the checksum, the magic.
const TRAILER: usize = 24 + 8 + 32 + 8;
/// A partial file older than this was left behind by a killed process.
const ABANDONED: Duration = Duration::from_secs(3600);
const PARTIAL: &str = ".partial";

/// The name of an entry: hashes of everything that the binary depends on, the compiler apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Id {
    /// Of texts and options.
    what: blake3::Hash,
    /// Of the compiler: its name and version.
    compiler: u64,
}

impl Id {
    /// The name of what `compiler` makes of `parts`. Each counts with its length, so that no two lists of parts are alike.
    pub(super) fn of<'a>(compiler: &str, parts: impl IntoIterator<Item = &'a str>) -> Id {
        let mut hasher = blake3::Hasher::new();
        for part in parts {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        let compiler = blake3::hash(compiler.as_bytes());
        let compiler = compiler.as_bytes().first_chunk().expect("a hash has 32 bytes");
        Id { what: hasher.finalize(), compiler: u64::from_le_bytes(*compiler) }
    }

    fn file(&self, extension: &str) -> String {
        format!("{}-{:016x}.{extension}", self.what.to_hex(), self.compiler)
    }

    /// The entry of the same texts and options that a file of this name holds.
    fn beside(&self, file: &str, extension: &str) -> Option<Id> {
        let rest = file.strip_prefix(self.what.to_hex().as_str())?.strip_prefix('-')?;
        let compiler = rest.strip_suffix(extension)?.strip_suffix('.')?;
        Some(Id { what: self.what, compiler: u64::from_str_radix(compiler, 16).ok()? })
    }
}

/// An entry that was read whole.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) path: PathBuf,
    pub(super) binary: Vec<u8>,
    pub(super) resources: Resources,
}

/// A folder of entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Cache {
    folder: PathBuf,
    limit: u64,
}

impl Cache {
    /// The user's; `None` where the environment names no folder and no home.
    pub(super) fn of_user() -> Option<Cache> {
        Some(Cache { folder: folder(&|name| env::var_os(name))?, limit: LIMIT })
    }

    #[cfg(test)]
    pub(super) fn at(folder: &Path, limit: u64) -> Cache {
        Cache { folder: folder.to_path_buf(), limit }
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    fn path(&self, id: Id, extension: &str) -> PathBuf {
        self.folder.join(id.file(extension))
    }

    /// The entry, if it is there and whole.
    pub(super) fn get(&self, id: Id, extension: &str) -> Option<Entry> {
        let path = self.path(id, extension);
        let mut binary = fs::read(&path).ok()?;
        let resources = unseal(&mut binary, id)?;
        // Best effort: a folder that may only be read serves all the same.
        if let Ok(file) = File::open(&path) {
            let _ = file.set_modified(SystemTime::now());
        }
        Some(Entry { path, binary, resources })
    }

    /// The entry that any compiler made of the same texts and options, the one used last.
    pub(super) fn get_of_any(&self, id: Id, extension: &str) -> Option<Entry> {
        let mut files = self.files();
        files.sort_by_key(|file| std::cmp::Reverse(file.used));
        files.iter().find_map(|file| {
            let id = id.beside(file.path.file_name()?.to_str()?, extension)?;
            self.get(id, extension)
        })
    }

    /// Keeps a binary, and makes room for it.
    ///
    /// # Errors
    /// A folder that cannot be made or takes no file.
    pub(super) fn put(
        &self,
        id: Id,
        extension: &str,
        binary: &[u8],
        resources: Resources,
    ) -> io::Result<PathBuf> {
        fs::create_dir_all(&self.folder)?;
        let mut partial = tempfile::Builder::new().prefix(".").suffix(PARTIAL).tempfile_in(&self.folder)?;
        partial.write_all(binary)?;
        partial.write_all(&trailer(binary, resources, id))?;
        let path = self.path(id, extension);
        partial.persist(&path).map_err(|failed| failed.error)?;
        self.trim(&path);
        Ok(path)
    }

    /// Entries and their bytes.
    pub(super) fn size(&self) -> (usize, u64) {
        let files = self.files();
        (files.len(), files.iter().map(|file| file.bytes).sum())
    }

    /// Removes what was used longest ago until the rest is within the limit; `keep` stays.
    fn trim(&self, keep: &Path) {
        let mut files = self.files();
        let mut total: u64 = files.iter().map(|file| file.bytes).sum();
        files.sort_by_key(|file| file.used);
        for file in files.iter().filter(|file| file.path != keep) {
            if total <= self.limit {
                break;
            }
            // Another process may have removed it; a process that has it open keeps what it opened.
            let _ = fs::remove_file(&file.path);
            total -= file.bytes;
        }
    }

    /// The entries' files; partial ones that nobody writes any more are removed on the way.
    fn files(&self) -> Vec<Kept> {
        let Ok(entries) = fs::read_dir(&self.folder) else { return Vec::new() };
        let mut files = Vec::new();
        for entry in entries.flatten() {
            let Ok(about) = entry.metadata() else { continue };
            let used = about.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            let path = entry.path();
            let name = entry.file_name();
            if name.to_string_lossy().ends_with(PARTIAL) {
                if used.elapsed().is_ok_and(|age| age > ABANDONED) {
                    let _ = fs::remove_file(&path);
                }
            } else if about.is_file() {
                files.push(Kept { path, bytes: about.len(), used });
            }
        }
        files
    }
}

struct Kept {
    path: PathBuf,
    bytes: u64,
    used: SystemTime,
}

fn folder(variable: &dyn Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let path = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let base = path("MSTAR_CACHE_DIR")
        .or_else(|| Some(path("XDG_CACHE_HOME").filter(|p| p.is_absolute())?.join("mstar")))
        .or_else(|| Some(path("HOME")?.join(".cache/mstar")))?;
    Some(base.join("kernels"))
}

fn checksum(binary: &[u8], about: &[u8], id: Id) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(id.what.as_bytes()).update(&id.compiler.to_le_bytes()).update(about).update(binary);
    *hasher.finalize().as_bytes()
}

fn trailer(binary: &[u8], resources: Resources, id: Id) -> Vec<u8> {
    let Resources { registers, spill_stores, spill_loads, stack, shared, serialised } = resources;
    let mut bytes = Vec::with_capacity(TRAILER);
    for number in [registers, spill_stores, spill_loads, stack, shared, serialised] {
        bytes.extend(number.to_le_bytes());
    }
    bytes.extend((binary.len() as u64).to_le_bytes());
    bytes.extend(checksum(binary, &bytes, id));
    bytes.extend(MAGIC);
    bytes
}

/// Takes the trailer off; `None` when the file is not the whole entry of this name.
fn unseal(file: &mut Vec<u8>, id: Id) -> Option<Resources> {
    let len = file.len().checked_sub(TRAILER)?;
    let (binary, trailer) = file.split_at(len);
    let (about, rest) = trailer.split_at(32);
    let (sum, magic) = rest.split_at(32);
    let number = |at: usize| u32::from_le_bytes(about[at..at + 4].try_into().expect("four bytes"));
    let told = u64::from_le_bytes(about[24..].try_into().expect("eight bytes"));
    if magic != MAGIC || told != len as u64 || sum != checksum(binary, about, id) {
        return None;
    }
    let resources = Resources {
        registers: number(0),
        spill_stores: number(4),
        spill_loads: number(8),
        stack: number(12),
        shared: number(16),
        serialised: number(20),
    };
    file.truncate(len);
    Some(resources)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;
    use std::thread;

    const ONE: Resources =
        Resources { registers: 168, spill_stores: 1, spill_loads: 2, stack: 3, shared: 4, serialised: 5 };

    fn id(name: &str) -> Id {
        Id::of("compiler", [name])
    }

    #[test]
    fn parts_run_together_are_another_entry() {
        assert_ne!(Id::of("", ["ab", "c"]), Id::of("", ["a", "bc"]));
        assert_ne!(Id::of("", ["ab"]), Id::of("", ["ab", ""]));
        assert_ne!(Id::of("a", ["b"]), Id::of("b", ["b"]));
        assert_eq!(Id::of("", ["ab", "c"]), Id::of("", ["ab", "c"]));
    }

    #[test]
    fn what_was_put_is_got() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(&dir.path().join("made/when/needed"), LIMIT);
        assert_eq!(cache.get(id("a"), "cubin"), None);
        let path = cache.put(id("a"), "cubin", b"\x7fELF...", ONE).unwrap();
        let entry = Entry { path: path.clone(), binary: b"\x7fELF...".to_vec(), resources: ONE };
        assert_eq!(cache.get(id("a"), "cubin"), Some(entry));
        assert_eq!(cache.get(id("a"), "so"), None);
        assert_eq!(cache.get(id("b"), "cubin"), None);
        assert!(fs::read(&path).unwrap().starts_with(b"\x7fELF..."), "a file that tools can open");
        assert_eq!(cache.size(), (1, 7 + TRAILER as u64));
    }

    #[test]
    fn what_another_compiler_made_is_found_where_any_will_do() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path(), LIMIT);
        let id = |compiler: &str| Id::of(compiler, ["a"]);
        let path = cache.put(id("one"), "cubin", b"by one", ONE).unwrap();
        cache.put(Id::of("two", ["b"]), "cubin", b"of another text", ONE).unwrap();
        assert_eq!(cache.get(id("two"), "cubin"), None);
        assert_eq!(cache.get_of_any(id("two"), "cubin").unwrap().binary, b"by one");
        assert_eq!(cache.get_of_any(id("two"), "so"), None);
        fs::write(path, b"torn").unwrap();
        assert_eq!(cache.get_of_any(id("two"), "cubin"), None);
    }

    #[test]
    fn a_corrupt_entry_is_not_there_whatever_became_of_it() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path(), LIMIT);
        let path = cache.put(id("a"), "cubin", b"a binary", ONE).unwrap();
        let whole = fs::read(&path).unwrap();
        for len in 0..whole.len() {
            fs::write(&path, &whole[..len]).unwrap();
            assert_eq!(cache.get(id("a"), "cubin"), None, "cut to {len} bytes");
        }
        for at in 0..whole.len() {
            let mut bent = whole.clone();
            bent[at] ^= 1;
            fs::write(&path, bent).unwrap();
            assert_eq!(cache.get(id("a"), "cubin"), None, "byte {at} is another");
        }
        // The entry of another name, whole as it is.
        let other = cache.put(id("b"), "cubin", b"another", ONE).unwrap();
        fs::copy(&other, &path).unwrap();
        assert_eq!(cache.get(id("a"), "cubin"), None);
        cache.put(id("a"), "cubin", b"a binary", ONE).unwrap();
        assert_eq!(cache.get(id("a"), "cubin").unwrap().binary, b"a binary");
    }

    #[test]
    fn what_was_used_longest_ago_makes_room() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path(), 3 * (100 + TRAILER as u64));
        let age = |name: &str, seconds: u64| {
            let file = File::open(cache.path(id(name), "cubin")).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(seconds)).unwrap();
        };
        for (name, seconds) in [("a", 300), ("b", 200), ("c", 100)] {
            cache.put(id(name), "cubin", &[1; 100], ONE).unwrap();
            age(name, seconds);
        }
        assert!(cache.get(id("a"), "cubin").is_some(), "used, and so the newest");
        cache.put(id("d"), "cubin", &[1; 100], ONE).unwrap();
        let there = |name: &str| cache.path(id(name), "cubin").exists();
        assert_eq!(["a", "b", "c", "d"].map(there), [true, false, true, true]);
        // One that is larger than all the room is kept, and everything else goes.
        cache.put(id("e"), "cubin", &[1; 1000], ONE).unwrap();
        assert_eq!(["a", "c", "d", "e"].map(there), [false, false, false, true]);
    }

    #[test]
    fn a_partial_file_of_a_killed_process_is_removed_and_a_fresh_one_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path(), LIMIT);
        let (old, new) = (dir.path().join(".old.partial"), dir.path().join(".new.partial"));
        for path in [&old, &new] {
            fs::write(path, b"half").unwrap();
        }
        let before = SystemTime::now() - ABANDONED - Duration::from_secs(1);
        File::open(&old).unwrap().set_modified(before).unwrap();
        cache.put(id("a"), "cubin", b"whole", ONE).unwrap();
        assert!(!old.exists() && new.exists());
        assert_eq!(cache.size().0, 1);
    }

    #[test]
    fn writers_and_readers_at_once_see_whole_entries() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path(), LIMIT);
        let binary = vec![7u8; 100_000];
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20 {
                        cache.put(id("a"), "so", &binary, ONE).unwrap();
                        assert_eq!(cache.get(id("a"), "so").expect("it is there").binary, binary);
                    }
                });
            }
        });
        assert_eq!(cache.size().0, 1);
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_an_error_and_no_panic() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, b"").unwrap();
        let cache = Cache::at(&file.join("kernels"), LIMIT);
        assert_eq!(cache.get(id("a"), "cubin"), None);
        assert!(cache.put(id("a"), "cubin", b"x", ONE).is_err());
        assert_eq!(cache.size(), (0, 0));
    }

    #[test]
    fn the_folder_is_the_users_choice_then_the_systems() {
        let with = |variables: &[(&'static str, &str)]| {
            let variables: HashMap<&str, OsString> =
                variables.iter().map(|(name, value)| (*name, (*value).into())).collect();
            folder(&|name| variables.get(name).cloned()).map(|path| path.display().to_string())
        };
        let all = [("MSTAR_CACHE_DIR", "/m"), ("XDG_CACHE_HOME", "/x"), ("HOME", "/h")];
        assert_eq!(with(&all).as_deref(), Some("/m/kernels"));
        assert_eq!(with(&all[1..]).as_deref(), Some("/x/mstar/kernels"));
        assert_eq!(with(&all[2..]).as_deref(), Some("/h/.cache/mstar/kernels"));
        assert_eq!(with(&[]), None);
        let odd = [("MSTAR_CACHE_DIR", ""), ("XDG_CACHE_HOME", "relative"), ("HOME", "/h")];
        assert_eq!(with(&odd).as_deref(), Some("/h/.cache/mstar/kernels"), "as the base directory rules say");
    }
}
