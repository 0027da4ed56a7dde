//! Operations of the model and their random generation.

use proptest::collection::vec;
use proptest::prelude::*;

/// The names in use: few, so that operations collide.
const NAMES: [&[u8]; 5] = [b"a", b"b", b"c", b"\xff\x80", b"long-name-long-name-long-name-long-name"];

/// A path of one to three of these names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place(Vec<usize>);

impl Place {
    /// All names of the path.
    pub fn whole(&self) -> Vec<&'static [u8]> {
        self.0.iter().map(|index| NAMES[*index]).collect()
    }

    /// The names of the parent directories.
    pub fn parents(&self) -> Vec<&'static [u8]> {
        let mut all = self.whole();
        all.pop();
        all
    }

    /// The last name.
    pub fn last(&self) -> &'static [u8] {
        NAMES[self.0[self.0.len() - 1]]
    }
}

/// One operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// An exclusive creation of a file with a mode.
    Create(Place, u32),
    /// Creation of a directory with a mode.
    Mkdir(Place, u32),
    /// Creation of a symbolic link with a target.
    Symlink(Place, Vec<u8>),
    /// A hard link to the first path at the second.
    Link(Place, Place),
    /// Removal of a file that is no directory.
    Unlink(Place),
    /// Removal of a directory.
    Rmdir(Place),
    /// A rename with flags (0, NOREPLACE, EXCHANGE).
    Rename(Place, Place, u32),
    /// A write at an offset.
    Write(Place, u64, Vec<u8>),
    /// A truncation or extension.
    Truncate(Place, u64),
    /// A change of permission bits.
    Chmod(Place, u32),
    /// Setting an extended attribute.
    Setxattr(Place, &'static [u8], Vec<u8>),
    /// Removal of an extended attribute.
    Removexattr(Place, &'static [u8]),
    /// Reading the whole content.
    Read(Place),
    /// Listing a directory.
    List(Place),
}

fn place() -> impl Strategy<Value = Place> {
    prop_oneof![3 => vec(0..NAMES.len(), 1), 3 => vec(0..NAMES.len(), 2), 1 => vec(0..NAMES.len(), 3)].prop_map(Place)
}

fn key() -> impl Strategy<Value = &'static [u8]> {
    prop_oneof![Just(&b"user.one"[..]), Just(&b"user.two"[..])]
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        4 => (place(), 0..0o1000u32).prop_map(|(at, mode)| Operation::Create(at, mode)),
        4 => (place(), 0..0o1000u32).prop_map(|(at, mode)| Operation::Mkdir(at, mode)),
        1 => (place(), vec(1..=255u8, 1..20)).prop_map(|(at, target)| Operation::Symlink(at, target)),
        2 => (place(), place()).prop_map(|(from, to)| Operation::Link(from, to)),
        2 => place().prop_map(Operation::Unlink),
        2 => place().prop_map(Operation::Rmdir),
        4 => (place(), place(), prop_oneof![2 => Just(0), 1 => Just(1), 1 => Just(2)]).prop_map(|(a, b, flags)| Operation::Rename(a, b, flags)),
        3 => (place(), 0..5_000u64, vec(any::<u8>(), 1..64)).prop_map(|(at, offset, data)| Operation::Write(at, offset, data)),
        2 => (place(), 0..10_000u64).prop_map(|(at, size)| Operation::Truncate(at, size)),
        1 => (place(), 0..0o1000u32).prop_map(|(at, mode)| Operation::Chmod(at, mode)),
        1 => (place(), key(), vec(any::<u8>(), 0..20)).prop_map(|(at, key, value)| Operation::Setxattr(at, key, value)),
        1 => (place(), key()).prop_map(|(at, key)| Operation::Removexattr(at, key)),
        2 => place().prop_map(Operation::Read),
        2 => place().prop_map(Operation::List),
    ]
}

/// Generates up to `most` operations.
pub fn operations(most: usize) -> impl Strategy<Value = Vec<Operation>> {
    vec(operation(), 1..most)
}
