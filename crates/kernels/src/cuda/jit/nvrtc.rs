//! NVRTC, the CUDA run-time compiler: a binding of our own, opened at a path we chose.
//!
//! Only what compiles a text to a CUBIN is bound; these functions are alike in every 12.x and 13.x. The library is opened
//! once a process and never closed. It compiles several programs at a time from several threads.

use std::env;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::OnceLock;

use libloading::Library;

use super::find::{CURE, Places, Surroundings};

const SUCCESS: c_int = 0;
/// The oldest major version whose functions and options we know.
const OLDEST: i32 = 12;

type Program = *mut c_void;
type Text = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;

/// The compiler, opened.
#[derive(Debug)]
pub struct Nvrtc {
    path: PathBuf,
    version: (i32, i32),
    archs: Vec<i32>,
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    words: unsafe extern "C" fn(c_int) -> *const c_char,
    log_size: Size,
    log: Text,
    cubin_size: Size,
    cubin: Text,
    /// Holds the functions above; what NVRTC loads by itself, too. Never dropped, for this lives in a static.
    _libraries: Vec<Library>,
}

/// A compiled text.
#[derive(Debug)]
pub(super) struct Compiled {
    pub(super) cubin: Vec<u8>,
    pub(super) log: String,
}

impl Nvrtc {
    /// The compiler of this machine, looked for on the first call.
    ///
    /// # Errors
    /// Where it was looked for, what failed to load, and how to get one.
    pub fn here() -> Result<&'static Nvrtc, &'static str> {
        static HERE: OnceLock<Result<Nvrtc, String>> = OnceLock::new();
        let here = HERE.get_or_init(|| {
            let variable = |name: &str| env::var_os(name);
            Nvrtc::first_of(Surroundings { variable: &variable, root: Path::new("/") }.places())
        });
        here.as_ref().map_err(String::as_str)
    }

    /// Where it was found; a bare name where the loader found it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its version, major and minor.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// The architectures that it compiles for, as 10 major + minor, ascending.
    pub fn archs(&self) -> &[i32] {
        &self.archs
    }

    pub(super) fn first_of(places: Places) -> Result<Nvrtc, String> {
        let mut refused = String::new();
        for path in places.candidates {
            match Nvrtc::open(&path) {
                Ok(nvrtc) => return Ok(nvrtc),
                // A bare name that the loader does not know is no fault of a file.
                Err(_) if path.parent() == Some(Path::new("")) => {}
                Err(why) => {
                    let _ = write!(refused, "; {}: {why}", path.display());
                }
            }
        }
        Err(format!(
            "NVRTC, the CUDA run-time compiler, was not found (looked in {}){refused}; {CURE}",
            places.looked.join(", ")
        ))
    }

    fn open(path: &Path) -> Result<Nvrtc, String> {
        // SAFETY: runs the initialisers of a library of NVIDIA's name, found where its installers put it or named by the user.
        let library = unsafe { Library::new(path) }.map_err(|why| why.to_string())?;
        /// # Safety
        /// `T` is the type of the function called `name`.
        unsafe fn symbol<T: Copy>(library: &Library, name: &str) -> Result<T, String> {
            // SAFETY: the caller's.
            unsafe { library.get::<T>(name) }.map(|symbol| *symbol).map_err(|_| format!("it has no {name}"))
        }
        let (mut major, mut minor, mut count) = (0, 0, 0);
        // SAFETY: the types are those of nvrtc.h in CUDA 12.0 to 13.5 for these names; the calls write one integer a pointer,
        // and `count` of them to a vector of that length.
        let archs = unsafe {
            let version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int =
                symbol(&library, "nvrtcVersion")?;
            let number: unsafe extern "C" fn(*mut c_int) -> c_int =
                symbol(&library, "nvrtcGetNumSupportedArchs")?;
            let archs: unsafe extern "C" fn(*mut c_int) -> c_int =
                symbol(&library, "nvrtcGetSupportedArchs")?;
            if version(&mut major, &mut minor) != SUCCESS || number(&mut count) != SUCCESS {
                return Err("it does not tell its version".into());
            }
            if major < OLDEST {
                return Err(format!(
                    "it is version {major}.{minor}, and {OLDEST}.0 is the oldest that will do"
                ));
            }
            let mut list = vec![0; count.clamp(0, 1024) as usize];
            if list.len() != count as usize || archs(list.as_mut_ptr()) != SUCCESS {
                return Err("it does not tell its architectures".into());
            }
            list.sort_unstable();
            list
        };
        let mut libraries = Vec::new();
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            // NVRTC opens this one by its bare name when it first compiles. Newer ones find it beside themselves, older ones
            // only on the loader's path, or where it is open already.
            let builtins = folder.join(format!("libnvrtc-builtins.so.{major}.{minor}"));
            // SAFETY: as above; this library is data of the one just opened.
            libraries.extend(unsafe { Library::new(&builtins) }.ok());
        }
        // SAFETY: as above: these are the types in nvrtc.h.
        unsafe {
            Ok(Nvrtc {
                path: path.to_path_buf(),
                version: (major, minor),
                archs,
                create: symbol(&library, "nvrtcCreateProgram")?,
                compile: symbol(&library, "nvrtcCompileProgram")?,
                destroy: symbol(&library, "nvrtcDestroyProgram")?,
                words: symbol(&library, "nvrtcGetErrorString")?,
                log_size: symbol(&library, "nvrtcGetProgramLogSize")?,
                log: symbol(&library, "nvrtcGetProgramLog")?,
                cubin_size: symbol(&library, "nvrtcGetCUBINSize")?,
                cubin: symbol(&library, "nvrtcGetCUBIN")?,
                _libraries: {
                    libraries.push(library);
                    libraries
                },
            })
        }
    }

    /// Compiles `text`, which may include `headers` by name.
    ///
    /// # Errors
    /// What NVRTC says: its result in words, and the log.
    pub(super) fn compile(
        &self,
        name: &str,
        text: &str,
        headers: &[(&str, &str)],
        options: &[String],
    ) -> Result<Compiled, String> {
        let c = |text: &str| CString::new(text).map_err(|_| format!("{name}: a NUL in a text or an option"));
        let (name_c, text_c) = (c(name)?, c(text)?);
        let header_names = headers.iter().map(|(name, _)| c(name)).collect::<Result<Vec<_>, _>>()?;
        let header_texts = headers.iter().map(|(_, text)| c(text)).collect::<Result<Vec<_>, _>>()?;
        let options = options.iter().map(|option| c(option)).collect::<Result<Vec<_>, _>>()?;
        let pointers = |list: &[CString]| list.iter().map(|text| text.as_ptr()).collect::<Vec<_>>();
        let (header_names_p, header_texts_p) = (pointers(&header_names), pointers(&header_texts));
        let options_p = pointers(&options);
        let mut program = Open { nvrtc: self, program: ptr::null_mut() };
        // SAFETY: every pointer is to a NUL-ended text, and the lists have as many as told; all live until the return.
        let code = unsafe {
            (self.create)(
                &mut program.program,
                text_c.as_ptr(),
                name_c.as_ptr(),
                headers.len() as c_int,
                header_texts_p.as_ptr(),
                header_names_p.as_ptr(),
            )
        };
        self.check("nvrtcCreateProgram", code)?;
        // SAFETY: the program was made above; the list of options lives until the return.
        let code = unsafe { (self.compile)(program.program, options_p.len() as c_int, options_p.as_ptr()) };
        let log = program.bytes("nvrtcGetProgramLog", self.log_size, self.log).map(|mut log| {
            log.retain(|&byte| byte != 0);
            String::from_utf8_lossy(&log).trim_end().to_string()
        });
        if let Err(why) = self.check("nvrtcCompileProgram", code) {
            return Err(format!("{why}\n{}", log.unwrap_or_default()));
        }
        let cubin = program.bytes("nvrtcGetCUBIN", self.cubin_size, self.cubin)?;
        if cubin.is_empty() {
            return Err("NVRTC made no binary for this architecture".into());
        }
        Ok(Compiled { cubin, log: log? })
    }

    fn check(&self, call: &str, code: c_int) -> Result<(), String> {
        if code == SUCCESS {
            return Ok(());
        }
        // SAFETY: takes any integer and answers a static text, or null.
        let words = unsafe { (self.words)(code) };
        let words = if words.is_null() {
            "unknown".into()
        } else {
            // SAFETY: not null, and NUL-ended as nvrtc.h says.
            unsafe { CStr::from_ptr(words) }.to_string_lossy()
        };
        Err(format!("{call}: {words} ({code})"))
    }
}

/// A program, destroyed with its scope.
struct Open<'a> {
    nvrtc: &'a Nvrtc,
    program: Program,
}

impl Open<'_> {
    /// What a pair of size and copy yields.
    fn bytes(&self, call: &str, size: Size, copy: Text) -> Result<Vec<u8>, String> {
        let mut len = 0;
        // SAFETY: the program is open; writes one number.
        self.nvrtc.check(call, unsafe { size(self.program, &mut len) })?;
        let mut bytes = vec![0u8; len];
        // SAFETY: the program is open; the call writes the `len` bytes that it asked for.
        self.nvrtc.check(call, unsafe { copy(self.program, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: made by `create`, and destroyed once.
            unsafe { (self.nvrtc.destroy)(&mut self.program) };
        }
    }
}

/// The compiler, or the word aloud that `test` did not run.
#[cfg(test)]
pub(super) fn here_or_skip(test: &str) -> Option<&'static Nvrtc> {
    match Nvrtc::here() {
        Ok(nvrtc) => Some(nvrtc),
        Err(why) => {
            eprintln!("SKIPPED {test}: {why}");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const TEXT: &str =
        "#include \"a.cuh\"\nextern \"C\" __global__ void k(int* x) { x[threadIdx.x] = twice(N); }\n";
    const HEADERS: &[(&str, &str)] = &[("a.cuh", "inline __device__ int twice(int x) { return 2 * x; }\n")];

    fn options(extra: &str) -> Vec<String> {
        ["--gpu-architecture=sm_90a", "--ptxas-options=-v", extra].map(String::from).into()
    }

    #[test]
    fn a_text_with_a_header_becomes_a_binary() {
        let Some(nvrtc) = here_or_skip("a_text_with_a_header_becomes_a_binary") else { return };
        assert!(nvrtc.version().0 >= OLDEST && nvrtc.archs().contains(&90), "{nvrtc:?}");
        let compiled = nvrtc.compile("k.cu", TEXT, HEADERS, &options("-DN=3")).unwrap();
        assert_eq!(&compiled.cubin[..4], b"\x7fELF");
        assert!(compiled.log.contains("registers"), "{}", compiled.log);
    }

    #[test]
    fn what_the_compiler_says_is_in_the_error() {
        let Some(nvrtc) = here_or_skip("what_the_compiler_says_is_in_the_error") else { return };
        let error = nvrtc.compile("k.cu", TEXT, HEADERS, &options("-DM=3")).unwrap_err();
        assert!(error.contains("NVRTC_ERROR_COMPILATION") && error.contains("k.cu(2)"), "{error}");
        let error = nvrtc.compile("k.cu", TEXT, &[], &options("-DN=3")).unwrap_err();
        assert!(error.contains("a.cuh"), "{error}");
        let error = nvrtc.compile("k.cu", "\0", &[], &[]).unwrap_err();
        assert!(error.contains("NUL"), "{error}");
    }

    #[test]
    fn f37_no_compiler_is_an_answer_with_the_cure() {
        let dir = tempfile::tempdir().unwrap();
        let broken = dir.path().join("libnvrtc.so.13");
        fs::write(&broken, b"not a library").unwrap();
        let places =
            |candidates: Vec<PathBuf>| Places { candidates, looked: vec!["here".into(), "there".into()] };
        let error = Nvrtc::first_of(places(vec!["libnvrtc.so.nowhere".into()])).unwrap_err();
        assert_eq!(
            error,
            format!("NVRTC, the CUDA run-time compiler, was not found (looked in here, there); {CURE}")
        );
        let error = Nvrtc::first_of(places(vec![broken.clone()])).unwrap_err();
        assert!(error.contains(&broken.display().to_string()), "{error}");
        // A library that is none of NVIDIA's has none of its functions.
        let error = Nvrtc::open(Path::new("libc.so.6")).unwrap_err();
        assert_eq!(error, "it has no nvrtcVersion");
    }
}
