//! Shapes in letters: each op's tensors, held against one another by the extents that they share.

use std::collections::BTreeMap;

use anyhow::{Result, bail};

use super::header::Header;

/// The element type that a tensor must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Want {
    /// The case's own: whatever the first such tensor has, of f32, bf16 and f16.
    Case,
    F32,
    I32,
    U8,
}

/// One tensor of an op: name, element type, extents in letters, and whether it must be there.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tensor {
    pub(super) name: &'static str,
    pub(super) want: Want,
    /// Extents such as `T H D`; each is a sum of numbers and letters, `R+1` or `C+E`.
    pub(super) dims: &'static str,
    pub(super) optional: bool,
}

/// A tensor that must be there.
pub(super) const fn tensor(name: &'static str, want: Want, dims: &'static str) -> Tensor {
    Tensor { name, want, dims, optional: false }
}

/// What the letters stand for in one case.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Letters(BTreeMap<String, usize>);

impl Letters {
    pub(super) fn set(&mut self, letter: &str, extent: usize) {
        self.0.insert(letter.to_owned(), extent);
    }

    /// The extent of a letter that the op's tensors bind.
    pub(super) fn get(&self, letter: &str) -> usize {
        *self.0.get(letter).expect("every letter of an op stands in one of its required tensors")
    }

    /// Binds the letters of one shape, or holds it against those already bound.
    fn fit(&mut self, tensor: &Tensor, shape: &[usize]) -> Result<()> {
        let dims: Vec<&str> = tensor.dims.split(' ').filter(|d| !d.is_empty()).collect();
        let before = self.0.clone();
        let mut fits = dims.len() == shape.len();
        for (dim, &extent) in dims.iter().zip(shape) {
            let mut known = Some(0usize);
            let mut free = None;
            for term in dim.split('+') {
                let value = term.parse().ok().or_else(|| self.0.get(term).copied());
                match value {
                    Some(value) => known = known.and_then(|n| n.checked_add(value)),
                    None => free = Some(term),
                }
            }
            match (free, known.and_then(|known| extent.checked_sub(known))) {
                (Some(letter), Some(rest)) => self.set(letter, rest),
                (None, Some(0)) => {}
                _ => fits = false,
            }
        }
        if fits {
            return Ok(());
        }
        let letters: Vec<String> = before
            .iter()
            .filter(|(letter, _)| dims.iter().any(|dim| dim.split('+').any(|term| term == letter.as_str())))
            .map(|(letter, extent)| format!("{letter} = {extent}"))
            .collect();
        let known = if letters.is_empty() { String::new() } else { format!(" with {}", letters.join(", ")) };
        bail!("tensor {}: expected shape [{}]{known}, got {shape:?}", tensor.name, dims.join(", "))
    }
}

/// Holds a header against an op's tensors; the answer is the letters and the case's element type.
pub(super) fn check(tensors: &[Tensor], header: &Header, letters: &mut Letters) -> Result<&'static str> {
    let mut case = None;
    for tensor in tensors {
        let Some(entry) = header.tensors.get(tensor.name) else {
            if tensor.optional {
                continue;
            }
            bail!("tensor {} is missing", tensor.name);
        };
        let allowed: &[&str] = match (tensor.want, &case) {
            (Want::Case, None) => &["F32", "BF16", "F16"],
            (Want::Case, Some(case)) => std::slice::from_ref(case),
            (Want::F32, _) => &["F32"],
            (Want::I32, _) => &["I32"],
            (Want::U8, _) => &["U8"],
        };
        let Some(&dtype) = allowed.iter().find(|&&dtype| dtype == entry.dtype) else {
            bail!("tensor {}: expected dtype {}, got {}", tensor.name, allowed.join(" or "), entry.dtype);
        };
        if tensor.want == Want::Case {
            case = Some(dtype);
        }
        letters.fit(tensor, &entry.shape)?;
    }
    Ok(case.expect("every op has a tensor of the case's dtype"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parity::header::Entry;

    fn header(tensors: &[(&str, &str, &[usize])]) -> Header {
        let entry = |dtype: &str, shape: &[usize]| Entry {
            dtype: dtype.into(),
            shape: shape.to_vec(),
            begin: 0,
            end: 0,
        };
        let tensors = tensors.iter().map(|(name, dtype, shape)| (name.to_string(), entry(dtype, shape)));
        Header { metadata: BTreeMap::new(), tensors: tensors.collect() }
    }

    const OP: &[Tensor] = &[
        tensor("q", Want::Case, "T H 8"),
        tensor("latent", Want::Case, "P C+E"),
        tensor("indptr", Want::I32, "R+1"),
        Tensor { name: "sinks", want: Want::F32, dims: "H", optional: true },
    ];

    #[test]
    fn letters_bind_once_and_hold_everywhere() {
        let mut letters = Letters::default();
        letters.set("E", 2);
        let shapes: [(&str, &str, &[usize]); 3] =
            [("q", "BF16", &[5, 4, 8]), ("latent", "BF16", &[3, 12]), ("indptr", "I32", &[1])];
        assert_eq!(check(OP, &header(&shapes), &mut letters).unwrap(), "BF16");
        assert_eq!((letters.get("T"), letters.get("C"), letters.get("R")), (5, 10, 0));
        let mut wrong = shapes;
        let mut said = |i: usize, dtype, shape| {
            wrong = shapes;
            (wrong[i].1, wrong[i].2) = (dtype, shape);
            let mut letters = Letters::default();
            letters.set("E", 2);
            let mut all = wrong.to_vec();
            all.push(("sinks", "F32", &[3]));
            check(OP, &header(&all), &mut letters).unwrap_err().to_string()
        };
        assert_eq!(said(0, "BF16", &[5, 4, 7]), "tensor q: expected shape [T, H, 8], got [5, 4, 7]");
        assert!(said(0, "BF16", &[5, 4]).contains("got [5, 4]"));
        assert_eq!(said(0, "F64", &[5, 4, 8]), "tensor q: expected dtype F32 or BF16 or F16, got F64");
        assert_eq!(said(1, "F32", &[3, 12]), "tensor latent: expected dtype BF16, got F32");
        assert!(said(1, "BF16", &[3, 1]).contains("[P, C+E] with E = 2"));
        assert!(said(2, "I32", &[0]).contains("expected shape [R+1]"));
        assert_eq!(said(2, "I32", &[2]), "tensor sinks: expected shape [H] with H = 4, got [3]");
        let missing = check(OP, &header(&shapes[1..]), &mut Letters::default()).unwrap_err().to_string();
        assert_eq!(missing, "tensor q is missing");
    }
}
