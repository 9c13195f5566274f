//! A row alone, in company, elsewhere, in a padded bucket, and in a slot that held another batch: the same bits.

use super::{Family, Row, Setting, each_trial, row, whole};

/// Rows of the batch: as many as a decode bucket has.
const COMPANY: usize = 64;
/// Rows on the emulated device.
const EMULATED_COMPANY: usize = 5;

fn hold(family: &dyn Family, stream: &crate::Stream, dtype: crate::DType) {
    let many = if whole() { COMPANY } else { EMULATED_COMPANY };
    let company = family.company(many);
    let set = Setting::of(dtype);
    let what = format!("{dtype} {}", family.name());
    let all = family.run(stream, &set, &company);
    // The other way round, and elsewhere.
    let elsewhere = Setting { place: 99, ..set.clone() };
    let mut reversed = company.clone();
    reversed.reverse();
    let mut back = family.run(stream, &elsewhere, &reversed);
    back.reverse();
    assert_eq!(all, back, "{what}: reversed and elsewhere");
    // In a bucket; in one where another batch was.
    let others: Vec<Row> = company[..3].iter().map(|of| row(of.id + 500, of.q, of.kv)).collect();
    let mut slots = vec![Setting { before: others, pad: 3, place: 5, ..set.clone() }];
    if whole() {
        assert_eq!(all, family.run(stream, &set, &company), "{what}: twice");
        slots.push(Setting { pad: 37, ..set.clone() });
    }
    for slot in slots {
        assert_eq!(
            all,
            family.run(stream, &slot, &company),
            "{what}: pad {} after {:?}",
            slot.pad,
            slot.before
        );
    }
    // Each kind of row alone: as it is, and where the whole company was before.
    let kinds = if whole() { (0..11).collect() } else { vec![1, 2] };
    for at in kinds {
        let alone = family.run(stream, &elsewhere, &company[at..=at]);
        assert_eq!(alone[..], all[at..=at], "{what}: {:?} alone", company[at]);
    }
    let after = Setting { before: company.clone(), pad: 1, ..set };
    let at = many - 1;
    let alone = family.run(stream, &after, &company[at..=at]);
    assert_eq!(alone[..], all[at..=at], "{what}: {:?} in a bucket of {many}", company[at]);
}

#[test]
fn f40_a_row_has_the_same_bits_alone_in_a_batch_elsewhere_padded_and_in_a_used_slot() {
    each_trial("f40_a_row_has_the_same_bits", hold);
}
