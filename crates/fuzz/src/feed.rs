//! Inputs without libFuzzer: the corpus, then mutations of it by a generator with a fixed seed, so
//! that every run of the tests has the same inputs.

use super::Target;

/// The longest input, bytes.
const LONGEST: usize = 4096;

/// Numbers that are often limits of decoders.
const EDGES: [u64; 12] = [
    0,
    1,
    0x7f,
    0x80,
    0xff,
    0x7fff,
    0xffff,
    0x7fff_ffff,
    0xffff_ffff,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    0xffff_ffff_ffff_ffff,
];

/// Pseudo-random numbers (xorshift).
#[derive(Clone, Debug)]
pub struct Generator(u64);

impl Generator {
    /// Creates a generator; the same seed gives the same numbers.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Returns a number below a limit; 0 where that is 0.
    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() >> 16).unwrap_or(0).checked_rem(limit).unwrap_or(0)
    }

    /// Returns a mutation of inputs of the corpus.
    #[must_use]
    pub fn input(&mut self, corpus: &[Vec<u8>]) -> Vec<u8> {
        let mut input = corpus.get(self.below(corpus.len() + 1)).cloned().unwrap_or_default();
        for _ in 0..=self.below(6) {
            self.mutate(&mut input, corpus);
        }
        input.truncate(LONGEST);
        input
    }

    fn mutate(&mut self, input: &mut Vec<u8>, corpus: &[Vec<u8>]) {
        let at = self.below(input.len() + 1);
        let end = (at + self.below(16)).min(input.len());
        match self.below(8) {
            0 => {
                if let Some(byte) = input.get_mut(at) {
                    *byte ^= 1 << self.below(8);
                }
            }
            1 => {
                let byte = self.next() as u8;
                if let Some(place) = input.get_mut(at) {
                    *place = byte;
                }
            }
            2 => drop(input.drain(at..end)),
            3 => {
                let piece: Vec<u8> = input.get(at..end).unwrap_or_default().to_vec();
                let to = self.below(input.len() + 1);
                drop(input.splice(to..to, piece));
            }
            4 => {
                let length = self.below(9);
                let bytes: Vec<u8> = (0..length).map(|_| self.next() as u8).collect();
                drop(input.splice(at..at, bytes));
            }
            5 => {
                // A number at a limit, of any length and in either byte order, overwrites bytes.
                let number = EDGES.get(self.below(EDGES.len())).copied().unwrap_or_default();
                let width = 1 << self.below(4);
                let mut bytes: Vec<u8> = number.to_le_bytes().into_iter().take(width).collect();
                if self.below(2) == 0 {
                    bytes.reverse();
                }
                let end = (at + width).min(input.len());
                drop(input.splice(at..end, bytes));
            }
            6 => input.truncate(at),
            _ => {
                let other = corpus.get(self.below(corpus.len())).map(Vec::as_slice).unwrap_or_default();
                let from = self.below(other.len() + 1);
                let until = (from + self.below(64)).min(other.len());
                let piece: Vec<u8> = other.get(from..until).unwrap_or_default().to_vec();
                drop(input.splice(at..end, piece));
            }
        }
    }
}

/// Runs the target on the corpus, then on so many mutations of it. `begun` gets each input before
/// the target does, so that an input which kills the process is known.
pub fn feed(target: Target, corpus: &[Vec<u8>], inputs: u64, begun: &mut dyn FnMut(&[u8])) {
    for kept in corpus {
        begun(kept);
        target(kept);
    }
    let mut generator = Generator::new(0x9e37_79b9_7f4a_7c15);
    for _ in 0..inputs {
        let input = generator.input(corpus);
        begun(&input);
        target(&input);
    }
}
