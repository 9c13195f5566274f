//! Entries written, copied, saved and loaded, in each layout and type.

use super::*;

fn slots_of(slots: &[i64]) -> TensorRef<'_> {
    TensorRef::from_slice(slots, &[slots.len()]).unwrap()
}

fn memory() -> KvMemory {
    let layout = KvLayout::Nhd { num_kv_heads: 2, head_dim: 4 };
    let mut config = KvConfig::new(layout, DType::F32, 2, 4);
    config.num_layers = 2;
    config.planes =
        vec![super::super::PlaneConfig { name: "scales".into(), dtype: DType::U8, width: 3, layers: None }];
    KvMemory::new(&config, Stream::cpu()).unwrap()
}

#[test]
fn f09_page_addresses_are_64_bit() {
    assert_eq!(page_offset(131_072, 64, 576), 4_831_838_208);
    assert!(page_offset(58_254, 64, 576) < 1 << 31 && page_offset(58_255, 64, 576) > 1 << 31);
}

#[test]
fn a_token_lands_in_its_slot_of_its_layer_from_any_outer_stride() {
    let memory = memory();
    let fused: Vec<f32> = (0..2 * 20).map(|i| i as f32).collect(); // two tokens of [k 8 | v 8 | 4 more]
    let k = TensorRef::from_slice_strided(&fused, &[2, 2, 4], &[20, 4, 1]).unwrap();
    let v = TensorRef::from_slice_strided(&fused[8..], &[2, 2, 4], &[20, 4, 1]).unwrap();
    memory.write(1, slots_of(&[5, -1]), KvEntries::Nhd { k, v }, &Stream::cpu()).unwrap();
    let LayerView::Nhd { k, v } = memory.layer(1).unwrap() else { panic!() };
    let row = |t: TensorRef<'_>| {
        let page = t.select(0, 2).unwrap().select(0, 1).unwrap();
        page.as_slice::<f32>().unwrap().to_vec()
    };
    assert_eq!(row(k), fused[..8]);
    assert_eq!(row(v), fused[8..16]);
    let LayerView::Nhd { k, .. } = memory.layer(0).unwrap() else { panic!() };
    assert_eq!(row(k), [0.0; 8]);
    let whole = memory.planes[0].buffer.tensor(0, DType::F32, &[2 * 4 * 2 * 16]).unwrap();
    assert_eq!(whole.as_slice::<f32>().unwrap().iter().filter(|&&x| x != 0.0).count(), 15);
}

#[test]
fn f14_a_slot_of_minus_one_writes_nothing_and_one_past_the_end_is_an_error() {
    let memory = memory();
    let ones = [1f32; 24];
    let x = TensorRef::from_slice(&ones, &[3, 2, 4]).unwrap();
    let all = |m: &KvMemory| {
        let t = m.planes[0].buffer.tensor(0, DType::F32, &[256]).unwrap();
        t.as_slice::<f32>().unwrap().to_vec()
    };
    for slots in [[2, 3, 8], [2, 3, -2], [2, 3, i64::MAX], [2, 3, i64::MIN]] {
        assert!(memory.write(0, slots_of(&slots), KvEntries::Nhd { k: x, v: x }, &Stream::cpu()).is_err());
        assert_eq!(all(&memory), [0.0; 256]);
    }
    memory.write(0, slots_of(&[2, -1, -1]), KvEntries::Nhd { k: x, v: x }, &Stream::cpu()).unwrap();
    assert_eq!(all(&memory).iter().sum::<f32>(), 16.0);
}

#[test]
fn latents_lie_beside_their_rotary_parts_which_may_be_absent() {
    for e in [2usize, 0] {
        let layout = KvLayout::Mla { kv_lora_rank: 3, qk_rope_head_dim: e };
        let memory = KvMemory::new(&KvConfig::new(layout, DType::F32, 2, 3), Stream::cpu()).unwrap();
        let ckv = [1f32, 2.0, 3.0, 4.0, 5.0, 6.0];
        let kpe = [-1f32, -2.0, -3.0, -4.0];
        let ckv = TensorRef::from_slice(&ckv, &[2, 3]).unwrap();
        let kpe = TensorRef::from_slice(&kpe[..2 * e], &[2, e]).unwrap();
        memory.write(0, slots_of(&[5, 2]), KvEntries::Mla { ckv, kpe }, &Stream::cpu()).unwrap();
        let LayerView::Mla { latent } = memory.layer(0).unwrap() else { panic!() };
        let row = |page, slot| {
            let row = latent.select(0, page).unwrap().select(0, slot).unwrap();
            row.as_slice::<f32>().unwrap().to_vec()
        };
        assert_eq!(row(2, 1), [&[1.0, 2.0, 3.0][..], &[-1.0, -2.0][..e]].concat());
        assert_eq!(row(1, 0), [&[4.0, 5.0, 6.0][..], &[-3.0, -4.0][..e]].concat());
        assert_eq!((row(1, 1), row(2, 0)), (vec![0.0; 3 + e], vec![0.0; 3 + e]));
        let wrong = KvEntries::Nhd { k: ckv, v: ckv };
        assert!(memory.write(0, slots_of(&[5, 2]), wrong, &Stream::cpu()).is_err());
    }
}

#[test]
fn scales_are_stored_beside_their_codes_and_move_with_their_pages() {
    let layout = KvLayout::Nhd { num_kv_heads: 2, head_dim: 4 };
    let mut config = KvConfig::new(layout, DType::Bf16, 2, 5).quantised();
    config.num_layers = 2;
    let memory = KvMemory::new(&config, Stream::cpu()).unwrap();
    assert_eq!(memory.bytes(), config.memory_bytes().unwrap());
    // Head 1 of a token is a hundred times head 0, values are a thousand times keys, layer 1 is twice layer 0.
    let number = |layer: usize, side: usize, i: usize| {
        let size = [1.0, 100.0][i / 4 % 2] * [1.0, 1000.0][side] * (layer + 1) as f32;
        size * [1.0, -0.5, 0.25, 0.0][i % 4]
    };
    for layer in 0..2 {
        let side = |side: usize| -> Vec<f32> { (0..16).map(|i| number(layer, side, i)).collect() };
        let (k, v) = (side(0), side(1));
        let view = |x| TensorRef::from_slice(x, &[2, 2, 4]).unwrap();
        let entries = KvEntries::Nhd { k: view(&k), v: view(&v) };
        memory.write(layer, slots_of(&[2, 3]), entries, &Stream::cpu()).unwrap();
    }
    memory.copy_page(1, 2).unwrap();
    let host = memory.save(&[2]).unwrap();
    // A page that is used again keeps nothing of its former scales.
    let huge = [1e30f32; 16];
    let huge = TensorRef::from_slice(&huge, &[2, 2, 4]).unwrap();
    for layer in 0..2 {
        memory.write(layer, slots_of(&[6, 7]), KvEntries::Nhd { k: huge, v: huge }, &Stream::cpu()).unwrap();
    }
    memory.load(&host, &[3]).unwrap();
    for layer in 0..2 {
        let LayerView::Fp8 { k, v, scales } = memory.layer(layer).unwrap() else { panic!() };
        for page in [1, 2, 3] {
            for (side, (codes, scales)) in [k, v].into_iter().zip(scales).enumerate() {
                let codes = codes.select(0, page).unwrap();
                for i in 0..16 {
                    let scales = scales.select(0, page).unwrap().select(0, i / 8).unwrap();
                    let scale = scales.as_slice::<f32>().unwrap()[i / 4 % 2];
                    // SAFETY: a page of codes is sixteen contiguous bytes.
                    let code = unsafe { *codes.as_ptr().add(i) };
                    let got = mstar_kernels::fp8::e4m3_to_f32(code) * scale;
                    let want = number(layer, side, i);
                    assert!(
                        (got - want).abs() <= want.abs() * 1e-6,
                        "{layer} {page} {side} {i}: {got} {want}"
                    );
                }
            }
        }
    }
    let ints = [0i32; 16];
    let ints = TensorRef::from_slice(&ints, &[2, 2, 4]).unwrap();
    let said = memory.write(0, slots_of(&[2, 3]), KvEntries::Nhd { k: ints, v: ints }, &Stream::cpu());
    assert!(said.unwrap_err().to_string().contains("f32, bf16 or f16"));
}

#[test]
fn latents_in_e4m3_are_tokens_of_bytes() {
    let layout = KvLayout::Mla { kv_lora_rank: 512, qk_rope_head_dim: 64 };
    let config = KvConfig::new(layout, DType::Bf16, 2, 3).quantised();
    let memory = KvMemory::new(&config, Stream::cpu()).unwrap();
    let ckv: Vec<f32> = (0..512).map(|i| 10f32.powi(i / 128) * 0.5).collect();
    let kpe = [3f32; 64];
    let entries = KvEntries::Mla {
        ckv: TensorRef::from_slice(&ckv, &[1, 512]).unwrap(),
        kpe: TensorRef::from_slice(&kpe, &[1, 64]).unwrap(),
    };
    memory.write(0, slots_of(&[5]), entries, &Stream::cpu()).unwrap();
    let LayerView::Mla { latent } = memory.layer(0).unwrap() else { panic!() };
    assert_eq!((latent.shape(), latent.dtype()), (&[3, 2, 656][..], DType::U8));
    let token = latent.select(0, 2).unwrap().select(0, 1).unwrap();
    let token = token.as_slice::<u8>().unwrap();
    for (lane, &want) in ckv.iter().chain(&kpe).enumerate() {
        let got = mstar_kernels::fp8::dequantise_latent(token, 512, lane);
        assert!((got - want).abs() <= want * 1e-6, "lane {lane}: {got} {want}");
    }
}

#[test]
fn pages_move_with_every_plane_and_layer() {
    let memory = memory();
    for layer in 0..2u8 {
        let ones = [f32::from(layer + 1); 16];
        let x = TensorRef::from_slice(&ones, &[2, 2, 4]).unwrap();
        memory.write(layer.into(), slots_of(&[2, 3]), KvEntries::Nhd { k: x, v: x }, &Stream::cpu()).unwrap();
        let scales = [layer + 7; 6];
        let scales = TensorRef::from_slice(&scales, &[2, 3]).unwrap();
        memory.write_plane(1, layer.into(), slots_of(&[2, 3]), scales, &Stream::cpu()).unwrap();
    }
    memory.copy_page(1, 2).unwrap();
    let host = memory.save(&[2]).unwrap();
    memory.load(&host, &[3]).unwrap();
    for layer in 0..2u8 {
        let LayerView::Nhd { v, .. } = memory.layer(layer.into()).unwrap() else { panic!() };
        let scales = memory.plane("scales", layer.into()).unwrap();
        for page in [1, 2, 3] {
            let v = v.select(0, page).unwrap();
            assert_eq!(v.as_slice::<f32>().unwrap(), [f32::from(layer + 1); 16]);
            assert_eq!(scales.select(0, page).unwrap().as_slice::<u8>().unwrap(), [layer + 7; 6]);
        }
    }
    assert!(memory.layer(2).is_err() && memory.plane("keys", 0).is_err());
}

#[test]
fn a_plane_of_some_layers_takes_their_bytes_alone_and_moves_with_its_pages() {
    let mut config = KvConfig::new(KvLayout::Mla { kv_lora_rank: 1, qk_rope_head_dim: 0 }, DType::F32, 2, 4);
    config.num_layers = 3;
    let plane = super::super::PlaneConfig {
        name: "keys".into(),
        dtype: DType::U8,
        width: 5,
        layers: Some(vec![0, 2]),
    };
    config.planes = vec![plane];
    let memory = KvMemory::new(&config, Stream::cpu()).unwrap();
    assert_eq!(memory.bytes(), config.memory_bytes().unwrap());
    for layer in [0u8, 2] {
        let entries = [layer + 1; 10];
        let entries = TensorRef::from_slice(&entries, &[2, 5]).unwrap();
        memory.write_plane(1, layer.into(), slots_of(&[2, 3]), entries, &Stream::cpu()).unwrap();
    }
    memory.copy_page(1, 2).unwrap();
    let host = memory.save(&[2]).unwrap();
    memory.load(&host, &[3]).unwrap();
    for layer in [0u8, 2] {
        let keys = memory.plane("keys", layer.into()).unwrap();
        assert_eq!(keys.select(0, 3).unwrap().as_slice::<u8>().unwrap(), [layer + 1; 10]);
    }
    assert!(memory.plane("keys", 1).is_err() && memory.plane("keys", 3).is_err());
}
