//! Which files an argument means.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A file to judge, or an argument or folder that gives none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    /// The name that it is reported and dumped under: the argument's last component, and the path below it.
    pub(super) label: PathBuf,
    /// Where it is.
    pub(super) path: PathBuf,
    /// Why there is nothing to read, if so.
    pub(super) fault: Option<String>,
}

/// Every `*.safetensors` below the arguments that are folders, sorted, and every argument that is not one.
/// A folder is read once, however many links lead to it.
pub(super) fn find(arguments: &[PathBuf]) -> Vec<Found> {
    let mut found = Vec::new();
    for argument in arguments {
        // `..` and `/` have no name of their own; what they resolve to has.
        let resolved = argument.canonicalize();
        let name = argument.file_name().or_else(|| resolved.as_deref().ok().and_then(Path::file_name));
        let label = name.map_or_else(|| argument.clone(), PathBuf::from);
        if !argument.is_dir() {
            found.push(Found { label, path: argument.clone(), fault: None });
            continue;
        }
        let before = found.len();
        walk(argument, &label, &mut BTreeSet::new(), &mut found);
        if found.len() == before {
            let fault = Some("a folder without any .safetensors file".into());
            found.push(Found { label, path: argument.clone(), fault });
        }
    }
    found
}

fn walk(folder: &Path, label: &Path, seen: &mut BTreeSet<PathBuf>, found: &mut Vec<Found>) {
    let unreadable = |error: std::io::Error| Found {
        label: label.to_owned(),
        path: folder.to_owned(),
        fault: Some(format!("cannot be read: {error}")),
    };
    match folder.canonicalize() {
        // Links may run in circles.
        Ok(real) if !seen.insert(real.clone()) => return,
        Ok(_) => {}
        Err(error) => return found.push(unreadable(error)),
    }
    let entries: Result<Vec<PathBuf>, std::io::Error> =
        std::fs::read_dir(folder).and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect());
    let mut entries = match entries {
        Ok(entries) => entries,
        Err(error) => return found.push(unreadable(error)),
    };
    entries.sort();
    for path in entries {
        let label = label.join(path.file_name().unwrap_or_default());
        if path.is_dir() {
            walk(&path, &label, seen, found);
        } else if path.extension().is_some_and(|extension| extension == "safetensors") {
            found.push(Found { label, path, fault: None });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(found: &[Found]) -> Vec<String> {
        found.iter().map(|f| f.label.display().to_string()).collect()
    }

    #[test]
    fn folders_are_walked_in_order_and_other_files_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("cases");
        std::fs::create_dir_all(root.join("b/deep")).unwrap();
        for name in ["z.safetensors", "a.safetensors", "notes.md", "b/deep/c.safetensors"] {
            std::fs::write(root.join(name), "").unwrap();
        }
        let found = find(std::slice::from_ref(&root));
        assert_eq!(
            labels(&found),
            ["cases/a.safetensors", "cases/b/deep/c.safetensors", "cases/z.safetensors"]
        );
        let file = root.join("notes.md");
        assert_eq!(labels(&find(std::slice::from_ref(&file))), ["notes.md"]);
        assert!(find(&[dir.path().join("missing")])[0].fault.is_none(), "reading it will say what is wrong");
    }

    #[test]
    fn an_empty_folder_is_a_fault() {
        let dir = tempfile::tempdir().unwrap();
        let found = find(&[dir.path().to_owned()]);
        assert!(found[0].fault.as_deref().unwrap().contains("without any"));
    }

    #[cfg(unix)]
    #[test]
    fn links_in_circles_end() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("cases");
        std::fs::create_dir_all(root.join("sub")).unwrap();
        std::fs::write(root.join("sub/a.safetensors"), "").unwrap();
        std::os::unix::fs::symlink(&root, root.join("sub/loop")).unwrap();
        std::os::unix::fs::symlink("nowhere", root.join("gone.safetensors")).unwrap();
        assert_eq!(labels(&find(&[root])), ["cases/gone.safetensors", "cases/sub/a.safetensors"]);
    }
}
