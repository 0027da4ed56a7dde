//! Who else can change what lies below, and what happens when they do.

use crate::{Attr, FileId, Node};

/// How long an answer stays true; a door turns it into cache times.
///
/// Ordered: a stack is as coherent as its weakest part, which is the greatest value (`max`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Coherence {
    /// Nobody else changes it while we serve it (aufs: `udba=none`): cache for as long as you like.
    Exclusive,
    /// Others may change it, and every such change arrives on the invalidation channel
    /// (`udba=notify`): cache, and obey the channel.
    Watched,
    /// Others may change it unnoticed (`udba=reval`): ask each time.
    Shared,
    /// The answer differs from caller to caller: never cache, never share between callers.
    PerCaller,
}

/// What a coherence question is about.
#[derive(Clone, Copy, Debug)]
pub enum Scope<'a> {
    /// The names in this directory: positive and negative look-ups and listings.
    Names(&'a Node),
    /// These attributes of this file, and its content.
    Attributes(&'a Node, &'a Attr),
}

/// A change that did not come through the door that is told of it. Sent by layers that watch what
/// is below, after the change is visible to new look-ups. Doors that do not know the file ignore
/// it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Invalidation {
    /// A name in a directory appeared, vanished or now means another file.
    Entry {
        /// The directory.
        parent: FileId,
        /// The name, without checks.
        name: Box<[u8]>,
    },
    /// A name in a directory is given up at once, with all that is kept of what it led to, also if
    /// it still leads there.
    Forget {
        /// The directory.
        parent: FileId,
        /// The name, without checks.
        name: Box<[u8]>,
    },
    /// The attributes of a file changed (also: extended attributes).
    Attributes {
        /// The file.
        id: FileId,
    },
    /// The content of a file changed, and with it its attributes.
    Content {
        /// The file.
        id: FileId,
    },
    /// Any name in any directory may mean another file, or none; what the files themselves are has
    /// not changed.
    Names,
    /// Anything may have changed (a watch overflowed, rules were reloaded).
    Everything,
}
