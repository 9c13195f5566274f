//! What was computed, written as safetensors under the cases' own names, so that another tool can judge it.

use std::collections::{BTreeMap, HashMap};
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail};
use half::{bf16, f16};
use mstar_kernels::DType;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use super::case::Case;
use super::find::Found;
use super::ops::{Computed, Outputs};

/// Where the dump of the case called `label` goes.
fn target(folder: &Path, label: &Path) -> PathBuf {
    folder.join(label).with_extension("safetensors")
}

/// Checks, before anything is judged or written, that no two cases share a dump and no dump takes another case's place.
/// The same file named twice is one case.
///
/// # Errors
/// Both cases, and the file.
pub(super) fn distinct(folder: &Path, cases: &[Found]) -> Result<()> {
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let readable = || cases.iter().filter(|case| case.fault.is_none());
    let inputs: BTreeMap<PathBuf, &Found> = readable().map(|case| (real(&case.path), case)).collect();
    let mut taken: BTreeMap<PathBuf, &Found> = BTreeMap::new();
    for case in readable() {
        let target = target(folder, &case.label);
        let path = real(&case.path);
        if let Some(other) = inputs.get(&real(&target)).filter(|other| real(&other.path) != path) {
            bail!(
                "--dump: what {} computes would overwrite the case {}; name another folder",
                case.path.display(),
                other.path.display()
            );
        }
        if let Some(other) = taken.get(&target).filter(|other| real(&other.path) != path) {
            bail!(
                "--dump: {} and {} would both be written to {}; judge them in two calls with a folder each",
                other.path.display(),
                case.path.display(),
                target.display()
            );
        }
        taken.insert(target, case);
    }
    Ok(())
}

/// Writes `outputs` to `folder/label` with the case's metadata and, as `mstar_case`, where the case lies.
/// The file appears whole or not at all.
pub(super) fn write(
    folder: &Path,
    label: &Path,
    case: &Case,
    path: &Path,
    backend: &str,
    outputs: &Outputs,
) -> Result<PathBuf> {
    if label.components().any(|part| !matches!(part, Component::Normal(_))) {
        bail!("{}: not a name to dump under", label.display());
    }
    let target = target(folder, label);
    if let (Ok(target), Ok(path)) = (target.canonicalize(), path.canonicalize())
        && target == path
    {
        bail!("the dump would overwrite the case itself; name another folder");
    }
    let parent = target.parent().unwrap_or(folder);
    std::fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;

    let bytes: Vec<(&str, DType, Vec<u8>)> = outputs
        .iter()
        .map(|(&name, computed)| match computed {
            Computed::Integers(values) => (name, DType::I32, bytemuck::cast_slice(values).to_vec()),
            Computed::Floats(values) => (name, case.dtype(name), float_bytes(case.dtype(name), values)),
        })
        .collect();
    let mut views = Vec::with_capacity(bytes.len());
    for (name, dtype, bytes) in &bytes {
        let dtype = match dtype {
            DType::Bf16 => Dtype::BF16,
            DType::F16 => Dtype::F16,
            DType::I32 => Dtype::I32,
            _ => Dtype::F32,
        };
        let shape = computed_shape(case, name, bytes.len() * 8 / dtype.bitsize());
        views.push((*name, TensorView::new(dtype, shape, bytes)?));
    }
    let absolute = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let metadata = HashMap::from([
        ("mstar".to_owned(), case.metadata.clone()),
        ("mstar_case".to_owned(), absolute.display().to_string()),
        ("mstar_backend".to_owned(), backend.to_owned()),
    ]);
    let serialized = safetensors::serialize(views, Some(metadata))?;
    let partial = target.with_extension("safetensors.partial");
    std::fs::write(&partial, serialized).with_context(|| format!("cannot write {}", partial.display()))?;
    std::fs::rename(&partial, &target).with_context(|| format!("cannot write {}", target.display()))?;
    Ok(target)
}

/// The recorded shape, or a flat one where another number of entries was computed.
fn computed_shape(case: &Case, name: &str, entries: usize) -> Vec<usize> {
    let shape = case.shape(name);
    if shape.iter().product::<usize>() == entries { shape.to_vec() } else { vec![entries] }
}

fn float_bytes(dtype: DType, values: &[f32]) -> Vec<u8> {
    match dtype {
        DType::Bf16 => values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
        DType::F16 => values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}
