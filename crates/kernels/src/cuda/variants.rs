//! The one list of variants that are compiled ahead of time and judged: what `mstar kernels build` makes, and what CI compiles
//! for `sm_80` and `sm_90a` and fails on where a kernel spills, uses local memory, or has its matrix instructions serialised.
//!
//! It is a pairwise cover of what chooses a variant (dtype, width, mask, mods), at most [`MOST`] long; a run may build others.
//! Each kernel's author gives a function of their own.

use super::jit::{Key, Resources, Target, Unit};

/// The most that the list may hold.
pub const MOST: usize = 100;

/// A reason why variants of one kernel may touch local memory.
#[derive(Clone, Copy, Debug)]
pub struct Excuse {
    /// The unit's file name.
    pub unit: &'static str,
    /// The kernel's name in it.
    pub entry: &'static str,
    /// A define that its variants have; `None` for all of them.
    pub define: Option<(&'static str, i64)>,
    /// The most local memory, in bytes a thread.
    pub stack: u32,
    /// Why that is right.
    pub reason: &'static str,
}

/// Every excuse there is.
pub const EXCUSES: &[Excuse] = &[
    Excuse {
        unit: "tile.cu",
        entry: "tile",
        define: Some(("SPREAD", 2)),
        stack: 24,
        reason: "the sums and scores of a warp's 32 rows fill its registers; sm_80 lays a few words that products do not need aside",
    },
    Excuse {
        unit: "tile.cu",
        entry: "tile",
        define: Some(("CODES", 1)),
        stack: 24,
        reason: "256 columns of sums, scores, and what rounding left of weights: a few words that products do not need lie aside",
    },
    Excuse {
        unit: "tile_wide.cu",
        entry: "tile_wide",
        define: Some(("GENERAL", 1)),
        stack: 16,
        reason: "what only an item's ends need lies aside while a cap and slopes change a tile's scores",
    },
    Excuse { unit: "merge.cu", entry: "merge_few", define: None, stack: 608, reason: ABOVE },
    Excuse { unit: "merge.cu", entry: "merge_many", define: None, stack: 608, reason: ABOVE },
    Excuse { unit: "picks.cu", entry: "picks_merge_few", define: None, stack: 608, reason: ABOVE },
    Excuse { unit: "picks.cu", entry: "picks_merge_many", define: None, stack: 608, reason: ABOVE },
];
const ABOVE: &str =
    "nodes that wait above the 32 neighbours which a warp joins in registers; a row of fewer touches none";

/// The list.
pub fn variants() -> Vec<Key> {
    let attention = [plain(), merge(), decode(), tile(), latent(), sparse()];
    let others = [picks(), scores(), select(), moves(), super::peak::keys()];
    [attention.concat(), others.concat()].concat()
}

/// Those of the list that compile for a target.
pub fn variants_for(target: Target) -> Vec<Key> {
    let hopper = !matches!(target, Target::Sm { major, .. } if major != 9);
    variants().into_iter().filter(|key| hopper || !key.unit.needs_hopper()).collect()
}

/// The plain kernel: every source once and more, every dtype of queries and keys, every width of a value.
fn plain() -> Vec<Key> {
    // Source, queries' and keys' dtype, rows, columns, spans.
    const SOME: [[i64; 6]; 8] = [
        [0, 2, 3, 16, 128, 1],
        [3, 2, 3, 16, 128, 4],
        [0, 0, 0, 16, 128, 1],
        [0, 1, 1, 16, 64, 1],
        [1, 0, 0, 16, 128, 2],
        [2, 2, 2, 16, 128, 1],
        [2, 0, 0, 16, 32, 1],
        [3, 0, 0, 16, 128, 4],
    ];
    let names = ["SOURCE", "Q_TYPE", "KV_TYPE", "ROWS", "COLUMNS", "SPANS"];
    SOME.iter().map(|values| with_all(Key::new(Unit::PLAIN, "plain"), names, *values)).collect()
}

fn merge() -> Vec<Key> {
    [(0, "merge_many"), (1, "merge_near"), (2, "merge_few")]
        .map(|(dtype, entry)| Key::new(Unit::MERGE, entry).with("Q_TYPE", dtype))
        .to_vec()
}

/// What chooses a variant over latents.
const LATENTS: [&str; 7] = ["Q_TYPE", "ROWS", "DEPTH", "WIDTH", "STAGES", "MIN_BLOCKS", "PIECES"];

/// Latents of the published shapes and of narrow ones, at each height of a block.
fn latent() -> Vec<Key> {
    // As a Hopper's shared memory lets them be chosen, then as an A100's.
    const SOME: [[i64; 7]; 7] = [
        [1, 16, 576, 512, 2, 2, 4],
        [1, 32, 576, 512, 4, 1, 2],
        [1, 64, 576, 512, 3, 1, 2],
        [2, 64, 640, 512, 2, 1, 1],
        [2, 32, 320, 256, 4, 1, 2],
        [2, 16, 64, 128, 4, 2, 4],
        [1, 16, 576, 512, 3, 1, 4],
    ];
    // On a Hopper: query vectors, depth, width, stages, pieces.
    const FEW: [[i64; 6]; 3] = [[1, 16, 576, 512, 3, 4], [2, 32, 576, 512, 2, 2], [2, 16, 64, 128, 4, 4]];
    const WIDE: [[i64; 7]; 2] = [[1, 64, 576, 512, 2, 2, 1], [2, 64, 512, 512, 2, 1, 0]];
    let names = ["Q_TYPE", "ROWS", "DEPTH", "WIDTH", "STAGES", "PIECES"];
    let few = |values: &[i64; 6]| with_all(Key::new(Unit::LATENT_FEW, "latent_few"), names, *values);
    let wide = |&[dtype, rows, depth, width, stages, pieces, boxes]: &[i64; 7]| {
        let key = Key::new(Unit::LATENT_WIDE, "latent_wide");
        let key = with_all(key, names, [dtype, rows, depth, width, stages, pieces]);
        // As of 128 heads, whose pairs of blocks are clusters.
        if boxes == 1 { key.with("BOXES", 1).with("CLUSTER", 2) } else { key }
    };
    let of = |values: &[i64; 7]| with_all(Key::new(Unit::LATENT, "latent_attend"), LATENTS, *values);
    // In e4m3.
    let codes = [(Unit::LATENT_CODES, "latent_codes", 2), (Unit::LATENT_CODES_FEW, "latent_codes_few", 1)];
    let codes =
        codes.map(|(unit, entry, pieces)| Key::new(unit, entry).with("DEPTH", 576).with("PIECES", pieces));
    SOME.iter().map(of).chain(FEW.iter().map(few)).chain(WIDE.iter().map(wide)).chain(codes).collect()
}

/// The same over picks.
fn sparse() -> Vec<Key> {
    const SOME: [[i64; 7]; 3] =
        [[1, 16, 576, 512, 2, 2, 1], [1, 64, 576, 512, 3, 1, 2], [2, 32, 320, 256, 4, 1, 1]];
    SOME.iter().map(|values| with_all(Key::new(Unit::SPARSE, "sparse_attend"), LATENTS, *values)).collect()
}

/// Around picks: a kernel of each kind, a dtype each.
fn picks() -> Vec<Key> {
    const SOME: [(&str, i64, i64); 6] = [
        ("picks_order", 1, 1),
        ("picks_merge_few", 2, 2),
        ("picks_merge_near", 1, 1),
        ("picks_merge_many", 2, 2),
        ("picks_plain", 0, 0),
        ("picks_plain", 2, 3),
    ];
    let key = |(entry, q, kv)| Key::new(Unit::PICKS, entry).with("Q_TYPE", q).with("KV_TYPE", kv);
    SOME.into_iter().map(key).collect()
}

/// Index scores of each kind of keys, narrow, published and wide.
fn scores() -> Vec<Key> {
    const SOME: [[i64; 6]; 5] = [
        [1, 1, 128, 2, 1, 2],
        [1, 3, 128, 2, 1, 2],
        [2, 3, 32, 2, 1, 2],
        [2, 2, 256, 1, 1, 2],
        [1, 1, 128, 1, 0, 1],
    ];
    let names = ["Q_TYPE", "KEY_TYPE", "DEPTH", "KEY_TILES", "KEYS_ALIGNED", "MIN_BLOCKS"];
    let mut keys: Vec<Key> =
        SOME.iter().map(|values| with_all(Key::new(Unit::SCORES, "scores"), names, *values)).collect();
    // On Hopper: types of queries and keys, depth, heads, stages, alignment, blocks a multiprocessor.
    const WIDE: [[i64; 7]; 5] = [
        [1, 1, 128, 64, 2, 1, 3],
        [1, 3, 128, 64, 3, 1, 5],
        [2, 3, 64, 8, 8, 1, 5],
        [2, 2, 256, 40, 2, 1, 2],
        [1, 1, 128, 8, 2, 0, 3],
    ];
    let names = ["Q_TYPE", "KEY_TYPE", "DEPTH", "HEADS", "STAGES", "KEYS_ALIGNED", "MIN_BLOCKS"];
    let wide = |values: &[i64; 7]| with_all(Key::new(Unit::SCORES_WIDE, "scores_wide"), names, *values);
    keys.extend(WIDE.iter().map(wide));
    let plain = |(q, key)| Key::new(Unit::SCORES, "scores_plain").with("Q_TYPE", q).with("KEY_TYPE", key);
    keys.extend([(0, 3)].map(plain));
    keys
}

fn select() -> Vec<Key> {
    let mut keys = ["topk_count", "topk_pick"].map(|entry| Key::new(Unit::TOPK, entry)).to_vec();
    keys.push(Key::new(Unit::TOPK_ROW, "topk_row").with("BLOCKS", 2));
    keys.extend((0..2).map(|dtype| Key::new(Unit::QUANTISE, "quantise").with("KEY_TYPE", dtype)));
    keys
}

/// Few query vectors: each width of a head, each number of rows, a soft cap once.
fn decode() -> Vec<Key> {
    const FEW: [[i64; 7]; 8] = [
        [1, 64, 64, 8, 3, 0, 2],
        [2, 64, 64, 16, 3, 1, 2],
        [1, 128, 128, 8, 3, 0, 2],
        [2, 128, 128, 8, 3, 1, 2],
        [1, 128, 128, 16, 3, 0, 2],
        [1, 192, 128, 8, 2, 0, 2],
        [2, 256, 256, 8, 3, 0, 1],
        [1, 512, 256, 8, 2, 1, 1],
    ];
    const MORE: [[i64; 7]; 5] = [
        [2, 64, 64, 64, 4, 1, 2],
        [2, 128, 128, 32, 3, 1, 2],
        [1, 128, 128, 64, 3, 0, 2],
        [2, 256, 256, 16, 3, 0, 1],
        [1, 512, 256, 16, 2, 1, 1],
    ];
    let names = ["KV_TYPE", "WIDTH", "VALUES", "COLUMNS", "STAGES", "GENERAL", "RESIDENT"];
    let few = |values: &[i64; 7]| with_all(Key::new(Unit::DECODE_FEW, "decode_few"), names, *values);
    let names = ["KV_TYPE", "WIDTH", "VALUES", "ROWS", "STAGES", "GENERAL", "RESIDENT"];
    let more = |values: &[i64; 7]| with_all(Key::new(Unit::DECODE, "decode"), names, *values);
    // Of codes.
    const CODES: [[i64; 7]; 2] = [[1, 128, 128, 16, 3, 0, 2], [1, 64, 64, 32, 4, 1, 2]];
    let codes = CODES.iter().map(|values| more(values).with("CODES", 1));
    FEW.iter().map(few).chain(MORE.iter().map(more)).chain(codes).collect()
}

/// Many query vectors: each width of a head, each source, a soft cap once.
fn tile() -> Vec<Key> {
    const SOME: [[i64; 9]; 7] = [
        [2, 0, 128, 128, 4, 2, 64, 1, 2],
        [2, 2, 128, 128, 4, 2, 64, 0, 2],
        [1, 0, 64, 64, 4, 2, 64, 1, 2],
        [2, 1, 192, 128, 8, 1, 64, 0, 1],
        [1, 1, 192, 128, 4, 2, 32, 0, 2],
        [1, 1, 256, 256, 8, 1, 64, 1, 1],
        [2, 0, 512, 256, 4, 1, 32, 0, 1],
    ];
    let names = ["KV_TYPE", "SOURCE", "WIDTH", "VALUES", "WARPS", "SPREAD", "KEYS", "GENERAL", "RESIDENT"];
    let mut keys: Vec<Key> =
        SOME.iter().map(|values| with_all(Key::new(Unit::TILE, "tile"), names, *values)).collect();
    // On a Hopper, over segments or pages.
    const WIDE: [[i64; 9]; 4] = [
        [1, 1, 128, 128, 2, 128, 2, 1, 0],
        [1, 0, 128, 128, 2, 128, 2, 1, 1],
        [2, 1, 64, 64, 3, 96, 4, 1, 0],
        [1, 1, 256, 256, 2, 80, 2, 1, 0],
    ];
    let names_wide =
        ["KV_TYPE", "SOURCE", "WIDTH", "VALUES", "CONSUMERS", "KEYS", "STAGES", "QUERY_STAGES", "GENERAL"];
    keys.extend(
        WIDE.iter().map(|values| with_all(Key::new(Unit::TILE_WIDE, "tile_wide"), names_wide, *values)),
    );
    // Of codes.
    for values in [[1, 0, 128, 128, 8, 1, 64, 0, 1], [1, 0, 256, 256, 8, 1, 64, 1, 1]] {
        keys.push(with_all(Key::new(Unit::TILE, "tile"), names, values).with("CODES", 1));
    }
    // Over blocks, the mods that need most registers: score mods, then mask mods, as `cu/mods.cuh` numbers them.
    let blocks = with_all(Key::new(Unit::TILE, "tile"), names, SOME[1]);
    keys.push(blocks.clone().with("SCORES", 0).with("MASKS", 1).with("MASK_0", 1));
    let apart = with_all(Key::new(Unit::TILE, "tile"), names, [2, 2, 128, 128, 8, 1, 64, 0, 1]);
    let scores = apart.with("SCORES", 2).with("SCORE_0", 1).with("SCORE_1", 3);
    keys.push(scores.with("MASKS", 2).with("MASK_0", 2).with("MASK_1", 3));
    let whole = blocks.with("SCORES", 3).with("SCORE_0", 2).with("SCORE_1", 4).with("SCORE_2", 3);
    keys.push(whole.with("WHOLE", 1));
    keys
}

/// Entries from place to place, by a list in memory and by one in the parameter; the synthetic generator; partial results.
fn moves() -> Vec<Key> {
    let mut keys: Vec<Key> = (0..3).map(|of| Key::new(Unit::SYNTH, "synth").with("OUT_TYPE", of)).collect();
    keys.extend((0..3).map(|of| Key::new(Unit::JOIN, "join").with("OUT_TYPE", of)));
    keys.extend(["store_heads", "store_latents"].map(|entry| Key::new(Unit::STORE, entry)));
    let mut units = [16, 4, 2, 1].into_iter().cycle();
    for entry in
        ["scatter_at", "scatter_list", "gather_at", "gather_list", "unpage_at", "unpage_list", "copy_list"]
    {
        keys.extend(units.next().map(|unit| Key::new(Unit::MOVE, entry).with("UNIT", unit)));
    }
    keys.push(Key::new(Unit::MOVE, "scatter_both").with("UNIT", 16));
    keys
}

fn with_all<const N: usize>(key: Key, names: [&'static str; N], values: [i64; N]) -> Key {
    names.into_iter().zip(values).fold(key, |key, (name, value)| key.with(name, value))
}

impl Excuse {
    /// Whether it speaks of this variant.
    pub fn is_for(&self, key: &Key) -> bool {
        self.unit == key.unit.name()
            && self.entry == key.entry
            && self.define.is_none_or(|define| key.defines.as_slice().contains(&define))
    }
}

/// What is wrong with a compiled variant, if anything is.
pub fn fault(key: &Key, resources: &Resources) -> Option<String> {
    fault_but_for(EXCUSES, key, resources)
}

fn fault_but_for(excuses: &[Excuse], key: &Key, resources: &Resources) -> Option<String> {
    let Resources { registers, spill_stores, spill_loads, stack, serialised, shared: _ } = *resources;
    if registers == 0 {
        return Some("the compiler did not say what it takes".into());
    }
    if serialised > 0 {
        return Some(format!("{serialised} warnings of serialised matrix instructions"));
    }
    let excused = excuses.iter().filter(|excuse| excuse.is_for(key)).map(|excuse| excuse.stack).max();
    if resources.is_clean() || stack <= excused.unwrap_or(0) {
        return None;
    }
    Some(format!("{stack} bytes of local memory a thread ({spill_stores} spilled, {spill_loads} loaded)"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn the_list_is_short_names_nothing_twice_and_excuses_nothing_that_is_not_there() {
        let all = variants();
        assert!(all.len() <= MOST, "{} variants", all.len());
        let distinct: HashSet<&Key> = all.iter().collect();
        assert_eq!(distinct.len(), all.len(), "a variant is listed twice");
        for excuse in EXCUSES {
            assert!(all.iter().any(|key| excuse.is_for(key)), "{excuse:?} speaks of no variant");
        }
    }

    #[test]
    fn a_spill_is_a_fault_unless_it_is_excused_and_within_what_was_excused() {
        let key = Key::new(Unit::of("a.cu", ""), "run").with("WIDTH", 256);
        let clean = Resources { registers: 255, shared: 1024, ..Resources::default() };
        assert_eq!(fault_but_for(&[], &key, &clean), None);
        let spills = Resources { spill_stores: 8, spill_loads: 8, stack: 8, ..clean };
        assert!(fault_but_for(&[], &key, &spills).unwrap().contains("8 bytes of local memory"));
        let excuse = |define, stack| Excuse { unit: "a.cu", entry: "run", define, stack, reason: "" };
        assert_eq!(fault_but_for(&[excuse(None, 8)], &key, &spills), None);
        assert_eq!(fault_but_for(&[excuse(Some(("WIDTH", 256)), 16)], &key, &spills), None);
        assert!(fault_but_for(&[excuse(Some(("WIDTH", 128)), 16)], &key, &spills).is_some());
        assert!(fault_but_for(&[excuse(None, 4)], &key, &spills).is_some());
        let serialised = Resources { serialised: 1, ..clean };
        assert!(fault_but_for(&[excuse(None, 1024)], &key, &serialised).is_some(), "never excused");
    }
}
