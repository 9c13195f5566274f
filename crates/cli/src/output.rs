//! Files that the program writes: found writable before the work, complete when they appear.
//!
//! What is written goes to a new file in the target's folder, which takes the target's place once it is whole: whoever
//! stops the program half-way finds the earlier file as it was. A target that is no file, such as `/dev/null` or a pipe, is
//! written as it comes.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use tempfile::NamedTempFile;

/// A file that is being written.
#[derive(Debug)]
pub(crate) struct Output {
    to: To,
}

#[derive(Debug)]
enum To {
    /// No file of a disk: written in place.
    Device(BufWriter<File>),
    /// The target, and the file that will become it; made by the first byte, so that a target of which only the end is
    /// written leaves nothing behind however the program ends.
    Beside { target: PathBuf, partial: Option<BufWriter<NamedTempFile>> },
}

impl Output {
    /// Finds `path` writable; it is not touched before [`Output::finish`].
    ///
    /// # Errors
    /// A folder that is missing or takes no file, a file that may not be written, a directory.
    pub(crate) fn open(path: &Path) -> anyhow::Result<Output> {
        Output::try_open(path).with_context(|| format!("{}: cannot be written", path.display()))
    }

    fn try_open(path: &Path) -> anyhow::Result<Output> {
        let to = match fs::metadata(path) {
            Ok(there) => {
                ensure!(!there.is_dir(), "it is a directory");
                // Not truncated: a file that its owner made read-only is refused, although its folder would take another.
                let opened = OpenOptions::new().append(true).open(path)?;
                // What the program's own stdout was redirected to is added to, not replaced behind its back.
                if there.is_file() && !path.starts_with("/dev") {
                    // Behind a link, the file that it points to is replaced, not the link.
                    To::Beside { target: path.canonicalize()?, partial: None }
                } else {
                    To::Device(BufWriter::new(opened))
                }
            }
            Err(missing) if missing.kind() == io::ErrorKind::NotFound => {
                To::Beside { target: path.to_owned(), partial: None }
            }
            Err(other) => return Err(other.into()),
        };
        if let To::Beside { target, .. } = &to {
            drop(beside(target).context("its folder takes no new file")?);
        }
        Ok(Output { to })
    }

    /// Completes the file and puts it in its place.
    ///
    /// # Errors
    /// What could not be written; the target is then as it was.
    pub(crate) fn finish(self) -> io::Result<()> {
        match self.to {
            To::Device(mut out) => out.flush(),
            To::Beside { target, partial } => {
                let partial = match partial {
                    Some(partial) => partial.into_inner().map_err(io::IntoInnerError::into_error)?,
                    None => beside(&target)?,
                };
                if let Ok(there) = fs::metadata(&target) {
                    partial.as_file().set_permissions(there.permissions())?;
                }
                partial.persist(&target).map_err(|failed| failed.error)?;
                Ok(())
            }
        }
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.to {
            To::Device(out) => out.write(bytes),
            To::Beside { partial: Some(out), .. } => out.write(bytes),
            To::Beside { target, partial } => partial.insert(BufWriter::new(beside(target)?)).write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.to {
            To::Device(out) => out.flush(),
            To::Beside { partial, .. } => partial.as_mut().map_or(Ok(()), Write::flush),
        }
    }
}

/// A new file in the folder of `target`, removed unless it is kept; its name says what it is a part of.
fn beside(target: &Path) -> io::Result<NamedTempFile> {
    let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut prefix = std::ffi::OsString::from(".");
    prefix.push(target.file_name().ok_or_else(|| io::Error::other("it names no file"))?);
    prefix.push(".");
    let mut builder = tempfile::Builder::new();
    builder.prefix(&prefix).suffix(".partial");
    #[cfg(unix)]
    {
        // As any new file, rather than a secret: the umask takes off what it takes off.
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    builder.tempfile_in(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut all: Vec<_> =
            fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        all.sort();
        all
    }

    #[test]
    fn an_earlier_file_stays_whole_until_the_new_one_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.json");
        fs::write(&path, "earlier").unwrap();
        let mut out = Output::open(&path).unwrap();
        assert_eq!(names(dir.path()), ["x.json"]);
        out.write_all(b"new").unwrap();
        out.flush().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "earlier");
        drop(out);
        assert_eq!(names(dir.path()), ["x.json"], "what was given up is removed");
        let mut out = Output::open(&path).unwrap();
        out.write_all(b"new").unwrap();
        out.finish().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(names(dir.path()), ["x.json"]);
    }

    #[test]
    fn what_cannot_be_written_is_refused_at_the_start_and_nothing_is_left() {
        let dir = tempfile::tempdir().unwrap();
        for bad in [dir.path().to_owned(), dir.path().join("none/x"), PathBuf::new()] {
            let error = Output::open(&bad).unwrap_err().to_string();
            assert!(error.contains("cannot be written"), "{error}");
        }
        Output::open(&dir.path().join("x")).unwrap();
        assert!(names(dir.path()).is_empty());
        Output::open(&dir.path().join("x")).unwrap().finish().unwrap();
        assert_eq!(names(dir.path()), ["x"], "an empty output is an empty file");
    }

    #[cfg(unix)]
    #[test]
    fn links_and_permissions_are_kept_and_devices_are_written_in_place() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let (real, link) = (dir.path().join("real"), dir.path().join("link"));
        fs::write(&real, "earlier").unwrap();
        fs::set_permissions(&real, fs::Permissions::from_mode(0o640)).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        let mut out = Output::open(&link).unwrap();
        out.write_all(b"new").unwrap();
        out.finish().unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_to_string(&real).unwrap(), "new");
        assert_eq!(fs::metadata(&real).unwrap().permissions().mode() & 0o777, 0o640);
        let mut null = Output::open(Path::new("/dev/null")).unwrap();
        null.write_all(b"gone").unwrap();
        null.finish().unwrap();
    }
}
