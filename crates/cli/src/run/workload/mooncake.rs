//! The Mooncake traces: one JSON object a line.
//!
//! | key | meaning |
//! | --- | --- |
//! | `timestamp` | arrival in milliseconds |
//! | `input_length` | prompt tokens, at least 1 |
//! | `output_length` | generated tokens; 0 computes the prompt and no more |
//! | `hash_ids` | one id for each block of `block_tokens` (512) prompt tokens, the last block perhaps partial; equal ids mean equal content |
//!
//! Other keys are ignored. Published with Qin et al., *Mooncake*, FAST 2025:
//! <https://github.com/kvcache-ai/Mooncake> (`FAST25-release/traces`, Apache-2.0).

use std::io::BufRead;

use serde::Deserialize;

use super::trace::{Lines, Place, Recorded, TraceError, checked_len};
use crate::run::content::{Run, Source};

/// One line as it is written.
#[derive(Debug, Deserialize)]
struct Line {
    timestamp: f64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
}

/// A prompt made of blocks of `block_tokens`; the last one may be partial.
pub(crate) fn content(hash_ids: &[u64], prompt_len: usize, block_tokens: usize) -> Vec<Run> {
    let mut left = prompt_len;
    let mut runs = Vec::with_capacity(hash_ids.len());
    for &id in hash_ids {
        let len = left.min(block_tokens);
        if len == 0 {
            break;
        }
        runs.push(Run { source: Source::Block(id), len });
        left -= len;
    }
    runs
}

/// Reads up to `end` requests; `first` is the file's first line.
pub(crate) fn read(
    lines: &mut Lines<impl BufRead>,
    first: &str,
    end: usize,
    block_tokens: usize,
) -> Result<Vec<Recorded>, TraceError> {
    let mut all: Vec<Recorded> = Vec::new();
    let mut text = Some(first.to_owned());
    while all.len() < end {
        let Some(line) = text.take().map_or_else(|| lines.next(), |first| Ok(Some(first)))? else { break };
        let request: Line = serde_json::from_str(&line).map_err(|e| {
            // The reader counts from its own line 1; ours is the trace's.
            let why = e.to_string();
            let why = why.split(" at line ").next().unwrap_or("not JSON").to_owned();
            lines.error(e.column().max(1), why)
        })?;
        // Columns of single keys: where the key is written.
        let at = |key: &str| line.find(&format!("\"{key}\"")).map_or(1, |byte| byte + 1);
        let wrong = |key: &str, why: String| lines.error(at(key), format!("{key}: {why}"));
        if !(request.timestamp.is_finite() && request.timestamp >= 0.0) {
            return Err(wrong("timestamp", format!("{} is no time in milliseconds", request.timestamp)));
        }
        if request.input_length == 0 {
            return Err(wrong("input_length", "0, at least 1 is needed".into()));
        }
        let prompt_len = checked_len(request.input_length).map_err(|why| wrong("input_length", why))?;
        let output_len = checked_len(request.output_length).map_err(|why| wrong("output_length", why))?;
        let blocks = prompt_len.div_ceil(block_tokens.max(1));
        if request.hash_ids.len() != blocks {
            let why = format!(
                "{} ids, {prompt_len} prompt tokens are {blocks} blocks of {block_tokens}",
                request.hash_ids.len()
            );
            return Err(wrong("hash_ids", why));
        }
        all.push(Recorded {
            arrival_ms: request.timestamp,
            prompt_len,
            output_len,
            place: Place { line: lines.number(), prompt: at("input_length"), output: at("output_length") },
            hash_ids: request.hash_ids,
        });
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use mstar_core::spec::workload::TraceFormat;

    use super::super::trace::tests::read_text;
    use super::*;

    fn read(text: &str) -> Result<Vec<Recorded>, TraceError> {
        read_text(text.as_bytes(), TraceFormat::Mooncake)
    }

    #[test]
    fn lines_are_read_as_published() {
        let all = read(
            "{\"timestamp\": 0, \"input_length\": 1025, \"output_length\": 500, \"hash_ids\": [0, 1, 2]}\n\
             {\"timestamp\": 27.5, \"input_length\": 512, \"output_length\": 0, \"hash_ids\": [0], \"type\": \"x\"}\n",
        )
        .unwrap();
        assert_eq!((all[0].prompt_len, all[0].output_len, &all[0].hash_ids[..]), (1025, 500, &[0, 1, 2][..]));
        assert_eq!((all[1].arrival_ms, all[1].prompt_len), (27.5, 512));
    }

    #[test]
    fn blocks_make_the_prompt_and_the_last_may_be_partial() {
        let runs = content(&[5, 6, 7], 70, 32);
        assert_eq!(runs.iter().map(|run| run.len).collect::<Vec<_>>(), [32, 32, 6]);
        assert_eq!(runs[2].source, Source::Block(7));
        // Scaling may round the last block away.
        assert_eq!(content(&[5, 6, 7], 64, 32).len(), 2);
    }

    #[test]
    fn every_malformed_line_has_a_place() {
        let good = "{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [0]}";
        let cases = [
            ("[1, 2]", "invalid length"),
            ("nonsense", "expected"),
            ("{", "EOF"),
            ("{\"timestamp\": 0}", "missing field `input_length`"),
            (&good.replace("[0]", "[0, 1]"), "2 ids"),
            (&good.replace("[0]", "[]"), "0 ids"),
            (&good.replace("[0]", "[-1]"), "invalid value"),
            (&good.replace("[0]", "\"0\""), "invalid type"),
            (&good.replace("_length\": 1,", "_length\": 0,"), "at least 1"),
            (&good.replace("_length\": 1,", "_length\": 1e3,"), "invalid type"),
            (&good.replace("_length\": 1,", "_length\": 18446744073709551616,"), "invalid"),
            (&good.replace("_length\": 1,", "_length\": 18446744073709551615,"), "more than"),
            (&good.replace("\"timestamp\": 0", "\"timestamp\": -1"), "no time"),
            (&good.replace("\"timestamp\": 0", "\"timestamp\": 1e999"), "out of range"),
            (&good.replace("{\"timestamp\": 0", "{\"timestamp\": 0, \"timestamp\": 0"), "duplicate field"),
            (&"[".repeat(100_000), ""),
        ];
        for (line, why) in cases {
            let e = read(&format!("{good}\n{line}\n{good}\n")).unwrap_err();
            assert_eq!(e.line, 2, "{line:.40}: {e}");
            assert!(e.column >= 1 && e.why.contains(why), "{line:.40}: {e}");
        }
    }
}
