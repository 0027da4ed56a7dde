//! Objects that long-running commands (`diff`) read: their snapshots and file systems are not
//! destroyed meanwhile, which would free the frames under the reader. Temporary snapshots for a
//! comparison are destroyed afterwards.
//!
//! Called by the verbs. Invariant: no object is both read and destroyed. A destroy is refused if
//! one of its objects is being read; a reader waits for running destroys, and looks its objects up
//! after them.

use nacre_pool::engine::Pool;
use nacre_pool::{PoolError, Txg};
use parking_lot::{Condvar, Mutex};

/// A snapshot of a dataset; without one, the dataset itself.
pub(crate) type Read = (u64, Option<Txg>);

/// Prefix of the names of temporary snapshots that are made for a comparison.
pub(crate) const COMPARED: &str = "nacre-diff-";
/// User property that marks a temporary snapshot.
pub(crate) const MARK: &str = "nacre:diff";

/// Destroys temporary comparison snapshots of a process that has died.
pub(crate) fn tidy(pool: &Pool) -> Result<(), PoolError> {
    let mut left = Vec::new();
    {
        let catalog = pool.catalog_view();
        let mut waiting = vec![catalog.root()?];
        while let Some(id) = waiting.pop() {
            for (txg, row) in catalog.snapshot_rows(id)? {
                let marked = row.name.starts_with(COMPARED) && row.holds + row.clones == 0;
                if marked && catalog.snapshot_properties(id, txg)?.iter().any(|(name, _)| name == MARK) {
                    left.push((id, row.name));
                }
            }
            waiting.extend(catalog.children(id)?);
        }
    }
    left.iter().try_for_each(|(id, name)| pool.destroy_snapshots(*id, &[name], false))
}

#[derive(Debug, Default)]
struct ReadingState {
    held: Vec<Read>,
    destroying: usize,
}

/// The objects of a pool that are being read.
#[derive(Debug, Default)]
pub struct Reading {
    state: Mutex<ReadingState>,
    changed: Condvar,
}

/// Protects objects from being destroyed as long as it lives.
#[derive(Debug)]
pub(crate) struct ReadGuard<'a> {
    reading: &'a Reading,
    what: Vec<Read>,
}

/// Keeps new readers out as long as it lives.
#[derive(Debug)]
pub(crate) struct Destroying<'a>(&'a Reading);

impl Reading {
    /// Protects the objects that `choose` finds; no destroy runs while it looks.
    pub(crate) fn hold<R, E>(
        &self,
        choose: impl FnOnce() -> Result<(R, Vec<Read>), E>,
    ) -> Result<(R, ReadGuard<'_>), E> {
        let mut state = self.state.lock();
        while state.destroying > 0 {
            self.changed.wait(&mut state);
        }
        let (found, what) = choose()?;
        state.held.extend(&what);
        Ok((found, ReadGuard { reading: self, what }))
    }

    /// Begins a destroy, unless one of its objects (`is_meant`) is being read: then that one is returned.
    pub(crate) fn go(&self, is_meant: impl Fn(&Read) -> bool) -> Result<Destroying<'_>, Read> {
        let mut state = self.state.lock();
        match state.held.iter().find(|read| is_meant(read)) {
            Some(read) => Err(*read),
            None => {
                state.destroying += 1;
                Ok(Destroying(self))
            }
        }
    }
}

impl Drop for ReadGuard<'_> {
    fn drop(&mut self) {
        let mut state = self.reading.state.lock();
        for read in &self.what {
            if let Some(place) = state.held.iter().position(|held| held == read) {
                state.held.swap_remove(place);
            }
        }
    }
}

impl Drop for Destroying<'_> {
    fn drop(&mut self) {
        self.0.state.lock().destroying -= 1;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_stays_and_what_goes_is_not_read() {
        let reading = Reading::default();
        let hold = |what: Read| reading.hold(|| Ok::<_, ()>(((), vec![what]))).unwrap().1;
        let first = hold((1, Some(Txg(5))));
        let second = hold((1, Some(Txg(5))));
        assert_eq!(reading.go(|read| read.0 == 1).unwrap_err(), (1, Some(Txg(5))));
        drop(first);
        assert!(reading.go(|read| read.0 == 1).is_err());
        let other = reading.go(|read| read.0 == 2).unwrap();
        std::thread::scope(|threads| {
            let waits = threads.spawn(|| drop(hold((2, None))));
            drop(other);
            waits.join().unwrap();
        });
        drop(second);
        drop(reading.go(|_| true).unwrap());
    }
}
