//! YAML text into a [`Node`] tree. The only file of this crate that knows a YAML crate.
//!
//! Events carry line and column, so they are read straight (`serde_yaml::granit_parser`, the parser under the
//! deserializer), and every limit is checked before the thing it limits is built: a file is at most 1 MiB, a tree at
//! most 10,000 values and 2 MiB of text with every alias written out, 16 levels deep. One document a file. Tags,
//! merge keys and keys that are not plain words are refused: nothing in a spec needs them.

use std::collections::HashMap;

use serde_yaml::granit_parser::{ErrorKind, Event, Parser, ScalarStyle, ScanError, Span};

use super::node::{Entry, clip};
use super::{Faults, Node, Place, Scalar, SpecError, Value};

/// Bytes of a file.
pub const MAX_BYTES: usize = 1 << 20;
/// Values of a tree, aliases written out.
const MAX_NODES: usize = 10_000;
/// Bytes of text of a tree, aliases written out.
const MAX_TEXT: usize = 2 << 20;
/// Maps and lists inside one another.
const MAX_DEPTH: usize = 16;
/// Bytes of a key.
const MAX_KEY: usize = 64;

/// Reads one document whose root is a map. Duplicate keys are reported to `faults`; what cannot be read at all is the
/// error.
///
/// # Errors
/// Bytes that are not UTF-8, text that is not YAML, another number of documents than one, a root that is not a map, or
/// a limit of this module.
pub fn read(bytes: &[u8], faults: &Faults) -> Result<Node, SpecError> {
    let whole =
        |line: usize, column: usize, why: String| SpecError { path: String::new(), line, column, why };
    if bytes.len() > MAX_BYTES {
        return Err(whole(
            0,
            0,
            format!("expected at most {MAX_BYTES} bytes, got more; a spec is a short text"),
        ));
    }
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let before = &bytes[..error.valid_up_to()];
        let line = before.iter().filter(|&&b| b == b'\n').count() + 1;
        let column = before.iter().rev().take_while(|&&b| b != b'\n').count() + 1;
        whole(line, column, "not UTF-8 text; is this a YAML file?".into())
    })?;
    match document(text, faults)? {
        None => Err(whole(0, 0, "the file is empty; see specs/quickstart.yaml for a spec".into())),
        Some(root) => match root.value() {
            Value::Map(_) => Ok(root.rooted("")),
            _ => Err(root.error(format!(
                "expected a map of keys such as `model` and `resources`, got {}",
                root.describe()
            ))),
        },
    }
}

/// Reads one value, such as the right side of `--set graph.buckets=[1, 8]`.
///
/// # Errors
/// As [`read`], without the root having to be a map; the place is that of a value from the command line.
pub fn value(text: &str, faults: &Faults) -> Result<Node, SpecError> {
    if text.len() > MAX_BYTES {
        return Err(SpecError {
            path: String::new(),
            line: 0,
            column: 0,
            why: "the value is too long".into(),
        });
    }
    let mut node = document(text, faults)?.unwrap_or_else(|| Node::new(Place::default(), Value::Null));
    node.forget_places();
    Ok(node)
}

/// A map or list that is not closed yet.
enum Open {
    List(Vec<Node>),
    Map { entries: Vec<Entry>, first: HashMap<String, Place>, key: Option<(String, Place)> },
}

struct Frame {
    place: Place,
    anchor: usize,
    open: Open,
}

/// A finished subtree that an alias may repeat, with what repeating it costs.
struct Anchored {
    node: Node,
    nodes: usize,
    text: usize,
    height: usize,
}

#[derive(Default)]
struct Builder {
    stack: Vec<Frame>,
    anchors: HashMap<usize, Anchored>,
    nodes: usize,
    text: usize,
    root: Option<Node>,
}

fn document(text: &str, faults: &Faults) -> Result<Option<Node>, SpecError> {
    let mut builder = Builder::default();
    let mut documents = 0;
    let options = serde_yaml::granit_parser::options! {
        emit_comments: false,
        disallow_directives: true,
        flow_nesting_limit: MAX_DEPTH + 1,
        block_nesting_limit: MAX_DEPTH + 1,
    };
    for event in Parser::new_from_str_with_options(text, options) {
        let (event, span) = event.map_err(unreadable)?;
        let place = place(&span);
        match event {
            Event::DocumentStart(..) => {
                documents += 1;
                if documents > 1 {
                    return Err(refuse(place, "a second document begins here; a spec is one document"));
                }
            }
            Event::Scalar(text, style, anchor, tag) => {
                untagged(place, tag.is_some())?;
                builder.scalar(place, &text, style, anchor, faults)?;
            }
            Event::SequenceStart(_, anchor, tag) => {
                untagged(place, tag.is_some())?;
                builder.open(place, anchor, Open::List(Vec::new()))?;
            }
            Event::MappingStart(_, anchor, tag) => {
                untagged(place, tag.is_some())?;
                let open = Open::Map { entries: Vec::new(), first: HashMap::new(), key: None };
                builder.open(place, anchor, open)?;
            }
            Event::SequenceEnd | Event::MappingEnd => builder.close(faults)?,
            Event::Alias(anchor) => builder.alias(place, anchor, faults)?,
            _ => {}
        }
    }
    Ok(builder.root)
}

impl Builder {
    fn scalar(
        &mut self,
        place: Place,
        text: &str,
        style: ScalarStyle,
        anchor: usize,
        faults: &Faults,
    ) -> Result<(), SpecError> {
        let plain = style == ScalarStyle::Plain;
        if let Some(Frame { open: Open::Map { key: key @ None, .. }, .. }) = self.stack.last_mut() {
            if text == "<<" && plain {
                return Err(refuse(place, "merge keys are not read; write the keys out"));
            }
            if text.is_empty() || text.len() > MAX_KEY || (plain && text == "~") {
                return Err(refuse(place, format!("expected a key of 1 to {MAX_KEY} bytes")));
            }
            *key = Some((text.to_string(), place));
            return Ok(());
        }
        let value = if plain && matches!(text, "" | "~" | "null" | "Null" | "NULL") {
            Value::Null
        } else {
            Value::Scalar(Scalar { text: text.to_string(), quoted: !plain })
        };
        self.spend(place, 1, text.len())?;
        self.add(Node::new(place, value), anchor, faults)
    }

    fn open(&mut self, place: Place, anchor: usize, open: Open) -> Result<(), SpecError> {
        if let Some(Frame { open: Open::Map { key: None, .. }, .. }) = self.stack.last() {
            return Err(refuse(place, "expected a word as key, got a map or list"));
        }
        if self.stack.len() >= MAX_DEPTH {
            return Err(refuse(place, too_deep()));
        }
        self.spend(place, 1, 0)?;
        self.stack.push(Frame { place, anchor, open });
        Ok(())
    }

    fn close(&mut self, faults: &Faults) -> Result<(), SpecError> {
        let Some(Frame { place, anchor, open }) = self.stack.pop() else { return Ok(()) };
        let value = match open {
            Open::List(items) => Value::List(items),
            Open::Map { entries, .. } => Value::Map(entries),
        };
        self.add(Node::new(place, value), anchor, faults)
    }

    fn alias(&mut self, place: Place, anchor: usize, faults: &Faults) -> Result<(), SpecError> {
        if let Some(Frame { open: Open::Map { key: None, .. }, .. }) = self.stack.last() {
            return Err(refuse(place, "expected a word as key, got an alias"));
        }
        let Some(found) = self.anchors.get(&anchor) else {
            return Err(refuse(place, "an alias inside the value that it repeats"));
        };
        if self.stack.len() + found.height > MAX_DEPTH {
            return Err(refuse(place, too_deep()));
        }
        let (nodes, text) = (found.nodes, found.text);
        self.spend(place, nodes, text)?;
        let copy = self.anchors[&anchor].node.clone();
        self.add(copy, 0, faults)
    }

    /// Counts what is about to be built against the limits.
    fn spend(&mut self, place: Place, nodes: usize, text: usize) -> Result<(), SpecError> {
        self.nodes = self.nodes.saturating_add(nodes);
        self.text = self.text.saturating_add(text);
        if self.nodes > MAX_NODES {
            return Err(refuse(place, format!("more than {MAX_NODES} values, aliases written out")));
        }
        if self.text > MAX_TEXT {
            return Err(refuse(place, format!("more than {MAX_TEXT} bytes of text, aliases written out")));
        }
        Ok(())
    }

    fn add(&mut self, node: Node, anchor: usize, faults: &Faults) -> Result<(), SpecError> {
        if anchor > 0 {
            let (nodes, text, height) = node.size();
            // A copy is kept for the aliases, so it is paid for like one.
            self.spend(node.place(), nodes, text)?;
            self.anchors.insert(anchor, Anchored { node: node.clone(), nodes, text, height });
        }
        let path = self.path();
        match self.stack.last_mut() {
            None => self.root = Some(node),
            Some(Frame { open: Open::List(items), .. }) => items.push(node),
            Some(Frame { open: Open::Map { entries, first, key }, .. }) => {
                let (key, place) = key.take().expect("a value follows its key");
                match first.get(&key) {
                    Some(at) => faults.push(SpecError {
                        path: clip(&super::node::join(&path, &key)),
                        line: place.line,
                        column: place.column,
                        why: format!("given twice; the first is on line {}", at.line),
                    }),
                    None => {
                        first.insert(key.clone(), place);
                        entries.push(Entry { key, place, value: node });
                    }
                }
            }
        }
        Ok(())
    }

    /// The path of the innermost map that is open, for messages.
    fn path(&self) -> String {
        let mut path = String::new();
        for frame in self.stack.iter().take(self.stack.len().saturating_sub(1)) {
            match &frame.open {
                Open::Map { key: Some((key, _)), .. } => path = super::node::join(&path, key),
                Open::Map { .. } => {}
                Open::List(items) => path = format!("{path}[{}]", items.len()),
            }
        }
        path
    }
}

fn place(span: &Span) -> Place {
    Place { line: span.start.line(), column: span.start.col() + 1 }
}

fn refuse(place: Place, why: impl Into<String>) -> SpecError {
    SpecError { path: String::new(), line: place.line, column: place.column, why: why.into() }
}

fn untagged(place: Place, tagged: bool) -> Result<(), SpecError> {
    if tagged { Err(refuse(place, "tags are not read; write the value alone")) } else { Ok(()) }
}

fn unreadable(error: ScanError) -> SpecError {
    let at = error.marker();
    let place = Place { line: at.line().max(1), column: at.col() + 1 };
    match error.kind() {
        ErrorKind::RecursionLimitExceeded => refuse(place, too_deep()),
        _ => refuse(place, format!("not YAML: {}", clip_long(&error.info()))),
    }
}

fn too_deep() -> String {
    format!("more than {MAX_DEPTH} maps and lists inside one another")
}

/// The parser's message on one line.
fn clip_long(text: &str) -> String {
    text.chars().take(120).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests;
