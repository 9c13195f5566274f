//! The model's attention geometry.

use super::Fields;

/// Heads, on one rank or on all.
pub(super) const MAX_HEADS: u64 = 4096;

/// The `model` section: what one attention layer looks like.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    /// `layers`.
    pub layers: usize,
    /// `num_qo_heads`: `H` over all ranks.
    pub num_qo_heads: usize,
    /// `num_kv_heads`: `G` over all ranks; `None` for a latent cache.
    pub num_kv_heads: Option<usize>,
    /// `head_dim`: `D`, the width of a query and of a key.
    pub head_dim: Option<usize>,
    /// `head_dim_vo`: width of a value and of an output; `head_dim` unless said.
    pub head_dim_vo: Option<usize>,
    /// `kv_lora_rank`: `C`.
    pub kv_lora_rank: Option<usize>,
    /// `qk_rope_head_dim`: `E`.
    pub qk_rope_head_dim: usize,
    /// `sm_scale`: scores are multiplied by this; `head_dim^-0.5` unless said. A model of latents must say it: its scale
    /// belongs to the width of a query before it was absorbed, which no key of a spec holds.
    pub sm_scale: f32,
    /// `window_left`: a query at position `i` sees keys from `i - window_left` on; `None` sees all.
    pub window_left: Option<usize>,
    /// `logits_soft_cap`: scores become `cap * tanh(score / cap)`.
    pub logits_soft_cap: Option<f32>,
    /// `sinks`: whether each query head has a learned sink logit (a synthetic one, in `run`).
    pub sinks: bool,
    /// `alibi`: whether each query head adds `slope * (key - query position)`.
    pub alibi: bool,
}

/// Heads on one rank of a sharded model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankHeads {
    /// `H`.
    pub num_qo_heads: usize,
    /// `G`; at least 1, since KV heads are replicated where there are fewer than ranks.
    pub num_kv_heads: usize,
}

impl ModelSpec {
    /// Heads on each of `world_size` ranks.
    ///
    /// # Errors
    /// When heads cannot be divided evenly, with the numbers.
    pub fn rank_heads(&self, world_size: usize) -> Result<RankHeads, String> {
        let (h, g) = (self.num_qo_heads, self.num_kv_heads.unwrap_or(1));
        if world_size == 0 || !h.is_multiple_of(world_size) {
            return Err(format!("{h} num_qo_heads cannot be shared evenly by world_size {world_size}"));
        }
        // A latent cache has no heads to share: every rank holds all of it.
        if self.num_kv_heads.is_none() {
            return Ok(RankHeads { num_qo_heads: h / world_size, num_kv_heads: 1 });
        }
        let replicated = g < world_size && world_size.is_multiple_of(g);
        if !g.is_multiple_of(world_size) && !replicated {
            return Err(format!(
                "{g} num_kv_heads can be neither shared nor replicated evenly by world_size {world_size}"
            ));
        }
        Ok(RankHeads { num_qo_heads: h / world_size, num_kv_heads: (g / world_size).max(1) })
    }

    /// Width of a value and of an output in a cache of heads.
    pub fn value_width(&self) -> Option<usize> {
        self.head_dim_vo.or(self.head_dim)
    }

    pub(super) fn read(mut f: Fields<'_>) -> Option<ModelSpec> {
        let layers = f.count("layers", 1..=1024);
        let num_qo_heads = f.count("num_qo_heads", 1..=MAX_HEADS);
        let num_kv_heads = f.count_opt("num_kv_heads", 1..=MAX_HEADS);
        let head_dim = f.count_opt("head_dim", 1..=512);
        let head_dim_vo = f.count_opt("head_dim_vo", 1..=512);
        let kv_lora_rank = f.count_opt("kv_lora_rank", 1..=8192);
        let rope = f.count_opt("qk_rope_head_dim", 0..=8192);
        let given_scale = f.number_opt("sm_scale", 1e-6..=1e6);
        let window_left = read_window(&mut f);
        let cap = f.number_opt("logits_soft_cap", 1e-6..=1e6);
        let (sinks, alibi) = (f.flag_or("sinks", false), f.flag_or("alibi", false));
        if let (Some(h), Some(g)) = (num_qo_heads, num_kv_heads)
            && h % g != 0
        {
            f.fault_at("num_qo_heads", format!("{h} is not a multiple of num_kv_heads, which is {g}"));
        }
        if head_dim.is_none() && kv_lora_rank.is_none() && f.is_map() && f.node().get("head_dim").is_none() {
            f.fault_at("head_dim", "missing; a cache of heads needs it (a latent cache needs kv_lora_rank)");
        }
        if head_dim.is_some() && num_kv_heads.is_none() && f.node().get("num_kv_heads").is_none() {
            f.fault_at("num_kv_heads", "missing; a cache of heads needs it, and head_dim is given");
        }
        if head_dim.is_none() && head_dim_vo.is_some() {
            f.fault_at("head_dim_vo", "has no effect without head_dim; remove it");
        }
        if kv_lora_rank.is_none() && rope.is_some() {
            f.fault_at("qk_rope_head_dim", "has no effect without kv_lora_rank; remove it");
        }
        let default_scale = head_dim.map(|d| (d as f64).powf(-0.5));
        let said = |key: &str| f.node().get(key).is_some();
        if f.is_map() && !said("sm_scale") && kv_lora_rank.is_some() {
            f.fault_at(
                "sm_scale",
                "missing; it belongs to the width of a query before absorption, (nope + rope)^-0.5 of the model's \
                 own query, which kv_lora_rank does not say",
            );
        }
        f.finish("here");
        Some(ModelSpec {
            layers: layers?,
            num_qo_heads: num_qo_heads?,
            num_kv_heads,
            head_dim,
            head_dim_vo,
            kv_lora_rank,
            qk_rope_head_dim: rope.unwrap_or(0),
            sm_scale: given_scale.or(default_scale)? as f32,
            window_left,
            logits_soft_cap: cap.map(|cap| cap as f32),
            sinks,
            alibi,
        })
    }
}

/// `window_left`: -1, as kernels write it, means the same as leaving it out.
fn read_window(f: &mut Fields<'_>) -> Option<usize> {
    let node = f.value("window_left")?;
    if node.scalar().is_some_and(|scalar| scalar.text == "-1" && !scalar.quoted) {
        return None;
    }
    f.count_opt("window_left", 0..=i32::MAX as u64)
}
