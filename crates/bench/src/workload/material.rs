//! Content of big files: incompressible bytes, and text that compresses about as well as real text.

/// Size of a supply. Its blocks are used one after the other, and again after this many bytes, which is beyond the
/// window of any compressor.
const BYTES: usize = 32 << 20;
/// Number of words in the text.
const WORDS: u64 = 4000;
const SYLLABLES: [&str; 32] = [
    "an", "be", "con", "de", "ed", "en", "er", "for", "ing", "in", "is", "le", "men", "na", "nd", "of", "on", "or",
    "per", "pro", "ra", "re", "se", "st", "ta", "te", "ter", "ti", "tion", "to", "ve", "y",
];

/// Kind of content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Material {
    /// Random bytes.
    Random,
    /// Words, common ones more often.
    Text,
}

/// SplitMix64 random numbers: the same in every run.
#[derive(Debug)]
pub struct Numbers(u64);

impl Numbers {
    /// Starts with `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next number.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }
}

impl Material {
    /// Makes a supply.
    pub fn supply(self) -> Supply {
        self.supply_of(BYTES)
    }

    fn supply_of(self, bytes: usize) -> Supply {
        let memory = match self {
            Self::Random => random(bytes),
            Self::Text => text(bytes),
        };
        Supply { memory }
    }
}

/// A supply of content.
#[derive(Debug)]
pub struct Supply {
    memory: Vec<u8>,
}

impl Supply {
    /// Returns the block of `bytes` at `offset` of an endless file.
    pub fn block(&self, offset: u64, bytes: usize) -> &[u8] {
        let blocks = (self.memory.len() / bytes.max(1)).max(1) as u64;
        // Each pass over the supply is shifted a little, so that its blocks differ from those of the last pass.
        let number = offset / bytes.max(1) as u64;
        let shift = usize::try_from(number / blocks * 7 % bytes.max(1) as u64).unwrap_or(0);
        let start = usize::try_from(number % blocks).unwrap_or(0) * bytes;
        let end = start + shift + bytes;
        let range = if end <= self.memory.len() { start + shift..end } else { start..start + bytes };
        self.memory.get(range).unwrap_or_default()
    }
}

fn random(bytes: usize) -> Vec<u8> {
    let mut numbers = Numbers::new(1);
    let mut memory = Vec::with_capacity(bytes + 8);
    while memory.len() < bytes {
        memory.extend_from_slice(&numbers.next().to_le_bytes());
    }
    memory.truncate(bytes);
    memory
}

fn text(bytes: usize) -> Vec<u8> {
    let mut numbers = Numbers::new(2);
    let words: Vec<String> = (0..WORDS).map(|_| word(&mut numbers)).collect();
    let mut memory = Vec::with_capacity(bytes + 64);
    let mut column = 0;
    while memory.len() < bytes {
        // An exponent with uniform distribution: the word of rank n has a frequency of about 1/n.
        let width = numbers.below(u64::from(WORDS.ilog2()) + 1);
        let rank = numbers.below(1 << width);
        let word = usize::try_from(rank % WORDS).ok().and_then(|rank| words.get(rank)).map_or("", String::as_str);
        memory.extend_from_slice(word.as_bytes());
        column += word.len() + 1;
        let end: &[u8] = match numbers.below(12) {
            0 => b", ",
            1 => b". ",
            _ if column > 90 => b"\n",
            _ => b" ",
        };
        column = if end == b"\n" { 0 } else { column };
        memory.extend_from_slice(end);
    }
    memory.truncate(bytes);
    memory
}

fn word(numbers: &mut Numbers) -> String {
    let syllables = 1 + numbers.below(3);
    let syllable =
        |number: u64| usize::try_from(number).ok().and_then(|number| SYLLABLES.get(number)).copied().unwrap_or("a");
    (0..syllables).map(|_| syllable(numbers.below(SYLLABLES.len() as u64))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn blocks_are_whole_and_differ() {
        for material in [Material::Random, Material::Text] {
            let supply = material.supply_of(1 << 20);
            let blocks: HashSet<&[u8]> = (0..512).map(|number| supply.block(number * 8192, 8192)).collect();
            assert!(blocks.len() > 500 && blocks.iter().all(|block| block.len() == 8192), "{} blocks", blocks.len());
        }
    }

    #[test]
    fn text_is_made_of_words_and_random_bytes_are_not() {
        let text = Material::Text.supply_of(1 << 20);
        let words: HashSet<&[u8]> = text.memory.split(|byte| !byte.is_ascii_lowercase()).collect();
        assert!(words.len() > 500 && words.len() < 5000, "{}", words.len());
        let mut counts = [0_u32; 256];
        Material::Random.supply_of(1 << 20).memory.iter().for_each(|byte| counts[usize::from(*byte)] += 1);
        assert!(counts.iter().all(|count| (3500..4700).contains(count)), "{counts:?}");
    }
}
