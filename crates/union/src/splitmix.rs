//! SplitMix64 (Steele, Lea, Flood 2014): a pseudo-random generator that accepts any seed.
//!
//! Used by policies with a random choice, for the labels of branches (`identity.rs`), and by tests. Every state
//! is valid, so that threads need only an atomic addition. The labels are stored on branches: the results of
//! [`mix`] must never change.

/// The increment of the state.
pub(crate) const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The output of a state: each bit of the input changes half of the output's bits.
pub(crate) fn mix(value: u64) -> u64 {
    let value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}

/// The generator for tests, which use the same cases each time.
#[cfg(test)]
pub(crate) struct Numbers(pub(crate) u64);

#[cfg(test)]
impl Numbers {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0)
    }

    /// A number below `limit`.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() % limit as u64).unwrap()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_those_of_the_authors() {
        // From their program, seeded with 1234567.
        let mut numbers = Numbers(1_234_567);
        let first = [(); 3].map(|()| numbers.next());
        assert_eq!(first, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }
}
