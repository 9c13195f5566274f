//! `params` of a case, read with the kind and range that each must have.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use anyhow::{Result, anyhow, bail};
use serde_json::{Map, Value};

/// A case's parameters. It remembers which were asked for, so that the others can be named.
#[derive(Clone, Debug, Default)]
pub(super) struct Params {
    values: Map<String, Value>,
    read: RefCell<BTreeSet<String>>,
}

impl Params {
    pub(super) fn new(values: Map<String, Value>) -> Params {
        Params { values, read: RefCell::default() }
    }

    /// The value, unless it is absent or null.
    pub(super) fn get(&self, name: &str) -> Option<&Value> {
        self.read.borrow_mut().insert(name.to_owned());
        self.values.get(name).filter(|value| !value.is_null())
    }

    /// Names that nobody asked for.
    pub(super) fn unread(&self) -> Vec<String> {
        let read = self.read.borrow();
        self.values.keys().filter(|name| !read.contains(*name)).cloned().collect()
    }

    fn required<T>(name: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| anyhow!("params.{name} is missing"))
    }

    /// A finite number, written as an integer or not.
    pub(super) fn number(&self, name: &str) -> Result<f64> {
        Self::required(name, self.number_or_none(name)?)
    }

    pub(super) fn number_or_none(&self, name: &str) -> Result<Option<f64>> {
        let number = |value: &Value| match value.as_f64().filter(|x| x.is_finite()) {
            Some(x) => Ok(x),
            None => bail!("params.{name} = {value}: must be a finite number"),
        };
        self.get(name).map(number).transpose()
    }

    /// A whole number in a range, written as an integer or as `16.0`.
    pub(super) fn integer(&self, name: &str, range: RangeInclusive<i64>) -> Result<i64> {
        Self::required(name, self.integer_or_none(name, range)?)
    }

    pub(super) fn integer_or_none(&self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>> {
        self.get(name).map(|value| whole(&format!("params.{name}"), value, range)).transpose()
    }

    /// A whole number of at least `least` that can be an extent.
    pub(super) fn extent(&self, name: &str, least: i64) -> Result<usize> {
        Ok(self.integer(name, least..=i64::from(i32::MAX))? as usize)
    }

    /// `true` or `false` (or 1 or 0).
    pub(super) fn flag(&self, name: &str) -> Result<bool> {
        Self::required(name, self.flag_or_none(name)?)
    }

    pub(super) fn flag_or_none(&self, name: &str) -> Result<Option<bool>> {
        let flag = |value: &Value| match (value.as_bool(), value.as_i64()) {
            (Some(flag), _) => Ok(flag),
            (None, Some(number @ (0 | 1))) => Ok(number == 1),
            _ => bail!("params.{name} = {value}: must be true or false"),
        };
        self.get(name).map(flag).transpose()
    }
}

/// A JSON value as a whole number in a range.
pub(super) fn whole(name: &str, value: &Value, range: RangeInclusive<i64>) -> Result<i64> {
    // Past 2^53 a float names no single integer.
    let exact = |x: f64| (x.fract() == 0.0 && x.abs() <= (1i64 << 53) as f64).then_some(x as i64);
    match value.as_i64().or_else(|| value.as_f64().and_then(exact)).filter(|n| range.contains(n)) {
        Some(n) => Ok(n),
        None => bail!("{name} = {value}: must be a whole number in {}..={}", range.start(), range.end()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(text: &str) -> Params {
        Params::new(serde_json::from_str(text).unwrap())
    }

    #[test]
    fn integers_and_floats_stand_for_each_other_where_they_are_equal() {
        let p = params(r#"{"a": 1, "b": 16.0, "c": -1, "d": 0.5, "e": 1e300, "f": "16", "g": null, "h": 0}"#);
        assert_eq!(p.number("a").unwrap(), 1.0);
        assert_eq!(p.integer("b", 1..=64).unwrap(), 16);
        assert_eq!(p.integer("c", -1..=64).unwrap(), -1);
        for name in ["d", "e", "f"] {
            assert!(p.integer(name, i64::MIN..=i64::MAX).is_err(), "{name}");
        }
        assert!(p.integer("c", 0..=64).unwrap_err().to_string().contains("params.c = -1"));
        assert_eq!(p.number_or_none("g").unwrap(), None);
        assert!(p.number("missing").unwrap_err().to_string().contains("missing"));
        assert!(p.flag("a").unwrap() && !p.flag("h").unwrap() && p.flag("b").is_err());
        assert!(p.number("f").is_err());
    }

    #[test]
    fn what_nobody_asked_for_is_named() {
        let p = params(r#"{"a": 1, "b": 2}"#);
        p.number("a").unwrap();
        assert_eq!(p.unread(), ["b"]);
    }
}
