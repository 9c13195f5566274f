use super::super::nvrtc::here_or_skip;
use super::*;
use std::fs;

/// Twice what it finds, TIMES times over; a user's code may say what twice is.
const TEXT: &str = "
#include \"ptx.cuh\"
#ifdef MSTAR_SNIPPET
#include \"snippet.cuh\"
#else
DEVICE float twice(float x) { return 2.0f * x; }
#endif
struct Params {
    u64 x;
};
MSTAR_KERNEL(double_it, Params, 32, 1) {
    float* x = reinterpret_cast<float*>(p.x);
    for (int i = 0; i < TIMES; i++) x[thread_x()] = twice(x[thread_x()]);
}
";
const UNIT: Unit = Unit::of("double.cu", TEXT);
const SM90: Target = Target::Sm { major: 9, minor: 0 };
const SM80: Target = Target::Sm { major: 8, minor: 0 };

fn key() -> Key {
    Key::new(UNIT, "double_it").with("TIMES", 3)
}

fn id_of(key: &Key, arch: &str, compiler: &str) -> Id {
    let mut options = vec![format!("--gpu-architecture={arch}")];
    options.extend(defines(key));
    id(key, &headers(key, |_| true), &options, compiler)
}

#[test]
fn everything_that_changes_a_binary_changes_its_name() {
    let base = id_of(&key(), "sm_90a", "nvrtc 13.0");
    assert_eq!(base, id_of(&key(), "sm_90a", "nvrtc 13.0"));
    let other_text = Key::new(Unit::of("double.cu", "// other"), "double_it").with("TIMES", 3);
    let others = [
        id_of(&key(), "sm_80", "nvrtc 13.0"),
        id_of(&key(), "sm_90a", "nvrtc 12.9"),
        id_of(&key().with("TIMES", 4), "sm_90a", "nvrtc 13.0"),
        id_of(&key().with("M", 3), "sm_90a", "nvrtc 13.0"),
        id_of(&key().with_snippet("DEVICE float twice(float x);".into()), "sm_90a", "nvrtc 13.0"),
        id_of(&key().with_snippet("DEVICE float twice(float y);".into()), "sm_90a", "nvrtc 13.0"),
        id_of(&other_text, "sm_90a", "nvrtc 13.0"),
        id_of(&Key::new(UNIT, "other").with("TIMES", 3), "sm_90a", "nvrtc 13.0"),
    ];
    for (at, other) in others.iter().enumerate() {
        assert_ne!(base, *other, "{at}");
        assert!(!others[..at].contains(other), "{at}");
    }
}

#[test]
fn a_unit_sees_the_headers_it_includes_and_what_those_include() {
    let key = key();
    let names = |target: &dyn Fn(&str) -> bool| -> Vec<String> {
        headers(&key, target).iter().map(|(name, _)| name.to_string()).collect()
    };
    assert_eq!(names(&|_| true), ["emulated.hpp", "ptx.cuh"]);
    assert_eq!(
        names(&|name| !source::is_emulated(name)),
        ["ptx.cuh"],
        "a card's binary does not depend on it"
    );
}

#[test]
fn an_architecture_that_the_compiler_does_not_know_is_served_by_an_older_one_of_its_major() {
    let known = [75, 80, 86, 89, 90, 100];
    let arch = |major, minor| nearest(&known, Target::Sm { major, minor });
    assert_eq!(arch(9, 0).as_deref(), Some("sm_90a"));
    assert_eq!(arch(8, 0).as_deref(), Some("sm_80"));
    assert_eq!(arch(8, 7).as_deref(), Some("sm_86"));
    assert_eq!(arch(10, 3).as_deref(), Some("sm_100"));
    assert_eq!(arch(12, 0), None);
}

#[test]
fn a_variant_is_compiled_once_and_read_after_that_and_a_corrupt_entry_is_rebuilt() {
    if here_or_skip("a_variant_is_compiled_once").is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::at(dir.path(), 1 << 20);
    for target in [SM80, SM90] {
        let first = compile_in(Some(&cache), target, &key()).unwrap();
        assert!(!first.cached);
        // A compiler that has much to do at once may keep this to itself.
        match first.resources.registers {
            0 => println!(
                "SKIPPED a_variant_is_compiled_once, in part: nothing was said of {target}'s registers"
            ),
            _ => assert!(first.resources.is_clean(), "{:?}", first.resources),
        }
        let again = compile_in(Some(&cache), target, &key()).unwrap();
        assert!(again.cached);
        assert_eq!((first.binary, first.resources), (again.binary, again.resources));
    }
    assert_eq!(cache.size().0, 2);
    for entry in fs::read_dir(dir.path()).unwrap() {
        fs::write(entry.unwrap().path(), b"torn").unwrap();
    }
    assert!(!compile_in(Some(&cache), SM90, &key()).unwrap().cached);
    assert!(compile_in(Some(&cache), SM90, &key()).unwrap().cached);
    let snippet = key().with_snippet("DEVICE float twice(float x) { return x + x; }".into());
    assert!(!compile_in(Some(&cache), SM90, &snippet).unwrap().cached);
}

#[test]
fn f37_what_was_compiled_ahead_of_time_needs_no_compiler() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::at(dir.path(), 1 << 20);
    let none = |key: &Key| machine_code(Some(&cache), Err("no compiler here"), SM90, key);
    assert_eq!(none(&key()).unwrap_err(), "no compiler here");
    let mut options: Vec<String> =
        ["--gpu-architecture=sm_90a", "--std=c++17", "-default-device", "--ptxas-options=-v"]
            .map(Into::into)
            .into();
    options.extend(defines(&key()));
    let id = id(&key(), &headers(&key(), |name| !source::is_emulated(name)), &options, "nvrtc 13.5");
    cache.put(id, "cubin", b"machine code", Resources::default()).unwrap();
    let found = none(&key()).unwrap();
    assert_eq!((found.binary, found.cached), (Binary::Cubin(b"machine code".to_vec()), true));
    assert_eq!(none(&key().with("TIMES", 4)).unwrap_err(), "no compiler here");
    assert!(machine_code(Some(&cache), Err("no compiler here"), SM80, &key()).is_err());
}

#[test]
fn without_a_folder_it_compiles_all_the_same() {
    if here_or_skip("without_a_folder_it_compiles_all_the_same").is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, b"").unwrap();
    for cache in [None, Some(Cache::at(&file.join("none"), 1 << 20))] {
        let compiled = compile_in(cache.as_ref(), SM90, &key()).unwrap();
        assert!(
            !compiled.cached
                && matches!(&compiled.binary, Binary::Cubin(bytes) if bytes.starts_with(b"\x7fELF"))
        );
    }
}

#[test]
fn a_failure_tells_the_unit_the_defines_and_the_log() {
    if here_or_skip("a_failure_tells_the_unit_the_defines_and_the_log").is_none() {
        return;
    }
    let wrong = key().with_snippet("DEVICE float twice(float x) { return y; }".into());
    let error = compile_in(None, SM90, &wrong).unwrap_err().to_string();
    for part in
        ["double.cu double_it TIMES=3 with a snippet (sm_90a)", "snippet.cuh(1)", "\"y\" is undefined"]
    {
        assert!(error.contains(part), "{part} in {error}");
    }
    let old = compile_in(None, Target::Sm { major: 99, minor: 0 }, &key()).unwrap_err().to_string();
    assert!(old.contains("compiles for") && old.contains("sm_90"), "{old}");
}

#[cfg(feature = "emulator")]
mod emulated {
    use super::*;

    /// Runs `double_it` over 32 floats, as the emulator's loader does.
    fn run(binary: &Binary) -> Vec<f32> {
        let Binary::Shared(path) = binary else { panic!("{binary:?}") };
        let mut x: Vec<f32> = (0..32).map(|i| i as f32).collect();
        // SAFETY: a library that this test made.
        let library = unsafe { libloading::Library::new(path) }.unwrap();
        type Run = unsafe extern "C" fn(u32, u32, u32, u32, u32, *const u64) -> i32;
        // SAFETY: the type is what MSTAR_KERNEL makes; the parameter points to 32 floats.
        unsafe {
            let run = library.get::<Run>("double_it__run").unwrap();
            assert_eq!(run(1, 1, 1, 32, 0, &(x.as_mut_ptr() as u64)), 0);
        }
        x
    }

    #[test]
    fn the_same_text_runs_on_the_host_from_the_cache_and_without_one() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path(), 1 << 24);
        let expected: Vec<f32> = (0..32).map(|i| 8.0 * i as f32).collect();
        let first = compile_in(Some(&cache), Target::Emulated, &key()).unwrap();
        assert_eq!((first.cached, run(&first.binary)), (false, expected.clone()));
        let again = compile_in(Some(&cache), Target::Emulated, &key()).unwrap();
        assert_eq!((again.cached, run(&again.binary)), (true, expected));
        assert_eq!(first.binary, again.binary);
        let kept_nowhere = compile_in(None, Target::Emulated, &key().with("TIMES", 1)).unwrap();
        assert_eq!(run(&kept_nowhere.binary)[..3], [0.0, 2.0, 4.0]);
        let Binary::Shared(path) = kept_nowhere.binary.clone() else { panic!() };
        drop(kept_nowhere);
        assert!(!path.exists(), "a file of no cache goes with what it was made for");
    }

    #[test]
    fn what_the_hosts_compiler_says_is_in_the_error() {
        let error = compile_in(None, Target::Emulated, &Key::new(UNIT, "double_it")).unwrap_err().to_string();
        for part in ["double.cu double_it (emulated)", "‘TIMES’ was not declared"] {
            assert!(
                error.contains(part) || error.contains(&part.replace(['‘', '’'], "'")),
                "{part} in {error}"
            );
        }
    }
}
