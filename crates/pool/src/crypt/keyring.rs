//! Keys in memory: the families whose keys are loaded.
//!
//! Callers: the adapter for frames, the key table. Invariants: root and master keys lie in locked memory, which is in no
//! core file and in no forked process; a key is wiped when its last user is gone.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};

use nacre_sys::secret_memory::{SecretArena, SecretSlot, Unlocked};
use parking_lot::{Mutex, RwLock};

use super::ID;
use super::derive::{KeyView, SecretKey};
use super::message::Cipher;
use super::stored_form::FrameKeys;
use crate::error::PoolError;
use crate::frame::Sealer;

/// Length of an arena, bytes: 512 keys, a quarter of what any user may lock.
const ARENA: usize = 16 << 10;

/// A key in locked memory.
pub struct LockedKey(SecretSlot);

impl LockedKey {
    /// The key as a parent of derived keys.
    #[must_use]
    pub fn view(&self) -> KeyView<'_> {
        KeyView(self.0.get())
    }
}

/// A generation of a family of keys.
pub struct Generation {
    /// Its order among the generations of the family.
    pub ordinal: u8,
    /// Its random id.
    pub id: [u8; 8],
    /// The cipher for everything that it seals.
    pub cipher: Cipher,
    /// The master key.
    pub master: LockedKey,
}

/// The keys of a family of file systems: a file system and its clones.
pub struct FamilyKeys {
    /// Number of the family in this pool.
    pub family: u32,
    /// Its random id.
    pub crypt_id: [u8; ID],
    /// The generation that seals new frames.
    newest: Generation,
    /// Generations that only open frames, in the order of their ordinals.
    older: Vec<Generation>,
}

impl FamilyKeys {
    /// The keys of a family, from its generations in any order.
    ///
    /// # Errors
    /// [`PoolError::Refused`] without a generation, with two of one ordinal or id, and with impossible numbers.
    pub fn new(family: u32, crypt_id: [u8; ID], mut generations: Vec<Generation>) -> Result<Self, PoolError> {
        generations.sort_by_key(|generation| generation.ordinal);
        let is_twice = generations.windows(2).any(|pair| matches!(pair, [one, next] if one.ordinal == next.ordinal));
        let ids: BTreeSet<[u8; 8]> = generations.iter().map(|generation| generation.id).collect();
        let has_impossible = generations.first().is_none_or(|first| first.ordinal == 0);
        if is_twice || ids.len() != generations.len() || has_impossible || !(1..=Sealer::FAMILY_MAX).contains(&family) {
            return Err(PoolError::Refused(format!("the key generations of family {family}")));
        }
        match generations.pop() {
            Some(newest) => Ok(Self { family, crypt_id, newest, older: generations }),
            None => Err(PoolError::Refused(format!("family {family} has no key generation"))),
        }
    }

    /// The generation that seals new frames.
    #[must_use]
    pub fn current(&self) -> &Generation {
        &self.newest
    }

    /// The generation with this id.
    #[must_use]
    pub fn generation(&self, id: &[u8; 8]) -> Option<&Generation> {
        if self.newest.id == *id { Some(&self.newest) } else { self.older.iter().find(|older| older.id == *id) }
    }

    /// A generation's keys of frames.
    #[must_use]
    pub fn frame_keys<'a>(&self, generation: &'a Generation) -> FrameKeys<'a> {
        let Generation { id, cipher, master, .. } = generation;
        FrameKeys { cipher: *cipher, crypt_id: self.crypt_id, generation: *id, master: master.view() }
    }
}

/// The loaded keys of a pool.
pub struct Keyring {
    unlocked: Unlocked,
    /// Each belongs to the keys in it, and is unmapped with the last of them: a machine hibernates again then.
    arenas: Mutex<Vec<Weak<SecretArena>>>,
    families: RwLock<BTreeMap<u32, Arc<FamilyKeys>>>,
}

impl Keyring {
    /// A keyring without keys. Memory is mapped with the first key.
    #[must_use]
    pub fn new(unlocked: Unlocked) -> Self {
        Self { unlocked, arenas: Mutex::default(), families: RwLock::default() }
    }

    /// Moves a key to locked memory.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where no memory can be locked, unless other memory is accepted.
    pub fn keep(&self, key: &SecretKey) -> Result<LockedKey, PoolError> {
        let mut slot = self.slot()?;
        slot.get_mut().copy_from_slice(key.expose());
        Ok(LockedKey(slot))
    }

    fn slot(&self) -> Result<SecretSlot, PoolError> {
        let mut arenas = self.arenas.lock();
        arenas.retain(|arena| arena.strong_count() > 0);
        let taken = arenas.iter().filter_map(Weak::upgrade).find_map(|arena| arena.take());
        if let Some(slot) = taken {
            return Ok(slot);
        }
        let arena = SecretArena::new(ARENA, self.unlocked).map_err(|error| {
            PoolError::Refused(format!("no memory can be locked for keys ({error}); --unlocked accepts other memory"))
        })?;
        let slot = arena.take().ok_or_else(|| PoolError::Refused("no memory for keys".to_owned()))?;
        arenas.push(Arc::downgrade(&arena));
        Ok(slot)
    }

    /// Whether all keys are in memory that the kernel never swaps out.
    #[must_use]
    pub fn is_locked(&self) -> bool {
        self.arenas.lock().iter().filter_map(Weak::upgrade).all(|arena| arena.is_locked())
    }

    /// Adds the keys of a family, or replaces them.
    pub fn load(&self, keys: FamilyKeys) -> Arc<FamilyKeys> {
        let keys = Arc::new(keys);
        self.families.write().insert(keys.family, Arc::clone(&keys));
        keys
    }

    /// The keys of a family, if they are loaded.
    #[must_use]
    pub fn family(&self, number: u32) -> Option<Arc<FamilyKeys>> {
        self.families.read().get(&number).cloned()
    }

    /// Removes the keys of a family; they are wiped once nothing uses them. Returns whether they were loaded.
    pub fn unload(&self, number: u32) -> bool {
        self.families.write().remove(&number).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crypt::tests::key;

    fn keyring() -> Keyring {
        Keyring::new(Unlocked::Refused)
    }

    fn generation(keyring: &Keyring, ordinal: u8, id: u8) -> Generation {
        let master = keyring.keep(&key(&[id; 32])).unwrap();
        Generation { ordinal, id: [id; 8], cipher: Cipher::Aes256Gcm, master }
    }

    #[test]
    fn the_newest_generation_seals_and_all_are_found() {
        let ring = keyring();
        let generations = [(3, 30), (9, 90), (1, 10)].map(|(ordinal, id)| generation(&ring, ordinal, id)).into();
        let keys = FamilyKeys::new(7, [1; ID], generations).unwrap();
        assert_eq!(keys.current().ordinal, 9);
        for (ordinal, id) in [(1, 10), (3, 30), (9, 90)] {
            let found = keys.generation(&[id; 8]).unwrap();
            assert_eq!((found.ordinal, found.master.view().0), (ordinal, &[id; 32]));
            assert_eq!(keys.frame_keys(found).generation, [id; 8]);
        }
        assert!(keys.generation(&[5; 8]).is_none());
    }

    #[test]
    fn impossible_families_are_refused() {
        let ring = keyring();
        let new = |family, generations: &[(u8, u8)]| {
            let generations = generations.iter().map(|(ordinal, id)| generation(&ring, *ordinal, *id)).collect();
            FamilyKeys::new(family, [1; ID], generations).is_ok()
        };
        assert!(new(1, &[(1, 1)]) && new(Sealer::FAMILY_MAX, &[(255, 1)]));
        assert!(!new(0, &[(1, 1)]) && !new(Sealer::FAMILY_MAX + 1, &[(1, 1)]));
        assert!(!new(1, &[]) && !new(1, &[(0, 1)]));
        assert!(!new(1, &[(1, 1), (1, 2)]) && !new(1, &[(1, 1), (2, 1)]));
    }

    #[test]
    fn keys_are_wiped_when_their_last_user_is_gone() {
        let ring = keyring();
        let keys = FamilyKeys::new(7, [1; ID], vec![generation(&ring, 1, 0x5a)]).unwrap();
        let used = ring.load(keys);
        assert!(ring.is_locked() && ring.family(7).is_some() && ring.family(8).is_none());
        assert!(ring.unload(7) && !ring.unload(7) && ring.family(7).is_none());
        let arena = ring.arenas.lock()[0].upgrade().unwrap();
        let free = || std::iter::from_fn(|| arena.take()).collect::<Vec<SecretSlot>>();
        assert_eq!(used.current().master.view().0, &[0x5a; 32], "still in use");
        assert_eq!(free().len(), ARENA / 32 - 1);
        drop(used);
        let slots = free();
        assert_eq!(slots.len(), ARENA / 32);
        assert!(slots.iter().all(|slot| slot.get() == &[0; 32]));
        drop((slots, arena));
        assert_eq!(ring.arenas.lock()[0].strong_count(), 0, "unmapped with the last key: the machine may hibernate");
        let _again = ring.keep(&key(&[1; 32])).unwrap();
        assert_eq!(ring.arenas.lock().len(), 1);
    }

    #[test]
    fn more_keys_than_an_arena_holds_are_kept() {
        let ring = keyring();
        let kept: Vec<LockedKey> = (0..=ARENA / 32).map(|at| ring.keep(&key(&[at as u8; 32])).unwrap()).collect();
        assert_eq!(ring.arenas.lock().len(), 2);
        assert!(kept.iter().enumerate().all(|(at, key)| key.view().0 == &[at as u8; 32]));
    }
}
