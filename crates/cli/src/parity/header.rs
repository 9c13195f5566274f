//! The header of a safetensors file, held to its rules before a byte of data is read.
//!
//! A header says where each tensor lies; every number in it may be a lie. It is bounded before it is read,
//! and a header in hand covers the file's data exactly: no gap, no overlap, nothing past the end.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde::de::{Error as _, MapAccess, Visitor};

/// The longest header that is read. Recorded cases have a few kilobytes; the bound keeps what a hostile
/// length can cost to a few megabytes.
const MAX_HEADER_BYTES: u64 = 4 << 20;

/// One tensor's entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// The container's name of the element type: `F32`, `BF16`, ...
    pub(super) dtype: String,
    /// Extents, outermost first.
    pub(super) shape: Vec<usize>,
    /// First byte, counted from the end of the header.
    pub(super) begin: usize,
    /// One past the last byte.
    pub(super) end: usize,
}

/// A checked header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// `__metadata__`.
    pub(super) metadata: BTreeMap<String, String>,
    /// Tensors by name.
    pub(super) tensors: BTreeMap<String, Entry>,
}

/// The header's length in bytes, from the first 8 bytes of a file of `file_len` bytes.
pub(super) fn length(prefix: [u8; 8], file_len: u64) -> Result<usize> {
    let length = u64::from_le_bytes(prefix);
    let available = file_len.saturating_sub(8);
    if length > available {
        bail!("bad header: it says it is {length} bytes long, {available} follow; is the file cut short?");
    }
    if length > MAX_HEADER_BYTES {
        bail!("bad header: {length} bytes long, at most {MAX_HEADER_BYTES} are read");
    }
    Ok(length as usize)
}

/// Parses a header and holds every entry against the `data_len` bytes that follow it.
pub(super) fn parse(header: &[u8], data_len: u64) -> Result<Header> {
    let text = std::str::from_utf8(header).context("bad header: not UTF-8")?;
    let raw: RawHeader = serde_json::from_str(text).context("bad header")?;
    let mut tensors = BTreeMap::new();
    for (name, raw) in raw.tensors {
        let entry = entry(&name, raw, data_len)?;
        tensors.insert(name, entry);
    }
    let metadata = raw.metadata;
    covers(&tensors, data_len)?;
    Ok(Header { metadata, tensors })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: Vec<u64>,
}

fn entry(name: &str, raw: RawEntry, data_len: u64) -> Result<Entry> {
    let &[begin, end] = raw.data_offsets.as_slice() else {
        bail!("bad header: tensor {name}: data_offsets has {} numbers, not 2", raw.data_offsets.len());
    };
    if begin > end {
        bail!("bad header: tensor {name}: data_offsets [{begin}, {end}] run backwards");
    }
    if end > data_len {
        bail!(
            "tensor {name}: ends at byte {end} of the data, the file has {data_len}; is it cut short (truncated)?"
        );
    }
    let Some(size) = element_bytes(&raw.dtype) else {
        bail!("bad header: tensor {name}: unknown dtype {:?}", raw.dtype);
    };
    let bytes = raw.shape.iter().try_fold(size, |n, &extent| n.checked_mul(extent));
    if bytes != Some(end - begin) {
        let needs = bytes.map_or("more bytes than there are numbers for".into(), |n| format!("{n} bytes"));
        bail!(
            "bad header: tensor {name}: {} {:?} needs {needs}, data_offsets span {}",
            raw.dtype,
            raw.shape,
            end - begin
        );
    }
    // Every extent fits: the product, or a zero, was held against the file's own length.
    let shape = raw.shape.iter().map(|&extent| usize::try_from(extent)).collect::<Result<_, _>>();
    let shape = shape.with_context(|| format!("bad header: tensor {name}: shape {:?}", raw.shape))?;
    Ok(Entry { dtype: raw.dtype, shape, begin: begin as usize, end: end as usize })
}

fn element_bytes(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "BOOL" | "U8" | "I8" | "F8_E4M3" | "F8_E5M2" | "F8_E8M0" => 1,
        "BF16" | "F16" | "U16" | "I16" => 2,
        "F32" | "U32" | "I32" => 4,
        "F64" | "U64" | "I64" | "C64" => 8,
        _ => return None,
    })
}

/// The tensors, in order of their bytes, must follow one another from byte 0 to the end of the file.
fn covers(tensors: &BTreeMap<String, Entry>, data_len: u64) -> Result<()> {
    let mut order: Vec<(&String, &Entry)> = tensors.iter().collect();
    order.sort_by_key(|(_, entry)| (entry.begin, entry.end));
    let mut at = 0usize;
    for (name, entry) in order {
        if entry.begin < at {
            bail!("bad header: tensor {name}: begins at byte {}, inside its predecessor", entry.begin);
        }
        if entry.begin > at {
            bail!("bad header: a gap before tensor {name}: bytes {at}..{} belong to none", entry.begin);
        }
        at = entry.end;
    }
    if at as u64 != data_len {
        bail!("bad header: {} trailing bytes belong to no tensor", data_len - at as u64);
    }
    Ok(())
}

/// The header's object as it stands, whose keys are all different at every level.
#[derive(Default)]
struct RawHeader {
    metadata: BTreeMap<String, String>,
    tensors: BTreeMap<String, RawEntry>,
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut header = RawHeader::default();
                let mut described = false;
                while let Some(name) = map.next_key::<String>()? {
                    let named = |error: A::Error| A::Error::custom(format!("tensor {name}: {error}"));
                    let twice = if name == "__metadata__" {
                        let Pairs(pairs) = map.next_value()?;
                        header.metadata = pairs;
                        std::mem::replace(&mut described, true)
                    } else {
                        let entry = map.next_value().map_err(named)?;
                        header.tensors.insert(name.clone(), entry).is_some()
                    };
                    if twice {
                        return Err(A::Error::custom(format!("{name:?} appears twice")));
                    }
                }
                Ok(header)
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// `__metadata__`: text by text, whose keys are all different.
struct Pairs(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Texts;
        impl<'de> Visitor<'de> for Texts {
            type Value = Pairs;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of texts as __metadata__")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs, A::Error> {
                let mut pairs = BTreeMap::new();
                while let Some((name, text)) = map.next_entry::<String, String>()? {
                    if pairs.insert(name.clone(), text).is_some() {
                        return Err(A::Error::custom(format!("__metadata__: {name:?} appears twice")));
                    }
                }
                Ok(Pairs(pairs))
            }
        }
        deserializer.deserialize_map(Texts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn refused(header: &str, data_len: u64, with: &str) {
        let said = format!("{:#}", parse(header.as_bytes(), data_len).unwrap_err());
        assert!(said.contains(with), "{said}");
        assert!(!said.contains('\n'), "{said}");
    }

    #[test]
    fn f38_header_lengths_are_held_against_the_file() {
        assert_eq!(length(100u64.to_le_bytes(), 108).unwrap(), 100);
        for (said, file_len) in [(u64::MAX, 100), (1 << 63, 100), (100, 100), (93, 100), (1, 0)] {
            assert!(length(said.to_le_bytes(), file_len).is_err(), "{said} in {file_len}");
        }
        let said = length((101u64 << 20).to_le_bytes(), 1 << 40).unwrap_err().to_string();
        assert!(said.contains("at most"), "{said}");
    }

    #[test]
    fn f38_headers_that_are_not_what_they_should_be() {
        refused("", 0, "bad header");
        refused("{", 0, "bad header");
        refused("[]", 0, "bad header");
        refused("nonsense", 0, "bad header");
        refused("{} x", 0, "bad header");
        refused(&"[".repeat(100_000), 0, "bad header");
        refused(r#"{"a": 1}"#, 0, "tensor a");
        refused(r#"{"a": {"dtype": "F32", "shape": [1]}}"#, 4, "data_offsets");
        refused(r#"{"__metadata__": {"mstar": 3}}"#, 0, "expected a string");
        refused(r#"{"__metadata__": []}"#, 0, "__metadata__");
        refused(r#"{"__metadata__": {}, "__metadata__": {}}"#, 0, "appears twice");
        refused(r#"{"a": {"dtype": "F32", "dtype": "F16"}}"#, 4, "duplicate field");
        refused(r#"{"__metadata__": {"a": "1", "a": "2"}}"#, 0, "appears twice");
        assert!(parse(&[0xff, 0xfe], 0).is_err());
        assert_eq!(parse(b"{}", 0).unwrap(), Header { metadata: BTreeMap::new(), tensors: BTreeMap::new() });
    }

    fn one(dtype: &str, shape: &str, offsets: &str) -> String {
        format!(r#"{{"a": {{"dtype": "{dtype}", "shape": {shape}, "data_offsets": {offsets}}}}}"#)
    }

    #[test]
    fn f38_offsets_shapes_and_dtypes_must_agree() {
        assert!(parse(one("F32", "[2]", "[0, 8]").as_bytes(), 8).is_ok());
        assert!(parse(one("F32", "[0, 18446744073709551615]", "[0, 0]").as_bytes(), 0).is_ok());
        refused(&one("F32", "[2]", "[]"), 8, "0 numbers");
        refused(&one("F32", "[2]", "[4]"), 8, "1 numbers");
        refused(&one("F32", "[2]", "[0, 8, 8]"), 8, "3 numbers");
        refused(&one("F32", "[2]", "[8, 4]"), 8, "backwards");
        refused(&one("F32", "[2]", "[0, 8]"), 7, "cut short");
        refused(&one("F32", "[2]", "[0, -8]"), 8, "tensor a");
        refused(&one("F32", "[2]", "[0, 1e3]"), 8, "tensor a");
        refused(&one("F32", "[3]", "[0, 8]"), 8, "needs 12 bytes");
        refused(&one("BF16", "[2]", "[0, 8]"), 8, "needs 4 bytes");
        refused(&one("F31", "[2]", "[0, 8]"), 8, "unknown dtype");
        refused(&one("F32", "[4294967296, 4294967296]", "[0, 0]"), 0, "more bytes than");
        refused(&one("F32", "[-1]", "[0, 8]"), 8, "tensor a");
        refused(&one("F32", "[2]", "[0, 8]"), 9, "1 trailing");
    }

    #[test]
    fn f38_tensors_cover_the_data_exactly_once() {
        let two = |a: &str, b: &str| {
            let entry = |o: &str| format!(r#"{{"dtype": "U8", "shape": [4], "data_offsets": {o}}}"#);
            format!(r#"{{"a": {}, "b": {}}}"#, entry(a), entry(b))
        };
        assert!(parse(two("[4, 8]", "[0, 4]").as_bytes(), 8).is_ok());
        refused(&two("[0, 4]", "[2, 6]"), 6, "inside its predecessor");
        refused(&two("[0, 4]", "[0, 4]"), 4, "inside its predecessor");
        refused(&two("[0, 4]", "[5, 9]"), 9, "a gap before tensor b");
        refused(&two("[1, 5]", "[5, 9]"), 9, "a gap before tensor a");
        let same = r#"{"a": {"dtype": "U8", "shape": [], "data_offsets": [0, 1]},
            "a": {"dtype": "U8", "shape": [], "data_offsets": [0, 1]}}"#;
        refused(same, 1, "appears twice");
    }
}
