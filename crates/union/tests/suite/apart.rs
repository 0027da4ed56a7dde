//! Branches whose own directories lie beside them: nothing but the files of users is on the branch.

use crate::unions::{Directories, host};
use nacre_layers::host::{Host, HostOptions};
use nacre_union::{BranchMode, Member, Style, Union, UnionOptions};
use nacre_vfs::{Caller, Entry, Layer, Name, OpenFlags, SetAttr, WriteOrigin};
use std::{fs, path::Path, sync::Arc};

const ROOT: Caller = Caller::ROOT;

fn over(lower: &Path, upper: &Path, work: &Path) -> Union {
    let branch = Host::open(HostOptions::new(upper)).unwrap();
    let apart = branch.beside(work).unwrap();
    let upper =
        Member { name: upper.into(), layer: Arc::new(branch), mode: BranchMode::rw(), work: Some(apart), lock: None };
    let lower = Member { name: lower.into(), layer: host(lower), mode: BranchMode::layer(), work: None, lock: None };
    Union::named(vec![upper, lower], UnionOptions { whiteout: Style::Chardev, ..UnionOptions::default() }).unwrap()
}

fn find(union: &Union, path: &str) -> Entry {
    let mut at = union.root().unwrap();
    for name in path.split('/') {
        at = union.lookup(&ROOT, &at.node, Name::new(name.as_bytes()).unwrap()).unwrap();
    }
    at
}

fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn copies_and_hard_links_leave_nothing_on_the_branch() {
    let directories = Directories::new();
    let (lower, upper, work) = (directories.fresh(), directories.fresh(), directories.fresh());
    fs::create_dir(lower.join("d")).unwrap();
    fs::write(lower.join("d/one"), "content").unwrap();
    fs::hard_link(lower.join("d/one"), lower.join("two")).unwrap();
    fs::write(lower.join("gone"), "").unwrap();
    let number = {
        let union = over(&lower, &upper, &work);
        let one = find(&union, "d/one");
        let file = union.open(&ROOT, &one.node, OpenFlags::READ_WRITE).unwrap();
        assert_eq!(file.write(b"CONTENT", 0, WriteOrigin::Caller), Ok(7));
        union.setattr(&ROOT, &one.node, None, &SetAttr { mode: Some(0o600), ..SetAttr::default() }).unwrap();
        one.attr.id.ino
    };
    assert_eq!(names(&upper), ["d"]);
    assert_eq!(names(&work), ["links", "work"]);
    assert_eq!(names(&work.join("links")).len(), 1, "the other name has to find the copy");
    fs::write(work.join("work/leftover"), "half a copy").unwrap();
    // Mounted again: the index is where it was, and what was begun is cleared away.
    let union = over(&lower, &upper, &work);
    assert_eq!(names(&work.join("work")), [""; 0]);
    for path in ["d/one", "two"] {
        let found = find(&union, path);
        assert_eq!((found.attr.id.ino, found.attr.mode, found.attr.nlink), (number, 0o600, 2), "{path}");
        let mut content = [0; 7];
        union.open(&ROOT, &found.node, OpenFlags::READ).unwrap().read(&mut content, 0).unwrap();
        assert_eq!(&content, b"CONTENT", "{path}");
    }
    // Names of the work directory are nobody's in the branch.
    let root = union.root().unwrap().node;
    union.mkdir(&ROOT, &root, Name::new(b"work").unwrap(), 0o755).unwrap();
    union.unlink(&ROOT, &root, Name::new(b"two").unwrap()).unwrap();
    union.unlink(&ROOT, &root, Name::new(b"gone").unwrap()).unwrap();
    union.rmdir(&ROOT, &root, Name::new(b"work").unwrap()).unwrap();
    assert!(names(&upper).iter().all(|name| !name.starts_with(".wh.")) || !is_root(), "{:?}", names(&upper));
    assert_eq!(names(&work.join("links")), [""; 0], "no name below is left");
}

/// Devices 0/0 can be made by whoever owns the directory on present kernels; older ones ask for
/// root, and `.wh.` files are written.
fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|own| std::os::unix::fs::MetadataExt::uid(&own) == 0)
}
