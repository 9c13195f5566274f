//! Scalars as numbers, booleans and words, and what to say when they are not.
//!
//! A spec is stricter than YAML: a number is written in digits and unquoted, a boolean is `true` or `false`. So no value
//! is read as something that its author did not write, and a value that is refused is refused with its cure.

use std::ops::RangeInclusive;

use super::node::{Node, Scalar, clip};

/// A whole number within `range`.
pub(super) fn whole(node: &Node, range: &RangeInclusive<u64>) -> Result<u64, String> {
    let expected = format!("expected a whole number from {} to {}", range.start(), range.end());
    let refuse = |cure: &str| Err(format!("{expected}, got {}{cure}", node.describe()));
    let Some(scalar) = node.scalar() else { return refuse("") };
    if scalar.quoted {
        let numeric = scalar.text.trim().parse::<f64>().is_ok();
        return refuse(if numeric { "; remove the quotes" } else { "" });
    }
    let text = scalar.text.as_str();
    if text.bytes().all(|b| b.is_ascii_digit()) && !text.is_empty() {
        return match text.parse::<u64>() {
            Ok(value) if range.contains(&value) => Ok(value),
            _ => refuse(""),
        };
    }
    let digits: String = text.chars().filter(|&c| c != '_' && c != ',').collect();
    if digits.len() < text.len() && digits.bytes().all(|b| b.is_ascii_digit()) && !digits.is_empty() {
        return refuse(&format!("; write {}", clip(&digits)));
    }
    match text.parse::<f64>() {
        Ok(value) if value.fract() == 0.0 && (1.0..1e15).contains(&value) => {
            refuse(&format!("; write {value:.0}"))
        }
        _ => refuse(""),
    }
}

/// A finite number within `range`.
pub(super) fn real(node: &Node, range: &RangeInclusive<f64>) -> Result<f64, String> {
    let expected = match (*range.start(), *range.end()) {
        (low, high) if low == f64::MIN && high == f64::MAX => "expected a finite number".to_string(),
        (low, high) if low == f64::MIN_POSITIVE && high == f64::MAX => {
            "expected a finite number above 0".to_string()
        }
        (low, high) if low == f64::MIN_POSITIVE => format!("expected a number above 0, up to {high}"),
        (low, high) if high == f64::MAX => format!("expected a finite number from {low}"),
        (low, high) => format!("expected a number from {low} to {high}"),
    };
    let refuse = |cure: &str| Err(format!("{expected}, got {}{cure}", node.describe()));
    let Some(scalar) = node.scalar() else { return refuse("") };
    let text = scalar.text.as_str();
    // Rust reads `inf`, `nan` and `infinity` as numbers; YAML reads `.inf` and `.nan`. A spec takes neither.
    let numeric = text.bytes().all(|b| b.is_ascii_digit() || b"+-.eE".contains(&b));
    match text.parse::<f64>() {
        Ok(_) if numeric && scalar.quoted => refuse("; remove the quotes"),
        Ok(value) if numeric && value.is_finite() && range.contains(&value) => Ok(value),
        _ => refuse(""),
    }
}

/// `true` or `false`.
pub(super) fn flag(node: &Node) -> Result<bool, String> {
    let refuse = |cure: &str| Err(format!("expected true or false, got {}{cure}", node.describe()));
    let Some(Scalar { text, quoted }) = node.scalar() else { return refuse("") };
    match (text.as_str(), quoted) {
        ("true", false) => Ok(true),
        ("false", false) => Ok(false),
        ("true" | "false", true) => refuse("; remove the quotes"),
        ("yes" | "on" | "y" | "True" | "TRUE" | "1", _) => refuse("; write true"),
        ("no" | "off" | "n" | "False" | "FALSE" | "0", _) => refuse("; write false"),
        _ => refuse(""),
    }
}

/// Text of one line, not empty, at most 4096 bytes.
pub(super) fn text(node: &Node) -> Result<&str, String> {
    let refuse = |why: &str| Err(format!("expected {why}, got {}", node.describe()));
    match node.scalar() {
        None => refuse("text"),
        Some(scalar) if scalar.text.is_empty() => refuse("text that is not empty"),
        Some(scalar) if scalar.text.len() > 4096 => refuse("at most 4096 bytes of text"),
        Some(scalar) if scalar.text.chars().any(char::is_control) => refuse("text on one line"),
        Some(scalar) => Ok(&scalar.text),
    }
}

#[cfg(test)]
mod tests {
    use super::super::node::{Place, Value};
    use super::*;

    fn plain(text: &str) -> Node {
        Node::new(Place::default(), Value::Scalar(Scalar { text: text.into(), quoted: false }))
    }

    fn quoted(text: &str) -> Node {
        Node::new(Place::default(), Value::Scalar(Scalar { text: text.into(), quoted: true }))
    }

    #[test]
    fn numbers_are_digits_in_range() {
        let check = |node: Node, expected: &str| {
            let got = whole(&node, &(1..=4096)).map_or_else(|why| why, |n| n.to_string());
            assert_eq!(
                got.strip_prefix("expected a whole number from 1 to 4096, ").unwrap_or(&got),
                expected
            );
        };
        check(plain("16"), "16");
        check(plain("0016"), "16");
        check(plain("0"), "got 0");
        check(plain("4097"), "got 4097");
        check(plain("-1"), "got -1");
        check(plain("18446744073709551616"), "got 18446744073709551616");
        check(plain("1e3"), "got 1e3; write 1000");
        check(plain("16.0"), "got 16.0; write 16");
        check(plain("16.5"), "got 16.5");
        check(plain("4_096"), "got 4_096; write 4096");
        check(plain(".nan"), "got .nan");
        check(plain("nan"), "got nan");
        check(plain("0x10"), "got 0x10");
        check(plain("true"), "got true");
        check(quoted("16"), "got the text \"16\"; remove the quotes");
        check(quoted("many"), "got the text \"many\"");
        check(quoted(""), "got the text \"\"");
        check(Node::new(Place::default(), Value::Null), "got nothing");
        check(Node::new(Place::default(), Value::List(vec![])), "got a list of 0");
        check(Node::new(Place::default(), Value::Map(vec![])), "got a map");
    }

    #[test]
    fn reals_are_finite() {
        for text in [".nan", "nan", "inf", "-.inf", "infinity", "1e999", "0x1p3", "", "1 2"] {
            assert!(real(&plain(text), &(f64::MIN..=f64::MAX)).is_err(), "{text}");
        }
        assert_eq!(real(&plain("-2.5e-3"), &(f64::MIN..=f64::MAX)), Ok(-0.0025));
        assert_eq!(
            real(&plain("0"), &(f64::MIN_POSITIVE..=f64::MAX)).unwrap_err(),
            "expected a finite number above 0, got 0"
        );
        assert_eq!(real(&plain("2"), &(0.0..=1.0)).unwrap_err(), "expected a number from 0 to 1, got 2");
    }

    #[test]
    fn booleans_are_two_words() {
        assert_eq!(flag(&plain("false")), Ok(false));
        assert_eq!(flag(&plain("yes")).unwrap_err(), "expected true or false, got yes; write true");
        assert_eq!(
            flag(&quoted("false")).unwrap_err(),
            "expected true or false, got the text \"false\"; remove the quotes"
        );
    }

    #[test]
    fn text_is_one_line() {
        assert_eq!(text(&quoted("a b")), Ok("a b"));
        assert_eq!(text(&quoted("a\nb")).unwrap_err(), "expected text on one line, got the text \"a\\nb\"");
        assert!(text(&quoted("")).is_err());
    }
}
