//! Specs as a user meets them: the program's answers, its exit codes, and the width of its lines.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Columns that no line passes.
const COLUMNS: usize = 80;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The program, run from the workspace's root as a user would.
fn mstar(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mstar"));
    command.args(args).current_dir(root()).env_remove("MSTAR_DATA").env_remove("MSTAR_ISA");
    command.output().expect("the program starts")
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("stdout is UTF-8")
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("stderr is UTF-8")
}

/// The shipped specs.
fn shipped() -> Vec<PathBuf> {
    let entries = fs::read_dir(root().join("specs")).expect("specs is a directory");
    let mut found: Vec<PathBuf> = entries
        .map(|entry| entry.expect("a readable entry").path())
        .filter(|path| path.extension().is_some_and(|ext| ext == "yaml"))
        .collect();
    found.sort();
    assert!(found.len() >= 10, "{found:?}");
    found
}

/// Refused: exit code 2, nothing on stdout, these lines on stderr.
#[track_caller]
fn refused(args: &[&str], expected: &str) {
    let output = mstar(args);
    assert_eq!(stderr(&output).trim_end(), expected, "{args:?}");
    assert_eq!(output.status.code(), Some(2), "{args:?}");
    assert_eq!(stdout(&output), "", "{args:?}");
}

#[track_caller]
fn fits(text: &str, what: &str) {
    for line in text.lines() {
        assert!(line.chars().count() <= COLUMNS, "{what}: {} columns: {line}", line.chars().count());
        assert!(!line.contains('\u{1b}'), "{what}: colour without a terminal: {line}");
    }
}

#[test]
fn every_shipped_spec_says_what_it_shows_and_is_explained() {
    for path in shipped() {
        let text = fs::read_to_string(&path).unwrap();
        let comment: String = text.lines().take_while(|line| line.starts_with('#')).collect();
        let says = ["second", " s ", "minute"].iter().any(|unit| comment.contains(unit));
        assert!(says, "{path:?} does not say how long it takes");
        let name = path.file_stem().unwrap().to_str().unwrap();
        assert!(text.contains(&format!("\nname: {name}\n")), "{path:?} is called otherwise");
        let spec = format!("specs/{name}.yaml");
        let output = mstar(&["explain", &spec]);
        assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""), "{spec}");
        let said = stdout(&output);
        fits(&said, &spec);
        assert!(said.contains("mstar run would start it."), "{said}");
    }
}

#[test]
fn explain_as_json_holds_the_same_figures() {
    let output = mstar(&["explain", "specs/quickstart.yaml", "--json"]);
    let value: serde_json::Value = serde_json::from_str(&stdout(&output)).expect("valid JSON");
    let lines = value["memory"].as_array().expect("memory by line");
    let sum: u64 = lines.iter().filter(|l| l["at_most"] == false).map(|l| l["bytes"].as_u64().unwrap()).sum();
    assert_eq!(value["memory_bytes"].as_u64(), Some(sum));
    assert!(sum > 0 && value["refusals"].as_array().unwrap().is_empty(), "{value}");
    assert_eq!(value["name"], "quickstart");
}

#[test]
fn explain_counts_the_pages_that_a_dense_pass_never_writes() {
    let explained = |set: &[&str]| {
        let output = mstar(&[&["explain", "specs/diffusion-cfg.yaml", "--json"], set].concat());
        let value: serde_json::Value = serde_json::from_str(&stdout(&output)).expect("valid JSON");
        value["layers"][0]["why"].as_str().expect("why").to_owned()
    };
    assert!(explained(&[]).contains("reserves up to 16 pages"), "{}", explained(&[]));
    let larger = explained(&["--set", "resources.kv.page_size=100"]);
    assert!(larger.contains("reserves up to 3 pages"), "{larger}");
    let paged = explained(&["--set", "resources.attn.backend=paged"]);
    assert!(!paged.contains("reserves"), "{paged}");
}

#[test]
fn a_run_allocates_what_explain_said() {
    let folder = tempfile::tempdir().unwrap();
    for name in [
        "quickstart",
        "cfg-forks",
        "diffusion-cfg",
        "llama-gqa-decode",
        "deepseek-mla-decode",
        "glm-dsa-prefill",
    ] {
        let spec = format!("specs/{name}.yaml");
        let json = |text: &str| serde_json::from_str::<serde_json::Value>(text).expect("valid JSON");
        let said = json(&stdout(&mstar(&["explain", &spec, "--json"])))["memory_bytes"].as_f64().unwrap();
        let path = folder.path().join("report.json");
        let run = mstar(&["run", &spec, "--quiet", "--report", path.to_str().unwrap()]);
        assert_eq!(run.status.code(), Some(0), "{}", stderr(&run));
        let memory = &json(&fs::read_to_string(&path).unwrap())["memory"];
        let took = memory["allocated_peak"].as_f64().unwrap();
        assert!((took - said).abs() <= 0.01 * said, "{name}: {took} bytes taken, {said} foreseen");
        if let Some(resident) = memory["resident_peak"].as_f64() {
            let most = 1.1 * said + (64 << 20) as f64;
            assert!(resident <= most, "{name}: {resident} bytes resident, {said} foreseen");
        }
    }
}

/// Buckets smaller than a batch, as large, and far beyond what will ever run; warmed up in every slot, whether or not
/// steps are planned ahead in them.
#[test]
fn a_run_allocates_what_explain_said_whatever_its_buckets() {
    let folder = tempfile::tempdir().unwrap();
    let json = |text: &str| serde_json::from_str::<serde_json::Value>(text).expect("valid JSON");
    for (name, requests, graph, preplan) in [
        ("quickstart", 6, "[1, 2, 4], slots: 1", false),
        ("quickstart", 6, "[64], slots: 2", true),
        ("cfg-forks", 4, "[3], slots: 2", false),
        ("cfg-forks", 4, "[2, 900], slots: 4", true),
        ("cfg-forks", 4, "[64], slots: 2", false),
        ("cfg-forks", 1, "[8, 65536], slots: 2", false),
        ("diffusion-cfg", 4, "[3, 8], slots: 2", true),
        ("whisper-cross", 4, "[1, 4], slots: 2", false),
        ("speculative-tree", 4, "[3, 900], slots: 3", false),
        ("llama-gqa-decode", 3, "[2, 64], slots: 2", true),
    ] {
        let (requests, graph) =
            (format!("workload.requests={requests}"), format!("graph={{ buckets: {graph} }}"));
        let preplan = format!("workload.preplan={preplan}");
        let spec = format!("specs/{name}.yaml");
        let set = ["--set", &requests, "--set", "workload.max_batch=4", "--set", &graph, "--set", &preplan];
        let said = json(&stdout(&mstar(&[&["explain", &spec, "--json"], &set[..]].concat())));
        let said = said["memory_bytes"].as_f64().unwrap();
        let path = folder.path().join("report.json");
        let report = path.to_str().unwrap();
        let run =
            mstar(&[&["run", &spec, "--quiet", "--steps", "40", "--report", report], &set[..]].concat());
        assert_eq!(run.status.code(), Some(0), "{}", stderr(&run));
        let report = json(&fs::read_to_string(&path).unwrap());
        let took = report["memory"]["allocated_peak"].as_f64().unwrap();
        let off = (took - said).abs();
        assert!(off <= 0.01 * said, "{name}, {graph}, {preplan}: {took} bytes taken, {said} foreseen");
    }
}

#[test]
fn f36_a_refused_spec_is_exit_code_2_and_a_line_for_each_fault() {
    let folder = tempfile::tempdir().unwrap();
    let good = fs::read_to_string(root().join("specs/quickstart.yaml")).unwrap();
    let path = folder.path().join("bad.yaml");
    let file = path.to_str().unwrap();
    let bad = good.replace("page_size:", "page-size:").replace("max_batch: 8", "max_batch: 0");
    fs::write(&path, &bad).unwrap();
    let line = |needle: &str| bad.lines().position(|line| line.contains(needle)).unwrap() + 1;
    let expected = format!(
        "mstar: {file}:{}:5: resources.kv.page-size: unknown key in a resource of kind kv; write page_size\n\
         mstar: {file}:{}:14: workload.max_batch: expected a whole number from 1 to 65536, got 0",
        line("page-size"),
        line("max_batch")
    );
    for command in ["explain", "run"] {
        refused(&[command, file], &expected);
    }
}

#[test]
fn a_file_that_is_no_spec_is_one_line() {
    refused(
        &["explain", "nowhere.yaml"],
        "mstar: nowhere.yaml: no such file; specs/quickstart.yaml is one to begin with",
    );
    refused(&["explain", "specs"], "mstar: specs: a directory, not a spec; name one file");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("empty.yaml");
    fs::write(&path, "").unwrap();
    let file = path.to_str().unwrap();
    refused(
        &["run", file],
        &format!("mstar: {file}: the file is empty; see specs/quickstart.yaml for a spec"),
    );
    fs::write(&path, [0xff, 0xfe, 0, 1]).unwrap();
    refused(&["run", file], &format!("mstar: {file}:1:1: not UTF-8 text; is this a YAML file?"));
}

#[test]
fn overrides_reach_the_spec_and_are_judged() {
    let spec = "specs/quickstart.yaml";
    let output = mstar(&["explain", spec, "--set", "model.layers=3", "--json"]);
    let value: serde_json::Value = serde_json::from_str(&stdout(&output)).expect("valid JSON");
    assert_eq!(value["layers"][0]["layers"], 3);
    refused(
        &["explain", spec, "--set", "model.layer=3"],
        &format!("mstar: {spec}: --set model.layer: unknown key in model; did you mean layers?"),
    );
    refused(
        &["run", spec, "--set", "workload.requests"],
        &format!("mstar: {spec}: --set workload.requests: expected key=value, such as workload.requests=20"),
    );
}

#[test]
fn a_backend_is_found_or_the_nearest_said() {
    let spec = "specs/quickstart.yaml";
    let said = |backend: &str| {
        let output = mstar(&["explain", spec, "--set", &format!("resources.attn.backend={backend}")]);
        assert_eq!(output.status.code(), Some(2), "{backend}");
        stderr(&output)
    };
    assert!(
        said("flashinfer").contains("is called paged here; write backend: paged"),
        "{}",
        said("flashinfer")
    );
    assert!(said("pagd").contains("no backend is called pagd; there are: "), "{}", said("pagd"));
}

#[test]
fn a_backend_that_is_not_built_is_explained_and_not_run() {
    let spec = "specs/quickstart.yaml";
    let set = "resources.attn.backend=mla";
    let explained = mstar(&["explain", spec, "--set", set]);
    assert_eq!(explained.status.code(), Some(0));
    assert!(stdout(&explained).contains("mstar run would refuse it"), "{}", stdout(&explained));
    fits(&stdout(&explained), "explain");
    let run = mstar(&["run", spec, "--set", set]);
    assert_eq!(run.status.code(), Some(2));
    assert_eq!(
        stderr(&run).lines().filter(|line| line.starts_with("mstar: ")).count(),
        1,
        "{}",
        stderr(&run)
    );
    assert!(stderr(&run).contains("attn: backend mla: "), "{}", stderr(&run));
}

#[test]
fn a_spec_that_does_not_fit_in_memory_is_not_started() {
    let spec = "specs/quickstart.yaml";
    // 64 TiB: below what a spec may say, above what a machine has.
    let sets = ["--set", "resources.kv.max_num_pages=2000000000", "--set", "resources.kv.host_pages=0"];
    let args = [&["run", spec][..], &sets].concat();
    let run = mstar(&args);
    assert_eq!(run.status.code(), Some(2), "{}", stderr(&run));
    let said = stderr(&run);
    assert!(said.contains("of memory and") && said.contains("lower resources.kv.max_num_pages"), "{said}");
    // What it says would fit does.
    let fits = said.split("to at most ").nth(1).and_then(|rest| rest.split(' ').next()).expect("a value");
    let set = format!("resources.kv.max_num_pages={fits}");
    let explained = mstar(&["explain", spec, "--set", &set, "--set", "resources.kv.host_pages=0"]);
    assert!(!stdout(&explained).contains("are available; lower"), "{fits}: {}", stdout(&explained));
}

#[test]
fn f37_without_a_card_auto_is_the_cpu_and_cuda_is_a_sentence() {
    let spec = "specs/quickstart.yaml";
    let auto = mstar(&["explain", spec, "--device", "auto"]);
    assert_eq!(auto.status.code(), Some(0), "{}", stderr(&auto));
    let first = stdout(&auto).lines().find(|line| line.starts_with("  device ")).unwrap().to_string();
    assert!(first.contains("cpu ("), "{first}");
    let cpu = stdout(&mstar(&["explain", spec, "--device", "cpu"]));
    assert!(cpu.lines().any(|line| line.starts_with("  device     cpu;")), "{cpu}");
    for device in ["cuda", "cuda:0", "cuda:99"] {
        for command in ["explain", "run"] {
            let output = mstar(&[command, spec, "--device", device]);
            let said = stderr(&output);
            assert_eq!(output.status.code(), Some(2), "{said}");
            assert_eq!(said.lines().count(), 1, "{said}");
            assert!(said.starts_with("mstar: device cuda:") && said.contains("--device cpu"), "{said}");
            assert!(!said.contains("panicked"), "{said}");
        }
    }
    refused(
        &["explain", spec, "--device", "tpu"],
        "mstar: --device: expected auto, cpu, cuda or cuda:N with N below 1024, got tpu",
    );
}

#[test]
fn backends_says_what_is_here() {
    let output = mstar(&["backends"]);
    assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""));
    let said = stdout(&output);
    fits(&said, "backends");
    for word in ["paged", "cross", "mla", "cpu", "cuda", "nvrtc"] {
        assert!(said.contains(&format!("\n  {word}")), "{word}: {said}");
    }
    let json = stdout(&mstar(&["backends", "--json"]));
    let value: serde_json::Value = serde_json::from_str(&json).expect("valid JSON");
    assert!(value["cpu"]["threads"].as_u64().unwrap() >= 1);
}

#[test]
fn arguments_are_refused_with_exit_code_2_and_help_fits() {
    assert_eq!(mstar(&[]).status.code(), Some(2));
    assert_eq!(mstar(&["explain"]).status.code(), Some(2));
    assert_eq!(mstar(&["explian", "x"]).status.code(), Some(2));
    for args in [&["--help"][..], &["run", "--help"], &["explain", "--help"], &["backends", "--help"]] {
        let output = mstar(args);
        assert_eq!(output.status.code(), Some(0), "{args:?}");
    }
    assert!(stdout(&mstar(&["--help"])).contains("Exit codes: 0"));
}

#[test]
fn an_instruction_set_that_is_not_here_is_refused() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mstar"));
    let output = command.arg("backends").env("MSTAR_ISA", "avx1024").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("avx1024"), "{}", stderr(&output));
}

/// What a run on a device takes and builds; on the emulated one, where there is no card.
#[cfg(feature = "emulator")]
mod device {
    use super::*;

    fn on_device(args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_mstar"));
        command.args(args).args(["--device", "cuda:0"]).current_dir(root());
        command.env("MSTAR_CUDA", "emulated").env_remove("MSTAR_DATA").env_remove("MSTAR_ISA");
        command.output().expect("the program starts")
    }

    fn json(text: &str) -> serde_json::Value {
        serde_json::from_str(text).expect("valid JSON")
    }

    /// A spec of each kind of cache and backend, made small: what is explained, and the report of its run.
    fn explained_and_run(name: &str, sets: &[&str]) -> (serde_json::Value, serde_json::Value) {
        let folder = tempfile::tempdir().unwrap();
        let (path, spec) = (folder.path().join("report.json"), format!("specs/{name}.yaml"));
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        let explained = on_device(&[&["explain", &spec, "--json"], &sets[..]].concat());
        let steps = ["run", &spec, "--quiet", "--steps", "4", "--report", path.to_str().unwrap()];
        let run = on_device(&[&steps[..], &sets].concat());
        assert_eq!(run.status.code(), Some(0), "{name}: {}", stderr(&run));
        (json(&stdout(&explained)), json(&fs::read_to_string(&path).unwrap()))
    }

    const SMALL: [(&str, &[&str]); 7] = [
        ("quickstart", &["workload.requests=3"]),
        ("fp8-cache", &["workload.requests=2", "workload.prompt_len=[100]"]),
        ("cfg-forks", &["workload.requests=2", "workload.max_batch=2"]),
        ("diffusion-cfg", &["workload.requests=2", "workload.max_batch=2"]),
        ("whisper-cross", &["workload.requests=2", "workload.max_batch=2", "model.layers=2"]),
        ("deepseek-mla-decode", &["workload.requests=2", "workload.max_batch=2", "model.layers=1"]),
        (
            "world-model",
            &[
                "workload.requests=1",
                "workload.max_batch=1",
                "model.layers=3",
                "graph={ buckets: [1], slots: 1 }",
                "workload.preplan=false",
            ],
        ),
    ];

    /// Lists of work, whose size is known when they are made, are beside what is foreseen: they are pinned twice for once that they
    /// lie on the device.
    #[test]
    fn a_run_builds_every_kernel_before_its_first_step_and_takes_what_explain_said() {
        for (name, sets) in SMALL {
            let (said, report) = explained_and_run(name, sets);
            assert_eq!(report["steps"]["late_kernels"], serde_json::Value::Null, "{name}");
            let apart = &report["memory"]["apart"];
            let bytes = |value: &serde_json::Value| value.as_f64().expect("bytes");
            for (place, beside) in [("device", 0.01), ("pinned", 0.02)] {
                let foreseen = bytes(&said[format!("memory_{place}_bytes")]);
                let took = bytes(&apart[format!("{place}_peak")]);
                assert_eq!(foreseen, bytes(&apart[format!("{place}_estimated")]), "{name}");
                let most = beside * bytes(&said["memory_device_bytes"]);
                assert!(
                    (foreseen..=foreseen + most).contains(&took),
                    "{name}, {place}: {took} bytes taken, {foreseen} foreseen"
                );
            }
        }
    }

    #[test]
    fn a_spec_that_a_card_has_no_room_for_is_refused_before_anything_is_built_or_taken() {
        let cache = tempfile::tempdir().unwrap();
        let spec = "specs/quickstart.yaml";
        let pages = "resources.kv.max_num_pages=2000000";
        let mut command = Command::new(env!("CARGO_BIN_EXE_mstar"));
        command.args(["run", spec, "--device", "cuda:0", "--set", pages]).current_dir(root());
        let run =
            command.env("MSTAR_CUDA", "emulated").env("MSTAR_CACHE_DIR", cache.path()).output().unwrap();
        let said = stderr(&run);
        assert_eq!(run.status.code(), Some(2), "{said}");
        for part in
            ["of cuda:0's memory", "8.0 GiB are free", "lower resources.kv.max_num_pages from 2000000"]
        {
            assert!(said.contains(part), "{part}: {said}");
        }
        assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 0, "a kernel was built");
        let explained = on_device(&["explain", spec, "--set", pages, "--json"]);
        let refusals = json(&stdout(&explained))["refusals"].to_string();
        assert!(refusals.contains("of cuda:0's memory"), "{refusals}");
    }
}

/// What a spec's resources ask for on a card, with no card, no driver and no compiler.
#[test]
#[cfg(all(
    feature = "cuda",
    feature = "paged",
    feature = "mla",
    feature = "dense",
    feature = "flex",
    feature = "dsa"
))]
fn the_kernels_that_a_spec_needs_are_named_for_an_architecture() {
    let listed = |spec: &str, arch: &str, more: &[&str]| {
        let output = mstar(&[&["kernels", "build", spec, "--arch", arch, "--list"], more].concat());
        assert_eq!(output.status.code(), Some(0), "{spec}: {}", stderr(&output));
        fits(&stdout(&output), spec);
        stdout(&output)
    };
    for path in shipped() {
        let spec = path.to_str().expect("plain letters");
        let text = listed(spec, "sm_90a", &["--set", "device=cpu"]);
        assert!(text.starts_with("sm_90a\n  "), "{spec}: {text}");
        assert!(text.lines().count() > 2, "{spec}: {text}");
        // By whichever kernels serve that card.
        let uses = |units: &[&str]| units.iter().any(|unit| text.contains(unit));
        let has = |word: &str| fs::read_to_string(&path).expect("a spec").contains(word);
        assert_eq!(uses(&["scores.cu", "scores_wide.cu"]), has("kind: dsa"), "{spec}: {text}");
        assert_eq!(
            uses(&["latent.cu", "latent_few.cu", "latent_wide.cu"]),
            has("layout: mla"),
            "{spec}: {text}"
        );
        assert_eq!(listed(spec, "sm_90a", &[]), text, "{spec}: the device that it names changes nothing");
    }
    // Who has less shared memory is served by other variants; f32 by the plain kernel.
    let spec = "specs/quickstart.yaml";
    assert_ne!(
        listed(spec, "sm_90a", &[]).replace("sm_90a", ""),
        listed(spec, "sm_86", &[]).replace("sm_86", "")
    );
    assert!(listed(spec, "sm_80", &["--set", "dtype=f32"]).contains("plain.cu"));
    let only = listed(spec, "sm_90a", &["--only", "decode_few.cu"]);
    let kernels = |text: &str| text.matches(".cu ").count();
    assert!(kernels(&only) > 0 && kernels(&only) < kernels(&listed(spec, "sm_90a", &[])), "{only}");
    assert_eq!(only.matches("decode_few.cu ").count(), kernels(&only), "{only}");
    refused(
        &["kernels", "build", spec, "--arch", "sm_90a", "--list", "--only", "nothing"],
        "mstar: --only nothing: no kernel of the list has it in its line",
    );
    let output = mstar(&["kernels", "build", "no/such.yaml", "--arch", "sm_90a", "--list"]);
    assert!(
        output.status.code() == Some(2) && stderr(&output).contains("no/such.yaml"),
        "{}",
        stderr(&output)
    );
}
