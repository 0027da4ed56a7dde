//! The layer over a tree in memory: stored and shown attributes.

use super::*;
use crate::mem::Mem;

fn name(text: &str) -> Name<'_> {
    Name::new(text.as_bytes()).unwrap()
}

const USER: Caller = Caller { uid: 7, gid: 8, pid: 0, umask: 0o022 };

fn over(attribute: Attribute) -> (Arc<dyn Layer>, OverrideStat) {
    let below: Arc<dyn Layer> = Arc::new(Mem::new());
    let layer = OverrideStat::new(Arc::clone(&below), attribute, true).unwrap();
    (below, layer)
}

fn value(below: &dyn Layer, node: &Node, attribute: &[u8]) -> String {
    let mut buffer = [0; 128];
    let size = below.getxattr(&OWN, node, attribute, &mut buffer).unwrap();
    String::from_utf8(buffer[..size].to_vec()).unwrap()
}

#[test]
fn records_come_back_as_they_were_written() {
    for text in [
        "0:0:755:dir",
        "1:2:4644:file",
        "5:6:600:char-1-3",
        "5:6:600:block-7-3",
        "0:0:777:symlink",
        "1:1:1:pipe",
        "1:1:0:socket",
    ] {
        assert_eq!(StatRecord::parse(text.as_bytes()).unwrap().to_string(), text);
    }
    for (text, plain) in [("44:55:100751", "44:55:751"), ("0:0:0755", "0:0:755"), ("1:2:40755", "1:2:755")] {
        assert_eq!(StatRecord::parse(text.as_bytes()).unwrap().to_string(), plain);
    }
    for text in [
        "",
        "1",
        "1:2",
        "a:2:3",
        "1:2:8",
        "1:2:755:door",
        "1:2:755:char-1",
        "-1:2:755",
        "1:2:755:block-x-1",
        "\u{e9}:1:2",
    ] {
        assert_eq!(StatRecord::parse(text.as_bytes()), None, "{text}");
    }
    assert_eq!(StatRecord::parse(b"\xff:1:2"), None);
}

#[test]
fn owners_and_modes_are_kept_beside_the_files() {
    for (attribute, key) in [(Attribute::Containers, CONTAINERS), (Attribute::Privileged, PRIVILEGED)] {
        let (below, layer) = over(attribute);
        let root = layer.root().unwrap().node;
        let (made, _file) = layer.create(&USER, &root, name("f"), 0o666, OpenFlags::READ_WRITE).unwrap();
        assert_eq!((made.attr.uid, made.attr.gid, made.attr.mode), (7, 8, 0o644));
        assert_eq!(value(&*below, &made.node, key), "7:8:644:file");
        let real = below.getattr(&OWN, &made.node, None).unwrap();
        assert_eq!((real.uid, real.gid, real.mode), (0, 0, FILE_MODE));
        let change = SetAttr { uid: Some(1), mode: Some(0o4755), ..SetAttr::default() };
        let after = layer.setattr(&OWN, &made.node, None, &change).unwrap();
        assert_eq!((after.uid, after.gid, after.mode), (1, 8, 0o4755));
        let killed = SetAttr { gid: Some(3), kill_privileges: true, ..SetAttr::default() };
        let after = layer.setattr(&OWN, &made.node, None, &killed).unwrap();
        assert_eq!((after.gid, after.mode), (3, 0o755));
        assert_eq!(below.getattr(&OWN, &made.node, None).unwrap().mode, FILE_MODE);
        assert_eq!(layer.lookup(&OWN, &root, name("f")).unwrap().attr.uid, 1);
    }
}

#[test]
fn special_files_are_regular_ones_below() {
    let (below, layer) = over(Attribute::Containers);
    let root = layer.root().unwrap().node;
    for (text, kind, device) in [
        ("c", Kind::Character, (1, 3)),
        ("b", Kind::Block, (7, 3)),
        ("p", Kind::Fifo, (0, 0)),
        ("s", Kind::Socket, (0, 0)),
    ] {
        let made = layer.mknod(&USER, &root, name(text), kind, 0o666, device).unwrap();
        assert_eq!(
            (made.attr.kind, (made.attr.rdev_major, made.attr.rdev_minor), made.attr.mode),
            (kind, device, 0o644)
        );
        assert_eq!(below.lookup(&OWN, &root, name(text)).unwrap().attr.kind, Kind::File);
        assert_eq!(layer.lookup(&OWN, &root, name(text)).unwrap().attr.kind, kind);
    }
    layer.mknod(&USER, &root, name("whiteout"), Kind::Character, 0, (0, 0)).unwrap();
    assert_eq!(below.lookup(&OWN, &root, name("whiteout")).unwrap().attr.kind, Kind::Character);
}

#[test]
fn the_record_is_nobodys_business() {
    let (_below, layer) = over(Attribute::Containers);
    let root = layer.root().unwrap().node;
    let made = layer.mkdir(&USER, &root, name("d"), 0o777).unwrap();
    layer.setxattr(&USER, &made.node, b"user.x", b"y", XattrFlags::default()).unwrap();
    let mut list = [0; 64];
    let size = layer.listxattr(&USER, &made.node, &mut list).unwrap();
    assert_eq!(&list[..size], b"user.x\0");
    assert_eq!(layer.listxattr(&USER, &made.node, &mut []), Ok(7));
    for key in [CONTAINERS, OLD, PRIVILEGED] {
        assert_eq!(layer.getxattr(&USER, &made.node, key, &mut list), Err(Errno::ENODATA));
        assert_eq!(layer.setxattr(&USER, &made.node, key, b"0:0:777", XattrFlags::default()), Err(Errno::EPERM));
        assert_eq!(layer.removexattr(&USER, &made.node, key), Err(Errno::EPERM));
    }
}

#[test]
fn set_group_id_directories_pass_their_group_on() {
    let (_below, layer) = over(Attribute::Containers);
    let root = layer.root().unwrap().node;
    let home = layer.mkdir(&USER, &root, name("d"), 0o777).unwrap().node;
    let change = SetAttr { gid: Some(100), mode: Some(0o2775), ..SetAttr::default() };
    layer.setattr(&OWN, &home, None, &change).unwrap();
    let made = layer.mkdir(&USER, &home, name("e"), 0o777).unwrap().attr;
    assert_eq!((made.uid, made.gid, made.mode), (7, 100, 0o2755));
    let (made, _file) = layer.create(&USER, &home, name("f"), 0o600, OpenFlags::WRITE).unwrap();
    assert_eq!((made.attr.gid, made.attr.mode), (100, 0o600));
}

#[test]
fn what_is_there_is_opened_and_stays_what_it_is() {
    let (_below, layer) = over(Attribute::Containers);
    let root = layer.root().unwrap().node;
    layer.create(&USER, &root, name("f"), 0o640, OpenFlags::WRITE).unwrap();
    let other = Caller { uid: 9, ..USER };
    let (found, _file) = layer.create(&other, &root, name("f"), 0o666, OpenFlags::WRITE).unwrap();
    assert_eq!((found.attr.uid, found.attr.mode), (7, 0o640));
    let exclusive = OpenFlags(OpenFlags::WRITE.0 | OpenFlags::EXCL);
    assert_eq!(layer.create(&other, &root, name("f"), 0o666, exclusive).err(), Some(Errno::EEXIST));
}

#[test]
fn layers_of_others_are_recognised_by_their_root() {
    let below = Mem::new();
    assert_eq!(carried(&below), Ok(None));
    let root = below.root().unwrap().node;
    below.setxattr(&OWN, &root, OLD, b"0:0:40755", XattrFlags::default()).unwrap();
    assert_eq!(carried(&below), Ok(Some(Attribute::Containers)));
    let file = below.mknod(&OWN, &root, name("f"), Kind::File, 0o600, (0, 0)).unwrap().node;
    below.setxattr(&OWN, &file, OLD, b"44:55:100751", XattrFlags::default()).unwrap();
    let layer = OverrideStat::new(Arc::new(below), Attribute::Containers, false).unwrap();
    let attr = layer.lookup(&OWN, &root, name("f")).unwrap().attr;
    assert_eq!((attr.uid, attr.gid, attr.mode, attr.kind), (44, 55, 0o751, Kind::File));
}

struct Taken(Vec<(String, Option<Kind>, Option<u32>)>);

impl DirSink for Taken {
    fn push(&mut self, entry: DirEntry<'_>) -> bool {
        let name = String::from_utf8(entry.name.bytes().to_vec()).unwrap();
        self.0.push((name, entry.kind, entry.entry.map(|entry| entry.attr.uid)));
        true
    }
}

#[test]
fn listings_tell_no_type_that_may_be_wrong() {
    let (_below, layer) = over(Attribute::Containers);
    let root = layer.root().unwrap().node;
    layer.mkdir(&USER, &root, name("d"), 0o755).unwrap();
    layer.mknod(&USER, &root, name("p"), Kind::Fifo, 0o600, (0, 0)).unwrap();
    let listing = |attributes| {
        let mut taken = Taken(Vec::new());
        layer.readdir(&USER, &root, 0, attributes, &mut taken).unwrap();
        taken.0.sort_by(|a, b| a.0.cmp(&b.0));
        taken.0
    };
    assert_eq!(listing(false), [("d".to_owned(), Some(Kind::Directory), None), ("p".to_owned(), None, None)]);
    assert_eq!(
        listing(true),
        [("d".to_owned(), Some(Kind::Directory), Some(7)), ("p".to_owned(), Some(Kind::Fifo), Some(7))]
    );
}
