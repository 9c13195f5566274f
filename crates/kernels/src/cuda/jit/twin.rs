//! The emulator's compiler: the same unit, made into a shared object by the host's C++ compiler.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::process::Command;
use std::sync::OnceLock;

/// Options of every unit. Contraction is off so that what a kernel writes as two roundings stays two; the fibers switch stacks,
/// which stack protectors and shadow stacks would take for an attack.
const OPTIONS: &[&str] = &[
    "-O2",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fno-stack-protector",
    "-fcf-protection=none",
    "-fvisibility=default",
    "-w",
    "-DMSTAR_EMULATED",
];

/// The host's C++ compiler: `$MSTAR_CXX`, or `g++`.
#[derive(Debug)]
pub(super) struct Twin {
    program: OsString,
    /// What it says of itself: a part of an entry's name.
    version: String,
}

impl Twin {
    /// The compiler of this machine.
    ///
    /// # Errors
    /// It does not run.
    pub(super) fn here() -> Result<&'static Twin, &'static str> {
        static HERE: OnceLock<Result<Twin, String>> = OnceLock::new();
        let here = HERE.get_or_init(|| {
            Twin::open(env::var_os("MSTAR_CXX").filter(|name| !name.is_empty()).unwrap_or("g++".into()))
        });
        here.as_ref().map_err(String::as_str)
    }

    fn open(program: OsString) -> Result<Twin, String> {
        let no = |why: &dyn std::fmt::Display| {
            format!(
                "the emulator needs a C++ compiler, and {} {why}; install g++, or name one in MSTAR_CXX",
                program.display()
            )
        };
        let output = Command::new(&program)
            .arg("--version")
            .output()
            .map_err(|why| no(&format!("does not start ({why})")))?;
        if !output.status.success() {
            return Err(no(&format!("ended with {}", output.status)));
        }
        let version = String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or_default().to_string();
        Ok(Twin { program, version })
    }

    pub(super) fn version(&self) -> &str {
        &self.version
    }

    /// The options of a unit with these defines.
    pub(super) fn options(defines: Vec<String>) -> Vec<String> {
        let mut options: Vec<String> = OPTIONS.iter().map(|option| option.to_string()).collect();
        // A kernel's fused multiply-adds are calls into the mathematics library where the processor is not told to have them.
        if cfg!(target_arch = "x86_64") && fused() {
            options.push("-march=x86-64-v3".into());
        }
        options.extend(defines);
        options
    }

    /// Compiles `text`, which may include `headers` by name.
    ///
    /// # Errors
    /// What the compiler says, or why it could not be run.
    pub(super) fn compile(
        &self,
        name: &str,
        text: &str,
        headers: &[(&str, &str)],
        options: &[String],
    ) -> Result<Vec<u8>, String> {
        let folder = tempfile::tempdir().map_err(|why| format!("no folder to compile in: {why}"))?;
        let write = |name: &str, text: &str| {
            fs::write(folder.path().join(name), text).map_err(|why| format!("{name}: {why}"))
        };
        write(name, text)?;
        for (name, text) in headers {
            write(name, text)?;
        }
        let output = Command::new(&self.program)
            .current_dir(folder.path())
            .args(options)
            .args(["-x", "c++", name, "-o", "unit.so"])
            .output()
            .map_err(|why| format!("{} does not start: {why}", self.program.display()))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            return Err(format!(
                "{} ended with {}\n{}",
                self.program.display(),
                output.status,
                said.trim_end()
            ));
        }
        fs::read(folder.path().join("unit.so")).map_err(|why| format!("unit.so: {why}"))
    }
}

#[cfg(target_arch = "x86_64")]
fn fused() -> bool {
    is_x86_feature_detected!("fma") && is_x86_feature_detected!("avx2") && is_x86_feature_detected!("bmi2")
}

#[cfg(not(target_arch = "x86_64"))]
fn fused() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_compiler_is_an_answer_with_the_cure() {
        let error = Twin::open("no-such-compiler".into()).unwrap_err();
        assert!(error.contains("no-such-compiler does not start") && error.contains("MSTAR_CXX"), "{error}");
        let error = Twin::open("false".into()).unwrap_err();
        assert!(error.contains("false ended with"), "{error}");
    }
}
