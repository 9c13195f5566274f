//! Verdicts, exit codes, options and dumps, on cases built by hand.

use serde_json::{Value, json};

use crate::built::{Built, Tensor, bytes, floats, ints, mstar, oracle, paged};

/// Runs the oracle on one built case: exit code, verdict, and the whole of what was said of it.
fn judge(built: &Built) -> (i32, String, Value) {
    let dir = tempfile::tempdir().unwrap();
    let run = oracle(&built.write(&dir.path().join("case.safetensors")));
    let case = run.cases().remove("case.safetensors").unwrap();
    (run.code, case["verdict"].as_str().unwrap().to_owned(), case)
}

fn put(tensor: &mut Tensor, at: usize, value: f32) {
    tensor.bytes[at * 4..][..4].copy_from_slice(&value.to_le_bytes());
}

#[test]
fn right_cases_pass_in_every_dtype() {
    for dtype in ["F32", "BF16", "F16"] {
        let (code, verdict, case) = judge(&paged(dtype));
        assert_eq!((code, verdict.as_str()), (0, "pass"), "{case}");
        assert_eq!(case["dtype"], dtype.to_lowercase());
        assert_eq!(case["outputs"][0]["figures"]["max_abs"], 0.0);
    }
}

#[test]
fn masks_and_alibi_of_a_case_are_read_by_every_engine() {
    // Row 0 (one query over 3 tokens) sees its first alone; row 1's queries see their own token, which is all that the
    // second has left; slopes of ln 2 and 0 then change nothing but the distance of row 0's key.
    let mut built = paged("F32");
    built.set("in.mask", bytes(&[1, 0, 0, 1, 1, 0, 1]));
    built.set("in.alibi_slopes", floats("F32", &[2], &[std::f64::consts::LN_2, 0.0]));
    let none = f64::NEG_INFINITY;
    let row = |first: f64| (0..2).flat_map(move |_| (0..4).map(move |lane| first + f64::from(lane)));
    let o: Vec<f64> = row(0.0).chain(row(10.0)).chain(row(12.0)).chain([0.0; 8]).collect();
    let lse = [-2.0 * std::f64::consts::LN_2, 0.0, 0.0, 0.0, 0.0, 0.0, none, none];
    for name in ["out.o", "ref.o"] {
        built.set(name, floats("F32", &[4, 2, 4], &o));
    }
    for name in ["out.lse", "ref.lse"] {
        built.set(name, floats("F32", &[4, 2], &lse));
    }
    let (code, verdict, case) = judge(&built);
    assert_eq!((code, verdict.as_str()), (0, "pass"), "{case}");
    let dir = tempfile::tempdir().unwrap();
    let path = built.write(&dir.path().join("case.safetensors"));
    if cfg!(feature = "paged") {
        let run = mstar([&path]);
        assert_eq!(run.code, 0, "{}", run.stdout);
    }
    // Without them it is another case.
    for name in ["in.mask", "in.alibi_slopes"] {
        let mut other = built.clone();
        other.remove(name);
        assert_eq!(judge(&other).0, 1, "{name}");
    }
}

#[test]
fn a_wrong_value_fails_with_its_place() {
    let mut built = paged("F32");
    put(built.get("out.o"), 13, 2.5);
    let (code, verdict, case) = judge(&built);
    assert_eq!((code, verdict.as_str()), (1, "fail"));
    assert_eq!(case["outputs"][0]["worst_index"], json!([1, 1, 1]));
    assert_eq!(case["outputs"][0]["within_tolerance"], false);
    assert_eq!(case["outputs"][0]["accurate"], true);
    assert_eq!(case["outputs"][1]["within_tolerance"], true);
}

#[test]
fn the_reference_has_a_verdict_of_its_own() {
    // A source that is far from the reference itself allows as much.
    let mut built = paged("F32");
    put(built.get("ref.o"), 13, 10.5);
    assert_eq!(judge(&built).0, 0);
    // Source and reference agree, and we are within the tolerance: the accuracy gate alone sees it.
    let tight = |b: &mut Built| {
        for at in 0..32 {
            let x = f32::from_le_bytes(b.get("out.o").bytes[at * 4..][..4].try_into().unwrap());
            put(b.get("ref.o"), at, x * 1.001);
            put(b.get("out.o"), at, x * 1.001);
        }
    };
    let mut built = paged("F32");
    tight(&mut built);
    let (code, _, case) = judge(&built);
    assert_eq!(code, 1);
    assert_eq!(case["outputs"][0]["within_tolerance"], true);
    assert_eq!(case["outputs"][0]["accurate"], false);
}

#[test]
fn f39_nan_and_infinities() {
    let mut nan = paged("F32");
    put(nan.get("out.o"), 9, f32::NAN);
    let (code, verdict, case) = judge(&nan);
    assert_eq!((code, verdict.as_str()), (1, "fail"));
    let fault = case["outputs"][0]["fault"].as_str().unwrap();
    assert!(fault.starts_with("out.o at [1, 0, 1]: NaN on one side"), "{fault}");

    // Ours is NaN: a key that a query sees is NaN. Row 0's first token, page 3 slot 0.
    let mut ours = paged("F32");
    put(ours.get("in.kv"), 3 * 16, f32::NAN);
    let (code, _, case) = judge(&ours);
    assert_eq!(code, 1);
    assert!(case["outputs"][0]["fault"].as_str().unwrap().starts_with("out.o at [0, 0, 0]: NaN on one side"));
    // And recorded as NaN too: reported, not passed.
    for at in 0..8 {
        put(ours.get("out.o"), at, f32::NAN);
    }
    let (code, _, case) = judge(&ours);
    assert_eq!(code, 1);
    assert!(case["outputs"][0]["fault"].as_str().unwrap().contains("NaN on both sides"));

    // Row 2 sees nothing: -inf on both sides passes (above), +inf does not, nor does a number.
    for wrong in [f32::INFINITY, -49994.0, f32::NAN] {
        let mut built = paged("F32");
        put(built.get("out.lse"), 6, wrong);
        let (code, _, case) = judge(&built);
        assert_eq!(code, 1, "{wrong}");
        assert_eq!(case["outputs"][1]["worst_index"], json!([3, 0]));
    }
    let mut built = paged("F32");
    put(built.get("ref.lse"), 6, f32::INFINITY);
    let (code, _, case) = judge(&built);
    assert_eq!((code, &case["outputs"][1]["accurate"]), (1, &json!(false)));
}

#[test]
fn f39_a_tolerance_of_zero_is_legal() {
    let mut built = paged("F32");
    built.mstar["tolerance"] = json!({"atol": 0, "rtol": 0});
    assert_eq!(judge(&built).0, 0);
    put(built.get("out.lse"), 0, f32::from_bits(3f32.ln().to_bits() + 1));
    assert_eq!(judge(&built).0, 1);
}

#[test]
fn f03_slots_that_nobody_sees_may_hold_anything() {
    let mut built = paged("F32");
    // Page 0 belongs to nobody; slot 1 of page 1 is past row 0's end.
    let garbage: Vec<usize> = (0..16).chain([20, 21, 22, 23, 28, 29, 30, 31]).collect();
    for value in [f32::NAN, f32::INFINITY] {
        for &at in &garbage {
            put(built.get("in.kv"), at, value);
        }
        let (code, _, case) = judge(&built);
        assert_eq!(code, 0, "{case}");
    }
}

#[test]
fn empty_batches_and_rows() {
    let mut built = paged("F32");
    for (name, shape) in [
        ("in.q", [0usize, 2, 4].as_slice()),
        ("out.o", &[0, 2, 4]),
        ("ref.o", &[0, 2, 4]),
        ("out.lse", &[0, 2]),
        ("ref.lse", &[0, 2]),
    ] {
        built.set(name, floats("F32", shape, &[]));
    }
    built.set("in.qo_indptr", ints(&[0, 0, 0, 0]));
    assert_eq!(judge(&built).0, 0, "rows, and no query in any");
    for name in ["in.qo_indptr", "in.kv_indptr"] {
        built.set(name, ints(&[0]));
    }
    built.set("in.kv_indices", ints(&[]));
    built.set("in.kv_last_page_len", ints(&[]));
    assert_eq!(judge(&built).0, 0, "no row at all");
    built.set("in.kv", floats("F32", &[0, 2, 2, 1, 4], &[]));
    assert_eq!(judge(&built).0, 0, "no page at all");
}

#[test]
fn options_may_be_off_absent_null_or_floats() {
    let mut built = paged("F32");
    built.mstar["params"] = json!({
        "page_size": 2.0, "causal": 1, "sm_scale": 1, "window_left": -1, "logits_soft_cap": 0,
    });
    assert_eq!(judge(&built).0, 0);
    built.mstar["params"]["window_left"] = Value::Null;
    built.mstar["params"]["logits_soft_cap"] = Value::Null;
    assert_eq!(judge(&built).0, 0);
    // With K = 0 a cap changes nothing, and a window of a million sees everything.
    built.mstar["params"]["window_left"] = json!(1_000_000);
    built.mstar["params"]["logits_soft_cap"] = json!(30);
    assert_eq!(judge(&built).0, 0);
    // A window of 0 does: every query sees itself alone.
    built.mstar["params"]["window_left"] = json!(0);
    assert_eq!(judge(&built).0, 1);
}

#[test]
fn what_is_not_read_is_noted_and_never_passed_over() {
    let mut built = paged("F32");
    built.mstar["params"]["rope_theta"] = json!(10000);
    built.set("in.extra", floats("F32", &[1], &[0.0]));
    built.set("scales", floats("F32", &[1], &[0.0]));
    let (code, verdict, case) = judge(&built);
    assert_eq!((code, verdict.as_str()), (0, "pass"));
    let notes = case["notes"].to_string();
    for name in ["params.rope_theta", "in.extra", "scales"] {
        assert!(notes.contains(name), "{notes}");
    }
}

#[test]
fn order_of_keys_and_odd_alignment_mean_nothing() {
    let mut built = paged("BF16");
    // One byte in front puts every other tensor at an odd address; reversed, the i32 lie behind bf16.
    built.tensors.reverse();
    built.tensors.insert(0, ("pad".into(), Tensor { dtype: "U8", shape: vec![1], bytes: vec![0] }));
    assert_eq!(judge(&built).0, 0);
}

#[test]
fn f21_a_base_2_lse_is_converted_once() {
    let mut built = paged("F32");
    let two = |name: &str, built: &mut Built| {
        for at in 0..8 {
            let natural = f32::from_le_bytes(built.get(name).bytes[at * 4..][..4].try_into().unwrap());
            put(built.get(name), at, (f64::from(natural) / std::f64::consts::LN_2) as f32);
        }
    };
    two("out.lse", &mut built);
    two("ref.lse", &mut built);
    assert_eq!(judge(&built).0, 1, "taken for natural they are wrong");
    built.mstar["params"]["lse_base"] = json!(2);
    assert_eq!(judge(&built).0, 0);
    built.mstar["params"]["lse_base"] = json!(2.0);
    assert_eq!(judge(&built).0, 0);
}

#[test]
fn a_failure_beside_a_broken_file_ends_with_2_and_alone_with_1() {
    let dir = tempfile::tempdir().unwrap();
    let mut wrong = paged("F32");
    put(wrong.get("out.o"), 0, 100.0);
    wrong.write(&dir.path().join("wrong.safetensors"));
    paged("F32").write(&dir.path().join("good.safetensors"));
    let args = ["--backend", "reference", dir.path().to_str().unwrap()];
    let run = mstar(args);
    assert_eq!(run.code, 1);
    assert!(run.stdout.contains("1 passed, 1 failed"), "{}", run.stdout);
    assert!(run.stdout.contains("out.o at [0, 0, 0]: outside its tolerance"), "{}", run.stdout);
    assert!(run.stdout.lines().all(|line| line.chars().count() <= 80), "{}", run.stdout);
    std::fs::write(dir.path().join("broken.safetensors"), "").unwrap();
    assert_eq!(mstar(args).code, 2);
}

#[test]
fn backends_and_devices_that_are_not_here_are_refused_plainly() {
    let dir = tempfile::tempdir().unwrap();
    let path = paged("F32").write(&dir.path().join("case.safetensors"));
    let path = path.to_str().unwrap();
    let run = mstar(["--backend", "mla", path]);
    assert_eq!(run.code, 2);
    assert!(run.stderr.contains("backend mla does not run paged"), "{}", run.stderr);
    assert!(run.stdout.contains("1 unsupported"), "{}", run.stdout);
    assert_eq!(mstar(["--backend", "nonsense", path]).code, 2);
    let run = mstar(["--device", "cuda:99", "--backend", "reference", path]);
    assert_eq!((run.code, run.stdout.as_str()), (2, ""));
    assert!(run.stderr.contains("cuda:99"), "{}", run.stderr);
    assert_eq!(mstar(["--device", "tpu", path]).code, 2);
}

#[test]
fn dumps_hold_what_was_computed_under_the_same_names() {
    let dir = tempfile::tempdir().unwrap();
    let cases = dir.path().join("cases");
    std::fs::create_dir_all(cases.join("deep")).unwrap();
    let built = paged("BF16");
    built.write(&cases.join("a.safetensors"));
    built.write(&cases.join("deep/a.safetensors"));
    let dump = dir.path().join("out/dump");
    let run = mstar(["--backend", "reference", "--dump", dump.to_str().unwrap(), cases.to_str().unwrap()]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    for name in ["cases/a.safetensors", "cases/deep/a.safetensors"] {
        let bytes = std::fs::read(dump.join(name)).unwrap();
        let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        let words = metadata.metadata().as_ref().unwrap();
        assert_eq!(serde_json::from_str::<Value>(&words["mstar"]).unwrap(), built.mstar);
        assert!(words["mstar_case"].ends_with(name));
        let dumped = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let mut names = dumped.names();
        names.sort_unstable();
        assert_eq!(names, ["out.lse", "out.o"]);
        let mut expected = built.clone();
        let o = dumped.tensor("out.o").unwrap();
        assert_eq!((o.dtype(), o.shape()), (safetensors::Dtype::BF16, [4usize, 2, 4].as_slice()));
        assert_eq!(o.data(), expected.get("out.o").bytes);
    }
    // Onto the cases themselves it is refused, and they stay as they are.
    let run =
        mstar(["--backend", "reference", "--dump", dir.path().to_str().unwrap(), cases.to_str().unwrap()]);
    assert_eq!(run.code, 2);
    assert!(run.stderr.contains("overwrite the case"), "{}", run.stderr);
    assert_eq!(std::fs::read(cases.join("a.safetensors")).unwrap(), built.bytes());
}

#[test]
fn dumps_that_would_take_one_place_are_refused_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    for root in ["one/cases", "two/cases"] {
        std::fs::create_dir_all(at(root)).unwrap();
        paged("F32").write(&dir.path().join(root).join("a.safetensors"));
    }
    let dump = |folder: &str, cases: &[&str]| {
        let cases: Vec<String> = cases.iter().map(|case| at(case)).collect();
        let fixed = ["--backend", "reference", "--dump", &at(folder)].map(str::to_owned);
        mstar(fixed.into_iter().chain(cases))
    };
    let run = dump("out", &["one/cases", "two/cases"]);
    assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{}", run.stderr);
    for part in ["one/cases/a.safetensors", "two/cases/a.safetensors", "out/cases/a.safetensors"] {
        assert!(run.stderr.contains(part), "`{part}` is missing from: {}", run.stderr);
    }
    assert!(!dir.path().join("out").exists());
    // Nor may a dump take the place of another case.
    let run = dump("one", &["two/cases", "one/cases/a.safetensors"]);
    assert!(run.code == 2 && run.stderr.contains("would overwrite the case"), "{}", run.stderr);
    assert_eq!(std::fs::read(at("one/cases/a.safetensors")).unwrap(), paged("F32").bytes());
    // The same file named twice is one case.
    assert_eq!(dump("out", &["one/cases", "one/cases"]).code, 0);
}
