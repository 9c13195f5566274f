//! The mods of a resource, owned: what its options name out of what the model has, and the caller's own.

use std::sync::Arc;

use mstar_core::attend::{BuildContext, Softmax};
use mstar_core::{Error, Result};
use mstar_kernels::mutant::planted;

use super::{FlexOptions, MaskChoice, ScoreChoice};
use crate::mask::RingRule;
use crate::{MaskRule, ScoreMod, UserMod};

/// Score mods that one resource applies at most.
pub(super) const MOST_SCORES: usize = 8;

/// A score mod, owned.
#[derive(Clone, Debug)]
pub(super) enum Score {
    Causal,
    Alibi(Arc<[f32]>),
    /// `[H, 2 W + 1]`.
    RelBias(Arc<[f32]>, usize),
    SoftCap(f32),
    User(UserMod),
}

impl Score {
    fn score_mod(&self) -> ScoreMod<'_> {
        match self {
            Score::Causal => ScoreMod::Causal,
            Score::Alibi(slopes) => ScoreMod::Alibi { slopes },
            Score::RelBias(table, window) => ScoreMod::RelBias { table, window: *window },
            Score::SoftCap(cap) => ScoreMod::SoftCap(*cap),
            Score::User(user) => ScoreMod::User(user),
        }
    }

    /// Whether it asks which key it is given.
    pub(super) fn asks(&self) -> bool {
        !matches!(self, Score::SoftCap(_))
    }
}

/// The score mods of a resource, in their order.
#[derive(Clone, Debug, Default)]
pub(super) struct Scores(Vec<Score>);

impl Scores {
    /// Those that the options name. The model's soft cap and slopes are applied when they are named, and refused when not.
    pub(super) fn new(cx: &BuildContext, softmax: &Softmax, options: &FlexOptions) -> Result<Scores> {
        let choices = &options.score_mods;
        if softmax.sinks.is_some() {
            return Err(cx.refuse("sinks", "block-mask attention has no sinks; leave them out", &"sinks"));
        }
        if softmax.logits_soft_cap.is_some() && !choices.contains(&ScoreChoice::SoftCap) {
            return Err(cx.refuse("score_mod", "the model has a logits_soft_cap; say soft_cap", choices));
        }
        if softmax.alibi_slopes.is_some() && !choices.contains(&ScoreChoice::Alibi) {
            return Err(cx.refuse("score_mod", "the model has ALiBi; say alibi", choices));
        }
        let heads = cx.geometry.num_qo_heads;
        let mut scores = Scores::default();
        for choice in choices {
            let score = match choice {
                ScoreChoice::None => continue,
                ScoreChoice::Causal => Score::Causal,
                ScoreChoice::Alibi => match &softmax.alibi_slopes {
                    Some(slopes) if slopes.len() == heads => Score::Alibi(Arc::clone(slopes)),
                    other => {
                        let why = "alibi needs the model's slopes, one a query head";
                        return Err(cx.refuse("score_mod", why, other));
                    }
                },
                ScoreChoice::RelBias => match &options.rel_bias {
                    Some(bias) if bias.len() % 2 == 1 && bias.iter().all(|bias| bias.is_finite()) => {
                        let table = (0..heads).flat_map(|_| bias.iter().copied()).collect();
                        Score::RelBias(table, bias.len() / 2)
                    }
                    other => {
                        let why =
                            "rel_bias needs an odd number of finite biases, the middle one of distance 0";
                        return Err(cx.refuse("rel_bias", why, other));
                    }
                },
                ScoreChoice::SoftCap => match softmax.logits_soft_cap {
                    Some(cap) if cap.is_finite() && cap > 0.0 => Score::SoftCap(cap),
                    other => {
                        let why = "soft_cap needs the model's logits_soft_cap, above 0";
                        return Err(cx.refuse("score_mod", why, &other));
                    }
                },
            };
            scores = scores.and(score).map_err(|error| Error::backend(cx.name.as_str(), error))?;
        }
        Ok(scores)
    }

    /// With one more behind them.
    pub(super) fn and(mut self, score: Score) -> mstar_kernels::Result<Scores> {
        if self.0.len() == MOST_SCORES {
            let why = format!("at most {MOST_SCORES} score mods are applied one after another");
            let got = (MOST_SCORES + 1).to_string();
            return Err(mstar_kernels::Error::Parameter { name: "score_mod", why, got });
        }
        self.0.push(score);
        Ok(self)
    }

    /// Whether any of them asks which key it is given.
    pub(super) fn ask(&self) -> bool {
        self.0.iter().any(Score::asks)
    }

    /// Calls with them as kernels take them, without allocating.
    pub(super) fn with<R>(&self, take: impl FnOnce(&[ScoreMod<'_>]) -> R) -> R {
        let mut mods = [ScoreMod::None; MOST_SCORES];
        for (to, score) in mods.iter_mut().zip(&self.0) {
            *to = score.score_mod();
        }
        if planted("flex-scores-reversed") {
            mods[..self.0.len()].reverse();
        }
        take(&mods[..self.0.len()])
    }
}

/// What the options' mask mods let a pass see. The model's window is one of them when it is named, and refused when not.
pub(super) fn rule(cx: &BuildContext, softmax: &Softmax, options: &FlexOptions) -> Result<RingRule> {
    let choices = &options.mask_mods;
    if softmax.window_left.is_some() && !choices.contains(&MaskChoice::Window) {
        return Err(cx.refuse("mask_mod", "the model has a window_left; say window", choices));
    }
    let (mut rules, mut document) = (Vec::new(), None);
    for choice in choices {
        match (choice, softmax.window_left) {
            (MaskChoice::None, _) => {}
            (MaskChoice::Causal, _) => rules.push(MaskRule::Causal),
            (MaskChoice::Window, Some(left)) => rules.push(MaskRule::SlidingWindow { left, right: 0 }),
            (MaskChoice::Window, None) => {
                return Err(cx.refuse("mask_mod", "window needs the model's window_left", &"nothing"));
            }
            (MaskChoice::Document, _) => match options.document_frames {
                Some(frames) if frames > 0 => document = Some(frames),
                other => {
                    let why = "document needs to know how many frames a document has, at least 1";
                    return Err(cx.refuse("document_frames", why, &other));
                }
            },
        }
    }
    let rule = MaskRule::all(rules).map_err(|error| Error::backend(cx.name.as_str(), error))?;
    Ok(RingRule { rule, document })
}
