//! What commands read for long (`diff`): its snapshots and file systems are not destroyed
//! meanwhile, which would take the frames away under the reader. Those that were made for it go.
//!
//! Called by the verbs. Invariant: nothing is both read and destroyed: whoever destroys is refused
//! where something of it is read, and whoever wants to read waits for those who are destroying, and
//! looks for it then.

use nacre_pool::engine::Pool;
use nacre_pool::{PoolError, Txg};
use parking_lot::{Condvar, Mutex};

/// A snapshot of a dataset; without one, the dataset itself.
pub(crate) type Read = (u64, Option<Txg>);

/// How the names of snapshots begin that are made to be compared ...
pub(crate) const COMPARED: &str = "nacre-diff-";
/// ... and the property by which they are known.
pub(crate) const MARK: &str = "nacre:diff";

/// Destroys the snapshots that were made to be compared by a process that has died meanwhile.
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

/// What is being read of a pool.
#[derive(Debug, Default)]
pub struct Reading {
    state: Mutex<ReadingState>,
    changed: Condvar,
}

/// As long as it lives, these are not destroyed.
#[derive(Debug)]
pub(crate) struct ReadGuard<'a> {
    reading: &'a Reading,
    what: Vec<Read>,
}

/// As long as it lives, nobody begins to read.
#[derive(Debug)]
pub(crate) struct Destroying<'a>(&'a Reading);

impl Reading {
    /// Holds what `choose` finds; nothing is destroyed while it looks.
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

    /// Something is going to be destroyed, unless it is one of those that are read.
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
