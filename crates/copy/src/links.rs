//! Files with several hard links: which name is copied, and the location of the copy that the other names are
//! linked to.
//!
//! The first name that is found is copied; names that are found meanwhile wait here, so that no worker waits for
//! another.

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
    /// Path below the root of DEST.
    pub(crate) path: PathBuf,
    /// Identity of the file there.
    pub(crate) identity: Identity,
}

/// What a worker does with a name.
#[derive(Debug)]
pub(crate) enum Claim {
    /// The name is the first one: copy it, then call [`Links::copied`] or [`Links::failed`].
    First,
    /// The worker that copies the first name will link it.
    Waits,
    /// The copy exists: link the name to it.
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
    /// Number of names that have not been found yet.
    left: u32,
}

/// Table of files with several hard links.
#[derive(Debug, Default)]
pub(crate) struct Links(Mutex<HashMap<Identity, Row>>);

impl Links {
    /// Registers a name of the file `of`, which has `names` hard links.
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

    /// Sets the copy of the first name; returns the names that wait for it.
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

    /// Reports that the first name could not be copied; returns the name to try next, which then is the first.
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

    /// Replaces the copy, which cannot get another hard link (EMLINK): from now on names are linked to this one.
    pub(crate) fn replace(&self, of: Identity, copied: &Copied) {
        if let Some(Row { state: state @ LinkState::Copied(_), .. }) = self.0.lock().get_mut(&of) {
            *state = LinkState::Copied(copied.clone());
        }
    }
}
