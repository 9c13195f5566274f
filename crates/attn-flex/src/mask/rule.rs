//! What decides about the keys of a block that is seen in part.

use std::ops::{Deref, Range};
use std::sync::Arc;

use mstar_kernels::flex::{MaskMod, TileRow, UserMask};
use mstar_kernels::mutant::planted;
use mstar_kernels::{Error, Result};

use super::{MaskShape, refuse};

/// Rules that may hold together.
pub const MOST_RULES: usize = 8;

/// Which keys of a partial block a query at position `p = q_idx + q_offset` sees. Full blocks are not asked about.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum MaskRule {
    /// All: a mask of this rule has no partial blocks.
    #[default]
    Whole,
    /// Keys `k <= p`.
    Causal,
    /// Keys `p - left <= k <= p + right`.
    SlidingWindow {
        /// Keys before its own position that a query sees.
        left: usize,
        /// Keys after it.
        right: usize,
    },
    /// Keys of the query's own document.
    Document {
        /// `[L]`: each query's.
        q_ids: Arc<[i32]>,
        /// `[M]`: each key's.
        kv_ids: Arc<[i32]>,
    },
    /// The caller's own.
    User(UserMask),
    /// All of several: a key is seen when each lets it be. [`MaskRule::all`] makes it.
    All(Rules),
}

/// Two to [`MOST_RULES`] rules that hold together, none of which is itself several or [`MaskRule::Whole`].
#[derive(Clone, Debug)]
pub struct Rules(Arc<[MaskRule]>);

impl Deref for Rules {
    type Target = [MaskRule];

    fn deref(&self) -> &[MaskRule] {
        &self.0
    }
}

/// Rules as kernels take them, in a list that allocates nothing.
#[derive(Clone, Copy, Debug)]
pub struct MaskMods<'a> {
    mods: [MaskMod<'a>; MOST_RULES],
    len: usize,
}

impl<'a> Deref for MaskMods<'a> {
    type Target = [MaskMod<'a>];

    fn deref(&self) -> &[MaskMod<'a>] {
        &self.mods[..self.len]
    }
}

/// How a whole block stands to a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    Nothing,
    Part,
    Whole,
}

impl MaskRule {
    /// The rule that lets a key be seen when each of `rules` does; [`MaskRule::Whole`] when there is none.
    ///
    /// # Errors
    /// More than [`MOST_RULES`], those within rules of rules counted.
    pub fn all(rules: impl IntoIterator<Item = MaskRule>) -> Result<MaskRule> {
        let mut flat = Vec::new();
        for rule in rules {
            match rule {
                MaskRule::Whole => {}
                MaskRule::All(rules) => flat.extend_from_slice(&rules),
                one => flat.push(one),
            }
        }
        if flat.len() > MOST_RULES {
            return refuse("rules", format!("at most {MOST_RULES} hold together"), flat.len());
        }
        Ok(match flat.len() {
            0 => MaskRule::Whole,
            1 => flat.swap_remove(0),
            _ => MaskRule::All(Rules(flat.into())),
        })
    }

    /// The rules that it is made of; none when it lets all keys be seen.
    pub(crate) fn each(&self) -> &[MaskRule] {
        match self {
            MaskRule::Whole => &[],
            MaskRule::All(rules) => rules,
            one => std::slice::from_ref(one),
        }
    }

    /// As kernels take it.
    pub(crate) fn mask_mods(&self) -> MaskMods<'_> {
        let rules = self.each();
        let mut mods = [MaskMod::None; MOST_RULES];
        let rules = if planted("mask-first-rule-alone") { &rules[..rules.len().min(1)] } else { rules };
        for (to, rule) in mods.iter_mut().zip(rules) {
            *to = match rule {
                MaskRule::Whole | MaskRule::All(_) => MaskMod::None, // never one of several
                MaskRule::Causal => MaskMod::Causal,
                MaskRule::SlidingWindow { left, right } => {
                    MaskMod::SlidingWindow { left: *left, right: *right }
                }
                MaskRule::Document { q_ids, kv_ids } => MaskMod::Document { q_ids, kv_ids },
                MaskRule::User(user) => MaskMod::User(user),
            };
        }
        MaskMods { mods, len: rules.len() }
    }

    /// Refuses document ids of other lengths than a shape says.
    pub(super) fn fits(&self, shape: &MaskShape) -> Result<()> {
        for rule in self.each() {
            let MaskRule::Document { q_ids, kv_ids } = rule else { continue };
            for (tensor, got, letter, expected) in
                [("q_ids", q_ids.len(), "L", shape.q_len), ("kv_ids", kv_ids.len(), "M", shape.kv_len)]
            {
                if got != expected {
                    let expected = format!("[{letter}] = [{expected}]");
                    return Err(Error::Shape { tensor, expected, got: vec![got] });
                }
            }
        }
        Ok(())
    }

    /// How a block stands to the rule: `queries` and `keys` are not empty. A user's rule is asked about every pair, and so
    /// are several rules of which none decides alone.
    pub(super) fn over(
        &self,
        [batch, head]: [usize; 2],
        queries: Range<usize>,
        q_offset: i64,
        keys: Range<usize>,
    ) -> Seen {
        let window = |left: i128, right: i128| {
            let at = |q_idx: usize| q_idx as i128 + i128::from(q_offset);
            let (first, last) = (at(queries.start), at(queries.end - 1));
            let (low, high) = (keys.start as i128, keys.end as i128 - 1);
            if high < first - left || low > last + right {
                Seen::Nothing
            } else if low >= last - left && high <= first + right {
                Seen::Whole
            } else {
                Seen::Part
            }
        };
        match self {
            MaskRule::Whole => Seen::Whole,
            // Above any key: what comes before is never cut.
            MaskRule::Causal => window(i128::MAX / 2, 0),
            MaskRule::SlidingWindow { left, right } => window(*left as i128, *right as i128),
            MaskRule::Document { q_ids, kv_ids } => {
                let (queries, keys) = (&q_ids[queries], &kv_ids[keys]);
                let one = |ids: &[i32]| ids.iter().all(|&id| id == ids[0]);
                match (one(queries) && one(keys), queries.iter().any(|id| keys.contains(id))) {
                    (_, false) => Seen::Nothing,
                    (true, true) => Seen::Whole,
                    (false, true) => Seen::Part,
                }
            }
            // Nobody here can ask it.
            MaskRule::User(user) if user.cpu.is_none() => Seen::Part,
            MaskRule::User(_) => self.pairs([batch, head], queries, q_offset, keys),
            MaskRule::All(rules) => {
                let stand =
                    |rule: &MaskRule| rule.over([batch, head], queries.clone(), q_offset, keys.clone());
                let (mut parts, mut nothing) = (0, false);
                let asked = |rule: &MaskRule| !matches!(rule, MaskRule::User(user) if user.cpu.is_none());
                for rule in rules.iter() {
                    match stand(rule) {
                        Seen::Nothing => nothing = true,
                        Seen::Part => parts += 1,
                        Seen::Whole => {}
                    }
                }
                match (nothing, parts) {
                    (true, _) => Seen::Nothing,
                    (_, 0) => Seen::Whole,
                    (_, 1) => Seen::Part,
                    _ if !rules.iter().all(asked) => Seen::Part,
                    _ => self.pairs([batch, head], queries, q_offset, keys),
                }
            }
        }
    }

    fn pairs(
        &self,
        [batch, head]: [usize; 2],
        queries: Range<usize>,
        q_offset: i64,
        keys: Range<usize>,
    ) -> Seen {
        let (mut any, mut all) = (false, true);
        for q_idx in queries {
            for k_idx in keys.clone() {
                let seen = self.sees(batch, head, q_idx, q_offset, k_idx);
                (any, all) = (any || seen, all && seen);
                if any && !all {
                    return Seen::Part;
                }
            }
        }
        if all { Seen::Whole } else { Seen::Nothing }
    }

    /// Whether the query `q_idx` sees the key `k_idx`. A user's rule without a CPU half sees nothing: no run takes it.
    pub(crate) fn sees(&self, batch: usize, head: usize, q_idx: usize, q_offset: i64, k_idx: usize) -> bool {
        let (p, k) = (q_idx as i128 + i128::from(q_offset), k_idx as i128);
        match self {
            MaskRule::Whole => true,
            MaskRule::Causal => k <= p,
            MaskRule::SlidingWindow { left, right } => k >= p - *left as i128 && k <= p + *right as i128,
            MaskRule::Document { q_ids, kv_ids } => q_ids.get(q_idx) == kv_ids.get(k_idx),
            MaskRule::User(user) => {
                let mut seen = [true];
                let row = TileRow { batch, head, q_idx, q_offset, k_idx: &[k_idx as i32] };
                user.cpu.as_ref().is_some_and(|cpu| {
                    cpu(&mut seen, &row);
                    seen[0]
                })
            }
            MaskRule::All(rules) => rules.iter().all(|rule| rule.sees(batch, head, q_idx, q_offset, k_idx)),
        }
    }
}
