//! A process that is killed while it compiles, between two kernels, or while its kernels run leaves a cache that the next process
//! uses: nothing torn is taken, and what was kept whole is not made again.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use bytemuck::{Pod, Zeroable};

use crate::cuda::jit::{self, Event, Key, Unit};
use crate::cuda::{Launch, launch};
use crate::{Buffer, DType};

use super::memory::take;
use super::{DEVICE, stream};

/// Set in a process that is to be killed.
const CHILD: &str = "MSTAR_KILLED_CHILD";
const KERNELS: i64 = 5;

const UNIT: Unit = Unit::of(
    "killed.cu",
    "#include \"ptx.cuh\"\n\
     struct Params { u64 at; u64 rounds; };\n\
     MSTAR_KERNEL(killed, Params, 32, 1) {\n\
         u32 x = thread_x();\n\
         for (u64 i = 0; i < p.rounds; i++) x = x * 1664525u + NUMBER;\n\
         reinterpret_cast<u32*>(p.at)[thread_x()] = x;\n\
     }\n",
);

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    at: u64,
    rounds: u64,
}

fn key(number: i64) -> Key {
    Key::new(UNIT, "killed").with("NUMBER", number)
}

/// What the kernel of a number makes of a thread.
fn expected(number: u32, rounds: u64) -> Vec<u8> {
    let of = |x: u32| (0..rounds).fold(x, |x, _| x.wrapping_mul(1_664_525).wrapping_add(number));
    (0..32).flat_map(|x| of(x).to_ne_bytes()).collect()
}

/// The body of a process that is started below: compiles, says so line by line, runs, and says what came of it. By itself it is
/// nothing.
#[test]
fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let Some(owned) = stream("killed::child") else { return };
    let stream = owned.stream();
    jit::watch(|event| match event {
        Event::Begin { .. } => println!("\nbegin"),
        Event::Compiling { .. } => println!("\ncompiling"),
        Event::Ready { compiled, .. } => println!("\n{}", if compiled.cached { "cached" } else { "made" }),
        _ => {}
    });
    let keys: Vec<Key> = (1..=KERNELS).map(key).collect();
    jit::prepare(DEVICE, &keys).unwrap();
    println!("\nprepared");
    let mut out = Buffer::zeroed_on(DEVICE, 128).unwrap();
    let at = out.tensor_mut(0, DType::U8, &[128]).unwrap().as_mut_ptr() as u64;
    let how = Launch { grid: [1, 1, 1], block: 32, shared: 0 };
    for (number, key) in (1..).zip(&keys) {
        let rounds = 1000;
        let function = jit::function(DEVICE, key).unwrap();
        // SAFETY: the parameter is the kernel's, and points to 128 bytes of the device, which live until `take` has waited.
        unsafe { launch(&function, &stream, how, &Params { at, rounds }) }.unwrap();
        assert!(take(&stream, &out, 128) == expected(number, rounds), "kernel {number}");
        println!("\nran");
    }
    println!("\ndone");
    // Until the process is killed, or a moment longer than it takes to.
    let rounds = 1 << 20;
    let function = jit::function(DEVICE, &keys[0]).unwrap();
    for _ in 0..4 {
        // SAFETY: as above.
        unsafe { launch(&function, &stream, how, &Params { at, rounds }) }.unwrap();
    }
    println!("\nbusy");
    stream.synchronize().unwrap();
    println!("\nover");
}

fn start(folder: &Path) -> (Child, impl Iterator<Item = String> + use<>) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["cuda::trials::killed::child", "--exact", "--nocapture", "--test-threads", "1"])
        .env(CHILD, "1")
        .env("MSTAR_CACHE_DIR", folder)
        // What a killed compiler leaves goes with the folder.
        .env("TMPDIR", folder)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().expect("piped")).lines().map_while(Result::ok);
    (child, lines)
}

/// Runs to the end; how many kernels came from the cache, and how many were made.
fn finish(folder: &Path) -> (usize, usize) {
    let (mut child, lines) = start(folder);
    let lines: Vec<String> = lines.collect();
    assert!(child.wait().unwrap().success() && lines.iter().any(|line| line == "over"), "{lines:?}");
    let count = |word: &str| lines.iter().filter(|line| *line == word).count();
    assert_eq!(count("ran"), KERNELS as usize, "{lines:?}");
    (count("cached"), count("made"))
}

#[test]
fn a_process_killed_while_it_compiles_or_runs_leaves_a_cache_that_serves() {
    let test = "a_process_killed_while_it_compiles_or_runs";
    if stream(test).is_none() {
        return;
    }
    if let Err(why) = jit::function(DEVICE, &key(KERNELS + 1)) {
        if cfg!(feature = "emulator") {
            panic!("{why}");
        }
        return println!("SKIPPED {test}: {why}");
    }
    // After so many lines of a kind: while it compiles, between kernels, when all are there, in mid-run.
    let moments: &[(&str, usize)] = match super::whole() {
        true => &[
            ("begin", 1),
            ("compiling", 2),
            ("made", 1),
            ("made", 3),
            ("prepared", 1),
            ("ran", 2),
            ("busy", 1),
        ],
        false => &[("compiling", 1), ("made", 2), ("busy", 1)],
    };
    for &(word, times) in moments {
        let folder = tempfile::tempdir().unwrap();
        let (mut child, mut lines) = start(folder.path());
        let mut whole = 0;
        let mut left = times;
        for line in lines.by_ref() {
            whole += usize::from(line == "made");
            left -= usize::from(line == word);
            if left == 0 {
                break;
            }
        }
        assert_eq!(left, 0, "the process ended before {word} came {times} times");
        // SIGKILL: nothing of it runs any more.
        child.kill().unwrap();
        assert!(!child.wait().unwrap().success());
        let (cached, made) = finish(folder.path());
        assert!(cached >= whole, "killed after {times} {word}: {whole} were whole, {cached} served");
        assert_eq!(cached + made, KERNELS as usize, "killed after {times} {word}");
        // And what that one kept serves all.
        assert_eq!(finish(folder.path()), (KERNELS as usize, 0), "killed after {times} {word}");
        // An entry that was torn is made again.
        let entries =
            || std::fs::read_dir(folder.path().join("kernels")).unwrap().map(|entry| entry.unwrap().path());
        let torn =
            entries().find(|path| path.extension().is_some_and(|of| of != "partial")).expect("an entry");
        let bytes = std::fs::read(&torn).unwrap();
        std::fs::write(&torn, &bytes[..bytes.len() / 2]).unwrap();
        assert_eq!(finish(folder.path()), (KERNELS as usize - 1, 1), "one torn");
    }
}
