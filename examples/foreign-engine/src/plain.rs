//! What latent attention is, as a plain loop in f64.

use crate::model::{C, E, HEADS, latent, query, variant};

/// One query token: `o` `[H, C]` and `lse` `[H]` over positions `0..=position` of its request.
pub fn attention(request: usize, position: usize) -> (Vec<f64>, Vec<f64>) {
    let scale = f64::from(variant().sm_scale);
    let latents: Vec<[f32; C + E]> = (0..=position).map(|at| latent(request, at)).collect();
    let (mut o, mut lse) = (Vec::new(), Vec::new());
    for head in 0..HEADS {
        let q = query(request, position, head);
        let dot = |k: &[f32; C + E]| q.iter().zip(k).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum::<f64>();
        let scores: Vec<f64> = latents.iter().map(|k| scale * dot(k)).collect();
        let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - most).exp()).collect();
        let total: f64 = weights.iter().sum();
        lse.push(most + total.ln());
        for lane in 0..C {
            let sum: f64 = latents.iter().zip(&weights).map(|(k, w)| w * f64::from(k[lane])).sum();
            o.push(sum / total);
        }
    }
    (o, lse)
}
