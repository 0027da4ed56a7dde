//! Usage counts of files: opens, each of which counts half after a day. Kept in memory, bounded, and lost at
//! the unmount.

use hashbrown::HashMap;
use nacre_vfs::FileId;
use parking_lot::Mutex;
use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

/// Half-life of an open, seconds.
const HALF: f64 = 86_400.0;
/// Maximal number of counted files; above it the coldest half is dropped.
const MOST: usize = 65_536;

struct FileHeat {
    heat: f64,
    at: Duration,
    path: Box<[u8]>,
}

impl FileHeat {
    fn now(&self, now: Duration) -> f64 {
        self.heat * (-now.saturating_sub(self.at).as_secs_f64() / HALF).exp2()
    }
}

/// The usage counts of all files.
#[derive(Default)]
pub(crate) struct Heat {
    is_on: AtomicBool,
    records: Mutex<HashMap<FileId, FileHeat>>,
}

impl Heat {
    /// Whether opens are counted.
    pub(crate) fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    /// Starts or stops counting.
    pub(crate) fn set(&self, is_on: bool) {
        self.is_on.store(is_on, Ordering::Relaxed);
        if !is_on {
            *self.records.lock() = HashMap::new();
        }
    }

    /// Counts an open of a file.
    pub(crate) fn opened(&self, id: FileId, now: Duration, path: impl FnOnce() -> Option<Vec<u8>>) {
        let mut records = self.records.lock();
        if let Some(record) = records.get_mut(&id) {
            (record.heat, record.at) = (record.now(now) + 1.0, now);
            return;
        }
        let Some(path) = path() else { return };
        if records.len() >= MOST {
            let mut heats: Vec<f64> = records.values().map(|record| record.now(now)).collect();
            let (_, median, _) = heats.select_nth_unstable_by(MOST / 2, f64::total_cmp);
            let median = *median;
            let mut spare = MOST / 2;
            // Of equal ones as many as necessary are dropped.
            records.retain(|_, record| {
                let goes = spare > 0 && record.now(now) <= median;
                spare -= usize::from(goes);
                !goes
            });
        }
        records.insert(id, FileHeat { heat: 1.0, at: now, path: path.into() });
    }

    /// The usage count of a file.
    pub(crate) fn of(&self, id: FileId, now: Duration) -> f64 {
        self.records.lock().get(&id).map_or(0.0, |record| record.now(now))
    }

    /// Files with at least this count, with their paths at the first open.
    pub(crate) fn above(&self, least: f64, now: Duration) -> Vec<(FileId, f64, Vec<u8>)> {
        let records = self.records.lock();
        let hot =
            records.iter().map(|(id, record)| (*id, record.now(now), record)).filter(|(_, heat, _)| *heat >= least);
        hot.map(|(id, heat, record)| (id, heat, record.path.to_vec())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::file_of_test as id;

    #[test]
    fn opens_add_up_and_fade() {
        let heat = Heat::default();
        let at = Duration::from_secs;
        for _ in 0..4 {
            heat.opened(id(1), at(1_000), || Some(b"a".to_vec()));
        }
        assert_eq!(heat.of(id(1), at(1_000)), 4.0);
        assert_eq!(heat.of(id(1), at(1_000 + 86_400)), 2.0);
        assert_eq!(heat.of(id(2), at(1_000)), 0.0);
        heat.opened(id(1), at(1_000 + 86_400), || None);
        assert_eq!(heat.above(3.0, at(1_000 + 86_400)), [(id(1), 3.0, b"a".to_vec())]);
        assert!(heat.above(3.1, at(1_000 + 86_400)).is_empty());
    }

    #[test]
    fn memory_is_bounded_and_the_hot_stay() {
        let heat = Heat::default();
        for _ in 0..3 {
            heat.opened(id(0), Duration::ZERO, || Some(b"hot".to_vec()));
        }
        for number in 1..200_000 {
            heat.opened(id(number), Duration::ZERO, || Some(Vec::new()));
        }
        assert!(heat.records.lock().len() <= MOST);
        assert_eq!(heat.of(id(0), Duration::ZERO), 3.0);
    }
}
