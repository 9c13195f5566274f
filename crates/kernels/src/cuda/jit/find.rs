//! Where the CUDA run-time compiler may lie.
//!
//! In order: `$MSTAR_NVRTC` (a file or a folder; then nothing else is tried), the loader's own path, the folders of
//! CUDA's installers, and the wheels of Python environments.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

/// What to say when there is none.
pub const CURE: &str = "`pip install nvidia-cuda-nvrtc` brings one, and MSTAR_NVRTC names a file or folder";

/// Names under the loader's path, newest first.
const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

/// The surroundings that a search depends on.
pub(super) struct Surroundings<'a> {
    /// Reads an environment variable; unset and empty are alike.
    pub(super) variable: &'a dyn Fn(&str) -> Option<OsString>,
    /// What absolute folders lie under: `/`, or a test's folder.
    pub(super) root: &'a Path,
}

/// Where to look.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Places {
    /// What to try to load, best first: a bare name is left to the loader.
    pub(super) candidates: Vec<PathBuf>,
    /// The places as told to the user.
    pub(super) looked: Vec<String>,
}

impl Surroundings<'_> {
    fn path(&self, variable: &str) -> Option<PathBuf> {
        (self.variable)(variable).filter(|value| !value.is_empty()).map(PathBuf::from)
    }

    /// Where to look for NVRTC here.
    pub(super) fn places(&self) -> Places {
        if let Some(named) = self.path("MSTAR_NVRTC") {
            let candidates = if named.is_dir() { in_folder(&named) } else { vec![named.clone()] };
            return Places { candidates, looked: vec![format!("MSTAR_NVRTC={}", named.display())] };
        }
        let mut candidates: Vec<PathBuf> = NAMES.iter().map(PathBuf::from).collect();
        let mut looked = vec!["the loader's path".to_string()];
        let mut look = |told: &str, folders: Vec<PathBuf>| {
            for library in folders.iter().flat_map(|folder| in_folder(folder)) {
                if !candidates.contains(&library) {
                    candidates.push(library);
                }
            }
            looked.push(told.to_string());
        };
        for variable in ["CUDA_HOME", "CUDA_PATH"] {
            if let Some(home) = self.path(variable) {
                look(&format!("{variable}={}", home.display()), toolkit(&home));
            }
        }
        let local = self.root.join("usr/local");
        look(
            "/usr/local/cuda*",
            named_like(&local, "cuda").iter().rev().flat_map(|home| toolkit(home)).collect(),
        );
        let distribution = ["usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64"];
        look("/usr/lib", distribution.iter().map(|folder| self.root.join(folder)).collect());
        for variable in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
            if let Some(prefix) = self.path(variable) {
                look(&format!("{variable}={}", prefix.display()), wheels(&prefix));
            }
        }
        if let Some(home) = self.path("HOME") {
            look("~/.local/lib/python3*", wheels(&home.join(".local")));
            let versions = named_like(&home.join(".pyenv/versions"), "");
            look("~/.pyenv/versions", versions.iter().rev().flat_map(|prefix| wheels(prefix)).collect());
        }
        let system = [local, self.root.join("usr")];
        look("/usr/lib/python3*", system.iter().flat_map(|prefix| wheels(prefix)).collect());
        let opt = named_like(&self.root.join("opt"), "");
        let prefixes =
            opt.iter().flat_map(|prefix| [prefix.clone(), prefix.join(".venv"), prefix.join("venv")]);
        look("/opt", prefixes.flat_map(|prefix| wheels(&prefix)).collect());
        Places { candidates, looked }
    }
}

/// The library folders of a CUDA toolkit.
fn toolkit(home: &Path) -> Vec<PathBuf> {
    ["lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib", "lib"].map(|lib| home.join(lib)).into()
}

/// The library folders of NVIDIA's wheels under a Python prefix.
fn wheels(prefix: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for python in named_like(&prefix.join("lib"), "python3").iter().rev() {
        for packages in ["site-packages", "dist-packages"] {
            let nvidia = python.join(packages).join("nvidia");
            found.extend(named_like(&nvidia, "").into_iter().rev().map(|package| package.join("lib")));
        }
    }
    found
}

/// The entries of a folder whose names begin so, in the order of the numbers in them.
fn named_like(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut found: Vec<PathBuf> = entries.filter_map(|entry| entry.ok().map(|entry| entry.path())).collect();
    found.retain(|path| name_of(path).starts_with(prefix));
    found.sort_by_key(|path| (numbers(name_of(path)), path.clone()));
    found
}

/// The NVRTC libraries of one folder, newest first.
fn in_folder(folder: &Path) -> Vec<PathBuf> {
    let mut found = named_like(folder, "libnvrtc.so");
    found.retain(|path| path.is_file());
    found.reverse();
    found
}

fn name_of(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

/// The numbers in a name, in order: `python3.13` is after `python3.9`.
fn numbers(name: &str) -> Vec<u64> {
    name.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn places(root: &Path, variables: &[(&str, PathBuf)]) -> Places {
        let variables: HashMap<&str, OsString> =
            variables.iter().map(|(name, value)| (*name, value.clone().into_os_string())).collect();
        Surroundings { variable: &|name| variables.get(name).cloned(), root }.places()
    }

    fn touch(path: PathBuf) -> PathBuf {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, b"").unwrap();
        path
    }

    #[test]
    fn every_place_is_looked_into_in_order_and_the_newest_comes_first() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let lib = |path: &str| touch(root.join(path));
        let home = lib("tools/cuda/lib64/libnvrtc.so.12").ancestors().nth(2).unwrap().to_path_buf();
        lib("usr/local/cuda-12.9/lib64/libnvrtc-builtins.so.12.9");
        let expected = [
            home.join("lib64/libnvrtc.so.12"),
            lib("usr/local/cuda-13.0/targets/x86_64-linux/lib/libnvrtc.so.13"),
            lib("usr/local/cuda-12.9/lib64/libnvrtc.so.12.9.86"),
            lib("usr/local/cuda-12.9/lib64/libnvrtc.so.12"),
            lib("usr/lib/x86_64-linux-gnu/libnvrtc.so.12"),
            lib("venv/lib/python3.12/site-packages/nvidia/cu13/lib/libnvrtc.so.13"),
            lib("me/.local/lib/python3.13/site-packages/nvidia/cu13/lib/libnvrtc.so.13"),
            lib("me/.local/lib/python3.9/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"),
            lib("me/.pyenv/versions/3.13.1/lib/python3.13/site-packages/nvidia/cu13/lib/libnvrtc.so.13"),
            lib("usr/lib/python3/dist-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"),
            lib("opt/app/.venv/lib/python3.11/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"),
        ];
        let found = places(
            root,
            &[("CUDA_HOME", home), ("VIRTUAL_ENV", root.join("venv")), ("HOME", root.join("me"))],
        );
        assert_eq!(found.candidates[..3], NAMES.map(PathBuf::from));
        assert_eq!(found.candidates[3..], expected);
        assert!(found.looked.len() >= 8, "{:?}", found.looked);
    }

    #[test]
    fn a_named_file_or_folder_is_the_only_place() {
        let dir = tempfile::tempdir().unwrap();
        let old = touch(dir.path().join("libnvrtc.so.12"));
        let new = touch(dir.path().join("libnvrtc.so.13"));
        touch(dir.path().join("libnvrtc-builtins.so.13.0"));
        let folder = places(dir.path(), &[("MSTAR_NVRTC", dir.path().into())]);
        assert_eq!(folder.candidates, [new, old.clone()]);
        assert_eq!(places(dir.path(), &[("MSTAR_NVRTC", old.clone())]).candidates, [old]);
        let unset = places(dir.path(), &[("MSTAR_NVRTC", PathBuf::new()), ("HOME", dir.path().join("none"))]);
        assert_eq!(unset.candidates, NAMES.map(PathBuf::from), "an empty variable names nothing");
    }
}
