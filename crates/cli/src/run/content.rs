//! What each token *is*: a 64-bit content id, so that equal prompts are equal and forks differ.
//!
//! Nothing here is random and nothing is stored: a token's content is a pure function of where it came from (a
//! block of a recorded prompt, a request's own output, one pass of a denoise) and of its place there. The chained
//! keys made of these contents are what synthetic Q, K and V are generated from, and what `--verify` rebuilds a row
//! from.

use mstar_kernels::synth;

/// Where tokens come from. Two tokens are the same exactly when source and index are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Source {
    /// A block of a recorded prompt, by its hash id: shared by every request that names it.
    Block(u64),
    /// One of the synthetic workload's shared prefixes.
    Shared(u64),
    /// The rest of a request's prompt, which no other request has.
    Prompt(u64),
    /// What a request generates on one of its streams.
    Output {
        /// The request.
        request: u64,
        /// Its stream: 0 is `main`, forks count from 1.
        stream: u64,
    },
    /// One uncommitted pass over a block of output.
    Noise {
        /// The request.
        request: u64,
        /// Its stream.
        stream: u64,
        /// Which pass, counted over the whole request.
        pass: u64,
    },
    /// The nodes of one drafted tree.
    Draft {
        /// The request.
        request: u64,
        /// Its stream.
        stream: u64,
        /// Position of the tree's first level.
        position: u64,
    },
    /// An encoder's context.
    Context(u64),
}

impl Source {
    /// The content of token `index` of this source.
    pub(crate) fn token(self, index: usize) -> u64 {
        let parts = match self {
            Source::Block(id) => [1, id, 0, 0],
            Source::Shared(group) => [2, group, 0, 0],
            Source::Prompt(request) => [3, request, 0, 0],
            Source::Output { request, stream } => [4, request, stream, 0],
            Source::Noise { request, stream, pass } => [5, request, stream, pass],
            Source::Draft { request, stream, position } => [6, request, stream, position],
            Source::Context(request) => [7, request, 0, 0],
        };
        mix(parts.into_iter().fold(0, mix), index as u64)
    }
}

/// A run of tokens from one source, from its first token on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// Where they come from.
    pub(crate) source: Source,
    /// How many.
    pub(crate) len: usize,
}

/// Folds `b` into `a`: the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) over their sum.
pub(crate) fn mix(a: u64, b: u64) -> u64 {
    let mut z = a.rotate_left(23).wrapping_add(b).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A uniform number in `[0, 1)` out of a hash.
pub(crate) fn unit(hash: u64) -> f64 {
    (hash >> 11) as f64 / (1u64 << 53) as f64
}

/// The tokens of one stream and their chained keys, from position 0 on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct StreamContent {
    /// Content of each position.
    pub(crate) tokens: Vec<u64>,
    /// Chained key of each position: a function of every token up to it.
    pub(crate) keys: Vec<u64>,
}

impl StreamContent {
    /// The stream that holds `runs`, one after another.
    pub(crate) fn of(runs: &[Run]) -> StreamContent {
        let mut stream = StreamContent::default();
        for run in runs {
            stream.extend(run.source, 0, run.len);
        }
        stream
    }

    /// Appends tokens `first..first + len` of `source`.
    pub(crate) fn extend(&mut self, source: Source, first: usize, len: usize) {
        for index in first..first + len {
            self.push(source.token(index));
        }
    }

    /// Appends one token.
    pub(crate) fn push(&mut self, token: u64) {
        self.keys.push(chain(self.keys.last().copied(), token));
        self.tokens.push(token);
    }
}

/// The key of a token whose predecessor has the key `parent`; `None` begins a stream.
pub(crate) fn chain(parent: Option<u64>, token: u64) -> u64 {
    synth::chain(parent.unwrap_or(synth::ROOT), token)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_prefixes_have_equal_keys_until_they_part() {
        let block = |id, len| Run { source: Source::Block(id), len };
        let a = StreamContent::of(&[block(1, 4), block(2, 4)]);
        let b = StreamContent::of(&[block(1, 4), block(3, 4)]);
        assert_eq!(a.keys[..4], b.keys[..4]);
        assert!((4..8).all(|i| a.keys[i] != b.keys[i]));
        // The same block after another prefix is other content.
        let c = StreamContent::of(&[block(3, 4), block(2, 4)]);
        assert_eq!(a.tokens[4..], c.tokens[4..]);
        assert!((4..8).all(|i| a.keys[i] != c.keys[i]));
    }

    #[test]
    fn sources_do_not_collide() {
        let request = 5;
        let sources = [
            Source::Block(5),
            Source::Shared(5),
            Source::Prompt(5),
            Source::Output { request, stream: 0 },
            Source::Output { request, stream: 1 },
            Source::Noise { request, stream: 0, pass: 0 },
            Source::Noise { request, stream: 0, pass: 1 },
            Source::Draft { request, stream: 0, position: 0 },
            Source::Draft { request, stream: 0, position: 1 },
            Source::Context(5),
        ];
        let mut seen = std::collections::HashSet::new();
        for source in sources {
            for index in 0..1000 {
                assert!(seen.insert(source.token(index)), "{source:?} {index}");
            }
        }
    }
}
