//! A small catalog: datasets with snapshots, clones and promotes over deadlists and the space
//! accounting, next to exact sets of blocks. After each step everything is compared.

use super::*;
use crate::space::{Breakdown, Limits, Purpose, QuotaTree, Shortage, Usage, UsageChange, judged};

/// Referenced blocks: number -> (birth, bytes).
pub type Blocks = BTreeMap<u32, (Txg, u64)>;

#[derive(Clone, Debug)]
pub struct Snapshot {
    pub point: Point,
    pub blocks: Blocks,
}

#[derive(Clone, Debug)]
pub struct Dataset {
    pub origin: Option<u32>,
    pub snapshots: Vec<u32>,
    pub list: ListId,
    pub blocks: Blocks,
}

/// The catalog and the exact sets.
pub struct Pool {
    pub rows: Map,
    pub quotas: QuotaTree,
    pub datasets: BTreeMap<u64, Dataset>,
    pub snapshots: BTreeMap<u32, Snapshot>,
    pub txg: Txg,
    freeing: ListId,
    next: u32,
    /// All blocks ever written, and the freed ones.
    written: Blocks,
    freed: BTreeSet<u32>,
}

fn bytes(blocks: &Blocks) -> u64 {
    blocks.values().map(|(_, bytes)| bytes).sum()
}

impl Pool {
    /// A pool with an empty root dataset, number 1.
    pub fn new(size: u64) -> Self {
        let mut rows = Map::default();
        let mut lists = Deadlists::new(&mut rows);
        let (freeing, list) = (lists.create().unwrap(), lists.create().unwrap());
        let root = Dataset { origin: None, snapshots: Vec::new(), list, blocks: Blocks::new() };
        Self {
            rows,
            quotas: QuotaTree::new(1, size, Usage::default(), Limits::default()),
            datasets: BTreeMap::from([(1, root)]),
            snapshots: BTreeMap::new(),
            txg: Txg(1),
            freeing,
            next: 2,
            written: Blocks::new(),
            freed: BTreeSet::new(),
        }
    }

    fn number(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    fn lists(&mut self) -> Deadlists<'_, Map> {
        Deadlists::new(&mut self.rows)
    }

    pub fn owner(&self, snapshot: u32) -> u64 {
        *self.datasets.iter().find(|(_, dataset)| dataset.snapshots.contains(&snapshot)).unwrap().0
    }

    pub fn has_clones(&self, snapshot: u32) -> bool {
        self.datasets.values().any(|dataset| dataset.origin == Some(snapshot))
    }

    /// The snapshots that a live dataset descends from, the oldest first, and how many of them
    /// belong to origins.
    fn ancestry(&self, id: u64) -> (Vec<u32>, usize) {
        let dataset = &self.datasets[&id];
        let mut line = match dataset.origin {
            None => Vec::new(),
            Some(origin) => {
                let owner = self.owner(origin);
                let (mut line, _) = self.ancestry(owner);
                let place = line.iter().position(|snapshot| *snapshot == origin).unwrap();
                line.truncate(place + 1);
                line
            }
        };
        let own = line.len();
        line.extend(&dataset.snapshots);
        (line, own)
    }

    fn txgs(&self, id: u64) -> Vec<Txg> {
        self.ancestry(id).0.iter().map(|snapshot| self.snapshots[snapshot].point.txg).collect()
    }

    fn history(&self, id: u64) -> (Vec<Point>, usize) {
        let (line, own) = self.ancestry(id);
        let mut points: Vec<Point> = line.iter().map(|snapshot| self.snapshots[snapshot].point).collect();
        let referenced = self.quotas.usage(id).unwrap().referenced;
        points.push(Point { txg: Point::HEAD, referenced, logical: 3 * referenced, list: self.datasets[&id].list });
        (points, own)
    }

    fn origin_txg(&self, id: u64) -> Txg {
        self.datasets[&id].origin.map_or(Txg(0), |origin| self.snapshots[&origin].point.txg)
    }

    pub fn create(&mut self, parent: u64) -> u64 {
        let (id, list) = (self.number().into(), self.lists().create().unwrap());
        self.quotas.add(id, parent, Usage::default(), Limits::default()).unwrap();
        self.datasets.insert(id, Dataset { origin: None, snapshots: Vec::new(), list, blocks: Blocks::new() });
        id
    }

    /// Writes a block of so many bytes to the live dataset.
    pub fn write(&mut self, id: u64, bytes: u64) -> u32 {
        let block = self.number();
        let birth = self.txg;
        self.datasets.get_mut(&id).unwrap().blocks.insert(block, (birth, bytes));
        self.written.insert(block, (birth, bytes));
        self.quotas.charge(id, UsageChange::stored(bytes as i64, 3 * bytes as i64)).unwrap();
        block
    }

    /// Drops these blocks from the live dataset.
    pub fn kill(&mut self, id: u64, blocks: &[u32]) {
        let history = self.txgs(id);
        let (newest, origin) = (history.last().copied().unwrap_or_default(), self.origin_txg(id));
        let mut listed = Vec::new();
        for block in blocks {
            let (birth, charged) = self.datasets.get_mut(&id).unwrap().blocks.remove(block).unwrap();
            let (owner_charge, logical) = (charged, 3 * charged as u32);
            let dead = Dead { segment: 1, index: *block, charged, owner_charge, logical, birth, shared: false };
            let (fate, change) = killed(&dead, newest, origin).unwrap();
            self.quotas.charge(id, change).unwrap();
            match fate {
                Fate::Freed => self.free(*block),
                Fate::Listed => listed.push(dead),
            }
        }
        let list = self.datasets[&id].list;
        self.lists().append(list, &history, &listed).unwrap();
    }

    fn free(&mut self, block: u32) {
        assert!(self.freed.insert(block), "block {block} is freed twice");
    }

    /// Takes a snapshot, unless the refreservation forbids it.
    pub fn snapshot(&mut self, id: u64) -> Option<u32> {
        judged(self.quotas.take_snapshots(&[id])).ok()?;
        let (snapshot, list) = (self.number(), self.lists().create().unwrap());
        let referenced = self.quotas.usage(id).unwrap().referenced;
        let txg = self.txg;
        let dataset = self.datasets.get_mut(&id).unwrap();
        let point =
            Point { txg, referenced, logical: 3 * referenced, list: std::mem::replace(&mut dataset.list, list) };
        dataset.snapshots.push(snapshot);
        let blocks = dataset.blocks.clone();
        self.snapshots.insert(snapshot, Snapshot { point, blocks });
        self.txg.0 += 1;
        Some(snapshot)
    }

    /// Replaces the counters of a dataset by those of its history.
    fn recount(&mut self, ids: &[u64]) {
        for (id, change) in self.changes(ids) {
            self.quotas.charge(id, change).unwrap();
        }
    }

    fn changes(&mut self, ids: &[u64]) -> Vec<(u64, UsageChange)> {
        ids.iter()
            .map(|id| {
                let (history, own) = self.history(*id);
                let after = self.lists().usage(&history, own).unwrap();
                (*id, UsageChange::between(&self.quotas.usage(*id).unwrap(), &after).unwrap())
            })
            .collect()
    }

    /// Destroys a snapshot without clones; checks the predicted amount against the freed one.
    pub fn destroy_snapshot(&mut self, snapshot: u32) -> u64 {
        let owner = self.owner(snapshot);
        let (history, own) = self.history(owner);
        let place = self.ancestry(owner).0.iter().position(|other| *other == snapshot).unwrap();
        let announced = self.lists().used_by_snapshot(&history, place).unwrap();
        let previous = place.checked_sub(1).map_or(Txg(0), |place| history[place].txg);
        let freeing = self.freeing;
        let (freed, list) =
            self.lists().destroy_snapshot(previous, &history[place], history[place + 1].list, freeing).unwrap();
        assert_eq!(freed.bytes, announced);
        let next = self.datasets[&owner].snapshots.get(place + 1 - own).copied();
        match next {
            Some(next) => self.snapshots.get_mut(&next).unwrap().point.list = list,
            None => self.datasets.get_mut(&owner).unwrap().list = list,
        }
        self.datasets.get_mut(&owner).unwrap().snapshots.retain(|other| *other != snapshot);
        self.snapshots.remove(&snapshot);
        self.recount(&[owner]);
        self.drain();
        freed.bytes
    }

    fn drain(&mut self) {
        loop {
            let freeing = self.freeing;
            let part = self.lists().drain(freeing, 10).unwrap();
            if part.is_empty() {
                break;
            }
            part.iter().for_each(|entry| self.free(entry.index));
        }
    }

    /// Rolls back to the newest snapshot.
    pub fn rollback(&mut self, id: u64) {
        let Some(snapshot) = self.datasets[&id].snapshots.last().map(|newest| self.snapshots[newest].clone()) else {
            return;
        };
        let born: Vec<u32> = self.datasets[&id]
            .blocks
            .iter()
            .filter(|(_, (birth, _))| *birth > snapshot.point.txg)
            .map(|(block, _)| *block)
            .collect();
        self.kill(id, &born);
        let list = self.datasets[&id].list;
        self.lists().forget(list).unwrap();
        self.datasets.get_mut(&id).unwrap().blocks = snapshot.blocks;
        let usage = self.quotas.usage(id).unwrap();
        let referenced =
            Usage { referenced: snapshot.point.referenced, logical_referenced: snapshot.point.logical, ..usage };
        self.quotas.charge(id, UsageChange::between(&usage, &referenced).unwrap()).unwrap();
        self.recount(&[id]);
    }

    pub fn clone(&mut self, snapshot: u32, parent: u64) -> u64 {
        let (id, list) = (self.number().into(), self.lists().create().unwrap());
        let origin = self.snapshots[&snapshot].clone();
        let usage =
            Usage { referenced: origin.point.referenced, logical_referenced: origin.point.logical, ..Usage::default() };
        self.quotas.add(id, parent, usage, Limits::default()).unwrap();
        self.datasets
            .insert(id, Dataset { origin: Some(snapshot), snapshots: Vec::new(), list, blocks: origin.blocks });
        id
    }

    /// Promotes a clone: it takes the snapshots of its origin up to its origin snapshot, if its
    /// quotas allow them.
    pub fn promote(&mut self, id: u64) -> Result<(), Shortage> {
        let Some(origin) = self.datasets[&id].origin else { return Ok(()) };
        let before = self.datasets.clone();
        let former = self.owner(origin);
        let place = self.datasets[&former].snapshots.iter().position(|snapshot| *snapshot == origin).unwrap();
        let kept = self.datasets.get_mut(&former).unwrap().snapshots.split_off(place + 1);
        let moved = std::mem::replace(&mut self.datasets.get_mut(&former).unwrap().snapshots, kept);
        let above = self.datasets.get_mut(&former).unwrap().origin.replace(origin);
        let dataset = self.datasets.get_mut(&id).unwrap();
        dataset.origin = above;
        dataset.snapshots.splice(0..0, moved);
        let changes = self.changes(&[former, id]);
        let allowed = judged(self.quotas.charge_if_allowed(&changes, Purpose::Write));
        if allowed.is_err() {
            self.datasets = before;
        }
        allowed
    }

    /// Destroys a dataset that has neither snapshots nor children.
    pub fn destroy(&mut self, id: u64) -> bool {
        if !self.datasets[&id].snapshots.is_empty() || self.quotas.remove(id).is_err() {
            return false;
        }
        let origin = self.origin_txg(id);
        let dataset = self.datasets.remove(&id).unwrap();
        self.lists().forget(dataset.list).unwrap();
        for (block, (birth, _)) in dataset.blocks {
            if birth > origin {
                self.free(block);
            }
        }
        true
    }

    pub fn breakdown(&self, id: u64) -> Breakdown {
        self.quotas.breakdown(id).unwrap()
    }

    pub fn used_by(&mut self, snapshot: u32) -> u64 {
        let owner = self.owner(snapshot);
        let (history, _) = self.history(owner);
        let place = self.ancestry(owner).0.iter().position(|other| *other == snapshot).unwrap();
        self.lists().used_by_snapshot(&history, place).unwrap()
    }

    /// Compares everything with the sets.
    pub fn compare(&mut self) {
        let reached = self
            .datasets
            .values()
            .map(|dataset| &dataset.blocks)
            .chain(self.snapshots.values().map(|snapshot| &snapshot.blocks));
        let reached: Blocks = reached.flatten().map(|(block, what)| (*block, *what)).collect();
        let lost: BTreeSet<u32> = self.written.keys().filter(|block| !reached.contains_key(block)).copied().collect();
        assert_eq!(self.freed, lost, "freed is what nothing reaches");
        let charged: u64 = self
            .datasets
            .keys()
            .map(|id| self.quotas.usage(*id).unwrap())
            .map(|usage| usage.dataset + usage.snapshots)
            .sum();
        assert_eq!(charged, bytes(&reached), "each block is charged once");
        for id in self.datasets.keys().copied().collect::<Vec<_>>() {
            self.compare_dataset(id);
        }
    }

    fn compare_dataset(&mut self, id: u64) {
        let (line, own) = self.ancestry(id);
        let (history, _) = self.history(id);
        let (origin, newest) = (self.origin_txg(id), self.txgs(id).last().copied().unwrap_or_default());
        let head = self.datasets[&id].blocks.clone();
        let kept = line[own..].iter().flat_map(|snapshot| self.snapshots[snapshot].blocks.clone());
        let kept: Blocks = kept.filter(|(block, (birth, _))| *birth > origin && !head.contains_key(block)).collect();
        let since = |txg: Txg| head.values().filter(|(birth, _)| *birth > txg).map(|(_, bytes)| bytes).sum::<u64>();
        let truth = Usage {
            dataset: since(origin),
            snapshots: bytes(&kept),
            referenced: bytes(&head),
            unique: since(newest),
            logical_used: 3 * (since(origin) + bytes(&kept)),
            logical_referenced: 3 * bytes(&head),
        };
        assert_eq!(self.quotas.usage(id).unwrap(), truth, "counters of {id}");
        assert_eq!(self.lists().usage(&history, own).unwrap(), truth, "recount of {id}");
        let mut blocks: Vec<Blocks> = line.iter().map(|snapshot| self.snapshots[snapshot].blocks.clone()).collect();
        blocks.push(head);
        for later in 1..history.len() {
            for earlier in 0..later {
                let new: Blocks = blocks[later]
                    .iter()
                    .filter(|(block, _)| !blocks[earlier].contains_key(block))
                    .map(|(b, w)| (*b, *w))
                    .collect();
                assert_eq!(self.lists().written_since(&history, earlier, later).unwrap(), bytes(&new));
            }
        }
        for first in own..line.len() {
            for last in first..line.len() {
                let outside = |block: &u32| {
                    !first.checked_sub(1).is_some_and(|before| blocks[before].contains_key(block))
                        && !blocks[last + 1].contains_key(block)
                };
                let only: Blocks = blocks[first..=last]
                    .iter()
                    .flatten()
                    .filter(|(block, _)| outside(block))
                    .map(|(b, w)| (*b, *w))
                    .collect();
                assert_eq!(
                    self.lists().used_by_range(&history, first, last).unwrap(),
                    bytes(&only),
                    "range {first}..={last} of {id}"
                );
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Write { id: usize, blocks: u8, bytes: u64 },
    Overwrite { id: usize, picks: Vec<usize> },
    Snapshot { id: usize },
    DestroySnapshot { pick: usize },
    DestroyRange { id: usize, first: usize, length: usize },
    Rollback { id: usize },
    Clone { pick: usize, parent: usize },
    Promote { id: usize },
    Create { parent: usize },
    Destroy { id: usize },
}

fn step() -> impl Strategy<Value = Step> {
    let any = 0usize..1000;
    let picks = proptest::collection::vec(any.clone(), 1..8);
    prop_oneof![
        6 => (any.clone(), 1u8..8, 1u64..500).prop_map(|(id, blocks, units)| Step::Write { id, blocks, bytes: units * 16 }),
        6 => (any.clone(), picks).prop_map(|(id, picks)| Step::Overwrite { id, picks }),
        6 => any.clone().prop_map(|id| Step::Snapshot { id }),
        3 => any.clone().prop_map(|pick| Step::DestroySnapshot { pick }),
        1 => (any.clone(), any.clone(), 1usize..4).prop_map(|(id, first, length)| Step::DestroyRange { id, first, length }),
        1 => any.clone().prop_map(|id| Step::Rollback { id }),
        2 => (any.clone(), any.clone()).prop_map(|(pick, parent)| Step::Clone { pick, parent }),
        2 => any.clone().prop_map(|id| Step::Promote { id }),
        1 => any.clone().prop_map(|parent| Step::Create { parent }),
        1 => any.prop_map(|id| Step::Destroy { id }),
    ]
}

fn apply(pool: &mut Pool, step: &Step) {
    let ids: Vec<u64> = pool.datasets.keys().copied().collect();
    let pick = |index: usize| ids[index % ids.len()];
    let snapshots: Vec<u32> = pool.snapshots.keys().copied().collect();
    match step {
        Step::Write { id, blocks, bytes } => (0..*blocks).for_each(|_| {
            pool.write(pick(*id), *bytes);
        }),
        Step::Overwrite { id, picks } => {
            let id = pick(*id);
            let blocks: Vec<u32> = pool.datasets[&id].blocks.keys().copied().collect();
            let chosen: BTreeSet<u32> =
                picks.iter().filter(|_| !blocks.is_empty()).map(|index| blocks[index % blocks.len()]).collect();
            chosen.iter().for_each(|_| {
                pool.write(id, 320);
            });
            pool.kill(id, &chosen.into_iter().collect::<Vec<_>>());
        }
        Step::Snapshot { id } => assert!(pool.snapshot(pick(*id)).is_some()),
        Step::DestroySnapshot { pick } if !snapshots.is_empty() => {
            let snapshot = snapshots[pick % snapshots.len()];
            if !pool.has_clones(snapshot) {
                pool.destroy_snapshot(snapshot);
            }
        }
        Step::DestroyRange { id, first, length } => destroy_range(pool, pick(*id), *first, *length),
        Step::Rollback { id } => pool.rollback(pick(*id)),
        Step::Clone { pick: snapshot, parent } if !snapshots.is_empty() => {
            pool.clone(snapshots[snapshot % snapshots.len()], pick(*parent));
        }
        Step::Promote { id } => assert_eq!(pool.promote(pick(*id)), Ok(())),
        Step::Create { parent } => {
            pool.create(pick(*parent));
        }
        Step::Destroy { id } => {
            pool.destroy(pick(*id));
        }
        Step::DestroySnapshot { .. } | Step::Clone { .. } => {}
    }
    pool.txg.0 += 1;
}

/// Destroys a range of snapshots at once: together they free the predicted amount.
fn destroy_range(pool: &mut Pool, id: u64, first: usize, length: usize) {
    let own = pool.datasets[&id].snapshots.clone();
    if own.is_empty() {
        return;
    }
    let first = first % own.len();
    let range: Vec<u32> = own[first..own.len().min(first + length)].to_vec();
    if range.iter().any(|snapshot| pool.has_clones(*snapshot)) {
        return;
    }
    let (history, above) = pool.history(id);
    let announced = pool.lists().used_by_range(&history, above + first, above + first + range.len() - 1).unwrap();
    let freed: u64 = range.iter().map(|snapshot| pool.destroy_snapshot(*snapshot)).sum();
    assert_eq!(freed, announced);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]
    #[test]
    fn deadlists_free_exactly_what_nothing_reaches(steps in proptest::collection::vec(step(), 1..70)) {
        let mut pool = Pool::new(1 << 40);
        for step in &steps {
            apply(&mut pool, step);
            pool.compare();
            let charged: u64 = pool.datasets.keys().map(|id| pool.quotas.usage(*id).unwrap()).map(|usage| usage.dataset + usage.snapshots).sum();
            prop_assert_eq!(pool.breakdown(1).used, charged);
        }
    }
}
