//! Batched attention over blocks that are written or not, with a score mod (FlexAttention, arXiv:2412.05496).

use super::{Attended, Real, arrays, dot, softmax};
use crate::{Error, Result};

/// What happens to the scaled score `s` of query index `i` and key index `j`. `d = j - (i + q_offset)`.
#[derive(Clone, Copy, Debug)]
pub enum ScoreMod<'a> {
    /// Nothing.
    None,
    /// Keys with `d > 0` are dropped.
    Causal,
    /// `s + slopes[h] * d`.
    Alibi {
        /// `[H]`.
        slopes: &'a [f64],
    },
    /// `s + table[h, clamp(d, -W, W) + W]`.
    RelBias {
        /// `[H, 2 W + 1]`.
        table: &'a [f32],
        /// `W`.
        window: usize,
    },
    /// `c * tanh(s / c)`.
    SoftCap(
        /// `c`, above 0.
        f64,
    ),
    /// Several, one after another.
    Chain(
        /// In their order.
        &'a [ScoreMod<'a>],
    ),
}

/// Everything that [`flex`] reads. `B` batches, `L` queries, `M` keys.
#[derive(Clone, Copy, Debug)]
pub struct Flex<'a, Q, E> {
    /// `[B, H, L, D]`.
    pub q: &'a [Q],
    /// `[B, G, M, D]`.
    pub k: &'a [E],
    /// `[B, G, M, Dv]`.
    pub v: &'a [E],
    /// `[M]`: not 0 where a key is written. A whole number of blocks is, or is not.
    pub written: &'a [u8],
    /// `B`.
    pub batch: usize,
    /// `H`.
    pub num_qo_heads: usize,
    /// `G`, a divisor of `H`.
    pub num_kv_heads: usize,
    /// `D`.
    pub head_dim_qk: usize,
    /// `Dv`.
    pub head_dim_vo: usize,
    /// Keys a block; the last may be shorter.
    pub block_size: usize,
    /// Factor on `q.k`.
    pub sm_scale: f64,
    /// Position of query 0 among the keys.
    pub q_offset: i64,
    /// The score mod.
    pub score_mod: ScoreMod<'a>,
}

/// `o` `[B, H, L, Dv]` and `lse` `[B, H, L]`: every query sees every written key, less what the mod drops.
///
/// # Errors
/// An array of another length than the shapes say, a block written in part, heads that do not divide.
pub fn flex<Q: Real, E: Real>(p: &Flex<'_, Q, E>) -> Result<Attended> {
    let (b, h_q, g, d, dv) = (p.batch, p.num_qo_heads, p.num_kv_heads, p.head_dim_qk, p.head_dim_vo);
    let group = arrays::heads(h_q, g)?;
    let m = p.written.len();
    let l = if b == 0 { 0 } else { arrays::outer("q", p.q, &[b, h_q, d])? };
    arrays::length("q", p.q, &[b, h_q, l, d])?;
    arrays::length("k", p.k, &[b, g, m, d])?;
    arrays::length("v", p.v, &[b, g, m, dv])?;
    arrays::product("o", &[b, h_q, l.max(1), dv.max(1)])?;
    arrays::finite("sm_scale", p.sm_scale)?;
    whole_blocks(p.written, p.block_size)?;
    check_mod(p.score_mod, h_q)?;

    let mut out = Attended { o: vec![0.0; b * h_q * l * dv], lse: vec![f64::NEG_INFINITY; b * h_q * l] };
    let written: Vec<usize> = (0..m).filter(|&j| p.written[j] != 0).collect();
    for batch in 0..b {
        for h in 0..h_q {
            let key = |j: usize, width: usize| ((batch * g + h / group) * m + j) * width;
            for i in 0..l {
                let at = (batch * h_q + h) * l + i;
                let query = &p.q[at * d..][..d];
                let position = p.q_offset.saturating_add(i as i64);
                let (mut seen, mut scores) = (Vec::new(), Vec::new());
                for &j in &written {
                    let score = p.sm_scale * dot(query, &p.k[key(j, d)..][..d]);
                    if let Some(score) = modified(p.score_mod, score, h, (j as i64).saturating_sub(position))
                    {
                        seen.push(j);
                        scores.push(score);
                    }
                }
                out.lse[at] = softmax::attend(&scores, None, &mut out.o[at * dv..][..dv], |n, lane| {
                    p.v[key(seen[n], dv) + lane].to_f64()
                });
            }
        }
    }
    Ok(out)
}

fn check_mod(score_mod: ScoreMod<'_>, heads: usize) -> Result<()> {
    match score_mod {
        ScoreMod::Alibi { slopes } => arrays::length("alibi_slopes", slopes, &[heads]),
        ScoreMod::RelBias { table, window } => {
            let width = window.saturating_mul(2).saturating_add(1);
            arrays::length("rel_bias", table, &[heads, width])
        }
        ScoreMod::SoftCap(cap) if !(cap.is_finite() && cap > 0.0) => {
            let why = "must be a finite number above 0".into();
            Err(Error::Parameter { name: "soft_cap", why, got: cap.to_string() })
        }
        ScoreMod::Chain(mods) => mods.iter().try_for_each(|&one| check_mod(one, heads)),
        ScoreMod::None | ScoreMod::Causal | ScoreMod::SoftCap(_) => Ok(()),
    }
}

/// The score after the mod; `None` when the mod drops the key.
fn modified(score_mod: ScoreMod<'_>, s: f64, head: usize, d: i64) -> Option<f64> {
    Some(match score_mod {
        ScoreMod::None => s,
        ScoreMod::Causal if d > 0 => return None,
        ScoreMod::Causal => s,
        ScoreMod::Alibi { slopes } => s + slopes[head] * d as f64,
        ScoreMod::RelBias { table, window } => {
            let w = window as i64;
            s + f64::from(table[head * (2 * window + 1) + (d.clamp(-w, w) + w) as usize])
        }
        ScoreMod::SoftCap(cap) => cap * (s / cap).tanh(),
        ScoreMod::Chain(mods) => return mods.iter().try_fold(s, |s, &one| modified(one, s, head, d)),
    })
}

/// Refuses a block of which only a part is written.
fn whole_blocks(written: &[u8], block_size: usize) -> Result<()> {
    if block_size == 0 {
        let why = "must be at least 1".into();
        return Err(Error::Parameter { name: "block_size", why, got: "0".into() });
    }
    for (block, keys) in written.chunks(block_size).enumerate() {
        if let Some(index) = keys.iter().position(|&w| (w != 0) != (keys[0] != 0)) {
            return Err(Error::Index {
                array: "written",
                index: block * block_size + index,
                got: i64::from(keys[index]),
                why: format!("a block of {block_size} is written whole or not at all"),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(l: usize, written: &[u8], score_mod: ScoreMod<'_>, q_offset: i64) -> Result<Attended> {
        let v: Vec<f32> = written.iter().map(|&w| if w == 0 { f32::NAN } else { 1.0 }).collect();
        flex(&Flex {
            q: &vec![1f32; l],
            k: &v.iter().map(|v| v - 1.0).collect::<Vec<f32>>(),
            v: &v,
            written,
            batch: 1,
            num_qo_heads: 1,
            num_kv_heads: 1,
            head_dim_qk: 1,
            head_dim_vo: 1,
            block_size: 128,
            sm_scale: 1.0,
            q_offset,
            score_mod,
        })
    }

    #[test]
    fn f33_key_lengths_that_are_not_a_multiple_of_the_block() {
        for m in [1usize, 64, 127, 128, 129, 200] {
            for l in [1usize, 5, 127, 128, 129] {
                let out = counted(l, &vec![1; m], ScoreMod::None, 0).unwrap();
                assert!(out.o.iter().all(|o| (o - 1.0).abs() < 1e-12));
                assert!(out.lse.iter().all(|lse| (lse - (m as f64).ln()).abs() < 1e-12));
                let out = counted(l, &vec![0; m], ScoreMod::None, 0).unwrap();
                assert!(out.lse.iter().all(|&lse| lse == f64::NEG_INFINITY) && out.o == vec![0.0; l]);
            }
        }
        let half: Vec<u8> = (0..200).map(|j| u8::from(j >= 128)).collect();
        assert!((counted(2, &half, ScoreMod::None, 0).unwrap().lse[1] - 72f64.ln()).abs() < 1e-12);
    }

    #[test]
    fn mods_follow_their_formulas() {
        let out = counted(3, &[1; 4], ScoreMod::Causal, 1).unwrap();
        assert!((out.lse[0] - 2f64.ln()).abs() < 1e-15 && (out.lse[2] - 4f64.ln()).abs() < 1e-15);
        let lse = counted(1, &[1; 2], ScoreMod::Alibi { slopes: &[2.0] }, 0).unwrap().lse[0];
        assert!((lse - (1.0 + 2f64.exp()).ln()).abs() < 1e-15);
        let table = [5.0, 0.0, 7.0];
        let lse = counted(1, &[1; 3], ScoreMod::RelBias { table: &table, window: 1 }, 0).unwrap().lse[0];
        assert!((lse - (1.0 + 2.0 * 7f64.exp()).ln()).abs() < 1e-14);
        assert!(counted(1, &[1; 3], ScoreMod::RelBias { table: &table, window: 2 }, 0).is_err());
        assert!(counted(1, &[1; 3], ScoreMod::SoftCap(0.0), 0).is_err());
        // Position 2 sees keys 0, 1 and 2 at biases -2, -1 and 0, capped after.
        let chain = [ScoreMod::Alibi { slopes: &[1.0] }, ScoreMod::SoftCap(0.5), ScoreMod::Causal];
        let lse = counted(1, &[1; 4], ScoreMod::Chain(&chain), 2).unwrap().lse[0];
        let capped = |s: f64| (0.5 * (s / 0.5).tanh()).exp();
        assert!((lse - (capped(-2.0) + capped(-1.0) + 1.0).ln()).abs() < 1e-14);
        assert!(counted(1, &[1; 3], ScoreMod::Chain(&[ScoreMod::SoftCap(0.0)]), 0).is_err());
    }

    #[test]
    fn half_written_blocks_are_refused() {
        let said = counted(1, &[1, 1, 0], ScoreMod::None, 0).unwrap_err().to_string();
        assert_eq!(said, "written[2] = 0: a block of 128 is written whole or not at all");
    }
}
