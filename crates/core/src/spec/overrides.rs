//! `--set key.path=value`: one value of a spec replaced, or added, from the command line.
//!
//! The value is plain text, as after `key: ` in the file; one that begins with a quote or a bracket is read as YAML. The
//! key is not judged here: the spec's reader refuses an override that names no key of a spec, as it would in the file.

use super::node::{Entry, clip};
use super::yaml;
use super::{Faults, Node, Place, Scalar, SpecError, Value};

/// Applies one `path=value` to the root of a spec.
///
/// # Errors
/// No `=`, an empty part in the path, a path through something that is not a map, or a value that is not YAML.
pub fn set(root: &mut Node, assignment: &str) -> Result<(), SpecError> {
    let refuse = |path: &str, why: String| SpecError { path: clip(path), line: 0, column: 0, why };
    let Some((path, text)) = assignment.split_once('=') else {
        return Err(refuse(assignment, "expected key=value, such as workload.requests=20".into()));
    };
    let keys: Vec<&str> = path.trim().split('.').collect();
    if keys.iter().any(|key| key.is_empty() || key.len() > 64) || keys.len() > 8 {
        return Err(refuse(path, "expected a key path such as resources.kv.page_size".into()));
    }
    let new = read_value(path, text.trim())?;
    let mut at = &mut *root;
    for (depth, key) in keys.iter().enumerate() {
        if *at.value() == Value::Null {
            *at.value_mut() = Value::Map(Vec::new());
        }
        let (above, found) = (at.path().to_string(), at.describe());
        let Value::Map(entries) = at.value_mut() else {
            return Err(refuse(path, format!("{} is {found}, which has no keys", clip(&above))));
        };
        let index = match entries.iter().position(|entry| entry.key == *key) {
            Some(index) => index,
            None => {
                let value = Node::new(Place::default(), Value::Null);
                entries.push(Entry { key: (*key).to_string(), place: Place::default(), value });
                entries.len() - 1
            }
        };
        let entry = &mut entries[index];
        if depth + 1 == keys.len() {
            entry.place = Place::default();
            entry.value = new;
            break;
        }
        at = &mut entry.value;
    }
    let whole = std::mem::replace(root, Node::new(Place::default(), Value::Null));
    *root = whole.rooted("");
    Ok(())
}

fn read_value(path: &str, text: &str) -> Result<Node, SpecError> {
    if !text.starts_with(['[', '{', '"', '\'']) {
        let value = match text {
            "" | "~" | "null" => Value::Null,
            _ => Value::Scalar(Scalar { text: text.to_string(), quoted: false }),
        };
        return Ok(Node::new(Place::default(), value));
    }
    let faults = Faults::new();
    let at_path = |error: SpecError| SpecError { path: clip(path), line: 0, column: 0, why: error.why };
    let node = yaml::value(text, &faults).map_err(at_path)?;
    match faults.settle(path) {
        Ok(()) => Ok(node),
        Err(errors) => Err(at_path(errors.list.into_iter().next().expect("settle refuses with a fault"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(text: &str) -> Node {
        yaml::read(text.as_bytes(), &Faults::new()).unwrap()
    }

    #[test]
    fn a_value_is_replaced_or_added() {
        let mut root = tree("workload: {file: a.csv}\nresources:\n");
        set(&mut root, "workload.file=/data/x=y #1.csv").unwrap();
        set(&mut root, "resources.kv.page_size = 16").unwrap();
        set(&mut root, "graph.buckets=[1, 8]").unwrap();
        let text = |path: &[&str]| {
            let node = path.iter().try_fold(&root, |at, key| at.get(key));
            node.map(Node::describe)
        };
        assert_eq!(text(&["workload", "file"]).as_deref(), Some("/data/x=y #1.csv"));
        assert_eq!(text(&["resources", "kv", "page_size"]).as_deref(), Some("16"));
        assert_eq!(text(&["graph", "buckets"]).as_deref(), Some("a list of 2"));
        assert_eq!(root.get("graph").unwrap().get("buckets").unwrap().path(), "graph.buckets");
    }

    #[test]
    fn what_is_no_assignment_is_refused() {
        let check = |assignment: &str, expected: &str| {
            let mut root = tree("workload: {file: a.csv}\n");
            assert_eq!(set(&mut root, assignment).unwrap_err().to_string(), expected);
        };
        check("workload", "--set workload: expected key=value, such as workload.requests=20");
        check("a..b=1", "--set a..b: expected a key path such as resources.kv.page_size");
        check("workload.file.x=1", "--set workload.file.x: workload.file is a.csv, which has no keys");
        check("graph.buckets=[1", "--set graph.buckets: not YAML: unclosed bracket '['");
        check("graph={slots: 1, slots: 2}", "--set graph: given twice; the first is on line 1");
    }
}
