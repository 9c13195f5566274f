//! Rows that are asked for by name.

use anyhow::bail;

use super::cases::Case;

/// Keeps the cases that one of `wanted` names, with their neighbours or without.
///
/// # Errors
/// A name that is none of theirs.
pub(super) fn keep(cases: &mut Vec<Case>, wanted: &[String], neighbours: bool) -> anyhow::Result<()> {
    let names: Vec<String> = cases.iter().map(Case::name).collect();
    let is_neighbour =
        |at: usize| cases[at].beside.as_ref().is_some_and(|beside: &super::cases::Beside| beside.neighbour);
    let mut kept = vec![false; cases.len()];
    for text in wanted {
        let mut found: Vec<usize> = (0..names.len()).filter(|&at| plain(&names[at]) == plain(text)).collect();
        if found.is_empty() {
            found = (0..names.len()).filter(|&at| !is_neighbour(at) && has(&names[at], text)).collect();
        }
        if found.is_empty() {
            bail!("--rows {text}: no row is called so; rows have names such as {}", names[0]);
        }
        found.into_iter().for_each(|at| kept[at] = true);
    }
    if neighbours {
        let of = |at: usize| cases[at].beside.as_ref().filter(|beside| beside.neighbour);
        let near: Vec<usize> = (0..cases.len())
            .filter(|&at| of(at).is_some_and(|near| (0..at).any(|i| kept[i] && names[i] == near.of)))
            .collect();
        near.into_iter().for_each(|at| kept[at] = true);
    }
    let mut kept = kept.into_iter();
    cases.retain(|_| kept.next().unwrap_or_default());
    Ok(())
}

fn plain(text: &str) -> String {
    text.chars().filter(|c| !c.is_whitespace()).collect()
}

/// Whether `text` stands in `name`, its numbers whole.
fn has(name: &str, text: &str) -> bool {
    let (name, text) = (plain(name), plain(text));
    let digit = |c: Option<char>| c.is_some_and(|c| c.is_ascii_digit());
    !text.is_empty()
        && name.match_indices(&text).any(|(at, _)| {
            let (before, after) = (&name[..at], &name[at + text.len()..]);
            !(digit(before.chars().last()) && digit(text.chars().next())
                || digit(after.chars().next()) && digit(text.chars().last()))
        })
}

#[cfg(test)]
mod tests {
    use mstar_kernels::DType;

    use super::super::cases::Beside;
    use super::super::report::Cost;
    use super::*;

    fn kept(wanted: &[&str], neighbours: bool) -> anyhow::Result<Vec<String>> {
        let near = |of: &str| Some(Beside { of: format!("decode {of}"), least: 0.9, neighbour: true });
        let cases = [
            ("1 x 8192, 32/8", None),
            ("3 x 8192, 32/8", near("1 x 8192, 32/8")),
            ("11 x 8192, 32/8", None),
            ("11 x 8192, 32/8, p1", None),
            ("11 x 81920, 64/8", None),
        ];
        let mut cases: Vec<Case> = cases
            .into_iter()
            .map(|(shape, beside)| Case {
                kernel: "decode",
                shape: shape.into(),
                dtype: DType::Bf16,
                cost: Cost::default(),
                beside,
                make: Box::new(|_| bail!("never made")),
            })
            .collect();
        let wanted: Vec<String> = wanted.iter().map(|text| (*text).into()).collect();
        keep(&mut cases, &wanted, neighbours)?;
        Ok(cases.into_iter().map(|case| case.shape).collect())
    }

    #[test]
    fn numbers_are_whole_and_a_whole_name_is_that_row_alone() {
        assert_eq!(kept(&["1x8192"], false).unwrap(), ["1 x 8192, 32/8"]);
        assert_eq!(kept(&["11x8192"], false).unwrap(), ["11 x 8192, 32/8", "11 x 8192, 32/8, p1"]);
        assert_eq!(kept(&["decode 11 x 8192,32/8"], false).unwrap(), ["11 x 8192, 32/8"]);
        assert_eq!(kept(&["p1", "64/8"], false).unwrap(), ["11 x 8192, 32/8, p1", "11 x 81920, 64/8"]);
    }

    #[test]
    fn neighbours_come_when_they_are_asked_for() {
        assert_eq!(kept(&["1x8192"], true).unwrap(), ["1 x 8192, 32/8", "3 x 8192, 32/8"]);
        assert_eq!(
            kept(&["3x8192,32/8"], false).unwrap_err().to_string().split(':').next(),
            Some("--rows 3x8192,32/8")
        );
        assert_eq!(kept(&["decode 3x8192,32/8"], false).unwrap(), ["3 x 8192, 32/8"]);
    }
}
