//! Plans over what was stored before the step.

use mstar_attn_mla::{Merged, Partial, TensorMut, TensorRef, merge};
use mstar_core::step::{AttentionStep, Declaration};
use mstar_core::{Attention, PlannedStep, Resource, Step};

use super::*;

/// The step with the resource `context` attending the stored context alone.
fn context_only(step: Step) -> Step {
    let said = AttentionStep { context_only: true, ..AttentionStep::default() };
    step.with("context", Declaration::Attention(said))
}

/// Three requests that have stored 6, 0 and 33 tokens, and a step that adds 3, 2 and 1.
fn stored_and_planned(bucket: Option<PaddedShape>) -> (Rig, PlannedStep) {
    let rig = Rig::new(4, 64);
    rig.ingest(&["a", "b", "c"]);
    rig.step(&[("a", 6), ("c", 33)], None);
    let planned = rig.planned(context_only(step(&[("a", 3), ("b", 2), ("c", 1)])), bucket);
    (rig, planned)
}

const STORED: [(&str, usize, usize); 3] = [("a", 3, 6), ("b", 2, 0), ("c", 1, 33)];

#[test]
fn context_only_attends_what_was_stored_before_the_step_and_nothing_of_its_own() {
    for bucket in [None, shape(5, 16)] {
        let (rig, planned) = stored_and_planned(bucket);
        // The step's own latents are in the pages by now, written by the resource that attends them.
        rig.forward(&planned, &rig.attn, "main");
        let out = rig.forward(&planned, &rig.context, "main");
        rig.engine.abort(planned);
        for ((name, q_len, stored), row) in STORED.into_iter().zip(&out) {
            for layer in 0..L {
                let (o, lse) = oracle((name, "main"), stored..stored + q_len, 0..stored, layer, false);
                assert!(close(&row.layers[layer].0, &o) && close(&row.layers[layer].1, &lse), "{name}");
            }
        }
    }
}

#[test]
fn kv_len_buf_says_where_the_steps_entries_start_and_qo_indptr_is_the_steps_own() {
    let (rig, planned) = stored_and_planned(None);
    let id = plan_id(&planned, "main");
    let read = |buf: mstar_core::attend::IndexBuf| buf.view().unwrap().as_slice::<i32>().unwrap().to_vec();
    assert_eq!(read(rig.context.kv_len_buf(&id).unwrap()), [6, 0, 33]);
    assert_eq!(read(rig.attn.kv_len_buf(&id).unwrap()), [9, 2, 34]);
    for attn in [&rig.context, &rig.attn] {
        assert_eq!(read(attn.qo_indptr_buf(&id).unwrap()), [0, 3, 5, 6]);
    }
    // Pairs of a query and a latent: 3 x 6, none and 1 x 33 over the context alone.
    let per_pair = 2 * (H * (C + E + C)) as u64;
    assert_eq!(rig.context.work(&id).flops, (18 + 33) * per_pair);
    assert_eq!(rig.attn.work(&id).flops, (7 + 8 + 9 + 1 + 2 + 34) * per_pair);
    rig.engine.abort(planned);
}

#[test]
fn the_context_merged_with_the_steps_own_tokens_is_plain_causal_attention() {
    let (rig, planned) = stored_and_planned(None);
    let whole = rig.forward(&planned, &rig.attn, "main");
    let context = rig.forward(&planned, &rig.context, "main");
    rig.engine.abort(planned);
    for ((name, q_len, stored), (whole, context)) in STORED.into_iter().zip(whole.iter().zip(&context)) {
        for layer in 0..L {
            let own = stored..stored + q_len;
            let (own_o, own_lse) = oracle((name, "main"), own.clone(), own, layer, true);
            let narrow = |values: &[f64]| values.iter().map(|&x| x as f32).collect::<Vec<_>>();
            let (own_o, own_lse) = (narrow(&own_o), narrow(&own_lse));
            let (o, lse) = &context.layers[layer];
            let (o_shape, lse_shape) = ([q_len, H, C], [q_len, H]);
            let (mut joined_o, mut joined_lse) = (vec![f32::NAN; o.len()], vec![f32::NAN; lse.len()]);
            merge(
                &Partial {
                    o: TensorRef::from_slice(o, &o_shape).unwrap(),
                    lse: TensorRef::from_slice(lse, &lse_shape).unwrap(),
                },
                &Partial {
                    o: TensorRef::from_slice(&own_o, &o_shape).unwrap(),
                    lse: TensorRef::from_slice(&own_lse, &lse_shape).unwrap(),
                },
                &mut Merged {
                    o: TensorMut::from_slice(&mut joined_o, &o_shape).unwrap(),
                    lse: TensorMut::from_slice(&mut joined_lse, &lse_shape).unwrap(),
                },
            )
            .unwrap();
            let wide = |values: &[f32]| values.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
            assert!(close(&joined_o, &wide(&whole.layers[layer].0)), "{name}");
            assert!(close(&joined_lse, &wide(&whole.layers[layer].1)), "{name}");
            if stored == 0 {
                assert!(context.layers[layer].1.iter().all(|&lse| lse == f32::NEG_INFINITY));
                assert_eq!((joined_o, joined_lse), (own_o, own_lse), "an empty context changes no bit");
            }
        }
    }
}

#[test]
fn a_context_only_step_can_be_preplanned_and_cleared() {
    let rig = Rig::new(4, 64);
    rig.ingest(&["a"]);
    rig.step(&[("a", 6)], None);
    let now = rig.planned(step(&[("a", 1)]), None);
    let ahead = rig.engine.preplan(&now, context_only(step(&[("a", 2)]))).unwrap().admitted().unwrap();
    rig.forward(&now, &rig.attn, "main");
    rig.engine.commit(now).unwrap();
    let next = rig.engine.promote(ahead).unwrap().admitted().unwrap();
    let lens = rig.context.kv_len_buf(&plan_id(&next, "main")).unwrap();
    assert_eq!(lens.view().unwrap().as_slice::<i32>().unwrap(), &[7]);
    let again = rig.engine.preplan(&next, step(&[("a", 1)])).unwrap().admitted().unwrap();
    rig.engine.clear(again);
    let out = rig.forward(&next, &rig.context, "main");
    let (o, lse) = oracle(("a", "main"), 7..9, 0..7, 0, false);
    assert!(close(&out[0].layers[0].0, &o) && close(&out[0].layers[0].1, &lse));
    rig.engine.abort(next);
    assert_eq!(rig.engine.outstanding(), 0);
    assert!(rig.context.supports_preplan() && !rig.context.force_double_buffer());
}
