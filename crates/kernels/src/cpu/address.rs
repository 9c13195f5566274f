//! Where a token lies in a paged cache: the one place that multiplies a page id by a stride.

/// Elements from the start of a cache to token `slot` of page `page`. All arithmetic is 64-bit: a pool of
/// 131,073 pages of 64 latents of width 576 already passes 2^32 elements.
#[inline]
pub const fn token_offset(page: u32, slot: u32, page_stride: u64, token_stride: u64) -> u64 {
    page as u64 * page_stride + slot as u64 * token_stride
}

/// The page and the slot in it that a cache slot `page * page_size + slot` names.
#[inline]
pub const fn split_slot(slot: u64, page_size: u64) -> (u32, u32) {
    ((slot / page_size) as u32, (slot % page_size) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f09_offsets_do_not_wrap_at_32_bits() {
        let (token, page) = (576, 64 * 576);
        assert_eq!(token_offset(131_072, 0, page, token), 4_831_838_208);
        assert_eq!(token_offset(58_254, 0, page, token), 2_147_475_456);
        assert_eq!(token_offset(58_255, 0, page, token), 2_147_512_320);
        assert_eq!(token_offset(131_072, 63, page, token), 4_831_838_208 + 63 * 576);
        assert_eq!(token_offset(u32::MAX, 0, 1 << 32, 1), (u32::MAX as u64) << 32);
        assert_eq!(split_slot(131_072 * 64 + 5, 64), (131_072, 5));
    }
}
