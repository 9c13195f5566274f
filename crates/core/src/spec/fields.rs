//! A map read key by key: every key is asked for once, checked, and at the end no key is left over.
//!
//! Faults are gathered, not returned, so that one reading of a file reports all of them. A getter that found a fault
//! answers `None` or its default; the caller goes on and drops what it built, since [`Faults::settle`] refuses.

use std::ops::RangeInclusive;

use super::keys::{self, Section};
use super::node::{Entry, clip, join};
use super::{Faults, Node, Place, SpecError, Value, scalar};

/// The keys of one map.
#[derive(Debug)]
pub struct Fields<'a> {
    node: &'a Node,
    section: &'static Section,
    asked: Vec<&'static str>,
    faults: &'a Faults,
}

impl<'a> Fields<'a> {
    /// The map in `node`, which holds keys of `section` and no others. Another kind of value is a fault, and reads
    /// as an empty map.
    pub fn open(node: &'a Node, section: &'static Section, faults: &'a Faults) -> Fields<'a> {
        if node.entries().is_none() {
            faults.push(node.error(format!(
                "expected a map with keys such as `{}`, got {}",
                section.keys.first().copied().unwrap_or("name"),
                node.describe()
            )));
        }
        Fields { node, section, asked: Vec::new(), faults }
    }

    /// Whether the node is a map at all.
    pub fn is_map(&self) -> bool {
        self.node.entries().is_some()
    }

    /// The node that is read.
    pub fn node(&self) -> &'a Node {
        self.node
    }

    /// A fault of this section that no key of it caused.
    pub fn fault(&self, why: impl Into<String>) {
        self.faults.push(self.node.error(why));
    }

    /// A fault of `key`, at its value where there is one.
    pub fn fault_at(&self, key: &str, why: impl Into<String>) {
        match self.node.get(key) {
            Some(node) => self.faults.push(node.error(why)),
            None => self.faults.push(self.missing_error(key, why.into())),
        }
    }

    /// The value of `key`, as it is.
    pub fn value(&mut self, key: &'static str) -> Option<&'a Node> {
        debug_assert!(self.section.keys.contains(&key), "{key} is not a key of {}", self.section.name);
        self.asked.push(key);
        self.node.get(key)
    }

    /// The value of `key`; a fault when it is not there.
    pub fn required(&mut self, key: &'static str) -> Option<&'a Node> {
        let value = self.value(key);
        // A key that is there under a wrong name is one fault, which `finish` reports.
        let entries = self.node.entries().unwrap_or_default();
        let misspelt = entries.iter().any(|entry| keys::is_misspelt(&entry.key, key, self.section));
        if value.is_none() && self.is_map() && !misspelt {
            self.faults.push(self.missing_error(key, format!("missing; {} needs it", self.section.name)));
        }
        value
    }

    fn missing_error(&self, key: &str, why: String) -> SpecError {
        let Place { line, column } = self.node.place();
        SpecError { path: clip(&join(self.node.path(), key)), line, column, why }
    }

    fn keep<T>(&self, node: &Node, read: Result<T, String>) -> Option<T> {
        read.map_err(|why| self.faults.push(node.error(why))).ok()
    }

    /// A whole number that must be there.
    pub fn count(&mut self, key: &'static str, range: RangeInclusive<u64>) -> Option<usize> {
        let node = self.required(key)?;
        self.keep(node, scalar::whole(node, &range)).map(to_usize)
    }

    /// A whole number, or `default` when the key is not there.
    pub fn count_or(&mut self, key: &'static str, default: usize, range: RangeInclusive<u64>) -> usize {
        let Some(node) = self.value(key) else { return default };
        self.keep(node, scalar::whole(node, &range)).map_or(default, to_usize)
    }

    /// A whole number, or nothing: the key is not there, or says `null`.
    pub fn count_opt(&mut self, key: &'static str, range: RangeInclusive<u64>) -> Option<usize> {
        let node = self.value(key).filter(|node| *node.value() != Value::Null)?;
        self.keep(node, scalar::whole(node, &range)).map(to_usize)
    }

    /// A number, or `default` when the key is not there.
    pub fn number_or(&mut self, key: &'static str, default: f64, range: RangeInclusive<f64>) -> f64 {
        let Some(node) = self.value(key) else { return default };
        self.keep(node, scalar::real(node, &range)).unwrap_or(default)
    }

    /// A number, or nothing: the key is not there, or says `null`.
    pub fn number_opt(&mut self, key: &'static str, range: RangeInclusive<f64>) -> Option<f64> {
        let node = self.value(key).filter(|node| *node.value() != Value::Null)?;
        self.keep(node, scalar::real(node, &range))
    }

    /// A number that must be there.
    pub fn number(&mut self, key: &'static str, range: RangeInclusive<f64>) -> Option<f64> {
        let node = self.required(key)?;
        self.keep(node, scalar::real(node, &range))
    }

    /// `true` or `false`, or `default` when the key is not there.
    pub fn flag_or(&mut self, key: &'static str, default: bool) -> bool {
        let Some(node) = self.value(key) else { return default };
        self.keep(node, scalar::flag(node)).unwrap_or(default)
    }

    /// Text that must be there.
    pub fn text(&mut self, key: &'static str) -> Option<&'a str> {
        let node = self.required(key)?;
        self.keep(node, scalar::text(node))
    }

    /// Text, or nothing when the key is not there.
    pub fn text_opt(&mut self, key: &'static str) -> Option<&'a str> {
        let node = self.value(key)?;
        self.keep(node, scalar::text(node))
    }

    /// One of a few words that must be there.
    pub fn word<T: Copy>(&mut self, key: &'static str, words: &[(&str, T)]) -> Option<T> {
        let node = self.required(key)?;
        self.keep(node, word(node, words))
    }

    /// One of a few words, or `default` when the key is not there.
    pub fn word_or<T: Copy>(&mut self, key: &'static str, default: T, words: &[(&str, T)]) -> T {
        let Some(node) = self.value(key) else { return default };
        self.keep(node, word(node, words)).unwrap_or(default)
    }

    /// One of a few words, or a list of 1 to `most` of them; none when the key is not there.
    pub fn words<T: Copy>(&mut self, key: &'static str, most: usize, words: &[(&str, T)]) -> Vec<T> {
        let Some(node) = self.value(key) else { return Vec::new() };
        let items = match node.scalar() {
            Some(_) => std::slice::from_ref(node),
            None => self.list(node, "words", most).unwrap_or_default(),
        };
        items.iter().filter_map(|item| self.keep(item, word(item, words))).collect()
    }

    /// A list of numbers, at least one and at most `most`; nothing when the key is not there.
    pub fn numbers_opt(
        &mut self,
        key: &'static str,
        range: RangeInclusive<f64>,
        most: usize,
    ) -> Option<Vec<f64>> {
        let node = self.value(key)?;
        let items = self.list(node, "numbers", most)?;
        items.iter().map(|item| self.keep(item, scalar::real(item, &range))).collect()
    }

    /// A list of whole numbers, at least one and at most `most`; nothing when the key is not there.
    pub fn counts_opt(
        &mut self,
        key: &'static str,
        range: RangeInclusive<u64>,
        most: usize,
    ) -> Option<Vec<usize>> {
        let node = self.value(key)?;
        let items = self.list(node, "whole numbers", most)?;
        items.iter().map(|item| self.keep(item, scalar::whole(item, &range)).map(to_usize)).collect()
    }

    /// A list of names, at least one and at most `most`; nothing when the key is not there.
    pub fn names_opt(&mut self, key: &'static str, most: usize) -> Option<Vec<(&'a str, &'a Node)>> {
        let node = self.value(key)?;
        let items = self.list(node, "names", most)?;
        items.iter().map(|item| Some((self.keep(item, scalar::text(item))?, item))).collect()
    }

    /// The items of a list of 1 to `most`.
    pub fn list(&self, node: &'a Node, what: &str, most: usize) -> Option<&'a [Node]> {
        match node.items() {
            Some(items) if (1..=most).contains(&items.len()) => Some(items),
            _ => {
                let why = format!("expected a list of 1 to {most} {what}, got {}", node.describe());
                self.faults.push(node.error(why));
                None
            }
        }
    }

    /// The map under `key`, when the key is there.
    pub fn section(&mut self, key: &'static str, section: &'static Section) -> Option<Fields<'a>> {
        let node = self.value(key)?;
        Some(Fields::open(node, section, self.faults))
    }

    /// Another map, such as an item of a list, read into the same faults.
    pub fn sibling(&self, node: &'a Node, section: &'static Section) -> Fields<'a> {
        Fields::open(node, section, self.faults)
    }

    /// Refuses whatever key is left: one that the section does not have, or one that it has but that was not asked
    /// for and so would do nothing. `when` says under which choice, such as `with layout: nhd`.
    pub fn finish(self, when: &str) {
        for entry in self.node.entries().unwrap_or_default() {
            let key = entry.key.as_str();
            if self.asked.contains(&key) {
                continue;
            }
            let why = if self.section.keys.contains(&key) {
                format!("has no effect {when}; remove it")
            } else {
                keys::unknown(key, self.section)
            };
            self.faults.push(at_key(self.node, entry, why));
        }
    }
}

/// A fault at a map's key rather than at its value.
pub(super) fn at_key(map: &Node, entry: &Entry, why: String) -> SpecError {
    let Place { line, column } = entry.place;
    SpecError { path: clip(&join(map.path(), &entry.key)), line, column, why }
}

/// One of `words`.
pub(super) fn word<T: Copy>(node: &Node, words: &[(&str, T)]) -> Result<T, String> {
    let names: Vec<&str> = words.iter().map(|(name, _)| *name).collect();
    let got = node.scalar().map(|scalar| scalar.text.as_str());
    if let Some(found) = got.and_then(|got| words.iter().find(|(name, _)| *name == got)) {
        return Ok(found.1);
    }
    let hint = got
        .and_then(|got| keys::nearest(got, names.iter().copied()))
        .map_or(String::new(), |name| format!("; did you mean {name}?"));
    Err(format!("expected {}, got {}{hint}", one_of(&names), node.describe()))
}

/// `a`, `a or b`, `a, b or c`.
pub(super) fn one_of(names: &[&str]) -> String {
    match names {
        [] => "nothing".into(),
        [one] => (*one).into(),
        [first @ .., last] => format!("{} or {last}", first.join(", ")),
    }
}

fn to_usize(value: u64) -> usize {
    // Every range in a spec ends below 2^53; on a 32-bit machine a larger count saturates and is refused by its size.
    usize::try_from(value).unwrap_or(usize::MAX)
}
