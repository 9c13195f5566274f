//! The Azure LLM inference traces: CSV with a header line.
//!
//! | column | meaning |
//! | --- | --- |
//! | `TIMESTAMP` | arrival, `YYYY-MM-DD hh:mm:ss[.fraction]`; only differences matter |
//! | `ContextTokens` | prompt tokens, at least 1 |
//! | `GeneratedTokens` | generated tokens; 0 computes the prompt and no more |
//!
//! Columns are found by name, in any order, and others are ignored. The traces say nothing of content, so every
//! prompt is its own. Published at <https://github.com/Azure/AzurePublicDataset> (CC-BY 4.0); the format's paper is
//! Patel et al., *Splitwise*, ISCA 2024.

use std::io::BufRead;

use super::trace::{Lines, Place, Recorded, TraceError, checked_len};
use crate::run::content::{Run, Source};

/// A prompt that no other request has.
pub(crate) fn content(ordinal: u64, len: usize) -> Run {
    Run { source: Source::Prompt(ordinal), len }
}

/// Reads up to `end` requests; `header` is the file's first line.
pub(crate) fn read(
    lines: &mut Lines<impl BufRead>,
    header: &str,
    end: usize,
) -> Result<Vec<Recorded>, TraceError> {
    let names = fields(header).map_err(|column| lines.error(column, QUOTES))?;
    let find = |name: &str| {
        let mut at = names.iter().enumerate().filter(|(_, field)| field.text.eq_ignore_ascii_case(name));
        match (at.next(), at.next()) {
            (Some((index, _)), None) => Ok(index),
            (Some(_), Some((_, twice))) => {
                Err(lines.error(twice.column, format!("column {name} comes twice")))
            }
            (None, _) => Err(lines.error(
                1,
                format!("no column {name}; an Azure trace has TIMESTAMP, ContextTokens and GeneratedTokens"),
            )),
        }
    };
    let (time, context, generated) = (find("TIMESTAMP")?, find("ContextTokens")?, find("GeneratedTokens")?);

    let mut all: Vec<Recorded> = Vec::new();
    let mut first = None;
    while all.len() < end {
        let Some(line) = lines.next()? else { break };
        let row = fields(&line).map_err(|column| lines.error(column, QUOTES))?;
        if row.len() != names.len() {
            let why = format!("{} fields, the header names {}", row.len(), names.len());
            return Err(lines.error(line.len(), why));
        }
        let at = &row[time];
        let nanoseconds = timestamp(&at.text).ok_or_else(|| {
            lines.error(at.column, format!("{:?} is no time like 2023-11-16 18:17:03.9799600", at.text))
        })?;
        let count = |index: usize, least: u64| {
            let field = &row[index];
            let name = &names[index].text;
            let value = field.text.parse::<u64>().map_err(|_| {
                lines.error(field.column, format!("{name} is {:?}, it must be a whole number", field.text))
            })?;
            if value < least {
                return Err(
                    lines.error(field.column, format!("{name} is {value}, at least {least} is needed"))
                );
            }
            checked_len(value).map_err(|why| lines.error(field.column, format!("{name}: {why}")))
        };
        let (prompt_len, output_len) = (count(context, 1)?, count(generated, 0)?);
        let arrival_ms = (nanoseconds - *first.get_or_insert(nanoseconds)) as f64 / 1e6;
        let place =
            Place { line: lines.number(), prompt: row[context].column, output: row[generated].column };
        all.push(Recorded { arrival_ms, prompt_len, output_len, hash_ids: Vec::new(), place });
    }
    Ok(all)
}

const QUOTES: &str = "a quoted field does not end";

/// One field and the column in bytes, from 1, where it begins.
struct Field {
    text: String,
    column: usize,
}

/// The fields of one line, unquoted (RFC 4180); the column where a quoted field that never ends begins.
fn fields(line: &str) -> Result<Vec<Field>, usize> {
    let mut all = Vec::new();
    let mut rest = line;
    loop {
        let column = line.len() - rest.len() + 1;
        let (text, after) = if let Some(quoted) = rest.strip_prefix('"') {
            let mut text = String::new();
            let mut tail = quoted;
            loop {
                let end = tail.find('"').ok_or(column)?;
                text.push_str(&tail[..end]);
                tail = &tail[end + 1..];
                match tail.strip_prefix('"') {
                    Some(more) => {
                        text.push('"');
                        tail = more;
                    }
                    None => break,
                }
            }
            let end = tail.find(',').unwrap_or(tail.len());
            text.push_str(tail[..end].trim_end());
            (text, &tail[end..])
        } else {
            let end = rest.find(',').unwrap_or(rest.len());
            (rest[..end].trim().to_owned(), &rest[end..])
        };
        all.push(Field { text, column });
        match after.strip_prefix(',') {
            Some(next) => rest = next,
            None => return Ok(all),
        }
    }
}

/// Nanoseconds since 1970-01-01 of `YYYY-MM-DD hh:mm:ss[.fraction]`, with a `T` or blanks between and an optional
/// `Z` or `+00:00` at the end; `None` when it is no such time.
fn timestamp(text: &str) -> Option<i128> {
    let text = text.trim().trim_end_matches('Z').trim_end_matches("+00:00");
    let (date, time) = text.split_once(['T', ' '])?;
    let mut date = date.split('-').map(digits);
    let (year, month, day) = (date.next()??, date.next()??, date.next()??);
    let (clock, fraction) = time.trim().split_once('.').unwrap_or((time.trim(), ""));
    let mut clock = clock.split(':').map(digits);
    let (hour, minute, second) = (clock.next()??, clock.next()??, clock.next()??);
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let month_days = match month {
        2 => 28 + i128::from(leap),
        4 | 6 | 9 | 11 => 30,
        1..=12 => 31,
        _ => return None,
    };
    let valid = date.next().is_none()
        && clock.next().is_none()
        && (1..=month_days).contains(&day)
        && hour < 24
        && minute < 60
        && second < 61
        && fraction.len() <= 9
        && fraction.bytes().all(|b| b.is_ascii_digit());
    if !valid {
        return None;
    }
    let nanoseconds = format!("{fraction:0<9}").parse::<i128>().ok()?;
    // Days since the epoch by the era method of Hinnant, "chrono-compatible low-level date algorithms".
    let y = year - i128::from(month <= 2);
    let era = y.div_euclid(400);
    let of_era = y.rem_euclid(400);
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let days = era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468;
    Some((((days * 24 + hour) * 60 + minute) * 60 + second) * 1_000_000_000 + nanoseconds)
}

/// A field of a date: up to four digits and nothing else.
fn digits(text: &str) -> Option<i128> {
    (!text.is_empty() && text.len() <= 4 && text.bytes().all(|b| b.is_ascii_digit()))
        .then(|| text.parse().ok())
        .flatten()
}

#[cfg(test)]
mod tests {
    use mstar_core::spec::workload::TraceFormat;

    use super::super::trace::tests::read_text;
    use super::*;

    const HEADER: &str = "TIMESTAMP,ContextTokens,GeneratedTokens\n";

    fn read(body: &str) -> Result<Vec<Recorded>, TraceError> {
        read_text(format!("{HEADER}{body}").as_bytes(), TraceFormat::Azure)
    }

    #[test]
    fn rows_are_read_as_published() {
        let all = read("2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8").unwrap();
        assert_eq!(all.len(), 2);
        assert_eq!((all[0].arrival_ms, all[0].prompt_len, all[0].output_len), (0.0, 4808, 10));
        assert_eq!((all[1].arrival_ms, all[1].prompt_len, all[1].output_len), (52.0, 3180, 8));
    }

    #[test]
    fn columns_are_found_by_name() {
        let text =
            "GeneratedTokens,extra,ContextTokens,\"TIMESTAMP\"\r\n0,\"a,\"\"b\",7,2024-02-29T00:00:00Z\r\n";
        let all = read_text(text.as_bytes(), TraceFormat::Auto).unwrap();
        assert_eq!((all[0].prompt_len, all[0].output_len), (7, 0));
        let missing = read_text(b"TIMESTAMP,ContextTokens\n", TraceFormat::Auto).unwrap_err();
        assert!(missing.why.contains("GeneratedTokens"), "{missing}");
        let twice = read_text(b"TIMESTAMP,ContextTokens,ContextTokens,GeneratedTokens\n", TraceFormat::Auto);
        assert_eq!(twice.unwrap_err().column, 25);
    }

    #[test]
    fn every_malformed_line_has_a_place() {
        let good = "2023-11-16 18:17:03,1,1\n";
        let cases = [
            ("2023-11-16 18:17:03,1", 21, "2 fields"),
            ("2023-11-16 18:17:03,1,1,1", 25, "4 fields"),
            ("2023-13-16 18:17:03,1,1", 1, "no time"),
            ("2023-02-29 18:17:03,1,1", 1, "no time"),
            ("2023-11-16 25:17:03,1,1", 1, "no time"),
            ("2023-11-16,1,1", 1, "no time"),
            ("2023-11-16 18:17:03.0000000001,1,1", 1, "no time"),
            (",1,1", 1, "no time"),
            ("2023-11-16 18:17:03,0,1", 21, "at least 1"),
            ("2023-11-16 18:17:03,-1,1", 21, "whole number"),
            ("2023-11-16 18:17:03,1.5,1", 21, "whole number"),
            ("2023-11-16 18:17:03,1,NaN", 23, "whole number"),
            ("2023-11-16 18:17:03,1,18446744073709551616", 23, "whole number"),
            ("2023-11-16 18:17:03,18446744073709551615,1", 21, "more than"),
            ("\"2023-11-16 18:17:03,1,1", 1, "does not end"),
        ];
        for (line, column, why) in cases {
            let e = read(&format!("{good}{line}\n{good}")).unwrap_err();
            assert_eq!((e.line, e.column), (3, column), "{line}: {e}");
            assert!(e.why.contains(why), "{line}: {e}");
        }
    }

    #[test]
    fn times_are_exact_over_days_and_leap_years() {
        let day = 86_400_000_000_000;
        assert_eq!(timestamp("1970-01-01 00:00:00"), Some(0));
        assert_eq!(
            timestamp("2000-03-01 00:00:00").unwrap() - timestamp("2000-02-28 00:00:00").unwrap(),
            2 * day
        );
        assert_eq!(
            timestamp("2100-03-01 00:00:00").unwrap() - timestamp("2100-02-28 00:00:00").unwrap(),
            day
        );
        assert_eq!(timestamp("2023-11-16 18:17:03.5").unwrap() % 1_000_000_000, 500_000_000);
    }
}
