//! Recorded requests: where the file is, which format it has, and what is wrong with a line.

use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use mstar_core::spec::workload::{TraceFormat, TraceSpec};

use super::{MAX_TOKENS, RequestPlan, azure, mooncake};

/// A line longer than this is no trace's: it is refused before it is held.
const MAX_LINE_BYTES: u64 = 16 << 20;

/// Something wrong with a trace: where, and what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TraceError {
    /// The file.
    pub(crate) file: PathBuf,
    /// Line, from 1.
    pub(crate) line: u64,
    /// Column in bytes, from 1.
    pub(crate) column: usize,
    /// What is wrong, and what would be right.
    pub(crate) why: String,
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (line {}, column {}): {}", self.file.display(), self.line, self.column, self.why)
    }
}

impl std::error::Error for TraceError {}

/// One recorded request, before scaling.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Recorded {
    /// Milliseconds since the trace began.
    pub(crate) arrival_ms: f64,
    /// Prompt tokens.
    pub(crate) prompt_len: usize,
    /// Generated tokens.
    pub(crate) output_len: usize,
    /// One id a block of `block_tokens` prompt tokens; empty where the trace says nothing of content.
    pub(crate) hash_ids: Vec<u64>,
    /// Where it stands.
    pub(crate) place: Place,
}

/// Where a request's lengths stand in their file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place {
    /// Line, from 1.
    pub(crate) line: u64,
    /// Column of the prompt's length, in bytes from 1.
    pub(crate) prompt: usize,
    /// Column of the output's.
    pub(crate) output: usize,
}

/// Lines of a trace, numbered, bounded in length.
pub(crate) struct Lines<R> {
    input: R,
    path: PathBuf,
    number: u64,
}

impl<R: BufRead> Lines<R> {
    /// Reads `input`, calling it `path` in errors.
    pub(crate) fn new(input: R, path: &Path) -> Lines<R> {
        Lines { input, path: path.to_path_buf(), number: 0 }
    }

    /// An error about the line read last.
    pub(crate) fn error(&self, column: usize, why: impl Into<String>) -> TraceError {
        TraceError { file: self.path.clone(), line: self.number.max(1), column, why: why.into() }
    }

    /// The number of the line read last, from 1.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// The next line that is not blank, without its end; `None` at the end of the file.
    pub(crate) fn next(&mut self) -> Result<Option<String>, TraceError> {
        loop {
            let mut bytes = Vec::new();
            self.number += 1;
            let mut bounded = std::io::Read::take(&mut self.input, MAX_LINE_BYTES + 1);
            let read = bounded.read_until(b'\n', &mut bytes);
            let read = read.map_err(|e| self.error(1, format!("cannot read: {e}")))?;
            if read == 0 {
                return Ok(None);
            }
            if read as u64 > MAX_LINE_BYTES {
                return Err(self.error(1, format!("the line is longer than {MAX_LINE_BYTES} bytes")));
            }
            let text = String::from_utf8(bytes)
                .map_err(|e| self.error(e.utf8_error().valid_up_to() + 1, "the line is not UTF-8 text"))?;
            // A byte-order mark belongs to the file, not to its first column.
            let text = if self.number == 1 { text.trim_start_matches('\u{feff}') } else { &text };
            if !text.trim().is_empty() {
                return Ok(Some(text.trim_end().to_owned()));
            }
        }
    }
}

/// A trace's file, and how it was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Located {
    /// The file.
    pub(crate) path: PathBuf,
    /// Where.
    pub(crate) found: Found,
}

/// Where a trace's name led.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// To the file itself.
    AsNamed,
    /// Into `$MSTAR_DATA`.
    Data,
    /// Into the `data` folder beside the spec; whether `$MSTAR_DATA` was looked into before.
    BesideSpec { data_lacks_it: bool },
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Found::AsNamed => "as named",
            Found::Data => "in MSTAR_DATA",
            Found::BesideSpec { data_lacks_it: false } => "in data beside the spec",
            Found::BesideSpec { data_lacks_it: true } => {
                "in data beside the spec; MSTAR_DATA does not have it"
            }
        })
    }
}

impl Located {
    /// Who named it, given the assignments of `--set`.
    pub(crate) fn named_by(&self, sets: &[String]) -> &'static str {
        let ours = |set: &String| set.split('=').next().is_some_and(|key| key.trim() == "workload.file");
        if sets.iter().any(ours) { "--set" } else { "the spec" }
    }
}

/// Where the trace lies: `file` itself when it names a directory or exists, else in `$MSTAR_DATA`, else in the
/// `data` directory beside the spec.
pub(crate) fn locate(file: &str, spec_path: &Path) -> anyhow::Result<Located> {
    let named = Path::new(file);
    let mut tried = vec![(named.to_path_buf(), Found::AsNamed)];
    if named.components().count() <= 1 {
        let data = std::env::var_os("MSTAR_DATA").filter(|dir| !dir.is_empty());
        if let Some(dir) = data.as_ref().map(Path::new) {
            // Whoever asks for the public traces must not be given the small ones for a slip of the pen.
            anyhow::ensure!(dir.is_dir(), "MSTAR_DATA: {} is not a directory", dir.display());
            tried.push((dir.join(named), Found::Data));
        }
        let beside = spec_path.parent().unwrap_or(Path::new("")).join("data").join(named);
        tried.push((beside, Found::BesideSpec { data_lacks_it: data.is_some() }));
    }
    if let Some((path, found)) = tried.iter().find(|(path, _)| path.is_file()) {
        return Ok(Located { path: path.clone(), found: *found });
    }
    let tried: Vec<_> = tried.iter().map(|(path, _)| path.display().to_string()).collect();
    anyhow::bail!(
        "workload.file: no trace at {}; set MSTAR_DATA to the directory that holds it, or --set workload.file=PATH",
        tried.join(", nor at ")
    )
}

/// The requests of the recorded trace in `path`, scaled as the spec says.
pub(crate) fn requests(spec: &TraceSpec, path: &Path) -> anyhow::Result<Vec<RequestPlan>> {
    let file = File::open(path).map_err(|e| anyhow::anyhow!("{}: cannot open: {e}", path.display()))?;
    let recorded = read(BufReader::new(file), path, spec)?;
    if recorded.is_empty() {
        anyhow::bail!("{}: no request after the first {} (workload.skip)", path.display(), spec.skip);
    }
    plan(&recorded, path, spec)
}

/// Reads the requests that the spec takes of `input`; lines after the last of them are not looked at.
pub(crate) fn read(input: impl BufRead, path: &Path, spec: &TraceSpec) -> Result<Vec<Recorded>, TraceError> {
    let mut lines = Lines::new(input, path);
    let Some(first) = lines.next()? else {
        return Err(lines.error(1, "the file is empty"));
    };
    let azure = match spec.format {
        TraceFormat::Azure => true,
        TraceFormat::Mooncake => false,
        TraceFormat::Auto => !first.trim_start().starts_with('{'),
    };
    let end = spec.requests.map_or(usize::MAX, |count| spec.skip.saturating_add(count));
    let mut all = if azure {
        azure::read(&mut lines, &first, end)?
    } else {
        mooncake::read(&mut lines, &first, end, spec.block_tokens)?
    };
    all.drain(..spec.skip.min(all.len()));
    // Time begins with the earliest request that is taken; a trace need not be in order.
    let start = all.iter().map(|request| request.arrival_ms).fold(f64::INFINITY, f64::min);
    all.iter_mut().for_each(|request| request.arrival_ms -= start);
    Ok(all)
}

/// A length of the trace, checked against what positions can hold.
pub(crate) fn checked_len(len: u64) -> Result<usize, String> {
    usize::try_from(len)
        .ok()
        .filter(|&len| len <= MAX_TOKENS)
        .ok_or_else(|| format!("{len} tokens are more than the {MAX_TOKENS} that one request may have"))
}

/// Scales lengths and times, and gives every prompt its content.
///
/// # Errors
/// A scale that cuts blocks into parts of tokens, or makes a request longer than one may be: with its place in `path`.
fn plan(recorded: &[Recorded], path: &Path, spec: &TraceSpec) -> anyhow::Result<Vec<RequestPlan>> {
    let block = spec.block_tokens as f64 * spec.length_scale;
    if recorded.iter().any(|request| !request.hash_ids.is_empty()) && (block < 1.0 || block.fract() != 0.0) {
        anyhow::bail!(
            "workload.length_scale: {} makes a block of {} tokens {block}, it must stay a whole number of tokens",
            spec.length_scale,
            spec.block_tokens
        );
    }
    let scale = |len: usize, line: u64, column: usize| -> anyhow::Result<usize> {
        // At most 2^30 times 1000: exact, and far from overflow.
        let scaled = (len as f64 * spec.length_scale).ceil().max(1.0) as u64;
        checked_len(scaled).map_err(|why| {
            let why = format!("{len} tokens with workload.length_scale {}: {why}", spec.length_scale);
            TraceError { file: path.to_path_buf(), line, column, why }.into()
        })
    };
    let plans = recorded.iter().enumerate().map(|(index, request)| {
        let ordinal = (spec.skip + index) as u64;
        let Place { line, prompt, output } = request.place;
        let prompt_len = scale(request.prompt_len, line, prompt)?;
        let output_len = scale(request.output_len, line, output)?;
        let prompt = if request.hash_ids.is_empty() {
            vec![azure::content(ordinal, prompt_len)]
        } else {
            mooncake::content(&request.hash_ids, prompt_len, block as usize)
        };
        Ok(RequestPlan::new(ordinal, request.arrival_ms * spec.time_scale, prompt, output_len))
    });
    plans.collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn spec(format: TraceFormat) -> TraceSpec {
        TraceSpec {
            file: "t".into(),
            format,
            requests: None,
            skip: 0,
            time_scale: 1.0,
            length_scale: 1.0,
            block_tokens: 512,
        }
    }

    pub(in super::super) fn read_text(text: &[u8], format: TraceFormat) -> Result<Vec<Recorded>, TraceError> {
        read(text, Path::new("t"), &spec(format))
    }

    #[test]
    fn formats_are_told_apart_by_the_first_line() {
        let csv = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.5,10,2\n";
        let jsonl =
            b"\n{\"timestamp\": 5, \"input_length\": 513, \"output_length\": 2, \"hash_ids\": [1, 2]}\n";
        assert_eq!(read_text(csv, TraceFormat::Auto).unwrap()[0].prompt_len, 10);
        assert_eq!(read_text(jsonl, TraceFormat::Auto).unwrap()[0].hash_ids, [1, 2]);
        assert_eq!(read_text(b" \n\n", TraceFormat::Auto).unwrap_err().why, "the file is empty");
    }

    #[test]
    fn bytes_that_are_no_text_are_an_error_with_a_place() {
        let e = read_text(b"TIMESTAMP,ContextTokens,GeneratedTokens\nab\xff,1,1\n", TraceFormat::Auto)
            .unwrap_err();
        assert_eq!((e.line, e.column), (2, 3));
        let long = vec![b'a'; MAX_LINE_BYTES as usize + 10];
        assert!(read_text(&long, TraceFormat::Auto).unwrap_err().why.contains("longer than"));
    }

    #[test]
    fn scaling_keeps_blocks_whole_and_lengths_positive() {
        let recorded = |prompt_len, output_len, ids: &[u64]| Recorded {
            arrival_ms: 8.0,
            prompt_len,
            output_len,
            hash_ids: ids.to_vec(),
            place: Place::default(),
        };
        let spec = TraceSpec { length_scale: 1.0 / 16.0, time_scale: 0.5, ..spec(TraceFormat::Auto) };
        let plans = plan(&[recorded(513, 1, &[7, 8]), recorded(3, 33, &[])], Path::new("t"), &spec).unwrap();
        assert_eq!(plans[0].prompt.iter().map(|run| run.len).collect::<Vec<_>>(), [32, 1]);
        assert_eq!((plans[0].output_len, plans[0].arrival_ms), (1, 4.0));
        assert_eq!((plans[1].prompt_len(), plans[1].output_len), (1, 3));
        let broken = TraceSpec { length_scale: 0.1, ..spec };
        assert!(
            plan(&[recorded(513, 1, &[7, 8])], Path::new("t"), &broken)
                .unwrap_err()
                .to_string()
                .contains("length_scale")
        );
    }

    #[test]
    fn f36_a_length_scaled_past_what_a_request_may_have_is_refused_with_its_place() {
        let csv = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,10,2\n\n2023-11-16 18:17:04,2000000,2\n";
        let jsonl =
            "{\"timestamp\": 5, \"input_length\": 3, \"output_length\": 2000000, \"hash_ids\": [1]}\n";
        for (text, line, column) in [(csv, 4, 21), (jsonl, 1, 37)] {
            let spec = TraceSpec { length_scale: 1000.0, ..spec(TraceFormat::Auto) };
            let all = read(text.as_bytes(), Path::new("t"), &spec).unwrap();
            let e = plan(&all, Path::new("t"), &spec).unwrap_err().to_string();
            assert!(e.starts_with(&format!("t (line {line}, column {column}): 2000000 tokens")), "{e}");
            assert!(e.contains("length_scale 1000: 2000000000 tokens are more than the 1073741823"), "{e}");
        }
    }

    #[test]
    fn who_named_a_trace_and_where_it_was_found_is_known() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("data")).unwrap();
        let trace = dir.path().join("data/t.csv");
        std::fs::write(&trace, "x").unwrap();
        let found = locate("t.csv", &dir.path().join("x.yaml")).unwrap();
        assert_eq!(found.path, trace);
        assert!(found.found.to_string().starts_with("in data beside the spec"));
        let named = locate(trace.to_str().unwrap(), Path::new("x.yaml")).unwrap();
        assert_eq!(named.found, Found::AsNamed);
        assert_eq!(named.named_by(&["workload.file=a=b".into()]), "--set");
        assert_eq!(named.named_by(&["workload.requests=3".into()]), "the spec");
    }

    #[test]
    fn skip_and_requests_cut_a_window_and_restart_the_clock() {
        let text: String = (0..10)
            .map(|i| {
                format!(
                    "{{\"timestamp\": {}, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [{i}]}}\n",
                    i * 100
                )
            })
            .collect();
        let spec = TraceSpec { skip: 3, requests: Some(2), ..spec(TraceFormat::Auto) };
        let all = read((text + "not JSON").as_bytes(), Path::new("t"), &spec).unwrap();
        assert_eq!(
            all.iter().map(|r| (r.hash_ids[0], r.arrival_ms)).collect::<Vec<_>>(),
            [(3, 0.0), (4, 100.0)]
        );
    }

    #[test]
    fn f36_a_missing_file_says_where_it_was_looked_for() {
        let e = locate("no-such-trace.csv", Path::new("specs/x.yaml")).unwrap_err().to_string();
        assert!(e.contains("specs/data/no-such-trace.csv") && e.contains("MSTAR_DATA"), "{e}");
        let e = locate("dir/none.csv", Path::new("specs/x.yaml")).unwrap_err().to_string();
        assert!(!e.contains("specs/data"), "{e}");
    }
}
