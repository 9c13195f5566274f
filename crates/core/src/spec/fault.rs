//! What is wrong with a spec: one line for each fault, and all of a file's faults together.

use std::cell::RefCell;
use std::fmt;

/// One refusal: where, what, and what would be right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecError {
    /// The key's path, such as `resources.kv.page_size`; empty when the whole file is at fault.
    pub path: String,
    /// Line, from 1; 0 when the value came from the command line.
    pub line: usize,
    /// Column, from 1.
    pub column: usize,
    /// What is wrong, and what would be right.
    pub why: String,
}

impl fmt::Display for SpecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.line, self.path.is_empty()) {
            (0, true) => write!(f, "{}", self.why),
            (0, false) => write!(f, "--set {}: {}", self.path, self.why),
            (line, true) => write!(f, "{line}:{}: {}", self.column, self.why),
            (line, false) => write!(f, "{line}:{}: {}: {}", self.column, self.path, self.why),
        }
    }
}

impl std::error::Error for SpecError {}

/// Everything that is wrong with one file, in the order of its lines. Displayed one fault a line, each naming the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecErrors {
    /// The file, or `the spec` for one that was made in memory.
    pub source: String,
    /// The first faults, at most [`SpecErrors::MOST`].
    pub list: Vec<SpecError>,
    /// Faults beyond those.
    pub more: usize,
}

impl SpecErrors {
    /// Faults that are listed; a file with more has usually one cause.
    pub const MOST: usize = 10;

    /// A single fault of the whole file.
    pub fn whole(source: impl Into<String>, why: impl Into<String>) -> SpecErrors {
        let error = SpecError { path: String::new(), line: 0, column: 0, why: why.into() };
        SpecErrors { source: source.into(), list: vec![error], more: 0 }
    }
}

impl fmt::Display for SpecErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, error) in self.list.iter().enumerate() {
            let end = if index + 1 < self.list.len() || self.more > 0 { "\n" } else { "" };
            let colon = if error.line > 0 { ":" } else { ": " };
            write!(f, "{}{colon}{error}{end}", self.source)?;
        }
        match self.more {
            0 => Ok(()),
            more => write!(f, "{}: and {more} more", self.source),
        }
    }
}

impl std::error::Error for SpecErrors {}

/// Where faults are gathered while a spec is read, so that one reading reports them all.
#[derive(Debug, Default)]
pub struct Faults(RefCell<Vec<SpecError>>);

impl Faults {
    /// None yet.
    pub fn new() -> Faults {
        Faults::default()
    }

    /// Adds one.
    pub fn push(&self, error: SpecError) {
        self.0.borrow_mut().push(error);
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.borrow().len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Nothing, or everything that was gathered, sorted by place; values from the command line come last.
    ///
    /// # Errors
    /// When anything was pushed.
    pub fn settle(self, source: &str) -> Result<(), SpecErrors> {
        let mut list = self.0.into_inner();
        if list.is_empty() {
            return Ok(());
        }
        list.sort_by_key(|e| (e.line == 0, e.line, e.column));
        list.dedup();
        let more = list.len().saturating_sub(SpecErrors::MOST);
        list.truncate(SpecErrors::MOST);
        Err(SpecErrors { source: source.to_string(), list, more })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_sorted_named_and_counted() {
        let faults = Faults::new();
        for line in (1..=12).rev() {
            faults.push(SpecError { path: "a".into(), line, column: 3, why: "no".into() });
        }
        let said = faults.settle("x.yaml").unwrap_err().to_string();
        assert!(said.starts_with("x.yaml:1:3: a: no\nx.yaml:2:3: a: no\n"), "{said}");
        assert!(said.ends_with("x.yaml:10:3: a: no\nx.yaml: and 2 more"), "{said}");
        assert_eq!(SpecErrors::whole("x.yaml", "empty").to_string(), "x.yaml: empty");
    }
}
