//! The rooms keep their doors: every dependency arrow of the workspace, the licences of everything that is
//! linked, and what each backend pulls in, read from `cargo metadata` and `cargo tree`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

const BACKENDS: [&str; 5] =
    ["mstar-attn-paged", "mstar-attn-mla", "mstar-attn-dense", "mstar-attn-flex", "mstar-dsa"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace root")
}

fn cargo(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO"))
        .args(arguments)
        .arg("--locked")
        .current_dir(root())
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("cargo prints text")
}

/// The packages that `cargo metadata` lists: ours, and with `dependencies` everything they link.
fn packages(dependencies: bool) -> Vec<Value> {
    let mut arguments = vec!["metadata", "--format-version", "1"];
    if !dependencies {
        arguments.push("--no-deps");
    }
    let metadata: Value = serde_json::from_str(&cargo(&arguments)).expect("cargo metadata prints JSON");
    metadata["packages"].as_array().expect("a list of packages").clone()
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

fn dependencies(package: &Value) -> &[Value] {
    package["dependencies"].as_array().expect("a list of dependencies")
}

/// What each crate of ours may depend on, for building and for its tests alike.
fn allowed_arrows() -> BTreeMap<&'static str, BTreeSet<&'static str>> {
    let mut arrows = BTreeMap::new();
    arrows.insert("mstar-kernels", BTreeSet::new());
    arrows.insert("mstar-core", BTreeSet::from(["mstar-kernels"]));
    for backend in BACKENDS {
        arrows.insert(backend, BTreeSet::from(["mstar-kernels", "mstar-core"]));
    }
    arrows.insert("mstar", arrows.keys().copied().collect());
    arrows
}

#[test]
fn dependencies_point_one_way() {
    let allowed = allowed_arrows();
    let packages = packages(false);
    let ours: BTreeSet<&str> = packages.iter().map(|package| text(package, "name")).collect();
    assert_eq!(ours, allowed.keys().copied().collect(), "a crate came or went: draw its arrows here");
    for package in &packages {
        let from = text(package, "name");
        for to in dependencies(package).iter().map(|d| text(d, "name")).filter(|to| ours.contains(to)) {
            assert!(allowed[from].contains(to), "{from} may not depend on {to}");
        }
    }
}

#[test]
fn only_the_program_parses_arguments_prints_and_reads_yaml() {
    const PROGRAM_ONLY: [&str; 4] = ["clap", "anyhow", "indicatif", "csv"];
    for package in &packages(false) {
        let name = text(package, "name");
        for dependency in dependencies(package) {
            let to = text(dependency, "name");
            assert!(name == "mstar" || !PROGRAM_ONLY.contains(&to), "{name} depends on {to}");
            if to.contains("saphyr") || to.contains("yaml") {
                assert_eq!(name, "mstar-core", "{name} reads YAML itself");
                assert_eq!(dependency["optional"], true, "YAML belongs to the feature `yaml` alone");
            }
        }
    }
}

#[test]
fn a_backend_brings_that_backend_and_nothing_else() {
    const STRANGERS: [&str; 7] =
        ["cudarc", "libloading", "clap", "anyhow", "indicatif", "safetensors", "serde_json"];
    for backend in BACKENDS {
        let tree = cargo(&["tree", "-p", backend, "-e", "normal,build", "--prefix", "none"]);
        for name in tree.lines().filter_map(|line| line.split_whitespace().next()) {
            let stranger = STRANGERS.contains(&name)
                || name.contains("yaml")
                || name.contains("saphyr")
                || (BACKENDS.contains(&name) && name != backend);
            assert!(!stranger, "{backend} pulls in {name}");
        }
    }
}

#[test]
fn every_crate_can_be_published() {
    for package in &packages(false) {
        let name = text(package, "name");
        for field in ["description", "license", "repository", "rust_version", "readme"] {
            assert!(package[field].is_string(), "{name} states no {field}");
        }
        assert!(package["publish"].is_null(), "{name} is kept from being published");
        for dependency in dependencies(package) {
            assert_ne!(text(dependency, "req"), "*", "{name} takes any {}", text(dependency, "name"));
        }
    }
}

/// The `allow` list of deny.toml.
fn allowed_licences() -> BTreeSet<String> {
    let deny = std::fs::read_to_string(root().join("deny.toml")).expect("deny.toml");
    let (_, list) = deny.split_once("allow = [").expect("an allow list");
    let (list, _) = list.split_once(']').expect("which ends");
    list.split(',').map(|entry| entry.trim().trim_matches('"').to_owned()).filter(|e| !e.is_empty()).collect()
}

#[test]
fn every_dependency_has_an_allowed_licence() {
    let allowed = allowed_licences();
    for package in &packages(true) {
        let expression = text(package, "license").replace('/', " OR ").replace(['(', ')'], " ");
        // Every term of a conjunction must be allowed; one term of a disjunction is enough.
        let fits = expression.split(" AND ").all(|terms| {
            terms.split(" OR ").any(|term| {
                let term = term.split_whitespace().collect::<Vec<_>>().join(" ");
                allowed.contains(&term)
            })
        });
        assert!(fits, "{} is under {expression:?}, which deny.toml does not allow", text(package, "name"));
    }
}
