//! Events and damage of an imported pool, for `pool events` and `pool status`: a bounded list of
//! events, and the damaged frames that were found.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use nacre_pool::Damage;
use nacre_pool::frames::Owner;
use parking_lot::{Condvar, Mutex};
use serde::{Deserialize, Serialize};

/// Number of events that are kept.
const EVENTS_MOST: usize = 4096;
/// Number of damaged frames that are kept by name; more are counted only.
const DAMAGE_MOST: usize = 4096;

/// An event of the pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Counts from 1 at the import.
    pub number: u64,
    /// Time of the event, seconds since 1970.
    pub at: u64,
    /// Class, as `zpool events` names it: `sysevent.fs.zfs.pool_import`, `ereport.fs.zfs.checksum`.
    pub class: String,
    /// Details: names and values.
    pub details: Vec<(String, String)>,
}

/// Owner of damage: a dataset and a file in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Spot {
    /// The dataset; 0 is the catalog.
    pub dataset: u64,
    /// The file; 0 is the dataset's own tree.
    pub object: u64,
}

/// Damaged frames by their names: a frame that is found again is counted once.
#[derive(Debug, Default)]
struct Frames {
    owned: BTreeMap<Spot, BTreeSet<(u32, u32)>>,
    /// Frames whose owner is not known.
    lost: BTreeSet<(u32, u32)>,
    /// Number of frames that are not kept by name.
    more: u64,
}

impl Frames {
    fn contain(&self, name: (u32, u32)) -> bool {
        self.lost.contains(&name) || self.owned.values().any(|frames| frames.contains(&name))
    }

    fn kept(&self) -> usize {
        self.owned.values().map(BTreeSet::len).sum::<usize>() + self.lost.len()
    }

    /// Adds a frame; returns whether it is new.
    fn add(&mut self, name: (u32, u32), spot: Option<Spot>) -> bool {
        if self.contain(name) {
            return false;
        }
        match spot {
            _ if self.kept() >= DAMAGE_MOST => self.more += 1,
            Some(spot) => drop(self.owned.entry(spot).or_default().insert(name)),
            None => drop(self.lost.insert(name)),
        }
        true
    }
}

#[derive(Debug, Default)]
struct WatchState {
    events: VecDeque<Event>,
    last: u64,
    damage: Frames,
    /// Damage from before the running scrub: it counts until the scrub has read everything.
    before: Frames,
    /// Frames without an owner for which all trees were already searched.
    sought: BTreeSet<(u32, u32)>,
}

impl Frames {
    /// Assigns frames without an owner to the owners that were found.
    fn resolve(&mut self, owners: &BTreeMap<(u32, u32), Owner>) {
        for (name, owner) in owners {
            if self.lost.remove(name) {
                self.owned.entry(Spot { dataset: owner.dataset, object: owner.object }).or_default().insert(*name);
            }
        }
    }
}

/// Events and damage of an imported pool.
#[derive(Debug, Default)]
pub struct Watch {
    state: Mutex<WatchState>,
    changed: Condvar,
}

/// The known damage of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DamageFound {
    /// Damaged files and trees, each with its number of damaged frames.
    pub spots: Vec<(Spot, u64)>,
    /// Damaged frames whose owner is not known: segment and index.
    pub lost: Vec<(u32, u32)>,
    /// Number of damaged frames that are not kept by name.
    pub more: u64,
}

impl DamageFound {
    /// Total number of damaged frames.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.spots.iter().map(|(_, frames)| frames).sum::<u64>() + self.lost.len() as u64 + self.more
    }
}

impl Watch {
    /// Adds an event.
    pub fn note(&self, class: &str, details: Vec<(String, String)>) {
        let mut state = self.state.lock();
        state.last += 1;
        let event = Event { number: state.last, at: crate::clock::now(), class: class.to_owned(), details };
        if state.events.len() == EVENTS_MOST {
            state.events.pop_front();
        }
        state.events.push_back(event);
        self.changed.notify_all();
    }

    /// Returns the events after this number.
    #[must_use]
    pub fn events(&self, after: u64) -> Vec<Event> {
        self.state.lock().events.iter().filter(|event| event.number > after).cloned().collect()
    }

    /// Returns the events after this number, and waits for one if there is none yet; returns none
    /// when the time is over.
    #[must_use]
    pub fn wait(&self, after: u64, most: Duration) -> Vec<Event> {
        let mut state = self.state.lock();
        if state.last <= after {
            // A wake-up without an event does no harm: the caller asks again.
            let _ = self.changed.wait_for(&mut state, most);
        }
        state.events.iter().filter(|event| event.number > after).cloned().collect()
    }

    /// Forgets all events.
    pub fn clear_events(&self) {
        self.state.lock().events.clear();
    }

    /// Records a damaged frame. Returns whether it is new.
    pub fn damaged(&self, name: (u32, u32), owner: Option<Owner>, device: &str, damage: Option<&Damage>) -> bool {
        let new = {
            let mut state = self.state.lock();
            let known = state.before.contain(name);
            state.damage.add(name, owner.map(|owner| Spot { dataset: owner.dataset, object: owner.object })) && !known
        };
        if new {
            self.note_frame(name, owner, device, damage, false);
        }
        new
    }

    /// Records a frame of which one copy was damaged and repaired from another: nothing is lost.
    pub fn mended(&self, name: (u32, u32), owner: Option<Owner>, device: &str, damage: Option<&Damage>) {
        self.note_frame(name, owner, device, damage, true);
    }

    fn note_frame(&self, name: (u32, u32), owner: Option<Owner>, device: &str, damage: Option<&Damage>, mended: bool) {
        let class = if damage.is_some() { "ereport.fs.zfs.checksum" } else { "ereport.fs.zfs.io" };
        let mut details = vec![
            ("vdev_path".to_owned(), device.to_owned()),
            ("frame".to_owned(), format!("{}:{}", name.0, name.1)),
            ("reason".to_owned(), damage.map_or_else(|| "the device cannot read it".to_owned(), ToString::to_string)),
        ];
        if let Some(owner) = owner {
            details.extend([
                ("dataset".to_owned(), owner.dataset.to_string()),
                ("object".to_owned(), owner.object.to_string()),
                ("offset".to_owned(), owner.offset.to_string()),
            ]);
        }
        if mended {
            details.push(("repaired".to_owned(), "from the other copy".to_owned()));
        }
        self.note(class, details);
    }

    /// Returns the known damage.
    #[must_use]
    pub fn damage(&self) -> DamageFound {
        let state = self.state.lock();
        let mut all = Frames { more: state.damage.more.max(state.before.more), ..Frames::default() };
        for frames in [&state.damage, &state.before] {
            for (spot, names) in &frames.owned {
                names.iter().for_each(|name| {
                    all.add(*name, Some(*spot));
                });
            }
        }
        for frames in [&state.damage, &state.before] {
            frames.lost.iter().for_each(|name| {
                all.add(*name, None);
            });
        }
        DamageFound {
            spots: all.owned.into_iter().map(|(spot, names)| (spot, names.len() as u64)).collect(),
            lost: all.lost.into_iter().collect(),
            more: all.more,
        }
    }

    /// Frames without an owner for which the trees are to be searched; each is returned once.
    #[must_use]
    pub fn to_seek(&self) -> BTreeSet<(u32, u32)> {
        let mut state = self.state.lock();
        let lost: BTreeSet<_> = state.damage.lost.union(&state.before.lost).copied().collect();
        let new = lost.difference(&state.sought).copied().collect();
        // A frame that has left the list may come to it again, as another frame.
        state.sought = lost;
        new
    }

    /// Enters the owners that the search has found.
    pub fn found(&self, owners: &BTreeMap<(u32, u32), Owner>) {
        let mut state = self.state.lock();
        // A scrub that meets them again finds no owner in them either: they are then searched for again.
        state.sought.retain(|name| !owners.contains_key(name));
        state.damage.resolve(owners);
        state.before.resolve(owners);
    }

    /// Returns the known damage as a text of at most so many bytes that [`Self::take_up`] reads
    /// after the next import.
    #[must_use]
    pub fn kept(&self, most: usize) -> String {
        let state = self.state.lock();
        let mut words: Vec<String> = Vec::new();
        for frames in [&state.damage, &state.before] {
            let owned = frames.owned.iter().flat_map(|(spot, names)| {
                names.iter().map(move |name| (*name, format!("{}:{}", spot.dataset, spot.object)))
            });
            let lost = frames.lost.iter().map(|name| (*name, String::new()));
            words.extend(owned.chain(lost).map(|((segment, index), owner)| format!("{segment}:{index}:{owner}")));
        }
        words.sort();
        words.dedup();
        let mut length = 0;
        words.retain(|word| {
            length += word.len() + 1;
            length <= most
        });
        words.join(" ")
    }

    /// Restores damage that [`Self::kept`] has stored. Words that cannot be parsed (of another
    /// version) are skipped: a scrub finds that damage again.
    pub fn take_up(&self, kept: &str) {
        let mut state = self.state.lock();
        for word in kept.split(' ') {
            let numbers: Vec<Option<u64>> = word.split(':').map(|number| number.parse().ok()).collect();
            let name = |segment: u64, index: u64| Some((u32::try_from(segment).ok()?, u32::try_from(index).ok()?));
            match numbers.as_slice() {
                [Some(segment), Some(index), Some(dataset), Some(object)] => {
                    let spot = Spot { dataset: *dataset, object: *object };
                    name(*segment, *index).map(|name| state.damage.add(name, Some(spot)));
                }
                [Some(segment), Some(index), ..] => {
                    name(*segment, *index).map(|name| state.damage.add(name, None));
                }
                _ => {}
            }
        }
    }

    /// A scrub begins: known damage becomes that of before it.
    pub fn begin_scrub(&self) {
        let mut state = self.state.lock();
        let now = std::mem::take(&mut state.damage);
        for (spot, names) in now.owned {
            names.into_iter().for_each(|name| {
                state.before.add(name, Some(spot));
            });
        }
        now.lost.into_iter().for_each(|name| {
            state.before.add(name, None);
        });
        state.before.more += now.more;
    }

    /// A scrub of everything, or of all frames that are known by name, has ended: earlier damage
    /// that it has not found again is gone.
    pub fn end_scrub(&self, everything: bool) {
        let before = &mut self.state.lock().before;
        let more = if everything { 0 } else { before.more };
        *before = Frames { more, ..Frames::default() };
    }

    /// The damaged frames that are known by name: segment and index.
    #[must_use]
    pub fn damaged_frames(&self) -> BTreeSet<(u32, u32)> {
        let state = self.state.lock();
        let names = |frames: &Frames| frames.owned.values().flatten().chain(&frames.lost).copied().collect::<Vec<_>>();
        [&state.damage, &state.before].into_iter().flat_map(names).collect()
    }

    /// Forgets the damage: it is repaired, or will be found again.
    pub fn clear_damage(&self) {
        let mut state = self.state.lock();
        (state.damage, state.before) = (Frames::default(), Frames::default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damage_is_counted_once() {
        let watch = Watch::default();
        let owner = Owner { dataset: 1, object: 5, offset: 0 };
        assert!(watch.damaged((1, 2), Some(owner), "disk", Some(&Damage::Checksum)));
        assert!(!watch.damaged((1, 2), Some(owner), "disk", Some(&Damage::Checksum)));
        assert!(!watch.damaged((1, 2), None, "disk", None));
        assert!(watch.damaged((1, 3), None, "disk", Some(&Damage::Header)));
        let found = watch.damage();
        assert_eq!((found.count(), found.spots.len(), found.lost.len()), (2, 1, 1));
        assert_eq!(watch.events(0).len(), 2);
        assert_eq!(watch.wait(1, Duration::ZERO).len(), 1);
        let after = Watch::default();
        after.take_up(&watch.kept(1000));
        assert_eq!(after.damage(), watch.damage());
        after.take_up("nonsense 1 1:x:3 99999999999:1:1:1");
        assert_eq!((after.damage(), watch.kept(5)), (watch.damage(), String::new()));
        watch.mended((1, 4), Some(owner), "disk", Some(&Damage::Checksum));
        assert_eq!((watch.damage().count(), watch.events(2).len()), (2, 1), "nothing is lost");
        watch.begin_scrub();
        assert_eq!(watch.damage().count(), 2);
        assert!(!watch.damaged((1, 3), None, "disk", Some(&Damage::Header)));
        watch.end_scrub(true);
        assert_eq!(watch.damage().count(), 1);
        watch.clear_damage();
        assert_eq!(watch.damage(), DamageFound::default());
    }
}
