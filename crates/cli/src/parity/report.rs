//! What is said: a table of 80 columns, faults on stderr, or one JSON document.

use std::io::{self, IsTerminal};

use anyhow::Result;
use serde_json::{Value, json};

use super::compare::{Figures, Judgement};
use super::judge::{Outcome, Report};
use crate::exit::Exit;
use crate::text::{COLUMNS, print, say, wrap};

/// 2 when a case could not be judged, else 1 when one failed, else 0.
pub(super) fn exit(reports: &[Report]) -> Exit {
    if reports.iter().any(|report| !matches!(report.outcome, Outcome::Judged(_))) {
        Exit::Refused
    } else if reports.iter().any(|report| !report.passed()) {
        Exit::CheckFailed
    } else {
        Exit::Success
    }
}

/// The table, printed as cases are judged.
pub(super) struct Table {
    on: bool,
    colour: bool,
    headed: bool,
}

impl Table {
    /// A table on stdout, coloured when that is a terminal and `NO_COLOR` is not set; off, only faults are said.
    pub(super) fn to_stdout(on: bool) -> Table {
        let colour = io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
        Table { on, colour, headed: false }
    }

    /// Prints one case; what could not be judged is also said on stderr, one line each.
    ///
    /// # Errors
    /// When stdout takes no more.
    pub(super) fn add(&mut self, report: &Report) -> io::Result<()> {
        if let Outcome::Unreadable(why) | Outcome::Unsupported(why) = &report.outcome {
            say(format_args!("{}: {why}", report.path.display()));
        }
        for note in report.about.iter().flat_map(|about| &about.notes) {
            say(format_args!("note: {}: {note}", report.path.display()));
        }
        if !self.on {
            return Ok(());
        }
        let mut text = String::new();
        if !self.headed {
            self.headed = true;
            text.push_str(HEAD);
        }
        text.push_str(&self.case_line(report));
        if let Outcome::Judged(outputs) = &report.outcome {
            for output in outputs {
                text.push_str(&output_lines(output));
            }
        }
        print(&text)
    }

    fn case_line(&self, report: &Report) -> String {
        let word = word(report);
        let (on, off) = match (self.colour, word) {
            (false, _) => ("", ""),
            (true, "pass") => ("\x1b[32m", "\x1b[0m"),
            (true, _) => ("\x1b[31m", "\x1b[0m"),
        };
        let about = report.about.as_ref();
        let ran = about.map_or(String::new(), |about| format!(" {} {}", about.backend, about.dtype));
        let room = COLUMNS - 12 - ran.len();
        let label = report.label.with_extension("").display().to_string();
        format!("{on}{word:<11}{off} {:<room$}{ran}\n", shortened(&label, room))
    }

    /// Prints the sums.
    ///
    /// # Errors
    /// When stdout takes no more.
    pub(super) fn end(&self, reports: &[Report], device: &str) -> io::Result<()> {
        let count = |wanted: &str| reports.iter().filter(|report| word(report) == wanted).count();
        let (pass, fail) = (count("pass"), count("FAIL"));
        let text = format!(
            "\n{} cases on {device}: {pass} passed, {fail} failed, {} unreadable, {} unsupported\n",
            reports.len(),
            count("unreadable"),
            count("unsupported")
        );
        print(&text)
    }
}

const HEAD: &str = "\
verdict     case                                                 backend, dtype
  output         tol gate max abs max rel  rel L2  source   1-cos  worst index
";

fn word(report: &Report) -> &'static str {
    match &report.outcome {
        Outcome::Judged(_) if report.passed() => "pass",
        Outcome::Judged(_) => "FAIL",
        Outcome::Unreadable(_) => "unreadable",
        Outcome::Unsupported(_) => "unsupported",
    }
}

/// The end of a text that has no room: the file's name says more than the folder's.
pub(super) fn shortened(text: &str, room: usize) -> String {
    let length = text.chars().count();
    if length <= room {
        return text.to_owned();
    }
    let tail: String = text.chars().skip(length + 2 - room).collect();
    format!("..{tail}")
}

fn output_lines(output: &Judgement) -> String {
    let verdict = |holds: bool| if holds { "ok" } else { "FAIL" };
    let gate = output.accurate.map_or("-", verdict);
    let name = output.name.strip_prefix("out.").unwrap_or(output.name);
    let figures = match &output.figures {
        Some(f) => {
            [f.max_abs, f.max_rel, f.rel_l2, f.source_rel_l2, 1.0 - f.cosine].map(|x| figure(x.max(0.0)))
        }
        None => [const { String::new() }; 5].map(|_| format!("{:>7}", "-")),
    };
    let worst = output.worst.as_ref().map_or("-".to_owned(), |index| {
        let numbers: Vec<String> = index.iter().map(usize::to_string).collect();
        format!("[{}]", numbers.join(","))
    });
    let name = shortened(name, 14);
    let mut lines = format!(
        "  {name:<14} {:<4}{gate:<4} {} {worst}\n",
        verdict(output.within_tolerance),
        figures.join(" ")
    );
    if let Some(fault) = &output.fault {
        lines.push_str(&wrap("    ", fault));
    }
    lines
}

/// A number in seven columns: `1.2e-07`.
pub(super) fn figure(x: f64) -> String {
    if x.is_nan() {
        return format!("{:>7}", "-");
    }
    if x == 0.0 {
        return format!("{:>7}", "0");
    }
    if x.is_infinite() {
        return format!("{:>7}", "inf");
    }
    let text = format!("{x:.1e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((text.as_str(), "0"));
    let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |e| ('-', e));
    format!("{:>7}", format!("{digits}e{sign}{exponent:0>2}"))
}

/// One document: `version`, `device`, `cases`, `summary`. A figure that is not finite is null.
pub(super) fn json(reports: &[Report], device: &str) -> Result<String> {
    let count = |wanted: &str| reports.iter().filter(|report| word(report) == wanted).count();
    let document = json!({
        "version": 1,
        "device": device,
        "cases": reports.iter().map(case_json).collect::<Vec<Value>>(),
        "summary": {
            "cases": reports.len(),
            "passed": count("pass"),
            "failed": count("FAIL"),
            "unreadable": count("unreadable"),
            "unsupported": count("unsupported"),
        },
    });
    Ok(serde_json::to_string_pretty(&document)? + "\n")
}

fn case_json(report: &Report) -> Value {
    let mut value = json!({
        "case": report.label.display().to_string(),
        "file": report.path.display().to_string(),
        "verdict": word(report).to_lowercase(),
    });
    let fields = value.as_object_mut().expect("an object literal");
    if let Some(about) = &report.about {
        fields.insert("op".into(), about.op.name().into());
        fields.insert("dtype".into(), about.dtype.name().into());
        fields.insert("source".into(), about.source.clone().into());
        fields.insert("backend".into(), about.backend.into());
        fields.insert("notes".into(), about.notes.clone().into());
    }
    match &report.outcome {
        Outcome::Judged(outputs) => {
            fields.insert("outputs".into(), outputs.iter().map(output_json).collect());
        }
        Outcome::Unreadable(why) | Outcome::Unsupported(why) => {
            fields.insert("fault".into(), why.clone().into());
        }
    }
    value
}

fn output_json(output: &Judgement) -> Value {
    let figures = output.figures.as_ref().map(|f: &Figures| {
        json!({
            "max_abs": f.max_abs,
            "max_rel": f.max_rel,
            "rel_l2": f.rel_l2,
            "source_rel_l2": f.source_rel_l2,
            "rounding_rel_l2": f.rounding_rel_l2,
            "bound": f.bound,
            "cosine": f.cosine,
        })
    });
    json!({
        "name": output.name,
        "dtype": output.dtype.name(),
        "within_tolerance": output.within_tolerance,
        "accurate": output.accurate,
        "worst_index": output.worst,
        "fault": output.fault,
        "figures": figures,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_take_seven_columns() {
        for (x, text) in [
            (0.0, "      0"),
            (1.23e-7, "1.2e-07"),
            (9.96e-10, "1.0e-09"),
            (12345.0, "1.2e+04"),
            (f64::INFINITY, "    inf"),
            (f64::NAN, "      -"),
        ] {
            assert_eq!(figure(x), text);
        }
    }

    #[test]
    fn long_names_keep_their_end() {
        assert_eq!(shortened("abcdef", 6), "abcdef");
        assert_eq!(shortened("abcdefg", 6), "..defg");
    }
}
