//! Files with several names: which of them is copied, and where the copy is for the other names to
//! be linked to.
//!
//! The first name that is met is copied; names that are met meanwhile wait here, so that no worker
//! waits for another.

use crate::{metadata::Identity, pair::Pair};
use parking_lot::Mutex;
use std::{collections::HashMap, path::PathBuf, sync::Arc};

/// A name of a file whose copy is being made under another name.
#[derive(Debug)]
pub(crate) struct Further {
    pub(crate) pair: Arc<Pair>,
    pub(crate) name: Box<[u8]>,
}

/// The copy of a file with several names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Copied {
    /// Below the root of DEST.
    pub(crate) path: PathBuf,
    /// Which file it is there.
    pub(crate) identity: Identity,
}

/// What is to be done with a name.
#[derive(Debug)]
pub(crate) enum Claim {
    /// It is the first: copy it, then say so with [`Links::copied`] or [`Links::failed`].
    First,
    /// Whoever copies the first will see to it.
    Waits,
    /// The copy is there: link to it.
    Copied(Copied),
}

#[derive(Debug)]
enum LinkState {
    Copying(Vec<Further>),
    Copied(Copied),
}

#[derive(Debug)]
struct Row {
    state: LinkState,
    /// Names that have not been met yet.
    left: u32,
}

/// The table.
#[derive(Debug, Default)]
pub(crate) struct Links(Mutex<HashMap<Identity, Row>>);

impl Links {
    /// A name of the file `of`, which has `names` in all.
    pub(crate) fn claim(&self, of: Identity, names: u32, pair: &Arc<Pair>, name: &[u8]) -> Claim {
        let mut rows = self.0.lock();
        let Some(row) = rows.get_mut(&of) else {
            rows.insert(of, Row { state: LinkState::Copying(Vec::new()), left: names.saturating_sub(1) });
            return Claim::First;
        };
        row.left = row.left.saturating_sub(1);
        let last = row.left == 0;
        match &mut row.state {
            LinkState::Copying(waiting) => {
                waiting.push(Further { pair: Arc::clone(pair), name: name.into() });
                Claim::Waits
            }
            LinkState::Copied(copied) => {
                let copied = copied.clone();
                if last {
                    rows.remove(&of);
                }
                Claim::Copied(copied)
            }
        }
    }

    /// The first name is there; answers the names that wait for it.
    pub(crate) fn copied(&self, of: Identity, copied: &Copied) -> Vec<Further> {
        let mut rows = self.0.lock();
        let Some(row) = rows.get_mut(&of) else { return Vec::new() };
        let waiting = match std::mem::replace(&mut row.state, LinkState::Copied(copied.clone())) {
            LinkState::Copying(waiting) => waiting,
            LinkState::Copied(_) => Vec::new(),
        };
        if row.left == 0 {
            rows.remove(&of);
        }
        waiting
    }

    /// The first name could not be copied; answers the name to try next, which then is the first.
    pub(crate) fn failed(&self, of: Identity) -> Option<Further> {
        let mut rows = self.0.lock();
        let next = match rows.get_mut(&of).map(|row| &mut row.state) {
            Some(LinkState::Copying(waiting)) => waiting.pop(),
            _ => None,
        };
        if next.is_none() {
            rows.remove(&of);
        }
        next
    }

    /// The copy cannot have another name (too many already): from now on this one gets them.
    pub(crate) fn replace(&self, of: Identity, copied: &Copied) {
        if let Some(Row { state: state @ LinkState::Copied(_), .. }) = self.0.lock().get_mut(&of) {
            *state = LinkState::Copied(copied.clone());
        }
    }
}
