//! Where the CUDA run-time compiler lies on this machine: looked for, never loaded.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

/// The newest `libnvrtc.so*` in the places that installers use: `$MSTAR_NVRTC` (a file or a folder), `$CUDA_PATH`,
/// `$LD_LIBRARY_PATH`, `/usr/local/cuda`, the distribution's library folders, and the wheels of a Python environment.
pub(crate) fn find() -> Option<PathBuf> {
    if let Some(named) = env::var_os("MSTAR_NVRTC").map(PathBuf::from)
        && named.is_file()
    {
        return Some(named);
    }
    folders().iter().find_map(|folder| newest_in(folder))
}

/// What to say when there is none.
pub(crate) const HOW_TO_GET: &str =
    "not found; `pip install nvidia-cuda-nvrtc-cu12` brings one, and MSTAR_NVRTC names it";

fn folders() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = Vec::new();
    folders.extend(env::var_os("MSTAR_NVRTC").map(PathBuf::from));
    for variable in ["CUDA_PATH", "CUDA_HOME"] {
        folders.extend(env::var_os(variable).map(|root| Path::new(&root).join("lib64")));
    }
    folders.extend(env::var_os("LD_LIBRARY_PATH").iter().flat_map(env::split_paths));
    for folder in
        ["/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64"]
    {
        folders.push(folder.into());
    }
    for variable in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        let Some(root) = env::var_os(variable) else { continue };
        for python in children(&Path::new(&root).join("lib")) {
            folders.push(python.join("site-packages/nvidia/cuda_nvrtc/lib"));
            folders.push(python.join("site-packages/nvidia/cu13/lib"));
        }
    }
    folders
}

fn newest_in(folder: &Path) -> Option<PathBuf> {
    let ours = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.starts_with("libnvrtc.so") && path.is_file()
    };
    children(folder).into_iter().filter(ours).max()
}

fn children(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    entries.filter_map(|entry| entry.ok().map(|entry| entry.path())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_library_of_a_folder_is_found() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc-builtins.so.13.0", "libcudart.so.13"] {
            fs::write(folder.path().join(name), b"").unwrap();
        }
        assert_eq!(newest_in(folder.path()), Some(folder.path().join("libnvrtc.so.13")));
        assert_eq!(newest_in(Path::new("/nonexistent")), None);
    }
}
