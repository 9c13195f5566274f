//! Cases built by hand, and the program run on them.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use half::{bf16, f16};
use serde_json::{Map, Value, json};

/// What the program did.
pub(crate) struct Run {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Run {
    /// The JSON document's cases, by file name.
    pub(crate) fn cases(&self) -> BTreeMap<String, Value> {
        let document: Value = serde_json::from_str(&self.stdout).expect("one JSON document on stdout");
        let cases = document["cases"].as_array().expect("a list of cases");
        let name = |case: &Value| {
            let file = Path::new(case["file"].as_str().expect("a path"));
            file.file_name().expect("a name").to_string_lossy().into_owned()
        };
        cases.iter().map(|case| (name(case), case.clone())).collect()
    }
}

pub(crate) fn mstar<A: AsRef<OsStr>>(arguments: impl IntoIterator<Item = A>) -> Run {
    mstar_with("NO_COLOR", "1", arguments)
}

/// The same with a variable in its environment.
pub(crate) fn mstar_with<A: AsRef<OsStr>>(
    variable: &str,
    value: &str,
    arguments: impl IntoIterator<Item = A>,
) -> Run {
    let output = Command::new(env!("CARGO_BIN_EXE_mstar"))
        .arg("parity")
        .args(arguments)
        .env("NO_COLOR", "1")
        .env(variable, value)
        .output()
        .expect("the program runs");
    let text = |bytes| String::from_utf8(bytes).expect("the program prints UTF-8");
    let run = Run {
        code: output.status.code().expect("the program exits by itself"),
        stdout: text(output.stdout),
        stderr: text(output.stderr),
    };
    assert!(!run.stderr.contains("panicked"), "{}", run.stderr);
    run
}

/// Runs the oracle on one path and answers in JSON.
pub(crate) fn oracle(path: &Path) -> Run {
    mstar([OsStr::new("--backend"), OsStr::new("reference"), OsStr::new("--json"), path.as_os_str()])
}

/// One tensor of a file.
#[derive(Clone)]
pub(crate) struct Tensor {
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

/// A safetensors file in parts, to be put together rightly or wrongly.
#[derive(Clone)]
pub(crate) struct Built {
    pub(crate) mstar: Value,
    /// In the order of their bytes.
    pub(crate) tensors: Vec<(String, Tensor)>,
}

impl Built {
    pub(crate) fn set(&mut self, name: &str, tensor: Tensor) {
        match self.tensors.iter_mut().find(|(other, _)| other == name) {
            Some((_, old)) => *old = tensor,
            None => self.tensors.push((name.to_owned(), tensor)),
        }
    }

    pub(crate) fn remove(&mut self, name: &str) {
        self.tensors.retain(|(other, _)| other != name);
    }

    pub(crate) fn get(&mut self, name: &str) -> &mut Tensor {
        &mut self.tensors.iter_mut().find(|(other, _)| other == name).expect("a tensor of that name").1
    }

    /// The header's JSON object.
    pub(crate) fn header(&self) -> Map<String, Value> {
        let mut header = Map::new();
        let mut at = 0;
        for (name, tensor) in &self.tensors {
            let end = at + tensor.bytes.len();
            let entry = json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, end]});
            header.insert(name.clone(), entry);
            at = end;
        }
        header.insert("__metadata__".into(), json!({"mstar": self.mstar.to_string()}));
        header
    }

    pub(crate) fn data(&self) -> Vec<u8> {
        self.tensors.iter().flat_map(|(_, tensor)| tensor.bytes.clone()).collect()
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        file(&Value::Object(self.header()).to_string(), &self.data())
    }

    pub(crate) fn write(&self, path: &Path) -> PathBuf {
        std::fs::write(path, self.bytes()).expect("the case can be written");
        path.to_owned()
    }
}

/// A file of this header text and data.
pub(crate) fn file(header: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    bytes
}

pub(crate) fn floats(dtype: &'static str, shape: &[usize], values: &[f64]) -> Tensor {
    assert_eq!(shape.iter().product::<usize>(), values.len());
    let bytes = values.iter().flat_map(|&x| match dtype {
        "F32" => (x as f32).to_le_bytes().to_vec(),
        "BF16" => bf16::from_f64(x).to_le_bytes().to_vec(),
        "F16" => f16::from_f64(x).to_le_bytes().to_vec(),
        "F64" => x.to_le_bytes().to_vec(),
        other => panic!("{other}"),
    });
    Tensor { dtype, shape: shape.to_vec(), bytes: bytes.collect() }
}

pub(crate) fn ints(values: &[i32]) -> Tensor {
    let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    Tensor { dtype: "I32", shape: vec![values.len()], bytes }
}

pub(crate) fn bytes(values: &[u8]) -> Tensor {
    Tensor { dtype: "U8", shape: vec![values.len()], bytes: values.to_vec() }
}

/// A right `paged` case: `K = 0`, so outputs are means of the values seen and lse the log of how many.
/// H 2, G 1, D 4, pages of 2; row 0 decodes over 3 tokens, row 1 has 2 queries over 2, row 2 sees nothing.
/// Page 0 belongs to nobody and holds 1e4.
pub(crate) fn paged(dtype: &'static str) -> Built {
    let (h, d, s) = (2usize, 4usize, 2usize);
    let tables: [&[usize]; 3] = [&[3, 1], &[2], &[]];
    let q_lens = [1usize, 2, 1];
    let kv_lens = [3usize, 2, 0];
    let mut kv = vec![1e4; 4 * 2 * s * d];
    let value = |row: usize, j: usize, lane: usize| (row * 10 + j * 2 + lane) as f64;
    for (row, table) in tables.iter().enumerate() {
        for j in 0..kv_lens[row] {
            let at = |which: usize| ((table[j / s] * 2 + which) * s + j % s) * d;
            for lane in 0..d {
                kv[at(0) + lane] = 0.0;
                kv[at(1) + lane] = value(row, j, lane);
            }
        }
    }
    let (mut o, mut lse) = (Vec::new(), Vec::new());
    for row in 0..3 {
        for i in 0..q_lens[row] {
            let seen = kv_lens[row].saturating_sub(q_lens[row] - 1 - i);
            for _ in 0..h {
                // An empty sum is -0.
                let mean =
                    |lane| (0..seen).map(|j| value(row, j, lane)).sum::<f64>() / seen.max(1) as f64 + 0.0;
                o.extend((0..d).map(mean));
                lse.push((seen as f64).ln());
            }
        }
    }
    let q: Vec<f64> = (0..4 * h * d).map(|i| i as f64 / 8.0 - 1.0).collect();
    let tensors = [
        ("in.kv", floats(dtype, &[4, 2, s, 1, d], &kv)),
        ("in.kv_indices", ints(&[3, 1, 2])),
        ("in.kv_indptr", ints(&[0, 2, 3, 3])),
        ("in.kv_last_page_len", ints(&[1, 2, 0])),
        ("in.q", floats(dtype, &[4, h, d], &q)),
        ("in.qo_indptr", ints(&[0, 1, 3, 4])),
        ("out.lse", floats("F32", &[4, h], &lse)),
        ("out.o", floats(dtype, &[4, h, d], &o)),
        ("ref.lse", floats("F32", &[4, h], &lse)),
        ("ref.o", floats("F32", &[4, h, d], &o)),
    ];
    Built {
        mstar: json!({
            "version": 1,
            "op": "paged",
            "source": "by hand",
            "params": {"sm_scale": 0.5, "causal": true, "page_size": s},
            "tolerance": {"atol": 0.01, "rtol": 0.01},
        }),
        tensors: tensors.into_iter().map(|(name, tensor)| (name.to_owned(), tensor)).collect(),
    }
}
