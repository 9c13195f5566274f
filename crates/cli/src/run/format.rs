//! Numbers as the table prints them: three significant digits and a unit.

const UNITS: [&str; 6] = ["", " k", " M", " G", " T", " P"];

/// `value` with a decimal prefix: `12.3 G`, `999`, `4.56 k`.
pub(crate) fn si(value: f64) -> String {
    let mut value = value;
    let mut unit = 0;
    // 999.5 would print as 1000, which is the next unit's.
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    let number = if unit == 0 && value.fract() == 0.0 { format!("{value}") } else { digits(value) };
    format!("{number}{}", UNITS[unit])
}

/// Seconds with a prefix: `1.23 ms`.
pub(crate) fn seconds(value: f64) -> String {
    match value {
        v if v >= 1.0 || v == 0.0 => format!("{} s", digits(v)),
        v if v >= 1e-3 => format!("{} ms", digits(v * 1e3)),
        v if v >= 1e-6 => format!("{} us", digits(v * 1e6)),
        v => format!("{} ns", digits(v * 1e9)),
    }
}

/// Three significant digits.
fn digits(value: f64) -> String {
    match value {
        0.0 => "0".into(),
        v if v >= 99.95 => format!("{v:.0}"),
        v if v >= 9.995 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_digits_and_a_unit() {
        assert_eq!([si(0.0), si(999.0), si(12_345.0), si(9.99e8)], ["0", "999", "12.3 k", "999 M"]);
        assert_eq!(si(999_999.0), "1.00 M");
        assert_eq!(
            [seconds(0.0), seconds(12.34), seconds(1.5e-3), seconds(2e-7)],
            ["0 s", "12.3 s", "1.50 ms", "200 ns"]
        );
    }
}
