//! What a driver is handed as machine code, looked at first: a driver finds the end of an image by its own header, and would read
//! past the end of one that was cut short.

/// Whether `bytes` hold a 64-bit little-endian ELF file with all of its headers and sections.
pub(super) fn lies_inside(bytes: &[u8]) -> bool {
    let number = |at: usize, width: usize| -> Option<usize> {
        let field = bytes.get(at..at.checked_add(width)?)?;
        Some(field.iter().rev().fold(0usize, |n, &byte| n << 8 | usize::from(byte)))
    };
    let inside = |start: usize, len: usize| start.checked_add(len).is_some_and(|end| end <= bytes.len());
    let sections = || -> Option<bool> {
        let (programs, program_size, program_count) = (number(0x20, 8)?, number(0x36, 2)?, number(0x38, 2)?);
        let (table, size, count) = (number(0x28, 8)?, number(0x3a, 2)?, number(0x3c, 2)?);
        if !inside(programs, program_size * program_count) || !inside(table, size * count) || count == 0 {
            return Some(false);
        }
        for section in 0..count {
            let at = table + section * size;
            let (kind, start, len) = (number(at + 4, 4)?, number(at + 0x18, 8)?, number(at + 0x20, 8)?);
            const NO_BITS: usize = 8;
            if kind != NO_BITS && !inside(start, len) {
                return Some(false);
            }
        }
        Some(true)
    };
    bytes.starts_with(b"\x7fELF\x02\x01") && sections().unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_cut_short_is_refused() {
        // Any ELF file will do; this program is one.
        let whole = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        if !whole.starts_with(b"\x7fELF") {
            return;
        }
        assert!(lies_inside(&whole));
        for cut in [0, 1, 5, 63, 64, whole.len() / 2, whole.len() - 64] {
            assert!(!lies_inside(&whole[..cut]), "{cut} bytes of {}", whole.len());
        }
        assert!(!lies_inside(&[0; 4096]));
    }
}
