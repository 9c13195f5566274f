//! The table, one line a case as it is timed, and results saved to compare with later.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, ensure};
use mstar_kernels::DType;
use serde::{Deserialize, Serialize};

use super::cases::Case;
use super::limits::Limits;
use super::measure::{Beside, Gaps, Reads, Timed};
use crate::output::Output;

/// Version of the saved form.
const VERSION: u32 = 1;

/// What a case must do at least: bytes that must move and operations that must be done, counting useful work only.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cost {
    pub(super) bytes: f64,
    pub(super) flops: f64,
}

/// One case's result.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Line {
    /// Kernel and shape.
    name: String,
    /// Microseconds a call.
    median_us: f64,
    /// The fastest repetition's.
    fastest_us: f64,
    /// Repetitions.
    repetitions: usize,
    /// Useful gigabytes a second.
    gb_per_s: f64,
    /// Useful gigaflops a second.
    gflop_per_s: f64,
    /// What the case cannot be faster than, in microseconds, and what sets that; absent where nothing does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    limit: Option<Limit>,
    /// The limit's time over the median's, in percent.
    percent_of_roofline: Option<f64>,
    /// The same work by `schedule: throughput`, in turns with this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    throughput: Option<Throughput>,
    /// What a step takes beyond its kernels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    gaps: Option<Gaps>,
    /// A case that this one is held against.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    beside: Option<Held>,
    /// Plain reads of the case's own memory, in turns with it; its roofline is then that of the read in order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reads: Option<Reads>,
}

/// What a case costs for being the same in every company.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Throughput {
    /// Microseconds a call by `schedule: throughput`.
    us: f64,
    /// The invariant schedule's time over it.
    ratio: f64,
}

/// What bounds a case.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Limit {
    us: f64,
    by: By,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum By {
    /// Bytes that must move.
    Bytes,
    /// Operations that must be done.
    Operations,
}

/// How far a case keeps up with another.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Held {
    /// The other's name.
    of: String,
    /// Its share of the limit over the other's.
    ratio: f64,
    /// What the ratio is to be at least.
    least: f64,
}

/// All results of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Saved {
    version: u32,
    isa: String,
    threads: usize,
    read_gb_per_s: f64,
    peak_f32_gflop_per_s: f64,
    peak_bf16_gflop_per_s: f64,
    /// One a case.
    pub(super) lines: Vec<Line>,
}

impl Line {
    pub(super) fn new(name: String, timed: &Timed, dtype: DType, cost: Cost, limits: &Limits) -> Line {
        let read = timed.reads.map_or(limits.read, |reads| reads.in_order.gb_per_s * 1e9);
        let peak = limits.flops(dtype);
        let (moved, done) = (cost.bytes / read, if peak > 0.0 { cost.flops / peak } else { 0.0 });
        let (least, by) = if moved >= done { (moved, By::Bytes) } else { (done, By::Operations) };
        Line {
            name,
            median_us: timed.median * 1e6,
            fastest_us: timed.fastest * 1e6,
            repetitions: timed.repetitions,
            gb_per_s: cost.bytes / timed.median / 1e9,
            gflop_per_s: cost.flops / timed.median / 1e9,
            limit: (least > 0.0).then_some(Limit { us: least * 1e6, by }),
            percent_of_roofline: (least > 0.0).then(|| 100.0 * least / timed.median),
            throughput: timed
                .throughput
                .map(|seconds| Throughput { us: seconds * 1e6, ratio: timed.median / seconds }),
            gaps: timed.gaps,
            beside: None,
            reads: timed.reads,
        }
    }

    /// The line of a case that was timed after `others`.
    pub(super) fn of(case: &Case, name: String, timed: &Timed, limits: &Limits, others: &[Line]) -> Line {
        let mut line = Line::new(name, timed, case.dtype, case.cost, limits);
        if let Some(beside) = &case.beside
            && let Some(other) = others.iter().find(|line| line.name == beside.of)
            && let (Some(own), Some(its)) = (line.percent_of_roofline, other.percent_of_roofline)
        {
            line.beside = Some(Held { of: beside.of.clone(), ratio: own / its, least: beside.least });
        }
        line
    }

    /// The line as printed, with its time relative to the baseline's where there is one.
    pub(super) fn text(&self, baseline: Option<&Saved>) -> String {
        let number = |value: f64| match value {
            0.0 => "-".into(),
            10_000.0.. => format!("{value:.0}"),
            _ => format!("{value:.1}"),
        };
        let limit = self.limit.map_or("-".into(), |limit| {
            format!("{:.1}{}", limit.us, if limit.by == By::Bytes { "b" } else { "o" })
        });
        let part = self.percent_of_roofline.map_or("-".into(), |percent| format!("{percent:.0}"));
        let mut line = format!(
            "{:<36}{:>9.1}{:>9}{:>7}{:>8}{:>5}",
            self.name,
            self.median_us,
            limit,
            number(self.gb_per_s),
            number(self.gflop_per_s),
            part
        );
        if let Some(baseline) = baseline {
            let before = baseline.lines.iter().find(|line| line.name == self.name);
            line += &before.map_or(format!("{:>6}", "new"), |before| {
                format!("{:>5.2}x", before.median_us / self.median_us)
            });
        }
        line += "\n";
        if let Some(Throughput { us, ratio }) = self.throughput {
            line +=
                &format!("{:<36}{us:>9.1}  invariant / throughput {ratio:.3}\n", "  by schedule: throughput");
        }
        if let Some(Gaps { kernels_us, percent, nodes, over_exact }) = self.gaps {
            line += &format!(
                "{:<36}{kernels_us:>9.1}  gaps {percent:.1} %, {nodes} nodes\n",
                "  its kernels and copies, each alone"
            );
            line += &over_exact.map_or(String::new(), |ratio| {
                format!("{:<45}  / a graph of its size {ratio:.3}\n", "  the whole step")
            });
        }
        if let Some(reads) = &self.reads {
            line += &share("of its memory read in order", &reads.in_order);
            line += &share("of the same in page order", &reads.in_page_order);
        }
        line
    }
}

/// A read beside a case, and the share of it that the case comes to.
fn share(of: &str, read: &Beside) -> String {
    let Beside { gb_per_s, low, high, percent, percent_low, percent_high } = read;
    format!(
        "  {percent:>3.0} % ({percent_low:.0}-{percent_high:.0}) {of}, {gb_per_s:.1} GB/s ({low:.1}-{high:.1})\n"
    )
}

/// The machine and its limits.
fn measured(limits: &Limits) -> String {
    let Limits { machine, threads, .. } = limits;
    let [read, f32s, bf16s] = [limits.read, limits.flops_f32, limits.flops_bf16].map(|value| value / 1e9);
    if f32s > 0.0 {
        return format!(
            "{machine}, {threads} threads: read {read:.1} GB/s, multiply-add {f32s:.0} GFLOP/s f32, {bf16s:.0} bf16"
        );
    }
    format!("{machine}, {threads} SMs\nread {read:.1} GB/s, products {bf16s:.0} GFLOP/s bf16")
}

/// The machine, and the table's head.
pub(super) fn head(limits: &Limits, baseline: Option<&Saved>) -> String {
    let mut text = format!(
        "{}\nlimits are of bytes that must move (b) or operations that must be done (o)\n\n{:<36}{:>9}{:>9}{:>7}{:>8}{:>5}",
        measured(limits),
        "kernel and shape",
        "median us",
        "limit us",
        "GB/s",
        "GFLOP/s",
        "%lim"
    );
    if baseline.is_some() {
        text += " speed";
    }
    text + "\n"
}

impl Saved {
    /// No line yet.
    pub(super) fn new(limits: &Limits) -> Saved {
        Saved {
            version: VERSION,
            isa: limits.machine.clone(),
            threads: limits.threads,
            read_gb_per_s: limits.read / 1e9,
            peak_f32_gflop_per_s: limits.flops_f32 / 1e9,
            peak_bf16_gflop_per_s: limits.flops_bf16 / 1e9,
            lines: Vec::new(),
        }
    }

    /// How cases kept up with those that they are held against: the worst, and all that did not.
    pub(super) fn beside(&self) -> String {
        let mut held: Vec<(&str, &Held)> =
            self.lines.iter().filter_map(|line| Some((&line.name[..], line.beside.as_ref()?))).collect();
        let behind = |held: &Held| held.ratio / held.least;
        held.sort_by(|a, b| behind(a.1).total_cmp(&behind(b.1)));
        let short = held.iter().filter(|(_, held)| held.ratio < held.least).count();
        let Some(_) = held.first() else { return String::new() };
        let mut text = format!(
            "\nkeeping up with other rows (share of the limit, as a part of theirs): {} of {}\n",
            held.len() - short,
            held.len()
        );
        for (name, Held { of, ratio, least }) in held.iter().take(short.max(1)) {
            text += &format!("  {ratio:.2} ({least:.2}) {name}\n       of {of}\n");
        }
        text
    }

    /// What being the same in every company costs at most.
    pub(super) fn against(&self) -> String {
        let both = self.lines.iter().filter_map(|line| Some((&line.name[..], line.throughput?.ratio)));
        let Some((name, most)) = both.clone().max_by(|a, b| a.1.total_cmp(&b.1)) else {
            return String::new();
        };
        let (all, within) = (both.clone().count(), both.filter(|(_, ratio)| *ratio <= 1.08).count());
        format!("\ninvariant against throughput: {within} of {all} within 8 %; most {most:.3}, {name}\n")
    }

    /// Reads what [`Saved::write`] wrote.
    pub(super) fn read(path: &Path) -> anyhow::Result<Saved> {
        let shown = path.display();
        let text = std::fs::read(path).with_context(|| format!("{shown}: cannot be read"))?;
        let saved: Saved =
            serde_json::from_slice(&text).with_context(|| format!("{shown}: not results of mstar bench"))?;
        ensure!(saved.version == VERSION, "{shown}: version {}, expected {VERSION}", saved.version);
        Ok(saved)
    }

    /// Writes the results as JSON.
    pub(super) fn write(&self, mut file: Output) -> anyhow::Result<()> {
        let text = serde_json::to_string_pretty(self)?;
        writeln!(file, "{text}")?;
        Ok(file.finish()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> Limits {
        Limits { machine: "x".into(), threads: 2, read: 50e9, flops_f32: 100e9, flops_bf16: 400e9 }
    }

    fn timed(median: f64) -> Timed {
        Timed {
            median,
            fastest: median,
            repetitions: 5,
            throughput: Some(median / 1.05),
            gaps: None,
            reads: None,
        }
    }

    #[test]
    fn the_roofline_takes_the_side_that_binds() {
        let line = |bytes, flops, dtype| {
            Line::new("x".into(), &timed(1e-3), dtype, Cost { bytes, flops }, &limits()).percent_of_roofline
        };
        assert_eq!(line(25e6, 1e6, DType::F32), Some(50.0));
        assert_eq!(line(1e6, 80e6, DType::F32), Some(80.0));
        assert_eq!(line(1e6, 80e6, DType::Bf16), Some(20.0));
        assert_eq!(line(0.0, 0.0, DType::F32), None);
    }

    #[test]
    fn a_case_is_told_when_it_does_not_keep_up() {
        let case = |beside| Case {
            kernel: "decode",
            shape: "x".into(),
            dtype: DType::Bf16,
            cost: Cost { bytes: 25e6, flops: 0.0 },
            beside,
            make: Box::new(|_| anyhow::bail!("never made")),
        };
        let least = 0.9;
        let beside = Some(crate::bench::cases::Beside { of: "a".into(), least, neighbour: true });
        let mut saved = Saved::new(&limits());
        assert_eq!(saved.beside(), "");
        saved.lines.push(Line::of(&case(None), "a".into(), &timed(1e-3), &limits(), &[]));
        // What it is held against was not timed.
        assert!(Line::of(&case(beside.clone()), "b".into(), &timed(1e-3), &limits(), &[]).beside.is_none());
        for (name, median) in [("b", 1.05e-3), ("c", 1.25e-3)] {
            let line = Line::of(&case(beside.clone()), name.into(), &timed(median), &limits(), &saved.lines);
            saved.lines.push(line);
        }
        let text = saved.beside();
        assert!(
            text.contains("1 of 2") && text.contains("0.80 (0.90) c") && !text.contains(" b\n"),
            "{text}"
        );
    }

    #[test]
    fn lines_fit_80_columns_and_a_baseline_survives_the_disk() {
        let cost = Cost { bytes: 1e9, flops: 1e9 };
        let name = "decode 64 x 1024, 32/8 heads, bf16";
        let mut saved = Saved::new(&limits());
        let beside = Beside {
            gb_per_s: 123.4,
            low: 122.4,
            high: 125.6,
            percent: 100.0,
            percent_low: 100.0,
            percent_high: 104.0,
        };
        let reads = Some(Reads { in_order: beside, in_page_order: beside });
        let timed = |median| Timed { reads, ..timed(median) };
        saved.lines.push(Line::new(name.into(), &timed(0.5), DType::F32, cost, &limits()));
        let path = tempfile::tempdir().unwrap().keep().join("bench.json");
        assert!(saved.against().contains("1 of 1 within 8 %; most 1.050, decode 64"), "{}", saved.against());
        saved.write(Output::open(&path).unwrap()).unwrap();
        let read = Saved::read(&path).unwrap();
        assert!(read.lines[0].reads.is_some());
        let gaps = Gaps { kernels_us: 12_345.6, percent: 10.1, nodes: 16, over_exact: Some(1.02) };
        let timed = Timed { gaps: Some(gaps), ..timed(0.25) };
        let now = Line::new(name.into(), &timed, DType::F32, cost, &limits()).text(Some(&read));
        assert!(now.lines().next().unwrap().ends_with("2.00x"), "{now}");
        assert!(now.contains("invariant / throughput 1.050"), "{now}");
        for line in now.lines().chain(head(&limits(), Some(&read)).lines()) {
            assert!(line.chars().count() <= crate::text::COLUMNS, "{line}");
        }
        std::fs::write(&path, b"{}").unwrap();
        assert!(format!("{:#}", Saved::read(&path).unwrap_err()).contains("not results of mstar bench"));
        std::fs::remove_dir_all(path.parent().unwrap()).unwrap();
    }
}
