//! Space used by snapshots and live datasets, from the deadlists of their history: `used` of a
//! snapshot, `usedbysnapshots`, `written`, `written@`, the space that destroying a range would
//! free, and the counters of a live dataset (head) after promote, rollback and destroy.
//!
//! A history is the chain of points that a live dataset descends from, the oldest first, the
//! snapshots of its origins included, itself last. Positions are indices into it.

use super::{Births, Dead, Deadlists, ListId, Rows, Totals, damaged};
use crate::error::PoolError;
use crate::pointer::Txg;
use crate::space::{Usage, UsageChange};

/// A snapshot, or a live dataset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    /// Txg of the snapshot; for a live dataset [`Point::HEAD`].
    pub txg: Txg,
    /// Referenced space, charged bytes.
    pub referenced: u64,
    /// Referenced space before compression, bytes.
    pub logical: u64,
    /// Frames that the previous point references and this one does not.
    pub list: ListId,
}

impl Point {
    /// The txg of a live dataset: after everything.
    pub const HEAD: Txg = Txg(u64::MAX);

    fn extent(&self) -> Extent {
        Extent { charged: self.referenced, logical: self.logical }
    }
}

/// An amount of space: charged, and before compression. Bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Extent {
    charged: u64,
    logical: u64,
}

impl Extent {
    fn of(totals: &Totals) -> Self {
        Self { charged: totals.bytes, logical: totals.logical }
    }

    fn less(self, other: Self) -> Result<Self, PoolError> {
        let less = |from: u64, bytes| {
            from.checked_sub(bytes).ok_or_else(|| damaged("a deadlist that holds more than its snapshot"))
        };
        Ok(Self { charged: less(self.charged, other.charged)?, logical: less(self.logical, other.logical)? })
    }

    fn more(self, other: Self) -> Result<Self, PoolError> {
        let more = |to: u64, bytes| to.checked_add(bytes).ok_or_else(|| damaged("the totals of deadlists"));
        Ok(Self { charged: more(self.charged, other.charged)?, logical: more(self.logical, other.logical)? })
    }
}

/// What happens to a frame that a live dataset does not reference any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is freed with this txg: nothing else references it.
    Freed,
    /// A snapshot references it: it is added to the live dataset's list.
    Listed,
}

/// The free rule: returns the fate of a frame, and its change of the live dataset's counters.
/// `newest` is the newest snapshot that the live dataset descends from, its origin included;
/// `origin` is its origin snapshot; 0 if there is none.
///
/// # Errors
/// [`PoolError::Format`] for a length of more than 63 bits.
pub fn killed(dead: &Dead, newest: Txg, origin: Txg) -> Result<(Fate, UsageChange), PoolError> {
    let bytes = i64::try_from(dead.charged).map_err(|_| damaged("the length of a dead frame"))?;
    let logical = i64::from(dead.logical);
    if dead.birth > newest {
        return Ok((Fate::Freed, UsageChange::stored(-bytes, -logical)));
    }
    let own = if dead.birth > origin { bytes } else { 0 };
    let change = UsageChange {
        dataset: -own,
        snapshots: own,
        referenced: -bytes,
        unique: 0,
        logical_used: 0,
        logical_referenced: -logical,
    };
    Ok((Fate::Listed, change))
}

impl<R: Rows + ?Sized> Deadlists<'_, R> {
    /// Bytes referenced by one point and by a later one.
    ///
    /// # Errors
    /// Errors of the rows; [`PoolError::Format`] for impossible figures, and positions outside the
    /// history, as for all functions here.
    pub fn shared(&self, history: &[Point], earlier: usize, later: usize) -> Result<u64, PoolError> {
        Ok(self.shared_extent(history, earlier, later)?.charged)
    }

    fn shared_extent(&self, history: &[Point], earlier: usize, later: usize) -> Result<Extent, PoolError> {
        let point = at(history, earlier)?;
        let mut shared = point.extent();
        for next in between(history, earlier, later)? {
            shared = shared.less(Extent::of(&self.totals(next.list, Births::through(point.txg))?))?;
        }
        Ok(shared)
    }

    /// Bytes referenced by a point and not by an earlier one: `written@EARLIER`; `written` for the
    /// previous point.
    ///
    /// # Errors
    /// As [`Self::shared`].
    pub fn written_since(&self, history: &[Point], earlier: usize, later: usize) -> Result<u64, PoolError> {
        Ok(self.since(history, earlier, later)?.charged)
    }

    fn since(&self, history: &[Point], earlier: usize, later: usize) -> Result<Extent, PoolError> {
        at(history, later)?.extent().less(self.shared_extent(history, earlier, later)?)
    }

    /// Bytes referenced by a snapshot only, apart from its clones: the property `used` of a
    /// snapshot.
    ///
    /// # Errors
    /// As [`Self::shared`].
    pub fn used_by_snapshot(&self, history: &[Point], snapshot: usize) -> Result<u64, PoolError> {
        self.used_by_range(history, snapshot, snapshot)
    }

    /// Bytes that destroying a range of snapshots would free.
    ///
    /// # Errors
    /// As [`Self::shared`].
    pub fn used_by_range(&self, history: &[Point], first: usize, last: usize) -> Result<u64, PoolError> {
        let after = first.checked_sub(1).and_then(|previous| history.get(previous)).map_or(Txg(0), |point| point.txg);
        let births = Births { after, through: at(history, last)?.txg };
        let mut sum = Extent::default();
        for next in between(history, first, last.saturating_add(1))? {
            sum = sum.more(Extent::of(&self.totals(next.list, births)?))?;
        }
        Ok(sum.charged)
    }

    /// Counters of the live dataset at the end of a history; `own` is the position of its oldest
    /// own snapshot, or its own position. They equal the counters that the catalog updates
    /// incrementally.
    ///
    /// # Errors
    /// As [`Self::shared`].
    pub fn usage(&self, history: &[Point], own: usize) -> Result<Usage, PoolError> {
        let head = history.len().checked_sub(1).ok_or_else(|| damaged("a history without a head"))?;
        let referenced = at(history, head)?.extent();
        let origin = own.checked_sub(1);
        let dataset = match origin {
            Some(origin) => self.since(history, origin, head)?,
            None => referenced,
        };
        let unique = match head.checked_sub(1) {
            Some(newest) => self.since(history, newest, head)?,
            None => referenced,
        };
        let births = Births::after(origin.map_or(Ok(Txg(0)), |origin| at(history, origin).map(|point| point.txg))?);
        let mut snapshots = Extent::default();
        for point in history.get(own..).unwrap_or_default() {
            snapshots = snapshots.more(Extent::of(&self.totals(point.list, births)?))?;
        }
        Ok(Usage {
            dataset: dataset.charged,
            snapshots: snapshots.charged,
            referenced: referenced.charged,
            unique: unique.charged,
            logical_used: dataset.more(snapshots)?.logical,
            logical_referenced: referenced.logical,
        })
    }
}

fn at(history: &[Point], position: usize) -> Result<&Point, PoolError> {
    history.get(position).ok_or_else(|| damaged("a position outside a history"))
}

/// The points after one, up to and including another.
fn between(history: &[Point], earlier: usize, later: usize) -> Result<&[Point], PoolError> {
    let range = earlier.saturating_add(1)..later.saturating_add(1);
    history.get(range).ok_or_else(|| damaged("a position outside a history"))
}
