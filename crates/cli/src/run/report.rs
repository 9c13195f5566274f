//! What a run was and cost: the data of `--report` (docs/report.md) and the table on stdout.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Serialize;

use super::event::Event;
use super::format::{seconds, si};
use super::regions::Calls;
use crate::text::{bytes, count, wrap};

/// The version of the schema that docs/report.md describes.
pub(crate) const SCHEMA: &str = "mstar.run/1";

/// A whole report.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) schema: &'static str,
    pub(crate) name: String,
    pub(crate) spec: String,
    /// The trace that the requests were read from.
    pub(crate) trace: Option<Trace>,
    /// Whether a signal ended it before the requests were finished.
    pub(crate) interrupted: bool,
    pub(crate) device: String,
    pub(crate) dtype: String,
    pub(crate) seed: u64,
    pub(crate) machine: MachineReport,
    pub(crate) requests: Requests,
    pub(crate) tokens: Tokens,
    pub(crate) steps: Steps,
    pub(crate) elapsed_s: f64,
    pub(crate) tokens_per_s: f64,
    pub(crate) phases: Vec<Phase>,
    pub(crate) kernels: BTreeMap<String, u64>,
    /// How attention was called, node by node and walk by walk.
    pub(crate) attention: Vec<Attention>,
    /// With an indexer.
    pub(crate) sparse: Option<Sparse>,
    pub(crate) memory: MemoryReport,
    /// Over pages.
    pub(crate) cache: Option<Cache>,
    /// Over a ring.
    pub(crate) ring: Option<Ring>,
    pub(crate) verify: Verify,
    pub(crate) prefix_model: Option<PrefixModel>,
    pub(crate) digest: String,
    pub(crate) refusals: Vec<Refused>,
    pub(crate) events: Vec<Event>,
}

/// The trace of a workload.
#[derive(Debug, Serialize)]
pub(crate) struct Trace {
    /// The file that was read.
    pub(crate) file: String,
    /// Who named it: `the spec` or `--set`.
    pub(crate) named_by: &'static str,
    /// Where that name was found.
    pub(crate) found: String,
}

/// Where it ran.
#[derive(Debug, Serialize)]
pub(crate) struct MachineReport {
    pub(crate) cpu: String,
    pub(crate) isa: String,
    pub(crate) threads: usize,
    pub(crate) read_bytes_per_s: Option<f64>,
    pub(crate) flops_per_s: Option<f64>,
}

/// Requests by what became of them.
#[derive(Debug, Serialize)]
pub(crate) struct Requests {
    pub(crate) total: usize,
    pub(crate) finished: usize,
    pub(crate) refused: usize,
    /// Neither, since the run stopped early.
    pub(crate) unfinished: usize,
    pub(crate) peak_active: usize,
}

/// Tokens by kind.
#[derive(Debug, Serialize)]
pub(crate) struct Tokens {
    /// Prompt tokens of the requests that entered.
    pub(crate) prompt: usize,
    /// Of those, found in the prefix index.
    pub(crate) prefix_hits: usize,
    /// Query tokens that were computed.
    pub(crate) computed: u64,
}

/// Steps.
#[derive(Debug, Serialize)]
pub(crate) struct Steps {
    pub(crate) total: u64,
    pub(crate) stopped_early: bool,
    pub(crate) planned_ahead: u64,
    pub(crate) replanned: u64,
    pub(crate) padded: u64,
    /// Regions of padded steps that were captured on a device.
    #[serde(skip_serializing_if = "none")]
    pub(crate) captured: u64,
    /// Those that were replayed.
    #[serde(skip_serializing_if = "none")]
    pub(crate) replayed: u64,
    /// Kernels that were built or loaded once the first step had begun: all are prepared before it.
    #[serde(skip_serializing_if = "none")]
    pub(crate) late_kernels: u64,
    pub(crate) virtual_ms: f64,
}

fn none(count: &u64) -> bool {
    *count == 0
}

/// One phase of one resource.
#[derive(Debug, Serialize)]
pub(crate) struct Phase {
    pub(crate) phase: String,
    /// Empty for the program's own phases.
    pub(crate) resource: String,
    pub(crate) calls: u64,
    pub(crate) seconds: f64,
    pub(crate) tokens: u64,
    pub(crate) bytes: u64,
    pub(crate) flops: u64,
    pub(crate) tokens_per_s: Option<f64>,
    pub(crate) bytes_per_s: Option<f64>,
    pub(crate) flops_per_s: Option<f64>,
    /// The least time that the machine's measured limits allow, as a share of the time taken.
    pub(crate) share_of_limit: Option<f64>,
}

/// How often a node attended a layer in steps of one walk.
#[derive(Debug, Serialize)]
pub(crate) struct Attention {
    /// The resource.
    pub(crate) node: String,
    /// The steps' walk.
    pub(crate) walk: String,
    #[serde(flatten)]
    pub(crate) calls: Calls,
}

/// Pairs of a query and a key, over all layers, heads not counted.
#[derive(Debug, Serialize)]
pub(crate) struct Sparse {
    /// Scored by the indexer.
    pub(crate) scored: u64,
    /// Attended.
    pub(crate) attended: u64,
    /// That attention to every visible key would have attended.
    pub(crate) dense: u64,
    /// `attended / dense`.
    pub(crate) share: f64,
}

/// Memory, in bytes.
#[derive(Debug, Serialize)]
pub(crate) struct MemoryReport {
    /// What `mstar explain` says is held from the start.
    pub(crate) estimated: u64,
    /// The most that it may come to.
    pub(crate) estimated_most: u64,
    pub(crate) allocated_peak: u64,
    pub(crate) resident_peak: Option<u64>,
    /// Of these, what lies on a device and what is pinned for it; absent on the CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) apart: Option<Apart>,
}

/// Bytes on a device, and of the host's pinned for it.
#[derive(Debug, Serialize)]
pub(crate) struct Apart {
    pub(crate) device_estimated: u64,
    pub(crate) device_peak: u64,
    pub(crate) pinned_estimated: u64,
    pub(crate) pinned_peak: u64,
}

/// What happened to pages.
#[derive(Debug, Serialize)]
pub(crate) struct Cache {
    pub(crate) page_size: usize,
    pub(crate) pages: usize,
    pub(crate) evictions: u64,
    pub(crate) offloads: usize,
    pub(crate) reloads: usize,
    pub(crate) restarts: usize,
    pub(crate) put_off: usize,
    pub(crate) copies: u64,
    pub(crate) repointed: u64,
}

/// What became of a ring's worlds.
#[derive(Debug, Serialize)]
pub(crate) struct Ring {
    pub(crate) worlds: usize,
    pub(crate) tokens_per_frame: usize,
    /// Frames that were kept, over all requests.
    pub(crate) frames: u64,
    /// The most of one request.
    pub(crate) most_frames: u64,
    /// How often that request overwrote every frame of the layers whose frames stay longest.
    pub(crate) wraps: u64,
    /// Worlds copied to the host.
    pub(crate) saved: u64,
    /// Frames that came again after a world was restored, and were compared with what they had been.
    pub(crate) replayed: u64,
    /// Requests whose frames differed then.
    pub(crate) differ: u64,
    pub(crate) first_difference: Option<String>,
}

/// What `--verify` found.
#[derive(Debug, Serialize)]
pub(crate) struct Verify {
    pub(crate) rate: f64,
    pub(crate) rows: u64,
    pub(crate) checks: u64,
    pub(crate) vectors: u64,
    /// Queries of a layer whose pick was judged by its scores.
    pub(crate) picks: u64,
    pub(crate) failed: u64,
    pub(crate) worst_share_of_allowed: f64,
    pub(crate) first_failure: Option<String>,
}

/// What the replayed model of the prefix index says.
#[derive(Debug, Serialize)]
pub(crate) struct PrefixModel {
    pub(crate) requests: usize,
    pub(crate) hit_tokens: usize,
    pub(crate) mismatches: Vec<Mismatch>,
}

/// One request whose hit the log does not explain.
#[derive(Debug, Serialize)]
pub(crate) struct Mismatch {
    pub(crate) request: String,
    pub(crate) expected: usize,
    pub(crate) got: usize,
}

/// One refusal.
#[derive(Debug, Serialize)]
pub(crate) struct Refused {
    pub(crate) request: String,
    pub(crate) why: String,
}

impl Report {
    /// Whether every check passed.
    pub(crate) fn passed(&self) -> bool {
        self.verify.failed == 0
            && self.prefix_model.as_ref().is_none_or(|model| model.mismatches.is_empty())
            && self.ring.as_ref().is_none_or(|ring| ring.differ == 0)
    }

    /// The table, in 80 columns.
    pub(crate) fn table(&self) -> String {
        let mut out = String::new();
        let title = format!(
            "{} on {} ({} threads, {}), {}: {} steps in {}, {} tokens/s",
            self.name,
            self.device,
            self.machine.threads,
            self.machine.isa,
            self.dtype,
            count(self.steps.total),
            seconds(self.elapsed_s),
            si(self.tokens_per_s),
        );
        out.push_str(&wrap("", &title));
        if self.steps.stopped_early {
            let text = format!(
                "{} after {} steps; {} requests are unfinished",
                if self.interrupted { "interrupted" } else { "stopped" },
                self.steps.total,
                self.requests.unfinished
            );
            out.push_str(&wrap("", &text));
        }
        out.push('\n');
        self.phase_table(&mut out);
        out.push('\n');
        for (head, text) in self.lines() {
            out.push_str(&wrap(&format!("{head:<11}"), &text));
        }
        for refused in self.refusals.iter().take(3) {
            out.push_str(&wrap(&format!("{:<11}", "refused"), &refused.why));
        }
        if self.refusals.len() > 3 {
            let text = format!("and {} more; --report lists them", self.refusals.len() - 3);
            out.push_str(&wrap(&format!("{:<11}", ""), &text));
        }
        if let Some(failure) = &self.verify.first_failure {
            out.push_str(&wrap("FAILED     ", failure));
        }
        if let Some(difference) = self.ring.as_ref().and_then(|ring| ring.first_difference.as_ref()) {
            out.push_str(&wrap("FAILED     ", difference));
        }
        if let Some(first) = self.prefix_model.as_ref().and_then(|model| model.mismatches.first()) {
            let text = format!(
                "request {} hit {} prompt tokens, its log explains {}",
                first.request, first.got, first.expected
            );
            out.push_str(&wrap("FAILED     ", &text));
        }
        out
    }

    fn phase_table(&self, out: &mut String) {
        let head = ["phase", "resource", "calls", "time", "share", "tokens/s", "GB/s", "GFLOP/s", "limit"];
        let rate = |value: Option<f64>, unit: f64| match value.map(|v| v / unit) {
            Some(v) if v >= 99.95 => format!("{v:.0}"),
            Some(v) if v > 0.0 => format!("{v:.1}"),
            _ => "-".into(),
        };
        let mut rows = vec![head.map(str::to_owned)];
        for phase in &self.phases {
            let share = |part: f64| format!("{:.1}%", part * 100.0);
            rows.push([
                phase.phase.clone(),
                if phase.resource.is_empty() { "-".into() } else { clipped(&phase.resource, 11) },
                phase.calls.to_string(),
                seconds(phase.seconds),
                if self.elapsed_s > 0.0 { share(phase.seconds / self.elapsed_s) } else { "-".into() },
                phase.tokens_per_s.map_or_else(|| "-".into(), si),
                rate(phase.bytes_per_s, 1e9),
                rate(phase.flops_per_s, 1e9),
                phase.share_of_limit.map_or_else(|| "-".into(), share),
            ]);
        }
        let widths: Vec<usize> = (0..head.len())
            .map(|c| rows.iter().map(|row| row[c].chars().count()).max().unwrap_or(0))
            .collect();
        for row in &rows {
            let mut line = String::new();
            for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
                let gap = if column == 0 { "" } else { "  " };
                // Words to the left, numbers to the right.
                let _ = if column < 2 {
                    write!(line, "{gap}{cell:<width$}")
                } else {
                    write!(line, "{gap}{cell:>width$}")
                };
            }
            out.push_str(line.trim_end());
            out.push('\n');
        }
    }

    fn lines(&self) -> Vec<(&'static str, String)> {
        let mut lines = Vec::new();
        let Requests { total, finished, refused, peak_active, .. } = self.requests;
        let number = |n: usize| count(n as u64);
        lines.push((
            "requests",
            format!(
                "{} finished of {}, {} refused, at most {} active",
                number(finished),
                number(total),
                number(refused),
                number(peak_active)
            ),
        ));
        let percent =
            |part: usize, whole: usize| if whole == 0 { 0.0 } else { 100.0 * part as f64 / whole as f64 };
        lines.push((
            "tokens",
            format!(
                "{} computed; {} prompt tokens, of which {} ({:.1}%) were prefix hits",
                count(self.tokens.computed),
                number(self.tokens.prompt),
                number(self.tokens.prefix_hits),
                percent(self.tokens.prefix_hits, self.tokens.prompt)
            ),
        ));
        if let Some(Cache {
            page_size, pages, evictions, offloads, reloads, restarts, put_off, copies, ..
        }) = &self.cache
        {
            lines.push((
                "pages",
                format!(
                    "{} of {page_size} tokens; {} evictions, {} copies on write, {} offloads, {} reloads, {} restarts, \
                     {} cuts put off",
                    number(*pages),
                    count(*evictions),
                    count(*copies),
                    number(*offloads),
                    number(*reloads),
                    number(*restarts),
                    number(*put_off)
                ),
            ));
        }
        if let Some(Ring { worlds, tokens_per_frame, frames, most_frames, wraps, .. }) = &self.ring {
            lines.push((
                "worlds",
                format!(
                    "{} with frames of {tokens_per_frame} tokens; {} frames kept, at most {} of one request, whose ring \
                     was overwritten {wraps} times whole",
                    number(*worlds),
                    count(*frames),
                    count(*most_frames)
                ),
            ));
        }
        if let Some(Ring { saved, replayed, differ, .. }) = self.ring.as_ref().filter(|ring| ring.saved > 0) {
            lines.push((
                "snapshots",
                format!(
                    "{} worlds saved; {} frames came again after a restore, {} requests differ",
                    count(*saved),
                    count(*replayed),
                    count(*differ)
                ),
            ));
        }
        if self.steps.planned_ahead + self.steps.replanned + self.steps.padded > 0 {
            lines.push((
                "plans",
                format!(
                    "{} made ahead, {} given up or made again; {} steps padded to a bucket",
                    count(self.steps.planned_ahead),
                    count(self.steps.replanned),
                    count(self.steps.padded)
                ),
            ));
        }
        // Where there are graphs, nothing runs without one unsaid.
        let graphs = self.device != "cpu";
        for Attention { node, walk, calls } in self.attention.iter().filter(|_| graphs) {
            let Calls { replayed, captured, eager, .. } = calls;
            let text = format!(
                "{node} in {walk}: {} layers replayed ({} captured first), {} call by call",
                count(*replayed),
                count(*captured),
                count(*eager)
            );
            lines.push(("graphs", text));
        }
        for (kernel, plans) in &self.kernels {
            lines.push(("kernel", format!("{kernel} ({} plans)", count(*plans))));
        }
        if let Some(Sparse { scored, attended, dense, share }) = &self.sparse {
            let scored_share = if *dense == 0 { 0.0 } else { *scored as f64 / *dense as f64 };
            lines.push((
                "keys",
                format!(
                    "{} pairs of a query and a key attended of {} that dense attention would ({:.1}%), {} scored \
                     ({:.1}%)",
                    count(*attended),
                    count(*dense),
                    100.0 * share,
                    count(*scored),
                    100.0 * scored_share
                ),
            ));
        }
        let resident =
            self.memory.resident_peak.map_or_else(String::new, |n| format!(", {} resident", bytes(n.into())));
        lines.push((
            "memory",
            format!(
                "{} allocated ({} foreseen, {} at most){resident}",
                bytes(self.memory.allocated_peak.into()),
                bytes(self.memory.estimated.into()),
                bytes(self.memory.estimated_most.into())
            ),
        ));
        if let Some(apart) = &self.memory.apart {
            let of = |peak: u64, foreseen: u64| {
                format!("{} ({} foreseen)", bytes(peak.into()), bytes(foreseen.into()))
            };
            let (device, pinned) = (
                of(apart.device_peak, apart.device_estimated),
                of(apart.pinned_peak, apart.pinned_estimated),
            );
            lines.push(("", format!("{device} on {}, {pinned} pinned", self.device)));
        }
        if let (Some(read), Some(flops)) = (self.machine.read_bytes_per_s, self.machine.flops_per_s) {
            let text = format!(
                "this machine reads {:.1} GB/s and does {:.0} GFLOP/s, measured in this run",
                read / 1e9,
                flops / 1e9
            );
            lines.push(("limit", text));
        }
        if let Some(model) = &self.prefix_model {
            lines.push((
                "prefix",
                format!(
                    "a model replayed the log of {} requests: {} hit tokens, {} differ",
                    number(model.requests),
                    number(model.hit_tokens),
                    number(model.mismatches.len())
                ),
            ));
        }
        if self.verify.rate > 0.0 {
            let picks = match self.verify.picks {
                0 => String::new(),
                picks => format!(", {} picks", count(picks)),
            };
            lines.push((
                "verified",
                format!(
                    "{} rows ({} layers of them, {} vectors{picks}) in f64: {} wrong; worst error {:.2} of what is \
                     allowed",
                    count(self.verify.rows),
                    count(self.verify.checks),
                    count(self.verify.vectors),
                    count(self.verify.failed),
                    self.verify.worst_share_of_allowed
                ),
            ));
        }
        lines.push(("digest", self.digest.clone()));
        lines
    }
}

/// `text` in at most `width` characters.
fn clipped(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    text.chars().take(width - 1).chain(['~']).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn sample() -> Report {
        let phase = |phase: &str, resource: &str| Phase {
            phase: phase.into(),
            resource: resource.into(),
            calls: 123_456,
            seconds: 12.345,
            tokens: 10_000_000,
            bytes: 99_000_000_000,
            flops: 123_000_000_000,
            tokens_per_s: Some(812_345.0),
            bytes_per_s: Some(123.4e9),
            flops_per_s: Some(1234.5e9),
            share_of_limit: Some(0.987),
        };
        Report {
            schema: SCHEMA,
            name: "a-spec-with-a-rather-long-name".into(),
            spec: "specs/x.yaml".into(),
            trace: None,
            interrupted: false,
            device: "cuda:0".into(),
            dtype: "bf16".into(),
            seed: 7,
            machine: MachineReport {
                cpu: "x".into(),
                isa: "avx512-bf16".into(),
                threads: 128,
                read_bytes_per_s: Some(25e9),
                flops_per_s: Some(4e11),
            },
            requests: Requests {
                total: 20_000,
                finished: 19_990,
                refused: 5,
                unfinished: 5,
                peak_active: 64,
            },
            tokens: Tokens { prompt: 1_234_567, prefix_hits: 345_678, computed: 9_999_999 },
            steps: Steps {
                total: 99_999,
                stopped_early: true,
                planned_ahead: 5,
                replanned: 2,
                padded: 9,
                captured: 0,
                replayed: 0,
                late_kernels: 0,
                virtual_ms: 1.0,
            },
            elapsed_s: 123.4,
            tokens_per_s: 81_234.5,
            phases: vec![phase("kv write", "a-resource-of-a-long-name"), phase("synthesize", "")],
            attention: vec![Attention {
                node: "a-resource-of-a-long-name".into(),
                walk: "decode".into(),
                calls: Calls { replayed: 123_456, captured: 1234, eager: 99_999, padded: 0 },
            }],
            kernels: BTreeMap::from([("attn: paged cpu avx512 decode + prefill".into(), 100)]),
            sparse: Some(Sparse {
                scored: 123_456_789_012,
                attended: 98_765_432_101,
                dense: 999_999_999_999,
                share: 0.0988,
            }),
            memory: MemoryReport {
                estimated: 1 << 30,
                estimated_most: 2 << 30,
                allocated_peak: 1 << 30,
                resident_peak: Some(1 << 31),
                apart: None,
            },
            cache: Some(Cache {
                page_size: 16,
                pages: 100_000,
                evictions: 99_999,
                offloads: 1000,
                reloads: 1000,
                restarts: 10,
                put_off: 777,
                copies: 12_345,
                repointed: 3,
            }),
            ring: Some(Ring {
                worlds: 1000,
                tokens_per_frame: 65_536,
                frames: 123_456,
                most_frames: 99_999,
                wraps: 99_999,
                saved: 1000,
                replayed: 20_000,
                differ: 0,
                first_difference: None,
            }),
            verify: Verify {
                rate: 0.05,
                rows: 1234,
                checks: 9999,
                vectors: 123_456,
                picks: 1234,
                failed: 1,
                worst_share_of_allowed: 1.5,
                first_failure: Some("step 3 ".repeat(40)),
            },
            prefix_model: Some(PrefixModel { requests: 200, hit_tokens: 99_999, mismatches: vec![] }),
            digest: "0123456789abcdef".into(),
            refusals: (0..5)
                .map(|i| Refused {
                    request: format!("r{i}"),
                    why: format!("kv: request r{i} is 5 pages short of the 9 it needs"),
                })
                .collect(),
            events: vec![],
        }
    }

    #[test]
    fn the_table_keeps_to_80_columns() {
        let table = sample().table();
        for line in table.lines() {
            assert!(line.chars().count() <= 80, "{} columns: {line}", line.chars().count());
        }
        for part in ["kv write", "stopped after", "5 pages short", "FAILED", "digest", "98.7%"] {
            assert!(table.contains(part), "{part} is missing from\n{table}");
        }
    }

    #[test]
    fn a_failed_row_or_an_unexplained_hit_fails_the_run() {
        let mut report = sample();
        assert!(!report.passed());
        report.verify.failed = 0;
        assert!(report.passed());
        let mismatch = Mismatch { request: "r1".into(), expected: 0, got: 16 };
        report.prefix_model = Some(PrefixModel { requests: 1, hit_tokens: 0, mismatches: vec![mismatch] });
        assert!(!report.passed() && report.table().contains("r1 hit 16"));
    }
}
