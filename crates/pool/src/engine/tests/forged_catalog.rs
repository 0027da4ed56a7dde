//! Forged catalogs with valid checksums: a pool is not opened with them, and a running reader does
//! not switch to them.

use super::*;
use crate::catalog::rows::{self, PARTIAL};
use crate::catalog::{BookmarkRow, DatasetRow, PropertyRow, PropertySource};
use crate::names::NAME_MOST;

/// A pool with two nested file systems, and a snapshot of the inner one.
struct Image {
    storage: Arc<MapStorage>,
    pool: Pool,
    above: u64,
    below: u64,
    txg: Txg,
}

impl Image {
    fn new() -> Self {
        let storage = Arc::new(MapStorage::default());
        let pool = Pool::create(config(&storage), "tank").unwrap();
        let above = pool.create_dataset(&NewDataset::named(pool.root().unwrap(), "above")).unwrap();
        let below = pool.create_dataset(&NewDataset::named(above, "below")).unwrap();
        let txg = pool.snapshot(&[(below, "s".to_owned())]).unwrap();
        Self { storage, pool, above, below, txg }
    }

    /// Changes rows of the catalog, and makes them durable.
    fn forge(&self, change: impl FnOnce(&mut Catalog) -> Result<(), PoolError>) {
        self.pool.commit_with(|admin, _| change(&mut admin.catalog)).unwrap();
    }

    fn row(&self, id: u64) -> DatasetRow {
        self.pool.admin.lock().catalog.dataset(id).unwrap()
    }

    /// The error of opening the image; a running reader does not switch to it either.
    fn refusal(&self) -> Option<String> {
        let durable = Durable { log: log::Start::default(), ..crash(&self.storage) };
        let opened = Pool::open(config(&self.storage), &durable).err().map(|error| error.to_string());
        let followed = self.pool.look_ahead(&durable).err().map(|error| error.to_string());
        assert_eq!(opened, followed);
        opened
    }
}

#[test]
fn a_name_that_nobody_could_have_given_is_refused() {
    for name in ["..", ".", "a/b", "a\nb", "a@b", "", &"x".repeat(256)] {
        let image = Image::new();
        image.forge(|catalog| catalog.rename(image.below, image.above, name));
        assert!(image.refusal().is_some_and(|why| why.contains("the name of a file system")), "{name:?}");
        let image = Image::new();
        image.forge(|catalog| {
            let row = catalog.snapshot(image.below, image.txg)?;
            catalog.set_snapshot(image.below, image.txg, &crate::catalog::SnapshotRow { name: name.to_owned(), ..row })
        });
        assert!(image.refusal().is_some_and(|why| why.contains("the name of a snapshot")), "{name:?}");
    }
    let image = Image::new();
    image.forge(|catalog| catalog.rename(image.below, image.above, PARTIAL));
    assert_eq!(image.refusal(), None, "a half received difference");
    let root = image.pool.root().unwrap();
    image.forge(|catalog| catalog.rename(root, 0, "1st"));
    assert!(image.refusal().is_some_and(|why| why.contains("the pool's own file system")));
}

#[test]
fn a_mount_point_that_nobody_could_have_set_is_refused() {
    for source in [PropertySource::Local, PropertySource::Received] {
        for (value, is_refused) in [("/../../etc", true), ("here", true), ("/a//b", true), ("/a/b", false)] {
            let image = Image::new();
            let row = PropertyRow { source, value: value.to_owned() };
            image.forge(|catalog| catalog.set_property(image.below, "mountpoint", Some(&row)));
            assert_eq!(image.refusal().is_some(), is_refused, "{value}");
        }
    }
}

#[test]
fn labels_and_bookmarks_that_nobody_could_have_made_are_not_read() {
    let image = Image::new();
    let bookmark = BookmarkRow { txg: image.txg, guid: 1, created_at: 1 };
    let row = PropertyRow { source: PropertySource::Local, value: String::new() };
    image.forge(|catalog| {
        catalog.set_bookmark(image.below, "..", Some(&bookmark))?;
        catalog.set_hold(image.below, image.txg, "a\u{1b}b", Some(1))?;
        catalog.set_snapshot_property(image.below, image.txg, "a:\n", Some(&row))
    });
    assert_eq!(image.refusal(), None, "they are read when somebody asks for them");
    let view = image.pool.catalog_view();
    assert!(view.bookmarks(image.below).is_err());
    assert!(view.holds(image.below, image.txg).is_err());
    assert!(view.snapshot_properties(image.below, image.txg).is_err());
    drop(view);
    image.forge(|catalog| catalog.set_property(image.below, "a:\u{1b}", Some(&row)));
    assert!(image.refusal().is_some_and(|why| why.contains("the name of a property")));
}

#[test]
fn file_systems_that_are_no_tree_are_refused() {
    // It is its own parent, also according to the row of its name.
    let image = Image::new();
    image.forge(|catalog| catalog.rename(image.above, image.above, "above"));
    assert!(image.refusal().is_some_and(|why| why.contains("lies below itself")));
    let image = Image::new();
    image.forge(|catalog| catalog.rename(image.above, image.below, "above"));
    assert!(image.refusal().is_some_and(|why| why.contains("lies below itself")));
    let image = Image::new();
    let root = image.pool.root().unwrap();
    image.forge(|catalog| catalog.rename(root, root, "tank"));
    assert!(image.refusal().is_some_and(|why| why.contains("the pool's own file system")));
    // Contradictory rows of names and parents.
    let image = Image::new();
    let row = DatasetRow { parent: root, ..image.row(image.below) };
    image.forge(|catalog| catalog.set_dataset(image.below, &row));
    assert!(image.refusal().is_some_and(|why| why.contains("leads to another file system")));
    let image = Image::new();
    let key = rows::key(rows::CHILD, &[image.above], b"below");
    image.forge(|catalog| crate::deadlist::Rows::delete(catalog, &key));
    assert!(image.refusal().is_some_and(|why| why.contains("a file system without a name")));
}

#[test]
fn a_file_system_lies_no_deeper_than_its_name_may_be_long() {
    let image = Image::new();
    let row = image.row(image.below);
    image.forge(|catalog| {
        let mut parent = image.below;
        for _ in 0..NAME_MOST {
            let id = catalog.number()?;
            let list = catalog.deadlists().create()?;
            catalog.enter(id, &DatasetRow { parent, list, ..row.clone() })?;
            parent = id;
        }
        Ok(())
    });
    assert!(image.refusal().is_some_and(|why| why.contains("lies too deep")));
}
