//! One recorded case: a safetensors file, checked before it is believed.
//!
//! Reading is one straight line: bounded header, container rules, the `mstar` metadata, the op, its
//! parameters and tensors by name, dtype and shape, and only then the data, whose index arrays are checked
//! by the op. The file is read, not mapped: a file that another process cuts short is an error here and a
//! bus error in a mapping. What is held is the file and one header.

use std::borrow::Cow;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, bail};
use mstar_kernels::{DType, Element};
use safetensors::SafeTensors;
use serde_json::{Map, Value};

use super::header::{self, Header};
use super::ops::Op;
use super::params::Params;
use super::shapes::{self, Letters};

/// What `|x - out|` may be: `atol + rtol * |out|`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Tolerance {
    pub(super) atol: f64,
    pub(super) rtol: f64,
}

/// A case in hand: everything that its op needs is there, of the right type and shape.
#[derive(Debug)]
pub(super) struct Case {
    pub(super) op: Op,
    /// What recorded it.
    pub(super) source: String,
    pub(super) params: Params,
    pub(super) tolerance: Tolerance,
    /// The element type of the queries, keys, values and `out.o`.
    pub(super) dtype: DType,
    /// The extents of the op's letters.
    pub(super) letters: Letters,
    /// The `mstar` metadata as it stands in the file.
    pub(super) metadata: String,
    /// What is in the file and was not read: worth a word, no fault.
    pub(super) notes: Vec<String>,
    header: Header,
    data: Data,
}

impl Case {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// One line that says what is wrong with it.
    pub(super) fn read(path: &Path) -> Result<Case> {
        let status = std::fs::metadata(path).context("cannot be read")?;
        if !status.is_file() {
            bail!("not a regular file");
        }
        let mut file = File::open(path).context("cannot be opened")?;
        let file_len = file.metadata().context("cannot be read")?.len();
        if file_len < 8 {
            bail!("{file_len} bytes: too short for a safetensors file");
        }
        let mut prefix = [0; 8];
        file.read_exact(&mut prefix).context("cannot be read")?;
        let header_len = header::length(prefix, file_len)?;
        let mut text = vec![0; header_len];
        file.read_exact(&mut text).context("cannot be read")?;
        let data_len = file_len - 8 - header_len as u64;
        let header = header::parse(&text, data_len)?;

        let described = Described::read(&header)?;
        let op = described.op;
        let params = Params::new(described.params);
        let mut letters = op.letters(&params)?;
        let dtype = match shapes::check(op.tensors(), &header, &mut letters)? {
            "F32" => DType::F32,
            "BF16" => DType::Bf16,
            _ => DType::F16,
        };
        let mut notes = unread_tensors(op, &header)?;

        let data = Data::read(&prefix, &text, data_len, &mut file)?;
        let case = Case {
            op,
            source: described.source,
            params,
            tolerance: described.tolerance,
            dtype,
            letters,
            metadata: described.text,
            notes: Vec::new(),
            header,
            data,
        };
        case.references_are_numbers()?;
        op.check(&case)?;
        notes.extend(case.params.unread().iter().map(|name| format!("params.{name} is not read by {op}")));
        Ok(Case { notes, ..case })
    }

    /// Whether an optional tensor is there.
    pub(super) fn has(&self, name: &str) -> bool {
        self.header.tensors.contains_key(name)
    }

    /// A tensor's extents.
    pub(super) fn shape(&self, name: &str) -> &[usize] {
        &self.header.tensors.get(name).expect("the op's tensors were checked").shape
    }

    /// A tensor's elements, row-major.
    ///
    /// # Panics
    /// When the op declares no such tensor, or one of another type.
    pub(super) fn elements<T: Element>(&self, name: &str) -> Cow<'_, [T]> {
        let entry = self.header.tensors.get(name).expect("the op's tensors were checked");
        assert_eq!(Some(T::DTYPE), dtype_of(&entry.dtype), "{name} is declared with another type");
        let bytes = &self.data.tensors()[entry.begin..entry.end];
        match bytemuck::try_cast_slice(bytes) {
            Ok(elements) => Cow::Borrowed(elements),
            // A file may put a tensor at an odd byte.
            Err(_) => {
                Cow::Owned(bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect())
            }
        }
    }

    /// A floating-point tensor as f32, which every stored type is exact in.
    pub(super) fn floats(&self, name: &str) -> Vec<f32> {
        match self.dtype(name) {
            DType::Bf16 => self.elements::<half::bf16>(name).iter().map(|x| x.to_f32()).collect(),
            DType::F16 => self.elements::<half::f16>(name).iter().map(|x| x.to_f32()).collect(),
            _ => self.elements::<f32>(name).into_owned(),
        }
    }

    /// A tensor's element type.
    pub(super) fn dtype(&self, name: &str) -> DType {
        let entry = self.header.tensors.get(name).expect("the op's tensors were checked");
        dtype_of(&entry.dtype).expect("the op's dtypes were checked")
    }

    /// A comparison against NaN proves nothing: a reference that holds one cannot judge.
    fn references_are_numbers(&self) -> Result<()> {
        for tensor in self.op.tensors().iter().filter(|tensor| tensor.name.starts_with("ref.")) {
            let values = self.elements::<f32>(tensor.name);
            if let Some(at) = values.iter().position(|x| x.is_nan()) {
                let index = coordinates(at, self.shape(tensor.name));
                bail!("NaN in the reference: {} at {index:?}", tensor.name);
            }
        }
        Ok(())
    }
}

fn dtype_of(name: &str) -> Option<DType> {
    Some(match name {
        "F32" => DType::F32,
        "BF16" => DType::Bf16,
        "F16" => DType::F16,
        "I32" => DType::I32,
        "U8" => DType::U8,
        _ => return None,
    })
}

/// The coordinates of a flat row-major index.
pub(super) fn coordinates(mut flat: usize, shape: &[usize]) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for axis in (0..shape.len()).rev() {
        index[axis] = flat % shape[axis].max(1);
        flat /= shape[axis].max(1);
    }
    index
}

/// Tensors that the op does not know: an output cannot go unjudged, an input is worth a note.
fn unread_tensors(op: Op, header: &Header) -> Result<Vec<String>> {
    let known = |name: &str| op.tensors().iter().any(|tensor| tensor.name == name);
    let unknown: Vec<&String> = header.tensors.keys().filter(|name| !known(name)).collect();
    if let Some(output) = unknown.iter().find(|name| name.starts_with("out.")) {
        bail!("tensor {output}: not an output of {op}, so it cannot be judged");
    }
    Ok(unknown.iter().map(|name| format!("tensor {name} is not read by {op}")).collect())
}

/// The `mstar` metadata.
struct Described {
    op: Op,
    source: String,
    params: Map<String, Value>,
    tolerance: Tolerance,
    text: String,
}

impl Described {
    fn read(header: &Header) -> Result<Described> {
        let Some(text) = header.metadata.get("mstar") else {
            bail!("no `mstar` metadata: not a recorded case");
        };
        let value: Value = serde_json::from_str(text).context("`mstar` metadata is not JSON")?;
        let Value::Object(mut object) = value else {
            bail!("`mstar` metadata is not a JSON object");
        };
        match object.get("version") {
            Some(version) if version.as_f64() == Some(1.0) => {}
            Some(version) => bail!("unsupported version {version}: this program reads version 1"),
            None => bail!("`mstar` metadata has no version; this program reads version 1"),
        }
        let op = match object.get("op") {
            Some(Value::String(name)) => Op::parse(name)?,
            Some(other) => bail!("unknown op {other}: must be a name"),
            None => bail!("`mstar` metadata has no op"),
        };
        let params = match object.remove("params") {
            Some(Value::Object(params)) => params,
            Some(_) => bail!("`mstar` metadata: params is not an object"),
            None => bail!("`mstar` metadata has no params"),
        };
        let tolerance = match object.get("tolerance") {
            Some(Value::Object(bounds)) => {
                Tolerance { atol: bound(bounds, "atol")?, rtol: bound(bounds, "rtol")? }
            }
            Some(_) => bail!("`mstar` metadata: tolerance is not an object"),
            None => bail!("`mstar` metadata has no tolerance"),
        };
        let source = object.get("source").and_then(Value::as_str).unwrap_or("not named").to_owned();
        Ok(Described { op, source, params, tolerance, text: text.clone() })
    }
}

/// One side of a tolerance: a finite number of at least 0, or there is nothing to pass.
fn bound(bounds: &Map<String, Value>, name: &str) -> Result<f64> {
    match bounds.get(name).map(|value| (value.as_f64(), value)) {
        Some((Some(x), _)) if x.is_finite() && x >= 0.0 => Ok(x),
        Some((_, value)) => bail!("tolerance.{name} = {value}: must be a finite number of at least 0"),
        None => bail!("tolerance.{name} is missing"),
    }
}

/// A whole file, placed so that its tensors' bytes begin at a multiple of 8.
struct Data {
    words: Vec<u64>,
    tensors: std::ops::Range<usize>,
}

impl Data {
    fn read(prefix: &[u8; 8], header: &[u8], data_len: u64, file: &mut File) -> Result<Data> {
        let data_len = usize::try_from(data_len).context("the file does not fit the address space")?;
        let front = (8 + header.len()).next_multiple_of(8);
        let start = front - 8 - header.len();
        let words_len =
            front.checked_add(data_len).context("the file does not fit the address space")?.div_ceil(8);
        let mut words: Vec<u64> = Vec::new();
        words.try_reserve_exact(words_len).with_context(|| format!("no memory for {data_len} bytes"))?;
        words.resize(words_len, 0);
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
        bytes[start..start + 8].copy_from_slice(prefix);
        bytes[start + 8..front].copy_from_slice(header);
        file.read_exact(&mut bytes[front..front + data_len]).context("truncated while it was read")?;
        // The container's own reader has the last word on what a safetensors file is.
        SafeTensors::read_metadata(&bytes[start..front + data_len]).context("not a safetensors file")?;
        Ok(Data { words, tensors: front..front + data_len })
    }

    fn tensors(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[self.tensors.clone()]
    }
}

impl std::fmt::Debug for Data {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.tensors.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flat_indices_become_coordinates() {
        assert_eq!(coordinates(0, &[2, 3, 4]), [0, 0, 0]);
        assert_eq!(coordinates(23, &[2, 3, 4]), [1, 2, 3]);
        assert_eq!(coordinates(5, &[7]), [5]);
        assert!(coordinates(0, &[]).is_empty());
    }

    #[test]
    fn data_lie_at_a_multiple_of_8_whatever_the_headers_length() {
        for padding in 0..9 {
            let header = format!(
                r#"{{"a":{{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}}}{}"#,
                " ".repeat(padding)
            );
            let mut stored = tempfile::tempfile().unwrap();
            std::io::Write::write_all(&mut stored, &[1, 2, 3]).unwrap();
            std::io::Seek::rewind(&mut stored).unwrap();
            let prefix = (header.len() as u64).to_le_bytes();
            let data = Data::read(&prefix, header.as_bytes(), 3, &mut stored).unwrap();
            assert_eq!(data.tensors(), [1, 2, 3]);
            assert_eq!(data.tensors().as_ptr() as usize % 8, 0);
        }
    }

    #[test]
    fn f38_a_file_that_shrinks_while_it_is_read_is_an_error() {
        let header = br#"{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}"#;
        let prefix = (header.len() as u64).to_le_bytes();
        let said = Data::read(&prefix, header, 3, &mut tempfile::tempfile().unwrap()).unwrap_err();
        assert!(format!("{said:#}").starts_with("truncated while it was read"), "{said:#}");
    }
}
