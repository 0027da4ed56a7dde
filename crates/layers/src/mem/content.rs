//! Content of a file in memory: pages where data was written, holes elsewhere. Pure.

use std::collections::BTreeMap;

/// Bytes of a page.
pub(super) const PAGE: u64 = 4096;
const PAGE_LEN: usize = 4096;
/// Maximum file size, by the range of `off_t`.
pub(super) const SIZE_MAX: u64 = i64::MAX as u64;

/// Content with holes. Invariant: no page lies wholly at or past `size`, and bytes of the last page
/// past `size` are zero.
#[derive(Debug, Default)]
pub(super) struct Content {
    pages: BTreeMap<u64, Box<[u8; PAGE_LEN]>>,
    size: u64,
}

/// Splits a range by pages: page number, offset within it, length.
fn pieces(offset: u64, length: u64) -> impl Iterator<Item = (u64, usize, usize)> {
    let end = offset + length;
    let mut at = offset;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let (page, within) = (at / PAGE, at % PAGE);
        let count = (PAGE - within).min(end - at);
        at += count;
        // Both are at most a page.
        Some((page, within as usize, count as usize))
    })
}

impl Content {
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Allocated units of 512 bytes.
    pub(super) fn blocks(&self) -> u64 {
        self.pages.len() as u64 * (PAGE / 512)
    }

    pub(super) fn read(&self, buffer: &mut [u8], offset: u64) -> usize {
        let length = (buffer.len() as u64).min(self.size.saturating_sub(offset));
        let mut rest = buffer;
        for (page, within, count) in pieces(offset, length) {
            let (now, later) = rest.split_at_mut(count);
            match self.pages.get(&page).and_then(|page| page.get(within..within + count)) {
                Some(bytes) => now.copy_from_slice(bytes),
                None => now.fill(0),
            }
            rest = later;
        }
        // At most the buffer's length.
        length as usize
    }

    /// Writes data; its end must not exceed [`SIZE_MAX`].
    pub(super) fn write(&mut self, data: &[u8], offset: u64) {
        let mut rest = data;
        for (page, within, count) in pieces(offset, data.len() as u64) {
            let (now, later) = rest.split_at(count);
            let page = self.pages.entry(page).or_insert_with(|| Box::new([0; PAGE_LEN]));
            if let Some(bytes) = page.get_mut(within..within + count) {
                bytes.copy_from_slice(now);
            }
            rest = later;
        }
        if !data.is_empty() {
            self.size = self.size.max(offset + data.len() as u64);
        }
    }

    pub(super) fn resize(&mut self, size: u64) {
        if size < self.size {
            self.punch(size, self.size - size);
            self.pages.split_off(&size.div_ceil(PAGE));
        }
        self.size = size;
    }

    /// Makes a range read as zeros and frees whole pages; the size stays.
    pub(super) fn punch(&mut self, offset: u64, length: u64) {
        let length = length.min(self.size.saturating_sub(offset));
        let whole = offset.div_ceil(PAGE)..(offset + length) / PAGE;
        if whole.start < whole.end {
            let mut later = self.pages.split_off(&whole.start);
            let mut rest = later.split_off(&whole.end);
            self.pages.append(&mut rest);
        }
        for edge in [
            (offset, offset.next_multiple_of(PAGE).min(offset + length)),
            ((offset + length) / PAGE * PAGE, offset + length),
        ] {
            let (start, end) = (edge.0.max(offset), edge.1);
            for (page, within, count) in pieces(start, end.saturating_sub(start)) {
                if let Some(bytes) = self.pages.get_mut(&page).and_then(|page| page.get_mut(within..within + count)) {
                    bytes.fill(0);
                }
            }
        }
    }

    /// Finds the first byte at or after `offset` (before the end) that is in a page.
    pub(super) fn next_data(&self, offset: u64) -> Option<u64> {
        if offset >= self.size {
            return None;
        }
        self.pages.range(offset / PAGE..).next().map(|(&page, _)| (page * PAGE).max(offset))
    }

    /// Finds the first byte at or after `offset` (before the end) that is in no page; the end of
    /// the file counts as a hole.
    pub(super) fn next_hole(&self, offset: u64) -> Option<u64> {
        if offset >= self.size {
            return None;
        }
        let mut page = offset / PAGE;
        for &known in self.pages.range(page..).map(|(page, _)| page) {
            if known != page {
                break;
            }
            page += 1;
        }
        Some((page * PAGE).max(offset).min(self.size))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Step {
        Write(u64, Vec<u8>),
        Resize(u64),
        Punch(u64, u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0u64..20_000, prop::collection::vec(any::<u8>(), 0..9000)).prop_map(|(at, data)| Step::Write(at, data)),
            (0u64..30_000).prop_map(Step::Resize),
            (0u64..30_000, 1u64..15_000).prop_map(|(at, length)| Step::Punch(at, length)),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
        #[test]
        fn it_holds_what_a_plain_vector_holds(steps in prop::collection::vec(step(), 1..20)) {
            let (mut content, mut plain) = (Content::default(), Vec::new());
            for step in steps {
                match step {
                    Step::Write(at, data) => {
                        content.write(&data, at);
                        if !data.is_empty() {
                            let (at, end) = (at as usize, at as usize + data.len());
                            plain.resize(plain.len().max(end), 0);
                            plain[at..end].copy_from_slice(&data);
                        }
                    }
                    Step::Resize(size) => {
                        content.resize(size);
                        plain.resize(size as usize, 0);
                    }
                    Step::Punch(at, length) => {
                        content.punch(at, length);
                        let end = plain.len().min((at + length) as usize);
                        if (at as usize) < end {
                            plain[at as usize..end].fill(0);
                        }
                    }
                }
                let mut read = vec![1; plain.len() + 10];
                let count = content.read(&mut read, 0);
                prop_assert_eq!(&read[..count], plain.as_slice());
                prop_assert_eq!(content.size(), plain.len() as u64);
            }
        }
    }

    #[test]
    fn holes_and_data_are_found() {
        let mut content = Content::default();
        content.resize(PAGE * 10);
        content.write(b"x", PAGE * 3 + 5);
        assert_eq!((content.next_data(0), content.next_hole(0)), (Some(PAGE * 3), Some(0)));
        assert_eq!((content.next_data(PAGE * 4), content.next_hole(PAGE * 3 + 7)), (None, Some(PAGE * 4)));
        assert_eq!((content.next_data(PAGE * 10), content.next_hole(PAGE * 10)), (None, None));
        content.write(&[1; 10], PAGE * 9);
        assert_eq!(content.next_hole(PAGE * 9 + 1), Some(PAGE * 10), "the end is a hole");
        assert_eq!(content.blocks(), 16);
        content.punch(0, SIZE_MAX);
        assert_eq!((content.blocks(), content.size()), (0, PAGE * 10));
    }
}
