//! Checks: reading, writing, truncating, allocating and copying.

use super::Check;
use crate::world::{name, read_all};
use crate::{World, conformance::lacks};
use nacre_vfs::{AllocateMode, Errno, OpenFlags, SetAttr, Whence, WriteOrigin};

pub(super) const CHECKS: &[Check] = &[
    ("what is written is read", written_is_read),
    ("reads are short only at the end", short_at_the_end),
    ("a write past the end leaves zeros", sparse_writes),
    ("an appending file writes at the end", appends),
    ("opening with O_TRUNC empties", truncating_open),
    ("truncation cuts and grows with zeros", truncation),
    ("allocation grows, keeps and punches", allocation),
    ("data and holes are told apart", data_and_holes),
    ("ranges are copied", copies),
    ("an unknown ioctl is ENOTTY", unknown_ioctl),
    ("durability can be asked for", durability),
    ("the file system has figures", figures),
    ("large writes arrive whole", large_writes),
];

fn pattern(length: usize, seed: u8) -> Vec<u8> {
    (0..length)
        .map(|index| (index as u8).wrapping_mul(31).wrapping_add((index >> 8) as u8).wrapping_add(seed))
        .collect()
}

fn written_is_read(world: &World) {
    let wanted = pattern(100_000, 1);
    let (made, file) = world.file(b"file", &wanted);
    assert_eq!(read_all(&file), wanted);
    assert_eq!(world.content(&made.node), wanted);
    assert_eq!(world.attr(&made.node).size, 100_000);
    assert_eq!(file.write(b"middle", 50_000, WriteOrigin::Caller), Ok(6));
    let mut buffer = [0; 8];
    assert_eq!(file.read(&mut buffer, 49_999), Ok(8));
    assert_eq!(buffer[1..7], *b"middle");
    assert_eq!(buffer[0], wanted[49_999]);
    assert_eq!(buffer[7], wanted[50_006]);
}

fn short_at_the_end(world: &World) {
    let (_, file) = world.file(b"file", b"0123456789");
    let mut buffer = [0; 100];
    assert_eq!(file.read(&mut buffer, 0), Ok(10));
    assert_eq!(file.read(&mut buffer, 7), Ok(3));
    assert_eq!(buffer[..3], *b"789");
    assert_eq!(file.read(&mut buffer, 10), Ok(0));
    assert_eq!(file.read(&mut buffer, 1 << 40), Ok(0));
    assert_eq!(file.read(&mut [], 0), Ok(0));
}

fn sparse_writes(world: &World) {
    let (made, file) = world.file(b"file", b"start");
    assert_eq!(file.write(b"end", 70_000, WriteOrigin::Caller), Ok(3));
    let content = world.content(&made.node);
    assert_eq!(content.len(), 70_003);
    assert_eq!((&content[..5], &content[70_000..]), (&b"start"[..], &b"end"[..]));
    assert!(content[5..70_000].iter().all(|byte| *byte == 0));
}

fn appends(world: &World) {
    let (made, _) = world.file(b"file", b"start");
    let file = world.open(&made.node, OpenFlags(OpenFlags::WRITE.0 | OpenFlags::APPEND));
    assert_eq!(file.append(b" more"), Ok(5));
    let other = world.open(&made.node, OpenFlags::WRITE);
    assert_eq!(other.append(b" and more"), Ok(9));
    assert_eq!(world.content(&made.node), b"start more and more");
    // After O_APPEND is cleared, the same open file is used further.
    assert_eq!(file.write(b"S", 0, WriteOrigin::Caller), Ok(1));
    assert_eq!(world.content(&made.node), b"Start more and more");
}

fn truncating_open(world: &World) {
    let (made, _) = world.file(b"file", b"content");
    let file = world.open(&made.node, OpenFlags(OpenFlags::WRITE.0 | OpenFlags::TRUNC));
    assert_eq!(world.attr(&made.node).size, 0);
    assert_eq!(file.write(b"new", 0, WriteOrigin::Caller), Ok(3));
    assert_eq!(world.content(&made.node), b"new");
}

fn truncation(world: &World) {
    let (made, file) = world.file(b"file", &pattern(10_000, 2));
    let size = |size| SetAttr { size: Some(size), ..SetAttr::default() };
    assert_eq!(world.change(&made.node, size(100)).size, 100);
    assert_eq!(world.content(&made.node), pattern(100, 2));
    assert_eq!(world.change(&made.node, size(9_000)).size, 9_000);
    let content = world.content(&made.node);
    assert_eq!(content[..100], pattern(100, 2));
    assert!(content[100..].iter().all(|byte| *byte == 0), "what was cut off must not come back");
    let attr = world.layer.setattr(&world.caller, &made.node, Some(file.inner()), &size(5)).expect("ftruncate");
    assert_eq!(attr.size, 5);
    let directory = world.directory(b"directory");
    let refused = world.layer.setattr(&world.caller, &directory, None, &size(0));
    assert_eq!(refused.map(|_| ()), Err(Errno::EISDIR));
}

fn allocation(world: &World) {
    let (made, file) = world.file(b"file", &pattern(20_000, 3));
    let grown = file.allocate(AllocateMode(0), 0, 30_000);
    if lacks("allocation", &grown) {
        return;
    }
    grown.expect("allocate");
    assert_eq!(world.attr(&made.node).size, 30_000);
    file.allocate(AllocateMode(AllocateMode::KEEP_SIZE), 30_000, 50_000).expect("allocate beyond the end");
    assert_eq!(world.attr(&made.node).size, 30_000);
    assert_eq!(file.allocate(AllocateMode(0), 0, 0), Err(Errno::EINVAL));
    let punched = file.allocate(AllocateMode(AllocateMode::KEEP_SIZE | AllocateMode::PUNCH_HOLE), 4_096, 8_192);
    if lacks("punched holes", &punched) {
        return;
    }
    punched.expect("punch");
    let mut wanted = pattern(20_000, 3);
    wanted[4_096..4_096 + 8_192].fill(0);
    assert_eq!(world.content(&made.node)[..20_000], wanted);
    assert_eq!(world.attr(&made.node).size, 30_000);
}

fn data_and_holes(world: &World) {
    let (_, file) = world.file(b"file", b"");
    assert_eq!(file.seek(0, Whence::Data).map(|_| ()), Err(Errno::ENXIO), "an empty file has no data");
    file.write(&pattern(4_096, 4), 1 << 20, WriteOrigin::Caller).expect("write");
    let end = (1 << 20) + 4_096;
    let data = file.seek(0, Whence::Data);
    if lacks("holes", &data) {
        return;
    }
    let data = data.expect("seek");
    assert!(data <= 1 << 20, "data is never skipped: {data}");
    assert_eq!(file.seek(1 << 20, Whence::Data), Ok(1 << 20));
    assert_eq!(file.seek(1 << 20, Whence::Hole), Ok(end), "the end of the file is a hole");
    assert_eq!(file.seek(end, Whence::Data), Err(Errno::ENXIO));
    assert_eq!(file.seek(end, Whence::Hole), Err(Errno::ENXIO));
}

fn copies(world: &World) {
    let (_, from) = world.file(b"from", &pattern(50_000, 5));
    let (to_entry, to) = world.file(b"to", b"head");
    let copied = from.copy_to(10, to.inner(), 4, 40_000, 0);
    if matches!(copied, Err(Errno::EXDEV)) || lacks("copies", &copied) {
        return;
    }
    let mut done = copied.expect("copy");
    while done < 40_000 {
        let more = from.copy_to(10 + done, to.inner(), 4 + done, 40_000 - done, 0).expect("copy");
        assert!(more > 0, "a copy that makes no progress");
        done += more;
    }
    let content = world.content(&to_entry.node);
    assert_eq!((&content[..4], &content[4..]), (&b"head"[..], &pattern(50_000, 5)[10..40_010]));
    assert_eq!(from.copy_to(50_000, to.inner(), 0, 100, 0), Ok(0), "nothing is copied from the end");
}

fn unknown_ioctl(world: &World) {
    let (made, file) = world.file(b"file", b"");
    let request = nacre_vfs::Ioctl { command: 0xdead_beef, argument: 0, input: &[] };
    assert_eq!(file.ioctl(request, &mut []), Err(Errno::ENOTTY));
    assert_eq!(world.layer.ioctl(&world.caller, &made.node, request, &mut []), Err(Errno::ENOTTY));
}

fn durability(world: &World) {
    let (_, file) = world.file(b"file", b"content");
    file.fsync(true).expect("fdatasync");
    file.fsync(false).expect("fsync");
    file.flush(nacre_vfs::LockOwner(1)).expect("flush");
    world.layer.fsyncdir(&world.caller, &world.root, false).expect("fsyncdir");
    world.layer.syncfs().expect("syncfs");
}

fn figures(world: &World) {
    let (made, _) = world.file(b"file", b"content");
    for node in [&world.root, &made.node] {
        let figures = world.layer.statfs(&world.caller, node).expect("statfs");
        assert!(figures.fragment > 0 && figures.name_max > 0, "{figures:?}");
        assert!(figures.free <= figures.blocks && figures.available <= figures.free, "{figures:?}");
    }
}

fn large_writes(world: &World) {
    let wanted = pattern(3 << 20, 6);
    let (made, _) = world.file(b"file", &wanted);
    assert!(world.content(&made.node) == wanted, "3 MiB in one write");
    world.layer.unlink(&world.caller, &world.root, name(b"file")).expect("unlink");
}
