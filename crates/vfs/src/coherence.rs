//! Coherence: who else can change the files below, and how a change is noticed.

use crate::{Attr, FileId, Node};

/// How long an answer stays true; a front end turns it into cache timeouts.
///
/// Ordered: a stack is as coherent as its weakest layer, which has the greatest value (`max`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Coherence {
    /// Nobody else changes it while we serve it (aufs: `udba=none`): cache without limit.
    Exclusive,
    /// Others may change it, and every change arrives on the invalidation channel (`udba=notify`): cache, and obey
    /// the channel.
    Watched,
    /// Others may change it unnoticed (`udba=reval`): revalidate each time.
    Shared,
    /// The answer differs from caller to caller: never cache, never share between callers.
    PerCaller,
}

/// Subject of a coherence query.
#[derive(Clone, Copy, Debug)]
pub enum Scope<'a> {
    /// The names in this directory: positive and negative lookups and listings.
    Names(&'a Node),
    /// These attributes of this file, and its content.
    Attributes(&'a Node, &'a Attr),
}

/// A change that did not come through the front end that receives it. Sent by layers that watch the files below,
/// after the change is visible to new lookups. Front ends that do not know the file ignore it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Invalidation {
    /// A name in a directory appeared, vanished or now means another file.
    Entry {
        /// The directory.
        parent: FileId,
        /// The name, without checks.
        name: Box<[u8]>,
    },
    /// A name in a directory has to be dropped at once, with all cached state of its file, even if the file still
    /// exists.
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
    /// Any name in any directory may refer to another file, or none; the files themselves have not changed.
    Names,
    /// Anything may have changed (a watch overflowed, rules were reloaded).
    Everything,
}
