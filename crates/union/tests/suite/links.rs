//! Hard links over real directories: a file that is known by one name and found by another stays
//! one file.

use crate::unions::{Directories, host, union};
use nacre_testkit::World;
use nacre_testkit::name;
use nacre_union::UnionOptions;
use nacre_vfs::{Kind, RenameFlags};

/// The copy in the index has been known by a name that then went to another file.
#[test]
fn a_copy_is_found_by_the_names_below_after_its_own_name_has_gone() {
    nacre_layers::host::prepare_worker().unwrap();
    let directories = Directories::new();
    let (upper, lower) = (directories.fresh(), directories.fresh());
    let below = World::new(host(&lower));
    let link = below.layer.symlink(&below.caller, &below.root, name(b"a"), b"target").unwrap();
    below.layer.link(&below.caller, &link.node, None, &below.root, name(b"other")).unwrap();
    below.file(b"b", b"");
    let options = UnionOptions { sync: false, ..UnionOptions::default() };
    let world = World::new(union(vec![(host(&upper), "rw"), (host(&lower), "ro")], options));
    let (layer, caller, root) = (&world.layer, &world.caller, &world.root);
    layer.rename(caller, root, name(b"b"), root, name(b"a"), RenameFlags(RenameFlags::EXCHANGE)).unwrap();
    let first = world.find(b"b").unwrap();
    let second = world.find(b"other").unwrap();
    assert_eq!((first.attr.kind, first.attr.id, first.attr.nlink), (Kind::Symlink, second.attr.id, 2));
    for node in [&first.node, &second.node] {
        assert_eq!(layer.readlink(caller, node).as_deref(), Ok(&b"target"[..]));
    }
    assert_eq!(world.list(root, true, 16).len(), 3, "no name is left out");
}
