//! Rows of keys are set and found, and inconsistent ones are refused.

use std::sync::Arc;

use super::*;
use crate::cache::Cache;
use crate::catalog::key_rows::{BranchPosition, SealedState};
use crate::catalog::{DatasetRow, PoolHead, SnapshotRow};
use crate::deadlist::ListId;
use crate::frames::{Frames, NewFrame};
use crate::pointer::Pointer;
use crate::space::Usage;

/// No frames: the catalog of these tests is never written.
struct Nowhere;

impl Frames for Nowhere {
    fn read(&self, pointer: &Pointer) -> Result<Arc<[u8]>, PoolError> {
        Err(PoolError::Frame { pointer: *pointer, damage: Damage::Header })
    }

    fn expect(&self, _: &[Pointer]) {}

    fn write(&self, _: &NewFrame<'_>) -> Result<Pointer, PoolError> {
        Err(PoolError::NoSpace)
    }
}

fn root() -> KeyRootRow {
    KeyRootRow { id: [1; 16], commitment: [2; 32], dataset: 1, iterations: 0 }
}

fn family() -> FamilyRow {
    FamilyRow { crypt_id: [3; 16], key_root: 5, target: None }
}

fn seal() -> SealRow {
    let state = SealedState {
        generation: [1; 8],
        complete: true,
        at: BranchPosition { branch: [2; 16], counter: 1 },
        split_from: BranchPosition::default(),
        guid: 0,
        time: 0,
        session: [7; 16],
        next_logged: 0,
        next_journaled: 0,
        root: None,
        properties: [0; 16],
    };
    SealRow { family: 9, floor: 0, state, mac: [0; 32] }
}

fn plain() -> Catalog {
    let mut catalog = Catalog::open(Arc::new(Nowhere), Arc::new(Cache::new(1 << 20)), None, Txg(1));
    catalog.set_head(&PoolHead { next: 2, root: 1, freeing: ListId(1), history: 0 }).unwrap();
    let row = DatasetRow {
        parent: 0,
        name: "tank".to_owned(),
        guid: 1,
        created: Txg(1),
        created_at: 1,
        root: None,
        list: ListId(2),
        usage: Usage::default(),
        origin: None,
        newest: Txg(4),
    };
    catalog.enter(1, &row).unwrap();
    let row = SnapshotRow {
        name: "monday".to_owned(),
        guid: 2,
        created_at: 2,
        root: None,
        list: ListId(3),
        referenced: 0,
        logical: 0,
        deferred: false,
        holds: 0,
        clones: 0,
    };
    catalog.enter_snapshot(1, Txg(4), &row).unwrap();
    catalog
}

fn encrypted() -> Catalog {
    let mut catalog = plain();
    catalog.set_erasable_sequence(8).unwrap();
    catalog.set_key_root(5, Some(&root())).unwrap();
    catalog.set_key_root(6, Some(&KeyRootRow { dataset: 0, ..root() })).unwrap();
    catalog.set_slot(5, 0, Some(vec![1])).unwrap();
    catalog.set_slot(5, 15, Some(vec![2])).unwrap();
    catalog.set_slot(6, 3, Some(vec![3])).unwrap();
    catalog.set_family(9, Some(&family())).unwrap();
    catalog.set_master_key(9, 1, Some(vec![4])).unwrap();
    catalog.set_master_key(9, 255, Some(vec![5])).unwrap();
    catalog.set_seal(1, Txg(0), Some(&seal())).unwrap();
    catalog.set_seal(1, Txg(4), Some(&seal())).unwrap();
    catalog
}

#[test]
fn rows_of_keys_are_set_found_and_removed() {
    let mut catalog = encrypted();
    catalog.check_shape().unwrap();
    catalog.check_keys(true).unwrap();
    assert_eq!(catalog.erasable_sequence().unwrap(), Some(8));
    assert_eq!(catalog.key_roots().unwrap().keys().copied().collect::<Vec<_>>(), [5, 6]);
    assert_eq!(catalog.slots(5).unwrap(), [(0, vec![1]), (15, vec![2])]);
    assert_eq!(catalog.families().unwrap(), BTreeMap::from([(9, family())]));
    assert_eq!(catalog.master_keys(9).unwrap(), [(1, vec![4]), (255, vec![5])]);
    assert_eq!((catalog.seal(1, Txg(0)).unwrap(), catalog.seal(1, Txg(3)).unwrap()), (Some(seal()), None));
    for (slot, rest) in [(0, vec![(15, vec![2])]), (15, vec![])] {
        catalog.set_slot(5, slot, None).unwrap();
        assert_eq!(catalog.slots(5).unwrap(), rest);
    }
    catalog.set_master_key(9, 1, None).unwrap();
    assert_eq!(catalog.master_keys(9).unwrap(), [(255, vec![5])]);
    assert_eq!(catalog.slots(6).unwrap(), [(3, vec![3])]);
    assert!(catalog.set_slot(5, 16, None).is_err() && catalog.set_master_key(9, 0, None).is_err());
    assert!(catalog.set_key_root(0, None).is_err() && catalog.set_family(0, None).is_err());
    assert!(catalog.set_family(1 << 24, Some(&family())).is_err());
}

#[test]
fn rows_that_refer_to_nothing_are_damage() {
    let changes: [&dyn Fn(&mut Catalog); 12] = [
        &|catalog| catalog.delete(&rows::key(KEY_ROOT, &[0], b"")).unwrap(),
        &|catalog| catalog.put(&rows::key(KEY_ROOT, &[0], b""), &[1]).unwrap(),
        &|catalog| catalog.set_key_root(5, None).unwrap(),
        &|catalog| catalog.set_key_root(5, Some(&KeyRootRow { dataset: 77, ..root() })).unwrap(),
        &|catalog| catalog.put(&rows::key(SLOT, &[5], &[16]), &[1]).unwrap(),
        &|catalog| catalog.put(&rows::key(SLOT, &[5], &[1, 2]), &[1]).unwrap(),
        &|catalog| catalog.set_slot(7, 1, Some(vec![1])).unwrap(),
        &|catalog| catalog.set_family(9, None).unwrap(),
        &|catalog| catalog.set_family(9, Some(&FamilyRow { key_root: 7, ..family() })).unwrap(),
        &|catalog| catalog.put(&rows::key(MASTER_KEY, &[9], &[0]), &[1]).unwrap(),
        &|catalog| catalog.set_seal(1, Txg(5), Some(&seal())).unwrap(),
        &|catalog| catalog.set_seal(1, Txg(4), Some(&SealRow { family: 10, ..seal() })).unwrap(),
    ];
    for (number, change) in changes.iter().enumerate() {
        let mut catalog = encrypted();
        change(&mut catalog);
        assert!(matches!(catalog.check_keys(true), Err(PoolError::Format(_))), "change {number}");
    }
}

#[test]
fn a_pool_without_encryption_has_no_row_of_keys() {
    plain().check_keys(false).unwrap();
    plain().check_keys(true).unwrap();
    assert!(encrypted().check_keys(false).is_err());
    for kind in KEY_ROOT..=LAST {
        let mut catalog = plain();
        catalog.put(&rows::key(kind, &[1], b"x"), &[1]).unwrap();
        assert!(matches!(catalog.check_keys(false), Err(PoolError::Format(_))), "{kind:#x}");
    }
}
