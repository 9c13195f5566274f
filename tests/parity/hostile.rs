//! F38: broken files. Each is named with its fault in one line, the good ones beside it are judged, and the
//! program ends with 2, without a panic and without taking more memory than the file has.

use serde_json::{Value, json};

use crate::built::{Built, Tensor, bytes, file, floats, ints, mstar, oracle, paged};

/// A hostile file and a part of what must be said of it.
struct Hostile {
    name: &'static str,
    bytes: Vec<u8>,
    said: &'static str,
}

fn changed(name: &'static str, said: &'static str, change: impl FnOnce(&mut Built)) -> Hostile {
    let mut built = paged("F32");
    change(&mut built);
    Hostile { name, bytes: built.bytes(), said }
}

fn raw(name: &'static str, said: &'static str, bytes: Vec<u8>) -> Hostile {
    Hostile { name, bytes, said }
}

/// The good case with one entry of its header changed.
fn header(
    name: &'static str,
    said: &'static str,
    change: impl FnOnce(&mut serde_json::Map<String, Value>),
) -> Hostile {
    let built = paged("F32");
    let mut header = built.header();
    change(&mut header);
    raw(name, said, file(&Value::Object(header).to_string(), &built.data()))
}

fn containers() -> Vec<Hostile> {
    let good = paged("F32").bytes();
    let data_len = paged("F32").data().len();
    let with_length = |length: u64| {
        let mut bytes = good.clone();
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        bytes
    };
    let offsets =
        |value: Value| move |h: &mut serde_json::Map<String, Value>| h["out.o"]["data_offsets"] = value;
    let mut trailing = good.clone();
    trailing.push(0);
    let mut junk_header = good.clone();
    junk_header[8..40].fill(b'x');
    let mut not_utf8 = good.clone();
    not_utf8[20] = 0xff;
    let q_bytes = 4 * 2 * 4 * 4usize;
    vec![
        raw("bytes_0", "too short", vec![]),
        raw("bytes_7", "too short", good[..7].to_vec()),
        raw("bytes_8", "bad header", good[..8].to_vec()),
        raw("bytes_8_empty_header", "bad header", vec![0; 8]),
        raw("cut_in_half", "cut short", good[..good.len() / 2].to_vec()),
        raw("cut_by_one", "cut short", good[..good.len() - 1].to_vec()),
        raw("trailing", "trailing", trailing),
        raw("length_2_63", "bad header", with_length(1 << 63)),
        raw("length_max", "bad header", with_length(u64::MAX)),
        raw("length_is_file", "bad header", with_length(good.len() as u64)),
        raw("length_101_mb", "bad header", with_length(101 << 20)),
        raw("length_short", "bad header", with_length(40)),
        raw("header_junk", "bad header", junk_header),
        raw("header_not_utf8", "not UTF-8", not_utf8),
        raw("header_list", "bad header", file("[1, 2]", &[])),
        raw("header_deep", "bad header", file(&"[".repeat(200_000), &[])),
        raw("header_empty_object", "no `mstar` metadata", file("{}", &[])),
        header("offsets_none", "0 numbers", offsets(json!([]))),
        header("offsets_one", "1 numbers", offsets(json!([4]))),
        header("offsets_backwards", "backwards", offsets(json!([8, 4]))),
        header("offsets_past_end", "cut short", offsets(json!([0, u64::MAX]))),
        header("offsets_negative", "out.o", offsets(json!([-4, 4]))),
        header("overlap", "bad header", move |h| {
            h["in.q"]["data_offsets"] = json!([0, q_bytes]);
        }),
        header("gap", "bad header", move |h| {
            h["ref.o"]["data_offsets"] = json!([data_len - q_bytes + 4, data_len]);
            h["ref.o"]["shape"] = json!([31]);
        }),
        header("span_is_not_shape", "needs", |h| h["out.o"]["shape"] = json!([4, 2, 5])),
        header("shape_overflows", "more bytes than", |h| {
            h["out.o"]["shape"] = json!([1u64 << 40, 1u64 << 40]);
        }),
        header("dtype_unknown", "unknown dtype", |h| h["out.o"]["dtype"] = json!("F31")),
        header("entry_is_text", "out.o", |h| h["out.o"] = json!("nothing")),
    ]
}

fn descriptions() -> Vec<Hostile> {
    let metadata = |text: Value| {
        move |h: &mut serde_json::Map<String, Value>| h["__metadata__"] = json!({ "mstar": text })
    };
    let param = |name: &'static str, value: Value| move |b: &mut Built| b.mstar["params"][name] = value;
    vec![
        header("no_metadata", "no `mstar` metadata", |h| drop(h.remove("__metadata__"))),
        header("metadata_other", "no `mstar` metadata", |h| h["__metadata__"] = json!({"format": "pt"})),
        header("metadata_not_json", "not JSON", metadata(json!("{version: 1}"))),
        header("metadata_nan", "not JSON", metadata(json!(r#"{"version": 1, "tolerance": {"atol": NaN}}"#))),
        header("metadata_list", "not a JSON object", metadata(json!("[]"))),
        changed("version_2", "unsupported version 2", |b| b.mstar["version"] = json!(2)),
        changed("version_text", "unsupported version", |b| b.mstar["version"] = json!("1")),
        changed("version_none", "no version", |b| drop(b.mstar.as_object_mut().unwrap().remove("version"))),
        changed("op_unknown", "unknown op \"pagde\"", |b| b.mstar["op"] = json!("pagde")),
        changed("op_number", "unknown op 7", |b| b.mstar["op"] = json!(7)),
        changed("op_of_others", "missing", |b| b.mstar["op"] = json!("mla")),
        changed("params_list", "params is not an object", |b| b.mstar["params"] = json!([])),
        changed("no_scale", "params.sm_scale is missing", param("sm_scale", Value::Null)),
        changed("scale_text", "params.sm_scale", param("sm_scale", json!("0.5"))),
        changed("causal_text", "params.causal", param("causal", json!("yes"))),
        changed("page_size_0", "params.page_size = 0", param("page_size", json!(0))),
        changed("page_size_3", "tensor in.kv", param("page_size", json!(3))),
        changed("page_size_half", "params.page_size = 2.5", param("page_size", json!(2.5))),
        changed("page_size_huge", "params.page_size", param("page_size", json!(1e30))),
        changed("window_minus_2", "params.window_left = -2", param("window_left", json!(-2))),
        changed("cap_negative", "params.logits_soft_cap", param("logits_soft_cap", json!(-1.0))),
        changed("lse_base_10", "params.lse_base = 10", param("lse_base", json!(10))),
        changed("cross_causal", "no causal mask", |b| b.mstar["op"] = json!("cross")),
        changed("tolerance_none", "no tolerance", |b| {
            drop(b.mstar.as_object_mut().unwrap().remove("tolerance"))
        }),
        changed("atol_negative", "tolerance.atol = -1", |b| b.mstar["tolerance"]["atol"] = json!(-1.0)),
        changed("rtol_missing", "tolerance.rtol", |b| b.mstar["tolerance"] = json!({"atol": 0.1})),
        changed("rtol_text", "tolerance.rtol", |b| b.mstar["tolerance"]["rtol"] = json!("NaN")),
    ]
}

fn tensors() -> Vec<Hostile> {
    let with = |name: &'static str, tensor: Tensor| move |b: &mut Built| b.set(name, tensor);
    let nan = |name: &'static str, at: usize| {
        move |b: &mut Built| b.get(name).bytes[at * 4..][..4].copy_from_slice(&f32::NAN.to_le_bytes())
    };
    let mut list = vec![
        changed("missing_q", "tensor in.q is missing", |b| b.remove("in.q")),
        changed("missing_lse", "tensor out.lse is missing", |b| b.remove("out.lse")),
        changed("missing_ref", "tensor ref.o is missing", |b| b.remove("ref.o")),
        changed("dtype_f64", "got F64", with("in.q", floats("F64", &[4, 2, 4], &[0.0; 32]))),
        changed(
            "dtype_mixed",
            "expected dtype F32, got BF16",
            with("in.kv", floats("BF16", &[4, 2, 2, 1, 4], &[0.0; 64])),
        ),
        changed(
            "dtype_lse",
            "tensor out.lse: expected dtype F32, got BF16",
            with("out.lse", floats("BF16", &[4, 2], &[0.0; 8])),
        ),
        changed(
            "dtype_indices",
            "tensor in.kv_indices: expected dtype I32",
            with("in.kv_indices", floats("F32", &[3], &[3.0, 1.0, 2.0])),
        ),
        changed("rank", "tensor in.q: expected shape", with("in.q", floats("F32", &[4, 8], &[0.0; 32]))),
        changed(
            "out_shape",
            "tensor out.o: expected shape",
            with("out.o", floats("F32", &[4, 4, 2], &[0.0; 32])),
        ),
        changed("indptr_empty", "tensor in.qo_indptr", with("in.qo_indptr", ints(&[]))),
        changed(
            "indptr_start",
            "in.qo_indptr[0] = 1: an indptr starts at 0",
            with("in.qo_indptr", ints(&[1, 1, 3, 4])),
        ),
        changed("indptr_falls", "in.qo_indptr[2] = 1", with("in.qo_indptr", ints(&[0, 2, 1, 4]))),
        changed("indptr_ends", "must end at 4", with("in.qo_indptr", ints(&[0, 1, 3, 3]))),
        changed("kv_indptr_past", "in.kv_indptr[3] = 4", with("in.kv_indptr", ints(&[0, 2, 3, 4]))),
        changed("page_past", "in.kv_indices[1] = 4", with("in.kv_indices", ints(&[3, 4, 2]))),
        changed("page_negative", "in.kv_indices[0] = -1", with("in.kv_indices", ints(&[-1, 1, 2]))),
        changed(
            "rows_differ",
            "in.kv_last_page_len: expected shape [R]",
            with("in.kv_last_page_len", ints(&[1, 2])),
        ),
        changed("heads", "H must be a positive multiple of G", |b| {
            b.set("in.kv", floats("F32", &[4, 2, 2, 3, 4], &[0.0; 192]));
        }),
        changed(
            "alibi_shape",
            "tensor in.alibi_slopes",
            with("in.alibi_slopes", floats("F32", &[1], &[0.0])),
        ),
        changed("mask_type", "tensor in.mask", with("in.mask", ints(&[1; 7]))),
        // Rows of 1 x 3, 2 x 2 and 1 x 0.
        changed(
            "mask_short",
            "in.mask has 6 entries, the rows' q_len x kv_len are 7",
            with("in.mask", bytes(&[1; 6])),
        ),
        changed("sinks_shape", "tensor in.sinks", with("in.sinks", floats("F32", &[3], &[0.0; 3]))),
        changed(
            "unknown_output",
            "tensor out.max: not an output of paged",
            with("out.max", floats("F32", &[1], &[0.0])),
        ),
        changed("ref_nan", "NaN in the reference: ref.o at [1, 1, 3]", nan("ref.o", 15)),
        changed("ref_lse_nan", "NaN in the reference: ref.lse at [0, 1]", nan("ref.lse", 1)),
    ];
    // F11: lengths of the last page that no page of 2 has, and one for a row without pages.
    for (name, lens) in [
        ("last_page_0", [0, 2, 0]),
        ("last_page_3", [1, 3, 0]),
        ("last_page_negative", [-1, 2, 0]),
        ("last_page_max", [1, i32::MAX, 0]),
        ("last_page_of_none", [1, 2, 1]),
    ] {
        list.push(changed(name, "in.kv_last_page_len[", with("in.kv_last_page_len", ints(&lens))));
    }
    list
}

#[test]
fn f38_broken_files_are_named_and_the_good_ones_beside_them_judged() {
    let dir = tempfile::tempdir().unwrap();
    let all: Vec<Hostile> = containers().into_iter().chain(descriptions()).chain(tensors()).collect();
    for hostile in &all {
        std::fs::write(dir.path().join(format!("{}.safetensors", hostile.name)), &hostile.bytes).unwrap();
    }
    paged("F32").write(&dir.path().join("a_good.safetensors"));
    paged("BF16").write(&dir.path().join("z_good.safetensors"));

    let run = oracle(dir.path());
    assert_eq!(run.code, 2, "{}", run.stderr);
    let cases = run.cases();
    assert_eq!(cases.len(), all.len() + 2);
    for good in ["a_good", "z_good"] {
        assert_eq!(cases[&format!("{good}.safetensors")]["verdict"], "pass", "{}", run.stdout);
    }
    for hostile in &all {
        let file = format!("{}.safetensors", hostile.name);
        assert_eq!(cases[&file]["verdict"], "unreadable", "{file}");
        let fault = cases[&file]["fault"].as_str().unwrap();
        assert!(fault.contains(hostile.said), "{file}: {fault:?} does not say {:?}", hostile.said);
        let lines: Vec<&str> =
            run.stderr.lines().filter(|line| line.contains(&format!("/{file}: "))).collect();
        assert_eq!(lines.len(), 1, "{file}: {lines:?}");
        assert!(lines[0].contains(fault), "{}", lines[0]);
    }
}

#[test]
fn f38_a_corrupted_copy_among_good_ones() {
    let dir = tempfile::tempdir().unwrap();
    let good = paged("F32").bytes();
    std::fs::write(dir.path().join("a.safetensors"), &good).unwrap();
    std::fs::write(dir.path().join("b.safetensors"), &good[..good.len() - 100]).unwrap();
    std::fs::write(dir.path().join("c.safetensors"), &good).unwrap();
    let run = mstar(["--backend", "reference", "--device", "cpu", dir.path().to_str().unwrap()]);
    assert_eq!(run.code, 2);
    assert!(
        run.stdout.contains("3 cases on cpu: 2 passed, 0 failed, 1 unreadable, 0 unsupported"),
        "{}",
        run.stdout
    );
    assert_eq!(run.stderr.lines().count(), 1, "{}", run.stderr);
    assert!(run.stderr.contains("b.safetensors: tensor ref.o: ends at byte"), "{}", run.stderr);
}

#[test]
fn f38_paths_that_are_not_files() {
    let dir = tempfile::tempdir().unwrap();
    let missing = oracle(&dir.path().join("missing.safetensors"));
    assert!(missing.code == 2 && missing.stderr.contains("missing.safetensors: cannot be read"));
    let empty = oracle(dir.path());
    assert!(empty.code == 2 && empty.stderr.contains("a folder without any .safetensors file"));
    // A folder that is called like a file is a folder.
    std::fs::create_dir(dir.path().join("folder.safetensors")).unwrap();
    let folder = oracle(dir.path());
    assert!(folder.code == 2 && folder.stderr.contains("without any"), "{}", folder.stderr);
    let nothing = mstar::<&str>([]);
    assert!(nothing.code == 2 && nothing.stdout.is_empty(), "{}", nothing.stderr);
}

#[cfg(unix)]
#[test]
fn f38_links_pipes_and_forbidden_files() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    paged("F32").write(&at("good.safetensors"));
    symlink(dir.path(), at("loop")).unwrap();
    symlink(at("good.safetensors"), at("link.safetensors")).unwrap();
    symlink("nowhere", at("dangling.safetensors")).unwrap();
    let made = std::process::Command::new("mkfifo").arg(at("pipe.safetensors")).status();
    assert!(made.is_ok_and(|status| status.success()), "mkfifo is part of every Unix");
    paged("F32").write(&at("forbidden.safetensors"));
    std::fs::set_permissions(at("forbidden.safetensors"), PermissionsExt::from_mode(0o000)).unwrap();
    let forbidden = std::fs::File::open(at("forbidden.safetensors")).is_err();

    let run = oracle(dir.path());
    let cases = run.cases();
    assert_eq!(run.code, 2);
    assert_eq!(cases.len(), 5, "{}", run.stdout);
    assert_eq!(cases["good.safetensors"]["verdict"], "pass");
    assert_eq!(cases["link.safetensors"]["verdict"], "pass");
    assert_eq!(cases["dangling.safetensors"]["verdict"], "unreadable");
    assert_eq!(cases["pipe.safetensors"]["fault"], "not a regular file");
    // Root may read anything, and then the file is simply right.
    let expected = if forbidden { "unreadable" } else { "pass" };
    assert_eq!(cases["forbidden.safetensors"]["verdict"], expected);
}

/// A sparse file of 64 GiB whose header is legal but whose case is not, under a limit of 1 GiB of address space.
#[cfg(target_os = "linux")]
#[test]
fn f38_memory_is_not_taken_on_a_files_word() {
    let dir = tempfile::tempdir().unwrap();
    let sparse = |name: &str, header: &str, len: u64| {
        let path = dir.path().join(name);
        std::fs::write(&path, file(header, &[])).unwrap();
        std::fs::OpenOptions::new()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(8 + header.len() as u64 + len)
            .unwrap();
    };
    let size = 64u64 << 30;
    let entry = json!({"dtype": "U8", "shape": [size], "data_offsets": [0, size]});
    sparse("no_case.safetensors", &json!({"in.q": entry}).to_string(), size);
    let mut built = paged("F32").header();
    built.insert("in.more".into(), json!({"dtype": "U8", "shape": [size], "data_offsets": [0, size]}));
    sparse("overlap.safetensors", &Value::Object(built).to_string(), size);
    let mut long = (100u64 << 20).to_le_bytes().to_vec();
    long.extend(b"{");
    std::fs::write(dir.path().join("long.safetensors"), &long).unwrap();
    let path = dir.path().join("long.safetensors");
    std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(1 << 32).unwrap();

    let limited = std::process::Command::new("sh")
        .args(["-c", "ulimit -v 1048576; exec \"$0\" parity --backend reference --json \"$1\""])
        .arg(env!("CARGO_BIN_EXE_mstar"))
        .arg(dir.path())
        .env("RAYON_NUM_THREADS", "2")
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&limited.stderr);
    assert_eq!(limited.status.code(), Some(2), "{stderr}");
    for said in
        ["no_case.safetensors: no `mstar`", "overlap.safetensors: bad header", "long.safetensors: bad header"]
    {
        assert!(stderr.contains(said), "{stderr}");
    }
}

#[test]
fn f38_random_damage_never_panics_and_never_passes_unnoticed() {
    // Flips one byte of the header at a time. What is left may still be legal; then it must still be right.
    let dir = tempfile::tempdir().unwrap();
    let good = paged("F32").bytes();
    let header_len = u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    let step = 3;
    for at in (0..8 + header_len).step_by(step) {
        let mut bytes = good.clone();
        bytes[at] ^= 1 << (at % 7);
        std::fs::write(dir.path().join(format!("{at:05}.safetensors")), bytes).unwrap();
    }
    let run = oracle(dir.path());
    let cases = run.cases();
    assert_eq!(cases.len(), (8 + header_len).div_ceil(step));
    let passed = cases.values().filter(|case| case["verdict"] == "pass").count();
    assert!(passed < cases.len() / 4, "{passed} of {} damaged headers still pass", cases.len());
}
