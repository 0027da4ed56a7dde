//! The entry of a known file: identity, and where it was last seen.
//!
//! Made by look-ups, listings and creations; owned by the holders of the [`nacre_vfs::Node`]. No
//! descriptor per file. A file with one name of at most 22 bytes takes one allocation of 96 bytes;
//! data that few files need (more names, a directory's descriptor, open files) is behind a pointer.
//! Invariants: the chain of parents ends at the root without a cycle (kept by [`HostNode::adopt`]
//! alone); a lock of one node is never held while another is taken.

use super::{file::HostFile, held::Held, stat, watch::Lease};
use nacre_vfs::{FileId, Kind};
use parking_lot::Mutex;
use std::sync::{Arc, Weak};

/// Maximum number of ancestors that are followed.
const DEPTH_MAX: usize = 1 << 17;

/// Maximum number of names kept for one hard-linked file.
const PLACES_MAX: usize = 8;
/// How many new names come until older ones that were all good are checked again.
const UNCHECKED: u8 = 7;

/// Maximum length of a name without an allocation of its own.
const INLINE: usize = 22;

/// A name of 1 to 255 bytes in 24.
#[derive(Clone, Debug)]
pub(super) enum ShortName {
    Inline(u8, [u8; INLINE]),
    Long(Box<[u8]>),
}

impl ShortName {
    pub(super) fn new(name: &[u8]) -> ShortName {
        let mut bytes = [0; INLINE];
        match (u8::try_from(name.len()), bytes.get_mut(..name.len())) {
            (Ok(length), Some(room)) => {
                room.copy_from_slice(name);
                ShortName::Inline(length, bytes)
            }
            _ => ShortName::Long(name.into()),
        }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            ShortName::Inline(length, bytes) => bytes.get(..usize::from(*length)).unwrap_or_default(),
            ShortName::Long(bytes) => bytes,
        }
    }
}

/// A name in a directory.
#[derive(Clone, Debug)]
pub(super) struct NodePlace {
    pub(super) parent: Arc<HostNode>,
    pub(super) name: ShortName,
}

impl NodePlace {
    fn is(&self, other: &NodePlace) -> bool {
        Arc::ptr_eq(&self.parent, &other.parent) && self.name.bytes() == other.name.bytes()
    }
}

/// Data that only some files have.
#[derive(Default)]
struct Extra {
    /// Older names, newest first.
    places: Vec<NodePlace>,
    /// How many new names come before the older ones, which all led to the file, are checked again.
    unchecked: u8,
    /// A directory's descriptor, and whether it was used since the last round of eviction.
    descriptor: Option<(Arc<Held>, bool)>,
    /// Set for a removed directory that keeps its descriptor.
    nameless: Option<Arc<()>>,
    /// The watch of a directory.
    watch: Option<Lease>,
    /// Open files: the last access to a file whose names have been removed.
    open: Vec<Weak<HostFile>>,
}

impl Extra {
    fn is_empty(&self) -> bool {
        self.places.is_empty() && self.descriptor.is_none() && self.watch.is_none() && self.open.is_empty()
    }
}

#[derive(Default)]
struct NodeState {
    /// The newest name; the root and nameless files have none.
    place: Option<NodePlace>,
    extra: Option<Box<Extra>>,
}

/// A file of the host (see the file's head).
pub(super) struct HostNode {
    ino: u64,
    generation: u64,
    device: u32,
    kind: Kind,
    resolved: bool,
    root: bool,
    /// It had more than one name when it was found.
    linked: bool,
    state: Mutex<NodeState>,
}

impl std::fmt::Debug for HostNode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostNode").field("id", &self.id()).field("kind", &self.kind).finish_non_exhaustive()
    }
}

impl HostNode {
    /// Makes a node. `device` is that of [`stat::device`], also for a link shown as its target
    /// (then the link's own).
    pub(super) fn new(id: FileId, device: u32, kind: Kind, linked: bool, place: Option<NodePlace>) -> HostNode {
        HostNode {
            ino: id.ino,
            generation: id.generation,
            device,
            kind,
            resolved: stat::is_resolved(id),
            root: false,
            linked: linked && kind != Kind::Directory,
            state: Mutex::new(NodeState { place, extra: None }),
        }
    }

    /// The root directory.
    pub(super) fn new_root(id: FileId, device: u32) -> HostNode {
        let mut node = HostNode::new(id, device, Kind::Directory, false, None);
        node.root = true;
        node
    }

    pub(super) fn id(&self) -> FileId {
        FileId {
            fs: stat::user_device(self.device) | if self.resolved { 1 << 63 } else { 0 },
            ino: self.ino,
            generation: self.generation,
        }
    }

    pub(super) fn device(&self) -> u32 {
        self.device
    }

    pub(super) fn kind(&self) -> Kind {
        self.kind
    }

    pub(super) fn is_root(&self) -> bool {
        self.root
    }

    /// Whether it is a link that is shown as its target.
    pub(super) fn is_resolved(&self) -> bool {
        self.resolved
    }

    /// The newest name.
    pub(super) fn place(&self) -> Option<NodePlace> {
        self.state.lock().place.clone()
    }

    /// All names, newest first.
    pub(super) fn places(&self) -> Vec<NodePlace> {
        let state = self.state.lock();
        let older = state.extra.as_ref().map(|extra| extra.places.as_slice()).unwrap_or_default();
        state.place.iter().chain(older).cloned().collect()
    }

    /// Whether the file was seen under more names than its newest.
    pub(super) fn has_older_places(&self) -> bool {
        self.state.lock().extra.as_ref().is_some_and(|extra| !extra.places.is_empty())
    }

    /// Whether it had more than one name when it was found.
    pub(super) fn is_linked(&self) -> bool {
        self.linked
    }

    /// Whether the older names are to be checked before the name of `fresh`, the same file, is learned: there is no room for
    /// one more. After a check in which all were good they stay, and the newest name gives way, for the next
    /// [`UNCHECKED`] names: a new name costs one check on average.
    pub(super) fn needs_check(&self, fresh: &HostNode) -> bool {
        let Some(place) = fresh.place() else { return false };
        let mut state = self.state.lock();
        if state.place.as_ref().is_some_and(|newest| newest.is(&place)) {
            return false;
        }
        let Some(extra) = &mut state.extra else { return false };
        if extra.places.len() + 1 < PLACES_MAX || extra.places.iter().any(|known| known.is(&place)) {
            return false;
        }
        let is_due = extra.unchecked == 0;
        extra.unchecked = extra.unchecked.saturating_sub(1);
        is_due
    }

    /// Older names that were checked, and do not lead to it any more.
    pub(super) fn forget_places(&self, stale: &[NodePlace]) {
        let gone = {
            let mut state = self.state.lock();
            let Some(extra) = &mut state.extra else { return };
            if stale.is_empty() {
                extra.unchecked = UNCHECKED;
            }
            let is_stale = |known: &mut NodePlace| stale.iter().any(|place| known.is(place));
            let gone: Vec<NodePlace> = extra.places.extract_if(.., is_stale).collect();
            state.tidy();
            gone
        };
        drop(gone);
    }

    /// Learns the name and open files of `fresh`, which is the same file. Where it has more than
    /// one name, those known so far stay good.
    pub(super) fn adopt(&self, fresh: &HostNode) {
        let (place, open) = {
            let mut state = fresh.state.lock();
            let open = state.extra.as_mut().map(|extra| std::mem::take(&mut extra.open)).unwrap_or_default();
            (state.place.clone(), open)
        };
        if self.kind == Kind::Directory && place.as_ref().is_some_and(|place| place.parent.lies_below(self)) {
            return;
        }
        let dropped = {
            let mut state = self.state.lock();
            if !open.is_empty() {
                state.extra.get_or_insert_default().open.extend(open);
            }
            let Some(place) = place else { return };
            let before = state.place.replace(place.clone());
            let mut dropped = Vec::new();
            if fresh.linked {
                let Extra { places: older, unchecked, .. } = &mut **state.extra.get_or_insert_default();
                dropped.extend(older.extract_if(.., |known| known.is(&place)));
                if let Some(before) = before
                    && !before.is(&place)
                {
                    let gives_way = *unchecked > 0 && older.len() + 1 >= PLACES_MAX;
                    older.insert(if gives_way { older.len() } else { 0 }, before);
                }
                let kept = older.len().min(PLACES_MAX - 1);
                dropped.extend(older.drain(kept..));
            } else {
                dropped.extend(before);
                dropped.extend(state.extra.as_mut().map(|extra| std::mem::take(&mut extra.places)).unwrap_or_default());
            }
            state.tidy();
            dropped
        };
        // Outside the lock: dropping a name may drop the last reference to a parent.
        drop(dropped);
    }

    /// Whether `ancestor` is this directory or one of its ancestors. Too deep counts as yes.
    fn lies_below(self: &Arc<HostNode>, ancestor: &HostNode) -> bool {
        let mut node = Arc::clone(self);
        for _ in 0..DEPTH_MAX {
            if std::ptr::eq(&*node, ancestor) {
                return true;
            }
            match node.place() {
                Some(place) => node = place.parent,
                None => return false,
            }
        }
        true
    }

    /// The path from the root, as last seen; `None` for a file without a name.
    pub(super) fn path(&self) -> Option<Vec<u8>> {
        let (mut names, mut place) = (Vec::new(), self.place());
        for _ in 0..DEPTH_MAX {
            let Some(NodePlace { parent, name }) = place else { break };
            names.push(name);
            if parent.is_root() {
                let names: Vec<&[u8]> = names.iter().rev().map(ShortName::bytes).collect();
                return Some(names.join(&b'/'));
            }
            place = parent.place();
        }
        self.is_root().then(Vec::new)
    }

    /// The directory's descriptor where it is held, marked as used.
    pub(super) fn descriptor(&self) -> Option<Arc<Held>> {
        let mut state = self.state.lock();
        let (held, used) = state.extra.as_mut()?.descriptor.as_mut()?;
        *used = true;
        Some(Arc::clone(held))
    }

    /// Keeps a descriptor; returns the one to use, which is another thread's if that came first.
    pub(super) fn keep_descriptor(&self, held: Arc<Held>) -> (Arc<Held>, bool) {
        let mut state = self.state.lock();
        let slot = &mut state.extra.get_or_insert_default().descriptor;
        match slot {
            Some((present, _)) => (Arc::clone(present), false),
            None => {
                *slot = Some((Arc::clone(&held), true));
                (held, true)
            }
        }
    }

    /// Exempts the descriptor from eviction, if there is one.
    pub(super) fn keep_for_good(&self, nameless: Arc<()>) {
        if let Some(extra) = self.state.lock().extra.as_mut().filter(|extra| extra.descriptor.is_some()) {
            extra.nameless = Some(nameless);
        }
    }

    /// Drops the descriptor unless it was used since the last call. Returns whether the node still
    /// has one.
    pub(super) fn evict_descriptor(&self) -> bool {
        let taken = {
            let mut state = self.state.lock();
            let Some(extra) = state.extra.as_mut().filter(|extra| extra.nameless.is_none()) else { return false };
            if let Some((_, used)) = &mut extra.descriptor
                && *used
            {
                *used = false;
                return true;
            }
            let taken = extra.descriptor.take();
            state.tidy();
            taken
        };
        drop(taken);
        false
    }

    /// Whether a watch is in place.
    pub(super) fn is_watched(&self) -> bool {
        self.state.lock().extra.as_ref().is_some_and(|extra| extra.watch.is_some())
    }

    pub(super) fn keep_watch(&self, lease: Lease) {
        let before = self.state.lock().extra.get_or_insert_default().watch.replace(lease);
        drop(before);
    }

    /// Drops the watch if `ended` matches it.
    pub(super) fn end_watch(&self, ended: impl Fn(&Lease) -> bool) {
        let gone = {
            let mut state = self.state.lock();
            let gone = state.extra.as_mut().and_then(|extra| extra.watch.take_if(|lease| ended(lease)));
            state.tidy();
            gone
        };
        drop(gone);
    }

    /// Records an open file.
    pub(super) fn opened(&self, file: &Arc<HostFile>) {
        self.state.lock().extra.get_or_insert_default().open.push(Arc::downgrade(file));
    }

    /// Forgets closed files.
    pub(super) fn closed(&self) {
        let mut state = self.state.lock();
        if let Some(extra) = state.extra.as_mut() {
            extra.open.retain(|file| file.strong_count() > 0);
        }
        state.tidy();
    }

    /// Any open file of this file.
    pub(super) fn any_open(&self) -> Option<Arc<HostFile>> {
        let files = self.state.lock().extra.as_ref().map(|extra| extra.open.clone()).unwrap_or_default();
        files.iter().rev().find_map(Weak::upgrade)
    }
}

impl NodeState {
    fn tidy(&mut self) {
        if self.extra.as_ref().is_some_and(|extra| extra.is_empty()) {
            self.extra = None;
        }
    }
}

impl Drop for HostNode {
    /// Frees the chain of parents iteratively: a recursion would be as deep as the tree.
    fn drop(&mut self) {
        let mut last = std::mem::take(self.state.get_mut());
        let mut pending: Vec<Arc<HostNode>> = Vec::new();
        loop {
            pending.extend(last.place.take().map(|place| place.parent));
            pending.extend(
                last.extra
                    .as_mut()
                    .map(|extra| std::mem::take(&mut extra.places))
                    .into_iter()
                    .flatten()
                    .map(|place| place.parent),
            );
            drop(last.extra.take());
            let Some(next) = pending.pop() else { return };
            last = match Arc::into_inner(next) {
                Some(mut node) => std::mem::take(node.state.get_mut()),
                None => NodeState::default(),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(ino: u64, place: Option<NodePlace>) -> Arc<HostNode> {
        Arc::new(HostNode::new(FileId { fs: 1, ino, generation: 0 }, 1, Kind::Directory, false, place))
    }

    fn file(linked: bool, place: Option<NodePlace>) -> Arc<HostNode> {
        Arc::new(HostNode::new(FileId { fs: 1, ino: 1, generation: 0 }, 1, Kind::File, linked, place))
    }

    fn below(parent: &Arc<HostNode>, name: &[u8]) -> Option<NodePlace> {
        Some(NodePlace { parent: Arc::clone(parent), name: ShortName::new(name) })
    }

    #[test]
    fn a_file_takes_ninety_six_bytes() {
        assert_eq!(size_of::<ShortName>(), 24);
        // Strong and weak count before it, the allocator's header after it.
        assert!(size_of::<HostNode>() + 16 + 8 <= 96, "{}", size_of::<HostNode>());
    }

    /// Each of them costs a system call.
    #[test]
    fn names_that_were_all_good_are_not_checked_for_each_new_one() {
        let parent = node(2, None);
        let named = |number: u8| file(true, below(&parent, &[b'a' + number]));
        let known = named(0);
        let mut checks = 0;
        for number in 1..24 {
            let fresh = named(number);
            if known.needs_check(&fresh) {
                checks += 1;
                known.forget_places(&[]);
            }
            known.adopt(&fresh);
            assert!(!known.needs_check(&fresh), "it is known");
            assert!(known.places().len() <= PLACES_MAX);
        }
        assert_eq!(checks, 2);
        // While names are bad, each new one finds the next of them, and good ones are not displaced.
        let (known, good) = (named(0), named(0).place().unwrap());
        for number in 1..24 {
            let fresh = named(number);
            if known.needs_check(&fresh) {
                let bad: Vec<NodePlace> = known.places().into_iter().skip(1).filter(|place| !place.is(&good)).collect();
                known.forget_places(&bad);
            }
            known.adopt(&fresh);
            assert!(known.places().iter().any(|place| place.is(&good)), "{number}");
        }
        // Names that were good stay while others come and go.
        let known = named(0);
        let all_good: Vec<NodePlace> = (0..7).map(|number| named(number).place().unwrap()).collect();
        for number in 1..16 {
            let fresh = named(number);
            if known.needs_check(&fresh) {
                let is_bad = |place: &NodePlace| !all_good.iter().any(|good| good.is(place));
                let bad: Vec<NodePlace> = known.places().into_iter().skip(1).filter(is_bad).collect();
                known.forget_places(&bad);
            }
            known.adopt(&fresh);
            let kept = known.places().into_iter().filter(|place| all_good.iter().any(|good| good.is(place))).count();
            assert!(number < 7 || kept >= 6, "{number}: {kept}");
        }
    }

    #[test]
    fn names_of_any_length_come_back() {
        for length in [1, INLINE - 1, INLINE, INLINE + 1, 255] {
            let name = vec![0xff; length];
            assert_eq!(ShortName::new(&name).bytes(), name);
        }
    }

    #[test]
    fn a_deep_chain_is_dropped_without_recursion() {
        let mut last = node(0, None);
        for ino in 1..500_000 {
            last = node(ino, below(&last, b"d"));
        }
        drop(last);
    }

    #[test]
    fn no_cycle_of_parents_can_be_made() {
        let root = node(0, None);
        let a = node(1, below(&root, b"a"));
        let b = node(2, below(&a, b"b"));
        // Seen later as a below b (moved outside meanwhile): adopting that would make each the
        // other's parent.
        let moved = node(1, below(&b, b"a"));
        a.adopt(&moved);
        assert_eq!(a.place().unwrap().name.bytes(), b"a");
        assert!(Arc::ptr_eq(&a.place().unwrap().parent, &root));
        let elsewhere = node(2, below(&root, b"b"));
        b.adopt(&elsewhere);
        assert!(Arc::ptr_eq(&b.place().unwrap().parent, &root));
    }

    #[test]
    fn hard_links_keep_older_names_newest_first() {
        let root = node(0, None);
        let known = file(false, below(&root, b"0"));
        for name in 1..20_u8 {
            known.adopt(&file(true, below(&root, &[b'a' + name])));
        }
        known.adopt(&file(true, below(&root, &[b'a' + 18])));
        let names: Vec<_> = known.places().iter().map(|place| place.name.bytes()[0] - b'a').collect();
        assert_eq!(names, [18, 19, 17, 16, 15, 14, 13, 12]);
        known.adopt(&file(false, below(&root, b"z")));
        assert_eq!(known.places().len(), 1);
    }
}
