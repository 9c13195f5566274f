//! The value tree that a spec is read into: scalars, lists and maps, each knowing where it stands.
//!
//! Nothing here knows YAML. A backend's factory is handed a [`Node`] and reads its own options from it through
//! [`Fields`](super::Fields), so its messages name the key's path, line and column like everyone else's.

use super::SpecError;

/// Where a node stands in its file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Line, from 1; 0 when the value came from the command line.
    pub line: usize,
    /// Column, from 1.
    pub column: usize,
}

/// A value, its key path and its place.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    path: String,
    place: Place,
    value: Value,
}

/// What a node holds.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Nothing: an empty value, `~` or `null`.
    Null,
    /// Text, a number or a boolean, as it was written.
    Scalar(Scalar),
    /// Values in order.
    List(Vec<Node>),
    /// Keys and values in the order of the file; no key twice.
    Map(Vec<Entry>),
}

/// One key of a map.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// Where the key stands.
    pub place: Place,
    /// Its value.
    pub value: Node,
}

/// A scalar as it was written; what it means is decided by whoever reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scalar {
    /// The text, without quotes.
    pub text: String,
    /// Whether it was quoted: `"16"` is text, never a number.
    pub quoted: bool,
}

impl Node {
    /// A value without a path yet; [`Node::rooted`] gives the whole tree its paths.
    pub fn new(place: Place, value: Value) -> Node {
        Node { path: String::new(), place, value }
    }

    /// The same tree, every node named by its path below `path` (`resources.kv`, `graph.buckets[2]`).
    pub fn rooted(mut self, path: &str) -> Node {
        self.set_path(path.to_string());
        self
    }

    fn set_path(&mut self, path: String) {
        match &mut self.value {
            Value::List(items) => {
                for (index, item) in items.iter_mut().enumerate() {
                    item.set_path(format!("{path}[{index}]"));
                }
            }
            Value::Map(entries) => {
                for entry in entries {
                    entry.value.set_path(join(&path, &entry.key));
                }
            }
            Value::Null | Value::Scalar(_) => {}
        }
        self.path = path;
    }

    /// An empty map: what a section that was left out reads as.
    pub fn empty_map(path: &str, place: Place) -> Node {
        Node::new(place, Value::Map(Vec::new())).rooted(path)
    }

    /// A map of plain scalars at `path`, as from a command line: options that a program writes itself.
    pub fn flat(path: &str, pairs: &[(&str, &str)]) -> Node {
        let scalar = |text: &str| {
            Node::new(Place::default(), Value::Scalar(Scalar { text: text.into(), quoted: false }))
        };
        let entry = |(key, text): &(&str, &str)| Entry {
            key: (*key).into(),
            place: Place::default(),
            value: scalar(text),
        };
        Node::new(Place::default(), Value::Map(pairs.iter().map(entry).collect())).rooted(path)
    }

    /// The key path, such as `resources.kv.page_size`; empty at the root.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Where the value stands.
    pub fn place(&self) -> Place {
        self.place
    }

    /// The value.
    pub fn value(&self) -> &Value {
        &self.value
    }

    /// The value, for overrides; paths are given anew afterwards.
    #[cfg(feature = "yaml")]
    pub(super) fn value_mut(&mut self) -> &mut Value {
        &mut self.value
    }

    /// Gives the whole tree the place of a value from the command line.
    #[cfg(feature = "yaml")]
    pub(super) fn forget_places(&mut self) {
        self.place = Place::default();
        match &mut self.value {
            Value::List(items) => items.iter_mut().for_each(Node::forget_places),
            Value::Map(entries) => entries.iter_mut().for_each(|entry| {
                entry.place = Place::default();
                entry.value.forget_places();
            }),
            Value::Null | Value::Scalar(_) => {}
        }
    }

    /// Values, bytes of text and levels of the tree.
    #[cfg(feature = "yaml")]
    pub(super) fn size(&self) -> (usize, usize, usize) {
        let children: Vec<(usize, usize, usize)> = match &self.value {
            Value::Null => return (1, 0, 0),
            Value::Scalar(scalar) => return (1, scalar.text.len(), 0),
            Value::List(items) => items.iter().map(Node::size).collect(),
            Value::Map(entries) => entries.iter().map(|e| e.value.size()).collect(),
        };
        children.iter().fold((1, 0, 1), |all, c| (all.0 + c.0, all.1 + c.1, all.2.max(c.2 + 1)))
    }

    /// The value of a map's key.
    pub fn get(&self, key: &str) -> Option<&Node> {
        self.entries()?.iter().find(|entry| entry.key == key).map(|entry| &entry.value)
    }

    /// A map's keys and values.
    pub fn entries(&self) -> Option<&[Entry]> {
        match &self.value {
            Value::Map(entries) => Some(entries),
            _ => None,
        }
    }

    /// A list's values.
    pub fn items(&self) -> Option<&[Node]> {
        match &self.value {
            Value::List(items) => Some(items),
            _ => None,
        }
    }

    /// The scalar as it was written.
    pub fn scalar(&self) -> Option<&Scalar> {
        match &self.value {
            Value::Scalar(scalar) => Some(scalar),
            _ => None,
        }
    }

    /// The map without the given keys: what is left of a resource once the common keys are read.
    pub fn without(&self, keys: &[&str]) -> Node {
        let mut rest = self.clone();
        if let Value::Map(entries) = &mut rest.value {
            entries.retain(|entry| !keys.contains(&entry.key.as_str()));
        }
        rest
    }

    /// The value in words, for "got ...": `16`, `the text "16"`, `a list of 3`, `a map`, `nothing`.
    pub fn describe(&self) -> String {
        match &self.value {
            Value::Null => "nothing".into(),
            Value::Scalar(Scalar { text, quoted: true }) => format!("the text \"{}\"", clip(text)),
            Value::Scalar(Scalar { text, quoted: false }) => clip(text),
            Value::List(items) => format!("a list of {}", items.len()),
            Value::Map(_) => "a map".into(),
        }
    }

    /// A refusal of this value.
    pub fn error(&self, why: impl Into<String>) -> SpecError {
        let path = if self.path.is_empty() { "the spec" } else { &self.path };
        SpecError { path: clip(path), line: self.place.line, column: self.place.column, why: why.into() }
    }
}

/// `path.key`.
pub(super) fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_string() } else { format!("{path}.{key}") }
}

/// Text fit for one line of a message: control characters escaped, and cut after 60 characters.
pub(super) fn clip(text: &str) -> String {
    const MOST: usize = 60;
    let mut out: String = text.chars().take(MOST).flat_map(escape).collect();
    if text.chars().nth(MOST).is_some() {
        out.push_str("...");
    }
    out
}

fn escape(c: char) -> Vec<char> {
    if c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{feff}') {
        c.escape_default().collect()
    } else {
        vec![c]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Node {
        Node::new(Place::default(), Value::Scalar(Scalar { text: text.into(), quoted: false }))
    }

    #[test]
    fn paths_name_keys_and_positions() {
        let list = Node::new(Place::default(), Value::List(vec![text("1"), text("8")]));
        let entry = Entry { key: "buckets".into(), place: Place::default(), value: list };
        let graph = Node::new(Place::default(), Value::Map(vec![entry])).rooted("graph");
        let buckets = graph.get("buckets").unwrap();
        assert_eq!(buckets.path(), "graph.buckets");
        assert_eq!(buckets.items().unwrap()[1].path(), "graph.buckets[1]");
        assert_eq!(graph.without(&["buckets"]).entries().unwrap().len(), 0);
    }

    #[test]
    fn messages_stay_on_one_line() {
        assert_eq!(clip("a\nb\u{1b}[31m\u{202e}c"), "a\\nb\\u{1b}[31m\\u{202e}c");
        assert_eq!(clip(&"x".repeat(1000)).len(), 63);
    }
}
