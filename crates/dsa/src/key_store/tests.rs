use super::*;

fn store() -> IndexKeyStore {
    IndexKeyStore::new(IndexFormat::F32, 2).unwrap()
}

/// Keys that say their position and who wrote them.
fn chunk(from: usize, n: usize, by: f32) -> Vec<f32> {
    (from..from + n).flat_map(|position| [position as f32, by]).collect()
}

fn append(
    store: &mut IndexKeyStore,
    request: &str,
    layer: usize,
    from: usize,
    n: usize,
    by: f32,
) -> Result<()> {
    let keys = chunk(from, n, by);
    store.append(&request.into(), layer, TensorRef::from_slice(&keys, &[n, 2]).unwrap(), from)
}

fn history(store: &IndexKeyStore, request: &str, layer: usize, length: usize) -> Vec<f32> {
    store.history(&request.into(), layer, length).unwrap().as_slice::<f32>().unwrap().to_vec()
}

#[test]
fn chunks_of_requests_and_layers_grow_apart() {
    let mut store = store();
    append(&mut store, "a", 0, 0, 3, 1.0).unwrap();
    append(&mut store, "a", 2, 0, 1, 2.0).unwrap();
    append(&mut store, "b", 0, 0, 2, 3.0).unwrap();
    append(&mut store, "a", 0, 3, 40, 1.0).unwrap();
    assert_eq!(history(&store, "a", 0, 43), chunk(0, 43, 1.0));
    assert_eq!(history(&store, "a", 2, 1), chunk(0, 1, 2.0));
    assert_eq!(history(&store, "b", 0, 1), chunk(0, 1, 3.0));
    let tokens = |request: &str, layer| store.tokens(&request.into(), layer);
    assert_eq!(
        (tokens("a", 0), tokens("a", 2), tokens("b", 0), tokens("b", 2), tokens("c", 0)),
        (43, 1, 2, 0, 0)
    );
    assert_eq!(store.tracked_requests(), ["a", "b"].map(RequestId::from).into());
}

#[test]
fn a_gap_is_refused_and_changes_nothing() {
    let mut store = store();
    append(&mut store, "a", 0, 0, 3, 1.0).unwrap();
    let said = append(&mut store, "a", 0, 4, 1, 1.0).unwrap_err().to_string();
    assert!(
        said.contains("request a, layer 0") && said.contains("position 4") && said.contains("the 3"),
        "{said}"
    );
    assert!(append(&mut store, "b", 1, 1, 1, 1.0).is_err());
    assert_eq!(history(&store, "a", 0, 3), chunk(0, 3, 1.0));
    assert_eq!(store.tracked_requests(), ["a"].map(RequestId::from).into());
}

#[test]
fn a_chunk_run_again_replaces_itself_and_what_came_after() {
    let mut store = store();
    append(&mut store, "a", 0, 0, 6, 1.0).unwrap();
    append(&mut store, "a", 0, 2, 2, 9.0).unwrap();
    let mut expected = chunk(0, 2, 1.0);
    expected.extend(chunk(2, 2, 9.0));
    assert_eq!(store.tokens(&"a".into(), 0), 4);
    assert_eq!(history(&store, "a", 0, 4), expected);
    append(&mut store, "a", 0, 4, 0, 9.0).unwrap();
    assert_eq!(store.tokens(&"a".into(), 0), 4);
}

#[test]
fn history_is_a_view_and_never_longer_than_what_is_stored() {
    let mut store = store();
    append(&mut store, "a", 0, 0, 3, 1.0).unwrap();
    let id = RequestId::from("a");
    let (short, long) = (store.history(&id, 0, 1).unwrap(), store.history(&id, 0, 3).unwrap());
    assert_eq!(short.as_ptr(), long.as_ptr());
    let said = store.history(&id, 0, 4).unwrap_err();
    assert_eq!(said, Error::History { request: id.clone(), layer: 0, length: 4, stored: 3 });
    assert_eq!(store.history(&id, 7, 0).unwrap().shape(), [0, 2]);
    assert!(store.history(&id, 7, 1).is_err());
}

#[test]
fn evicting_is_idempotent() {
    let mut store = store();
    append(&mut store, "a", 0, 0, 3, 1.0).unwrap();
    store.evict(&"a".into());
    store.evict(&"a".into());
    store.evict(&"never".into());
    assert_eq!((store.tokens(&"a".into(), 0), store.bytes()), (0, 0));
    assert!(store.tracked_requests().is_empty());
    append(&mut store, "a", 0, 0, 1, 2.0).unwrap();
    assert_eq!(history(&store, "a", 0, 1), chunk(0, 1, 2.0));
}

#[test]
fn reserved_room_is_used_without_another_allocation_and_keeps_what_is_there() {
    let mut store = store();
    append(&mut store, "a", 0, 0, 3, 1.0).unwrap();
    store.reserve(&"a".into(), 0, 100).unwrap();
    assert_eq!(history(&store, "a", 0, 3), chunk(0, 3, 1.0));
    let address = store.history(&"a".into(), 0, 3).unwrap().as_ptr();
    append(&mut store, "a", 0, 3, 97, 1.0).unwrap();
    assert_eq!(store.history(&"a".into(), 0, 3).unwrap().as_ptr(), address);
}

#[test]
fn keys_are_kept_in_the_stores_format() {
    let mut store = IndexKeyStore::new(IndexFormat::Fp8, 4).unwrap();
    let keys = [1.0f32, -2.0, 0.5, 448.0, 0.0, 0.0, 0.0, 0.0];
    store.append(&"a".into(), 0, TensorRef::from_slice(&keys, &[2, 4]).unwrap(), 0).unwrap();
    let stored = store.history(&"a".into(), 0, 2).unwrap();
    assert_eq!((stored.shape(), stored.dtype()), (&[2, 8][..], DType::U8));
    let stored = stored.as_slice::<u8>().unwrap();
    let lanes = [0, 1, 2, 3].map(|lane| mstar_kernels::dsa::dequantise_key(&stored[..8], 4, lane));
    assert_eq!(lanes, [1.0, -2.0, 0.5, 448.0]);
    assert!(
        IndexKeyStore::new(IndexFormat::Fp8, 6).is_err() && IndexKeyStore::new(IndexFormat::F32, 0).is_err()
    );
    let said = store.append(&"a".into(), 0, TensorRef::from_slice(&keys, &[4, 2]).unwrap(), 2).unwrap_err();
    assert!(said.to_string().contains("keys: expected shape"), "{said}");
    assert_eq!(store.tokens(&"a".into(), 0), 2);
}
