//! A hash over every finished request's outputs, so that two runs can be compared bit for bit.
//!
//! A request's digest sums a hash of each of its output vectors, keyed by what was computed (attention resource,
//! layer, stream, position, pass): the order of steps and neighbours does not matter, the bits do. The run's digest
//! sums the hashes of (request id, its digest) over the requests that finished.

use super::content::mix;

/// Where an output vector belongs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// Which attention resource, in the order of the spec.
    pub(crate) attention: usize,
    /// Which layer.
    pub(crate) layer: usize,
    /// Which stream of the request.
    pub(crate) stream: usize,
    /// Absolute position of the query.
    pub(crate) position: usize,
    /// Uncommitted passes before this one.
    pub(crate) pass: usize,
}

/// The hash of one query's `[H, Dv]` output (as bytes) and `[H]` lse.
pub(crate) fn vector(place: Place, o: &[u8], lse: &[f32]) -> u64 {
    let Place { attention, layer, stream, position, pass } = place;
    let mut hash = [attention, layer, stream, position, pass]
        .into_iter()
        .fold(0x6d73_7461, |h, part| mix(h, part as u64));
    let mut words = o.chunks_exact(8);
    for word in &mut words {
        hash = fold(hash, u64::from_le_bytes(word.try_into().expect("eight bytes")));
    }
    let mut last = [0u8; 8];
    last[..words.remainder().len()].copy_from_slice(words.remainder());
    hash = fold(hash, u64::from_le_bytes(last));
    lse.iter().fold(hash, |hash, lse| fold(hash, u64::from(lse.to_bits())))
}

/// One multiplication a word: the 128-bit product folded, as in wyhash.
fn fold(hash: u64, word: u64) -> u64 {
    let wide = u128::from(hash ^ 0xa076_1d64_78bd_642f) * u128::from(word ^ 0xe703_7ed1_a0b4_28db);
    (wide as u64 ^ (wide >> 64) as u64).wrapping_add(hash.rotate_left(17))
}

/// The run's digest so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RunDigest(u64);

impl RunDigest {
    /// Adds a finished request.
    pub(crate) fn add(&mut self, request: &str, digest: u64) {
        let name = request.bytes().fold(1, |hash, byte| mix(hash, u64::from(byte)));
        self.0 = self.0.wrapping_add(mix(name, digest));
    }

    /// Sixteen hexadecimal digits.
    pub(crate) fn hex(self) -> String {
        format!("{:016x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_and_every_place_counts() {
        let place = Place { attention: 0, layer: 1, stream: 0, position: 7, pass: 0 };
        let (o, lse) = (vec![3u8; 37], vec![1.0f32, 2.0]);
        let base = vector(place, &o, &lse);
        for byte in 0..o.len() {
            let mut other = o.clone();
            other[byte] ^= 1;
            assert_ne!(vector(place, &other, &lse), base, "byte {byte}");
        }
        assert_ne!(vector(place, &o, &[1.0, -2.0]), base);
        assert_ne!(vector(Place { position: 8, ..place }, &o, &lse), base);
        assert_ne!(vector(Place { layer: 2, ..place }, &o, &lse), base);
        assert_ne!(vector(Place { pass: 1, ..place }, &o, &lse), base);
    }

    #[test]
    fn the_order_of_requests_does_not_count_but_the_pairing_does() {
        let of = |pairs: &[(&str, u64)]| {
            let mut digest = RunDigest::default();
            pairs.iter().for_each(|(name, hash)| digest.add(name, *hash));
            digest.hex()
        };
        assert_eq!(of(&[("r0", 5), ("r1", 6)]), of(&[("r1", 6), ("r0", 5)]));
        assert_ne!(of(&[("r0", 5), ("r1", 6)]), of(&[("r0", 6), ("r1", 5)]));
        assert_eq!(of(&[]).len(), 16);
    }
}
