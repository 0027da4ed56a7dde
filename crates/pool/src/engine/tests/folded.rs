//! File systems with name folding: inheritance of its properties, and the feature mark of the pool,
//! which is set before the first one exists.

use super::*;
use crate::catalog::PropertyRow;
use crate::files::{Batch, Table};
use crate::label::Identity;
use crate::rows::{DatasetHead, keys};
use crate::store::Store;

fn with(parent: u64, name: &str, properties: &[(&str, &str)]) -> NewDataset {
    let properties = properties.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    NewDataset { properties, ..NewDataset::named(parent, name) }
}

/// The stored rules of a dataset, and the folding that its files use.
fn rules(pool: &Pool, id: u64) -> (String, bool) {
    let chain = pool.chain(id).unwrap();
    let own: &[(String, PropertyRow)] = &chain.levels[0].rows;
    let mut own: Vec<String> = own
        .iter()
        .filter(|(name, _)| name != "snapshots_changed")
        .map(|(name, row)| format!("{name}={}", row.value))
        .collect();
    own.sort();
    (own.join(" "), pool.dataset(id).unwrap().files().folding().insensitive)
}

#[test]
fn a_new_file_system_takes_over_what_its_parent_has_and_a_clone_what_its_origin_has() {
    let storage = Arc::new(MapStorage::default());
    let pool = Pool::create(config(&storage), "tank").unwrap();
    let top = pool.find("tank").unwrap().unwrap();
    let a = pool
        .create_dataset(&with(top, "a", &[("casesensitivity", "insensitive"), ("normalization", "formD")]))
        .unwrap();
    let b = pool.create_dataset(&with(a, "b", &[])).unwrap();
    let c = pool
        .create_dataset(&with(b, "c", &[("casesensitivity", "mixed"), ("normalization", "none"), ("utf8only", "off")]))
        .unwrap();
    let all = "casesensitivity=insensitive normalization=formD utf8only=on";
    assert_eq!((rules(&pool, a), rules(&pool, b)), ((all.to_owned(), true), (all.to_owned(), true)));
    assert_eq!(rules(&pool, c), ("casesensitivity=mixed normalization=none utf8only=off".to_owned(), false));
    for (parent, given) in [(top, &[("normalization", "formC"), ("utf8only", "off")][..]), (a, &[("utf8only", "off")])]
    {
        let new = with(parent, "x", given);
        let why = "'utf8only' must be 'on' where 'normalization' is not 'none'";
        assert_eq!(pool.would_create(&new).unwrap_err().to_string(), why);
        assert_eq!(pool.create_dataset(&new).unwrap_err().to_string(), why);
    }
    pool.snapshot(&[(b, "one".to_owned())]).unwrap();
    let clone = pool.clone_snapshot(b, "one", &with(top, "clone", &[("utf8only", "on")])).unwrap();
    assert_eq!(rules(&pool, clone), (all.to_owned(), true));
    let other = pool.clone_snapshot(b, "one", &with(top, "other", &[("casesensitivity", "sensitive")])).unwrap_err();
    assert_eq!(other.to_string(), "'casesensitivity' of a clone is that of its snapshot");
    pool.promote(clone).unwrap();
    pool.rename_dataset(b, &NewDataset::named(top, "b")).unwrap();
    let pool = reopen(&storage);
    assert_eq!((rules(&pool, b), rules(&pool, clone)), ((all.to_owned(), true), (all.to_owned(), true)));
    check(&pool, &storage);
}

/// A store on a device, to read its label.
fn features(device: &Arc<crate::device::Simulator>) -> u64 {
    crate::label::probe(&**device).unwrap().unwrap().incompatible
}

#[test]
fn what_was_synced_is_found_by_any_case_after_a_crash_and_labels_tell() {
    let device = Arc::new(crate::device::Simulator::new("disk", 128 << 20));
    let pool = on_device(&device, true);
    let top = pool.find("tank").unwrap().unwrap();
    pool.create_dataset(&with(top, "utf8", &[("utf8only", "on")])).unwrap();
    assert_eq!(features(&device) & Identity::FOLDED, 0, "programs that do not know of folding can use it");
    let id = pool.create_dataset(&with(top, "win", &[("casesensitivity", "insensitive")])).unwrap();
    assert_eq!(features(&device) & Identity::FOLDED, Identity::FOLDED);
    let dataset = pool.dataset(id).unwrap();
    put(&dataset, "First", b"1");
    put(&dataset, "Gone", b"2");
    pool.commit().unwrap();
    let root = dataset.files().root();
    dataset.files().rename((&root, b"FIRST"), (&root, b"first"), crate::files::MayReplace::No).unwrap();
    dataset.files().unlink(&root, b"gONE").unwrap();
    put(&dataset, "Second", b"3");
    let (inode, _) = dataset.files().look_up(&root, b"SECOND").unwrap();
    pool.sync_file(&dataset, &inode).unwrap();
    drop((inode, root, dataset, pool));
    device.crash(5);
    let pool = on_device(&device, false);
    let dataset = pool.dataset(id).unwrap();
    let now = contents(dataset.files());
    assert_eq!(now, Tree::from([("first".to_owned(), b"1".to_vec()), ("Second".to_owned(), b"3".to_vec())]));
    let root = dataset.files().root();
    for (name, there) in [(&b"fIRST"[..], true), (b"sECOND", true), (b"Gone", false)] {
        assert_eq!(dataset.files().look_up(&root, name).is_ok(), there);
    }
}

#[test]
fn a_check_finds_names_under_wrong_hashes() {
    let device = Arc::new(crate::device::Simulator::new("disk", 128 << 20));
    let pool = on_device(&device, true);
    let top = pool.find("tank").unwrap().unwrap();
    let id = pool.create_dataset(&with(top, "win", &[("casesensitivity", "insensitive")])).unwrap();
    let dataset = pool.dataset(id).unwrap();
    put(&dataset, "Name", b"1");
    pool.commit().unwrap();
    let row = |table: &TreeTable, key: &[u8]| table.get(key).unwrap().unwrap();
    let (right, wrong, target) = dataset.files().look_at_table(|table| {
        let head = DatasetHead::decode(&row(table, &keys::head())).unwrap();
        let sequence = head.next - 1;
        // As a program without support for case folding would have it.
        let right = keys::name(head.root, head.hash(b"Name"), sequence);
        (right, keys::name(head.root, head.hashing.hash(head.seed, b"Name"), sequence), row(table, &right))
    });
    assert_ne!(right, wrong);
    let mut batch = Batch::default();
    batch.remove(&right);
    batch.put(&wrong, target);
    let entered = pool.gate.enter();
    dataset.files().with_table(|table| table.change(entered.txg(), &batch.uncharged())).unwrap();
    drop((entered, dataset));
    pool.commit().unwrap();
    drop(pool);
    let (store, pool) = whole(&device);
    let mut told = Vec::new();
    assert_eq!(pool.check(&store, false, &mut |what| told.push(what.to_owned())).unwrap().problems, 1);
    assert_eq!(told, ["tank/win: directory 1 has names that are not found, or lead elsewhere than listings say"]);
}

fn whole(device: &Arc<crate::device::Simulator>) -> (Arc<Store>, Pool) {
    use crate::device::Device;
    let import = crate::store::Import {
        access: crate::store::Access::ReadWrite,
        name: None,
        host: (1, "here".to_owned()),
        time: 2,
    };
    let (store, root) = Store::open(vec![Arc::clone(device) as Arc<dyn Device>], &import).unwrap();
    let store = Arc::new(store);
    let config =
        PoolConfig { storage: Arc::clone(&store) as Arc<dyn Storage>, ..config(&Arc::new(MapStorage::default())) };
    let durable = Durable { txg: root.txg, catalog: root.catalog.unwrap(), log: root.log_start.into() };
    (store, Pool::open(config, &durable).unwrap())
}
