//! Plain text for a terminal of 80 columns, and quantities as people read them.

use std::fmt::Display;
use std::io::{self, Write};

/// Columns that no line of output passes.
pub(crate) const COLUMNS: usize = 80;

/// Bytes with a binary unit: `512 B`, `1.5 KiB`, `23.4 GiB`.
pub(crate) fn bytes(n: u128) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if n < 1024 {
        return format!("{n} B");
    }
    let mut value = n as f64 / 1024.0;
    let mut unit = 0;
    // 1023.95 would print as 1024.0: the next unit says it better.
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// A whole number with a space between thousands: `16 384`.
pub(crate) fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(' ');
        }
        out.push(digit);
    }
    out
}

/// `text` wrapped at spaces to lines of at most [`COLUMNS`]; the first begins with `head`, the others with as many
/// spaces. A word longer than a line is cut.
pub(crate) fn wrap(head: &str, text: &str) -> String {
    let indent = head.chars().count().min(COLUMNS / 2);
    let width = COLUMNS - indent;
    let mut lines: Vec<String> = vec![String::new()];
    for word in text.split(' ') {
        let mut word: Vec<char> = word.chars().collect();
        let used = lines.last().map_or(0, |line| line.chars().count());
        if used > 0 && used + 1 + word.len() > width {
            lines.push(String::new());
        } else if used > 0 {
            lines.last_mut().expect("never empty").push(' ');
        }
        loop {
            let used = lines.last().map_or(0, |line| line.chars().count());
            let rest = word.split_off(word.len().min(width - used));
            lines.last_mut().expect("never empty").extend(word);
            if rest.is_empty() {
                break;
            }
            word = rest;
            lines.push(String::new());
        }
    }
    let mut out = String::new();
    for (index, line) in lines.iter().enumerate() {
        let start = if index == 0 { head.to_string() } else { " ".repeat(indent) };
        out.push_str(format!("{start}{line}").trim_end());
        out.push('\n');
    }
    out
}

/// Writes to stdout; a reader that went away (`| head`) is no error.
///
/// # Errors
/// Any other failure, such as a full disk behind a redirection.
pub(crate) fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// Says one line on stderr, after the program's name. A stderr that takes nothing is no reason to stop: the exit code
/// still tells how the command ended.
pub(crate) fn say(line: impl Display) {
    // One write, so that lines of several processes do not mix.
    let _ = io::stderr().write_all(format!("mstar: {line}\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_read_well() {
        assert_eq!((bytes(0), bytes(1023)), ("0 B".into(), "1023 B".into()));
        assert_eq!((bytes(1024), bytes(1536)), ("1.0 KiB".into(), "1.5 KiB".into()));
        assert_eq!((bytes((1 << 20) - 1), bytes(5 << 30)), ("1.0 MiB".into(), "5.0 GiB".into()));
        assert_eq!(bytes(u128::MAX).split(' ').nth(1), Some("EiB"));
        assert_eq!((count(0), count(999), count(16_384)), ("0".into(), "999".into(), "16 384".into()));
    }

    #[test]
    fn lines_are_wrapped_to_the_width() {
        let text = wrap("  cuda     ", &"word ".repeat(40));
        assert!(text.lines().all(|line| line.chars().count() <= COLUMNS), "{text}");
        assert!(text.lines().skip(1).all(|line| line.starts_with("           word")), "{text}");
        let long = wrap("x ", &"y".repeat(200));
        assert!(long.lines().all(|line| line.chars().count() <= COLUMNS), "{long}");
        assert_eq!(long.matches('y').count(), 200);
    }
}
