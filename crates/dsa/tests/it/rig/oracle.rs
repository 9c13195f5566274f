//! Rows held against the oracle.

use mstar_kernels::DType;
use mstar_kernels::reference::Attended;
use mstar_kernels::reference::dsa_attend::{DsaAttend, dsa_attend};
use mstar_kernels::reference::dsa_select::{DsaSelect, dsa_select};
use mstar_kernels::synth::Kind;

use super::inputs::{chained, synthetic};
use super::{C, DI, E, H, HI, Rig, RowOut, SCALE};

impl Rig {
    /// Holds a row against the oracle: each query's pick by score, then attention over what was picked, or over all.
    #[track_caller]
    pub(crate) fn check(&self, out: &RowOut) {
        let content = self.content.borrow();
        let all = chained(&content[&(out.request.clone(), out.label.clone())]);
        let kept: Vec<Option<u64>> = all[out.first_kept..out.kv_len].iter().copied().map(Some).collect();
        let (n, topk) = (kept.len(), self.setup.topk);
        let own = &kept[n - out.q_len..];
        for (layer, got) in out.layers.iter().enumerate() {
            let full = self.setup.full_layers.iter().copied().filter(|&full| full <= layer).max().unwrap();
            let index = self.index_values(full, &kept, out.first_kept);
            let of_own = self.index_values(full, own, out.kv_len - out.q_len);
            let positions: Vec<i32> = (n - out.q_len..n).map(|p| p as i32).collect();
            let selected = dsa_select(&DsaSelect {
                q: &of_own.q,
                weights: &of_own.weights,
                keys: &index.keys,
                key_indptr: &[0, n as i32],
                row_request: &vec![0; out.q_len],
                positions: &positions,
                index_n_heads: HI,
                index_head_dim: DI,
                topk,
            })
            .unwrap();
            let (mut used, mut scores) = (Vec::new(), &selected.scores[..]);
            let widest = n.max(topk);
            for (query, &position) in positions.iter().enumerate() {
                let seen = position as usize + 1;
                let (of_query, rest) = scores.split_at(seen);
                scores = rest;
                let picked = &got.picks[query * topk..][..topk];
                let mut attends: Vec<i32> = (0..seen as i32).collect();
                if seen > topk {
                    judge(picked, of_query, &format!("{} at {position}, layer {layer}", out.request));
                    attends = picked.to_vec();
                } else {
                    assert!(picked.iter().all(|&p| p == -1), "{} at {position} needs no pick", out.request);
                }
                attends.resize(widest, -1);
                used.extend(attends);
            }
            let want = self.attended(layer, &kept, own, &used);
            let (o_bound, lse_bound) =
                if self.setup.dtype == DType::F32 { (1e-6, 1e-6) } else { (4e-3, 1e-5) };
            close(&got.o, &want.o, o_bound, &format!("o of {} layer {layer}", out.request));
            close(&got.lse, &want.lse, lse_bound, &format!("lse of {} layer {layer}", out.request));
        }
    }

    fn attended(&self, layer: usize, kept: &[Option<u64>], own: &[Option<u64>], used: &[i32]) -> Attended {
        let latent = synthetic(Kind::Latent, layer, kept, 1, C + E);
        let q = synthetic(Kind::Query, layer, own, H, C + E);
        let part = |from: usize, width: usize| -> Vec<f32> {
            q.chunks(C + E).flat_map(|head| head[from..from + width].to_vec()).collect()
        };
        dsa_attend(&DsaAttend {
            q_nope: &part(0, C),
            q_pe: &part(C, E),
            latent: &latent,
            selection: used,
            kv_indptr: &[0, 1],
            kv_indices: &[0],
            row_request: &vec![0; own.len()],
            page_start: &[0],
            num_qo_heads: H,
            kv_lora_rank: C,
            qk_rope_head_dim: E,
            page_size: kept.len(),
            sm_scale: f64::from(SCALE),
        })
        .unwrap()
    }
}

/// FORMAT's rule: as many distinct positions as there are to pick, and none whose score is below another's by more than
/// rounding explains; of equal scores the earlier.
#[track_caller]
pub(crate) fn judge(picked: &[i32], scores: &[f32], what: &str) {
    let mut order: Vec<usize> = (0..scores.len()).filter(|&s| !scores[s].is_nan()).collect();
    let due = picked.len().min(order.len());
    let mut set: Vec<usize> =
        picked.iter().filter(|&&p| p != -1).map(|&p| usize::try_from(p).unwrap()).collect();
    assert!(set.windows(2).all(|pair| pair[0] < pair[1]), "{what}: {picked:?} do not rise");
    assert_eq!(set.len(), due, "{what}: {picked:?}");
    assert!(
        set.iter().all(|&p| p < scores.len() && !scores[p].is_nan()),
        "{what}: {picked:?} of {}",
        scores.len()
    );
    if due == 0 {
        return;
    }
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
    let largest = scores.iter().filter(|x| x.is_finite()).fold(0f32, |a, x| a.max(x.abs()));
    let slack = 1e-5 * largest;
    let least = scores[order[due - 1]];
    for &position in &set {
        assert!(
            scores[position] >= least - slack,
            "{what}: {position} scores {} < {least}",
            scores[position]
        );
    }
    set.sort_unstable();
    for &position in order.iter().filter(|&&p| scores[p] > least + slack) {
        assert!(
            set.binary_search(&position).is_ok(),
            "{what}: {position} scores {} > {least}",
            scores[position]
        );
    }
    for pair in order.windows(2).filter(|pair| scores[pair[0]] == scores[pair[1]]) {
        let has = |p: usize| set.binary_search(&p).is_ok();
        assert!(has(pair[0]) || !has(pair[1]), "{what}: {} for {}, of equal scores", pair[1], pair[0]);
    }
}

/// Relative L2 error over finite entries within a bound, infinities equal.
#[track_caller]
pub(crate) fn close(got: &[f32], want: &[f64], bound: f64, what: &str) {
    assert_eq!(got.len(), want.len());
    let (mut difference, mut norm) = (0f64, 0f64);
    for (&got, &want) in got.iter().zip(want) {
        if !want.is_finite() || !got.is_finite() {
            assert_eq!(f64::from(got), want, "{what}");
            continue;
        }
        difference += (f64::from(got) - want).powi(2);
        norm += want * want;
    }
    assert!(difference.sqrt() <= bound * norm.sqrt(), "{what}: {:.3e}", (difference / norm).sqrt());
}
