//! Attention over paged keys and values, and cross-attention (the same, not causal).

use super::{Attended, Real, arrays, dot, softmax};
use crate::{Error, Result};

/// Where keys and values lie. `P` pages of `S` tokens, `G` heads, widths `D` and `Dv`.
#[derive(Clone, Copy, Debug)]
pub enum Cache<'a, E> {
    /// One array `[P, 2, S, G, D]`: index 0 of axis 1 holds keys, 1 values. `Dv` is `D`.
    Combined(&'a [E]),
    /// Two arrays under one page table.
    Split {
        /// `[P, S, G, D]`.
        k: &'a [E],
        /// `[P, S, G, Dv]`.
        v: &'a [E],
    },
}

/// Everything that [`paged`] reads. `T` packed query tokens, `R` rows.
#[derive(Clone, Copy, Debug)]
pub struct Paged<'a, Q, E> {
    /// `[T, H, D]`.
    pub q: &'a [Q],
    /// Keys and values.
    pub cache: Cache<'a, E>,
    /// `[R + 1]`: where each row's queries start.
    pub qo_indptr: &'a [i32],
    /// `[R + 1]`: where each row's pages start in `kv_indices`.
    pub kv_indptr: &'a [i32],
    /// Page ids, row after row.
    pub kv_indices: &'a [i32],
    /// `[R]`: used slots of each row's last page, `1..=S`; 0 for a row without pages.
    pub kv_last_page_len: &'a [i32],
    /// `H`.
    pub num_qo_heads: usize,
    /// `G`, a divisor of `H`.
    pub num_kv_heads: usize,
    /// `D`.
    pub head_dim_qk: usize,
    /// `Dv`.
    pub head_dim_vo: usize,
    /// `S`.
    pub page_size: usize,
    /// Factor on `q.k`.
    pub sm_scale: f64,
    /// Query `i` of a row sits at position `kv_len - q_len + i` and sees no later key.
    pub causal: bool,
    /// What else shapes the scores; all off by default.
    pub options: Options<'a>,
}

/// What else shapes the scores of [`paged`]; the default has all of it off.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    /// `w >= 0`: a query at position `p` sees no key before `p - w`, causal or not. Negative: no window.
    pub window_left: i64,
    /// `c > 0`: a score `s` becomes `c * tanh(s / c)`, before any mask. 0: no cap.
    pub logits_soft_cap: f64,
    /// `[H]`: a logit that joins the denominator alone, neither scaled nor capped.
    pub sinks: Option<&'a [f32]>,
    /// `[H]`: `slope * (key position - query position)` is added to the (capped) score
    /// ("Train Short, Test Long", arXiv:2108.12409).
    pub alibi_slopes: Option<&'a [f32]>,
    /// Empty, or one entry a row: which keys each query may see, `[q_len, kv_len]`, columns by absolute
    /// position. It narrows what `causal` and `window_left` leave.
    pub masks: &'a [Option<&'a [bool]>],
    /// Empty, or `[R]`: absolute position of slot 0 of a row's first page, where earlier pages were given back.
    pub kv_offset: &'a [usize],
    /// Empty, or `[R]`: slots of a row's first page that lie before its first kept token.
    pub page_start: &'a [usize],
}

impl Default for Options<'_> {
    fn default() -> Self {
        Options {
            window_left: -1,
            logits_soft_cap: 0.0,
            sinks: None,
            alibi_slopes: None,
            masks: &[],
            kv_offset: &[],
            page_start: &[],
        }
    }
}

/// `o` `[T, H, Dv]` and `lse` `[T, H]` of paged attention: `softmax(cap(sm_scale * q k^T) + alibi) v` under
/// the masks, row by row. See FlashInfer's `page.cuh` for the arrays.
///
/// # Errors
/// An array of another length than the shapes say, an index array out of order or range, a
/// `kv_last_page_len` outside `1..=S` (0 without pages), heads that do not divide.
pub fn paged<Q: Real, E: Real>(p: &Paged<'_, Q, E>) -> Result<Attended> {
    let (h_q, g, d, dv, s) = (p.num_qo_heads, p.num_kv_heads, p.head_dim_qk, p.head_dim_vo, p.page_size);
    let options = &p.options;
    let group = arrays::heads(h_q, g)?;
    let tokens = arrays::outer("q", p.q, &[h_q, d])?;
    let pages = match p.cache {
        Cache::Combined(kv) if d == dv => arrays::outer("kv", kv, &[2, s, g, d])?,
        Cache::Combined(_) => return Err(other_width(d, dv)),
        Cache::Split { k, v } => {
            let pages = arrays::outer("k", k, &[s, g, d])?;
            arrays::length("v", v, &[pages, s, g, dv])?;
            pages
        }
    };
    arrays::product("o", &[tokens, h_q, dv.max(1)])?;
    let queries = arrays::ranges("qo_indptr", p.qo_indptr, tokens)?;
    let tables = arrays::ranges("kv_indptr", p.kv_indptr, p.kv_indices.len())?;
    arrays::length("kv_indptr", &tables, &[queries.len()])?;
    arrays::length("kv_last_page_len", p.kv_last_page_len, &[queries.len()])?;
    arrays::indices("kv_indices", p.kv_indices, pages)?;
    for (name, per_head) in [("sinks", options.sinks), ("alibi_slopes", options.alibi_slopes)] {
        per_head.map_or(Ok(()), |values| arrays::length(name, values, &[h_q]))?;
    }
    for (name, per_row) in [("kv_offset", options.kv_offset), ("page_start", options.page_start)] {
        if !per_row.is_empty() {
            arrays::length(name, per_row, &[queries.len()])?;
        }
    }
    if !options.masks.is_empty() {
        arrays::length("masks", options.masks, &[queries.len()])?;
    }
    arrays::finite("sm_scale", p.sm_scale)?;
    arrays::finite("logits_soft_cap", options.logits_soft_cap)?;

    let key = |page: usize, slot: usize, head: usize| match p.cache {
        Cache::Combined(kv) => &kv[(((page * 2) * s + slot) * g + head) * d..][..d],
        Cache::Split { k, .. } => &k[((page * s + slot) * g + head) * d..][..d],
    };
    let value = |page: usize, slot: usize, head: usize, lane: usize| match p.cache {
        Cache::Combined(kv) => kv[(((page * 2 + 1) * s + slot) * g + head) * d + lane].to_f64(),
        Cache::Split { v, .. } => v[((page * s + slot) * g + head) * dv + lane].to_f64(),
    };

    let mut out = Attended { o: vec![0.0; tokens * h_q * dv], lse: vec![f64::NEG_INFINITY; tokens * h_q] };
    for (row, (queries, table)) in queries.into_iter().zip(tables).enumerate() {
        let table = &p.kv_indices[table];
        let first = options.kv_offset.get(row).copied().unwrap_or(0);
        let start = options.page_start.get(row).copied().unwrap_or(0);
        let used = used_slots(row, table.len(), s, p.kv_last_page_len[row])?;
        if start > used {
            return Err(Error::Index {
                array: "page_start",
                index: row,
                got: start as i64,
                why: format!("the row's pages hold {used} tokens"),
            });
        }
        let kv_len = first.checked_add(used).filter(|&n| n <= i64::MAX as usize / 2);
        let kv_len = kv_len.ok_or_else(|| Error::Parameter {
            name: "kv_offset",
            why: format!("row {row}: the position past its last token has no 64-bit number"),
            got: first.to_string(),
        })?;
        let mask = options.masks.get(row).copied().flatten();
        if let Some(mask) = mask {
            arrays::length("masks", mask, &[queries.len(), kv_len])?;
        }
        for (i, t) in queries.clone().enumerate() {
            let position = kv_len as i64 - queries.len() as i64 + i as i64;
            let seen: Vec<usize> = (first + start..kv_len)
                .filter(|&j| !p.causal || j as i64 <= position)
                .filter(|&j| {
                    options.window_left < 0 || j as i64 >= position.saturating_sub(options.window_left)
                })
                .filter(|&j| mask.is_none_or(|mask| mask[i * kv_len + j]))
                .collect();
            let place = |j: usize| (table[(j - first) / s] as usize, (j - first) % s);
            for h in 0..h_q {
                let query = &p.q[(t * h_q + h) * d..][..d];
                let scores: Vec<f64> = seen
                    .iter()
                    .map(|&j| {
                        let (page, slot) = place(j);
                        let mut score = p.sm_scale * dot(query, key(page, slot, h / group));
                        if options.logits_soft_cap > 0.0 {
                            score = options.logits_soft_cap * (score / options.logits_soft_cap).tanh();
                        }
                        let slope = options.alibi_slopes.map_or(0.0, |slopes| f64::from(slopes[h]));
                        score + slope * (j as i64 - position) as f64
                    })
                    .collect();
                let sink = options.sinks.map(|sinks| f64::from(sinks[h]));
                let o = &mut out.o[(t * h_q + h) * dv..][..dv];
                out.lse[t * h_q + h] = softmax::attend(&scores, sink, o, |key, lane| {
                    let (page, slot) = place(seen[key]);
                    value(page, slot, h / group, lane)
                });
            }
        }
    }
    Ok(out)
}

/// Slots of a row's pages that hold its tokens.
fn used_slots(row: usize, pages: usize, page_size: usize, last_page_len: i32) -> Result<usize> {
    let allowed = if pages == 0 { 0..=0 } else { 1..=page_size as i64 };
    if !allowed.contains(&i64::from(last_page_len)) {
        let why = format!("must be in {allowed:?} for a row of {pages} pages of {page_size}");
        return Err(Error::Index {
            array: "kv_last_page_len",
            index: row,
            got: i64::from(last_page_len),
            why,
        });
    }
    Ok(pages.saturating_sub(1) * page_size + last_page_len as usize)
}

fn other_width(d: usize, dv: usize) -> Error {
    Error::Parameter {
        name: "head_dim_vo",
        why: format!("a combined cache has values as wide as keys ({d}); pass them apart"),
        got: dv.to_string(),
    }
}

#[cfg(test)]
mod tests;
