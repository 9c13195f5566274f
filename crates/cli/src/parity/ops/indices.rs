//! Index arrays of a case, checked before any kernel is trusted with them.

use anyhow::{Result, bail};

/// An indptr starts at 0, never falls, and ends at `total`.
pub(super) fn indptr(name: &str, values: &[i32], total: usize, of: &str) -> Result<()> {
    match values.first() {
        Some(0) => {}
        Some(first) => bail!("{name}[0] = {first}: an indptr starts at 0"),
        None => bail!("{name} is empty: an indptr starts with a 0"),
    }
    if let Some(i) = (1..values.len()).find(|&i| values[i] < values[i - 1]) {
        bail!("{name}[{i}] = {}: below its predecessor {}", values[i], values[i - 1]);
    }
    let last = values[values.len() - 1];
    if last as usize != total {
        bail!("{name}[{}] = {last}: must end at {total}, {of}", values.len() - 1);
    }
    Ok(())
}

/// Every value is in `low..high`.
pub(super) fn within(name: &str, values: &[i32], low: i64, high: i64) -> Result<()> {
    match values.iter().position(|&v| i64::from(v) < low || i64::from(v) >= high) {
        Some(i) => bail!("{name}[{i}] = {}: must be in {low}..{high}", values[i]),
        None => Ok(()),
    }
}
