//! The mods of a call over blocks as a device sees them: which there are, by number, and their numbers in the list's image.

use std::sync::Arc;

use crate::cuda::jit::Key;

use super::image::ModTable;

/// Score mods, and mask mods, that a call may have on a device.
const MOST: usize = 8;

/// Which mods a call has: what kernels are compiled for. `None`s are left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Kinds {
    scores: Vec<i64>,
    masks: Vec<i64>,
    /// Functions of the caller's, as `cu/mods.cuh` calls them.
    snippet: Option<Arc<str>>,
}

const SCORE: [&str; MOST] =
    ["SCORE_0", "SCORE_1", "SCORE_2", "SCORE_3", "SCORE_4", "SCORE_5", "SCORE_6", "SCORE_7"];
const MASK: [&str; MOST] = ["MASK_0", "MASK_1", "MASK_2", "MASK_3", "MASK_4", "MASK_5", "MASK_6", "MASK_7"];

impl Kinds {
    /// Whether some mod does more to scores than hide keys, as `cu/mods.cuh` numbers them.
    pub(crate) fn change_scores(&self) -> bool {
        self.scores.iter().any(|&kind| kind > 1)
    }

    /// A kernel's key with these mods.
    pub(crate) fn compile_into(&self, mut key: Key) -> Key {
        key = key.with("SCORES", self.scores.len() as i64).with("MASKS", self.masks.len() as i64);
        for (name, &kind) in SCORE.iter().zip(&self.scores) {
            key = key.with(name, kind);
        }
        for (name, &kind) in MASK.iter().zip(&self.masks) {
            key = key.with(name, kind);
        }
        match &self.snippet {
            Some(snippet) => key.with_snippet(snippet.clone()),
            None => key,
        }
    }
}

/// The mods of a call with their numbers, as they were staged with a list.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Staged {
    pub(crate) kinds: Kinds,
    /// One a mod, its arrays' places counted from the first word.
    pub(crate) tables: Vec<ModTable>,
    /// All floats and integers.
    pub(crate) words: Vec<u32>,
    /// Bodies of the user's functions.
    #[cfg(feature = "flex")]
    sources: Vec<std::borrow::Cow<'static, str>>,
}

impl Staged {
    /// Bytes that the numbers take in an image.
    pub(crate) fn bytes(&self) -> usize {
        size_of_val(&self.words[..])
    }

    /// The tables with places counted from the image's start, the words being at `at`.
    pub(crate) fn tables_at(&self, at: u32) -> impl Iterator<Item = ModTable> + '_ {
        let moved = move |table: &ModTable| ModTable {
            floats_at: table.floats_at + at,
            ints_at: table.ints_at + at,
            ..*table
        };
        self.tables.iter().map(moved)
    }
}

#[cfg(feature = "flex")]
mod blocks {
    use std::fmt::Write;

    use super::{Kinds, MOST, ModTable, Staged};
    use crate::flex::{CudaSnippet, MaskMod, ScoreMod};
    use crate::{Device, Error, Result};

    const OPERATION: &str = "block-mask attention";

    /// One mod of a call.
    #[derive(Default)]
    struct Mod<'a> {
        is_mask: bool,
        /// As `cu/mods.cuh` numbers them.
        kind: i64,
        floats: &'a [f32],
        ints: [&'a [i32]; 2],
        a: i32,
        b: i32,
        value: f32,
        /// Of a user's: its name, and what it is on a device.
        user: Option<(&'a str, Option<&'a CudaSnippet>)>,
    }

    /// A distance, as far as positions reach.
    fn clamp(distance: usize) -> i32 {
        distance.min(i32::MAX as usize) as i32
    }

    fn user<'a>(is_mask: bool, kind: i64, name: &'a str, cuda: Option<&'a CudaSnippet>) -> Mod<'a> {
        let (floats, ints) = cuda.map_or((&[][..], &[][..]), |cuda| (&cuda.floats, &cuda.ints));
        Mod { is_mask, kind, floats, ints: [ints, &[]], user: Some((name, cuda)), ..Mod::default() }
    }

    /// The mods that do something, in the order in which tables stand.
    fn each<'a>(scores: &'a [ScoreMod<'a>], masks: &'a [MaskMod<'a>]) -> impl Iterator<Item = Mod<'a>> {
        let scores = scores.iter().filter_map(|score| {
            Some(match score {
                ScoreMod::None => return None,
                ScoreMod::Causal => Mod { kind: 1, ..Mod::default() },
                ScoreMod::Alibi { slopes } => Mod { kind: 2, floats: slopes, ..Mod::default() },
                ScoreMod::RelBias { table, window } => {
                    Mod { kind: 3, floats: table, a: clamp(*window), ..Mod::default() }
                }
                ScoreMod::SoftCap(cap) => Mod { kind: 4, value: *cap, ..Mod::default() },
                ScoreMod::User(of) => user(false, 5, &of.name, of.cuda.as_ref()),
            })
        });
        let masks = masks.iter().filter_map(|mask| {
            let plain = Mod { is_mask: true, ..Mod::default() };
            Some(match mask {
                MaskMod::None => return None,
                MaskMod::Causal => Mod { kind: 1, ..plain },
                MaskMod::SlidingWindow { left, right } => {
                    Mod { kind: 2, a: clamp(*left), b: clamp(*right), ..plain }
                }
                MaskMod::Document { q_ids, kv_ids } => {
                    Mod { kind: 3, ints: [q_ids, kv_ids], a: q_ids.len() as i32, ..plain }
                }
                MaskMod::User(of) => user(true, 4, &of.name, of.cuda.as_ref()),
            })
        });
        scores.chain(masks)
    }

    impl Staged {
        /// Takes a call's mods, which the call's own check accepts.
        ///
        /// # Errors
        /// More mods than a kernel takes, or a user's without a snippet.
        pub(crate) fn of(device: Device, scores: &[ScoreMod<'_>], masks: &[MaskMod<'_>]) -> Result<Staged> {
            let mut staged = Staged::default();
            let mut functions = String::new();
            let unsupported = |why: String| Error::Unsupported { operation: OPERATION, device, why };
            for of in each(scores, masks) {
                let at = |words: &[u32]| size_of_val(words) as u32;
                let floats_at = at(&staged.words);
                staged.words.extend(of.floats.iter().map(|float| float.to_bits()));
                let ints_at = at(&staged.words);
                staged.words.extend(of.ints.iter().copied().flatten().map(|&int| int as u32));
                let table =
                    ModTable { floats_at, ints_at, a: of.a, b: of.b, value: of.value, reserved: [0; 3] };
                staged.tables.push(table);
                let kinds = if of.is_mask { &mut staged.kinds.masks } else { &mut staged.kinds.scores };
                if let Some((name, cuda)) = of.user {
                    let why =
                        || unsupported(format!("the mod {name:?} has no CUDA half; give it a CudaSnippet"));
                    let source = &cuda.ok_or_else(why)?.source;
                    let head = match of.is_mask {
                        true => format!("bool user_mask_{}(", kinds.len()),
                        false => format!("float user_score_{}(float score, ", kinds.len()),
                    };
                    let _infallible = write!(
                        functions,
                        "DEVICE {head}u32 batch, u32 head, i32 q_idx, i32 k_idx, i64 q_offset, const float* floats, \
                         const i32* ints) {{\n{source}\n}}\n"
                    );
                    staged.sources.push(source.clone());
                }
                kinds.push(of.kind);
            }
            let Kinds { scores, masks, snippet } = &mut staged.kinds;
            if scores.len() > MOST || masks.len() > MOST {
                return Err(unsupported(format!(
                    "kernels take {MOST} score mods and {MOST} mask mods; join some in one of the user's"
                )));
            }
            if !functions.is_empty() {
                *snippet = Some(functions.into());
            }
            Ok(staged)
        }

        /// Whether these are a call's mods, compared in full. Allocates nothing.
        pub(crate) fn are(&self, scores: &[ScoreMod<'_>], masks: &[MaskMod<'_>]) -> bool {
            let (mut words, mut tables) = (&self.words[..], self.tables.iter());
            let (mut score_kinds, mut mask_kinds) = (self.kinds.scores.iter(), self.kinds.masks.iter());
            let mut sources = self.sources.iter();
            let mut same = |of: Mod<'_>| {
                let kind = if of.is_mask { mask_kinds.next() } else { score_kinds.next() };
                let Some((table, kind)) = tables.next().zip(kind) else { return false };
                let ints = of.ints.iter().copied().flatten().map(|&int| int as u32);
                let mut numbers = of.floats.iter().map(|float| float.to_bits()).chain(ints);
                let len = of.floats.len() + of.ints[0].len() + of.ints[1].len();
                let Some((own, rest)) = words.split_at_checked(len) else { return false };
                words = rest;
                (table.a, table.b, table.value.to_bits(), *kind) == (of.a, of.b, of.value.to_bits(), of.kind)
                    && own.iter().all(|&own| numbers.next() == Some(own))
                    && match of.user {
                        Some((_, cuda)) => sources.next() == cuda.map(|cuda| &cuda.source),
                        None => true,
                    }
            };
            each(scores, masks).all(&mut same) && words.is_empty() && tables.next().is_none()
        }
    }
}
