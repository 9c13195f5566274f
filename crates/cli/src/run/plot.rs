//! `--plot`: a run's timeline as SVG, three lanes over its steps: time by phase, query tokens, active requests.

use std::fmt::Write as _;

use super::files::{STEP_PHASES, StepLine};

const WIDTH: f64 = 960.0;
const LANE: f64 = 120.0;
const GAP: f64 = 36.0;
const LEFT: f64 = 64.0;
/// Columns that a lane is drawn in; more steps than that are averaged.
const COLUMNS: usize = 400;
/// Colours of the phases, distinguishable in print and to colour-blind readers (Okabe and Ito, 2008).
const COLOURS: [&str; STEP_PHASES.len()] =
    ["#e69f00", "#56b4e9", "#0072b2", "#cc79a7", "#999999", "#009e73", "#d55e00", "#f0e442"];

/// The steps of a run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Timeline {
    steps: Vec<StepLine>,
}

impl Timeline {
    /// Adds a step.
    pub(crate) fn add(&mut self, line: &StepLine) {
        self.steps.push(line.clone());
    }

    /// The drawing.
    pub(crate) fn svg(&self, title: &str) -> String {
        let height = 3.0 * (LANE + GAP) + 2.0 * GAP;
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
             font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
             <text x=\"{LEFT}\" y=\"20\" font-size=\"14\">{}: {} steps</text>\n",
            escaped(title),
            self.steps.len()
        );
        let columns = self.columns();
        let times: Vec<Vec<f64>> = columns.iter().map(|c| mean(c, |s| s.phases.to_vec())).collect();
        let tokens: Vec<Vec<f64>> = columns.iter().map(|c| mean(c, |s| vec![s.tokens as f64])).collect();
        let active: Vec<Vec<f64>> = columns.iter().map(|c| mean(c, |s| vec![s.active as f64])).collect();
        lane(&mut out, 0, "ms a step, by phase", &times, 1e3, &COLOURS);
        lane(&mut out, 1, "query tokens a step", &tokens, 1.0, &COLOURS[2..3]);
        lane(&mut out, 2, "requests active", &active, 1.0, &COLOURS[5..6]);
        for (i, (phase, colour)) in STEP_PHASES.iter().zip(COLOURS).enumerate() {
            let (x, y) = (LEFT + 100.0 * i as f64, height - 12.0);
            let _ = writeln!(
                out,
                "<rect x=\"{x}\" y=\"{}\" width=\"10\" height=\"10\" fill=\"{colour}\"/><text x=\"{}\" y=\"{y}\">{phase}</text>",
                y - 10.0,
                x + 14.0
            );
        }
        out.push_str("</svg>\n");
        out
    }

    /// The steps of each column.
    fn columns(&self) -> Vec<&[StepLine]> {
        let size = self.steps.len().div_ceil(COLUMNS).max(1);
        self.steps.chunks(size).collect()
    }
}

fn mean(steps: &[StepLine], of: impl Fn(&StepLine) -> Vec<f64>) -> Vec<f64> {
    let mut sums: Vec<f64> = Vec::new();
    for step in steps {
        let values = of(step);
        sums.resize(values.len(), 0.0);
        sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
    }
    sums.iter().map(|sum| sum / steps.len().max(1) as f64).collect()
}

/// One lane of stacked columns; values are multiplied by `unit`.
fn lane(out: &mut String, index: usize, name: &str, columns: &[Vec<f64>], unit: f64, colours: &[&str]) {
    let top = GAP + index as f64 * (LANE + GAP) + 16.0;
    let most = columns.iter().map(|column| column.iter().sum::<f64>()).fold(0.0, f64::max);
    let width = (WIDTH - LEFT - 16.0) / columns.len().max(1) as f64;
    let _ = writeln!(
        out,
        "<text x=\"{LEFT}\" y=\"{}\">{name} (at most {:.3})</text>\n<line x1=\"{LEFT}\" y1=\"{y}\" x2=\"{}\" y2=\"{y}\" stroke=\"black\"/>",
        top - 4.0,
        most * unit,
        WIDTH - 16.0,
        y = top + LANE,
    );
    if most <= 0.0 {
        return;
    }
    for (i, column) in columns.iter().enumerate() {
        let mut bottom = top + LANE;
        for (value, colour) in column.iter().zip(colours) {
            let tall = value / most * LANE;
            bottom -= tall;
            if tall > 0.05 {
                let x = LEFT + i as f64 * width;
                let _ = writeln!(
                    out,
                    "<rect x=\"{x:.2}\" y=\"{bottom:.2}\" width=\"{width:.2}\" height=\"{tall:.2}\" fill=\"{colour}\"/>"
                );
            }
        }
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(step: u64) -> StepLine {
        StepLine {
            step,
            walk: "decode",
            rows: 3,
            tokens: 5 + step as usize,
            padded: false,
            active: 2,
            virtual_ms: 1.0,
            seconds: 0.01,
            phases: [0.001; STEP_PHASES.len()],
        }
    }

    #[test]
    fn many_steps_fold_into_few_columns_and_none_is_a_drawing_too() {
        let mut timeline = Timeline::default();
        assert!(timeline.svg("a < b").contains("a &lt; b: 0 steps"));
        (0..5000).for_each(|step| timeline.add(&line(step)));
        let svg = timeline.svg("x");
        assert!(svg.matches("<rect").count() < 10 * COLUMNS, "{}", svg.len());
        assert!(svg.contains("query tokens a step (at most 5000.5") && svg.ends_with("</svg>\n"));
    }
}
