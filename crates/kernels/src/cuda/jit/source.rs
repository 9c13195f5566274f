//! The kernels' texts, embedded, and what each includes of ours.

use std::fmt;
use std::hash::{Hash, Hasher};

/// A `.cu` file: one kernel family, of which each variant is compiled by itself.
#[derive(Clone, Copy)]
pub struct Unit {
    name: &'static str,
    text: &'static str,
}

/// A file of `cu/`: its name and its text.
macro_rules! file {
    ($name:literal) => {
        ($name, include_str!(concat!("../cu/", $name)))
    };
}

macro_rules! unit {
    ($name:literal) => {
        Unit::of($name, include_str!(concat!("../cu/", $name)))
    };
}

/// Files that a unit may include, each listed once: name, text.
const HEADERS: &[(&str, &str)] = &[
    // From the bottom up.
    file!("ptx.cuh"),
    file!("codes.cuh"),
    file!("hopper.cuh"),
    file!("cluster.cuh"),
    file!("ring.cuh"),
    file!("element.cuh"),
    file!("list.cuh"),
    file!("gather.cuh"),
    file!("finish.cuh"),
    file!("node.cuh"),
    file!("tree.cuh"),
    file!("near.cuh"),
    file!("cap.cuh"),
    file!("mods.cuh"),
    file!("latent.cuh"),
    file!("latent_unit.cuh"),
    file!("latent_ring.cuh"),
    file!("latent_softmax.cuh"),
    file!("codes_ring.cuh"),
    file!("turned.cuh"),
    file!("latent_tasks.cuh"),
    file!("latent_leaves.cuh"),
    file!("latent_states.cuh"),
    file!("tile.cuh"),
    file!("tile_ring.cuh"),
    file!("task.cuh"),
    file!("decode_ring.cuh"),
    file!("few_ring.cuh"),
    file!("arrive.cuh"),
    file!("table.cuh"),
    file!("scores.cuh"),
    file!("sparse.cuh"),
    // For a host compiler alone.
    ("emulated.hpp", include_str!("../emulator/emulated.hpp")),
    ("emulated_hopper.hpp", include_str!("../emulator/emulated_hopper.hpp")),
    ("emulated_cluster.hpp", include_str!("../emulator/emulated_cluster.hpp")),
];

/// Whether a header is for a host compiler alone.
pub(super) fn is_emulated(name: &str) -> bool {
    name.ends_with(".hpp")
}

/// The name under which a unit includes its user's code.
pub(super) const SNIPPET: &str = "snippet.cuh";

impl Unit {
    /// Any list, dtype and width.
    pub const PLAIN: Unit = unit!("plain.cu");
    /// Partial states joined.
    pub const MERGE: Unit = unit!("merge.cu");

    /// Whole entries from place to place.
    pub const MOVE: Unit = unit!("move.cu");
    /// Tokens into a cache of e4m3.
    pub const STORE: Unit = unit!("store.cu");
    /// Partial results of attention joined.
    pub const JOIN: Unit = unit!("join.cu");
    /// Synthetic queries, keys and values.
    pub const SYNTH: Unit = unit!("synth.cu");

    /// Few query vectors over pages: up to 16 of them, and more.
    pub const DECODE_FEW: Unit = unit!("decode_few.cu");
    /// As before.
    pub const DECODE: Unit = unit!("decode.cu");
    /// Many query vectors over pages, segments or blocks.
    pub const TILE: Unit = unit!("tile.cu");
    /// The same on a Hopper, over pages or segments.
    pub const TILE_WIDE: Unit = unit!("tile_wide.cu");
    /// Over latents.
    pub const LATENT: Unit = unit!("latent.cu");
    /// Over latents, on a Hopper: few query vectors an item, and more.
    pub const LATENT_FEW: Unit = unit!("latent_few.cu");
    /// As before.
    pub const LATENT_WIDE: Unit = unit!("latent_wide.cu");

    /// Over latents in e4m3, on a Hopper.
    pub const LATENT_CODES: Unit = unit!("latent_codes.cu");
    /// The same, few query vectors an item.
    pub const LATENT_CODES_FEW: Unit = unit!("latent_codes_few.cu");

    /// Index scores.
    pub const SCORES: Unit = unit!("scores.cu");
    /// The same, on Hopper.
    pub const SCORES_WIDE: Unit = unit!("scores_wide.cu");
    /// The largest of each row's scores.
    pub const TOPK: Unit = unit!("topk.cu");
    /// The same on a Hopper, a row by a cluster.
    pub const TOPK_ROW: Unit = unit!("topk_row.cu");
    /// Index keys as e4m3.
    pub const QUANTISE: Unit = unit!("quantise.cu");
    /// Over picked latents.
    pub const SPARSE: Unit = unit!("sparse.cu");
    /// Around attention over picks.
    pub const PICKS: Unit = unit!("picks.cu");

    /// Every unit.
    pub const ALL: &[Unit] = &[
        Unit::PLAIN,
        Unit::MERGE,
        Unit::DECODE_FEW,
        Unit::DECODE,
        Unit::TILE,
        Unit::TILE_WIDE,
        Unit::LATENT,
        Unit::LATENT_FEW,
        Unit::LATENT_WIDE,
        Unit::LATENT_CODES,
        Unit::LATENT_CODES_FEW,
        Unit::SCORES,
        Unit::SCORES_WIDE,
        Unit::TOPK,
        Unit::TOPK_ROW,
        Unit::QUANTISE,
        Unit::SPARSE,
        Unit::PICKS,
        Unit::MOVE,
        Unit::STORE,
        Unit::JOIN,
        Unit::SYNTH,
    ];

    /// A unit of its own text. Units of one name are taken for the same one.
    pub const fn of(name: &'static str, text: &'static str) -> Unit {
        Unit { name, text }
    }

    /// The file's name.
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// The file's text.
    pub const fn text(&self) -> &'static str {
        self.text
    }

    /// Whether it uses instructions that only Hopper has, so that it compiles for no other card.
    pub fn needs_hopper(&self) -> bool {
        self.headers().iter().any(|&(name, _)| name == "hopper.cuh")
    }

    /// The headers of ours that it includes, directly or through another, by name; without the user's snippet.
    pub(super) fn headers(&self) -> Vec<(&'static str, &'static str)> {
        let mut found: Vec<(&str, &str)> = Vec::new();
        let mut unread = vec![self.text];
        while let Some(text) = unread.pop() {
            for name in included(text) {
                let Some(&header) = HEADERS.iter().find(|(known, _)| *known == name) else { continue };
                if !found.contains(&header) {
                    found.push(header);
                    unread.push(header.1);
                }
            }
        }
        found.sort_unstable();
        found
    }
}

impl PartialEq for Unit {
    fn eq(&self, other: &Unit) -> bool {
        self.name == other.name
    }
}

impl Eq for Unit {}

impl Hash for Unit {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

impl fmt::Debug for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// The names in a text's `#include "name"` lines, whatever `#if` they stand under.
fn included(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| {
        let rest = line.trim_start().strip_prefix('#')?.trim_start().strip_prefix("include")?;
        rest.trim_start().strip_prefix('"')?.split('"').next()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_have_names_of_their_own() {
        let mut names: Vec<&str> = Unit::ALL.iter().map(Unit::name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Unit::ALL.len());
    }

    #[test]
    fn every_header_of_ours_is_listed_and_no_other_is_named() {
        let units = Unit::ALL.iter().map(|unit| (unit.name(), unit.text()));
        for (name, text) in HEADERS.iter().copied().chain(units) {
            for inner in included(text) {
                let known = inner == SNIPPET || HEADERS.iter().any(|(listed, _)| *listed == inner);
                assert!(known, "{name} includes {inner:?}, which is not in HEADERS of source.rs");
            }
        }
    }

    /// Kernels that others may begin before they end, and that may begin early themselves: `launch_next` takes it for granted.
    #[test]
    fn every_kernel_waits_for_earlier_ones_before_anything_else() {
        let units = Unit::ALL.iter().map(|unit| (unit.name(), unit.text()));
        for (name, text) in HEADERS.iter().copied().chain(units).filter(|(name, _)| !is_emulated(name)) {
            let made = text.matches("__global__").count();
            assert_eq!(
                made,
                usize::from(name == "ptx.cuh"),
                "{name} has a kernel that MSTAR_KERNEL did not make"
            );
        }
        let (_, text) = HEADERS.iter().find(|(name, _)| *name == "ptx.cuh").unwrap();
        let rest = text.split("__global__").nth(1).unwrap();
        let first = rest.split_once('{').unwrap().1.trim_start_matches([' ', '\\', '\n']);
        assert!(first.starts_with("after_earlier();"), "what a kernel does first: {first:.40}");
        let word = text.split("void after_earlier()").nth(1).unwrap().split("\n}").next().unwrap();
        assert!(word.contains("griddepcontrol.wait;"), "{word}");
    }

    #[test]
    fn includes_are_read_in_every_spelling() {
        let text =
            "#include \"a.cuh\"\n  # include  \"b.cuh\" // why\n#include <cstdint>\n// #include \"c.cuh\"\n";
        assert_eq!(included(text).collect::<Vec<_>>(), ["a.cuh", "b.cuh"]);
    }
}
