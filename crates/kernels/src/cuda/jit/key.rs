//! What names a variant of a kernel.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use super::source::Unit;

/// `#define`s given to the compiler, sorted by name, each name once. Held in place, so that making one allocates nothing.
#[derive(Clone, Copy)]
pub struct Defines {
    entries: [(&'static str, i64); Defines::MOST],
    len: usize,
}

impl Defines {
    /// The most a variant may have.
    pub const MOST: usize = 32;

    /// None.
    pub const fn new() -> Defines {
        Defines { entries: [("", 0); Defines::MOST], len: 0 }
    }

    /// These and `name` as `value`; a name that was there takes the new value.
    ///
    /// # Panics
    /// More than [`Defines::MOST`], or a name that is no C identifier: a mistake of the kernel's author, found by the first
    /// test that builds it.
    pub fn with(mut self, name: &'static str, value: i64) -> Defines {
        assert!(is_identifier(name), "{name:?} is no name for a #define");
        match self.as_slice().binary_search_by_key(&name, |&(there, _)| there) {
            Ok(at) => self.entries[at].1 = value,
            Err(at) => {
                assert!(self.len < Defines::MOST, "{name}: a variant has at most {} defines", Defines::MOST);
                self.entries.copy_within(at..self.len, at + 1);
                self.entries[at] = (name, value);
                self.len += 1;
            }
        }
        self
    }

    /// The names and values, by name.
    pub fn as_slice(&self) -> &[(&'static str, i64)] {
        &self.entries[..self.len]
    }
}

impl Default for Defines {
    fn default() -> Defines {
        Defines::new()
    }
}

impl PartialEq for Defines {
    fn eq(&self, other: &Defines) -> bool {
        self.as_slice() == other.as_slice()
    }
}

impl Eq for Defines {}

impl Hash for Defines {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_slice().hash(state);
    }
}

impl fmt::Debug for Defines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.as_slice().iter().copied()).finish()
    }
}

fn is_identifier(name: &str) -> bool {
    let mut bytes = name.bytes();
    bytes.next().is_some_and(|b| b.is_ascii_alphabetic() || b == b'_')
        && bytes.all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

/// One variant of one kernel: what is compiled as a unit of its own, and found again by.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// The source file.
    pub unit: Unit,
    /// The kernel's name in it, `extern "C"`.
    pub entry: &'static str,
    /// What chooses the variant.
    pub defines: Defines,
    /// A user's own code, which the unit includes as `snippet.cuh` where `MSTAR_SNIPPET` is defined.
    pub snippet: Option<Arc<str>>,
}

impl Key {
    /// The kernel `entry` of `unit`, with no defines.
    pub const fn new(unit: Unit, entry: &'static str) -> Key {
        Key { unit, entry, defines: Defines::new(), snippet: None }
    }

    /// This with `name` defined as `value`; see [`Defines::with`].
    ///
    /// # Panics
    /// As [`Defines::with`].
    #[must_use]
    pub fn with(mut self, name: &'static str, value: i64) -> Key {
        self.defines = self.defines.with(name, value);
        self
    }

    /// This with a user's code.
    #[must_use]
    pub fn with_snippet(mut self, snippet: Arc<str>) -> Key {
        self.snippet = Some(snippet);
        self
    }
}

/// `paged.cu decode DTYPE=1 WIDTH=128`.
impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.unit.name(), self.entry)?;
        for (name, value) in self.defines.as_slice() {
            write!(f, " {name}={value}")?;
        }
        if self.snippet.is_some() {
            f.write_str(" with a snippet")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIT: Unit = Unit::of("unit.cu", "");

    #[test]
    fn the_order_in_which_defines_are_given_is_no_part_of_a_key() {
        let one = Key::new(UNIT, "k").with("WIDTH", 128).with("CAUSAL", 1).with("DTYPE", 2);
        let two = Key::new(UNIT, "k").with("DTYPE", 0).with("CAUSAL", 1).with("WIDTH", 128).with("DTYPE", 2);
        assert_eq!(one, two);
        assert_eq!(one.to_string(), "unit.cu k CAUSAL=1 DTYPE=2 WIDTH=128");
        assert_ne!(one, one.clone().with("DTYPE", 1));
        assert_ne!(one, one.clone().with_snippet("float score(float s) { return s; }".into()));
    }

    #[test]
    #[should_panic(expected = "is no name for a #define")]
    fn a_define_cannot_smuggle_an_option() {
        let _ = Defines::new().with("A -DB", 1);
    }
}
