//! The engine's own pages: head first, handed out from the back.

use mstar_attn_paged::{Result, TensorRef};

/// One sequence: its pages in order, and how many tokens they hold.
#[derive(Default)]
pub struct Sequence {
    pages: Vec<i32>,
    tokens: usize,
}

/// Keys and values, each `[P, G, S, D]`.
pub struct Pool {
    heads: usize,
    page_size: usize,
    width: usize,
    free: Vec<i32>,
    pages: usize,
    keys: Vec<f32>,
    values: Vec<f32>,
    written: usize,
}

/// A number in -1..1 that depends on `i` alone.
pub fn noise(i: usize) -> f32 {
    let mixed = (i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    ((mixed ^ (mixed >> 29)) >> 40) as f32 / (1 << 23) as f32 - 1.0
}

impl Pool {
    pub fn new(pages: usize, heads: usize, page_size: usize, width: usize) -> Pool {
        let size = pages * heads * page_size * width;
        Pool {
            heads,
            page_size,
            width,
            free: (0..pages as i32).collect(),
            pages,
            keys: vec![f32::NAN; size], // what nobody wrote must reach no result
            values: vec![f32::NAN; size],
            written: 0,
        }
    }

    pub fn pages(&self) -> usize {
        self.pages
    }

    fn at(&self, page: i32, head: usize, slot: usize) -> usize {
        ((page as usize * self.heads + head) * self.page_size + slot) * self.width
    }

    /// Writes one more token's keys and values.
    pub fn append(&mut self, sequence: &mut Sequence) -> std::result::Result<(), &'static str> {
        let slot = sequence.tokens % self.page_size;
        if slot == 0 {
            sequence.pages.push(self.free.pop().ok_or("the pool is empty")?);
        }
        let page = *sequence.pages.last().ok_or("a sequence with tokens has pages")?;
        for head in 0..self.heads {
            let at = self.at(page, head, slot);
            for lane in 0..self.width {
                self.keys[at + lane] = noise(2 * self.written);
                self.values[at + lane] = noise(2 * self.written + 1);
                self.written += 1;
            }
        }
        sequence.tokens += 1;
        Ok(())
    }

    /// `kv_indptr`, `kv_indices` and `kv_last_page_len` of the sequences.
    pub fn table(&self, sequences: &[Sequence]) -> (Vec<i32>, Vec<i32>, Vec<i32>) {
        let mut indptr = vec![0];
        let (mut indices, mut last) = (Vec::new(), Vec::new());
        for sequence in sequences {
            indices.extend(&sequence.pages);
            indptr.push(indices.len() as i32);
            let full = sequence.pages.len().saturating_sub(1) * self.page_size;
            last.push((sequence.tokens - full) as i32);
        }
        (indptr, indices, last)
    }

    /// `[P, S, G, D]` by strides: the pool is not copied.
    fn view<'a>(&self, data: &'a [f32]) -> Result<TensorRef<'a>> {
        let view = TensorRef::from_slice(data, &[self.pages, self.heads, self.page_size, self.width])?;
        Ok(view.transpose(1, 2))
    }

    pub fn keys(&self) -> Result<TensorRef<'_>> {
        self.view(&self.keys)
    }

    pub fn values(&self) -> Result<TensorRef<'_>> {
        self.view(&self.values)
    }

    /// What attention is, for one query head.
    pub fn plain_attention(&self, sequence: &Sequence, q: &[f32], head: usize) -> Vec<f32> {
        let places: Vec<usize> = (0..sequence.tokens)
            .map(|t| self.at(sequence.pages[t / self.page_size], head, t % self.page_size))
            .collect();
        let scale = 1.0 / (self.width as f64).sqrt();
        let scores: Vec<f64> = places
            .iter()
            .map(|&at| {
                scale * (0..self.width).map(|d| f64::from(q[d]) * f64::from(self.keys[at + d])).sum::<f64>()
            })
            .collect();
        let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - most).exp()).collect();
        let total: f64 = weights.iter().sum();
        (0..self.width)
            .map(|d| {
                let sum: f64 =
                    places.iter().zip(&weights).map(|(&at, w)| w * f64::from(self.values[at + d])).sum();
                (sum / total) as f32
            })
            .collect()
    }
}
