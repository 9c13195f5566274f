//! What is said of devices compared: a table of 80 columns, or one JSON document.

use anyhow::Result;
use mstar_kernels::DType;
use serde_json::{Value, json};

use super::super::report::{figure, shortened};
use super::findings::{Disagreement, Findings, Node, What};
use super::gate::{Apart, Error};
use crate::text::{count, wrap};

/// A comparison over a spec.
pub(super) struct Report {
    /// The spec's name.
    pub(super) name: String,
    /// Its file.
    pub(super) spec: String,
    /// Element type of outputs.
    pub(super) dtype: DType,
    /// Names of the devices; the others are compared with the first.
    pub(super) devices: Vec<String>,
    /// Steps that ran.
    pub(super) steps: u64,
    /// Regions captured, by device.
    pub(super) captured: Vec<u64>,
    /// Digests over what finished, by device.
    pub(super) digests: Vec<String>,
    /// Whether requests were left.
    pub(super) stopped_early: bool,
    /// Whether by a signal.
    pub(super) interrupted: bool,
    /// Why they did not take the same steps.
    pub(super) parted: Option<String>,
    /// Every device but the first.
    pub(super) compared: Vec<Compared>,
}

/// A device compared with the first.
pub(super) struct Compared {
    /// Its name.
    pub(super) device: String,
    /// Whether it is the same device.
    pub(super) exact: bool,
    /// What was found.
    pub(super) findings: Findings,
}

/// Of `vectors` so many have the `same` bits; `bound` is the largest share of one that is used up; `o`, `lse`: errors of rows.
const HEAD: &str = "  resource (label)          rows     vectors    same    bound       o     lse\n";

impl Report {
    /// What is wrong; `None` where all devices agree.
    pub(super) fn failure(&self) -> Option<String> {
        if let Some(why) = &self.parted {
            return Some(format!("the devices did not take the same steps: {why}"));
        }
        let first = &self.devices[0];
        for compared in &self.compared {
            let findings = &compared.findings;
            if let Some(told) = findings.disagreements.first() {
                return Some(self.told(told, first, &compared.device));
            }
            if findings.rows() == 0 && !self.interrupted {
                return Some(format!("nothing of {} was compared: no row ran", compared.device));
            }
        }
        None
    }

    /// At most 80 columns wide.
    pub(super) fn text(&self) -> String {
        let first = &self.devices[0];
        let early = if self.stopped_early { ", requests were left" } else { "" };
        let mut out = wrap("", &format!("{} ({}), {} steps{early}", self.name, self.spec, self.steps));
        for compared in &self.compared {
            let how = if compared.exact { "bit for bit" } else { "within two roundings" };
            out += &wrap("", &format!("{} against {first}, {how}, {}", compared.device, self.dtype));
            out += HEAD;
            for ((attention, label), node) in &compared.findings.nodes {
                out += &row(&format!("{attention} ({label})"), node);
            }
            for told in &compared.findings.disagreements {
                out += &wrap("  - ", &self.told(told, first, &compared.device));
            }
            let (rows, disagree) = (compared.findings.rows(), compared.findings.disagree());
            out += &match disagree {
                0 => format!("  {} rows agree\n", count(rows)),
                n => format!("  {} rows of {} disagree\n", count(n), count(rows)),
            };
        }
        if let Some(why) = &self.parted {
            out += &wrap("", &format!("the devices did not take the same steps: {why}"));
        }
        out
    }

    /// One row that disagrees, in full.
    fn told(&self, told: &Disagreement, first: &str, other: &str) -> String {
        let Disagreement { step, attention, request, label, layer, what } = told;
        let place = format!("step {step}, {attention}, request {request} ({label}), layer {layer}");
        match what {
            What::Apart { position, apart } => {
                let Apart { rule, head, lane, values: [a, b], error, allowed, .. } = apart;
                let part = lane.map_or("lse".to_owned(), |lane| format!("o lane {lane}"));
                let allowed = if *allowed == 0.0 {
                    "the bits must be the same".to_owned()
                } else {
                    format!(
                        "{} is {error:.3e} off, {allowed:.3e} allowed",
                        of_rule(rule.name(), lane.is_some())
                    )
                };
                format!(
                    "{place}, position {position}, head {head}, {part}: {a:.7e} on {first}, {b:.7e} on {other}; {allowed}"
                )
            }
            What::Pick { first: is_first, why } => {
                format!("{place}: on {}: {why}", if *is_first { first } else { other })
            }
            What::Padding { token } => {
                format!("{place}: padded token {token} is not the same on {first} and {other}")
            }
        }
    }

    /// One document. A figure that is not finite is null.
    pub(super) fn json(&self) -> Result<String> {
        let rows: u64 = self.compared.iter().map(|compared| compared.findings.rows()).sum();
        let disagree: u64 = self.compared.iter().map(|compared| compared.findings.disagree()).sum();
        let document = json!({
            "version": 1,
            "name": self.name,
            "spec": self.spec,
            "dtype": self.dtype.name(),
            "devices": self.devices,
            "steps": self.steps,
            "captured": self.captured,
            "digests": self.digests,
            "stopped_early": self.stopped_early,
            "interrupted": self.interrupted,
            "parted": self.parted,
            "compared": self.compared.iter().map(compared_json).collect::<Vec<Value>>(),
            "summary": {
                "rows": rows,
                "disagree": disagree,
                "verdict": if self.failure().is_none() { "pass" } else { "fail" },
                "fault": self.failure(),
            },
        });
        Ok(serde_json::to_string_pretty(&document)? + "\n")
    }
}

fn of_rule(rule: &str, is_o: bool) -> &'static str {
    match (rule, is_o) {
        ("row", true) => "the row",
        ("row", false) => "the row's lse",
        (_, true) => "the vector",
        (_, false) => "it",
    }
}

fn row(name: &str, node: &Node) -> String {
    let share = [node.row, node.vector, node.lse].map(Error::share).into_iter().fold(0.0, f64::max);
    let same = match node.vectors {
        0 => "-".to_owned(),
        all => format!("{:.1}%", 100.0 * node.same as f64 / all as f64),
    };
    let mut out = format!(
        "  {:<20}{:>10}{:>12}{same:>8}{:>9} {} {}\n",
        shortened(name, 20),
        count(node.rows),
        count(node.vectors),
        format!("{share:.2}"),
        figure(node.row.error),
        figure(node.lse.error)
    );
    if node.picks_differ > 0 {
        out += &wrap(
            "    ",
            &format!(
                "{} picks differ; by the oracle {} were judged on their scores, {} vectors over the pick that was used",
                count(node.picks_differ),
                count(node.picks_judged),
                count(node.picks_vectors)
            ),
        );
    }
    out
}

fn compared_json(compared: &Compared) -> Value {
    let error = |Error { error, allowed }: Error| json!({ "error": error, "allowed": allowed });
    let nodes = compared.findings.nodes.iter().map(|((attention, label), node)| {
        json!({
            "attention": attention,
            "label": label,
            "rows": node.rows,
            "disagree": node.disagree,
            "vectors": node.vectors,
            "same_bits": node.same,
            "worst_row": error(node.row),
            "worst_vector": error(node.vector),
            "worst_lse": error(node.lse),
            "picks_differ": node.picks_differ,
            "picks_judged": node.picks_judged,
            "picks_vectors": node.picks_vectors,
        })
    });
    let told = compared.findings.disagreements.iter().map(|told| {
        let mut value = json!({
            "step": told.step,
            "attention": told.attention,
            "request": told.request,
            "label": told.label,
            "layer": told.layer,
        });
        let fields = value.as_object_mut().expect("an object literal");
        match &told.what {
            What::Apart { position, apart } => {
                fields.insert("rule".into(), apart.rule.name().into());
                fields.insert("position".into(), json!(position));
                fields.insert("head".into(), json!(apart.head));
                fields.insert("lane".into(), json!(apart.lane));
                fields.insert("values".into(), json!(apart.values));
                fields.insert("error".into(), json!(apart.error));
                fields.insert("allowed".into(), json!(apart.allowed));
            }
            What::Pick { first, why } => {
                fields.insert("rule".into(), "pick".into());
                fields.insert("on_the_first".into(), json!(first));
                fields.insert("why".into(), json!(why));
            }
            What::Padding { token } => {
                fields.insert("rule".into(), "padding".into());
                fields.insert("token".into(), json!(token));
            }
        }
        value
    });
    json!({
        "device": compared.device,
        "exact": compared.exact,
        "rows": compared.findings.rows(),
        "disagree": compared.findings.disagree(),
        "nodes": nodes.collect::<Vec<Value>>(),
        "disagreements": told.collect::<Vec<Value>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::super::gate::Rule;
    use super::*;
    use crate::text::COLUMNS;

    #[test]
    fn the_table_fits_a_terminal_and_tells_where_devices_disagree() {
        let apart = Apart {
            rule: Rule::Vector,
            query: 3,
            head: 63,
            lane: Some(511),
            values: [-1.234_567_8e-10, f64::NAN],
            error: f64::NAN,
            allowed: 1.5e-2,
        };
        let told = |what| Disagreement {
            step: 1234,
            attention: "attention".into(),
            request: "r123".into(),
            label: "uncond".into(),
            layer: 60,
            what,
        };
        let worst = Error { error: 1.25e-3, allowed: 6.0e-3 };
        let node = Node {
            rows: 12_345_678,
            disagree: 1,
            vectors: 999_999_999,
            same: 500_000_000,
            row: worst,
            vector: worst,
            lse: worst,
            picks_differ: 12_345,
            picks_judged: 99,
            picks_vectors: 1234,
        };
        let name = ("a_resource_with_a_very_long_name".to_owned(), "uncond".to_owned());
        let why = "query 3 (position 17): picked position 4 and left out position 5".to_owned();
        let findings = Findings {
            nodes: [(name, node)].into(),
            disagreements: vec![
                told(What::Apart { position: 131_071, apart }),
                told(What::Pick { first: true, why }),
                told(What::Padding { token: 7 }),
            ],
        };
        let mut report = Report {
            name: "name".into(),
            spec: "specs/with/a/path/that/is/rather/long/for/a/line/of/a/terminal/of/80/columns.yaml".into(),
            dtype: DType::Bf16,
            devices: vec!["cpu".into(), "cuda:0".into()],
            steps: 12,
            captured: vec![0, 3],
            digests: vec!["00".into(), "11".into()],
            stopped_early: true,
            interrupted: false,
            parted: Some("whether a step is admitted: cpu says Admitted, cuda:0 NotReady(..)".into()),
            compared: vec![Compared { device: "cuda:0".into(), exact: false, findings }],
        };
        let text = report.text();
        assert!(text.lines().all(|line| line.chars().count() <= COLUMNS), "{text}");
        assert!(text.contains("1 rows of 12 345 678 disagree"), "{text}");
        let document: Value = serde_json::from_str(&report.json().unwrap()).unwrap();
        assert_eq!(document["compared"][0]["disagreements"][0]["position"], 131_071);
        assert_eq!(document["compared"][0]["disagreements"][0]["values"][1], Value::Null);
        assert_eq!(document["summary"]["verdict"], "fail");
        assert!(report.failure().unwrap().contains("did not take the same steps"));
        report.parted = None;
        let said = report.failure().unwrap();
        assert!(
            said.contains("position 131071, head 63, o lane 511: -1.2345678e-10 on cpu, NaN on cuda:0"),
            "{said}"
        );
        report.compared[0].findings = Findings::default();
        assert!(report.failure().unwrap().contains("nothing of cuda:0 was compared"));
    }
}
