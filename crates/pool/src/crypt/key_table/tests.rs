//! Key tables in a catalog: what opens, what does not, and with which error.

use std::sync::Arc;

use nacre_sys::secret_memory::Unlocked;

use super::*;
use crate::cache::Cache;
use crate::catalog::key_rows::{ARGON2_MEMORY_MAX, Argon2Cost, KeyFormat};
use crate::crypt::slots::{argon2 as argon2_for_tests, choose_cost};
use crate::crypt::tests::{Seeded, hex_of, key};
use crate::frames::{Frames, NewFrame};
use crate::pointer::{Pointer, Txg};

/// No frames: the catalog of these tests is never written.
struct Nowhere;

impl Frames for Nowhere {
    fn read(&self, _: &Pointer) -> std::result::Result<Arc<[u8]>, PoolError> {
        Err(PoolError::NoSpace)
    }

    fn expect(&self, _: &[Pointer]) {}

    fn write(&self, _: &NewFrame<'_>) -> std::result::Result<Pointer, PoolError> {
        Err(PoolError::NoSpace)
    }
}

const COST: Argon2Cost = Argon2Cost { salt: [3; 32], memory: 64, passes: 2, lanes: 1 };

fn new_slot(label: &str) -> NewSlot {
    NewSlot { location: "prompt".to_owned(), label: label.to_owned(), created: 7, cost: COST }
}

fn secret(format: KeyFormat, read: &[u8]) -> Secret {
    Secret::new(format, read).unwrap()
}

fn passphrase(text: &str) -> Secret {
    secret(KeyFormat::Passphrase, text.as_bytes())
}

struct Bench {
    catalog: Catalog,
    erasable: SecretKey,
    random: Seeded,
}

impl Bench {
    fn new() -> Self {
        let mut catalog = Catalog::open(Arc::new(Nowhere), Arc::new(Cache::new(1 << 20)), None, Txg(1));
        catalog.set_erasable_sequence(1).unwrap();
        Self { catalog, erasable: key(&[0xee; 32]), random: Seeded::new(1) }
    }

    fn table(&mut self) -> KeyTable<'_> {
        KeyTable { catalog: &mut self.catalog, erasable: self.erasable.view(), random: &self.random }
    }
}

/// A key root with a passphrase in slot 0, a hexadecimal key in slot 1, and a raw one in slot 5.
fn with_slots() -> (Bench, u64, SecretKey) {
    let mut bench = Bench::new();
    let mut table = bench.table();
    let (number, root) = table.add_key_root(0, 350_000).unwrap();
    table.put_slot(number, 0, &new_slot("first"), &passphrase("correct horse"), root.view()).unwrap();
    let digits = "0f".repeat(32);
    table.put_slot(number, 1, &new_slot(""), &secret(KeyFormat::Hex, digits.as_bytes()), root.view()).unwrap();
    table.put_slot(number, 5, &new_slot(""), &secret(KeyFormat::Raw, &[9; 32]), root.view()).unwrap();
    (bench, number, root)
}

#[test]
fn secrets_have_their_forms() {
    let refused = |format, read: &[u8]| Secret::new(format, read).is_err();
    assert!(refused(KeyFormat::Passphrase, b"seven77") && refused(KeyFormat::Passphrase, b"seven77\n"));
    assert!(refused(KeyFormat::Passphrase, &[b'x'; 513]));
    assert!(!refused(KeyFormat::Passphrase, &[b'x'; 512]));
    assert!(refused(KeyFormat::Raw, &[1; 31]) && refused(KeyFormat::Raw, &[1; 33]));
    let digits = "aF".repeat(32);
    assert!(!refused(KeyFormat::Hex, digits.as_bytes()));
    assert!(!refused(KeyFormat::Hex, format!("{digits}\n").as_bytes()), "one newline is cut");
    assert!(refused(KeyFormat::Hex, format!("{digits}\n\n").as_bytes()));
    assert!(refused(KeyFormat::Hex, &digits.as_bytes()[1..]) && refused(KeyFormat::Hex, "x0".repeat(32).as_bytes()));
    let error = Secret::new(KeyFormat::Passphrase, b"hunter2").err().unwrap().to_string();
    assert!(!error.contains("hunter2"), "{error}");
    // A newline at the end of a raw key is a part of it.
    assert!(!refused(KeyFormat::Raw, &[b'\n'; 32]));
}

#[test]
fn a_root_key_opens_by_each_of_its_slots() {
    let (mut bench, number, root) = with_slots();
    let table = bench.table();
    let opened = |secret: &Secret, only| table.open(number, secret, only).map(|(slot, key)| (slot, *key.view().0));
    let root = *root.view().0;
    assert_eq!(opened(&passphrase("correct horse"), None).unwrap(), (0, root));
    assert_eq!(opened(&passphrase("correct horse\n"), None).unwrap(), (0, root), "one newline is cut");
    let digits = "0F".repeat(32);
    assert_eq!(opened(&secret(KeyFormat::Hex, digits.as_bytes()), None).unwrap(), (1, root));
    assert_eq!(opened(&secret(KeyFormat::Raw, &[9; 32]), Some(5)).unwrap(), (5, root));
    let wrong = [
        (passphrase("correct house"), None),
        (passphrase("correct horse"), Some(1)),
        (secret(KeyFormat::Raw, &[8; 32]), None),
        (secret(KeyFormat::Raw, &[0x0f; 32]), None),
        (secret(KeyFormat::Raw, &[9; 32]), Some(2)),
    ];
    for (secret, only) in wrong {
        assert!(matches!(opened(&secret, only), Err(KeyError::WrongKey)));
    }
    let slots = table.slots(number).unwrap();
    assert_eq!(
        slots.iter().map(|(slot, row)| (*slot, row.as_ref().unwrap().label.as_str())).collect::<Vec<_>>(),
        [(0, "first"), (1, ""), (5, "")]
    );
    assert!(matches!(table.open(99, &passphrase("correct horse"), None), Err(KeyError::Damaged)));
}

#[test]
fn wrong_damaged_and_forged_slots_are_told_apart() {
    let (mut bench, number, root) = with_slots();
    let horse = passphrase("correct horse");
    // A bit of the stored box: the outer box does not open.
    let (_, sealed) = bench.catalog.slots(number).unwrap().remove(0);
    for at in [0, 40, sealed.len() - 1] {
        let mut changed = sealed.clone();
        changed[at] ^= 1;
        bench.catalog.set_slot(number, 0, Some(changed)).unwrap();
        assert!(matches!(bench.table().open(number, &horse, None), Err(KeyError::Damaged)), "byte {at}");
    }
    // The other slots open as before, and the last one that can be read stays.
    let raw = secret(KeyFormat::Raw, &[9; 32]);
    assert_eq!(bench.table().open(number, &raw, None).unwrap().0, 5);
    assert_eq!(bench.table().open(number, &raw, Some(5)).unwrap().0, 5);
    let listed = bench.table().slots(number).unwrap();
    assert_eq!(
        listed.iter().map(|(slot, row)| (*slot, row.is_some())).collect::<Vec<_>>(),
        [(0, false), (1, true), (5, true)]
    );
    let removed = bench.catalog.slots(number).unwrap();
    bench.table().remove_slot(number, 1).unwrap();
    assert!(bench.table().remove_slot(number, 5).is_err(), "the last one that opens");
    bench.catalog.set_slot(number, 1, Some(removed[1].1.clone())).unwrap();
    // The box of another slot.
    bench.catalog.set_slot(number, 3, Some(sealed.clone())).unwrap();
    bench.catalog.set_slot(number, 0, Some(sealed)).unwrap();
    assert!(matches!(bench.table().open(number, &horse, Some(3)), Err(KeyError::Damaged)));
    assert_eq!(bench.table().open(number, &horse, None).unwrap().0, 0);
    bench.catalog.set_slot(number, 3, None).unwrap();
    // Another erasable key: the table was destroyed.
    let right = std::mem::replace(&mut bench.erasable, key(&[1; 32]));
    assert!(matches!(bench.table().open(number, &horse, None), Err(KeyError::Damaged)));
    bench.erasable = right;
    // A slot that somebody with the erasable key has made for a root key of his own, which the same passphrase opens.
    let own = key(&[0x66; 32]);
    let mut row = bench.catalog.key_roots().unwrap()[&number];
    let forged = seal_slot(&bench.random, &row, 0, &new_slot("x"), &horse, own.view()).unwrap();
    let field = slot_key(number, 0);
    let sealed = seal_box(&bench.random, KeyPurpose::BoxErasable, bench.erasable.view(), &[&field], &forged.encode());
    bench.catalog.set_slot(number, 0, Some(sealed.unwrap())).unwrap();
    assert!(matches!(bench.table().open(number, &horse, None), Err(KeyError::Forged)));
    assert!(matches!(bench.table().put_slot(number, 2, &new_slot(""), &horse, own.view()), Err(KeyError::Forged)));
    assert!(bench.catalog.slots(number).unwrap().iter().all(|(slot, _)| *slot != 2), "nothing was put");
    bench.table().put_slot(number, 0, &new_slot(""), &horse, root.view()).unwrap();
    // Another id of the key root: slots belong to theirs.
    row.id = [0; ID];
    bench.catalog.set_key_root(number, Some(&row)).unwrap();
    assert!(matches!(bench.table().open(number, &horse, None), Err(KeyError::WrongKey)));
}

/// Parameters are checked before anything is derived: four TiB would never be allocated.
#[test]
fn impossible_parameters_are_refused_before_derivation() {
    let (mut bench, number, root) = with_slots();
    let horse = passphrase("correct horse");
    for cost in [
        Argon2Cost { memory: u32::MAX, ..COST },
        Argon2Cost { memory: ARGON2_MEMORY_MAX + 1, ..COST },
        Argon2Cost { passes: 65, ..COST },
        Argon2Cost { lanes: 5, ..COST },
        Argon2Cost { memory: 7, ..COST },
    ] {
        let new = NewSlot { cost, ..new_slot("") };
        let refused = bench.table().put_slot(number, 0, &new, &horse, root.view());
        assert!(matches!(refused, Err(KeyError::Damaged)), "{cost:?}");
    }
    bench.table().open(number, &horse, None).unwrap();
}

#[test]
fn the_last_slot_stays_and_slots_have_an_end() {
    let (mut bench, number, root) = with_slots();
    let mut table = bench.table();
    assert_eq!(table.free_slot(number).unwrap(), 2);
    table.remove_slot(number, 0).unwrap();
    assert!(matches!(table.open(number, &passphrase("correct horse"), None), Err(KeyError::WrongKey)));
    assert_eq!(table.free_slot(number).unwrap(), 0);
    assert!(table.remove_slot(number, 0).is_err(), "not there");
    table.remove_slot(number, 5).unwrap();
    let error = table.remove_slot(number, 1).err().unwrap().to_string();
    assert!(error.contains("last slot"), "{error}");
    while let Ok(slot) = table.free_slot(number) {
        table.put_slot(number, slot, &new_slot(""), &secret(KeyFormat::Raw, &[slot; 32]), root.view()).unwrap();
    }
    assert_eq!(table.slots(number).unwrap().len(), usize::from(SLOTS));
}

#[test]
fn families_open_by_their_root_key_alone() {
    let (mut bench, number, root) = with_slots();
    let keyring = Keyring::new(Unlocked::Accepted);
    let family = bench.table().add_family(number, root.view(), Cipher::Aes256Gcm).unwrap();
    assert_eq!(family, 1, "headers of frames in the clear have the number 0");
    let keys = bench.table().load_family(family, root.view(), &keyring).unwrap();
    let first = *keys.current().master.view().0;
    assert_eq!((keys.family, keys.current().ordinal, keys.current().cipher), (1, 1, Cipher::Aes256Gcm));
    assert_eq!(bench.table().add_generation(family, root.view(), Cipher::ChaCha20Poly1305).unwrap(), 2);
    let keys = bench.table().load_family(family, root.view(), &keyring).unwrap();
    assert_eq!((keys.current().ordinal, keys.current().cipher), (2, Cipher::ChaCha20Poly1305));
    assert_ne!(*keys.current().master.view().0, first);
    let (_, other) = bench.table().add_key_root(0, 0).unwrap();
    assert!(matches!(bench.table().load_family(family, other.view(), &keyring), Err(KeyError::WrongKey)));
    let (families, masters) = (bench.catalog.families().unwrap().len(), bench.catalog.master_keys(family).unwrap());
    assert!(matches!(bench.table().add_family(number, other.view(), Cipher::Aes256Gcm), Err(KeyError::Forged)));
    assert!(matches!(bench.table().add_generation(family, other.view(), Cipher::Aes256Gcm), Err(KeyError::Forged)));
    assert_eq!(bench.catalog.families().unwrap().len(), families, "nothing was put");
    assert_eq!(bench.catalog.master_keys(family).unwrap(), masters);
    assert!(matches!(bench.table().load_family(7, root.view(), &keyring), Err(KeyError::Damaged)));
    let second = bench.table().add_family(number, root.view(), Cipher::Aes256Gcm).unwrap();
    // The master key of one family in the place of another's, and a generation in the place of another.
    let masters = bench.catalog.master_keys(family).unwrap();
    bench.catalog.set_master_key(second, 1, Some(masters[0].1.clone())).unwrap();
    assert!(matches!(bench.table().load_family(second, root.view(), &keyring), Err(KeyError::Damaged)));
    bench.catalog.set_master_key(family, 3, Some(masters[0].1.clone())).unwrap();
    assert!(matches!(bench.table().load_family(family, root.view(), &keyring), Err(KeyError::Damaged)));
    bench.catalog.set_master_key(family, 3, None).unwrap();
    // A family that was moved to another key root in the catalog alone.
    let mut row = bench.catalog.families().unwrap()[&family].clone();
    row.crypt_id = [0; ID];
    bench.catalog.set_family(family, Some(&row)).unwrap();
    assert!(matches!(bench.table().load_family(family, root.view(), &keyring), Err(KeyError::WrongKey)));
}

#[test]
fn a_renewed_erasable_key_opens_everything_and_the_old_one_nothing() {
    let (mut bench, number, root) = with_slots();
    let keyring = Keyring::new(Unlocked::Accepted);
    let family = bench.table().add_family(number, root.view(), Cipher::Aes256Gcm).unwrap();
    let before: Vec<_> = bench.catalog.slots(number).unwrap();
    let new = key(&[0x77; 32]);
    assert_eq!(bench.table().renew(2, new.view(), DamagedRows::Refused).unwrap(), 0);
    assert_eq!(bench.catalog.erasable_sequence().unwrap(), Some(2));
    assert!(
        bench.catalog.slots(number).unwrap().iter().zip(&before).all(|(now, then)| now.0 == then.0 && now.1 != then.1)
    );
    assert!(bench.table().slots(number).unwrap().iter().all(|(_, row)| row.is_none()), "the old key");
    for damaged in [DamagedRows::Refused, DamagedRows::Removed] {
        assert!(matches!(bench.table().renew(3, key(&[1; 32]).view(), damaged), Err(KeyError::Damaged)));
    }
    assert_eq!(bench.catalog.erasable_sequence().unwrap(), Some(2), "nothing has changed");
    bench.erasable = new;
    bench.table().open(number, &passphrase("correct horse"), None).unwrap();
    bench.table().load_family(family, root.view(), &keyring).unwrap();
}

/// One damaged row does not keep the erasable key from being renewed for all others.
#[test]
fn damaged_rows_are_removed_by_a_renewal_that_accepts_it() {
    let (mut bench, number, root) = with_slots();
    let family = bench.table().add_family(number, root.view(), Cipher::Aes256Gcm).unwrap();
    let mut slots = bench.catalog.slots(number).unwrap();
    slots[1].1[50] ^= 1;
    bench.catalog.set_slot(number, 1, Some(slots[1].1.clone())).unwrap();
    let new = key(&[0x77; 32]);
    assert!(matches!(bench.table().renew(2, new.view(), DamagedRows::Refused), Err(KeyError::Damaged)));
    assert_eq!(bench.catalog.slots(number).unwrap(), slots, "nothing has changed");
    assert_eq!(bench.table().renew(2, new.view(), DamagedRows::Removed).unwrap(), 1);
    bench.erasable = new;
    let left: Vec<u8> = bench.table().slots(number).unwrap().iter().map(|(slot, _)| *slot).collect();
    assert_eq!(left, [0, 5]);
    bench.table().open(number, &passphrase("correct horse"), None).unwrap();
    bench.table().load_family(family, root.view(), &Keyring::new(Unlocked::Accepted)).unwrap();
}

#[test]
fn passphrases_are_derived_as_argon2id_is_defined() {
    use argon2::{Algorithm, Argon2, AssociatedData, Block, Params, ParamsBuilder, Version};
    // RFC 9106, section 5.3.
    let mut builder = ParamsBuilder::new();
    builder.m_cost(32).t_cost(3).p_cost(4).output_len(32).data(AssociatedData::new(&[4; 12]).unwrap());
    let params = builder.build().unwrap();
    let mut memory = vec![Block::new(); params.block_count()];
    let mut out = [0; 32];
    Argon2::new_with_secret(&[3; 8], Algorithm::Argon2id, Version::V0x13, params)
        .unwrap()
        .hash_password_into_with_memory(&[1; 32], &[2; 16], &mut out, &mut memory)
        .unwrap();
    assert_eq!(hex_of(&out), "0d640df58d78766c08c037a34a8b53c9d01ef0452d75b65eb52520e96b01e659");
    // Without a secret and associated data: a test of the reference implementation.
    let params = Params::new(256, 2, 1, Some(32)).unwrap();
    let mut memory = vec![Block::new(); params.block_count()];
    let library = Argon2::new(Algorithm::Argon2id, Version::V0x13, params);
    library.hash_password_into_with_memory(b"password", b"somesalt", &mut out, &mut memory).unwrap();
    assert_eq!(hex_of(&out), "9dfeb910e80bad0311fee20f9c0e2b12c17987b4cac90c2ef54d5b3021c68bfe");
    // Slots call it in this way.
    library.hash_password_into_with_memory(b"password", &[3; 32], &mut out, &mut memory).unwrap();
    let derived = argon2_for_tests(b"password", &Argon2Cost { memory: 256, ..COST }).unwrap();
    assert_eq!(derived.view().0, &out);
}

#[test]
fn parameters_follow_memory_and_time() {
    let random = Seeded::new(5);
    let choose = |available: u64, took: u128| choose_cost(&random, available, &|_| Ok(took)).unwrap();
    let chosen = |available, took| {
        let Argon2Cost { memory, passes, lanes, .. } = choose(available, took);
        (memory >> 10, passes, lanes)
    };
    let gib = 1u64 << 30;
    assert_eq!(chosen(4 * gib, 500), (256, 2, 1));
    assert_eq!(chosen(gib, 500), (256, 2, 1));
    assert_eq!(chosen(gib - 1, 500), (128, 2, 1));
    assert_eq!(chosen(gib / 2 - 1, 500), (64, 2, 1));
    assert_eq!(chosen(1 << 20, 500), (64, 2, 1));
    assert_eq!(chosen(gib, 100), (256, 10, 1));
    assert_eq!(chosen(gib, 1), (256, 16, 1));
    assert_eq!(chosen(gib, 0), (256, 16, 1));
    assert_eq!(chosen(gib, 10_000), (256, 2, 1));
    assert_ne!(choose(gib, 1).salt, choose(gib, 1).salt);
    // The measurement is one derivation with the chosen memory; its errors come back.
    assert!(choose_cost(&random, gib, &|_| Err(PoolError::NoSpace)).is_err());
}
