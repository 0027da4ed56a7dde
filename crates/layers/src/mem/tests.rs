//! Tests of the tree in memory; the conformance suite goes over it as well.

use super::*;
use crate::remap::acl;
use crate::remap::acl::tests::acl;
use nacre_vfs::WriteOrigin;

const USER: Caller = Caller { uid: 1000, gid: 100, pid: 0, umask: 0o022 };

fn name(text: &str) -> Name<'_> {
    Name::new(text.as_bytes()).unwrap()
}

fn tree() -> (Mem, Node) {
    let mem = Mem::new();
    let root = mem.root().unwrap().node;
    (mem, root)
}

fn make(mem: &Mem, parent: &Node, text: &str) -> Entry {
    mem.create(&USER, parent, name(text), 0o666, OpenFlags::READ_WRITE).unwrap().0
}

fn rename(mem: &Mem, from: (&Node, &str), to: (&Node, &str), flags: u32) -> Result<()> {
    mem.rename(&USER, from.0, name(from.1), to.0, name(to.1), RenameFlags(flags))
}

fn nlink(mem: &Mem, node: &Node) -> u32 {
    mem.getattr(&USER, node, None).unwrap().nlink
}

#[test]
fn links_count_and_unlinked_files_live_while_open() {
    let (mem, root) = tree();
    let (made, file) = mem.create(&USER, &root, name("a"), 0o666, OpenFlags::READ_WRITE).unwrap();
    assert_eq!((made.attr.mode, made.attr.uid, made.attr.gid), (0o644, 1000, 100));
    let second = mem.link(&USER, &made.node, None, &root, name("b")).unwrap();
    assert_eq!((second.attr.id, second.attr.nlink), (made.attr.id, 2));
    mem.unlink(&USER, &root, name("a")).unwrap();
    mem.unlink(&USER, &root, name("b")).unwrap();
    file.write(b"still here", 0, WriteOrigin::Caller).unwrap();
    assert_eq!((nlink(&mem, &made.node), mem.getattr(&USER, &made.node, None).unwrap().size), (0, 10));
    assert_eq!(mem.link(&USER, &made.node, Some(&*file), &root, name("c")).unwrap_err(), Errno::ENOENT);
}

#[test]
fn unnamed_files_get_a_name_once_unless_exclusive() {
    let (mem, root) = tree();
    let (made, file) = mem.tmpfile(&USER, &root, 0o600, OpenFlags::READ_WRITE).unwrap();
    file.write(b"x", 0, WriteOrigin::Caller).unwrap();
    assert_eq!(mem.link(&USER, &made.node, Some(&*file), &root, name("a")).unwrap().attr.nlink, 1);
    let exclusive = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::EXCL);
    let (made, file) = mem.tmpfile(&USER, &root, 0o600, exclusive).unwrap();
    assert_eq!(mem.link(&USER, &made.node, Some(&*file), &root, name("b")).unwrap_err(), Errno::ENOENT);
}

#[test]
fn renames_do_what_renameat2_does() {
    let (mem, root) = tree();
    let directory = mem.mkdir(&USER, &root, name("d"), 0o777).unwrap().node;
    let inner = mem.mkdir(&USER, &directory, name("inner"), 0o777).unwrap().node;
    let (a, b) = (make(&mem, &root, "a"), make(&mem, &root, "b"));
    assert_eq!(rename(&mem, (&root, "a"), (&root, "b"), RenameFlags::NOREPLACE), Err(Errno::EEXIST));
    assert_eq!(rename(&mem, (&root, "a"), (&root, "d"), 0), Err(Errno::EISDIR));
    assert_eq!(rename(&mem, (&root, "d"), (&root, "a"), 0), Err(Errno::ENOTDIR));
    assert_eq!(rename(&mem, (&root, "d"), (&inner, "x"), 0), Err(Errno::EINVAL));
    assert_eq!(rename(&mem, (&directory, "inner"), (&root, "d"), 0), Err(Errno::ENOTEMPTY));
    assert_eq!(rename(&mem, (&root, "x"), (&root, "y"), 0), Err(Errno::ENOENT));
    assert_eq!(rename(&mem, (&root, "a"), (&root, "y"), RenameFlags::EXCHANGE), Err(Errno::ENOENT));
    assert_eq!(rename(&mem, (&root, "a"), (&root, "y"), RenameFlags::WHITEOUT), Err(Errno::EINVAL));
    assert_eq!(rename(&mem, (&root, "a"), (&inner, "moved"), RenameFlags::EXCHANGE), Err(Errno::ENOENT));
    rename(&mem, (&root, "a"), (&directory, "inner"), RenameFlags::EXCHANGE).unwrap();
    assert_eq!(mem.lookup(&USER, &directory, name("inner")).unwrap().attr.id, a.attr.id);
    assert_eq!((nlink(&mem, &root), nlink(&mem, &directory)), (4, 2), "the directory has moved up");
    rename(&mem, (&directory, "inner"), (&root, "b"), 0).unwrap();
    assert_eq!((nlink(&mem, &b.node), mem.lookup(&USER, &root, name("b")).unwrap().attr.id), (0, a.attr.id));
    mem.link(&USER, &a.node, None, &root, name("b2")).unwrap();
    rename(&mem, (&root, "b"), (&root, "b2"), 0).unwrap();
    assert_eq!(nlink(&mem, &a.node), 2, "two names of one file: nothing happens");
    rename(&mem, (&root, "d"), (&root, "a"), 0).unwrap();
    assert_eq!(rename(&mem, (&root, "a"), (&directory, "x"), 0), Err(Errno::EINVAL), "the parent has learned");
}

#[test]
fn directories_are_emptied_before_they_go() {
    let (mem, root) = tree();
    let directory = mem.mkdir(&USER, &root, name("d"), 0o777).unwrap();
    assert_eq!((nlink(&mem, &root), directory.attr.nlink), (3, 2));
    make(&mem, &directory.node, "f");
    assert_eq!(mem.rmdir(&USER, &root, name("d")), Err(Errno::ENOTEMPTY));
    assert_eq!(mem.unlink(&USER, &root, name("d")), Err(Errno::EISDIR));
    assert_eq!(mem.rmdir(&USER, &directory.node, name("f")), Err(Errno::ENOTDIR));
    mem.unlink(&USER, &directory.node, name("f")).unwrap();
    mem.rmdir(&USER, &root, name("d")).unwrap();
    assert_eq!(nlink(&mem, &root), 2);
    assert_eq!(
        mem.mkdir(&USER, &directory.node, name("x"), 0o777).unwrap_err(),
        Errno::ENOENT,
        "a removed directory takes no names"
    );
}

#[test]
fn set_group_id_directories_pass_their_group_on() {
    let (mem, root) = tree();
    let directory = mem.mkdir(&Caller { gid: 7, umask: 0, ..USER }, &root, name("d"), 0o2775).unwrap();
    let file = make(&mem, &directory.node, "f");
    let inner = mem.mkdir(&USER, &directory.node, name("i"), 0o1777).unwrap();
    assert_eq!((file.attr.gid, file.attr.mode), (7, 0o644));
    assert_eq!((inner.attr.gid, inner.attr.mode), (7, 0o3755));
}

#[test]
fn a_listing_goes_on_where_it_stopped_whatever_happens_in_between() {
    struct Some3(Vec<u64>, Vec<String>);
    impl DirSink for Some3 {
        fn push(&mut self, entry: DirEntry<'_>) -> bool {
            if self.0.len() == 3 {
                return false;
            }
            self.0.push(entry.next);
            self.1.push(entry.name.to_string());
            true
        }
    }
    let (mem, root) = tree();
    for index in 0..5 {
        make(&mem, &root, &format!("f{index}"));
    }
    let mut first = Some3(Vec::new(), Vec::new());
    mem.readdir(&USER, &root, 0, false, &mut first).unwrap();
    for gone in ["f0", "f2"] {
        mem.unlink(&USER, &root, name(gone)).unwrap();
    }
    make(&mem, &root, "f0");
    let mut second = Some3(Vec::new(), Vec::new());
    mem.readdir(&USER, &root, first.0[2], true, &mut second).unwrap();
    assert_eq!(
        (first.1.join(" "), second.1.join(" ")),
        ("f0 f1 f2".to_owned(), "f3 f4".to_owned()),
        "what came since is not in it"
    );
}

#[test]
fn changes_apply_in_order_and_are_refused_whole() {
    let (mem, root) = tree();
    let file = make(&mem, &root, "f");
    let mode = SetAttr { mode: Some(0o6755), ..SetAttr::default() };
    mem.setattr(&USER, &file.node, None, &mode).unwrap();
    let chown = SetAttr { uid: Some(5), kill_privileges: true, ..SetAttr::default() };
    assert_eq!(mem.setattr(&USER, &file.node, None, &chown).unwrap().mode, 0o755);
    let too_long = SetAttr { mode: Some(0), size: Some(u64::MAX), ..SetAttr::default() };
    assert_eq!(mem.setattr(&USER, &file.node, None, &too_long).unwrap_err(), Errno::EFBIG);
    assert_eq!(mem.getattr(&USER, &file.node, None).unwrap().mode, 0o755);
    let size = SetAttr { size: Some(1), ..SetAttr::default() };
    assert_eq!(mem.setattr(&USER, &root, None, &size).unwrap_err(), Errno::EISDIR);
}

#[test]
fn extended_attributes_keep_to_their_rules() {
    let (mem, root) = tree();
    let file = make(&mem, &root, "f").node;
    let set = |key: &[u8], value: &[u8], create, replace| {
        mem.setxattr(&USER, &file, key, value, XattrFlags { create, replace, kill_sgid: false })
    };
    assert_eq!(set(b"user.a", b"1", false, true), Err(Errno::ENODATA));
    assert_eq!(set(b"user.a", b"1", true, false), Ok(()));
    assert_eq!(set(b"user.a", b"2", true, false), Err(Errno::EEXIST));
    assert_eq!(set(b"user.big", &vec![0; 65537], false, false), Err(Errno::E2BIG));
    assert_eq!(set(b"other.a", b"1", false, false), Err(Errno::EOPNOTSUPP));
    let mut buffer = [0; 7];
    assert_eq!((mem.listxattr(&USER, &file, &mut buffer), &buffer), (Ok(7), b"user.a\0"));
    assert_eq!(mem.listxattr(&USER, &file, &mut [0; 3]), Err(Errno::ERANGE));
    let link = mem.symlink(&USER, &root, name("l"), b"target").unwrap().node;
    assert_eq!(mem.setxattr(&USER, &link, b"user.a", b"1", XattrFlags::default()), Err(Errno::EPERM));
}

#[test]
fn acls_and_modes_follow_each_other_and_are_inherited() {
    const NONE: u32 = u32::MAX;
    let (mem, root) = tree();
    let value = acl(&[(1, 7, NONE), (2, 6, 5), (4, 5, NONE), (16, 7, NONE), (32, 1, NONE)]);
    let directory = mem.mkdir(&USER, &root, name("d"), 0o700).unwrap().node;
    let default = || XattrFlags::default();
    mem.setxattr(&USER, &directory, acl::ACCESS, &value, default()).unwrap();
    assert_eq!(mem.getattr(&USER, &directory, None).unwrap().mode, 0o771);
    mem.setattr(&USER, &directory, None, &SetAttr { mode: Some(0o750), ..SetAttr::default() }).unwrap();
    let read = |node: &Node, key: &[u8]| {
        let mut buffer = [0; 100];
        mem.getxattr(&USER, node, key, &mut buffer).map(|size| buffer[..size].to_vec())
    };
    assert_eq!(
        read(&directory, acl::ACCESS),
        Ok(acl(&[(1, 7, NONE), (2, 6, 5), (4, 5, NONE), (16, 5, NONE), (32, 0, NONE)]))
    );
    mem.setxattr(&USER, &directory, acl::DEFAULT, &value, default()).unwrap();
    let file = make(&mem, &directory, "f");
    assert_eq!(file.attr.mode, 0o660, "the umask does not count");
    assert_eq!(
        read(&file.node, acl::ACCESS),
        Ok(acl(&[(1, 6, NONE), (2, 6, 5), (4, 5, NONE), (16, 6, NONE), (32, 0, NONE)]))
    );
    let inner = mem.mkdir(&USER, &directory, name("i"), 0o777).unwrap().node;
    assert_eq!(read(&inner, acl::DEFAULT), Ok(value));
    let minimal = acl(&[(1, 6, NONE), (4, 4, NONE), (32, 4, NONE)]);
    mem.setxattr(&USER, &file.node, acl::ACCESS, &minimal, default()).unwrap();
    assert_eq!(read(&file.node, acl::ACCESS), Err(Errno::ENODATA), "what a mode can say is not kept");
    assert_eq!(mem.getattr(&USER, &file.node, None).unwrap().mode, 0o644);
}

#[test]
fn deep_trees_are_taken_apart_without_recursion() {
    let (mem, root) = tree();
    let mut at = root;
    for _ in 0..100_000 {
        at = mem.mkdir(&USER, &at, name("d"), 0o755).unwrap().node;
    }
    drop(at);
    drop(mem);
}

#[test]
fn nodes_of_another_tree_are_refused() {
    let ((mem, _), (_other, foreign)) = (tree(), tree());
    assert_eq!(mem.getattr(&USER, &foreign, None).unwrap_err(), Errno::EIO);
}
