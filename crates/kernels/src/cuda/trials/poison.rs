//! Memory that belongs to no row may hold NaN: pages, slots past a row's last key, blocks that nobody sees, keys that nobody
//! picks, queries of padding, workspaces, outputs, and the gaps between. Not a bit of a result changes.

use super::{NAN, Setting, ZERO, each_trial, whole};

#[test]
fn f03_nan_in_whatever_no_row_owns_changes_no_bit() {
    each_trial("f03_nan_in_whatever_no_row_owns", |family, stream, dtype| {
        let rows = family.company(if whole() { 22 } else { 6 });
        for pad in if whole() { vec![0, 5] } else { vec![5] } {
            let clean = Setting { junk: ZERO, pad, ..Setting::of(dtype) };
            let poisoned = Setting { junk: NAN, ..clean.clone() };
            let [clean, poisoned] = [clean, poisoned].map(|set| family.run(stream, &set, &rows));
            assert_eq!(clean, poisoned, "{dtype} {} pad {pad}", family.name());
        }
    });
}
