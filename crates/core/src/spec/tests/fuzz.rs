//! Bytes and mutations that no one would write: refused or read, never a panic.

use super::*;
use proptest::prelude::*;

/// What a mutation splices in: pieces that readers stumble over.
const PIECES: &[&str] = &[
    "",
    "0",
    "-1",
    "1e309",
    ".nan",
    "~",
    "[",
    "]",
    "{",
    "}",
    ": ",
    "\n",
    "\t",
    "&a ",
    "*a",
    "<<: ",
    "!!int ",
    "---\n",
    "\"",
    "'",
    "|\n",
    "# ",
    "? ",
    "18446744073709551616",
    "kind: kv",
    "\u{feff}",
    "\u{202e}",
    "\0",
    "[[[[[[[[[[[[[[[[[[[[",
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = Spec::from_yaml(&bytes, &[], "s.yaml");
    }

    #[test]
    fn mutations_of_a_good_spec_never_panic_and_say_lines(
        edits in proptest::collection::vec((any::<prop::sample::Index>(), 0usize..12, any::<prop::sample::Index>()), 1..6),
    ) {
        let mut bytes = GOOD.as_bytes().to_vec();
        for (at, cut, piece) in edits {
            let at = at.index(bytes.len());
            let end = (at + cut).min(bytes.len());
            bytes.splice(at..end, PIECES[piece.index(PIECES.len())].bytes());
        }
        if let Err(errors) = Spec::from_yaml(&bytes, &[], "s.yaml") {
            let said = errors.to_string();
            prop_assert!(!said.is_empty() && said.lines().count() <= 11);
            prop_assert!(said.lines().all(|line| line.starts_with("s.yaml") && line.len() < 700), "{said}");
            prop_assert!(!said.chars().any(|c| c.is_control() && c != '\n'), "{said:?}");
        }
    }

    #[test]
    fn overrides_never_panic(set in "[a-z.=\\[\\]{}\"' ]{0,40}") {
        let _ = Spec::from_yaml(GOOD.as_bytes(), &[set], "s.yaml");
    }
}
