//! Operations on trees whose frames have arbitrary content: lookup, walk, comparison and changes.

use std::sync::{Arc, Mutex};

use nacre_pool::cache::Cache;
use nacre_pool::catalog::Catalog;
use nacre_pool::tree::walk::{Visitor, walk};
use nacre_pool::tree::{Context, Settings, Tree, View};
use nacre_pool::{ChecksumKind, Compression, FrameKind, Frames, NewFrame, Pointer, PoolError, Txg};

/// Limit of visited rows or frames of one tree: a few frames that point to each other make any number of them.
const MOST: usize = 300;

/// Frames by their numbers, modulo the number of frames.
struct Pages(Mutex<Vec<Arc<[u8]>>>);

impl Pages {
    /// Splits the input into pages, each after its length in two bytes.
    fn of(mut data: &[u8]) -> Self {
        let mut pages = Vec::new();
        while let Some((length, rest)) = data.split_first_chunk::<2>() {
            let length = usize::from(u16::from_le_bytes(*length)).min(rest.len());
            let (page, rest) = rest.split_at(length);
            pages.push(page.into());
            data = rest;
        }
        Self(Mutex::new(pages))
    }

    fn last(&self) -> u32 {
        self.0.lock().map_or(0, |pages| pages.len().saturating_sub(1) as u32)
    }
}

impl Frames for Pages {
    fn read(&self, pointer: &Pointer) -> Result<Arc<[u8]>, PoolError> {
        let none = || PoolError::Refused("no frame".to_owned());
        let pages = self.0.lock().map_err(|_| none())?;
        let at = (pointer.index as usize).checked_rem(pages.len()).ok_or_else(none)?;
        pages.get(at).cloned().ok_or_else(none)
    }

    fn expect(&self, _: &[Pointer]) {}

    fn write(&self, frame: &NewFrame<'_>) -> Result<Pointer, PoolError> {
        let none = || PoolError::Refused("no frame".to_owned());
        let mut pages = self.0.lock().map_err(|_| none())?;
        let index = u32::try_from(pages.len()).map_err(|_| none())?;
        pages.push(frame.content.into());
        Ok(pointer(index, frame.kind, frame.birth))
    }
}

fn pointer(index: u32, kind: FrameKind, birth: Txg) -> Pointer {
    Pointer {
        segment: 1,
        index,
        offset: 0,
        stored: 1,
        logical: 1,
        kind,
        compression: Compression::Off,
        checksum_kind: ChecksumKind::Xxh3,
        pin: 0,
        birth,
        checksum: [0; 16],
    }
}

struct Counted(usize);

impl Visitor for Counted {
    fn frame(&mut self, _: &Pointer) -> Result<bool, PoolError> {
        self.0 += 1;
        Ok(self.0 < MOST)
    }

    fn row(&mut self, _: &[u8], _: &[u8]) -> Result<(), PoolError> {
        Ok(())
    }
}

/// Uses pages as a tree: the first byte selects the type of the root, the second is a key; then
/// pages, each after its length in two bytes. The last one is the root.
pub fn pool_tree(data: &[u8]) {
    let Some((&[kind, key], data)) = data.split_first_chunk::<2>() else { return };
    let frames = Arc::new(Pages::of(data));
    let root = pointer(frames.last(), if kind & 1 == 0 { FrameKind::Leaf } else { FrameKind::Inner }, Txg(1));
    let cache = Arc::new(Cache::new(1 << 20));
    if kind & 2 == 0 {
        read(&frames, &cache, root, key);
        // A change fails, or it is made on a tree that could exist.
        let _ = change(&frames, &cache, root, key);
    } else {
        let _ = list(frames, cache, root, key);
    }
}

fn read(frames: &Arc<Pages>, cache: &Arc<Cache>, root: Pointer, key: u8) {
    let ctx = Context { frames: &**frames, cache };
    let _ = walk(&ctx, &root, Txg(0), &mut Counted(0));
    let view = View::at(Some(root));
    let _ = (view.get(&ctx, &[key]), view.before(&ctx, &[key]), view.first(&ctx), view.last(&ctx));
    if let Ok(mut cursor) = view.cursor(ctx, &[key], Some(&[key.saturating_add(9)])) {
        for _ in 0..MOST {
            let Ok(Some(_)) = cursor.next() else { break };
        }
    }
    if let Ok(mut diff) = view.diff(ctx, &View::at(Some(pointer(u32::from(key), root.kind, Txg(2))))) {
        for _ in 0..MOST {
            let Ok(Some(_)) = diff.next() else { break };
        }
    }
}

fn change(frames: &Arc<Pages>, cache: &Arc<Cache>, root: Pointer, key: u8) -> Result<(), PoolError> {
    let ctx = Context { frames: &**frames, cache };
    let mut tree = Tree::open(Some(root), 1, Settings::with_page(256));
    tree.put(&ctx, Txg(3), &[key], &[7; 40])?;
    assert!(tree.get(&ctx, &[key])?.is_some_and(|value| value == [7; 40]), "what was put is there");
    tree.remove(&ctx, Txg(3), &[key])?;
    assert!(tree.get(&ctx, &[key])?.is_none(), "what was removed is gone");
    tree.remove_range(&ctx, Txg(3), &[key], Some(&[key.saturating_add(1)]))?;
    tree.put(&ctx, Txg(3), &[key, 1], b"")?;
    tree.take_dead(Txg(3));
    Ok(())
}

/// Reads the pages as a catalog, whose rows are decoded.
fn list(frames: Arc<Pages>, cache: Arc<Cache>, root: Pointer, key: u8) -> Result<(), PoolError> {
    let mut rows = 0;
    let ctx = Context { frames: &*frames, cache: &cache };
    let view = View::at(Some(root));
    let mut cursor = view.scan(ctx)?;
    while cursor.next()?.is_some() {
        rows += 1;
        if rows > MOST {
            return Ok(());
        }
    }
    drop(cursor);
    let catalog = Catalog::open(Arc::clone(&frames) as Arc<dyn Frames>, Arc::clone(&cache), Some(root), Txg(2));
    let (dataset, txg) = (u64::from(key % 4), Txg(u64::from(key / 4)));
    let _ = (catalog.head(), catalog.datasets(), catalog.all_shared(), catalog.doomed(), catalog.history());
    let _ = (
        catalog.children(dataset),
        catalog.properties(dataset),
        catalog.snapshots(dataset),
        catalog.bookmarks(dataset),
    );
    let _ = (catalog.holds(dataset, txg), catalog.clones(dataset, txg), catalog.snapshot_properties(dataset, txg));
    catalog.history_of(dataset)?;
    Ok(())
}
