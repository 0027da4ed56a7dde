//! Tests of the filter over a tree in memory.

use super::*;
use crate::mem::Mem;
use nacre_vfs::{Filtered, Kind, Layer, Name, Node, RenameFlags, SetAttr, SetTime, WriteOrigin, XattrFlags};

const FLAGS: u32 = 0x4008_6602;

fn frozen() -> (Filtered<Readonly>, Node, Node) {
    let mem = Arc::new(Mem::new());
    let root = mem.root().unwrap().node;
    let (file, open) =
        mem.create(&Caller::ROOT, &root, Name::new(b"f").unwrap(), 0o644, OpenFlags::READ_WRITE).unwrap();
    open.write(b"content", 0, WriteOrigin::Caller).unwrap();
    (Filtered::new(Arc::new(Readonly { keep_atime: true }), mem), root, file.node)
}

#[test]
fn every_change_is_refused_as_on_a_read_only_mount() {
    let (layer, root, file) = frozen();
    let (caller, f, new) = (Caller::ROOT, Name::new(b"f").unwrap(), Name::new(b"new").unwrap());
    let times = SetAttr { atime: Some(SetTime::Now), ..SetAttr::default() };
    let none = RenameFlags(0);
    let results = [
        layer.setattr(&caller, &file, None, &times).map(|_| ()),
        layer.create(&caller, &root, new, 0o644, OpenFlags::READ).map(|_| ()),
        layer.create(&caller, &root, f, 0o644, OpenFlags::WRITE).map(|_| ()),
        layer.tmpfile(&caller, &root, 0o644, OpenFlags::READ_WRITE).map(|_| ()),
        layer.mkdir(&caller, &root, new, 0o755).map(|_| ()),
        layer.mknod(&caller, &root, new, Kind::Fifo, 0o644, (0, 0)).map(|_| ()),
        layer.symlink(&caller, &root, new, b"f").map(|_| ()),
        layer.link(&caller, &file, None, &root, new).map(|_| ()),
        layer.unlink(&caller, &root, f),
        layer.rmdir(&caller, &root, f),
        layer.rename(&caller, &root, f, &root, new, none),
        layer.setxattr(&caller, &file, b"user.a", b"1", XattrFlags::default()),
        layer.removexattr(&caller, &file, b"user.a"),
        layer.open(&caller, &file, OpenFlags::WRITE).map(|_| ()),
        layer.open(&caller, &file, OpenFlags::READ_WRITE).map(|_| ()),
        layer.open(&caller, &file, OpenFlags(OpenFlags::READ.0 | OpenFlags::TRUNC)).map(|_| ()),
        layer.ioctl(&caller, &file, Ioctl { command: FLAGS, argument: 0, input: &[0; 8] }, &mut []).map(|_| ()),
    ];
    for (place, result) in results.into_iter().enumerate() {
        assert_eq!(result, Err(Errno::EROFS), "change {place}");
    }
}

#[test]
fn reading_works_and_leaves_no_trace() {
    let (layer, _, file) = frozen();
    let before = layer.getattr(&Caller::ROOT, &file, None).unwrap();
    let open = layer.open(&Caller::ROOT, &file, OpenFlags::READ).unwrap();
    let mut buffer = [0; 7];
    assert_eq!((open.read(&mut buffer, 0), &buffer), (Ok(7), b"content"));
    assert_eq!(layer.getattr(&Caller::ROOT, &file, None).unwrap(), before);
}

#[test]
fn an_open_file_has_no_back_door() {
    let (layer, _, file) = frozen();
    let open = layer.open(&Caller::ROOT, &file, OpenFlags::READ).unwrap();
    let ioctl = |command| open.ioctl(Ioctl { command, argument: 0, input: &[0; 8] }, &mut []).map(|_| ());
    assert_eq!(open.write(b"x", 0, WriteOrigin::Caller), Err(Errno::EROFS));
    assert_eq!(open.allocate(AllocateMode(0), 0, 1), Err(Errno::EROFS));
    assert_eq!(open.copy_to(0, &*open, 100, 1, 0), Err(Errno::EROFS));
    assert_eq!(ioctl(FLAGS), Err(Errno::EROFS));
    assert_eq!(ioctl(0x5401), Err(Errno::ENOTTY), "unknown commands do not exist");
}
